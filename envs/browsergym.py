"""BrowserGym's tasks in a process of their own: a Chromium, its pages as text, actions by mouse and keyboard.

A page reads as BrowserGym's `flatten_axtree_to_str` prints it (Drouin et al. 2024, arXiv:2412.05467). What an
agent does wrong is a line in Obs.error, and the page stays as it is; all else that raises is Failed. Below:
MiniWoB++ (Liu et al. 2018, arXiv:1802.08802). Where we differ from BrowserGym, and why
- An action is no Python text, so no page becomes code. There is no screenshot, chat or delay, and MiniWoB++
  is loaded again in its open tab, by Start.seed itself: .03 s a step and .13 a reset, and not .8 and 2.7.
- MiniWoB++'s clock stands still but for 500 ms an action: what timers do depends on the actions. Success is
  the whole reward, and not the part that some pages pay for a wrong answer (NOTES 6.5).
- InlineTextBox, empty StaticText and the text inside a text box are dropped, as in recorded data (NNetNav,
  NOTES 6.6). A filled password box shows four bullets. With `controls`, what can be clicked has a line though
  it has no role, as a third of the controls of web applications (NOTES 6.11): `[12] generic, clickable`.
- Ids are matched by DOM node: a tooltip overrides ARIA's. A click on [7] lands where 7 itself is on top: in
  an open folder on its name, and not on a file in it. What is covered, hidden or disabled is an error, of
  options and fields too; so is what a field cannot hold. Dialogs are refused (by Playwright).
- Chromium resolves no host but those given: no request, socket, worker, frame, popup or redirect leaves them.
"""

import ctypes
import importlib
import mimetypes
import os
import pkgutil
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import miniwob
from browsergym.core.action.utils import get_elem_by_bid
from browsergym.core.observation import extract_dom_extra_properties, extract_merged_axtree
from browsergym.miniwob import all as pages
from browsergym.miniwob.base import AbstractMiniwobTask
from browsergym.utils.obs import IGNORED_AXTREE_PROPERTIES, IGNORED_AXTREE_ROLES, flatten_axtree_to_str
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

import data
from config import Benchmark, UserError
from data import Action, Obs, Start

# ---- 1. a page as text -------------------------------------------------------------------------------------

# BrowserGym's own, but it waits for the observer itself, not by the page's timers, which may stand still. An
# attribute `bid` of the page's own would make it raise.
MARK = pkgutil.get_data("browsergym.core", "javascript/frame_mark_elements.js").decode()  # type: ignore
UNMARK = pkgutil.get_data("browsergym.core", "javascript/frame_unmark_elements.js").decode()  # type: ignore
for old, new in (
        ("visited = new Set();", "visited = new Set(), seen; if (browsergym_first_visit) for (const el of "
         "document.querySelectorAll('[bid]')) el.removeAttribute('bid');"),
        ("visited.delete(elem);", "visited.delete(elem) && elems_to_be_visited.size || seen();"),
        ("until(() => elems_to_be_visited.size == 0, visibility_marking_timeout);",
         "new Promise(done => { seen = done; setTimeout(done, 1000); elems_to_be_visited.size || done(); }"
         ");")):
    assert MARK.count(old) == 1, "BrowserGym's script has changed"
    MARK = MARK.replace(old, new)


