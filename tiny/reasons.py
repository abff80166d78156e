"""What the small judge writes before its verdict: what was asked beside what was done, read off by code.

    goal    Find the email by Bob and click the trash icon.
    done    click [4]
    said    [4] pressed; by 'Bob' [5] did [4] different.
            COMPLETED: NO

A model of 3 M parameters stays at chance if it has to answer before it has written this (NOTES 11.4). The
code knows no task. It sees the goal, the actions and the pages, as the judge does, and the verdict that the
environment gave. Of what it cannot see (a number is odd, a colour is navy) it says nothing, and the judge
must learn it from the verdicts.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import a11y
import data
from data import Step

# ---- what is read off goal and pages -----------------------------------------------------------------------

Asked = tuple[list[str], list[str]]  # texts to type or to answer; names of elements
Done = tuple[list[str], list[str], list[str]]  # texts; names chosen (ticked, selected); names pressed
Box = tuple[str, str]  # a text box: (id, value as it is quoted on the page)
NUMBER = r"(?<![\w.])-?\d+(?::\d+)?(?: [AP]M)?(?!\w)|(?<=#)\w+"  # and times, and colours
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th")  # rename.py leaves them as they are
COUNTED = rf"\b({'|'.join(ORDINALS)}) (\w+)"  # "2nd textbox"
NOT_PRESSED = ("checkbox", "radio", "option", "textbox", "combobox", "LabelText", "cell")  # when clicked


_nodes = functools.lru_cache(maxsize=64)(a11y.parse)  # one page is read by many of these functions


def whole(text: str) -> str:
    """The pattern of `text` as whole words: "tea", but not in "teapot"."""
    return rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])"


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
    rest = re.sub(r'"[^"]*"', lambda match: " " * len(match[0]), goal)  # blanked: the positions stay
    nodes = [node for node in _nodes(page) if node.bid and node.name]
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


def done_items(steps: Sequence[Step], after: str) -> Done:
    """(texts, chosen, pressed) of steps that ended on the page `after`.

    texts: the last text that was typed into each element, in page order, the numbers of spinners, then the
    answer. chosen: what is chosen on `after`, in page order. pressed: in the order of the presses.

    >>> from data import Action
    >>> page = "[1] textbox 'Name'\\n[2] radio 'tea', checked='true'\\n[3] button 'Send'"
    >>> actions = [Action("type", "1", "Zo"), Action("type", "1", "Zoe"), Action("click", "3")]
    >>> done_items([Step("", page, "", action, ()) for action in actions], page)
    (['Zoe'], ['tea'], ['Send'])
    """
    actions = [step.action for step in steps]
    order = {node.bid: k for k, node in enumerate(_nodes(after)) if node.bid}
    typed = {action.bid: action.text for action in actions if action.name == "type"}
    texts = [typed[bid] for bid in sorted(typed, key=lambda bid: order.get(bid, len(order)))]
    texts += [value.strip("'") for bid, value in text_boxes(after, ("spinbutton",)) if bid not in typed]
    texts += [action.text for action in actions if action.name == "stop"]
    chosen = [node.name for node in _nodes(after) if _is_chosen(node) and node.name]
    return texts, chosen, [name for _, name in presses(steps)]


def presses(steps: Sequence[Step]) -> list[tuple[Step, str]]:
    """(the step, what it presses), in their order."""
    found = [(step, a11y.find(step.page, step.action.bid)) for step in steps if step.action.name == "click"]
    return [(step, data.label(step.page, step.action.bid)) for step, node in found
            if node is not None and node.role not in NOT_PRESSED]


def text_boxes(page: str, roles: Sequence[str] = ("textbox", "spinbutton")) -> list[Box]:
    nodes = [node for node in _nodes(page) if node.bid]
    once = Counter(node.bid for node in nodes)  # a box for times has the id of its parts
    return [(node.bid, node.attributes.get("value", "''"))
            for node in nodes if node.role in roles and once[node.bid] == 1]


def _is_chosen(node: a11y.Node) -> bool:
    return node.attributes.get("checked") == "'true'" or node.attributes.get("selected") == "True"


def readings(goal: str, asked_texts: Sequence[str], steps: Sequence[Step], after: str) -> list[str]:
    """What must be read before anything can be compared.

    What the goal quotes comes first: beside what was typed, a small model copies that. Then table labels that
    the goal names, with their values; then what is chosen in the end, whatever was clicked on the way.

    >>> from data import Action
    >>> table, radio = "[3] cell 'Language'\\n[4] cell 'Korean'", "[6] radio 'tea', checked='true'"
    >>> send = Step("", table + "\\n[7] button 'Send'", "", Action("click", "7"), ())
    >>> readings("Enter the value of Language", ["Korean"], [send], radio)
    ["'Language' 'Korean'", "[6] 'tea' chosen", "'Send' pressed"]
    """
    before = steps[-1].page
    wanted = [f"'{text}' wanted" for text in asked_texts if text in goal]
    nodes = _nodes(before)
    table = [f"'{label.name}' '{value.name}'" for label, value in zip(nodes, nodes[1:])
             if label.name and "cell" in (label.role or "") and value.name in asked_texts
             and value.name not in goal]
    chosen = [f"[{node.bid}] '{node.name or ''}' chosen" for node in _nodes(after) if _is_chosen(node)]
    return wanted + table + chosen + _pressed(steps)


def _pressed(steps: Sequence[Step]) -> list[str]:
    """What was pressed, and how much else was done between two presses.

    >>> from data import Action
    >>> page = "[1] button 'ONE'\\n[2] button 'TWO'"
    >>> actions = [Action("click", "1"), Action("hover", "2"), Action("click", "2")]
    >>> _pressed([Step("", page, "", action, ()) for action in actions])
    ["'ONE' pressed", '1 between', "'TWO' pressed"]
    """
    names, said, between = {id(step): name for step, name in presses(steps)}, [], 0
    for step in steps:
        if id(step) not in names:
            between += 1
            continue
        if between and said:
            said.append(f"{between} between")
        which = f"[{step.action.bid}]" if stands_by(step.page, step.action.bid) else f"'{names[id(step)]}'"
        said.append(f"{which} pressed")
        between = 0
    return said


def stands_by(page: str, bid: str) -> str:
    r"""The text that tells which element it is, where its name does not: the first of the texts before it and
    those of its kind beside it, or the text behind it; '' for any other.

    >>> page = "StaticText 'Ada'\n\tStaticText 'Hello'\n[4] image ''\n[5] image ''\n[6] link 'x'"
    >>> stands_by(page, "5"), stands_by(page, "6")
    ('Ada', '')
    """
    nodes = _nodes(page)
    k = next(k for k, node in enumerate(nodes) if node.bid == bid)
    name, behind = nodes[k].name, nodes[k + 1 : k + 2]
    if behind and behind[0].role == "StaticText" and behind[0].depth > nodes[k].depth:
        return ""  # the text in it is its name
    if name and sum(node.name == name and bool(node.bid) for node in nodes) == 1 and nodes[k].role != "link":
        return ""
    first, text = k, ""
    while first and not name and nodes[first - 1].role == nodes[k].role and not nodes[first - 1].name:
        first -= 1
    while first and nodes[first - 1].role == "StaticText":
        first -= 1
        text = nodes[first].name or ""
    if not text and behind and behind[0].role == "StaticText":
        text = behind[0].name or ""
    return text


# ---- what is written before the verdict --------------------------------------------------------------------

Clause = tuple[str, bool]  # (what is said, whether all is well with it)


def write_verdict(goal: str, steps: Sequence[Step], after: str, success: bool,
                  moot: Collection[str] = ()) -> str:
    """The judge's completion: what was read, what was asked beside what was done, and the verdict, which is
    known. `after` is the page behind the last step. Of faults of a `moot` kind (moot_kinds) nothing is said.

    >>> from data import Action
    >>> page = "[1] textbox '' value='ten'\\n[2] button 'Send'"
    >>> actions = [Action("type", "1", "ten"), Action("click", "2")]
    >>> steps = [Step("", page, "", action, ()) for action in actions]
    >>> print(write_verdict('Enter "tea" and press Send.', steps, page, False))
    'tea' wanted; 'Send' pressed; [1] is 'ten' asked 'tea' different.
    COMPLETED: NO
    """
    asked, done, boxes, places = _items(goal, steps, after)
    said = compare(asked, done, success, boxes, readings(goal, asked[0], steps, after), moot, places)
    return f"{said}\nCOMPLETED: {'YES' if success else 'NO'}"


def clauses_of(goal: str, steps: Sequence[Step], after: str) -> list[Clause]:
    """All that is compared, for steps that ended on the page `after`."""
    return _clauses(*_items(goal, steps, after))


def _items(goal: str, steps: Sequence[Step], after: str) -> tuple[Asked, Done, list[Box], list[Clause]]:
    asked = asked_items(goal, steps[-1].page)
    return (asked, done_items(steps, after), text_boxes(steps[-1].page),
            _place_clauses(goal, asked, steps, after))


def _place_clauses(goal: str, asked: Asked, steps: Sequence[Step], after: str) -> list[Clause]:
    r"""What is asked for by its place, as ids: the elements that stand by a text of the goal, beside the last
    one that was pressed; those that the goal names and that have the name of others; those that it counts. A
    small model finds ids behind a name better than names before an id (docs/LOG.md).

    >>> from data import Action
    >>> page = "StaticText 'Ada'\n[4] image ''\nStaticText 'Bob'\n[5] image ''"
    >>> _place_clauses("The mail by Bob.", ([], []), [Step("", page, "", Action("click", "4"), ())], page)
    [("by 'Bob' [5] did [4] different", False)]
    """
    page, clauses = steps[-1].page, []
    by = defaultdict(list)  # text -> nodes
    for node in _nodes(page):
        if node.bid and node.role not in NOT_PRESSED and (text := stands_by(page, node.bid)):
            by[text].append(node)
    pressed = [step.action.bid for step, _ in presses(steps)]
    for text, nodes in by.items():
        ids = [node.bid for node in nodes]
        named = re.search(whole(text.strip(":")), goal, re.IGNORECASE)
        among = {node.bid for some in by.values() for node in some} if named else ids
        if named or any(node.name in asked[1] for node in nodes):
            done = [bid for bid in pressed if bid in among][-1:]
            clauses.append(_ids_clause(f"by '{text}'", ids, ids, done))
    for name in dict.fromkeys(node.name for node in _nodes(page) if node.role == "heading" and node.name):
        well = bool(re.search(whole(name), goal))
        clauses.append((f"under '{name}' {'same' if well else 'elsewhere'}", well))
    typed = {step.action.bid for step in steps if step.action.name == "type"}
    at_first = dict(text_boxes(steps[0].page, ("textbox",)))
    clauses += [(f"[{bid}] untouched", False) for bid, value in text_boxes(page, ("textbox",))
                if value != "''" and bid not in typed and at_first.get(bid) == value]
    for match in re.finditer(COUNTED, goal):
        nodes = [node for node in _nodes(after) if node.bid and node.role == match[2] and not node.name]
        ids, place = [node.bid for node in nodes], ORDINALS.index(match[1])
        done = [node.bid for node in nodes
                if _is_chosen(node) or "value" in node.attributes or node.bid in pressed]
        clauses.append(_ids_clause(f"'{match[0]}' of", ids, ids[place : place + 1], done))
    return clauses


def _ids_clause(said: str, ids: Sequence[str], wanted: Sequence[str], done: Sequence[str]) -> Clause:
    """`ids` are looked at, `wanted` of them asked for, and `done` was done."""
    listed, other = ("".join(f" [{bid}]" for bid in some) for some in (ids, wanted if wanted != ids else ()))
    well = bool(done) and set(done) <= set(wanted)
    what = f"did{''.join(f' [{bid}]' for bid in done)} {'same' if well else 'different'}" if done else "none"
    return f"{said}{listed}{' is' + other if other else ''} {what}", well


def kind_of(clause: str) -> str:
    """Of a fault: different, none, extra or empty.

    >>> kind_of("asked 'tea' did 'milk' different"), kind_of("[3] empty")
    ('different', 'empty')
    """
    return clause.rsplit(" ", 1)[-1]


def compare(asked: Asked, done: Done, success: bool, boxes: Sequence[Box] = (),
            read: Sequence[str] = (), moot: Collection[str] = (), places: Sequence[Clause] = ()) -> str:
    """What was read, then what was asked beside what was done. Of a failure only up to the first wrong thing,
    which then stands right before the verdict: a small model never learns "all of a long list" (docs/LOG.md).

    >>> compare(([], ["tea", "milk"]), ([], ["milk", "tea", "salt"], []), False)
    "asked 'tea' did 'tea' same; asked 'milk' did 'milk' same; did 'salt' extra."
    """
    clauses = [(said, True) for said in read]
    clauses += [(said, well) for said, well in _clauses(asked, done, boxes, places)
                if well or kind_of(said) not in moot]
    if not success:
        first_wrong = next((k for k, (_, well) in enumerate(clauses) if not well), len(clauses))
        clauses = clauses[: first_wrong + 1]
    return "; ".join(said for said, _ in clauses) + "."


def _clauses(asked: Asked, done: Done, boxes: Sequence[Box], places: Sequence[Clause] = ()) -> list[Clause]:
    """Text boxes (where texts were asked for), then texts, then names. Where one side has no texts, those of
    the other side are compared with names.

    >>> _clauses((["tea"], []), (["tee"], [], []), [("3", "'tee'"), ("4", "''")])
    [("[3] is 'tee' asked 'tea' different", False), ('[4] empty', False)]
    >>> _clauses((["tea"], []), ([], ["tea"], []), [("3", "'anna'"), ("4", "''")])
    [("[3] is 'anna'", True), ('[4] empty', False), ("asked 'tea' did 'tea' same", True)]
    """
    (asked_texts, asked_names), (done_texts, chosen, pressed) = asked, done
    # All boxes: a small model that had to name the empty one at once missed it (docs/LOG.md).
    clauses = [(f"[{bid}] empty", False) if value == "''" else (f"[{bid}] is {value}", True)
               for bid, value in boxes]
    if asked_texts and len(done_texts) >= len(asked_texts):
        filled = [k for k, (_, value) in enumerate(boxes) if value != "''"]
        texts = _text_clauses(asked_texts, done_texts)
        if [boxes[k][1] for k in filled] == [f"'{text}'" for text in done_texts]:
            # Beside the box. Behind "asked 'tea' did" a small model repeats 'tea' (docs/LOG.md).
            for n, k in enumerate(filled):
                text, well = asked_texts[min(n, len(asked_texts) - 1)], texts[n][1]
                clauses[k] = f"{clauses[k][0]} asked '{text}' {'same' if well else 'different'}", well
            texts = texts[len(filled) :]
        clauses += texts
        return clauses + [*places] + _name_clauses(asked_names, [], chosen, pressed)
    typed = [text for text in done_texts if text]
    filled = [(bid, value) for bid, value in boxes if value != "''"]
    if typed and not asked_texts and len(filled) > 1:  # what was to be typed stands in another box
        clauses += [_as_another(bid, value, filled) for bid, value in filled if value.strip("'") in typed]
    return clauses + [*places] + _name_clauses(asked_texts + asked_names, typed, chosen, pressed)


def _as_another(bid: str, value: str, boxes: Sequence[Box]) -> Clause:
    """Whether another text box holds the same.

    >>> _as_another("4", "'tea'", [("3", "'salt'"), ("4", "'tea'")])
    ('[4] as no other different', False)
    """
    other = next((box for box, text in boxes if text == value and box != bid), None)
    return (f"[{bid}] as [{other}] same", True) if other else (f"[{bid}] as no other different", False)


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
        clauses.append(_side_by_side(text, typed, text == typed))
    return clauses


def _name_clauses(asked: list[str], typed: list[str], chosen: list[str], pressed: list[str]) -> list[Clause]:
    """Each name that was asked for, then what nobody asked for. The order of presses counts, the order of
    choices does not. Beside a name that was not chosen stands what was chosen instead: that a name is missing
    from a list is hard to see.

    >>> _name_clauses(["One", "Two"], [], [], ["Two", "One"])
    [("asked 'One' did 'Two' different", False), ("asked 'Two' did 'One' different", False)]
    >>> _name_clauses(["tea", "milk"], [], ["salt", "tea"], ["Help"])[1:]
    [("asked 'milk' did 'salt' different", False), ("did 'Help' extra", False)]
    """
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
            other = next((c for c in extra if c in chosen), None)
            if other is not None:
                extra.remove(other)
        clauses.append(_side_by_side(name, other, same))
    return clauses + [(f"did '{name}' extra", False) for name in extra]


def _side_by_side(asked: str, done: str | None, same: bool) -> Clause:
    said = "none" if done is None else f"did '{done}' {'same' if same else 'different'}"
    return f"asked '{asked}' {said}", same
