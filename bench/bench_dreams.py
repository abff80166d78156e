"""What was made cheaper, as ratios of one run: sampling and a GSPO step of SmolLM2, with what lm.py does for
it and without.

    python lm.py                              # runs/smollm2
    python -m bench.bench_dreams              # some ten minutes of one core
    python -m bench.bench_dreams --groups 1 --rows 2 --prompt 40 --new 4 --repeat 1        # a try

    sampling    each beginning read once (lm.Trie); beside every row read alone; beside transformers' generate
    GSPO step   forward and backward of these rows by lm.Trie; beside every row alone, by transformers' own
                forward

The rows are groups of equal prompts, as a group of dreams begins. Rows that share nothing have another first
token each: the same code, the same sizes. Nobody ends a turn here, so that all ways write as much. Seconds
are of the processor, the median of interleaved repetitions; compare those of one run only.
"""

import copy
import random
import statistics
import time
from collections.abc import Callable

import torch
import tyro

import gspo
import lm

Rows = list[list[int]]


def prompts(groups: int, rows: int, length: int) -> Rows:
    """`groups` times `rows` equal prompts."""
    rng = random.Random(0)
    firsts = [[rng.randrange(1000, 40_000) for _ in range(length)] for _ in range(groups)]
    return [prompt for prompt in firsts for _ in range(rows)]


def generate(net, asked: Rows, new: int) -> None:
    """transformers' own loop, at its best: weights in the type of matrix products, no filter of tokens."""
    ids = torch.tensor(asked, device=net.device)
    with torch.no_grad():
        net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                     max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0)


def own_logps(model: lm.LM, net, pairs: list[lm.Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """lm.token_logps by transformers' own forward: every row whole. Rows are of one length here, so nothing
    is padded; the head runs on the completions' places alone, as ours does."""
    ids = torch.tensor([prompt + completion for prompt, completion in pairs], device=net.device)
    new = len(pairs[0][1])
    with model.autocast():
        hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state[:, -new - 1 : -1]  # (B, new, W)
    logp = lm._head_logps(net.lm_head, hidden.flatten(0, 1), ids[:, -new:].flatten(), 1.0)
    return logp, torch.arange(len(pairs), device=net.device).repeat_interleave(new)


def step(net, pairs: list[lm.Pair], rows: int, logps: Callable) -> None:
    """Forward and backward of the loss, a group at a time."""
    for k in range(0, len(pairs), rows):
        logp, trajectory = logps(pairs[k : k + rows])
        advantages = torch.tensor([1.0 if i % 2 else -1.0 for i in range(rows)], device=logp.device)
        loss, _ = gspo.gspo_loss(logp, logp.detach(), trajectory, advantages)
        loss.backward()
    net.zero_grad()


def compare(title: str, ways: dict[str, Callable[[], None]], repeat: int) -> None:
    """Prints the seconds of each way, interleaved; once before for what is made at a first use."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(repeat + 1):
        for name, work in ways.items():
            began = time.process_time()
            work()
            found[name] += [time.process_time() - began] * (k > 0)
    print(f"\n{title}")
    medians = [statistics.median(times) for times in found.values()]
    for name, its in zip(ways, medians):
        print(f"  {name:28} {its:8.2f} s   x {its / medians[0]:.2f}", flush=True)


def main(model: str = "runs/smollm2", groups: int = 6, rows: int = 8, prompt: int = 200, new: int = 32,
         repeat: int = 3):
    torch.set_num_threads(1)
    ours = lm.load(model)
    ours.tokenizer.eos_token = None  # no token ends a turn
    theirs = copy.deepcopy(ours.net)
    theirs.set_attn_implementation("sdpa")  # transformers' default
    frozen = lm.freeze(copy.deepcopy(ours))
    sampler = copy.deepcopy(theirs).to(ours.compute)
    sample = lambda asked: frozen.generate(asked, new, 1.0, list(range(len(asked))))
    shared, rng = prompts(groups, rows, prompt), random.Random(1)
    apart = [[1000 + k, *asked[1:]] for k, asked in enumerate(shared)]
    pairs = [(asked, [rng.randrange(1000, 40_000) for _ in range(new)]) for asked in shared]
    compare(f"sampling {groups} x {rows} x {new} tokens behind {prompt}", {
        "each beginning once": lambda: sample(shared),
        "each row alone": lambda: sample(apart),
        "transformers' generate": lambda: generate(sampler, shared, new)}, repeat)
    compare("a GSPO step of these rows", {
        "each beginning once": lambda: step(ours.net, pairs, rows, lambda p: lm.token_logps(ours, p)),
        "each row alone": lambda: step(theirs, pairs, rows, lambda p: own_logps(ours, theirs, p))}, repeat)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
