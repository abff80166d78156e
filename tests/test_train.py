"""Claims about train.py: the update is GSPO's, and a killed run that goes on is the run that was never killed.

The models are conftest's `taught` (it acts, dreams and judges in the counting web); the browser is the counting web itself."""
import copy
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CountingWorld, record, recorded, start, tiny_lm
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import data
import distributed
import dream
import evaluate
import gspo
import lm
import policy
import train
import world_model
from policy import TokenTrajectory

DREAMING = dream.Config(tasks=3, group=4, horizon=3, max_new_tokens=16, world_model_tokens=48, judge_tokens=16, temperature=1.0, expert_fraction=0.25, demonstrated=0.5, focus=True)


# ---- one update ------------------------------------------------------------------------------------------------------------


def some(n: int, seed: int = 0) -> list[TokenTrajectory]:
    """n trajectories of one to three turns with random tokens, lengths from 1 to 9."""
    rng = random.Random(seed)
    draw = lambda count: [rng.randrange(4, 5000) for _ in range(count)]
    trajectories = []
    for _ in range(n):
        pairs = [(draw(rng.randrange(3, 30)), draw(rng.randrange(1, 10))) for _ in range(rng.randrange(1, 4))]
        trajectories.append(TokenTrajectory(start(), pairs=pairs, logps=[[] for _ in pairs], terminated=True))
    return trajectories


class Watched(torch.optim.SGD):
    """SGD that keeps, for each step, the weights it was taken at and the gradient."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.watched, self.seen = model, []

    def step(self):
        self.seen.append((copy.deepcopy(self.watched.state_dict()), [p.grad.clone() for p in self.watched.parameters()]))
        super().step()


def config(**changes) -> train.Config:
    return dataclasses.replace(train.Config(), **{"dreaming": DREAMING} | changes, minibatches=3, clip_norm=1e9, eps_low=0.03, eps_high=0.04)


def whole_loss(model, trajectories, advantages, state, old_state, temperature, eps):
    """gspo_loss on all tokens of whole trajectories in one batch, its log-probs from the model's own logits, and its gradient."""
    def logps():
        found, index = [], []
        for i, one in enumerate(trajectories):
            for prompt, completion in one.pairs:
                logits = model.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
                found.append(logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)])
                index += [i] * len(completion)
        return torch.cat(found), torch.tensor(index)

    model.model.load_state_dict(old_state)
    with torch.no_grad():
        old, _ = logps()
    model.model.load_state_dict(state)
    new, index = logps()
    loss, metrics = gspo.gspo_loss(new, old, index, advantages, *eps)
    return torch.autograd.grad(loss, list(model.model.parameters()), allow_unused=True), metrics


@pytest.mark.parametrize("tokens", [40, 10_000])
def test_each_minibatch_steps_along_the_gradient_of_gspo_loss_on_the_whole(tokenizer, tokens):
    """Guards traps 2, 6, 7 and 9: turns left out, a denominator per microbatch, a mean over tokens, another temperature, old log-probs taken after
    the first step. tokens=40 puts about one turn in a microbatch; the reference is one batch and shares no code but gspo_loss."""
    model, trajectories = tiny_lm(tokenizer), some(8)
    for one, two in zip(trajectories, trajectories[1:]):  # so that some ratios move far: the same prompt, liked here and disliked there
        two.pairs[0] = (one.pairs[0][0], two.pairs[0][1])
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, 0.3, -0.5, 0.8])
    settings, start_state = config(tokens=tokens, dreaming=dataclasses.replace(DREAMING, temperature=0.7)), copy.deepcopy(model.model.state_dict())
    optimizer = Watched(model.model, lr=0.3)
    metrics = train.update(model, optimizer, trajectories, advantages, settings, random.Random(5))
    order = list(range(8))
    random.Random(5).shuffle(order)
    clipped, ratios = 0.0, []
    for k, (state, gradient) in enumerate(optimizer.seen):
        members = order[k::3]
        expected, measured = whole_loss(model, [trajectories[i] for i in members], advantages[members], state, start_state, 0.7, (0.03, 0.04))
        for got, want in zip(gradient, expected):
            assert torch.allclose(got, want, atol=1e-4 * max(1e-3, float(want.abs().max())), rtol=1e-3), k
        clipped, ratios = clipped + measured["clip_frac"] / 3, ratios + [measured["ratio_max"]]
    assert len(optimizer.seen) == 3 and metrics["clip_frac"] == pytest.approx(clipped) and metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert 0 < metrics["clip_frac"] < 1, "the example has to clip something, or it shows little"


