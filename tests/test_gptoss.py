"""Claims about gptoss.py: harmony cannot be broken out of, every rank gets exactly its own rows, the merge changes attention and nothing else.

Everything runs on a folder shaped as OpenAI's (MXFP4 blocks and scales, sinks, biases, two files with an index), 5 experts of 64 x 64, made here.
"""
import json
import math
import shutil
import time
from datetime import timedelta
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models as bpe, pre_tokenizers
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, PreTrainedTokenizerFast
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import distributed
import gptoss
import lm

examples = settings(settings.get_profile("models"), max_examples=40)
SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|reserved_200013|>"]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LORA = gptoss.Lora(rank=3, alpha=6)  # 3 rows on two ranks: 2 and 1


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and harmony's special tokens; the last is in no list of special tokens, as most of OpenAI's are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(bpe.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|return|>", pad_token="<|endoftext|>")


TOKENIZER = harmony_tokenizer()
VOCABULARY = len(TOKENIZER) + 1  # 267 rows: two ranks do not divide it


def write_folder(folder, packed: bool = True, seed: int = 0):
    """A GPT-OSS folder of two layers; `packed` with MXFP4 experts, else the same numbers in bf16 as transformers lays them out."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape, scale=0.2: (scale * torch.randn(shape, generator=rng)).bfloat16()
    hidden, heads, kv, width, inner, experts = 64, 2, 1, 32, 64, 5
    state = {"model.embed_tokens.weight": draw(VOCABULARY, hidden, scale=1.0), "model.norm.weight": 1 + draw(hidden), "lm_head.weight": draw(VOCABULARY, hidden)}
    for n in range(2):
        at = f"model.layers.{n}."
        for name, rows, columns in (("q", heads * width, hidden), ("k", kv * width, hidden), ("v", kv * width, hidden), ("o", hidden, heads * width)):
            state |= {f"{at}self_attn.{name}_proj.weight": draw(rows, columns), f"{at}self_attn.{name}_proj.bias": draw(rows)}
        state |= {at + "self_attn.sinks": draw(heads, scale=1.0), at + "input_layernorm.weight": 1 + draw(hidden), at + "post_attention_layernorm.weight": 1 + draw(hidden),
                  at + "mlp.router.weight": draw(experts, hidden), at + "mlp.router.bias": draw(experts)}
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=rng, dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, rows, columns // 32), generator=rng, dtype=torch.uint8)
            state[f"{at}mlp.experts.{name}_bias"] = draw(experts, rows)
            if packed:
                state |= {f"{at}mlp.experts.{name}_blocks": blocks, f"{at}mlp.experts.{name}_scales": scales}
            else:  # decoded here by its definition: the low half of a byte first, 32 numbers share a power of two
                numbers = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(-2)  # (E, rows, columns/32, 32)
                numbers = numbers * 2.0 ** (scales.float() - 127)[..., None]
                state[f"{at}mlp.experts.{name}"] = numbers.flatten(-2).transpose(1, 2).contiguous().bfloat16()
    folder.mkdir(parents=True)
    config = GptOssConfig(num_hidden_layers=2, num_local_experts=experts, num_experts_per_tok=2, vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, head_dim=width,
                          num_attention_heads=heads, num_key_value_heads=kv, sliding_window=8, pad_token_id=TOKENIZER.pad_token_id, eos_token_id=TOKENIZER.eos_token_id)
    if packed:
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    parts = {name: f"model-0000{1 + ('layers.0.' not in name)}-of-00002.safetensors" for name in state}
    for part in set(parts.values()):
        save_file({name: value for name, value in state.items() if parts[name] == part}, folder / part, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    (folder / "original").mkdir()
    save_file({"another.layout": torch.zeros(3)}, folder / "original" / "model.safetensors")
    return folder


def write_adapter(folder, lora: gptoss.Lora = LORA, seed: int = 1, scale: float = 0.1, **names):
    """A trained adapter for write_folder's model, as peft writes it. `names` (name=tensor) are added."""
    rng = torch.Generator().manual_seed(seed)
    state = {}
    for n in range(2):
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            at = f"base_model.model.model.layers.{n}.self_attn.{name}_proj.lora_"
            state |= {at + "A.weight": scale * torch.randn(lora.rank, 64, generator=rng), at + "B.weight": scale * torch.randn(rows, lora.rank, generator=rng)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state | names, folder / "adapter_model.safetensors", {"format": "pt"})
    lora.config().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("base") / "mxfp4")


