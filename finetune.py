"""Fine-tuning by likelihood: policy, judge and world model learn recorded completions alike.

    loss = -(1/N) sum log p(token | all before it)      N: the target tokens of a step, over all ranks

Where the pairs are the world model's, this is Eq. 4 of arXiv 2601.22149. A sequence is (prompt_ids,
completion_ids), and only completion tokens are learned (lm.py).
"""

import json
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import data
import distributed
import lm
from data import Trajectory
from lm import LM

Item = lm.Pair | list[lm.Pair]  # a list: pairs that stay in one microbatch (judge.examples)

# ---- settings and schedule ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FineTune:
    """Supervised fine-tuning on (prompt, target)."""

    epochs: float = 1.0
    """Passes over the examples (paper: 1)."""
    lr: float = 2e-4
    """Peak of the learning rate: it warms up over 3 % of the steps, then falls as a cosine."""
    floor: float = 0.1
    """Share of the peak that the cosine ends at (the authors' script: 10 %)."""
    tokens: int = 4096
    """Most tokens of a microbatch, padding counted."""
    microbatches: int = 1
    """Microbatches a step, over all ranks (the authors' script: 8)."""
    checkpoint_every: int = 200
    """Steps from one checkpoint to the next."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    clip_norm: float = 1.0
    """Largest norm of a step's gradient, before it is weighed by the step's tokens."""
    trained_layers: int = 0
    """How many of the last layers learn; the others, embeddings and head stay as they are. 0: all weights."""
    seed: int = 0
    """Seed of the order of the examples."""

    def __post_init__(self):
        data.check_counts(1, **{"sft.microbatches": self.microbatches, "sft.tokens": self.tokens,
                                "sft.checkpoint_every": self.checkpoint_every})
        if self.epochs <= 0:
            raise ValueError(f"--sft.epochs {self.epochs:g}: give more than 0")


def cosine(step: int, steps: int, warmup: float = 0.03, floor: float = 0.1) -> float:
    """Factor on the learning rate at `step` of `steps`: linear warm-up, then cosine down to `floor`."""
    warm = max(1, round(steps * warmup))
    if step < warm:
        return (step + 1) / warm
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))




def _lengths(pairs: Sequence[Item]) -> list[int]:
    """The tokens of each pair, prompt and completion together: as `pairs` says, or counted."""
    lengths = getattr(pairs, "lengths", None)
    if lengths is None:
        lengths = [sum(len(prompt) + len(completion) for prompt, completion in together(item))
                   for item in pairs]
    return [int(length) for length in lengths]  # not numpy's: a checkpoint knows the pairs by their repr


def together(item: Item) -> list[lm.Pair]:
    """The pairs of an item: one, or a list of some that stay in one microbatch (judge.examples)."""
    return item if isinstance(item, list) else [item]


def schedule(lengths: Sequence[int], config: FineTune) -> list[list[list[int]]]:
    """The steps of a fine-tuning: steps[n][m] are the sequences of microbatch m of step n.

    The microbatches of a step cost alike, as the ranks that share it wait for the most expensive one. Of
    microbatches in random order, that one costs twice the mean (NOTES 10.9). The steps come in random order.

    >>> schedule([4, 9, 8, 3, 10, 9], FineTune(tokens=10, microbatches=2))  # they cost 7, 10, 9, 9, 8
    [[[3, 0]], [[4], [1]], [[5], [2]]]
    """
    rng, schedule = random.Random(config.seed), []
    for epoch in range(math.ceil(config.epochs)):
        batches = lm.microbatches(lengths, config.tokens, rng)
        batches = batches[: math.ceil(len(batches) * min(1.0, config.epochs - epoch))]
        order = sorted(range(len(batches)), key=lambda m: -sum(lengths[i] for i in batches[m]))
        steps = [order[k : k + config.microbatches] for k in range(0, len(order), config.microbatches)]
        schedule += [[batches[m] for m in step] for step in sorted(steps)]  # m is random, and so their order
    return schedule


def check_some(pairs: Sequence[Item], name: str, counts: Mapping[str, int] = {}) -> None:
    """Raises ValueError when there is no example; `counts` says what became of them."""
    if not len(pairs):
        told = "; ".join(f"{what}: {count}" for what, count in counts.items())
        raise ValueError(f"{name}: there is nothing to learn from ({told or 'no example was left'})")


def check_microbatches(name: str, config: FineTune) -> None:
    """Raises ValueError when a step has fewer microbatches than there are ranks."""
    ranks = distributed.world_size()
    if config.microbatches < ranks:
        raise ValueError(f"{name}: microbatches {config.microbatches}: {ranks - config.microbatches} ranks "
                         f"would idle in every step; give --sft.microbatches {ranks} or more")

# ---- the steps ---------------------------------------------------------------------------------------------


# (logp (N,) of a microbatch's target tokens, the row (N,) of each, the index in `pairs` of each row) ->
# (0-d): what is minimised, summed over these tokens.
Loss = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]


def likelihood(logp: torch.Tensor, row: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    """-log p, the Loss of ordinary fine-tuning."""
    return -logp.sum()


def fit(model: LM, pairs: Sequence[Item], config: FineTune, name: str = "fine-tuning",
        checkpoint: str | Path = "", loss: Loss = likelihood) -> dict:
    """Minimise the mean of `loss` over a step's target tokens, in place. Returns {steps, tokens, loss, idle}.

    Where a step has several microbatches, its gradient is weighed by its tokens. Its microbatches cost alike.
    So where each holds one sequence, all are of one length: without this factor, tokens of short pages would
    count double (NOTES 10.9).

    `checkpoint` is a folder to resume from. All ranks give the same pairs, and share the microbatches of a
    step. Where `pairs` has `lengths` (of prompt and completion together, in tokens), it may lie on disk: a
    pair is read only in the steps that learn it. Raises ValueError when there are no pairs, and when a step
    has fewer microbatches than there are ranks. Callers drop and count the sequences that are longer than
    model.context.
    """
    check_some(pairs, name)
    check_microbatches(name, config)
    lengths = _lengths(pairs)
    longest = max(lengths) if hasattr(pairs, "lengths") else max(
        len(prompt) + len(completion) for item in pairs for prompt, completion in together(item))
    assert len(lengths) == len(pairs) and longest <= model.context, "an example does not fit the context"
    steps = schedule(lengths, config)
    costs = [[sum(lengths[i] for i in batch) for batch in step] for step in steps]  # in tokens
    mean, idle = sum(map(sum, costs)) / len(steps), distributed.idle(costs, distributed.world_size())
    lm.train_last(model, config.trained_layers)
    optimizer = torch.optim.AdamW([p for p in model.model.parameters() if p.requires_grad], lr=config.lr,
                                  betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True)
    run = {"finetune": asdict(config), "pairs": lm.mix(lengths, pairs[0], pairs[len(pairs) - 1]),
           "matrix products": str(model.compute), "base": model.model.config.name_or_path}
    first, smooth = 0, None
    if checkpoint:
        first = distributed.load_checkpoint(checkpoint, model.model, optimizer, run)
    model.model.train()
    with tqdm(total=len(steps), initial=first, desc=name + f" ({idle:.0%} idle)" * (idle > 0), unit="step",
              mininterval=1, dynamic_ncols=True, disable=distributed.rank() != 0) as bar:
        for n, step in enumerate(steps[first:], first):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * cosine(n, len(steps), floor=config.floor)
            weight = sum(costs[n]) / mean if config.microbatches > 1 else 1.0
            learned = [[pair for i in batch for pair in together(pairs[i])] for batch in step]
            total = _backward(model, learned, costs[n], weight,
                              lambda index, logp, row, step=step: loss(logp, row, step[index]))
            # The limit has the weight too, or clipping would undo it.
            distributed.clip_grad_norm(model.model, config.clip_norm * weight)
            optimizer.step()
            optimizer.zero_grad()
            smooth = total if smooth is None else 0.95 * smooth + 0.05 * total
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            bar.update(1)
            if checkpoint and (n + 1) % config.checkpoint_every == 0 and n + 1 < len(steps):
                distributed.save_checkpoint(checkpoint, n + 1, model.model, optimizer, run, keep=1)
    model.model.eval()
    report = {"steps": len(steps), "tokens": sum(map(sum, costs)), "idle": round(idle, 3)}
    return report if first else report | {"loss": smooth}  # resumed, it is a mean of other steps


def _backward(model: LM, step: Sequence[Sequence[lm.Pair]], costs: Sequence[int], weight: float,
              loss_of: Callable[..., torch.Tensor]) -> float:
    """Add up the gradient of `weight` times a step's loss. `costs` are of its microbatches, which the ranks
    share. `loss_of(microbatch, logp (N,), row (N,))`. Returns the loss, without `weight`."""
    # Counted over all ranks and microbatches, or the tokens of a short microbatch would weigh more.
    target_tokens = sum(len(completion) for batch in step for _, completion in batch)
    shares, mine = distributed.assign(costs, distributed.world_size()), 0.0
    for index, own in shares[distributed.rank()]:
        logp, row = lm.token_logps(model, step[index])  # (N,), (N,)
        loss = own * loss_of(index, logp, row) / target_tokens  # Eq. 4 where the pairs are the world model's
        (weight * loss).backward()
        mine += loss.item()
    return sum(distributed.gather(mine))


def learn(model: LM, pairs: Sequence[Item], config: FineTune, name: str, out: str, counts: dict,
          write: Callable[[], None] | None = None) -> dict:
    """Learn the examples, and write the folder `out`. A report of what was learned from, `counts` included,
    stands beside the weights, and is returned. All ranks call it. `write`: another way to write the
    folder."""
    checkpoint, began = f"{out}.sft", time.monotonic()
    whole = not Path(checkpoint).exists()  # or a killed command has learned a part of it
    report = fit(model, pairs, config, name, checkpoint=checkpoint)
    report |= {"seconds": round(time.monotonic() - began, 2)} if whole else {}
    (write or (lambda: lm.save(model, out)))()
    report |= counts
    write_report(out, report)
    if distributed.rank() == 0:  # the model is written: its checkpoints can go
        shutil.rmtree(checkpoint, ignore_errors=True)
    return report


def write_report(folder: str | Path, report: dict) -> None:
    """Write what a training learned from beside its model."""
    if distributed.rank() == 0:
        (Path(folder) / "training.json").write_text(json.dumps(report, indent=1))


# ---- which recordings --------------------------------------------------------------------------------------


def successes(trajectories: Sequence[Trajectory], count: int = 0) -> list[Trajectory]:
    """The first `count` successes of every task, in the file's order; all of them when count is 0."""
    return first([t for t in trajectories if t.reward == 1 and t.terminated], count)


def first(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """The first `count` trajectories of every task, in the file's order; all of them when count is 0."""
    seen, taken = Counter[str](), []
    for trajectory in trajectories:
        seen[trajectory.task] += 1
        if not count or seen[trajectory.task] <= count:
            taken.append(trajectory)
    return taken
