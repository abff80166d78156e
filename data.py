r"""What a trajectory is, and how it reads: actions, steps, recorded files, expert windows, seeds.

    trajectory = (step_1, ..., step_T),  step_t = (page_t, thought_t, action_t)  tau of arXiv 2601.22149
    context of a step = page now, URL, goal, the previous actions in words       NNetNav's template, NOTES 6.1

The action grammar is WebArena's (arXiv 2307.13854, NOTES 6.3), one action a line:

    click [69]      hover [a12]      type [158] [Pittsburgh, PA] [1]      press [Enter]      scroll [down]
    goto [http://x] new_tab  tab_focus [0]  close_tab  go_back  go_forward      stop [the answer]

Where we differ from WebArena's parser, and why:
- Text is escaped when printed (backslash, newline, carriage return, backtick: `\\ \n \r \``). So an action is
  one line without a fence, and parse_action(str(a)) == a for every Action that can be made. `C:\new`, as
  WebArena writes it, is read with a newline in it: textareas are more frequent than Windows paths.
- The whole text must be the action. WebArena takes a click out of "click [1] or [2]".
- `stop [Paris] [0]` is an error. WebArena reads "Paris] [0"; a judge took that for "Paris": it was learned.
- The text of `type` loses the spaces before it and holds no `] [`: a policy learned `type [5] [tea] [ 0] [1]`
  in dreams (NOTES 11.5). Spaces after it stay, as some pages count them. Empty, it clears the field.
"""

import contextlib
import gzip
import hashlib
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import a11y
from config import UserError

# ---- 1. actions --------------------------------------------------------------------------------------------

ID = "[a-zA-Z]*[0-9]+"  # a BrowserGym id (bid): digits, after one letter for each iframe around it
_GRAMMAR = {  # name: the regular expression of what stands after it
    "click": rf"\[(?P<bid>{ID})\]", "hover": rf"\[(?P<bid>{ID})\]",
    "type": rf"\[(?P<bid>{ID})\] ?\[(?P<text>(?:(?!\]\s*\[).)*?)\](?: ?\[(?P<flag>[01])\])?",
    "press": r"\[(?P<text>(?:(?!\]\s*\[).)+)\]", "goto": r"\[(?P<text>(?:(?!\]\s*\[).)+)\]",
    "tab_focus": r"\[(?P<text>[0-9]+)\]",
    "scroll": r"(?P<open>\[)?(?P<text>up|down)(?(open)\])",  # WebArena's brackets are optional here alone
    "new_tab": "", "close_tab": "", "go_back": "", "go_forward": "",
    "stop": r"(?!.*\]\s*\[[01]\]$)\[(?P<text>.*)\]|[^\[]*"}  # no flag after it; without an answer any words
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "`": "\\`"})
# A backslash before anything else stands for itself.
_unescape = lambda shown: re.sub(r"\\([\\nr`])", lambda m: {"n": "\n", "r": "\r"}.get(m[1], m[1]), shown)


class ActionError(ValueError):
    """A text is no action. That is data: the trajectory ends with reward 0, and no run ends."""


@dataclass(frozen=True)
class Action:
    """One action. Raises ActionError where the printed one would not read back as the same fields."""
    name: str
    bid: str = ""  # an element's id
    text: str = ""  # what is typed, the answer, a key, up or down, a URL, a tab's number
    enter: bool = True  # type alone: press Enter afterwards

    def __post_init__(self):
        if self.name == "type":
            object.__setattr__(self, "text", self.text.lstrip(" "))
        if _fields(str(self)) != (self.name, self.bid, self.text, self.enter):
            raise ActionError(f"{self!r} cannot be written: {str(self)!r} would read back as another action")

    def __str__(self) -> str:
        bid = f" [{self.bid}]" if self.bid else ""
        text = f" [{self.text.translate(_ESCAPES)}]" if "<text>" in _GRAMMAR.get(self.name, "") else ""
        return self.name + bid + text + (f" [{int(self.enter)}]" if self.name == "type" else "")


