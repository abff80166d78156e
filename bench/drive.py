"""Drives a long experiment: stages that need each other, a few at a time, on from where a kill left them.

A stage is a command that this repository's reader could type. Each makes one JSON file last, and goes on
inside itself when it is started again. Beside its folder stands STAGES/NAME.json with what was typed, the
recipe that it was typed for, the commit and the time it took over all its starts; NAME.txt holds what it
said.

The driver may be killed at any moment, its stages too. Killed itself, it takes them with it. So nothing runs
unseen, the times are whole, and the same command goes on.
"""

import ast
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = "stages"  # the folder of records and logs


@dataclass(frozen=True)
class Stage:
    """A command, and what it needs."""

    folder: Path
    """Of the run that it belongs to. Paths are relative to the repository, or absolute."""
    name: str
    """In that folder."""
    command: tuple[str, ...]
    """What follows `python`."""
    makes: Path
    """A JSON file that stands once the stage is done."""
    needs: tuple["Stage", ...] = ()
    """Stages that it is made of. They must be done before."""
    minutes: float = 1.0
    """A guess, until some stages were timed. The longest way to the end goes first."""
    threads: int = 1
    more: Callable[[], Sequence[str]] | None = None
    """Further words of the command, which are known only when what it waits for is made. It must give the
    same words each time."""
    after: tuple["Stage", ...] = ()
    """Stages that must be done before, and that it is not made of: they only tell it how long to go on."""

    @property
    def waits(self) -> tuple["Stage", ...]:
        """All that must be done before."""
        return (*self.needs, *self.after)

    @property
    def label(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def record(self) -> Path:
        return ROOT / self.folder / STAGES / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.record.with_suffix(".txt")

    def words(self) -> list[str]:
        return [*self.command, *(self.more() if self.more else ())]

    def made(self) -> bool:
        """Whether its file stands, and whole: a kill may have left half of it."""
        return read(ROOT / self.makes) is not None


def read(file: Path) -> dict | None:
    """What a JSON file holds; None where it is not there, or not whole."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write(file: Path, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    write_bytes(file, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, file)


# ---- by which code -----------------------------------------------------------------------------------------


def recipe(*patterns: str) -> str:
    """12 digits for all that decides what is learned and measured: these files of the repository. Comments
    and docstrings of Python files do not count. (Another version of Python may give other digits.)"""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()}):
        content = file.read_bytes()
        digest.update(file.relative_to(ROOT).as_posix().encode())
        digest.update(_code(content).encode() if file.suffix == ".py" else content)
    return digest.hexdigest()[:12]


def _code(source: bytes) -> str:
    """Python without comments and docstrings.

    >>> _code(b"def f():\\n    'Says why.'\\n    return 1  # so") == _code(b"def f(): return 1")
    True
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [line for line in node.body
                         if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return ast.dump(tree)


@functools.cache
def commit() -> str:
    """The commit of this repository, with a + where tracked files were changed since; "" outside of git."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout
    return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(git("status", "--porcelain", "-uno"))


def processor() -> str:
    """What this machine's cores call themselves, and how many there are (Linux)."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().split("\n")
             if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


def of_what(stage: Stage) -> dict[str, str]:
    """{label: 12 digits} of each stage that it is made of and that is made: of what its file says."""
    return {other.label: hashlib.sha256((ROOT / other.makes).read_bytes()).hexdigest()[:12]
            for other in stage.needs if other.made()}


def check(stage: Stage, of: str, alone: bool = False) -> None:
    """Raise ValueError where something else than this stage, or another recipe, made what stands there.
    `alone`: nothing is made of it, so it can be made again by itself."""
    record = read(stage.record)
    others = f"{stage.makes} and {stage.record}" if alone else stage.folder
    way_out = f"give another --out (make: another RUN=), or remove {others}"
    if record is None:
        if stage.made():
            raise ValueError(f"{stage.makes} stands there, and nothing in {stage.record.parent} tells what "
                             f"made it; {way_out}")
        return
    if record["recipe"] != of:
        raise ValueError(f"{stage.label} is of recipe {record['recipe']} (commit {record['commit']}), and "
                         f"this code is recipe {of}: to go on, check that commit out; to begin anew, "
                         f"{way_out}")
    stands = of_what(stage)
    for label, was in record.get("made of", {}).items():
        if stands.get(label, was) != was:
            raise ValueError(f"{stage.label} was made of another {label}, which has been made again since; "
                             f"{way_out}")
    if stage.made() or all(other.made() for other in stage.waits):  # else its words are not known
        if record["command"] != stage.words():
            raise ValueError(f"{stage.label} was begun by\n    python {' '.join(record['command'])}\nand now "
                             f"it would be\n    python {' '.join(stage.words())}\n{way_out}")


# ---- running -----------------------------------------------------------------------------------------------


class Running:
    """A stage at work. Its record is written while it runs, so that a kill costs seconds of its time."""

    def __init__(self, stage: Stage, of: str):
        self.stage, self.began, self.written = stage, time.time(), 0.0
        self.before = read(stage.record) or {"wall": 0.0, "cpu": 0.0, "starts": 0}
        self.known = {"command": stage.words(), "recipe": of, "commit": commit(), "made of": of_what(stage),
                      "starts": self.before["starts"] + 1}
        stage.log.parent.mkdir(parents=True, exist_ok=True)
        with open(stage.log, "a") as log:
            try:  # the stage inherits the lock, and holds it as long as it lives
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"somebody else is making {stage.label}: wait for it, or end it") from error
            log.write(f"\npython {' '.join(stage.words())}\n")
            log.flush()
            # A thread that waits must sleep: two that spin are ten times slower (NOTES 11.7).
            environment = os.environ | {"OMP_NUM_THREADS": str(stage.threads), "OMP_WAIT_POLICY": "PASSIVE"}
            self.process = subprocess.Popen([sys.executable, *stage.words()], cwd=ROOT, env=environment,
                                            stdout=log, stderr=log, preexec_fn=_end_with_parent)
        self.cpu = 0.0
        self.note()

    def ended(self) -> bool:
        pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            self.process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu = used.ru_utime + used.ru_stime
            self.note()
        elif time.time() - self.written > 10:
            self.cpu = cpu_seconds(self.process.pid)
            self.note()
        return bool(pid)

    def note(self) -> None:
        """Write the record."""
        self.written = time.time()
        write(self.stage.record, self.known | {"wall": round(self.before["wall"] + self.seconds(), 2),
                                               "cpu": round(self.before["cpu"] + self.cpu, 2)})

    def seconds(self) -> float:
        return time.time() - self.began

    def says(self) -> str:
        """The last that it wrote: mostly a progress bar."""
        return log_lines(self.stage.log)[-1]


def log_lines(log: Path) -> list[str]:
    """The lines of a log, with a progress bar's states as lines of their own."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "\n", log.read_text(errors="replace"))  # the cursor, up and down
    return [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]


def _end_with_parent() -> None:
    """In a stage, before it begins: a driver that is killed ends it as well (prctl, PR_SET_PDEATHSIG; Linux).
    A stage that went on unseen would be started a second time."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def cpu_seconds(process: int) -> float:
    """CPU time of a process and of those of its children that have ended (Linux); 0 where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


def work(stages: Sequence[Stage], code: Callable[[Stage], str], jobs: int = 2, every: float = 60.0,
         after: Callable[[Stage], None] = lambda stage: None) -> list[Stage]:
    """Run all stages that are not made yet, `jobs` at a time; say where it stands every `every` seconds.
    `code(stage)` is its recipe now. `after` is called with each stage that is made, old ones too.

    Returns what failed. Its end is printed; what needs it is left out, and all else goes on. Raises
    ValueError before anything runs where a stage was made by another recipe or command; and later where
    somebody has changed the recipe meanwhile.
    """
    of = {stage: code(stage) for stage in stages}
    for stage in stages:
        check(stage, of[stage], alone=all(stage not in other.needs for other in stages))
    todo, running, failed, said = [stage for stage in stages if not stage.made()], [], [], time.time()
    done = [stage for stage in stages if stage.made()]

    def tell() -> None:  # of what is made, once all that it waits for is: that may be new, and itself old
        for stage in [stage for stage in done if all(other.made() for other in stage.waits)]:
            done.remove(stage)
            after(stage)

    tell()
    if todo:
        say(f"{len(todo)} of {len(stages)} stages to make; what each says: {todo[0].folder}/{STAGES}/*.txt")
    while True:
        for run in [run for run in running if run.ended()]:
            running.remove(run)
            if run.process.returncode == 0 and run.stage.made():
                say(f"{run.stage.label} is made ({run.seconds() / 60:.1f} min)")
                done.insert(0, run.stage)
                tell()
            else:
                failed.append(given_up(run))
        at_work = [run.stage for run in running]  # a file that stands is not the end of its program
        ready = [stage for stage in todo
                 if all(other.made() and other not in [*at_work, *failed] for other in stage.waits)]
        ready.sort(key=lambda stage: -to_the_end(stage, stages))
        for stage in ready[: max(0, jobs - len(running))]:
            if (now := code(stage)) != of[stage]:  # what runs ends with this driver
                raise ValueError(f"the code was recipe {of[stage]} when this began, and is {now} now: bring "
                                 "it back. A long run is better given a clone of its own")
            todo.remove(stage)
            running.append(Running(stage, of[stage]))
            say(f"python {' '.join(stage.words())}")
        if not running:
            return failed
        if time.time() - said >= every:
            said = time.time()
            say(progress(stages, todo, running, jobs))
        time.sleep(0.2)


def say(text: str) -> None:
    print(time.strftime("%H:%M"), text, flush=True)


def given_up(run: Running) -> Stage:
    """The stage of a run that failed. Prints its name and the end of what it wrote, and removes the file that
    it may have made, which the next start would take for whole."""
    (ROOT / run.stage.makes).unlink(missing_ok=True)
    end = log_lines(run.stage.log)[-15:]
    say("\n    ".join([f"{run.stage.label} FAILED (status {run.process.returncode}); the end of "
                       f"{run.stage.log}:", *end]))
    return run.stage


def to_the_end(stage: Stage, stages: Sequence[Stage]) -> float:
    """Guessed minutes of this stage and of the longest row of stages that wait for it."""
    waiting = [to_the_end(other, stages) for other in stages if stage in other.waits]
    return stage.minutes + max(waiting, default=0.0)


def bar_minutes(text: str) -> float:
    """Minutes that a progress bar says are left; 0 in its first half minute, and where there is no bar.

    >>> bar_minutes("cloning:  25%|##    | 20/80 [00:40<02:00,  2.0s/step]"), bar_minutes("written")
    (2.0, 0.0)
    """
    found = re.search(r"\[((?:\d+:)+\d+)<((?:\d+:)+\d+)", text)
    seconds = lambda clock: sum(int(part) * 60**k for k, part in enumerate(reversed(clock.split(":"))))
    return seconds(found[2]) / 60 if found and seconds(found[1]) >= 30 else 0.0


def progress(stages: Sequence[Stage], todo: Sequence[Stage], running: Sequence[Running], jobs: int) -> str:
    """A line: how many are made, how many minutes are left, what runs.

    The guesses of all stages are stretched by what the stages that are made took of theirs, and those that
    run and take longer: a machine half as fast is known by the first progress bar.
    """
    made = [stage for stage in stages if stage.made()]
    took, guessed = sum(read(stage.record)["wall"] / 60 for stage in made), sum(s.minutes for s in made)
    stretch = took / guessed if made else 1.0
    least = [run.seconds() / 60 + bar_minutes(run.says()) for run in running]
    longer = [(minutes, run.stage.minutes) for minutes, run in zip(least, running)
              if minutes > stretch * run.stage.minutes]
    if longer:
        took, guessed = (first + sum(more) for first, more in zip((took, guessed), zip(*longer)))
        stretch = took / guessed
    ahead = [max(stretch * run.stage.minutes, minutes) - run.seconds() / 60
             for minutes, run in zip(least, running)]
    ways = [left + stretch * (to_the_end(run.stage, stages) - run.stage.minutes)
            for left, run in zip(ahead, running)]
    ways += [stretch * to_the_end(stage, stages) for stage in todo]
    total = sum(ahead) + stretch * sum(stage.minutes for stage in todo)
    now = [f"{run.stage.label} {run.seconds() / 60:.0f} min ({run.says()[:60]})" for run in running]
    return " | ".join([f"{len(made)} of {len(stages)} stages made, about "
                       f"{max([total / jobs, *ways]):.0f} min left", *now])
