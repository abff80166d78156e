"""An agent's tries at a benchmark, as lines of JSON.

A try is one line, written when it ends: started again, the command goes on behind the last whole line. What
is not the agent's doing is a failure of the try and no reward 0: a browser that died, a page that did not
load or took too long, a verifier that gave no verdict. Such tries are counted apart.
"""

import itertools
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

import data
import lm
import measure
import policy
from data import Start
from worlds.chromium import digest, files_digest


def made_of(web, checkpoint: str = "") -> dict:
    """What tries depend on beside flags, as hashes: the list of tasks; what else the world is made of (its
    own made_of); the weights of an agent in a folder. (A model of the hub has its name alone.)"""
    tasks = [[name, task.site, task.difficulty, task.goal, getattr(task, "url", "")]
             for name, task in sorted(web.tasks().items())]
    folder = Path(checkpoint or os.devnull)
    weights = [file for end in ("safetensors", "json", "jinja") for file in folder.glob(f"*.{end}")]
    return {"task list": digest([json.dumps(tasks).encode()]), "weights": files_digest(folder, weights),
            **getattr(web, "made_of", dict)()}


class Limited:
    """A world in which a try has so many seconds, and then fails. The clock runs from the reset."""

    def __init__(self, web, seconds: float):
        self.web, self.seconds, self.late = web, seconds, {}

    def reset(self, starts):
        self.late, self.begun = {}, [time.monotonic()] * len(starts)
        return self.web.reset(starts)

    def step(self, actions):
        now, over = time.monotonic(), []
        for k, action in enumerate(actions):
            if isinstance(action, Start):
                self.begun[k] = now
                self.late.pop(k, None)
            elif action is not None and now - self.begun[k] > self.seconds:
                over.append(k)
        answers = self.web.step([None if k in over else action for k, action in enumerate(actions)])
        for k in over:
            self.late[k] = f"not over after {self.seconds:g} s"
            answers[3][k] = True  # truncated
        return answers

    @property
    def failures(self) -> list[str]:
        return [self.late.get(k, failure) for k, failure in enumerate(self.web.failures)]


def read_tries(file: Path, made: dict) -> list[dict]:
    """The tries that a file holds; a last line that was cut off is taken off it. `made`: how tries are made
    now. Raises ValueError where those of the file were made in another way."""
    if not file.exists():
        return []
    whole, newline, cut = file.read_bytes().rpartition(b"\n")  # bytes: a kill may cut a character in two
    rows = []
    for number, line in enumerate(whole.split(b"\n") if newline else [], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}:{number}: this is no JSON ({error}); move the file away to begin "
                             "again") from error
    if rows and rows[0].get("made") != made:
        was = rows[0].get("made") or {}
        other = next((name for name in made if was.get(name) != made[name]), "something")
        raise ValueError(f"{file}: its tries were made with {other} {was.get(other)!r}, and now it would be "
                         f"{made.get(other)!r}; give another --json, or move that file away")
    if not rows and not b'{"made": '.startswith(cut[:9]):
        raise ValueError(f"{file}: this holds no tries; give another --json, or move that file away")
    if cut:
        os.truncate(file, len(whole + newline))
    return rows[1:]


