"""What the small agent writes as a judge before its verdict: what was asked, beside what was done.

Code writes it for the lessons (verdicts.py). It reads the goal and the pages, and knows no task.

    'tea' wanted; 'Send' pressed; [1] is 'ten'; asked 'tea' did 'ten' different.
    COMPLETED: NO

First stands what was read, then clauses that compare. A clause is well, or it finds a fault; of a failure
only the first fault is said.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence

import a11y
import data
from data import Step, Trajectory

# ---- what is read off goal and pages -----------------------------------------------------------------------

Asked = tuple[list[str], list[str]]  # texts to type or to answer; names of elements
Done = tuple[list[str], list[str], list[str]]  # texts; names chosen (ticked, selected); names pressed
Box = tuple[str, str]  # a text box: (id, value as it is quoted on the page)
NUMBER = r"(?<![\w.])-?\d+(?::\d+)?(?: [AP]M)?(?!\w)|(?<=#)\w+"  # and times, and colours
NOT_PRESSED = ("checkbox", "radio", "option", "textbox", "combobox", "listbox", "spinbutton", "LabelText",
               "cell", "row", "InputTime", "Date", "DateTime")  # when clicked


def whole(text: str) -> str:
    """The pattern of `text` as whole words: "tea", but not in "teapot"."""
    return rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])"


def outside_quotes(goal: str) -> str:
    """The goal with its quoted texts blanked out: positions stay.

    >>> outside_quotes('Type "tea" twice.')
    'Type       twice.'
    """
    return re.sub(r'"[^"]*"', lambda match: " " * len(match[0]), goal)


def asked_items(goal: str, page: str) -> Asked:
    """(texts, names): what the goal has in quotes, its numbers, and what it or a text box wants read from a
    table; the elements that it names.

    >>> asked_items('Enter "tea" and press Send.', "[1] textbox ''\\n[2] button 'Send'")
    (['tea'], ['Send'])
    >>> asked_items("What is the Year?", "[1] cell 'Year'\\n[2] cell '1990'")
    (['1990'], [])
    >>> asked_items("Enter 9:37 PM.", "")
    (['9:37 PM'], [])
    >>> asked_items("Fill in.", "[1] textbox 'Year'\\n[2] cell 'Year'\\n[3] cell '1990'")
    (['1990'], [])
    """
    texts = [(match.start(), match[1]) for match in re.finditer(r'"([^"]+)"', goal)]
    names: list[tuple[int, str]] = []
    rest = outside_quotes(goal)
    nodes = [node for node in a11y.parse(page) if node.bid and node.name]
    # The longest name first: "South Africa" before "Africa".
    for k in sorted(range(len(nodes)), key=lambda k: -len(nodes[k].name)):
        match = re.search(whole(nodes[k].name), rest, re.IGNORECASE)
        if match:
            rest = rest[: match.start()] + " " * len(match[0]) + rest[match.end() :]
            if "cell" in (nodes[k].role or "") and k + 1 < len(nodes):  # a label stands for what is beside it
                texts.append((match.start(), nodes[k + 1].name))
            else:
                names.append((match.start(), nodes[k].name))
    texts += [(match.start(), match[0]) for match in re.finditer(NUMBER, rest)]
    value = {cell.name: beyond.name for cell, beyond in zip(nodes, nodes[1:]) if "cell" in (cell.role or "")}
    for place, (bid, _) in enumerate(text_boxes(page) if value else ()):
        if (label := data.label(page, bid).strip(":")) in value:
            texts.append((len(goal) + place, value[label]))
    return [text for _, text in sorted(texts)], [name for _, name in sorted(names)]


def wants_answer(goal: str) -> bool:
    """Whether a goal asks for an answer by stop. Where it does not, what stop says was not typed."""
    return "?" in goal or bool(re.search(r"\banswer\b", goal, re.IGNORECASE))


def done_items(steps: Sequence[Step], after: str, answered: bool = True) -> Done:
    """(texts, chosen, pressed) of steps that ended on the page `after`. What was refused was not done.

    texts: the last text that was typed into each element, in page order, the numbers that spinners made of
    it, then the answer (where `answered`). chosen: what is chosen on `after`, in page order. pressed: in the
    order of the presses.

    >>> page = "[1] textbox 'Name'\\n[2] radio 'tea', checked='true'\\n[3] button 'Send'"
    >>> actions = [data.Action("type", "1", "Zo"), data.Action("type", "1", "Zoe"), data.Action("click", "3")]
    >>> done_items([Step("", page, "", action, ()) for action in actions], page)
    (['Zoe'], ['tea'], ['Send'])
    """
    actions = [step.action for step in steps if not step.error]
    order = {node.bid: k for k, node in enumerate(a11y.parse(after)) if node.bid}
    spun = dict(spinners(after))
    typed = {action.bid: action.text for action in actions
             if action.name == "type" and action.bid not in spun}
    texts = [typed[bid] for bid in sorted(typed, key=lambda bid: order.get(bid, len(order)))]
    texts += list(spun.values())
    texts += [action.text for action in actions if action.name == "stop" and answered]
    chosen = [node.name or "" for node in a11y.parse(after) if _is_chosen(node)]
    return texts, chosen, [name for _, name in presses(steps)]


def presses(steps: Sequence[Step]) -> list[tuple[Step, str]]:
    """(the step, what it presses), in their order."""
    found = [(step, a11y.find(step.page, step.action.bid)) for step in steps
             if step.action.name == "click" and not step.error]
    return [(step, data.label(step.page, step.action.bid)) for step, node in found
            if node is not None and node.role not in NOT_PRESSED]


def text_boxes(page: str, roles: Sequence[str] = ("textbox", "spinbutton")) -> list[Box]:
    nodes = [node for node in a11y.parse(page) if node.bid]
    once = Counter(node.bid for node in nodes)  # a box for times has the id of its parts
    return [(node.bid, node.attributes.get("value", "''"))
            for node in nodes if node.role in roles and once[node.bid] == 1]


def spinners(page: str) -> list[tuple[str, str]]:
    """(id, number) of each spinner: the number that its text begins with, else the one that it shows.

    >>> spinners("[4] spinbutton '' value=0, valuetext='-7 with'"), spinners("[4] spinbutton '' value=3")
    ([('4', '-7')], [('4', '3')])
    """
    shown = {node.bid: re.match(r"'(-?\d+)", node.attributes.get("valuetext", ""))
             for node in a11y.parse(page)}
    return [(bid, match[1] if (match := shown[bid]) else value.strip("'"))
            for bid, value in text_boxes(page, ("spinbutton",))]


def _is_chosen(node: a11y.Node) -> bool:
    return node.attributes.get("checked") == "'true'" or node.attributes.get("selected") == "True"


def readings(goal: str, asked_texts: Sequence[str], steps: Sequence[Step], after: str,
             held: Collection[str] = ()) -> list[str]:
    """What must be read before anything can be compared.

    What the goal quotes comes first: beside what was typed, a small model copies that. Then table labels that
    the goal names, with their values; then what is chosen in the end, whatever was clicked on the way, but
    for what fields hold (`held`); then what was pressed and answered.

    >>> table, radio = "[3] cell 'Language'\\n[4] cell 'Korean'", "[6] radio 'tea', checked='true'"
    >>> send = Step("", table + "\\n[7] button 'Send'", "", data.Action("click", "7"), ())
    >>> readings("Enter the value of Language", ["Korean"], [send], radio)
    ["'Language' 'Korean'", "[6] 'tea' chosen", "'Send' pressed"]
    """
    before = steps[-1].page
    wanted = [f"'{text}' wanted" for text in asked_texts if text in goal]
    nodes = a11y.parse(before)
    table = [f"'{label.name}' '{value.name}'" for label, value in zip(nodes, nodes[1:])
             if label.name and "cell" in (label.role or "") and value.name in asked_texts
             and value.name not in goal]
    chosen = [f"[{node.bid}] '{node.name or ''}' chosen" for node in a11y.parse(after)
              if _is_chosen(node) and node.name not in held]
    pressed = [f"'{name}'{place_of(step.page, step.action.bid)} pressed" for step, name in presses(steps)]
    answered = [f"'{step.action.text}' answered" for step in steps if step.action.name == "stop"]
    return wanted + table + chosen + pressed + answered


def place_of(page: str, bid: str) -> str:
    r"""Where an element stands whose name does not say which it is (none, one that stands twice, a link's):
    its number in its row, from 2 on, and the first of the texts before it, or else the text behind it. ''
    for any other.

    >>> page = "StaticText 'Ada'\n\tStaticText 'Hello'\n[4] image ''\n[5] image ''\n[6] link 'x'"
    >>> place_of(page, "5"), place_of(page, "6")
    (" 2 by 'Ada'", '')
    """
    place, text = _stands(page, bid)
    return (f" {place}" if place > 1 else "") + (f" by '{text}'" if text else "")


def _stands(page: str, bid: str) -> tuple[int, str]:
    """(place, text) of place_of(); (1, "") where it has none."""
    nodes = a11y.parse(page)
    k = next((k for k, node in enumerate(nodes) if node.bid == bid), None)
    if k is None:  # it shares its id with others, or is not there
        return 1, ""
    name, first = nodes[k].name, k
    if name and sum(node.name == name and bool(node.bid) for node in nodes) == 1 and nodes[k].role != "link":
        return 1, ""
    while first and not name and nodes[first - 1].role == nodes[k].role and not nodes[first - 1].name:
        first -= 1
    place, text = k - first + 1, ""
    while first and nodes[first - 1].role == "StaticText":
        first -= 1
        text = nodes[first].name
    behind = nodes[k + 1 : k + 2]
    if not text and behind and behind[0].role == "StaticText" and behind[0].depth == nodes[k].depth:
        text = behind[0].name
    return place, text


def places_asked(goal: str, page: str) -> list[str]:
    """The texts by which there stands something to press, and which the goal names outside of quotes."""
    rest = outside_quotes(goal)
    return [text for text in dict.fromkeys(texts_beside(page))
            if re.search(whole(text.strip(":")), rest, re.IGNORECASE)]


def texts_beside(page: str) -> list[str]:
    """The text by which each element stands that can be pressed, where it stands by one."""
    pressed = [node.bid for node in a11y.parse(page) if node.bid and node.role not in NOT_PRESSED]
    return [text for bid in pressed if (text := _stands(page, bid)[1])]


# ---- what is written before the verdict --------------------------------------------------------------------

Clause = tuple[str, bool]  # (what is said, whether all is well with it)


def write_verdict(goal: str, steps: Sequence[Step], after: str, success: bool,
                  moot: Collection[str] = ()) -> str:
    """The judge's completion: what was read, what was asked beside what was done, and the verdict, which is
    known. `after` is the page behind the last step. Of faults of a `moot` kind (verdicts.moot_kinds)
    nothing is said.

    >>> page = "[1] textbox '' value='ten'\\n[2] button 'Send'"
    >>> actions = [data.Action("type", "1", "ten"), data.Action("click", "2")]
    >>> steps = [Step("", page, "", action, ()) for action in actions]
    >>> print(write_verdict('Enter "tea" and press Send.', steps, page, False))
    'tea' wanted; 'Send' pressed; [1] is 'ten'; asked 'tea' did 'ten' different.
    COMPLETED: NO
    """
    read, clauses = _read_and_compared(goal, steps, after)
    return f"{_said(read, clauses, success, moot)}\nCOMPLETED: {'YES' if success else 'NO'}"


def _read_and_compared(goal: str, steps: Sequence[Step], after: str) -> tuple[list[str], list[Clause]]:
    """What must be read, and all clauses. What a field of a form holds is compared by its label, all else by
    its order or its name."""
    page = steps[-1].page
    asked, fields = asked_items(goal, page), fields_of(goal, page)
    held = {text for field in fields for text in field}
    free = lambda some: [text for text in some if text not in held]
    texts, names = map(free, asked)
    typed, chosen, pressed = done_items(steps, after, wants_answer(goal))
    boxes = text_boxes(page, ("textbox",)) + [(bid, f"'{number}'") for bid, number in spinners(after)]
    read = readings(goal, texts, steps, after, held)
    if re.search(r"\bcopy\b", goal, re.IGNORECASE):  # what stood there to be copied; it is long
        texts += [value.strip("'") for _, value in text_boxes(steps[0].page, ("textbox",)) if value != "''"]
        boxes = [(bid, value) for bid, value in boxes if value == "''"]
    heading = next((node.name for node in a11y.parse(page) if node.role == "heading" and node.name), "")
    names = [name for name in names if name != heading or name in pressed]  # to be there is enough
    clauses = [_side_by_side(text, shown or None, text == shown, f"{label} ")
               for label, text, shown in fields]
    clauses += clauses_of((texts, names), (free(typed), free(chosen), pressed), boxes)
    clauses += place_clauses(goal, steps) + _ordinal_clauses(goal, steps) + _wait_clauses(goal, steps)
    touched = {step.action.bid for step in steps if step.action.name == "type" and not step.error}
    clauses += [(f"[{bid}] untouched", False) for bid, value in text_boxes(page, ("textbox",))
                if bid not in touched and value != "''"]
    last = steps[-1].action
    if last.name == "stop" and not wants_answer(goal):
        clauses.append((f"'{last.text}' answered, unasked", False))
    if heading:
        there = bool(re.search(whole(heading), goal))
        clauses.append((f"heading '{heading}' {'asked' if there else 'other'}", there))
    return read, clauses


def faults(goal: str, trajectory: Trajectory, moot: Collection[str] = ()) -> list[str]:
    """The clauses that find something wrong, but for those of a moot kind."""
    _, clauses = _read_and_compared(goal, trajectory.steps, trajectory.final_page)
    return [said for said, well in clauses if not well and kind_of(said) not in moot]


def kind_of(clause: str) -> str:
    """Of a fault: different, none, extra, empty, untouched, short, unasked or other.

    >>> kind_of("asked 'tea' did 'milk' different"), kind_of("[3] empty")
    ('different', 'empty')
    """
    return clause.rsplit(" ", 1)[-1]


def compare(asked: Asked, done: Done, success: bool, boxes: Sequence[Box] = ()) -> str:
    """What was asked beside what was done.

    >>> compare(([], ["tea", "milk"]), ([], ["milk", "tea", "salt"], []), False)
    "asked 'tea' did 'tea' same; asked 'milk' did 'milk' same; did 'salt' extra."
    """
    return _said([], clauses_of(asked, done, boxes), success, ())


def _said(read: Sequence[str], clauses: Sequence[Clause], success: bool, moot: Collection[str]) -> str:
    """What was read, then the clauses. Of a failure only up to the first fault, which then stands right
    before the verdict: a small model never learns "all of a long list" (docs/LOG.md)."""
    said = [(line, True) for line in read] + [
        clause for clause in clauses if clause[1] or kind_of(clause[0]) not in moot]
    if not success:
        first_wrong = next((k for k, (_, well) in enumerate(said) if not well), len(said))
        said = said[: first_wrong + 1]
    return "; ".join(line for line, _ in said) + "."


def clauses_of(asked: Asked, done: Done, boxes: Sequence[Box]) -> list[Clause]:
    """Text boxes (where texts were asked for), then texts, then names. Where one side has no texts, those of
    the other side are compared with names.

    >>> clauses_of((["tea"], []), ([], ["tea"], []), [("3", "'anna'"), ("4", "''")])
    [("[3] is 'anna'", True), ('[4] empty', False), ("asked 'tea' did 'tea' same", True)]
    """
    (asked_texts, asked_names), (done_texts, chosen, pressed) = asked, done
    clauses = []
    # All boxes: a small model that had to name the empty one at once missed it (docs/LOG.md).
    if asked_texts or done_texts:
        clauses = [(f"[{bid}] empty", False) if value == "''" else (f"[{bid}] is {value}", True)
                   for bid, value in boxes]
    if asked_texts and done_texts:
        clauses += _text_clauses(asked_texts, done_texts)
        return clauses + _name_clauses(asked_names, [], chosen, pressed)
    typed = [text for text in done_texts if text]
    return clauses + _name_clauses(asked_texts + asked_names, typed, chosen, pressed)


def _text_clauses(asked: list[str], done: list[str]) -> list[Clause]:
    """Texts belong to places, so their order counts. One text may belong in several places, so the last
    that was asked for is compared with all further texts.

    >>> _text_clauses(["tea"], ["tea", "tee"])
    [("asked 'tea' did 'tea' same", True), ("asked 'tea' did 'tee' different", False)]
    """
    clauses = []
    for k in range(max(len(asked), len(done))):
        text = asked[min(k, len(asked) - 1)]
        typed = done[k] if k < len(done) else None
        clauses.append(_side_by_side(text, typed, _same(text, typed)))
    return clauses


def _same(asked: str, typed: str | None) -> bool:
    """Equal texts, or the same time: a box for times takes `11:34` for 11:34 AM.

    >>> _same("11:34 AM", "11:34"), _same("11:34 PM", "11:34"), _same("12:05 PM", "12:05")
    (True, False, True)
    """
    return asked == typed or _clock(asked) == _clock(typed or "") != ""


def _clock(text: str) -> str:
    """A time by 24 hours; "" for anything else."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)(?: ([AP])M)?", text)
    if not match:
        return ""
    hours = int(match[1]) % 12 + 12 * (match[3] == "P") if match[3] else int(match[1])
    return f"{hours}:{match[2]}"


