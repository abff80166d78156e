"""Claims about distributed.py and train.py on several ranks: two real processes (gloo) compute what one
computes.

All jobs of tests/ranks.py run on two ranks and on one. The tests compare what they wrote; `alone` and `both`
are the results of one rank and of two.
"""
import json
import os
import shutil
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import record, recorded
from helpers.gptoss import tensors, write_folder
from helpers.processes import launch, result
from helpers.runs import logged
from helpers.scores import score
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import data
import distributed
import gpt_oss
import lm
import world_model
from config import UserError

HERE = Path(__file__).resolve().parent
JOBS = ["counts", "late", "gradients", "offload", "one_microbatch", "no_advantage", "nothing_left", "head",
        "looks", "finetune", "not_finite", "save", "early", "gptoss", "llama", "nnetnav",
        "dreams"]


@pytest.fixture(scope="module")
def folder(taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(taught, folder / "model")
    shutil.copy(HERE / "nnetnav_small.jsonl", folder)
    write_folder(folder / "gptoss")
    chat = lm.load(taught)
    lm.save(chat, folder / "llama")  # bf16, as the hub's are
    # The laptop's template leaves the system message out; that of a model of the hub does not.
    turn = "{%% if messages[%d] %%}<|user|>{{ messages[%d].content }}<|end|>{%% endif %%}"
    chat.tokenizer.chat_template = turn % (0, 0) + turn % (1, 1) + "<|assistant|>"
    lm.save(chat, folder / "chat")
    clicks = [recorded(["click [1]"] * n + ["click [2]"], seed=n) for n in range(4)]
    record(folder / "counting.jsonl", clicks)
    jobs = ",".join(JOBS)
    launch(folder, f"2:{jobs},resume_2,straight,real,both", "2:killed!",
           f"1:{jobs},plain,offloaded,resume_1,resume_2,alone,real,both", "2:resume_1,killed")
    return folder


def results(folder: Path, job: str) -> tuple[dict, dict]:
    return result(folder, 1, job), result(folder, 2, job)


def assert_close(a: dict, b: dict, relative: float, absolute: float = 1e-9) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        scale = float(b[name].abs().max()) + absolute
        assert float((a[name] - b[name]).abs().max()) <= relative * scale, name


# ---- the group ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("chosen, told", [(None, "expandable_segments:True"), ("max_split_size_mb:512", "")])
def test_a_single_gpu_has_a_group_and_memory_that_grows_in_place(monkeypatch, chosen, told):
    """Guards: one GPU without a group, and so without checkpointing; a choice of the user's that is written
    over; a variable in the environment, which would end servers over several GPUs (NOTES 9.12)."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": chosen} if chosen else {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    groups = []
    monkeypatch.setattr(distributed.dist, "init_process_group",
                        lambda *given, **more: groups.append((*given, more["timeout"])))
    try:
        torch._C._accelerator_setAllocatorSettings("")
        distributed.init()
        assert torch._C._accelerator_getAllocatorSettings() == told
    finally:
        torch._C._accelerator_setAllocatorSettings("")
    assert groups == [("cpu:gloo,cuda:nccl", timedelta(minutes=180))] and environment["WORLD_SIZE"] == "1"
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == chosen and "PYTORCH_ALLOC_CONF" not in environment


# ---- counts, data, barriers --------------------------------------------------------------------------------

def test_every_rank_gets_the_same_data_in_the_same_order(folder):
    """Guards: dreams handed back rank by rank and not in the order of their starts; ranks that decide
    differently."""
    alone, both = results(folder, "counts")
    assert alone["gathered"] == [0] and both["gathered"] == [0, 1]
    assert both["shares"] == [["a", "c", "e"], ["b", "d"]]
    assert alone["collected"] == both["collected"] == list("ABCDE")


def test_dreams_that_do_not_wait_are_collected_in_the_order_of_their_starts(folder):
    """Guards: dreams in the order in which they ended; another batch on another number of ranks. Every answer
    takes its time, another on each rank."""
    alone, both = results(folder, "dreams")
    assert both["rows"][0] == both["rows"][1] == alone["rows"][0]
    (rows,) = alone["rows"]
    assert [url for url, *_ in rows] == [f"http://count/{n}" for n in (0, 1, 2) for _ in range(3)]
    assert [reward for _, reward, *_ in rows] == [1.0] * 3 + [0.0] * 6 and alone["drops"] == {}


@pytest.mark.parametrize("what", ["file", "model"])
def test_what_rank_0_wrote_is_there_for_every_rank(folder, what):
    """Guards: a rank that goes on before rank 0 has written, or writes where it still clears. Rank 0 is slow
    here."""
    alone, both = results(folder, "late")
    assert alone[what] == [True] and both[what] == [True, True]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_microbatch_is_dealt_once_and_every_rank_gets_as_many(costs, ranks):
    """Guards NOTES 5.10: ranks with different numbers of forwards, a microbatch learned twice or never."""
    shares = distributed.assign(costs, ranks)
    assert len(shares) == ranks and {len(share) for share in shares} == {-(-len(costs) // ranks)}
    assert {weight for share in shares for _, weight in share} <= {0.0, 1.0}
    learned = [index for share in shares for index, weight in share if weight]
    assert sorted(learned) == list(range(len(costs)))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 4), st.randoms())
def test_no_order_of_the_microbatches_is_sooner_done_when_the_ranks_go_in_step(costs, ranks, rng):
    """Guards: a rank that waits while another has all the long sequences; shares even in sum while in each
    round another rank has the long one. Any other dealing takes at least as long."""
    def takes(rounds):
        return sum(max(costs[index] for index in together) for together in rounds)

    ours = [[index for index, _ in together] for together in zip(*distributed.assign(costs, ranks))]
    other = list(range(len(costs)))
    rng.shuffle(other)
    assert takes(ours) <= takes(other[k : k + ranks] for k in range(0, len(costs), ranks))
    assert distributed.idle([costs], ranks) == pytest.approx(1 - sum(costs) / (ranks * takes(ours)))


# ---- gradients ---------------------------------------------------------------------------------------------

def test_gradients_of_two_ranks_are_those_of_one(folder):
    """Guards NOTES 5.6 and 5.11: a denominator of one rank, a mean over ranks, a microbatch left out, a norm
    of one shard."""
    alone, both = results(folder, "gradients")
    assert len(alone["gradients"]) == len(both["gradients"]) == 3
    for a, b in zip(both["gradients"], alone["gradients"]):
        assert_close(a, b, 1e-5)
        assert all(float(g.abs().max()) > 1e-4 for g in b.values())
    assert_close(both["state"], alone["state"], 1e-6)
    for name in ("grad_norm", "clip_frac", "ratio_mean", "ratio_max", "abs_log_ratio"):
        assert both["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5), name


def test_weights_in_host_memory_change_nothing(folder):
    """Guards: an offloaded path that nobody ever ran."""
    usual, offloaded = result(folder, 2, "gradients"), result(folder, 2, "offload")
    for a, b in zip(offloaded["gradients"], usual["gradients"]):
        assert_close(a, b, 1e-6)
    assert_close(offloaded["state"], usual["state"], 1e-7)


def test_a_rank_without_work_takes_part_with_weight_zero_and_is_logged(folder):
    """Guards NOTES 5.10 (a hang), and a repeated microbatch that counts twice."""
    alone, both = results(folder, "one_microbatch")
    assert_close(both["state"], alone["state"], 1e-6)
    assert alone["metrics"]["idle"] == 0 and both["metrics"]["idle"] == pytest.approx(0.5)


def test_a_batch_without_advantages_moves_nothing_and_hangs_nobody(folder):
    for done in results(folder, "no_advantage"):
        assert done["metrics"]["grad_norm"] == 0
        assert all(torch.equal(done["state"][name], value) for name, value in done["before"].items())


def test_a_minibatch_in_which_nothing_is_left_hangs_nobody_and_momentum_moves_on(folder):
    """Guards: a rank that waits in a backward pass which the others leave out; FSDP's root left whole, so
    that the next forward sees embedding and head as before the step (NOTES 9.2)."""
    alone, both = results(folder, "nothing_left")
    assert_close(both["state"], alone["state"], 1e-5)
    for name in ("grad_norm", "clip_frac", "ratio_max", "abs_log_ratio"):
        assert both["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-4), name


def test_the_head_of_a_sharded_model_in_bf16_gives_float32_logits(folder):
    """Guards NOTES 10.2 on GPUs: FSDP gathers the head in bf16, and a product rounded to bf16 moves log s_i
    by half the clip."""
    for done in results(folder, "head"):
        assert done["type"] == "torch.bfloat16"
        assert torch.allclose(done["logp"], done["by hand"], atol=5e-5)


def test_a_look_of_two_ranks_is_the_look_of_one(folder):
    """Guards: a curve of rank 0's share alone, or every page opened once a rank."""
    alone, both = results(folder, "looks")
    assert alone == both == {"real_success": 0.2, "looked_at": "dev seeds", "pages": 5}


def test_fine_tuning_on_two_ranks_is_fine_tuning_on_one(folder):
    """Guards: a mean over ranks of means over tokens; a repeated microbatch that is learned."""
    alone, both = results(folder, "finetune")
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-4) and len(alone["losses"]) > 3
    # Of each step's three microbatches two ranks run four, the second pair with the cheapest.
    assert alone["idle"] == alone["waits"] == 0
    assert both["idle"] == pytest.approx(both["waits"], abs=1e-3) and 0.15 < both["idle"] < 0.45
    assert_close(both["state"], alone["state"], 1e-4)


