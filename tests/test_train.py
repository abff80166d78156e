"""Claims about train.py: the update is GSPO's, and a killed run that goes on is the run that was not killed.

The models are conftest's `taught` (it acts, dreams and judges in the counting web). The browser is the
counting web itself.
"""

import copy
import dataclasses
import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CountingWorld, act, record, recorded, start, tiny_lm
from helpers.killed import assert_same, goes_on, killed, shot
from helpers.runs import (
    DREAMING,
    Paying,
    Web,
    config,
    in_counting_web,
    last_state,
    logged,
    saved,
    some,
    tiny_run,
    token_logps,
    typed,
)

import audit
import data
import distributed
import dream
import evaluate
import gspo
import lm
import measure
import policy
import recipe
import remote
import sft
import stories
import train
import update
from node import annotate, engine
from policy import TokenTrajectory
from worlds import benchmarks, miniwob

# ---- one update --------------------------------------------------------------------------------------------

ADVANTAGES = [-0.6, 0.8, -0.4, 0.8, 1.1, -0.5, 0.6, -1.1]


class Watched(torch.optim.SGD):
    """SGD that keeps the weights and the gradient of each step."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.watched, self.seen = model, []

    def step(self):
        gradient = [parameter.grad.clone() for parameter in self.watched.parameters()]
        self.seen.append((copy.deepcopy(self.watched.state_dict()), gradient))
        super().step()


def whole_gradient(model, trajectories, advantages, state, old_state, temperature, eps):
    """The gradient of gspo_loss on all tokens of whole trajectories in one batch, and its metrics.

    state: the weights that learn; old_state: those that sampled.
    """
    model.model.load_state_dict(old_state)
    with torch.no_grad():
        old, _ = token_logps(model, trajectories, temperature)
    model.model.load_state_dict(state)
    new, index = token_logps(model, trajectories, temperature)
    loss, metrics = gspo.gspo_loss(new, old, index, advantages, *eps)
    return torch.autograd.grad(loss, list(model.model.parameters()), allow_unused=True), metrics


@pytest.mark.parametrize("tokens", [40, 10_000])
def test_each_minibatch_steps_along_the_gradient_of_gspo_loss_on_the_whole(tokenizer, tokens):
    """Guards NOTES 5.2, 5.6, 5.7, 5.9: turns left out, a denominator per microbatch, a mean over tokens,
    another temperature, eps_low and eps_high exchanged, old log-probs taken after the first step. tokens=40
    puts about one turn into a microbatch. The reference is one batch, and shares no code but gspo_loss. In
    the example good and bad trajectories are clipped, and a good one stands between 1 + eps_low and 1 +
    eps_high."""
    model, trajectories = tiny_lm(tokenizer), some(8, seed=15)
    # So that some ratios move far: the same prompt, with one answer that is liked and another that is not.
    for this, following in zip(trajectories, trajectories[1:]):
        following.pairs[0] = (this.pairs[0][0], following.pairs[0][1])
    advantages = torch.tensor(ADVANTAGES)
    settings = config(tokens=tokens, dreaming=dataclasses.replace(DREAMING, temperature=0.7), eps_low=0.03,
                      eps_high=0.2)
    first_state = copy.deepcopy(model.model.state_dict())
    optimizer = Watched(model.model, lr=0.3)
    metrics = update.update(model, optimizer, trajectories, advantages, settings, 0.7, random.Random(5))

    order = list(range(8))
    random.Random(5).shuffle(order)
    clipped, drift, ratios = 0.0, 0.0, []
    for k, (state, gradient) in enumerate(optimizer.seen):
        members = order[k::3]
        expected, measured = whole_gradient(model, [trajectories[i] for i in members], advantages[members],
                                            state, first_state, 0.7, (0.03, 0.2))
        for got, want in zip(gradient, expected):
            scale = max(1e-3, float(want.abs().max()))
            assert torch.allclose(got, want, atol=1e-4 * scale, rtol=1e-3), f"minibatch {k}"
        clipped += measured["clip_frac"] / 3
        drift += measured["abs_log_ratio"] / 3
        ratios.append(measured["ratio_max"])
    assert len(optimizer.seen) == 3
    assert metrics["clip_frac"] == pytest.approx(clipped)
    assert metrics["abs_log_ratio"] == pytest.approx(drift, rel=1e-3) and drift > 0.03
    assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    # Two of the three in the second minibatch, and one of the two in the last.
    assert clipped == pytest.approx((0 + 2 / 3 + 1 / 2) / 3), "another example: it has to clip as much"


@pytest.fixture
def passes(monkeypatch):
    """(whether it learns, the pairs) of each call of lm.token_logps from now on."""
    seen, score = [], lm.token_logps
    monkeypatch.setattr(lm, "token_logps", lambda model, pairs, temperature: (
        seen.append((torch.is_grad_enabled(), pairs)), score(model, pairs, temperature))[1])
    return seen


def one_update(model, rows, advantages, settings, *more, temperature=1.0, lr=0.3) -> dict:
    """By plain SGD."""
    optimizer = torch.optim.SGD(model.model.parameters(), lr)
    return update.update(model, optimizer, rows, torch.tensor(advantages), settings, temperature,
                         random.Random(5), *more)


def test_what_is_one_microbatch_is_scored_and_learned_in_one_pass(tokenizer, passes):
    """Guards: a forward, a quarter of a step, made twice with the same weights; a gradient by other tokens'
    coefficients. The reference has a turn in a microbatch."""
    weights = []
    for tokens in (40, 10_000):
        passes.clear()
        model = tiny_lm(tokenizer)
        one_update(model, some(8, seed=10), ADVANTAGES, config(tokens=tokens, eps_low=0.9, eps_high=9.0))
        weights.append(torch.cat([p.detach().flatten() for p in model.model.parameters()]))
    assert [learns for learns, _ in passes] == [False] * 3 + [True] * 3, (
        "old log-probs of three minibatches, then one pass a step")
    moved = weights[0] - torch.cat([p.detach().flatten() for p in tiny_lm(tokenizer).model.parameters()])
    assert float((weights[0] - weights[1]).norm()) < 1e-4 * float(moved.norm())


@pytest.mark.parametrize("rows, sizes", [(8, [3, 3, 2]), (7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1])])
def test_every_trajectory_is_in_one_minibatch(tokenizer, rows, sizes):
    """Guards: a row lost or learned twice; an empty minibatch that stops the run. Their advantages tell the
    rows apart."""
    (seen, watched), told = watched_coefficients(), [float(k) for k in range(1, rows + 1)]
    one_update(tiny_lm(tokenizer), some(rows, seed=10), told, config(), watched, lr=0.0)
    assert [len(advantages) for advantages, _ in seen] == sizes
    assert sorted(value for advantages, _ in seen for value in advantages) == told


def watched_coefficients() -> tuple[list[tuple[list[float], dict]], update.Coefficients]:
    """(advantages, metrics) of each call so far of gspo.gspo_coefficients, as it is handed in."""
    seen = []

    def watched(logp, old_logp, trajectory, advantages, *eps):
        coefficients, metrics = gspo.gspo_coefficients(logp, old_logp, trajectory, advantages, *eps)
        seen.append((advantages.tolist(), metrics))
        return coefficients, metrics

    return seen, watched


def test_a_minibatch_in_which_nothing_is_left_is_a_step_of_gradient_zero(tokenizer):
    """Guards: a step that is skipped, where Adam still moves by its momentum. The second of three minibatches
    has no advantages. The reference makes the same steps with the gradients that were seen."""
    model, order = tiny_lm(tokenizer), list(range(6))
    random.Random(3).shuffle(order)
    advantages = torch.tensor([1.0, -1.0, 0.7, -0.4, 0.5, -0.8])
    advantages[order[1::3]] = 0.0
    reference, seen = copy.deepcopy(model.model), []
    settings = {"lr": 1e-3, "betas": (0.9, 0.98)}
    optimizer = torch.optim.AdamW(model.model.parameters(), **settings)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([parameter.grad.clone() for parameter in model.model.parameters()]))
    update.update(model, optimizer, some(6), advantages, config(), 1.0, random.Random(3))
    assert [any(g.any() for g in gradient) for gradient in seen] == [True, False, True]
    by_hand = torch.optim.AdamW(reference.parameters(), **settings)
    for gradient in seen:
        for parameter, g in zip(reference.parameters(), gradient):
            parameter.grad = g
        by_hand.step()
    for a, b in zip(model.model.parameters(), reference.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_the_ratio_is_exactly_1_until_the_weights_have_moved_and_then_it_is_not(tokenizer, lr):
    """Guards NOTES 5.1 on both sides: old log-probs of another padding (a ratio of 1.0001 is a third of the
    clip), and old log-probs taken again before every minibatch. With lr 0 the weights never move. In bf16,
    where padding shows most."""
    (seen, coefficients_of), model = watched_coefficients(), tiny_lm(tokenizer)
    model.compute = torch.bfloat16
    optimizer = torch.optim.SGD(model.model.parameters(), lr=lr)
    advantages = torch.tensor([1.0, -1.0, 0.5] * 3)
    update.update(model, optimizer, some(9), advantages, config(tokens=300), 1.0, random.Random(0),
                  coefficients_of)
    unmoved = {"clip_frac": 0.0, "ratio_mean": 1.0, "ratio_max": 1.0, "abs_log_ratio": 0.0}
    first, *later = (metrics for _, metrics in seen)
    assert first == unmoved and len(later) == 2
    for metrics in later:
        assert metrics["abs_log_ratio"] > 1e-6 if lr else metrics == unmoved


def test_a_sampler_that_is_too_far_off_stops_the_run_before_anything_is_learned(taught):
    """Guards: a broken weight sync (0.2 a token, say). The limit is 0.1. All is refused before the first of
    three GSPO steps, and nothing is left in the gradients. Experts, whom nobody sampled, do not count (NOTES
    5.9)."""
    model = lm.load(taught, context=256)
    model.compute = torch.float32
    sampled = policy.rollout(CountingWorld(), model, [start(0)] * 6, 3, 16, 0.7, seed=1)
    expert = TokenTrajectory(start(), pairs=[([5, 6], [7, 8])], logps=[[]], expert=True)
    before, as_sampled = copy.deepcopy(model.model.state_dict()), [t.logps for t in sampled]

    def learn(off):
        for trajectory, logps in zip(sampled, as_sampled):
            trajectory.logps = [[logp + off for logp in turn] for turn in logps]
        return one_update(model, [*sampled, expert], [1.0, -1.0] * 3 + [1.0], config(), temperature=0.7)

    for off in (0.2, -0.2, math.nan):
        with pytest.raises(ValueError, match=rf"differ by {abs(off):.3f} a token .*Nothing was learned"):
            learn(off)
        assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())
        assert all(p.grad is None for p in model.model.parameters())
    for off in (0.0, 0.05):
        model.model.load_state_dict(before)
        assert learn(off)["sampler_gap"] == pytest.approx(off, abs=1e-5)
        assert any(not torch.equal(value, before[name]) for name, value in model.model.state_dict().items())


# ---- state -------------------------------------------------------------------------------------------------

def test_metrics_keep_the_lines_of_done_updates_and_nothing_else(tmp_path):
    """Guards NOTES 5.13. After `done` updates, number `done` will be written again. A line that the kill cut
    in half is no line."""
    file = tmp_path / "metrics.jsonl"
    measure.cut_metrics(file, 3)  # a first start has none
    lines = [json.dumps({"update": n, "x": "a\u2028b"}) + "\n" for n in range(6)]
    file.write_text("".join(lines) + '{"update": 6, "drea')
    for done, kept in ((6, 6), (4, 4), (4, 4), (0, 0)):
        measure.cut_metrics(file, done)
        assert [json.loads(line)["update"] for line in file.read_text().splitlines()] == list(range(kept))


def checkpoint(folder, model, settings, *steps) -> distributed.Checkpoints:
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=0.1)
    checkpoints = distributed.Checkpoints(folder, model.model, optimizer)
    for step in steps:
        checkpoints.save(step, dataclasses.asdict(settings))
    return checkpoints


def load_run(checkpoints, settings) -> int:
    return checkpoints.load(dataclasses.asdict(settings), recipe.MAY_CHANGE)


def test_a_checkpoint_of_another_config_is_refused_by_the_names_of_what_changed(model, tmp_path):
    """Guards: a run that goes on with another learning rate or other dreams. How long it goes and how often
    it looks may change. A name in MAY_CHANGE that is no flag would allow nothing."""
    assert set(recipe.MAY_CHANGE) <= {field.name for field in dataclasses.fields(recipe.Train)}
    decide = {"seed", "demonstrations", "policy", "world_model", "judge_model", "trajectories", "minibatches",
              "lr", "eps_low", "eps_high", "clip_norm", "compute", "dreaming", "world", "first_pages",
              "trained_layers"}
    assert not decide & {*recipe.MAY_CHANGE}
    # Other weights by the same name: a judge and a mean of weights that the first updates did not have.
    (file := tmp_path / "model.safetensors").write_bytes(b"some")
    settings = config(policy=str(tmp_path))
    before = recipe.identity(settings)
    file.write_bytes(b"none")
    after = recipe.identity(settings)
    assert [key for key in after if before[key] != after[key]] == ["what stands at policy"]
    settings = config()
    checkpoints = checkpoint(tmp_path / "checkpoint", model, settings, 7)
    longer = dataclasses.replace(settings, updates=9999, epochs=2.0, evaluate_every=1, checkpoint_every=1,
                                 keep_checkpoints=9, out="elsewhere", drop_limit=0.9, sampler_gap_limit=0.2,
                                 evaluate_seeds="1000500:1", evaluate_horizon=7)
    assert load_run(checkpoints, longer) == 7
    shorter = dataclasses.replace(settings, context=8, world_model_context=9, judge_context=10)
    assert load_run(checkpoints, shorter) == 7, "a run that ran out of memory could never go on"
    other = dataclasses.replace(settings, lr=0.5, dreaming=dataclasses.replace(DREAMING, group=5))
    with pytest.raises(ValueError, match=r"another config \(lr, dreaming changed\).*--out"):
        load_run(checkpoints, other)
    with pytest.raises(ValueError, match=r"another config \(world, real_fraction changed\).*--out"):
        load_run(checkpoints, dataclasses.replace(settings, world="both", real_fraction=0.25))


@pytest.mark.parametrize("name", ["run.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_an_error_that_names_the_folder_and_the_way_out(model, tmp_path, caplog,
                                                                                name):
    """Guards: a traceback from deep inside torch (raised, or logged), a run that starts again without a word,
    and a way out that does not help: without the damaged folder the run goes on from the checkpoint
    before."""
    checkpoints = checkpoint(tmp_path / "checkpoint", model, config(), 3)
    weights = copy.deepcopy(model.model.state_dict())
    model.model.model.embed_tokens.weight.data += 1
    checkpoints.save(7, dataclasses.asdict(config()))
    newest = tmp_path / "checkpoint/step-7"
    names = {file.name for file in newest.iterdir()}
    assert names == {"run.json", ".metadata", "__0_0.distcp"}, "or there is another file to damage"
    whole = (newest / name).read_bytes()
    way_out = r"^\S*/checkpoint/step-7 cannot be read \(\w+Error.*\); delete it to go on from the one before$"
    for left in (whole[: len(whole) // 2], whole[:20], b"", b"hello, I am a text\n" * 9, None):
        (newest / name).unlink() if left is None else (newest / name).write_bytes(left)
        with pytest.raises(distributed.CheckpointError, match=way_out) as error:
            load_run(checkpoints, config())
        assert "\n" not in str(error.value) and not any(logged.exc_info for logged in caplog.records)
    shutil.rmtree(newest)
    assert load_run(checkpoints, config()) == 3
    now = model.model.state_dict()
    assert all(torch.equal(value, now[key]) for key, value in weights.items())


# torch's writer closes a file that it has closed: Python 3.13 says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_is_full_is_an_error_that_says_so_and_leaves_the_checkpoint_before(model, tmp_path,
                                                                                       monkeypatch):
    """Guards: torch's exceptions for this, which no `except Exception` catches; half a folder under the name
    of a whole one."""
    checkpoints = checkpoint(tmp_path / "checkpoint", model, config(), 3)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    said = r"step-7 cannot be written \(OSError: .*No space left on device\); make room"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(distributed.CheckpointError, match=said):
            checkpoints.save(7, dataclasses.asdict(config()))
    assert load_run(checkpoints, config()) == 3
    checkpoints.save(7, dataclasses.asdict(config()))
    assert load_run(checkpoints, config()) == 7


# ---- the loop ----------------------------------------------------------------------------------------------

def killed_for_good(folder: Path, command) -> None:
    """The run in another process; kill -9 comes while the second checkpoint is written and not yet
    renamed."""
    for name in ("metrics.jsonl", stories.FILE):
        with open(folder / "agent.run" / name, "a") as file:
            file.write('{"update": 2, "dream_succ')  # what a kill leaves of a line
    shot(command, Path, "rename", lambda source, target: Path(target).name == "step-4")
    assert not (folder / "agent").exists()
    assert [metrics["update"] for metrics in logged(folder)] == [0, 1, 2, 3]
    assert saved(folder) == ["step-2", "step-4.tmp"]


def test_a_run_that_was_killed_again_and_again_is_bit_for_bit_the_run_that_was_not(taught, tmp_path,
                                                                                   monkeypatch):
    """Guards NOTES 5.13: a random state off by one, no data cursor, an optimizer that starts anew, lines
    written twice. Killed before the first checkpoint, before its first file, between two
    minibatches (the sixth, counted from update 0, since no checkpoint stood), and by kill -9 while a
    checkpoint is being renamed."""
    folder = tmp_path / "run"

    def left() -> dict:
        return {"log": logged(folder), "checkpoints": saved(folder), "state": last_state(folder),
                "agent": (folder / "agent/model.safetensors").read_bytes(),
                "dreams": (folder / "agent.run" / stories.FILE).read_text()}

    in_counting_web(monkeypatch)
    command = lambda: train.train(tiny_run(folder, taught))
    straight = goes_on(folder, command, [
        lambda: killed(dream, "trajectories", 2), lambda: killed(distributed.dcp, "save"),
        lambda: killed(update.Minibatch, "to_learn", 6)], left, lambda: killed_for_good(folder, command))

    assert [metrics["update"] for metrics in logged(straight)] == [0, 1, 2, 3, 4]
    assert saved(straight) == ["step-2", "step-4"]
    kept = json.loads((straight / "agent.run/checkpoint/step-4/run.json").read_text())
    assert {f"what stands at {name}" for name in ("policy", "world_model", "trajectories")} <= kept.keys()
    told = [json.loads(line)["update"] for line in (straight / "agent.run" / stories.FILE).open()]
    assert sorted(set(told)) == [0, 1, 2, 3] and told == sorted(told)
    # And something happened in this run, or equal would mean nothing.
    assert sum(metrics.get("grad_norm", 0) > 0 for metrics in logged(straight)) >= 3
    assert any(metrics.get("clip_frac", 0) > 0 for metrics in logged(straight))
    looked = [("real_success" in metrics, "dream_success" in metrics) for metrics in logged(straight)]
    assert looked == [(True, True), (False, True)] * 2 + [(True, False)]

    once = left()
    command()  # the same command on a finished run changes nothing
    assert_same(left(), once)


# ---- on real pages -----------------------------------------------------------------------------------------

def run_in(monkeypatch, folder: Path, taught, **changes) -> list[dict]:
    """What a run of tiny_run with these changes logs."""
    in_counting_web(monkeypatch, Paying)
    train.train(tiny_run(folder, taught, **changes))
    return logged(folder)


def test_both_worlds_at_the_shares_0_and_1_are_the_one_and_the_other(taught, tmp_path, monkeypatch):
    """Guards: a draw that dreams alone would make too, and so another order of random numbers; shares that
    are not the groups'. In between, groups of both kinds stand in a batch."""
    seen, batch = {}, dream.batch

    def watched(*given):
        seen.setdefault(name, []).append(given[-1])
        return batch(*given)

    monkeypatch.setattr(dream, "batch", watched)
    logs = {}
    both = dict(world="both")
    worlds = {"dream": {}, "real": dict(world="real"), "both": both,
              "none": both | dict(real_fraction=0.0), "all": both | dict(real_fraction=1.0)}
    for name, changes in worlds.items():
        logs[name] = run_in(monkeypatch, tmp_path / name, taught, updates=2, evaluate_every=0, **changes)
    assert logs["dream"] == logs["none"] and logs["real"] == logs["all"]
    assert seen["dream"] == [[False] * 3] * 2 and seen["real"] == [[True] * 3] * 2
    assert {True, False} == {flag for flags in seen["both"] for flag in flags}
    for metrics, flags in zip(logs["both"], seen["both"]):
        assert ("dream_success" in metrics) == (False in flags), "some group was not where it was drawn"
        assert ("real_train_success" in metrics) == (True in flags)
    assert sum(metrics.get("real_steps", 0) for metrics in logs["dream"]) == 0


