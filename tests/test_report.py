"""Claims about stories.py and report.py: what a run keeps of its dreams and what is read back, who parted
them, what a page shows, and that nothing of what strangers wrote runs in it. The last in a real Chromium."""

import dataclasses
import io
import json
import random

import pytest
from conftest import counting_page, start
from helpers.runs import Paying
from playwright.sync_api import sync_playwright

import a11y
import data
import dream
import measure
import report
import stories
from data import Step, parse_action
from judge import Verdict
from policy import TokenTrajectory
from world_model import Prediction
from worlds import chromium
from worlds.miniwob import Browser

DONE = "so.\nCOMPLETED"


def dreamed(*texts, pages=(), reward=1.0, begin=start(), **more) -> TokenTrajectory:
    """A dream of the counting web. `pages`: what it showed after each action, where that is not the truth."""
    steps, answers, page, past = [], [], begin.page, begin.previous
    for k, text in enumerate(texts):
        n = int(data.root_url(page).rpartition("/")[2]) + (text == "click [1]")
        then = pages[k] if k < len(pages) else counting_page(n)
        steps.append(Step(data.root_url(page), page, f"thought {k}.", parse_action(text), past))
        answers.append(Prediction(then, text == "click [2]", "It counts.", a11y.diff(page, then)))
        page, past = then, steps[-1].past
    return TokenTrajectory(begin, steps, [([1], [2])] * len(steps), [[]] * len(steps), page, reward,
                           **{"terminated": True, "predictions": answers, "verdict": Verdict(
                               reward == 1, 1.5 if reward else -1.5, DONE)} | more)


def batch(*groups: list[TokenTrajectory]) -> dream.Batch:
    rows = [row for group in groups for row in group]
    numbers = [k for k, group in enumerate(groups) for _ in group]
    kept = dream.keep(rows, numbers)
    teach = {numbers[k] for k in kept}
    return dream.Batch(rows, [rows[k] for k in kept], [numbers[k] for k in kept],
                       [(group[0].start.task, k in teach) for k, group in enumerate(groups)])


def written(*groups, n: int = 0, updates: int = 4) -> list[dict]:
    """The lines of dreams.jsonl of one update."""
    file = io.StringIO()
    stories.keep(file, n, updates, batch(*groups), lambda ids: f"tokens {ids}")
    return [json.loads(line) for line in file.getvalue().splitlines()]


@pytest.fixture
def run(tmp_path):
    """run(groups of update 0, groups of update 1, ...): the folder that such a run leaves."""

    def make(*updates, metrics=()):
        folder = tmp_path / "agent.run"
        folder.mkdir(exist_ok=True)
        lines = [{"update": n, "dream_success": 0.5, "kept": 3, "drops": {}} for n in range(len(updates))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*lines, *metrics]))
        (folder / "config.json").write_text('{"lr": 1}')
        with open(folder / stories.FILE, "w") as file:
            for n, groups in enumerate(updates):
                stories.keep(file, n, len(updates), batch(*groups), str)
        return folder

    return make

# ---- what a run keeps --------------------------------------------------------------------------------------

def test_what_is_kept_reads_back_as_the_dream_that_it_was():
    """Guards: a page that is not the one dreamed (code answered, the action was impossible, a delta does not
    fit), an action, an error or a start that is lost."""
    back = dreamed("click [1]", "click [1]", "go_back", "click [9]", "stop [two\nlines]")
    back.predictions[2] = back.predictions[4] = None
    back.steps[3].page, back.steps[3].error = counting_page(1), ""
    back.steps[4] = dataclasses.replace(back.steps[4], page=counting_page(1), error="there is no [9]")
    back.final_page = counting_page(1)
    back.predictions[3] = Prediction(counting_page(1), error="there is no [9]")
    own = dreamed("click [1]")
    own.predictions[0] = dataclasses.replace(own.predictions[0], delta="del [77]")
    late = dataclasses.replace(start(2), previous=("click [1] where [1] is More",) * 2,
                               prefix=("click [1]",) * 2)
    cases = [back, own, dreamed("click [2]", begin=late),
             dreamed(no_action=True, terminated=False, verdict=None),
             dreamed("click [1]", dropped="judge: cut off: more", terminated=False, truncated=True,
                     reward=0.0, verdict=Verdict(False, float("-inf"), "so", "cut off: more"))]
    cases[3].pairs = [([5], [7, 8])]
    for case in cases:
        [row] = written([case])
        read = stories.read_dream(json.loads(json.dumps(row)))
        assert [step.page for step in read.steps] == [step.page for step in case.steps]
        assert [(s.action, s.thought, s.error) for s in read.steps] == [
            (s.action, s.thought, s.error) for s in case.steps]
        assert read.final_page == case.final_page and read.start == case.start
        names = ("reward", "terminated", "truncated", "no_action", "dropped")
        assert [getattr(read, name) for name in names] == [getattr(case, name) for name in names]
    assert written([cases[3]])[0]["wrote"] == "tokens [7, 8]"
    assert "page" in written([back])[0]["steps"][2], "go_back has no delta"
    assert all("page" not in step for step in written([dreamed("click [1]", "click [2]")])[0]["steps"])


