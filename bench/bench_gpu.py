"""What only a GPU can tell: is attention right on it, how fast an update and sampling are at an 8B's shapes.

    python -m bench.bench_gpu [--layers 12] [--tokens 8192 16384]

The 8B is Llama-3.1-8B's config with random weights and as many of its 32 layers as fit: float32 weights and
Adam, FSDP2 over one rank and NCCL, layers recomputed, the head on completions alone, as train.py has it. A
rate counts the tokens of all prompts and completions once, though each is scored, scored again, and learned.
`of_peak` counts the matrix products that these passes need over those of a large bf16 product on this card.
"""

import gc
import json
import random
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import tyro
from transformers import LlamaConfig

import distributed
import gspo
import lm
import train
from config import TRAIN
from policy import Rollout, Turn

LLAMA_8B = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


def seconds(work, repeat: int = 1) -> float:
    """Of one call, after one that is not counted."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeat


def attention() -> dict:
    """The largest error of causal_attention and of its gradients beside float64, over the largest value."""
    device, found = distributed.device(), {}
    for dtype in (torch.float32, torch.bfloat16):
        for length in (2, 7, 127, 129, 1023, 2049):
            torch.manual_seed(length)
            given = [torch.randn(2, heads, length, 64, device=device, dtype=dtype) for heads in (8, 2, 2)]
            pull = torch.randn(2, length, 8, 64, device=device, dtype=dtype)
            sides = []
            for of in (torch.float64, dtype):
                leaves = [x.to(of, copy=True).requires_grad_() for x in given]
                if of == dtype:
                    out = lm.causal_attention(*leaves, 1 / 8)
                else:
                    q, k, v = (x.repeat_interleave(8 // x.shape[1], 1) for x in leaves)
                    later = torch.ones(length, length, device=device).triu(1).bool()
                    scores = (q @ k.transpose(2, 3) / 8).masked_fill(later, -torch.inf)
                    out = (scores.softmax(-1) @ v).transpose(1, 2)
                out.backward(pull.to(of))
                sides.append([out.detach(), *(x.grad for x in leaves)])
            errors = [((ours - exact).abs().max() / exact.abs().max()).item() for exact, ours in zip(*sides)]
            found[str(dtype)[6:]] = max([found.get(str(dtype)[6:], 0.0), *errors])
    return found


def big(layers: int, sharded: bool) -> lm.LM:
    """An 8B's shape with random weights; as train.py holds it where `sharded`, else frozen, to sample."""
    config = LlamaConfig(num_hidden_layers=layers, **LLAMA_8B)
    model = lm.build(config, torch.float32 if sharded else torch.bfloat16, "trie", "8B of random weights")
    if sharded:
        distributed.shard(model)
    model.to_empty(device=distributed.device())
    model.apply(model._init_weights)
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids: "", init_kwargs={})  # it never ends
    return lm.LM(model.eval(), tokenizer, 65536, torch.bfloat16, sharded)


def update(layers: int, tokens: int, prompt: int, peak: float) -> dict:
    """An update of 16 rollouts of one turn each: pages of `prompt` tokens, answers of 500."""
    gc.collect()  # the model before this one
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rng, model = random.Random(0), big(layers, sharded=True)
    draw = lambda n: [rng.randrange(LLAMA_8B["vocab_size"]) for _ in range(n)]
    rollouts = [Rollout(None, [], [Turn(draw(prompt - rng.randrange(prompt // 4)), draw(500), [])])
                for _ in range(16)]
    advantages = torch.tensor([1.0, -1.0] * 8)
    config = replace(TRAIN["paper"], tokens=tokens)
    optimizer = torch.optim.AdamW(model.net.parameters(), config.lr, (0.9, 0.98), fused=True)
    metrics = {}

    def once():
        # Without a clip: all are learned from, as in the worst update.
        loss = lambda *args: gspo.gspo_coefficients(*args[:4], 0.9, 9.0)
        metrics.update(train.update(model, optimizer, rollouts, advantages, config, random.Random(0), loss))
    took = seconds(once)
    read = sum(len(turn.prompt_ids) + len(turn.completion_ids) for r in rollouts for turn in r.turns)
    weights = sum(p.numel() for n, p in model.net.named_parameters() if "layers" in n)
    # Passes of a token: scored before the first step, again at 3 of 4, forward, recomputed, backward (two).
    products = 2 * weights * read * (1 + 0.75 + 1 + 1 + 2)
    # And of attention, of whose scores the causal half is needed. The head, on few tokens, is not counted.
    pairs = sum((len(t.prompt_ids) + len(t.completion_ids)) ** 2 / 2 for r in rollouts for t in r.turns)
    products += 4 * layers * LLAMA_8B["hidden_size"] * pairs * (1 + 0.75 + 1 + 1 + 2.5)
    return {"layers": layers, "microbatch_tokens": tokens, "tokens": read, "seconds": round(took, 2),
            "tokens_per_s": round(read / took), "of_peak": round(products / took / peak, 3),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1), "metrics": metrics}


def sampling(model: lm.LM, prompt: int = 1024, new: int = 64) -> dict:
    """Tokens a second of LM.generate, all rows in one batch, each behind a prompt of its own."""
    rng, found = random.Random(0), {}
    model.tokenizer.eos_token_id = None  # no answer ends before its limit
    for count in (32, 128):
        torch.cuda.reset_peak_memory_stats()
        prompts = [[rng.randrange(300, 40000) for _ in range(prompt)] for _ in range(count)]
        took = seconds(partial(model.generate, prompts, new, 1.0, list(range(count)), 10**9))
        found[count] = {"tokens_per_s": round(count * new / took), "seconds": round(took, 2),
                        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}
    return found


def main(layers: int = 12, tokens: tuple[int, ...] = (8192, 16384), prompt: int = 7500):
    """Each line is one measurement."""
    if not torch.cuda.is_available():
        sys.exit("bench_gpu: there is no GPU here")
    distributed.init()
    show = lambda name, value: print(json.dumps({name: value}), flush=True)
    show("card", [torch.cuda.get_device_name(), torch.__version__, lm.flash_attn_func is not None])
    a, b = (torch.randn(8192, 8192, device=distributed.device(), dtype=torch.bfloat16) for _ in "ab")
    peak = 2 * 8192**3 / seconds(lambda: a @ b, 20)
    show("bf16 TFLOP/s", round(peak / 1e12))
    show("attention error", attention())
    show(f"sampling 8B of {layers} layers", sampling(big(layers, sharded=False)))
    for most in tokens:
        show("update", update(layers, most, prompt, peak))


if __name__ == "__main__":
    tyro.cli(main)
