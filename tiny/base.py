"""The laptop's pretrained base: a small Llama that copies, looks up and compares, and nothing else.

The paper starts from Llama-3.1-8B and gpt-oss-120b, which can copy a name from a page, find the id that stands beside it and
tell whether two strings are the same. A small model trained on a few hundred demonstrations has none of that, and dreaming
cannot give it (LOG.md). This script gives it, once: synthetic pages in BrowserGym's format, about a dozen one-step questions a
page, loss on the answers only. The strings are random, so nothing can be learned by heart; every sixteenth string (by hash) is
held out, and the gate is measured on those.

There is no MiniWoB++ page, goal or word in here, no verdict, and nothing that takes two steps; the longest answer sets two lists side by side.

    python tiny/base.py                      # an hour on one core; writes tiny/base/
    python tiny/base.py --evaluate tiny/base # gate 1: accuracy per skill on held-out strings
"""

import json
import math
import random
import sys
import time
import zlib
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lm
import policy
from tiny.words import WORDS

# ---- the tokenizer ---------------------------------------------------------------------------------------------------------
# One token a word matters at this size (laptop.md): attention finds a token in one hop, a spelled word takes several. Three
# layers, an ordinary tokenizers file: the fixed phrases of pages, prompts and deltas are one token each; the words of WORDS are
# one token each, in lower case also with the space before them; anything else is cut in pieces of two characters from its
# left, so that the same string is the same tokens wherever it stands.

ROLES = """button textbox link radio checkbox combobox option cell row table heading paragraph LabelText listitem list tab tablist
tabpanel treeitem tree group gridcell columnheader img generic listbox searchbox spinbutton dialog menuitem menu navigation
banner form region main strong Section time status alert switch slider Legend DisclosureTriangle MenuListPopup""".split()
STATES = ["clickable", "visible", "focused", "checked='true'", "checked='false'", "selected=True", "selected=False",
          "expanded=True", "expanded=False", "hasPopup='menu'", "required", "disabled=True", "level=2", "multiselectable=True"]
TURN = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]


