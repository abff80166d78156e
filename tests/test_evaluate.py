"""Claims about evaluate.py: the figures are what they say they are, and a dream is held against the real page
that it meant."""

import dataclasses
import json
import math
import random

import pytest
from conftest import CountingWorld, act, counting_page, recorded, start
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluate
from data import Action, Start, Step, parse_action
from evaluate import determined, paired_bootstrap, precision_recall, to_real, wilson
from policy import TokenTrajectory
from world_model import WorldModel

models = settings.get_profile("models")

# ---- intervals ---------------------------------------------------------------------------------------------


@given(st.integers(1, 2000), st.floats(0, 1))
@settings(models, max_examples=200)
def test_wilsons_bounds_are_where_the_observed_share_is_z_standard_errors_away(n, share):
    """Derivation: Wilson's bounds are the two p that solve |k/n - p| = z sqrt(p (1 - p) / n). At k = 0 the
    upper bound is z^2 / (n + z^2)."""
    k = round(share * n)
    low, high = wilson(k, n)
    assert 0 <= low <= k / n + 1e-12 and k / n - 1e-12 <= high <= 1
    for p in (low, high):
        assert abs(k / n - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / n), abs=1e-7)
    assert (1 - high, 1 - low) == pytest.approx(wilson(n - k, n), abs=1e-12)
    assert wilson(0, n)[1] == pytest.approx(1.96**2 / (n + 1.96**2)) and wilson(0, 0) == (0.0, 1.0)


def test_the_bootstrap_is_of_b_minus_a_and_of_pairs():
    """Guards the sign, and guards against a resampling of a and b apart, in which the difficulty of the
    starts drowns the difference. Here b is a plus .25 in every pair. So every resample has the difference
    .25, however much the pairs differ."""
    a = [float(k % 7) for k in range(40)]
    assert paired_bootstrap(a, [x + 0.25 for x in a], draws=200) == pytest.approx((0.25, 0.25, 0.25))
    assert paired_bootstrap([1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], draws=200)[0] == -0.5


def test_the_bootstraps_interval_covers_the_true_difference_about_95_times_in_100():
    """Guards against an interval of another width. 200 experiments of 80 pairs, success .5 against .7, so the
    true difference is .2. The share covered has standard error sqrt(.95 * .05 / 200) = .015, and resampling
    80 pairs costs about a point: between .88 and .99."""
    rng, covered = random.Random(0), 0
    for k in range(200):
        a, b = ([float(rng.random() < p) for _ in range(80)] for p in (0.5, 0.7))
        _, low, high = paired_bootstrap(a, b, draws=400, seed=k)
        covered += low <= 0.2 <= high
    assert 0.88 <= covered / 200 <= 0.99


# ---- real success ------------------------------------------------------------------------------------------


def played(task, seed, reward):
    return TokenTrajectory(Start(task, seed, (), "", "", "", ()), reward=reward)


def test_success_is_counted_over_trajectories_and_for_each_task():
    """Guards against a mean of task means where tasks have different numbers of trajectories, and against
    seeds that are lost: without them nothing can be paired."""
    rows = [("a", 1, 1.0), ("a", 2, 0.0), ("a", 3, 0.0), ("b", 1, 1.0)]
    result = evaluate.success([played(*row) for row in rows])
    assert (result["success"], result["n"], result["interval"]) == (0.5, 4, wilson(2, 4))
    assert result["per_task"] == {"a": {"success": 1 / 3, "n": 3}, "b": {"success": 1.0, "n": 1}}
    assert result["trajectories"] == [list(row) for row in rows]


def test_trajectories_are_played_a_few_pages_at_a_time_greedily_and_in_order(scripted):
    """Guards against results that belong to other starts, a browser that is asked for all pages at once, and
    figures that were sampled."""
    models = scripted(lambda prompt: act("click [2]") if "'Count 7'" not in prompt else act("stop [x]"))
    world = CountingWorld()
    starts = [start(n, seed=n) for n in (5, 6, 7, 8, 9)]
    done = evaluate.play(world, models.lm, starts, 3, 50, pages=2)
    assert [trajectory.start.seed for trajectory in done] == [5, 6, 7, 8, 9]
    assert [trajectory.reward for trajectory in done] == [1, 1, 0, 1, 1]
    assert world.resets == 3 and max(models.calls) == 2
    assert models.seeds == [], "a row was drawn"


def test_the_table_compares_common_trajectories_only(tmp_path):
    """Guards against the difference of two runs over different seeds, a task that only one file has, and
    shares that are called percent. Of seeds 1 and 2, which both files hold, one became right."""
    results = {"sft": [("a", 1, 0.0), ("a", 2, 0.0), ("a", 3, 1.0), ("old", 1, 1.0)],
               "dream": [("a", 1, 1.0), ("a", 2, 0.0), ("a", 9, 1.0)]}
    for name, rows in results.items():
        result = evaluate.success([played(*row) for row in rows])
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    lines = evaluate.table([str(tmp_path / "sft.json"), str(tmp_path / "dream.json")]).split("\n")
    assert lines[0].split() == ["sft", "dream"]
    shares = ["{:.3f} [{:.2f}, {:.2f}] n=3".format(k / 3, *wilson(k, 3)) for k in (1, 2)]
    assert lines[1].split() == ["a", *shares[0].split(), *shares[1].split()]
    assert lines[2].split()[-1] == "-" and lines[3].startswith("all") and "n=4" in lines[3]
    assert lines[4].startswith("dream minus sft: +50.0 points") and lines[4].endswith("n = 2)")
    assert len(evaluate.table([str(tmp_path / "sft.json")]).split("\n")) == 4


