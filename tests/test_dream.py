"""Claims about dream.py: a dream keeps the real environment's protocol, and what is learned from is what it
should be.

World model, judge and agent are scripts (conftest.Scripted): one function that answers by what kind of prompt
it reads."""
import random
import statistics
from dataclasses import replace

import pytest
from conftest import CountingEnv, CountingPages, act, check_env, counting_page, record, recorded, run, start
from helpers.dreams import CONFIG, count, counted, kind, script, spoiled_at, turn, who

import dream
import lm
import policy
import train
from config import UserError
from data import parse_action
from policy import Invalid, Rollout, Turn
from world_model import Prediction

MORE = "click [1] where [1] is More"


def asked(sampler, wanted):
    return [prompt for prompt in sampler.prompts if kind(prompt) == wanted]


def env_of(sampler, seed=0):
    parts = who(sampler)
    return dream.DreamEnv(parts.world_model, parts.judge, seed)


def do(env, begin, *texts):
    """What each action gives, from the first page of `begin` on."""
    async def whole():
        await env.reset(begin)
        return [await env.step(parse_action(text)) for text in texts]

    return run(whole())


def dreams(sampler, rows, config=CONFIG, seeds=None, pages=None):
    return lm.together(dream.row(who(sampler), begin, expert, config, seed, pages)
                       for (begin, expert), seed in zip(rows, seeds or range(len(rows))))


# ---- a dreamed step ----------------------------------------------------------------------------------------

def test_a_dream_and_the_counting_web_keep_the_protocol(scripted):
    """Guards: a dream that answers an unknown id or an end otherwise than the browser does; a stand-in for a
    browser that promises less."""
    for env in (env_of(scripted(script())), CountingEnv()):
        check_env(env, start(5), "click [1]")


def test_the_delta_is_applied_and_the_next_prediction_starts_from_the_result(scripted):
    """Guards NOTES 5.4: pages that never change; a second step dreamed from the first page, or without the
    action before it; a world model that reads the goal, and dreams it into the page."""
    sampler = scripted(script())
    begin = start(3, previous=("go_back",), goal="Find the zebra.")
    found = do(env_of(sampler), begin, "click [1]", "click [1]", "stop [x]")
    assert [obs.page for obs, *_ in found[:2]] == [counting_page(4), counting_page(5)]
    first, second = asked(sampler, "world")
    assert counting_page(3) in first and "\nPREVIOUS ACTION: go_back\nACTION: click [1]" in first
    assert counting_page(4) in second and counting_page(3) not in second
    assert f"\nPREVIOUS ACTION: {MORE}\n" in second
    assert "zebra" not in first + second and "zebra" in asked(sampler, "judge")[0]


def test_going_back_is_answered_by_code_and_exactly(scripted):
    """Guards: a world model asked to remember pages that it cannot see; a history that also holds pages of
    the same address (to hover renames the page here); "there is only this page", where there was one: an
    agent that learns never to go back."""
    renames = "It says so.\nname /0 'Count 1000'\nover: no"
    sampler = scripted(script(lambda prompt: renames if "\nACTION: hover" in prompt else counted(prompt)))
    texts = ("click [1]", "hover [1]", "click [1]", "go_back", "go_back", "go_back")
    *_, there, back, again, only = [obs for obs, *_ in do(env_of(sampler), start(0), *texts)]
    assert there.page == counting_page(1001)
    assert back.page == counting_page(1).replace("'Count 1'", "'Count 1000'")
    assert again.page == only.page == counting_page(0) and only.error == "go_back: there is only this page"
    assert len(asked(sampler, "world")) == 3
    with pytest.raises(Invalid, match="world model: not recorded"):
        do(env_of(sampler), start(3, previous=("click [1]",)), "go_back")


def test_agent_and_world_model_read_what_the_dreamed_page_refused_and_the_judge_does_not(scripted):
    """Guards: a dream that is refused without a word, where recordings tell it: an agent that tries it again;
    a judge that takes it for done (NOTES 11.10)."""
    refuses = "It is not there.\nrefused: [1] is not visible\nno change\nover: no"
    says = lambda prompt: refuses if "\nACTION: hover" in prompt else counted(prompt)
    does = ("hover [1]", "click [1]", "click [2]")
    sampler = scripted(script(says, agent=lambda prompt: act(does[turn(prompt)])))
    (played,) = dreams(sampler, [(start(3), None)], replace(CONFIG, horizon=3))
    told = "hover [1] where [1] is More but [1] is not visible"
    assert played.steps[0].error == "hover [1]: [1] is not visible" and played.reward == 1
    assert [step.page for step in played.steps] == [counting_page(3)] * 2 + [counting_page(4)]
    for texts in asked(sampler, "policy")[1:], asked(sampler, "world")[1:2]:
        assert texts and all(told in text for text in texts)
    (judged,) = asked(sampler, "judge")
    assert f"\nPREVIOUS ACTIONS:\n1: None\n2: {MORE}\n3: click [2] where [2] is Done\nQ" in judged


