"""Examples prepared once: pages aligned, diffed and tokenised by all cores, kept on disk, read by all ranks.

    nnetnav-live/train.jsonl.prepared/transitions-1f0c../      of sft.py world_model
        part-00000/tokens.npy      int32 (T,): the tokens of a part's examples, one behind the other
        part-00000/lengths.npy     int32 (N, 2): tokens of each prompt and of each completion
        part-00000/counts.json     what was read and dropped
        done.json                  the sum; it stands there when all parts do
        made_of.json               what the folder's name is a hash of

One process takes some 45 ms for a transition of 9,000 tokens (NOTES 2.8), half an hour for NNetNav's 43,000,
and each rank would do it again and hold the tokens as Python ints, 36 bytes each.

The parent reads the rows and hands them out in chunks. A worker turns a chunk into a part, in a folder that
is renamed when it is whole. So a killed run goes on with the next part. Ranks read the parts as memory maps:
the system keeps one copy of what they read, for all of them.

The folder's name is a hash of all that decides the tokens: the data, the tokenizer's files, the reasons, the
context, and our own sources. With anything else another folder is made. None is ever deleted here, because
another run may be reading it.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import numpy as np
import tokenizers
import transformers
from tqdm import tqdm

import data
import distributed
import finetune
import lm
import policy
import recipe
import world_model
from data import Action, Trajectory
from node import gptoss

ROWS = 100  # of the data make a part: some seconds of work, 7 MB of NNetNav's
MOST_WORKERS = 32  # each takes .4 GB, and one process reads the rows for all
MEETING = 60.0  # seconds after which waiting ranks meet
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("a11y.py", "data.py", "lm.py", "policy.py", "world_model.py", "node/gptoss.py",
           "node/prepare.py")  # they decide what the tokens are
WORDS = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # a tokenizer's files end like that

Rows = list[tuple[str, dict]]  # as data.read_jsonl gives them

# ---- what is prepared --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What decides the examples."""

    what: str
    """transitions: of the world model. demonstrations: of the policy."""
    file: str
    """Recorded trajectories."""
    base: str
    """Folder of the model, whose tokenizer it is."""
    context: int
    reasons: str = ""


def transitions(config: recipe.WorldModelSFT) -> "Prepared":
    """world_model.examples of all of config.transitions. All ranks call it. Raises ValueError."""
    return together(Job("transitions", config.transitions, config.base, config.context, config.reasons))


def demonstrations(config: recipe.PolicySFT) -> "Prepared":
    """policy.examples of all successes in config.trajectories. All ranks call it. Raises ValueError."""
    assert not config.demonstrations, "some of each task are drawn from the whole file, not from a part of it"
    return together(Job("demonstrations", config.trajectories, config.base, config.context))


def read(file: str, rows: Rows) -> tuple[list[Trajectory], Counter]:
    """The trajectories of some rows, and what was read: `trajectories`, and read_nnetnav's counts."""
    counts: Counter = Counter()
    nnetnav = "messages" in rows[0][1]
    found = list(data.read_nnetnav(file, counts, rows)) if nnetnav else data.read_trajectories(file, rows)
    counts["trajectories"] = len(found)
    return found, counts


def say(file: str, counts: dict) -> None:
    """What was read, and what of it was dropped, in data.read_trajectories' words."""
    rows = {name: n for name, n in counts.items() if name != "trajectories"}
    print(f"{file}: {counts.get('trajectories', 0)} trajectories" + (f"; rows: {rows}" if rows else ""))


def examples(job: Job, model, reasons, trajectories: list[Trajectory], counts: Counter) -> list[lm.Pair]:
    """The pairs of some trajectories, in their order. `model` has what these functions use of an lm.LM."""
    if job.what == "transitions":
        counts["trajectories"] += len(trajectories)
        return world_model.examples(model, trajectories, counts, reasons)
    shown = finetune.successes(trajectories)
    counts["demonstrations"] += len(shown)
    return policy.examples(model, shown, counts)


