"""Other people's benchmarks, each by its name, behind reset and step of policy.World.

    with world(Options("infinity", sites="webarena-infinity/apps")) as web:
        web.tasks()                                         # {"gmail/task_e1": Task(site, difficulty, goal)}
        obs = web.reset([start("gmail/task_e1")])
        obs, rewards, terminated, truncated = web.step([parse_action("click [13]")])
        web.failures                                        # of each page how it failed, else ''

    python evaluate.py --benchmark infinity --sites DIR --checkpoint runs/laptop/dream --json tries.jsonl
    python -m worlds.explore --benchmark infinity --sites DIR --out FILE

    name                                        what it needs
    miniwob                                     nothing: every page of MiniWoB++ (worlds/miniwob.py)
    infinity                                    --sites: WebArena-Infinity's applications (worlds/infinity.py)
    webarena, webarena_lite, webarena_verified  sites of one's own, a venv of their own (worlds/webarena.py)
    webvoyager                                  --task-file, live sites, a judge behind a URL (worlds/live.py)
    openended                                   --task-file: any start URL and goal (worlds/live.py)

An agent's tries are made by worlds/tries.py.

What is learned from must not be evaluated. MiniWoB++ has ranges of seeds for that (data.SEEDS). Elsewhere a
seed changes nothing, so the tasks are split by a hash of their names (data.side). What records to learn
takes the training side, train.py takes nothing else, and its looks are at the held-out side. An evaluation
plays the tasks that it is told to (all, where nothing is said: published tables need all), and says what each
side came to.
"""

import fnmatch
from collections.abc import Callable, Sequence

import data
from worlds import infinity, live, webarena
from worlds.miniwob import TASKS, Browser


def world(options: data.Options, grader=None):
    """The world of a benchmark, to be entered. `grader`: who judges live sites (remote.grader). Raises
    ValueError where something that it needs is not there."""
    name, seconds = options.benchmark, options.step_seconds
    if name in ("", "miniwob"):
        return Browser(seconds or 10.0)
    if name == "infinity":
        return infinity.Infinity(options.sites, seconds or 10.0)
    if name in data.WEBARENA:
        return webarena.WebArena(name, options.hosts)
    kind, fields = live.Live, live.OPENENDED
    if name == "webvoyager":
        kind, fields = live.WebVoyager, live.WEBVOYAGER
    return kind(live.read_tasks(options.task_file, fields), hosts=options.hosts, timeout=seconds or 30.0,
                judge=grader, screenshots=options.screenshots)


def knows(options: data.Options) -> Callable[[str], bool]:
    """Whether a task can be reset there, by its name."""
    if options.benchmark in ("", "miniwob"):
        return Browser.knows
    return world(options).tasks().__contains__


def starts(options: data.Options, web, seeds: str,
           tasks: Sequence[str] = TASKS) -> tuple[list[data.Start], str]:
    """The first pages of these tasks on these seeds (START:COUNT), to be looked at, and what they are, in
    words; of a benchmark, of so many of its held-out tasks as there are seeds. None where there is no `web`,
    as nobody looks."""
    if web is None:
        return [], ""
    seeds = data.seeds_to_look_at(seeds)
    if options.benchmark in ("", "miniwob"):
        return [data.start(task, seed) for task in tasks for seed in seeds], "dev seeds"
    held_out = of_side(list(web.tasks()), data.HELD_OUT)
    return [data.start(task, 0) for task in chosen(held_out, (), len(seeds))], "held-out tasks"


def of_side(tasks: Sequence[str], wanted: str) -> list[str]:
    """Those of one side of the split (data.side). Raises ValueError where there is none."""
    found = [task for task in tasks if data.side(task) == wanted]
    if not found:
        raise ValueError(f"none of these {len(tasks)} tasks is on the {wanted} side of the benchmark's split "
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
            raise ValueError(f"--tasks {glob}: no task has such a name; there are {len(tasks)}, such as "
                             f"{', '.join(list(tasks)[:3])}")
    found = [task for task in tasks if not globs or any(fnmatch.fnmatchcase(task, glob) for glob in globs)]
    count = min(limit or len(found), len(found))
    return [found[k * len(found) // count] for k in range(count)]
