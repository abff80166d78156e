"""Pages of a batched world (worlds/chromium.Pages and its kin) as environments of one page each."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import lm
from data import Action, Obs, Start
from policy import Env, Invalid

FAILED = "browser: failed"  # how Rollout.discarded begins where a real page hung or crashed


class Envs:
    """At most `count` pages of `web`, side by side.

        async with envs.page() as env:
            done = await rollout(env, ...)

    What the pages are asked between two answers is one call of `web`: all resets first, then a step of every
    page, in which another episode may begin in the place of an action.
    """

    def __init__(self, web, count: int = 16):
        self.web, self.count = web, min(count, getattr(web, "at_once", count))
        self.free, self.waiting = list(range(self.count)), deque[asyncio.Future]()
        self.open = 0  # pages that the world has
        self.questions: list[tuple[asyncio.Future, int, Start | Action]] = []

    @contextlib.asynccontextmanager
    async def page(self) -> AsyncIterator[Env]:
        """A page for one episode; waits while all are taken."""
        if not self.free:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        elif len(self.free) == self.count:  # nobody is on a page: the world begins anew
            self.open = 0
        page = self.free.pop(0)
        try:
            yield _Page(self, page)
        finally:
            self.free.append(page)
            self.free.sort()
            if self.waiting:
                self.waiting.popleft().set_result(None)

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
