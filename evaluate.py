"""What counts: success on real pages in a real browser. And how far the dreams are from them.

    python evaluate.py --checkpoint runs/tiny/dream --seeds 2000000:20 --json runs/tiny/dream.json    # 20 episodes of each task, greedy
    python evaluate.py --table runs/tiny/sft.json runs/tiny/dream.json                                # two such files, side by side
    python evaluate.py --replay --checkpoint runs/tiny/dream                                          # dreams, replayed for real
    python evaluate.py --judge --checkpoint runs/tiny/sft --seeds 1000000:30                          # the judge on the agent's own attempts
    python evaluate.py --fidelity FILE                                                                # the world model on recorded transitions

Nothing here is done inside a dream (facts.md, trap 5): success is the raw reward of the page. Intervals are Wilson's 95 %. Seeds: tune on
dev (from 1,000,000), report on eval (from 2,000,000); data.SEEDS names the ranges.
"""

import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import a11y
import data
import dream
import lm
import policy
import world_model
from browser import BULLETS, TASKS, Browser
from data import Action, Start, Trajectory
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


def paired_bootstrap(a: Sequence[float], b: Sequence[float], draws: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """mean(b - a) over common episodes and its 95 % interval, by resampling episodes."""
    differences = torch.tensor(b, dtype=torch.float64) - torch.tensor(a, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = differences[torch.randint(len(differences), (draws, len(differences)), generator=generator)].mean(1)
    return float(differences.mean()), float(means.quantile(0.025)), float(means.quantile(0.975))


# ---- real success ----------------------------------------------------------------------------------------------------------


def play(web: Browser, model: lm.LM, starts: Sequence[Start], horizon: int, max_new_tokens: int, temperature: float = 0.0, seed: int = 0,
         pages: int = 16, name: str = "evaluating") -> list[TokenTrajectory]:
    """The agent on real pages, `pages` at a time; in the order of `starts`."""
    played: list[TokenTrajectory] = []
    with tqdm(total=len(starts), desc=name, unit="episode", dynamic_ncols=True, leave=False) as bar:
        for k in range(0, len(starts), pages):
            played += policy.rollout(web, model, starts[k : k + pages], horizon, max_new_tokens, temperature, seed + k)
            bar.update(len(played) - bar.n)
    return played


def real_starts(tasks: Sequence[str], seeds: Sequence[int]) -> list[Start]:
    """The first page of every (task, seed); what stands on it is known only once it is reset."""
    return [Start(task, seed, (), "", "", "", ()) for task in tasks for seed in seeds]


def success(played: Sequence[TokenTrajectory]) -> dict:
    """{"success", "n", "interval", "per_task": {task: {"success", "n"}}, "episodes": [[task, seed, reward], ...]}"""
    by_task = defaultdict(list)
    for one in played:
        by_task[one.start.task].append(one.reward)
    rewards = [one.reward for one in played]
    return {"success": sum(rewards) / max(1, len(rewards)), "n": len(rewards), "interval": wilson(sum(rewards), len(rewards)),
            "per_task": {task: {"success": sum(r) / len(r), "n": len(r)} for task, r in by_task.items()},
            "episodes": [[one.start.task, one.start.seed, one.reward] for one in played]}


def table(files: Sequence[str]) -> str:
    """Success per task of several result files, in columns; below it the difference of the last to the first on common episodes."""
    results = [json.loads(Path(file).read_text()) for file in files]
    names = [Path(file).stem for file in files]
    width = max(24, *(len(task) + 2 for result in results for task in result["per_task"]))
    lines = ["".ljust(width) + "".join(name.rjust(28) for name in names)]
    for task in results[0]["per_task"]:
        lines.append(task.ljust(width) + "".join(_share(result["per_task"].get(task)) for result in results))
    lines.append("all".ljust(width) + "".join(_share(result) for result in results))
    common = [{(task, seed): reward for task, seed, reward in result["episodes"]} for result in (results[0], results[-1])]
    shared = sorted(common[0].keys() & common[1].keys())
    if len(files) > 1 and shared:
        mean, low, high = paired_bootstrap([common[0][key] for key in shared], [common[1][key] for key in shared])
        lines.append(f"{names[-1]} minus {names[0]}: {100 * mean:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} (paired bootstrap, {len(shared)} episodes)")
    return "\n".join(lines)


def _share(result: dict | None) -> str:
    if not result:
        return "-".rjust(28)
    low, high = wilson(result["success"] * result["n"], result["n"])
    return f"{result['success']:.3f} [{low:.2f}, {high:.2f}] n={result['n']}".rjust(28)


# ---- dreams against reality ------------------------------------------------------------------------------------------------


def precision_recall(judged: Sequence[bool], real: Sequence[bool]) -> dict:
    """{"precision", "recall", "n", "successes", "failures"}; None where nothing was judged a success, or nothing was one."""
    both = sum(a and b for a, b in zip(judged, real))
    return {"precision": both / sum(judged) if any(judged) else None, "recall": both / sum(real) if any(real) else None,
            "n": len(real), "successes": sum(real), "failures": len(real) - sum(real)}


def replay(web: Browser, dreamed: Sequence[TokenTrajectory], pages: int = 16) -> dict:
    """Every dreamed action sequence done in the real browser from the same start, whose prefix runs first.

    Ids of the dream are mapped to real elements by a11y.alignment at every step; an action whose element has no counterpart stops that
    replay ("unmatched"). Returns the judge's precision and recall against the real reward, and for each step the share of dreamed pages
    that equal the real one (as long as all actions before it were matched).
    """
    ended = [one for one in dreamed if not one.expert and not one.dropped and one.steps]
    rewards, unmatched, equal, seen = [], 0, Counter(), Counter()
    for k in range(0, len(ended), pages):
        batch = ended[k : k + pages]
        observations = web.reset([one.start for one in batch])
        done = {i: 0.0 for i in range(len(batch))}
        live = set(done)
        for turn in range(max(len(one.steps) for one in batch)):
            actions: list[Action | None] = [None] * len(batch)
            for i in sorted(live):
                if turn >= len(batch[i].steps):
                    live.discard(i)
                    continue
                step = batch[i].steps[turn]
                actions[i] = to_real(step.action, step.tree, observations[i].tree)
                if actions[i] is None:
                    unmatched += 1
                    live.discard(i)
            if not live:
                break
            observations, reward, terminated, truncated = web.step(actions)
            for i in sorted(live):
                steps = batch[i].steps
                dreamed_page = steps[turn + 1].tree if turn + 1 < len(steps) else batch[i].final_tree
                seen[turn + 1] += 1
                equal[turn + 1] += a11y.align(dreamed_page, observations[i].tree) == dreamed_page
                if terminated[i] or truncated[i]:
                    done[i] = reward[i]
                    live.discard(i)
        rewards += [done[i] for i in range(len(batch))]
    judged = [one.reward == 1 for one in ended]
    return {**precision_recall(judged, [reward == 1 for reward in rewards]), "unmatched": unmatched,
            "page equal by step": {turn: round(equal[turn] / seen[turn], 4) for turn in sorted(seen)}, "pages by step": dict(sorted(seen.items()))}


def to_real(action: Action, dreamed_tree: str, real_tree: str) -> Action | None:
    """`action` with the id that its element has on the real page; None when it has no counterpart there."""
    if not action.bid:
        return action
    real = {ours: theirs for theirs, ours in a11y.alignment(dreamed_tree, real_tree).items()}
    return Action(action.name, real[action.bid], action.text, action.enter) if action.bid in real else None


# What decides whether a prediction can be asked for is written here, before anything is measured. The page: every name and value of the
# next page stands on this page or in the action (a folder that opens shows what nobody could know). The end: everywhere but where
# the goal decides it, and the world model does not see the goal.
GOAL_ENDS = ("navigate-tree",)


def determined(tree: str, action: Action, next_tree: str) -> bool:
    """Whether (page, action) determine the next page, by the rule above.

    >>> determined("[1] textbox ''", Action("type", "1", "tea"), "[1] textbox '' value='tea'")
    True
    >>> determined("[1] listitem 'folder'", Action("click", "1"), "[1] listitem 'folder'\\n\\t[2] listitem 'secret'")
    False
    """
    return _texts(next_tree) <= _texts(tree) | {action.text, BULLETS}


def _texts(tree: str) -> set[str]:
    """Names and values on a page."""
    nodes = a11y.parse(tree)
    return {node.name for node in nodes if node.name} | {a11y.unquote(node.attributes["value"]) for node in nodes if node.attributes.get("value", "")[:1] in ("'", '"')}


def fidelity(model: world_model.WorldModel, trajectories: Sequence[Trajectory], batch: int = 128) -> dict:
    """Next page exactly equal, and end of the episode right, on recorded transitions: per task, over those that are determined."""
    cases = [(t.task, step, action, after, over) for t in trajectories for step, action, after, over in data.transitions(t) if not step.error]
    page, end, n_page, n_end, left_out = Counter(), Counter(), Counter(), Counter(), Counter()
    misses = []
    for k in tqdm(range(0, len(cases), batch), desc="fidelity", dynamic_ncols=True, leave=False):
        part = cases[k : k + batch]
        answers = model.predict([c[1].tree for c in part], [c[2] for c in part], [c[1].previous[-1] if c[1].previous else "" for c in part], seed=k)
        for (task, step, action, after, over), answer in zip(part, answers):
            if determined(step.tree, action, after):
                n_page[task] += 1
                page[task] += answer.tree == after
                if answer.tree != after and len(misses) < 40:
                    misses.append({"task": task, "action": str(action), "page": step.tree, "wanted": a11y.diff(step.tree, after), "delta": answer.delta, "malformed": answer.malformed})
            else:
                left_out[task] += 1
            if task not in GOAL_ENDS:
                n_end[task] += 1
                end[task] += answer.over == over
    rows = {task: {"page": round(page[task] / n_page[task], 4) if n_page[task] else None, "n": n_page[task], "not determined": left_out[task],
                   "end": round(end[task] / n_end[task], 4) if n_end[task] else None} for task in sorted(n_page | n_end)}
    return {"page": sum(page.values()) / max(1, sum(n_page.values())), "end": sum(end.values()) / max(1, sum(n_end.values())),
            "per_task": rows, "malformed": model.counts["malformed"], "misses": misses}


def judge_own(web: Browser, model: lm.LM, starts: Sequence[Start], config: "Config") -> dict:
    """The judge on what this agent really does: real pages, sampled attempts that ended, its verdict against the real reward."""
    played = play(web, model, starts, config.horizon, config.max_new_tokens, config.temperature, seed=1, name="attempts")
    ended = [one for one in played if one.terminated and one.steps]
    cases = [(one.start.goal, *policy.ending(one)) for one in ended]
    verdicts = policy.judge(lm.load(config.judge_checkpoint or config.checkpoint, context=1024), cases, config.judge_tokens)
    result = precision_recall([v.success for v in verdicts], [one.reward == 1 for one in ended])
    by_task: dict[str, list] = defaultdict(list)
    wrong = []
    for one, verdict, case in zip(ended, verdicts, cases):
        by_task[one.start.task].append((verdict.success, one.reward == 1))
        if verdict.success != (one.reward == 1):
            wrong.append({"task": one.start.task, "goal": case[0], "actions": case[1], "before": case[2], "reasons": verdict.text, "said": verdict.success})
    return {**result, "not ended": len(played) - len(ended), "per_task": {task: precision_recall(*zip(*rows)) for task, rows in sorted(by_task.items())}, "wrong": wrong,
            "margins": [[one.start.task, verdict.margin, one.reward == 1] for one, verdict in zip(ended, verdicts)]}  # for the choice of a threshold


# ---- python evaluate.py ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Real success, and the audits."""

    checkpoint: str = ""
    """Folder of the policy."""
    seeds: str = "2000000:10"
    """START:COUNT: COUNT episodes of each task."""
    json: str = ""
    """Write the result here."""
    tasks: tuple[str, ...] = TASKS
    """MiniWoB++ tasks (the recipe's by default)."""
    horizon: int = 10
    """Steps an episode."""
    max_new_tokens: int = 64
    """Longest answer of the policy."""
    temperature: float = 0.0
    """0 is greedy, as in all reported figures."""
    table: tuple[str, ...] = ()
    """Print these result files side by side and stop."""
    replay: bool = False
    """Dream from recorded starts and replay the dreams in the real browser."""
    judge: bool = False
    """Audit the judge on this agent's own attempts."""
    fidelity: str = ""
    """Audit the world model on this file of recorded transitions."""
    world_model: str = "runs/tiny/world_model"
    judge_checkpoint: str = ""
    """The judge's weights; the checkpoint's own when empty."""
    judge_tokens: int = 160
    trajectories: str = "tiny/trajectories.jsonl.gz"
    """Recorded trajectories whose first pages dreams start from."""
    dreams: int = 320
    """How many dreams to replay."""
    threads: int = 0


def run(config: Config) -> dict:
    if config.fidelity:
        wm = world_model.WorldModel(lm.load(config.world_model, "python world_model.py tiny", 1024), 160, temperature=0.0)
        return fidelity(wm, data.read_trajectories(config.fidelity))
    if not config.checkpoint:
        raise ValueError("which agent? give --checkpoint FOLDER, such as runs/tiny/sft")
    model = lm.load(config.checkpoint, "python policy.py tiny, then python train.py tiny", 1024)
    seeds = data.parse_seeds(config.seeds)
    with Browser() as web:
        if config.replay:
            return replay(web, dream_for_replay(model, config))
        if config.judge:
            return judge_own(web, model, real_starts(config.tasks, seeds), config)
        return success(play(web, model, real_starts(config.tasks, seeds), config.horizon, config.max_new_tokens, config.temperature)) | {"seeds": config.seeds, "checkpoint": config.checkpoint}


def dream_for_replay(model: lm.LM, config: Config) -> list[TokenTrajectory]:
    wm = world_model.WorldModel(lm.load(config.world_model, "python world_model.py tiny", 1024), 160, temperature=0.5)
    judge_model = lm.load(config.judge_checkpoint, context=1024) if config.judge_checkpoint else model
    starts = [start for start in dream.first_pages(data.read_trajectories(config.trajectories)) if start.task in config.tasks]
    starts = random.Random(0).sample(starts, min(config.dreams, len(starts)))
    dreams = dream.Config(horizon=5, max_new_tokens=config.max_new_tokens, judge_tokens=config.judge_tokens)
    dreamed = []
    for k in tqdm(range(0, len(starts), 64), desc="dreaming", leave=False):
        world = dream.Dream(wm, judge_model, dreams, seed=k)
        part = policy.rollout(world, model, starts[k : k + 64], dreams.horizon, config.max_new_tokens, 0.7, seed=k)
        for i, one in enumerate(part):
            one.dropped = world.dropped(i)
        dreamed += part
    return dreamed


def main():
    import tyro

    config = tyro.cli(Config, description=__doc__)
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        if config.table:
            print(table(config.table))
            return
        result = run(config)
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {error}")
    if config.json:
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key not in ("episodes", "misses", "wrong", "margins")}, indent=1))


if __name__ == "__main__":
    main()
