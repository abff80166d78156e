"""Claims about bench/players.py, bench/pages.py and our own pages (worlds/html), in a real Chromium."""

import ast
import inspect
import json
from pathlib import Path

import pytest
from helpers.pages import act, bid, start

import data
from bench import pages, players
from worlds.miniwob import ALL_TASKS, OURS, TASKS, TRANSFER, Browser, tasks_of

FOUND = Path(__file__).parents[1] / "results/pages.json"
SEED = 1_000_000  # the first of those in results/pages.json


@pytest.fixture(scope="module")
def web():
    with Browser(timeout=30) as web:
        yield web


@pytest.fixture(scope="module")
def rows():
    return pages.read(FOUND)

# ---- players -----------------------------------------------------------------------------------------------

def test_players_win_in_as_many_steps_as_was_written_down(web, rows):
    """Guards: a change of Chromium, of the page's text or of the grammar after which pages that are scored
    cannot be won any more. Pages unlike each other: text, boxes, menus, a calendar, a slider, posts, stop."""
    some = ("ask-table", "click-checkboxes-large", "click-menu-2", "choose-date-easy", "form-sequence",
            "form-sequence-3", "login-user-popup", "our-form", "our-list", "phone-book", "social-media-some",
            "use-autocomplete")
    tries = players.play(web, [(task, SEED) for task in some], pages.horizon)
    assert [(one.task, one.lost, one.reward) for one in tries] == [(task, "", 1) for task in some]
    assert [len(one.actions) for one in tries] == [rows[task]["each"][0] for task in some]


def test_a_player_that_cannot_find_its_line_has_lost(web, monkeypatch):
    """Guards against a try that is counted as won, or that ends all others, because a player raised."""
    def blind(goal, page):
        yield players.click(page, "button", "Nowhere")

    monkeypatch.setitem(players.PLAYERS, "click-test", blind)
    lost, won = players.play(web, [("click-test", SEED), ("click-test-2", SEED)], pages.horizon)
    assert (lost.reward, lost.actions, lost.lost) == (0, [], "Lost: no button Nowhere (1)")
    assert (won.reward, won.lost) == (1, "")


def test_a_player_has_ten_lines():
    """Guards against players that know more than a goal says: what needs a program is no page to score."""
    tree = ast.parse(inspect.getsource(players))
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        if [argument.arg for argument in function.args.args] == ["goal", "page"]:
            assert function.end_lineno - function.lineno <= 10, f"{function.name} is longer than ten lines"

# ---- pages of our own --------------------------------------------------------------------------------------

@pytest.mark.parametrize("task", ["our-form", "our-list"])
def test_our_pages_pay_for_the_goal_and_for_nothing_less(web, task):
    """Guards: a page that pays whoever presses its button: each action of the winning try is left out once.
    But turning a screen is not: what stands on it could not be ticked."""
    [won] = players.play(web, [(task, SEED)], pages.horizon)
    assert won.reward == 1
    needed = [n for n, action in enumerate(won.actions[:-1]) if won.pages[n].count("Screen") == 0
              or "checkbox" in next(line for line in won.pages[n].split("\n")
                                    if action.split()[1] in line)]
    assert len(needed) == (8 if task == "our-form" else 4 + (len(won.actions) == 8))
    web.reset([start(task, SEED) for _ in needed])
    for n, text in enumerate(won.actions):
        _, rewards, ended, _ = act(web, *[None if n == left_out else text for left_out in needed])
    assert all(ended) and not any(rewards)


def test_the_list_says_what_was_chosen_and_keeps_it(web):
    """Guards against hidden state: a tick that is forgotten, or not told, when the screen is turned."""
    [first] = web.reset([start("our-list", SEED)])
    [ticked], *_ = act(web, f"click [{bid(first.page, 'checkbox')}]")
    [turned], *_ = act(web, f"click [{bid(first.page, 'Next')}]")
    [back], *_ = act(web, f"click [{bid(turned.page, 'Back')}]")
    assert "Chosen: nothing" in first.page and "Screen 2 of 3" in turned.page
    city = first.page.split("checkbox '")[1].split("'")[0]
    for obs in (ticked, turned, back):
        assert f"Chosen: {city}'" in obs.page
    assert back.page.count("checked='true'") == 1 and turned.page.count("checked='true'") == 0


def test_our_pages_are_not_among_miniwobs(web):
    """Guards against figures of MiniWoB++ that have pages of ours in them, and against a page of ours that
    `--tasks` refuses."""
    names = [file.removesuffix(".html") for file in OURS]
    assert names == ["our-form", "our-list"] and not {*names} & {*ALL_TASKS}
    assert all(Browser.knows(name) for name in names) and not Browser.knows("our-nothing")

# ---- what was found ----------------------------------------------------------------------------------------

