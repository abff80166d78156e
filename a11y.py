r"""An accessibility tree as text: parse, render, diff, apply, align.

A page is the text of BrowserGym's `flatten_axtree_to_str`, a line an element, tabs for depth:

    RootWebArea 'Login', focused, url='http://host/'
    \t[13] textbox 'User' value='Bob', clickable, visible, focused
    \t[14] button 'Go', clickable, visible

A line is `[id] role 'name' value='..', attribute, attribute='..'`; all but the role may be missing, the name is a Python
repr. An id is up to 16 letters and digits ('12'; 'a12' inside an iframe). A line that does not read like this, or whose id
occurs twice, is opaque: text without fields (and in the second case without id). Pages are split on "\n" only, because
U+2028 and its like stand in names. A line's parent is the nearest line above with fewer tabs; levels may be skipped.

The world model predicts not a page but what the action changes on it, a delta:

    delta  := "no change" | page | splice ("\n" splice)* | op ("\n" op)*
    op     := "set" PLACE attributes    add or overwrite, written as in a line:  set [14] value='Bob', focused
            | "unset" PLACE keys        remove attributes:                       unset [13] value, focused
            | "name" PLACE 'name'       a new name
            | "line" PLACE text         all of the line but its id and depth
            | "del" PLACE               remove the subtree
            | "add" PLACE k block       insert as child number k (from 0, counted in `before`) of the line at PLACE
            | "move" PLACE PLACE k      the subtree at the first becomes child number k of the second
    page   := "page" block              the new page as a whole (a navigation); depth is absolute
    splice := "splice" PLACE n block?   replace n lines from PLACE on, whoever their children are; depth is absolute
    block  := ("\n| " line)+            depth is relative, a child has no tab; `[] role` asks for the next free id
    PLACE  := [id] | [id]/k/k | /k/k    a line; child k of child k of [id], or of the page; "/" is the page itself

All operations address `before`, all at once: none moves the target of another. Edits of one line, and what is inserted at one
place, keep the order of the script. A subtree moved out of a removed one survives. A new attribute goes where BrowserGym
prints it. `[]` takes max(plain numbers among the ids of `before`)+1, ... in document order of the result, as align does,
because a model cannot guess ids. "|!" for "| " inserts a line literally that starts with "[" but has no id of its own.
`splice` (in order of the page; "/" is its end) is for lines that change while their children stay and fall to another
parent; diff writes it only where subtrees would take half as much again.

>>> before = "RootWebArea 'Login', focused\n\t[13] textbox 'User', focused\n\t[14] list ''\n\t\t[15] button 'Go'\n\t\tStaticText 'or'"
>>> def show(delta): print(apply(before, delta).replace("\t", "  "))
>>> show("unset [13] focused\nset [13] value='Bob', clickable\nset [15] focused\nname [14]/1 'and'")
RootWebArea 'Login', focused
  [13] textbox 'User' value='Bob', clickable
  [14] list ''
    [15] button 'Go', focused
    StaticText 'and'
>>> show("line [13] heading 'Hello Bob'\ndel [14]\nadd / 1\n| [] dialog 'Sure?'\n| \t[] button 'Yes'")
RootWebArea 'Login', focused
  [13] heading 'Hello Bob'
[16] dialog 'Sure?'
  [17] button 'Yes'
>>> show("move [15] /0 0\nadd [14] 2\n| StaticText 'nothing'")
RootWebArea 'Login', focused
  [15] button 'Go'
  [13] textbox 'User', focused
  [14] list ''
    StaticText 'or'
    StaticText 'nothing'
>>> show("page\n| RootWebArea 'Welcome'\n| \t[] link 'Home'")
RootWebArea 'Welcome'
  [16] link 'Home'
>>> show("splice /0/0 2\n| \t[16] textbox 'Name'")
RootWebArea 'Login', focused
  [16] textbox 'Name'
    [15] button 'Go'
    StaticText 'or'
>>> apply(before, "no change") == before
True
>>> diff(before, before.replace("User', focused", "User' value='Bob'"))
"unset [13] focused\nset [13] value='Bob'"
>>> apply(before, "del [99]")
Traceback (most recent call last):
a11y.DeltaError: line 1: unknown id [99]

Two observations of one site number the same elements differently: ids restart with every document. align gives the elements
that are recognisably the same the id they had in `before`, so that a header which a navigation renumbered costs no delta.

>>> print(align("[1] link 'Home'\n[2] button 'Buy'", "[7] link 'Home'\n[8] button 'Sell'"))
[1] link 'Home'
[3] button 'Sell'
"""
import ast
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

