"""Other people's benchmarks, each by its name, behind browser.py's reset and step; tries as lines of JSON.

    with world(Options("infinity", sites="webarena-infinity/apps")) as web:
        web.tasks()                                         # {"gmail/task_e1": Task(site, difficulty, goal)}
        obs = web.reset([start("gmail/task_e1")])
        obs, rewards, terminated, truncated = web.step([parse_action("click [13]")])
        web.failures                                        # of each page how it failed, else ''

    python evaluate.py --benchmark infinity --sites DIR --checkpoint runs/tiny/dream --json tries.jsonl
    python benchmarks.py record --benchmark infinity --sites DIR --out FILE

    name                                        what it needs
    miniwob                                     nothing: every page of MiniWoB++ (browser.py)
    infinity                                    --sites: WebArena-Infinity's applications (worlds/infinity.py)
    webarena, webarena_lite, webarena_verified  sites of one's own, a venv of their own (worlds/webarena.py)
    webvoyager                                  --task-file, live sites, a judge behind a URL (worlds/live.py)
    openended                                   --task-file: any start URL and goal (worlds/live.py)

A try is one line, written when it ends: started again, the command goes on behind the last whole line. What
is not the agent's doing is a failure of the try and no reward 0: a browser that died, a page that did not
load or took too long, a verifier that gave no verdict. Such tries are counted apart.

What is learned from must not be evaluated. MiniWoB++ has ranges of seeds for that (data.SEEDS). Elsewhere a
seed changes nothing, so the tasks are split by a hash of their names (side). What records to learn takes the
training side, train.py takes nothing else, and its looks are at the held-out side. An evaluation plays the
tasks that it is told to (all, where nothing is said: published tables need all), and says what each side came
to.
"""

import fnmatch
import hashlib
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from browser import Browser
from data import Start

WEBARENA = ("webarena", "webarena_lite", "webarena_verified")
HORIZONS = {"miniwob": 10, "infinity": 50, **dict.fromkeys(WEBARENA, 30), "webvoyager": 15, "openended": 30}
"""Steps of a try at most: each benchmark's own."""


@dataclass(frozen=True)
class Options:
    """A benchmark, and what it needs."""

    benchmark: str = ""
    """miniwob, infinity, webarena, webarena_lite, webarena_verified, webvoyager or openended."""
    sites: str = ""
    """infinity: the folder of its applications."""
    task_file: str = ""
    """webvoyager: its JSONL ({"web_name", "id", "ques", "web"}); openended: {"id", "goal", "url"} a line."""
    hosts: tuple[str, ...] = ()
    """Hosts that live pages may reach beside those of their tasks (example.org, *.example.org)."""
    grader_url: str = ""
    """webvoyager, openended: who judges what was answered; a server with chat/completions (.../v1)."""
    grader_model: str = ""
    """The name that this server gives its model."""
    screenshots: int = 0
    """How many of the last screenshots the grader is shown; 0: the last page's text."""
    step_seconds: float = 0.0
    """Longest step of a page; then the try has failed, and not the agent (0: 10; of live sites 30)."""

    def __post_init__(self):
        live, name = ("webvoyager", "openended"), self.benchmark
        if name and name not in HORIZONS:
            raise ValueError(f"no benchmark {name!r}; there are {', '.join(HORIZONS)}")
        for flag, given, whose in (("sites", self.sites, ("infinity",)), ("task-file", self.task_file, live),
                                   ("grader-url", self.grader_url, live),
                                   ("hosts", self.hosts, (*live, *WEBARENA))):
            if given and name not in whose:
                raise ValueError(f"--{flag} is for --benchmark {' or '.join(whose)}")
        if name in live and not self.task_file:
            raise ValueError(f"--benchmark {name}: which tasks? give --task-file FILE")
        if bool(self.grader_url) != bool(self.grader_model):
            raise ValueError("a grader needs both: give --grader-url http://host:port/v1 and --grader-model "
                             "NAME")


