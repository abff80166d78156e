"""What models and strangers may write, by the million: does anything but a promised exception come back?

    make fuzz                                         # an hour of two cores
    make fuzz CASES=100000                            # a minute
    python -m bench.fuzz --seed 7 --out runs/fuzz7    # other cases

A case is a few texts, made of recordings and of words of the grammars, then damaged. Its kind says what is
done with it (KINDS). A case fails where something else is raised than the function promises, where a round
trip changes something, or where it takes more than SECONDS of processor time. What fails is made smaller and
printed with the seed that makes it again; the exit status is 1. The slowest case of each kind is kept in
--out. Those of an hour are in tests/slowest.json, which tests/test_fuzz.py tries.

Each process has a seed. A round's cases depend on its seed and number alone. So the same command goes on
where it was killed, and with more --cases where it ended.
"""

import contextlib
import functools
import gzip
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import tyro

import a11y
import data
import judge
import lm
import policy
import world_model
from bench import drive
from data import Obs
from tiny import explore
from worlds import judged

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 2.0  # of processor time; the texts below are so short that milliseconds are usual
LONGEST = 20_000  # characters of a text

# What the grammars are made of, and what has broken parsers elsewhere.
WORDS = [
    *r"[ ] [] | ' \ ` , = : / . { } ( ) - # % \n \r \` \\ \u2028 \ud800 \x00 \N{DASH} %00 <|eot_id|>".split(),
    *"\" \t \n \r \r\n \0 \x0b \x1c \x85 \u2028 \u2029 \u200f \ufeff \ud800 \udfff ٣ ² İ 🙂".split(" "),
    " ", "  ", "", "\t\t\t\t", "'' ", "| ", "|! ", "| \t", "| [] ", "\n| ", "| | ", "[1] ", "[a12] ", "[0]",
    "[1", "1]", "[-1]", "[01] ", "[99999999999999999]", "9" * 30, "1" * 5000, "-1", "0", "1e999", "NaN", "/0",
    "/0/0", "/", "[1]/0", "/999999999", "/9999999999", "set ", "unset ", "name ", "line ", "del ", "add ",
    "move ", "page", "page\n| ", "no change", "add / 0\n| ", "set [1] ", "del [1]", "move [1] [2] 0",
    "value='x'", "value", "focused", ", focused", ", checked='true'", ", url='http://a/'", "checked=",
    "button 'Go'", "link ''", "StaticText 'a'", "RootWebArea 'x'", "textbox '' value='y'", r"'it\'s'",
    '"it\'s"', r"'\U00110000'", "over: yes", "over: no", "\nover: yes", "\nover: maybe", "COMPLETED: YES",
    "COMPLETED: NO", "\nCOMPLETED:", "**COMPLETED: YES**", "SUCCESS", "NOT SUCCESS", "NOT **SUCCESS**",
    "UNSUCCESSFUL", "NO SUCCESS", "OBSERVATION:", "\nURL: ", "\nOBJECTIVE: ", "\nPREVIOUS ACTIONS:\n1: None",
    "\nTASK: ", " where [1] is ", "None", "```", "``", "```click [1]```", "click [1]", "click", "hover [2]",
    "type [1] [x] [1]", "type [1] [", "] [0]", "] [1]", "press [Enter]", "scroll [down]", "goto [http://x/]",
    "new_tab", "tab_focus [0]", "stop [", "stop", "page_focus [1]", data._OPENING, data._CLOSING, "null",
    "true", "{}", "[]", '"', '{"messages": []}', '{"task":',
]


# ---- made of recordings, and damaged -----------------------------------------------------------------------


@functools.cache
def recorded() -> tuple[list[dict], list[dict]]:
    """Rows of the shipped recordings, some of each task, and of NNetNav's made ones."""
    rows = [row for _, row in data.read_jsonl(ROOT / "tiny/trajectories.jsonl.gz")]
    return rows[::16], [row for _, row in data.read_jsonl(ROOT / "tests/nnetnav_small.jsonl")]


def words(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(most)))


