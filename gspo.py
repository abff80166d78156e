"""GSPO, the loss: Group Sequence Policy Optimization (Zheng et al. 2025, arXiv 2507.18071). Pure functions of
log-probs.

Several trajectories are rolled out for one task, from one start: a group. Each trajectory i has one reward
r_i and one importance ratio s_i:

    A_i = (r_i - mean(r)) / std(r)                      mean and std over the group of i             Eq. 6
    s_i = exp( 1/|y_i| sum_t [logp_t - old_logp_t] )    t over the tokens of i; |y_i|: how many      Eq. 7
    J   = 1/B sum_i min( s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i )    loss = -J            Eq. 5
    dJ  = 1/B sum_i s_i A_i [not clipped] 1/|y_i| sum_t d logp_t                                     Eq. 10

Clipping drops whole trajectories, never single tokens: i gets no gradient where A_i > 0 and s_i > 1 +
eps_high, and where A_i < 0 and s_i < 1 - eps_low. GSPO-token (Eq. 13-14) allows one advantage a token; with
one a trajectory, as here, it has the value and gradient of Eq. 5.

train.py calls `group_advantages` (Eq. 6) once a batch, and `gspo_coefficients` (Eq. 10) once a minibatch. At
8B the turns of one trajectory do not fit one microbatch: the gradient is added up in pieces. `gspo_loss`
(Eq. 5), one graph over whole trajectories, is the definition, which the tests hold the pieces to.

What the caller has to get right, because no formula can
- old_logp comes from the weights that sampled. A batch of dreams feeds at least two minibatches (the paper:
  four). With one, s_i is exactly 1 and the clip never acts: what remains is REINFORCE with a group baseline,
  each trajectory's term divided by std(r) |y_i| (NOTES 4.2).
- old_logp comes from the trainer, scored in the very microbatches in which the new log-probs are, never from
  the sampling engine. vLLM's log-probs alone move s_i by about 7e-3 and would clip nearly everything; even
  two packings in bf16 differ by about the clip's width (NOTES 4.3, 4.4).
- The tokens are those of completions, over all turns, the end-of-turn token included: the agent's own, in an
  expert's row the recorded ones. Page, prompt and padding tokens are not passed in at all: they would enter
  |y_i| too. Turns with different contexts are one sequence if they share an index.
- logp has the sampler's temperature and no top-k or top-p, on both sides.

Where we differ from the paper, and why
- std is unbiased and 1e-6 is added to it; the paper writes std(r). A group of equal rewards has no signal:
  exactly 0.
- The mean log-ratio is clamped at 10 before exp, as in verl: a trajectory that exploded stays finite, and
  gets no gradient.
- |y_i| counts several turns, where the paper's y_i is one response. 1/|y_i|: a token of a short trajectory
  weighs more, in success and failure.
- 1/B averages over a minibatch's trajectories on all ranks, groups without variance excluded. The paper
  averages within a group, then over the groups. With groups of one size, none excluded, that is the same.
- No KL term, which the paper leaves out "for brevity" and its author sets to 0 (verl #2775), and no entropy
  bonus.

Shapes: K kept trajectories of a batch, B of a minibatch, N completion tokens (of all B trajectories, end to
end, in any order; no padding).
"""

import torch
from torch import Tensor

LOG_RATIO_MAX = 10.0  # verl's; e^10 = 22026, far outside any clip, far inside float32
STD_FLOOR = 1e-6  # only matters when rewards of a group are almost, but not quite, equal


def group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """How much better than its own group each trajectory did, in standard deviations of that group.

    rewards (K,) float; groups (K,) long, the same number = the same group, any numbers in any order. Returns
    (K,). Call it with whole groups. ValueError: shapes or dtypes that disagree, a reward that is not finite.

    >>> group_advantages(torch.tensor([1., 0., 1., 1., 5.]), torch.tensor([7, 7, 3, 3, 9]))
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000,  0.0000])
    """
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError("rewards and groups must both be (K,), not "
                         f"{tuple(rewards.shape)} and {tuple(groups.shape)}")
    if not rewards.is_floating_point() or groups.dtype != torch.long:
        raise ValueError(f"rewards must be float and groups long, not {rewards.dtype} and {groups.dtype}")
    if not rewards.isfinite().all():
        raise ValueError("a reward is nan or inf; it would spread to its whole group")
    advantages = torch.zeros_like(rewards)  # (K,)
    for group in groups.unique():
        members = groups == group  # (K,)
        r = rewards[members]  # (members,)
        # Equal rewards, and a group of one, stay at exactly 0. The formula would not do: the mean of three
        # 0.1 is not 0.1, and that rounding error divided by 1e-6 is a gradient. (A single reward has no
        # unbiased std at all.)
        if r.min() != r.max():
            advantages[members] = (r - r.mean()) / (r.std() + STD_FLOOR)  # Eq. 6
    return advantages


