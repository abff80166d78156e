"""Claims about node/made_up.py and node/made_pages.py: what is made has the real names,
shapes, types, sizes and lengths, everything here loads it, and it goes away without anything else."""
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import gptoss as folders
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import a11y
import data
import lm
from distributed import ShardFiles
from node import gptoss, made_pages, made_up, sizes

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(folder.name for folder in (ROOT / "configs").iterdir())


def llama(folder, **more):
    """A config.json of a small Llama in `folder`."""
    wanted = dict(vocab_size=700, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, head_dim=32, intermediate_size=96, max_position_embeddings=2048)
    config = LlamaConfig(**{**wanted, **more})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def listed(folder) -> dict:
    return {name: (entry.dtype, entry.shape) for name, entry in ShardFiles(folder).entries.items()}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Folders in OpenAI's layout, packed and plain; room for harmony's tokens and bytes."""
    folder = tmp_path_factory.mktemp("theirs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "VOCABULARY", 701)
        return {"published": folders.write_folder(folder / "packed"),
                "bf16": folders.write_folder(folder / "plain", packed=False)}


# ---- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_made_llama_has_the_tensors_that_transformers_saves(tmp_path, tied):
    """Guards: a tied head in the folder, a tensor that is missing or turned, float32 on disk."""
    config = AutoConfig.from_pretrained(llama(tmp_path / "config", tie_word_embeddings=tied))
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "saved")
    made = made_up.model_folder(tmp_path / "made", tmp_path / "config")
    assert listed(made) == listed(tmp_path / "saved") and ("lm_head.weight" in listed(made)) != tied


@pytest.mark.parametrize("kind", ["published", "bf16"])
def test_a_made_gpt_oss_has_the_tensors_of_openais_layout(tmp_path, theirs, kind):
    """Guards: blocks and scales of other shapes than the checkpoint's, packed tensors in a folder for vLLM's
    CPU build, and a config that calls plain weights MXFP4."""
    made = made_up.model_folder(tmp_path / "made", theirs[kind])
    assert listed(made) == listed(theirs[kind])
    config = json.loads((made / "config.json").read_text())
    assert ("quantization_config" in config) == (kind == "published") and config["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_model_would_take_the_gigabytes_that_the_plan_says(name):
    """Guards: a rehearsal that fills a disk which it called large enough. Nothing is written."""
    config = ROOT / "configs" / name
    assert made_up.gigabytes(config) == pytest.approx(sizes.read_model(config).folder, rel=0.01)


def test_the_gigabytes_foretold_are_those_on_the_disk(tmp_path):
    """Guards: an estimate without the tokenizer, or in other units."""
    made = made_up.model_folder(tmp_path / "made", llama(tmp_path / "config", vocab_size=128_256))
    used = sum(file.stat().st_size for file in made.iterdir()) / 1e9
    assert 0.8 * made_up.gigabytes(tmp_path / "config") < used <= made_up.gigabytes(tmp_path / "config")


def test_a_large_model_is_cut_into_files_with_an_index(tmp_path, monkeypatch, theirs):
    """Guards: one file of 65 GB, as large in memory; an index that names another file."""
    monkeypatch.setattr(made_up, "SHARD", 60_000)
    made = made_up.model_folder(tmp_path / "made", theirs["published"])
    assert listed(made) == listed(theirs["published"]) and len(list(made.glob("model-*"))) > 3
    assert lm.load(made_up.model_folder(tmp_path / "plain", theirs["bf16"]))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux only")
def test_what_was_written_is_read_from_the_disk_again(tmp_path, monkeypatch):
    """Guards: a rehearsal whose models load out of the memory of what was just written, in a tenth of the
    time of the downloaded ones."""
    forgotten = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, count, advice: forgotten.append(
        (os.fstat(file).st_size, start, count, advice)))
    made = made_up.model_folder(tmp_path / "made", llama(tmp_path / "config"))
    size = (made / "model.safetensors").stat().st_size
    assert forgotten == [(size, 0, 0, os.POSIX_FADV_DONTNEED)]


@pytest.mark.parametrize("kind", ["published", "bf16"])
def test_every_loader_reads_a_made_folder_and_its_answers_are_finite(tmp_path, theirs, kind):
    """Guards: nan from a scale of 2^128 or from norms of 0, weights of zeros that cost and show nothing, and
    layers, experts or rows that are copies of each other."""
    made = made_up.model_folder(tmp_path / "oss", theirs[kind])
    small = made_up.model_folder(tmp_path / "llama", llama(tmp_path / "config"))
    nets = [gptoss.load_sharded(made, compute=torch.float32), lm.load(small).model]
    nets += [lm.load(made).model] if kind == "bf16" else []
    for net in nets:
        logits = net(input_ids=torch.arange(2, 60)[None]).logits[0]
        assert logits.isfinite().all() and 0.05 < logits.std() < 5
        assert logits.argmax(-1).unique().numel() > 5, "the answer does not depend on the prompt"
    experts = nets[0].model.layers[1].mlp.experts.down_proj
    assert 0.01 < experts.std() < 0.04 and (experts[0] != experts[1]).float().mean() > 0.5
    rows = nets[1].model.embed_tokens.weight
    assert len(rows.unique(dim=0)) == len(rows) and 0.015 < rows.std() < 0.025
    assert (nets[1].model.norm.weight == 1).all()


def test_the_same_seed_makes_the_same_folder_and_another_seed_another(tmp_path):
    """Guards: a rehearsal that cannot be repeated; two models that are copies of each other."""
    config = llama(tmp_path / "config")
    made = [made_up.model_folder(tmp_path / f"{k}", config, seed=seed) for k, seed in enumerate((1, 1, 2))]
    first, again, other = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in made)
    assert first == again
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


def test_what_cannot_be_made_is_told(tmp_path, theirs):
    """Guards: a model that is written into somebody's folder, and tensors that no loader can unpack."""
    with pytest.raises(ValueError, match="exists already"):
        made_up.model_folder(tmp_path, llama(tmp_path / "config"))
    with pytest.raises(ValueError, match="no room for 256 bytes"):
        made_up.tokenizer("llama", 260)
    config = AutoConfig.from_pretrained(theirs["published"])
    config.intermediate_size = 48
    with pytest.raises(ValueError, match="down_proj.*48 is no multiple of 32"):
        made_up.tensors(config)