_BID = r"[A-Za-z0-9]{1,16}"  # 16: what is longer is no id, and int() stays cheap
# Exactly what repr can write: on anything else unquote would need Python's parser to fail, or to warn.
_ESCAPE = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5}|U0010[0-9a-f]{4})"
_STRING = "(?:" + "|".join(rf"{q}(?:[^{q}\\\x00-\x1f\ud800-\udfff]++|{_ESCAPE})*+{q}" for q in "'\"") + ")"
_ITEM = rf"""[A-Za-z][\w-]*(?:=(?:{_STRING}|[^\s,'"]+))?"""
_HEAD = re.compile(rf"(\t*)(?:\[({_BID})\] )?")
_LINE = re.compile(rf"([A-Za-z][\w-]*)(?: ({_STRING}))?(?: (value=(?:{_STRING}|[^\s,'\"]+)))?((?:, {_ITEM})*)")
_ITEMS = re.compile(rf"{_ITEM}(?:, {_ITEM})*")
_PLACE = re.compile(rf"(?:\[({_BID})\])?((?:/[0-9]{{1,9}})*)")
# Where BrowserGym prints an attribute: its own first, then Chromium's in the order of the DevTools protocol (read off
# Chromium 156); what is not listed (url, describedby, controls, ...) comes last. `value` stands before the commas.
_RANK = {key: rank for rank, key in enumerate((
    "value box center clickable visible som live atomic relevant busy disabled focused autocomplete hasPopup multiselectable "
    "orientation required valuemin valuemax valuetext checked pressed expanded selected modal").split())}


class DeltaError(ValueError):
    """A delta that cannot be applied: `line` of the delta (from 1) and `reason`."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)  # both, or the error could not be pickled between processes
        self.line, self.reason = line, reason

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(slots=True)
class Node:
    """A line. `attributes` keeps their order and their source ('' for a flag): {'value': "'Bob'", 'focused': ''}. An opaque
    line has its `text` (the line without tabs), an id if that is unique, and no other field."""
    depth: int
    bid: str | None
    role: str | None
    name: str | None
    attributes: dict[str, str]
    text: str
    opaque: bool


# ---- lines ----

def parse(tree: str) -> list[Node]:
    """The lines of a page, in order; `"\\n".join(map(render, parse(tree))) == tree` for every string."""
    page, nodes = _Tree(tree), []
    for i in range(1, len(page.lines)):
        fields = _fields(page.text(i))
        text = page.lines[i][page.depth[i]:]
        nodes.append(Node(page.depth[i], page.bid[i], *(fields or (None, None, {})), text, fields is None))
    return nodes


def render(node: Node) -> str:
    """The line of a node, tabs included: from its fields, of an opaque one from its `text`."""
    head = "" if node.bid is None else f"[{node.bid}] "
    return "\t" * node.depth + (node.text if node.opaque else head + _text(node.role, node.name, node.attributes))


def find(tree: str, bid: str) -> Node | None:
    """The line with this id; None if there is none, or more than one (nobody could say which is meant)."""
    lines = re.findall(rf"^\t*\[{re.escape(bid)}\] .*$", tree, re.MULTILINE) if re.fullmatch(_BID, bid) else []
    return parse(lines[0])[0] if len(lines) == 1 else None


def unquote(source: str) -> str:
    """The string a Python repr stands for; ValueError if it is not one.

    >>> unquote("'Bob'"), unquote(r"'a\\nb'")
    ('Bob', 'a\\nb')
    """
    if not re.fullmatch(_STRING, source):
        raise ValueError(f"not a quoted string: {source[:80]}")
    return ast.literal_eval(source) if "\\" in source else source[1:-1]  # Python's parser would cost most of a diff


def _items(source: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (item.partition("=") for item in re.findall(_ITEM, source))]


def _fields(text: str) -> tuple[str, str | None, dict[str, str]] | None:
    """Role, name and attributes of a line without its id; None if it does not parse, that is, if _text would not restore it."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    role, quoted, value, tail = match.groups()
    items = _items(value or "") + _items(tail)
    name = None if quoted is None else unquote(quoted)
    if len(dict(items)) < len(items) or (not value and "value" in dict(items)) or (quoted and repr(name) != quoted):
        return None
    return role, name, dict(items)


