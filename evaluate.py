"""What counts: success on real pages in a real browser. (How far dreams are from real pages: audit.py.)

    python evaluate.py --checkpoint runs/laptop/dream --seeds 1000200:20 --json FILE
        20 trajectories of each task on real pages
    python evaluate.py --checkpoint runs/paper/dream --sampler vllm
        the same of a larger agent; its lengths are those of its run (runs/paper/dream.run/config.json)
    python evaluate.py --agent-url http://127.0.0.1:8000/v1 --agent-model NAME
        the same of any model that a server talks for (chat/completions)
    python evaluate.py --benchmark infinity --sites DIR --checkpoint runs/laptop/dream --json tries.jsonl
        tries at other people's benchmarks (worlds/tries.py), a line each; the same command goes on
    python evaluate.py --table runs/laptop/sft.json runs/laptop/dream.json
        two such files, side by side

Nothing here is measured inside a dream (NOTES 5.5): success is the raw reward of the page. Intervals are
Wilson's 95 %. Seeds: tune on dev (from 1,000,000), report on eval (from 2,000,000); data.SEEDS names the
ranges.
"""

import contextlib
import copy
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar, cast

import tyro

import data
import dream
import gpt_oss
import lm
import measure
import recipe
import remote
from node import engine
from policy import Sampler
from worlds import benchmarks, tries
from worlds.miniwob import LAPTOP, Browser, tasks_of

# The laptop's lengths, for those that neither a flag nor a run gives. 0: the same as `context`.
LENGTHS = {"context": 1024, "world_model_context": 0, "judge_context": 0, "max_new_tokens": 48,
           "world_model_tokens": 128, "judge_tokens": 0}


@dataclass(frozen=True)
class Config:
    """Success on real pages. A length of 0 is the run's (`run`), and without a run the laptop's."""

    checkpoint: str = ""
    """Folder of the agent."""
    agent_url: str = ""
    """URL of an OpenAI-compatible server (http://host:port/v1) that talks for the agent, in place of a
    checkpoint. It is asked by chat/completions, not through a proxy. OPENAI_API_KEY is sent along where it is
    set."""
    agent_model: str = ""
    """The name that this server gives its model."""
    sampler: str = "transformers"
    """Who samples for the checkpoint: `transformers`, or `vllm` in this process."""
    engine: recipe.EngineConfig = field(default_factory=recipe.EngineConfig)
    """Settings of vLLM."""
    run: str = ""
    """Folder OUT.run of train.py, whose lengths are taken. By default it is the one beside --checkpoint
    OUT."""
    seeds: str = "1000200:10"
    """START:COUNT: COUNT trajectories of each task. Other benchmarks than miniwob have no seeds."""
    json: str = ""
    """File to write the result to; with a benchmark, each try when it ends."""
    tasks: tuple[str, ...] = LAPTOP
    """MiniWoB++ tasks (the laptop's by default), or one word: `all` its pages, those that are `scored`, those
    of `transfer` (worlds/miniwob.py). With a benchmark: names with * and ?, such as 'gmail/*'; all tasks by
    default. `published` names the ten applications of infinity that published figures are of."""
    horizon: int = 0
    """Most steps of a trajectory; 0: the benchmark's own (data.HORIZONS), or 14, as the laptop's recipe."""
    on: Annotated[data.Options, tyro.conf.arg(name="")] = field(default_factory=data.Options)
    """Settings of other people's benchmarks."""
    limit: int = 0
    """How many tasks of the benchmark are tried, from its whole list; 0 tries all."""
    pages: int = 8
    """How many tries of a benchmark are made side by side."""
    try_seconds: float = 1800.0
    """Most seconds of a try at a benchmark."""
    keep_pages: bool = False
    """Keep each page, thought and error of a benchmark's tries."""
    max_new_tokens: int = 0
    """Longest answer of the agent, in tokens (laptop: 48; behind a URL: 4,096)."""
    temperature: float = 0.0
    """Sampling temperature of the agent, on real pages and (audit.py) in dreams; 0 is greedy, as in all
    reported success rates."""
    table: tuple[str, ...] = ()
    """Print these result files side by side and stop."""
    context: int = 0
    """Longest prompt with its answer of the agent, in tokens (laptop: 1,024)."""

    def __post_init__(self):
        if self.sampler not in ("transformers", "vllm"):
            raise ValueError(f"sampler is transformers or vllm, not {self.sampler!r}")
        if bool(self.agent_url) != bool(self.agent_model):
            raise ValueError("an agent behind a URL needs both: give --agent-url http://host:port/v1 and "
                             "--agent-model NAME")
        if self.agent_url and self.checkpoint:
            raise ValueError(f"which agent? --agent-url {self.agent_url} or --checkpoint {self.checkpoint}")
        if self.on.benchmark and not self.json:
            raise ValueError("--benchmark writes each try when it ends: give --json FILE for them")
        if self.on.benchmark not in ("", "miniwob") and self.seeds != type(self).seeds:
            raise ValueError(f"--seeds {self.seeds}: a seed changes nothing in {self.on.benchmark}, whose "
                             "tasks are tried once each; leave --seeds out")
        data.check_counts(1, pages=self.pages)
        data.check_counts(0, limit=self.limit, horizon=self.horizon)


