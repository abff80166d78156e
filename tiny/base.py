"""The laptop's pretrained base: a small Llama that copies, looks up and compares, and does nothing else.

The paper starts from Llama-3.1-8B and gpt-oss-120b. They can copy a name from a page, find the id that stands
beside it, and tell whether two strings are the same. A small model that is trained on a few hundred
demonstrations has none of that, and dreaming cannot give it (NOTES 11.1). This script gives it, once. It
makes synthetic pages in BrowserGym's format, with about a dozen one-step questions each. The loss is on the
answers only. The strings are random, so nothing can be learned by heart. Every sixteenth string (by hash) is
held out, and accuracy is measured on those.

No MiniWoB++ page, goal or word is in here, no verdict, and nothing that takes two steps. The longest answer
sets two lists side by side.

    python -m tiny.base                        # an hour on one core; writes tiny/base/
    python -m tiny.base --evaluate tiny/base   # accuracy of each skill on held-out strings
"""

import json
import math
import random
import time
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import lm
from tiny import reasons
from tiny.words import LETTERS, PLAIN, WORDS, random_string

# ---- the tokenizer -----------------------------------------------------------------------------------------
# One token a word matters at this size (NOTES 11.2): attention finds a token in one hop, a spelled word takes
# several. An ordinary tokenizers file: the fixed phrases of pages, prompts and deltas are one token each. The
# words of WORDS are one token each, in lower case also with the space before them. Anything else is cut in
# pieces of two characters from its left, so that the same string is the same tokens wherever it stands.

ROLES = """button textbox link radio checkbox combobox option cell row table heading paragraph LabelText
listitem list tab tablist tabpanel treeitem tree group gridcell columnheader img generic listbox searchbox
spinbutton dialog menuitem menu navigation banner form region main strong Section time status alert switch
slider Legend DisclosureTriangle MenuListPopup""".split()
STATES = ["clickable", "visible", "focused", "checked='true'", "checked='false'", "selected=True",
          "selected=False", "expanded=True", "expanded=False", "hasPopup='menu'", "required", "disabled=True",
          "level=2", "multiselectable=True"]
PAGE = ["', clickable, visible", "', visible", "' value='", "', clickable, visible, focused", "RootWebArea '",
        "', focused, url='http://", "', url='http://", ", url='http://", "http://", ".html'", "StaticText '",
        "', focused", ", value"]
PROMPT = ["OBSERVATION:\nRootWebArea '", "OBSERVATION:\n", "\nURL: http://", "\nOBJECTIVE: ",
          "\nPREVIOUS ACTIONS:\n1: None", "\nPREVIOUS ACTION: ", "\nACTION: ", "\nQUESTION: ", "\nBEFORE:\n",
          "\nAFTER:\n", *(f"\n{n}: " for n in range(2, 10))]
ACTION = ["] where [", "] is ", " where [", "' is [", "click [", "type [", "stop [", "hover [", "press [",
          "scroll [", "] [0]", "] [1]", "] [", "].", "; type '", "'.", "'. ", "]. ",
          "Let's think step-by-step. ", "In summary, the next action I will perform is ```", "]```", "```"]
DELTA = ["\nset [", "set [", "\nunset [", "unset [", "\nname [", "\nline [", "\ndel [", "\nadd [", "\nmove [",
         "no change", "\npage", "\nover: no", "\nover: yes"]
VERDICT = ["asked '", "' did '", "' same", "' different", "; asked '", "' none", "; did '", "' extra",
           "COMPLETED: YES", "COMPLETED: NO", "COMPLETED: ", "YES", "NO", "after '", "none", "\n"]
TURN = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
# The system message costs hundreds of tokens and teaches a model of this size nothing. This leaves it out.
TEMPLATE = ("{% for message in messages %}{% if message['role'] != 'system' %}"
            "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def phrases() -> list[str]:
    """The fixed phrases that are one token each, longest first (the first alternative that matches wins)."""
    found = {*PAGE, *PROMPT, *ACTION, *DELTA, *VERDICT}
    for depth in range(8):
        tabs = "\t" * depth
        found |= {f"\n{tabs}[", f"\n{tabs}StaticText '", f"\n| {tabs}[] ", f"\n| {tabs}StaticText '"}
    for role in ROLES:
        found |= {f"] {role} '", f"{role} '", f"] {role}"}
    for state in STATES + ["value='"]:
        found |= {f", {state}", f"] {state}", state}
    return sorted(found, key=lambda text: (-len(text), text))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer: about 5,500 tokens, lossless on every string (bytes are the last resort).

    >>> build_tokenizer().tokenize("[12] radio 'vjXu', clickable, visible")
    ['[', '12', "]ĠradioĠ'", 'vj', 'Xu', "',Ġclickable,Ġvisible"]
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = phrases() + [a + b for a in LETTERS for b in LETTERS] + [str(n) for n in range(100, 400)]
    vocabulary += [form for word in WORDS.split() for form in (word, word.capitalize(), " " + word)]
    spelled = ["".join(piece for piece, _ in to_bytes.pre_tokenize_str(text)) for text in vocabulary]
    tokens = dict.fromkeys([*TURN, *spelled, *sorted(pre_tokenizers.ByteLevel.alphabet())])  # each once
    numbered = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(numbered, unk_token="<|pad|>", continuing_subword_prefix=""))
    # Letters and digits run at most 64 long (a WordPiece word over 100 characters would be unknown). The rest
    # is cut in characters.
    escaped = ["".join("\\" + c if c in r"\.^$|?*+()[]{}" else c for c in text) for text in phrases()]
    pattern = "|".join(escaped) + r"| ?[A-Za-z0-9]{1,64}|[\s\S]"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>",
                                   additional_special_tokens=TURN[1:3], clean_up_tokenization_spaces=False,
                                   model_max_length=2048)
    fast.chat_template = TEMPLATE
    return fast