def test_precision_and_recall_are_of_what_was_judged_a_success():
    """Guards against the two exchanged, and against a share of nothing that reads 0 or 1."""
    judged, real = [True, True, True, False], [True, False, False, True]
    assert precision_recall(judged, real) == {
        "precision": 1 / 3, "recall": 1 / 2, "n": 4, "successes": 2, "failures": 2}
    assert precision_recall([False, False], [True, False])["precision"] is None
    assert precision_recall([True], [False])["recall"] is None


# ---- dreams against reality --------------------------------------------------------------------------------


class Renumbered(CountingWorld):
    """The counting web with other ids than the dreams have: [1] is [31], [2] is [32]. On page 3 there is no
    Done."""

    def _see(self, k, error=""):
        obs = super()._see(k, error)
        page = obs.page.replace("[1]", "[31]").replace("[2]", "[32]")
        return dataclasses.replace(obs, page=page.rpartition("\n")[0] if self.n[k] == 3 else page)

    def step(self, actions):
        own = {"": "", "31": "1", "32": "2"}
        for action in actions:
            assert action is None or action.bid in own, "an id of the dream was sent to the browser"
        return super().step([action and dataclasses.replace(action, bid=own[action.bid])
                             for action in actions])


def dreamed(*texts, reward=0.0, begin=0, shown=None) -> TokenTrajectory:
    """A dream of the counting web; `shown` are the pages that it showed where they are not the true pages."""
    pages = shown
    if pages is None:
        clicks = [sum(text == "click [1]" for text in texts[:k]) for k in range(len(texts) + 1)]
        pages = [counting_page(begin + count) for count in clicks]
    steps = [Step("", page, "", parse_action(text), ()) for page, text in zip(pages, texts)]
    return TokenTrajectory(start(begin), steps, final_page=pages[-1], reward=reward, terminated=True)


def test_an_action_finds_its_element_by_what_it_is_and_not_by_its_number():
    """Guards against a replay that clicks whatever has the dream's id now, and against a replay that gives up
    on actions without an id."""
    page = counting_page(0)
    shifted = page.replace("[1]", "[31]").replace("[2]", "[32]")
    # The two ids exchanged, as after a navigation, and a line more.
    exchanged = page.replace("[1]", "[2]", 1).replace("[2] button 'Done'", "[1] button 'Done'")
    exchanged = exchanged.replace("\t[2] button 'More'", "\t[4] heading 'New'\n\t[2] button 'More'")
    assert to_real(Action("click", "2"), page, shifted) == Action("click", "32")
    assert to_real(Action("type", "1", "x", False), page, shifted) == Action("type", "31", "x", False)
    assert to_real(Action("click", "2"), page, exchanged) == Action("click", "1")
    assert to_real(Action("stop", text="x"), page, exchanged) == Action("stop", text="x")
    assert to_real(Action("click", "2"), page, page.rpartition("\n")[0]) is None
    assert to_real(Action("click", "99"), page, shifted) is None


def test_a_replay_judges_the_judge_by_what_really_happened():
    """Guards against precision and recall of the judge against itself, experts and dropped dreams in the
    figures, and unmatched actions that are passed over.

    By hand: of the five, three are judged a success (a real success, a stop, and a Done that the real page
    does not have), and two a failure (a stop, and a real success).
    """
    cases = [dreamed("click [1]", "click [2]", reward=1.0),
             dreamed("click [1]", "stop [x]", reward=0.0),
             dreamed("stop [x]", reward=1.0),
             dreamed("click [2]", reward=0.0),
             dreamed("click [1]", "click [2]", reward=1.0, begin=2)]
    left_out = [dataclasses.replace(cases[0], expert=True), dataclasses.replace(cases[0], dropped="nonsense"),
                dataclasses.replace(cases[0], steps=[])]
    for pages in (2, 16):
        result = evaluate.replay(Renumbered(), cases + left_out, pages=pages)
        expected = {"precision": 1 / 3, "recall": 1 / 2, "n": 5, "successes": 2, "failures": 3,
                    "unmatched": 1}
        assert {key: result[key] for key in expected} == expected


def test_pages_are_compared_step_by_step_as_long_as_the_dream_could_be_followed():
    """Guards against pages that are compared with those of another step, or beyond the end. The second dream
    is right at first, and wrong at its second page. The third ends with its first action."""
    wrong = dreamed("click [1]", "click [1]", "click [1]",
                    shown=[counting_page(0), counting_page(1), counting_page(1), counting_page(2)])
    dreams = [dreamed("click [1]", "click [1]"), wrong, dreamed("click [2]", "click [1]")]
    result = evaluate.replay(Renumbered(), dreams)
    assert result["pages by step"] == {1: 3, 2: 2, 3: 1}
    assert result["page equal by step"] == {1: 1.0, 2: 0.5, 3: 0.0}


