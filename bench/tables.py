"""Tables and plot of an experiment, from its small JSON files alone: one file a row, which bench/lift.py
writes (`cell`).

A try is a task and a seed. Its reward is kept as a digit: {"click-option": "0110..."}, in the order of the
seeds of "evaluation". Two rows with the same seeds are compared try by try (measure.paired_bootstrap).
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

import data
import measure

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"clone": "clone", "sft": "SFT agent", "dreamer": "dreamer", "dreams": "dreams only",
         "experts": "expert rows only", "untuned": "untuned world model", "longer": "longer cloning",
         "real": "real pages", "both": "real pages and dreams"}
MAIN = ("clone", "sft", "dreamer")
RENAMED = {"explorer": "synthesis-once"}  # a row's name in older files: today's
# Two questions about one page of HTML (read-table.html): what helps one helps the other.
TABLE_PAGES = ("ask-table", "read-table")


def pack(trajectories: Iterable[tuple[str, int, float]], seeds: Sequence[int],
         failures: Iterable[tuple[str, int, str]] = ()) -> dict[str, str]:
    """{task: a digit for each seed} of measure.success's [task, seed, reward], and a - for each of its
    failures: the page's, not the agent's. Raises ValueError where they are not one try of each task and seed.

    >>> pack([["a", 5, 1.0], ["a", 6, 0.0], ["b", 6, 1.0]], range(5, 7), [["b", 5, "the page hung"]])
    {'a': '10', 'b': '-1'}
    """
    tries: dict[str, dict[int, float | None]] = defaultdict(dict)
    for task, seed, reward in trajectories:
        tries[task][seed] = reward
    for task, seed, _ in failures:
        tries[task][seed] = None
    for task, rewards in tries.items():
        if sorted(rewards) != list(seeds) or not set(rewards.values()) <= {0.0, 1.0, None}:
            raise ValueError(f"{task}: not one reward of 0 or 1 for each of {seeds}")
    digit = {0.0: "0", 1.0: "1", None: "-"}
    return {task: "".join(digit[rewards[seed]] for seed in seeds) for task, rewards in tries.items()}


def dreaming(metrics: Path) -> dict:
    """Of a run's metrics.jsonl: {"updates", "dreams", "real_steps", "looks": [[update, success on real pages
    of dev seeds, real steps learned from until then], ...]}. All empty where the agent was only cloned."""
    found = {"updates": 0, "dreams": 0, "real_steps": 0, "looks": []}
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        row = json.loads(line)
        if "real_success" in row:
            found["looks"].append([row["update"], round(row["real_success"], 4), found["real_steps"]])
        if "kept" in row:
            found["updates"] += 1
            found["dreams"] += row["dreams"]
            found["real_steps"] += row["real_steps"]
    return found


def load(folder: Path) -> list[dict]:
    """All rows of a folder. Raises ValueError where they are not of one recipe and one range of seeds."""
    cells = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    cells = [cell | {"row": RENAMED.get(cell["row"], cell["row"])} for cell in cells]
    for what in ("recipe", "evaluation"):
        if len(kinds := sorted({cell[what] for cell in cells})) > 1:
            raise ValueError(f"{folder} mixes rows of {what} {' and '.join(kinds)}: no table compares them. "
                             "Keep one of the two there")
    return cells


def command(name: str, config, make: Callable[[object], Sequence], report: Callable[[Sequence[dict]], str],
            plot: Callable[[Sequence[dict], Path], None]) -> None:
    """What the drivers do: `make` the rows of `config` that are missing, and print the tables; with --report
    only these, and the plot. `make` returns the stages that failed."""
    folder = ROOT / config.results
    try:
        failed = [] if config.report else make(config)
        cells = load(folder)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    print(f"\n{report(cells)}")
    if config.report and cells:
        try:
            plot(cells, folder / "steps.png")
        except ValueError as error:
            sys.exit(f"{name}: {error}")
        print(f"\nthe plot: {config.results}/steps.png")
    if failed:
        sys.exit(f"{name}: failed, and with it all that needs it: {', '.join(s.label for s in failed)}. The "
                 "same command goes on from there")


# ---- figures -----------------------------------------------------------------------------------------------


def rewards(cell: dict) -> dict[tuple, float]:
    """{(seed of the run, task, number of the try): reward}, of the tries whose page did not fail"""
    return {(cell["seed"], task, k): float(digit)
            for task, digits in cell["tries"].items() for k, digit in enumerate(digits) if digit != "-"}


def success(cell: dict) -> float:
    tries = rewards(cell).values()
    return sum(tries) / len(tries)


def difference(first: Sequence[dict], second: Sequence[dict]) -> str:
    """second minus first in points, with its 95 % interval over the tries of the seeds that both have."""
    a, b = ({key: reward for cell in cells for key, reward in rewards(cell).items()}
            for cells in (first, second))
    common = sorted(a.keys() & b.keys())
    if not common:
        return "-"
    return points(*measure.paired_bootstrap([a[key] for key in common], [b[key] for key in common]))


def points(*shares: float) -> str:
    """A difference and the ends of its interval, in points.

    >>> points(0.05, -0.01, 0.11)
    '+5.0 [-1.0, +11.0]'
    """
    middle, low, high = (round(100 * share, 6) for share in shares)  # the same figure by two sums is one
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def apart(cells: Sequence[dict], table: bool) -> list[dict]:
    """The cells with the tries of the two table pages alone, or with those of all other pages."""
    return [cell | {"tries": {task: digits for task, digits in cell["tries"].items()
                              if (task in TABLE_PAGES) == table}} for cell in cells]


def gains(first: Sequence[dict], second: Sequence[dict]) -> torch.Tensor:
    """second minus first (S, P) of the seeds that both have, by page. The two table pages are one, by their
    mean."""
    def scores(cells: Sequence[dict]) -> dict[tuple, list[float]]:
        found: dict[tuple, list[float]] = defaultdict(list)
        for cell in cells:
            for task, digits in cell["tries"].items():
                page = "table" if task in TABLE_PAGES else task
                judged = digits.replace("-", "")  # the other pages failed
                found[cell["seed"], page].append(judged.count("1") / len(judged))
        return found
    a, b = scores(first), scores(second)
    common = a.keys() & b.keys()
    seeds, pages = (sorted({key[k] for key in common}) for k in range(2))
    return torch.tensor([[mean(b[seed, page]) - mean(a[seed, page]) for page in pages] for seed in seeds],
                        dtype=torch.float64)


def over_cells(first: Sequence[dict], second: Sequence[dict], draws: int = 10_000) -> str:
    """second minus first in points, with a 95 % interval over cells (a seed and a page): seeds are drawn
    first, then pages of each. So it says something of other seeds and pages, which one over tries does not.
    """
    cells, generator = gains(first, second), torch.Generator().manual_seed(0)  # (S, P)
    if not len(cells):
        return "-"
    seeds, pages = cells.shape
    drawn = torch.randint(seeds, (draws, seeds, 1), generator=generator)
    of_seed = torch.randint(pages, (draws, seeds, pages), generator=generator)
    means = cells[drawn, of_seed].mean((1, 2))  # (draws,)
    return points(float(cells.mean()), float(means.quantile(0.025)), float(means.quantile(0.975)))


# Student's t at .975, by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def over_seeds(first: Sequence[dict], second: Sequence[dict]) -> str:
    """second minus first in points, with a 95 % t interval over the seeds; "-" where there is one."""
    before = {cell["seed"]: success(cell) for cell in first}
    by_seed = [success(cell) - before[cell["seed"]] for cell in second if cell["seed"] in before]
    if len(by_seed) not in STUDENT:
        return "-"
    middle, sd = mean(by_seed), statistics.stdev(by_seed)
    half = STUDENT[len(by_seed)] * sd / math.sqrt(len(by_seed))
    return points(middle, middle - half, middle + half)


def z_of(first: Sequence[dict], second: Sequence[dict]) -> str:
    """second minus first over its standard error, over tries."""
    a, b = ({key: reward for cell in cells for key, reward in rewards(cell).items()}
            for cells in (first, second))
    differences = [b[key] - a[key] for key in sorted(a.keys() & b.keys())]
    sd = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return f"{mean(differences) / sd * math.sqrt(len(differences)):+.1f}" if sd else "-"


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def share(value: float | None) -> str:
    """
    >>> share(0.5), share(1.0), share(None)
    ('.500', '1.000', '-')
    """
    return "-" if value is None else f"{value:.3f}".removeprefix("0")


# ---- tables ------------------------------------------------------------------------------------------------

Rows = dict[tuple[int, str], list[dict]]  # (demonstrations, row) -> a cell for each seed


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is read as easily in a terminal.

    >>> print(markdown(["seed", "clone"], [["0", ".5"]]))
    | seed | clone |
    |------|-------|
    | 0    | .5    |
    """
    width = [max(len(line[k]) for line in [head, *rows]) for k in range(len(head))]
    line = lambda cells: "| " + " | ".join(text.ljust(size) for text, size in zip(cells, width)) + " |"
    return "\n".join([line(head), "|" + "|".join("-" * (size + 2) for size in width) + "|", *map(line, rows)])


