"""Records trajectories on real pages: those of a goal-biased explorer, or of a policy. Every one is kept.

    python -m worlds.explore --out runs/recordings.jsonl.gz
    python -m worlds.explore --policy runs/laptop/sft --out runs/laptop/episodes.jsonl.gz --per-task 60
    python -m worlds.explore --benchmark infinity --sites DIR --tasks 'gmail/*' --out FILE    # any benchmark

The explorer stands in for NNetNav's exploration (Murty et al. 2024, arXiv:2410.02907), which needs a large
model. Its successes are the expert trajectories; all its transitions train the world model. With probability
1 - eps it does what the words suggest: it clicks elements whose text occurs in the goal, types the goal's
quoted strings (or a table's cells, or else the goal's numbers or words) into empty textboxes, then presses
the button that the goal names. Else it does anything. eps goes round {0, .1, .3, 1} with the seed: the greedy
quarter gives successes; without the random quarter the world model dreams what the goal says. A trajectory is
a function of (task, seed), so a killed collection goes on; with --successes 0 it ends as the same file.
A policy's own episodes are what a reward model must learn from (judge.examples).

A line is a trajectory: {"task", "seed", "goal", "pages": T + 1 pages, "actions": T texts, "errors": T texts
('' if none), "reward": 0 or 1, "terminated", "truncated" (`horizon` actions without an end), "by"}. Ids are
the browser's own; data.py aligns them. A policy's text that is no action ends its episode: neither terminated
nor truncated.
"""

import gzip
import json
import os
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

import a11y
import data
import distributed
import evaluate
import lm
import policy
from config import Benchmark, UserError
from data import SEEDS, Action
from worlds import benchmarks, envs
from worlds.chromium import files_digest
from worlds.miniwob import TASKS, tasks_of

EPSILONS = (0.0, 0.1, 0.3, 1.0)
TYPED = ("textbox", "searchbox", "spinbutton")


@dataclass(frozen=True)
class Explore:
    """Record an explorer's episodes, or a policy's own."""

    out: Path = Path("runs/recordings.jsonl.gz")
    """The file to write. Started again, the command goes on where it was."""
    tasks: tuple[str, ...] = TASKS
    """MiniWoB++ tasks or a word (worlds/miniwob.py). Of a benchmark: names with * and ?."""
    on: Annotated[Benchmark, tyro.conf.arg(name="")] = field(default_factory=Benchmark)
    """Whose pages."""
    per_task: int = 400
    """Episodes of a task at least; half of them have eps >= .3."""
    successes: int = 120
    """A task with fewer successes gets more episodes ..."""
    most: int = 1500
    """... up to this many."""
    horizon: int = 6
    """Actions in an episode at most."""
    first_seed: int = 0
    """The first of each task's seeds: all are in the train range (to learn from) or the dev range (to audit
    with). Of a benchmark the one takes the training side's tasks, the other held-out ones (data.side)."""
    pages: int = 48
    """Episodes side by side."""
    policy: str = ""
    """Folder of a policy that plays in the explorer's place, as often as per_task says."""
    temperature: float = 1.0
    """Sampling temperature of the policy."""
    max_new_tokens: int = 48
    """Longest answer of the policy, in tokens."""
    context: int = 1024
    """Longest prompt with its answer of the policy, in tokens."""

    def __post_init__(self):
        last = self.first_seed + self.most - 1
        if not any(self.first_seed in SEEDS[name] and last in SEEDS[name] for name in ("train", "dev")):
            raise UserError(f"seeds {self.first_seed} to {last} are not all in {SEEDS['train']} (train) or "
                            f"in {SEEDS['dev']} (dev): choose another --first-seed")


# ---- 1. what the page offers -------------------------------------------------------------------------------

def elements(page: str) -> list[a11y.Node]:
    """The lines with an id, in document order. One without a name has the text that stands below it."""
    found, path = [], list[a11y.Node]()  # path: the elements above
    for [node] in map(a11y.parse, page.split("\n")):  # line by line: an id may occur twice
        while path and path[-1].depth >= node.depth:
            path.pop()
        if node.bid:
            found.append(node)
            path.append(node)
        elif node.role == "StaticText" and path and not path[-1].name:
            path[-1].name = node.name
    return found


quoted = re.compile(r'"([^"]+)"').findall  # strings of a goal


