r"""WebWorld (arXiv 2602.14721, Apache-2.0): its data, read as ours, and its models, which write whole pages.

    curl -L -r 0-499999999 -o part.jsonl \
        https://huggingface.co/datasets/Qwen/WebWorldData/resolve/main/WebWorld_Training.jsonl
    python -m baselines.webworld part.jsonl --out webworld.jsonl.gz
    python sft.py world_model gpu --recorded webworld.jsonl.gz --context 24576 --microbatches 8

The data are one file of 52 GB in no order: any range of bytes is a sample. A row is a conversation:

    Initial Page State:          First Action: 'click('604')'     Next Page State:     -> the page then
    Action: 'fill([19], "tea")'  Next Page State:                                      -> the page then

Half of the rows are chat, and some pages are HTML or Markdown: they are dropped and counted. So are actions
that have no word in our grammar (data.py; an option is clicked here, not selected): they end a trajectory.
Its models dream in the place of ours by train(config, world_model=WorldModel(sampler, tokens, temperature,
messages, read)). The cards: huggingface.co/datasets/Qwen/WebWorldData, huggingface.co/Qwen/WebWorld-8B; the
authors' demo, in a fork: github.com/fannyunkang/WebWorld.
"""

import ast
import fileinput
import gzip
import json
import re
import warnings
from collections import Counter
from pathlib import Path

import tyro
from tqdm import tqdm

import a11y
import data
import distributed
import lm
from data import Action
from policy import Sampler
from world_model import Prediction

# ---- actions -----------------------------------------------------------------------------------------------

do = lambda name, bid="", text="", enter=True: Action(name, str(bid), text, enter)  # an id may be a number
# BrowserGym's functions that have a word here. fill's third is press_enter on the models' card, and
# enable_autocomplete_menu in BrowserGym: without its name nobody can say whether Enter was pressed.
ACTIONS = {
    "click": lambda bid, button="left", modifiers=(): button == "left" and not modifiers and do("click", bid),
    "fill": lambda bid, text, *, press_enter=False, enable_autocomplete_menu=False: do(
        "type", bid, text, press_enter is True),
    "clear": lambda bid: do("type", bid, "", False), "hover": lambda bid: do("hover", bid),
    "scroll": lambda dx, dy: dx == 0 != dy and do("scroll", text="down" if dy > 0 else "up"),
    "keyboard_press": lambda key: do("press", text=key), "goto": lambda url: do("goto", text=url),
    "tab_focus": lambda index: do("tab_focus", text=str(index)), "tab_close": lambda: do("close_tab"),
    "tab_new": lambda: do("new_tab"), "new_tab": lambda: do("new_tab"),  # the card's name, the demo's
    "go_back": lambda: do("go_back"), "go_forward": lambda: do("go_forward")}
NAMED = {"value": "text", "delta_x": "dx", "delta_y": "dy", "key_comb": "key"}  # BrowserGym's own names
CALLS = {"press": "keyboard_press", "new_tab": "tab_new", "close_tab": "tab_close"}


def read_call(text: str) -> Action | None:
    r"""The action of a BrowserGym call, of which nothing is run; None where our grammar has no word for it.

    >>> print(read_call("click([32])"), read_call("fill('a12', 'tea')"), read_call("mouse_click(3, 4)"))
    click [32] type [a12] [tea] [0] None
    """
    def plain(node: ast.expr):  # an id may be written '604', [604], [a12] or a12
        node = node.elts[0] if isinstance(node, ast.List) and len(node.elts) == 1 else node
        return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)

    try:
        with warnings.catch_warnings(action="ignore"):  # of "\d" in a string
            call = ast.parse(text.strip()[:20_000], mode="eval").body
        named = {NAMED.get(k.arg, k.arg): plain(k.value) for k in call.keywords}
        return ACTIONS[call.func.id](*map(plain, call.args), **named) or None  # a wrong parameter: TypeError
    except (SyntaxError, ValueError, RecursionError, MemoryError, AttributeError, KeyError, TypeError):
        return None  # ActionError is a ValueError: an id that is none, no URL


def write_call(action: Action) -> str:
    r"""An action as the models' card writes it; read_call gives it back.

    >>> write_call(Action("type", "19", "weather today")), write_call(Action("scroll", text="up"))
    ('fill([19], "weather today", press_enter=True)', 'scroll(0, -100)')
    """
    name, quoted = CALLS.get(action.name, action.name), json.dumps(action.text, ensure_ascii=False)
    forms = {"click": f"click([{action.bid}])", "hover": f"hover([{action.bid}])",
             "type": f"fill([{action.bid}], {quoted}{', press_enter=True' * action.enter})",
             "tab_focus": f"tab_focus({action.text})",
             "scroll": f"scroll(0, {100 if action.text == 'down' else -100})"}
    return forms.get(action.name, f"{name}({quoted if action.text else ''})")


# ---- the data ----------------------------------------------------------------------------------------------

# (page, call) of a user's turn; the page stands in the first alone. The last mark counts: whatever the page
# says, a call has no line break.
TURN = re.compile(r"(?:.*?Initial Page State:\n(.*)\nFirst|.*\n)"
                  r" ?Action: '([^\n]*)'\s*Next Page State:\s*", re.DOTALL)
