"""Claims about node/plan.py and what it adds up: node/simulate.py, node/hours.py, node/sizes.py. It guards
the memory of distributed.shard and of lm's head in pieces, too: break them, and a peak here moves."""
import random
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import tyro
from torch._guards import active_fake_mode

import distributed
import recipe
from node import hours, plan, prepare, printed, rehearse, simulate, sizes
from rivals import orm, webrl
from worlds import miniwob

ROOT = Path(plan.__file__).parent.parent
NODE = recipe.Train(context=49152)  # the paper's; longer than what fits
LLAMAS = plan.RECIPES["nnetnav"][0]  # one GPU, and NNetNav's pages
SMALL = replace(LLAMAS.dreaming, offload=True)


@pytest.fixture(scope="module")
def agent():
    return sizes.read_model("stanfordnlp/llama8b-nnetnav-live")


@pytest.fixture(scope="module")
def eight(agent):
    return simulate.simulate(agent.config, 8, (8192, 16384, 32768))


PEAKS = {8192: 22.6, 16384: 25.1, 32768: 36.4}  # GB of an 8B on 8 GPUs, all 32 layers (NOTES 9.8)


@pytest.fixture
def simulated(monkeypatch):
    """All plans have this trainer."""
    trainer = simulate.Trainer(12.05, 4.02, 16.1, PEAKS, PEAKS)
    monkeypatch.setattr(plan, "simulate", lambda *_: trainer)


@pytest.fixture
def node(simulated):
    return plan.plan_train(NODE)


def free_longest(planned: plan.Plan) -> float:
    """GB left while the longest sequence is learned from, or while the agent dreams."""
    return planned.memory.card.memory - max(planned.memory.dreaming, planned.memory.longest)


# ---- models and cards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, billions", [
    ("stanfordnlp/llama8b-nnetnav-live", 8.030), ("openai/gpt-oss-120b", 116.83),
    ("meta-llama/Llama-3.2-1B-Instruct", 1.236), ("meta-llama/Llama-3.2-3B-Instruct", 3.213),
    ("Qwen/Qwen3-0.6B", 0.596), ("Qwen/Qwen3-1.7B", 1.7206)])