def report(cells: Sequence[dict]) -> str:
    """All tables of what is there. What is not made yet is a `-`, or has no row."""
    if not cells:
        return "nothing is made yet"
    rows: Rows = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell["seed"]):
        rows[cell["demonstrations"], cell["row"]].append(cell)
    counts = sorted({count for count, _ in rows})
    few = counts[0]
    parts = [made_by(cells)]
    for count in counts:
        parts += [f"### {count} demonstrations a task", of_seeds(rows, count)]
    columns = {NAMES[row]: rows[few, row] for row in NAMES if (few, row) in rows}
    parts += [f"### By task, mean of the seeds, {few} demonstrations a task", by_task(columns)]
    if any((few, row) in rows for row in NAMES if row not in MAIN):
        parts += [f"### What each part does, {few} demonstrations a task", of_parts(rows, few)]
    for base in ("sft", "dreamer"):  # the SFT agent of as many demonstrations; the dreamer of the fewest
        lines = [(f"{NAMES[row]}, {count}", rows.get((count if base == "sft" else few, base), []), cells)
                 for (count, row), cells in in_order(rows)
                 if (count, row) != (few, base) and row != base and (row in MAIN or count == few)]
        parts += [f"### Minus the {NAMES[base]}, the table pages apart (a row, its demonstrations a task)",
                  of_pages(lines)]
    return "\n\n".join([*parts, "### What it cost, mean of the seeds", costs(rows)])