def phrases() -> list[str]:
    """The fixed phrases that are one token each, longest first (the first alternative that matches wins)."""
    found = set()
    for depth in range(8):
        found |= {"\n" + "\t" * depth + "[", "\n" + "\t" * depth + "StaticText '", "\n| " + "\t" * depth + "[] "}
        found.add("\n| " + "\t" * depth + "StaticText '")
    found |= {f"] {role} '" for role in ROLES} | {f"{role} '" for role in ROLES} | {f"] {role}" for role in ROLES}
    found |= {f"{before}{state}" for state in STATES + ["value='"] for before in (", ", "] ", "")}
    found |= {"', clickable, visible", "', visible", "' value='", "', clickable, visible, focused", "RootWebArea '", "', focused, url='http://",
              "', url='http://", ", url='http://", "http://", ".html'", "StaticText '", "', focused", ", value",
              "OBSERVATION:\nRootWebArea '", "OBSERVATION:\n", "\nURL: http://", "\nOBJECTIVE: ", "\nPREVIOUS ACTIONS:\n1: None", "\nPREVIOUS ACTION: ", "\nACTION: ",
              "] where [", "] is ", " where [", "' is [", "click [", "type [", "stop [", "hover [", "press [", "scroll [", "] [0]", "] [1]", "] [",
              "Let's think step-by-step. ", "In summary, the next action I will perform is ```", "]```", "```", "].", "; type '", "'.", "'. ", "]. ",
              "\nset [", "set [", "\nunset [", "unset [", "\nname [", "\nline [", "\ndel [", "\nadd [", "\nmove [", "no change", "\npage",
              "\nover: no", "\nover: yes", "\nQUESTION: ", "\nBEFORE:\n", "\nAFTER:\n", "asked '", "' did '", "' same", "' different", "; asked '", "' none", "; did '", "' extra",
              "COMPLETED: YES", "COMPLETED: NO", "COMPLETED: ", "YES", "NO", "after '", "none", "\n"}
    found |= {f"\n{n}: " for n in range(2, 10)}
    return sorted(found, key=lambda text: (-len(text), text))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer: about 5,500 tokens, lossless on every string (bytes are the last resort).

    >>> build_tokenizer().tokenize("[12] radio 'vjXu', clickable, visible")
    ['[', '12', "]ĠradioĠ'", 'vj', 'Xu', "',Ġclickable,Ġvisible"]
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spell = lambda text: "".join(piece for piece, _ in to_bytes.pre_tokenize_str(text))
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    words = WORDS.split()
    vocabulary = TURN + phrases() + [a + b for a in letters for b in letters] + [str(n) for n in range(100, 400)]
    vocabulary += [form for word in words for form in (word, word.capitalize(), " " + word)]
    tokens = {token: None for token in TURN} | {spell(token): None for token in vocabulary[len(TURN):]}
    tokens |= {token: None for token in sorted(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.WordPiece({token: n for n, token in enumerate(tokens)}, unk_token="<|pad|>", continuing_subword_prefix=""))
    escape = lambda text: "".join("\\" + c if c in r"\.^$|?*+()[]{}" else c for c in text)
    # Letters and digits run at most 64 long (a WordPiece word over 100 characters would be unknown); the rest is cut in characters.
    pattern = "|".join(map(escape, phrases())) + r"| ?[A-Za-z0-9]{1,64}|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=TURN[1:3],
                                   clean_up_tokenization_spaces=False, model_max_length=2048)
    # The system message costs hundreds of tokens and teaches a model of this size nothing: this template leaves it out.
    fast.chat_template = ("{% for message in messages %}{% if message['role'] != 'system' %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
                          "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
    return fast


# ---- synthetic pages -------------------------------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
PLAIN = [word for word in WORDS.split() if len(word) > 2]
VOCABULARY = set(WORDS.split())


def held_out(text: str) -> bool:
    """One string in sixteen is never trained on; gate 1 is measured on those only. A dictionary word alone is never one: it is a single
    token, and a token that was never an answer cannot become one (LOG.md)."""
    return zlib.crc32(text.encode()) % 16 == 0 and text.lower() not in VOCABULARY


def random_string(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.40:  # what no dictionary has: passwords, codes, option labels
        return "".join(rng.choices(LETTERS, k=rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 7))))
    if kind < 0.75:  # what sounds like a name
        text = "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", "", rng.choice("lmnrst"))) for _ in range(rng.choice((1, 2, 2, 3))))
        return text.capitalize() if rng.random() < 0.5 else text
    return rng.choice(PLAIN) if rng.random() < 0.5 else rng.choice(PLAIN).capitalize()


def random_name(rng: random.Random, test: bool, words=(1, 1, 1, 2, 3)) -> str:
    """A name of one to three words; in training none is held out, in a test all are."""
    while True:
        name = " ".join(random_string(rng) for _ in range(rng.choice(words)))
        if held_out(name) == test:
            return name


def near_miss(rng: random.Random, name: str, test: bool) -> str:
    """A different name that shares most of its tokens with `name`."""
    for _ in range(20):
        k = rng.randrange(len(name))
        other = name[:k] + rng.choice(LETTERS) + name[k + 1 :] if rng.random() < 0.7 else name + rng.choice(LETTERS)
        if name[k] != " " and other != name and held_out(other) == test:
            return other
    return random_name(rng, test)


@dataclass
class Element:
    role: str
    name: str
    bid: str = ""  # "": StaticText
    depth: int = 1
    value: str | None = None
    flags: str = ""  # what stands between name and state: ", clickable, visible"
    state: str = ""  # "checked='true'", "selected=False", "expanded=False"
    focused: bool = False

    def line(self) -> str:
        head = "\t" * self.depth + (f"[{self.bid}] " if self.bid else "") + f"{self.role} {self.name!r}"
        value = f" value={self.value!r}" if self.value is not None else ""
        return head + value + self.flags + (", focused" if self.focused else "") + (f", {self.state}" if self.state else "")


