"""The whole loop on one screen: dream, judge, GSPO. It runs in the shop of own_env.py, on dreams alone.

    python -m examples.loop                    # minutes of two cores, after `python lm.py`; writes runs/loop/

train.py does the same, and more: it resumes, looks at the real web, logs, shares the work among ranks. It
also takes the gradient in pieces (Eq. 10 in gspo.py), since at 8B a whole trajectory has no room in one
graph. Here the graph is whole, and the loss its definition. tests/test_examples.py holds this loop's update
to train.py's.

Shapes: K kept trajectories of a batch, B of a minibatch, N completion tokens of a minibatch.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import dream
import gspo
import lm
import measure
import recipe
from examples import own_env
from policy import TokenTrajectory


def learn(model: lm.LM, models: dream.Models, starts: Sequence[dream.Drawn], config: recipe.Train) -> None:
    """Train `model` in place. It is models.agent too; `models` has the world model and the judge besides.
    `starts` are recorded pages to dream from, each with its expert or None."""
    lm.train_last(model, config.trained_layers)
    weights = [p for p in model.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    temperature, eps = config.dreaming.temperature, (config.eps_low, config.eps_high)
    for n in range(config.updates):
        rng = random.Random(f"{config.seed} {n}")

        # ---- 1. dream: a few groups, each of one start; their rows are dreams, or the expert's ----
        drawn = dream.draw(rng, starts, config.dreaming.tasks)
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
            torch.nn.utils.clip_grad_norm_(weights, config.clip_norm)
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
    config = own_env.prepare("runs/loop", updates=8)
    model, models = own_env.load_models(config, Path(config.out))
    looks = measure.real_starts(["order"], range(1_000_000, 1_000_048)), "dev seeds", 4, 32
    before = measure.look(own_env.Shop(), model, *looks)["real_success"]
    learn(model, models, recipe.fitting(model, recipe.starts(config), config), config)
    lm.save(model, config.out)
    after = measure.look(own_env.Shop(), model, *looks)["real_success"]
    print(f"success in the shop: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