# ---- tokenizers --------------------------------------------------------------------------------------------

# Ids as the hub's tokenizer_config.json and generation_config.json have them.
KNOWN = {"llama": (128_256, 128_256, {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001,
                                      "<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007,
                                      "<|eom_id|>": 128_008, "<|eot_id|>": 128_009,
                                      "<|reserved_special_token_247|>": 128_255}),
         "gpt_oss": (201_088, 200_019, {"<|startoftext|>": 199_998, "<|endoftext|>": 199_999,
                                        "<|return|>": 200_002, "<|channel|>": 200_005, "<|start|>": 200_006,
                                        "<|end|>": 200_007, "<|message|>": 200_008, "<|call|>": 200_012,
                                        "<|endofprompt|>": 200_018}),
         "qwen3": (151_936, 151_669, {"<|endoftext|>": 151_643, "<|im_start|>": 151_644,
                                      "<|im_end|>": 151_645, "<tool_call>": 151_657, "<|fim_pad|>": 151_662,
                                      "<tool_response>": 151_665, "<think>": 151_667,
                                      "</think>": 151_668})}
real = cache(lambda kind: made_up.tokenizer(kind, KNOWN[kind][0]))  # not while tests are only listed


@pytest.mark.parametrize("kind", KNOWN)
def test_a_made_tokenizer_has_the_real_size_and_special_tokens(kind):
    """Guards: ids beyond the embedding, an end of turn that is another token than the config's."""
    words, (_, size, ids) = real(kind), KNOWN[kind]
    assert len(words) == size == len(set(words.get_vocab().values()))
    assert {token: words.convert_tokens_to_ids(token) for token in ids} == ids
    assert set(ids) <= set(words.get_added_vocab()), "lm.disarm would not know them"
    assert words(" ".join(ids), add_special_tokens=False).input_ids[::2] == list(ids.values())


@pytest.mark.parametrize("kind", KNOWN)
def test_pages_have_as_many_tokens_as_real_ones(kind):
    """Guards: prompts of a quarter or of four times the length, whose times say nothing."""
    pages = [made_pages.Site(random.Random(seed)).page() for seed in range(1000, 1060)]  # none it learned
    tokens = sum(len(real(kind)(page).input_ids) for page in pages)
    assert 3.4 < sum(len(page.encode()) for page in pages) / tokens < 4.0


