"""Other people's verifiers, each in a process of its own that can reach nothing.

    success, says = await verdict(Path("gmail/real-tasks/task_e1.py"), state, seconds=5)

A verifier is a Python file with `verify(server_url) -> (bool, str)` that gets `server_url/api/state` by the
package `requests`. It is given the state by a stand-in for that package. Of the standard library it can
import what CHILD has imported before: what needs neither files nor sockets.

Before the process reads a line of it, it hands the kernel a list of system calls (seccomp): memory, the
clock, reading and writing of what is open, and its end. All others fail ("Operation not permitted"): files,
sockets, processes, signals, limits, its own alarm. What is open are two pipes and /dev/null. So it does not
matter that it may run as root, nor what its Python can be made to do. Audit hooks are no wall (PEP 578 says
so): `_imp.create_builtin`, made-up bytecode and ctypes go round them. It has no environment, 512 MiB, and so
many seconds, by the kernel's alarm too, should we die meanwhile.

What it prints is not read. Its answer has a pipe of its own, of which one line is read, at most 64 KiB, and
believed only if it has the shape of an answer.
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from worlds.chromium import Unverified

CHILD = r"""
import ctypes, json, os, resource, signal, struct, sys, types
# What verifiers may import: once it runs, the process can open no file. _strptime is datetime's.
import _strptime, bisect, calendar, collections, copy, dataclasses, datetime, decimal, difflib, enum
import fractions, functools, hashlib, heapq, html, itertools, locale, math, operator, pprint, random, re
import statistics, string, textwrap, time, traceback, typing, unicodedata, urllib.parse, uuid
seconds, source, name, state = json.loads(sys.stdin.buffer.read())
answer = os.dup(1)
os.dup2(2, 1)

def get(url, **_):
    # As the applications' servers answer: GET /api/state and nothing else; 404 before the first PUT.
    found = url.split('?')[0].endswith('/api/state') and state is not None
    def check():
        if not found: raise OSError('HTTP 404')
    text = state if found else '{"error": "No state available. Open the app in a browser first."}'
    return types.SimpleNamespace(status_code=200 if found else 404, ok=found, text=text,
                                 json=lambda: json.loads(text), raise_for_status=check)

requests = types.ModuleType('requests')
requests.get, requests.RequestException = get, OSError
requests.exceptions = types.SimpleNamespace(
    RequestException=OSError, ConnectionError=OSError, Timeout=OSError)
sys.modules['requests'] = requests

# read, write, exit, exit_group, mmap, mprotect, munmap, mremap, madvise, brk, futex, clock_gettime,
# gettimeofday, getrandom; by machine, behind its number in linux/audit.h
CALLS = {'x86_64': (0xC000003E, 0, 1, 60, 231, 9, 10, 11, 25, 28, 12, 202, 228, 96, 318),
         'aarch64': (0xC00000B7, 63, 64, 93, 94, 222, 226, 215, 216, 233, 214, 98, 113, 169, 278)}

def confine():
    if sys.platform != 'linux' or os.uname().machine not in CALLS:
        raise OSError(f'verifiers run confined, by Linux on {" or ".join(CALLS)}, not {os.uname().machine}')
    signal.alarm(seconds)
    for what, most in ((resource.RLIMIT_AS, 512 << 20), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    machine, *calls = CALLS[os.uname().machine]
    # A program for the kernel: (operation, lines to skip if equal, if not, value). 0x20 loads, 0x15 compares.
    program = [(0x20, 0, 0, 4), (0x15, 0, len(calls) + 1, machine), (0x20, 0, 0, 0)]
    program += [(0x15, len(calls) - k, 0, call) for k, call in enumerate(calls)]
    program += [(0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]  # fails with EPERM; is allowed
    lines = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in program))
    whole = ctypes.create_string_buffer(struct.pack('HP', len(program), ctypes.addressof(lines)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    # PR_SET_NO_NEW_PRIVS, without which only root may do the next; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.addressof(whole), 0, 0):
        raise OSError(f'this kernel does not confine verifiers (seccomp: {os.strerror(ctypes.get_errno())})')

try:
    confine()
    space = {'__name__': 'verifier'}
    exec(compile(source, name, 'exec'), space)
    success, says = space['verify']('http://application')
    if not isinstance(success, bool) or not isinstance(says, str):
        raise TypeError(f'verify() gave {success!r:.80}, {says!r:.80}, and not (bool, str)')
    said = [success, says[:200]]
except BaseException as error:
    said = [None, f'{type(error).__name__}: {error}'[:200]]
os.write(answer, json.dumps(said).encode() + b'\n')
os._exit(0)
"""


async def verdict(verifier: Path, state: str | None, seconds: float) -> tuple[bool, str]:
    """(success, what the verifier says) of an application's state (as JSON; None where the page never sent
    any). Raises Unverified."""
    try:
        source = verifier.read_text()
    except (OSError, ValueError) as error:
        raise Unverified(f"{verifier}: {error}") from error
    given = json.dumps([int(seconds) + 1, source, str(verifier), state]).encode()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-W", "ignore", "-c", CHILD, cwd="/", env={}, limit=1 << 16,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)

    async def ask() -> bytes:
        child.stdin.write(given)
        child.stdin.close()
        line = await child.stdout.readline()  # ValueError where it is longer than `limit`
        await child.wait()
        return line

    try:
        line = await asyncio.wait_for(ask(), seconds)
        success, says = json.loads(line)
        if not (success is None or isinstance(success, bool)) or not isinstance(says, str):
            raise ValueError("of another shape")
    except TimeoutError as error:
        raise Unverified(f"{verifier}: no verdict after {seconds:g} s") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Unverified(f"{verifier}: its process died, or answered what is no verdict") from error
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
        while await child.stdout.read(1 << 16):
            pass  # what it flooded us with: wait() ends when the pipe has ended, and a full one is not read
        await child.wait()
    if success is None:  # one line, and nothing that a terminal obeys
        raise Unverified("".join(c if c.isprintable() else " " for c in f"{verifier}: {says}"))
    return success, says
