"""All that is counted: success and its intervals, whether dreams rank agents as reality does, a run's log.

Success is the raw reward of the page (NOTES 5.5). Intervals are Wilson's 95 %. evaluate.py and audit.py are
the commands. What is dreamed beside what is: fidelity.py.
"""

import itertools
import json
import math
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import data
import distributed
import dream
import lm
import policy
from data import Start
from judge import Verdict
from policy import Sampler, TokenTrajectory, World

# ---- intervals ---------------------------------------------------------------------------------------------


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927), which stays inside [0, 1] and is honest at 0 and 1.

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def resampled(values: torch.Tensor, draws: int = 10_000, seed: int = 0) -> torch.Tensor:
    """Means (..., draws) of values (..., n), of n columns drawn with replacement."""
    generator, n = torch.Generator().manual_seed(seed), values.shape[-1]
    # A hundred draws at a time: a table of 10,000 x n numbers is 80 MB where n is 1,000.
    return torch.cat([values[..., torch.randint(n, (min(100, draws - k), n), generator=generator)].mean(-1)
                      for k in range(0, draws, 100)], -1)


def paired_bootstrap(a: Sequence[float], b: Sequence[float], draws: int = 10_000,
                     seed: int = 0) -> tuple[float, float, float]:
    """mean(b - a) over common trajectories and its 95 % interval, by resampling trajectories."""
    differences = torch.tensor(b, dtype=torch.float64) - torch.tensor(a, dtype=torch.float64)  # (n,)
    means = resampled(differences, draws, seed)  # (draws,)
    return float(differences.mean()), float(means.quantile(0.025)), float(means.quantile(0.975))

# ---- real success ------------------------------------------------------------------------------------------


def play(web: World, model: Sampler, starts: Sequence[Start], horizon: int, max_new_tokens: int,
         temperature: float = 0.0, seed: int = 0, pages: int = 16,
         name: str = "evaluating") -> list[TokenTrajectory]:
    """A trajectory on real pages from each start, in their order, `pages` at a time or as many as
    the world takes (`at_once`). One whose page failed twice is dropped (twice)."""
    pages = min(pages, getattr(web, "at_once", pages))

    def roll(starts: Sequence[Start], seeds: Sequence[int]) -> list[TokenTrajectory]:
        return policy.rollout(web, model, starts, horizon, max_new_tokens, temperature, seeds)

    played: list[TokenTrajectory] = []
    with tqdm(total=len(starts), desc=name, unit="trajectory", dynamic_ncols=True, leave=False) as bar:
        for k in range(0, len(starts), pages):
            some = starts[k : k + pages]
            played += twice(web, some, lm.row_seeds(seed + k, len(some)), roll)
            bar.update(len(played) - bar.n)
    return played


def twice(web: World, starts: Sequence[Start], seeds: Sequence[int],
          roll: Callable[[Sequence[Start], Sequence[int]], list[TokenTrajectory]]) -> list[TokenTrajectory]:
    """roll(starts, seeds), of which a trajectory whose page hung or crashed is done once more, with the same
    seed and on a new page. If that fails too, it is dropped as "browser: failed: ...": a browser's failure is
    never the agent's."""
    played = roll(starts, seeds)
    if again := [k for k, failure in enumerate(web.failures) if failure]:
        once_more = roll([starts[k] for k in again], [seeds[k] for k in again])
        for k, trajectory, failure in zip(again, once_more, web.failures, strict=True):
            trajectory.dropped = f"{policy.FAILED}: {failure}" if failure else trajectory.dropped
            played[k] = trajectory
    return played


def real_starts(tasks: Sequence[str], seeds: Sequence[int]) -> list[Start]:
    """The first page of every (task, seed)."""
    return [data.start(task, seed) for task in tasks for seed in seeds]


