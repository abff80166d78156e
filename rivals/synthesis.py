"""Dreams to cloning: what the judge calls a success is cloned, and the next round dreams with that agent.
WebEvolver's world model as a server of synthetic pages (arXiv 2504.21024), without its real ones. In one
round it clones the SFT agent's own dreams, once. That is not Explorer (arXiv 2502.11357): there a large model
walks real sites, rewrites its task on the way, and a verifier reads what came of it.

    python -m rivals.synthesis [--rounds 4 --updates 20]        # the laptop's, after `make`

    round k = 1 .. K:   D_k = D_k-1 and { dream y of pi_k-1 : the judge says YES }
                        pi_k = argmax_pi  sum over y in D_k, t of log pi(y_t | all before it),   from pi_0

pi_0 is the SFT agent. It is rejection sampling: all that the dreamer has, starts, world model, judge and as
many dreams (--updates: batches that the rounds share; none of their rows is an expert's). But no failure
teaches anything, and nothing weighs less because its whole group succeeded.

Where we differ from the papers and from released code, and why
- WebEvolver's world model learns between rounds from new real trajectories, and those are cloned as well.
  Here no real page is visited: both would need labels and steps that the dreamer does not have.
- Both write new goals with a language model. Here goals are the recorded ones.
- Both judge with a large model that saw everything. Here the judge is the dreamer's.
- Each round starts at the SFT agent again and learns from all rounds, as ReST-EM does (arXiv 2312.06585):
  to clone one's own samples again and again sharpens them.
- A success counts as often as it was dreamed: tasks that nearly always succeed make most of D.

Flags are train.py's. Those of its loss (lr, minibatches, clip), looks and checkpoints do nothing. One
process.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro
from tqdm import tqdm

import dream
import finetune
import lm
import measure
import recipe
import train
from policy import TokenTrajectory

Row = tuple[str, lm.Pair]  # (task, a step that is cloned)


@dataclass(frozen=True)
class Config(recipe.Train):
    """train.py's dreams, cloned."""

    rounds: int = 4
    """Rounds that share the `updates` batches of dreams. 1: the SFT agent dreams, and is cloned once."""
    sft: finetune.FineTune = field(default_factory=lambda: replace(recipe.LAPTOP_POLICY.sft, lr=1e-4))
    """How a round's agent learns."""

    def __post_init__(self):
        super().__post_init__()
        if self.sampler != "transformers" or self.world != "dream" or self.offload:
            raise ValueError("rivals/synthesis.py dreams, in one process: give --sampler transformers, "
                             "--world dream and no --offload")
        if self.dreaming.judge == "current" or self.epochs:
            raise ValueError("rivals/synthesis.py has a frozen judge, and a number of batches: leave out "
                             "--epochs, and give --dreaming.judge policy or world_model")
        if not 0 < self.rounds <= self.updates:
            raise ValueError(f"{self.rounds} rounds for {self.updates} batches of dreams: give each one")


def settings() -> Config:
    """The laptop's. No row is an expert's: the agent was cloned from those."""
    dreaming = replace(recipe.LAPTOP.dreaming, expert_fraction=0.0)
    return Config(**vars(recipe.LAPTOP) | {"out": "runs/laptop/synthesis", "dreaming": dreaming})


def successes(trajectories: Sequence[TokenTrajectory]) -> list[Row]:
    """The steps of the dreams that the judge called a success, in the tokens that the agent wrote. A step
    that the dreamed page refused is left out, as policy.examples leaves out those of recordings."""
    return [(t.start.task, pair) for t in trajectories if t.reward == 1 and not t.dropped and not t.expert
            for step, pair in zip(t.steps, t.pairs) if not step.error]


# ---- a round -----------------------------------------------------------------------------------------------


def dream_round(config: Config, models: dream.Models, starts: Sequence[dream.Drawn], batches: Sequence[int],
                logged: Sequence[dict]) -> tuple[list[Row], list[dict]]:
    """(what is cloned, a line of metrics a batch) of these batches of dreams. `logged`: the lines of the
    rounds before."""
    rows, lines = [], []
    for n in tqdm(batches, desc="dreaming", unit="batch", dynamic_ncols=True):
        began, sampled = time.time(), lm.tokens_sampled()
        batch = models.draw_and_dream(random.Random(f"{config.seed} {n}"), starts, config.dreaming,
                                      (config.seed, n))
        rows += successes(batch.trajectories)
        lines.append({"update": n, **measure.of_batch(batch), "seconds_dream": round(time.time() - began, 2),
                      "tokens_sampled": lm.tokens_sampled() - sampled})
        recipe.check_drops([*logged, *lines], config)
    return rows, lines


def clone(config: Config, rows: Sequence[Row], folder: Path) -> dict:
    """Fine-tune the SFT agent on `rows` and write it to `folder`."""
    if not rows:
        raise ValueError(f"{config.out}: the judge called no dream a success, so there is nothing to clone. "
                         "Give more --updates, or another --policy")
    model = lm.load(config.policy, config.context, lm.matrix_type(config.compute))
    return finetune.learn(model, [pair for _, pair in rows], config.sft, "cloning", str(folder),
                          {"examples": len(rows)})


def synthesise(config: Config) -> dict:
    """All rounds, or those that a killed run left. Writes config.out; returns what it learned and cost."""
    config, out = recipe.with_type(config), Path(config.out)
    files = out.with_name(f"{out.name}.run")
    files.mkdir(parents=True, exist_ok=True)
    wanted, file = json.dumps(recipe.identity(config), indent=1), files / "config.json"
    if file.exists() and file.read_text() != wanted:
        raise ValueError(f"{file}: the run there has other settings or models; give another --out, or remove "
                         f"{files}")
    write(file, wanted)
    agent, models = train.load_models(config, files)
    starts = recipe.fitting(agent, recipe.starts(config), config)
    rows, lines, report = list[Row](), list[dict](), {}
    for k in range(1, config.rounds + 1):
        dreamed, folder = files / f"round-{k}.json", files / f"round-{k}"
        if not dreamed.exists():
            batches = range((k - 1) * config.updates // config.rounds, k * config.updates // config.rounds)
            made = dream_round(config, replace(models, agent=agent), starts, batches, lines)
            write(dreamed, json.dumps(made))
        found, of_round = json.loads(dreamed.read_text())
        rows, lines = rows + [(task, tuple(pair)) for task, pair in found], lines + of_round
        if not (folder / "training.json").exists():
            clone(config, rows, folder)
        report = json.loads((folder / "training.json").read_text())
        # From the folder, in which it is rounded, whether this process wrote it or one that was killed.
        agent = lm.load(folder, config.context, lm.matrix_type(config.compute))
    write(files / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    lm.save(agent, out)
    report |= {name: sum(line[name] for line in lines) for name in ("dreams", "tokens_sampled")}
    cloned = Counter(task for task, _ in rows)
    report |= {"rounds": config.rounds, "cloned steps": dict(sorted(cloned.items()))}
    finetune.write_report(out, report)
    return report


def write(file: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, file)


def main():
    config = tyro.cli(Config, default=settings(), description=__doc__)
    recipe.command(lambda: synthesise(config))


if __name__ == "__main__":
    main()