@dataclass(frozen=True)
class WithDreams(Config):
    """The same, and the models that dream: of audit.py and rivals/lookahead.py."""

    world_model: str = "runs/laptop/world_model"
    """Folder of the world model; for audit.py also the URL of one (http://host:port/v1#NAME), as in
    train.py."""
    world_model_urls: tuple[str, ...] = ()
    """URLs of vLLM servers of the world model, as in train.py."""
    world_model_tokens: int = 0
    """Longest prediction, in tokens (laptop: 128)."""
    world_model_temperature: float = 0.5
    """Sampling temperature of the world model in dreams."""
    world_model_context: int = 0
    """Longest prompt with its answer of the world model, in tokens (without a run: as `context`)."""
    judge_checkpoint: str = ""
    """Folder of the judge; when empty, the agent judges itself."""
    judge_urls: tuple[str, ...] = ()
    """URLs of vLLM servers of the judge."""
    judge_tokens: int = 0
    """Longest verdict, in tokens (laptop: 0, a reward model's)."""
    judge_context: int = 0
    """The same of the judge, in tokens."""


C = TypeVar("C", bound=Config)


def with_lengths(config: C) -> C:
    """`config` with every length: its flag's, else the run's, else the laptop's. Raises ValueError where
    --run is not the folder of a run."""
    run, found = config.run or f"{config.checkpoint.rstrip('/')}.run", dict(LENGTHS)
    file = Path(run, "config.json")
    if config.agent_url:
        found["max_new_tokens"] = dream.Config().max_new_tokens  # others think at length
    try:
        saved = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); give the lengths as flags") from error
    if config.run and "dreaming" not in saved:
        raise ValueError(f"{file} is not a run's: --run takes the folder OUT.run that train.py makes beside "
                         "OUT")
    if "dreaming" in saved:
        found |= {name: length for name, length in (saved | saved["dreaming"]).items() if name in LENGTHS}
    found |= {name: getattr(config, name) for name in LENGTHS if getattr(config, name, 0)}
    for name in ("world_model_context", "judge_context"):
        found[name] = found[name] or found["context"]
    lengths: dict = {name: length for name, length in found.items() if hasattr(config, name)}
    return replace(config, run=run if "dreaming" in saved else "", **lengths)


def prepared(config: C) -> tuple[C, dict]:
    """(`config` with its lengths, its horizon and its tasks; what is measured, for the result)."""
    config = replace(with_lengths(config), horizon=config.horizon or data.HORIZONS.get(
        config.on.benchmark, 14))
    if not config.on.benchmark:
        config = replace(config, tasks=tuple(dict.fromkeys(tasks_of(config.tasks))))  # each counts once
    what = ("checkpoint", "agent_url", "agent_model", "sampler", "run", "seeds", "temperature")
    measured = {name: getattr(config, name) for name in what}
    measured["lengths"] = {name: getattr(config, name) for name in LENGTHS if hasattr(config, name)}
    return config, measured


def run(config: Config) -> dict:
    """The result that the flags ask for, and the settings that it was measured with."""
    config, measured = prepared(config)
    if config.on.benchmark:
        return on_benchmark(config, measured)
    starts = measure.real_starts(config.tasks, data.seeds_to_look_at(config.seeds))
    with agent(config) as model, Browser() as web:
        sampled = lm.tokens_sampled()
        played = measure.play(web, model, starts, config.horizon, config.max_new_tokens, config.temperature)
        if played and all(trajectory.failed for trajectory in played):
            raise ValueError(f"all {len(played)} tries failed with their pages, so nothing was measured; the "
                             f"first: {played[0].dropped}")
        refused = {"refused": len(model.refused)} if isinstance(model, remote.Chat) else dict[str, int]()
        cost = {"tokens_sampled": lm.tokens_sampled() - sampled}
        return measure.success(played) | refused | measured | cost