def page_text(nodes: list[dict], dom: dict, controls: bool = False) -> str:
    """Chromium's accessibility nodes and DOM snapshot as BrowserGym's text, cleaned as the docstring says."""
    ids, strings, kept = {}, dom["strings"], []
    for document in dom["documents"]:
        document["layout"]["clientRects"] = []  # BrowserGym wants the key
        for node, pairs in zip(document["nodes"]["backendNodeId"], document["nodes"]["attributes"]):
            ids[node] = {strings[key]: strings[of] for key, of in zip(pairs[::2], pairs[1::2])}.get("bid")
    extra = extract_dom_extra_properties(dom, 1.0)
    for node in nodes:
        role, name = node["role"]["value"], node.get("name", {"value": ""})
        # What is inside of a box for dates, Chromium's own, has the description of the box.
        inner = re.match(r"browsergym_id_(\w+)", node.get("description", {}).get("value", ""))
        bid = ids.get(node.get("backendDOMNodeId")) or node.get("browsergym_id") or inner and inner[1] or ""
        node["browsergym_id"] = bid if re.fullmatch("[a-zA-Z]*[0-9]+|[a-zA-Z]+", bid) else None  # forged
        shown = node["properties"] = [p for p in node.get("properties", []) if p["name"] != "roledescription"]
        if role in ("generic", "none") and not any(
                p["value"].get("value") or p["name"] not in ("required", "focused", "atomic")
                for p in shown if p["name"] not in IGNORED_AXTREE_PROPERTIES):
            its = extra.get(bid, {})
            its["clickable"] = controls and (its.get("clickable") or its.get("set_of_marks"))  # a hand
            node |= {"role": {"value": "generic" if its["clickable"] else "dropped"}, "name": name}
        if role == "InlineTextBox" or role == "StaticText" and not name["value"].strip():
            continue
        if role in ("textbox", "searchbox", "spinbutton"):
            node["childIds"] = []
            value = str(node.get("value", {}).get("value"))
            if not value:  # an empty password box sometimes has it, an empty textbox never
                del node["value"]
            elif set(value) == {"•"}:
                node["value"]["value"] = "••••"  # whatever a password box holds
        kept.append(node)
    return flatten_axtree_to_str({"nodes": kept}, extra, with_visible=True, with_clickable=True,
                                 skip_generic=False, ignored_roles=[*IGNORED_AXTREE_ROLES, "dropped"])


# ---- 2. click, hover, type ---------------------------------------------------------------------------------

# What is wrong; or [where the mouse goes, and the element's corner, all in the frame]; or {keys}, what is
# typed into what has the focus now; or nothing: it is done.
READY = r"""(el, [name, bid, text, lines]) => {
  const list = el.tagName == 'OPTION' && el.closest('select'), on = list || el;
  if (list && name != 'click') return `[${bid}] takes no ${name}`;
  on.scrollIntoViewIfNeeded();
  const box = on.getClientRects()[0], hidden = list && getComputedStyle(el).display == 'none';
  if (!box || hidden || !on.checkVisibility({visibilityProperty: true})) return `[${bid}] is not visible`;
  if (el.matches(':disabled') || on.matches(':disabled')) return `[${bid}] is disabled`;
  // Of 25 points the first, from the centre on, where it lies on top, or a part of it that has no line.
  const points = [.5, .1, .3, .7, .9].flatMap((across, _, all) => all.map(down =>
    [box.left + across * box.width, box.top + down * box.height]));
  const top = at => el.getRootNode().elementFromPoint(...at), lined = lines.map(id => `[bid="${id}"]`).join();
  const at = points.find(at => top(at)?.closest(lined) === on)
    || points.find(at => on.contains(top(at)) || top(at)?.contains(on));
  if (!at) return `[${bid}] is covered by another element`;
  const changed = () => ['input', 'change'].forEach(kind => on.dispatchEvent(new Event(kind, {bubbles: 1})));
  if (list) {
    list.multiple ? el.selected = !el.selected : list.selectedIndex = el.index;
    list.focus();
    return changed();
  }
  if (name != 'type') return [...at, box.left, box.top];
  const form = {number: '-1.5', range: `${el.min} to ${el.max}`, color: '#0080ff', month: '2000-12',
    week: '2000-W52', date: '12/31/2000', time: '11:59 PM', 'datetime-local': '12/31/2000 11:59 PM'}[el.type];
  if (el.readOnly || !form && !el.isContentEditable && !el.matches('input:read-write, textarea:read-write'))
    return `[${bid}] takes no text`;
  el.focus();
  if (el.matches(':disabled')) return;  // its own focus handler may disable it (a popup)
  if (!form) {
    el.isContentEditable ? getSelection().selectAllChildren(el) : el.select();
    return {keys: text};  // which are cut at maxlength, as a person's are
  }
  // As an American keyboard writes it; but 2/30 would become another day.
  const [said, day, date, hour] = /^(\d+\/(\d+)\/\d{4})?( ?\d+:\d\d [ap]m)?$/i.exec(text = text.trim()) || [];
  const moment = new Date(`${day || '1/1/2000'} ${hour || ''} UTC`), before = el.value;
  if (said && +moment && (!day || moment.getUTCDate() == date))
    text = moment.toISOString().slice(day ? 0 : 11, hour ? 16 : 10);
  // The prototype's setter: frameworks (React) watch the element's own.
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set;
  set.call(el, text);
  if (el.value.toLowerCase() == text.toLowerCase()) return changed();
  set.call(el, before);
  return `[${bid}] takes ${form} or the like, not ${said || text}`;
}"""


