"""Claims about node/commands.sh that need no vLLM: its programs are stood in for by one that writes down how
it was called, and makes what the real one would (tests_vllm/test_commands.py runs the real ones)."""
import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
from helpers.processes import naming, wait_for

import evaluate
import recipe
import sft
import train
from node import annotate, machine, plan
from node.server import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "node" / "commands.sh"
# It makes what a flag names. Where FAIL or WAIT names the program, it fails or goes on for ten minutes.
STAND_IN = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path

words = [Path(sys.argv[0]).name, *sys.argv[1:]]
line = " ".join(words)

def named(variable):
    name = os.environ.get(variable, "?")
    return name.removesuffix(" --preflight") in line and ("--preflight" in name) == ("--preflight" in words)

with open("calls.jsonl", "a") as log:
    log.write(json.dumps(words) + "\\n")
if "api_server" in line:  # with an engine of its own, which outlives it unless the group is ended
    if named("FAIL"):
        sys.exit("no memory for the KV cache")
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                      "time.sleep(600)  # engine of " + os.getcwd()])
    os.execv(sys.executable, [sys.executable, "-m", "http.server", words[words.index("--port") + 1],
                              "--bind", "127.0.0.1", "--directory", "web"])
if named("WAIT"):
    time.sleep(600)
if named("FAIL"):
    sys.exit("it failed")
if "node.plan" in line:
    print(os.environ.get("PLAN", "It fits."))
if "--preflight" in words:
    print(os.environ.get("LOOK_" + words[4][:-3], ""))
if "--local-dir" in words:
    Path(words[words.index("--local-dir") + 1]).mkdir(parents=True, exist_ok=True)
for flag in ("--out", "--json"):
    if flag in words:
        out = Path(words[words.index(flag) + 1])
        if out.suffix:
            out.write_text("made")
        elif "--preflight" not in words:
            out.mkdir(exist_ok=True)
            for name in ("training.json", "config.json"):
                (out / name).write_text("made")
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where the script runs; its programs stand in bin/, and http.server answers /health."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "health").write_text("ok")
    for name in ("python", "torchrun", "hf"):
        (tmp_path / "bin" / name).write_text(STAND_IN.format(python=sys.executable))
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def listen() -> None:
    """Who runs the tests in the background or under nohup has signals ignored. A shell cannot take that
    back."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(folder: Path, script: Path = SCRIPT, **variables: str) -> subprocess.Popen:
    path = f"{folder}/bin:{os.environ['PATH']}"
    environment = {"PORT": str(free_port())} | os.environ | {"PATH": path} | variables
    with open(folder / "said", "w") as said:
        return subprocess.Popen(["bash", script], cwd=folder, env=environment, stdout=said, stderr=said,
                                preexec_fn=listen, start_new_session=True)


def run(folder: Path, **variables) -> tuple[int, str]:
    """(exit status, what it said)"""
    (folder / "calls.jsonl").unlink(missing_ok=True)
    status = start(folder, **variables).wait(timeout=60)
    return status, (folder / "said").read_text()


def calls(folder: Path) -> list[list[str]]:
    file = folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def programs(folder: Path) -> list[str]:
    """The programs that were called, in order: "hf NAME", "node.plan", "sft.py policy --preflight"."""
    found = []
    for words in calls(folder):
        here = [word for word in words if word.endswith(".py") or word.startswith(("node.", "vllm."))]
        here += words[words.index("sft.py") + 1 :][:1] if "sft.py" in words else []
        here += ["--preflight"] if "--preflight" in words else []
        found.append(" ".join(here) or f"hf {words[2]}")
    return found


def left(folder: Path, seconds: float = 0) -> list[str]:
    """Processes of the annotator's server, and of its engine."""
    return naming(f"engine of {folder}", seconds)


def gone(folder: Path) -> bool:
    return not left(folder, 10)


PUBLISHED = ["node.plan", "hf stanfordnlp/llama8b-nnetnav-live", "node.convert",
             "hf stanfordnlp/nnetnav-live", "hf openai/gpt-oss-120b"]
