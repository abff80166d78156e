"""Claims about dream.py: the dreamed web keeps the real web's protocol, and what is learned from is what it
should be.

World model, judge and agent are scripts (conftest.Scripted): one function that answers by what kind of prompt
it reads."""
import dataclasses
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import (
    GOAL,
    CountingWorld,
    act,
    check_judge,
    check_protocol,
    check_world_model,
    counting_page,
    recorded,
    start,
)
from helpers.dreams import CONFIG, count, counted, kind, script, spoiled_at, turn, who

import a11y
import dream
import lm
import measure
import policy
import recipe
from data import Start, parse_action
from judge import Judge, Verdict
from policy import TokenTrajectory
from world_model import Prediction, WorldModel
from worlds import miniwob

PRESSED_MORE = "click [1] where [1] is More"

logged = measure.of_batch


def dreamt(models, seed=0):
    parts = who(models.lm)
    return dream.Dream(parts.world_model, parts.judge, seed)


def dreams(models, rows, config, seeds):
    return dream.trajectories(who(models.lm), rows, config, seeds)


def do(world, *texts):
    return world.step([text and parse_action(text) for text in texts])


def asked(models, wanted):
    return [prompt for prompt in models.prompts if kind(prompt) == wanted]


# ---- the protocol ------------------------------------------------------------------------------------------

def test_the_counting_web_keeps_the_protocol():
    """The stand-in for a browser that the other tests roll out in is held to the same promises."""
    check_protocol(CountingWorld(), [start(0), start(5), start(7)], "click [1]")


def test_a_dream_keeps_the_protocol(scripted):
    """Guards: a dream that answers an unknown id, an idling page or an end otherwise than the browser
    does."""
    check_protocol(dreamt(scripted(script())), [start(0), start(5), start(7)], "click [1]")


def test_models_with_weights_keep_what_a_dream_asks_of_them(taught):
    """Guards: what holds of scripts and of no model."""
    parts = who(replace(lm.load(taught, context=512), compute=torch.float32))
    pages, actions = [counting_page(n) for n in (0, 1, 9)], [parse_action(f"click [{k}]") for k in (1, 2, 1)]
    check_world_model(parts.world_model, pages, actions)
    case = lambda n: (GOAL, (*[PRESSED_MORE] * n, "click [2] where [2] is Done"), *[counting_page(n)] * 2)
    check_judge(parts.judge, case(1), case(2))


# ---- a dreamed step ----------------------------------------------------------------------------------------

def test_the_delta_is_applied_and_the_next_prediction_starts_from_the_result(scripted):
    """Guards NOTES 5.4: pages that never change; a second step dreamed from the first page, or without the
    action before it."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([start(3, previous=("go_back",))])
    assert [do(world, "click [1]")[0][0].page for _ in range(2)] == [counting_page(4), counting_page(5)]
    first, second = asked(models, "world")
    assert counting_page(3) in first and "\nPREVIOUS ACTION: go_back\nACTION: click [1]" in first
    assert counting_page(4) in second and counting_page(3) not in second
    assert f"\nPREVIOUS ACTION: {PRESSED_MORE}\n" in second


def test_the_world_model_never_reads_the_goal(scripted):
    """Guards: a model that dreams the goal into the page."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([start(0, goal="Find the zebra.")])
    do(world, "click [1]")
    do(world, "stop [zeb]")
    assert "zebra" not in asked(models, "world")[0] and "zebra" in asked(models, "judge")[0]


