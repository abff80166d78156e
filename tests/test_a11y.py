"""Claims about a11y.py. Each test names the bug it guards against."""
import random
import re
import time

import pytest
from browsergym.utils.obs import flatten_axtree_to_str
from hypothesis import example, given, settings
from hypothesis import strategies as st

import a11y
import data
from a11y import DeltaError, align, alignment, apply, diff, find, parse, render

# ---- generated pages ----

NAMES = ["", "Go", "Home", "it's", 'say "x"', "a, b='c'", "[] x", "| y", "x\u2028y", "\t", "\r", "\\", "é",
         "\ud800"]
ROLES = ["StaticText", "button", "link", "generic", "textbox", "listitem"]
ATTRIBUTES = ["clickable", "visible", "focused", "checked='true'", "expanded=False", "url='http://x/?a=1,2'"]


@st.composite
def pages(draw):
    """A page as BrowserGym writes it. Its depth may skip levels, and ids may repeat."""
    depth, lines, at_most = 0, [], draw(st.sampled_from([1, 3]))
    for number in draw(st.lists(st.integers(0, 60), min_size=1, max_size=14, unique=draw(st.booleans()))):
        head = draw(st.sampled_from(["", f"[{number}] ", f"[{number}] ", f"[{number}] ", f"[a{number}] "]))
        text = f"{head}{draw(st.sampled_from(ROLES))} {draw(st.sampled_from(NAMES))!r}"
        if head and draw(st.integers(0, 4)) == 0:
            text += f" value={draw(st.sampled_from(NAMES))!r}"
        text += "".join(", " + attribute for attribute in ATTRIBUTES if head and draw(st.integers(0, 3)) == 0)
        lines.append("\t" * depth + text)
        depth = draw(st.integers(0, depth + at_most))
    return "\n".join(lines)


@st.composite
def pairs(draw):
    """Before and after: unrelated, or the second is the first after a few edits."""
    before = draw(pages())
    if draw(st.integers(0, 3)) == 0:
        return before, draw(pages())
    lines = before.split("\n")
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(lines) - 1))
        line, block = lines[i], lines[i : i + draw(st.integers(1, 4))]
        kind = draw(st.sampled_from(["focus", "rename", "insert", "remove", "move"]))
        if kind == "focus":
            lines[i] = line.replace(", focused", "") if ", focused" in line else line + ", focused"
        elif kind == "rename":
            lines[i] = re.sub(r" '.*?'", " 'changed'", line, count=1)
        elif kind == "insert":
            new = draw(st.sampled_from(["[77] link 'new'", "StaticText 'new'", "[] odd", "", "[13] twice"]))
            lines.insert(i, re.match("\t*", line)[0] + new)
        else:  # children may get another parent
            del lines[i : i + len(block)]
            at = draw(st.integers(0, len(lines)))
            lines[at:at] = block if kind == "move" else []
        lines = lines or [""]
    return before, "\n".join(lines)


LINE_ID = r"(?m)^(\t*)\[([A-Za-z0-9]{1,16})\] "

def renumbered(page: str, seed: int) -> str:
    """The page with its ids renamed one to one, at random."""
    names = sorted(set(data.bids(page)))
    new = dict(zip(names, map(str, random.Random(seed).sample(range(1, 3 * len(names) + 2), len(names)))))
    return re.sub(LINE_ID, lambda m: f"{m[1]}[{new[m[2]]}] ", page)

# ---- lossless ----

ODD = st.lists(st.sampled_from([
    "\t", "\n", "| ", "|!", "[1] ", "[] ", "[1", "x 'y'", "'", ", focused", " value='1'", "\r", "\u2028",
    "page", "no change", "StaticText 'a'", "[2] link ''", "\ud800", "\0"]), max_size=24).map("".join)
# Lines that their fields would not restore: `set` would rewrite the rest of them too.
OPAQUE = "\n".join(["[1] a \"x\"", "[2] a 'x', focused, focused", "[3] a 'x', value='1'", "[4] a 'x',focused",
                    "", "[5] a '\\d'", "[6] a  'x'", "[7] ", "[8]", "a '\\U00110000'",
                    "[12345678901234567] a ''"])


