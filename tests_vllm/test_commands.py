"""node/commands.sh, from its first line to its last: an `hf` that hands out made folders in the published
layouts, the annotator's server started and stopped, two ranks under torchrun, vLLM's CPU build.

Only the script's variables are set. Three things are otherwise than on a node. The tiny gpt-oss is bf16, as
vLLM's CPU build has no MXFP4 kernels (tests/test_gptoss.py has MXFP4). The annotator is the agent: vLLM talks
to a gpt-oss in OpenAI's own tokens, which a tiny one has not. And its environment keeps vLLM quiet on a CPU,
as node/server.py does for the servers that it starts.

And the list for one GPU of docs/gpu.md, line by line as it is written (pytest -k evening). Its models are a
tiny Qwen3 in Qwen3's turns.
"""
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GptOssConfig, GptOssForCausalLM

import a11y
import data
import distributed
import finetune
import judge
import lm
import policy
import world_model
from data import Action
from node import made_up, prepare, rehearse, server
from tests.helpers.processes import naming

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "node" / "commands.sh"
NAMES = {"openai/gpt-oss-120b": "model", "stanfordnlp/llama8b-nnetnav-live": "model",
         "meta-llama/Llama-3.1-8B-Instruct": "model", "stanfordnlp/nnetnav-live": "dataset"}
NOT_NEEDED = ("original/", "metal/", "test.jsonl")

# The real command line of huggingface_hub, with a hub that is a folder. What no recipe needs is refused, and
# so is a file, a repository or a kind of repository that the hub does not have.
HF = """#!{python}
import json, shutil, sys
from pathlib import Path
from huggingface_hub.cli import download, hf
from huggingface_hub.utils import filter_repo_objects

HUB, NAMES, NOT_NEEDED = Path({hub!r}), {names!r}, {not_needed!r}

def hand_out(repo_id, repo_type, local_dir, allow_patterns=None, ignore_patterns=None, **_):
    if NAMES.get(repo_id) != repo_type:
        sys.exit(f"404: there is no {{repo_type}} {{repo_id}}")
    files = [str(file.relative_to(HUB / repo_id)) for file in (HUB / repo_id).rglob("*") if file.is_file()]
    files = list(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    if not files or (more := [name for name in files if name.startswith(NOT_NEEDED)]):
        sys.exit(f"{{repo_id}}: not to be fetched: {{more if files else allow_patterns}}")
    new = [name for name in files if not (Path(local_dir) / name).exists()]
    for name in new:
        (Path(local_dir) / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HUB / repo_id / name, Path(local_dir) / name)
    with open(HUB / "calls.jsonl", "a") as log:
        log.write(json.dumps([repo_id, sorted(new)]) + "\\n")
    return str(local_dir)

download.snapshot_download = hand_out
download.hf_hub_download = lambda filename, **how: hand_out(allow_patterns=[filename], **how)
sys.argv[0] = "hf"
hf.main()
"""


# ---- what is published, made small -------------------------------------------------------------------------


def write_rows(folder: Path, count: int) -> None:
    """train.jsonl as NNetNav publishes it (NOTES 6.1): `count` recorded successes of MiniWoB++ on real pages,
    a row a step, closed by a stop; and test.jsonl, which nobody needs."""
    recorded = [t for t in data.read_trajectories(ROOT / "tiny" / "trajectories.jsonl.gz")
                if t.reward == 1 and t.final_page and 2 <= len(t.steps) <= 4
                and max(len(step.page) for step in t.steps) < 500 and not any(step.error for step in t.steps)]
    rows = []
    for t in random.Random(0).sample(recorded, count):
        last = t.steps[-1]
        steps = list(t.steps)
        if last.action.name != "stop":
            steps.append(data.Step(last.url, t.final_page, "It is done.", Action("stop"), last.past))
        name = f"{t.task}_{t.seed}"
        for step in steps:
            chat = policy.messages(t.goal, data.root_url(step.page), step.page, step.previous)
            said, asked = data.completion(step.thought, step.action), chat[1]["content"]
            chat.append({"role": "assistant", "content": said})
            rows.append({"dataset": "openended_live", "id": name, "task_name": name,
                         "n_tokens": len(asked) // 4, "messages": chat, "prompt": asked, "output": said})
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")


def write_gptoss(folder: Path) -> None:
    """An untrained gpt-oss in two files with an index, and its weights twice more in original/ and metal/."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "base")
    words = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.eos_token = "<|return|>"
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=32, max_position_embeddings=8192, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id)
    net = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16)
    net.save_pretrained(folder, max_shard_size="800KB")
    tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    for other in ("original", "metal"):
        (folder / other).mkdir()
        save_file({"another.layout": torch.zeros(3)}, folder / other / "model.safetensors")


def write_llama(folder: Path) -> lm.LM:
    """tiny/base for longer prompts, as Llama's folder is: with its weights once more in original/."""
    shutil.copytree(ROOT / "tiny" / "base", folder)
    limits = {"config.json": "max_position_embeddings", "tokenizer_config.json": "model_max_length"}
    for name, key in limits.items():
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {key: 8192}))
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"the same again")
    return dataclasses.replace(lm.load(folder), compute=torch.float32)


