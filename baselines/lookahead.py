r"""Look-ahead at test time: before it acts, the agent dreams what each of a few actions would lead to, and
does the one that the judge likes best. WebDreamer (arXiv 2411.06559) and WMA (arXiv 2410.13232). Nothing is
learned.

    python -m baselines.lookahead --checkpoint runs/laptop/sft --seeds 1000200:10 --out ahead.jsonl
    python evaluate.py --table sft.jsonl ahead.jsonl        # beside the same agent's tries without it

    at each turn:   a_1 .. a_k from the agent, those that differ;  one of them: it is done
                    o_j = the page that the world model says follows a_j
                    score(a_j) = 1/n sum over n sampled reasons of p(YES | goal, a_j, o_j)
                    do argmax_j score(a_j); the first where several are best

Where we differ from the papers and from released code, and why
- They ask a large model for complete, on track or wrong, and average 1, .5 and 0 of 20 answers. Here the
  judge's p(YES) is read off the model behind n reasons that it sampled: the same mean with less noise. A
  reward model, the laptop's, gives no reasons, and is asked once (--judge-tokens 0). Neither knows "on
  track": of a dream that is not over they say whether the goal is reached by now.
- The first candidate is the agent's greedy action, so that ties leave the agent as it is.
- WebDreamer asks a model to strike out candidates before they are dreamed; here those that are equal are.
- WebDreamer dreams several rollouts of a candidate; here one, and its n judgements are averaged. It is of one
  step: both papers find that best.
- A page that nobody could imagine or judge scores 0.
"""

import asyncio
import contextlib
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import tyro

import audit
import data
import distributed
import evaluate
import lm
from data import Action, ActionError, Start
from dream import DreamEnv, Models
from judge import Judge, Verdict
from policy import Invalid, parse_turn


@dataclass(frozen=True)
class LookAhead(audit.Audit, evaluate.Evaluate):
    """evaluate.py's settings, world model and judge, and how the agent looks ahead."""
    candidates: int = 3  # k: actions asked for, the greedy one included (WebDreamer: 3 at most are dreamed)
    reasons: int = 5  # n: sampled reasons a candidate (papers: 20 answers)


class Ahead:
    """A policy.Sampler of one try. Where it looks ahead from, it reads off the agent's messages."""

    def __init__(self, start: Start, models: Models, config: LookAhead):
        self.now, self.models, self.config = start, models, config
        self.did = list(start.previous)  # the past that the judge reads: without what was refused
        self.template, self.context = self, models.agent.context

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        page, url, goal, past = data.parse_prompt(messages[-1]["content"])  # type: ignore[misc]
        for words in past[len(self.now.previous):]:
            # Refused is what says why, or names an element that was not there (judge.ending, NOTES 11.10).
            action, before = data.parse_described(words), self.now.page
            there = action and (not action.bid or data.label(before, action.bid))
            if there and words == data.describe(action, before):
                self.did.append(words)
        self.now = replace(self.now, goal=goal, url=url, page=page, previous=past)
        return self.models.agent.template.prompt_ids(messages)

    async def generate(self, prompt, max_new_tokens: int, temperature: float, seed: int) -> lm.Sample:
        """The agent's own answer, or another candidate whose dream the judge likes better."""
        ask, found = self.models.agent.generate, dict[Action, lm.Sample]()
        samples = await asyncio.gather(ask(prompt, max_new_tokens, temperature, seed), *(
            ask(prompt, max_new_tokens, 1.0, lm.mix(seed, j)) for j in range(1, self.config.candidates)))
        for sample in samples:
            with contextlib.suppress(ActionError):
                found.setdefault(parse_turn(sample)[1], sample)
        if len(found) < 2:
            return next(iter(found.values()), samples[0])
        scores = await asyncio.gather(*(self.score(action, lm.mix(seed, "ahead", j))
                                        for j, action in enumerate(found)))
        return found[[*found][scores.index(max(scores))]]  # the first of the best

    async def score(self, action: Action, seed: int) -> float:
        """The mean p(YES) of what the world model says follows."""
        env = DreamEnv(self.models.world_model, self, seed)
        n = self.config.reasons if self.config.judge_tokens else 1
        with contextlib.suppress(Invalid):
            await env.reset(self.now)
            obs, *_ = await env.step(action)
            done = (*self.did, *env.done[len(self.now.previous):])  # nothing, where the page refuses it
            return sum(await asyncio.gather(*(self.chance(done, obs.page, lm.mix(seed, "reason", i))
                                              for i in range(n)))) / n
        return 0.0

    async def chance(self, done: tuple[str, ...], page: str, seed: int) -> float:
        """p(YES) behind reasons that the judge samples at temperature 1; 0 where it comes to no verdict."""
        judge = self.models.judge.sampler
        warm = SimpleNamespace(template=judge.template, context=judge.context, margin=judge.margin,
                               generate=lambda prompt, tokens, *_: judge.generate(prompt, tokens, 1.0, seed))
        with contextlib.suppress(Invalid):
            said = Judge(warm, self.config.judge_tokens).verdict(self.now.goal, done, self.now.page, page)
            return 1 / (1 + math.exp(-(await said).margin))
        return 0.0

    async def verdict(self, *_) -> Verdict:
        """What is not over is judged as well, in chance(): a dream itself has no other judge."""
        return Verdict(False, 0.0)


def look_ahead(config: LookAhead) -> str:
    """The agent's tries, as evaluate.py writes them; returns their table."""
    config = evaluate.with_lengths(config)
    models = audit.loaded(config, "dreams")
    return evaluate.table([evaluate.evaluate(config, lambda start: Ahead(start, models, config))])


if __name__ == "__main__":
    config = tyro.cli(LookAhead, description=__doc__)
    distributed.command(lambda: print(look_ahead(config)))