def test_only_live_pages_are_predicted_and_each_answer_goes_to_its_page(scripted):
    """Guards: answers shifted by a page that idles, stops, goes back or names an unknown id; work done for
    those."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([start(n) for n in (10, 20, 30, 40, 50)])
    seen, rewards, terminated, truncated = do(world, None, "stop [x]", "click [9]", "click [1]", "click [2]")
    assert [obs.page for obs in seen] == [counting_page(n) for n in (10, 20, 30, 41, 50)]
    assert terminated == [False, True, False, False, True] and truncated == [False] * 5
    assert rewards == [0, 1, 0, 0, 1]
    assert [count(prompt) for prompt in asked(models, "world")] == [40, 50]


def test_going_back_is_answered_by_code_and_exactly(scripted):
    """Guards: a world model asked to remember pages that it cannot see; a history that also holds pages of
    the same address (to hover renames the page here)."""
    renames = "It says so.\nname /0 'Count 1000'\nover: no"
    world = lambda prompt: renames if "\nACTION: hover" in prompt else counted(prompt)
    models = scripted(script(world))
    world = dreamt(models)
    world.reset([start(0)])
    for text in ("click [1]", "hover [1]", "click [1]"):
        page = do(world, text)[0][0].page
    assert page == counting_page(1001)
    renamed = counting_page(1).replace("'Count 1'", "'Count 1000'")
    assert [do(world, "go_back")[0][0].page for _ in range(2)] == [renamed, counting_page(0)]
    (obs,), *ended = do(world, "go_back")
    assert obs.page == counting_page(0) and obs.error == "go_back: there is only this page"
    assert ended == [[0.0], [False], [False]]
    assert len(asked(models, "world")) == 3


def test_all_three_models_read_what_the_dreamed_page_refused(scripted):
    """Guards: a dream that is refused without a word, where recordings tell it: an agent that tries it again,
    and a judge that takes it for done."""
    refuses = "It is not there.\nrefused: [1] is not visible\nno change\nover: no"
    says = lambda prompt: refuses if "\nACTION: hover" in prompt else counted(prompt)
    models = scripted(script(says, agent=lambda prompt: act(
        ("hover [1]", "click [1]", "click [2]")[turn(prompt)])))
    (played,) = dreams(models, [(start(3), None)], replace(CONFIG, horizon=3), [0])
    told = "hover [1] where [1] is More but [1] is not visible"
    assert played.steps[0].error == "hover [1]: [1] is not visible" and played.reward == 1
    assert [step.page for step in played.steps] == [counting_page(3)] * 2 + [counting_page(4)]
    for kind_, texts in (("policy", asked(models, "policy")[1:]), ("world", asked(models, "world")[1:2]),
                         ("judge", asked(models, "judge"))):
        assert texts and all(told in text for text in texts), kind_


def test_going_back_behind_a_start_with_a_past_drops_the_dream(scripted):
    """Guards: "there is only this page", where there was one: an agent that learns never to go back, beside
    an expert that goes back and is paid for it."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([replace(start(3), previous=("click [1]",)), start(3)])
    seen, rewards, terminated, truncated = do(world, "go_back", "go_back")
    assert [obs.page for obs in seen] == [counting_page(3)] * 2 and truncated == [True, False]
    assert rewards == [0, 0] and terminated == [False, False]
    assert world.failures[0].startswith("world model: not recorded: ") and not world.failures[1]
    assert not asked(models, "world") and not asked(models, "judge")


def test_what_the_world_model_spoils_ends_the_dream_unjudged_and_dropped(scripted):
    """Guards: an agent punished (reward 0, learned from) for the world model's error; a judge on a broken
    dream."""
    models = scripted(script(world=spoiled_at(7)))
    world = dreamt(models)
    world.reset([start(7), start(0)])
    seen, rewards, terminated, truncated = do(world, "click [1]", "click [1]")
    assert (rewards, terminated, truncated) == ([0, 0], [False, False], [True, False])
    assert seen[0].page == counting_page(7)
    spoiled, good = world.tabs
    assert "not a sentence" in spoiled.dropped and not good.dropped
    assert spoiled.verdict is None and not asked(models, "judge")
    with pytest.raises(AssertionError, match="after the end"):
        do(world, "click [1]", None)


def one_dream(models, agent, dreamer, judge_model, where):
    """A dream of one step, in which each model has its own context."""
    parts = dream.Models(agent, WorldModel(dreamer, 60, 0.5), Judge(judge_model, CONFIG.judge_tokens))
    return dream.trajectories(parts, [(where, None)], dataclasses.replace(CONFIG, horizon=1), [0])[0]


def unreadable(scripted) -> dict[str, TokenTrajectory]:
    """A dream for each way in which nobody could read or imagine it, by its cause; and two of the agent's
    own: `rambling` and `fine`. On pages from 5 up the agent presses [1], and the world model spoils pages 7
    and 8."""
    def agent(prompt):
        return None if count(prompt) == 2 else act("click [1]" if count(prompt) >= 5 else "stop [x]")

    world = lambda prompt: {7: None, 8: "nonsense"}[count(prompt)]
    judged = lambda prompt: {0: None, 1: "I cannot tell."}.get(count(prompt), "so.\nCOMPLETED: YES")
    models = scripted(script(world, judged, agent))
    wide, narrow = models.lm, dataclasses.replace(models.lm, context=900)
    links = "\n".join(f"\t[{k}] link 'x'" for k in range(10, 200))  # over 900 tokens
    long = lambda n: dataclasses.replace(start(n), page=f"{counting_page(n)}\n{links}")
    made = lambda *who_and_where: one_dream(models, *who_and_where)
    return {"policy: too long": made(narrow, wide, wide, long(5)),
            "world model: too long": made(wide, narrow, wide, long(5)),
            "judge: too long": made(wide, wide, narrow, long(3)),
            "world model: cut off": made(wide, wide, wide, start(7)),
            "world model: unreadable": made(wide, wide, wide, start(8)),
            "judge: cut off": made(wide, wide, wide, start(0)),
            "judge: unreadable": made(wide, wide, wide, start(1)),
            "rambling": made(wide, wide, wide, start(2)), "fine": made(wide, wide, wide, start(3))}


