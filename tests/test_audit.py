"""Claims about audit.py: what it measures is what Word2World and the field call by these names."""
import json
import re
from unittest import mock

import pytest
from conftest import CountingEnv, act, counting_page, record, recorded, run, start
from helpers.dreams import kind, who
from helpers.processes import command

import audit
from data import Step, parse_action
from dream import Models
from policy import Invalid, Rollout
from world_model import Prediction


def test_exact_and_f1_of_predictions_made_by_hand(tmp_path):
    """Guards: ids that count; a copied page that earns something; unreadable answers left out; an open loop
    on true pages, or with their ids. More changes one line, which goes and comes; Done none."""
    record(file := tmp_path / "r.jsonl", [recorded(["click [1]", "click [1]", "click [2]"], seed=1_000_000)])
    other = counting_page(1).replace("[1]", "[7]").replace("[2]", "[8]")
    wrong = other.replace("Count 1", "Count 5")
    predict = mock.AsyncMock(side_effect=[
        Prediction(other), Prediction(counting_page(1)), Invalid("world model: unreadable: x"),
        Prediction(other), Prediction(wrong), Prediction(counting_page(9), True)])
    found = audit.of_pages(audit.Audit(recorded=str(file)), Models(None, mock.Mock(predict=predict), None))
    assert found["teacher-forced: all"] == found["teacher-forced: count"] == pytest.approx(
        {"n": 3, "exact": 1 / 3, "end": 2 / 3, "unreadable": 1 / 3, "F1": 2 * 2 / (4 + 2)})
    assert found["open loop: all"] == pytest.approx(
        {"n": 3, "exact": 1 / 3, "end": 1.0, "unreadable": 0.0, "F1": 2 * 3 / (4 + 4 + 2)})
    asked = [(call.args[0], str(call.args[1])) for call in predict.call_args_list[3:]]
    assert asked == [(counting_page(0), "click [1]"), (other, "click [7]"), (wrong, "click [8]")]


def test_an_open_loop_returns_where_go_back_does_and_begins_anew_after_a_gap():
    """Guards: a world model blamed for what it did not imagine: a page that was left, a dropped row."""
    wrong = counting_page(9).replace("[1]", "[4]")
    t = recorded(["click [1]", "go_back", *["click [1]"] * 4, "click [2]"])
    for step, n in zip(t.steps, (0, 1, 0, 1, 2, 3, 4)):
        step.page = counting_page(n)
    del t.steps[4]  # so nobody knows what followed on step 3
    predict = mock.AsyncMock(return_value=Prediction(wrong))
    run(audit.predicted(mock.Mock(predict=predict), t, True))
    pages = [call.args[0] for call in predict.call_args_list]
    assert pages == [counting_page(0), counting_page(0), counting_page(3), wrong]


def test_dreams_and_the_judge_beside_real_pages_in_a_real_chromium(scripted):
    """Guards: W2R of other actions than the dream's, or with its ids; CR upside down; a judge held against
    itself; a discarded dream as a failure. Of four dreams one is true, but for its ids; in one a button is
    only dreamed; in one half the word is typed, and the judge says no; one cannot be imagined."""
    words: dict[str, int] = {}  # of the goals, in the order of the dreams
    page = "so.\npage\n| RootWebArea 'x'\n| \t[8] textbox '' value='?'\n| \t[9] button '{}'\nover: no".format
    worlds = page("Submit"), page("Go"), "so.\nno change\nover: no", "nonsense"

    def write(prompt):
        if kind(prompt) == "world":
            typed = re.search(r"\nACTION: type \[\d+\] \[(\w+)\]|$", prompt)[1] or "-"
            here = [worlds[k] for word, k in words.items() if word.startswith(typed)]
            return here[0] if here else "so.\nno change\nover: yes"
        word = re.search(r'OBJECTIVE: Enter "(\w+)"', prompt)[1]
        half, button = words.setdefault(word, len(words)) == 2, re.search(r"\[(\d+)\] button", prompt)[1]
        if kind(prompt) == "judge":
            return f"so.\nCOMPLETED: {'NO' if half else 'YES'}"
        box = re.search(r"\[(\d+)\] textbox '',|$", prompt)[1]
        return act(f"type [{box}] [{word[:2] if half else word}] [0]" if box else f"click [{button}]")

    config = audit.Audit(tasks=("enter-text",), seeds="1000000:4", horizon=3, max_new_tokens=60)
    found = audit.of_dreams(config, models := who(scripted(write)))
    assert found["dreams: all"] == found["dreams: enter-text"] == pytest.approx(
        {"n": 3, "dream": 2 / 3, "W2R": 1 / 3, "real": 2 / 3, "CR": 1 / 2})
    assert found["judge: all"] == {"n": 3, "successes": 1, "AUC": 0.75, "precision": 0.5, "recall": 1.0}
    assert found["left out: world model: unreadable"] == {"n": 1}
    assert [*audit.of_judge(config, models)["judge: all"].values()] == [4, 3, 1.0, 1.0, 1.0]


def test_an_action_on_what_is_there_in_the_dream_alone_ends_its_replay():
    """Guards: W2R with the dream's ids, or of the actions that are left; a replay that ends at what the dream
    refused, too."""
    page = counting_page(0).replace("[2]", "[7]") + "\n\t[3] button 'Go'"
    for error, worth in (("", 0.0), ("there is no [3]", 1.0)):
        steps = [Step(page, "", parse_action(text), (), error) for text in ("click [3]", "click [7]")]
        assert run(audit.replayed(CountingEnv(), Rollout(start(), steps))) == worth


def test_figures_and_the_order_of_agents(tmp_path):
    """Guards: ties that count whole or not at all; 0 of nothing; values for ranks."""
    pairs = (1, 2), (0, 2), (0, 1), (1, -1), (0, -2), (1, None)
    rows = [{"task": "a", "reward": reward, "margin": margin} for reward, margin in pairs]
    assert audit.of_verdicts(rows) == {name: pytest.approx({
        "n": 5, "successes": 2, "AUC": 3.5 / 6, "precision": 1 / 3, "recall": 1 / 2})
        for name in ("judge: all", "judge: a")} | {"no verdict": {"n": 1}}
    assert [*audit.of_verdicts(rows[4:5])["judge: a"].values()] == [1, 0, None, None, None]
    assert audit.spearman([0.1, 0.2, 0.9, 0.9], [1, 2, 3, 100]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert audit.spearman([3, 2, 1], [1, 2, 3]) == -1 and audit.spearman([1, 1], [1, 2]) is None
    for name, dreamed, real in (("a", 0.1, 0.3), ("b", 0.4, 0.2), ("c", 0.9, 0.9)):
        (tmp_path / name).write_text(json.dumps({"dreams: all": {"dream": dreamed, "real": real}}))
    assert re.search(r"real +3 +0\.500", command(audit, "rank", *map(tmp_path.joinpath, "abc")))
