"""Many processes, one run: sharded weights (FSDP2), folders read into shards, global counts, checkpoints.

Every collective of this project stands in this file. A laptop has one rank, no process group, and nothing
below communicates. Elsewhere what each rank wrote (token ids, rewards, log-probs) is gathered, and every rank
plans the same batch from the same data. No decision rests on what one rank alone knows: all ranks make the
same number of forwards, backwards and collectives. Random numbers are functions of (seed, update, row).

Gradients are SUMMED over the ranks (FSDP2's default is the mean), because every loss here already divides by
a global count (NOTES 9.1). The bug this avoids is old: in a mean over ranks of means over microbatches, a
sequence that shares its microbatch with many others weighs less than one that shares it with few.
"""
import atexit
import contextlib
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, empty
from torch.nn import Module
from torch.optim import Optimizer

from config import UserError

# ---- ranks -------------------------------------------------------------------------------------------------

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a laptop has one process and no group
grouped = dist.is_initialized  # there is a group, of one rank or several
rank = lambda: dist.get_rank() if grouped() else 0
world_size = lambda: dist.get_world_size() if grouped() else 1
device = lambda: torch.device(f"cuda:{os.getenv('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
finish = lambda: dist.destroy_process_group() if grouped() else None
barrier = lambda: gather(None)  # a file that rank 0 wrote before it is there for every rank after it
local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor
gathered = lambda x: x.to(device()).full_tensor() if isinstance(x, DTensor) else x  # type: ignore
shard_rows = lambda rows: list(rows[rank() :: world_size()])  # of [a, b, c, d, e] rank 0 of 2 has [a, c, e]


def init(alone: bool = False) -> None:
    """Join the process group that torchrun describes. Without torchrun make a group of one rank on a GPU, or
    with `alone` (FSDP and vLLM need a group), and do nothing otherwise."""
    gpu = torch.cuda.is_available()
    if grouped() or not ("RANK" in os.environ or alone or gpu):
        return
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(dist.TCPStore("127.0.0.1", 0, 1, True).port)}  # a free port
    if gpu:
        # Memory that grows in place, or microbatches of many lengths leave gaps of gigabytes (NOTES 9.12). By
        # torch's own call: a variable would reach the servers, and one over several GPUs dies of it.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(device())
    # Longer than all that one rank does while the others wait: two servers load 120B, one after another.
    timeout = timedelta(hours=3)
    store, mine, ranks = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun gives its restart the old store, in which the dead ranks' addresses stand.
    store = dist.PrefixStore(os.getenv("TORCHELASTIC_RESTART_COUNT", "0"), store)
    # gloo beside NCCL: gathered Python objects travel over the CPU (NOTES 9.3).
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", None, timeout, ranks, mine, store)
    atexit.register(finish)  # vLLM's engine registers later: it is closed before, with the group (NOTES 7.4)


def command(work: Callable[[], dict | None], alone: bool = False) -> None:
    """A command: join the other ranks, work, print the report. A UserError alone has no traceback."""
    try:
        init(alone)
        report = work()
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}{f' (rank {rank()})' if world_size() > 1 else ''}: {error}")
    if report and rank() == 0:
        print(json.dumps(report, indent=1))