def occurs(text: str | None, goal: str) -> bool:
    """Whether text stands in the goal as whole words, whatever the case."""
    text = (text or "").strip()
    return bool(text and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", goal, re.IGNORECASE))


# ---- 2. what the explorer does -----------------------------------------------------------------------------

def suggested(goal: str, page: list[a11y.Node]) -> list[tuple[float, Action]]:
    """Weighted actions that the words suggest. Of three kinds, the first that the page has: fill and choose,
    then submit, then look around."""
    boxes = [e for e in page if e.role in TYPED and "disabled" not in e.attributes]
    cells = [e.name for e in page if e.role == "cell" and e.name]
    # The cell next to a word of the goal.
    beside = [after for before, after in zip(cells, cells[1:]) if occurs(before, goal)]
    strings = quoted(goal) if boxes else []
    words = re.findall(r"-?[\w#][\w/:.]*\b", goal)  # where nothing is quoted: a number, a date, or any words
    spans = [*words, *map(" ".join, zip(words, words[1:]))]
    spans = [text for text in spans if re.search(r"\d", text)] or spans
    actions = []
    for n, box in enumerate(boxes):
        if box.attributes.get("value", "0") != "0":  # an untouched number box has 0
            continue
        # The n-th string belongs into the n-th box, more likely than not.
        weights = [4.0 if m == min(n, len(strings) - 1) else 0.5 for m in range(len(strings))] or [
            4.0 if text in beside else 0.2 for text in cells or spans]
        actions += [(weight, Action("type", box.bid, text, enter=False))
                    for weight, text in zip(weights, strings or cells or spans)]
    if occurs("stop", goal):  # the goal names the action
        actions += [(4.0 if text in beside else 0.2, Action("stop", text=text)) for text in cells]
    actions += [(2.0, Action("click", e.bid)) for e in page
                if e.role not in ("button", "cell", "LabelText", *TYPED) and occurs(e.name, goal)
                and not re.search("checked='true'|checked=True|selected=True|focused", a11y.render(e))]
    named = [e for e in page if e.role == "button" and occurs(e.name, goal)]
    if len(named) > 1:  # not the button that was pressed last
        named = [e for e in named if "focused" not in e.attributes]
    buttons = [(10.0 ** -n, Action("click", e.bid)) for n, e in enumerate(named)]
    return actions or buttons or [(1.0, Action("click", e.bid)) for e in page if "clickable" in e.attributes]


def anything(goal: str, page: list[a11y.Node], rng: random.Random) -> Action:
    """Any action, whatever the goal: mostly clicks and texts where they go, sometimes what has no effect or
    cannot be done."""
    texts = quoted(goal) + [e.name for e in page if e.name] + re.findall(r"\w+", goal)
    boxes = [e for e in page if e.role in TYPED]
    kind = rng.random()
    if kind < 0.30 and boxes:
        return Action("type", rng.choice(boxes).bid, rng.choice(texts), enter=rng.random() < 0.2)
    if kind < 0.86 and page:
        useful = [e for e in page if "clickable" in e.attributes or e.role == "option"]
        return Action("click", rng.choice(useful if useful and rng.random() < 0.8 else page).bid)
    if kind < 0.90:
        return Action("stop", text=rng.choice(texts))
    if kind < 0.93 and page:
        return Action("hover", rng.choice(page).bid)
    if kind < 0.96:
        return Action("press", text=rng.choice(["Enter", "Tab", "Escape", "ArrowDown"]))
    if kind < 0.97 and page:
        return Action("type", rng.choice(page).bid, rng.choice(texts), enter=False)
    if kind < 0.98:
        return Action("click", str(len(page) + rng.randrange(50)))  # often an id that is not there
    return rng.choice([Action("scroll", text="up"), Action("scroll", text="down"), Action("go_back")])


def choose(goal: str, page: str, tried: set[tuple[str, str]], eps: float, rng: random.Random) -> Action:
    """The next action. tried: the (page, action) pairs of this trajectory; a greedy choice is not made twice
    on the same page."""
    offered = elements(page)
    if rng.random() >= eps:
        options = [(w, a) for w, a in suggested(goal, offered) if (page, str(a)) not in tried]
        if options:
            return rng.choices([a for _, a in options], [w for w, _ in options])[0]
    return anything(goal, offered, rng)


# ---- 3. collecting -----------------------------------------------------------------------------------------

async def explore(env: policy.Env, start: data.Start, horizon: int) -> policy.Rollout:
    """An explorer's episode, as policy.rollout makes a policy's, without tokens."""
    eps, rng, tried = EPSILONS[start.seed % len(EPSILONS)], random.Random(f"{start.task} {start.seed}"), set()
    done = policy.Rollout(start)
    try:
        obs = await env.reset(start)
        done.start, done.final_page = replace(start, goal=obs.goal), obs.page
        while len(done.steps) < horizon and not (done.terminated or done.truncated):
            action = choose(obs.goal, obs.page, tried, eps, rng)
            tried.add((obs.page, str(action)))
            done.steps.append(data.Step(obs.url, obs.page, "", action, done.past))
            obs, done.reward, done.terminated, done.truncated = await env.step(action)
            done.steps[-1].error, done.final_page = obs.error, obs.page
        done.truncated = not done.terminated
    except policy.Invalid as why:
        done.discarded = str(why)
    return done


def as_record(done: policy.Rollout, by: str) -> dict:
    """A line of the file."""
    return {"task": done.start.task, "seed": done.start.seed, "goal": done.start.goal,
            "pages": [step.page for step in done.steps] + [done.final_page],
            "actions": [str(step.action) for step in done.steps],
            "errors": [step.error for step in done.steps], "reward": int(done.reward),
            "terminated": done.terminated, "truncated": done.truncated, "by": by}


def left(config: Explore, there: dict[tuple[str, int], dict]) -> list[data.Start]:
    """The next episodes: all up to per_task, then those of tasks with few successes. Task by task within a
    seed, so that the tasks mix."""
    wins = Counter(task for (task, _), record in there.items() if record.get("reward"))
    todo = [(task, config.first_seed + n) for n in range(config.most) for task in config.tasks
            if n < config.per_task or wins[task] < config.successes]
    return [data.start(*pair) for pair in todo if pair not in there][:config.pages]


def record(config: Explore) -> None:
    """Write config.out."""
    partial, written = (config.out.with_name(config.out.name + end) for end in (".partial", ".writing"))
    weights = files_digest(Path(config.policy), Path(config.policy).glob("*.safetensors"))
    by = f"{weights} at {config.temperature:g}" if config.policy else "the explorer"
    by += f", {config.horizon} steps"
    text = (partial.read_text() if partial.exists() else gzip.decompress(config.out.read_bytes()).decode()
            if config.out.exists() else "")
    records = [json.loads(line) for line in text.split("\n")[:-1]]  # without what a kill cut off
    if other := [one["by"] for one in records if one.get("by", by) != by]:
        raise UserError(f"{config.out}: its episodes are by {other[0]}, not {by}; give another --out or move "
                        "that file away")
    there = {(one["task"], one["seed"]): one for one in records}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    written.write_text("".join(json.dumps(one) + "\n" for one in records))
    os.replace(written, partial)
    agent = evaluate.frozen(config.policy, config.context) if config.policy else None
    with envs.open(config.on, config.pages) as pages, partial.open("a", buffering=1) as file:
        tasks = tasks_of(config.tasks)
        if config.on.benchmark not in ("", "miniwob"):
            names = benchmarks.chosen(list(pages.web.tasks()), () if tasks == TASKS else tasks)
            train = config.first_seed in SEEDS["train"]
            tasks = tuple(benchmarks.of_side(names, data.TRAINING if train else data.HELD_OUT))
        config = replace(config, tasks=tasks)
        bar = tqdm(total=len(tasks) * config.per_task, initial=len(there), unit="episode")

        def ended(done: policy.Rollout) -> None:
            there[done.start.task, done.start.seed] = {}  # not again, also where the browser failed
            if not done.discarded:
                there[done.start.task, done.start.seed] = as_record(done, by)
                file.write(json.dumps(as_record(done, by)) + "\n")
            bar.update()

        async def one(start: data.Start) -> None:
            async with pages() as env:
                ended(await explore(env, start, config.horizon))

        while starts := left(config, there):
            if agent:
                pages.play(agent, starts, config.horizon, config.max_new_tokens, config.temperature, ended)
            else:
                lm.together(map(one, starts))
        bar.close()
    text = "".join(json.dumps(there[key]) + "\n" for key in sorted(there) if there[key])
    written.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    os.replace(written, config.out)
    partial.unlink()
    for task in tasks:
        of = [one for (name, _), one in there.items() if name == task and one]
        print(f"{task:24} {len(of):5} episodes, {sum(one['reward'] for one in of):4} successes")


if __name__ == "__main__":
    distributed.command(lambda: record(tyro.cli(Explore, description=__doc__)))