def synthetic_page(rng: random.Random, test: bool, size: int, filled: bool = False) -> tuple[list[Element], str, str]:
    """Elements of a page of about `size` lines with all names different, its tree and its URL. `filled`: no text box is empty."""
    names: list[str] = []

    def name(words=(1, 1, 1, 2, 3)) -> str:
        while True:
            new = near_miss(rng, rng.choice(names), test) if names and rng.random() < 0.25 else random_name(rng, test, words)
            if new not in names:
                names.append(new)
                return new

    title = " ".join(rng.choice(PLAIN).capitalize() for _ in range(rng.choice((1, 2, 3))))
    elements: list[Element] = []
    both, seen = ", clickable, visible", ", visible"
    while len(elements) < size:
        kind, depth = rng.random(), rng.choice((1, 1, 1, 2, 3))
        if kind < 0.25:
            elements.append(Element(rng.choice(("button", "link", "tab", "menuitem", "treeitem", "heading", "listitem")), name(), "+", depth, flags=both))
        elif kind < 0.45:  # a labelled checkbox or radio, its text repeated as pages do
            role, label = rng.choice(("checkbox", "radio")), name()
            nested = rng.random() < 0.6
            if nested:
                elements.append(Element("LabelText", "", "+", depth, flags=both))
            elements.append(Element(role, label, "+", depth + nested, flags=both, state=f"checked='{'true' if rng.random() < 0.4 else 'false'}'"))
            if nested:
                elements.append(Element("StaticText", label, "", depth + 1))
        elif kind < 0.65:  # a text box, sometimes with a label before it and no name of its own
            if rng.random() < 0.4:
                elements.append(Element("LabelText", "", "+", depth, flags=seen))
                elements.append(Element("StaticText", name(), "", depth + 1))
                elements.append(Element("textbox", "", "+", depth, flags=both))
            else:
                elements.append(Element("textbox", name() if rng.random() < 0.7 else "", "+", depth, flags=both))
            if filled or rng.random() < 0.4:
                elements[-1].value = name()
        elif kind < 0.75:  # a choice
            options = [name() for _ in range(rng.choice((2, 3, 4, 5)))]
            chosen = rng.randrange(len(options))
            elements.append(Element("combobox", "", "+", depth, options[chosen], ", visible, hasPopup='menu', expanded=False"))
            elements.append(Element("MenuListPopup", "", "", depth + 1))
            elements += [Element("option", option, "+", depth + 2, state=f"selected={k == chosen}") for k, option in enumerate(options)]
        elif kind < 0.9:  # rows of two cells
            for _ in range(rng.choice((1, 2, 3))):
                elements.append(Element("row", "", "+", depth, flags=seen))
                elements += [Element("cell", name(), "+", depth + 1, flags=seen) for _ in range(2)]
        else:
            elements.append(Element("StaticText", name(), "", depth))
    bid = rng.choice((5, 9, 12, 15, 20, rng.randrange(5, 60), rng.randrange(20, 360)))
    for element in elements:
        bid += 1 if rng.random() < 0.8 else rng.randrange(1, 4)
        element.bid = str(bid) if element.bid else ""
    able = [element for element in elements if element.role in ("textbox", "button", "checkbox", "radio", "link")]
    focus = rng.choice(able) if able and rng.random() < 0.6 else None
    if focus:
        focus.focused = True
    url = f"http://{random_string(rng).lower()}/{random_string(rng).lower()}.html"
    root = f"RootWebArea {title!r}, focused, url={url!r}"
    return elements, "\n".join([root] + [element.line() for element in elements]), url


def synthetic_goal(rng: random.Random, items: list[str]) -> tuple[str, bool]:
    """Words of no meaning around the items, in their order; sometimes in quotes. Returns (goal, quoted)."""
    # Without quotes only what cannot be taken for filler: one word each, none of them a plain word.
    quoted = rng.random() < 0.5 or any(" " in item or item.lower() in PLAIN for item in items)
    filler = lambda most: " ".join(rng.choice(PLAIN) for _ in range(rng.randrange(most)))
    shown = [f'"{item}"' if quoted else item for item in items]
    if rng.random() < 0.3:
        middle = ", ".join(shown)
    else:
        middle = shown[0] + "".join(f" {rng.choice(('and', 'then', 'with', 'and the ' + rng.choice(PLAIN), 'into ' + rng.choice(PLAIN)))} {text}" for text in shown[1:])
    goal = f"{filler(5)} {middle} {filler(7)}".strip()
    return (goal[0].upper() + goal[1:] if quoted else goal) + rng.choice((".", ".", "")), quoted


# ---- one-step questions ----------------------------------------------------------------------------------------------------
# The answers are written as the recipe writes them, and so that each token can be found from those before it (LOG.md tells what
# happened otherwise): a line is copied in the page's own order; a name is written before its id, so that the id is looked up from what
# stands there already; a verdict comes after the two strings, side by side.


