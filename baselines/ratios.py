"""Other ratios in the place of GSPO's, through train.py's loop: GRPO's and PPO's, REINFORCE's, DAPO's,
GSPO-token's. Pure functions of log-probs, as gspo.py's, each handed to train.train as its `loss`.

    python -m baselines.ratios grpo      # or dapo, reinforce, gspo-token; everything else as train.py laptop
    python -m baselines.ratios grpo --real-fraction 1 --expert-fraction 0 --out runs/laptop/webagent-r1

That is WebAgent-R1's (arXiv 2505.16421): GRPO over whole episodes on real pages, paid by the page. Its prompt
has a placeholder for each old page; here a prompt has the page now, and past actions in words.

y_i is a rollout, A_i its advantage (Eq. 6, gspo.py), w_it = exp(logp_it - old_logp_it) the ratio of a token,
and m(w, A) = min(w A, clip(w, 1 - eps_low, 1 + eps_high) A). Of B rollouts the loss is -J:

    GRPO        J = 1/B sum_i 1/|y_i| sum_t m(w_it, A_i)                 (arXiv 2402.03300, Eq. 3)
    DAPO        J = 1/sum_i |y_i| sum_i sum_t m(w_it, A_i)               (arXiv 2503.14476, Eq. 8)
    REINFORCE   J = 1/B sum_i A_i sum_t logp_it                          (Williams 1992; no ratio, no clip)
    GSPO-token  J = 1/B sum_i 1/|y_i| sum_t m(s_it, A_it)                (arXiv 2507.18071, Eq. 13)
                    s_it = sg[s_i] pi(y_it) / sg[pi(y_it)]; sg: no gradient through it     (Eq. 14)

m(w, A) with a symmetric clip is PPO's (arXiv 1707.06347, Eq. 7), whose advantages are a critic's; here they
are the group's, so PPO and GRPO are one row. With one advantage a rollout GSPO-token is GSPO (its section
4.3). Each function gives the factor of every token's d logp, times B, as gspo.gspo_coefficients.

Where we differ from the papers and from released code, and why
- GRPO's KL term is left out, as in TRL's default (beta 0): the rows differ in the ratio alone.
- DAPO drops groups whose rewards are equal, as train.py does for all; that it then samples until a batch is
  full (its section 3.2; verl's recipe: at most 10 batches) is left out: an update here has fewer groups. Its
  reward for overlong answers is left out: an answer that is cut off has reward 0 here anyway.
- DAPO's Eq. 8 divides by the tokens of one group. verl's token-mean and TRL's "bnpo" divide by those of a
  minibatch, as here; TRL's "dapo" by the mean number of tokens of a batch's minibatches.
- REINFORCE's baseline is the group's mean, and A_i is divided by the group's deviation, as in Eq. 6. RLOO
  (arXiv 2402.14740) has the mean of the others of the group and no deviation. It has train.py's minibatches
  too: from the second on its samples are of older weights, and nothing corrects that. That is what the ratio
  is for.

Shapes: B rollouts of a minibatch, N tokens (the agent's, of all B rollouts, end to end, any order).
"""

from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

import distributed
import gspo
import train
from config import TRAIN, Train, chosen

Factors = tuple[Tensor, dict[str, float]]  # of every token's d logp (N,); metrics

# ---- train.Loss: arguments and metrics as gspo.gspo_coefficients; eps: eps_low, eps_high -------------------

def grpo(logp: Tensor, old_logp: Tensor, rollout: Tensor, advantages: Tensor, *eps: float) -> Factors:
    """w_it A_i [not clipped] / |y_i|."""
    factor, metrics = by_token(logp, old_logp, rollout, advantages, *eps)
    _, lengths = gspo.mean_log_ratio(logp, old_logp, rollout, len(advantages))  # (B,)
    return factor / lengths[rollout], metrics  # (N,)  GRPO's Eq. 3


def dapo(logp: Tensor, old_logp: Tensor, rollout: Tensor, advantages: Tensor, *eps: float) -> Factors:
    """w_it A_i [not clipped] B / N: every token of the minibatch weighs the same, a long rollout more."""
    factor, metrics = by_token(logp, old_logp, rollout, advantages, *eps)
    return factor * len(advantages) / max(1, len(factor)), metrics  # (N,)  DAPO's Eq. 8


def reinforce(logp: Tensor, old_logp: Tensor, rollout: Tensor, advantages: Tensor, *eps: float) -> Factors:
    """A_i: neither a ratio nor a clip. The metrics say how far the policy moved, as for GRPO."""
    _, metrics = by_token(logp, old_logp, rollout, advantages, *eps)
    return advantages[rollout], metrics | {"clip_frac": 0.0}  # (N,)


def gspo_token(logp: Tensor, old_logp: Tensor, rollout: Tensor, advantages: Tensor, *eps: float) -> Factors:
    """s_i A_it [not clipped] / |y_i|, where all A_it are the rollout's advantage."""
    _, metrics = gspo.gspo_coefficients(logp, old_logp, rollout, advantages, *eps)
    log_ratio, lengths = gspo.mean_log_ratio(logp, old_logp, rollout, len(advantages))  # (B,), (B,)
    # Eq. 14: the value of s_it is s_i, and so is its gradient's factor: d s_it = s_i d logp_it.
    s = log_ratio[rollout]  # (N,)
    factor, _ = by_token(s, torch.zeros_like(s), rollout, advantages, *eps)
    return factor / lengths[rollout], metrics  # (N,)  GSPO's Eq. 13


def by_token(logp: Tensor, old_logp: Tensor, rollout: Tensor, advantages: Tensor, *eps: float) -> Factors:
    """w_it A_i [not clipped] (N,), and metrics: gspo's, where each token is a rollout of its own."""
    token = torch.arange(len(logp), device=logp.device)  # (N,)
    return gspo.gspo_coefficients(logp, old_logp, token, advantages[rollout], *eps)


# ---- the command -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Ratio(Train):
    """train.py's settings, with another loss."""
    # The command's first word. A checkpoint has it: no other ratio goes on there.
    ratio: tyro.conf.Suppress[str] = ""


LOSSES = {"grpo": grpo, "reinforce": reinforce, "dapo": dapo, "gspo-token": gspo_token}
# GRPO has PPO's .2, DAPO its paper's section 4.1, GSPO-token those of train.py.
EPS = {"grpo": (0.2, 0.2), "reinforce": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo-token": (0.03, 0.04)}
PRESETS = {name: Ratio(**vars(TRAIN["laptop"]) | dict(ratio=name, out=f"runs/laptop/{name}", eps_low=low,
                                                      eps_high=high)) for name, (low, high) in EPS.items()}


if __name__ == "__main__":
    config = chosen(PRESETS)
    learn = lambda: train.train(config, loss=LOSSES[config.ratio])
    distributed.command(learn, alone=config.sampler == "vllm")
