"""Claims about worlds/chromium.py and worlds/miniwob.py, in a real Chromium. Own pages are written
below; the others are the package's.

One Browser serves most tests: that it can is itself a claim (whatever ran before must not show).
"""
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from browsergym.core import observation
from helpers import servers
from helpers.pages import REACH, act, bid, check_protocol, collect, start
from playwright.sync_api import sync_playwright

import a11y
from data import bids, parse_action
from worlds import chromium, explore
from worlds.chromium import chromium_path, page_text
from worlds.miniwob import ALL_TASKS, HTML, IN_PLACE, ORIGIN, STYLE, VIEWPORT, Browser


def frame(area: str, problem: str = "") -> str:
    """A page of MiniWoB++'s kind. `problem`: what its script does when the task begins."""
    return f"""<!DOCTYPE html><html><head><title>Own</title><script src="../core/core.js"></script><script>
var genProblem = function() {{ document.getElementById('query').textContent = 'Own goal.'; {problem} }};
window.onload = function() {{ core.startEpisode(); }};
</script></head><body><div id="wrap"><div id="query"></div><div id="area">{area}</div></div></body></html>"""


OVER = """<div style="position: absolute; background: white; {place}; top: -50px;
  width: 300px; height: 200px"></div>"""
OWN = {
    "events": frame("""<button id="b">Go</button><input id="t">
      <select id="s"><option>one</option><option>two</option></select>
      <p id="p">words</p><input id="r" readonly value="fixed"><input id="d" disabled>""", """
      document.title = 'Own';
      for (const type of ['mousedown', 'focus', 'mouseup', 'click', 'input', 'change', 'keydown'])
        area.querySelectorAll('*').forEach(el => el['on' + type] = event => {
          if (event.target === el)
            document.title += ' ' + (el.id || el.tagName) + '.' + type + (event.key || ''); });"""),
    "lists": frame("""<select multiple><option>red</option><option>blue</option></select>
      <select><option>tea</option><option>milk</option></select>"""),
    "grow": frame("", """area.innerHTML = '<button id="b">Grow</button><button>Last</button>';
      b.onclick = () => b.insertAdjacentHTML('beforebegin', '<button>New</button>');"""),
    "hang": frame('<button id="b">Hang</button>', "b.onclick = () => { while (true); };"),
    "cover": frame(f"""<div style="position: relative"><button id="b" style="width: 100px">Under</button>
      {OVER.format(place="left: -50px")}</div>
      <div style="position: relative; top: 200px"><button style="width: 100px">Half</button>
      {OVER.format(place="left: 20px")}</div>""", "b.onclick = () => core.endEpisode(1);"),
    "fields": frame("""<input type="number"><input type="date"><input type="time">
      <input type="range" max="10"><input type="color">
      <div contenteditable="true" role="textbox">old words</div>"""),
    "timers": frame("", """document.title = 'Own';
      setTimeout("document.title += ' text'", 50);
      for (let k = 0; k < 8000; k++) setTimeout(() => { if (k == 7999) document.title += ' last'; }, 20);"""),
    "mouse": frame('<div id="c"><button id="a">A</button><button id="b">B</button></div>', """
      document.title = 'Own';
      for (const type of ['mouseout', 'mouseleave', 'mouseover', 'mouseenter', 'mousedown'])
        for (const el of [a, b, c]) el.addEventListener(type, event => {
          if (el !== c || !event.bubbles) document.title += ` ${el.id}.${type}`; });"""),
    "live": frame("""<div aria-live="polite">generic, but it has an attribute</div>
      <div style="display: none">never seen</div>"""),
}
# Everything a page can do to reach another host, at load and on a click. OTHER is host:port.
HOSTILE = frame('<button id="b">Open</button>', REACH + """
  const area = document.getElementById('area');
  reach(area);
  area.insertAdjacentHTML('beforeend', `
    <form action="${http}/form" method="post"><button>Post</button></form>
    <a href="${http}/link">Leave</a> <a href="${http}/blank" target="_blank">Blank</a>`);
  const leave = () => location = http + '/location';
  b.onclick = () => { window.open(http + '/open'); setTimeout(leave, 100); };
  window.open(http + '/popup');""")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("html")
    for part in ("core", "common", "miniwob"):
        shutil.copytree(HTML / part, folder / part)
    for name, text in OWN.items():
        (folder / "miniwob" / f"{name}.html").write_text(text)
    return folder


