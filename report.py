"""A page to look at: what a run dreamed, or what an agent did on real pages.

    python report.py runs/laptop/dream.run      # writes report.html there; train.py does so as it goes
    python report.py dream.jsonl                # tries of evaluate.py (--keep-pages shows their pages)

It is one file, opened from disk; it loads nothing and runs no script. Pages and what models write are
strangers' texts: Jinja2 escapes them, and by the Content-Security-Policy a browser takes nothing but the
template's own style.
"""

import base64
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import jinja2

import dream
from config import UserError
from policy import Rollout

TEMPLATE = Path(__file__).with_suffix(".html")
UPDATES = 40  # of a run are kept at most, spread evenly, and the last
LINES, LONGEST = 400, 300  # of a page that are compared; characters of a line

# ---- what a run keeps --------------------------------------------------------------------------------------

def keep(file: IO[str], n: int, updates: int, batch: dream.Batch, decode: Callable[[list[int]], Any]) -> None:
    """Append the rollouts of update n of `updates` to dreams.jsonl, a line each. `decode`: ids to text."""
    if n % math.ceil(updates / UPDATES) and n + 1 < updates:
        return
    size = len(batch.rollouts) // len(batch.signals)
    for k, done in enumerate(batch.rollouts):
        row = {"update": n, "group": k // size, "signal": batch.signals[k // size][1]}
        file.write(json.dumps(row | as_row(done, decode)) + "\n")
    file.flush()


def as_row(done: Rollout, decode: Callable[[list[int]], Any]) -> dict:
    """A rollout as data."""
    said: Any = done.verdict
    end = (f"Discarded, so that nothing is learned from it: {done.discarded}." if done.discarded else
           "A recorded success in a dream's place." if done.expert else
           f"Its last text is no action: {decode(done.turns[-1].completion_ids)[:300]}" if done.no_action else
           "Its steps ran out." if done.truncated else
           f"The judge said {'YES' if said.success else 'NO'} (margin {said.margin:+.2f})." if said else
           f"The real page paid {done.reward:g}.")
    steps = [{"page": step.page, "thought": step.thought, "action": str(step.action), "error": step.error}
             for step in done.steps]
    for step, prediction in zip(steps, done.predictions):
        step |= {name: getattr(prediction, name) for name in ("rationale", "delta", "over") if prediction}
    return {"task": done.start.task, "seed": done.start.seed, "goal": done.start.goal, "steps": steps,
            "final_page": done.final_page, "reward": done.reward, "end": end, "expert": done.expert,
            "real": done.real, "discarded": done.discarded, "reasons": said.text if said else ""}


def read(file: Path) -> list[dict]:
    """The objects of a file's lines; a last one that a kill cut off does not count."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


# ---- a page with what changed ------------------------------------------------------------------------------

def marked(before: str, after: str) -> list[tuple[str, str]]:
    """The lines that changed from one page to the next, with their neighbours: [(sign, line)], sign "-" gone,
    "+" new, " " equal, "@" some are left out. A page is hostile: of a long one the beginning is compared.

    >>> marked("[1] link 'a'\\n[2] link 'b'", "[1] link 'a'\\n[2] link 'c'")
    [(' ', "[1] link 'a'"), ('-', "[2] link 'b'"), ('+', "[2] link 'c'")]
    """
    old, new = ([line[:LONGEST] for line in page.split("\n")[:LINES]] for page in (before, after))
    lines = [*unified_diff(old, new, n=2, lineterm="")]
    return [(line[0], line[1:]) for line in lines[3:]]  # after a diff's head


# ---- curves ------------------------------------------------------------------------------------------------

# Where dream success rises alone, the judge is being fooled.
SUCCESS = {"real_success": "real pages, dev seeds (greedy)",
           "dream_success": "dreams, by the judge (sampled)",
           "real_train_success": "real pages, learned from (sampled)"}


def curve(title: str, rows: Sequence[dict], names: dict[str, str], top: float = 1) -> tuple[str, list[dict]]:
    """What the template draws, in a plot of 300 by 100: a line for each of `names` that the rows have."""
    last, lines = max([row["update"] for row in rows] + [1]), []
    for name, label in names.items():
        if points := [(row["update"], row[name]) for row in rows if name in row]:
            at = [f"{300 * x / last:.1f},{100 - 100 * min(1, y / top):.1f}" for x, y in points]
            lines.append({"label": label, "now": f"{points[-1][1]:.3g}", "points": " ".join(at)})
    return f"{title}, 0 to {top:g}", lines


# ---- the pages ---------------------------------------------------------------------------------------------

def of_run(folder: Path, most: int) -> str:
    """The page of a run, OUT.run, with its `most` newest groups."""
    metrics, rows = read(folder / "metrics.jsonl"), read(folder / "dreams.jsonl")
    if not metrics:
        raise UserError(f"{folder} holds no metrics.jsonl: give a run's folder, such as "
                        "runs/laptop/dream.run, or a file of tries")
    groups = [list(group) for _, group in groupby(rows, lambda row: (row["update"], row["group"]))]
    why = Counter(":".join(row["discarded"].split(":")[:2]) for row in rows if row["discarded"])
    most_learned = max(1, *(row.get("learned", 1) for row in metrics))
    return render(folder.resolve().name, groups=groups[::-1][:most], count=len(groups), why=why.most_common(),
                  curves=[curve("Success", metrics, SUCCESS),
                          curve("Rollouts learned from", metrics, {"learned": "an update"}, most_learned),
                          curve("Clipped share", metrics, {"clip_frac": "an update"})])


def of_tries(file: Path) -> str:
    """The page of a file of evaluate.py's."""
    head, *tries = read(file) or [{}]
    if "made" not in head:
        raise UserError(f"{file} holds no tries of evaluate.py, and is no folder of a run")
    for row in tries:
        none = [""] * (len(row["actions"]) + 1)  # without --keep-pages
        pages, *texts = (row.get(name, none) for name in ("pages", "thoughts", "errors", "actions"))
        row["steps"] = [dict(zip(("page", "thought", "error", "action"), of)) for of in zip(pages, *texts)]
        row |= {"final_page": pages[-1], "discarded": row["failed"],
                "end": f"Seed {row['seed']}. Ended by: {row['failed'] or row['end']}."}
    return render(file.name, tries=tries)


def render(title: str, **given) -> str:
    """The page; its policy names the template's own style by its hash."""
    source = TEMPLATE.read_text()
    style = re.findall("<style>(.*?)</style>", source, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    jinja = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined, trim_blocks=True,
                               lstrip_blocks=True)
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return jinja.from_string(source).render(title=title, policy=policy, marked=marked, **given)


def write(what: Path, most: int = 48) -> Path:
    """Write the page of a run's folder, or of a file of tries. Returns where it is."""
    text = of_run(what, most) if what.is_dir() else of_tries(what)
    out = what / "report.html" if what.is_dir() else what.with_suffix(".html")
    out.with_suffix(".tmp").write_bytes(text.encode("utf-8", "replace"))  # a page may hold half a surrogate
    out.with_suffix(".tmp").replace(out)
    return out


if __name__ == "__main__":
    try:
        print(f"the page: {write(Path(sys.argv[1] if len(sys.argv) > 1 else 'runs/laptop/dream.run'))}")
    except ValueError as error:  # a UserError, or another kind of file
        sys.exit(f"report.py: {' '.join(sys.argv[1:])}: {error}")