def test_what_nobody_could_read_or_imagine_drops_the_dream_and_is_counted_by_cause(scripted):
    """Guards NOTES 3.7 and 5.14: a page that does not fit somebody's context, a prediction that was cut off,
    or a verdict that could not be read, learned from as the agent's failure. The agent's own cut-off answer
    is its failure."""
    made = unreadable(scripted)
    rows, causes = list(made.values()), list(made)[:7]
    for cause in causes:
        assert made[cause].dropped.startswith(f"{cause}: ") and made[cause].reward == 0
        assert f" | DROPPED: {made[cause].dropped}" in measure.as_text(made[cause])
    assert made["rambling"].no_action and made["rambling"].reward == 0 and not made["rambling"].dropped
    assert made["fine"].reward == 1 and not made["fine"].dropped
    assert dream.keep(rows, [0] * 9) == [7, 8]
    metrics = logged(dream.Batch(rows, rows[:2], [], [("count", True)]))
    assert metrics["drops"] == {cause: 1 for cause in causes}
    assert (metrics["dreams"], metrics["dropped_dreams"], metrics["parse_failures"]) == (9, 7, 1)
    assert (metrics["judged"], metrics["judge_malformed"], metrics["dream_success"]) == (4, 3, 0.5)
    assert "judge: I cannot tell. -> no verdict\n" in measure.as_text(made["judge: unreadable"])


# ---- the reward --------------------------------------------------------------------------------------------

def test_the_judge_is_asked_at_an_end_only_and_its_verdict_is_the_reward(scripted):
    """Guards: a judge called at every step (a reward before the end), or at truncation."""
    judged = lambda prompt: f"so.\nCOMPLETED: {'YES' if 'Count 1' in prompt else 'NO'}"
    models = scripted(script(judge=judged))
    world = dreamt(models)
    world.reset([start(0), start(20)])
    assert do(world, "click [1]", "click [1]")[1] == [0.0, 0.0] and not asked(models, "judge")
    assert do(world, "stop [x]", "click [2]")[1] == [1.0, 0.0] and len(asked(models, "judge")) == 2
    assert world.tabs[0].verdict.success and not world.tabs[1].verdict.success


def test_the_judge_reads_the_page_before_the_last_action_and_the_whole_past(scripted):
    """Guards: before and after swapped or the same; a past that begins at the dream and not where the start's
    past begins. The dream ends by itself on the way from page 4 to page 5."""
    def world_ends(prompt):
        return counted(prompt).replace("over: no", "over: yes") if count(prompt) == 4 else counted(prompt)

    models = scripted(script(world=world_ends))
    world = dreamt(models)
    world.reset([start(3, previous=("go_back",))])
    do(world, "click [1]")
    do(world, "click [1]")
    (prompt,) = asked(models, "judge")
    assert (f"OBSERVATION:\n{counting_page(5)}\nBEFORE:\n{counting_page(4)}\nOBJECTIVE: {GOAL}\n"
            f"PREVIOUS ACTIONS:\n1: None\n2: go_back\n3: {PRESSED_MORE}\n4: {PRESSED_MORE}\n") in prompt


# ---- random numbers ----------------------------------------------------------------------------------------

def test_no_two_calls_of_the_world_model_share_their_random_numbers(scripted):
    """Guards: the same noise at every step, and a second try that draws what failed. The world model answers
    page 0 at once and page 1 never: three calls a dream."""
    def drawn(*seeds, rows=2):
        models = scripted(script(world=spoiled_at(1)))
        for seed in seeds:
            world = dreamt(models, seed=seed)
            world.reset([start(0)] * rows)
            do(world, *["click [1]"] * rows)
            do(world, *["click [1]"] * rows)
        assert models.calls == [rows] * 3 * len(seeds)
        return models.seeds

    assert len(drawn(0, 1)) == len(set(drawn(0, 1))) == 2 * 2 * 3
    assert len(set(drawn([0, 1], [2, 3]))) == 2 * 2 * 3
    assert drawn(0, 1) == drawn(0, 1) and drawn([5, 6]) != drawn([5, 7])
    together, apart = drawn([5, 6]), drawn([5], [6], rows=1)
    assert sorted(together) == sorted(apart), "a dream's draws are its own, whoever is dreamed beside it"


def test_agent_and_world_model_never_draw_from_the_same_seed(scripted):
    """Guards: the noise that chose the action choosing the page too. Both are made of the row's one seed."""
    models, seeds = scripted(script()), [5, 6, 7]
    dreams(models, [(start(n), None) for n in range(3)], CONFIG, seeds)
    assert len(models.seeds) == len(set(models.seeds)) == 3 * 5 * 2


def test_what_is_dreamed_and_mixed_in_does_not_depend_on_who_shares_the_work(scripted):
    """Guards: a run that is another run on another number of ranks."""
    config, seeds = dataclasses.replace(CONFIG, expert_fraction=0.5), list(range(100, 108))
    rows = [(start(0), expert(0))] * 4 + [(start(3), expert(3))] * 4
    models = scripted(script())

    def share(rank, ranks):
        made = dreams(models, rows[rank::ranks], config, seeds[rank::ranks])
        return [(t.start, t.expert, t.reward, t.pairs) for t in made]

    whole, drawn = share(0, 1), list(models.seeds)
    assert {is_expert for _, is_expert, _, _ in whole} == {True, False}, "or it shows little"
    models.seeds.clear()
    for rank in range(3):
        assert share(rank, 3) == whole[rank::3]
    assert sorted(models.seeds) == sorted(drawn)


# ---- experts -----------------------------------------------------------------------------------------------

