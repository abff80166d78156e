"""What the small agent is taught beside the demonstrations, and the laptop's settings.

The paper's agent starts from Llama-3.1-8B, which finds an element by its name and can say whether two strings
are the same. An agent of 3 M parameters learns that here, by three kinds of examples of the same recorded
pages:

    renamed copies   the demonstrations again with other words (rename.py), so that it copies off the page
    grounding        one-step goals that name an element of a recorded page: `Click "Submit".`
    judging          what was asked beside what was done, then the verdict: the completions of judge.py, which
                     code writes (reasons.py)

All is learned in two lessons: everything together, then at a lower rate acting once more, with a share of the
judging (`again`).
"""

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import a11y
import data
import dream
import finetune
import judge
import lm
import policy
import recipe
from data import Action, Step, Trajectory
from tiny import reasons
from tiny.rename import renamed

# ---- the laptop's settings ---------------------------------------------------------------------------------

RECORDED = "tiny/pages.jsonl.gz"  # of miniwob.TASKS
SFT = finetune.FineTune(epochs=1, lr=1e-3, floor=0.0, tokens=1536)


@dataclass(frozen=True)
class Policy(recipe.PolicySFT):
    """Supervised fine-tuning of the laptop's policy, which is also its judge."""

    base: str = "tiny/base"
    trajectories: str = RECORDED
    out: str = "runs/tiny/sft"
    demonstrations: int = 2
    context: int = 1024
    renamed: int = 8
    """Copies of each demonstration with its own words exchanged (tiny/rename.py)."""
    grounding: int = 1000
    """Examples of finding an element by its name, made from that many pages of failures."""
    judged: int = 60
    """Failures of each task that the judge learns from, beside the demonstrations. 0 takes all. -1: nothing
    is learned of judging (the plain baseline: a clone and no more)."""
    judge_copies: int = 2
    """Wrong versions of each judged success, made by changing what its goal asks for."""
    # Adam moves the embedding of a rare piece of a word as far as any weight, though nothing pulls at it but
    # that it is not the next one. At the full rate the pieces grow alike, and one is written for another
    # (NOTES 11.16). At none the tokens of our prompts that the base has never seen cannot be told apart.
    # Of 1, 2 and 3 passes three had the best mean of three seeds on dev pages, by little (docs/LOG.md).
    sft: finetune.FineTune = replace(SFT, epochs=3, embeddings=0.1)
    lr_again: float = 3e-4
    """Peak of the learning rate in the second lesson."""
    renamed_again: int = 48
    """Copies in the second lesson, with other words than those of the first."""
    judged_again: float = 0.25
    """Share of the judging that the second lesson repeats."""
    prepared: ClassVar[bool] = False


@dataclass(frozen=True)
class WorldModel(recipe.WorldModelSFT):
    """Fine-tuning of the laptop's world model."""

    base: str = "tiny/base"
    transitions: str = RECORDED
    out: str = "runs/tiny/world_model"
    context: int = 1024
    lora_rank: int = 0
    per_task: int = 60
    """Recorded trajectories of each task to learn from (with `demonstrations`: failures); 0 takes all."""
    demonstrations: int = 2
    """Learn from failures, and of the successes only from this many of each task: those that the agent is
    cloned from (sft.py policy). 0: learn from whatever was recorded."""
    demonstrations_seed: int = 0
    """Which demonstrations: the number that sft.py policy was given."""
    renamed: int = 2
    """Copies of each trajectory with its own words exchanged (tiny/rename.py)."""
    sft: finetune.FineTune = SFT  # embeddings too: the dots of a password are new to the base (NOTES 11.16)
    prepared: ClassVar[bool] = False