def test_the_first_minibatch_has_ratio_exactly_1_and_the_next_has_not(tokenizer, monkeypatch):
    """Guards trap 1 on both sides: old log-probs of another padding (a ratio of 1.0001 is a third of the clip), and old log-probs taken again before
    every minibatch, so that nothing is ever clipped. In bf16, where padding shows most."""
    seen, real = [], gspo.gspo_coefficients
    monkeypatch.setattr(gspo, "gspo_coefficients", lambda *args: seen.append(real(*args)[1]) or real(*args))
    model = tiny_lm(tokenizer)
    model.compute = torch.bfloat16
    train.update(model, torch.optim.SGD(model.model.parameters(), lr=0.1), some(9), torch.tensor([1.0, -1.0, 0.5] * 3), config(tokens=60), random.Random(0))
    assert seen[0]["ratio_min"] == seen[0]["ratio_max"] == 1.0 and seen[0]["clip_frac"] == 0
    assert all(one["abs_log_ratio"] > 1e-6 for one in seen[1:])


def test_every_trajectory_is_in_exactly_one_minibatch(tokenizer, monkeypatch):
    """Guards: a trajectory that is trained on twice, or never; an empty minibatch (fewer trajectories than minibatches) that stops the run."""
    model, count, real = tiny_lm(tokenizer), [], gspo.gspo_coefficients
    monkeypatch.setattr(gspo, "gspo_coefficients", lambda logp, old, trajectory, advantages, *more: count.append(advantages.tolist()) or real(logp, old, trajectory, advantages, *more))
    for n in (2, 3, 7):
        count.clear()
        train.update(model, torch.optim.SGD(model.model.parameters(), lr=0.0), some(n), torch.arange(1.0, n + 1), config(), random.Random(n))
        assert sorted(sum(count, [])) == list(range(1, n + 1)) and len(count) == min(3, n)


def test_the_sampler_gap_is_what_the_sampler_said_minus_what_scoring_says(taught):
    """Guards trap 9, for good: a sampler that draws from another distribution than the update scores shows in every line of the log. Here the
    two agree; with .5 added to one, the gap is .5; experts, who were never sampled, do not count."""
    model = lm.load(taught, context=256)
    model.compute = torch.float32
    sampled = policy.rollout(CountingWorld(), model, [start(0)] * 6, 3, 16, 0.7, seed=1)
    experts = [TokenTrajectory(start(), pairs=[([5, 6], [7, 8])], logps=[[]], expert=True)]
    settings = config(dreaming=dataclasses.replace(DREAMING, temperature=0.7), sampler_gap_limit=0.6)
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.0)
    gap = lambda: train.update(model, optimizer, sampled + experts, torch.ones(7), settings, random.Random(0))["sampler_gap"]
    assert gap() < 1e-5
    for one in sampled:
        one.logps = [[logp + 0.5 for logp in turn] for turn in one.logps]
    assert gap() == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("off, stops", [(0.05, False), (0.2, True), (-0.2, True), (math.nan, True)])