def expert(n: int = 0, task: str = "count", length: int = 2) -> dream.Expert:
    """The expert who starts at page n and presses Done after length - 1 times More."""
    steps = recorded(["click [1]"] * (n + length - 1) + ["click [2]"], task=task).steps[n:]
    where = start(n, task, previous=steps[0].previous)
    return dream.Expert(where, tuple(steps), counting_page(n + length - 1))


def test_each_row_is_replaced_with_the_given_probability_on_its_own(scripted):
    """Guards: one random row a group (the authors' code) where the paper says a probability a row; whole
    groups at once. 2,000 rows at .3 are within 5 standard errors (.051); 250 groups of 8 have numbers of
    experts as spread as a binomial's (variance 8 * .3 * .7). At 0 and 1 it is exact."""
    model, shown = scripted(None).lm, dataclasses.replace(expert(), steps=())
    made = [dream.expert_row(model, start(0), shown, 0.3, lm.mix(1, k)) for k in range(2000)]
    replaced = [float(row is not None) for row in made]
    assert abs(sum(replaced) / 2000 - 0.3) < 0.051
    sizes = [sum(replaced[k : k + 8]) for k in range(0, 2000, 8)]
    mean = sum(sizes) / 250
    variance = sum((size - mean) ** 2 for size in sizes) / 249
    assert variance == pytest.approx(8 * 0.3 * 0.7, rel=0.35)
    for fraction in (0.0, 1.0):
        rows = [dream.expert_row(model, start(0), expert(), fraction, seed) for seed in range(50)]
        assert [row is not None for row in rows] == [fraction == 1.0] * 50


def test_an_expert_stands_for_rows_of_its_own_start_only(scripted):
    """Guards NOTES 5.3: an expert of another task or page in a group; rows without an expert replaced."""
    model = scripted(None).lm
    assert dream.expert_row(model, start(1), None, 1.0, 1) is None
    row = dream.expert_row(model, start(0, "other"), expert(0, "other"), 1.0, 2)
    assert (row.expert, row.start.task, row.start.page) == (True, "other", counting_page(0))
    for wrong in (expert(1), expert(0, "other")):
        with pytest.raises(AssertionError, match="another start"):
            dream.expert_row(model, start(0), wrong, 1.0, 0)


def test_an_experts_tokens_are_those_it_was_cloned_from_and_it_has_reward_1(scripted):
    """Guards NOTES 5.12 for experts: scored in another context than the SFT taught; log-probs invented for
    them."""
    model, shown = scripted(None).lm, expert(1)
    row = dream.expert_row(model, shown.start, shown, 1.0, 0)
    assert row.pairs == [policy.step_pair(model, shown.start.goal, step) for step in shown.steps]
    assert row.logps == [[], []]
    assert row.expert and row.terminated and row.reward == 1.0 and row.final_page == counting_page(2)
    assert not row.truncated and not row.no_action and not row.dropped
    assert shown.steps[0].previous == (PRESSED_MORE,)  # the start's past is in the prompt


def test_an_expert_that_does_not_fit_the_context_is_dropped_and_never_learned_from(scripted):
    """Guards: a microbatch that no GPU holds, where a page has more tokens a byte than recipe.fitting guesses
    (Chinese has)."""
    model, shown = scripted(None).lm, expert(1)
    longest = max(len(prompt) + len(completion) for prompt, completion in
                  dream.expert_row(model, shown.start, shown, 1.0, 0).pairs)
    model.context = longest
    assert not dream.expert_row(model, shown.start, shown, 1.0, 0).dropped
    model.context = longest - 1
    row = dream.expert_row(model, shown.start, shown, 1.0, 0)
    assert row.dropped == f"policy: too long: an expert's step of {longest} tokens"
    other = replace(row, dropped="", reward=0.0)
    assert dream.keep([row, other], [0, 0]) == [] and dream.keep([replace(row, dropped=""), other], [0, 0])


def test_a_step_of_an_expert_that_the_browser_refused_is_learned_from_no_more_than_it_is_cloned(
        scripted, monkeypatch):
    """Guards: a click that the browser refused, with reward 1, which the SFT agent was never taught. It stays
    in the past that the next step was written with. A window of nothing else is none."""
    model, shown = scripted(None).lm, recorded(["click [1]", "click [1]", "click [2]"])
    shown.steps[1].error, shown.system = "covered", "S"  # NNetNav's data have a system message of their own
    systems, messages = [], policy.messages
    monkeypatch.setattr(policy, "messages", lambda *given: systems.append(given[-1]) or messages(*given))
    windows = recipe.experts([shown], 3, seed=0) + recipe.experts([shown], 3, seed=1)
    assert {len(window.steps) for window in windows} == {1, 2, 3}
    cloned = policy.examples(model, [shown], Counter())
    for window in windows:
        row = dream.expert_row(model, window.start, window, 1.0, 0)
        refused = len(window.steps) > 1
        assert row.pairs == cloned[len(cloned) - (len(window.steps) - refused):]
        assert len(row.steps) == len(window.steps) and len(row.logps) == len(row.pairs)
        assert row.steps[-1].previous[-2:] == (PRESSED_MORE, PRESSED_MORE)
    assert set(systems) == {"S"} == {recipe.first_page(shown).system}
    shown.steps[2].error = "covered"
    assert {len(window.steps) for seed in range(9) for window in recipe.experts([shown], 3, seed)} == {3}


