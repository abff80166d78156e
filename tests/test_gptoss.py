"""Claims about node/gptoss.py and node/sinks.py: harmony cannot be broken out of, every rank gets exactly its
own rows, the merge changes attention and nothing else.

Everything runs on a folder shaped as OpenAI's (MXFP4 blocks and scales, sinks, biases, two files with an
index), with 5 experts of 64 x 64, made here.
"""
import json
import math
import shutil
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
from helpers.gptoss import SPECIALS, TOKENIZER, bytes_of, write_folder
from helpers.killed import killed
from helpers.scores import each_step
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import distributed
import evaluate
import finetune
import judge
import lm
import recipe
import remote
import sft
import train as training
from distributed import ShardFiles
from node import gptoss, sinks

# A profile of its own: ranks import this file as well.
examples = settings(deadline=None, derandomize=True, max_examples=40)
HARMONY = gptoss.Harmony(TOKENIZER)
LORA = gptoss.Lora(rank=3, alpha=6)  # 3 rows on two ranks: 2 and 1


def write_adapter(folder, seed: int = 1, scale: float = 0.1, state: dict | None = None):
    """A trained adapter for write_folder's model, as peft writes it; `state` instead of drawn matrices."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {}
    for n in range(2):
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            at = f"base_model.model.model.layers.{n}.self_attn.{name}_proj.lora_"
            drawn[at + "A.weight"] = scale * torch.randn(LORA.rank, 64, generator=rng)
            drawn[at + "B.weight"] = scale * torch.randn(rows, LORA.rank, generator=rng)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(drawn if state is None else state, folder / "adapter_model.safetensors", {"format": "pt"})
    LORA.config().save_pretrained(folder)
    return folder


def merge(base, adapter, out) -> dict:
    """gptoss.merge of what peft wrote."""
    state = load_file(adapter / "adapter_model.safetensors")
    return gptoss.merge(base, state, LORA.alpha / LORA.rank, out)


def entries(folder) -> dict:
    return ShardFiles(folder).entries


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("base") / "mxfp4")


# ---- harmony -----------------------------------------------------------------------------------------------

odd = SPECIALS + ["<", "|", "assistant", "<|channel|>final<|message|>", "\n"]
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
    with pytest.raises(ValueError, match="not 'tool'"):
        HARMONY.prompt_ids([{"role": "tool", "content": ""}])


def test_a_tokenizer_with_channels_is_harmony_and_one_without_is_not(tokenizer):
    """Guards: the laptop's model talked to in harmony."""
    assert type(gptoss.template(TOKENIZER)) is gptoss.Harmony
    assert type(gptoss.template(tokenizer)) is lm.Template


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
    assert gptoss.read(TOKENIZER, ids) == (lm.disarm(TOKENIZER, reason), lm.disarm(TOKENIZER, final))
    assert ids[-1] == TOKENIZER.eos_token_id and ids.count(TOKENIZER.eos_token_id) == 1


@given(st.text(max_size=5), st.text(max_size=5), st.data())
@examples
def test_whatever_else_was_sampled_is_refused(reason, final, data):
    """Guards: an answer cut off by max_new_tokens, a tool call, a second message, taken for a delta."""
    ids = HARMONY.completion_ids(final, reason)
    added = list(TOKENIZER.get_added_vocab().values())
    at = data.draw(st.integers(0, len(ids) - 1))
    marks = [k for k, i in enumerate(ids) if i in added]
    mark, extra = data.draw(st.sampled_from(marks)), data.draw(st.sampled_from(added))
    # Where analysis, assistant and final begin.
    words = {HARMONY.completion_ids("").index(ids[1]), marks[3] + 1, marks[4] + 1}
    without = lambda k: ids[:k] + ids[k + 1 :]
    cut, inserted = ids[:at], ids[:at] + [extra] + ids[at:]
    wrong = [cut, without(mark), inserted, ids + ids[1:2], ids[:-1] + [added[-2]], *map(without, words)]
    with pytest.raises(ValueError, match="not a harmony answer"):
        gptoss.read(TOKENIZER, data.draw(st.sampled_from(wrong)))


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
        assert type(model.template) is gptoss.Harmony
    asked = []
    monkeypatch.setattr(remote, "Remote", lambda urls, folder, **given: asked.append(given["template"]))
    with evaluate.loaded(small, str(plain), 64, urls=("http://127.0.0.1:1",)):
        assert type(asked[0]) is gptoss.Harmony
    config = replace(recipe.LAPTOP, judge_model=str(plain), policy=str(plain), world_model=str(plain))
    _, parts = training.load_models(config, tmp_path)
    assert type(parts.world_model.lm.template) is type(parts.judge.lm.template) is gptoss.Harmony
    config = recipe.WorldModelSFT(base=str(plain), lora_rank=0, context=64)
    assert type(sft.load_world_model(config).template) is gptoss.Harmony


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
                                                  dtype=torch.bfloat16, attn_implementation="eager")
    want = dict(theirs.named_parameters())
    types = lambda named: {name: value.dtype for name, value in named.items()}
    plain = write_folder(tmp_path / "plain", packed=False)
    for folder in (base, plain):
        ours = gptoss.load_sharded(folder, lora=None, attention="eager")
        got = dict(ours.named_parameters())
        assert types(got) == types(want)
        assert not [name for name, value in got.items() if not torch.equal(value, want[name])]
        assert torch.equal(ours.eval()(IDS).logits, theirs.eval()(IDS).logits)
    adapted = gptoss.load_sharded(base, lora=LORA, attention="eager")
    with_b_zero = adapted.eval()(IDS).logits
    assert torch.equal(with_b_zero, theirs(IDS).logits), "with B = 0 the model starts where the base is"
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all(".lora_" in name and "self_attn" in name for name in trained)
    assert set(types(trained).values()) == {torch.float32}


