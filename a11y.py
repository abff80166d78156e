r"""A page as text: parse, render, find, diff, apply, align.

A page is what BrowserGym's `flatten_axtree_to_str` prints of Chromium's accessibility tree: a line for each
element, tabs for depth.

    RootWebArea 'Login', focused, url='http://host/'
    \t[13] textbox 'User' value='Bob', clickable, visible, focused
    \t[14] button 'Go', clickable, visible

A line is `[id] role 'name' value='..', attribute, attribute='..'`. All but the role may be missing. The name
is a Python repr. An id is up to 16 letters and digits: '12', or 'a12' inside an iframe. A line that does not
read like this is opaque: text without fields. A line whose id occurs twice is opaque too, and counts as a
line without an id (only `find`, by which a browser acts, takes the first of them). Pages are split on "\n"
only, because U+2028 and its like stand in names. A line's parent is the nearest line above it with fewer
tabs; levels may be skipped.

The world model does not predict the next page but what the action changes on the page, a delta:

    delta := "no change" | page | op ("\n" op)*
    op    := "set" PLACE attributes   add or overwrite, written as in a line: set [14] value='Bob', focused
           | "unset" PLACE keys       remove attributes: unset [13] value, focused
           | "name" PLACE 'name'      a new name
           | "line" PLACE text        replace all of the line but its id and depth
           | "del" PLACE              remove the line and all below it: its subtree
           | "add" PLACE k block      insert as child k (from 0, counted in `before`) of the line at PLACE
           | "move" PLACE PLACE k     the subtree at the first place becomes child k of the second
    page  := "page" block             the new page as a whole (a navigation); depth is absolute
    block := ("\n| " line)+           depth is relative, a child has no tab; `[] role` asks for a free id
    PLACE := [id] | [id]/j/k | /j/k   a line; child k of child j of [id], or of the page; "/": the page itself

All operations address `before`: none moves the target of another. Edits of a line, and insertions at one
place, keep the order of the script. A subtree that is moved out of a removed subtree survives. A new
attribute goes where BrowserGym prints it. Each `[]` gets a new id: the highest number among the ids of
`before` plus 1, plus 2, and so on, from the top of the result down. align does the same, because a model
cannot guess ids. "|!" in place of "| " inserts a line that starts with "[" but has no id of its own, such as
"[] odd".

>>> before = "RootWebArea 'Login'\n\t[13] textbox 'User', focused\n\t[14] list ''\n\t\t[15] button 'Go'"
>>> def show(delta): print(apply(before, delta).replace("\t", "  "))
>>> show("unset [13] focused, checked\nset [13] value='Bob', clickable\nset [15] focused\nname [14] 'All'")
RootWebArea 'Login'
  [13] textbox 'User' value='Bob', clickable
  [14] list 'All'
    [15] button 'Go', focused
>>> show("line [13] heading 'Hi'\ndel [14]\nadd / 1\n| [] dialog 'Sure?'\n| \t[] link 'Yes'\nmove [15] /0 1")
RootWebArea 'Login'
  [13] heading 'Hi'
  [15] button 'Go'
[16] dialog 'Sure?'
  [17] link 'Yes'
>>> show("page\n| RootWebArea 'Welcome'\n| \t[] link 'Home'")
RootWebArea 'Welcome'
  [16] link 'Home'
>>> apply(before, "unset [13] focused\ndel [99]")
Traceback (most recent call last):
a11y.DeltaError: line 2: unknown id [99]
"""
import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

_BID = r"[A-Za-z0-9]{1,16}"  # 16: what is longer is no id, and int() stays cheap
# Exactly what repr can write: on anything else unquote would need Python's parser to fail, or to warn.
_ESCAPE = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5}|U0010[0-9a-f]{4})"
_STRING = "(?:" + "|".join(rf"{q}(?:[^{q}\\\x00-\x1f\ud800-\udfff]++|{_ESCAPE})*+{q}" for q in "'\"") + ")"
_VALUE = rf"""=(?:{_STRING}|[^\s,'"]+)"""
_ATTRIBUTE = rf"[A-Za-z][\w-]*(?:{_VALUE})?"
_ATTRIBUTES = re.compile(rf"{_ATTRIBUTE}(?:, {_ATTRIBUTE})*")
_HEADS = re.compile(rf"^(\t*)(?:\[({_BID})\] )?(.*)", re.MULTILINE)
_LINE = re.compile(rf"([A-Za-z][\w-]*)(?: ({_STRING}))?(?: (value{_VALUE}))?((?:, {_ATTRIBUTE})*)")
_PLACE = re.compile(rf"/|(?=.)(?:\[({_BID})\])?(?:/[0-9]{{1,9}})*")
# Where BrowserGym prints an attribute: its own first, then Chromium's in the order of the DevTools protocol
# (read off Chromium 156). What is not listed (url, ...) comes last. `value` stands before the commas.
_RANK = {key: rank for rank, key in enumerate((
    "value box center clickable visible som live atomic relevant busy disabled focused autocomplete hasPopup "
    "multiselectable orientation required valuemin valuemax valuetext checked pressed expanded selected "
    "modal").split())}


