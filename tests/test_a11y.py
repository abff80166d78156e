"""Claims about a11y.py. Each test names the bug it guards against."""
import pickle
import random
import re
import time

import pytest
from browsergym.utils.obs import flatten_axtree_to_str
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import a11y
from a11y import DeltaError, align, alignment, apply, diff, find, parse, render

settings.register_profile("a11y", max_examples=120, deadline=None, derandomize=True,
                          suppress_health_check=list(HealthCheck))
settings.load_profile("a11y")

PAGE = """RootWebArea 'Sign in', focused, url='http://host/'
\t[13] textbox 'User', clickable, visible, focused
\t[14] textbox 'Password', clickable, visible
\t[15] list ''
\t\t[16] listitem ''
\t\t\tStaticText 'one'
\t\t\t[17] checkbox 'first', clickable, checked='false'
\t\t[18] listitem ''
\t\t\tStaticText 'two'
\t\t\t[19] checkbox 'second', clickable, checked='false'
\t[20] button 'Go', clickable, visible"""

# ---- generated pages ----

NAMES = ["", "Go", "Home", "it's", 'say "x"', "a, b='c'", "[] x", "| y", "x\u2028y", "\t", "\r", "\\", "é",
         "\ud800"]
ROLES = ["button", "link", "generic", "textbox", "listitem", "heading"]
ATTRIBUTES = ["clickable", "visible", "focused", "checked='true'", "expanded=False", "url='http://x/?a=1,2'"]


@st.composite
def pages(draw, jumps=False, duplicates=False, max_lines=14):
    """A page as BrowserGym writes it. `jumps`: its depth skips levels. `duplicates`: ids can repeat."""
    depth, lines, number = 0, [], draw(st.integers(0, 40))
    for _ in range(draw(st.integers(1, max_lines))):
        number += draw(st.integers(0 if duplicates else 1, 3))
        name = draw(st.sampled_from(NAMES))
        if draw(st.integers(0, 3)) == 0:
            text = f"{draw(st.sampled_from(['StaticText', 'StaticText', 'link']))} {name!r}"
        else:
            frame = draw(st.sampled_from(["", "", "", "a"]))
            text = f"[{frame}{number}] {draw(st.sampled_from(ROLES))} {name!r}"
            if draw(st.integers(0, 4)) == 0:
                text += f" value={draw(st.sampled_from(NAMES))!r}"
            chosen = [attribute for attribute in ATTRIBUTES if draw(st.integers(0, 3)) == 0]
            text += "".join(", " + attribute for attribute in chosen)
        lines.append("\t" * depth + text)
        depth = draw(st.integers(0, depth + (3 if jumps else 1)))
    return "\n".join(lines)


def depth_of(line: str) -> int:
    return len(line) - len(line.lstrip("\t"))


def end_of(lines: list[str], i: int) -> int:
    """The line behind the subtree of line i."""
    end = i + 1
    while end < len(lines) and depth_of(lines[end]) > depth_of(lines[i]):
        end += 1
    return end


def edited(draw, page: str, line_level: bool) -> str:
    """The page after a few edits: of whole lines (children change parents), or of subtrees and attributes."""
    lines = page.split("\n")
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(lines) - 1))
        end = end_of(lines, i)
        kind = draw(st.integers(0, 5))
        if kind == 0:
            lines[i] += ", pressed='true'"
        elif kind == 1:
            lines[i] = re.sub(r" '.*?'", " 'changed'", lines[i], count=1)
        elif kind == 2:
            new = draw(st.sampled_from(["[77] link 'new'", "StaticText 'new'", "[] odd", "", "[13] twice"]))
            lines[i:i] = ["\t" * depth_of(lines[i]) + new]
        elif kind == 3 and len(lines) > 1:
            del lines[i:(i + 1 if line_level else end)]
        elif kind == 4:
            focused = "focused" in lines[i]
            lines[i] = lines[i].replace(", focused", "") if focused else lines[i] + ", focused"
        else:  # a subtree moves
            block = lines[i:end]
            del lines[i:end]
            j = draw(st.integers(0, len(lines)))
            lines[j:j] = block
        lines = lines or [""]
    return "\n".join(lines)


