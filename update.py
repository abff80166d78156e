"""GSPO steps on a batch: microbatches, old log-probs, and Eq. 10 (gspo.py) added up in pieces.

Shapes: K kept trajectories of a batch; B trajectories of a minibatch; N completion tokens, of all turns of a
minibatch (the agent's; in an expert's row the recorded ones).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import distributed
import gspo
import lm
import policy

# A turn: (its trajectory's index in the minibatch, the pair, the sampler's log-prob of each token). The last
# is empty for an expert's turn.
Turn = tuple[int, lm.Pair, Sequence[float]]
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
    """Learning rate, constant (paper: 1e-6)."""
    eps_low: float = 3e-4
    """The clip begins where a ratio falls below 1 minus this (GSPO paper, section 5.1)."""
    eps_high: float = 4e-4
    """The clip begins where a ratio rises above 1 plus this (GSPO paper, section 5.1)."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    tokens: int = 16384
    """Most tokens of a microbatch, padding counted. It decides memory; results change by rounding alone
    (NOTES 4.4)."""
    sampler_gap_limit: float = 0.1
    """Stop when sampled and scored log-probs differ by more than this, as a mean over tokens: a broken weight
    sync is near 0.2, a healthy one near 0.02."""

    def __post_init__(self):
        if self.minibatches < 2:
            raise ValueError("minibatches: with one GSPO step a batch every ratio is exactly 1 and nothing "
                             "is ever clipped; give at least 2")


def steps(kept: int, config: Config) -> int:
    """GSPO steps on a batch of `kept` rows.

    >>> [steps(kept, Config(minibatches=4)) for kept in (0, 3, 17, 40)]
    [0, 3, 4, 4]
    """
    return min(config.minibatches, kept)


