"""The same trajectory with other words: what keeps a small model copying.

A model of 3 M parameters that is fine-tuned on a few hundred pages learns their words by heart, and then
types those (docs/LOG.md: it wrote `mrR0` where `omf4` was asked for). So it learns each recorded trajectory
several times. Each time the trajectory's own words are exchanged for random strings: a word for the same
string everywhere in the pages, the goal and the actions. So are the numbers and times that its goal asks for
and somebody typed, for others of the same form. What all trajectories of a task share stays as it is (Submit,
Username, the roles and attributes of the page). Nothing here knows a task. A model that was pretrained on the
web needs none of it.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from data import Action, Step, Trajectory
from tiny.words import random_string

# A run of letters and digits with a letter in it.
WORD = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{2,}(?![A-Za-z0-9])")
# A number, or a time with or without its half of the day; no id.
NUMBER = re.compile(r"(?<![\w.\[:-])(-?\d+(?::\d\d)?)( [AP]M)?(?![\w:\]])")
EITHER = re.compile(f"{NUMBER.pattern}|{WORD.pattern}")
# What stands in quotes on a page, with its attribute: names, values, checked='true', URLs.
QUOTED = re.compile(r"(\w+=|)('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
HEX = re.compile(r"(?=.*\d)[0-9a-f]{6}", re.IGNORECASE)  # a colour
TYPED = ("type", "stop")  # actions whose text is content; of others it is a key, up or down
CHANGED = ("", "value=", "valuetext=")  # a name, and the attributes whose words are exchanged
SPINNER = re.compile(r"(?<= value=)-?\d+")  # not quoted
# A box for times, and the hours and minutes that it says a second time, below it.
CLOCK = re.compile(r"(InputTime .*value='(\d\d):(\d\d)'.*\n"
                   r".*'Hours' value=)\d+(.*\n.*\n.*'Minutes' value=)\d+")
RARE = 0.1  # a word in a smaller share of a task's trajectories is a trajectory's own word


def texts(trajectory: Trajectory) -> list[str]:
    """Everything in a trajectory that may hold a word to exchange."""
    found = [trajectory.goal, trajectory.final_page]
    for step in trajectory.steps:
        found += [step.page, step.action.text, step.thought, *step.previous]
    return found


def all_words(trajectory: Trajectory) -> set[str]:
    """The words of a trajectory, in lower case, and its numbers."""
    found = texts(trajectory)
    return {word.lower() for text in found for word in WORD.findall(text)} | {
        number for text in found for number, _ in NUMBER.findall(text)}


def content_words(trajectory: Trajectory) -> set[str]:
    """The words that a page shows or somebody typed, in lower case. Any other word of the goal says what to
    do: "nothing", "2nd", "number". But what was typed and stood nowhere before is the agent's own knowledge
    (the digits of "blue"), and no copy may ask for it."""
    words = lambda text: {word.lower() for word in WORD.findall(text)}
    seen, known = set(), set()
    for step in trajectory.steps:
        seen |= words(step.page)
        if step.action.name in TYPED:
            known |= words(step.action.text) - seen - words(trajectory.goal)
            seen |= words(step.action.text)
    return (seen | words(trajectory.final_page)) - known


def own_numbers(trajectory: Trajectory) -> list[str]:
    """The numbers and times that somebody typed, and that the goal asks for, or the page before has as a
    name, whole. Not those of the goal that the first page shows: there they may mean something else."""
    there = {number for number, _ in NUMBER.findall(trajectory.steps[0].page)}
    asked = [number for number, _ in NUMBER.findall(trajectory.goal) if number not in there]
    typed = [step for step in trajectory.steps if step.action.name in TYPED]
    numbers = {number for step in typed for number, _ in NUMBER.findall(step.action.text)}
    read = [match[1] for step in typed if (match := NUMBER.fullmatch(step.action.text)) and not match[2]
            and f" '{match[1]}'" in step.page and match[1] not in trajectory.goal]
    return list(dict.fromkeys([number for number in asked if number in numbers] + read))


def other_number(rng: random.Random, number: str) -> str:
    """Another number with as many digits, or another time. As many, since 10:10 is a time where 9:10 needs AM
    or PM; and 12 stays, as it is the only hour after which counting begins anew.

    >>> rng = random.Random(1)
    >>> [other_number(rng, number) for number in ("-7", "10", "9:37", "11:05", "12:40")]
    ['-3', '82', '2:16', '10:31', '12:30']
    """
    hours, colon, minutes = number.partition(":")
    if colon:
        alike: Sequence[int] = next((some for some in (range(1, 10), (10, 11)) if int(hours) in some),
                                    (int(hours),))
        return f"{rng.choice(alike)}:{rng.randrange(60):02d}"
    digits = len(hours.lstrip("-"))
    return f"{'-' * (hours[0] == '-')}{rng.randrange(10 ** (digits - 1), 10 ** digits)}"


def _spellings(number: str) -> list[str]:
    """A number, or a time as a page may write it: 9:37, 09:37, 21:37."""
    hours, colon, minutes = number.partition(":")
    if not colon:
        return [number]
    hour = int(hours) % 12
    return list(dict.fromkeys((number, f"{hour:02d}:{minutes}", f"{hour + 12}:{minutes}")))


def renamed(trajectories: Sequence[Trajectory], copies: int, seed: int) -> list[Trajectory]:
    """`copies` versions of every trajectory with its rare words exchanged, each version with other strings.

    All trajectories of the first version come first, in their order, then those of the second.
    """
    once = list({id(trajectory): trajectory for trajectory in trajectories}.values())  # some are repeated
    recorded = Counter(trajectory.task for trajectory in once)
    holding: dict[str, Counter] = defaultdict(Counter)  # of each task: word -> how many trajectories hold it
    for trajectory in once:
        holding[trajectory.task].update(all_words(trajectory))
    common = {task: {word for word, count in holding[task].items() if count >= max(2, RARE * recorded[task])}
              for task in holding}
    return [_rename(trajectory, common[trajectory.task], random.Random(f"{seed} {copy} {k}"))
            for copy in range(copies) for k, trajectory in enumerate(trajectories)]


def _other_numbers(trajectory: Trajectory, common: set[str], taken: set[str],
                   rng: random.Random) -> dict[str, str]:
    """{each spelling of a number of its own that is not in `common`: of another}. Adds to `taken`, which the
    others are not in."""
    new: dict[str, str] = {}
    for number in own_numbers(trajectory):
        other = number
        while number not in common and other in taken:
            other = other_number(rng, number)
        taken.add(other)
        new.update(zip(_spellings(number), _spellings(other)))
    return new


def _other_word(word: str, new: dict[str, str], taken: set[str], rng: random.Random) -> str:
    """What stands in place of a word: the same of each of its spellings (a page may write a colour in
    capitals). Adds to `new` and `taken`."""
    low = word.lower()
    while low not in new:
        other = f"{rng.randrange(16 ** 5, 16 ** 6):x}" if HEX.fullmatch(word) else random_string(rng)
        if other.lower() not in taken and WORD.fullmatch(other):
            taken.add(other.lower())
            new[low] = other.lower()
            new[word] = other
    if word not in new:
        new[word] = new[low].upper() if word.isupper() else new[low].capitalize()
    return new[word]


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
    """A copy with every content word that is not in `common` exchanged for a random string, the same
    everywhere, and every number of its own for another.

    >>> act = Action("type", "1", "Zoe", False)
    >>> step = Step("", "[1] textbox 'Name', url='http://a/x.html'", "The box 'Name' is [1].", act, ())
    >>> old = Trajectory("t", 0, "Type Zoe into Name.", [step], "[1] textbox 'Name' value='Zoe'", 1, True,
    ...                  False, "", ())
    >>> new = _rename(old, {"name", "type", "into"}, random.Random(1))
    >>> new.goal, new.steps[0].action.text, new.final_page
    ('Type Pe into Name.', 'Pe', "[1] textbox 'Name' value='Pe'")
    """
    taken, own = all_words(trajectory), content_words(trajectory) - common
    new = _other_numbers(trajectory, common, taken, rng)

    def exchange(match: re.Match) -> str:
        number, half, word = match[1], match[2], match[0]
        if number:
            return new.get(number, number) + (half or "")
        return _other_word(word, new, taken, rng) if word.lower() in own else word

    def change(text: str) -> str:
        return EITHER.sub(exchange, text)

    def page(text: str) -> str:  # only names and values: never a role, an attribute or a URL
        text = SPINNER.sub(lambda value: new.get(value[0], value[0]), text)
        text = QUOTED.sub(lambda at: at[1] + change(at[2]) if at[1] in CHANGED else at[0], text)
        return CLOCK.sub(lambda at: f"{at[1]}{(int(at[2]) - 1) % 12 + 1}{at[4]}{int(at[3])}", text)

    def act(action: Action) -> Action:
        return replace(action, text=change(action.text)) if action.name in TYPED else action

    # Steps, goal, final page: the order of these calls is the order of the random draws.
    steps: list[Step] = []
    for step in trajectory.steps:
        # Told anew: of the words of a past only names and what was typed may be exchanged.
        follows = steps and step.index == steps[-1].index + 1
        past = steps[-1].past if follows else tuple(map(change, step.previous))
        keyed = not step.action.bid and step.action.name not in TYPED  # its thought names a key
        steps.append(replace(step, page=page(step.page),
                             thought=step.thought if keyed else change(step.thought),
                             action=act(step.action), previous=past,
                             error=_refusal(step, act(step.action), change)))
    return replace(trajectory, steps=steps, goal=change(trajectory.goal),
                   final_page=page(trajectory.final_page))
