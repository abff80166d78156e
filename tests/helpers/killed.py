"""Kill a command, in this process or with kill -9 in one of its own."""

import contextlib
import os
import signal
import sys
import traceback
from itertools import count
from unittest import mock

import pytest
import torch


class Kill(BaseException):
    """What no `except Exception` stops."""


@contextlib.contextmanager
def killed(place, name: str, call: int = 1, behind: bool = False):
    """What runs in here dies in call number `call` of place.name: before it begins, or `behind` it."""
    function, calls = getattr(place, name), count(1)

    def dying(*args, **kwargs):
        last = next(calls) == call
        found = None if last and not behind else function(*args, **kwargs)
        if last:
            raise Kill
        return found

    with mock.patch.object(place, name, dying), pytest.raises(Kill):
        yield


def shot(command, place, name: str, target) -> None:
    """`command` in a process of its own, which kill -9 ends in the first call of place.name whose arguments
    are a `target`. A fork: to import everything again takes longer than most commands here."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "see stderr"
        return
    try:
        # A fork makes torch's pool of threads anew at its first use, and transformers' loading uses it from
        # several threads at once: without this line some find no pool ("Invalid thread pool!").
        torch.set_num_threads(1)
        function = getattr(place, name)
        die = lambda: os.kill(os.getpid(), signal.SIGKILL)
        setattr(place, name, lambda *args, **how: die() if target(*args, **how) else function(*args, **how))
        command()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
