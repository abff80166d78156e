"""What a reset and a step cost in each world of real pages, beside BrowserGym's own way on the same tasks.

    python -m bench.bench_worlds --sites webarena-infinity/apps
    python -m bench.bench_worlds --sites webarena-infinity/apps --tries 48    # tries an hour, in two ways

Eight pages side by side, two tasks of each of four applications (or eight pages of MiniWoB++), five actions
each of tiny/explore.py's random quarter. Seconds are wall time a page: of one reset, of one step of all, over
eight. BrowserGym plays the same tasks as its own openended ones, each application behind the server that
comes with it, on loopback; one page after the other, for it has no other way. The worlds take turns, so that
other work on the machine does not fall on one of them; printed are medians.

--tries: so many tries of infinity's tasks, each 5 to 50 actions long (drawn once), played in both ways: eight
begin when the longest of the eight before has ended; or each page begins the next when its own has ended
(tries.tries). No model: what is measured is the pages. The two take turns, in `rounds` equal parts.
"""

import contextlib
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import gymnasium
import tyro

import data
import policy
from data import Action, Start, Step
from tiny import explore
from worlds import benchmarks, tries
from worlds.gym import BrowserGymPages


@dataclass(frozen=True)
class Config:
    sites: str
    """The folder of the applications of WebArena-Infinity."""
    pages: int = 8
    steps: int = 5
    rounds: int = 3
    rival: bool = True
    """Play them in BrowserGym too."""
    tries: int = 0
    """Measure tries an hour instead, of so many."""


@contextlib.contextmanager
def servers(sites: Path, apps: list[str]) -> Iterator[dict[str, str]]:
    """{application: URL} of their own servers."""
    running, urls = [], {}
    try:
        for app in apps:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            running.append(subprocess.Popen(
                [sys.executable, "server.py", "--port", str(port)], cwd=sites / app,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            urls[app] = f"http://127.0.0.1:{port}/"
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
        yield urls
    finally:
        for server in running:
            server.kill()
            server.wait()


class Theirs(BrowserGymPages):
    """BrowserGym's own openended tasks. A start's task is the number of its (URL, goal)."""

    def __init__(self, sites: list[tuple[str, str]]):
        super().__init__(("127.0.0.1",))
        self.sites = sites

    def _make(self, n: int, task: str):
        url, goal = self.sites[int(task)]
        return gymnasium.make("browsergym/openended", task_kwargs={"start_url": url, "goal": goal},
                              action_mapping=self._code, disable_env_checker=True, **self.env_kwargs)


def timed(web, starts: list[Start], steps: int) -> tuple[float, list[float], int]:
    """(seconds of the reset a page, of each step a page, actions that the world refused)."""
    begun = time.perf_counter()
    seen = web.reset(starts)
    reset, each, refused = (time.perf_counter() - begun) / len(starts), [], 0
    draws = [random.Random(f"{start.task} {start.seed}") for start in starts]
    over = [False] * len(starts)
    for _ in range(steps):
        actions = []
        for obs, rng, ended in zip(seen, draws, over):
            actions.append(None if ended else drawn(obs, rng))
        begun, going = time.perf_counter(), len(actions) - over.count(True)
        answers = web.step(actions)
        if going:
            each.append((time.perf_counter() - begun) / going)
        seen = answers[0]
        refused += sum(bool(obs.error) for obs in seen)
        over = [a or b or c for a, b, c in zip(over, *answers[2:])]
    return reset, each, refused


def drawn(obs, rng: random.Random):
    """An action of tiny/explore.py's random quarter that ends nothing."""
    while True:
        action = explore.anything(obs.goal, explore.elements(obs.page), rng)
        if action.name not in ("stop", "go_back", "press"):
            return action


def tries_an_hour(config: Config) -> None:
    rng = random.Random(0)
    steps = [rng.randint(5, 50) for _ in range(config.tries)]  # by a start's seed

    def turn(model, trajectories, seen, ready, *_):
        actions = [None] * len(trajectories)
        for k in ready:
            trajectory = trajectories[k]
            n, made = trajectory.start.seed, len(trajectory.steps)
            over = made + 1 == steps[n]
            actions[k] = Action("stop") if over else drawn(seen[k], random.Random(f"{n} {made}"))
            trajectory.steps.append(Step(seen[k].url, seen[k].page, "", actions[k], ()))
            trajectory.pairs.append(([], []))
        return actions

    def play(web, starts):
        begun = time.perf_counter()
        with mock.patch.object(policy, "act", turn):
            tries.in_turn(web, None, iter([(start, 0) for start in starts]), config.pages, 50, 0, 0.0,
                          lambda *_: None)
        return time.perf_counter() - begun

    took, part = {"eight by eight": 0.0, "as pages become free": 0.0}, -(-config.tries // config.rounds)
    with benchmarks.world(data.Options("infinity", sites=config.sites, step_seconds=60)) as web:
        names = benchmarks.chosen(list(web.tasks()), (), config.tries)
        starts = [data.start(names[n % len(names)], n) for n in range(config.tries)]
        for k in range(0, config.tries, part):
            some = starts[k : k + part]
            for n in range(0, len(some), config.pages):
                took["eight by eight"] += play(web, some[n : n + config.pages])
            took["as pages become free"] += play(web, some)
    print(f"{config.tries} tries of {min(steps)} to {max(steps)} actions, {sum(steps)} in all")
    print("| way | tries an hour | seconds in all |\n|---|---|---|")
    for way, seconds in took.items():
        print(f"| {way} | {3600 * config.tries / seconds:.0f} | {seconds:.1f} |")


def main(config: Config):
    if config.tries:
        return tries_an_hour(config)
    infinity = benchmarks.world(data.Options("infinity", sites=config.sites))
    apps = list(dict.fromkeys(task.site for task in infinity.tasks().values()))[:4]
    names, each = list(infinity.tasks()), config.pages // len(apps)
    tasks = [task for app in apps for task in benchmarks.chosen(names, [f"{app}/*"], each)]
    pages = ["click-option", "login-user", "choose-list", "read-table", "navigate-tree", "click-checkboxes",
             "enter-text", "click-tab"][: config.pages]
    with contextlib.ExitStack() as stack:
        mini = stack.enter_context(benchmarks.world(data.Options("miniwob", step_seconds=60)))
        worlds = {"miniwob": (mini, [data.start(page, 7) for page in pages]),
                  "infinity": (stack.enter_context(infinity), [data.start(task) for task in tasks])}
        if config.rival:
            urls = stack.enter_context(servers(Path(config.sites), apps))
            sites = [(urls[task.split("/")[0]], infinity.tasks()[task].goal) for task in tasks]
            theirs = stack.enter_context(Theirs(sites))
            starts = [data.start(str(k)) for k in range(len(sites))]
            worlds["infinity, BrowserGym"] = theirs, starts
        took = {name: [] for name in worlds}
        for _ in range(config.rounds):
            for name, (web, starts) in worlds.items():
                took[name].append(timed(web, starts, config.steps))
    print("| world | seconds a reset | a step | actions refused |\n|---|---|---|---|")
    for name, rounds in took.items():
        reset = statistics.median(reset for reset, _, _ in rounds)
        step = statistics.median(second for _, each, _ in rounds for second in each)
        print(f"| {name} | {reset:.3f} | {step:.3f} | {sum(refused for *_, refused in rounds)} |")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
