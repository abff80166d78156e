"""Claims about a11y.py. Each test names the bug it guards against."""
import contextlib
import random
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import a11y
import data
from a11y import DeltaError, align, alignment, apply, diff, parse, render

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
    """Before and after: unrelated, or the second is the first with a few spans replaced."""
    before = draw(pages())
    if draw(st.integers(0, 3)) == 0:
        return before, draw(pages())
    lines = before.split("\n")
    for _ in range(draw(st.integers(1, 3))):
        i, j = sorted(draw(st.tuples(*[st.integers(0, len(lines))] * 2)))
        edited = [line + ", focused" for line in lines] + [line.replace(" '", " 'x", 1) for line in lines]
        new = ["[77] link 'new'", "\tStaticText 'new'", "[] odd", "", "[13] twice"]
        moved = [line for line in lines[j:] + lines[:i]][:draw(st.integers(0, 3))]
        lines[i:j] = moved + draw(st.lists(st.sampled_from(lines + edited + new), max_size=3))
        lines = lines or [""]
    return before, "\n".join(lines)

# ---- lossless ----

# What a page or a delta may be made of.
ODD = st.text() | st.lists(st.sampled_from([
    "set ", "unset ", "name ", "line ", "del ", "add ", "move ", "page", "no change", "\n", "\n| ", "\n|!",
    "| ", "[13]", "[15]", "[16] ", "[99]", "[1] ", "[] ", "[1", "/", "/0", "/1 ", "0", "1", " 2", " ", "\t",
    "'", "'x'", "focused", ", ", " value='1'", "x 'y'", "StaticText 'a'", "\r", "\u2028", "\ud800",
    "'\\ud800'", "²", "٣", "\0"]), max_size=16).map("".join)
# Lines that their fields would not restore: `set` would rewrite the rest of them too.
OPAQUE = "\n".join(["[1] a \"x\"", "[2] a 'x', focused, focused", "[3] a 'x', value='1'", "[4] a 'x',focused",
                    "", "[5] a '\\d'", "[6] a  'x'", "[7] ", "[8]", "a '\\U00110000'",
                    "[12345678901234567] a ''"])


@settings(max_examples=600)
@example((OPAQUE, ""))
@example(("[1] x\n\t[2] y", "[1] \tx\n\t[2] y"))
@given(pairs() | st.tuples(ODD, ODD))
def test_any_two_strings_round_trip_and_so_do_the_operations_alone(pair):
    """Text that looks like the delta's own syntax; U+2028 that splits a line in two; an opaque line that gets
    fields. An operation that puts lines in another order or depth, also where diff writes the page."""
    for before, after in (pair, pair[::-1]):
        assert apply(before, diff(before, after)) == after and "\n".join(map(render, parse(before))) == before
        script = "\n".join(a11y._ops(a11y._Page(before), a11y._Page(after)))
        assert before == after or apply(before, script) == after

# ---- align ----

LINE_ID = r"(?m)^(\t*)\[([A-Za-z0-9]{1,16})\] "

def renumbered(page: str, seed: int) -> str:
    """The page with its ids renamed one to one, at random."""
    names = sorted(set(data.bids(page)))
    new = dict(zip(names, map(str, random.Random(seed).sample(range(1, 3 * len(names) + 2), len(names)))))
    return re.sub(LINE_ID, lambda m: f"{m[1]}[{new[m[2]]}] ", page)


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
    ("del /", 1), ("name / 'x'", 1), ("del [13] now", 1), ("del [13", 1), ("del /0/9", 1), ("page", 1),
    ("set [13] checked=", 1), ("set [13] value", 1), ("line [13] \tlink", 1),
    ("line [13] a b\nset [13] focused", 2), ("name [13] User", 1), ("add [15] 2\n| x", 1), ("add [15] 0", 1),
    ("page\n| x\ndel [13]", 3), ("move [15] [16] 0", 1), ("del [15]\nset [17] focused", 2),
    ("del [15]\nadd /0 2\n| StaticText 'a'\n| [13] link 'b'", 4)])
def test_what_is_nearly_a_delta_is_an_error_that_names_its_line(delta, line):
    """Half a meaning applied in silence; an error that blames the wrong line of a model's output."""
    with pytest.raises(DeltaError, match=f"^line {line}: "):
        apply(PAGE, delta)


@settings(max_examples=800)
@given(pairs(), ODD, st.integers(0, 99), st.integers(0, 3))
def test_any_text_as_a_delta_raises_nothing_but_delta_error(pair, text, place, gone):
    """A model writes anything, also what is nearly a delta: one uncaught IndexError ends a night of
    dreaming."""
    delta = diff(*pair)
    for page, written in ((PAGE, text), (pair[0], delta[:place] + text + delta[place + gone:])):
        with contextlib.suppress(DeltaError):
            assert isinstance(apply(page, written), str)

# ---- cost ----

@pytest.mark.parametrize("before, after, delta", [
    ("[1] textbox 'User', focused\n[2] textbox ''", "[1] textbox 'User'\n[2] textbox '' value='Bob', focused",
     "unset [1] focused\nset [2] value='Bob', focused"),
    ("[1] list ''\n\tStaticText 'two'", "[1] list ''\n\tStaticText 'three'", "name [1]/0 'three'"),
    # Which of two lines with one id? Both are lines without an id.
    ("[1] list ''\n\t[2] link 'a'\n\t[2] link 'b'", "[1] list ''\n\t[2] link 'a'\n\t[2] link 'c'",
     "line [1]/1 [2] link 'c'"),
    # As a page it is shorter than its lines, whose ids are those that apply gives anyway.
    ("[1000000000000000] x", "\n".join(f"[{10**15 + k}] " for k in range(1, 30)), "page" + "\n| [] " * 29),
    # A wrapper that goes costs a move for each child, not a copy.
    ("[1] main ''\n\t[2] list ''\n\t\t[3] link 'a'\n\t\t\tStaticText 'a text'\n\t\t[4] link 'b'",
     "[1] main ''\n\t[3] link 'a'\n\t\tStaticText 'a text'\n\t[4] link 'b'",
     "del [2]\nmove [3] [1] 0\nmove [4] [1] 0"),
    # A new attribute goes where BrowserGym prints it. What attributes cannot say: another order.
    ("[1] link 'a', focused", "[1] link 'a', clickable, focused", "set [1] clickable"),
    ("[1] link 'a', focused", "[1] link 'a', focused, clickable", "line [1] link 'a', focused, clickable")])
def test_small_changes_are_small_deltas(before, after, delta):
    """A training target of the laptop recipe with an unchanged name in it, which the model could miscopy."""
    assert diff(before, after) == delta


def test_the_cost_of_an_edit_does_not_depend_on_the_page_and_is_never_minutes():
    """A fallback that rewrites the page, or the siblings of what is inserted or removed. difflib without its
    limit on repeated items (autojunk): cubic time. Recursion."""
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
