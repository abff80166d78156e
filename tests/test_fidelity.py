"""Claims about fidelity.py, and about the statistics of dreams in measure.py: every figure of made pages is
known by hand, and a dream is held against the real page that it meant."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CountingWorld, act, counting_page, recorded, start, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

import a11y
import audit
import data
import dream
import fidelity
import finetune
import judge
import lm
import measure
import policy
import world_model
from data import Action, Step, parse_action
from fidelity import Predicted, determined, to_real
from judge import Judge
from policy import TokenTrajectory
from world_model import Prediction, WorldModel
from worlds import explore
from worlds.miniwob import Browser

models = settings.get_profile("models")

# ---- one step ----------------------------------------------------------------------------------------------

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
    """The rule by which the world model's pages are counted, decided before anything was measured."""
    assert determined(BOX, parse_action(action), after) == known


def step(answer: str | Prediction, real: str, action: str = "click [2]", page: str = BOX, over: bool = False,
         task: str = "t") -> Predicted:
    """A step on BOX that was answered with a page."""
    answer = Prediction(answer) if isinstance(answer, str) else answer
    return Predicted(task, 1, "", parse_action(action), page, answer, page, real, over)


def renumbered(page: str) -> str:
    return page.replace("[", "[9")


TEA, TWO = BOX.replace("'old'", "'tea'"), BOX.replace("'old'", "'tea'").replace("'red'", "'blue'")


def test_the_figures_of_made_steps_are_those_known_by_hand():
    """Guards: ids that count as errors, a copied page that earns something, an answer that could not be read
    and counts as "no change" or as a right end. By hand: three of six pages are exact (1; 2, with other ids;
    5), and of the four that are determined (not 3, of which the action has no whole value, and not 4). A
    changed textbox is two edits, a line that goes and one that comes. In TWO the value of the combobox and an
    option's name change too. Edits that happened: 2, 2, 6, 2, 0, 0; predicted: 2, 2, 2, 2 (of which the line
    that goes is right), 0, 0. "No change" happened twice, and was predicted once. Ends: five of six."""
    rows = [step(TEA, TEA, "type [1] [tea] [0]"), step(TEA, renumbered(TEA), "type [1] [tea] [0]"),
            step(TEA, TWO, "type [1] [blue tea] [0]"),
            step(BOX.replace("'old'", "'gin'"), BOX.replace("'old'", "'rum'"), "click [1]"),
            step(BOX, BOX), step(Prediction(BOX, unknown="cut off: after 9 tokens"), BOX)]
    found = fidelity.fidelity(rows, {"t": {"gin"}})
    assert found["n"] == 6 and found["exact"] == 0.5
    assert (found["determined"], found["of"]) == (0.75, 4)
    assert (found["precision"], found["recall"], found["F1"]) == (
        round(7 / 8, 4), round(7 / 12, 4), round(14 / 20, 4))
    assert found["no change"] == 0.5 and found["end"] == round(5 / 6, 4)
    assert found["unreadable"] == round(1 / 6, 4) and found["hallucinated"] == 0.0


def test_to_copy_the_page_earns_nothing_where_it_changed_and_all_where_it_did_not():
    """Guards: a share of equal lines, which a world model gets by repeating the page."""
    copied = fidelity.fidelity([step(BOX, TEA)] * 3, {})
    assert (copied["exact"], copied["precision"], copied["recall"], copied["F1"]) == (0.0, None, 0.0, 0.0)
    assert copied["no change"] is None and copied["end"] == 1.0 and copied["delta"] == 0.0
    invented = fidelity.fidelity([step(TEA, BOX)], {})
    assert (invented["precision"], invented["recall"], invented["no change"]) == (0.0, None, 0.0)
    nothing = fidelity.fidelity([], {})
    assert nothing["n"] == nothing["of"] == 0 and nothing["exact"] is None and nothing["F1"] is None


# ---- on recordings -----------------------------------------------------------------------------------------

class Answers:
    """A world model over counting pages: `rule(n, action, seed)` says which page follows page n."""

    def __init__(self, rule):
        self.rule, self.asked = rule, []

    def predict(self, pages, actions, previous, seed):
        found = []
        seeds = lm.row_seeds(seed, len(pages))
        for page, action, past, one in zip(pages, actions, previous, seeds, strict=True):
            n = int(page.partition("'Count ")[2].partition("'")[0])
            self.asked.append((n, str(action), past))
            if action.bid and a11y.find(page, action.bid) is None:
                found.append(Prediction(page, error="nobody is there"))
            else:
                found.append(self.rule(n, action, one))
        return found