def test_agents_are_sampled_at_the_temperature_at_which_they_are_scored(scripted, monkeypatch):
    """Guards: old log-probs of another distribution than the one that was sampled."""
    models, temperatures = scripted(script(agent=lambda _: act("click [1]"))), []
    sample = lm.sample
    monkeypatch.setattr(lm, "sample", lambda *given: temperatures.append(given[3]) or sample(*given))
    how = dataclasses.replace(CONFIG, temperature=0.6)
    dream.imagine(who(models.lm), [start(0)], how, [0])
    assert temperatures.count(0.6) == how.horizon  # else the world model's, and the judge's 0
    temperatures.clear()
    dream.act_for_real(CountingWorld(), models.lm, [start(0)], how, [0])
    assert temperatures == [0.6] * how.horizon


# ---- what becomes of a dream -------------------------------------------------------------------------------

def test_a_dream_holds_what_the_world_model_answered_to_each_action(scripted):
    """Guards: answers of another dream or step; an answer that code gave passed off as the world model's."""
    texts = ["click [1]", "click [9]", "go_back", "stop [x]"]
    models = scripted(script(agent=lambda prompt: act(texts[turn(prompt)])))
    rows = [(start(3), None), (start(6), expert(6)), (start(6), None)]
    first, shown, second = dreams(models, rows, dataclasses.replace(CONFIG, expert_fraction=1.0), range(3))
    for n, trajectory in ((3, first), (6, second)):
        assert [str(step.action) for step in trajectory.steps] == texts
        moved, refused, back, stopped = trajectory.predictions
        assert moved.reason == "It counts." and moved.page == counting_page(n + 1)
        before, after = trajectory.steps[0].page, trajectory.steps[1].page
        assert a11y.apply(before, moved.delta) == after == moved.page
        assert refused == Prediction(after, error="click [9]: there is no [9] on the page")
        assert back is None and stopped is None, "code answered these"
    assert shown.expert and shown.predictions == []


def test_dropped_and_verdict_are_those_of_the_dream_itself(scripted):
    """Guards: a verdict or a reason to drop that moves to the next row when an expert stands before it."""
    def judged(prompt):
        return f"page {count(prompt)}.\nCOMPLETED: YES"

    agent = lambda prompt: act("click [1]") if count(prompt) == 7 else act("click [2]")
    models = scripted(script(world=spoiled_at(7), judge=judged, agent=agent))
    shown = (start(0), expert(0))
    rows = [shown, (start(3), None), (start(7), None), shown, (start(4), None)]
    made = dreams(models, rows, dataclasses.replace(CONFIG, expert_fraction=1.0), range(5))
    assert [t.expert for t in made] == [True, False, False, True, False]
    assert [bool(t.dropped) for t in made] == [False, False, True, False, False]
    assert [t.verdict and t.verdict.text for t in made] == [None, "page 3.", None, None, "page 4."]


# ---- groups ------------------------------------------------------------------------------------------------

def batch(models, starts, config, seed=(0, 0)):
    return dream.batch(who(models.lm), starts, config, seed)


def own(n: int = 0, task: str = "count", reward: float = 0.0) -> TokenTrajectory:
    return TokenTrajectory(start(n, task), pairs=[([5], [6])], logps=[[-1.0]], reward=reward,
                           terminated=True)


def mixed_batch(scripted):
    """Five groups of four. a: two successes, two failures. b: three dreams are spoiled, a single success is
    left. c: two are spoiled; a success and a failure are left. d: presses More until the steps run out; where
    the expert (start 30) stands, the reward is 1. e: no action (reward 0), and a judge that comes to no
    verdict."""
    stop, done, more = act("stop [x]"), act("click [2]"), act("click [1]")
    says = {0: [done, stop, done, stop], 7: [done, more, more, more], 17: [more, done, stop, more],
            40: ["no action", done, "no action", done]}

    def agent(prompt):
        return says[count(prompt)].pop(0) if count(prompt) in says else more

    def world(prompt):
        spoiled = "\nACTION: click [1]" in prompt and count(prompt) in (7, 17)
        return "nonsense" if spoiled else counted(prompt)

    def judged(prompt):
        if "'Count 40'" in prompt:
            return "I cannot tell."
        return f"so.\nCOMPLETED: {'NO' if 'stop [x]' in prompt else 'YES'}"

    starts = [(start(0, "a"), None), (start(7, "b"), None), (start(17, "c"), None),
              (start(30, "d"), expert(30, "d")), (start(40, "e"), None)]
    config = dataclasses.replace(CONFIG, tasks=5, horizon=2, expert_fraction=0.5)
    return batch(scripted(script(world, judged, agent)), starts, config, seed=(11, 5))


