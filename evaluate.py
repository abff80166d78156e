"""What counts: success on real pages in a real browser. (How far dreams are from real pages: audit.py.)

    python evaluate.py --checkpoint runs/laptop/dream --seeds 1000200:20 --out dream.jsonl
        20 tries of each task, a line each when it ends; the same command goes on
    python evaluate.py --table sft.jsonl dream.jsonl
        such files side by side, and the last minus the first
    python evaluate.py --agent-url http://127.0.0.1:8000/v1#NAME --out other.jsonl
        the same of any model that a server talks for (chat/completions)
    python evaluate.py --on.benchmark infinity --on.sites DIR --checkpoint runs/laptop/dream --out tries.jsonl
        other people's benchmarks (envs/)

Nothing here is measured inside a dream (NOTES 5.5): success is the raw reward of the page. Intervals are
95 %, by one bootstrap over tries. Seeds: choose on dev (from 1,000,000), report on eval (from 2,000,000);
data.SEEDS names the ranges. What is not the agent's doing, a browser that died or a grader without a verdict,
is tried twice, then `failed`, and in no share.
"""

import contextlib
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tqdm import tqdm

import config as settings
import data
import distributed
import envs
import gpt_oss
import inference
import lm
from config import UserError
from policy import Rollout, Sampler


@dataclass(frozen=True)
class Agent:
    """Who acts. A length of 0 is that of the run beside the checkpoint (OUT.run/config.json), else the
    laptop's."""

    checkpoint: str = ""
    """Folder of the agent."""
    agent_url: str = ""
    """Or any chat server that talks for it: http://host:port/v1#NAME. OPENAI_API_KEY is sent along."""
    sampler: str = "transformers"
    """Who samples for the checkpoint: `transformers`, or `vllm` in this process."""
    engine: settings.Engine = field(default_factory=settings.Engine)
    """Settings of vLLM."""
    max_new_tokens: int = 0
    """Longest answer, in tokens."""
    context: int = 0
    """Longest prompt with its answer, in tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy, as in all reported success rates."""


@dataclass(frozen=True)
class Evaluate(Agent):
    """Success on real pages."""

    out: str = ""
    """File of the tries (JSONL), a line each when it ends."""
    seeds: str = "1000200:10"
    """START:COUNT: COUNT tries of each task. Of other benchmarks than MiniWoB++ each task is tried once."""
    tasks: tuple[str, ...] = ()
    """Tasks, names with * and ?; or a word: `laptop` (by default), `scored` or `all` of MiniWoB++ (envs/). Of
    another benchmark all by default."""
    horizon: int = 0
    """Most steps; 0: the benchmark's own (data.HORIZONS), or 14."""
    on: Annotated[settings.Benchmark, tyro.conf.arg(name="")] = field(default_factory=settings.Benchmark)
    """Whose pages."""
    limit: int = 0
    """How many of the benchmark's tasks are tried, spread over its list; 0: all."""
    pages: int = 8
    """Tries side by side."""
    keep_pages: bool = False
    """Write each page, thought and error of a try as well."""
    table: tuple[str, ...] = ()
    """Print these files side by side and stop."""


A = TypeVar("A", bound=Agent)


def with_lengths(agent: A) -> A:
    file = Path(f"{agent.checkpoint.rstrip('/')}.run", "config.json")
    run = json.loads(file.read_text()) if file.exists() else asdict(settings.TRAIN["laptop"])
    run |= {"max_new_tokens": 4096} if agent.agent_url else {}  # others think at length
    return replace(agent, max_new_tokens=agent.max_new_tokens or run["max_new_tokens"],
                   context=agent.context or run["context"])


@contextlib.contextmanager
def sampler_of(agent: Agent) -> Iterator[Sampler]:
    """The agent, ready to act. `agent` has its lengths."""
    if agent.agent_url:
        yield inference.Chat(agent.agent_url)  # type: ignore[misc]  # its prompts are messages
    elif not agent.checkpoint:
        raise UserError("which agent? give --checkpoint FOLDER, such as runs/laptop/sft; or --agent-url URL")
    elif agent.sampler == "vllm":
        engine = inference.Engine(agent.checkpoint, agent.context, config=agent.engine)
        with contextlib.closing(engine):
            yield lm.Batched(engine)
    else:
        yield frozen(agent.checkpoint, agent.context)


def frozen(folder: str, context: int) -> lm.Batched:
    """A model of this process that only samples."""
    model = lm.freeze(lm.load(folder, context, made_by="make"))
    model.template = gpt_oss.template(model.tokenizer)
    return lm.Batched(model)


# ---- tries -------------------------------------------------------------------------------------------------


def as_row(done: Rollout, pages: bool = False) -> dict:
    """A try as data."""
    stopped = bool(done.steps) and done.steps[-1].action.name == "stop"
    end = ("failed" if envs.failed(done) else "no action" if done.no_action else "too long" if done.discarded
           else "steps ran out" if done.truncated else "stop" if stopped else "the page")
    row = {"task": done.start.task, "seed": done.start.seed, "reward": done.reward, "end": end,
           "failed": done.discarded if envs.failed(done) else "",
           "actions": [str(step.action) for step in done.steps],
           "tokens": sum(len(turn.completion_ids) for turn in done.turns)}
    if envs.failed(done) and done.verdict:
        row["unjudged"] = done.verdict
    if pages:
        row |= {"goal": done.start.goal, "pages": [step.page for step in done.steps] + [done.final_page],
                "thoughts": [step.thought for step in done.steps],
                "errors": [step.error for step in done.steps]}
    return row


