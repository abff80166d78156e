r"""Made-up recordings: NNetNav's rows of tasks on sites that nobody built, as many as are wanted.

    row = next(rows(seed=0))             # {"task_name": .., "messages": [system, user, assistant], ..}

What costs time and memory is as in the published files: pages of 33 kB in the mean, log-normal, some hundred
lines each; static texts in several scripts; a next page that is mostly the page before, or another page of
the site. Nothing on it can be understood. No torch here.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import data
import policy

LATIN = "b c d f g k l m n p r s t v br st tr".split(), "a e i o u ai ou".split()
SCRIPTS = {  # how many of ten sites, and the beginnings and ends of its syllables
    "latin": (7, LATIN),
    "cyrillic": (1, ([chr(k) for k in range(0x431, 0x443)], [chr(k) for k in range(0x443, 0x44c)])),
    "arabic": (1, ([chr(k) for k in range(0x628, 0x63b)], ["\u0627", "\u0648", "\u064a"])),
    "chinese": (1, ([chr(0x4E00 + 37 * k) for k in range(80)], [chr(0x6000 + 29 * k) for k in range(80)])),
}


def syllables(script: tuple[list[str], list[str]]) -> list[str]:
    return [a + b for a in script[0] for b in script[1]]


def _lexicon(script: tuple[list[str], list[str]]) -> list[str]:
    """3,000 words, the same in every file."""
    rng, parts = random.Random(0), syllables(script)
    words = ["".join(rng.choices(parts, k=rng.choice((1, 2, 2, 3, 3, 4)))) for _ in range(3_000)]
    some = lambda share: rng.random() < share
    return [(word.capitalize() if some(0.15) else word) + ("'s" if some(0.02) else "") for word in words]


WORDS = {name: _lexicon(script) for name, (_, script) in SCRIPTS.items()}
WEIGHTS = list(accumulate(1 / (k + 10) for k in range(3_000)))  # common words are common (Zipf)
PAGE = 33_000  # bytes in the mean (NOTES 2.7)
OF_SITE, OF_PAGE = 0.6, 0.36  # deviations of log size, among sites and among the pages of one: .7 together
NAVIGATES = 0.2  # of the actions lead to another page of the site
SEARCH = " value='', clickable, visible"


@dataclass
class _Block:
    """Some lines of a page, and what can be clicked in them: (id, name)."""

    text: str
    links: list[tuple[int, str]] = field(default_factory=list)
    buttons: list[tuple[int, str]] = field(default_factory=list)


class Site:
    """A site, and the page of it that is open. Its pages share header, footer and script."""

    def __init__(self, rng: random.Random, page_bytes: int = PAGE):
        self.rng = rng
        script = rng.choices(list(SCRIPTS), [share for share, _ in SCRIPTS.values()])[0]
        self.words, self.host = WORDS[script], f"https://www.{self.slug()}.example"
        # The mean of a log-normal is over its median by half its variance.
        self.size = page_bytes * math.exp(rng.gauss(-(OF_SITE**2 + OF_PAGE**2) / 2, OF_SITE))
        self.last = rng.randint(8, 40)
        top, self.search = self.id(), self.id()
        box = f"\t[{top}] banner '', visible\n\t\t[{self.search}] searchbox 'Search'{SEARCH}"
        self.header = [_Block(box), *self.blocks(0.06 * self.size)]
        self.behind = self.last
        self.open()

    def id(self) -> int:
        """The next id of the page: in the order of its elements, with gaps."""
        self.last += self.rng.choice((1, 1, 2, 3))
        return self.last

    def phrase(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(self.words, cum_weights=WEIGHTS, k=self.rng.randint(low, high)))

    def slug(self) -> str:
        return "-".join(self.rng.choices(WORDS["latin"], k=2)).lower().replace("'", "")

    def blocks(self, size: float) -> list[_Block]:
        """At least one, and so many that they have about `size` bytes."""
        made = [self.block()]
        while (size := size - len(made[-1].text.encode())) > 135:  # half a block
            made.append(self.block())
        return made

    def block(self) -> _Block:
        """A card, a paragraph, a row of a table, or a field of a form."""
        kind, name = self.rng.random(), self.phrase(1, 7)
        if kind < 0.5:
            item, link, button = self.id(), self.id(), self.id()
            url = f"{self.host}/{self.slug()}/{self.rng.randrange(10**6)}"
            return _Block(f"\t\t[{item}] listitem '', visible\n"
                          f"\t\t\t[{link}] link {name!r}, clickable, visible, url='{url}'\n"
                          f"\t\t\t\tStaticText {name!r}\n\t\t\tStaticText {self.phrase(4, 12)!r}\n"
                          f"\t\t\t[{button}] button {name!r}, clickable, visible, expanded=False",
                          [(link, name)], [(button, name)])
        if kind < 0.7:
            text = self.phrase(10, 40)
            return _Block(f"\t\t[{self.id()}] paragraph '', visible\n\t\t\tStaticText {text!r}")
        if kind < 0.85:
            cells = name, f"{self.rng.randrange(10**4) / 100:.2f}", self.phrase(1, 2)
            lines = [f"\n\t\t\t[{self.id()}] gridcell {text!r}, visible" for text in cells]
            return _Block(f"\t\t[{self.id()}] row '', visible{''.join(lines)}")
        box, button = self.id(), self.id()
        return _Block(f"\t\t[{box}] checkbox {name!r}, clickable, visible, checked='false'\n"
                      f"\t\t[{button}] button {name!r}, clickable, visible", [], [(button, name)])

    def open(self) -> None:
        """Another page of the site. Its ids start again behind the header's."""
        self.last, size = self.behind, self.size * math.exp(self.rng.gauss(0, OF_PAGE))
        self.title, self.url = self.phrase(2, 6), f"{self.host}/{self.slug()}"
        self.typed = ""
        self.main = self.blocks(0.84 * size)
        self.footer = self.blocks(0.06 * self.size)

    def change(self) -> None:
        """A part of the page changes: blocks come, none, as many or twice as many go."""
        share = math.exp(self.rng.uniform(math.log(0.004), math.log(0.25)))
        new = self.blocks(share * self.size)
        gone = len(new) * self.rng.choice((0, 1, 2))
        at = self.rng.randrange(max(1, len(self.main) - gone))
        self.main[at + 1 : at + 1 + gone] = new

    def page(self) -> str:
        root = f"RootWebArea {self.title!r}, focused, url='{self.url}'"
        text = "\n".join([root, *(block.text for block in (*self.header, *self.main, *self.footer))])
        return text.replace(SEARCH, f" value={self.typed!r}{SEARCH[9:]}", 1) if self.typed else text

    def act(self) -> tuple[data.Action, str]:
        """(action, the name of its element), carried out. What there is to click is drawn from all blocks."""
        rng, navigates = self.rng, self.rng.random() < NAVIGATES
        if rng.random() < 0.2:
            query = self.phrase(1, 3)
            action = data.Action("type", str(self.search), query, navigates)
            self.open() if navigates else self.change()
            self.typed = query
            return action, "Search"
        there = [*self.header, *self.main, *self.footer]
        found = [one for block in there for one in (block.links if navigates else block.buttons)]
        if not found:
            return data.Action("scroll", text="down"), ""
        bid, name = rng.choice(found)
        self.open() if navigates else self.change()
        return data.Action("click", str(bid)), name