def _name_clauses(asked: list[str], typed: list[str], chosen: list[str], pressed: list[str]) -> list[Clause]:
    """Each name that was asked for, then what nobody asked for, but for what was pressed on the way to the
    last press that was asked for (a folder that is opened). The order of presses counts, the order of choices
    does not. Beside a name that was not chosen stands what was chosen instead: that a name is missing
    from a list is hard to see.

    >>> _name_clauses(["One", "Two"], [], [], ["Two", "One"])
    [("asked 'One' did 'Two' different", False), ("asked 'Two' did 'One' different", False)]
    >>> _name_clauses(["tea", "milk"], [], ["salt", "tea"], ["Help"])[1:]
    [("asked 'milk' did 'salt' different", False), ("did 'Help' extra", False)]
    """
    last = max((k for k, name in enumerate(pressed) if name in asked), default=-1)
    pressed = [name for k, name in enumerate(pressed) if k > last or name in asked]
    done = typed + chosen + pressed
    extra = [name for k, name in enumerate(done) if done[:k].count(name) >= asked.count(name)]
    # The order is looked at only where each name was pressed as often as it was asked for.
    in_order = [name for name in pressed if name in asked]
    comparable = sorted(in_order) == sorted(name for name in asked if name in pressed)
    clauses = []
    for k, name in enumerate(asked):
        other: str | None = in_order.pop(0) if comparable and name in pressed else name
        same = name == other and done.count(name) > asked[:k].count(name)
        if name == other and not same:
            other = next((candidate for candidate in extra if candidate in chosen), None)
            if other is not None:
                extra.remove(other)
        clauses.append(_side_by_side(name, other, same))
    return clauses + [(f"did '{name}' extra", False) for name in extra]


