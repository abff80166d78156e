"""Dreams to cloning: what the judge calls a success is cloned, and the next round dreams with that agent.
WebEvolver's world model as a server of synthetic pages (arXiv 2504.21024), without its real ones. In one
round it clones the SFT agent's own dreams, once. That is not Explorer (arXiv 2502.11357): there a large model
walks real sites, rewrites its task on the way, and a verifier reads what came of it.

    python -m rivals.synthesis --policy DIR --world-model DIR --out DIR [--rounds 4 --updates 68]

    round k = 1 .. K:   D_k = D_k-1 and { dream y of pi_k-1 : the judge says YES }
                        pi_k = argmax_pi  sum over y in D_k, t of log pi(y_t | all before it),   from pi_0

pi_0 is the SFT agent. It is rejection sampling: all that the dreamer has, starts, world model, judge and as
many dreams (by --updates 68: batches that the rounds share; none of their rows is an expert's). But no
failure teaches anything, and nothing weighs less because its whole group succeeded.

Where we differ from the papers and from released code, and why
- WebEvolver's world model learns between rounds from new real trajectories, and those are cloned as well.
  Here no real page is visited: both would need labels and steps that the dreamer does not have.
- Both write new goals with a language model. Here goals are the recorded ones.
- Both judge with a large model that saw everything. Here the judge is the dreamer's.
- Each round starts at the SFT agent again and learns from all rounds, as ReST-EM does (arXiv 2312.06585):
  to clone one's own samples again and again sharpens them.
- A success counts as often as it was dreamed. Tasks that nearly always succeed make most of D; --share-tasks
  takes as many steps from every task, as far as they go.

Flags are train.py's. Those of its loss (lr, minibatches, clip), looks and checkpoints do nothing. One
process.
"""

import json
import random
import shutil
from collections import Counter, defaultdict
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
from judge import Judge
from policy import TokenTrajectory
from rivals.run import Run
from tiny import cpu, lessons
from world_model import WorldModel

Row = tuple[str, lm.Pair]  # (task, a step that is cloned)


@dataclass(frozen=True)
class Config(recipe.Train):
    """train.py's dreams, cloned."""

    rounds: int = 4
    """Rounds that share the `updates` batches of dreams. 1: the SFT agent dreams, and is cloned once."""
    share_tasks: bool = False
    """Clone at most as many steps of each task as the median task has."""
    sft: finetune.FineTune = field(default_factory=lambda: replace(
        lessons.Policy().sft, epochs=1, lr=1e-4))
    """How a round's agent learns."""

    def __post_init__(self):
        super().__post_init__()
        if self.sampler != "transformers" or self.world != "dream" or self.offload:
            raise ValueError("rivals/synthesis.py dreams, in one process: give --sampler transformers, "
                             "--world dream and no --offload")
        if (self.judge_model or self.dreaming.judge == "current" or self.epochs
                or self.dreaming.world_model_writes != "delta" or self.trained_share < 1):
            raise ValueError("rivals/synthesis.py has a frozen judge, deltas, and a number of batches: leave "
                             "out --judge-model, --dreaming.world-model-writes, --epochs and "
                             "--trained-share, and give --dreaming.judge policy or world_model")
        if not 0 < self.rounds <= self.updates:
            raise ValueError(f"{self.rounds} rounds for {self.updates} batches of dreams: give each one")


def settings() -> Config:
    """The laptop's. No row is an expert's: the agent was cloned from those."""
    dreaming = replace(lessons.TRAIN.dreaming, expert_fraction=0.0)
    return Config(**{**vars(lessons.TRAIN), "out": "runs/tiny/synthesis", "dreaming": dreaming,
                     "trained_share": 1.0})


def successes(trajectories: Sequence[TokenTrajectory]) -> list[Row]:
    """The steps of the dreams that the judge called a success, in the tokens that the agent wrote. A step
    that the dreamed page refused is left out, as policy.examples leaves out those of recordings."""
    return [(t.start.task, pair) for t in trajectories if t.reward == 1 and not t.dropped and not t.expert
            for step, pair in zip(t.steps, t.pairs) if not step.error]


