"""Which way to batch is fastest here? Ratios within one run (machines are shared and noisy), so read the last column.

    python bench/bench_lm.py [MODEL_FOLDER]       # default tiny/base; one thread

Forward and backward of the same turns (prompt 60 to 180 tokens, completion 10 to 30): right-padded batches of like length, as lm.py plans them,
against one packed row with restarting positions (transformers then builds a block-diagonal mask); eager against fused attention; bf16
against float32.
"""

import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lm


def packed_loss(model: lm.LM, pairs: list[lm.Pair]) -> torch.Tensor:
    ids = torch.tensor([[token for prompt, completion in pairs for token in prompt + completion]])
    positions = torch.tensor([[k for prompt, completion in pairs for k in range(len(prompt) + len(completion))]])
    mask = torch.tensor([flag for prompt, completion in pairs for flag in [0] * len(prompt) + [1] * len(completion)])
    with model.autocast():
        hidden = model.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        at = mask[1:].nonzero().squeeze(1)
        logits = model.model.lm_head(hidden[at])
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, at + 1])


def main():
    torch.set_num_threads(1)
    model = lm.load(sys.argv[1] if len(sys.argv) > 1 else "tiny/base")
    model.model.train()
    rng = random.Random(0)
    pairs = [([rng.randrange(300, 5000) for _ in range(rng.randrange(60, 180))], [rng.randrange(300, 5000) for _ in range(rng.randrange(10, 30))]) for _ in range(60)]
    lengths = [len(p) + len(c) for p, c in pairs]
    rates = {}
    for _ in range(2):  # twice, the better one counts: a neighbour can only slow us down
        for layout in ("padded", "packed"):
            for attention in ("eager", "sdpa"):
                for compute in (torch.bfloat16, torch.float32):
                    model.model.set_attn_implementation(attention)
                    model.compute = compute
                    start = time.process_time()
                    for batch in lm.plan(lengths, 1536):
                        chosen = [pairs[i] for i in batch]
                        loss = packed_loss(model, chosen) if layout == "packed" else -lm.token_logps(model, chosen)[0].mean()
                        loss.backward()
                        model.model.zero_grad()
                    key = (layout, attention, str(compute).removeprefix("torch."))
                    rates[key] = max(rates.get(key, 0), sum(lengths) / (time.process_time() - start))
    best = max(rates.values())
    for key, rate in sorted(rates.items(), key=lambda item: -item[1]):
        print(f"{' '.join(key):24s} {rate:8.0f} tokens/s of CPU time   {rate / best:.2f}")


if __name__ == "__main__":
    main()
