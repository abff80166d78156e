"""What a11y.py costs as pages grow: `python -m bench.bench_a11y`.

Each ratio is against the row above, at twice the size: 2 is linear, 4 quadratic. Seconds of processor time,
the best of five, so that other work on the machine does not count."""

import random
import time
import timeit
from collections.abc import Callable

from a11y import align, apply, diff, parse

WORDS = ("open close save delete next price from to Berlin Paris ticket cart search result comment "
         "issue").split()


def page(size: int, seed: int) -> list[str]:
    """About `size` characters of a listing page: its root, and items of links, texts and fields."""
    rng, items = random.Random(seed), ["RootWebArea 'Shop', focused, url='http://shop/'"]
    for bid in range(10, size // 5, 50):  # an item has some 250 characters
        name = " ".join(rng.choices(WORDS, k=3))
        items.append("\n".join([
            f"\t[{bid}] listitem '', visible",
            f"\t\t[{bid + 1}] link '{name} {rng.randint(0, 999)}', clickable, visible, url='/{bid}'",
            f"\t\t\tStaticText '{rng.choice(WORDS)}'",
            f"\t\t[{bid + 2}] textbox '{rng.choice(WORDS)}', clickable, visible",
            f"\t\t[{bid + 3}] checkbox '', clickable, checked='false'",
            "\t\tStaticText '|'"]))
    return items


def edit(items: list[str], count: int) -> list[str]:
    """A page after `count` items were changed, removed or moved."""
    rng, items = random.Random(2), list(items)
    for _ in range(count):
        k, kind = rng.randrange(1, len(items)), rng.randrange(3)
        if kind == 0:
            items[k] = items[k].replace("link '", "link 'new ").replace("visible", "visible, focused", 1)
        elif kind == 1:
            del items[k]
        else:
            items.insert(rng.randrange(1, len(items)), items.pop(k))
    return items


def best(function: Callable, *arguments: str) -> float:
    return min(timeit.repeat(lambda: function(*arguments), timer=time.process_time, number=1))


def costs(title: str, after_of: Callable[[list[str]], list[str]]) -> None:
    names = " ".join(f"{name:>7} {'x':>4}" for name in ("parse", "diff", "apply", "align"))
    print(f"\n{title}\n{'size':>9} {'lines':>7} {names}   delta")
    last = None
    for size in (12_500, 25_000, 50_000, 100_000, 200_000):
        items = page(size, 1)
        before, after = "\n".join(items), "\n".join(after_of(items))
        delta = diff(before, after)
        row = [best(parse, before), best(diff, before, after), best(apply, before, delta),
               best(align, before, after)]
        ratios = [now / then for now, then in zip(row, last)] if last else [0] * len(row)
        times = " ".join(f"{seconds:7.3f} {ratio:4.1f}" for seconds, ratio in zip(row, ratios))
        print(f"{len(before):9} {before.count(chr(10)) + 1:7} {times} {len(delta):7}")
        last = row


if __name__ == "__main__":
    costs("10 edits", lambda items: edit(items, 10))
    costs("one edit for 20 lines", lambda items: edit(items, len(items) * 6 // 20))
    costs("another page", lambda items: page(len("\n".join(items)), 4))
    costs("the same page reversed", lambda items: "\n".join(items).split("\n")[::-1])