def success(played: Sequence[TokenTrajectory]) -> dict:
    """{"unreadable", "success", "n", "interval", "per_task": {task: {"success", "n"}}, "trajectories":
    [[task, seed, reward], ...]}. "malformed" counts the trajectories that ended with a text that is no
    action; "unreadable" is their share, and stands first: it says whether success was measured at all.
    "dropped" counts those that ended on a page that the agent could not read.

    Trajectories whose page failed twice are in none of these: "failed" counts them, "failures" says which and
    why."""
    lost = [trajectory for trajectory in played if trajectory.failed]
    played = [trajectory for trajectory in played if not trajectory.failed]
    by_task = defaultdict(list)
    for trajectory in played:
        by_task[trajectory.start.task].append(trajectory.reward)
    rewards = [trajectory.reward for trajectory in played]
    malformed = sum(t.no_action for t in played)
    return {
        "unreadable": malformed / max(1, len(rewards)),
        "success": sum(rewards) / max(1, len(rewards)), "n": len(rewards),
        "interval": wilson(sum(rewards), len(rewards)),
        "per_task": {task: {"success": sum(r) / len(r), "n": len(r)} for task, r in by_task.items()},
        "malformed": malformed, "dropped": sum(bool(t.dropped) for t in played),
        "trajectories": [[t.start.task, t.start.seed, t.reward] for t in played],
        "failed": len(lost), "failures": [[t.start.task, t.start.seed, t.dropped] for t in lost],
    }


def read_result(file: str) -> dict:
    """What --json wrote. Raises ValueError for any other file, such as the tries of a benchmark."""
    try:
        result = json.loads(Path(file).read_text())
        if {"per_task", "trajectories"} <= result.keys():
            return result
        why = "it has no per_task and no trajectories"
    except (ValueError, AttributeError) as error:
        why = str(error)
    raise ValueError(f"{file} is no result of --json ({why}): --table takes success on MiniWoB++, not tries "
                     "of a benchmark; the same --benchmark command prints the totals of those again")


def table(files: Sequence[str]) -> str:
    """Success per task of several result files, in columns; below, the last minus the first, on the
    trajectories that both hold."""
    results = [read_result(file) for file in files]
    names = [Path(file).stem for file in files]
    width = max(24, *(len(task) + 2 for result in results for task in result["per_task"]))
    lines = ["".ljust(width) + "".join(name.rjust(28) for name in names)]
    for task in dict.fromkeys(task for result in results for task in result["per_task"]):
        lines.append(task.ljust(width) + "".join(_share(result["per_task"].get(task)) for result in results))
    lines.append("all".ljust(width) + "".join(_share(result) for result in results))
    failed = [result.get("failed", 0) for result in results]  # older files do not say
    if any(failed):
        lines.append("pages failed, in no n".ljust(width) + "".join(str(count).rjust(28) for count in failed))
    first, last = ({(task, seed): reward for task, seed, reward in result["trajectories"]}
                   for result in (results[0], results[-1]))
    common = sorted(first.keys() & last.keys())
    if len(files) > 1 and common:
        pair = [first[key] for key in common], [last[key] for key in common]
        mean, low, high = (100 * value for value in paired_bootstrap(*pair))
        lines.append(f"{names[-1]} minus {names[0]}: {mean:+.1f} points, 95 % interval {low:+.1f} to "
                     f"{high:+.1f} (paired bootstrap, n = {len(common)})")
    return "\n".join(lines)


def _share(result: dict | None) -> str:
    if not result:
        return "-".rjust(28)
    low, high = wilson(result["success"] * result["n"], result["n"])
    return f"{result['success']:.3f} [{low:.2f}, {high:.2f}] n={result['n']}".rjust(28)

# ---- statistics --------------------------------------------------------------------------------------------


def by(rows: Sequence, count: Callable[[list], dict], **keys: Callable[[Any], Any]) -> dict[str, dict]:
    """{"all": count(rows)}, and the same of the rows with each value of each key: {"task enter-text": ...}"""
    found = {"all": count(list(rows))}
    for name, key in keys.items():
        found |= {f"{name} {value}": count([row for row in rows if key(row) == value])
                  for value in sorted(set(map(key, rows)))}
    return found


