"""Records trajectories on real pages: an explorer's, or a policy's own, solved or not.

    python -m envs.explore --seeds 0:120 --horizon 6 --out recordings/small.jsonl.gz
    python -m envs.explore --tasks scored --seeds 0:200 --horizon 10 --out recordings/pages.jsonl.gz
    python -m envs.explore --checkpoint AGENT --temperature 1 --seeds 20000:40 --out episodes.jsonl.gz

The explorer stands in for NNetNav's (Murty et al. 2024, arXiv:2410.02907), which needs a large model. With
probability 1 - eps it does what the words suggest: it clicks what the goal names, types what the goal quotes
(or a table's cells, or the goal's numbers or words) into empty boxes, then presses the button that the goal
names. Else it does anything. eps goes round {0, .1, .3, 1} with MiniWoB++'s seed, so that the world
model sees agents that do not follow the goal; other tasks have seed 0, and so eps 0. A line of the file
(data.read_trajectories) depends on its task and seed alone.
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
from config import UserError
from data import Action, Start

EPSILONS, TYPED = (0.0, 0.1, 0.3, 1.0), ("textbox", "searchbox", "spinbutton")
quoted = re.compile(r'"([^"]+)"').findall  # strings of a goal
plain = lambda text: re.sub(r"\]\s*\[", " ", text)  # which no action can hold


def elements(page: str) -> list[a11y.Node]:
    """The lines with an id, in document order. One without a name has the text that stands below it."""
    found, path = [], list[a11y.Node]()  # path: the elements above
    for [node] in map(a11y.parse, page.split("\n")):  # line by line: an id may occur twice
        while path and path[-1].depth >= node.depth:
            path.pop()
        node.name = plain(node.name or "")
        if node.bid and re.fullmatch(data.ID, node.bid):
            found.append(node)
            path.append(node)
        elif node.role == "StaticText" and path and not path[-1].name:
            path[-1].name = node.name
    return found


def suggested(goal: str, page: list[a11y.Node]) -> list[tuple[float, Action]]:
    """Weighted actions that the words suggest: to fill and choose, or else to submit, or to look around."""
    occurs = lambda text: text and re.search(rf"(?<!\w){re.escape(text.strip())}(?!\w)", goal, re.I)
    cells = [e.name for e in page if e.role == "cell" and e.name]
    beside = [after for before, after in zip(cells, cells[1:]) if occurs(before)]
    words = re.findall(r"-?[\w#][\w/:.]*\b", goal)  # where nothing is quoted: a number, a date, or any words
    spans = [*words, *map(" ".join, zip(words, words[1:]))]
    texts = quoted(goal) or cells or [text for text in spans if re.search(r"\d", text)] or spans
    # The n-th string belongs into the n-th box, more likely than not.
    likely = lambda n, m: m == min(n, len(texts) - 1) if quoted(goal) else texts[m] in beside
    boxes = [e for e in page if e.role in TYPED and "disabled" not in e.attributes]
    actions = [(4.0 if likely(n, m) else 0.3, Action("type", box.bid, text, enter=False))
               for n, box in enumerate(boxes) if box.attributes.get("value", "0") == "0"  # untouched
               for m, text in enumerate(texts)]
    actions += [(2.0, Action("click", e.bid)) for e in page
                if e.role not in ("button", "cell", "LabelText", *TYPED) and occurs(e.name)
                and not re.search("checked='true'|checked=True|selected=True|focused", a11y.render(e))]
    named = [e for e in page if e.role == "button" and occurs(e.name)]
    named = [e for e in named if "focused" not in e.attributes] or named  # not the one that was pressed last
    return actions or [(10.0**-n, Action("click", e.bid)) for n, e in enumerate(named)] or [
        (1.0, Action("click", e.bid)) for e in page if "clickable" in e.attributes]


def anything(goal: str, page: list[a11y.Node], rng: random.Random) -> Action:
    """Any action: mostly clicks and texts where they go, sometimes what cannot be done."""
    text = rng.choice(quoted(goal) + [e.name for e in page if e.name] + re.findall(r"\w+", goal))
    boxes, ids = [e.bid for e in page if e.role in TYPED], [e.bid for e in page] or ["1"]
    useful = [e.bid for e in page if "clickable" in e.attributes or e.role == "option"]
    kind, bid = rng.random(), rng.choice(ids)
    if kind < 0.30 and boxes:
        return Action("type", rng.choice(boxes), text, enter=rng.random() < 0.2)
    if kind < 0.86:
        return Action("click", rng.choice(useful) if useful and rng.random() < 0.8 else bid)
    return rng.choice([  # often an id that is not there
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
        goal = plain(goal)
        options = [pair for pair in suggested(goal, elements(page)) if (page, pair[1]) not in self.tried]
        action = anything(goal, elements(page), self.rng)
        if options and self.rng.random() >= self.eps:
            action = self.rng.choices([action for _, action in options], [weight for weight, _ in options])[0]
        self.tried.add((page, action))  # not twice on one page
        return lm.Sample([], [], data.completion("", action), False)


def record(config: evaluate.Agent) -> None:
    """Write config.out: on training seeds the training side's tasks, else the others. Killed, it goes on."""
    if not config.out.endswith(".jsonl.gz"):
        raise UserError(f"--out {config.out!r}: give the name of a .jsonl.gz file for the trajectories")
    first = data.seeds_to_look_at(config.seeds, record=True)[0]
    side = data.TRAINING if first in data.SEEDS["train"] else data.HELD_OUT
    how = evaluate.Evaluate(**vars(config) | {"out": f"{config.out}.tries", "keep_pages": True})
    explorer = None if config.checkpoint or config.agent_url else Explorer
    tries = evaluate.evaluate(how, explorer, side)
    rows = [{name: row[name] for name in ("task", "seed", "goal", "pages", "actions", "errors", "reward")}
            | {"terminated": row["end"] in ("stop", "the page"), "truncated": row["end"] == "steps ran out"}
            for row in sorted(evaluate.read(tries), key=lambda row: (row["task"], row["seed"]))
            if row["end"] not in ("failed", "too long")]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path(config.out).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(evaluate.table([tries]))


if __name__ == "__main__":
    distributed.command(lambda: record(tyro.cli(evaluate.Agent, description=__doc__)))
