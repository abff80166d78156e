"""Claims about rivals/offline.py: its losses are the papers' formulas in float64, and what it clones is what
the recordings' rewards say."""

import functools
import json
import math

import pytest
import torch
from conftest import record, recorded, tiny_lm
from helpers.runs import typed
from helpers.scores import each_step, score
from hypothesis import given, settings
from hypothesis import strategies as st

import finetune
import lm
from finetune import FineTune, fit, schedule
from rivals import offline

steady = settings(deadline=None, max_examples=60, derandomize=True)
chances = st.floats(0.01, 0.99)

# ---- the formulas ------------------------------------------------------------------------------------------

@steady
@given(rows=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), chances), min_size=1, max_size=8),
       beta=st.floats(0.2, 3))
def test_awr_weighs_each_step_by_the_exponential_of_its_standardised_advantage(rows, beta):
    """Guards: a weight of the value alone, the sample's std in place of the population's, a beta that
    multiplies."""
    found = offline.awr_weights(*(torch.tensor(column, dtype=torch.float64) for column in zip(*rows)), beta,
                                20.0)
    a = [r - v for r, v in rows]
    mean = sum(a) / len(a)
    std = math.sqrt(sum((x - mean) ** 2 for x in a) / len(a))
    wanted = [min(20.0, math.exp((x - mean) / std / beta)) if std >= 1e-6 else 1.0 for x in a]
    assert found.tolist() == pytest.approx(wanted, rel=1e-9)


@steady
@given(values=st.lists(chances, min_size=1, max_size=6), reward=st.sampled_from([0.0, 1.0]), decay=chances)
def test_digirls_step_advantage_is_its_papers(values, reward, decay):
    """Guards: an exponent that counts from the beginning, a value behind the end, a reward at every step."""
    wanted, steps = [], len(values)
    for h in range(1, steps + 1):
        after = values[h] if h < steps else reward  # where the steps end the reward is paid
        trust = decay ** (steps - h)
        wanted.append(trust * reward + (1 - trust) * (after - values[h - 1]))
    found = offline.digirl_advantages(reward, torch.tensor(values, dtype=torch.float64), decay)
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("share, rewards, values, kept", [
    # Two of the four, by r - V(s_1) = .9, .5, -.2, -.1. Their A^step, lambda .5: (.5 + .5 (.5 - .1), 1) =
    # (.7, 1) > 1/10; (.5 + .5 (.3 - .5) = .4, 1). The last's could be .5 (.9 - .1) = .4: not of the two.
    (0.5, (1, 1, 0, 0), ([0.1, 0.5], [0.5, 0.3], [0.2, 0.1], [0.1, 0.9]), "11 11 00 00"),
    (1.0, (1, 1, 0, 0), ([0.1, 0.5], [0.5, 0.3], [0.2, 0.1], [0.1, 0.9]), "11 11 00 10"),
    (0.5, (1, 1), ([0.9], [0.2]), "0 1"),  # of two successes the one that was expected less
    (0.5, (1,), ([0.95, 0.1],), "01")])  # (.5 + .5 (.1 - .95)) = .075, under 1/10
def test_digirl_keeps_the_good_steps_of_the_trajectories_that_did_better_than_was_thought(
        share, rewards, values, kept):
    """Guards: a filter by the reward alone, and one whose threshold is 0."""
    found = offline.digirl_kept([*map(float, rewards)], [torch.tensor(v).double() for v in values],
                                offline.Config(share=share, decay=0.5, horizon=10))
    assert " ".join("".join(str(int(step)) for step in of_one) for of_one in found) == kept


@pytest.mark.parametrize("wrong", [{"decay": 1.5}, {"share": 0.0}, {"beta": 0.0}, {"horizon": 0}])
def test_impossible_settings_are_refused(wrong):
    """Guards against a division by 0 after minutes of fine-tuning."""
    with pytest.raises(ValueError, match="give a decay"):
        offline.Config(**wrong)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_weight_is_that_of_its_own_step_wherever_its_batch_puts_it(tokenizer, microbatches):
    """Guards: weights of another microbatch or step. At rate 0 the model stays as it is, so each step's loss
    is -sum w_i logp_i over its sequences, a target token."""
    pairs = [([5, 6, 7], [8 + k] * (k % 3 + 1)) for k in range(6)]
    settings = FineTune(lr=0.0, tokens=11, microbatches=microbatches)
    model, weights, totals = tiny_lm(tokenizer), torch.tensor([0.5, 0.0, 1.0, 3.0, 0.0, 7.0]), []
    logps = [float(logp.sum()) for logp in score(model, pairs)]
    loss = lambda logp, row, which: -(weights[list(which)][row] * logp).sum()
    with each_step(lambda n, total: totals.append(total)):
        fit(model, pairs, settings, loss=loss)
    steps = [[i for batch in step for i in batch]
             for step in schedule([len(p) + len(c) for p, c in pairs], settings)]
    assert totals == pytest.approx([-sum(float(weights[i]) * logps[i] for i in members)
                                    / sum(len(pairs[i][1]) for i in members) for members in steps], rel=1e-5)

# ---- whole -------------------------------------------------------------------------------------------------

def test_values_learn_the_outcome_and_each_method_clones_what_it_should(taught, tmp_path, monkeypatch):
    """Guards: failures that are cloned, values that do not know a good page, labels that are counted twice.
    Done on page 1 succeeded, and on page 0 it failed."""
    rows = [recorded(["click [1]", "click [2]"], seed=k) for k in range(4)]
    rows += [recorded(["click [2]"], seed=k + 4, reward=0) for k in range(4)]
    record(tmp_path / "recorded.jsonl", rows)
    learned = {}

    def watched(model, pairs, config, name="", **more):
        learned[name] = list(pairs)
        return fit(model, pairs, config, name, **more)

    monkeypatch.setattr(finetune, "fit", watched)
    flags = {"policy": taught, "trajectories": tmp_path / "recorded.jsonl", "context": 256, "sft.tokens": 400,
             "value.tokens": 400, "sft.lr": 0.003, "value.lr": 0.003, "value.microbatches": 1,
             "sft.epochs": 2}
    command = functools.partial(typed, monkeypatch, offline.main, **flags)
    command("digirl", **{"out": tmp_path / "agent", "share": 0.5, "value.epochs": 40})
    assert not list(tmp_path.glob("agent.*")), "its checkpoints can go"
    texts = {lm.load_tokenizer(taught).decode(completion) for _, completion in learned["digirl"]}
    assert any("click [1]" in text for text in texts) and len(learned["digirl"]) == 8
    report = json.loads((tmp_path / "agent/training.json").read_text())
    # Page 1 always succeeded, page 0 half of the time; a success has both pages, a failure page 0.
    assert report["V of successes"] > 0.6 and 0.2 < report["V of failures"] < 0.8
    assert report["labels"] == report["trajectories"] == 8 and report["successes"] == 4
    command("cloning", out=tmp_path / "clone", per_task=5)
    report = json.loads((tmp_path / "clone/training.json").read_text())
    assert report["labels"] == 5 and report["examples"] == len(learned["cloning"]) == 8
    command("awr", **{"out": tmp_path / "awr", "value.epochs": 2})
    assert len(learned["awr"]) == 12, "every step, by its weight"