def writer(job: Job, folder: Path) -> Callable[[int, Rows], None]:
    """The function that makes part number n of its rows. It is made once in each worker."""
    words = lm.load_tokenizer(job.base)
    model = SimpleNamespace(tokenizer=words, context=job.context, template=gptoss.template(words))
    reasons = annotated(job.reasons)

    def write(number: int, rows: Rows) -> None:
        counts: Counter = Counter()
        trajectories, seen = read(job.file, rows)
        pairs = examples(job, model, reasons, trajectories, counts)
        part = folder / f"part-{number:05}"
        temporary = part.with_suffix(".tmp")
        sizes = np.array([(len(p), len(c)) for p, c in pairs], np.int32).reshape(-1, 2)
        tokens = chain.from_iterable(ids for pair in pairs for ids in pair)
        try:
            temporary.mkdir()
            np.save(temporary / "lengths.npy", sizes)
            np.save(temporary / "tokens.npy", np.fromiter(tokens, np.int32, sizes.sum()))
            (temporary / "counts.json").write_text(json.dumps({"read": seen, "counts": counts}))
            temporary.rename(part)
        except OSError as error:
            raise ValueError(f"{part} cannot be written ({error}); make room. What was prepared stays, and "
                             "the same command goes on") from error

    return write


# ---- the reasons -------------------------------------------------------------------------------------------


def transition_key(page: str, action: Action, delta: str) -> str:
    """The name of a transition in the file: a hash of what the model is asked about."""
    return hashlib.blake2b(f"{page}\0{action}\0{delta}".encode(), digest_size=16).hexdigest()


def read_reasons(file: str | Path) -> dict[str, str]:
    """{transition_key: reason}. Raises ValueError for a damaged line. A last one that a kill has cut off is
    node.annotate's to mend: the same command goes on there."""
    reasons = {}
    for place, row in data.read_jsonl(file):
        if not {"key", "reason"} <= row.keys():
            raise ValueError(f"{place}: not a line of an annotation")
        reasons[row["key"]] = row["reason"]
    return reasons


def annotated(file: str) -> Callable[[str, Action, str], str] | None:
    """The reasons of an annotation file (node/annotate.py), by transition; None without one."""
    if not file:
        return None
    written = read_reasons(file)
    return lambda page, action, delta: written.get(transition_key(page, action, delta), "")


# ---- all cores ---------------------------------------------------------------------------------------------


def chunks(file: str) -> Iterator[tuple[int, Rows]]:
    """(number, rows) of a file, some ROWS at a time. It is cut only where the task changes: NNetNav's rows of
    a task are one trajectory. (A row of tiny/explore.py's is a whole one.)"""
    number, rows, last = 0, [], None
    for place, row in data.read_jsonl(file):
        task = row.get("task_name", place)
        if len(rows) >= ROWS and task != last:
            yield number, rows
            number, rows = number + 1, []
        rows.append((place, row))
        last = task
    if rows:
        yield number, rows


def cores() -> int:
    """How many this process may use, MOST_WORKERS at most."""
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)  # macOS has none
    return min(MOST_WORKERS, len(allowed))


def over_cores(start: Callable[[], Callable], todo: Iterable[tuple[int, Rows]]) -> Iterator[tuple]:
    """(number, rows, work(number, rows)) of each chunk of `todo`, as they get ready; work = start().

    Each worker calls `start` once, and so does this process: its errors are told here. A chunk of slow pages
    keeps one worker, and the others go on. Raises what `work` raised, and ValueError where a worker was
    killed. A file of one chunk is worked on in this process.
    """
    work, todo = start(), iter(todo)
    first = list(islice(todo, 2))
    if len(first) < 2 or cores() == 1:
        yield from ((number, len(rows), work(number, rows)) for number, rows in chain(first, todo))
        return
    # spawn: a fork of a process with threads (torch's, CUDA's, tqdm's) may hang.
    pool = ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn"), _begin, (start,))
    running: dict = {}
    try:
        for number, rows in chain(first, todo):
            running[pool.submit(_do, number, rows)] = number, len(rows)
            if len(running) >= cores() + 4:  # or all rows would be in memory
                yield from _ready(running)
        while running:
            yield from _ready(running)
    except BrokenProcessPool as error:
        raise ValueError("a process that prepares examples was killed (is the memory full?). What it had "
                         "made stays, and the same command goes on; on fewer cores it takes less memory: "
                         "taskset -c 0-7 COMMAND") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _ready(running: dict) -> Iterator[tuple]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield *running.pop(future), future.result()


