"""Does dreaming help on the real web? The whole table: three seeds, 2, 10 and 30 demonstrations, what each
part of the recipe does, and learning on real pages instead.

    python -m bench.lift --results runs/look              # on dev seeds: make all, print the tables
    python -m bench.lift --report                         # print the twelve pages' tables again, and the plot
    python -m bench.lift --evaluation 2001000:24          # to publish: a range that nobody has used yet

`make` is this with one seed, on six pages: --six --seeds 0 --demonstrations 2 --rows sft dreamer. Killed
anywhere, the same command goes on inside its stages (drive.py). Each row of the tables is a small JSON file
in --results. Tables and plot are made of these alone.

A seed is everything after the base: demonstrations, order of training, dreams. What dreams or acts may have
several runs a seed (--runs 2): the same SFT agent and world model, other dice. So the tables can say what
another seed would have changed, and what another run (tables.py). The rows:
    clone       the demonstrations, cloned by a model that learns nothing of judging
    sft         the SFT agent: it learns to judge as well
    dreamer     the SFT agent after dreaming
and, with two demonstrations a task, what each part does:
    dreams      the same updates without any expert row
    experts     the same updates from demonstrated starts, but the judge says no to every dream: only expert
                rows are ever a success
    untuned     the same updates in dreams of the base itself, which was never taught to be a world model
    longer      the SFT agent, cloned for as long as it, its world model and its dreams take together
    real        11 updates on real pages, of 128 rows each (some 109 tries, the rest experts'), with their own
                reward: some 3,950 real steps, as many as the dreamer's world model learns from (in the
                tables of before: 40 of 64)
    both        40 updates of 64 rows, half of the groups on real pages, half in dreams. Neither row has the
                dreamer's settings (PARTS), so neither tells by itself what real pages do
    as-published   110 updates, each as the paper has it (groups of how many, starts, experts, temperatures):
                ten passes over the 44 demonstrations, with a tenth of the dreamer's dreams

What train.py makes is the mean of its weights before and after (--trained-share, tiny/lessons.py), in
as-published the last weights. SFT agent, clone and longer cloning are no means.

World model and judge learn from failures, and from the agent's own demonstrations. So the clone learns from
all real successes that anything learns from. What is counted as a real step: the steps of the demonstrations;
those of other recordings that judge or world model learned from; and those done on real pages to learn from.
Pages alone are not counted (grounding; the starts of dreams).
"""

import functools
import gzip
import importlib.metadata
import itertools
import json
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

import data
import finetune
import lm
import measure
import update
from bench import drive, tables
from bench.drive import Stage
from bench.tables import MAIN
from recipe import Train
from tiny import lessons
from worlds.miniwob import TASKS

ROOT = Path(__file__).resolve().parent.parent
# All files that decide what is learned and measured.
RECIPE = ("*.py", "node/dreams.py", "node/gptoss.py", "node/webworld.py", "worlds/benchmarks.py",
          "worlds/chromium.*", "worlds/miniwob.py", "worlds/html/*", "tiny/cpu.py", "tiny/lessons.py",
          "tiny/reasons.py", "tiny/rename.py", "tiny/verdicts.py", "tiny/words.py", "tiny/base/*",
          lessons.RECORDED)
AGAIN = 1000  # run r > 0 of seed s has the dice of s + 1000 r: of no other seed or run below 1000 seeds
FEW = lessons.Policy().demonstrations  # what each part does is asked with so many
# What `make` has time for. On these six dreams gained most (dev 1000140:20 of seeds 0 and 1; docs/LOG.md,
# 2026-11-26). So it shows what learning looks like, and nothing of the other pages. 20 of the 80 updates are
# as many dreams a page as all pages have.
SIX = ("enter-time", "choose-list", "read-table", "click-checkboxes-transfer", "use-spinner",
       "click-scroll-list")
SIX_UPDATES = ("--updates", "20")
HORIZON = ("--horizon", str(lessons.TRAIN.evaluate_horizon))
# Real pages are dear: 64 rows an update. Temperature and rate are those that so few had.
FEWER = ("--dreaming.tasks", "8", "--dreaming.temperature", "0.7", "--dreaming.judge-unsure", "0",
         "--lr", "3e-5")
