"""Claims about dream.py: a dream keeps the real environment's protocol, and what is learned from is what it
should be. World model, judge and agent are one script (conftest.Scripted), which answers by what kind of
prompt it reads."""
import statistics
from dataclasses import replace

import pytest
from conftest import PRESSED_MORE as MORE
from conftest import CountingEnv, CountingPages, act, check_env, counting_page, record, recorded, run, start
from helpers.dreams import CONFIG, count, counted, kind, script, turn, who

import dream
import judge
import policy
import train
from config import UserError
from data import parse_action
from policy import Invalid, Rollout, Turn


def asked(sampler, wanted):
    return [prompt for prompt in sampler.prompts if kind(prompt) == wanted]


def env_of(sampler):
    parts = who(sampler)
    return dream.DreamEnv(parts.world_model, parts.judge, 0)


def do(env, begin, *texts):
    """What each action gives, from the first page of `begin` on."""
    async def imagined():
        await env.reset(begin)
        return [await env.step(parse_action(text)) for text in texts]

    return run(imagined())


def expert(n: int = 0, task: str = "count") -> dream.Expert:
    """The expert who starts at page n, and presses More and Done."""
    steps = recorded(["click [1]"] * (n + 1) + ["click [2]"], task=task).steps[n:]
    return dream.Expert(tuple(steps), counting_page(n + 1))


def test_a_dream_and_the_counting_web_keep_the_protocol(scripted):
    """Guards: a dream that answers an unknown id or an end otherwise than the browser does; a stand-in for a
    browser that promises less."""
    for env in (env_of(scripted(script())), CountingEnv()):
        check_env(env, start(5), "click [1]")


def test_a_page_is_dreamed_from_the_one_before_and_each_reads_what_was_done(scripted):
    """Guards NOTES 5.4: pages that never change; a world model that reads the goal, and dreams it into the
    page; a reward before the end; a past that begins at the dream; a refusal without a word, or one that the
    judge takes for done (NOTES 11.10), in the dream or of its rollout. It ends by itself after page 4."""
    refuses = "It is not there.\nrefused: [1] is not visible\nno change\nover: no"
    end = lambda prompt: "over: yes" if count(prompt) == 4 else "over: no"
    world = lambda prompt: refuses if "\nACTION: hover" in prompt else counted(prompt).replace(
        "over: no", end(prompt))
    does = (..., "click [1]", "hover [1]", "click [1]")
    sampler = scripted(script(world, agent=lambda prompt: act(does[turn(prompt)])))
    begin = start(3, previous=("go_back",), goal="Find the zebra.")
    played = run(dream.imagine(who(sampler), begin, CONFIG, 0))
    assert [step.page for step in played.steps] == [counting_page(n) for n in (3, 4, 4)]
    assert (played.final_page, played.reward, played.terminated) == (counting_page(5), 1.0, True)
    assert judge.ending(played) == (("go_back", MORE, MORE), counting_page(4), counting_page(5))
    refused = "hover [1] where [1] is More but [1] is not visible"
    pasts = "go_back", MORE, refused
    for prompt, page, past in zip(asked(sampler, "world"), (3, 4, 4), pasts, strict=True):
        assert f"OBSERVATION:\n{counting_page(page)}\n" in prompt and "zebra" not in prompt
        assert f"\nPREVIOUS ACTION: {past}\n" in prompt
    assert asked(sampler, "policy")[2].endswith(f"\n3: {MORE}\n4: {refused}<|end|><|assistant|>")
    (prompt,) = asked(sampler, "judge")
    assert (f"OBSERVATION:\n{counting_page(5)}\nBEFORE:\n{counting_page(4)}\nOBJECTIVE: Find the zebra.\n"
            f"PREVIOUS ACTIONS:\n1: None\n2: go_back\n3: {MORE}\n4: {MORE}\nQ") in prompt


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
    assert len(asked(sampler, "world")) == 3
    with pytest.raises(Invalid, match="world model: not recorded"):
        do(env, start(3, previous=("click [1]",)), "go_back")


# ---- experts and groups ------------------------------------------------------------------------------------

def test_each_rollout_is_replaced_with_the_given_probability_on_its_own(scripted):
    """Guards: one random row a group (the authors' code) where the paper says a probability a row. In 100
    groups of 8 the experts' number is a binomial's: its mean is within 5 standard errors (.65)."""
    models, groups = who(scripted(script(agent=lambda prompt: "nonsense"))), [(start(0), expert())] * 100
    made = dream.batch(models, groups, replace(CONFIG, group_size=8, expert_fraction=0.3), (1,)).rollouts
    sizes = [sum(done.expert for done in made[k : k + 8]) for k in range(0, 800, 8)]
    assert abs(statistics.mean(sizes) - 8 * 0.3) < 0.65
    assert statistics.variance(sizes) == pytest.approx(8 * 0.3 * 0.7, rel=0.5)