def counts(n: int, over: bool = False) -> Prediction:
    return Prediction(counting_page(n), over, delta="d")


def test_an_open_loop_goes_on_from_its_own_pages_and_a_teacher_forced_one_from_the_recorded():
    """Guards: an open loop that is shown the truth, or a teacher-forced one that is not; steps of another
    trajectory. This world model skips page 1: from page 0 it goes to 2. Told the pages, it is wrong at depth
    1 alone; left alone it is one ahead at every depth, and right only in what changes nothing."""
    paths = [recorded(["click [1]", "click [1]", "click [2]"]), recorded(["click [1]"], seed=1)]
    rule = lambda n, action, _: counts(n, True) if action.bid == "2" else counts(n + 1 + (n == 0))
    told, alone = (fidelity.predicted(Answers(rule), paths, open_loop) for open_loop in (False, True))
    shape = lambda rows: [(row.depth, row.right, row.before == row.real_before) for row in rows]
    assert shape(told) == [(1, False, True), (1, False, True), (2, True, True), (3, True, True)]
    assert shape(alone) == [(1, False, True), (1, False, True), (2, False, False), (3, False, False)]
    assert [row.over for row in told] == [False, False, False, True] and told[3].answer.over
    assert [row.real for row in alone] == [counting_page(n) for n in (1, 1, 2, 2)]
    assert [row.previous for row in told] == ["", "", *["click [1] where [1] is More"] * 2]
    by = fidelity.by_task_and_depth(alone, {})
    assert list(by) == ["all", "depth 1", "depth 2", "depth 3", "task count"]
    assert [by[name]["n"] for name in by] == [4, 2, 1, 1, 4] and by["depth 3"]["end"] == 1.0


# ---- a dream, done for real --------------------------------------------------------------------------------


class Renumbered(CountingWorld):
    """The counting web with other ids: [1] is [31], [2] is [32]. On page 3 there is no Done."""

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


def dreamed(*texts, reward=0.0, begin=0, shown=None, **more) -> TokenTrajectory:
    """A dream of the counting web; `shown` are the pages that it showed where they are not the true pages."""
    pages = shown
    if pages is None:
        clicks = [sum(text == "click [1]" for text in texts[:k]) for k in range(len(texts) + 1)]
        pages = [counting_page(begin + count) for count in clicks]
    steps = [Step("", page, "", parse_action(text), ()) for page, text in zip(pages, texts)]
    answers = [None if step.action.name == "stop" else Prediction(page)
               for step, page in zip(steps, pages[1:])]
    return TokenTrajectory(start(begin), steps, final_page=pages[-1], reward=reward, terminated=True,
                           predictions=answers, **more)


def tried(reward: float = 0.0, **more) -> TokenTrajectory:
    """An agent's own try, for real."""
    return TokenTrajectory(start(), reward=reward, terminated=True, **more)


def test_an_action_finds_its_element_by_what_it_is_and_not_by_its_number():
    """Guards: a replay that clicks whatever has the dream's id now, or gives up on actions without an id."""
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


CASES = [(dreamed("click [1]", "click [2]", reward=1.0), 1.0), (dreamed("click [1]", "stop [x]"), 1.0),
         (dreamed("stop [x]", reward=1.0), 0.0), (dreamed("click [2]"), 1.0),
         (dreamed("click [1]", "click [2]", reward=1.0, begin=2), 0.0)]