def test_the_shipped_configs_are_those_of_the_published_models(name, billions):
    """Guards: a wrong width, which would make every figure of a plan wrong and none of them strange. The
    models' own pages state these counts."""
    assert sizes.read_model(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_served_weights_and_cache_are_those_of_the_arithmetic():
    """Guards: a factor of two or of the ranks. NOTES 8.1: 65.2 GB in MXFP4, 131,072 and 36,864 bytes a token,
    4.7 MB a sequence in the layers with a window."""
    agent = sizes.read_model("stanfordnlp/llama8b-nnetnav-live")
    world = sizes.read_model("openai/gpt-oss-120b")
    assert world.folder == pytest.approx(65.2, abs=0.1) and agent.folder == pytest.approx(16.06, abs=0.01)
    assert (agent.kv_token, world.kv_token) == (131_072, 36_864)
    assert world.kv_sequence == 18 * 2 * 8 * 64 * 2 * 128
    assert 65.2 / 8 < world.served(8) < 1.2 * 65.2 / 8  # padded, but not by more than a fifth
    assert agent.kv(1000, 16) == agent.kv(1000, 8)  # 8 heads of keys and values cannot be spread over 16
    assert [agent.tensor_parallel(ranks) for ranks in (1, 6, 8)] == [1, 4, 8], "vLLM cuts no head"


@pytest.mark.parametrize("name, billions", [("Qwen/Qwen3-0.6B", 0.44), ("Qwen/Qwen3-1.7B", 1.4)])
def test_the_shipped_qwen3_are_those_of_their_cards(name, billions):
    """Guards: a figure of the other size, or a head that is not tied. The cards state the weights that are
    not embeddings, 28 layers, 16 heads for queries and 8 for keys and values (NOTES 6.12)."""
    model = sizes.read_model(name)
    inner = model.parameters - model.config.vocab_size * model.config.hidden_size
    assert inner / 1e9 == pytest.approx(billions, abs=0.01)
    assert model.kv_token == 2 * 2 * 28 * 8 * 128 and model.kv_sequence == 0


def test_an_unknown_card_or_model_names_the_known_names():
    """Guards: a KeyError, and a user who has to read the code to learn what to write."""
    with pytest.raises(ValueError, match="H100-80GB.*RTX3090-24GB"):
        plan.plan_train(NODE, card="H100")
    with pytest.raises(ValueError, match="some/where.*openai/gpt-oss-120b"):
        plan.plan_train(recipe.Train(policy="some/where"))


def test_a_card_has_no_more_than_cuda_gives():
    """Guards: nvidia-smi's figures, .4 to .9 GB more than a program gets, and a run that does not fit."""
    given = {"H100-80GB": 79.1, "A100-80GB": 79.25, "L40S-48GB": 44.42, "RTX4090-24GB": 23.61}  # GiB (9.11)
    for card, gib in given.items():
        assert sizes.CARDS[card].memory == pytest.approx(gib * 2**30 / 1e9, abs=0.06), card


def test_the_laptop_is_told_that_it_needs_no_plan():
    """Guards: a plan of GPUs for a recipe that has none."""
    with pytest.raises(ValueError, match="laptop"):
        plan.plan_train(recipe.Train(sampler="transformers"))


# ---- the simulated trainer ---------------------------------------------------------------------------------


def test_peaks_are_those_of_the_simulation_of_all_layers(eight):
    """Guards: a line through two depths that misses the whole model. NOTES 9.8, all 32 layers: 12.05
    persistent, 22.6, 25.1 and 36.4 GB. (There with transformers' sdpa, whose (T, T) mask is in the figures:
    about 3 bytes an entry, 3 GB at 32k. Again here on 2026-11-21 with it, all layers: 22.95 at 8k, 26.71 at
    16k, 50.6 at 48k. The run itself packs, and has no mask.)"""
    assert eight.persistent == pytest.approx(12 * 8.030e9 / 8 / 1e9, rel=1e-3)
    for tokens, gigabytes in PEAKS.items():
        assert eight.peak(tokens) == pytest.approx(gigabytes, rel=0.1)


def test_two_depths_tell_what_a_deeper_model_takes(agent):
    """Guards: a peak that is missed because it moves from one end of the backward pass to the other. The line
    through 4 and 6 layers, at 10."""
    depths = (*simulate.DEPTHS, 10)
    for low, high, deep in zip(*(simulate.moments(agent.config, layers, 4, 4096, 0) for layers in depths)):
        assert low + 3 * (high - low) == pytest.approx(deep, rel=0.01)


def test_a_simulation_leaves_nothing_behind_whether_it_ends_well_or_fails(agent, eight, monkeypatch):
    """Guards: a process group or a fake mode left over, which would break whatever the process does next."""
    assert not dist.is_initialized() and active_fake_mode() is None
    assert float(torch.ones(2).sum()) == 2 and type(torch.ones(2)) is torch.Tensor
    monkeypatch.setattr(simulate.distributed, "shard", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        simulate.simulate(agent.config, 8, (1024,))
    assert not dist.is_initialized() and active_fake_mode() is None


# ---- whole plans -------------------------------------------------------------------------------------------


def test_the_node_holds_a_full_microbatch_and_the_plan_says_how_long_a_sequence_may_be(node):
    """Guards: a plan that forgets one of the three models. NOTES 9.10: 57 GB dreaming and 70 updating,
    without a judge's server (8.6)."""
    memory = node.memory
    assert memory.dreaming == pytest.approx(57 + 8.6, rel=0.05)
    assert memory.update == pytest.approx(70 + 8.6, rel=0.05)
    assert memory.card.memory > memory.update  # 16k tokens fit
    assert free_longest(node) < 0  # a turn of 32k + 16k does not
    assert NODE.tokens < memory.fits < NODE.context
    assert all(change.free > free_longest(node) for change in node.changes)
    assert next(change for change in node.changes if change.what.startswith("--context")).free >= 0


def cells(text: str, label: str) -> list[str]:
    """The numbers (or dashes) that follow a label at the beginning of a line; the last such line."""
    line = [line for line in text.splitlines() if line.strip().startswith(label)][-1]
    return re.findall(r"(?<= )(?:-?[\d,]+\.\d|-)(?= |$)", line[line.index(label) + len(label) :])


def test_the_printed_numbers_are_the_plans(node):
    """Guards: a column printed under another's title, and a row that is counted and not shown."""
    memory, text = "\n".join(printed.memory(node)), plan.report(plan.Recipe(NODE))
    assert memory in text
    shown = lambda value: f"{value:.1f}" if value else "-"
    for row in node.memory.rows:
        assert cells(memory, row.who)[:2] == [shown(row.dreaming), shown(row.update)]
    assert cells(memory, "total")[:2] == [shown(node.memory.dreaming), shown(node.memory.update)]
    assert cells(memory, "free at a sequence of")[-1] == shown(84.9 - node.memory.longest)
    assert f"over {node.memory.fits:,} tokens" in memory
    for change in node.changes:
        assert cells(memory, change.what)[0] == shown(change.free)
    for stage in node.stages:
        assert f"{stage.seconds:.1f}" in cells(text.replace("  a microbatch", ""), stage.name)[0]


def test_the_report_says_each_stage_host_and_disk_once(simulated):
    """Guards: a stage that is left out of the sum of hours, or a folder that is counted twice on the disk."""
    text = plan.report(plan.Recipe())
    learning, dreaming = plan.plan_world_model(recipe.WorldModelSFT()), plan.plan_train(recipe.Train())
    cloning = plan.plan_policy(recipe.PolicySFT())
    for what in ("annotate the transitions", "fine-tune the world model", "fine-tune the agent",
                 "1,000 updates of dreams", "NNetNav's data", "the world model, as published",
                 "the trained agent"):
        assert text.count(what) == 1, what
    disk = sum(value for part in (learning, cloning, dreaming) for value in part.disk.values())
    assert re.search(rf"Disk, GB +{disk:,.0f}\n", text)
    parts = [(hours.total(planned.stages), times)
             for planned, times in ((learning, 1), (cloning, 1), (dreaming, 1000))]
    line = re.search(r"^ +total .*$", text.split("The recipe ")[1], re.MULTILINE)[0]
    for name, place in (("seconds", -3), ("low", -2), ("high", -1)):
        whole = sum(times * getattr(stage, name) for stage, times in parts) / 3600
        assert float(line.split()[place].replace(",", "")) == pytest.approx(whole, abs=0.06), name


def test_a_card_that_is_too_small_says_so_and_what_to_change(simulated):
    """Guards: negative numbers without a word, and "it fits" said of another card."""
    text = "\n".join(printed.memory(plan.plan_train(NODE, "A100-40GB")))
    assert "IT DOES NOT FIT" in text and "--offload" in text and "It fits" not in text
    assert "None is enough alone" in text and "H200-141GB" in text
    assert "It fits." in "\n".join(printed.memory(plan.plan_train(NODE, "H200-141GB")))


def test_each_change_frees_what_it_says(simulated):
    """Guards: a suggestion that is not what the user then gets: --offload and servers elsewhere, as a plan of
    their own."""
    told = {change.what.split()[0]: change.free for change in plan.plan_train(NODE).changes}
    urls = ("http://host:1/v1",)
    for flag, changed in {"--offload": replace(NODE, offload=True),
                          "--world-model-urls": replace(NODE, world_model_urls=urls),
                          "--judge-urls": replace(NODE, judge_urls=urls)}.items():
        assert free_longest(plan.plan_train(changed)) == pytest.approx(told[flag])


# ---- one GPU -----------------------------------------------------------------------------------------------


def test_one_small_gpu_is_planned_like_the_node():
    """Guards: sizes that are right for eight ranks only. Three models and the trainer on one card, by hand:
    1.236e9 and 3.213e9 weights; 12 bytes each of the trained ones; what the three caches are given; 3 GB for
    the trainer, 2 for the engine, 2.5 for a server (NOTES 9.11, 9.13)."""
    alone = plan.plan_train(LLAMAS.dreaming, card="H100-80GB", ranks=1).memory
    beside = 2 * (1.236 + 1.236 + 3.213) + (3 + 12 + 3) + (3 + 2 + 2.5 + 2.5)
    assert alone.dreaming == pytest.approx(12 * 1.236 + beside, abs=0.02)
    # Learning adds 4 bytes of gradient a weight, a gathered layer, and one piece of the head.
    assert 16 * 1.236 < alone.update - beside < 16 * 1.236 + 6
    offloaded = plan.plan_train(SMALL, card="H100-80GB", ranks=1).memory
    assert offloaded.dreaming == pytest.approx(beside, abs=0.02)
    assert alone.update - offloaded.update > 12 * 1.236
    urls = dict(world_model_urls=("http://host:1/v1",), judge_urls=("http://host:2/v1",))
    elsewhere = plan.plan_train(replace(SMALL, **urls), card="RTX4090-24GB", ranks=1).memory
    assert offloaded.update - elsewhere.update == pytest.approx(
        2 * (1.236 + 3.213) + 12 + 3 + 2 * 2.5, abs=0.02)
    assert not any("server" in row.who for row in elsewhere.rows)


def typed(text: str, card: str) -> list:
    """The configs of the three command lines that a plan prints, read as the programs read them."""
    lines = re.findall(r"^ +python (sft\.py \w+|train\.py) (single.*)$",
                       text.split(f"1 x {card}")[0].replace("\\\n", ""), re.MULTILINE)
    defaults = {"sft.py world_model": (recipe.SINGLE_WORLD_MODEL, recipe.WorldModelSFT()),
                "sft.py policy": (recipe.SINGLE_POLICY, recipe.PolicySFT()),
                "train.py": (recipe.SINGLE, recipe.Train())}
    assert [name for name, _ in lines] == list(defaults)
    configs = []
    for name, words in lines:
        singles = dict(zip(("single", "paper"), (("", config) for config in defaults[name])))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *words.split()])
            configs.append(recipe.chosen(singles))
    return configs


