"""What a11y.py costs as pages grow, and which script diff chooses: `python bench/bench_a11y.py`.

Each ratio is against the row above, at twice the size: 2 is linear, 4 quadratic. Best of three, one process."""
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from a11y import align, apply, diff, parse  # noqa: E402

WORDS = "open close save delete next price from to Berlin Paris ticket cart search result comment issue".split()


def page(size: int, seed: int) -> str:
    """About `size` characters like a listing page: sections of rows of links, texts and fields; ids count up."""
    rng, lines, bid, length = random.Random(seed), ["RootWebArea 'Shop', focused, url='http://shop/'"], 10, 0
    while length < size:
        length -= sum(map(len, lines[-8:]))
        lines.append(f"\t[{bid}] list '', visible")
        for row in range(rng.randint(5, 20)):
            name = " ".join(rng.choices(WORDS, k=3))
            lines += [f"\t\t[{bid + 1}] listitem '', visible", f"\t\t\t[{bid + 2}] link '{name} {rng.randint(0, 999)}', clickable, visible, url='/{row}'",
                      f"\t\t\t\tStaticText '{rng.choice(WORDS)}'", f"\t\t\t[{bid + 4}] textbox '{rng.choice(WORDS)}', clickable, visible",
                      f"\t\t\t[{bid + 5}] checkbox '', clickable, checked='false'", "\t\t\tStaticText '|'"]
            bid += 6
        bid += 1
        length = sum(map(len, lines)) + len(lines)
    return "\n".join(lines)


def subtree(lines: list[str], i: int) -> int:
    depth, end = len(lines[i]) - len(lines[i].lstrip("\t")), i + 1
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip("\t")) > depth:
        end += 1
    return end


def edit(text: str, count: int, seed: int) -> str:
    """A page after `count` of: an attribute set, a name changed, a subtree removed, inserted or moved among its siblings."""
    rng, lines = random.Random(seed), text.split("\n")
    for n in range(count):
        i = rng.randrange(1, len(lines))
        end, kind = subtree(lines, i), rng.randrange(5)
        tabs = "\t" * (len(lines[i]) - len(lines[i].lstrip("\t")))
        if kind == 0 and "[" in lines[i]:
            lines[i] += ", pressed='true'"
        elif kind == 1:
            lines[i] = lines[i].replace("'", f"'{rng.choice(WORDS)} ", 1)
        elif kind == 2 and end - i < 20:
            del lines[i:end]
        elif kind == 3:
            lines[i:i] = [f"{tabs}[{900000 + n}] dialog 'New {n}', visible", f"{tabs}\tStaticText 'Sure?'"]
        elif kind == 4 and end - i < 20 and end < len(lines) and lines[end].startswith(tabs) and not lines[end].startswith(tabs + "\t"):
            lines[i:subtree(lines, end)] = lines[end:subtree(lines, end)] + lines[i:end]
    return "\n".join(lines)


def best(function, *arguments) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def costs(title: str, after_of) -> None:
    print(f"\n{title}\n{'size':>9} {'lines':>7} " + " ".join(f"{name:>7} {'x':>4}" for name in ("parse", "diff", "apply", "align")) + f" {'delta':>7}")
    last = None
    for size in (12_500, 25_000, 50_000, 100_000, 200_000):
        before = page(size, 1)
        after = after_of(before)
        delta = diff(before, after)
        row = [best(parse, before), best(diff, before, after), best(apply, before, delta), best(align, before, after)]
        ratios = [now / then for now, then in zip(row, last)] if last else [0] * len(row)
        print(f"{len(before):9} {before.count(chr(10)) + 1:7} " + " ".join(f"{t:7.3f} {r:4.1f}" for t, r in zip(row, ratios)) + f" {len(delta):7}")
        last = row


def shares() -> None:
    """Which script diff writes after 1 to 8 edits of a small page, and its size against the page's."""
    chosen, sizes, pages = {"ops": 0, "line": 0, "splice": 0, "page": 0}, 0, 0
    for seed in range(500):
        before = page(1500, seed)
        after = align(before, edit(before, seed % 8 + 1, seed))
        delta = diff(before, after)
        word = delta.split(" ")[0].split("\n")[0]
        chosen[word if word in chosen else "line" if "\nline [" in "\n" + delta else "ops"] += 1
        sizes, pages = sizes + len(delta), pages + len(after)
    print("\n500 small pages, 1 to 8 edits each: " + ", ".join(f"{word} {count / 5:.1f} %" for word, count in chosen.items())
          + f"; deltas are {100 * sizes / pages:.1f} % of the pages")


def main() -> None:
    costs("10 edits", lambda before: edit(before, 10, 2))
    costs("one edit for 20 lines", lambda before: edit(before, before.count("\n") // 20, 3))
    costs("another page", lambda before: page(len(before), 4))
    costs("the same page reversed", lambda before: "\n".join(reversed(before.split("\n"))))
    costs("every line the same, half of them gone", lambda before: before.replace("'", "")[:len(before) // 2])
    shares()


if __name__ == "__main__":
    main()