@st.composite
def pairs(draw):
    """Before and after: the second edited from the first, or unrelated."""
    before = draw(pages(draw(st.booleans()), draw(st.booleans())))
    if draw(st.integers(0, 3)) == 0:
        return before, draw(pages(draw(st.booleans()), draw(st.booleans())))
    return before, edited(draw, before, draw(st.booleans()))


LINE_ID = r"(?m)^(\t*)\[([A-Za-z0-9]{1,16})\] "


def renumbered(page: str, seed: int) -> str:
    """The page with its ids renamed one to one, at random."""
    names = sorted(set(ids(page)))
    new = dict(zip(names, map(str, random.Random(seed).sample(range(1, 3 * len(names) + 2), len(names)))))
    return re.sub(LINE_ID, lambda m: f"{m[1]}[{new[m[2]]}] ", page)


def without_ids(page: str) -> str:
    return re.sub(LINE_ID, r"\1[] ", page)


def ids(page: str) -> list[str]:
    return [bid for _, bid in re.findall(LINE_ID, page)]


ODD = st.lists(st.sampled_from([
    "\t", "\n", "| ", "|!", "[1] ", "[] ", "[1", "a b", "x 'y'", "x", "'", ", focused", " value='1'",
    "\r", "\u2028", "page", "no change", "StaticText 'a'", "[2] link ''", "\ud800",
    "\0"]), max_size=24).map("".join)

# ---- lossless ----

@example("[1] x\n\t[2] y", "[1] \tx\n\t[2] y")
@given(st.one_of(ODD, st.text()), st.one_of(ODD, st.text()))
def test_any_two_strings_round_trip(a, b):
    """An escape that fails: text that looks like the delta's own syntax, a missing last newline, a tab behind
    an id."""
    assert apply(a, diff(a, b)) == b and "\n".join(map(render, parse(a))) == a


@given(pairs())
def test_edited_pages_round_trip_and_so_do_the_operations_alone(pair):
    """An operation that puts lines in another order or depth than the page had; wrong operations that are
    longer than `page`: the round trip never tries them, a longer page would."""
    for before, after in (pair, pair[::-1]):
        assert apply(before, diff(before, after)) == after and "\n".join(map(render, parse(before))) == before
    script = "\n".join(a11y._ops(a11y._Page(after), a11y._Page(before)))
    assert before == after or apply(after, script) == before


@pytest.mark.parametrize("line", [
    '[1] button "x"', "[1] button 'x', focused, focused", "[1] button 'x', value='1'",
    "[1] button 'x',focused", "[1] button 'a\\d'", "[1] button  'x'", "[1] ", "[1]", "",
    "button '\\U00110000'", "[12345678901234567] link ''"])
def test_what_fields_would_not_restore_is_opaque(line):
    """A name in other quotes, an attribute twice: `set` would rewrite the rest of the line too."""
    [node] = parse(line)
    assert (node.role, node.name, node.attributes, node.text) == (None, None, {}, line)
    assert render(node) == line

# ---- align ----

@example("[1] link 'a'\n[2] link 'a'", 15)  # 15: it becomes [2], [1]
@given(pages(True, True), st.integers(0, 99))
def test_a_page_and_its_renumbered_copy_align_to_it(page, seed):
    """A navigation renumbers the header: one wrong id, and a delta grows from 'no change' to the header."""
    assert align(page, page) == page and align(page, renumbered(page, seed)) == page


@settings(max_examples=400)
@given(pairs(), st.integers(0, 99), st.booleans())
def test_align_is_idempotent_and_changes_ids_only_one_to_one(pair, seed, fresh):
    """A second pass that matches more than the first: data.py and a replay would disagree. One id for two
    elements. And a target that gives another page, or holds an explicit new id: the model would have to guess
    it."""
    before, after = pair[0], renumbered(pair[1], seed) if fresh else pair[1]
    aligned = align(before, after)
    assert align(before, aligned) == aligned and without_ids(aligned) == without_ids(after)
    delta, known, names = diff(before, aligned), set(ids(before)), alignment(before, after)
    assert apply(before, delta) == aligned
    if fresh:
        assert [names[bid] for bid in ids(after)] == ids(aligned)
        assert len(set(names.values())) == len(names) and set(names) == set(ids(after))
    if fresh and len(set(ids(aligned))) == len(ids(aligned)):
        assert all(bid in known for bid in re.findall(r"(?m)^\| \t*\[([A-Za-z0-9]+)\] ", delta))


