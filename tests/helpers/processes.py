"""Two ranks, and whether a process lives."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def environment(**more) -> dict:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def torchrun(script: str | Path, *words, restarts: int = 0, seconds: float = 300) -> None:
    """Two ranks of a script. Raises when a rank fails, or hangs: a rank that waits for another is what these
    tests are about. torchrun, told to end, ends its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts",
               str(restarts), "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", script, *words]
    with tempfile.TemporaryFile("w+") as log:
        ranks = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log,
                                 env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"))
        try:
            code: int | str = ranks.wait(seconds)
        except subprocess.TimeoutExpired:
            code = "they hang"
        finally:
            ranks.terminate()
            ranks.wait()
        log.seek(0)
        assert code == 0, f"{code}: {log.read()[-6000:]}"


@contextlib.contextmanager
def full_disk(size: int):
    """No file can grow beyond so many bytes: a write fails in the middle, as on a full disk."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def running(pid: int) -> bool:
    """Whether a process lives. A process that nobody has waited for yet (Z) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def naming(text: object, seconds: float = 0) -> list[str]:
    """The processes whose command line has this text, as soon as none has, or when so long is over. Who was
    killed is listed until the kernel has put it away. (-ww: pytest sets COLUMNS, at which ps cuts its lines.)
    """
    end = time.monotonic() + seconds
    while True:
        listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True).stdout
        found = [line for line in listed.splitlines() if str(text) in line]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def wait_for(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