def _text(role: str, name: str | None, attributes: dict[str, str]) -> str:
    items = [(" " if key == "value" else ", ") + (f"{key}={value}" if value else key) for key, value in attributes.items()]
    return "".join([role if name is None else f"{role} {name!r}", *items])


class _Tree:
    """The lines of a page as parallel lists; index 0 is the page itself, at depth -1, above all lines."""

    def __init__(self, page: str):
        self.lines = ["", *page.split("\n")]
        self.depth, self.step, self.parent, self.ordinal, self.children = [-1], [0], [0], [0], [[]]
        self.label, self.rest = [None], [""]  # the id as written, be it unique or not, and the text behind it
        path, self.by_id = [0], {}
        for i in range(1, len(self.lines)):
            match = _HEAD.match(self.lines[i])
            depth, label = match.end(1), match[2]
            while self.depth[path[-1]] >= depth:
                path.pop()
            parent = path[-1]
            path.append(i)
            self.depth.append(depth)
            self.step.append(depth - self.depth[parent])  # 1, or more where a page skips levels
            self.parent.append(parent)
            self.ordinal.append(len(self.children[parent]))
            self.children[parent].append(i)
            self.children.append([])
            self.label.append(label)
            self.rest.append(self.lines[i][match.end():])
            if label is not None:
                self.by_id[label] = 0 if label in self.by_id else i
        self.next_id = 1 + max((int(label) for label in self.by_id if label.isdecimal()), default=0)
        self.bid = [label if self.by_id.get(label) else None for label in self.label]

    def text(self, i: int) -> str:
        """The line without tabs and without its id, which only a unique one has."""
        return self.rest[i] if self.bid[i] is not None else self.lines[i][self.depth[i]:]

    def place(self, i: int) -> str:
        ordinals = []
        while i and self.bid[i] is None:
            ordinals.append(f"/{self.ordinal[i]}")
            i = self.parent[i]
        return (f"[{self.bid[i]}]" if i else "") + "".join(reversed(ordinals)) or "/"

    def locate(self, place: str) -> int:
        """The line at a place; 0, the page, for "/"."""
        match = _PLACE.fullmatch(place)
        if place == "/":
            return 0
        if match is None or not place:
            raise ValueError(f"bad place {place[:80]!r}")
        if match[1] and not self.by_id.get(match[1]):
            raise ValueError(f"id [{match[1]}] occurs twice" if match[1] in self.by_id else f"unknown id [{match[1]}]")
        i = self.by_id.get(match[1], 0)
        for k in map(int, match[2].split("/")[1:]):
            if k >= len(self.children[i]):
                raise ValueError(f"no line at {place[:80]}")
            i = self.children[i][k]
        return i


# ---- apply ----

def apply(before: str, delta: str) -> str:
    """The page after a delta (grammar above). DeltaError, and nothing else, for what is not a delta of `before`."""
    return before if delta == "no change" else _apply(_Tree(before), delta)


