r"""WebWorld (arXiv 2602.14721, Apache-2.0): its data, read as ours, and its models, which write whole pages.

    curl -L -r 0-499999999 -o part.jsonl \
        https://huggingface.co/datasets/Qwen/WebWorldData/resolve/main/WebWorld_Training.jsonl
    python -m baselines.webworld part.jsonl --out webworld.jsonl.gz
    python sft.py world_model gpu --recorded webworld.jsonl.gz --context 24576 --microbatches 8

A dream with Qwen's own models takes world_model.WorldModel(sampler, tokens, temperature, messages, read). The
data are one file of 52 GB, so a part of it is a range of bytes (-r). Its first and last line are cut, and are
counted as broken. Its rows are in no order by kind [3]: any range is a sample. A row is a conversation:

    Initial Page State:          First Action: 'click('604')'     Next Page State:     -> the page then
    Action: 'fill([19], "tea")'  Next Page State:                                      -> the page then

Half of the rows are chat, and some pages are HTML or Markdown [1]; these are dropped and counted. So are
actions that have no word in our grammar (data.py): they end a trajectory, and the next begins behind them.
What is written is a file of recorded trajectories without goal or success, of which a world model learns.

A model of WebWorld is asked as on its card [2] and answers with the whole next page. Code takes the delta
between the two (a11y.diff). Any other model that writes whole pages is asked in the same way.

What was seen of the formats, and where
[1] the data's card and viewer: huggingface.co/datasets/Qwen/WebWorldData
[2] the models' card: huggingface.co/Qwen/WebWorld-8B
[3] ranges of the file, read by others: github.com/CA877/WebCoding_Data, its folder of scripts
[4] the authors' demo, in a fork: github.com/fannyunkang/WebWorld, its folder demo
"""

import ast
import fileinput
import gzip
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tyro
from tqdm import tqdm

import a11y
import data
import distributed
import lm
from config import UserError
from data import Action
from policy import Sampler
from world_model import Prediction

# ---- actions -----------------------------------------------------------------------------------------------

# BrowserGym's functions that have a word in our grammar, with their parameters; tab_new is the card's name
# [2], new_tab the demo's [4]. Not among them: the mouse by pixels, keyboard_type, drag_and_drop, noop, ...
# fill's third is press_enter on the card, and enable_autocomplete_menu in BrowserGym and the demo. Where it
# is not named nobody can say whether Enter was pressed, and such a call has no word.
PARAMETERS = {"click": ("bid", "button", "modifiers"), "fill": ("bid", "text"), "clear": ("bid",),
              "hover": ("bid",), "select_option": ("bid", "options"), "keyboard_press": ("key",),
              "scroll": ("dx", "dy"), "goto": ("url",), "go_back": (), "go_forward": (), "tab_new": (),
              "new_tab": (), "tab_close": (), "tab_focus": ("index",)}
NAMED = {"value": "text", "delta_x": "dx", "delta_y": "dy", "key_comb": "key"}  # BrowserGym's own names
MORE = {"fill": ("press_enter", "enable_autocomplete_menu")}  # only with their names
WORDS = {"keyboard_press": "press", "tab_new": "new_tab", "tab_close": "close_tab"}  # what we call them
CALLS = {word: name for name, word in WORDS.items()} | {"stop": "send_msg_to_user"}
SELECTS = ("combobox", "listbox")  # they have options
LONGEST = 20_000  # characters of a call: Python's parser takes a stack for what nests


def _plain(node: ast.expr):
    """The value of an argument. An id may be written '604', [604], [a12] or a12."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_plain(item) for item in node.elts]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name():
            return node.id
    raise ValueError(f"not a plain value: {ast.unparse(node)[:80]}")


def called(text: str) -> tuple[str, list, dict]:
    """(name, values, named values) of a call. Nothing is run. Raises ValueError for any other text."""
    if len(text) > LONGEST:
        raise ValueError(f"no call: {len(text)} characters")
    try:
        with warnings.catch_warnings(action="ignore"):  # of "\d" in a string
            call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            named = {NAMED.get(k.arg or "", k.arg): _plain(k.value) for k in call.keywords}
            return call.func.id, [_plain(value) for value in call.args], named
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no call: {text[:80]!r}") from error
    raise ValueError(f"no call: {text[:80]!r}")


def _one(value) -> str:
    """An id, a key, a number, a single option; "" for what is none."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(value) if type(value) in (str, int) else ""


