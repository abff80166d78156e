"""Claims about train.py. The models are conftest's `taught`, which acts, dreams and judges in its web."""
import copy
import itertools
import json
import math
import random
import re
import shutil
import sys
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from conftest import CountingPages, lines, small, start, written
from helpers.dreams import count, kind, script, who
from helpers.killed import shot
from helpers.scores import own_logits

import distributed
import gspo
import lm
import sft
import train
from config import Train, UserError
from policy import Rollout, Turn

# ---- one update --------------------------------------------------------------------------------------------

STEPS = Train(minibatches=3, clip_norm=1e9, eps_low=0.03, eps_high=0.2, temperature=0.7)
ADVANTAGES = torch.tensor([-0.6, 0.8, -0.4, 0.8, 1.1, -0.5, 0.6, -1.1, 0.9])


def naive_logps(model, turn):
    """(n,), from the model's own logits of one turn."""
    logits = own_logits(model, turn.prompt_ids + turn.completion_ids)[len(turn.prompt_ids) - 1 : -1] / 0.7
    return logits.log_softmax(-1)[range(len(turn.completion_ids)), turn.completion_ids]


@torch.no_grad()
def rollouts_of(model, count):
    """Rollouts of one to three turns with random tokens. Every third is an expert's; the others carry what a
    sampler with the same weights gives."""
    rng, made = random.Random(15), []
    ids = lambda low, high: [rng.randrange(4, 600) for _ in range(rng.randrange(low, high))]
    for k in range(count):
        turns = [Turn(ids(3, 30), ids(1, 10), []) for _ in range(rng.randrange(1, 4))]
        if k % 3 < 2:
            turns = [turn._replace(logps=naive_logps(model, turn).tolist()) for turn in turns]
        made.append(Rollout(start(), turns=turns, expert=k % 3 == 2))
    return made


