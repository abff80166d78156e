"""Claims about node/preflight.py: each fault is one sentence with the way out, all of them are shown, and
what is in order passes.

Each test makes a small setup that is in order, then gives it exactly one fault.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import GOAL, record, recorded, tiny_lm
from helpers.gptoss import write_folder
from helpers.processes import TORCHRUN, environment
from helpers.servers import site
from safetensors.torch import load_file, save_file

import distributed
import dream
import finetune
import lm
import policy
import recipe
import remote
import sft
import train
from node import machine, plan, preflight, server
from tiny import cpu, lessons
from worlds import benchmarks, miniwob

ROOT = Path(__file__).resolve().parents[2]
DREAMING = dream.Config(max_new_tokens=16, world_model_tokens=48, judge_tokens=16)


@pytest.fixture(autouse=True)
def no_chromium_is_opened_and_vllm_is_there(monkeypatch):
    monkeypatch.setattr(miniwob, "Browser", contextlib.nullcontext)
    monkeypatch.setattr(server, "check_installed", lambda: None)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    lm.save(tiny_lm(tokenizer), folder)
    return folder


@pytest.fixture
def setup(saved, tmp_path):
    """The config of a run in which all is in order: a policy, a world model, two trajectories."""
    for name in ("policy", "world"):
        shutil.copytree(saved, tmp_path / name)
    record(tmp_path / "recorded.jsonl", [recorded(["click [1]", "click [2]"]), recorded(["click [2]"], 1)])
    return recipe.Train(
        policy=str(tmp_path / "policy"), world_model=str(tmp_path / "world"), out=str(tmp_path / "out/agent"),
        trajectories=str(tmp_path / "recorded.jsonl"), context=512, world_model_context=512,
        judge_context=512, sampler="transformers", dreaming=DREAMING)


def with_vllm(config: recipe.Train, **more) -> recipe.Train:
    one = recipe.ServerConfig(tensor_parallel=1, kv_cache_gb=0.5)
    return dataclasses.replace(config, **({"sampler": "vllm", "world_model_server": one, "judge_server": one,
                                           "policy_engine": recipe.EngineConfig(kv_cache_gb=0.5)} | more))


def cloning(config: recipe.Train, **more) -> recipe.PolicySFT:
    return recipe.PolicySFT(base=config.policy, trajectories=config.trajectories, out=config.out,
                         **({"context": 512} | more))


def learning(config: recipe.Train, **more) -> recipe.WorldModelSFT:
    return recipe.WorldModelSFT(base=config.world_model, transitions=config.trajectories, out=config.out,
                              **({"context": 512} | more))


def all_right(found: machine.Found) -> None:
    assert (found.failed, found.dropped) == ([], []) and found.ok


def failed(found: machine.Found) -> str:
    """The only failure: one line."""
    (said,) = found.failed
    assert "\n" not in said
    return said


def test_what_is_in_order_passes_and_every_check_says_what_it_saw(setup):
    """Guards against checks that refuse a good setup, and against silent ones: the faults below start from
    these setups."""
    for found in (preflight.dreaming(setup), preflight.cloning(cloning(setup)),
                  preflight.learning(learning(setup)), preflight.learning(learning(setup, lora_rank=0))):
        all_right(found)
        for what in ("llama, ", "all of its 2 rows", "none of 3 recorded steps", "disk of ", "host memory: "):
            assert sum(what in line for line in found.ok) >= 1, (what, found.ok)
    assert "Chromium opens" in preflight.dreaming(setup).ok
    assert "Chromium opens" not in preflight.dreaming(dataclasses.replace(setup, evaluate_every=0)).ok
    all_right(preflight.dreaming(with_vllm(setup)))


# ---- folders of models -------------------------------------------------------------------------------------


def rewrite(folder: Path, change) -> None:
    """change(tensors) in the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def bin_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def half_of_it(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


NORM, HEAD_NORM = "model.layers.1.input_layernorm.weight", "model.norm.weight"
FOLDERS = {
    "missing": (shutil.rmtree,
                r"{} holds no model \(no config\.json\); make it with: python sft\.py policy tiny"),
    "bin only": (bin_only, r"{} has no \.safetensors file; make it from its \.bin files: "
                           r"python -m node\.convert {}"),
    "cut off": (cut_off, r"{}/model\.safetensors is cut off or missing \(.* ends at byte \d+ of \d+\); "
                         "download it again"),
    "a shard missing": (half_of_it, r"{}/model-00002-of-00002\.safetensors is missing; download it again"),
    "a weight missing": (lambda folder: rewrite(folder, lambda tensors: tensors.pop(NORM)),
                         rf"{{}}: 1 weights of its config are in no file, first {NORM}; download it "
                         "again"),
    "a weight too many": (lambda folder: rewrite(folder, lambda tensors: tensors.update(
        more=tensors[HEAD_NORM].clone())),
        r"{}: 1 tensors have no place in its config, first more; is a file of another model in it\?"),
    "eight bits": (lambda folder: rewrite(folder, lambda tensors: tensors.update(
        {HEAD_NORM: tensors[HEAD_NORM].to(torch.float8_e4m3fn)})),
        r"{} holds weights in F8_E4M3, which cannot be trained here; fetch the model in bf16"),
    "half a config": (lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
                      r"{}/config\.json: this is no JSON \(.*\); download it again"),
    "half an index": (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weig'),
                      r"{}/model\.safetensors\.index\.json is damaged \(.*\); download it again"),
    "another model": (lambda folder: edit(folder / "config.json", model_type="bert"),
                      r"{}/config\.json: it is a model of type bert, and the policy can be llama, qwen2, "
                      "qwen3; give another folder"),
    "short": (lambda folder: edit(folder / "config.json", max_position_embeddings=511),
              r"--context 512: {} reads 511 tokens at most \(max_position_embeddings\); lower it"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"),
                     r"{}: its tokenizer cannot be read \(.*\); download it again"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(),
                    r"{}: its tokenizer has no chat template; take the model's Instruct version\. For a "
                    r"published agent: copy chat_template\.jinja \(or chat_template of its "
                    r"tokenizer_config\.json\) from the model that it was made from"),
    "another end": (lambda folder: (folder / "chat_template.jinja").write_text(
        (folder / "chat_template.jinja").read_text().replace("<|end|>", "<|user|>")),
        r"{}: a turn ends in '<\|user\|>' and the tokenizer's eos_token is '<\|end\|>', so no answer would "
        r"end; write the first as eos_token into its tokenizer_config\.json"),
    "a template of two roles": (lambda folder: (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"),
        r"{}: its chat template cannot be used \(no system\); take another model"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_folder_with_a_fault_is_a_sentence_with_the_way_out(setup, fault):
    """Guards against faults that show when 120B are loaded, or as answers that never end."""
    spoil, says = FOLDERS[fault]
    spoil(Path(setup.policy))
    config = setup if fault != "short" else dataclasses.replace(setup, judge_context=511)
    said = failed(preflight.dreaming(config))
    assert re.fullmatch(says.replace("{}", re.escape(setup.policy)), said), said


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_another_models(setup, tokenizer):
    """Guards: an index error on a GPU in the middle of a run."""
    shutil.rmtree(setup.policy)
    model = tiny_lm(tokenizer)
    model.model.resize_token_embeddings(len(tokenizer) - 8)
    lm.save(model, setup.policy)
    said = failed(preflight.cloning(cloning(setup)))
    assert said == (f"{setup.policy}: its tokenizer has {len(tokenizer)} tokens and its embedding "
                    f"{len(tokenizer) - 8} rows; one of them is another model's: download it again")


def test_special_tokens_that_a_page_could_smuggle_in_are_refused(setup, monkeypatch):
    """Guards: a page that ends the user's turn."""
    monkeypatch.setattr(lm, "disarm", lambda _, text: text)
    assert "so a page could end a turn" in failed(preflight.cloning(cloning(setup)))


def test_gpt_oss_is_a_world_model_and_no_agent(setup, tmp_path):
    """Guards: harmony held for a broken template, original/ for weights that are there twice, MXFP4 for a
    dtype that nobody trains; and an agent that the policy's template cannot talk to."""
    write_folder(tmp_path / "gptoss")
    folder = str(tmp_path / "gptoss")
    config = dataclasses.replace(learning(setup), base=folder, context=4096)  # a byte is a token
    all_right(preflight.learning(config))
    all_right(preflight.dreaming(dataclasses.replace(setup, world_model=folder, world_model_context=4096)))
    said = failed(preflight.cloning(dataclasses.replace(cloning(setup), base=folder)))
    assert "a model of type gpt_oss" in said
    assert failed(preflight.learning(dataclasses.replace(config, lora_rank=0))) == (
        "--lora-rank 0 trains all weights, and nothing trains the MXFP4 experts of "
        f"{folder}; give --lora-rank 8")


@pytest.mark.parametrize("dtype, name", [(torch.float16, "F16"), (torch.float32, "F32")])
def test_a_base_into_which_no_adapter_can_be_merged_is_told_before_it_is_fine_tuned(setup, dtype, name):
    """Guards: "is F16; the adapter is for BF16", after hours of a node. Without LoRA any dtype will do."""
    rewrite(Path(setup.world_model), lambda tensors: tensors.update(
        {name: tensor.to(dtype) for name, tensor in tensors.items() if name.endswith("o_proj.weight")}))
    said = failed(preflight.learning(learning(setup)))
    assert said.startswith(f"{setup.world_model} holds its attention in {name}, and LoRA's adapters"), said
    assert "fetch the model in bf16, or save it so" in said
    all_right(preflight.learning(learning(setup, lora_rank=0)))


@pytest.mark.parametrize("judge, flag", [("policy", "--judge-context"), ("world_model", None)])
def test_each_context_is_asked_of_the_model_that_reads_it(setup, judge, flag):
    """Guards: vLLM refuses a server's --max-model-len when all else has been loaded."""
    edit(Path(setup.policy) / "config.json", max_position_embeddings=600)
    config = dataclasses.replace(setup, judge_context=601, world_model_context=2048,
                                 dreaming=dataclasses.replace(DREAMING, judge=judge))
    found = preflight.dreaming(config)
    assert [said.split(":")[0] for said in found.failed] == ([f"{flag} 601"] if flag else [])
    longer = dataclasses.replace(config, world_model_context=2049, judge_context=600)
    said = failed(preflight.dreaming(longer))
    assert said.startswith(f"--world-model-context 2049: {setup.world_model} reads 2048 tokens at most")


def test_servers_elsewhere_have_the_weights(setup, monkeypatch):
    """Guards: weights of the world model that nobody needs on this node."""
    monkeypatch.setattr(preflight, "answering", lambda *_: None)
    (Path(setup.world_model) / "model.safetensors").unlink()
    all_right(preflight.dreaming(with_vllm(setup, world_model_urls=("http://a:1/v1",))))
    assert "has no .safetensors file" in failed(preflight.dreaming(with_vllm(setup)))


# ---- data --------------------------------------------------------------------------------------------------

BAD_DATA = {
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:-9]),
                r"{}:2: cannot be read as JSON \(.*\); the file is damaged or was cut off: fetch or "
                "record it again"),
    "other rows": (lambda file: file.write_text('{"text": "a"}\n'),
                   r"{}:1: no task, .*; is this a file of .*\?"),
    "empty": (lambda file: file.write_text(""),
              r"{} holds no trajectory; give another file \(--trajectories\)"),
    "missing": (Path.unlink, r"{} does not exist; give another file \(--trajectories\)"),
}


@pytest.mark.parametrize("fault", BAD_DATA)
def test_data_with_a_fault_is_a_sentence_with_the_way_out(setup, fault):
    """Guards against gigabytes that are read, or weights that are loaded, before it is told."""
    spoil, says = BAD_DATA[fault]
    spoil(Path(setup.trajectories))
    for found in (preflight.dreaming(setup), preflight.cloning(cloning(setup))):
        said = failed(found)
        assert re.fullmatch(says.replace("{}", re.escape(setup.trajectories)), said), said


def test_nnetnavs_file_is_read_as_published_and_its_absence_names_the_hub(setup, monkeypatch, tmp_path):
    """Guards: a reader that preflight has for itself."""
    small = str(ROOT / "tests/nnetnav_small.jsonl")
    found = preflight.cloning(dataclasses.replace(cloning(setup), trajectories=small))
    all_right(found)
    monkeypatch.chdir(tmp_path)
    gone = dataclasses.replace(learning(setup), transitions="nnetnav-live/train.jsonl")
    fetch = "hf download stanfordnlp/nnetnav-live train.jsonl --repo-type dataset --local-dir nnetnav-live"
    assert failed(preflight.learning(gone)) == f"nnetnav-live/train.jsonl does not exist; fetch it: {fetch}"
    gone = dataclasses.replace(learning(setup), transitions=recipe.SINGLE_PAGES)
    said = failed(preflight.learning(gone))
    assert said == f"{recipe.SINGLE_PAGES} does not exist; record it: {recipe.RECORD}"


def test_a_judge_of_its_own_has_to_be_there(setup):
    """Guards: --judge-model that is looked for when the other models are loaded, or while another judges."""
    gone = dataclasses.replace(setup, judge_model="no/judge")
    assert failed(preflight.dreaming(gone)).startswith("no/judge holds no model")
    current = dataclasses.replace(DREAMING, judge="current")
    all_right(preflight.dreaming(dataclasses.replace(gone, dreaming=current)))
    all_right(preflight.dreaming(dataclasses.replace(setup, judge_model=setup.policy)))


def test_of_a_large_file_rows_from_its_beginning_to_its_end_are_read_and_no_more(tmp_path):
    """Guards: 3 GB that are read before the run, a sample of one site only, half a row taken for damage, and
    a download that was cut off taken for whole."""
    rows = [{"n": n, "page": "x" * (n % 7)} for n in range(1000)]
    file = tmp_path / "large.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = file.stat().st_size
    taken, seen = preflight.sample_rows(file, 10, small=size - 1)
    numbers = [row["n"] for _, row in taken]
    assert numbers[0] == 0 and numbers[-1] == 999 and numbers == sorted(numbers) and len(numbers) == 11
    assert all(after - before > 50 for before, after in zip(numbers[:-1], numbers[1:])), numbers
    assert seen == "11 rows from its beginning to its end can be read"
    whole, seen = preflight.sample_rows(file, 10, small=size)
    assert [row["n"] for _, row in whole] == list(range(0, 1000, 100)) and "all of its 1,000 rows" in seen
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"large.jsonl: its last row: cannot be read as JSON .* cut off"):
        preflight.sample_rows(file, 10, small=10)


