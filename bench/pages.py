"""Which pages can tell agents apart? The first part of the rule, which needs no agent.

    python -m bench.pages                              # what results/pages.json lacks; goes on where it was
    python -m bench.pages --tasks click-menu our-list  # these anew
    python -m bench.pages --table                      # what was found

The rule, written before any agent is trained. A page is scored if

  1. a scripted player (tests/players.py), which sees our text, gives our actions and does what the goal says,
     wins at least 18 of 20 dev seeds within the horizon;
  2. page and action determine the next page: nothing is drawn behind the reset;
  3. every variant of its goal is among the recorded successes;
  4. the SFT agent of seed 0 has between .1 and .9 there (dev, n 40), looked at before any dream is trained.

At most five pages are of one click. read-table and ask-table, one page of HTML, count as one. TRANSFER is
never trained on. This file looks at 1 and 2, on every page of MiniWoB++, on ask-table and on OURS. 3 and 4
have to wait for recordings and for an SFT agent.

Of each page that has a player: wins, steps of a won try, and what can be seen of the second condition,
    again       of `twice` seeds that were played twice, how many had the same texts
    draws       Math.random calls behind the reset, a try: the page's dice
    met         (page, action) pairs that two seeds or more met; `differ`: of these, how many led to unlike
                pages
    unforeseen  words a step that stood nowhere before (goal, earlier pages, action) and are not the same on
                most seeds: what was there but hidden, behind a tab, in a folder. No world model can know
                them; it has to dream something likely.
"""

import json
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

import data
from tests import players
from worlds.miniwob import ALL_TASKS, OURS, Browser

NEEDED = 18  # of 20
LONGER = 14
LONG = ("book-flight", "book-flight-nodelay", "choose-date", "choose-date-easy", "choose-date-medium",
        "choose-date-nodelay", "click-checkboxes-large", "email-inbox-delete", "email-inbox-important",
        "form-sequence", "form-sequence-2", "form-sequence-3", "our-form", "our-list", "phone-book",
        "search-engine", "social-media", "social-media-all", "social-media-some", "use-slider",
        "use-slider-2")
"""Pages whose horizon is LONGER; that of the others is MiniWoB++'s (data.HORIZONS)."""

TRANSFER = ("click-button", "click-test", "click-test-2", "click-test-transfer", "click-dialog",
            "click-dialog-2", "click-collapsible", "click-menu", "use-autocomplete", "enter-text-2")
"""Never trained on. click-link was named: it has no line to act on, and click-menu is the next by alphabet
that has."""

KNOWN = {
    "scroll-text-2": "won by writing over the textarea",
    "sign-agreement": "won by the variant that asks for a button, else by writing over the textarea",
    "stock-market": "a blind click",
    "generate-number": "the page's dice",
    "buy-ticket": "one blind click in six wins",
    "search-engine": "no recorded win needed its second page",
    **dict.fromkeys(("click-widget", "unicode-test", "click-tab", "click-menu", "focus-text-2"),
                    "one click"),
}
"""Tried before: they do not serve, whatever a player does there."""

NO_LINE = "what is to be clicked has no line with an id"
DRAG, POINT, PICTURE = "only a drag does it", "a point in a drawing", "only the picture says it"
MAIL = "no line of an email can be clicked but its two icons: none can be opened"
NO_PLAYER = {
    **dict.fromkeys(("ascending-numbers", "click-color", "click-link", "click-pie", "click-pie-nodelay",
                     "click-shape", "daily-calendar", "grid-coordinate", "hot-cold", "hover-shape",
                     "tic-tac-toe", "find-greatest", "order-food", "click-tab-2", "click-tab-2-easy",
                     "click-tab-2-medium", "click-tab-2-hard", "click-collapsible-2",
                     "click-collapsible-2-nodelay"), NO_LINE),
    **dict.fromkeys(("multi-layouts", "multi-orderings"), NO_LINE + " (the button of some layouts)"),
    **dict.fromkeys(("drag-box", "drag-circle", "drag-cube", "drag-items", "drag-items-grid", "drag-shapes",
                     "drag-shapes-2", "drag-single-shape", "drag-sort-numbers", "resize-textarea",
                     "highlight-text", "highlight-text-2"), DRAG),
    **dict.fromkeys(("bisect-angle", "circle-center", "draw-circle", "draw-line", "find-midpoint",
                     "right-angle", "chase-circle", "moving-items"), POINT),
    **dict.fromkeys(("click-shades", "count-shape", "count-sides", "identify-shape", "simon-says",
                     "visual-addition", "number-checkboxes"), PICTURE),
    **dict.fromkeys(("email-inbox", "email-inbox-forward", "email-inbox-forward-nl",
                     "email-inbox-forward-nl-turk", "email-inbox-nl-turk", "email-inbox-noscroll",
                     "email-inbox-reply", "email-inbox-star-reply"), MAIL),
    "click-checkboxes-soft": "words alike in sense: the goal's words are not on the page",
    "terminal": "key by key, more than fourteen actions",
    "text-editor": "the text does not show what is selected: page and action do not determine the next page",
    **{task: KNOWN[task] for task in ("scroll-text-2", "sign-agreement")},
}
"""Why a page has no player."""


