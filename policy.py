"""The agent: a turn, a rollout in any world, and how it is cloned from demonstrations.

    (h_t, a_t) ~ pi_theta( . | page_t, URL_t, goal, a_1 .. a_t-1)       a thought and an action
                                                                        (arXiv 2601.22149, section 3)

One turn is one completion, in NNetNav's template (data.py). A trajectory is several turns. All its turns
together are the one sequence y_i of GSPO (gspo.py), and each turn is scored in exactly the context that it
was sampled in.

sft.py clones it; published agents need none of that. train.py lets it dream.

Where we differ from the paper, and why
- The context of a turn is the goal, the previous actions in words and the page now. The paper writes o_1 ..
  o_t, all old pages. NNetNav's template has no old pages, and the published weights were trained on it
  (NOTES 1.2).
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import data
import lm
from data import Action, ActionError, Obs, Start, Step, Trajectory

# ---- what is handed in -------------------------------------------------------------------------------------


class Sampler(Protocol):
    """Who writes completions: lm.LM, vLLM's engine (node/engine.py), or servers behind a URL (remote.py)."""

    template: lm.Template
    """How it is talked to: prompts and completions in token ids."""
    context: float
    """The longest prompt with its answer, in tokens."""
    concurrency: int
    """How many threads may ask at once; 1: the main thread alone."""

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """A completion for each prompt, in order; see lm.sample, which calls it."""

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt. Only a judge needs it."""


class World(Protocol):
    """Where an agent acts: real pages (worlds/) or dreamed ones (dream.Dream). examples/ has one of 30 lines.
    """

    def reset(self, starts: Sequence[Start]) -> list[Obs]:
        """The first page of each start, its prefix of actions done. The trajectories before are over."""

    def step(self, actions: Sequence[Action | None]
             ) -> tuple[list[Obs | None], list[float], list[bool], list[bool]]:
        """(what is seen, rewards, terminated, truncated), an entry for each start. A page whose action is
        None idles. What the agent does wrong is an error in its Obs, and never an exception. Terminated: the
        world ended; truncated: a limit, or a failure, cut it off. None for what is seen: no answer yet; it
        comes in a later step in which the action is None."""

    @property
    def failures(self) -> list[str]:
        """Of each page what failed that is not the agent's doing (a browser that died), '' where nothing
        did. From such a trajectory nothing is learned."""


FAILED = "browser: failed"  # how TokenTrajectory.dropped begins where a real page hung or crashed

# ---- a trajectory and its tokens ---------------------------------------------------------------------------


@dataclass
class TokenTrajectory:
    """A trajectory with the tokens that it was written in."""

    start: Start
    steps: list[Step] = field(default_factory=list)
    pairs: list[lm.Pair] = field(default_factory=list)
    """(prompt_ids, completion_ids) of each turn."""
    logps: list[list[float]] = field(default_factory=list)
    """Of each turn: the sampler's log-probability of each completion token. Empty for an expert, whom nobody
    sampled."""
    final_page: str = ""
    reward: float = 0.0
    terminated: bool = False
    """Ended by stop, or by the world."""
    truncated: bool = False
    """Cut off by a limit, reward 0: never the same thing as an end."""
    malformed: bool = False
    """The agent's last text was no action. That ends the trajectory with reward 0."""
    dropped: str = ""
    """Why nothing must be learned from it, as "who: what: more": somebody could not read or imagine a page
    (dream.py). Where an agent is measured (evaluate.py) a page that it could not read counts all the same,
    with reward 0, and one that failed (FAILED) does not."""
    expert: bool = False
    real: bool = False
    """Its group is done on real pages to learn from them, and the page pays (dream.py)."""

    # Of a dream only (dream.py).
    answers: list = field(default_factory=list)
    """What the world model answered: its world_model.Prediction to each action that it was asked about, else
    None."""
    verdict: object = None
    """The judge.Verdict on it, if it was judged."""

    @property
    def failed(self) -> bool:
        """The browser failed, and not the agent."""
        return self.dropped.startswith(FAILED)

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated or self.malformed or bool(self.dropped)

    @property
    def past(self) -> tuple[str, ...]:
        """All actions so far in words, those before the start included: what the next prompt lists."""
        return self.steps[-1].past if self.steps else self.start.previous


