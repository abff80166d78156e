"""Random token ids, and texts."""

import random

from hypothesis import settings

import lm

models = settings.get_profile("models")


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids, none of them special."""
    return [rng.randrange(4, 600) for _ in range(count)]


def pairs_of(rng: random.Random, lengths) -> list[lm.Pair]:
    """Random (prompt, completion) of the given lengths."""
    return [(random_ids(rng, prompt), random_ids(rng, completion)) for prompt, completion in lengths]


def prompts_of(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [random_ids(rng, length) for length in lengths]


def texts(model: lm.LM, pairs: list[lm.Pair]) -> list[tuple[str, str]]:
    """Prompts and completions, read by a person."""
    return [(model.tokenizer.decode(prompt), model.tokenizer.decode(ids)) for prompt, ids in pairs]