@pytest.mark.parametrize("tokens, low, high", [(40, 0.03, 0.2), (10_000, 0.03, 0.2), (10_000, 0.3, 1.0)])
def test_a_step_is_autograd_of_gspo_loss_on_the_whole_minibatch(model, tokens, low, high, monkeypatch):
    """Guards NOTES 5.2, 5.6, 5.7, 5.9: turns, rows or experts left out, a denominator for each microbatch, a
    mean over tokens, another temperature, eps_low and eps_high exchanged, old log-probs taken after the first
    step; a backward pass of what is clipped. The third minibatch has no advantage left, and steps even so. At
    clips of .3 and 1 the second goes back through the graph that it was scored with, for all but one."""
    rollouts, optimizer = rollouts_of(model, 9), torch.optim.SGD(model.net.parameters(), 2.0)
    order, advantages, seen, learned, clipped, measured = list(range(9)), ADVANTAGES.clone(), [], [], 0, []
    random.Random(5).shuffle(order)
    advantages[order[2::3]], first, token_logps = 0.0, copy.deepcopy(model.net.state_dict()), lm.token_logps
    optimizer.register_step_pre_hook(lambda *_: seen.append((
        copy.deepcopy(model.net.state_dict()), [p.grad.clone() for p in model.net.parameters()])))

    def noted(model, pairs, temperature):
        logp, rows = token_logps(model, pairs, temperature)
        if logp.requires_grad:  # what a backward pass runs through
            logp.register_hook(lambda _: learned.extend((len(seen), str(pair)) for pair in pairs))
        return logp, rows

    monkeypatch.setattr(lm, "token_logps", noted)
    config = replace(STEPS, tokens=tokens, eps_low=low, eps_high=high)
    metrics = train.update(model, optimizer, rollouts, advantages, config, random.Random(5))
    for k, (weights, gradient) in enumerate(seen):
        part, logps = order[k::3], []
        turns = [(b, turn) for b, i in enumerate(part) for turn in rollouts[i].turns]
        for state in (first, weights):
            model.net.load_state_dict(state)
            logps.append(torch.cat([naive_logps(model, turn) for _, turn in turns]))
        index = torch.tensor([b for b, turn in turns for _ in turn.completion_ids])
        loss, found = gspo.gspo_loss(logps[1], logps[0].detach(), index, advantages[part], low, high)
        ratio = gspo.mean_log_ratio(logps[1].detach(), logps[0].detach(), index, len(part))[0].exp()
        out = [not a or a > 0 and s > 1 + high or a < 0 and s < 1 - low
               for s, a in zip(ratio, advantages[part])]
        for got, want in zip(gradient, torch.autograd.grad(loss, list(model.net.parameters()))):
            assert (got - want).abs().max() < 1e-6 * max(1.0, float(want.abs().max()))
        wanted, whole = ({str(tuple(turn[:2])) for b, turn in turns if keep or not out[b]} for keep in (0, 1))
        kept = tokens > 40 and 3 * len(wanted) > 2 * len(whole)  # through the graph that scored them
        assert sorted(pair for at, pair in learned if at == k) == sorted(whole if kept else wanted)
        measured, clipped = [*measured, found], clipped + sum(out)
    assert len(seen) == 3 and clipped > 3, "another example: it has to clip"
    for name in found:
        wanted = (max if name == "ratio_max" else fmean)(found[name] for found in measured)
        assert metrics[name] == pytest.approx(wanted, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("count, parts", [(7, [3, 2, 2]), (2, [1, 1])])
def test_ratios_are_1_until_the_weights_move_and_each_rollout_is_learned_once(model, count, parts):
    """Guards NOTES 5.1: old log-probs of another padding (a ratio of 1.0001 is a third of the paper's clip).
    In bf16, where padding shows most. An empty minibatch."""
    rollouts, seen, model.compute = rollouts_of(model, count), [], torch.bfloat16
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
    rollouts, optimizer = rollouts_of(model, 9), torch.optim.SGD(model.net.parameters(), 0.1)

    def learn(off):
        shifted = [replace(one, turns=[turn._replace(logps=[logp + off for logp in turn.logps])
                                       for turn in one.turns]) for one in rollouts]
        return train.update(model, optimizer, shifted, ADVANTAGES, STEPS, random.Random(0))

    for off in (0.11, -0.11, math.nan):
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
    dreams; before a checkpoint; between two GSPO steps behind it, where a gradient is then nan once; while
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
        calls = iter([False] * (call - 1) + [True])
        shot(work, place, name, lambda *_, calls=calls, **__: next(calls))
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
    one seed, in an update, in two, or in runs of other seeds: they would sample the same."""
    asked, generate, dev = defaultdict(list), lm.LM.generate, [1000007, 1000008, 1000009]
    monkeypatch.setattr(lm.LM, "generate", lambda model, prompts, most, temperature, seeds: (
        asked[temperature].extend(seeds), generate(model, prompts, most, temperature, seeds))[1])
    for seed, cut in ((0, 9), (1, 2)):  # page 2 hangs, and is on the way from page 0 or 1
        config = small(tmp_path / str(seed), taught, updates=2, evaluate_seeds="1000007:3", seed=seed,
                       real_fraction=1.0, expert_fraction=0.0)
        train.train(config, env=(web := CountingPages(end=3, cut=cut)))  # within three steps all pays
        seeds = [env.start.seed for env in web.envs]
        assert seeds[:3] == seeds[-3:] == dev and set(seeds[3:-3]) <= {0, 1} and len(seeds) == 24 + 6
        assert lines(config)[-1] == {"update": 2, "real_success": 1.0}
        assert any(env.n == cut and env.taken for env in web.envs[-3:]) == bool(seed), "or nothing hung"
    assert asked.keys() == {0.0, 1.0} and len(asked[1.0]) == len(set(asked[1.0])) > 48


def test_a_run_that_discards_most_of_its_dreams_stops_and_says_why(taught, tmp_path, scripted):
    """Guards: a night in which nobody imagines a page. Experts' rollouts, here half of all, are no dreams."""
    config = small(tmp_path, taught, expert_fraction=0.5, discard_limit=0.95, evaluate_every=0)
    lost = who(scripted(script(world=lambda prompt: "nonsense"))).world_model
    with pytest.raises(UserError, match=r"(\d+) of \1 rollouts discarded: {'world model: unreadable': \1}"):
        train.train(config, world_model=lost)
    assert [row["update"] for row in lines(config)] == [0, 1]


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
    with pytest.raises(UserError, match="has done 2 updates"):
        train.train(replace(config, updates=1))
    train.train(config := replace(config, **may))
    assert [row["update"] for row in lines(config)] == [0, 1, 2, 3]
    other = lm.load(judge, 256, torch.float32)
    other.net.lm_head.weight.data *= 1.01
    lm.save(other, judge)
    with pytest.raises(UserError, match=r"another config \(what stands at judge was"):
        train.train(config)


@pytest.mark.parametrize("words, says", [
    ("train laptop --minibatches 1", "minibatches"), ("train laptop --learning-rat 1", "--learning-rat"),
    ("train laptop --judge-urls http://a:1/v1", "judge-urls"), ("train laptop --recorded no.gz", "no.gz"),
    ("train laptop --evaluate-seeds 2000000:1 --policy {0} --world-model {0} --judge {0}", "2000000:1"),
    ("train laptop --judge http://127.0.0.1:1/v1#a --policy {0} --world-model {0}", "--judge is a folder"),
    ("train laptop --policy {0} --world-model b", "b holds no model"),
    ("train laptop --judge= --policy {0} --world-model {0}", "--judge-tokens"),
    ("sft clone", "fine-tune what?"), ("sft policy --base no/where", "no/where holds no model")])
def test_a_wrong_setting_ends_a_command_with_one_line(taught, tmp_path, monkeypatch, capsys, words, says):
    """Guards: a traceback for what the user can mend; an unknown flag that is dropped; one GSPO step a batch
    (NOTES 5.1); test seeds that are evaluated on; a folder that is missed after minutes of loading."""
    monkeypatch.setattr(sys, "argv", f"{words.format(taught)} --out {tmp_path}/x".split())
    with pytest.raises(SystemExit) as ended:
        {"train": train, "sft": sft}[sys.argv[0]].main()
    code, errors = str(ended.value), capsys.readouterr().err
    assert says in (errors if code == "2" else code) and "Traceback" not in errors and "\n" not in code