@pytest.mark.parametrize("card", sizes.CARDS)
def test_the_commands_printed_for_one_gpu_fit_it_and_are_those_that_are_planned(card):
    """Guards: a recipe for one GPU that fits no GPU that it names; flags that do not exist, that fit another
    card, or that are not those of the figures below them."""
    text = plan.command("nnetnav", card=card)
    learning, cloning, dreaming = typed(text, card)
    plans = [plan.plan_world_model(learning, card, 1), plan.plan_policy(cloning, card, 1),
             plan.plan_train(dreaming, card, 1)]
    for planned in plans:
        assert planned.memory.free >= 0, card
        assert "\n".join(printed.memory(planned)) in text
    assert "DOES NOT" not in text and "annotate" not in text
    begun = re.search(r"^ +python -m node\.rehearse (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    asked = tyro.cli(rehearse.Options, args=shlex.split(begun[1]))
    rehearsed = rehearse.chosen(asked, 1)
    assert (rehearsed.learning, rehearsed.dreaming) == (learning, dreaming), "another run is rehearsed"
    assert max(map(len, text.splitlines())) <= 110, "a terminal breaks lines"
    assert dreaming.world_model in (learning.out, LLAMAS.dreaming.world_model)
    if sizes.CARDS[card].memory > 80:
        single = LLAMAS.learning, LLAMAS.cloning, LLAMAS.dreaming
        assert (learning, cloning, dreaming) == single


def test_a_card_that_no_flags_fit_is_planned_as_it_is(monkeypatch):
    """Guards: "what fits this card" said of a card that nothing fits."""
    monkeypatch.setitem(sizes.CARDS, "small", sizes.Card(12.0, 100, 1))
    text = plan.command("nnetnav", card="small")
    assert "What fits" not in text and "IT DOES NOT FIT" in text


@pytest.mark.parametrize("learning, dreaming", [
    (recipe.SINGLE_WORLD_MODEL, recipe.SINGLE), (LLAMAS.learning, LLAMAS.dreaming),
    (recipe.WorldModelSFT(), recipe.Train())])
def test_whoever_reads_the_agents_pages_has_room_for_them(learning, dreaming):
    """Guards: dreams that the recipe itself drops: a page that the agent reads and the world model or the
    judge cannot."""
    page = dreaming.context - dreaming.dreaming.max_new_tokens
    assert page <= dreaming.world_model_context - dreaming.dreaming.world_model_tokens
    assert 2 * page <= dreaming.judge_context - dreaming.dreaming.judge_tokens


def test_the_table_of_one_gpu_in_the_readme_is_the_plans():
    """Guards: figures of yesterday's plan. Memory to 1.5 GB, times to a tenth."""
    readme = (ROOT / "docs/gpu.md").read_text()
    table = readme.split("## One GPU, NNetNav's pages")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
            if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["H100-80GB", "A100-80GB", "L40S-48GB", "RTX4090-24GB"]
    for card, flags, used, host, learns, clones, update in rows:
        learning, cloning, dreaming = typed(plan.command("nnetnav", card=card), card)
        assert ("--offload" in flags) == dreaming.offload
        assert ("itself" in flags) == (dreaming.dreaming.judge == "current")
        assert ("1B" in flags) == (dreaming.world_model != LLAMAS.dreaming.world_model)
        planned = plan.plan_train(dreaming, card, 1)
        size = planned.memory.card.memory
        in_use = [size - planned.memory.free, size]
        assert [float(n) for n in used.split(" of ")] == pytest.approx(in_use, abs=1.5)
        assert float(host) == pytest.approx(sum(planned.host.values()), abs=1.5)
        told = [float(cell.replace(",", "")) for cell in (learns, clones, update)]
        stages = [plan.plan_world_model(learning, card, 1).stages, plan.plan_policy(cloning, card, 1).stages,
                  planned.stages]
        seconds = [hours.total(stage).seconds for stage in stages]
        assert told == pytest.approx([seconds[0] / 3600, seconds[1] / 3600, seconds[2]], rel=0.1), card


EVENING = {"RTX3090-24GB": 12, "RTX4090-24GB": 12, "L40S-48GB": 6, "A100-80GB": 6, "H100-80GB": 6}


@pytest.mark.parametrize("card", EVENING)
def test_an_evening_is_an_evening_on_every_card_at_its_slow_end(card):
    """Guards: a recipe for one evening that takes a day, or that runs out of memory there; a part of it that
    the sum forgets: recording, both fine-tunings, dreams, looks, evaluation, and vLLM's starts."""
    flags = plan.fitting("single", card, 1)
    assert flags is not None and flags[:2] == ("", "")
    assert ("--offload" in flags[2]) == (sizes.CARDS[card].memory < 30)
    plans, stages = plan.planned(plan.SINGLE.given(flags), card, 1)
    assert all(each.memory.free >= 0 for each in plans.values())
    assert [stage.name for stage in stages] == [
        "record pages", "prepare the examples", "fine-tune the world model", "fine-tune the agent",
        f"{recipe.SINGLE.updates} updates of dreams", "looks at the real web", "evaluation", "vLLM starts"]
    whole = hours.total(stages)
    assert whole.low < whole.seconds < whole.high <= 3600 * EVENING[card], whole.high / 3600
    assert all(0 < stage.low <= stage.seconds <= stage.high for stage in stages)
    lines = (ROOT / "docs/gpu.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {card}"))
    _, told, used, host, update, likely, slow = [cell.strip() for cell in row.strip("|").split("|")]
    assert ("--offload" in told) == ("--offload" in flags[2])
    size, dreams = sizes.CARDS[card].memory, plans["dreaming"]
    in_use = max(size - each.memory.free for each in plans.values())
    assert [float(n) for n in used.split(" of ")] == pytest.approx([in_use, size], abs=1)
    assert float(host) == pytest.approx(max(sum(each.host.values()) for each in plans.values()), abs=1.5)
    hours_told = [float(update), 3600 * float(likely), 3600 * float(slow)]
    assert hours_told == pytest.approx(
        [hours.total(dreams.stages).seconds, whole.seconds, whole.high], rel=0.1)


