"""Claims about weights as they are published: with and without an index, as safetensors under either naming
or as .bin, tied and untied (distributed.ShardFiles, node/convert.py, lm.load, lm.load_sharded). The folders
are a tiny Llama's."""
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from helpers.killed import killed
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import distributed
import lm
from node import convert, gptoss

ROOT = Path(__file__).resolve().parents[2]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, tie_word_embeddings=tied, initializer_range=0.5)).bfloat16()


def publish(folder: Path, model: LlamaForCausalLM, stem: str, suffix: str, shards: int, index: bool,
            head: bool = False) -> Path:
    """Writes `model` as `stem`[-0000k-of-0000n].`suffix`, with an index or without. A tied head is stored in
    a .bin, and in safetensors where `head` says so."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    state, placed = model.state_dict(), {}
    if model.config.tie_word_embeddings and suffix == "safetensors":
        del state[HEAD]  # safetensors holds no memory twice
        state |= {HEAD: state[EMBEDDING].clone()} if head else {}
    for k in range(shards):
        name = f"{stem}-{k + 1:05}-of-{shards:05}.{suffix}" if shards > 1 else f"{stem}.{suffix}"
        held = {key: value for n, (key, value) in enumerate(state.items()) if n % shards == k}
        placed |= dict.fromkeys(held, name)
        if suffix == "bin":
            torch.save(held, folder / name)
        else:
            save_file({key: value.contiguous() for key, value in held.items()}, folder / name)
    if index:
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def assert_loads(folder: Path, model: LlamaForCausalLM) -> None:
    """As lm.load_sharded fills a model: every parameter that it has, and no other number."""
    filled = LlamaForCausalLM(model.config).bfloat16()
    distributed.load_rows(filled, distributed.ShardFiles(folder).read, torch.device("cpu"))
    wanted = dict(model.named_parameters())
    assert len(wanted) == 20 + (not model.config.tie_word_embeddings)
    for name, value in filled.named_parameters():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


@pytest.fixture
def group(monkeypatch):
    """A process group of this process alone, as FSDP wants one."""
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    distributed.init()
    yield
    distributed.finish()


LAYOUTS = {  # (stem, suffix, shards, index)
    "one file": ("model", "safetensors", 1, False), "index": ("model", "safetensors", 3, True),
    "no index": ("model", "safetensors", 3, False),
    "torch's name": ("pytorch_model", "safetensors", 1, False),
    "torch's names, index": ("pytorch_model", "safetensors", 3, True),
    "torch's names": ("pytorch_model", "safetensors", 3, False), "bin": ("pytorch_model", "bin", 1, False),
    "bins, index": ("pytorch_model", "bin", 3, True), "bins": ("pytorch_model", "bin", 3, False)}


# A tied head is stored in a .bin anyway.
PUBLISHED = [(layout, head) for layout in LAYOUTS for head in ("untied", "tied", "tied and stored")
             if (LAYOUTS[layout][1], head) != ("bin", "tied and stored")]


@pytest.mark.parametrize("layout, head", PUBLISHED)
def test_every_loader_gives_the_same_weights(tmp_path, tokenizer, group, layout, head):
    """Guards: a folder that one program of the recipe loads and the next does not (NOTES 6.8: the published
    agent's files have another name than transformers', and no index); an error without the command that mends
    it; rounded, exchanged or invented weights; a tied head that is written twice or instead of the embedding;
    a conversion of what needs none. gptoss's loader is the one of a world model that is no gpt-oss. What
    stands in OpenAI's subfolders is the same weights again, and not to be read."""
    model = tiny_llama(head != "untied")
    folder = publish(tmp_path / "m", model, *LAYOUTS[layout], head=head == "tied and stored")
    for other in ("original", "metal"):
        (folder / other).mkdir()
        save_file({EMBEDDING: torch.zeros(3)}, folder / other / "model.safetensors")
    tokenizer.save_pretrained(folder)
    stem, suffix, shards, index = LAYOUTS[layout]
    ready = "model.safetensors" if shards == 1 else "model.safetensors.index.json"
    mends = rf"python -m node\.convert {folder}"
    if not (folder / ready).exists():
        with pytest.raises(distributed.FolderError, match=mends):
            lm.load(folder)
    if suffix == "bin":
        for load in (lm.load_sharded, gptoss.load_sharded):
            with pytest.raises(distributed.FolderError, match=mends):
                load(folder)
    else:
        assert_loads(folder, model)
    before = {file: file.read_bytes() for file in folder.glob("*.*")}
    # A tied head and its embedding are the same memory only within a file.
    twice = head != "untied" and (shards > 1 if suffix == "bin" else head == "tied and stored")
    assert convert.convert(folder) == {"files": shards * (suffix == "bin"),
                                       "tensors": 20 + (head == "untied") + twice}
    made = {file: file.read_bytes() for file in folder.glob("*.*")}
    assert suffix == "safetensors" or made.items() >= before.items()
    assert convert.convert(folder)["files"] == 0, "again"
    assert made == {file: file.read_bytes() for file in folder.glob("*.*")}
    wanted = dict(model.named_parameters())
    for net in (lm.load(folder).model, lm.load_sharded(folder).model, gptoss.load_sharded(folder, lora=None)):
        got = {name: distributed.gathered(value) for name, value in net.named_parameters()}
        assert got.keys() == wanted.keys(), "a tied head is one tensor, an untied head another"
        assert not [name for name in got if not torch.equal(got[name], wanted[name].to(got[name].dtype))]


