"""A page to look at: what a run dreamed, beside what a real browser shows; and an agent's tries.

    python report.py runs/tiny/dream.run             # the page of a run; train.py writes it at each look
    python report.py runs/tiny/dream.run --replay    # beside each dream what Chromium shows for its actions
    python report.py tries.jsonl                     # what evaluate.py --benchmark wrote (worlds/tries.py)
    python report.py before.jsonl after.jsonl        # two such files, try by try

It is one file (report.html), opened from disk; it loads nothing. What stands on pages, and what models write,
are strangers' texts. Jinja2 escapes all of it, no markup has a handler or a style of its own, and by the
page's Content-Security-Policy a browser runs this template's script alone, which it knows by its hash.

A run keeps its dreams in dreams.jsonl: a line a dream, the first of equal experts of a group alone. Kept are
all updates of a run of UPDATES, else as many, spread evenly, and the last; of an update as many groups as fit
into BYTES, and at least one.

Words. Deserved is what the real page pays for the same actions from the same start. A dream leaves reality
at the first step whose page or end is not the real one, or whose element is not on the real page. Two dreams
of a group are parted by the agent where it does different things on an equal page, and by the dice where the
world model gives different pages, or an end and none, for an equal action.
"""

import base64
import hashlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import jinja2
import tyro

import a11y
import data
import dream
import fidelity
import measure
from policy import TokenTrajectory
from worlds.miniwob import Browser

TEMPLATE = Path(__file__).with_suffix(".html")
FILE = "dreams.jsonl"
UPDATES, BYTES = 40, 1_000_000  # a run of the laptop has some 10 MB, a large one 40 MB at most
Row = dict[str, Any]

# ---- 1. what a run keeps -----------------------------------------------------------------------------------


def keep(file: IO[str], n: int, updates: int, batch: dream.Batch, decode: Callable[[list[int]], str]) -> None:
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


def as_row(trajectory: TokenTrajectory, decode: Callable[[list[int]], str]) -> Row:
    """A dream as data. A page is written out only where the delta of its step does not lead to it."""
    start, verdict, steps = trajectory.start, trajectory.verdict, []
    pages = [*(step.page for step in trajectory.steps), trajectory.final_page][1:]  # after each step
    answers = trajectory.answers or [None] * len(trajectory.steps)
    for step, answer, page in zip(trajectory.steps, answers, pages, strict=True):
        told = {"thought": step.thought, "action": str(step.action), "error": step.error}
        if answer is not None:
            told |= {name: getattr(answer, name) for name in ("reason", "delta", "over", "unknown")}
        steps.append(told if after(step.page, told) == page else told | {"page": page})
    said: Any = verdict and {"success": verdict.success, "text": verdict.text, "unknown": verdict.unknown,
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
    found.answers = [None] * len(found.steps)  # its own answers stay in the row
    return found


def replay(dreams: Sequence[Dream]) -> str:
    """Do the dreams again in a real Chromium. Returns what to say of it where it could not be done."""
    some = [one for one in dreams if one.trajectory.steps and not one.trajectory.expert
            and not one.trajectory.real]
    known = [one for one in some if Browser.knows(one.trajectory.start.task)]
    try:
        with Browser() as web:
            for one, real in zip(known, fidelity.replay(web, [one.trajectory for one in known])):
                one.real = real
    except OSError as error:
        return f"Nothing was done for real: {error}."
    left = len(some) - len(known)
    return f"{left} dreams were not done for real: worlds/miniwob.py does not know their tasks." * (left > 0)


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
                    "branches": [branch(some, at) for some in kinds.values()]}
        if not dreams or None in kinds:
            return {"path": path, "by": "", "step": 0, "dreams": list(dreams), "branches": []}
        path.append(event(dreams[0], at)[1])
        at += 1


def branch(dreams: Sequence[Dream], at: int) -> dict:
    """parting() of dreams whose event `at` is equal, and is told."""
    if event(dreams[0], at)[0] is None:
        return parting(dreams, at)
    tree = parting(dreams, at + 1)
    return tree | {"path": [event(dreams[0], at)[1], *tree["path"]]}


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


# ---- 4. a page with what changed ---------------------------------------------------------------------------

