"""Claims about baselines/webworld.py: WebWorld's data are read as recorded trajectories, and models
that write whole pages dream as models that write deltas do."""
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import act, build_tokenizer, counting_page, start
from helpers.dreams import CONFIG, count, counted, who
from hypothesis import given
from hypothesis import strategies as st

import a11y
import data
import dream
import inference
import lm
import world_model
from baselines.webworld import HEADERS, SYSTEM, TURN, convert, messages, read, read_call, write_call
from data import Action

MODEL = SimpleNamespace(template=lm.Template(build_tokenizer()), context=4096)
SHOP = ("RootWebArea 'Tea', focused, url='http://tea/'\n\t[604] link 'News', clickable\n\t[7] link 'x'\n"
        "\t[a7] textbox 'Type keywords or URL...', clickable, value=''\n\t\tStaticText '24°C'")
TYPED = SHOP.replace("value=''", "value='tea'")
CHINESE = "RootWebArea '百度一下,你就知道', focused\n\t[5] textbox '搜索'\n\tStaticText \"it's 好\""
wrote = lambda text: lm.Sample([], [], text, False)


def row(pages, calls, turns="conversations", who="from", what="value") -> bytes:
    asked = [f"{SYSTEM}\n\nInitial Page State:\n{pages[0]}\n\nFirst Action: '{calls[0]}'\n\nNext Page State:"]
    asked += [f"Go on.\n\nAction: '{call}'\n\nNext Page State:" for call in calls[1:]]
    said = [{who: name, what: text} for pair in zip(asked, pages[1:]) for name, text in zip("ab", pair)]
    return json.dumps({turns: said if who == "from" else [{who: "system", what: SYSTEM}, *said]}).encode()


def test_rows_of_either_form_are_read_and_what_cannot_be_is_dropped_and_counted(tmp_path):
    """Guards: a page or a call that is one turn late; rows that stop the reader, or are gone without a word
    (half of the data is chat; the first and the last line of a range are cut)."""
    pages = [SHOP, TYPED, CHINESE, SHOP]  # in the form of the data's viewer, then of the models' card
    good = row(pages, ["fill('a7', 'tea')", "click('604')", "mouse_click(3, 4)"])
    calls = ["go_back()", 'fill([a7], "tea")', "click([604])", "go_back()", "hover([9])"]
    card = row([CHINESE, SHOP, TYPED, "<html>", SHOP, TYPED], calls, "messages", "role", "content")
    odd = [b"[1]", b'{"conversations": 3}', b'{"conversations": [3]}', b"[" * 100_000, b"\xff",
           b'{"messages": [{"role": "user"}]}', b'{"conversations": [{"from": "human", "value": "9.11?"}]}']
    lines = [good[300:], good, card, row(["<html>", SHOP], ["click('604')"]), *odd, good[:-40]]
    (tmp_path / "part.jsonl").write_bytes(b"\n".join(lines))
    counts = convert((tmp_path / "part.jsonl",), out=tmp_path / "w.jsonl.gz", first_seed=7)
    assert counts == {
        "rows": len(lines), "trajectories": 2, "transitions": 8, "kept": 4, "dropped: no page": 2,
        "dropped: no word for the action": 1, "dropped: id not on the page": 1, "rows dropped: broken": 3,
        "rows dropped: no conversation": 5, "rows dropped: another format": 2}
    first, second = data.read_trajectories(tmp_path / "w.jsonl.gz")
    assert [(str(step.action), step.page) for step in first.steps] == [
        ("type [a7] [tea] [0]", SHOP), ("click [604]", TYPED)]
    assert second.seed == 8  # go_back is code's, and no example
    assert len(world_model.examples(MODEL, [first, second], Counter())) == 3


@pytest.mark.parametrize("ours, calls", [
    ("click [604]", ["click('604')", "click([604])", "click(604)", "click(bid='604', button='left')"]),
    ("type [a7] [x] [0]", ["fill([a7], \"x\")", "fill('a7', value='x', enable_autocomplete_menu=True)"]),
    ("type [a7] [x] [1]", ["fill('a7', 'x', press_enter=True)"]), ("scroll [down]", ["scroll(0, delta_y=9)"]),
    ("None", ["click('604', 'right')", "click('604', modifiers=['Shift'])", "click(['604', '32'])", "",
              "fill('a7', 'x', True)", "fill('a7', 3)", "scroll(100, 0)", "scroll('down')", "goto(None)",
              "click()", "click('604', force=True)", "click('604'); click('3')", "(" * 5000, "click('\x00')",
              "click(__import__('os').system('touch x'))"])])