def document(rng: random.Random, test: bool = False, size: int = 12, questions: int = 12, only_ids: bool = False) -> list[tuple[str, str, str]]:
    """One page and its questions: a list of (skill, user text, answer); the page stands in the first user text only."""
    told, clicked = rng.choice(("", "", "typed", "clicked")), []
    elements, tree, url = synthetic_page(rng, test, rng.randrange(2, size + 1), filled=told == "typed" and rng.random() < 0.7)
    named = [e for e in elements if e.name and e.bid]
    if not named:
        return document(rng, test, size, questions, only_ids)
    listed = rng.sample(named, min(len(named), rng.choice((1, 1, 2, 3))))
    outside = [random_name(rng, test) for _ in range(rng.choice((0, 1, 1, 2)))] if told != "clicked" else []
    items = [e.name for e in listed] + outside
    rng.shuffle(items)
    goal, quoted = synthetic_goal(rng, items)
    typed = [item if rng.random() < 0.6 else near_miss(rng, item, test) if rng.random() < 0.6 else random_name(rng, test) for item in items]
    boxes = [e for e in elements if e.role == "textbox"]
    head = f"OBSERVATION:\n{tree}\nURL: {url}\nOBJECTIVE: {goal}\nPREVIOUS ACTIONS:\n1: None"
    if told == "typed":
        for k, text in enumerate(typed):
            box = rng.choice(boxes or named)
            head += f"\n{k + 2}: type [{box.bid}] [{text}] [0] where [{box.bid}] is {box.name or box.role}"
    elif told == "clicked":  # most of what is listed, and now and then something else: what looks most like it
        likely = sorted(named, key=lambda e: -max(SequenceMatcher(None, e.name, item).quick_ratio() for item in items))[: len(items) + 2]
        clicked = [e for e in listed if rng.random() < 0.85]
        clicked += [e for e in rng.sample(likely, 1) if e not in clicked and rng.random() < 0.4]
        rng.shuffle(clicked)
        head += "".join(f"\n{k + 2}: click [{e.bid}] where [{e.bid}] is {e.name}" for k, e in enumerate(clicked))
    turns = []
    askers = [ask_line] + [ask_id] * 5 + [ask_goal] * 5 + [ask_copy, ask_member, ask_checked] + [ask_effect] * 2 + [ask_after] * 4 + [ask_same] * 4
    if only_ids:
        askers, told = [ask_id], ""
    for _ in range(questions):
        if told and rng.random() < 0.25:
            one = told == "typed" and rng.random() < 0.5
            shown = [(e.bid, repr(e.value or "")) for e in boxes]
            turn = ask_compare(rng, items, typed) if one else ask_all(items, typed if told == "typed" else [], [e.name for e in clicked], shown)
        else:
            turn = rng.choice(askers)(rng, elements, named, items, listed, test)
        if all(turn[1] != asked for _, asked, _ in turns):
            turns.append(turn)
    skill, question, answer = turns[0]
    turns[0] = (skill, f"{head}\nQUESTION: {question}", answer)
    return turns


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
        return "goal -> id", f"type {k + 1}", f"'{e.name}' is [{e.bid}]; type '{text}'. ```type [{e.bid}] [{text}] [0]```"
    if len(listed) == 1:  # the one thing that the goal and the page have in common
        return "goal -> id", "which", f"'{e.name}' is [{e.bid}]. ```click [{e.bid}]```"
    return "goal -> id", f"click '{e.name}'", f"'{e.name}' is [{e.bid}]. ```click [{e.bid}]```"


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
    name = rng.choice(items) if rng.random() < 0.5 else rng.choice(named).name if rng.random() < 0.5 else near_miss(rng, rng.choice(items), test)
    return "member", f"asked '{name}'", f"'{name}' {'yes' if name in items else 'none'}"


def ask_same(rng, elements, named, items, listed, test):
    name = rng.choice(items)
    other = name if rng.random() < 0.5 else near_miss(rng, name, test) if rng.random() < 0.7 else random_name(rng, test)
    return "compare", f"'{name}' '{other}'", f"asked '{name}' did '{other}' {'same' if name == other else 'different'}"