# ---- acting ------------------------------------------------------------------------------------------------


def turn_prompt(model: lm.LM, goal: str, page: str, previous: tuple[str, ...], system: str = "") -> list[int]:
    """Token ids of what the agent reads before one turn."""
    return model.template.prompt_ids(data.policy_messages(goal, data.root_url(page), page, previous, system))


def rollout(world: World, model: Sampler, starts: Sequence[Start], horizon: int, max_new_tokens: int,
            temperature: float, seed: int | Sequence[int],
            ended: Callable[[int, TokenTrajectory], tuple[Start, int] | None] | None = None,
            turn: Callable[..., list[Action | None]] | None = None) -> list[TokenTrajectory]:
    """One trajectory from each start, side by side, in any World.

    This code does not know whether a browser or a dream answers. A trajectory ends by stop, by the world, by
    a text that is no action (reward 0), after `horizon` turns (truncated, reward 0), or on a page that does
    not fit the agent's context (dropped, reward 0). Temperature 0 is greedy. `seed`: one number for all, or
    one for each trajectory.

    A world may take its time: where step() gives None for what is seen, that page has not answered its action
    yet, and answers in a later step() in which the action is None. The other trajectories go on meanwhile.
    The seed of a turn is made of the trajectory's seed and its own number of turns. So who waits for whom
    changes which turns are sampled in one batch, and nothing else.

    `ended` is called with (number, trajectory) as soon as one is over, while others go on. Where it returns
    another (start, seed), that begins in its page, under its number: the world is given the start in an
    action's place. `turn`: another way to choose an action than act(), called alike (rivals/lookahead.py).
    """
    turn = turn or act
    seeds = list(lm.row_seeds(seed, len(starts)))
    seen = list(world.reset(starts))  # one browser.Obs a trajectory
    # The goal of a real page is known only now. The goal of a dreamed page is what it was.
    trajectories = [TokenTrajectory(replace(start, goal=obs.goal)) for start, obs in zip(starts, seen)]
    going, waiting, begun = list(range(len(starts))), [], {}  # begun: pages that begin another trajectory
    ready = [k for k in going if horizon > 0]  # for the agent; those of `waiting` are for the world
    while ready or waiting or begun:
        turn_seeds = [lm.mix(seeds[k], len(trajectory.pairs)) for k, trajectory in enumerate(trajectories)]
        actions = turn(model, trajectories, seen, ready, max_new_tokens, temperature, turn_seeds)
        actions = [trajectories[k].start if k in begun else action for k, action in enumerate(actions)]
        waiting = [k for k in range(len(starts)) if k in waiting or actions[k] is not None]
        answers, rewards, terminated, truncated = world.step(actions) if waiting else ([], [], [], [])
        answered = [k for k in waiting if answers[k] is not None]
        waiting = [k for k in waiting if answers[k] is None]
        for k in answered:
            seen[k], trajectory = answers[k], trajectories[k]
            if not trajectory.steps:  # its first page
                trajectory.start = replace(trajectory.start, goal=seen[k].goal)
                continue
            trajectory.steps[-1].error, trajectory.final_page = seen[k].error, seen[k].page
            trajectory.reward = rewards[k]
            trajectory.terminated, trajectory.truncated = terminated[k], truncated[k]
        ready = [k for k in answered if not trajectories[k].over and len(trajectories[k].pairs) < horizon]
        begun = _settle(trajectories, going, ready + waiting, ended)
        for k, (begins, seeds[k]) in begun.items():
            trajectories[k] = TokenTrajectory(begins)
        going = [k for k in going if k in ready or k in waiting or k in begun]
    _settle(trajectories, going, [], ended)
    return trajectories


