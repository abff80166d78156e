"""Tables and plot of an experiment, from its small JSON files alone: one file a row, which bench/lift.py
writes (`row_of`).

A try is a task and a seed. Its reward is kept as a digit: {"click-option": "0110..."}, in the order of the
seeds of "evaluation". Two rows with the same seeds are compared try by try (measure.paired_bootstrap).

What dreams or acts may have several runs of a seed: other dice, all else alike. The tables say of each
difference what it is with all noise (noise.py), what is left without the page that moved most, and what it is
over the better of SFT agent and longer cloning.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import data
import measure
from bench import noise
from bench.noise import Gains

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"clone": "clone", "sft": "SFT agent", "dreamer": "dreamer", "dreams": "dreams only",
         "experts": "expert rows only", "untuned": "untuned world model", "longer": "longer cloning",
         "real": "real pages", "both": "real pages and dreams", "as-published": "as published"}
MAIN = ("clone", "sft", "dreamer")
# Prices beside steps and minutes (lift.prices), and the heads of their columns.
PRICES = {"page_loads": "page loads", "pages_seen": "pages seen", "optimizer_steps": "optimizer steps",
          "goals": "distinct goals"}
RENAMED = {"explorer": "synthesis-once"}  # a row's name in older files: today's


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
    """All rows of a folder. Raises ValueError where they are not of one recipe, one range of seeds and the
    same pages, or where some are of a short trial."""
    cells = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    cells = [{"run": 0} | cell | {"row": RENAMED.get(cell["row"], cell["row"])} for cell in cells]
    of = {"recipe": lambda cell: cell["recipe"], "evaluation": lambda cell: cell["evaluation"],
          "pages": lambda cell: ", ".join(sorted(cell["tries"])),
          "length": lambda cell: "--short" if cell.get("short") else "the recipe"}
    for what, told in of.items():
        if len(kinds := sorted({told(cell) for cell in cells})) > 1:
            raise ValueError(f"{folder} mixes rows of {what} {' and '.join(kinds)}: no table compares them. "
                             "Keep one of the two there")
    return sorted(cells, key=lambda cell: (cell["seed"], cell["run"]))  # run r stands beside run r (noise.py)


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


def by_seed(cells: Sequence[dict]) -> dict[int, float]:
    """{seed: success, mean of its runs} of a row."""
    found: dict[int, list[float]] = defaultdict(list)
    for cell in cells:
        found[cell["seed"]].append(success(cell))
    return {seed: sum(runs) / len(runs) for seed, runs in found.items()}


def by_try(cells: Sequence[dict]) -> dict[tuple, float]:
    """{(seed, task, number of the try): reward, mean of the runs whose page did not fail} of a row."""
    found: dict[tuple, list[float]] = defaultdict(list)
    for cell in cells:
        for key, reward in rewards(cell).items():
            found[key].append(reward)
    return {key: sum(runs) / len(runs) for key, runs in found.items()}


def difference(first: Sequence[dict], second: Sequence[dict]) -> str:
    """second minus first in points, with its 95 % interval over the tries of the seeds that both have."""
    a, b = by_try(first), by_try(second)
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


# Student's t at .975, by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def student(of_seeds: Sequence[float]) -> str:
    """The mean of the seeds in points, with its 95 % t interval; "-" of one seed.

    >>> student([0.0]), student([0.0, 0.1]), student([k / 100 for k in range(7)])
    ('-', '+5.0 [-58.5, +68.5]', '+3.0 [+1.0, +5.0]')
    """
    if len(of_seeds) not in STUDENT:
        return "-"
    middle, sd = mean(of_seeds), statistics.stdev(of_seeds)
    half = STUDENT[len(of_seeds)] * sd / math.sqrt(len(of_seeds))
    return points(middle, middle - half, middle + half)


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def share(value: float | None) -> str:
    """
    >>> share(0.5), share(1.0), share(None)
    ('.500', '1.000', '-')
    """
    return "-" if value is None else f"{value:.3f}".removeprefix("0")


def better(sft: Sequence[dict], longer: Sequence[dict]) -> list[dict]:
    """Of each seed that both have, whichever succeeds more often; the SFT agents where nothing was cloned for
    longer. The tries that choose are those that are compared. So it is a little better than it should be, and
    what is over it is not there by luck of the choice."""
    of_seed = {cell["seed"]: cell for cell in longer}
    return [max(cell, of_seed[cell["seed"]], key=success) for cell in sft if cell["seed"] in of_seed
            ] if longer else list(sft)


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
    parts += of_gains(rows, few)
    return "\n\n".join([*parts, "### What it cost, mean of the seeds", costs(rows)])


def made_by(cells: Sequence[dict]) -> str:
    """With what the figures were made."""
    kinds = lambda what: " and ".join(sorted({what(cell) for cell in cells}))
    n = " and ".join(sorted({str(len(rewards(cell))) for cell in cells}))
    each = "a seed" + " and run" * any(cell["run"] for cell in cells)
    versions = kinds(lambda cell: ", ".join(f"{k} {v}" for k, v in cell["versions"].items()))
    commits = ", ".join(sorted({commit for cell in cells for commit in cell["commit"]}))
    failed = sum(digits.count("-") for cell in cells for digits in cell["tries"].values())
    lost = f" ({failed} tries failed with their pages, twice, and are in no n)" if failed else ""
    return (f"Tries on the seeds {kinds(lambda cell: named(cell['evaluation']))}, n = {n} {each}{lost}; "
            f"recipe {kinds(lambda cell: cell['recipe'])} (commit {commits}).\n{versions}.\n"
            f"{kinds(lambda cell: cell['machine'])}.")


def named(seeds: str) -> str:
    """START:COUNT with the range that it is of.

    >>> named("1000100:20")
    '1000100:20 (dev)'
    """
    first = data.parse_seeds(seeds)[0]
    names = [name for name, owned in data.SEEDS.items() if first in owned]
    return f"{seeds} ({names[0] if names else 'of who checks'})"


def of_seeds(rows: Rows, count: int) -> str:
    """Clone, SFT agent and dreamer, seed by seed, and all seeds together."""
    clone, sft, dreamer = (rows.get((count, row), []) for row in MAIN)
    seeds = sorted({cell["seed"] for cell in [*clone, *sft, *dreamer]})
    lines = []
    for title, some in [*((str(seed), [seed]) for seed in seeds), ("all", seeds)]:
        a, b, c = ([cell for cell in cells if cell["seed"] in some] for cells in (clone, sft, dreamer))
        lines.append([title, *(share(mean([*by_seed(cells).values()])) for cells in (a, b, c)),
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
    """Every row, seed by seed, beside the SFT agent and the dreamer; where a seed has several runs, each
    behind their mean."""
    there = [row for row in NAMES if (count, row) in rows]
    seeds = sorted({cell["seed"] for row in there for cell in rows[count, row]})
    sft, dreamer = rows.get((count, "sft"), []), rows.get((count, "dreamer"), [])
    lines = []
    for row in there:
        of_seed = by_seed(rows[count, row])
        each = {seed: [share(success(cell)) for cell in rows[count, row] if cell["seed"] == seed]
                for seed in seeds}
        lines.append([NAMES[row], *(share(of_seed.get(seed)) + f" ({' '.join(each[seed])})"
                                    * (len(each[seed]) > 1) for seed in seeds),
                      share(mean([*of_seed.values()])),
                      "" if row == "sft" else difference(sft, rows[count, row]),
                      "" if row == "dreamer" else difference(rows[count, row], dreamer)])
    return markdown(["", *(f"seed {seed}" for seed in seeds), "mean", "minus the SFT agent",
                     "the dreamer minus this"], lines)


def of_gains(rows: Rows, few: int) -> list[str]:
    """Differences with all noise: to the better of SFT agent and longer cloning with as many demonstrations,
    and to the dreamer of the fewest; and how large a difference must be."""
    over_better, over_dreamer, noisy = [], [], {}
    for count in sorted({count for count, _ in rows}):
        base = better(rows.get((count, "sft"), []), rows.get((count, "longer"), []))
        chosen = {cell["seed"]: f"{NAMES[cell['row']]} {share(success(cell))}" for cell in base}
        over_better.append((f"(the better, {count})", chosen))
        for (of, row), cells in in_order(rows):
            name, new = f"{NAMES[row]}, {count}", []
            if of == count and row not in ("sft", "longer"):
                new.append(("the better", over_better, noise.beside(base, cells)))
            if of == count and (count, row) != (few, "dreamer"):
                new.append(("the dreamer", over_dreamer, noise.beside(rows.get((few, "dreamer"), []), cells)))
            for than, lines, gains in new:
                lines.append((name, gains))
                tried = row not in ("clone", "sft", "longer")  # these have one run, and seeds may have more
                if tried and gains and min(len(gains.seeds), len(gains.pages)) > 1:
                    noisy[f"{name}, minus {than}"] = gains
    parts = ["### Minus the better of SFT agent and longer cloning (a row, its demonstrations a task)",
             gained(over_better), "### Minus the dreamer (a row, its demonstrations a task)",
             gained(over_dreamer)]
    return parts + (["### What a difference must be to be seen", to_see(noisy)] if noisy else [])


def gained(lines: Sequence[tuple[str, Gains | dict[int, str] | None]]) -> str:
    """(row, what it gains) of each line, in points; a line may say something of each seed instead."""
    seeds = sorted({seed for _, gains in lines if isinstance(gains, Gains) for seed in gains.seeds})
    head = ["", *(f"seed {seed}" for seed in seeds),
            "with all noise", "over tries alone", "over seeds (t)", "page that moved most",
            "without it, with all noise"]

    def line(gains: Gains | dict[int, str] | None) -> list[str]:
        if not isinstance(gains, Gains):
            return [*((gains or {}).get(seed, "-") for seed in seeds), *5 * ["" if gains else "-"]]
        of_seed = dict(zip(gains.seeds, gains.runs.mean((1, 2)).tolist()))
        of_page = dict(zip(gains.pages, gains.runs.mean((0, 1)).tolist()))
        most = max(of_page, key=lambda page: abs(of_page[page]))
        return [*(f"{100 * of_seed[seed]:+.1f}" if seed in of_seed else "-" for seed in seeds),
                points(*noise.drawn_again(gains)), points(*noise.over_tries(gains)),
                student([*of_seed.values()]),
                f"{most} {100 * of_page[most]:+.1f}",
                points(*noise.drawn_again(gains.without(most))) if len(of_page) > 1 else "-"]
    return markdown(head, [[name, *line(gains)] for name, gains in lines]) + (
        "\n\nIn points; every page counts alike, the two table pages as one. All noise: that of seeds, runs, "
        "pages and tries.\nWhere few seeds differ much, the t interval is the one to believe (noise.py).")


def to_see(noisy: dict[str, Gains]) -> str:
    """Noise of each difference, and what follows for tables of three seeds and of six."""
    runs = max(gains.runs.shape[1] for gains in noisy.values())
    pages = max(len(gains.pages) for gains in noisy.values())
    seeds = max(len(gains.seeds) for gains in noisy.values())
    found = {name: noise.noise_of(gains) for name, gains in noisy.items()}
    found["all of these"] = {what: mean([of[what] for of in found.values()])
                             for what in next(iter(found.values()))}
    lines = [[name, *(f"{100 * math.sqrt(variance):.1f}" for variance in of.values()),
              *(f"{100 * noise.to_be_seen(of, some, runs, pages):.1f}" for some in (3, 6))]
             for name, of in found.items()]
    return markdown(["standard deviations in points", *found["all of these"], "seen with 3 seeds",
                     "seen with 6 seeds"], lines) + (
        f"\n\nSeen: of tables with {pages} pages and {runs} run{'s' * (runs > 1)} a seed, four in five would "
        "say that a difference of so many points\nis more than 0, with all noise. What seeds do was reckoned "
        f"from {seeds} of them: {seeds - 1} degree(s) of freedom."
        + " Where a seed has one run, what runs do is in it." * (runs == 1))


def costs(rows: Rows) -> str:
    """Real steps and time. A model that two rows share is counted in both; evaluation is not."""
    def line(count: int, row: str, cells: Sequence[dict]) -> list[str]:
        whole = lambda what: f"{mean([cell[what] for cell in cells]):.0f}"
        minutes = [f"{mean([minutes_of(cell, kind) for cell in cells]):.1f}" for kind in ("cpu", "wall")]
        more = [whole(what) if all(what in cell for cell in cells) else "-" for what in prices]
        return [NAMES[row], str(count), share(mean([success(cell) for cell in cells])),
                whole("demonstrated_steps"), whole("recorded_steps"), whole("real_steps"),
                f"{mean([steps(cell) for cell in cells]):.0f}", whole("updates"), whole("dreams"), *more,
                *minutes]

    # Older files have none of these.
    prices = [what for what in PRICES if any(what in cell for cells in rows.values() for cell in cells)]
    return markdown(["", "demonstrations a task", "success", "their steps", "other recorded steps",
                     "real steps", "all real steps", "updates", "dreams", *(PRICES[what] for what in prices),
                     "minutes of CPU", "minutes"],
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
