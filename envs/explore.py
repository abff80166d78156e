"""Records trajectories on real pages: an explorer's, or a policy's own. Every one is kept.

    python -m envs.explore --seeds 0:120 --horizon 6 --out recordings/small.jsonl.gz
    python -m envs.explore --checkpoint AGENT --temperature 1 --seeds 20000:40 --out episodes.jsonl.gz

The explorer stands in for NNetNav's (Murty et al. 2024, arXiv:2410.02907), which needs a large model. With
probability 1 - eps it does what the words suggest: it clicks what the goal names, types what the goal quotes
(or a table's cells, or the goal's numbers or words) into empty boxes, then presses the button that the goal
names. Else it does anything. eps goes round {0, .1, .3, 1} with the seed, so that the world model sees agents
that do not follow the goal. A line of the file (data.read_trajectories) depends on its task and seed alone.
"""

import gzip
import json
import math
import random
import re
from pathlib import Path

import tyro

import a11y
import data
import distributed
import evaluate
import lm
from data import Action, Start

EPSILONS, TYPED = (0.0, 0.1, 0.3, 1.0), ("textbox", "searchbox", "spinbutton")
Line = tuple[str, str, str, str]  # id, role, name or the text below it, the whole line


def lines(page: str) -> list[Line]:
    """The lines with an id."""
    nodes = [node for node in a11y.parse(page) if node.role]
    below = [node.name if node.role == "StaticText" else "" for node in [*nodes[1:], nodes[0]]]
    return [(node.bid, node.role, node.name or text, a11y.render(node))
            for node, text in zip(nodes, below) if node.bid]


def suggested(goal: str, page: list[Line]) -> list[tuple[float, Action]]:
    """Weighted actions that the words suggest. Of three kinds, the first that the page has: fill and choose,
    then submit, then look around."""
    occurs = lambda text: text.strip() and re.search(rf"(?<!\w){re.escape(text.strip())}(?!\w)", goal, re.I)
    # A box that holds nothing; an untouched number box has 0.
    filled = re.compile(" value=(?!0,)|, disabled")
    boxes = [bid for bid, role, _, line in page if role in TYPED and not filled.search(line)]
    cells = [text for _, role, text, _ in page if role == "cell" and text]
    beside = [after for before, after in zip(cells, cells[1:]) if occurs(before)]
    strings, words = re.findall(r'"([^"]+)"', goal), re.findall(r"-?[\w#][\w/:.]*\b", goal)
    spans = [*words, *map(" ".join, zip(words, words[1:]))]  # where nothing is quoted: a number, or any
    spans = cells or [text for text in spans if re.search(r"\d", text)] or spans
    likely = lambda n, m, text: m == min(n, len(strings) - 1) if strings else text in beside
    actions = [(4.0 if likely(n, m, text) else 0.3, Action("type", bid, text, enter=False))
               for n, bid in enumerate(boxes) for m, text in enumerate(strings or spans)]
    done = re.compile("checked='true'|checked=True|selected=True|focused")
    actions += [(2.0, Action("click", bid)) for bid, role, text, line in page if occurs(text)
                and role not in ("button", "cell", "LabelText", *TYPED) and not done.search(line)]
    named = [(bid, line) for bid, role, text, line in page if role == "button" and occurs(text)]
    named = [(bid, line) for bid, line in named if "focused" not in line] or named  # not the one pressed last
    looking = [(1.0, Action("click", bid)) for bid, _, _, line in page if "clickable" in line]
    return actions or [(10.0**-n, Action("click", bid)) for n, (bid, _) in enumerate(named)] or looking


def anything(goal: str, page: list[Line], rng: random.Random) -> Action:
    """Any action: mostly clicks and texts where they go, sometimes what cannot be done."""
    texts = re.findall(r'"([^"]+)"|(?=(\b\w+))', goal)
    texts = [one or other for one, other in texts] + [text for _, _, text, _ in page if text]
    boxes = [bid for bid, role, _, _ in page if role in TYPED]
    useful = [bid for bid, role, _, line in page if "clickable" in line or role == "option"]
    text, bid, kind = rng.choice(texts), rng.choice([bid for bid, *_ in page] or ["1"]), rng.random()
    if kind < 0.30 and boxes:
        return Action("type", rng.choice(boxes), text, enter=rng.random() < 0.2)
    if kind < 0.86:
        return Action("click", rng.choice(useful) if useful and rng.random() < 0.8 else bid)
    return rng.choice([  # often with an id that is not there
        Action("stop", text=text), Action("stop", text=text), Action("hover", bid), Action("hover", bid),
        *(Action("press", text=key) for key in ("Enter", "Tab", "Escape", "ArrowDown")), Action("go_back"),
        Action("type", bid, text, enter=False), Action("click", str(len(page) + rng.randrange(50))),
        Action("scroll", text="up"), Action("scroll", text="down")])


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
        options = [one for one in suggested(goal, lines(page)) if (page, one[1]) not in self.tried]
        action = anything(goal, lines(page), self.rng)
        if options and self.rng.random() >= self.eps:
            action = self.rng.choices([action for _, action in options], [weight for weight, _ in options])[0]
        self.tried.add((page, action))
        return lm.Sample([], [], data.completion("", action), False)


def record(config: evaluate.Agent) -> None:
    """Write config.out: on training seeds the training side's tasks, else those that are held out. Killed, the same
    command goes on (evaluate.evaluate)."""
    side = data.TRAINING if data.parse_seeds(config.seeds)[0] in data.SEEDS["train"] else data.HELD_OUT
    how = evaluate.Evaluate(**vars(config) | {"out": f"{config.out}.tries", "keep_pages": True})
    tries = evaluate.read(evaluate.evaluate(how, None if config.checkpoint else Explorer, side))
    rows = [{name: row[name] for name in ("task", "seed", "goal", "pages", "actions", "errors", "reward")}
            | {"terminated": row["end"] in ("stop", "the page"), "truncated": row["end"] == "steps ran out"}
            for row in sorted(tries, key=lambda row: (row["task"], row["seed"]))
            if row["end"] not in ("failed", "too long")]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path(config.out).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    for task in sorted({row["task"] for row in rows}):
        rewards = [row["reward"] for row in rows if row["task"] == task]
        print(f"{task:24} {len(rewards):5} episodes, {sum(rewards):4g} successes")


if __name__ == "__main__":
    distributed.command(lambda: record(tyro.cli(evaluate.Agent, description=__doc__)))
