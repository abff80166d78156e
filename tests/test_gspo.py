"""Claims about gspo.py. Everything is float64, so that a difference of 1e-12 is a bug and not noise.

The reference below is the paper's formula, with gspo.py's two guards, in plain Python floats, one loop for
every sum. It shares no line, no tensor and no autograd with what it checks.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gspo import group_advantages, gspo_coefficients, gspo_loss


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Equal to 1e-12 of a number, or of 1.
close = partial(pytest.approx, rel=1e-12, abs=1e-12)


def formula(logp, old_logp, trajectory, advantages, eps_low, eps_high):
    """Eq. 5, 7 and 10 over Python lists, with two guards (a clamp at 10, ratio 1 without tokens): (loss, its
    gradient for each logp, each log s_i)."""
    loss, gradient, log_ratios = 0., [0.] * len(logp), []
    for i, advantage in enumerate(advantages):
        tokens = [t for t in range(len(logp)) if trajectory[t] == i]
        log_ratio = sum(logp[t] - old_logp[t] for t in tokens) / len(tokens) if tokens else 0.
        s = math.exp(min(log_ratio, 10.))
        loss -= min(s * advantage, min(max(s, 1 - eps_low), 1 + eps_high) * advantage) / len(advantages)
        too_likely = advantage > 0 and s > 1 + eps_high
        too_unlikely = advantage < 0 and s < 1 - eps_low
        for t in tokens:
            if not (too_likely or too_unlikely or log_ratio > 10.):
                gradient[t] = -s * advantage / len(tokens) / len(advantages)
        log_ratios.append(log_ratio)
    return loss, gradient, log_ratios


@st.composite
def batches(draw):
    """(logp, old_logp, trajectory, advantages, eps_low, eps_high): 1 to 5 trajectories of 0 to 6 tokens,
    shuffled. Log-ratios are on the scale of the clip, of an update, and far beyond the clamp; none is within
    1e-9 of an edge, where the gradient jumps."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    scale = draw(st.sampled_from([1e-3, .1, 1., 30.]))
    eps_low, eps_high = draw(st.sampled_from([(3e-4, 4e-4), (.2, .28), (0., 0.), (.9, 30.)]))
    trajectory = [i for i, length in enumerate(lengths) for _ in range(length)]
    draw(st.randoms(use_true_random=False)).shuffle(trajectory)
    logp = [draw(st.floats(-5, 0)) for _ in trajectory]
    old_logp = [lp - scale * draw(st.floats(-1, 1)) for lp in logp]
    advantages = [draw(st.sampled_from([0., -1.]) | st.floats(-3, 3)) for _ in lengths]
    for log_ratio in formula(logp, old_logp, trajectory, advantages, eps_low, eps_high)[2]:
        s = math.exp(min(log_ratio, 10.))
        assume(all(edge == s == 1 or abs(s - edge) > 1e-9 for edge in (1 - eps_low, 1 + eps_high)))
        assume(abs(log_ratio - 10) > 1e-9)
    indices = torch.tensor(trajectory, dtype=torch.long)
    return f64(logp), f64(old_logp), indices, f64(advantages), eps_low, eps_high


# ---- advantages --------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.floats(-10, 10).map(lambda r: round(r, 3)),
                          st.sampled_from([0, 1, 2, -5, 10**12])), min_size=1, max_size=24))
@example([(.1, 0)] * 3 + [(5., 1), (6., 1), (7., 2)])  # (.1 + .1 + .1) / 3 != .1
def test_advantages_equal_eq_6_and_a_group_of_equal_rewards_has_exactly_zero(rows):
    """Guards NOTES 5.3: a biased std, one over the whole batch, experts or tasks that leak into each other's
    normalisation, another baseline than the group's mean, groups taken to be contiguous or numbered from
    0. The unbiased std of one reward (nan), and rounding errors divided by 1e-6."""
    got = group_advantages(f64([r for r, _ in rows]), torch.tensor([g for _, g in rows]))
    for (reward, group), advantage in zip(rows, got.tolist()):
        r = [other for other, g in rows if g == group]
        if len(set(r)) == 1:
            assert advantage == 0
        else:
            mean = sum(r) / len(r)
            std = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
            assert advantage == pytest.approx((reward - mean) / (std + 1e-6), rel=1e-10, abs=1e-10)