def test_a_gradient_that_is_not_finite_stops_all_ranks(folder):
    """Guards: nan weights in the next checkpoint; a rank that stops while the others wait. The nan is in one
    rank's part."""
    for done in results(folder, "not_finite"):
        for told in done["told"]:
            assert told.startswith("the gradient's norm is nan") and "the last checkpoint is good" in told


# ---- checkpoints and folders -------------------------------------------------------------------------------

@pytest.mark.parametrize("then", [1, 2])
@pytest.mark.parametrize("now", [1, 2])
def test_a_checkpoint_loads_bit_for_bit_on_any_number_of_ranks_and_goes_on(folder, then, now):
    """Guards NOTES 5.13: weights without optimizer states; a copy overwritten while it is still being
    written."""
    saved, loaded = result(folder, then, "save"), result(folder, now, f"resume_{then}")
    assert loaded["step"] == 3
    assert all(torch.equal(loaded["loaded"][name], value) for name, value in saved["saved"].items())
    if now == then:
        assert loaded["losses"] == saved["losses"]
        assert all(torch.equal(loaded["state"][name], value) for name, value in saved["state"].items())
    else:
        assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_before_the_first_step_changes_no_step(folder, ranks):
    """Guards: an optimizer whose state the checkpoint makes, by a step with gradient zero: Adam then takes
    its first step for its second. It happens where the first batches of dreams teach nothing."""
    done = result(folder, ranks, "early")
    for name, value in done["straight"].items():
        assert torch.equal(done["saved"][name], value), name