@pytest.mark.parametrize("sampler", ["transformers", "vllm"])
def test_on_real_pages_neither_world_model_nor_judge_is_loaded_or_served(taught, tmp_path, monkeypatch,
                                                                         sampler):
    """Guards: memory, servers and a folder for models that are asked nothing. With a dreamed group in a
    thousand all of them are needed."""
    asked, loaded, load = [], [], lm.load
    monkeypatch.setattr(engine, "start", lambda models, files: asked.append(sorted(models)) or {})
    monkeypatch.setattr(engine, "Engine", lambda folder, *_: SimpleNamespace(folder=folder))
    monkeypatch.setattr(lm, "load", lambda folder, *more: loaded.append(str(folder)) or load(folder, *more))
    monkeypatch.setattr(lm, "load_sharded", lambda *given: lm.load(*given[:4]))
    settings = tiny_run(tmp_path, taught, world="real", world_model="no such folder", sampler=sampler)
    model, parts = train.load_models(settings, tmp_path)
    assert loaded == [str(taught)] and asked == [[]] * (sampler == "vllm")
    assert (parts.agent is model) == (sampler == "transformers")
    assert parts.world_model is None is parts.judge
    most = dataclasses.replace(settings, world="both", real_fraction=0.999, world_model=str(taught))
    train.load_models(most, tmp_path)
    assert len(loaded) == (4 if sampler == "transformers" else 2)
    assert asked[1:] == [["judge", "world_model"]] * (sampler == "vllm")