def made_by(cells: Sequence[dict]) -> str:
    """With what the figures were made."""
    kinds = lambda what: " and ".join(sorted({what(cell) for cell in cells}))
    n = " and ".join(sorted({str(len(rewards(cell))) for cell in cells}))
    versions = kinds(lambda cell: ", ".join(f"{k} {v}" for k, v in cell["versions"].items()))
    commits = ", ".join(sorted({commit for cell in cells for commit in cell["commit"]}))
    failed = sum(digits.count("-") for cell in cells for digits in cell["tries"].values())
    lost = f" ({failed} tries failed with their pages, twice, and are in no n)" if failed else ""
    return (f"Tries on the seeds {kinds(lambda cell: named(cell['evaluation']))}, n = {n} a seed{lost}; "
            f"recipe {kinds(lambda cell: cell['recipe'])} (commit {commits}).\n{versions}.\n"
            f"{kinds(lambda cell: cell['machine'])}.")


def named(seeds: str) -> str:
    """START:COUNT with the range that it is of.

    >>> named("1000100:20")
    '1000100:20 (dev)'
    """
    first = data.parse_seeds(seeds)[0]
    return f"{seeds} ({next(name for name, owned in data.SEEDS.items() if first in owned)})"


def of_seeds(rows: Rows, count: int) -> str:
    """Clone, SFT agent and dreamer, seed by seed, and all seeds together."""
    clone, sft, dreamer = (rows.get((count, row), []) for row in MAIN)
    seeds = sorted({cell["seed"] for cell in [*clone, *sft, *dreamer]})
    lines = []
    for title, some in [*((str(seed), [seed]) for seed in seeds), ("all", seeds)]:
        a, b, c = ([cell for cell in cells if cell["seed"] in some] for cells in (clone, sft, dreamer))
        lines.append([title, *(share(mean([success(cell) for cell in cells])) for cells in (a, b, c)),
                      difference(a, b), difference(b, c), difference(a, c)])
    return markdown(["seed", *(NAMES[row] for row in MAIN), "SFT agent minus clone",
                     "dreamer minus SFT agent", "dreamer minus clone"], lines)


def by_task(columns: dict[str, Sequence[dict]]) -> str:
    """Success of each column's cells, task by task."""
    tasks = sorted({task for cells in columns.values() for cell in cells for task in cell["tries"]})

    def of_task(cells: Sequence[dict], task: str) -> str:
        digits = "".join(cell["tries"].get(task, "") for cell in cells).replace("-", "")
        return share(digits.count("1") / len(digits) if digits else None)
    return markdown(["task", *columns],
                    [[task, *(of_task(cells, task) for cells in columns.values())] for task in tasks])


