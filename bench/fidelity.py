"""Draw what results/fidelity holds: docs/fidelity.png, of docs/fidelity.md.

    python -m bench.fidelity

Three plots: right pages by depth; success in dreams, of their actions done for real, and in reality; and what
the judge gave dreams beside what they deserved, by task.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "fidelity"
AGENTS = {"sft": "SFT agent", "dream": "dreamer"}
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

    figure, (depths, successes, judge) = plt.subplots(1, 3, figsize=(13, 4.5), width_ratios=(1, 0.9, 1.3))
    told, agents = read("world_model"), {name: read(f"replay-{name}-seed0") for name in AGENTS}
    for name, color in (("teacher-forced", "C0"), ("open loop", "C3")):
        points = [(int(row[6:]), told[name][row]["exact"]) for row in told[name] if row.startswith("depth ")]
        depths.plot(*zip(*points), "o-", color=color, label=name)
    depths.set(xlabel="step", ylabel="share of next pages that are exactly the real ones", ylim=(0, 1))
    for k, name in enumerate(AGENTS):
        told = agents[name]["success"]["all"]
        for n, (what, color) in enumerate((("dream", "C0"), ("W2R", "C4"), ("real", "C3"))):
            low, high = told[f"{what} 95 %"]
            label = ("in dreams, as judged", "their actions, done for real", "its own real tries")[n]
            successes.errorbar(k + (n - 1) / 5, told[what], [[told[what] - low], [high - told[what]]],
                               fmt="o", color=color, label=label if k == 0 else None)
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
    for axes in (depths, successes, judge):
        axes.legend(frameon=False, fontsize=8, loc="lower right" if axes is depths else "upper right")
    judge.set(xlim=(0, 2 * max(left.values())), xticks=range(0, max(left.values()) + 1, 2))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    plot(ROOT / "docs" / "fidelity.png")
    print("docs/fidelity.png")