def test_a_sampler_that_is_too_far_off_stops_the_run_before_anything_is_learned(taught, off, stops):
    """Guards a broken weight sync (0.2 a token, say): dreams of another policy than the one that learns from them. The limit is 0.1; all is refused
    before the first of three GSPO steps, and nothing is left in the gradients for the next."""
    model = lm.load(taught, context=256)
    model.compute = torch.float32
    sampled = policy.rollout(CountingWorld(), model, [start(0)] * 6, 3, 16, 1.0, seed=1)
    for one in sampled:
        one.logps = [[logp + off for logp in turn] for turn in one.logps]
    before, optimizer = copy.deepcopy(model.model.state_dict()), Watched(model.model, lr=0.1)
    learn = lambda: train.update(model, optimizer, sampled, torch.tensor([1.0, -1.0] * 3), config(), random.Random(0))
    if stops:
        with pytest.raises(ValueError, match=rf"differ by {abs(off):.3f} a token \(limit 0.1; .*Nothing was learned"):
            learn()
    else:
        assert learn()["sampler_gap"] == pytest.approx(off, abs=1e-4)
    assert len(optimizer.seen) == (0 if stops else 3)
    assert all(torch.equal(one, two) for one, two in zip(before.values(), model.model.state_dict().values())) == stops
    assert all(p.grad is None for p in model.model.parameters())


# ---- state -----------------------------------------------------------------------------------------------------------------


def test_metrics_keep_the_lines_of_done_updates_and_nothing_else(tmp_path):
    """Guards trap 13: after `done` updates the next one is number `done`, so its line will be written again; so will the evaluation behind the last
    update. A line cut in half by the kill is no line."""
    file = tmp_path / "metrics.jsonl"
    train.cut_metrics(file, 3)  # a first start has none
    file.write_text("".join(json.dumps({"update": n, "x": "a\u2028b"}) + "\n" for n in range(6)) + '{"update": 6, "drea')
    for done, kept in ((6, 6), (4, 4), (4, 4), (0, 0)):
        train.cut_metrics(file, done)
        assert [json.loads(line)["update"] for line in file.read_text().splitlines()] == list(range(kept))


def checkpoint(folder, model, settings, *steps) -> distributed.Checkpoints:
    checkpoints = distributed.Checkpoints(folder, model.model, torch.optim.AdamW(model.model.parameters(), lr=0.1))
    for step in steps:
        checkpoints.save(step, dataclasses.asdict(settings))
    return checkpoints


def test_a_checkpoint_of_another_config_is_refused_by_the_names_of_what_changed(model, tmp_path):
    """Guards: a run that goes on with another learning rate or other dreams, and reports figures of neither config. How long and how often to look may
    change."""
    settings = config()
    checkpoints = checkpoint(tmp_path / "checkpoint", model, settings, 7)
    longer = dataclasses.replace(settings, updates=9999, evaluate_every=1, checkpoint_every=1, threads=2)
    assert checkpoints.load(dataclasses.asdict(longer), train.FREE) == 7
    other = dataclasses.replace(settings, lr=0.5, dreaming=dataclasses.replace(DREAMING, group=5))
    with pytest.raises(ValueError, match=r"another config \(lr, dreaming changed\).*--out"):
        checkpoints.load(dataclasses.asdict(other), train.FREE)