LOOKED = ["sft.py world_model --preflight", "train.py --preflight"]
MADE = ["vllm.entrypoints.openai.api_server", "node.annotate", "sft.py world_model", "train.py",
        "evaluate.py", "evaluate.py", "evaluate.py"]


def test_every_program_understands_what_the_script_asks_of_it(folder, monkeypatch):
    """Guards: a flag that was renamed, met after seven hours of fine-tuning."""
    status, said = run(folder, CLONE="yes", TRAIN_FLAGS="--updates 3 --offload", SEEDS="1000000:1")
    assert status == 0 and "sft.py policy" in programs(folder), said
    monkeypatch.setattr(recipe, "command", lambda *_, **__: None)  # read the flags, and do nothing
    configs = {"evaluate.py": evaluate.Config, "node.annotate": annotate.Config}
    parsers = {"sft.py": sft, "train.py": train}
    monkeypatch.setattr(recipe, "needs_gpu", lambda *_: None)
    for name, words in zip(programs(folder), calls(folder)):
        name = name.split()[0]
        flags = words[words.index(name) + 1 :] if name in words else []
        if name in configs:
            tyro.cli(configs[name], args=flags)
        elif name == "node.plan":
            assert flags[:2] == ["--ranks", "8"] and "ranks" in inspect.signature(plan.command).parameters
            asked = flags[2].removeprefix("--train-flags=").split()
            planned = plan.RECIPES["paper"][0].given(("", "", " ".join(asked))).dreaming  # it knows each flag
            assert planned.offload and planned.judge_server.tensor_parallel == 8
        elif name in parsers:
            assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node", "8"]
            monkeypatch.setattr(sys, "argv", [name, *flags])
            parsers[name].main()


def test_the_script_again_repeats_nothing_that_is_finished(folder):
    """Guards: hours of the node spent twice; and, after a failure, a step that is skipped."""
    assert run(folder)[0] == 0 and programs(folder) == PUBLISHED + LOOKED + MADE
    assert run(folder)[0] == 0
    assert programs(folder) == ["node.plan", "node.convert", "evaluate.py"]  # cheap, all of them
    assert gone(folder)


@pytest.mark.parametrize("program", ["node.plan", "hf openai/gpt-oss-120b", "node.convert",
                                     "sft.py world_model --preflight", "train.py --preflight",
                                     "node.annotate", "sft.py world_model", "train.py"])
def test_a_command_that_fails_ends_the_script_and_comes_first_the_next_time(folder, program):
    """Guards: the next command run on what is not there; a step taken for done because its folder exists; a
    server that outlives the failure."""
    status, _ = run(folder, FAIL=program.replace("hf ", "hf download "))
    assert status != 0 and programs(folder)[-1] == program and gone(folder)
    assert run(folder)[0] == 0 and program in programs(folder) and programs(folder)[-1] == "evaluate.py"


def waiting(folder: Path, program: str) -> tuple[subprocess.Popen, int]:
    """The script, while `program` works; and the process of that."""
    script = start(folder, WAIT=program)
    wait_for(lambda: program in programs(folder), 60)
    command = ["ps", "-ww", "-o", "pid,args", "--ppid", str(script.pid)]
    listed = subprocess.run(command, text=True, capture_output=True).stdout
    working, = (int(line.split()[0]) for line in listed.splitlines() if program in line)
    return script, working