def world(options: Options):
    """The world of a benchmark, to be entered. What it needs is imported now. Raises ValueError where
    something that it needs is not there."""
    name, seconds = options.benchmark, options.step_seconds
    if name == "miniwob":
        return Browser(seconds or 10.0)
    if name == "infinity":
        from worlds import infinity  # wing: imported when asked for

        return infinity.Infinity(options.sites, seconds or 10.0)
    if name in WEBARENA:
        from worlds import webarena  # wing: it needs packages of its own

        return webarena.WebArena(name, options.hosts)
    from worlds import live  # wing: imported when asked for

    judge = None
    if options.grader_url:
        from node import engine  # wing: any model behind a URL

        judge = engine.Chat(options.grader_url, options.grader_model)
    kind, fields = live.Live, live.OPENENDED
    if name == "webvoyager":
        kind, fields = live.WebVoyager, live.WEBVOYAGER
    return kind(live.read_tasks(options.task_file, fields), hosts=options.hosts, timeout=seconds or 30.0,
                judge=judge, screenshots=options.screenshots)


TRAINING, HELD_OUT = "training", "held-out"


def side(task: str) -> str:
    """TRAINING or HELD_OUT: the side of the split that a task is on, half of the tasks each. What stands
    before a dot does not count: WebArena's three lists have the same number for the same task.

    >>> side("gmail/task_e1"), side("webarena.4") == side("webarenalite.4")
    ('training', True)
    """
    name = task.rpartition(".")[2]
    return (HELD_OUT, TRAINING)[int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2]


def of_side(tasks: Sequence[str], wanted: str) -> list[str]:
    """Those of one side. Raises ValueError where there is none."""
    found = [task for task in tasks if side(task) == wanted]
    if not found:
        raise ValueError(f"none of these {len(tasks)} tasks is on the {wanted} side of the benchmark's split "
                         f"(benchmarks.side): {', '.join(list(tasks)[:3])}. Give other --tasks")
    return found