def gather(value) -> list:
    """`value` (anything that pickles, on the CPU) of every rank, in the order of the ranks, on every rank."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def collect(mine: Sequence) -> list:
    """The inverse of shard_rows: the ranks' results, in the order of the rows, on every rank."""
    parts = gather(list(mine))
    return [parts[k % len(parts)][k // len(parts)] for k in range(sum(map(len, parts)))]


def assign(costs: Sequence[float], ranks: int) -> list[list[tuple[int, float]]]:
    """Each rank's share of the microbatches: a list of (index, weight), equally long on all ranks.

    With a sharded model the ranks go through round j of their shares together, layer by layer: it takes as
    long as its most expensive microbatch. So the most expensive ones, one for each rank, are the first round,
    and the next are the second. A rank that comes out short repeats the cheapest with weight 0.0: it joins
    all collectives, adds nothing.

    >>> assign([5, 9, 4], ranks=2)
    [[(1, 1.0), (2, 1.0)], [(0, 1.0), (2, 0.0)]]
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    dealt = [(index, 1.0) for index in order]
    dealt += [(index, 0.0) for index in order[-1:]] * (-len(order) % ranks)
    return [dealt[rank::ranks] for rank in range(ranks)]


# ---- sharded weights ---------------------------------------------------------------------------------------

def shard(model: Module, compute: torch.dtype, offload: bool) -> None:
    """Wrap a transformers causal LM in place. Every decoder layer is gathered when it runs and freed after
    it, and so is the rest (embedding, last norm, head), which is FSDP's root. Parameters keep their dtype
    (float32), matrix products run in `compute`, gradients are summed in float32. `offload` keeps weights,
    gradients and optimizer states in host memory between uses (the paper's "FSDP offloading")."""
    # Each layer is recomputed in the backward pass: 148 GB become 25 (8B; NOTES 9.8).
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    # By default the root stays whole after a forward. A sync, a checkpoint or an optimizer would then take
    # the gathered copies, in `compute` and from before the step (NOTES 9.2).
    options: dict = {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(compute, torch.float32)}
    if offload:  # Adam works on the CPU then, and torchrun says one thread to each rank
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.getenv("LOCAL_WORLD_SIZE", "1"))))
    for module in (*model.get_submodule("model.layers").children(), model):
        sharded = fully_shard(module, **options)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum (NOTES 9.1)
        sharded.set_gradient_divide_factor(1.0)


@torch.no_grad()
def load_weights(model: Module, folder: str | Path, home: torch.device,
                 unpack: Callable | None = None) -> None:
    """Fill a transformers model that was built on "meta" (and sharded) from a folder's safetensors files, but
    adapters (".lora_"). Each rank reads its own rows: 8 that each load 8B in float32 would take 257 GB. A
    weight whose NAME_blocks and NAME_scales are there is unpack(blocks, scales) of this rank's rows. Raises
    UserError unless each weight is there, once."""
    model.to_empty(device=home)
    model.tie_weights()  # type: ignore[operator]  # to_empty made two tensors of a tied head
    # Rotary frequencies and their like are in no file. transformers' _init_weights, which models override,
    # knows how they are made, and leaves what is marked. What it does not know stays nan (lm.check_logps).
    for p in model.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    for buffer in model.buffers():
        buffer.fill_(math.nan)
    model.apply(model._init_weights)  # type: ignore[arg-type]
    plain = lambda name: name.replace(".base_layer.", ".")
    # named_parameters() and not state_dict(): a tied head appears once, and buffers not at all.
    named = {plain(name): p for name, p in model.named_parameters() if ".lora_" not in name}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with file_errors(f"{folder} does not hold the model of its config.json", "download or make it again"):
        there: dict = dict(reader.read_metadata().state_dict_metadata)  # of headers only
        packed = {name: named.pop(name) for name in list(named) if unpack and f"{name}_blocks" in there}
        parts = {name: (f"{name}_blocks", f"{name}_scales") for name in packed}
        known = {plain(name) for name in model.state_dict()}.union(*parts.values())
        # dcp ignores a weight that is not the model's, and takes either of two files that both hold one.
        wrong = [f"{n} has no place in it" for n in there if n not in known and not n.endswith("inv_freq")]
        wrong += [f"{name} is in two files" for name, found in there.items() if len(found.chunks) > 1]
        if wrong:
            raise UserError(f"{folder}: {min(wrong)}; download it again, or take another model: experts that "
                            "lie one by one are not read")
        dcp.load(dict(named), storage_reader=reader)
        for name, p in packed.items():  # one at a time: the blocks of all would not fit beside the rest
            on = {"device_mesh": p.device_mesh, "placements": p.placements} if isinstance(p, DTensor) else {}
            make: Callable = empty if on else torch.empty
            read = {part: make(there[part].size, dtype=torch.uint8, **on) for part in parts[name]}
            dcp.load(read, storage_reader=reader)
            local(p).copy_(unpack(*map(local, read.values())))  # type: ignore[misc]