def test_recorded_pages_are_counted_as_they_were_recorded(monkeypatch):
    """Guards: an evening on pages of NNetNav's length; hours that do not grow with the tasks. By hand, from
    the file that tiny/ ships: of 4,800 recordings 3,010 are successes, of 2.276 steps in the mean."""
    recorded = hours.pages_of(recipe.SINGLE.trajectories)
    assert hours.pages_of(recipe.Train.trajectories) == hours.Pages()
    assert 100 < recorded.page < 1000 and recorded.judge < 1.2 and hours.delta_tokens(pages=recorded) < 40
    tries = 115 * len(miniwob.TASKS)
    assert recorded.transitions == pytest.approx(tries * 3.2)
    assert recorded.rows == pytest.approx(tries * 0.627 * 2.276, rel=0.01)
    monkeypatch.setattr(hours, "TASKS", miniwob.TASKS * 2)
    assert hours.pages_of(recipe.SINGLE.trajectories).rows == pytest.approx(2 * recorded.rows)


def test_what_is_not_the_papers_is_printed_flag_by_flag():
    """Guards: an evening that is shorter than the paper's recipe in a way that nobody is told of."""
    same = printed.differences(recipe.WorldModelSFT(), recipe.PolicySFT(), recipe.Train())
    assert [line.split()[0] for line in same] == ["Where", "sft.py", "sft.py", "train.py"]
    lines = printed.differences(recipe.SINGLE_WORLD_MODEL, recipe.SINGLE_POLICY, recipe.SINGLE)
    told = {line.split()[0]: line.split()[1:] for line in lines[lines.index("    train.py") :]}
    assert told["--updates"] == ["1000", str(recipe.SINGLE.updates)]
    assert told["--dreaming.max-new-tokens"] == ["4096", "512"]
    assert told["--judge-model"] == ["Qwen/Qwen3-0.6B"]
    assert not {"--lr", "--minibatches", "--dreaming.group", "--dreaming.horizon", "--eps-low"} & told.keys()
    assert max(map(len, lines)) <= 110


def test_the_world_model_is_fine_tuned_in_the_memory_of_one_node():
    """Guards: adapters that are counted as if all weights were trained. NOTES 9.9: 49.4 GB at 4k tokens, LoRA
    on attention, of which 29.2 is the sharded base."""
    config = recipe.WorldModelSFT(sft=replace(recipe.WorldModelSFT().sft, tokens=4096))
    memory = plan.plan_world_model(config).memory
    assert memory.rows[0].update == pytest.approx(29.2, rel=0.01)
    assert memory.update - plan.TRAINER_EXTRA == pytest.approx(49.4, rel=0.1)
    assert memory.free > 0


def test_the_default_recipe_fits_the_node_and_the_documents_say_how_tightly():
    """Guards: a default that runs out of memory at its first long page, hours into a rented node; a table of
    yesterday's plan, or one that leaves that page out."""
    memory, text = plan.plan_train(recipe.Train()).memory, (ROOT / "docs/gpu.md").read_text()
    assert memory.free > 0, memory.rows
    trainer, total = (re.search(rf"^\| {who}.*?((?: \| \d+){{3}}) \|$", text, re.MULTILINE)[1]
                      for who in ("trainer", "total of 84.9"))
    peaks = (memory.trainer.resident, memory.trainer.peak(16384), memory.trainer.peak(24576))
    for told, planned in ((trainer, peaks), (total, (memory.dreaming, memory.update, memory.longest))):
        assert told == "".join(f" | {gb:.0f}" for gb in planned)
    assert f"{max(memory.dreaming, memory.update, memory.longest):.0f} of 85 by the plan |" in text
    assert (memory.tokens, memory.context) == (16384, 24576), "the table's titles"


def test_an_update_takes_as_long_as_the_notes_say():
    """Guards: NOTES 10.7 of yesterday's node/hours.py."""
    notes = " ".join((ROOT / "NOTES.md").read_text().split("**10.7 ")[1].split("- **")[0].split())
    for config, ranks, says in ((recipe.Train(), 8, "on 8 H100: {:.0f} s, from {:.0f} to {:.0f};"),
                                (LLAMAS.dreaming, 1, "one H100 {:.0f} s, from {:.0f} to {:.0f}.")):
        took = hours.total(plan.plan_train(config, ranks=ranks).stages)
        assert says.format(took.seconds, took.low, took.high) in notes


@pytest.mark.parametrize("who, context, flag", [
    ("policy_engine", 20_000, "--context"), ("world_model_server", 30_000, "--world-model-context"),
    ("judge_server", 40_000, "--judge-context")])
def test_a_cache_that_holds_no_whole_sequence_of_its_own_context_is_refused(simulated, who, context, flag):
    """Guards: a plan that fits because vLLM would not start; one model's cache held to another's context. A
    cache of exactly one sequence is enough."""
    contexts = dict(context=20_000, world_model_context=30_000, judge_context=40_000)
    model = sizes.read_model(SMALL.world_model if who == "world_model_server" else SMALL.policy)
    enough = model.kv_token * context / 1e9
    cached = lambda size: replace(SMALL, **contexts, **{who: replace(getattr(SMALL, who), kv_cache_gb=size)})
    plan.plan_train(cached(enough), ranks=1)
    says = f"{who.replace('_', '-')}.kv-cache-gb .* holds no sequence of {context:,} tokens .* lower {flag}$"
    with pytest.raises(ValueError, match=says):
        plan.plan_train(cached(0.99 * enough), ranks=1)


