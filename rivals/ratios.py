"""Other ratios in the place of GSPO's, through train.py's loop: GRPO's and PPO's, REINFORCE's, DAPO's,
GSPO-token's. Pure functions of log-probs, as gspo.py's. The first batch of dreams is the dreamer's own; then
each agent dreams its own. On real pages, with --world real, GRPO's is WebAgent-R1's (arXiv 2505.16421).

    python -m rivals.ratios grpo      # or dapo, reinforce, gspo-token; everything else as train.py laptop

y_i is a trajectory, A_i its advantage, w_it = exp(logp_it - old_logp_it) the ratio of one token, and
m(w, A) = min(w A, clip(w, 1 - eps_low, 1 + eps_high) A). Of B trajectories the loss is -J:

    GRPO        J = 1/B sum_i 1/|y_i| sum_t m(w_it, A_i)                 (arXiv 2402.03300, Eq. 3)
    DAPO        J = 1/sum_i |y_i| sum_i sum_t m(w_it, A_i)               (arXiv 2503.14476, Eq. 8)
    REINFORCE   J = 1/B sum_i A_i sum_t logp_it                          (Williams 1992; no ratio, no clip)
                    A_i = r_i - mean of the rewards of the others of its group    (RLOO, arXiv 2402.14740)
    GSPO-token  J = 1/B sum_i 1/|y_i| sum_t m(s_it, A_it)                (arXiv 2507.18071, Eq. 13)
                    s_it = sg[s_i] pi(y_it) / sg[pi(y_it)]; sg: no gradient through it     (Eq. 14)

m(w, A) with a symmetric clip is PPO's (arXiv 1707.06347, Eq. 7), whose advantages are a critic's; here they
are the group's, so PPO and GRPO are one row. With one advantage a trajectory GSPO-token is GSPO (its paper's
section 4.3; a test says so): its row can differ from the dreamer's by rounding only.

train.py takes a gradient in pieces, so each function gives the factor of every token's d logp, times B
(gspo.gspo_coefficients). DAPO also draws again (`redraw`): batches are dreamed until as many groups as an
update wants have something to teach (its section 3.2), DRAWS batches at most.

Where we differ from the papers and from released code, and why
- GRPO's KL term is left out, as in TRL's default (beta 0) and in the recipe: the rows differ in the ratio
  alone. Its reward is one a trajectory, so all tokens share A_i (its section 4.1.2).
- DAPO's reward for overlong answers is left out: an answer that is cut off has reward 0 here anyway. verl's
  recipe draws at most 10 batches (max_num_gen_batches) and then raises an error; here the update then has
  fewer groups.
- DAPO's Eq. 8 divides by the tokens of one group. verl's token-mean and TRL's "bnpo" divide by those of a
  minibatch, as here; TRL's "dapo" by the mean number of tokens of a batch's minibatches.
- REINFORCE has train.py's minibatches too. From the second on its samples are of older weights, and nothing
  corrects that: this is what the ratio is for.
- Dropped dreams stay out of their group's mean, as in gspo.group_advantages.

Shapes: B trajectories of a minibatch, N tokens (the agent's, of all B trajectories, end to end, any order).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import dream
import gspo
import lm
import recipe
import train
from gspo import LOG_RATIO_MAX

Coefficients = tuple[Tensor, dict[str, float]]
DRAWS = 10  # verl's recipe of DAPO: max_num_gen_batches

# ---- coefficients: arguments, metrics and errors as gspo.gspo_coefficients ---------------------------------


@torch.no_grad()
def grpo_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor,
                      eps_low: float, eps_high: float) -> Coefficients:
    """w_it A_i [not clipped] / |y_i|.

    >>> logp, old_logp = torch.tensor([.1, .5, -.1]), torch.zeros(3)
    >>> coefficients, metrics = grpo_coefficients(
    ...     logp, old_logp, torch.tensor([0, 0, 1]), torch.tensor([1., -1.]), .2, .2)
    >>> coefficients  # e^.1 / 2; e^.5 is clipped; -e^-.1
    tensor([ 0.5526,  0.0000, -0.9048])
    """
    factor, metrics = _token_level(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    _, lengths = gspo.mean_log_ratio(logp, old_logp, trajectory, len(advantages))  # (B,)
    return factor / lengths[trajectory], metrics  # (N,)  GRPO's Eq. 3


@torch.no_grad()
def dapo_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor,
                      eps_low: float, eps_high: float) -> Coefficients:
    """w_it A_i [not clipped] B / N: every token of the minibatch weighs the same, a long trajectory more."""
    factor, metrics = _token_level(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    return factor * len(advantages) / max(1, len(factor)), metrics  # (N,)  DAPO's Eq. 8


@torch.no_grad()
def reinforce_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor,
                           eps_low: float, eps_high: float) -> Coefficients:
    """A_i: neither a ratio nor a clip. The metrics say how far the policy moved, as for GRPO."""
    _, metrics = _token_level(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    return advantages[trajectory], metrics | {"clip_frac": 0.0}  # (N,)


@torch.no_grad()
def gspo_token_coefficients(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor,
                            eps_low: float, eps_high: float, of_tokens: Tensor | None = None) -> Coefficients:
    """s_i A_it [not clipped] / |y_i|. `of_tokens` (N,): the A_it, by default the trajectory's advantage."""
    _, metrics = gspo.gspo_coefficients(logp, old_logp, trajectory, advantages, eps_low, eps_high)
    log_ratio, lengths = gspo.mean_log_ratio(logp, old_logp, trajectory, len(advantages))  # (B,), (B,)
    # Eq. 14: the value of s_it is s_i, and so is its gradient's factor: d s_it = s_i d logp_it.
    of_tokens = advantages[trajectory] if of_tokens is None else of_tokens  # (N,)
    factor = _clipped_ratio(log_ratio[trajectory], of_tokens, eps_low, eps_high)
    return factor / lengths[trajectory], metrics  # (N,)  GSPO's Eq. 13


