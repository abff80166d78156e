"""How much faster sampling is where a prompt that rows share is read once (lm.Trie, lm.Reader).

    python lm.py                              # runs/smollm2
    python -m bench.bench_sampling            # some minutes of one core
    python -m bench.bench_sampling --groups 1 --rows 2 --prompt 40 --new 4 --repeat 1        # a try

Groups of equal prompts, as groups of dreams begin; rows that share nothing (another first token each, by the
same code); and transformers' generate. Nobody ends a turn here, so that all write as much. CPU seconds, the
median of interleaved runs; compare those of one call only.
"""

import copy
import random
import statistics
import time

import torch
import tyro

import lm


def generate(net, asked: list[list[int]], new: int) -> None:
    """transformers' own loop, at its best: weights in the type of matrix products, no filter of tokens."""
    ids = torch.tensor(asked, device=net.device)
    with torch.no_grad():
        net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                     max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0)


def main(model: str = "runs/smollm2", groups: int = 6, rows: int = 8, prompt: int = 200, new: int = 32,
         repeat: int = 3):
    torch.set_num_threads(1)
    ours, rng = lm.freeze(lm.load(model)), random.Random(0)
    ours.tokenizer.eos_token = None  # no token ends a turn
    theirs = copy.deepcopy(ours.net).to(ours.compute)
    theirs.set_attn_implementation("sdpa")  # transformers' default
    firsts = [[rng.randrange(1000, 40_000) for _ in range(prompt)] for _ in range(groups)]
    shared = [ids for ids in firsts for _ in range(rows)]
    apart = [[1000 + k, *ids[1:]] for k, ids in enumerate(shared)]
    sample = lambda asked: ours.generate(asked, new, 1.0, list(range(len(asked))))
    ways = {"each beginning once": lambda: sample(shared), "each row alone": lambda: sample(apart),
            "transformers' generate": lambda: generate(theirs, shared, new)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(repeat + 1):  # the first is a warm-up
        for name, work in ways.items():
            began = time.process_time()
            work()
            found[name] += [time.process_time() - began] * (k > 0)
    medians = {name: statistics.median(times) for name, times in found.items()}
    print(f"{groups} x {rows} x {new} tokens behind {prompt}, {ours.compute}")
    for name, its in medians.items():
        print(f"  {name:28} {its:8.2f} s   x {its / medians['each beginning once']:.2f}", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
