"""WebArena: six sites that one sets up (https://github.com/web-arena-x/webarena), and two lists of tasks.

    .venv/bin/pip install --no-deps -r requirements-webarena.txt; python -m nltk.downloader punkt_tab
    export WA_SHOPPING=http://... WA_SHOPPING_ADMIN=... WA_REDDIT=... WA_GITLAB=... WA_WIKIPEDIA=...
    export WA_MAP=... WA_HOMEPAGE=...   `todo` for a site that is not set up
    export OPENAI_API_KEY=...   or OPENAI_BASE_URL: the judge of some answers
    export WA_FULL_RESET=...    optional: the URL that sets all sites back, before the first task

webarena (Zhou et al. 2023, arXiv:2307.13854) has 812 tasks, webarena_lite 165 of them, mended (Liu et al.
2024, arXiv:2408.06327). Tasks, logins and checks are the packages'. What a task did is there for the next: a
process plays one page at a time, by their ids; ranks play side by side, and see what the others did. None of
this has met the real sites. Where we differ from the packages
- A check that raises has verified nothing: Failed. BrowserGym takes an AssertionError (a judge that says
  neither correct nor incorrect, an answer of the shop that is no 200) for a failure of the agent.
- An address beside the sites ends a task with 0 only while all sites answer. An answer is checked when there
  is one; BrowserGym asks the judge at every step, about "whatever".
"""

import importlib
import os

from config import Benchmark, UserError
from envs.browsergym import Browser, Failed, Page
from envs.webvoyager import HOST


def tasks(on: Benchmark) -> list[str]:
    try:
        assert {"OPENAI_API_KEY", "OPENAI_BASE_URL"} & {*os.environ}, (
            "OPENAI_API_KEY or OPENAI_BASE_URL is missing: the judge of some answers")
        os.environ.setdefault("OPENAI_API_KEY", "none")  # its client insists on one
        os.environ |= {name: url.rstrip("/") for name, url in os.environ.items() if name.startswith("WA_")}
        from browsergym.webarena.instance import WebArenaInstance
        numbers = importlib.import_module(f"browsergym.{on.benchmark.replace('_', '')}").config.TASK_IDS
        sites = WebArenaInstance()
        sites.full_reset() if os.environ.get("WA_FULL_RESET") else sites.check_status()
    except Exception as error:  # the packages raise nothing more special
        raise UserError(f"{on.benchmark} is not ready: {error} (see the top of envs/webarena.py)") from error
    return [f"{on.benchmark}.{number}" for number in numbers]


class Checked(Page):
    """Before one of BrowserGym's WebArena tasks."""

    def setup(self, page):
        found = super().setup(page)
        theirs = self.evaluator

        def evaluator(**given):
            try:
                return theirs(**given)
            except AssertionError as error:
                raise Failed(f"not verified: {error}") from error

        self.evaluator = evaluator
        return found

    def validate(self, page, chat_messages):
        if "string_match" in self.config["eval"]["eval_types"] and not chat_messages:
            return 0, False  # there is no answer yet
        found = super().validate(page, chat_messages)
        if "error" in found[3]:
            self.webarena_instance.check_status()  # raises where a site is away
        return found


def browser(on: Benchmark) -> Browser:
    from browsergym.webarena.task import GenericWebArenaTask as Task
    if on.benchmark == "webarena_lite":
        from browsergym.webarenalite.task import WebArenaLiteTask as Task
    kind = type("Task", (Checked, Task), {})
    make = lambda start: kind(start.seed, task_id=int(start.task.rpartition(".")[2]))
    urls = [url for name, url in os.environ.items() if name.startswith("WA_") and name != "WA_FULL_RESET"]
    return Browser(make, (*(found[1] for url in urls if (found := HOST.fullmatch(url))), *on.hosts))
