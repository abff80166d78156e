"""Claims about worlds/explore.py, in a real Chromium."""
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import act, base_folder
from helpers.pages import collect

import data
import lm
from config import UserError
from worlds import explore, miniwob
from worlds.explore import Explore
from worlds.miniwob import LAPTOP, Browser

SHIPPED = Path(__file__).parents[1] / "recordings/small.jsonl.gz"


def read(file):
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_the_shipped_recordings_can_be_made_again_to_the_letter():
    """Guards against a change of browser or explorer that nobody notices until the data are collected anew:
    for each task one trajectory of each eps."""
    records = {(record["task"], record["seed"]): record for record in read(SHIPPED)}
    seeds = {task: sorted(seed for name, seed in records if name == task) for task in LAPTOP}
    with Browser(timeout=30) as web:
        for n in range(len(explore.EPSILONS)):
            batch = [(task, seeds[task][len(seeds[task]) // 2 + n]) for task in LAPTOP]
            for made, pair in zip(collect(web, batch, Explore.horizon), batch, strict=True):
                assert {**made, "eps": 0, "by": 0} == {**records[pair], "eps": 0, "by": 0}


def test_a_killed_recording_goes_on_and_ends_as_the_same_file(tmp_path, monkeypatch):
    """Guards: a kill that costs more than its last episode; episodes of two horizons in a file; one word for
    many tasks that is played as a task."""
    monkeypatch.setattr(miniwob, "ALL_TASKS", ("click-test", "use-spinner"))
    out, played, whole = tmp_path / "all.jsonl.gz", [], []
    config = Explore(out=out, tasks=("all",), per_task=2, successes=0, most=2, horizon=2)
    explore.record(config)
    whole = gzip.decompress(out.read_bytes())
    pairs = [(task, seed) for task in ("click-test", "use-spinner") for seed in (0, 1)]
    assert [(one["task"], one["seed"]) for one in read(out)] == pairs
    out.rename(tmp_path / "all.jsonl.gz.partial").write_bytes(whole[:-9])
    play = explore.explore
    monkeypatch.setattr(explore, "explore", lambda env, start, horizon: (
        played.append((start.task, start.seed)), play(env, start, horizon))[1])
    explore.record(config)
    assert played == pairs[3:] and gzip.decompress(out.read_bytes()) == whole
    explore.record(replace(config, per_task=3, most=3))
    assert played[1:] == [("click-test", 2), ("use-spinner", 2)] and len(read(out)) == 6
    with pytest.raises(UserError, match="by the explorer, 2 steps, not the explorer, 6 steps; give another"):
        explore.record(replace(config, horizon=6))


def test_a_policy_records_what_the_explorer_would(tmp_path, monkeypatch):
    """Guards: episodes that a reader refuses; a policy whose every try of a seed is another, so that a killed
    recording goes on with others; its own nonsense left out: that is a failure. The first token says what it
    does."""
    def pressing(model, *asked):
        assert asked[1:3] == (16, 0.5)
        does = lambda n: act(f"click [{1 + n % 2}]") if n % 3 else "nonsense"
        return [replace(one, text=does(one.ids[0]), truncated=False) for one in generate(model, *asked)]

    generate, found = lm.LM.generate, []
    monkeypatch.setattr(lm.LM, "generate", pressing)
    lm.save(model := lm.load(base_folder(), 2048), tmp_path / "policy")
    config = Explore(tasks=("click-test", "click-test-2"), per_task=6, most=6, successes=0, horizon=2,
                     pages=5, policy=str(tmp_path / "policy"), temperature=0.5, max_new_tokens=16,
                     context=2048)
    for name in ("a", "b"):
        explore.record(config := replace(config, out=tmp_path / f"{name}.jsonl.gz"))
        found.append(data.read_trajectories(config.out))
    assert found[0] and [t.steps for t in found[0]] == [t.steps for t in found[1]]
    assert {(t.task, t.seed) for t in found[0]} == {(task, n) for task in config.tasks for n in range(6)}
    for t in found[0]:
        assert t.reward <= t.terminated and not (t.terminated and t.truncated) and t.goal and t.final_page
        assert all(str(step.action) in ("click [1]", "click [2]") for step in t.steps)
    assert {t.reward for t in found[0]} == {0, 1} and not all(t.steps for t in found[0]), "or it shows little"
    model.model.model.norm.weight.data += 0.5
    lm.save(model, tmp_path / "policy")  # another, by the same name
    with pytest.raises(UserError, match="at 0.5, 2 steps, not .* at 0.5, 2 steps; give another --out"):
        explore.record(config)