class DeltaError(ValueError):
    """A delta that cannot be applied: which of its lines (from 1), and why."""


@dataclass(slots=True)
class Node:
    """A line. An opaque line has its `text`, an id if that is unique, and no other field."""
    depth: int
    bid: str | None
    role: str | None
    name: str | None
    attributes: dict[str, str]  # in the line's order, as written: {'value': "'Bob'", 'focused': ''}
    text: str  # the line without tabs


# ---- lines ----

def parse(page: str) -> list[Node]:
    r"""The lines of a page, in order; `"\n".join(map(render, parse(page))) == page` for every string.

    >>> [node] = parse("\t[14] button 'Go', clickable")
    >>> node.depth, node.bid, node.role, node.name, node.attributes
    (1, '14', 'button', 'Go', {'clickable': ''})
    >>> node.attributes["focused"] = ""
    >>> render(node)
    "\t[14] button 'Go', clickable, focused"
    """
    parsed, nodes = _page(page), []
    for depth, bid, text, line in list(zip(parsed.depth, parsed.bid, parsed.texts, parsed.lines))[1:]:
        role, name, attributes = _fields(text) or (None, None, {})
        nodes.append(Node(depth, bid, role, name, dict(attributes), line[depth:]))
    return nodes


def render(node: Node) -> str:
    """The line of a node, tabs included: from its fields, of an opaque line from its `text`."""
    head = "" if node.bid is None else f"[{node.bid}] "
    text = head + _text(node.role, node.name, node.attributes) if node.role else node.text
    return "\t" * node.depth + text


def find(page: str, bid: str) -> Node | None:
    r"""The first line with this id, if there is one. A box for times or dates shares its id with the parts
    that Chromium puts into it, and the first of them is the box.

    >>> find("[1] link 'Home'\n[2] InputTime ''\n\t[2] spinbutton 'Hours' value=0", "2").role
    'InputTime'
    """
    pattern = rf"^\t*\[{re.escape(bid)}\] .*$"
    line = re.search(pattern, page, re.MULTILINE) if re.fullmatch(_BID, bid) else None
    return parse(line[0])[0] if line else None


def unquote(source: str) -> str:
    """The string a Python repr stands for; ValueError if it is not one.

    >>> unquote("'Bob'"), unquote(r"'a\\nb'")
    ('Bob', 'a\\nb')
    """
    if not re.fullmatch(_STRING, source):
        raise ValueError(f"not a quoted string: {source[:80]}")
    # Python's parser would cost most of a diff: it is asked only where there is an escape.
    return ast.literal_eval(source) if "\\" in source else source[1:-1]


def _items(source: str) -> list[tuple[str, str]]:
    """Attributes as written -> keys and sources: "focused, min='1'" -> [('focused', ''), ('min', "'1'")]."""
    items = [item.partition("=") for item in re.findall(_ATTRIBUTE, source)]
    return [(key, value) for key, _, value in items]