@settings(max_examples=600)
@example((OPAQUE, ""))
@example(("[1] x\n\t[2] y", "[1] \tx\n\t[2] y"))
@given(pairs() | st.tuples(ODD | st.text(), ODD | st.text()))
def test_any_two_strings_round_trip_and_so_do_the_operations_alone(pair):
    """Text that looks like the delta's own syntax; U+2028 that splits a line in two; an opaque line that gets
    fields. An operation that puts lines in another order or depth, also where diff writes the page."""
    for before, after in (pair, pair[::-1]):
        assert apply(before, diff(before, after)) == after and "\n".join(map(render, parse(before))) == before
        script = "\n".join(a11y._ops(a11y._Page(before), a11y._Page(after)))
        assert before == after or apply(before, script) == after
    assert pair[0] != OPAQUE or not any(node.role or node.attributes for node in parse(OPAQUE))

# ---- align ----

@settings(max_examples=400)
@example(("[1] link 'a'\n[2] link 'a'",) * 2, 15)  # 15: it becomes [2], [1]
@example(("[2] link 'a'\n[2] link 'a'", "[3] link 'a'\n[4] link 'a'"), 0)
@given(pairs(), st.integers(0, 99))
def test_align_is_idempotent_and_changes_ids_only_one_to_one(pair, seed):
    """A navigation renumbers the header: one wrong id, and a delta grows from 'no change' to the header. A
    second pass that matches more than the first: data.py and a replay would disagree. One id for two
    elements. A target with an explicit new id, which the model would have to guess."""
    before, after = pair[0], renumbered(pair[1], seed)
    assert align(before, before) == before == align(before, renumbered(before, seed))
    aligned, names = align(before, after), alignment(before, after)
    assert align(before, aligned) == aligned
    assert re.sub(LINE_ID, r"\1[] ", aligned) == re.sub(LINE_ID, r"\1[] ", after)
    assert [names[bid] for bid in data.bids(after)] == data.bids(aligned)
    assert len(set(names.values())) == len(names) and set(names) == set(data.bids(after))
    if len(set(data.bids(aligned))) == len(data.bids(aligned)):
        written = re.findall(r"(?m)^\| \t*\[([A-Za-z0-9]+)\] ", diff(before, aligned))
        assert set(written) <= set(data.bids(before))


@pytest.mark.parametrize("before, after, aligned", [
    # In one document equal ids are the evidence: by text alone the last 'Delete' would seem to have gone. A
    # renamed element is the same; with another role it is not.
    ("[1] link 'Cart'\n[2] button 'Delete'\n[3] button 'Delete'\n[4] button 'Delete'\n[5] link 'x'\n[6] a ''",
     "[1] link 'Cart'\n[3] button 'Undo'\n[4] button 'Delete'\n[5] link 'x'\n[6] b ''",
     "[1] link 'Cart'\n[3] button 'Undo'\n[4] button 'Delete'\n[5] link 'x'\n[7] b ''"),
    # The counter restarted, and ids that coincide are no evidence: [13] is another field now.
    ("[12] heading 'Sign in'\n[13] textbox 'User'\n[14] textbox 'Code'\n[15] link 'Home'",
     "[12] link 'Home'\n[13] textbox 'Street'\n[14] textbox 'User'\n[15] heading 'Address'",
     "[15] link 'Home'\n[16] textbox 'Street'\n[13] textbox 'User'\n[17] heading 'Address'"),
    # Another name is the same element only if nothing else can be meant: other results are no renamed ones. A
    # removed id is never reused: a click on [4] would mean either.
    ("[1] banner ''\n[2] link 'Home'\n[3] heading 'Page 1'\n[4] link 'Ada'\n[5] link 'Bob'",
     "[2] banner ''\n[3] link 'Home'\n[5] heading 'Page 2'\n[8] link 'Cid'\n[9] link 'Dan'",
     "[1] banner ''\n[2] link 'Home'\n[3] heading 'Page 2'\n[6] link 'Cid'\n[7] link 'Dan'"),
    # A link that a navigation moves to the footer is found again: the model would have to write it.
    ("[1] main ''\n\t[2] link 'Help'\n[3] form ''", "[5] main ''\n[6] form ''\n\t[7] link 'Help'",
     "[1] main ''\n[3] form ''\n\t[2] link 'Help'"),
    # Ids pass only between lines of a kind: not from a line that has none.
    ("link 'a'\n[1] link 'a'", "[5] link 'a'", "[1] link 'a'"),
    # k-th with k-th row would change every cell of a sorted table.
    ("[1] row ''\n\tStaticText 'a'\n[2] row ''\n\tStaticText 'b'",
     "[7] row ''\n\tStaticText 'b'\n[8] row ''\n\tStaticText 'a'",
     "[2] row ''\n\tStaticText 'b'\n[1] row ''\n\tStaticText 'a'")])
