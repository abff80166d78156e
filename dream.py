"""The imagined web: a world whose pages the world model makes, and whose end the agent itself judges.

    o_1 from recorded data;  (h_t, a_t) ~ pi_theta;  (reason, Delta) ~ p_phi;  o_t+1 = apply(o_t, Delta)
    t <= 5;  reward = the judge's verdict on stop, or where the world ended; 0 when the steps run out
                                                                                (arXiv 2601.22149, section 3)

A batch is a few groups of n rows each. The rows of a group have one start, a page of one task. Each row is a
dream; or, with probability `expert_fraction`, the recorded expert trajectory of that start takes its place,
with reward 1, before advantages are computed. A group whose rewards are all equal teaches nothing and is
dropped.

    python audit.py --show --task choose-list       # after `make`: one dream, printed step by step

The agent does not know which world answers. So a group may also be done on real pages (train.py --world real,
or both). Starts and experts are the same. A world of worlds/ stands in for Dream. The page pays the reward,
and no judge is asked.

Where we differ from the paper, and why
- A dream is dropped and counted, with its cause, where somebody could not read or imagine a page: it does not
  fit the agent, the world model or the judge; a prediction or a verdict was cut off, or cannot be read. Such
  a dream does not get reward 0, which would say nothing about the agent, and would teach it to avoid long
  pages (NOTES 3.7). The price: a dropped dream is neither rewarded nor punished, as if its reward were the
  mean of its group, where a failed one is punished. So an agent that fails may learn to be dropped. Watch
  `drops`. The agent's own text is another case: cut off, or no action, it is the agent's doing, with reward 0
  (policy.act). A real page that hung or crashed is dropped by the same rule.
- Which rows are an expert's is drawn first, and these are not dreamed. The paper dreams all rows, then writes
  over some: the same rows, for more dreams.
- A start may have no expert: its rows are all dreamed. The laptop's groups start at the first pages of the
  SFT policy's own episodes, solved or not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import data
import distributed
import lm
import policy
from data import Action, Obs, Start, Step
from judge import AnyJudge, Verdict
from policy import Sampler, TokenTrajectory, World
from world_model import AnyWorldModel, Prediction


@dataclass(frozen=True)
class Config:
    """How the agent dreams."""

    tasks: int = 4
    """Groups a batch (paper: 4), each of another task while there are tasks."""
    group: int = 8
    """n: rows a group, dreams or the expert's (paper: 8)."""
    horizon: int = 5
    """T: steps a dream (paper: 5)."""
    expert_fraction: float = 0.5
    """Chance that the expert trajectory of its start takes a row's place (paper: 0.5, best near 0.4)."""
    temperature: float = 0.7
    """Sampling temperature of the agent (paper: 0.7)."""
    max_new_tokens: int = 4096
    """Longest answer of the agent, in tokens (paper: 16k; NNetNav's have some hundreds). These tokens of its
    context are kept free, and the page must fit in the rest."""
    world_model_tokens: int = 16384
    """Longest prediction of the world model, in tokens (paper: responses of 16k, NOTES 1.3; the authors'
    script: 8,192, which cuts off 36 to 48 % of the pages that are written out, NOTES 2.7)."""
    world_model_temperature: float = 0.7
    """Sampling temperature of the world model (the authors' script: 0.7, and top_p .9, which lm.sample does
    not have)."""
    world_model_writes: str = "delta"
    """What the world model writes: a `delta`, or the whole next `page`, as WebWorld's do
    (node/webworld.py)."""
    judge: str = "policy"
    """Who judges: `policy` (the SFT agent, frozen, or --judge-model where one is given), `current` (the
    agent's weights now) or `world_model`."""
    judge_tokens: int = 1024
    """Longest verdict, with its reasons, in tokens; 0: it answers at once, as a reward model does."""

    def __post_init__(self):
        if not 0 <= self.expert_fraction <= 1:
            raise ValueError("expert_fraction is a share: give it a value from 0 to 1")
        if self.judge not in ("policy", "current", "world_model"):
            raise ValueError(f"judge is policy, current or world_model, not {self.judge!r}")
        if self.world_model_writes not in ("delta", "page"):
            raise ValueError(f"a world model writes a delta or a page, not {self.world_model_writes!r}")
        if self.group < 2:
            raise ValueError("a group of one has no advantage: give it a value of at least 2")


# ---- the dreamed web ---------------------------------------------------------------------------------------


