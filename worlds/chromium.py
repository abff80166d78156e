"""Pages in a real Chromium: what an agent reads of one, what its actions do. Many at once, errors as data.

A world is made of these by saying where pages come from, how a trajectory begins, and what it pays:
miniwob.py for MiniWoB++, the others for other people's benchmarks. A page reads as BrowserGym's
`flatten_axtree_to_str` prints it (Drouin et al. 2024, arXiv:2412.05467).

Where we differ from BrowserGym, and why
- Events are dispatched in the DOM (mouseover and its like, mousedown, focus, mouseup, click), not by a mouse:
  two to three times as fast (44 steps/s over 18 pages on two cores, 23 ms of CPU a step). A click on [7]
  lands on a part of [7] that has no line of its own: in an open folder on the folder's name, not on the file
  under its centre. A covered element is an error, as it is for a mouse. A click on an option of a list that
  takes several toggles it, as with Ctrl held. Keys are real, but for Tab: at the end of the page Chromium
  hands the focus to its own toolbar and takes it back whenever it likes.
- InlineTextBox, empty StaticText and the text inside a textbox are dropped: the recorded data (NNetNav) does
  not have them (NOTES 6.6).
- With `controls`, an element that can be clicked has a line though it has no role: `[12] generic, clickable`.
  BrowserGym leaves these out, and with them a third of the controls of web applications that handle all
  clicks in one place (NOTES 6.11). Recorded data and published agents do not know such lines.
- An empty password box has no value, like an empty textbox. A filled one shows four bullets, whatever the
  password's length: Chromium shows now one a character and now none, and a world model need not learn to
  count characters.
- Visibility is computed from boxes at once, not awaited from an IntersectionObserver (two frames, 30 ms). The
  definition is the same.
- Time is the page's own clock where a world says so: it stands still, and goes on by 500 ms an action, where
  BrowserGym waits. What timers do then depends on the actions alone. Requests of the page are awaited.
- A date may be typed as on an American keyboard (12/31/2000, 11:59 PM), a colour as #0080ff. Text that a
  field cannot hold is an error that says so, and not an empty field.
- Chromium can resolve no host name or address but those that a world allows, by any protocol.
- A page's memory has a bound (512 MB of objects, 1.5 GiB in all): one that takes more crashes, alone.

Failures. What the agent does wrong (an unknown id, text for a button, leaving the only page) is a line in
Obs.error, and the page stays as it is. A page that crashes or hangs ends as truncated, with reward 0 and the
reason in Obs.error. The other pages go on, and the next reset opens a new page, or a new Chromium.
"""

import asyncio
import hashlib
import os
import re
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from browsergym.core.observation import extract_dom_extra_properties
from browsergym.utils.obs import IGNORED_AXTREE_PROPERTIES, IGNORED_AXTREE_ROLES, flatten_axtree_to_str
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import async_playwright

import data
from config import UserError
from data import Start, bids, parse_action, root_url

NODES = 20_000  # more make no page that anybody reads: other pages would wait for it and seem to hang


@dataclass(frozen=True)
class Task:
    """What a world knows of a task before it is played. Totals are made by site and by difficulty."""
    site: str  # where: an application, a site
    difficulty: str = ""  # easy, medium, hard, where a benchmark says so
    goal: str = ""  # in words; where it depends on the seed: ''


class Unverified(Exception):
    """Nobody can say what the end of a trajectory is worth: not the agent's failure. The message says why."""


