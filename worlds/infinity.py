"""WebArena-Infinity: thirteen web applications, 1,620 tasks, no server, no network.

    git clone https://github.com/web-arena-x/webarena-infinity        (MIT; we tried 1ca77813 of 2026-03-23)
    python evaluate.py --benchmark infinity --sites webarena-infinity/apps --checkpoint runs/tiny/dream

An application is a folder: index.html with its scripts and styles, real-tasks.json, and a Python verifier a
task. The page itself keeps the application's state, and sends it with `PUT /api/state` after each change. A
verifier gets it with `GET /api/state`, and says whether the task is done. So requests are answered by
interception, and the last state is kept beside the page. Each trajectory has a context of its own: nothing of
one page reaches another. What the agent answers with stop does not count, only the state.

Where we differ from the authors' harness, and why
- No server, one for all pages or one a page: eight pages at once took 3 to 6 s a reset with them.
- The page's clock stands still (chromium.py) and starts on 2026-03-20, for first pages show today's date.
  Math.random begins alike, and nothing is animated. So a task has the same first page, byte for byte, always.
- Verifiers are other people's code. Each runs in a process of its own that can open no file and no socket
  (verify.py). One that raises, hangs, or answers with something else than (bool, str) has not verified
  anything. That is counted apart, and is not the agent's failure.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from playwright.async_api import Error as PlaywrightError

import chromium
from chromium import Pages, Tab
from worlds import verify

VIEWPORT = {"width": 1280, "height": 720}  # px; the authors'
SCRIPT = chromium.SCRIPT + """
dynaweb.takeClock(Date.UTC(2026, 2, 20, 17));
dynaweb.controls = true;
let random = 0;  // mulberry32
Math.random = () => {
  random = random + 0x6D2B79F5 | 0;
  let mixed = Math.imul(random ^ random >>> 15, 1 | random);
  mixed = mixed + Math.imul(mixed ^ mixed >>> 7, 61 | mixed) ^ mixed;
  return ((mixed ^ mixed >>> 14) >>> 0) / 4294967296;
};
document.addEventListener('DOMContentLoaded', () => {
  const style = document.createElement('style');
  style.textContent = '*, ::before, ::after {transition: none !important; animation: none !important}';
  document.head.append(style);
});
"""
# These pass before anything is done: success is also given without them.
UNTOUCHED = tuple(f"{app}/task_{task}" for app, tasks in {
    "elation-patient-communication": ("h4",), "figma-slides": ("e19",), "handshake": ("e15", "m4", "h17"),
    "superhuman": ("e3", "e8", "m9", "m13", "m14", "h46"), "xero-invoicing": ("m20",),
}.items() for task in tasks)
HIDDEN = ("server.py", "real-tasks", "function-tasks")  # of an application's folder: nothing for its pages


@dataclass(frozen=True)
class Task(chromium.Task):
    """A task, as real-tasks.json has it. Its site is the application."""
    verifier: Path = Path()


def read_tasks(sites: str | Path) -> dict[str, Task]:
    """{"gmail/task_e1": Task} of all applications in a folder. Raises ValueError where there is none, and
    where a list of tasks cannot be read."""
    tasks = {}
    for file in sorted(Path(sites).glob("*/real-tasks.json")):
        app = file.parent.name
        try:
            for row in json.loads(file.read_text()):
                verifier = file.parent / row["verify"]
                tasks[f"{app}/{row['id']}"] = Task(app, row["difficulty"], row["instruction"], verifier)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: this is no list of tasks with id, difficulty, instruction and verify "
                             f"({error!r})") from error
    if not tasks:
        raise ValueError(f"no applications in {sites or 'nowhere'}: --sites takes the folder that holds "
                         "APP/index.html and APP/real-tasks.json; in a clone of "
                         "https://github.com/web-arena-x/webarena-infinity that is apps/")
    return tasks


class Infinity(Pages):
    """The applications in the folder `sites`. A start's task is "gmail/task_e1"; its seed changes nothing."""

    controls = True  # a third of their controls have no role
    untouched = UNTOUCHED

    def __init__(self, sites: str | Path, timeout: float = 10.0, verify_seconds: float = 10.0):
        super().__init__(timeout)
        self.sites, self._tasks, self.verify_seconds = Path(sites), read_tasks(sites), verify_seconds

    def tasks(self) -> dict[str, Task]:
        return self._tasks

    def _check(self, task: str) -> None:
        if task not in self._tasks:
            raise ValueError(f"no task {task!r} in {self.sites}; there are {len(self._tasks)}, such as "
                             f"{next(iter(self._tasks))}")

    async def _open(self, task: str) -> Tab:
        await self._alive()
        tab, app = Tab(task, None, None), self._tasks[task].site
        tab.own = {"state": None}
        root, origin = (self.sites / app).resolve(), f"http://{app}.infinity"

        async def serve(route):
            await self._serve(route, root, origin, tab.own)

        context = await self._context(SCRIPT, serve, VIEWPORT)
        tab.page = await context.new_page()
        tab.page.on("popup", lambda window: self._loop.create_task(self._drop(window)))
        tab.cdp = await context.new_cdp_session(tab.page)
        await tab.page.goto(f"{origin}/", timeout=1000 * self.timeout)
        return tab

    async def _serve(self, route, root: Path, origin: str, own: dict) -> None:
        """Answers a request of one page: a file of its application, its state, or nothing."""
        asked = route.request
        host, _, path = asked.url.split("?")[0].split("#")[0].partition(f"{origin}/")
        file = (root / (path or "index.html")).resolve()
        if host:  # on a 204 a navigation stays where it is
            await (route.fulfill(status=204) if asked.is_navigation_request() else route.abort())
        elif path == "api/state" and asked.method == "PUT":
            try:
                own["state"] = json.loads(asked.post_data or "")
                await route.fulfill(json={"status": "ok"})
            except ValueError:
                await route.fulfill(status=400)
        elif path == "api/events":
            await route.fulfill(status=204)  # the end of a stream of events: nobody sends any
        elif (not file.is_relative_to(root) or not file.is_file()
              or file.relative_to(root).parts[0].startswith(HIDDEN)):
            await route.fulfill(status=404)
        else:
            await route.fulfill(path=file)

    async def _begin(self, tab: Tab, start) -> str:
        return self._tasks[tab.task].goal

    async def _pays(self, tab: Tab, action) -> float:
        try:
            success, _ = await verify.verdict(self._tasks[tab.task].verifier, tab.own["state"],
                                              self.verify_seconds)
        except verify.Unverified as problem:
            raise PlaywrightError(f"not verified: {problem}") from problem
        return float(success)