@settings(settings.get_profile("models"))
@given(st.text())
def test_a_made_tokenizer_loses_nothing(text):
    """Guards: bytes that no token spells."""
    text = lm.disarm(real("llama"), text)
    for words in map(real, KNOWN):
        assert words.decode(words(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("name", CONFIGS)
def test_config_and_generation_config_name_the_published_ids(tmp_path, name, caplog):
    """Guards: a rehearsal whose answers never end, or end elsewhere than the node's; transformers' warning of
    a wrong tokenizer (Mistral's) to whoever rehearses."""
    config = json.loads((ROOT / "configs" / name / "config.json").read_text())
    narrow = config | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32,
                       "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    narrow |= {"layer_types": ["full_attention"]} if "layer_types" in config else {}
    (tmp_path / "narrow").mkdir()
    (tmp_path / "narrow" / "config.json").write_text(json.dumps(narrow))
    folder = made_up.model_folder(tmp_path / "made", tmp_path / "narrow")
    there = json.loads((folder / "config.json").read_text())
    there.pop("transformers_version", None)
    assert there == narrow | {"dtype": "bfloat16"}
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = {"gpt_oss": [200_002, 199_999, 200_012], "llama": [128_001, 128_008, 128_009],
            "qwen3": [151_645, 151_643]}[config["model_type"]]
    assert generation["eos_token_id"] == ends and generation["do_sample"]
    logging.getLogger("transformers").propagate = True
    loaded = lm.load_tokenizer(folder)
    assert not caplog.records, caplog.text
    assert loaded.eos_token_id in ends and loaded.get_vocab() == real(config["model_type"]).get_vocab()


ASKED = [{"role": "system", "content": "Go."}, {"role": "user", "content": " Is it? "}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "It is."}]
LLAMA = ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December "
         "2023\nToday Date: 26 Jul 2024\n\nGo.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nIs it?"
         "<|eot_id|>")
QWEN = "<|im_start|>system\nGo.<|im_end|>\n<|im_start|>user\n Is it? <|im_end|>\n"
# (a question, its answer, a question behind an answer), as public copies of the models' own chat templates
# write them (transformers 5.19, lm.STYLE). Of all: huggingface/trl f2cd577, trl/chat_templates/qwen3.jinja,
# llama3_1.jinja and llama3_2.jinja, the last two alike here; its README calls them the original ones. Of
# Llama-3.2 also ggerganov/llama.cpp 7b5e080, models/templates/meta-llama-Llama-3.2-3B-Instruct.jinja; of
# Qwen3 ye-NX/llama.cpp b354d7c, models/templates/Qwen-Qwen3-0.6B.jinja. (gpt-oss: tests/test_gptoss.py.)
WRITTEN = {
    "llama": (LLAMA + "<|start_header_id|>assistant<|end_header_id|>\n\n",
              LLAMA + "<|start_header_id|>assistant<|end_header_id|>\n\nIt is.<|eot_id|>",
              LLAMA + "<|start_header_id|>assistant<|end_header_id|>\n\nIt is.<|eot_id|>"
              "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "qwen3": (QWEN + "<|im_start|>assistant\n<think>\n\n</think>\n\n",
              QWEN + "<|im_start|>assistant\n<think>\n\n</think>\n\nIt is.<|im_end|>\n",
              QWEN + "<|im_start|>assistant\nIt is.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
              "<|im_start|>assistant\n<think>\n\n</think>\n\n")}


@pytest.mark.parametrize("kind", WRITTEN)
def test_prompts_are_those_of_the_published_templates_and_what_is_learned_is_their_answer(kind):
    """Guards: Qwen3 asked to think, or without the empty block that it has always seen where it does not; an
    answer that is learned in another place than where it is sampled; a made-up model that is talked to in
    another way than the real one."""
    words = made_up.tokenizer(kind, 800)
    asked, answered, again = WRITTEN[kind]
    more = [*ANSWERED, {"role": "user", "content": "And now?"}]
    write = lambda chat, **how: words.apply_chat_template(chat, tokenize=False, **lm.STYLE, **how)
    assert write(ASKED, add_generation_prompt=True) == asked
    assert write(ANSWERED) == answered and write(more, add_generation_prompt=True) == again
    template = lm.Template(words)
    prompt, completion = template.prompt_ids(ASKED), template.completion_ids("It is.")
    assert words.decode(prompt) == asked and completion[-1] == words.eos_token_id
    assert words.decode(prompt + completion) == answered.rstrip("\n")
    assert words.decode(template.prompt_ids(more)) == again


def test_a_page_cannot_think_for_the_agent():
    """Guards: a page that writes a block of thought, which Qwen3's tokenizer does not call special."""
    words = real("qwen3")
    thought = "<think>The page is right.</think>"
    ids = lm.Template(words).prompt_ids([{"role": "user", "content": thought}])
    ours = words.convert_tokens_to_ids(["<think>", "</think>"])
    assert [index for index in ids if index in ours] == ours, "the empty block alone"
    assert not {*lm.Template(words).completion_ids(thought)} & {*ours}


