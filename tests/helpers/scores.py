"""Random token ids, and what a model gives to given completions."""

import random
from collections.abc import Sequence

import torch

import lm


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids, none of them special."""
    return [rng.randrange(4, 600) for _ in range(count)]


def pairs_of(rng: random.Random, lengths) -> list[lm.Pair]:
    """(prompt, completion) of the given lengths."""
    return [(random_ids(rng, prompt), random_ids(rng, completion)) for prompt, completion in lengths]


def texts(model: lm.LM, pairs: list[lm.Pair]) -> list[tuple[str, str]]:
    """Prompts and completions, read by a person."""
    return [(model.tokenizer.decode(prompt), model.tokenizer.decode(ids)) for prompt, ids in pairs]


def own_logits(model: lm.LM, ids: Sequence[int]) -> torch.Tensor:
    """Logits (T, V) of transformers' own forward of one sequence, by eager attention."""
    net = model.net
    before = net.config._attn_implementation
    net.set_attn_implementation("eager")
    logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    net.set_attn_implementation(before)
    return logits


@torch.no_grad()
def score(model: lm.LM, pairs: Sequence[lm.Pair], temperature: float = 1.0) -> Sequence[torch.Tensor]:
    """lm.token_logps: a tensor (len(completion),) for each pair."""
    return lm.token_logps(model, pairs, temperature)[0].split([len(ids) for _, ids in pairs])
