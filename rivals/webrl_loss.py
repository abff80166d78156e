"""WebRL's arithmetic, as pure functions of log-probs and states: the actor's loss as published and as
released, the critic, the advantages, what is replayed (Qi et al. 2024, arXiv 2411.02337).

    L(pi) = E[ (beta log(pi(a|s) / pi_ref(a|s)) - A(s, a))^2 ]     pi_ref: the policy before the phase  Eq. 6
    dL    = -2 beta E[ (A - beta log(pi / pi_ref)) d log pi ]                                           Eq. 7
    L(V)  = -E[ r_T log V(s) + (1 - r_T) log(1 - V(s)) ]                                                Eq. 8
    A_t   = lambda (r_t + V(s_t+1) - V(s_t)) + (1 - lambda) (r_T - V(s_t))      lambda .5               Eq. 9
    replayed where 1 / .95 <= exp(-1/n sum_i log pi_ref(token_i)) <= 1 / .5                       (sec. 2.1)

A rule is what update.update takes in the place of gspo.gspo_coefficients. A turn stands there in the place of
a trajectory, and old_logp is pi_ref's: it is scored before the first step of a phase.

The released code (THUDM/WebRL, bf1f02e, without a licence: only read) has another actor. It learns from
"good" steps alone: with x the mean token log-ratio, d/dx = -clip(1 - beta x, 0, 1), beta = 5 where pi_ref's
mean token probability (geometric) is >= .8, else 1. Good: V(s') - V(s) - .05 + r_T + R >= 0, with R the sum
of .9^k r_T over the steps that are left; so all of a success, and of a failure where V rises by .05. Its V is
the smaller of two heads'.

Where we differ from the paper, and why
- V is a linear head on the policy's own trunk, which it does not move. Theirs is a second model of 8B. A head
  of some hundred weights knows some hundred outcomes by heart, and every A would be 0: a trajectory's V comes
  from a head that was fitted on the other half of the phase. That is half of 64 tries: in two phases that
  were looked at its cross-entropy on the other half was .749, a coin's .693.

Shapes: B trajectories, S turns (steps) of them, N tokens that the agent wrote, W model width.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import gspo

# ---- the losses: pure functions ----------------------------------------------------------------------------


def advantages(values: Tensor, trajectory: Tensor, outcomes: Tensor, lam: float = 0.5) -> Tensor:
    """A (S,) of Eq. 9. values (S,); trajectory (S,) long: whose turn, the turns of one in their order and
    side by side; outcomes (B,) are r_T. Behind the last turn V is 0 (Eq. 3), also where the turns ran out:
    nothing can be earned there.

    >>> advantages(torch.tensor([.2, .6]), torch.tensor([0, 0]), torch.tensor([1.]))
    tensor([0.6000, 0.4000])
    """
    last = torch.cat([trajectory[1:] != trajectory[:-1], torch.ones(1, dtype=torch.bool)])  # (S,)
    following = torch.where(last, 0.0, values.roll(-1))  # V(s_t+1)
    final = outcomes[trajectory]  # r_T
    reward = torch.where(last, final, 0.0)  # r_t
    return lam * (reward + following - values) + (1 - lam) * (final - values)  # Eq. 9


def good_steps(values: Tensor, trajectory: Tensor, outcomes: Tensor) -> Tensor:
    """1 (S,) for the steps that the released actor learns from, else 0; arguments as in advantages.

    Of a success r_T + R >= 2, and V' - V >= -1: all of its steps. Of a failure both are 0: where V rises by
    .05. It reads V' of the last step off the same page, so V does not rise there.
    """
    last = torch.cat([trajectory[1:] != trajectory[:-1], torch.ones(1, dtype=torch.bool)])  # (S,)
    rise = torch.where(last, 0.0, values.roll(-1) - values)
    return ((outcomes[trajectory] > 0) | (rise >= 0.05)).to(values.dtype)


def actor_loss(logp: Tensor, ref_logp: Tensor, turn: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Eq. 6, the definition, in one graph: logp (N,) with gradient, ref_logp (N,), turn (N,) long, advantages
    (S,). log pi(a|s) is the sum over the tokens of a."""
    log_ratio = logp.new_zeros(len(advantages)).index_add(0, turn, logp - ref_logp)  # (S,)
    return ((beta * log_ratio - advantages) ** 2).mean()  # Eq. 6


def released_loss(logp: Tensor, ref_logp: Tensor, turn: Tensor, good: Tensor) -> Tensor:
    """The released actor's loss, up to a constant for each turn: 1/beta times the smooth L1 distance of
    beta x from 1 where x >= 0, and its tangent below. good (S,) of good_steps."""
    x, _ = gspo.mean_log_ratio(logp, ref_logp, turn, len(good))  # (S,)
    beta = _released_beta(ref_logp, turn, len(good))
    return (good * ((1 - beta * x.clamp(min=0)).clamp(min=0) ** 2 / (2 * beta) - x.clamp(max=0))).mean()


def _released_beta(ref_logp: Tensor, turn: Tensor, turns: int) -> Tensor:
    mean, _ = gspo.mean_log_ratio(ref_logp, torch.zeros_like(ref_logp), turn, turns)
    return torch.where(mean.exp() >= 0.8, 5.0, 1.0)  # (S,)


