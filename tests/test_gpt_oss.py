"""Claims about gpt_oss.py: harmony cannot be broken out of, every rank gets exactly its own rows, the merge
changes attention and nothing else. On a folder shaped as OpenAI's, with MXFP4 experts (helpers/gptoss.py)."""
import copy
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.gptoss import SPECIALS, TOKENIZER, tensors, write_folder
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import data
import distributed
import gpt_oss
import judge
import lm
import sft
from config import SFT, UserError

HARMONY = gpt_oss.Harmony(TOKENIZER)
LORA = {"rank": 3, "alpha": 6}  # 3 rows on two ranks: 2 and 1
load = lambda folder, compute=torch.float32, **how: gpt_oss.load(folder, 512, compute=compute, **LORA | how)


def by_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True),
                                                dtype=torch.bfloat16, attn_implementation="eager").eval()


def adapter_of(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in distributed.full_tensors(model.net, torch.float32)
            if ".lora_" in name}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("base") / "mxfp4")


odd = SPECIALS + ["<", "|", "assistant", "<|channel|>final<|message|>", "\n"]
hostile = st.lists(st.text(max_size=8) | st.sampled_from(odd), max_size=6).map("".join)
chat = lambda system, user: [{"role": "system", "content": system}, {"role": "user", "content": user}]
read = lambda ids: HARMONY.read(lm.Sample(ids, [], "", False))


def test_prompt_and_answer_are_the_formats_and_the_published_templates_but_for_date_and_blank_line():
    """Guards: a header that is missing, today's date, an answer in another form, a verdict that is scored
    after other text than it was written. As trl/chat_templates/gptoss.jinja of huggingface/trl f2cd577
    writes it with reasoning_effort low, and openai/harmony's docs/format.md without a blank line."""
    written = (
        f"<|start|>system<|message|>{gpt_oss.SYSTEM}<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe the web.<|end|>"
        "<|start|>user<|message|>click [4]<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Simple arithmetic.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>")
    prompt = HARMONY.prompt_ids(chat("Be the web.", "click [4]"))
    answer = HARMONY.completion_ids("2 + 2 = 4.", "Simple arithmetic.")
    assert (TOKENIZER.decode(prompt), TOKENIZER.decode(answer)) == written
    tuned = copy.deepcopy(TOKENIZER)
    tuned.init_kwargs["system_prompt"] = "Act.<|end|>"  # what it was fine-tuned under (sft.py)
    prompt = gpt_oss.Harmony(tuned).prompt_ids(chat("Be the web.", "click [4]"))
    assert "# Instructions\n\nAct.< |end|><|end|>" in TOKENIZER.decode(prompt)
    yes, no, k = judge.verdict_ids(SimpleNamespace(template=HARMONY), "So it is.\nCOMPLETED: ")
    assert (TOKENIZER.decode(yes[:k]), TOKENIZER.decode(no[k:])) == (
        "<|channel|>analysis<|message|>So it is.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>COMPLETED: ", "NO<|return|>")


@given(hostile, hostile, st.data())
def test_no_text_breaks_out_and_an_answer_is_read_as_it_was_written_or_refused(text, other, choice):
    """Guards: a page that says <|end|><|start|>assistant and answers for the world model, or names a token no
    list calls special; whitespace cleaned up, a rationale that closes its channel, the two parts exchanged;
    an answer that was cut off, a tool call, a second message, taken for a delta."""
    ids, safe = HARMONY.prompt_ids(chat(text, other)), lm.disarm(TOKENIZER, other)
    added = {index: token for token, index in TOKENIZER.get_added_vocab().items()}
    marks = [added[i] for i in ids if i in added]
    assert marks == ["<|start|>", "<|message|>", "<|end|>"] * 3 + ["<|start|>"]
    assert TOKENIZER.decode(ids).endswith(f"<|start|>user<|message|>{safe}<|end|><|start|>assistant")
    ids = HARMONY.completion_ids(other, text)
    assert read(ids) == f"{data.one_line(lm.disarm(TOKENIZER, text))}\n{safe}"
    assert ids[-1] == TOKENIZER.eos_token_id and ids.count(TOKENIZER.eos_token_id) == 1
    at, extra = choice.draw(st.integers(0, len(ids) - 1)), choice.draw(st.sampled_from([*added]))
    places = [k for k, i in enumerate(ids) if i in added]
    places += [1, places[3] + 1, places[4] + 1]  # where analysis, assistant and final begin
    wrong = [ids[:k] + ids[k + 1 :] for k in places]
    wrong += [ids[:at], ids[:at] + [extra] + ids[at:], ids + ids[1:2], ids[:-1] + [[*added][-2]]]
    with pytest.raises(ValueError, match="not a harmony answer"):
        read(choice.draw(st.sampled_from(wrong)))


def test_a_folder_loads_as_transformers_loads_it(base):
    """Guards: a layer read into another, experts or routers that are trained. (Each load compares log-probs:
    lm.check_logps.)"""
    want = dict(by_transformers(base).named_parameters())
    parameters = load(base, torch.bfloat16).net.named_parameters()
    got = {name.replace(".base_layer.", "."): value for name, value in parameters}
    trained = [name for name, value in got.items() if value.requires_grad]
    assert len(trained) == 2 * 4 * 2 and all(".lora_" in name and "self_attn" in name for name in trained)
    assert {got.pop(name).dtype for name in trained} == {torch.float32}
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in got)