DAMAGE = {"half": lambda whole: whole[: len(whole) // 2], "a few bytes": lambda whole: whole[:20], "nothing": lambda whole: b"", "another file": lambda whole: b"hello, I am a text\n" * 9,
          "gone": None}


@pytest.mark.parametrize("name", ["run.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_an_error_that_names_the_folder_and_the_way_out(model, tmp_path, caplog, name, damage):
    """Guards: a traceback from deep inside torch (raised, or logged on the way), a run that starts again without a word, and a way out that is none:
    without the damaged folder it goes on from the one before, with its weights."""
    checkpoints = checkpoint(tmp_path / "checkpoint", model, config(), 3)
    weights = copy.deepcopy(model.model.state_dict())
    model.model.model.embed_tokens.weight.data += 1
    checkpoints.save(7, dataclasses.asdict(config()))
    assert {file.name for file in (tmp_path / "checkpoint/step-7").iterdir()} == {"run.json", ".metadata", "__0_0.distcp"}, "or there is another file to damage"
    file = tmp_path / "checkpoint/step-7" / name
    whole = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(DAMAGE[damage](whole))
    with pytest.raises(distributed.CheckpointError, match=r"^\S*/checkpoint/step-7 cannot be read \(\w+Error.*\); delete it to go on from the one before$") as error:
        checkpoints.load(dataclasses.asdict(config()), train.FREE)
    assert "\n" not in str(error.value) and not any(record.exc_info for record in caplog.records)
    shutil.rmtree(tmp_path / "checkpoint/step-7")
    assert checkpoints.load(dataclasses.asdict(config()), train.FREE) == 3
    assert all(torch.equal(one, two) for one, two in zip(weights.values(), model.model.state_dict().values()))


def test_a_disk_that_is_full_is_an_error_that_says_so_and_leaves_the_checkpoint_before(model, tmp_path, monkeypatch):
    """Guards: torch's exceptions for this, which no `except Exception` catches, and a half-written folder under the name of a whole one."""
    checkpoints = checkpoint(tmp_path / "checkpoint", model, config(), 3)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(distributed.CheckpointError, match=r"step-7 cannot be written \(OSError: .*No space left on device\); make room"):
            checkpoints.save(7, dataclasses.asdict(config()))
    assert checkpoints.load(dataclasses.asdict(config()), train.FREE) == 3
    checkpoints.save(7, dataclasses.asdict(config()))
    assert checkpoints.load(dataclasses.asdict(config()), train.FREE) == 7


# ---- the loop --------------------------------------------------------------------------------------------------------------


class Web(CountingWorld):
    def __init__(self):
        super().__init__(end=4)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def tiny_run(folder: Path, taught) -> train.Config:
    folder.mkdir(exist_ok=True)
    record(folder / "recorded.jsonl", [recorded(["click [1]", "click [2]"], 0), recorded(["click [1]", "click [1]", "click [2]"], 1, reward=0)])
    return train.Config(policy=str(taught), world_model=str(taught), out=str(folder / "agent"), trajectories=str(folder / "recorded.jsonl"), updates=4, minibatches=2, lr=2e-4,
                        eps_low=0.03, eps_high=0.04, tokens=600, context=256, evaluate_every=2, evaluate_seeds="1000000:1", evaluate_horizon=3, checkpoint_every=2, sampler="transformers", dreaming=DREAMING)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import test_train, train
train.Browser, train.TASKS = test_train.Web, ("count",)
rename = Path.rename
def kill(source, target):  # while the second checkpoint stands half-way: written, not yet renamed
    if Path(target).name == "step-4":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target)
Path.rename = kill
train.train(test_train.tiny_run(Path({folder!r}), {taught!r}))
"""


def rows(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "agent.run/metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in lines]


def test_a_run_that_was_killed_again_and_again_is_bit_for_bit_the_run_that_was_not(taught, tmp_path, monkeypatch):
    """Guards trap 13: random state off by one, no data cursor, an optimizer that starts anew, lines written twice. Killed before the first
    checkpoint, before the first file of a checkpoint is written, between two minibatches, and with kill -9 while a checkpoint is being renamed;
    recorded data relative to nothing else."""
    monkeypatch.setattr(train, "Browser", Web)
    monkeypatch.setattr(train, "TASKS", ("count",))
    monkeypatch.setattr(train, "plot", lambda *_: None)
    straight, broken = tmp_path / "run", tmp_path / "killed"
    known, draw = [], dream.draw  # what each update knew of the groups before it
    monkeypatch.setattr(dream, "draw", lambda *args: known.append({task: [*had] for task, had in args[-1].items()}) or draw(*args))
    train.train(tiny_run(straight, taught))
    of_straight = known[:]
    # The two runs must have one config: the same folder names, one after the other.
    straight = straight.rename(tmp_path / "straight")
    broken = tmp_path / "run"

    class Kill(BaseException):
        pass

    def dying(function, when):
        calls = []

        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == when:
                raise Kill
            return function(*args, **kwargs)
        return call

    # In update 1; in the checkpoint behind it; in update 2, after one of its minibatches (of update 0 on: the checkpoint never stood).
    for module, name, when in ((dream, "dream", 2), (distributed.dcp, "save", 1), (gspo, "gspo_coefficients", 6)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, dying(getattr(module, name), when))
            with pytest.raises(Kill):
                train.train(tiny_run(broken, taught))
    with open(broken / "agent.run/metrics.jsonl", "a") as file:
        file.write('{"update": 2, "dream_succ')  # what a kill leaves of a line
    here = Path(__file__).parent
    script = KILLED.format(paths=[str(here.parent), str(here)], folder=str(broken), taught=str(taught))
    died = subprocess.run([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    assert not (broken / "agent").exists() and [row["update"] for row in rows(broken)] == [0, 1, 2, 3]
    left = lambda run: sorted(path.name for path in (run / "agent.run/checkpoint").iterdir())
    assert left(broken) == ["step-2", "step-4.tmp"]
    train.train(tiny_run(broken, taught))

    assert rows(broken) == rows(straight) and [row["update"] for row in rows(straight)] == [0, 1, 2, 3, 4]
    assert known[-2:] == of_straight[2:] and [sum(map(len, one.values())) for one in of_straight] == [0, 3, 6, 9]
    assert left(broken) == left(straight) == ["step-2", "step-4"]
    ended = []
    for run in (straight, broken):
        dcp_to_torch_save(run / "agent.run/checkpoint/step-4", run / "step-4.pt")
        ended.append(torch.load(run / "step-4.pt") | json.loads((run / "agent.run/checkpoint/step-4/run.json").read_text()))
    flat = [torch.utils._pytree.tree_flatten(one)[0] for one in ended]
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True))
    assert (broken / "agent/model.safetensors").read_bytes() == (straight / "agent/model.safetensors").read_bytes()
    # And it was a run in which something happened, or equal would mean nothing.
    assert sum(row.get("grad_norm", 0) > 0 for row in rows(straight)) >= 3 and any(row.get("clip_frac", 0) > 0 for row in rows(straight))
    assert [("real_success" in row, "dream_success" in row) for row in rows(straight)] == [(True, True), (False, True)] * 2 + [(True, False)]

    before = (broken / "agent/model.safetensors").read_bytes()
    train.train(tiny_run(broken, taught))  # the same command on a finished run changes nothing
    assert rows(broken) == rows(straight) and (broken / "agent/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("judge, frozen", [("policy", True), ("current", False), ("world_model", True)])
def test_the_judge_is_frozen_unless_it_is_the_current_policy(taught, tmp_path, monkeypatch, judge, frozen):
    """Guards: a judge that shares its weights with the policy by accident, learns with it and can be talked round; or `current` that is not."""
    seen = []

    class Stop(Exception):
        pass

    def watch(model, world_model, judge_model, *_, **__):
        seen.extend([model, judge_model, world_model.lm])
        raise Stop

    monkeypatch.setattr(train, "Browser", Web)
    monkeypatch.setattr(dream, "dream", watch)
    with pytest.raises(Stop):
        train.train(dataclasses.replace(tiny_run(tmp_path, taught), evaluate_every=0, dreaming=dataclasses.replace(DREAMING, judge=judge)))
    model, judging, dreaming = seen
    assert (judging.model is not model.model) == frozen and (judging is dreaming) == (judge == "world_model") and dreaming.model is not model.model


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_all_models_of_a_run_compute_in_the_configs_type(taught, tmp_path, compute):
    """Guards: --compute that reaches the world model and not the policy that learns."""
    model, actor, wm, judging = train.models(dataclasses.replace(tiny_run(tmp_path, taught), compute=compute), tmp_path)
    assert {one.compute for one in (model, actor, wm.lm, judging)} == {getattr(torch, compute)} and model.model.lm_head.weight.dtype == torch.float32


# ---- commands --------------------------------------------------------------------------------------------------------------


def command(monkeypatch, module, *words) -> str:
    """What `python module words` says when it exits with an error."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *words])
    with pytest.raises(SystemExit) as exit:
        module.main()
    assert exit.value.code not in (0, None)
    return str(exit.value.code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the paper's recipe starts")
@pytest.mark.parametrize("module", [train, policy, world_model])
def test_without_a_gpu_the_papers_recipe_says_in_one_sentence_what_would_run(monkeypatch, module):
    """Guards: a download of 8 B weights, or a traceback, on a laptop."""
    for words in ([], ["paper"]):
        said = command(monkeypatch, module, *words)
        assert "\n" not in said and "GPU" in said and said.endswith(f"python {module.__name__}.py tiny")


@pytest.mark.parametrize("module, words", [(train, ["tiny"]), (train, ["paper"]), (policy, ["tiny"]), (world_model, ["tiny"]), (evaluate, [])])
def test_an_unknown_flag_is_an_error_that_names_it(monkeypatch, capsys, module, words):
    """Guards: a misspelt setting that is dropped, and a run of the default that nobody asked for."""
    command(monkeypatch, module, *words, "--learning-rat", "1")
    assert "--learning-rat" in capsys.readouterr().err


@pytest.mark.parametrize("module, words, says", [
    (train, ["tiny", "--policy", "{}/none"], "make it with: python policy.py tiny"), (train, ["tiny", "--policy", "{}/model", "--world-model", "{}/none"], "make it with: python world_model.py tiny"),
    (policy, ["tiny", "--base", "tiny/none"], "make it with: python tiny/base.py"), (world_model, ["tiny", "--base", "tiny/none"], "make it with: python tiny/base.py"),
    (evaluate, ["--checkpoint", "{}/none"], "make it with: python policy.py tiny"), (evaluate, ["--seeds", "5:1"], "give --checkpoint")])
def test_a_stage_whose_input_is_missing_names_the_command_that_makes_it(monkeypatch, model, tmp_path, module, words, says):
    lm.save(model, tmp_path / "model")
    said = command(monkeypatch, module, *(word.format(tmp_path) for word in words), *(["--out", str(tmp_path / "out")] if module is not evaluate else []))
    assert says in said and said.startswith(f"{module.__name__}.py: ")


def test_a_damaged_checkpoint_and_a_broken_sampler_are_one_line_of_the_command(monkeypatch, taught, tmp_path):
    """Guards: a page of tracebacks where a sentence says which folder to delete; an error of the update that main does not expect."""
    settings = tiny_run(tmp_path, taught)
    words = ["tiny", "--policy", str(taught), "--world-model", str(taught), "--out", settings.out, "--trajectories", settings.trajectories, "--demonstrations", "0", "--evaluate-every", "0",
             "--context", "256", "--dreaming.max-new-tokens", "16", "--dreaming.world-model-tokens", "48", "--dreaming.judge-tokens", "16", "--sampler-gap-limit", "0"]
    monkeypatch.setattr(train, "Browser", Web)
    said = command(monkeypatch, train, *words)
    assert said.startswith("train.py: what was sampled and what is scored differ by ") and "\n" not in said and not (tmp_path / "agent.run/checkpoint").exists()
    (tmp_path / "agent.run/checkpoint/step-5").mkdir(parents=True)
    said = command(monkeypatch, train, *words)
    assert said.startswith(f"train.py: {tmp_path}/agent.run/checkpoint/step-5 cannot be read (") and said.endswith("; delete it to go on from the one before") and "\n" not in said


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_minibatch_is_refused_because_the_clip_could_never_act(wrong):
    with pytest.raises(ValueError, match="minibatches.*at least 2"):
        train.Config(minibatches=wrong)


def test_the_laptops_stages_fit_together():
    """Guards: a dreamer whose experts are not the demonstrations its SFT agent was cloned from (facts.md: experts from the SFT demonstrations only),
    stages that look for each other's folders in vain, and dev seeds that are somebody else's."""
    assert (train.TINY.policy, train.TINY.world_model) == (policy.TINY.out, world_model.TINY.out)
    assert (train.TINY.demonstrations, train.TINY.seed, train.TINY.trajectories) == (policy.TINY.demonstrations, policy.TINY.seed, policy.TINY.trajectories)
    assert train.TINY.context == policy.TINY.context == world_model.TINY.context and policy.TINY.base == world_model.TINY.base
    for one in (train.TINY, train.Config()):
        assert set(data.parse_seeds(one.evaluate_seeds)) <= set(data.SEEDS["dev"]) and one.minibatches >= 2
    assert set(data.parse_seeds(evaluate.Config().seeds)) <= set(data.SEEDS["eval"])
