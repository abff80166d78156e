"""Claims about tiny/lessons.py, tiny/verdicts.py, tiny/reasons.py and tiny/rename.py: what the small agent
and its world model are taught is true, and is what the settings of the laptop say.

The agent is a script (conftest.Scripted) that reads the same prompts as a model would."""
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import recorded

import a11y
import data
import evaluate
import finetune
import judge
import lm
import recipe
import sft
from data import Step, Trajectory
from tiny import cpu, lessons, reasons, rename, verdicts


@pytest.fixture(scope="module")
def pages() -> list[Trajectory]:
    """What the laptop's recipe learns from."""
    return data.read_trajectories(lessons.RECORDED)


@pytest.fixture(scope="module")
def shipped() -> list[Trajectory]:
    """What the explorer recorded on real pages whose every verdict the judge's reasons can show."""
    return data.read_trajectories("tiny/trajectories.jsonl.gz")

# ---- what is read, and what is written before the verdict --------------------------------------------------

LOGIN = ("RootWebArea 'Login'\n\tStaticText 'User'\n\t[3] textbox '' value='anna'\n\tStaticText 'Password'\n"
         "\t[4] textbox '' value='••••'\n\t[5] button 'Log in'\n\t[6] button 'Cancel'")
LOGIN_GOAL = 'Enter the user "anna" and the password "x7Q" and press Log in.'
RIGHT = ["type [3] [anna] [0]", "type [4] [x7Q] [0]", "click [5]"]
BOXES = ("RootWebArea 'Boxes'\n\t[1] checkbox 'tea', checked='{}'\n\t[2] checkbox 'milk', checked='{}'\n"
         "\t[3] checkbox 'green tea', checked='{}'\n\t[4] button 'Submit'\n\t[5] button 'Reset'")
TICKS = ["click [2]", "click [3]", "click [4]"]


def attempt(texts, reward=1, goal=LOGIN_GOAL, page=LOGIN, seed=0) -> Trajectory:
    """A trajectory of these actions (as text) that never leaves `page`."""
    steps, previous = [], ()
    for text in texts:
        action = data.parse_action(text)
        steps.append(Step("", page, "So.", action, previous))
        previous += (data.describe(action, page),)
    return Trajectory("login", seed, goal, steps, page, reward, True, False, "here:1", tuple(texts))


def verdict(goal, texts, before, after, success) -> list[str]:
    """The two lines of the judge's completion."""
    return reasons.write_verdict(goal, attempt(texts, page=before).steps, after, success).split("\n")


def test_swapped_user_and_password_are_different_and_the_order_of_typing_is_not():
    """Guards: a judge taught that the right texts in the wrong fields are a success, or that must see them
    typed in page order."""
    other_order = ["type [4] [x7Q] [0]", "type [3] [anna] [0]", "click [5]"]
    boxes = "'anna' wanted; 'x7Q' wanted; 'Log in' pressed; [3] is 'anna'; [4] is '••••'; "
    same = "asked 'anna' did 'anna' same; asked 'x7Q' did 'x7Q' same; asked 'Log in' did 'Log in' same."
    empty = boxes.replace("[4] is '••••'; ", "[4] empty.")
    for texts, page, success, said in (
            (other_order, LOGIN, True, boxes + same),
            (["type [3] [x7Q] [0]", *other_order], LOGIN, True, boxes + same),
            (["type [3] [x7Q] [0]", "type [4] [anna] [0]", "click [5]"], LOGIN, False,
             boxes + "asked 'anna' did 'x7Q' different."),
            (other_order[1:], LOGIN, False, boxes + "asked 'anna' did 'anna' same; asked 'x7Q' none."),
            (other_order[1:], LOGIN.replace(" value='••••'", ""), False, empty)):
        assert verdict(LOGIN_GOAL, texts, page, LOGIN, success) == [
            said, f"COMPLETED: {'YES' if success else 'NO'}"]


def test_what_is_missing_and_what_is_too_much_is_said():
    """Guards: a box never ticked, or one too many, that reads like success. "green tea" is not also "tea"."""
    goal = "Select milk, green tea and click Submit."

    def say(*checked, success=True):
        return verdict(goal, TICKS, BOXES.format(*["false"] * 3), BOXES.format(*checked), success)[0]

    assert say("false", "true", "true") == (
        "[2] 'milk' chosen; [3] 'green tea' chosen; 'Submit' pressed; asked 'milk' did 'milk' same; "
        "asked 'green tea' did 'green tea' same; asked 'Submit' did 'Submit' same.")
    assert say("true", "true", "true").endswith("'Submit' same; did 'tea' extra.")
    assert "asked 'milk' none; asked 'green tea' did" in say("false", "false", "true")
    assert say("true", "true", "true", success=False) == say("true", "true", "true")
    # Clicked on the way, and not chosen in the end.
    clicked = "[3] 'green tea' chosen; 'Submit' pressed; asked 'milk' none."
    assert say("false", "false", "true", success=False) == clicked
    twice = verdict(goal, [*TICKS, "click [4]"], BOXES, BOXES.format("false", "true", "true"), True)
    assert twice[0].endswith("same; did 'Submit' extra.")


@pytest.mark.parametrize("asked, chosen, pressed, success, said", [
    # Each thing counts once, and the first wrong one ends the list.
    ("aa", "a", "", True, "a a same; a none."), ("a", "abc", "", False, "a a same; b extra."),
    # What was chosen instead stands beside what was asked, once; what was pressed instead does not.
    ("ab", "c", "d", True, "a c different; b none; d extra."),
    ("ab", "bc", "", True, "a c different; b b same."),
    # Presses have an order, and choices have none. One press too many puts nothing behind it out of order.
    ("ab", "", "ba", False, "a b different."), ("abc", "ba", "c", True, "a a same; b b same; c c same."),
    ("abc", "a", "cb", False, "a a same; b c different."),
    ("aba", "", "aab", False, "a a same; b a different."),
    ("ab", "", "aab", False, "a a same; b b same; a extra.")])
