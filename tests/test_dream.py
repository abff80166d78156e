"""Claims about dream.py: the dreamed web keeps the real one's protocol, and what is learned from is what it should be.

World model, judge and agent are scripts (conftest.Scripted): one function that answers by what kind of prompt it reads."""
import dataclasses
import random
import re
from collections import Counter

import pytest
from conftest import CountingWorld, act, check_protocol, page, recorded, start

import browser
import dream
import lm
import policy
from data import Start, parse_action
from policy import TokenTrajectory
from world_model import WorldModel

CONFIG = dream.Config(tasks=2, group=4, horizon=5, max_new_tokens=60, judge_tokens=60)


def kind(prompt: str) -> str:
    return "judge" if "\nQUESTION: completed?" in prompt else "world" if "\nACTION: " in prompt else "policy"


def count(prompt: str) -> int:
    return int(re.search(r"'Count (\d+)'", prompt)[1])


def counted(prompt: str) -> str:
    """The world model of the counting web: [1] leads to the next page, [2] ends."""
    if "\nACTION: click [1]" in prompt:
        return "It counts.\npage\n" + "\n".join("| " + line for line in page(count(prompt) + 1).split("\n")) + "\nover: no"
    return "It ends.\nno change\nover: yes"


def script(world=counted, judge=lambda prompt: "so.\nCOMPLETED: YES", agent=lambda prompt: act("click [1]")):
    return lambda prompt: {"world": world, "judge": judge, "policy": agent}[kind(prompt)](prompt)


def dreamt(all_models, config=CONFIG, seed=0):
    return dream.Dream(WorldModel(all_models.lm, 200, 0.5), all_models.lm, config, seed)


def dreams(all_models, rows, config, seeds):
    return dream.dream(all_models.lm, WorldModel(all_models.lm, 200, 0.5), all_models.lm, rows, config, seeds)


def do(world, *texts):
    return world.step([text and parse_action(text) for text in texts])


def asked(models, wanted):
    return [prompt for prompt in models.prompts if kind(prompt) == wanted]


# ---- one protocol ----------------------------------------------------------------------------------------------------------


def test_the_counting_web_keeps_the_protocol():
    """The stand-in for a browser that the other tests roll out in is held to the same promises."""
    check_protocol(CountingWorld(), [start(0), start(5), start(7)], "click [1]")


def test_a_dream_keeps_the_protocol(scripted):
    """Guards: a dream that answers an unknown id, an idling page, an end or a wrong number of actions otherwise than the browser does."""
    check_protocol(dreamt(scripted(script())), [start(0), start(5), start(7)], "click [1]")


def test_a_real_browser_keeps_the_protocol():
    """The same function on the real thing: what holds in a dream holds there."""
    try:
        web = browser.Browser(timeout=60).__enter__()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    try:
        starts = [Start(task, seed, (), "", "", "", ()) for task, seed in (("enter-text", 1), ("login-user", 2), ("enter-text", 3))]
        check_protocol(web, starts, "press [Tab]")
    finally:
        web.__exit__(None, None, None)


# ---- a dreamed step --------------------------------------------------------------------------------------------------------


def test_the_delta_is_applied_and_the_next_prediction_starts_from_the_result(scripted):
    """Guards trap 4: pages that never change; a second step that is dreamed from the first page, or without the action before it."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([start(3, previous=("go_back",))])
    assert [do(world, "click [1]")[0][0].tree for _ in range(2)] == [page(4), page(5)]
    first, second = asked(models, "world")
    assert page(3) in first and "\nPREVIOUS ACTION: go_back\nACTION: click [1]" in first
    assert page(4) in second and page(3) not in second and "\nPREVIOUS ACTION: click [1] where [1] is More\n" in second


def test_the_world_model_never_reads_the_goal(scripted):
    """Guards: a model that dreams the goal into the page."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([start(0, goal="Find the zebra.")])
    do(world, "click [1]")
    do(world, "stop [zeb]")
    assert "zebra" not in asked(models, "world")[0] and "zebra" in asked(models, "judge")[0]


def test_only_live_pages_are_predicted_and_each_answer_goes_to_its_page(scripted):
    """Guards: answers shifted by a page that idles, stops, goes back or names an unknown id; work done for those."""
    models = scripted(script())
    world = dreamt(models)
    world.reset([start(n) for n in (10, 20, 30, 40, 50)])
    obs, rewards, terminated, truncated = do(world, None, "stop [x]", "click [9]", "click [1]", "click [2]")
    assert [one.tree for one in obs] == [page(10), page(20), page(30), page(41), page(50)]
    assert terminated == [False, True, False, False, True] and rewards == [0, 1, 0, 0, 1] and truncated == [False] * 5
    assert [count(prompt) for prompt in asked(models, "world")] == [40, 50]