@functools.lru_cache(2**15)  # pages that follow each other share most lines; some 30 MB
def _fields(text: str) -> tuple[str, str | None, dict[str, str]] | None:
    """Role, name, attributes (shared: only read it) of a line without its id; None if _text would differ."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    role, quoted, value, others = match.groups()
    items = _items(value or "") + _items(others)
    attributes, name = dict(items), None if quoted is None else unquote(quoted)
    twice, misplaced = len(attributes) < len(items), "value" in attributes and not value
    return None if twice or misplaced or (quoted and repr(name) != quoted) else (role, name, attributes)


def _text(role: str, name: str | None, attributes: dict[str, str]) -> str:
    text = role if name is None else f"{role} {name!r}"
    for key, value in attributes.items():
        text += (" " if key == "value" else ", ") + (f"{key}={value}" if value else key)
    return text


class _Page:
    r"""The lines of a page as parallel lists. Index 0 is the page itself, at depth -1, above all lines.

    >>> page = _Page("[1] list ''\n\t[2] link 'a'\n\tStaticText 'b'")
    >>> page.depth, page.parent, page.children, page.bid
    ([-1, 0, 1, 1], [0, 0, 1, 1], [[1], [2, 3], [], []], [None, '1', '2', None])
    >>> page.texts[2], page.place(3), page.locate("[1]/1")
    ("link 'a'", '[1]/1', 3)
    """

    def __init__(self, page: str):
        self.lines = ["", *page.split("\n")]
        tabs, labels, rests = zip(*_HEADS.findall(page))
        # The id as written, be it unique or not, and the text after it.
        self.label, self.rest = [None, *(label or None for label in labels)], ["", *rests]
        self.depth, self.parent, self.ordinal = [-1, *map(len, tabs)], [0], [0]  # which child of its parent
        self.children: list[list[int]] = [[] for _ in self.lines]
        path = [0]  # the line above, after all its ancestors
        for i, depth in enumerate(self.depth[1:], 1):
            while self.depth[path[-1]] >= depth:
                path.pop()
            self.parent.append(path[-1])
            self.ordinal.append(len(self.children[path[-1]]))
            self.children[path[-1]].append(i)
            path.append(i)
        # How much deeper than its parent: 1, or more where a page skips levels.
        self.step = [depth - self.depth[parent] for depth, parent in zip(self.depth, self.parent)]
        self.by_id: dict[str, int] = {}  # id -> line, or 0 for an id that occurs twice
        for i, label in enumerate(self.label):
            if label is not None:
                self.by_id[label] = 0 if label in self.by_id else i
        self.next_id = 1 + max((int(label) for label in self.by_id if label.isdecimal()), default=0)
        self.bid = [label if label and self.by_id[label] else None for label in self.label]
        # The lines without their tabs and ids. What is not unique is no id, but text.
        self.texts = [rest if bid is not None else line[depth:]
                      for rest, bid, line, depth in zip(self.rest, self.bid, self.lines, self.depth)]

    def place(self, i: int) -> str:
        ordinals = []
        while i and self.bid[i] is None:
            ordinals.append(f"/{self.ordinal[i]}")
            i = self.parent[i]
        return (f"[{self.bid[i]}]" if i else "") + "".join(reversed(ordinals)) or "/"

    def locate(self, place: str) -> int:
        """The line at a place; 0, the page, for "/"."""
        match = _PLACE.fullmatch(place)
        if match is None:
            raise ValueError(f"bad place {place[:80]!r}")
        bid, i = match[1], self.by_id.get(match[1], 0)
        if bid and not i:
            raise ValueError(f"id [{bid}] occurs twice" if bid in self.by_id else f"unknown id [{bid}]")
        for k in re.findall("/([0-9]+)", place):
            if int(k) >= len(self.children[i]):
                raise ValueError(f"no line at {place[:80]}")
            i = self.children[i][int(k)]
        return i


_page = functools.lru_cache(8)(_Page)  # for reading only. A page is the `after` of one step, then a `before`


# ---- apply ----

def apply(before: str, delta: str) -> str:
    """The page after a delta (grammar above). Raises DeltaError, and nothing else, for any other text."""
    if delta == "no change":
        return before
    page = _page(before)
    return _write(page, *_note(page, _read(delta)))


def _read(delta: str) -> list[tuple[int, str, str, list]]:
    r"""A delta as operations: (line of the delta, word, what follows it, lines to insert). A line to insert:
    (depth, text, whether it is literal, line of the delta).

    >>> _read("del [3]\nadd [1] 0\n| list ''\n| \t[] link 'a'")
    [(1, 'del', '[3]', []), (2, 'add', '[1] 0', [(0, "list ''", False, 3), (1, "[] link 'a'", False, 4)])]
    """
    ops: list[tuple[int, str, str, list]] = []
    for number, line in enumerate(delta.split("\n"), 1):
        word, _, rest = line.partition(" ")
        if line[:2] in ("| ", "|!") and ops and ops[-1][1] in ("add", "page"):
            text = line[2:].lstrip("\t")
            ops[-1][3].append((len(line) - 2 - len(text), text, line[1] == "!", number))
        elif word in ("set", "unset", "name", "line", "del", "add", "move", "page"):
            ops.append((number, word, rest, []))
        else:
            raise DeltaError(f"line {number}: bad operation, or a line without add or page: {line[:80]!r}")
    number, _, rest, block = ops[-1]
    if any(op[1] == "page" for op in ops) and (len(ops) > 1 or rest or not block):
        raise DeltaError(f"line {number}: page stands alone and has lines")
    return ops


def _note(page: _Page, ops: list) -> tuple[dict, set, dict]:
    """What the operations do, by lines of `before`: so none can move the target of another. `texts`: line ->
    (number of its last edit, new text). `gone`: lines removed or moved, with all below them. `slots`:
    (line, k) -> what comes in front of its child k, [(number, block or moved line)].

    >>> _note(_Page("[1] list ''\\n[2] link 'a'\\n[3] link 'b'"), _read("name [2] 'x'\\nmove [3] [1] 0"))
    ({2: (1, "link 'x'")}, {3}, {(1, 0): [(2, 3)]})
    """
    texts, gone, slots = dict[int, tuple[int, str]](), set[int](), dict[tuple[int, int], list]()
    for number, word, rest, block in ops:
        if word == "page":
            return {}, set(page.children[0]), {(0, 0): [(number, block)]}
        place, _, argument = rest.partition(" ")
        try:
            line = target = page.locate(place)
            if not line and word != "add":
                raise ValueError("the page itself can only be added to")
            if word == "move":
                place, _, argument = argument.partition(" ")
                target = page.locate(place)
            if word in ("add", "move"):
                count = len(page.children[target])
                if not re.fullmatch("[0-9]{1,9}", argument) or int(argument) > count:
                    raise ValueError(f"bad child number {argument[:80]!r}")
                if word == "add" and not block:
                    raise ValueError("nothing to add")
                slots.setdefault((target, int(argument)), []).append((number, block or line))
            if word in ("del", "move"):
                if line in gone:
                    raise ValueError("this line is removed or moved already")
                if word == "del" and argument:
                    raise ValueError(f"after its place stands {argument[:80]!r}")
                gone.add(line)
            elif word != "add":
                text = texts[line][1] if line in texts else page.texts[line]
                texts[line] = number, _edit(text, word, argument)
        except ValueError as error:
            raise DeltaError(f"line {number}: {error}") from None
    return texts, gone, slots


def _write(page: _Page, texts: dict, gone: set, slots: dict) -> str:
    """The result, from what _note noted. An operation that does not show up in it contradicts another: a line
    is edited and removed, or moved into itself."""
    waiting = {number for entries in [texts.values(), *slots.values()] for number, _ in entries}
    next_id, lines, asked = page.next_id, list[str](), dict[str, int]()  # asked: inserted id -> its number
    stack: list[tuple] = [(0, 0, -1)]  # (number, line or block, depth); no recursion: 10,000 levels may occur
    while stack:
        number, item, depth = stack.pop()
        waiting.discard(number)
        if isinstance(item, list):
            for deeper, text, literal, number in item:
                if not literal and text.startswith("[] "):
                    text, next_id = f"[{next_id}]{text[2:]}", next_id + 1
                lines.append("\t" * (depth + deeper) + text)
                if not literal and (label := _HEADS.findall(text)[0][1]):
                    asked[label] = number
            continue
        if item in texts:
            number, text = texts[item]
            waiting.discard(number)
            lines.append("\t" * depth + (f"[{page.bid[item]}] " if page.bid[item] else "") + text)
        elif item:
            line, old_depth = page.lines[item], page.depth[item]
            lines.append(line if depth == old_depth else "\t" * depth + line[old_depth:])
        below = []
        for k, child in enumerate([*page.children[item], 0]):
            below += slots.get((item, k), ())
            if child and child not in gone:
                below.append((0, child))
        for number, what in reversed(below):  # the stack gives back the first last
            stack.append((number, what, depth + (1 if isinstance(what, list) else page.step[what])))
    if waiting:
        raise DeltaError(f"line {min(waiting)}: the line is removed, or moved into itself")
    counts = Counter(label for _, label, _ in _HEADS.findall("\n".join(lines))) if asked else {}
    for label, number in asked.items():
        if counts[label] > 1:  # an agent could click neither of the two
            raise DeltaError(f"line {number}: id [{label}] occurs twice in the result")
    return "\n".join(lines)


def _edit(text: str, word: str, argument: str) -> str:
    """A line's text, without its id, after set, unset, name or line."""
    if word == "line":
        if argument.startswith("\t"):
            raise ValueError("line keeps the depth: no tabs before the text")
        return argument
    fields = _fields(text)
    if fields is None:
        raise ValueError("the line has no fields, only `line` replaces it")
    role, name, attributes = *fields[:2], dict(fields[2])
    if word == "name":
        return _text(role, unquote(argument), attributes)
    if not _ATTRIBUTES.fullmatch(argument):
        raise ValueError(f"bad attributes {argument[:80]!r}")
    for key, value in _items(argument):
        if word == "set":
            if key == "value" and not value:
                raise ValueError("cannot set value: its text is missing")
            attributes = _with(attributes, key, value)
        else:  # what is not there needs nothing: small models write `unset focused` once too often
            attributes.pop(key, None)
    return _text(role, name, attributes)