@dataclass
class _Tab:
    """One dream as the world sees it."""

    start: Start
    page: str
    actions: list[str]  # in words, those before the start included: what the judge reads
    history: list[str] = field(default_factory=list)  # pages that go_back returns to
    predictions: list[Prediction | None] = field(default_factory=list)  # of what each action did
    over: bool = False
    dropped: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Query:
    """An action on a page, and all that its answer depends on."""

    row: int
    goal: str
    page: str
    action: Action
    past: tuple[str, ...]  # in words, this action the last
    seed: int
    known: Prediction | None  # code answers stop and go_back


Outcome = tuple[Query, Prediction, Verdict | None]  # what came of a query; the verdict where it is judged


class Dream:
    """A policy.World of dreamed pages. `tabs` holds what became of each dream; nothing is learned from a tab
    that is `dropped`. (Where models are behind servers, dreams need not wait for each other:
    node/dreams.py.) An answer's seed is made of the dream's seed and the number of its turns.
    """

    def __init__(self, world_model: AnyWorldModel, judge: AnyJudge, seed: int | Sequence[int]):
        self.world_model, self.judge, self.seed = world_model, judge, seed
        self.tabs: list[_Tab] = []

    def __enter__(self):  # node/dreams.py has threads to stop
        return self

    def __exit__(self, *_):
        pass

    def reset(self, starts: Sequence[Start]) -> list[Obs]:
        self.tabs = [_Tab(start, start.page, list(start.previous)) for start in starts]
        self.seeds = lm.row_seeds(self.seed, len(starts))
        return [Obs(start.goal, start.url, start.page) for start in starts]

    def step(self, actions: Sequence[Action | None]
             ) -> tuple[Sequence[Obs | None], list[float], list[bool], list[bool]]:
        """See World.step. An action on a page that is over is an error of ours.

        Where the world model gave no page, the dream is truncated and dropped. Where the judge gave no
        verdict, it is dropped.
        """
        assert len(actions) == len(self.tabs), f"{len(actions)} actions for {len(self.tabs)} pages"
        late = any(action and tab.over for action, tab in zip(actions, self.tabs))
        assert not late, "a step after the end of a dream"
        queries = [self._query(k, action) for k, action in enumerate(actions) if action is not None]
        errors, rewards = [""] * len(actions), [0.0] * len(actions)
        terminated, truncated = [False] * len(actions), [False] * len(actions)
        for query, prediction, verdict in self.with_verdicts(self.outcomes(queries)):
            k, tab = query.row, self.tabs[query.row]
            if query.known is None:
                tab.predictions[-1] = prediction
                if data.root_url(prediction.page) != data.root_url(tab.page):
                    tab.history.append(tab.page)
            tab.page, tab.verdict = prediction.page, verdict
            if prediction.unknown:
                tab.dropped = f"world model: {prediction.unknown}"
            elif verdict is not None:
                rewards[k] = float(verdict.success)
                if verdict.unknown:
                    tab.dropped = f"judge: {verdict.unknown}"
            errors[k], terminated[k] = prediction.error, prediction.over
            truncated[k] = bool(prediction.unknown)
            tab.actions[-1] = data.describe(query.action, query.page, prediction.error)
            tab.over = terminated[k] or truncated[k]
        seen = [Obs(tab.start.goal, data.root_url(tab.page), tab.page, error)
                for tab, error in zip(self.tabs, errors)]
        return seen, rewards, terminated, truncated

    @property
    def failures(self) -> list[str]:
        return [tab.dropped for tab in self.tabs]

    def _query(self, k: int, action: Action) -> Query:
        """Add an action to dream k. Code answers stop and go_back, the world model all others."""
        tab, known = self.tabs[k], None
        if action.name == "stop":
            known = Prediction(tab.page, over=True)
        elif action.name == "go_back" and tab.history:
            known = Prediction(tab.history.pop())
        elif action.name == "go_back" and tab.start.previous:
            known = Prediction(tab.page, unknown="not recorded: what stood before the start")
        elif action.name == "go_back":
            known = Prediction(tab.page, error="go_back: there is only this page")
        tab.actions.append(data.describe(action, tab.page))
        tab.predictions.append(None)
        seed = lm.mix(self.seeds[k], len(tab.predictions))  # of the row and its turn, whoever waits for whom
        return Query(k, tab.start.goal, tab.page, action, tuple(tab.actions), seed, known)

    def outcomes(self, queries: Sequence[Query]) -> list[Outcome]:
        """What each action does to its page, in one batch. No dream is changed."""
        left = [query for query in queries if query.known is None]
        predicted = self.world_model.predict(
            [query.page for query in left], [query.action for query in left],
            [query.past[-2] if len(query.past) > 1 else "" for query in left], [query.seed for query in left])
        by_row = {query.row: prediction for query, prediction in zip(left, predicted)}
        return [(query, query.known or by_row[query.row], None) for query in queries]

    def with_verdicts(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """`outcomes`, with the judge's verdict on each dream that ended and has none yet. No dream is
        changed."""
        cases = {query.row: (query.goal, query.past, query.page, prediction.page)
                 for query, prediction, verdict in outcomes if prediction.over and verdict is None}
        found = dict(zip(cases, self.judge.verdicts(list(cases.values()))))
        return [(query, prediction, found.get(query.row, verdict)) for query, prediction, verdict in outcomes]


@dataclass(frozen=True)
class Models:
    """The agent acts, the world model answers, the judge rewards. The last two may be None where nothing is
    dreamed. `world` is the class of the world that they make: Dream, or a subclass. A rival may draw in
    another way (rivals/ratios.py)."""

    agent: Sampler
    world_model: AnyWorldModel | None = None
    judge: AnyJudge | None = None
    world: type[Dream] = Dream

    def draw_and_dream(self, rng: random.Random, starts: Sequence["Drawn"], config: Config, seed: tuple,
                       web: World | None = None, real_share: float = 0.0) -> "Batch":
        """What an update learns from: draw(), then batch(). Each group is done on the real pages of `web`
        with probability `real_share`."""
        drawn = draw(rng, starts, config.tasks)
        real = [real_share > 0 and rng.random() < real_share for _ in drawn]  # dreams alone draw nothing here
        return batch(self, drawn, config, seed, web, real)


# ---- starts and experts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expert:
    """A recorded expert window: where it starts, and the steps that led from there to success."""

    start: Start
    steps: tuple[Step, ...]
    final_page: str


Drawn = tuple[Start, Expert | None]  # a group's start, and the expert that may take rows' places


def draw(rng: random.Random, starts: Sequence[Drawn], groups: int) -> list[Drawn]:
    """So many of `starts`: a task is drawn first, evenly and every one once before any twice, then a start of
    it. Raises ValueError when there is no start at all."""
    by_task: dict[str, list[Drawn]] = {}
    for start, expert in starts:
        by_task.setdefault(start.task, []).append((start, expert))
    if not by_task:
        raise ValueError("there is no start: nowhere to dream from")
    tasks, chosen = sorted(by_task), list[str]()
    while len(chosen) < groups:
        chosen += rng.sample(tasks, min(len(tasks), groups - len(chosen)))
    return [rng.choice(by_task[task]) for task in chosen]


# ---- a batch -----------------------------------------------------------------------------------------------

PAGES = 16  # real pages side by side


@dataclass
class Batch:
    """What one update learns from, the same on every rank."""

    trajectories: list[TokenTrajectory]
    """All rows, the dropped among them: row k belongs to group k // config.group."""
    kept: list[TokenTrajectory]
    """The rows that can be learned from: with tokens, not dropped, in a group whose rewards differ."""
    groups: list[int]
    """The group of each kept trajectory."""
    useful: list[tuple[str, bool]]
    """For each group its task, and whether it had something to teach."""


def batch(models: Models, drawn: Sequence[Drawn], config: Config, seed: tuple, web: World | None = None,
          real: Sequence[bool] = ()) -> Batch:
    """n rows from each of draw()'s starts, each a dream or an expert's. The ranks share the dreaming. A row's
    seed is mix(*seed, row).

    `real` says for each start whether its group is done in `web` instead. Then each rank has a browser of its
    own.
    """
    rows = [row for row in drawn for _ in range(config.group)]
    seeds = [lm.mix(*seed, k) for k in range(len(rows))]
    groups = [k // config.group for k in range(len(rows))]
    mine = distributed.shard_rows([bool(real) and real[group] for group in groups])
    made = distributed.collect(trajectories(
        models, distributed.shard_rows(rows), config, distributed.shard_rows(seeds), web, mine))
    kept = keep(made, groups)
    teach = {groups[k] for k in kept}
    return Batch(made, [made[k] for k in kept], [groups[k] for k in kept],
                 [(start.task, group in teach) for group, (start, _) in enumerate(drawn)])


def trajectories(models: Models, rows: Sequence[Drawn], config: Config, seeds: Sequence[int],
                 web: World | None = None, real: Sequence[bool] = ()) -> list[TokenTrajectory]:
    """A trajectory for each row: the expert's, a dream, or where `real` says so one on the real pages of
    `web`. A row replaced by an expert is not dreamed.

    Nothing depends on which rows are done together: several processes may each do a share of a group.
    """
    real = real or [False] * len(rows)
    done = {k: shown for k, ((start, expert), seed) in enumerate(zip(rows, seeds))
            if (shown := expert_row(models.agent, start, expert, config.expert_fraction, seed))}
    for on_pages in (False, True):
        some = [k for k in range(len(rows)) if k not in done and real[k] == on_pages]
        given = [rows[k][0] for k in some], config, [seeds[k] for k in some]
        if some and on_pages:
            assert web is not None, "rows on real pages, and no world that has them"
            done |= zip(some, act_for_real(web, models.agent, *given))
        elif some:
            done |= zip(some, imagine(models, *given))
    for k, trajectory in done.items():
        trajectory.real = real[k]
    return [done[k] for k in range(len(rows))]


def imagine(models: Models, starts: Sequence[Start], config: Config, seeds: Sequence[int]
            ) -> list[TokenTrajectory]:
    """A dream from each start, judged."""
    assert models.world_model is not None and models.judge is not None, "a dream needs both"
    with models.world(models.world_model, models.judge, seeds) as world:
        dreamed = policy.rollout(world, models.agent, starts, config.horizon, config.max_new_tokens,
                                 config.temperature, seeds)
    for trajectory, tab in zip(dreamed, world.tabs):
        trajectory.dropped = trajectory.dropped or tab.dropped
        trajectory.verdict, trajectory.predictions = tab.verdict, tab.predictions
    return dreamed


def act_for_real(web: World, model: Sampler, starts: Sequence[Start], config: Config,
                 seeds: Sequence[int]) -> list[TokenTrajectory]:
    """A real trajectory from each start, PAGES at a time, or as many as the world has at once. The browser
    runs the start's prefix first.

    What it shows then is the recorded page. Only ids may differ: recorded ids are aligned (a11y.alignment),
    and elements that appeared since the reset have the browser's own here.
    """
    played, pages = [], min(PAGES, getattr(web, "at_once", PAGES))
    for k in range(0, len(starts), pages):
        played += policy.rollout(web, model, starts[k : k + pages], config.horizon, config.max_new_tokens,
                                 config.temperature, seeds[k : k + pages])
        for trajectory, failure in zip(played[k:], web.failures, strict=True):
            if failure and not trajectory.dropped:
                trajectory.dropped = f"{policy.FAILED}: {failure}"
    return played


def expert_row(model: Sampler, start: Start, expert: Expert | None, fraction: float,
               seed: int) -> TokenTrajectory | None:
    """With probability `fraction` the expert trajectory of a row, with reward 1; None where the row is to be
    dreamed.

    Nobody sampled the expert's tokens, so they have no sampled log-probabilities. old_logp is scored with the
    current policy, as for every row: the expert's ratio starts at 1, and no other correction is made
    (NOTES 3.4). A step that the browser refused is not learned from, as policy.examples does not clone it. It
    stays in the trajectory, and among the past actions of later steps. A row with a step over model.context
    is dropped.
    """
    if expert is None or random.Random(seed).random() >= fraction:
        return None
    same_start = expert.start.task == start.task and expert.start.page == start.page
    assert same_start, "an expert's reward beside dreams of another start"
    pairs = [policy.step_pair(model, expert.start.goal, step, expert.start.system)
             for step in expert.steps if not step.error]
    # recipe.fitting guesses by the bytes of a page, and some scripts have more tokens a byte than it takes.
    longest = max((len(prompt) + len(completion) for prompt, completion in pairs), default=0)
    dropped = f"policy: too long: an expert's step of {longest} tokens" if longest > model.context else ""
    return TokenTrajectory(expert.start, list(expert.steps), pairs, [[] for _ in pairs], expert.final_page,
                           reward=1.0, terminated=True, expert=True, dropped=dropped)


def keep(trajectories: Sequence[TokenTrajectory], groups: Sequence[int]) -> list[int]:
    """Rows that can be learned from: with tokens, not dropped, in a group whose rewards differ."""
    members: dict[int, list[int]] = {}
    for k, trajectory in enumerate(trajectories):
        if trajectory.pairs and not trajectory.dropped:
            members.setdefault(groups[k], []).append(k)
    mixed = [rows for _, rows in sorted(members.items()) if len({trajectories[k].reward for k in rows}) > 1]
    return [k for rows in mixed for k in rows]
