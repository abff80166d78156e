"""Claims about inference.py with the real vLLM (its CPU build: make test-vllm). The engine in a rank and a
server sample as the trainer's model does; the whole recipe runs, is killed, and goes on. All but the recipe
is in float32, so that equal means equal."""
import copy
import gzip
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ROOT, build_tokenizer, counting_page, run, tiny_lm
from helpers import gptoss
from helpers.processes import naming, wait_for
from helpers.scores import score

import distributed
import gpt_oss
import inference
import lm
import world_model
from config import Engine
from data import Action

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SMALL = Engine(kv_cache_gb=0.06, eager=True)


# ---- one sampler, three ways -------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with a generation_config.json like Llama-3.1-Instruct's. A sampler that reads it ends
    turns at quotes, and its log-probs are not the model's."""
    copied = tmp_path_factory.mktemp("model") / "base"
    model = tiny_lm(build_tokenizer())
    lm.save(model, copied)
    quote = model.tokenizer("'", add_special_tokens=False).input_ids
    misleading = {"eos_token_id": [3, *quote], "temperature": 0.6, "top_p": 0.5, "do_sample": True}
    (copied / "generation_config.json").write_text(json.dumps(misleading))
    return copied


@pytest.fixture(scope="module")
def model(folder) -> lm.LM:
    return lm.load(folder, compute=torch.float32)


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    """Ten questions about pages, some longer than a block of keys and values (128 tokens on a CPU)."""
    asked = [counting_page(n) + "\nWhat follows?" * n for n in range(0, 40, 4)]
    return [model.template.prompt_ids([{"role": "user", "content": text}]) for text in asked]


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def engine(folder):
    before = states()
    engine = inference.Engine(folder, 640, torch.float32, SMALL)
    assert states() == before, "ranks would draw alike"
    yield engine
    engine.close()


def start_server(folder, log, context: int = 640) -> str:
    """In float32; for a run it is the folder's own type."""
    with pytest.MonkeyPatch.context() as patch:
        settings = inference.settings
        patch.setattr(inference, "settings", lambda *given: settings(*given) | {"dtype": "float32"})
        return inference.start_server(folder, context, SMALL, log)


@pytest.fixture(params=["engine", "server"])
def sampler(request, folder, tmp_path):
    if request.param == "engine":
        return lm.Batched(request.getfixturevalue("engine"))
    return inference.Client([start_server(folder, tmp_path / "log")], folder)


def samples(sampler, prompts, most: int, temperature: float) -> list[lm.Sample]:
    return lm.together(sampler.generate(ids, most, temperature, k) for k, ids in enumerate(prompts))


def gap(model: lm.LM, prompts, found, temperature: float) -> float:
    """The most by which a sampled token's log-prob is not as the model scores it."""
    scored = score(model, [(prompt, said.ids) for prompt, said in zip(prompts, found)], temperature)
    return max(float((torch.tensor(said.logps) - logps).abs().max()) for said, logps in zip(found, scored))


def test_engine_and_server_are_the_trainers_own_sampler(sampler, model, prompts):
    """Guards: log-probs before the temperature, of a truncated distribution, or of the next token's position;
    a turn that ends at the quote, or one token early; a margin between likelier tokens than the two asked
    for; an engine that dies of more prompts than a step takes (vLLM's CPU build, of one in two pieces)."""
    assert sum(map(len, prompts * 4)) > 4096
    for temperature in (1.0, 0.7):
        found = samples(sampler, prompts * 4, 60, temperature)
        assert {sample.truncated for sample in found} == {True, False} and len({*map(str, found)}) == 40
        assert gap(model, prompts * 4, found, temperature) < 1e-4
        alone = run(sampler.generate(prompts[3], 8, temperature, 3))
        assert alone.ids == found[3].ids[:8], "whoever is beside it"
    ours, theirs = (samples(agent, prompts, 12, 0.0) for agent in (lm.Batched(model), sampler))
    assert [(a.ids, a.text, a.truncated) for a in ours] == [(a.ids, a.text, a.truncated) for a in theirs]
    assert gap(model, prompts, theirs, 1.0) < 1e-4
    pairs = [(prompt, 10 + k, 400 + k) for k, prompt in enumerate(prompts)]
    ours, theirs = (lm.together(agent.margin(*pair) for pair in pairs)
                    for agent in (lm.Batched(model), sampler))
    assert theirs == pytest.approx(ours, abs=1e-4)


