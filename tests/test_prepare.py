"""Claims about node/prepare.py: the same examples as in one process, made once by all cores, never half, and
made anew with anything that decides them. The workers are real processes."""
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import base_folder
from helpers.processes import TORCHRUN, environment, running, wait_for
from helpers.rows import rows_of, write

import a11y
import data
import finetune
import lm
import policy
import recipe
import sft
import world_model
from node import prepare

ROOT = Path(__file__).resolve().parents[1]
BASE = base_folder()


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "train.jsonl", rows_of())


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Five rows a chunk, two workers."""
    monkeypatch.setattr(prepare, "ROWS", 5)
    monkeypatch.setattr(prepare, "cores", lambda: 2)


@pytest.fixture
def alone(monkeypatch):
    """No pool: what is claimed is the same, in a tenth of the time."""
    monkeypatch.setattr(prepare, "cores", lambda: 1)


def job(file: Path, what: str = "transitions", **more) -> prepare.Job:
    return prepare.Job(**{"what": what, "file": str(file), "base": str(BASE), "context": 700} | more)


def in_one_process(job: prepare.Job) -> tuple[list, Counter]:
    """What world_model.examples and policy.examples give where they read and tokenise all themselves."""
    model, counts = lm.LM(None, lm.load_tokenizer(job.base), job.context), Counter()
    trajectories = data.read_trajectories(job.file)
    if job.what == "transitions":
        counts["trajectories"] = len(trajectories)
        return world_model.examples(model, trajectories, counts), counts
    shown = [t for t in trajectories if t.reward == 1]
    counts["demonstrations"] = len(shown)
    return policy.examples(model, shown, counts), counts


def dates(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*")}


# ---- the same examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what, name, context", [
    ("transitions", "train.jsonl", 110), ("demonstrations", "train.jsonl.gz", 100)])
def test_all_cores_make_the_examples_of_one_process_in_the_order_of_the_file(
        tmp_path, monkeypatch, capsys, what, name, context):
    """Guards: a trajectory cut in two between workers (its transition is lost, or its rows dropped as an
    inconsistent history); parts in the order in which they got ready; counts of the last part alone; rows
    that are dropped without a word."""
    asked = job(write(tmp_path / name, rows_of()), what, context=context)
    monkeypatch.setattr(prepare, "cores", lambda: 1 + (what == "transitions"))
    wanted, counts = in_one_process(asked)
    said = capsys.readouterr().out
    if what == "transitions":  # a worker imports its own
        monkeypatch.setattr(world_model, "examples", None)
    pairs = prepare.together(asked)
    assert list(pairs) == wanted and len(pairs) == len(wanted) > 10
    assert pairs.counts == counts and any("too long" in name for name in counts)
    assert pairs.lengths.tolist() == [len(p) + len(c) for p, c in wanted]
    assert pairs[-1] == wanted[-1] and type(pairs[0][0][0]) is int
    with pytest.raises(IndexError):
        pairs[len(pairs)]
    assert len(list(prepare.chunks(asked.file))) > 10
    assert "'dropped: prompt not in the template': 1" in said and said in capsys.readouterr().out


def test_the_examples_lie_on_disk_as_int32_and_not_in_memory(file, alone):
    """Guards: 36 bytes a token in each of eight ranks, 130 to 196 GB of a node; an open file of each."""
    pairs, before = prepare.together(job(file)), len(os.listdir("/dev/fd"))
    assert pairs.file.stat().st_size == 4 * pairs.lengths.sum() and list(pairs)
    held = [value for value in vars(pairs).values() if isinstance(value, (list, np.ndarray))]
    assert len(held) == 3 and max(map(len, held)) == len(pairs)  # nothing as long as the tokens
    assert len(os.listdir("/dev/fd")) == before


def test_the_commands_prepare_before_they_load_the_model(file, monkeypatch, alone):
    """Guards: 65 GB loaded, and workers beside it; a recipe of the node that still reads all by itself."""
    done, chosen = [], {}
    for what, load, config in (
            ("world_model", "load_world_model", recipe.WorldModelSFT(transitions=str(file), lora_rank=0)),
            ("policy", "load", recipe.PolicySFT(trajectories=str(file)))):
        config = dataclasses.replace(config, base=str(BASE), context=700, out=str(file.parent / what))
        monkeypatch.setattr(sys, "argv", ["sft.py", what])
        monkeypatch.setattr(recipe, "chosen", lambda _configs, config=config: config)
        monkeypatch.setattr(recipe, "command", lambda work, *_, **__: done.append(work()))
        monkeypatch.setattr(data, "read_trajectories", None)
        monkeypatch.setattr(sft, load, lambda config: sorted(file.parent.glob("*/*/counts*")))
        monkeypatch.setattr(finetune, "fit", lambda there, pairs, *_, what=what, **__: chosen.update(
            {what: (len(there), pairs)}) or {"loss": 0.5})
        monkeypatch.setattr(lm, "save", lambda _model, folder: Path(folder).mkdir())
        sft.main()
    (first, of_world), (then, of_policy) = chosen["world_model"], chosen["policy"]
    assert (first, then) == (1, 2) and type(of_world) is type(of_policy) is prepare.Prepared
    assert all(told.pop("seconds") >= 0 for told in done)
    assert done == [{"loss": 0.5, **of_world.counts}, {"loss": 0.5, **of_policy.counts}]


# ---- keyed, and reused -------------------------------------------------------------------------------------


CHANGES = ["data", "tokenizer", "reasons", "context", "what", "template", *prepare.SOURCES]


@pytest.mark.parametrize("change", CHANGES)
def test_anything_that_decides_the_tokens_makes_them_anew(file, tmp_path, monkeypatch, alone, change):
    """Guards: a world model that is fine-tuned on the tokens of another tokenizer, of older reasons or of
    yesterday's diff."""
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "code")
    for name in prepare.SOURCES:
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "code" / name)
    shutil.copytree(BASE, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    step, action, after, _ = next(data.transitions(data.read_trajectories(file)[0]))
    key = prepare.transition_key(step.page, action, a11y.diff(step.page, after))
    (tmp_path / "reasons.jsonl").write_text(json.dumps({"key": key, "reason": "So."}) + "\n")
    given = {"base": str(tmp_path / "base"), "reasons": str(tmp_path / "reasons.jsonl")}
    before = prepare.make(job(file, **given))
    assert len(prepare.Prepared(before)) > 0
    if change == "data":
        write(file, rows_of()[:-3])
    elif change == "context":
        given["context"] = 600
    elif change == "what":
        given["what"] = "demonstrations"
    else:
        changed = {"tokenizer": tmp_path / "base" / "tokenizer.json", "reasons": tmp_path / "reasons.jsonl",
                   "template": tmp_path / "base" / "chat_template.jinja"}.get(change, prepare.ROOT / change)
        changed.write_text(changed.read_text() + " \n")
    assert prepare.make(job(file, **given)) != before and before.exists()


# ---- killed, damaged, full ---------------------------------------------------------------------------------

# A run whose workers do at a row what the test tells them. Each of them imports this file, as spawn does.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = ["{root}", "{here}"]
from node import prepare

prepare.ROWS, read, here = 5, prepare.read, Path("{folder}")
prepare.cores = lambda: 2

def watched(file, rows):
    first = int(rows[0][0].rpartition(":")[2])
    with open(here / "read", "a") as log:
        print(first, os.getpid(), file=log)
    {does}
    return read(file, rows)

prepare.read = watched
if __name__ == "__main__":
    try:
        print(len(prepare.together(prepare.Job("transitions", sys.argv[1], "{base}", 700))))
    except ValueError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def start(file, tmp_path):
    """Starts such a run; what is left of it at the end is killed."""
    runs = []

    def begin(does: str = "pass") -> subprocess.Popen:
        made = SCRIPT.format(root=ROOT, here=ROOT / "tests", folder=tmp_path, base=BASE, does=does)
        (tmp_path / "run.py").write_text(made)
        runs.append(subprocess.Popen([sys.executable, str(tmp_path / "run.py"), str(file)], env=environment(),
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     start_new_session=True))
        return runs[-1]

    yield begin
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def read_by(folder: Path) -> dict[int, list[int]]:
    """first row of a chunk: the processes that read it."""
    found: dict[int, list[int]] = {}
    for line in (folder / "read").read_text().splitlines():
        found.setdefault(int(line.split()[0]), []).append(int(line.split()[1]))
    return found


def test_a_killed_run_leaves_no_process_and_nothing_that_is_taken_for_whole(
        start, file, tmp_path, monkeypatch):
    """Guards: workers that wait for ever for a parent that was killed, with all their memory; half a folder
    that is learned from."""
    run = start("time.sleep(1000 * (first > 40))")
    begun = lambda: read_by(tmp_path) if (tmp_path / "read").exists() else {}
    wait_for(lambda: sum(first > 40 for first in begun()) == 2, 200)
    workers = {pid for pids in read_by(tmp_path).values() for pid in pids} - {run.pid}
    run.kill()
    run.wait()
    assert len(workers) == 2
    wait_for(lambda: not any(map(running, workers)), 20)
    monkeypatch.setattr(prepare, "cores", lambda: 1)
    assert list(prepare.together(job(file))) == in_one_process(job(file))[0]


def test_a_worker_that_is_killed_ends_the_run_with_a_sentence(start, tmp_path):
    """Guards: a run that hangs, or ends in a traceback, when the kernel kills a worker for its memory."""
    run = start("first > 60 and os.kill(os.getpid(), signal.SIGKILL)")
    said = run.communicate(timeout=200)[1]
    assert run.returncode == 1 and "was killed (is the memory full?)" in said and "Traceback" not in said
    assert not list(tmp_path.glob("*.prepared/*"))


def test_a_damaged_row_names_its_line(file, tmp_path):
    """Guards: an error that a worker keeps for itself; the line of the chunk in place of the file's."""
    rows = rows_of()
    del rows[60]["messages"][1]
    write(file, rows)
    with pytest.raises(ValueError, match=f"{file}:61: NNetNav's rows have"):
        prepare.together(job(file))
    assert not list(tmp_path.glob("*.prepared/*"))


def test_a_line_that_is_no_json_is_named(file, alone):
    """Guards: a download that was cut off, learned from as far as it goes."""
    file.write_text(file.read_text()[:-20])
    with pytest.raises(ValueError, match=rf"{file}:\d+: cannot be read as JSON"):
        prepare.together(job(file))
    write(file, [])
    with pytest.raises(ValueError, match="holds no rows"):
        prepare.together(job(file))


# ---- ranks -------------------------------------------------------------------------------------------------

RANKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, "{root}")
import distributed
from node import prepare