# ---- lengths -----------------------------------------------------------------------------------------------

ROOM = {"policy": "--context less --dreaming.max-new-tokens",
        "judge": "--judge-context less --dreaming.judge-tokens",
        "world model": "--world-model-context less --dreaming.world-model-tokens"}


def widened(config: recipe.Train, rows: set[int], lines: int = 100) -> None:
    """Ten trajectories of one step, some with a page that is so much longer."""
    trajectories = [recorded(["click [2]"], seed) for seed in range(10)]
    for k in rows:
        step = trajectories[k].steps[0]
        more = "".join(f"\n\t[{n}] link 'x'" for n in range(10, 10 + lines))
        trajectories[k].steps[0] = dataclasses.replace(step, page=step.page + more)
    record(Path(config.trajectories), trajectories)


@pytest.mark.parametrize("who", ROOM)
@pytest.mark.parametrize("rows, share", [({3, 7}, "20%"), (set(range(10)), "100%"), (set(), "")])
def test_the_share_over_each_prompts_own_limit_is_said_and_nearly_all_is_a_failure(setup, who, rows, share):
    """Guards: a run whose every page is dropped, and a limit of one model taken for another's. The judge
    counts one page: of the other it may read the changed lines alone."""
    widened(setup, rows)
    flag = {"policy": "context", "judge": "judge_context", "world model": "world_model_context"}[who]
    room = {"context": 2048, "world_model_context": 2048, "judge_context": 2048, flag: 512}
    found = preflight.dreaming(dataclasses.replace(setup, **room))
    over = f"the {512 - (48 if who == 'world model' else 16)} tokens that the {who} may read ({ROOM[who]})"
    how = r", estimated at \d\.\d B a token \(counted on the longest pages\)"
    dropped = rf"about {share} of the recorded steps: over {re.escape(over)}{how}"
    too_many = rf"about {share} of the recorded steps are over {re.escape(over)}{how}; give it more room"
    said = {"": (0, 0), "20%": (1, 0), "100%": (0, 1)}[share]
    assert (len(found.dropped), len(found.failed)) == said, found
    assert all(re.fullmatch(dropped, line) for line in found.dropped), found.dropped
    assert all(re.fullmatch(too_many, line) for line in found.failed), found.failed


