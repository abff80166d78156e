"""What a model gives to given completions, and what a fine-tuning did in each step."""

from collections.abc import Sequence

import torch

import lm


def own_logits(model: lm.LM, ids: Sequence[int]) -> torch.Tensor:
    """Logits (T, V) of transformers' own forward of one sequence, by eager attention."""
    net = model.net
    before = net.config._attn_implementation
    net.set_attn_implementation("eager")
    try:
        return net(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    finally:
        net.set_attn_implementation(before)


@torch.no_grad()
def score(model: lm.LM, pairs: Sequence[lm.Pair], temperature: float = 1.0,
          tokens: int = 8192) -> list[torch.Tensor]:
    """lm.token_logps of any number of sequences: a tensor (len(completion),) for each, in the order given."""
    scores: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
    for batch in lm.microbatches([len(p) + len(c) for p, c in pairs], tokens):
        logp, row = lm.token_logps(model, [pairs[i] for i in batch], temperature)  # (N,), (N,)
        for k, index in enumerate(batch):
            scores[index] = logp[row == k]
    return scores
