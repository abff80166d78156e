"""Claims about policy.py: the rollout's protocol and its off-by-ones, and what is cloned.

The agent is a script (conftest.Scripted) that reads the same prompts as a model would."""
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import GOAL, CountingWorld, act, counting_page, recorded, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
import distributed
import lm
import measure
import policy
import recipe

MORE, DONE = act("click [1]"), act("click [2]")
PRESSED_MORE = "click [1] where [1] is More"
ROOM = 100  # max_new_tokens


def roll(agent, world, starts, horizon=5, **more):
    return policy.rollout(world, agent.lm, starts, horizon, ROOM, 1.0, seed=3, **more)


# ---- rollout -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("horizon, world, turns, ended", [
    (1, {}, 1, False), (2, {}, 2, False), (5, {}, 5, False), (5, {"end": 5}, 5, True),
    (5, {"cut": 2}, 2, False)])
def test_a_trajectory_has_at_most_horizon_turns_and_ends_or_is_cut(scripted, horizon, world, turns, ended):
    """Guards the off-by-ones (NOTES 3.1: at most T steps) and NOTES 5.15: what ran out of steps did not end;
    a success at step T counted as truncated; a page that no longer fits, rewarded as the world said 1."""
    agent, world = scripted(lambda prompt: MORE), CountingWorld(**world)
    (trajectory,) = roll(agent, world, [start()], horizon)
    assert len(world.taken) == len(trajectory.steps) == turns
    assert len(trajectory.pairs) == len(trajectory.logps) == turns
    assert (trajectory.terminated, trajectory.truncated, trajectory.no_action) == (ended, not ended, False)
    assert trajectory.reward == float(ended)
    assert [step.page for step in trajectory.steps] == [counting_page(n) for n in range(turns)]
    assert trajectory.final_page == counting_page(turns)


def test_each_idles_from_its_own_end_on_and_only_then(scripted):
    """Guards: an action sent to a page that is over, a live page left idle, a rollout that goes on when all
    are over."""
    world = CountingWorld(end=3)
    agent = scripted(lambda prompt: act("stop [x]") if "'Count 11'" in prompt else MORE)
    ended = roll(agent, world, [start(0), start(2), start(10), start(1)])
    assert world.taken == [
        ["click [1]", "click [1]", "click [1]", "click [1]"],
        ["click [1]", None, "stop [x]", "click [1]"],
        ["click [1]", None, None, None]]
    assert all(trajectory.terminated for trajectory in ended)
    assert [trajectory.reward for trajectory in ended] == [1, 1, 0, 1]
    assert [len(trajectory.steps) for trajectory in ended] == [3, 1, 2, 2]


@pytest.mark.parametrize("text", ["I shall click the button.", act("clik [1]"), act("click [1"), None, ""])
def test_a_text_that_is_no_action_ends_with_reward_0_and_stays_in_the_loss(scripted, text):
    """Guards: an unreadable answer that raises, is tried again for free, or is left out of the loss. None is
    an answer that was cut off."""
    world = CountingWorld(end=2)
    agent = scripted(lambda prompt: text if "'Count 11'" in prompt else MORE)
    spoiled, other = roll(agent, world, [start(10), start(0)])
    assert spoiled.no_action and not spoiled.terminated and not spoiled.truncated and spoiled.reward == 0.0
    assert not spoiled.dropped, "its own doing"
    assert (len(spoiled.steps), len(spoiled.pairs), len(spoiled.logps)) == (1, 2, 2)
    assert spoiled.final_page == counting_page(11)
    assert world.taken == [["click [1]", "click [1]"], [None, "click [1]"]] and other.reward == 1


def test_an_answer_that_was_cut_off_is_no_action_even_if_it_holds_one(scripted, monkeypatch):
    """Guards: an action taken from the middle of an answer: the agent may have gone on to another action."""
    agent, world = scripted(lambda prompt: MORE), CountingWorld()

    def cut(*args):
        return [replace(sample, truncated=True) for sample in agent.sample(*args)]

    monkeypatch.setattr(lm, "sample", cut)
    (trajectory,) = roll(agent, world, [start()])
    assert trajectory.no_action and trajectory.steps == [] and world.taken == []
    assert len(trajectory.pairs) == 1 and trajectory.final_page == counting_page(0)


def test_every_turn_is_recorded_in_the_tokens_it_was_sampled_in(scripted):
    """Guards NOTES 5.12 and 5.2: the update scores exactly these pairs, so each must be its turn's context
    and tokens."""
    agent = scripted(lambda prompt: DONE if "'Count 3'" in prompt else MORE)
    before = ("go_back", "scroll [down]")
    (trajectory,) = roll(agent, CountingWorld(), [start(1, previous=before)])
    prompts = [prompt for prompt, _ in trajectory.pairs]
    written = [completion for _, completion in trajectory.pairs]
    decode = agent.lm.tokenizer.decode
    assert list(map(decode, prompts)) == agent.prompts
    assert list(map(decode, written)) == [MORE + "<|end|>", MORE + "<|end|>", DONE + "<|end|>"]
    assert list(map(len, written)) == list(map(len, trajectory.logps))
    asked = [policy.turn_prompt(agent.lm, GOAL, step.page, step.previous) for step in trajectory.steps]
    assert prompts == asked