def test_success_in_dreams_is_held_against_what_the_same_actions_did_and_what_the_agent_did():
    """Guards: the judge against itself, dropped dreams in the figures, tries of another start, unmatched
    actions passed over. By hand: of the five, three are judged a success (a real success, a stop, and a Done
    that the real page does not have), and two a failure (a stop, and a real success). Done for real two
    succeed; three of the agent's own tries do. So CR is 2 / 3. A sixth dream was dropped, a seventh is a text
    that is no action."""
    dreams, rewards = zip(*CASES)
    dreams = [*dreams, dreamed("click [2]", dropped="judge: cut off"),
              TokenTrajectory(start(), no_action=True)]
    own = [*map(tried, rewards), tried(1.0), tried(0.0)]
    for pages in (2, 16):
        result = fidelity.transfer(dreams, fidelity.replay(Renumbered(), dreams, pages), own)
        judged = {"precision": 1 / 3, "recall": 1 / 2, "n": 6, "successes": 2, "failures": 4}
        assert result["judge on dreams"] == {"all": judged, "task count": judged}
        assert (result["unmatched"], result["dropped"], result["failed"]) == (1, 1, 0)
        found = result["success"]["all"]
        assert (found["n"], found["dream"], found["W2R"], found["real"]) == (6, 3 / 6, 2 / 6, 3 / 6)
        assert found["CR"] == pytest.approx(2 / 3) and found["dream 95 %"] == measure.wilson(3, 6)
        assert [row[2:] for row in result["tries"][:3]] == [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    with pytest.raises(ValueError):
        fidelity.transfer(dreams, fidelity.replay(Renumbered(), dreams), own[:-1])


def test_pages_are_compared_step_by_step_as_long_as_the_dream_could_be_followed():
    """Guards: pages compared with those of another step or beyond the end; steps that code answered; a replay
    from the first page of a dream that began in the middle. The second dream is wrong at its second page. The
    third ends with its first action. The fourth stops. The last cannot click its Done on page 3."""
    wrong = dreamed("click [1]", "click [1]", "click [1]",
                    shown=[counting_page(0), counting_page(1), counting_page(1), counting_page(2)])
    dreams = [dreamed("click [1]", "click [1]"), wrong, dreamed("click [2]", "click [1]"),
              dreamed("stop [x]"), dreamed("click [1]", "click [2]", begin=2)]
    steps = [row for done in fidelity.replay(Renumbered(), dreams) for row in done.steps]
    by = fidelity.by_task_and_depth(steps, {})
    assert {name: (row["n"], row["exact"]) for name, row in by.items() if name.startswith("depth")} == {
        "depth 1": (4, 0.75), "depth 2": (2, 0.5), "depth 3": (1, 0.0)}
    assert [row.over for row in steps if row.action.bid == "2"] == [True]
    world, late = Renumbered(), dreamed("click [2]", begin=2)
    late.start = dataclasses.replace(late.start, prefix=("click [1]", "click [1]"))
    fidelity.replay(world, [late])
    assert world.starts == [late.start] and world.taken == [["click [2]"]]


def test_the_interval_of_cr_is_of_the_ratio_and_shrinks_with_the_starts():
    """Guards: an interval of the difference. Of 400 starts half succeed for real, and half of these in W2R:
    the delta method gives a standard error of sqrt((1 - .5) .5 / 200), .0354, for the ratio .5."""
    tries = [["t", n, 0.0, float(n % 4 == 0), float(n % 2 == 0)] for n in range(400)]
    found = fidelity.consistency(tries)
    low, high = found["CR 95 %"]
    assert found["CR"] == 0.5 and (high - low) / 2 / 1.96 == pytest.approx(0.0354, rel=0.1)
    wide = fidelity.consistency(tries[:40])["CR 95 %"]
    assert wide[1] - wide[0] > 2 * (high - low)
    none = fidelity.consistency([])
    assert none["n"] == 0 and none["dream"] is None and none["CR"] is None


def test_the_judge_is_audited_on_what_the_agent_really_did_and_what_really_ended(scripted):
    """Guards: a judge that is asked about other pages than those acted on; trajectories that never end in its
    figures. By hand: Done on page 1 (judged a success, and is), Done on page 2 (judged a failure, and is a
    success), stop on page 5 (a failure, and is), stop on page 1 (judged a success, and is none), one that
    never ends, and a Done without a verdict (its dream would be dropped)."""
    def write(prompt):
        if "QUESTION: completed?" in prompt and "Say nothing." in prompt:
            return "so."
        if "QUESTION: completed?" in prompt:
            return f"so.\nCOMPLETED: {'YES' if 'Count 1' in prompt else 'NO'}"
        if "Give up." in prompt or "Count 5" in prompt:
            return act("stop [x]")
        return act("click [2]" if "Count 1" in prompt or "Count 2" in prompt else "click [1]")

    models = scripted(write)
    starts = [start(1), start(2), start(5), start(1, goal="Give up."), start(7)]
    starts.append(start(1, goal="Say nothing."))
    played = measure.play(CountingWorld(), models.lm, starts, 2, 50, temperature=0.0)
    result = fidelity.judged(Judge(models.lm, 50), played)
    assert result["judge on real pages"]["all"] == {"precision": 1 / 2, "recall": 1 / 2, "n": 4,
                                                    "successes": 2, "failures": 2}
    assert (result["not ended"], result["unread"], result["failed"]) == (1, 1, 0)
    assert [(wrong["said"], wrong["actions"]) for wrong in result["wrong"]] == [
        (False, ("click [2] where [2] is Done",)), (True, ("stop [x]",))]


# ---- agents in dreams --------------------------------------------------------------------------------------

def test_a_short_dream_is_the_beginning_of_a_long_one(taught):
    """Guards: success at a length that is read off a longer dream, and is not that of a dream of this
    length."""
    model = lm.load(taught, context=512)
    models = dream.Models(model, WorldModel(model, 48, 0.5), Judge(model, 16))
    how = dream.Config(horizon=9, max_new_tokens=16, temperature=1.0)
    starts, seeds = [start(0, seed=n) for n in range(12)], list(range(12))
    of = lambda length: fidelity.lengths_of_success(dream.imagine(
        models, starts, dataclasses.replace(how, horizon=length), seeds), ["count"], range(12))["count"]
    long = of(9)
    assert {"0", "2"} <= set(long), "nothing to tell apart"
    for length in (1, 2, 3):
        for short, digit in zip(of(length), long, strict=True):
            within = digit if digit != "-" and int(digit) <= length else "0"
            assert short == within or digit == "-"


def agents(*tries: str) -> list[dict]:
    return [{"t": digits} for digits in tries]


def test_dreams_rank_agents_as_their_digits_say():
    """Guards: success in a dream that is longer than asked; pairs that reality does not separate, or the
    dream does not order, counted as reversed. By hand: the agents really succeed in 10, 30 and 28 of 40
    tries. The first is separated from each of the others; those differ in 22 tries, 12 one way and 10 the
    other. In dreams of one step the first has 2 of 4, the others 1 and 2: one of the two pairs is reversed,
    one tied. With two steps they have 2, 3 and 3."""
    real = agents("1" * 10 + "0" * 30, "0" * 10 + "1" * 30, "1" * 28 + "0" * 12)
    found = measure.ranking(real, agents("1100", "1202", "1102"))
    assert (found["agents"], found["pairs"], found["separated"]) == (3, 3, 2)
    one, two = (found["ranking"][f"length {n}"] for n in (1, 2))
    assert (one["reversed"], one["tied"], two["reversed"], two["tied"]) == (0.5, 0.5, 0.0, 0.0)
    assert one["success"] == pytest.approx(5 / 12) and two["rho"] == pytest.approx(math.sqrt(3) / 2)
    assert one["rho"] == pytest.approx(-math.sqrt(3) / 2), "ranks 2.5, 1, 2.5 beside 1, 3, 2"
    assert list(found["ranking"]) == [f"length {n}" for n in (1, 2, 3, 5, 8)]
    with pytest.raises(ValueError, match="not the same tries"):
        measure.ranking(agents("10", "100"), agents("10", "10"))
    # One whose dreams were all dropped is in no order: not the last.
    more = measure.ranking([*real, *agents("1" * 40)], agents("1100", "1202", "1102", "----"))
    assert (more["agents"], more["left out"]) == (3, 1) and more["ranking"] == found["ranking"]
    with pytest.raises(ValueError, match="1 of 2 agents have no real try that counts"):
        measure.ranking(agents("10", "--"), agents("10", "10"))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=9))
