"""The first thing to run on a rented machine: every stage of a recipe once, at its real shapes, before any
download.

    torchrun --nproc_per_node 8 -m node.rehearse            # the paper's recipe, on eight GPUs
    python -m node.rehearse single                          # the recipe for one GPU
    torchrun --nproc_per_node 2 -m node.rehearse tiny       # a laptop with vLLM's CPU build (make test-vllm)

Not rehearsed: annotation, the agent's cloning (an update's trainer without vLLM beside it), the look at the
real web, and the data.

The models and pages are made up, with the real names, sizes and vocabularies (node/made_up.py). What runs are
the functions of the run itself (node/stages.py). Each stage is shown beside the plan (node/compare.py). A
stage that fails is said, and those that do not need what it makes go on. At the end: READY, or what to
change.

OUT/rehearsal.json holds the same; OUT/send.json its figures without names of hosts, users or folders, for
people to compare. What is made up
is removed at the end, also after a failure and Ctrl-C; its path is printed, for after a kill -9.

GB is 1e9 bytes. Seconds are the slowest rank's, memory is that of the fullest GPU.
"""

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro

import distributed
import dream
import finetune
import recipe
import remote
from node import compare, machine, made_up, plan, preflight, server
from node.sizes import CONFIGS, GB, PUBLISHED, read_model
from node.stages import STAGES, Run, Stage, start_alone

SMALL = recipe.ServerConfig(tensor_parallel=1, kv_cache_gb=0.1, dtype="float32", eager=True)
TINY = plan.Recipe(
    recipe.Train(policy="tiny/llama", tokens=2048, context=4096, world_model_context=4096, judge_context=6144,
                 compute="float32", policy_engine=recipe.EngineConfig(kv_cache_gb=0.1, eager=True),
                 world_model_server=SMALL, judge_server=SMALL,
                 dreaming=dream.Config(tasks=2, group=4, horizon=3, max_new_tokens=64, world_model_tokens=96,
                                       judge_tokens=48)),
    recipe.WorldModelSFT(base="tiny/gpt-oss", context=4096,
                         sft=finetune.FineTune(tokens=2048, microbatches=2)))
SHAPE = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64,
         "max_position_embeddings": 131_072}
