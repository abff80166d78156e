"""Claims about dream.py: a dream keeps the real environment's protocol, and what is learned from is what it
should be. World model, judge and agent are one script (conftest.Scripted), which answers by what kind of
prompt it reads."""
import random
import statistics
from dataclasses import replace

import pytest
from conftest import CountingEnv, CountingPages, act, check_env, counting_page, record, recorded, run, start
from helpers.dreams import CONFIG, count, counted, kind, script, spoiled_at, turn, who
from hypothesis import given
from hypothesis import strategies as st

import dream
import lm
import policy
import train
from config import UserError
from data import parse_action
from policy import Invalid, Rollout, Turn

MORE = "click [1] where [1] is More"


def asked(sampler, wanted):
    return [prompt for prompt in sampler.prompts if kind(prompt) == wanted]


def env_of(sampler):
    parts = who(sampler)
    return dream.DreamEnv(parts.world_model, parts.judge, 0)


def do(env, begin, *texts):
    """What each action gives, from the first page of `begin` on."""
    async def whole():
        await env.reset(begin)
        return [await env.step(parse_action(text)) for text in texts]

    return run(whole())


def expert(n: int = 0, task: str = "count") -> dream.Expert:
    """The expert who starts at page n, and presses More and Done."""
    steps = recorded(["click [1]"] * (n + 1) + ["click [2]"], task=task).steps[n:]
    return dream.Expert(start(n, task, previous=steps[0].previous), tuple(steps), counting_page(n + 1))


# ---- a dreamed step ----------------------------------------------------------------------------------------

def test_a_dream_and_the_counting_web_keep_the_protocol(scripted):
    """Guards: a dream that answers an unknown id or an end otherwise than the browser does; a stand-in for a
    browser that promises less."""
    for env in (env_of(scripted(script())), CountingEnv()):
        check_env(env, start(5), "click [1]")


@pytest.mark.parametrize("word, reward", [("YES", 1.0), ("NO", 0.0)])
def test_a_page_is_dreamed_from_the_one_before_and_the_judge_is_asked_at_an_end_only(scripted, word, reward):
    """Guards NOTES 5.4: pages that never change; a world model that reads the goal, and dreams it into the
    page; a reward before the end; a past that begins at the dream. The dream ends by itself behind page 4."""
    last = {4: "over: yes"}
    world = lambda prompt: counted(prompt).replace("over: no", last.get(count(prompt), "over: no"))
    sampler = scripted(script(world, judge=lambda prompt: f"so.\nCOMPLETED: {word}"))
    begin = start(3, previous=("go_back",), goal="Find the zebra.")
    (first, *going), (second, *ended) = do(env_of(sampler), begin, "click [1]", "click [1]")
    assert (first.page, second.page) == (counting_page(4), counting_page(5))
    assert (going, ended) == ([0.0, False, False], [reward, True, False])
    one, two = asked(sampler, "world")
    assert counting_page(3) in one and "\nPREVIOUS ACTION: go_back\nACTION: click [1]" in one
    assert counting_page(4) in two and f"\nPREVIOUS ACTION: {MORE}\n" in two and "zebra" not in one + two
    (prompt,) = asked(sampler, "judge")
    assert (f"OBSERVATION:\n{counting_page(5)}\nBEFORE:\n{counting_page(4)}\nOBJECTIVE: Find the zebra.\n"
            f"PREVIOUS ACTIONS:\n1: None\n2: go_back\n3: {MORE}\n4: {MORE}\n") in prompt


def test_going_back_is_answered_by_code_and_exactly(scripted):
    """Guards: a history that also holds pages of the same address (to hover renames the page here); "there is
    only this page", where there was one: an agent that learns never to go back."""
    renames = "It says so.\nname /0 'Count 1000'\nover: no"
    sampler = scripted(script(lambda prompt: renames if "\nACTION: hover" in prompt else counted(prompt)))
    env, texts = env_of(sampler), ("click [1]", "hover [1]", "click [1]", "go_back", "go_back", "go_back")
    *_, there, back, again, only = [obs for obs, *_ in do(env, start(0), *texts)]
    assert there.page == counting_page(1001)
    assert back.page == counting_page(1).replace("'Count 1'", "'Count 1000'")
    assert again.page == only.page == counting_page(0) and only.error == "go_back: there is only this page"
    assert [one and one.rationale for one in env.predictions] == [
        "It counts.", "It says so.", "It counts.", None, None, None] and len(asked(sampler, "world")) == 3
    with pytest.raises(Invalid, match="world model: not recorded"):
        do(env, start(3, previous=("click [1]",)), "go_back")