def digest(parts: Iterable[bytes]) -> str:
    """A hash of some texts, in this order."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """A hash of files below a folder: of their names and of what is in them. '' of none."""
    parts = []
    for path in sorted(files):
        with path.open("rb") as file:
            parts += [str(path.relative_to(folder)).encode(), hashlib.file_digest(file, "sha256").digest()]
    return digest(parts) if parts else ""


# ---- 1. Chromium -------------------------------------------------------------------------------------------

def chromium_path(playwright_chromium: str) -> str:
    """DYNAWEB_CHROMIUM if set, else Debian's, else Playwright's own. FileNotFoundError names the remedy."""
    chosen = os.environ.get("DYNAWEB_CHROMIUM")
    for path in [chosen] if chosen else ["/usr/bin/chromium", playwright_chromium]:
        if os.path.exists(path):
            return path
    raise FileNotFoundError(
        f"no Chromium at {chosen or '/usr/bin/chromium'}: run `apt-get install chromium` or "
        "`playwright install chromium`, or set DYNAWEB_CHROMIUM to the path of one"
    )


def launch_options(playwright_chromium: str, hosts: tuple[str, ...] = ()) -> dict:
    """Keyword arguments of Playwright's launch. Only `hosts` can be reached: the resolver answers for no
    other name or address. That also holds for what request interception does not see (redirects, websockets,
    beacons, prefetch, workers). A host with a port (example.org:80) is that port alone, any other host all
    of its ports; *.example.org is all names below it."""
    path = chromium_path(playwright_chromium)
    # The first rule that fits counts, and EXCLUDE, which knows no ports, before all of them.
    ports = [f"MAP {host} {host}" for host in hosts if ":" in host]
    rules = ",".join([*ports, "MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in hosts if ":" not in host)])
    return dict(
        executable_path=os.path.join(os.path.dirname(os.path.abspath(__file__)), "chromium.sh"),
        env={**os.environ, "DYNAWEB_BOUNDED": path},
        headless=True,
        # Chromium's sandbox does not start as root, the usual user of a container. Other users keep it.
        chromium_sandbox=os.geteuid() != 0,
        args=[
            f"--host-resolver-rules={rules}", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-quic", "--no-first-run",
            "--js-flags=--max-old-space-size=512",  # MB of a page's objects; all else: chromium.sh
        ],
    )


# ---- 2. a page as text -------------------------------------------------------------------------------------

def page_text(ax_nodes: list[dict], dom: dict, controls: bool = False) -> str:
    """Chromium's accessibility nodes (with "browsergym_id") and DOM snapshot as BrowserGym's text, cleaned as
    the top of this file says. With `controls`, what can be clicked has a line though it has no role."""
    kept, extra = [], extract_dom_extra_properties(dom, 1.0)
    for node in ax_nodes:
        role = node["role"]["value"]
        if role == "generic" and not (controls and extra.get(node.get("browsergym_id"), {}).get("clickable")):
            node["role"]["value"] = role = "generic" if _attributes(node) else "dropped"
        if role == "InlineTextBox" or role == "StaticText" and not node["name"]["value"].strip():
            continue
        if role in ("textbox", "searchbox", "spinbutton"):
            node["childIds"] = []
            value = node.get("value", {}).get("value")
            if value == "":  # an empty password box sometimes has it, an empty textbox never
                del node["value"]
            elif set(str(value)) == {"•"}:  # a number box has a number
                node["value"]["value"] = data.BULLETS
        kept.append(node)
    return flatten_axtree_to_str({"nodes": kept}, extra, with_visible=True, with_clickable=True,
                                 skip_generic=False, ignored_roles=[*IGNORED_AXTREE_ROLES, "dropped"])


def _attributes(node: dict) -> list[str]:
    """What BrowserGym prints behind an element's name. A generic one that has none gets no line from it."""
    shown = [p for p in node.get("properties", []) if p["name"] not in IGNORED_AXTREE_PROPERTIES]
    values = [(p["name"], p["value"]["value"]) for p in shown if "value" in p.get("value", {})]
    return [name for name, value in values if value or name not in ("required", "focused", "atomic")]


def take_ids(ax_nodes: list[dict]) -> None:
    """Moves the ids that SCRIPT left in ARIA attributes to where `flatten_axtree_to_str` looks. Each id
    stands in two: the role description does not survive on generic nodes, the description does; and Chromium
    keeps a described node where it drops a bare one."""
    for node in ax_nodes:
        properties = node.get("properties", [])
        marks = [p["value"]["value"] for p in properties if p["name"] == "roledescription"]
        for mark in [*marks, node.get("description", {}).get("value", "")]:
            if found := re.fullmatch(r"browsergym_id_(\d+)\s*", mark):  # and no line break that a page put in
                node["browsergym_id"] = found[1]
        node["properties"] = [p for p in properties if p["name"] != "roledescription"]