def rollout_on_pages(web, model: lm.LM, starts: Sequence[Start], horizon: int, max_new_tokens: int,
                     temperature: float, seed: int | Sequence[int],
                     turn: Callable[..., list[Action | None]] | None = None) -> list[TokenTrajectory]:
    """rollout() where an agent is measured on real pages. A try whose page hung or crashed is made once more,
    with the same seed and on a new page. Where that fails too it is dropped, as "browser: failed: ...": a
    browser's failure is never the agent's. A world without `failures` has none."""
    seeds = lm.row_seeds(seed, len(starts))
    played = rollout(web, model, starts, horizon, max_new_tokens, temperature, seeds, turn=turn)
    if again := [k for k, failure in enumerate(getattr(web, "failures", ())) if failure]:
        once_more = rollout(web, model, [starts[k] for k in again], horizon, max_new_tokens, temperature,
                            [seeds[k] for k in again], turn=turn)
        for k, trajectory, failure in zip(again, once_more, web.failures, strict=True):
            trajectory.dropped = f"{FAILED}: {failure}" if failure else trajectory.dropped
            played[k] = trajectory
    return played


def _settle(trajectories: Sequence[TokenTrajectory], going: Sequence[int], still: Sequence[int],
            ended: Callable[..., tuple[Start, int] | None] | None) -> dict[int, tuple[Start, int]]:
    """End those of `going` that are not in `still`. Returns what their pages begin now, where `ended` says
    so."""
    begun = {}
    for k in going:
        if k not in still:
            trajectory = trajectories[k]
            trajectory.truncated = trajectory.truncated or not trajectory.over  # out of turns
            trajectory.reward = trajectory.reward if trajectory.terminated else 0.0
            if ended and (another := ended(k, trajectory)):
                begun[k] = another
    return begun


def act(model: lm.LM, trajectories: Sequence[TokenTrajectory], seen: Sequence, ready: Sequence[int],
        max_new_tokens: int, temperature: float, seeds: Sequence[int]) -> list[Action | None]:
    """One turn of every trajectory in `ready`, in one batch. Writes tokens and steps into the trajectories.

    Returns an action for each trajectory. It is None for those that are not ready, whose page does not fit
    the model's context (dropped: the agent did not choose the length of a page), or whose text is no action
    or was cut off (malformed, reward 0: its own doing, and nothing else keeps an agent from rambling).
    """
    prompts = prompts_of(model, trajectories, seen, ready, max_new_tokens)
    of_prompts = [seeds[k] for k in prompts]
    samples = lm.sample(model, list(prompts.values()), max_new_tokens, temperature, of_prompts)
    actions: list[Action | None] = [None] * len(trajectories)
    for (k, prompt), sample in zip(prompts.items(), samples):
        actions[k] = write(trajectories[k], seen[k], prompt, sample)
    return actions


def prompts_of(model: lm.LM, trajectories: Sequence[TokenTrajectory], seen: Sequence, ready: Sequence[int],
               max_new_tokens: int) -> dict[int, list[int]]:
    """What the agent reads before its next turn, of every trajectory in `ready` whose page fits. The others
    are dropped."""
    prompts = {}
    for k in ready:
        trajectory, page = trajectories[k], seen[k].page
        prompt = turn_prompt(model, trajectory.start.goal, page, trajectory.past, trajectory.start.system)
        if len(prompt) + max_new_tokens > model.context:
            trajectory.dropped = f"policy: too long: a prompt of {len(prompt)} tokens"
            trajectory.final_page = page
        else:
            prompts[k] = prompt
    return prompts


def read(sample: lm.Sample) -> tuple[str, Action]:
    """(thought, action) of a turn. Raises ActionError for a text that is no action, or was cut off."""
    if sample.truncated:
        raise ActionError("the answer was cut off")
    return data.parse_completion(sample.text)