def digest(parts: Iterable[bytes]) -> str:
    """A hash of some texts, in this order."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """A hash of files below a folder: of their names and of what is in them. '' of none."""
    parts = []
    for path in sorted(files):
        with path.open("rb") as file:
            parts += [str(path.relative_to(folder)).encode(), hashlib.file_digest(file, "sha256").digest()]
    return digest(parts) if parts else ""


def made_of(web, checkpoint: str = "") -> dict:
    """What tries depend on beside flags, as hashes: the list of tasks; what else the world is made of (its
    own made_of); the weights of an agent in a folder. (A model of the hub has its name alone.)"""
    tasks = [[name, task.site, task.difficulty, task.goal, getattr(task, "url", "")]
             for name, task in sorted(web.tasks().items())]
    folder = Path(checkpoint or os.devnull)
    weights = [file for end in ("safetensors", "json", "jinja") for file in folder.glob(f"*.{end}")]
    return {"task list": digest([json.dumps(tasks).encode()]), "weights": files_digest(folder, weights),
            **getattr(web, "made_of", dict)()}


def start(task: str, seed: int = 0) -> Start:
    """The first page of a task. What stands on it is known only once it is reset."""
    return Start(task, seed, (), "", "", "", ())


def chosen(tasks: Sequence[str], globs: Sequence[str], limit: int = 0,
           named: dict[str, Sequence[str]] | None = None) -> list[str]:
    """The tasks that the globs name, in their order. With a limit so many of them, spread over the list: of
    each site some. `named`: globs that a word stands for.

    >>> chosen(["gmail/e1", "gmail/e2", "xero/e1"], ["gmail/*"])
    ['gmail/e1', 'gmail/e2']
    >>> chosen(["a", "b", "c", "d", "e"], [], 3)
    ['a', 'b', 'd']
    """
    globs = [glob for name in globs for glob in (named or {}).get(name, [name])]
    for glob in globs:
        if not fnmatch.filter(tasks, glob):
            raise ValueError(f"--tasks {glob}: no task has such a name; there are {len(tasks)}, such as "
                             f"{', '.join(list(tasks)[:3])}")
    found = [task for task in tasks if not globs or any(fnmatch.fnmatchcase(task, glob) for glob in globs)]
    count = min(limit or len(found), len(found))
    return [found[k * len(found) // count] for k in range(count)]


def check_counts(least: int, **flags: int) -> None:
    """Raises ValueError for a flag whose number is below `least`."""
    for flag, given in flags.items():
        if given < least:
            raise ValueError(f"--{flag.replace('_', '-')} {given}: give {least} or more")


# ---- tries -------------------------------------------------------------------------------------------------


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
    if cut:
        os.truncate(file, len(whole + newline))
    return rows[1:]


def tries(web, model, pairs: Sequence[tuple[str, int]], file: Path, made: dict, *, horizon: int,
          max_new_tokens: int, temperature: float = 0.0, pages: int = 8, seconds: float = 1800.0,
          keep_pages: bool = False) -> list[dict]:
    """The agent's try at each (task, seed), `pages` side by side, as lines of `file`; those that are there
    are not made again. When a try is over, the next one begins in its page while the others go on. `model` as
    in policy.rollout. Returns all, in the order of `pairs`.

    A line: task, site, difficulty, seed; reward (None in a world without anybody who judges); failed (what
    failed that was not the agent, else ''); end (stop, world, horizon, malformed, too long, failed); actions;
    answer; seconds; tokens read and written; with keep_pages also the pages, thoughts and errors; and
    authors_reward, where the world knows what the harness of its authors pays.
    """
    import policy  # here, for a world alone needs no torch (make test-browsergym has none)

    known, limited = web.tasks(), Limited(web, seconds)
    pages = min(pages, getattr(web, "at_once", pages))
    rows = {(row["task"], row["seed"]): row for row in read_tries(file, made)}
    left = [pair for pair in pairs if pair not in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines, tqdm(total=len(pairs), initial=len(pairs) - len(left), desc="tries",
                                       unit="try", dynamic_ncols=True) as bar:
        if file.stat().st_size == 0:
            lines.write(json.dumps({"made": made}) + "\n")
        starts = ((start(*pair), zlib.crc32(repr(pair).encode())) for pair in left)

        def ended(n: int, trajectory) -> tuple[Start, int] | None:
            row = as_row(trajectory, limited.failures[n], keep_pages)
            if model.tokenizer is None:  # behind a URL: a prompt is messages
                row |= {"tokens_read": None, "tokens_written": None}
            if not getattr(web, "judged", True):
                row["reward"] = None
            if hasattr(web, "authors_reward"):
                row["authors_reward"] = 0.0 if n in limited.late else web.authors_reward(n)
            task = known[row["task"]]
            row |= {"site": task.site, "difficulty": task.difficulty,
                    "seconds": round(time.monotonic() - limited.begun[n], 2)}
            rows[row["task"], row["seed"]] = row
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            lines.flush()
            bar.update()
            return next(starts, None)

        if first := list(itertools.islice(starts, pages)):
            policy.rollout(limited, model, [begins for begins, _ in first], horizon, max_new_tokens,
                           temperature, [seed for _, seed in first], ended)
    return [rows[pair] for pair in pairs]


def as_row(trajectory, failed: str, keep_pages: bool) -> dict:
    """What is kept of a try (a policy.TokenTrajectory)."""
    steps = trajectory.steps
    stopped = bool(steps) and steps[-1].action.name == "stop"
    end = next(name for name, whether in (
        ("failed", failed), ("malformed", trajectory.malformed), ("too long", trajectory.dropped),
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


def main():
    if sys.argv[1:2] != ["record"]:
        sys.exit(__doc__)
    import tyro

    from tiny import explore  # wing: it plays what the words of a page suggest

    try:
        explore.main(tyro.cli(explore.Config, args=sys.argv[2:], description=explore.__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.py: {error}")


if __name__ == "__main__":
    main()
