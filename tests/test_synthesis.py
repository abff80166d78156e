"""Claims about rivals/synthesis.py: what the judge calls a success is cloned, and nothing else; a killed run
goes on."""

import dataclasses
import json

import pytest
from conftest import record, recorded, start
from helpers.killed import goes_on, killed
from helpers.runs import SMALL, typed

import dream
import finetune
from data import Step, parse_action
from finetune import fit
from policy import TokenTrajectory
from rivals import synthesis


def dreamed(reward: float, errors=("", ""), **more) -> TokenTrajectory:
    steps = [Step("", "page", "", parse_action("click [1]"), (), error=error) for error in errors]
    pairs = [([1], [10 + k]) for k in range(len(errors))]
    return TokenTrajectory(start(), steps, pairs, [[], []], "page", reward, True, **more)


def test_only_what_the_judge_called_a_success_is_cloned():
    """Guards against failures, dropped dreams and refused steps among what is cloned."""
    some = [dreamed(1.0), dreamed(0.0), dreamed(1.0, dropped="judge: cut off"), dreamed(1.0, expert=True),
            dreamed(1.0, errors=("covered", ""))]
    wanted = [([1], [10]), ([1], [11]), ([1], [11])]
    assert synthesis.successes(some) == [("count", pair) for pair in wanted]


@pytest.mark.parametrize("wrong", [
    {"rounds": 0}, {"rounds": 5, "updates": 4}, {"world": "real"}, {"sampler": "vllm"}, {"epochs": 1.0},
    {"dreaming": dream.Config(judge="current")}])
def test_settings_that_cannot_be_are_refused(wrong):
    """Guards against a round without dreams, a flag of train.py that would be ignored, and a judge that is
    still the agent of the first round."""
    with pytest.raises(ValueError, match="give"):
        dataclasses.replace(synthesis.settings(), **wrong)


def test_rounds_go_on_where_they_were_killed_and_cost_what_they_sampled(taught, tmp_path, monkeypatch):
    """Guards: rounds that dream the same or again, an agent that is cloned from its last round alone, tokens
    that a kill forgets. The agent presses More or Done, with even chances; the judge calls Done on page 1 a
    success: of what is cloned, More stands on page 0 and Done on page 1."""
    folder, learned = tmp_path / "run", []
    record(tmp_path / "recorded.jsonl", [recorded(["click [1]", "click [2]"]),
                                         recorded(["click [2]"], seed=1, reward=0)])
    flags = SMALL | {"policy": taught, "world-model": taught, "judge-model": taught,
                     "trajectories": tmp_path / "recorded.jsonl",
                     "out": folder / "agent", "updates": 2, "rounds": 2, "dreaming.tasks": 2,
                     "dreaming.group": 4, "sft.tokens": 400, "sft.lr": 0.001}

    def watched(model, pairs, *given, **more):
        learned.append([model.tokenizer.decode(completion) for _, completion in pairs])
        return fit(model, pairs, *given, **more)

    def left():
        report = json.loads((folder / "agent/training.json").read_text())
        return (folder / "agent/model.safetensors").read_bytes(), report["tokens_sampled"]

    monkeypatch.setattr(finetune, "fit", watched)
    straight = goes_on(folder, lambda: typed(monkeypatch, synthesis.main, **flags),
                       [lambda: killed(finetune, "fit", 2)], left)
    first, second, *others = learned
    assert second[: len(first)] == first and len(second) > len(first) and others == [first, second]
    mores, dones = (sum(f"click [{bid}]" in text for text in second) for bid in (1, 2))
    assert dones == mores > 0 and mores + dones == len(second)  # from page 0 on, More leads to page 1
    report = json.loads((straight / "agent/training.json").read_text())
    lines = [json.loads(line) for line in (straight / "agent.run/metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [0, 1] and report["dreams"] == 16
    assert report["tokens_sampled"] == sum(line["tokens_sampled"] for line in lines) > 0
