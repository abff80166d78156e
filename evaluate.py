"""What counts: success on real pages in a real browser. (How far dreams are from real pages: audit.py.)

    python evaluate.py --checkpoint runs/laptop/dream --seeds 1000200:20 --out dream.jsonl  # 20 tries a task
    python evaluate.py --table sft.jsonl dream.jsonl        # such files, and the last minus the first
    python evaluate.py --agent-url http://127.0.0.1:8000/v1#NAME --out tries.jsonl   # a chat server's model
    python evaluate.py --benchmark infinity --sites DIR --checkpoint AGENT --out tries.jsonl   # other pages

A line of the file is a try. Killed, the same command goes on. Success is the raw reward of the page. Choose
on dev seeds (from 1,000,000), report on eval seeds (from 2,000,000; data.SEEDS). What is not the agent's
doing, a browser that died or a grader without a verdict, is tried twice, then `failed`, and in no share.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tqdm import tqdm

import distributed
import envs
import inference
import lm
from config import TRAIN, Benchmark, Engine, UserError
from policy import Rollout


@dataclass(frozen=True)
class Agent:
    """Who acts, and where. A length of 0 is that of the run beside the checkpoint (OUT.run/config.json), else
    the laptop's."""
    checkpoint: str = ""  # Folder of the agent
    agent_url: str = ""  # Or any chat server: http://host:port/v1#NAME. OPENAI_API_KEY is sent along
    sampler: Literal["transformers", "vllm"] = "transformers"  # Who samples; vllm: in this process
    engine: Engine = field(default_factory=Engine)  # Settings of vLLM
    max_new_tokens: int = 0  # Longest answer, in tokens
    context: int = 0  # Longest prompt with its answer, in tokens
    temperature: float = 0.0  # Sampling temperature; 0 is greedy, as in all reported success rates
    on: Annotated[Benchmark, tyro.conf.arg(name="")] = field(default_factory=Benchmark)  # Whose pages
    tasks: tuple[str, ...] = ()  # Names with * and ?; by default all, or MiniWoB++'s `laptop` (scored, all)
    seeds: str = "1000200:10"  # START:COUNT: tries of each task of MiniWoB++. Other tasks are tried once
    horizon: int = 0  # Most steps; 0: the benchmark's own (envs.KINDS)
    pages: int = 0  # Tries side by side; 0: two a core
    out: str = ""  # File to write: of evaluate.py the tries (JSONL), a line each when it ends


@dataclass(frozen=True)
class Evaluate(Agent):
    """Success on real pages."""
    keep_pages: bool = False  # Write each page, thought and error of a try as well
    table: tuple[str, ...] = ()  # Print these files side by side and stop


def with_lengths(agent: Any) -> Any:
    file = Path(f"{agent.checkpoint.rstrip('/')}.run", "config.json")
    run = json.loads(file.read_text()) if file.exists() else asdict(TRAIN["laptop"])
    run |= {"max_new_tokens": 4096} if agent.agent_url else {}  # others think at length
    run["horizon"] = envs.kind(agent.on)[2]
    return replace(agent, **{name: run[name] for name in (
        "context", "max_new_tokens", "world_model_tokens", "world_model_context", "judge_context", "horizon")
        if getattr(agent, name, None) == 0})


def sampler_of(agent: Agent) -> Any:
    """The agent as a policy.Sampler, ready to act. `agent` has its lengths."""
    if bool(agent.checkpoint) == bool(agent.agent_url):
        raise UserError("which agent? give --checkpoint FOLDER, such as runs/laptop/sft, or --agent-url URL")
    if agent.agent_url:
        return inference.Chat(agent.agent_url)  # its prompts are messages
    if agent.sampler == "vllm":
        return lm.Batched(inference.Engine(lm.check_folder(agent.checkpoint), agent.context,
                                           config=agent.engine))
    return frozen(agent.checkpoint, agent.context)


def frozen(folder: str, context: int) -> lm.Batched:
    """A model of this process that only samples."""
    return lm.Batched(lm.freeze(lm.load(folder, context)))


# ---- tries -------------------------------------------------------------------------------------------------

def as_row(done: Rollout, pages: bool = False) -> dict:
    """A try as data."""
    failed, stopped = envs.failed(done), bool(done.steps) and done.steps[-1].action.name == "stop"
    end = ("failed" if failed else "no action" if done.no_action else "too long" if done.discarded
           else "steps ran out" if done.truncated else "stop" if stopped else "the page")
    row = {"task": done.start.task, "seed": done.start.seed, "reward": done.reward, "end": end,
           "failed": done.discarded if failed else "", "actions": [str(step.action) for step in done.steps]}
    return row | ({"goal": done.start.goal, "pages": [step.page for step in done.steps] + [done.final_page],
                   "thoughts": [step.thought for step in done.steps],
                   "errors": [step.error for step in done.steps]} if pages else {})


def read(file: str | Path, made: dict | None = None) -> list[dict]:
    """The tries of a file, without a last line that a kill cut off. UserError where not made as `made`."""
    try:
        head, *rows = map(json.loads, Path(file).read_text().split("\n")[:-1])
        then = head["made"]
        assert all({"task", "seed", "reward", "end", "failed"} <= row.keys() for row in rows)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"{file} holds no tries of evaluate.py ({error!r}); give another file") from error
    for name, now in (made or {}).items():
        if then.get(name) != now:
            raise UserError(f"{file}: its tries were made with {name} {then.get(name)!r}, not {now!r}; give "
                            "another --out, or move that file away")
    return rows


