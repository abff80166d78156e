"""A browser's pages in tests: starts, actions as text, ids by their words; a command as it is typed."""

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import data
from data import parse_action

# JavaScript: all that a page can ask of another host, OTHER, without leaving: reach(element).
REACH = (Path(__file__).parent.parent / "sites/hostile/js/reach.js").read_text()


def start(task, seed=7, prefix=()):
    return replace(data.start(task, seed), prefix=tuple(prefix))


def act(web, *texts):
    """One action a page, as text; None idles."""
    return web.step([text and parse_action(text) for text in texts])


def bid(page, words):
    """The id of the first line that contains `words`."""
    line = next(line for line in page.split("\n") if words in line and "[" in line)
    return line.split("[")[1].split("]")[0]


def command(program, *words) -> str:
    """What `python PROGRAM.py words` prints, or its error."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, words)])
        try:
            program.main()
        except SystemExit as error:
            return str(error.code)
    return said.getvalue()
