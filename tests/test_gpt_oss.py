"""Claims about gpt_oss.py: harmony cannot be broken out of, every rank gets exactly its
own rows, the merge changes attention and nothing else.

Everything runs on a folder shaped as OpenAI's (MXFP4 blocks and scales, sinks, biases, two files with an
index), with 5 experts of 64 x 64, made here.
"""
import json
import math
import os
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import tiny_lm
from helpers.gptoss import SPECIALS, TOKENIZER, tensors, write_folder
from helpers.killed import killed
from helpers.scores import each_step
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import data
import distributed
import evaluate
import finetune
import gpt_oss
import judge
import lm
import recipe
import remote
import sft
import train as training
from config import UserError

# A profile of its own: ranks import this file as well.
examples = settings(deadline=None, derandomize=True, max_examples=40)
HARMONY = gpt_oss.Harmony(TOKENIZER)
LORA = {"rank": 3, "alpha": 6}  # 3 rows on two ranks: 2 and 1


def write_adapter(folder, seed: int = 1, scale: float = 0.1, state: dict | None = None):
    """A trained adapter for write_folder's model, as peft writes it; `state` instead of drawn matrices."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {}
    for n in range(2):
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            at = f"base_model.model.model.layers.{n}.self_attn.{name}_proj.lora_"
            drawn[at + "A.weight"] = scale * torch.randn(LORA["rank"], 64, generator=rng)
            drawn[at + "B.weight"] = scale * torch.randn(rows, LORA["rank"], generator=rng)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(drawn if state is None else state, folder / "adapter_model.safetensors", {"format": "pt"})
    gpt_oss.lora_config(**LORA).save_pretrained(folder)
    return folder


def merge(base, adapter, out) -> None:
    """gpt_oss.merge of what peft wrote."""
    gpt_oss.merge(base, load_file(adapter / "adapter_model.safetensors"), LORA["alpha"] / LORA["rank"], out)


def load(folder, compute=torch.float32, **more) -> lm.LM:
    return gpt_oss.load(folder, 512, compute=compute, **LORA | more)


def adapter_of(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in distributed.full_tensors(model, torch.float32)
            if ".lora_" in name}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("base") / "mxfp4")


# ---- harmony -----------------------------------------------------------------------------------------------

odd = SPECIALS + ["<", "|", "assistant", "<|channel|>final<|message|>", "\n"]
def sampled(ids) -> lm.Sample:
    return lm.Sample(ids, [0.0] * len(ids), "", False)


hostile = st.lists(st.text(max_size=8) | st.sampled_from(odd), max_size=6).map("".join)


def chat(system: str, user: str) -> list[dict]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def test_prompt_and_answer_are_the_formats_and_the_published_templates_but_for_date_and_blank_line():
    """Guards: a missing header line (the model was never trained without it), today's date, an answer that is
    learned in another form than its own template writes. What trl/chat_templates/gptoss.jinja of
    huggingface/trl f2cd577 ("original GPT-OSS chat template") wrote in transformers 5.19 with
    reasoning_effort low, on 2026-11-23. The format (openai/harmony, docs/format.md, whose "Example output"
    the answer is) has no blank line behind the instructions."""
    written = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-11-23\n\nReasoning: low\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe the web.\n\n<|end|>"
        "<|start|>user<|message|>click [4]<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Simple arithmetic.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>")
    prompt = HARMONY.prompt_ids(chat("Be the web.", "click [4]"))
    ids = prompt + HARMONY.completion_ids("2 + 2 = 4.", "Simple arithmetic.")
    assert TOKENIZER.decode(ids) == written.replace("2026-11-23", "2025-08-05").replace("web.\n\n", "web.")
    assert TOKENIZER.decode(prompt).endswith("click [4]<|end|><|start|>assistant"), "where they part"


def test_a_tokenizer_with_channels_is_harmony_and_one_without_is_not(tokenizer):
    """Guards: the laptop's model talked to in harmony."""
    assert type(gpt_oss.template(TOKENIZER)) is gpt_oss.Harmony
    assert type(gpt_oss.template(tokenizer)) is lm.Template