def test_a_batchs_kept_rows_groups_and_metrics_agree(scripted):
    """Guards: a dropped dream that is learned from, or counted in its group's mean; `groups` of other rows
    than `kept`; a group of equal rewards kept; experts (always a success) or spoiled dreams in what the agent
    is said to have done. Counted by hand: 20 rows, 7 dropped, and x experts among the four rows of d."""
    made = mixed_batch(scripted)
    rows, metrics = made.trajectories, logged(made)
    assert "".join(t.start.task for t in rows) == "aaaabbbbccccddddeeee"
    assert [t.reward for t in rows[:12]] == [1, 0, 1, 0] + [1, 0, 0, 0] + [0, 1, 0, 0]
    assert [k for k, t in enumerate(rows) if t.dropped] == [5, 6, 7, 8, 11, 17, 19]
    experts = [t.expert for t in rows[12:16]]
    x = sum(t.expert for t in rows)
    assert 0 < sum(experts) == x < 4, "without both, group d shows little: take another seed"
    assert [t.reward for t in rows[12:16]] == experts
    kept = [k for k, t in enumerate(rows) if any(t is other for other in made.kept)]
    assert kept == [0, 1, 2, 3, 9, 10, 12, 13, 14, 15] and len(made.kept) == len(kept)
    assert made.groups == [0] * 4 + [2] * 2 + [3] * 4
    n = 20 - 7 - x  # own dreams
    written = [len(completion) for t in rows if not t.expert and not t.dropped for _, completion in t.pairs]
    assert metrics == {
        "groups": [("a", True), ("b", False), ("c", True), ("d", True), ("e", False)], "kept": 10,
        "dropped_groups": pytest.approx(2 / 5), "dropped_dreams": 7, "experts": x, "dreams": 20 - x,
        "drops": {"judge: unreadable": 2, "world model: unreadable": 5},
        "dream_success": round((2 + 1 + 1) / n, 4),  # of a, b and c
        "truncated": round((4 - x) / n, 4),  # the rest of d
        "steps": round((4 + 1 + 2 + 2 * (4 - x) + 2) / n, 4), "judged": 4 + 1 + 2 + 2,  # of a, b, c and e
        "parse_failures": 2, "judge_malformed": 2,  # of e
        "response_tokens": round(sum(written) / len(written), 4), "real_trajectories": 0, "real_steps": 0,
        "entropy": 1.0,  # a script gives each token a log-prob of -1
            "goals": sorted({measure.goal_number(t.start.goal) for t in rows})}


# ---- groups on real pages ----------------------------------------------------------------------------------

def on_pages(models, rows, config, web, real, seed=(0, 0)):
    return dream.batch(who(models.lm), rows, config, seed, web, real)


def test_a_group_on_real_pages_is_paid_by_the_page_and_nobody_imagines_or_judges_it(scripted):
    """Guards: real rows that are dreamed, judged, or paid by the judge, who here says no to everything; a
    dreamed group that the browser is asked about. Page 5 of the web pays, and its [2]."""
    agent = lambda prompt: act("click [2]" if count(prompt) == 30 else "click [1]")
    models = scripted(script(judge=lambda prompt: "so.\nCOMPLETED: NO", agent=agent))
    web = CountingWorld(end=5)
    config = dataclasses.replace(CONFIG, tasks=4, group=2, horizon=3)
    starts = [start(n) for n in (2, 0, 30, 30)]
    made = on_pages(models, [(where, None) for where in starts], config, web, [True, True, True, False])
    assert [t.reward for t in made.trajectories] == [1.0] * 2 + [0.0] * 2 + [1.0] * 2 + [0.0] * 2
    assert [t.real for t in made.trajectories] == [True] * 6 + [False] * 2
    assert [t.verdict is None for t in made.trajectories] == [True] * 6 + [False] * 2
    assert [s.url for s in web.starts] == [s.url for s in starts[:3] for _ in range(2)]
    assert {count(prompt) for prompt in asked(models, "world") + asked(models, "judge")} == {30}
    assert logged(made)["real_train_success"] == round(4 / 6, 4) and logged(made)["dream_success"] == 0.0
    assert (logged(made)["dreams"], logged(made)["real_trajectories"]) == (2, 6)


def test_a_real_group_has_the_starts_the_experts_and_the_seeds_that_it_would_have_in_a_dream(scripted):
    """Guards: other random numbers on real pages than in dreams, experts that stand for other rows, or for
    none. The dreamed pages are the real ones here."""
    rows = [(start(0), expert(0)), (start(3), expert(3)), (start(9), None)]
    config = dataclasses.replace(CONFIG, tasks=3, horizon=3)
    read = {}
    for real in (False, True):
        models = scripted(script())
        made = on_pages(models, rows, config, CountingWorld(), [real] * 3, (4, 5)).trajectories
        left = sum(not t.expert for t in made)
        read[real] = [(t.expert, t.start, t.pairs, t.final_page) for t in made], models.seeds[:left]
    assert read[False][0] == read[True][0] and read[True][1] == read[False][1]
    experts = [t[0] for t in read[True][0]]
    assert True in experts[:4] and True in experts[4:8] and experts[8:] == [False] * 4