def tries(web, model, pairs: Sequence[tuple[str, int]], file: Path, made: dict, *, horizon: int,
          max_new_tokens: int, temperature: float = 0.0, pages: int = 8, seconds: float = 1800.0,
          keep_pages: bool = False) -> list[dict]:
    """The agent's try at each (task, seed), `pages` side by side, as lines of `file`; those that are there
    are not made again. `model` as in policy.rollout. Returns all, in the order of `pairs`.

    A line: task, site, difficulty, seed; reward (None in a world without anybody who judges); failed (what
    failed that was not the agent, else ''); end (stop, world, horizon, malformed, too long, failed); actions;
    answer; seconds; tokens read and written; with keep_pages also the pages, thoughts and errors, and
    the last screenshots where the world takes any; and authors_reward, where the world knows what the harness
    of its authors pays.
    """
    known, limited = web.tasks(), Limited(web, seconds)
    pages = min(pages, getattr(web, "at_once", pages))
    rows = {(row["task"], row["seed"]): row for row in read_tries(file, made)}
    left = [pair for pair in pairs if pair not in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    # A model may write half an emoji, which UTF-8 has not and JSON has: \ud83d.
    with (file.open("a", encoding="utf-8", errors="backslashreplace") as lines,
          tqdm(total=len(pairs), initial=len(pairs) - len(left), desc="tries", unit="try",
               dynamic_ncols=True) as bar):
        if file.stat().st_size == 0:
            lines.write(json.dumps({"made": made}) + "\n")
        starts = ((data.start(*pair), zlib.crc32(repr(pair).encode())) for pair in left)

        def ended(n: int, trajectory: policy.TokenTrajectory) -> None:
            row = as_row(trajectory, limited.failures[n], keep_pages)
            if model.tokenizer is None:  # behind a URL: a prompt is messages
                row |= {"tokens_read": None, "tokens_written": None}
            if not getattr(web, "judged", True):
                row["reward"] = None
            if keep_pages and hasattr(web, "shots"):
                row["screenshots"] = web.shots(n)
            if hasattr(web, "authors_reward"):
                row["authors_reward"] = 0.0 if n in limited.late else web.authors_reward(n)
            task = known[row["task"]]
            row |= {"site": task.site, "difficulty": task.difficulty,
                    "seconds": round(time.monotonic() - limited.begun[n], 2)}
            rows[row["task"], row["seed"]] = row
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            lines.flush()
            bar.update()

        in_turn(limited, model, starts, pages, horizon, max_new_tokens, temperature, ended)
    return [rows[pair] for pair in pairs]


def in_turn(web, model, starts: Iterator[tuple[Start, int]], pages: int, horizon: int, max_new_tokens: int,
            temperature: float, ended: Callable[[int, policy.TokenTrajectory], None]) -> None:
    """policy.rollout of all `starts`, each with its seed, on `pages` pages: when a trajectory is over,
    ended(page, trajectory) is called, and the next start begins in its page, in an action's place, while the
    others go on. Tries of benchmarks have 5 to 50 steps: side by side until the last is over, more than half
    of the pages would be idle."""
    if not (first := list(itertools.islice(starts, pages))):
        return
    seeds, seen = [seed for _, seed in first], list(web.reset([begins for begins, _ in first]))
    trajectories = [policy.TokenTrajectory(replace(begins, goal=obs.goal))
                    for (begins, _), obs in zip(first, seen)]
    ready, begun = list(range(len(first))), dict[int, Start]()  # begun: the world is asked for its first page
    while ready or begun:
        turn_seeds = [lm.mix(seeds[k], len(trajectory.pairs)) for k, trajectory in enumerate(trajectories)]
        actions = policy.act(model, trajectories, seen, ready, max_new_tokens, temperature, turn_seeds)
        asked = [begun.get(k, action) for k, action in enumerate(actions)]
        answers, rewards, terminated, truncated = web.step(asked)
        running, left = sorted([*ready, *begun]), []
        for k in running:
            if k in begun:
                trajectories[k] = policy.TokenTrajectory(replace(begun[k], goal=answers[k].goal))
            elif actions[k] is not None:
                trajectories[k].answered(answers[k], rewards[k], terminated[k], truncated[k])
            if asked[k] is not None:
                seen[k] = answers[k]
                left += [k] * (not trajectories[k].over and len(trajectories[k].pairs) < horizon)
        ready, begun = left, {}
        for k in running:
            if k not in ready:
                trajectories[k].settle()
                ended(k, trajectories[k])
                if following := next(starts, None):
                    begun[k], seeds[k] = following


def as_row(trajectory, failed: str, keep_pages: bool) -> dict:
    """What is kept of a try (a policy.TokenTrajectory)."""
    steps = trajectory.steps
    stopped = bool(steps) and steps[-1].action.name == "stop"
    end = next(name for name, whether in (
        ("failed", failed), ("malformed", trajectory.no_action), ("too long", trajectory.dropped),
        ("horizon", trajectory.truncated), ("stop", stopped), ("world", True)) if whether)
    row = {
        "task": trajectory.start.task, "seed": trajectory.start.seed,
        "reward": 0.0 if failed else trajectory.reward, "failed": failed, "end": end,
        "actions": [str(step.action) for step in steps],
        "answer": steps[-1].action.text if stopped else "",
        "tokens_read": sum(len(prompt) for prompt, _ in trajectory.pairs),
        "tokens_written": sum(len(completion) for _, completion in trajectory.pairs),
    }
    if keep_pages:
        row |= {"goal": trajectory.start.goal,
                "pages": [step.page for step in steps] + [trajectory.final_page],
                "thoughts": [step.thought for step in steps], "errors": [step.error for step in steps]}
    return row


# ---- what they add up to ----

# What a try's failure says somewhere.
FAILURES = ("the page hung", "the page crashed", "not verified", "not over after", "did not start",
            "does not load", "blocked", "no verdict")


def totals(rows: Sequence[dict], untouched: Sequence[str] = ()) -> dict:
    """What the lines of tries() add up to.

    {"success", "n", "interval"} are of the tries that could be judged; in "success of all" each that failed
    counts 0. The same follows by site, by difficulty, and without the tasks of `untouched`, which succeed
    before anything is done; then as the benchmark's authors score it, where the lines say so; what failed,
    and how often; tokens (None where a server counts them) and minutes. The success of no tries is None."""
    def share(some: Sequence[dict]) -> dict:
        judged = [row["reward"] for row in some if not row["failed"] and row["reward"] is not None]
        failed, missing = sum(bool(row["failed"]) for row in some), len(some) - len(judged)
        found = {"success": sum(judged) / len(judged) if judged else None, "n": len(judged),
                 "interval": measure.wilson(sum(judged), len(judged)), "failed": failed,
                 "success of all": sum(judged) / len(some) if some and missing == failed else None}
        return found | ({"not judged": missing - failed} if missing > failed else {})

    def by(key: str) -> dict:
        return {value: share([row for row in rows if row[key] == value])
                for value in dict.fromkeys(row[key] for row in rows)}

    left = [row for row in rows if row["task"] not in untouched]
    theirs = [row["authors_reward"] for row in rows if "authors_reward" in row]
    return share(rows) | {
        "as its authors score it": {"success": sum(theirs) / len(theirs), "n": len(theirs),
                                    "interval": measure.wilson(sum(theirs), len(theirs))} if theirs else None,
        "without those that pass untouched": share(left) if len(left) < len(rows) else None,
        "per_site": by("site"), "per_difficulty": by("difficulty"),
        "ends": dict(Counter(row["end"] for row in rows)),
        "failures": dict(Counter(next((kind for kind in FAILURES if kind in row["failed"]), "other")
                                 for row in rows if row["failed"])),
        **{key: None if any(row[key] is None for row in rows) else sum(row[key] for row in rows)
           for key in ("tokens_read", "tokens_written")},
        "minutes, added over tries": round(sum(row["seconds"] for row in rows) / 60, 2),
    }