# ---- harmony ---------------------------------------------------------------------------------------------------------------

hostile = st.lists(st.text(max_size=8) | st.sampled_from(SPECIALS + ["<", "|", "assistant", "<|channel|>final<|message|>", "\n"]), max_size=6).map("".join)


def test_a_prompt_is_written_as_the_format_says():
    """Guards: a missing header line (the model was never trained without it), today's date, a blank line too many (the Hugging Face template
    has one after the instructions, the format has none)."""
    text = TOKENIZER.decode(gptoss.prompt_ids(TOKENIZER, [{"role": "system", "content": "Be the web."}, {"role": "user", "content": "click [4]"}]))
    assert text == ("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: 2025-08-05\n\n"
                    "Reasoning: low\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
                    "<|start|>developer<|message|># Instructions\n\nBe the web.<|end|><|start|>user<|message|>click [4]<|end|><|start|>assistant")
    # openai/harmony, docs/format.md, "Example output"
    assert TOKENIZER.decode(gptoss.completion_ids(TOKENIZER, "Simple arithmetic.", "2 + 2 = 4.")) == (
        "<|channel|>analysis<|message|>Simple arithmetic.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>")
    with pytest.raises(ValueError, match="not 'tool'"):
        gptoss.prompt_ids(TOKENIZER, [{"role": "tool", "content": ""}])
    assert gptoss.is_harmony(TOKENIZER)


def test_a_tokenizer_without_channels_is_not_harmony(tokenizer):
    """Guards: the laptop's model talked to in harmony."""
    assert not gptoss.is_harmony(tokenizer)


@given(hostile, hostile)
@examples
def test_no_page_can_end_its_turn_or_begin_another(system, page):
    """Guards: a page that says <|end|><|start|>assistant and answers for the world model, or that names a token no list calls special."""
    ids = gptoss.prompt_ids(TOKENIZER, [{"role": "system", "content": system}, {"role": "user", "content": page}])
    added = {index: token for token, index in TOKENIZER.get_added_vocab().items()}
    assert [added[i] for i in ids if i in added] == ["<|start|>", "<|message|>", "<|end|>"] * 3 + ["<|start|>"]
    assert TOKENIZER.decode(ids).endswith(f"<|start|>user<|message|>{lm.disarm(TOKENIZER, page)}<|end|><|start|>assistant")


@given(hostile, hostile)
@examples
def test_an_answer_reads_back_as_it_was_written(reason, final):
    """Guards: whitespace cleaned up by the decoder, a reason that closes its own channel, the two parts exchanged."""
    ids = gptoss.completion_ids(TOKENIZER, reason, final)
    assert gptoss.read(TOKENIZER, ids) == (lm.disarm(TOKENIZER, reason), lm.disarm(TOKENIZER, final))
    assert ids[-1] == TOKENIZER.eos_token_id and ids.count(TOKENIZER.eos_token_id) == 1


