"""Which pages can tell agents apart? The rule, and all that is found out for it.

    python -m bench.pages                              # players on what results/pages.json lacks
    python -m bench.pages --record                     # the explorer plays the kept ones
    python sft.py policy tiny --trajectories tiny/pages.jsonl.gz --out runs/pages/sft
    python evaluate.py --checkpoint runs/pages/sft --seeds 1000100:40 --horizon 14 --json runs/pages/sft.json
    python -m bench.pages --agent runs/pages/sft.json  # the list
    python -m bench.pages --table                      # what was found

Each goes on where it was. The rule, written before any agent is trained. A page is scored if

  1. a scripted player (players.py), which sees our text, gives our actions and does what the goal says, wins
     at least 18 of 20 dev seeds within the horizon;
  2. page and action determine the next page: nothing is drawn behind the reset; and the small model can read
     all that the player read (CONTEXT);
  3. every variant of its goal is among the recorded successes;
  4. the SFT agent of seed 0 has between .1 and .9 there (dev, n 40), looked at before any dream is trained.

At most five pages are of one click. read-table and ask-table, one page of HTML, count as one. TRANSFER is
never trained on.

What is recorded is the explorer's. Where it wins a page less than twice, the player's successes stand beside
it, marked {"by": "player"}.

Of each page that has a player: wins, steps of a won try, and what can be seen of the second condition,
    again       of `twice` seeds that were played twice, how many had the same texts
    draws       Math.random calls behind the reset, a try: the page's dice
    met         (page, action) pairs that two seeds or more met; `differ`: of these, how many led to unlike
                pages
    unforeseen  words a step that stood nowhere before (goal, earlier pages, action) and are not the same on
                most seeds: what was there but hidden, behind a tab, in a folder. No world model can know
                them; it has to dream something likely
    tokens      of the longest prompt with its answer, for the small agent as it acts and judges
Of each page that was recorded: tries, the explorer's successes, the player's, and what is asked
    variants    wording -> [goals, successes among them] (variants)
    sft         successes of `of` tries of the SFT agent
"""

import gzip
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

import data
import judge
import lm
import measure
import policy
from bench import players
from tiny import base, explore, lessons
from worlds.miniwob import ALL_TASKS, OURS, TRANSFER, Browser

NEEDED = 18  # of 20
BETWEEN = 0.1, 0.9
CONTEXT = lessons.Policy().context
LONGER = 14
LONG = ("book-flight", "book-flight-nodelay", "choose-date", "choose-date-easy", "choose-date-medium",
        "choose-date-nodelay", "click-checkboxes-large", "email-inbox-delete", "email-inbox-important",
        "form-sequence", "form-sequence-2", "form-sequence-3", "our-form", "our-list", "phone-book",
        "search-engine", "social-media", "social-media-all", "social-media-some", "use-slider",
        "use-slider-2")
"""Pages whose horizon is LONGER; that of the others is MiniWoB++'s (data.HORIZONS)."""

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
    record: bool = False
    """Record the pages that are kept, to learn from."""
    recorded: Path = Path("tiny/pages.jsonl.gz")
    """The file of recordings."""
    per_page: int = 200
    """The explorer's tries of each page."""
    demonstrations: int = 6
    """The player's successes of a page that the explorer wins less than twice."""
    agent: tuple[str, ...] = ()
    """What evaluate.py found of the SFT agent of seed 0 (its --json), in one file or in several."""
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
            "tokens": tokens(tries), "lost": dict(lost)}


def as_record(one: players.Played) -> dict:
    """A player's try as the explorer writes its own (tiny/explore.py), and marked."""
    record = asdict(one) | {"terminated": one.over, "truncated": not one.over, "by": "player"}
    return {name: record[name] for name in record if name not in ("over", "lost")}


def tokens(tries: Sequence[players.Played]) -> int:
    """Tokens of the longest prompt with its answer that the small agent needs for these tries, as it acts and
    as it judges."""
    rows, how = [(f"{one.task} {one.seed}", as_record(one)) for one in tries], lessons.TRAIN.dreaming
    model, longest = lm.LM(None, base.build_tokenizer(), sys.maxsize), 0
    for trajectory in data.read_for_audit("", rows):
        if trajectory.steps:  # a player that gave up at once has none
            judged = model.template.prompt_ids(judge.messages(trajectory.goal, *judge.ending(trajectory)))
            acted = (policy.step_pair(model, trajectory.goal, step)[0] for step in trajectory.steps)
            longest = max(longest, len(judged) + how.judge_tokens,
                          *(len(prompt) + how.max_new_tokens for prompt in acted))
    return longest