# ---- synthetic pages ---------------------------------------------------------------------------------------

VOCABULARY = set(WORDS.split())
ABLE = ("textbox", "button", "link", "checkbox", "radio")  # roles that can have the focus


def held_out(text: str) -> bool:
    """One string in sixteen is never trained on; the skills are measured on those only. A word of WORDS alone
    is never held out: it is one token, and a token that never was an answer cannot be one (docs/LOG.md)."""
    return zlib.crc32(text.encode()) % 16 == 0 and text.lower() not in VOCABULARY


def random_name(rng: random.Random, test: bool, words=(1, 1, 1, 2, 3)) -> str:
    """A name of one to three words. In training none is held out, in a test all are."""
    while True:
        name = " ".join(random_string(rng) for _ in range(rng.choice(words)))
        if held_out(name) == test:
            return name


def near_miss(rng: random.Random, name: str, test: bool) -> str:
    """A different name that shares most of its tokens with `name`."""
    for _ in range(20):
        k = rng.randrange(len(name))
        if rng.random() < 0.7:
            other = name[:k] + rng.choice(LETTERS) + name[k + 1 :]
        else:
            other = name + rng.choice(LETTERS)
        if name[k] != " " and other != name and held_out(other) == test:
            return other
    return random_name(rng, test)


@dataclass
class Element:
    """One line of a page.

    >>> Element("textbox", "User", "7", value="Zoe", flags=", clickable", focused=True).line()
    "\\t[7] textbox 'User' value='Zoe', clickable, focused"
    """

    role: str
    name: str
    bid: str = ""  # "": StaticText, which has no id
    depth: int = 1
    value: str | None = None
    flags: str = ""  # what stands between name and state: ", clickable, visible"
    state: str = ""  # "checked='true'", "selected=False", "expanded=False"
    focused: bool = False

    def line(self) -> str:
        head = "\t" * self.depth + (f"[{self.bid}] " if self.bid else "") + f"{self.role} {self.name!r}"
        value = f" value={self.value!r}" if self.value is not None else ""
        focus = ", focused" if self.focused else ""
        return head + value + self.flags + focus + (f", {self.state}" if self.state else "")


def synthetic_page(rng: random.Random, test: bool, size: int,
                   filled: bool = False) -> tuple[list[Element], str, str]:
    """(elements, text, URL) of a page of about `size` lines with different names. `filled`: no empty box."""
    names: list[str] = []

    def name() -> str:
        while True:
            if names and rng.random() < 0.25:
                new = near_miss(rng, rng.choice(names), test)
            else:
                new = random_name(rng, test)
            if new not in names:
                names.append(new)
                return new

    title = " ".join(rng.choice(PLAIN).capitalize() for _ in range(rng.choice((1, 2, 3))))
    elements: list[Element] = []
    while len(elements) < size:
        elements += _part_of_a_page(rng, name, filled)
    bid = rng.choice((5, 9, 12, 15, 20, rng.randrange(5, 60), rng.randrange(20, 360)))
    for element in elements:
        bid += 1 if rng.random() < 0.8 else rng.randrange(1, 4)
        element.bid = str(bid) if element.bid else ""
    able = [element for element in elements if element.role in ABLE]
    if able and rng.random() < 0.6:
        rng.choice(able).focused = True
    url = f"http://{random_string(rng).lower()}/{random_string(rng).lower()}.html"
    root = f"RootWebArea {title!r}, focused, url={url!r}"
    return elements, "\n".join([root] + [element.line() for element in elements]), url