def answers(model: lm.LM, recorded: list[data.Trajectory]) -> list[lm.Pair]:
    """How the recorded successes are acted, and judged."""
    pairs = policy.examples(model, recorded, Counter())
    for t in recorded:
        for upto, word in ((len(t.steps), "YES"), (len(t.steps) - 1, "NO")):
            before, page = t.steps[upto - 1].page, (t.steps[upto:] or t.steps[-1:])[0].page
            asked = judge.messages(t.goal, t.steps[upto - 1].past, before, page)
            said = model.template.completion_ids(f"So.\nCOMPLETED: {word}")
            pairs.append((model.template.prompt_ids(asked), said))
    return pairs


def write_agent(folder: Path, model: lm.LM, rows: Path) -> None:
    """`model`, taught the rows and to judge them, in the layout of NOTES 6.8: .bin files without an index."""
    pairs = answers(model, data.read_trajectories(rows))
    finetune.fit(model, pairs, finetune.FineTune(epochs=8, lr=1e-3, tokens=1024), "the published agent")
    lm.save(model, folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for k in range(3):
        held = {key: value for n, (key, value) in enumerate(sorted(state.items())) if n % 3 == k}
        torch.save(held, folder / f"pytorch_model-{k + 1:05}-of-00003.bin")


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A folder with the four repositories, and bin/hf."""
    hub = tmp_path_factory.mktemp("hub")
    repos = {name.split("/")[-1]: hub / name for name in NAMES}
    write_rows(repos["nnetnav-live"], 12)
    write_gptoss(repos["gpt-oss-120b"])
    llama = write_llama(repos["Llama-3.1-8B-Instruct"])
    write_agent(repos["llama8b-nnetnav-live"], llama, repos["nnetnav-live"] / "train.jsonl")
    (hub / "bin").mkdir()
    made = HF.format(python=sys.executable, hub=str(hub), names=NAMES, not_needed=NOT_NEEDED)
    (hub / "bin" / "hf").write_text(made)
    (hub / "bin" / "hf").chmod(0o755)
    return hub


# ---- the script --------------------------------------------------------------------------------------------

LENGTHS = "--context 2048 --world-model-context 2048 --judge-context 2048 "
SMALL = (
    "--updates 2 --checkpoint-every 1 --compute float32 --lr 1e-4 "
    "--policy-engine.kv-cache-gb 0.1 --policy-engine.eager "
    "--world-model-server.kv-cache-gb 0.1 --world-model-server.eager --world-model-server.dtype float32 "
    "--judge-server.kv-cache-gb 0.1 --judge-server.eager --judge-server.dtype float32 ")
TRAIN = LENGTHS + SMALL + (
    "--evaluate-every 0 --tokens 4096 --dreaming.temperature 1.2 --dreaming.max-new-tokens 64 "
    "--dreaming.world-model-tokens 64 --dreaming.judge-tokens 32")


def variables(folder: Path) -> dict[str, str]:
    """What is set of node/commands.sh, in `folder`."""
    return {
        "RANKS": "2", "TP": "1", "BASE": f"{folder}/gptoss", "AGENT": f"{folder}/agent",
        "LLAMA": f"{folder}/llama", "ROWS": f"{folder}/rows", "ANNOTATOR": f"{folder}/agent",
        "PORT": str(server.free_port()), "RUN": f"{folder}/run", "SEEDS": "1000000:1",
        "PLAN_FLAGS": "--ranks 8",
        "SERVE_FLAGS": "--enforce-eager --dtype float32 --max-model-len 8192 --gpu-memory-utilization 0.02 "
                       "--kv-cache-memory-bytes 100000000",
        "WORLD_MODEL_FLAGS": "--context 2048 --sft.tokens 2048 --sft.microbatches 4",
        "POLICY_FLAGS": "--context 2048 --sft.tokens 2048 --sft.microbatches 4",
        "TRAIN_FLAGS": TRAIN,
        "EVALUATE_FLAGS": "--engine.kv-cache-gb 0.1 --engine.eager --horizon 2 --tasks click-button-sequence"}


def environment(hub: Path, folder: Path, **more: str) -> dict[str, str]:
    programs = f"{hub / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return os.environ | server.environment() | threads | {"PATH": programs} | variables(folder) | more


def run(hub: Path, folder: Path, script: Path = SCRIPT, **more: str) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "a") as log:
        return subprocess.run(["bash", script], cwd=ROOT, env=environment(hub, folder, **more), stdout=log,
                              stderr=log, timeout=1500)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def dates(folder: Path) -> dict[Path, int]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "log")
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def node(hub, tmp_path_factory) -> Path:
    """The folder in which the script has run, with the published agent."""
    folder = tmp_path_factory.mktemp("node")
    (hub / "calls.jsonl").unlink(missing_ok=True)
    # node.plan is asked about these models: for the published ones SMALL's caches would be too small.
    for name, part in zip(NAMES, ("gptoss", "agent", "llama")):
        (folder / part / ".cache/huggingface").mkdir(parents=True)  # it came from the hub: fetch goes on
        shutil.copy(hub / name / "config.json", folder / part)
    done = run(hub, folder)
    assert done.returncode == 0, (folder / "log").read_text()[-6000:]
    return folder


def test_every_line_made_what_the_next_one_needs(hub, node):
    """Guards: any command of the recipe that does not run as it is written, or whose result the next command
    does not find, cannot load or does not use; and a download of more than is needed."""
    fetched = dict(lines(hub / "calls.jsonl"))
    assert fetched.keys() == NAMES.keys() - {"meta-llama/Llama-3.1-8B-Instruct"}
    assert fetched["stanfordnlp/nnetnav-live"] == ["train.jsonl"]
    assert len(list((node / "agent").glob("model-0000?-of-00003.safetensors"))) == 3
    assert "It fits." in (node / "run" / "plan.txt").read_text()
    # A reason for each recorded transition, under its name.
    wanted = {prepare.transition_key(step.page, action, a11y.diff(step.page, after))
              for t in data.read_trajectories(node / "rows" / "train.jsonl")
              for step, action, after, _ in data.transitions(t)}
    reasons = prepare.read_reasons(node / "run" / "reasons.jsonl")
    assert len(wanted) > 20 and reasons.keys() <= wanted and len(reasons) > 0.8 * len(wanted)
    # The world model learned from them, and is a gpt-oss that loads.
    learned = json.loads((node / "run" / "world_model" / "training.json").read_text())
    assert learned["transitions"] - learned.get("dropped: no reasoning", 0) >= len(reasons)
    folders = node / "gptoss", node / "run" / "world_model"
    base, merged = map(distributed.ShardFiles, folders)
    assert base.entries.keys() == merged.entries.keys() and learned["tensors"] == 8
    changed = [name for name in base.entries
               if not torch.equal(base.read(name, slice(None)), merged.read(name, slice(None)))]
    assert changed and all(re.search(r"self_attn\.[qkvo]_proj\.weight", name) for name in changed)
    assert "nothing stands in the way" in (node / "log").read_text()  # --preflight
    check_the_dreams(node / "run" / "dream", node / "agent")
    assert any(row.get("judged") for row in lines(node / "run" / "dream.run" / "metrics.jsonl"))
    before, after = (json.loads((node / "run" / f"dream{end}.json").read_text()) for end in (".before", ""))
    assert before["n"] == after["n"] == 1 and before["trajectories"][0][1] == 1000000
    assert before["lengths"] == after["lengths"] and before["lengths"]["max_new_tokens"] == 64
    assert "minus dream.before" in (node / "log").read_text()


def check_the_dreams(out: Path, start: Path) -> None:
    """Two updates were dreamed and learned from; the agent loads, and is another one than at the start."""
    metrics = lines(out.with_suffix(".run") / "metrics.jsonl")
    assert [row["update"] for row in metrics] == [0, 1, 2]
    learned = [row for row in metrics if row.get("kept")]
    assert learned and all(row["grad_norm"] > 0 and row["sampler_gap"] < 1e-3 for row in learned), metrics
    numbers = [value for row in metrics for value in row.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers)), metrics
    was, now = (lm.load(folder).model.state_dict() for folder in (start, out))
    assert was.keys() == now.keys() and any(not torch.equal(was[name], now[name]) for name in was)


def test_nothing_is_left_when_the_script_has_ended(node):
    """Guards: the annotator's server, or its engine, which would hold every GPU (and its port) when the next
    command starts."""
    assert not naming(node, 20)
    assert "shutdown complete" in (node / "run" / "annotator.log").read_text(), "killed, and not asked to end"


def test_the_script_again_repeats_nothing(hub, node):
    """Guards: two hours of annotation, or 65 GB fetched, once more after a reboot."""
    before = dates(node)
    (hub / "calls.jsonl").unlink()
    assert run(hub, node).returncode == 0, (node / "log").read_text()[-3000:]
    assert not (hub / "calls.jsonl").exists()  # nothing is asked of the hub
    after = dates(node)
    index = node / "agent" / "model.safetensors.index.json"  # convert writes it again
    looks = {node / "run" / "plan.txt", node / "run" / "preflight.txt"}  # of the flags of this time
    assert {file for file in after if after[file] != before.get(file)} <= {index} | looks


def test_an_agent_of_our_own_takes_the_place_of_the_published_one(hub, node):
    """Guards: CLONE=yes, which takes Llama's folder without original/, clones the rows, and dreams on from
    that."""
    done = run(hub, node, CLONE="yes", OUT=f"{node}/run/cloned", AGENT=f"{node}/never")
    assert done.returncode == 0, (node / "log").read_text()[-6000:]
    assert not (node / "never").exists() and not (node / "llama" / "original").exists()
    assert json.loads((node / "run" / "sft" / "training.json").read_text())["demonstrations"] == 12
    check_the_dreams(node / "run" / "cloned", node / "run" / "sft")
    assert not naming(node, 20)


# ---- one GPU, an evening -----------------------------------------------------------------------------------

PAGE = "click-button-sequence"
EVALUATE = f"--tasks {PAGE} --seeds 1000000:2 --max-new-tokens 128 --engine.kv-cache-gb 0.1 --engine.eager"
# What each line gets here besides. "./": the names of the recipe's own models ask for a GPU.
MORE = {"-m tiny.explore": f"--tasks {PAGE} --per-task 12 --successes 4 --most 12", "evaluate.py": EVALUATE,
        "sft.py world_model": "--base ./Qwen/Qwen3-1.7B", "sft.py policy": "--base ./Qwen/Qwen3-0.6B",
        # Warm, so that dreams of an agent that has learned its one page differ, and some end.
        "train.py": SMALL + "--policy ./runs/single/sft --dreaming.tasks 2 --dreaming.group 8 "
                    "--dreaming.temperature 1.2 --dreaming.max-new-tokens 128 "
                    "--dreaming.world-model-tokens 96 --dreaming.judge-tokens 48",
        "-m node.compare": "--card RTX4090-24GB"}


def listed() -> list[list[str]]:
    """The list's lines of Python behind plan and rehearsal, each with MORE, to be typed in any folder."""
    section = (ROOT / "docs" / "gpu.md").read_text().split("## One GPU, one evening")[1].split("\n## ")[0]
    found = []
    for line in re.findall(r"(?m)^    python ([^#\n]+)", section):
        if not line.startswith(("-m node.plan", "-m node.rehearse")):
            more = next(words for start, words in MORE.items() if line.startswith(start))
            words = shlex.split(line) + (shlex.split(more) if "--table" not in line else [])
            found.append([sys.executable, *(str(ROOT / word) if word.endswith(".py") else word
                                            for word in words)])
    return found


def write_qwen3(hub: Path) -> None:
    """Qwen3-0.6B and Qwen3-1.7B: one tiny Qwen3, that has seen how an agent, a world model and a judge answer
    on PAGE. It first learns the answers behind the last tokens of their prompts, where page and action stand:
    that takes a tenth of the time."""
    words = made_up.tokenizer("qwen3", 1024)
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**rehearse.QWEN3 | ends)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = lm.LM(net, words, 4096, torch.float32)
    recorded = [t for t in data.read_trajectories(ROOT / "tiny" / "trajectories.jsonl.gz") if t.task == PAGE]
    pairs = answers(model, [t for t in recorded if t.reward == 1][:8])
    pairs += world_model.examples(model, recorded[:8], Counter())
    short = [(prompt[-160:], said) for prompt, said in pairs]
    finetune.fit(model, short, finetune.FineTune(epochs=40, lr=3e-3, tokens=1024), "the published Qwen3")
    finetune.fit(model, pairs, finetune.FineTune(epochs=4, lr=1e-3, tokens=4096), "the same, whole prompts")
    for name in ("Qwen3-0.6B", "Qwen3-1.7B"):
        lm.save(model, hub / name)