def of_parts(rows: Rows, count: int) -> str:
    """Every row, seed by seed, beside the SFT agent and the dreamer."""
    there = [row for row in NAMES if (count, row) in rows]
    seeds = sorted({cell["seed"] for row in there for cell in rows[count, row]})
    sft, dreamer = rows.get((count, "sft"), []), rows.get((count, "dreamer"), [])
    lines = []
    for row in there:
        of_seed = {cell["seed"]: success(cell) for cell in rows[count, row]}
        lines.append([NAMES[row], *(share(of_seed.get(seed)) for seed in seeds),
                      share(mean([*of_seed.values()])),
                      "" if row == "sft" else difference(sft, rows[count, row]),
                      "" if row == "dreamer" else difference(rows[count, row], dreamer)])
    return markdown(["", *(f"seed {seed}" for seed in seeds), "mean", "minus the SFT agent",
                     "the dreamer minus this"], lines)


def of_pages(lines: Sequence[tuple[str, Sequence[dict], Sequence[dict]]]) -> str:
    """(name, first, second) of each line: second minus first, the two table pages apart from the others."""
    head = ["", "z over tries", "over seeds (t)", "the table pages as one: over cells",
            "the table pages alone: over tries", "the other pages: over tries", "the other pages: over cells"]
    return markdown(head, [
        [name, z_of(first, second), over_seeds(first, second), over_cells(first, second),
         difference(apart(first, True), apart(second, True)),
         difference(apart(first, False), apart(second, False)),
         over_cells(apart(first, False), apart(second, False))] for name, first, second in lines])


def costs(rows: Rows) -> str:
    """Real steps and time. A model that two rows share is counted in both; evaluation is not."""
    def line(count: int, row: str, cells: Sequence[dict]) -> list[str]:
        whole = lambda what: f"{mean([cell[what] for cell in cells]):.0f}"
        minutes = [f"{mean([minutes_of(cell, kind) for cell in cells]):.1f}" for kind in ("cpu", "wall")]
        return [NAMES[row], str(count), share(mean([success(cell) for cell in cells])),
                whole("demonstrated_steps"), whole("recorded_steps"), whole("real_steps"),
                f"{mean([steps(cell) for cell in cells]):.0f}", whole("updates"), whole("dreams"), *minutes]
    return markdown(["", "demonstrations a task", "success", "their steps", "other recorded steps",
                     "real steps", "all real steps", "updates", "dreams", "minutes of CPU", "minutes"],
                    [line(*key, cells) for key, cells in in_order(rows)])


def in_order(rows: Rows) -> list[tuple[tuple[int, str], list[dict]]]:
    return sorted(rows.items(), key=lambda item: (item[0][0], list(NAMES).index(item[0][1])))


def steps(cell: dict) -> int:
    """All steps on real pages that anything learned from, until the end of the run."""
    return cell["demonstrated_steps"] + cell["recorded_steps"] + cell["real_steps"]


def minutes_of(cell: dict, kind: str) -> float:
    """What the agent took, with all that it was made of; without its evaluation."""
    return sum(times[kind] for stage, times in cell["minutes"].items() if not stage.startswith("on-"))


# ---- the plot ----------------------------------------------------------------------------------------------


def plot(cells: Sequence[dict], file: Path) -> None:
    """Success on real pages against all real steps that were learned from, with the fewest demonstrations.

    Curves are of the looks on dev seeds during the run: thin of a seed, thick their mean. A star is the mean
    of the tables. In dreams no real step is added, so the dreamer's curve goes straight up.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    few = min(cell["demonstrations"] for cell in cells)
    figure, axes = plt.subplots(figsize=(9, 4))
    for color, row in zip(("C7", "C2", "C0", "C3", "C1"), ("clone", "sft", "dreamer", "real", "both")):
        of_row = [cell for cell in cells if cell["row"] == row and cell["demonstrations"] == few]
        if not of_row:
            continue
        average: dict[int, list] = defaultdict(list)
        for cell in of_row:
            before = cell["demonstrated_steps"] + cell["recorded_steps"]
            looks = [(update, before + real, value) for update, value, real in cell["looks"]]
            for update, *point in looks:
                average[update].append(point)
            axes.plot([x for _, x, _ in looks], [y for *_, y in looks], color=color, alpha=0.3, linewidth=1)
        whole = [[mean(values) for values in zip(*points)] for points in average.values()
                 if len(points) == len(of_row)]
        axes.plot([x for x, _ in whole], [y for _, y in whole], "o-", color=color, markersize=4)
        axes.plot(mean([steps(cell) for cell in of_row]), mean([success(cell) for cell in of_row]), "*",
                  color=color, markersize=14, label=NAMES[row])
    axes.set(xlabel="steps on real pages that were learned from, recordings and demonstrations included",
             ylabel="success on real pages")
    axes.set_ylim(top=1)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5),
                title="star: as in the tables\nline: looks on dev seeds")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
