"""WebArena-Infinity: thirteen web applications, 1,620 tasks, no server, no network.

    git clone https://github.com/web-arena-x/webarena-infinity        (MIT; we tried 1ca77813 of 2026-03-23)
    python evaluate.py --benchmark infinity --sites webarena-infinity/apps --checkpoint DIR --out tries.jsonl

An application is a folder: index.html with its scripts and styles, real-tasks.json, and a Python verifier a
task. The page itself keeps the application's state, and sends it with `PUT /api/state` after each change. A
verifier gets it with `GET /api/state`, and says whether the task is done. So requests are answered by
interception, and the last state is kept beside the page. Each trajectory has a context of its own: nothing of
one page reaches another. What the agent answers with stop does not count, only the state.

`reward` is the verifier's, where the agent ended its try with stop. The authors' harness verifies the state
however the agent ended (stop, no steps left, answers that nobody can read). Their 69.3 % is of 1,260 tasks in
ten applications: --tasks published.

Where we differ from the authors' harness (evaluation/, which verifies in run_task), and why
- Steps: 50 here. Theirs hands 50 to browser-use's constructor, whose run() has a limit of its own (500); so
  600 s a try are the limit there.
- Actions: one a step here, that the agent's training knows; browser-use does up to five in one.
- An answer that nobody can read ends a try here, for an agent that rambles is to be told from one that acts.
  Theirs go on: their vision agents stop after three empty answers in a row, or five failures.
- What an agent reads: the page's text at 1280 x 720. Theirs reads browser-use's elements, or screenshots.
- Navigation: go_back and go_forward, and goto to one of the application's own hashes (#/settings), as far as
  they stay in the document. What would load it anew is refused: its clock and Math.random would begin again,
  and with them the ids that it gives to new things.
- A page that hung or crashed ends its try. Theirs goes on in a new browser.
- No server, one for all pages or one a page: eight pages at once took 3 to 6 s a reset with them.
- The page's clock stands still (chromium.py) and starts on 2026-03-20, for first pages show today's date.
  Math.random begins alike, and nothing is animated. So a task has the same first page, byte for byte, always.
- Verifiers are other people's code. Each runs in a process of its own that can open no file and no socket
  (verify.py). One that raises, hangs, or answers with something else than (bool, str) has not verified
  anything: truncated, and `failures` says "not verified". It is not the agent's failure, as it is theirs.
- A page gets what SERVED names of its application's files, not its tasks, verifiers and solutions: an answer
  key is no part of a page.

What the text does not show. Where a toggle is a div whose class alone changes (four of nine applications
played), on and off read alike; and of the lines with an id 14 % have no word (`button ''`: an icon drawn by
CSS). A word of the class would have to be guessed at in each application (active, on, selected, open, also
of what is no toggle), and no published agent has read such words; so they stay out. An agent can act and see
what else changes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from config import UserError
from worlds import chromium, verify
from worlds.chromium import Pages, Tab

VIEWPORT = {"width": 1280, "height": 720}  # px; the authors'
STATE = 4 << 20  # bytes that a state may have; the largest of four applications has 118,128
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
const ask = window.fetch;  // a body that would be refused here goes no further: each process copies it
window.fetch = (what, how) => (how?.body?.size ?? how?.body?.byteLength ?? how?.body?.length) > STATE
  ? Promise.resolve(new Response('{}', {status: 413})) : ask(what, how);
document.addEventListener('DOMContentLoaded', () => {
  const style = document.createElement('style');
  style.textContent = '*, ::before, ::after {transition: none !important; animation: none !important}';
  document.head.append(style);
});
""".replace("STATE", str(STATE))
# Goes where an action leads to, as long as that is in the same document. Returns what was wrong, or ''.
TRAVEL = """async ([name, place]) => {
  if (name == 'goto') {
    const here = location.href.split('#')[0], whole = /^(#|https?:)/.test(place) ? place : 'http://' + place;
    const to = URL.canParse(whole, here) && new URL(whole, here);
    if (!to || to.href.split('#')[0] != here) return `only ${here}#... can be reached`;
    location.hash = to.hash;
  } else {
    const to = navigation.entries()[navigation.currentEntry.index + (name == 'go_back' ? -1 : 1)];
    if (!to?.sameDocument) return 'there is no page to go to';
    await navigation.traverseTo(to.key).finished;
  }
  return '';
}"""
# The applications that the authors' figures are of: 1,260 tasks (APPS of their plot_main_results).
PUBLISHED = (
    "elation-clinical-records", "elation-prescriptions", "gitlab-plan-and-track", "gmail",
    "gmail-accounts-and-contacts", "handshake-career-exploration", "linear-account-settings",
    "paypal-my-wallet", "superhuman-general", "xero-invoicing")