def test_lengths_are_estimated_by_the_models_own_tokens_and_without_them_by_the_notes(setup, tokenizer):
    """Guards: an estimate that is off by half and does not say so; the system message, which the laptop's
    template leaves out, counted as read."""
    model = lm.load(setup.policy)
    steps = [step for texts in (["click [1]", "click [2]"], ["click [2]"]) for step in recorded(texts).steps]
    exact = [len(policy.turn_prompt(model, GOAL, step.page, step.previous)) for step in steps]
    about = (r"none of 3 recorded steps is over the 496 tokens that the policy may read .*, estimated at "
             "(.*) B a ")
    found = [re.match(about + r"token \(counted on the longest pages\); the mean is (\d+)", line)
             for line in preflight.dreaming(setup).ok]
    (mean,) = [float(match[2]) for match in found if match]
    assert mean == pytest.approx(sum(exact) / 3, rel=0.2)
    shutil.rmtree(setup.policy)
    roomy = dataclasses.replace(setup, context=4096)
    about = about.replace("496", "4,080") + r"token \(NOTES 2\.7; no tokenizer could be asked\)"
    (ratio,) = [match[1] for line in preflight.dreaming(roomy).ok if (match := re.match(about, line))]
    assert ratio == "3.7"


def test_fine_tunings_have_one_limit_of_their_own(setup):
    """Guards: an SFT that drops every example."""
    widened(setup, set(range(10)))
    for found, who in ((preflight.cloning(cloning(setup)), "policy"),
                       (preflight.learning(learning(setup)), "world model")):
        said = failed(found)
        assert said.startswith("about 100% of the recorded steps are over the 512 tokens that the "
                               f"{who} may read (--context), estimated at ")


