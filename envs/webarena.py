"""WebArena: six sites that one sets up (https://github.com/web-arena-x/webarena), and three lists of tasks.

    .venv/bin/pip install --no-deps -r requirements-webarena.txt; python -m nltk.downloader punkt_tab
    export WA_SHOPPING=http://... WA_SHOPPING_ADMIN=... WA_REDDIT=... WA_GITLAB=... WA_WIKIPEDIA=...
    export WA_MAP=... WA_HOMEPAGE=...   `todo` for a site that is not set up
    export OPENAI_API_KEY=...   or OPENAI_BASE_URL: the judge of some answers
    export WA_FULL_RESET=...    optional: the URL that sets all sites back, before the first task

webarena (Zhou et al. 2023, arXiv:2307.13854) has 812 tasks, webarena_lite 165 of them, mended (Liu et al.
2024, arXiv:2408.06327), webarena_verified all 812 (El hattami et al. 2025): there an answer in JSON and the
browser's requests count, and no judge is asked. Tasks, logins and checks are the packages'. What a task did
is there for the next: one page at a time, by their ids. None of this has met the real sites. Where we differ
from the packages
- A check that raises has verified nothing: Failed. BrowserGym takes an AssertionError (a judge that says
  neither correct nor incorrect, an answer of the shop that is no 200) for a failure of the agent.
- An address beside the sites ends a task with 0 only while all sites answer. An answer is checked when there
  is one; BrowserGym asks the judge at every step, about "whatever".
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

LISTS = {  # the package that has the list, the list, the field with the id
    "webarena": ("libwebarena", "webarena/test.raw.json", "task_id"),
    "webarena_lite": ("browsergym-webarenalite", "browsergym/webarenalite/test_webarena_lite.raw.json",
                      "old_task_id"),
    "webarena_verified": ("webarena-verified", "webarena_verified/assets/dataset/webarena-verified.json",
                          "task_id")}
ANSWER = """

Answer with stop and a JSON object, such as {"task_type": "RETRIEVE", "status": "SUCCESS", "retrieved_data": \
["..."], "error_details": null}. task_type: RETRIEVE if data is asked for, MUTATE if something is to be \
changed, NAVIGATE if a page is to be shown. retrieved_data: a list with RETRIEVE, else null. If it cannot be \
done, error_details says why, and status is ACTION_NOT_ALLOWED_ERROR, PERMISSION_DENIED_ERROR, \
NOT_FOUND_ERROR, DATA_VALIDATION_ERROR or UNKNOWN_ERROR."""


def rows(on: Benchmark) -> dict[str, dict]:
    package, file, key = LISTS[on.benchmark]
    listed = json.loads(Path(str(metadata.distribution(package).locate_file(file))).read_text())
    return {f"{on.benchmark}.{row[key]}": row for row in sorted(listed, key=lambda row: row[key])}


def tasks(on: Benchmark) -> list[str]:
    try:
        found = list(rows(on))
        assert on.benchmark == "webarena_verified" or {"OPENAI_API_KEY", "OPENAI_BASE_URL"} & {*os.environ}, (
            "OPENAI_API_KEY or OPENAI_BASE_URL is missing: the judge of some answers")
        os.environ.setdefault("OPENAI_API_KEY", "none")  # its client insists on one
        os.environ |= {name: url.rstrip("/") for name, url in os.environ.items() if name.startswith("WA_")}
        from browsergym.webarena.instance import WebArenaInstance
        sites = WebArenaInstance()
        sites.full_reset() if os.environ.get("WA_FULL_RESET") else sites.check_status()
    except Exception as error:  # the packages raise nothing more special
        raise UserError(f"{on.benchmark} is not ready: {error} (see the top of envs/webarena.py)") from error
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
    """A task of WebArena with the goal, the sites and the check of one of WebArena Verified."""

    def __init__(self, row: dict, requests: Path):
        super().__init__(0, task_id=row["task_id"])
        self.id, self.context = row["task_id"], {"record_har_path": requests, "record_har_content": "embed"}
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
        answer = chat_messages[-1]["message"]
        try:
            FinalAgentResponse.model_validate_json(answer)
        except ValueError:
            return 0, True  # an answer that is no answer is the agent's own
        page.context.close()  # writes the requests
        sites = {f"__{site.upper()}__": {"urls": [url]} for site, url in self.webarena_instance.urls.items()
                 if url != "todo"}
        said = WebArenaVerified(config=WebArenaVerifiedConfig(environments=sites)).evaluate_task(
            task_id=self.id, agent_response=answer,
            network_trace=json.loads(self.context["record_har_path"].read_text())["log"]["entries"])
        if said.status == "error":
            raise Failed(f"not verified: {said.error_msg}")
        return said.score, True


def browser(on: Benchmark) -> Browser:
    from browsergym.webarena.task import GenericWebArenaTask as Task
    known, requests = rows(on), Path(tempfile.mkdtemp(), "requests.har")
    if on.benchmark == "webarena_lite":
        from browsergym.webarenalite.task import WebArenaLiteTask as Task

    def make(start: Start):
        row = known[start.task]
        if on.benchmark == "webarena_verified":
            return type("Task", (Verified, Task), {})(row, requests)
        return type("Task", (Checked, Task), {})(start.seed, task_id=row[LISTS[on.benchmark][2]])

    urls = [url for name, url in os.environ.items() if name.startswith("WA_") and name != "WA_FULL_RESET"]
    return Browser(make, (*(found[1] for url in urls if (found := HOST.fullmatch(url))), *on.hosts))