@pytest.mark.parametrize("load", [lm.load, lm.load_sharded, gptoss.load_sharded])
@pytest.mark.parametrize("damage, says", [
    ("a layer less", r"1 weights of its config are in no file, first model\.norm\.weight; download it again"),
    ("a tensor more", r"1 tensors have no place in its config, first model\.norms\.weight; is a file of")])
def test_half_a_model_is_an_error(tmp_path, tokenizer, group, load, damage, says):
    """Guards: weights drawn at random where the folder has none (transformers writes a warning and goes on),
    and weights that are there and left out. Rotary frequencies, which old files hold, are neither."""
    folder = publish(tmp_path / "m", tiny_llama(False), "model", "safetensors", 1, False)
    tokenizer.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    load(folder)
    norm = state.pop("model.norm.weight")
    state |= {"model.norm.weight": norm, "model.norms.weight": norm.clone()} if "more" in damage else {}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(distributed.FolderError, match=says):
        load(folder)


def test_files_in_both_formats_are_not_converted_once_more(tmp_path):
    """Guards: 16 GB written beside the published safetensors, after which no loader knows which to take."""
    model = tiny_llama(False)
    folder = publish(tmp_path / "m", model, "model", "safetensors", 2, True)
    publish(tmp_path / "bin", model, "pytorch_model", "bin", 3, True)
    for file in (tmp_path / "bin").glob("pytorch_model*"):
        file.rename(folder / file.name)
    assert convert.convert(folder) == {"files": 0, "tensors": 21} and len(list(folder.glob("model-*"))) == 2
    assert_loads(folder, model)


def test_views_of_one_memory_are_written_as_the_tensors_they_are(tmp_path):
    """Guards: a transposed tensor written in the order of its memory, two slices of one memory taken for one
    tensor."""
    both = torch.arange(12.0).view(2, 6)
    weights = {"first": both[0], "second": both[1], "turned": both.T, "again": both[0]}
    kept = convert.untied(weights)
    assert kept.keys() == {"first", "second", "turned"}
    assert all(torch.equal(value, weights[name]) and value.is_contiguous() for name, value in kept.items())


def test_a_killed_conversion_goes_on_behind_the_last_finished_file(tmp_path, monkeypatch):
    """Guards: hours of converting again, and half of a conversion that is read as a model."""
    model, made, save = tiny_llama(False), [], convert.save_file
    folder = publish(tmp_path / "m", model, "pytorch_model", "bin", 3, True)

    def watched(weights, file, metadata):
        made.append(file.name[:11])
        save(weights, file, metadata)

    monkeypatch.setattr(convert, "save_file", watched)
    with killed(convert, "save_file", 2, leave=lambda weights, file, metadata: file.write_bytes(b"half")):
        convert.convert(folder)
    with pytest.raises(distributed.FolderError, match="00002-of-00003.* is missing; .*node.convert"):
        distributed.ShardFiles(folder)
    convert.convert(folder)
    assert made == ["model-00001", "model-00002", "model-00003"], "the second was begun, and is made anew"
    assert_loads(folder, model)


@pytest.mark.parametrize("damage, says", [
    ("cut off", r"pytorch_model-00002-of-00003\.bin cannot be converted"),
    ("missing", r"pytorch_model-00002-of-00003\.bin is missing; download it again"),
    ("full disk", r"needs 0\.0 GB on its disk, and 0\.0 are free"),
    ("nothing", r"has no \.safetensors file; download it again"),
])
def test_a_conversion_that_cannot_be_done_says_why_in_a_line(tmp_path, monkeypatch, damage, says):
    folder = publish(tmp_path / "m", tiny_llama(False), "pytorch_model", "bin", 3, True)
    file = folder / "pytorch_model-00002-of-00003.bin"
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing":
        file.unlink()
    elif damage == "full disk":
        usage = namedtuple("usage", "total used free")(1, 1, 0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    else:
        for file in folder.glob("pytorch_model*"):
            file.unlink()
    with pytest.raises(distributed.FolderError, match=says) as error:
        convert.convert(folder)
    assert "\n" not in str(error.value)


def test_the_command_converts_and_ends_with_a_line_where_it_cannot(tmp_path):
    """Guards: a command in an error message that does not run; a traceback."""
    folder = publish(tmp_path / "m", tiny_llama(True), "pytorch_model", "bin", 1, False)
    command = [sys.executable, "-m", "node.convert"]
    done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout) == {"files": 1, "tensors": 20}, done.stderr
    failed = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == f"convert.py: {tmp_path} holds no model (no config.json)\n"


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    """Guards: weights of another model, left in the folder, that are read instead."""
    folder = publish(tmp_path / "m", tiny_llama(False), "model", "safetensors", 1, False)
    save_file({EMBEDDING: torch.zeros(3)}, folder / "older.safetensors")
    says = f"both model.safetensors and older.safetensors hold {EMBEDDING}"
    with pytest.raises(distributed.FolderError, match=says):
        distributed.ShardFiles(folder)