def test_agent_and_world_model_read_what_the_dreamed_page_refused_and_the_judge_does_not(scripted):
    """Guards: a dream that is refused without a word, where recordings tell it: an agent that tries it again;
    a judge that takes it for done (NOTES 11.10)."""
    refuses = "It is not there.\nrefused: [1] is not visible\nno change\nover: no"
    says = lambda prompt: refuses if "\nACTION: hover" in prompt else counted(prompt)
    does = ("hover [1]", "click [1]", "click [2]")
    sampler = scripted(script(says, agent=lambda prompt: act(does[turn(prompt)])))
    played = run(dream.imagine(who(sampler), start(3), replace(CONFIG, horizon=3), 0))
    assert played.steps[0].error == "hover [1]: [1] is not visible" and played.reward == 1
    told = "hover [1] where [1] is More but [1] is not visible"
    for texts in asked(sampler, "policy")[1:], asked(sampler, "world")[1:2]:
        assert texts and all(told in text for text in texts)
    (judged,) = asked(sampler, "judge")
    assert f"\nPREVIOUS ACTIONS:\n1: None\n2: {MORE}\n3: click [2] where [2] is Done\nQ" in judged


def test_what_nobody_could_imagine_or_judge_is_discarded_and_the_agents_nonsense_is_its_failure(scripted):
    """Guards NOTES 3.7 and 5.14: a page that does not fit, a prediction or a verdict that cannot be read,
    learned from as the agent's failure, and a rollout without a token. It stops on pages below 5, and rambles
    on page 2."""
    agent = lambda prompt: act("click [1]" if count(prompt) > 4 else "stop [x]" if count(prompt) != 2 else "")
    judged = lambda prompt: "I cannot tell." if count(prompt) == 1 else "so.\nCOMPLETED: YES"
    wide, narrow = (scripted(script(spoiled_at(7), judged, agent), context=size) for size in (4096, 200))
    one = lambda n, world=wide: run(dream.imagine(who(wide, world), start(n), replace(CONFIG, horizon=1), 0))
    made = {"world model: too long": one(5, narrow), "world model: unreadable": one(7),
            "judge: unreadable": one(1)}
    rambling, fine = one(2), one(3)
    assert all(done.discarded.startswith(f"{why}: ") and not done.reward for why, done in made.items())
    assert rambling.no_action and (rambling.discarded, rambling.reward) == ("", 0) == (fine.discarded, 0)
    assert fine.reward == 1 and dream.with_signal(
        [*made.values(), Rollout(start()), rambling, fine], [0] * 6) == [4, 5]


def test_no_two_requests_share_a_seed(scripted):
    """Guards: the same noise at every step, for action and page, or in a second try, which samples what
    failed. The world model never answers page 1."""
    sampler = scripted(script(spoiled_at(1)))
    dream.batch(who(sampler), [(start(0), None), (start(3), None)], CONFIG, (0, 0))
    assert len(set(sampler.seeds)) == len(sampler.seeds) > 40


# ---- experts -----------------------------------------------------------------------------------------------

def test_each_rollout_is_replaced_with_the_given_probability_on_its_own(scripted):
    """Guards: one random row a group (the authors' code) where the paper says a probability a row. In 250
    groups of 8 the experts' number is a binomial's: its mean is within 5 standard errors (.41)."""
    model, shown = scripted(None), replace(expert(), steps=())
    of = lambda k, fraction: bool(dream.expert_row(model, start(0), shown, fraction, lm.mix(1, k)))
    sizes = [sum(of(8 * group + row, 0.3) for row in range(8)) for group in range(250)]
    assert abs(statistics.mean(sizes) - 8 * 0.3) < 0.41
    assert statistics.variance(sizes) == pytest.approx(8 * 0.3 * 0.7, rel=0.35)
    assert not any(of(k, 0.0) for k in range(50)) and all(of(k, 1.0) for k in range(50))


def test_an_expert_has_reward_1_the_tokens_it_was_cloned_from_and_its_own_start(scripted):
    """Guards NOTES 5.3 and 5.12: an expert of another task or page in a group, or in another context than the
    SFT taught; a step that the browser refused, learned with reward 1; a microbatch that no GPU holds."""
    model, shown = scripted(None), expert(1)
    pairs = [policy.step_pair(model, shown.start.goal, step) for step in shown.steps]
    of = lambda shown, at=shown.start: dream.expert_row(model, at, shown, 1.0, 0)
    assert of(shown) == Rollout(shown.start, [*shown.steps], [Turn(*pair, []) for pair in pairs],
                                counting_page(2), 1.0, terminated=True, expert=True)
    for wrong in (start(0), start(1, "other")):
        with pytest.raises(AssertionError, match="another start"):
            of(shown, wrong)
    refused = of(replace(shown, steps=(replace(shown.steps[0], error="covered"), shown.steps[1])))
    assert refused.turns == [Turn(*pairs[1], [])] and len(refused.steps) == 2
    model.context = max(len(prompt + ids) for prompt, ids in pairs) - 1
    assert of(shown).discarded.startswith("policy: too long: an expert's step of")


