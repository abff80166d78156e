"""Other people's verifiers, each in a process of its own that can reach nothing.

    success, says = await verdict(Path("gmail/real-tasks/task_e1.py"), state, seconds=10)

A verifier is a Python file with `verify(server_url) -> (bool, str)` that gets `server_url/api/state` by the
package `requests`. It is given the state by a stand-in for that package. The process
- has no environment, starts in /, and has no file descriptor to spare: the kernel refuses every file and every
  socket (RLIMIT_NOFILE 0);
- may only import what was imported before it began, and do nothing that Python reports to audit hooks (remove
  a file, fork, send a signal: none of it needs a descriptor);
- has 512 MiB, and so many seconds.
What a verifier prints is not read: its answer has a pipe of its own.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

CHILD = r"""
import calendar, collections, datetime, json, locale, os, re, resource, sys, types
import _strptime  # datetime imports it when it is first asked
seconds, source, name, state = json.loads(sys.stdin.buffer.read())

def get(url, **_):
    # As the applications' servers answer: GET /api/state and nothing else; 404 before the first PUT.
    found = url.split('?')[0].endswith('/api/state') and state is not None
    def check():
        if not found: raise OSError('HTTP 404')
    body = state if found else {'error': 'No state available. Open the app in a browser first.'}
    return types.SimpleNamespace(status_code=200 if found else 404, ok=found, json=lambda: body,
                                 text=json.dumps(body), raise_for_status=check)

requests = types.ModuleType('requests')
requests.get, requests.RequestException = get, OSError
requests.exceptions = types.SimpleNamespace(RequestException=OSError, ConnectionError=OSError, Timeout=OSError)
sys.modules['requests'] = requests
code = compile(source, name, 'exec')
answer, allowed, armed = os.dup(1), set(sys.modules), True
os.dup2(2, 1)

def refuse(event, values):
    harmless = event in ('exec', 'compile', 'object.__getattr__', 'object.__setattr__', 'code.__new__',
                         'builtins.id', 'sys._getframe')
    if armed and not harmless and not (event == 'import' and values[0] in allowed):
        raise PermissionError(f'a verifier may not do this: {event}')

sys.addaudithook(refuse)
for what, most in ((resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
                   (resource.RLIMIT_AS, 512 << 20), (resource.RLIMIT_CPU, seconds)):
    armed = False
    resource.setrlimit(what, (most, most))
armed = True
try:
    space = {'__name__': 'verifier'}
    exec(code, space)
    success, says = space['verify']('http://application')
    if not isinstance(success, bool) or not isinstance(says, str):
        raise TypeError(f'verify() gave {success!r:.80}, {says!r:.80}, and not (bool, str)')
    said = {'success': success, 'says': says[:2000]}
except BaseException as error:
    said = {'error': f'{type(error).__name__}: {error}'[:2000]}
os.write(answer, json.dumps(said).encode())
os._exit(0)
"""


class Unverified(Exception):
    """A verifier gave no verdict. The message says why."""


async def verdict(verifier: Path, state, seconds: float) -> tuple[bool, str]:
    """(success, what the verifier says) of an application's state (what json.loads gives; None where the page
    never sent any). Raises Unverified."""
    try:
        source = verifier.read_text()
    except OSError as error:
        raise Unverified(f"{verifier}: {error.strerror}") from error
    given = json.dumps([int(seconds) + 1, source, str(verifier), state]).encode()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", CHILD, cwd="/", env={}, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    try:
        said, _ = await asyncio.wait_for(child.communicate(given), seconds)
    except TimeoutError as error:
        raise Unverified(f"{verifier}: no verdict after {seconds:g} s") from error
    finally:
        if child.returncode is None:
            os.killpg(child.pid, 9)
            await child.wait()
    try:
        said = json.loads(said)
    except ValueError as error:
        raise Unverified(f"{verifier}: its process died ({child.returncode})") from error
    if "error" in said:
        raise Unverified(f"{verifier}: {said['error']}")
    return said["success"], said["says"]