def precision_recall(judged: Sequence[bool], real: Sequence[bool]) -> dict:
    """{"precision", "recall", "n", "successes", "failures"}. Precision is None if the judge never said yes,
    recall if no trajectory really succeeded."""
    both = sum(a and b for a, b in zip(judged, real))
    return {"precision": both / sum(judged) if any(judged) else None,
            "recall": both / sum(real) if any(real) else None,
            "n": len(real), "successes": sum(real), "failures": len(real) - sum(real)}


def auroc(low: Sequence[float], high: Sequence[float]) -> float | None:
    """The chance that one of `high` is above one of `low`, ties counted half.

    >>> auroc([0, 1], [1, 2])
    0.875
    """
    above, below = (torch.tensor(side, dtype=torch.float64) for side in (high, low))
    below = below.sort().values  # a matrix of all pairs would not fit the memory of a laptop
    less, most = (torch.searchsorted(below, above, right=ties) for ties in (False, True))  # (len(high),) each
    return float((less + most).double().mean() / (2 * len(below))) if low and high else None


# ---- ranking agents in dreams ------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 5, 8)  # steps of a dream at most


def ranking(real: Sequence[Mapping[str, str]], dreamed: Sequence[Mapping[str, str]]) -> dict:
    """Whether dreams tell good agents from bad ones. For each agent `real` has {task: digits}, a 1 for each
    real try that succeeded (- where its page failed), and `dreamed` what
    fidelity.lengths_of_success says.

    highest     ceiling() of the real tries: the rho of a dream without any error
    separated   of the pairs of agents, those that reality tells apart: the mean difference over common tries
                is so many standard errors away from 0 that among equal agents one table in twenty has a
                pair like that, at most (Bonferroni)
    and for each length of dream:
    success     mean over agents
    rho         Spearman's, of dreamed and real success of the agents; and its share of `highest`
    reversed    of the separated pairs, the share that the dream orders the other way: where there is one, the
                world model can be exploited (arXiv 2605.15960)
    tied        of the separated pairs, the share that the dream does not order

    Agents without a try that counts, or without such a dream, are left out (`left out`: how many). Raises
    ValueError where fewer than two remain.
    """
    tries, steps = _tries(real), _tries(dreamed)  # (agents, tries), (agents, dreams)
    known = ~(tries.isnan().all(1) | steps.isnan().all(1))  # (agents,): nan is in no order
    tries, steps, lost = tries[known], steps[known], int((~known).sum())
    if len(tries) < 2:
        raise ValueError(f"{lost} of {lost + len(tries)} agents have no real try that counts, or no such "
                         "dream: nobody can rank them")
    success = tries.nanmean(1)  # (agents,)
    both = [*itertools.combinations(range(len(tries)), 2)]
    bar = float(torch.distributions.Normal(0, 1).icdf(
        torch.tensor(1 - 0.025 / max(1, len(both)), dtype=torch.float64)))
    pairs = [(i, j) for i, j in both if _separated(tries[i] - tries[j], bar)]
    highest = ceiling(tries, [len(digits) for _, digits in sorted(real[0].items())])
    found = {}
    for length in LENGTHS:
        within = ((steps > 0) & (steps <= length)).double()
        value = within.where(~steps.isnan(), steps).nanmean(1)  # (agents,)
        rho = spearman(value, success)
        signs = [float(((value[i] - value[j]) * (success[i] - success[j])).sign()) for i, j in pairs]
        reverse, tied = [signs.count(sign) / len(signs) if signs else None for sign in (-1.0, 0.0)]
        found[f"length {length}"] = {
            "success": float(value.mean()), "rho": rho, "of the highest": rho and highest and rho / highest,
            "reversed": reverse, "tied": tied}
    return {"agents": len(tries), "left out": lost, "pairs": len(both), "separated": len(pairs),
            "highest": highest, "ranking": found}