PIECES = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|, |[^\s,'"]+|.""", re.DOTALL)
AROUND, LINES, LONGEST = 3, 60, 400  # lines kept around a change; lines of a page; characters of a line
Line = tuple[str, list[tuple[str, str]]]  # its sign, and its pieces with theirs


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more)"


def marked(before: str | None, page: str) -> list[Line]:
    r"""The lines of a page with what changed since `before`; what is equal is folded up. Signs: + new,
    - gone, ~ changed, "" equal; "..." stands for folded lines.

    >>> marked("[1] link 'a', focused\n[2] link 'b'", "[1] link 'a'\n[2] link 'b'\n[3] link 'c'")[0]
    ('~', [('', "[1] link 'a'"), ('-', ', focused')])
    >>> [sign for sign, _ in marked("[2] link 'b'", "[2] link 'b'\n[3] link 'c'")]
    ['', '+']
    """
    new = [shown(line) for line in page.split("\n")[:3000]]
    if before is None:
        return folded([("", [("", line)]) for line in new], everything=True)
    old, lines = [shown(line) for line in before.split("\n")[:3000]], list[Line]()
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [("", [("", line)]) for line in new[c:d]]
            continue
        was: dict[str, list[str]] = {}
        for line in old[a:b]:
            was.setdefault(head(line), []).append(line)
        pairs = [(was.get(head(line)) and was[head(line)].pop(0), line) for line in new[c:d]]
        lines += [("-", [("", line)]) for left in was.values() for line in left]
        lines += [("~", pieces(had, line)) if had else ("+", [("", line)]) for had, line in pairs]
    return folded(lines)


def shown(line: str) -> str:
    """A line with spaces for tabs, not too deep and not too long."""
    text = line.lstrip("\t")
    return "  " * min(len(line) - len(text), 12) + cut(text, LONGEST)


def head(line: str) -> str:
    """What tells a line from others: its id, else its role."""
    return re.split(r"[\s,]", line.strip(), maxsplit=1)[0]


def pieces(old: str, new: str) -> list[tuple[str, str]]:
    """A line that changed: [(sign, text)], the sign "" for what is equal."""
    a, b, found = PIECES.findall(old), PIECES.findall(new), list[tuple[str, str]]()
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        parts = [("", b[k:m])] if tag == "equal" else [("-", a[i:j]), ("+", b[k:m])]
        found += [(sign, "".join(part)) for sign, part in parts if part]
    return found


def folded(lines: list[Line], everything: bool = False) -> list[Line]:
    """Without what is far from every change, where a page is long."""
    near = {k + far for k, (sign, _) in enumerate(lines) if sign for far in range(-AROUND, AROUND + 1)}
    near = set(range(LINES)) if everything or len(lines) <= 4 * AROUND else set(sorted(near)[: 3 * LINES])
    found = list[Line]()
    for stays, some in groupby(range(len(lines)), key=near.__contains__):
        part = [lines[k] for k in some]
        found += part if stays else [("...", [("", f"{len(part)} lines that "
                                               f"{'follow' if everything else 'did not change'}")])]
    return found


# ---- 5. curves ---------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 300, 120  # of a plot, in its own units


def plot(name: str, lines: dict[str, list[tuple[float, float]]], top: float = 0.0) -> dict:
    """What the template draws: {"name", "top", "last", "lines": [{"label", "kind", "now", "points"}]}, in a
    plot of WIDTH by HEIGHT. Lines without a point are left out. `top`: the value at the upper edge; 0: the
    largest."""
    lines = {label: points for label, points in lines.items() if points}
    values = [value for points in lines.values() for _, value in points]
    top = top or max(values, default=0.0) or 1.0
    last = max((update for points in lines.values() for update, _ in points), default=1)
    place = lambda x, y: (round(WIDTH * x / max(1, last), 1), round(HEIGHT * (1 - min(y / top, 1)), 1))
    return {"name": name, "top": f"{top:.3g}", "last": last, "lines": [
        {"label": label, "kind": kind, "now": f"{points[-1][1]:.3g}",
         "points": [place(*point) for point in points]}
        for kind, (label, points) in enumerate(lines.items())]}


