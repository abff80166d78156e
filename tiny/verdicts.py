"""What the small agent is taught of judging: trajectories, goals that they reached, goals that they did not.

A recorded trajectory is judged for its own goal, by the environment's verdict. Beside it code makes up other
goals (near misses; what a failure did reach), and agents that stop early. Of each it knows whether the goal
was reached. Then it writes what a judge should: reasons (reasons.py), and the verdict.
"""

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import a11y
import data
import judge
import lm
from data import Action, Trajectory
from tiny import reasons

# ---- the examples ------------------------------------------------------------------------------------------


def judge_examples(model: lm.LM, trajectories: Sequence[Trajectory], copies: int, seed: int, counts: Counter,
                   early: bool = False, ending: Callable = judge.ending) -> list[lm.Pair]:
    """(prompt, completion) of the judge for every goal of every trajectory; with `early`, also for every
    success stopped early. `ending`: what it is shown (as judge.ending). Adds to `counts`.

    A made-up failure without a fault is left out: the same words would then stand before a yes and before a
    no. (A recorded failure stays: there the page said no. An agent that stopped early stays: the stop that
    the judge reads is what is wrong.) A success with a fault is left out too: it would teach to overlook
    faults.
    """
    rng, pairs, moot = random.Random(seed), [], moot_kinds(trajectories)
    for recorded in trajectories:
        cases = [(recorded, goal, success) for goal, success in judged_goals(rng, recorded, copies)]
        if early and (stopped := stopped_early(rng, recorded)):
            cases.append((stopped, stopped.goal, False))
        for trajectory, goal, success in cases:
            made_up = trajectory is recorded and goal != recorded.goal
            faults = reasons.faults(goal, trajectory, moot[recorded.task])
            if made_up and not success and not faults:
                counts["judge: a made-up failure without a fault"] += 1
                continue
            if success and faults:
                counts["judge: a success with a fault"] += 1
                continue
            prompt = model.template.prompt_ids(judge.messages(goal, *ending(trajectory)))
            said = reasons.write_verdict(goal, trajectory.steps, trajectory.final_page, success,
                                         moot[recorded.task])
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


def judged_goals(rng: random.Random, trajectory: Trajectory, copies: int) -> list[tuple[str, bool]]:
    """The goals for which one trajectory is judged, and whether it reached each.

    Its own goal has the environment's verdict. A failure has also reached another goal, if one can be made.
    For each goal that was reached there are up to `copies` that were not. Without those a judge learns what a
    finished form looks like, not whether the right thing stands in it: it said yes to 20 of 20 wrong forms
    (NOTES 11.5).

        asked for "tea", typed "tea"     "tea" YES, "tfa" NO, "te0" NO
        asked for "tea", typed "milk"    "tea" NO, "milk" YES, "mplk" NO, "milM" NO
    """
    goals = [(trajectory.goal, bool(trajectory.reward))]
    if not trajectory.reward and (reached := hindsight_goal(trajectory)):
        goals.append((reached, True))
    wrong = []
    for goal, success in goals:
        if success:
            others = [other_goal(rng, replace(trajectory, goal=goal)) for _ in range(copies)]
            wrong += [(other, False) for other in others if other]
    return goals + wrong


def stopped_early(rng: random.Random, trajectory: Trajectory) -> Trajectory | None:
    """A success whose agent stops before its last step, and says what it had to type: a failure. None for
    other trajectories, and where stop itself was asked for.

    Recordings never show it with the right words, and agents do it. A judge that had not seen it called `stop
    [Korean]` right where Korean had to be typed and sent, and dreams then taught just that (docs/LOG.md).

    >>> page = "[1] textbox ''\\n[2] button 'Send'"
    >>> actions = [Action("type", "1", "tea"), Action("click", "2")]
    >>> steps = [data.Step("", page, "", action, ()) for action in actions]
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


# ---- other goals for the same trajectory -------------------------------------------------------------------

Swap = tuple[str, str]  # (what the goal says, what it could say instead)


def _pressed_last(trajectory: Trajectory) -> str:
    """What is pressed last (Submit). The goal may name it, but it is not what the goal asks for."""
    return data.label(trajectory.steps[-1].page, trajectory.steps[-1].action.bid)


def other_goal(rng: random.Random, trajectory: Trajectory) -> str | None:
    """The goal with one thing replaced that it asks for; None where there is none, or the draw is the same.

    >>> page = "[1] radio 'tea'\\n[2] radio 'milk'\\n[3] button 'Send'"
    >>> steps = [data.Step("", page, "", Action("click", bid), ()) for bid in "13"]
    >>> recorded = Trajectory("t", 0, "Select tea and press Send.", steps, page, 1, True, False, "", ())
    >>> other_goal(random.Random(0), recorded)
    'Select milk and press Send.'
    """
    goal = trajectory.goal
    swaps = (_letter_swaps(rng, goal) + _number_swaps(rng, goal) + _name_swaps(rng, trajectory)
             + _place_swaps(rng, trajectory))
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
    for k, node in enumerate(nodes):
        part = any(node.name != name and node.name in name for name in named)  # the "tea" of "green tea"
        if part or node.name == last or not re.search(reasons.whole(node.name), goal):
            continue
        # In a table a label may only become another label: every second cell.
        alike = [other.name for j, other in enumerate(nodes) if other.role == node.role
                 and other.name != node.name and (node.role != "cell" or (j - k) % 2 == 0)]
        if alike:
            swaps.append((node.name, rng.choice(alike)))
    return swaps


def _place_swaps(rng: random.Random, trajectory: Trajectory) -> list[Swap]:
    """The text by which something stands that the goal asks for, and a text drawn from those of the last page
    (where it is the same, the draw is lost)."""
    page, swaps = trajectory.steps[-1].page, []
    texts = [text.strip(":") for text in reasons.texts_beside(page)]
    for text in reasons.places_asked(trajectory.goal, page):
        said = re.search(reasons.whole(text.strip(":")), trajectory.goal, re.IGNORECASE)
        assert said, "places_asked found it"
        other = rng.choice(texts)
        swaps.append((said[0], other.lower() if said[0].islower() else other))
    return swaps


def hindsight_goal(trajectory: Trajectory) -> str | None:
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
        return len(reasons.faults(goal, trajectory))

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
    or pressed, or for itself and all of those: "tea" becomes "milk", or "tea, milk". In a table, a label for
    a label whose value was given.
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

    cells = [node.name for node in a11y.parse(page) if node.role == "cell" and node.name]
    value = dict(zip(cells[::2], cells[1::2]))  # label -> what stands beside it
    return swaps + [(old, new) for old in value if old in goal for new in value if value[new] in texts]
