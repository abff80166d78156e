"""Draw what results/fidelity holds: docs/fidelity.png, of docs/fidelity.md.

    python -m bench.fidelity

Four plots: right pages by depth; success in dreams, of their actions done for real, and in reality; the same
three over the updates of one run, from fixed starts; and what the judge gave dreams beside what they
deserved, by task.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "fidelity"
AGENTS = {"sft": "SFT agent", "dream": "dreamer"}
SUCCESSES = {"dream": ("C0", "in dreams, as judged"), "W2R": ("C4", "their actions, done for real"),
             "real": ("C3", "its own real tries")}
KINDS = {(1, 1): ("success, rewarded", "C0"), (1, 0): ("success, not rewarded", "C1"),
         (0, 1): ("failure, rewarded", "C3"), (0, 0): ("failure, not rewarded", "0.75")}


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def by_task(tries: Sequence[Sequence]) -> dict[str, Counter]:
    """{task: how many dreams of each of KINDS, (deserved, given)} of `tries` (fidelity.transfer)."""
    found: dict[str, Counter] = {}
    for task, _, given, deserved, _ in tries:
        found.setdefault(task, Counter())[int(deserved), int(given)] += 1
    return dict(sorted(found.items()))


def plot(file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplot_mosaic([["depths", "successes", "judge"], ["run", "run", "judge"]],
                                      figsize=(13, 8), width_ratios=(1, 0.9, 1.3))
    depths, successes, run, judge = (axes[name] for name in ("depths", "successes", "run", "judge"))
    told, agents = read("world_model"), {name: read(f"replay-{name}-seed0") for name in AGENTS}
    updates = {int(file.stem.removeprefix("curve-")): json.loads(file.read_text())["success"]["all"]
               for file in RESULTS.glob("curve-*.json")}
    for name, color in (("teacher-forced", "C0"), ("open loop", "C3")):
        points = [(int(row[6:]), told[name][row]["exact"]) for row in told[name] if row.startswith("depth ")]
        depths.plot(*zip(*points), "o-", color=color, label=name)
    depths.set(xlabel="step", ylabel="share of next pages that are exactly the real ones", ylim=(0, 1))
    for k, name in enumerate(AGENTS):
        told = agents[name]["success"]["all"]
        for n, (what, (color, label)) in enumerate(SUCCESSES.items()):
            low, high = told[f"{what} 95 %"]
            successes.errorbar(k + (n - 1) / 5, told[what], [[told[what] - low], [high - told[what]]],
                               fmt="o", color=color, label=label if k == 0 else None)
    for what, (color, label) in SUCCESSES.items():
        bounds = [updates[n][f"{what} 95 %"] for n in sorted(updates)]
        run.plot(sorted(updates), [updates[n][what] for n in sorted(updates)], "o-", color=color, label=label)
        run.fill_between(sorted(updates), *zip(*bounds), color=color, alpha=0.1, linewidth=0)
    run.set(xlabel="updates of one run (three passes, seed 0)", ylabel="success, with 95 % intervals",
            ylim=(0, 0.7))
    successes.set(xticks=range(len(AGENTS)), xticklabels=AGENTS.values(), xlim=(-0.5, len(AGENTS) - 0.5),
                  ylabel="success, with 95 % intervals", ylim=(0, 0.6))
    counts = by_task([row for told in agents.values() for row in told["tries"]])
    left = dict.fromkeys(counts, 0)
    for kind, (label, color) in KINDS.items():
        width = [some[kind] for some in counts.values()]
        judge.barh(list(counts), width, left=list(left.values()), color=color, label=label)
        left = {task: left[task] + some[kind] for task, some in counts.items()}
    judge.invert_yaxis()
    judge.set(xlabel="dreams of both agents")
    judge.tick_params(axis="y", labelsize=7)
    for name, shown in axes.items():
        shown.legend(frameon=False, fontsize=8, loc="lower right" if name == "depths" else "upper right")
    judge.set(xlim=(0, 2 * max(left.values())), xticks=range(0, max(left.values()) + 1, 2))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    plot(ROOT / "docs" / "fidelity.png")
    print("docs/fidelity.png")
