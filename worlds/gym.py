"""BrowserGym's tasks behind reset and step.

    with BrowserGymPages() as web:
        obs = web.reset([Start("browsergym/miniwob.click-test", seed=7, ...)])
        obs, rewards, terminated, truncated = web.step([parse_action("click [13]")])

BrowserGym is Drouin et al. 2024, arXiv:2412.05467. It is slow: one environment a page, one after the other (a
reset takes 2 s, a step 0.3 s). A page reads as ours do (chromium.py).
worlds/webarena.py makes WebArena of it.

Where we differ from BrowserGym, and why
- slow_mo is 0: a second an action is for onlookers.
- Only the hosts given can be reached, by http and https.
- Success is the whole reward: BrowserGym takes the parts that MiniWoB++ pays for successes (NOTES 6.5).
- A page that does not start in three attempts, or crashes, is a line in `failures`, and nobody's failure. A
  script of a page that never ends holds up everything, though: this interface has no limit on it.
"""

import importlib
import logging
import re
from dataclasses import replace

from playwright.sync_api import Error as PlaywrightError

from data import Action, Obs, Start, bids, parse_action
from worlds.chromium import Task, Unverified, launch_options, page_text

# An option of a <select> is chosen by its index, as others may have its name. Its click would wait for a list
# that no page draws. Where several may be chosen, select_option would take back those before. What is an
# option by its role alone is clicked like all else.
OPTION = """\
from browsergym.core.action.utils import get_elem_by_bid
option = get_elem_by_bid(page, {})
several = option.evaluate("el => el.tagName == 'OPTION' ? el.closest('select').multiple : null")
if several is False:
    choices = option.evaluate_handle("el => el.closest('select')").as_element()
    choices.select_option(index=option.evaluate("el => el.index"), timeout=500)
else:
    option.click(modifiers=["Control"] if several else [], timeout=500)
"""


def browsergym_code(action: Action, page: str) -> str:
    r"""The action as a call of BrowserGym's (NOTES 6.4), or as code where an option is clicked. Nothing of
    the page is in it: BrowserGym runs what stands here, and an option's name could be code.

    >>> print(browsergym_code(parse_action("type [3] [it's] [1]"), ""))
    fill('3', "it's")
    keyboard_press('Enter')
    >>> page = "\t[5] option 'Foot', selected=False"
    >>> browsergym_code(parse_action("click [5]"), page) == OPTION.format("'5'")
    True
    """
    bid, text = action.bid, action.text
    calls = {
        "click": f"click({bid!r})", "hover": f"hover({bid!r})", "press": f"keyboard_press({text!r})",
        "type": f"fill({bid!r}, {text!r})" + "\nkeyboard_press('Enter')" * action.enter,
        "scroll": f"scroll(0, {-100 if text == 'up' else 100})", "goto": f"goto({text!r})",
        "new_tab": "new_tab()", "close_tab": "tab_close()", "tab_focus": f"tab_focus({text})",
        "go_back": "go_back()", "go_forward": "go_forward()", "stop": f"send_msg_to_user({text!r})",
    }
    if action.name == "click" and re.search(rf"^\t*\[{bid}\] option\b", page, re.MULTILINE):
        return OPTION.format(repr(bid))
    return calls[action.name]


