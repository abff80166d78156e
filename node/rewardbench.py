"""AgentRewardBench (arXiv 2504.08942): tries of web agents with experts' labels, as cases for a judge.

    hf download McGill-NLP/agent-reward-bench --repo-type dataset --include "cleaned/*" --local-dir arb
    python audit.py --judge-on annotations.csv arb/cleaned --judge-checkpoint MODEL --judge-context 32768

Labels are lines of annotations.csv, of github.com/McGill-NLP/agent-reward-bench, agent_reward_bench/data:
benchmark, task_id, model_name, trajectory_success (Successful, Unsuccessful or Unsure), and more. A try is
cleaned/BENCHMARK/MODEL/EXPERIMENT/TASK.json with goal and steps. A step has the page (axtree, BrowserGym's
text) and the action that the agent took on it, null behind the last. The form of a try was read off
that repository's code (Step.to_dict, and how its judges read a trajectory): nobody here has seen the files.
Nothing here is learned from: its tasks are those that others report on.

Go-Browse's tries on WebArena's sites (some 17,000 failures, with trees) would do as well. They are not read:
no public source that shows the form of their files was at hand.
"""

import csv
from collections import Counter
from pathlib import Path

import data
from data import Action
from judge import Case
from node import webworld

COLUMNS = ("benchmark", "model_name", "task_id", "trajectory_success")
RIGHT = {"Successful": True, "Unsuccessful": False}
ENDS = ("send_msg_to_user", "report_infeasible")


def labels(file: Path) -> dict[tuple[str, str, str], str]:
    """{(benchmark, model, task): trajectory_success}. Some tries have two experts: the first line counts.
    Raises ValueError where it is another file."""
    found: dict[tuple[str, str, str], str] = {}
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if missing := sorted({*COLUMNS} - {*(rows.fieldnames or ())}):
            raise ValueError(f"{file} has no column {missing[0]}; is it AgentRewardBench's annotations.csv?")
        for row in rows:
            *key, label = (row[name] for name in COLUMNS)
            found.setdefault((key[0], key[1], key[2]), label)
    return found


def words(call: str, page: str) -> str:
    """An action as the judge reads it: in our words, or as it was written where our grammar has none."""
    try:
        name, given, named = webworld.called(call)
        said = [text for text in (*given, *named.values()) if isinstance(text, str)]
        action = Action("stop", text="".join(said[:1])) if name in ENDS else webworld.read_call(call, page)
    except ValueError:
        action = None
    return data.describe(action, page) if action else data.one_line(call)


def case(row: dict) -> Case | None:
    """What the judge reads of a try that the agent ended; None for one that ran out of steps. Raises
    ValueError for another file."""
    try:
        steps = [(step["axtree"], step["action"]) for step in row["steps"]]
        goal, taken = row["goal"], [(page, call) for page, call in steps if call is not None]
        if not all(isinstance(text, str) for text in (goal, *(text for step in taken for text in step))):
            raise TypeError("goal, axtree and action are texts")
    except (KeyError, TypeError) as error:
        raise ValueError(f"no try of AgentRewardBench ({error})") from error
    if not taken or not taken[-1][1].startswith(ENDS):
        return None
    before, after = taken[-1][0], steps[-1][0]
    return goal.strip(), [words(call, page) for page, call in taken], before, after


def cases(annotations: Path, folder: Path, counts: Counter) -> list[tuple[str, Case, bool]]:
    """(benchmark, case, whether the expert called it a success) of every labelled try below `folder`. Adds to
    `counts` what was left out, and why. Raises ValueError where there is none."""
    known, found = labels(annotations), []
    for file in sorted(folder.rglob("*.json")):
        counts["tries"] += 1
        try:
            row = data.as_object(file.read_bytes())
            label = known.get((row["benchmark"], row["agent"], file.stem))
            read = case(row)
        except (*data.DAMAGED, KeyError, TypeError):
            counts["left out: cannot be read"] += 1
            continue
        if label not in RIGHT:
            counts["left out: no label"] += 1
        elif read is None:
            counts["left out: not ended by the agent"] += 1
        else:
            found.append((row["benchmark"], read, RIGHT[label]))
    if not found:
        raise ValueError(f"{folder} holds no try that {annotations} has a label of: {dict(counts)}")
    return found