def rows(seed: int, page_bytes: int = PAGE) -> Iterator[dict]:
    """NNetNav's rows (NOTES 6.1), task after task, without end. A task has some 10 of them, as published."""
    task = 0
    while True:
        rng = random.Random(f"{seed} {task}")
        site, steps, previous = Site(rng, page_bytes), rng.randint(4, 15), ()
        name, goal = f"made-up-{seed}-{task}", f"Find {site.phrase(3, 9)}"
        for step in range(steps):
            page, url, element = site.page(), site.url, ""
            action = data.Action("stop", text=site.phrase(1, 4))
            if step < steps - 1:
                action, element = site.act()
            answer = data.completion(f"{site.phrase(60, 140)}. {element!r} is next.", action)
            messages = policy.messages(goal, url, page, previous)
            text = messages[1]["content"]
            yield {"dataset": "made_up", "id": f"{name}-{step}", "output": answer, "task_name": name,
                   "prompt": text, "n_tokens": len(text) // 4,
                   "messages": [*messages, {"role": "assistant", "content": answer}]}
            shown = f"type [{action.bid}] [{action.text}{' ' if action.enter else ''}]"
            shown = shown if action.name == "type" else str(action)
            previous += (f"{shown} where [{action.bid}] is {element}" if action.bid else shown,)
        task += 1
