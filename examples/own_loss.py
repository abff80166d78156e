"""A loss of your own: a pure function, handed in, not patched in.

    python -m examples.own_loss                # checks it, then learns with it; writes runs/own_loss/

The loss is SPO's (Simple Policy Optimization, arXiv 2401.16025), with GSPO's ratio of a whole trajectory:

    J = 1/B sum_i [ s_i A_i - |A_i| / (2 eps) (s_i - 1)^2 ]          loss = -J

GSPO drops a trajectory once its ratio s_i has left the clip. Here a square pulls it back instead: J is
largest at s_i = 1 + eps where A_i > 0, and at s_i = 1 - eps where A_i < 0. s_i and A_i are gspo.py's.

train.py wants no loss but its gradient, as a factor of every token's d logp, because at 8B the graph of a
whole trajectory does not fit (Eq. 10 in gspo.py). It is found in two steps:

    dJ/ds_i = A_i - |A_i| / eps (s_i - 1)          ds_i = s_i 1/|y_i| sum_t d logp_t          (by Eq. 7)

Shapes: B trajectories of a minibatch, N tokens of all of them, end to end.
"""

import torch
from torch import Tensor

import gspo
from examples import own_env


def spo_loss(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
             eps_high: float) -> Tensor:
    """The definition, in one graph. Arguments as gspo.gspo_loss has them. Only the check needs it."""
    ratio = gspo.mean_log_ratio(logp, old_logp, trajectory, len(advantages))[0].exp()  # (B,)  Eq. 7
    eps = torch.where(advantages > 0, eps_high, eps_low)  # (B,)
    return -(ratio * advantages - advantages.abs() / (2 * eps) * (ratio - 1) ** 2).mean()


@torch.no_grad()
def spo_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
                     eps_high: float) -> tuple[Tensor, dict[str, float]]:
    """(the factor (N,) of every token's d logp, without 1/B; what is logged), as gspo.gspo_coefficients,
    which looks the arguments over, and has the figures to log."""
    _, metrics = gspo.gspo_coefficients(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    log_ratio, lengths = gspo.mean_log_ratio(logp, old_logp, trajectory, len(advantages))  # (B,), (B,)
    ratio, eps = log_ratio.exp(), torch.where(advantages > 0, eps_high, eps_low)  # (B,), (B,)
    slope = advantages - advantages.abs() / eps * (ratio - 1)  # (B,)  dJ/ds_i, without 1/B
    return (slope * ratio / lengths)[trajectory], metrics  # (N,)


def largest_error(seed: int = 0) -> float:
    """The largest difference, over random tokens, between the coefficients and what autograd makes of the
    definition. A wrong derivative is a new loss's commonest mistake, and it still learns a little."""
    rng = torch.Generator().manual_seed(seed)
    trajectory = torch.tensor([0, 2, 1, 0, 2, 2, 1, 0, 3])  # (N,) of four trajectories, in any order
    old_logp = -torch.rand(9, generator=rng, dtype=torch.float64)  # (N,)
    logp = old_logp + 0.2 * torch.randn(9, generator=rng, dtype=torch.float64)  # (N,) after some steps
    advantages = torch.tensor([1.2, -0.4, -1.3, 0.5], dtype=torch.float64)  # (B,)
    given = old_logp, trajectory, advantages, 0.03, 0.04
    [wanted] = torch.autograd.grad(spo_loss(logp.requires_grad_(), *given), logp)  # (N,) d loss / d logp_t
    coefficients, _ = spo_coefficients(logp.detach(), *given)  # (N,)
    return float((wanted + coefficients / len(advantages)).abs().max())  # the loss is -J


if __name__ == "__main__":
    error = largest_error()
    print(f"the coefficients and autograd differ by at most {error:.0e}")
    assert error < 1e-9, "the derivative is wrong: do not train with it"
    own_env.learn(own_env.prepare("runs/own_loss"), spo_coefficients)