def _apply(tree: _Tree, delta: str) -> str:
    ops = []  # [line of the delta, word, what follows it, lines to insert: (depth, text, literal, line of the delta)]
    for number, line in enumerate(delta.split("\n"), 1):
        word, _, rest = line.partition(" ")
        if line[:2] in ("| ", "|!") and ops and ops[-1][1] in ("add", "page", "splice"):
            text = line[2:].lstrip("\t")
            ops[-1][3].append((len(line) - 2 - len(text), text, line[1] == "!", number))
        elif word in ("set", "unset", "name", "line", "del", "add", "move", "page", "splice"):
            ops.append((number, word, rest, []))
        else:
            raise DeltaError(number, f"bad operation, or a line to insert without add, page or splice: {line[:80]!r}")
    words = {word for _, word, _, _ in ops}
    if "page" not in words:
        return _number(tree, (_splice if "splice" in words else _operate)(tree, ops))
    if len(ops) > 1 or ops[0][2] or not ops[0][3]:
        raise DeltaError(ops[-1][0], "page stands alone and has lines")
    return _number(tree, ops[0][3])


def _splice(tree: _Tree, ops: list) -> list:
    out, done = [], 1
    for number, word, rest, block in ops:
        match = re.fullmatch("(.+) ([0-9]{1,9})", rest)
        try:
            if word != "splice" or not match:
                raise ValueError("splice takes a place and a count, and stands beside splice only")
            start = tree.locate(match[1]) or len(tree.lines)
            if start < done or start + int(match[2]) > len(tree.lines):
                raise ValueError("splices out of order, or past the end of the page")
        except ValueError as error:
            raise DeltaError(number, str(error)) from None
        out += tree.lines[done:start] + block
        done = start + int(match[2])
    return out + tree.lines[done:]


def _operate(tree: _Tree, ops: list) -> list:
    """The lines of the result: kept ones as text, inserted ones as in `_apply`."""
    texts, gone = {}, set()  # line -> (number, new text); the lines that are removed or moved
    slots = {}  # (line, child number) -> [(number, block or moved line)], in the order of the script
    waiting = set()  # insertions and moves that must show up in the result: the net under a model's contradictions
    for number, word, rest, block in ops:
        place, _, argument = rest.partition(" ")
        try:
            line = what = tree.locate(place)
            if word == "move":
                place, _, argument = argument.partition(" ")
                line = tree.locate(place)
            if word in ("add", "move"):
                if not re.fullmatch("[0-9]{1,9}", argument) or int(argument) > len(tree.children[line]):
                    raise ValueError(f"bad child number {argument[:80]!r}")
                if word == "add" and not block:
                    raise ValueError("nothing to add")
                slots.setdefault((line, int(argument)), []).append((number, block if word == "add" else what))
                waiting.add(number)
            if word in ("del", "move"):
                if not what or what in gone or (word == "del" and argument):
                    raise ValueError("not a line, or removed or moved twice")
                gone.add(what)
            elif word != "add":
                if not line:
                    raise ValueError("the page itself has no text")
                texts[line] = number, _edit(texts[line][1] if line in texts else tree.text(line), word, argument)
        except ValueError as error:
            raise DeltaError(number, str(error)) from None
    out, stack = [], [(0, 0, -1)]
    while stack:
        number, item, depth = stack.pop()
        waiting.discard(number)
        if isinstance(item, list):
            out += [(depth + deeper, text, literal, number) for deeper, text, literal, number in item]
            continue
        if item in texts:
            head = "" if tree.bid[item] is None else f"[{tree.bid[item]}] "
            out.append("\t" * depth + head + texts.pop(item)[1])
        elif item:
            line = tree.lines[item]
            out.append(line if depth == tree.depth[item] else "\t" * depth + line[tree.depth[item]:])
        children = tree.children[item]
        for k in range(len(children), -1, -1):  # from the last, because the stack gives back the first last
            if k < len(children) and children[k] not in gone:
                stack.append((0, children[k], depth + tree.step[children[k]]))
            for number, what in reversed(slots.get((item, k), ())):
                stack.append((number, what, depth + (1 if isinstance(what, list) else tree.step[what])))
    if waiting or texts:
        number = min(waiting | {number for number, _ in texts.values()})
        raise DeltaError(number, "it edits or fills a line that is removed, or moves a line into itself")
    return out


