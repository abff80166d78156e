"""How far the dreams are from reality: dreams done for real, the judge and the world model audited.

    python audit.py --replay --checkpoint runs/tiny/dream --judge-checkpoint runs/tiny/sft
        dreams, done for real: was the judge right, were the pages?
    python audit.py --judge --checkpoint runs/tiny/sft --temperature 1 --seeds 1000000:30
        the judge on real trajectories
    python audit.py --fidelity FILE
        the world model on recorded transitions
    python audit.py --show
        one dream, step by step: print it (--task, --seed)
    python audit.py --delta BEFORE.txt AFTER.txt
        what changed between two pages, as the world model would say it

The audits learn nothing, so they alone read recordings of any seed (data.read_for_audit). Whatever learns
reads through data.read_trajectories, which refuses all but training seeds.
"""

import contextlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

import a11y
import data
import dream
import evaluate
import lm
import measure
import recipe
import remote
from evaluate import in_context, loaded
from judge import Judge
from node import dreams, gptoss
from policy import Sampler, TokenTrajectory
from tiny import cpu, lessons
from world_model import WorldModel
from worlds.miniwob import Browser


@dataclass(frozen=True)
class Config(evaluate.Config):
    """The audits. A length of 0 is the run's (`run`), and without a run the laptop's."""
    replay: bool = False
    """Dream from recorded starts and replay the dreams in the real browser."""
    judge: bool = False
    """Audit the judge on the agent's own trajectories."""
    fidelity: str = ""
    """Audit the world model on this file of recorded transitions."""
    world_model: str = "runs/tiny/world_model"
    """Folder of the world model."""
    world_model_urls: tuple[str, ...] = ()
    """URLs of vLLM servers of the world model, as in train.py."""
    judge_checkpoint: str = ""
    """Folder of the judge; when empty, the agent judges itself."""
    judge_urls: tuple[str, ...] = ()
    """URLs of vLLM servers of the judge."""
    judge_tokens: int = 0
    """Longest verdict, in tokens (laptop: 160)."""
    world_model_tokens: int = 0
    """Longest prediction, in tokens (laptop: 160)."""
    world_model_temperature: float = 0.5
    """Sampling temperature of the world model in dreams to replay."""
    world_model_context: int = 0
    """Longest prompt with its answer of the world model, in tokens (without a run: as `context`)."""
    judge_context: int = 0
    """The same of the judge, in tokens."""
    trajectories: str = "tiny/trajectories.jsonl.gz"
    """File of recorded trajectories whose first pages dreams start from."""
    dreams: int = 320
    """How many dreams to replay."""
    show: bool = False
    """Print one dream, step by step, and stop."""
    delta: tuple[Path, Path] | None = None
    """Print the delta between the pages in these two files, and stop."""
    task: str = ""
    """Task of the dream to show; any when empty."""
    seed: int = 0
    """Seed that chooses the start, and the dream of it, to show."""

    def __post_init__(self):
        super().__post_init__()
        if sum(map(bool, (self.replay, self.judge, self.fidelity, self.show, self.delta))) != 1:
            raise ValueError("what to audit? give one of --replay, --judge, --fidelity FILE, --show and "
                             "--delta FILE FILE")
        if self.agent_url and (self.judge or self.replay) and not self.judge_checkpoint:
            raise ValueError("an agent behind a URL gives no log-probs, and cannot judge: give "
                             "--judge-checkpoint FOLDER")
        if self.on.benchmark:
            raise ValueError("audits know MiniWoB++ alone: leave --benchmark out")


def run(config: Config) -> dict:
    """The result that the flags ask for, and the settings that it was measured with."""
    config, measured = evaluate.prepared(config)
    one_engine(config)
    if config.fidelity:
        with world_model(config, temperature=0.0) as model:
            return measure.fidelity(model, data.read_for_audit(config.fidelity)) | measured
    starts = measure.real_starts(config.tasks, data.parse_seeds(config.seeds))
    own = not config.judge_checkpoint  # the agent judges, in the same engine
    with evaluate.agent(config, config.judge_context if own else 0) as model, Browser() as web:
        if config.replay:
            return measure.replay(web, dream_for_replay(model, config)) | measured
        with judge_of(config, model) as judge:
            return measure.judge_own(web, model, judge, starts, config.horizon, config.max_new_tokens,
                                     config.temperature) | measured