def _with(attributes: dict[str, str], key: str, value: str) -> dict[str, str]:
    """`attributes` with a new value, or with a new key in front of the first that BrowserGym prints later."""
    if key in attributes:
        return attributes | {key: value}
    rank = lambda name: _RANK.get(name, len(_RANK))
    k = next((k for k, other in enumerate(attributes) if rank(other) > rank(key)), len(attributes))
    items = list(attributes.items())
    return dict([*items[:k], (key, value), *items[k:]])


# ---- diff ----

def diff(before: str, after: str) -> str:
    r"""A delta with apply(before, delta) == after, for any strings; `page` where nothing else is shorter.
    It is as long as what changes. Only a line that goes while its children stay costs a move for each.

    >>> print(diff("[1] textbox 'User', focused\n[2] link 'Go'", "[1] textbox 'User' value='A'\n[2] link ''"))
    unset [1] focused
    set [1] value='A'
    name [2] ''
    """
    if before == after:
        return "no change"
    old, new = _page(before), _page(after)
    page = "\n".join(["page", *_quoted(old, new, range(1, len(new.lines))).values()])
    delta = min(page, "\n".join(_ops(old, new)), key=len)
    assert apply(before, delta) == after, "a delta that is wrong would be learned"
    return delta


def _ops(old: _Page, new: _Page) -> Iterator[str]:
    """Edits and removals in the order of `old`, then insertions and moves in the order of `new`."""
    to_old, stays = _pair(old, new)
    to_new = {i: j for j, i in enumerate(to_old) if i is not None}
    for i in range(1, len(old.lines)):
        j = to_new.get(i)
        if j is None and old.parent[i] in to_new:
            yield f"del {old.place(i)}"
        elif j is not None and old.texts[i] != new.texts[j]:
            yield _edit_op(old.place(i), old.texts[i], new.texts[j])
    quoted = _quoted(old, new, (j for j, i in enumerate(to_old) if i is None))
    for parent, old_parent in enumerate(to_old):
        if old_parent is None or stays.issuperset(new.children[parent]):
            continue
        place, k, block = old.place(old_parent), 0, ""  # k: after the last child that stays
        for j in [*new.children[parent], 0]:  # 0: the end, which writes the last block
            if (was := to_old[j]) is not None and block:
                yield f"add {place} {k}{block}"
                block = ""
            if was is None:  # sibling after sibling goes into one block
                tabs, n = new.depth[parent] + 1, j
                while n == j or (n < len(new.lines) and new.depth[n] > new.depth[j]):
                    block += "\n" + quoted[n][:2] + quoted[n][2 + tabs:]
                    n += 1
            elif j in stays:
                k = old.ordinal[was] + 1
            elif j:
                yield f"move {old.place(was)} {place} {k}"


