"""Commands as they are typed, two ranks, and which processes live."""

import contextlib
import io
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil  # comes with peft
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def command(program, *words) -> str:
    """What `python PROGRAM.py words` prints, or its error."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, words)])
        try:
            program.main()
        except SystemExit as error:
            return str(error.code)
    return said.getvalue()


def torchrun(script: str | Path, *words, restarts: int = 0) -> None:
    """Two ranks of a script. Raises when a rank fails, or hangs: a rank that waits for another is what these
    tests are about. torchrun, told to end, ends its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts",
               str(restarts), "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", script, *words]
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=os.environ | ours) as ranks:
        try:
            said, _ = ranks.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            ranks.terminate()
            said = ranks.communicate()[0] + "\nthey hang"
    assert ranks.returncode == 0, said[-6000:]


@contextlib.contextmanager
def full_disk(size: int):
    """No file can grow beyond so many bytes: a write fails in the middle, as on a full disk."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def naming(text: object) -> list[psutil.Process]:
    """The processes that live and whose command line has this text."""
    return [process for process in psutil.process_iter(["cmdline"])
            if str(text) in " ".join(process.info["cmdline"] or ())]


def wait_for(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