def test_what_cannot_be_reset_on_real_pages_is_refused_before_any_model(taught, tmp_path, monkeypatch):
    """Guards: NNetNav's tasks, of which no browser here has a page: 8 B weights loaded for a run that ends at
    its first batch. In dreams they are what the paper learns from."""
    monkeypatch.setattr(train, "load_models", lambda *_: pytest.fail("loaded"))
    here = Path(__file__).parent / "nnetnav_small.jsonl"
    settings = tiny_run(tmp_path, taught, trajectories=str(here))
    for world in ("real", "both"):
        with pytest.raises(ValueError) as refused:
            train.train(dataclasses.replace(settings, world=world))
        said = str(refused.value)
        assert said.startswith(f"{here}:1: --world {world} begins each trajectory on a real page, and")
        assert "worlds/miniwob.py cannot reset" in said and said.endswith("or --world dream")
        assert "\n" not in said
    assert recipe.starts(settings)
    for task in (*miniwob.IN_PLACE, "click-tab-2-medium"):
        record(tmp_path / "recorded.jsonl", [recorded(["click [2]"], task=task)])
        recipe.starts(tiny_run(tmp_path / "x", taught, world="real",
                               trajectories=str(tmp_path / "recorded.jsonl")), benchmarks.knows(settings.on))


