"""The real web, in a real Chromium: reset/step over many pages at once, errors as data.

    with Browser() as web:
        obs = web.reset([Start("enter-text", seed=7, ...), Start("login-user", seed=7, ...)])
        obs, rewards, terminated, truncated = web.step([parse_action("click [3]"), None])  # None: it idles

dream.py has the same interface, answered by a world model; benchmarks.py has it for other people's tasks.
Here it plays MiniWoB++ (Shi et al. 2017; Liu et al. 2018, arXiv:1802.08802), whose HTML comes with the
`miniwob` package. A page reads as BrowserGym's `flatten_axtree_to_str` prints it.

Episodes of MiniWoB++. A page stays open and its episode is restarted in place (about 0.03 s; a BrowserGym
reset is 2 s); one outside the recipe's TASKS is loaded anew, as it may leave handlers, timers and scrolled
boxes behind. (task, seed) gives the same bytes whatever ran before: element ids restart at 0, the random
state is the page's own `Math.seedrandom`, animations are off, and the page's clock is ours. It starts on
2020-01-06 and goes on by 500 ms an action, however long that took. Ids number the elements below <body> in
document order, first those that are there at the reset. What appears later gets larger ids, and no id is
given twice in an episode. Reward 1 is raw reward == 1: several tasks pay a part for a wrong answer, which
BrowserGym (> 0) takes for success (NOTES 6.5).

Where we differ from BrowserGym's own MiniWoB++, and why (NOTES 6.10: the two side by side):
- Events are dispatched in the DOM (mouseover and its like, mousedown, focus, mouseup, click), not by a mouse:
  two to three times as fast (44 steps/s over 18 pages on two cores, 23 ms of CPU a step). A click on [7]
  lands on a part of [7] that has no line of its own: in an open folder on the folder's name, not on the file
  under its centre. A covered element is an error, as it is for a mouse. A click on an option of a list that
  takes several toggles it, as with Ctrl held. Keys are real, but for Tab: at the end of the page Chromium
  hands the focus to its own toolbar and takes it back whenever it likes.
- InlineTextBox, empty StaticText and the text inside a textbox are dropped: the recorded data (NNetNav) does
  not have them (NOTES 6.6).
- An empty password box has no value, like an empty textbox. A filled one shows four bullets, whatever the
  password's length: Chromium shows now one a character and now none, and a world model need not learn to
  count characters.
- Visibility is computed from boxes at once, not awaited from an IntersectionObserver (two frames, 30 ms). The
  definition is the same.
- The window is large enough for every page, and a list box for all its options, so that `visible` does not
  depend on what was scrolled to before.
- Time is the page's own clock (above), where BrowserGym waits 500 ms after each action. What is to be done at
  a speed (chase-circle, moving-items) is done at that of two actions a second.
- A date may be typed as on an American keyboard (12/31/2000, 11:59 PM), a colour as #0080ff. Text that a
  field cannot hold is an error that says so, and not an empty field.
- There is no server: requests to http://miniwob are answered by interception, so a page does not show the
  install path. Chromium can resolve no host name or address at all, so nothing else can be reached, by any
  protocol.

Failures. What the agent does wrong (an unknown id, text for a button, leaving the only page) is a line in
Obs.error, and the page stays as it is. A page that crashes or hangs ends as truncated, with reward 0 and the
reason in Obs.error. The other pages go on, and the next reset opens a new page, or a new Chromium.
"""

import asyncio
import os
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import miniwob
from browsergym.core.observation import extract_dom_extra_properties
from browsergym.utils.obs import flatten_axtree_to_str
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import async_playwright

from data import Start, bids, parse_action

TASKS = (
    "enter-text", "enter-text-dynamic", "enter-password", "login-user", "click-option", "click-checkboxes",
    "choose-list", "click-scroll-list", "read-table", "ask-table", "click-button-sequence", "navigate-tree",
)
"""The recipe's tasks. The page's text is enough to solve them, most take several steps, and page and action
determine the next page."""