def ask_checked(rng, elements, named, items, listed, test):
    boxes = [e for e in elements if e.role in ("checkbox", "radio")]
    if not boxes:
        return ask_line(rng, elements, named, items, listed, test)
    return "checked", "checked", ", ".join(f"'{e.name}'" for e in boxes if e.state == "checked='true'") or "none"


def ask_all(items, typed, clicked, boxes):
    """Everything that the goal lists beside everything that was done, as the judge writes it (policy.compare), up to the first that is wrong;
    the verdict is not asked for. `boxes`: (id, quoted value) of the text boxes."""
    ask, done = ((items, []), (typed, [], [])) if typed else (([], items), ([], clicked, []))
    return "compare all", "completed?", policy.compare(ask, done, success=False, boxes=boxes)


def ask_compare(rng, items, typed):
    k = rng.randrange(len(items))
    return "compare", f"same {k + 1}", f"asked '{items[k]}' did '{typed[k]}' {'same' if items[k] == typed[k] else 'different'}"


def ask_effect(rng, elements, named, items, listed, test):
    """What one action changes on the page, as a delta (a11y.py): what every HTML form does, and nothing of any task."""
    able = [e for e in elements if e.role in ("textbox", "button", "link", "checkbox", "radio", "option")]
    if not able:
        return ask_line(rng, elements, named, items, listed, test)
    e = rng.choice(able)
    typed = rng.choice(items) if rng.random() < 0.5 else random_name(rng, test)
    action = f"type [{e.bid}] [{typed}] [0]" if e.role == "textbox" and rng.random() < 0.7 else f"click [{e.bid}]"
    after = {id(element): replace(element) for element in elements}
    target = after[id(e)]
    holder = target  # who gets the focus: a choice's options give it to their combobox
    if action.startswith("type"):
        target.value = typed
    elif e.role in ("checkbox", "radio"):
        target.state = "checked='true'" if e.role == "radio" or e.state == "checked='false'" else "checked='false'"
    elif e.role == "option":
        k = elements.index(e)
        first = max(i for i in range(k) if elements[i].role == "combobox")
        for other in elements[first + 2 :]:
            if other.role != "option":
                break
            after[id(other)].state = f"selected={other is e}"
        holder = after[id(elements[first])]
        holder.value = e.name
    for element in after.values():
        element.focused = element is holder
    script = []
    for old, new in zip(elements, after.values()):  # what a11y.diff writes for such edits, at a tenth of its time (a test)
        if old.focused and not new.focused:
            script.append(f"unset [{old.bid}] focused")
        changes = [f"value={new.value!r}"] * (new.value != old.value) + ["focused"] * (new.focused > old.focused) + [new.state] * (new.state != old.state)
        if changes:
            script.append(f"set [{new.bid}] {', '.join(changes)}")
    return "effect", f"\nACTION: {action}", e.line().strip() + "\n" + ("\n".join(script) or "no change")


# ---- training --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    out: str = "tiny/base"
    """Folder of the model."""
    evaluate: str = ""
    """Measure gate 1 on this folder and stop."""
    init: str = ""
    """Go on from this folder, made by this script, instead of from the circuits."""
    hidden: int = 192
    layers: int = 5
    minutes: float = 60.0
    """Wall time; the learning rate falls to zero at its end."""
    alone: float = 0.12
    """Share of the time, at its beginning, in which only ids are asked for."""
    tokens: int = 768
    """Tokens a step: small batches learn faster at equal time (laptop.md)."""
    lr: float = 1.5e-3
    threads: int = 1
    seed: int = 0


