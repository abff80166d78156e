"""Examples prepared once: pages aligned, diffed and tokenised by all cores, kept on disk, read by all ranks.

    nnetnav-live/train.jsonl.prepared/transitions-1f0c../      of sft.py world_model
        tokens.int32      the examples' tokens, one behind the other
        sizes.npy         int32 (N, 2): tokens of each prompt and of each completion
        counts.json       what was read and dropped
        made_of.json      what the folder's name is a hash of

One process takes some 45 ms for a transition of 9,000 tokens (NOTES 2.8), half an hour for NNetNav's 43,000,
and each rank would do it again and hold the tokens as Python ints, 36 bytes each.

The parent reads the rows, hands them out in chunks, and writes what comes back in the order of the file. The
folder is renamed when it is whole: a killed run begins anew, which is minutes on the cores of a node.

The folder's name is a hash of all that decides the tokens: the data, the tokenizer's files, the reasons, the
context, and our own sources. With anything else another folder is made. None is ever deleted here, because
another run may be reading it.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import signal
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tokenizers
import transformers
from tqdm import tqdm

import data
import distributed
import finetune
import gpt_oss
import lm
import policy
import recipe
import world_model
from data import Action, Trajectory

ROWS = 100  # of the data are handed out together: some seconds of work, 7 MB of NNetNav's
MOST_WORKERS = 32  # each takes .4 GB, and one process reads the rows for all
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("a11y.py", "data.py", "lm.py", "finetune.py", "policy.py", "world_model.py", "gpt_oss.py",
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


def tokeniser(job: Job) -> Callable[[Rows], tuple]:
    """The function that makes the examples of some rows: (their tokens, sizes (n, 2), what was read, counts).
    It is made once in each worker."""
    words = lm.load_tokenizer(job.base)
    model = SimpleNamespace(tokenizer=words, context=job.context, template=gpt_oss.template(words))
    reasons = annotated(job.reasons)

    def tokenise(rows: Rows) -> tuple[np.ndarray, np.ndarray, Counter, Counter]:
        counts: Counter = Counter()
        trajectories, seen = read(job.file, rows)
        pairs = examples(job, model, reasons, trajectories, counts)
        sizes = np.array([(len(p), len(c)) for p, c in pairs], np.int32).reshape(-1, 2)
        tokens = chain.from_iterable(ids for pair in pairs for ids in pair)
        return np.fromiter(tokens, np.int32, sizes.sum()), sizes, seen, counts

    return tokenise


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


def chunks(file: str) -> Iterator[Rows]:
    """The rows of a file, some ROWS at a time. It is cut only where the task changes: NNetNav's rows of a
    task are one trajectory. (A row of worlds/explore.py's is a whole one.)"""
    rows, last = [], None
    for place, row in data.read_jsonl(file):
        task = row.get("task_name", place)
        if len(rows) >= ROWS and task != last:
            yield rows
            rows = []
        rows.append((place, row))
        last = task
    if rows:
        yield rows


def cores() -> int:
    """How many this process may use, MOST_WORKERS at most."""
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)  # macOS has none
    return min(MOST_WORKERS, len(allowed))


def over_cores(start: Callable[[], Callable], todo: Iterable[Rows]) -> Iterator[tuple]:
    """(number of rows, work(rows)) of each chunk of `todo`, in order; work = start().

    Each worker calls `start` once, and so does this process: its errors are told here. Some chunks are worked
    on ahead, so that one of slow pages does not keep the other workers. Raises what `work` raised, and
    ValueError where a worker was killed. A file of one chunk is worked on in this process.
    """
    work, todo = start(), iter(todo)
    first = list(islice(todo, 2))
    if len(first) < 2 or cores() == 1:
        yield from ((len(rows), work(rows)) for rows in chain(first, todo))
        return
    # spawn: a fork of a process with threads (torch's, CUDA's, tqdm's) may hang.
    pool = ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn"), _begin, (start,))
    ahead: deque = deque()
    try:
        for rows in chain(first, todo):
            ahead.append((len(rows), pool.submit(_do, rows)))
            if len(ahead) > 3 * cores():  # or all rows would be in memory
                count, done = ahead.popleft()
                yield count, done.result()
        yield from ((count, done.result()) for count, done in ahead)
    except BrokenProcessPool as error:
        raise ValueError("a process that prepares examples was killed (is the memory full?). On fewer cores "
                         "it takes less memory: taskset -c 0-7 COMMAND") from error
    finally:
        pool.shutdown(cancel_futures=True)


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