def test_an_element_that_is_found_again_keeps_its_id_and_no_other_does(before, after, aligned):
    assert align(before, after) == aligned

# ---- deltas that a model writes ----

PAGE = "RootWebArea 'Hi'\n\t[13] textbox 'User', focused\n\t[15] list ''\n\t\t[16] row ''\n\t\t\t[17] link"


@pytest.mark.parametrize("delta, line", [
    ("no change\n", 1), ("set [13] focused\n| x", 2), ("del [13]\ndel [99]", 2), ("del [13]\ndel [13]", 2),
    ("del /", 1), ("name / 'x'", 1), ("del [13] now", 1), ("del [13", 1), ("del", 1), ("del /0/9", 1),
    ("set [13] checked=", 1), ("set [13] value", 1), ("unset [13] focused='x'", 1), ("line [13] \tlink", 1),
    ("line [13] a b\nset [13] focused", 2), ("name [13] User", 1), ("name [13] 'a\\d'", 1),
    ("add [15] 2\n| x", 1), ("move [13] [15]", 1), ("add [15] 0", 1), ("page", 1), ("page\n| x\ndel [13]", 3),
    ("del [13]\npage\n| x", 2), ("move [15] [16] 0", 1), ("del [15]\nset [17] focused", 2),
    ("add [16] 0\n| x\ndel [15]", 1), ("del [15]\nadd /0 2\n| StaticText 'a'\n| [13] link 'b'", 4)])
def test_what_is_nearly_a_delta_is_an_error_that_names_its_line(delta, line):
    """Half a meaning applied in silence; an error that blames the wrong line of a model's output."""
    with pytest.raises(DeltaError, match=f"^line {line}: "):
        apply(PAGE, delta)


WORDS = st.lists(st.sampled_from([
    "set ", "unset ", "name ", "line ", "del ", "add ", "move ", "page", "\n", "\n| ", "\n|!", "[13]", "[15]",
    "[16] ", "[99]", "/", "/0", "/1 ", "0", "1", " 2", " ", "\t", "'x'", "focused", "value='\\", ", ", "[] a",
    "'\\ud800'", "²", "٣", "'\0'"]), max_size=12).map("".join)


@settings(max_examples=800)
@given(pairs(), st.one_of(st.text(), WORDS), st.integers(0, 99), st.integers(0, 3))
def test_any_text_as_a_delta_raises_nothing_but_delta_error(pair, text, place, gone):
    """A model writes anything, also what is nearly a delta: one uncaught IndexError ends a night of
    dreaming."""
    delta = diff(*pair)
    for page, written in ((PAGE, text), (pair[0], delta[:place] + text + delta[place + gone:])):
        try:
            assert isinstance(apply(page, written), str)
        except DeltaError as error:
            assert 1 <= error.line <= len(written.split("\n")) and error.reason


def test_an_id_that_occurs_twice_is_opaque_and_a_changed_node_changes_no_other_page():
    """An edit of 'the' element [2]: which? Both lines stay addressable as lines. Attributes that all lines of
    one text share, since a line is read once and kept."""
    page = "[1] list '', focused\n\t[2] link 'a'\n\t[2] link 'b'"
    nodes = parse(page)
    assert [(node.bid, node.role) for node in nodes] == [("1", "list"), (None, None), (None, None)]
    assert find(page, "2").name == "a", "to act on, a browser takes the first"
    with pytest.raises(DeltaError, match="occurs twice"):
        apply(page, "set [2] focused")
    assert diff(page, page.replace("'b'", "'c'")) == "line [1]/1 [2] link 'c'"
    assert apply(page, "unset [1] checked, focused").startswith("[1] list ''\n"), "small models write it"
    nodes[0].attributes["checked"] = "'true'"
    assert render(parse(page)[0]) == "[1] list '', focused"

# ---- cost ----