TWINS = {f"{name}-nodelay": f"on a page's clock the same as {name}"
         for name in ("book-flight", "choose-date", "click-collapsible", "use-autocomplete")}
"""The same page without its delay, which no action here waits for."""


@dataclass(frozen=True)
class Config:
    """What is looked at."""

    out: Path = Path("results/pages.json")
    """The file of what was found, a row a page."""
    tasks: tuple[str, ...] = ()
    """Pages to play anew; without any, those that the file lacks."""
    seeds: str = "1000000:20"
    """START:COUNT, of the dev range."""
    twice: int = 4
    """So many seeds are played a second time."""
    pages: int = 10
    """Tries side by side."""
    table: bool = False
    """Only print what was found."""


class Watched(Browser):
    """MiniWoB++ whose pages count what they draw behind the reset."""

    async def _begin(self, tab, start):
        goal = await super()._begin(tab, start)
        await tab.page.evaluate("""() => { const draw = Math.random; dynaweb.draws = 0;
          Math.random = () => {  // jQuery draws as well, for names that no page shows
            if (!/jquery/.test(new Error().stack.split('\\n')[2])) dynaweb.draws++;
            return draw();
          }; }""")
        return goal

    def draws(self) -> list[int]:
        async def asked():
            return [await tab.page.evaluate("dynaweb.draws") for tab in self._tabs]
        return self._run(asked())


def horizon(task: str) -> int:
    """Actions of a try at most."""
    return LONGER if task in LONG else data.HORIZONS["miniwob"]


def unforeseen(tries: list[players.Played]) -> float:
    """Words a step that nobody could know, as the top of this file says.

    >>> seen = [players.Played("t", seed, "open it", ["[1] tab 'A'", f"[1] tab 'A'\\nStaticText 'a {word}'"],
    ...                        ["click [1]"], [""]) for seed, word in enumerate(("fox", "owl", "ant"))]
    >>> unforeseen(seen)
    1.0
    """
    new = []
    for one in tries:
        known = set(re.findall(r"\w+", f"{one.goal} {one.pages[0]}"))
        for action, page in zip(one.actions, one.pages[1:]):
            known |= set(re.findall(r"\w+", action))
            words = set(re.findall(r"\w+", re.sub(r"\[\w+\]", "", page))) - known  # without ids
            new.append((one.seed, words))
            known |= words
    on = Counter(word for seed, word in {(seed, word) for seed, words in new for word in words})
    mostly = {word for word, seeds in on.items() if 2 * seeds > len(tries)}
    return sum(len(words - mostly) for _, words in new) / max(1, len(new))