def _token_level(logp: Tensor, old_logp: Tensor, trajectory: Tensor, advantages: Tensor, eps_low: float,
                 eps_high: float) -> Coefficients:
    """w_it A_i [not clipped] (N,), and gspo's metrics, over tokens."""
    gspo.gspo_coefficients(logp, old_logp, trajectory, advantages, eps_low, eps_high)  # for its checks
    log_ratio, of_tokens = logp - old_logp, advantages[trajectory]  # (N,), (N,)
    factor = _clipped_ratio(log_ratio, of_tokens, eps_low, eps_high)  # (N,)
    ratio = log_ratio.clamp(max=LOG_RATIO_MAX).exp()
    count, clipped = max(1, len(ratio)), (factor == 0) & (of_tokens != 0)
    return factor, {"clip_frac": float(clipped.sum()) / count, "ratio_mean": float(ratio.sum()) / count,
                    "ratio_max": float(ratio.max()) if len(ratio) else 1.0,
                    "abs_log_ratio": float(log_ratio.abs().sum()) / count}


def _clipped_ratio(log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """d m(w, A) / d log w (N,): w A, and 0 where min() takes the clipped branch."""
    ratio = log_ratio.clamp(max=LOG_RATIO_MAX).exp()
    clipped = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
    return torch.where(clipped | (log_ratio > LOG_RATIO_MAX), 0.0, ratio * advantages)


# ---- advantages and batches --------------------------------------------------------------------------------


def others_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i minus the mean reward of the others of its group (B,); 0 for a group of one. Arguments as
    gspo.group_advantages.

    >>> others_baseline(torch.tensor([1., 0., 0., 5.]), torch.tensor([4, 4, 4, 9]))
    tensor([ 1.0000, -0.5000, -0.5000,  0.0000])
    """
    gspo.group_advantages(rewards, groups)  # for its checks
    same = (groups[:, None] == groups[None]).to(rewards.dtype)  # (B, B)
    count = same.sum(1)  # (B,)
    others = (same @ rewards - rewards) / (count - 1).clamp(min=1)  # (B,)
    return torch.where(count > 1, rewards - others, 0.0)


def redraw(dream_batch: Callable[[int], dream.Batch], config: dream.Config) -> dream.Batch:
    """dream_batch(0), dream_batch(1) ... until config.tasks groups have something to teach, as one batch:
    those groups, and no more, are kept. All dreams count in its metrics, and `groups` has all
    draws'."""
    batches, wanted, size = [dream_batch(0)], config.tasks, config.group
    while len(batches) < DRAWS and sum(len(set(batch.groups)) for batch in batches) < wanted:
        batches.append(dream_batch(len(batches)))
    trajectories = [trajectory for batch in batches for trajectory in batch.trajectories]
    before = [sum(len(batch.trajectories) for batch in batches[:k]) // size for k in range(len(batches))]
    rows = [(trajectory, first + group) for first, batch in zip(before, batches)
            for trajectory, group in zip(batch.kept, batch.groups)]
    chosen = sorted({group for _, group in rows})[:wanted]
    rows = [row for row in rows if row[1] in chosen]
    return dream.Batch(trajectories, [trajectory for trajectory, _ in rows], [group for _, group in rows],
                       [group for batch in batches for group in batch.useful])


class Redrawn(dream.Models):
    """Models whose batches are drawn again (redraw), each draw with other seeds."""

    def draw_and_dream(self, rng, starts, config: dream.Config, seed: tuple, *more) -> dream.Batch:
        def dream_batch(k: int) -> dream.Batch:
            return dream.Models.draw_and_dream(self, rng, starts, config, (*seed, k) if k else seed, *more)

        return redraw(dream_batch, config)


def redrawn(config: recipe.Train, files: Path) -> tuple[lm.LM, dream.Models]:
    """train.py's models, Redrawn."""
    model, models = train.load_models(config, files)
    return model, Redrawn(**vars(models))


# ---- python -m rivals.ratios -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config(recipe.Train):
    """train.py's, with another loss."""

    ratio: tyro.conf.Suppress[str] = ""
    """The command's first word. It is kept in the run's folder, so that no other ratio goes on there."""


# eps: of GRPO PPO's .2; of DAPO its paper's section 4.1.
WIDTHS = {"grpo": (0.2, 0.2), "reinforce": (0.2, 0.2), "dapo": (0.2, 0.28),
          "gspo-token": (recipe.LAPTOP.eps_low, recipe.LAPTOP.eps_high)}
RULES = {"grpo": grpo_coefficients, "reinforce": reinforce_coefficients, "dapo": dapo_coefficients,
         "gspo-token": gspo_token_coefficients}


def settings(ratio: str) -> Config:
    """The laptop's, with the clip of this ratio."""
    low, high = WIDTHS[ratio]
    return Config(**vars(recipe.LAPTOP) | {"ratio": ratio, "out": f"runs/laptop/{ratio}", "eps_low": low,
                                           "eps_high": high})


def learn(config: Config) -> None:
    """The run from its first update, or from its last checkpoint, to its last."""
    more = {"reinforce": {"advantages_of": others_baseline}, "dapo": {"load": redrawn}}.get(config.ratio, {})
    train.train(config, RULES[config.ratio], **more)


def main():
    said = {"grpo": "a ratio and a clip for each token (GRPO, PPO)", "reinforce": "no ratio and no clip",
            "dapo": "asymmetric clip, mean over tokens, redrawn groups", "gspo-token": "GSPO by tokens"}
    config = tyro.extras.overridable_config_cli({name: (said[name], settings(name)) for name in RULES})
    recipe.command(lambda: learn(config), config.sampler == "vllm")


if __name__ == "__main__":
    main()
