"""Claims about sft.py: what a step minimises, what is learned from, and that a kill changes nothing."""
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, base_folder, record, recorded
from helpers.killed import shot
from helpers.scores import own_logits, pairs_of, texts
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distributed
import lm
import sft
from config import SFT, UserError

flat = lambda tensors: torch.cat([tensor.flatten() for tensor in tensors])
close = lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def fitted(model, items, **how) -> tuple[dict, list[torch.Tensor]]:
    """sft.fit's report, and the gradient of every step as AdamW gets it. The weights stay."""
    seen, net = [], model.net
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(flat(p.grad for p in net.parameters())))
    report = sft.fit(model, items, SFT(lr=1e-30, **how))
    hook.remove()
    return report, seen


def test_steps_minimise_the_mean_over_all_target_tokens_and_clipping_leaves_them_their_weight(model):
    """Guards: prompt tokens in the loss, a mean over sequences or over microbatches, a wrong position; steps
    of like length that each weigh the same, so that target tokens of long pages count half (NOTES 10.9)."""
    items = [[pair] for pair in pairs_of(random.Random(1), [(6, 2)] * 4 + [(24, 8)] * 3)]  # 32 tokens; 96
    logps = [own_logits(model, p + c)[len(p) - 1 : -1].log_softmax(-1)[range(len(c)), c] for (p, c), in items]
    loss = -torch.cat(logps).mean()
    gradient = flat(torch.autograd.grad(loss, list(model.net.parameters())))
    for tokens, microbatches in (1000, 1), (64, 4), (1, 7):
        report, (found,) = fitted(model, items, tokens=tokens, microbatches=microbatches, clip_norm=1e9)
        assert report == {"steps": 1, "tokens": 128, "loss": pytest.approx(loss.item(), abs=1e-4)}
        assert close(found, gradient)
    _, (first, second) = fitted(model, items, tokens=16, microbatches=3, clip_norm=1e9)
    assert close((first + second) / 2, gradient)
    _, clipped = fitted(model, items, tokens=16, microbatches=3, clip_norm=1e-3)
    assert sorted(map(torch.norm, clipped)) == pytest.approx([0.5e-3, 1.5e-3], rel=1e-3)


@pytest.fixture
def config(tmp_path):
    done, failed = ["click [1]", "click [2]"], ["click [1]", "click [1]", "stop [x]"]
    record(tmp_path / "explored.jsonl", [recorded(done, 0), recorded(failed, 1, reward=0), recorded(done, 2),
                                         recorded(done, 3, task="other")])
    record(tmp_path / "played.jsonl", [recorded(failed, 4, reward=0, goal="Wait."), recorded(done, 5)])
    return SFT(str(base_folder()), str(tmp_path / "explored.jsonl"), context=512, out=str(tmp_path / "out"),
               system_prompt="Act.", lr=1e-3, tokens=120, microbatches=1, checkpoint_every=2)


def test_each_model_learns_from_its_own_trajectories(config, model):
    """Guards: a failure that is cloned, or a success too many; episodes of the policy that world model and
    reward model do not see; a reward model of tasks that the policy does not play."""
    config = replace(config, played=config.recorded.replace("explored", "played"))
    words = lambda what: [text for _, text in texts(model, sum(sft.tokenised(what, config)[0], []))]
    assert len(words("policy")) == 6 and not any("stop" in text for text in words("policy"))
    assert len(words("world_model")) == 12 and sorted(words("reward_model")) == [" NO"] * 5 + [" YES"] * 3
    assert sft.tokenised("reward_model", config)[1]["dropped: of tasks that were not played"] == 1
    assert len(sft.tokenised("policy", replace(config, per_task=1))[0]) == 4


def test_settings_that_learn_nothing_or_let_ranks_idle_are_refused(config, model, monkeypatch):
    """Guards: a run of hours that learns nothing, or waits for two GPUs of eight."""
    for name in ("epochs", "tokens", "microbatches", "checkpoint_every"):
        with pytest.raises(UserError, match="give more than 0"):
            replace(config, **{name: 0})
    monkeypatch.setattr(distributed, "world_size", lambda: 8)
    with pytest.raises(UserError, match="of 8 ranks some would always idle"):
        sft.fit(model, [], replace(config, microbatches=6))


def test_killed_at_any_moment_the_same_command_leaves_what_a_run_leaves_that_nobody_killed(config, tmp_path):
    """Guards NOTES 5.13: batches learned twice or never, an optimizer or a rate that starts anew; half a
    folder. kill -9: between two checkpoints, and while it writes the model."""
    out, straight = Path(config.out), tmp_path / "straight"
    command = lambda: sft.learn("policy", config) | {"loss": 0}  # smoothed from where it begins
    report = command()
    out.rename(straight)
    shot(command, sft, "cosine", 4)
    shot(command, lm, "save", 1)
    with mock.patch.object(sft, "cosine", side_effect=sft.cosine) as cosine:
        assert command() == report
    assert [call.args for call in cosine.call_args_list] == [(4, 6), (5, 6)], "it goes on from step 4"
    resumed, other = (load_file(folder / "model.safetensors") for folder in (out, straight))
    assert all(torch.equal(resumed[name], other[name]) for name in other)
    assert json.loads((out / "training.json").read_text()) | {"loss": 0} == report
    assert not Path(f"{config.out}.sft").exists()


def test_lora_leaves_a_folder_that_is_asked_as_it_was_trained(config):
    """Guards: a merged folder without its system prompt. The process has a group of one rank. (Which weights
    move: test_gpt_oss.)"""
    words = f"--recorded {config.recorded} --out {config.out} --context 512 --lora-rank 2 --lr .01".split()
    done = subprocess.run([sys.executable, "sft.py", "world_model", "--base", config.base, *words,
                           "--system-prompt", "Act."], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and json.loads(done.stdout)["transitions"] == 8, done.stderr
    assert lm.load(config.out).tokenizer.init_kwargs["system_prompt"] == "Act."