@given(hostile, hostile)
@examples
def test_no_page_can_end_its_turn_or_begin_another(system, page):
    """Guards: a page that says <|end|><|start|>assistant and answers for the world model, or that names a
    token no list calls special."""
    ids = HARMONY.prompt_ids(chat(system, page))
    added = {index: token for token, index in TOKENIZER.get_added_vocab().items()}
    marks = [added[i] for i in ids if i in added]
    assert marks == ["<|start|>", "<|message|>", "<|end|>"] * 3 + ["<|start|>"]
    said = lm.disarm(TOKENIZER, page)
    assert TOKENIZER.decode(ids).endswith(f"<|start|>user<|message|>{said}<|end|><|start|>assistant")


@given(hostile, hostile)
@examples
def test_an_answer_reads_back_as_it_was_written(reason, final):
    """Guards: whitespace cleaned up by the decoder, a reason that closes its own channel, the two parts
    exchanged."""
    ids = HARMONY.completion_ids(final, reason)
    reason = data.one_line(lm.disarm(TOKENIZER, reason))
    assert HARMONY.read(sampled(ids)) == f"{reason}\n{lm.disarm(TOKENIZER, final)}"
    assert ids[-1] == TOKENIZER.eos_token_id and ids.count(TOKENIZER.eos_token_id) == 1


@given(st.text(max_size=5), st.text(max_size=5), st.data())
@examples
def test_whatever_else_was_sampled_is_refused(reason, final, drawn):
    """Guards: an answer cut off by max_new_tokens, a tool call, a second message, taken for a delta."""
    ids = HARMONY.completion_ids(final, reason)
    added = list(TOKENIZER.get_added_vocab().values())
    at = drawn.draw(st.integers(0, len(ids) - 1))
    marks = [k for k, i in enumerate(ids) if i in added]
    mark, extra = drawn.draw(st.sampled_from(marks)), drawn.draw(st.sampled_from(added))
    # Where analysis, assistant and final begin.
    words = {HARMONY.completion_ids("").index(ids[1]), marks[3] + 1, marks[4] + 1}
    without = lambda k: ids[:k] + ids[k + 1 :]
    cut, inserted = ids[:at], ids[:at] + [extra] + ids[at:]
    wrong = [cut, without(mark), inserted, ids + ids[1:2], ids[:-1] + [added[-2]], *map(without, words)]
    with pytest.raises(ValueError, match="not a harmony answer"):
        HARMONY.read(sampled(drawn.draw(st.sampled_from(wrong))))


class Says:
    """A judge that answers in harmony. `asked`: what it was asked to score."""

    tokenizer, template, context, concurrency = TOKENIZER, HARMONY, 4000, 1

    def __init__(self, reason: str, final: str):
        self.ids, self.asked = HARMONY.completion_ids(final, reason), []

    def generate(self, prompts, max_new_tokens, temperature, seeds) -> list[lm.Sample]:
        text = TOKENIZER.decode(self.ids[:-1])
        return [lm.Sample(self.ids, [0.0] * len(self.ids), text, False) for _ in prompts]

    def margins(self, prompts, yes, no) -> list[float]:
        self.asked += [TOKENIZER.decode(ids) for ids in prompts]
        return [1.0 if TOKENIZER.decode([a, b]) == "YN" else -1.0 for a, b in zip(yes, no)]