def test_each_thing_counts_once_and_presses_have_an_order(asked, chosen, pressed, success, said):
    """Guards: one press that passes for two; a wrong thing that does not stand before the verdict; ONE, TWO
    pressed as TWO, ONE that reads like success."""
    said = re.sub(r"(\w) (\w) (same|different)", r"asked '\1' did '\2' \3", said)
    said = re.sub(r"\b(\w) extra", r"did '\1' extra", re.sub(r"\b(\w) none", r"asked '\1' none", said))
    assert reasons.compare(([], [*asked]), ([], [*chosen], [*pressed]), success) == said
    assert reasons.compare((["x"], ["a"]), (["y", "z"], ["a"], []), False) == "asked 'x' did 'y' different."


def test_text_boxes_are_listed_where_texts_were_asked_for_and_an_empty_one_is_wrong():
    """Guards: a box that the page filled taken for an empty one; boxes listed where nothing is to be
    typed."""
    page = ("RootWebArea 'P'\n\t[1] textbox '' value='given'\n\t[2] textbox ''\n\t[3] textbox '' value=''\n"
            "\t[4] button 'Go'")
    said = "'a' wanted; 'a' answered; [1] is 'given'; [2] empty"
    assert verdict('Type "a".', ["stop [a]"], page, page, False)[0] == said + "."
    assert verdict('Type "a".', ["stop [a]"], page, page, True)[0] == (
        said + "; [3] empty; asked 'a' none; [1] untouched; 'a' answered, unasked.")
    said = "'Go' pressed; asked 'Go' did 'Go' same; [1] untouched."
    assert verdict("Press Go.", ["click [4]"], page, page, True)[0] == said


def test_a_box_for_times_that_shares_its_id_with_its_parts_is_typed_into_and_not_pressed():
    """Guards: "'InputTime' pressed", which no goal asks for, so "extra" before a right answer."""
    page = "[3] InputTime ''\n\t[3] spinbutton 'Hours' value=0\n[4] button 'Submit'"
    texts = ["click [3]", "type [3] [9:18 PM] [0]", "click [4]"]
    assert verdict("Enter 9:18 PM and press submit.", texts, page, page, True)[0] == (
        "'9:18 PM' wanted; 'Submit' pressed; asked '9:18 PM' did '9:18 PM' same; "
        "asked 'Submit' did 'Submit' same.")
    assert reasons.place_of(page, "3") == ""


def test_a_value_of_a_table_is_what_stands_beside_its_label():
    """Guards: an answer compared with the label that the goal names."""
    table = ("RootWebArea 'T'\n\t[1] row ''\n\t\t[2] cell 'Year'\n\t\t[3] cell '1990'\n"
             "\t[4] row ''\n\t\t[5] cell 'Year of Birth'\n\t\t[6] cell '1947'")
    goal = "What is the value of Year of Birth in the table?"
    said = "'Year of Birth' '1947'; '{0}' answered; asked '1947' did '{0}' {1}."
    assert verdict(goal, ["stop [1947]"], table, table, True)[0] == said.format(1947, "same")
    assert verdict(goal, ["stop [1990]"], table, table, False)[0] == said.format(1990, "different")

# ---- goals that were made ----------------------------------------------------------------------------------

@pytest.mark.parametrize("trajectory", [
    attempt(RIGHT),
    attempt(TICKS, 1, "Select milk, green tea and click Submit.", BOXES.format("false", "true", "true"))])
def test_another_goal_asks_for_something_that_was_not_done_and_keeps_the_button(trajectory):
    """Guards: NO examples whose goal is the old goal, or that only rename the button that was pressed. Over
    200 draws: what was asked is not what was done, and what is pressed last still stands there."""
    last = data.label(trajectory.steps[-1].page, trajectory.steps[-1].action.bid)
    goals = [verdicts.other_goal(random.Random(seed), trajectory) for seed in range(200)]
    goals = [goal for goal in goals if goal]  # now and then the draw is what stood there
    assert len(goals) > 150 and len(set(goals)) > 1
    for goal in goals:
        said = reasons.write_verdict(goal, trajectory.steps, trajectory.final_page, False)
        assert goal != trajectory.goal and last in goal
        assert re.search("different|none|extra", said), goal
    assert verdicts.other_goal(random.Random(0), attempt(["click [5]"], goal="Press Log in.")) is None


TABLE = "RootWebArea 'T'\n\t[2] cell 'Year'\n\t[3] cell '1990'\n\t[5] cell 'Born'\n\t[6] cell '1947'"
ASKS_YEAR = "What is the value of Year in the table?"


def ticked(*checked, goal="Select milk and click Submit.") -> Trajectory:
    return attempt(["click [4]"], 0, goal, BOXES.format(*checked))