def _tries(agents: Sequence[Mapping[str, str]]) -> torch.Tensor:
    """Digits (agents, tries), task by task; nan for a -. Raises ValueError where agents have not the same
    tries."""
    kinds = {tuple((task, len(digits)) for task, digits in sorted(agent.items())) for agent in agents}
    if len(kinds) != 1:
        raise ValueError("these agents have not the same tries of the same tasks: nobody can rank them")
    return torch.tensor([[math.nan if digit == "-" else float(digit)
                          for _, digits in sorted(agent.items()) for digit in digits] for agent in agents],
                        dtype=torch.float64)


def _separated(differences: torch.Tensor, bar: float) -> bool:
    """Whether the mean of these (tries,) is more than `bar` standard errors away from 0."""
    some = differences[~differences.isnan()]
    return len(some) > 1 and bool(some.mean().abs() > bar * some.std() / math.sqrt(len(some)))


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks (n,) of values (n,), from 1; equal values share the mean of theirs.

    >>> ranks(torch.tensor([0.2, 0.1, 0.2])).tolist()
    [2.5, 1.0, 2.5]
    """
    return (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) + 1) / 2


def spearman(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Spearman's rho of two (n,): the correlation of their ranks. None where one side has no order."""
    pair = torch.stack([ranks(a), ranks(b)]).double()
    return float(torch.corrcoef(pair)[0, 1]) if len(a) > 1 and pair.std(1).all() else None


def ceiling(tries: torch.Tensor, sizes: Sequence[int], draws: int = 200, seed: int = 0) -> float | None:
    """The highest rho that the noise of the tries (agents, tries) allows: that of the agents' true values
    with what was measured. The tries stand task by task, `sizes` of each.

    By split halves: rho of one half of each task's tries with the other, mean of `draws` splits; lengthened
    to all tries by 2 r / (1 + r) (Spearman and Brown 1910); and its root, as one side alone is noisy
    (Spearman 1904). None where no split has an order, or the halves do not agree at all.
    """
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(draws):
        order = torch.cat([torch.randperm(size, generator=generator) + sum(sizes[:k])
                           for k, size in enumerate(sizes)])
        rho = spearman(tries[:, order[::2]].nanmean(1), tries[:, order[1::2]].nanmean(1))
        found += [] if rho is None else [rho]
    half = sum(found) / len(found) if found else 0.0
    return math.sqrt(2 * half / (1 + half)) if half > 0 else None

# ---- a trajectory as text ----------------------------------------------------------------------------------


def as_text(trajectory: TokenTrajectory) -> str:
    """A trajectory for people to read: pages, thoughts, actions, what the world model and the judge wrote,
    the reward. An expert's and one on real pages say so.

    What a model wrote stays inside its line or page: it cannot pass for a line of ours.
    """
    start = trajectory.start
    head = [f"{start.task} seed {start.seed}", start.goal, f"reward {trajectory.reward:g}",
            "EXPERT" if trajectory.expert else "REAL" if trajectory.real else "",
            "truncated" if trajectory.truncated else "", "no action" if trajectory.no_action else "",
            f"DROPPED: {trajectory.dropped}" if trajectory.dropped else ""]
    lines = ["=" * 100, data.one_line(" | ".join(part for part in head if part))]
    predictions = trajectory.predictions or [None] * len(trajectory.steps)
    for step, prediction in zip(trajectory.steps, predictions):
        lines += [_quoted(step.page), f">>> {data.one_line(step.thought)} {step.action}"]
        if prediction is not None and prediction.delta:
            lines += [f"<<< {data.one_line(prediction.reason)}"]
            lines += [f"    {line}" for line in prediction.delta.split("\n")]
            lines += [f"    over: {'yes' if prediction.over else 'no'}"]
        if step.error:
            lines += [f"    ERROR: {data.one_line(step.error)}"]
    lines += [_quoted(trajectory.final_page)]
    if isinstance(verdict := trajectory.verdict, Verdict):
        said = f"{'YES' if verdict.success else 'NO'} (margin {verdict.margin:.2f})"
        said = "no verdict" if verdict.malformed else said
        lines += [f"judge: {data.one_line(verdict.text)} -> {said}"]
    return "\n".join(lines) + "\n"


