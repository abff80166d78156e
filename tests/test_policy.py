"""Claims about policy.py: the rollout's protocol and its off-by-ones, and what is cloned.

The agent is a script (conftest.Scripted) that reads the same prompts as a model would."""
import asyncio
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import GOAL, CountingEnv, act, counting_page, recorded, run, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
import lm
import policy

MORE, DONE = act("click [1]"), act("click [2]")
PRESSED_MORE = "click [1] where [1] is More"
ROOM = 100  # max_new_tokens


def roll(agent, env, begin, horizon=5, seed=3):
    return run(policy.rollout(env, agent, begin, horizon, ROOM, 1.0, seed))


# ---- rollout -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("horizon, how, turns, ended", [
    (1, {}, 1, False), (5, {}, 5, False), (5, {"end": 5}, 5, True)])
def test_a_rollout_has_at_most_horizon_turns_and_ends_or_is_cut(scripted, horizon, how, turns, ended):
    """Guards the off-by-ones (NOTES 3.1: at most T steps) and NOTES 5.15: what ran out of steps did not end;
    a success at step T counted as truncated."""
    agent, env = scripted(lambda prompt: MORE), CountingEnv(**how)
    done = roll(agent, env, start(), horizon)
    assert len(env.taken) == len(done.steps) == len(done.turns) == turns
    assert (done.terminated, done.truncated, done.no_action) == (ended, not ended, False)
    assert done.reward == float(ended) and not done.discarded
    assert [step.page for step in done.steps] == [counting_page(n) for n in range(turns)]
    assert done.final_page == counting_page(turns)


@pytest.mark.parametrize("text", ["I shall click the button.", act("clik [1]"), act("click [1"), None, ""])
def test_a_text_that_is_no_action_ends_with_reward_0_and_stays_in_the_loss(scripted, text):
    """Guards: an unreadable answer that raises, is tried again for free, or is left out of the loss. None is
    an answer that was cut off."""
    done = roll(scripted(lambda prompt: text if "'Count 1'" in prompt else MORE), CountingEnv(), start())
    assert done.no_action and not (done.terminated or done.truncated or done.discarded) and not done.reward
    assert (len(done.steps), len(done.turns)) == (1, 2) and done.final_page == counting_page(1)
    with pytest.raises(data.ActionError, match="cut off"):  # the agent may have gone on to another action
        policy.parse_turn(lm.Sample([], [], MORE, True))


def test_every_turn_is_recorded_in_the_tokens_it_was_sampled_in(scripted):
    """Guards NOTES 5.12 and 5.2: the update scores exactly these pairs, so each must be its turn's context
    and tokens; a past that is off by one; the empty goal of a start that nobody has seen yet; errors that are
    lost, or stand at the step after."""
    wrote = [MORE, act("click [7]"), MORE, DONE]
    texts = iter(wrote)
    agent = scripted(lambda prompt: next(texts))
    before = ("go_back", "scroll [down]")
    done = roll(agent, CountingEnv(), start(1, previous=before, goal=""))
    decode = agent.tokenizer.decode
    assert [decode(turn.prompt_ids) for turn in done.turns] == agent.prompts and done.start.goal == GOAL
    assert [decode(turn.completion_ids) for turn in done.turns] == [f"{text}<|end|>" for text in wrote]
    assert all(len(turn.completion_ids) == len(turn.logps) for turn in done.turns)
    assert [turn.prompt_ids for turn in done.turns] == [
        policy.turn_prompt(agent, GOAL, step.page, step.previous) for step in done.steps]
    assert [step.error for step in done.steps] == ["", "click [7]: there is no [7] on the page", "", ""]
    assert done.past == (*before, PRESSED_MORE, "click [7] but there is no [7] on the page", PRESSED_MORE,
                         "click [2] where [2] is Done")
    assert policy.Rollout(start(previous=before)).past == before


def test_what_is_not_the_agents_doing_discards_the_rollout_with_its_reason(scripted):
    """Guards NOTES 5.14 and 3.7: an overflow that forgets, raises, or counts as the agent's malformed answer;
    a page that hung, rewarded or punished."""
    agent = scripted(lambda prompt: MORE)
    agent.context = len(policy.turn_prompt(agent, GOAL, counting_page(0), ())) + ROOM  # the first turn fits
    long, short = (roll(agent, CountingEnv(), begin) for begin in (start(goal="so " * 99), start()))
    asked = len(policy.turn_prompt(agent, "so " * 99, counting_page(0), ()))
    assert long.discarded == f"policy: too long: a prompt of {asked} tokens" and long.turns == []
    assert short.discarded and len(short.steps) == 1 and short.final_page == counting_page(1)
    server = scripted(None)
    server.generate = lambda *_: asyncio.sleep(0, lm.Sample([], [], "", True, refused=True))
    refused = roll(server, CountingEnv(), start())
    assert refused.discarded.startswith("policy: too long") and not refused.turns
    hung = roll(scripted(lambda prompt: MORE), CountingEnv(cut=2), start())
    assert hung.discarded == "browser: failed: click [1]: the page hung for 10 s"
    for done in (long, short, refused, hung):
        assert not (done.reward or done.terminated or done.truncated or done.no_action)


# ---- side by side ------------------------------------------------------------------------------------------

@settings(settings.get_profile("models"), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_who_answers_first_changes_nothing(scripted, seed):
    """Guards: a rollout that depends on how fast its neighbours are answered: another's page or reward, a
    turn left out or made twice, seeds that move with the order. All the ways to end are among them: the
    agent rambles on page 12, stops on page 22, and page 32 fails."""
    def says(prompt):
        page = re.search(r"'Count (\d+)'", prompt)[1]
        return {"12": "no action", "22": act("stop [x]")}.get(page, MORE)

    class LateEnv(CountingEnv):
        async def step(self, action):
            for _ in range(rng.randrange(6)):  # so many passes of the loop before each answer
                await asyncio.sleep(0)
            return await super().step(action)

    agent, other, rng, starts = scripted(says), scripted(says), random.Random(seed), (0, 10, 20, 30)
    late = lm.together(policy.rollout(LateEnv(cut=32), agent, start(n), 5, ROOM, 1.0, n) for n in starts)
    assert [len(done.turns) for done in late] == [5, 3, 3, 2]
    assert late == [roll(other, CountingEnv(cut=32), start(n), seed=n) for n in starts]
    assert sorted(agent.seeds) == sorted(set(other.seeds))


# ---- cloning -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("system", ["", "S"])
def test_a_demonstration_is_cloned_in_the_contexts_a_rollout_samples_in(scripted, system):
    """Guards NOTES 5.12: SFT prompts and answers that are other tokens than the rollout's of the same
    steps. NNetNav's data, which have a system message of their own, keep NNetNav's words around an action.
    Actions that a browser refused, cloned; examples that fit would choke on."""
    shown = recorded(["click [1]", "click [1]", "click [2]"])
    shown.system = system
    said = {n: data.completion("So.", step.action, framed=bool(system)) for n, step in enumerate(shown.steps)}
    agent = scripted(lambda prompt: said[int(re.search(r"'Count (\d)'", prompt)[1])])
    done = roll(agent, CountingEnv(), replace(start(), system=system))
    turns = [turn[:2] for turn in done.turns]
    assert policy.examples(agent, [shown], Counter()) == turns
    shown.steps[0].error = "covered"
    agent.context = sum(map(len, turns[1]))  # the third is longer by a line of history
    assert policy.examples(agent, [shown], counts := Counter()) == [turns[1]]
    assert counts == {"recorded steps": 3, "dropped: refused or too long": 2}