def use(page, action: Action, lines: list[str]) -> None:
    """click, hover and type. Raises ValueError with what is wrong."""
    if action.bid not in lines:
        raise ValueError(f"there is no [{action.bid}] on the page")
    found = get_elem_by_bid(page, action.bid)
    ready = found.evaluate(READY, [action.name, action.bid, action.text, lines])
    if isinstance(ready, list):
        x, y, left, top = map(float, ready)
        box = found.bounding_box()  # in the page, and not in its frame
        move = page.mouse.click if action.name == "click" else page.mouse.move
        move(x - left + box["x"], y - top + box["y"])
    elif isinstance(ready, dict):
        page.keyboard.insert_text(ready["keys"]) if ready["keys"] else page.keyboard.press("Delete")
    elif ready:
        raise ValueError(ready[:200])
    if action.name == "type" and action.enter:
        page.keyboard.press("Enter")


# ---- 3. a Chromium -----------------------------------------------------------------------------------------

def launch(driver, hosts: tuple[str, ...] = ()):
    """A Chromium that reaches these hosts alone: of example.org:8000 that port, of example.org all, of
    *.example.org all below it. DYNAWEB_CHROMIUM names one; else it is Debian's, or Playwright's."""
    named = os.environ.get("DYNAWEB_CHROMIUM")
    found = [named] if named else ["/usr/bin/chromium", driver.chromium.executable_path]
    path = next(filter(os.path.exists, found), None)
    if not path:
        raise UserError(f"no Chromium at {found[0]}: `apt-get install chromium`, or `playwright install "
                        "chromium`, or set DYNAWEB_CHROMIUM to the path of one")
    # The first MAP that fits counts, and EXCLUDE, which knows no ports, before all of them.
    rules = [f"MAP {host} {host}" if ":" in host else f"EXCLUDE {host}" for host in hosts]
    fast = [] if hosts else ["--disable-gpu-vsync", "--disable-frame-rate-limit"]  # .01 s less a step
    return driver.chromium.launch(
        executable_path=path,
        chromium_sandbox=os.geteuid() != 0,  # it does not start as root, the usual user of a container
        args=[*fast, f"--host-resolver-rules={','.join([*rules, 'MAP * ~NOTFOUND'])}", "--disable-quic",
              "--disable-component-update", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
              "--disable-site-isolation-trials"])  # else frames of other sites have no text


def below(root: Path, path: str) -> Path | None:
    """The file that a page asks for, where it is one below `root`, links followed."""
    file = Path(root, path).resolve()
    return file if file.is_relative_to(root.resolve()) and file.is_file() else None


class Page:
    """What our tasks say beside BrowserGym's (setup, validate)."""

    clock = ""  # when the page's time begins, which stands still but for 500 ms an action
    settle = 0.5  # s after an action
    tabs = True  # whether pages may be left and opened
    controls = False  # lines for what has no role and can be clicked
    serve: Callable | None = None  # serve(request): route.fulfill's answer in the place of a host's
    reused = False  # whether it begins in the tab of the task before