def _begin(start: Callable[[], Callable]) -> None:
    """The beginning of a worker."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    # A worker whose parent was killed would wait for its next chunk for ever (seen).
    threading.Thread(target=_follow, daemon=True).start()
    transformers.logging.set_verbosity_error()  # "longer than the maximum": the long ones are counted
    _work = start()


def _follow() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _do(number: int, rows: Rows):
    return _work(number, rows)


# ---- the folder --------------------------------------------------------------------------------------------


def make(job: Job) -> Path:
    """The folder of a job's examples, made or found. Says which. Raises ValueError and OSError."""
    lm.check_folder(job.base)
    made_of, rows = description(job)
    digest = hashlib.blake2b(json.dumps(made_of).encode(), digest_size=8).hexdigest()
    folder = Path(f"{job.file}.prepared") / f"{job.what}-{digest}"
    done = folder / "done.json"
    if not done.exists():
        with opened(folder, made_of):  # two makers would write the same parts
            if not done.exists():
                _fill(job, folder, rows)
    print(f"{folder}: {len(parts(folder))} parts of prepared examples, which every run with this data, "
          "tokenizer, context and code reads")
    if others := [other for other in folder.parent.glob(f"{job.what}-*") if other != folder]:
        gb = sum(file.stat().st_size for other in others for file in other.rglob("*.npy")) / 1e9
        print(f"beside it {len(others)} of other settings, data or code, {gb:.2g} GB; delete what no run "
              "reads")
    say(job.file, json.loads(done.read_text())["read"])
    return folder


def description(job: Job) -> tuple[dict, int]:
    """All that decides the tokens, with hashes of files; and the rows of the data (0: not known of a .gz)."""
    words = [file for file in sorted(Path(job.base).iterdir())
             if file.suffix in WORDS and not file.name.endswith(".index.json")]
    digest, rows = hashed(job.file)
    return {"what": job.what, "rows a part": ROWS, "context": job.context, "data": digest,
            "reasons": hashed(job.reasons)[0] if job.reasons else "",
            "tokenizer": {file.name: hashed(file)[0] for file in words},
            "sources": {name: hashed(ROOT / name)[0] for name in SOURCES},
            "versions": [platform.python_version(), transformers.__version__, tokenizers.__version__]}, rows


def hashed(file: str | Path) -> tuple[str, int]:
    """A hash of a file's bytes, and its lines (0 of a .gz). Size and date would be quicker by some seconds of
    3 GB, and would miss a file that was fetched again."""
    digest, lines, size = hashlib.blake2b(digest_size=16), 0, Path(file).stat().st_size
    with open(file, "rb") as stream, tqdm(total=size, desc=f"reading {file}", unit="B", unit_scale=True,
                                          delay=2, leave=False, dynamic_ncols=True) as bar:
        while block := stream.read(1 << 24):
            digest.update(block)
            lines += block.count(b"\n")
            bar.update(len(block))
    return digest.hexdigest(), 0 if str(file).endswith(".gz") else lines