PARTS = {
    "dreams": ["--dreaming.expert-fraction", "0"],
    "experts": ["--dreaming.judge-threshold", "1e9", "--dreaming.demonstrated", "1"],
    "untuned": ["--world-model", "tiny/base", "--drop-limit", "1"],  # it goes on, however little is readable
    # On dev pages better than 21 updates of 64 tries at the settings of FEWER (docs/LOG.md, 2026-11-26).
    "real": ["--updates", "11", "--dreaming.tasks", "16", "--dreaming.judge-unsure", "0", "--lr", "6e-5",
             "--world", "real"],
    "both": ["--updates", "40", *FEWER, "--world", "both"],
    # What hangs on the size of model and answers stays the laptop's: eps, lengths; lr is that of 64 rows.
    # Half of its starts are one step from the end (data.expert_windows); the authors' are two or more.
    "as-published": ["--updates", "110", "--dreaming.tasks", "4", "--dreaming.group", "8",
                     "--dreaming.demonstrated", "1", "--dreaming.expert-fraction", "0.5",
                     "--dreaming.no-focus", "--dreaming.temperature", "0.7",
                     "--dreaming.world-model-temperature", "0.7", "--dreaming.judge-unsure", "0",
                     "--lr", "3e-5", "--trained-share", "1"],
}
# Makes everything in minutes, to see that nothing between the stages is broken.
SHORT = {
    "sft.py world_model": ["--per-task", "2", "--renamed", "0"],
    "sft.py policy": ["--judged", "1", "--grounding", "20", "--renamed", "1", "--renamed-again", "1",
                      "--sft.epochs", "1"],
    "train.py": ["--updates", "2", "--dreaming.tasks", "8", "--evaluate-every", "1", "--evaluate-seeds",
                 "1000000:1", "--checkpoint-every", "1"],
}
# Minutes of one core without bf16 instructions for a seed on all pages: half as long again as they took with
# them (docs/RESULTS.md, 1). With AVX-512 an SFT agent took 46 where bf16 takes 34.
MINUTES = {"sft.py world_model": 16.0, "sft.py policy": 51.0, "train.py": 63.0}

Row = Literal["clone", "sft", "dreamer", "dreams", "experts", "untuned", "longer", "real", "both",
              "as-published"]


@dataclass(frozen=True)
class Config:
    out: str = "runs/lift/of{demonstrations}/seed{seed}"
    """Folder of the models of one seed."""
    results: str = "results/lift"
    """Folder of the JSON files, one a row. They are committed; a look on dev seeds belongs elsewhere."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of clone, SFT agent and dreamer."""
    demonstrations: tuple[int, ...] = (2, 10, 30)
    """Of each task."""
    part_seeds: tuple[int, ...] = (0, 1, 2)
    """Of the other rows, which have two demonstrations a task."""
    runs: int = 1
    """Of every row that dreams or acts, on each seed; clone, SFT agent and longer cloning have one."""
    rows: tuple[Row, ...] = Row.__args__
    """Which rows to make."""
    evaluation: str = "1000100:20"
    """START:COUNT, tries of each task. A range of the evaluation seeds, from 2000000, is used once: when all
    else is decided."""
    six: bool = False
    """Six pages (SIX) in the place of all, and a quarter of the dreams: what `make` has time for."""
    world: str = ""
    """Folder of the one world model and judge (`make world`) that every agent is also run in; no agent is
    where it is empty."""
    jobs: int = 2
    """Stages at a time."""
    threads: int = 1
    """Of the dreaming. All else has one."""
    short: bool = False
    """Two updates, few examples: to try the driver, not the recipe."""
    report: bool = False
    """Make nothing: print the tables of --results, and draw the plot."""

    def __post_init__(self):
        runs = {self.out.format(demonstrations=count, seed=seed) for count, seed in pairs(self)}
        if len(runs) < len(pairs(self)):
            raise ValueError(f"--out {self.out} is one folder for several runs: give it {{seed}} and "
                             "{demonstrations}")
        if self.runs < 1:
            raise ValueError(f"--runs {self.runs}: a row has at least 1")
        data.seeds_to_look_at(self.evaluation)