ORIGIN = "http://miniwob"
HTML = Path(miniwob.__file__).parent / "html"
ALL_TASKS = tuple(sorted(file.stem for file in (HTML / "miniwob").glob("*.html")))
"""Every page of MiniWoB++ (130); ask-table is ours. Each resets, steps and ends; not all can be solved from
the text (NOTES 11.12)."""
VIEWPORT = {"width": 500, "height": 600}  # px; a MiniWoB++ page is 160 x 210, lists and tables run below that
BULLETS = "••••"


@dataclass(frozen=True)
class Obs:
    """What the agent sees."""
    goal: str  # the task in words
    url: str
    page: str  # the page as text (a11y.py)
    error: str = ""  # what was wrong with the last action; '' if nothing


def tasks_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks that a flag names: `all` alone stands for every page."""
    return ALL_TASKS if tuple(names) == ("all",) else tuple(names)


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
    beacons, prefetch, workers)."""
    rules = ",".join(["MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in hosts)])
    return dict(
        executable_path=chromium_path(playwright_chromium),
        headless=True,
        # Chromium's sandbox does not start as root, the usual user of a container. Other users keep it.
        chromium_sandbox=os.geteuid() != 0,
        args=[
            f"--host-resolver-rules={rules}", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-quic", "--no-first-run",
        ],
    )


# ---- 2. a page as text -------------------------------------------------------------------------------------

def page_text(ax_nodes: list[dict], dom: dict) -> str:
    """Chromium's accessibility nodes (with "browsergym_id") and DOM snapshot as BrowserGym's text, cleaned as
    the top of this file says."""
    kept = []
    for node in ax_nodes:
        role = node["role"]["value"]
        if role == "InlineTextBox" or role == "StaticText" and not node["name"]["value"].strip():
            continue
        if role in ("textbox", "searchbox", "spinbutton"):
            node["childIds"] = []
            value = node.get("value", {}).get("value")
            if value == "":  # an empty password box sometimes has it, an empty textbox never
                del node["value"]
            elif set(str(value)) == {"•"}:  # a number box has a number
                node["value"]["value"] = BULLETS
        kept.append(node)
    extra = extract_dom_extra_properties(dom, 1.0)
    return flatten_axtree_to_str({"nodes": kept}, extra, with_visible=True, with_clickable=True)


def take_ids(ax_nodes: list[dict]) -> None:
    """Moves the ids that SCRIPT left in ARIA attributes to where `flatten_axtree_to_str` looks. Each id
    stands in two: the role description does not survive on generic nodes, the description does; and Chromium
    keeps a described node where it drops a bare one."""
    for node in ax_nodes:
        properties = node.get("properties", [])
        marks = [p["value"]["value"] for p in properties if p["name"] == "roledescription"]
        for mark in [*marks, node.get("description", {}).get("value", "")]:
            if mark.startswith("browsergym_id_"):
                node["browsergym_id"] = mark.removeprefix("browsergym_id_").strip()
        node["properties"] = [p for p in properties if p["name"] != "roledescription"]


# Runs in every page before its own scripts. step() acts, lets timers of 0 ms fire, then marks the elements
# with ids. core, WOB_... and Math.seedrandom are MiniWoB++'s own.
SCRIPT = """
window.dynaweb = {
  // The page's clock stands still but for pass(): what timers do depends on the actions alone.
  now: Date.UTC(2020, 0, 6), timers: new Map(), last: 0, later: setTimeout.bind(window),
  takeClock() {
    const set = repeats => (work, wait, ...values) => {
      const every = Math.max(1, +wait || 0);
      this.timers.set(++this.last, {at: this.now + every, every: repeats && every, work, values});
      return this.last;
    };
    const clear = id => { this.timers.delete(id); };
    setTimeout = set(false); setInterval = set(true);
    clearTimeout = clearInterval = cancelAnimationFrame = clear;
    requestAnimationFrame = work => setTimeout(() => work(this.now), 16);
    Date.now = () => this.now;
    Date = new Proxy(Date, {
      construct: (date, values, kind) => Reflect.construct(date, values.length ? values : [this.now], kind),
      apply: () => new Date().toString()});
  },
  async pass(time) {
    const end = this.now + time;
    while (true) {
      const due = [...this.timers].filter(([, timer]) => timer.at <= end).sort(([, a], [, b]) => a.at - b.at);
      if (!due.length) break;
      const [id, timer] = due[0];
      this.now = timer.at;
      if (timer.every) timer.at += timer.every; else this.timers.delete(id);
      try { timer.work.call(window, ...timer.values); } catch (problem) { console.error(problem); }
      await null;  // promises that it kept
    }
    this.now = end;
  },

  // ids: element -> number, nodes: number -> element; both new in each episode.
  async restart([seed, ask]) {
    this.icons ||= await this.load();
    this.now = Date.UTC(2020, 0, 6);
    if (this.ids) document.activeElement.blur();  // what a page focuses while it loads (terminal) stays
    history.replaceState(null, '', location.pathname);  // a clicked href='#' stays in the address otherwise
    if (window.jQuery) jQuery.fx.off = true;  // no animations
    this.ids = new WeakMap(); this.nodes = []; this.under = null;
    Math.seedrandom(seed); core.EPISODE_MAX_TIME = 1e6; core.startEpisodeReal(); core.clearTimer();
    // What two goals show as an icon or as a colour stands in words in BrowserGym's.
    const icon = document.querySelector('#query .ui-icon'), colour = document.querySelector('#query .cc');
    if (icon) icon.textContent = `"${icon.classList[1]}"`;
    if (colour) colour.textContent = colour.getAttribute('style').split(':')[1];
    let goal = core.getUtterance(), answer = null;
    if (typeof goal == 'object') goal = goal.utterance;  // some tasks add its fields
    if (ask) {  // ask-table: read-table's table, but its value goes into stop
      const key = document.querySelector('#query .bold').textContent;
      goal = `What is the value of ${key} in the table? Answer with stop.`;
      const row = [...document.querySelectorAll('#tab tr')].find(row => row.cells[0].textContent == key);
      answer = row.cells[1].textContent;
    }
    return [goal, answer];
  },

  // Images that style sheets set in place of an element: it has their size only once they are there.
  load() {
    const rules = [...document.styleSheets].flatMap(sheet => [...sheet.cssRules]);
    return Promise.all(rules.filter(rule => rule.style?.content.startsWith('url(')).map(async rule => {
      const image = new Image(), url = rule.style.content.slice(5, -2);
      image.src = new URL(url, rule.parentStyleSheet.href || location);
      await image.decode().catch(() => 0);
      return image;
    }));
  },

  async step(action) {  // without an action: only looks
    if (!this.ids) throw Error('the page was left');
    const error = action ? this.act(action) : '';
    await this.pass(500);  // BrowserGym's pre_observation_delay
    await new Promise(done => this.later(done));
    // Images on their way would move what is below them later.
    const coming = [...document.images].filter(image => !image.complete && image.loading != 'lazy');
    await Promise.all(coming.map(image => new Promise(done =>
      ['load', 'error'].forEach(end => image.addEventListener(end, done)))));
    this.mark();
    return {error, url: location.href, done: WOB_DONE_GLOBAL, raw: WOB_RAW_REWARD_GLOBAL};
  },

  // Returns what was wrong, or ''. lines: the ids that the page's text shows; the others are in the DOM only.
  act({name, bid, text, lines}) {
    if (name == 'scroll') { scrollBy(0, text == 'up' ? -100 : 100); return ''; }
    if (name == 'press') {  // Tab or Shift+Tab; Python presses the other keys
      const stops = [...document.querySelectorAll('a[href],button,input,select,textarea,[tabindex]')]
        .filter(el => el.tabIndex >= 0 && !el.disabled && el.getClientRects().length);
      const now = stops.indexOf(document.activeElement), n = stops.length;
      if (n) stops[text == 'Tab' ? (now + 1) % n : now <= 0 ? n - 1 : now - 1].focus();
      return '';
    }
    const el = this.nodes[bid];
    if (el.tagName == 'OPTION') return this.choose(el, name) ? '' : `[${bid}] takes no ${name}`;
    el.scrollIntoViewIfNeeded();
    const box = el.getClientRects()[0];
    if (!box || !el.checkVisibility({checkVisibilityCSS: true})) return `[${bid}] is not visible`;
    if (el.matches(':disabled')) return `[${bid}] is disabled`;
    const found = this.aim(el, box, new Set(lines.map(bid => this.nodes[bid])));
    if (!found) return `[${bid}] is covered by another element`;
    const [clientX, clientY, target] = found;
    const settings = {bubbles: true, cancelable: true, view: window, clientX, clientY, detail: 1};
    const mouse = (type, on = target, relatedTarget = null, bubbles = true) =>
      on.dispatchEvent(new MouseEvent(type, {...settings, relatedTarget, bubbles}));
    if (name != 'type') this.move(target, mouse);
    if (name == 'hover') return '';
    if (name == 'click') {
      if (mouse('mousedown')) {  // not prevented: the focus moves, as under a mouse
        const focusable = target.closest('a[href],button,input,select,textarea,[tabindex],[contenteditable]');
        focusable ? focusable.focus() : document.activeElement.blur();
      }
      mouse('mouseup'); mouse('click'); return '';
    }
    if (el.isContentEditable) {
      el.closest('[contenteditable]').focus(); getSelection().selectAllChildren(el);
      document.execCommand(text ? 'insertText' : 'delete', false, text); return '';
    }
    const texts = ['text', 'password', 'search', 'email', 'tel', 'url'];
    const forms = {number: '-1.5', range: el.min + ' to ' + el.max, date: '12/31/2000', time: '11:59 PM',
                   color: '#0080ff'};
    const form = el.tagName == 'INPUT' && forms[el.type], before = el.value;
    const field = form || el.tagName == 'TEXTAREA' || el.tagName == 'INPUT' && texts.includes(el.type);
    if (!field || el.readOnly) return `[${bid}] takes no text`;
    if (form) {  // a date as an American keyboard writes it, or as the DOM does
      text = text.trim();
      const date = el.type == 'date' && /^\\d+\\/\\d+\\/\\d{4}$/.test(text) && new Date(text);
      const time = el.type == 'time' && /^\\d+:\\d\\d [ap]m$/i.test(text) && new Date('1/1/2000 ' + text);
      if (+date) text = date.toISOString().slice(0, 10);
      if (+time) text = time.toISOString().slice(11, 16);
    }
    el.focus();
    if (el.disabled) return '';  // its own focus handler may disable it (a popup)
    el.value = text;
    if (form && el.value.toLowerCase() != text.toLowerCase()) {
      el.value = before; return `[${bid}] takes ${form} or the like, not ${text}`;
    }
    for (const type of ['input', 'change']) el.dispatchEvent(new Event(type, {bubbles: true}));
    return '';
  },

  // The mouse comes from what it was on: menus open and close under it.
  move(to, mouse) {
    const from = this.under?.isConnected ? this.under : document.documentElement;
    const beside = (el, other) => el && !el.contains(other) ? [el, ...beside(el.parentElement, other)] : [];
    this.under = to;
    if (from !== to) {
      mouse('mouseout', from, to);
      beside(from, to).forEach(el => mouse('mouseleave', el, to, false));
      mouse('mouseover', to, from);
      beside(to, from).reverse().forEach(el => mouse('mouseenter', el, from, false));
    }
    mouse('mousemove');
  },

  // An option is chosen on its list, which may be closed.
  choose(el, name) {
    const list = el.closest('select');
    if (name != 'click' || list.disabled || el.disabled) return false;
    if (list.multiple) el.selected = !el.selected;
    else { list.value = el.value; list.selectedIndex = el.index; }
    list.focus();
    for (const type of ['input', 'change']) list.dispatchEvent(new Event(type, {bubbles: true}));
    return true;
  },

  // Where to act, and on what: the first of 25 points in the box, from the centre on, where el itself lies on
  // top, or a part of it that has no line of its own (own: the elements with a line). Else the first point
  // that no foreign element covers, on el itself. Undefined if there is none.
  aim(el, box, own) {
    const parts = [.5, .1, .3, .7, .9];
    let found;
    for (const [across, down] of parts.flatMap(a => parts.map(b => [a, b]))) {
      const x = box.left + across * box.width, y = box.top + down * box.height;
      const top = document.elementFromPoint(x, y);
      if (top && !el.contains(top) && !top.contains(el)) continue;  // covered here
      found ||= [x, y, el];
      let part = top;
      while (part && part !== el && !own.has(part)) part = part.parentElement;
      if (part === el) return [x, y, top];
    }
    return found;
  },

  // Gives every element its id and visibility, as attributes that BrowserGym's functions and take_ids read.
  mark() {
    const clips = new Map(), all = {left: 0, top: 0, right: innerWidth, bottom: innerHeight};
    const meet = (a, b) => ({left: Math.max(a.left, b.left), top: Math.max(a.top, b.top),
                             right: Math.min(a.right, b.right), bottom: Math.min(a.bottom, b.bottom)});
    const clip = el => {  // the box that el's ancestors let through
      if (el === document.body) return all;
      if (!clips.has(el)) {
        const above = clip(el.parentElement), open = getComputedStyle(el).overflow == 'visible';
        clips.set(el, open ? above : meet(above, el.getBoundingClientRect()));
      }
      return clips.get(el);
    };
    const hidden = '#query, #reward-display, #click-canvas, #sync-task-cover, script, style';
    // A drawing has an id, its parts have none, as in BrowserGym.
    const skip = el => !(el instanceof HTMLElement || el.tagName == 'svg') || el.matches(hidden);
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT,
      el => skip(el) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    while (walk.nextNode()) {
      const el = walk.currentNode;
      if (!this.ids.has(el)) this.ids.set(el, this.nodes.push(el) - 1);
      const bid = this.ids.get(el), mark = 'browsergym_id_' + bid;
      const box = el.getBoundingClientRect(), seen = meet(box, clip(el.parentElement));
      const area = box.width * box.height;
      const none = !el.getClientRects().length || seen.right < seen.left || seen.bottom < seen.top;
      const share = none ? 0 : area ? (seen.right - seen.left) * (seen.bottom - seen.top) / area : 1;
      const set = {bid: '' + bid, browsergym_visibility_ratio: share.toFixed(2),
                   'aria-roledescription': mark, 'aria-description': mark};
      for (const name in set) if (el.getAttribute(name) !== set[name]) el.setAttribute(name, set[name]);
    }
  },
};
dynaweb.takeClock();
"""
# The task's text, cover, timer and score are not part of the page: gone from its text and its layout.
STYLE = """<style>#query, #reward-display, #click-canvas, #sync-task-cover {display: none !important}
select[multiple] {height: 270px !important}</style>"""
STYLE_ASK = "<style>#form {display: none !important}</style>"  # the answer goes into stop, not into the page


# ---- 3. MiniWoB++ ------------------------------------------------------------------------------------------

@dataclass(eq=False)
class _Tab:
    """One open page of one task."""
    task: str
    page: object  # Playwright's
    cdp: object  # its session of Chromium's own protocol
    obs: Obs = None
    answer: str | None = None  # ask-table: what stop must say
    ended: bool = False
    failed: bool = False


class Browser:
    """MiniWoB++ in one Chromium, many pages in lockstep.

    Pages are kept open after an episode, at most `keep` idle ones. timeout: seconds that a page may take for
    a step before it counts as hung. html: the folder with miniwob/, core/ and common/. A thread of its own
    runs Playwright's asynchronous interface: pages work side by side, every wait has a limit (the synchronous
    interface has none on evaluate), and it can be used inside a notebook or beside BrowserGym's.
    """

    def __init__(self, timeout: float = 10.0, keep: int = 24, html: Path = HTML):
        self.timeout, self.keep, self.html = timeout, keep, html
        self._tabs: list[_Tab] = []  # in the order of the starts
        self._idle: list[_Tab] = []  # oldest first
        self._playwright = self._chromium = self._context = None
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

    def reset(self, starts: list[Start]) -> list[Obs]:
        """Opens a page for each start: restarts (task, seed), then runs the prefix. Raises ValueError for an
        unknown task and for a prefix that goes on after the end of the episode."""
        for start in starts:
            if not self.knows(start.task, self.html):
                raise ValueError(f"no MiniWoB++ task {start.task!r}; the recipe's are {', '.join(TASKS)}; "
                                 "`all` alone stands for every page")
        return self._run(self._reset(starts))

    def step(self, actions):
        """actions: for each page an Action, or None (it idles). Returns (obs, rewards 0./1., terminated,
        truncated), a list each. An idling page returns what it shows, reward 0, False, False. After the end
        of its episode a page can only idle."""
        assert len(actions) == len(self._tabs), f"{len(actions)} actions for {len(self._tabs)} pages"
        pairs = list(zip(self._tabs, actions))
        assert not any(action and tab.ended for tab, action in pairs), "a step after the end of an episode"
        results = self._run(self._side_by_side(self._guarded(tab, action) for tab, action in pairs))
        return tuple(map(list, zip(*results))) if results else ([], [], [], [])

    @property
    def failures(self) -> list[str]:
        """Of each page how it crashed or hung, else ''."""
        return [tab.obs.error if tab.failed else "" for tab in self._tabs]

    @classmethod
    def knows(cls, task: str, html: Path = HTML) -> bool:
        """Whether `task` can be reset."""
        return (html / "miniwob" / f"{cls._file(task)}.html").is_file()

    # -- pages --

    @staticmethod
    def _file(task):
        return "read-table" if task == "ask-table" else task

    async def _open_chromium(self):
        if not self._playwright:
            self._playwright = await async_playwright().start()
        kind = self._playwright.chromium
        self._chromium = await kind.launch(**launch_options(kind.executable_path))
        self._context = await self._chromium.new_context(
            viewport=VIEWPORT, service_workers="block", accept_downloads=False, locale="en-US",
            timezone_id="UTC")
        await self._context.add_init_script(SCRIPT)
        await self._context.route("**/*", self._serve)

    async def _close(self):
        if self._chromium.is_connected():
            await self._chromium.close()
        await self._playwright.stop()

    async def _serve(self, route):
        """Answers a request: a file of the package, or nothing. On a 204 a navigation stays where it is."""
        host, _, path = route.request.url.partition(f"{ORIGIN}/")
        path = path.split("?")[0].split("#")[0]
        file = (self.html / ("" if path.startswith(("core/", "common/")) else "miniwob") / path).resolve()
        if path.endswith("ask-table.html"):
            file = file.with_name("read-table.html")
        if host or not file.is_relative_to(self.html.resolve()) or not file.is_file():
            await (route.fulfill(status=204) if route.request.is_navigation_request() else route.abort())
        elif file.suffix == ".html":
            text = file.read_text().replace("</head>", STYLE + "</head>", 1)
            if path.endswith("ask-table.html"):
                text = text.replace("Read Table Task", "Ask Table Task")
                text = text.replace("</head>", STYLE_ASK + "</head>", 1)
            await route.fulfill(body=text, content_type="text/html; charset=utf-8")
        else:
            await route.fulfill(path=file)

    async def _open(self, task) -> _Tab:
        async with self._opening:
            if not self._chromium.is_connected():
                await self._open_chromium()
        page = await self._context.new_page()
        page.on("popup", lambda window: asyncio.ensure_future(self._drop(window)))
        tab = _Tab(task, page, await self._context.new_cdp_session(page))
        await self._load(tab)
        return tab

    async def _load(self, tab):
        await tab.page.goto(f"{ORIGIN}/{tab.task}.html", timeout=1000 * self.timeout)

    async def _drop(self, page):
        try:
            await asyncio.wait_for(page.close(), self.timeout)
        except (PlaywrightError, TimeoutError):
            pass  # a page that does not even close goes with its Chromium; nobody uses it again

    # -- episodes --

    async def _reset(self, starts):
        for tab in self._tabs:
            if tab.failed:
                await self._drop(tab.page)
            else:
                self._idle.append(tab)
        self._tabs = []
        self._idle = [tab for tab in self._idle if not tab.page.is_closed()]
        chosen = []
        for start in starts:
            chosen.append(next((tab for tab in reversed(self._idle) if tab.task == start.task), None))
            if chosen[-1]:
                self._idle.remove(chosen[-1])
        while len(self._idle) > self.keep:
            await self._drop(self._idle.pop(0).page)
        self._tabs = await self._side_by_side(self._begin(tab, start) for tab, start in zip(chosen, starts))
        return [tab.obs for tab in self._tabs]

    async def _begin(self, tab, start) -> _Tab:
        for _ in range(3):
            try:
                tab = tab or await asyncio.wait_for(self._open(start.task), 3 * self.timeout)
                return await asyncio.wait_for(self._restart(tab, start), 3 * self.timeout)
            except (PlaywrightError, TimeoutError) as error:
                reason = error
                if tab:
                    await self._drop(tab.page)
                tab = None  # the next attempt opens a new page
        raise RuntimeError(f"three pages in a row did not start {start.task}, seed {start.seed}: {reason!r}")

    async def _restart(self, tab, start) -> _Tab:
        """Starts the episode in an open page and runs the prefix."""
        if tab.obs and tab.task not in TASKS:  # handlers, scrolled boxes, timers: what others leave behind
            await self._load(tab)
        settings = [start.seed, start.task == "ask-table"]
        goal, tab.answer = await tab.page.evaluate("settings => dynaweb.restart(settings)", settings)
        tab.obs, tab.ended = Obs(goal, "", ""), False
        await self._look(tab, await tab.page.evaluate("() => dynaweb.step()"))
        for text in start.prefix:
            if tab.ended:
                raise ValueError(f"the prefix of {start.task}, seed {start.seed}, ends the episode "
                                 f"before {text!r}")
            await self._act(tab, parse_action(text))
        return tab

    async def _guarded(self, tab, action):
        """_act with a limit on its time; what breaks becomes the end of this page's episode."""
        if action is None:
            return replace(tab.obs, error=""), 0.0, False, False
        try:
            reward = await asyncio.wait_for(self._act(tab, action), self.timeout)
        except TimeoutError:
            return self._fail(tab, f"{action}: the page hung for {self.timeout:g} s")
        except PlaywrightError as error:
            return self._fail(tab, f"{action}: the page crashed ({error.message.splitlines()[0]})")
        return tab.obs, reward, tab.ended, False

    @staticmethod
    def _fail(tab, reason):
        tab.ended = tab.failed = True
        tab.obs = replace(tab.obs, error=reason)
        return tab.obs, 0.0, False, True

    async def _act(self, tab, action) -> float:
        """Runs one action; sets tab.obs and tab.ended, returns the reward."""
        error, key, lines = "", None, bids(tab.obs.page)
        if action.name == "stop":
            tab.ended, tab.obs = True, replace(tab.obs, error="")
            return float(tab.answer is not None and action.text.strip() == tab.answer)
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
            state = await tab.page.evaluate("action => dynaweb.step(action)", played)
            key = "Enter" if action.name == "type" and action.enter and not state["error"] else None
        if key:
            try:
                await tab.page.keyboard.press(re.sub(r"(?i)\bctrl\b", "Control", key))
            except PlaywrightError as problem:
                if "Unknown key" not in problem.message:
                    raise
                error = f"{action}: there is no key {key!r}"
            state = await tab.page.evaluate("() => dynaweb.step()")
        error = error or state["error"] and f"{action}: {state['error']}"
        return await self._look(tab, state, error)

    async def _look(self, tab, state, error="") -> float:
        """Reads the page into tab.obs and tab.ended; returns the reward."""
        # disable throws Chromium's cache of accessibility nodes away. Kept and updated, it shows the text of
        # a checkbox's label or leaves it out depending on what was asked before.
        send = tab.cdp.send
        _, ax, _, dom = await asyncio.gather(
            send("Accessibility.enable"), send("Accessibility.getFullAXTree"), send("Accessibility.disable"),
            send("DOMSnapshot.captureSnapshot", {"computedStyles": []}))
        for document in dom["documents"]:  # BrowserGym wants the key; boxes would cost a third of the time
            document["layout"]["clientRects"] = []
        take_ids(ax["nodes"])
        tab.obs = Obs(tab.obs.goal, state["url"], page_text(ax["nodes"], dom), error)
        tab.ended = state["done"]
        return float(state["done"] and state["raw"] == 1)
