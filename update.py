"""GSPO steps on a batch: microbatches, old log-probs, and Eq. 10 (gspo.py) added up in pieces.

Shapes: K kept trajectories of a batch; B of a minibatch; N tokens that the agent wrote, of a minibatch.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import distributed
import gspo
import lm
import policy

Turn = tuple[int, lm.Pair, Sequence[float]]  # (its trajectory in the minibatch, the pair, a number a token)
# (logp (N,), old_logp (N,), trajectory (N,), advantages (B,), eps_low, eps_high) -> (coefficients (N,),
# metrics), as gspo.gspo_coefficients. The minibatch's loss is -1/B sum_t coefficient_t logp_t. The metrics
# are clip_frac, ratio_mean, ratio_max and abs_log_ratio.
Coefficients = Callable[..., tuple[torch.Tensor, dict[str, float]]]


@dataclass(frozen=True)
class Config:
    """How an update learns."""

    minibatches: int = 4
    """GSPO steps a batch (GSPO paper: 4)."""
    lr: float = 1e-6
    """Constant (paper: 1e-6)."""
    eps_low: float = 3e-4
    """Clip (GSPO paper, section 5.1)."""
    eps_high: float = 4e-4
    """Clip (GSPO paper, section 5.1)."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    tokens: int = 16384
    """Tokens a microbatch, padding counted."""
    sampler_gap_limit: float = 0.1
    """Stop when sampled and scored log-probs differ by more a token: a broken weight sync is near 0.2, a
    healthy one near 0.02."""

    def __post_init__(self):
        if self.minibatches < 2:
            raise ValueError("minibatches: with one GSPO step a batch every ratio is exactly 1 and nothing "
                             "is ever clipped; give at least 2")


class Minibatch:
    """Turns of one GSPO step in microbatches, dealt to the ranks, and whose they are.

    `turns` are kept in the order of the microbatches. A turn carries one number a token: the sampler's
    log-probs when it is scored, Eq. 10's coefficients when it is learned from. N tokens that the agent wrote,
    of all turns.
    """

    def __init__(self, turns: Sequence[Turn], tokens: int):
        lengths = [len(prompt) + len(completion) for _, (prompt, completion), _ in turns]
        microbatches = lm.microbatches(lengths, tokens)  # lists of indices into turns
        self.costs = [sum(lengths[i] for i in microbatch) for microbatch in microbatches]  # in tokens
        # (microbatch, weight). Weight 0: learned from by another rank, and run here to keep in step with it.
        self.mine = distributed.deal(self.costs, distributed.world_size())[distributed.rank()]
        self.microbatches = [[turns[i] for i in microbatch] for microbatch in microbatches]
        self.turns = [turn for microbatch in self.microbatches for turn in microbatch]
        self.sizes = [len(completion) for _, (_, completion), _ in self.turns]  # N of each turn
        owners = [b for b, (_, completion), _ in self.turns for _ in completion]
        self.trajectory = torch.tensor(owners, dtype=torch.long)  # (N,)

    def logps(self, index: int, model: lm.LM, temperature: float) -> torch.Tensor:
        """log pi_theta (N of this microbatch,) of microbatch `index`, with gradient."""
        return lm.token_logps(model, [pair for _, pair, _ in self.microbatches[index]], temperature)[0]

    @torch.no_grad()
    def score(self, model: lm.LM, temperature: float) -> torch.Tensor:
        """log pi_theta (N,) of all its tokens, whoever scored them, on the CPU of every rank."""
        scored = {}
        for index, weight in self.mine:
            logp = self.logps(index, model, temperature)
            if weight:
                scored[index] = logp.float().cpu()
        of_all_ranks = {index: logp for part in distributed.gather(scored) for index, logp in part.items()}
        return torch.cat([of_all_ranks[index] for index in range(len(self.microbatches))])

    def to_learn(self, coefficients: torch.Tensor, tokens: int) -> "Minibatch":
        """The turns whose coefficients (N,) are not 0, planned anew, with their coefficients. A trajectory
        that is clipped, or has no advantage, needs no backward pass."""
        pieces = coefficients.split(self.sizes)
        left = [(b, pair, piece) for (b, pair, _), piece in zip(self.turns, pieces) if piece.any()]
        return Minibatch(left, tokens)