@pytest.mark.parametrize("failure, goal", [
    (attempt(["type [3] [bob] [0]", *RIGHT[1:]], 0),
     'Enter the user "bob" and the password "x7Q" and press Log in.'),
    (attempt(["type [3] [bob] [0]", "type [4] [y] [0]", "click [5]"], 0),
     'Enter the user "bob" and the password "y" and press Log in.'),
    (ticked("true", "false", "false"), "Select tea and click Submit."),
    (ticked("true", "true", "false"), "Select milk, tea and click Submit."),
    (attempt(["stop [1947]"], 0, ASKS_YEAR, TABLE), "What is the value of Born in the table?"),
    (attempt(RIGHT[:1] + RIGHT[2:], 0), None),  # a box was left empty
    (attempt(["click [6]"], 0), None),  # nothing that was asked for was done, and what is pressed last stays
    (attempt(["stop [1948]"], 0, ASKS_YEAR, TABLE), None),
    (attempt(["stop [Submit]"], 0, "Select milk and click Submit.", BOXES.format("true", "false", "false")),
     None),  # it presses nothing
    (ticked("true", "false", "false", goal="Select nothing and click Submit."), None)])
def test_a_failure_reached_another_goal(failure, goal):
    """Guards: a YES for something that was not done. Of two wrong things both are exchanged. The button
    stays."""
    assert verdicts.hindsight_goal(failure) == goal


def test_hindsight_on_recorded_failures_says_yes_only_where_everything_asked_is_done(shipped):
    """Guards: a goal made in hindsight that its own attempt does not meet. About a third have such a goal."""
    failed = lessons.failures(shipped, 20, 0)
    reached = {k: goal for k, failure in enumerate(failed) if (goal := verdicts.hindsight_goal(failure))}
    assert len(failed) == 240 and 40 < len(reached) < 160
    for k, goal in reached.items():
        said = reasons.write_verdict(goal, failed[k].steps, failed[k].final_page, True)
        assert goal != failed[k].goal and not re.search("' different|' none|' extra|] empty", said), said

# ---- the judge's examples ----------------------------------------------------------------------------------

def test_every_success_teaches_one_yes_and_its_wrong_copies_no_and_a_failure_a_yes_in_hindsight(scripted):
    """Guards: copies of a failure labelled YES, a success without its YES, words that are not the reward; a
    made goal without wrong versions of its own; prompts that the judge is not asked in (NOTES 5.12)."""
    agent, counts = scripted(lambda prompt: "so.\nCOMPLETED: YES"), Counter()
    decode, won = agent.lm.tokenizer.decode, attempt(RIGHT)
    shown = []
    for prompt, completion in verdicts.judge_examples(
            agent.lm, [won, attempt(RIGHT[:1] + RIGHT[2:], 0)], 2, 0, counts, early=True):
        word = decode(completion).removesuffix("<|end|>").rpartition("COMPLETED: ")[2]
        shown.append((re.search("OBJECTIVE: (.*)\n", decode(prompt))[1], word))
    assert [word for goal, word in shown if goal == LOGIN_GOAL] == ["YES", "NO", "NO"]  # early; failed
    assert all(word == "NO" for goal, word in shown if goal != LOGIN_GOAL) and 1 <= len(shown) - 3 <= 2
    assert counts == {"judge: YES": 1, "judge: NO": len(shown) - 1}
    counts.clear()
    verdicts.judge_examples(agent.lm, [attempt(["type [3] [bob] [0]", *RIGHT[1:]], 0)], 1, 0, counts)
    assert counts == {"judge: YES": 1, "judge: NO": 2}
    taught = verdicts.judge_examples(agent.lm, [won], 0, 0, Counter())
    judge.Judge(agent.lm, 100).verdicts([(won.goal, *judge.ending(won))])
    assert [decode(prompt) for prompt, _ in taught] == agent.prompts


def test_an_agent_that_stops_early_fails_and_the_reasons_show_it(shipped):
    """Guards: a judge that takes the answer for the deed (`stop [Korean]` where it had to be typed and sent);
    a success that rightly ends by stop, taught as NO. On all recorded successes."""
    rng, places = random.Random(0), Counter()
    for t in finetune.successes(shipped):
        early = verdicts.stopped_early(rng, t)
        if t.steps[-1].action.name == "stop":
            assert early is None
            continue
        k = len(early.steps) - 1
        places[k == 0] += 1
        assert early.steps[:k] == t.steps[:k] and early.goal == t.goal and not early.reward
        stop = early.steps[k]
        assert stop.action.name == "stop" and early.final_page == stop.page == t.steps[k].page
        assert not stop.error, "that of the action in whose place it stands"
        assert stop.action.text in {"", *(step.action.text for step in t.steps)}
        said = reasons.write_verdict(early.goal, early.steps, early.final_page, False)
        assert re.search("' different|' none|' extra|] empty", said), said
    assert min(places[True], places[False]) > 500
    assert verdicts.stopped_early(rng, attempt(RIGHT, 0)) is None


MAIL = ("RootWebArea 'Mail'\n\tStaticText 'Ada'\n\t[3] image ''\n\t[4] image ''\n\tStaticText 'Bo'\n"
        "\t[5] image ''\n\t[6] image ''")


def test_a_made_up_failure_teaches_nothing_where_its_reasons_find_no_fault(scripted, monkeypatch):
    """Guards: a NO behind the very words that stand before a YES: on our-form, whose texts are chosen and
    typed in any order, all wrong copies of a success were taught so. A recorded failure is taught: there the
    page said no. An agent that stops early is: of four pages nearly no such lesson was left."""
    form = replace(attempt(["type [3] [anna] [0]", "click [5]"], page=LOGIN, goal='"oak", "anna", Log in.'),
                   task="form")
    moot = verdicts.moot_kinds([form])["form"]
    assert "different" in moot
    assert reasons.faults(form.goal, form) and not reasons.faults(form.goal, form, moot)
    agent, counts = scripted(lambda prompt: ""), Counter()
    early = replace(form, reward=0)
    monkeypatch.setattr(verdicts, "stopped_early", lambda rng, t: early if t.reward else None)
    pairs = verdicts.judge_examples(agent.lm, [form, replace(form, reward=0)], 2, 0, counts, early=True)
    words = [agent.lm.tokenizer.decode(completion).removesuffix("<|end|>").rpartition(" ")[2]
             for _, completion in pairs]
    assert words == ["YES", "NO", "NO"] and counts["judge: a made-up failure without a fault"] >= 1


