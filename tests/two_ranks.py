"""Under torchrun, started by test_vllm_engine.py, with `tied` or `untied`: a tiny Llama, sharded by layer,
learns; the engines of both ranks follow."""
import json
import sys
import tempfile
from pathlib import Path

import torch
from conftest import build_tokenizer
from helpers.scores import score
from transformers import LlamaConfig, LlamaForCausalLM

import distributed
import lm
import recipe
import remote
from node import engine

torch.set_num_threads(1)


def write_models(folder, tokenizer, tied: bool):
    """A tiny Llama, whose head is its own or the embedding's, and in broken/ a folder that no server can
    serve. Rank 0 writes."""
    if distributed.rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=160,
                             max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.15,
                             pad_token_id=0, bos_token_id=None, eos_token_id=3)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "broken").mkdir()
        broken = {"model_type": "llama", "architectures": ["NoSuchModelForCausalLM"]}
        (folder / "broken" / "config.json").write_text(json.dumps(broken))
    distributed.barrier()


def main():
    distributed.init()
    folder = Path(distributed.gather(tempfile.mkdtemp())[0])  # rank 0's
    tokenizer = build_tokenizer()
    write_models(folder, tokenizer, sys.argv[1] == "tied")
    small = recipe.ServerConfig(tensor_parallel=1, kv_cache_gb=0.06)
    try:
        engine.start({"broken": (folder / "broken", (), small, 512)}, folder)
        raise AssertionError("a server of nothing")
    except remote.EngineError as error:  # on both ranks, or one would wait for ever for a server
        assert "NoSuchModelForCausalLM" in str(error), error
    model = lm.load_sharded(folder, compute=torch.float32)
    actor = engine.Engine(folder, 512, torch.float32, recipe.EngineConfig(kv_cache_gb=0.06, eager=True))
    torch.manual_seed(distributed.rank())  # the ranks' random states differ from here on, and must not matter

    # A long prompt, cached before the update; then as many prompts as the rank has, one and two: ranks sample
    # each for itself.
    shared = [4 + 7 * k % 590 for k in range(200)]
    mine = [[10 + distributed.rank(), 20, 30]] * (1 + distributed.rank())
    before = lm.sample(actor, [shared] + mine, 12, 1.0, 5)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=0.02)
    for _ in range(2):
        logp, _ = lm.token_logps(model, [(shared[:40], shared[40:80])])
        (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    actor.sync(distributed.full_tensors(model.model, torch.float32))
    after = lm.sample(actor, [shared] + mine, 12, 1.0, 5)

    assert distributed.gather(after[0].ids) == [after[0].ids] * 2, "one seed, one prompt, two samples"
    mine = [(prompt, sample.ids, sample.logps) for prompt, sample in zip([shared] + mine, after)]
    turns = [turn for share in distributed.gather(mine) for turn in share]  # a sharded model scores together
    scored = torch.cat(score(model, [(prompt, ids) for prompt, ids, _ in turns]))
    gap = (scored - torch.tensor([logp for *_, logps in turns for logp in logps])).abs().max().item()
    moved = float("inf")
    if before[0].ids == after[0].ids:
        first = len(after[0].ids)
        moved = (scored[:first] - torch.tensor(before[0].logps)).abs().max().item()
    print(json.dumps({"rank": distributed.rank(), "gap": gap, "moved": moved}), file=sys.stderr)
    assert gap < 1e-4 and moved > 0.1, (gap, moved)
    actor.close()
    distributed.finish()
    print("both ends met", flush=True)


if __name__ == "__main__":
    main()