def _option(page: str, bid: str, name: str | None) -> str:
    """The id of the only option of that name below a line; "" where there is none, or several."""
    nodes = a11y.parse(page)
    at = next((k for k, node in enumerate(nodes) if node.bid == bid), len(nodes))
    found = []
    for node in nodes[at + 1 :]:
        if node.depth <= nodes[at].depth:
            break
        if node.role == "option" and node.name == name:
            found.append(node.bid or "")
    return found[0] if len(found) == 1 else ""


def read_call(text: str, page: str) -> Action | None:
    r"""The action of a BrowserGym call on `page`; None where our grammar has no word for it. Raises
    ValueError where it is no call.

    >>> print(read_call("click([32])", ""), "|", read_call("fill('a12', 'say \"hi\"')", ""))
    click [32] | type [a12] [say "hi"] [0]
    >>> page = "[7] combobox 'Size'\n\t[8] option 'S'\n\t[9] option 'L'"
    >>> print(read_call("select_option('7', ['L'])", page), "|", read_call("mouse_click(3, 4)", page))
    click [9] | None
    """
    name, given, named = called(text)
    names = PARAMETERS.get(name, ())
    values = dict(zip(names, given)) | named
    if name not in PARAMETERS or len(given) > len(names) or set(values) - {*names, *MORE.get(name, ())}:
        return None
    bid, dy = _one(values.get("bid")), values.get("dy")
    try:
        match name:
            case "click":
                plain = values.get("button", "left") == "left" and not values.get("modifiers")
                return Action("click", bid) if plain else None
            case "select_option":
                return Action("click", _option(page, bid, _one(values.get("options"))))
            case "hover":
                return Action("hover", bid)
            case "clear":
                return Action("type", bid, "", enter=False)
            case "fill" if isinstance(values.get("text"), str):
                return Action("type", bid, values["text"], enter=values.get("press_enter") is True)
            case "scroll" if values.get("dx") == 0 and isinstance(dy, int | float) and dy:
                return Action("scroll", text="down" if dy > 0 else "up")
            case "fill" | "scroll":
                return None
        return Action(WORDS.get(name, name), text=_one(values.get(names[0])) if names else "")
    except data.ActionError:
        return None  # an id that is none, or no URL


def _selected(bid: str, page: str) -> str:
    """How the option `bid` is selected; "" for a line that is none, or that its name does not tell apart."""
    nodes = a11y.parse(page)
    at = next((k for k, node in enumerate(nodes) if node.bid == bid), 0)
    above = [node for node in nodes[:at] if node.depth < nodes[at].depth and node.role in SELECTS]
    if nodes[at].role != "option" or not above or _option(page, above[-1].bid or "", nodes[at].name) != bid:
        return ""
    return f"select_option([{above[-1].bid}], {json.dumps(nodes[at].name, ensure_ascii=False)})"


def write_call(action: Action, page: str) -> str:
    r"""An action as WebWorld's card writes it; read_call gives it back. An option is clicked by us, and
    selected there.

    >>> write_call(Action("type", "19", "weather today"), ""), write_call(Action("scroll", text="up"), "")
    ('fill([19], "weather today", press_enter=True)', 'scroll(0, -100)')
    """
    quoted = json.dumps(action.text, ensure_ascii=False)
    match action.name:
        case "click":
            return _selected(action.bid, page) or f"click([{action.bid}])"
        case "hover":
            return f"hover([{action.bid}])"
        case "type":
            return f"fill([{action.bid}], {quoted}{', press_enter=True' * action.enter})"
        case "scroll":
            return f"scroll(0, {100 if action.text == 'down' else -100})"
        case "tab_focus":
            return f"tab_focus({action.text})"
        case "press" | "goto" | "stop":
            return f"{CALLS.get(action.name, action.name)}({quoted})"
    return f"{CALLS.get(action.name, action.name)}()"


# ---- the data ----------------------------------------------------------------------------------------------

