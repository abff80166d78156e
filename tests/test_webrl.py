"""Claims about rivals/webrl.py and what stands beside it: the losses are the paper's and the released code's,
the buffer and the filters keep what they say, and a run of phases goes on as if it had not been killed.

The models are conftest's `taught` (it acts, dreams and judges in the counting web).
"""

import copy
import dataclasses
import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import CountingWorld, bigram, counting_page, recorded, start, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distributed import assert_close, launch, result
from test_train import Web, some, tiny_run, token_logps

import data
import distributed
import dream
import judge
import lm
import policy
import train
from data import Start
from policy import TokenTrajectory
from rivals import curriculum, orm, webrl, webrl_loss

settings.load_profile("models")

# ---- the losses --------------------------------------------------------------------------------------------


@st.composite
def phases(draw):
    """Log-probs (N,), pi_ref's, whose turn (N,), and of the turns (S,): whose trajectory; outcomes (B,)."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))  # turns of each trajectory
    trajectory = torch.tensor([b for b, length in enumerate(lengths) for _ in range(length)])
    tokens = [draw(st.integers(1, 6)) for _ in trajectory]
    turn = torch.tensor([s for s, count in enumerate(tokens) for _ in range(count)])
    ref = -torch.rand(len(turn), generator=rng, dtype=torch.float64) * draw(st.sampled_from([0.1, 1.0, 3.0]))
    logp = ref + torch.randn(len(turn), generator=rng, dtype=torch.float64) * draw(st.sampled_from([0.05, 1.0]))
    outcomes = torch.tensor([float(draw(st.booleans())) for _ in lengths], dtype=torch.float64)
    values = torch.rand(len(trajectory), generator=rng, dtype=torch.float64)
    return logp, ref, turn, trajectory, outcomes, values


def by_turn(phase):
    """[(log-probs, pi_ref's) of each turn], in plain Python lists."""
    logp, ref, turn, *_ = phase
    return [([float(v) for v in logp[turn == s]], [float(v) for v in ref[turn == s]])
            for s in range(int(turn.max()) + 1)]


@given(phases(), st.floats(0, 1))
def test_advantages_are_those_of_equation_9_written_out(phase, lam):
    """Guards: V of another trajectory's first page behind a last turn; the outcome as the reward of every
    step; lambda on the wrong term."""
    *_, trajectory, outcomes, values = phase
    expected, s = [], 0
    for b, outcome in enumerate(outcomes.tolist()):
        mine = values[trajectory == b].tolist()
        for t, value in enumerate(mine):
            last = t + 1 == len(mine)
            reward, following = (outcome, 0.0) if last else (0.0, mine[t + 1])
            expected.append(lam * (reward + following - value) + (1 - lam) * (outcome - value))
            s += 1
    found = webrl_loss.advantages(values, trajectory, outcomes, lam)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@given(phases(), st.sampled_from([0.01, 1.0, 10.0]))
def test_the_published_loss_is_equation_6_and_the_rule_is_its_gradient(phase, beta):
    """Guards: a mean over the tokens where pi(a|s) is their product; a mean over tokens or trajectories where
    it is over turns; a factor 2 beta or a sign that is lost; a gradient through pi_ref."""
    logp, ref, turn, trajectory, outcomes, values = phase
    told = webrl_loss.advantages(values, trajectory, outcomes)
    terms = [(beta * (sum(new) - sum(old)) - float(a)) ** 2
             for (new, old), a in zip(by_turn(phase), told, strict=True)]
    moving = logp.clone().requires_grad_()
    loss = webrl_loss.actor_loss(moving, ref, turn, told, beta)
    assert float(loss.detach()) == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, moving)
    factor, metrics = webrl_loss.actor_rule(logp, ref, turn, told, 3e-4, 4e-4, beta=beta)
    assert torch.allclose(-factor / len(told), gradient, rtol=1e-9, atol=1e-12)
    ratios = [math.exp(sum(new) / len(new) - sum(old) / len(old)) for new, old in by_turn(phase)]
    assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-6)


def test_at_pi_ref_the_published_update_pushes_each_action_by_its_advantage():
    """By hand: log-ratio 0, so the factor is 2 beta A. An action that is likelier by log-ratio A / beta is
    where it belongs: no push (Eq. 5). Guards: a KL term that never acts, and one that acts at once."""
    zeros, turn = torch.zeros(3), torch.tensor([0, 0, 1])
    told = torch.tensor([0.5, -0.25])
    assert webrl_loss.actor_rule(zeros, zeros, turn, told, beta=2.0)[0].tolist() == [2.0, 2.0, -1.0]
    there = torch.tensor([0.125, 0.125, -0.125])  # sums .25 = .5 / 2 and -.125 = -.25 / 2
    assert webrl_loss.actor_rule(there, zeros, turn, told, beta=2.0)[0].tolist() == [0.0, 0.0, 0.0]