@settings(models, max_examples=200)
def test_rho_is_spearmans(pairs):
    """Guards: ties by the order in which they stand. rho is blind to any growing function of a side, changes
    its sign where one side is turned round, and without ties is 1 - 6 sum d^2 / (n (n^2 - 1))."""
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs))
    rho, n = measure.spearman(a, b), len(pairs)
    assert measure.ranks(a).sum() == n * (n + 1) / 2
    if len(set(a.tolist())) == 1 or len(set(b.tolist())) == 1:
        assert rho is None
        return
    assert -1 - 1e-9 <= rho <= 1 + 1e-9 and rho == pytest.approx(measure.spearman(b, a))
    assert rho == pytest.approx(measure.spearman(a.exp(), b**3)) == -measure.spearman(-a, b)
    assert measure.spearman(a, a) == pytest.approx(1.0)
    if len(set(a.tolist())) == len(set(b.tolist())) == n:
        d = measure.ranks(a) - measure.ranks(b)
        assert rho == pytest.approx(1 - 6 * float((d * d).sum()) / (n * (n * n - 1)))


@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), max_size=6))
@settings(models, max_examples=200)
def test_auroc_is_the_chance_that_a_pair_is_in_order(low, high):
    pairs = [1.0 if b > a else 0.5 if a == b else 0.0 for a, b in itertools.product(low, high)]
    found = measure.auroc(low, high)
    assert found == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)



# ---- all of it, in a real Chromium -------------------------------------------------------------------------