NO_REASONS = ("there are no reasons in it, and every transition would be dropped; make it (python -m "
              "node.annotate --out {0}), or leave --reasons out")


@pytest.mark.parametrize("fault, says", [
    (None, NO_REASONS), ("", NO_REASONS), ("{}\n{}\n", "{0}:1: not a line of an annotation")])
def test_reasons_that_are_not_there_are_told_before_the_transitions_are_dropped(setup, tmp_path, fault, says):
    """Guards: a world model that learns from nothing, an hour later."""
    file = tmp_path / "reasons.jsonl"
    config = learning(setup, reasons=str(file))
    file.write_text('{"key": "a", "reason": "so"}\n')
    all_right(preflight.learning(config))
    file.unlink()
    if fault is not None:
        file.write_text(fault)
    assert failed(preflight.learning(config)).endswith(says.format(file))


# ---- the machine -------------------------------------------------------------------------------------------


def test_microbatches_fewer_than_ranks_are_told_in_the_words_of_the_fine_tuning(setup, monkeypatch):
    """Guards: a refusal after 8 B weights were loaded."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    few = finetune.FineTune(microbatches=1)
    for found, who in ((preflight.cloning(cloning(setup, sft=few)), "policy"),
                       (preflight.learning(learning(setup, sft=few)), "world model")):
        assert failed(found) == (f"{who}: microbatches 1: 1 ranks would idle in every step; give "
                                 "--sft.microbatches 2 or more")
    enough = finetune.FineTune(microbatches=2)
    all_right(preflight.cloning(cloning(setup, sft=enough)))


def test_offloading_is_refused_where_there_is_no_gpu_to_move_weights_from(setup, monkeypatch):
    """Guards: the flag ignored without a word, or refused when the model was loaded. Only a process group
    can offload, and on a GPU there always is one."""
    for found in (preflight.dreaming(dataclasses.replace(setup, offload=True)),
                  preflight.cloning(cloning(setup, offload=True))):
        assert failed(found) == lm.NO_OFFLOAD
    with pytest.raises(ValueError, match="leave it out"):
        cpu.load_to_train(setup.policy, offload=True)
    monkeypatch.setattr(distributed, "grouped", lambda: True)
    all_right(preflight.cloning(cloning(setup, offload=True)))


def test_a_missing_chromium_is_told_where_pages_will_be_looked_at(setup, monkeypatch):
    """Guards against a node that loads 120B, starts two servers and an engine, and then has no Chromium."""
    class NoChromium(contextlib.nullcontext):
        def __enter__(self):
            raise FileNotFoundError("no Chromium at /usr/bin/chromium: run `apt-get install chromium`")

    monkeypatch.setattr(miniwob, "Browser", NoChromium)
    said = "no Chromium at /usr/bin/chromium: run `apt-get install chromium`"
    assert failed(preflight.dreaming(setup)) == said
    all_right(preflight.dreaming(dataclasses.replace(setup, evaluate_every=0)))
    monkeypatch.setenv("LOCAL_RANK", "1")  # once a machine
    all_right(preflight.dreaming(setup))


def test_on_real_pages_a_chromium_is_needed_and_neither_world_model_nor_judge_nor_server(setup, monkeypatch):
    """Guards: --world real that is refused for want of a world model, of memory for one or of a server; and
    one that starts without a Chromium, as nobody looks at dev seeds. Both worlds need everything."""
    shutil.rmtree(setup.world_model)
    monkeypatch.setattr(benchmarks.Browser, "knows", classmethod(lambda cls, task, *_: task == "count"))
    real = dataclasses.replace(setup, world="real", evaluate_every=0, world_model_context=9, judge_context=9)
    found = preflight.dreaming(real)
    all_right(found)
    assert "Chromium opens" in found.ok
    assert not any(who in line for line in found.ok for who in ("world model", "judge"))
    dead = ("http://127.0.0.1:9/v1",)
    all_right(preflight.dreaming(with_vllm(real)))
    all_right(preflight.dreaming(with_vllm(real, judge_urls=dead, world_model_urls=dead)))
    assert "holds no model" in failed(preflight.dreaming(dataclasses.replace(setup, world="both")))


def test_on_real_pages_the_engine_alone_takes_the_gpus_memory(setup, card):
    """Guards: a server's cache that is counted and never made; the plan has no hours for real pages, and
    says so."""
    shutil.rmtree(setup.world_model)
    card(8e10, 8e10)
    need = preflight.samplers(machine.Found(), with_vllm(setup, world="real"), None, None)
    assert list(need) == ["policy engine"]
    with pytest.raises(ValueError, match="--world real: the plan knows how long dreams take, .*plan with"):
        plan.plan_train(with_vllm(setup, world="real"))


def test_recordings_that_the_browser_cannot_reset_are_told_before_anything_is_loaded(setup):
    """Guards: minutes of reading NNetNav's file, and 8 B weights, before the sentence."""
    said = failed(preflight.dreaming(dataclasses.replace(setup, world="real")))
    assert said.startswith(f"{setup.trajectories}:1: --world real begins each trajectory on a real page")
    record(Path(setup.trajectories), [recorded(["click [1]", "click [2]"], seed=1_000_000)])
    assert "seed 1000000, is a seed of 'dev'" in failed(preflight.dreaming(setup))


