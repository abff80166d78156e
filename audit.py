"""How far the dreams are from reality. One table; with --json FILE all that it is made of.

    python audit.py --fidelity FILE [--samples 8]
        the world model on recorded transitions, teacher-forced and in an open loop; and is it sure where it
        is right?
    python audit.py --replay --checkpoint runs/laptop/dream --judge-checkpoint runs/laptop/reward_model
        an agent's dreams from the first pages of --seeds, their actions done for real, its own real tries
    python audit.py --table DREAM.json SFT.json
        what --replay wrote of several agents: each, and all together
    python audit.py --judge --checkpoint runs/laptop/sft --temperature 1 --seeds 1000000:30
        the judge on real trajectories
    python audit.py --dream --checkpoint AGENT --world-model FOLDER --judge-checkpoint FOLDER --json FILE
        success in dreams alone, by length: small enough to be kept of every agent
    python audit.py --rank FOLDER
        do dreams rank agents as reality does? From a JSON file an agent: real tries, and dreams (`ranked`)
    python audit.py --show
        one dream, step by step: print it (--task, --seed)
    python audit.py --delta BEFORE.txt AFTER.txt
        what changed between two pages, as the world model would say it

Each measure is defined in fidelity.py and measure.py, where it is counted. The audits learn nothing, so they
alone read recordings of any seed (data.read_for_audit). Whatever learns reads through data.read_trajectories,
which refuses all but training seeds.
"""

import contextlib
import copy
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tqdm import tqdm

import a11y
import data
import dream
import evaluate
import fidelity
import lm
import measure
import recipe
import remote
from evaluate import in_context, loaded
from judge import AnyJudge, Judge
from node import dreams, webworld
from policy import Sampler, TokenTrajectory
from world_model import WorldModel
from worlds.miniwob import Browser


@dataclass(frozen=True)
class Config(evaluate.WithDreams):
    """The audits. A length of 0 is the run's (`run`), and without a run the laptop's."""
    replay: bool = False
    """Dream from the first pages of --seeds; do the dreams' actions for real; let the agent try for real."""
    judge: bool = False
    """Audit the judge on the agent's own trajectories."""
    fidelity: str = ""
    """Audit the world model on this file of recorded transitions."""
    samples: int = 0
    """With --fidelity: draw so many predictions a step, at the world model's temperature, and see whether
    they agree where it is right."""
    dream: bool = False
    """Dream from the first pages of --seeds, and nothing more: dreams of up to 9 steps (by default 8)."""
    rank: tuple[Path, ...] = ()
    """Print how dreams rank the agents of these folders of results, and stop."""
    seeds: str = "1000000:10"
    """START:COUNT: COUNT first pages of each task."""
    world_model_writes: str = "delta"
    """What the world model writes: a `delta`, or the whole next `page`, as WebWorld's do
    (node/webworld.py)."""
    trajectories: str = recipe.RECORDED
    """File of recorded trajectories: their words are known (fidelity.fidelity), and --show dreams from one of
    their first pages."""
    show: bool = False
    """Print one dream, step by step, and stop."""
    delta: tuple[Path, Path] | None = None
    """Print the delta between the pages in these two files, and stop."""
    task: str = ""
    """Task of the dream to show; any when empty."""
    seed: int = 0
    """Seed that chooses the start, and the dream of it, to show."""

    def __post_init__(self):
        super().__post_init__()
        if sum(map(bool, (self.replay, self.judge, self.fidelity, self.dream, self.rank, self.table,
                          self.show, self.delta))) != 1:
            raise ValueError("what to audit? give one of --replay, --judge, --fidelity FILE, --dream, --rank "
                             "FOLDER, --table FILE, --show and --delta FILE FILE")
        if self.dream and self.horizon > 9:
            raise ValueError(f"--horizon {self.horizon}: --dream keeps a digit of each dream, so 9 at most")
        data.check_counts(0, samples=self.samples)
        if self.world_model_writes not in webworld.WRITES:
            raise ValueError(f"a world model writes a delta or a page, not {self.world_model_writes!r}")
        if self.agent_url and (self.judge or self.replay or self.dream) and not self.judge_checkpoint:
            raise ValueError("an agent behind a URL gives no log-probs, and cannot judge: give "
                             "--judge-checkpoint FOLDER")
        if self.on.benchmark:
            raise ValueError("audits know MiniWoB++ alone: leave --benchmark out")


