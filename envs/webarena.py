"""WebArena: six sites that one sets up (https://github.com/web-arena-x/webarena), and three lists of tasks.

    .venv/bin/pip install -r requirements-webarena.txt --no-deps
    export WA_SHOPPING=http://... WA_SHOPPING_ADMIN=... WA_REDDIT=... WA_GITLAB=... WA_WIKIPEDIA=... WA_MAP=...
    export WA_HOMEPAGE=...         `todo` where a site is not set up
    export OPENAI_API_KEY=...      or OPENAI_BASE_URL: the judge of some answers
    export WA_FULL_RESET=http://...    optional: sets all sites back, once, before the first task

webarena (Zhou et al. 2023, arXiv:2307.13854) has 812 tasks, webarena_lite 165 of them, mended (Liu et al. 2024,
arXiv:2408.06327), webarena_verified all 812 (El hattami et al. 2025): there the answer, a JSON object, and the
browser's requests count, and no judge is asked. Tasks, logins and checks are those of the packages. What a
task did is there for the next: one page at a time, in the order of the ids. None of this has met the real sites.

Where we differ from the packages, and why
- A check that raises has verified nothing: Failed. BrowserGym takes an AssertionError (a judge that says
  neither correct nor incorrect, an answer of the shop that is no 200) for a failure of the agent.
- At an address beside the sites a task ends, with 0 only while all sites answer: else they have Failed.
- An answer is checked when there is one. BrowserGym asks the judge at every step, about "whatever".
- BrowserGym's WebArena Verified needs a harness that is not public: its tasks are played as WebArena's.
"""

import json
import os
import tempfile
from importlib import metadata
from pathlib import Path

from config import Benchmark, UserError
from data import Start
from envs.browsergym import Browser, Failed, Page
from envs.webvoyager import HOST

SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE")
LISTS = {  # the package that has the list, the list, the field with the id
    "webarena": ("libwebarena", "webarena/test.raw.json", "task_id"),
    "webarena_lite": ("browsergym-webarenalite", "browsergym/webarenalite/test_webarena_lite.raw.json",
                      "old_task_id"),
    "webarena_verified": ("webarena-verified", "webarena_verified/assets/dataset/webarena-verified.json",
                          "task_id")}
ANSWER = """

Answer with stop and a JSON object, such as {"task_type": "RETRIEVE", "status": "SUCCESS", \
"retrieved_data": ["..."], "error_details": null}. task_type: RETRIEVE if data is asked for, MUTATE if \
something is to be changed, NAVIGATE if a page is to be shown. retrieved_data: a list with RETRIEVE, else \
null. If it cannot be done, error_details says why, and status is ACTION_NOT_ALLOWED_ERROR, \
PERMISSION_DENIED_ERROR, NOT_FOUND_ERROR, DATA_VALIDATION_ERROR or UNKNOWN_ERROR."""


def rows(on: Benchmark) -> dict[str, dict]:
    package, file, key = LISTS[on.benchmark]
    try:
        listed = json.loads(Path(metadata.distribution(package).locate_file(file)).read_text())
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{on.benchmark} lacks the package {package}: pip install -r requirements-webarena.txt "
                        "--no-deps") from error
    return {f"{on.benchmark}.{row[key]}": row for row in sorted(listed, key=lambda row: row[key])}


