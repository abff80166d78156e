"""What counts: success on real pages in a real browser. And how far the dreams are from them.

    python evaluate.py --checkpoint runs/tiny/dream --seeds 2000000:20 --json FILE
        20 trajectories of each task on real pages
    python evaluate.py --checkpoint runs/paper/dream --sampler vllm
        the same of a larger agent; its lengths are those of its run (runs/paper/dream.run/config.json)
    python evaluate.py --agent-url http://127.0.0.1:8000/v1 --agent-model NAME
        the same of any model that a server talks for (chat/completions)
    python evaluate.py --benchmark infinity --sites DIR --checkpoint runs/tiny/dream --json tries.jsonl
        tries at other people's benchmarks (benchmarks.py), a line each; the same command goes on
    python evaluate.py --table runs/tiny/sft.json runs/tiny/dream.json
        two such files, side by side
    python evaluate.py --replay --checkpoint runs/tiny/dream --judge-checkpoint runs/tiny/sft
        dreams, done for real: was the judge right, were the pages?
    python evaluate.py --judge --checkpoint runs/tiny/sft --temperature 1 --seeds 1000000:30
        the judge on real trajectories
    python evaluate.py --fidelity FILE
        the world model on recorded transitions

Nothing here is measured inside a dream (NOTES 5.5): success is the raw reward of the page. Intervals are
Wilson's 95 %. Seeds: tune on dev (from 1,000,000), report on eval (from 2,000,000); data.SEEDS names the
ranges. The audits learn nothing, so they alone read recordings of any seed (data.read_for_audit); whatever
learns reads through data.read_trajectories, which refuses all but training seeds.
"""

import contextlib
import copy
import importlib.metadata
import json
import math
import os
import platform
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

import a11y
import benchmarks
import data
import dream
import judge
import lm
import policy
import world_model
from browser import TASKS, Browser, tasks_of
from data import Action, Start, Trajectory
from chromium import BULLETS
from policy import TokenTrajectory


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


def paired_bootstrap(a: Sequence[float], b: Sequence[float], draws: int = 10_000,
                     seed: int = 0) -> tuple[float, float, float]:
    """mean(b - a) over common trajectories and its 95 % interval, by resampling trajectories."""
    differences = torch.tensor(b, dtype=torch.float64) - torch.tensor(a, dtype=torch.float64)  # (n,)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(differences), (draws, len(differences)), generator=generator)  # (draws, n)
    means = differences[drawn].mean(1)  # (draws,)
    return float(differences.mean()), float(means.quantile(0.025)), float(means.quantile(0.975))


# ---- real success ------------------------------------------------------------------------------------------


def play(web: Browser, model: lm.LM, starts: Sequence[Start], horizon: int, max_new_tokens: int,
         temperature: float = 0.0, seed: int = 0, pages: int = 16,
         name: str = "evaluating") -> list[TokenTrajectory]:
    """The agent on real pages, `pages` at a time. In the order of `starts`. A try whose page failed twice is
    dropped (policy.rollout_on_pages)."""
    played: list[TokenTrajectory] = []
    with tqdm(total=len(starts), desc=name, unit="trajectory", dynamic_ncols=True, leave=False) as bar:
        for k in range(0, len(starts), pages):
            some = starts[k : k + pages]
            played += policy.rollout_on_pages(web, model, some, horizon, max_new_tokens, temperature,
                                              seed + k)
            bar.update(len(played) - bar.n)
    return played


def real_starts(tasks: Sequence[str], seeds: Sequence[int]) -> list[Start]:
    """The first page of every (task, seed)."""
    return [benchmarks.start(task, seed) for task in tasks for seed in seeds]


