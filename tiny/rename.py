"""The same attempt with other words: what keeps a small model copying.

A model of 3 M parameters that is fine-tuned on a few hundred pages learns their words by heart, and then types those (LOG.md: it wrote
`mrR0` where `omf4` was asked for). So each recorded attempt is learned from again with its own words exchanged for random strings: the
same words everywhere in the pages, the goal, the actions. What every attempt at a task shares (Submit, Username, the roles and attributes of
the tree) stays. Nothing here knows a task; a model that was pretrained on the web needs none of it.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from data import Trajectory
from tiny.base import random_string

WORD = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{2,}(?![A-Za-z0-9])")  # letters and digits, not digits alone: those are ids
RARE = 0.1  # a word in fewer of a task's attempts is one attempt's own


def texts(trajectory: Trajectory) -> list[str]:
    return [trajectory.goal, trajectory.final_tree, *(text for step in trajectory.steps for text in (step.tree, step.action.text, step.thought, *step.previous))]


def renamed(trajectories: Sequence[Trajectory], copies: int, seed: int) -> list[Trajectory]:
    """`copies` versions of every trajectory with its rare words exchanged, each version with others."""
    seen: dict[str, Counter] = defaultdict(Counter)
    for one in trajectories:
        seen[one.task].update({word.lower() for text in texts(one) for word in WORD.findall(text)})
    attempts = Counter(one.task for one in trajectories)
    versions = []
    for copy in range(copies):
        for k, one in enumerate(trajectories):
            common = {word for word, count in seen[one.task].items() if count >= max(2, RARE * attempts[one.task])}
            versions.append(_rename(one, common, random.Random(f"{seed} {copy} {k}")))
    return versions


def _rename(one: Trajectory, common: set[str], rng: random.Random) -> Trajectory:
    """
    >>> from data import Action, Step
    >>> step = Step("", "[1] textbox 'Name', url='http://a/x.html'", "The box 'Name' is [1].", Action("type", "1", "Zoe", False), ())
    >>> one = _rename(Trajectory("t", 0, "Type Zoe into Name.", [step], "[1] textbox 'Name' value='Zoe'", 1, True, False, "", ()), {"name", "type", "into"}, random.Random(1))
    >>> one.goal, one.steps[0].action.text, one.final_tree
    ('Type 8tg into Name.', '8tg', "[1] textbox 'Name' value='8tg'")
    """
    new: dict[str, str] = {}
    taken = {word.lower() for text in texts(one) for word in WORD.findall(text)}

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

    change = lambda text: WORD.sub(exchange, text)
    tree = lambda text: re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", lambda quoted: quoted[0] if "://" in quoted[0] else change(quoted[0]), text)  # names and values only
    act = lambda action: replace(action, text=change(action.text)) if action.name in ("type", "stop") else action  # not a key, not up or down
    steps = [replace(step, tree=tree(step.tree), thought=change(step.thought), action=act(step.action), previous=tuple(map(change, step.previous)))
             for step in one.steps]
    return replace(one, goal=change(one.goal), steps=steps, final_tree=tree(one.final_tree))