def test_the_file_stays_small_however_long_the_run_and_the_pages():
    """Guards: a disk that fills up with dreams; and a bound by which nothing at all is left."""
    kept = [n for n in range(1000) if written([dreamed("click [2]")], n=n, updates=1000)]
    assert len(kept) <= stories.UPDATES + 1 and kept[0] == 0 and kept[-1] == 999
    assert max(b - a for a, b in zip(kept, kept[1:])) == 25
    assert [n for n in range(40) if written([dreamed("click [2]")], n=n, updates=40)] == list(range(40))
    rng = random.Random(0)
    long = lambda: dreamed("click [2]", begin=dataclasses.replace(
        start(), page=counting_page(0) + f"\n\tStaticText '{rng.randbytes(stories.BYTES // 6).hex()}'"))
    small = [dreamed("click [2]"), dreamed("click [2]"), dreamed("click [2]")]
    groups = lambda *given: {row["group"] for row in written(*given)}
    assert groups([long(), *small[1:]], [long(), long(), *small[2:]], small) == {0, 2}
    assert groups([long(), long(), long()], small) == {0}


def test_a_line_that_is_cut_or_damaged_is_left_out_and_said(run):
    """Guards: a run that goes on just now, or was killed, that ends in a traceback; dreams missing without a
    word."""
    folder = run([[dreamed("click [2]"), dreamed("click [1]", "click [2]", reward=0.0)]])
    whole = (folder / stories.FILE).read_text()
    (folder / stories.FILE).write_text('{"update": 0}\n{"upd\n' + whole + whole[:50])
    page = report.of_run(folder)
    assert "dreams.jsonl: 2 line(s) cannot be read" in page and "1 line(s) are no dreams" in page
    assert page.count('class="item"') == 2


# ---- who parted them ---------------------------------------------------------------------------------------

def group(*trajectories) -> stories.Group:
    return stories.Group([stories.Dream(row, stories.read_dream(row)) for row in written(list(trajectories))])


def shape(tree: dict) -> list:
    """What a parting is, without its words."""
    if not tree["branches"]:
        return sorted(one.row["row"] for one in tree["dreams"])
    return [tree["by"], tree["step"], *map(shape, tree["branches"])]


def test_the_agent_parts_dreams_on_an_equal_page_and_the_dice_after_an_equal_action():
    """Guards: blame on the agent for what the world model drew, or the reverse; a difference in thoughts that
    counts; an expert among the dreams."""
    other = [counting_page(1).replace("More", "Moor")]
    rows = [dreamed("click [1]", "click [2]"), dreamed("click [1]", "click [1]", "click [2]"),
            dreamed("click [1]", "click [2]", pages=other), dreamed("click [2]", reward=0.0),
            dataclasses.replace(dreamed("click [2]"), expert=True, predictions=[], verdict=None)]
    found = group(*rows)
    assert shape(found.parted) == ["agent", 1, ["dice", 1, ["agent", 2, [0], [1]], [2]], [3]]
    assert found.story == "The agent parted them first: at step 1 it did 2 things on an equal page."
    assert group(*rows[:1], rows[2]).story == (
        "The dice parted them first: at step 1 an equal action led to 2 pages.")
    same = dreamed("click [2]")
    same.steps[0].thought = "something else"
    assert group(dreamed("click [2]"), same).story == "All 2 dreams are alike: equal actions, equal pages."
    wordless = dataclasses.replace(dreamed("click [1]", verdict=None), no_action=True)
    assert shape(group(wordless, rows[0]).parted) == ["agent", 2, [0], [1]]
    no_end = dreamed("click [2]")
    no_end.predictions[0] = dataclasses.replace(no_end.predictions[0], over=False)
    assert shape(group(no_end, dreamed("click [2]")).parted) == ["dice", 1, [0], [1]]


