"""MiniWoB++ in a real Chromium: reset and step over many pages at once.

    with Browser() as web:
        obs = web.reset([Start("enter-text", seed=7, ...), Start("login-user", seed=7, ...)])
        obs, rewards, terminated, truncated = web.step([parse_action("click [3]"), None])  # None: it idles

dream.py has the same interface, answered by a world model; benchmarks.py has it for other people's tasks. How
a page is read and acted on is chromium.py's. The HTML of MiniWoB++ (Shi et al. 2017; Liu et al. 2018,
arXiv:1802.08802) comes with the `miniwob` package.

Trajectories. A page stays open and its task is restarted in place (about 0.03 s; a BrowserGym reset is 2
s); one outside of IN_PLACE is loaded anew, as it may leave handlers, timers and scrolled boxes behind. (task,
seed) gives the same bytes whatever ran before: element ids restart at 0, the random state is the page's own
`Math.seedrandom`, animations are off, and the page's clock starts on 2020-01-06. Ids number the elements
below <body> in document order, first those that are there at the reset. What appears later gets larger ids,
and no id is given twice in a trajectory. Reward 1 is raw reward == 1: several tasks pay a part for a wrong
answer, which BrowserGym (> 0) takes for success (NOTES 6.5).

Where we differ from BrowserGym's own MiniWoB++, and why (beside what chromium.py says; NOTES 6.10 has the two
side by side)
- The window is large enough for every page, and a list box for all its options, so that `visible` does not
  depend on what was scrolled to before.
- Time is the page's own clock. What is to be done at a speed (chase-circle, moving-items) is done at that of
  two actions a second.
- There is no server: requests to http://miniwob are answered by interception, so a page does not show the
  install path, and nothing else can be reached.
"""

import asyncio
from pathlib import Path

import miniwob

from config import UserError
from worlds import chromium
from worlds.chromium import Pages, Tab, Task

TASKS = (
    "ask-table", "button-delay", "choose-list", "click-checkboxes", "click-checkboxes-large",
    "click-checkboxes-transfer", "click-menu-2", "click-scroll-list", "copy-paste", "email-inbox-delete",
    "email-inbox-important", "enter-time", "form-sequence-2", "navigate-tree", "odd-or-even", "our-form",
    "phone-book", "read-table", "read-table-2", "use-colorwheel", "use-colorwheel-2", "use-spinner",
)
"""The recipe's tasks, by the alphabet: pages that can tell agents apart. A scripted player, which sees our
text and gives our actions, won 18 of 20 dev seeds or more; page and action determine the next page; and the
SFT agent of the toy model solved between .1 and .9. Recordings of them are in recordings/pages.jsonl.gz."""

LAPTOP = ("choose-list", "click-button", "click-button-sequence", "click-dialog-2", "click-option",
          "enter-password", "enter-text", "focus-text-2", "login-user")
"""Those of recipe.LAPTOP: pages of at most 210 tokens and one to four decisions, of which an explorer wins a
third and more (recordings/small.jsonl.gz)."""

IN_PLACE = (
    "enter-text", "enter-text-dynamic", "enter-password", "login-user", "click-option", "click-checkboxes",
    "choose-list", "click-scroll-list", "read-table", "ask-table", "click-button-sequence", "navigate-tree",
)
"""Restarted without being loaded, to the same bytes (tests/test_browser.py)."""

TRANSFER = ("click-button", "click-test", "click-test-2", "click-test-transfer", "click-dialog",
            "click-dialog-2", "click-collapsible", "click-menu", "use-autocomplete", "enter-text-2")
"""Never trained on: what was learned elsewhere is tried here. (click-link, which has no line to act on, was
replaced by click-menu, the next by alphabet that has one.)"""

ORIGIN = "http://miniwob"
HTML = Path(miniwob.__file__).parent / "html"
ALL_TASKS = tuple(sorted(file.stem for file in (HTML / "miniwob").glob("*.html")))
"""Every page of MiniWoB++ (130); ask-table is ours. Each resets, steps and ends; not all can be solved from
the text (NOTES 11.12)."""
OURS = {file.name: file for file in sorted(Path(__file__).with_name("html").glob("*.html"))}
"""Pages of our own, made as MiniWoB++'s are and served beside them: a form of eight fields, a list over three
screens. `all` does not mean them."""
VIEWPORT = {"width": 500, "height": 600}  # px; a MiniWoB++ page is 160 x 210, lists and tables run below that


def tasks_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks that a flag names. One word alone may stand for many: `all` for every page, `scored` for
    the recipe's (TASKS), `transfer` for those never trained on (TRANSFER)."""
    words = {("all",): ALL_TASKS, ("scored",): TASKS, ("transfer",): TRANSFER, ("laptop",): LAPTOP}
    return words.get(tuple(names), tuple(names))