def run(config: Config) -> dict:
    """The result that the flags ask for, and the settings that it was measured with."""
    if config.rank or config.table:
        return ranked(config.rank) if config.rank else pooled(config.table)
    if config.dream:
        config = replace(config, horizon=config.horizon or measure.LENGTHS[-1])
    config, measured = evaluate.prepared(config)
    one_engine(config)
    if config.fidelity:
        return of_world_model(config) | measured
    seeds = data.parse_seeds(config.seeds)
    starts = measure.real_starts(config.tasks, seeds)
    own = not config.judge_checkpoint  # the agent judges, in the same engine
    with (evaluate.agent(config, config.judge_context if own else 0) as model, Browser() as web,
          judge_of(config, model) as judge):
        starts = starts if config.judge else fidelity.shown(web, starts)
        played = [] if config.dream else measure.play(web, model, starts, config.horizon,
                                                      config.max_new_tokens, config.temperature, seed=1)
        verdicts = {} if config.dream else fidelity.judged(judge, played)
        if config.judge:
            return verdicts | measured
        dreamed = imagined(model, judge, starts, config)
        if config.dream:
            return {"dreams": fidelity.lengths_of_success(dreamed, config.tasks, seeds),
                    "world": world_of(config), "horizon": config.horizon} | measured
        replayed = fidelity.replay(web, dreamed)
    steps = [step for done in replayed for step in done.steps]
    known = fidelity.recorded_words(data.read_for_audit(config.trajectories))
    return (verdicts | fidelity.transfer(dreamed, replayed, played) | measured
            | {"steps of dreams": fidelity.by_task_and_depth(steps, known), "horizon": config.horizon})


def of_world_model(config: Config) -> dict:
    """The world model on recorded transitions."""
    recorded = data.read_for_audit(config.fidelity)
    known = fidelity.recorded_words(recorded)
    with world_model(config, temperature=0.0) as model:
        told, alone = (fidelity.predicted(model, recorded, open_loop) for open_loop in (False, True))
        drawing = copy.copy(model)
        drawing.temperature = config.world_model_temperature
        sure = {"calibration": {f"{config.samples} draws": fidelity.calibration(
            drawing, told, config.samples)}} if config.samples else {}
    return {"teacher-forced": fidelity.by_task_and_depth(told, known),
            "open loop": fidelity.by_task_and_depth(alone, known), **sure, "misses": fidelity.misses(told)}


def pooled(files: Sequence[str]) -> dict:
    """What --replay wrote, agent by agent and of all together."""
    tries = {file: json.loads(Path(file).read_text()).get("tries") for file in files}
    if other := [file for file, some in tries.items() if some is None]:
        raise ValueError(f"{other[0]} is no result of audit.py --replay --json")
    together = [row for some in tries.values() for row in some]
    return {"success": {name: fidelity.consistency(some)
                        for name, some in [*tries.items(), ("all", together)]}}


def ranked(folders: Sequence[Path]) -> dict:
    """How dreams rank the agents of these folders, beside reality. A file of an agent has `evaluation` (the
    seeds), `tries` ({task: a digit a seed}) and `in_one_world`: {"world": its name, "horizon": T, "dreams":
    as fidelity.lengths_of_success says}."""
    cells = [json.loads(file.read_text()) for folder in folders for file in sorted(folder.glob("*.json"))]
    cells = [cell for cell in cells if cell.get("in_one_world")]
    kinds = {(cell["evaluation"], *(cell["in_one_world"][what] for what in ("world", "horizon")))
             for cell in cells}
    if len(kinds) != 1:
        raise ValueError(f"{', '.join(map(str, folders))}: to be ranked, agents need real tries on one range "
                         f"of seeds and dreams in one world; {len(cells)} agents are "
                         f"there, of {len(kinds)} such pairs")
    return measure.ranking([cell["tries"] for cell in cells],
                           [cell["in_one_world"]["dreams"] for cell in cells])


def world_of(config: Config) -> str:
    """12 digits for the weights of world model and judge, or the name of one that is in no folder, and for
    how the world model is asked: dreams in two worlds are not compared."""
    digest = hashlib.sha256(f"{config.world_model_temperature:g} {config.world_model_writes}".encode())
    for folder in (config.world_model, config.judge_checkpoint or config.checkpoint):
        files = sorted(Path(folder).glob("*.safetensors"))
        digest.update(b"" if files else folder.encode())
        for file in files:
            with file.open("rb") as weights:
                digest.update(hashlib.file_digest(weights, "sha256").digest())
    return digest.hexdigest()[:12]


