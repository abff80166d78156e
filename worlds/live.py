"""Live sites: `openended`, any start URL and goal, and `webvoyager`.

    shop = {"tea": task("https://shop.example/", "How much is the green tea?")}
    with Live(shop, hosts=("*.shop.example",), judge=judged.Grader(URL)) as web: ...
    tasks = read_tasks("WebVoyager_data.jsonl", WEBVOYAGER)
    with WebVoyager(tasks, hosts=("*.amazon.com", ...), judge=..., screenshots=15) as web: ...

Each trajectory has a context (cookies, storage) of its own. Success is what a check by code says, or a judge
behind a URL (judged.py). Without either nobody judges: rewards are 0 and mean nothing (`judged` says so, and
an evaluation prints "not judged"). No answer is a failure, and nobody is asked.

WebVoyager (He et al. 2024, arXiv:2401.13919): 15 sites, at most 15 steps (data.HORIZONS). The
authors' data/WebVoyager_data.jsonl has 643 tasks. Dates in it have passed, and others repair or leave out
tasks: Magnitude reports on 590, NVIDIA's NeMo Gym on 552 (webvoyager.jsonl of jayl940712/webarena_benchmarks
at 6a297793). So a success says of how many tasks it is.

Hosts. Only those of the start URLs and those given can be reached, with their port (without one: 80 and 443):
Chromium resolves nothing else, and requests to anything else are aborted. *.example.org are all names below.

Where we differ from chromium.py, and why
- Time is real: half a second after an action, and on until the page's requests are answered (3 s at most; a
  document that is on its way: the step's limit). So a search that waits until nobody types is waited for.
- Mouse and keyboard are real, for sites look at isTrusted. Lists and fields with a form (dates, numbers) are
  set by script, as there. `scroll` turns the wheel by two thirds of the window.
- Links lead elsewhere: ids begin again in each document. goto, go_back and go_forward work. There is one
  page: what would open a new window opens in it; downloads, permissions and dialogs are refused.
- Our script runs in a world of its own, where the page's scripts cannot reach it. Nothing it says is paid.
  A form whose controls are named like members of the DOM ("matches") can still break it: a crashed page.
- The inside of frames and of shadow roots has no ids: text at most.
- Chromium says that it is headless. Where sites turn it away, that is their right, and shows as "blocked".

Failures that are not the agent's: a first page that "does not load" (no connection, no answer in time, HTTP
5xx) or is "blocked" (WebVoyager: HTTP 403, 429, a page that asks whether one is human); "no verdict" (the
judge); a page that hangs or crashes. They end it. What goes wrong on a later page counts as the agent's: it
chose to go there, and could take each hard task out of the count by a visit to /500. It reads what is wrong
in Obs.error, and can go on from there.
"""

import asyncio
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeout

import data
from config import UserError
from worlds import chromium, judged
from worlds.chromium import Pages, Tab

VIEWPORT = {"width": 1024, "height": 768}  # px; WebVoyager's
SETTLE, PATIENCE, QUIET = 0.5, 3.0, 0.2  # s: at least; at most for requests; after the last of them
LATE = 0.4  # of a step's limit: a later document that takes longer is not waited for
OPENENDED, WEBVOYAGER = ("id", "goal", "url"), ("id", "ques", "web")  # the fields of their JSONL
HUMAN = re.compile(r"captcha|(?:are|you're) (?:you )?(?:a |not a )?(?:human|robot)|unusual traffic"
                   r"|robot check|characters you see|just a moment|access denied", re.IGNORECASE)