# ---- the loss ----------------------------------------------------------------------------------------------

@settings(max_examples=200)
@given(batches())
def test_loss_gradient_and_coefficients_equal_the_written_formula_to_1e_12(batch):
    """Guards every wrong sign, mean, clip, length and denominator: a mean over tokens, a ratio or a 1/|y| for
    each turn (NOTES 5.2, 5.7); a clip on both sides, or with >= for >; neutral trajectories that count as
    clipped; 0/0 where a trajectory has no tokens: it counts in B. The coefficients are the gradient of each
    token's log-prob, so any split over microbatches and ranks gives the whole gradient (NOTES 5.6)."""
    logp, *_, advantages, low, high = batch
    loss, metrics = gspo_loss(logp.requires_grad_(), *batch[1:])
    gradient, = torch.autograd.grad(loss, logp)
    coefficients, same = gspo_coefficients(*batch)
    assert not coefficients.requires_grad and same == metrics
    plain = [part.tolist() for part in batch[:4]]
    want_loss, want_gradient, log_ratios = formula(*plain, low, high)
    assert loss.item() == close(want_loss)
    assert gradient.tolist() == close(want_gradient)
    assert (-coefficients / len(advantages)).tolist() == close(want_gradient)
    s = [math.exp(min(x, 10.)) for x in log_ratios]
    clipped = [a > 0 and ratio > 1 + high or a < 0 and ratio < 1 - low for a, ratio in zip(plain[3], s)]
    assert metrics == close({"clip_frac": sum(clipped) / len(s), "ratio_mean": sum(s) / len(s),
                             "ratio_max": max(s), "abs_log_ratio": sum(map(abs, log_ratios)) / len(s)})


# ---- mistakes ----------------------------------------------------------------------------------------------

GOOD = dict(logp=f64([-1., -2.]), old_logp=f64([-1., -2.]), trajectory=torch.tensor([0, 1]),
            advantages=f64([1., -1.]))


@pytest.mark.parametrize("change", [
    dict(eps_low=-.1), dict(eps_low=1.), dict(eps_low=math.nan), dict(eps_high=math.nan),
    dict(old_logp=f64([-1.])), dict(trajectory=torch.tensor([0])), dict(trajectory=torch.tensor([0, 2])),
    dict(trajectory=torch.tensor([-1, 0])), dict(advantages=f64([[1.], [-1.]])),
    dict(advantages=f64([1., -1.]).requires_grad_()), dict(old_logp=f64([-1., -2.]).requires_grad_()),
    dict(logp=GOOD["logp"].bfloat16(), old_logp=GOOD["logp"].bfloat16()),
    dict(logp=f64([]), old_logp=f64([]), trajectory=f64([]).long(), advantages=f64([])),
    dict(logp=f64([math.nan, -2.])), dict(logp=f64([-1., -math.inf]), old_logp=f64([-1., -math.inf]))])
def test_a_users_mistake_is_a_value_error(change):
    """Guards: a wrong shape broadcast into a plausible number; logp - logp, which trains nothing and says
    nothing; a broken model that shows as a gradient of zero: clamp's backward makes 0 of nan."""
    for function in (gspo_loss, gspo_coefficients):
        function(**GOOD)
        with pytest.raises(ValueError):
            function(**{**GOOD, **change})


@pytest.mark.parametrize("bad", [f64([1.]), f64([1., math.nan]), f64([1., math.inf]), torch.tensor([1, 0])])
def test_rewards_that_cannot_be_normalised_are_a_value_error(bad):
    """Guards: a nan reward that becomes the advantage of its whole group; integer rewards truncated to 0."""
    with pytest.raises(ValueError):
        group_advantages(bad, torch.tensor([0, 0]))
