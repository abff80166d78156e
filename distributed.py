"""Many processes, one run: sharded weights (FSDP2), folders read into shards, global counts, checkpoints.

Every collective of this project stands in this file.

    torchrun --nproc_per_node 8 train.py    # 8 ranks
    python train.py                         # one rank, no process group: nothing below communicates

How the ranks stay together. What each rank wrote (token ids, rewards, log-probs: megabytes at most) is
gathered. Every rank then plans the same batch from the same data: which trajectories are learned from, which
rank gets which microbatch, every denominator. No decision rests on what one rank alone knows. So all ranks
make the same number of forwards, backwards and collectives. A rank without work repeats a microbatch, and its
weight is zero.

Gradients are SUMMED over the ranks (FSDP2's default is the mean), because every loss here already divides by
a global count (NOTES 9.1). The bug this avoids is old: in a mean over ranks of means over microbatches, a
sequence that shares its microbatch with many others weighs less than one that shares it with few.

Random numbers are functions of (seed, update, row). No generator lives from one update to the next, so a
checkpoint holds no random state of any rank.
"""

import json
import math
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, empty

from config import UserError

# A laptop has one process and no group, and torch warns about it.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

# ---- ranks -------------------------------------------------------------------------------------------------


def init(alone: bool = False, timeout_minutes: float = 180.0) -> None:
    """Join the process group that torchrun describes. Without torchrun make a group of one rank on a GPU, or
    with `alone` (FSDP and vLLM need a group), and do nothing otherwise.

    A single GPU has a group because only a sharded model recomputes its layers in the backward pass (shard).
    The time-out is longer than all that one rank does while the others wait: two servers that load 120B
    weights, one after another. Raises UserError where a rank has no GPU of its own.
    """
    if dist.is_initialized() or not ("RANK" in os.environ or alone or torch.cuda.is_available()):
        return
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(probe.getsockname()[1])}
    if torch.cuda.is_available():
        if torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
            raise UserError(f"rank {os.environ['LOCAL_RANK']} of this machine has no GPU; give torchrun "
                            f"--nproc_per_node {torch.cuda.device_count()}")
        # Memory that grows in place: microbatches whose lengths keep changing leave gaps of gigabytes
        # otherwise (NOTES 9.12). By torch's own call: a variable would reach the servers, and one over
        # several GPUs dies of it.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo beside NCCL: gathered Python objects travel over the CPU (NOTES 9.3).
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))


def finish() -> None:
    """Leave the group, at the end of a command that went well. (After an error a rank just ends, and torchrun
    ends the others: to leave would wait for ranks that sit in a collective.)"""
    if dist.is_initialized():
        dist.destroy_process_group()


def command(work: Callable[[], dict | None], alone: bool = False) -> None:
    """The body of a command: join the other ranks, do the work, print its report on rank 0. A UserError is a
    line; every other error keeps its traceback."""
    try:
        init(alone)
        report = work()
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}{f' (rank {rank()})' if world_size() > 1 else ''}: {error}")
    if report and rank() == 0:
        print(json.dumps(report, indent=1))
    finish()


def grouped() -> bool:
    """Whether there is a process group, of one rank or of several. Models that are trained are then
    sharded."""
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


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


def idle(steps: Sequence[Sequence[int]], ranks: int) -> float:
    """The share of the ranks' time in which a rank waits for the one with the most expensive microbatch of
    the round, or repeats one. `steps` are the costs of each step's microbatches, in tokens.

    >>> idle([[5, 9, 4]], ranks=2)  # 2 ranks x (9 + 4), of which 5 + 9 + 4 are work
    0.3076923076923077
    """
    rounds = [[costs[index] for index, _ in together]
              for costs in steps for together in zip(*assign(costs, ranks))]
    taken = ranks * sum(map(max, rounds))
    return 1 - sum(map(sum, steps)) / taken if taken else 0.0


# ---- sharded weights ---------------------------------------------------------------------------------------