def parse_action(text: str) -> Action:
    """One action from its text; the inverse of str(action). Raises ActionError. A missing last flag of type
    means 1, as in WebArena, where only [0] and [1] are flags. `stop` without brackets answers ''."""
    return Action(*_fields(text))


def _fields(text: str) -> tuple[str, str, str, bool]:
    _, name, rest = re.split(r"^([a-z_]*)\s*", text.strip(), maxsplit=1)
    match = re.fullmatch(_GRAMMAR[name], rest, re.DOTALL) if name in _GRAMMAR else None
    if not match:
        raise ActionError(f"{text[:80]!r} is no action like click [69], type [5] [tea] [1], stop [answer]")
    found = match.groupdict(default="")
    return name, found.get("bid", ""), _unescape(found.get("text", "")), found.get("flag") != "0"


_OPENING, _CLOSING = "Let's think step-by-step.", "In summary, the next action I will perform is"


def completion(thought: str, action: Action, framed: bool = True) -> str:
    """What the assistant writes at one step, in NNetNav's words; without them where not `framed`. They would
    be half of the tokens of a small model, and their log-probabilities say nothing."""
    opening, closing = (_OPENING, _CLOSING) if framed else ("", "")
    return " ".join(part for part in (opening, thought.strip(), closing, f"```{action}```") if part)


def parse_completion(text: str) -> tuple[str, Action]:
    """(thought, action) of an assistant's text; the inverse of completion(). The LAST fenced action counts: a
    thought may quote others. Raises ActionError when there is none."""
    parts = text.rsplit("```", 2)
    if len(parts) < 3:
        raise ActionError(f"no action between ``` and ``` in {text[-80:]!r}")
    return parts[0].strip().removeprefix(_OPENING).removesuffix(_CLOSING).strip(), parse_action(parts[1])


# ---- 2. steps and trajectories -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Obs:
    """What the agent sees."""
    goal: str  # the task in words
    page: str  # the page as text (a11y.py); its first line has the address (root_url)
    error: str = ""  # what was wrong with the last action; '' if nothing


@dataclass
class Step:
    """One turn: what was seen, thought and done."""
    page: str
    thought: str
    action: Action
    previous: tuple[str, ...]  # describe() of every earlier action
    error: str = ""  # what the world answered to this action; '' when it worked

    @property
    def index(self) -> int:  # where rows were dropped, it jumps from one step to the next
        return len(self.previous)

    @property
    def past(self) -> tuple[str, ...]:  # this action too: what the next prompt lists
        return (*self.previous, describe(self.action, self.page, self.error))


@dataclass
class Trajectory:
    """One rollout at a goal, recorded."""
    task: str
    seed: int
    goal: str
    steps: list[Step]
    final_page: str  # the page after the last action; '' where nobody recorded it
    reward: int  # 0 or 1
    terminated: bool  # ended by stop or by the environment
    truncated: bool  # ended by a limit; never both
    source: str  # file:line
    real_actions: tuple[str, ...]  # what a replay needs: each action with the BROWSER's ids (NNetNav's: none)
    aligned: bool = True  # ids run on from page to page (a11y.align)
    system: str = ""  # the agent's system message where the data has its own (NNetNav)


@dataclass(frozen=True)
class Start:
    """Where a dream or a real trajectory begins. Of a real one goal and page are known once it is reset."""
    task: str
    seed: int = 0
    prefix: tuple[str, ...] = ()  # browser actions from (task, seed) to `page`; a replay runs them first
    goal: str = ""
    page: str = ""  # with aligned ids
    previous: tuple[str, ...] = ()  # the same past in words, for the policy
    system: str = ""


