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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import data
import distributed
import lm
from data import Trajectory
from lm import LM

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
    embeddings: float = 1.0
    """Learning rate of the token embeddings, and of a head that is tied to them, as a share of `lr`."""
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


def _lengths(pairs: Sequence[lm.Pair]) -> list[int]:
    """The tokens of each pair, prompt and completion together: as `pairs` says, or counted."""
    lengths = getattr(pairs, "lengths", None)
    if lengths is None:
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    return [int(length) for length in lengths]  # not numpy's: a checkpoint knows the pairs by their repr


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


def check_some(pairs: Sequence[lm.Pair], name: str, counts: Mapping[str, int] = {}) -> None:
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


def fit(model: LM, pairs: Sequence[lm.Pair], config: FineTune, name: str = "fine-tuning",
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
    assert len(lengths) == len(pairs) and max(lengths) <= model.context, "an example does not fit the context"
    steps = schedule(lengths, config)
    costs = [[sum(lengths[i] for i in batch) for batch in step] for step in steps]  # in tokens
    mean, idle = sum(map(sum, costs)) / len(steps), distributed.idle(costs, distributed.world_size())
    optimizer = _adamw(model.model, config.weight_decay)
    checkpoints = distributed.Checkpoints(checkpoint, model.model, optimizer, keep=1) if checkpoint else None
    run = {"finetune": asdict(config), "pairs": lm.mix(lengths, pairs[0], pairs[len(pairs) - 1]),
           "matrix products": str(model.compute), "base": model.model.config.name_or_path}
    first, smooth = checkpoints.load(run) if checkpoints else 0, None
    model.model.train()
    with tqdm(total=len(steps), initial=first, desc=name + f" ({idle:.0%} idle)" * (idle > 0), unit="step",
              mininterval=1, dynamic_ncols=True, disable=distributed.rank() != 0) as bar:
        for n, step in enumerate(steps[first:], first):
            for group, share in zip(optimizer.param_groups, (1.0, config.embeddings)):
                group["lr"] = config.lr * share * cosine(n, len(steps), floor=config.floor)
            weight = sum(costs[n]) / mean if config.microbatches > 1 else 1.0
            total = _backward(model, [[pairs[i] for i in batch] for batch in step], costs[n], weight,
                              lambda index, logp, row, step=step: loss(logp, row, step[index]))
            # The limit has the weight too, or clipping would undo it.
            distributed.clip_grad_norm(model.model, config.clip_norm * weight)
            optimizer.step()
            optimizer.zero_grad()
            smooth = total if smooth is None else 0.95 * smooth + 0.05 * total
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            bar.update(1)
            if checkpoints and (n + 1) % config.checkpoint_every == 0 and n + 1 < len(steps):
                checkpoints.save(n + 1, run)
    if checkpoints:
        checkpoints.settle(wait=True)
    model.model.eval()
    report = {"steps": len(steps), "tokens": sum(map(sum, costs)), "idle": round(idle, 3)}
    return report if first else report | {"loss": smooth}  # resumed, it is a mean of other steps


def _adamw(model: PreTrainedModel, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with two groups: all trained weights but the token embeddings, and these."""
    words = model.get_input_embeddings().weight
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in learned if (p is words) == wanted]} for wanted in (False, True)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)


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


def learn(model: LM, lessons: Sequence[tuple[Sequence[lm.Pair], FineTune]], name: str, out: str,
          counts: dict, write: Callable[[], dict] | None = None) -> dict:
    """Learn one lesson (examples, settings) after the other, and write the folder `out`. A report of what was
    learned from, `counts` included, stands beside the weights, and is returned. All ranks call it. `write`:
    another way to write the folder, which returns what it adds to the report."""
    checkpoint, began = f"{out}.sft", time.monotonic()
    whole = not Path(checkpoint).exists()  # or a killed command has learned a part of it
    report = fit(model, *lessons[0], name, checkpoint=checkpoint)
    report |= {"seconds": round(time.monotonic() - began, 2)} if whole else {}
    for more in lessons[1:]:
        # If it is killed here, the same command first goes from the first lesson's last checkpoint to its
        # end.
        report["again"] = fit(model, *more, f"{name}, again", checkpoint=f"{checkpoint}/again")
    if write:
        report |= write()
    else:
        lm.save(model, out)
    report |= counts
    write_report(out, report)
    if distributed.rank() == 0:  # the model is written: its checkpoints can go
        shutil.rmtree(checkpoint, ignore_errors=True)
    return report


def write_report(folder: str | Path, report: dict) -> None:
    """Write what a training learned from beside its model."""
    if distributed.rank() == 0:
        (Path(folder) / "training.json").write_text(json.dumps(report, indent=1))


# ---- which demonstrations ----------------------------------------------------------------------------------


def demonstrations(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """`count` successes of every task, drawn with `seed`; all of them when count is 0."""
    return draw(successes(trajectories), count, seed)


def successes(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if t.reward == 1 and t.terminated]


def draw(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """`count` trajectories of every task, task by task; all of them, in random order, when count is 0."""
    by_task = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task].append(trajectory)
    drawn = []
    for task in sorted(by_task):
        random.Random(f"{seed} {task}").shuffle(by_task[task])
        drawn += by_task[task][: count or None]
    return drawn


def drawn(config) -> dict:
    """Which demonstrations a model was made of, as its training.json says it. 0 a task means all of them:
    then no seed chose any."""
    return {"demonstrations_a_task": config.demonstrations,
            "demonstrations_seed": config.demonstrations_seed if config.demonstrations else 0}


def check_drawn(folders: dict[str, str], config=None) -> None:
    """Raise ValueError where models that meet were made of different demonstrations. `folders` is {who:
    folder}. With `config` they are compared to its --demonstrations and --demonstrations-seed as well. A
    folder without training.json (a base, a published model) does not say what it was made of, and is left
    out."""
    told = {"this command": drawn(config)} if config else {}
    for who, folder in folders.items():
        file = Path(folder or "nowhere") / "training.json"  # an agent behind a URL has no folder
        if file.exists():
            told[f"{who} {folder}"] = _told(file, who)
    said = {who: f"{one['demonstrations_a_task']} a task, drawn with seed {one['demonstrations_seed']}"
            if one["demonstrations_a_task"] else "all" for who, one in told.items()}
    if len(set(said.values())) > 1:
        raise ValueError("these were made of different demonstrations: "
                         + "; ".join(f"{who}: {which}" for who, which in said.items())
                         + ". Give all programs the same --demonstrations and --demonstrations-seed")


def _told(file: Path, who: str) -> dict:
    """What drawn() wrote into a training.json."""
    try:
        told = json.loads(file.read_text())
        return {name: int(told[name]) for name in ("demonstrations_a_task", "demonstrations_seed")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} does not say which demonstrations this {who} was made of ({error!r}): older code wrote "
            'none. Make it again; or, where you know, write "demonstrations_a_task": 2 and '
            '"demonstrations_seed": 0 into that file (0 a task: all)') from error
