"""The imagined web: an environment whose pages the world model makes, and whose end a judge rewards.

    o_1 from recorded data;  (h_t, a_t) ~ pi_theta;  (r, Delta) ~ p_phi;  o_t+1 = apply(o_t, Delta)
    t <= 5;  reward = the judge's verdict on stop, or where the environment ended; 0 when the steps run out
                                                                                (arXiv 2601.22149, section 3)

A batch is a few groups of n rollouts each. The rollouts of a group have one start, a page of one task. Each
is a dream; or, with probability `expert_fraction`, the recorded expert trajectory of that start takes its
place, with reward 1, before advantages are computed. A group whose rewards are all equal has no signal and is
left out.

The agent does not know which environment answers. So a group may also be done on real pages (train.py
--real-fraction). Starts and experts are the same. The page pays the reward, and no judge is asked.

Where we differ from the paper, and why
- A dream is discarded and counted, with its reason, where somebody could not read or imagine a page: it does
  not fit the agent, the world model or the judge; a prediction or a verdict was cut off, or cannot be read.
  Such a dream does not get reward 0, which would say nothing about the agent, and would teach it to avoid
  long pages (NOTES 3.7). The price: a discarded dream costs the agent nothing, and a failed one does. So an
  agent that fails may learn to be discarded. Watch `discarded`. The agent's own text is another case: cut
  off, or no action, it is the agent's doing, with reward 0 (policy.rollout). A real page that hung or
  crashed is discarded by the same rule.
- Which rollouts are an expert's is sampled first, and these are not dreamed. The paper dreams all, then
  writes over some: the same batch, for more dreams.
- A start may have no expert: its rollouts are all dreamed. The laptop's groups start at the first pages of
  the explorer's recordings, solved or not.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import data
import distributed
import lm
import policy
from config import Train, UserError
from data import Action, Obs, Start, Step
from judge import AnyJudge, Verdict
from policy import Env, Invalid, Rollout, Sampler, Turn, rollout
from world_model import AnyWorldModel, Prediction

# ---- the environment ---------------------------------------------------------------------------------------

class DreamEnv:
    """A policy.Env of dreamed pages. `seed` is the dream's; a prediction's is made of it and of its turn."""

    def __init__(self, world_model: AnyWorldModel, judge: AnyJudge, seed: int):
        self.world_model, self.judge, self.seed = world_model, judge, seed

    async def reset(self, start: Start) -> Obs:
        self.start, self.page = start, start.page
        self.left: list[str] = []  # pages that go_back returns to
        self.done = list(start.previous)  # in words: what the judge reads, as judge.ending has it
        self.last = start.previous[-1] if start.previous else ""
        self.predictions: list[Prediction | None] = []
        self.verdict: Verdict | None = None
        return Obs(start.goal, self.page)

    async def step(self, action: Action) -> tuple[Obs, float, bool, bool]:
        """See policy.Env. Raises Invalid where the world model gave no page, or the judge no verdict."""
        before, over, error = self.page, action.name == "stop", ""
        self.predictions.append(None)
        if action.name == "go_back":  # code answers: what was left is known exactly
            if self.left:
                self.page = self.left.pop()
            elif self.start.previous:
                raise Invalid("world model: not recorded: what stood before the start")
            else:
                error = "go_back: there is only this page"
        elif not over:
            seed = lm.mix(self.seed, len(self.predictions))
            found = await self.world_model.predict(before, action, self.last, seed)
            self.predictions[-1], over, error, self.page = found, found.over, found.error, found.page
            if data.root_url(self.page) != data.root_url(before):
                self.left.append(before)
        self.last = data.describe(action, before, error)
        self.done += [self.last] if not error else []
        if over:
            self.verdict = await self.judge.verdict(self.start.goal, tuple(self.done), before, self.page)
        reward = float(over and self.verdict.success)  # type: ignore[union-attr]
        return Obs(self.start.goal, self.page, error), reward, over, False


@dataclass(frozen=True)
class Models:
    """The agent acts, the world model answers, the judge rewards. The last two may be None where nothing is
    dreamed."""
    agent: Sampler
    world_model: AnyWorldModel | None = None
    judge: AnyJudge | None = None


# ---- starts and experts ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Expert:
    """A recorded success from a start on."""
    steps: tuple[Step, ...]
    final_page: str


GroupStart = tuple[Start, Expert | None]  # a group's start, and the expert that may take rollouts' places


def starts(config: Train) -> list[GroupStart]:
    """Where groups may begin: the windows of recorded successes (data.expert_windows), at most two of each;
    or with config.first_pages the first page of every recording. Tasks of which all recordings succeeded, or
    none, are then left out: their groups would have equal rewards. What is longer than the context by far is
    left out too. Raises UserError when nothing is left, and for a task of a benchmark that is held out."""
    recorded = [t for t in data.read_trajectories(config.recorded) if t.task not in config.not_dreamed]
    for t in recorded:
        if config.on.benchmark != "miniwob" and data.side(t.task) != data.TRAINING:
            raise UserError(f"{t.source}: {t.task!r} is held out (data.side): what is evaluated must not be "
                            "learned from; give other --recorded (envs/explore.py records the other side)")
    found: list[GroupStart] = []
    if config.first_pages:
        ends = {(t.task, t.reward == 1) for t in recorded}
        for t in recorded:
            if {(t.task, True), (t.task, False)} <= ends and t.steps and t.steps[0].index == 0:
                start = Start(t.task, t.seed, (), t.goal, t.steps[0].page, (), t.system)
                complete = (t.reward == 1 and t.terminated and len(t.steps) <= config.horizon
                            and t.steps[-1].index == len(t.steps) - 1)
                found.append((start, Expert(tuple(t.steps), t.final_page) if complete else None))
    else:
        rng = random.Random(config.seed)
        found = [(start, Expert(tuple(steps), t.final_page)) for t in recorded
                 for start, steps in data.expert_windows(t, config.horizon, rng=rng)
                 if not all(step.error for step in steps)]  # such a window has nothing to teach
    # A token has some 3 characters: this leaves out what cannot fit, before it is tokenised.
    found = [group for group in found if len(group[0].page) <= 4 * config.context]
    if not found:
        wanted = "task with both ends" if config.first_pages else "success"
        raise UserError(f"{config.recorded} holds no {wanted} that fits --context {config.context}: there is "
                        "nowhere to begin")
    return found


def sample_starts(rng: random.Random, starts: Sequence[GroupStart], groups: int) -> list[GroupStart]:
    """So many of `starts`: a task is sampled first, evenly and every one once before any twice, then a start
    of it."""
    by_task: dict[str, list[GroupStart]] = {}
    for group in starts:
        by_task.setdefault(group[0].task, []).append(group)
    tasks, chosen = sorted(by_task), list[str]()
    while len(chosen) < groups:
        chosen += rng.sample(tasks, min(len(tasks), groups - len(chosen)))
    return [rng.choice(by_task[task]) for task in chosen]


# ---- a batch -----------------------------------------------------------------------------------------------

Pages = Callable[[], contextlib.AbstractAsyncContextManager[Env]]  # async with pages() as env: a real page


@dataclass
class Batch:
    """What one update learns from, the same on every rank."""
    rollouts: list[Rollout]  # all, the discarded too: rollout k belongs to group k // config.group_size
    learned: list[Rollout]  # those with tokens, not discarded, in a group whose rewards differ
    groups: list[int]  # the group of each of these
    signals: list[tuple[str, bool]]  # for each group its task, and whether its rewards differed


def batch(models: Models, sampled: Sequence[GroupStart], config: Train, seed: tuple,
          pages: Pages | None = None, real: Sequence[bool] = ()) -> Batch:
    """A group of rollouts from each of sample_starts()'s, each a dream or an expert's. The ranks share the
    dreaming. A rollout's seed is mix(*seed, its number). `real` says for each start whether its group is done
    on real `pages`: each rank has a browser of its own."""
    size = config.group_size

    async def row(k: int) -> Rollout:
        start, expert = sampled[k // size]
        number = lm.mix(*seed, k)
        if expert and random.Random(number).random() < config.expert_fraction:
            return expert_row(models.agent, start, expert)
        if not (real and real[k // size]):
            return await imagine(models, start, config, number)
        assert pages is not None, "real groups need pages"
        async with pages() as env:
            done = await rollout(env, models.agent, start, config.horizon, config.max_new_tokens,
                                 config.temperature, number)
        done.real = True
        return done

    made = distributed.collect(lm.together(map(row, distributed.shard_rows(range(len(sampled) * size)))))
    found = Batch(made, [], [], [])
    for group, (start, _) in enumerate(sampled):
        rollouts = [done for done in made[group * size:][:size] if done.turns and not done.discarded]
        has_signal = len({done.reward for done in rollouts}) > 1
        found.signals.append((start.task, has_signal))
        if has_signal:
            found.learned += rollouts
            found.groups += [group] * len(rollouts)
    return found


async def imagine(models: Models, start: Start, config: Train, seed: int) -> Rollout:
    """A dream from `start`, judged."""
    assert models.world_model is not None and models.judge is not None, "a dream needs both"
    env = DreamEnv(models.world_model, models.judge, seed)
    done = await rollout(env, models.agent, start, config.horizon, config.max_new_tokens, config.temperature,
                         seed)
    done.predictions, done.verdict = env.predictions, env.verdict
    return done


def expert_row(model: Sampler, start: Start, expert: Expert) -> Rollout:
    """The expert trajectory in a dream's place, with reward 1.

    Nobody sampled the expert's tokens, so they have no sampled log-probabilities. old_logp is scored with the
    current policy, as for every row: the expert's ratio starts at 1, and no other correction is made
    (NOTES 3.4). A step that the browser refused is not learned from, as policy.examples does not clone it. It
    stays in the trajectory, and among the past actions of later steps. A row with a step over model.context
    is discarded.
    """
    turns = [Turn(*policy.step_pair(model, start.goal, step, start.system), [])
             for step in expert.steps if not step.error]
    # starts() guesses by the characters of a page, and some scripts have more tokens.
    longest = max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns), default=0)
    discarded = f"policy: too long: an expert's step of {longest} tokens" if longest > model.context else ""
    return Rollout(start, [*expert.steps], turns, expert.final_page, reward=1.0, terminated=True, expert=True,
                   discarded=discarded)