def success(played: Sequence[TokenTrajectory]) -> dict:
    """{"success", "n", "interval", "per_task": {task: {"success", "n"}}, "trajectories": [[task, seed,
    reward], ...]}; and of the failures how many ended with a text that is no action ("malformed"), and how
    many with a page that nobody could read ("dropped").

    Tries whose page failed twice are in none of these. They are told apart: "failed" says how many,
    "failures" which and why."""
    lost = [trajectory for trajectory in played if trajectory.failed]
    played = [trajectory for trajectory in played if not trajectory.failed]
    by_task = defaultdict(list)
    for trajectory in played:
        by_task[trajectory.start.task].append(trajectory.reward)
    rewards = [trajectory.reward for trajectory in played]
    return {
        "success": sum(rewards) / max(1, len(rewards)), "n": len(rewards),
        "interval": wilson(sum(rewards), len(rewards)),
        "per_task": {task: {"success": sum(r) / len(r), "n": len(r)} for task, r in by_task.items()},
        "malformed": sum(t.malformed for t in played), "dropped": sum(bool(t.dropped) for t in played),
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
    """Success per task of several result files, in columns. Below: the last minus the first, on tries that
    both hold."""
    results = [read_result(file) for file in files]
    names = [Path(file).stem for file in files]
    width = max(24, *(len(task) + 2 for result in results for task in result["per_task"]))
    lines = ["".ljust(width) + "".join(name.rjust(28) for name in names)]
    for task in results[0]["per_task"]:
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


# What a try's failure says somewhere (chromium.py, benchmarks.py, worlds/).
FAILURES = ("the page hung", "the page crashed", "not verified", "not over after", "did not start",
            "does not load", "blocked", "no verdict")


def totals(rows: Sequence[dict], untouched: Sequence[str] = ()) -> dict:
    """Of the lines of benchmarks.tries: {"success", "n", "interval"} of those that could be judged, with
    "success of all", in which each that failed counts 0; in all, by site, by difficulty, and without the
    tasks of `untouched`, which succeed before anything is done; as the benchmark's authors score it, where
    the lines say so; what failed, and how often; tokens (None where a server counts them) and minutes. A
    success of no tries is None."""
    def share(some: Sequence[dict]) -> dict:
        judged = [row["reward"] for row in some if not row["failed"] and row["reward"] is not None]
        failed, missing = sum(bool(row["failed"]) for row in some), len(some) - len(judged)
        found = {"success": sum(judged) / len(judged) if judged else None, "n": len(judged),
                 "interval": wilson(sum(judged), len(judged)), "failed": failed,
                 "success of all": sum(judged) / len(some) if some and missing == failed else None}
        return found | ({"not judged": missing - failed} if missing > failed else {})

    def by(key: str) -> dict:
        return {value: share([row for row in rows if row[key] == value])
                for value in dict.fromkeys(row[key] for row in rows)}

    left = [row for row in rows if row["task"] not in untouched]
    theirs = [row["authors_reward"] for row in rows if "authors_reward" in row]
    return share(rows) | {
        "as its authors score it": {"success": sum(theirs) / len(theirs), "n": len(theirs),
                                    "interval": wilson(sum(theirs), len(theirs))} if theirs else None,
        "without those that pass untouched": share(left) if len(left) < len(rows) else None,
        "per_site": by("site"), "per_difficulty": by("difficulty"),
        "ends": dict(Counter(row["end"] for row in rows)),
        "failures": dict(Counter(next((kind for kind in FAILURES if kind in row["failed"]), "other")
                                 for row in rows if row["failed"])),
        **{key: None if any(row[key] is None for row in rows) else sum(row[key] for row in rows)
           for key in ("tokens_read", "tokens_written")},
        "minutes, added over tries": round(sum(row["seconds"] for row in rows) / 60, 2),
    }


# ---- dreams against reality --------------------------------------------------------------------------------


def precision_recall(judged: Sequence[bool], real: Sequence[bool]) -> dict:
    """{"precision", "recall", "n", "successes", "failures"}. Precision is None if the judge never said yes,
    recall if no trajectory really succeeded."""
    both = sum(a and b for a, b in zip(judged, real))
    return {"precision": both / sum(judged) if any(judged) else None,
            "recall": both / sum(real) if any(real) else None,
            "n": len(real), "successes": sum(real), "failures": len(real) - sum(real)}


def replay(web: Browser, dreamed: Sequence[TokenTrajectory], pages: int = 16) -> dict:
    """Every dreamed action sequence done in the real browser, from the same start, whose prefix runs first.

    Ids of the dream are mapped to real elements by a11y.alignment at every step. An action whose element has
    no counterpart stops that replay ("unmatched"). Returns the judge's precision and recall against the real
    reward; and for each step the share of dreamed pages that equal the real page, as long as all actions
    before were matched. A replay whose page failed is made once more; then it is "failed", and in no figure.
    """
    todo = [t for t in dreamed if not t.expert and not t.dropped and t.steps]
    done: list[tuple[TokenTrajectory, _Replay]] = []
    for _ in range(2):
        tried = [(t, replayed) for k in range(0, len(todo), pages)
                 for t, replayed in zip(todo[k : k + pages], _replay_some(web, todo[k : k + pages]))]
        done += [(t, replayed) for t, replayed in tried if not replayed.failed]
        todo = [t for t, replayed in tried if replayed.failed]
    judged, real = [t.reward == 1 for t, _ in done], [replayed.reward == 1 for _, replayed in done]
    compared = Counter(step for _, replayed in done for step in range(1, len(replayed.equal) + 1))
    equal = Counter(step for _, replayed in done for step, same in enumerate(replayed.equal, 1) if same)
    return {**precision_recall(judged, real), "unmatched": sum(replayed.unmatched for _, replayed in done),
            "failed": len(todo),
            "page equal by step": {step: round(equal[step] / n, 4) for step, n in sorted(compared.items())},
            "pages by step": dict(sorted(compared.items()))}


@dataclass
class _Replay:
    """What became of a dream in the real browser."""

    reward: float = 0.0
    unmatched: bool = False  # an action had no real counterpart
    equal: list[bool] = field(default_factory=list)  # of each step: was the page the dreamed one?
    failed: str = ""


def _replay_some(web: Browser, dreamed: Sequence[TokenTrajectory]) -> list[_Replay]:
    """Dreams replayed side by side."""
    seen = web.reset([trajectory.start for trajectory in dreamed])
    found, live = [_Replay() for _ in dreamed], set(range(len(dreamed)))
    for turn in range(max(len(trajectory.steps) for trajectory in dreamed)):
        actions: list[Action | None] = [None] * len(dreamed)
        for i in sorted(live):
            steps = dreamed[i].steps
            if turn < len(steps):
                actions[i] = to_real(steps[turn].action, steps[turn].page, seen[i].page)
                found[i].unmatched = actions[i] is None
        live = {i for i in live if actions[i] is not None}
        if not live:
            break
        seen, reward, terminated, truncated = web.step(actions)
        for i in sorted(live):
            steps = dreamed[i].steps
            page = steps[turn + 1].page if turn + 1 < len(steps) else dreamed[i].final_page
            found[i].equal.append(a11y.align(page, seen[i].page) == page)
            if terminated[i] or truncated[i]:
                found[i].reward = reward[i]
                live.discard(i)
    for replayed, failure in zip(found, web.failures, strict=True):
        replayed.failed = failure
    return found


def to_real(action: Action, dreamed_page: str, real_page: str) -> Action | None:
    """`action` with the id that its element has on the real page; None when it has no counterpart there."""
    if not action.bid:
        return action
    real = {dreamed: there for there, dreamed in a11y.alignment(dreamed_page, real_page).items()}
    return Action(action.name, real[action.bid], action.text, action.enter) if action.bid in real else None


# Which predictions can be asked for was written here before anything was measured. The page: every name and
# value of the next page stands on this page or in the action. (A folder that opens shows what nobody could
# know.) The end: everywhere but where the goal decides it, since the world model does not see the goal.
GOAL_ENDS = ("navigate-tree",)


def determined(page: str, action: Action, next_page: str) -> bool:
    """Whether (page, action) determine the next page, by the rule above.

    >>> determined("[1] textbox ''", Action("type", "1", "tea"), "[1] textbox '' value='tea'")
    True
    >>> determined("[1] listitem 'all'", Action("click", "1"), "[1] listitem 'all'\\n\\t[2] listitem 'more'")
    False
    """
    return _texts(next_page) <= _texts(page) | {action.text, BULLETS}


def _texts(page: str) -> set[str]:
    """Names and values on a page."""
    nodes = a11y.parse(page)
    values = [node.attributes.get("value", "") for node in nodes]
    quoted = {a11y.unquote(value) for value in values if value[:1] in ("'", '"')}
    return {node.name for node in nodes if node.name} | quoted


def fidelity(model: world_model.WorldModel, trajectories: Sequence[Trajectory], batch: int = 128) -> dict:
    """Next page exactly equal, and end right, on recorded transitions; per task, over those that are
    determined."""
    cases = [(t.task, step, action, after, over)
             for t in trajectories for step, action, after, over in data.transitions(t) if not step.error]
    page, end, n_page, n_end, left_out = Counter(), Counter(), Counter(), Counter(), Counter()
    misses = []
    for k in tqdm(range(0, len(cases), batch), desc="fidelity", dynamic_ncols=True, leave=False):
        part = cases[k : k + batch]
        pages = [step.page for _, step, _, _, _ in part]
        previous = [step.previous[-1] if step.previous else "" for _, step, _, _, _ in part]
        answers = model.predict(pages, [action for _, _, action, _, _ in part], previous, seed=k)
        for (task, step, action, after, over), answer in zip(part, answers):
            if determined(step.page, action, after):
                n_page[task] += 1
                page[task] += answer.page == after
                if answer.page != after and len(misses) < 40:
                    misses.append({"task": task, "action": str(action), "page": step.page,
                                   "delta": answer.delta, "wanted": a11y.diff(step.page, after),
                                   "malformed": answer.malformed})
            else:
                left_out[task] += 1
            if task not in GOAL_ENDS:
                n_end[task] += 1
                end[task] += answer.over == over
    share = lambda right, n: round(right / n, 4) if n else None
    rows = {task: {"page": share(page[task], n_page[task]), "n": n_page[task],
                   "not determined": left_out[task], "end": share(end[task], n_end[task])}
            for task in sorted(n_page | n_end)}
    return {"page": page.total() / max(1, n_page.total()), "end": end.total() / max(1, n_end.total()),
            "per_task": rows, "malformed": model.counts["malformed"], "misses": misses}


def judge_own(web: Browser, model, judge_model, starts: Sequence[Start], config: "Config") -> dict:
    """The judge on what this agent really does: sampled trajectories on real pages that ended, its verdict
    against the reward. "unread" counts those on which it came to no verdict, "failed" those whose page failed
    twice."""
    tried = play(web, model, starts, config.horizon, config.max_new_tokens, config.temperature, seed=1)
    played = [t for t in tried if not t.failed]
    ended = [t for t in played if t.terminated and t.steps]
    cases = [(t.start.goal, *judge.ending(t)) for t in ended]
    verdicts = judge.verdicts(judge_model, cases, config.judge_tokens)
    not_ended, unread = len(played) - len(ended), sum(bool(verdict.malformed) for verdict in verdicts)
    read = [k for k, verdict in enumerate(verdicts) if not verdict.malformed]  # such dreams are dropped
    ended, cases, verdicts = ([rows[k] for k in read] for rows in (ended, cases, verdicts))
    by_task: dict[str, list] = defaultdict(list)
    wrong, margins = [], []
    for t, verdict, (goal, actions, before, _) in zip(ended, verdicts, cases):
        right = t.reward == 1
        by_task[t.start.task].append((verdict.success, right))
        margins.append([t.start.task, verdict.margin, right])
        if verdict.success != right:
            wrong.append({"task": t.start.task, "goal": goal, "actions": actions, "before": before,
                          "reasons": verdict.text, "said": verdict.success})
    result = precision_recall([v.success for v in verdicts], [t.reward == 1 for t in ended])
    per_task = {task: precision_recall(*zip(*rows)) for task, rows in sorted(by_task.items())}
    return {**result, "not ended": not_ended, "unread": unread, "failed": len(tried) - len(played),
            "per_task": per_task, "wrong": wrong, "margins": margins}


# ---- python evaluate.py ------------------------------------------------------------------------------------

# What a length is that neither a flag nor a run gives: the laptop's. 0: as `context`.
LENGTHS = {"context": 1024, "world_model_context": 0, "judge_context": 0, "max_new_tokens": 64,
           "world_model_tokens": 160, "judge_tokens": 160}


@dataclass(frozen=True)
class Config:
    """Real success, and the audits. A length of 0 is the run's (`run`), and without a run the laptop's."""

    checkpoint: str = ""
    """Folder of the policy."""
    agent_url: str = ""
    """Instead of a checkpoint: an OpenAI-compatible server (http://host:port/v1), asked by chat/completions,
    directly and not through a proxy. OPENAI_API_KEY goes along, where it is set."""
    agent_model: str = ""
    """The name that this server gives its model."""
    sampler: str = "transformers"
    """Who samples for the checkpoint: `transformers`, or `vllm` in this process. Of an audit's other models,
    too."""
    engine: lm.EngineConfig = field(default_factory=lm.EngineConfig)
    """vLLM's settings."""
    run: str = ""
    """Folder OUT.run of train.py, whose lengths are taken. The one beside --checkpoint OUT is found by
    itself."""
    seeds: str = "2000000:10"
    """START:COUNT: COUNT trajectories of each task. Other benchmarks than miniwob have no seeds."""
    json: str = ""
    """Write the result here; of a benchmark each try, when it ends."""
    tasks: tuple[str, ...] = TASKS
    """MiniWoB++ tasks (the recipe's by default), or `all`: every page of MiniWoB++. Of a benchmark: names
    with * and ?, such as 'gmail/*'; all by default. Of infinity also `published`: the ten applications that
    published figures are of."""
    horizon: int = 0
    """Steps of a trajectory at most (MiniWoB++: 10; of a benchmark: its own)."""
    on: Annotated[benchmarks.Options, tyro.conf.arg(name="")] = field(default_factory=benchmarks.Options)
    """Other people's benchmarks."""
    limit: int = 0
    """So many tasks of the benchmark, from its whole list; 0: all."""
    pages: int = 8
    """Tries of a benchmark side by side."""
    try_seconds: float = 1800.0
    """Longest try of a benchmark."""
    keep_pages: bool = False
    """Keep each page, thought and error of a benchmark's tries."""
    max_new_tokens: int = 0
    """Longest answer of the policy (laptop: 64; of an agent behind a URL: 4,096)."""
    temperature: float = 0.0
    """Of the agent on real pages; 0 is greedy, as in all reported success rates. Dreams to replay are at
    .7."""
    table: tuple[str, ...] = ()
    """Print these result files side by side and stop."""
    replay: bool = False
    """Dream from recorded starts and replay the dreams in the real browser."""
    judge: bool = False
    """Audit the judge on this agent's own trajectories."""
    fidelity: str = ""
    """Audit the world model on this file of recorded transitions."""
    world_model: str = "runs/tiny/world_model"
    """Folder of the world model."""
    world_model_urls: tuple[str, ...] = ()
    """vLLM servers of the world model, as in train.py."""
    judge_checkpoint: str = ""
    """The judge's weights; the checkpoint's own when empty."""
    judge_urls: tuple[str, ...] = ()
    """vLLM servers of the judge."""
    judge_tokens: int = 0
    """Longest verdict (laptop: 160)."""
    world_model_tokens: int = 0
    """Longest prediction (laptop: 160)."""
    world_model_temperature: float = 0.5
    """Of the world model in dreams to replay."""
    context: int = 0
    """Longest prompt and answer of the policy, tokens (laptop: 1,024)."""
    world_model_context: int = 0
    """The same of the world model (without a run: as `context`)."""
    judge_context: int = 0
    """The same of the judge."""
    trajectories: str = "tiny/trajectories.jsonl.gz"
    """Recorded trajectories whose first pages dreams start from."""
    dreams: int = 320
    """How many dreams to replay."""

    def __post_init__(self):
        if self.sampler not in ("transformers", "vllm"):
            raise ValueError(f"sampler is transformers or vllm, not {self.sampler!r}")
        if bool(self.agent_url) != bool(self.agent_model):
            raise ValueError("an agent behind a URL needs both: give --agent-url http://host:port/v1 and "
                             "--agent-model NAME")
        if self.agent_url and self.checkpoint:
            raise ValueError(f"which agent? --agent-url {self.agent_url} or --checkpoint {self.checkpoint}")
        if self.agent_url and (self.judge or self.replay) and not self.judge_checkpoint:
            raise ValueError("an agent behind a URL gives no log-probs, and cannot judge: give "
                             "--judge-checkpoint FOLDER")
        if self.on.benchmark and (self.judge or self.replay or self.fidelity):
            raise ValueError("--replay, --judge and --fidelity know MiniWoB++ alone: leave --benchmark out")
        if self.on.benchmark and not self.json:
            raise ValueError("--benchmark writes each try when it ends: give --json FILE for them")
        if self.on.benchmark not in ("", "miniwob") and self.seeds != type(self).seeds:
            raise ValueError(f"--seeds {self.seeds}: a seed changes nothing in {self.on.benchmark}, whose "
                             "tasks are tried once each; leave --seeds out")
        benchmarks.check_counts(1, pages=self.pages)
        benchmarks.check_counts(0, limit=self.limit, horizon=self.horizon)


def with_lengths(config: Config) -> Config:
    """`config` with every length: that of its flag, else of the run, else the laptop's. Raises ValueError
    when --run is no run."""
    run, found = config.run or f"{config.checkpoint.rstrip('/')}.run", dict(LENGTHS)
    file = Path(run, "config.json")
    if config.agent_url:
        found["max_new_tokens"] = dream.Config().max_new_tokens  # others think at length
    try:
        saved = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); give the lengths as flags") from error
    if config.run and "dreaming" not in saved:
        raise ValueError(f"{file} is not a run's: --run takes the folder OUT.run that train.py makes beside "
                         "OUT")
    if "dreaming" in saved:
        found |= {name: length for name, length in (saved | saved["dreaming"]).items() if name in LENGTHS}
    found |= {name: getattr(config, name) for name in LENGTHS if getattr(config, name)}
    for name in ("world_model_context", "judge_context"):
        found[name] = found[name] or found["context"]
    return replace(config, run=run if "dreaming" in saved else "", **found)