def full_tensors(model: Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight in `dtype`, in the model's order; a tied weight appears once. All
    ranks iterate together. The cast comes before the gathering: half the traffic."""
    for name, parameter in model.named_parameters():
        yield name, gathered(parameter.detach().to(dtype))


def clip_grad_norm(model: Module, limit: float) -> float:
    """Clip the gradient to norm `limit`; returns the norm before. All ranks call it. Raises UserError where
    it is not finite, on all ranks: a step would make every weight nan, and the next checkpoint keep them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:  # where no backward pass was run Adam moves all the same, by its momentum
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    norm = float(gathered(torch.nn.utils.clip_grad_norm_(trained, limit)))  # a DTensor's own is of a part
    if not math.isfinite(norm):
        raise UserError(f"the gradient's norm is {norm}: the last checkpoint is good. Give the command again")
    return norm


# ---- checkpoints -------------------------------------------------------------------------------------------

# The checkpoints that are whole, the newest last: dcp writes .metadata last, and renames it.
_whole = lambda folder: sorted((file.parent for file in Path(folder).glob("step-*/.metadata")),
                               key=lambda path: int(path.name[5:]))


def _state(model: Module, optimizer: Optimizer) -> dict:
    """What dcp writes, and reads in place: trained weights, and the optimizer's state by their names."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {"model": trained, "optimizer": {name: dict(optimizer.state[p]) for name, p in trained.items()}}


def save_checkpoint(folder: str | Path, step: int, model: Module, optimizer: Optimizer, run: dict,
                    keep: int = 2) -> None:
    """Write folder/step-N: model, optimizer, and `run`, plain data that describes it; nothing before the
    optimizer's first step. The newest `keep` stay. All ranks call it. Raises UserError."""
    path = Path(folder) / f"step-{step}"
    if not optimizer.state:
        return
    with file_errors(f"{path} cannot be written", "make room, and give the same command again"):
        dcp.save(_state(model, optimizer) | {"run": json.dumps(run)}, checkpoint_id=path)
    for old in _whole(folder)[:-keep] if rank() == 0 else []:
        shutil.rmtree(old)


@torch.no_grad()
def load_checkpoint(folder: str | Path, model: Module, optimizer: Optimizer, run: dict) -> int:
    """Load the newest checkpoint, on any number of ranks; returns its step, 0 when there is none. All ranks
    call it. Raises UserError when it cannot be read, or is of another `run`."""
    if not (paths := _whole(folder)):
        return 0
    path, state = paths[-1], {"run": ""}
    with file_errors(f"{path} cannot be read", "delete it to go on from the one before"):
        dcp.load(state, checkpoint_id=path)
        then, now = json.loads(state["run"]), json.loads(json.dumps(run))
        for key in sorted(now):
            if then.get(key) != now[key]:
                raise UserError(f"{path} is from another config ({key} was {str(then.get(key))[:200]} and is "
                                f"{str(now[key])[:200]}); give another --out, or delete {folder}")
        clip_grad_norm(model, 1.0)
        optimizer.step()  # with gradients of zero: it makes Adam's moments, which dcp then fills
        optimizer.zero_grad()
        dcp.load(_state(model, optimizer), checkpoint_id=path)
    return int(path.name[5:])


@contextlib.contextmanager
def file_errors(what: str, way_out: str) -> Iterator[None]:
    """A file's error as a UserError. dcp's CheckpointException is no Exception, and ends in the error."""
    try:
        yield
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        last = (str(error).strip() or repr(error)).splitlines()[-1]
        raise UserError(f"{what} ({last[:300]}); {way_out}") from error
