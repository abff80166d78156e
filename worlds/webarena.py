"""WebArena: six web sites that one sets up, and three lists of tasks on them.

    make venv-webarena                    (requirements-webarena.txt: BrowserGym with its own old pins)
    export WA_SHOPPING=http://... WA_SHOPPING_ADMIN=... WA_REDDIT=... WA_GITLAB=... WA_WIKIPEDIA=...
    export WA_MAP=... WA_HOMEPAGE=...     which sites, and how: https://github.com/web-arena-x/webarena
    export OPENAI_API_KEY=...             or OPENAI_BASE_URL: the judge of some answers
    export WA_FULL_RESET=http://...       optional: a server that sets all sites back

webarena (Zhou et al. 2023, arXiv:2307.13854) has 812 tasks. webarena_lite is 165 of them, mended (Liu et al.
2024, arXiv:2408.06327). webarena_verified (El hattami et al. 2025, openreview 94tlGxmqkN) has all 812 again:
what counts is the answer, a JSON object, and the requests that the browser sent; no judge is asked. Tasks,
logins and checks are those of the packages. None of this has met the real sites: tests/test_webarena.py runs
it on small servers in their place.

What the packages say of resets: with WA_FULL_RESET all sites are set back once, when the world is entered; a
task gets a new browser and new logins, and no more. What a task did is there for the next. So one page at a
time, in the order of `tasks`, which is that of the ids.

Where we differ from the packages, and why, beside what worlds/gym.py says
- A check that raises has not verified anything. BrowserGym takes an AssertionError (a judge that says neither
  correct nor incorrect, an answer of the shop that is no 200) for a failure of the agent.
- BrowserGym ends a task where the browser is at an address beside the sites, as it is when a site does not
  answer. That is the agent's failure only while all sites answer.
- Where the answer counts, nothing is checked before there is one. BrowserGym asks the judge at every step,
  about the answer "whatever".
- BrowserGym's package of WebArena Verified needs a harness that is not public. So the page is that of
  BrowserGym's WebArena and the check that of the package webarena-verified; the goal says what an answer is.
- Tiles and routes that a map has from other hosts or ports stay out, until `hosts` names these.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from config import UserError
from data import Action, Obs, Start
from worlds import live
from worlds.chromium import Task, Unverified
from worlds.gym import BrowserGymPages

SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE")
LISTS = {  # how its tasks are called, the package that has their list, the list, the field with the id
    "webarena": ("webarena", "libwebarena", "webarena/test.raw.json", "task_id"),
    "webarena_lite": ("webarenalite", "browsergym-webarenalite",
                      "browsergym/webarenalite/test_webarena_lite.raw.json", "old_task_id"),
    "webarena_verified": ("webarena_verified", "webarena-verified",
                          "webarena_verified/assets/dataset/webarena-verified.json", "task_id"),
}
# What webarena-verified's documentation says of an agent's response ("Usage").
ANSWER = """

