"""Many processes, one run: sharded weights (FSDP2), global counts, checkpoints.

Every collective of this project stands in this file.

    torchrun --nproc_per_node 8 train.py    # 8 ranks
    python train.py                         # one rank, no process group: nothing below communicates

How the ranks stay together. What each rank wrote (token ids, rewards, log-probs: megabytes at most) is
gathered. Every rank then plans the same batch from the same data: which trajectories are kept, which rank
gets which microbatch, every denominator. No decision rests on what one rank alone knows. So all ranks make
the same number of forwards, backwards and collectives. A rank without work repeats a microbatch, and its
weight is zero.

Gradients are SUMMED over the ranks (FSDP2's default is the mean), because every loss here already divides by
a global count (NOTES 9.1). The bug this avoids is old: in a mean over ranks of means over microbatches, a
sequence that shares its microbatch with many others weighs less than one that shares it with few.

Random numbers are functions of (seed, update, row). No generator lives from one update to the next. A
checkpoint therefore holds no random state of any rank, and a run may go on with another number of ranks.
"""

import atexit
import ctypes
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# A laptop has one process and no group, and torch warns about it.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

# ---- ranks -------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1  # linux/prctl.h
DRIVER = Path("/proc/driver/nvidia/version")  # NVIDIA's, where it is loaded


def init(alone: bool = False, timeout_minutes: float = 180.0) -> None:
    """Join the process group that torchrun describes. Without torchrun make a group of one rank on a GPU, or
    with `alone` (FSDP and vLLM need a group), and do nothing otherwise.

    A single GPU has a group because only a sharded model recomputes its layers in the backward pass and takes
    packed batches (shard). Unsharded, 1B parameters at 8k tokens took 35 GB and not 22.

    The time-out is longer than all that one rank does while the others wait: two servers, one after another,
    that load 120B weights and may be started again (recipe.ServerConfig). Raises ValueError where a rank has
    no GPU of its own.
    """
    alone = alone or torch.cuda.is_available()
    if dist.is_initialized() or ("RANK" not in os.environ and not alone):
        return
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # When torchrun is killed, its ranks would live on, and the same command given again would write over
        # their files (seen). So a rank dies with its torchrun.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if torch.cuda.is_available():
        if 0 < torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
            raise ValueError(f"rank {os.environ['LOCAL_RANK']} of this machine has no GPU; give torchrun "
                             f"--nproc_per_node {torch.cuda.device_count()}")
        _allocate_in_expandable_segments()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo beside NCCL: asynchronous checkpoints and gathered Python objects travel over the CPU (NOTES 9.3).
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    # atexit runs last what was registered first: vLLM's engine, registered later, is closed before the group.
    atexit.register(finish)
    if world_size() > 1:
        sys.excepthook = _leave_with_traceback


def _allocate_in_expandable_segments() -> None:
    """Let CUDA's memory grow in place: microbatches whose lengths keep changing leave gaps otherwise,
    gigabytes of them (NOTES 9.12). Only where the user has not chosen: in the environment the choice is
    theirs.

    For this process, by torch's own call. A variable of the environment would reach the servers, too, and
    one over several GPUs dies of it.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def leave(code: int) -> NoReturn:
    """End this rank, one of several, without what else is done at exit: there `finish` waits, on NCCL, for
    ranks that sit in a collective, and torchrun ends those only when this process has ended. Servers end all
    the same: their supervisors see the pipe close."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where nobody reads them any more
        os._exit(code)


def _leave_with_traceback(*error) -> None:
    """sys.excepthook of each of several ranks."""
    try:
        sys.__excepthook__(*error)
    finally:
        leave(1)