@given(st.text(max_size=5), st.text(max_size=5), st.data())
@examples
def test_whatever_else_was_sampled_is_refused(reason, final, data):
    """Guards: an answer cut off by max_new_tokens, a tool call, a second message, taken for a delta."""
    ids = gptoss.completion_ids(TOKENIZER, reason, final)
    added = list(TOKENIZER.get_added_vocab().values())
    at = data.draw(st.integers(0, len(ids) - 1))
    marks = [k for k, i in enumerate(ids) if i in added]
    mark = data.draw(st.sampled_from(marks))
    words = {gptoss.completion_ids(TOKENIZER, "", "").index(ids[1]), marks[3] + 1, marks[4] + 1}  # where analysis, assistant, final begin
    wrong = data.draw(st.sampled_from([ids[:at], ids[:mark] + ids[mark + 1 :], ids[:at] + [data.draw(st.sampled_from(added))] + ids[at:], ids + ids[1:2], ids[:-1] + [added[-2]],
                                       *(ids[:k] + ids[k + 1 :] for k in words)]))
    with pytest.raises(ValueError, match="not a harmony answer"):
        gptoss.read(TOKENIZER, wrong)


# ---- loading ---------------------------------------------------------------------------------------------------------------

SEQUENCES = [[5, 9, 200, 31, 8, 77, 12, 3], [44, 45, 46], [7, 7, 101, 90, 14, 6, 6, 150, 33, 2, 71, 19], [250, 1, 66, 31, 9]]
PAIRS = [(ids[:cut], ids[cut:]) for ids in SEQUENCES for cut in (1, 2)]  # (prompt, completion)
IDS = torch.tensor([[7, 80, 3, 200, 90, 14, 6, 6, 150, 33, 2, 71]])  # longer than the sliding window


def test_a_folder_loads_as_transformers_loads_it_packed_or_plain(base, tmp_path):
    """Guards: the two 4-bit halves of a byte exchanged, in and out not transposed, a rotary table left empty after the meta device, a layer
    read into another. The plain folder was decoded by the test's own few lines."""
    theirs = AutoModelForCausalLM.from_pretrained(base, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16, attn_implementation="eager")
    plain = write_folder(tmp_path / "plain", packed=False)
    for folder in (base, plain):
        ours = gptoss.load_sharded(folder, lora=None, attention="eager")
        want = dict(theirs.named_parameters())
        assert {name: value.dtype for name, value in ours.named_parameters()} == {name: value.dtype for name, value in want.items()}
        assert not [name for name, value in ours.named_parameters() if not torch.equal(value, want[name])]
        assert torch.equal(ours.eval()(IDS).logits, theirs.eval()(IDS).logits)
    adapted = gptoss.load_sharded(base, lora=LORA, attention="eager")
    assert torch.equal(adapted.eval()(IDS).logits, theirs(IDS).logits), "with B = 0 the model starts where the base is"
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all(".lora_" in name and "self_attn" in name and value.dtype == torch.float32 for name, value in trained.items())


def test_attention_without_a_backward_through_the_sinks_is_refused():
    """Guards: the flash kernel of a popular example, which trains on wrong gradients without a word (systems.md, 2.2)."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [gptoss.training_attention(name, cpu) for name in ("sinks", "eager")] == ["sinks", "eager"] and gptoss.training_attention("flex_attention", cuda) == "flex_attention"
    for name, device, reason in (("flex_attention", cpu, "on a GPU only"), ("sdpa", cuda, "no attention sinks"), ("kernels-community/vllm-flash-attn3", cuda, "no backward"),
                                 ("flash_attention_2", cuda, "no backward")):
        with pytest.raises(ValueError, match=reason):
            gptoss.training_attention(name, device)


@given(st.lists(st.integers(1, 29), min_size=1, max_size=3), st.sampled_from([None, 4, 8]), st.integers(0, 9))
@examples
def test_a_sink_as_a_key_is_the_sink_of_eager_attention_forwards_and_backwards(lengths, window, seed):
    """Guards: a key too many or too few in the window, a first block that sees padding, heads that take each other's sink, a packed sequence
    that sees its neighbour, gradients that miss the sink's share. Reference: transformers' eager attention with a dense mask."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 16, generator=rng, requires_grad=True) for heads in (4, 2, 2))
    sinks, weights = torch.randn(4, generator=rng, requires_grad=True), torch.randn(1, total, 4, 16, generator=rng)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(total)[:, None] - torch.arange(total)
    sees = (back >= 0) & (back < (window or total)) & (row[:, None] == row)
    dense = torch.zeros(1, 1, total, total).masked_fill(~sees, -torch.inf)
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=True)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    ours = gptoss.sink_attention(module, q, k, v, None, 0.25, sinks, window, cu_seq_lens_q=bounds if len(lengths) > 1 else None)[0]
    theirs = eager_attention_forward(module, q, k, v, dense, 0.25)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for got, want in zip(*(torch.autograd.grad((out * weights).sum(), (q, k, v, sinks)) for out in (ours, theirs))):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sinks", "eager"])