def _quoted(page: str) -> str:
    """A page whose lines cannot be taken for ours (as data.guard): a world model may dream any line."""
    ours = ("=====", ">>> ", "<<< ", "    ", "judge: ")
    return "\n".join("\\" + line if line.startswith(ours) else line for line in page.split("\n"))


# ---- a run while it learns ---------------------------------------------------------------------------------


def of_batch(batch: dream.Batch) -> dict:
    """What is logged of a batch (the table at the top of train.py).

    `drops` counts the dropped dreams, and experts' rows that are too long, by cause: {"world model: cut off":
    3}. `judged` and `judge_malformed` count all verdicts, those that dropped a dream among them. `real_steps`
    counts all actions done on real pages, those of prefixes and of dropped trajectories too: somebody had to
    do them. `dream_success` is by the judge, `real_train_success` by the pages; each is left out where no row
    is of its world. `goals` are the CRC-32 of the rows' goals: numbers, since goals are text of pages, by
    which those of several updates can be counted once.
    """
    trajectories = batch.trajectories
    drops = Counter(":".join(t.dropped.split(":")[:2]) for t in trajectories if t.dropped)
    verdicts = [t.verdict for t in trajectories if isinstance(t.verdict, Verdict)]
    own = [t for t in trajectories if not t.expert and not t.dropped]
    real = [t for t in trajectories if t.real and not t.expert]
    mean = lambda values: round(sum(values) / len(values), 4) if values else 0.0
    success = {name: mean([t.reward for t in own if t.real == on_pages])
               for name, on_pages in (("dream_success", False), ("real_train_success", True))
               if on_pages in [t.real for t in trajectories]}
    return {
        "groups": batch.useful, "goals": sorted({goal_number(t.start.goal) for t in trajectories}),
        "kept": len(batch.kept),
        "dropped_groups": sum(not teaches for _, teaches in batch.useful) / len(batch.useful),
        **success, "truncated": mean([t.truncated for t in own]),
        "steps": mean([len(t.pairs) for t in own]),
        "response_tokens": mean([len(completion) for t in own for _, completion in t.pairs]),
        "entropy": mean([-logp for t in own for logps in t.logps for logp in logps]),
        "parse_failures": sum(t.no_action for t in own), "experts": sum(t.expert for t in trajectories),
        "dreams": sum(not t.expert and not t.real for t in trajectories), "real_trajectories": len(real),
        "real_steps": sum(len(t.start.prefix) + len(t.steps) for t in real),
        "dropped_dreams": drops.total(), "drops": dict(sorted(drops.items())),
        "judged": len(verdicts), "judge_malformed": sum(verdict.malformed for verdict in verdicts),
    }


def goal_number(goal: str) -> int:
    return zlib.crc32(goal.encode(errors="replace"))  # a lone surrogate has no bytes


def sampled_by_all(before: int) -> int:
    """Tokens that agent, world model and judge have sampled on all ranks since this rank's
    lm.tokens_sampled() was `before`."""
    return sum(distributed.gather(lm.tokens_sampled() - before))


def look(web: World, agent: Sampler, starts: Sequence[Start], what: str, horizon: int,
         max_new_tokens: int) -> dict:
    """{"real_success", "looked_at"} on real pages, which are looked at and never learned from; `what` says in
    words which they are. The ranks share the trajectories. Pages that failed are not in the success:
    "real_failed" counts them, and where all failed there is no success."""
    played = play(web, agent, distributed.shard_rows(starts), horizon, max_new_tokens, name="real pages")
    result = success(distributed.collect(played))
    found = {"real_success": result["success"], "looked_at": what} if result["n"] else {}
    return found | ({"real_failed": result["failed"]} if result["failed"] else {})