DELETES = "[1] heading 'Cart'\n[2] button 'Delete'\n[3] button 'Delete'\n[4] button 'Delete'\n[5] link 'Help'"
ROW = "\t[{0}] row ''\n\t\t[{1}] link 'item {2}'\n\t\tStaticText 'costs {2}'"
ROWS = "\n".join(["[1] table ''"] + [ROW.format(10 + 2 * n, 11 + 2 * n, n) for n in range(5)])
HEADER = "RootWebArea 'Shop'\n\t[{}] banner ''\n\t\t[{}] link 'Home'\n\t\t[{}] link 'Cart'\n"


@pytest.mark.parametrize("before, after, aligned", [
    # In one document equal ids are the evidence: by text alone the last 'Delete' would seem to have gone; a
    # renamed or moved element would be another, and a new one would get the id of what was removed.
    (DELETES, DELETES.replace("[2] button 'Delete'\n", ""), None),
    (DELETES, DELETES.replace("[3] button 'Delete'", "[3] button 'Undo'")
     .replace("[4] button 'Delete'", "[4] button 'Keep'"), None),
    (PAGE, PAGE.replace("[20] button 'Go'", "[20] button 'Sign in'").replace(
        "\t[14] textbox 'Password', clickable, visible\n", "") + "\n\t[21] link 'Help'", None),
    # Another name is the same element only if nothing else can be meant: other results are no renamed ones.
    ("[1] banner ''\n[2] link 'Home'\n[3] heading 'Page 1'\n[4] link 'Ada'\n[5] link 'Bob'",
     "[2] banner ''\n[3] link 'Home'\n[5] heading 'Page 2'\n[8] link 'Cid'\n[9] link 'Dan'",
     "[1] banner ''\n[2] link 'Home'\n[3] heading 'Page 2'\n[6] link 'Cid'\n[7] link 'Dan'"),
    # A link that a navigation moves to the footer is found again: the model would have to write it.
    ("[1] main ''\n\t[2] link 'Help'\n[3] form ''", "[5] main ''\n[6] form ''\n\t[7] link 'Help'",
     "[1] main ''\n[3] form ''\n\t[2] link 'Help'"),
    # Ids pass only between lines of a kind: not from a line that has none, and none to two elements.
    ("link 'a'\n[1] link 'a'", "[5] link 'a'", "[1] link 'a'"),
    ("[1] list ''\n\tlink 'a'", "[4] list ''\n\t[5] link 'a'", "[1] list ''\n\t[2] link 'a'"),
    # A removed id is never reused: a click on [3] would mean either.
    ("[1] link 'Home'\n[2] link 'Cart'\n[3] button 'Buy'",
     "[1] heading 'Thanks'\n[2] link 'Home'\n[3] link 'Invoice'",
     "[4] heading 'Thanks'\n[1] link 'Home'\n[5] link 'Invoice'"),
    # k-th with k-th row would change every cell of a sorted table.
    (ROWS, "\n".join(["[7] table ''"] + [ROW.format(50 + 2 * n, 51 + 2 * n, n) for n in (4, 0, 1, 2, 3)]),
     "\n".join(["[1] table ''"] + [ROW.format(10 + 2 * n, 11 + 2 * n, n) for n in (4, 0, 1, 2, 3)])),
    # A header that a navigation renumbered costs nothing.
    (HEADER.format(5, 6, 7) + "\t[8] main 'Books'", HEADER.format(1, 3, 4) + "\t[5] article 'Lamp'",
     HEADER.format(5, 6, 7) + "\t[9] article 'Lamp'"),
])
def test_an_element_that_is_found_again_keeps_its_id_and_no_other_does(before, after, aligned):
    """aligned None: `after` as it is."""
    assert align(before, after) == (aligned or after)