def test_sequences_in_one_packed_row_do_not_see_each_other(base, attention):
    """Guards: transformers' GPT-OSS, which drops position_ids on the way to its masks: the second page of a row would read the first."""
    model = lm.LM(gptoss.load_sharded(base, lora=LORA, attention=attention, compute=torch.float32), TOKENIZER, 512, torch.float32, sharded=True)
    alone = gptoss.load_sharded(base, lora=None, attention="eager", compute=torch.float32).eval()
    model.model.eval()
    logp, row = lm.token_logps(model, PAIRS)
    for k, (prompt, completion) in enumerate(PAIRS):
        with torch.no_grad():
            want = alone(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(logp[row == k], want.gather(1, torch.tensor(completion)[:, None])[:, 0], atol=1e-4, rtol=0)


def damage(folder, what):
    part = folder / "model-00002-of-00002.safetensors"
    if what == "cut off":
        part.write_bytes(part.read_bytes()[:-100])
    elif what == "header cut off":
        part.write_bytes(part.read_bytes()[:100])
    elif what == "file missing":
        part.unlink()
    elif what == "config":
        (folder / "config.json").unlink()
    elif what == "another model":
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    elif what == "too many layers":
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    elif what == "other sizes":
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 4}))
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.layers.7.self_attn.sinks"] = part.name
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("what, says", [("cut off", "is cut off or missing .*ends at byte"), ("header cut off", "cut off or missing"), ("file missing", "cut off or missing"),
                                        ("config", "holds no model"), ("another model", "weights of its config are in no file"), ("too many layers", "have no place in its config"),
                                        ("other sizes", "another config"), ("index", "index lists 1 tensors that no file holds")])
def test_a_damaged_folder_is_refused_before_it_is_used(base, tmp_path, what, says):
    """Guards: half a download that loads as zeros, or ends a merge after an hour."""
    folder = shutil.copytree(base, tmp_path / "damaged")
    damage(folder, what)
    with pytest.raises(ValueError, match=says):
        gptoss.load_sharded(folder)


# ---- two ranks -------------------------------------------------------------------------------------------------------------


def train(model, folder="") -> list[float]:
    """Three LoRA steps of two microbatches each, as world_model.py does them; the losses."""
    losses = []
    model = lm.LM(model, TOKENIZER, 512, torch.float32, sharded=True)
    config = lm.FineTune(lr=1e-2, tokens=16, microbatches=2, checkpoint_every=1)
    lm.finetune(model, PAIRS, config, each=lambda step, loss: losses.append(loss), checkpoint=folder)
    return losses


class Counted:
    """safetensors' file, counting the bytes that are read of each tensor."""

    def __init__(self, read: dict):
        self.read = read

    def __call__(self, file, framework):
        opened = Counted(self.read)
        opened.file = safe_open(file, framework)
        return opened

    def get_slice(self, name):
        self.name = name
        return self

    def __getitem__(self, rows):
        value = self.file.get_slice(self.name)[rows]
        self.read[self.name] = self.read.get(self.name, 0) + value.nbytes
        return value