def say_once(program: str, error: str, seconds: float, before: str = "") -> None:
    """Print an error of this rank, and lines that go `before` it, unless another rank says the same. It names
    the rank, unless within `seconds` all ranks have failed of it.

    The first rank that fails speaks. The others wait for it, as torchrun ends all ranks when one has ended.
    Ranks that fail are in no collective together. So they meet at torchrun's store.
    """
    rank, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    key = f"failed {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {error}"
    speaks, failed = True, 1
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store, end = dist.TCPStore(*address, timeout=timedelta(seconds=60)), time.monotonic() + seconds
        speaks = store.add(key, 1) == 1
        while speaks and (failed := store.add(key, 0)) < ranks and time.monotonic() < end:
            time.sleep(0.05)
        if not speaks:
            store.wait([f"{key} said"])
    except (KeyError, RuntimeError):  # there is no store (any more): each rank speaks for itself
        store = None
    if speaks:
        who = "" if failed == ranks else f"rank {rank}: "
        print(f"{before}{program}: {who}{error}", file=sys.stderr, flush=True)
        if store:
            store.set(f"{key} said", "yes")


def grouped() -> bool:
    """Whether there is a process group, of one rank or of several. Models that are trained are then sharded
    (cpu.load_to_train)."""
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def unusable_gpu() -> str:
    """Why torch cannot use the GPU of a machine that has NVIDIA's driver, in torch's words (too old, say); ""
    where there is no GPU, or nothing is wrong."""
    if torch.cuda.is_available() or not DRIVER.exists():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch's build for CPUs
        return " ".join(str(error).split())
    return "torch finds none"


def finish() -> None:
    """Leave the group, unless vLLM's engine has destroyed it already: its shutdown does (NOTES 7.4)."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- counts and data ---------------------------------------------------------------------------------------


def gather(value) -> list:
    """`value` (anything that pickles, on the CPU) of every rank, in the order of the ranks, on every rank.

    On two ranks gather(rank()) is [0, 1] on both.
    """
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def all_true(condition: bool) -> bool:
    """Whether the condition holds on all ranks. Use it wherever a rank decides by what it alone can see: a
    file, a clock, a finished thread. future.done() may differ between ranks, all_true(future.done()) does
    not."""
    return all(gather(bool(condition)))


def barrier() -> None:
    """Wait for all ranks. A file that rank 0 wrote before the barrier is there for every rank after it."""
    gather(None)


def shard_rows(rows: Sequence) -> list:
    """This rank's share of `rows`: every world_size-th. Of [a, b, c, d, e] rank 0 of 2 gets [a, c, e]."""
    return list(rows[rank() :: world_size()])