def test_servers_are_planned_over_the_gpus_that_they_are_given(simulated):
    """Guards: 65 GB over 8 GPUs in the plan and over 4 on the node: 16 GB a GPU where the plan says 9."""
    def served(given: int, ranks: int) -> list[tuple[str, int]]:
        server = recipe.ServerConfig(tensor_parallel=given)
        config = replace(NODE, world_model_server=server, judge_server=server)
        agent, world = sizes.read_model(NODE.policy), sizes.read_model(NODE.world_model)
        return [(sampler.name, sampler.tp) for sampler in plan.samplers(config, agent, world, ranks)]

    over = lambda tp: [("policy engine", 1), ("world model server", tp), ("judge server", tp)]
    assert served(4, 8) == over(4) and served(8, 8) == over(8) and served(8, 4) == over(4)
    seconds = lambda given: plan.plan_train(replace(
        NODE, world_model_server=replace(NODE.world_model_server, tensor_parallel=given))).stages[1].seconds
    assert seconds(4) > seconds(8)


# ---- hours -------------------------------------------------------------------------------------------------


def test_rates_scale_with_what_bounds_them(agent):
    """Guards: hours that do not change with the card. Training is bound by arithmetic, decoding by memory: an
    H200 trains no faster than an H100 and writes faster; a model half as large trains twice as fast."""
    h100, h200 = sizes.CARDS["H100-80GB"], sizes.CARDS["H200-141GB"]
    assert hours.train_rate(agent, h100, False) == hours.train_rate(agent, h200, False)
    writes = [hours.decode_rate(agent, card, 1, 4, 9000) for card in (h100, h200)]
    assert writes[1] / writes[0] == pytest.approx(4.8 / 3.35)
    small = sizes.read_model("meta-llama/Llama-3.2-1B-Instruct")
    trains = [hours.train_rate(model, h100, False) for model in (agent, small)]
    assert trains[1] / trains[0] == pytest.approx(8.030 / 1.236, rel=1e-3)
    # Frozen weights have no gradient: three of four parts of the work are left.
    assert hours.train_rate(small, h100, True) == pytest.approx(hours.train_rate(small, h100, False) * 4 / 3)


def test_decoding_of_the_world_model_goes_through_the_measured_points():
    """Guards: a slope taken from the wrong end, and H200s that write 1.4 times what H100s write: few answers
    over 8 GPUs wait for latency, and both were measured alike. 12 at once lie between 8 and 16."""
    world, h100, h200 = sizes.read_model("openai/gpt-oss-120b"), *map(sizes.CARDS.get, list(sizes.CARDS)[:2])
    rates = [hours.decode_rate(world, h100, 8, n, 9000) for n, _ in hours.DECODE_OSS]
    assert rates == pytest.approx([rate for _, rate in hours.DECODE_OSS])
    assert hours.decode_rate(world, h200, 8, 8, 9000) == pytest.approx(1948, rel=0.02)  # vllm #30326
    assert 1_975 < hours.decode_rate(world, h100, 8, 12, 9000) < 3_313
    assert hours.decode_rate(world, h100, 8, 128, 9000) == pytest.approx(12_781, rel=0.1)  # vllm #30326


def test_the_slow_end_is_never_faster_than_the_fast_end(agent, simulated):
    """Guards: a range with its ends exchanged, or a likely figure outside of it."""
    h100, world = sizes.CARDS["H100-80GB"], sizes.read_model("openai/gpt-oss-120b")
    rates = [lambda f: hours.train_rate(agent, h100, False, f), lambda f: hours.prefill_rate(agent, h100, f),
             lambda f: hours.train_rate(world, h100, True, f), lambda f: hours.prefill_rate(world, h100, f),
             lambda f: hours.decode_rate(world, h100, 8, 12, 9000, f), lambda f: -hours.delta_tokens(f=f),
             lambda f: hours.decode_rate(agent, h100, 1, 2, 9000, f),
             lambda f: -hours.head(agent, h100, False, 1, f)]
    for rate in rates:
        slow, likely, fast = map(rate, (hours.SLOW, hours.LIKELY, hours.FAST))
        assert slow < likely <= fast
    for planned in (plan.plan_world_model(recipe.WorldModelSFT()), plan.plan_policy(recipe.PolicySFT())):
        for stage in planned.stages:
            assert 0 < stage.low < stage.seconds < stage.high, stage


def test_a_delta_is_as_long_as_on_the_real_sites():
    """Guards: every new page counted as written out whole (.71 of it, or less), and shares that are not of
    the data: a mean of .23 of the next page on two real sites, .13 inside a view (NOTES 2.7)."""
    assert hours.delta_tokens() == pytest.approx(hours.LIKELY.reason + 0.23 * 9000, rel=0.05)
    assert len(hours.INSIDE) == len(hours.BETWEEN) == 10
    assert hours.delta_tokens(1000) < hours.delta_tokens() / 2


def test_the_float32_head_costs_what_its_flops_cost():
    """Guards: a head that the plan leaves out. By hand, a target token of gpt-oss-120b: 201,088 x 2,880
    weights, 2 flops, three times as it is frozen, at 50 TFLOP/s: 69 us."""
    world = sizes.read_model("openai/gpt-oss-120b")
    seconds = hours.head(world, sizes.CARDS["H100-80GB"], True, 1)
    assert seconds == pytest.approx(2 * 201_088 * 2_880 * 3 / 50e12, rel=0.01)


def test_every_figure_has_its_source():
    """Guards: a number that nobody can check. Each is called an assumption, or names where it is from."""
    source = Path(hours.__file__).read_text().split("FIGURES = {\n")[1].split("\n}\n")[0]
    entries = re.findall(r"((?:    #.*\n)*)    \"(\w+)\": (.*)", source)
    assert [name for _, name, _ in entries] == list(hours.FIGURES)
    known = re.compile(r"assumption|NOTES|#\d+|torchtitan|safe side")
    assert [name for above, name, beside in entries if not known.search(above + beside)] == []


def test_a_step_is_as_long_as_its_parts_and_the_world_model_is_most_of_it(node):
    """Guards: tokens counted once a dream instead of once a turn. The world model dominates (NOTES 10.7)."""
    by = {stage.name: stage.seconds for stage in node.stages}
    # Half of the 32 rows are experts, of 3 turns in the mean. Each of the others has 5 turns of a page and an
    # answer. Pages are lognormal with the mean 9,000 and deviation .7 of their log: .936 of them fit 20,480
    # tokens, and those hold .795 of all tokens.
    assert node.stages[0].name == "the agent acts"
    assert node.stages[0].tokens == pytest.approx(16 * 5 * (9000 * 0.795 + 300 * 0.936), rel=0.1)
    assert by["the world model answers"] > sum(by.values()) / 2
    learned = 128 * 9300 * 1.4375  # 16 x 5 + 16 x 3 turns of 9,300 tokens, 1.4375 passes
    even = learned / (8 * 5762 * 0.85)
    assert even < by["update"] < 1.4 * even  # all wait for the slowest rank