def test_going_back_is_answered_by_code_and_exactly(scripted):
    """Guards: a world model asked to remember pages it cannot see; a history that also holds pages of the same address."""
    retitle = "It says so.\nname /0 'Count 1000'\nover: no"  # the same page under another name
    models = scripted(script(world=lambda prompt: retitle if "\nACTION: hover" in prompt else counted(prompt)))
    world = dreamt(models)
    world.reset([start(0)])
    for text in ("click [1]", "hover [1]", "click [1]"):
        seen = do(world, text)[0][0].tree
    assert seen == page(1001)
    renamed = page(1).replace("'Count 1'", "'Count 1000'")
    assert [do(world, "go_back")[0][0].tree for _ in range(2)] == [renamed, page(0)]
    (obs,), rewards, terminated, truncated = do(world, "go_back")
    assert obs.tree == page(0) and obs.error == "go_back: there is no earlier page" and (rewards, terminated, truncated) == ([0.0], [False], [False])
    assert len(asked(models, "world")) == 3


def test_what_the_world_model_spoils_ends_the_dream_unjudged_and_dropped(scripted):
    """Guards: an agent punished (reward 0, learned from) for the world model's error, or a judge that rules on a broken dream."""
    models = scripted(script(world=lambda prompt: "nonsense" if count(prompt) == 7 else counted(prompt)))
    world = dreamt(models)
    world.reset([start(7), start(0)])
    obs, rewards, terminated, truncated = do(world, "click [1]", "click [1]")
    assert (rewards, terminated, truncated, obs[0].tree) == ([0, 0], [False, False], [True, False], page(7))
    assert world.dropped(0) and not world.dropped(1) and not asked(models, "judge")
    with pytest.raises(AssertionError, match="after the end"):
        do(world, "click [1]", None)


def test_a_page_too_long_to_dream_on_is_truncated_but_not_dropped(scripted):
    """Guards trap 14: a page that does not fit counted as the world model's error, or silently cut."""
    models = scripted(script())
    world = dreamt(models)
    models.lm.context = 230  # the next page's prompt fits no more beside 200 new tokens
    world.reset([start(0)])
    assert do(world, "click [1]")[1:] == ([0.0], [False], [True]) and not world.dropped(0) and models.prompts == []


# ---- the reward ------------------------------------------------------------------------------------------------------------


def test_the_judge_is_asked_at_an_end_only_and_its_verdict_is_the_reward(scripted):
    """Guards: a judge called at every step (a reward before the end), or at truncation."""
    models = scripted(script(judge=lambda prompt: f"so.\nCOMPLETED: {'YES' if 'Count 1' in prompt else 'NO'}"))
    world = dreamt(models)
    world.reset([start(0), start(20)])
    assert do(world, "click [1]", "click [1]")[1] == [0.0, 0.0] and not asked(models, "judge")
    assert do(world, "stop [x]", "click [2]")[1] == [1.0, 0.0] and len(asked(models, "judge")) == 2 == world.counts["judged"]
    assert world.verdict(0).success and not world.verdict(1).success


def test_running_out_of_steps_is_0_without_a_judge(scripted):
    """Guards: half-finished dreams judged at T (facts.md: running out of steps is 0)."""
    models = scripted(script())
    trajectories = dreams(models, [(start(0), None)] * 4, dataclasses.replace(CONFIG, horizon=2), range(4))
    assert len(trajectories) == 4
    assert all(one.truncated and one.reward == 0 and len(one.steps) == 2 for one in trajectories) and not asked(models, "judge")


def test_the_judge_reads_the_page_before_the_last_action_and_the_whole_past(scripted):
    """Guards: before and after swapped or the same, a past that begins at the dream and not at the episode."""
    models = scripted(script(world=lambda prompt: counted(prompt).replace("over: no", "over: yes") if count(prompt) == 4 else counted(prompt)))
    world = dreamt(models)
    world.reset([start(3, previous=("go_back",))])
    do(world, "click [1]")
    do(world, "click [1]")
    (prompt,) = asked(models, "judge")
    more = "click [1] where [1] is More"
    assert f"OBSERVATION:\n{page(5)}\nBEFORE:\n{page(4)}\nOBJECTIVE: Press More, then Done.\nPREVIOUS ACTIONS:\n1: None\n2: go_back\n3: {more}\n4: {more}\n" in prompt