def _part_of_a_page(rng: random.Random, name, filled: bool) -> list[Element]:
    """A few lines that belong together. `name()` draws a new name. The id "+" becomes a number later."""
    kind, depth = rng.random(), rng.choice((1, 1, 1, 2, 3))
    both, seen = ", clickable, visible", ", visible"
    if kind < 0.25:
        role = rng.choice(("button", "link", "tab", "menuitem", "treeitem", "heading", "listitem"))
        return [Element(role, name(), "+", depth, flags=both)]
    if kind < 0.45:  # a labelled checkbox or radio, its text repeated as pages do
        role, label = rng.choice(("checkbox", "radio")), name()
        nested = rng.random() < 0.6
        state = f"checked='{'true' if rng.random() < 0.4 else 'false'}'"
        box = Element(role, label, "+", depth + nested, flags=both, state=state)
        if not nested:
            return [box]
        text = Element("StaticText", label, "", depth + 1)
        return [Element("LabelText", "", "+", depth, flags=both), box, text]
    if kind < 0.65:  # a text box, sometimes with a label before it and no name of its own
        if rng.random() < 0.4:
            label = Element("StaticText", name(), "", depth + 1)
            part = [Element("LabelText", "", "+", depth, flags=seen), label,
                    Element("textbox", "", "+", depth, flags=both)]
        else:
            part = [Element("textbox", name() if rng.random() < 0.7 else "", "+", depth, flags=both)]
        if filled or rng.random() < 0.4:
            part[-1].value = name()
        return part
    if kind < 0.75:  # a choice
        options = [name() for _ in range(rng.choice((2, 3, 4, 5)))]
        chosen = rng.randrange(len(options))
        closed = ", visible, hasPopup='menu', expanded=False"
        return [Element("combobox", "", "+", depth, options[chosen], closed),
                Element("MenuListPopup", "", "", depth + 1),
                *(Element("option", option, "+", depth + 2, state=f"selected={k == chosen}")
                  for k, option in enumerate(options))]
    if kind < 0.9:  # rows of two cells
        part = []
        for _ in range(rng.choice((1, 2, 3))):
            part.append(Element("row", "", "+", depth, flags=seen))
            part += [Element("cell", name(), "+", depth + 1, flags=seen) for _ in range(2)]
        return part
    return [Element("StaticText", name(), "", depth)]


def synthetic_goal(rng: random.Random, items: list[str]) -> str:
    """Words of no meaning around the items, in their order; sometimes the items are in quotes."""
    # Without quotes only what cannot be taken for filler: one word each, none of them a plain word.
    quoted = rng.random() < 0.5 or any(" " in item or item.lower() in PLAIN for item in items)
    shown = [f'"{item}"' if quoted else item for item in items]

    def filler(most: int) -> str:
        return " ".join(rng.choice(PLAIN) for _ in range(rng.randrange(most)))

    if rng.random() < 0.3:
        middle = ", ".join(shown)
    else:
        middle = shown[0]
        for text in shown[1:]:
            longer = "and the " + rng.choice(PLAIN), "into " + rng.choice(PLAIN)
            middle += f" {rng.choice(('and', 'then', 'with', *longer))} {text}"
    goal = f"{filler(5)} {middle} {filler(7)}".strip()
    return (goal[0].upper() + goal[1:] if quoted else goal) + rng.choice((".", ".", ""))


# ---- one-step questions ------------------------------------------------------------------------------------
# The answers are written as the recipe writes them, and so that each token can be found from those before it
# (docs/LOG.md tells what happened otherwise). A line is copied in the page's own order. A name is written
# before its id, so that the id is looked up from what stands there already. A verdict comes after the two
# strings, side by side.
#
# Every question is (skill, text, answer). What most of them are made from: `elements`, the lines of the page;
# `named`, those with a name and an id; `items`, the strings of the goal in its order; `listed`, the elements
# that are among the items.


def ask_line(rng, elements, named, items, listed, test):
    e = rng.choice([e for e in elements if e.bid])
    return "id -> name", f"[{e.bid}]", e.line().strip()


def ask_id(rng, elements, named, items, listed, test):
    e = rng.choice(named)
    return "name -> id", f"'{e.name}'", f"'{e.name}' is [{e.bid}]."


def ask_goal(rng, elements, named, items, listed, test):
    e = rng.choice(listed)
    k = items.index(e.name)
    text = next((item for item in items if item != e.name), None)
    if e.role == "textbox" and text and k < 2:
        answer = f"'{e.name}' is [{e.bid}]; type '{text}'. ```type [{e.bid}] [{text}] [0]```"
        return "goal -> id", f"type {k + 1}", answer
    # If nothing else is listed: the one thing that the goal and the page have in common.
    question = "which" if len(listed) == 1 else f"click '{e.name}'"
    return "goal -> id", question, f"'{e.name}' is [{e.bid}]. ```click [{e.bid}]```"


def ask_copy(rng, elements, named, items, listed, test):
    k = rng.randrange(min(2, len(items)))
    return "copy from the goal", f"copy {k + 1}", f"'{items[k]}'"