def in_folder(folder: Path) -> list[int]:
    """Processes that work in the folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended
            found += [int(link.parent.name)] * (Path(os.readlink(link)) == folder)
    return found


def kill_in_its_second_update(words: list[str], folder: Path, environment: dict, log) -> None:
    """By SIGKILL, as soon as its first checkpoint stands. Checkpoints are written in the background: the
    second update may be in the log then, and has to be dreamed and learned again."""
    training = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log,
                                start_new_session=True)
    files, limit = folder / "runs" / "single" / "dream.run", time.monotonic() + 900
    while not (files / "checkpoint" / "step-1").exists():
        assert training.poll() is None and time.monotonic() < limit, (folder / "log").read_text()[-6000:]
        time.sleep(0.02)
    os.killpg(training.pid, signal.SIGKILL)
    training.wait()
    assert not (folder / "runs" / "single" / "dream").exists(), "it was killed too late"
    while in_folder(folder) and time.monotonic() < limit:
        time.sleep(0.2)
    assert not in_folder(folder), "a server outlives its run"


@pytest.fixture(scope="module")
def evening(tmp_path_factory) -> Path:
    """The folder in which the list has run. Its training was killed once, and was typed again."""
    folder = tmp_path_factory.mktemp("evening").resolve()
    write_qwen3(folder / "Qwen")
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | server.environment() | threads | {"PYTHONPATH": str(ROOT)}
    with open(folder / "log", "a") as log:
        for words in listed():
            if words[1].endswith("train.py"):
                kill_in_its_second_update(words, folder, environment, log)
            done = subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=log, timeout=900)
            assert done.returncode == 0, f"{words}\n{(folder / 'log').read_text()[-6000:]}"
    return folder


def test_an_evening_on_one_gpu_runs_as_it_is_written_and_goes_on_when_it_is_killed(evening):
    """Guards: a line of the list for one GPU that does not run, or whose result the next one does not find;
    Qwen3's turns in an engine, in servers, in LoRA's merge; dreams that nobody answers or judges, and a batch
    that is learned from twice."""
    run = evening / "runs" / "single"
    world, agent = (json.loads((run / name / "training.json").read_text()) for name in ("world_model", "sft"))
    assert world["tensors"] == 8 and world["transitions"] >= 12 and agent["demonstrations"] >= 3
    check_the_dreams(run / "dream", run / "sft")
    assert "resuming after update 1 of 2" in (evening / "log").read_text()
    metrics, dreams = (lines(run / "dream.run" / f"{name}.jsonl") for name in ("metrics", "dreams"))
    assert any(row.get("judged") for row in metrics)
    assert any("delta" in step for row in dreams for step in row["steps"])
    rows = [(row["update"], row["group"], row["row"]) for row in dreams]
    assert len(set(rows)) == len(rows) and {update for update, _, _ in rows} == {0, 1}
    assert not in_folder(evening)


def test_the_evening_is_measured_before_and_after_and_sent_in_one_file(evening):
    """Guards: an evaluation with other lengths than the run's; a figure of the run that its file to send
    lacks, or that stands beside no plan; folders in that file."""
    run = evening / "runs" / "single"
    results = [json.loads((run / f"{name}.json").read_text()) for name in ("untrained", "sft", "dream")]
    assert [result["n"] for result in results] == [2, 2, 2]
    assert all(result["lengths"] == results[0]["lengths"] for result in results)
    assert "dream minus untrained" in (evening / "log").read_text()
    text = (run / "dream.run" / "send.json").read_text()
    told = json.loads(text)
    assert all(stage["measured"] > 0 and stage["planned"] > 0 for stage in told["stages"]), told["stages"]
    assert [result["name"] for result in told["results"]] == ["untrained", "before", "after"]
    assert told["updates"] == 2 and [update for update, _ in told["looks"]] == [0, 2]
    assert str(evening) not in text and "runs/" not in text