class Minibatch:
    """The turns of one GSPO step in microbatches, which are assigned to the ranks. `turns` are kept in the
    order of the microbatches, and so are the N tokens. The argument `coefficients` has one tensor for each
    turn, the attribute one for each microbatch. Both have a number for each token."""

    def __init__(self, turns: Sequence[Turn], tokens: int, coefficients: Sequence[torch.Tensor] = ()):
        lengths = [len(prompt) + len(completion) for _, (prompt, completion), _ in turns]
        microbatches = lm.microbatches(lengths, tokens)  # lists of indices into turns
        self.costs = [sum(lengths[i] for i in microbatch) for microbatch in microbatches]  # in tokens
        # (microbatch, weight). Weight 0 marks a duplicate: all ranks run the same number of forwards, and it
        # adds no gradient.
        self.mine = distributed.assign(self.costs, distributed.world_size())[distributed.rank()]
        self.microbatches = [[turns[i] for i in microbatch] for microbatch in microbatches]
        self.turns = [turn for microbatch in self.microbatches for turn in microbatch]
        self.sizes = [len(completion) for _, (_, completion), _ in self.turns]  # tokens of each turn
        owners = [b for b, (_, completion), _ in self.turns for _ in completion]
        self.trajectory = torch.tensor(owners, dtype=torch.long)  # (N,)
        self.coefficients = [torch.cat([coefficients[i] for i in microbatch])  # (N of the microbatch,) each
                             for microbatch in microbatches if coefficients]

    def logps(self, index: int, model: lm.LM, temperature: float) -> torch.Tensor:
        """log pi_theta (N of the microbatch,) of microbatch `index`, with gradient."""
        return lm.token_logps(model, [pair for _, pair, _ in self.microbatches[index]], temperature)[0]

    @torch.no_grad()
    def score(self, model: lm.LM, temperature: float) -> torch.Tensor:
        """log pi_theta (N,) of all tokens. Each rank scores its share; every rank returns the whole, on the
        CPU."""
        scored = {}
        for index, weight in self.mine:
            logp = self.logps(index, model, temperature)
            if weight:
                scored[index] = logp.float().cpu()
        of_all_ranks = {index: logp for part in distributed.gather(scored) for index, logp in part.items()}
        return torch.cat([of_all_ranks[index] for index in range(len(self.microbatches))])

    def score_to_learn(self, model: lm.LM, temperature: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """score, and where all is one microbatch the graph that it came from, for the backward pass. (FSDP
        wants that pass at once.)"""
        if len(self.microbatches) > 1 or model.sharded:
            return self.score(model, temperature), None
        graph = self.logps(0, model, temperature)
        return graph.detach().cpu(), graph

    def to_learn(self, coefficients: torch.Tensor, tokens: int) -> "Minibatch":
        """The turns whose coefficients (N,) are not all 0, planned anew. A trajectory that is clipped, or has
        no advantage, needs no backward pass."""
        pieces = coefficients.split(self.sizes)
        left = [k for k, piece in enumerate(pieces) if piece.any()]
        return Minibatch([self.turns[k] for k in left], tokens, [pieces[k] for k in left])


def update(model: lm.LM, optimizer: torch.optim.Optimizer, kept: Sequence[policy.TokenTrajectory],
           advantages: torch.Tensor, config: Config, temperature: float, rng: random.Random,
           coefficients_of: Coefficients = gspo.gspo_coefficients) -> dict:
    """steps() GSPO steps on one batch, which every rank holds whole. advantages (K,) belong to `kept`, whose
    turns were sampled at `temperature`. To try another loss, hand in another `coefficients_of`
    (examples/own_loss.py).

    Returns metrics. Raises ValueError when what was sampled and what is scored are too far apart.
    """
    order = list(range(len(kept)))
    rng.shuffle(order)
    count = steps(len(order), config)
    parts = [order[k::count] for k in range(count)]
    # Planned once: old and new log-probs come from the same microbatches. Their difference is the policy's
    # change, and not the rounding of another padding.
    minibatches = [Minibatch([(b, pair, sampled) for b, k in enumerate(part)
                              for pair, sampled in zip(kept[k].pairs, kept[k].logps)], config.tokens)
                   for part in parts]
    old_logps = [minibatch.score(model, temperature) for minibatch in minibatches]  # (N,) each
    costs = [minibatch.costs for minibatch in minibatches]  # of every pass, for `idle`
    metrics: dict[str, float] = defaultdict(float, sampler_gap=sampler_gap(minibatches, old_logps))
    check_gap(metrics["sampler_gap"], config.sampler_gap_limit)

    for step, (part, minibatch, old_logp) in enumerate(zip(parts, minibatches, old_logps)):
        logp, graph = minibatch.score_to_learn(model, temperature) if step else (old_logp, None)  # (N,)
        coefficients, measured = coefficients_of(logp, old_logp, minibatch.trajectory, advantages[part],
                                                 config.eps_low, config.eps_high)  # (N,)
        learned = minibatch.to_learn(coefficients, config.tokens)
        # Costs in forwards. With the graph that is kept: backward, 2, over all turns. Without it: forward and
        # backward, 3, over the turns that are left.
        graph = graph if 3 * sum(learned.costs) > 2 * sum(minibatch.costs) else None
        # For `idle` alone (ranks wait for each other). They recompute layers, so learning costs 1 + 1 + 2.
        costs += [minibatch.costs] * (step > 0) + [learned.costs] * 4
        for index, weight in learned.mine:
            logp = learned.logps(index, model, temperature) if graph is None else graph
            pulls = learned.coefficients[index] if graph is None else coefficients  # (N of this microbatch,)
            loss = -weight * (pulls.to(logp.device) * logp).sum() / len(part)  # Eq. 10
            loss.backward()  # the ranks' gradients are summed (distributed.shard)
        if not learned.mine:  # then on no rank, as all plan alike. Adam still moves, by its momentum
            distributed.zero_gradients(model.model)
        norm = distributed.clip_grad_norm(model.model, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        metrics["ratio_max"] = max(metrics["ratio_max"], measured["ratio_max"])
        for name in ("clip_frac", "ratio_mean", "abs_log_ratio"):
            metrics[name] += measured[name] / len(minibatches)
        metrics["grad_norm"] += norm / len(minibatches)
    metrics["idle"] = distributed.idle(costs, distributed.world_size())
    torch.cuda.empty_cache()  # or a server that died meanwhile has no memory to restart in; no GPU: no effect
    return dict(metrics)


def check_gap(gap: float, limit: float) -> None:
    """Raises ValueError when sampled and scored log-probs are further apart."""
    if not gap <= limit:  # nan is not healthy either
        raise ValueError(
            f"what was sampled and what is scored differ by {gap:.3f} a token (limit {limit}; healthy: "
            "0.02): the sampler has other weights than the trainer, or another temperature. Nothing was "
            "learned from this batch; the last checkpoint is good")


def sampler_gap(minibatches: Sequence[Minibatch], scored: Sequence[torch.Tensor]) -> float:
    """Mean |sampled - scored log-prob| of a token, over what was sampled (experts were not).

    A broken weight sync looks like 0.2, a healthy one like 0.02 (NOTES 5.9).
    """
    gaps = []
    for minibatch, logps in zip(minibatches, scored):
        for (_, _, sampled), logp in zip(minibatch.turns, logps.split(minibatch.sizes)):
            if sampled:
                gaps.append((logp - torch.tensor(sampled)).abs())
    return float(torch.cat(gaps).mean()) if gaps else 0.0
