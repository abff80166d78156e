"""Who waits for whom while a batch is dreamed: the queues of the code, simulated in milliseconds.

    dreams = [Dream(rank=0, turns=(Turn(9000, 300, 1500), Turn(9000, 300, None)), verdict=(18000, 300))]
    Batch(dreams, engine, world, judge).run()       # seconds, and what the last dream spent them on

Each rank has an engine, in which its main thread acts. All ranks share the world model's server and the
judge's. A rank acts for all of its dreams that are ready, in one batch, and waits until the last of these
answers is written. Then it sends the actions off and waits for predictions:

- "free" (dream.Dream today): for the first of them. A dream whose answer is there acts again.
- "lockstep" (commit 76c6611): for all of them, and then for the verdicts.

A server reads prompts before it writes (vLLM's chunked prefill: a step of 8,192 tokens takes as long as some
twenty steps that only write). All answers that it writes advance equally. What this leaves out: retries,
requests on their way, and prefixes that a server has in its cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Tokens of one turn: of the page, of the agent's answer, of the world model's (None: the turn stops)."""

    page: float
    answer: float
    prediction: float | None


@dataclass(frozen=True)
class Dream:
    """One dream: the rank that dreams it, its turns, and the judge's (tokens read, tokens written)."""

    rank: int
    turns: tuple[Turn, ...]
    verdict: tuple[float, float]


@dataclass(frozen=True)
class Sampler:
    """A model that answers many at once. `read`: tokens/s of prompts. `write(n)`: tokens/s of n answers
    together. `places`: answers that it has room for; the others queue."""

    read: float
    write: Callable[[float], float]
    places: int


class Queue:
    """A sampler at work: [key, tokens left to read, tokens left to write] of each request, oldest first."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.requests = sampler, []

    def add(self, key: int, read: float, write: float) -> None:
        self.requests.append([key, float(read), float(write)])

    def _now(self) -> tuple[list[list], int, float]:
        """The requests that advance, which of their two numbers falls, and by how many tokens/s."""
        placed = self.requests[: self.sampler.places]
        for request in placed:
            if request[1] > 0:
                return [request], 1, self.sampler.read
        return placed, 2, self.sampler.write(len(placed)) / len(placed)

    def until(self) -> float:
        """Seconds until the next request is read, or written. There must be one."""
        placed, part, rate = self._now()
        return min(request[part] for request in placed) / rate

    def advance(self, seconds: float) -> list[int]:
        """Work for so long, at most `until()`. Returns the keys that are done."""
        placed, part, rate = self._now()
        for request in placed:
            left = request[part] - seconds * rate
            request[part] = left if left > 1e-6 else 0.0
        done = [key for key, read, write in placed if read <= 0 and write <= 0]
        if done:
            self.requests = [request for request in self.requests if request[1] > 0 or request[2] > 0]
        return done


class Batch:
    """The dreams of one batch, simulated once.

    `slices`: how much slower engines and servers run while both have work on the same GPUs. 1: not at all.
    2: CUDA gives each process half of the time (NOTES 7.13). `judge` None: the rank's own engine judges.
    """

    def __init__(self, dreams: Sequence[Dream], engine: Sampler, world: Sampler, judge: Sampler | None,
                 mode: str = "free", slices: float = 1.0):
        ranks = max(dream.rank for dream in dreams) + 1 if dreams else 0
        self.dreams, self.mode, self.slices = dreams, mode, slices
        self.engines = [Queue(engine) for _ in range(ranks)]
        self.world, self.judge = Queue(world), Queue(judge) if judge else None
        self.ready: list[list[int]] = [[] for _ in range(ranks)]  # dreams that wait for their rank
        self.acting: list[list[int]] = [[] for _ in range(ranks)]  # those of its batch
        self.away = [0] * ranks  # predictions and verdicts that a rank in lockstep waits for
        self.back: list[list[int]] = [[] for _ in range(ranks)]  # in lockstep: those that have one
        self.turn = [0] * len(dreams)
        self.phase, self.since, self.now = ["waits"] * len(dreams), [0.0] * len(dreams), 0.0
        self.spent = [{"waits": 0.0, "acts": 0.0, "imagines": 0.0, "judges": 0.0} for _ in dreams]
        for k, dream in enumerate(dreams):
            self.ready[dream.rank].append(k)

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds until the last verdict, and of the dream that had it: what it waited for. `waits`: for its
        rank, which acts for other dreams, or in lockstep waits for them."""
        last = None
        queues = [*self.engines, self.world, *([self.judge] if self.judge else [])]
        self._act()
        while busy := [queue for queue in queues if queue.requests]:
            servers = sum(queue is self.world or queue is self.judge for queue in busy)
            slower = self.slices if 0 < servers < len(busy) else 1.0
            step = min([queue.until() for queue in busy])
            self.now += step * slower
            done = [(queue, queue.advance(step)) for queue in busy]
            for queue, keys in done:
                for k in keys:
                    if queue is self.world:
                        self._predicted(k)
                    elif queue is self.judge:
                        last = self._over(k)
            for rank, queue in enumerate(self.engines):
                if self.acting[rank] and not queue.requests:
                    last = self._acted(rank) or last
            self._act()
        return self.now, self.spent[last] if last is not None else {}

    def _enter(self, k: int, phase: str) -> None:
        self.spent[k][self.phase[k]] += self.now - self.since[k]
        self.phase[k], self.since[k] = phase, self.now

    def _act(self) -> None:
        """Every rank that is free begins a batch with all its dreams that are ready."""
        for rank, ready in enumerate(self.ready):
            if not ready or self.acting[rank] or self.mode == "lockstep" and self.away[rank]:
                continue
            for k in ready:
                dream = self.dreams[k]
                judged = self.turn[k] == len(dream.turns)
                tokens = dream.verdict if judged else (dream.turns[self.turn[k]].page,
                                                       dream.turns[self.turn[k]].answer)
                self.engines[rank].add(k, *tokens)
                self._enter(k, "judges" if judged else "acts")
            self.acting[rank], self.ready[rank] = list(ready), []

    def _acted(self, rank: int) -> int | None:
        """The batch of a rank is written: its actions go to the world model. Returns a dream that is over."""
        over, batch, self.acting[rank] = None, self.acting[rank], []
        judged = [k for k in batch if self.turn[k] == len(self.dreams[k].turns)]
        self.away[rank] += len(batch) - len(judged)  # of all, before the first comes back
        for k in batch:
            if k in judged:
                over = self._over(k)
                continue
            turn = self.dreams[k].turns[self.turn[k]]
            if turn.prediction is None:  # code answers a stop
                self._predicted(k)
            else:
                self.world.add(k, turn.page, turn.prediction)
                self._enter(k, "imagines")
        return over

    def _predicted(self, k: int) -> None:
        rank = self.dreams[k].rank
        self.turn[k] += 1
        self._enter(k, "waits")
        self.back[rank].append(k)
        self.away[rank] -= 1
        if self.mode == "free" or not self.away[rank]:
            for k in self.back[rank]:
                if self.turn[k] < len(self.dreams[k].turns) or self.judge is None:
                    self.ready[rank].append(k)
                else:
                    self.judge.add(k, *self.dreams[k].verdict)
                    self._enter(k, "judges")
                    self.away[rank] += 1
            self.back[rank] = []

    def _over(self, k: int) -> int:
        if self.judge is not None:
            self.away[self.dreams[k].rank] -= 1
        self._enter(k, "over")
        return k
