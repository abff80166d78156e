r"""Look-ahead at test time: before it acts, the agent dreams what each of a few actions would lead to, and
does the one that the judge likes best. WebDreamer (arXiv 2411.06559) and WMA (arXiv 2410.13232). Nothing is
learned.

    python -m rivals.lookahead --checkpoint runs/laptop/sft --judge-checkpoint runs/laptop/reward_model \
        --seeds 1000200:10 --json FILE

    at each turn:   a_1 .. a_k from the agent, those that differ;  one of them: it is done
                    y_j = a_j and what follows it in H steps of the world model, the agent acting greedily
                    score(a_j) = 1/n sum over n sampled reasons of p(YES | goal, y_j)
                    do argmax_j score(a_j); the first where several are best

Any agent of evaluate.py, at real pages: a folder, or a server (--agent-url). The flags are evaluate.py's, and
audit.py's for world model and judge.

Where we differ from the papers and from released code, and why
- They ask a large model for complete, on track or wrong, and average 1, .5 and 0 of 20 answers. Here the
  judge's p(YES) is read off the model behind n reasons that it sampled: the same mean with less noise. A
  reward model, the laptop's, gives no reasons, and is asked once (--judge-tokens 0). Neither knows "on
  track": of a dream that is not over they say whether the goal is reached by now.
- The first candidate is the agent's greedy action, so that ties leave the agent as it is. `margin` is how
  much better another has to be; published: 0.
- WebDreamer asks a model to strike out candidates before they are dreamed; here those that are equal are.
- WebDreamer dreams several trajectories of a candidate; here one, and its n judgements are averaged.
- A dream that nobody could imagine or judge scores 0.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

import data
import dream
import evaluate
import judge
import lm
import measure
import policy
from data import Action, ActionError, Start
from policy import TokenTrajectory
from world_model import WorldModel
from worlds.miniwob import Browser


@dataclass(frozen=True)
class Config(evaluate.WithDreams):
    """evaluate.py's, and how far the agent looks ahead."""

    ahead: int = 1
    """H: steps of the world model behind each candidate (papers: 1 is best)."""
    candidates: int = 3
    """k: actions that are asked for, the greedy one included (WebDreamer: 3 at most are dreamed)."""
    reasons: int = 5
    """n: sampled reasons a candidate (papers: 20 answers)."""
    candidate_temperature: float = 1.0
    """Sampling temperature of the candidates but the first (WebDreamer: 1)."""
    reason_temperature: float = 1.0
    """Sampling temperature of the judge's reasons."""
    margin: float = 0.0
    """Least lead of a candidate's score over the greedy action's, for it to be done (published: 0)."""

    def __post_init__(self):
        super().__post_init__()
        if min(self.ahead, self.candidates, self.reasons) < 1:
            raise ValueError("ahead, candidates and reasons are counts: give each at least 1")
        if self.on.benchmark or self.table:
            raise ValueError("rivals/lookahead.py plays MiniWoB++ pages: leave out --benchmark and --table")
        if self.agent_url and not self.judge_checkpoint:
            raise ValueError("an agent behind a URL cannot judge: give --judge-checkpoint FOLDER")
        if self.sampler == "vllm" and not (self.world_model_urls and self.judge_urls):
            raise ValueError("vLLM takes one model in this process: give --world-model-urls and --judge-urls")


# ---- a turn ------------------------------------------------------------------------------------------------