ROOT = re.compile(r"(?:\[\w{1,16}\] )?RootWebArea\b[^\n]*(?:\n\t[^\n]*)*")  # a tree as BrowserGym prints it


def read_row(line: bytes, counts: Counter) -> list[tuple[list[str], list[Action]]]:
    """(pages, actions) of each trajectory in a line: T + 1 pages for T actions. Adds to `counts`: transitions
    = kept + every "dropped: ...". Raises ValueError where no page can be read."""
    try:
        said = [turn["value"] for turn in json.loads(line)["conversations"]]
        "".join(said).encode()  # half a character is a ValueError: no tokenizer takes it
        first = TURN.fullmatch(said[0])
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError("no conversation") from error
    if not first or not ROOT.fullmatch((first[1] or "").strip("\n")):
        raise ValueError("another format")
    found: list[tuple[list[str], list[Action]]] = [([first[1].strip("\n")], [])]
    for question, answer in zip(said[::2], said[1::2]):
        (pages, actions), then, turn = found[-1], answer.strip("\n"), TURN.fullmatch(question)
        action = read_call(turn[2]) if turn else None
        why = ("no page" if not (ROOT.fullmatch(pages[-1]) and ROOT.fullmatch(then))
               else "no word for the action" if action is None
               else "id not on the page" if action.bid and not a11y.find(pages[-1], action.bid) else "")
        counts["transitions"] += 1
        counts[f"dropped: {why}" if why else "kept"] += 1
        if action and not why:
            pages.append(then)
            actions.append(action)
        else:
            found.append(([then], []))
    return [trajectory for trajectory in found if trajectory[1]]


def convert(files: tyro.conf.Positional[tuple[Path, ...]], /, out: Path) -> Counter:
    """Write parts of WebWorld_Training.jsonl as recorded trajectories (.jsonl.gz) without goal or success."""
    counts = Counter[str]()
    with gzip.open(f"{out}.partial", "wt") as rows, fileinput.input(files, mode="rb") as lines:
        for line in tqdm(lines, desc="WebWorldData", unit="row", dynamic_ncols=True):
            counts["rows"] += 1
            try:
                found = read_row(line, counts)
            except ValueError as why:  # broken: the first and the last of a range are cut
                found = []
                counts[f"rows dropped: {why if type(why) is ValueError else 'broken'}"] += 1
            for pages, actions in found:
                row = {"task": "webworld", "seed": counts["trajectories"], "goal": "", "pages": pages,
                       "actions": [*map(str, actions)], "errors": [""] * len(actions), "reward": 0,
                       "terminated": False, "truncated": True}
                rows.write(json.dumps(row) + "\n")
                counts["trajectories"] += 1
    Path(f"{out}.partial").rename(out)
    return counts


# ---- models that write whole pages -------------------------------------------------------------------------

SYSTEM = """You are a web world model. I will provide you with an initial page state and a sequence of \
actions. For each action, predict the resulting page state.
Strictly maintain the original format. Output only the full page state without explanations, code, or \
truncation."""
# (rationale, page); thoughts in front may hold drafts of the page, and a fence may stand around it.
WRITTEN = re.compile(r"((?:\s*<(?:think|reason)>.*?</(?:think|reason)>)?(?:.*?\n)??)"
                     r"((?:\[\w{1,16}\] )?RootWebArea\b.*?)\n*(?:\n```)?\n*", re.DOTALL)
HEADERS = ("Initial Page State:", "First Action:", "Action:", "Next Page State:")  # a page may not forge one


def messages(page: str, url: str, previous: str, action: Action) -> list[dict]:
    """The chat of one prediction, as on the card, for a trajectory of one action: no place for `previous`."""
    guard = lambda line: "\\" + line if line.lstrip().startswith(HEADERS) else line
    shown = "\n".join(map(guard, page.split("\n")))
    user = (f"Initial Page State:\n{shown}\n\nFirst Action: '{data.one_line(write_call(action))}'\n\n"
            "Next Page State:")
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def read(model: Sampler, page: str, sample: lm.Sample) -> Prediction:
    """The prediction that a whole page stands for: ids go on from the page before (a11y.align), and the delta
    is what changed. What stands in front of the page is its rationale. Raises ValueError for another text.
    A page does not say whether the environment ended: a dream ends by stop or by its horizon."""
    text = model.template.read(sample)
    rationale, written = found.groups() if (found := WRITTEN.fullmatch(text)) else ("", "")
    # A line copied from the prompt is the page's own: the prompt guards it, and disarms special tokens.
    bare = lambda line: line.replace("< ", "<").removeprefix("\\")
    own = {key(line): line for key in (bare, str) for line in page.split("\n")}
    then = "\n".join(own.get(line) or own.get(bare(line), line) for line in written.split("\n"))
    if not ROOT.fullmatch(then):
        raise ValueError(f"not a page with nothing below it: {text[-80:]!r}")
    then = a11y.align(page, then)
    return Prediction(then, False, data.one_line(rationale.strip()), a11y.diff(page, then))


if __name__ == "__main__":
    distributed.command(lambda: tyro.cli(convert, prog="python -m baselines.webworld"))
