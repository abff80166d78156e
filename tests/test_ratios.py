"""Claims about rivals/ratios.py. Everything is float64.

The references are the papers' objectives written out once more, with autograd through min and clip: they
share no line with the coefficients, which are their gradients by hand.
"""

from dataclasses import replace

import pytest
import torch
from conftest import record, recorded
from helpers.killed import goes_on, killed
from helpers.runs import SMALL, in_counting_web, logged, typed
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dream
import gspo
import train
import update
from rivals import ratios

steady = settings(deadline=None, max_examples=60, derandomize=True)


def clipped(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def objective(name, logp, old, index, advantages, low, high):
    """J of the paper, one loop for every sum."""
    count, total = len(advantages), logp.new_zeros(())
    for i in range(count):
        new, before = logp[index == i], old[index == i]
        if not len(new):
            continue
        if name == "grpo":
            total = total + clipped((new - before).exp(), advantages[i], low, high).mean() / count
        if name == "dapo":
            total = total + clipped((new - before).exp(), advantages[i], low, high).sum() / len(logp)
        if name == "reinforce":
            total = total + (advantages[i] * new).sum() / count
        if name == "gspo-token":
            s = (new - before).mean().exp().detach() * new.exp() / new.exp().detach()
            total = total + clipped(s, advantages[i], low, high).mean() / count
    return total


@st.composite
def minibatches(draw):
    """(logp, old_logp, trajectory, advantages): one to four trajectories of up to six tokens, in any order;
    log-ratios from -1 to 1, where clips of .2 act on both sides."""
    count = draw(st.integers(1, 4))
    index = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    floats = lambda low, high, size: torch.tensor(
        draw(st.lists(st.floats(low, high), min_size=size, max_size=size)), dtype=torch.float64)
    old = floats(-5, 0, len(index))
    return old + floats(-1, 1, len(index)), old, torch.tensor(index), floats(-2, 2, count)


@pytest.mark.parametrize("name", ratios.RULES)
@pytest.mark.parametrize("eps", [(0.2, 0.2), (0.2, 0.28), (0.03, 0.04)])
@steady
@given(minibatch=minibatches())
def test_the_coefficients_are_the_gradient_of_the_papers_objective(name, eps, minibatch):
    """Guards: a clip on the wrong side, eps_low and eps_high exchanged, a mean over tokens in GRPO and over
    trajectories in DAPO, a lost |y_i|, a ratio in REINFORCE."""
    logp, old, index, advantages = minibatch
    of_trajectories = torch.stack([(logp - old)[index == i].mean() for i in range(len(advantages))])
    for log_ratio in ((logp - old), of_trajectories):  # at a kink both one-sided gradients are right
        for edge in (1 - eps[0], 1 + eps[1]):
            assume(not ((log_ratio.exp() - edge).abs() < 1e-9).any())
    logp.requires_grad_()
    expected, = torch.autograd.grad(objective(name, logp, old, index, advantages, *eps), logp)
    found, _ = ratios.RULES[name](logp.detach(), old, index, advantages, *eps)
    assert torch.allclose(found / len(advantages), expected, rtol=0, atol=1e-12)


def test_the_numbers_of_two_trajectories_by_hand():
    """Guards: references that are wrong as the code is. Of the good trajectory y_0 (A = 1) the second token
    is .5 likelier in logs: e^.5 = 1.65 > 1.28, clipped. The bad y_1 (A = -1) has one token, which is likelier
    too: min() keeps it. B = 2, N = 3, |y| = 2 and 1; log s_0 = .25, s_0 = 1.284 > 1.28."""
    logp, old = torch.tensor([0.0, 0.5, 0.5]).double(), torch.zeros(3).double()
    given = logp, old, torch.tensor([0, 0, 1]), torch.tensor([1.0, -1.0]).double(), 0.2, 0.28
    e = 1.6487212707001282
    for name, wanted in {"grpo": [1 / 2, 0, -e], "dapo": [2 / 3, 0, -e * 2 / 3], "reinforce": [1, 1, -1],
                         "gspo-token": [0, 0, -e]}.items():
        found, metrics = ratios.RULES[name](*given)
        assert found.tolist() == pytest.approx(wanted, abs=1e-12), name
        shares = {"reinforce": 0, "gspo-token": 1 / 2}
        assert metrics["clip_frac"] == pytest.approx(shares.get(name, 1 / 3)), name


@steady
@given(minibatch=minibatches())
def test_gspo_token_is_gspo_and_clips_each_token_by_its_own_advantage(minibatch):
    """Guards: a row of the table that says something else than its paper's section 4.3; A_it that is read
    once a trajectory: s_0 = e^.1 is over 1.04, so only the token with A > 0 is clipped."""
    ours, metrics = gspo.gspo_coefficients(*minibatch, 0.03, 0.04)
    theirs, told = ratios.gspo_token_coefficients(*minibatch, 0.03, 0.04)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12) and metrics == told
    logp, old, index = torch.tensor([0.1, 0.1]).double(), torch.zeros(2).double(), torch.tensor([0, 0])
    found, _ = ratios.gspo_token_coefficients(logp, old, index, torch.ones(1).double(), 0.03, 0.04,
                                              of_tokens=torch.tensor([1.0, -1.0]).double())
    assert found.tolist() == pytest.approx([0, -1.1051709180756477 / 2])