def one_line(text: str) -> str:
    """`text` with escapes for what could pass for a line break, and half emojis, which no tokenizer takes."""
    breaks = "[\n\r\v\f\x1c-\x1e\x85\u2028\u2029\ud800-\udfff]"
    return re.sub(breaks, lambda match: ascii(match[0])[1:-1], text)


def bids(page: str) -> list[str]:
    """The ids at the heads of a page's lines, in order."""
    return re.findall(r"^\t*\[([a-zA-Z0-9]+)\] ", page, re.MULTILINE)


def label(page: str, bid: str) -> str:
    r"""What a person would call the element: its name, else the text right below it, else (for a field) the
    text right above it, else its role; '' where it is not on the page.

    >>> label("[8] listitem ''\n\tStaticText 'Ann'", "8"), label("[8] listitem ''\nStaticText 'Ann'", "8")
    ('Ann', 'listitem')
    """
    if (found := a11y.find(page, bid)) is None:
        return ""
    nodes, k = a11y.parse(page), page.split("\n").index(a11y.render(found))
    near = [node for node in nodes[k + 1:k + 2] if node.depth == found.depth + 1]
    if k and found.role in ("textbox", "searchbox", "combobox", "spinbutton", "listbox"):
        near.append(nodes[k - 1])
    text = next((node.name for node in near if node.role == "StaticText" and node.name), "")
    return found.name or text or found.role or "a line"


def describe(action: Action, page: str, error: str = "") -> str:
    """`action` on `page` as a line of PREVIOUS ACTIONS, in NNetNav's words: the label explains an id whose
    page is gone, and type has no flag, but a space after its text for Enter.

    >>> describe(Action("hover", "4"), "[4] option 'Oslo'", "hover [4]: [4] takes no hover")
    'hover [4] where [4] is Oslo but [4] takes no hover'
    """
    bid, shown, why = action.bid, str(action), error.removeprefix(f"{action}: ")
    if action.name == "type":
        shown = f"type [{bid}] [{action.text.translate(_ESCAPES)}{' ' * action.enter}]"
    if name := label(page, bid):
        shown += f" where [{bid}] is {name}"
    elif bid:
        why = f"there is no [{bid}] on the page"
    return one_line(f"{shown} but {why}" if why else shown)


def parse_described(text: str) -> Action | None:
    """The action of a line of PREVIOUS ACTIONS, or None: NNetNav's history also holds `none` and sentences
    about failures. An element's name may itself hold " where [": the first split that parses counts."""
    text = re.sub(r"^page_focus ", "tab_focus ", text)  # NNetNav's history has its own word for it
    for end in [match.start() for match in re.finditer(r" where \[", text)] + [len(text)]:
        with contextlib.suppress(ActionError):
            if match := re.fullmatch(rf"type \[({ID})\] \[(.*)\]", text[:end], re.DOTALL):
                return Action("type", match[1], _unescape(match[2].removesuffix(" ")), match[2].endswith(" "))
            return parse_action(text[:end])
    return None


def write_thought(goal: str, page: str, action: Action) -> str:
    r"""The thought of a demonstration that has none. It names the element BEFORE the id, so that a small
    model finds the line first and copies the id then; and where it read what is typed or answered.

    >>> write_thought("Log in", "StaticText 'User'\n[18] textbox ''", Action("type", "18", "macie"))
    "'User' is [18]; type 'macie'."
    >>> write_thought("Which Size?", "[3] cell 'Size'\n[4] cell 'XL'", Action("stop", text="XL"))
    "'Size' 'XL'. the answer is 'XL'."
    """
    names = [node.name for node in a11y.parse(page)] if action.text and action.text not in goal else []
    keys = [key for key, value in zip(names, names[1:]) if value == action.text and key and key in goal]
    read = f"{keys[0]!r} {action.text!r}. " if keys else ""
    if action.name == "stop":
        return f"{read}the answer is {action.text!r}."
    if not action.bid:
        return f"{action.name} {action.text!r}." if action.text else f"{action.name}."
    name = label(page, action.bid)
    found = f"{name!r} is [{action.bid}]" if name else f"[{action.bid}] is not on the page"
    return f"{read}{found}; type {action.text!r}." if action.name == "type" else f"{found}."


