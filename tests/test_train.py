"""Claims about train.py. The models are conftest's `taught`, which acts, dreams and judges in its web."""
import copy
import itertools
import json
import math
import random
import re
import shutil
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from conftest import CountingPages, lines, small, written
from helpers.dreams import count, kind, script, who
from helpers.killed import shot
from helpers.processes import command
from helpers.scores import own_logits
from ranks import rollouts_of

import distributed
import gspo
import lm
import train
from config import Train, UserError

# ---- one update --------------------------------------------------------------------------------------------

STEPS = Train(minibatches=3, clip_norm=1e9, eps_low=0.03, eps_high=1.0, temperature=0.7)
ADVANTAGES = torch.tensor([-0.6, 0.8, -0.4, 0.8, 1.1, -0.5, 0.6, -1.1, 0.9])


def naive_logps(model, turn):
    """(n,), from the model's own logits of one turn."""
    logits = own_logits(model, turn.prompt_ids + turn.completion_ids)[len(turn.prompt_ids) - 1 : -1] / 0.7
    return logits.log_softmax(-1)[range(len(turn.completion_ids)), turn.completion_ids]


@pytest.mark.parametrize("tokens", [40, 10_000])
def test_a_step_is_autograd_of_gspo_loss_on_the_whole_minibatch(model, tokens, monkeypatch):
    """Guards NOTES 5.2, 5.6, 5.7, 5.9: turns or rows left out, a denominator for each microbatch, a mean over
    tokens, another temperature, eps_low and eps_high exchanged, old log-probs taken after the first step; a
    backward pass of what is clipped. The third minibatch has no advantage left, and steps even so."""
    rollouts, optimizer = rollouts_of(random.Random(26), 9), torch.optim.SGD(model.net.parameters(), 2.0)
    parts, advantages = train.split(9, 3, random.Random(5)), ADVANTAGES.clone()
    seen, learned, skipped = [], [], []
    advantages[parts[2]], first, token_logps = 0.0, copy.deepcopy(model.net.state_dict()), lm.token_logps
    optimizer.register_step_pre_hook(lambda *_: seen.append((
        copy.deepcopy(model.net.state_dict()), [p.grad.clone() for p in model.net.parameters()])))

    def noted(model, pairs, temperature):
        logp, rows = token_logps(model, pairs, temperature)
        if logp.requires_grad:  # what a backward pass runs through
            logp.register_hook(lambda _: learned.extend((len(seen), str(pair)) for pair in pairs))
        return logp, rows

    monkeypatch.setattr(lm, "token_logps", noted)
    train.update(model, optimizer, rollouts, advantages, replace(STEPS, tokens=tokens), random.Random(5))
    for k, (weights, gradient) in enumerate(seen):
        part, logps = parts[k], []
        turns = [(b, turn) for b, i in enumerate(part) for turn in rollouts[i].turns]
        for state in (first, weights):
            model.net.load_state_dict(state)
            logps.append(torch.cat([naive_logps(model, turn) for _, turn in turns]))
        index = torch.tensor([b for b, turn in turns for _ in turn.completion_ids])
        given = logps[1], logps[0].detach(), index, advantages[part], 0.03, 1.0
        loss, _ = gspo.gspo_loss(*given)
        for got, want in zip(gradient, torch.autograd.grad(loss, list(model.net.parameters()))):
            assert (got - want).abs().max() < 3e-6 * max(1.0, float(want.abs().max()))
        pulls = gspo.gspo_coefficients(*given)[0].split([len(turn.completion_ids) for _, turn in turns])
        every = [str(tuple(turn[:2])) for _, turn in turns]
        wanted = [pair for pair, pull in zip(every, pulls) if pull.any()]
        assert sorted(pair for at, pair in learned if at == k) == sorted(wanted)
        skipped.append(len(every) - len(wanted))
    assert skipped == [0, 1, 6], "another example: it has to clip"


@pytest.mark.parametrize("count, parts", [(7, [3, 2, 2]), (2, [1, 1])])
def test_ratios_are_1_until_the_weights_move_and_each_rollout_is_learned_once(model, count, parts):
    """Guards NOTES 5.1: old log-probs of another padding (a ratio of 1.0001 is a third of the paper's clip).
    In bf16, where padding shows most. An empty minibatch."""
    rollouts, seen, model.compute = rollouts_of(random.Random(26), count), [], torch.bfloat16
    train.update(model, torch.optim.SGD(model.net.parameters(), 0.0), rollouts, torch.arange(1.0, count + 1),
                 replace(STEPS, tokens=300), random.Random(0),
                 lambda *given: seen.append(given) or gspo.gspo_coefficients(*given))
    assert [len(given[3]) for given in seen] == parts
    assert sorted(torch.cat([given[3] for given in seen])) == list(range(1, count + 1))
    unmoved = {"clip_frac": 0, "ratio_mean": 1, "ratio_max": 1, "abs_log_ratio": 0}
    assert [gspo.gspo_coefficients(*given)[1] for given in seen] == [unmoved] * len(parts)


