"""The whole loop on one screen: dream, judge, GSPO. It runs in the shop of own_env.py, on dreams alone.

    python -m examples.loop                    # minutes of two cores, after `python lm.py`; writes runs/loop/

train.py does the same, and more: it resumes, evaluates on real pages, logs, shares the work among ranks. It
also takes the gradient in pieces (Eq. 10 in gspo.py), since at 8B a whole rollout has no room in one graph.
Here the graph is whole, and the loss its definition. tests/test_examples.py holds this loop's update to
train.py's.

Shapes: K rollouts of a batch that are learned from, B of a minibatch, N completion tokens of a minibatch.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

import dream
import envs
import gspo
import lm
import train
from config import Train
from examples import own_env
from policy import Rollout


def learn(model: lm.LM, models: dream.Models, starts: Sequence[dream.GroupStart], config: Train) -> None:
    """Train `model` in place. models.agent samples from it; `models` has the world model and the judge
    besides. `starts` are recorded pages to dream from, each with its expert or None."""
    optimizer = torch.optim.AdamW(model.net.parameters(), config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    for n in range(config.updates):
        rng = random.Random(f"{config.seed} {n}")

        # ---- 1. dream: a few groups, each of one start; their rollouts are dreams, or the expert's ----
        sampled = dream.sample_starts(rng, starts, config.groups)
        batch = dream.batch(models, sampled, config, (config.seed, n))
        if not batch.learned:
            continue  # no group has a signal

        # ---- 2. how much better than its group each did: the judge's verdict, 0 or 1; an expert's is 1 ----
        rewards = torch.tensor([float(rollout.reward) for rollout in batch.learned])  # (K,)
        advantages = gspo.group_advantages(rewards, torch.tensor(batch.groups))  # (K,)  Eq. 6
        print(f"update {n}: {len(batch.learned)} rollouts, {float(rewards.mean()):.0%} of them successes")

        # ---- 3. a few GSPO steps, with one importance ratio a rollout ----
        parts = train.split(len(batch.learned), config.minibatches, rng)
        minibatches = [[batch.learned[k] for k in part] for part in parts]
        # Scored before the first step: by the weights that dreamed.
        old_logps = [score(model, rollouts, config.temperature)[0].detach() for rollouts in minibatches]
        for part, rollouts, old_logp in zip(parts, minibatches, old_logps):
            logp, index = score(model, rollouts, config.temperature)  # (N,), (N,)
            loss, _ = gspo.gspo_loss(logp, old_logp, index, advantages[part], config.eps_low, config.eps_high)
            loss.backward()  # one importance ratio a rollout: Eq. 5 to 7
            torch.nn.utils.clip_grad_norm_(model.net.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()


def score(model: lm.LM, rollouts: Sequence[Rollout], temperature: float) -> tuple[Tensor, Tensor]:
    """log pi_theta of all completion tokens of `rollouts`, and the rollout of each: (N,) and (N,)."""
    turns = [(turn.prompt_ids, turn.completion_ids) for rollout in rollouts for turn in rollout.turns]
    owners = torch.tensor([k for k, rollout in enumerate(rollouts) for _ in rollout.turns])
    logp, row = lm.token_logps(model, turns, temperature)  # (N,), (N,): a token's turn
    return logp.cpu(), owners[row.cpu()]  # where the advantages are; gradients flow through .cpu()


def main() -> None:
    config = own_env.prepare("runs/loop")
    model = lm.load(config.policy, config.context, lm.matrix_type(config.compute))
    models = dream.Models(lm.Batched(model), own_env.Imagined(), own_env.Clerk())
    fresh = own_env.Shop().dev_starts(config.evaluate_seeds, ())

    def success() -> float:
        played = envs.play(own_env.Shop(), models.agent, fresh, config.horizon, config.max_new_tokens)
        return sum(rollout.reward for rollout in played) / len(played)

    print(f"success in the shop: {success():.2f}")
    learn(model, models, dream.starts(config), config)
    print(f"success in the shop: {success():.2f}")


if __name__ == "__main__":
    main()