@pytest.mark.parametrize("how", [signal.SIGHUP, "kill PID"])
def test_an_interrupted_annotation_leaves_no_server(folder, how):
    """Guards: 120B weights that stay on every GPU after Ctrl-C, a lost connection or a batch system's end,
    also where the script alone is told."""
    script, asking = waiting(folder, "node.annotate")
    assert left(folder)
    os.killpg(script.pid, how) if how != "kill PID" else script.terminate()
    assert script.wait(timeout=60) != 0 and gone(folder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(asking, signal.SIGKILL)  # the real one ends by itself when its server is gone
    assert not (folder / "runs" / "paper" / "reasons.done").exists()


@pytest.mark.parametrize("program", ["node.annotate", "train.py"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_reaches_the_program_that_works(folder, program, how):
    """Guards: a training in a process group of its own, which trains on after Ctrl-C in `... | tee log`, or
    after the end of a batch job, while a second one is started."""
    script, working = waiting(folder, program)
    try:
        assert left(folder) or program != "node.annotate"  # its server
        os.killpg(script.pid, how)
        assert script.wait(timeout=60) != 0 and gone(folder)
        assert not (folder / "runs/paper/reasons.done").exists() or program != "node.annotate"
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(working)], text=True, capture_output=True)
        assert state.stdout.strip()[:1] in ("", "Z"), "it works on"  # ZN, where the tests run under nice
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(working, signal.SIGKILL)
    assert programs(folder)[-1] == program


def test_a_plan_that_does_not_fit_stops_the_script_until_it_does_or_is_forced(folder):
    """Guards: 65 GB fetched and hours trained towards a run that has no memory; an old plan that stops the
    run of another number of GPUs, or that lets the run of other flags pass."""
    too_large = "IT DOES NOT ALWAYS FIT: a full microbatch does"
    status, said = run(folder, PLAN=too_large)
    assert status == 1 and "FORCE=yes" in said and programs(folder) == ["node.plan"]
    assert run(folder, PLAN=too_large, FORCE="yes")[0] == 0 and programs(folder)[-1] == "evaluate.py"
    shutil.rmtree(folder / "runs")
    assert run(folder, PLAN=too_large)[0] == 1
    assert run(folder)[0] == 0 and programs(folder)[0] == "node.plan"
    assert run(folder, PLAN=too_large, TRAIN_FLAGS="--tokens 99999")[0] == 1
    assert "--tokens 99999" in calls(folder)[0][-1]


def test_the_plan_is_of_the_models_that_are_dreamed_with(folder):
    """Guards: "It fits." of the paper's models, said to who has given others; and a name that the plan does
    not know, of a model that lies here."""
    of = lambda: calls(folder)[0][-1].split()[1:4:2]
    assert run(folder)[0] == 0
    assert of() == ["stanfordnlp/llama8b-nnetnav-live", "openai/gpt-oss-120b"]
    (folder / "own").mkdir()
    (folder / "own" / "config.json").write_text("mine")
    assert run(folder, AGENT="own", BASE="own", OUT="runs/other")[0] == 0 and of() == ["own", "own"]
    assert run(folder, AGENT="own", CLONE="yes", RUN="runs/clone")[0] == 0
    assert of() == ["meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-120b"]


def test_a_disk_that_holds_each_training_and_not_all_of_them_stops_the_script(folder, monkeypatch):
    """Guards: a disk that is full after a day of fine-tuning, as each training was looked at alone. Of the
    checkpoints only the largest count, and another disk counts by itself."""
    def line(**need: float) -> str:
        found = machine.Found()
        machine.disk(found, folder, need)
        return f"ok: {found.ok[0]}"  # as preflight.passes says it

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000e9))
    looks = {"LOOK_sft": line(checkpoints=200, model=400), "LOOK_train": line(checkpoints=300, model=400)}
    status, said = run(folder, **looks)
    assert status == 1 and "all trainings together write 1100 GB, and 1000 are free; make" in said, said
    assert programs(folder)[-1] == "train.py --preflight"
    assert run(folder, **looks | {"LOOK_train": line(checkpoints=200, model=400)})[0] == 0
    shutil.rmtree(folder / "runs")
    assert run(folder, **looks | {"LOOK_train": line(model=900).rpartition("/")[0] + "/disk"})[0] == 0
    shutil.rmtree(folder / "runs")
    assert run(folder, **looks, FORCE="yes")[0] == 0 and programs(folder)[-1] == "evaluate.py"


