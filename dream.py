"""The imagined web: browser.py's reset and step, answered by the world model and judged by the agent itself.

    o_1 from recorded data;  (h_t, a_t) ~ pi_theta;  (r, Delta) ~ p_phi;  o_t+1 = apply(o_t, Delta);  at most T = 5 steps
    reward = the judge's verdict on stop or on a terminal page; 0 when the steps run out          (arXiv 2601.22149, section 3)

A batch is a few tasks with n dreams each: one group a start. In each group every row is, with probability `expert_fraction`, not dreamed but
the recorded expert trajectory of the same task and the same start, with reward 1, before advantages are computed; groups whose rewards
are all equal teach nothing and are dropped.

Where we differ from the paper, and why
- A dream that the world model spoils (malformed output twice over) is dropped and counted, not given reward 0: the agent is not
  punished for what the web would not have done.
- Not every start has an expert: at the laptop's few demonstrations a task a policy that dreams only where it was shown the answer already
  knows it. `demonstrated` is the share of groups whose start has one; the others start at recorded first pages, and in the middle of
  recorded failures, which a weak agent can finish where it cannot yet go the whole way.
- With `focus`, tasks whose groups all succeed or all fail are drawn less often.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import data
import lm
import policy
from browser import Obs
from data import Action, Start, Step, Trajectory
from policy import TokenTrajectory
from world_model import WorldModel


@dataclass(frozen=True)
class Config:
    """How the agent dreams."""

    tasks: int = 4
    """Groups a batch (paper: 4)."""
    group: int = 8
    """n: dreams a group (paper: 8)."""
    horizon: int = 5
    """T: steps a dream (paper: 5)."""
    expert_fraction: float = 0.5
    """Chance of each row to be replaced by the expert trajectory of its start (paper: 0.5, best near 0.4)."""
    demonstrated: float = 1.0
    """Share of the groups that start where there is an expert trajectory (paper: all)."""
    focus: bool = False
    """Draw tasks whose last groups had something to teach more often (paper: evenly). For recipes with few tasks; see draw()."""
    temperature: float = 0.7
    """Of the policy (paper: 0.7)."""
    max_new_tokens: int = 4096
    """Longest answer of the policy (paper: 16k, NNetNav's answers are of some hundreds; what is reserved here is taken from the page)."""
    world_model_tokens: int = 8192
    """Longest prediction (the authors' script)."""
    world_model_temperature: float = 0.7
    """Of the world model (the authors' script, whose top_p .9 is left out: see lm.py)."""
    judge: str = "policy"
    """Who judges: `policy` (its weights frozen at the SFT agent), `current` (its weights now) or `world_model`."""
    judge_tokens: int = 1024
    """Longest verdict."""
    judge_threshold: float = 0.0
    """A success needs log p(YES) - log p(NO) above this."""

    def __post_init__(self):
        if not 0 <= self.expert_fraction <= 1 or not 0 <= self.demonstrated <= 1:
            raise ValueError("expert_fraction and demonstrated are shares: give them a value from 0 to 1")
        if self.judge not in ("policy", "current", "world_model"):
            raise ValueError(f"judge is policy, current or world_model, not {self.judge!r}")
        if self.group < 2:
            raise ValueError("a group of one has no advantage: give it a value of at least 2")


# ---- the dreamed web -------------------------------------------------------------------------------------------------------


@dataclass
class _Page:
    """One dream as the world sees it. `history`: pages that go_back returns to; `actions`: what the judge reads."""

    start: Start
    tree: str
    history: list[str]
    actions: list[str]
    over: bool = False
    dropped: str = ""
    verdict: policy.Verdict | None = None


class Dream:
    """browser.py's reset and step over many dreamed pages at once. `judge_model` judges; counts["judge malformed"], counts["ends"] ...

    `dropped(k)` tells whether, and why, dream k must not be learned from. `verdict(k)` is what the judge wrote.
    """

    def __init__(self, world_model: WorldModel, judge_model: lm.LM, config: Config, seed: int | Sequence[int]):
        self.world_model, self.judge_model, self.config, self.seed = world_model, judge_model, config, seed
        self.pages: list[_Page] = []
        self.clock = 0
        self.counts: Counter = Counter()

    def reset(self, starts: Sequence[Start]) -> list[Obs]:
        self.pages = [_Page(start, start.page, [], list(start.previous)) for start in starts]
        return [Obs(start.goal, start.url, start.page) for start in starts]

    def step(self, actions: Sequence[Action | None]) -> tuple[list[Obs], list[float], list[bool], list[bool]]:
        """As browser.Browser.step: None idles; an action on a page that is over is an error of ours. A dream is truncated when its page
        leaves the world model no room, or when the world model failed (then it is `dropped` too)."""
        assert len(actions) == len(self.pages), f"{len(actions)} actions for {len(self.pages)} pages"
        assert not any(action and page.over for action, page in zip(actions, self.pages)), "a step after the end of a dream"
        n = len(actions)
        errors, terminated, truncated = [""] * n, [False] * n, [False] * n
        before = [page.tree for page in self.pages]
        ask = []
        for k, (action, page) in enumerate(zip(actions, self.pages)):
            if action is None:
                continue
            said = data.describe(action, page.tree)
            if action.name == "stop":
                terminated[k] = True
            elif action.name == "go_back":
                page.tree, errors[k] = (page.history.pop(), "") if page.history else (page.tree, "go_back: there is no earlier page")
            else:
                ask.append(k)
            page.actions.append(said)
        seeds = lm.row_seeds(self.seed, n)
        self.clock += 1
        previous = {k: self.pages[k].actions[-2] if len(self.pages[k].actions) > 1 else "" for k in ask}
        answers = self.world_model.predict([before[k] for k in ask], [actions[k] for k in ask], list(previous.values()), [lm.mix(seeds[k], self.clock) for k in ask]) if ask else []
        for k, answer in zip(ask, answers):
            page, errors[k] = self.pages[k], answer.error
            terminated[k], truncated[k] = answer.over, bool(answer.malformed) or answer.too_long
            page.dropped = answer.malformed
            if data.root_url(answer.tree) != data.root_url(page.tree):
                page.history.append(page.tree)
            page.tree = answer.tree
        rewards = self._judge([k for k in range(n) if terminated[k]], before)
        for k, page in enumerate(self.pages):
            page.over = page.over or terminated[k] or truncated[k]
        observations = [Obs(page.start.goal, data.root_url(page.tree), page.tree, error) for page, error in zip(self.pages, errors)]
        return observations, [rewards.get(k, 0.0) for k in range(n)], terminated, truncated

    def dropped(self, k: int) -> str:
        return self.pages[k].dropped

    def verdict(self, k: int) -> policy.Verdict | None:
        return self.pages[k].verdict

    def _judge(self, ended: list[int], before: list[str]) -> dict[int, float]:
        cases = [(self.pages[k].start.goal, self.pages[k].actions, before[k], self.pages[k].tree) for k in ended]
        verdicts = policy.judge(self.judge_model, cases, self.config.judge_tokens, self.config.judge_threshold) if cases else []
        for k, verdict in zip(ended, verdicts):
            self.pages[k].verdict = verdict
            self.counts["judged"] += 1
            self.counts["judge malformed"] += verdict.malformed
        return {k: float(verdict.success) for k, verdict in zip(ended, verdicts)}


# ---- starts and experts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expert:
    """A recorded expert window: where it starts and the steps that led from there to success."""

    start: Start
    steps: tuple[Step, ...]
    final_tree: str


def experts(demonstrations: Sequence[Trajectory], horizon: int, seed: int) -> list[Expert]:
    """The windows of the demonstrations (data.expert_windows), at most two a demonstration."""
    rng = random.Random(seed)
    return [Expert(start, tuple(steps), t.final_tree) for t in demonstrations for start, steps in data.expert_windows(t, horizon, rng=rng)]


def first_pages(trajectories: Sequence[Trajectory]) -> list[Start]:
    """The first page of every recorded trajectory, whatever became of it."""
    return [Start(t.task, t.seed, (), t.goal, t.steps[0].url, t.steps[0].tree, (), t.system) for t in trajectories if t.steps]


def later_pages(failures: Sequence[Trajectory], seed: int) -> list[Start]:
    """One page of every attempt, its second or a later one: from where somebody else went wrong the rest of the way may be in reach of an agent
    that never comes so far alone."""
    rng, starts = random.Random(seed), []
    for t in failures:
        if len(t.steps) > 1:
            step = rng.choice(t.steps[1:])
            starts.append(Start(t.task, t.seed, t.real_actions[: len(step.previous)], t.goal, step.url, step.tree, step.previous, t.system))
    return starts


def draw(rng: random.Random, experts: Sequence[Expert], others: Sequence[Start], config: Config, taught: Mapping[str, Sequence[bool]] = {}) -> list[tuple[Start, Expert | None]]:
    """config.tasks starts: a task first, evenly, then a start of it; each with its expert or None.

    With config.focus a task's chance is in proportion to (1 + t) / (1 + n), where t of its last n <= 8 groups had something to teach
    (`taught`, the newest last): of a task that always or never succeeds every group is dropped. DAPO draws until enough groups are left
    (arXiv 2503.14476, section 3.2); this costs no dream.
    """
    by_task: dict[str, tuple[list, list]] = {}
    for expert in experts:
        by_task.setdefault(expert.start.task, ([], []))[0].append((expert.start, expert))
    for start in others:
        by_task.setdefault(start.task, ([], []))[1].append((start, None))
    tasks = sorted(by_task)
    chosen = []
    if config.focus:
        last = [taught.get(task, ())[-8:] for task in tasks]
        chosen = rng.choices(tasks, [(1 + sum(groups)) / (1 + len(groups)) for groups in last], k=config.tasks)
    while len(chosen) < config.tasks:  # every task once before any twice
        chosen += rng.sample(tasks, min(len(tasks), config.tasks - len(chosen)))
    drawn = []
    for task in chosen:
        shown, other = by_task[task]
        drawn.append(rng.choice(shown if shown and (not other or rng.random() < config.demonstrated) else other))
    return drawn


# ---- groups ----------------------------------------------------------------------------------------------------------------


def grouped(starts: Sequence[tuple[Start, Expert | None]], n: int) -> tuple[list[tuple[Start, Expert | None]], list[int]]:
    """Every start n times over, and the group of each row.

    >>> grouped(["a", "b"], 2)
    (['a', 'a', 'b', 'b'], [0, 0, 1, 1])
    """
    return [start for start in starts for _ in range(n)], [group for group in range(len(starts)) for _ in range(n)]


def dream(model, world_model: WorldModel, judge_model, rows: Sequence[tuple[Start, Expert | None]], config: Config, seeds: Sequence[int]) -> list[TokenTrajectory]:
    """A trajectory for each row: the expert's, or a dream; dropped dreams are still among them. What an expert replaces is not dreamed at
    all. Nothing depends on which rows are dreamed together: several processes may each dream a share of a group."""
    trajectories = [expert_row(model, start, expert, config.expert_fraction, seed) for (start, expert), seed in zip(rows, seeds)]
    left = [k for k, one in enumerate(trajectories) if one is None]
    world = Dream(world_model, judge_model, config, [seeds[k] for k in left])
    dreams = policy.rollout(world, model, [rows[k][0] for k in left], config.horizon, config.max_new_tokens, config.temperature, [seeds[k] for k in left])
    for at, (k, one) in enumerate(zip(left, dreams)):
        one.dropped, one.verdict = world.dropped(at), world.verdict(at)
        trajectories[k] = one
    return trajectories


def expert_row(model, start: Start, expert: Expert | None, fraction: float, seed: int) -> TokenTrajectory | None:
    """With probability `fraction` the expert trajectory of a row, reward 1; None where the row is to be dreamed.

    The expert's tokens have no sampled log-probabilities: old_logp is scored with the current policy like everybody's, so its
    ratio starts at 1 and no other correction is made (facts.md, section 3).
    """
    if expert is None or random.Random(seed).random() >= fraction:
        return None
    assert expert.start.task == start.task and expert.start.page == start.page, "an expert's reward beside dreams of another start"
    pairs = [policy.step_pair(model, expert.start.goal, step, expert.start.system) for step in expert.steps]
    return TokenTrajectory(expert.start, list(expert.steps), pairs, [[] for _ in pairs], expert.final_tree, 1.0, True, expert=True)


def keep(trajectories: Sequence[TokenTrajectory], groups: Sequence[int], counts: Counter) -> list[int]:
    """Indices of what can be learned from: not dropped, with tokens, in a group whose rewards differ. Adds to counts."""
    usable = [k for k, t in enumerate(trajectories) if not t.dropped and t.pairs]
    counts["dropped dreams"] += sum(bool(t.dropped) for t in trajectories)
    kept = []
    for group in sorted(set(groups)):
        members = [k for k in usable if groups[k] == group]
        counts["groups"] += 1
        if len({trajectories[k].reward for k in members}) < 2:
            counts["dropped groups"] += 1
        else:
            kept += members
    return kept


def dump(path: str | Path, trajectories: Sequence[TokenTrajectory]) -> None:
    """A text file of dreams for people: pages, thoughts, actions, the judge's reasons, the reward."""
    with open(path, "w", encoding="utf-8") as file:
        for one in trajectories:
            file.write(f"{'=' * 100}\n{one.start.task} seed {one.start.seed} | {one.start.goal} | reward {one.reward:g}{' | EXPERT' if one.expert else ''}"
                       f"{' | truncated' if one.truncated else ''}{' | no action' if one.malformed else ''}{' | DROPPED: ' + one.dropped if one.dropped else ''}\n")
            for step in one.steps:
                file.write(f"{step.tree}\n>>> {step.thought} {step.action}{'   ERROR: ' + step.error if step.error else ''}\n")
            file.write(f"{one.final_tree}\n")
            if one.verdict:
                file.write(f"judge: {one.verdict.text} -> {'YES' if one.verdict.success else 'NO'} (margin {one.verdict.margin:.2f})\n")
