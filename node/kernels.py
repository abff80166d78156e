"""The rehearsal's first stage, half a minute: each kernel that a run needs is tried once, on every rank,
before anything is written.

    told = try_all()           # all ranks together

A gather over gloo and one over NCCL. A kernel that Triton compiles here. The grouped products of gpt-oss's
experts. Attention as the trainers call it, forwards and backwards, beside eager attention in float32. On the
CPU all of it runs but Triton, without the long sequences.

Shapes: H query heads, H_kv heads of keys and values, T positions of a packed row, D the width of a head.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

import distributed
import lm
from node import sinks

LENGTHS = (1, 64, 127, 192, 1000, 9001)  # of the sequences in the row: even ones, odd ones, one of a page
LONGEST_ON_CPU = 192
LIMIT = 0.02  # bf16 keeps 8 bits: .004 was seen (LOG, 2026-11-23); a key too many or too few is 10 times that
SMALL = 1e-3  # of gradients that are 0 in truth, as those of a sequence of one token, rounding is left


def try_all() -> dict:
    """What was seen, for the report. Rank 0 prints a line when a part is done: what hangs is the next one.
    Raises ValueError for what is wrong, on the rank that sees it."""
    device, wrong = distributed.device(), []
    gather(device)
    say("gathers over gloo and NCCL" if device.type == "cuda" else "gathers over gloo (no GPU: no NCCL)")
    compiled(device)
    say("a Triton kernel" if device.type == "cuda" else "no Triton kernel (no GPU)")
    errors, ran = {"grouped_mm": grouped(device)}, {}
    for name, heads, width, window in (("packed", (4, 1), 128, None), ("sinks", (8, 1), 64, None),
                                       ("sinks in a window", (8, 1), 64, 128)):
        errors[name], ran[name] = attended(name, heads, width, window, device)
    for name, error in errors.items():
        say(f"{name}: {error:.4f} from float32" + (f", by {ran[name]}" if name in ran else ""))
        if not error <= LIMIT:
            wrong.append(f"{name} is {error:.3f} from float32 (limit {LIMIT})")
    wrong += [f"{name} ran by {by}" for name, by in ran.items() if "cudnn" in by.lower()]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: this torch computes something else on this card; compare "
                         "its version and the driver's with requirements-gpu.txt")
    return {"ran": ran, "errors": {name: round(error, 5) for name, error in errors.items()}}


def say(line: str) -> None:
    if distributed.rank() == 0:
        print(f"  {line}", flush=True)


def gather(device: torch.device) -> None:
    """Python objects go over gloo, a tensor over the device's own backend."""
    ranks, mine = distributed.world_size(), distributed.rank()
    part = torch.full((3,), float(mine), device=device)
    whole = distributed.gathered(DTensor.from_local(part, distributed.mesh(), [Shard(0)])).tolist()
    if distributed.gather(mine) != list(range(ranks)) or whole != [k for k in range(ranks) for _ in range(3)]:
        raise ValueError(f"a gather of {ranks} ranks gave {whole}: the ranks do not reach each other")


def compiled(device: torch.device) -> None:
    """vLLM's model runner is made of such kernels. The first one compiles its launcher, by the C compiler."""
    if device.type != "cuda":
        return
    import triton
    from triton import language as tl

    @triton.jit
    def doubled(numbers, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(numbers + at, 2 * tl.load(numbers + at, mask=at < count), mask=at < count)

    numbers = torch.arange(100, device=device)
    doubled[(4,)](numbers, 100, BLOCK=32)
    if numbers.tolist() != list(range(0, 200, 2)):
        raise ValueError(f"a Triton kernel that doubles 0 to 99 gave {numbers.tolist()}")


def drawn(*shape: int, device: torch.device) -> torch.Tensor:
    """The same bf16 numbers on every rank, without a word to the process's generators."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far apart, relative to what it should be."""
    scale = want.norm() + SMALL * want.numel() ** 0.5
    return float((got.float() - want).norm() / scale)


def grouped(device: torch.device) -> float:
    """Rows by their expert's matrix, one expert without rows, and the gradient of the rows: apart from
    float32."""
    ends, width = (5, 5, 200), 256
    x, weights = drawn(200, width, device=device).requires_grad_(), drawn(3, width, width, device=device)
    out = F.grouped_mm(x, weights, offs=torch.tensor(ends, dtype=torch.int32, device=device))
    weight = drawn(200, width, device=device)
    (gradient,) = torch.autograd.grad(out, x, weight)
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 0, 195])).to(device)
    of_rows = weights.float()[expert]  # (200, width, width)
    want = (x.detach().float()[:, None] @ of_rows)[:, 0], (weight.float()[:, None] @ of_rows.mT)[:, 0]
    return max(apart(out.detach(), want[0]), apart(gradient, want[1]))


def attended(name: str, heads: tuple[int, int], width: int, window: int | None,
             device: torch.device) -> tuple[float, str]:
    """(how far attention over a packed row is from float32 at its worst sequence, by which kernels)."""
    lengths = [length for length in LENGTHS if device.type == "cuda" or length <= LONGEST_ON_CPU]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    of_query, of_key = ((1, count, int(bounds[-1]), width) for count in heads)
    q, k, v = (drawn(*shape, device=device) for shape in (of_query, of_key, of_key))
    k = k.flip(2)  # or keys would be the values
    weight, sink = drawn(1, of_query[2], heads[0], width, device=device), drawn(heads[0], device=device)
    given = {"cu_seq_lens_q": bounds.to(device, torch.int32), "max_length_q": max(lengths)}
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, sink)]
    if name == "packed":
        inputs.pop()
        out, _ = lm.packed_attention(None, q, k, v, None, width**-0.5, **given)
    else:
        out, _ = sinks.sink_attention(None, q, k, v, None, width**-0.5, sink, window, **given)
    found = torch.autograd.grad(out, inputs, weight)
    ours, of_sink, worst = [out.transpose(1, 2), *found[:3]], torch.zeros(heads[0], device=device), 0.0
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        parts = [tensor.detach()[:, :, start:end].float().requires_grad_() for tensor in (q, k, v)]
        parts += [sink.detach().float().requires_grad_()] * (name != "packed")
        want = eager(*parts, window=window)
        theirs = torch.autograd.grad(want, parts, weight.transpose(1, 2)[:, :, start:end].float())
        pieces = [tensor.detach()[:, :, start:end] for tensor in ours]
        worst = max(worst, *(apart(a, b) for a, b in zip(pieces, (want.detach(), *theirs[:3]))))
        of_sink += sum(theirs[3:])
    if name != "packed":
        worst = max(worst, apart(found[3], of_sink))
    return worst, " and ".join(sorted(kernels(out)))


def eager(query, key, value, sink=None, window: int | None = None) -> torch.Tensor:
    """One sequence with all its scores: (1, H, T, D)."""
    heads, length = query.shape[1:3]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    back = torch.arange(length, device=query.device)
    back = back[:, None] - back
    hidden = (back < 0) | (back >= (window or length))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(1, heads, length, 1)], -1)
    return scores.softmax(-1)[..., :length] @ value


def kernels(out: torch.Tensor) -> set[str]:
    """Who made `out`, by the names of autograd's nodes: ScaledDotProductFlashAttentionBackward0, ..."""
    found, seen, ahead = set(), set(), [out.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
        if any(word in node.name().lower() for word in ("attention", "attn", "softmax")):
            found.add(node.name().removesuffix("0").removesuffix("Backward"))
    return found