def test_attention_without_a_backward_through_the_sinks_is_refused():
    """Guards: the flash kernel of a popular example, which trains on wrong gradients without a word (NOTES
    8.6)."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for name, device in (("sinks", cpu), ("eager", cpu), ("flex_attention", cuda)):
        assert sinks.training_attention(name, device) == name
    for name, device, reason in (
            ("flex_attention", cpu, "on a GPU only"), ("sdpa", cuda, "no attention sinks"),
            ("kernels-community/vllm-flash-attn3", cuda, "no backward"),
            ("flash_attention_2", cuda, "no backward")):
        with pytest.raises(ValueError, match=reason):
            sinks.training_attention(name, device)


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
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) if len(lengths) > 1 else None
    ours = sinks.sink_attention(module, q, k, v, None, 0.25, sink, window, cu_seq_lens_q=bounds)[0]
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
    sinks.sink_attention(None, q, k, v, None, 0.25, torch.randn(4), window)
    assert asked == [([kernel], length)]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("attention", ["sinks", "eager"])
def test_sequences_in_one_packed_row_do_not_see_each_other(base, attention, sharded):
    """Guards: transformers' GPT-OSS, which drops position_ids on the way to its masks: the second page of a
    row would read the first. Also of a single rank, whose other models read trees (lm.tree)."""
    net = gptoss.load_sharded(base, lora=LORA, attention=attention, compute=torch.float32)
    model = lm.LM(net, TOKENIZER, 512, torch.float32, sharded=sharded)
    alone = gptoss.load_sharded(base, lora=None, attention="eager", compute=torch.float32).eval()
    model.model.eval()
    logp, row = lm.token_logps(model, PAIRS)
    for k, (prompt, completion) in enumerate(PAIRS):
        with torch.no_grad():
            want = alone(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        want = want.gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(logp[row == k], want, atol=1e-4, rtol=0)


def cut_off(folder):
    part = folder / "model-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-100])


def other(**changes):
    def change(folder):
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return change


@pytest.mark.parametrize("damage, says", [
    (cut_off, "is cut off or missing .*ends at byte"), (other(num_attention_heads=4), "another config"),
    (other(num_hidden_layers=3, layer_types=["full_attention"] * 3), "weights of its config are in no file"),
    (other(num_hidden_layers=1, layer_types=["full_attention"]), "have no place in its config")])
def test_a_damaged_folder_is_refused_before_it_is_used(base, tmp_path, damage, says):
    """Guards: half a download that loads as zeros, or ends a merge after an hour. (What else can be wrong
    with files: tests/test_distributed.py.)"""
    folder = shutil.copytree(base, tmp_path / "damaged")
    damage(folder)
    with pytest.raises(ValueError, match=says):
        gptoss.load_sharded(folder)


# ---- two ranks ---------------------------------------------------------------------------------------------


def train(model, folder="") -> list[float]:
    """Three LoRA steps of two microbatches each, as sft.py does them; the losses."""
    losses = []
    model = lm.LM(model, TOKENIZER, 512, torch.float32, sharded=True)
    config = finetune.FineTune(lr=1e-2, tokens=16, microbatches=2, checkpoint_every=1)
    with each_step(lambda step, loss: losses.append(loss)):
        finetune.fit(model, PAIRS, config, checkpoint=folder)
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
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=200))
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
        merge(base, folder / "adapter", folder / "merged")
    distributed.barrier()
    seen["kl"] = gptoss.kl(model, folder / "merged", SEQUENCES)
    seen["adapter after"] = gptoss.adapter_state(model)
    # ---- a merge that rank 0 cannot do ----
    config = SimpleNamespace(base=base, out=str(base), lora_rank=LORA.rank, lora_alpha=LORA.alpha)
    try:
        gptoss.merge_all_ranks(model, config, SEQUENCES)
    except ValueError as error:
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
    otherwise than FSDP2 cuts them."""
    (first, second), _ = two
    whole = gptoss.load_sharded(base, lora=gptoss.Lora(rank=1))
    for name, parameter in whole.named_parameters():
        together = torch.cat([first["shards"][name], second["shards"][name]])
        assert together.dtype == parameter.dtype and torch.equal(together, parameter), name
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    assert [len(seen["shards"][experts]) for seen in (first, second)] == [3, 2]
    for seen in (first, second):
        assert torch.equal(seen["rotary"], whole.model.rotary_emb.inv_freq)