def curves(logged: Sequence[Row]) -> list[dict]:
    """The plots of a run's metrics.jsonl."""
    def of(name: str) -> list[tuple[float, float]]:
        return [(row["update"], row[name]) for row in logged if name in row]

    def smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        last = [points[max(0, k - 4) : k + 1] for k in range(len(points))]
        return [(some[-1][0], sum(value for _, value in some) / len(some)) for some in last]

    causes = Counter(cause for row in logged for cause in row.get("drops", ()))
    dropped = {cause: [(row["update"], row["drops"].get(cause, 0)) for row in logged if "drops" in row]
               for cause, _ in causes.most_common(4)}
    return [
        plot("Success", {"on real pages, greedy": of("real_success"),
                         "in dreams, mean of five updates": smooth(of("dream_success")),
                         "learned on real pages": smooth(of("real_train_success"))}, 1.0),
        plot("Trajectories learned from", {"of an update": of("kept")}),
        plot("Share of the groups that taught nothing", {"of an update": of("dropped_groups")}, 1.0),
        plot("Clipped share", {"clip_frac": of("clip_frac")}),
        plot("Mean |log s|, before the clip", {"abs_log_ratio": of("abs_log_ratio")}),
        plot("Dreams dropped, by cause", dropped)]


# ---- 6. the page of a run ----------------------------------------------------------------------------------


def of_run(folder: Path, most: int = 48, real: bool = False) -> str:
    """The page of a run, OUT.run. `most` groups are shown, spread evenly over the run; 0 shows all. `real`:
    they are done again in a real browser. Raises ValueError where no run is."""
    notes = list[str]()
    if not (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} holds no metrics.jsonl: give the folder OUT.run of a run of train.py, "
                         "such as runs/tiny/dream.run, or a file of tries")
    logged = read_lines(folder / "metrics.jsonl", notes)
    kept = by_group(read_lines(folder / FILE, notes), notes)
    setting = folder / "config.json"
    apart = max(1.0, len(kept) / (most or math.inf))
    groups = [Group(kept[-1 - int(k * apart)]) for k in range(int(len(kept) / apart))]  # the newest first
    if len(groups) < len(kept):
        notes.append(f"{len(groups)} groups of the {len(kept)} that were kept are shown, spread evenly over "
                     "the run. --groups 0 shows all.")
    dreams = [one for group in groups for one in group.own]
    if real:
        notes.append(replay(dreams))
    elif dreams:
        notes.append("Nothing was done for real. --replay shows beside each dream what a real browser shows "
                     "for the same actions, and what reward they deserve.")
    return render(folder.resolve().name, "run", notes, logged=logged, curves=curves(logged),
                  table=by_task(kept), groups=groups, dreams=dreams, figures=figures(dreams),
                  setting=setting.read_text() if setting.exists() else "")


def read_lines(file: Path, notes: list[str]) -> list[Row]:
    """The objects of a file's lines. What is missing or damaged is added to `notes`. A last line without an
    end is being written, or a kill cut it."""
    if not file.exists():
        notes.append(f"There is no {file.name}: the run has not got so far, or is an old one.")
        return []
    lines, _, rest = file.read_bytes().rpartition(b"\n")
    rows, damaged = list[Row](), 0
    for line in filter(None, lines.split(b"\n")):
        try:
            rows.append(data.as_object(line))
        except data.DAMAGED:
            damaged += 1
    if damaged or rest:
        notes.append(f"{file.name}: {damaged + bool(rest)} line(s) cannot be read, and are left out.")
    return rows