def test_an_expert_has_reward_1_and_the_tokens_it_was_cloned_from(scripted):
    """Guards NOTES 5.12: an expert in another context than the SFT taught; a step that the browser refused,
    learned with reward 1; a microbatch that no GPU holds."""
    model, shown, begin = scripted(None), expert(1), start(1, previous=(MORE,))
    pairs = [policy.step_pair(model, begin.goal, step) for step in shown.steps]
    assert dream.expert_row(model, begin, shown) == Rollout(
        begin, [*shown.steps], [Turn(*pair, []) for pair in pairs], counting_page(2), 1.0, terminated=True,
        expert=True)
    refused = replace(shown, steps=(replace(shown.steps[0], error="covered"), shown.steps[1]))
    assert dream.expert_row(model, begin, refused).turns == [Turn(*pairs[1], [])]
    model.context = max(len(prompt + ids) for prompt, ids in pairs) - 1
    assert dream.expert_row(model, begin, shown).discarded.startswith("policy: too long: an expert's step of")


def test_a_batchs_rollouts_groups_and_metrics_agree_and_a_real_page_pays_by_itself(scripted):
    """Guards: groups without a signal, or discarded rollouts, that are learned from; `groups` of other
    rollouts than `learned`; experts (always a success) or discarded dreams in what the agent did; real
    rollouts that are dreamed, or judged; the same noise at every step, for action and page, or in a second
    try, which samples what failed. a: two of four succeed, and one does nothing; b: two succeed, two are
    spoiled on page 7; c: steps run out, or experts. On real pages d: page 4 pays; e: page 41 hangs."""
    spoiled = lambda prompt: "nonsense" if count(prompt) == 7 else counted(prompt)
    stop, done, further = act("stop [x]"), act("click [2]"), act("click [1]")
    says = {0: [done, stop, done, "?"], 6: [done, done, further, further],
            2: [further, stop, further, further]}
    agent = lambda prompt: says[count(prompt)].pop(0) if count(prompt) in says else further
    judged = lambda prompt: f"so.\nCOMPLETED: {'NO' if 'stop [x]' in prompt else 'YES'}"
    rows = [(start(0, "a"), None), (start(6, "b"), None), (start(30, "c"), expert(30, "c")),
            (start(2, "d"), None), (start(40, "e"), None)]
    sampler, pages = scripted(script(spoiled, judged, agent)), CountingPages(end=4, cut=41)
    config = replace(CONFIG, horizon=2, expert_fraction=0.5)
    made = dream.batch(who(sampler), rows, config, (11, 5), pages, [False] * 3 + [True] * 2)
    assert "".join(rollout.start.task for rollout in made.rollouts) == "aaaabbbbccccddddeeee"
    assert len(set(sampler.seeds)) == len(sampler.seeds) > 30
    experts = sum(rollout.expert for rollout in made.rollouts)
    dreams = sum(not rollout.expert for rollout in made.rollouts[8:12])  # of group c
    assert experts + dreams == 4 and 0 < dreams < 4
    assert [rollout.reward for rollout in made.rollouts[:8]] == [1, 0, 1, 0, 1, 1, 0, 0]
    assert [rollout.reward for rollout in made.rollouts[12:]] == [1, 0, 1, 1, 0, 0, 0, 0]
    assert [made.rollouts[k] for k in (*range(4), *range(8, 16))] == made.learned
    assert made.groups == [0] * 4 + [2] * 4 + [3] * 4
    dreamed = {count(prompt) for prompt in asked(sampler, "world") + asked(sampler, "judge")}
    assert dreamed == {0, 6, 7, 30, 31} and not any(rollout.verdict for rollout in made.rollouts[12:])
    assert (metrics := train.of_batch(made)) == {
        "groups": [("a", True), ("b", False), ("c", True), ("d", True), ("e", False)], "learned": 12,
        "experts": experts, "dreams": 8 + dreams, "real_rollouts": 8,
        "real_steps": sum(len(env.taken) for env in pages.envs),
        "discarded": {"world model: unreadable": 2, "browser: failed": 4},
        "dream_success": round(4 / (6 + dreams), 4), "real_train_success": 0.75,
        "no_action": round(1 / (10 + dreams), 4), "truncated": round(dreams / (10 + dreams), 4),
        "turns": round((6 + 2 * dreams + 7) / (10 + dreams), 4), "entropy": 1.0,
        "turn_tokens": metrics["turn_tokens"]}


def test_starts_are_windows_of_successes_within_the_horizon_or_first_pages(tmp_path):
    """Guards: a start from which no T steps lead to the goal; another window's final page; a task whose
    groups would all be alike; a start that no context holds."""
    long = [recorded(["click [1]"] * 7 + ["click [2]"], seed=k) for k in range(5)]
    record(file := tmp_path / "r.jsonl", [*long, recorded(["click [2]"], 9, reward=0, task="other")])
    config = replace(CONFIG, recorded=str(file), horizon=3)
    found = dream.starts(config)
    assert len(found) == 10 and {len(shown.steps) for _, shown in found} == {1, 2, 3}
    assert all(begin.page == shown.steps[0].page and shown.final_page == counting_page(7)
               for begin, shown in found)
    for changes in ({"first_pages": True}, {"not_dreamed": ("count",)}, {"context": 20}):
        with pytest.raises(UserError, match="nowhere to begin"):
            dream.starts(replace(config, **changes))
    record(file, [*long, recorded(["click [2]"], 9, reward=0), recorded(["click [2]"], 10)])
    found = dream.starts(replace(config, first_pages=True))
    assert {begin.page for begin, _ in found} == {counting_page(0)}
    assert [shown and len(shown.steps) for _, shown in found] == [None] * 6 + [1]