def one_of_two(rank: int, base, folder):
    """What each of two ranks does; `folder`/rank-N.pt is what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=200))
    mesh, seen = distributed.mesh(), {"read": {}}
    # ---- bf16, one-row adapters (the second rank has none of A), weights kept in host memory, counted ----
    distributed.safe_open = Counted(seen["read"])
    model = gptoss.load_sharded(base, mesh, gptoss.Lora(rank=1), offload=True)
    distributed.safe_open = safe_open
    seen["shards"] = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    seen["rotary"] = model.model.rotary_emb.inv_freq
    # ---- float32, three steps, saved, merged, compared ----
    model = gptoss.load_sharded(base, mesh, LORA, compute=torch.float32)
    seen["adapter before"] = gptoss.adapter_state(model)
    seen["losses"] = train(model, folder / "checkpoint")
    seen["adapter"] = gptoss.adapter_state(model)
    gptoss.save_adapter(model, folder / "adapter", LORA)
    if rank == 0:
        gptoss.merge(base, folder / "adapter", folder / "merged")
    distributed.everyone(True)
    seen["kl"] = gptoss.kl(model, folder / "merged", SEQUENCES)
    seen["adapter after"] = gptoss.adapter_state(model)
    torch.save(seen, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(base, tmp_path_factory):
    """Both ranks' findings. Forked: they need not import torch again (on one slow core that is most of the time)."""
    folder = tmp_path_factory.mktemp("two")
    ranks = mp.start_processes(one_of_two, (base, folder), nprocs=2, join=False, start_method="fork")
    limit = time.time() + 300
    while not ranks.join(timeout=1):  # raises what a rank raised
        if time.time() > limit:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError("two ranks hang")
    return [torch.load(folder / f"rank-{n}.pt") for n in range(2)], folder


def test_the_shards_of_two_ranks_are_the_model_bit_for_bit(base, two):
    """Guards: rows of the wrong rank, uneven rows (5 experts, 267 tokens, an adapter of one row) cut otherwise than FSDP2 cuts them."""
    (first, second), _ = two
    whole = gptoss.load_sharded(base, lora=gptoss.Lora(rank=1))
    for name, parameter in whole.named_parameters():
        together = torch.cat([first["shards"][name], second["shards"][name]])
        assert together.dtype == parameter.dtype and torch.equal(together, parameter), name
    assert [len(seen["shards"]["model.layers.1.mlp.experts.gate_up_proj"]) for seen in (first, second)] == [3, 2]
    assert torch.equal(first["rotary"], whole.model.rotary_emb.inv_freq) and torch.equal(second["rotary"], first["rotary"])