@given(st.lists(st.integers(1, 29), min_size=1, max_size=3), st.sampled_from([None, 4, 8]), st.integers(0, 9))
def test_a_sink_as_a_key_is_the_sink_of_eager_attention_forwards_and_backwards(lengths, window, seed):
    """Guards: a key too many or too few in the window, a first block that sees padding, heads that take each
    other's sink, a sequence that sees its neighbour, gradients that miss the sink's share."""
    rng, total = torch.Generator().manual_seed(seed), sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 16, generator=rng, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(1, total, 4, 16, generator=rng)
    sink = torch.randn(4, generator=rng, requires_grad=True)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(total)[:, None] - torch.arange(total)
    sees = (back >= 0) & (back < (window or total)) & (row[:, None] == row)
    dense = torch.zeros(1, 1, total, total).masked_fill(~sees, -torch.inf)
    module = SimpleNamespace(sinks=sink, num_key_value_groups=2, training=True)
    trie = lm.Trie(part.tolist() for part in torch.arange(total).split(lengths))  # no two tokens are alike
    ours = gpt_oss.sink_attention(module, q, k, v, None, 0.25, sink, trie, window)[0]
    theirs = eager_attention_forward(module, q, k, v, dense, 0.25)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((out * weight).sum(), (q, k, v, sink)) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


# ---- two ranks, and the merge ------------------------------------------------------------------------------

def train(model) -> tuple[dict, dict, dict]:
    """Three LoRA steps of one or two microbatches, as sft.py does them: (adapter before, report, after)."""
    before = adapter_of(model)
    items = [[([k + 5], [(31 * k + j * j) % 250 for j in range(k + 2)])] for k in range(8)]
    report = sft.fit(model, items, SFT(lr=1e-2, tokens=16, microbatches=2))
    return before, report, adapter_of(model)


def one_of_two(rank: int, base, folder):
    """What each of two ranks does: first alone, then with the other."""
    torch.set_num_threads(1)
    alone = dict(load(base, torch.bfloat16, rank=1).net.named_parameters())
    before, report, after = train(load(base))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=200))
    # bf16, adapters of one row (the second rank has none of A), weights in host memory, experts counted
    convert = mock.Mock(wraps=gpt_oss.convert_moe_packed_tensors)
    with mock.patch.object(gpt_oss, "convert_moe_packed_tensors", convert):
        for name, held in load(base, torch.bfloat16, rank=1, offload=True).net.named_parameters():
            assert held.dtype == alone[name].dtype and torch.equal(held.full_tensor(), alone[name]), name
    assert [len(call.args[0]) for call in convert.call_args_list] == [3 - rank] * 4
    # float32, three steps, saved and merged
    model = load(base)
    our_before, our_report, our_after = train(model)
    assert our_report["loss"] == pytest.approx(report["loss"], abs=2e-4) and our_report["steps"] == 3
    for name, value in after.items():
        torch.testing.assert_close(our_after[name], value, atol=1e-5, rtol=0)
        assert torch.equal(our_before[name], before[name]) and not torch.equal(value, before[name])
    gpt_oss.save(model, base, folder / "merged", **LORA)
    if rank == 0:
        saved = load_file(folder / "merged.adapter/adapter_model.safetensors")
        for name, value in our_after.items():
            assert torch.equal(saved[f"base_model.model.{name.replace('.default.', '.')}"], value)
    dist.destroy_process_group()


def test_two_ranks_hold_and_learn_as_one_and_the_merge_is_what_was_trained_and_only_attention(base, tmp_path):
    """Guards: uneven rows (5 experts, 267 tokens, an adapter of one row) cut otherwise than FSDP2 cuts them;
    a loader that unpacks all experts and keeps a part: 8 x 234 GB; gradients averaged; an adapter that starts
    differently on each rank. Of the merge: alpha / r twice or never, a sum in bf16, an adapter of before the
    last step, or of another model, or that peft cannot read, experts requantised."""
    mp.spawn(one_of_two, (base, tmp_path), nprocs=2)  # a fork fails where autograd's threads have started
    out, adapter = tmp_path / "merged", tmp_path / "merged.adapter"
    state, was, now = load_file(adapter / "adapter_model.safetensors"), tensors(base), tensors(out)
    theirs = peft.PeftModel.from_pretrained(by_transformers(base), adapter).merge_and_unload().state_dict()
    for name in was.keys() | now.keys():
        if "self_attn" not in name or not name.endswith("proj.weight"):
            assert torch.equal(was[name], now[name]), name
            continue
        at = f"base_model.model.{name.removesuffix('weight')}lora_"
        exact = was[name].double() + 2.0 * state[f"{at}B.weight"].double() @ state[f"{at}A.weight"].double()
        half_a_unit = 2**-8 * 1.001  # in the last place of bf16
        torch.testing.assert_close(now[name].double(), exact, rtol=half_a_unit, atol=1e-9)
        torch.testing.assert_close(theirs[name].double(), exact, rtol=4 * half_a_unit, atol=1e-9)
    files = {file.name: file.read_bytes() for file in base.iterdir() if file.is_file()}
    assert files.keys() == {file.name for file in out.iterdir()}, "original/ stays behind"
    assert all((out / name).read_bytes() == files[name] for name in files if ".safetensors" not in name)
    save_file({name.replace(".1.", ".9."): half for name, half in state.items()},
              adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="another model"):
        gpt_oss.merge(base, adapter, out)