def opened(folder: Path, made_of: dict) -> TextIO:
    """The folder's lock, when this process is the only one that makes the folder; it ends with its process.
    Raises ValueError where nothing can be written, or the file system has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "made_of.json").write_text(json.dumps(made_of, indent=1))
        lock = open(folder / "lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{lock.name}: another process prepares these examples; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        return lock
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error}). Prepared examples lie beside the data: make "
                         "room there, or link the data into a folder on a disk of this machine (ln -s), and "
                         "give the link") from error


def _fill(job: Job, folder: Path, rows: int) -> None:
    for killed in folder.glob("part-*.tmp"):
        shutil.rmtree(killed)
    there, many = set(), 0
    with tqdm(total=rows or None, desc=f"preparing {job.what}", unit="row", dynamic_ncols=True) as bar:

        def missing() -> Iterator[tuple[int, Rows]]:
            nonlocal many
            for number, chunk in chunks(job.file):
                many = number + 1
                if (folder / f"part-{number:05}").exists():
                    bar.update(len(chunk))
                    there.add(number)
                else:
                    yield number, chunk

        for _, done, _ in over_cores(partial(writer, job, folder), missing()):
            bar.update(done)
    if not many:
        raise ValueError(f"{job.file} holds no rows; fetch or record it again")
    if there:
        print(f"{folder}: {len(there)} of {many} parts were there already")
    sums = {"read": Counter(), "counts": Counter()}
    for part in parts(folder):
        for name, counts in json.loads((part / "counts.json").read_text()).items():
            sums[name].update(counts)
    temporary = folder / "done.tmp"
    temporary.write_text(json.dumps(sums, indent=1))
    temporary.rename(folder / "done.json")


def parts(folder: Path) -> list[Path]:
    return sorted(part for part in folder.glob("part-*") if not part.suffix)


# ---- what is learned from ----------------------------------------------------------------------------------


class Prepared(Sequence):
    """The examples of a folder: pairs[i] is (prompt_ids, completion_ids) as lists, read from disk when asked.

    `lengths` (N,): tokens of each, prompt and completion together. `counts`: what was dropped, and why.
    """

    def __init__(self, folder: Path):
        self.counts = Counter(json.loads((folder / "done.json").read_text())["counts"])
        self.files = [part / "tokens.npy" for part in parts(folder)]  # int32 (T,) each
        sizes = [np.load(part / "lengths.npy") for part in parts(folder)]  # (n, 2) each
        self.sizes = np.concatenate(sizes)  # (N, 2)
        self.lengths = self.sizes.sum(1)  # (N,)
        self.part = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes])  # (N,)
        self.start = np.concatenate([part.sum(1).cumsum() - part.sum(1) for part in sizes])  # (N,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> lm.Pair:
        # Opened for each: memory maps that stay would take an open file a part, of often 1,024 allowed.
        tokens = np.load(self.files[self.part[index]], mmap_mode="r")
        start, (prompt, _) = self.start[index], self.sizes[index]
        ids = tokens[start : start + self.lengths[index]].tolist()
        return ids[:prompt], ids[prompt:]


def together(job: Job) -> Prepared:
    """The examples of a job, on all ranks: one rank of each machine makes them while the others wait.

    Raises ValueError on all ranks alike. Once a minute the ranks meet, however long it takes: the group's
    time-out (distributed.init) is for one meeting.
    """
    if distributed.world_size() == 1:
        return Prepared(make(job))
    thread, error = ThreadPoolExecutor(1), None
    mine = thread.submit(make, job) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    while not distributed.all_true(mine is None or bool(wait([mine], MEETING).done)):
        pass
    if mine is not None and isinstance(error := mine.exception(), (ValueError, OSError)):
        mine = None
    if told := [text for text in distributed.gather(str(error) if error else "") if text]:
        raise ValueError(told[0])
    folders = sorted(set(filter(None, distributed.gather(mine and mine.result()))))
    if len(folders) > 1:  # each rank would learn other pairs, or find none
        raise ValueError(f"the machines made other examples: {', '.join(map(str, folders))}; made_of.json in "
                         "each says of what. Give all machines the same data, model, code and Python")
    return Prepared(folders[0])