@dataclass
class LookAhead:
    """policy.act with a look ahead: a `turn` of policy.rollout. `counts` adds up the turns; those on which
    several actions were dreamed; those on which another than the greedy one was done."""

    world_model: WorldModel
    judge_model: object
    config: Config

    def __post_init__(self):
        self.counts: Counter = Counter(turns=0, dreamed=0, changed=0)

    def __call__(self, model, trajectories: Sequence[TokenTrajectory], seen: Sequence, ready: Sequence[int],
                 max_new_tokens: int, temperature: float, seeds: Sequence[int]) -> list[Action | None]:
        prompts = policy.prompts_of(model, trajectories, seen, ready, max_new_tokens)
        found = self.candidates(model, prompts, max_new_tokens, temperature, seeds)
        asked = [(k, j, sample) for k, samples in found.items() if len(samples) > 1
                 for j, sample in enumerate(samples)]
        starts = [start_of(trajectories[k], seen[k]) for k, *_ in asked]
        of_asked = [lm.mix(seeds[k], "ahead", j) for k, j, _ in asked]  # whatever stands beside a row
        ahead = self.dream(model, starts, [(prompts[k], sample) for k, _, sample in asked], max_new_tokens,
                           of_asked)
        scores = self.scores(ahead, of_asked)
        actions: list[Action | None] = [None] * len(trajectories)
        for k, samples in found.items():
            of_k = [score for (row, *_), score in zip(asked, scores) if row == k]
            best = choose(of_k, self.config.margin) if of_k else 0
            self.counts.update(turns=1, dreamed=bool(of_k), changed=best > 0)
            actions[k] = policy.record_turn(trajectories[k], seen[k], prompts[k], samples[best])
        return actions

    def candidates(self, model, prompts: dict[int, list[int]], max_new_tokens: int, temperature: float,
                   seeds: Sequence[int]) -> dict[int, list[lm.Sample]]:
        """Of each row, a sample for each different action: the agent's own first, where it is one. A row on
        which no text is an action keeps its first text."""
        given = model, list(prompts.values()), max_new_tokens
        rounds = [lm.sample(*given, temperature, [seeds[k] for k in prompts])]
        for j in range(1, self.config.candidates):
            rounds.append(lm.sample(*given, self.config.candidate_temperature,
                                    [lm.mix(seeds[k], j) for k in prompts]))
        found = {}
        for k, samples in zip(prompts, zip(*rounds)):
            different: dict[str, lm.Sample] = {}
            for sample in samples:
                with contextlib.suppress(ActionError):
                    different.setdefault(str(policy.parse_turn(sample)[1]), sample)
            found[k] = list(different.values()) or [samples[0]]
        return found

    def dream(self, model, starts: Sequence[Start], first: Sequence[tuple[list[int], lm.Sample]],
              max_new_tokens: int, seeds: Sequence[int]) -> list[TokenTrajectory]:
        """A dream of config.ahead steps from each start, whose first turn is given."""
        if not starts:
            return []

        def turn(model, trajectories, seen, ready, *more) -> list[Action | None]:
            if trajectories[ready[0]].pairs:  # all take their first turn together
                return policy.act(model, trajectories, seen, ready, *more)
            return [policy.record_turn(trajectories[k], seen[k], *first[k]) for k in range(len(trajectories))]

        world = dream.Dream(self.world_model, Unjudged(), seeds)
        dreamed = policy.rollout(world, model, starts, self.config.ahead, max_new_tokens, 0.0, seeds, turn)
        for trajectory, tab in zip(dreamed, world.tabs):
            trajectory.dropped = trajectory.dropped or tab.dropped
        return dreamed

    def scores(self, dreamed: Sequence[TokenTrajectory], seeds: Sequence[int]) -> list[float]:
        """p(YES) of each dream, the mean over n sampled reasons; of those that came to a verdict."""
        whole = [j for j, trajectory in enumerate(dreamed) if trajectory.steps and not trajectory.dropped]
        room, temperature = self.config.judge_tokens, self.config.reason_temperature
        rows = [(j, i) for j in whole for i in range(self.config.reasons if room else 1)]
        cases = [(dreamed[j].start.goal, *judge.ending(dreamed[j])) for j, _ in rows]
        if room:  # Judge.verdicts, but not greedy
            prompts, fitting = judge.prompts_of(self.judge_model, cases, room)
            of_fitting = [lm.mix(seeds[j], "reason", i) for j, i in (rows[r] for r in fitting)]
            given = self.judge_model, [prompts[r] for r in fitting], room, temperature, of_fitting
            samples = lm.sample(*given)
            said = judge.read_verdicts(self.judge_model, prompts, dict(zip(fitting, samples)))
        else:
            said = judge.Judge(self.judge_model, 0).verdicts(cases)
        chances: dict[int, list[float]] = {j: [] for j in range(len(dreamed))}
        for (j, _), verdict in zip(rows, said):
            if not verdict.unknown:
                chances[j].append(1 / (1 + math.exp(-verdict.margin)))
        return [sum(some) / len(some) if some else 0.0 for some in chances.values()]


class Unjudged:
    """No judge (judge.AnyJudge): look-ahead judges its dreams itself, those that are not over too."""

    def verdicts(self, cases: Sequence[judge.Case]) -> list[judge.Verdict]:
        return [judge.Verdict(False, 0.0, "")] * len(cases)


def start_of(trajectory: TokenTrajectory, seen) -> Start:
    """Where a trajectory stands now, to dream on from there."""
    start = trajectory.start
    return Start(start.task, start.seed, (), start.goal, seen.url, seen.page, trajectory.past, start.system)


def choose(scores: Sequence[float], margin: float) -> int:
    """The best, or the first where none beats it by more than `margin`.

    >>> choose([.2, .9, .9], 0.0), choose([.5, .5], 0.0), choose([.2, .3], .1)
    (1, 0, 0)
    """
    best = max(range(len(scores)), key=lambda j: (scores[j], -j))
    return best if scores[best] > scores[0] + margin + 1e-12 else 0


# ---- python -m rivals.lookahead ----------------------------------------------------------------------------


def run(config: Config) -> dict:
    """The agent's tries with look-ahead, and what they cost."""
    config, measured = evaluate.prepared(config)
    starts = measure.real_starts(config.tasks, data.seeds_to_look_at(config.seeds))
    sampled, played = lm.tokens_sampled(), list[TokenTrajectory]()
    with (evaluate.agent(config) as model, Browser() as web,
          evaluate.loaded(config, config.world_model, config.world_model_context,
                          "python sft.py world_model laptop", config.world_model_urls) as world_lm,
          evaluate.loaded(config, config.judge_checkpoint or config.checkpoint, config.judge_context,
                          urls=config.judge_urls) as judge_model):
        turn = LookAhead(WorldModel(world_lm, config.world_model_tokens, config.world_model_temperature),
                         judge_model, config)

        def roll(starts: Sequence[Start], seeds: Sequence[int]) -> list[TokenTrajectory]:
            return policy.rollout(web, model, starts, config.horizon, config.max_new_tokens,
                                  config.temperature, seeds, turn)

        for k in tqdm(range(0, len(starts), config.pages), unit="pages", dynamic_ncols=True):
            some = starts[k : k + config.pages]
            played += measure.twice(web, some, lm.row_seeds(k, len(some)), roll)
    said = {name: getattr(config, name) for name in (
        "world_model", "judge_checkpoint", "ahead", "candidates", "reasons", "margin")}
    cost = {"tokens_sampled": lm.tokens_sampled() - sampled}
    return measure.success(played) | turn.counts | measured | said | cost


def main():
    evaluate.command("lookahead.py", Config, __doc__, run,
                     lambda result: json.dumps({key: value for key, value in result.items()
                                                if key != "trajectories"}, indent=1))


if __name__ == "__main__":
    main()