def test_the_given_judge_judges_with_its_threshold(scripted):
    """Guards: a frozen judge that is quietly the policy (it would drift with it), a threshold that never arrives. The margin is 2.9."""
    for threshold, reward in ((0.0, 1.0), (3.0, 0.0)):
        models = scripted(script())
        judge_model = dataclasses.replace(models.lm)
        world = dream.Dream(WorldModel(models.lm, 200, 0.5), judge_model, dataclasses.replace(CONFIG, judge_threshold=threshold), 0)
        world.reset([start(0)])
        assert do(world, "stop [x]")[1] == [reward] and models.models[-1] is judge_model


def test_no_two_calls_of_the_world_model_share_their_random_numbers(scripted):
    """Guards: the same noise at every step, and a retry that draws what failed."""
    def drawn(*seeds, rows=2):
        models = scripted(script(world=lambda prompt: "nonsense" if count(prompt) == 1 else counted(prompt)))
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
    assert sorted(drawn([5, 6])) == sorted(drawn([5], [6], rows=1)), "a dream's draws are its own, whoever is dreamed beside it"


def test_agent_and_world_model_never_draw_from_the_same_seed(scripted):
    """Guards: the noise that chose the action choosing the page too; both are made of the row's one seed."""
    models, seeds = scripted(script()), [5, 6, 7]
    dreams(models, [(start(n), None) for n in range(3)], CONFIG, seeds)
    assert len(models.seeds) == len(set(models.seeds)) == 3 * 5 * 2


def test_what_is_dreamed_and_mixed_in_does_not_depend_on_who_shares_the_work(scripted):
    """Guards: a run that is another run on another number of ranks: the share of each rank is dreamed, and its experts drawn, as in the whole."""
    config, seeds = dataclasses.replace(CONFIG, expert_fraction=0.5), list(range(100, 108))
    rows, _ = dream.grouped([(start(0), expert(0)), (start(3), expert(3))], 4)
    made = lambda ranks: [[(one.start, one.expert, one.reward, one.pairs) for one in dreams(models, rows[r::ranks], config, seeds[r::ranks])]
                          for r in range(ranks)]
    models = scripted(script())
    (whole,), drawn = made(1), list(models.seeds)
    assert len({one[1] for one in whole}) == 2, "with no expert among them, or nothing else, it shows little"
    models.seeds.clear()
    for r, share in enumerate(made(3)):
        assert share == whole[r::3]
    assert sorted(models.seeds) == sorted(drawn)


# ---- groups and experts ----------------------------------------------------------------------------------------------------


def expert(n: int = 0, task: str = "count", length: int = 2) -> dream.Expert:
    steps = recorded(["click [1]"] * (n + length - 1) + ["click [2]"], task=task).steps[n:]
    return dream.Expert(start(n, task, previous=steps[0].previous), tuple(steps), page(n + length - 1))


def own(n: int = 0, task: str = "count", reward: float = 0.0) -> TokenTrajectory:
    return TokenTrajectory(start(n, task), pairs=[([5], [6])], logps=[[-1.0]], reward=reward, terminated=True)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_fractions_0_and_1_are_exact(scripted, fraction):
    """Guards: an expert at fraction 0 (no ablation would be one), a dream at fraction 1."""
    model = scripted(None).lm
    assert [dream.expert_row(model, start(0), expert(), fraction, seed) is not None for seed in range(50)] == [fraction == 1.0] * 50


def test_what_an_expert_replaces_is_not_dreamed_first(scripted):
    """Guards: half of the paper's dreams (and of their GPU hours) thrown away."""
    models = scripted(script())
    rows = dreams(models, [(start(0), expert(0))] * 3, dataclasses.replace(CONFIG, expert_fraction=1.0), range(3))
    assert all(one.expert for one in rows) and models.calls == []


def test_each_row_is_replaced_with_the_given_probability_on_its_own(scripted):
    """Guards: one random row a group (the authors' code) where the paper says a probability a row; whole groups at once. 2,000 rows at .3 are
    within 5 standard errors (5 * sqrt(.3 * .7 / 2000) = .051); and 250 groups of 8 with their number of experts as spread as a binomial."""
    model, shown = scripted(None).lm, dataclasses.replace(expert(), steps=())
    rows = [float(dream.expert_row(model, start(0), shown, 0.3, lm.mix(1, k)) is not None) for k in range(2000)]
    assert abs(sum(rows) / 2000 - 0.3) < 0.051
    sizes = [sum(rows[k : k + 8]) for k in range(0, 2000, 8)]
    mean = sum(sizes) / 250
    assert sum((size - mean) ** 2 for size in sizes) / 249 == pytest.approx(8 * 0.3 * 0.7, rel=0.35)