def test_a_verdict_in_harmony_is_scored_in_the_final_channel_behind_its_own_reasons():
    """Guards: channels taken for text: the verdict scored in an answer whose first channel is the whole of
    the first answer, and one that stands in the analysis alone."""
    case = ("Go.", ("click [1]",), "before", "after")
    model = Says("It shows.", "It is so.\nCOMPLETED: NO")
    (verdict,) = judge.Judge(model, 200).verdicts([case])
    assert (verdict.success, verdict.margin, verdict.unknown) == (True, 1.0, "")
    assert verdict.text == "It shows.\nIt is so."
    begun = TOKENIZER.decode(HARMONY.completion_ids("It is so.\nCOMPLETED: ", "It shows.")[:-1])
    prompt = TOKENIZER.decode(judge.prompts_of(model, [case], 200)[0][0])
    assert model.asked == [prompt + begun]
    (broken,) = judge.Judge(Cut("It shows.", "COMPLETED: YES"), 200).verdicts([case])
    assert broken.unknown == "unreadable: no verdict" and not broken.success


class Cut(Says):
    """It ends its turn in the analysis."""

    def __init__(self, *said: str):
        super().__init__(*said)
        self.ids = [*self.ids[: self.ids.index(TOKENIZER.convert_tokens_to_ids("<|end|>"))], self.ids[-1]]


def test_whoever_loads_a_gpt_oss_folder_talks_to_it_in_harmony(base, tmp_path, monkeypatch):
    """Guards: a world model or a judge of gpt-oss that is asked in a plain chat template, and whose channels
    are read as text: in a run, in a measurement, in an audit, and while it is trained."""
    lm.save(tiny_lm(TOKENIZER), plain := tmp_path / "plain")  # any model with its tokenizer
    small = evaluate.Config(checkpoint=str(plain), context=64)
    with evaluate.loaded(small, str(plain), 64) as model:
        assert type(model.template) is gpt_oss.Harmony
    asked = []
    monkeypatch.setattr(remote, "Remote", lambda urls, folder, **given: asked.append(given["template"]))
    with evaluate.loaded(small, str(plain), 64, urls=("http://127.0.0.1:1",)):
        assert type(asked[0]) is gpt_oss.Harmony
    config = replace(recipe.LAPTOP, judge_model=str(plain), policy=str(plain), world_model=str(plain))
    _, parts = training.load_models(config, tmp_path)
    assert type(parts.world_model.lm.template) is type(parts.judge.lm.template) is gpt_oss.Harmony
    config = recipe.WorldModelSFT(base=str(plain), lora_rank=0, context=64)
    assert type(sft.load_world_model(config).template) is gpt_oss.Harmony


# ---- loading -----------------------------------------------------------------------------------------------

SEQUENCES = [[5, 9, 200, 31, 8, 77, 12, 3], [44, 45, 46], [7, 7, 101, 90, 14, 6, 6, 150, 33, 2, 71, 19],
             [250, 1, 66, 31, 9]]
PAIRS = [(ids[:cut], ids[cut:]) for ids in SEQUENCES for cut in (1, 2)]  # (prompt, completion)
IDS = torch.tensor([[7, 80, 3, 200, 90, 14, 6, 6, 150, 33, 2, 71]])  # longer than the sliding window


def test_a_folder_loads_as_transformers_loads_it_packed_or_plain(base, tmp_path):
    """Guards: the two 4-bit halves of a byte exchanged, in and out not transposed, a rotary table left empty
    after the meta device, a layer read into another. The plain folder was decoded by the test's own few
    lines."""
    theirs = AutoModelForCausalLM.from_pretrained(base, quantization_config=Mxfp4Config(dequantize=True),
                                                  dtype=torch.bfloat16, attn_implementation="eager").eval()
    want, plain = dict(theirs.named_parameters()), write_folder(tmp_path / "plain", packed=False)
    for folder in (base, plain):
        model = load(folder, torch.bfloat16).model
        got = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
        trained = [name for name, value in model.named_parameters() if value.requires_grad]
        assert len(trained) == 2 * 4 * 2 and all(".lora_" in name and "self_attn" in name for name in trained)
        assert {got.pop(name).dtype for name in trained} == {torch.float32}
        assert not [name for name, value in got.items() if not torch.equal(value, want[name])]
        model.set_attn_implementation("eager")
        assert torch.equal(model(IDS).logits, theirs(IDS).logits), "with B = 0 it starts where the base is"


