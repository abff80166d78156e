"""Claims about node/commands.sh that need no vLLM: its programs are stood in for by one that writes down how
it was called, and makes what the real one would (tests_vllm/test_commands.py runs the real ones)."""
import contextlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro

import evaluate
import lm
import policy
import train
import world_model
from node import annotate, plan

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "node" / "commands.sh"
# It makes what a flag names. Where FAIL or WAIT names the program, it fails or goes on for ten minutes.
STAND_IN = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path

words = [Path(sys.argv[0]).name, *sys.argv[1:]]
line = " ".join(words)

def named(variable):
    name, *look = os.environ.get(variable, "?").split()
    return name in line and bool(look) == ("--preflight" in words)

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
    print("It fits.")
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


def start(folder: Path, **variables: str) -> subprocess.Popen:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {"PORT": port} | os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | variables
    with open(folder / "said", "w") as said:
        # Who runs the tests in the background has SIGINT ignored, and a shell cannot take that back.
        listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(["bash", SCRIPT], cwd=folder, env=environment, stdout=said, stderr=said,
                                preexec_fn=listen)


def run(folder: Path, **variables: str) -> tuple[int, str]:
    """(exit status, what it said)"""
    (folder / "calls.jsonl").unlink(missing_ok=True)
    status = start(folder, **variables).wait(timeout=60)
    return status, (folder / "said").read_text()


def calls(folder: Path) -> list[list[str]]:
    file = folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def programs(folder: Path) -> list[str]:
    """The programs that were called, in order: "hf NAME", "node.plan", "policy.py --preflight"."""
    found = []
    for words in calls(folder):
        here = [word for word in words if word.endswith(".py") or word.startswith(("node.", "vllm."))]
        here += ["--preflight"] if "--preflight" in words else []
        found.append(" ".join(here) or f"hf {words[2]}")
    return found


def left(folder: Path) -> list[str]:
    """Processes of the annotator's server, and of its engine."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if f"engine of {folder}" in line]


PUBLISHED = ["node.plan", "hf openai/gpt-oss-120b", "hf stanfordnlp/nnetnav-live",
             "hf stanfordnlp/llama8b-nnetnav-live", "node.convert"]
LOOKED = ["world_model.py --preflight"]
MADE = ["vllm.entrypoints.openai.api_server", "node.annotate", "world_model.py", "train.py", "evaluate.py",
        "evaluate.py", "evaluate.py"]


def test_every_program_understands_what_the_script_asks_of_it(folder, monkeypatch):
    """Guards: a flag that was renamed, met after seven hours of fine-tuning."""
    status, said = run(folder, CLONE="yes", TRAIN_FLAGS="--updates 3 --offload", SEEDS="1000000:1")
    assert status == 0 and "policy.py" in programs(folder), said
    monkeypatch.setattr(lm, "command", lambda *_, **__: None)  # read the flags, and do nothing
    configs = {"evaluate.py": evaluate.Config, "node.annotate": annotate.Config}
    parsers = {"policy.py": policy, "train.py": train, "world_model.py": world_model}
    monkeypatch.setattr(lm, "needs_gpu", lambda *_: None)
    for name, words in zip(programs(folder), calls(folder)):
        name = name.split()[0]
        flags = words[words.index(name) + 1 :] if name in words else []
        if name in configs:
            tyro.cli(configs[name], args=flags)
        elif name == "node.plan":
            assert flags == ["--ranks", "8"] and "ranks" in inspect.signature(plan.command).parameters
        elif name in parsers:
            assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node", "8"]
            monkeypatch.setattr(sys, "argv", [name, *flags])
            parsers[name].main()


def test_the_script_again_repeats_nothing_that_is_finished(folder):
    """Guards: hours of the node spent twice; and, after a failure, a step that is skipped."""
    assert run(folder)[0] == 0 and programs(folder) == PUBLISHED + LOOKED + MADE
    downloads = [name for name in PUBLISHED if name != "node.plan"]  # these look what is there themselves
    assert run(folder)[0] == 0 and programs(folder) == [*downloads, "evaluate.py"]
    assert not left(folder)


@pytest.mark.parametrize("program", ["node.plan", "node.convert", "world_model.py --preflight",
                                     "node.annotate", "world_model.py", "train.py"])
def test_a_command_that_fails_ends_the_script_and_comes_first_the_next_time(folder, program):
    """Guards: the next command run on what is not there; a step taken for done because its folder exists; a
    server that outlives the failure."""
    status, _ = run(folder, FAIL=program)
    assert status != 0 and programs(folder)[-1] == program and not left(folder)
    assert run(folder)[0] == 0 and program in programs(folder) and programs(folder)[-1] == "evaluate.py"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, "the keyboard"])
def test_an_interrupted_annotation_leaves_no_server(folder, how):
    """Guards: 120B weights that stay on every GPU after Ctrl-C, a lost connection or a batch system's end.
    (Ctrl-C reaches the program in front alone, as each has a process group of its own.)"""
    script = start(folder, WAIT="node.annotate")
    limit = time.monotonic() + 60
    while "node.annotate" not in programs(folder):
        assert time.monotonic() < limit and script.poll() is None
        time.sleep(0.05)
    assert left(folder)
    command = ["ps", "-ww", "-o", "pid,args", "--ppid", str(script.pid)]
    listed = subprocess.run(command, text=True, capture_output=True).stdout
    asking, = (int(line.split()[0]) for line in listed.splitlines() if "node.annotate" in line)
    if how == "the keyboard":
        os.killpg(asking, signal.SIGINT)
    else:
        script.send_signal(how)
    assert script.wait(timeout=60) != 0 and not left(folder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(asking, signal.SIGKILL)  # the real one ends by itself when its server is gone
    assert not (folder / "runs" / "paper" / "reasons.done").exists()


def test_a_server_that_does_not_start_and_a_port_that_is_taken_are_said(folder):
    """Guards: an endless wait, and another run's server that is asked instead."""
    status, said = run(folder, FAIL="api_server")
    assert status == 1 and "no memory for the KV cache" in said and "did not start" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = run(folder, PORT=port)
    assert status == 1 and f"port {port} is taken" in said and "node.annotate" not in programs(folder)


def test_the_readme_tells_the_script_as_it_is():
    """Guards: a README whose steps, names, variables or sizes are another script's."""
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## On a node of 8 x H100") :].split("\n## ")[0]
    script = SCRIPT.read_text()
    names = re.findall(r"_NAME:-([\w./-]+)\}", script)
    called = re.findall(r"python -m (node\.\w+)|(?<!/)\b(\w+\.py)\b", script)
    assert len(names) == 4 and len(called) >= 8
    for told in {*names, *map("".join, called)}:
        assert told in section, f"README's node section does not tell of {told}"
    steps = re.findall(r"^# ---- (\d)\. ", script, re.MULTILINE)
    assert sorted(set(re.findall(r"^\| (\d) \|", section, re.MULTILINE))) == steps
    settable = set(re.findall(r"^(\w+)=\$\{\1:-", script, re.MULTILINE))
    assert {"RANKS", "TP", "BASE", "TRAIN_FLAGS"} <= settable
    assert set(re.findall(r"\b([A-Z][A-Z_]+)=", section)) <= settable
    for line in re.findall(r"^#     ((?:pip|python|hf) .*?)(?: {2,}#.*)?$", script, re.MULTILINE):
        assert line in section, f"README's node section does not have: {line}"
    for size in re.findall(r"\b([\d.]+ GB)\b", script.split("# ---- 2.")[1]):
        assert size in section or "196" in size, f"README's node section does not have {size}"
