"""Claims about the rehearsal that need no vLLM: what it says before, beside the plan and at the end, what it
tells others, and what it leaves. tests_vllm/test_rehearse.py runs it whole."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import wait_for

import a11y
import data
import lm
import policy
import recipe
from node import compare, hours, kernels, plan, rehearse, simulate, sinks, stages
from remote import Remote

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
# The command, after a change of its stages. Where only the first of them matter, the kernels are not tried.
CHANGED = "from node import rehearse, stages\n{}\n{}\nrehearse.main()"
FIRST = ("del stages.STAGES[{}:]\n"
         "stages.STAGES[0] = rehearse.replace(stages.STAGES[0], work=lambda run: {{}})")
SHORT = ["tiny", "--no-vllm", "--quick", "--world-model-flags=--context 2048 --sft.tokens 1024",
         "--train-flags=--context 2048 --tokens 1024 --dreaming.tasks 1 --dreaming.group 2"]


def command(out: Path, *words: str, change: str = "", ranks: int = 1, first: int = 0) -> subprocess.Popen:
    """The command, with its `first` stages alone; 0: all."""
    script = out.parent / "changed.py"
    script.write_text(CHANGED.format(FIRST.format(first) if first else "", change))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if ranks == 2 else []
    return subprocess.Popen([sys.executable, *start, script, *SHORT, "--out", out, *words], cwd=ROOT,
                            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def done(run: subprocess.Popen, code: int = 0) -> str:
    said, _ = run.communicate(timeout=300)
    assert run.returncode == code, said[-4000:]
    return said


def told(out: Path) -> dict:
    return json.loads((out / "rehearsal.json").read_text())


# ---- the command -------------------------------------------------------------------------------------------


def test_without_a_gpu_the_large_recipes_say_so_in_a_line(monkeypatch):
    """Guards: a traceback, or an hour of 8B on a laptop's CPU; and a stranger who does not learn of tiny."""
    monkeypatch.setattr(sys, "argv", ["node.rehearse", "single"])
    with pytest.raises(SystemExit, match="needs a GPU.*python -m node.rehearse tiny") as end:
        rehearse.main()
    assert "\n" not in end.value.code


def test_an_unknown_recipe_and_a_model_of_unknown_size_are_named():
    """Guards: a KeyError where a name is mistyped."""
    known = "recipe 'papers' is not known; known are paper, single, nnetnav, tiny"
    with pytest.raises(ValueError, match=known):
        rehearse.chosen(rehearse.Options("papers"), 8)
    with pytest.raises(ValueError, match="some/model holds no config.json"):
        rehearse.write_config("some/model", 0, ROOT)


@pytest.mark.parametrize("where", ["begin_measuring", "measured", "forget"])
def test_a_broken_cuda_ends_the_rehearsal_with_its_report(monkeypatch, where):
    """Guards: RuntimeError out of an empty_cache after an illegal access: no table, and nothing to send."""
    def broken(*_):
        raise RuntimeError("an illegal memory access")

    if where != "forget":
        monkeypatch.setattr(rehearse, where, broken)
    run = SimpleNamespace(have={}, forget=broken if where == "forget" else lambda *_: None)
    stage = SimpleNamespace(name="s", needs=(), gives=(), work=broken if where == "forget" else lambda _: {})
    with pytest.raises(rehearse.Alone, match="an illegal memory access"):  # which run_stages reports
        rehearse.run_stage(run, stage, 0, None, False)


def test_the_trainers_stages_run_without_vllm(tmp_path):
    """Guards: a machine without vLLM on which nothing can be rehearsed. The first line says how much is
    written, and where."""
    said = done(command(tmp_path / "out"))
    assert "tiny on 1 x CPU: some minutes. It writes 0.1 GB to" in said
    assert said.rstrip().endswith("READY: all 11 stages ran."), said[-2000:]
    gone(tmp_path / "out")
    report = told(tmp_path / "out")
    assert report["ready"] and [stage["name"] for stage in report["stages"]] == [
        stage.name for stage in stages.STAGES if stage.quick and not stage.vllm]
    assert all(stage["seconds"] > 0 and stage["resident_gb"] > 0 for stage in report["stages"])