@pytest.fixture(scope="module")
def web(pages):
    with Browser(html=pages, timeout=30) as web:
        yield web

# ---- the same bytes ----------------------------------------------------------------------------------------

MESS = ("press [Tab]", "click [4]", "type [3] [left over] [1]", "type [8] [left over] [0]", "press [Tab]",
        "click [2]", "press [ArrowDown]")


def test_a_task_and_a_seed_give_the_same_bytes_whatever_ran_before(web):
    """Guards: ids that go on counting, focus, text and Tab order of the episode before, a slot or an order
    that shows, and Chromium's accessibility cache, which drops the text of labels on the second look."""
    def play(world, tasks):
        first = world.reset([start(task) for task in tasks])
        seen = {task: [(obs.goal, obs.url, obs.page)] for task, obs in zip(tasks, first)}
        for text in ("press [Tab]", "press [Tab]", "click [7]"):
            for task, obs in zip(tasks, act(world, *[text] * len(tasks))[0]):
                seen[task].append((obs.goal, obs.url, obs.page, obs.error))
        return seen

    first = play(web, IN_PLACE)
    for seed in (1, 2):
        web.reset([start(task, seed) for task in IN_PLACE])
        over = [False] * len(IN_PLACE)
        for text in MESS:
            _, _, ended, _ = act(web, *[None if done else text for done in over])
            over = [a or b for a, b in zip(over, ended)]
    assert play(web, IN_PLACE[::-1]) == first
    with Browser(timeout=30) as fresh:
        assert play(fresh, IN_PLACE) == first
    again = {web.reset([start("click-option", 19)])[0].page for _ in range(12)}  # a page with labels
    assert len(again) == 1
    assert not any(str(HTML) in page[2] for pages in first.values() for page in pages)


def test_what_a_page_shows_as_an_icon_a_colour_or_a_drawing_can_be_named(web):
    """Guards: goals that nobody can read (the words are BrowserGym's); a page on which nothing has an id."""
    icon, colour, shape = web.reset([start("click-menu-2", 2), start("use-colorwheel-2", 0),
                                     start("click-shape", 0)])
    assert icon.goal.endswith('click on the item with the "ui-icon-stop" icon.')
    assert colour.goal == "Select the following color #0198e3 with the color picker and hit Submit."
    drawing = bid(shape.page, "SvgRoot")
    assert list(bids(shape.page)) == [drawing] and "graphics-symbol" in shape.page
    assert act(web, None, None, f"click [{drawing}]")[2] == [False, False, True]  # the shape at its centre


def test_other_seeds_give_other_pages(web):
    """Guards against a seed that is not used, which the test above would not notice."""
    runs = [web.reset([start(task, seed) for task in IN_PLACE]) for seed in range(4)]
    for task, seen in zip(IN_PLACE, zip(*runs)):
        different = 1 if task == "click-button-sequence" else 4  # there only the positions differ
        assert len({(obs.goal, obs.page) for obs in seen}) == different, task


def test_an_element_keeps_its_id_and_what_appears_gets_a_larger_one(web):
    """Guards against numbering each page afresh: then an action hits another element on the next page."""
    page = web.reset([start("grow")])[0].page
    grow, last = bid(page, "Grow"), bid(page, "Last")
    new = []
    for _ in range(2):
        page = act(web, f"click [{grow}]")[0][0].page
        assert (bid(page, "Grow"), bid(page, "Last")) == (grow, last)
        new.append(int(bid(page, "New")))  # the newest stands last of the new ones
    ids = [int(number) for number in bids(page)]
    assert len(ids) == len(set(ids)) == 4 and sorted(ids)[:2] == [int(grow), int(last)]