def _edit(text: str, word: str, argument: str) -> str:
    """A line's text, without its id, after one of set, unset, name, line."""
    if word == "line":
        if argument.startswith("\t"):
            raise ValueError("line keeps the depth: no tabs before the text")
        return argument
    fields = _fields(text)
    if fields is None:
        raise ValueError("the line has no fields, only `line` replaces it")
    role, name, attributes = fields
    if word == "name":
        return _text(role, unquote(argument), attributes)
    if not _ITEMS.fullmatch(argument):
        raise ValueError(f"bad attributes {argument[:80]!r}")
    for key, value in _items(argument):
        if (word == "unset" and (value or key not in attributes)) or (word == "set" and key == "value" and not value):
            raise ValueError(f"cannot {word} {key}: not there, or its text too much or missing")
        if word == "unset":
            del attributes[key]
        elif key in attributes:
            attributes[key] = value
        else:  # in front of the first that BrowserGym prints later
            ranks = [_RANK.get(other, len(_RANK)) for other in attributes] + [len(_RANK) + 1]
            cut = next(n for n, rank in enumerate(ranks) if rank > _RANK.get(key, len(_RANK)))
            items = list(attributes.items())
            attributes = dict(items[:cut] + [(key, value)] + items[cut:])
    return _text(role, name, attributes)


def _number(tree: _Tree, out: list) -> str:
    """The page from its lines, with the ids that inserted lines ask for."""
    next_id, lines, asked = tree.next_id, [], {}
    for item in out:
        if isinstance(item, str):
            lines.append(item)
            continue
        depth, text, literal, number = item
        if not literal and text.startswith("[] "):
            text, next_id = f"[{next_id}]{text[2:]}", next_id + 1
        lines.append("\t" * depth + text)
        label = _HEAD.match(text)[2]
        if label is not None and not literal:
            asked[label] = number
    counts = Counter(_HEAD.match(line)[2] for line in lines) if asked else {}
    for label, number in asked.items():
        if counts[label] > 1:  # an agent could click neither of the two
            raise DeltaError(number, f"id [{label}] occurs twice in the result")
    return "\n".join(lines)


# ---- diff ----

def diff(before: str, after: str) -> str:
    """A delta with apply(before, delta) == after, whatever the strings: each script is tried on `before`, and `page` always fits.

    Where ids are unique, k edited lines cost at most about 3x their text + 40 k characters, whatever the page's length."""
    if before == after:
        return "no change"
    old, new = _Tree(before), _Tree(after)
    lines = range(1, len(new.lines))
    page = "page" + _quote(old, new, lines)(lines, -1)
    scripts = [(len(page), page), *_script(_tree_ops(old, new), len(page), 1.0)]
    if len(scripts) == 1 or scripts[1][0] > 100:  # long enough for a second look
        scripts += _script(_splice_ops(old, new), len(page), 1.5)  # 1.5: it does not say what happened to the elements
    for _, script in sorted(scripts):
        try:
            if _apply(old, script) == after:
                return script
        except DeltaError:
            pass  # the next script
    raise AssertionError("page fits every pair of strings")


def _script(ops, enough: int, weight: float) -> list[tuple[float, str]]:
    """[(weighted length, script)]; [] if it would be longer than `enough`: many long places without ids could square the cost."""
    script, size = [], 0
    for op in ops:
        script.append(op)
        size += len(op) + 1
        if size > enough + 1:
            return []
    return [(weight * size, "\n".join(script))]