def test_what_the_browser_refused_was_not_done():
    """Guards: `type [6] [anna]` into a button that takes no text, taught as the name that was asked for; a
    press that was covered."""
    tried = attempt(["type [6] [anna] [0]", "click [6]", *RIGHT[1:]], 0)
    done = reasons.done_items(tried.steps, tried.final_page)
    assert done == (["x7Q", "anna"], [], ["Cancel", "Log in"])
    for step in tried.steps[:2]:
        step.error = f"{step.action}: refused"
    assert reasons.done_items(tried.steps, tried.final_page) == (["x7Q"], [], ["Log in"])
    reached = verdicts.hindsight_goal(tried)
    assert reached is None or "x7Q" in reached


def test_a_fault_that_the_successes_of_a_task_have_is_said_of_no_attempt_at_it(scripted):
    """Guards: a goal that does not name what it wants pressed, and "extra" before every yes. Elsewhere it
    stays a fault; so does what one success in three has."""
    mail = [attempt(["click [4]"], goal="Mark the mail by Ada.", page=MAIL)] * 2
    other = replace(attempt([*RIGHT[:2], "click [6]"]), task="other")  # Cancel is pressed, and nobody asked
    rare = [attempt(RIGHT), attempt(RIGHT), attempt([RIGHT[0], "click [6]", *RIGHT[1:]])]
    mail = [replace(t, task="mail") for t in mail]
    assert verdicts.moot_kinds([*mail, *rare]) == {"mail": {"extra"}, "login": set()}
    lost = [replace(t, reward=0) for t in (replace(mail[0], goal="Mark the mail by Bo."), other)]
    agent = scripted(lambda prompt: "")
    said = [agent.lm.tokenizer.decode(completion).split("\n")[0] for _, completion in
            verdicts.judge_examples(agent.lm, [*mail, *lost], 0, 0, Counter())]
    where = "'image' 2 by 'Ada' pressed"
    assert said[:2] == [f"{where}; asked by 'Ada' did by 'Ada' same."] * 2, "where it stands, and no fault"
    assert said[2] == f"{where}; asked by 'Bo' did by 'Ada' different."
    assert said[3].endswith("asked 'Log in' none."), said[3]


def test_one_lucky_success_in_two_makes_no_number_moot(scripted):
    """Guards: "different" moot where one of two demonstrations is lucky: then no number was compared, and a
    judge called 11:35 PM the same as 3:35 PM. What is lucky is no lesson; made-up goals differ in a
    number."""
    page, goal = "[4] textbox '' value='-7'\n[5] button 'Submit'", "Enter -7 and hit Submit."
    plain = attempt(["type [4] [-7] [0]", "click [5]"], goal=goal, page=page)
    lucky = attempt(["type [4] [-7 with] [0]", "click [5]"], goal=goal, page=page)
    assert verdicts.moot_kinds([plain, lucky])["login"] == set()
    assert verdicts.moot_kinds([plain, lucky, lucky])["login"] == {"different"}
    agent, counts = scripted(lambda prompt: ""), Counter()
    said = [agent.lm.tokenizer.decode(completion).split("\n") for _, completion in
            verdicts.judge_examples(agent.lm, [plain, lucky], 4, 0, counts)]
    assert counts["judge: a success with a fault"] == counts["judge: YES"] == 1
    wrong = [reasons for reasons, last in said if "NO" in last]
    assert len(wrong) == counts["judge: NO"] > 4 and all("did '-7" in reasons for reasons in wrong), wrong
    assert len({re.search("asked '(.*?)'", reasons)[1] for reasons in wrong}) > 2
    lost = attempt(["type [4] [3] [0]", "click [5]"], reward=0, goal=goal, page=page)
    assert verdicts.hindsight_goal(lost) == "Enter 3 and hit Submit."
    half = attempt(["type [4] [11:34] [0]", "click [5]"], reward=0, goal="Enter 9:37 PM, Submit.", page=page)
    assert verdicts.hindsight_goal(half) is None, "no task asks for a time without its half"


def test_a_reader_without_a_fault_can_tell_success_by_the_reasons(pages):
    """Guards: reasons that hold nothing to tell by. On 2026-11-25 a reader of them who never errs would have
    been right in .546 of what he calls a success; copy-paste, odd-or-even, our-form, phone-book,
    button-delay, form-sequence-2 and use-colorwheel had the same words before yes and no."""
    moot, told = verdicts.moot_kinds(pages), {}
    for t in pages:
        if t.terminated:
            fine = not reasons.faults(t.goal, t, moot[t.task])
            told.setdefault(t.task, Counter())[bool(t.reward), fine] += 1
    all_told = sum(told.values(), Counter())
    assert all_told[True, True] / (all_told[True, True] + all_told[False, True]) > 0.96
    assert all_told[True, True] / (all_told[True, True] + all_told[True, False]) > 0.99
    for task, of in told.items():
        assert of[False, False] > 0.6 * (of[False, False] + of[False, True]), task
        if task != "odd-or-even":  # two of its seven are all odd, or all even
            assert of[True, True] > 0.9 * (of[True, True] + of[True, False]), task