@pytest.mark.parametrize("change, says", [
    ({"world_model_server": recipe.ServerConfig(tensor_parallel=4, kv_cache_gb=0.5)},
     "--world-model-server.tensor-parallel 4 does not divide the 2 attention heads of the model; lower it"),
    ({"judge_server": recipe.ServerConfig(tensor_parallel=2, kv_cache_gb=0.5)},
     "--judge-server.tensor-parallel 2: there are 1 GPUs here; lower it"),
    ({"policy_engine": recipe.EngineConfig(kv_cache_gb=0.0)},
     r"--policy-engine.kv-cache-gb 0.0 holds no sequence of 512 tokens \(0.0 GB\), and vLLM would .*"),
])
def test_what_vllm_would_refuse_is_told_before_it_starts(setup, monkeypatch, change, says):
    """Guards: minutes of loading before vLLM's own assertion."""
    if "GPUs" in says:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = failed(preflight.dreaming(with_vllm(setup, **change)))
    assert said == says or re.fullmatch(says, said), said


def test_vllm_and_a_gpu_that_torch_cannot_use_are_told(setup, monkeypatch, tmp_path):
    """Guards: an import error of vLLM behind the loading, and a driver that is too old taken for no GPU."""
    def missing():
        raise remote.EngineError("vLLM is not installed here: pip install")

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system\nis too old (found version 11040).")

    monkeypatch.setattr(server, "check_installed", missing)
    all_right(preflight.dreaming(setup))  # who samples without it is not asked
    assert failed(preflight.dreaming(with_vllm(setup))) == "vLLM is not installed here: pip install"
    monkeypatch.setattr(server, "check_installed", lambda: None)
    monkeypatch.setattr(distributed, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    old = "The NVIDIA driver on your system is too old (found version 11040)."
    assert failed(preflight.dreaming(with_vllm(setup))) == f"torch cannot use the GPU that is here: {old}"
    with pytest.raises(SystemExit, match="needs a GPU, and torch cannot use the one that is here") as end:
        recipe.needs_gpu("large", ("large",), "none")
    assert old in str(end.value)


def test_a_rank_without_a_gpu_of_its_own_is_told_how_many_there_are(monkeypatch):
    """Guards: CUDA's `invalid device ordinal`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    says = "^rank 2 of this machine has no GPU; give torchrun --nproc_per_node 2$"
    with pytest.raises(ValueError, match=says):
        distributed.init()


@pytest.fixture
def serving():
    """A server that lists one model of 600 tokens, as vLLM does; its URL."""
    with site({"/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 600}]})}) as found:
        yield f"{found.url}/v1"


def test_servers_elsewhere_are_asked_whether_they_answer_and_how_far_they_read(setup, serving):
    """Guards: a run that finds out at its first dream, when all else is loaded."""
    config = with_vllm(setup, judge_urls=(serving,))
    all_right(preflight.dreaming(config))
    assert f"{serving} serves m, 600 tokens" in preflight.dreaming(config).ok
    longer = dataclasses.replace(config, judge_context=601)
    assert failed(preflight.dreaming(longer)) == (
        f"{serving} serves 600 tokens (max_model_len), and --judge-context is 601; start it with more, or "
        "lower that")
    dead = "http://127.0.0.1:9/v1"
    said = failed(preflight.dreaming(with_vllm(setup, judge_urls=(serving, dead))))
    assert re.fullmatch(rf"{dead}: {dead}/models gives no answer of a vLLM server \(.*refused.*\); start it, "
                        "or give other --judge-urls", said), said


def test_one_server_is_not_two_models(setup, serving):
    """Guards: a judge that is the world model by a slip of the pen."""
    config = with_vllm(setup, world_model_urls=(serving,), judge_urls=(serving.removesuffix("/v1") + "/",))
    assert failed(preflight.dreaming(config)) == (
        f"{serving.removesuffix('/v1')} is given for the world model and for the judge, and a server has one "
        "model; give another, or --dreaming.judge world_model where it shall do both")
    meant = dataclasses.replace(config, dreaming=dataclasses.replace(DREAMING, judge="world_model"))
    found = preflight.dreaming(meant)
    assert not found.failed
    assert found.dropped == ["--judge-urls: nobody asks them with --dreaming.judge world_model"]


def test_a_disk_that_is_too_small_is_told_with_what_takes_it(setup, monkeypatch):
    """Guards: a night that ends at its first checkpoint. A resumed run's own checkpoints are no new need."""
    weights = sum(p.numel() for p in lm.load(setup.policy).model.parameters())
    need = (3 * 12 + 2) * weights
    usage = lambda free: lambda _: SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", usage(need))
    all_right(preflight.dreaming(setup))
    monkeypatch.setattr(shutil, "disk_usage", usage(need - 1))
    said = failed(preflight.dreaming(setup))
    assert re.fullmatch(rf"{setup.out}: \S+ GB will be written \(3 checkpoints \S+, the model \S+\), "
                        r"and the disk has \S+ left; make room, or give an --out on another", said), said
    folder = Path(f"{setup.out}.run/checkpoint/step-1")
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(b"x")
    all_right(preflight.dreaming(setup))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    said = failed(preflight.dreaming(setup))
    assert said == f"{setup.out}: nothing can be written to {folder.parents[2]}; give an --out on another"


def test_where_examples_are_prepared_is_said_and_its_disk_is_looked_at(setup, monkeypatch):
    """Guards: half an hour of preparing that ends at a full disk, or in a folder that nobody may write. The
    laptop's recipe and a few chosen demonstrations prepare nothing."""
    there, usage = Path(setup.trajectories).parent, shutil.disk_usage
    done = Path(f"{setup.trajectories}.prepared/transitions-1")
    full = lambda at: SimpleNamespace(free=0) if Path(at) in (there, done.parent) else usage(at)
    Path(setup.out).mkdir(parents=True)
    for config, look, what in ((learning(setup), preflight.learning, "transitions"),
                               (cloning(setup), preflight.cloning, "demonstrations")):
        said = f"{setup.trajectories}.prepared: "
        assert any(line.startswith(f"disk of {said}") and what in line for line in look(config).ok)
        with monkeypatch.context() as small:
            small.setattr(shutil, "disk_usage", full)
            assert re.fullmatch(rf"{said}\S+ GB will be written \(prepared {what} \S+\), and the disk has 0 "
                                "left; make room, or link the data .*", failed(look(config)))
            few = {"demonstrations": 2} if what == "demonstrations" else {}
            ours = lessons.Policy if few else lessons.WorldModel
            all_right(look(ours(**{name: getattr(config, name) for name in vars(config)} | few)))
        with monkeypatch.context() as shared:
            shared.setattr(os, "access", lambda path, mode: Path(path) != there)
            assert f"{said}nothing can be written to {there}; link the data" in failed(look(config))
    done.mkdir(parents=True)
    (done / "counts.json").touch()
    monkeypatch.setattr(shutil, "disk_usage", full)
    all_right(preflight.learning(learning(setup)))


def test_a_host_with_too_little_memory_is_told_with_what_takes_it(setup, monkeypatch, tmp_path):
    """Guards: a process that the kernel kills without a word."""
    weights = sum(p.numel() for p in lm.load(setup.policy).model.parameters())
    need = (16 + 12 + 4 + 4) * weights  # trained, a checkpoint, the judge, the world model
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    machine.MEMORY.write_text(f"MemTotal: 9 kB\nMemAvailable: {need // 1024 + 1} kB\n")
    all_right(preflight.dreaming(setup))
    machine.MEMORY.write_text(f"MemTotal: 9 kB\nMemAvailable: {need // 1024 - 1} kB\n")
    said = failed(preflight.dreaming(setup))
    assert re.fullmatch(r"host memory: \S+ GB \(weights, gradients and Adam \S+, a checkpoint on its way "
                        r"\S+, the samplers \S+\) of \S+ GB that are available; stop other "
                        "processes, or take a larger machine", said), said


def test_a_container_has_the_memory_of_its_own_limit(setup, monkeypatch, tmp_path):
    """Guards: a pod of 64 GB on a host of 2 TB, killed without a word; and one that has just fetched a model,
    whose files in memory are taken for memory that is gone."""
    gb = 10**9
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    machine.MEMORY.write_text(f"MemTotal: 9 kB\nMemAvailable: {2000 * gb // 1024} kB\n")
    write = lambda name, text: (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert machine.available() == pytest.approx(2000)  # no such files: no container
    write("max", "max"), write("current", 60 * gb)
    write("stat", f"anon {10 * gb}\ninactive_file {30 * gb}\nactive_file {20 * gb}")
    assert machine.available() == pytest.approx(2000)
    write("max", 64 * gb)
    assert machine.available() == pytest.approx(54)
    write("max", 5000 * gb)
    assert machine.available() == pytest.approx(2000)
    write("max", 10 * gb), write("stat", "inactive_file 0\nactive_file 0")
    assert "host memory: " in failed(preflight.dreaming(setup))


def test_a_containers_small_shared_memory_is_told_to_a_server_over_several_gpus(setup, monkeypatch):
    """Guards: a bus error of NCCL in a container as docker starts it, after 120B weights were loaded."""
    usage = shutil.disk_usage
    small = lambda folder: SimpleNamespace(free=64e6) if folder == machine.SHARED else usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", small)
    all_right(preflight.dreaming(with_vllm(setup)))  # one GPU shares nothing
    two = with_vllm(setup, judge_server=recipe.ServerConfig(tensor_parallel=2, kv_cache_gb=0.5))
    said = failed(preflight.dreaming(two))
    assert said.startswith("--judge-server.tensor-parallel 2: /dev/shm has 0.06 GB free")
    assert "--ipc=host" in said
    monkeypatch.setenv("LOCAL_RANK", "1")  # once a machine
    all_right(preflight.dreaming(two))


@pytest.fixture
def card(monkeypatch, tmp_path):
    """card(free, size): a GPU with so many bytes stands in this machine, whose host has memory for all."""
    def stand(free: float, size: float, bf16: bool = True):
        for name, value in {"is_available": True, "device_count": 1, "current_device": 0,
                            "get_device_name": "T", "mem_get_info": (int(free), int(size)),
                            "is_bf16_supported": bf16}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)

    monkeypatch.setattr(machine, "MEMORY", tmp_path / "none")
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    return stand


def test_a_gpu_machine_without_compiler_or_headers_is_told_what_to_install(setup, card, monkeypatch,
                                                                         tmp_path):
    """Guards: an image without gcc or Python.h, on which Triton's first kernel fails inside vLLM, after the
    weights were loaded (G2)."""
    card(8e10, 8e10)
    config = with_vllm(setup)
    all_right(preflight.dreaming(config))
    error = "line.c:1:10: fatal error: Python.h: No such file"
    (tmp_path / "cc").write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    said = failed(preflight.dreaming(config))
    assert said.startswith(f"{tmp_path}/cc cannot compile a line with Python.h ({error}")
    assert re.search(r"apt-get install build-essential python3\.\d+-dev$", said), said
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    assert failed(preflight.dreaming(config)).startswith("there is no C compiler here (nor")
    monkeypatch.setenv("LOCAL_RANK", "1")  # once a machine
    all_right(preflight.dreaming(config))


def test_a_gpu_that_is_too_small_or_not_free_is_told_and_who_may_be_on_it(setup, card, monkeypatch):
    """Guards: the annotator's server left on every GPU (N5), found when the weights are loaded."""
    config = with_vllm(setup)
    agent = plan.read_model(setup.policy)
    need = 16 * agent.parameters + 1e9 * sum(
        row.dreaming for sampler in plan.samplers(config, agent, agent, 1) for row in sampler.rows())
    assert need > 5e9
    card(need + 1e6, 8e10)
    all_right(preflight.dreaming(config))
    card(need - 1e6, 8e10)
    said = failed(preflight.dreaming(config))
    used, gb = (8e10 - need + 1e6) / 1e9, need / 1e9
    assert said == (f"GPU 0 (T): {used:.1f} GB are in use by other processes, perhaps the annotator's server "
                    f"(nvidia-smi names them), and {gb:.1f} of 80.0 are needed; stop them")
    card(need - 1e6, need - 1e6)
    said = failed(preflight.dreaming(config))
    size = (need - 1e6) / 1e9
    assert said.startswith(f"GPU 0 (T) has {size:.1f} GB, and {gb:.1f} are needed before any activation")
    assert said.endswith("); python -m node.plan says what can be changed")
    off = dataclasses.replace(config, offload=True)
    monkeypatch.setattr(distributed, "grouped", lambda: True)
    card(need - 15 * agent.parameters, 8e10)
    all_right(preflight.dreaming(off))


def test_the_fine_tunings_gpu_holds_weights_gradients_and_adam(setup, card):
    """Guards: adapters planned like all weights, and all weights like adapters."""
    weights = plan.read_model(setup.policy).parameters
    lora = 8 * 8 * 64 * 2  # A and B of four projections, two layers of width 64
    for found, need in ((lambda: preflight.cloning(cloning(setup)), 16 * weights),
                        (lambda: preflight.learning(learning(setup)), 2 * weights + 16 * lora),
                        (lambda: preflight.learning(learning(setup, lora_rank=0)), 16 * weights)):
        card(need + 100, 8e10)
        all_right(found())
        card(need - 100, 8e10)
        assert "are in use by other processes" in failed(found())


def test_a_gpu_without_bfloat16_is_told(setup, card):
    """Guards: an emulation that takes ten times as long."""
    card(8e10, 8e10, bf16=False)
    said = failed(preflight.cloning(cloning(setup)))
    assert said == "GPU 0 (T) has no bfloat16; take an Ampere card or a newer one"
    all_right(preflight.dreaming(with_vllm(setup, compute="float32")))


# ---- all at once, on all ranks, before the work ------------------------------------------------------------


def test_all_failures_are_shown_at_once(setup):
    """Guards: a fault a night."""
    shutil.rmtree(setup.policy)
    bin_only(Path(setup.world_model))
    Path(setup.trajectories).unlink()
    config = dataclasses.replace(setup, offload=True)
    with pytest.raises(ValueError) as error:
        preflight.passes(preflight.dreaming, config)
    first, *lines = str(error.value).split("\n")
    assert first == "4 things stand in the way:" and len(lines) == 4
    told = ("holds no model", "node.convert", "does not exist", "--offload")
    for line, says in zip(lines, told):
        assert line.startswith("- ") and says in line
    shutil.rmtree(setup.world_model)
    same = dataclasses.replace(setup, world_model=setup.policy)  # a folder that two need is told once
    assert str(preflight.dreaming(same).failed).count("holds no model") == 2


def test_a_fault_of_one_rank_is_told_by_all_in_the_same_words(setup, monkeypatch, capsys):
    """Guards: a sentence twice, and ranks that do not say which of them it is."""
    found = [machine.Found(["a"], ["b"], ["both", "mine", "mine"]),
             machine.Found([], [], ["theirs", "both"])]
    monkeypatch.setattr(distributed, "gather", lambda _: found)
    with pytest.raises(ValueError) as error:
        preflight.passes(lambda _: found[0], setup)
    assert str(error.value) == "3 things stand in the way:\n- both\n- rank 0: mine\n- rank 1: theirs"
    assert capsys.readouterr().out == "dropped: b\n"


RANK = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import sft
os._exit = sys.exit  # how a rank ends that has failed (distributed.leave)
folder, base = Path({folder!r}), {base!r}
sys.argv = ["sft.py", "policy", "tiny", "--trajectories", {file!r}, "--context", "512", "--out",
            str(folder / "out"), "--sft.microbatches", "2", "--preflight", "--base"]
sys.argv.append(base if os.environ["RANK"] == "0" or not {fault!r} else base + "-none")
try:
    sft.main()
    said = "passed"
except SystemExit as end:
    said = str(end.code)
(folder / ("rank-" + os.environ["RANK"])).write_text(said)
"""


@pytest.mark.parametrize("fault", [True, False])
def test_a_fault_on_one_of_two_ranks_stops_both_with_the_same_text(setup, tmp_path, fault):
    """Guards: a rank that goes on and waits for the other for an hour."""
    script = tmp_path / "script.py"
    script.write_text(RANK.format(root=str(ROOT), folder=str(tmp_path), base=setup.policy,
                                  file=setup.trajectories, fault=fault))
    done = subprocess.run([*TORCHRUN, str(script)], env=environment(), capture_output=True, text=True,
                          timeout=200)
    said = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1], done.stderr[-2000:]
    if fault:  # both end with 1, and one of them says why (recipe.fail)
        none = f"{setup.policy}-none"
        told = (f"sft.py: rank 1: {none} holds no model (no config.json); a model of the hub: "
                f'hf download {none} --exclude "original/*" --exclude "metal/*" --local-dir {none}')
        assert said[0] == "1"
        assert [line for line in done.stderr.splitlines() if "holds no model" in line] == [told]
        assert "nothing stands in the way" not in done.stdout
    else:
        assert said[0] == "passed" and done.stdout.count("nothing stands in the way") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command, module, work, folder", [
    ("train.py", train, "train", "policy"), ("sft.py policy", sft, "learn_policy", "base"),
    ("sft.py world_model", sft, "learn_world_model", "base")])
def test_each_command_looks_first_and_with_preflight_does_nothing_else(setup, monkeypatch, capsys, command,
                                                                       module, work, folder):
    """Guards: a command that forgot to look, one that works in spite of a failure or of --preflight, and a
    normal run that says more than what it drops."""
    worked, file = [], "--transitions" if work == "learn_world_model" else "--trajectories"
    monkeypatch.setattr(module, work, lambda *_: worked.append(1))
    words = [*command.split(), "tiny", file, setup.trajectories, "--out", setup.out, f"--{folder}"]
    more = ["--world-model", setup.world_model] if module is train else []

    def run(*words):
        worked.clear()
        monkeypatch.setattr(sys, "argv", list(words))
        module.main()
        return list(worked), capsys.readouterr().out

    assert run(*words, setup.policy, *more) == ([1], "")
    did, said = run(*words, setup.policy, *more, "--preflight")
    assert not did and said.endswith("\nnothing stands in the way\n") and said.startswith("ok: ")
    with pytest.raises(SystemExit, match=f"^{module.__name__}.py: {setup.policy}-none holds no model"):
        run(*words, f"{setup.policy}-none", *more)
    assert not worked


def test_preflight_is_no_other_config():
    """Guards: a run that cannot go on because somebody looked."""
    assert "preflight" in recipe.MAY_CHANGE
    kept = dataclasses.fields(finetune.FineTune)  # all that a fine-tuning's checkpoint knows of its config
    assert "preflight" not in {field.name for field in kept}


def test_the_laptops_preflight_says_what_it_saw_and_writes_nothing(setup, tmp_path):
    """Guards: the real thing: its Chromium, and the shipped recordings."""
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "train.py", "tiny", "--preflight", "--world-model", setup.world_model, "--out",
               setup.out, "--policy", setup.policy]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "nothing stands in the way" and all(line.startswith("ok: ") for line in lines)
    assert "ok: Chromium opens" in lines and sum("all of its 4,448 rows" in line for line in lines) == 1
    assert sorted(tmp_path.rglob("*")) == before