def ask_after(rng, elements, named, items, listed, test):
    pairs = [(a, b) for a, b in zip(elements, elements[1:]) if a.name and b.name and a.name != b.name]
    if not pairs:
        return ask_copy(rng, elements, named, items, listed, test)
    a, b = rng.choice(pairs)
    return "next line", f"after '{a.name}'", f"'{a.name}' '{b.name}'"


def ask_member(rng, elements, named, items, listed, test):
    if rng.random() < 0.5:
        name = rng.choice(items)
    elif rng.random() < 0.5:
        name = rng.choice(named).name
    else:
        name = near_miss(rng, rng.choice(items), test)
    return "member", f"asked '{name}'", f"'{name}' {'yes' if name in items else 'none'}"


def ask_same(rng, elements, named, items, listed, test):
    name = rng.choice(items)
    if rng.random() < 0.5:
        other = name
    else:
        other = near_miss(rng, name, test) if rng.random() < 0.7 else random_name(rng, test)
    return "compare", f"'{name}' '{other}'", _compared(name, other)


def ask_checked(rng, elements, named, items, listed, test):
    boxes = [e for e in elements if e.role in ("checkbox", "radio")]
    if not boxes:
        return ask_line(rng, elements, named, items, listed, test)
    checked = [f"'{e.name}'" for e in boxes if e.state == "checked='true'"]
    return "checked", "checked", ", ".join(checked) or "none"


def ask_effect(rng, elements, named, items, listed, test):
    """What one action changes on the page, as a delta (a11y.py): what all forms do, nothing of a task."""
    able = [e for e in elements if e.role in ABLE or e.role == "option"]
    if not able:
        return ask_line(rng, elements, named, items, listed, test)
    e = rng.choice(able)
    typed = rng.choice(items) if rng.random() < 0.5 else random_name(rng, test)
    types = e.role == "textbox" and rng.random() < 0.7
    action = f"type [{e.bid}] [{typed}] [0]" if types else f"click [{e.bid}]"
    script = _delta(elements, _after(elements, e, typed if types else None))
    return "effect", f"\nACTION: {action}", e.line().strip() + "\n" + script


def _after(elements: list[Element], e: Element, typed: str | None) -> list[Element]:
    """The page after `typed` was typed into `e`, or after a click on `e` where it is None."""
    after = [replace(element) for element in elements]
    k = next(i for i, element in enumerate(elements) if element is e)
    focus = after[k]
    if typed is not None:
        after[k].value = typed
    elif e.role == "radio":
        after[k].state = "checked='true'"
    elif e.role == "checkbox":
        after[k].state = "checked='true'" if e.state == "checked='false'" else "checked='false'"
    elif e.role == "option":
        first = max(i for i in range(k) if elements[i].role == "combobox")
        for i in range(first + 2, len(after)):  # behind the combobox and its popup
            if after[i].role != "option":
                break
            after[i].state = f"selected={i == k}"
        focus = after[first]  # a choice's options give it to their combobox
        focus.value = e.name
    for element in after:
        element.focused = element is focus
    return after


def _delta(before: list[Element], after: list[Element]) -> str:
    """What a11y.diff writes for such edits, at a tenth of its time (a test holds the two together)."""
    script = []
    for old, new in zip(before, after):
        if old.focused and not new.focused:
            script.append(f"unset [{old.bid}] focused")
        changes = [f"value={new.value!r}"] if new.value != old.value else []
        changes += ["focused"] if new.focused and not old.focused else []
        changes += [new.state] if new.state != old.state else []
        if changes:
            script.append(f"set [{new.bid}] {', '.join(changes)}")
    return "\n".join(script) or "no change"


ASKERS = [ask_line, *[ask_id] * 5, *[ask_goal] * 5, ask_copy, ask_member, ask_checked,
          *[ask_effect] * 2, *[ask_after] * 4, *[ask_same] * 4]  # as often as each is asked


def ask_all(items, typed, clicked, boxes):
    """All that the goal lists beside all that was done, up to the first wrong thing, as the judge writes it
    (reasons.compare). The verdict is not asked for. `boxes`: (id, quoted value) of the text boxes."""
    asked, done = ((items, []), (typed, [], [])) if typed else (([], items), ([], clicked, []))
    return "compare all", "completed?", reasons.compare(asked, done, success=False, boxes=boxes)


def ask_compare(rng, items, typed):
    k = rng.randrange(len(items))
    return "compare", f"same {k + 1}", _compared(items[k], typed[k])


def _compared(asked: str, did: str) -> str:
    return f"asked '{asked}' did '{did}' {'same' if asked == did else 'different'}"


