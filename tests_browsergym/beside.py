"""Our MiniWoB++ (worlds/miniwob.py) and BrowserGym's own, side by side: the same actions on the same seeds.

BrowserGym's own is its environment as gymnasium makes it: its page, its action set (real mouse events), its
observation, its 0.5 s before each look. What is set equal, and how:
- The page's seed. BrowserGym draws it from the task's seed: RandomState(seed).randint(0, 1000000).
- The element. Ids differ, so an element is named by its way from <body>: child 0, of that child 2, ...
- The text. BrowserGym's is cleaned as ours (chromium.page_text); ids and the install path are taken out.
- The window (theirs is 332 x 214), or `visible` would differ.
What is not: animations and timers (real ones there), what a click or a key is made of.
Two things are changed there, which no page can see: one Chromium serves all resets and the chat window (a
reset would start two), and an element has 5 s to come to rest instead of 0.5 (a busy machine needs them).
"""
import logging
import os
import re
import time
from dataclasses import replace

import browsergym.miniwob
import numpy as np

from data import Action, Start, bids, parse_action
from tiny import explore
from worlds.gym import BrowserGymPages, browsergym_code
from worlds.miniwob import HTML, ORIGIN, VIEWPORT, Browser
from worlds.miniwob import TASKS as RECIPE

os.environ["MINIWOB_URL"] = f"file://{HTML}/miniwob/"
TASKS = tuple(task.subdomain for task in browsergym.miniwob.ALL_MINIWOB_TASKS)
HORIZON = 6  # the explorer's
logging.getLogger("browsergym").setLevel(logging.ERROR)  # it warns of each setting that is not its own

# BrowserGym takes these away, we hide them. They stand between <body>'s other children.
CHILDREN = """const children = el =>
  [...el.children].filter(el => !el.matches('#reward-display, #click-canvas, #sync-task-cover'));"""
WAY = """bid => { CHILDREN
  const way = [];
  for (let el = dynaweb.nodes[bid]; el !== document.body; el = el.parentElement)
    way.unshift(children(el.parentElement).indexOf(el));
  return way; }""".replace("CHILDREN", CHILDREN)
BID = """way => { CHILDREN
  let el = document.body;
  for (const k of way) el = el && children(el)[k];
  return el && el.getAttribute('bid'); }""".replace("CHILDREN", CHILDREN)


def page_seed(seed: int) -> int:
    """The seed that browsergym.miniwob gives the page for a seed of the task."""
    return int(np.random.RandomState(seed).randint(0, 1000000))


class BrowserGym(BrowserGymPages):
    """BrowserGym's environment, one at a time, in one Chromium. `own`: a Chromium for each reset and one for
    its chat, and its own waiting, as BrowserGym comes; to time it."""

    def __init__(self, own: bool = False, **env_kwargs):
        super().__init__(**{"pre_observation_delay": 0.5, "slow_mo": None, **env_kwargs})
        self.own = own

    def __enter__(self):
        super().__enter__()
        if not self.own:
            self.kept, launch, code = [], self._type.launch, self._code

            def once(**options):
                if not self.kept:
                    self.kept.append(launch(**options))
                    self.close, self.kept[0].close = self.kept[0].close, lambda: None
                return self.kept[0]
            self._type.launch = once
            self._code = lambda action: code(action).replace("timeout=500", "timeout=5000")
        return self

    def __exit__(self, *error):
        if not self.own and self.kept:
            self.close()
        super().__exit__(*error)

    def start(self, task: str, seed: int):
        return self.reset([start(f"browsergym/miniwob.{task}", seed)])[0]

    def act(self, action: Action):
        """Returns the observation, BrowserGym's reward, the page's own one and whether the page ended."""
        obs, reward, ended, _, info = self._envs[0].step(browsergym_code(action, self._obs[0].page))
        self._see(0, obs)
        return self._obs[0], reward, info["task_info"].get("RAW_REWARD_GLOBAL"), ended

    def ask(self, script: str, value=None):
        return self._envs[0].unwrapped.page.evaluate(script, value)


def ask(web: Browser, script: str, value=None):
    """A script's answer in our only page."""
    return web._run(web._tabs[0].page.evaluate(script, value))


def start(task: str, seed: int) -> Start:
    return Start(task=task, seed=seed, prefix=(), goal="", url="", page="", previous=())


def text(page: str) -> str:
    """A page without its ids and the install path."""
    page = re.sub(rf"file://{re.escape(str(HTML))}/(miniwob/)?", f"{ORIGIN}/", page)
    return re.sub(r"(?m)^(\t*)\[\w+\] ", r"\1[] ", page)


def translated(action: Action, ours: Browser, theirs: BrowserGym) -> Action | None:
    """The action on the same element there. None if there is none, or none with an id."""
    if not action.bid:
        return action
    bid = theirs.ask(BID, ask(ours, WAY, int(action.bid)))
    return bid and replace(action, bid=bid)