def read(file: str | Path, made: dict | None = None) -> list[dict]:
    """The tries of a file; a last line that a kill cut off does not count. `made`: how tries are made now;
    UserError where those of the file were made in another way."""
    lines = Path(file).read_text().splitlines(keepends=True) if Path(file).exists() else []
    try:
        rows = [json.loads(line) for line in lines if line.endswith("}\n")]
        then: Any = rows[0]["made"] if rows else made
        assert all({"task", "seed", "reward", "failed"} <= row.keys() for row in rows[1:])
    except (ValueError, LookupError, TypeError, AssertionError) as error:
        raise UserError(f"{file} holds no tries of evaluate.py ({error!r}); give another file") from error
    if made and then != made:
        other = next(name for name in made if then.get(name) != made[name])
        raise UserError(f"{file}: its tries were made with {other} {then.get(other)!r}, and now it would be "
                        f"{made[other]!r}; give another --out, or move that file away")
    return rows[1:]


def evaluate(config: Evaluate) -> list[dict]:
    """The agent's tries, in the order of tasks and seeds. Those that stand in config.out are not made again,
    but for what failed."""
    config = with_lengths(config)
    made = json.loads(json.dumps(asdict(config)))
    for name in ("table", "out", "pages", "sampler", "engine"):
        del made[name]
    file = Path(config.out or "/dev/null")
    before = read(file, made)
    file.parent.mkdir(parents=True, exist_ok=True)
    horizon = config.horizon or data.HORIZONS.get(config.on.benchmark, 14)
    with sampler_of(config) as agent, envs.open(config.on, config.pages) as pages:
        before = pages.judged(before)
        there = {(row["task"], row["seed"]): row for row in before if not row["failed"] or "unjudged" in row}
        starts = pages.starts(config.tasks, data.seeds_to_look_at(config.seeds), config.limit)
        left = [start for start in starts if (start.task, start.seed) not in there]
        rows = [{"made": made}, *there.values()]
        if config.out:  # a line that was cut off goes, and what failed
            file.with_suffix(".tmp").write_text("".join(json.dumps(row) + "\n" for row in rows))
            file.with_suffix(".tmp").rename(file)
        done = len(starts) - len(left)
        with file.open("a") as lines, tqdm(total=len(starts), initial=done, desc="evaluating", unit="try",
                                           dynamic_ncols=True) as bar:
            def ended(done: Rollout) -> None:
                row = there[done.start.task, done.start.seed] = as_row(done, config.keep_pages)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                bar.update()

            pages.play(agent, left, horizon, config.max_new_tokens, config.temperature, ended)
    return [there[start.task, start.seed] for start in starts]


# ---- what they add up to -----------------------------------------------------------------------------------


def bootstrap(groups: Sequence[Sequence[float]], draws: int = 2000,
              seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high) of the mean of all values: 95 %, by resampling inside each group (a task, a seed)."""
    rng, values = random.Random(seed), [value for group in groups for value in group]
    if not values:
        return float("nan"), float("nan"), float("nan")
    means = sorted(sum(sum(rng.choices(group, k=len(group))) for group in groups if group) / len(values)
                   for _ in range(draws))
    return sum(values) / len(values), means[int(0.025 * draws)], means[int(0.975 * draws)]


def by_task(rows: Sequence[dict]) -> dict[str, list[float]]:
    found = defaultdict(list)
    for row in rows:
        if not row["failed"] and row["reward"] is not None:
            found[row["task"]].append(row["reward"])
    return found


def table(files: Sequence[str]) -> str:
    """Success per task, a column a file; below, the last minus the first, on the tries that both hold."""
    results = [read(file) for file in files]
    columns = [by_task(rows) for rows in results]
    tasks = list(dict.fromkeys(task for column in columns for task in column))
    cell = lambda groups: "{:.3f} [{:.2f}, {:.2f}] n={}".format(*bootstrap(groups), sum(map(len, groups)))
    lines = ["".ljust(26) + "".join(Path(file).stem.rjust(30) for file in files)]
    for task in tasks:
        lines.append(task.ljust(26) + "".join(cell([column.get(task, [])]).rjust(30) for column in columns))
    lines.append("all".ljust(26) + "".join(cell([*column.values()]).rjust(30) for column in columns))
    for rows, file in zip(results, files):
        ends = Counter(row["end"] for row in rows)
        lines.append(f"{Path(file).stem}: " + ", ".join(f"{end} {n}" for end, n in ends.most_common()))
    if len(files) > 1:
        first, last = ({(row["task"], row["seed"]): row["reward"] for row in rows if not row["failed"]}
                       for rows in (results[0], results[-1]))
        pairs = defaultdict(list)
        for key in first.keys() & last.keys():
            pairs[key[0]].append(last[key] - first[key])
        mean, low, high = (100 * value for value in bootstrap([pairs[task] for task in sorted(pairs)]))
        lines.append(f"the last minus the first: {mean:+.1f} points [{low:+.1f}, {high:+.1f}] on "
                     f"{sum(map(len, pairs.values()))} common tries")
    return "\n".join(lines)


def main() -> None:
    config = tyro.cli(Evaluate, description=__doc__)

    def work() -> None:
        rows = [] if config.table else evaluate(config)
        if rows and all(row["failed"] for row in rows):
            raise UserError(f"all {len(rows)} tries failed, so nothing was measured; the first: "
                            f"{rows[0]['failed']}")
        print(table(config.table or [config.out]))

    if not (config.table or config.out):
        sys.exit("evaluate.py: give --out FILE for the tries, or --table FILES")
    distributed.command(work)


if __name__ == "__main__":
    main()