def _quoted(old: _Page, new: _Page, inserted: Iterable[int]) -> dict[int, str]:
    r"""Inserted lines as in a block, but with all their tabs. An id that apply gives anyway becomes `[]`.

    >>> _quoted(_Page("[1] a"), _Page("[2] b\n\t[x] c\n[] d"), [1, 2, 3])
    {1: '| [] b', 2: '| \t[x] c', 3: '|![] d'}
    """
    quoted, next_id = {}, old.next_id
    for j in inserted:
        text = new.lines[j][new.depth[j]:]
        mark = "|!" if new.bid[j] is None and text.startswith("[") else "| "
        if new.bid[j] == str(next_id):
            text, next_id = f"[] {new.rest[j]}", next_id + 1
        quoted[j] = mark + "\t" * new.depth[j] + text
    return quoted


def _pair(old: _Page, new: _Page) -> tuple[list[int | None], set[int]]:
    r"""For each line of `new` the line of `old` that becomes it (None: inserted), and which lines stay.
    Below an inserted line everything is inserted, since an operation can only address `before`.

    >>> _pair(_Page("[1] a\n[2] b\n[3] c\ntext x"), _Page("[3] c\n[1] a\n[2] b\n[4] d\ntext y"))
    ([0, 3, 1, 2, None, 4], {2, 3, 5})

    Siblings are compared by keys: a line with an id by its line in `old` (-y if it is not there), any other
    line by its text. Here: 1, 2, 3, "text x" and 3, 1, 2, -4, "text y", so 1 and 2 stay, and [3] moves.
    Between equal keys, texts are taken in turn, and edited if their roles agree: "text x" becomes "text y".
    difflib is slow where thousands of siblings without ids repeat some texts: 20 s for 20,000."""
    to_old, stays = [0] + [None] * (len(new.lines) - 1), set()
    for parent, old_parent in enumerate(to_old):  # a parent stands above its children, and is settled first
        if old_parent is None or not new.children[parent]:
            continue
        xs, ys = old.children[old_parent], new.children[parent]
        for y in ys:
            x = old.by_id.get(new.bid[y] or "")
            if x and old.step[x] == new.step[y] and new.rest[y][:1] != "\t":  # which `line` cannot write
                to_old[y] = x
        x_keys = [x if old.bid[x] is not None else "\t" * old.step[x] + old.texts[x] for x in xs]
        y_keys = [to_old[y] or -y if new.bid[y] is not None
                  else "\t" * new.step[y] + new.texts[y] for y in ys]
        for tag, x_start, x_end, y_start, y_end in SequenceMatcher(None, x_keys, y_keys).get_opcodes():
            x_span = [m for m in range(x_start, x_end) if tag == "equal" or isinstance(x_keys[m], str)]
            y_span = [n for n in range(y_start, y_end) if tag == "equal" or isinstance(y_keys[n], str)]
            for m, n in zip(x_span, y_span):
                if tag == "equal" or str(x_keys[m]).partition(" ")[0] == str(y_keys[n]).partition(" ")[0]:
                    to_old[ys[n]] = xs[m]
                    stays.add(ys[n])
    return to_old, stays