def pairs(config: Config) -> list[tuple[int, int]]:
    """(demonstrations, seed) of all runs."""
    main = [(count, seed) for count in config.demonstrations for seed in config.seeds]
    parts = [(FEW, seed) for seed in config.part_seeds if set(config.rows) - set(MAIN)]
    return list(dict.fromkeys(main + parts))


# ---- what is run -------------------------------------------------------------------------------------------


def chain(config: Config, count: int, seed: int, run: int = 0) -> dict[str, Stage]:
    """All that can be made with a seed and `count` demonstrations a task, in run `run` of what dreams or
    acts: each agent by its row's name. Which commands a seed has, and in which order, is written here and
    nowhere else."""
    folder = Path(config.out.format(demonstrations=count, seed=seed))
    # Copies of each demonstration. They are made because demonstrations are few: of 2 each gets 8 copies, of
    # 10 each gets 2, and 30 need none. The second lesson has as many in all, of how many demonstrations ever.
    copies = min(lessons.Policy().renamed, 30 // count - 1)
    again = lessons.Policy().renamed_again * FEW // count
    cloned = [] if count == FEW else ["--demonstrations", str(count)]
    renamed = [] if count == FEW else ["--renamed", str(copies), "--renamed-again", str(again)]
    shown = ["--demonstrations-seed", str(seed)]  # a seed of the table is both: demonstrations and dice
    seeds = [*shown, "--seed", str(seed), "--sft.seed", str(seed)]

    pages = str(recordings_of(folder)) if config.six else ""
    given = {"sft.py world_model": "--transitions"}

    def stage(name: str, program: str, *words: str, needs: tuple[Stage, ...] = (), **more) -> Stage:
        makes = folder / name / "training.json"  # written last
        short = SHORT[program] if config.short else []
        learned = (given.get(program, "--trajectories"), pages) if pages else ()
        learned += SIX_UPDATES if pages and program == "train.py" else ()
        command = (*program.split(), "tiny", "--out", f"{folder}/{name}", *learned, *words, *cloned, *short)
        return Stage(folder, name, command,
                     makes, needs, **{"minutes": guessed(config, program)} | more)

    world_model = stage("world_model", "sft.py world_model", *shown, "--sft.seed", str(seed))
    sft = stage("sft", "sft.py policy", *seeds, *renamed)

    def dreamer(name: str, *words: str, model: tuple[Stage, ...] = (world_model,)) -> Stage:
        dreamed_in = [word for made in model for word in ("--world-model", str(made.makes.parent))]
        return stage(name + f"-run{run}" * (run > 0), "train.py", "--policy", f"{folder}/sft", *dreamed_in,
                     *shown, "--seed", str(seed + AGAIN * run), *words, needs=(sft, *model),
                     threads=config.threads)

    dream = dreamer("dream")
    parts = {name: dreamer(name, *words, model=() if name in ("untuned", "real") else (world_model,))
             for name, words in PARTS.items()}

    def epochs() -> list[str]:  # CPU time: other work on the machine changes it less
        cloned_in, total = (sum(drive.read(made.record)["cpu"] for made in some) for some in ([sft], whole))
        return ["--sft.epochs", f"{lessons.Policy().sft.epochs * total / cloned_in:.1f}"]

    whole = made_of(dream)  # SFT agent, world model, dreams
    longer = stage("longer", "sft.py policy", *seeds, *renamed, after=(sft, dream), more=epochs,
                   minutes=sum(made.minutes for made in whole))
    clone = stage("clone", "sft.py policy", *seeds, *renamed, "--judged", "-1")
    return {"clone": clone, "sft": sft, "dreamer": dream, "longer": longer, **parts}


def guessed(config: Config, program: str) -> float:
    """Minutes that a stage may take here, until one is made. With bf16 instructions it was two thirds; six
    pages take a quarter, and so do their dreams."""
    return MINUTES[program] / (1.5 if lm.matrix_type().itemsize == 2 else 1) / (4 if config.six else 1)


HELD_OUT = "1200000:10"  # first pages to dream from, ten a task; the curve of docs/fidelity.md has some


def in_one_world(config, agent: Stage) -> tuple[Stage, ...]:
    """An agent's dreams in the world of --world. By these, and by real tries, agents of all runs can be
    ranked when their weights are gone (audit.py --rank)."""
    if not config.world:
        return ()
    name = f"dreams-{agent.name}"
    made = agent.folder / "in-one-world" / f"{agent.name}.json"
    command = ("audit.py", "--dream", "--checkpoint", str(agent.makes.parent), "--seeds", HELD_OUT,
               "--world-model", f"{config.world}/world_model", "--judge-checkpoint", f"{config.world}/judge",
               "--json", str(made), *(("--tasks", *SIX) if getattr(config, "six", False) else ()))
    return (Stage(agent.folder, name, command, made, (agent,), minutes=1.0),)


def recordings_of(folder: Path) -> Path:
    """The recordings of SIX, which make() writes before anything is run."""
    return folder / "pages.jsonl.gz"


def keep_six(file: Path) -> None:
    """Write the shipped recordings of SIX to a file: the same bytes each time."""
    rows = [row for _, row in data.read_jsonl(ROOT / lessons.RECORDED) if row["task"] in SIX]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    drive.write_bytes(ROOT / file, gzip.compress(text.encode(), mtime=0))


def say_whole(config: Config) -> None:
    """Print how all pages are had, and how long that takes two cores, by MINUTES; evaluation takes few."""
    hours = len(config.seeds) * (MINUTES["sft.py policy"] + MINUTES["train.py"]) / 60
    words = ("--demonstrations", FEW, "--rows", *config.rows, "--seeds", *config.seeds, "--out",
             f"{config.out}-all", "--results", f"{config.results}-all", "--evaluation", config.evaluation)
    print(f"{len(SIX)} of {len(TASKS)} pages: {', '.join(SIX)}.\nAll of them take about {hours:.1f} h on "
          "two cores without bf16 instructions:\n    .venv/bin/python -m bench.lift", *words, flush=True)


def evaluation(config: Config, agent: Stage) -> Stage:
    """An agent's tries on the seeds of --evaluation."""
    seeds = config.evaluation.replace(":", "-")
    made = agent.folder / f"on-{seeds}" / f"{agent.name}.json"
    pages = SIX if config.six else TASKS
    tries = len(pages) * len(data.parse_seeds(config.evaluation))
    command = ("evaluate.py", "--checkpoint", f"{agent.folder}/{agent.name}", "--seeds", config.evaluation,
               *HORIZON, "--json", str(made), *(("--tasks", *pages) if config.six else ()))
    return Stage(agent.folder, f"on-{seeds}-{agent.name}", command, made, (agent,), minutes=tries / 300,
                 after=in_one_world(config, agent))


def plan(config: Config) -> dict[Stage, dict]:
    """The evaluations that are wanted, and of which row each is."""
    cells = {}
    for (count, seed), run in itertools.product(pairs(config), range(config.runs)):
        for row, agent in chain(config, count, seed, run).items():
            if row in MAIN:
                wanted = count in config.demonstrations and seed in config.seeds
            else:
                wanted = count == FEW and seed in config.part_seeds
            if wanted and row in config.rows and (run == 0 or row in ("dreamer", *PARTS)):
                cells[evaluation(config, agent)] = {"row": row, "demonstrations": count, "seed": seed,
                                                    "run": run}
    return cells


def before(stage: Stage) -> list[Stage]:
    """The stage and all that it waits for, in an order in which they can be run."""
    return [*dict.fromkeys(other for one in stage.waits for other in before(one)), stage]


def made_of(stage: Stage) -> list[Stage]:
    """The stage and all that it is made of, in that order: what a row of the tables costs."""
    return [*dict.fromkeys(other for one in stage.needs for other in made_of(one)), stage]


# ---- what is kept ------------------------------------------------------------------------------------------


def file_of(config: Config, cell: dict) -> Path:
    run = f"-run{cell['run']}" * (cell["run"] > 0)
    name = f"of{cell['demonstrations']}-seed{cell['seed']}{run}-{cell['row']}.json"
    return ROOT / config.results / name


def kept(config: Config, beginning: dict, last: Stage, recipe: str) -> bool:
    """Whether a row is there already. Raises ValueError where it was made in another way."""
    return as_planned(file_of(config, beginning), {"recipe": recipe, "evaluation": config.evaluation},
                      before(last))


def as_planned(file: Path, wanted: dict, stages: Sequence[Stage]) -> bool:
    """Whether the file of a row is there. Raises ValueError where something of it is not as `wanted`, or
    other commands than these made it."""
    cell = drive.read(file)
    if cell is None:
        return False
    wrong = [f"its {what} is {cell[what]}, and now it would be {value}" for what, value in wanted.items()
             if cell[what] != value]
    if len(cell["commands"]) != len(stages):
        wrong.append(f"it was made by {len(cell['commands'])} command(s), and now it would be {len(stages)}")
    for said, stage in zip(cell["commands"], stages):
        planned = " ".join(["python", *stage.command])
        same = f"{said} ".startswith(f"{planned} ") if stage.more else said == planned
        if not same:
            wrong.append(f"it was made by `{said}`, and now it would be `{planned}`")
    if wrong:
        raise ValueError(f"{file}: {wrong[0]} (it is of commit {', '.join(cell['commit'])}). Give other "
                         "--results, or check that commit out")
    return True


def row_of(config: Config, beginning: dict, last: Stage, recipe: str) -> dict:
    """A row of the tables, as small as it goes: how it was made, what it cost, each try."""
    made, agent = made_of(last), last.needs[0]
    row = beginning | how_made(config, last, before(last), recipe) | {
        **recordings(made), **prices(made),
        **tables.dreaming(ROOT / agent.folder / f"{agent.name}.run" / "metrics.jsonl")}
    row["minutes"] = {stage.name: row["minutes"][stage.name] for stage in made}
    row["machine"] += f", {config.threads} thread(s) to dream; matrix products in {lm.matrix_type()}"
    return row


def how_made(config, last: Stage, stages: Sequence[Stage], recipe: str) -> dict:
    """Of a row: by which code and commands, in which time, with what; and its tries."""
    records = {stage.name: drive.read(stage.record) for stage in stages}
    result = drive.read(ROOT / last.makes)
    packages = ("torch", "transformers", "playwright", "miniwob")
    return {
        "evaluation": config.evaluation, "recipe": recipe, "short": config.short,
        "commit": sorted({record["commit"] for record in records.values()}),
        "commands": ["python " + " ".join(record["command"]) for record in records.values()],
        "minutes": {name: {"wall": round(record["wall"] / 60, 2), "cpu": round(record["cpu"] / 60, 2),
                           "starts": record["starts"]} for name, record in records.items()},
        "tries": tables.pack(result["trajectories"], data.parse_seeds(config.evaluation),
                             result["failures"]),
        "in_one_world": {key: drive.read(ROOT / stage.makes)[key] for stage in last.after
                         for key in ("world", "horizon", "dreams")},
        "versions": {"Python": platform.python_version(),
                     **{package: importlib.metadata.version(package) for package in packages}},
        "machine": f"{drive.processor()}; {config.jobs} stage(s) at a time"}


def recordings(stages: Sequence[Stage]) -> dict:
    """{"demonstrated_steps", "recorded_steps"}: real steps that cloning, judge and world model learned from.
    Those of the demonstrations; and those of other recordings, each counted once."""
    shown, others = {}, {}
    for _, what, *words in (stage.words() for stage in stages):
        demonstrations, other = learned(what, words)
        shown |= {id(t): t for t in demonstrations}
        others |= {id(t): t for t in other}
    steps = lambda some: sum(len(trajectory.steps) for trajectory in some)
    return {"demonstrated_steps": steps(shown.values()),
            "recorded_steps": steps(t for key, t in others.items() if key not in shown)}


@functools.cache
def recorded(file: str) -> list[data.Trajectory]:
    """A file's trajectories, the same objects each time: a stage's are counted once, whatever learned."""
    return data.read_trajectories(ROOT / file)


def learned(what: str, words: Sequence[str]) -> tuple[list, list]:
    """(demonstrations, other recordings) that `sft.py what words` learns from; a reward model what a policy
    does."""
    if what in ("policy", "rivals.orm"):
        config = tyro.cli(lessons.Policy, args=words[1:])
        drawn, some = config.demonstrations_seed, recorded(config.trajectories)
        return (finetune.demonstrations(some, config.demonstrations, drawn),
                lessons.failures(some, config.judged, drawn) if config.judged >= 0 else [])
    if what == "world_model":  # copies are no recordings
        config = replace(tyro.cli(lessons.WorldModel, args=words[1:]), renamed=0)
        return [], lessons.chosen(config, recorded(config.transitions))
    return [], []


def prices(stages: Sequence[Stage]) -> dict:
    """{"page_loads", "pages_seen", "optimizer_steps", "goals"} of what an agent is made of. Looks at dev
    seeds are left out: nothing learned from them.

    A recording that any model reads is one load, and so is a try on real pages; each has a page more than
    steps. All failures are read, as goals are made up of their pages (tiny/lessons.py) and some dreams begin
    at one; of other recordings dreams have the first page. Goals: distinct ones that agent or judge learned
    by, or that were practised. Those that code makes up (of a page, or by changed words) are not counted.
    """
    failures = lambda file: [t for t in recorded(file) if t.reward < 1]
    read, begun, goals, count = {}, {}, set(), Counter()
    for stage in stages:
        program, what, *words = stage.words()
        demonstrations, others = learned(what, words)
        told = [*demonstrations, *others]
        if what == "policy":
            goals |= {measure.goal_number(t.goal) for t in told}
            told += failures(tyro.cli(lessons.Policy, args=words[1:]).trajectories)
        if program == "train.py":
            config = tyro.cli(Train, default=lessons.TRAIN, args=words)
            some = recorded(config.trajectories)
            told += finetune.demonstrations(some, config.demonstrations, config.demonstrations_seed)
            if config.dreaming.demonstrated < 1:
                told, begun = told + failures(config.trajectories), {id(t): t for t in some}
            metrics = ROOT / stage.folder / f"{stage.name}.run" / "metrics.jsonl"
            for row in map(json.loads, metrics.read_text().splitlines()):
                if "kept" in row:
                    goals |= {*row["goals"]}
                    count["loads"] += row["real_trajectories"]
                    count["pages"] += row["real_trajectories"] + row["real_steps"]
                    count["steps"] += update.steps(row["kept"], config)
        elif program == "sft.py":
            made = drive.read(ROOT / stage.makes)
            count["steps"] += made["steps"] + made.get("again", {"steps": 0})["steps"]
        read |= {id(t): t for t in told}
    return {"page_loads": len(read | begun) + count["loads"],
            "pages_seen": sum(len(t.steps) + 1 for t in read.values()) + len(begun.keys() - read.keys())
                          + count["pages"],
            "optimizer_steps": count["steps"], "goals": len(goals)}


def main():
    config = tyro.cli(Config, description=__doc__)
    def made(config: Config) -> list[Stage]:
        if config.six:
            say_whole(config)
        for count, seed in pairs(config) if config.six else ():
            keep_six(recordings_of(Path(config.out.format(demonstrations=count, seed=seed))))
        return make(config, plan(config), RECIPE, file_of, kept, row_of)

    tables.command("lift.py", config, made, tables.report, tables.plot)


def make(config, wanted: dict[Stage, dict], files: Sequence[str], file_of, kept, row_of,
         files_of: Callable[[Stage], Sequence[str]] = lambda stage: RECIPE) -> list[Stage]:
    """Make all rows that are not there. Returns the stages that failed. `files` decide a row, and
    `files_of(stage)` one of its stages."""
    recipe = drive.recipe(*files)
    now = {"recipe": recipe, "evaluation": config.evaluation, "short": config.short}
    for cell in tables.load(ROOT / config.results)[:1]:  # all are as the first, or this raises
        for what, value in now.items():  # said before it costs hours, and seeds that are used once
            if (was := cell.get(what, False)) != value:
                raise ValueError(f"the rows in {config.results} have {what} {was}, and now it would be "
                                 f"{value}: no table compares them. Give other --results")
    cells = {last: cell for last, cell in wanted.items() if not kept(config, cell, last, recipe)}
    stages = list(dict.fromkeys(stage for last in cells for stage in before(last)))

    def keep(stage: Stage) -> None:
        if stage in cells:
            drive.write(file_of(config, cells[stage]), row_of(config, cells[stage], stage, recipe))

    return drive.work(stages, lambda stage: drive.recipe(*files_of(stage)), config.jobs, after=keep)


if __name__ == "__main__":
    main()