LEARNING = {  # what learns from recordings: its main(), and its flags
    "sft policy laptop": (sft.main, "--base {m} --out {o} --trajectories {f}"),
    "sft policy gpu": (sft.main, "--base {m} --out {o} --trajectories {f} --context 256"),
    "sft world_model laptop": (sft.main, "--base {m} --out {o} --transitions {f}"),
    "sft reward_model laptop": (sft.main, "--base {m} --out {o} --trajectories {f}"),
    "train laptop": (train.main, "--policy {m} --world-model {m} --out {o} --trajectories {f} "
                                 "--evaluate-every 0"),  # without a look at Chromium
    "audit": (audit.main, "--show --trajectories {f}"),
    "annotate": (annotate.main, "--transitions {f} --out {o} --url http://127.0.0.1:1/v1"),
}


@pytest.mark.parametrize("program", LEARNING)
def test_no_seed_that_is_reported_on_is_learned_from_by_any_program(taught, tmp_path, monkeypatch, program):
    """Guards: the pages of the evaluation cloned, or dreamed from; a sentence that names neither the line nor
    the way out. (The one gate of all programs knows all ranges: test_data.)"""
    main, flags = LEARNING[program]
    file, owner = tmp_path / "recorded.jsonl", "a seed of 'eval' (2000000 to 4999999)"
    record(file, [recorded(["click [2]"]), recorded(["click [1]", "click [2]"], seed := 2_000_007)])
    words = f"{program.partition(' ')[2]} {flags}".format(m=taught, o=tmp_path / "made", f=file).split()
    with pytest.raises(SystemExit) as ended:
        typed(monkeypatch, main, *words)
    said = str(ended.value)
    assert f"{file}:2: count, seed {seed}, is {owner}: what is evaluated must not be learned from" in said
    assert "Give recordings of training seeds (0 to 999999" in said
    assert not (tmp_path / "made").exists(), "it learned all the same"