def test_ids_that_coincide_after_a_navigation_are_no_evidence():
    """The counter restarts: [13] is another field now. Matching by id would swap 'User' and 'Home'. And where
    ids stand twice, what they are renamed to does not depend on which of them is asked."""
    before = "[12] heading 'Sign in'\n[13] textbox 'User'\n[14] textbox 'Code'\n[15] link 'Home'"
    after = "[12] link 'Home'\n[13] textbox 'Street'\n[14] textbox 'User'\n[15] heading 'Address'"
    names = alignment(before, after)
    assert names["12"] == "15" and names["14"] == "13"
    assert names["13"] != "13" and len(set(names.values())) == 4
    before = "[1] link 'a'\n[1] link 'a'\n[2] link 'b'"
    assert alignment(before, "[5] link 'a'\n[6] link 'a'\n[5] link 'c'\n[6] link 'c'") == {"5": "1", "6": "3"}

# ---- the grammar, operation by operation ----

def shown(delta: str) -> list[str]:
    """The lines that the delta takes from PAGE and adds to it."""
    before, after = PAGE.split("\n"), apply(PAGE, delta).split("\n")
    removed = [f"- {line.strip()}" for line in before if line not in after]
    return removed + [f"+ {line.strip()}" for line in after if line not in before]


@pytest.mark.parametrize("delta, changed", [
    ("no change", []),
    ("set [17] checked='true'", ["- [17] checkbox 'first', clickable, checked='false'",
                                 "+ [17] checkbox 'first', clickable, checked='true'"]),
    ("set [14] focused, value='a, b'",
     ["- [14] textbox 'Password', clickable, visible",
      "+ [14] textbox 'Password' value='a, b', clickable, visible, focused"]),
    ("unset [13] checked, focused\nset [14] focused", [
        "- [13] textbox 'User', clickable, visible, focused",
        "- [14] textbox 'Password', clickable, visible", "+ [13] textbox 'User', clickable, visible",
        "+ [14] textbox 'Password', clickable, visible, focused"]),
    ("unset [13] visible, focused", ["- [13] textbox 'User', clickable, visible, focused",
                                     "+ [13] textbox 'User', clickable"]),
    ("name [20] 'it\\'s'", ["- [20] button 'Go', clickable, visible",
                            '+ [20] button "it\'s", clickable, visible']),
    ("name [18]/0 'zwei'", ["- StaticText 'two'", "+ StaticText 'zwei'"]),
    ("set /0 url='http://b/'", ["- RootWebArea 'Sign in', focused, url='http://host/'",
                                "+ RootWebArea 'Sign in', focused, url='http://b/'"]),
    ("line [20] link 'Went'", ["- [20] button 'Go', clickable, visible", "+ [20] link 'Went'"]),
    ("line /0/2/0/0 not a line", ["- StaticText 'one'", "+ not a line"]),
    ("del [18]", ["- [18] listitem ''", "- StaticText 'two'",
                  "- [19] checkbox 'second', clickable, checked='false'"]),
    ("add [15] 1\n| [] listitem ''\n| \tStaticText 'x'\nadd / 0\n| [a7] alert ''",
     ["+ [a7] alert ''", "+ [21] listitem ''", "+ StaticText 'x'"]),
    ("page\n| [] link 'Home'\n| |!\n|![] odd",
     [f"- {line.strip()}" for line in PAGE.split("\n")] + ["+ [21] link 'Home'", "+ |!", "+ [] odd"]),
])
def test_each_operation(delta, changed):
    assert shown(delta) == changed


@pytest.mark.parametrize("before, delta, after", [
    ("[1] a\n[2] b", "add / 1\n| x\nmove [1] / 1\nadd / 1\n| y\nadd / 2\n| z", "x\n[1] a\ny\n[2] b\nz"),
    ("a\nb\nc\nd", "del /0\nname /2 'x'\ndel /3\nadd / 3\n| e", "b\nc 'x'\ne"),
    ("[1] a\n\t[2] b\n\t\t[3] c\n\t\t\t[4] d\n[5] e", "move [3] [5] 0\ndel [1]", "[5] e\n\t[3] c\n\t\t[4] d"),
    ("[1] a\n\t[2] b", "move [2] / 0\nmove [1] [2] 0", "[2] b\n\t[1] a")])