def damaged(rng: random.Random, text: str, most: int = 5) -> str:
    """`text` after up to `most` changes; as it is, once in a while."""
    for _ in range(rng.randrange(most + 1)):
        i = rng.randrange(len(text) + 1)
        j = min(len(text), i + rng.choice((0, 0, 1, 1, 2, 5, 20, 100, 10**6)))
        kind = rng.randrange(10)
        if kind < 4:
            text = text[:i] + rng.choice(WORDS) + text[j:]
        elif kind < 6:
            text = text[:i] + text[j:]
        elif kind < 7:
            text = text[:i] + chr(rng.randrange(rng.choice((128, 0x3000, 0x110000)))) + text[j:]
        elif kind < 8:
            text = text[:i] + text[i:j] * rng.choice((2, 3)) + text[j:]
        elif kind < 9:
            lines = text.split("\n")
            a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[a] = rng.choice(("", "\t", "\t" * rng.randrange(30))) + lines[b]
            text = "\n".join(lines)
        elif rng.randrange(200) == 0:  # long, or deep
            piece = rng.choice((rng.choice(WORDS), text[i:j] or "["))
            text = text[:i] + piece * rng.choice((100, 1000, 10**4)) + text[i:]
        text = text[:LONGEST]
    return text


def a_page(rng: random.Random) -> str:
    page = rng.choice(rng.choice(recorded()[0])["pages"])
    if rng.randrange(20) == 0:  # levels
        lines, depth = page.split("\n") * rng.randrange(1, 20), 0
        for n, line in enumerate(lines):
            depth = max(0, depth + rng.randint(-2, 2))
            lines[n] = "\t" * depth + line.lstrip("\t").replace("[", f"[{n}", 1)
        page = "\n".join(lines)
    return damaged(rng, page)


def an_action(rng: random.Random) -> str:
    if rng.randrange(4) == 0:
        name, opening, closing = map(rng.choice, (list(data._GRAMMAR), (" [", "[", " "), ("]", "", "] [1]")))
        return name + opening + words(rng) + closing
    return damaged(rng, rng.choice(rng.choice(recorded()[0])["actions"] or ["stop"]))


# ---- kinds -------------------------------------------------------------------------------------------------


def same(one, other) -> None:
    """What a round trip has to be. (assert would be silent under python -O.)"""
    if one != other:
        raise AssertionError(f"{str(one)[:200]!r} is not {str(other)[:200]!r}")


def make_action(rng):
    return an_action(rng), a_page(rng) if rng.randrange(8) == 0 else "[1] link 'x'"


def check_action(text, page):
    """An action, or ActionError; as printed it reads back, and its description is one line."""
    data.parse_described(text)
    try:
        action = data.parse_action(text)
    except data.ActionError:
        return
    same(data.parse_action(str(action)), action)
    said = data.describe(action, page)
    same(said, data.one_line(said))
    data.parse_described(said)
    data.write_thought(text, page, action)
    world_model.write_reason(page, action)


def make_completion(rng):
    action = an_action(rng)
    if rng.randrange(2):
        return words(rng), action
    return damaged(rng, f"{data._OPENING} {words(rng)} {data._CLOSING} ```{action}```"), action


def check_completion(text, action):
    """A thought and an action, or ActionError; any thought comes back beside its action."""
    thoughts = [text]
    try:
        thoughts.append(data.parse_completion(text)[0])
    except data.ActionError:
        pass
    try:
        parsed = data.parse_action(action)
    except data.ActionError:
        parsed = data.Action("stop")
    for thought in thoughts:
        same(data.parse_completion(data.completion(thought, parsed)), (thought.strip(), parsed))


def make_verdict(rng):
    end = rng.choice(("\nCOMPLETED: YES", "\nCOMPLETED: NO", "\nNOT SUCCESS", "\nSUCCESS", ""))
    page = a_page(rng) if rng.randrange(8) == 0 else words(rng)
    return damaged(rng, words(rng) + end), words(rng), page, rng.choice(("", "cut off"))


