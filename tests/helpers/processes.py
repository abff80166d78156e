"""Commands on one rank or two, and whether a process lives."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

RANKS = Path(__file__).resolve().parent.parent / "ranks.py"
PORTS = ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *PORTS]
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}


def command(folder: Path, ranks: int, *jobs: str) -> list[str]:
    return (TORCHRUN if ranks == 2 else [sys.executable]) + [str(RANKS), str(folder), *jobs]


def environment(**more) -> dict:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def launch(folder: Path, ranks: int, *jobs: str, seconds: float = 400, **more) -> None:
    """Raises when the jobs fail, or hang: a rank that waits for another is what this file is about."""
    done = subprocess.run(command(folder, ranks, *jobs), env=environment(**more), capture_output=True,
                          text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]


def result(folder: Path, ranks: int, job: str) -> dict:
    return torch.load(folder / f"{ranks}-{job}.pt", weights_only=True)


def running(pid: int) -> bool:
    """Whether a process lives. A process that nobody has waited for yet (Z) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