def test_operations_address_before_all_at_once(before, delta, after):
    """Ordinals that shift after the first removal; insertions out of the script's order; a subtree that moves
    without its depth or stays in a removed one; parent and child that cannot change places."""
    assert apply(before, delta) == after


@pytest.mark.parametrize("delta, line, reason", [
    ("", 1, "bad operation"), ("click [13]", 1, "bad operation"), ("no change\n", 1, "bad operation"),
    ("| x", 1, "bad operation"), ("set [13] focused\n| x", 2, "bad operation"),
    ("del [14]\ndel [99]", 2, "unknown id [99]"), ("del [14]\ndel [14]", 2, "removed or moved already"),
    ("del /", 1, "the page itself"), ("del [14] now", 1, "behind its place stands 'now'"),
    ("del [13", 1, "bad place"), ("del", 1, "bad place"), ("del /0/9", 1, "no line"),
    ("set [13] checked=", 1, "bad attributes"), ("set [13]", 1, "bad attributes"),
    ("set [13] value", 1, "cannot set value"),
    ("unset [13] focused='x'", 1, "cannot unset"), ("line [13] a\nset [13] focused\nset [13] =", 3, "bad"),
    ("name [13] User", 1, "not a quoted string"), ("name [13] 'a\\d'", 1, "not a quoted string"),
    ("name / 'x'", 1, "no text"), ("line [13] \tlink 'x'", 1, "depth"),
    ("add [15] 3\n| x", 1, "bad child number"), ("add [15] -1\n| x", 1, "bad child number"),
    ("add [15] 0", 1, "nothing to add"), ("page", 1, "page"), ("page\n| x\ndel [13]", 3, "page"),
    ("del [13]\npage\n| x", 2, "page"),
    ("move [15] [16] 0", 1, "into itself"), ("move [16] [17] 0\nmove [15] [20] 0", 1, "into itself"),
    ("move [13] [14]", 1, "bad child number"),
    ("del [15]\nset [17] checked='true'", 2, "removed"), ("add [16] 0\n| x\ndel [15]", 1, "removed"),
    ("del [20]\nadd /0 3\n| StaticText 'a'\n| [13] link 'b'", 4, "occurs twice"),
])
def test_errors_name_the_line_and_the_reason(delta, line, reason):
    """An error that cannot be counted by kind, or that blames the wrong line of a model's output."""
    with pytest.raises(DeltaError) as caught:
        apply(PAGE, delta)
    assert caught.value.line == line and reason in caught.value.reason
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


WORDS = st.lists(st.sampled_from([
    "set ", "unset ", "name ", "line ", "del ", "add ", "move ", "page", "\n", "\n| ", "\n|!", "[13]", "[15]",
    "[16] ", "[99]", "/", "/0", "/1 ", "0", "1", " 2", " ", "\t", "'x'", "focused", "value='\\", ", ", "[] a",
    "'\\ud800'", "²", "٣", "'\0'"]), max_size=12).map("".join)


@st.composite
def damaged(draw):
    """A page and the delta to another one, with a few strokes."""
    pair, rng = draw(pairs()), random.Random(draw(st.integers(0, 10**6)))
    delta = diff(*pair)
    for _ in range(rng.randint(1, 6)):
        i = rng.randrange(len(delta) + 1)
        damage = rng.choice(["", "\n", " ", "/", "0", "9", "[", "'", "\t", "| ", delta[:40]])
        delta = delta[:i] + damage + delta[i + rng.randint(0, 3):]
    return pair[0], delta


@settings(max_examples=1200)
@given(st.one_of(st.tuples(st.just(PAGE), st.one_of(st.text(), WORDS)), damaged()))
def test_any_text_as_a_delta_raises_nothing_but_delta_error(given):
    """A model writes anything: one uncaught IndexError ends a night of dreaming."""
    try:
        assert isinstance(apply(*given), str)
    except DeltaError as error:
        assert 1 <= error.line <= len(given[1].split("\n")) and error.reason


