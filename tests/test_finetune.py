"""Claims about finetune.py: what a step minimises, who does its share, and what a killed lesson leaves."""
import copy
import dataclasses
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import record, recorded, tiny_lm
from helpers.killed import goes_on, killed
from helpers.scores import each_step
from helpers.tokens import models, pairs_of, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distributed
import finetune
import lm
import recipe
import sft

# ---- fine-tuning -------------------------------------------------------------------------------------------

def own_loss(net, pairs) -> torch.Tensor:
    """transformers' own loss, by eager attention: ids (B, T), and labels (B, T) that are -100 outside the
    targets."""
    width = max(len(p) + len(c) for p, c in pairs)
    gaps = [width - len(p) - len(c) for p, c in pairs]
    ids = [p + c + [0] * gap for (p, c), gap in zip(pairs, gaps)]
    labels = [[-100] * len(p) + c + [-100] * gap for (p, c), gap in zip(pairs, gaps)]
    net.set_attn_implementation("eager")
    loss = net(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
    net.set_attn_implementation("tree")
    return loss


def gradients(monkeypatch) -> list[list[torch.Tensor]]:
    """Of every step of a fine-tuning from now on, before it is clipped."""
    seen, clip = [], distributed.clip_grad_norm

    def watched(net, limit):
        seen.append([p.grad.clone() for p in net.parameters()])
        return clip(net, limit)

    monkeypatch.setattr(distributed, "clip_grad_norm", watched)
    return seen


def assert_gradient(found: list[torch.Tensor], net, loss: torch.Tensor) -> None:
    """It is the gradient of this loss."""
    net.zero_grad()
    loss.backward()
    for a, p in zip(found, net.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-5 * float(p.grad.abs().max()))


def test_one_step_is_adamw_on_the_mean_over_target_tokens(model):
    """Guards: prompt or padding tokens in the loss, the end-of-turn left out, a mean over sequences, a wrong
    position. The reference is transformers' own loss, and an AdamW step by hand."""
    eos = model.tokenizer.eos_token_id
    pairs = [(p, c + [eos]) for p, c in pairs_of(random.Random(1), [(9, 3), (4, 8), (15, 1)])]
    reference = copy.deepcopy(model.model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    loss = own_loss(reference, pairs)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    optimizer.step()

    config = finetune.FineTune(epochs=1, lr=0.01, tokens=1000, weight_decay=0.1, clip_norm=0.5)
    report = finetune.fit(model, pairs, config)
    tokens = sum(len(p) + len(c) for p, c in pairs)
    assert report == {"steps": 1, "tokens": tokens, "idle": 0,
                      "loss": pytest.approx(loss.item(), abs=1e-5)}
    for (name, a), b in zip(model.model.named_parameters(), reference.parameters()):
        # Adam's first step is lr * sign(g) wherever g is not tiny: a few entries have a g of rounding noise.
        assert ((a - b).abs() > 1e-4).float().mean() < 0.01, name


def test_two_microbatches_are_one_step_in_which_every_target_token_weighs_the_same(model, monkeypatch):
    """Guards: a mean over microbatches of means over tokens, a step or a reported loss of one microbatch. The
    reference is transformers' loss on all sequences at once."""
    pairs, seen = pairs_of(random.Random(1), [(3, 1)] * 4 + [(20, 12)] * 2), gradients(monkeypatch)
    reference = copy.deepcopy(model.model)
    loss = own_loss(reference, pairs)
    config = finetune.FineTune(epochs=1, lr=0.01, tokens=64, microbatches=2)
    assert len(lm.microbatches([len(p) + len(c) for p, c in pairs], config.tokens)) == 2
    report = finetune.fit(model, pairs, config)
    assert report == {"steps": 1, "tokens": 4 * 4 + 2 * 32, "idle": 0,
                      "loss": pytest.approx(loss.item(), abs=1e-5)}
    (found,) = seen
    assert_gradient(found, reference, loss)


def test_a_token_of_a_step_of_short_sequences_weighs_no_more(model, monkeypatch):
    """Guards: steps of like length that each weigh the same, so that target tokens of long pages count half.
    Where a quarter of each sequence is target, all target tokens of a run weigh the same. The loss that is
    said is a step's own."""
    pairs = pairs_of(random.Random(1), [(6, 2)] * 4 + [(24, 8)] * 3)  # 2 x (8 + 8) tokens; 3 x 32
    config, losses = finetune.FineTune(lr=0.0, tokens=16, microbatches=3, clip_norm=1e9), []
    seen = gradients(monkeypatch)
    with each_step(lambda step, loss: losses.append(loss)):
        finetune.fit(model, pairs, config)
    schedule = finetune.schedule([8] * 4 + [32] * 3, config)
    assert sorted(sum(map(len, step)) for step in schedule) == [3, 4]
    loss = own_loss(model.model, pairs)  # the mean over all target tokens, by transformers
    assert_gradient([(a + b) / 2 for a, b in zip(*seen)], model.model, loss)
    own = [own_loss(model.model, part).item() for part in (pairs[:4], pairs[4:])]
    assert sorted(losses) == pytest.approx(sorted(own), abs=1e-5)

    model.model.zero_grad()  # with one microbatch a step each is as it was
    one = dataclasses.replace(config, microbatches=1)
    seen.clear()
    finetune.fit(model, pairs, one)
    ((first,), *_) = finetune.schedule([8] * 4 + [32] * 3, one)
    assert_gradient(seen[0], model.model, own_loss(model.model, [pairs[i] for i in first]))


def test_clipping_leaves_a_step_the_weight_of_its_tokens(model, monkeypatch):
    """Guards: weighing first and clipping then: where every gradient is over the limit, all steps would weigh
    the same."""
    pairs, norms = pairs_of(random.Random(1), [(6, 2)] * 4 + [(24, 8)] * 3), []  # 32 tokens; 96
    clip = distributed.clip_grad_norm

    def watched(net, limit):
        found = clip(net, limit)
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters())))
        return found

    monkeypatch.setattr(distributed, "clip_grad_norm", watched)
    finetune.fit(model, pairs, finetune.FineTune(lr=0.0, tokens=16, microbatches=3, clip_norm=1e-3))
    assert sorted(norms) == pytest.approx([0.5e-3, 1.5e-3], rel=1e-3)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=150), st.integers(1, 9), st.integers(0, 99),
       st.sampled_from([0.4, 1, 2.3]))