def test_the_page_is_browsergyms_own(web, pages):
    """Guards: drift from the text that the 8B recipe's data is in: BrowserGym's own of the same tab, but for
    ids."""
    def without_ids(page):
        return re.sub(r"\[\d+\]", "[]", page)

    tasks = [task for task in IN_PLACE if task != "ask-table"]
    tasks += ["order-food", "click-tab", "phone-book", "form-sequence-3", "live"]
    mine = [obs.page for obs in web.reset([start(task) for task in tasks])]
    with sync_playwright() as playwright:
        options = chromium.launch_options(playwright.chromium.executable_path)
        tab = playwright.chromium.launch(**options).new_context(viewport=VIEWPORT).new_page()
        for task, page in zip(tasks, mine):
            tab.goto(f"file://{pages}/miniwob/{task}.html")
            tab.add_style_tag(content=re.sub("</?style>", "", STYLE))
            tab.evaluate("Math.seedrandom(7); core.EPISODE_MAX_TIME = 1e6; core.startEpisodeReal()")
            # BrowserGym awaits what is visible for 1 s. On a machine too busy to draw, it takes it for
            # hidden.
            for _ in range(4):
                observation._pre_extract(tab)
                nodes = observation.extract_merged_axtree(tab)["nodes"]
                theirs = page_text(nodes, observation.extract_dom_snapshot(tab))
                observation._post_extract(tab)
                theirs = theirs.replace(f"file://{pages}/miniwob", ORIGIN).replace(f"file://{pages}", ORIGIN)
                if without_ids(page) == without_ids(theirs):
                    break
            assert without_ids(page) == without_ids(theirs), task


def test_a_password_shows_four_bullets_and_a_number_box_its_number(web):
    """Guards: a page that shows the password, or depends on how Chromium draws it; a crash at the reset, for
    Chromium gives a spin button's value as a number, not as text."""
    login, spin, guess = (obs.page for obs in web.reset([
        start("login-user"), start("use-spinner", 1), start("guess-number", 3)]))
    box = [line for line in login.split("\n") if "textbox" in line][1].split("[")[1].split("]")[0]
    assert re.search(r"spinbutton '.*' value=-?\d", spin)
    number = bid(guess, "spinbutton")
    login, _, guess = (obs.page for obs in act(
        web, f"type [{box}] [s3cret] [0]", None, f"type [{number}] [7] [0]")[0])
    assert f"[{box}] textbox '' value='••••', clickable, visible, focused" in login and "s3cret" not in login
    assert f"[{number}] spinbutton '' value=7" in guess

# ---- actions -----------------------------------------------------------------------------------------------

def title(web):
    return web._tabs[0].obs.page.split("'")[1]


@pytest.mark.parametrize("words, action, events", [
    ("button 'Go'", "click [{}]", "Own b.mousedown b.focus b.mouseup b.click"),
    ("textbox ''", "click [{}]", "Own t.mousedown t.focus t.mouseup t.click"),
    ("textbox ''", "type [{}] [ab] [0]", "Own t.focus t.input t.change"),
    ("textbox ''", "type [{}] [ab] [1]", "Own t.focus t.input t.change t.keydownEnter"),
    ("option 'two'", "click [{}]", "Own s.focus s.input s.change"),
])
def test_an_action_fires_the_events_of_a_user(web, words, action, events):
    """Guards: values set without events, and a click that leaves the focus where it was."""
    page = web.reset([start("events")])[0].page
    act(web, action.format(bid(page, words)))
    assert title(web) == events


def test_typing_replaces_and_an_option_is_chosen(web):
    """Guards against typing behind what is there, and against a choice that its list does not show."""
    page = web.reset([start("events")])[0].page
    box = bid(page, "textbox ''")
    for text in ("first", "it's \"2nd\""):
        page = act(web, f"type [{box}] [{text}] [0]")[0][0].page
    assert f"[{box}] textbox '' value={text!r}" in page
    assert page.count("2nd") == 1  # and not once more as a text inside the box
    page = act(web, f"click [{bid(page, 'option')}]")[0][0].page
    assert "combobox '' value='one'" in page
    page = act(web, f"click [{bid(page, 'two')}]")[0][0].page
    assert "combobox '' value='two'" in page
    assert "option 'two', clickable, selected=True" in page
    assert "option 'one', clickable, selected=False" in page


def test_a_click_toggles_an_option_only_where_several_can_be_chosen(web):
    """Guards against a choice that takes back another, and against a click that empties a plain list."""
    page = web.reset([start("lists")])[0].page
    chosen = []
    for word in ("red", "blue", "red", "milk", "milk"):
        page = act(web, f"click [{bid(page, f'option {word!r}')}]")[0][0].page
        chosen.append(re.findall("option '(\\w+)'.*selected=True", page))
    assert chosen == [["red", "tea"], ["red", "blue", "tea"], ["blue", "tea"], ["blue", "milk"],
                      ["blue", "milk"]]