@given(st.lists(st.integers(1, 29), min_size=1, max_size=3), st.sampled_from([None, 4, 8]), st.integers(0, 9))
@examples
def test_a_sink_as_a_key_is_the_sink_of_eager_attention_forwards_and_backwards(lengths, window, seed):
    """Guards: a key too many or too few in the window, a first block that sees padding, heads that take each
    other's sink, a packed sequence that sees its neighbour, gradients that miss the sink's share. Reference:
    transformers' eager attention with a dense mask."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 16, generator=rng, requires_grad=True) for heads in (4, 2, 2))
    sink = torch.randn(4, generator=rng, requires_grad=True)
    weight = torch.randn(1, total, 4, 16, generator=rng)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(total)[:, None] - torch.arange(total)
    sees = (back >= 0) & (back < (window or total)) & (row[:, None] == row)
    dense = torch.zeros(1, 1, total, total).masked_fill(~sees, -torch.inf)
    module = SimpleNamespace(sinks=sink, num_key_value_groups=2, training=True)
    rows = iter(range(total))
    read = lm.Trie([[next(rows) for _ in range(length)] for length in lengths])  # no two tokens are alike
    ours = gpt_oss.sink_attention(module, q, k, v, None, 0.25, sink, read, window)[0]
    theirs = eager_attention_forward(module, q, k, v, dense, 0.25)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((out * weight).sum(), (q, k, v, sink)) for out in (ours, theirs)]
    for got, want in zip(*gradients):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window, kernel, length", [(None, "flash", 301), (128, "mem_efficient", 264)])
def test_on_a_gpu_each_sink_has_one_kernel_and_its_keys_are_in_eights(monkeypatch, window, kernel, length):
    """Guards: torch's own choice, which is cuDNN (a plan for every length, .4 to 1 s each) and, for a shape
    that no kernel takes, memory for T^2 scores without a word; 257 keys, of which the efficient kernel's
    results were reported wrong. What a GPU would be asked is seen here."""
    asked = []

    def spy(query, key, value, **_):
        kernels = ("flash", "mem_efficient", "math", "cudnn")
        on = [name for name in kernels if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
        asked.append((on, key.shape[2]))
        return torch.zeros_like(query)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q, k, v = (torch.randn(1, heads, 300, 16) for heads in (4, 2, 2))
    gpt_oss.with_sinks(q, k, v, torch.randn(4), 0.25, window)
    assert asked == [([kernel], length)]


def test_sequences_that_begin_alike_do_not_see_each_other(base):
    """Guards: a second page of a microbatch that reads the first; a place that is another's."""
    model, alone = load(base), load(base).model
    alone.set_attn_implementation("eager")
    logp, row = lm.token_logps(model, PAIRS)
    for k, (prompt, completion) in enumerate(PAIRS):
        with torch.no_grad():
            want = alone(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        want = want.gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(logp[row == k], want, atol=1e-4, rtol=0)


# ---- two ranks ---------------------------------------------------------------------------------------------


def train(model, folder="") -> list[float]:
    """Three LoRA steps of two microbatches each, as sft.py does them; the losses."""
    losses = []
    config = finetune.FineTune(lr=1e-2, tokens=16, microbatches=2, checkpoint_every=1)
    with each_step(lambda step, loss: losses.append(loss)):
        finetune.fit(model, PAIRS, config, checkpoint=folder)
    return losses


def one_of_two(rank: int, base, folder):
    """What each of two ranks does; `folder`/rank-N.pt is what it saw."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=200))
    # ---- bf16, one-row adapters (the second rank has none of A), weights kept in host memory, counted ----
    convert, seen = gpt_oss.convert_moe_packed_tensors, {"experts": []}

    def counted(blocks, scales):
        seen["experts"].append(len(blocks))
        return convert(blocks, scales)

    gpt_oss.convert_moe_packed_tensors = counted
    model = load(base, torch.bfloat16, rank=1, offload=True).model
    gpt_oss.convert_moe_packed_tensors = convert
    seen["shards"] = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    seen["rotary"] = model.model.rotary_emb.inv_freq
    # ---- float32, three steps, saved, merged ----
    model = load(base)
    seen["adapter before"] = adapter_of(model.model)
    seen["losses"] = train(model, folder / "checkpoint")
    seen["adapter"] = adapter_of(model.model)
    gpt_oss.save(model.model, base, folder / "merged", **LORA)
    # ---- a merge that rank 0 cannot do ----
    try:
        gpt_oss.save(model.model, base, folder / "meet" / "merged", **LORA)
    except UserError as error:
        seen["refused"] = str(error)
    torch.save(seen, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(base, tmp_path_factory):
    """Both ranks' findings. Spawned: a fork fails where an earlier test has started autograd's threads, as
    with torch's CUDA build."""
    folder = tmp_path_factory.mktemp("two")
    ranks = mp.start_processes(one_of_two, (base, folder), nprocs=2, join=False, start_method="spawn")
    limit = time.time() + 300
    while not ranks.join(timeout=1):  # raises what a rank raised
        if time.time() > limit:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError("two ranks hang")
    return [torch.load(folder / f"rank-{n}.pt") for n in range(2)], folder


def test_the_shards_of_two_ranks_are_the_model_bit_for_bit(base, two):
    """Guards: rows of the wrong rank, uneven rows (5 experts, 267 tokens, an adapter of one row) cut
    otherwise than FSDP2 cuts them; a loader that unpacks all experts and keeps a part: 8 x 234 GB."""
    (first, second), _ = two
    whole = load(base, torch.bfloat16, rank=1).model
    for name, parameter in whole.named_parameters():
        together = torch.cat([first["shards"][name], second["shards"][name]])
        assert together.dtype == parameter.dtype and torch.equal(together, parameter), name
    assert first["experts"] == [3] * 4 and second["experts"] == [2] * 4
    for seen in (first, second):
        assert torch.equal(seen["rotary"], whole.model.rotary_emb.inv_freq)


def test_three_steps_on_two_ranks_are_three_steps_on_one(base, two):
    """Guards: gradients averaged where they must be summed, a rank's loss over its own tokens, an adapter
    that FSDP does not train or that starts differently on each rank."""
    (first, second), folder = two
    model = load(base)
    before, losses = adapter_of(model.model), train(model)
    assert len(losses) == 3
    starts = {tuple(value.flatten().tolist()) for state in (before, adapter_of(load(base, seed=1).model))
              for name, value in state.items() if "q_proj.lora_A" in name}
    assert len(starts) == 4, "two seeds or two layers that start alike"
    after = adapter_of(model.model)
    for seen in (first, second):
        assert seen["losses"] == pytest.approx(losses, abs=1e-5)
        assert after.keys() == seen["adapter"].keys()
        for name, value in after.items():
            torch.testing.assert_close(seen["adapter"][name], value, atol=1e-5, rtol=0)
            assert not torch.equal(value, before[name]), f"{name} did not learn"
            assert torch.equal(seen["adapter before"][name], before[name])
    saved = FileSystemReader(folder / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    parts = [name for name in saved if name.startswith("model.")]
    assert len(parts) == len(after) and all(".lora_" in name for name in parts), "a checkpoint of 234 GB"


def test_a_merge_that_rank_0_cannot_do_ends_all_ranks(two):
    """Guards: ranks that wait for ever for a rank that met a full disk."""
    for seen in two[0]:
        assert "meet/merged.adapter cannot be written" in seen["refused"] and "Make room" in seen["refused"]


def test_what_was_trained_is_what_is_merged(base, two):
    """Guards: the adapter of before the last step; alpha / r twice or never. Both are computed: the model
    with its adapters beside, and the merged folder, whose rounding is all that may differ."""
    _, folder = two
    model, merged = load(base), load(folder / "merged")
    train(model)
    gap = [(a - b).abs().max() for a, b in zip(*(lm.token_logps(m, PAIRS)[0] for m in (model, merged)))]
    moved = (lm.token_logps(model, PAIRS)[0] - lm.token_logps(load(base), PAIRS)[0]).abs().max()
    assert 0 < max(gap) < 0.02 < 10 * max(gap) < moved


# ---- merge -------------------------------------------------------------------------------------------------


def test_a_merge_is_peft_s_to_one_rounding_and_touches_nothing_else(base, tmp_path):
    """Guards: alpha / r forgotten, B A transposed, a sum in bf16, experts requantised, a header rewritten,
    quantization_config lost (the server would then look for bf16 experts)."""
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "merged"
    merge(base, adapter, out)
    theirs = AutoModelForCausalLM.from_pretrained(base, quantization_config=Mxfp4Config(dequantize=True),
                                                  dtype=torch.bfloat16)
    theirs = dict(peft.PeftModel.from_pretrained(theirs, adapter).merge_and_unload().named_parameters())
    state, was, now = load_file(adapter / "adapter_model.safetensors"), tensors(base), tensors(out)
    assert was.keys() == now.keys()
    for name in was:
        if "self_attn" not in name or not name.endswith("proj.weight"):
            assert torch.equal(was[name], now[name]), name
            continue
        at = "base_model.model." + name.removesuffix("weight") + "lora_"
        exact = was[name].double() + 2.0 * state[at + "B.weight"].double() @ state[at + "A.weight"].double()
        half_a_unit = exact.abs() * 2**-8 * 1.001 + 1e-9  # in the last place of bf16
        assert ((now[name].double() - exact).abs() <= half_a_unit).all()
        a_unit = 2**-7 * torch.maximum(now[name].float().abs(), was[name].float().abs())
        assert ((now[name].float() - theirs[name].float()).abs() <= a_unit).all()
        assert not torch.equal(was[name], now[name])
    top = {file.name for file in base.iterdir() if file.is_file()}
    same = [name for name in top if not name.endswith(".safetensors")]
    assert {file.name for file in out.iterdir()} == top, "original/ stays behind, all else comes along"
    assert all((base / name).read_bytes() == (out / name).read_bytes() for name in same)
    assert "quantization_config" in json.loads((out / "config.json").read_text())


def test_a_killed_merge_leaves_the_old_folder_and_no_half_new_one(base, tmp_path):
    """Guards: a server that starts on half a model."""
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "merged"
    name = "model.layers.1.self_attn.o_proj.weight"
    with killed(gpt_oss, "save_file", 2):
        merge(base, adapter, out)
    assert not out.exists()
    merge(base, adapter, out)  # over what the killed merge left
    good = tensors(out)[name]
    with killed(gpt_oss, "save_file", 2):
        merge(base, write_adapter(tmp_path / "other", seed=5), out)
    assert torch.equal(tensors(out)[name], good)
    merge(base, tmp_path / "other", out)
    assert not torch.equal(tensors(out)[name], good) and not out.with_name("merged.replaced").exists()


Q = "model.layers.0.self_attn.q_proj.lora_"
Q2 = Q.replace("layers.0", "layers.2")


@pytest.mark.parametrize("state, says", [
    ({Q + "A.weight": torch.zeros(3, 48), Q + "B.weight": torch.zeros(64, 3)}, "of another model"),
    ({Q2 + "A.weight": torch.zeros(3, 64), Q2 + "B.weight": torch.zeros(64, 3)}, "no weight .*q_proj.weight"),
    ({Q + "A.weight": torch.full((3, 64), math.inf), Q + "B.weight": torch.ones(64, 3)}, "diverged"),
])
def test_an_adapter_that_does_not_belong_is_refused(base, tmp_path, state, says):
    """Guards: a base that was fetched anew in another dtype, written over with bf16 at the wrong places."""
    adapter = write_adapter(tmp_path / "adapter", state=state)
    with pytest.raises(ValueError, match=says):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