def document(rng: random.Random, test: bool = False, size: int = 12, questions: int = 12,
             only_ids: bool = False) -> list[tuple[str, str, str]]:
    """One page and its questions: (skill, user text, answer) each. Only the first text holds the page."""
    told = rng.choice(("", "", "typed", "clicked"))
    lines = rng.randrange(2, size + 1)
    elements, page, url = synthetic_page(rng, test, lines, filled=told == "typed" and rng.random() < 0.7)
    named = [e for e in elements if e.name and e.bid]
    if not named:
        return document(rng, test, size, questions, only_ids)
    listed = rng.sample(named, min(len(named), rng.choice((1, 1, 2, 3))))
    outside = rng.choice((0, 1, 1, 2)) if told != "clicked" else 0  # strings that are not on the page
    items = [e.name for e in listed] + [random_name(rng, test) for _ in range(outside)]
    rng.shuffle(items)
    goal = synthetic_goal(rng, items)
    head = f"OBSERVATION:\n{page}\nURL: {url}\nOBJECTIVE: {goal}\nPREVIOUS ACTIONS:\n1: None"

    typed, clicked = [_nearly(rng, item, test) for item in items], []
    boxes = [e for e in elements if e.role == "textbox"]
    if told == "typed":
        for k, text in enumerate(typed):
            box = rng.choice(boxes or named)
            head += f"\n{k + 2}: type [{box.bid}] [{text}] [0] where [{box.bid}] is {box.name or box.role}"
    elif told == "clicked":
        clicked = _clicked(rng, named, items, listed)
        for k, e in enumerate(clicked):
            head += f"\n{k + 2}: click [{e.bid}] where [{e.bid}] is {e.name}"

    turns = []
    for _ in range(questions):
        if told and not only_ids and rng.random() < 0.25:
            if told == "typed" and rng.random() < 0.5:
                turn = ask_compare(rng, items, typed)
            else:
                shown = [(e.bid, repr(e.value or "")) for e in boxes]
                turn = ask_all(items, typed if told == "typed" else [], [e.name for e in clicked], shown)
        else:
            ask = rng.choice([ask_id] if only_ids else ASKERS)
            turn = ask(rng, elements, named, items, listed, test)
        if all(turn[1] != asked for _, asked, _ in turns):
            turns.append(turn)
    skill, question, answer = turns[0]
    turns[0] = (skill, f"{head}\nQUESTION: {question}", answer)
    return turns


def _nearly(rng: random.Random, item: str, test: bool) -> str:
    """What was typed for `item`: most often the item itself."""
    if rng.random() < 0.6:
        return item
    return near_miss(rng, item, test) if rng.random() < 0.6 else random_name(rng, test)


def _clicked(rng: random.Random, named, items, listed) -> list[Element]:
    """Most of what is listed, and now and then something else: what looks most like it."""
    def unlike(e: Element) -> float:
        return -max(SequenceMatcher(None, e.name, item).quick_ratio() for item in items)

    likely = sorted(named, key=unlike)[: len(items) + 2]
    clicked = [e for e in listed if rng.random() < 0.85]
    clicked += [e for e in rng.sample(likely, 1) if e not in clicked and rng.random() < 0.4]
    rng.shuffle(clicked)
    return clicked


# ---- the model ---------------------------------------------------------------------------------------------
# B documents, T tokens, D width of the model.


@dataclass(frozen=True)
class Config:
    """The pretraining of the laptop's base."""

    out: str = "tiny/base"
    """Folder of the model."""
    evaluate: str = ""
    """Measure the skills of this folder's model on held-out strings and stop."""
    init: str = ""
    """Go on from this folder, made by this script, instead of from the circuits."""
    hidden: int = 192
    layers: int = 5
    minutes: float = 60.0
    """Wall time; the learning rate falls to zero at its end."""
    alone: float = 0.12
    """Share of the time, at its beginning, in which only ids are asked for."""
    tokens: int = 768
    """Tokens a step: small batches learn faster at equal time (NOTES 11.6)."""
    lr: float = 1.5e-3
    seed: int = 0