# Added to chromium.SCRIPT. core, WOB_... and Math.seedrandom are MiniWoB++'s own.
SCRIPT = chromium.SCRIPT + """
dynaweb.takeClock(Date.UTC(2020, 0, 6));
dynaweb.hidden = '#query, #reward-display, #click-canvas, #sync-task-cover, script, style';
Object.assign(dynaweb, {
  async restart([seed, ask]) {
    this.icons ||= await this.load();
    this.now = Date.UTC(2020, 0, 6);
    if (this.ids) document.activeElement.blur();  // what a page focuses while it loads (terminal) stays
    history.replaceState(null, '', location.pathname);  // a clicked href='#' stays in the address otherwise
    if (window.jQuery) jQuery.fx.off = true;  // no animations
    this.forget();
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

  arrived() { throw Error('the page was left'); },
  outcome() { return {done: WOB_DONE_GLOBAL, raw: WOB_RAW_REWARD_GLOBAL}; },
});
"""
# The task's text, cover, timer and score are not part of the page: gone from its text and its layout.
STYLE = """<style>#query, #reward-display, #click-canvas, #sync-task-cover {display: none !important}
select[multiple] {height: 270px !important}</style>"""
STYLE_ASK = "<style>#form {display: none !important}</style>"  # the answer goes into stop, not into the page


class Browser(Pages):
    """MiniWoB++ pages. They are kept open after a trajectory, at most `keep` idle ones. html: the folder with
    miniwob/, core/ and common/. Else as chromium.Pages."""

    scores = True

    def __init__(self, timeout: float = 10.0, keep: int = 24, html: Path = HTML):
        super().__init__(timeout)
        self.keep, self.html = keep, html
        self._idle: list[Tab] = []  # oldest first
        self._shared = None  # the context of all pages

    @classmethod
    def knows(cls, task: str, html: Path = HTML) -> bool:
        """Whether `task` can be reset."""
        return f"{task}.html" in OURS or (html / "miniwob" / f"{cls._file(task)}.html").is_file()

    @staticmethod
    def _file(task):
        return "read-table" if task == "ask-table" else task

    def tasks(self) -> dict[str, Task]:
        return {task: Task("miniwob") for task in ALL_TASKS}

    def _check(self, task):
        if not self.knows(task, self.html):
            raise UserError(f"no MiniWoB++ task {task!r}; the recipe's are {', '.join(TASKS)}; `all`, "
                             "`scored` and `transfer` alone stand for many")

    async def _serve(self, route):
        """Answers a request: a file of the package, or nothing. On a 204 a navigation stays where it is."""
        host, _, path = route.request.url.partition(f"{ORIGIN}/")
        path = path.split("?")[0].split("#")[0]
        file = (self.html / ("" if path.startswith(("core/", "common/")) else "miniwob") / path).resolve()
        if path.endswith("ask-table.html"):
            file = file.with_name("read-table.html")
        served = file.is_relative_to(self.html.resolve()) and file.is_file()
        if path in OURS:
            file, served = OURS[path], True
        if host or not served:
            await (route.fulfill(status=204) if route.request.is_navigation_request() else route.abort())
        elif file.suffix == ".html":
            text = file.read_text().replace("</head>", STYLE + "</head>", 1)
            if path.endswith("ask-table.html"):
                text = text.replace("Read Table Task", "Ask Table Task")
                text = text.replace("</head>", STYLE_ASK + "</head>", 1)
            await route.fulfill(body=text, content_type="text/html; charset=utf-8")
        else:
            await route.fulfill(path=file)

    async def _open_chromium(self):
        await super()._open_chromium()
        self._shared = await self._context(SCRIPT, self._serve, VIEWPORT)

    async def _open(self, task) -> Tab:
        await self._alive()
        page = await self._shared.new_page()
        page.on("popup", lambda window: asyncio.ensure_future(self._drop(window)))
        tab = Tab(task, page, await self._shared.new_cdp_session(page))
        await self._load(tab)
        return tab

    async def _load(self, tab):
        await tab.page.goto(f"{ORIGIN}/{tab.task}.html", timeout=1000 * self.timeout)

    async def _leave(self, tab):
        if not tab.failed:
            self._idle.append(tab)
        elif tab.page:  # it had started
            await self._drop(tab.page)

    def _kept(self, task):
        self._idle = [tab for tab in self._idle if not tab.page.is_closed()]
        tab = next((tab for tab in reversed(self._idle) if tab.task == task), None)
        if tab:
            self._idle.remove(tab)
        return tab

    async def _drop_the_oldest(self):
        while len(self._idle) > self.keep:
            await self._drop(self._idle.pop(0).page)

    async def _anew(self, k, start):
        shown = await super()._anew(k, start)
        await self._drop_the_oldest()
        return shown

    async def _reset(self, starts):
        for tab in self._tabs:
            await self._leave(tab)
        self._tabs = []
        chosen = [self._kept(start.task) for start in starts]
        await self._drop_the_oldest()
        self._tabs = await self._side_by_side(self._started(start, tab) for tab, start in zip(chosen, starts))
        return [tab.obs for tab in self._tabs]

    async def _begin(self, tab, start) -> str:
        """Starts the task in an open page."""
        if tab.obs and tab.task not in IN_PLACE:  # handlers, scrolled boxes, timers: what others leave behind
            await self._load(tab)
        settings = [start.seed, start.task == "ask-table"]
        goal, tab.own = await tab.page.evaluate("settings => dynaweb.restart(settings)", settings)
        return goal

    async def _pays(self, tab, action) -> float:
        return float(tab.own is not None and action.text.strip() == tab.own)