def cut_metrics(file: Path, done: int) -> list[dict]:
    """Remove the lines of updates that will be computed again, and a last line that a kill cut in half.
    Returns the other lines."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines():
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:
            continue
        if metrics["update"] < done:  # update number `done` is the next to be computed
            rows.append(metrics)
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(metrics) + "\n" for metrics in rows))
    os.replace(temporary, file)
    return rows


def unreadable(metrics: dict) -> str:
    """The shares of answers that nobody could read: of the agent's trajectories, of the dreams (the world
    model), of the verdicts (the judge). Those that were cut off are among them.

    >>> unreadable({"dreams": 8, "parse_failures": 2, "drops": {"world model: cut off": 4}, "judged": 0})
    'agent 0.25 world model 0.50 judge 0.00'
    """
    share = lambda count, of: f"{count / max(1, of):.2f}"
    tries = metrics["dreams"] + metrics.get("real_trajectories", 0)
    lost = sum(count for why, count in metrics["drops"].items()
               if why in ("world model: cut off", "world model: unreadable"))
    return (f"agent {share(metrics['parse_failures'], tries)} world model {share(lost, metrics['dreams'])} "
            f"judge {share(metrics.get('judge_malformed', 0), metrics['judged'])}")


def write(log, metrics: dict, bar: tqdm) -> None:
    """A line of metrics.jsonl, and the progress bar."""
    log.write(json.dumps(metrics) + "\n")
    log.flush()
    names = ["dream_success", "real_train_success", "real_success"]
    names += ["idle"] * (distributed.world_size() > 1)
    shown = {name: f"{metrics[name]:.2f}" for name in names if name in metrics}
    bar.set_postfix(shown, refresh=False)
    if "kept" in metrics:
        worlds = {"dreams": "dream_success", "real pages": "real_train_success"}
        succeeded = "  ".join(f"{world} {metrics[name]:.2f}" for world, name in worlds.items()
                              if name in metrics)
        if "drops" in metrics:  # what is not a dreaming run's own line has none
            succeeded = f"unreadable: {unreadable(metrics)}  {succeeded}"
        bar.write(f"update {metrics['update']:4d}  {succeeded}  learned from "
                  f"{metrics['kept']:2d}  dropped {metrics['dropped_dreams']:2d}  clipped "
                  f"{metrics.get('clip_frac', 0):.2f}")
    if "real_success" in metrics:
        bar.write(f"update {metrics['update']:4d}  real success on {metrics.get('looked_at', 'dev seeds')} "
                  f"{metrics['real_success']:.3f}")
    if "real_failed" in metrics:
        bar.write(f"update {metrics['update']:4d}  {metrics['real_failed']} real pages failed twice, and do "
                  "not count")
    bar.update(metrics["update"] + 1 - bar.n if "kept" in metrics else 0)


def series(rows: Sequence[Mapping], name: str, last: int = 1) -> list[tuple[float, float]]:
    """(update, value) of what the lines of a log say under `name`: the mean of the `last` lines up to there.

    >>> series([{"update": 0, "kept": 4}, {"update": 1}, {"update": 2, "kept": 6}], "kept", 5)
    [(0, 4.0), (2, 5.0)]
    """
    found = [(row["update"], row[name]) for row in rows if name in row]
    values = [[value for _, value in found[max(0, k - last) : k]] for k in range(1, len(found) + 1)]
    return [(n, sum(some) / len(some)) for (n, _), some in zip(found, values)]


ON_REAL = "on real pages, dev seeds (greedy)"


def plot(metrics: Path, file: Path) -> None:
    """Draw real and dream success over the updates. Where dream success rises alone, the judge is being
    fooled. Where the agent learned on real pages, success there is drawn too, and the number of its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, color, label in (("dream_success", "C0", "in dreams, by the judge (sampled)"),
                               ("real_train_success", "C2", "on real pages, training seeds (sampled)")):
        if done := series(rows, name):
            axes.plot(*zip(*done), color=color, alpha=0.25)
            axes.plot(*zip(*series(rows, name, 5)), color=color, label=label)
    if real := series(rows, "real_success"):  # --evaluate-every 0 never looks
        axes.plot(*zip(*real), "o-", color="C3", label=ON_REAL)
    steps = sum(row.get("real_steps", 0) for row in rows)
    axes.set(xlabel="update" + f" ({steps:,} real steps in all)" * bool(steps), ylabel="success", ylim=(0, 1))
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
