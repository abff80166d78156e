"""What a run keeps of its dreams, and what can be told of them: how each ended, and where a group parted.

A run keeps its dreams in dreams.jsonl: a line a dream, the first of equal experts of a group alone. Kept are
all updates of a run of UPDATES, else at most as many, spread evenly, and the last; of an update as many
groups as fit into BYTES, and at least one. report.py makes a page of them.

Words. Deserved is what the real page pays for the same actions from the same start. A dream leaves reality
at the first step whose page or end is not the real one, or whose element is not on the real page. Two dreams
of a group are parted by the agent where it does different things on an equal page, and by the dice where the
world model gives different pages, or an end and none, for an equal action.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import a11y
import data
import dream
import fidelity
from policy import TokenTrajectory

FILE = "dreams.jsonl"
UPDATES, BYTES = 40, 1_000_000  # bytes an update; a laptop's run has a few MB in all
Row = dict[str, Any]


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more)"


# ---- 1. what a run keeps -----------------------------------------------------------------------------------


def keep(file: IO[str], n: int, updates: int, batch: dream.Batch, decode: Callable[[list[int]], Any]) -> None:
    """Append the dreams of update n of `updates` to dreams.jsonl. `decode` gives the text of token ids. What
    a killed run left of update n has to be cut off before (measure.cut_metrics)."""
    if n % math.ceil(updates / UPDATES) and n + 1 < updates:
        return
    size = len(batch.trajectories) // len(batch.useful)
    learned, text = {id(trajectory) for trajectory in batch.kept}, ""
    for group, (_, taught) in enumerate(batch.useful):
        some = batch.trajectories[group * size : (group + 1) * size]
        experts = [row for row, trajectory in enumerate(some) if trajectory.expert]
        rows = [{"update": n, "group": group, "taught": taught, "row": row, "kept": id(trajectory) in learned,
                 "copies": len(experts) if trajectory.expert else 1, **as_row(trajectory, decode)}
                for row, trajectory in enumerate(some) if row not in experts[1:]]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if not text or len(text) + len(lines) <= BYTES:
            text += lines
    file.write(text)
    file.flush()


def as_row(trajectory: TokenTrajectory, decode: Callable[[list[int]], Any]) -> Row:
    """A dream as data. A page is written out only where the delta of its step does not lead to it."""
    start, steps = trajectory.start, list[Row]()
    verdict: Any = trajectory.verdict
    pages = [*(step.page for step in trajectory.steps), trajectory.final_page][1:]  # after each step
    predictions = trajectory.predictions or [None] * len(trajectory.steps)
    for step, prediction, page in zip(trajectory.steps, predictions, pages, strict=True):
        told = {"thought": step.thought, "action": str(step.action), "error": step.error}
        if prediction is not None:
            told |= {name: getattr(prediction, name) for name in ("reason", "delta", "over", "unknown")}
        steps.append(told if after(step.page, told) == page else told | {"page": page})
    said = verdict and {"success": verdict.success, "text": verdict.text, "unknown": verdict.unknown,
                        "margin": None if verdict.unknown else verdict.margin}
    wrote = decode(trajectory.pairs[-1][1])[:2000] if trajectory.no_action else ""
    return {"task": start.task, "seed": start.seed, "goal": start.goal, "prefix": start.prefix,
            "previous": start.previous, "page": start.page, "steps": steps, "wrote": wrote, "verdict": said,
            **{name: getattr(trajectory, name) for name in (
                "reward", "terminated", "truncated", "no_action", "dropped", "expert", "real")}}


def after(page: str, told: Row) -> str:
    """The page behind a step of a row."""
    try:
        return told["page"] if "page" in told else a11y.apply(page, told.get("delta") or "no change")
    except a11y.DeltaError:  # a world model of one's own may write any delta
        return page


# ---- 2. a dream, read back, beside reality -----------------------------------------------------------------


@dataclass
class Dream:
    """A dream that was kept. `real`: what became of its actions, if they were done in a real browser."""

    row: Row
    trajectory: TokenTrajectory
    real: fidelity.Replayed | None = None

    @property
    def name(self) -> str:
        return f"u{self.row['update']}g{self.row['group']}d{self.row['row']}"

    @property
    def pages(self) -> list[str]:
        """The page before each step, and the last."""
        return [step.page for step in self.trajectory.steps] + [self.trajectory.final_page]

    @property
    def equal(self) -> list[bool]:
        """For each step that was done for real: was the real page the dreamed one?"""
        return [page == real for page, real in zip(self.pages[1:], self.real.pages)] if self.real else []

    @property
    def deserved(self) -> float | None:
        """The reward deserved; None where nobody knows."""
        if self.trajectory.expert or self.trajectory.real:
            return self.trajectory.reward
        return self.real.reward if self.real and not self.real.failed else None

    @property
    def judged(self) -> str:
        """Whether the reward given is the one deserved."""
        if self.trajectory.dropped or self.deserved is None:
            return "not known"
        return "rightly" if self.deserved == self.trajectory.reward else "wrongly"

    @property
    def left(self) -> str:
        """The step at which it left reality, from 1."""
        if self.trajectory.expert or self.trajectory.real:
            return "never"
        if not self.real or self.real.failed:
            return "not known"
        last, at = len(self.row["steps"]), len(self.real.pages)
        wrong = [not same or (self.real.over and k == at) != (self.row["terminated"] and k == last)
                 for k, same in enumerate(self.equal, 1)] + [self.real.unmatched]
        return str(wrong.index(True) + 1) if any(wrong) else "never"


def read_dream(row: Row) -> TokenTrajectory:
    """The trajectory of a row, without its tokens. Raises KeyError, TypeError, ValueError or AttributeError
    for a row that is none of keep's."""
    if missing := {"update", "group", "row", "taught", "copies", "wrote", "verdict"} - row.keys():
        raise KeyError(*sorted(missing))
    start = data.Start(row["task"], int(row["seed"]), tuple(row["prefix"]), row["goal"],
                       data.root_url(row["page"]), row["page"], tuple(row["previous"]))
    found = TokenTrajectory(start, final_page=start.page, reward=float(row["reward"]), **{
        name: row[name] for name in ("terminated", "truncated", "no_action", "dropped", "expert", "real")})
    for told in row["steps"]:
        page = found.final_page
        found.steps.append(data.Step(data.root_url(page), page, told["thought"],
                                     data.parse_action(told["action"]), found.past, told["error"]))
        found.final_page = after(page, told)
    found.predictions = [None] * len(found.steps)  # its own stay in the row
    return found


