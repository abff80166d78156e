"""Claims about worlds.explore.py, in a real Chromium."""
import gzip
import json
from pathlib import Path

import pytest

import data
import evaluate
import measure
from worlds import explore, miniwob
from worlds.miniwob import IN_PLACE, Browser

SHIPPED = Path(__file__).parents[1] / "recordings/small.jsonl.gz"


def shipped():
    with gzip.open(SHIPPED, "rt") as file:
        return [json.loads(line) for line in file]


def test_half_a_surrogate_pair_is_written_and_read_again(tmp_path):
    """Guards: a page's goal with one, which UTF-8 cannot hold: the recording of hours ends with
    UnicodeEncodeError."""
    record = {"goal": "\ud800 \\\ud800 é\u2028", "pages": ["\udfff"]}
    (tmp_path / "t.jsonl").write_text(explore.as_line(record), encoding="utf-8")
    assert [row for _, row in data.read_jsonl(tmp_path / "t.jsonl")] == [record]


def test_the_shipped_recordings_can_be_made_again_to_the_letter():
    """Guards against a change of browser or explorer that nobody notices until the data are collected anew:
    for each task one trajectory of each eps."""
    records = {(record["task"], record["seed"]): record for record in shipped()}
    seeds = {task: sorted(seed for name, seed in records if name == task) for task in IN_PLACE}
    with Browser(timeout=30) as web:
        for n in range(len(explore.EPSILONS)):
            batch = [(task, seeds[task][len(seeds[task]) // 2 + n]) for task in IN_PLACE]
            assert explore.collect(web, batch, explore.Config.horizon) == [records[pair] for pair in batch]


def test_all_tasks_are_explored_and_evaluated_by_one_word(tmp_path, monkeypatch):
    """Guards against `--tasks all` that plays the recipe's twelve, or a task named all; a kill that costs
    more than its last try; and tries of two horizons in one file."""
    monkeypatch.setattr(miniwob, "ALL_TASKS", ("click-test", "use-spinner"))
    out = tmp_path / "all.jsonl.gz"
    explore.main(explore.Config(out=out, tasks=("all",), per_task=2, successes=0, most=2, horizon=2))
    with gzip.open(out, "rt") as file:
        found = [(record["task"], record["seed"]) for record in map(json.loads, file)]
    assert found == [("click-test", 0), ("click-test", 1), ("use-spinner", 0), ("use-spinner", 1)]

    # Killed in its last line, it plays that try again and no other. No file is emptied first.
    whole = gzip.decompress(out.read_bytes())
    out.unlink()
    (tmp_path / "all.jsonl.gz.partial").write_bytes(whole[:-9])
    played = []
    collect = explore.collect
    monkeypatch.setattr(explore, "collect", lambda web, batch, *rest: played.extend(batch) or
                        collect(web, batch, *rest))
    explore.main(explore.Config(out=out, tasks=("all",), per_task=2, successes=0, most=2, horizon=2))
    assert played == [("use-spinner", 1)] and gzip.decompress(out.read_bytes()) == whole

    with pytest.raises(ValueError, match="played with another horizon: give another --out"):
        explore.main(explore.Config(out=out, tasks=("all",), per_task=3, successes=0, most=3, horizon=6))

    def asked(tasks, seeds):
        raise ValueError(f"{tasks} {list(seeds)}")

    monkeypatch.setattr(measure, "real_starts", asked)
    with pytest.raises(ValueError, match="'click-test', 'use-spinner'. .1000000."):
        evaluate.run(evaluate.Config(checkpoint="nowhere", tasks=("all",), seeds="1000000:1"))