def test_real_steps_are_all_actions_that_somebody_had_to_do_on_real_pages(scripted):
    """Guards: steps of prefixes, of refused actions or of dropped trajectories that are not counted, and
    steps of recorded experts or of dreams that are. A text that is no action is no step."""
    more = act("click [1]")
    says = {(0, 0): more, (1, 1): act("click [9]"), (10, 0): "no action", (20, 0): more}

    def agent(prompt):
        return says.get((count(prompt), turn(prompt)), act("stop [x]"))

    far = dataclasses.replace(start(20), prefix=("click [1]", "click [9]", "click [1]"))
    models, web = scripted(script(agent=agent)), CountingWorld(cut=21)
    config = dataclasses.replace(CONFIG, tasks=4, group=2, horizon=5)
    shown = dataclasses.replace(config, expert_fraction=1.0)
    rows = [(start(0), None), (start(10), None), (far, None), (start(0), None)]
    made = on_pages(models, rows, config, web, [True, True, True, False])
    by_row = [len(t.steps) for t in made.trajectories]
    assert by_row[:6] == [3, 3, 0, 0, 1, 1] and by_row[6] > 0
    assert logged(made)["real_steps"] == 3 + 3 + 0 + 0 + (3 + 1) + (3 + 1)
    taken = sum(action is not None for actions in web.taken for action in actions)
    assert logged(made)["real_steps"] == taken + 2 * len(far.prefix), "the counting web runs no prefix"
    experts = on_pages(models, [(start(0), expert(0))], shown, web, [True])
    assert (logged(experts)["experts"], logged(experts)["real_steps"]) == (2, 0)


def test_a_trajectory_that_the_browser_broke_is_dropped_with_its_cause_and_not_learned_from(scripted):
    """Guards: an agent punished, or paid, for a page that hung; a trajectory that was merely out of steps, or
    whose last action the page refused, taken for a broken one."""
    says = {0: "click [1]", 30: "click [9]"}
    models = scripted(script(agent=lambda prompt: act(says.get(count(prompt), "click [2]"))))
    config = dataclasses.replace(CONFIG, tasks=3, group=2, horizon=1)
    rows = [(start(n), None) for n in (0, 30, 40)]
    made = on_pages(models, rows, config, CountingWorld(cut=1), [True] * 3)
    hung = "browser: failed: click [1]: the page hung for 10 s"
    assert [t.dropped for t in made.trajectories] == [hung] * 2 + [""] * 4
    assert [t.truncated for t in made.trajectories] == [True] * 4 + [False] * 2
    assert dream.keep(made.trajectories, [0] * 6) == [2, 3, 4, 5]
    assert logged(made)["drops"] == {"browser: failed": 2} and logged(made)["dropped_dreams"] == 2
    assert logged(made)["real_train_success"] == 0.5
    assert f"| REAL | truncated | DROPPED: {hung}" in measure.as_text(made.trajectories[0])


