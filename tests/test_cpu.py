"""Claims about tiny/cpu.py: a Llama that is read by hand reads as transformers does."""
import copy
import random

import pytest
import torch
from conftest import tiny_lm
from helpers.scores import score
from helpers.tokens import pairs_of, prompts_of
from transformers import LlamaConfig, LlamaForCausalLM

import lm
from tiny import cpu


def llama(tokenizer, kind: str = "blocks", compute=torch.float32, **more) -> lm.LM:
    """Four heads of 16 that share two of keys and values; three layers."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=512,
        initializer_range=0.15, pad_token_id=0, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        attn_implementation=kind, **more)
    return lm.LM(LlamaForCausalLM(config).eval(), tokenizer, 512, compute, reader=cpu.read, hidden=cpu.hidden)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_llama_read_by_hand_gives_the_samples_of_transformers_forward(tokenizer, temperature, monkeypatch):
    """Guards: another token for the same seed, in float32, than every run before; a key of another row or of
    the padding; a wrong place after rows have left or the memory has grown (more tokens than ROOM); keys of
    one prompt that reach only one of its rows; what two prompts begin with, read for the wrong one. Some rows
    end early."""
    model, rng = llama(tokenizer), random.Random(2)
    prompts = prompts_of(rng, 3, 40, 1, 40, 17, 90, 33, 5)
    prompts += [prompts[1], prompts[5], prompts[1]]
    # They begin alike; one is another's beginning; one differs in its first token alone.
    prompts += [prompts[5][:60] + prompts[4], prompts[5][:33], prompts[4][:1] + prompts[5][1:]]
    with torch.no_grad():
        model.model.lm_head.weight[tokenizer.eos_token_id] *= 3
    ours = lm.sample(model, prompts, cpu.ROOM + 20, temperature, 3)
    monkeypatch.setattr(cpu, "_known", lambda _: False)
    theirs = lm.sample(model, prompts, cpu.ROOM + 20, temperature, 3)
    assert [s.ids for s in ours] == [s.ids for s in theirs]
    lengths = {len(s.ids) for s in ours}
    assert min(lengths) < 10 and max(lengths) > cpu.ROOM, "rows that leave, and one that outgrows the room"
    for a, b in zip(ours, theirs):
        assert a.logps == pytest.approx(b.logps, abs=2e-5)


@pytest.mark.parametrize("by_hand, limit", [(True, 0.03), (False, 0.01)])
def test_bf16_moves_what_is_read_by_rounding_only(tokenizer, by_hand, limit):
    """Guards: a sampler whose log-probs are not those that are scored, as in another type (the ratio would
    start off by whole percents), by hand and by transformers. By hand roundings move a token's log-prob by
    .014 on average; NOTES 7.5 calls .02 healthy. And a reader that computes in float32 whatever it was
    asked."""
    model = llama(tokenizer, compute=torch.bfloat16) if by_hand else tiny_lm(tokenizer)
    model.compute, prompts = torch.bfloat16, prompts_of(random.Random(4), *range(20, 44))
    if by_hand:
        with torch.no_grad(), model.autocast():
            layers = cpu.read(model.model, prompts, 0).layers
        assert {weights.down.dtype for weights in layers} == {torch.bfloat16}
    samples = lm.sample(model, prompts, 12, 1.0, 1)
    scored = score(model, [(p, s.ids) for p, s in zip(prompts, samples)])
    gaps = [abs(a - b) for s, logps in zip(samples, scored) for a, b in zip(s.logps, logps.tolist())]
    assert 0 < sum(gaps) / len(gaps) < limit


@pytest.mark.parametrize("more", [
    {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}, {"attention_dropout": 0.1},
    {"kind": "eager"}, {"kind": "sdpa"},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}])
def test_only_a_llama_that_is_wholly_known_is_read_by_hand(tokenizer, more):
    """Guards: a bias, an activation or a stretched place left out without a word; a GPU, or a model whose
    attention somebody chose, read by code for the CPU."""
    model, prompts = llama(tokenizer, **more), prompts_of(random.Random(5), 4, 9)
    assert type(cpu.read(llama(tokenizer).model, prompts, 0)) is cpu.Llama
    assert type(cpu.read(model.model, prompts, 0)) is lm.Reader
    assert type(cpu.read(tiny_lm(tokenizer).model, prompts, 0)) is lm.Reader


def beginning_alike() -> list[lm.Pair]:
    """Sequences of two pages: the same one twice, one that ends where another goes on, the same tokens with
    the prompt's end elsewhere, a page of its own, and one that differs in its first token alone."""
    (page, said), (other, more), alone = pairs_of(random.Random(6), ((50, 9), (20, 7), (70, 12)))
    return [(page, said), (page + other, more), (page, said), (page, other[:5]), (page + other, more[:3]),
            (page[:20], page[20:31]), (page + said[:2], said[2:]), alone, (page[:1], more),
            (page[1:2] + page[1:], said)]


@pytest.mark.parametrize("compute, rounding", [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_a_llama_that_is_scored_by_hand_has_the_log_probs_and_gradient_of_transformers(tokenizer, compute,
                                                                                       rounding):
    """Guards: a token that sees another sequence's, or its own place wrong; a sequence that stands twice and
    is learned once; a layer's last step on the wrong tokens; log-probs in another order."""
    model, pairs = llama(tokenizer, compute=compute), beginning_alike()
    by_hand = lm.LM(copy.deepcopy(model.model), tokenizer, 512, compute, hidden=cpu.hidden)
    model.hidden, found = None, []
    weigh = torch.rand(sum(len(completion) for _, completion in pairs))
    for one in (model, by_hand):
        logp, row = lm.token_logps(one, pairs, 0.7)
        (weigh * logp).sum().backward()
        found.append((logp.detach(), row, [parameter.grad for parameter in one.model.parameters()]))
    (logp, row, gradient), (other_logp, other_row, other_gradient) = found
    assert torch.equal(row, other_row) and float((logp - other_logp).abs().max()) < rounding
    for a, b in zip(gradient, other_gradient):
        assert float((a - b).norm()) < rounding * float(a.norm())


def test_what_several_sequences_begin_with_is_computed_once(tokenizer, monkeypatch):
    """Guards: a speed that is gone without a word. Of a page that stands in six sequences every layer takes
    its tokens once, the last layer only those that predict a completion's."""
    model, pairs, widths = llama(tokenizer), beginning_alike(), []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(cpu.F, "linear", lambda x, *more: (widths.append(len(x)), linear(x, *more))[1])
    logp, _ = lm.token_logps(model, pairs)
    nodes = len({tuple((prompt + completion)[:end]) for prompt, completion in pairs
                 for end in range(1, len(prompt + completion) + 1)})
    assert nodes < sum(len(prompt) + len(completion) for prompt, completion in pairs) / 2
    assert widths == [nodes] * 9 + [len(logp)] * 4, "four a layer of three; then the head"


def test_only_a_llama_that_is_wholly_known_is_scored_by_hand(tmp_path, tokenizer):
    """Guards: a bias that is left out without a word."""
    for bias in (False, True):
        folder = tmp_path / str(bias)
        model = llama(tokenizer, mlp_bias=bias)
        lm.save(model, folder)
        assert cpu.load(folder).hidden is (None if bias else cpu.hidden)