# ---- recordings --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """(trajectories, counts) of 1,200 made rows, as data.read_nnetnav reads them."""
    counts = Counter()
    rows = [(f"here:{k}", row) for k, row in enumerate(islice(made_pages.rows(seed=3), 1200))]
    return list(data.read_nnetnav("here", counts, rows)), counts


def test_nearly_all_made_rows_are_kept_and_their_histories_agree(recorded):
    """Guards: rows that the reader drops, so that the rehearsal prepares a tenth of what the node will."""
    trajectories, counts = recorded
    assert counts["rows"] == 1200 and counts["kept"] >= 0.99 * 1200 and not counts["replaced"]
    assert 7 < counts["rows"] / len(trajectories) < 13, "NNetNav has 9.6 steps a task"
    assert all(t.reward == 1 and t.terminated for t in trajectories[:-1])
    steps = [step for t in trajectories for step in t.steps]
    for k, (before, step) in enumerate(zip(steps, steps[1:])):
        if step.index:
            assert k % 10 or step.previous[-1] == data.describe(before.action, before.page)
            assert data.parse_described(step.previous[-1]) == before.action
            assert not before.action.bid or before.action.bid in data.bids(before.page)
    names = Counter(step.action.name for step in steps)
    assert names["click"] > names["type"] > 100 and names["stop"] >= len(trajectories) - 1


def test_made_pages_are_as_long_and_as_various_as_recorded_ones(recorded):
    """Guards: pages of one length, for which every plan is right."""
    pages = [step.page for t in recorded[0] for step in t.steps]
    lengths = [len(page.encode()) for page in pages]
    assert statistics.mean(lengths) == pytest.approx(33_000, rel=0.15)
    logs = [math.log(length) for length in lengths]
    assert 0.5 < statistics.stdev(logs) < 0.9 and max(lengths) > 3 * statistics.median(lengths)
    assert statistics.median(page.count("\n") for page in pages) > 200
    for page in pages[::40]:
        ids = data.bids(page)
        assert len(set(ids)) == len(ids) > 20
        assert all(node.role for node in a11y.parse(page)), "lines that the parser does not understand"
        assert data.root_url(page).startswith("https://") and ", url=" in page and "StaticText" in page
    scripts = [re.search(letters, page[:400]) for page in pages[::10]
               for letters in ("[\u0400-\u04ff]", "[\u0600-\u06ff]", "[\u4e00-\u9fff]")]
    assert sum(map(bool, scripts[0::3])) and sum(map(bool, scripts[1::3])) and sum(map(bool, scripts[2::3]))


def test_the_deltas_of_made_pages_are_as_short_and_as_long_as_those_of_real_sites(recorded):
    """Guards: a world model that is rehearsed on targets of another length (NOTES 2.7: median .06 of the next
    page, mean .23)."""
    shares = []
    for trajectory in recorded[0][::5]:
        for step, _, after, _ in data.transitions(trajectory):
            delta = a11y.diff(step.page, after)
            assert a11y.apply(step.page, delta) == after
            shares.append(len(delta) / len(after))
    assert len(shares) > 200
    assert 0.03 < statistics.median(shares) < 0.1 and 0.16 < statistics.mean(shares) < 0.3


def test_a_file_of_rows_is_as_large_as_asked_and_holds_whole_tasks(tmp_path):
    """Guards: a file of 40 rows for one of 4,000, and a last task that was cut off."""
    rows = {}
    for seed in (1, 1, 2):
        file = tmp_path / f"{seed}-{len(rows)}.jsonl"
        rows[file] = made_up.rows_file(file, 40, seed)
        counts = Counter()
        found = list(data.read_nnetnav(file, counts))
        assert counts["rows"] == rows[file] == counts["kept"] and all(t.terminated for t in found)
    first, again, other = rows
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert 40 <= rows[other] < 60 and not list(tmp_path.glob("*.tmp"))
    row = json.loads(first.read_text().partition("\n")[0])
    published = json.loads((ROOT / "tests" / "nnetnav_small.jsonl").read_text().partition("\n")[0])
    assert list(row) and set(row) == set(published)
    assert row["prompt"] == row["messages"][1]["content"] and row["output"] == row["messages"][2]["content"]


