"""Records trajectories on real pages: those of a goal-biased explorer, or of a policy. Every one is kept.

    python -m worlds.explore --out runs/recordings.jsonl.gz
    python -m worlds.explore --policy runs/laptop/sft --out runs/laptop/episodes.jsonl.gz --per-task 60
    python -m worlds.explore --benchmark infinity --sites DIR --tasks 'gmail/*' --out FILE    # any benchmark

The explorer stands in for NNetNav's exploration (Murty et al. 2024, arXiv:2410.02907), which needs a large
model. The environment's reward labels what the explorer did; its successes are the expert trajectories, and
all its transitions train the world model. The same code plays every task. With probability 1 - eps it does
what the words suggest: it clicks elements whose text occurs in the goal, types the goal's quoted strings
(or a table's cells, or else the goal's numbers or words) into empty textboxes, then presses the button that
the goal names. With probability eps it does anything. eps goes round {0, .1, .3, 1} with the seed: the
greedy quarter gives successes, the random quarter shows the world model what happens to an agent that does
not follow the goal (without it, it dreams what the goal says). A trajectory is a function of (task, seed),
so a collection goes on after an interruption. With --successes 0 it ends as the same file; else perhaps
with some seeds more, as it counts successes a batch at a time.

A policy's own episodes are what a reward model must learn from (judge.examples).

One JSON line a trajectory: {"task", "seed", "goal", "eps" (the explorer's), "pages": T + 1 pages,
"actions": T texts, "errors": T texts ('' if none), "reward": 0 or 1, "terminated", "truncated"}. Ids are
the browser's own; data.py aligns them. truncated: `horizon` actions without an end. A policy's text that is
no action ends its episode, which is then neither terminated nor truncated.
"""

import ast
import gzip
import json
import os
import random
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

import data
import lm
import policy
import remote
from data import SEEDS, Action
from worlds import benchmarks
from worlds.chromium import files_digest
from worlds.miniwob import TASKS, Browser, tasks_of

EPSILONS = (0.0, 0.1, 0.3, 1.0)
# Tabs, [id], role, the name as a Python repr, attributes.
LINE = re.compile(r"(\t*)(?:\[(\w+)\] )?(\w+)(?: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))?(.*)")
TYPED = ("textbox", "searchbox", "spinbutton")


@dataclass(frozen=True)
class Config:
    out: Path = Path("runs/recordings.jsonl.gz")
    """The file to write. Started again, the command goes on where it was."""
    tasks: tuple[str, ...] = TASKS
    """MiniWoB++ tasks, or one word: `all` its pages, those that are `scored`. Of a benchmark: names with *
    and ?, all by default."""
    on: Annotated[data.Options, tyro.conf.arg(name="")] = field(default_factory=data.Options)
    """Other people's pages (worlds/benchmarks.py)."""
    limit: int = 0
    """So many tasks of the benchmark, from its whole list; 0: all."""
    per_task: int = 400
    """Trajectories of a task at least; half of them have eps >= .3."""
    successes: int = 120
    """A task with fewer successes gets more trajectories ..."""
    most: int = 1500
    """... up to this many."""
    horizon: int = 6
    """Actions in a trajectory at most."""
    first_seed: int = 0
    """Seeds are first_seed, first_seed + 1, ... for every task: all in the train range (to learn from), or
    all in the dev range (to audit with). Of a benchmark the first takes tasks of the training side, the
    second held-out ones (data.side)."""
    pages: int = 12
    """Trajectories played side by side."""
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
            raise ValueError(f"seeds {self.first_seed} to {last} are not all in {SEEDS['train']} (train) or "
                             f"in {SEEDS['dev']} (dev): choose another --first-seed")
        data.check_counts(1, pages=self.pages, horizon=self.horizon, most=self.most)
        data.check_counts(0, limit=self.limit, per_task=self.per_task, successes=self.successes)


# ---- 1. what the page offers -------------------------------------------------------------------------------

@dataclass
class Element:
    """An element that can be acted on."""
    bid: str
    role: str
    text: str  # its name, or else the text that stands below it
    rest: str  # attributes as printed: " value='x', clickable, visible"


def elements(page: str) -> list[Element]:
    r"""The lines with an id, in document order.

    >>> found = elements("RootWebArea 'x'\n\t[3] listitem '', clickable\n\t\tStaticText 'Rex'")
    >>> [(element.bid, element.role, element.text) for element in found]
    [('3', 'listitem', 'Rex')]
    """
    found, path = [], []  # path: (depth, element) of the lines above
    for line in page.split("\n"):
        tabs, bid, role, name, rest = LINE.fullmatch(line).groups()
        depth, text = len(tabs), ast.literal_eval(name) if name else ""
        while path and path[-1][0] >= depth:
            path.pop()
        if bid:
            found.append(Element(bid, role, text, rest))
            path.append((depth, found[-1]))
        elif role == "StaticText" and path and not path[-1][1].text:
            path[-1][1].text = text
    return found


def quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]+)"', goal)


def occurs(text: str, goal: str) -> bool:
    """Whether text stands in the goal as whole words, whatever the case."""
    text = text.strip()
    return bool(text and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", goal, re.IGNORECASE))


# ---- 2. what the explorer does -----------------------------------------------------------------------------

def suggested(goal: str, page: list[Element]) -> list[tuple[float, Action]]:
    """Weighted actions that the words suggest. Of three kinds, the first that the page has: fill and choose,
    then submit, then look around."""
    boxes = [e for e in page if e.role in TYPED and ", disabled" not in e.rest]
    cells = [e.text for e in page if e.role == "cell" and e.text]
    # The cell next to a word of the goal.
    beside = [after for before, after in zip(cells, cells[1:]) if occurs(before, goal)]
    strings = quoted(goal) if boxes else []
    words = re.findall(r"-?[\w#][\w/:.]*\b", goal)  # where nothing is quoted: a number, a date, or any words
    spans = [*words, *map(" ".join, zip(words, words[1:]))]
    spans = [text for text in spans if re.search(r"\d", text)] or spans
    actions = []
    for n, box in enumerate(boxes):
        if re.search(" value=(?!0,)", box.rest):  # an untouched number box has 0
            continue
        for m, text in enumerate(strings):  # the n-th string belongs into the n-th box, more likely than not
            weight = 4.0 if m == min(n, len(strings) - 1) else 0.5
            actions.append((weight, Action("type", box.bid, text, enter=False)))
        for text in [] if strings else cells or spans:
            actions.append((4.0 if text in beside else 0.2, Action("type", box.bid, text, enter=False)))
    if occurs("stop", goal):  # the goal names the action
        actions += [(4.0 if text in beside else 0.2, Action("stop", text=text)) for text in cells]
    done = re.compile("checked='true'|checked=True|selected=True|focused")
    actions += [(2.0, Action("click", e.bid)) for e in page
                if e.role not in ("button", "cell", "LabelText", *TYPED) and occurs(e.text, goal)
                and not done.search(e.rest)]
    named = [e for e in page if e.role == "button" and occurs(e.text, goal)]
    if len(named) > 1:  # not the button that was pressed last
        named = [e for e in named if "focused" not in e.rest]
    buttons = [(10.0 ** -n, Action("click", e.bid)) for n, e in enumerate(named)]
    looking = [(1.0, Action("click", e.bid)) for e in page if "clickable" in e.rest]
    return actions or buttons or looking


def anything(goal: str, page: list[Element], rng: random.Random) -> Action:
    """Any action, whatever the goal: mostly clicks and texts where they go, sometimes what has no effect or
    cannot be done."""
    texts = quoted(goal) + [e.text for e in page if e.text] + re.findall(r"\w+", goal)
    boxes = [e for e in page if e.role in TYPED]
    kind = rng.random()
    if kind < 0.30 and boxes:
        return Action("type", rng.choice(boxes).bid, rng.choice(texts), enter=rng.random() < 0.2)
    if kind < 0.86 and page:
        useful = [e for e in page if "clickable" in e.rest or e.role == "option"]
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

def collect(web: Browser, batch: list[tuple[str, int]], horizon: int) -> list[dict]:
    """Plays (task, seed) pairs side by side. Returns a record of each, but none where the browser failed:
    that says nothing about the page."""
    records, rngs, tried, broken = [], [], [], set()
    for (task, seed), obs in zip(batch, web.reset([data.start(*pair) for pair in batch])):
        eps = EPSILONS[seed % len(EPSILONS)]
        records.append(dict(task=task, seed=seed, goal=obs.goal, eps=eps, pages=[obs.page], actions=[],
                            errors=[], reward=0, terminated=False, truncated=False))
        rngs.append(random.Random(f"{task} {seed}"))
        tried.append(set())
    for t in range(horizon):
        actions = []
        for record, rng, seen in zip(records, rngs, tried):
            over = record["terminated"] or record["truncated"]
            page = record["pages"][-1]
            actions.append(None if over else choose(record["goal"], page, seen, record["eps"], rng))
        for n, (obs, reward, terminated, truncated) in enumerate(zip(*web.step(actions))):
            if actions[n] is None:
                continue
            if truncated:
                broken.add(n)
            record, text = records[n], str(actions[n])
            tried[n].add((record["pages"][-1], text))
            record["actions"].append(text)
            record["errors"].append(obs.error)
            record["pages"].append(obs.page)
            record.update(reward=int(reward), terminated=terminated,
                          truncated=truncated or (t == horizon - 1 and not terminated))
    return [record for n, record in enumerate(records) if n not in broken]


def play(web: policy.World, agent: policy.Sampler, batch: list[tuple[str, int]],
         config: Config) -> list[dict]:
    """collect, of a policy."""
    played = policy.rollout(web, agent, [data.start(*pair) for pair in batch], config.horizon,
                            config.max_new_tokens, config.temperature, [lm.mix(*pair) for pair in batch])
    return [dict(task=t.start.task, seed=t.start.seed, goal=t.start.goal, reward=int(t.reward),
                 pages=[step.page for step in t.steps] + [t.final_page],
                 actions=[str(step.action) for step in t.steps], errors=[step.error for step in t.steps],
                 terminated=t.terminated, truncated=t.truncated)
            for t, failure in zip(played, web.failures) if not failure and not t.dropped]


def as_line(record: dict) -> str:
    """A record as a line of a file. Half a surrogate pair, which pages may hold and UTF-8 may not, is written
    as JSON writes it: \\ud800."""
    text = json.dumps(record, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def check_played_alike(config: Config) -> None:
    """Write beside the recording how its tries are played. Raises ValueError where others stand there that
    were played in another way."""
    made, on = config.out.with_name(config.out.name + ".made.json"), json.loads(json.dumps(asdict(config.on)))
    weights = files_digest(Path(config.policy), list(Path(config.policy).glob("*.safetensors")))
    on |= {"policy": weights, "temperature": config.temperature} if config.policy else {}
    there = json.loads(made.read_text()) if made.exists() else {"on": on, "horizons": {}}
    now = dict.fromkeys(config.tasks, config.horizon)
    other = [name for name in on | there["on"] if there["on"].get(name) != on.get(name)]
    other += ["horizon"] * any(now[task] != of for task, of in there["horizons"].items() if task in now)
    if other:
        raise ValueError(f"{made}: what is recorded there was played with another {', '.join(other)}: give "
                         "another --out, or the flags of then")
    written = made.with_name(made.name + ".writing")
    written.write_text(json.dumps({"on": on, "horizons": there["horizons"] | now}))
    os.replace(written, made)


def main(config: Config):
    web = benchmarks.world(config.on, remote.grader(config.on)) if config.on.benchmark else Browser()
    if config.on.benchmark:
        globs = () if config.tasks == TASKS else config.tasks
        names = benchmarks.chosen(list(web.tasks()), globs, 0, getattr(web, "named", None))
        if config.on.benchmark != "miniwob":  # whose seeds are split instead
            to_learn = config.first_seed in SEEDS["train"]
            names = benchmarks.of_side(names, data.TRAINING if to_learn else data.HELD_OUT)
        config = replace(config, tasks=tuple(benchmarks.chosen(names, (), config.limit)))
    else:
        config = replace(config, tasks=tasks_of(config.tasks))
    config.out.parent.mkdir(parents=True, exist_ok=True)
    partial, written = (config.out.with_name(config.out.name + end) for end in (".partial", ".writing"))
    check_played_alike(config)
    if config.out.exists() and not partial.exists():
        written.write_bytes(gzip.decompress(config.out.read_bytes()))
        os.replace(written, partial)
    *whole, cut = partial.read_bytes().split(b"\n") if partial.exists() else [b""]
    if cut:  # short, perhaps inside of a character. Not written anew: a kill would lose all the rest
        os.truncate(partial, partial.stat().st_size - len(cut))
    records = {(record["task"], record["seed"]): record for record in map(json.loads, whole)}
    wins = Counter(task for (task, _), record in records.items() if record["reward"])
    played = set(records)  # and those lost to a page that failed, which are not played again
    agent = lm.freeze(lm.load(config.policy, config.context)) if config.policy else None
    bar = tqdm(total=len(config.tasks) * config.per_task, initial=len(records), unit="trajectory")
    with web, partial.open("a") as file, bar:
        while True:
            # Task by task within a seed, so that the tasks mix.
            batch = [(task, config.first_seed + n) for n in range(config.most) for task in config.tasks
                     if (n < config.per_task or wins[task] < config.successes)
                     and (task, config.first_seed + n) not in played][:config.pages]
            if not batch:
                break
            played |= set(batch)
            for record in play(web, agent, batch, config) if agent else collect(web, batch, config.horizon):
                records[record["task"], record["seed"]] = record
                wins[record["task"]] += record["reward"]
                file.write(as_line(record))
                bar.update()
            file.flush()
    text = "".join(as_line(records[key]) for key in sorted(records))
    written.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    os.replace(written, config.out)
    partial.unlink()
    for task in config.tasks:
        of = [record for (name, _), record in records.items() if name == task]
        print(f"{task:24} {len(of):5} trajectories, {sum(record['reward'] for record in of):4} successes")
    if lost := len(played) - len(records):
        print(f"{lost} more were lost to pages that failed")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, OSError) as problem:
        sys.exit(f"explore.py: {problem}")