def released(new, old, good):
    """(value, d/dx) of the released actor's loss of one turn, as its code computes it, in plain Python. A
    batch there is one turn."""
    if not good:
        return 0.0, 0.0
    x = sum(new) / len(new) - sum(old) / len(old)
    beta = 5.0 if math.exp(sum(old) / len(old)) >= 0.8 else 1.0
    beta = min(beta, abs(1 / x)) if x else beta
    distance = beta * x - 1
    smooth_l1 = distance**2 / 2 if abs(distance) < 1 else abs(distance) - 0.5
    return smooth_l1 / beta, max(-1.0, min(1.0, distance))


@given(phases())
def test_the_released_loss_has_the_gradient_that_its_code_has(phase):
    """Guards NOTES 12.1: d/dx = -clip(1 - beta x, 0, 1) of the mean token log-ratio x, on good steps alone,
    beta 5 where pi_ref's mean probability is at least .8."""
    logp, ref, turn, trajectory, outcomes, values = phase
    good = webrl_loss.good_steps(values, trajectory, outcomes)
    turns = by_turn(phase)
    expected = [released(*pair, flag)[1] for pair, flag in zip(turns, good.tolist(), strict=True)]
    moving = logp.clone().requires_grad_()
    loss = webrl_loss.released_loss(moving, ref, turn, good)
    (gradient,) = torch.autograd.grad(loss, moving)
    factor, _ = webrl_loss.released_rule(logp, ref, turn, good)
    by_hand = torch.tensor([expected[s] / len(turns[s][0]) for s in turn.tolist()], dtype=torch.float64)
    assert torch.allclose(-factor, by_hand, atol=1e-9)
    assert torch.allclose(gradient * len(good), by_hand, atol=1e-9)
    for s, (new, old) in enumerate(turns):
        x = sum(new) / len(new) - sum(old) / len(old)
        clipped = min(1.0, max(0.0, 1 - (5.0 if math.exp(sum(old) / len(old)) >= 0.8 else 1.0) * x))
        assert expected[s] == pytest.approx(-clipped * bool(good[s]), abs=1e-9)


@given(phases())
def test_good_steps_are_those_of_the_released_advantage(phase):
    """Guards: the released threshold of .05, its discounted return, and its V' of a last step, which is read
    off the same page. The advantage is written out as its code has it: every step's reward is the outcome."""
    *_, trajectory, outcomes, values = phase
    expected = []
    for b, outcome in enumerate(outcomes.tolist()):
        mine = values[trajectory == b].tolist()
        for t, value in enumerate(mine):
            after = mine[min(t + 1, len(mine) - 1)]
            returned = sum(0.9**k * outcome for k in range(len(mine) - t))
            expected.append(max(-1.0, min(1.0, after - value - 0.05 + outcome + returned)) >= 0)
    assert webrl_loss.good_steps(values, trajectory, outcomes).tolist() == [float(flag) for flag in expected]


@given(phases())
def test_without_the_kl_term_the_gradient_is_that_of_cloning_the_successes(phase):
    """Guards: failures that are cloned, and a mean over turns where cloning has one over tokens."""
    logp, ref, turn, trajectory, outcomes, _ = phase
    success = outcomes[trajectory]
    moving = logp.clone().requires_grad_()
    of_success = success[turn] == 1
    factor, _ = webrl_loss.sft_rule(logp, ref, turn, success)
    if not of_success.any():
        assert not factor.any()
        return
    (gradient,) = torch.autograd.grad(-moving[of_success].mean(), moving)
    assert torch.allclose(-factor / len(success), gradient, atol=1e-12)


# ---- the critic --------------------------------------------------------------------------------------------


def test_the_critic_minimises_the_cross_entropy_on_the_outcome():
    """Guards: a regression on the outcome, and V that is not a probability. One state is three times in four
    a success, the other once in four: with the ridge V stands between these and 1/2, and no other weights
    have a smaller loss."""
    states = torch.tensor([[1.0], [0.0]]).repeat_interleave(40, 0)
    outcomes = torch.tensor([1.0] * 30 + [0.0] * 10 + [1.0] * 10 + [0.0] * 30)
    critic = webrl_loss.fit(states, outcomes)
    high, low = critic.values(torch.tensor([[1.0], [0.0]])).tolist()
    assert 0.5 < high < 0.75 and high + low == pytest.approx(1, abs=1e-5)

    def loss(weights):
        inputs = torch.cat([(states - critic.mean) / critic.scale, torch.zeros(2, 1)])
        targets = torch.cat([outcomes, torch.tensor([0.0, 1.0])])
        logits = inputs @ weights[:-1] + weights[-1]
        return float(F.binary_cross_entropy_with_logits(logits, targets) + 0.05 * weights[:-1].square().sum())

    for step in ([0.01, 0.0], [-0.01, 0.0], [0.0, 0.01], [0.0, -0.01]):
        assert loss(critic.weights) < loss(critic.weights + torch.tensor(step))