def test_the_models_of_one_gpu_are_rehearsed_in_their_own_shape(tmp_path):
    """Guards: Qwen3 (norms on queries and keys, a tied head, its own turns) that LoRA, a packed row or an
    update cannot take; recorded pages that come packed. vLLM is not asked: tests_vllm/test_rehearse.py."""
    said = done(command(
        tmp_path / "out",
        "--world-model-flags=--base tiny/qwen3-world --transitions pages.jsonl.gz --context 2048 "
        "--sft.tokens 1024",
        "--train-flags=--policy tiny/qwen3 --trajectories pages.jsonl.gz --context 2048 --tokens 1024 "
        "--dreaming.tasks 1 --dreaming.group 2"))
    assert said.rstrip().endswith("READY: all 11 stages ran."), said[-2000:]


def test_nothing_of_the_users_is_written_over_whatever_folders_the_flags_name(tmp_path):
    """Guards: a world model of days that the merge replaces by random weights, as --out is absolute; made
    weights in the user's --base; a model that takes the other's config, as their folders have one name."""
    for part, name in (("one", "tiny/gpt-oss"), ("other", "tiny/llama")):
        rehearse.write_config(name, 0, tmp_path / part).rename(tmp_path / part / "model")
    mine = tmp_path / "mine"
    mine.mkdir()
    done(command(
        tmp_path / "out", f"--world-model-flags=--base {tmp_path}/one/model --out {mine} --context 2048",
        f"--train-flags=--policy {tmp_path}/other/model --out {mine} --context 2048",
        first=7, change="stages.STAGES[6] = rehearse.replace(stages.STAGES[6], quick=True)"))
    assert told(tmp_path / "out")["stages"][-1]["name"] == "world model: merge"
    users = [mine, tmp_path / "one" / "model", tmp_path / "other" / "model"]
    assert [[file.name for file in folder.iterdir()] for folder in users] == [
        [], ["config.json"], ["config.json"]]
    configs = [json.loads(file.read_text()) for file in (tmp_path / "out/configs").rglob("config.json")]
    assert {config["model_type"] for config in configs} == {"gpt_oss", "llama"}


real_whole, real_window = sinks._whole_with_sink, sinks._window_with_sink
real_packed = lm.packed_attention


@pytest.mark.parametrize("where, name, fault, says", [
    (sinks, "_window_with_sink", lambda *given: real_window(*given[:-1], 129), "sinks in a window is"),
    (sinks, "_whole_with_sink", lambda q, *rest: real_whole(q * 1.5, *rest), "sinks is"),
    (sinks, "_whole_with_sink", lambda q, *rest: real_whole(torch.cat([
        q[..., :64], q[..., 64:].detach()], -1), *rest), "sinks is"),
    (lm, "packed_attention", lambda *given, cu_seq_lens_q, **more: real_packed(
        *given, cu_seq_lens_q=cu_seq_lens_q[[0, 1, 2, 4]], **more), "packed is"),
    (torch.nn.functional, "grouped_mm", lambda x, w, offs: x @ w[2], "grouped_mm is"),
    (kernels, "kernels", lambda out: {"ScaledDotProductCudnnAttention"}, "ran by ScaledDotProductCudnn")])
def test_a_kernel_that_computes_something_else_is_named(monkeypatch, where, name, fault, says):
    """Guards: a card on which attention is wrong, a window that is one key too wide, sequences that see each
    other, found out after a week of training; a look that finds nothing. Without a fault it says who ran."""
    monkeypatch.setattr(kernels, "gather", lambda device: None)  # it needs a group: the commands have one
    told = kernels.try_all()
    assert set(told["errors"]) == {"grouped_mm", "packed", "sinks", "sinks in a window"}
    assert all("FlashAttention" in by for by in told["ran"].values()) and len(told["ran"]) == 3
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((ValueError, RuntimeError), match=says):
        kernels.try_all()