def on_benchmark(config: Config, measured: dict) -> dict:
    """The totals of the agent's tries at a benchmark."""
    web, miniwob = benchmarks.world(config.on, remote.grader(config.on)), config.on.benchmark == "miniwob"
    globs = () if config.tasks == LAPTOP else config.tasks
    tasks = benchmarks.chosen(list(web.tasks()), globs, config.limit, getattr(web, "named", None))
    seeds = config.seeds if miniwob else ""
    made = measured | asdict(config.on) | {"horizon": config.horizon, "seeds": seeds,
                                           "try_seconds": config.try_seconds}
    for name in ("checkpoint", "run", "sites", "task_file"):  # DIR/ is DIR
        made[name] = made[name] and os.path.normpath(made[name])
    made |= tries.made_of(web, config.checkpoint)
    made = json.loads(json.dumps(made))  # as the file will give it back
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "playwright")}
    of_each = data.seeds_to_look_at(config.seeds) if miniwob else [0]
    pairs = [(task, seed) for task in tasks for seed in of_each]
    with agent(config) as model, web:
        rows = tries.tries(
            web, model, pairs, Path(config.json), made, horizon=config.horizon,
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, pages=config.pages,
            seconds=config.try_seconds, keep_pages=config.keep_pages)
    versions["Python"] = platform.python_version()
    found = tries.totals(rows, getattr(web, "untouched", ()))
    if not miniwob:  # whose seeds are split
        found["per_side"] = {side: {key: value for key, value in tries.totals(some).items() if key in (
            "success", "success of all", "n", "failed", "interval", "as its authors score it")}
            for side in (data.TRAINING, data.HELD_OUT)
            if (some := [row for row in rows if data.side(row["task"]) == side])}
    return found | made | {"versions": versions}


@contextlib.contextmanager
def loaded(config: Config, folder: str, context: int, made_by: str = "",
           urls: Sequence[str] = ()) -> Iterator[Sampler]:
    """A model that samples: on the servers at `urls`, or in this process by config.sampler."""
    if urls:
        yield remote.Remote(urls, folder, template=gpt_oss.template(lm.load_tokenizer(folder)))
    elif config.sampler == "vllm":
        lm.check_folder(folder, made_by)
        with contextlib.closing(engine.Engine(folder, context, config=config.engine)) as started:
            yield started
    else:
        model = lm.freeze(lm.load(folder, context, made_by=made_by))
        model.template = gpt_oss.template(model.tokenizer)
        yield model


@contextlib.contextmanager
def agent(config: Config, longest: int = 0) -> Iterator[Sampler]:
    """The agent that is measured. `config` has its lengths (with_lengths). `longest`: the context of its
    engine, where that serves another model's prompts too."""
    if config.agent_url:
        # Its prompts are messages and no token ids, which nobody notices who only measures.
        yield cast(Sampler, remote.Chat(config.agent_url, config.agent_model))
        return
    if not config.checkpoint:
        raise ValueError("which agent? give --checkpoint FOLDER, such as runs/laptop/sft; or --agent-url and "
                         "--agent-model")
    with loaded(config, config.checkpoint, max(config.context, longest),
                "make") as model:
        yield in_context(model, config.context)


def in_context(model: Sampler, context: int) -> Sampler:
    """The same model, for prompts with answers of at most `context` tokens."""
    model = copy.copy(model)
    model.context = context
    return model


def command(program: str, kind: type[C], description: str | None, work: Callable[[C], dict | str],
            show: Callable[[dict], str]) -> None:
    """The body of a command: print what `work` makes of its flags; of a dict, which --json keeps, what `show`
    says of it. An error that the user can mend is a line, and no traceback."""
    try:
        config = tyro.cli(kind, description=description)
        result = work(config)
    except (ValueError, OSError, remote.EngineError) as error:
        if not recipe.foreseen(error):
            traceback.print_exc()
        sys.exit(f"{program}: {error}")
    lost = ""  # hours of tries: where they cannot be written, their success is printed all the same
    if isinstance(result, dict) and config.json and not config.on.benchmark:  # there it holds the tries
        try:
            file = Path(config.json)
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{file.name}.tmp")  # the last result stays until this one is whole
            temporary.write_text(json.dumps(result, indent=1))
            os.replace(temporary, file)
        except OSError as error:
            lost = f"{program}: --json cannot be written ({error})"
    print(show(result) if isinstance(result, dict) else result)
    if lost:
        sys.exit(lost)


def main():
    command("evaluate.py", Config, __doc__,
            lambda config: measure.table(config.table) if config.table else run(config),
            lambda result: json.dumps({key: value for key, value in result.items() if key != "trajectories"},
                                      indent=1))


if __name__ == "__main__":
    main()