prepare.ROWS, prepare.cores, make, told = 5, lambda: 1, prepare.make, dict()

def watched(job):
    (Path("{folder}") / f"makes-{{distributed.rank()}}").touch()
    return make(job)

prepare.make = watched
distributed.init(timeout_minutes=3)
for name in ("bad", "good"):
    try:
        pairs = prepare.together(prepare.Job("transitions", f"{folder}/{{name}}.jsonl", "{base}", 700))
        told[name] = [len(pairs), pairs[5], str(pairs.file), pairs.counts]
    except ValueError as error:
        told[name] = str(error)
(Path("{folder}") / f"rank-{{distributed.rank()}}.json").write_text(json.dumps(told))
"""


def test_two_ranks_share_what_one_of_them_makes_and_its_error(tmp_path):
    """Guards: each rank making its own; a rank that waits for ever for another which has met a damaged
    row."""
    good = write(tmp_path / "good.jsonl", rows_of())
    (tmp_path / "bad.jsonl").write_text(good.read_text() + "{")
    (tmp_path / "run.py").write_text(RANKS.format(root=ROOT, folder=tmp_path, base=BASE))
    done = subprocess.run([*TORCHRUN, str(tmp_path / "run.py")], env=environment(), capture_output=True,
                          text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"rank-{k}.json").read_text()) for k in range(2))
    assert one == two and f"{tmp_path}/bad.jsonl:102: cannot be read as JSON" in one["bad"]
    wanted, counts = in_one_process(job(good))
    assert one["good"][:2] == [len(wanted), list(wanted[5])] and one["good"][3] == counts
    assert [path.name for path in tmp_path.glob("makes-*")] == ["makes-0"]


