"""A command as it is typed."""

import contextlib
import io
import sys

import pytest


def command(program, *words) -> str:
    """What `python PROGRAM.py words` prints, or its error."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, words)])
        try:
            program.main()
        except SystemExit as error:
            return str(error.code)
    return said.getvalue()