def test_after_a_sync_answers_follow_the_new_weights_also_where_the_prompt_was_cached(engine, model, prompts):
    """Guards: a sampler that stays at the first weights, or at one layer of them; keys and values of the old
    weights for a prompt that comes again; random states of the trainer that vLLM moves."""
    asked, sampler, before = [prompt for prompt in prompts if len(prompt) > 128], lm.Batched(engine), states()
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in changed.net.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    samples(sampler, asked, 8, 1.0)  # now they are cached
    named = list(distributed.full_tensors(changed.net, torch.float32))
    engine.sync(named)
    found = samples(sampler, asked, 8, 1.0)
    assert gap(model, asked, found, 1.0) > 0.1, "the change was too small to tell"
    assert gap(changed, asked, found, 1.0) < 1e-4
    with pytest.raises(ValueError, match="model.layers.1.mlp.down_proj.weight"):
        engine.sync(pair for pair in named if pair[0] != "model.layers.1.mlp.down_proj.weight")
    engine.sync(distributed.full_tensors(model.net, torch.float32))
    assert gap(model, asked, samples(sampler, asked, 8, 1.0), 1.0) < 1e-4 and states() == before


# ---- gpt-oss -----------------------------------------------------------------------------------------------

def test_a_gpt_oss_in_mxfp4_is_fine_tuned_merged_and_served(tmp_path):
    """Guards: a world model whose sinks, sliding window, experts or channels are not those that were trained;
    a merged folder without its adapter. Unpacked, as vLLM's CPU build has no kernel for MXFP4; in float32, as
    in bf16 a token may go to another expert."""
    base, out, plain = gptoss.write_folder(tmp_path / "base"), tmp_path / "out", tmp_path / "plain"
    shown = [line for line in gzip.open(ROOT / "recordings/small.jsonl.gz", "rt") if "click-button" in line]
    (tmp_path / "recorded.jsonl").write_text("".join(shown[:8]))
    subprocess.run([sys.executable, "sft.py", "world_model", "laptop", "--base", base, "--recorded",
                    tmp_path / "recorded.jsonl", "--played=", "--out", out, "--context", "4096", "--tokens",
                    "4096", "--lora-rank", "4", "--lr", "3e-2"], cwd=ROOT, env=ENVIRONMENT, check=True)
    gptoss.unpack(out, plain)
    world = inference.Client([start_server(plain, tmp_path / "log", 1024)], plain)
    assert type(world.template) is gpt_oss.Harmony
    page, action = counting_page(3), Action("click", "1")
    asked = [world.template.prompt_ids(world_model.messages(page, f"http://{n}", "", action))
             for n in range(4)]
    found = samples(world, asked, 40, 1.0)
    trained, before = (gpt_oss.load(folder, 1024, compute=torch.float32) for folder in (out, base))
    assert gap(trained, asked, found, 1.0) < 1e-3 and gap(before, asked, found, 1.0) > 0.1


# ---- the whole recipe --------------------------------------------------------------------------------------

def test_paper_sh_is_killed_and_resumed_and_where_a_server_dies_it_goes_on_by_itself(tmp_path):
    """Guards: a line of the recipe that does not run; a sync that does not arrive (the second update's
    sampler gap); a server that outlives its run; days of work that one dead process ends."""
    log, metrics = tmp_path / "log", tmp_path / "dream.run/metrics.jsonl"
    resumed = lambda: log.read_text().count(": 1 of 2 updates are done")

    def begin() -> subprocess.Popen:
        env = ENVIRONMENT | {"SMALL": "1", "RUN": str(tmp_path)}
        return subprocess.Popen(["bash", "paper.sh"], cwd=ROOT, stdout=open(log, "a"), env=env,
                                stderr=subprocess.STDOUT, start_new_session=True)

    def until(true) -> None:
        wait_for(lambda: true() or run.poll() is not None, 3000)
        assert run.poll() is None, log.read_text()[-4000:]

    run = begin()
    until(lambda: (tmp_path / "dream.run/checkpoint/step-1/.metadata").exists())
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not naming(tmp_path), 60)  # nothing outlives a killed run
    run = begin()
    until(lambda: resumed() == 1)
    for server in naming(f"--model {tmp_path}/world_model "):
        if "api_server" in str(server.info):
            server.kill()
    assert run.wait(3000) == 0 and resumed() == 2, log.read_text()[-4000:]
    assert "gives no answer: ConnectError" in log.read_text()
    assert "the last minus the first: " in log.read_text()
    wait_for(lambda: not naming(tmp_path), 60)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["update"] for row in rows] == [0, 1, 2], "a line is doubled"
    assert all(row["grad_norm"] > 0 and row["sampler_gap"] < 0.1 for row in rows[:2]), rows  # in bf16