# ---- the commands before the loop --------------------------------------------------------------------------

def loss(folder: Path, trajectories: Path) -> float:
    """Of the recorded transitions, a token, of the model in `folder`."""
    model = gpt_oss.load(folder, 2048, compute=torch.float32)  # whose fresh adapters change nothing
    examples = world_model.examples(model, data.read_trajectories(trajectories), Counter())
    return -float(torch.cat(score(model, examples)).mean())


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 8, "pad_token_id": 0}


def small(kind: str, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=2, **SIZES | more))


def filled(folder: Path, register=lambda model: None):
    """The model of a folder, by load_weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        register(model)
    distributed.load_weights(model, folder, torch.device("cpu"))
    return model


@pytest.mark.parametrize("kind, more", [
    ("olmo3", {"sliding_window": 4}), ("llama", {"tie_word_embeddings": True}),
    ("gemma3_text", {"head_dim": 4}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}})])
def test_weights_and_buffers_are_those_of_transformers_own_loading(tmp_path, kind, more):
    """Guards: OLMo-3's `sliding_attention_inv_freq` and Gemma-3's `embed_scale`, garbage after the meta
    device, another at each start; a tied head that is two tensors."""
    small(kind, **more).save_pretrained(tmp_path)
    whole, model = AutoModelForCausalLM.from_pretrained(tmp_path), filled(tmp_path)
    for (name, found), (_, right) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(found, right), name
    for (name, found), (_, right) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(found, right), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nobody_fills_is_named_whatever_it_is_called(tmp_path, dtype):
    """Guards: a buffer that is let pass because its name holds "inv_freq"."""
    small("llama").save_pretrained(tmp_path)
    stray = lambda model: model.model.layers[0].register_buffer(
        "sliding_attention_inv_freq", torch.ones(2, dtype=dtype), persistent=False)
    with pytest.raises(UserError, match="nothing fills .* model.layers.0.sliding_attention_inv_freq; take"):
        filled(tmp_path, stray)


def without(folder, name):
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("harm, says", [
    (lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-1]), "cannot be read .*; download"),
    (lambda folder: (folder / "model.safetensors").unlink(), "lm_head.weight is missing"),
    (lambda folder: without(folder, "model.norm.weight"), r"model.norm.weight is missing \(1 such\)"),
    (lambda folder: save_file({"a.b": torch.ones(2)}, folder / "b.safetensors"), "a.b has no place in it"),
    (lambda folder: shutil.copy(folder / "model.safetensors", folder / "old.safetensors"), "is in two files"),
    (lambda folder: small("llama", hidden_size=16).config.save_pretrained(folder), "has another shape")])
def test_a_folder_that_does_not_hold_its_model_whole_and_once_is_a_sentence(tmp_path, harm, says):
    """Guards: half a download that is read as a model; dcp, which takes either of two files that hold one
    weight, and ignores a weight that is not the model's."""
    small("llama").save_pretrained(tmp_path)
    harm(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}.* {says}"):
        filled(tmp_path)