def test_an_id_that_occurs_twice_is_opaque():
    """An edit of 'the' element [2]: which? Both lines stay addressable as lines."""
    page = "[1] list ''\n\t[2] link 'a'\n\t[2] link 'b'"
    assert [(node.bid, node.role) for node in parse(page)] == [("1", "list"), (None, None), (None, None)]
    assert find(page, "2").name == "a", "to act on, a browser takes the first"
    with pytest.raises(DeltaError, match="occurs twice"):
        apply(page, "set [2] focused")
    assert apply(page, diff(page, page.replace("'b'", "'c'"))) == page.replace("'b'", "'c'")
    assert diff(page, page.replace("'b'", "'c'")) == "line [1]/1 [2] link 'c'"


def test_pages_are_split_at_newlines_only():
    """str.splitlines: a U+2028 in a name would cut a line in two."""
    page = "[1] a 'x'\n[2] b\u2028[3] c\x0b\x85\r\n"
    assert [node.text for node in parse(page)] == ["[1] a 'x'", "[2] b\u2028[3] c\x0b\x85\r", ""]
    assert diff(page, page.replace("'x'", "'y'")) == "name [1] 'y'"

# ---- cost ----

TYPED = PAGE.replace("visible, focused", "visible").replace(
    "'Password', clickable, visible", "'Password' value='Bob', clickable, visible, focused")
WRAPPED = "[1] main ''\n\t[2] list ''\n\t\t[3] link 'a name'\n\t\t\tStaticText 'a text'\n\t\t[4] link 'b'"


@pytest.mark.parametrize("before, after, delta", [
    (PAGE, TYPED, "unset [13] focused\nset [14] value='Bob', focused"),
    (PAGE, PAGE.replace("'first', clickable, checked='false'", "'first', clickable, checked='true'"),
     "set [17] checked='true'"),
    (PAGE, PAGE.replace("StaticText 'two'", "StaticText 'three'"), "name [18]/0 'three'"),
    (PAGE, "RootWebArea 'Hi'\n\t[21] link 'B'", "page\n| RootWebArea 'Hi'\n| \t[] link 'B'"),
    # A wrapper that goes costs a move for each child, not a copy.
    (WRAPPED, "[1] main ''\n\t[3] link 'a name'\n\t\tStaticText 'a text'\n\t[4] link 'b'",
     "del [2]\nmove [3] [1] 0\nmove [4] [1] 0"),
    ("[1] heading 'Cart'\n[2] link 'x'\n[3] link 'x'", "[1] heading 'Cart'\n[3] link 'x'", "del [2]"),
    # What attributes cannot say: a name taken away, another role, text, an order that `set` would not give.
    *(("[1] " + before, "[1] " + after, "line [1] " + after) for before, after in (
        ("link 'a'", "link"), ("link 'a'", "button 'a'"), ("link 'a'", "no line, 'a'"),
        ("link 'a', focused", "link 'a', focused, clickable")))])
def test_small_changes_are_small_deltas(before, after, delta):
    """A training target of the laptop recipe with an unchanged name in it, which the model could miscopy."""
    assert diff(before, after) == delta


@pytest.mark.parametrize("lines", [300, 3000])
def test_the_cost_of_an_edit_does_not_depend_on_the_page(lines):
    """A fallback that rewrites the page, or the siblings of what is inserted or removed."""
    rng = random.Random(lines)
    for trial in range(12):
        depth, before = 0, []
        for n in range(lines):
            static = f"StaticText '{rng.randint(0, 9)}'"
            texts = [f"[{n}] link 'name {n}', clickable", f"[{n}] listitem ''", static]
            before.append("\t" * depth + rng.choice(texts))
            depth = rng.randint(max(0, depth - 2), min(depth + 1, 6))
        after, text, k = list(before), 0, 1 + trial % 6
        for _ in range(k):
            i, kind = rng.randrange(len(after)), rng.randrange(3)
            text += len(after[i]) + 30
            if kind == 0:
                after[i] += ", focused"
            elif kind == 1:
                del after[i:end_of(after, i)]
            else:  # in front of a line of the same depth: it takes no children from others
                new = f"[{lines + rng.randint(1, 9999)}] link 'a new element'"
                after[i:i] = ["\t" * depth_of(after[i]) + new]
        before, after = "\n".join(before), "\n".join(after)
        delta = diff(before, after)
        assert apply(before, delta) == after and len(delta) <= 3 * text + 40 * k


