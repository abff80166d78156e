"""Real pages: a benchmark by its name, each environment in a process of its own.

    miniwob                     MiniWoB++'s 130 pages: needs nothing (browsergym.py)
    infinity                    WebArena-Infinity: --sites (infinity.py)
    webarena, webarena_lite     packages, and sites of one's own (webarena.py)
    webvoyager, openended       live sites: --task-file, a judge's URL (webvoyager.py)

    obs = await envs.Env(Benchmark("miniwob")).reset(Start("choose-list", 7))    # policy.Env

What is evaluated must not be learned from. MiniWoB++ has ranges of seeds for that (data.SEEDS), other tasks
are split by their names (data.side): recordings and train.py take one side, train.py evaluates on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import importlib
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import data
from config import Benchmark, UserError
from data import Action, Obs, Start

if "DYNAWEB_PAGES" not in os.environ:  # the process of an environment needs no torch
    import lm
    from policy import Invalid, Rollout, Sampler, rollout

# Pages of at most 210 tokens and one to four decisions.
LAPTOP = ("choose-list", "click-button", "click-button-sequence", "click-dialog-2", "click-option",
          "enter-password", "enter-text", "focus-text-2", "login-user")
# Pages that tell agents apart, and whose next page follows from page and action.
SCORED = ("button-delay", "choose-list", "click-checkboxes", "click-checkboxes-large", "click-menu-2",
          "click-checkboxes-transfer", "click-scroll-list", "copy-paste", "email-inbox-delete", "phone-book",
          "email-inbox-important", "enter-time", "form-sequence-2", "navigate-tree", "odd-or-even",
          "read-table", "read-table-2", "use-colorwheel", "use-colorwheel-2", "use-spinner")
# Of a benchmark its module, the longest step in seconds, and the most steps of a try.
KINDS = {"miniwob": ("browsergym", 30.0, 14), "infinity": ("infinity", 30.0, 50),
         "webarena": ("webarena", 120.0, 30), "webarena_lite": ("webarena", 120.0, 30),
         "webvoyager": ("webvoyager", 60.0, 15), "openended": ("webvoyager", 60.0, 30)}


def kind(on: Benchmark) -> tuple[str, float, int]:
    """Its row of KINDS. Raises UserError for an unknown one, and for hosts that are no names."""
    for host in on.hosts:  # each becomes a rule of Chromium's
        if not re.fullmatch(r"\*(\.[\w-]+)+|[\w-]+(\.[\w-]+)*(:\d+)?", host, re.ASCII):
            raise UserError(f"--hosts {host!r}: give example.org, example.org:8000 or *.example.org")
    if on.benchmark not in KINDS:
        raise UserError(f"no benchmark {on.benchmark!r}; there are {', '.join(KINDS)}")
    return KINDS[on.benchmark]


def failed(done: Rollout) -> bool:
    """Whether a browser, a site or a judge failed, and not the agent."""
    return ": failed: " in done.discarded


class Env:
    """policy.Env of a benchmark's tasks. A process answers (browsergym.work), and is ended where it hangs."""

    def __init__(self, on: Benchmark):
        name, seconds, _ = kind(on)
        self.module = importlib.import_module(f"envs.{name}")  # here: what trains in dreams needs no browser
        self.on, self.seconds, self.process = on, on.step_seconds or seconds, None
        if on.grader_url and not hasattr(self.module, "judge"):
            raise UserError("--grader-url is for webvoyager and openended; leave it out")
        self.judge = self.module.judge(on.grader_url) if on.grader_url else None

    async def _ask(self, what: Start | Action, seconds: float):
        if not self.process:
            self.pipe, theirs = multiprocessing.Pipe()
            root, fd = str(Path(__file__).parents[1]), theirs.fileno()
            code = f"import sys; sys.path[0] = {root!r}; from envs.browsergym import work; work({fd})"
            self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd],
                                            env=os.environ | {"DYNAWEB_PAGES": "1"}, start_new_session=True)
            theirs.close()
            self.pipe.send((self.module.__name__, self.on))
        loop, ready, answer = asyncio.get_running_loop(), asyncio.Event(), None
        loop.add_reader(self.pipe.fileno(), ready.set)
        lm.Batched.away.add(self)
        try:
            self.pipe.send(what)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ready.wait(), seconds)
            # A model that samples holds the loop up: what came meanwhile counts.
            answer = self.pipe.recv() if self.pipe.poll() else RuntimeError(f"it hung for {seconds:g} s")
        except (EOFError, OSError):
            answer = RuntimeError("its process died")
        finally:
            lm.Batched.away.discard(self)
            loop.remove_reader(self.pipe.fileno())
            if answer is None or isinstance(answer, Exception):
                self.close()  # the next reset starts another
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, Exception):
            raise Invalid(f"browser: failed: {what if isinstance(what, Action) else what.task}: {answer}")
        return answer

    async def reset(self, start: Start) -> Obs:
        return await self._ask(start, 3 * self.seconds + 30)  # with a Chromium that starts

    async def step(self, action: Action) -> tuple[Obs, float, bool, bool]:
        obs, reward, over = await self._ask(action, self.seconds)
        if action.name == "stop" and self.judge and action.text.strip():
            reward = await self.module.verdict(self.judge, obs, action.text)
        return obs, reward, over, False

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.pipe.close()
            self.process = None