def tasks(on: Benchmark) -> list[str]:
    """Raises UserError where a site is not there; sets all sites back where WA_FULL_RESET says how."""
    found, urls = list(rows(on)), {site: os.environ.get(f"WA_{site}", "") for site in SITES}
    missing = [f"WA_{site}" for site, url in urls.items() if url != "todo" and not HOST.fullmatch(url)]
    if on.benchmark != "webarena_verified" and not {"OPENAI_API_KEY", "OPENAI_BASE_URL"} & os.environ.keys():
        missing.append("OPENAI_API_KEY or OPENAI_BASE_URL")
    if missing:
        raise UserError(f"{on.benchmark} lacks {', '.join(missing)}: see the top of envs/webarena.py")
    os.environ |= {f"WA_{site}": url.rstrip("/") for site, url in urls.items()}  # tasks append paths
    os.environ.setdefault("OPENAI_API_KEY", "none")  # its client insists on one
    try:
        from browsergym.webarena.instance import WebArenaInstance
        sites = WebArenaInstance()
        sites.full_reset() if os.environ.get("WA_FULL_RESET") else sites.check_status()
    except Exception as error:  # the packages raise nothing more special; nltk lacks its punkt_tab
        raise UserError(f"WebArena's sites are not ready: {error}") from error
    return found


class Checked(Page):
    """Before one of BrowserGym's WebArena tasks."""

    def setup(self, page):
        goal, info = super().setup(page)
        theirs, kinds = self.evaluator, self.config["eval"]["eval_types"]

        def evaluator(trajectory, **more):
            if not kinds or "string_match" in kinds and trajectory[-1]["answer"] == "whatever":
                return 0.0
            try:
                return theirs(trajectory=trajectory, **more)
            except Exception as error:
                raise Failed(f"not verified: {type(error).__name__}: {error}") from error

        self.evaluator = evaluator
        return goal, info

    def validate(self, page, chat_messages):
        found = super().validate(page, chat_messages)
        if "error" in found[3]:
            self.webarena_instance.check_status()  # raises where a site is away
        return found


class Verified(Checked):
    """WebArena Verified: a task of WebArena with the goal and the sites of one of its own."""

    def __init__(self, row: dict, requests: Path):
        super().__init__(0, task_id=row["task_id"])
        self.row, self.context = row, {"record_har_path": requests, "record_har_content": "embed"}
        urls = " |AND| ".join(row["start_urls"])
        for site, url in self.webarena_instance.urls.items():
            urls = urls.replace(f"__{site.upper()}__", url)
        self.task_configs = [{"sites": row["sites"], "start_url": urls, "geolocation": None,
                              "intent": row["intent"] + ANSWER, "eval": {"eval_types": []}}]

    def validate(self, page, chat_messages):
        found = super().validate(page, chat_messages)
        if not chat_messages:
            return found
        from webarena_verified.api import WebArenaVerified
        from webarena_verified.types.agent_response import FinalAgentResponse
        from webarena_verified.types.config import WebArenaVerifiedConfig
        page.context.close()  # writes the requests
        sites = {f"__{site.upper()}__": {"urls": [url]} for site, url in self.webarena_instance.urls.items()
                 if url != "todo"}
        said = WebArenaVerified(config=WebArenaVerifiedConfig(environments=sites)).evaluate_task(
            task_id=self.row["task_id"], agent_response=chat_messages[-1]["message"],
            network_trace=json.loads(self.context["record_har_path"].read_text())["log"]["entries"])
        if said.status == "error":
            try:
                FinalAgentResponse.model_validate_json(chat_messages[-1]["message"])
            except ValueError:
                return 0, True, "", {}  # an answer that is no answer is the agent's own
            raise Failed(f"not verified: {said.error_msg}")
        return said.score, True, "", {}


def browser(on: Benchmark) -> Browser:
    from browsergym.webarena.task import GenericWebArenaTask
    known, requests = rows(on), Path(tempfile.mkdtemp(), "requests.har")
    kind = GenericWebArenaTask
    if on.benchmark == "webarena_lite":
        from browsergym.webarenalite.task import WebArenaLiteTask as kind

    def make(start: Start):
        row = known[start.task]
        if on.benchmark == "webarena_verified":
            return type("Task", (Verified, kind), {})(row, requests)
        return type("Task", (Checked, kind), {})(start.seed, task_id=row[LISTS[on.benchmark][2]])

    hosts = [found[1] for site in SITES if (found := HOST.fullmatch(os.environ[f"WA_{site}"]))]
    return Browser(make, (*hosts, *on.hosts))