Answer with stop and a JSON object, such as {"task_type": "RETRIEVE", "status": "SUCCESS", \
"retrieved_data": ["..."], "error_details": null}. task_type: RETRIEVE if data is asked for, MUTATE if \
something is to be changed, NAVIGATE if a page is to be shown. retrieved_data: a list with RETRIEVE, else \
null. If it cannot be done, error_details says why, and status is ACTION_NOT_ALLOWED_ERROR, \
PERMISSION_DENIED_ERROR, NOT_FOUND_ERROR, DATA_VALIDATION_ERROR or UNKNOWN_ERROR."""


class WebArena(BrowserGymPages):
    """One of LISTS. A start's task is called as in BrowserGym: "webarena.0", "webarenalite.4" (the id that it
    has among the 812), "webarena_verified.0"; its seed changes nothing. hosts: more than the sites' own.
    env_kwargs: for BrowserGym's BrowserEnv. Raises ValueError where the list's package is not installed."""

    at_once = 1  # pages side by side: the sites, and who is logged in there, are the same for all

    def __init__(self, name: str, hosts: tuple[str, ...] = (), **env_kwargs):
        super().__init__(hosts, **{"pre_observation_delay": 0.5, **env_kwargs})  # s; BrowserGym's own
        self.name, (prefix, package, file, key) = name, LISTS[name]
        try:
            rows = json.loads(Path(metadata.distribution(package).locate_file(file)).read_text())
        except metadata.PackageNotFoundError:
            self.check()
            raise
        self._rows = {f"{prefix}.{row[key]}": row for row in sorted(rows, key=lambda row: row[key])}
        self._known = {name: Task("+".join(sorted(row["sites"])), "", row["intent"])
                       for name, row in self._rows.items()}

    def check(self) -> None:
        """Raises one ValueError that names all that is missing, and how to get it."""
        missing = []
        for package in sorted({"browsergym-webarena", "libwebarena", LISTS[self.name][1]}):
            try:
                metadata.distribution(package)
            except metadata.PackageNotFoundError:
                missing.append(f"the package {package}: run `make venv-webarena`, then this with "
                               ".venv-webarena/bin/python")
        if importlib.util.find_spec("nltk"):
            import nltk
            try:  # without it, the packages would fetch it while they are imported
                nltk.data.find("tokenizers/punkt_tab")
            except LookupError:
                missing.append("nltk's data: run `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to "
                               "the folder that has tokenizers/punkt_tab")
        for site in SITES:
            url = os.environ.get(f"WA_{site}", "")
            if url != "todo" and not urlsplit(url).hostname:
                missing.append(f"WA_{site}: the URL of that site, or `todo` where it is not set up"
                               + f"; it is {url!r}" * bool(url))
        judge = os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL")
        if self.name != "webarena_verified" and not judge:
            missing.append("OPENAI_API_KEY, or OPENAI_BASE_URL: of the judge of some answers, whom the "
                           "packages call gpt-4-1106-preview")
        if missing:
            raise UserError(f"{self.name} lacks\n- " + "\n- ".join(missing))

    def __enter__(self):
        self.check()
        # Tasks append paths to these, and compare what comes out with addresses: no slash at the end.
        urls = {site: os.environ[f"WA_{site}"].rstrip("/") for site in SITES}
        os.environ |= {f"WA_{site}": url for site, url in urls.items()}
        if os.environ.get("OPENAI_BASE_URL"):
            os.environ.setdefault("OPENAI_API_KEY", "none")  # its client insists on one
        set_up = {site: url for site, url in urls.items() if url != "todo"}
        # With their ports: the same machine may serve what sets the sites back, or a model.
        self.hosts = tuple({*self.hosts, *(place for url in set_up.values() for place in live.ports(url))})
        from browsergym.webarena.instance import WebArenaInstance
        self._sites = WebArenaInstance()
        try:
            self._sites.full_reset() if os.environ.get("WA_FULL_RESET") else self._sites.check_status()
        except Exception as error:  # full_reset raises nothing more special
            raise UserError(f"WebArena's sites are not ready ({error}): WA_... must be URLs that answer, "
                             "and WA_FULL_RESET, where it is set, the server that sets them back") from error
        if self.name == "webarena_verified":
            from webarena_verified.api import WebArenaVerified
            from webarena_verified.types.config import WebArenaVerifiedConfig
            self._judge = WebArenaVerified(config=WebArenaVerifiedConfig(
                environments={f"__{site}__": {"urls": [url]} for site, url in set_up.items()}))
        self._folder = tempfile.TemporaryDirectory()
        return super().__enter__()

    def __exit__(self, *_):
        super().__exit__()
        self._folder.cleanup()

    def reset(self, starts: list[Start]) -> list[Obs]:
        """As browser.Browser.reset, for one start. Raises ValueError for more, and for an unknown task."""
        for start in starts:
            if start.task not in self._known:
                raise UserError(f"no task {start.task!r} in {self.name}; there are {len(self._known)}, such "
                                 f"as {next(iter(self._known))}")
        if len(starts) > self.at_once:
            raise UserError(f"{len(starts)} pages side by side in {self.name}, whose sites are the same for "
                             "all: play one page at a time, in the order of `tasks`")
        return super().reset(starts)

    # -- a task --

    def _make(self, n: int, task: str):
        if self.name != "webarena_verified":
            return super()._make(n, f"browsergym/{task}")
        from browsergym.core.env import BrowserEnv
        record = {"record_har_path": self._requests, "record_har_content": "embed"}
        return BrowserEnv(self._verified, {"task": task}, action_mapping=self._code,
                          pw_context_kwargs=record, **self.env_kwargs)

    @property
    def _requests(self) -> Path:
        return Path(self._folder.name, "requests.har")

    def _verified(self, seed: int, task: str):
        """A task of BrowserGym's WebArena that has the goal and the sites of one of WebArena Verified."""
        from browsergym.webarena.task import GenericWebArenaTask
        row = self._rows[task]
        made, urls = GenericWebArenaTask(seed, task_id=row["task_id"]), " |AND| ".join(row["start_urls"])
        for site, url in made.webarena_instance.urls.items():
            urls = urls.replace(f"__{site.upper()}__", url)
        made.task_configs = [{"sites": row["sites"], "start_url": urls, "geolocation": None,
                              "intent": row["intent"] + ANSWER, "eval": {"eval_types": []}}]
        return made

    def _begin(self, n: int, start: Start) -> None:
        super()._begin(n, start)
        self._requests.unlink(missing_ok=True)  # a browser writes them when it is closed: the last task's
        if self._envs[n]:
            task = self._envs[n].unwrapped.task
            task.evaluator = self._checked(task.evaluator, task.config["eval"]["eval_types"])

    def _checked(self, evaluator: Callable, kinds: list[str]) -> Callable:
        """The package's own evaluator, asked only when it can tell. It raises Unverified and nothing else."""
        from webarena.browser_env.actions import ActionTypes

        def check(trajectory, **others):
            unanswered = trajectory[-1]["action_type"] == ActionTypes.NONE
            if not kinds or "string_match" in kinds and unanswered:  # not kinds: webarena_verified's
                return 0.0
            try:
                return evaluator(trajectory=trajectory, **others)
            except Exception as error:  # theirs, and those of all that they call
                raise Unverified(f"{type(error).__name__}: {error}") from error
        return check

    def _pays(self, n: int, action: Action, reward: float, info: dict) -> float:
        if "error" in info:  # the browser is at an address beside the sites
            try:
                self._sites.check_status()
            except RuntimeError as error:
                raise Unverified(str(error)) from error
        elif self.name == "webarena_verified" and action.name == "stop":
            return self._verdict(n, action.text)
        return super()._pays(n, action, reward, info)

    def _verdict(self, n: int, answer: str) -> float:
        from webarena_verified.types.agent_response import FinalAgentResponse
        self._close(n)  # now the requests are written
        try:
            requests = json.loads(self._requests.read_text())["log"]["entries"]
        except FileNotFoundError as error:
            raise Unverified("the browser crashed before its requests were written") from error
        found = self._judge.evaluate_task(task_id=self._rows[self._playing[n]]["task_id"],
                                          agent_response=answer, network_trace=requests)
        if found.status == "error":
            try:
                FinalAgentResponse.model_validate_json(answer)
            except ValueError:
                return 0.0  # an answer that is no answer is the agent's own
            reasons = [found.error_msg, *(result.error_msg for result in found.evaluators_results)]
            raise Unverified(f"webarena-verified: {next(filter(None, reasons), 'no reason given')}")
        return float(found.score == 1)