# In the page's own world: what would open a new window opens here.
HERE = """if (top === window) {
  window.open = url => { if (url) location.href = url; return null; };
  const to = (el, target) => el.setAttribute('target', target);
  const here = event => {
    const el = event.composedPath().find(el => el.matches?.('a, area, form'));
    const target = el && (el.getAttribute('target') || document.querySelector('base[target]')?.target);
    if (target && !/^_(self|parent|top)$/i.test(target) && !frames[target]) to(el, '_self');
  };
  for (const type of ['click', 'submit']) addEventListener(type, here, true);
}"""
# In our own world. ready: what was wrong, or where the mouse goes, or the focus is where keys go.
SCRIPT = chromium.SCRIPT + """
Object.assign(dynaweb, {
  look() {
    if (!this.ids) this.arrived();
    if (document.body) this.mark();
    return {error: '', url: location.href};
  },
  ready(action) {
    const {error, el, found} = this.reach(action.name, action.bid, action.lines);
    if (error || !found) return {error};
    const set = 'select, [type=color], [type=file], [type=number], [type=range], [type=date], [type=time]';
    const keys = el.isContentEditable || el.matches('textarea:read-write, input:read-write');
    if (el.matches(set) || action.name == 'type' && !keys) return {error: this.act(action)};
    if (action.name != 'type') return {error, at: found.slice(0, 2)};
    el.focus();
    el.isContentEditable ? getSelection().selectAllChildren(el) : el.select();
    return {error, keys};
  },
});
"""


@dataclass(frozen=True)
class Task(chromium.Task):
    """A goal on a live site."""
    url: str = ""  # where it begins


def task(url: str, goal: str, site: str = "") -> Task:
    """A task of one's own. Raises ValueError where the URL is none of http or https."""
    if not ports(url):
        raise UserError(f"{url!r} is no URL like https://example.org/")
    return Task(site or urlsplit(url).hostname, "", goal, url)


def read_tasks(path: str | Path, fields: tuple[str, str, str] = OPENENDED) -> dict[str, Task]:
    """{id: Task} of a JSONL file with these fields (id, goal, URL). WebVoyager's web_name is the site. Raises
    ValueError with file:line."""
    tasks = {}
    for place, row in data.read_jsonl(path):
        name, goal, url = (row.get(name) for name in fields)
        if not all(isinstance(text, str) and text for text in (name, goal, url)) or name in tasks:
            raise UserError(f"{place}: a task has {', '.join(fields)}, all texts, and an id of its own; not "
                             f"{str(row)[:80]}")
        try:
            tasks[name] = task(url, goal, str(row.get("web_name", "")))
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
    return tasks


def ports(url: str) -> list[str]:
    """The host of a URL with the ports that go with it; [] of what is no such URL.

    >>> ports("https://shop.example/tea"), ports("http://me@127.0.0.1:8000"), ports("file:///etc/passwd")
    (['shop.example:80', 'shop.example:443'], ['127.0.0.1:8000'], [])
    >>> ports("https://b\u00fccher.example:1"), ports("http://x,EXCLUDE *,y/")  # a comma ends Chromium's rule
    (['xn--bcher-kva.example:1'], [])
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port  # as Chromium names it
    except ValueError:  # a port that is no number, a host that is no name
        return []
    named = re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?|[\da-f.:]+", host, re.ASCII)
    if parts.scheme not in ("http", "https") or not named:
        return []
    host = f"[{host}]" if ":" in host else host
    return [f"{host}:{port}"] if port is not None else [f"{host}:80", f"{host}:443"]


class Trouble(RuntimeError):
    """Why a trajectory cannot go on, where that is not the agent's doing."""


def leaves(request, page) -> bool:
    """Whether a request asks for the page's next document."""
    try:
        return request.is_navigation_request() and request.frame == page.main_frame
    except PlaywrightError:  # the first document of a new window, which is being closed
        return False


@dataclass
class Visit:
    """What a live page did since the last action, and what is kept of the trajectory."""
    pending: set = field(default_factory=set)  # requests whose answers may change the text
    leaving: set = field(default_factory=set)  # of them: the next document
    status: tuple = (0, "")  # of the last document: HTTP status, URL
    broken: tuple = ("", "")  # URL and reason of a document that did not come
    notice: str = ""  # what was refused
    answer: str = ""
    shots: deque = field(default_factory=deque)  # the last screenshots, PNG