def test_a_folder_that_is_whole_or_a_users_own_is_not_fetched_over(folder):
    """Guards: a tokenizer_config.json that was mended as the preflight said, and is published again by the
    next run; and half a download taken for a model."""
    own, half = folder / "own", folder / "half"
    for model in (own, half):
        model.mkdir()
        (model / "config.json").write_text("mine")
    (half / ".cache" / "huggingface").mkdir(parents=True)
    rows = folder / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("mine")
    named = {"AGENT": str(own), "BASE": str(half), "ROWS": str(rows)}
    assert run(folder, **named)[0] == 0
    downloads = ["hf openai/gpt-oss-120b"]
    assert [name for name in programs(folder) if name.startswith("hf ")] == downloads
    assert run(folder, **named)[0] == 0 and not [name for name in programs(folder) if name[:3] == "hf "]


def test_pasted_without_set_e_a_failed_annotation_is_not_taken_for_done(folder):
    """Guards: who pastes the lines as the script says, and trains on a tenth of the reasons."""
    pasted = SCRIPT.read_text().replace("set -euo pipefail", "")
    (folder / "pasted.sh").write_text(pasted)
    status, said = run(folder, script=folder / "pasted.sh", FAIL="node.annotate")
    assert status == 1 and programs(folder)[-1] == "node.annotate" and "not finished" in said
    assert not (folder / "runs" / "paper" / "reasons.done").exists() and gone(folder)


def test_a_server_that_does_not_start_and_a_port_that_is_taken_are_said(folder):
    """Guards: an endless wait, and another run's server that is asked instead."""
    status, said = run(folder, FAIL="api_server")
    assert status == 1 and "no memory for the KV cache" in said and "did not start" in said
    (folder / "web" / "health").rename(folder / "web" / "later")  # it is there, and never ready
    status, said = run(folder, START_MINUTES="0")
    assert status == 1 and "did not start in 0 minutes" in said and gone(folder)
    (folder / "web" / "later").rename(folder / "web" / "health")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = run(folder, PORT=port)
    assert status == 1 and f"port {port} is taken" in said and "node.annotate" not in programs(folder)


def test_the_documents_tell_the_script_as_it_is():
    """Guards: a document whose steps, names, variables or sizes are another script's."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    section = text[text.index("## On a node of 8 x H100") :].split("\n## ")[0]
    script = SCRIPT.read_text()
    names = re.findall(r"_NAME:-([\w./-]+)\}", script)
    called = re.findall(r"python -m (node\.\w+)|(?<!/)\b(\w+\.py)\b", script)
    assert len(names) == 4 and len(called) >= 8
    for told in {*names, *map("".join, called)}:
        assert told in section, f"docs/gpu.md does not tell of {told}"
    steps = re.findall(r"^# ---- (\d)\. ", script, re.MULTILINE)
    assert sorted(set(re.findall(r"^\| (\d) \|", section, re.MULTILINE))) == steps
    settable = set(re.findall(r"^(\w+)=\$\{\1:-", script, re.MULTILINE))
    assert {"RANKS", "TP", "BASE", "TRAIN_FLAGS"} <= settable
    assert set(re.findall(r"\b([A-Z][A-Z_]+)=", section)) <= settable
    for line in re.findall(r"^#     ((?:pip|python|hf) .*?)(?: {2,}#.*)?$", script, re.MULTILINE):
        assert line in section, f"docs/gpu.md does not have: {line}"
    for step, took in re.findall(r"^# ---- (\d)\. .*?\b([\d.]+ (?:h|s an update))\b", script, re.MULTILINE):
        rows = [line for line in section.splitlines() if line.startswith(f"| {step} |")]
        assert any(line.rpartition(" | ")[2].startswith(took) for line in rows), f"step {step} takes {took}?"
    for size in re.findall(r"\b([\d.]+ GB)\b", script.split("# ---- 2.")[1]):
        assert size in section or "196" in size, f"docs/gpu.md does not have {size}"