@pytest.mark.parametrize("action", [
    "click [999]", "type [999] [x] [0]", "type [{button}] [x] [0]", "type [{fixed}] [x] [0]",
    "click [{disabled}]", "hover [{option}]", "goto [http://miniwob/enter-text.html]",
    "goto [file:///etc/passwd]", "go_back", "go_forward", "new_tab", "tab_focus [1]", "close_tab",
    "press [NoSuchKey]",
])
def test_what_cannot_be_done_is_a_line_and_the_page_stays(web, action):
    """Guards: an exception that ends the run, an impossible action that does something, an error that
    stays."""
    page = web.reset([start("events")])[0].page
    ids = {word: bid(page, word) for word in ("fixed", "disabled", "option")} | {"button": bid(page, "'Go'")}
    obs, rewards, terminated, truncated = act(web, action.format(**ids))
    assert obs[0].error.startswith(str(parse_action(action.format(**ids)))) and "\n" not in obs[0].error
    assert (obs[0].page, rewards, terminated, truncated) == (page, [0.0], [False], [False])
    assert act(web, "scroll [down]")[0][0].error == ""


def test_a_covered_element_cannot_be_clicked_unless_a_part_shows(web):
    """Guards: events that reach what no mouse could; giving up on a half-covered button."""
    page = web.reset([start("cover")])[0].page
    obs, _, terminated, _ = act(web, f"click [{bid(page, 'Under')}]")
    assert "covered" in obs[0].error and terminated == [False]
    assert act(web, f"click [{bid(page, 'Half')}]")[0][0].error == ""


def test_a_click_lands_on_the_element_and_not_on_what_lies_in_it(web):
    """Guards: a click on the element itself (a folder listens on its name: it would never open), or at its
    centre (in an open folder that is a file, whose click ends the episode)."""
    for seed in range(20):
        obs = web.reset([start("navigate-tree", seed)])[0]
        page = obs.page
        items = [element for element in explore.elements(page) if element.role == "listitem"]
        for item in [item for item in items if not explore.occurs(item.name, obs.goal)]:
            after, _, terminated, _ = act(web, f"click [{item.bid}]")
            if terminated[0]:
                break  # a file
            if after[0].page.count("listitem") > page.count("listitem") + 2:
                # It is open, a file lies at its centre; the click closes it.
                assert act(web, f"click [{item.bid}]")[0][0].page == page
                return
            page = after[0].page
    raise AssertionError("no folder with three files opened")


@pytest.mark.parametrize("nth, text, value", [
    (0, "-3", "-3"), (0, "many", None), (1, "05/20/2010", "2010-05-20"), (1, "2010-05-20", "2010-05-20"),
    (1, "20.5.2010", None), (1, "2/30/2024", None),
    (2, "9:37 PM", "21:37"), (2, "21:37", "21:37"), (2, "25:00", None),
    (3, "7", "7"), (3, "70", None), (4, "#FF0080", "#ff0080"), (4, "red", None),
    (5, 'new "ones"', 'new "ones"'), (5, "", ""),
])
def test_a_field_takes_its_own_form_of_text_and_says_which(web, nth, text, value):
    """Guards: dates that only a program could type, a wrong form that empties the field in silence."""
    page = web.reset([start("fields")])[0].page
    numbers = list(dict.fromkeys(bids(page)))  # the parts of a date have the id of the whole
    read = ("[...document.querySelectorAll('input, div[contenteditable]')]"
            ".map(el => el.value ?? el.innerText.trim())")
    before = web._run(web._tabs[0].page.evaluate(read))
    obs, _, _, truncated = act(web, f"type [{numbers[nth]}] [{text}] [0]")
    after = web._run(web._tabs[0].page.evaluate(read))
    assert (after[nth] == value) if value is not None else (after == before)
    assert ("or the like" in obs[0].error) == (value is None) and truncated == [False]