class Browser:
    """A Chromium (launch), and the task that is played in it. make(start): a task."""

    def __init__(self, make: Callable, hosts: tuple[str, ...] = ()):
        self.make, driver = make, sync_playwright().start()
        driver.selectors.set_test_id_attribute("bid")
        self.chromium = launch(driver, hosts)
        self.context = self.page = self.session = self.task = None

    def reset(self, start: Start) -> Obs:
        """The first page, after the start's prefix. Raises ValueError for a prefix that ends the episode."""
        self.task, self.messages = self.make(start), []
        page = self.page if self.page and self.task.reused else self.open()
        page.mouse.move(0, 0)  # or it opens a menu of the next page
        self.goal = self.task.setup(page)[0]
        self.wait()
        self.obs = self.look("")
        for text in start.prefix:
            if self.step(data.parse_action(text))[2]:
                raise ValueError(f"the prefix of {start.task}, seed {start.seed}, ends it with {text!r}")
        return self.obs

    def open(self):
        """A page in a context of its own: cookies and storage are new."""
        if self.context:
            self.context.close()
        self.context = context = self.chromium.new_context(
            viewport=self.task.viewport, service_workers="block", accept_downloads=False, permissions=[],
            locale="en-US", timezone_id="UTC")
        context.set_default_timeout(20_000)  # ms: on busy cores a new Chromium needs over 5 s for a page
        if self.task.serve:
            context.route("**/*", self.answer)
        if self.task.clock:
            context.clock.install(time=self.task.clock)
            context.clock.pause_at(self.task.clock)
        self.page = context.new_page()
        context.on("page", self.opened)
        return self.page

    def answer(self, route) -> None:
        found = self.task.serve(route.request)
        if found is None and not route.request.is_navigation_request():
            return route.abort()
        route.fulfill(**found or {"status": 204})  # a navigation stays where it is

    def opened(self, page) -> None:
        self.page = page if self.task.tabs else page.close() or self.page

    def wait(self) -> None:
        """Until the pages have done what the last action began."""
        with suppress(PlaywrightError):  # what a page's own timer raised
            self.context.clock.run_for(500) if self.task.clock else None
        time.sleep(self.task.settle)
        if self.task.tabs:
            open = self.context.pages or [self.context.new_page()]
            self.page = self.page if self.page in open else open[-1]
            self.page.bring_to_front()
            with suppress(PlaywrightError):
                self.page.wait_for_load_state("domcontentloaded", timeout=3000)

    def mark(self, frame, bid: str = ""):
        """Leaves ids, visibility and values in attributes. Yields the frames."""
        frame.evaluate(MARK, [bid, "bid", "all" if self.task.controls else "standard_html"])
        yield frame
        for child in frame.child_frames:
            if child.url:  # else it never loads (lazy, blocked), and no script in it ever runs
                at = child.frame_element()
                sandbox, bid = at.get_attribute("sandbox"), at.get_attribute("bid")
                if bid and (sandbox is None or "allow-scripts" in sandbox) and at.bounding_box():
                    yield from self.mark(child, bid)

    def look(self, error: str, tries: int = 3) -> Obs:
        page = self.page
        try:
            if not self.session or self.session[0] is not page:
                self.session = page, self.context.new_cdp_session(page)
            send, marked = self.session[1].send, list(self.mark(page.main_frame))
            dom = send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
            send("Accessibility.enable")  # and disable: a tree that is kept and updated loses texts of labels
            tree = extract_merged_axtree(page) if page.frames[1:] else send("Accessibility.getFullAXTree")
            send("Accessibility.disable")
            for frame in marked:
                frame.evaluate(UNMARK)
        except PlaywrightError:  # it went on to another document meanwhile
            if tries == 1:
                raise
            page.wait_for_timeout(200)
            return self.look(error, tries - 1)
        text = page_text(tree["nodes"], dom, self.task.controls)
        return Obs(self.goal, text, error)

    def step(self, action: Action) -> tuple[Obs, float, bool]:
        """(what is seen, reward, whether it is over)."""
        error, stop = "", action.name == "stop"
        if stop:
            self.messages.append({"role": "assistant", "message": action.text})
        else:
            try:
                self.perform(action)
            except (PlaywrightError, ValueError, IndexError) as problem:
                said = getattr(problem, "message", str(problem)).strip().split("\n")[0]
                error = f"{action}: " + re.sub(r"^[A-Z]\w+[.]\w+: ", "", said)[:200]
            self.wait()
        reward, over, *_ = self.task.validate(self.page, self.messages)
        self.obs = replace(self.obs, error="") if stop else self.look(error)
        return self.obs, float(reward == 1), bool(over) or stop

    def perform(self, action: Action) -> None:
        page, name, text = self.page, action.name, action.text
        url = text if re.match(r"[\w+.-]+:(?!\d)", text) else f"http://{text}"
        if action.bid:
            return use(page, action, data.bids(self.obs.page))
        if not self.task.tabs and name not in ("press", "scroll"):
            raise ValueError("there is only this page")
        if name == "goto" and not re.match("https?://", url):
            raise ValueError("an address starts with http:// or https://")
        {"press": lambda: page.keyboard.press(re.sub(r"(?i)\bctrl\b", "Control", text)),
         "scroll": lambda: (page.mouse.wheel(0, -400 if text == "up" else 400), page.wait_for_timeout(100)),
         "goto": lambda: page.goto(url, wait_until="commit"),
         "go_back": lambda: page.go_back(wait_until="commit"),
         "go_forward": lambda: page.go_forward(wait_until="commit"), "new_tab": self.context.new_page,
         "close_tab": page.close, "tab_focus": lambda: self.opened(self.context.pages[int(text)])}[name]()