def test_a_sampler_that_is_too_far_off_ends_the_run_before_anything_is_learned(model):
    """Guards: a weight sync that failed, or a broken sampler. An expert's turns, which nobody sampled, do not
    count."""
    rollouts, optimizer = rollouts_of(random.Random(26), 9), torch.optim.SGD(model.net.parameters(), 0.1)

    def learn(off):
        for row in rollouts[3:]:  # the first three nobody sampled
            row.turns = [turn._replace(logps=(naive_logps(model, turn) + off).tolist()) for turn in row.turns]
        return train.update(model, optimizer, rollouts, ADVANTAGES, STEPS, random.Random(0))

    for off in (-0.11, math.nan):
        with pytest.raises(UserError, match=r"differ by \S+ a token .*Nothing was learned"):
            learn(off)
    assert all(p.grad is None for p in model.net.parameters())
    assert learn(0.09)["sampler_gap"] == pytest.approx(0.09, abs=1e-4)


# ---- a run -------------------------------------------------------------------------------------------------

def left(config: Train) -> tuple:
    """What a run leaves."""
    return (lines(config), lines(config, "dreams"), written(config),
            sorted(path.name for path in Path(f"{config.out}.run/checkpoint").iterdir()))


def test_a_run_that_dies_again_and_again_is_bit_for_bit_the_run_that_does_not(taught, tmp_path):
    """Guards NOTES 5.13: seeds that depend on the process, an optimizer that begins anew, half a checkpoint,
    lines that stand twice or are cut in half; nan in all weights. Real processes, real kill -9: in the first
    dreams; before a checkpoint; between two GSPO steps after it, where a gradient is then nan once; while
    the second checkpoint is written; before the policy is."""
    config, steps = small(tmp_path, taught), itertools.count()
    work = lambda loss=gspo.gspo_coefficients: train.train(config, env=CountingPages(), loss=loss)
    work()
    wanted, files = left(config), Path(f"{config.out}.run")
    assert [row["update"] for row in wanted[0]] == [0, 1, 2, 3, 4] and wanted[3] == ["step-2", "step-4"]
    assert sum(row.get("grad_norm", 0) > 0 for row in wanted[0]) >= 3, "or equal would mean nothing"
    for folder in (files, config.out):
        shutil.rmtree(folder)

    def broken(*given):
        coefficients, metrics = gspo.gspo_coefficients(*given)
        return coefficients * (math.nan if next(steps) == 1 else 1), metrics

    for place, name, call in ((lm, "_sample_batch", 7), (distributed, "save_checkpoint", 1),
                              (torch.optim.AdamW, "step", 6), (torch, "save", 2), (lm, "save", 1)):
        shot(work, place, name, call)
        assert not Path(config.out, "model.safetensors").exists()
        for file in files.glob("*s.jsonl"):
            file.write_text(file.read_text() + '{"update": 2, "dream_succ')  # a line that is half written
        if name == "step":
            with pytest.raises(UserError, match="norm is nan"):
                work(broken)
    for _ in "ab":  # the second finds all done
        work()
        assert left(config) == wanted


def test_dreams_teach_the_policy(taught, tmp_path):
    """Guards: a gradient of the other sign, advantages of other rows, weights that are not the sampler's. At
    first More or Done is pressed by chance: a quarter of the dreams succeeds, or half from page 1."""
    config = small(tmp_path, taught, updates=12, group_size=16, expert_fraction=0.0, lr=5e-4,
                   evaluate_every=0)
    train.train(config)
    success = [row["dream_success"] for row in lines(config)[:-1]]
    assert sum(success[:2]) / 2 < 0.6 and sum(success[-2:]) / 2 > 0.85


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_groups_are_dreamed_or_real_and_what_is_handed_in_is_used(taught, tmp_path, scripted, share):
    """Guards: a chance that is not the groups'; a world model, a judge or their folders where all is real; a
    browser where all is dreamed; keys of metrics.jsonl that the docstring does not explain, or no more."""
    config = small(tmp_path, taught, world_model="nowhere", judge="nowhere", real_fraction=share, updates=3,
                   evaluate_every=3 if share else 0)
    judged = lambda prompt: f"so.\nCOMPLETED: {'YES' if count(prompt) == 1 else 'NO'}"
    sampler, web, learned, kinds = scripted(script(judge=judged)), CountingPages(), [], defaultdict(set)
    dreamed = {"world_model": who(sampler).world_model, "judge": who(sampler).judge} if share < 1 else {}
    train.train(config, env=web if share else None, **dreamed,
                loss=lambda *given: learned.extend(given[3].tolist()) or gspo.gspo_coefficients(*given))
    for row in lines(config, "dreams"):
        kinds[row["update"], row["group"]] |= set() if row["expert"] else {row["real"]}
    assert sorted(set(map(tuple, kinds.values()))) == [(False,)] * (share < 1) + [(True,)] * (share > 0)
    rows = lines(config)
    assert len(learned) == sum(row.get("learned", 0) for row in rows) > 0
    assert set(map(kind, sampler.prompts)) == ({"world", "judge"} if share < 1 else set())
    assert (sum(row.get("real_steps", 0) for row in rows) > 0) is (share > 0)
    if share == 0.5:
        explained = train.__doc__.split("metrics.jsonl")[1]
        names = ", ".join(re.findall(r"^    (\w[\w, ]*?)(?:  |$)", explained, re.MULTILINE)).split(", ")
        logged = map(json.loads, Path(f"{config.out}.run/metrics.jsonl").read_text().splitlines())
        assert set(names) == set().union(*logged)