def test_a_replay_starts_where_the_dream_did():
    """Guards against a replay from the first page of a dream that began in the middle: the prefix must reach
    the browser."""
    world, trajectory = Renumbered(), dreamed("click [2]", begin=2)
    trajectory.start = dataclasses.replace(trajectory.start, prefix=("click [1]", "click [1]"))
    evaluate.replay(world, [trajectory])
    assert world.starts == [trajectory.start] and world.taken == [["click [2]"]]


BOX = """RootWebArea 'x'
\t[1] textbox '' value='old'
\t[2] combobox '' value='red'
\t\t[3] option 'red', selected=True
\t\t[4] option 'blue', selected=False
\t[5] textbox 'Password'"""


@pytest.mark.parametrize("action, after, known", [
    ("type [1] [tea] [0]", BOX.replace("'old'", "'tea'"), True),
    ("type [1] [it's] [0]", BOX.replace("'old'", '"it\'s"'), True),
    ("type [1] [] [0]", BOX.replace(" value='old'", ""), True),
    ("type [5] [secret] [0]", BOX + " value='••••'", True),
    ("click [4]", BOX.replace("value='red'", "value='blue'"), True),
    ("click [2]", BOX, True),
    ("type [1] [tea] [0]", BOX.replace("'old'", "'TEA'"), False),
    ("click [5]", BOX + "\n\t[6] button 'Surprise'", False),
    ("click [1]", BOX.replace("'old'", "'new'"), False)])
def test_a_page_is_determined_if_all_its_words_stood_on_the_last_page_or_in_the_action(action, after, known):
    """The rule by which the world model's pages are counted, decided before anything was measured. Guards
    against a rule that leaves out what the world model gets wrong."""
    assert determined(BOX, parse_action(action), after) == known


def test_fidelity_counts_pages_that_are_determined_and_ends_where_the_goal_does_not_decide(scripted):
    """Guards against undetermined pages in the denominator, ends of navigate-tree (only the goal knows them),
    and a page that is right up to an attribute counted as right.

    By hand: the next page of a More holds a new number, so only the pages of the three Dones are determined.
    One of them is wrong. Of the three ends of the task `count`, two are Dones and right; More's is wrong.
    """
    def write(prompt):
        done_on_page_0 = "\nACTION: click [2]" in prompt and "'Count 1'" not in prompt
        return f"so.\n{'set [2] focused' if done_on_page_0 else 'no change'}\nover: yes"

    models = scripted(write)
    both = ["click [1]", "click [2]"]
    shown = [recorded(both, task="count"), recorded(["click [2]"], task="count"),
             recorded(both, task="navigate-tree")]
    result = evaluate.fidelity(WorldModel(models.lm, 50, 0.0), shown)
    assert result["page"] == pytest.approx(2 / 3) and result["end"] == pytest.approx(2 / 3)
    counted, tree = result["per_task"]["count"], result["per_task"]["navigate-tree"]
    assert counted == {"page": 0.5, "n": 2, "not determined": 1, "end": 0.6667}
    assert tree == {"page": 1.0, "n": 1, "not determined": 1, "end": None}
    (miss,) = result["misses"]
    assert miss["wanted"] == "no change" and miss["delta"] == "set [2] focused"


def test_the_judge_is_audited_on_what_the_agent_really_did_and_what_really_ended(scripted, monkeypatch):
    """Guards against a judge that is asked about other pages than those acted on, and against trajectories
    out of steps in its figures.

    By hand: Done on page 1 (judged a success, and is), Done on page 2 (judged a failure, and is a success),
    stop on page 5 (judged a failure, and is), stop on page 1 (judged a success, and is a failure), and a
    trajectory that never ends.
    """
    def write(prompt):
        if "QUESTION: completed?" in prompt:
            return f"so.\nCOMPLETED: {'YES' if 'Count 1' in prompt else 'NO'}"
        if "Give up." in prompt or "Count 5" in prompt:
            return act("stop [x]")
        return act("click [2]" if "Count 1" in prompt or "Count 2" in prompt else "click [1]")

    models = scripted(write)
    loaded = []
    monkeypatch.setattr(evaluate.lm, "load", lambda folder, **_: loaded.append(folder) or models.lm)
    starts = [start(1), start(2), start(5), start(1, goal="Give up."), start(7)]
    config = evaluate.Config(checkpoint="agent", horizon=2, max_new_tokens=50, judge_tokens=50)
    result = evaluate.judge_own(CountingWorld(), models.lm, starts, config)
    expected = {"precision": 1 / 2, "recall": 1 / 2, "n": 4, "successes": 2, "failures": 2, "not ended": 1}
    assert {key: result[key] for key in expected} == expected
    assert [(wrong["said"], wrong["actions"]) for wrong in result["wrong"]] == [
        (False, ("click [2] where [2] is Done",)), (True, ("stop [x]",))]
    assert loaded == ["agent"], "the judge is the agent's own checkpoint unless another is given"