# ---- the reward, and what is discarded ---------------------------------------------------------------------

def test_the_judge_is_asked_at_an_end_only_and_its_verdict_is_the_reward(scripted):
    """Guards: a judge called at every step (a reward before the end), or where the steps ran out; before and
    after swapped; a past that begins at the dream and not where the start's past begins. The dream ends by
    itself on the way from page 4 to page 5."""
    def world(prompt):
        return counted(prompt).replace("over: no", "over: yes") if count(prompt) == 4 else counted(prompt)

    for word, reward in (("YES", 1.0), ("NO", 0.0)):
        sampler = scripted(script(world, judge=lambda prompt, word=word: f"so.\nCOMPLETED: {word}"))
        (first, second) = do(env_of(sampler), start(3, previous=("go_back",)), "click [1]", "click [1]")
        assert first[1:] == (0.0, False, False) and second[1:] == (reward, True, False)
        (prompt,) = asked(sampler, "judge")
        assert (f"OBSERVATION:\n{counting_page(5)}\nBEFORE:\n{counting_page(4)}\nOBJECTIVE: {start().goal}\n"
                f"PREVIOUS ACTIONS:\n1: None\n2: go_back\n3: {MORE}\n4: {MORE}\n") in prompt
    (ran_out,) = dreams(sampler := scripted(script()), [(start(0), None)])
    assert ran_out.truncated and ran_out.reward == 0 and not asked(sampler, "judge")


def test_what_nobody_could_read_or_imagine_is_discarded_and_counted_by_cause(scripted):
    """Guards NOTES 3.7 and 5.14: a page that does not fit somebody's context, a prediction that was cut off,
    or a verdict that could not be read, learned from as the agent's failure. The agent's own cut-off answer
    is its failure. On pages from 5 up the agent presses [1], and the world model spoils pages 7 and 8."""
    def agent(prompt):
        return None if count(prompt) == 2 else act("click [1]" if count(prompt) >= 5 else "stop [x]")

    world = lambda prompt: {7: None, 8: "nonsense"}[count(prompt)]
    judged = lambda prompt: {0: None, 1: "I cannot tell."}.get(count(prompt), "so.\nCOMPLETED: YES")
    wide, narrow = (scripted(script(world, judged, agent), context=size) for size in (4096, 900))
    links = "\n".join(f"\t[{k}] link 'x'" for k in range(10, 200))  # over 900 tokens
    long = lambda n: replace(start(n), page=f"{counting_page(n)}\n{links}")

    def one(models, where):
        return run(dream.imagine(who(*models), where, replace(CONFIG, horizon=1), 0))

    made = {"policy: too long": one((narrow, wide, wide), long(5)),
            "world model: too long": one((wide, narrow, wide), long(5)),
            "judge: too long": one((wide, wide, narrow), long(3)),
            "world model: cut off": one((wide,), start(7)), "world model: unreadable": one((wide,), start(8)),
            "judge: cut off": one((wide,), start(0)), "judge: unreadable": one((wide,), start(1)),
            "rambling": one((wide,), start(2)), "fine": one((wide,), start(3))}
    rows, causes = list(made.values()), list(made)[:7]
    for cause in causes:
        assert made[cause].discarded.startswith(f"{cause}: ") and made[cause].reward == 0, made[cause]
    assert made["rambling"].no_action and made["rambling"].reward == 0 and not made["rambling"].discarded
    assert made["fine"].reward == 1 and not made["fine"].discarded
    assert dream.with_signal(rows, [0] * 9) == [7, 8]
    metrics = train.of_batch(dream.Batch(rows, rows[:2], [], [("count", True)]))
    assert metrics["discarded"] == {cause: 1 for cause in causes} and metrics["dream_success"] == 0.5