def test_looks_at_the_real_web_are_on_no_training_seeds():
    """Guards: a curve of success on pages that the agent learned from; a run that ends at its first look."""
    with pytest.raises(ValueError, match="--evaluate-seeds: seeds 999990:4 are training seeds"):
        recipe.Train(evaluate_seeds="999990:4")
    with pytest.raises(ValueError, match="--evaluate-seeds: seeds 999999:2 leave 'train' .*; split them"):
        recipe.Train(evaluate_seeds="999999:2")
    assert recipe.Train(evaluate_seeds="5000000:4").evaluate_seeds == "5000000:4"  # of who checks us


def test_the_loop_learns_from_the_kept_rows_by_the_advantages_of_their_groups(taught, tmp_path, monkeypatch):
    """Guards NOTES 5.3: rewards normalised over the batch, and advantages beside other rows. By hand: mean
    .25 in the first group and .75 in the last, std .5 in both; the second has nothing to teach. The last
    update is kept whatever checkpoint_every says."""
    rows, groups = some(12), [k // 4 for k in range(12)]
    for trajectory, reward in zip(rows, [1.0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1]):
        trajectory.reward = float(reward)
    kept = dream.keep(rows, groups)
    taught_groups = [("count", group != 1) for group in range(3)]
    batch = dream.Batch(rows, [rows[k] for k in kept], [groups[k] for k in kept], taught_groups)
    seen = []

    def learn(model, optimizer, trajectories, advantages, config, temperature, *_):
        seen.append((trajectories, advantages.tolist()))
        assert temperature == config.dreaming.temperature == 0.7, "scored as it was sampled"
        assert model.model.training, "or nothing is recomputed"
        how = optimizer.defaults
        assert (how["lr"], how["betas"], how["weight_decay"]) == (config.lr, (0.9, 0.98), 0.0)
        return {}

    monkeypatch.setattr(dream, "batch", lambda *_: batch)
    monkeypatch.setattr(update, "update", learn)
    in_counting_web(monkeypatch)
    train.train(tiny_run(tmp_path, taught, updates=1, evaluate_every=0, checkpoint_every=5,
                         dreaming=dataclasses.replace(DREAMING, temperature=0.7)))
    (learned_from, advantages), = seen
    assert all(a is b for a, b in zip(learned_from, rows[:4] + rows[8:], strict=True))
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.5, 0.5, -1.5, 0.5], abs=1e-4)
    assert saved(tmp_path) == ["step-1"]