def test_who_learns_most_decides_how_long_a_fine_tuning_takes():
    """Guards: ranks that all end at once. One microbatch a rank and step: every step is as long as its
    longest sequence. By hand, on two ranks: [9, 1] are 9, not 5; [9, 1, 5] are 10, for a rank that comes out
    short repeats the cheapest; [6, 5, 4, 3] are 6 and 4, not 6 + 3."""
    assert [distributed.slowest(costs, 2) for costs in ([9, 1], [9, 1, 5], [6, 5, 4, 3])] == [9, 10, 10]
    config = recipe.WorldModelSFT()
    tokens, most, each = hours.learning(1000, 2000, config.context, config.sft, 8)
    alone, whole, _ = hours.learning(1000, 2000, config.context, config.sft, 1)
    assert tokens == alone == pytest.approx(whole) == pytest.approx(1000 * 11_000, rel=0.1)
    assert tokens / 8 < most and each >= 1000 / 8 / 2


def test_preparing_is_shared_by_as_many_cores_as_prepare_takes():
    """Guards: half an hour on one core that the plan leaves out, or counts on a node as on one core; the 96
    cores of a node, of which node/prepare.py takes 32."""
    assert hours.preparing(hours.LIKELY, 8).seconds == pytest.approx(43_316 * 0.045 / prepare.MOST_WORKERS)
    assert hours.preparing(hours.LIKELY, 1).seconds == pytest.approx(43_316 * 0.045 / 12)


def test_a_context_that_no_page_fits_is_planned_all_the_same(simulated):
    """Guards: a ZeroDivisionError for a recipe of a laptop's sizes, all of whose dreams are dropped."""
    stages = plan.plan_train(replace(LLAMAS.dreaming, context=2100), ranks=1).stages
    assert hours.total(stages).seconds == hours.LIKELY.sync


def test_offloading_costs_what_has_to_travel(agent):
    """Guards: hours of --offload that the plan does not tell. 8.03e9 weights on 8 ranks, a microbatch that is
    scored (4 bytes a weight), one that is learned (4 + 4, and 4 back), one step of Adam (28 bytes)."""
    by_hand = 8.030 / 8 * (4 / 20 + 12 / 20 + 28 / 50)
    assert hours.offloading(agent, 8, scored=1, learned=1, steps=1) == pytest.approx(by_hand, rel=1e-3)


def test_offloading_is_in_the_hours_of_both_trainings(simulated):
    """Guards: the same, left out of a stage. Some 128 turns of 9,300 tokens are nearly as many microbatches
    of 8,192: each is learned from once and scored 1.75 times, in 4 steps."""
    update = lambda config: next(s for s in plan.plan_train(config, ranks=1).stages if s.name == "update")
    slower = update(SMALL).seconds - update(LLAMAS.dreaming).seconds
    small = sizes.read_model(SMALL.policy)
    travels = lambda n: hours.offloading(small, 1, 1.75 * n, n, 4)
    assert 60 < travels(80) < slower < travels(128)
    clone = lambda config: plan.plan_policy(config, ranks=1).stages[0].seconds
    slower = clone(replace(LLAMAS.cloning, offload=True)) - clone(LLAMAS.cloning)
    each = hours.learning(hours.ROWS, 300, 16_384, LLAMAS.cloning.sft, 1)[2]
    assert slower == pytest.approx(hours.offloading(small, 1, 0, each, each / 8), rel=1e-3)


def test_a_judge_that_learns_along_writes_in_the_agents_engine(simulated):
    """Guards: a judge without a server that has a place for every dream, or none. With room for one sequence
    at a time, turns and verdicts of 300 tokens are written one after the other."""
    current = replace(LLAMAS.dreaming, dreaming=replace(LLAMAS.dreaming.dreaming, judge="current"))

    def dreams(kv: float) -> list[float]:
        config = replace(current, policy_engine=recipe.EngineConfig(kv_cache_gb=kv))
        return [stage.seconds for stage in plan.plan_train(config, ranks=1).stages[:3]]

    small, large = dreams(0.55), dreams(6.0)
    assert small[0] > 1.5 * large[0] and large[2] > 0.2
    one = sizes.read_model(current.policy)
    judge = lambda config: plan.roles(config, one, one, 1)[2].name
    assert (judge(current), judge(LLAMAS.dreaming)) == ("policy engine", "judge server")
    assert not any("judge" in row.who for row in plan.plan_train(current, ranks=1).memory.rows)


# ---- WebRL -------------------------------------------------------------------------------------------------


def test_webrl_is_planned_in_the_sizes_that_the_rival_has(simulated):
    """Guards: a plan of yesterday's phases, contexts or caches, as no rival is imported by the planner."""
    assert plan.plan_webrl(plan.WEBRL) == plan.plan_webrl(webrl.LLAMA)
    assert plan.plan_orm(plan.ORM) == plan.plan_orm(orm.LLAMA)


def test_webrl_takes_of_a_gpu_what_train_takes_without_its_world_model(simulated):
    """Guards: a world model in a plan on real sites, a reward model that is left out, and another trainer
    than that of train.py. The reward model has the judge's place, and reads one page where the judge reads
    two."""
    ours, _ = plan.plan_webrl(webrl.LLAMA)
    same = replace(recipe.Train(), context=webrl.LLAMA.context, tokens=webrl.LLAMA.tokens)
    dreams = plan.plan_train(same)
    sizes_of = lambda planned, who: [(row.dreaming, row.update) for row in planned.memory.rows
                                     if row.who.startswith(who)]
    for who in ("trainer", "policy engine"):
        assert sizes_of(ours, who) == sizes_of(dreams, who) != []
    assert sizes_of(ours, "reward model server") == sizes_of(dreams, "judge server") != []
    text = "\n".join(printed.memory(ours))
    assert "world model" not in text and "judge" not in text and "acting" in text and "dreaming" not in text
    left = sum(update for _, update in sizes_of(dreams, "world model server"))
    assert ours.memory.update == pytest.approx(dreams.memory.update - left)
    elsewhere, _ = plan.plan_webrl(replace(webrl.LLAMA, judge_urls=("http://host:1/v1",)))
    assert not sizes_of(elsewhere, "reward model server")
    told = {change.what.split()[0]: change.free for change in ours.changes}
    assert told["--judge-urls"] == pytest.approx(free_longest(elsewhere))
    assert not any("dreaming" in change.what for change in ours.changes), "webrl.py refuses such a flag"