def place_clauses(goal: str, steps: Sequence[Step]) -> list[Clause]:
    r"""Whether the last press stands by the text that the goal names, where it names one.

    >>> page = "StaticText 'Ada'\n[4] image ''\nStaticText 'Bob'\n[5] image ''"
    >>> place_clauses("Delete the mail by Ada.", [Step("", page, "", data.Action("click", "5"), ())])
    [("asked by 'Ada' did by 'Bob' different", False)]
    """
    asked, pressed = places_asked(goal, steps[-1].page), presses(steps)
    if len(asked) != 1:
        return []
    by = _stands(pressed[-1][0].page, pressed[-1][0].action.bid)[1] if pressed else ""
    if not by:
        return [(f"asked by '{asked[0]}' none", False)]
    same = by == asked[0]
    return [(f"asked by '{asked[0]}' did by '{by}' {'same' if same else 'different'}", same)]


def _side_by_side(asked: str, done: str | None, same: bool, of: str = "") -> Clause:
    said = "none" if done is None else f"did '{done}' {'same' if same else 'different'}"
    return f"{of}asked '{asked}' {said}", same


# ---- forms and places --------------------------------------------------------------------------------------


def fields_of(goal: str, page: str) -> list[tuple[str, str, str]]:
    r"""(label, what the goal asks for, what the page has there) of each field that the goal names right
    before a quoted text: the text of a box, the choice of a list or of radios, yes or no of a box to tick.

    >>> page = "[1] textbox 'Name' value='Zo'\n[2] checkbox 'Gift', checked='true'"
    >>> fields_of('Fill in: Name "Zoe", Gift "yes" and Sum "3".', page)
    [('Name', 'Zoe', 'Zo'), ('Gift', 'yes', 'yes')]
    """
    nodes, found = a11y.parse(page), []
    for label, text in re.findall(r'(\w+) "([^"]+)"', goal):
        held = [shown for k, node in enumerate(nodes) if node.name == label
                if (shown := _held(node, nodes[k + 1 :])) is not None]
        found += [(label, text, held[0])] if held else []
    return found