TRAIN = recipe.Train(
    policy="runs/tiny/sft", world_model="runs/tiny/world_model", out="runs/tiny/dream",
    trajectories=RECORDED, demonstrations=2, updates=80,
    # 3 M parameters, not 8 B: a hundred times the paper's rate. With 64 dreams a batch it took back what they
    # teach; 256 bear it (docs/LOG.md).
    lr=1e-4,
    # A laptop trajectory has about 40 tokens where the paper's has thousands, and s_i is a mean over them.
    # Its noise, and what one step moves it by, are that much larger. At 3e-4 nearly every trajectory would be
    # clipped after the first minibatch (docs/LOG.md).
    eps_low=0.03, eps_high=0.04,
    trained_share=0.5,  # kept what dreams gain, and lost half as much where they lose (docs/LOG.md)
    tokens=2048, context=1024, world_model_context=1024, judge_context=1024, evaluate_every=20,
    evaluate_horizon=14,  # the longest pages take nine or ten steps
    sampler="transformers", compute="auto",
    # Most groups succeed or fail as a whole, so many are dreamed, at a temperature that parts them. The
    # judge is wrong in a third of its YES, more often near the line. What it is not sure of is left out:
    # without that (and with a worse grammar) 80 updates gained 3.8 points in the place of ten (docs/LOG.md).
    dreaming=dream.Config(tasks=32, group=8, horizon=5, expert_fraction=0.5, demonstrated=0.3, focus=True,
                          temperature=1.0, max_new_tokens=64, world_model_tokens=160,
                          world_model_temperature=0.5, judge_tokens=320, judge_unsure=2.0),
)

# ---- what is learned ---------------------------------------------------------------------------------------


def policy_lessons(config: Policy, model: lm.LM, recorded: Sequence[Trajectory],
                   counts: Counter) -> list[tuple[list[lm.Pair], finetune.FineTune]]:
    """What the agent learns, lesson by lesson: (examples, settings). Adds to `counts`."""
    shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
    counts["demonstrations"] += len(shown)
    cloned = policy.examples(model, shown, counts)
    acting, judging = taught(config, model, recorded, shown, renamed(shown, config.renamed, config.seed),
                             counts)
    return [(cloned + acting + judging, config.sft), again(config, model, recorded, shown, counts)]


def again(config: Policy, model: lm.LM, recorded: Sequence[Trajectory], shown: Sequence[Trajectory],
          counts: Counter) -> tuple[list[lm.Pair], finetune.FineTune]:
    """(examples, settings) of the second lesson: acting once more, by copies with other words and at a lower
    rate, with a share of the judging. Adds to `counts`.

    Other words at a lower rate raise the agent, and the clone that learns nothing of judging (docs/LOG.md).
    The share is there so that judging is not forgotten; and only here does the judge meet agents that stop
    early. Put into the first lesson, these examples took 16 points from seed 0's agent.
    """
    copies = renamed(shown, config.renamed + config.renamed_again, config.seed)[config.renamed * len(shown) :]
    found: Counter = Counter()
    acting, judging = taught(config, model, recorded, shown, copies, found, early=True)
    repeated = random.Random(config.seed).sample(judging, round(config.judged_again * len(judging)))
    pairs = policy.examples(model, shown, Counter()) + acting + repeated
    counts["second lesson"] = len(pairs)
    counts.update({f"second lesson, {what}": count for what, count in found.items() if "judge: " in what})
    return pairs, replace(config.sft, lr=config.lr_again)


def taught(config: Policy, model: lm.LM, recorded: Sequence[Trajectory], shown: Sequence[Trajectory],
           copies: Sequence[Trajectory], counts: Counter,
           early: bool = False) -> tuple[list[lm.Pair], list[lm.Pair]]:
    """(acting, judging): examples of what a lesson teaches beside `shown`, by these renamed copies; judging
    by as many of them as config.renamed says, and with `early` by agents that stop early. Adds to `counts`.
    """
    failed = failures(recorded, config.judged, config.demonstrations_seed) if config.judged >= 0 else []
    unrewarded = [trajectory for trajectory in recorded if trajectory.reward < 1]
    grounding = grounding_examples(model, unrewarded, config.grounding, config.seed)
    counts.update({"judged failures": len(failed), "grounding": len(grounding)})

    judged = [*shown, *copies[: config.renamed * len(shown)], *failed]
    judging = [] if config.judged < 0 else judge_examples(
        model, judged, config.judge_copies, config.seed, counts, early)
    return policy.examples(model, copies, counts) + grounding, judging


