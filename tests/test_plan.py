"""plan.py: what a run will take. The guard for the memory of distributed.shard and the chunked head, too: break them and a peak here moves."""

import re

import pytest
import torch
import torch.distributed as dist
from torch._guards import active_fake_mode

import dream
import plan
import train
import world_model

NODE = train.Config(context=49152)  # the paper's; longer than what fits
ONE = train.Config(policy="meta-llama/Llama-3.2-1B-Instruct", world_model="meta-llama/Llama-3.2-3B-Instruct", tokens=8192, context=16384, offload=True,
                   dreaming=dream.Config(max_new_tokens=1024, world_model_tokens=4096))


@pytest.fixture(scope="module")
def agent():
    return plan.read_model("stanfordnlp/llama8b-nnetnav-live")


@pytest.fixture(scope="module")
def eight(agent):
    return plan.simulate(agent, 8, (8192, 16384, 32768))


@pytest.fixture
def simulated(eight, monkeypatch):
    """Plans of the node from the one simulation of this file."""
    monkeypatch.setattr(plan, "simulate", lambda *_, offload=False, **__: plan.replace(eight, offload=offload))


@pytest.fixture
def node(simulated):
    return plan.plan_train(NODE)


# ---- models and cards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, billions", [("stanfordnlp/llama8b-nnetnav-live", 8.030), ("openai/gpt-oss-120b", 116.83),
                                            ("meta-llama/Llama-3.2-1B-Instruct", 1.236), ("meta-llama/Llama-3.2-3B-Instruct", 3.213)])