# ---- groups ------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_only_groups_whose_rewards_differ_are_learned_from(rows):
    """Guards: discarded rollouts, or those without a token, in a group's mean; groups of zero variance in the
    loss's denominator; rows of different groups mixed."""
    turns = [Turn([5], [6], [-1.0])]
    rollouts = [Rollout(start(), turns=turns * spoke, reward=float(won), discarded="nonsense" * lost)
                for _, won, spoke, lost in rows]
    fine = [k for k, (*_, spoke, lost) in enumerate(rows) if spoke and not lost]
    ends = {rows[k][:2] for k in fine}
    assert sorted(dream.with_signal(rollouts, [row[0] for row in rows])) == [
        k for k in fine if {(rows[k][0], True), (rows[k][0], False)} <= ends]


def test_a_batchs_rollouts_groups_and_metrics_agree_and_a_real_page_pays_by_itself(scripted):
    """Guards: `groups` of other rollouts than `learned`; experts (always a success) or discarded dreams in
    what the agent did; real rollouts that are dreamed, or judged. a: two successes, two failures; b: three of
    four are spoiled; c: steps run out, or experts. On real pages d: page 4 pays; e: page 41 hangs."""
    stop, done, more = act("stop [x]"), act("click [2]"), act("click [1]")
    says = {0: [done, stop, done, stop], 7: [done, more, more, more], 2: [more, stop, more, more]}
    agent = lambda prompt: says[count(prompt)].pop(0) if count(prompt) in says else more
    judged = lambda prompt: f"so.\nCOMPLETED: {'NO' if 'stop [x]' in prompt else 'YES'}"
    world = lambda prompt: "nonsense" if "click [1]" in prompt and count(prompt) == 7 else counted(prompt)
    rows = [(start(0, "a"), None), (start(7, "b"), None), (start(30, "c"), expert(30, "c")),
            (start(2, "d"), None), (start(40, "e"), None)]
    sampler, pages = scripted(script(world, judged, agent)), CountingPages(end=4, cut=41)
    config = replace(CONFIG, horizon=2, expert_fraction=0.5)
    made = dream.batch(who(sampler), rows, config, (11, 5), pages, [False] * 3 + [True] * 2)
    assert "".join(one.start.task for one in made.rollouts) == "aaaabbbbccccddddeeee"
    experts = sum(one.expert for one in made.rollouts)
    own = sum(not one.expert for one in made.rollouts[8:12])  # of group c
    assert experts + own == 4 and 0 < own < 4
    assert [one.reward for one in made.rollouts[:8]] == [1, 0, 1, 0, 1, 0, 0, 0]
    assert [one.reward for one in made.rollouts[12:]] == [1, 0, 1, 1, 0, 0, 0, 0]
    assert [made.rollouts[k] for k in (*range(4), *range(8, 16))] == made.learned
    assert made.groups == [0] * 4 + [2] * 4 + [3] * 4
    assert [one.verdict is None for one in made.rollouts[12:]] == [True] * 8
    assert {count(prompt) for prompt in asked(sampler, "world") + asked(sampler, "judge")} == {0, 7, 30, 31}
    assert (metrics := train.of_batch(made)) == {
        "groups": [("a", True), ("b", False), ("c", True), ("d", True), ("e", False)], "learned": 12,
        "experts": experts, "dreams": 8 + own, "real_rollouts": 8,
        "real_steps": sum(len(env.taken) for env in pages.envs),
        "discarded": {"world model: unreadable": 3, "browser: failed": 4},
        "dream_success": round(3 / (5 + own), 4), "real_train_success": 0.75, "no_action": 0.0,
        "truncated": round(own / (9 + own), 4), "turns": round((5 + 2 * own + 7) / (9 + own), 4),
        "entropy": 1.0, "turn_tokens": metrics["turn_tokens"]}


# ---- starts ------------------------------------------------------------------------------------------------

def test_every_task_is_sampled_once_before_any_twice():
    """Guards: batches in which a task with many recorded pages crowds out the others."""
    starts = [(start(n, task), None) for task, pages in (("a", 50), ("b", 2), ("c", 1)) for n in range(pages)]
    for seed in range(20):
        found = [where for where, _ in dream.sample_starts(random.Random(seed), starts, 5)]
        tasks = [where.task for where in found]
        assert len(tasks) == 5 and set(tasks[:3]) == {"a", "b", "c"} and len(set(tasks[3:])) == 2
    assert len({where.page for where, _ in dream.sample_starts(random.Random(0), starts[:50], 9)}) > 3


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
    with pytest.raises(UserError, match="r.jsonl holds no task with both ends"):
        dream.starts(replace(config, first_pages=True))
    record(file, [*long, recorded(["click [2]"], 9, reward=0), recorded(["click [2]"], 10)])
    found = dream.starts(replace(config, first_pages=True))
    assert [(where.page, shown and len(shown.steps)) for where, shown in found] == [
        (counting_page(0), length) for length in [None] * 6 + [1]]
    for more in ({"not_dreamed": ("count",)}, {"context": 20}):
        with pytest.raises(UserError, match="nowhere to begin"):
            dream.starts(replace(config, **more))
