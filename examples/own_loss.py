"""A loss of your own: a pure function, handed in, not patched in.

    python -m examples.own_loss                # checks it, then learns with it; writes runs/own_loss/

The loss is GRPO's (arXiv 2402.03300, Eq. 3), which has a ratio for each token where GSPO has one for each
trajectory; without its KL term, as in TRL's default:

    J = 1/B sum_i 1/|y_i| sum_t min( w_t A_i, clip(w_t, 1 - eps_low, 1 + eps_high) A_i )        loss = -J
    w_t = exp(logp_t - old_logp_t)                  A_i is gspo.py's (Eq. 6); GRPO's clip is .2 on both sides

train.py takes the gradient, not the loss: one factor for each token's d logp, because at 8B the graph of a
whole trajectory does not fit (Eq. 10 in gspo.py). Here it is w_t A_i [not clipped] / |y_i|.

Shapes: B trajectories of a minibatch, N tokens of all of them, end to end.
"""

from dataclasses import replace

import torch
from torch import Tensor

from examples import own_env


def grpo_loss(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
              eps_high: float) -> Tensor:
    """The definition, in one graph. Arguments as gspo.gspo_loss has them. Only the check needs it."""
    ratio, a = (logp - old_logp).exp(), advantages[trajectory]  # (N,), (N,)
    objective = torch.minimum(ratio * a, ratio.clamp(1 - eps_low, 1 + eps_high) * a)  # (N,)
    means = [objective[trajectory == i].mean() for i in range(len(advantages))]
    return -sum(means) / len(means)


@torch.no_grad()
def grpo_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
                      eps_high: float) -> tuple[Tensor, dict[str, float]]:
    """(the factor (N,) of every token's d logp, without 1/B; what is logged), as gspo.gspo_coefficients."""
    ratio, a = (logp - old_logp).exp(), advantages[trajectory]  # (N,), (N,)
    clipped = (a > 0) & (ratio > 1 + eps_high) | (a < 0) & (ratio < 1 - eps_low)  # (N,)
    lengths = torch.bincount(trajectory, minlength=len(advantages))[trajectory]  # (N,)  |y_i|
    metrics = {"clip_frac": float(clipped.float().mean()), "ratio_max": float(ratio.max())}
    return torch.where(clipped, 0.0, ratio * a / lengths), metrics


def largest_error(seed: int = 0) -> float:
    """The largest difference, over random tokens, between the coefficients and what autograd makes of the
    definition. A wrong derivative is a new loss's commonest mistake, and it still learns a little."""
    rng = torch.Generator().manual_seed(seed)
    trajectory = torch.tensor([0, 2, 1, 0, 2, 2, 1, 0, 3])  # (N,) of four trajectories, in any order
    old_logp = -torch.rand(9, generator=rng, dtype=torch.float64)  # (N,)
    logp = old_logp + 0.2 * torch.randn(9, generator=rng, dtype=torch.float64)  # (N,) after some steps
    advantages = torch.tensor([1.2, -0.4, -1.3, 0.5], dtype=torch.float64)  # (B,)
    given = old_logp, trajectory, advantages, 0.1, 0.2
    [wanted] = torch.autograd.grad(grpo_loss(logp.requires_grad_(), *given), logp)  # (N,) d loss / d logp_t
    coefficients, _ = grpo_coefficients(logp.detach(), *given)  # (N,)
    return float((wanted + coefficients / len(advantages)).abs().max())  # the loss is -J


if __name__ == "__main__":
    error = largest_error()
    print(f"the coefficients and autograd differ by at most {error:.0e}")
    assert error < 1e-9, "the derivative is wrong: do not train with it"
    own_env.learn(replace(own_env.prepare("runs/own_loss"), eps_low=0.2, eps_high=0.2), grpo_coefficients)
