"""Many processes, one run: sharded weights (FSDP2), global counts, checkpoints. Every collective of this project stands in this file.

    torchrun --nproc_per_node 8 train.py        # 8 ranks; without torchrun there is one, no process group, and nothing below communicates

How the ranks stay together. What each rank wrote (token ids, rewards, log-probs: megabytes at most) is gathered, and every rank then plans the
same batch from the same data: which trajectories are kept, which microbatch is whose, every denominator. No decision is made from what one
rank alone knows, so all ranks make the same number of forwards, backwards and collectives; a rank without work does it with weight zero.

Gradients are SUMMED over the ranks (FSDP2's default is the mean), because every loss here already divides by a global count. The issue is old:
a mean over ranks of means over microbatches weighs a sequence by how few others it happened to share a microbatch with.

Random numbers: all are functions of (seed, update, row), none is drawn from a generator that lives from one update to the next. A checkpoint
therefore holds no random state of any rank, and a run may go on with another number of ranks.
"""

import atexit
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process on a laptop: that is what was meant

# ---- ranks -----------------------------------------------------------------------------------------------------------------


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def init(alone: bool = False, timeout_minutes: float = 60.0) -> None:
    """Join the process group that torchrun describes. Without torchrun do nothing, or with `alone` make a group of one (FSDP and vLLM want
    one). The time-out is as long as the longest thing that one rank does while the others wait: a server that loads 120B weights."""
    if dist.is_initialized() or ("RANK" not in os.environ and not alone):
        return
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # A torchrun that is killed leaves its ranks running, and the same command given again would write over them (seen): die with it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo beside NCCL: asynchronous checkpoints and gathered Python objects travel over the CPU (systems.md, section 4).
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    atexit.register(finish)  # after whatever is registered later: vLLM's engine has to be closed before the group


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")


def finish() -> None:
    """Leave the group. After vLLM's engine was shut down there may be none left to leave (systems.md, section 1.1)."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- counts and data -------------------------------------------------------------------------------------------------------


def gather(value) -> list:
    """`value` (anything that pickles, on the CPU) of every rank, in the order of the ranks, on every rank."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def everyone(condition: bool) -> bool:
    """Whether it holds on all ranks. On whatever one rank alone can see (a file, a clock, a finished thread), this is how to decide."""
    return all(gather(bool(condition)))


def spread(rows: Sequence) -> list:
    """This rank's share of `rows`: every world_size-th."""
    return list(rows[rank() :: world_size()])