# ---- every page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 130, 13))
def test_every_page_plays_and_gives_the_same_bytes_again(web, first):
    """Guards: a page that crashes, hangs or cannot be read, or on which an episode leaves something
    behind."""
    batch = [(task, 3) for task in ALL_TASKS[first : first + 13]]  # seed 3: anything goes (explore.EPSILONS)
    records = collect(web, batch, horizon=3)
    assert [(record["task"], record["seed"]) for record in records] == batch
    assert all(a11y.parse(page) for record in records for page in record["pages"])
    assert collect(web, batch[::-1], horizon=3)[::-1] == records


def test_time_passes_with_the_actions_alone(web):
    """Guards against pages that depend on how fast the machine is, or on today: 500 ms an action."""
    obs = web.reset([start("button-delay", 0)])[0]  # Click button ONE, wait 1 seconds, then click button TWO.
    one, two = f"click [{bid(obs.page, 'ONE')}]", f"click [{bid(obs.page, 'TWO')}]"
    assert "wait 1 seconds" in obs.goal
    for wait, reward in ((["scroll [up]"], 1.0), ([], 0.0), (["scroll [up]"] * 2, 0.0)):
        web.reset([start("button-delay", 0)])
        for text in (one, *wait):
            act(web, text)
        assert act(web, two)[1:3] == ([reward], [True])
    assert "Last login: Mon Jan 06 2020" in web.reset([start("terminal")])[0].page
    page = web.reset([start("use-autocomplete", 0)])[0].page  # its menu opens 300 ms after the last key
    assert "listitem" in act(web, f"type [{bid(page, 'textbox')}] [An] [0]")[0][0].page
    web.reset([start("moving-items", 0)])  # ends by itself after 9.9 s
    ended = [act(web, "scroll [up]")[2] for _ in range(19)]
    assert ended == [[False]] * 18 + [[True]]
    # Many timers, and one that is a text.
    assert "RootWebArea 'Own last text'" in web.reset([start("timers")])[0].page

# ---- rewards and the end -----------------------------------------------------------------------------------

def solve(web, task, right=True):
    """What a person would do on the page of `task`, or (not right) something like it that is wrong."""
    obs = web.reset([start(task)])[0]
    page = explore.elements(obs.page)
    if task == "ask-table":
        cells = [e.name for e in page if e.role == "cell"]
        key = next(cell for cell in cells[::2] if f" {cell} " in obs.goal)
        return act(web, f"stop [{cells[cells.index(key) + 1] if right else key}]")
    if task == "enter-text":
        text = explore.quoted(obs.goal)[0] if right else "wrong"
        act(web, f"type [{bid(obs.page, 'textbox')}] [{text}] [0]")
    if task == "click-checkboxes":
        for e in page:
            if e.role == "checkbox" and explore.occurs(e.name, obs.goal) == right:
                act(web, f"click [{e.bid}]")
    return act(web, f"click [{bid(obs.page, 'Submit')}]")


@pytest.mark.parametrize("task", ["enter-text", "click-checkboxes", "ask-table"])
@pytest.mark.parametrize("right", [True, False])
def test_success_is_all_or_nothing(web, task, right):
    """Guards against an answer that nobody checks."""
    assert solve(web, task, right)[1:] == ([float(right)], [True], [False])


def test_a_wrong_checkbox_pays_a_part_and_counts_as_failure(web):
    """The case that BrowserGym (reward > 0) gets wrong: one of several boxes is not ticked."""
    obs = web.reset([start("click-checkboxes", seed=5)])[0]  # Select PK4gX, nIC, KrK: three of six
    wanted = [box.bid for box in explore.elements(obs.page)
              if box.role == "checkbox" and explore.occurs(box.name, obs.goal)]
    assert len(wanted) == 3
    for number in wanted[:2]:
        act(web, f"click [{number}]")
    _, rewards, terminated, _ = act(web, f"click [{bid(obs.page, 'Submit')}]")
    raw = web._run(web._tabs[0].page.evaluate("WOB_RAW_REWARD_GLOBAL"))
    assert 0 < raw < 1 and (rewards, terminated) == ([0.0], [True])


def test_stop_ends_without_a_reward_of_its_own(web):
    """Guards: paying for stop: on a page with a form only the page pays; a form that solves ask-table."""
    obs = web.reset([start("enter-text"), start("ask-table")])
    name = explore.quoted(obs[0].goal)[0]
    act(web, f"type [{bid(obs[0].page, 'textbox')}] [{name}] [0]", None)
    after, rewards, terminated, truncated = act(web, f"stop [{name}]", "stop []")
    assert (rewards, terminated, truncated) == ([0.0, 0.0], [True, True], [False, False])
    assert name in after[0].page
    assert "textbox" not in obs[1].page and "button" not in obs[1].page
    assert "Answer with stop." in obs[1].goal