def shard(model: nn.Module, compute: torch.dtype = torch.bfloat16, offload: bool = False) -> nn.Module:
    """Wrap a transformers causal LM in place. Every decoder layer is gathered when it runs and freed after
    it; the rest (embedding, last norm, head) is FSDP's root.

    Parameters keep their dtype (float32 masters), matrix products run in `compute`, gradients are summed in
    float32. `offload` keeps weights, gradients and optimizer states in host memory between uses (the paper's
    "FSDP offloading"). Each layer is recomputed in the backward pass: 148 GB become 25, at 16k tokens of 8B
    (NOTES 9.8).
    """
    # transformers' own checkpointing runs inside the layer's forward: FSDP gathers the layer once more for
    # the recomputation.
    model.gradient_checkpointing_enable(  # type: ignore[operator]  # transformers' method
        gradient_checkpointing_kwargs={"use_reentrant": False})
    param_dtype = None if compute == torch.float32 else compute
    options: dict = {"mesh": init_device_mesh(device().type, (world_size(),)),
                     "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)}
    if offload:  # Adam works on the CPU then, and torchrun says one thread to each rank
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum (NOTES 9.1)
            module.set_gradient_divide_factor(1.0)
    return model


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path, home: torch.device,
                 unpack: Callable[..., torch.Tensor] | None = None) -> None:
    """Fill a transformers model that was built on "meta" (and sharded) from a folder's safetensors files.
    Each rank reads its own rows: 8 ranks that each load 8B in float32 would take 257 GB of host memory.

    Adapters (".lora_") are not in the folder, and left to the caller. A weight whose NAME_blocks and
    NAME_scales are there is unpack(blocks, scales) of this rank's rows (gpt_oss.py). Raises UserError for a
    folder that does not hold this model, whole and once.
    """
    model.to_empty(device=home)
    if not isinstance(next(model.parameters()), DTensor):
        model.tie_weights()  # type: ignore[operator]  # to_empty made two tensors of a tied head
    _fill_buffers(model, folder)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        there: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)  # of headers only
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read ({error}); download or make it again") from error
    plain = lambda name: name.replace(".base_layer.", ".")
    # named_parameters() and not state_dict(): a tied head appears once, and buffers not at all.
    named = {plain(name): p for name, p in model.named_parameters() if ".lora_" not in name}
    packed = {name: named.pop(name) for name in list(named) if unpack and f"{name}_blocks" in there}
    parts = {name + part for name in packed for part in ("_blocks", "_scales")}
    known = {plain(name) for name in model.state_dict()} | parts
    # Of these dcp notices the first and the last. It ignores a weight that is not the model's, and takes
    # either of two files that both hold one.
    wrong = {"is missing": (named.keys() | parts) - there.keys(),
             "has no place in it": {n for n in there.keys() - known if not n.endswith("inv_freq")},
             "is in two files": {n for n in there if len(there[n].chunks) > 1},
             "has another shape": {n for n in named if n in there and there[n].size != named[n].shape}}
    for what, names in wrong.items():
        if names:
            raise UserError(f"{folder} does not hold the model of its config.json: {min(names)} {what} "
                            f"({len(names)} such); download it again, or take another model")
    dcp.load(dict(named), storage_reader=reader, no_dist=not grouped())
    for name, parameter in packed.items():  # one at a time: the blocks of all would not fit beside the rest
        read = {name + part: torch.empty(there[name + part].size, dtype=torch.uint8, device=home)
                for part in ("_blocks", "_scales")}
        if isinstance(parameter, DTensor):
            read = {part: empty(*whole.shape, dtype=torch.uint8, device_mesh=parameter.device_mesh,
                                placements=parameter.placements) for part, whole in read.items()}
        dcp.load(read, storage_reader=reader, no_dist=not grouped())
        _local(parameter).copy_(unpack(*map(_local, read.values())))  # type: ignore[misc]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fill_buffers(model: nn.Module, folder: str | Path) -> None:
    """Rotary frequencies and their like are in no file, and garbage after to_empty. transformers'
    _init_weights, which each of its models overrides, knows how they are made; nan shows those that it left.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # _init_weights leaves these alone
    for buffer in model.buffers():
        buffer.fill_(math.nan if buffer.is_floating_point() else -1)
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)  # type: ignore[operator]
    for name, buffer in model.named_buffers():
        if buffer.dtype == torch.bool or not (buffer.isfinite() & (buffer != -1)).all():
            raise UserError(f"{folder}: nothing fills the model's buffer {name}; take another model")


@torch.no_grad()
def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight in `dtype`, in the model's order. All ranks iterate together.

    The cast comes before the gathering, which halves the traffic. The model is resharded first: after a
    forward the root's weights lie whole, in the compute dtype (NOTES 9.2).
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    for name, parameter in model.named_parameters():  # a tied weight appears once
        yield name, gathered(parameter.detach().to(dtype))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor, gathered whole to this rank's device; any other tensor as it is. All ranks call it."""
    return tensor.to(device()).full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore


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
    UserError where the norm is not finite, on all ranks alike: a step would make every weight nan, and the
    next checkpoint would keep them.
    """
    total = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
    norm = float(gathered(total))
    if not math.isfinite(norm):
        raise UserError(f"the gradient's norm is {norm}: this step was not made, and the last checkpoint is "
                        "good. The same command goes on from it; if that ends here again, lower the "
                        "learning rate (and give another --out)")
    return norm


# ---- checkpoints -------------------------------------------------------------------------------------------


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    # ignore_frozen_params keeps a head that is tied to a frozen embedding: 71 MB in place of LoRA's 14
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {"model": {n: w for n, w in weights.items() if n not in frozen}, "optimizer": moments}


def _newest(folder: str | Path) -> list[Path]:
    """The checkpoints that are whole, the newest last: dcp writes .metadata last, and renames it."""
    return sorted((file.parent for file in Path(folder).glob("step-*/.metadata")),
                  key=lambda path: int(path.name[5:]))


def save_checkpoint(folder: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
                    run: dict, keep: int = 2) -> None:
    """Write folder/step-N: model, optimizer, and `run`, plain data that describes the run. The newest `keep`
    stay. All ranks call it. Raises UserError when the disk is full.

    Before the optimizer's first step nothing is written: nothing was learned, and get_state_dict would make
    moments by a step of its own, after which Adam counts its first step as its second.
    """
    if not optimizer.state:
        return
    path = Path(folder) / f"step-{step}"
    try:
        dcp.save(_state(model, optimizer) | {"run": json.dumps(run)}, checkpoint_id=path,
                 no_dist=not grouped())
    except (OSError, CheckpointException) as error:  # CheckpointException is no Exception
        raise UserError(f"{path} cannot be written ({_cause(error)}); make room, and give the same command "
                        "again") from error
    for old in _newest(folder)[:-keep] if rank() == 0 else []:
        shutil.rmtree(old)
    barrier()


def load_checkpoint(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict,
                    may_change: Sequence[str] = ()) -> int:
    """Load the newest checkpoint into model and optimizer, on any number of ranks. Returns its step, or 0
    when there is none. All ranks call it. Raises UserError when it cannot be read, or when its run differs
    from `run` in a key that is not in `may_change`."""
    if not (paths := _newest(folder)):
        return 0
    state: dict[str, Any] = {"run": ""}
    path = paths[-1]
    try:
        dcp.load(state, checkpoint_id=path, no_dist=not grouped())
        then, now = json.loads(state["run"]), json.loads(json.dumps(run))
        for key in now.keys() - set(may_change):
            if then.get(key) != now[key]:
                raise UserError(f"{path} is from another config ({key} was {str(then.get(key))[:200]} and is "
                                f"{str(now[key])[:200]}); give another --out, or delete {folder}")
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=path, no_dist=not grouped())
    except (OSError, CheckpointException) as error:
        raise UserError(f"{path} cannot be read ({_cause(error)}); delete it to go on from the one before"
                        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                   options=StateDictOptions(strict=False))
    return int(path.name[5:])


def _cause(error: BaseException) -> str:
    """In one line. A CheckpointException's own text is a page of tracebacks, of all ranks."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