def ending(one: Dream) -> str:
    """How a dream ended, in a sentence."""
    row, said = one.row, one.row["verdict"]
    if row["expert"]:
        return f"A recorded success stands in the place of {row['copies']} dream(s)."
    if row["dropped"]:
        return f"Dropped, so that nothing is learned from it: {row['dropped']}."
    if row["no_action"]:
        return f"Its last text is no action, which is worth 0: {cut(row['wrote'], 300)}"
    if row["truncated"]:
        return f"{len(row['steps'])} steps ran out before it ended, which is worth 0."
    if said:
        return f"The judge said {'YES' if said['success'] else 'NO'} (margin {said['margin']:+.2f})."
    return f"The real page paid {row['reward']:g}."


def truth(one: Dream) -> str:
    """What a real browser says of a dream, in sentences; "" where none was asked."""
    real, steps = one.real, len(one.trajectory.steps)
    if real is None:
        return ""
    if real.failed:
        return f"The real page failed twice: {real.failed}."
    at = len(real.pages)
    if real.unmatched:
        found = f"For real, step {at + 1} acts on an element that is not there, which is worth 0."
    elif real.over:
        found = f"For real it was over after step {at} of {steps}, and the page paid {real.reward:g}."
    else:
        found = f"For real it was not over{'' if one.row['terminated'] else ', either'}, which is worth 0."
    where = "No page differs." if one.left == "never" else f"It left reality at step {one.left}."
    return f"{found} {where}"


# ---- 3. a group --------------------------------------------------------------------------------------------


FATES = "taught something", "all succeeded", "all failed", "all dropped"


@dataclass
class Group:
    """The dreams from one start, of one update."""

    dreams: list[Dream]

    @property
    def own(self) -> list[Dream]:
        return [one for one in self.dreams if not one.row["expert"]]

    @property
    def fate(self) -> str:
        """One of FATES: it taught something, or why it did not."""
        rewards = [one.row["reward"] for one in self.dreams if not one.row["dropped"]]
        if self.dreams[0].row["taught"]:
            return FATES[0]
        return FATES[3] if not rewards else FATES[2] if not rewards[0] else FATES[1]

    @property
    def parted(self) -> dict:
        return parting(self.own)

    @property
    def story(self) -> str:
        """Where it parts first, and by whom, in a sentence."""
        n, tree = len(self.own), self.parted
        if n < 2 or not tree["branches"]:
            return f"All {n} dreams are alike: equal actions, equal pages." if n > 1 else ""
        kinds, step = len(tree["branches"]), tree["step"]
        if tree["by"] == "agent":
            return f"The agent parted them first: at step {step} it did {kinds} things on an equal page."
        return f"The dice parted them first: at step {step} an equal action led to {kinds} pages."


def parting(dreams: Sequence[Dream], at: int = 0) -> dict:
    """Where dreams part: {"path", what they have in common from event `at` on; "by", "agent" or "dice", and
    "step", where they part then; "branches", one such dict each; "dreams", those that end together here}.

    Events take turns: an action of the agent, an answer of the world model.
    """
    path = list[dict]()
    while True:
        kinds: dict = {}
        for one in dreams:
            kinds.setdefault(event(one, at)[0], []).append(one)
        if len(kinds) > 1:
            return {"path": path, "by": "dice" if at % 2 else "agent", "step": at // 2 + 1, "dreams": [],
                    "branches": [parting(some, at) for some in kinds.values()]}
        if not dreams or None in kinds:
            return {"path": path, "by": "", "step": 0, "dreams": list(dreams), "branches": []}
        path.append(event(dreams[0], at)[1])
        at += 1


def event(one: Dream, at: int) -> tuple[Any, dict]:
    """(what is compared, what is shown) of event `at`; (None, {}) behind the last."""
    step, steps = at // 2, one.row["steps"]
    if step >= len(steps):
        wrote = one.row["no_action"] and step == len(steps) and at % 2 == 0
        return ("no action", {"text": "a text that is no action", "by": "agent"}) if wrote else (None, {})
    if at % 2 == 0:
        return steps[step]["action"], {"text": in_words(one, step), "by": "agent"}
    told, pages = steps[step], one.pages
    over, unknown = told.get("over", False), told.get("unknown", "")
    text = "the page stays" if pages[step] == pages[step + 1] else told.get("delta") or "another page"
    text = f"no page: {unknown}" if unknown else "; ".join(text.split("\n")) + ", and it is over" * over
    return (pages[step + 1], over, unknown), {"text": cut(text, 160), "by": "dice"}


def in_words(one: Dream, step: int) -> str:
    """An action and what its element is called."""
    done = one.trajectory.steps[step]
    name = data.label(done.page, done.action.bid) if done.action.bid else ""
    return cut(f"{done.action} ({name})" if name else str(done.action), 200)