def test_evaluation_is_greedy_on_dev_seeds_and_pages_that_hang_do_not_count(taught, tmp_path, monkeypatch):
    """Guards: a curve on pages that were learned from, or of rollouts that were sampled. Two requests with
    one seed, in an update or in two: they would sample the same."""
    asked, generate, dev = defaultdict(list), lm.LM.generate, [1000007, 1000008, 1000009]
    monkeypatch.setattr(lm.LM, "generate", lambda model, prompts, most, temperature, seeds: (
        asked[temperature].extend(seeds), generate(model, prompts, most, temperature, seeds))[1])
    # Page 2 hangs, and is on the way from page 0 or 1. Within three steps all else pays.
    config = small(tmp_path, taught, updates=2, evaluate_seeds="1000007:3", real_fraction=1.0,
                   expert_fraction=0.0, seed=1, discard_limit=1.0, evaluate_every=3)
    train.train(config, env=(web := CountingPages(end=3, cut=2)))
    seeds = [env.start.seed for env in web.envs]
    learned = [seed for seed in seeds if seed not in dev]
    assert {*learned} <= {0, 1} and len(learned) == 24 and seeds[:3] == dev == sorted({*seeds[-3:]})
    assert lines(config)[-1] == {"update": 2, "real_success": 1.0}
    assert any(env.n == 2 and env.taken for env in web.envs[-4:]), "or nothing hung"
    assert asked.keys() == {0.0, 1.0} and len(asked[1.0]) == len(set(asked[1.0])) > 24


def test_a_run_that_discards_most_of_its_dreams_stops_and_says_why(taught, tmp_path, scripted):
    """Guards: a night in which nobody imagines a page. Experts' rollouts, here half of all, are no dreams."""
    config = small(tmp_path, taught, expert_fraction=0.5, discard_limit=0.95, evaluate_every=0)
    lost = who(scripted(script(world=lambda prompt: "nonsense"))).world_model
    with pytest.raises(UserError, match=r"(\d+) of \1 rollouts discarded: {'world model: unreadable': \1}"):
        train.train(config, world_model=lost)
    assert not lines(config)


# ---- settings ----------------------------------------------------------------------------------------------

def test_a_checkpoint_of_another_config_is_refused_and_what_changes_no_update_may_change(taught, tmp_path):
    """Guards: a run that goes on with another learning rate, other dreams, or other weights by the same name;
    one that ran out of memory or of updates, and cannot go on; a name that is no setting."""
    shutil.copytree(taught, judge := tmp_path / "judge")
    train.train(config := small(tmp_path, taught, updates=2, judge=str(judge), evaluate_every=0))
    may = {"updates": 3, "tokens": 300, "checkpoint_every": 1, "discard_limit": 0.9, "context": 255}
    assert may.keys() < set(train.MAY_CHANGE) < {field.name for field in fields(Train)}
    for other in ({"lr": 0.5}, {"seed": 1}, {"real_fraction": 0.25, "group_size": 5}):
        with pytest.raises(UserError, match=rf"another config \({min(other)} was .*--out"):
            train.train(replace(config, **other), env=CountingPages())
    train.train(config := replace(config, **may))
    assert [row["update"] for row in lines(config)] == [0, 1, 2, 3]
    weights = judge / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match=r"another config \(what stands at judge was"):
        train.train(config)


@pytest.mark.parametrize("words, says", [
    ("--minibatches 1", "minibatches"), ("--learning-rat 1", "--learning-rat"), ("--recorded no.gz", "no.gz"),
    ("--groups 0", "--groups"), ("--context 9999 --policy {0} --judge b", "holds no model"),
    ("--evaluate-seeds 2000000:1 --policy {0} --world-model {0} --judge {0}", "2000000:1")])
def test_a_wrong_setting_ends_a_command_with_one_line(taught, tmp_path, capsys, words, says):
    """Guards: a traceback for what the user can mend; an unknown flag that is dropped; one GSPO step a batch
    (NOTES 5.1); test seeds that are evaluated on; a folder that is missed after minutes of loading."""
    code = command(train, "laptop", *words.format(taught).split(), "--out", tmp_path / "x")
    errors = capsys.readouterr().err
    assert says in (errors if code == "2" else code) and "Traceback" not in errors and "\n" not in code