# ---- beside reality ----------------------------------------------------------------------------------------

def test_a_dream_is_judged_by_what_its_actions_really_earn_and_left_where_its_page_is_no_more(monkeypatch):
    """Guards: rightly and wrongly exchanged; a step too early or too late; an end that was not seen; an
    expert or a dropped dream among the judge's errors; a task that the browser does not know."""
    monkeypatch.setattr(report, "Browser", Paying)
    false = counting_page(5)
    third = counting_page(1) + "\n\t[3] button 'Dreamed up', clickable"
    cases = [
        (dreamed("click [1]", "click [2]"), "rightly", "never", 1.0),
        (dreamed("click [2]"), "wrongly", "never", 0.0),
        (dreamed("click [1]", "click [2]", reward=0.0, pages=[counting_page(1), false]), "wrongly", "2", 1.0),
        (dreamed("click [1]", "click [3]", pages=[third, third]), "wrongly", "1", 0.0),
        (dreamed("click [1]", "click [9]", reward=0.0, terminated=False), "rightly", "2", 0.0),
        (dreamed("click [1]", "click [1]", pages=[counting_page(1)] * 2), "wrongly", "2", 0.0),
        (dreamed("click [1]"), "wrongly", "1", 0.0),
        (dreamed("click [2]", reward=0.0, dropped="judge: cut off: x"), "not known", "never", 0.0),
        (dataclasses.replace(dreamed("click [2]"), expert=True, predictions=[]), "rightly", "never", 1.0),
        (dreamed("click [2]", begin=start(task="else")), "not known", "not known", None)]
    groups = [group(case) for case, *_ in cases]
    dreams = [one for some in groups for one in some.dreams]
    said = report.replay(dreams)
    assert said == "1 dreams were not done for real: worlds/miniwob.py does not know their tasks."
    assert [(one.judged, one.left, one.deserved) for one in dreams] == [tuple(case[1:]) for case in cases]
    assert stories.truth(dreams[3]) == (
        "For real, step 2 acts on an element that is not there, which is worth 0. It left reality at step 1.")
    found = report.figures(dreams)
    assert (found["n"], found["given"], found["paid"], found["both"], found["unmatched"]) == (7, 5, 2, 1, 2)
    assert found["pages"] == [(1, 6, 7), (2, 1, 3)]
    assert report.wrong(groups) == [("all succeeded", 5, 4), ("all failed", 2, 1)]


def test_in_a_real_chromium_a_true_dream_is_as_dreamed_and_a_false_one_is_not(run, monkeypatch):
    """Guards: a column that shows what was dreamed; the browser's ids; a page not restarted between
    dreams."""
    with Browser() as web:
        [seen] = web.reset([data.start("enter-text", 3)])
    word = seen.goal.split('"')[1]
    box, button = data.bids(seen.page)[:2]
    begin = data.Start("enter-text", 3, (), seen.goal, seen.url, seen.page, ())
    typed = a11y.apply(seen.page, f"set [{box}] value='{word}', focused")

    def act(told, pages):
        steps = [Step(seen.url, page, "so.", parse_action(text), ()) for text, page in zip(told, pages)]
        answers = [Prediction(page, k == len(told) - 1, "", "") for k, page in enumerate(pages[1:])]
        return TokenTrajectory(begin, steps, [([1], [2])] * len(steps), [[]] * len(steps), pages[-1], 1.0,
                               terminated=True, predictions=answers, verdict=Verdict(True, 1.0, "so."))

    true = act([f"type [{box}] [{word}] [0]", f"click [{button}]"], [seen.page, typed, typed])
    false = act([f"click [{button}]"], [seen.page, seen.page])
    folder = run([[true, false]])
    page = report.of_run(folder, real=True)
    assert "2 dreams: 2 were rewarded, 1 deserved it, 1 both." in page
    assert page.count('data-judged="rightly"') == page.count('data-judged="wrongly"') == 1
    assert "What the browser showed" in page