def _do(rows: Rows):
    return _work(rows)


# ---- the folder --------------------------------------------------------------------------------------------


def make(job: Job) -> Path:
    """The folder of a job's examples, made or found. Says which. Raises ValueError and OSError."""
    lm.check_folder(job.base)
    made_of, rows = description(job)
    digest = hashlib.blake2b(json.dumps(made_of).encode(), digest_size=8).hexdigest()
    folder = Path(f"{job.file}.prepared") / f"{job.what}-{digest}"
    if not folder.exists():
        try:
            folder.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as beside:
                made = Path(beside) / "made"
                made.mkdir()
                (made / "made_of.json").write_text(json.dumps(made_of, indent=1))
                _fill(job, made, rows)
                if not folder.exists():  # or another process was faster
                    made.rename(folder)
        except OSError as error:
            raise ValueError(f"{folder} cannot be made ({error}). Prepared examples lie beside the data: "
                             "make room there, or link the data into a folder on another disk (ln -s), and "
                             "give the link") from error
    print(f"{folder}: prepared examples, which every run with this data, tokenizer, context and code reads")
    if others := [other for other in folder.parent.glob(f"{job.what}-*") if other != folder]:
        gb = sum(file.stat().st_size for other in others for file in other.rglob("*.int32")) / 1e9
        print(f"beside it {len(others)} of other settings, data or code, {gb:.2g} GB; delete what no run "
              "reads")
    say(job.file, json.loads((folder / "counts.json").read_text())["read"])
    return folder


def description(job: Job) -> tuple[dict, int]:
    """All that decides the tokens, with hashes of files; and the rows of the data (0: not known of a .gz)."""
    words = [file for file in sorted(Path(job.base).iterdir())
             if file.suffix in WORDS and not file.name.endswith(".index.json")]
    digest, rows = hashed(job.file)
    return {"what": job.what, "context": job.context, "data": digest,
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


def _fill(job: Job, folder: Path, rows: int) -> None:
    sizes, seen, counts = [], Counter(), Counter()
    with (open(folder / "tokens.int32", "wb") as file,
          tqdm(total=rows or None, desc=f"preparing {job.what}", unit="row", dynamic_ncols=True) as bar):
        for done, (tokens, *of_chunk) in over_cores(partial(tokeniser, job), chunks(job.file)):
            file.write(tokens.tobytes())
            sizes.append(of_chunk[0])
            seen.update(of_chunk[1])
            counts.update(of_chunk[2])
            bar.update(done)
    if not sizes:
        raise ValueError(f"{job.file} holds no rows; fetch or record it again")
    np.save(folder / "sizes.npy", np.concatenate(sizes))
    (folder / "counts.json").write_text(json.dumps({"read": seen, "counts": counts}, indent=1))


# ---- what is learned from ----------------------------------------------------------------------------------


class Prepared(Sequence):
    """The examples of a folder: pairs[i] is (prompt_ids, completion_ids) as lists, read from disk when asked.

    `lengths` (N,): tokens of each, prompt and completion together. `counts`: what was dropped, and why.
    """

    def __init__(self, folder: Path):
        self.counts = Counter(json.loads((folder / "counts.json").read_text())["counts"])
        self.file = folder / "tokens.int32"
        self.sizes = np.load(folder / "sizes.npy")  # (N, 2)
        self.lengths = self.sizes.sum(1)  # (N,)
        self.starts = self.lengths.cumsum() - self.lengths  # (N,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> lm.Pair:
        length, start, (prompt, _) = self.lengths[index], self.starts[index], self.sizes[index]
        ids = np.fromfile(self.file, np.int32, length, offset=4 * start).tolist()
        return ids[:prompt], ids[prompt:]


def together(job: Job) -> Prepared:
    """The examples of a job, on all ranks: one rank of each machine makes them while the others wait (as long
    as distributed.init says). Raises ValueError on all ranks alike."""
    made, failed = None, ""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            made = make(job)
        except (ValueError, OSError) as error:
            failed = str(error)
    of_ranks = distributed.gather((made, failed))
    if told := [text for _, text in of_ranks if text]:
        raise ValueError(told[0])
    folders = sorted({folder for folder, _ in of_ranks if folder})
    if len(folders) > 1:  # each rank would learn other pairs, or find none
        raise ValueError(f"the machines made other examples: {', '.join(map(str, folders))}; made_of.json in "
                         "each says of what. Give all machines the same data, model, code and Python")
    return Prepared(folders[0])