def test_the_reward_models_training_is_policys_on_labelled_tries(simulated):
    """Guards: hours of NNetNav's rows, or of one pass where the paper has four; answers of 300 tokens."""
    judging = plan.plan_orm(orm.LLAMA)
    stage, cloning = judging.stages[0], plan.plan_policy(replace(orm.LLAMA)).stages[0]
    assert stage.tokens / cloning.tokens == pytest.approx(12_200 / 48_333, rel=0.05)
    once = plan.plan_orm(replace(orm.LLAMA, sft=replace(orm.LLAMA.sft, epochs=1))).stages[0]
    assert stage.tokens == pytest.approx(4 * once.tokens, rel=0.01)
    assert judging.memory.update == plan.plan_policy(orm.LLAMA).memory.update


@pytest.fixture
def phase(agent):
    """phase(n, ranks, browsers): {part: its stage} of phase n, with figures or a config that are changed."""
    card = sizes.CARDS["H100-80GB"]

    def parts(n=7, ranks=8, browsers=1, figures={}, **changed) -> dict[str, hours.Stage]:
        config, f = replace(webrl.LLAMA, **changed), SimpleNamespace(**vars(hours.LIKELY) | figures)
        acts, _, judges = plan.roles(config, agent, agent, ranks)
        speeds = acts.speed(card, f), replace(judges, mean=hours.PAGE + hours.VERDICT).speed(card, f)
        stages = hours.webrl_phase(f, n, config, agent, card, ranks, *speeds, browsers)
        return {stage.name: stage for stage in stages}
    return parts


def changed(one: dict, other: dict) -> set[str]:
    return {name for name in one if (one[name].tokens, one[name].seconds) !=
            (other[name].tokens, other[name].seconds)}


def test_each_part_of_a_phase_depends_on_what_it_is_made_of(phase):
    """Guards: a real step that slows the trainer, a buffer that is scored where none is kept, a teacher who
    is asked where no goal is bred, browsers that each do all tries."""
    usual = phase()
    assert changed(usual, phase(figures={"real_step": 6})) == {"the sites answer"}
    assert changed(usual, phase(figures={"teacher": 1})) == {"the teacher answers"}
    assert changed(usual, phase(beta=2.0)) == set()
    alone = phase(replay=0.0)
    assert changed(usual, alone) == {"perplexities", "states for the critic", "a pass of the actor"}
    assert alone["perplexities"].seconds == alone["perplexities"].tokens == 0
    assert changed(usual, phase(breed=0)) == {"states for the critic", "the teacher answers"}
    assert phase(breed=0)["the teacher answers"].seconds == 0
    assert changed(phase(ranks=4), phase(ranks=4, browsers=2)) == {"the agent acts", "the sites answer"}
    assert phase(ranks=4, browsers=2)["the sites answer"].seconds == usual["the sites answer"].seconds
    offloaded = changed(usual, phase(offload=True))
    assert offloaded == {"perplexities", "states for the critic", "a pass of the actor"}


def test_a_phase_is_what_it_is_by_hand(phase):
    """Guards: seconds of all browsers one after the other, pages that are read once a try, passes that do not
    count the scoring. 63 tries of a browser, 15 turns of 3 s and 10 s of reset; as many questions of a rank
    to the teacher, 3 s each. A turn reads 9,000 tokens at .4 x 989 TFLOP/s, and writes 300 with 16 GB read
    for each, at .7 x 3.35 TB/s. 7,500 new turns, twice as many old ones; forward, recomputed, backward, and
    two scorings: 1.5 passes."""
    usual = phase()
    assert usual["the sites answer"].seconds == 63 * (10 + 15 * 3)
    assert usual["the teacher answers"].seconds == 63 * 3
    turn = 9000 * 2 * 8.03e9 / (0.4 * 989e12) + 300 * (16.06 + 1.18) / (0.7 * 3350)
    assert usual["the agent acts"].seconds == pytest.approx(63 * 15 * turn, rel=0.01)
    whole, even = usual["a pass of the actor"], 5762 * 0.85 * 8
    assert 7500 * 3 * 7500 < whole.tokens < 7500 * 3 * 9300  # longer turns than the context are dropped
    assert 1.5 * whole.tokens / even < whole.seconds < 1.15 * 1.5 * whole.tokens / even
    states = usual["states for the critic"]
    assert states.seconds / states.tokens == pytest.approx(whole.seconds / whole.tokens / 1.5 / 4, rel=0.01)
    assert phase(n=0)["perplexities"].seconds == 0, "the buffer of the first phase is empty"
    assert phase(n=2)["perplexities"].tokens == pytest.approx(2 * phase(n=1)["perplexities"].tokens)


def test_all_phases_are_the_sum_of_the_growing_phases(simulated, phase):
    """Guards: eight times the last phase, or the first, whose buffer is empty."""
    last, every = plan.plan_webrl(webrl.LLAMA)[0].stages, plan.plan_webrl(webrl.LLAMA)[1]
    for stage in every:
        parts = [phase(n)[stage.name] for n in range(8)]
        assert stage.tokens == pytest.approx(sum(part.tokens for part in parts))
        assert stage.seconds == pytest.approx(sum(part.seconds for part in parts), rel=1e-6)
        assert stage.low <= stage.seconds <= stage.high
    assert [stage.name for stage in last] == [stage.name for stage in every]
    assert hours.total(last).seconds < hours.total(every).seconds < 8 * hours.total(last).seconds


@pytest.mark.parametrize("card", ["H100-80GB", "A100-40GB"])
def test_the_command_for_webrl_prints_memory_disk_and_hours_of_both_trainings(simulated, card):
    """Guards: a part that is planned and not shown; a teacher whose machine the reader thinks is among the
    eight; lines that a terminal breaks."""
    text = plan.command("webrl", card=card)
    assert [line for line in text.splitlines() if len(line) > 110] == []
    acting, phases = plan.plan_webrl(webrl.LLAMA, card)
    judging = plan.plan_orm(orm.LLAMA, card)
    assert "\n".join(printed.memory(acting)) in text and "\n".join(printed.memory(judging)) in text
    assert f"{'It fits.' if card == 'H100-80GB' else 'IT DOES NOT FIT.'}" in text
    disk = sum(judging.disk.values()) + sum(acting.disk.values())
    assert re.search(rf"Disk, GB +{disk:,.0f}\n", text)
    assert "8 browsers, 63 tries each" in text and "its server is elsewhere, not in this plan" in text
    whole = hours.total([*judging.stages, *phases]).seconds / 3600
    line = re.search(r"^ +total .*$", text.split("The recipe")[1], re.MULTILINE)[0]
    assert float(line.split()[2]) == pytest.approx(whole, abs=0.06)
    assert "world model" not in text and "dreams" not in text