def run(config: Config) -> dict:
    """What the flags ask for, and with what it was measured."""
    config = replace(with_lengths(config), horizon=config.horizon or benchmarks.HORIZONS.get(
        config.on.benchmark, 10))
    if not config.on.benchmark:
        config = replace(config, tasks=tasks_of(config.tasks))
    _one_engine(config)
    what = ("checkpoint", "agent_url", "agent_model", "sampler", "run", "seeds", "temperature")
    measured = {name: getattr(config, name) for name in what}
    measured["lengths"] = {name: getattr(config, name) for name in LENGTHS}
    if config.fidelity:
        with _world_model(config, temperature=0.0) as model:
            return fidelity(model, data.read_for_audit(config.fidelity)) | measured
    if config.on.benchmark:
        return on_benchmark(config, measured)
    starts = real_starts(config.tasks, data.parse_seeds(config.seeds))
    with agent(config) as model, Browser() as web:
        if config.replay:
            return replay(web, dream_for_replay(model, config)) | measured
        if config.judge:
            with _judge(config, model) as judge_model:
                return judge_own(web, model, judge_model, starts, config) | measured
        sampled = lm.tokens_sampled()
        played = play(web, model, starts, config.horizon, config.max_new_tokens, config.temperature)
        if played and all(trajectory.failed for trajectory in played):
            raise ValueError(f"all {len(played)} tries failed with their pages, so nothing was measured; the "
                             f"first: {played[0].dropped}")
        refused = {"refused": len(model.refused)} if config.agent_url else {}
        return success(played) | refused | measured | {"tokens_sampled": lm.tokens_sampled() - sampled}


