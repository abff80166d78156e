"""Dreams that do not wait for each other: for models behind servers.

Each answer is computed by a thread of its own, with its second try and, where the judge is behind servers
too, the verdict. These threads are given what they need and return what they found. Only the main thread
changes the tabs, and only it uses a model of this process: neither vLLM's engine nor an LM may be asked by
two threads.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import dream
from data import Action
from dream import Outcome, Query


class Dream(dream.Dream):
    """step() returns as soon as any answer is there. A dream whose answer is not there yet is seen as None;
    it comes in a later step, in which the action is None."""

    def __init__(self, *given):
        super().__init__(*given)
        self.waiting: dict[int, Future[Outcome]] = {}  # row -> what a thread computes

    def __exit__(self, *_):
        """After an error, or Ctrl-C: what is still asked is tried no more, and its answers are lost."""
        if self.waiting:
            for model in (self.world_model.lm, self.judge.lm):
                if model.concurrency > 1:
                    model.give_up()

    def reset(self, starts):
        assert not self.waiting, "a new dream while an old one is asked about"
        return super().reset(starts)

    def step(self, actions: Sequence[Action | None]):
        assert not any(actions[k] for k in self.waiting), "an action on a page that has not answered the last"
        seen, *ends = super().step(actions)
        return [None if k in self.waiting else obs for k, obs in enumerate(seen)], *ends

    def outcomes(self, queries: Sequence[Query]) -> list[Outcome]:
        """At least one of those that are waited for."""
        if self.world_model.lm.concurrency == 1:
            return super().outcomes(queries)
        for query in queries:
            self.waiting[query.row] = _in_a_thread(lambda query=query: self._outcome(query))
        wait(self.waiting.values(), return_when=FIRST_COMPLETED)
        done = [k for k, answer in sorted(self.waiting.items()) if answer.done()]
        return [self.waiting.pop(k).result() for k in done]

    def _outcome(self, query: Query) -> Outcome:
        outcomes = super().outcomes([query])
        return (self.with_verdicts(outcomes) if self.judge.lm.concurrency > 1 else outcomes)[0]


def _in_a_thread(work: Callable[[], Outcome]) -> Future[Outcome]:
    """What work() returns or raises. A daemon, unlike a ThreadPoolExecutor's threads: a process that stops
    does not wait for an answer that takes minutes."""
    future: Future[Outcome] = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:  # the main thread raises it
            future.set_exception(error)

    threading.Thread(target=run, name="dream", daemon=True).start()
    return future