def test_thousands_of_siblings_without_ids_take_no_minutes():
    """difflib without its limit on repeated items (autojunk): time can grow with the cube of their number."""
    rng = random.Random(0)
    before = [f"StaticText '{rng.randrange(2)}'" for _ in range(12_000)]
    after = [line for line in before if rng.random() > .05]
    start = time.process_time()
    diff("\n".join(before), "\n".join(after))
    assert time.process_time() - start < 5


def test_ten_thousand_levels():
    """Recursion, or places of 10,000 ordinals whose sum is quadratic."""
    before = "\n".join("\t" * n + f"[{n}] generic 'n{n}'" for n in range(10_000))
    after = before.replace("'n5000'", "'n5000', focused")
    assert diff(before, after) == "set [5000] focused" and apply(before, "set [5000] focused") == after
    assert align(before, after) == after
    bare = "\n".join("\t" * n + f"StaticText '{n}'" for n in range(2_000))
    assert len(diff(bare, bare.replace(" '", " 'x"))) < 2 * len(bare)

# ---- BrowserGym's format ----

def test_set_puts_an_attribute_where_browsergym_prints_it():
    """An attribute appended at the end: diff would have to rewrite the line, name and all."""
    properties = [("live", "polite"), ("busy", True), ("disabled", True), ("focused", True),
                  ("autocomplete", "both"), ("hasPopup", "menu"), ("required", True), ("valuemin", 0),
                  ("checked", "true"), ("pressed", "true"), ("expanded", False), ("selected", True),
                  ("url", "http://a/")]

    def line(without):
        kept = [{"name": key, "value": {"value": value}} for key, value in properties if key != without]
        node = {"nodeId": "1", "role": {"value": "combobox"}, "name": {"value": "From, 'x'"}, "childIds": [],
                "browsergym_id": "12", "properties": kept}
        if without != "value":
            node["value"] = {"value": "Rome"}
        seen = {"visibility": float(without != "visible"), "bbox": None, "clickable": without != "clickable",
                "set_of_marks": False}
        return flatten_axtree_to_str({"nodes": [node]}, {"12": seen}, with_visible=True, with_clickable=True)

    full, keys = line(None), ["value", "clickable", "visible"] + [key for key, _ in properties]
    assert list(find(full, "12").attributes) == keys and find(full, "12").name == "From, 'x'"
    for key in keys:
        value = find(full, "12").attributes[key]
        assert diff(line(key), full) == f"set [12] {key}" + (f"={value}" if value else "")
        assert diff(full, line(key)) == f"unset [12] {key}"


def test_a_node_that_is_changed_changes_no_other_page():
    """Guards: attributes that all lines of one text share, since a line is read once and kept."""
    page = "[1] textbox 'User', focused"
    (node,) = parse(page)
    node.attributes["checked"] = "'true'"
    assert apply(page, "unset [1] focused") == "[1] textbox 'User'"
    assert render(parse(page)[0]) == page
    assert diff(page, page.replace("User", "Name")) == "name [1] 'Name'"


def test_diff_writes_the_page_where_all_its_ids_are_free_ones():
    """Guards: the length of the page as a delta guessed from the page: `| [] ` is shorter than the ids that
    apply gives anyway, the more so the longer they are."""
    before = "[1000000000000000] x"
    after = "\n".join(f"[{10**15 + k}] " for k in range(1, 30))
    delta = diff(before, after)
    assert delta.startswith("page\n| [] ") and 3 * len(delta) < len(after) and apply(before, delta) == after


def test_an_id_that_another_role_has_now_is_another_element():
    """Guards: on one document, a textbox where a button was that keeps the button's number."""
    before, after = (f"[1] link 'a'\n[2] link 'b'\n[3] {last}" for last in ("button 'x'", "textbox 'y'"))
    assert a11y.alignment(before, after) == {"1": "1", "2": "2", "3": "4"}
