"""Records trajectories on real pages: an explorer's, or a policy's own. Every one is kept.

    python -m envs.explore --tasks laptop --seeds 0:120 --out recordings/small.jsonl.gz
    python -m envs.explore --checkpoint runs/laptop/sft --seeds 20000:40 --out runs/laptop/episodes.jsonl.gz

The explorer stands in for NNetNav's (Murty et al. 2024, arXiv:2410.02907), which needs a large model. With
probability 1 - eps it does what the words suggest: it clicks what the goal names, types what the goal quotes (or
a table's cells, or the goal's numbers or words) into empty boxes, then presses the button that the goal names.
Else it does anything. eps goes round {0, .1, .3, 1} with the seed: so the world model sees what happens to an
agent that does not follow the goal. A line of the file (data.read_trajectories) depends on its task and seed alone.
"""

import gzip
import json
import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

import a11y
import data
import distributed
import envs
import evaluate
import lm
from config import Benchmark
from data import Action, Start

EPSILONS = (0.0, 0.1, 0.3, 1.0)
TYPED = ("textbox", "searchbox", "spinbutton")


@dataclass(frozen=True)
class Explore(evaluate.Agent):
    """Record an explorer's episodes; with a --checkpoint, that policy's."""

    out: Path = Path("runs/recordings.jsonl.gz")
    """The file to write."""
    tasks: tuple[str, ...] = ()
    """Tasks, names with * and ?; or a word: `laptop` (by default), `scored`, `all`."""
    on: Annotated[Benchmark, tyro.conf.arg(name="")] = field(default_factory=Benchmark)
    """Whose pages. Of another benchmark than MiniWoB++ the training side's tasks, once each."""
    seeds: str = "0:400"
    """START:COUNT, of each task."""
    horizon: int = 6
    """Most steps."""
    temperature: float = 1.0
    """Sampling temperature of the policy."""
    pages: int = 4
    """Episodes side by side."""


Line = tuple[str, str, str, str]  # id, role, name or the text below it, the whole line


def lines(page: str) -> list[Line]:
    r"""The lines with an id.

    >>> lines("RootWebArea 'x'\n\t[3] listitem '', clickable\n\t\tStaticText 'Rex'")[0][:3]
    ('3', 'listitem', 'Rex')
    """
    nodes, found = a11y.parse(page), list[Line]()
    for node, after in zip(nodes, [*nodes[1:], nodes[0]]):
        below = after.name if after.role == "StaticText" and after.depth > node.depth else ""
        if node.bid:
            found.append((node.bid, node.role or "", node.name or below or "", a11y.render(node)))
    return found


def suggested(goal: str, page: list[Line]) -> list[tuple[float, Action]]:
    """Weighted actions that the words suggest. Of three kinds, the first that the page has: fill and choose, then
    submit, then look around."""
    occurs = lambda text: text.strip() and re.search(rf"(?<!\w){re.escape(text.strip())}(?!\w)", goal, re.I)
    # A box that holds nothing; an untouched number box has 0.
    boxes = [bid for bid, role, _, line in page if role in TYPED and not re.search(" value=(?!0,)|, disabled", line)]
    cells = [text for _, role, text, _ in page if role == "cell" and text]
    beside = [after for before, after in zip(cells, cells[1:]) if occurs(before)]
    strings = re.findall(r'"([^"]+)"', goal)
    words = re.findall(r"-?[\w#][\w/:.]*\b", goal)  # where nothing is quoted: a number, a date, or any words
    spans = [*words, *map(" ".join, zip(words, words[1:]))]
    spans = cells or [text for text in spans if re.search(r"\d", text)] or spans
    weighted = lambda n, m, text: (4.0 if m == min(n, len(strings) - 1) else 0.5) if strings else (
        4.0 if text in beside else 0.2)  # the n-th string belongs into the n-th box, more likely than not
    actions = [(weighted(n, m, text), Action("type", bid, text, enter=False))
               for n, bid in enumerate(boxes) for m, text in enumerate(strings or spans)]
    done = re.compile("checked='true'|checked=True|selected=True|focused")
    actions += [(2.0, Action("click", bid)) for bid, role, text, line in page if occurs(text)
                and role not in ("button", "cell", "LabelText", *TYPED) and not done.search(line)]
    named = [(bid, line) for bid, role, text, line in page if role == "button" and occurs(text)]
    if len(named) > 1:  # not the button that was pressed last
        named = [(bid, line) for bid, line in named if "focused" not in line]
    looking = [(1.0, Action("click", bid)) for bid, _, _, line in page if "clickable" in line]
    return actions or [(10.0**-n, Action("click", bid)) for n, (bid, _) in enumerate(named)] or looking