def encode(tokenizer, turns: list[tuple[str, str, str]]) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of one document: the answers and their end-of-turn tokens are learned, nothing else."""
    end, user, assistant = (tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|user|>", "<|assistant|>"))
    texts = tokenizer([text for _, question, answer in turns for text in (question, answer)], add_special_tokens=False).input_ids
    ids, mask = [], []
    for question, answer in zip(texts[::2], texts[1::2]):
        ids += [user] + question + [end, assistant] + answer + [end]
        mask += [0] * (len(question) + 3) + [1] * (len(answer) + 1)
    return ids, mask


def batches(tokenizer, rng, tokens: int, page, device="cpu"):
    """Endless batches of about `tokens` tokens: ids and loss mask (B, T), right-padded, documents of like length together. `page()` gives
    the size of a page now, and what is asked.

    Right padding under a causal mask needs no attention mask at all, and on the CPU that is what is fast: the same documents
    packed in one row with a block-diagonal mask took 1.5 to 2 times as long (bench/bench_lm.py).
    """
    while True:
        documents = sorted((encode(tokenizer, document(rng, questions=rng.randrange(8, 16), **page())) for _ in range(32)), key=lambda d: len(d[0]))
        groups = [[]]
        for one in documents:
            if groups[-1] and len(one[0]) * (len(groups[-1]) + 1) > tokens * 1.2:
                groups.append([])
            groups[-1].append(one)
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(ids) for ids, _ in group)
            yield (torch.tensor([row + [0] * (longest - len(row)) for row in column], device=device) for column in zip(*group))


def answer_loss(model, ids, mask):
    """Mean negative log-likelihood of the answer tokens; logits only where they are needed. ids, mask: (B, T)."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, D)
    at = mask[:, 1:].bool()
    return F.cross_entropy(model.lm_head(hidden[:, :-1][at]).float(), ids[:, 1:][at])