# ---- 3. prompts --------------------------------------------------------------------------------------------

# The headers of all prompts (policy, judge, world model, annotate.py, baselines/): no page may forge one.
_HEADERS = ("OBSERVATION:", "BEFORE:", "URL:", "OBJECTIVE:", "PREVIOUS ACTION", "ACTION:", "QUESTION:",
            "COMPLETED:", "PAGE:", "TASK:", "FEASIBLE:", "PAGE BEFORE:", "CHANGE (edit script):")


def guard(page: str) -> str:
    """A page as prompts have it: a line that starts like a header, indented or not, gets a backslash."""
    return "\n".join("\\" + line if line.lstrip().startswith(_HEADERS) else line for line in page.split("\n"))


# Greedy: below its true place no line starts with a header. NNetNav's pages may begin with a special token.
_PROMPT = re.compile(r"OBSERVATION:\n(?:<\|begin_of_text\|>)?(.*)\nURL: ([^\n]*)\nOBJECTIVE: (.*)\n"
                     r"PREVIOUS ACTIONS:\n1: None((?:\n.*)?)", re.DOTALL)


def parse_prompt(user: str) -> tuple[str, str, str, tuple[str, ...]] | None:
    """(page, url, goal, previous) of a user message of policy.messages() or of NNetNav, whose goals and names
    may span lines; None when it is not in the template, or has no page."""
    match = _PROMPT.fullmatch(user.rstrip("\n"))
    if not match or not match[1].strip():
        return None
    return match[1], match[2], match[3], tuple(re.split(r"\n\d+: ", match[4])[1:])


# ---- 4. files: recorded MiniWoB++ and NNetNav --------------------------------------------------------------

def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict]]:
    """("file:line", object) of each line of a .jsonl or .jsonl.gz, streaming; blank lines are skipped. Raises
    UserError where there is no file, or it is damaged or was cut off."""
    number = 1  # of the line that is being read
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield f"{path}:{number}", dict(json.loads(line))
                number += 1
    except (OSError, ValueError, TypeError, EOFError, zlib.error) as error:
        raise UserError(f"{path}:{number} cannot be read as JSON ({error}); fetch or record the file again"
                        ) from error


def root_url(page: str) -> str:
    r"""The URL of a page: its root line's attribute; '' when it has none.

    >>> root_url("RootWebArea 'x, url=', focused, url='http://a/?q=1'\n\t[1] link 'y', url='z'")
    'http://a/?q=1'
    """
    [root] = a11y.parse(page.partition("\n")[0])
    return root.attributes.get("url", "").strip("'\"")


def read_trajectories(path: str | Path, counts: Counter | None = None,
                      audit: bool = False) -> list[Trajectory]:
    """Recorded trajectories to LEARN from: the one gate of all programs. A row is a trajectory (_trajectory)
    or, where it has `messages`, a step of NNetNav's. What became of NNetNav's rows is added to `counts`.
    Raises UserError with file:line; and, except for an `audit`, where a seed is no training seed."""
    trajectories, counts = list[Trajectory](), Counter() if counts is None else counts
    for steps, part in groupby(read_jsonl(path), key=lambda row: "messages" in row[1]):
        trajectories += read_nnetnav(part, counts) if steps else (_trajectory(*row) for row in part)
    for t in trajectories:
        if t.seed not in SEEDS["train"] and not audit:
            raise UserError(f"{t.source}: {t.task}, seed {t.seed}, is no training seed ({SEEDS['train']}): "
                            "what is evaluated must not be learned from, and only audit.py reads it")
    return trajectories