FORM = ("[1] StaticText 'Name'\n[2] textbox 'Name' value='{}'\nStaticText 'Size'\n[3] radio 'Small', "
        "checked='{}'\n[4] radio 'Large', checked='true'\n[5] checkbox 'Gift', checked='{}'\n[6] button 'Go'")


@pytest.mark.parametrize("held, said", [
    (("Zoe", "false", "true"), "Name asked 'Zoe' did 'Zoe' same; Size asked 'Large' did 'Large' same; "
                               "Gift asked 'yes' did 'yes' same; asked 'Go' did 'Go' same."),
    (("Zo", "false", "true"), "Name asked 'Zoe' did 'Zo' different."),
    (("", "false", "true"), "Name asked 'Zoe' none."),
    (("Zoe", "false", "false"), "Name asked 'Zoe' did 'Zoe' same; Size asked 'Large' did 'Large' same; "
                                "Gift asked 'yes' did 'no' different.")])
def test_a_field_of_a_form_is_compared_by_its_label(held, said):
    """Guards: "different" before every yes, where boxes stand in another order than the goal names them."""
    goal = 'Fill in: Name "Zoe", Size "Large" and Gift "yes". Press Go.'
    page = FORM.format(*held)
    done = ["type [2] [" + held[0] + "] [0]", "click [6]"]
    assert verdict(goal, done, page, page, said.endswith("'Go' same."))[0] == f"'Go' pressed; {said}"


COUNTED = "[1] textbox ''\n[2] textbox '' value='7'\n[3] textbox ''\n[4] button 'Go'"
DELAY = "[2] button 'ONE'\n[3] button 'TWO'"
WAIT = "Click button ONE, wait 2 seconds, then click button TWO."


@pytest.mark.parametrize("goal, page, actions, last", [
    ("Enter 7 into the 2nd textbox.", COUNTED, ["type [2] [7] [0]", "click [4]"],
     "asked '2nd textbox' did '2nd textbox' same."),
    ("Enter 7 into the 3rd textbox.", COUNTED, ["type [2] [7] [0]", "click [4]"],
     "asked '3rd textbox' did '2nd textbox' different."),
    (WAIT, DELAY, ["click [2]", *["hover [3]"] * 3, "click [3]"], "asked '2 seconds' did 3 between same."),
    (WAIT, DELAY, ["click [2]", *["hover [3]"] * 2, "click [3]"], "asked '2 seconds' did 2 between short."),
])
def test_boxes_and_what_was_done_while_waiting_are_counted(goal, page, actions, last):
    """Guards: a judge that is taught that any box is the right one, or any wait. That too long a wait
    passes is known; so is that "2 seconds" asks for a text 2 (of kind none: moot)."""
    right, moot = last.endswith("same."), {"extra", "none", "empty"}
    tried = attempt(actions, goal=goal, page=page)
    said = reasons.write_verdict(goal, tried.steps, page, right, moot).split("\n")[0]
    assert said.endswith(last) and bool(reasons.faults(goal, tried, moot)) != right, said


def test_what_stop_says_counts_where_an_answer_is_asked_for():
    """Guards: `stop [37]` that stands for 37 typed, behind "same", before a NO."""
    page = "[1] textbox '' value='37'\n[2] button 'Go'"
    early = attempt(["stop [37]"], goal="Enter 37, press Go.", page=page, reward=0)
    assert reasons.faults(early.goal, early)[-1] == "'37' answered, unasked"
    assert not any("did '37' same" in said for said in verdict(early.goal, ["stop [37]"], page, page, False))
    asked = attempt(["stop [37]"], goal="What is the sum? It is 37.", page="[2] link 'Go'")
    assert not reasons.faults(asked.goal, asked)


def test_on_a_mail_page_the_reasons_say_whose_mail_was_asked_for(pages):
    """Guards: a judge with nothing to tell by: it refused every success. On all recordings of three pages the
    clause is well where the page said yes; on mail pages nearly nowhere else."""
    told: Counter = Counter()
    for t in pages:
        if t.task in ("email-inbox-delete", "email-inbox-important", "phone-book"):
            for said, well in reasons.place_clauses(t.goal, t.steps):
                assert said.endswith("same" if well else ("different", "none")), said
                told[t.task[:5], bool(t.reward), well] += 1
    assert told["email", True, False] == told["phone", True, False] == 0
    assert told["email", True, True] == 120 and told["email", False, True] < 5
    assert told["phone", False, True] < told["phone", False, False] / 2
    won = [t for t in pages if t.task == "phone-book" and t.reward]
    made = [verdicts.other_goal(random.Random(seed), t) for t in won for seed in range(5)]
    assert sum(map(bool, made)) > len(made) / 4
    assert not [goal for goal in made if goal and re.search("on their [A-Z]", goal)], "as the goal writes it"
    same = [other == t.goal for t, other in zip([t for t in won for _ in range(5)], made)]
    assert not any(same), "a success taught as NO"
    quoted = attempt(["click [4]"], goal='Mark the mail by "Ada".', page=MAIL)
    assert not reasons.place_clauses(quoted.goal, quoted.steps), "what is quoted is compared as a text"


def test_a_judge_learns_from_failures_that_ended_by_themselves_and_from_no_success():
    """Guards: successes, or attempts that were cut off, taught as NO."""
    ended = [recorded(["click [1]", "click [2]"], seed, task, reward=seed % 2)
             for task in ("a", "b") for seed in range(20)]
    cut = [recorded(["click [1]"], 99, "a", reward=0)]
    failed = lessons.failures(ended + cut, 0, 5)
    assert len(failed) == 20 and all(failure.reward == 0 and failure.terminated for failure in failed)
    assert Counter(failure.task for failure in lessons.failures(ended + cut, 3, 5)) == {"a": 3, "b": 3}