# ---- waiting -----------------------------------------------------------------------------------------------

EACH = hours.Speed(1e12, lambda n: 10.0 * n, places=64)  # ten tokens/s to each answer
SHARED = hours.Speed(1000.0, lambda n: 10.0, places=64)  # ten tokens/s, whoever shares them


def test_the_dream_that_ends_last_takes_its_own_answers_or_those_that_wait_for_a_place():
    """Guards: a batch as long as its mean dream, and a cache without an end. By hand, ten tokens/s to each:
    16 dreams that write 50 tokens in the mean and one of them 200 take 20 s, side by side. With two places
    all 800 tokens go through at 20/s; with one at 10/s."""
    assert EACH.seconds(16, 0, 50, 200) == pytest.approx(20)
    assert replace(EACH, places=2).seconds(16, 0, 50, 200) == pytest.approx(40)
    assert replace(EACH, places=1).seconds(16, 0, 50, 200) == pytest.approx(80)
    assert EACH.seconds(0.5, 0, 50, 50) == pytest.approx(5), "half a dream a rank is one dream on some"


def test_a_prompt_is_read_before_anything_is_written():
    """Guards: prompts that cost nothing. 1,000 tokens/s read: two prompts of 3,000 are 6 s, in which nobody
    writes; then 20 tokens each at 10/s together."""
    assert SHARED.seconds(2, 3000, 20, 20) == pytest.approx(6 + 4)


def test_a_server_is_slower_by_the_power_of_the_engines_that_are_busy_beside_it():
    """Guards: one factor however many engines generate (simulated over 8 GPUs: 2.0, 4.0, 8.8 and 16.5 times
    as long beside 1 to 4 of them). With slices of 2 and engines that are busy half of the time, one rank
    makes it 1.5 times as long, in the mean of 1 and 2; two ranks 1.5 x 1.5. An engine has one server beside
    it: 2."""
    def takes(ranks: int, slices: float) -> tuple[float, float]:
        return hours.dreaming([(0.0, [300.0])] * 8, [EACH] * 3, ranks, slices, False)[:2]

    assert takes(1, 1.0) == takes(2, 1.0) == (30, 30), "an answer of the agent has 300 tokens as well"
    assert takes(1, 2.0) == (60, 30 * 1.5)
    assert takes(2, 2.0) == (60, 30 * 1.5**2)


def test_servers_elsewhere_share_no_gpu_and_the_slow_end_shares_them_most(node, simulated):
    """Guards: time slices of a server on another machine; a range whose slow end is not CUDA's own."""
    apart = plan.plan_train(replace(NODE, world_model_urls=("http://host:1/v1",)))
    seconds = lambda planned, end: [getattr(stage, end) for stage in planned.stages[:2]]
    assert all(a < b for a, b in zip(seconds(apart, "seconds"), seconds(node, "seconds")))
    assert all(a < b for a, b in zip(seconds(apart, "high"), seconds(node, "high")))
    assert (hours.FAST.slices, hours.SLOW.slices) == (1.0, 2.0)


def test_the_reckoned_server_is_the_measured_one():
    """Guards: prompts and answers whose costs do not add up to what a server takes. InferenceX #828, 8 H100:
    8 requests at once of some 7,373 + 922 tokens (8k/1k, each .8 to 1 of it) take 4.4 s, 4 take 3.7 s."""
    world, h100 = sizes.read_model("openai/gpt-oss-120b"), sizes.CARDS["H100-80GB"]
    server = hours.Speed(8 * hours.prefill_rate(world, h100),
                           lambda n: hours.decode_rate(world, h100, 8, n, 9000), 64)
    for n, measured in ((4, 3.7), (8, 4.4)):
        assert server.seconds(n, 7373, 922, 922) == pytest.approx(measured, rel=0.1)


def test_a_batch_is_drawn_with_the_recipes_own_numbers():
    """Guards: experts that are dreamed, dreams on pages that the agent cannot read, and predictions longer
    than the world model may write."""
    d = NODE.dreaming
    dreams, rows = zip(*(hours.draw(NODE, hours.LIKELY, random.Random(seed)) for seed in range(200)))
    count = sum(map(len, dreams)) / 200
    assert count == pytest.approx(d.tasks * d.group * (1 - d.expert_fraction), rel=0.05)
    pages, answers = zip(*(dream for batch in dreams for dream in batch))
    assert {len(turns) for turns in answers} == {d.horizon}
    assert max(map(max, answers)) <= d.world_model_tokens
    assert max(pages) <= NODE.context - d.max_new_tokens
    assert sum(map(len, rows)) / 200 <= d.tasks * d.group


# ---- python -m node.plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words, says", [
    (["tiny"], "'tiny' is not known; known are paper, single, nnetnav, webrl"),
    (["single", "--card", "L40"], "'L40' is not known; known are H100-80GB.*L40S-48GB")])
def test_a_wrong_recipe_or_card_is_one_line_with_the_known_names(monkeypatch, words, says):
    """Guards: a traceback, or the default planned in silence."""
    monkeypatch.setattr(sys, "argv", ["node.plan", *words])
    with pytest.raises(SystemExit, match=says):
        plan.main()


@pytest.mark.parametrize("words, ranks", [([], 8), (["single"], 1), (["single", "--ranks", "4"], 4)])
def test_the_command_plans_the_recipe_on_as_many_gpus_as_it_has(monkeypatch, capsys, words, ranks):
    """Guards: the recipe for one GPU planned for eight, and another recipe than the one named."""
    monkeypatch.setattr(sys, "argv", ["node.plan", *words, "--card", "H200-141GB"])
    monkeypatch.setattr(plan, "report", lambda *given: str(given))
    monkeypatch.setattr(plan, "fitting", lambda *_: None)
    plan.main()
    single = plan.Recipe(recipe.SINGLE, recipe.SINGLE_WORLD_MODEL, recipe.SINGLE_POLICY)
    assert capsys.readouterr().out == str((single if words else plan.Recipe(), "H200-141GB", ranks)) + "\n"