def on_benchmark(config: Config, measured: dict) -> dict:
    """The agent's tries at a benchmark, in totals."""
    web, miniwob = benchmarks.world(config.on), config.on.benchmark == "miniwob"
    globs = () if config.tasks == TASKS else config.tasks
    tasks = benchmarks.chosen(list(web.tasks()), globs, config.limit, getattr(web, "named", None))
    seeds = config.seeds if miniwob else ""
    made = measured | asdict(config.on) | {"horizon": config.horizon, "seeds": seeds,
                                           "try_seconds": config.try_seconds}
    for name in ("checkpoint", "run", "sites", "task_file"):  # DIR/ is DIR
        made[name] = made[name] and os.path.normpath(made[name])
    made |= benchmarks.made_of(web, config.checkpoint)
    made = json.loads(json.dumps(made))  # as the file will give it back
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "playwright")}
    pairs = [(task, seed) for task in tasks for seed in (data.parse_seeds(config.seeds) if miniwob else [0])]
    with agent(config) as model, web:
        rows = benchmarks.tries(
            web, model, pairs, Path(config.json), made, horizon=config.horizon,
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, pages=config.pages,
            seconds=config.try_seconds, keep_pages=config.keep_pages)
    versions["Python"] = platform.python_version()
    found = totals(rows, getattr(web, "untouched", ()))
    if not miniwob:  # whose seeds are split
        found["per_side"] = {side: {key: value for key, value in totals(some).items() if key in (
            "success", "success of all", "n", "failed", "interval", "as its authors score it")}
            for side in (benchmarks.TRAINING, benchmarks.HELD_OUT)
            if (some := [row for row in rows if benchmarks.side(row["task"]) == side])}
    return found | made | {"versions": versions}


