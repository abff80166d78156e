"""A page to look at: what a run dreamed, beside what a real browser shows; and an agent's tries.

    python report.py runs/laptop/dream.run             # the page of a run; train.py writes it at each look
    python report.py runs/laptop/dream.run --replay    # beside each dream what Chromium shows for its actions
    python report.py tries.jsonl                     # what evaluate.py --benchmark wrote (worlds/tries.py)
    python report.py before.jsonl after.jsonl        # two such files, try by try

It is one file (of a run report.html), opened from disk; it loads nothing. What stands on pages, and what
models write, are strangers' texts. Jinja2 escapes all of it, no markup has a handler or a style of its own,
and by the page's Content-Security-Policy a browser runs this template's script alone, which it knows by its
hash.

What is told of a dream: stories.py.
"""

import base64
import functools
import hashlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path

import jinja2
import tyro

import data
import fidelity
import measure
from stories import FATES, FILE, Dream, Group, Row, cut, ending, in_words, read_dream, truth
from worlds import tries
from worlds.miniwob import Browser

TEMPLATE = Path(__file__).with_suffix(".html")

# ---- 1. beside reality -------------------------------------------------------------------------------------


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


# ---- 2. a page with what changed ---------------------------------------------------------------------------

PIECES = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|, |[^\s,'"]+|.""", re.DOTALL)
AROUND, LINES, LONGEST = 3, 60, 400  # lines kept around a change; lines of a page; characters of a line
SAME = 100_000  # pairs of equal lines that are compared
Line = tuple[str, list[tuple[str, str]]]  # its sign, and its pieces with theirs


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
    for tag, a, b, c, d in opcodes(old, new):
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


def opcodes(old: list[str], new: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """difflib's. Where lines repeat so often that it would take minutes (a page is hostile), all between the
    first change and the last is one."""
    counts = Counter(new)
    if sum(counts[line] for line in old) <= SAME:
        return SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    first = len(os.path.commonprefix([old, new]))
    last = len(os.path.commonprefix([old[first:][::-1], new[first:][::-1]]))
    a, b = len(old) - last, len(new) - last
    return [("equal", 0, first, 0, first), ("replace", first, a, first, b),
            ("equal", a, len(old), b, len(new))]


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


# ---- 3. curves ---------------------------------------------------------------------------------------------

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
    of = functools.partial(measure.series, logged)
    causes = Counter(cause for row in logged for cause in row.get("drops", ()))
    dropped = {cause: [(row["update"], row["drops"].get(cause, 0)) for row in logged if "drops" in row]
               for cause, _ in causes.most_common(4)}
    return [
        plot("Success", {"on real pages, greedy": of("real_success"),
                         "in dreams, mean of five updates": of("dream_success", 5),
                         "learned on real pages": of("real_train_success", 5)}, 1.0),
        plot("Trajectories learned from", {"of an update": of("kept")}),
        plot("Share of the groups that taught nothing", {"of an update": of("dropped_groups")}, 1.0),
        plot("Clipped share", {"clip_frac": of("clip_frac")}),
        plot("Mean |log s|, before the clip", {"abs_log_ratio": of("abs_log_ratio")}),
        plot("Dreams dropped, by cause", dropped)]


# ---- 4. the page of a run ----------------------------------------------------------------------------------


def of_run(folder: Path, most: int = 48, real: bool = False) -> str:
    """The page of a run, OUT.run. `most` groups are shown, spread evenly over the run; 0 shows all. `real`:
    they are done again in a real browser. Raises ValueError where no run is."""
    notes = list[str]()
    if not (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} holds no metrics.jsonl: give the folder OUT.run of a run of train.py, "
                         "such as runs/laptop/dream.run, or a file of tries")
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
                  wrong=wrong(groups),
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


def by_task(kept: Sequence[list[Dream]]) -> list[list]:
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
            "unmatched": sum(bool(one.real and one.real.unmatched) for one in done),
            "pages": [(step, equal[step], n) for step, n in sorted(compared.items())]}


def wrong(groups: Sequence[Group]) -> list[tuple[str, int, int]]:
    """(fate, groups, in how many a dream's reward is not the one deserved), of groups done for real: a group
    that all failed rightly taught nothing because of the agent, the others because of the judge."""
    counts: dict[str, Counter] = {}
    for group in groups:
        known = [one.judged for one in group.own if one.judged != "not known"]
        if known:
            counts.setdefault(group.fate, Counter())["wrongly" in known] += 1
    return [(fate, counts[fate].total(), counts[fate][True]) for fate in FATES if fate in counts]


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


# ---- 5. the page of tries ----------------------------------------------------------------------------------


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
    pairs = [{"task": task, "seed": seed, "rows": (both := [side.get((task, seed)) for side in sides]),
              "outcome": " / ".join(map(worth, both)),
              "end": " / ".join(row["end"] if row else "-" for row in both)} for task, seed in keys]
    names, outcomes = [file.name for file in files], Counter(pair["outcome"] for pair in pairs)
    return render(" and ".join(names), "tries", notes, files=names, pairs=pairs, difference=difference(sides),
                  totals=[tries.totals(list(side.values())) for side in sides],
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
    first, second = ([side[key] for key in common] for side in judged)
    return *measure.paired_bootstrap(first, second), len(common)


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


# ---- 6. writing it -----------------------------------------------------------------------------------------


def render(title: str, kind: str, notes: list[str], **given) -> str:
    """The page. The policy names the template's own script and style by their hashes."""
    source = TEMPLATE.read_text()
    own = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", source, re.DOTALL)[0] for tag in ("style", "script")}
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


def of_training(folder: Path) -> str:
    """Write the page of a run that goes on, with the few groups that are quickly compared. Returns where it
    is, or why it is not: a page ends no run."""
    try:
        return str(write([folder], most=8))
    except (ValueError, OSError, jinja2.TemplateError) as error:
        return f"none, for it cannot be written ({type(error).__name__}: {error})"


# ---- the command -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Write a page to look at."""

    what: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs/laptop/dream.run"),)
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
