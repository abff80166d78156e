"""The dreamer beside its rivals: the same pages, demonstrations, seeds and SFT agent, and what each cost.

    python -m bench.rivals --results runs/look-rivals                          # on dev seeds
    python -m bench.rivals --report                                            # tables and plot again
    python -m bench.rivals --evaluation 2001000:24         # to publish: a range that nobody has used yet

Killed anywhere, the same command goes on inside its stages (drive.py). Each row is a small JSON file in
--results, from which alone tables and plot are made (page loads: from the recordings, too). --seeds 1 2
--rows dreamer real ... makes some rows of two more seeds. Which, is to be written down before the first
evaluation is seen: a row that gets more seeds for its luck with one is too good.

    sft, dreamer, real       as in bench/lift.py; real: on real pages, with their own reward
    real-even                the same, until it has used as many real steps as the dreamer
    webrl, webrl-even, webrl-dream, webrl-...    rivals/webrl.py: on real pages, there with as many real steps
                             as real-even, in dreams, and in dreams without a part of it
    lookahead1 .. 3          rivals/lookahead.py with the SFT agent, H = 1 .. 3; dreamer-lookahead1 with the
                             dreamer
    synthesis, synthesis-once                    rivals/synthesis.py, in four rounds and in one (in files of
                             before: `explorer`)
    cloning, awr, digirl     rivals/offline.py on the world model's recordings; with -all on all of the file
    grpo, reinforce, dapo, gspo-token            rivals/ratios.py: the dreamer with another ratio
    gspo-flat, gspo-mean, gspo-open              the same: GSPO without its 1/|y_i|, its std, its clip

What is counted. A recording is counted once in a row, whatever learned from it. A label is a reward, of a
real page or of a recording, that something learned from: of recordings those that agent, judge or reward
model were shown as successes or failures. The world model learns pages, no rewards; where recordings were
chosen by their reward (it and the starts of dreams take failures) that is not counted. Tokens are those that
all models sampled to learn, and beside them those of a try (of the agent, and of look-ahead's models).
Minutes are CPU time of all that the agent was made of, less the time of its looks at dev seeds, which not all
programs have. The evaluation is left out, so look-ahead's own time is in its tokens a try.

GSPO, its other ratios and real pages write the mean of the weights before and after (--trained-share); the
methods of others, as published, their last weights.

Page loads and pages read are reckoned from the code and the recordings, not counted while it ran (`loaded`).
Pages that WebRL loads to breed goals from, four for each failed try on real pages, are not among them. Steps
of the optimizer and distinct goals are not in its rows; lift.py's have them.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

import data
import finetune
from bench import drive, lift, noise, tables
from bench.drive import Stage
from rivals import offline
from tiny import lessons
from worlds.miniwob import IN_PLACE, TASKS

ROOT = Path(__file__).resolve().parent.parent
RECIPE = (*lift.RECIPE, "rivals/*.py")
# Learning stages beside lift's: the program, its first words, whether it is given a world model, minutes.
RATIOS = ("grpo", "reinforce", "dapo", "gspo-token", "gspo-flat", "gspo-mean", "gspo-open")
OFFLINE = {f"{method}{suffix}": (method, "--on", on) for method in ("cloning", "awr", "digirl")
           for suffix, on in (("", "chosen"), ("-all", "all"))}
# No row is an expert's. Of WebRL's batches of 64 tries as many as the dreamer of 40 updates had dreams (2,182
# to 2,207 in results/lift; row `real` has some 1,200 tries today); of 256 dreams as many as the dreamer has
# (17,406).
TRIES, DREAMS = ("--updates", "34"), ("--updates", "68")
WEBRL = {"webrl": ("real", *TRIES), "webrl-dream": ("dream", *TRIES),
         "webrl-no-buffer": ("dream", *TRIES, "--replay", "0"),
         "webrl-no-kl": ("dream", *TRIES, "--loss", "sft"),
         "webrl-no-curriculum": ("dream", *TRIES, "--breed", "0")}
# A row, and the one whose real steps tell how far it goes.
EVEN = {"real-even": "real", "webrl-even": "webrl"}
LOOKAHEAD = {"lookahead1": ("sft", 1), "lookahead2": ("sft", 2), "lookahead3": ("sft", 3),
             "dreamer-lookahead1": ("dreamer", 1)}
ROWS = ("sft", "dreamer", "real", "real-even", *WEBRL, "webrl-even", *LOOKAHEAD, "synthesis",
        "synthesis-once", *OFFLINE, *RATIOS)
# Flags that tries on dev seeds chose for a method, in the place of its file's defaults. Written down here
# before any evaluation seed is used; which others were tried stands in docs/LOG.md.
CHOSEN: dict[str, list[str]] = {
    "webrl": ["--lr", "1e-4", "--beta", "0.1"], "lookahead": ["--margin", "0.2"],
    "synthesis": ["--share-tasks"], "awr": ["--beta", "0.3"]}
METHODS = ("webrl", "lookahead", "synthesis", "cloning", "awr", "digirl", *RATIOS)
RUNS = ("train.py", "-m rivals.ratios", "-m rivals.webrl", "-m rivals.synthesis")  # with metrics.jsonl
# Makes everything in minutes, to see that nothing between the stages is broken.
SHORT = {"-m rivals.ratios": lift.SHORT["train.py"],
         "-m rivals.webrl": ["--updates", "2", "--goals", "4", "--evaluate-every", "0"],
         "-m rivals.orm": ["--judged", "1", "--renamed", "1"],
         "-m rivals.synthesis": ["--updates", "4", "--dreaming.tasks", "8", "--rounds", "1",
                                 "--dreaming.judge-threshold", "-1e9"],
         "-m rivals.offline": ["--sft.epochs", "0.02", "--value.epochs", "0.02"]}
MINUTES = {"-m rivals.webrl": 6.0, "-m rivals.orm": 9.0, "-m rivals.synthesis": 25.0,
           "-m rivals.offline": 4.0, "-m rivals.ratios": 24.0, "train.py": 24.0}


@dataclass(frozen=True)
class Config:
    out: str = "runs/rivals/seed{seed}"
    """Folder of the agents of one seed."""
    results: str = "results/rivals"
    """Folder of the JSON files, one a row. They are committed; a look on dev seeds belongs elsewhere."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of everything after the base."""
    rows: tuple[str, ...] = ROWS
    """Which rows to make."""
    evaluation: str = "1000100:20"
    """START:COUNT, tries of each task. A range of the evaluation seeds, from 2000000, is used once: when all
    else is decided."""
    world: str = ""
    """Folder of the one world model and judge that every agent is also run in, as in bench/lift.py."""
    jobs: int = 2
    """Stages at a time. Each has one thread."""
    short: bool = False
    """Two updates, few examples: to try the driver, not the rivals."""
    report: bool = False
    """Make nothing: print the tables of --results, and draw the plot."""

    def __post_init__(self):
        if unknown := [row for row in self.rows if row not in ROWS]:
            raise ValueError(f"there is no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
        if len(self.seeds) > 1 and folder_of(self, 0) == folder_of(self, 1):
            raise ValueError(f"--out {self.out} is one folder for several seeds: give it {{seed}}")
        data.seeds_to_look_at(self.evaluation)


# ---- what is run -------------------------------------------------------------------------------------------


def folder_of(config: Config, seed: int) -> Path:
    return Path(config.out.format(seed=seed, demonstrations=lift.FEW))  # as lift's --out has it


def agents(config: Config, seed: int) -> dict[str, Stage]:
    """All agents of a seed, by their row's name. Which commands a seed has is written here and in
    lift.chain, and nowhere else."""
    folder = folder_of(config, seed)
    lifted = lift.chain(lift.Config(out=config.out, seeds=(seed,), demonstrations=(lift.FEW,),
                                    part_seeds=(seed,), short=config.short), lift.FEW, seed)
    sft, dream = lifted["sft"], lifted["dreamer"]
    world_model = next(need for need in dream.needs if need.name == "world_model")
    shown = ["--demonstrations-seed", str(seed)]
    given = ["--policy", str(sft.makes.parent), *shown, "--seed", str(seed)]
    dreamed = ["--world-model", str(world_model.makes.parent)]

    def stage(name: str, program: str, *words: str, needs: tuple[Stage, ...] = (sft,),
              method: str = "") -> Stage:
        made = folder / name / "training.json"  # written last
        first, rest = words[:1], words[1:]  # the kind of run comes first
        if not first or first[0].startswith("--"):
            first, rest = (), words
        # Of a flag that is given twice the last counts: what makes a row wins over its method's settings.
        short = (SHORT | lift.SHORT)[program] if config.short else []
        command = (*program.split(), *first, "--out", f"{folder}/{name}", *CHOSEN.get(method, []), *rest,
                   *short)
        return Stage(folder, name, command, made, needs, minutes=MINUTES[program])

    found = {"sft": sft, "dreamer": dream, "real": lifted["real"]}
    orm = stage("orm", "-m rivals.orm", "tiny", "--base", str(sft.makes.parent), *shown, "--seed", str(seed),
                "--sft.seed", str(seed))
    for name, (world, *words) in WEBRL.items():
        models = (sft, orm, world_model) if world == "dream" else (sft, orm)
        found[name] = stage(name, "-m rivals.webrl", world, *given, *(dreamed if world == "dream" else []),
                            "--orm", str(orm.makes.parent), *words, needs=models, method="webrl")
    for name, of in EVEN.items():
        found[name] = even(found[of], name, folder, sft, world_model)
    for name, rounds in (("synthesis", []), ("synthesis-once", ["--rounds", "1"])):
        found[name] = stage(name, "-m rivals.synthesis", *given, *dreamed, *DREAMS, *rounds,
                            needs=(sft, world_model), method="synthesis")
    for name, words in OFFLINE.items():
        found[name] = stage(name, "-m rivals.offline", words[0], *given, *words[1:], method=words[0])
    for name in RATIOS:
        found[name] = stage(name, "-m rivals.ratios", name, *given, *dreamed, needs=(sft, world_model),
                            method=name)
    return found


def even(other: Stage, name: str, folder: Path, sft: Stage, world_model: Stage) -> Stage:
    """The same run, with as many updates as it takes to do as many real steps as were recorded for
    `world_model` alone: so it has used as many as the dreamer. Update by update it does what `other` does, as
    long as both last."""
    program, *words = other.command
    out = words.index("--out") + 1
    words[out] = f"{folder}/{name}"
    while "--updates" in words:
        del words[words.index("--updates") : words.index("--updates") + 2]

    def updates() -> list[str]:
        metrics = ROOT / other.folder / f"{other.makes.parent.name}.run" / "metrics.jsonl"
        alone, both = costs([sft]), costs([sft, world_model])
        return ["--updates", str(updates_for(metrics, both["recorded_steps"] - alone["recorded_steps"]))]

    return Stage(folder, name, (program, *words), folder / name / "training.json", other.needs,
                 minutes=other.minutes, more=updates, after=(other,))


def updates_for(metrics: Path, steps: int) -> int:
    """How many updates of a run did `steps` real steps; or would, if it went on as it did."""
    of_updates = [row["real_steps"] for row in map(json.loads, metrics.read_text().splitlines())
                  if "real_steps" in row]
    done = 0
    for n, here in enumerate(of_updates, 1):
        done += here
        if done >= steps:
            return n
    if not done:
        raise ValueError(f"{metrics}: no real step, so nobody can say how many updates have {steps}")
    return math.ceil(steps * len(of_updates) / done)


def evaluation(config: Config, row: str, seed: int, made: dict[str, Stage]) -> Stage:
    """An agent's tries on the seeds of --evaluation; with look-ahead, where the row says so."""
    folder, seeds = folder_of(config, seed), config.evaluation.replace(":", "-")
    file = folder / f"on-{seeds}" / f"{row}.json"
    tries = len(TASKS) * len(data.parse_seeds(config.evaluation))
    words = ["--seeds", config.evaluation, *lift.HORIZON, "--json", str(file)]
    needs, minutes = (made.get(row),), tries / 300
    program, agent, after = "evaluate.py", made.get(row), ()
    if row in LOOKAHEAD:
        name, ahead = LOOKAHEAD[row]
        program, agent, sft, dream = "-m rivals.lookahead", made[name], made["sft"], made["dreamer"]
        world_model = next(need for need in dream.needs if need.name == "world_model")
        words += ["--world-model", str(world_model.makes.parent), "--judge-checkpoint", str(sft.makes.parent),
                  *CHOSEN.get("lookahead", []), "--ahead", str(ahead)]
        needs, minutes = tuple(dict.fromkeys((agent, sft, world_model))), tries / 40
    else:
        after = lift.in_one_world(config, agent)
    checkpoint = agent.makes.parent
    command = (*program.split(), "--checkpoint", str(checkpoint), *words)
    return Stage(folder, f"on-{seeds}-{row}", command, file, needs, minutes=minutes, after=after)


def plan(config: Config) -> dict[Stage, dict]:
    """The evaluations that are wanted, and of which row each is."""
    return {evaluation(config, row, seed, agents(config, seed)): {"row": row, "seed": seed}
            for seed in config.seeds for row in config.rows}


def files_of(stage: Stage) -> Sequence[str]:
    """What decides a stage. So the SFT agents, world models and dreamers of bench/lift.py are not made
    again, given the same --out."""
    return RECIPE if stage.command[0] == "-m" else lift.RECIPE


# ---- what is kept ------------------------------------------------------------------------------------------


def file_of(config: Config, cell: dict) -> Path:
    return ROOT / config.results / f"seed{cell['seed']}-{cell['row']}.json"


def kept(config: Config, beginning: dict, last: Stage, recipe: str) -> bool:
    """Whether a row is there already. Raises ValueError where it was made in another way."""
    cell = drive.read(file := file_of(config, beginning))
    if cell and bool(dreams := cell.get("in_one_world")) != bool(last.after):
        raise ValueError(f"{file}: it has {'' if dreams else 'no '}dreams in one world (--world). "
                         "Give other --results")
    return lift.as_planned(file_of(config, beginning), {"recipe": recipe, "evaluation": config.evaluation},
                           lift.made_of(last))


def row_of(config: Config, beginning: dict, last: Stage, recipe: str) -> dict:
    """A row of the tables, as small as it goes: how it was made, what it cost, each try."""
    stages, result = lift.made_of(last), drive.read(ROOT / last.makes)
    return beginning | lift.how_made(config, last, stages, recipe) | {
        "tokens_a_try": round(result["tokens_sampled"] / result["n"]),
        "lookahead": {key: result[key] for key in ("turns", "dreamed", "changed") if key in result},
        **costs([stage for stage in stages if stage != last])}


def metrics_of(stage: Stage) -> Path:
    return ROOT / stage.folder / f"{stage.makes.parent.name}.run" / "metrics.jsonl"


def costs(stages: Sequence[Stage]) -> dict:
    """What these stages cost: of recordings, each counted once, trajectories, steps and labels; on real pages
    the same; dreams; tokens that were sampled to learn; minutes of the clock for looks at dev seeds. Raises
    OSError where a run left no metrics."""
    learned, labelled, count = {}, {}, defaultdict(int)
    for stage in stages:
        some, with_reward = recordings(stage)
        learned, labelled = learned | some, labelled | with_reward
        if " ".join(stage.command).startswith(RUNS):
            all_of_them = [json.loads(line) for line in metrics_of(stage).read_text().splitlines()]
            rows = [row for row in all_of_them if "real_steps" in row]
            trajectories = sum(row.get("real_trajectories", 0) for row in rows)
            count["dreams"] += sum(row["dreams"] for row in rows)
            count["trajectories"] += trajectories
            count["steps"] += sum(row["real_steps"] for row in rows)
            # train.py learns from each real trajectory's reward; rivals/webrl.py says what it learned from.
            own = sum(row.get("labels", 0) for row in rows)
            count["labels"] += own if "rivals.webrl" in stage.command else trajectories
            count["tokens"] += sum(row["tokens_sampled"] for row in rows)
            # Looks at dev seeds: nothing learned from them, and not every program has them.
            count["looking"] += sum(row.get("seconds_real", 0) for row in all_of_them)
    return {"recorded_trajectories": len(learned), "recorded_labels": len(labelled),
            "recorded_steps": sum(len(t.steps) for t in learned.values()),
            "real_trajectories": count["trajectories"], "real_steps": count["steps"],
            "real_labels": count["labels"], "dreams": count["dreams"], "tokens_sampled": count["tokens"],
            "looking_minutes": round(count["looking"] / 60, 2)}


def recordings(stage: Stage) -> tuple[dict, dict]:
    """({key: trajectory} that a stage learns from, and of these those whose reward it learns from)."""
    program, *words = stage.words() if stage.more is None else stage.command
    if program in ("sft.py", "-m"):
        program, *words = words
    if program == "rivals.offline":
        config = tyro.cli(offline.Config, args=words[1:])
        some = offline.sources(config, lift.recorded(config.trajectories))
    else:
        some = sum(lift.learned(program, words), [])
    found = {id(t): t for t in some}
    return found, {} if program == "world_model" else found


# ---- tables and plot ---------------------------------------------------------------------------------------


def report(cells: Sequence[dict]) -> str:
    """The rows that have all seeds; the others, beside SFT agent and dreamer of their own seeds; differences
    with all noise; and what each row cost. The best first, by the difference to the dreamer on the seeds that
    both have."""
    if not cells:
        return "nothing is made yet"
    rows: dict[str, list[dict]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell["seed"]):
        rows[cell["row"]].append(cell)
    seeds = sorted({cell["seed"] for cell in cells})
    whole = {row: some for row, some in rows.items() if len(some) == len(seeds)}
    others = {row: some for row, some in rows.items() if row not in whole}
    theirs = {cell["seed"] for some in others.values() for cell in some}
    others |= {row: [cell for cell in whole[row] if cell["seed"] in theirs]
               for row in ("sft", "dreamer") if theirs and row in whole}
    parts = [tables.made_by(cells), "### Success", of_seeds(whole, seeds)]
    alone = f"Rows of seed {' and '.join(map(str, sorted(theirs)))} alone"
    if theirs:
        parts += [f"### {alone}", of_seeds(others, seeds)]
    for title, some, base in (("Minus the dreamer", whole, "dreamer"), ("Minus the SFT agent", whole, "sft"),
                              (f"{alone}, minus the SFT agent", others, "sft")):
        lines = [(row, noise.beside(some.get(base, []), some[row])) for row in in_order(some) if row != base]
        parts += [f"### {title}", tables.gained(lines)] if lines else []
    parts += ["### By task, mean of the seeds", tables.by_task({row: whole[row] for row in in_order(whole)})]
    prices = [[row, *(average(rows[row], price) for price in PRICES.values())] for row in in_order(rows)]
    return "\n\n".join([*parts, chance(rows), "### What it cost, mean of a row's seeds",
                        tables.markdown(["", *PRICES], prices)])


Rows = dict[str, list[dict]]  # row -> a cell for each seed


def in_order(rows: Rows) -> list[str]:
    return sorted(rows, key=lambda row: -ahead(rows[row], rows.get("dreamer", [])))


def of_seeds(rows: Rows, seeds: Sequence[int]) -> str:
    """Success seed by seed. A mean over fewer seeds than others have is not printed."""
    dreamer, sft, lines = rows.get("dreamer", []), rows.get("sft", []), []
    for row in in_order(rows):
        of_seed = {cell["seed"]: tables.success(cell) for cell in rows[row]}
        mean = tables.mean(list(of_seed.values())) if len(of_seed) == len(seeds) else None
        lines.append([row, *(tables.share(of_seed.get(seed)) for seed in seeds), tables.share(mean),
                      *("" if row == name else tables.difference(base, rows[row])
                        for name, base in (("dreamer", dreamer), ("sft", sft)))])
    return tables.markdown(["", *(f"seed {seed}" for seed in seeds), "mean", "minus the dreamer",
                            "minus the SFT agent"], lines)


def chance(rows: Rows) -> str:
    """What chance alone does to differences from the dreamer: among so many rows, and between seeds."""
    dreamer, others = rows.get("dreamer", []), len(rows) - ("dreamer" in rows)
    before = {cell["seed"]: tables.success(cell) for cell in dreamer}
    found = [[tables.success(cell) - before[cell["seed"]] for cell in some if cell["seed"] in before]
             for row, some in rows.items() if row != "dreamer" and sum(map(tried, some))]
    found = [by_seed for by_seed in found if len(by_seed) > 1]
    said = (f"{others} rows are compared with the dreamer. Of so many intervals of 95 % about "
            f"{0.05 * others:.1f} leave 0 out by chance alone.")
    if found:
        sd = math.sqrt(tables.mean([statistics.variance(by_seed) for by_seed in found]))
        said += ("\nFrom seed to seed a row's difference to the dreamer has a standard deviation of "
                 f"{100 * sd:.1f} points\n(pooled over the {len(found)} row(s) of several seeds that learn "
                 "from tries of their own).")
    return said


def tried(cell: dict) -> int:
    return cell["dreams"] + cell["real_trajectories"]


def ahead(some: Sequence[dict], dreamer: Sequence[dict]) -> float:
    """Success minus the dreamer's, mean of the seeds that both have; less than any where they have none."""
    beside = {cell["seed"]: tables.success(cell) for cell in dreamer}
    found = [tables.success(cell) - beside[cell["seed"]] for cell in some if cell["seed"] in beside]
    return tables.mean(found) if found else -math.inf


PRICES: dict[str, Callable[[dict], float]] = {
    "real trajectories": lambda cell: cell["recorded_trajectories"] + cell["real_trajectories"],
    "recorded trajectories": lambda cell: cell["recorded_trajectories"],
    "real steps": lambda cell: cell["recorded_steps"] + cell["real_steps"],
    "recorded steps": lambda cell: cell["recorded_steps"],
    "labels": lambda cell: cell["recorded_labels"] + cell["real_labels"],
    "dreams": lambda cell: cell["dreams"],
    "tokens sampled": lambda cell: cell["tokens_sampled"],
    "tokens a try": lambda cell: cell["tokens_a_try"],
    "minutes of one core": lambda cell: tables.minutes_of(cell, "cpu") - cell["looking_minutes"],
    "page loads": lambda cell: loaded(cell)[0],
    "pages to read": lambda cell: loaded(cell)[1],
}
# Rows whose tries begin at recordings' first pages: at those of successes too.
STARTS = ("dreamer", "real", *EVEN, *WEBRL, "synthesis", "synthesis-once", "dreamer-lookahead1", *RATIOS)


def loaded(cell: dict) -> tuple[int, int]:
    """(pages loaded, pages that a model could read) for a row, reckoned: a recording or a try is one load,
    and has a page more than steps. All rows draw from each page of all failures (goals that name an element
    of it, tiny/lessons.py), chosen by reward, and from the demonstrations. Tries begin at the first page of
    any recording. `-all` reads all pages of all recordings."""
    before = {*cell["tries"]} == {*IN_PLACE}  # a row of the recipe's former tasks
    recorded = lift.recorded("tiny/trajectories.jsonl.gz" if before else lessons.RECORDED)
    shown = finetune.demonstrations(recorded, lift.FEW, cell["seed"])
    read = {id(t): t for t in [*shown, *(t for t in recorded if t.reward < 1)]}
    if cell["row"].endswith("-all"):
        read = {id(t): t for t in recorded}
    loads, pages = len(read), sum(len(t.steps) + 1 for t in read.values())
    if cell["row"] in STARTS:
        loads, pages = len(recorded), pages + len(recorded) - loads
    return loads + cell["real_trajectories"], pages + cell["real_steps"] + cell["real_trajectories"]


def average(cells: Sequence[dict], price: Callable[[dict], float]) -> str:
    """Of a row's cells.

    >>> [average([{"a": a} for a in some], lambda cell: cell["a"]) for some in ([1, 4000], [1.5, 2.0])]
    ['2,000', '1.8']
    """
    values = [price(cell) for cell in cells]
    whole = all(float(value).is_integer() for value in values)
    return f"{tables.mean(values):,.0f}" if whole else f"{tables.mean(values):,.1f}"


def plot(cells: Sequence[dict], file: Path) -> None:
    """Success less the dreamer's, on the seeds that both have, against all real steps that were learned from,
    recordings included: a point a row, at the mean of its seeds. Names of points at the same number of steps
    stand below each other, in the points' order. Raises ValueError where no dreamer is among the rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dreamer = [cell for cell in cells if cell["row"] == "dreamer"]
    if not dreamer:
        raise ValueError("no plot: it shows success less the dreamer's, and `--rows dreamer` is not made yet")
    columns: dict[int, list] = defaultdict(list)
    for row in sorted({cell["row"] for cell in cells}):
        some = [cell for cell in cells if cell["row"] == row]
        x, y = tables.mean([PRICES["real steps"](cell) for cell in some]), 100 * ahead(some, dreamer)
        color = "C3" if row == "dreamer" else "C0" if some[0]["real_steps"] else "0.4"
        if math.isfinite(y):
            fill = "full" if len(some) == len(dreamer) else "none"
            columns[round(x / 500)].append((y, x, row, color, fill))
    ys, xs = zip(*((y, x) for points in columns.values() for y, x, *_ in points))
    figure, axes = plt.subplots(figsize=(9, 6))
    axes.axhline(0, color="C3", linewidth=0.5)
    gap = (max(ys) - min(ys)) / 40  # the height of a name
    for points in map(sorted, columns.values()):
        right = max(x for _, x, *_ in points)
        for height, (y, x, row, color, fill) in zip(spread([y for y, *_ in points], gap), points):
            axes.plot(x, y, "o", color=color, fillstyle=fill, markersize=4)
            axes.annotate(row, (x, y), (right + 300, height), color=color, fontsize=7, va="center",
                          arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.3, "shrinkB": 3,
                                      "relpos": (0, 0.5)})
    axes.set(xlabel="steps on real pages that were learned from, recordings included",
             ylabel="success on real pages less the dreamer's, points")
    axes.set_xlim(0, max(xs) + 2000)
    axes.set_title("red: the dreamer; blue: learned on real pages; grey: from recordings and dreams alone; "
                   f"filled: mean of {len(dreamer)} seed(s), hollow: of fewer", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights, moved apart to at least `gap`: halfway between moving all up and moving all down.

    >>> spread([0.0, 0.0, 10.0], 2.0)
    [-1.0, 1.0, 10.0]
    """
    up, down = list(heights), list(heights)
    for n in range(1, len(heights)):
        up[n] = max(up[n], up[n - 1] + gap)
    for n in reversed(range(len(heights) - 1)):
        down[n] = min(down[n], down[n + 1] - gap)
    return [(a + b) / 2 for a, b in zip(up, down)]


def main():
    config = tyro.cli(Config, description=__doc__)
    made = lambda config: lift.make(config, plan(config), RECIPE, file_of, kept, row_of, files_of)
    tables.command("rivals.py", config, made, report, plot)


if __name__ == "__main__":
    main()