def gspo_loss(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float = 3e-4,
              eps_high: float = 4e-4) -> tuple[Tensor, dict[str, float]]:
    """The definition: the loss of B whole trajectories in one graph, to minimise; and what to log.

    logp (N,) with gradient, old_logp (N,) without: natural logs. trajectory (N,) long: the token's
    trajectory, an index into advantages (B,). eps: the paper's section 5.1, for responses of thousands of
    tokens; the shorter the trajectories, the larger the noise of s_i, and the larger eps has to be. Returns
    (0-d loss, metrics); see `_ratios`. ValueError: a bad eps, shapes or dtypes that disagree, a trajectory
    index out of range, nan, gradients through old_logp or advantages, logp in 16 bits (bf16 rounds a log-prob
    of -1.x by up to 4e-3; the clip is at 3e-4).

    >>> logp, old_logp = torch.tensor([.2, .0, .1, .69315]), torch.zeros(4)
    >>> trajectory, advantages = torch.tensor([0, 0, 0, 1]), torch.tensor([-1., 1.])
    >>> loss, metrics = gspo_loss(logp, old_logp, trajectory, advantages, eps_low=.2, eps_high=.2)
    >>> loss  # -(-1.1052 + 1.2) / 2: trajectory 1 is good, but was made 2 times as likely already
    tensor(-0.0474)
    >>> metrics["clip_frac"]
    0.5
    """
    ratio, _, _, metrics = _ratios(logp, old_logp, trajectory, advantages, eps_low, eps_high)  # (B,)
    clipped_ratio = ratio.clamp(1 - eps_low, 1 + eps_high)  # (B,)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)  # (B,)
    # One term a trajectory, so each weighs 1/B. The common bug is a mean over tokens here: long trajectories
    # would weigh more.
    loss = -objective.sum() / len(advantages)  # Eq. 5
    return loss, metrics


