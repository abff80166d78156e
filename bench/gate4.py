"""Does dreaming help on the real web? Three seeds of the whole pipeline, and the plain things that a lift must beat. Hours: a seed takes 16 to 20 minutes
of one core, and a baseline some 10.

    python bench/gate4.py                                     # runs/gate4/..., then the tables; goes on where it was
    python bench/gate4.py --evaluation 1000100:20 --seeds 0   # a look on dev seeds

A seed is everything after the base. Its world model learns from failed episodes and from the agent's own demonstrations, so that
cloning all real successes that anything used is what the SFT agent does. Beside each seed's agent stands
    clone       the same demonstrations cloned by a model that learns nothing of judging
and beside seed 0's:
    more        the same cloning, as many epochs more as the dreaming takes time
    experts     the same updates with the judge saying no to every dream: only expert rows are ever a success
    dreams      the same updates without any expert row
    untuned     the same updates in dreams of the base itself, which was never taught to be a world model
"""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import evaluate
import policy

BASELINES = {
    "dreams": ["--dreaming.expert-fraction", "0"],
    "experts": ["--dreaming.judge-threshold", "1e9", "--dreaming.demonstrated", "1"],
    "untuned": ["--world-model", "tiny/base"],
}


@dataclass(frozen=True)
class Config:
    out: str = "runs/gate4"
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluation: str = "2000042:42"
    """START:COUNT, episodes of each of the 12 tasks."""
    demonstrations: tuple[int, ...] = (10, 30)
    """Other numbers of demonstrations a task, with seed 0."""
    epochs: float = 4.0
    """Of "more"; set it to what the dreaming takes."""
    baselines: bool = True
    jobs: int = 2
    """One thread each."""


def chain(config: Config, name: str, seed: int, count: int = policy.TINY.demonstrations) -> list[tuple[Path, list[str]]]:
    """(what it makes, command) from the base to the evaluations."""
    out = Path(config.out) / name
    copies = min(policy.TINY.renamed, 30 // count - 1)  # of each demonstration: they are made because there are few, and of thirty none is needed
    cloned, dreams = ["--demonstrations", str(count)], ["--policy", f"{out}/sft", "--world-model", f"{out}/world_model"]
    return [(out / "world_model/training.json", ["world_model.py", "tiny", "--out", f"{out}/world_model", "--sft.seed", str(seed), *cloned]),
            (out / "sft/training.json", ["policy.py", "tiny", "--out", f"{out}/sft", "--seed", str(seed), "--sft.seed", str(seed), *cloned, "--renamed", str(copies)]),
            (out / "dream/config.json", ["train.py", "tiny", *dreams, "--out", f"{out}/dream", "--seed", str(seed), *cloned]),
            score(config, f"{name}/sft"), score(config, f"{name}/dream")]


def score(config: Config, name: str) -> tuple[Path, list[str]]:
    file = Path(config.out) / f"{name}.json"
    return file, ["evaluate.py", "--checkpoint", f"{config.out}/{name}", "--seeds", config.evaluation, "--json", str(file)]


def baselines(config: Config) -> list[list[tuple[Path, list[str]]]]:
    """The clones, then the chains that need seed 0's agent and world model."""
    out, chains = Path(config.out) / "0", []
    for seed in map(str, config.seeds):
        clone = f"{config.out}/{seed}/clone"
        chains.append([(Path(clone) / "training.json", ["policy.py", "tiny", "--seed", seed, "--sft.seed", seed, "--judged", "-1", "--out", clone]), score(config, f"{seed}/clone")])
    cloning = ["policy.py", "tiny", "--seed", "0", "--sft.seed", "0"]
    for name, flags in BASELINES.items():
        given = ["--policy", f"{out}/sft", "--world-model", f"{out}/world_model", "--seed", "0"]
        chains.append([(out / name / "config.json", ["train.py", "tiny", *given, "--out", f"{out}/{name}", *flags]), score(config, f"0/{name}")])
    chains.append([(out / "more/training.json", [*cloning, "--out", f"{out}/more", "--sft.epochs", str(config.epochs)]), score(config, "0/more")])
    return chains


def work(chains: list[list[tuple[Path, list[str]]]], jobs: int, log: Path) -> None:
    """The chains, `jobs` at a time; what stands there is not made again. Raises RuntimeError with the command that failed."""
    failed, lock = [], threading.Lock()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    def one() -> None:
        while not failed:
            with lock:
                if not chains:
                    return
                steps = chains.pop(0)
            for made, command in steps:
                if made.exists():
                    continue
                with lock:
                    print("python", *command, flush=True)
                with open(log, "a") as output:
                    if subprocess.run([sys.executable, *command, "--threads", "1"], cwd=HERE, env=environment, stdout=output, stderr=output).returncode:
                        failed.append(command)
                        return

    workers = [threading.Thread(target=one) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise RuntimeError(f"python {' '.join(failed[0])} failed; why: the end of {log}. The same command goes on from there")


def main():
    config = tyro.cli(Config, description=__doc__)
    if config.baselines and 0 not in config.seeds:
        sys.exit("gate4.py: the baselines stand beside seed 0's agent: give --seeds with 0 in it, or --no-baselines")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work([chain(config, str(seed), seed) for seed in config.seeds] + [chain(config, f"of{count}", 0, count) for count in config.demonstrations], config.jobs, out / "log.txt")
    if config.baselines:
        work(baselines(config), config.jobs, out / "log.txt")
    for name in [*map(str, config.seeds), *(f"of{count}" for count in config.demonstrations)]:
        print(f"\n{name}\n" + evaluate.table([f"{out}/{name}/sft.json", f"{out}/{name}/dream.json"]))
    if config.baselines:
        for seed in config.seeds:
            print(f"\n{seed}: dreamer minus clone\n" + evaluate.table([f"{out}/{seed}/clone.json", f"{out}/{seed}/dream.json"]).splitlines()[-1])
        for name in ("more", *BASELINES):
            print(f"\n{name}\n" + evaluate.table([f"{out}/0/{name}.json", f"{out}/0/dream.json"]).splitlines()[-1])
            print(evaluate.table([f"{out}/0/sft.json", f"{out}/0/{name}.json"]).splitlines()[-1])


if __name__ == "__main__":
    main()
