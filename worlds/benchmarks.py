"""Other people's benchmarks, each by its name.

    name                                        what it needs
    miniwob                                     nothing: every page of MiniWoB++ (worlds/miniwob.py)
    infinity                                    --sites: WebArena-Infinity's applications (worlds/infinity.py)
    webarena, webarena_lite, webarena_verified  sites of one's own, a venv of their own (worlds/webarena.py)
    webvoyager                                  --task-file, live sites, a judge behind a URL (worlds/live.py)
    openended                                   --task-file: any start URL and goal (worlds/live.py)

What is learned from must not be evaluated. MiniWoB++ has ranges of seeds for that (data.SEEDS). Elsewhere a
seed changes nothing, so the tasks are split by a hash of their names (data.side). What records to learn
takes the training side, train.py takes nothing else, and evaluates on the held-out side. evaluate.py plays
the tasks that it is told to (all, where nothing is said: published tables need all).
"""

import fnmatch
from collections.abc import Sequence

import data
from config import Benchmark, UserError
from worlds import infinity, judged, live, webarena
from worlds.miniwob import LAPTOP, Browser, tasks_of


def world(on: Benchmark):
    """The pages of a benchmark, to be entered. Raises UserError where something that it needs is not there.
    """
    name, seconds = on.benchmark, on.step_seconds
    of_live = name in ("webvoyager", "openended")
    for flag, given, fits in (("sites", on.sites, name == "infinity"), ("task-file", on.task_file, of_live),
                              ("grader-url", on.grader_url, of_live),
                              ("hosts", on.hosts, of_live or name in data.WEBARENA)):
        if given and not fits:
            raise UserError(f"--{flag} is not for --benchmark {name or 'miniwob'}; leave it out")
    if name in ("", "miniwob"):
        return Browser(seconds or 10.0)
    if name == "infinity":
        return infinity.Infinity(on.sites, seconds or 10.0)
    if name in data.WEBARENA:
        return webarena.WebArena(name, on.hosts)
    if not of_live:
        raise UserError(f"no benchmark {name!r}; there are {', '.join(data.HORIZONS)}")
    if not on.task_file:
        raise UserError(f"--benchmark {name}: which tasks? give --task-file FILE")
    kind, fields = (live.WebVoyager, live.WEBVOYAGER) if name == "webvoyager" else (live.Live, live.OPENENDED)
    return kind(live.read_tasks(on.task_file, fields), hosts=on.hosts, timeout=seconds or 30.0,
                judge=judged.Grader(on.grader_url) if on.grader_url else None, screenshots=on.screenshots)


def tries(on: Benchmark, web, tasks: Sequence[str], seeds: str, limit: int) -> list[data.Start]:
    """What evaluate.py tries: each task of MiniWoB++ on each of the seeds (START:COUNT), of another benchmark
    each once."""
    if on.benchmark in ("", "miniwob"):
        names = chosen(list(dict.fromkeys(tasks_of(tuple(tasks) or ("laptop",)))), (), limit)
        for task in names:
            web._check(task)
        return [data.start(task, seed) for task in names for seed in data.seeds_to_look_at(seeds)]
    return [data.start(task) for task in chosen(list(web.tasks()), tasks, limit, getattr(web, "named", None))]


def dev_starts(on: Benchmark, web, seeds: str, learned: Sequence[str]) -> list[data.Start]:
    """What train.py evaluates on: the tasks that are learned, on dev seeds; or as many held-out tasks of a
    benchmark."""
    range_ = data.seeds_to_look_at(seeds, dev=True)
    if on.benchmark in ("", "miniwob"):
        known = [task for task in learned if web.knows(task)] or LAPTOP  # recordings may be of other pages
        return [data.start(task, seed) for task in known for seed in range_]
    return [data.start(task) for task in chosen(of_side(list(web.tasks()), data.HELD_OUT), (), len(range_))]


def of_side(tasks: Sequence[str], wanted: str) -> list[str]:
    """Those of one side of the split (data.side). Raises ValueError where there is none."""
    found = [task for task in tasks if data.side(task) == wanted]
    if not found:
        raise UserError(f"none of these {len(tasks)} tasks is on the {wanted} side of the benchmark's split "
                         f"(side): {', '.join(list(tasks)[:3])}. Give other --tasks")
    return found


def chosen(tasks: Sequence[str], globs: Sequence[str], limit: int = 0,
           named: dict[str, Sequence[str]] | None = None) -> list[str]:
    """The tasks that the globs name, in their order. With a limit so many of them, spread over the list: of
    each site some. `named`: globs that a word stands for.

    >>> chosen(["gmail/e1", "gmail/e2", "xero/e1"], ["gmail/*"])
    ['gmail/e1', 'gmail/e2']
    >>> chosen(["a", "b", "c", "d", "e"], [], 3)
    ['a', 'b', 'd']
    """
    globs = [glob for name in globs for glob in (named or {}).get(name, [name])]
    for glob in globs:
        if not fnmatch.filter(tasks, glob):
            raise UserError(f"--tasks {glob}: no task has such a name; there are {len(tasks)}, such as "
                             f"{', '.join(list(tasks)[:3])}")
    found = [task for task in tasks if not globs or any(fnmatch.fnmatchcase(task, glob) for glob in globs)]
    count = min(limit or len(found), len(found))
    return [found[k * len(found) // count] for k in range(count)]