def _edit_op(place: str, old: str, new: str) -> str:
    """The fewest attributes that turn a text into another; `line` where that would get their order wrong."""
    before, after = _fields(old), _fields(new)
    if before and after and before[0] == after[0] and (before[1] is None or after[1] is not None):
        (_, name, had), (_, new_name, has) = before, after
        unset = [key for key in had if key not in has]
        changed = [f"{key}={value}" if value else key for key, value in has.items() if had.get(key) != value]
        named = [repr(new_name)] if name != new_name else []
        text, ops = old, []
        for word, arguments in (("name", named), ("unset", unset), ("set", changed)):
            if arguments:
                text = _edit(text, word, ", ".join(arguments))
                ops.append(f"{word} {place} {', '.join(arguments)}")
        if text == new:
            return "\n".join(ops)
    return f"line {place} {new}"


# ---- align ----

def align(before: str, after: str) -> str:
    r"""`after` with its ids renamed by `alignment`, and nothing else changed. Ids restart with each document:
    two pages of a site number the same header differently. After align it costs no delta.

    >>> print(align("[1] link 'Home'\n[2] button 'Buy'", "[7] link 'Home'\n[8] link 'Sell'"))
    [1] link 'Home'
    [3] link 'Sell'
    """
    names, page = alignment(before, after), _page(after)
    lines = ["\t" * depth + f"[{names[label]}] {rest}" if label else line
             for depth, label, rest, line in zip(page.depth, page.label, page.rest, page.lines)]
    return "\n".join(lines[1:])  # line 0 is the page itself