# ---- a page with marks -------------------------------------------------------------------------------------

def text(marks) -> list[str]:
    return [sign + "|" + "".join(f"<{kind}{part}>" if kind else part for kind, part in parts)
            for sign, parts in marks]


def test_a_mark_is_on_what_changed_and_on_nothing_else():
    """Guards: a changed value that is not seen; a line gone without a trace; a page marked as one line moved
    in."""
    before = "\n".join(["RootWebArea 'a'", "\t[1] textbox '' value='x', visible, focused",
                        "\t[2] link 'gone'", "\tStaticText 'one'",
                        *(f"\t[{k}] link '{k}'" for k in range(3, 40))])
    after = a11y.apply(before, "set [1] value='y'\nunset [1] focused\ndel [2]\nadd [39] 0\n| [] link 'new'")
    assert text(report.marked(before, after)) == [
        "|RootWebArea 'a'", "-|  [2] link 'gone'",
        "~|  [1] textbox '' value=<-'x'><+'y'>, visible<-, focused>",
        "|  StaticText 'one'", "|  [3] link '3'", "|  [4] link '4'", "...|32 lines that did not change",
        "|  [37] link '37'", "|  [38] link '38'", "|  [39] link '39'", "+|    [40] link 'new'"]
    assert text(report.marked(before, before)) == ["...|41 lines that did not change"]
    assert len(report.marked(None, after)) == 41
    assert text(report.marked(None, "\n".join([after] * 9)))[-1] == "...|309 lines that follow"
    assert max(map(len, text(report.marked(None, "x" * 10**6)))) < 1000
    # Lines that repeat would take hours: half of 3,000 equal ones become others.
    page = "\n".join(["first", *["a"] * 3000])
    marks = text(report.marked(page, "\n".join(["first", *["a", "b"] * 1400, *["a"] * 190])))
    assert marks[:3] == ["|first", "|a", "-|a"]

# ---- tries -------------------------------------------------------------------------------------------------

def tried(task: str, reward, **more) -> dict:
    return {"task": task, "seed": 0, "site": "s", "difficulty": "", "reward": reward, "failed": "",
            "end": "stop", "actions": ["click [1]", "stop [x]"], "answer": "x", "seconds": 1.0,
            "tokens_read": 5, "tokens_written": 5} | more


def file_of(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"made": {}}, *rows]))
    return path


def test_two_files_of_tries_are_paired_by_task_and_their_difference_has_its_interval(tmp_path):
    """Guards: pairs of different tasks, failed pages in the difference, and the first minus the second."""
    first = file_of(tmp_path / "a.jsonl", *(tried(f"t{k}", float(k < 3)) for k in range(9)),
                    tried("lost", 1.0, failed="the page hung"), tried("alone", 1.0))
    rows = [tried(f"t{k}", float(k < 7)) for k in range(9)]
    random.Random(1).shuffle(rows)
    second = file_of(tmp_path / "b.jsonl", *rows, tried("lost", 0.0))
    mean, low, high = measure.paired_bootstrap(*([float(k < n) for k in range(9)] for n in (3, 7)))
    page = report.of_tries([first, second])
    assert f"<b>{100 * mean:+.1f} points</b>" in page and "paired bootstrap over the 9 tries" in page
    assert mean > 0 and abs(low) < 1 and f"to {100 * high:+.1f} (" in page
    for outcome, n in (("failure / success", 4), ("success / success", 3), ("page failed / failure", 1),
                       ("success / not tried", 1)):
        assert f"<tr><td>{outcome}</td><td>{n}</td></tr>" in page
    assert report.write([first, second]) == tmp_path / "a-b.html"


# ---- nothing of strangers runs -----------------------------------------------------------------------------

EVIL = ("</pre></script></style><script>ran('script')</script><img src=x onerror=\"ran('image')\">"
        "<svg onload=ran('svg')>\"'><iframe srcdoc='<script>parent.ran()</script>'></iframe>"
        "{{ 7 * 7 }}{% raw %}javascript:ran('url')")