def anything(goal: str, page: list[Line], rng: random.Random) -> Action:
    """Any action: mostly clicks and texts where they go, sometimes what cannot be done."""
    texts = re.findall(r'"([^"]+)"', goal) + [text for _, _, text, _ in page if text] + re.findall(r"\w+", goal)
    boxes = [bid for bid, role, _, _ in page if role in TYPED]
    useful = [bid for bid, role, _, line in page if "clickable" in line or role == "option"]
    text, bid, kind = rng.choice(texts), rng.choice([bid for bid, *_ in page] or ["1"]), rng.random()
    if kind < 0.30 and boxes:
        return Action("type", rng.choice(boxes), text, enter=rng.random() < 0.2)
    if kind < 0.86:
        return Action("click", rng.choice(useful) if useful and rng.random() < 0.8 else bid)
    return rng.choices([Action("stop", text=text), Action("hover", bid), Action("type", bid, text, enter=False),
                        Action("press", text=rng.choice(["Enter", "Tab", "Escape", "ArrowDown"])),
                        Action("click", str(len(page) + rng.randrange(50))),  # often an id that is not there
                        Action("scroll", text=rng.choice(["up", "down"])), Action("go_back")], (4, 3, 1, 3, 1, 1, 1))[0]


class Explorer:
    """A policy.Sampler of one episode. It reads messages, and writes an action."""

    context = math.inf

    def __init__(self, start: Start):
        self.eps, self.rng = EPSILONS[start.seed % len(EPSILONS)], random.Random(f"{start.task} {start.seed}")
        self.tried, self.template = set[tuple[str, Action]](), self

    def prompt_ids(self, messages: list[dict]) -> list[dict]:
        return messages

    async def generate(self, prompt: list[dict], *_) -> lm.Sample:
        page, _, goal, _ = data.parse_prompt(prompt[-1]["content"])
        options = [one for one in suggested(goal, lines(page)) if (page, one[1]) not in self.tried]  # once a page
        if options and self.rng.random() >= self.eps:
            [action] = self.rng.choices([action for _, action in options], [weight for weight, _ in options])
        else:
            action = anything(goal, lines(page), self.rng)
        self.tried.add((page, action))
        return lm.Sample([], [], data.completion("", action), False)


def record(config: Explore) -> None:
    """Write config.out."""
    config = evaluate.with_lengths(config)
    agent = evaluate.frozen(config.checkpoint, config.context) if config.checkpoint else Explorer
    seeds = data.parse_seeds(config.seeds)
    with envs.open(config.on, config.pages) as pages, tqdm(unit="episode") as bar:
        starts = pages.starts(config.tasks, seeds, side=data.TRAINING if seeds[0] in data.SEEDS["train"] else "")
        done = pages.play(agent, starts, config.horizon, config.max_new_tokens, config.temperature,
                          lambda _: bar.update())
    rows = [{"task": one.start.task, "seed": one.start.seed, "goal": one.start.goal,
             "pages": [step.page for step in one.steps] + [one.final_page],
             "actions": [str(step.action) for step in one.steps], "errors": [step.error for step in one.steps],
             "reward": int(one.reward), "terminated": one.terminated, "truncated": one.truncated}
            for one in done if not one.discarded]
    config.out.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    config.out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    wins, episodes = (Counter(row["task"] for row in rows if row["reward"] >= least) for least in (1, 0))
    print("\n".join(f"{task:24} {n:5} episodes, {wins[task]:4} successes" for task, n in episodes.items()))


if __name__ == "__main__":
    distributed.command(lambda: record(tyro.cli(Explore, description=__doc__)))