class Failed(RuntimeError):
    """A browser, a site or a verifier failed, and not the agent."""


def work(fd: int) -> None:
    """A process: it is sent (the module of a benchmark, its Benchmark), then Starts and Actions."""
    pipe, browser = Connection(fd), None
    ctypes.CDLL(None).prctl(1, 9)  # killed with who asked, also where a page never answers (Linux)
    module, on = pipe.recv()
    with suppress(EOFError):
        while what := pipe.recv():
            try:
                browser = browser or importlib.import_module(module).browser(on)
                answer = browser.reset(what) if isinstance(what, Start) else browser.step(what)
            except UserError as problem:
                answer = problem
            except Exception as problem:  # the page is gone, or hostile
                answer = Failed(f"{type(problem).__name__}: {problem}".split("\n")[0][:300])
            pipe.send(answer)


# ---- 4. MiniWoB++ ------------------------------------------------------------------------------------------

HTML = Path(miniwob.__file__).parent / "html"
KINDS = {kind.subdomain: kind for kind in vars(pages).values() if hasattr(kind, "subdomain")}


class MiniWoB(Page, AbstractMiniwobTask):
    """Before a class of BrowserGym's, where it has one of the name: some read a goal out of a picture."""

    clock, settle, tabs, reused = "2020-01-06T00:00:00Z", 0.0, False, True

    def __init__(self, start: Start):
        self.subdomain = start.task
        super().__init__(start.seed, base_url="http://miniwob/")
        self.viewport = {"width": 500, "height": 600}  # px: room for every page
        self.random = SimpleNamespace(randint=lambda *_: start.seed)  # the page's seed is the start's

    def serve(self, request) -> dict | None:
        host, _, path = request.url.partition("http://miniwob/")
        root = "" if path.startswith(("core/", "common/")) else "miniwob/"
        file = below(HTML, root + re.split("[?#]", path)[0])
        if host or not file:
            return None
        # A list box shows all its options: `visible` does not depend on what was scrolled to before.
        style = b"<style>select[multiple] {height: 270px !important}</style></head>"
        body = file.read_bytes().replace(b"</head>", style)
        return {"body": body, "content_type": f"{mimetypes.guess_type(file)[0]};charset=utf-8"}

    def validate(self, page, chat_messages):
        if page.url.partition("#")[0] != self.url:  # the agent left it
            return 0, True
        return page.evaluate("[WOB_RAW_REWARD_GLOBAL, WOB_DONE_GLOBAL]")


def tasks(on: Benchmark) -> list[str]:
    return sorted(file.stem for file in (HTML / "miniwob").glob("*.html"))


def browser(on: Benchmark) -> Browser:
    bases = lambda task: (MiniWoB, KINDS.get(task, AbstractMiniwobTask))
    return Browser(lambda start: type("Task", bases(start.task), {})(start))