def check_verdict(text, goal, page, cut):
    """A place of a verdict or none, for both judges; no field of a prompt forges a header of it."""
    sample = lm.Sample([], [], text, bool(cut))
    place = judge.verdict_place(sample)
    same(place is None or "COMPLETED:" in place[0], True)
    obs = Obs(goal, goal, page)
    reward, why = judged.verdict(SimpleNamespace(generate=lambda *_: [sample]), obs, goal, [])
    same(reward in (0.0, 1.0) and not (reward and (why or cut or "SUCCESS" not in text)), True)
    for whole in (True, False):
        user = judge.messages(goal, [goal, page], page, goal, whole)[1]["content"]
        heads = [line.split(":")[0] for line in user.split("\n") if line.lstrip().startswith(data._HEADERS)]
        same(heads, ["OBSERVATION", "BEFORE", "OBJECTIVE", "PREVIOUS ACTIONS", "QUESTION"])
    user = judged.messages(obs, goal, [])[1]["content"].split("\n")
    heads = [line.split(":")[0] for line in user if not line.startswith("| ")]
    same(heads, ["TASK", "ANSWER", "URL", "THE LAST PAGE", "Your verdict"])


def make_delta(rng):
    page = a_page(rng)
    if rng.randrange(3) == 0:
        return page, "\n".join(words(rng, 5) for _ in range(rng.randrange(1, 5)))
    pages = rng.choice(recorded()[0])["pages"]
    return (page := rng.choice(pages)), damaged(rng, a11y.diff(page, rng.choice(pages)))


TALKS = SimpleNamespace(template=lm.Template(None))  # an ordinary model's answers are read as they are


def check_delta(page, delta):
    """A page, or DeltaError; that page can be had by a delta again. A world model's answer never raises."""
    try:
        after = a11y.apply(page, delta)
    except a11y.DeltaError:
        after = None
    text = world_model.target(delta, delta, True)
    answer = world_model.read_prediction(TALKS, page, lm.Sample([], [], text, False))
    same(answer.unknown == "", after is not None)
    world_model.read_prediction(TALKS, page, lm.Sample([], [], delta, False))
    if after is not None:
        same((answer.page, answer.delta, answer.over), (after, delta, True))
        same(a11y.apply(page, a11y.diff(page, after)), after)


def make_page(rng):
    page = a_page(rng)
    return page, a_page(rng) if rng.randrange(3) == 0 else damaged(rng, page)


def check_page(before, after):
    """parse and render, diff and apply, align, prompts: what tests of a11y and data claim of all
    strings."""
    same("\n".join(map(a11y.render, a11y.parse(before))), before)
    same(a11y.apply(before, a11y.diff(before, after)), after)
    aligned = a11y.align(before, after)
    same(a11y.align(before, aligned), aligned)
    same(a11y.align(before, before), before)
    same(a11y.apply(before, a11y.diff(before, aligned)), aligned)
    for bid in data.bids(before)[:3]:
        data.label(before, bid)
    url = data.root_url(before)
    user = policy.messages(after, url, before, (after,))[1]["content"]
    same(data.parse_prompt(user)[1:], (data.one_line(url), data.one_line(after), (data.one_line(after),)))


def odd(rng, value):
    """A value in the place of another, mostly of the same type."""
    if isinstance(value, str) and rng.randrange(4):
        return damaged(rng, value)
    if isinstance(value, list) and value and rng.randrange(4):
        n = rng.randrange(len(value))
        return value[:n] + rng.choice(([odd(rng, value[n])], [], [value[n]] * 2)) + value[n + 1:]
    if isinstance(value, dict) and value and rng.randrange(4):
        key = rng.choice(list(value))
        return {k: odd(rng, v) if k == key else v for k, v in value.items() if k != key or rng.randrange(4)}
    return rng.choice((None, True, 0, -1, 2, 10**25, 1.5, float("nan"), float("inf"), "", "\ud800", [], {},
                       [[]], [None], {"role": 1}, words(rng)))