def test_a_dream_holds_what_the_world_model_answered_to_each_action(scripted):
    """Guards: answers of another dream or step; an answer that code gave passed off as the world model's; a
    verdict that moves to the next row when an expert stands before it."""
    texts = ["click [1]", "click [9]", "go_back", "stop [x]"]
    judged = lambda prompt: f"page {count(prompt)}.\nCOMPLETED: YES"
    sampler = scripted(script(judge=judged, agent=lambda prompt: act(texts[turn(prompt)])))
    made = dreams(sampler, [(start(3), None), (start(6), expert(6)), (start(6), None)],
                  replace(CONFIG, expert_fraction=1.0))
    for n, done in ((3, made[0]), (6, made[2])):
        assert [str(step.action) for step in done.steps] == texts
        moved, refused, back, stopped = done.predictions
        assert moved.rationale == "It counts." and moved.page == done.steps[1].page == counting_page(n + 1)
        assert refused == Prediction(moved.page, error="click [9]: there is no [9] on the page")
        assert back is None and stopped is None, "code answered these"
        assert done.verdict.text == f"page {n}."
    assert made[1].expert and made[1].predictions == [] and made[1].verdict is None


# ---- random numbers ----------------------------------------------------------------------------------------

def test_what_is_sampled_is_a_rollouts_own_and_no_two_requests_share_a_seed(scripted):
    """Guards: the same noise at every step, or for action and page; a second try that samples what failed; a
    run that is another run on another number of ranks. The world model never answers page 1."""
    rows, config = [(start(0), None)] * 2 + [(start(3), expert(3))] * 6, replace(CONFIG, expert_fraction=0.5)

    def share(rank, ranks):
        sampler = scripted(script(world=spoiled_at(1)))
        made = dreams(sampler, rows[rank::ranks], config, list(range(100, 108))[rank::ranks])
        return [(one.start, one.expert, one.reward, one.turns) for one in made], sampler.seeds

    whole, seeds = share(0, 1)
    assert {is_expert for _, is_expert, *_ in whole} == {True, False} and len(seeds) == len(set(seeds)) > 30
    parts = [share(rank, 3) for rank in range(3)]
    assert [parts[k % 3][0][k // 3] for k in range(8)] == whole
    assert sorted(seed for _, some in parts for seed in some) == sorted(seeds)


# ---- experts -----------------------------------------------------------------------------------------------

def expert(n: int = 0, task: str = "count", length: int = 2) -> dream.Expert:
    """The expert who starts at page n and presses Done after length - 1 times More."""
    steps = recorded(["click [1]"] * (n + length - 1) + ["click [2]"], task=task).steps[n:]
    where = start(n, task, previous=steps[0].previous)
    return dream.Expert(where, tuple(steps), counting_page(n + length - 1))


def test_each_rollout_is_replaced_with_the_given_probability_on_its_own(scripted):
    """Guards: one random row a group (the authors' code) where the paper says a probability a row; whole
    groups at once. 2,000 rows at .3 are within 5 standard errors (.051); 250 groups of 8 have numbers of
    experts as spread as a binomial's. At 0 and 1 it is exact."""
    model, shown = scripted(None), replace(expert(), steps=())
    replaced = lambda fraction, rows: [
        dream.expert_row(model, start(0), shown, fraction, lm.mix(1, k)) is not None for k in range(rows)]
    found = replaced(0.3, 2000)
    assert abs(sum(found) / 2000 - 0.3) < 0.051
    sizes = [sum(found[k : k + 8]) for k in range(0, 2000, 8)]
    assert statistics.variance(sizes) == pytest.approx(8 * 0.3 * 0.7, rel=0.35)
    assert not any(replaced(0.0, 50)) and all(replaced(1.0, 50))


def test_an_expert_has_reward_1_the_tokens_it_was_cloned_from_and_its_own_start(scripted):
    """Guards NOTES 5.3 and 5.12: an expert of another task or page in a group; scored in another context than
    the SFT taught; log-probs invented for it; a step that the browser refused, learned with reward 1; a
    microbatch that no GPU holds."""
    model, shown = scripted(None), expert(1)
    row = dream.expert_row(model, shown.start, shown, 1.0, 0)
    pairs = [policy.step_pair(model, shown.start.goal, step) for step in shown.steps]
    assert row.turns == [Turn(*pair, []) for pair in pairs] and row.steps == list(shown.steps)
    assert row.expert and row.terminated and row.reward == 1.0 and row.final_page == counting_page(2)
    assert not (row.truncated or row.no_action or row.discarded) and shown.steps[0].previous == (MORE,)
    for wrong in (start(0), start(1, "other")):
        with pytest.raises(AssertionError, match="another start"):
            dream.expert_row(model, wrong, shown, 1.0, 0)
    refused = replace(shown, steps=(replace(shown.steps[0], error="covered"), shown.steps[1]))
    row = dream.expert_row(model, shown.start, refused, 1.0, 0)
    assert row.turns == [Turn(*pairs[1], [])] and len(row.steps) == 2
    model.context = max(map(len, (prompt + ids for prompt, ids in pairs))) - 1
    row = dream.expert_row(model, shown.start, shown, 1.0, 0)
    assert row.discarded.startswith("policy: too long: an expert's step of") and row.reward == 1
    other = Rollout(start(1), turns=[Turn([1], [2], [-1.0])])
    assert dream.with_signal([row, other], [0, 0]) == []


# ---- groups ------------------------------------------------------------------------------------------------

def test_only_groups_whose_rewards_differ_are_learned_from():
    """Guards: discarded dreams in a group's mean, groups of zero variance in the loss's denominator, rows of
    different groups mixed."""
    rewards = [(0, 1, 0), (1, 1, 1), (0, 0), (1, 0, 0), (0,), (1, 0)]
    rollouts, groups = [], []
    for group, values in enumerate(rewards):
        rollouts += [Rollout(start(0), turns=[Turn([5], [6], [-1.0])], reward=float(r)) for r in values]
        groups += [group] * len(values)
    rollouts[0].discarded = "nonsense"  # group 0 has 1 and 0 left
    rollouts[8].discarded = "nonsense"  # group 3 loses its only success
    rollouts[13].turns = []  # group 5: the failure never spoke, so nothing is left that differs
    assert dream.with_signal(rollouts, groups) == [1, 2]
    order = random.Random(0).sample(range(len(groups)), len(groups))
    shuffled = dream.with_signal([rollouts[k] for k in order], [groups[k] for k in order])
    assert sorted(order[k] for k in shuffled) == [1, 2], "the order does not matter"


def test_a_batchs_rollouts_groups_and_metrics_agree(scripted):
    """Guards: `groups` of other rollouts than `learned`; experts (always a success) or discarded dreams in
    what the agent is said to have done. Group a: two successes, two failures; b: three of four are spoiled;
    c: presses More until the steps run out, and where the expert stands the reward is 1."""
    stop, done, more = act("stop [x]"), act("click [2]"), act("click [1]")
    says = {0: [done, stop, done, stop], 7: [done, more, more, more]}
    agent = lambda prompt: says[count(prompt)].pop(0) if count(prompt) in says else more
    judged = lambda prompt: f"so.\nCOMPLETED: {'NO' if 'stop [x]' in prompt else 'YES'}"
    world = lambda prompt: "nonsense" if "click [1]" in prompt and count(prompt) == 7 else counted(prompt)
    rows = [(start(0, "a"), None), (start(7, "b"), None), (start(30, "c"), expert(30, "c"))]
    config = replace(CONFIG, horizon=2, expert_fraction=0.5)
    made = dream.batch(who(scripted(script(world, judged, agent))), rows, config, (11, 5))
    metrics, x = train.of_batch(made), sum(one.expert for one in made.rollouts)
    assert "".join(one.start.task for one in made.rollouts) == "aaaabbbbcccc" and 0 < x < 4
    assert [one.reward for one in made.rollouts[:8]] == [1, 0, 1, 0, 1, 0, 0, 0]
    assert [k for k, one in enumerate(made.rollouts) if one.discarded] == [5, 6, 7]
    places = [k for k, one in enumerate(made.rollouts) if any(one is other for other in made.learned)]
    assert places == [0, 1, 2, 3, 8, 9, 10, 11] and made.groups == [0] * 4 + [2] * 4
    n = 12 - 3 - x  # own
    assert metrics == {
        "groups": [("a", True), ("b", False), ("c", True)], "learned": 8, "experts": x, "dreams": 12 - x,
        "discarded": {"world model: unreadable": 3}, "dream_success": round(3 / n, 4), "no_action": 0.0,
        "truncated": round((4 - x) / n, 4), "turns": round((4 + 1 + 2 * (4 - x)) / n, 4), "entropy": 1.0,
        "turn_tokens": metrics["turn_tokens"], "real_rollouts": 0, "real_steps": 0}


def test_a_group_on_real_pages_is_paid_by_the_page_and_nobody_imagines_or_judges_it(scripted):
    """Guards: real rollouts that are dreamed, judged, or paid by the judge, who here says no to everything;
    other seeds or experts on real pages than in dreams; an agent punished for a page that hung. Page 5 of the
    web pays, and its [2]; page 41 hangs."""
    agent = lambda prompt: act("click [2]" if count(prompt) == 30 else "click [1]")
    sampler = scripted(script(judge=lambda prompt: "so.\nCOMPLETED: NO", agent=agent))
    rows, pages = [(start(n), None) for n in (2, 0, 30, 40, 30)], CountingPages(end=5, cut=41)
    made = dream.batch(who(sampler), rows, replace(CONFIG, group_size=2, horizon=3), (0, 0), pages,
                       [True] * 4 + [False])
    metrics = train.of_batch(made)
    assert [one.reward for one in made.rollouts] == [1.0] * 2 + [0.0] * 2 + [1.0] * 2 + [0.0] * 4
    assert [one.real for one in made.rollouts] == [True] * 8 + [False] * 2
    assert [one.verdict is None for one in made.rollouts] == [True] * 8 + [False] * 2
    assert {count(prompt) for prompt in asked(sampler, "world") + asked(sampler, "judge")} == {30}
    assert metrics["real_train_success"] == round(4 / 6, 4) and metrics["dream_success"] == 0.0
    assert metrics["discarded"] == {"browser: failed": 2}
    assert metrics["real_steps"] == sum(len(env.taken) for env in pages.envs) == 3 * 4 + 2 + 2
    in_dreams, on_pages = (
        dreams(scripted(script(agent=lambda prompt: act("click [1]"))), [(start(0), expert(0))] * 4,
               replace(CONFIG, horizon=3), [4, 5, 6, 7], real) for real in (None, CountingPages()))
    assert [(row.expert, row.turns) for row in in_dreams] == [(row.expert, row.turns) for row in on_pages]


# ---- starts ------------------------------------------------------------------------------------------------

def test_every_task_is_sampled_once_before_any_twice():
    """Guards: batches in which a task with many recorded pages crowds out the others."""
    starts = [(start(n, task), None) for task, pages in (("a", 50), ("b", 2), ("c", 1)) for n in range(pages)]
    for seed in range(20):
        tasks = [where.task for where, _ in dream.sample_starts(random.Random(seed), starts, 5)]
        assert len(tasks) == 5 and set(tasks[:3]) == {"a", "b", "c"} and len(set(tasks[3:])) == 2
    found = dream.sample_starts(random.Random(0), [(expert(n).start, expert(n)) for n in range(9)], 40)
    assert all(where == shown.start for where, shown in found)
    assert len({where.page for where, _ in found}) > 3


def test_starts_are_windows_of_successes_within_the_horizon_or_first_pages(tmp_path):
    """Guards: a start from which no T steps lead to the goal; failures as experts; another window's final
    page; a task whose groups would all be alike; a start that no context holds."""
    long = [recorded(["click [1]"] * 7 + ["click [2]"], seed=k) for k in range(5)]
    record(file := tmp_path / "r.jsonl", [*long, recorded(["click [2]"], 9, reward=0, task="other")])
    config = replace(CONFIG, recorded=str(file), horizon=3)
    found = dream.starts(config)
    assert len(found) == 10 and {len(shown.steps) for _, shown in found} == {1, 2, 3}
    for where, shown in found:
        assert where.page == shown.steps[0].page and where.previous == shown.steps[0].previous
        assert where.prefix == ("click [1]",) * (8 - len(shown.steps))
        assert shown.final_page == counting_page(7)
    assert found == dream.starts(config)
    with pytest.raises(UserError, match="r.jsonl holds no task with both ends"):
        dream.starts(replace(config, first_pages=True))
    record(file, [*long, recorded(["click [2]"], 9, reward=0), recorded(["click [2]"], 10)])
    found = dream.starts(replace(config, first_pages=True))
    assert len(found) == 7 and [where.page for where, _ in found] == [counting_page(0)] * 7
    assert [shown and len(shown.steps) for _, shown in found] == [None] * 6 + [1]
    for more in ({"not_dreamed": ("count",)}, {"context": 20}):
        with pytest.raises(UserError, match="nowhere to begin"):
            dream.starts(replace(config, **more))