# Runs in every page before its own scripts. step() acts, lets the page's time pass, then marks the elements
# with ids. A world adds what is its own: whether time stands still (takeClock), what is hidden.
SCRIPT = Path(__file__).with_name("chromium.js").read_text(encoding="utf-8").replace("NODES", str(NODES))


# ---- 3. many pages -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Tab:
    """One open page of one task."""
    task: str
    page: object  # Playwright's
    cdp: object  # its session of Chromium's own protocol
    obs: data.Obs = None
    ended: bool = False
    failed: bool = False
    own: object = None  # what its world keeps of it


class Pages:
    """One Chromium, many pages in lockstep: what all worlds of real pages have in common.

    A world says what is its own: its tasks, `_open` (a page for a task), `_begin` (the trajectory begins in
    it), `_pays` (what an end is worth). timeout: seconds that a page may take for a step before it counts as
    hung. hosts: the only ones that can be reached. A thread of its own runs Playwright's asynchronous
    interface: pages work side by side, every wait has a limit (the synchronous interface has none on
    evaluate), and it can be used inside a notebook or beside BrowserGym's.
    """

    controls = False  # whether elements that can be clicked have a line though they have no role
    scores = False  # whether the page itself says when it is over and what that is worth (MiniWoB++)

    def __init__(self, timeout: float = 10.0, hosts: tuple[str, ...] = (),
                 tasks: dict[str, Task] | None = None):
        self.timeout, self.hosts, self._tasks = timeout, hosts, tasks or {}
        self._tabs: list[Tab] = []  # in the order of the starts
        self._playwright = self._chromium = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        # More pages at once would only make each of them look hung.
        self._turns = asyncio.Semaphore(os.cpu_count() or 1)
        self._opening = asyncio.Lock()
        self._run(self._open_chromium())
        return self

    def __exit__(self, *_):
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _side_by_side(self, works):
        async def in_turn(work):
            async with self._turns:
                return await work
        return await asyncio.gather(*map(in_turn, works))

    # -- the interface --

    def tasks(self) -> dict[str, Task]:
        """Those that can be reset, by their names."""
        return self._tasks

    def _check(self, task: str) -> None:
        if task not in self._tasks:
            raise UserError(f"no task {task!r}; there are {len(self._tasks)}, such as "
                             f"{', '.join(list(self._tasks)[:3])}")

    def reset(self, starts: list[Start]) -> list[data.Obs]:
        """Opens a page for each start: begins (task, seed), then runs the prefix. Raises ValueError for an
        unknown task and for a prefix that goes on after the end of the trajectory."""
        for start in starts:
            self._check(start.task)
        return self._run(self._reset(starts))

    def step(self, actions):
        """actions: for each page an Action, None (it idles), or a Start (it begins another trajectory, while
        the others go on). Returns (obs, rewards 0./1., terminated, truncated), a list each. A page that idles
        or begins returns what it shows, reward 0, False, False. After the end of its trajectory a page can
        only idle, or begin another."""
        assert len(actions) == len(self._tabs), f"{len(actions)} actions for {len(self._tabs)} pages"
        for tab, action in zip(self._tabs, actions):
            if isinstance(action, Start):
                self._check(action.task)
            assert isinstance(action, Start) or not (action and tab.ended), (
                "a step after the end of a trajectory")
        results = self._run(self._side_by_side(
            self._anew(k, action) if isinstance(action, Start) else self._guarded(self._tabs[k], action)
            for k, action in enumerate(actions)))
        return tuple(map(list, zip(*results))) if results else ([], [], [], [])

    @property
    def failures(self) -> list[str]:
        """Of each page how it crashed, hung, or was not verified, else ''."""
        return [tab.obs.error if tab.failed else "" for tab in self._tabs]

    # -- Chromium --

    async def _open_chromium(self):
        if not self._playwright:
            self._playwright = await async_playwright().start()
        kind = self._playwright.chromium
        self._chromium = await kind.launch(**launch_options(kind.executable_path, self.hosts))

    async def _alive(self):
        """A new Chromium, if the old one died."""
        async with self._opening:
            if not self._chromium.is_connected():
                await self._open_chromium()

    async def _revive(self):
        """After a page that did not start: a new Chromium if the old one answers no more, and a new driver if
        that died, which `is_connected` does not see. OSError where none starts: what was done is kept, and
        what is left must not count as tries that failed."""
        async with self._opening:
            try:
                context = await asyncio.wait_for(self._chromium.new_context(), 3 * self.timeout)
                return await self._drop(context)
            except (PlaywrightError, TimeoutError):
                pass
            try:
                await self._open_chromium()
            except PlaywrightError:
                self._playwright = None
                try:
                    await self._open_chromium()
                except PlaywrightError as error:
                    raise OSError("Chromium died, and does not start again: "
                                  f"{error.message.splitlines()[0]}") from error

    async def _context(self, script: str, serve, viewport: dict):
        """Cookies, storage and settings that pages share. `serve` answers all their requests."""
        context = await self._chromium.new_context(
            viewport=viewport, service_workers="block", accept_downloads=False, locale="en-US",
            timezone_id="UTC")
        await context.add_init_script(script)
        await context.route("**/*", serve)
        return context

    async def _close(self):
        if self._chromium.is_connected():
            await self._chromium.close()
        await self._playwright.stop()

    async def _drop(self, page):
        """Close a page (or a context)."""
        try:
            await asyncio.wait_for(page.close(), self.timeout)
        except (PlaywrightError, TimeoutError):
            pass  # a page that does not even close goes with its Chromium; nobody uses it again

    # -- a trajectory --

    async def _reset(self, starts: list[Start]) -> list[data.Obs]:
        # Each page has a context of its own. All go, also those of pages that did not start.
        await asyncio.gather(*map(self._drop, self._chromium.contexts))
        self._tabs = []
        self._tabs = await self._side_by_side(self._started(start) for start in starts)
        return [tab.obs for tab in self._tabs]

    async def _started(self, start: Start, tab: Tab | None = None) -> Tab:
        """A page that does not start fails in its first step, and the others go on."""
        try:
            return await self._start(tab, start)
        except RuntimeError as error:
            known = self.tasks().get(start.task)  # MiniWoB++'s page would have said its goal itself
            goal = known.goal if known else ""
            return Tab(start.task, None, None, data.Obs(goal, "", "RootWebArea ''", str(error)), failed=True)

    async def _anew(self, k: int, start: Start):
        """Page k begins another trajectory."""
        await self._leave(self._tabs[k])
        self._tabs[k] = await self._started(start, self._kept(start.task))
        return self._tabs[k].obs, 0.0, False, False

    async def _leave(self, tab: Tab) -> None:
        """A page whose trajectory is over. Its context is its own, and goes with it."""
        if tab.page:
            await self._drop(tab.page.context)

    def _kept(self, task: str) -> Tab | None:
        """An open page that another trajectory of the task can begin in."""
        return None

    async def _start(self, tab: Tab | None, start: Start) -> Tab:
        """The trajectory's page, where its prefix has been run: `tab`, or a new one."""
        for _ in range(3):
            try:
                tab = tab or await asyncio.wait_for(self._open(start.task), 3 * self.timeout)
                return await asyncio.wait_for(self._begun(tab, start), 3 * self.timeout)
            except (PlaywrightError, TimeoutError) as error:
                reason = error
                if tab:
                    await self._drop(tab.page)
                tab = None  # the next attempt opens a new page
                await self._revive()
        raise RuntimeError(f"three pages in a row did not start {start.task}, seed {start.seed}: {reason!r}")

    async def _begun(self, tab: Tab, start: Start) -> Tab:
        tab.obs, tab.ended = data.Obs(await self._begin(tab, start), "", ""), False
        await self._look(tab, await self._play(tab))
        for text in start.prefix:
            if tab.ended:
                raise ValueError(f"the prefix of {start.task}, seed {start.seed}, ends the trajectory before "
                                 f"{text!r}")
            await self._act(tab, parse_action(text))
        return tab

    async def _guarded(self, tab: Tab, action):
        """_act with a limit on its time; what breaks becomes the end of this page's trajectory."""
        if action is None:
            return replace(tab.obs, error=""), 0.0, False, False
        if tab.failed:
            return self._failed(tab, tab.obs.error)
        try:
            reward = await asyncio.wait_for(self._act(tab, action), self.timeout)
        except TimeoutError:
            reason = f"the page hung for {self.timeout:g} s"
        except PlaywrightError as error:
            reason = f"the page crashed ({error.message.splitlines()[0]})"
        except Unverified as problem:
            reason = f"not verified ({problem})"
        else:
            return tab.obs, reward, tab.ended, False
        await self._drop(tab.page)  # else an endless loop takes a core from the others until the next reset
        return self._failed(tab, f"{action}: {reason}")

    @staticmethod
    def _failed(tab: Tab, reason: str):
        """The end of a page that failed."""
        tab.ended = tab.failed = True
        tab.obs = replace(tab.obs, error=reason)
        return tab.obs, 0.0, False, True

    async def _play(self, tab: Tab, action: dict | None = None) -> dict:
        """dynaweb.step in the page. The page may be hostile, and its answer anything."""
        said = await tab.page.evaluate("action => dynaweb.step(action)", action)
        if not isinstance(said, dict) or not isinstance(said.get("error"), str):
            raise PlaywrightError("it changed what reads it")
        return said

    async def _act(self, tab: Tab, action) -> float:
        """Runs one action; sets tab.obs and tab.ended, returns the reward."""
        error, key, lines = "", None, bids(tab.obs.page)
        if action.name == "stop":
            tab.ended, tab.obs = True, replace(tab.obs, error="")
            return await self._pays(tab, action)
        if action.bid and action.bid not in lines:
            error = f"{action}: there is no [{action.bid}] on the page"
        elif action.name in ("goto", "new_tab", "go_back", "go_forward", "tab_focus", "close_tab"):
            error = f"{action}: there is only this page"
        if error:
            tab.obs = replace(tab.obs, error=error)
            return 0.0
        if action.name == "press" and action.text not in ("Tab", "Shift+Tab"):
            key, state = action.text, None
        else:
            played = {"name": action.name, "bid": action.bid, "text": action.text, "lines": lines}
            state = await self._play(tab, played)
            key = "Enter" if action.name == "type" and action.enter and not state["error"] else None
        if key:
            try:
                await tab.page.keyboard.press(re.sub(r"(?i)\bctrl\b", "Control", key))
            except PlaywrightError as problem:
                if "Unknown key" not in problem.message:
                    raise
                error = f"{action}: there is no key {key!r}"
            state = await self._play(tab)
        error = error or state["error"] and f"{action}: {state['error']:.200}"
        return await self._look(tab, state, error)

    async def _look(self, tab: Tab, state: dict, error: str = "") -> float:
        """Reads the page into tab.obs and tab.ended; returns the reward."""
        # disable throws Chromium's cache of accessibility nodes away. Kept and updated, it shows the text of
        # a checkbox's label or leaves it out depending on what was asked before.
        send = tab.cdp.send
        _, ax, _, dom = await asyncio.gather(
            send("Accessibility.enable"), send("Accessibility.getFullAXTree"), send("Accessibility.disable"),
            send("DOMSnapshot.captureSnapshot", {"computedStyles": []}))
        for document in dom["documents"]:  # BrowserGym wants the key; boxes would cost a third of the time
            document["layout"]["clientRects"] = []
        try:
            take_ids(ax["nodes"])
            page = page_text(ax["nodes"], dom, self.controls)
        except Exception as problem:  # BrowserGym's reader was not made for pages that want to break it
            raise PlaywrightError(f"its text cannot be read: {problem!r}") from problem
        tab.obs = data.Obs(tab.obs.goal, root_url(page), page, error)
        tab.ended = self.scores and state["done"]
        return float(tab.ended and state["raw"] == 1)


if __name__ == "__main__":  # make asks whether there is one
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        try:
            chromium_path(driver.chromium.executable_path)
        except FileNotFoundError as error:
            sys.exit(str(error))