def make_row(rng):
    rows = rng.choice(recorded())
    some = [rng.choice(rows)] if "pages" in rows[0] else rows[(k := rng.randrange(len(rows))):k + 2]
    text = "".join(explore.as_line(odd(rng, row) if rng.randrange(2) else row) for row in some)
    if rng.randrange(3) == 0:
        text = damaged(rng, text)
    elif rng.randrange(200) == 0:
        text = rng.choice(("[", '{"a":', '{"pages":[')) * 10**4 + text[:LONGEST]
    raw, name = text.encode("utf-8", "surrogatepass"), "rows.jsonl"
    if rng.randrange(4) == 0:
        raw, name = gzip.compress(raw, 1, mtime=0), "rows.jsonl.gz"
    if rng.randrange(3) == 0:
        raw = raw[:rng.randrange(len(raw) + 1)]  # killed while it was written
    if raw and rng.randrange(6) == 0:
        k = rng.randrange(len(raw))
        raw = raw[:k] + rng.randbytes(rng.randrange(4)) + raw[k + 1:]
    return name, raw.decode("latin-1")


@functools.cache
def folder() -> Path:
    """Of the files of rows; in memory where Linux has it."""
    shm = Path("/dev/shm")
    kept = tempfile.TemporaryDirectory(prefix="dynaweb-fuzz-", dir=shm if shm.is_dir() else None)
    folder.kept = kept  # it lives as long as this process
    return Path(kept.name)


def check_row(name, raw):
    """Rows and trajectories, or ValueError with the place. Written again, rows read as they were."""
    file = folder() / name
    file.write_bytes(raw.encode("latin-1"))
    for read in (lambda: list(data.read_jsonl(file)), lambda: data.read_trajectories(file)):
        try:
            read()
        except ValueError as error:
            same(str(error).startswith(str(file)), True)
    try:
        rows = [row for _, row in data.read_jsonl(file)]
    except ValueError:
        return
    written = folder() / "again.jsonl"
    written.write_text("".join(map(explore.as_line, rows)), encoding="utf-8")
    again = [row for _, row in data.read_jsonl(written)]
    same(json.dumps(again), json.dumps(rows))  # as text: NaN is not NaN


# Of 1,000 cases of a round, how many are of this kind; what makes one, and what it has to stand.
KINDS = {"action": (150, make_action, check_action), "completion": (150, make_completion, check_completion),
         "verdict": (150, make_verdict, check_verdict), "delta": (200, make_delta, check_delta),
         "page": (200, make_page, check_page), "row": (150, make_row, check_row)}
ROUND = sum(share for share, _, _ in KINDS.values())


# ---- one case ----------------------------------------------------------------------------------------------


class TooSlow(BaseException):
    """A case is over its time. No `except Exception` of what is tried may catch it."""


def too_slow(*_):
    raise TooSlow(f"more than {SECONDS} s of processor time")