def test_a_checkpoint_that_cannot_be_used_is_a_sentence(tmp_path):
    """Guards: another config's run that goes on as this one; half a checkpoint that is taken for one; a full
    disk that is a page of tracebacks."""
    model, folder = torch.nn.Linear(2, 2), tmp_path / "checkpoint"
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    for step in (1, 2, 10):
        distributed.save_checkpoint(folder, step, model, optimizer, {"lr": 1, "out": "a"})
    assert [path.name for path in distributed._newest(folder)] == ["step-2", "step-10"]
    load = lambda run: distributed.load_checkpoint(folder, model, optimizer, run, ["out"])
    assert load({"lr": 1, "out": "b"}) == 10
    with pytest.raises(UserError, match="step-10 is from another config .lr was 1 and is 2.; give"):
        load({"lr": 2, "out": "a"})
    (folder / "step-10" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UserError, match="step-10 cannot be read .*; delete it to go on from the one before"):
        load({"lr": 1})
    (folder / "step-10" / ".metadata").unlink()  # written last: a save that was killed
    assert load({"lr": 1}) == 2
    (folder / "step-11").write_text("")
    with pytest.raises(UserError, match="step-11 cannot be written .*; make room"):
        distributed.save_checkpoint(folder, 11, model, optimizer, {})