def test_a_stage_that_fails_is_reported_and_what_does_not_need_it_goes_on(tmp_path):
    """Guards: one failure that hides all others; a file that is not written after one; exit code 0."""
    said = done(command(tmp_path / "out", change=(
        "def bad(run): raise RuntimeError('CUDA out of memory. Tried')\n"
        "stages.STAGES[4] = rehearse.replace(stages.STAGES[4], work=bad)")), 1)
    report = told(tmp_path / "out")
    by_name = {stage["name"]: stage for stage in report["stages"]}
    assert by_name["world model: three steps"]["error"] == "RuntimeError: CUDA out of memory. Tried"
    assert by_name["world model: longest"]["skipped"] == "it needs learner and pairs, and there is none"
    assert by_name["update"]["tokens_per_second"] > 0 and by_name["resume"]["seconds"] > 0
    assert not report["ready"] and report["change"][0].startswith("world model: three steps: RuntimeError")
    assert "NOT READY. What to change:\n- world model: three steps" in said
    gone(tmp_path / "out")


def test_a_rank_that_fails_alone_ends_the_rehearsal_and_says_why(tmp_path):
    """Guards: one rank out of memory, the other for an hour in a collective, and no report."""
    said = done(command(tmp_path / "out", ranks=2, first=4, change=(
        "rehearse.GRACE = 1.0\n"
        "def bad(run):\n"
        "    if rehearse.distributed.rank(): raise RuntimeError('rank 1 is out of memory')\n"
        "    rehearse.distributed.barrier()\n"
        "stages.STAGES[3] = rehearse.replace(stages.STAGES[3], work=bad)")), 1)
    report = told(tmp_path / "out")
    assert report["change"] == ["world model: load: RuntimeError: rank 1 is out of memory"], said[-3000:]
    gone(tmp_path / "out")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_does_not_cost_the_report(tmp_path, ranks):
    """Guards: "No space left on device" and nothing else, after twenty minutes of eight GPUs: neither the
    stage, nor the figures of those before it."""
    said = done(command(tmp_path / "out", ranks=ranks, first=4, change=(
        "from pathlib import Path\n"
        "rehearse.GRACE, written = 1.0, Path.write_text\n"
        "def full(path, text):\n"
        "    if not text: return written(path, text)\n"
        "    raise OSError(28, 'No space left on device')\n"
        "def bad(run):\n"
        "    if rehearse.distributed.rank(): rehearse.distributed.barrier()\n"
        "    Path.write_text = full\n"
        "    Path('x').write_text('some')\n"
        "stages.STAGES[3] = rehearse.replace(stages.STAGES[3], work=bad)")), 1)
    assert "- world model: load: OSError: [Errno 28] No space left on device" in said, said[-3000:]
    assert "examples prepared" in said.split("GB resident")[1] and "cannot be written" in said
    assert said.count("NOT READY") == 1  # not again by a rank that lost the one that failed
    assert not (tmp_path / "out" / "rehearsal.json").exists()
    gone(tmp_path / "out")


def gone(out: Path) -> None:
    wait_for(lambda: not list(out.glob("made-*")), 20)


def test_what_was_made_is_removed_when_it_is_interrupted_and_its_place_is_said_before(tmp_path):
    """Guards: hundreds of gigabytes that an impatient person leaves, or cannot find after a kill -9."""
    run = command(tmp_path / "out", first=3, change=(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored, where tests run in background
        "def slow(run): time.sleep(100)\n"
        "stages.STAGES[2] = rehearse.replace(stages.STAGES[2], work=slow)"))
    limit = time.monotonic() + 100
    while not (there := list((tmp_path / "out").glob("made-*/rows/train.jsonl"))):
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode not in (0, None) and f"rm -r {there[0].parent.parent}" in said
    gone(tmp_path / "out")
    assert told(tmp_path / "out")["interrupted"] and "it was interrupted" in said
    assert told(tmp_path / "out")["stages"][-1]["skipped"] == "interrupted"
    assert "examples prepared          skipped: interrupted" in said
    assert "Traceback" not in said, said[-2000:]