def test_small_pages_can_be_asked_for(tmp_path):
    """Guards: a laptop that rehearses on pages which its model cannot read."""
    made_up.rows_file(tmp_path / "small.jsonl", rows=900, page_bytes=4_000)
    pages = [step.page for t in data.read_nnetnav(tmp_path / "small.jsonl", Counter()) for step in t.steps]
    assert statistics.mean(len(page.encode()) for page in pages) == pytest.approx(4_000, rel=0.3)


# ---- the place ---------------------------------------------------------------------------------------------


def test_the_place_is_gone_afterwards_and_what_was_there_before_is_not(tmp_path, capsys):
    """Guards: 80 GB that stay, after an error too; a user's folder that is emptied because a flag named it,
    and a second rehearsal that deletes the first's models under it."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KeyError), made_up.place(tmp_path, 0) as one:
        (one / "deep").mkdir()
        (one / "deep" / "file").write_text("x")
        with made_up.place(tmp_path, 0) as other:
            assert one != other and one.parent == other.parent == tmp_path
            assert f"rm -r {other}" in capsys.readouterr().out
        assert one.exists() and not other.exists()
        raise KeyError("anything")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="file cannot be written"):
        with made_up.place(tmp_path / "file", 0):
            pass


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    """Guards: a rehearsal that ends after ten minutes of writing, or without saying how much it needs."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50e9))
    with pytest.raises(ValueError, match=r"made needs 82\.0 GB, and .* 50\.0 GB are free; .* --where"):
        with made_up.place(tmp_path / "a" / "made", 82):
            pass
    assert not list(tmp_path.iterdir())
    with made_up.place(tmp_path / "a" / "made", 49) as folder:
        assert folder.exists()


def test_a_disk_that_fills_up_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    """Guards: the other ranks wait for rank 0, which has left with an OSError."""
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(made_up, "_write_shard", full)
    with pytest.raises(ValueError, match="made cannot be written .*No space left"):
        made_up.model_folder(tmp_path / "made", llama(tmp_path / "config"))


def test_signals_that_can_be_caught_end_the_block_in_order(tmp_path):
    """Guards: servers and 80 GB that stay after Ctrl-C, after torchrun ends its ranks, or when the connection
    is lost; and `nohup`, under which a lost connection changes nothing."""
    found = [signal.signal(number, how) for number, how in (  # of a test under nohup, or in the background
        (signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL))]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            with made_up.place(tmp_path / "made", 0) as folder:
                signal.raise_signal(number)
                raise AssertionError("it went on")
        assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with made_up.place(tmp_path / "made", 0) as folder:
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number, how in zip((signal.SIGINT, signal.SIGHUP), found):
        signal.signal(number, how)


RANKS = """
import sys, time
from pathlib import Path
import torch
import distributed, lm
from node import gptoss, made_up
distributed.init()
first, where, oss, llama = distributed.rank() == 0, *map(Path, sys.argv[1:])
write = made_up._write_model
made_up._write_model = lambda *them: (time.sleep(0.5), write(*them))  # rank 0 takes its time
with made_up.place(where, 0) as folder:
    made_up.rows_file(folder / "rows.jsonl", rows=20, page_bytes=2_000)
    agent = lm.load_sharded(made_up.model_folder(folder / "agent", llama), compute=torch.float32)
    world = made_up.model_folder(folder / "world", oss)
    net = gptoss.load_sharded(world, distributed.mesh(), compute=torch.float32)
    with torch.no_grad():
        logps, _ = lm.token_logps(agent, [([5, 6], [7, 8, 9])])
    errors = []
    for call in (lambda: made_up.model_folder(folder / "world", oss),
                 lambda: made_up.place(folder / "rows.jsonl", 0).__enter__()):
        try:
            call()
        except ValueError as error:
            errors.append(str(error)[-40:])
    found = [(folder / name).exists() for name in ("rows.jsonl", "agent/tokenizer.json", "world/config.json")]
    assert distributed.gather(errors) == [errors] * 2 and len(errors) == 2, distributed.gather(errors)
    assert all(distributed.gather(found)[1]) and logps.isfinite().all()
assert not folder.exists(), "on every rank"
print("fine", flush=True)
"""


def test_two_ranks_share_what_rank_0_makes_and_its_errors(tmp_path, theirs):
    """Guards: a rank that reads a folder which is still being written, a rank that waits for one that has
    failed, and a place that goes while others still read it."""
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
               str(tmp_path / "ranks.py"), tmp_path / "made", theirs["published"], llama(tmp_path / "config")]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.count("fine") == 2, done.stdout + done.stderr
    assert not list((tmp_path / "made").iterdir())
