"""The whole recipe under torchrun, small: an FSDP2 trainer and a vLLM engine on each of two ranks, vLLM
servers for world model and judge, MiniWoB++ start pages, ten updates. The run is killed after its first
checkpoint, and goes on by the same command. Then its world model's server is killed. And rivals/webrl.py so.
"""
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer, tiny_lm
from helpers.processes import naming
from helpers.real_vllm import MARKS

import lm

pytestmark = MARKS
HERE = Path(__file__).resolve().parent.parent
SERVERS = []
for server in ("--world-model-server", "--judge-server"):
    SERVERS += [f"{server}.tensor-parallel", "1", f"{server}.kv-cache-gb", "0.1", f"{server}.eager",
                f"{server}.dtype", "float32"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(HERE),
                            "PYTHONUNBUFFERED": "1"}
LENGTHS = ["--context", "512", "--world-model-context", "512", "--judge-context", "512"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, which is the judge, and a world model, taught by sft.py on what the explorer recorded of two
    tasks: this is about the machinery, but an agent that is hardly ever read leaves no trajectory to
    judge."""
    folder = tmp_path_factory.mktemp("loop")
    recorded = [t for t in gzip.open(HERE / "recordings/small.jsonl.gz", "rt")
                if json.loads(t)["task"] in ("click-option", "enter-text")]
    (folder / "recorded.jsonl").write_text("".join(recorded))
    lm.save(tiny_lm(build_tokenizer()), folder / "base")
    how = ["--base", str(folder / "base"), "--context", "512", "--sft.epochs", "6", "--sft.lr", "3e-3"]
    for name, flag, of in (("policy", "--trajectories", "sft"),
                           ("world_model", "--transitions", "world_model")):
        command = [sys.executable, "sft.py", name, "laptop", flag, str(folder / "recorded.jsonl"), *how,
                   "--out", str(folder / of)]
        subprocess.run(command, cwd=HERE, env=ENVIRONMENT, check=True, capture_output=True)
    return folder


def command(folder: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    return [*torchrun, "train.py", "laptop", "--policy", str(folder / "sft"),
            "--world-model", str(folder / "world_model"), "--out", str(folder / "dream"),
            "--trajectories", str(folder / "recorded.jsonl"), "--judge-model", "", *LENGTHS,
            "--demonstrations", "5", "--updates", "10", "--evaluate-every", "0", "--checkpoint-every", "1",
            "--lr", "1e-3", "--sampler", "vllm", "--compute", "float32", "--policy-engine.kv-cache-gb", "0.1",
            "--policy-engine.eager", "--drop-limit", "1", "--dreaming.tasks", "2",
            "--dreaming.group", "4", "--dreaming.expert-fraction", "0.5", *SERVERS]


def test_the_whole_recipe_runs_on_two_ranks_is_killed_and_goes_on(folder):
    """Guards: a weight sync that does not arrive (the sampler gap of every later update would tell), a server
    that outlives the run, a run that does not outlive its server, doubled lines, a traceback at exit."""
    first = subprocess.Popen(command(folder), cwd=HERE, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                             stderr=open(folder / "first.log", "w"), start_new_session=True)
    limit, checkpoints = time.time() + 900, folder / "dream.run" / "checkpoint"
    while not any((checkpoints / f"step-{n}").exists() for n in (1, 2, 3)):
        assert first.poll() is None and time.time() < limit, (folder / "first.log").read_text()[-4000:]
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (folder / "dream").exists(), "it was done before it was killed"
    assert not naming(folder, 30), "something outlived a killed run"
    # The same command again. When it has dreamed, its world model's server dies in the middle of the next
    # dreams.
    again = subprocess.Popen(command(folder), cwd=HERE, env=ENVIRONMENT,
                             stdout=open(folder / "again.out", "w"), stderr=open(folder / "again.log", "w"))
    metrics, limit = folder / "dream.run" / "metrics.jsonl", time.time() + 900
    while "resuming after update" not in (folder / "again.out").read_text():
        assert again.poll() is None and time.time() < limit, (folder / "again.log").read_text()[-4000:]
        time.sleep(0.05)
    time.sleep(1)  # what will be computed again is cut off now
    resumed = len(metrics.read_text().splitlines())
    while len(metrics.read_text().splitlines()) == resumed:
        assert again.poll() is None and time.time() < limit, (folder / "again.log").read_text()[-4000:]
        time.sleep(0.02)
    serves = lambda line: "api_server" in line and f"{folder}/world_model" in line and "train.py" not in line
    victims = [int(line.split()[0]) for line in naming(folder) if serves(line)]
    over = len(metrics.read_text().splitlines()) >= 10
    assert victims and not over, "the run was over before its server could be killed"
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    again.wait(timeout=900)
    log = (folder / "again.log").read_text()
    assert again.returncode == 0 and "Traceback" not in log and "is started again (1 of" in log, log[-4000:]
    check_what_was_learned(folder, metrics)
    assert not naming(folder), "something outlived a finished run"


def check_what_was_learned(folder, metrics):
    """No line is doubled, the sampler followed every update, and the agent is another than at the start."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(11))
    learned = [row for row in rows if row.get("kept")]
    assert len(learned) >= 2, rows
    assert all(row["sampler_gap"] < 1e-3 for row in learned), rows  # float32 on both sides
    assert all(row["grad_norm"] > 0 for row in learned), rows
    assert sum(row["response_tokens"] > 0 for row in learned) == len(learned)
    from transformers import AutoModelForCausalLM

    before, after = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
                     for name in ("sft", "dream"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def webrl_command(folder) -> list[str]:
    torchrun = command(folder)[: command(folder).index("train.py")]
    return [*torchrun, "-m", "rivals.webrl", "dream", "--policy", str(folder / "sft"), "--orm",
            str(folder / "sft"), "--world-model", str(folder / "world_model"), "--out", str(folder / "webrl"),
            "--trajectories", str(folder / "recorded.jsonl"), *LENGTHS,
            "--demonstrations", "5", "--updates", "2", "--goals", "6", "--batch", "8",
            "--evaluate-every", "0", "--sampler", "vllm",
            "--compute", "float32", "--policy-engine.kv-cache-gb", "0.1", "--policy-engine.eager",
            "--drop-limit", "1", *SERVERS]


def test_two_phases_on_two_ranks_with_engines_and_servers(folder):
    """Guards: a weight sync that does not arrive behind a phase (the sampler gap of the next tells), and a
    reward model that nobody serves. The same command again has nothing left to do."""
    for _ in range(2):
        done = subprocess.run(webrl_command(folder), cwd=HERE, env=ENVIRONMENT, capture_output=True,
                              text=True, timeout=1500)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = [json.loads(line) for line in (folder / "webrl.run/metrics.jsonl").read_text().splitlines()]
        learned = [row for row in rows if "turns" in row]
        assert [row["update"] for row in learned] == [0, 1]
        assert all(row["sampler_gap"] < 0.01 and row["judged"] for row in learned)
