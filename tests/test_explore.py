"""Claims about worlds/explore.py, in a real Chromium."""
import gzip
import json
from pathlib import Path

import pytest
from conftest import act, tiny_lm

import data
import lm
from worlds import explore, miniwob
from worlds.miniwob import LAPTOP, Browser

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
    seeds = {task: sorted(seed for name, seed in records if name == task) for task in LAPTOP}
    with Browser(timeout=30) as web:
        for n in range(len(explore.EPSILONS)):
            batch = [(task, seeds[task][len(seeds[task]) // 2 + n]) for task in LAPTOP]
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



def test_a_policy_records_what_the_explorer_would(tokenizer, tmp_path, monkeypatch):
    """Guards: episodes that nothing can learn from, as a reader refuses them; a policy whose every try of a
    seed is another, so that a killed recording goes on with other episodes; its own nonsense left out: that
    is a failure. The policy has random weights, but for its text: it presses what stands at [1] or [2]."""
    lm.save(tiny_lm(tokenizer, context=2048), tmp_path / "policy")
    sample = lm.sample

    def pressing(model, prompts, max_new_tokens, temperature, seeds):
        assert (max_new_tokens, temperature) == (16, 0.5)
        drawn = sample(model, prompts, max_new_tokens, temperature, seeds)
        texts = [act(f"click [{1 + one.ids[0] % 2}]") if one.ids[0] % 5 else "nonsense" for one in drawn]
        return [lm.Sample(one.ids, one.logps, text, False) for one, text in zip(drawn, texts)]

    monkeypatch.setattr(lm, "sample", pressing)
    found = []
    for name in ("a", "b"):
        out = tmp_path / f"{name}.jsonl.gz"
        explore.main(explore.Config(
            out=out, tasks=("click-test", "click-test-2"), per_task=6, successes=0, most=6, horizon=2,
            pages=5, policy=str(tmp_path / "policy"), temperature=0.5, max_new_tokens=16, context=2048))
        found.append(data.read_trajectories(out))
    assert found[0] and [t.steps for t in found[0]] == [t.steps for t in found[1]]
    assert {(t.task, t.seed) for t in found[0]} == {
        (task, seed) for task in ("click-test", "click-test-2") for seed in range(6)}
    for t in found[0]:
        assert t.reward <= t.terminated and not (t.terminated and t.truncated) and t.goal and t.final_page
        assert all(str(step.action) in ("click [1]", "click [2]") for step in t.steps)
    assert {t.reward for t in found[0]} == {0, 1} and not all(t.steps for t in found[0]), "or it shows little"
    lm.save(tiny_lm(tokenizer, context=2048, seed=1), tmp_path / "policy")  # others, by the same name
    with pytest.raises(ValueError, match="played with another policy, temperature: give"):
        explore.main(explore.Config(out=out, tasks=("click-test",), per_task=6, successes=0, most=6,
                                    horizon=2, policy=str(tmp_path / "policy"), context=2048))