def collect(mine: Sequence) -> list:
    """What the ranks made of their shares of spread(rows), in the order of rows, on every rank."""
    parts = gather(list(mine))
    return [parts[k % len(parts)][k // len(parts)] for k in range(sum(map(len, parts)))]


def deal(costs: Sequence[int], ranks: int) -> list[list[tuple[int, bool]]]:
    """Microbatches to ranks: one list a rank, all of the same length, of (index, real). The dearest first to whoever has least, at most one
    round apart; a rank that comes out short repeats the cheapest with real = False: same collectives, weight zero.

    >>> deal([5, 9, 4], ranks=2)
    [[(1, True), (2, False)], [(0, True), (2, True)]]
    """
    rounds = -(-len(costs) // ranks)
    hands: list[list[tuple[int, bool]]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        free = [r for r in range(ranks) if len(hands[r]) < rounds]
        hands[min(free, key=lambda r: (sum(costs[i] for i, _ in hands[r]), r))].append((index, True))
    cheapest = min(range(len(costs)), key=lambda i: costs[i], default=0)
    for hand in hands:
        hand += [(cheapest, False)] * (rounds - len(hand))
    return hands


# ---- sharded weights -------------------------------------------------------------------------------------------------------


def mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (world_size(),))


def shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype = torch.bfloat16, offload: bool = False, checkpointing: bool = True) -> nn.Module:
    """Wrap a transformers causal LM in place: every decoder layer is gathered when it runs and freed after it, the rest (embedding, last norm,
    head) is the root. Parameters keep their dtype (float32 masters), compute runs in `compute`, gradients are summed in float32.

    `offload` keeps weights, gradients and optimizer states in host memory between uses (the paper's "FSDP offloading"); `checkpointing`
    recomputes each layer in the backward pass: 148 GB become 25 at 16k tokens of 8B (systems.md, section 4).
    """
    if checkpointing:
        # transformers' own: it runs inside the layer's forward, so that FSDP's gathering happens once more for the recomputation.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy} | ({"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")} if offload else {})
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum (systems.md, section 4)
            module.set_gradient_divide_factor(1.0)
    return model


def fill(model: nn.Module, read: Callable[[str, slice], torch.Tensor], device: torch.device) -> None:
    """Give a model that was built on "meta" (and sharded) its weights, each rank its own rows: read(name, rows) -> those rows of dim 0.

    No rank ever holds a whole model: 8 ranks that each load 8B in float32 would take 257 GB of host memory, 120B in bf16 1.9 TB.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():  # tied ones appear once
        local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        start = 0
        if isinstance(parameter.data, DTensor):
            # FSDP2 cuts dim 0 as torch.chunk does: ceil(rows / ranks) each, the last ones short or empty.
            start = min(parameter.shape[0], rank() * -(-parameter.shape[0] // world_size()))
        if local.numel():
            rows = read(name, slice(start, start + local.shape[0]))
            if rows.shape != local.shape:
                raise FolderError(f"{name} is {tuple(rows.shape)} in the checkpoint and {tuple(local.shape)} in the model: another config?")
            local.copy_(rows)
    for module in model.modules():  # not in any checkpoint, and garbage after to_empty
        if hasattr(module, "inv_freq"):
            module.__init__(model.config)
            module.to(device)
    if stray := [name for name, buffer in model.named_buffers() if "inv_freq" not in name]:
        raise FolderError(f"buffers that nothing fills: {stray}")


@torch.no_grad()
def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight in `dtype`, one at a time, in the model's order. A collective: all ranks run it in step.

    Cast before it is gathered: half the traffic. The model is resharded first: after a forward the root's weights lie whole, and in the
    compute dtype (systems.md, section 1.3).
    """
    reshard(model)
    for name, parameter in model.named_parameters():
        value = parameter.detach().to(dtype)
        if isinstance(value, DTensor):
            value = value.to(device()).full_tensor()
        yield name, value


def reshard(model: nn.Module) -> None:
    if hasattr(model, "reshard"):
        model.reshard()


def clip_grad_norm(model: nn.Module, limit: float) -> float:
    """The norm of the whole gradient before clipping; over ranks it is a DTensor, whose local value is a part of the norm."""
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class FolderError(ValueError):
    """A model folder that cannot be used; the message names the file and the way out."""


class ShardFiles:
    """The safetensors files of a model folder, one or many, read lazily: read(name, rows) -> those rows of dim 0. Raises FolderError."""

    def __init__(self, folder: str | Path):
        self.folder, self.open = Path(folder), {}
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            self.files = json.loads(index.read_text())["weight_map"]
        else:
            self.files = dict.fromkeys(self._file("model.safetensors").keys(), "model.safetensors")

    def _file(self, name: str):
        if name not in self.open:
            try:
                self.open[name] = safe_open(self.folder / name, "pt")
            except (OSError, SafetensorError) as error:  # not there, or cut off
                raise FolderError(f"{self.folder / name} cannot be read ({error}); fetch or make it again") from error
        return self.open[name]

    def read(self, name: str, rows: slice) -> torch.Tensor:
        if name not in self.files:
            raise FolderError(f"{self.folder} has no tensor {name}: not a checkpoint of this kind of model")
        return self._file(self.files[name]).get_slice(name)[rows.start : rows.stop]


# ---- checkpoints -----------------------------------------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the folder and the way out."""


def _cause(error: BaseException) -> str:
    """One line. dcp wraps what happened on any rank in a CheckpointException (no Exception, in torch), whose text is a page of tracebacks."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}".removesuffix(": ")


class Checkpoints:
    """`folder`/step-N: model, optimizer and what the run says about itself, written in the background and renamed when every rank is done.

    A killed save leaves a step-N.tmp that nobody reads. The newest `keep` are kept.
    """

    def __init__(self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2):
        self.folder, self.model, self.optimizer, self.keep = Path(folder), model, optimizer, keep
        self.saving: tuple[Future, int] | None = None
        # The thread that writes talks to the other ranks' threads while the run does: on the run's own group the two would take each
        # other's messages (gloo aborts: "Received data size doesn't match").
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, step: int, run: dict) -> None:
        """Copy the state (the run may go on) and write it. `run` is plain data that every rank has alike. Waits for an earlier save."""
        self.settle(wait=True)
        temporary = self.folder / f"step-{step}.tmp"
        if rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
        everyone(True)  # nobody writes into what rank 0 still removes
        weights, moments = get_state_dict(self.model, self.optimizer, options=StateDictOptions(ignore_frozen_params=True))
        state = {"model": weights, "optimizer": moments}
        if rank() == 0:
            temporary.mkdir()
            (temporary / "run.json").write_text(json.dumps(run | {"step": step}, indent=1))
        everyone(True)
        if dist.is_initialized():
            self.saving = dcp.async_save(state, checkpoint_id=temporary, process_group=self.group), step
        else:  # one process on a laptop: a few megabytes, and no group that a background thread could talk to
            self._written(step, lambda: dcp.save(state, checkpoint_id=temporary, no_dist=True))
            self._rename(step)

    def settle(self, wait: bool = False) -> None:
        """Rename a save that has finished on all ranks. Called once an update, on all ranks; `wait` for the last one."""
        if self.saving is None:
            return
        future, step = self.saving
        if wait:
            self._written(step, future.result)
        if everyone(future.done()):
            self._written(step, future.result)
            self.saving = None
            self._rename(step)

    def _written(self, step: int, finish: Callable[[], object]) -> None:
        """finish(); a full disk is raised here."""
        try:
            finish()
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"{self.folder}/step-{step} cannot be written ({_cause(error)}); make room, and give the same command again") from error

    def _rename(self, step: int) -> None:
        if rank() == 0:
            shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)
            (self.folder / f"step-{step}.tmp").rename(self.folder / f"step-{step}")
            for old in sorted(self.steps())[: -self.keep]:
                shutil.rmtree(self.folder / f"step-{old}")
        everyone(True)

    def steps(self) -> list[int]:
        return [int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdigit()]

    def load(self, run: dict, free: Sequence[str] = ()) -> int:
        """The newest checkpoint into model and optimizer, on any number of ranks; returns its step, 0 when there is none.

        Raises CheckpointError when it cannot be read, or when its run differs from `run` in a key that is not in `free`.
        """
        step = max(gather(max(self.steps(), default=0)))
        if not step:
            return 0
        folder = self.folder / f"step-{step}"
        try:
            then = json.loads((folder / "run.json").read_text())
            now = json.loads(json.dumps(run))
            if changed := [key for key in now if key not in free and then.get(key) != now[key]]:
                raise CheckpointError(f"{folder} is from another config ({', '.join(changed)} changed); give another --out, or delete {self.folder} to start again")
            dcp.FileSystemReader(folder).read_metadata()  # of a damaged one dcp.load would first log two tracebacks
            weights, moments = get_state_dict(self.model, self.optimizer, options=StateDictOptions(ignore_frozen_params=True))
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=folder, process_group=self.group, no_dist=not dist.is_initialized())
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:  # what a damaged file does to pickle and zip is anything
            raise CheckpointError(f"{folder} cannot be read ({_cause(error)}); delete it to go on from the one before") from error
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=StateDictOptions(strict=False))
        return step