def _one_engine(config: Config) -> None:
    """Raise ValueError where vLLM would have to hold several models in this process: they would share a
    process group, which each engine destroys when it is closed, and nobody has tried that on a GPU."""
    audit = config.judge or config.replay
    here = ["the agent"] if not config.agent_url and not config.fidelity else []
    if (config.replay or config.fidelity) and not config.world_model_urls:
        here.append("the world model (--world-model-urls)")
    if audit and config.judge_checkpoint and not config.judge_urls:
        here.append("the judge (--judge-urls)")
    if config.sampler == "vllm" and len(here) > 1:
        raise ValueError(f"vLLM takes one model in this process, not {len(here)}: {', '.join(here)}. Start "
                         "servers of the others (vllm serve FOLDER), and give their URLs")


@contextlib.contextmanager
def loaded(config: Config, folder: str, context: int, made_by: str = "",
           urls: Sequence[str] = ()) -> Iterator:
    """A model as lm.sample takes it: of the servers at `urls`, or in this process by config.sampler."""
    if not urls and config.sampler == "transformers":
        model = lm.load(folder, made_by, context)
        most = model.model.config.max_position_embeddings if model.model else context
        if context > most:  # it would answer, with noise
            raise ValueError(f"a context of {context} tokens: {folder} reads {most} at most "
                             "(max_position_embeddings); lower --context")
        yield model
        return
    from node import engine  # wing: who samples on GPUs

    if urls:
        yield engine.Remote(urls, folder)
    else:
        lm.check_folder(folder, made_by)
        with contextlib.closing(engine.Engine(folder, context, config=config.engine)) as model:
            yield model