@steady
@given(rewards=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=9))
def test_the_baseline_of_reinforce_is_what_the_others_got(rewards):
    """Guards: a baseline that contains the trajectory's own reward, which biases it, or another group's."""
    groups = [group for group, _ in rewards]
    given = torch.tensor([r for _, r in rewards], dtype=torch.float64), torch.tensor(groups)
    found = ratios.others_baseline(*given)
    for i, (group, reward) in enumerate(rewards):
        others = [r for j, (g, r) in enumerate(rewards) if g == group and j != i]
        wanted = reward - sum(others) / len(others) if others else 0.0
        assert float(found[i]) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name", ratios.RULES)
def test_what_gspo_refuses_no_other_ratio_takes(name):
    """Guards against nan that becomes a gradient, and against old log-probs with gradients."""
    good = torch.zeros(2), torch.zeros(2), torch.tensor([0, 1]), torch.ones(2)
    for k, wrong in ((0, torch.tensor([0.0, float("nan")])), (2, torch.tensor([0, 2])),
                     (1, torch.zeros(2, requires_grad=True))):
        with pytest.raises(ValueError):
            ratios.RULES[name](*good[:k], wrong, *good[k + 1 :], 0.2, 0.2)

# ---- redrawn groups ----------------------------------------------------------------------------------------

def batches(*useful):
    """make(k) gives a batch of three groups of two, of which those of useful[k] are kept, and notes k."""
    asked = []

    def make(k):
        asked.append(k)
        rows = [f"{k}.{group}.{row}" for group in range(3) for row in range(2)]
        kept = [row for row in rows if int(row.split(".")[1]) in useful[k]]
        taught = [("task", group in useful[k]) for group in range(3)]
        return dream.Batch(rows, kept, [int(row.split(".")[1]) for row in kept], taught)

    return make, asked


def test_groups_are_redrawn_until_there_are_enough_and_no_more_are_learned_from():
    """Guards: groups of two draws that become one by their number, an update larger than others, uncounted
    dreams."""
    config = replace(ratios.settings("dapo").dreaming, tasks=3, group=2)
    make, asked = batches({1}, set(), {0, 1, 2}, {0})
    batch = ratios.redraw(make, config)
    assert asked == [0, 1, 2]
    assert batch.kept == ["0.1.0", "0.1.1", "2.0.0", "2.0.1", "2.1.0", "2.1.1"]
    assert batch.groups == [1, 1, 6, 6, 7, 7]  # groups 0 to 2 of the first draw, 3 to 5, 6 to 8
    assert len(batch.trajectories) == 18
    assert [useful for _, useful in batch.useful] == [False, True, *[False] * 4, *[True] * 3]
    make, asked = batches(*[set()] * 20)
    assert ratios.redraw(make, config).kept == [] and len(asked) == ratios.DRAWS

# ---- through train.py's loop -------------------------------------------------------------------------------

def test_a_run_that_was_killed_goes_on_as_the_run_that_was_not(taught, tmp_path, monkeypatch):
    """Guards: redrawn batches that depend on more than (seed, update, draw), draws that are the same dreams
    again, a folder in which another ratio goes on, advantages that never reach the loop."""
    in_counting_web(monkeypatch)
    folder, file, ratio = tmp_path / "run", tmp_path / "recorded.jsonl", "dapo"
    record(file, [recorded(["click [1]", "click [2]"]), recorded(["click [2]"], seed=1, reward=0)])
    flags = SMALL | {"policy": taught, "world-model": taught, "judge-model": taught,
                     "out": folder / "agent", "trajectories": file,
                     "evaluate-every": 0, "updates": 2, "lr": 0.0005, "checkpoint-every": 1, "minibatches": 2,
                     "dreaming.tasks": 2, "dreaming.group": 2}
    command = lambda: typed(monkeypatch, ratios.main, ratio, **flags)
    seeds, batch = [], dream.batch
    monkeypatch.setattr(dream, "batch", lambda *given: seeds.append(given[3]) or batch(*given))
    straight = logged(goes_on(folder, command, [lambda: killed(update, "update", 2)], lambda: logged(folder)))
    of_each = [len(row.get("groups", ())) // 2 for row in straight]  # each draw has two groups
    draws = sum(of_each)
    assert len(set(seeds[:draws])) == draws > 2 and [row["update"] for row in straight] == [0, 1, 2]
    assert all(row["tokens_sampled"] > 0 for row in straight[:2])
    assert all(1 <= draws_of_one <= ratios.DRAWS for draws_of_one in of_each[:2])
    ratio = "gspo-token"
    with pytest.raises(SystemExit, match="ratio"):
        command()
    ratio, flags["out"] = "reinforce", tmp_path / "other/agent"
    seen, baseline = [], ratios.others_baseline
    monkeypatch.setattr(ratios, "others_baseline", lambda *given: seen.append(given) or baseline(*given))
    command()
    learned = [row for row in logged(tmp_path / "other")[:2] if row["kept"]]
    assert [len(rewards) for rewards, _ in seen] == [row["kept"] for row in learned] and seen
    assert {row["clip_frac"] for row in learned} == {0.0}


def test_each_name_is_its_own_rule_advantages_and_draws(monkeypatch):
    """Guards: a row of the table that is GSPO under another name."""
    seen = {}
    monkeypatch.setattr(train, "train",
                        lambda config, rule, **more: seen.update({config.ratio: (rule, more)}))
    for name in ratios.RULES:
        ratios.learn(ratios.settings(name))
    assert seen == {
        "grpo": (ratios.grpo_coefficients, {}), "dapo": (ratios.dapo_coefficients, {"load": ratios.redrawn}),
        "reinforce": (ratios.reinforce_coefficients, {"advantages_of": ratios.others_baseline}),
        "gspo-token": (ratios.gspo_token_coefficients, {})}