def test_an_expert_stands_for_rows_of_its_own_start_only(scripted):
    """Guards trap 3: an expert of another task or page in a group (its reward would be compared with theirs); rows without one replaced."""
    model = scripted(None).lm
    assert dream.expert_row(model, start(1), None, 1.0, 1) is None
    row = dream.expert_row(model, start(0, "other"), expert(0, "other"), 1.0, 2)
    assert (row.expert, row.start.task, row.start.page) == (True, "other", page(0))
    for wrong in (expert(1), expert(0, "other")):
        with pytest.raises(AssertionError):
            dream.expert_row(model, start(0), wrong, 1.0, 0)


def test_an_experts_tokens_are_those_it_was_cloned_from_and_it_has_reward_1(scripted):
    """Guards trap 12 for experts: scored in another context than the SFT taught; sampled log-probs invented for them."""
    model, one = scripted(None).lm, expert(1)
    row = dream.expert_row(model, one.start, one, 1.0, 0)
    assert row.pairs == [policy.step_pair(model, one.start.goal, step) for step in one.steps] and row.logps == [[], []]
    assert (row.reward, row.terminated, row.truncated, row.malformed, row.dropped, row.final_tree) == (1.0, True, False, False, "", page(2))
    assert one.steps[0].previous == ("click [1] where [1] is More",)  # the start's past is in the prompt


def test_a_batch_is_n_dreams_of_each_start_side_by_side(scripted):
    """Guards: groups that are interleaved wrongly, so that one task's rewards normalise another's; dropped dreams handed on as good."""
    models = scripted(script(world=lambda prompt: "nonsense" if count(prompt) == 7 else counted(prompt)))
    starts = [(start(0), None), (start(7), None), (start(3), expert(3))]
    rows, groups = dream.grouped(starts, 4)
    trajectories = dreams(models, rows, dataclasses.replace(CONFIG, expert_fraction=1.0), range(12))
    assert groups == [0] * 4 + [1] * 4 + [2] * 4
    assert [one.start.page for one in trajectories] == [page(n) for n in (0, 7, 3) for _ in range(4)]
    assert [bool(one.dropped) for one in trajectories] == [False] * 4 + [True] * 4 + [False] * 4
    assert [one.expert for one in trajectories] == [False] * 8 + [True] * 4


def test_only_groups_whose_rewards_differ_are_kept_and_the_rest_is_counted():
    """Guards: dropped dreams in a group's mean, groups of zero variance in the denominator of the loss, rows of different groups mixed."""
    rewards = [(0, 1, 0), (1, 1, 1), (0, 0), (1, 0, 0), (0,), (1, 0)]
    trajectories, groups = [], []
    for group, values in enumerate(rewards):
        trajectories += [own(reward=float(value)) for value in values]
        groups += [group] * len(values)
    trajectories[0].dropped = "nonsense"  # group 0 keeps 1 and 0
    trajectories[8].dropped = "nonsense"  # group 3 loses its only success
    trajectories[13].pairs = []  # group 5: the failure never spoke, so nothing is left that differs
    counts = Counter()
    kept = dream.keep(trajectories, groups, counts)
    assert kept == [1, 2]
    assert counts == {"groups": 6, "dropped groups": 5, "dropped dreams": 2}
    order = random.Random(0).sample(range(len(groups)), len(groups))
    shuffled = dream.keep([trajectories[k] for k in order], [groups[k] for k in order], Counter())
    assert sorted(order[k] for k in shuffled) == kept, "the order of the rows does not matter"


def test_every_task_is_drawn_once_before_any_twice():
    """Guards: batches in which a task with many recorded pages crowds out the others."""
    others = [start(n, task) for task, pages in (("a", 50), ("b", 2), ("c", 1)) for n in range(pages)]
    for seed in range(20):
        drawn = dream.draw(random.Random(seed), [], others, dataclasses.replace(CONFIG, tasks=5))
        assert len(drawn) == 5 and {one.task for one, _ in drawn[:3]} == {"a", "b", "c"} and len({one.task for one, _ in drawn[3:]}) == 2
        assert all(shown is None for _, shown in drawn)