def evaluate(config: Evaluate, agent: Any = None, side: str = "") -> str:
    """Make the agent's tries; returns their file. What stands there is not made again, unless it failed."""
    if not config.out:
        raise UserError("give --out FILE for the tries, or --table FILES")
    config, file = with_lengths(config), Path(config.out)
    made = {name: value for name, value in json.loads(json.dumps(asdict(config))).items()
            if name not in ("table", "out", "pages", "sampler", "engine")}
    digest = hashlib.sha256()  # trained again, it is another agent
    for weights in sorted(Path(config.checkpoint or "-").glob("*.safetensors")):
        digest.update(hashlib.file_digest(weights.open("rb"), "sha256").digest())
    made["weights"] = digest.hexdigest()[:16]
    agent = agent or sampler_of(config)
    with envs.Envs(config.on, config.pages) as pages:
        rows = [row for row in (read(file, made) if file.exists() else []) if not row["failed"]]
        there = {(row["task"], row["seed"]) for row in rows}
        wanted = pages.starts(config.tasks, config.seeds, side)
        left = [start for start in wanted if (start.task, start.seed) not in there]
        file.parent.mkdir(parents=True, exist_ok=True)  # a line that was cut off goes, and what failed
        text = "".join(json.dumps(row) + "\n" for row in [{"made": made}, *rows])
        file.with_suffix(".tmp").write_text(text)
        file.with_suffix(".tmp").rename(file)
        bar = tqdm(total=len(wanted), initial=len(wanted) - len(left), unit="try", dynamic_ncols=True)
        with bar, file.open("a", buffering=1) as lines:
            def ended(done: Rollout) -> None:
                lines.write(json.dumps(as_row(done, config.keep_pages)) + "\n")
                bar.update()

            envs.play(pages, agent, left, config.horizon, config.max_new_tokens, config.temperature, ended)
    return config.out


# ---- what they add up to -----------------------------------------------------------------------------------

Results = dict[tuple[str, int], float]  # {(task, seed): reward, or a difference of two}: of one agent


def bootstrap(agents: Sequence[Results], draws: int = 2000) -> tuple[float, float, float, int]:
    """(mean, low, high, n): the mean and its 95 %, by resampling the agents (a method's training seeds) and,
    for each, the tries of every task."""
    rng = random.Random(0)
    tries = [[[value for _, value in task] for _, task in groupby(sorted(agent.items()), lambda k: k[0][0])]
             for agent in agents]  # [agent][task][try]
    mean = lambda parts: sum(map(sum, parts)) / max(1, sum(map(len, parts)))
    means = sorted(mean([rng.choices(task, k=len(task)) for agent in rng.choices(tries, k=len(tries))
                         for task in agent]) for _ in range(draws))
    return mean(sum(tries, [])), means[draws // 40], means[-1 - draws // 40], sum(map(len, agents))


def table(columns: Sequence[str]) -> str:
    """Success per task, a column a file, or a method's files of several training seeds (A,B,C); below, the
    last column minus the first, seed by seed in their order, on the tries that both hold."""
    held, ends = list[list[Results]](), list[str]()
    for files in columns:
        agents = [sorted(read(file), key=lambda row: (row["task"], row["seed"])) for file in files.split(",")]
        held.append([{(row["task"], row["seed"]): row["reward"] for row in rows if not row["failed"]}
                     for rows in agents])
        if not all(held[-1]):
            raise UserError(f"{files}: nothing was measured: all tries failed; see `failed` in their lines")
        counts = Counter(row["end"] for rows in agents for row in rows).most_common()
        ends.append(f"{Path(files).stem}: " + ", ".join(f"{end} {n}" for end, n in counts))

    def cell(agents: list[Results], name: str) -> str:
        of = [{key: value for key, value in tries.items() if name in ("all", key[0])} for tries in agents]
        return "{:.3f} [{:.2f}, {:.2f}] n={}".format(*bootstrap(of)) if any(of) else "-"

    lines = [" " * 26 + "".join(Path(files).stem.rjust(30) for files in columns)]
    for name in (*sorted({task for agents in held for agent in agents for task, _ in agent}), "all"):
        lines.append(name.ljust(26) + "".join(cell(agents, name).rjust(30) for agents in held))
    if len(held[0]) != len(held[-1]):
        raise UserError(f"{columns[0]} and {columns[-1]}: give as many files (A,B) in both columns")
    pairs = [{key: b[key] - a[key] for key in a.keys() & b.keys()} for a, b in zip(held[0], held[-1])]
    mean, low, high, n = bootstrap(pairs)
    difference = f"the last minus the first: {mean:+.3f} [{low:+.3f}, {high:+.3f}] on {n} common tries"
    return "\n".join([*lines, *ends, *[difference] * (len(columns) > 1)])


def main() -> None:
    config = tyro.cli(Evaluate, description=__doc__)
    distributed.command(lambda: print(table(config.table or [evaluate(config)])))


if __name__ == "__main__":
    main()