@settings(models, max_examples=200)
def test_a_steps_microbatches_cost_alike_and_an_epoch_takes_each_sequence_once(lengths, count, seed, epochs):
    """Guards: ranks that wait for the one that has the long page; an epoch that leaves out the longest, or
    takes other microbatches than lm.microbatches made; with one microbatch a step another order than
    theirs."""
    config = finetune.FineTune(epochs=epochs, tokens=2048, microbatches=count, seed=seed)
    rng = random.Random(seed)
    schedule = finetune.schedule(lengths, config)
    for epoch in range(math.ceil(epochs)):
        made = lm.microbatches(lengths, config.tokens, rng)
        made = made[: math.ceil(len(made) * min(1, epochs - epoch))]
        steps, schedule = schedule[: -(-len(made) // count)], schedule[-(-len(made) // count) :]
        assert sorted(batch for step in steps for batch in step) == sorted(made)
        assert sorted(map(len, steps), reverse=True)[:-1] == [count] * (len(steps) - 1)
        spans = sorted(sorted(sum(lengths[i] for i in batch) for batch in step) for step in steps)
        assert all(low[-1] <= high[0] for low, high in zip(spans, spans[1:]))  # no step overlaps another
        assert count > 1 or steps == [[batch] for batch in made]
    assert not schedule


def test_steps_of_like_cost_come_in_random_order():
    """Guards: a run that sees short pages first, or the longest, or every epoch in the same order."""
    lengths = list(range(1000, 1400))
    schedule = finetune.schedule(lengths, finetune.FineTune(epochs=2, tokens=1, microbatches=8))
    longest = [max(lengths[i] for batch in step for i in batch) for step in schedule]
    first, second = longest[:50], longest[50:]
    assert sorted(first) == sorted(second) and first != second
    for order in (first, second):  # neighbours differ by 400 / 3 by chance, by 8 where they are sorted
        assert sum(abs(a - b) for a, b in zip(order, order[1:])) / 49 > 80


class OnDisk:
    """Pairs with `lengths` of numpy, as a memory-mapped file has them. Notes which are read."""

    def __init__(self, pairs):
        self.pairs, self.read = pairs, []
        self.lengths = np.array([len(p) + len(c) for p, c in pairs], dtype=np.int32)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        self.read.append(index)
        return self.pairs[index]


def test_pairs_on_disk_are_read_in_the_step_that_learns_them_and_learned_alike(model, tmp_path):
    """Guards: 43,000 pages that are read before the first step, or twice; a resume that takes other examples
    for these, since numpy shortens a long array that it prints."""
    pairs, losses = pairs_of(random.Random(2), [(5, 5)] * 9 + [(9, 3)] * 9), []
    config = finetune.FineTune(epochs=2, lr=1e-2, tokens=24, microbatches=2, checkpoint_every=2)
    begin, disk, read = copy.deepcopy(model.model.state_dict()), OnDisk(pairs), []

    def each(step, loss):
        losses.append(loss)
        read.append(disk.read[:])
        disk.read.clear()

    with each_step(each):
        in_memory = finetune.fit(model, pairs, config, checkpoint=tmp_path / "memory")
    expected = losses[:]
    del losses[:], read[:]
    model.model.load_state_dict(begin)
    with each_step(each):
        assert finetune.fit(model, disk, config, checkpoint=tmp_path / "disk") == in_memory
    assert losses == expected
    schedule = [[i for batch in step for i in batch] for step in finetune.schedule(disk.lengths, config)]
    assert read == [[0, len(pairs) - 1, *schedule[0]], *schedule[1:]]  # first and last: they name the set
    assert disk.read == []
    runs = [next((tmp_path / kind).glob("step-*/run.json")).read_text() for kind in ("memory", "disk")]
    assert runs[0] == runs[1]


def test_an_interrupted_fine_tuning_goes_on_bit_for_bit(model, tmp_path):
    """Guards NOTES 5.13 in a night's fine-tuning: batches learned twice or never, an optimizer or a learning
    rate that starts anew. Ten steps, kept every second; killed before the first checkpoint (twice), right
    behind a checkpoint, between two, and in the last step."""
    pairs = pairs_of(random.Random(2), [(5, 5)] * 9 + [(9, 3)] * 9)
    config = finetune.FineTune(epochs=2, lr=1e-2, tokens=24, microbatches=2, checkpoint_every=2)
    begin, starts = copy.deepcopy(model.model.state_dict()), []
    watch = SimpleNamespace(step=lambda *step: starts[-1].append(step))

    def command():
        model.model.load_state_dict(begin)
        starts.append([])
        with each_step(lambda *step: watch.step(*step)):
            finetune.fit(model, pairs, config, checkpoint=tmp_path / "sft")

    dies = lambda call: lambda: killed(watch, "step", call, behind=True)
    goes_on(tmp_path / "sft", command, [dies(call) for call in (1, 1, 5, 2, 6)],
            lambda: copy.deepcopy(model.model.state_dict()))
    whole, *others = starts
    assert len(whole) == 10
    # A step's checkpoint stands once it was told of the step.
    for seen, (first, last) in zip(others, [(0, 0), (0, 0), (0, 4), (4, 5), (4, 9), (8, 9)], strict=True):
        assert seen == whole[first : last + 1], "it sees the same batches"


def test_an_interrupted_fine_tuning_does_not_go_on_with_other_examples_settings_or_base(
        model, tmp_path, monkeypatch):
    """Guards: the second half of another training set behind the first half of this one; the weights of
    another base."""
    pairs = pairs_of(random.Random(2), [(5, 5)] * 8)
    config = finetune.FineTune(epochs=1, lr=1e-3, tokens=20, checkpoint_every=2)
    finetune.fit(model, pairs, config, checkpoint=tmp_path / "sft")  # 4 steps: step 2's stands
    others = pairs[:-1] + pairs_of(random.Random(3), [(5, 5)])
    slower, says = dataclasses.replace(config, lr=1e-4), r"step-2 is from another config \(%s changed\)"
    with pytest.raises(distributed.CheckpointError, match=says % "pairs"):
        finetune.fit(model, others, config, checkpoint=tmp_path / "sft")
    other = dataclasses.replace(model, compute=torch.bfloat16)
    with pytest.raises(distributed.CheckpointError, match="matrix products changed from torch.float32 to"):
        finetune.fit(other, pairs, config, checkpoint=tmp_path / "sft")
    with pytest.raises(distributed.CheckpointError, match=says % "finetune"):
        finetune.fit(model, pairs, slower, checkpoint=tmp_path / "sft")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.config, "name_or_path", "another")
        with pytest.raises(distributed.CheckpointError, match="base changed from .* to another"):
            finetune.fit(model, pairs, config, checkpoint=tmp_path / "sft")


def test_a_gradient_that_is_not_finite_ends_a_fine_tuning_before_its_step(model, tmp_path, monkeypatch):
    """Guards: nan weights, and a checkpoint of them beside which the good one is removed. Given again, the
    same command goes on from the last checkpoint."""
    pairs = pairs_of(random.Random(2), [(5, 5)] * 8)
    config = finetune.FineTune(epochs=1, lr=1e-3, tokens=20, checkpoint_every=1)
    begin, straight, losses = copy.deepcopy(model.model.state_dict()), [], []
    with each_step(lambda *step: straight.append(step)):
        finetune.fit(model, pairs, config)
    model.model.load_state_dict(begin)
    true, nans = lm.token_logps, iter([1, 1, math.nan])

    def spoiled(*args):
        logp, row = true(*args)
        return logp * next(nans), row

    with monkeypatch.context() as patch:
        patch.setattr(lm, "token_logps", spoiled)
        with pytest.raises(ValueError, match="norm is nan: this step was not made, .* checkpoint is good"):
            finetune.fit(model, pairs, config, checkpoint=tmp_path / "sft")
    assert all(value.isfinite().all() for value in model.model.state_dict().values())
    assert [path.name for path in (tmp_path / "sft").iterdir()] == ["step-2"]
    model.model.zero_grad()  # a new process has no gradients
    with each_step(lambda *step: losses.append(step)):
        finetune.fit(model, pairs, config, checkpoint=tmp_path / "sft")
    assert losses == straight[2:] and len(losses) == 2


def test_a_small_mapping_is_learned_by_heart_and_then_written(model):
    """Guards the whole path: targets shifted by one or of other rows, an end-of-turn that is never
    written."""
    colours = {"plum": "blue", "lime": "green", "chalk": "white and grey", "fire engine": "red"}
    pairs, losses = [], []
    for fruit, colour in colours.items():
        question = [{"role": "user", "content": f"colour of {fruit}?"}]
        pairs.append((model.template.prompt_ids(question), model.template.completion_ids(colour)))
    config = finetune.FineTune(epochs=60, lr=3e-3, tokens=60)
    with each_step(lambda step, loss: losses.append(loss)):
        finetune.fit(model, pairs, config)
    assert losses[0] > 3 and max(losses[-4:]) < 0.05
    samples = lm.sample(model, [prompt for prompt, _ in pairs], 12, 0.0, 0)
    assert [(s.text, s.truncated) for s in samples] == [(colour, False) for colour in colours.values()]


def test_the_learning_rate_warms_up_and_ends_at_a_tenth():
    """Derivation: warm-up 3 % of 100 steps is 3 steps (1/3, 2/3, 1); half-way down the cosine is (1 + 0.1) /
    2; the last step is just above 0.1."""
    rates = [finetune.cosine(step, 100) for step in range(100)]
    assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1]) and rates[3:] == sorted(rates[3:], reverse=True)
    assert finetune.cosine(3 + 97 // 2, 100) == pytest.approx(0.55, abs=0.01) and 0.1 <= rates[-1] < 0.101
    assert finetune.cosine(0, 1) == 1 and finetune.cosine(99, 100, floor=0.0) < 0.001


def test_every_step_is_made_at_its_own_learning_rate(model):
    """Guards: a schedule that is a step ahead, or counts microbatches. Derivation: step 0 alone warms up;
    then floor + (1 - floor) (1 + cos(pi k / 3)) / 2 for k = 0, 1, 2."""
    rates, betas, pairs = [], set(), pairs_of(random.Random(2), [(5, 5)] * 8)

    def note(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.add(optimizer.param_groups[0]["betas"])

    watch = register_optimizer_step_pre_hook(note)
    for floor in (0.1, 0.0):
        finetune.fit(model, pairs, finetune.FineTune(epochs=1, lr=2e-3, floor=floor, tokens=10,
                                                     microbatches=2))
    watch.remove()
    assert rates == pytest.approx([2e-3, 2e-3, 0.775 * 2e-3, 0.325 * 2e-3,
                                   2e-3, 2e-3, 0.75 * 2e-3, 0.25 * 2e-3])
    assert betas == {(0.9, 0.98)}


def test_what_cannot_be_learned_is_an_error_that_says_so(model, monkeypatch):
    """Guards: a node of 8 GPUs of which 7 repeat what the first learns, for 25 hours in place of 3."""
    monkeypatch.setattr(distributed, "world_size", lambda: 8)
    says = "agent: microbatches 3: 5 ranks would idle in every step; give --sft.microbatches 8 or more"
    with pytest.raises(ValueError, match=says):
        finetune.fit(model, pairs_of(random.Random(2), [(5, 5)]), finetune.FineTune(microbatches=3), "agent")
    with pytest.raises(ValueError, match="world model: there is nothing to learn from"):
        finetune.fit(model, [], finetune.FineTune(), "world model")
    for wrong, says in (({"epochs": 0}, "--sft.epochs 0: give more than 0"),
                        ({"checkpoint_every": 0}, "--sft.checkpoint-every 0: give 1 or more"),
                        ({"tokens": 0}, "--sft.tokens 0"), ({"microbatches": 0}, "--sft.microbatches 0")):
        with pytest.raises(ValueError, match=says):
            finetune.FineTune(**wrong)


# ---- sft.py ------------------------------------------------------------------------------------------------

@pytest.fixture
def episodes(tokenizer, tmp_path):
    """A folder with a random base, what an explorer recorded, and what a policy played."""
    lm.save(tiny_lm(tokenizer), tmp_path / "base")
    done, failed = ["click [1]", "click [2]"], ["click [1]", "click [1]", "stop [x]"]
    record(tmp_path / "explored.jsonl", [recorded(done, 0), recorded(failed, 1, reward=0), recorded(done, 2),
                                            recorded(done, 3, task="other")])
    record(tmp_path / "played.jsonl", [recorded(failed, 4, reward=0, goal="Wait."), recorded(done, 5)])
    return tmp_path


def test_the_three_fine_tunings_go_from_recordings_to_a_folder_that_is_asked_as_it_was_taught(
        episodes, monkeypatch):
    """Guards: a success too many or a failure cloned; a reward model of tasks that the policy does not play;
    a folder without its system prompt, or whose other layers moved; a report that says nothing."""
    given = dict(base=str(episodes / "base"), context=512, system_prompt="Act.")
    how = finetune.FineTune(lr=1e-3, tokens=600, trained_layers=1)
    explored, played = (str(episodes / f"{name}.jsonl") for name in ("explored", "played"))
    wanted = {
        "policy": (recipe.PolicySFT(trajectories=explored, demonstrations=1, **given),
                   {"demonstrations": 2, "recorded steps": 4}),
        "world_model": (recipe.WorldModelSFT(transitions=explored, per_task=2, played=played, lora_rank=0,
                                              **given), {"trajectories": 5, "transitions": 10}),
        "reward_model": (recipe.RewardModelSFT(trajectories=played, explored=explored, per_task=2, **given),
                         {"success": 2, "failure": 2, "other goal": 2})}
    learned, learn = {}, finetune.learn

    def watched(model, pairs, *more):
        learned[more[1]] = texts(model, [pair for item in pairs for pair in finetune.together(item)])
        return learn(model, pairs, *more)

    monkeypatch.setattr(finetune, "learn", watched)
    base = lm.load(episodes / "base").model.state_dict()
    for name, (config, counts) in wanted.items():
        out = episodes / name
        report = getattr(sft, f"learn_{name}")(dataclasses.replace(config, out=str(out), sft=how))
        assert report == json.loads((out / "training.json").read_text())
        assert counts.items() <= report.items(), report
        model = lm.load(out)
        assert model.tokenizer.init_kwargs["system_prompt"] == "Act."
        moved = {key for key, value in model.model.state_dict().items() if not torch.equal(value, base[key])}
        assert moved and all(key.startswith(("model.layers.1.", "model.norm")) for key in moved)
        assert not out.with_name(f"{name}.sft").exists(), "its checkpoints are gone"
    assert [len(learned[name]) for name in ("policy", "world model", "reward model")] == [4, 10, 6]
    assert all("click [" in said or "stop [" in said for _, said in learned["policy"])
    assert all("over: " in said for _, said in learned["world model"])
    assert {said for _, said in learned["reward model"]} == {" YES", " NO"}, "the word alone"


def test_pairs_that_are_learned_together_fit_the_context_one_by_one(model):
    """Guards: an episode under three goals that is refused because its prompts together are longer than the
    context; and a pair that is longer, and is let in by its neighbours."""
    model.context, rng = 40, random.Random(0)
    three = pairs_of(rng, [(20, 5)] * 3)
    report = finetune.fit(model, [three], finetune.FineTune(tokens=100))
    assert report["steps"] == 1 and report["tokens"] == 75
    with pytest.raises(AssertionError, match="does not fit"):
        finetune.fit(model, [three, pairs_of(rng, [(2, 1), (38, 5)])], finetune.FineTune(tokens=100))