@pytest.fixture(scope="module")
def opened():
    """opened(file, settings of the window): the page in a real Chromium, which notes what calls ran()."""
    with sync_playwright() as play:
        options = chromium.launch_options(play.chromium.executable_path)
        browser = play.chromium.launch(**options)

        def see(file, **window):
            page = browser.new_context(**window).new_page()
            page.add_init_script("window.runs = []; window.ran = what => runs.push(what ?? '?');")
            page.said = []
            page.on("console", lambda message: page.said.append(message.text))
            page.on("pageerror", lambda error: page.said.append(str(error)))
            page.goto(f"file://{file}")
            return page

        yield see
        browser.close()


def hostile(run) -> "report.Path":
    """The page of a run in which every text that a stranger writes is EVIL."""
    begin = dataclasses.replace(start(), task=EVIL, goal=EVIL, previous=(EVIL,), prefix=(EVIL,),
                                page=counting_page(0) + f"\n\t[7] textbox {EVIL!r} value={EVIL!r}")
    page = begin.page.replace("More", EVIL.replace("'", "")) + f"\n{EVIL}"
    bad = dreamed("click [1]", f"type [7] [{EVIL}] [1]", begin=begin, pages=[page, page], reward=0.0)
    for step, answer in zip(bad.steps, bad.predictions):
        step.thought = step.error = EVIL
    bad.predictions = [dataclasses.replace(answer, reason=EVIL) for answer in bad.predictions]
    bad.verdict = Verdict(False, -1.0, EVIL)
    lost = dreamed("click [1]", begin=begin, dropped=EVIL, verdict=None, reward=0.0)
    lost.predictions[0] = dataclasses.replace(lost.predictions[0], unknown=EVIL, delta=EVIL)
    mute = dataclasses.replace(dreamed("click [1]", begin=begin, verdict=None, reward=0.0), no_action=True)
    folder = run([[bad, lost, mute, dreamed("click [2]", begin=begin)]],
                 metrics=[{"update": 1, "drops": {EVIL: 2}}])
    text = (folder / stories.FILE).read_text().replace('"wrote": "[2]"', f'"wrote": {json.dumps(EVIL)}')
    (folder / stories.FILE).write_text(text)
    (folder / "config.json").write_text(json.dumps({"policy": EVIL}))
    return report.write([folder])


def test_no_text_of_a_stranger_runs_in_a_real_chromium(run, opened, tmp_path):
    """Guards: one text of a page, a goal, a thought or an answer put in unescaped. Every word can still be
    read."""
    file = file_of(tmp_path / "t.jsonl", tried(
        EVIL, 0.0, failed=EVIL, end=EVIL, answer=EVIL, goal=EVIL, site=EVIL, actions=[EVIL],
        thoughts=[EVIL], errors=[EVIL], pages=[EVIL, EVIL], screenshots=[EVIL]))
    for page, least in ((opened(hostile(run)), 20), (opened(report.write([file])), 8)):
        page.click("#all")
        page.wait_for_timeout(300)
        assert page.evaluate("runs") == [] and page.said == []
        assert page.locator("iframe, img, svg[onload], script").count() == 1, "our script alone"
        assert page.inner_text("body").count("<script>ran('script')</script>") >= least
        assert page.inner_text("#count").endswith("shown") and "{{ 7 * 7 }}" in page.inner_text("body")
        assert page.evaluate("[...document.all].every(one => one.getAttributeNames()"
                             ".every(name => !name.startsWith('on') && name != 'style'))")


def test_what_escaping_would_let_through_the_policy_stops(run, opened):
    """Guards: a policy that allows any inline script. The same lines run where the policy is taken out."""
    file = hostile(run)
    whole = file.read_text()
    into = whole.replace("<main>", "<main><script>ran('script')</script><img src=x onerror=\"ran('image')\">")
    for text, runs in ((into, []), (into.replace("Content-Security-Policy", "X"), ["image", "script"])):
        file.write_text(text)
        page = opened(file)
        page.wait_for_timeout(300)
        assert sorted(page.evaluate("runs")) == runs
        assert page.inner_text("#count") == "4 of 4 shown"

# ---- it can be used ----------------------------------------------------------------------------------------