def _trajectory(place: str, row: dict) -> Trajectory:
    """A row: task, seed, goal, pages (T + 1), actions and errors (T texts), reward, terminated, truncated.
    Ids are made continuous: page t+1 takes page t's where an element stayed (a11y.align); actions follow."""
    try:
        task, goal, pages, actions, errors = (row[k] for k in ("task", "goal", "pages", "actions", "errors"))
        seed, reward, terminated, truncated = (row[k] for k in ("seed", "reward", "terminated", "truncated"))
        texts = all(isinstance(text, str) for text in (task, goal, *pages, *actions, *errors))
        one_end = {terminated, truncated} in ({True, False}, {False})
        if not (texts and type(seed) is int and reward in (0, 1) and one_end):
            raise ValueError("texts, a whole seed, a reward of 0 or 1 and not two ends were expected")
        page, steps = pages[0], list[Step]()
        for seen, text, error, then in zip(pages[:-1], actions, errors, pages[1:], strict=True):
            written, aligned = parse_action(text), dict(zip(bids(seen), bids(page)))  # align keeps order
            bid = aligned.get(written.bid, written.bid)
            while written.bid not in aligned and bid in aligned.values():  # its target is gone: hit nothing
                bid += "0"
            action = replace(written, bid=bid)
            # The browser's words name its own ids: "click [20]: [20] is covered by another element".
            error = error.replace(str(written), str(action), 1).replace(f": [{written.bid}]", f": [{bid}]", 1)
            past = steps[-1].past if steps else ()
            steps.append(Step(page, write_thought(goal, page, action), action, past, error))
            if then != seen:  # align costs about 2 ms, and many actions change nothing
                page = a11y.align(page, then)
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{place} is no recorded trajectory ({type(error).__name__}: {error})") from error
    return Trajectory(task, seed, goal, steps, page, reward, terminated, truncated, place, tuple(actions))


def read_nnetnav(rows: Iterable[tuple[str, dict]], counts: Counter) -> Iterator[Trajectory]:
    """Trajectories of NNetNav's rows (stanfordnlp/nnetnav-live, -wa; a row a step), one task_name at a time.
    A trajectory that ends in stop has reward 1 (NNetNav keeps what its outcome model took); any other is
    truncated. Pages keep their ids, because the thoughts speak of them; transitions() aligns.

    Rows that cannot be trusted are dropped and counted (NOTES 2.5): "rows" = "kept" + every "dropped: ...";
    "replaced": the executed action won over the written one. A gap shows in step.index.
    """
    words = lambda action: action and (action.name, action.bid, action.text.split())  # history loses spaces
    for task, of_task in groupby(rows, key=lambda row: row[1].get("task_name")):
        source, goal, system, steps = "", "", "", list[Step]()
        read = list[tuple]()  # (page, past, thought, written action or None)
        done: tuple[str, ...] = ()  # by now, in words
        for place, row in of_task:
            counts["rows"] += 1
            try:
                said = {message["role"]: message["content"] + "" for message in row["messages"]}  # texts
                prompt, answer, _ = parse_prompt(said["user"]), said["assistant"], row["task_name"]
            except (KeyError, TypeError) as error:
                raise UserError(f"{place} is no row of NNetNav, with task_name and messages of a user and an "
                                f"assistant ({type(error).__name__}: {error})") from error
            page, _, row_goal, past = prompt or ("", "", "", ())
            if prompt is None:
                counts["dropped: prompt not in the template"] += 1
            elif read and (row_goal != goal or len(past) <= len(done) or past[:len(done)] != done):
                counts["dropped: inconsistent history"] += 1
            else:
                goal, done = row_goal, past
                source, system, thought, written = source or place, said.get("system", ""), "", None
                with contextlib.suppress(ActionError):
                    thought, written = parse_completion(answer)
                read.append((page, done, thought, written))
        for page, past, thought, written in read:
            # What was executed stands in the history of the last row.
            executed = parse_described(done[len(past)]) if len(past) < len(done) else written
            if (executed is None or (executed.name == "stop" and len(past) < len(done))
                    or (executed.bid and a11y.find(page, executed.bid) is None)):
                counts["dropped: no executed action"] += 1
                continue
            if words(written) != words(executed):
                # The next page follows from the executed action; the written thought argued for another.
                thought, written = write_thought(goal, page, executed), executed
                counts["replaced"] += 1
            steps.append(Step(page, thought, written, past))
        counts["kept"] += len(steps)
        if steps:
            last, stopped = steps[-1], steps[-1].action.name == "stop"
            yield Trajectory(task, 0, goal, steps, last.page if stopped else "", int(stopped), stopped,
                             not stopped, source, (), aligned=False, system=system)