def test_focus_draws_what_had_something_to_teach_and_forgets_what_is_long_past():
    """Guards: a focus on what never teaches, one that starves a task for good, and one that never notices that a task can be learned now."""
    others = [start(0, task) for task in "abc"]
    taught = {"a": [True] * 50 + [False] * 8, "b": [False] * 50 + [True] * 8}  # and nothing is known of c
    drawn = dream.draw(random.Random(0), [], others, dataclasses.replace(CONFIG, tasks=9500, focus=True), taught)
    shares = Counter(one.task for one, _ in drawn)
    for task, share in (("a", 1 / 19), ("b", 9 / 19), ("c", 9 / 19)):  # 1/9 : 1 : 1; 5 standard errors of 9,500 draws are at most .026
        assert abs(shares[task] / 9500 - share) < 0.026
    even = dream.draw(random.Random(0), [], others, dataclasses.replace(CONFIG, tasks=3), taught)
    assert {one.task for one, _ in even} == {"a", "b", "c"}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_demonstrated_share_of_groups_has_an_expert(share):
    """Guards: a share that is ignored or turned round. 2,000 groups; 5 * sqrt(.3 * .7 / 2000) = .051. At 0 and 1 it is exact."""
    drawn = dream.draw(random.Random(0), [expert(0), expert(1)], [start(5), start(6)], dataclasses.replace(CONFIG, tasks=2000, demonstrated=share))
    assert abs(sum(shown is not None for _, shown in drawn) / 2000 - share) <= (0.051 if share == 0.3 else 0)
    assert all(one == shown.start for one, shown in drawn if shown) and len({one.page for one, _ in drawn}) > 1


def test_experts_are_windows_of_successes_within_the_horizon():
    """Guards: a start that no T steps lead to the goal from; failures as experts; the final page of another window."""
    shown = [recorded(["click [1]"] * 7 + ["click [2]"], seed=k) for k in range(5)]
    found = dream.experts(shown + [recorded(["click [2]"], 9, reward=0)], 3, seed=0)
    assert len(found) == 10 and {len(one.steps) for one in found} == {1, 2, 3}
    for one in found:
        assert one.start.page == one.steps[0].tree and one.start.previous == one.steps[0].previous and one.final_tree == page(7)
        assert one.start.prefix == ("click [1]",) * (8 - len(one.steps))
    assert found == dream.experts(shown, 3, seed=0)


def test_a_first_page_has_no_past():
    """Guards: starts in the middle of an attempt that claim to be its beginning."""
    (first,) = dream.first_pages([recorded(["click [1]", "click [2]"], reward=0)])
    assert (first.page, first.previous, first.prefix, first.goal) == (page(0), (), (), "Press More, then Done.")


def test_a_later_page_has_the_past_that_led_to_it():
    """Guards: starts whose page, past and replayed prefix are of different steps; a first page among them (they are counted apart)."""
    attempt = recorded(["click [1]"] * 4, reward=0)
    starts = [dream.later_pages([attempt, recorded(["click [2]"], reward=0)], seed) for seed in range(30)]
    assert all(len(one) == 1 for one in starts) and len({one.page for (one,) in starts}) == 3
    for (one,) in starts:
        n = len(one.previous)
        assert (one.page, one.previous, one.prefix) == (page(n), attempt.steps[n].previous, ("click [1]",) * n) and n > 0


@pytest.mark.parametrize("wrong, says", [
    (dict(expert_fraction=1.5), "from 0 to 1"), (dict(demonstrated=-0.1), "from 0 to 1"), (dict(judge="oracle"), "policy, current or world_model, not 'oracle'"), (dict(group=1), "at least 2")])
def test_a_setting_that_cannot_be_is_refused_with_what_can(wrong, says):
    with pytest.raises(ValueError, match=says):
        dream.Config(**wrong)


def test_the_dump_shows_an_expert_without_the_verdict_of_the_dream_it_replaced(scripted, tmp_path):
    """Guards: a text for people in which a recorded success carries another trajectory's verdict."""
    models = scripted(script(agent=lambda prompt: act("click [2]"), judge=lambda prompt: "my reasons.\nCOMPLETED: NO"))
    for fraction, shown in ((0.0, 4), (1.0, 0)):
        rows, _ = dream.grouped([(start(0), expert(0))], 4)
        trajectories = dreams(models, rows, dataclasses.replace(CONFIG, expert_fraction=fraction), range(4))
        dream.dump(tmp_path / "dreams.txt", trajectories)
        text = (tmp_path / "dreams.txt").read_text()
        assert text.count("my reasons.") == shown and text.count("| EXPERT") == 4 - shown and page(0) in text