def _quote(old: _Tree, new: _Tree, inserted):
    """The function that writes inserted lines as a block below a line at `depth`, with `[]` for an id that apply gives anyway."""
    quoted, next_id = {}, old.next_id
    for j in inserted:
        text = new.lines[j][new.depth[j]:]
        literal = new.bid[j] is None and text.startswith("[")
        if new.bid[j] == str(next_id):
            text, next_id = f"[] {new.rest[j]}", next_id + 1
        quoted[j] = "\n|!" if literal else "\n| ", text
    return lambda lines, depth: "".join(("\t" * (new.depth[j] - depth - 1)).join(quoted[j]) for j in lines)


def _splice_ops(old: _Tree, new: _Tree):
    pairs = _common(old.lines, new.lines) + [(len(old.lines), len(new.lines))]
    kept = {j for _, j in pairs}
    write = _quote(old, new, (j for j in range(len(new.lines)) if j not in kept))
    i = j = 0
    for a, b in pairs:
        if a > i or b > j:
            place = old.place(i) if i < len(old.lines) else "/"
            yield f"splice {place} {a - i}" + write(range(j, b), -1)
        i, j = a + 1, b + 1


def _tree_ops(old: _Tree, new: _Tree):
    """Edits and removals in the order of `before`, then insertions and moves in the order of `after`."""
    to_old, stays = _pair(old, new)
    to_new = {i: j for j, i in enumerate(to_old) if i is not None}
    for i in range(1, len(old.lines)):
        j = to_new.get(i)
        if j is None and old.parent[i] in to_new:
            yield f"del {old.place(i)}"
        elif j is not None and old.text(i) != new.text(j):
            yield _edit_op(old.place(i), old.text(i), new.text(j))
    write = _quote(old, new, (j for j, i in enumerate(to_old) if i is None))
    for q, p in enumerate(to_old):
        if p is None or all(stays[d] for d in new.children[q]):
            continue
        k, block, place = 0, "", old.place(p)
        for d in new.children[q] + [0]:
            if block and to_old[d] is not None:  # sibling after sibling went into one block
                yield f"add {place} {k}{block}"
                block = ""
            if to_old[d] is None:
                end = d + 1
                while end < len(new.lines) and new.depth[end] > new.depth[d]:
                    end += 1
                block += write(range(d, end), new.depth[q])
            elif stays[d]:
                k = old.ordinal[to_old[d]] + 1
            elif d:
                yield f"move {old.place(to_old[d])} {place} {k}"


def _pair(old: _Tree, new: _Tree) -> tuple[list, bytearray]:
    """For each line of `new` the line of `old` that becomes it (None: inserted), and whether that stays where it is.
    Parents first: below an inserted line everything is inserted, since an operation can only address `before`."""
    to_old, stays = [None] * len(new.lines), bytearray(len(new.lines))
    to_old[0] = 0
    for q, p in enumerate(to_old):  # to_old[q] is settled when q is reached: q's parent stands above it
        if p is None or not new.children[q]:
            continue
        xs, ys = old.children[p], new.children[q]
        for d in ys:
            i = old.by_id.get(new.bid[d])
            if i and old.step[i] == new.step[d]:
                to_old[d] = i
        # What stands for a child in the comparison: its line in `before` if it has an id, its text if it has none.
        x_keys = [i if old.bid[i] is not None else "\t" * old.step[i] + old.text(i) for i in xs]
        y_keys = [(to_old[d] or -d) if new.bid[d] is not None else "\t" * new.step[d] + new.text(d) for d in ys]
        i = j = 0
        for a, b in _common(x_keys, y_keys) + [(len(xs), len(ys))]:
            # Between two that stay, lines without ids are taken in turn, and edited if their roles agree.
            texts = (x for x in range(i, a) if isinstance(x_keys[x], str)), (y for y in range(j, b) if isinstance(y_keys[y], str))
            for x, y in zip(*texts):
                if x_keys[x].partition(" ")[0] == y_keys[y].partition(" ")[0]:
                    to_old[ys[y]], stays[ys[y]] = xs[x], 1
            if a < len(xs):
                to_old[ys[b]], stays[ys[b]] = xs[a], 1
            i, j = a + 1, b + 1
    return to_old, stays


