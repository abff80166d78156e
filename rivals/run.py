"""The folder OUT.run of a rival's run: with which settings and models it was begun, and what it cost.

The costs stand beside the result, in OUT/training.json, under these names:
    real_steps, real_trajectories   done on real pages to learn from
    labels                      real rewards, of pages or of recordings, that something learned from
    tokens_sampled              by all models
    seconds                     of the clock, over all starts; what a kill threw away is not in it
"""

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import finetune
import lm
from worlds import chromium

COSTS = ("real_steps", "real_trajectories", "labels", "tokens_sampled", "seconds")


def made_of(config) -> dict:
    """The settings of a command, and a hash of the weights of each model that they name: what a run that goes
    on is compared by. (A model of the hub has its name alone.)"""
    settings = json.loads(json.dumps(asdict(config)))
    folders = {name: Path(value) for name, value in settings.items()
               if name != "out" and isinstance(value, str) and Path(value).is_dir()}
    weights = {name: chromium.files_digest(folder, folder.glob("*.safetensors"))
               for name, folder in folders.items()}
    return settings | {f"weights of {name}": digest for name, digest in weights.items() if digest}


def write(file: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(file)


class Run:
    """OUT.run, with the costs so far: of the starts before, too, once they were kept."""

    def __init__(self, config):
        """Raises ValueError where the folder belongs to a run with other settings, or of other models."""
        out = Path(config.out)
        self.files = out.with_name(f"{out.name}.run")
        self.files.mkdir(parents=True, exist_ok=True)
        wanted, file = made_of(config), self.files / "config.json"
        there = json.loads(file.read_text()) if file.exists() else wanted
        if there != wanted:
            other = ", ".join(sorted(key for key in {*wanted, *there} if there.get(key) != wanted.get(key)))
            raise ValueError(f"{file}: the run there has other {other}; give another --out, or remove "
                             f"{self.files}")
        write(file, json.dumps(wanted, indent=1))
        self.kept = self.files / "costs.json"
        self.costs: Counter = Counter(json.loads(self.kept.read_text()) if self.kept.exists() else {})
        self.since, self.sampled = time.time(), lm.tokens_sampled()

    def keep(self, **more: int) -> None:
        """Add `more`, and what was sampled and how long it took since the last call, and write it down. Call
        it where the run would go on after a kill."""
        now, sampled = time.time(), lm.tokens_sampled()
        self.costs.update(more, seconds=round(now - self.since, 2), tokens_sampled=sampled - self.sampled)
        self.since, self.sampled = now, sampled
        write(self.kept, json.dumps(self.costs))

    def end(self, report: dict) -> dict:
        """Write OUT/training.json beside the model, which stands. Returns what it holds."""
        self.keep()
        report = report | {name: round(self.costs[name], 2) for name in COSTS}
        finetune.write_report(self.files.with_suffix(""), report)
        return report