def tried(ours: Browser, task: str, count: int) -> list[tuple[int, list[str]]]:
    """What the explorer did on our page: `count` pairs of a seed and its actions, half of them successes if
    the first seeds give as many."""
    wins, others = [], []
    for first in range(0, max(6, count), 3):
        numbers = {page_seed(seed): seed for seed in range(first, first + 3)}
        for record in explore.collect(ours, [(task, number) for number in numbers], HORIZON):
            (wins if record["reward"] else others).append((numbers[record["seed"]], record["actions"]))
        if len(wins) >= (count + 1) // 2 and len(wins) + len(others) >= count:
            break
    most = max((count + 1) // 2, count - len(others))
    return (wins[:most] + others)[:count]


def play(ours: Browser, theirs: BrowserGym, task: str, seed: int, actions: list[str]) -> dict:
    """The same actions, written with our ids, in both. Returns what was seen, ours first: {"goals", "pages"
    and "seconds" of the reset and of each step; of each step "actions", "errors", "rewards", "raw" (the
    page's own reward) and "ended"; "lost": the action whose element BrowserGym's page does not have, or ''}.
    It ends where one of the pages ends."""
    times = [time.perf_counter()]
    a = ours.reset([start(task, page_seed(seed))])[0]
    times.append(time.perf_counter())
    b = theirs.start(task, seed)
    times.append(time.perf_counter())
    seen = dict(task=task, seed=seed, goals=[a.goal, b.goal], pages=[[text(a.page), text(b.page)]],
                seconds=[np.diff(times).tolist()], actions=[], errors=[], rewards=[], raw=[], ended=[],
                lost="")
    for action in map(parse_action, actions):
        # stop ends a page here and sends a message there; one page here has no history, one there has; an
        # id that is not on the page is found out by worlds/chromium.py and worlds/gym.py themselves.
        if action.name in ("stop", "go_back") or action.bid and action.bid not in bids(a.page):
            continue
        there = translated(action, ours, theirs)
        if there is None:
            seen["lost"] = str(action)
            break
        times = [time.perf_counter()]
        (a,), (reward,), (ended,), (broken,) = ours.step([action])
        times.append(time.perf_counter())
        b, rated, raw, over = theirs.act(there)
        times.append(time.perf_counter())
        assert not broken, a.error
        step = dict(actions=str(action), errors=[a.error, b.error], pages=[text(a.page), text(b.page)],
                    rewards=[reward, rated], raw=[ask(ours, "() => WOB_RAW_REWARD_GLOBAL"), raw],
                    ended=[ended, over], seconds=np.diff(times).tolist())
        for key, value in step.items():
            seen[key].append(value)
        if ended or over:
            break
    return seen


def compare(tasks: list[str], count: int) -> dict[str, list[dict]]:
    """Task -> what play() saw in `count` trajectories, in the recipe's tasks four times as many."""
    with Browser(timeout=60) as ours, BrowserGym(slow_mo=0, timeout=60_000, viewport=VIEWPORT) as theirs:
        return {task: [play(ours, theirs, task, seed, actions)
                       for seed, actions in tried(ours, task, count * (4 if task in RECIPE else 1))]
                for task in tasks}


def speed(tasks: list[str]) -> list[str]:
    """Seconds a reset and a step in both, on one page at a time, and their ratios: lines of text."""
    lines = []
    if not tasks:
        return lines
    with Browser(timeout=60) as ours:
        todo = [(task, *tried(ours, task, 1)[0]) for task in tasks]  # its pages are open from here on
        for label, settings in (("as it comes", {}), ("no waits", dict(slow_mo=0, pre_observation_delay=0))):
            with BrowserGym(own=True, **settings) as theirs:
                seconds = [play(ours, theirs, *what)["seconds"] for what in todo]
            resets, steps = [first for first, *_ in seconds], [pair for _, *rest in seconds for pair in rest]
            for name, pairs in (("reset", resets), ("step", steps)):
                here, there = np.mean(pairs, axis=0)
                lines.append(f"{name:6} ours {here:.3f} s, BrowserGym ({label}) {there:.3f} s: "
                             f"{there / here:.0f} times as long (mean of {len(pairs)})")
    return lines


def same_goal(seen: dict) -> bool:
    return len(set(seen["goals"])) == 1


def same_page(seen: dict) -> bool:
    """Whether the first page reads the same."""
    return len(set(seen["pages"][0])) == 1


def same_end(seen: dict) -> bool:
    """Whether each action found its element in both, and brought the same raw reward and the same end."""
    return not seen["lost"] and all(here == there for here, there in seen["raw"] + seen["ended"])


def row(task: str, trajectories: list[dict]) -> str:
    """A line of the table: trajectories, their steps, and how many of them are equal in what."""
    counts = [sum(map(same, trajectories)) for same in (same_goal, same_page, same_end)]
    steps = sum(len(seen["actions"]) for seen in trajectories)
    wins = sum(seen["raw"][-1][0] == 1 for seen in trajectories if seen["raw"])
    return f"{task:28}" + "".join(f"{n:10}" for n in (len(trajectories), steps, wins, *counts))


COLUMNS = f"{'':28}" + "".join(f"{name:>10}" for name in (
    "played", "steps", "reward 1", "goal", "page", "reward"))
