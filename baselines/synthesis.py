"""Dreams to cloning: what the judge calls a success is cloned, and the next round dreams with that policy.
WebEvolver's world model as a server of synthetic pages (arXiv 2504.21024), without its real ones; in one
round Explorer's way (arXiv 2502.11357): explore, keep what a verifier passes, then SFT.

    python -m baselines.synthesis laptop [--rounds 4 --updates 5]         # after `make`

    round k = 1 .. K:   D_k = D_k-1 and { dream y of pi_k-1 : the judge says YES }
                        pi_k = argmax_pi  sum over y in D_k, t of log pi(y_t | all before it),   from pi_0

pi_0 is the SFT policy. It is rejection sampling: all that train.py has, starts, world model, judge and as
many dreams (--updates: batches that the rounds share; none of their rollouts is an expert's). But no failure
teaches anything, and nothing weighs less because its whole group succeeded.

Where we differ from the papers and from released code, and why
- WebEvolver's world model learns between rounds from new real trajectories, and those are cloned as well.
  Here no real page is visited: both would need labels and steps that train.py does not have.
- In Explorer a large model walks real sites, and rewrites its task on the way. Both papers write new goals
  with a language model. Here pages are dreamed, and goals are the recorded ones.
- Both judge with a large model that saw everything. Here the judge is train.py's.
- Each round starts at the SFT policy again and learns from all rounds, as ReST-EM does (arXiv 2312.06585):
  to clone one's own samples again and again sharpens them.
- A success counts as often as it was dreamed: tasks that nearly always succeed make most of D.

Killed, the same command goes on: a round's dreams and its policy are files in OUT.run. One process.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import distributed
import dream
import lm
import sft
import train
from config import POLICY_SFT, SFT, TRAIN, Train, UserError, chosen
from policy import Rollout


@dataclass(frozen=True)
class Synthesis(Train):
    """train.py's dreams, cloned. Its settings of loss, evaluation and checkpoints do nothing."""
    rounds: int = 4  # They share the `updates` batches. 1: the SFT policy dreams, and is cloned once
    # How a round's policy learns.
    sft: SFT = field(default_factory=lambda: replace(POLICY_SFT["laptop"], lr=1e-4))

    def __post_init__(self):
        super().__post_init__()
        if self.sampler == "vllm" or self.real_fraction or not 0 < self.rounds <= self.updates:
            raise UserError("dreams of one process: give --sampler transformers, --real-fraction 0, and at "
                            "most as many --rounds as --updates")


def successes(rollouts: Sequence[Rollout]) -> list[tuple[str, lm.Pair]]:
    """(task, turn) of the dreams that the judge called a success, in the tokens that the agent wrote. A step
    that the dreamed page refused is left out, as policy.examples leaves out those of recordings."""
    return [(one.start.task, turn[:2]) for one in rollouts
            if one.reward == 1 and not one.discarded and not one.expert
            for step, turn in zip(one.steps, one.turns) if not step.error]


def synthesise(config: Synthesis) -> dict:
    """All rounds, or those that a killed run left. Writes config.out; returns what it learned."""
    files = Path(f"{config.out}.run")
    run = train.identity(config) | {"updates": config.updates}  # the rounds share them
    files.mkdir(parents=True, exist_ok=True)
    starts = dream.starts(config)
    _, models = train.load_models(config, files)
    rows, report = [], {}
    for k in range(config.rounds):
        dreamed, folder = files / f"round-{k}.json", files / f"round-{k}"
        if not dreamed.exists():
            found = []
            for n in range(k * config.updates // config.rounds, (k + 1) * config.updates // config.rounds):
                sampled = dream.sample_starts(random.Random(f"{config.seed} {n}"), starts, config.groups)
                batch = dream.batch(models, sampled, config, (config.seed, n))
                found += successes(batch.rollouts)
                print(f"batch {n}: {dict(Counter(one.discarded or one.reward for one in batch.rollouts))}")
            dreamed.with_suffix(".tmp").write_text(json.dumps({"run": run, "rows": found}))
            dreamed.with_suffix(".tmp").replace(dreamed)
        kept = json.loads(dreamed.read_text())
        if kept["run"] != json.loads(json.dumps(run)):
            raise UserError(f"{dreamed} is of other settings; give another --out, or remove {files}")
        rows += kept["rows"]
        if not rows:
            raise UserError(f"{dreamed}: no dream is a success. Give more --updates, or another --policy")
        if not (folder / "config.json").exists():
            model = lm.load(config.policy, config.context, lm.matrix_type(config.compute))
            report = sft.fit(model, [[pair] for _, pair in rows], replace(config.sft, out=str(folder)),
                             f"{folder}.sft")
            lm.save(model, folder)
        # From the folder, in which it is rounded, whether this process wrote it or one that was killed.
        model = lm.load(folder, config.context, lm.matrix_type(config.compute))
        models = replace(models, agent=lm.Batched(model))
    lm.save(model, config.out)
    return report | {"turns cloned": dict(sorted(Counter(task for task, _ in rows).items()))}


if __name__ == "__main__":
    laptop = Synthesis(**vars(TRAIN["laptop"]) | dict(out="runs/laptop/synthesis", updates=5,
                                                    expert_fraction=0.0))  # as many dreams as train.py
    config = chosen({"laptop": laptop})
    distributed.command(lambda: synthesise(config))