@pytest.mark.parametrize("outcome, value", [(1.0, 9 / 10), (0.0, 1 / 10)])
def test_where_all_outcomes_are_equal_v_is_laplaces_rule(outcome, value):
    """Guards: a bias that runs off to infinity, and V of exactly 0 or 1: nothing would ever be learnable. 8
    alike and one of each that nobody saw: 9 of 10."""
    critic = webrl_loss.fit(torch.zeros(8, 3), torch.full((8,), outcome))
    assert critic.values(torch.zeros(1, 3)).item() == pytest.approx(value, abs=1e-4)
    assert webrl_loss.fit(torch.zeros(0, 3), torch.zeros(0)).values(torch.zeros(1, 3)).item() == 0.5


def test_no_trajectory_is_valued_by_a_critic_that_saw_its_outcome():
    """Guards: a head that knows the outcomes by heart, so that every advantage is 0. States are noise: a head
    that saw them tells their outcomes apart, and an honest one cannot. Changing a trajectory's outcome leaves
    its own values as they are."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(60, 80, generator=generator)
    trajectory, outcomes = torch.arange(30).repeat_interleave(2), (torch.arange(30) % 3 == 0).float()
    final = outcomes[trajectory]
    seen = webrl_loss.fit(states, final).values(states)
    assert float((seen[final == 1].mean() - seen[final == 0].mean())) > 0.6
    honest = webrl_loss.unseen_values(states, trajectory, outcomes)
    assert abs(float(honest[final == 1].mean() - honest[final == 0].mean())) < 0.25
    changed = outcomes.clone()
    changed[4] = 1 - changed[4]
    again = webrl_loss.unseen_values(states, trajectory, changed)
    assert torch.equal(again[trajectory == 4], honest[trajectory == 4])
    assert not torch.equal(again[trajectory == 5], honest[trajectory == 5])


def test_a_state_is_the_trunk_behind_the_last_token_of_the_prompt(model):
    """Guards: padding that is read in the place of the last token, and prompts in the order of their
    microbatches."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 5000) for _ in range(length)] for length in (9, 3, 30, 4, 1)]
    states = webrl.read_states(model, prompts, 40)
    for prompt, state in zip(prompts, states, strict=True):
        whole = model.model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
        assert torch.allclose(state, whole, atol=1e-5)


# ---- the buffer --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1, 3), max_size=30), st.integers(0, 20), st.integers(0, 99))
def test_what_is_replayed_is_neither_familiar_nor_strange_nor_too_much(values, most, seed):
    """Guards: bounds exchanged or read as probabilities, more than is allowed, and turns that are drawn
    twice."""
    chosen = webrl_loss.replayed(values, most, random.Random(seed))
    fitting = [k for k, value in enumerate(values) if 0.5 <= 1 / value <= 0.95]
    assert set(chosen) <= set(fitting) and len(chosen) == len(set(chosen)) == min(most, len(fitting))


def test_a_perplexity_is_that_of_the_whole_completion_at_temperature_1(model):
    """Guards: a sum over the tokens, the prompt's tokens, the sampler's temperature, and another order."""
    trajectories = some(6, seed=3)
    pairs = [pair for t in trajectories for pair in t.pairs]
    found = webrl.perplexities(model, pairs, 60)
    expected = []
    for pair in pairs:
        with torch.no_grad():
            logp, _ = token_logps(model, [SimpleNamespace(pairs=[pair])], 1.0)
        expected.append(math.exp(-float(logp.mean())))
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_buffer_keeps_the_last_success_at_each_goal():
    """Guards: a buffer that fills with one goal's successes, and one that keeps the oldest."""
    memory: webrl.Memory = {}
    first, again, other = some(3)
    other.start = start(1, goal="Another.")
    webrl.remember(memory, [first, other])
    webrl.remember(memory, [again])
    assert [t.pairs for t in memory.values()] == [other.pairs, again.pairs]
    assert all(t.logps == [[] for _ in t.pairs] for t in memory.values()), "its sampler was another policy"


def test_only_the_chosen_turns_of_the_buffer_are_learned_from(model, monkeypatch):
    """Guards: whole trajectories that are replayed for one turn of theirs; advantages that belong to other
    turns; the gap between sampler and trainer measured on an old policy's tokens."""
    new, kept = some(3, seed=1), some(3, seed=2)
    old = [(kept[0], {0}), (kept[2], set(range(1, len(kept[2].pairs))))]
    turns = [pair for t in [*new, kept[0], kept[2]] for pair in t.pairs]
    told = torch.arange(float(len(turns)))
    asked = []
    monkeypatch.setattr(train, "update", lambda *given: asked.append(given) or {})
    metrics = webrl.learn(model, None, new, old, told, CONFIG, random.Random(0))
    _, _, units, advantages, settings_, _, _ = asked[0]
    fresh = sum(len(t.pairs) for t in new)
    wanted = [*range(fresh), fresh] + [fresh + len(kept[0].pairs) + k for k in range(1, len(kept[2].pairs))]
    assert [unit.pairs for unit in units] == [[turns[s]] for s in wanted]
    assert advantages.tolist() == told[wanted].tolist()
    assert metrics["turns"] == fresh and metrics["replayed_turns"] == len(wanted) - fresh
    assert settings_.minibatches == max(2, math.ceil(len(units) / CONFIG.batch))


CONFIG = webrl.Config(sampler="transformers", batch=4, goals=6)