def _edit_op(place: str, old: str, new: str) -> str:
    """The fewest attributes that turn one text into the other, or `line` where that would get their order wrong."""
    a, b = _fields(old), _fields(new)
    if a and b and a[0] == b[0] and (a[1] is None or b[1] is not None):
        unset = ", ".join(key for key in a[2] if key not in b[2])
        changed = ", ".join(f"{key}={value}" if value else key for key, value in b[2].items() if a[2].get(key) != value)
        edits = [("name", repr(b[1]) if a[1] != b[1] else ""), ("unset", unset), ("set", changed)]
        edits, text = [(word, argument) for word, argument in edits if argument], old
        for word, argument in edits:
            text = _edit(text, word, argument)
        if text == new:
            return "\n".join(f"{word} {place} {argument}" for word, argument in edits)
    return f"line {place} {new}"


def _common(xs: list, ys: list) -> list[tuple[int, int]]:
    """Pairs (i, j), both rising, with xs[i] == ys[j]: nearly as many as there are, in nearly linear time. Items that occur
    once in both are anchors (patience diff), as many as rise together; difflib, which can be cubic, sees short gaps only."""
    if xs == ys:
        return [(i, i) for i in range(len(xs))]
    x_count, y_count = Counter(xs), Counter(ys)
    where = {y: j for j, y in enumerate(ys) if y_count[y] == 1 and x_count[y] == 1}
    ends, chain, back = [], [], {}  # ends[n], chain[n]: j and i at the end of the best rising chain of n + 1 anchors
    for i, x in enumerate(xs):
        if x in where:
            n = bisect_left(ends, where[x])
            ends[n:n + 1], chain[n:n + 1] = [where[x]], [i]
            back[i] = chain[n - 1] if n else None
    anchors, i = [(len(xs), len(ys))], chain[-1] if chain else None
    while i is not None:
        anchors.append((i, where[xs[i]]))
        i = back[i]
    pairs, i, j = [], 0, 0
    for end in reversed(anchors):
        a, b = end
        while i < a and j < b and xs[i] == ys[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        tail = []
        while i < a and j < b and xs[a - 1] == ys[b - 1]:
            a, b = a - 1, b - 1
            tail.append((a, b))
        if 0 < (a - i) * (b - j) <= 4096:
            blocks = SequenceMatcher(None, xs[i:a], ys[j:b], autojunk=False).get_matching_blocks()
            pairs += [(i + x + n, j + y + n) for x, y, size in blocks for n in range(size)]
        pairs += tail[::-1] + [end]
        i, j = end[0] + 1, end[1] + 1
    return pairs[:-1]


# ---- align ----

def align(before: str, after: str) -> str:
    """`after` with its ids renamed by `alignment`, and nothing else changed."""
    names = alignment(before, after)
    heads = [(_HEAD.match(line), line) for line in after.split("\n")]
    return "\n".join(f"{head[1]}[{names[head[2]]}] {line[head.end():]}" if head[2] else line for head, line in heads)


def alignment(before: str, after: str) -> dict[str, str]:
    """Each id of `after` -> its id after align, one to one. Elements that are recognisably the same get the id they had in
    `before`; the others max(plain numbers among the ids of `before`)+1, ... in document order, lettered ones too, so that a
    removed id never comes back. An id that occurs twice is renamed on all its lines alike.

    align(a, a) == a; if `after` is only renumbered, align gives `before`; align(b, align(b, a)) == align(b, a), because no
    rule below finds more to match once the ids agree."""
    old, new = _Tree(before), _Tree(after)
    if old.rest == new.rest and old.depth == new.depth:
        pairs = set(zip(new.label, old.label)) | {(None, None)}
        if len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}):
            return {a: b for a, b in pairs if a}
    to_old = _recognise(old, new)
    names, used = {}, set()
    for label, i in zip(new.label, to_old):
        if label and label not in names and i is not None and old.label[i] not in used:
            names[label] = old.label[i]
            used.add(old.label[i])
    unknown = dict.fromkeys(label for label in new.label if label and label not in names)
    return names | {label: str(old.next_id + n) for n, label in enumerate(unknown)}