def test_the_protocol(web):
    """Guards: a world of which policy.rollout has to know more, and an unknown task that passes for a
    page."""
    check_protocol(web, [start(task) for task in ("enter-text", "login-user", "enter-text")], "press [Tab]")
    with pytest.raises(ValueError, match="no MiniWoB.. task 'no-such'"):
        web.reset([start("no-such")])


def test_a_prefix_is_the_same_as_stepping(web):
    """Guards against dreams and replays that start from another page than the one recorded."""
    actions = ["type [5] [abc] [0]", "click [8]", "press [Tab]"]
    web.reset([start("login-user")])
    for text in actions:
        stepped = act(web, text)[0][0]
    assert web.reset([start("enter-text"), start("login-user", prefix=actions)])[1] == stepped
    with pytest.raises(ValueError, match="ends the trajectory before 'press"):
        web.reset([start("login-user", prefix=["stop [x]", "press [Tab]"])])

# ---- failures ----------------------------------------------------------------------------------------------

async def crash(page):
    crashed = asyncio.ensure_future(page.wait_for_event("crash"))
    going = asyncio.ensure_future(page.goto("chrome://crash"))
    await crashed
    await asyncio.wait([going])
    going.exception()  # of course it did not arrive


def test_a_page_that_hangs_or_crashes_fails_alone(web, monkeypatch):
    """Guards against a run that waits for ever or dies with a page, and truncated taken for terminated."""
    monkeypatch.setattr(web, "timeout", 4)
    starts = [start("hang"), start("enter-text"), start("login-user")]
    page = web.reset(starts)[0].page
    web._run(crash(web._tabs[2].page))
    hang = f"click [{bid(page, 'Hang')}]"
    obs, rewards, terminated, truncated = act(web, hang, "click [3]", "click [5]")
    assert (rewards, terminated, truncated) == ([0.0] * 3, [False] * 3, [True, False, True])
    assert "hung for 4 s" in obs[0].error and obs[1].error == "" and "crash" in obs[2].error
    assert web.failures == [obs[0].error, "", obs[2].error]
    act(web, None, "click [99]", None)
    assert web.failures[1] == "", "an action that the page refuses is no failure of the browser"
    assert act(web, None, "type [3] [go on] [0]", None)[0][1].page.count("go on") == 1
    with pytest.raises(AssertionError, match="after the end"):
        act(web, "press [a]", None, None)
    assert [obs.error for obs in web.reset(starts)] == [""] * 3 == web.failures
    assert act(web, *["press [Tab]"] * 3)[3] == [False] * 3


def children(pid):
    said = subprocess.run(["ps", "-ww", "-eo", "ppid,pid,args"], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=2) for line in said.splitlines()[1:]]
    return {int(child): args for parent, child, args in rows if parent == str(pid)}


@pytest.mark.parametrize("victim", ["the driver", "Chromium"])
def test_a_browser_that_answers_no_more_is_started_again(pages, victim):
    """Guards: a benchmark whose tries all count as failed pages, once Playwright's driver was killed or
    Chromium was stopped: `is_connected` sees neither."""
    with Browser(html=pages, timeout=4) as web:
        before = web.reset([start("enter-text")])
        drivers = [pid for pid, args in children(os.getpid()).items() if "run-driver" in args]
        process = max(drivers)  # ours is the last to start
        if victim == "Chromium":
            process = min(children(process))
        os.kill(process, signal.SIGKILL if victim == "the driver" else signal.SIGSTOP)
        web.reset([start("enter-text")])
        assert web.reset([start("enter-text")]) == before and web.failures == [""]
        if victim == "Chromium":
            os.kill(process, signal.SIGKILL)