class Live(Pages):
    """Live sites. tasks: {name: Task}. hosts: that can be reached beside those of the tasks. check(task, obs,
    answer): success by code. judge: a judged.Grader; screenshots: how
    many of the last it is shown, 0: the last page's text. controls: lines for what can be clicked but has no
    role. timeout: seconds of a step."""

    def __init__(self, tasks: dict[str, Task], hosts: tuple[str, ...] = (), timeout: float = 30.0,
                 check=None, judge=None, screenshots: int = 0, instruction: str = judged.INSTRUCTION,
                 controls: bool = True):
        for host in hosts:
            if not re.fullmatch(r"\*(\.[\w-]+){2,}|[\w-]+(\.[\w-]+)*(:\d+)?", host):
                raise UserError(f"{host!r} is no host like example.org, example.org:8000 or *.example.org")
        named = [place for host in hosts if "*" not in host for place in ports(f"http://{host}")]
        self.below = tuple(host[1:].lower() for host in hosts if "*" in host)
        self.allowed = set(named) | {place for task in tasks.values() for place in ports(task.url)}
        super().__init__(timeout, (*sorted(self.allowed), *(f"*{end}" for end in self.below)), tasks)
        self.check, self.judge, self.controls = check, judge, controls
        self.screenshots, self.instruction = screenshots, instruction
        self.judged = bool(check or judge)

    def allows(self, url: str) -> bool:
        """Whether a URL leads to a host that can be reached. Chromium's resolver is asked as well."""
        places = [place for place in ports(url) if place.endswith((":80", ":443")) or place in self.allowed]
        return any(place in self.allowed or place.rpartition(":")[0].endswith(self.below) for place in places)

    def shots(self, k: int) -> list[str]:
        """The last screenshots of page k, the oldest first: PNG in base64."""
        own = self._tabs[k].own  # None where the first page did not load
        return list(own.shots) if own else []

    # -- a page --

    async def _open(self, task: str) -> Tab:
        await self._alive()
        tab = Tab(task, None, None, own=Visit(shots=deque(maxlen=self.screenshots)))

        async def serve(route):
            asked = route.request
            if self.allows(asked.url):
                return await route.continue_()
            if not leaves(asked, tab.page):
                return await route.abort()
            tab.own.notice = self._refusal(asked.url)
            await route.fulfill(status=204)  # the page stays where it is

        context = await self._context(HERE, serve, VIEWPORT)
        await context.grant_permissions([])  # these, and no others
        tab.page = await context.new_page()
        context.on("page", lambda window: self._loop.create_task(self._drop(window)))
        self._listen(tab.page, tab.own)
        tab.cdp = await context.new_cdp_session(tab.page)
        return tab

    def _refusal(self, url: str) -> str:
        return f"{url[:200]} cannot be reached, only {', '.join(self.hosts)[:200]}"

    @staticmethod
    def _listen(page, own: Visit) -> None:
        def asked(request):
            if request.resource_type in ("document", "script", "stylesheet", "xhr", "fetch"):
                own.pending.add(request)
            if leaves(request, page):
                own.leaving.add(request)

        def answered(request):
            own.pending.discard(request)
            own.leaving.discard(request)

        def failed(request):
            if request in own.leaving and request.failure != "net::ERR_ABORTED":
                own.broken = request.url, request.failure
            answered(request)

        def responded(response):
            if leaves(response.request, page):
                own.status = response.status, response.url

        def arrived(frame):
            if frame == page.main_frame:  # a document is there; _settle waits for the rest of it
                own.leaving.clear()

        def download(_):
            own.notice = "it is a download, and downloads are refused"

        for event, heard in (("request", asked), ("requestfinished", answered), ("requestfailed", failed),
                             ("response", responded), ("framenavigated", arrived), ("download", download)):
            page.on(event, heard)

    async def _begin(self, tab: Tab, start) -> str:
        try:
            url, limit = self._tasks[tab.task].url, 1000 * self.timeout
            await tab.page.goto(url, wait_until="commit", timeout=limit)
            await self._settle(tab)
        except PlaywrightError as error:
            raise Trouble(f"does not load: {error.message.splitlines()[0]}") from error
        if trouble := self._trouble(tab.own):
            raise Trouble(trouble)
        return self._tasks[tab.task].goal

    async def _begun(self, tab: Tab, start) -> Tab:
        try:
            tab = await super()._begun(tab, start)
            if blocked := self._blocked(tab.obs):
                raise Trouble(blocked)
            return tab
        except Trouble:
            await self._drop(tab.page.context)
            raise

    async def _settle(self, tab: Tab) -> None:
        """Waits until the page has done what the last action began."""
        own, now = tab.own, self._loop.time
        quiet, end, late = now() + SETTLE, now() + PATIENCE, now() + LATE * self.timeout
        while own.leaving or now() < quiet:
            await asyncio.sleep(0.05)
            if own.leaving:
                end = now() + PATIENCE
                if now() > late:
                    await self._wait_no_longer(tab)
            if own.pending and now() < end:
                quiet = max(quiet, now() + QUIET)
        try:
            await tab.page.wait_for_load_state("domcontentloaded", timeout=1000 * LATE * self.timeout)
        except PlaywrightTimeout:
            await self._wait_no_longer(tab)

    async def _wait_no_longer(self, tab: Tab) -> None:
        await tab.cdp.send("Page.stopLoading")
        tab.own.leaving.clear()
        tab.own.notice = f"no answer in {LATE * self.timeout:g} s"

    def _trouble(self, own: Visit) -> str:
        """What is wrong with the last document, else ''."""
        (url, reason), (status, at) = own.broken, own.status
        if reason and self.allows(url):
            return f"does not load: {url} ({reason})"
        return f"does not load: {at} (HTTP {status})" if status >= 500 else ""

    def _blocked(self, obs) -> str:
        """How a first page turns the browser away, else ''."""
        return ""

    async def _script(self, tab: Tab, call: str, given=None):
        """What an expression in our own world is, with `given`. A new document gets the script first."""
        frame = (await tab.cdp.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        world = await tab.cdp.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "dynaweb"})
        controls = "true" if self.controls else "false"
        code = (f"given => {{ if (!window.dynaweb) {{ {SCRIPT}; dynaweb.controls = {controls} }} "
                f"return {call}; }}")
        said = await tab.cdp.send("Runtime.callFunctionOn", {
            "executionContextId": world["executionContextId"], "functionDeclaration": code,
            "arguments": [{"value": given}], "returnByValue": True, "awaitPromise": True})
        if "exceptionDetails" in said:
            raise PlaywrightError(said["result"].get("description", "our script failed"))
        return said["result"].get("value")

    async def _play(self, tab: Tab, action: dict | None = None) -> dict:
        return await self._script(tab, "dynaweb.look()")

    async def _look(self, tab: Tab, state: dict, error: str = "") -> float:
        """As Pages._look; again where the page went on to another document meanwhile. Pays nothing."""
        for tries in (2, 1, 0):
            try:
                await super()._look(tab, state or await self._play(tab), error)
                break
            except PlaywrightError:
                if not tries:
                    raise
                state = await self._settle(tab)
        if self.screenshots:
            shot = await tab.cdp.send("Page.captureScreenshot", {"format": "png"})
            tab.own.shots.append(shot["data"])
        return 0.0

    # -- an action --

    async def _act(self, tab: Tab, action) -> float:
        """Runs one action; sets tab.obs and tab.ended. What stop is worth is asked later (step)."""
        own = tab.own
        own.notice, own.broken, own.status = "", ("", ""), (0, "")
        if action.name == "stop":
            own.answer, tab.ended, tab.obs = action.text, True, replace(tab.obs, error="")
            return 0.0
        if error := await self._do(tab, action):
            tab.obs = replace(tab.obs, error=f"{action}: {error}")
            return 0.0
        await self._settle(tab)
        error = own.notice or self._trouble(own)
        for _ in range(2):
            if tab.page.url.startswith("chrome-error:"):  # nothing to see there: back to where it was
                if own.broken[0] and not self.allows(own.broken[0]):  # a redirect to another host
                    error = self._refusal(own.broken[0])
                await tab.page.go_back(wait_until="commit")
                await self._settle(tab)
            reward = await self._look(tab, {}, error and f"{action}: {error}")
            if not tab.obs.url.startswith("chrome-error:"):  # else it came while the page was read
                break
        return reward

    async def _do(self, tab: Tab, action) -> str:
        """Begins an action. Returns what was wrong, and then nothing was done."""
        page, lines = tab.page, data.bids(tab.obs.page)
        if action.bid and action.bid not in lines:
            return f"there is no [{action.bid}] on the page"
        if action.name in ("new_tab", "tab_focus", "close_tab"):
            return "there is only this page"
        if action.name in ("goto", "go_back", "go_forward"):
            return await self._travel(tab, action)
        if action.name == "scroll":
            await page.mouse.move(VIEWPORT["width"] / 2, VIEWPORT["height"] / 2)
            await page.mouse.wheel(0, VIEWPORT["height"] * 2 // 3 * (-1 if action.text == "up" else 1))
            return ""
        asked = {"name": action.name, "bid": action.bid, "text": action.text, "lines": lines}
        if action.name == "press":
            if action.text in ("Tab", "Shift+Tab"):
                return await self._script(tab, "dynaweb.act(given)", asked)
            return await self._keys(page, action.text)
        ready = await self._script(tab, "dynaweb.ready(given)", asked)
        if ready["error"]:
            return ready["error"]
        if ready.get("at"):
            await (page.mouse.click if action.name == "click" else page.mouse.move)(*ready["at"])
        elif ready.get("keys") and not action.text:
            await page.keyboard.press("Delete")
        elif ready.get("keys"):  # a long text, and one of several lines, at once
            at_once = len(action.text) > 200 or "\n" in action.text
            await (page.keyboard.insert_text if at_once else page.keyboard.type)(action.text)
        if action.name == "type" and action.enter:
            await page.keyboard.press("Enter")
        return ""

    @staticmethod
    async def _keys(page, keys: str) -> str:
        try:
            await page.keyboard.press(re.sub(r"(?i)\bctrl\b", "Control", keys))
        except PlaywrightError as problem:
            if "Unknown key" not in problem.message:
                raise
            return f"there is no key {keys!r}"
        return ""

    async def _travel(self, tab: Tab, action) -> str:
        """Leaves for another document, as far as it is allowed and there is one."""
        page = tab.page
        if action.name == "goto":
            # example.org:8000 is a host with a port, and no scheme.
            url = action.text if re.match(r"[\w+.-]+:(?!\d)", action.text) else f"http://{action.text}"
            if not self.allows(url):
                return self._refusal(url)
            going = page.goto(url, wait_until="commit", timeout=1000 * LATE * self.timeout)
        else:
            history = await tab.cdp.send("Page.getNavigationHistory")
            at = history["currentIndex"] + (-1 if action.name == "go_back" else 1)
            if not 0 < at < len(history["entries"]):  # 0 is the empty page before the first
                return "there is no page to go to"
            going = getattr(page, action.name)(wait_until="commit", timeout=1000 * LATE * self.timeout)
        try:
            await going
        except PlaywrightTimeout:
            await self._wait_no_longer(tab)
            return tab.own.notice
        except PlaywrightError as error:  # what it means, _act finds out
            if "net::ERR" not in error.message and "Download" not in error.message:
                raise
        return ""

    # -- what an answer is worth --

    def step(self, actions):
        """As Pages.step. Answers are judged side by side, after the pages' step and without its limit."""
        results = super().step(actions)
        obs, rewards, terminated, truncated = results
        over = [k for k, action in enumerate(actions)
                if isinstance(action, data.Action) and action.name == "stop" and terminated[k]]
        if not over:
            return results
        with ThreadPoolExecutor(len(over)) as pool:
            verdicts = list(pool.map(self._verdict, [self._tabs[k] for k in over]))
        for k, (reward, problem) in zip(over, verdicts):
            rewards[k] = reward
            if problem:
                obs[k], rewards[k], terminated[k], truncated[k] = self._failed(
                    self._tabs[k], f"no verdict: {problem}")
        return results

    def _verdict(self, tab: Tab) -> tuple[float, str]:
        """(reward, why there is no verdict)."""
        answer = tab.own.answer
        if self.check:
            return float(self.check(tab.task, tab.obs, answer)), ""
        if not self.judge or not answer.strip():
            return 0.0, ""
        return judged.verdict(self.judge, tab.obs, answer, list(tab.own.shots), self.instruction)


class WebVoyager(Live):
    """WebVoyager's tasks. Sites that block are apart; no lines for what has no role (its published agents
    know the plain text)."""

    def __init__(self, tasks: dict[str, Task], *, controls: bool = False, **more):
        super().__init__(tasks, controls=controls, **more)

    def _trouble(self, own: Visit) -> str:
        status, at = own.status
        return f"blocked: HTTP {status} of {at}" if status in (403, 429) else super()._trouble(own)

    def _blocked(self, obs) -> str:
        found = HUMAN.search(obs.page) if obs.page.count("\n") < 40 else None  # an article about it is longer
        return f"blocked: {obs.url} says {found[0]!r}" if found else ""