def test_every_page_is_played_or_has_a_reason(rows):
    """Guards: a page that is neither scored nor spoken of, and a file that a later rule or player has not
    touched."""
    names = {*ALL_TASKS, "ask-table", "our-form", "our-list"}
    assert {*rows} == names and {*players.PLAYERS} | {*pages.NO_PLAYER} == names
    assert not {*players.PLAYERS} & {*pages.NO_PLAYER}
    for task, row in rows.items():
        assert ("wins" in row) == (task in players.PLAYERS), task
        assert row["outcome"] == pages.outcome(row), f"{task}: python -m bench.pages --table"
        if "wins" in row:
            assert row["of"] == 20 and row["horizon"] == pages.horizon(task), task
            assert row["wins"] == sum(steps > 0 for steps in row["each"]), task
    kept = {task for task in rows if rows[task]["outcome"] in pages.KEPT}
    assert not kept & {*pages.KNOWN, *TRANSFER}
    assert sum(rows[task]["longest"] == 1 for task in kept) <= 5, "pages of one click"
    asked = [task for task in rows if "sft" in rows[task]]  # what was left when an agent was asked
    assert len([task for task in asked if rows[task]["steps"] >= 6]) >= 3, "longer pages"
    assert {*kept} < {*asked} and len(kept) >= 16, "fewer, and the rule wants five demonstrations"
    assert TASKS == tasks_of(("scored",)) == tuple(
        task for task, row in rows.items() if row["outcome"] == "scored")


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Guards against a sweep of half an hour that begins again, and against half a file."""
    played = []

    def looked_at(web, task, *_):
        played.append(task)
        if len(played) == 3:
            raise KeyboardInterrupt
        return {"task": task, "horizon": 10, "wins": 20, "of": 20, "steps": 1.0, "longest": 1,
                "each": [1] * 20, "again": 4, "twice": 4, "draws": 0.0, "met": 0, "differ": 0,
                "unforeseen": 0.0, "tokens": 99, "lost": {}}

    monkeypatch.setattr(pages, "looked_at", looked_at)
    monkeypatch.setattr(pages, "NO_PLAYER", dict.fromkeys({*ALL_TASKS} - {*players.PLAYERS}, "none"))
    monkeypatch.setattr(players, "PLAYERS", dict.fromkeys(
        ("ask-table", "click-test", "our-form", "our-list"), None))
    monkeypatch.setattr(pages, "ALL_TASKS", ("click-test",))
    config = pages.Config(out=tmp_path / "pages.json", recorded=tmp_path / "none")
    with pytest.raises(KeyboardInterrupt):
        pages.main(config)
    assert [row["task"] for row in json.loads(config.out.read_text())] == ["ask-table", "click-test"]
    pages.main(config)
    assert played == ["ask-table", "click-test", "our-form", "our-form", "our-list"]
    assert "| our-list | kept | 20 of 20 | 1.0 | 1 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="dev seeds"):
        pages.main(pages.Config(out=tmp_path / "x.json", seeds="2000000:20"))

# ---- recordings, and what an agent does there --------------------------------------------------------------

def test_what_is_recorded_is_the_explorers_and_else_the_players(tmp_path, capsys):
    """Guards: a player's demonstrations that pass for the explorer's, pages played again by the same command,
    tries that cannot be learned from. The explorer never fills form-sequence-2 in two tries."""
    config = pages.Config(recorded=tmp_path / "pages.jsonl.gz", per_page=2, demonstrations=1)
    pages.record(config, ["focus-text", "form-sequence-2"])
    found, first = pages.of_recordings(config.recorded), config.recorded.read_bytes()
    assert {task: (row["recorded"], row["won"], row["by player"]) for task, row in found.items()} == {
        "focus-text": (2, 2, 0), "form-sequence-2": (2, 0, 1)}
    assert found["form-sequence-2"]["variants"] == {
        "Check the _ radio button and enter the number _ into the _ textbox .": [3, 1]}
    [shown] = [t for t in data.read_trajectories(config.recorded) if t.task == "form-sequence-2" and t.reward]
    assert shown.seed in data.SEEDS["train"] and len(shown.steps) == 3 and shown.terminated
    pages.record(config, ["focus-text", "form-sequence-2"])
    assert config.recorded.read_bytes() == first


def test_a_page_is_scored_where_an_agent_neither_always_nor_never_wins(rows, tmp_path):
    """Guards against limits that take a page in or out by mistake, and against evaluation seeds that choose
    pages."""
    task = next(task for task, row in rows.items() if row["outcome"] == "scored")
    of = lambda won, **more: pages.outcome(rows[task] | {"sft": won, "sft_of": 40} | more)
    assert of(4) == of(20) == of(36) == "scored"
    assert of(3) == "the SFT agent wins 3 of 40" and of(37) == "the SFT agent wins 37 of 40"
    assert of(20, tokens=1025) == "a prompt of 1025 tokens, and the small model reads 1024"
    assert of(20, variants={"Do _ .": [9, 1], "Do it .": [9, 0]}) == "no recorded success of: Do it ."
    result = {"seeds": "2000000:1", "success": 1.0, "n": 1, "per_task": {task: {"success": 1.0, "n": 1}},
              "trajectories": []}
    (tmp_path / "sft.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match="tries on 2000000:1; pages are chosen on dev seeds"):
        pages.of_agent(str(tmp_path / "sft.json"))
