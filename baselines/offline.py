"""Offline reinforcement learning on recorded trajectories: no world model, no judge, no new page. Filtered
cloning, AWR, and DigiRL's doubly robust filter.

    python -m baselines.offline cloning        # or awr, or digirl; the laptop's, after `make`

A trajectory has steps 1 .. H and a reward r at its end; R_h = r. All three start at the SFT policy and
maximise a likelihood of recorded steps:

    cloning   E[ log pi(a_h|s_h) ]  over the steps of trajectories with r = 1
    AWR       E[ w_h log pi(a_h|s_h) ],  w_h = exp( (R_h - V(s_h)) / beta )     (arXiv 1910.00177, Alg. 1)
    DigiRL    E[ log pi(a_h|s_h) ]  over the steps that two filters leave       (arXiv 2406.11896, section 4)
              trajectories whose A^instruct = r - V(s_1) is among the largest `share`
              steps whose A^step_h > 1 / H_max, with r_H = r, else r_h = 0, and
              A^step_h = lambda^(H-h) r + (1 - lambda^(H-h)) (V(s_h+1) + r_h - V(s_h))
    V         max E[ r log V(s_h) + (1 - r) log(1 - V(s_h)) ]                   (DigiRL, section 4)

V is webrl.py's critic: a copy of the SFT policy, V(s) = p(YES) against p(NO) behind the prompt of a turn.

Where we differ from the papers and from released code, and why
- AWR's V minimises the square of R - V. For a reward of 0 or 1 both losses have the same minimum, E[r | s].
- Released AWR (xbpeng/awr, learning/awr_agent.py) standardises R - V over the data (line 403), has beta 1 and
  cuts weights at 20 (line 41); here, too. Its R is TD(.95) at a discount of .99 (lines 36, 42); ours is r.
- DigiRL's V^instruct and V^step are two models there, V^instruct reads the instruction alone. Here they are
  one: V of the first page. Released DigiRL (DigiRL-agent/digirl, digirl/algorithms/) takes the smaller of two
  heads, and keeps steps with V(s_h+1) - V(s_h) - .05 + r_h + gamma^(H-h) r > 0 (digirl/trainer.py:147-152).
- Released DigiRL filters trajectories offline by the reward alone (offpolicy_train_loop.py:206-207): its cut
  is the ninth decile of rewards of 0 and 1 (line 42), so every success stays where more than a tenth are.
  Here by A^instruct, as in the paper, and as the released code does online (line 64).
- DigiRL's equations are given as we know them; its paper could not be read again (NOTES 12.4).
- A step that the browser refused is a state, whose value is learned, but is never cloned.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import tyro
from torch import Tensor

import data
import distributed
import lm
import policy
import sft
from baselines import webrl
from config import POLICY_SFT, SFT, UserError, chosen
from data import Trajectory

Read = tuple[Trajectory, list[lm.Pair]]  # a trajectory, and the (prompt, completion) of each step


@dataclass(frozen=True)
class Offline(SFT):
    """Learning from recordings alone: sft.py's settings, whose `base` is where policy and value start, and
    whose `per_task` are the first trajectories of each task, successes or not."""
    method: tyro.conf.Suppress[str] = ""  # The command's first word
    beta: float = 1.0  # AWR's temperature, of standardised advantages (released code: 1)
    weight_limit: float = 20.0  # AWR's largest weight (released code: 20)
    decay: float = 0.5  # DigiRL's lambda
    share: float = 0.1  # Share of the trajectories that DigiRL's first filter keeps (released code: .1)
    horizon: int = 14  # H_max of DigiRL's second filter: steps of the longest trajectory

    def __post_init__(self):
        if not (0 <= self.decay <= 1 and 0 < self.share <= 1 and min(self.beta, self.horizon) > 0):
            raise UserError("give --decay and --share from 0 to 1, --share, --beta and --horizon above 0")


# The SFT policy has had a pass: half its rate.
PRESETS = {name: Offline(**vars(POLICY_SFT["laptop"]) | dict(
    base="runs/laptop/sft", per_task=15, lr=1e-4, out=f"runs/laptop/{name}", method=name))
    for name in ("cloning", "awr", "digirl")}


def awr_weights(returns: Tensor, values: Tensor, beta: float, limit: float) -> Tensor:
    """w_h (N,) from R_h (N,) and V(s_h) (N,), cut at `limit`; all 1 where the advantages are all equal.

    >>> awr_weights(torch.tensor([1., 0.]), torch.tensor([.5, .5]), 0.5, 5.0)  # e^2 is cut, e^-2
    tensor([5.0000, 0.1353])
    """
    advantages = returns - values  # (N,)
    spread = advantages.std(correction=0)
    if spread < 1e-6:
        return torch.ones_like(advantages)
    return ((advantages - advantages.mean()) / spread / beta).exp().clamp(max=limit)  # AWR, Algorithm 1


def digirl_advantages(reward: float, values: Tensor, decay: float) -> Tensor:
    """A^step (H,) of a trajectory, from V(s_1) .. V(s_H) (H,). Nothing follows the last step: its V is 0.

    >>> digirl_advantages(1.0, torch.tensor([.2, .6]), 0.5)  # .5 + .5 (.6 - .2), and 1
    tensor([0.7000, 1.0000])
    """
    trust = decay ** torch.arange(len(values) - 1, -1, -1, dtype=values.dtype)  # (H,)  lambda^(H-h)
    gained = torch.cat([values[1:], values.new_tensor([reward])]) - values  # (H,)  V(s_h+1) + r_h - V(s_h)
    return trust * reward + (1 - trust) * gained


def digirl_kept(rewards: Sequence[float], values: Sequence[Tensor], config: Offline) -> list[Tensor]:
    """Of each trajectory, which of its steps (H,) bool are cloned. Equal A^instruct stay or go together."""
    instruct = torch.tensor([r - float(v[0]) for r, v in zip(rewards, values)], dtype=torch.float64)
    bar = instruct.sort(descending=True).values[max(1, math.floor(config.share * len(instruct))) - 1]
    return [(digirl_advantages(r, v, config.decay) > 1 / config.horizon) & bool(a >= bar)
            for r, v, a in zip(rewards, values, instruct)]


def learn_values(config: Offline, read: Sequence[Read]) -> list[Tensor]:
    """V(s_1) .. V(s_H) (H,) of each trajectory, by a model that learns its outcome."""
    critic = lm.load(config.base, config.context, sharded=distributed.grouped())
    prompts = [prompt for _, pairs in read for prompt, _ in pairs]
    outcomes = torch.tensor([float(t.reward == 1) for t, pairs in read for _ in pairs])
    # Microbatches hold prompts of one length, and so of one task, of like outcome: a step has several.
    how = replace(config, microbatches=max(4, config.microbatches), out=f"{config.out}.value")
    sft.fit(critic, webrl.asked(critic, prompts), how, how.out, webrl.value_loss(outcomes))
    return list(webrl.values(critic, prompts, config.tokens).split([len(pairs) for _, pairs in read]))


def learn(config: Offline) -> dict:
    """Write config.out; returns what was learned from. Killed, it goes on from the last checkpoint of value
    or policy. All ranks call it."""
    model, read = lm.load(config.base, config.context, sharded=distributed.grouped()), list[Read]()
    for t in sft.first(data.read_trajectories(config.recorded), config.per_task):
        pairs = [policy.step_pair(model, t.goal, step, t.system) for step in t.steps]
        if pairs and all(len(prompt) + len(completion) <= model.context for prompt, completion in pairs):
            read.append((t, pairs))
    lengths, rewards = [len(pairs) for _, pairs in read], [float(t.reward == 1) for t, _ in read]
    weights = [torch.full((steps,), r) for r, steps in zip(rewards, lengths)]  # cloning
    report = {"trajectories": len(read), "successes": sum(rewards)}
    if config.method != "cloning":
        values = learn_values(config, read)  # [(H,), ...]
        returns, v = torch.cat(weights), torch.cat(values)  # (N,)
        for r in (1.0, 0.0):  # how well the value tells them apart
            report[f"mean V where r is {r:g}"] = round(float(v[returns == r].mean()), 4)
        weights = (digirl_kept(rewards, values, config) if config.method == "digirl" else
                   list(awr_weights(returns, v, config.beta, config.weight_limit).split(lengths)))
    rows = [(pair, float(weight)) for (t, pairs), of in zip(read, weights)
            for step, pair, weight in zip(t.steps, pairs, of) if weight and not step.error]
    of_rows = torch.tensor([weight for _, weight in rows])

    def loss(logp: Tensor, row: Tensor, which: Sequence[int]) -> Tensor:  # (N,), (N,) -> 0-d
        return -(of_rows[list(which)].to(logp.device)[row] * logp).sum()

    items = [[pair] for pair, _ in rows]
    report |= {"steps cloned": len(rows)} | sft.fit(model, items, config, f"{config.out}.sft", loss)
    lm.save(model, config.out)
    if distributed.rank() == 0:  # the model is written: its checkpoints can go
        shutil.rmtree(f"{config.out}.sft", ignore_errors=True)
        shutil.rmtree(f"{config.out}.value", ignore_errors=True)
    return report


if __name__ == "__main__":
    config = chosen(PRESETS)
    distributed.command(lambda: learn(config))