def _recognise(old: _Tree, new: _Tree) -> list[int | None]:
    """For each line of `new` the line of `old` that is the same element."""
    numbers = {}
    shapes = _shapes(old, numbers), _shapes(new, numbers)
    names = [[(fields := _fields(rest)) and fields[:2] or (None, rest) for rest in tree.rest] for tree in (old, new)]
    roles = [[role for role, _ in side] for side in names]
    keys = [shapes, (old.rest, new.rest), names]  # the strictest first
    to_old, to_new = [0] + [None] * (len(new.lines) - 1), [0] + [None] * (len(old.lines) - 1)
    shared = [(i, new.by_id[bid]) for bid, i in old.by_id.items() if i and new.by_id.get(bid)]
    if 2 * sum(names[0][i] == names[1][j] for i, j in shared) > len(shared):  # one document. Else the counter restarted
        for i, j in shared:
            if roles[0][i] == roles[1][j]:
                to_old[j], to_new[i] = i, j
    _grow(old, new, to_old, to_new, keys)
    # A name that occurs once on both pages is the same element wherever it went, and its children are matched in turn.
    once = [Counter(names[side][i] for i in tree.by_id.values() if i) for side, tree in enumerate((old, new))]
    where = {names[0][i]: i for i in old.by_id.values() if i}
    for j in new.by_id.values():
        name = names[1][j]
        if j and name[1] and once[0][name] == once[1][name] == 1 and to_old[j] is None and to_new[where[name]] is None:
            to_old[j], to_new[where[name]] = where[name], j
    _grow(old, new, to_old, to_new, keys)
    # The only child of its role left is the same under a new name (a counter, a heading), while such are the fewer.
    sure = list(to_old)
    _grow(old, new, to_old, to_new, keys, roles)
    named = [names[0][i] == names[1][j] for j, i in enumerate(to_old) if i is not None and new.bid[j] is not None]
    return to_old if 2 * sum(named) > len(named) else sure


def _shapes(tree: _Tree, numbers: dict) -> list[int]:
    """A number for each line's subtree, ids left out: equal numbers, equal subtrees."""
    shapes = [0] * len(tree.lines)
    for i in range(len(tree.lines) - 1, -1, -1):
        shapes[i] = numbers.setdefault((tree.rest[i], *(shapes[c] for c in tree.children[i])), len(numbers))
    return shapes


def _grow(old: _Tree, new: _Tree, to_old: list, to_new: list, keys: list, roles: list | None = None) -> None:
    """Matches, in place, the children of matched lines: equal key with equal key, k-th with k-th; lines with an id, without
    one, and with one that occurs twice each among themselves; by role only what is left alone on both sides."""
    queue = [j for j, i in enumerate(to_old) if i is not None]
    for q in queue:  # it grows: what is matched here has its children matched in turn
        for key in keys if roles is None else [*keys, roles]:
            xs = [i for i in old.children[to_old[q]] if to_new[i] is None]
            ys = [j for j in new.children[q] if to_old[j] is None]
            if not xs or not ys:
                break
            pools = {}
            for tree, side, lines in (old, 0, xs), (new, 1, ys):
                for i in lines:
                    kind = tree.label[i] is None, tree.bid[i] is None
                    pools.setdefault((kind, key[side][i]), ([], []))[side].append(i)
            for pool in pools.values():
                for i, j in zip(*pool) if key is not roles or len(pool[0]) == len(pool[1]) == 1 else ():
                    to_old[j], to_new[i] = i, j
                    queue.append(j)