def test_a_call_is_the_action_that_a_browser_would_do_or_has_no_word(ours, calls):
    """Guards: a right click learned as a click; Enter that nobody knows of; page text that Python runs."""
    assert [str(read_call(call)) for call in calls] == [ours] * len(calls)


words = st.just("'\n\nNext Page State:\n\nAction: 'click('1')'") | st.text(
    st.characters(codec="utf-8", exclude_characters="\x00]"), min_size=1, max_size=12)
actions = st.builds(Action, st.just("type"), st.just("a7"), words, st.booleans()) | st.builds(
    Action, st.sampled_from(["press", "goto"]), st.just(""), words) | st.sampled_from(
    [Action("click", "7"), Action("scroll", text="up"), Action("new_tab"), Action("tab_focus", text="3")])
lines = st.sampled_from(["StaticText '<|end|>'", "Next Page State:", "First Action: 'x'", "\\Action: 1"])
lines |= st.builds("[{}] link {!r}, url='/<b>'".format, st.integers(1, 40), st.text(max_size=6))
pages = st.lists(lines, max_size=8).map(lambda lines: "\n\t".join(["RootWebArea 'Tea', focused", *lines]))


@given(actions, pages, pages)
def test_what_is_asked_is_the_action_on_the_page_and_a_page_written_whole_reads_back(action, page, then):
    """Guards: an action that the agent did not do; a page that forges the turn's words; lines that only the
    prompt's guards changed; ids of the page before that begin anew."""
    user = messages(page, "", "", action)[1]["content"]
    assert read_call(TURN.fullmatch(user)[2]) == read_call(write_call(action)) == action
    assert sum(text.lstrip().startswith(HEADERS) for text in user.split("\n")) == 3
    for disarmed in (lm.disarm(MODEL.template.tokenizer, user), data.disarm(user)):
        found = read(MODEL, page, wrote(TURN.fullmatch(disarmed)[1]))
        assert (found.page, found.delta) == (page, "no change")
    found = read(MODEL, page, wrote(then))
    assert found.page == a11y.align(page, found.page) == a11y.apply(page, found.delta) and not found.over


def test_the_prompt_is_the_cards_and_thoughts_and_fences_are_no_page():
    """Guards: another prompt than the card's; thoughts, a draft or chatter around a page, taken for it."""
    assert messages(CHINESE, "http://a/", "click [3]", Action("click", "32"))[1]["content"] == (
        f"Initial Page State:\n{CHINESE}\n\nFirst Action: 'click([32])'\n\nNext Page State:")
    draft = "<think>\nRootWebArea 'x'\n</think>\n"
    for before in ("", "\n```\n", "It types.\n", "<think>\n\n</think>\n\n", draft):
        found = read(MODEL, SHOP, wrote(f"{before}{TYPED}\n```\n"))
        assert (found.page, found.rationale) == (TYPED, data.one_line(before.strip()))
    for text in ("", "<think>", draft, f"{SHOP}\nI hope so!", f"{SHOP}\n{SHOP}", "\tRootWebArea 'x'"):
        with pytest.raises(ValueError, match="not a page with nothing below it"):
            read(MODEL, SHOP, wrote(text))


def test_dreams_in_whole_pages_are_those_in_deltas_whoever_writes_them(serving, scripted):
    """Guards: another web for the same pages, here and behind a URL. The agent counts to two, then stops."""
    counting = lambda prompt: counting_page(count(prompt) + ("First Action: 'click([1])'" in prompt))
    acts = lambda prompt: ("so.\nCOMPLETED: YES" if "\nQUESTION: completed?" in prompt
                           else act("stop [done]" if count(prompt) >= 2 else "click [1]"))
    chat = inference.Chat(serving(lambda body: counting(body["messages"][1]["content"])).url)
    acting, whole = who(scripted(acts)), (200, 0.5, messages, read)
    for how in ((scripted(counted), 200, 0.5), (scripted(counting), *whole), (chat, *whole)):
        models = dream.Models(acting.agent, world_model.WorldModel(*how), acting.judge)
        done = lm.together(dream.imagine(models, start(n), CONFIG, 0) for n in (0, 1, 0))
        assert {(one.final_page, one.reward) for one in done} == {(counting_page(2), 1.0)}
        assert [str(step.action) for step in done[0].steps] == ["click [1]", "click [1]", "stop [done]"]