def build_model(config: Config, tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(config.seed)
    heads = config.hidden // 32
    # rope_theta 500,000 as in Llama 3: at 10,000 three quarters of a 32-wide head turn too fast to match
    # content over a page.
    llama = LlamaConfig(vocab_size=len(tokenizer), hidden_size=config.hidden, num_hidden_layers=config.layers,
                        num_attention_heads=heads, num_key_value_heads=heads, head_dim=32,
                        intermediate_size=config.hidden * 8 // 3 // 32 * 32, max_position_embeddings=2048,
                        tie_word_embeddings=True,
                        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
                        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                        eos_token_id=tokenizer.eos_token_id)
    model = LlamaForCausalLM(llama)
    begin_with_circuits(model, tokenizer)
    return model


@torch.no_grad()
def begin_with_circuits(model: LlamaForCausalLM, tokenizer) -> None:
    """Start three layers as soft circuits for what a page asks for; training makes of them what it will.

    Copying is "find where this token stood before, write what came after it" (induction: Olsson et al., arXiv
    2209.11895). Naming an element's id is "find where this name stands, write the id at the head of that
    line". From a random start both appear after millions of tokens, one after the other, each all at once,
    and everything else waits for them (docs/LOG.md). Starting from what attention would learn is Trockman and
    Kolter's idea (arXiv 2305.09828). P, R, L and the components are those of _begin_embedding.

      layer 0  heads 0, 1: look one position back, by rotation (the key is turned ahead by one). Write P of
               what is there into R, and its mark into component 2: so an id knows that it is an id.
      layer 1  heads 0, 1: the nearest id before me; write its P into L.
      layer 2  heads 0, 1: induction: P here against R there; copy P of there.
               heads 2, 3: where does my predecessor stand? R here against P there; copy that line's id, L of
               there, into P.
    """
    axes, P, R, L = _begin_embedding(model, tokenizer)
    wide = model.config.head_dim
    own = wide - 1  # a head carries 31 content components and one mark
    half = wide // 2
    pair = torch.arange(half)  # rotary embedding turns component j with component j + half
    theta = model.config.rope_parameters["rope_theta"] ** (-pair / half)  # radians a position
    zeros = torch.zeros(half)
    near = torch.where(pair < 3, 1.3, 0.0)  # only quick pairs tell one position from the next
    slow = (pair >= 6).repeat(2)[:, None].float()  # only slow pairs match far away
    line = torch.where((pair >= 2) & (pair < 5), 1.0, 0.0)  # these fall off over the length of a line
    back, here = torch.cat([near * torch.cos(theta), near * torch.sin(theta)]), torch.cat([near, zeros])
    layers = [model.model.layers[k].self_attn for k in range(3)]

    def slot(space: torch.Tensor, axis: int) -> torch.Tensor:  # (D, 32): 31 directions and an axis
        return torch.cat([space, axes[:, axis : axis + 1]], 1)

    for h in range(2):
        head, more = slice(h * wide, (h + 1) * wide), slice((2 + h) * wide, (3 + h) * wide)
        part = slice(h * own, (h + 1) * own)
        p, r, l = P[:, part], R[:, part], L[:, part]
        # layer 0: the predecessor
        _read_one(layers[0], head, q=(0, here), k=(0, back))
        _copy(layers[0], head, slot(p, 1).T * 0.5, slot(r, 2) * 0.35)
        # layer 1: the id of my line
        _read_one(layers[1], head, q=(0, torch.cat([line, zeros]) * 2.5), k=(2, torch.cat([line, zeros]) * 3))
        _copy(layers[1], head, slot(p, 3).T * 0.5, slot(l, 3) * 0.5)
        # layer 2: what came after me
        _match(layers[2], head, slow * slot(p, 3).T * 3, slow * slot(r, 3).T * 3)
        _copy(layers[2], head, slot(p, 3).T * 0.5, slot(p, 3) * 0.8)
        # layer 2: the id where my predecessor stands
        _match(layers[2], more, slow * slot(r, 3).T * 3, slow * slot(p, 3).T * 3)
        _copy(layers[2], more, slot(l, 3).T * 0.5, slot(p, 3) * 0.8)


def _begin_embedding(model: LlamaForCausalLM, tokenizer) -> tuple[torch.Tensor, ...]:
    """Write the embedding; returns (axes, P, R, L), whose columns are directions of the residual stream.

    axes (D, 4): component 0 is the same constant for all tokens (queries and keys that should not depend on
    content read it), component 1 marks the tokens that open a line with an id, components 2 and 3 are free.
    P, R, L (D, 62): tokens live in P; R is kept for "my predecessor is", L for "the id of my line is".
    """
    width, content = model.config.hidden_size, 2 * (model.config.head_dim - 1)
    axes = torch.eye(width)[:, :4]
    basis = torch.linalg.qr(torch.cat([axes, torch.randn(width, width - 4)], 1))[0][:, 4:]
    P, R, L = (basis[:, k * content : (k + 1) * content] for k in range(3))
    embed = model.model.embed_tokens.weight
    # In a tied head the embeddings' size is also the scale of the logits. At the usual 0.02 no logit could
    # exceed 4.
    embed.copy_(torch.randn(len(embed), content) @ P.T * 0.17)
    opens = [k for token, k in tokenizer.get_vocab().items()
             if tokenizer.convert_tokens_to_string([token]).startswith("\n") and token.endswith("[")]
    embed[opens] *= 0.954  # their mark adds to their length, and length is what sharp attention would see
    embed[opens, 1] = 0.4
    embed[:, 0] = 0.7
    return axes, P, R, L


def _read_one(layer, rows: slice, q, k) -> None:
    """Queries and keys of one head that read a single component each: (component, weights)."""
    for projection, (component, weights) in ((layer.q_proj, q), (layer.k_proj, k)):
        projection.weight[rows] = 0.0
        projection.weight[rows, component] = weights


def _match(layer, rows: slice, q: torch.Tensor, k: torch.Tensor) -> None:
    layer.q_proj.weight[rows], layer.k_proj.weight[rows] = q, k


def _copy(layer, rows: slice, v: torch.Tensor, o: torch.Tensor) -> None:
    layer.v_proj.weight[rows], layer.o_proj.weight[:, rows] = v, o


class SharedLetters:
    """While pretraining, a piece of two characters ab is embedded as left[a] + right[b], and its gradient
    goes to those two.

    There are 3,844 pieces. The odd ones (`j8`, `cT`) are seen so seldom that they stayed near where they
    began: no fine-tuned model could copy them (docs/LOG.md). Each of the 124 halves is seen some sixty times
    as often. The model is an ordinary Llama all the time: write() puts the sums into its embedding, and what
    is fine-tuned later is free. Two digits are ids, which are frequent enough.
    """

    def __init__(self, model: LlamaForCausalLM, tokenizer, shared: bool = False):
        """shared: this script wrote `model`, so its pieces are sums already. Their halves come from them."""
        self.embed = model.model.embed_tokens.weight
        pieces = [(k, LETTERS.index(token[0]), len(LETTERS) + LETTERS.index(token[1]))
                  for token, k in tokenizer.get_vocab().items()
                  if len(token) == 2 and set(token) <= set(LETTERS) and not token.isdigit()]
        pieces.sort()  # get_vocab has another order in every call
        columns = (torch.tensor(column, device=self.embed.device) for column in zip(*pieces))
        self.rows, self.left, self.right = columns
        halves = 2 * len(LETTERS)
        if shared:
            which = F.one_hot(self.left, halves) + F.one_hot(self.right, halves)  # (pieces, halves)
            self.parts = torch.nn.Parameter(torch.linalg.pinv(which.float()) @ self.embed.detach()[self.rows])
            return
        # Random directions like any token's: those of as many pieces, whose own are not needed any more.
        parts = self.embed.detach()[self.rows[:: len(pieces) // halves][:halves]] / 2**0.5
        parts[:, 0] = self.embed.detach()[0, 0] / 2
        self.parts = torch.nn.Parameter(parts.clone())
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        self.embed[self.rows] = self.parts[self.left] + self.parts[self.right]

    def collect(self) -> None:
        """After backward: the gradients of the pieces become those of their halves."""
        gradient = self.embed.grad[self.rows]
        self.parts.grad = torch.zeros_like(self.parts)
        self.parts.grad.index_add_(0, self.left, gradient).index_add_(0, self.right, gradient)
        self.embed.grad[self.rows] = 0


# ---- training ----------------------------------------------------------------------------------------------


def encode(tokenizer, turns: list[tuple[str, str, str]]) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of one document. Only the answers and their end-of-turn tokens are learned.

    >>> tokenizer = build_tokenizer()
    >>> ids, mask = encode(tokenizer, [("name -> id", "'Go'", "'Go' is [7].")])
    >>> tokenizer.convert_ids_to_tokens(ids)
    ['<|user|>', "'", 'Go', "'", '<|end|>', '<|assistant|>', "'", 'Go', "'ĠisĠ[", '7', '].', '<|end|>']
    >>> mask
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    """
    _, user, assistant, end = (tokenizer.convert_tokens_to_ids(token) for token in TURN)
    texts = [text for _, question, answer in turns for text in (question, answer)]
    texts = tokenizer(texts, add_special_tokens=False).input_ids
    ids, mask = [], []
    for question, answer in zip(texts[::2], texts[1::2]):
        ids += [user] + question + [end, assistant] + answer + [end]
        mask += [0] * (len(question) + 3) + [1] * (len(answer) + 1)
    return ids, mask


def batches(tokenizer, rng, tokens: int, page, device="cpu"):
    """Endless batches of about `tokens` tokens: ids and loss mask (B, T), right-padded, documents of like
    length together. `page()` gives the size of a page now, and what is asked.

    Right padding under a causal mask needs no attention mask at all, and on the CPU that is what is fast: the
    same documents packed in one row with a block-diagonal mask took 1.5 to 2 times as long
    (bench/bench_lm.py).
    """
    while True:
        documents = [encode(tokenizer, document(rng, questions=rng.randrange(8, 16), **page()))
                     for _ in range(32)]
        groups: list[list] = [[]]
        for ids, mask in sorted(documents, key=lambda encoded: len(encoded[0])):
            if groups[-1] and len(ids) * (len(groups[-1]) + 1) > tokens * 1.2:
                groups.append([])
            groups[-1].append((ids, mask))
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(ids) for ids, _ in group)
            yield tuple(torch.tensor([row + [0] * (longest - len(row)) for row in column], device=device)
                        for column in zip(*group))


def answer_loss(model, ids, mask):
    """Mean negative log-likelihood of the answer tokens; logits only where needed. ids, mask: (B, T)."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, D)
    at = mask[:, 1:].bool()
    return F.cross_entropy(model.lm_head(hidden[:, :-1][at]).float(), ids[:, 1:][at])


@torch.no_grad()
def skills(model, tokenizer, documents: int, seed: int = 10**9) -> dict[str, float]:
    """Share of answers whose every token is the most likely, for each skill, on held-out strings. Teacher
    forcing is exact for that: an answer that is right token by token under forcing is the greedy answer."""
    rng, right, count = random.Random(seed), Counter(), Counter()
    model.eval()
    for _ in range(documents):
        turns = document(rng, test=True, size=16)
        ids, mask = encode(tokenizer, turns)
        ids, mask = torch.tensor([ids], device=model.device), torch.tensor(mask)
        with lm.LM(model, tokenizer, 2048).autocast():
            best = model(input_ids=ids).logits[0].argmax(-1).cpu()
        hit = (best[:-1] == ids[0, 1:].cpu()) | (mask[1:] == 0)
        starts = [t for t in range(1, len(mask)) if mask[t] and not mask[t - 1]]
        for (skill, _, _), start in zip(turns, starts):
            end = next((t for t in range(start, len(mask)) if not mask[t]), len(mask))
            right[skill] += int(hit[start - 1 : end - 1].all())
            count[skill] += 1
    model.train()
    return {skill: round(right[skill] / count[skill], 4) for skill in sorted(count)}


def page_at(config: Config, done: float) -> dict:
    """The size of a page, and what is asked, when the share `done` of the time is over.

    First nothing but "which id has this name", on pages that grow from 3 to 10 lines. Then everything, up to
    16 lines. Asked among all the others, the look-up of ids was still at .3 after 14 M tokens; alone, it rose
    from .2 to .5 in two minutes (docs/LOG.md). With --init the pages have their full size from the beginning.
    """
    if done < config.alone:
        return {"only_ids": True, "size": 3 + round(7 * done / config.alone)}
    return {"only_ids": False, "size": 8 + round(8 * min(1, 2 * done + bool(config.init)))}


def lr_at(config: Config, step: int, done: float) -> float:
    """300 steps of warm-up; constant while only ids are asked for; then a cosine to a hundredth."""
    lr = config.lr * min(1, (step + 1) / 300)
    if done < config.alone:
        return lr
    return lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - config.alone) / (1 - config.alone))))


