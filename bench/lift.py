"""Does dreaming help on the real web? Three seeds of the whole pipeline, and the plain methods that a lift
has to beat.

    python bench/lift.py                                     # writes runs/lift/, then prints the tables
    python bench/lift.py --evaluation 1000100:20 --seeds 0   # a look on dev seeds

It takes hours: 16 to 20 minutes of one core for a seed, some 10 for a baseline. Killed, the same command goes
on where it was.

A seed is everything after the base. The world model learns from failures and from the agent's own
demonstrations. So these demonstrations are all the real successes that anything learns from, and the SFT
agent is a clone of all of them. Beside each seed's agent stands
    clone       the same demonstrations, cloned by a model that learns nothing of judging
and beside seed 0's:
    more        the same cloning, for as many more epochs as the dreaming takes time
    experts     the same updates, but the judge says no to every dream: only expert rows are ever a success
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
from tiny import lessons

BASELINES = {
    "dreams": ["--dreaming.expert-fraction", "0"],
    "experts": ["--dreaming.judge-threshold", "1e9", "--dreaming.demonstrated", "1"],
    "untuned": ["--world-model", "tiny/base"],
}

Chain = list[tuple[Path, list[str]]]  # (the file that a command makes, the command), to be run in this order


@dataclass(frozen=True)
class Config:
    out: str = "runs/lift"
    """Folder of all that is made."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each is everything after the base: demonstrations, order of training, dreams."""
    evaluation: str = "2000042:42"
    """START:COUNT, trajectories of each of the 12 tasks."""
    demonstrations: tuple[int, ...] = (10, 30)
    """Other numbers of demonstrations a task, with seed 0."""
    epochs: float = 4.0
    """Of "more"; set it to what the dreaming takes."""
    baselines: bool = True
    """Also the clones, and what stands beside seed 0's agent."""
    jobs: int = 2
    """Commands at a time, one thread each."""


def chain(config: Config, name: str, seed: int, count: int = lessons.Policy().demonstrations) -> Chain:
    """From the base to the evaluations, with `count` demonstrations a task."""
    out = Path(config.out) / name
    # Copies of each demonstration. They are made because demonstrations are few: of 2 each gets 8 copies, of
    # 10 each gets 2, and 30 need none.
    copies = min(lessons.Policy().renamed, 30 // count - 1)
    cloned = ["--demonstrations", str(count)]
    models = ["--policy", f"{out}/sft", "--world-model", f"{out}/world_model"]
    return [
        (out / "world_model/training.json",
         ["world_model.py", "tiny", "--out", f"{out}/world_model", "--sft.seed", str(seed), *cloned]),
        (out / "sft/training.json",
         ["policy.py", "tiny", "--out", f"{out}/sft", "--seed", str(seed), "--sft.seed", str(seed), *cloned,
          "--renamed", str(copies)]),
        (out / "dream/config.json",
         ["train.py", "tiny", *models, "--out", f"{out}/dream", "--seed", str(seed), *cloned]),
        score(config, f"{name}/sft"),
        score(config, f"{name}/dream"),
    ]


def score(config: Config, name: str) -> tuple[Path, list[str]]:
    """The evaluation of an agent, beside its folder."""
    file = Path(config.out) / f"{name}.json"
    return file, ["evaluate.py", "--checkpoint", f"{config.out}/{name}", "--seeds", config.evaluation,
                  "--json", str(file)]


def baselines(config: Config) -> list[Chain]:
    """The clones, then the chains that need seed 0's agent and world model."""
    out, chains = Path(config.out) / "0", []
    for seed in map(str, config.seeds):
        clone = f"{config.out}/{seed}/clone"
        command = ["policy.py", "tiny", "--seed", seed, "--sft.seed", seed, "--judged", "-1", "--out", clone]
        chains.append([(Path(clone) / "training.json", command), score(config, f"{seed}/clone")])
    for name, flags in BASELINES.items():
        command = ["train.py", "tiny", "--policy", f"{out}/sft", "--world-model", f"{out}/world_model",
                   "--seed", "0", "--out", f"{out}/{name}", *flags]
        chains.append([(out / name / "config.json", command), score(config, f"0/{name}")])
    more = ["policy.py", "tiny", "--seed", "0", "--sft.seed", "0", "--out", f"{out}/more", "--sft.epochs",
            str(config.epochs)]
    chains.append([(out / "more/training.json", more), score(config, "0/more")])
    return chains


def work(chains: list[Chain], jobs: int, log: Path) -> None:
    """Run the chains, `jobs` at a time. What stands there already is not made again.

    Raises RuntimeError with the command that failed.
    """
    failed, lock = [], threading.Lock()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    def run(command: list[str]) -> bool:
        with lock:
            print("python", *command, flush=True)
        with open(log, "a") as output:
            ended = subprocess.run([sys.executable, *command], cwd=HERE, env=environment, stdout=output,
                                   stderr=output)
        return ended.returncode == 0

    def worker() -> None:
        while not failed:
            with lock:
                if not chains:
                    return
                steps = chains.pop(0)
            for made, command in steps:
                if not made.exists() and not run(command):
                    failed.append(command)
                    return

    workers = [threading.Thread(target=worker) for _ in range(jobs)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    if failed:
        raise RuntimeError(f"python {' '.join(failed[0])} failed; why: the end of {log}. "
                           "The same command goes on from there")


def report(config: Config) -> None:
    """Print the tables, and of each comparison its last line: the difference and its interval."""
    def compare(first: str, second: str) -> str:
        return evaluate.table([f"{config.out}/{first}.json", f"{config.out}/{second}.json"])

    for name in [*map(str, config.seeds), *(f"of{count}" for count in config.demonstrations)]:
        print(f"\n{name}\n" + compare(f"{name}/sft", f"{name}/dream"))
    if config.baselines:
        for seed in config.seeds:
            difference = compare(f"{seed}/clone", f"{seed}/dream").splitlines()[-1]
            print(f"\n{seed}: dreamer minus clone\n" + difference)
        for name in ("more", *BASELINES):
            print(f"\n{name}\n" + compare(f"0/{name}", "0/dream").splitlines()[-1])
            print(compare("0/sft", f"0/{name}").splitlines()[-1])


def main():
    config = tyro.cli(Config, description=__doc__)
    if config.baselines and 0 not in config.seeds:
        sys.exit("lift.py: the baselines stand beside seed 0's agent: give --seeds with 0 in it, "
                 "or --no-baselines")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    chains = [chain(config, str(seed), seed) for seed in config.seeds]
    chains += [chain(config, f"of{count}", 0, count) for count in config.demonstrations]
    work(chains, config.jobs, out / "log.txt")
    if config.baselines:
        work(baselines(config), config.jobs, out / "log.txt")
    report(config)


if __name__ == "__main__":
    main()