TINY_MODELS = {  # vLLM's CPU build has kernels for heads of 32, and none for MXFP4 (NOTES 7.12)
    "tiny/llama": SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "tiny/gpt-oss": SHAPE | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
                             "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}}
QWEN3 = SHAPE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
TINY_MODELS |= {"tiny/qwen3": QWEN3, "tiny/qwen3-world": QWEN3}  # as `single` has, for flags of `tiny`
RECIPES = {**plan.RECIPES, "tiny": (TINY, 2)}
# Mean bytes of a page; elsewhere as NNetNav's. MiniWoB++'s have 447, and what frames a made page is longer.
PAGES = {"tiny": 900, "single": 900}
GRACE = 60.0  # seconds that a rank that has failed waits for the others


@dataclass(frozen=True)
class Options:
    """Every stage of a recipe once, with made-up models of the real sizes."""

    recipe: tyro.conf.Positional[str] = "paper"
    """paper, single, nnetnav (single with NNetNav's pages and Llamas) or tiny."""
    quick: bool = False
    """Eager engines, no merge, no export: for the paper's recipe a quarter of an hour with a disk of 1 GB/s,
    ten minutes with one of 3."""
    vllm: bool = True
    """--no-vllm leaves out engines, servers and dreams: fine-tuning and updates alone."""
    layers: int = 0
    """Cut the models to so many layers of full width, for a card that does not hold them; 0: all."""
    out: str = "runs/rehearsal"
    """Folder of rehearsal.json and of the servers' logs. What is made up lies in a folder of it."""
    world_model_flags: str = ""
    """Flags that sft.py world_model will get: --world-model-flags="--context 24576"."""
    train_flags: str = ""
    """The same of train.py: --train-flags="--offload --judge-server.kv-cache-gb 1.2"."""


# ---- what is rehearsed -------------------------------------------------------------------------------------


def chosen(options: Options, ranks: int) -> plan.Recipe:
    """The recipe with its flags, its servers on so many GPUs. Raises ValueError for an unknown one."""
    if options.recipe not in RECIPES:
        raise ValueError(f"recipe {options.recipe!r} is not known; known are {', '.join(RECIPES)}")
    trainings = RECIPES[options.recipe][0].given((options.world_model_flags, "", options.train_flags))
    config, eager = trainings.dreaming, {"eager": True} if options.quick else {}
    servers = {name: replace(getattr(config, name), **eager, tensor_parallel=min(
        ranks, getattr(config, name).tensor_parallel)) for name in ("world_model_server", "judge_server")}
    return replace(trainings, dreaming=replace(
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


def renamed(trainings: plan.Recipe, base: Path, agent: Path, merged: Path, rest: Path) -> plan.Recipe:
    """The recipe with other folders: the world model's base, the agent, the merged world model, all else."""
    packed = ".gz" * trainings.dreaming.trajectories.endswith(".gz")  # it tells the plan whose pages they are
    rows = str(rest / "rows" / f"train.jsonl{packed}")
    return plan.Recipe(
        replace(trainings.dreaming, policy=str(agent), world_model=str(merged), trajectories=rows,
                judge_model="", out=str(rest / "dream")),  # the agent's folder has the judge's size
        replace(trainings.learning, base=str(base), out=str(merged), transitions=rows))


def selected(options: Options) -> list[Stage]:
    return [stage for stage in STAGES
            if (stage.quick or not options.quick) and (options.vllm or not stage.vllm)]


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


EXPECTED = (ValueError, OSError, remote.EngineError)  # raised between two collectives: what was used is whole


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
    error = ""
    try:
        began = begin_measuring()
        told = stage.work(run)
        mine = measured(began)  # on a GPU this waits, so an error of a kernel comes up here
    except EXPECTED as failure:
        error = f"{type(failure).__name__}: {failure}"
    except Exception as failure:  # out of memory, or a bug: reported like all else
        traceback.print_exc()
        error = f"! {type(failure).__name__}: {failure}"
    if error := agreed(run, number, error):
        # Out of the middle of a forward what it used is broken, and its memory is wanted.
        try:
            run.forget(*stage.gives, *(stage.needs if error.startswith("! ") else ()))
        except RuntimeError:  # CUDA itself is what failed
            raise Alone(error) from None
        if not distributed.grouped():  # an engine that failed has destroyed it (NOTES 7.4)
            raise Alone(error)
        return record | {"error": error.removeprefix("! ")}
    record |= of_all_ranks(mine) | told
    if "tokens" in told:
        seconds = told.get("rate_seconds", record["seconds"])
        record["tokens_per_second"] = round(told["tokens"] / seconds, 1)
    record["planned"] = compare.beside(stage, record, figures, vllm)
    return record | {"off": compare.off(record)}


# ---- python -m node.rehearse -------------------------------------------------------------------------------

def prepare(options: Options, trainings: plan.Recipe,
            ranks: int) -> tuple[dict, list[Path], dict | None, dict[str, float]]:
    """(the report's head, the configs of base and agent, the plan's figures or None without a GPU, GB of each
    part that is written). Rank 0 alone calls it. Raises ValueError, also where the plan sees that vLLM would
    not start."""
    gpu, where = torch.cuda.is_available(), Path(options.out) / "configs"
    configs = [write_config(name, options.layers, where / part) for part, name in (
        ("base", trainings.learning.base), ("agent", trainings.dreaming.policy))]
    base, agent = (read_model(str(config)) for config in configs)
    need = {"models": sum(map(made_up.gigabytes, configs)), "a checkpoint": 12 * agent.parameters / GB + 0.1}
    if not options.quick:
        need["merged and exported (not with --quick)"] = base.folder + 2 * agent.parameters / GB
    card, name, memory, warnings, figures = "", "CPU", 0.0, [], None
    if gpu:
        name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / GB
        card, warning = compare.card_of(name, memory)
        warnings += [warning] if warning else []
        here = renamed(trainings, *configs, configs[0], where)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures = pool.submit(compare.planned, here, card, ranks).result()
        for of in ("learner", "trainer"):  # this very card, which may have less than others of its name
            figures[of] = replace(figures[of], card=replace(figures[of].card, memory=memory))
        planned_for = ("learner", "trainer") if options.vllm else ("learner",)
        warnings += [f"by the plan {figures[of].title} lacks {-figures[of].free:.1f} GB (node.plan says more)"
                     for of in planned_for if figures[of].free < 0]
    told = {"recipe": options.recipe, "quick": options.quick, "vllm": options.vllm, "layers": options.layers,
            "flags": [options.world_model_flags, options.train_flags], "ranks": ranks, "card": name,
            "card_gb": round(memory, 1), "planned_as": card, "versions": compare.versions(),
            "warnings": warnings, "interrupted": False}
    return told, configs, figures, need


def looked(options: Options, trainings: plan.Recipe, ranks: int) -> machine.Found:
    """What would stop it on this machine, seen by this rank. `trainings` names the folders of configs."""
    found, config, beside = machine.Found(), trainings.dreaming, {}
    base, agent = read_model(trainings.learning.base), read_model(config.policy)
    if torch.cuda.is_available():
        samplers = plan.samplers(config, agent, base, ranks) if options.vllm else []
        beside = {sampler.name: sum(row.dreaming for row in sampler.rows()) for sampler in samplers}
        machine.gpu(found, {"the frozen base": 2 * base.parameters / GB / ranks}, config.compute)
    preflight.memory(found, config, agent.parameters / GB, beside)
    machine.compiler(found)
    for name in ("world-model", "judge") if options.vllm else ():
        server_config = getattr(config, f"{name.replace('-', '_')}_server")
        machine.shared(found, f"--{name}-server.tensor-parallel", server_config.tensor_parallel)
    return found


def announce(options: Options, told: dict, figures: dict | None, need: dict[str, float]) -> None:
    """How long and how much, before it begins."""
    stages = selected(options)
    length = "some minutes"
    if figures:
        minutes = sum(figures["seconds"].get(stage.name, 0.0) for stage in stages) / 60
        length = f"about {minutes:.0f} minutes, by node/plan.py and {compare.DISK:g} GB/s of disk"
    parts = ", ".join(f"{what} {size:,.1f}" for what, size in need.items())
    print(f"{told['recipe']} on {told['ranks']} x {told['card']}: {length}. It writes "
          f"{sum(need.values()):,.1f} GB to {options.out} ({parts}), and removes them at the end.",
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
    trainings, out = chosen(options, ranks), Path(options.out)
    if first:
        shutil.rmtree(out / "older-runner", ignore_errors=True)
        (out / "alone").unlink(missing_ok=True)
    known = prepare(options, trainings, ranks) if first else None  # before the group: the plan takes a minute
    distributed.init(alone=True)
    told, configs, figures, need = distributed.gather(known)[0]
    here = renamed(trainings, *configs, configs[0], out / "configs")
    preflight.stop(distributed.gather(looked(options, here, ranks)))
    if first:
        announce(options, told, figures, need)
    run = Run(trainings, {}, out, out, PAGES.get(options.recipe, made_up.PAGE))
    try:
        with made_up.place(out, sum(need.values()), "--out") as made:  # it is removed however this ends
            # Names of our own: below `made` an absolute --out, or one with .., is the user's folder.
            base, agent = made / "base", made / "agent"
            run.recipe = renamed(trainings, base, agent, made / "world_model", made)
            run.models, run.made = dict(zip((base, agent), configs)), made
            ready = run_stages(run, options, told, figures)
            close(run)
    except Alone:
        try_older_runner(run, options, ranks)
        raise
    try_older_runner(run, options, ranks)
    return ready


# ---- where vLLM failed: its older runner, once -------------------------------------------------------------

BY_VLLM = ("servers and engines", "weights to the engine")
OLDER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # NOTES 7.15; with it server.settings turns async scheduling off
TRIAL_MINUTES = 30


def another_runner() -> bool:
    """Whether vLLM used its second runner here: on a GPU, where the user has not chosen the first."""
    return torch.cuda.is_available() and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"


def try_older_runner(run: Run, options: Options, ranks: int) -> None:
    """Where engines or the weight sync failed: the same once more with vLLM's older runner, in programs of
    its own and with two layers, beside what the failed engines may have left on the GPUs. Rank 0 says which
    works, and writes it into rehearsal.json; the others wait, for torchrun would end rank 0 with them."""
    if not {*run.failed} & {*BY_VLLM} or not another_runner():
        return
    for one in list(server.RUNNING):
        one.stop()
    with contextlib.suppress(RuntimeError):  # CUDA itself may be what failed
        run.forget(*run.have)
    folder, limit = run.logs / "older-runner", time.monotonic() + GRACE
    if int(os.environ.get("RANK", 0)) != 0:
        while not folder.exists() and time.monotonic() < limit:  # or rank 0 is stuck, and does not come
            time.sleep(0.5)
        limit = time.monotonic() + 60 * TRIAL_MINUTES
        while folder.exists() and not (folder / "told").exists() and time.monotonic() < limit:
            time.sleep(0.5)
        return
    folder.mkdir()
    print(f"vLLM's older runner is tried once, with two layers: some minutes. Its words: {folder}/log",
          flush=True)
    command = [sys.executable, "-c", server.SUPERVISOR, sys.executable, "-m", "torch.distributed.run",
               "--standalone", "--nproc_per_node", str(ranks), "-m", "node.rehearse", options.recipe,
               "--quick", "--layers", "2", "--out", str(folder),
               f"--world-model-flags={options.world_model_flags}", f"--train-flags={options.train_flags}"]
    with open(folder / "log", "w") as log:
        trial = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log,
                                 env=server.clean_environment() | OLDER, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            trial.wait(60 * TRIAL_MINUTES)
        trial.stdin.close()  # if it still runs, its supervisor ends it
    said = verdict(folder / "rehearsal.json")
    print(said, flush=True)
    compare.note(run.logs, {"older_runner": said, "older_runner_works": "works where" in said})
    (folder / "told").touch()


def verdict(file: Path) -> str:
    """What the trial's own report tells of the stages that had failed."""
    stages = json.loads(file.read_text())["stages"] if file.exists() else []
    ran = {stage["name"] for stage in stages if "error" not in stage and "skipped" not in stage}
    if {*BY_VLLM} <= ran:
        return ("vLLM's older runner works where the newer failed: put VLLM_USE_V2_MODEL_RUNNER=0 before "
                "each command, this one first.")
    why = next((f"{stage['name']}: {stage['error']}" for stage in stages if "error" in stage),
               f"see {file.parent / 'log'}")
    return f"vLLM's older runner fails as well ({why}): the runner is not the cause."


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
            if "error" in records[-1]:
                run.failed.append(stage.name)
            if first and "error" in records[-1]:
                print(f"{stage.name} failed: {records[-1]['error']}", flush=True)
    except Alone as error:
        run.failed.append(stage.name)
        # No more collectives: the first rank that sees it writes. Its mark is not in run.made, for that rank
        # removes it while torchrun is still ending the others.
        if first_to_say(run.logs / "alone"):
            failed = {"name": stage.name, "planned": {}, "off": [], "error": str(error).removeprefix("! ")}
            compare.show(run, told, [*records, failed], figures)
        raise
    except (KeyboardInterrupt, SystemExit):
        if first and not (run.logs / "alone").exists():
            now = {"name": stage.name, "planned": {}, "off": [], "skipped": "interrupted"}
            compare.show(run, told | {"interrupted": True}, [*records, now], figures)
        raise
    return compare.show(run, told, records, figures) if first else True


def close(run: Run) -> None:
    """Servers first: the engine destroys the process group (NOTES 7.4)."""
    distributed.barrier()
    if "samplers" in run.have:
        parts = run.have["samplers"]
        for model in (parts.world_model.lm, parts.judge.lm):
            if getattr(model, "server", None):
                model.server.stop()
        parts.agent.close()


def main():
    options = tyro.cli(Options, prog="python -m node.rehearse", description=__doc__)
    recipe.needs_gpu(options.recipe, ("paper", "single", "nnetnav"), "python -m node.rehearse tiny")
    try:
        if options.vllm:
            server.check_installed()
        sys.exit(0 if rehearse(options) else 1)
    except (ValueError, OSError, remote.EngineError) as error:
        recipe.fail("node.rehearse", error)
    except Alone:
        os._exit(1)  # an orderly end would wait for the other ranks
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