def one_engine(config: Config) -> None:
    """Raise ValueError where vLLM would have to hold several models in this process: they would share a
    process group, which each engine destroys when it is closed, and nobody has tried that on a GPU."""
    no_agent = config.agent_url or config.fidelity
    here = [] if no_agent else ["the agent"]
    elsewhere = config.world_model_urls or remote.is_url(config.world_model)
    if not (config.judge or elsewhere):
        here.append("the world model (--world-model-urls)")
    if not config.fidelity and config.judge_checkpoint and not config.judge_urls:
        here.append("the judge (--judge-urls)")
    if config.sampler == "vllm" and len(here) > 1:
        raise ValueError(f"vLLM takes one model in this process, not {len(here)}: {', '.join(here)}. Start "
                         "servers of the others (vllm serve FOLDER), and give their URLs")


@contextlib.contextmanager
def judge_of(config: Config, model: Sampler) -> Iterator[Judge]:
    """The judge: the agent's own weights, unless others are given."""
    if not config.judge_checkpoint:
        yield Judge(in_context(model, config.judge_context), config.judge_tokens)
        return
    with loaded(config, config.judge_checkpoint, config.judge_context, urls=config.judge_urls) as other:
        yield Judge(other, config.judge_tokens)


@contextlib.contextmanager
def world_model(config: Config, temperature: float) -> Iterator[WorldModel]:
    how = config.world_model_tokens, temperature, *webworld.WRITES[config.world_model_writes]
    if remote.is_url(config.world_model):
        yield WorldModel(cast(Sampler, remote.chat(config.world_model)), *how)
        return
    with loaded(config, config.world_model, config.world_model_context, "make",
                config.world_model_urls) as model:
        yield WorldModel(model, *how)


def imagined(model: Sampler, judge: AnyJudge, starts: Sequence[data.Start],
             config: Config) -> list[TokenTrajectory]:
    """A dream from each start."""
    how = dream.Config(horizon=config.horizon, max_new_tokens=config.max_new_tokens,
                       temperature=config.temperature)
    dreamed = []
    with world_model(config, config.world_model_temperature) as imagination:
        models = dream.Models(model, imagination, judge, dreams.Dream)
        for k in tqdm(range(0, len(starts), 64), desc="dreaming", leave=False):
            some = starts[k : k + 64]
            dreamed += dream.imagine(models, some, how, lm.row_seeds(k, len(some)))
    return dreamed


def shown(config: Config) -> str:
    """One dream of the laptop's models as text, judged by its reward model."""
    how, dreaming = recipe.LAPTOP, recipe.LAPTOP.dreaming
    recorded = data.read_trajectories(config.trajectories)
    starts = [recipe.first_page(t) for t in recorded if t.steps and config.task in ("", t.task)]
    if not starts:
        tasks = ", ".join(sorted({t.task for t in recorded}))
        raise ValueError(f"{config.trajectories} has no task {config.task!r}; it has {tasks}")
    start, config = random.Random(config.seed).choice(starts), replace(config, sampler="transformers")
    with (loaded(config, config.checkpoint or how.out, how.context, "make") as agent,
          loaded(config, config.judge_checkpoint or how.judge_model, how.judge_context, "make") as frozen,
          loaded(config, config.world_model, how.world_model_context, "make") as world):
        models = dream.Models(agent, WorldModel(world, dreaming.world_model_tokens,
                                                dreaming.world_model_temperature),
                              Judge(frozen, dreaming.judge_tokens))
        return measure.as_text(dream.trajectories(models, [(start, None)], dreaming, [config.seed])[0])


def delta(before: Path, after: Path) -> str:
    """The delta between the pages in two files."""
    old, new = (file.read_text().rstrip("\n") for file in (before, after))
    return a11y.diff(old, a11y.align(old, new))


def main():
    evaluate.command("audit.py", Config, __doc__, lambda config: shown(config) if config.show else delta(
        *config.delta) if config.delta else run(config), fidelity.table)


if __name__ == "__main__":
    main()