def chosen(config: WorldModel, recorded: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories whose transitions the world model learns, with their renamed copies behind them.

    With config.demonstrations these are failures, and the few successes that the agent is cloned from. Only
    those show what a success does to a page, so they are repeated until a task has about 16.
    """
    if config.demonstrations:
        failed = [trajectory for trajectory in recorded if trajectory.reward < 1]
        shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
        kept = first_of_each_task(failed, config.per_task) + shown * max(1, 16 // config.demonstrations)
    else:
        kept = first_of_each_task(recorded, config.per_task)
    return kept + renamed(kept, config.renamed, config.sft.seed)


def failures(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """`count` failures of every task that ended by themselves; all of them when count is 0."""
    return finetune.draw([t for t in trajectories if t.reward == 0 and t.terminated], count, seed)


def first_of_each_task(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """The first `count` trajectories of every task, in file order; all of them when count is 0."""
    seen: Counter = Counter()
    kept = []
    for trajectory in trajectories:
        seen[trajectory.task] += 1
        if not count or seen[trajectory.task] <= count:
            kept.append(trajectory)
    return kept


# ---- grounding ---------------------------------------------------------------------------------------------


def grounding_examples(model: lm.LM, trajectories: Sequence[Trajectory], count: int,
                       seed: int) -> list[lm.Pair]:
    """(prompt, completion) of goals that name elements of up to `count` recorded pages: `Click "Submit".`

    They need neither a reward nor a demonstration, as NNetNav's labels in hindsight need none (arXiv
    2410.02907): the pages are there, and the goal is written afterwards. A model that was pretrained on the
    web needs no such goals. Ours is weak at looking up ids (docs/LOG.md).
    """
    rng, pairs = random.Random(seed), []
    pages = sorted({step.page for trajectory in trajectories for step in trajectory.steps})
    for page in rng.sample(pages, min(count, len(pages))):
        made = _grounding_step(rng, page)
        if made is not None:
            prompt, completion = policy.step_pair(model, *made)
            if len(prompt) + len(completion) <= model.context:
                pairs.append((prompt, completion))
    return pairs


def _grounding_step(rng: random.Random, page: str) -> tuple[str, Step] | None:
    """(goal, the next step towards it) for elements whose labels stand once on the page, if there are any:
    for one, or for up to four in turn of which some are done.

    >>> page = "[1] checkbox 'tea', checked='false'\\n[2] button 'No'\\n[3] button 'No'\\n[4] button 'Go'"
    >>> goal, step = _grounding_step(random.Random(3), page)
    >>> goal, step.previous, str(step.action)
    ('Click tea, Go.', ('click [1] where [1] is tea',), 'click [4]')
    >>> step.page.split("\\n")[0]
    "[1] checkbox 'tea', checked='true'"
    """
    nodes = {node.bid: node for node in a11y.parse(page) if node.bid and node.role != "LabelText"}
    labels = {bid: data.label(page, bid) for bid in nodes}
    times = Counter(labels.values())
    unique = [bid for bid, label in labels.items() if times[label] == 1]
    if not unique:
        return None
    bid, past = rng.choice(unique), []
    if nodes[bid].role == "textbox":
        action = Action("type", bid, rng.choice(sorted(labels.values())), enter=False)
        goal = f'Type "{action.text}" into "{labels[bid]}".'
    else:
        more = [other for other in unique if other != bid and nodes[other].role != "textbox"]
        wanted = [bid, *rng.sample(more, min(len(more), rng.choice((0, 0, 1, 2, 3))))]
        quote = rng.choice(('"', ""))
        goal = f"Click {', '.join(quote + labels[one] + quote for one in wanted)}."
        for one in wanted[: rng.randrange(len(wanted))]:
            past.append(data.describe(Action("click", one), page))
            page = re.sub(rf"(\[{one}\] (?:checkbox|radio) .*checked=)'false'", r"\1'true'", page)
        action = Action("click", wanted[len(past)])
    return goal, Step(data.root_url(page), page, data.write_thought(goal, page, action), action, tuple(past))


# ---- judging: the examples ---------------------------------------------------------------------------------


def judge_examples(model: lm.LM, trajectories: Sequence[Trajectory], copies: int, seed: int, counts: Counter,
                   early: bool = False, ending: Callable = judge.ending) -> list[lm.Pair]:
    """(prompt, completion) of the judge for every goal of every trajectory; with `early`, also for every
    success stopped early. `ending`: what it is shown (as judge.ending). Adds to `counts`.

    No failure is made up without a fault: the same words would then stand before a yes and before a no. (A
    recorded failure stays: there the page said no. An agent that stopped early stays: the stop that the judge
    reads is what is wrong.) A success with a fault is left out: it would teach to overlook faults.
    """
    rng, pairs, moot = random.Random(seed), [], moot_kinds(trajectories)
    for recorded in trajectories:
        kinds = moot[recorded.task]
        cases = [(recorded, goal, success) for goal, success in judged_goals(rng, recorded, copies, kinds)]
        if recorded.reward and len(cases) == 1:  # of no other goal could one be made
            slips = [slip for _ in range(copies) if (slip := slipped(rng, recorded))]
            cases += [(slip, slip.goal, False) for slip in slips if reasons.faults(slip.goal, slip, kinds)]
        if early and (stopped := stopped_early(rng, recorded)):
            cases.append((stopped, stopped.goal, False))
        for trajectory, goal, success in cases:
            if success and reasons.faults(goal, trajectory, kinds):
                counts["judge: a success with a fault"] += 1
                continue
            # As it will be asked: where both pages leave no room for a verdict, by what changed.
            (prompt,), _ = judge.prompts_of(model, [(goal, *ending(trajectory))], TRAIN.dreaming.judge_tokens)
            said = reasons.write_verdict(goal, trajectory.steps, trajectory.final_page, success, kinds)
            completion = model.template.completion_ids(said)
            if len(prompt) + len(completion) <= model.context:
                pairs.append((prompt, completion))
                counts[f"judge: {'YES' if success else 'NO'}"] += 1
    return pairs


def moot_kinds(trajectories: Sequence[Trajectory]) -> dict[str, set[str]]:
    """{task: kinds of clause (reasons.kind_of) that find fault with half of its successes; "different" and
    "none" with more than half}. What is wrong there is no reason to say no: a goal to press an icon does not
    name it, and "extra" would stand before every yes. But what was asked for and not done is luck in one of
    two demonstrations (all numbers were odd, so nobody pressed Even), and would be a fault no longer.
    """
    won, found = Counter(t.task for t in trajectories if t.reward), Counter()
    for t in trajectories:
        if t.reward:
            kinds = {reasons.kind_of(said) for said in reasons.faults(t.goal, t)}
            found.update((t.task, kind) for kind in kinds)
    return {t.task: {kind for (task, kind), count in found.items()
                     if task == t.task and 2 * count >= won[task] + (kind in ("different", "none"))}
            for t in trajectories}


def judged_goals(rng: random.Random, trajectory: Trajectory, copies: int,
                 moot: Collection[str] = ()) -> list[tuple[str, bool]]:
    """The goals for which one trajectory is judged, and whether it reached each.

    Its own goal has the environment's verdict. A failure has also reached another goal, if one can be made.
    For each goal that was reached there are up to `copies` that were not, and of which the reasons find a
    fault that is not `moot`. Without those a judge learns what a finished form looks like, not whether the
    right thing stands in it: it said yes to 20 of 20 wrong forms (NOTES 11.5).

        asked for "tea", typed "tea"     "tea" YES, "tfa" NO, "te0" NO
        asked for "tea", typed "milk"    "tea" NO, "milk" YES, "mplk" NO, "milM" NO
    """
    goals = [(trajectory.goal, bool(trajectory.reward))]
    if not trajectory.reward and (reached := hindsight_goal(trajectory, moot)):
        goals.append((reached, True))
    wrong = []
    for goal, success in goals:
        for _ in range(copies if success else 0):
            drawn = [other_goal(rng, replace(trajectory, goal=goal)) for _ in range(4)]
            tells = [(other, False) for other in drawn if other and reasons.faults(other, trajectory, moot)]
            wrong += tells[:1]
    return goals + wrong


def stopped_early(rng: random.Random, trajectory: Trajectory) -> Trajectory | None:
    """A success whose agent stops before its last step, and says what it had to type: a failure. None for
    other trajectories, and where stop itself was asked for.

    Recordings never show it with the right words, and agents do it. A judge that had not seen it called `stop
    [Korean]` right where Korean had to be typed and sent, and dreams then taught just that (docs/LOG.md).

    >>> page = "[1] textbox ''\\n[2] button 'Send'"
    >>> actions = [Action("type", "1", "tea"), Action("click", "2")]
    >>> steps = [Step("", page, "", action, ()) for action in actions]
    >>> recorded = Trajectory("t", 0, 'Send "tea".', steps, page, 1, True, False, "", ())
    >>> [str(step.action) for step in stopped_early(random.Random(1), recorded).steps]
    ['stop [tea]']
    """
    if not trajectory.reward or trajectory.steps[-1].action.name == "stop":
        return None
    k = rng.randrange(len(trajectory.steps))
    typed = [step.action.text for step in trajectory.steps if step.action.name == "type" and not step.error]
    stop = replace(trajectory.steps[k], action=Action("stop", text=rng.choice(typed or [""])), error="")
    return replace(trajectory, steps=[*trajectory.steps[:k], stop], final_page=stop.page, reward=0)


def slipped(rng: random.Random, trajectory: Trajectory) -> Trajectory | None:
    """A success in which one typed text has another letter, on the pages behind it too: a failure. None where
    nothing was typed, and where the box made something else of it. It stands for other goals where a goal
    names nothing ("Copy the text").

    >>> page = "[1] textbox '' value='tea'"
    >>> step = Step("", "[1] textbox ''", "", Action("type", "1", "tea"), ())
    >>> made = slipped(random.Random(0), Trajectory("t", 0, "Copy it.", [step], page, 1, True, False, "", ()))
    >>> str(made.steps[0].action), made.final_page, made.reward
    ('type [1] [tca] [1]', "[1] textbox '' value='tca'", 0)
    """
    typed = [k for k, step in enumerate(trajectory.steps)
             if step.action.name == "type" and not step.error and step.action.text]
    if not typed:
        return None
    at = rng.choice(typed)
    text, box = trajectory.steps[at].action.text, f"[{trajectory.steps[at].action.bid}] "
    k, letter = rng.randrange(len(text)), rng.choice(string.ascii_letters + string.digits)
    other = text[:k] + letter + text[k + 1 :]

    def behind(page: str) -> str:  # in that box alone: what is to be copied stands beside it
        return "\n".join(line.replace(f"value={text!r}", f"value={other!r}") if box in line else line
                         for line in page.split("\n"))

    pages = [*(step.page for step in trajectory.steps[at + 1 :]), trajectory.final_page]
    if any(behind(page) == page for page in (pages[0], pages[-1])):
        return None  # the box made something else of it
    slip = replace(trajectory.steps[at], action=replace(trajectory.steps[at].action, text=other))
    steps = [*trajectory.steps[:at], slip]
    for step in trajectory.steps[at + 1 :]:
        steps.append(replace(step, page=behind(step.page), previous=steps[-1].past))
    return replace(trajectory, steps=steps, final_page=behind(trajectory.final_page), reward=0)


# ---- judging: other goals for the same trajectory ----------------------------------------------------------

Swap = tuple[str, str]  # (what the goal says, what it could say instead)


def _pressed_last(trajectory: Trajectory) -> str:
    """What is pressed last (Submit). The goal may name it, but it is not what the goal asks for."""
    return data.label(trajectory.steps[-1].page, trajectory.steps[-1].action.bid)


def other_goal(rng: random.Random, trajectory: Trajectory) -> str | None:
    """The goal with one thing replaced that it asks for; None where there is none, or the draw is the same.

    >>> page = "[1] radio 'tea'\\n[2] radio 'milk'\\n[3] button 'Send'"
    >>> steps = [Step("", page, "", Action("click", "1"), ()), Step("", page, "", Action("click", "3"), ())]
    >>> recorded = Trajectory("t", 0, "Select tea and press Send.", steps, page, 1, True, False, "", ())
    >>> other_goal(random.Random(0), recorded)
    'Select milk and press Send.'
    """
    goal = trajectory.goal
    swaps = (_letter_swaps(rng, goal) + _number_swaps(rng, goal) + _name_swaps(rng, trajectory)
             + _place_swaps(rng, trajectory) + _count_swaps(rng, trajectory))
    if not swaps:
        return None
    old, new = rng.choice(swaps)
    other = re.sub(reasons.whole(old), lambda _: new, goal)
    return other if other != goal else None


def _letter_swaps(rng: random.Random, goal: str) -> list[Swap]:
    """Every quoted text with one letter changed. What quite another text looks like, failures show.

    >>> _letter_swaps(random.Random(1), 'Type "tea".')
    [('"tea"', '"Kea"')]
    """
    swaps = []
    for text in re.findall(r'"([^"]+)"', goal):
        k, letter = rng.randrange(len(text)), rng.choice(string.ascii_letters + string.digits)
        swaps.append((f'"{text}"', f'"{text[:k] + letter + text[k + 1 :]}"'))
    return swaps


def _numbers(goal: str) -> list[str]:
    """The numbers and times of a goal outside of quotes."""
    return re.findall(reasons.NUMBER, reasons.outside_quotes(goal))


def _number_swaps(rng: random.Random, goal: str) -> list[Swap]:
    """Every number and time outside of quotes, with one thing about it exchanged: a digit of a long number;
    hours or minutes or the half of the day; a short number whole.

    >>> rng = random.Random(3)
    >>> [_number_swaps(rng, goal) for goal in ("At 3:35 PM.", "At 3:35 PM.", "Take -7.", "Take 238928.")]
    [[('3:35 PM', '10:35 PM')], [('3:35 PM', '3:35 AM')], [('-7', '-6')], [('238928', '238929')]]
    """
    swaps = []
    for number in _numbers(goal):
        parts = list(re.finditer(r"\d+|[AP](?=M)", number))
        if not parts:
            continue
        part = rng.choice(parts)
        if part[0] in "AP":
            other = "P" if part[0] == "A" else "A"
        elif len(part[0]) > 2:
            k = rng.randrange(len(part[0]))
            other = part[0][:k] + rng.choice(string.digits) + part[0][k + 1 :]
        else:
            minutes = number[: part.start()].endswith(":")
            other = f"{rng.randrange(60):02d}" if minutes else str(rng.randint(1, 12))
        swaps.append((number, number[: part.start()] + other + number[part.end() :]))
    return swaps


def _name_swaps(rng: random.Random, trajectory: Trajectory) -> list[Swap]:
    """Every element of the first page that the goal names, and another of the same kind on that page."""
    goal, last, swaps = trajectory.goal, _pressed_last(trajectory), []
    nodes = [node for node in a11y.parse(trajectory.steps[0].page) if node.bid and node.name]
    named = [node.name for node in nodes if node.name in goal]
    taken = {name for name in named if not any(name != longer and name in longer for longer in named)}
    for k, node in enumerate(nodes):
        part = any(node.name != name and node.name in name for name in named)  # the "tea" of "green tea"
        if part or node.name == last or not re.search(reasons.whole(node.name), goal):
            continue
        # In a table a label may only become another label: every second cell.
        alike = [other.name for j, other in enumerate(nodes) if other.role == node.role
                 and other.name not in taken and (node.role != "cell" or (j - k) % 2 == 0)]
        if alike:
            swaps.append((node.name, rng.choice(alike)))
    return swaps


def _place_swaps(rng: random.Random, trajectory: Trajectory) -> list[Swap]:
    """The text by which something stands that the goal asks for, and another such text of the last page."""
    page, swaps = trajectory.steps[-1].page, []
    for asked in reasons.places_asked(trajectory.goal, page):
        others = [text for text in reasons.texts_beside(page) if text != asked]
        swaps += [_place_swap(trajectory.goal, asked, rng.choice(others))] if others else []
    return swaps


def _place_swap(goal: str, asked: str, other: str) -> Swap:
    """One text by which something stands for another, as the goal writes it: "phone" for "Address:"."""
    said = re.search(reasons.whole(asked.strip(":")), goal, re.IGNORECASE)
    assert said, "places_asked found it"
    other = other.strip(":")
    return said[0], other.lower() if said[0].islower() else other


def _count_swaps(rng: random.Random, trajectory: Trajectory) -> list[Swap]:
    """The places of boxes that the goal counts, and the seconds that it waits, each with another.

    >>> step = Step("", "[1] radio ''\\n[2] radio ''", "", Action("click", "2"), ())
    >>> goal = "Check the 2nd radio button and wait 2 seconds."
    >>> _count_swaps(random.Random(0), Trajectory("t", 0, goal, [step], "", 1, True, False, "", ()))
    [('2nd radio', '1st radio'), ('2 seconds', '3 seconds')]
    """
    goal, nodes = trajectory.goal, a11y.parse(trajectory.steps[-1].page)
    swaps = []
    for place, role in re.findall(reasons.COUNTED, goal):
        count = sum(node.role == role and bool(node.bid) for node in nodes)
        others = [other for k in range(1, count + 1) if (other := reasons.ordinal(k)) != place]
        swaps += [(f"{place} {role}", f"{rng.choice(others)} {role}")] if others else []
    for wait in re.finditer(reasons.SECONDS, goal):
        other = rng.choice([n for n in range(1, 4) if str(n) != wait[1]])
        swaps.append((wait[0], f"{other} seconds"))
    return swaps


def hindsight_goal(trajectory: Trajectory, moot: Collection[str] = ()) -> str | None:
    """A goal that this failure did reach: its own, with what was not done exchanged for what was done
    instead. None where one goal cannot be made of the other (nothing was submitted, a box was left empty), or
    where the agent stopped with something else than what that goal asks for.

    NNetNav labels its demonstrations so (arXiv 2410.02907). Here only the judge learns from it: the other
    successes are a handful, and it called most of what is unlike those a failure (docs/LOG.md). Code says
    that the goal is reached, by reasons.faults; no environment did. One exchange a turn of the loop:

        'Enter the user "anna" and the password "x7Q".'    texts ['bob', 'y'] were typed: 2 clauses are wrong
        'Enter the user "bob" and the password "x7Q".'     1 is wrong
        'Enter the user "bob" and the password "y".'       none is wrong
    """
    done = reasons.done_items(trajectory.steps, trajectory.final_page)

    def count_wrong(goal: str) -> int:
        return len(reasons.faults(goal, trajectory, moot))

    goal, wrong = trajectory.goal, count_wrong(trajectory.goal)
    while wrong:
        swaps = _hindsight_swaps(goal, trajectory, done)
        changed = {re.sub(reasons.whole(old), lambda _, new=new: new, goal, count=1) for old, new in swaps}
        better = [(left, new) for new in changed if (left := count_wrong(new)) < wrong]
        if not better:
            return None
        wrong, goal = min(better)
    last = trajectory.steps[-1].action
    if last.name == "stop" and not reasons.wants_answer(goal):
        return None  # `stop [Submit]` presses nothing, though a goal names Submit
    return goal if goal != trajectory.goal else None


def _hindsight_swaps(goal: str, trajectory: Trajectory, done: reasons.Done) -> list[Swap]:
    """What hindsight_goal may exchange.

    A quoted text for a text that was typed, a number for a number. A name for another thing that was chosen
    or pressed, or for itself and all of those: "tea" becomes "milk", or "tea, milk". Where nothing was typed,
    a quoted text for what was pressed last. The text by which something stands, for that of the last press.
    In a table, a label for a label whose value was given.
    """
    page, last = trajectory.steps[-1].page, _pressed_last(trajectory)
    texts, chosen, pressed = done
    typed = [step.action.text for step in trajectory.steps if step.action.name == "type" and not step.error]
    swaps = [(f'"{old}"', f'"{new}"') for old in re.findall(r'"([^"]+)"', goal) for new in typed]
    swaps += [(old, new) for old in _numbers(goal) for new in typed
              if re.fullmatch(reasons.NUMBER, new) and (" " in old) == (" " in new)]  # both with AM or PM

    names = reasons.asked_items(goal, page)[1]
    others = [name for name in chosen + pressed if name not in names and name != last]
    swaps += [(old, new) for old in names if old != last for new in (*others, ", ".join([old, *others]))]

    if pressed and not typed and "icon" not in goal:  # what its icon is called, no page says
        swaps += [(f'"{old}"', f'"{pressed[-1]}"') for old in re.findall(r'"([^"]+)"', goal)]
    beside = reasons.by_id(page).get(trajectory.steps[-1].action.bid)
    swaps += [_place_swap(goal, asked, beside) for asked in reasons.places_asked(goal, page) if beside]

    cells = [node.name for node in a11y.parse(page) if node.role == "cell" and node.name]
    value = dict(zip(cells[::2], cells[1::2]))  # label -> what stands beside it
    swaps += [(old, new) for old in value if old in goal for new in value if value[new] in texts]
    labels = {label for label, _, _ in reasons.fields_of(goal, page)}  # an option is no name of a field
    return [(old, new) for old, new in swaps if old not in labels]
