"""kill -9 a command, in a process of its own."""

import os
import signal
import sys
import traceback
from itertools import count

import torch


def shot(command, place, name: str, call: int) -> None:
    """Ends `command` where call number `call` of place.name begins. A fork: to import all takes longer."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "see stderr"
        return
    function, calls = getattr(place, name), count(1)

    def dying(*args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    try:
        # A fork makes torch's pool of threads anew at its first use, and transformers' loading uses it from
        # several threads at once: without this line some find no pool ("Invalid thread pool!").
        torch.set_num_threads(1)
        setattr(place, name, dying)
        command()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