@pytest.mark.parametrize("previous", [(), ("go_back",)])
def test_past_is_what_the_next_prompt_lists(scripted, previous):
    """Guards: TokenTrajectory.past off by one, or counting turns and not actions. A rollout that goes on from
    it reads the same prompt."""
    assert policy.TokenTrajectory(start(previous=previous)).past == previous
    agent = scripted(lambda prompt: "no action" if "'Count 3'" in prompt else MORE)
    (short,) = roll(agent, CountingWorld(), [start(previous=previous)], 2)
    (longer,) = roll(agent, CountingWorld(), [start(previous=previous)], 4)
    assert short.past == (*previous, PRESSED_MORE, PRESSED_MORE) == longer.steps[2].previous
    assert longer.pairs[2][0] == policy.turn_prompt(agent.lm, GOAL, short.final_page, short.past)
    assert longer.no_action and longer.past == (*short.past, PRESSED_MORE)


def test_the_goal_is_the_one_the_world_told_at_reset(scripted):
    """Guards: real pages played with the empty goal of a start that nobody has seen yet."""
    agent = scripted(lambda prompt: DONE)
    (trajectory,) = roll(agent, CountingWorld(), [start(goal="")])
    assert trajectory.start.goal == GOAL and f"OBJECTIVE: {GOAL}\n" in agent.prompts[0]


def test_a_page_that_does_not_fit_drops_the_trajectory_without_asking_and_is_a_failure_on_real_pages(
        scripted):
    """Guards NOTES 5.14 and 3.7: an overflow that forgets, raises for the whole batch, or counts as the
    agent's malformed answer; a long real page that is left out of the agent's success rate."""
    agent, world = scripted(lambda prompt: MORE), CountingWorld()
    # The first turn just fits. The second has one line more.
    agent.lm.context = len(policy.turn_prompt(agent.lm, GOAL, counting_page(0), ())) + ROOM
    short, long = roll(agent, world, [start(), start(goal="so " * 99)])
    asked = len(policy.turn_prompt(agent.lm, "so " * 99, counting_page(0), ()))
    assert long.dropped == f"policy: too long: a prompt of {asked} tokens" and long.reward == 0.0
    assert not long.truncated and not long.terminated and not long.no_action
    assert long.steps == [] and long.pairs == [] and long.final_page == counting_page(0)
    assert short.dropped and not short.truncated and short.final_page == counting_page(1)
    assert len(short.steps) == 1 and world.taken == [["click [1]", None]]
    (done,) = roll(scripted(lambda prompt: DONE), CountingWorld(), [start()])
    measured = measure.success([long, short, done])
    assert (measured["n"], measured["success"]) == (3, pytest.approx(1 / 3))


def test_what_the_world_refuses_is_recorded_with_the_step(scripted):
    """Guards: errors that are lost, or stand at the step after."""
    agent = scripted(lambda prompt: act("click [7]") if "'Count 1'" in prompt else MORE)
    (trajectory,) = roll(agent, CountingWorld(), [start()], 3)
    refused = "click [7]: there is no [7] on the page"
    assert [step.error for step in trajectory.steps] == ["", refused, refused]


def test_no_two_turns_share_their_random_numbers(scripted):
    """Guards: one seed for all turns, or for all rows; turn 1 of one batch that repeats turn 0 of the next;
    draws that the same seed does not repeat."""
    def drawn(*seeds):
        agent = scripted(lambda prompt: MORE)
        for seed in seeds:
            policy.rollout(CountingWorld(), agent.lm, [start()] * 3, 5, ROOM, 1.0, seed)
        return agent.seeds

    assert len(drawn(3, 4)) == len(set(drawn(3, 4))) == 2 * 3 * 5
    assert len(set(drawn([0, 1, 2], [3, 4, 5]))) == 2 * 3 * 5
    assert drawn(3, 4) == drawn(3, 4)


def test_a_trajectory_with_its_own_seed_draws_the_same_whoever_is_rolled_out_beside_it(scripted):
    """Guards: seeds that belong to places in the batch, or to the live rows: other dreams on another number
    of ranks."""
    def drawn(starts, seeds):
        agent = scripted(lambda prompt: MORE)
        played = policy.rollout(CountingWorld(end=12), agent.lm, starts, 5, ROOM, 1.0, seeds)
        return agent.seeds, [len(trajectory.steps) for trajectory in played]

    together, turns = drawn([start(10), start(0), start(5)], [70, 71, 72])
    assert turns == [2, 5, 5]
    alone = [drawn([start(n)], [seed])[0] for n, seed in ((10, 70), (0, 71), (5, 72))]
    assert sorted(together) == sorted(alone[0] + alone[1] + alone[2])
    assert together[:3] == [alone[0][0], alone[1][0], alone[2][0]]  # the first turn, of all three
    assert together[6:8] == [alone[1][2], alone[2][2]]  # the third turn: the first trajectory has ended