def variants(goals: Sequence[str], won: Sequence[bool]) -> dict[str, list[int]]:
    """{a wording of the goal: [how many goals have it, how many of these were won]}, of wordings that an
    eighth of the goals have. Words that are rarer, texts in quotes, numbers, and lists of them are "_".

    >>> goals = [f"Click on {a}, {a * 2}." for a in "abcdefgh"] + ["Click on nothing."] * 4
    >>> variants(goals, [True] * 8 + [False] * 4)
    {'Click on _ .': [8, 8], 'Click on nothing .': [4, 0]}
    """
    cut = [re.findall(r"\"[^\"]*\"|[^\W_]+|[^\w\s]", goal) for goal in goals]
    times = Counter(word for words in cut for word in set(words))
    said: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for words, reward in zip(cut, won):
        kept = [word if 8 * times[word] > len(goals) and not re.search(r"[\d\"]", word) else "_"
                for word in words]
        text = re.sub(r"_(?:(?: [,.:/#@-]| and)* _)+", "_", " ".join(kept))
        said[text][0] += 1
        said[text][1] += bool(reward)
    return {text: counts for text, counts in said.items() if 8 * counts[0] > len(goals)}


def outcome(row: dict) -> str:
    """What the rule says of a page: `scored`, why it is left out, or `kept` while nobody knows what an agent
    does there."""
    task = row["task"]
    if task in TRANSFER:
        return "transfer: never trained on"
    if reason := KNOWN.get(task) or NO_PLAYER.get(task) or TWINS.get(task):
        return reason
    if row["wins"] < NEEDED:
        return f"its player wins {row['wins']} of {row['of']}"
    if row["again"] < row["twice"]:
        return "the same seed and actions gave other texts"
    if row["tokens"] > CONTEXT:
        return f"a prompt of {row['tokens']} tokens, and the small model reads {CONTEXT}"
    if row["draws"]:
        return "the page's dice"
    if row["differ"]:
        return "one page and one action led to unlike pages on two seeds"
    if unseen := [text for text, (_, won) in row.get("variants", {}).items() if not won]:
        return f"no recorded success of: {'; '.join(unseen)}"
    if "sft" not in row:
        return "kept"
    low, high = BETWEEN
    if low <= row["sft"] / row["sft_of"] <= high:
        return "scored"
    return f"the SFT agent wins {row['sft']} of {row['sft_of']}"


KEPT = ("scored", "kept")


def read(file: Path) -> dict[str, dict]:
    return {row["task"]: row for row in json.loads(file.read_text())} if file.exists() else {}


def write(file: Path, rows: dict[str, dict]) -> None:
    """A row a line; whole, whenever the command is killed."""
    text = ",\n".join(json.dumps(rows[task]) for task in sorted(rows))
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.writing")
    written.write_text(f"[\n{text}\n]\n")
    os.replace(written, file)


# ---- recordings --------------------------------------------------------------------------------------------


def record(config: Config, kept: Sequence[str]) -> None:
    """Writes config.recorded: the explorer's tries of the pages that are kept, and the player's successes of
    those that it wins less than twice. What is there already is not played again."""
    for tasks, limit in (([t for t in kept if t not in LONG], {}),
                         ([t for t in kept if t in LONG], {"horizon": LONGER})):
        if tasks:
            explore.main(explore.Config(out=config.recorded, tasks=tuple(tasks), per_task=config.per_page,
                                        successes=0, most=config.per_page, pages=config.pages, **limit))
    lines = {(row["task"], row["seed"]): row for _, row in data.read_jsonl(config.recorded)}
    won = Counter(task for (task, _), row in lines.items() if row["reward"] and "by" not in row)
    with Browser(timeout=60) as web:
        for task in tqdm([task for task in kept if won[task] < 2], desc="players", unit="page"):
            seeds = range(config.per_page, config.per_page + config.demonstrations + 4)  # some are lost
            if (task, seeds[0]) not in lines:
                tries = [one for one in players.play(web, [(task, seed) for seed in seeds], horizon)
                         if one.reward]
                lines |= {(one.task, one.seed): as_record(one) for one in tries[:config.demonstrations]}
    text = "".join(explore.as_line(lines[key]) for key in sorted(lines))
    written = config.recorded.with_name(f"{config.recorded.name}.writing")
    written.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    os.replace(written, config.recorded)


