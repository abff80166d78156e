"""How much faster does a laptop's model learn by hand (tiny/cpu.py, `hidden`) than by transformers' forward
over padded rows? The same steps of the same examples, in turn, in one process.

    python -m bench.bench_learning [--steps 8] [--trajectories 20]      # one thread; three minutes

The examples are those of `python sft.py world_model tiny` and `python sft.py policy tiny`, of fewer recorded
trajectories. Counted are all tokens of the examples, also those that the tree computes once. Seconds of the
processor, as machines are shared: compare the ratio. The last columns say how far apart the two runs' log-
probs and weights are after their steps (float32: rounding).
"""

import random
import statistics
import time
from collections import Counter

import torch
import tyro

import data
import distributed
import finetune
import lm
import world_model
from tiny import cpu, lessons


def steps_of(model: lm.LM, optimizer, pairs: list[lm.Pair], steps: list, config: finetune.FineTune):
    """finetune.fit's steps, one at a time: yields (log-probs (N,), seconds)."""
    for n, (batch,) in enumerate(steps):
        began = time.process_time()
        for group, share in zip(optimizer.param_groups, (1.0, config.embeddings)):
            group["lr"] = config.lr * share * finetune.cosine(n, 300)
        logp, _ = lm.token_logps(model, [pairs[i] for i in batch])  # (N,)
        (-logp.mean()).backward()
        distributed.clip_grad_norm(model.model, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield logp.detach(), time.process_time() - began


def measure(name: str, pairs: list[lm.Pair], config: finetune.FineTune, count: int) -> None:
    lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    steps = finetune.schedule(lengths, config)[: count + 1]  # the first is a warm-up
    models = [cpu.load("tiny/base", context=1024) for _ in range(2)]
    models[1].hidden = None
    runs = [steps_of(model, finetune._adamw(model.model, 0.0), pairs, steps, config) for model in models]
    seconds, apart = [], 0.0
    for n in range(len(steps)):
        order = (0, 1) if n % 2 else (1, 0)
        told = {k: next(runs[k]) for k in order}
        apart = max(apart, float((told[0][0] - told[1][0]).abs().max()))
        seconds += [(told[0][1], told[1][1])] * (n > 0)
    tokens = sum(lengths[i] for (batch,) in steps[1:] for i in batch)
    nodes = sum(len(cpu.tree(lm.distinct([sum(pairs[i], []) for i in batch]))[0]) for (batch,) in steps[1:])
    by_hand, theirs = (tokens / sum(both) for both in zip(*seconds))
    ratios = [b / a for a, b in seconds]
    weights = [torch.cat([p.detach().flatten() for p in model.model.parameters()]) for model in models]
    moved = float((weights[0] - weights[1]).abs().max())
    print(f"{name:18s} {theirs:6.0f} -> {by_hand:6.0f} tokens/s   median {statistics.median(ratios):.2f} "
          f"({min(ratios):.2f} to {max(ratios):.2f})   computed once: {nodes / tokens:.2f} of the tokens   "
          f"log-probs {apart:.0e}, weights {moved:.0e} apart", flush=True)


def main(steps: int = 8, trajectories: int = 20):
    torch.set_num_threads(1)
    world, agent = lessons.WorldModel(per_task=trajectories), lessons.Policy(judged=trajectories)
    model, recorded = cpu.load("tiny/base", context=1024), data.read_trajectories(world.transitions)
    pairs = world_model.examples(model, lessons.chosen(world, recorded), Counter())
    random.Random(world.sft.seed).shuffle(pairs)
    measure("world model", pairs, world.sft, steps)
    for lesson, (pairs, config) in enumerate(lessons.policy_lessons(agent, model, recorded, Counter()), 1):
        measure(f"policy, lesson {lesson}", pairs, config, steps)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