@torch.no_grad()
def gspo_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor,
                      eps_low: float = 3e-4, eps_high: float = 4e-4) -> tuple[Tensor, dict[str, float]]:
    """The factor of every token's d logp in Eq. 10, so that the gradient of `gspo_loss` can be taken in
    pieces of any size.

    Arguments, metrics and errors as in `gspo_loss`, but logp needs no gradients. It is of WHOLE trajectories,
    with the weights as they are before this minibatch's update. (For the first minibatch of a batch that is
    old_logp itself, and the pass is saved.) Returns (coefficients (N,), metrics):
    coefficients[t] = s_i A_i [not clipped] / |y_i| for a token t of trajectory i. They do not contain 1/B.

        coefficients, metrics = gspo_coefficients(...)              # (N,), once a minibatch
        for tokens in microbatches:                                 # any split, also inside a trajectory
            logp = token_logps(tokens)                              # now with gradients; same weights
            loss = -(coefficients[tokens] * logp).sum() / B         # B: of the minibatch, on ALL ranks
            loss.backward()
        optimizer.step()

    The sum of these gradients is the gradient of gspo_loss. The sum of these losses is not its value, and
    means nothing.

    >>> logp, old_logp = torch.tensor([.2, .0, .1, .69315]), torch.zeros(4)
    >>> trajectory, advantages = torch.tensor([0, 0, 0, 1]), torch.tensor([-1., 1.])
    >>> gspo_coefficients(logp, old_logp, trajectory, advantages, eps_low=.2, eps_high=.2)[0]  # -1.1052 / 3
    tensor([-0.3684, -0.3684, -0.3684,  0.0000])
    """
    ratio, lengths, constant, metrics = _ratios(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    coefficients = torch.where(constant, 0.0, ratio * advantages / lengths)  # (B,)
    return coefficients[trajectory], metrics  # (N,)  Eq. 10


# ---- what the two share ------------------------------------------------------------------------------------


def mean_log_ratio(logp: Tensor, old_logp: Tensor, trajectory: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(log s_i (B,) before its clamp, |y_i| (B,), 1 where a trajectory has no tokens); B = count.

    The mean over tokens, not the sum: it keeps the ratios of long and short trajectories in one range, so
    that one clip fits all.
    """
    zeros = logp.new_zeros(count)
    # Without a token the mean is 0/0. An empty product is 1 under both policies, so the ratio is 1. Such a
    # trajectory pulls at nothing, but counts in B, as it counted in its group's mean.
    lengths = zeros.index_add(0, trajectory, torch.ones_like(old_logp)).clamp(min=1)  # (B,)
    log_ratio = zeros.index_add(0, trajectory, logp - old_logp) / lengths  # (B,)
    if log_ratio.isnan().any():  # stop here: the backward of clamp turns nan into a gradient of 0
        raise ValueError("nan in logp - old_logp: a broken model, or a token that both policies give "
                         "probability 0")
    return log_ratio, lengths


def _ratios(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
            eps_high: float) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """(s_i (B,), |y_i| (B,), where Eq. 5 is constant in s_i (B,), metrics).

    Metrics: clip_frac, ratio_mean, ratio_max, and abs_log_ratio = the mean of |log s_i| before any clip or
    clamp, the drift from the old policy.
    """
    _check(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    log_ratio, lengths = mean_log_ratio(logp, old_logp, trajectory, len(advantages))  # (B,), (B,)
    ratio = log_ratio.clamp(max=LOG_RATIO_MAX).exp()  # (B,)  Eq. 7
    # Where min() takes the clipped branch. One-sided: a bad trajectory that became likelier is still pushed
    # down.
    clipped = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))  # (B,)
    assert ratio.shape == clipped.shape == advantages.shape
    s, drift = ratio.detach(), log_ratio.detach().abs()  # (B,), (B,)
    metrics = {"clip_frac": float(clipped.sum()) / len(s), "ratio_mean": float(s.sum()) / len(s),
               "ratio_max": float(s.max()), "abs_log_ratio": float(drift.sum()) / len(s)}
    # The ratio that stands at its own clamp is constant too.
    return ratio, lengths, clipped | (log_ratio > LOG_RATIO_MAX), metrics


def _check(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
           eps_high: float) -> None:
    """The user's mistakes."""
    if not (0 <= eps_low < 1 and eps_high >= 0):  # not the other way round: nan has to fail too
        raise ValueError(f"need 0 <= eps_low < 1 and eps_high >= 0, not {eps_low} and {eps_high}")
    if advantages.ndim != 1 or advantages.requires_grad or not advantages.is_floating_point():
        raise ValueError("advantages must be (B,) float without gradients, not "
                         f"{tuple(advantages.shape)} {advantages.dtype}")
    if len(advantages) == 0:
        raise ValueError("no trajectories: no group has a signal; skip the update")
    if logp.ndim != 1 or not logp.shape == old_logp.shape == trajectory.shape:
        raise ValueError("logp, old_logp and trajectory must all be (N,), not "
                         f"{tuple(logp.shape)}, {tuple(old_logp.shape)} and {tuple(trajectory.shape)}")
    floats = logp.dtype in (torch.float32, torch.float64) and old_logp.dtype == logp.dtype
    if not floats or trajectory.dtype != torch.long:
        raise ValueError("logp and old_logp must both be float32 (or float64) and trajectory long, not "
                         f"{logp.dtype}, {old_logp.dtype} and {trajectory.dtype}")
    if old_logp.requires_grad:
        raise ValueError("old_logp carries gradients; when it is logp itself they cancel and nothing is "
                         "learnt: old_logp.detach()")
    if len(trajectory) and not 0 <= int(trajectory.min()) <= int(trajectory.max()) < len(advantages):
        raise ValueError(f"trajectory has indices outside [0, {len(advantages)})")