def of_recordings(file: Path) -> dict[str, dict]:
    """{task: what its row says of the recordings}."""
    by_task = defaultdict(list)
    for _, row in data.read_jsonl(file):
        by_task[row["task"]].append(row)
    found = {}
    for task, some in by_task.items():
        own = [row for row in some if "by" not in row]
        found[task] = {"recorded": len(own), "won": sum(row["reward"] for row in own),
                       "by player": len(some) - len(own),
                       "variants": variants([row["goal"] for row in some], [row["reward"] for row in some])}
    return found


def of_agent(file: str) -> dict[str, dict]:
    """{task: what its row says of the SFT agent}. Raises ValueError where it was not tried on dev seeds."""
    result = measure.read_result(file)
    if data.seeds_to_look_at(result["seeds"])[0] not in data.SEEDS["dev"]:
        raise ValueError(f"{file}: tries on {result['seeds']}; pages are chosen on dev seeds, such as "
                         "1000100:40")
    return {task: {"sft": round(found["success"] * found["n"]), "sft_of": found["n"]}
            for task, found in result["per_task"].items()}


# ---- what was found ----------------------------------------------------------------------------------------


def table(rows: dict[str, dict]) -> str:
    """The pages that are kept, scored ones first; then all others, by the reason."""
    lines = ["| page | | player | steps | longest | unforeseen | tokens | explorer | player's | SFT agent |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    kept = [row for row in rows.values() if row["outcome"] in KEPT]
    of = lambda row, some, all: f"{row[some]} of {row[all]}" if some in row else ""
    for row in sorted(kept, key=lambda row: (KEPT.index(row["outcome"]), row["task"])):
        cells = [row["task"], row["outcome"], of(row, "wins", "of"), row["steps"], row["longest"],
                 row["unforeseen"], row["tokens"], of(row, "won", "recorded"), row.get("by player") or "",
                 of(row, "sft", "sft_of")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    others = defaultdict(list)
    for task, row in sorted(rows.items()):
        if row not in kept:
            others[row["outcome"]].append(task)
    counts = Counter(row["outcome"] for row in kept)
    said = ", ".join(f"{counts[name]} {name}" for name in KEPT)
    lines += ["", f"Of {len(rows)} pages: {said}.", "", "| left out because | pages |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in
              sorted(others.items(), key=lambda item: -len(item[1]))]
    return "\n".join(lines)


def main(config: Config):
    names = sorted({*ALL_TASKS, "ask-table", *(file.removesuffix(".html") for file in OURS)})
    if unknown := {*config.tasks} - {*players.PLAYERS}:
        raise ValueError(f"no player for {', '.join(sorted(unknown))} (bench/players.py, PLAYERS)")
    seeds, rows = data.seeds_to_look_at(config.seeds), read(config.out)
    if seeds[0] not in data.SEEDS["dev"]:
        raise ValueError(f"seeds {config.seeds}: pages are chosen on dev seeds, such as 1000000:20")
    if not (config.table or config.agent or config.record):
        rows |= {task: {"task": task} for task in names if task not in players.PLAYERS}
        left = config.tasks or [task for task in names if task in players.PLAYERS
                                and "wins" not in rows.get(task, {})]
        with Watched(timeout=60) as web:
            for task in tqdm(left, unit="page"):
                rows[task] = looked_at(web, task, seeds, config.twice, config.pages)
                rows[task]["outcome"] = outcome(rows[task])
                write(config.out, rows)
    if config.record:
        record(config, [task for task, row in rows.items() if row["outcome"] in KEPT])
    if config.recorded.exists():
        found = of_recordings(config.recorded)
        rows = {task: row | found.get(task, {}) for task, row in rows.items()}
    for file in config.agent:
        found = of_agent(file)
        rows = {task: row | found.get(task, {}) for task, row in rows.items()}
    for row in rows.values():
        row["outcome"] = outcome(row)
    write(config.out, rows)
    print(table(rows))


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, OSError) as problem:
        sys.exit(f"pages.py: {problem}")
