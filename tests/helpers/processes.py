"""Jobs on one rank or two, and whether a process lives."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

RANKS = Path(__file__).resolve().parent.parent / "ranks.py"
PORTS = ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *PORTS]
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}


def environment(**more) -> dict:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def launch(folder: Path, *stages: str, seconds: float = 1200) -> None:
    """The stages of tests/ranks.py. Raises when a rank fails, or hangs: a rank that waits for another is what
    these tests are about. Two processes stay for all stages: to import everything takes longer than most
    jobs."""
    log = folder / "ranks.log"
    with open(log, "w") as said:
        ranks = [subprocess.Popen([sys.executable, RANKS, folder, str(rank), *stages], env=environment(),
                                  stdout=said, stderr=said, start_new_session=True) for rank in range(2)]
    try:
        wait_for(lambda: any(codes := [rank.poll() for rank in ranks]) or codes == [0, 0], seconds)
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], log.read_text()[-4000:]
    assert "Traceback" not in log.read_text(), log.read_text()[-4000:]


def result(folder: Path, ranks: int, job: str) -> dict:
    return torch.load(folder / f"{ranks}-{job}.pt", weights_only=True)


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