@torch.no_grad()
def actor_rule(logp: Tensor, ref_logp: Tensor, turn: Tensor, advantages: Tensor, *_eps: float,
               beta: float) -> tuple[Tensor, dict[str, float]]:
    """The factor of each token's d log pi in minus the gradient of actor_loss, times S: a rule of
    update.update, where old_logp is pi_ref's and a turn stands in the place of a trajectory."""
    log_ratio = logp.new_zeros(len(advantages)).index_add(0, turn, logp - ref_logp)  # (S,)
    factor = 2 * beta * (advantages - beta * log_ratio)  # (S,)  Eq. 7
    return factor[turn], _measure(logp, ref_logp, turn, factor)


@torch.no_grad()
def released_rule(logp: Tensor, ref_logp: Tensor, turn: Tensor, good: Tensor,
                  *_eps: float) -> tuple[Tensor, dict[str, float]]:
    """The same for released_loss: clip(1 - beta x, 0, 1), over the turn's tokens."""
    x, lengths = gspo.mean_log_ratio(logp, ref_logp, turn, len(good))  # (S,), (S,)
    factor = good * (1 - _released_beta(ref_logp, turn, len(good)) * x).clamp(0, 1) / lengths  # (S,)
    return factor[turn], _measure(logp, ref_logp, turn, factor)


@torch.no_grad()
def sft_rule(logp: Tensor, ref_logp: Tensor, turn: Tensor, success: Tensor,
             *_eps: float) -> tuple[Tensor, dict[str, float]]:
    """Without the KL term: the mean of -log p over the tokens of successes (success (S,) is 1 or 0)."""
    factor = success * len(success) / success[turn].sum().clamp(min=1)  # (S,)
    return factor[turn], _measure(logp, ref_logp, turn, factor)


def _measure(logp: Tensor, ref_logp: Tensor, turn: Tensor, factor: Tensor) -> dict[str, float]:
    """update.update's metrics; clip_frac: the turns without a gradient."""
    x, _ = gspo.mean_log_ratio(logp, ref_logp, turn, len(factor))  # (S,)
    ratio = x.clamp(max=gspo.LOG_RATIO_MAX).exp()
    return {"clip_frac": float((factor == 0).float().mean()), "ratio_mean": float(ratio.mean()),
            "ratio_max": float(ratio.max()), "abs_log_ratio": float(x.abs().mean())}


# ---- the critic --------------------------------------------------------------------------------------------

# Of the head's weights, on states of unit variance, over all turns.
RIDGE = 60.0


def fit(states: Tensor, outcomes: Tensor) -> "Critic":
    """The head with the least cross-entropy (Eq. 8). states (S, W), outcomes (S,) of 0 and 1.

    A success and a failure that nobody saw are added at the mean state: where all outcomes are equal, V is
    near them and not at infinity (Laplace's rule).
    """
    mean, scale = states.new_zeros(states.shape[1]), states.new_ones(states.shape[1])
    if len(states):
        mean, scale = states.mean(0), states.std(0, correction=0)
        # A direction in which these states hardly differ: other states may, and would be off the scale.
        scale = scale.clamp(min=max(0.1 * float(scale.mean()), 1e-6))
    inputs = torch.cat([(states - mean) / scale, states.new_zeros(2, states.shape[1])]).double()
    targets = torch.cat([outcomes, outcomes.new_tensor([0.0, 1.0])]).double()
    weights = torch.zeros(states.shape[1] + 1, dtype=torch.float64, requires_grad=True)  # the last: the bias
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ weights[:-1] + weights[-1]
        value = F.binary_cross_entropy_with_logits(logits, targets)  # Eq. 8
        value = value + RIDGE / len(inputs) / 2 * weights[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return Critic(mean, scale, weights.detach().float())


@dataclass
class Critic:
    """V(s) on the policy's trunk."""

    mean: Tensor  # (W,)
    scale: Tensor  # (W,)
    weights: Tensor  # (W + 1,)

    def values(self, states: Tensor) -> Tensor:
        """(S, W) -> V (S,)"""
        return torch.sigmoid(((states - self.mean) / self.scale) @ self.weights[:-1] + self.weights[-1])


def unseen_values(states: Tensor, trajectory: Tensor, outcomes: Tensor) -> Tensor:
    """V (S,) of each turn by a critic that was fitted on the other half of the trajectories."""
    values, final = torch.zeros(len(states)), outcomes[trajectory]
    for half in (0, 1):
        mine = trajectory % 2 == half
        values[mine] = fit(states[~mine], final[~mine]).values(states[mine])
    return values


# ---- the replay buffer -------------------------------------------------------------------------------------

FAMILIAR, STRANGE = 1 / 0.95, 1 / 0.5  # perplexities


def replayed(perplexities: Sequence[float], most: int, rng: random.Random) -> list[int]:
    """Which turns of the buffer are learned from once more: at most so many, drawn from those that the last
    actor finds neither too familiar nor too strange.

    >>> replayed([1.01, 1.2, 1.9, 2.1], 5, random.Random(0))
    [1, 2]
    """
    fitting = [k for k, value in enumerate(perplexities) if FAMILIAR <= value <= STRANGE]
    return sorted(rng.sample(fitting, min(most, len(fitting))))