@pytest.fixture(scope="module")
def presser(tokenizer, tmp_path_factory):
    """A folder with a model that plays click-test as agent, world model and judge, by what Chromium showed
    when somebody clicked; and beside it that recording."""
    folder = tmp_path_factory.mktemp("presser")
    with Browser(timeout=30) as web:
        rows = explore.collect(web, [("click-test", 1_000_000)], 2)
    (folder / "t.jsonl").write_text("".join(map(explore.as_line, rows)))
    (t,) = data.read_for_audit(folder / "t.jsonl")
    ((step, action, after, over),) = data.transitions(t)
    assert over and t.reward == 1
    model = tiny_lm(tokenizer)
    said = [(policy.messages(t.goal, step.url, step.page, ()), f"```{action}```"),
            (world_model.messages(step.page, step.url, "", action),
             world_model.target("so.", a11y.diff(step.page, after), over)),
            (judge.messages(t.goal, *judge.ending(t)), "so.\nCOMPLETED: YES")]
    finetune.fit(model, [(model.template.prompt_ids(chat), model.template.completion_ids(text))
                         for chat, text in said], finetune.FineTune(epochs=40, lr=3e-3, tokens=1600))
    lm.save(model, folder / "model")
    return folder


def test_dreams_are_held_against_a_real_chromium(presser, tmp_path):
    """Guards: starts that a browser never showed, a replay in another world, a table that cannot be printed.
    The model knows click-test, of which all seeds have one text, so all that is asked of it is right."""
    words = ["--checkpoint", presser / "model", "--world-model", presser / "model", "--tasks", "click-test",
             "--world-model-temperature", "0", "--seeds", "1000000:3", "--trajectories", presser / "t.jsonl",
             "--json", tmp_path / "audit.json"]
    done = subprocess.run([sys.executable, "audit.py", "--replay", *map(str, words)],
                          cwd=Path(audit.__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "audit.json").read_text())
    found = result["success"]["task click-test"]
    assert [found[name] for name in ("n", "dream", "W2R", "real", "CR", "CR 95 %")] == [3, 1, 1, 1, 1, [1, 1]]
    for where in ("dreams", "real pages"):
        judged = result[f"judge on {where}"]["all"]
        assert (judged["precision"], judged["recall"], judged["n"]) == (1, 1, 3)
    steps, names = result["steps of dreams"]["depth 1"], ("n", "exact", "F1", "end", "hallucinated")
    assert [steps[name] for name in names] == [3, 1, 1, 1, 0]
    assert re.search(r"^success, all +3 +1.000 +\[", done.stdout, re.MULTILINE), done.stdout
    common = {"checkpoint": str(presser / "model"), "world_model": str(presser / "model")}
    alone = audit.run(audit.Config(**common, dream=True, tasks=("click-test",), seeds="1000001:2"))
    assert alone["dreams"] == {"click-test": "11"} and len(alone["world"]) == 12
    told = audit.run(audit.Config(**common, fidelity=str(presser / "t.jsonl"), samples=2))
    assert told["teacher-forced"] == told["open loop"] and told["open loop"]["all"]["exact"] == 1
    assert told["calibration"]["2 draws"]["AUROC"] is None and told["calibration"]["2 draws"]["tokens"] > 0
    (tmp_path / "other.json").write_text((tmp_path / "audit.json").read_text())
    files = tuple(str(tmp_path / name) for name in ("audit.json", "other.json"))
    pooled = audit.run(audit.Config(table=files))["success"]
    assert [(name, row["n"], row["CR"]) for name, row in pooled.items()] == [
        (files[0], 3, 1), (files[1], 3, 1), ("all", 6, 1)]
    with pytest.raises(ValueError, match="t.jsonl is no result of audit.py --replay --json"):
        audit.run(audit.Config(table=(str(presser / "t.jsonl"),)))


def test_agents_are_ranked_from_the_small_files_of_the_driver(tmp_path):
    """Guards: agents of other worlds or other tries in one ranking; rows without dreams in it."""
    def keep(name, tries, dreams, world="w", evaluation="1000100:4", horizon=8):
        cell = {"tries": {"t": tries}, "evaluation": evaluation,
                "in_one_world": dreams and {"world": world, "horizon": horizon, "dreams": {"t": dreams}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(cell))

    keep("a", "0001", "0001"), keep("b", "0111", "0011"), keep("c", "1111", "1111"), keep("d", "0000", {})
    config = audit.Config(rank=(tmp_path,))
    found = audit.run(config)
    assert found["agents"] == 3 and found["ranking"]["length 1"]["rho"] == pytest.approx(1.0)
    assert "ranking, length 8" in fidelity.table(found)
    for other in ({"world": "v"}, {"evaluation": "1000200:4"}, {"horizon": 5}):
        keep("c", "1111", "1111", **other)
        with pytest.raises(ValueError, match="3 agents are there, of 2 such pairs"):
            audit.run(config)
