"""Offline reinforcement learning on recorded trajectories: no world model, no judge, no new page. Filtered
cloning, AWR, and DigiRL's doubly robust filter.

    python -m rivals.offline cloning        # or awr, or digirl; the laptop's, after `make`

A trajectory has steps 1 .. H and a reward r at its end; R_h = r. All three start at the SFT agent and
maximise a likelihood of recorded steps:

    cloning   E[ log pi(a_h|s_h) ]  over the steps of trajectories with r = 1
    AWR       E[ w_h log pi(a_h|s_h) ],  w_h = exp( (R_h - V(s_h)) / beta )     (arXiv 1910.00177, Alg. 1)
    DigiRL    E[ log pi(a_h|s_h) ]  over the steps that two filters leave       (arXiv 2406.11896, section 4)
              trajectories whose A^instruct = r - V(s_1) is among the largest `share`
              steps whose A^step_h > 1 / H_max, with r_H = r, else r_h = 0, and
              A^step_h = lambda^(H-h) r + (1 - lambda^(H-h)) (V(s_h+1) + r_h - V(s_h))
    V         max E[ r log V(s_h) + (1 - r) log(1 - V(s_h)) ]                   (DigiRL, section 4)

V is a language model, a copy of the SFT agent: V(s) = p(YES) against p(NO) behind the prompt of a turn. So
its cross-entropy is an ordinary fine-tuning, and needs no head.

Where we differ from the papers and from released code, and why
- AWR's V minimises the square of R - V. For a reward of 0 or 1 both losses have the same minimum, E[r | s].
- Released AWR (xbpeng/awr) standardises R - V over the data, has beta 1 and cuts weights at 20; here, too.
  Its R is TD(.95) at a discount of .99; ours is r: trajectories have a few steps.
- DigiRL's V^instruct and V^step are two models there, V^instruct reads the instruction alone. Here they are
  one: V of the first page. Released DigiRL (its DigiRLTrainer) takes the smaller of two critics, and keeps
  steps with V(s_h+1) - V(s_h) - .05 + r_h + gamma^(H-h) r > 0, without the (1 - lambda^(H-h)).
- Released DigiRL filters trajectories offline by the reward alone, steps by value. Its cut is the
  ninth decile of rewards of 0 and 1, so every success stays where more than a tenth are. Here by A^instruct,
  as in the paper and as the released code does online: a tenth stays, the successes of lowest V(s_1).
- DigiRL's equations are given as we know them; its paper could not be read again (NOTES 12.4).
- A step that the browser refused is a state, whose value is learned, but is never cloned.
"""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import tyro
from torch import Tensor

import data
import finetune
import lm
import policy
import recipe
from data import Trajectory

Read = tuple[Trajectory, list[lm.Pair]]  # a trajectory, and the (prompt, completion) of each step

SFT = replace(recipe.LAPTOP_POLICY.sft, lr=1e-4)  # the SFT agent has had a pass: half its rate


@dataclass(frozen=True)
class Config:
    """Learning from recordings alone."""

    method: tyro.conf.Suppress[str] = ""
    """The command's first word."""
    policy: str = recipe.LAPTOP.policy
    """Folder of the SFT agent, where policy and value start."""
    out: str = "runs/laptop/offline"
    """Folder of the result."""
    trajectories: str = recipe.LAPTOP.trajectories
    """Recorded trajectories."""
    per_task: int = recipe.LAPTOP_WORLD_MODEL.per_task
    """Trajectories of each task to learn from (by default what the world model learned); 0 takes all."""
    context: int = recipe.LAPTOP.context
    """Longest prompt with its completion, in tokens."""
    sft: finetune.FineTune = field(default_factory=lambda: SFT)
    """How the policy learns."""
    # Sequences of a microbatch are alike in length, and so, where tasks are few, in outcome: a step mixes
    # several.
    value: finetune.FineTune = field(default_factory=lambda: replace(SFT, microbatches=4))
    """How the value learns. OUT/training.json says what it came to: V of the successes and of the failures,
    means over their pages."""
    beta: float = 1.0
    """AWR's temperature, of standardised advantages (released code: 1)."""
    weight_limit: float = 20.0
    """AWR's largest weight (released code: 20)."""
    decay: float = 0.5
    """DigiRL's lambda."""
    share: float = 0.1
    """Share of the trajectories that DigiRL's first filter keeps (released code: .1)."""
    horizon: int = 14
    """H_max of DigiRL's second filter: steps of the longest trajectory."""

    def __post_init__(self):
        if not (0 <= self.decay <= 1 and 0 < self.share <= 1 and self.beta > 0 and self.horizon > 0):
            raise ValueError(
                "give a decay from 0 to 1, a share above 0 and up to 1, a beta and a horizon above 0; not "
                f"{self.decay}, {self.share}, {self.beta} and {self.horizon}")


# ---- the losses, as pure functions -------------------------------------------------------------------------