@contextlib.contextmanager
def agent(config: Config) -> Iterator:
    """The agent that is measured, as policy.rollout takes it. `config` has its lengths (with_lengths)."""
    if config.agent_url:
        from node import engine  # wing: any agent behind a URL

        yield engine.Chat(config.agent_url, config.agent_model)
        return
    if not config.checkpoint:
        raise ValueError("which agent? give --checkpoint FOLDER, such as runs/tiny/sft; or --agent-url and "
                         "--agent-model")
    judges = (config.judge or config.replay) and not config.judge_checkpoint  # in the same engine
    longest = max(config.context, config.judge_context if judges else 0)
    made_by = "python policy.py tiny, then python train.py tiny"
    with loaded(config, config.checkpoint, longest, made_by) as model:
        yield _in_context(model, config.context)


def _in_context(model, context: int):
    """The same model, for prompts and answers of at most `context` tokens."""
    model = copy.copy(model)
    model.context = context
    return model


@contextlib.contextmanager
def _judge(config: Config, model) -> Iterator:
    """The judge: the agent's own weights, unless others are given."""
    if not config.judge_checkpoint:
        yield _in_context(model, config.judge_context)
        return
    with loaded(config, config.judge_checkpoint, config.judge_context, urls=config.judge_urls) as judge_model:
        yield judge_model