SERVED = ("index.html", "css", "js", "assets")  # of an application's folder: what its pages may have


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
                verifier = (file.parent / row["verify"]).resolve()
                if not verifier.is_relative_to(file.parent.resolve()):
                    raise UserError(f"{row['verify']!r} lies outside of the application")
                tasks[f"{app}/{row['id']}"] = Task(app, row["difficulty"], row["instruction"], verifier)
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            raise UserError(f"{file}: this is no list of tasks with id, difficulty, instruction and verify "
                             f"({error!r})") from error
    if not tasks:
        raise UserError(f"no applications in {sites or 'nowhere'}: --sites takes the folder that holds "
                         "APP/index.html and APP/real-tasks.json; in a clone of "
                         "https://github.com/web-arena-x/webarena-infinity that is apps/")
    return tasks


class Infinity(Pages):
    """The applications in the folder `sites`. A start's task is "gmail/task_e1"; its seed changes nothing."""

    controls = True  # a third of their controls have no role
    named = {"published": [f"{app}/*" for app in PUBLISHED]}  # for --tasks

    def __init__(self, sites: str | Path, timeout: float = 10.0):
        super().__init__(timeout, tasks=read_tasks(sites))
        self.sites = Path(sites)

    async def _open(self, task: str) -> Tab:
        await self._alive()
        tab, app = Tab(task, None, None), self._tasks[task].site
        tab.own = {"state": None}
        root, origin = (self.sites / app).resolve(), f"http://{app}.infinity".lower()  # as Chromium has it

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
        asked, url = route.request, urlsplit(route.request.url)
        if f"{url.scheme}://{url.netloc}" != origin:  # on a 204 a navigation stays where it is
            await (route.fulfill(status=204) if asked.is_navigation_request() else route.abort())
        elif url.path == "/api/state" and asked.method == "PUT":
            await route.fulfill(status=self._keep(asked.post_data_buffer or b"", own), json={})
        elif url.path == "/api/state" and own["state"] is not None:
            await route.fulfill(body=own["state"], content_type="application/json")
        elif url.path == "/api/events":
            await route.fulfill(status=204)  # the end of a stream of events: nobody sends any
        elif file := self._file(root, unquote(url.path).strip("/") or "index.html"):
            await route.fulfill(path=file)
        else:
            await route.fulfill(status=404)

    @staticmethod
    def _keep(state: bytes, own: dict) -> int:
        """Keeps a page's state, as the text that it sent. Returns the status: broken ones are refused."""
        try:
            if len(state) > STATE:
                return 413
            json.loads(state)
            own["state"] = state.decode()
            return 200
        except (ValueError, RecursionError):
            return 400

    @staticmethod
    def _file(root: Path, path: str) -> Path | None:
        """The application's file that a page may have, if there is one."""
        try:
            file = (root / path).resolve()
            inside = file.is_relative_to(root) and file.is_file()
        except (OSError, ValueError):  # a name too long, or one with a zero in it
            return None
        return file if inside and file.relative_to(root).parts[0] in SERVED else None

    async def _act(self, tab: Tab, action) -> float:
        if action.name not in ("goto", "go_back", "go_forward"):
            return await super()._act(tab, action)
        error = await tab.page.evaluate(TRAVEL, [action.name, action.text])
        return await self._look(tab, await self._play(tab), error and f"{action}: {error:.200}")

    async def _begin(self, tab: Tab, start) -> str:
        return self._tasks[tab.task].goal

    async def _pays(self, tab: Tab, action) -> float:
        # Half of the page's time, so that a verifier that hangs is not taken for a page that hangs.
        success, _ = await verify.verdict(self._tasks[tab.task].verifier, tab.own["state"], self.timeout / 2)
        return float(success)
