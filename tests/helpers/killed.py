"""Kill a command, in this process or with kill -9 in one of its own."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


class Kill(BaseException):
    """What no `except Exception` stops."""


@contextlib.contextmanager
def killed(place: Any, name: str, call: int = 1, behind: bool = False) -> Iterator[None]:
    """What runs in here dies in call number `call` of place.name: before it begins, or `behind` it."""
    function, calls = getattr(place, name), 0

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls != call:
            return function(*args, **kwargs)
        if behind:
            function(*args, **kwargs)
        raise Kill

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Kill):
        patch.setattr(place, name, dying)
        yield


def shot(command: Callable[[], Any], place: Any, name: str, target: Callable[..., bool]) -> None:
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

        def dying(*args, **kwargs):
            if target(*args, **kwargs):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(place, name, dying)
        command()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