def awr_weights(returns: Tensor, values: Tensor, beta: float, limit: float) -> Tensor:
    """w_h (N,) of N steps, from R_h (N,) and V(s_h) (N,): exp of the standardised advantage over beta, cut at
    `limit`. All 1 where the advantages are all equal.

    >>> awr_weights(torch.tensor([1., 0.]), torch.tensor([.5, .5]), 1.0, 20.0)  # e, 1/e
    tensor([2.7183, 0.3679])
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
    steps = len(values)
    trust = decay ** torch.arange(steps - 1, -1, -1, dtype=values.dtype)  # (H,)  lambda^(H-h)
    after = torch.cat([values[1:], values.new_zeros(1)])  # (H,)
    at_end = torch.zeros(steps, dtype=values.dtype)
    at_end[-1] = reward
    return trust * reward + (1 - trust) * (after + at_end - values)


def digirl_kept(rewards: Sequence[float], values: Sequence[Tensor], config: Config) -> list[Tensor]:
    """Of each trajectory, which of its steps (H,) bool are cloned. Equal A^instruct stay or go together."""
    instruct = torch.tensor([r - float(v[0]) for r, v in zip(rewards, values)], dtype=torch.float64)
    rank = max(1, math.floor(config.share * len(instruct)))
    bar = instruct.sort(descending=True).values[rank - 1]
    return [(digirl_advantages(r, v, config.decay) > 1 / config.horizon) & bool(a >= bar)
            for r, v, a in zip(rewards, values, instruct)]


# ---- learning ----------------------------------------------------------------------------------------------


def readable(model: lm.LM, trajectories: Sequence[Trajectory], counts: Counter) -> list[Read]:
    """(trajectory, the lm.Pair of each step) of those that fit the context whole. Adds to `counts`."""
    found = []
    for trajectory in trajectories:
        goal, system = trajectory.goal, trajectory.system
        pairs = [policy.step_pair(model, goal, step, system) for step in trajectory.steps]
        fits = all(len(prompt) + len(completion) <= model.context for prompt, completion in pairs)
        counts["trajectories" if fits and pairs else "dropped: too long"] += 1
        if fits and pairs:
            found.append((trajectory, pairs))
    return found


def learn_values(config: Config, trajectories: Sequence[Read]) -> list[Tensor]:
    """V(s_1) .. V(s_H) (H,) of each trajectory, by a model that learns its outcome from each of its pages."""
    model = lm.load(config.policy, config.context, made_by="python sft.py policy laptop")
    yes, no = (model.template.completion_ids(word) for word in ("YES", "NO"))
    assert yes[0] != no[0], "the first token has to tell them apart"
    asked = [(prompt, yes if trajectory.reward == 1 else no) for trajectory, pairs in trajectories
             for prompt, _ in pairs]
    finetune.fit(model, asked, config.value, "value", checkpoint=f"{config.out}.value")  # its cross-entropy
    margins: list[float] = []
    for k in range(0, len(asked), 256):  # each reads V numbers
        some = [prompt for prompt, _ in asked[k : k + 256]]
        margins += model.margins(some, [yes[0]] * len(some), [no[0]] * len(some))
    values = torch.tensor(margins, dtype=torch.float64).sigmoid()
    return list(values.split([len(pairs) for _, pairs in trajectories]))


def weighed(config: Config, trajectories: Sequence[Read]) -> tuple[list[lm.Pair], list[float], dict]:
    """What the policy learns, how much each step weighs, and what the value came to."""
    said, rewards = {}, [float(trajectory.reward == 1) for trajectory, _ in trajectories]
    if config.method == "cloning":
        weights = [[r] * len(pairs) for r, (_, pairs) in zip(rewards, trajectories)]
    else:
        values = learn_values(config, trajectories)
        for name, reward in (("V of successes", 1.0), ("V of failures", 0.0)):
            some = [v for v, r in zip(values, rewards) if r == reward]
            said[name] = round(float(torch.cat(some).mean()), 4) if some else None
        if config.method == "awr":
            returns = torch.cat([torch.full_like(v, r) for r, v in zip(rewards, values)])  # (N,)
            all_weights = awr_weights(returns, torch.cat(values), config.beta, config.weight_limit)
            weights = [w.tolist() for w in all_weights.split([len(v) for v in values])]
        else:
            weights = [kept.double().tolist() for kept in digirl_kept(rewards, values, config)]
    rows = [(pair, weight) for (trajectory, pairs), of_steps in zip(trajectories, weights)
            for step, pair, weight in zip(trajectory.steps, pairs, of_steps) if weight and not step.error]
    return [pair for pair, _ in rows], [weight for _, weight in rows], said


def learn(config: Config) -> dict:
    """Write config.out; returns what was learned from and what it cost: labels, recorded rewards that
    something learned from. Killed, it goes on from the last checkpoint of value or policy."""
    recorded, counts = data.read_trajectories(config.trajectories), Counter[str]()
    chosen = finetune.first(recorded, config.per_task)
    model = lm.load(config.policy, config.context, made_by="python sft.py policy laptop")
    trajectories = readable(model, chosen, counts)
    counts["successes"] = sum(trajectory.reward == 1 for trajectory, _ in trajectories)
    pairs, weights, said = weighed(config, trajectories)
    of_pairs = torch.tensor(weights)

    def loss(logp: Tensor, row: Tensor, which: Sequence[int]) -> Tensor:  # (N,), (N,) -> 0-d
        return -(of_pairs[list(which)].to(logp.device)[row] * logp).sum()

    checkpoint = f"{config.out}.sft"
    report = finetune.fit(model, pairs, config.sft, config.method, checkpoint=checkpoint, loss=loss)
    report |= counts | said | {"labels": len(chosen), "examples": len(pairs)}
    lm.save(model, config.out)
    finetune.write_report(config.out, report)
    for folder in (checkpoint, f"{config.out}.value"):  # the model is written: its checkpoints can go
        shutil.rmtree(folder, ignore_errors=True)
    return report


def main():
    said = {"cloning": "only successes", "awr": "advantage-weighted regression",
            "digirl": "its doubly robust filter"}
    config = tyro.extras.overridable_config_cli(
        {name: (text, Config(method=name, out=f"runs/laptop/{name}")) for name, text in said.items()})
    recipe.command(lambda: learn(config))


if __name__ == "__main__":
    main()