def looked_at(web: Watched, task: str, seeds: range, twice: int, at_once: int) -> dict:
    """Plays a page. Returns its row."""
    tries, draws = [], 0
    for n in range(0, len(seeds), at_once):
        tries += players.play(web, [(task, seed) for seed in seeds[n:n + at_once]], horizon)
        draws += sum(web.draws())
    second = players.play(web, [(task, seed) for seed in seeds[:twice]], horizon)
    led = defaultdict(dict)  # what a page and an action led to, by seed
    for one in tries:
        for before, action, after in zip(one.pages, one.actions, one.pages[1:]):
            led[before, action].setdefault(one.seed, after)
    met = [list(found.values()) for found in led.values() if len(found) > 1]
    won = [len(one.actions) for one in tries if one.reward]
    lost = Counter(one.lost or ("the page said no" if one.over else "horizon")
                   for one in tries if not one.reward)
    return {"task": task, "horizon": horizon(task), "wins": len(won), "of": len(seeds),
            "steps": round(sum(won) / len(won), 2) if won else None, "longest": max(won, default=None),
            "each": [len(one.actions) * one.reward for one in tries],
            "again": sum(a.pages == b.pages for a, b in zip(tries, second)), "twice": len(second),
            "draws": round(draws / len(seeds), 2), "met": len(met),
            "differ": sum(len(set(pages)) > 1 for pages in met), "unforeseen": round(unforeseen(tries), 2),
            "lost": dict(lost)}


def outcome(row: dict) -> str:
    """What the first half of the rule says of a page: `kept`, or why it is left out."""
    task = row["task"]
    if task in TRANSFER:
        return "transfer: never trained on"
    if reason := KNOWN.get(task) or NO_PLAYER.get(task) or TWINS.get(task):
        return reason
    if row["wins"] < NEEDED:
        return f"its player wins {row['wins']} of {row['of']}"
    if row["again"] < row["twice"]:
        return "the same seed and actions gave other texts"
    if row["draws"]:
        return "the page's dice"
    if row["differ"]:
        return "one page and one action led to unlike pages on two seeds"
    return "kept"


def read(file: Path) -> dict[str, dict]:
    return {row["task"]: row for row in json.loads(file.read_text())} if file.exists() else {}


def write(file: Path, rows: dict[str, dict]) -> None:
    """A row a line; whole, whenever the command is killed."""
    text = ",\n".join(json.dumps(rows[task]) for task in sorted(rows))
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.writing")
    written.write_text(f"[\n{text}\n]\n")
    os.replace(written, file)


def table(rows: dict[str, dict]) -> str:
    """The pages that are kept, by the steps of a won try; then all others, by the reason."""
    lines = ["| page | wins of 20 | steps | longest | unforeseen |", "|---|---|---|---|---|"]
    kept = [row for row in rows.values() if outcome(row) == "kept"]
    for row in sorted(kept, key=lambda row: (-row["steps"], row["task"])):
        cells = [row[name] for name in ("task", "wins", "steps", "longest", "unforeseen")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    others = defaultdict(list)
    for task, row in sorted(rows.items()):
        if row not in kept:
            others[outcome(row)].append(task)
    lines += ["", f"{len(kept)} of {len(rows)} pages are kept.", "",
              "| left out because | pages |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in
              sorted(others.items(), key=lambda item: -len(item[1]))]
    return "\n".join(lines)


def main(config: Config):
    names = sorted({*ALL_TASKS, "ask-table", *(file.removesuffix(".html") for file in OURS)})
    if unknown := {*config.tasks} - {*players.PLAYERS}:
        raise ValueError(f"no player for {', '.join(sorted(unknown))} (tests/players.py, PLAYERS)")
    seeds, rows = data.seeds_to_look_at(config.seeds), read(config.out)
    if seeds[0] not in data.SEEDS["dev"]:
        raise ValueError(f"seeds {config.seeds}: pages are chosen on dev seeds, such as 1000000:20")
    if not config.table:
        rows |= {task: {"task": task} for task in names
                 if task not in players.PLAYERS}
        left = config.tasks or [task for task in names if task in players.PLAYERS
                                and "wins" not in rows.get(task, {})]
        with Watched(timeout=60) as web:
            for task in tqdm(left, unit="page"):
                rows[task] = looked_at(web, task, seeds, config.twice, config.pages)
                rows[task]["outcome"] = outcome(rows[task])
                write(config.out, rows)
    for row in rows.values():
        row["outcome"] = outcome(row)
    write(config.out, rows)
    print(table(rows))


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, OSError) as problem:
        sys.exit(f"pages.py: {problem}")