def test_the_shipped_configs_are_those_of_the_published_models(name, billions):
    """A wrong width would make every figure of a plan wrong and none of them strange. The cards of the models state these counts."""
    assert plan.read_model(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_served_weights_and_cache_are_those_of_the_arithmetic():
    """systems.md, 1.6: 65.2 GB in MXFP4, 131,072 and 36,864 bytes a token, 4.7 MB a sequence in the layers with a window."""
    agent, world = plan.read_model("stanfordnlp/llama8b-nnetnav-live"), plan.read_model("openai/gpt-oss-120b")
    assert world.folder == pytest.approx(65.2, abs=0.1) and agent.folder == pytest.approx(16.06, abs=0.01)
    assert (agent.kv_token, world.kv_token) == (131_072, 36_864)
    assert world.kv_sequence == 18 * 2 * 8 * 64 * 2 * 128
    assert 65.2 / 8 < world.served(8) < 1.2 * 65.2 / 8  # padded, but not by more than a fifth
    assert agent.kv(1000, 16) == agent.kv(1000, 8)  # 8 heads of keys and values cannot be spread over 16


def test_tensor_parallel_never_cuts_a_head(agent):
    assert [agent.tensor_parallel(ranks) for ranks in (1, 6, 8)] == [1, 4, 8]


def test_an_unknown_card_or_model_names_the_known_ones():
    with pytest.raises(ValueError, match="H100-80GB.*RTX3090-24GB"):
        plan.plan_train(NODE, card="H100")
    with pytest.raises(ValueError, match="some/where.*openai/gpt-oss-120b"):
        plan.plan_train(train.Config(policy="some/where"))


def test_the_laptop_is_told_that_it_needs_no_plan():
    with pytest.raises(ValueError, match="laptop"):
        plan.plan_train(train.TINY)


# ---- the simulated trainer -------------------------------------------------------------------------------------------------


def test_peaks_are_those_of_the_simulation_of_all_layers(eight):
    """systems.md, section 4, all 32 layers: 12.05 persistent, 22.6, 25.1 and 36.4 GB. (There with transformers' sdpa, whose (T, T) mask is in
    the figures: about 3 bytes an entry, 3 GB at 32k. Again here on 2026-11-21 with it, all layers: 22.95 at 8k, 26.71 at 16k, 50.6 at 48k.
    The run itself packs, and has no mask.)"""
    assert eight.persistent == pytest.approx(12 * 8.030e9 / 8 / 1e9, rel=1e-3)
    for tokens, gigabytes in {8192: 22.6, 16384: 25.1, 32768: 36.4}.items():
        assert eight.peak(tokens) == pytest.approx(gigabytes, rel=0.1)


def test_two_depths_tell_what_a_deeper_model_takes(agent):
    """The line through 4 and 6 layers, at 10: the peak must be found, and not missed because it moves from one end of the backward pass to the other."""
    ten = plan._simulate(agent, 10, 4, (4096,), 0, 1.0)
    four, six = (plan._simulate(agent, depth, 4, (4096,), 0, 1.0) for depth in (4, 6))
    for stage in (3, 4):
        assert four[stage][4096] + 3 * (six[stage][4096] - four[stage][4096]) == pytest.approx(ten[stage][4096], rel=0.01)


def test_more_ranks_take_less_each(agent, eight):
    four = plan.simulate(agent, 4, (16384,))
    assert four.persistent == pytest.approx(2 * eight.persistent, rel=1e-3)
    assert four.peak(16384) == pytest.approx(39.4, rel=0.1) and four.peak(16384) > eight.peak(16384) + 10  # 39.4: systems.md, section 4


def test_offloading_takes_weights_and_optimizer_off_the_gpu(eight):
    offloaded = plan.replace(eight, offload=True)
    assert offloaded.resident == 0
    assert eight.peak(16384) - offloaded.peak(16384) >= eight.persistent - 1e-9


def test_a_simulation_leaves_nothing_behind(eight):
    """A process group or a fake mode left over would break whatever the process does next."""
    assert not dist.is_initialized() and active_fake_mode() is None
    assert float(torch.ones(2).sum()) == 2 and type(torch.ones(2)) is torch.Tensor


def test_a_simulation_that_fails_leaves_nothing_behind_either(agent, monkeypatch):
    monkeypatch.setattr(plan.distributed, "shard", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan.simulate(agent, 8, (1024,))
    assert not dist.is_initialized() and active_fake_mode() is None


# ---- whole plans -----------------------------------------------------------------------------------------------------------


def test_the_node_holds_a_full_microbatch_and_the_plan_says_how_long_a_sequence_may_be(node):
    """Design A of systems.md: 57 GB dreaming and 70 updating, without a judge's server (8.6)."""
    assert node.dreaming == pytest.approx(57 + 8.6, rel=0.05) and node.update == pytest.approx(70 + 8.6, rel=0.05)
    assert node.headroom > 0 > node.headroom_longest  # 16,384 tokens fit; a turn of 32k + 16k does not
    assert NODE.tokens < node.fits < NODE.context
    assert all(change.headroom > node.headroom_longest for change in node.changes)
    assert next(change for change in node.changes if change.what.startswith("--context")).headroom >= 0


def cells(text: str, label: str) -> list[str]:
    """The numbers (or dashes) that follow a label at the beginning of a line."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return re.findall(r"(?<= )(?:-?\d+\.\d|-)(?= |$)", line[line.index(label) + len(label) :])


def test_the_printed_numbers_are_the_plans(node):
    text, shown = plan.train_plan(NODE), lambda value: f"{value:.1f}" if value else "-"
    for row in node.rows:
        assert cells(text, row.who)[:2] == [shown(row.dreaming), shown(row.update)]
    assert cells(text, "total")[:2] == [shown(node.dreaming), shown(node.update)]
    assert cells(text, "free at a sequence of")[-1] == shown(node.headroom_longest)
    assert f"over {node.fits:,} tokens" in text
    for change in node.changes:
        assert cells(text, change.what)[0] == shown(change.headroom)
    for stage in node.stages:
        assert f"{stage.seconds:.1f}" in cells(text, stage.name)[0]


@pytest.mark.parametrize("card", plan.CARDS)
def test_every_card_reads_well_in_a_terminal_of_120_columns(simulated, card):
    assert [line for line in plan.train_plan(NODE, card).splitlines() if len(line) > 120] == []


def test_a_card_that_is_too_small_says_so_and_what_to_change(simulated):
    text = plan.train_plan(NODE, "A100-40GB")
    assert "IT DOES NOT FIT" in text and "--offload" in text and "None is enough alone" in text and "H200-141GB" in text
    assert "It fits." in plan.train_plan(NODE, "H200-141GB")


def test_each_change_frees_what_it_says(simulated):
    """--offload and servers elsewhere, as a plan of their own: the suggestion must be what the user then gets."""
    node = plan.plan_train(NODE)
    told = {change.what.split()[0]: change.headroom for change in node.changes}
    assert plan.plan_train(plan.replace(NODE, offload=True)).headroom_longest == pytest.approx(told["--offload"])
    assert plan.plan_train(plan.replace(NODE, world_model_urls=("http://host:1/v1",))).headroom_longest == pytest.approx(told["--world-model-urls"])
    assert plan.plan_train(plan.replace(NODE, judge_urls=("http://host:1/v1",))).headroom_longest == pytest.approx(told["--judge-urls"])


def test_one_small_gpu_is_planned_like_the_node():
    """A 1B agent in a 3B world on 24 GB: three vLLM processes and the trainer on one card."""
    one = plan.plan_train(ONE, card="RTX4090-24GB", ranks=1)
    assert one.rows[0].update == 0  # offloaded
    assert next(row for row in one.rows if row.who == "world model server: weights").update == pytest.approx(2 * 3.213, rel=1e-3)
    elsewhere = plan.plan_train(plan.replace(ONE, world_model_urls=("http://host:1/v1",), judge_urls=("http://host:2/v1",)), card="RTX4090-24GB", ranks=1)
    assert elsewhere.update < one.update - 2 * 3.213 and not any("server" in row.who for row in elsewhere.rows)


def test_the_world_model_is_fine_tuned_in_the_memory_of_one_node():
    """systems.md, 2.2: 49.4 GB at 4k tokens, LoRA on attention, of which 29.2 is the sharded base."""
    planned = plan.plan_world_model(plan.replace(world_model.Config(), sft=plan.replace(world_model.Config().sft, tokens=4096)))
    assert planned.rows[0].update == pytest.approx(29.2, rel=0.01)
    assert planned.update - plan.TRAINER_EXTRA == pytest.approx(49.4, rel=0.1)
    assert planned.headroom > 0


# ---- hours -----------------------------------------------------------------------------------------------------------------


def test_rates_scale_with_what_bounds_them(agent):
    """Training is bound by arithmetic, decoding by memory: an H200 trains no faster than an H100 and writes faster; a half as large model twice as fast."""
    h100, h200 = plan.CARDS["H100-80GB"], plan.CARDS["H200-141GB"]
    assert plan.train_rate(agent, h100, False) == plan.train_rate(agent, h200, False)
    assert plan.decode_rate(agent, h200, 1, 4, 9000) / plan.decode_rate(agent, h100, 1, 4, 9000) == pytest.approx(4.8 / 3.35)
    small = plan.read_model("meta-llama/Llama-3.2-1B-Instruct")
    assert plan.train_rate(small, h100, False) / plan.train_rate(agent, h100, False) == pytest.approx(8.030 / 1.236, rel=1e-3)


def test_decoding_of_the_world_model_goes_through_the_measured_points():
    world, h200 = plan.read_model("openai/gpt-oss-120b"), plan.CARDS["H200-141GB"]
    assert [plan.decode_rate(world, h200, 8, n, 9000) for n in (8, 128)] == pytest.approx([1948, 12781])
    assert 4000 < plan.decode_rate(world, h200, 8, 32, 9000) < 5500  # systems.md, section 6: 4 to 5 thousand


def test_a_step_is_as_long_as_its_parts_and_the_world_model_is_most_of_it(node):
    """systems.md, section 6: the world model dominates."""
    by = {stage.name: stage.seconds for stage in node.stages}
    assert by["the world model answers"] > sum(by.values()) / 2
    assert by["update"] == pytest.approx(160 * 9300 * 1.4375 / (8 * 5762 * 0.85), rel=1e-3)  # 32 x 5 turns of 9,300 tokens


def test_the_default_recipe_fits_the_node():
    """Guards: a default that runs out of memory at its first long page, hours into a rented node."""
    plan_ = plan.plan_train(train.Config())
    assert plan_.headroom > 0 and plan_.headroom_longest > 0, plan_.rows


def test_a_cache_that_holds_no_whole_sequence_is_refused():
    """Guards: a plan that fits because vLLM would not start."""
    small = plan.replace(NODE, policy_engine=plan.replace(NODE.policy_engine, kv_cache_gb=1.0))
    with pytest.raises(ValueError, match="policy-engine.kv-cache-gb 1.0 holds no sequence of 49,152 tokens"):
        plan.plan_train(small)