NEXT, FIRST, LATER, PAGE = "Next Page State:", "\nFirst Action: '", "\nAction: '", "Initial Page State:\n"
ROOT = re.compile(r"(?:\[\w{1,16}\] )?RootWebArea\b[^\n]*(?:\n\t[^\n]*)*")


HALF = re.compile("[\ud800-\udfff]")  # of a character: JSON may hold it, and no tokenizer takes it


def is_page(text: str) -> bool:
    """Whether it is an accessibility tree as BrowserGym prints it: a root, and lines below it."""
    return ROOT.fullmatch(text) is not None


def turns(row: dict) -> list[tuple[str, str]]:
    """(who, text) of a conversation's turns, without system messages: of the file ("conversations" of "from"
    and "value"), or as its card has it ("messages" of "role" and "content"). Raises ValueError."""
    who = {"human": "user", "gpt": "assistant"}
    said = row.get("conversations") or row.get("messages")
    try:
        found = [(turn.get("from") or turn["role"], turn["value"] if "from" in turn else turn["content"])
                 for turn in said or ()]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("no conversation") from error
    found = [(who.get(name, name), text) for name, text in found if name != "system"]
    alternate = [name for name, _ in found] == ["user", "assistant"] * (len(found) // 2)
    texts = all(isinstance(text, str) and not HALF.search(text) for _, text in found)
    if not found or not alternate or not texts:
        raise ValueError("no conversation")
    return found


def asked(text: str) -> tuple[str, str]:
    """(page, call) of a user's turn; the page stands in the first alone. Raises ValueError for another."""
    text = text.rstrip()
    for mark in (FIRST, LATER):  # the last one counts: whatever the page says, a call has no line break
        before, found, call = text.removesuffix(NEXT).rstrip().rpartition(mark)
        if found and text.endswith(NEXT) and call.endswith("'"):
            return before.partition(PAGE)[2].strip("\n") if mark == FIRST else "", call[:-1]
    raise ValueError("not in WebWorld's form")


def understood(question: str, page: str, then: str) -> tuple[Action | None, str]:
    """(the action that a user's turn asks about, ""), or (None, why the transition is dropped)."""
    if not is_page(then):
        return None, "no page behind it"
    try:
        action = read_call(asked(question)[1], page)
    except ValueError:
        return None, "action cannot be read"
    if action is None:
        return None, "no word for the action"
    missing = action.bid and a11y.find(page, action.bid) is None
    return (None, "id not on the page") if missing else (action, "")


def read_row(row: dict, counts: Counter) -> Iterator[tuple[list[str], list[Action]]]:
    """(pages, actions) of the trajectories in a row: T + 1 pages for T actions. Adds to `counts`: transitions
    = kept + every "dropped: ...". Raises ValueError where no page of the row can be read."""
    said = turns(row)
    page, _ = asked(said[0][1])
    if not is_page(page):
        raise ValueError("another format than the tree")
    pages, actions = [page], list[Action]()
    for (_, question), (_, answer) in zip(said[::2], said[1::2]):
        then = answer.strip("\n")
        action, why = understood(question, pages[-1], then)
        counts["transitions"] += 1
        counts["kept" if action else f"dropped: {why}"] += 1
        if action:
            pages, actions = [*pages, then], [*actions, action]
            continue
        if actions:
            yield pages, actions
        pages, actions = [then], []
        if not is_page(then):
            return
    if actions:
        yield pages, actions


def read_line(line: bytes, counts: Counter) -> Iterator[tuple[list[str], list[Action]]]:
    """read_row of a line of the file. A row that is dropped is counted, and raises nothing."""
    try:
        row = data.as_object(line)
    except data.DAMAGED:  # the first and the last of a range
        counts["rows dropped: broken"] += 1
        return
    try:
        yield from read_row(row, counts)
    except ValueError as error:
        counts[f"rows dropped: {error}"] += 1


def convert(files: tyro.conf.Positional[tuple[Path, ...]], /, out: Path, first_seed: int = 0) -> dict:
    """Write WebWorldData as recorded trajectories. Returns what was read and dropped.

    Args:
        files: Parts of WebWorld_Training.jsonl.
        out: The file to write, .jsonl.gz.
        first_seed: Trajectories are numbered from here. Numbers below 1,000,000 may be learned from; of
            others only audit.py reads (data.SEEDS): --first-seed 1000000 holds a part out.
    """
    if not files:
        raise UserError("which files? give parts of WebWorld_Training.jsonl")
    if out.suffix != ".gz":
        raise UserError(f"--out {out}: what is written is compressed; give it a name that ends in .jsonl.gz")
    counts, number = Counter[str](), first_seed
    partial = out.with_name(out.name + ".partial")
    with gzip.open(partial, "wt", encoding="utf-8") as written, fileinput.input(files, mode="rb") as lines:
        for line in tqdm(lines, desc="WebWorldData", unit="row", dynamic_ncols=True):
            counts["rows"] += 1
            for pages, actions in read_line(line, counts):
                recorded = {"task": "webworld", "seed": number, "goal": "", "pages": pages, "reward": 0,
                            "actions": [str(action) for action in actions], "errors": [""] * len(actions),
                            "terminated": False, "truncated": True}
                written.write(json.dumps(recorded) + "\n")
                number += 1
    partial.rename(out)
    return {"trajectories": number - first_seed} | counts


# ---- models that write whole pages -------------------------------------------------------------------------

SYSTEM = """You are a web world model. I will provide you with an initial page state and a sequence of \
actions. For each action, predict the resulting page state.
Strictly maintain the original format. Output only the full page state without explanations, code, or \
truncation."""
BEGIN = re.compile(r"^(?:\[\w{1,16}\] )?RootWebArea\b", re.MULTILINE)
THOUGHTS = re.compile(r"\s*<(think|reason)>.*?</\1>", re.DOTALL)  # they may hold drafts of the page [4]
HEADERS = (PAGE.strip(), FIRST.strip("\n '"), LATER.strip("\n '"), NEXT)  # no line of a page may forge one


def messages(page: str, url: str, previous: str, action: Action) -> list[dict]:
    """The chat of one prediction, as on the card [2]: the page now is the initial one of a trajectory of one
    action. There is no place for `url`, which the root's line has, and none for `previous`."""
    guard = lambda line: "\\" + line if line.lstrip().startswith(HEADERS) else line
    shown = "\n".join(map(guard, page.split("\n")))
    user = f"{PAGE}{shown}\n{FIRST}{data.one_line(write_call(action, page))}'\n\n{NEXT}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def own_lines(page: str, text: str) -> str:
    r"""`text` with the lines of `page` as they are: prompts guard them and disarm special tokens (lm.disarm),
    and what is copied from there is no change.

    >>> own_lines("RootWebArea 'a'\n\tStaticText '<b>'", "RootWebArea 'b'\n\tStaticText '< b>'")
    "RootWebArea 'b'\n\tStaticText '<b>'"
    """
    bare = lambda line: line.replace("< ", "<").removeprefix("\\")
    lines = page.split("\n")
    own = {bare(line): line for line in lines} | {line: line for line in lines}
    return "\n".join(own.get(line) or own.get(bare(line), line) for line in text.split("\n"))


def read(model: Sampler, page: str, sample: lm.Sample) -> Prediction:
    """The prediction that a whole page stands for: ids go on from the page before (a11y.align), and the delta
    is what changed. What is written in front of the page is its reason. Raises ValueError for another text. A
    page does not tell whether the environment ended: `over` is never true, and a dream ends by stop or by its
    horizon."""
    text = model.template.read(sample)
    thoughts = THOUGHTS.match(text)
    begin = BEGIN.search(text, thoughts.end() if thoughts else 0)
    then = own_lines(page, text[begin.start() :] if begin else "").rstrip("\n")
    then = then.removesuffix("\n```").rstrip("\n")
    if not begin or not is_page(then) or HALF.search(text):
        raise ValueError(f"not a page with nothing below it: {text[-80:]!r}")
    then, reason = a11y.align(page, then), data.one_line(text[: begin.start()].strip())
    return Prediction(then, False, reason, a11y.diff(page, then))


if __name__ == "__main__":
    distributed.command(lambda: tyro.cli(convert, prog="python -m baselines.webworld"))