def test_where_vllm_fails_its_older_runner_is_tried_once_and_what_came_of_it_is_said(tmp_path):
    """Guards: a rented node on which nobody knows that the other of vLLM's two runners works (G10). Here it
    cannot: there is no vLLM. tests_vllm/test_rehearse.py has one that works."""
    change = ("def bad(run): raise ValueError('no engine')\n"
              "rehearse.another_runner = lambda: True\n"
              "rehearse.TRIAL_MINUTES = 2\n"
              "stages.STAGES[2] = rehearse.replace(stages.STAGES[2], name='servers and engines', work=bad)")
    said = done(command(tmp_path / "out", change=change, ranks=2, first=3), 1)
    lines = [line for line in said.splitlines() if "older runner" in line]
    assert "is tried once, with two layers" in lines[0] and len(lines) == 2, said[-3000:]
    assert lines[1].startswith("vLLM's older runner fails as well (see "), lines
    assert told(tmp_path / "out")["older_runner"].startswith("vLLM's older runner fails as well")
    assert (tmp_path / "out" / "older-runner" / "log").exists()


def test_the_trial_works_where_both_stages_ran_and_names_what_failed_where_not(tmp_path):
    """Guards: a way out that is told although it is none."""
    engines, sync = ({"name": name, "seconds": 1.0} for name in rehearse.BY_VLLM)
    def says(*stages):
        (tmp_path / "told.json").write_text(json.dumps({"stages": stages}))
        return rehearse.verdict(tmp_path / "told.json")

    assert "works where the newer failed: put VLLM_USE_V2_MODEL_RUNNER=0" in says(engines, sync)
    assert "fails as well (weights to the engine: .3 apart)" in says(engines, sync | {"error": ".3 apart"})
    assert "fails as well (kernels: no)" in says({"name": "kernels", "error": "no"},
                                                 engines | {"skipped": "x"}, sync | {"skipped": "x"})
    assert "fails as well (see " in rehearse.verdict(tmp_path / "none.json")


# ---- beside the plan ---------------------------------------------------------------------------------------


TRAINER = simulate.Trainer(1.0, 0.5, 2.0, {2048: 10.0, 4096: 20.0}, {2048: 8.0, 4096: 12.0})


@pytest.fixture(autouse=True)
def not_simulated(monkeypatch):
    """The memory of TRAINER for all: test_plan.py has claims about a real one."""
    monkeypatch.setattr(plan, "simulate", lambda *_: TRAINER)


@pytest.fixture
def figures(tmp_path) -> dict:
    """The plan of the tiny recipe, as if it were for an H100."""
    base, agent = (rehearse.write_config(name, 0, tmp_path) for name in ("tiny/gpt-oss", "tiny/llama"))
    return compare.planned(rehearse.renamed(rehearse.TINY, base, agent, base, tmp_path), "H100-80GB", 1)


def test_the_plan_has_a_time_for_each_stage(figures):
    """Guards: a stage that was renamed, and an estimate that forgets it."""
    assert set(figures["seconds"]) == {stage.name for stage in stages.STAGES} - {
        "trainer alone", "examples prepared"}
    assert all(seconds > 0 for seconds in figures["seconds"].values())
    assert set(figures["rates"]) <= set(figures["seconds"]) and min(figures["rates"].values()) > 0


def test_contexts_that_hold_no_page_are_an_error_of_the_users(tmp_path):
    """Guards: a ZeroDivisionError of the plan, in the words of Python."""
    recipe = plan.RECIPES["nnetnav"][0]
    base, agent = (rehearse.write_config(name, 2, tmp_path)
                   for name in (recipe.learning.base, recipe.dreaming.policy))
    for flags in (("--context 1000", "", ""), ("", "", "--context 2100")):
        here = rehearse.renamed(recipe.given(flags), base, agent, base, tmp_path)
        with pytest.raises(ValueError, match="no page fits"):
            compare.planned(here, "H100-80GB", 1)


