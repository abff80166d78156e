"""Which way to batch is fastest here? Machines are shared and noisy: compare rates of one run (the last
column).

    python -m bench.bench_lm [MODEL_FOLDER]       # default tiny/base; one thread

Forward and backward of the same turns (prompts of 60 to 180 tokens, completions of 10 to 30), in every
combination of layout, attention and type. Layouts: right-padded batches of like length, as lm.microbatches
makes them; a packed row with restarting positions, for which transformers builds a block-diagonal mask.
"""

import itertools
import random
import sys
import time

import torch

import lm


def packed_loss(model: lm.LM, pairs: list[lm.Pair]) -> torch.Tensor:
    ids, mask, where = lm.pack(pairs, torch.device("cpu"))  # (1, T)
    with model.autocast():
        out = model.model.model(input_ids=ids, position_ids=where["position_ids"], use_cache=False)
        at = mask[0, 1:].nonzero().squeeze(1)  # (N,)
        logits = model.model.lm_head(out.last_hidden_state[0, at])  # (N, V)
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, at + 1])


def padded_loss(model: lm.LM, pairs: list[lm.Pair]) -> torch.Tensor:
    return -lm.token_logps(model, pairs)[0].mean()


def rate(model: lm.LM, loss, pairs: list[lm.Pair]) -> float:
    """Tokens a second of CPU time."""
    lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    start = time.process_time()
    for batch in lm.microbatches(lengths, 1536):
        loss(model, [pairs[i] for i in batch]).backward()
        model.model.zero_grad()
    return sum(lengths) / (time.process_time() - start)


def main():
    torch.set_num_threads(1)
    model = lm.load(sys.argv[1] if len(sys.argv) > 1 else "tiny/base")
    model.model.train()
    rng, pairs = random.Random(0), []
    for _ in range(60):
        prompt = [rng.randrange(300, 5000) for _ in range(rng.randrange(60, 180))]
        pairs.append((prompt, [rng.randrange(300, 5000) for _ in range(rng.randrange(10, 30))]))
    rates = {}
    settings = list(itertools.product((padded_loss, packed_loss), ("eager", "sdpa"), ("bfloat16", "float32")))
    for loss, attention, compute in settings * 2:  # twice: neighbours only slow us down, so the better counts
        model.model.set_attn_implementation(attention)
        model.compute = getattr(torch, compute)
        name = f"{loss.__name__.removesuffix('_loss')} {attention} {compute}"
        rates[name] = max(rates.get(name, 0), rate(model, loss, pairs))
    best = max(rates.values())
    for name, found in sorted(rates.items(), key=lambda item: -item[1]):
        print(f"{name:24s} {found:8.0f} tokens/s of CPU time   {found / best:.2f}")


if __name__ == "__main__":
    main()