def test_a_rank_reads_its_own_experts_only(base, two):
    """Guards: a loader that reads all and keeps a part: 8 x 65 GB over the network, or 8 x 234 GB in
    memory."""
    (first, second), _ = two
    for name, entry in entries(base).items():
        size, rows = entry.end - entry.start, entry.shape[0]
        half = -(-rows // 2)
        assert first["read"][name] == size * half // rows, name
        assert second["read"].get(name, 0) == size * (rows - half) // rows, name


def test_three_steps_on_two_ranks_are_three_steps_on_one(base, two):
    """Guards: gradients averaged where they must be summed, a rank's loss over its own tokens, an adapter
    that FSDP does not train or that starts differently on each rank."""
    (first, second), folder = two
    model = gptoss.load_sharded(base, lora=LORA, compute=torch.float32, checkpointing=False)
    before = gptoss.adapter_state(model)
    losses = train(model)
    assert len(losses) == 3
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
    others = gptoss.adapter_state(gptoss.load_sharded(base, lora=LORA, seed=1))
    starts = set()
    for state in (before, others):
        drawn = [value for name, value in state.items() if "q_proj.lora_A" in name]
        starts |= {tuple(value.flatten().tolist()) for value in drawn}
    assert len(starts) == 4, "two seeds or two layers that start alike"
    after = gptoss.adapter_state(model)
    for seen in (first, second):
        assert seen["losses"] == pytest.approx(losses, abs=1e-5)
        assert after.keys() == seen["adapter"].keys()
        for name, value in after.items():
            torch.testing.assert_close(seen["adapter"][name], value, atol=1e-5, rtol=0)
            assert not torch.equal(value, before[name]), f"{name} did not learn"
            assert torch.equal(seen["adapter before"][name], before[name])
            assert torch.equal(seen["adapter after"][name], seen["adapter"][name])
    saved = FileSystemReader(folder / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    kept = [name for name in saved if name.startswith("model.")]
    assert len(kept) == len(after), "a checkpoint of 234 GB"
    assert all(".lora_" in name for name in kept)


def test_a_merge_that_rank_0_cannot_do_ends_all_ranks_and_leaves_the_adapter(base, two):
    """Guards: ranks that wait for ever for a rank that met a full disk, and a day's training that is lost
    with it."""
    for seen in two[0]:
        assert "another folder" in seen["refused"] and f"the adapter is in {base}.adapter" in seen["refused"]
    saved = load_file(f"{base}.adapter/adapter_model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in two[0][0]["adapter"].items())


# ---- merge -------------------------------------------------------------------------------------------------


def test_a_merge_is_peft_s_to_one_rounding_and_touches_nothing_else(base, tmp_path):
    """Guards: alpha / r forgotten, B A transposed, a sum in bf16, experts requantised, a header rewritten,
    quantization_config lost (the server would then look for bf16 experts)."""
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "merged"
    report = merge(base, adapter, out)
    assert report["tensors"] == 8 and report["scaling"] == 2.0
    beside = peft.PeftModel.from_pretrained(gptoss.load_sharded(base, lora=None), adapter)
    theirs = dict(beside.merge_and_unload().named_parameters())
    state, changed = load_file(adapter / "adapter_model.safetensors"), 0
    for name in entries(base):
        if "self_attn" not in name or not name.endswith("proj.weight"):
            assert bytes_of(base, name) == bytes_of(out, name), name
            continue
        was, now = (ShardFiles(folder).read(name, slice(None)) for folder in (base, out))
        at = "base_model.model." + name.removesuffix("weight") + "lora_"
        exact = was.double() + 2.0 * state[at + "B.weight"].double() @ state[at + "A.weight"].double()
        half_a_unit = exact.abs() * 2**-8 * 1.001 + 1e-9  # in the last place of bf16
        assert ((now.double() - exact).abs() <= half_a_unit).all()
        a_unit = 2**-7 * torch.maximum(now.float().abs(), was.float().abs())
        assert ((now.float() - theirs[name].float()).abs() <= a_unit).all()
        changed += not torch.equal(was, now)
    assert changed == 8
    top = {file.name for file in base.iterdir() if file.is_file()}
    same = [name for name in top if not name.endswith(".safetensors")]
    assert {file.name for file in out.iterdir()} == top, "original/ stays behind, all else comes along"
    assert all((base / name).read_bytes() == (out / name).read_bytes() for name in same)
    assert "quantization_config" in json.loads((out / "config.json").read_text())


def test_kl_is_small_for_the_merge_and_large_for_another_model(base, two, tmp_path):
    """Guards: a comparison of the model with itself, an adapter that stays on over the merged weights,
    weights that are not put back, ranks that compare different rows."""
    (first, second), folder = two
    assert first["kl"] == second["kl"]
    model = gptoss.load_sharded(base, lora=LORA, compute=torch.float32, checkpointing=False)
    train(model)
    before, kept = model(IDS).logits, {name: value.clone() for name, value in model.named_parameters()}
    found = gptoss.kl(model, folder / "merged", SEQUENCES)
    assert torch.equal(model(IDS).logits, before)
    assert all(torch.equal(value, kept[name]) for name, value in model.named_parameters())
    merged, total = gptoss.load_sharded(folder / "merged", lora=None, compute=torch.float32).eval(), 0.0
    for ids in SEQUENCES:
        with torch.no_grad():
            p, q = (m(torch.tensor([ids])).logits[0].log_softmax(-1) for m in (model, merged))
        total += torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
    assert found == pytest.approx(total / sum(map(len, SEQUENCES)), rel=1e-3)
    assert first["kl"] == pytest.approx(found, rel=0.2)
    whole = gptoss.kl(model, base, SEQUENCES)
    assert 0 < found < 1e-3 < 100 * found < whole, "the adapter itself moves the model a hundred times more"


def test_a_killed_merge_leaves_the_old_folder_and_no_half_new_one(base, tmp_path):
    """Guards: a server that starts on half a model."""
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "merged"
    name = "model.layers.1.self_attn.o_proj.weight"
    with killed(gptoss, "_add", 3):
        merge(base, adapter, out)
    assert not out.exists()
    merge(base, adapter, out)  # over what the killed merge left
    good = bytes_of(out, name)
    with killed(gptoss, "_add", 3):
        merge(base, write_adapter(tmp_path / "other", seed=5), out)
    assert bytes_of(out, name) == good
    merge(base, tmp_path / "other", out)
    assert bytes_of(out, name) != good and not out.with_name("merged.replaced").exists()


Q = "model.layers.0.self_attn.q_proj.lora_"
Q2 = Q.replace("layers.0", "layers.2")


@pytest.mark.parametrize("state, says", [
    ({Q + "A.weight": torch.zeros(3, 48), Q + "B.weight": torch.zeros(64, 3)}, r"for BF16 \(64, 48\)"),
    ({Q2 + "A.weight": torch.zeros(3, 64), Q2 + "B.weight": torch.zeros(64, 3)}, "q_proj.weight is not in"),
    ({Q + "A.weight": torch.full((3, 64), math.inf), Q + "B.weight": torch.ones(64, 3)}, "diverged"),
])
def test_an_adapter_that_does_not_belong_is_refused(base, tmp_path, state, says):
    """Guards: a base that was fetched anew in another dtype, written over with bf16 at the wrong places."""
    adapter = write_adapter(tmp_path / "adapter", state=state)
    with pytest.raises(ValueError, match=says):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