@pytest.mark.parametrize("base", ["gptoss", "llama"])
def test_the_world_models_command_writes_the_same_folder_on_two_ranks(folder, base):
    """Guards: a path that only a node of GPUs would have walked; a rank that merges before the adapter
    stands; experts or embeddings that are not the base's; an adapter that is trained and lost."""
    alone, both = results(folder, base)
    assert alone["steps"] >= 4 and both["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    rounded = {"loss": 0, "idle": 0, "seconds": 0}
    assert {**alone, **rounded} == {**both, **rounded}
    assert alone["idle"] == 0 < both["idle"] < 0.5  # three microbatches for two ranks
    assert (alone["transitions"], alone["trajectories"]) == (10, 4)
    for ranks, report in ((1, alone), (2, both)):
        assert json.loads((folder / f"{base}-{ranks}" / "training.json").read_text()) == report
        assert not list(folder.glob(f"{base}-{ranks}*.sft"))
        assert (folder / f"{base}-{ranks}.adapter" / "adapter_model.safetensors").exists()
    was, one, two = (tensors(folder / which) for which in (base, f"{base}-1", f"{base}-2"))
    learned = {name for name in was if name.endswith(tuple(f"self_attn.{p}_proj.weight" for p in "qkvo"))}
    assert len(learned) == 8
    for name, value in was.items():
        if name not in learned:
            assert torch.equal(one[name], value) and torch.equal(two[name], value), name
            continue
        a, b = one[name].float(), two[name].float()
        moved = float((a - value.float()).abs().max())
        # bf16 has 8 bits: a unit in the last place is at most 2^-7 of the number. Between 1 and 2 ranks the
        # sums differ in float32 only.
        allowed = 2**-7 * torch.maximum(a.abs(), b.abs()) + 1e-3 * moved
        assert ((a - b).abs() <= allowed).all() and moved > 0.01, name
    counting = folder / "counting.jsonl"
    before, after = (loss(folder / which, counting) for which in (base, f"{base}-2"))
    assert after < before - 0.1, "what was learned is not in the merged folder"


def test_the_policys_command_on_nnetnavs_rows_is_the_same_on_two_ranks(folder):
    """Guards: rows that rank 0 alone reads, another order of the examples on each rank; an agent trained
    under another system message than its rows."""
    alone, both = results(folder, "nnetnav")
    assert both["taught"] == alone["taught"]
    assert both["report"]["loss"] == pytest.approx(alone["report"]["loss"], rel=1e-4)
    before = lm.load(folder / "chat").model.state_dict()
    for name, value in alone["state"].items():
        # Where a gradient is nearly 0, Adam makes a step of the rounding; so on average.
        moved = float((value - before[name]).abs().mean())
        assert float((both["state"][name] - value).abs().mean()) <= 1e-2 * moved, name
        assert moved > 1e-4 or "norm" in name, name
    for ranks, trained in ((1, alone), (2, both)):
        exported = lm.load(folder / f"nnetnav-{ranks}").model.state_dict()
        for name, value in trained["state"].items():
            assert torch.equal(exported[name], value.bfloat16().float()), "the folder is not what was trained"


def test_one_gpu_recomputes_its_layers_and_learns_what_the_laptops_path_learns(folder):
    """Guards: `sft.py policy gpu` on the laptop's path, which keeps all activations (1B: 35 GB at 8k tokens);
    an --offload that is not handed on. A group of one rank stands for the GPU's."""
    one, plain, offloaded = (result(folder, 1, job) for job in ("nnetnav", "plain", "offloaded"))
    assert one["how"] == [False, True, True] and offloaded["how"] == [True, True, True]
    assert plain["how"] == [False, False, False]  # offloaded, sharded, recomputed
    assert one["taught"] == plain["taught"] == offloaded["taught"]
    assert one["report"]["loss"] == pytest.approx(plain["report"]["loss"], rel=1e-4)
    before = lm.load(folder / "chat").model.state_dict()
    for name, value in plain["state"].items():  # padded there, packed here; on average, as above
        moved = float((value - before[name]).abs().mean())
        assert float((one["state"][name] - value).abs().mean()) <= 1e-2 * moved, name
        assert float((offloaded["state"][name] - one["state"][name]).abs().mean()) <= 1e-2 * moved, name


def test_the_policys_command_teaches_nnetnavs_rows_as_they_are(folder):
    """Guards: a prompt that is not the row's, a step of a trajectory lost or learned twice. Of the rows
    `price` has three steps, `cart` two; `noise` has no end."""
    done, asked = result(folder, 1, "nnetnav"), {}
    for line in (HERE / "nnetnav_small.jsonl").read_text().splitlines():
        system, user, said = json.loads(line)["messages"]
        if len(user["content"]) > 20:
            said_before = f"<|user|>{system['content']}<|end|><|user|>{user['content']}<|end|><|assistant|>"
            asked[said_before] = said["content"]
    wanted = [prompt for prompt in asked if "OBJECTIVE: What" in prompt
              or "OBJECTIVE: Open" in prompt and "OBSERVATION:\n\n" not in prompt]
    assert done["report"]["steps"] > 4 and done["report"]["recorded steps"] == len(done["taught"]) == 5
    assert sorted(prompt for prompt, _ in done["taught"]) == sorted(wanted)
    for prompt, said in done["taught"]:
        if "price" in prompt:
            assert said.removesuffix("<|end|>") == asked[prompt].removesuffix(".")


# ---- the whole loop ----------------------------------------------------------------------------------------

def test_the_loop_on_two_ranks_killed_and_started_again_is_the_loop_that_was_not(folder):
    """Guards: dreams that depend on the rank that dreams them, doubled lines, a resume that draws other
    dreams. kill -9 goes to both ranks, once the first checkpoint stands."""
    names = ("straight", "killed", "alone")
    straight, killed, alone = (logged(folder / name) for name in names)
    assert killed == straight and [row["update"] for row in straight] == list(range(5))
    assert any(row.get("kept") for row in straight), "no update was made, so nothing was compared"
    for row, other in zip(straight, alone):  # a single rank dreams the same dreams
        for key in ("dream_success", "kept", "experts"):
            assert row.get(key) == other.get(key), key
    weights = [lm.load(folder / name / "agent").model.state_dict() for name in ("straight", "killed")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_loop_on_real_pages_is_on_two_ranks_what_it_is_on_one(folder):
    """Guards: a rank without a browser of its own, steps of one rank alone, ranks that are asked for a world
    model. Half of the groups are dreamed in the second run."""
    for world in ("real", "both"):
        found = [logged(folder / f"{world}-{ranks}") for ranks in (1, 2)]
        assert any(row.get("kept") for row in found[0])
        for row, other in zip(*found, strict=True):
            for key in ("dream_success", "real_train_success", "real_steps", "real_trajectories", "kept",
                        "experts", "groups"):
                assert row.get(key) == other.get(key), (world, key)


