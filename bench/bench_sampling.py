"""How much faster sampling is where a prompt that rows share is read once (lm.Trie, lm.Reader).

    python -m bench.bench_sampling            # after `python lm.py`: some minutes of one core

Groups of equal prompts, as groups of dreams begin; rows that share nothing (another first token each, by the
same code); transformers' generate. CPU seconds, the median of interleaved runs; compare those of one call.
"""

import copy
import random
import statistics
import time

import torch
import tyro

import lm


def main(model: str = "runs/smollm2", groups: int = 6, rows: int = 8, prompt: int = 200, new: int = 32,
         repeat: int = 3):
    torch.set_num_threads(1)
    ours, rng = lm.freeze(lm.load(model)), random.Random(0)
    ours.tokenizer.eos_token = None  # no token ends a turn
    firsts = [[rng.randrange(1000, 40_000) for _ in range(prompt)] for _ in range(groups)]
    shared = [ids for ids in firsts for _ in range(rows)]
    apart = [[1000 + k, *ids[1:]] for k, ids in enumerate(shared)]
    sample = lambda asked: ours.generate(asked, new, 1.0, list(range(len(asked))))
    theirs = copy.deepcopy(ours.net).to(ours.compute)
    theirs.set_attn_implementation("sdpa")  # transformers' default
    ids = torch.tensor(shared, device=theirs.device)
    how = dict(attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=new,
               min_new_tokens=new, eos_token_id=None, pad_token_id=0)  # no filter of tokens: at its best
    ways = {"each prompt once": lambda: sample(shared), "each row alone": lambda: sample(apart),
            "transformers' generate": lambda: theirs.generate(ids, **how)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(repeat + 1):
        for name, work in ways.items():
            began = time.process_time()
            work()
            if k:  # the first is a warm-up
                found[name].append(time.process_time() - began)
    print(f"{groups} x {rows} x {new} tokens after {prompt}, {ours.compute}")
    for name, times in found.items():
        ratio = statistics.median(times) / statistics.median(found["each prompt once"])
        print(f"  {name:28} {statistics.median(times):8.2f} s   x {ratio:.2f}", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