def update(model: lm.LM, optimizer: torch.optim.Optimizer, kept: Sequence[policy.TokenTrajectory],
           advantages: torch.Tensor, config: Config, temperature: float, rng: random.Random,
           coefficients_of: Coefficients = gspo.gspo_coefficients) -> dict:
    """config.minibatches GSPO steps on one batch, which every rank holds whole. advantages (K,) belong to
    `kept`, whose turns were sampled at `temperature`. A loss of one's own is another `coefficients_of`
    (examples/).

    Returns metrics. Raises ValueError when what was sampled and what is scored are too far apart.
    """
    order = list(range(len(kept)))
    rng.shuffle(order)
    parts = [order[k :: config.minibatches] for k in range(min(config.minibatches, len(order)))]
    # Planned once: old and new log-probs come from the same microbatches. Their difference is the policy's
    # change, and not the rounding of another padding.
    minibatches = [Minibatch([(b, pair, sampled) for b, k in enumerate(part)
                              for pair, sampled in zip(kept[k].pairs, kept[k].logps)], config.tokens)
                   for part in parts]
    old_logps = [minibatch.score(model, temperature) for minibatch in minibatches]  # (N,) each
    costs = [minibatch.costs for minibatch in minibatches]  # of every pass, for `idle`
    metrics: Counter = Counter(sampler_gap=sampler_gap(minibatches, old_logps))
    if not metrics["sampler_gap"] <= config.sampler_gap_limit:  # nan is not healthy either
        raise ValueError(
            f"what was sampled and what is scored differ by {metrics['sampler_gap']:.3f} a token (limit "
            f"{config.sampler_gap_limit}; healthy: 0.02): the sampler has other weights than the trainer, or "
            "another temperature. Nothing was learned from this batch; the last checkpoint is good")

    for step, (part, minibatch, old_logp) in enumerate(zip(parts, minibatches, old_logps)):
        logp = minibatch.score(model, temperature) if step else old_logp  # (N,); equal before the first step
        coefficients, measured = coefficients_of(logp, old_logp, minibatch.trajectory, advantages[part],
                                                 config.eps_low, config.eps_high)  # (N,)
        learned = minibatch.to_learn(coefficients, config.tokens)
        # Forward, forward again, backward: 1, 1, 2.
        costs += [minibatch.costs] * (step > 0) + [learned.costs] * 4
        for index, weight in learned.mine:
            logp = learned.logps(index, model, temperature)  # (N of this microbatch,)
            coefficient = torch.cat([piece for _, _, piece in learned.microbatches[index]]).to(logp.device)
            loss = -weight * (coefficient * logp).sum() / len(part)  # Eq. 10
            loss.backward()  # the ranks' gradients are summed (distributed.shard)
        if not learned.mine:  # on no rank: all plan alike. Adam still moves, by its momentum
            distributed.zero_gradients(model.model)
        norm = distributed.clip_grad_norm(model.model, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        metrics["ratio_max"] = max(metrics["ratio_max"], measured["ratio_max"])
        for name in ("clip_frac", "ratio_mean", "abs_log_ratio"):
            metrics[name] += measured[name] / len(minibatches)
        metrics["grad_norm"] += norm / len(minibatches)
    metrics["idle"] = distributed.idle(costs, distributed.world_size())
    torch.cuda.empty_cache()  # or a server that died while we learned finds no memory; without a GPU: nothing
    return dict(metrics)


def sampler_gap(minibatches: Sequence[Minibatch], scored: Sequence[torch.Tensor]) -> float:
    """Mean |sampled - scored log-prob| of a token, over what was sampled (experts were not).

    A broken weight sync looks like 0.2, a healthy one like 0.01 (NOTES 7.5).
    """
    gaps = []
    for minibatch, logps in zip(minibatches, scored):
        for (_, _, sampled), logp in zip(minibatch.turns, logps.split(minibatch.sizes)):
            if sampled:
                gaps.append((logp - torch.tensor(sampled)).abs())
    return float(torch.cat(gaps).mean()) if gaps else 0.0
