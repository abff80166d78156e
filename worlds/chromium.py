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
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from browsergym.core.observation import extract_dom_extra_properties
from browsergym.utils.obs import IGNORED_AXTREE_PROPERTIES, IGNORED_AXTREE_ROLES, flatten_axtree_to_str
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import async_playwright

import data
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
SCRIPT = """
window.dynaweb = {
  // The page's clock stands still but for pass(): what timers do depends on the actions alone.
  now: 0, timers: new Map(), last: 0, later: setTimeout.bind(window), asked: 0, hidden: 'script, style',
  controls: false,
  takeClock(start) {
    this.now = start;
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
    const ask = window.fetch;  // an answer is awaited, whatever the clock says
    window.fetch = (...what) => { this.asked++; return ask(...what).finally(() => { this.asked--; }); };
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

  // ids: element -> number, nodes: number -> element, from the reset on. under: what the mouse is on. heard:
  // the elements that mark gave a listener.
  forget() { this.ids = new WeakMap(); this.nodes = []; this.under = null; this.heard = new WeakSet(); },

  async step(action) {  // without an action: only looks
    if (!this.ids) this.arrived();
    const error = action ? this.act(action) : '';
    await this.pass(500);  // BrowserGym's pre_observation_delay
    await new Promise(done => this.later(done));
    while (this.asked) await new Promise(done => this.later(done, 1));
    // Images on their way would move what is below them later.
    const coming = [...document.images].filter(image => !image.complete && image.loading != 'lazy');
    await Promise.all(coming.map(image => new Promise(done =>
      ['load', 'error'].forEach(end => image.addEventListener(end, done)))));
    this.mark();
    return {error, ...this.outcome()};
  },
  // Chromium has one clipboard for all pages: what one copies another could paste.
  ownClipboard() {
    let held = '';
    const chosen = el => el?.matches('input, textarea') ? el.value.slice(el.selectionStart, el.selectionEnd)
      : '' + getSelection();
    for (const type of ['copy', 'cut', 'paste']) addEventListener(type, event => {
      event.preventDefault(); event.stopImmediatePropagation();
      if (type == 'paste') document.execCommand('insertText', false, held);
      else held = chosen(document.activeElement) || held;
      if (type == 'cut') document.execCommand('delete');
    }, true);
    const own = {writeText: async text => { held = '' + text; }, readText: async () => held};
    Object.defineProperty(navigator, 'clipboard', {value: own});
  },

  arrived() { this.forget(); },  // on a page that was not reset: a link led here
  outcome() { return {}; },

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
    const {error, el, found} = this.reach(name, bid, lines);
    if (error || !found) return error;
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
    // The prototype's setter: frameworks (React) watch the element's own, and would take this for no change.
    const kind = el.tagName == 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;
    Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(el, text);
    if (form && el.value.toLowerCase() != text.toLowerCase()) {
      el.value = before; return `[${bid}] takes ${form} or the like, not ${text}`;
    }
    for (const type of ['input', 'change']) el.dispatchEvent(new Event(type, {bubbles: true}));
    return '';
  },

  // What was wrong, or the element and where to act on it. An option is chosen at once: {error: ''}.
  reach(name, bid, lines) {
    const el = this.nodes[bid];
    if (!el) return {error: `[${bid}] is not an element of the page`};  // a forged line
    if (el.tagName == 'OPTION') return {error: this.choose(el, name) ? '' : `[${bid}] takes no ${name}`};
    el.scrollIntoViewIfNeeded();
    const box = el.getClientRects()[0];
    if (!box || !el.checkVisibility({checkVisibilityCSS: true})) return {error: `[${bid}] is not visible`};
    if (el.matches(':disabled')) return {error: `[${bid}] is disabled`};
    const found = this.aim(el, box, new Set(lines.map(bid => this.nodes[bid])));
    return found ? {error: '', el, found} : {error: `[${bid}] is covered by another element`};
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
    const many = document.getElementsByTagName('*').length;
    if (many > NODES) throw Error(`${many} elements, at most NODES are read`);
    const clips = new Map(), all = {left: 0, top: 0, right: innerWidth, bottom: innerHeight};
    const meet = (a, b) => ({left: Math.max(a.left, b.left), top: Math.max(a.top, b.top),
                             right: Math.min(a.right, b.right), bottom: Math.min(a.bottom, b.bottom)});
    const cut = (el, seen) => {  // what CSS's clip leaves of el: nothing of a text for screen readers alone
      const edges = getComputedStyle(el).clip.match(/-?[\\d.]+(?=px)/g);
      if (edges?.length != 4) return seen;
      const [top, right, bottom, left] = edges.map(Number), box = el.getBoundingClientRect();
      return meet(seen, {left: box.left + left, top: box.top + top, right: box.left + right,
                         bottom: box.top + bottom});
    };
    const clip = el => {  // the box that el's ancestors let through
      if (el === document.body) return all;
      if (!clips.has(el)) {
        const above = cut(el, clip(el.parentElement)), open = getComputedStyle(el).overflow == 'visible';
        clips.set(el, open ? above : meet(above, el.getBoundingClientRect()));
      }
      return clips.get(el);
    };
    // A drawing has an id, its parts have none, as in BrowserGym.
    const skip = el => !(el instanceof HTMLElement || el.tagName == 'svg') || el.matches(this.hidden);
    // Clicks that the document handles leave no listener on what is clicked. What shows a hand gets one, and
    // Chromium then calls it clickable.
    const hand = el => getComputedStyle(el).cursor == 'pointer' && (getComputedStyle(el.parentElement).cursor
      != 'pointer' || el.matches('a, button, input, [onclick], [data-action], [data-id]'));
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT,
      el => skip(el) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    while (walk.nextNode()) {
      const el = walk.currentNode;
      if (!this.ids.has(el)) this.ids.set(el, this.nodes.push(el) - 1);
      if (this.controls && !this.heard.has(el) && hand(el)) {
        this.heard.add(el);
        el.addEventListener('click', () => {});
      }
      const bid = this.ids.get(el), mark = 'browsergym_id_' + bid;
      const box = el.getBoundingClientRect(), seen = cut(el, meet(box, clip(el.parentElement)));
      const area = box.width * box.height;
      const none = !el.getClientRects().length || seen.right < seen.left || seen.bottom < seen.top;
      const share = none ? 0 : area ? (seen.right - seen.left) * (seen.bottom - seen.top) / area : 1;
      const set = {bid: '' + bid, browsergym_visibility_ratio: share.toFixed(2),
                   'aria-roledescription': mark, 'aria-description': mark};
      for (const name in set) if (el.getAttribute(name) !== set[name]) el.setAttribute(name, set[name]);
    }
  },
};
dynaweb.ownClipboard();
""".replace("NODES", str(NODES))


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

    A world says what is its own: `tasks`, `_check` (is there such a task), `_open` (a page for a task),
    `_begin` (the trajectory begins in it), `_pays` (what an end is worth). timeout: seconds that a page may
    take for a step before it counts as hung. hosts: the only ones that can be reached. A thread of its own
    runs Playwright's asynchronous interface: pages work side by side, every wait has a limit (the synchronous
    interface has none on evaluate), and it can be used inside a notebook or beside BrowserGym's.
    """

    controls = False  # whether elements that can be clicked have a line though they have no role
    scores = False  # whether the page itself says when it is over and what that is worth (MiniWoB++)

    def __init__(self, timeout: float = 10.0, hosts: tuple[str, ...] = ()):
        self.timeout, self.hosts = timeout, hosts
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