# ---- grounding ---------------------------------------------------------------------------------------------

def test_grounding_names_elements_that_stand_once_and_acts_on_the_next(scripted, shipped):
    """Guards: a goal that two elements answer, an id of another, an answer that the page does not hold, an
    order that is not the goal's, a ticked box that is shown empty. On real pages; the completion is read."""
    agent = scripted(lambda prompt: "", context=1024)
    pairs = lessons.grounding_examples(agent.lm, shipped[::7], 200, seed=0)
    acts, decode = Counter(), agent.lm.tokenizer.decode
    for prompt, completion in pairs:
        user = decode(prompt).removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
        page, _, goal, previous = data.parse_prompt(user)
        _, action = data.parse_completion(decode(completion).removesuffix("<|end|>"))
        nodes = [node for node in a11y.parse(page) if node.bid and node.role != "LabelText"]
        bid_of = {label: [node.bid for node in nodes if data.label(page, node.bid) == label]
                  for label in (data.label(page, node.bid) for node in nodes)}
        if typed := re.fullmatch(r'Type "(.*)" into "(.*)"\.', goal):
            assert bid_of[typed[2]] == [action.bid] and action.text == typed[1] and not previous, goal
        else:
            names = goal.removeprefix("Click ").removesuffix(".").replace('"', "").split(", ")
            done = [re.fullmatch(r"click \[(.*?)\] where \[.*?\] is (.*)", line) for line in previous]
            assert [click[2] for click in done] == names[: len(done)], goal
            assert [bid_of[name] for name in names[: len(done) + 1]] == [
                *([click[1]] for click in done), [action.bid]], goal
            boxes = [node for node in nodes if node.bid in {click[1] for click in done}
                     and node.role in ("checkbox", "radio")]
            assert all(node.attributes["checked"] == "'true'" for node in boxes), page
            acts["ticked"] += len(boxes)
            acts["in turn"] += bool(done)
        acts[action.name] += 1
    assert len(pairs) > 120 and min(acts[kind] for kind in ("click", "type", "in turn", "ticked")) > 0, acts

# ---- renamed copies ----------------------------------------------------------------------------------------

def test_a_renamed_copy_is_the_same_attempt_with_its_own_words_exchanged(shipped):
    """Guards: a copy whose goal, actions and pages do not fit together, whose ids or roles changed, whose
    words are still its own, or whose past has other verbs ("Palosme [6]" for "type [6]") and refusals that no
    browser says. On real pages: its verdict is the old one, the words exchanged."""
    shown = finetune.demonstrations(shipped, 3, 0)
    rare = replace(shown[0], steps=[replace(step) for step in shown[0].steps])
    for k, step in enumerate(rare.steps):  # words that stand in no other attempt
        step.error = f"{step.action}: [{step.action.bid}] is veiled by a cloud"
        step.previous = tuple(part for one in rare.steps[:k] for part in one.past[-1:])
    (veiled,) = rename.renamed([rare, *shown[1:]], 1, seed=0)[:1]
    for old, new in zip(rare.steps, veiled.steps):
        assert new.error == f"{new.action}: [{old.action.bid}] is veiled by a cloud"
        assert all(line.endswith("is veiled by a cloud") for line in new.previous)
        assert [line.split()[:2] for line in new.previous] == [line.split()[:2] for line in old.previous]
    copies = rename.renamed(shown, 2, seed=0)
    assert [copy.task for copy in copies] == [t.task for t in shown] * 2
    changed = 0
    for old, new in zip(shown * 2, copies):
        assert re.sub("'.*?'", "", new.final_page) == re.sub("'.*?'", "", old.final_page)
        assert [(s.action.name, s.action.bid) for s in new.steps] == [(s.action.name, s.action.bid)
                                                                      for s in old.steps]
        own, theirs = (reasons.write_verdict(t.goal, t.steps, t.final_page, True) for t in (old, new))
        shape = "' (different|none|extra)|] empty"
        assert re.findall(shape, own) == re.findall(shape, theirs), (own, theirs)
        changed += old.goal != new.goal
    assert changed > len(copies) / 2


def test_what_has_a_meaning_is_in_a_copy_what_it_was(pages):
    """Guards: checked='about' for a ticked box, `Select room` for "Select nothing" and "the Jkq textbox" for
    the 2nd, all of which stood in the lessons: with two demonstrations nearly every word is rare."""
    kept: Counter = Counter()
    for seed in range(3):
        shown = finetune.demonstrations(pages, 2, seed)
        for old, new in zip(shown, rename.renamed(shown, 1, seed)):
            for before, after in zip([*old.steps, old.final_page], [*new.steps, new.final_page]):
                before, after = (page if isinstance(page, str) else page.page for page in (before, after))
                meant = r"(?:checked|hasPopup|orientation|url)=\S+"
                assert re.findall(meant, before) == re.findall(meant, after)
                kept.update(re.findall("checked='true'", after))
            for words in ("nothing", "1st", "2nd", "number.", "PM", "AM"):
                assert (words in old.goal.split()) == (words in new.goal.split()), (old.goal, new.goal)
                kept[words] += words in old.goal.split()
            for one, other in zip(old.steps, new.steps):
                if one.action.name in ("press", "scroll"):
                    assert (one.action, one.thought) == (other.action, other.thought)
                    kept["keys"] += 1
            if old.task.startswith("use-colorwheel"):
                [typed], [copied] = ([step.action.text for step in t.steps
                                      if step.action.text and not step.error] for t in (old, new))
                told = "#" in old.goal  # else what it is of a name is the agent's own knowledge
                assert (typed == copied) != told and f"value='{copied.upper()}'" in new.final_page
                kept[told] += 1
    assert len(kept) == 10 and min(kept.values()) > 0, kept