def build_model(config: Config, tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(config.seed)
    # rope_theta 500,000 as in Llama 3: at 10,000 three quarters of a 32-wide head turn too fast to match content over a page.
    llama = LlamaConfig(vocab_size=len(tokenizer), hidden_size=config.hidden, num_hidden_layers=config.layers, num_attention_heads=config.hidden // 32,
                        num_key_value_heads=config.hidden // 32, head_dim=32, intermediate_size=config.hidden * 8 // 3 // 32 * 32, max_position_embeddings=2048,
                        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                        eos_token_id=tokenizer.eos_token_id)
    model = LlamaForCausalLM(llama)
    begin_with_circuits(model, tokenizer)
    return model


@torch.no_grad()
def begin_with_circuits(model: LlamaForCausalLM, tokenizer) -> None:
    """Start three layers as soft circuits for the two things a page asks for, which training then makes of what it will.

    Copying is "find where this token stood before, write what came after it" (induction: Olsson et al., arXiv 2209.11895). Naming an
    element's id is "find where this name stands, write the id at the head of that line". From a random start both appear after
    millions of tokens, one after the other, each all at once, and everything else waits for them (LOG.md). Starting from what attention
    would learn is Trockman and Kolter's idea (arXiv 2305.09828).

    The embedding's parts: component 0 is the same constant for all tokens (queries and keys that should not depend on content read it),
    component 1 marks the tokens that open a line with an id, components 2 and 3 are free; tokens live in a subspace P, a subspace R is
    kept for "my predecessor is", a subspace L for "the id of my line is".
      layer 0  heads 0, 1: look one position back, by rotation (the key is turned ahead by one); write P of what is there into R,
               and its mark into component 2: so an id knows that it is one.
      layer 1  heads 0, 1: the nearest id before me; write its P into L.
      layer 2  heads 0, 1: induction: P here against R there; copy P of there.
               heads 2, 3: where does my predecessor stand? R here against P there; copy that line's id, L of there, into P.
    """
    config = model.config
    width, wide = config.hidden_size, config.head_dim
    half, own = wide // 2, wide - 1  # a head carries 31 content components and one mark
    axes = torch.eye(width)[:, :4]
    basis = torch.linalg.qr(torch.cat([axes, torch.randn(width, width - 4)], 1))[0][:, 4:]
    P, R, L = (basis[:, k * 2 * own : (k + 1) * 2 * own] for k in range(3))  # (width, 62) each
    embed = model.model.embed_tokens.weight
    # In a tied head the embeddings' size is also the scale of the logits: at the usual 0.02 none could exceed 4.
    embed.copy_(torch.randn(len(embed), 2 * own) @ P.T * 0.17)
    opens = [k for token, k in tokenizer.get_vocab().items() if tokenizer.convert_tokens_to_string([token]).startswith("\n") and token.endswith("[")]
    embed[opens] *= 0.954  # their mark adds to their length, and length is what sharp attention would see
    embed[opens, 1] = 0.4
    embed[:, 0] = 0.7
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # radians a position, of pair (j, j + half)
    zeros = torch.zeros(half)
    near = torch.where(torch.arange(half) < 3, 1.3, 0.0)  # only quick pairs tell one position from the next
    slow = (torch.arange(half) >= 6).repeat(2)[:, None].float()  # only slow ones match far away
    line = torch.where((torch.arange(half) >= 2) & (torch.arange(half) < 5), 1.0, 0.0)  # those fall off over the length of a line
    layers = [model.model.layers[k].self_attn for k in range(3)]
    for h in range(2):
        rows, part = slice(h * wide, (h + 1) * wide), slice(h * own, (h + 1) * own)
        p, r, l = P[:, part], R[:, part], L[:, part]
        slot = lambda space, axis: torch.cat([space, axes[:, axis : axis + 1]], 1)  # (width, 32): 31 of a space and one axis
        # layer 0: the predecessor
        _set(layers[0], rows, q=(0, torch.cat([near, zeros])), k=(0, torch.cat([near * torch.cos(theta), near * torch.sin(theta)])))
        layers[0].v_proj.weight[rows], layers[0].o_proj.weight[:, rows] = slot(p, 1).T * 0.5, slot(r, 2) * 0.35
        # layer 1: the id of my line
        _set(layers[1], rows, q=(0, torch.cat([line, zeros]) * 2.5), k=(2, torch.cat([line, zeros]) * 3))
        layers[1].v_proj.weight[rows], layers[1].o_proj.weight[:, rows] = slot(p, 3).T * 0.5, slot(l, 3) * 0.5
        # layer 2: what came after me; the id where my predecessor stands
        layers[2].q_proj.weight[rows], layers[2].k_proj.weight[rows] = slow * slot(p, 3).T * 3, slow * slot(r, 3).T * 3
        layers[2].v_proj.weight[rows], layers[2].o_proj.weight[:, rows] = slot(p, 3).T * 0.5, slot(p, 3) * 0.8
        more = slice((2 + h) * wide, (3 + h) * wide)
        layers[2].q_proj.weight[more], layers[2].k_proj.weight[more] = slow * slot(r, 3).T * 3, slow * slot(p, 3).T * 3
        layers[2].v_proj.weight[more], layers[2].o_proj.weight[:, more] = slot(l, 3).T * 0.5, slot(p, 3) * 0.8


class SharedLetters:
    """While pretraining, a piece of two characters ab is embedded as left[a] + right[b], and its gradient goes to those two.

    There are 3,844 pieces, and the odd ones (`j8`, `cT`) are seen so seldom that they stayed near where they began: no fine-tuned model could
    copy them (LOG.md). Each of the 124 halves is seen some sixty times as often. The model is an ordinary one all
    the time: write() puts the sums into its embedding, and what is fine-tuned later is free. Two digits are ids, frequent enough.
    """

    def __init__(self, model: LlamaForCausalLM, tokenizer, shared: bool = False):
        """shared: the pieces in `model` are sums already (this script wrote it), and their halves are taken from there."""
        self.embed, vocab = model.model.embed_tokens.weight, tokenizer.get_vocab()
        pieces = [(k, LETTERS.index(t[0]), LETTERS.index(t[1])) for t, k in vocab.items() if len(t) == 2 and set(t) <= set(LETTERS) and not t.isdigit()]
        self.rows, self.left, right = (torch.tensor(column, device=self.embed.device) for column in zip(*pieces))
        self.right = right + len(LETTERS)
        if shared:
            which = F.one_hot(self.left, 2 * len(LETTERS)) + F.one_hot(self.right, 2 * len(LETTERS))  # (pieces, halves)
            self.parts = torch.nn.Parameter(torch.linalg.pinv(which.float()) @ self.embed.detach()[self.rows])
            return
        # Random directions like any token's: those of as many pieces, whose own are not needed any more.
        halves = self.embed.detach()[self.rows[:: len(pieces) // (2 * len(LETTERS))][: 2 * len(LETTERS)]] / 2**0.5
        halves[:, 0] = self.embed.detach()[0, 0] / 2
        self.parts = torch.nn.Parameter(halves.clone())
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        self.embed[self.rows] = self.parts[self.left] + self.parts[self.right]

    def collect(self) -> None:
        """After backward: the gradients of the pieces become those of their halves."""
        gradient = self.embed.grad[self.rows]
        self.parts.grad = torch.zeros_like(self.parts).index_add_(0, self.left, gradient).index_add_(0, self.right, gradient)
        self.embed.grad[self.rows] = 0


def _set(layer, rows: slice, q, k) -> None:
    """Queries and keys of one head that read a single component: (component, weights)."""
    for projection, (component, weights) in ((layer.q_proj, q), (layer.k_proj, k)):
        projection.weight[rows] = 0.0
        projection.weight[rows, component] = weights


@torch.no_grad()
def skills(model, tokenizer, documents: int = 100, seed: int = 10**9, test: bool = True) -> dict[str, float]:
    """Share of answers whose every token is the most likely one, per skill. Teacher forcing is exact for that: an answer that
    is right token by token under forcing is the greedy answer."""
    rng, right, count = random.Random(seed), {}, {}
    model.eval()
    for _ in range(documents):
        turns = document(rng, test=test, size=16)
        ids, mask = encode(tokenizer, turns)
        ids, mask = torch.tensor([ids], device=model.device), torch.tensor(mask)
        with torch.autocast(model.device.type, torch.bfloat16):
            best = model(input_ids=ids).logits[0].argmax(-1).cpu()
        hit = (best[:-1] == ids[0, 1:].cpu()) | (mask[1:] == 0)
        starts = [t for t in range(1, len(mask)) if mask[t] and not mask[t - 1]]
        for (skill, _, _), start in zip(turns, starts):
            end = next((t for t in range(start, len(mask)) if not mask[t]), len(mask))
            right[skill] = right.get(skill, 0) + int(hit[start - 1 : end - 1].all())
            count[skill] = count.get(skill, 0) + 1
    model.train()
    return {skill: round(right[skill] / count[skill], 4) for skill in sorted(count)}


def main():
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(config.threads)
    if config.evaluate:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(config.evaluate, dtype=torch.float32), AutoTokenizer.from_pretrained(config.evaluate)
        print(json.dumps(skills(model, tokenizer, documents=300), indent=1))
        return
    tokenizer = build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(config.init, dtype=torch.float32) if config.init else build_model(config, tokenizer)
    if torch.cuda.is_available():
        model.to("cuda")
    else:
        model.set_attn_implementation("eager")  # 15 % faster here: the CPU's fused attention has a slow backward at these lengths
    letters = SharedLetters(model, tokenizer, shared=bool(config.init))
    decay = [p for p in model.parameters() if p.ndim == 2] + [letters.parts]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}],
                                  lr=config.lr, betas=(0.9, 0.98), fused=True)
    rng, start, step, seen, last = random.Random(config.seed), time.time(), 0, 0, 0.0
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    curve = open(f"{out}.curve.jsonl", "w")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(tokenizer)} tokens", flush=True)
    progress = lambda: (time.time() - start) / (config.minutes * 60)
    # First nothing but "which id has this name", on pages that grow from 3 to 10 lines; then everything, up to 16 lines. Asked among all the
    # others, the look-up of ids was still at .3 after 14 M tokens; alone, it rose from .2 to .5 in two minutes (LOG.md). With --init the pages
    # have their full size from the beginning.
    alone = lambda: progress() < config.alone
    page = lambda: {"only_ids": alone(), "size": 3 + round(7 * progress() / config.alone) if alone() else 8 + round(8 * min(1, 2 * progress() + bool(config.init)))}
    stream = batches(tokenizer, rng, config.tokens, page, model.device)
    bar = tqdm(total=round(config.minutes * 60), unit="s", mininterval=10)
    while (done := progress()) < 1:
        lr = config.lr * min(1, (step + 1) / 300) * (1 if done < config.alone else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - config.alone) / (1 - config.alone))))
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids, mask = next(stream)
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = answer_loss(model, ids, mask)
        loss.backward()
        letters.collect()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        letters.write()
        optimizer.zero_grad()
        step, seen = step + 1, seen + ids.numel()
        if time.time() - last > 120:
            last = time.time()
            row = {"minutes": round((last - start) / 60, 1), "step": step, "tokens": seen, "loss": round(loss.item(), 3), **skills(model, tokenizer, documents=20, seed=step)}
            curve.write(json.dumps(row) + "\n")
            curve.flush()
            bar.write(json.dumps(row))
            lm.save(lm.LM(model, tokenizer, 2048), out)
        bar.n = round(time.time() - start)
        bar.refresh() if step % 100 == 0 else None
    lm.save(lm.LM(model, tokenizer, 2048), out)
    print(json.dumps(skills(model, tokenizer, documents=300), indent=1))


if __name__ == "__main__":
    main()