# ---- a world that takes its time ---------------------------------------------------------------------------

class LateWorld(CountingWorld):
    """A counting web in which the rows that first(waiting) picks, one at least, answer in this step. What a
    row waits for was computed when its action came."""

    def __init__(self, first, **more):
        super().__init__(**more)
        self.first, self.late = first, {}

    def step(self, actions):
        assert not any(actions[k] for k in self.late), "an action on a page that has not answered"
        seen, *ended = super().step(actions)
        self.late |= {k: (seen[k], *(values[k] for values in ended)) for k, a in enumerate(actions) if a}
        now = self.first(sorted(self.late)) if self.late else []
        assert set(now) <= set(self.late) and (now or not self.late)
        idle = [None, 0.0, False, False]
        rows = [self.late.pop(k) if k in now else idle if k in self.late else [seen[k], *idle[1:]]
                for k in range(len(actions))]
        return tuple(map(list, zip(*rows)))


def spoiling(prompt: str) -> str:
    """An agent that presses More, rambles on page 12, asks for an unknown element on page 21 and stops on
    page 32."""
    n = int(re.search(r"'Count (\d+)'", prompt)[1])
    return {12: "no action", 21: act("click [9]"), 32: act("stop [x]")}.get(n, MORE)


SEVERAL = [start(n) for n in (0, 10, 20, 30, 40)]


@settings(settings.get_profile("models"), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_who_answers_first_changes_nothing(scripted, seed):
    """Guards: a trajectory that depends on how fast its neighbours are answered: another's page or reward, a
    turn left out or made twice, a horizon shared by all, draws that move with the order. All the ways to end
    are among them."""
    rng = random.Random(seed)
    some = lambda waiting: rng.sample(waiting, rng.randint(1, len(waiting)))
    agent = scripted(spoiling)
    late = roll(agent, LateWorld(some, cut=42), SEVERAL)
    drawn, agent = agent.seeds, scripted(spoiling)
    assert late == roll(agent, CountingWorld(cut=42), SEVERAL)
    assert sorted(drawn) == sorted(agent.seeds)
    assert [len(t.pairs) for t in late] == [5, 3, 5, 3, 2]
    assert [t.truncated for t in late] == [True, False, True, False, True] and late[1].no_action


def test_a_row_whose_page_has_answered_makes_all_its_turns_while_another_waits(scripted):
    """Guards: a batch that waits in each turn for its slowest page. Row 0 is answered when nobody else
    waits."""
    world = LateWorld(lambda waiting: [k for k in waiting if k] or waiting)
    first, second, third = roll(scripted(lambda prompt: MORE), world, [start(), start(10), start(20)])
    assert world.taken[0] == ["click [1]"] * 3 and world.taken[1:5] == [[None, "click [1]", "click [1]"]] * 4
    assert world.taken[5:] == [[None] * 3] + [["click [1]", None, None]] * 4
    assert len(first.steps) == len(second.steps) == len(third.steps) == 5


# ---- cloning -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("system", ["", "S"])
def test_a_demonstration_is_cloned_in_the_contexts_a_rollout_samples_in(scripted, system):
    """Guards NOTES 5.12: SFT prompts and answers that are other tokens than the rollout's of the same
    steps. NNetNav's data, which have a system message of their own, keep NNetNav's words around an action."""
    shown = recorded(["click [1]", "click [1]", "click [2]"])
    shown.system = system
    said = {n: data.completion("So.", step.action, framed=bool(system)) for n, step in enumerate(shown.steps)}
    agent = scripted(lambda prompt: said[int(re.search(r"'Count (\d)'", prompt)[1])])
    (trajectory,) = roll(agent, CountingWorld(), [replace(start(), system=system)])
    assert policy.examples(agent.lm, [shown], Counter()) == trajectory.pairs


def test_refused_and_too_long_steps_are_left_out_and_counted(scripted):
    """Guards: cloning actions that a browser refused; examples that fit would choke on."""
    agent, counts = scripted(lambda prompt: ""), Counter()
    shown = recorded(["click [1]", "click [1]", "click [2]"])
    shown.steps[0].error = "covered"
    second = policy.step_pair(agent.lm, shown.goal, shown.steps[1])
    agent.lm.context = sum(map(len, second))  # the third is longer by a line of history
    assert policy.examples(agent.lm, [shown], counts) == [second]
    assert counts == {"recorded steps": 3, "dropped: refused or too long": 2}


def test_the_papers_recipe_keeps_a_node_of_8_busy():
    """Guards: one sequence a step, for which seven of eight ranks wait (`assign([9300], 8)`)."""
    sft = recipe.PolicySFT().sft
    assert (sft.tokens, sft.microbatches) == (16384, 16)
    shares = distributed.assign([9300] * sft.microbatches, 8)
    assert all(weight for share in shares for _, weight in share)