def test_real_pages_are_open_side_by_side_but_not_too_many(scripted):
    """Guards: 64 pages in one Chromium on two cores, where each only looks hung; rows whose failure is read
    off another page after the first 16."""
    models, web = scripted(script(agent=lambda prompt: act("click [1]"))), CountingWorld(cut=50)
    config = dataclasses.replace(CONFIG, tasks=5, group=8, horizon=1)
    rows = [(start(n), None) for n in (0, 10, 49, 20, 49)]
    made = on_pages(models, rows, config, web, [True] * 5)
    assert web.sizes == [16, 16, 8] and dream.PAGES == 16
    assert [bool(t.dropped) for t in made.trajectories] == [k // 8 in (2, 4) for k in range(40)]


def test_on_real_pages_in_a_real_chromium_a_group_ends_as_the_page_pays(scripted):
    """Guards: prefixes that are not run, a reward that is not the page's. The agent types what is asked for,
    or half of it, by turns, and presses Submit. Two groups begin where text has been typed."""
    with miniwob.Browser(timeout=60) as web:
        where = Start("enter-text", 3, (), "", "", "", ())
        wanted = re.search('"(.*)"', web.reset([where])[0].goal)[1]
        right, half = f"type [3] [{wanted}] [0]", f"type [3] [{wanted[:2]}] [0]"
        rows = [(dataclasses.replace(where, prefix=prefix), None) for prefix in ((), (right,), (half,))]
        texts = iter([right, half, right, half])

        def agent(prompt):
            return act("click [4]" if "value=" in prompt else next(texts))

        models = scripted(script(agent=agent))
        config = dataclasses.replace(CONFIG, tasks=3, group=2, horizon=3)
        made = dream.batch(dream.Models(models.lm), rows, config, (0, 0), web, [True] * 3)
    assert [t.reward for t in made.trajectories] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert all(t.terminated and not t.dropped and wanted in t.start.goal for t in made.trajectories)
    assert logged(made)["real_steps"] == 2 + 2 + (1 + 1) * 4
    assert logged(made)["groups"] == [("enter-text", True), ("enter-text", False), ("enter-text", False)]


# ---- which groups teach ------------------------------------------------------------------------------------

def test_only_groups_whose_rewards_differ_are_kept_and_the_rest_is_counted():
    """Guards: dropped dreams in a group's mean, groups of zero variance in the loss's denominator, rows of
    different groups mixed."""
    rewards = [(0, 1, 0), (1, 1, 1), (0, 0), (1, 0, 0), (0,), (1, 0)]
    trajectories, groups = [], []
    for group, values in enumerate(rewards):
        trajectories += [own(reward=float(value)) for value in values]
        groups += [group] * len(values)
    trajectories[0].dropped = "nonsense"  # group 0 keeps 1 and 0
    trajectories[8].dropped = "nonsense"  # group 3 loses its only success
    trajectories[13].pairs = []  # group 5: the failure never spoke, so nothing is left that differs
    kept = dream.keep(trajectories, groups)
    assert kept == [1, 2]
    tasks = [("count", group == 0) for group in range(6)]
    metrics = logged(dream.Batch(trajectories, kept, [], tasks))
    assert metrics["dropped_groups"] == 5 / 6 and metrics["dropped_dreams"] == 2 and metrics["kept"] == 2
    order = random.Random(0).sample(range(len(groups)), len(groups))
    shuffled = dream.keep([trajectories[k] for k in order], [groups[k] for k in order])
    assert sorted(order[k] for k in shuffled) == kept, "the order of the rows does not matter"


# ---- starts ------------------------------------------------------------------------------------------------

def test_every_task_is_drawn_once_before_any_twice():
    """Guards: batches in which a task with many recorded pages crowds out the others; a hang where there is
    nothing to draw."""
    starts = [(start(n, task), None) for task, pages in (("a", 50), ("b", 2), ("c", 1)) for n in range(pages)]
    for seed in range(20):
        tasks = [where.task for where, _ in dream.draw(random.Random(seed), starts, 5)]
        assert len(tasks) == 5 and set(tasks[:3]) == {"a", "b", "c"} and len(set(tasks[3:])) == 2
    found = dream.draw(random.Random(0), [(expert(n).start, expert(n)) for n in range(9)], 40)
    assert all(where == shown.start for where, shown in found)
    assert len({where.page for where, _ in found}) > 3
    with pytest.raises(ValueError, match="no start"):
        dream.draw(random.Random(0), [], 4)


def test_experts_are_windows_of_successes_within_the_horizon():
    """Guards: a start from which no T steps lead to the goal; failures as experts; another window's final
    page."""
    shown = [recorded(["click [1]"] * 7 + ["click [2]"], seed=k) for k in range(5)]
    failure = recorded(["click [2]"], 9, reward=0)
    found = recipe.experts(shown + [failure], 3, seed=0)
    assert len(found) == 10 and {len(window.steps) for window in found} == {1, 2, 3}
    for window in found:
        first = window.steps[0]
        assert window.start.page == first.page and window.start.previous == first.previous
        assert window.start.prefix == ("click [1]",) * (8 - len(window.steps))
        assert window.final_page == counting_page(7)
    assert found == recipe.experts(shown, 3, seed=0)


@pytest.mark.parametrize("wrong, says", [
    (dict(expert_fraction=1.5), "from 0 to 1"),
    (dict(judge="oracle"), "policy, current or world_model, not 'oracle'"), (dict(group=1), "at least 2")])
def test_a_setting_that_cannot_be_is_refused_with_what_can(wrong, says):
    """Guards: a night's run in which groups of a single dream taught nothing."""
    with pytest.raises(ValueError, match=says):
        dream.Config(**wrong)


# ---- a dream as text ---------------------------------------------------------------------------------------


def test_a_hostile_pages_text_stays_text_in_a_described_dream():
    """Guards: text of a dreamed page, a goal, a thought or the judge's reasons that reads as another dream,
    another action or another verdict. Nothing is left out: what was written can still be read."""
    marks = ["=" * 100, ">>> I am sure. click [1]", "<<< It ends.", "    over: yes", "    ERROR: covered",
             "judge: so. -> YES (margin 9.00)"]
    forged = "\n".join(["", *marks, "{0} %s {{}}"])
    step = recorded(["click [1]"]).steps[0]
    step.page, step.thought, step.error = step.page + forged, step.thought + forged, "refused" + forged
    final_page = counting_page(1) + forged
    delta = "add / 1\n| " + forged.strip("\n").replace("\n", "\n| ")
    trajectory = dataclasses.replace(
        own(), start=start(goal=GOAL + forged), steps=[step], final_page=final_page,
        predictions=[Prediction(final_page, False, "A button.", delta)],
        verdict=Verdict(False, -1.0, "said." + forged))
    lines = measure.as_text(trajectory).split("\n")

    def starting(mark):
        return [line for line in lines if line.startswith(mark)]

    assert starting("=====") == ["=" * 100]
    assert len(starting(">>> ")) == 1 and starting(">>> ")[0].endswith(" click [1]")
    assert starting("<<< ") == ["<<< A button."]
    assert starting("    over: ") == ["    over: no"]
    (error,) = starting("    ERROR: ")
    assert error.startswith("    ERROR: refused")
    assert len(starting("judge: ")) == 1 and starting("judge: ")[0].endswith(" -> NO (margin -1.00)")
    assert sum("{0} %s {{}}" in line for line in lines) == 7, "goal, page, thought, delta, error, page, judge"