def one_engine(config: Config) -> None:
    """Raise ValueError where vLLM would have to hold several models in this process: they would share a
    process group, which each engine destroys when it is closed, and nobody has tried that on a GPU."""
    here = ["the agent"] if not config.agent_url and not config.fidelity else []
    if (config.replay or config.fidelity) and not config.world_model_urls:
        here.append("the world model (--world-model-urls)")
    if not config.fidelity and config.judge_checkpoint and not config.judge_urls:
        here.append("the judge (--judge-urls)")
    if config.sampler == "vllm" and len(here) > 1:
        raise ValueError(f"vLLM takes one model in this process, not {len(here)}: {', '.join(here)}. Start "
                         "servers of the others (vllm serve FOLDER), and give their URLs")


@contextlib.contextmanager
def judge_of(config: Config, model: Sampler) -> Iterator[Judge]:
    """The judge: the agent's own weights, unless others are given."""
    if not config.judge_checkpoint:
        yield Judge(in_context(model, config.judge_context), config.judge_tokens)
        return
    with loaded(config, config.judge_checkpoint, config.judge_context, urls=config.judge_urls) as other:
        yield Judge(other, config.judge_tokens)


@contextlib.contextmanager
def world_model(config: Config, temperature: float) -> Iterator[WorldModel]:
    with loaded(config, config.world_model, config.world_model_context, "python sft.py world_model tiny",
                config.world_model_urls) as model:
        yield WorldModel(model, config.world_model_tokens, temperature)


def dream_for_replay(model: Sampler, config: Config) -> list[TokenTrajectory]:
    """config.dreams dreams from recorded first pages, without experts. Of any seeds: nothing learns here."""
    starts = recipe.first_pages(data.read_for_audit(config.trajectories))
    starts = [start for start in starts if start.task in config.tasks]
    rows = [(start, None) for start in random.Random(0).sample(starts, min(config.dreams, len(starts)))]
    how = dream.Config(horizon=5, max_new_tokens=config.max_new_tokens)
    dreamed = []
    with (world_model(config, config.world_model_temperature) as imagination,
          judge_of(config, model) as judge):
        models = dream.Models(model, imagination, judge, dreams.Dream)
        for k in tqdm(range(0, len(rows), 64), desc="dreaming", leave=False):
            some = rows[k : k + 64]
            dreamed += dream.dream(models, some, how, lm.row_seeds(k, len(some)))
    return dreamed


def shown(config: Config) -> str:
    """One dream of the laptop's models as text. The judge is the agent before it dreamed."""
    how = lessons.TRAIN
    recorded = data.read_trajectories(config.trajectories)
    starts = [start for start in recipe.first_pages(recorded) if config.task in ("", start.task)]
    if not starts:
        tasks = ", ".join(sorted({t.task for t in recorded}))
        raise ValueError(f"{config.trajectories} has no task {config.task!r}; it has {tasks}")
    agent = cpu.load(config.checkpoint or how.out, "make", how.context)
    frozen = cpu.load(config.judge_checkpoint or how.policy, "make", how.judge_context)
    world = cpu.load(config.world_model, "make", how.world_model_context)
    for other in (frozen, world):
        other.template = gptoss.template(other.tokenizer)
    dreaming = how.dreaming
    models = dream.Models(agent, WorldModel(world, dreaming.world_model_tokens,
                                            dreaming.world_model_temperature),
                          Judge(frozen, dreaming.judge_tokens))
    start = random.Random(config.seed).choice(starts)
    return measure.as_text(dream.dream(models, [(start, None)], dreaming, [config.seed])[0])


def main():
    try:
        config = tyro.cli(Config, description=__doc__)
        if config.show:
            print(shown(config))
            return
        if config.delta:
            before, after = (file.read_text().rstrip("\n") for file in config.delta)
            print(a11y.diff(before, a11y.align(before, after)))
            return
        result = run(config)
    except (ValueError, OSError, remote.EngineError) as error:
        sys.exit(f"audit.py: {error}")
    if config.json:
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(json.dumps(result, indent=1))
    long = ("misses", "wrong", "margins")
    print(json.dumps({key: value for key, value in result.items() if key not in long}, indent=1))


if __name__ == "__main__":
    main()
