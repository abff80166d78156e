"""Claims about policy.py: the rollout's protocol and its off-by-ones, and what is cloned."""
import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from conftest import GOAL, PRESSED_MORE, CountingEnv, act, counting_page, recorded, run, start

import data
import lm
import policy

MORE = act("click [1]")
ROOM = 100  # max_new_tokens


def roll(agent, env, horizon=5, seed=3, begin=None):
    return run(policy.rollout(env, agent, begin or start(), horizon, ROOM, 1.0, seed))


# ---- rollout -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, how, horizon, steps, end", [
    (MORE, {}, 1, 1, "truncated"), (MORE, {}, 5, 5, "truncated"), (MORE, {"end": 5}, 5, 5, "terminated"),
    (MORE, {"cut": 2}, 5, 2, "discarded"), ("I shall click.", {}, 5, 1, "no_action"),
    (None, {}, 5, 1, "no_action")])
def test_a_rollout_has_at_most_horizon_turns_and_one_end(scripted, text, how, horizon, steps, end):
    """Guards NOTES 3.1 and 5.15: an off-by-one of T; what ran out of steps did not end; a success at step T
    counted as truncated. An unreadable answer (None: it was cut off) that raises, is tried again for free, or
    is left out of the loss; a page that hung, rewarded or punished (NOTES 3.7)."""
    done = roll(scripted(lambda prompt: text if "'Count 1'" in prompt else MORE), CountingEnv(**how), horizon)
    ends = "terminated", "truncated", "no_action", "discarded"
    assert [name for name in ends if getattr(done, name)] == [end] and done.reward == (end == "terminated")
    assert [step.page for step in done.steps] == [counting_page(n) for n in range(steps)]
    assert len(done.turns) == steps + done.no_action
    assert done.final_page == counting_page(steps - bool(done.discarded))


@pytest.mark.parametrize("system", ["", "S"])
def test_every_turn_is_recorded_in_the_tokens_it_was_sampled_in_and_cloned_in_the_same(scripted, system):
    """Guards NOTES 5.12 and 5.2: the update scores exactly these pairs, so each must be its turn's context
    and tokens; a past that is off by one; the empty goal of a start that nobody has seen yet; errors that are
    lost, or stand at the step after. SFT in other tokens (NNetNav's data, which have a system message, keep
    its words around an action), of what a browser refused, or of what does not fit."""
    does, before = ("click [1]", "click [7]", "click [1]", "click [2]"), ("go_back", "scroll [down]")
    wrote = [data.completion("So.", data.parse_action(text), framed=bool(system)) for text in does]
    agent = scripted(lambda prompt, texts=iter(wrote): next(texts))
    done = roll(agent, CountingEnv(), begin=replace(start(1, previous=before, goal=""), system=system))
    decode = agent.tokenizer.decode
    assert [decode(turn.prompt_ids) for turn in done.turns] == agent.prompts and done.start.goal == GOAL
    assert [decode(turn.completion_ids) for turn in done.turns] == [f"{text}<|end|>" for text in wrote]
    assert [step.error for step in done.steps] == ["", "click [7]: there is no [7] on the page", "", ""]
    assert done.past == (*before, PRESSED_MORE, "click [7] but there is no [7] on the page", PRESSED_MORE,
                         "click [2] where [2] is Done")
    shown = replace(recorded(["click [2]"]), steps=done.steps, system=system)
    first, _, third, last = (turn[:2] for turn in done.turns)
    assert policy.examples(agent, [shown], Counter()) == [first, third, last]
    agent.context = sum(map(len, third))  # the last is longer by a line of history
    assert policy.examples(agent, [shown], counts := Counter()) == [first, third]
    assert counts == {"recorded steps": 4, "dropped: refused or too long": 2}


def test_a_page_that_is_too_long_discards_the_rollout(scripted):
    """Guards NOTES 5.14: an overflow that forgets, raises, or counts as the agent's malformed answer."""
    agent, server = scripted(lambda prompt: MORE), scripted(None)
    agent.context = len(policy.turn_prompt(agent, GOAL, counting_page(0), ())) + ROOM  # the first turn fits
    server.generate = lambda *_: asyncio.sleep(0, lm.Sample([], [], "", True, refused=True))
    for sampler, goal, turns in (agent, "so " * 99, 0), (agent, GOAL, 1), (server, GOAL, 0):
        done = roll(sampler, CountingEnv(), begin=start(goal=goal))
        assert done.discarded.startswith("policy: too long") and len(done.turns) == turns
        assert not (done.reward or done.terminated or done.truncated or done.no_action)