class BrowserGymPages:
    """BrowserGym tasks behind browser.Browser's reset and step.

    A start's task is a gymnasium id, such as "browsergym/miniwob.click-test". What that task needs
    (MINIWOB_URL, ...) must be set. hosts: the only ones that can be reached. env_kwargs: for BrowserGym's
    BrowserEnv. Rewards: 1 if the task's is 1.
    """

    def __init__(self, hosts: tuple[str, ...] = (), **env_kwargs):
        self.hosts, self._known = hosts, {}
        self.env_kwargs = {"pre_observation_delay": 0.1, "slow_mo": 0, **env_kwargs}
        self._envs, self._playing, self._obs, self._flags, self.failures = [], [], [], [], []

    def __enter__(self):
        import browsergym.core
        from browsergym.core.action.highlevel import HighLevelActionSet
        logging.getLogger("browsergym").setLevel(logging.ERROR)  # it warns of settings that are not its own
        # "webarena" is the action set that our grammar was made for; multiaction because typing may end in
        # Enter.
        code = HighLevelActionSet(subsets=["webarena"], multiaction=True).to_python_code
        self._code = lambda call: call if call.startswith("from ") else code(call)  # OPTION is code already
        # Each environment launches two Chromiums, one for the page and one for a chat window, and only the
        # first takes options. So the launch of BrowserGym's one Playwright is given ours.
        self._core = browsergym.core
        self._type = self._core._get_global_playwright().chromium
        self._launch = launch = self._type.launch
        options = launch_options(self._type.executable_path, self.hosts)

        def launch_locked(args=(), **other):
            return launch(**{**other, **options, "args": [*args, *options["args"]]})
        self._type.launch = launch_locked
        return self

    def __exit__(self, *_):
        for n in range(len(self._envs)):
            self._close(n)
        # Its Playwright runs on in this thread until it is stopped, and another cannot start beside it.
        self._type.launch = self._launch
        self._core._get_global_playwright().stop()
        self._core._set_global_playwright(None)

    def tasks(self) -> dict[str, Task]:
        """Those that are known beforehand."""
        return self._known

    def _close(self, n: int) -> None:
        env, self._envs[n] = self._envs[n], None
        try:
            if env:
                env.close()
        except PlaywrightError:
            pass  # its Chromium is gone already

    def reset(self, starts: list[Start]) -> list[Obs]:
        """As browser.Browser.reset. A page that does not start is a failure, and ends at its first step."""
        for n in range(len(self._envs)):
            if n >= len(starts) or self._playing[n] != starts[n].task:
                self._close(n)
        self._envs = (self._envs + [None] * len(starts))[:len(starts)]
        self._playing = [start.task for start in starts]
        self._obs, self._flags = [None] * len(starts), [(False, False)] * len(starts)
        self.failures = [""] * len(starts)
        for n, start in enumerate(starts):
            self._begin(n, start)
            for text in start.prefix if self._envs[n] else ():
                if any(self._flags[n]):
                    raise ValueError(f"the prefix of {start.task}, seed {start.seed}, ends the episode "
                                     f"before {text!r}")
                self._act(n, parse_action(text))
        return list(self._obs)

    def _begin(self, n: int, start: Start) -> None:
        for _ in range(3):
            try:
                self._envs[n] = self._envs[n] or self._make(n, start.task)
                return self._see(n, self._envs[n].reset(seed=start.seed)[0])
            except PlaywrightError as error:
                reason = error.message.splitlines()[0]
                self._close(n)
        self.failures[n] = f"{start.task} did not start in three attempts: {reason}"
        self._obs[n] = Obs(start.goal, "", "", self.failures[n])

    def _make(self, n: int, task: str):
        import gymnasium
        package, dot, _ = task.removeprefix("browsergym/").partition(".")
        if dot:
            importlib.import_module(f"browsergym.{package}")  # registers its tasks
        return gymnasium.make(task, action_mapping=self._code, disable_env_checker=True, **self.env_kwargs)

    def step(self, actions: list[Action | None]):
        """As browser.Browser.step."""
        assert len(actions) == len(self._envs), f"{len(actions)} actions for {len(self._envs)} pages"
        over = [any(flags) for flags in self._flags]
        late = any(isinstance(action, Action) and ended for action, ended in zip(actions, over))
        assert not late, "a step after the end of an episode"
        results = []
        for n, action in enumerate(actions):
            if isinstance(action, Start):  # another trajectory begins in the page
                self._close(n)
                self._playing[n], self._flags[n], self.failures[n] = action.task, (False, False), ""
                self._begin(n, action)
                results.append((self._obs[n], 0.0, False, False))
            elif action:
                reward = self._act(n, action)
                results.append((self._obs[n], reward, *self._flags[n]))
            else:
                results.append((replace(self._obs[n], error=""), 0.0, False, False))
        return tuple(map(list, zip(*results))) if results else ([], [], [], [])

    def _see(self, n: int, obs: dict) -> None:
        try:
            page = page_text(obs["axtree_object"]["nodes"], obs["dom_object"])
        except Exception as problem:  # the page is hostile: BrowserGym's reader recurses once a level
            raise PlaywrightError(f"its text could not be read ({type(problem).__name__})") from problem
        error = (obs["last_action_error"] or "").strip().split("\n")[0][:200]
        self._obs[n] = Obs(obs["goal"], obs["url"], page, error)

    def _act(self, n: int, action: Action) -> float:
        """Runs one action; sets the page's observation and flags, returns the reward."""
        seen = self._obs[n]
        if self.failures[n]:  # it did not start
            self._flags[n] = (False, True)
            return 0.0
        if action.bid and action.bid not in bids(seen.page):
            self._obs[n] = replace(seen, error=f"{action}: there is no [{action.bid}] on the page")
            return 0.0
        if action.name == "goto" and not re.match("https?://", action.text):  # files are no hosts
            self._obs[n] = replace(seen, error=f"{action}: an address starts with http:// or https://")
            return 0.0
        try:
            obs, reward, terminated, _, info = self._envs[n].step(browsergym_code(action, seen.page))
            self._see(n, obs)
            reward = self._pays(n, action, reward, info["task_info"])
        except (PlaywrightError, Unverified) as error:
            broken = "not verified" if isinstance(error, Unverified) else "the page crashed"
            self.failures[n] = f"{action}: {broken} ({str(error).splitlines()[0]})"
            self._obs[n], self._flags[n] = replace(self._obs[n], error=self.failures[n]), (False, True)
            self._close(n)
            return 0.0
        self._flags[n] = (bool(terminated) or action.name == "stop", False)
        return reward

    def _pays(self, n: int, action: Action, reward: float, info: dict) -> float:
        return float(info.get("RAW_REWARD_GLOBAL", reward) == 1)