def collect(mine: Sequence) -> list:
    """The inverse of shard_rows: the ranks' results, in the order of the rows, on every rank.

    Rank 0 gives [A, C, E] and rank 1 gives [B, D]; both get [A, B, C, D, E].
    """
    parts = gather(list(mine))
    return [parts[k % len(parts)][k // len(parts)] for k in range(sum(map(len, parts)))]


def assign(costs: Sequence[float], ranks: int) -> list[list[tuple[int, float]]]:
    """Each rank's share of the microbatches: a list of (index, weight), equally long on all ranks.

    With a sharded model the ranks go through round j of their shares together, layer by layer: it takes as
    long as its most expensive microbatch. So the most expensive microbatches, one for each rank, are the
    first round, and the next are the second. Within a round the rank with the least to do so far gets the
    most. A rank that comes out short repeats the cheapest microbatch with weight 0.0: it joins all
    collectives, adds nothing.

    >>> assign([5, 9, 4], ranks=2)
    [[(1, 1.0), (2, 0.0)], [(0, 1.0), (2, 1.0)]]
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    shares: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for start in range(0, len(order), ranks):
        free = sorted(range(ranks), key=lambda r: (load[r], r))
        for index, r in zip(order[start : start + ranks], free):
            shares[r].append((index, 1.0))
            load[r] += costs[index]
    for share in shares:  # order[-1:]: there may be no microbatch
        share += [(index, 0.0) for index in order[-1:] if len(share) < math.ceil(len(costs) / ranks)]
    return shares


def slowest(costs: Sequence[float], ranks: int) -> float:
    """How long a step of microbatches with these costs takes: the most expensive one of every round of
    assign(), added up.

    >>> slowest([5, 9, 4], ranks=2)
    13
    """
    return sum(max(costs[index] for index, _ in together) for together in zip(*assign(costs, ranks)))


def idle(steps: Sequence[Sequence[int]], ranks: int) -> float:
    """The share of the ranks' time in which a rank has no microbatch of its own: it waits for the rank with
    the most expensive one of the round, or repeats one. `steps` are the costs of each step's microbatches, in
    tokens, which are assigned step by step.

    A token counts alike in a short sequence and in a long one, where attention takes longer.

    >>> idle([[5, 9, 4]], ranks=2)  # 2 ranks x (9 + 4), of which 5 + 9 + 4 are work
    0.3076923076923077
    """
    taken = ranks * sum(slowest(costs, ranks) for costs in steps)
    return 1 - sum(map(sum, steps)) / taken if taken else 0.0


# ---- sharded weights ---------------------------------------------------------------------------------------


def mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (world_size(),))


def shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype = torch.bfloat16, offload: bool = False,
          checkpointing: bool = True) -> nn.Module:
    """Wrap a transformers causal LM in place. Every decoder layer is gathered when it runs and freed after
    it; the rest (embedding, last norm, head) is FSDP's root.

    Parameters keep their dtype (float32 masters), matrix products run in `compute`, gradients are summed in
    float32. `offload` keeps weights, gradients and optimizer states in host memory between uses (the paper's
    "FSDP offloading"). `checkpointing` recomputes each layer in the backward pass: 148 GB become 25, at 16k
    tokens of 8B (NOTES 9.8).
    """
    if checkpointing:
        # transformers' own checkpointing runs inside the layer's forward: FSDP gathers the layer once more
        # for the recomputation.
        model.gradient_checkpointing_enable(  # type: ignore[operator]  # transformers' method
            gradient_checkpointing_kwargs={"use_reentrant": False})
    param_dtype = None if compute == torch.float32 else compute
    options: dict = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        torch.set_num_threads(own_threads())
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum (NOTES 9.1)
            module.set_gradient_divide_factor(1.0)
    return model


def own_threads() -> int:
    """The threads of a rank whose Adam works in host memory: its share of the cores. torchrun says
    OMP_NUM_THREADS=1 to each of several ranks where the user has not chosen, and an update of 8B over 8 ranks
    would take 10 to 15 s (reckoned). A number that the user chose stays."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks == 1 or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class FolderError(ValueError):
    """A model folder that cannot be used. The message names the file and the way out."""


def load_rows(model: nn.Module, read: Callable[[str, slice], torch.Tensor], device: torch.device) -> None:
    """Fill a model that was built on "meta" (and sharded) with its weights. read(name, rows) returns those
    rows of dim 0, and each rank reads its own. Raises FolderError where a tensor does not fit the model.

    No rank ever holds a whole model: 8 ranks that each load 8B in float32 would take 257 GB of host memory,
    and 120B in bf16 1.9 TB.
    """
    model.to_empty(device=device)
    if hasattr(model, "tie_weights") and not any(isinstance(p, DTensor) for p in model.parameters()):
        # to_empty made two tensors of a head that is the embedding
        model.tie_weights()  # type: ignore[operator]  # transformers' method
    for name, parameter in model.named_parameters():  # a tied parameter appears once
        local, start = parameter.data, 0
        if isinstance(local, DTensor):
            # FSDP2 cuts dim 0 as torch.chunk does: ceil(rows / ranks) each, the last ranks short or empty.
            start = min(parameter.shape[0], rank() * math.ceil(parameter.shape[0] / world_size()))
            local = local.to_local()
        if local.numel():
            rows = read(name, slice(start, start + local.shape[0]))
            if rows.shape != local.shape:
                differ = f"is {tuple(rows.shape)} in the checkpoint and {tuple(local.shape)} in the model"
                raise FolderError(f"{name} {differ}: another config?")
            local.copy_(rows)
    if stray := _fill_buffers(model):
        raise FolderError(f"buffers of {type(model).__name__} that nothing fills: {', '.join(stray)}; take "
                          "another model")


@torch.no_grad()
def _fill_buffers(model: nn.Module) -> list[str]:
    """Rotary frequencies and their like are in no checkpoint, and garbage after to_empty. transformers'
    _init_weights, which each of its models overrides, knows how they are made. Returns the names of those
    that it left as they were. (Of a bool that cannot be seen.)"""
    for buffer in model.buffers():
        buffer.fill_(math.nan if buffer.is_floating_point() else -1)
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None and hasattr(model, "_init_weights"):
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # it leaves these alone
            model._init_weights(module)  # type: ignore[operator]
    return [name for name, buffer in model.named_buffers()
            if buffer.dtype == torch.bool or not (buffer.isfinite() & (buffer != -1)).all()]


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor, gathered whole to this rank's device; any other tensor as it is. All ranks call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(device()).full_tensor()  # type: ignore[attr-defined]  # still a DTensor
    return tensor


@torch.no_grad()
def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight in `dtype`, in the model's order. All ranks iterate together.

    The cast comes before the gathering, which halves the traffic. The model is resharded first: after a
    forward the root's weights lie whole, in the compute dtype (NOTES 9.2).
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    for name, parameter in model.named_parameters():
        yield name, gathered(parameter.detach().to(dtype))


def zero_gradients(model: nn.Module) -> None:
    """A gradient of zero for every trained weight, where no backward pass was run.

    A backward pass also frees FSDP's gathered copy of embedding, last norm and head. Without one they are
    freed here, or the next forward would use that copy, from before the step (NOTES 9.2).
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def clip_grad_norm(model: nn.Module, limit: float) -> float:
    """Clip the gradient to norm `limit`; returns the norm before. All ranks call it.

    Of sharded weights the norm is a DTensor: its local value is the norm of this rank's part alone. Raises
    ValueError where the norm is not finite, on all ranks alike: a step would make every weight nan, and the
    next checkpoint would keep them.
    """
    total = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if not math.isfinite(norm):
        raise ValueError(f"the gradient's norm is {norm}: this step was not made, and the last checkpoint is "
                         "good. The same command goes on from it; if that ends here again, lower the "
                         "learning rate (and give another --out)")
    return norm


# ---- a folder of safetensors files -------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: str
    """As safetensors writes it: "BF16", "U8"."""
    shape: tuple[int, ...]
    start: int
    """The tensor is the bytes [start, end) of the file."""
    end: int


class ShardFiles:
    """The safetensors files of a model's folder. `entries`, {name: Entry}, is read from their headers.

    The folder's index says which files they are. Many published folders have none (NOTES 6.8); there it is
    every *.safetensors at the top of the folder, whatever its name.

    Raises FolderError for a folder without a model, for a file that is missing or cut off, for a tensor that
    the index promises and no file holds, and for a tensor that two files hold.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self.open: dict[Path, safe_open] = {}
        if not (self.folder / "config.json").exists():
            raise FolderError(f"{folder} holds no model (no config.json)")
        index = self.folder / "model.safetensors.index.json"
        self.index = index.exists()
        try:
            promised = dict(json.loads(index.read_text())["weight_map"]) if self.index else {}
        except (ValueError, LookupError, TypeError) as error:
            raise FolderError(f"{index} is damaged ({error!r}); download it again") from error
        # Files at the top only: OpenAI's folder has the same weights twice more, in original/ and metal/.
        for name in sorted(set(promised.values())) or _unlisted(self.folder):
            found = _read_header(self.folder / name)
            if twice := sorted(found.keys() & self.entries.keys()):
                files = f"{self.entries[twice[0]].file.name} and {name}"
                raise FolderError(f"{folder}: both {files} hold {twice[0]}; remove the older files")
            self.entries |= found
        if missing := sorted(set(promised) - set(self.entries)):
            lost = f"{len(missing)} tensors that no file holds, first {missing[0]}"
            raise FolderError(f"{folder}: its index lists {lost}; download it again")

    @property
    def weights(self) -> set[str]:
        """The names of all tensors but rotary frequencies, which older folders hold and nobody reads."""
        return {name for name in self.entries if not name.endswith("rotary_emb.inv_freq")}

    def check(self, wanted: set[str], known: Set[str] = frozenset()) -> None:
        """Raises FolderError when a weight that is `wanted` is in no file, or when a file holds a tensor that
        is neither wanted nor `known`: half a model would be loaded without a word."""
        there = self.weights
        if missing := sorted(wanted - there):
            raise FolderError(f"{self.folder}: {len(missing)} weights of its config are in no file, "
                              f"first {missing[0]}; download it again")
        if strange := sorted(there - wanted - known):
            raise FolderError(f"{self.folder}: {len(strange)} tensors have no place in its config, "
                              f"first {strange[0]}; is a file of another model in it?")

    def read(self, name: str, rows: slice) -> torch.Tensor:
        """Those rows of dim 0 of a tensor. Raises FolderError."""
        if name not in self.entries:
            raise FolderError(f"{self.folder} has no tensor {name}: not a checkpoint of this kind of model")
        file = self.entries[name].file
        if file not in self.open:
            try:
                self.open[file] = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise FolderError(f"{file} cannot be read ({error}); fetch or make it again") from error
        return self.open[file].get_slice(name)[rows.start : rows.stop]


def _unlisted(folder: Path) -> list[str]:
    """The names of a folder's safetensors files where no index lists them. Raises FolderError when there are
    none, or not all of `-0000k-of-0000n`."""
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    convert = ""
    if any(folder.glob("pytorch_model*.bin")):
        convert = ("; make it from its .bin files: python -c \"from transformers import "
                   f"AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
                   f".save_pretrained('{folder}')\"")
    if not names:
        raise FolderError(f"{folder} has no .safetensors file{convert or '; download it again'}")
    for name in names:
        part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", name)
        stem, count = part.groups() if part else ("", "0")
        for k in range(1, int(count) + 1):
            other = f"{stem}-{k:05}-of-{count}.safetensors"
            if other not in names:
                raise FolderError(f"{folder / other} is missing{convert or '; download it again'}")
    return names


def _read_header(file: Path) -> dict[str, Entry]:
    """The entries of one file. Its header is 8 bytes of length, then JSON. Raises FolderError."""
    entries = {}
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if 8 + length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            if end > size:
                raise ValueError(f"{name} ends at byte {end} of {size}")
            entries[name] = Entry(file, tensor["dtype"], tuple(tensor["shape"]), start, end)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise FolderError(f"{file} is cut off or missing ({error}); download it again") from error
    return entries


# ---- checkpoints -------------------------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the folder and the way out."""


def _cause(error: BaseException) -> str:
    """The error in one line. dcp wraps what happened on any rank in a CheckpointException (in torch not a
    subclass of Exception), whose text is a page of tracebacks."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}".removesuffix(": ")


class Checkpoints:
    """`folder`/step-N: model, optimizer and the run's description of itself. A checkpoint is written in the
    background as step-N.tmp and renamed when every rank is done.

    A save that is killed leaves a step-N.tmp, which nobody reads. The newest `keep` checkpoints are kept.
    """

    def __init__(self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2):
        self.folder, self.model, self.optimizer, self.keep = Path(folder), model, optimizer, keep
        self.saving: tuple[Future, int] | None = None
        # The thread that writes talks to the other ranks' threads while the run talks, too. In the run's own
        # group they would take each other's messages (gloo aborts: "Received data size doesn't match").
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def _state(self, moments: bool) -> dict:
        """Weights, and the optimizer's `moments`. An optimizer that has none yet is left alone: torch's
        get_state_dict would make some by a step of its own, and Adam's first step would then count as its
        second (.74 of its length at betas .9 and .98)."""
        options = StateDictOptions(ignore_frozen_params=True)
        if not moments:
            return {"model": get_model_state_dict(self.model, options=options)}
        weights, state = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": weights, "optimizer": state}

    def save(self, step: int, run: dict) -> None:
        """Copy the state (training may go on) and write it. `run` is plain data, the same on every rank.

        Waits for an earlier save. All ranks call it. Raises CheckpointError when the disk is full.
        """
        self.settle(wait=True)
        temporary = self.folder / f"step-{step}.tmp"
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # of a save that was killed
            temporary.mkdir(parents=True)
            (temporary / "run.json").write_text(json.dumps(run | {"step": step}, indent=1))
        barrier()  # nobody writes into a folder that rank 0 still clears
        state = self._state(bool(self.optimizer.state))
        if dist.is_initialized():
            future = dcp.async_save(state, checkpoint_id=temporary, process_group=self.group)
            assert isinstance(future, Future)
            self.saving = future, step
        else:  # one process on a laptop: a few megabytes, and no group that a background thread could talk to
            self._written(step, lambda: dcp.save(state, checkpoint_id=temporary, no_dist=True))
            self._rename(step)

    def settle(self, wait: bool = False) -> None:
        """Rename a save that has finished on all ranks, or with `wait` wait until it has.

        All ranks call it, once an update. Raises CheckpointError when the disk is full.
        """
        if self.saving is None:
            return
        future, step = self.saving
        if wait:
            self._written(step, future.result)
        if all_true(future.done()):
            self._written(step, future.result)
            self.saving = None
            self._rename(step)

    def _written(self, step: int, finish: Callable[[], object]) -> None:
        """Call finish(). A disk's error becomes a CheckpointError."""
        try:
            finish()
        except (OSError, CheckpointException) as error:
            what = f"{self.folder}/step-{step} cannot be written ({_cause(error)})"
            raise CheckpointError(f"{what}; make room, and give the same command again") from error

    def _rename(self, step: int) -> None:
        if rank() == 0:
            shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)
            (self.folder / f"step-{step}.tmp").rename(self.folder / f"step-{step}")
            for old in sorted(self.steps())[: -self.keep]:
                shutil.rmtree(self.folder / f"step-{old}")
        barrier()

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are whole, in no order."""
        return [int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdigit()]

    def load(self, run: dict, free: Sequence[str] = ()) -> int:
        """Load the newest checkpoint into model and optimizer, on any number of ranks. Returns its step, or 0
        when there is none. All ranks call it.

        Raises CheckpointError when it cannot be read, or when its run differs from `run` in a key that is not
        in `free`.
        """
        step = max(gather(max(self.steps(), default=0)))
        if not step:
            return 0
        folder = self.folder / f"step-{step}"
        try:
            then, now = json.loads((folder / "run.json").read_text()), json.loads(json.dumps(run))
            if changed := [key for key in now if key not in free and then.get(key) != now[key]]:
                first = changed[0]  # of a word, such as a type that `auto` chose, say which it was
                told = isinstance(now[first], str) and len(changed) == 1
                how = f" from {then.get(first)} to {now[first]}" if told else ""
                what = f"{folder} is from another config ({', '.join(changed)} changed{how})"
                raise CheckpointError(f"{what}; give another --out, or delete {self.folder} to start again")
            # Read first: dcp.load logs two tracebacks, if it is damaged.
            kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            state = self._state(any(name.startswith("optimizer.") for name in kept))
            dcp.load(state, checkpoint_id=folder, process_group=self.group, no_dist=not dist.is_initialized())
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:  # pickle and zip raise anything
            what = f"{folder} cannot be read ({_cause(error)})"
            raise CheckpointError(f"{what}; delete it to go on from the one before") from error
        options = StateDictOptions(strict=False)
        if "optimizer" in state:
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"], options=options)
        else:  # it was saved before the first step
            set_model_state_dict(self.model, state["model"], options=options)
        return step