def shared(rows: Sequence[Row], seed: int) -> list[Row]:
    """At most as many rows of each task as the median task has, drawn with `seed`.

    >>> rows = [("a", k) for k in range(9)] + [("b", 0), ("b", 1), ("c", 0)]
    >>> Counter(task for task, _ in shared(rows, 0))
    Counter({'a': 2, 'b': 2, 'c': 1})
    """
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row[0]].append(row)
    median = sorted(map(len, by_task.values()))[len(by_task) // 2] if by_task else 0
    return [row for task in sorted(by_task)
            for row in random.Random(f"{seed} {task}").sample(by_task[task], min(median, len(by_task[task])))]


def load(config: Config) -> tuple[lm.LM, dream.Models]:
    """(the SFT agent, who dreams), in this process and in their tokenizers' own templates."""
    recipe.check_demonstrations(config)
    compute, dreaming = lm.matrix_type(config.compute), config.dreaming
    agent = cpu.load(config.policy, "", config.context, compute)
    world_lm = cpu.load(config.world_model, "", config.world_model_context, compute)
    judge_lm = cpu.load(config.policy, "", config.judge_context, compute)
    judge = {"policy": judge_lm, "world_model": world_lm}[dreaming.judge]
    return agent, dream.Models(
        agent, WorldModel(world_lm, dreaming.world_model_tokens, dreaming.world_model_temperature),
        Judge(judge, dreaming.judge_tokens, dreaming.judge_threshold, dreaming.judge_unsure))


# ---- a round -----------------------------------------------------------------------------------------------


def dream_round(config: Config, models: dream.Models, starts, batches: Sequence[int], logged: Sequence[dict]
                ) -> tuple[list[Row], list[dict]]:
    """(what is cloned, a line of metrics a batch) of these batches of dreams. `starts`: recipe.fitting's;
    `logged`: the lines of the rounds before."""
    useful: dict[str, list[bool]] = defaultdict(list)
    for task, teaches in (group for line in logged for group in line["groups"]):
        useful[task].append(teaches)
    rows, lines = [], []
    for n in tqdm(batches, desc="dreaming", unit="batch", dynamic_ncols=True):
        sampled = lm.tokens_sampled()
        batch = models.draw_and_dream(random.Random(f"{config.seed} {n}"), *starts, config.dreaming,
                                      (config.seed, n), useful)
        for task, teaches in batch.useful:
            useful[task].append(teaches)
        rows += successes(batch.trajectories)
        lines.append({"update": n, **measure.of_batch(batch),
                      "tokens_sampled": lm.tokens_sampled() - sampled})
        recipe.check_drops([*logged, *lines], config)
    return rows, lines


def clone(config: Config, rows: Sequence[Row], folder: Path) -> dict:
    """Fine-tune the SFT agent on `rows` and write it to `folder`."""
    if not rows:
        raise ValueError(f"{config.out}: the judge called no dream a success, so there is nothing to clone. "
                         "Give more --updates, or another --policy")
    model = cpu.load(config.policy, "", config.context, lm.matrix_type(config.compute))
    checkpoint = folder.with_name(f"{folder.name}.sft")
    report = finetune.fit(model, [pair for _, pair in rows], replace(config.sft, seed=config.seed), "cloning",
                         checkpoint=checkpoint)
    lm.save(model, folder)
    shutil.rmtree(checkpoint, ignore_errors=True)
    return report


def synthesise(config: Config) -> dict:
    """All rounds, or those that a killed run left. Writes config.out; returns what it learned and cost."""
    config = recipe.with_type(config)
    run, compute = Run(config), lm.matrix_type(config.compute)
    agent, models = load(config)
    starts = recipe.fitting(agent, *recipe.starts(config), config)
    rows, lines, report = [], [], {}
    for k in range(1, config.rounds + 1):
        dreamed, folder = run.files / f"round-{k}.json", run.files / f"round-{k}"
        if not dreamed.exists():
            batches = range((k - 1) * config.updates // config.rounds, k * config.updates // config.rounds)
            found = dream_round(config, replace(models, agent=agent), starts, batches, lines)
            dreamed.with_suffix(".tmp").write_text(json.dumps(found))
            dreamed.with_suffix(".tmp").rename(dreamed)
            run.keep()
        found, of_round = json.loads(dreamed.read_text())
        rows, lines = rows + [(task, tuple(pair)) for task, pair in found], lines + of_round
        if not (folder / "report.json").exists():
            chosen = shared(rows, config.seed) if config.share_tasks else rows
            report = clone(config, chosen, folder) | {"examples": len(chosen)}
            (folder / "report.json").write_text(json.dumps(report))
            run.keep()
        report = json.loads((folder / "report.json").read_text())
        # From the folder, in which it is rounded, whether this process wrote it or one that was killed.
        agent = cpu.load(folder, "", config.context, compute)
    (run.files / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lm.save(agent, config.out)
    judged_yes = Counter(task for task, _ in rows)
    dreams = sum(line["dreams"] for line in lines)
    return run.end(report | finetune.drawn(config) | {"rounds": config.rounds, "dreams": dreams,
                                                    "cloned steps": dict(sorted(judged_yes.items()))})


def main():
    config = tyro.cli(Config, default=settings(), description=__doc__)
    recipe.command(lambda: synthesise(config))


if __name__ == "__main__":
    main()