def alignment(before: str, after: str) -> dict[str, str]:
    """Each id of `after` -> its id after align, one to one. An element that is recognisably the same gets the
    id it had in `before`. The others, lettered ids too, get the next numbers above all among the ids of
    `before`, in order: no removed id comes back. An id that occurs twice is renamed on all its lines alike.
    If `after` is only renumbered, align gives `before`. A second align changes nothing."""
    old, new = _page(before), _page(after)
    renumbered = old.rest == new.rest and old.depth == new.depth
    names, used = {}, {None}
    for label, i in zip(new.label, range(len(new.lines)) if renumbered else _recognise(old, new)):
        if label and label not in names and i is not None and old.label[i] not in used:
            names[label] = old.label[i]
            used.add(old.label[i])
    unknown = dict.fromkeys(label for label in new.label if label and label not in names)
    return names | {label: str(old.next_id + n) for n, label in enumerate(unknown)}


def _recognise(old: _Page, new: _Page) -> list[int | None]:
    """For each line of `new` the line of `old` that is the same element. The safest evidence comes first."""
    numbers: dict[tuple, int] = {}
    rules = list(zip(_keys(old, numbers), _keys(new, numbers)))
    _, _, names, roles = rules
    to_old, to_new = [0] + [None] * (len(new.lines) - 1), [0] + [None] * (len(old.lines) - 1)
    # Equal ids, if most of them have equal names: it is one document then. Else the counter restarted.
    shared = [(i, new.by_id[bid]) for bid, i in old.by_id.items() if i and new.by_id.get(bid)]
    if 2 * sum(names[0][i] == names[1][j] for i, j in shared) > len(shared):
        for i, j in shared:
            if roles[0][i] == roles[1][j]:
                to_old[j], to_new[i] = i, j
    _grow(old, new, to_old, to_new, rules[:3])
    # The only child left of its role: under a new name (a counter). If most had one, it is another page.
    sure = list(to_old)
    _grow(old, new, to_old, to_new, rules)
    found = [(i, j) for j, i in enumerate(to_old) if i is not None and new.bid[j] is not None]
    return to_old if 2 * sum(names[0][i] == names[1][j] for i, j in found) > len(found) else sure


def _keys(page: _Page, numbers: dict) -> tuple[list, list, list, list]:
    """Four keys for each line, the strictest first: its subtree (as a number), its text, its role and name,
    its role; all without ids. Lines with an id, with none and with an id that occurs twice never agree."""
    kinds = [(label is None) + 2 * (bid is None) for label, bid in zip(page.label, page.bid)]
    texts, shapes = list(zip(kinds, page.rest)), [0] * len(kinds)
    for i in range(len(kinds) - 1, -1, -1):  # children before their parent
        shape = texts[i], *[shapes[child] for child in page.children[i]]
        shapes[i] = numbers.setdefault(shape, len(numbers))
    names = [(kind, *(_fields(rest) or (None, rest))[:2]) for kind, rest in texts]
    return shapes, texts, names, [name[:2] for name in names]


def _grow(old: _Page, new: _Page, to_old: list, to_new: list, rules: list) -> None:
    """Matches, in place, the children of matched lines, rule by rule: equal key with equal key, k-th with
    k-th; by the fourth rule, the role, only what is left alone on both sides. Say two matched lists hold the
    links a, b and the text x; b, a and the text y. By name a is a, and b is b. Alone of its role, x is y."""
    for parent, old_parent in enumerate(to_old):  # a parent stands above its children, and is settled first
        if old_parent is None or not new.children[parent]:
            continue
        for n, keys in enumerate(rules):
            wanted = [j for j in new.children[parent] if to_old[j] is None]
            left = [i for i in old.children[old_parent] if to_new[i] is None] if wanted else []
            if not left:
                break
            groups: dict = {}  # key -> the lines of `old` that have it, those of `new`
            for side, lines in enumerate((left, wanted)):
                for i in lines:
                    groups.setdefault(keys[side][i], ([], []))[side].append(i)
            for xs, ys in groups.values():
                if n < 3 or len(xs) == len(ys) == 1:
                    for i, j in zip(xs, ys):
                        to_old[j], to_new[i] = i, j