def test_numbers_and_times_are_exchanged_wherever_a_copy_says_them(pages):
    """Guards: an agent and a judge that see two right times in their lives; a copy whose boxes show another
    time than was typed, in whichever of their three ways; a time that the box takes no longer."""
    shown = [t for t in finetune.demonstrations(pages, 3, 0) if t.task in ("enter-time", "use-spinner")]
    copies, asked = rename.renamed(shown, 20, 0), set()
    for old, new in zip(shown * 20, copies):
        own, others = (re.findall(reasons.NUMBER, t.goal) for t in (old, new))
        assert len(own) == len(others) == 1 and own[0] != others[0] and len(own[0]) == len(others[0])
        assert old.steps[0].page == new.steps[0].page
        assert [bool(step.error) for step in old.steps] == [bool(step.error) for step in new.steps]
        number, half = others[0].split() if " " in others[0] else (others[0], "")
        typed = [step.action.text for step in new.steps if step.action.name == "type" and not step.error]
        assert any(number in text for text in typed), (new.goal, typed)
        asked.add(others[0])
        spun = [re.findall(r" value=(-?\d+), clickable", t.final_page) for t in (old, new)]
        if new.task == "use-spinner" and spun[0] == own:
            assert spun[1] == others, new.final_page
            asked.add("spun")
        if new.task == "enter-time":
            hours, minutes = map(int, number.split(":"))
            shows = f"{hours % 12 + 12 * (half == 'PM'):02d}:{minutes:02d}"
            page = new.steps[-1].page
            assert f"InputTime '' value='{shows}'" in page
            assert f"'Hours' value={hours}," in page and f"'Minutes' value={minutes}," in page
    assert len(asked) > 40 and "spun" in asked
    spun = next(t for t in copies if t.steps[-1].action.name == "click" and "valuetext='-" in t.final_page)
    assert re.findall(reasons.NUMBER, spun.goal)[0] in re.findall(r"valuetext='([^ ']*)", spun.final_page)
    tables = [t for t in pages if t.task == "read-table" and t.reward
              and any(step.action.text.isdigit() for step in t.steps)][:5]
    for old, new in zip(tables, rename.renamed(tables, 1, 0), strict=True):
        [value], [other] = ([step.action.text for step in t.steps if step.action.text.isdigit()]
                            for t in (old, new))
        assert value != other and f"cell '{other}'" in new.steps[0].page, "a value of a table, by heart"
    keys = attempt(["type [3] [Enter tea] [0]", "press [Enter]"], goal="Enter tea.")
    keys.steps[1].thought = data.write_thought(keys.goal, LOGIN, keys.steps[1].action)
    assert rename.renamed([keys], 1, 0)[0].steps[1].thought == keys.steps[1].thought, "a key is a key"
    first = attempt(["type [3] [7] [0]"], goal="Type 7.", page="[3] textbox '' value='7'\n[4] link 'x'")
    assert rename.renamed([first], 1, 0)[0].goal == "Type 7.", "what a page showed first may mean something"


def test_what_is_repeated_is_not_common(pages):
    """Guards: a world model whose demonstrations, which are repeated, are never renamed."""
    config = lessons.WorldModel(per_task=30)
    seen = [t for t in lessons.chosen(config, pages) if t.reward and t.task == "choose-list"]
    assert len(seen) == 3 * 16 and len({t.goal for t in seen}) == 2 + 2 * 16

# ---- what the two models are taught ------------------------------------------------------------------------

@pytest.fixture
def taught(scripted, monkeypatch, tmp_path, shipped):
    """The laptop's sft.clone without its training: taught(a setting=...) gives (the prompts that are learned,
    in their order; the report); with `again` (those of its second lesson; its settings)."""
    agent, learned = scripted(lambda prompt: ""), []
    monkeypatch.setattr(cpu, "load_to_train", lambda *_: agent.lm)
    monkeypatch.setattr(lm, "save", lambda _, out: Path(out).mkdir(exist_ok=True))
    monkeypatch.setattr(finetune, "fit", lambda _, pairs, how, *__, **___: learned.append((pairs, how)) or {})
    small = lessons.Policy(trajectories="tiny/trajectories.jsonl.gz", demonstrations=1, judged=1,
                           grounding=20, renamed=1, out=str(tmp_path / "sft"))

    def train_on(again=False, **changes) -> tuple[list[str], dict]:
        config = replace(small, **changes)
        report = sft.clone(config, shipped)
        pairs, how = learned[-1 if again else -2]
        return [agent.lm.tokenizer.decode(prompt) for prompt, _ in pairs], how if again else report

    return train_on


def judging(prompt: str) -> bool:
    return "QUESTION: completed?" in prompt


def test_the_agent_is_taught_its_demonstrations_their_copies_grounding_and_judging_and_a_clone_none(taught):
    """Guards: a lesson that is left out, or whose count in the report is another's; copies that are not
    judged, although they are successes; a baseline that is taught another thing than the agent beside it."""
    shown, _ = taught(judged=-1, grounding=0, renamed=0)
    prompts, report = taught()
    acting = [prompt for prompt in prompts if not judging(prompt)]
    assert acting == taught(judged=-1)[0] and len(acting) < len(prompts)
    assert (report["demonstrations"], report["judged failures"], report["grounding"]) == (12, 12, 20)
    assert report["recorded steps"] - report.get("dropped: refused or too long", 0) == 2 * len(shown)
    assert acting[: len(shown)] == shown and len(acting) == 2 * len(shown) + 20
    assert all(re.search('OBJECTIVE: (Click|Type) ', prompt) for prompt in acting[-20:])
    assert prompts == acting + [prompt for prompt in prompts if judging(prompt)]
    assert report["judge: YES"] + report["judge: NO"] == len(prompts) - len(acting)
    plain, without = taught(judge_copies=0)
    assert without["judge: YES"] == report["judge: YES"] >= 2 * 12 and without["judge: NO"] == 12
    assert report["judge: NO"] > 12 and len(plain) < len(prompts)