def by_group(rows: Sequence[Row], notes: list[str]) -> list[list[Dream]]:
    """The groups that were kept, in their order, of the rows that can be read."""
    dreams, wrong = list[Dream](), list[str]()
    for row in rows:
        try:
            dreams.append(Dream(row, read_dream(row)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong.append(repr(error))
    if wrong:
        notes.append(f"{FILE}: {len(wrong)} line(s) are no dreams, so left out; the first: {wrong[0]:.200}")
    return [list(some) for _, some in groupby(dreams, lambda one: (one.row["update"], one.row["group"]))]


def by_task(kept: Sequence[Sequence[Dream]]) -> list[list]:
    """The table of what became of groups: [task, groups, how many of each of FATES]; last all."""
    fates: dict[str, Counter] = {}
    for group in kept:
        fates.setdefault(group[0].row["task"], Counter())[Group(group).fate] += 1
    total = sum(fates.values(), Counter())
    return [[task, counts.total(), *(counts[fate] for fate in FATES)]
            for task, counts in [*sorted(fates.items()), ("all", total)]]


def figures(dreams: Sequence[Dream]) -> dict:
    """Of the dreams that were done for real: what the judge's precision and recall are counted from, with
    their intervals, and the pages equal to the real ones by step, [(step, equal, n)]."""
    done = [one for one in dreams if one.real and not one.real.failed and not one.row["dropped"]]
    given, paid = [one.row["reward"] == 1 for one in done], [one.deserved == 1 for one in done]
    both = sum(a and b for a, b in zip(given, paid))
    compared = Counter(step for one in done for step in range(1, len(one.equal) + 1))
    equal = Counter(step for one in done for step, same in enumerate(one.equal, 1) if same)
    return {"n": len(done), "given": sum(given), "paid": sum(paid), "both": both,
            "precision": measure.wilson(both, sum(given)), "recall": measure.wilson(both, sum(paid)),
            "unmatched": sum(one.real.unmatched for one in done),
            "pages": [(step, equal[step], n) for step, n in sorted(compared.items())]}


def steps_of(one: Dream) -> list[dict]:
    """The steps of a dream, as the template shows them."""
    steps, pages, real = list[dict](), one.pages, one.real
    for k, told in enumerate(one.row["steps"]):
        beside: dict = {}
        if real and k < len(real.pages):
            beside = {"same": one.equal[k], "error": real.errors[k], "none": "",
                      "page": marked(pages[k + 1], real.pages[k]),
                      "over": real.over and k + 1 == len(real.pages)}
        elif real and not real.failed:
            gone = real.unmatched and k == len(real.pages)
            beside = {"none": "There is no such element on the real page." if gone else
                      "The browser did not get here.", "error": "", "over": False}
        steps.append({"reason": "", "delta": "", "unknown": "", "over": False, **told, "number": k + 1,
                      "action": in_words(one, k), "left": one.left == str(k + 1), "real": beside,
                      "page": marked(pages[k], pages[k + 1])})
    return steps


# ---- 7. the page of tries ----------------------------------------------------------------------------------


def of_tries(files: Sequence[Path]) -> str:
    """The page of a file of tries, or of two, paired. Raises ValueError for files that hold none."""
    notes, sides = list[str](), list[dict[tuple[str, int], Row]]()
    for file in files:
        head, *rows = read_lines(file, notes) or [{}]
        if "made" not in head:
            raise ValueError(f"{file} holds no tries: give what evaluate.py --benchmark NAME --json FILE "
                             "wrote, or the folder OUT.run of a run")
        sides.append({(row["task"], row["seed"]): row for row in rows})
    keys = list(dict.fromkeys(key for side in sides for key in side))
    pairs = [{"task": task, "seed": seed, "rows": (rows := [side.get((task, seed)) for side in sides]),
              "outcome": " / ".join(map(worth, rows)),
              "end": " / ".join(row["end"] if row else "-" for row in rows)} for task, seed in keys]
    names, outcomes = [file.name for file in files], Counter(pair["outcome"] for pair in pairs)
    return render(" and ".join(names), "tries", notes, files=names, pairs=pairs, difference=difference(sides),
                  totals=[measure.totals(list(side.values())) for side in sides],
                  outcomes=outcomes.most_common())


def worth(row: Row | None) -> str:
    """What came of a try, in a word."""
    if row is None:
        return "not tried"
    if row["failed"]:
        return "page failed"
    return "not judged" if row["reward"] is None else "success" if row["reward"] == 1 else "failure"


def difference(sides: Sequence[dict]) -> tuple | None:
    """(mean of second minus first, its 95 % interval, n) over the tries that were judged in both."""
    judged = [{key: row["reward"] for key, row in side.items()
               if not row["failed"] and row["reward"] is not None} for side in sides]
    common = [key for key in judged[0] if key in judged[-1]]
    if len(sides) < 2 or not common:
        return None
    return *measure.paired_bootstrap(*([side[key] for key in common] for side in judged)), len(common)


def steps_of_try(row: Row) -> list[dict]:
    """The steps of a try, as the template shows them. Pages, thoughts and errors are there where they were
    kept."""
    n = len(row["actions"])
    pages, thoughts, errors = row.get("pages", []), row.get("thoughts", [""] * n), row.get("errors", [""] * n)
    return [{"number": k + 1, "action": cut(action, 200), "thought": thought, "error": error, "reason": "",
             "delta": "", "unknown": "", "over": False, "left": False, "real": {},
             "page": marked(pages[k], pages[k + 1]) if pages else []}
            for k, (action, thought, error) in enumerate(zip(row["actions"], thoughts, errors))]


def pictures(row: Row) -> list[str]:
    """The screenshots of a try, PNG in base64, where they were kept."""
    return [shot for shot in row.get("screenshots", ()) if re.fullmatch("[A-Za-z0-9+/]+=*", shot)]


# ---- 8. writing it -----------------------------------------------------------------------------------------


def render(title: str, kind: str, notes: list[str], **given) -> str:
    """The page. The policy names the template's own script and style by their hashes."""
    source = TEMPLATE.read_text()
    own = {tag: re.search(f"<{tag}>(.*?)</{tag}>", source, re.DOTALL)[1] for tag in ("style", "script")}
    hashes = {tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
              for tag, text in own.items()}
    policy = (f"default-src 'none'; script-src 'sha256-{hashes['script']}'; "
              f"style-src 'sha256-{hashes['style']}'; img-src data:; base-uri 'none'; form-action 'none'")
    jinja = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                               lstrip_blocks=True)
    jinja.globals |= {"cut": cut, "marked": marked, "steps_of": steps_of, "steps_of_try": steps_of_try,
                      "pictures": pictures, "ending": ending, "truth": truth, "worth": worth, "FATES": FATES,
                      "WIDTH": WIDTH, "HEIGHT": HEIGHT}
    return jinja.from_string(source).render(title=title, kind=kind, notes=[note for note in notes if note],
                                            policy=policy, now=f"{datetime.now():%Y-%m-%d %H:%M}", **given)


def write(what: Sequence[Path], out: Path | None = None, most: int = 48, real: bool = False) -> Path:
    """Write the page of a run's folder, or of one file of tries or two. Returns where it is."""
    folder, beside = what[0], what[0].parent / f"{what[0].name}.run"
    if beside.is_dir() and not (folder / "metrics.jsonl").exists():  # OUT means OUT.run
        folder = beside
    if folder.is_dir():
        if len(what) > 1:
            raise ValueError(f"{folder} is a run, with a page of its own; only files of tries are paired")
        text, out = of_run(folder, most, real), out or folder / "report.html"
    else:
        text = of_tries(what)
        out = out or what[0].with_name("-".join(file.stem for file in what) + ".html")
    temporary = out.with_name(f"{out.name}.tmp")
    temporary.write_bytes(text.encode("utf-8", "replace"))  # half of a surrogate pair may stand on a page
    os.replace(temporary, out)
    return out


# ---- the command -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Write a page to look at."""

    what: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs/tiny/dream.run"),)
    """The folder OUT.run of a run; or a file of tries; or two, to be paired."""
    replay: bool = False
    """Do the dreams that are shown again in a real browser (MiniWoB++)."""
    groups: int = 48
    """How many groups are shown, spread evenly over the run; 0 shows all."""
    out: Path | None = None
    """File to write. By default it stands in the run's folder, or beside the first file."""

    def __post_init__(self):
        data.check_counts(0, groups=self.groups)
        if not 1 <= len(self.what) <= 2:
            raise ValueError(f"{len(self.what)} paths: give a run's folder, or one file of tries, or two")


def main():
    try:
        config = tyro.cli(Config, description=__doc__)
        print(f"the page: {write(config.what, config.out, config.groups, config.replay)}")
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")


if __name__ == "__main__":
    main()