def test_each_update_of_each_seed_has_dice_of_its_own(taught, tmp_path, monkeypatch):
    """Guards: runs of other seeds that dream the same dreams; updates that do."""
    batch, given = dream.Batch([], [], [], []), []
    monkeypatch.setattr(dream, "draw", lambda rng, *_: given.append(rng.random()) or [])
    monkeypatch.setattr(dream, "batch", lambda *all_of_it: given.append(all_of_it[3]) or batch)
    monkeypatch.setattr(measure, "of_batch", lambda _: {"kept": 0, "dropped_dreams": 0})
    monkeypatch.setattr(stories, "keep", lambda *_: None)
    for seed in (0, 1):
        train.train(tiny_run(tmp_path / str(seed), taught, updates=2, evaluate_every=0, seed=seed))
    assert len(given) == 8 and len(set(given)) == 8, given


def test_the_papers_figures_are_the_defaults():
    """Guards: a default that is nobody's. (What is not the paper's stands in docs/deviations.md.)"""
    train_, dreaming = recipe.Train(), recipe.Train().dreaming
    assert (train_.minibatches, train_.lr, train_.eps_low, train_.eps_high) == (4, 1e-6, 3e-4, 4e-4)
    assert (dreaming.tasks, dreaming.group, dreaming.horizon, dreaming.expert_fraction, dreaming.temperature,
            dreaming.judge, train_.clip_norm) == (4, 8, 5, 0.5, 0.7, "policy", 1.0)
    clone, imitate = recipe.PolicySFT(), recipe.WorldModelSFT()
    assert (clone.sft.lr, clone.sft.epochs, imitate.sft.lr, imitate.sft.epochs) == (1e-5, 1, 2e-4, 1)
    assert (imitate.lora_rank, imitate.lora_alpha) == (8, 16)


def test_the_real_web_is_looked_at_greedily_and_on_the_seeds_of_the_config(scripted):
    """Guards against a look at other seeds than the dev seeds, or at trajectories that were sampled."""
    models, web = scripted(lambda prompt: act("click [1]")), Web()
    starts, what = benchmarks.starts(data.Options(), web, "1000005:2", ("count", "another"))

    def look(horizon: int) -> dict:
        return measure.look(web, models.lm, starts, what, horizon, DREAMING.max_new_tokens)

    assert look(4) == {"real_success": 1.0, "looked_at": "dev seeds"}  # page 4 pays
    assert [(s.task, s.seed) for s in web.starts] == [
        (task, seed) for task in ("count", "another") for seed in (1000005, 1000006)]
    assert models.seeds == [], "a row was drawn"
    assert look(3) == {"real_success": 0.0, "looked_at": "dev seeds"}
    web.cut = 2  # every page hangs, twice
    assert look(4) == {"real_failed": 4}


def metrics_of(dreams: int, drops: dict, judged: int, malformed: int) -> dict:
    return {"dreams": dreams, "drops": drops, "dropped_dreams": sum(drops.values()), "judged": judged,
            "judge_malformed": malformed}


CUT, LONG, UNREADABLE = "world model: cut off", "policy: too long", "judge: unreadable"


@pytest.mark.parametrize("updates, stops", [
    ([(8, {CUT: 8}, 0, 0)] * 2, False), ([(8, {CUT: 4}, 4, 0)] * 3, False),
    ([(8, {CUT: 8}, 0, 0), (8, {CUT: 3, LONG: 2}, 3, 0), (8, {}, 8, 0)], True),
    ([(0, {}, 0, 0)] * 3, False), ([(8, {UNREADABLE: 1}, 1, 1)] * 3, False),
    ([(32, {UNREADABLE: 3}, 5, 3)] * 3, True),
    ([(8, {UNREADABLE: 1}, 2, 1)] * 3, False), ([(8, {}, 8, 0)] * 3 + [(8, {CUT: 8}, 0, 0)] * 9, False)])