def _held(field: a11y.Node, below: Sequence[a11y.Node]) -> str | None:
    """What a field holds; None where it is none."""
    if field.role in ("textbox", "combobox"):
        return field.attributes.get("value", "''").strip("'")
    if field.role == "checkbox":
        return "yes" if _is_chosen(field) else "no"
    end = next((k for k, node in enumerate(below) if node.role not in ("LabelText", "radio", "StaticText")),
               len(below))
    radios = [node for node in below[:end] if node.role == "radio"]
    if field.role != "StaticText" or not radios:
        return None
    return next((node.name for node in radios if _is_chosen(node)), "")


def _ordinal_clauses(goal: str, steps: Sequence[Step]) -> list[Clause]:
    r"""Where the goal counts boxes, whether those and no others were filled or chosen.

    >>> page = "[1] textbox ''\n[2] textbox '' value='7'"
    >>> _ordinal_clauses("Enter 7 into the 1st textbox.", [Step("", page, "", data.Action("click", "3"), ())])
    [("asked '1st textbox' did '2nd textbox' different", False)]
    """
    clauses = []
    for place, role in re.findall(r"(\d+(?:st|nd|rd|th)) (radio|checkbox|textbox)", goal):
        nodes = [node for node in a11y.parse(steps[-1].page) if node.role == role and node.bid]
        filled = [_ordinal(k) for k, node in enumerate(nodes, 1)
                  if _is_chosen(node) or node.attributes.get("value", "''") != "''"]
        wrong = [other for other in filled if other != place]
        done = (wrong or filled or [None])[0]
        clauses.append(_side_by_side(f"{place} {role}", done and f"{done} {role}", filled == [place]))
    return clauses


def _wait_clauses(goal: str, steps: Sequence[Step]) -> list[Clause]:
    """Where the goal says how many seconds to wait, whether enough was done between the last two presses:
    2 n - 1 actions for n seconds, as one takes half a second in the recordings. More is no fault here, though
    the pages ask for just so long; of fewer than two presses nothing is said (docs/fidelity.md).

    >>> actions = [data.Action(name, "1") for name in ("click", "hover", "click")]
    >>> steps = [Step("", "[1] button 'A'", "", action, ()) for action in actions]
    >>> _wait_clauses("Press A, wait 2 seconds, press A.", steps)
    [("asked '2 seconds' did 1 between short", False)]
    """
    seconds = re.search(r"(\d+) seconds?", goal)
    pressed = [k for k, step in enumerate(steps) if presses([step])]
    if not seconds or len(pressed) < 2:
        return []
    between = pressed[-1] - pressed[-2] - 1
    well = between >= 2 * int(seconds[1]) - 1
    return [(f"asked '{seconds[0]}' did {between} between {'same' if well else 'short'}", well)]


def _ordinal(k: int) -> str:
    return f"{k}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(k, 'th')}"