def transitions(trajectory: Trajectory) -> Iterator[tuple[Step, Action, str, bool]]:
    """What a world model learns from: (step, action, next page, over) for each action whose next page is
    known; it is aligned to the step's. `over`: the world ended. stop, which acts on nothing, is left out."""
    for step, after in zip(trajectory.steps, [*trajectory.steps[1:], None]):
        next_page = after.page if after else trajectory.final_page
        if step.action.name != "stop" and next_page and (not after or after.index == step.index + 1):
            next_page = next_page if trajectory.aligned else a11y.align(step.page, next_page)
            yield step, step.action, next_page, after is None and trajectory.terminated


# ---- 5. expert windows, seeds and splits -------------------------------------------------------------------

def expert_windows(t: Trajectory, horizon: int = 5, most: int = 2, *,
                   rng: random.Random) -> list[tuple[Start, list[Step]]]:
    """At most `most` windows of the last L steps, of different L in 1..horizon (NOTES 3.5), of a success that
    terminated. No window reaches over dropped rows, or begins after an action that was refused."""
    if t.reward != 1 or not t.terminated:
        return []
    lengths = [length for length in range(1, min(horizon, len(t.steps)) + 1)
               if t.steps[-1].index - t.steps[-length].index == length - 1
               and not any(step.error for step in t.steps[:-length])]  # a judge would read it (judge.ending)
    windows = [t.steps[-length:] for length in rng.sample(lengths, min(most, len(lengths)))]
    return [(Start(t.task, t.seed, t.real_actions[:first.index], t.goal, first.page, first.previous,
                   t.system), [first, *others]) for first, *others in windows]


# Only here stands who may look at which page. Seeds from 5,000,000 up are for people who check our figures.
SEEDS = {"train": range(1_000_000), "dev": range(1_000_000, 2_000_000), "eval": range(2_000_000, 5_000_000)}


def seeds_to_look_at(text: str, *, dev: bool = False, record: bool = False) -> range:
    """Seeds from "START:COUNT" of pages that an agent is measured on; `dev`: of this range alone. Raises
    UserError where it is not that, for training seeds (unless to `record`), and where it reaches from one
    range of SEEDS into another: some of the pages would have been learned from, or tuned on."""
    match = re.fullmatch(r"([0-9]+):0*([1-9][0-9]*)", text)
    seeds = range(int(match[1]), int(match[1]) + int(match[2])) if match else range(0)
    wrong = not match or seeds[0] in SEEDS["train"] and not record or dev and seeds[0] not in SEEDS["dev"]
    if wrong or any((seeds[0] in span) != (seeds[-1] in span) for span in SEEDS.values()):
        raise UserError(f"seeds are START:COUNT, such as 1000000:50, across no border of {SEEDS}: "
                        f"dev or eval, and while training dev; {text!r} is not that")
    return seeds


TRAINING, HELD_OUT = "training", "held-out"


def side(task: str) -> str:
    """TRAINING or HELD_OUT, half of the tasks each. WebArena's lists give a task one number, after a dot."""
    name = task.rpartition(".")[2]
    return (HELD_OUT, TRAINING)[int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2]