def test_the_second_lesson_is_acting_by_other_copies_at_a_lower_rate_with_a_share_of_the_judging(taught):
    """Guards: a second lesson of words that the first has taught, without the demonstrations, the grounding
    or any judging; at the first one's rate; a clone that learns judging in it. Two copies of each: those of
    both lessons are four, all unlike."""
    how = finetune.FineTune(epochs=1, lr=1e-3, seed=5)
    first, report = taught(renamed=2)
    second, settings = taught(again=True, renamed=2, renamed_again=2, sft=how, lr_again=1e-4,
                              judged_again=0.5)
    assert settings == replace(how, lr=1e-4) and report["second lesson"] > 0
    acting, before = ([prompt for prompt in prompts if not judging(prompt)] for prompts in (second, first))
    judged = [prompt for prompt in first if judging(prompt)]
    steps = (len(before) - 20) // 3
    assert len(acting) == len(before) and acting[:steps] == before[:steps] and acting[-20:] == before[-20:]
    copies = [prompts[steps * k : steps * (k + 1)] for prompts in (before, acting) for k in (1, 2)]
    changed = [len({copy[k] for copy in copies}) for k in range(steps)]
    assert sum(count == 4 for count in changed) > steps / 2  # the rest hold no word of their own
    # Half of the judging, and of the 36 successes (12 demonstrations, 24 copies) stopped early.
    assert len(judged) / 2 < len(second) - len(acting) <= (len(judged) + 36) / 2
    stopped = [sum(judging(prompt) and bool(re.search(r"\d: stop \[", prompt)) and "ask-table" not in prompt
                   for prompt in prompts) for prompts in (first, second)]
    assert stopped[1] > stopped[0] + 8
    longer = taught(again=True, renamed=2, renamed_again=5, judged=-1)[0]
    assert len(longer) == steps * 6 + 20 and not any(map(judging, longer))
    assert lessons.Policy().lr_again < lessons.SFT.lr


def world(seed: int, **changes) -> lessons.WorldModel:
    return lessons.WorldModel(per_task=6, demonstrations_seed=seed, **changes)


ATTEMPTS = [recorded(["click [1]", "click [2]"], seed=n, reward=n % 2, goal=f"Goal {n}.") for n in range(20)]


@pytest.mark.parametrize("seed", [0, 1])
def test_of_the_successes_only_the_agents_own_demonstrations_are_learned_from(seed):
    """Guards: real successes that slip into the dreams, so that cloning them is a stronger baseline than what
    was reported. Without demonstrations the first of each task are learned from, whatever they reached."""
    seen = lessons.chosen(world(seed, demonstrations=2), ATTEMPTS)
    shown = {t.seed for t in finetune.demonstrations(ATTEMPTS, 2, seed)}
    assert {t.seed for t in seen if t.reward} == shown
    assert len({t.seed for t in seen if not t.reward}) == 6
    both = [replace(t, task=task) for t in ATTEMPTS for task in ("a", "b")]
    seen = lessons.chosen(world(seed, demonstrations=0, renamed=0), both)
    assert seen == both[:12] and lessons.first_of_each_task(both, 0) == both


def test_few_demonstrations_are_repeated_until_a_task_has_sixteen_and_many_are_not():
    """Guards: what a success does to a page drowned among hundreds of failures; copies of some only."""
    for count, times in ((2, 8), (10, 1)):
        seen = lessons.chosen(world(0, demonstrations=count, renamed=0), ATTEMPTS)
        assert list(Counter(t.seed for t in seen if t.reward).values()) == [times] * count
    seeds = [t.seed for t in lessons.chosen(world(0, demonstrations=2, renamed=2), ATTEMPTS)]
    assert len(seeds) == 3 * (6 + 2 * 8) and seeds == seeds[:22] * 3

# ---- the settings ------------------------------------------------------------------------------------------

def test_the_laptops_stages_fit_together():
    """Guards: a dreamer whose experts are not the demonstrations that its SFT agent was cloned from (NOTES
    3.4), stages that look for each other's folders in vain, dev seeds that are somebody else's, and an
    evaluation shorter than training's own looks."""
    agent, world_model, dreamer = lessons.Policy(), lessons.WorldModel(), lessons.TRAIN
    assert (dreamer.policy, dreamer.world_model) == (agent.out, world_model.out)
    assert finetune.drawn(dreamer) == finetune.drawn(agent) == finetune.drawn(world_model)
    assert dreamer.seed == agent.seed == world_model.sft.seed
    assert dreamer.trajectories == agent.trajectories == world_model.transitions == lessons.RECORDED
    assert dreamer.context == agent.context == world_model.context and agent.base == world_model.base
    for config in (dreamer, recipe.Train()):
        assert set(data.parse_seeds(config.evaluate_seeds)) <= set(data.SEEDS["dev"])
        assert config.minibatches >= 2
    assert set(data.parse_seeds(evaluate.Config().seeds)) <= set(data.SEEDS["dev"])  # eval is used once
    assert evaluate.prepared(evaluate.Config(checkpoint="x"))[0].horizon == dreamer.evaluate_horizon