def test_dropped_dreams_and_unreadable_verdicts_of_the_first_updates_stop_the_run_and_later_ones_do_not(
        updates, stops):
    """Guards: a night in which most dreams teach nothing, since a length is too small or nobody can read the
    judge; a run that stops in the middle for a few bad dreams. The message counts by cause."""
    past, stopped = [], {}
    for numbers in updates:
        past.append(metrics_of(*numbers))
        try:
            recipe.check_drops(past, config())
        except ValueError as error:
            stopped[len(past)] = str(error)
    assert [*stopped] == [3] * stops
    for said in stopped.values():
        lost = sum(metrics["dropped_dreams"] for metrics in past)
        assert said.startswith(f"{lost} of ") and "By cause, " in said and "--drop-limit 1" in said
    recipe.check_drops(past[:3], config(drop_limit=1.0))


def test_a_policy_is_not_asked_for_a_verdict_as_if_it_were_a_reward_model(tmp_path):
    """Guards: YES against NO behind the prompt of a model that was taught to act: a coin, as a reward."""
    mute = config(judge_model="", dreaming=dataclasses.replace(config().dreaming, judge_tokens=0))
    with pytest.raises(ValueError, match="--dreaming.judge-tokens, or the reward model as --judge-model"):
        train.load_models(mute, tmp_path)


def test_dreams_start_from_windows_of_the_cloned_successes_or_from_every_first_page(tmp_path):
    """Guards: experts that the SFT agent was not cloned from (NOTES 3.4); a first page without its task's
    success as the expert, or with one that is longer than a dream; a recording that begins in its middle."""
    cloned = recorded(["click [1]", "click [2]"], 0)
    others = [recorded(["click [1]", "click [2]"], 1), recorded(["click [1]"] * 5, 2, reward=0)]
    long = recorded(["click [1]"] * 5 + ["click [2]"], 3, task="long")
    record(tmp_path / "recorded.jsonl", [cloned, *others, long])
    settings = config(trajectories=str(tmp_path / "recorded.jsonl"), demonstrations=1)
    found = recipe.starts(settings)
    assert {(s.task, s.seed) for s, _ in found} == {("count", 0), ("long", 3)}
    assert all(expert and expert.start is s and len(expert.steps) <= 3 for s, expert in found)
    assert {len(expert.steps) for s, expert in found if s.task == "long"} <= {1, 2, 3}, "of six"
    left = recipe.starts(dataclasses.replace(settings, not_dreamed=("long",)))
    assert {s.task for s, _ in left} == {"count"}, "and what the judge is blind to"

    found = recipe.starts(dataclasses.replace(settings, first_pages=True))
    assert [(s.task, s.seed, s.previous) for s, _ in found] == [("count", k, ()) for k in range(3)], (
        "and no task that was always solved, or never: its groups would have equal rewards")
    (_, expert), *without = found
    assert len(expert.steps) == 2 and [expert for _, expert in without] == [None] * 2

    record(tmp_path / "recorded.jsonl", others[1:])
    for first_pages in (False, True):
        with pytest.raises(ValueError, match="recorded.jsonl holds no .* give other --trajectories"):
            recipe.starts(dataclasses.replace(settings, first_pages=first_pages))


def wide(trajectory: data.Trajectory, step: int, lines: int) -> data.Trajectory:
    """The trajectory with a page of that many more lines at `step`."""
    more = "".join(f"\n\t[{k}] link 'clickable clickable clickable'" for k in range(10, 10 + lines))
    trajectory.steps[step] = dataclasses.replace(
        trajectory.steps[step], page=trajectory.steps[step].page + more)
    return trajectory


def test_what_does_not_fit_the_context_is_dropped_and_nothing_else(tokenizer, capsys):
    """Guards: a recorded page of 60,000 tokens, again at every resume; dreams that are cut off on their first
    page; a window of just the context that is lost, or one token too many that stays."""
    narrow, long = tiny_lm(tokenizer, context=200), tiny_lm(tokenizer, context=100_000)
    settings = config(dreaming=dataclasses.replace(DREAMING, max_new_tokens=16))
    shown = [wide(recorded(["click [1]"] * 2 + ["click [2]"], seed), 1, lines=70 * seed) for seed in range(4)]
    found = [(expert.start, expert) for expert in recipe.experts(shown, 3, seed=0)]
    found += [(recipe.first_page(t), None) for t in shown]
    assert recipe.fitting(long, found, settings) == found and capsys.readouterr().out == ""
    kept = recipe.fitting(narrow, found, settings)
    wide_page = lambda page: page.count("link") >= 70
    assert kept == [(s, expert) for s, expert in found if not wide_page(s.page)
                    and not (expert and any(wide_page(step.page) for step in expert.steps))]
    assert 0 < len(kept) < len(found)
    assert capsys.readouterr().out.startswith(f"{len(found) - len(kept)} of {len(found)} starts dropped")

    short = config(dreaming=dataclasses.replace(DREAMING, max_new_tokens=1))
    (expert,) = recipe.experts([wide(recorded(["click [2]"]), 0, lines=70)], 1, seed=0)
    needed = sum(map(len, policy.step_pair(long, expert.start.goal, expert.steps[0])))
    assert len(expert.start.page.encode()) > 2 * needed, "or nothing is tokenised here"
    pair = [(expert.start, expert)]
    assert recipe.fitting(tiny_lm(tokenizer, context=needed), pair, short) == pair
    with pytest.raises(ValueError, match="no start of .* fits --context"):
        recipe.fitting(tiny_lm(tokenizer, context=needed - 1), pair, short)


@pytest.mark.parametrize("judge, contexts, compute", [
    ("policy", [200, 200, 300, 400], "bfloat16"), ("current", [200, 200, 300, 200], "float32"),
    ("world_model", [200, 200, 300, 300], "float32")])