def train(config: Config, model: LlamaForCausalLM, tokenizer) -> None:
    """Train for config.minutes; every two minutes write the model and a line of the curve."""
    if torch.cuda.is_available():
        model.to("cuda")
    else:  # 15 % faster here: the CPU's fused attention has a slow backward at these lengths
        model.set_attn_implementation("eager")
    letters = SharedLetters(model, tokenizer, shared=bool(config.init))
    matrices = [p for p in model.parameters() if p.ndim == 2] + [letters.parts]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=config.lr, betas=(0.9, 0.98), fused=True)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {len(tokenizer)} tokens", flush=True)
    rng, start, step, seen, last = random.Random(config.seed), time.time(), 0, 0, 0.0
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)

    def progress() -> float:
        return (time.time() - start) / (config.minutes * 60)

    stream = batches(tokenizer, rng, config.tokens, lambda: page_at(config, progress()), model.device)
    with open(f"{out}.curve.jsonl", "w") as curve, \
            tqdm(total=round(config.minutes * 60), unit="s", mininterval=10) as bar:
        while (done := progress()) < 1:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(config, step, done)
            ids, mask = next(stream)
            with lm.LM(model, tokenizer, 2048).autocast():
                loss = answer_loss(model, ids, mask)
            loss.backward()
            letters.collect()
            torch.nn.utils.clip_grad_norm_(matrices + vectors, 1.0)
            optimizer.step()
            letters.write()
            optimizer.zero_grad()
            step, seen = step + 1, seen + ids.numel()
            if time.time() - last > 120:
                last = time.time()
                row = {"minutes": round((last - start) / 60, 1), "step": step, "tokens": seen,
                       "loss": round(loss.item(), 3), **skills(model, tokenizer, documents=20, seed=step)}
                curve.write(json.dumps(row) + "\n")
                curve.flush()
                bar.write(json.dumps(row))
                lm.save(lm.LM(model, tokenizer, 2048), out)
            bar.n = round(time.time() - start)
            if step % 100 == 0:
                bar.refresh()
    lm.save(lm.LM(model, tokenizer, 2048), out)


def main():
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)  # so the shipped base was made; two threads spin beside other work (NOTES 11.7)
    if config.evaluate:
        model = AutoModelForCausalLM.from_pretrained(config.evaluate, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(config.evaluate)
    else:
        tokenizer = build_tokenizer()
        if config.init:
            model = AutoModelForCausalLM.from_pretrained(config.init, dtype=torch.float32)
        else:
            model = build_model(config, tokenizer)
        train(config, model, tokenizer)
    print(json.dumps(skills(model, tokenizer, documents=300), indent=1))


if __name__ == "__main__":
    main()
