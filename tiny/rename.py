"""The same trajectory with other words: what keeps a small model copying.

A model of 3 M parameters that is fine-tuned on a few hundred pages learns their words by heart, and then
types those (docs/LOG.md: it wrote `mrR0` where `omf4` was asked for). So it learns each recorded trajectory
several times. Each time the trajectory's own words are exchanged for random strings: a word for the same
string everywhere in the pages, the goal and the actions. What all trajectories of a task share stays as it is
(Submit, Username, the roles and attributes of the page). Nothing here knows a task. A model that was
pretrained on the web needs none of it.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from data import Action, Step, Trajectory
from tiny.words import random_string

# A run of letters and digits with a letter in it: digits alone are ids.
WORD = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{2,}(?![A-Za-z0-9])")
# What stands in quotes on a page: names, values, URLs.
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
RARE = 0.1  # a word in a smaller share of a task's trajectories is a trajectory's own word


def texts(trajectory: Trajectory) -> list[str]:
    """Everything in a trajectory that may hold a word to exchange."""
    found = [trajectory.goal, trajectory.final_page]
    for step in trajectory.steps:
        found += [step.page, step.action.text, step.thought, *step.previous]
    return found


def all_words(trajectory: Trajectory) -> set[str]:
    """The words of a trajectory, in lower case."""
    return {word.lower() for text in texts(trajectory) for word in WORD.findall(text)}


def renamed(trajectories: Sequence[Trajectory], copies: int, seed: int) -> list[Trajectory]:
    """`copies` versions of every trajectory with its rare words exchanged, each version with other strings.

    All trajectories of the first version come first, in their order, then those of the second.
    """
    recorded = Counter(trajectory.task for trajectory in trajectories)
    holding: dict[str, Counter] = defaultdict(Counter)  # of each task: word -> how many trajectories hold it
    for trajectory in trajectories:
        holding[trajectory.task].update(all_words(trajectory))
    common = {task: {word for word, count in holding[task].items() if count >= max(2, RARE * recorded[task])}
              for task in holding}
    return [_rename(trajectory, common[trajectory.task], random.Random(f"{seed} {copy} {k}"))
            for copy in range(copies) for k, trajectory in enumerate(trajectories)]


def _refusal(step: Step, action: Action, change: Callable[[str], str]) -> str:
    """The error of a step whose action became `action`. The browser's words stay, but for the text that they
    end with where that was typed: "takes 11:59 PM or the like, not tea"."""
    if not step.error:
        return ""
    why, typed = step.error.removeprefix(f"{step.action}: "), step.action.text
    if typed and why.endswith(typed):
        why = why.removesuffix(typed) + change(typed)
    return f"{action}: {why}"


def _rename(trajectory: Trajectory, common: set[str], rng: random.Random) -> Trajectory:
    """A copy with every word that is not in `common` exchanged for a random string, the same everywhere.

    >>> from data import Step
    >>> step = Step("", "[1] textbox 'Name', url='http://a/x.html'", "The box 'Name' is [1].",
    ...             Action("type", "1", "Zoe", False), ())
    >>> old = Trajectory("t", 0, "Type Zoe into Name.", [step], "[1] textbox 'Name' value='Zoe'", 1, True,
    ...                  False, "", ())
    >>> new = _rename(old, {"name", "type", "into"}, random.Random(1))
    >>> new.goal, new.steps[0].action.text, new.final_page
    ('Type 8tg into Name.', '8tg', "[1] textbox 'Name' value='8tg'")
    """
    new: dict[str, str] = {}
    taken = all_words(trajectory)

    def exchange(match: re.Match) -> str:
        word = match[0]
        if word.lower() in common:
            return word
        while word not in new:
            other = random_string(rng)
            if other.lower() not in taken and WORD.fullmatch(other):
                taken.add(other.lower())
                new[word] = other
        return new[word]

    def change(text: str) -> str:
        return WORD.sub(exchange, text)

    def page(text: str) -> str:  # only names and values: never a role, an attribute or a URL
        return QUOTED.sub(lambda quoted: quoted[0] if "://" in quoted[0] else change(quoted[0]), text)

    def act(action: Action) -> Action:  # only what is typed or answered: never a key, nor up or down
        return replace(action, text=change(action.text)) if action.name in ("type", "stop") else action

    # Steps, goal, final page: the order of these calls is the order of the random draws.
    steps: list[Step] = []
    for step in trajectory.steps:
        # Told anew: of the words of a past only names and what was typed may be exchanged.
        follows = steps and step.index == steps[-1].index + 1
        past = steps[-1].past if follows else tuple(map(change, step.previous))
        steps.append(replace(step, page=page(step.page), thought=change(step.thought),
                             action=act(step.action), previous=past,
                             error=_refusal(step, act(step.action), change)))
    return replace(trajectory, steps=steps, goal=change(trajectory.goal),
                   final_page=page(trajectory.final_page))