def test_the_papers_recipe_is_not_begun_on_one_of_eight_gpus(monkeypatch):
    """Guards: 178 GB that are written, and a model that one GPU does not hold, for want of torchrun."""
    monkeypatch.setattr(rehearse.torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc_per_node 8 -m node.rehearse"):
        rehearse.rehearse(rehearse.Options())


def test_a_machine_that_cannot_run_it_is_told_all_at_once_and_nothing_is_written(tmp_path):
    """Guards: docker's 64 MB of shared memory, or an image without a compiler, found out after 80 GB were
    written (G4). The GPU is none: torch is told that it has one, with too little room."""
    change = "\n".join([
        "import torch", "from types import SimpleNamespace", "from node import machine",
        "gpu = {'is_available': True, 'current_device': 0, 'get_device_name': 'T',",
        "       'mem_get_info': (10**5, 10**9), 'is_bf16_supported': True}",
        "looked = rehearse.looked",
        "def on_gpu(*given):",
        "    was = {name: getattr(torch.cuda, name) for name in gpu}",
        "    for name, value in gpu.items():",
        "        setattr(torch.cuda, name, lambda *_, value=value, **__: value)",
        "    try: return looked(*given)",
        "    finally:",
        "        for name, value in was.items(): setattr(torch.cuda, name, value)",
        "rehearse.looked = on_gpu",
        "machine.compiler = lambda found: found.failed.append('no compiler')"])
    said = done(command(tmp_path / "out", change=change), 1)
    assert "things stand in the way:" in said and "- no compiler" in said, said
    assert re.search(r"- GPU 0 \(T\): 1\.0 GB are in use by other processes", said), said
    assert "kernels" not in said and not list((tmp_path / "out").glob("made-*"))


def test_what_is_more_than_a_fifth_off_the_plan_is_marked(figures):
    """Guards: a mark that nobody gets, or everybody; a longest sequence that is compared with the memory of
    an ordinary microbatch, or without the engine beside it."""
    stage = next(stage for stage in stages.STAGES if stage.name == "update: longest")
    memory, figures = figures["trainer"], figures | {"engine": 7.0}
    for vllm, engine in ((True, 7.0), (False, 0.0)):
        beside = compare.beside(stage, {"microbatch": 4096}, figures, vllm)
        assert beside["allocated_gb"] == 20.0 + engine
    assert compare.beside(stage, {"microbatch": 4096}, figures, True)["free_gb"] == round(
        memory.card.memory - memory.update_on(4096), 1)
    planned = {"seconds": 10.0, "free_gb": 10.0, "tokens_per_second": 1000.0}
    measured = {"seconds": 12.1, "free_gb": 7.9, "tokens_per_second": 1100.0, "planned": planned}
    assert compare.off(measured) == ["seconds", "free_gb"]
    assert compare.off(measured | {"seconds": 11.9, "free_gb": 8.1}) == []
    line = compare.table([measured | {"name": "update", "off": ["free_gb"], "allocated_gb": 3.0}], True)[1]
    assert "7.9*" in line and "12.1 " in line and len(line) <= 110


def test_the_estimate_says_minutes_and_gigabytes_before_it_begins(figures, capsys):
    """Guards: a person who learns after half an hour that it takes one, or that the disk was too small."""
    head = {"recipe": "paper", "ranks": 8, "card": "NVIDIA H100 80GB HBM3", "warnings": ["it is cold"]}
    rehearse.announce(rehearse.Options(), head, {"seconds": {"update": 120.0, "export": 60.0}},
                      {"models": 81.4, "results (not with --quick)": 170.0})
    rehearse.announce(rehearse.Options(quick=True), head, {"seconds": {"update": 120.0, "export": 60.0}},
                      {"models": 85.0})
    whole, _, quick, _ = capsys.readouterr().out.splitlines()
    assert "paper on 8 x NVIDIA H100 80GB HBM3: about 3 minutes" in whole and "251.4 GB" in whole
    assert "(models 81.4, results (not with --quick) 170.0)" in whole
    assert "GB to runs/rehearsal (" in whole and "removes them" in whole and "about 2 minutes" in quick


def test_out_of_memory_is_answered_with_the_plans_changes(figures):
    """Guards: "CUDA out of memory" and no word on which flag would help."""
    change = plan.Change("--offload", 12.3, "slower updates")
    failed = {"name": "update: longest", "planned": {}, "off": [], "error": "CUDA out of memory. Tried to"}
    found = compare.what_to_change([failed], figures | {"changes": [change]})
    assert found == ["update: longest: CUDA out of memory. Tried to",
                     "--offload: 12.3 GB would be free by the plan, at the price of slower updates"]


def test_a_card_that_nobody_planned_for_is_planned_as_the_nearest_and_said():
    """Guards: the plan of an H100 beside the figures of a 24 GB card."""
    assert compare.card_of("NVIDIA H200", 150.0) == ("H200-141GB", "")
    assert compare.card_of("NVIDIA A100-SXM4-40GB", 42.4) == ("A100-40GB", "")
    assert compare.card_of("NVIDIA GeForce RTX 4090", 25.3) == ("RTX4090-24GB", "")
    card, warning = compare.card_of("NVIDIA RTX A6000", 48.3)
    assert card == "L40S-48GB" and "no card of node/sizes.py" in warning


# ---- what is sent to others --------------------------------------------------------------------------------


def test_nothing_that_is_sent_tells_whose_machine_it_was(tmp_path, monkeypatch):
    """Guards: a user, a host or a folder in a file that people are asked to send: in an error, in a way out,
    in a flag, in a warning, or in what a driver says of who built it; and figures that are left out."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  (ann_smith@lab-node-17)\nGCC")
    monkeypatch.setattr(compare.distributed, "DRIVER", driver)
    why = "/home/ann_smith/x/made/model.safetensors is cut off; ask ann_smith at lab-node-17 (10.1.2.3)"
    stages = [{"name": "update", "error": f"FolderError: {why}", "seconds": 1.5, "off": ["seconds"],
               "planned": {"seconds": 2.0}, "note": why},
              {"name": "export", "error": why, "skipped": "it needs trainer, and there is none"}]
    whole = {"recipe": "paper", "quick": False, "ranks": 8, "card": "NVIDIA H100", "stages": stages,
             "flags": ["--world-model-urls http://cluster.example.org:8000 --out ~/runs/me/x"],
             "warnings": [why], "change": [why], "older_runner": why, "versions": compare.versions()}
    assert compare.kept(tmp_path, whole).endswith("please send it back.")
    assert json.loads((tmp_path / "rehearsal.json").read_text()) == json.loads(json.dumps(whole))
    text = (tmp_path / "send.json").read_text()
    for word in ("ann_smith", "lab-node-17", "10.1.2.3", "cluster.example", "/home", "runs/me", "cut off"):
        assert word not in text, text
    told = json.loads(text)
    assert told["stages"][0] == {"name": "update", "error": "FolderError", "seconds": 1.5, "off": ["seconds"],
                                 "planned": {"seconds": 2.0}}
    assert told["stages"][1] == {"name": "export", "skipped": "it needs trainer, and there is none"}
    assert (told["recipe"], told["ranks"], told["card"]) == ("paper", 8, "NVIDIA H100")
    assert told["versions"]["driver"] == "580.65.06"
    assert told["versions"]["torch"] == metadata.version("torch")


# ---- a run that is over ------------------------------------------------------------------------------------


@pytest.fixture
def evening(tmp_path) -> recipe.Train:
    """What is left of a `single` of two updates: models (no weights), figures of all trainings, and the
    results of three evaluations, in tmp_path/ann_smith."""
    folder = tmp_path / "ann_smith"
    world, agent = (rehearse.write_config(f"tiny/{name}", 0, folder) for name in ("qwen3-world", "qwen3"))
    config = replace(recipe.SINGLE, world_model=str(world), policy=str(agent), out=str(folder / "dream"),
                     offload=True, updates=2, evaluate_every=2)
    for model, tokens, seconds in ((world, 8000, 2.0), (agent, 9000, 4.5)):
        (model / "training.json").write_text(json.dumps({"tokens": tokens, "seconds": seconds, "loss": 1.0}))
    files = folder / "dream.run"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(asdict(config)))
    rows = [{"update": 0, "kept": 8, "seconds_dream": 30.0, "seconds_update": 4.0, "steps": 3.0,
             "seconds_real": 7.0, "real_success": 0.25},
            {"update": 1, "kept": 0, "seconds_dream": 10.0, "seconds_update": 0.1, "steps": 1.0},
            {"update": 2, "seconds_real": 5.0, "real_success": 0.5}]
    (files / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for k, (who, success) in enumerate(((config.judge_model, 0.1), (f"{agent}/", 0.3), (config.out, 0.6))):
        result = {"checkpoint": who, "success": success, "n": 10, "unreadable": 0.2, "trajectories": [],
                  "per_task": {"click-test": {"success": success, "n": 10}}, "run": str(folder)}
        (folder / f"{k}.json").write_text(json.dumps(result))
    return config


def test_a_run_that_is_over_is_sent_beside_its_own_plan_and_without_a_name(evening):
    """Guards: an evening of somebody's GPU that settles no figure: a mean over updates that learned nothing,
    a plan with other settings than the run's, success of nobody knows which agent; and a user's name in what
    is sent."""
    folder = Path(evening.out).parent
    (folder / "send.json").write_text('{"recipe": "single"}')
    results = tuple(str(folder / f"{k}.json") for k in range(3))
    said = compare.command(f"{evening.out}/", results, "L40S-48GB", rehearsal=str(folder / "send.json"))
    text = (folder / "dream.run" / "send.json").read_text()
    told, *dreams, update, sync = json.loads(text), *plan.plan_train(evening, "L40S-48GB", 1).stages
    stages_of = {stage.pop("name"): stage for stage in told["stages"]}
    assert {name: stage["measured"] for name, stage in stages_of.items()} == {
        "fine-tune the world model: tokens/s": 4000, "fine-tune the world model: tokens": 8000,
        "fine-tune the agent: tokens/s": 2000, "fine-tune the agent: tokens": 9000,
        "an update: seconds of dreams": 20, "an update: seconds of learning": 4,
        "an update: turns of a dream": 2, "seconds of looks at the real web": 12}
    for name, parts in (("dreams", dreams), ("learning", (update, sync))):
        stage = stages_of[f"an update: seconds of {name}"]
        for key, field in (("planned", "seconds"), ("from", "low"), ("to", "high")):
            assert stage[key] == pytest.approx(sum(getattr(part, field) for part in parts))
    assert update.seconds > plan.plan_train(replace(evening, offload=False), "L40S-48GB", 1).stages[3].seconds
    assert all(stage["from"] >= stage["planned"] >= stage["to"] > 0 for name, stage in stages_of.items()
               if name.endswith("tokens/s"))
    named = {figure for stage in stages_of.values() for figure in stage["settles"]}
    assert named <= hours.FIGURES.keys() and len(named) > 10
    assert [(result["name"], result["success"]) for result in told["results"]] == [
        ("untrained", 0.1), ("before", 0.3), ("after", 0.6)]
    assert told["looks"] == [[0, 0.25], [2, 0.5]] and told["rehearsal"] == {"recipe": "single"}
    assert told["config"]["offload"] and told["config"]["dreaming"]["group"] == 8
    assert "ann_smith" not in text and (told["card"], told["planned_as"]) == ("CPU", "L40S-48GB")
    assert max(map(len, said.splitlines()[:-1])) <= 110 and "20.0" in said and "send.json has these" in said


def test_what_was_not_measured_is_no_figure_and_a_run_without_a_plan_is_sent(evening):
    """Guards: the tokens of a whole fine-tuning over the seconds of its last part; a published world model,
    or one behind a URL, whose size nobody knows, and no file at all."""
    (Path(evening.policy) / "training.json").write_text('{"tokens": 9000}')
    file = Path(f"{evening.out}.run", "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"world_model": "http://127.0.0.1:1/v1"}))
    said = compare.command(evening.out, card="L40S-48GB", rehearsal="nowhere")
    told = json.loads(file.with_name("send.json").read_text())
    by_name = {stage["name"]: stage for stage in told["stages"]}
    assert "Warning: without a plan: http://127.0.0.1:1/v1 holds no config.json" in said
    assert {name for name, stage in by_name.items() if "measured" not in stage} == {
        "fine-tune the world model: tokens/s", "fine-tune the world model: tokens",
        "fine-tune the agent: tokens/s"}
    assert not any("planned" in stage for stage in by_name.values()) and "rehearsal" not in told
    with pytest.raises(ValueError, match="nowhere.run holds no run"):
        compare.command("nowhere")


def test_a_server_is_killed_and_asked_also_after_dreams_that_failed(serving, taught, monkeypatch):
    """Guards: "a server killed: given up, as another request failed", of a server that came back well.
    Whoever dreamed has told the client to ask no more."""
    said = {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}]}
    server = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()), starts=2, error=None)
    remote = Remote([serving(lambda _: (200, json.dumps(said).encode())).url], taught, server=server)
    remote.give_up()
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    parts = SimpleNamespace(world_model=SimpleNamespace(lm=remote))
    assert stages.kill_server(SimpleNamespace(have={"samplers": parts})) == {}


# ---- scripted lengths --------------------------------------------------------------------------------------


class Counting:
    """A model that writes as many tokens as it is asked for, and notes what it was asked."""

    def __init__(self, tokenizer, concurrency: int):
        self.tokenizer, self.context, self.concurrency, self.asked = tokenizer, 4096, concurrency, []
        self.template = lm.Template(tokenizer)

    def generate(self, prompts, max_new_tokens, temperature, seeds):
        self.asked.append((len(prompts), max_new_tokens))
        return [lm.Sample([7] * max_new_tokens, [-1.0] * max_new_tokens, "noise", True) for _ in prompts]


def test_an_answer_is_as_long_as_it_was_scripted_and_says_what_was_scripted(tokenizer):
    """Guards: dreams at the length of random weights (all cut off, or all of max_new_tokens), where each row
    is to take as long as it would: alone at a server, together in an engine."""
    for concurrency in (1, 64):
        model = Counting(tokenizer, concurrency)
        script = stages.Scripted(model, lambda rng: rng.choice((5, 50, 500)), lambda *_: ("said", None))
        samples = lm.sample(script, [[1, 2, 3]] * 8, 100, 0.7, list(range(8)))
        lengths = [min(100, random.Random(seed).choice((5, 50, 500))) for seed in range(8)]
        assert [len(sample.ids) for sample in samples] == [len(s.logps) for s in samples] == lengths
        assert {sample.text for sample in samples} == {"said"} and not any(s.truncated for s in samples)
        assert sorted(model.asked) == ([(8, max(lengths))] if concurrency == 1 else
                                       sorted((1, length) for length in lengths))
        assert script.counts == {"read": 24, "written": sum(lengths)}


def test_the_scripted_agent_stops_at_its_last_turn_and_the_scripted_delta_applies(tokenizer):
    """Guards: dreams that no judge sees, deltas that are malformed and drop every dream, and pages that share
    their beginning with the page before (vLLM would answer from its cache)."""
    model, page = Counting(tokenizer, 1), "RootWebArea 'x', url='http://a/'\n\t[3] link 'Tea', clickable"
    agent, world, past = stages.agent_script(model, 3), stages.world_script(model), ()
    taken = []
    for _ in range(3):
        chat = policy.messages("Buy tea", "http://a/", page, past)
        sample = lm.sample(agent, [lm.Template(tokenizer).prompt_ids(chat)], 64, 0.7, 1)[0]
        action = data.parse_completion(sample.text)[1]
        taken.append(action.name)
        past += (data.describe(action, page),)
        answer = lm.sample(world, [[1, 2]], 64, 0.7, [len(past)])[0]
        after = a11y.apply(page, answer.text.split("\n")[1])
        assert after != page and data.root_url(after) == data.root_url(page)
        page = after
    assert taken == ["press", "press", "stop"]
