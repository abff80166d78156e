"""Plays everything once, in as many processes as there are cores; the tests read what was seen."""
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import beside
import pytest
from tqdm import tqdm


def pytest_addoption(parser):
    parser.addoption("--trajectories", type=int, default=1, help="of a page; of the recipe's 4 times this")
    parser.addoption("--tasks", default=",".join(beside.TASKS), help="MiniWoB++'s names, commas between them")
    parser.addoption("--json", default="", help="a file for all that was seen")


SEEN, SPEED = pytest.StashKey(), pytest.StashKey()
TIMED = ("enter-text", "login-user", "click-option", "choose-list", "read-table", "navigate-tree")


@pytest.fixture(scope="session")
def played(request) -> dict[str, list[dict]]:
    """Task -> beside.play's answers. Before them a few are timed, while nothing else runs."""
    tasks, count = request.config.getoption("--tasks").split(","), request.config.getoption("--trajectories")
    request.config.stash[SPEED] = beside.speed([task for task in TIMED if task in tasks])
    # Short turns, handed out as processes get free: pages differ much in how long they take.
    turns = [tasks[first:first + 3] for first in range(0, len(tasks), 3)]
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    with pool, tqdm(total=len(tasks), unit="page") as bar:
        seen = {}
        for answers in pool.map(beside.compare, turns, [count] * len(turns)):
            seen |= answers
            bar.update(len(answers))
            if name := request.config.getoption("--json"):
                Path(name).write_text(json.dumps(seen))
    request.config.stash[SEEN] = seen
    return seen


def pytest_terminal_summary(terminalreporter, config):
    """The table, and the times."""
    seen = config.stash.get(SEEN, {})
    rows = [beside.COLUMNS, *(beside.row(task, trajectories) for task, trajectories in seen.items()),
            beside.row("all", sum(seen.values(), []))]
    for line in [*rows, *config.stash.get(SPEED, [])] if seen else []:
        terminalreporter.write_line(line)
