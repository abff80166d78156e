"""The whole loop on one screen: dream, judge, GSPO. It runs in the shop of own_world.py, on dreams alone.
There the judge is code (own_world.Clerk): a small model would have to be taught to judge first.

    python -m examples.loop                    # 65 s of one core, beside other work; writes runs/loop/

train.py does the same, and more: it resumes, looks at the real web, logs, shares the work among ranks, draws
tasks by what they taught, writes a mean of weights. It also takes the gradient in pieces (Eq. 10 in gspo.py),
since at 8B a whole trajectory has no room in one graph. Here the graph is whole, and the loss its definition.
tests/test_examples.py holds this loop's update to train.py's.

Shapes: K kept trajectories of a batch, B of a minibatch, N completion tokens of a minibatch.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import dream
import gspo
import lm
import recipe
from data import Start
from examples import own_world
from policy import TokenTrajectory


def learn(model: lm.LM, models: dream.Models, experts: Sequence[dream.Expert], others: Sequence[Start],
          config: recipe.Train) -> None:
    """Train `model` in place. It is models.agent too; `models` has the world model and the judge besides.
    `experts` and `others` are recorded pages to dream from, with and without a demonstration."""
    optimizer = torch.optim.AdamW(model.model.parameters(), config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    temperature, eps = config.dreaming.temperature, (config.eps_low, config.eps_high)
    for n in range(config.updates):
        rng = random.Random(f"{config.seed} {n}")

        # ---- 1. dream: a few groups, each of one start; their rows are dreams, or the expert's ----
        drawn = dream.draw(rng, experts, others, config.dreaming)
        batch = dream.batch(models, drawn, config.dreaming, (config.seed, n))
        if not batch.kept:
            continue  # no group has anything to teach

        # ---- 2. how much better than its group each did: the judge's verdict, 0 or 1; an expert's is 1 ----
        rewards = torch.tensor([trajectory.reward for trajectory in batch.kept])  # (K,)
        advantages = gspo.group_advantages(rewards, torch.tensor(batch.groups))  # (K,)  Eq. 6
        print(f"update {n} learns from {len(batch.kept)} rows, {float(rewards.mean()):.0%} of them successes")

        # ---- 3. a few GSPO steps, with one importance ratio a trajectory ----
        parts = split(len(batch.kept), config.minibatches, rng)
        minibatches = [[batch.kept[k] for k in part] for part in parts]
        # Scored before the first step: by the weights that dreamed.
        old_logps = [score(model, rows, temperature)[0].detach() for rows in minibatches]  # (N,) each
        for part, rows, old_logp in zip(parts, minibatches, old_logps):
            logp, trajectory = score(model, rows, temperature)  # (N,), (N,)
            loss, _ = gspo.gspo_loss(logp, old_logp, trajectory, advantages[part], *eps)  # Eq. 5 to 7
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.model.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()


def split(count: int, minibatches: int, rng: random.Random) -> list[list[int]]:
    """The numbers below `count`, shuffled, in at most so many parts."""
    order = list(range(count))
    rng.shuffle(order)
    return [order[k::minibatches] for k in range(min(minibatches, count))]


def score(model: lm.LM, rows: Sequence[TokenTrajectory], temperature: float) -> tuple[Tensor, Tensor]:
    """(log pi_theta of all completion tokens of `rows`, the row of each): (N,) and (N,)."""
    pairs = [pair for row in rows for pair in row.pairs]  # of each turn: its prompt, its completion
    owners = torch.tensor([k for k, row in enumerate(rows) for _ in row.pairs])
    logp, turn = lm.token_logps(model, pairs, temperature)  # (N,), (N,)
    return logp, owners[turn]


def main():
    settings = own_world.prepare(own_world.Config(out="runs/loop", updates=8))
    settings = replace(settings, world="dream")
    model, models = own_world.load_models(settings, Path(f"{settings.out}.run"))
    experts, others = recipe.fitting(model, *recipe.starts(settings), settings)
    learn(model, models, experts, others, settings)
    lm.save(model, Path(settings.out))
    print(f"success in the shop on dev seeds: {own_world.success(settings.policy):.2f} before, "
          f"{own_world.success(settings.out):.2f} after")


if __name__ == "__main__":
    main()