def test_each_model_is_as_the_config_says_with_either_sampler(taught, tokenizer, tmp_path, monkeypatch, judge,
                                                              contexts, compute):
    """Guards: a judge that reads two pages in a context for one, a server started with the policy's context;
    a judge that shares the policy's weights by accident, or a `current` judge that is frozen; a --compute
    that reaches the world model and not the policy that learns; --judge-model that is not asked."""
    lm.save(tiny_lm(tokenizer, seed=5), own := str(tmp_path / "judge"))
    settings = tiny_run(tmp_path, taught, context=200, world_model_context=300, judge_context=400,
                        compute=compute, judge_model=own, dreaming=dataclasses.replace(
                            DREAMING, judge=judge, judge_tokens=17))
    Placed = dataclasses.make_dataclass("Placed", ["folder", "context"])  # stands for a server or an engine
    asked = {}

    def server(folder, context, config, log):
        asked[log.name] = context
        return SimpleNamespace(url=context, folder=folder)

    monkeypatch.setattr(engine, "Server", server)
    monkeypatch.setattr(remote, "Remote", lambda urls, folder, *_, **__: Placed(folder, urls[0]))
    monkeypatch.setattr(engine, "Engine", lambda folder, context, *_: Placed(folder, context))
    monkeypatch.setattr(lm, "load_sharded", lambda *given: lm.load(*given[:4]))
    for sampler in ("transformers", "vllm"):
        model, parts = train.load_models(dataclasses.replace(settings, sampler=sampler), tmp_path)
        everybody = model, parts.agent, parts.world_model.lm, parts.judge.lm
        assert [each.context for each in everybody] == contexts
        assert (parts.judge.lm is parts.agent) == (judge == "current")
        assert (parts.judge.lm is parts.world_model.lm) == (judge == "world_model")
        assert parts.world_model.max_new_tokens == DREAMING.world_model_tokens
        assert parts.world_model.temperature == DREAMING.world_model_temperature > 0
        assert parts.judge.max_new_tokens == 17
        if sampler == "transformers":
            assert {each.compute for each in everybody} == {getattr(torch, compute)}
            assert model.model.lm_head.weight.dtype == torch.float32
            assert (parts.judge.lm.model is model.model) == (judge == "current")
            assert parts.world_model.lm.model is not model.model
            head = lambda each: each.model.lm_head.weight
            assert torch.equal(head(parts.judge.lm), head(lm.load(own))) == (judge == "policy")
        elif judge == "policy":
            assert str(parts.judge.lm.folder) == own
    frozen = {"judge.0.log": 400} if judge == "policy" else {}
    assert asked == {"world_model.0.log": 300} | frozen


# ---- commands ----------------------------------------------------------------------------------------------

def command(monkeypatch, module, *words, **flags) -> str:
    """What `python module words flags` says when it exits with an error."""
    with pytest.raises(SystemExit) as exit:
        typed(monkeypatch, module.main, *words, **flags)
    assert exit.value.code not in (0, None)
    return str(exit.value.code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the paper's recipe starts")
@pytest.mark.parametrize("module, what", [
    (train, []), (sft, ["policy"]), (sft, ["world_model"]), (sft, ["reward_model"])])
def test_without_a_gpu_the_papers_recipe_says_in_one_sentence_what_would_run(monkeypatch, module, what):
    """Guards against a download of 8 B weights, or a traceback, on a laptop."""
    for words in ([], ["paper"]):
        said = command(monkeypatch, module, *what, *words)
        runs = " ".join(["python", f"{module.__name__}.py", *what, "laptop"])
        assert "\n" not in said and "GPU" in said and said.endswith(runs)


@pytest.mark.parametrize("module, words", [
    (train, ["laptop"]), (train, ["paper"]), (sft, ["policy", "laptop"]), (sft, ["world_model", "gpu"]),
    (evaluate, []), (audit, ["--show"])])
def test_an_unknown_flag_is_an_error_that_names_it(monkeypatch, capsys, module, words):
    """Guards against a misspelt setting that is dropped, and a run of the default that nobody asked for."""
    command(monkeypatch, module, *words, "--learning-rat", "1")
    assert "--learning-rat" in capsys.readouterr().err


@pytest.mark.parametrize("wrong, says", [
    (dict(world="web"), "dream, real or both, not 'web'"), (dict(real_fraction=1.1), "from 0 to 1"),
    (dict(epochs=-1), "^epochs -1: give passes over the tasks, or 0 to count --updates$"),
    (dict(minibatches=0), "minibatches.*at least 2"), (dict(minibatches=1), "minibatches.*at least 2"),
    (dict(checkpoint_every=0), "^--checkpoint-every 0: give 1"),
    (dict(sampler="transformers", judge_urls=("http://a:1/v1",)), "--judge-urls are for"),
    (dict(keep_checkpoints=0), "^--keep-checkpoints 0: give 1"),
    (dict(dreaming=dream.Config(tasks=0)), "^--dreaming.tasks 0: give 1"),
    (dict(dreaming=dream.Config(horizon=0)), "^--dreaming.horizon 0: give 1"),
    (dict(dreaming=dream.Config(temperature=0)), "^--dreaming.temperature 0: rows .* more than 0")])
def test_a_setting_that_cannot_be_is_refused_with_what_can(wrong, says):
    """Guards NOTES 5.1 among others: with one GSPO step a batch every ratio is exactly 1. And an update that
    is lost to a division by 0 at its end, and a disk that fills with checkpoints."""
    with pytest.raises(ValueError, match=says):
        recipe.Train(**wrong)