def test_without_chromium_the_error_says_how_to_get_one(monkeypatch):
    """Guards: Playwright's own message, which names no remedy; another Chromium than asked for."""
    monkeypatch.setenv("DYNAWEB_CHROMIUM", "/nowhere/chromium")
    with pytest.raises(FileNotFoundError, match="apt-get install chromium.*playwright install chromium"):
        chromium_path("/usr/bin/chromium")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_finds_the_chromium_that_is_there(tmp_path):
    """Guards: a look that always fails: root would install one at each `make`, any other user could never go
    on. `id` says here that nobody is root."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    path, said = f"{tmp_path}:{os.environ['PATH']}", []
    for there in (chromium_path("/usr/bin/chromium"), "/nowhere/chromium"):
        ran = subprocess.run(["make", "-so", ".venv/ready", f"PY={sys.executable}", "chromium"],
                             cwd=Path(chromium.__file__).parents[1], capture_output=True, text=True,
                             env=os.environ | {"PATH": path, "DYNAWEB_CHROMIUM": there, "MAKEFLAGS": "",
                                               "MAKELEVEL": ""})
        said.append((ran.returncode, ran.stdout))
    assert said[0] == (0, "") and said[1][0] == 2

# ---- only the hosts it was given ---------------------------------------------------------------------------

@pytest.fixture
def neighbour():
    with servers.site() as server:
        yield server


def test_a_hostile_page_reaches_nothing(pages, neighbour):
    """Guards: every way out: sockets, beacons, workers, prefetch, frames, forms, windows, file:. First
    without the lock, so that an empty list means something."""
    asked, port = neighbour.asked, neighbour.port
    (pages / "miniwob" / "hostile.html").write_text(HOSTILE.replace("OTHER", f"127.0.0.1:{port}"))
    with sync_playwright() as playwright:
        path = chromium_path(playwright.chromium.executable_path)
        chromium = playwright.chromium.launch(executable_path=path)
        page = chromium.new_page()
        page.goto(f"file://{pages}/miniwob/hostile.html")
        page.evaluate("core.startEpisodeReal()")
        page.get_by_text("Open", exact=True).click()
        ways = {"/fetch", "/image", "/socket", "/worker", "/frame", "/open", "/popup", "/location"}
        for _ in range(100):  # a busy machine takes its time
            if not ways <= set(asked):
                page.wait_for_timeout(100)
        chromium.close()
    assert ways <= set(asked)
    asked.clear()

    tasks = {"hostile": f"127.0.0.1:{port}", "hostile-name": f"localhost:{port}"}
    for task, other in tasks.items():
        (pages / "miniwob" / f"{task}.html").write_text(HOSTILE.replace("OTHER", other))
    with Browser(html=pages, timeout=30) as web:
        obs = web.reset([start(task) for task in tasks])
        for words in ("'Open'", "'Post'", "'Leave'", "'Blank'"):
            obs, _, _, truncated = act(web, *(f"click [{bid(seen.page, words)}]" for seen in obs))
            assert [seen.url for seen in obs] == [f"{ORIGIN}/{task}.html" for task in tasks]
            assert truncated == [False, False]
        web._run(web._tabs[0].page.wait_for_timeout(500))
        assert len(web._shared.pages) == 2 and not any("root:" in seen.page for seen in obs)
    assert asked == []


def test_files_outside_the_folder_are_not_served(web):
    """Guards against http://miniwob/../../etc/passwd."""
    web.reset([start("enter-text")])
    read = """async path => {
      try { return (await fetch('http://miniwob/' + path)).status } catch (problem) { return 'refused' } }"""
    for path in ("..%2f..%2f..%2fetc/passwd", "core/../../../../../../etc/passwd", "/etc/passwd"):
        assert web._run(web._tabs[0].page.evaluate(read, path)) == "refused"

# ---- the explorer ------------------------------------------------------------------------------------------

def test_an_exploration_is_a_function_of_task_and_seed_and_none_that_broke_is_recorded(web, monkeypatch):
    """Guards: data that cannot be collected again: a batch's order, size or random state shows; a crash that
    reads as the page's answer to an action."""
    batch = [("enter-password", 3), ("read-table", 2), ("click-scroll-list", 3)]
    together = collect(web, batch, horizon=4)
    assert [collect(web, [pair], horizon=4)[0] for pair in batch[::-1]] == together[::-1]
    for record in together:
        assert len(record["pages"]) - 1 == len(record["actions"]) == len(record["errors"]) <= 4
        assert record["terminated"] != record["truncated"]
    monkeypatch.setattr(web, "timeout", 3)
    assert collect(web, [("hang", 0)], horizon=6) == []
