"""What a11y.py costs as pages grow, and which script diff chooses: `python -m bench.bench_a11y`.

Each ratio is against the row above, at twice the size: 2 is linear, 4 quadratic. Seconds of processor time,
the best of five, so that other work on the machine does not count."""
import gzip
import json
import random
import time
from collections import Counter
from pathlib import Path

from a11y import align, apply, diff, parse

WORDS = ("open close save delete next price from to Berlin Paris ticket cart search result comment "
         "issue").split()


def page(size: int, seed: int) -> str:
    """About `size` characters like a listing page: sections of rows of links, texts and fields."""
    rng, lines, bid, length = random.Random(seed), ["RootWebArea 'Shop', focused, url='http://shop/'"], 10, 0
    while length < size:
        length -= sum(map(len, lines[-8:]))
        lines.append(f"\t[{bid}] list '', visible")
        for row in range(rng.randint(5, 20)):
            name = " ".join(rng.choices(WORDS, k=3))
            lines += [f"\t\t[{bid + 1}] listitem '', visible",
                      f"\t\t\t[{bid + 2}] link '{name} {rng.randint(0, 999)}', clickable, visible, "
                      f"url='/{row}'",
                      f"\t\t\t\tStaticText '{rng.choice(WORDS)}'",
                      f"\t\t\t[{bid + 4}] textbox '{rng.choice(WORDS)}', clickable, visible",
                      f"\t\t\t[{bid + 5}] checkbox '', clickable, checked='false'",
                      "\t\t\tStaticText '|'"]
            bid += 6
        bid += 1
        length = sum(map(len, lines)) + len(lines)
    return "\n".join(lines)


def depth(line: str) -> int:
    return len(line) - len(line.lstrip("\t"))


def subtree(lines: list[str], i: int) -> int:
    """The line behind the subtree of line i."""
    end = i + 1
    while end < len(lines) and depth(lines[end]) > depth(lines[i]):
        end += 1
    return end


def edit(text: str, count: int, seed: int) -> str:
    """A page after `count` of: an attribute set, a name changed, a subtree removed, inserted or moved among
    its siblings."""
    rng, lines = random.Random(seed), text.split("\n")
    while count:
        i = rng.randrange(1, len(lines))
        end, kind = subtree(lines, i), rng.randrange(5)
        tabs, same = "\t" * depth(lines[i]), list(lines[i:end + 1])
        if kind == 0 and "clickable" in lines[i]:
            lines[i] = lines[i].replace("clickable", "clickable, visible, focused")
            lines[i] = lines[i].replace("focused, visible", "focused")
        elif kind == 1:
            lines[i] = lines[i].replace("'", f"'{rng.choice(WORDS)} ", 1)
        elif kind == 2 and end - i < 20:
            del lines[i:end]
        elif kind == 3:
            dialog = f"{tabs}[{900000 + count}] dialog 'New {count}', visible"
            lines[i:i] = [dialog, f"{tabs}\tStaticText 'Sure?'"]
        elif kind == 4 and end - i < 20 and end < len(lines) and depth(lines[end]) == depth(lines[i]):
            behind = subtree(lines, end)
            lines[i:behind] = lines[end:behind] + lines[i:end]
        count -= lines[i:end + 1] != same
    return "\n".join(lines)


def best(function, *arguments) -> float:
    times = []
    for _ in range(5):
        start = time.process_time()
        function(*arguments)
        times.append(time.process_time() - start)
    return min(times)


def costs(title: str, after_of) -> None:
    names = " ".join(f"{name:>7} {'x':>4}" for name in ("parse", "diff", "apply", "align"))
    print(f"\n{title}\n{'size':>9} {'lines':>7} {names}   delta")
    last = None
    for size in (12_500, 25_000, 50_000, 100_000, 200_000):
        before = page(size, 1)
        after = after_of(before)
        delta = diff(before, after)
        row = [best(parse, before), best(diff, before, after), best(apply, before, delta),
               best(align, before, after)]
        ratios = [now / then for now, then in zip(row, last)] if last else [0] * len(row)
        times = " ".join(f"{seconds:7.3f} {ratio:4.1f}" for seconds, ratio in zip(row, ratios))
        print(f"{len(before):9} {before.count(chr(10)) + 1:7} {times} {len(delta):7}")
        last = row


def shares(title: str, transitions) -> None:
    """Which deltas diff writes for (before, after) pages, how long they are, and which words they use."""
    chosen, sizes, whole, words = Counter(), [], 0, Counter()
    for before, after in transitions:
        after = align(before, after)
        delta = diff(before, after)
        found = [line.split(" ")[0] for line in delta.split("\n") if not line.startswith("|")]
        words.update(found)
        kind = "line" if "line" in found else "operations"
        chosen[{"no": "no change", "page": "page"}.get(found[0], kind)] += 1
        sizes.append(len(delta))
        whole += len(after)
    kinds = [f"{kind} {100 * count / len(sizes):.1f} %" for kind, count in chosen.most_common()]
    print(f"\n{title} ({len(sizes)} transitions): " + ", ".join(kinds))
    median = sorted(sizes)[len(sizes) // 2]
    counts = [f"{word} {count}" for word, count in words.most_common()]
    print(f"  deltas are {100 * sum(sizes) / whole:.1f} % of the pages, median {median} characters; "
          + ", ".join(counts))


def recorded():
    """Consecutive pages of the trajectories shipped with the repository, aligned as data.py aligns them."""
    path = Path(__file__).resolve().parent.parent / "recordings" / "small.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            pages = json.loads(line)["pages"]
            before = pages[0]
            for after in pages[1:]:
                after = align(before, after)
                yield before, after
                before = after


def main() -> None:
    costs("10 edits", lambda before: edit(before, 10, 2))
    costs("one edit for 20 lines", lambda before: edit(before, before.count("\n") // 20, 3))
    costs("another page", lambda before: page(len(before), 4))
    costs("the same page reversed", lambda before: "\n".join(reversed(before.split("\n"))))
    costs("its second half gone, and all quotes", lambda before: before.replace("'", "")[:len(before) // 2])
    small = [page(1500, seed) for seed in range(300)]
    edited = [edit(before, seed % 8 + 1, seed) for seed, before in enumerate(small)]
    shares("small pages, 1 to 8 edits", zip(small, edited))
    shares("another page", zip(small, small[1:]))
    shares("recorded pages", recorded())


if __name__ == "__main__":
    main()
