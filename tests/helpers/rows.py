"""Trajectories of the counting web as NNetNav's rows."""

import gzip
import json
from pathlib import Path

from conftest import GOAL, recorded

import data
import policy

TASKS = 24


def nnetnav(task: str, clicks: int) -> list[dict]:
    """A trajectory of the counting web as NNetNav's rows: so many clicks, then stop."""
    rows = []
    for step in recorded(["click [1]"] * clicks + ["stop [done]"], task=task).steps:
        chat = policy.messages(GOAL, step.url, step.page, step.previous)
        chat.append({"role": "assistant", "content": data.completion(step.thought, step.action)})
        rows.append({"task_name": task, "messages": chat})
    return rows


def write(file: Path, rows: list[dict]) -> Path:
    with (gzip.open if file.suffix == ".gz" else open)(file, "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def rows_of(tasks: int = TASKS) -> list[dict]:
    """Tasks of 2 to 6 rows, one of 13, one that never stops, and a row that is dropped."""
    rows = [nnetnav(f"t{k}", 12 if k == 3 else 1 + k % 5) for k in range(tasks)]
    rows[5].pop()
    rows[7][1]["messages"][1]["content"] = "no page"
    return [row for of_task in rows for row in of_task]