@pytest.mark.parametrize("before, after, delta", [
    ("[1] textbox 'User', focused\n[2] textbox ''", "[1] textbox 'User'\n[2] textbox '' value='Bob', focused",
     "unset [1] focused\nset [2] value='Bob', focused"),
    ("[1] list ''\n\tStaticText 'two'", "[1] list ''\n\tStaticText 'three'", "name [1]/0 'three'"),
    # As a page it is shorter than its lines, whose ids are those that apply gives anyway.
    ("[1000000000000000] x", "\n".join(f"[{10**15 + k}] " for k in range(1, 30)), "page" + "\n| [] " * 29),
    # A wrapper that goes costs a move for each child, not a copy.
    ("[1] main ''\n\t[2] list ''\n\t\t[3] link 'a'\n\t\t\tStaticText 'a text'\n\t\t[4] link 'b'",
     "[1] main ''\n\t[3] link 'a'\n\t\tStaticText 'a text'\n\t[4] link 'b'",
     "del [2]\nmove [3] [1] 0\nmove [4] [1] 0"),
    # What attributes cannot say: a name taken away, an order that `set` would not give.
    ("[1] link 'a'", "[1] link", "line [1] link"),
    ("[1] link 'a', focused", "[1] link 'a', focused, clickable", "line [1] link 'a', focused, clickable"),
    ("[1] link 'a', focused", "[1] link 'a', clickable, focused", "set [1] clickable")])
def test_small_changes_are_small_deltas(before, after, delta):
    """A training target of the laptop recipe with an unchanged name in it, which the model could miscopy."""
    assert diff(before, after) == delta


def test_the_cost_of_an_edit_does_not_depend_on_the_page_and_is_never_minutes():
    """A fallback that rewrites the page, or the siblings of what is inserted or removed. difflib without its
    limit on repeated items (autojunk): cubic time. Recursion, or places of 10,000 ordinals: quadratic."""
    before = [f"[{n}] list ''\n\t[a{n}] link 'name {n}'\n\tStaticText '{n % 9}'" for n in range(999)]
    after = list(before)
    after[400] = after[400].replace("'4'", "'5'") + "\n\t[b1] link 'a new element'"
    after.insert(200, "[5000] link 'a new element'")
    del after[700]
    assert len(diff("\n".join(before), "\n".join(after))) < 250
    rng, start = random.Random(0), time.process_time()
    before = [f"StaticText '{rng.randrange(2)}'" for _ in range(12_000)]
    diff("\n".join(before), "\n".join(line for line in before if rng.random() > .05))
    assert time.process_time() - start < 5
    before = "\n".join("\t" * n + f"[{n}] generic 'n{n}'" for n in range(10_000))
    after = before.replace("'n5000'", "'n5000', focused")
    assert diff(before, after) == "set [5000] focused" and align(before, after) == after
    bare = "\n".join("\t" * n + f"StaticText '{n}'" for n in range(2_000))
    assert len(diff(bare, bare.replace(" '", " 'x"))) < 2 * len(bare)

# ---- BrowserGym's format ----

def test_set_puts_an_attribute_where_browsergym_prints_it():
    """An attribute appended at the end: diff would have to rewrite the line, name and all."""
    properties = {"live": "polite", "busy": True, "disabled": True, "focused": True, "autocomplete": "both",
                  "hasPopup": "menu", "required": True, "valuemin": 0, "checked": "true", "pressed": "true",
                  "expanded": False, "selected": True, "url": "http://a/"}
    node = {"nodeId": "1", "role": {"value": "combobox"}, "name": {"value": "From, 'x'"}, "childIds": [],
            "browsergym_id": "12", "value": {"value": "Rome"},
            "properties": [{"name": key, "value": {"value": value}} for key, value in properties.items()]}
    seen = {"visibility": 1.0, "bbox": None, "clickable": True, "set_of_marks": False}
    full = flatten_axtree_to_str({"nodes": [node]}, {"12": seen}, with_visible=True, with_clickable=True)
    found = find(full, "12")
    assert found.name == "From, 'x'"
    assert list(found.attributes) == ["value", "clickable", "visible", *properties]
    for key, value in found.attributes.items():
        written = f"{key}={value}" if value else key
        without = full.replace(f" {written}" if key == "value" else f", {written}", "", 1)
        assert diff(without, full) == f"set [12] {written}" and diff(full, without) == f"unset [12] {key}"
