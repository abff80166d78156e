"""What this machine has: disk, host memory, GPUs, and what vLLM needs of it. Looked at before anything large
is loaded (node/preflight.py), and before a rehearsal (node/rehearse.py). What the ranks of a machine share is
looked at by its first.

GB is 1e9 bytes.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import remote
from node.sizes import GB

MEMORY = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's own limit
SHARED = Path("/dev/shm")
SHARED_GB = 1.0  # for vLLM and NCCL over several GPUs (assumption; a container has .06 by default)
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
STATES = "weights, gradients and Adam"
PROCESS = 6.0  # GB of host memory of a process with CUDA and vLLM (assumption)


@dataclass
class Found:
    """What was found, in the order of the checks: a sentence each."""

    ok: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def check(self, what: object = "") -> Iterator[None]:
        """One check: its error is a failure, and the checks behind it go on. A message that does not name
        `what` gets it in front."""
        try:
            yield
        except json.JSONDecodeError as error:  # of config.json, or of an index
            self.failed.append(f"{what}: this is no JSON ({error}); download it again")
        except (ValueError, OSError, remote.EngineError) as error:
            said = " ".join(str(error).split())
            self.failed.append(said if str(what) in said else f"{what}: {said}")


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def first_here() -> bool:
    """The rank that looks at what the ranks of a machine share."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def shared(found: Found, flag: str, tensor_parallel: int) -> None:
    if tensor_parallel == 1 or not first_here() or not SHARED.exists():
        return
    free = shutil.disk_usage(SHARED).free / GB
    if free < SHARED_GB:
        found.failed.append(f"{flag} {tensor_parallel}: {SHARED} has {free:.2f} GB free, and the processes "
                            f"of a server need {SHARED_GB:.0f}; start the container with --ipc=host, or "
                            "--shm-size=16g")


def compiler(found: Found) -> None:
    """vLLM's model runner is made of Triton's kernels. The first of them compiles its launcher here, as below
    (read, triton 3.7.1, `_build`)."""
    if not first_here() or not torch.cuda.is_available():
        return
    named = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    with found.check(), tempfile.TemporaryDirectory() as folder:
        way_out = f"Triton needs both; apt-get install build-essential python{PYTHON}-dev"
        if not named:
            raise ValueError(f"there is no C compiler here (nor Python.h, perhaps), and {way_out}")
        line = Path(folder) / "line.c"
        line.write_text("#include <Python.h>\n")
        headers = sysconfig.get_paths(scheme="posix_prefix")["include"]
        command = [named, line, "-shared", "-fPIC", f"-I{headers}", "-o", line.with_suffix(".so")]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()
            why = next((part for part in said if "error" in part), said[-1])
            raise ValueError(f"{named} cannot compile a line with Python.h ({why}), and {way_out}") from error
        found.ok.append(f"{named} compiles, with Python.h")


def disk(found: Found, where: Path, need: dict[str, float], earlier: Path | None = None,
         way_out: str = "give an --out on another") -> None:
    """`need`: GB by what takes it. Checkpoints of an `earlier` start are a part of it that is there."""
    home = next(folder for folder in (where, *where.absolute().parents) if folder.is_dir()).resolve()
    if not os.access(home, os.W_OK):
        raise ValueError(f"{where}: nothing can be written to {home}; {way_out}")
    files = earlier.rglob("*") if earlier else ()
    total = max(0.0, sum(need.values()) - sum(file.stat().st_size for file in files if file.is_file()) / GB)
    if total > (free := shutil.disk_usage(home).free / GB):
        raise ValueError(f"{where}: {total:,.3g} GB will be written ({parts(need)}), and the disk has "
                         f"{free:,.3g} left; make room, or {way_out}")
    mount = next(folder for folder in (home, *home.parents) if folder.is_mount())
    found.ok.append(f"disk of {where}: {total:,.3g} GB ({parts(need)}) of {free:,.0f} GB that are free on "
                    f"{mount}")  # node/commands.sh adds these lines up


def available() -> float:
    """GB of host memory that are free, or hold files that can be read again; in a container what its limit
    leaves of that (cgroup v2)."""
    rows = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        of_files = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(of_files["active_file"]) + int(of_files["inactive_file"]))
    except (OSError, ValueError):  # not in a container of cgroup v2, or "max": no limit
        pass
    return free / GB


def host(found: Found, need: dict[str, float]) -> None:
    if not first_here() or not MEMORY.exists():  # it is there on Linux
        return
    total, free = sum(need.values()), available()
    said = f"host memory: {total:,.3g} GB ({parts(need)}) of {free:,.3g} GB that are available"
    if total > free:
        found.failed.append(f"{said}; stop other processes, or take a larger machine")
    else:
        found.ok.append(said)


def gpu(found: Found, need: dict[str, float], compute: str) -> None:
    """This rank's GPU: what is on it all the time. Activations come on top: node/plan.py simulates them."""
    device = torch.cuda.current_device()
    free, size = (b / GB for b in torch.cuda.mem_get_info(device))
    name, total = f"GPU {device} ({torch.cuda.get_device_name(device)})", sum(need.values())
    if compute == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        found.failed.append(f"{name} has no bfloat16; take an Ampere card or a newer one")
    if total > size:
        found.failed.append(f"{name} has {size:.1f} GB, and {total:.1f} are needed before any activation "
                            f"({parts(need)}); python -m node.plan says what can be changed")
    elif total > free:
        found.failed.append(f"{name}: {size - free:.1f} GB are in use by other processes, perhaps the "
                            f"annotator's server (nvidia-smi names them), and {total:.1f} of {size:.1f} are "
                            "needed; stop them")
    else:
        found.ok.append(f"{name}: {total:.1f} GB before any activation ({parts(need)}), {free:.1f} of "
                        f"{size:.1f} are free; python -m node.plan simulates the activations")


def parts(need: dict[str, float]) -> str:
    return ", ".join(f"{what} {gb:,.3g}" for what, gb in need.items() if gb)