@contextlib.contextmanager
def _world_model(config: Config, temperature: float) -> Iterator[world_model.WorldModel]:
    with loaded(config, config.world_model, config.world_model_context, "python world_model.py tiny",
                config.world_model_urls) as model:
        yield world_model.WorldModel(model, config.world_model_tokens, temperature)


def dream_for_replay(model, config: Config) -> list[TokenTrajectory]:
    """config.dreams dreams from recorded first pages, without experts. Of any seeds: nothing learns here."""
    starts = dream.first_pages(data.read_for_audit(config.trajectories))
    starts = [start for start in starts if start.task in config.tasks]
    rows = [(start, None) for start in random.Random(0).sample(starts, min(config.dreams, len(starts)))]
    how = dream.Config(horizon=5, max_new_tokens=config.max_new_tokens, judge_tokens=config.judge_tokens)
    dreamed = []
    with (_world_model(config, config.world_model_temperature) as imagination,
          _judge(config, model) as judge_model):
        for k in tqdm(range(0, len(rows), 64), desc="dreaming", leave=False):
            some = rows[k : k + 64]
            dreamed += dream.dream(model, imagination, judge_model, some, how, lm.row_seeds(k, len(some)))
    return dreamed


def main():
    try:
        config = tyro.cli(Config, description=__doc__)
        if config.table:
            print(table(config.table))
            return
        result = run(config)
    except (ValueError, OSError, lm.EngineError) as error:
        sys.exit(f"evaluate.py: {error}")
    if config.json and not config.on.benchmark:  # there it holds the tries
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(json.dumps(result, indent=1))
    long = ("trajectories", "misses", "wrong", "margins")
    print(json.dumps({key: value for key, value in result.items() if key not in long}, indent=1))


if __name__ == "__main__":
    main()
