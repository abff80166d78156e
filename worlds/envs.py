"""Pages of a batched world (worlds/chromium.Pages and its kin) as environments of one page each."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import lm
from config import Benchmark
from data import Action, Obs, Start
from policy import Env, Invalid, Rollout, Sampler, rollout
from worlds import benchmarks

FAILED = "browser: failed"  # how Rollout.discarded begins where a real page hung or crashed


def failed(done: Rollout) -> bool:
    """Whether the browser failed, and not the agent."""
    return done.discarded.startswith(FAILED)


@contextlib.contextmanager
def open(on: Benchmark, count: int = 16) -> Iterator["Envs"]:
    """The pages of a benchmark; MiniWoB++'s where none is named."""
    with benchmarks.world(on) as web:
        yield Envs(web, count, on)


class Envs:
    """At most `count` pages of `web`, side by side.

        async with envs() as env:
            done = await rollout(env, ...)

    What the pages are asked between two answers is one call of `web`: all resets first, then a step of every
    page, in which another episode may begin in the place of an action.
    """

    def __init__(self, web, count: int = 16, on: Benchmark = Benchmark()):
        self.web, self.on, self.count = web, on, min(count, getattr(web, "at_once", count))
        self.free, self.waiting = list(range(self.count)), deque[asyncio.Future]()
        self.open = 0  # pages that the world has
        self.questions: list[tuple[asyncio.Future, int, Start | Action]] = []

    def starts(self, tasks: Sequence[str], seeds: str, limit: int = 0) -> list[Start]:
        """See benchmarks.tries."""
        return benchmarks.tries(self.on, self.web, tasks, seeds, limit)

    def dev_starts(self, seeds: str, learned: Sequence[tuple[Start, object]]) -> list[Start]:
        """See benchmarks.dev_starts."""
        return benchmarks.dev_starts(self.on, self.web, seeds, sorted({start.task for start, _ in learned}))

    def play(self, agent: Sampler, starts: Sequence[Start], horizon: int, max_new_tokens: int,
             temperature: float = 0.0, ended: Callable[[Rollout], None] = lambda done: None,
             seed: int = 0) -> list[Rollout]:
        """An episode from each start, in their order; `ended` is called with each when it ends. One whose
        page failed is played once more, with the same seed: a browser's failure is never the agent's."""
        async def episode(start: Start) -> Rollout:
            for _ in range(2):
                async with self() as env:
                    done = await rollout(env, agent, start, horizon, max_new_tokens, temperature,
                                         lm.mix(seed, start.task, start.seed))
                if not failed(done):
                    break
            ended(done)
            return done

        return lm.together(map(episode, starts))

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[Env]:
        """A page for one episode. While all are taken it waits, and is handed the page of one that ends."""
        if len(self.free) == self.count:  # nobody is on a page: the world begins anew
            self.open = 0
        if self.free:
            page = self.free.pop(0)
        else:
            self.waiting.append(asyncio.get_running_loop().create_future())
            page = await self.waiting[-1]
        try:
            yield _Page(self, page)
        finally:
            while self.waiting and self.waiting[0].done():  # cancelled, after an error
                self.waiting.popleft()
            if self.waiting:
                self.waiting.popleft().set_result(page)
            else:
                self.free.append(page)
                self.free.sort()

    def answer(self) -> None:
        """See lm.Batched."""
        questions, self.questions = sorted(self.questions, key=lambda question: question[1]), []
        try:
            if not self.open:
                self.open = len(questions)
                assert [page for _, page, _ in questions] == list(range(self.open)), "pages out of order"
                seen = self.web.reset([start for _, _, start in questions])
                answers = [(obs, 0.0, False, False) for obs in seen]
            else:
                asked = {page: what for _, page, what in questions}
                answers = list(zip(*self.web.step([asked.get(k) for k in range(self.open)])))
            failures = list(self.web.failures)
        except Exception as error:
            for future, *_ in questions:
                future.set_exception(error)
            return
        for future, page, _ in questions:
            if failures[page]:
                future.set_exception(Invalid(f"{FAILED}: {failures[page]}"))
            else:
                future.set_result(answers[page])


class _Page:
    """A policy.Env."""

    def __init__(self, envs: Envs, page: int):
        self.envs, self.page = envs, page

    async def _ask(self, what: Start | Action):
        answer = asyncio.get_running_loop().create_future()
        self.envs.questions.append((answer, self.page, what))
        lm.Batched.asked[self.envs] = None
        return await answer

    async def reset(self, start: Start) -> Obs:
        return (await self._ask(start))[0]

    async def step(self, action: Action) -> tuple[Obs, float, bool, bool]:
        return await self._ask(action)