def test_a_rank_reads_its_own_experts_only(base, two):
    """Guards: a loader that reads all and keeps a part: 8 x 65 GB over the network, or 8 x 234 GB in memory."""
    (first, second), _ = two
    for name, entry in gptoss.entries(base).items():
        size, rows = entry.end - entry.start, entry.shape[0]
        half = -(-rows // 2)
        assert first["read"][name] == size * half // rows and second["read"].get(name, 0) == size * (rows - half) // rows, name


def test_three_steps_on_two_ranks_are_three_steps_on_one(base, two):
    """Guards: gradients averaged where they must be summed, a rank's loss over its own tokens, an adapter that FSDP does not train or that
    starts differently on each rank."""
    (first, second), folder = two
    model = gptoss.load_sharded(base, lora=LORA, compute=torch.float32, checkpointing=False)
    before = gptoss.adapter_state(model)
    losses = train(model)
    assert len(losses) == 3
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
    others = gptoss.adapter_state(gptoss.load_sharded(base, lora=LORA, seed=1))
    starts = [value for state in (before, others) for name, value in state.items() if name.endswith("q_proj.lora_A.weight")]
    assert len({tuple(value.flatten().tolist()) for value in starts}) == 4, "two seeds or two layers that start alike"
    after = gptoss.adapter_state(model)
    for seen in (first, second):
        assert seen["losses"] == pytest.approx(losses, abs=1e-5)
        assert after.keys() == seen["adapter"].keys()
        for name, value in after.items():
            torch.testing.assert_close(seen["adapter"][name], value, atol=1e-5, rtol=0)
            assert not torch.equal(value, before[name]), f"{name} did not learn"
            assert torch.equal(seen["adapter before"][name], before[name]) and torch.equal(seen["adapter after"][name], seen["adapter"][name])
    saved = FileSystemReader(folder / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    weights = [name for name in saved if name.startswith("model.")]
    assert len(weights) == len(after) and all(".lora_" in name for name in weights), "a checkpoint of 234 GB"


# ---- merge -----------------------------------------------------------------------------------------------------------------


def bytes_of(folder, name):
    entry = gptoss.entries(folder)[name]
    return entry.file.read_bytes()[entry.start : entry.end]


def test_a_merge_is_peft_s_to_one_rounding_and_touches_nothing_else(base, tmp_path):
    """Guards: alpha / r forgotten, B A transposed, a sum in bf16, experts requantised, a header rewritten, quantization_config lost (the server
    would then look for bf16 experts)."""
    adapter = write_adapter(tmp_path / "adapter")
    report = gptoss.merge(base, adapter, tmp_path / "merged")
    assert report["tensors"] == 8 and report["scaling"] == 2.0
    loaded = peft.PeftModel.from_pretrained(gptoss.load_sharded(base, lora=None), adapter).merge_and_unload()
    theirs, state, changed = dict(loaded.named_parameters()), load_file(adapter / "adapter_model.safetensors"), 0
    for name in gptoss.entries(base):
        if "self_attn" in name and name.endswith("proj.weight"):
            with safe_open(gptoss.entries(base)[name].file, "pt") as old, safe_open(gptoss.entries(tmp_path / "merged")[name].file, "pt") as new:
                was, now = old.get_tensor(name), new.get_tensor(name)
            at = "base_model.model." + name.removesuffix("weight") + "lora_"
            exact = was.double() + 2.0 * state[at + "B.weight"].double() @ state[at + "A.weight"].double()
            assert ((now.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-9).all(), "more than half a unit in bf16's last place from the sum"
            assert ((now.float() - theirs[name].float()).abs() <= 2**-7 * torch.maximum(now.float().abs(), was.float().abs())).all()
            changed += not torch.equal(was, now)
        else:
            assert bytes_of(base, name) == bytes_of(tmp_path / "merged", name), name
    assert changed == 8
    top = {file.name for file in base.iterdir() if file.is_file()}
    assert {file.name for file in (tmp_path / "merged").iterdir()} == top, "config, tokenizer and index come along; original/ stays behind"
    assert all((base / name).read_bytes() == (tmp_path / "merged" / name).read_bytes() for name in top if not name.endswith(".safetensors"))
    assert "quantization_config" in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_kl_is_small_for_the_merge_and_large_for_another_model(base, two, tmp_path):
    """Guards: a comparison of the model with itself, an adapter that stays on over the merged weights, weights that are not put back, ranks
    that compare different rows."""
    (first, second), folder = two
    assert first["kl"] == second["kl"]
    model = gptoss.load_sharded(base, lora=LORA, compute=torch.float32, checkpointing=False)
    train(model)
    before, kept = model(IDS).logits, {name: value.clone() for name, value in model.named_parameters()}
    found = gptoss.kl(model, folder / "merged", SEQUENCES)
    assert torch.equal(model(IDS).logits, before) and all(torch.equal(value, kept[name]) for name, value in model.named_parameters())
    merged, total = gptoss.load_sharded(folder / "merged", lora=None, compute=torch.float32).eval(), 0.0
    for ids in SEQUENCES:
        with torch.no_grad():
            p, q = (m(torch.tensor([ids])).logits[0].log_softmax(-1) for m in (model, merged))
        total += torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
    assert found == pytest.approx(total / sum(map(len, SEQUENCES)), rel=1e-3) and first["kl"] == pytest.approx(found, rel=0.2)
    assert 0 < found < 1e-3 < 100 * found < gptoss.kl(model, base, SEQUENCES), "the adapter itself moves the model a hundred times more"


def test_a_killed_merge_leaves_the_old_folder_and_no_half_new_one(base, tmp_path, monkeypatch):
    """Guards: a server that starts on half a model."""
    adapter, out, add, calls = write_adapter(tmp_path / "adapter"), tmp_path / "merged", gptoss._add, []

    def killed(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gptoss, "_add", killed)
        gptoss.merge(base, adapter, out)
    assert not out.exists()
    gptoss.merge(base, adapter, out)  # over what the killed one left
    good = bytes_of(out, "model.layers.1.self_attn.o_proj.weight")
    calls.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gptoss, "_add", killed)
        gptoss.merge(base, write_adapter(tmp_path / "other", seed=5), out)
    assert bytes_of(out, "model.layers.1.self_attn.o_proj.weight") == good
    gptoss.merge(base, tmp_path / "other", out)
    assert bytes_of(out, "model.layers.1.self_attn.o_proj.weight") != good and not out.with_name("merged.old").exists()


Q = "model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize("state, says", [
    ({}, "empty"),
    ({Q + "A.weight": torch.zeros(3, 64)}, "only one of A and B"),
    ({Q + "A.weight": torch.zeros(3, 48), Q + "B.weight": torch.zeros(64, 3)}, "another model"),
    ({Q + "A.weight": torch.zeros(3, 64), Q + "B.weight": torch.zeros(64, 4)}, "another model"),
    ({Q.replace("layers.0", "layers.2") + "A.weight": torch.zeros(3, 64), Q.replace("layers.0", "layers.2") + "B.weight": torch.zeros(64, 3)}, "not in the checkpoint"),
    ({"base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.zeros(3, 64)}, "without touching the experts"),
    ({"model.layers.0.mlp.router.lora_A.weight": torch.zeros(3, 64)}, "the adapter changes model.layers.0.mlp.router"),
    ({"lm_head.weight": torch.zeros(3, 64)}, "the adapter changes lm_head"),
    ({Q + "A.weight": torch.full((3, 64), math.inf), Q + "B.weight": torch.ones(64, 3)}, "diverged"),
])
def test_an_adapter_that_does_not_belong_is_refused(base, tmp_path, state, says):
    """Guards: half an adapter merged, or a part of it left out without a word."""
    with pytest.raises(ValueError, match=says):
        gptoss.merge(base, state, tmp_path / "out", LORA)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, says", [({"use_dora": True}, "use_dora"), ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"), ({"bias": "all"}, "bias"), ({"peft_type": "IA3"}, "IA3"),
                                          (None, "no whole LoRA adapter")])
def test_an_adapter_of_another_kind_is_refused(base, tmp_path, change, says):
    """Guards: DoRA merged as if it were LoRA: it loads, and answers wrongly."""
    file = write_adapter(tmp_path / "adapter") / "adapter_config.json"
    if change is None:
        file.with_name("adapter_model.safetensors").write_bytes(file.with_name("adapter_model.safetensors").read_bytes()[:-9])
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=says):
        gptoss.merge(base, tmp_path / "adapter", tmp_path / "out")


def test_a_merge_that_cannot_end_well_does_not_begin(base, tmp_path, monkeypatch):
    """Guards: 65 GB written before the disk is full; the base overwritten; half a download merged."""
    adapter = write_adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match="another folder"):
        gptoss.merge(base, adapter, base)
    folder = shutil.copytree(base, tmp_path / "damaged")
    damage(folder, "cut off")
    with pytest.raises(ValueError, match="cut off"):
        gptoss.merge(folder, adapter, tmp_path / "out")
    size = sum(file.stat().st_size for file in base.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size // 2))
    with pytest.raises(ValueError, match="GB on its disk, and 0.0 are free"):
        gptoss.merge(base, adapter, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