def write(trajectory: TokenTrajectory, seen, prompt: list[int], sample: lm.Sample) -> Action | None:
    """Note a turn: its tokens, and its step. Returns its action, None where it is malformed."""
    trajectory.pairs.append((prompt, sample.ids))  # malformed text too: it is learned from, with reward 0
    trajectory.logps.append(sample.logps)
    try:
        thought, action = read(sample)
    except ActionError:
        trajectory.malformed, trajectory.final_page = True, seen.page
        return None
    trajectory.steps.append(Step(seen.url, seen.page, thought, action, trajectory.past))
    return action


# ---- cloning -----------------------------------------------------------------------------------------------


def demonstrations(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """`count` successes of every task, drawn with `seed`; all of them when count is 0."""
    return draw(successes(trajectories), count, seed)


def successes(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if t.reward == 1 and t.terminated]


def draw(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """`count` trajectories of every task, task by task; all of them, in random order, when count is 0."""
    by_task = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task].append(trajectory)
    drawn = []
    for task in sorted(by_task):
        random.Random(f"{seed} {task}").shuffle(by_task[task])
        drawn += by_task[task][: count or None]
    return drawn


def drawn(config) -> dict:
    """Which demonstrations a model was made of, as its training.json says it. 0 a task are all of them, and
    then no seed chose any."""
    return {"demonstrations_a_task": config.demonstrations,
            "demonstrations_seed": config.demonstrations_seed if config.demonstrations else 0}


def check_drawn(folders: dict[str, str], config=None) -> None:
    """Raise ValueError where models that meet were made of different demonstrations: in `folders`, {who:
    folder}, and where `config` is given, those that its --demonstrations and --demonstrations-seed say. Of a
    folder without training.json (a base, a published model) nothing is known, and nothing is said."""
    told = {"this command": drawn(config)} if config else {}
    for who, folder in folders.items():
        file = Path(folder or "nowhere") / "training.json"  # an agent behind a URL has no folder
        if file.exists():
            told[f"{who} {folder}"] = _told(file, who)
    said = {who: f"{one['demonstrations_a_task']} a task, drawn with seed {one['demonstrations_seed']}"
            if one["demonstrations_a_task"] else "all" for who, one in told.items()}
    if len(set(said.values())) > 1:
        raise ValueError("these were made of different demonstrations: "
                         + "; ".join(f"{who}: {which}" for who, which in said.items())
                         + ". Give all programs the same --demonstrations and --demonstrations-seed")


def _told(file: Path, who: str) -> dict:
    """What drawn() wrote into a training.json."""
    try:
        told = json.loads(file.read_text())
        return {name: int(told[name]) for name in ("demonstrations_a_task", "demonstrations_seed")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} does not say which demonstrations this {who} was made of ({error!r}): older code wrote "
            'none. Make it again; or, where you know, write "demonstrations_a_task": 2 and '
            '"demonstrations_seed": 0 into that file (0 a task: all)') from error


def step_pair(model: lm.LM, goal: str, step: Step, system: str = "") -> lm.Pair:
    """A recorded step in tokens: what the policy would have read, and written."""
    return (turn_prompt(model, goal, step.page, step.previous, system),
            model.template.completion_ids(data.completion(step.thought, step.action)))


def examples(model: lm.LM, trajectories: Sequence[Trajectory], counts: Counter) -> list[lm.Pair]:
    """(prompt, completion) of every step that fits the context and that the browser did not refuse. Adds to
    `counts`."""
    pairs = []
    for trajectory in trajectories:
        for step in trajectory.steps:
            prompt, completion = step_pair(model, trajectory.goal, step, trajectory.system)
            counts["recorded steps"] += 1
            if step.error or len(prompt) + len(completion) > model.context:
                counts["dropped: refused or too long"] += 1
            else:
                pairs.append((prompt, completion))
    return pairs