def tried(kind: str, case: Sequence[str]) -> tuple[str, str]:
    """(name of a failure, what it says), both "" where the case stands it. Equal names: one cause, mostly."""
    signal.signal(signal.SIGVTALRM, too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with contextlib.redirect_stdout(None):
            KINDS[kind][2](*case)
    except KeyboardInterrupt:
        raise
    except TooSlow as error:
        return f"{kind}: too slow", str(error)
    except BaseException as error:  # whatever it is, it is what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if str(ROOT) in frame.filename][-1]
        says = f"{str(error)[:300]} ({Path(last.filename).name}:{last.lineno})"
        return f"{kind}: {type(error).__name__} in {last.name}", says
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "", ""


def smaller(kind: str, case: Sequence[str], name: str, seconds: float = 20) -> list[str]:
    """A case that fails alike, with pieces taken out as long as there is time: halves first, letters last."""
    case, end = list(case), time.monotonic() + seconds
    for size in (2**k for k in range(14, -1, -1)):
        for n in range(len(case)):
            at = 0
            while at < len(case[n]) and time.monotonic() < end:
                less = [*case[:n], case[n][:at] + case[n][at + size:], *case[n + 1:]]
                if tried(kind, less)[0] == name:
                    case = less
                else:
                    at += size
    return case


def cases(seed: int, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(kind, case) of a round."""
    rng = random.Random(f"{seed} {number}")
    for kind, (share, make, _) in KINDS.items():
        yield from ((kind, make(rng)) for _ in range(share))


# ---- rounds ------------------------------------------------------------------------------------------------


def one_round(seed: int, number: int, found: dict) -> None:
    """Try a round. Adds to `found`: cases, seconds, slowest and failures."""
    for kind, case in cases(seed, number):
        began = time.perf_counter()
        name, said = tried(kind, case)
        took = time.perf_counter() - began
        found["cases"][kind] = found["cases"].get(kind, 0) + 1
        found["seconds"][kind] = found["seconds"].get(kind, 0.0) + took
        record = found["slowest"].get(kind, [0.0])[0]
        again = 3 if not name and took > record else 0  # other work on the machine may have taken the time
        for _ in range(again):
            began = time.perf_counter()
            tried(kind, case)
            took = min(took, time.perf_counter() - began)
        if again and took > record:
            found["slowest"][kind] = [round(took, 4), case]
        if name and name not in found["failures"]:
            case = smaller(kind, case, name)
            found["failures"][name] = {"times": 0, "seed": seed, "round": number, "case": case,
                                       "says": tried(kind, case)[1] or said}
            print(shown(name, found["failures"][name]), flush=True)
        if name:
            found["failures"][name]["times"] += 1


def shown(name: str, failure: dict) -> str:
    case = repr(failure["case"])
    return (f"FAILED {name}: {failure['says']}\n    seed {failure['seed']}, round {failure['round']}: "
            f"{case[:500]}{' ... (whole in --out)' * (len(case) > 500)}")


def work(seed: int, last: int, out: Path) -> None:
    """All rounds of a seed, on from where its file stands; says where it is once a minute."""
    file = out / f"seed{seed}.json"
    found = drive.read(file) or {"rounds": 0, "cases": {}, "seconds": {}, "slowest": {}, "failures": {}}
    found["failures"] = {name: failure for name, failure in found["failures"].items()  # some may be mended
                         if tried(name.partition(":")[0], failure["case"])[0]}
    said = time.monotonic()
    while found["rounds"] < last:
        one_round(seed, found["rounds"], found)
        found["rounds"] += 1
        if time.monotonic() - said > 60 or found["rounds"] == last:
            said = time.monotonic()
            drive.write(file, found)
            rates = [f"{kind} {count / found['seconds'][kind]:,.0f}"
                     for kind, count in found["cases"].items()]
            print(f"seed {seed}: {found['rounds'] * ROUND:,} of {last * ROUND:,} cases; a second: "
                  f"{', '.join(rates)}", flush=True)
    drive.write(file, found)


@dataclass(frozen=True)
class Config:
    cases: int = 10_000_000
    """Cases of all kinds and processes."""
    seed: int = 0
    """Seed of the first process; the next has the next."""
    processes: int = 2
    """Processes side by side."""
    out: Path = Path("runs/fuzz")
    """Folder of what was found: a file a seed, and slowest.json."""


def main():
    config = tyro.cli(Config, description=__doc__)
    last = -(-config.cases // config.processes // ROUND)
    seeds = range(config.seed, config.seed + config.processes)
    workers = [multiprocessing.Process(target=work, args=(seed, last, config.out)) for seed in seeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [drive.read(config.out / f"seed{seed}.json") or {} for seed in seeds]
    if any(worker.exitcode for worker in workers) or not all(found):
        sys.exit("fuzz.py: a process ended before its time; the same command goes on")
    slowest = {kind: max(one["slowest"].get(kind, [0.0, None]) for one in found) for kind in KINDS}
    drive.write(config.out / "slowest.json", slowest)
    for kind, (seconds, _) in slowest.items():
        count = sum(one["cases"][kind] for one in found)
        print(f"{kind:10} {count:10,} cases, the slowest {1000 * seconds:.0f} ms")
    failures = {name: failure for one in found for name, failure in one["failures"].items()}
    for name, failure in failures.items():
        print(shown(name, failure))
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
