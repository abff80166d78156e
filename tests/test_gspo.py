"""Claims about gspo.py. Everything is float64, so that a difference of 1e-12 is a bug and not noise.

The reference below is the paper's formula, with gspo.py's two guards, in plain Python floats, one loop for
every sum. It shares no line, no tensor and no autograd with what it checks.
"""

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gspo import group_advantages, gspo_coefficients, gspo_loss

steady = settings(max_examples=60)

EPS = [(3e-4, 4e-4), (.2, .28), (0., 0.), (.9, 30.)]


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(a, b, tolerance=1e-12) -> bool:
    """Equal to 1e-12 of the largest number in b, or of 1."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    return a.numel() == 0 or float((a - b).abs().max()) <= tolerance * max(1., float(b.abs().max()))


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
    eps_low, eps_high = draw(st.sampled_from(EPS))
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


def loss_and_gradient(logp, old_logp, trajectory, advantages, *eps):
    leaf = logp.clone().requires_grad_()
    loss, metrics = gspo_loss(leaf, old_logp, trajectory, advantages, *eps)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


# ---- advantages --------------------------------------------------------------------------------------------

@steady
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
            assert close(advantage, (reward - mean) / (std + 1e-6), 1e-10)


# ---- the ratio ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("log_ratio", [-math.inf, -1e30, -2000., 2000., 1e30, math.inf])
@pytest.mark.parametrize("advantage", [-1., 0., 1.])
def test_huge_log_ratios_give_finite_losses_and_gradients(log_ratio, advantage):
    """Guards against exp that overflows to inf, and inf * 0 = nan if the advantage is 0 (OpenRLHF #1293)."""
    one = torch.tensor
    batch = one([log_ratio]), torch.zeros(1), one([0]), one([advantage]), .2, math.inf
    loss, gradient, metrics = loss_and_gradient(*batch)
    assert loss.isfinite() and gradient.isfinite().all() and close(-gspo_coefficients(*batch)[0], gradient)
    assert 0 <= metrics["ratio_mean"] == metrics["ratio_max"] < 22027


# ---- the loss ----------------------------------------------------------------------------------------------

@settings(steady, max_examples=200)
@given(batches())
def test_loss_and_gradient_equal_the_written_formula_to_1e_12(batch):
    """Guards every wrong sign, mean, clip, length and denominator: a mean over tokens (NOTES 5.7); a ratio,
    or a 1/|y|, for each turn (NOTES 5.2); a trajectory's tokens taken to be neighbours; a clip on both sides,
    eps_low and eps_high exchanged; >= for > in the clip, which with eps 0 would stop learning before it
    begins; neutral trajectories that move the policy or count as clipped; 0/0, or ratio 0, where a trajectory
    has no tokens: it counts in B."""
    loss, gradient, metrics = loss_and_gradient(*batch)
    coefficients, same = gspo_coefficients(*batch)
    assert close(-coefficients / len(batch[3]), gradient) and same == metrics
    plain = [part.tolist() if torch.is_tensor(part) else part for part in batch]
    want_loss, want_gradient, log_ratios = formula(*plain)
    assert close(loss, want_loss)
    assert close(gradient, want_gradient)
    s, (*_, advantages, low, high) = [math.exp(min(x, 10.)) for x in log_ratios], plain
    clipped = [a > 0 and ratio > 1 + high or a < 0 and ratio < 1 - low for a, ratio in zip(advantages, s)]
    names = "ratio_mean", "ratio_max", "abs_log_ratio", "clip_frac"
    assert close([metrics[name] for name in names],
                 [sum(s) / len(s), max(s), sum(map(abs, log_ratios)) / len(s), sum(clipped) / len(s)])


# ---- in pieces ---------------------------------------------------------------------------------------------

@settings(steady, max_examples=150)
@given(batches(), st.randoms(use_true_random=False))
def test_any_split_over_microbatches_and_ranks_gives_the_gradient_of_the_whole(batch, rng):
    """Guards NOTES 5.6: denominators per microbatch or rank, the |y_i| of a piece. The log-probs come from
    three shared weights; every token goes to a random microbatch, so trajectories are cut, and some
    microbatches are empty. The ranks' gradients are summed, as distributed.shard tells FSDP: a rank is one
    more microbatch."""
    logp, old_logp, trajectory, advantages, *eps = batch
    features = f64([[rng.uniform(-1, 1) for _ in range(3)] for _ in logp]).reshape(-1, 3)
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    score = lambda tokens: logp[tokens] + features[tokens] @ theta

    everything = torch.arange(len(logp))
    loss, _ = gspo_loss(score(everything), old_logp, trajectory, advantages, *eps)
    want, = torch.autograd.grad(loss, theta)

    coefficients, _ = gspo_coefficients(score(everything), old_logp, trajectory, advantages, *eps)
    assert not coefficients.requires_grad
    place = torch.tensor([rng.randrange(8) for _ in logp], dtype=torch.long)
    for microbatch in range(8):
        tokens = everything[place == microbatch]
        (-(coefficients[tokens] * score(tokens)).sum() / len(advantages)).backward()
    assert close(theta.grad, want)


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
