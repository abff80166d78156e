"""WebArena-Infinity: thirteen web applications, 1,620 tasks, no network.

    git clone https://github.com/web-arena-x/webarena-infinity        (MIT; 1ca77813 of 2026-03-23 was tried)
    python evaluate.py --benchmark infinity --sites webarena-infinity/apps --checkpoint AGENT --out FILE

An application is a folder: index.html with its scripts, real-tasks.json, a Python verifier a task. The page
sends the application's state with `PUT /api/state`, and a verifier reads it. As by the authors, it is
verified however the agent ends: with stop, whatever it answers, or with its 50th action. Where we differ from
them
- A text that is no action ends a try with reward 0. There are no addresses and no way back: a document's time
  would begin again, which stands still from 2026-03-20 on. Math.random begins alike, nothing is animated.
- A verifier that raises, hangs, or does not answer (bool, str) has verified nothing: Failed, and not the
  agent. It is code of the clone, and runs as such. No page gets an answer key.
"""

import json
import subprocess
import sys
from pathlib import Path

from browsergym.core.task import AbstractBrowserTask

from config import Benchmark, UserError
from envs import KINDS
from envs.browsergym import Browser, Failed, Page, below

SERVED = ("index.html", "css", "js", "assets")
SCRIPT = """let random = 1;
Math.random = () => (random = random * 16807 % 2147483647) / 2147483647;
document.addEventListener('DOMContentLoaded', () => document.head.insertAdjacentHTML('beforeend',
  '<style>*, ::before, ::after {transition: none !important; animation: none !important}</style>'));"""
VERIFY = """import json, sys, types
path, state = json.load(sys.stdin)
answer, sys.stdout = sys.stdout, sys.stderr  # what it prints is no answer
reply = types.SimpleNamespace(status_code=200 if state else 404, ok=bool(state), text=state,
                              json=lambda: json.loads(state), raise_for_status=lambda: state or 1 / 0)
sys.modules['requests'] = types.SimpleNamespace(get=lambda url, **_: reply, RequestException=OSError)
exec(open(path).read(), space := {'__name__': 'verifier'})
success, says = space['verify']('http://application')
print(json.dumps(success), file=answer)"""


def verified(verifier: Path, state: str, seconds: float) -> bool:
    """What a verifier says of a state (JSON; '': the page never sent one). Raises Failed, TimeoutExpired."""
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", VERIFY], text=True, capture_output=True,
                         input=json.dumps([str(verifier), state]), timeout=seconds, env={}, cwd="/")
    if ran.stdout not in ("true\n", "false\n"):
        raise Failed(f"not verified by {verifier}: {ran.stdout} {' '.join(ran.stderr[-200:].split())}")
    return ran.stdout == "true\n"


class Application(Page, AbstractBrowserTask):
    clock, settle, tabs, controls = "2026-03-20T17:00:00Z", 0.1, False, True

    def __init__(self, row: dict, seconds: float):
        super().__init__(0)
        self.row, self.seconds, self.state, self.steps = row, seconds, "", 0

    def setup(self, page):
        page.context.add_init_script(SCRIPT)
        page.goto(f"{self.row['url']}/")
        return self.row["instruction"], {}

    def serve(self, request) -> dict | None:
        host, _, path = request.url.partition(f"{self.row['url']}/")
        path = path.split("?")[0].split("#")[0] or "index.html"
        if host:
            return None
        if path == "api/state" and request.method == "PUT":
            self.state = request.post_data
        if path.startswith("api/"):  # a stream of events that answers 204 ends
            return {"body": self.state} if path == "api/state" and self.state else {"status": 204}
        file = path.split("/")[0] in SERVED and below(self.row["root"], path)
        return {"path": file} if file else {"status": 404}

    def validate(self, page, chat_messages):
        self.steps += 1
        over = bool(chat_messages) or self.steps == KINDS["infinity"][2]
        return over and verified(self.row["root"] / self.row["verify"], self.state, self.seconds), over


def tasks(on: Benchmark) -> dict[str, dict]:
    """{"gmail/task_e1": row of real-tasks.json} of all applications in a folder."""
    found = {f"{file.parent.name}/{row['id']}": row | {
        "root": file.parent.resolve(), "url": f"http://{file.parent.name.lower()}.infinity"}
        for file in sorted(Path(on.sites or "nowhere").glob("*/real-tasks.json"))
        for row in json.loads(file.read_text())}
    if not found:
        raise UserError(f"no APP/real-tasks.json in {on.sites!r}: --sites is the folder of the applications")
    return found


def browser(on: Benchmark) -> Browser:
    known = tasks(on)
    return Browser(lambda start: Application(known[start.task], on.step_seconds / 2 or 15.0))