class Envs(contextlib.ExitStack):
    """At most `count` environments (0: two a core): `async with envs() as env` is one for an episode. Raises
    UserError where something that the benchmark needs is not there, or its judge does not answer."""

    def __init__(self, on: Benchmark, count: int = 0):
        super().__init__()
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        count = count or max(1, 2 * cores)  # 4 are faster on two cores than 8
        count = 1 if on.benchmark.startswith("webarena") else count  # sites are the same for all
        self.envs, self.free = [Env(on) for _ in range(count)], asyncio.LifoQueue[Env]()
        for env in self.envs[::-1]:
            self.callback(env.close)
            self.free.put_nowait(env)
        self.miniwob = on.benchmark == "miniwob"
        self.tasks = list[str](self.envs[0].module.tasks(on))

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[Env]:
        env = await self.free.get()
        try:
            yield env
        finally:
            self.free.put_nowait(env)

    def starts(self, tasks: Sequence[str], seeds: str, side: str = "") -> list[Start]:
        """Of the tasks that globs name (or `laptop`, `scored`, `all`), MiniWoB++'s with each of the seeds,
        others once. side: to record, of data.side alone; without it training seeds are refused."""
        words = {"laptop": LAPTOP, "scored": SCORED, "all": ["*"], "": LAPTOP if self.miniwob else ["*"]}
        globs = [glob for name in tasks or [""] for glob in words.get(name, [name])]
        names = [task for task in self.tasks if any(fnmatch.fnmatchcase(task, glob) for glob in globs)
                 and (self.miniwob or side in ("", data.side(task)))]
        if unknown := [glob for glob in globs if not fnmatch.filter(names, glob)]:
            raise UserError(f"--tasks: no task {unknown[0]!r} {side and 'is ' + side}, as {self.tasks[:1]}")
        span = data.seeds_to_look_at(seeds, record=bool(side)) if self.miniwob else [0]
        return [Start(name, seed) for name in names for seed in span]

    def dev_starts(self, seeds: str, learned: Sequence[tuple[Start, object]]) -> list[Start]:
        """What train.py evaluates on: MiniWoB++'s tasks that are learned, on dev seeds; or as many held-out
        tasks of another benchmark. Raises UserError where nothing that is learned is a page of MiniWoB++."""
        dev = data.seeds_to_look_at(seeds, dev=True)
        if self.miniwob:
            if not (known := sorted({start.task for start, _ in learned} & {*self.tasks})):
                raise UserError("no recorded task is MiniWoB++'s: hand in your env, or --evaluate-every 0")
            return self.starts(known, seeds)
        held_out = self.starts((), seeds, data.HELD_OUT)
        return held_out[::math.ceil(len(held_out) / len(dev))]  # spread over the list


def play(pages, agent: Sampler | type, starts: Sequence[Start], horizon: int, max_new_tokens: int,
         temperature: float = 0.0, ended: Callable = lambda done: None) -> list[Rollout]:
    """An episode on `pages` (Envs, or your own) from each start, in their order. `agent`: a sampler, or what
    makes one of a start. What failed is played once more, by the same seed. `ended` takes each."""
    async def episode(start: Start) -> Rollout:
        for _ in range(2):
            async with pages() as env:
                done = await rollout(env, agent(start) if callable(agent) else agent, start, horizon,
                                     max_new_tokens, temperature, lm.mix(0, start.task, start.seed))
            if not failed(done):
                break
        ended(done)
        return done

    return lm.together(map(episode, starts))
