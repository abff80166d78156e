"""Claims about worlds/infinity.py and worlds/verify.py, in a real Chromium and in real processes.

Three sets of applications: sites/notes, ours in the shape of WebArena-Infinity's; sites/hostile, a page that
tries everything; and four real ones where they are there (REAL).
"""
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import servers
from helpers.pages import act, bid, check_protocol
from helpers.processes import wait_for

import a11y
from data import parse_action, start
from worlds import verify
from worlds.infinity import Infinity

HERE = Path(__file__).parent
REAL = Path(os.environ.get("DYNAWEB_SITES") or HERE.parent.parent / "shared" / "sites") / "infinity"
real = pytest.mark.skipif(not (REAL / "solutions.json").exists(), reason=(
    f"{REAL} has no solutions.json with applications in sites/ beside it; set DYNAWEB_SITES to the folder of "
    "such an infinity/ (applications: apps/ of https://github.com/web-arena-x/webarena-infinity)"))
CONTROL = "[{}] generic, clickable, visible"


def starts(*tasks):
    return list(map(start, tasks))


def above(page: str, text: str) -> str:
    """The id of the line that the text `text` is in, its last one."""
    return re.findall(r"\[(\w+)\][^[]*StaticText '[^']*" + re.escape(text), page)[-1]


@pytest.fixture(scope="module")
def reached():
    """What arrives at the other host: (its address, the list of what came by TCP, a socket of its UDP)."""
    with servers.site() as other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.bind(("127.0.0.1", other.port))
        packets.setblocking(False)
        yield f"127.0.0.1:{other.port}", other.asked, packets


@pytest.fixture(scope="module")
def sites(reached, tmp_path_factory):
    """The two applications in a folder; hostile has a verifier for each of VERIFIERS, and a key to find."""
    folder = tmp_path_factory.mktemp("sites") / "apps"
    shutil.copytree(HERE / "sites", folder)
    hostile, rows = folder / "hostile", []
    script = hostile / "js" / "reach.js"
    script.write_text(script.read_text().replace("OTHER", reached[0]))
    for name in ("server.py", "sanity_check_real.py", "results/x.json", ".git/config", "README.md"):
        (hostile / name).parent.mkdir(exist_ok=True)
        (hostile / name).write_text("the key")
    (hostile / "js" / "secret").symlink_to("/etc/passwd")
    (hostile / "real-tasks").mkdir()
    for name, (source, _) in VERIFIERS.items():
        (hostile / "real-tasks" / f"{name}.py").write_text(source)
        rows.append(dict(id=name, difficulty="hard", instruction=name, verify=f"real-tasks/{name}.py"))
    (hostile / "real-tasks.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def web(sites):
    with Infinity(sites, timeout=20) as web:
        yield web

# ---- an application ----------------------------------------------------------------------------------------

def test_a_task_is_played_and_its_verifier_pays_for_the_state(web):
    """Guards: a reward for what the agent says, a state that does not arrive, a search read too early (200
    ms)."""
    first = web.reset(starts("notes/task_e1", "notes/task_e1", "notes/task_m1", "notes/task_h1"))
    assert first[0].goal == "Star the note on the holiday."
    assert web.tasks()["notes/task_h1"].difficulty == "hard"
    page = first[0].page
    star, box = above(page, "Holiday"), bid(page, "Search")
    title = bid(page, "Title")
    obs = act(web, f"click [{star}]", f"click [{above(page, 'Shopping')}]", f"type [{box}] [May] [0]",
              f"click [{bid(page, 'Settings')}]")[0]
    assert "★ Holiday" in obs[0].page and "Shopping" not in obs[2].page and "Taxes" in obs[2].page
    obs = act(web, None, None, f"click [{above(obs[2].page, 'Taxes')}]", f"click [{above(page, 'Dark')}]")[0]
    act(web, None, None, None, f"type [{title}] [Call Bob] [0]")
    act(web, None, None, None, f"click [{bid(page, 'Add')}]")
    _, rewards, terminated, truncated = act(web, "stop []", "stop [done]", "stop [no idea]", "stop [done]")
    assert (rewards, terminated, truncated) == ([1.0, 0.0, 1.0, 1.0], [True] * 4, [False] * 4)
    assert web.failures == [""] * 4


def test_it_keeps_the_promises_of_a_world(web):
    """Guards against a world of which policy.rollout has to know more than reset and step."""
    check_protocol(web, starts("notes/task_e1", "notes/task_m1", "hostile/right"), "scroll [down]")


def test_what_has_no_role_and_can_be_clicked_has_a_line(web, monkeypatch):
    """Guards: controls that the agent cannot see: 30 % of WebArena-Infinity's. An option: other worlds lack
    it."""
    page = web.reset(starts("notes/task_e1"))[0].page
    star = above(page, "Holiday")
    assert CONTROL.format(star) in page
    assert "★ Holiday" in act(web, f"click [{star}]")[0][0].page
    # One that shows a hand only later: the tip, when all is dark.
    act(web, f"click [{bid(page, 'Settings')}]")
    dark = act(web, f"click [{above(page, 'Dark')}]")[0][0].page
    line = r"\] generic, clickable, visible\n\s*StaticText 'Tip"
    assert re.search(line, dark) and not re.search(line, page)
    monkeypatch.setattr(web, "controls", False)
    assert "generic" not in act(web, "scroll [up]")[0][0].page


def test_the_first_page_is_the_same_bytes_whatever_ran_before(web):
    """Guards: today's date, another Math.random, a state that the last trajectory left in localStorage."""
    first = [obs.page for obs in web.reset(starts("notes/task_e1", "notes/task_e1"))]
    assert first[0] == first[1] and "Fri Mar 20 2026 17:00:00 GMT+0000" in first[0]
    assert "Tip 266429" in first[0]  # mulberry32 from 0, times a million
    act(web, f"click [{above(first[0], 'Holiday')}]", "press [Tab]")
    assert [obs.page for obs in web.reset(starts("notes/task_e1", "notes/task_e1"))] == first


def test_pages_of_one_application_do_not_see_each_other(web):
    """Guards: one context for all pages: state, localStorage, and the clipboard, which contexts do share."""
    page = web.reset(starts("notes/task_e1", "notes/task_e1"))[0].page
    box = bid(page, "Search")
    act(web, f"click [{above(page, 'Holiday')}]", f"type [{box}] [Ro] [0]")
    stored = [web._run(tab.page.evaluate("localStorage.getItem('notes')")) for tab in web._tabs]
    assert [json.loads(state)["notes"][1]["starred"] for state in stored] == [True, False]
    assert [json.loads(tab.own["state"])["notes"][1]["starred"] for tab in web._tabs] == [True, False]
    act(web, f"type [{box}] [secret] [0]", None)
    for key in ("Ctrl+a", "Ctrl+c"):
        act(web, f"press [{key}]", None)
    assert "value='Ro'" in act(web, None, "press [Ctrl+v]")[0][1].page
    act(web, "press [Ctrl+x]", None)
    act(web, "press [Ctrl+v]", None)
    assert "value='secretsecret'" in act(web, "press [Ctrl+v]", None)[0][0].page  # but its own it has
    assert act(web, "stop []", "stop []")[1] == [1.0, 0.0]


def test_back_and_forth_and_to_a_hash_of_the_application(web):
    """Guards: no back button, where the authors' agents have one; a new document, whose clock and ids begin
    again; an application that is left."""
    first = web.reset(starts("notes/task_e1"))[0]
    star, when = above(first.page, "Holiday"), "'Fri Mar 20 2026 17:00:00 GMT+0000"
    act(web, f"click [{star}]")
    places = [("go_back", "", "there is no page to go to"), ("goto [http://notes.infinity/#/a]", "#/a", ""),
              ("goto [#/b]", "#/b", ""), ("go_back", "#/a", ""), ("go_back", "", ""),
              ("go_back", "", "there is no page to go to"), ("go_forward", "#/a", ""),
              ("goto [notes.infinity]", "#", ""), ("new_tab", "#", "there is only this page"),
              ("goto [http://hostile.infinity/]", "#", "only http://notes.infinity/#... can be reached"),
              ("goto [/js/app.js]", "#", "only http"), ("goto [javascript:alert(1)]", "#", "only http"),
              ("goto [:]", "#", "only http")]
    for action, hash, error in places:
        obs, _, _, cut = act(web, action)
        assert obs[0].url == f"http://notes.infinity/{hash}" and cut == [False], action
        assert error in obs[0].error and bool(error) == bool(obs[0].error), action
        assert "★ Holiday" in obs[0].page and when in obs[0].page, "another document"

# ---- what can be wrong with a folder -----------------------------------------------------------------------


# ---- a hostile page ----------------------------------------------------------------------------------------

def trick(web, *names):
    """Plays one trick of the hostile page a page, and looks once more where it still stands."""
    page = web.reset(starts(*["hostile/right"] * len(names)))[0].page
    obs, rewards, ended, cut = act(web, *[f"click [{bid(page, f'button {name!r}')}]" for name in names])
    assert rewards == [0.0] * len(names) and not any(ended)
    again = act(web, *[None if over else "scroll [down]" for over in cut])
    seen = [first if over else second for first, second, over in zip(obs, again[0], cut)]
    return seen, [a or b for a, b in zip(cut, again[3])]


def test_a_page_reaches_its_own_files_and_no_other_host(web, reached):
    """Guards: requests that interception does not see, windows, a trajectory that ends on another site."""
    address, came, packets = reached
    socket.create_connection(address.split(":")).close()  # the listener does hear
    wait_for(lambda: came, 10)
    assert len(came) == 1
    seen, cut = trick(web, "reach", "leave", "blank", "post", "twin")
    assert cut == [False] * 5 and {obs.url for obs in seen} == {"http://hostile.infinity/"}
    act(web, *["scroll [up]"] * 5)
    assert [len(context.pages) for context in web._chromium.contexts] == [1] * 5
    time.sleep(1)
    assert len(came) == 1, f"{len(came) - 1} connections reached the other host"
    with pytest.raises(BlockingIOError):
        packets.recv(100)


def test_a_page_gets_no_verifier_and_no_file_outside_of_its_folder(web):
    """Guards: the key to the tasks, ../.. in all spellings. A name that no file system takes gets an answer
    too."""
    page = trick(web, "peek")[0][0].page
    answers = re.findall(r"(?:\\n)(/\S+) (\d+)", page)
    assert [status for path, status in answers if path != "/js/app.js"] == ["404"] * 17, page
    assert ("/js/app.js", "200") in answers and page.count("refused") == 1  # //etc/passwd is a host


def test_permissions_downloads_and_dialogs_are_refused(web):
    """Guards: a page that waits for an answer for ever, and files on the user's disk."""
    downloads = []
    page = web.reset(starts(*["hostile/right"] * 3))[0].page
    web._tabs[2].page.on("download", lambda download: downloads.append(download))
    act(web, *[f"click [{bid(page, f'button {name!r}')}]" for name in ("may", "dialogs", "save")])
    for _ in range(6):  # the page waits .3 s for each
        obs, _, _, cut = act(web, *["scroll [up]"] * 3)
        assert cut == [False] * 3
    for what in ("place", "notes", "camera", "midi", "disk"):
        assert f"{what}: no" in obs[0].page, what
    assert "confirm false" in obs[1].page and "prompt null" in obs[1].page
    for download in downloads:
        assert "accept_downloads" in web._run(download.failure())  # Playwright's words for a refusal
    assert downloads and web.reset(starts("notes/task_e1"))[0].error == ""  # beforeunload keeps no page open


def test_a_state_that_cannot_be_read_is_refused_and_the_last_one_stays(web):
    """Guards: a request without an answer (the page would hang); an exception that ends the whole run: JSON
    of 100,000 brackets is a RecursionError and no ValueError."""
    answers = {"huge": 413, "broken": 400, "nested": 400, "binary": 400, "good": 200}
    seen, cut = trick(web, *answers)
    assert [re.findall(r"PUT (\d+)", obs.page)[-1] for obs in seen] == [*map(str, answers.values())]
    assert cut == [False] * 5
    states = [json.loads(tab.own["state"]) for tab in web._tabs]
    assert states == [{"first": 1}] * 4 + [{"good": 1}]


def test_a_page_that_does_not_start_has_failed_and_the_others_are_played(sites, tmp_path):
    """Guards: a group lost with the one of them that breaks what reads it, and a reward 0 for its agent. The
    other application has a capital letter, which http://notes.infinity has not."""
    shutil.copytree(sites / "notes", tmp_path / "Notes")
    shutil.copytree(sites / "notes", tmp_path / "dead")
    (tmp_path / "dead" / "js" / "app.js").write_text("dynaweb.step = null;")
    with Infinity(tmp_path, timeout=20) as web:
        first = web.reset(starts("dead/task_e1", "Notes/task_e1"))
        assert "did not start dead/task_e1, seed 0" in first[0].error and first[0].goal == first[1].goal != ""
        _, rewards, over, cut = act(web, "scroll [down]", f"click [{above(first[1].page, 'Holiday')}]")
        assert (rewards, over, cut) == ([0.0, 0.0], [False, False], [True, False])
        assert "did not start" in web.failures[0] and web.failures[1] == ""
        assert act(web, None, "stop [done]")[1] == [0.0, 1.0]


def test_a_page_that_takes_too_much_memory_ends_or_is_refused_alone(web):
    """Guards: a page that takes the machine: 2.4 GB of objects, 3 GB of buffers, a PUT of 500 MB (3.9 GB in
    all)."""
    seen, cut = trick(web, "hoard", "fill", "flood", "good")
    assert cut[0] and cut[2:] == [False, False] and "the page crashed" in seen[0].error
    assert "filled" not in seen[1].page  # it is refused, or crashes where it needs the next byte
    assert "PUT 413" in seen[2].page and "PUT 200" in seen[3].page


def test_a_page_that_hangs_is_cut_off_in_time_and_alone(web, monkeypatch):
    """Guards: a step that waits for a fetch without an end, an endless loop or a thousand dialogs; a core
    that such a page takes from the others until the reset."""
    first = web.reset(starts(*["hostile/right"] * 3, "notes/task_e1"))
    names = ("never", "forever", "alerts")
    clicks = [f"click [{bid(first[0].page, f'button {name!r}')}]" for name in names]
    began = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(web, "timeout", 3)
        obs, rewards, ended, cut = act(web, *clicks, f"click [{above(first[3].page, 'Holiday')}]")
    assert time.time() - began < 3 * 3 * 2  # three that hang, on one core; as long again for closing them
    assert cut == [True] * 3 + [False] and not any(ended) and not any(rewards)
    assert web.failures == [f"{click}: the page hung for 3 s" for click in clicks] + [""]
    assert [tab.page.is_closed() for tab in web._tabs] == [True] * 3 + [False]
    assert act(web, None, None, None, "stop []")[1][3] == 1.0
    assert "Hostile" in web.reset(starts("hostile/right"))[0].page


def test_a_page_that_tampers_with_its_reader_ends_only_itself(web):
    """Guards: a page that pays itself, or makes the reader raise: the run would end, with all other pages."""
    ends = {"mute": "changed what reads it", "odd": "changed what reads it", "gone": "the page crashed",
            "drawn": "cannot be read: ValueError", "steep": "the page crashed", "bye": "the page crashed",
            "crowd": "3.... elements, at most 20000 are read"}
    seen, cut = trick(web, "good", "won", *ends)
    assert cut == [False] * 2 + [True] * 7 and seen[0].error == seen[1].error == ""
    for obs, (name, said) in zip(seen[2:], ends.items()):
        assert re.search(said, obs.error), (name, obs.error)
    assert act(web, "stop []", "stop []", *[None] * 7)[1] == [1.0] * 2 + [0.0] * 7


def test_a_page_writes_no_line_of_its_own(web):
    """Guards: an element that carries another's id, or a whole line, in what the reader marks with."""
    posed, shout = trick(web, "posed", "shout")[0]
    assert "button 'Pay'" in posed.page and "] x" not in posed.page and "\n[8" not in posed.page
    assert 0 < len(shout.error) < 300

# ---- other people's verifiers ------------------------------------------------------------------------------

def verifier(*body: str, above: str = "") -> str:
    """The source of a verifier that does `body`. The state is {"victim": pid, "file": path}."""
    get = "state = requests.get(f'{server_url}/api/state').json()"
    head = [above, "import requests, os, sys", "def verify(server_url):"]
    return "\n".join(head + [f"    {line}" for line in (get, *body)])


def says(*body: str, **more: str) -> str:
    return verifier(*body, "return True, ''", **more)


REFUSED = "PermissionError: .*not permitted"
PIPES = "for n in (3, 4, 5):\n        try: os.write(n, {})\n        except OSError: pass"
NATIVE = "import ctypes; libc = ctypes.CDLL(None); file = state['file'].encode()"
# name: (source, what the failure says; a bool is a verdict)
VERIFIERS = {
    "right": (says(), True),
    "modules": (says("import typing, copy, string, decimal, statistics, difflib, dataclasses, itertools",
                     "import functools, random, urllib.parse, textwrap, unicodedata, fractions, hashlib",
                     "datetime.datetime.strptime('2026-03-20', '%Y-%m-%d')", above="import datetime"), True),
    "wrong": (verifier("print('[true, \"bought\"]', flush=True)", "return False, 'no'"), False),
    "environment": (verifier("return bool(set(os.environ) - {'LC_CTYPE'}), 'none but its own'"), False),
    "hang": ("while True: pass", "no verdict after"),
    "wait": (says("import _thread; lock = _thread.allocate_lock()", "lock.acquire(); lock.acquire()"),
             "no verdict after"),
    "memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "raise": (says("1 / 0"), "ZeroDivisionError: division by zero"),
    "quit": ("raise SystemExit", "SystemExit"),
    "end": ("import os; os._exit(0)", "its process died"),
    "nothing": ("x = 1", "KeyError: 'verify'"),
    "syntax": ("def verify(", "SyntaxError"),
    "recursion": ("def verify(url): return verify(url)", "RecursionError"),
    "number": (verifier("return 1, 'x'"), "gave 1, 'x', and not"),
    "none": (verifier("return True, None"), "gave True, None, and not"),
    "shout": ("raise ValueError('x\\x1b[2J\\n' * 9999)", "ValueError: x"),
    "open": (says("open(state['file']).read()"), REFUSED),
    "write": (says("open(state['file'], 'w')"), REFUSED),
    "remove": (says("os.remove(state['file'])"), REFUSED),
    "fork": (says("os.fork()"), REFUSED),
    "kill": (says("os.kill(state['victim'], 9)"), REFUSED),
    "limits": (says("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))"), "not allowed to raise"),
    "thread": (says("import _thread; _thread.start_new_thread(print, ())"), "can't start new thread"),
    "socket": (says("import socket"), "ModuleNotFoundError"),
    "subprocess": (says("import subprocess"), "ModuleNotFoundError"),
    "sleep": (says("import time; time.sleep(1)"), REFUSED),
    # Its own alarm is not its own: without it, "hang" would go on where nobody is left to end it.
    "alarm": (verifier("import signal; signal.alarm(0)", "while True: pass"), "no verdict"),
    # What audit hooks do not see: native code, and a module that no `import` asked for.
    "native": (verifier(NATIVE, "libc.kill(state['victim'], 9); libc.unlink(file)",
                        "return libc.open(file, 0) >= 0 or libc.fork() >= 0, 'refused'"), False),
    # open, socket, kill, and getpid of another kernel interface (x32), by number
    "syscall": (verifier(NATIVE, "calls = (2, file), (41, 2, 1, 0), (62, state['victim'], 9), (0x40000027,)",
                         "return max(libc.syscall(*call) for call in calls) >= 0, 'refused'"), False),
    "builtin": (says("import types, _imp; make = _imp.create_builtin(types.SimpleNamespace(name='posix'))",
                     "make.unlink(state['file'])"), REFUSED),
    # Its answer is made by Python that it can change. What has another shape than an answer is refused.
    "cleared": (says("sys.modules.clear()"), True),
    "json": (says(above="import json; json.dumps = lambda said: '{\"success\": true}'"), "no verdict"),
    "figures": (says(above="import json; json.dumps = lambda said: '[1, \"x\"]'"), "no verdict"),
    "brackets": (says(above="import json; json.dumps = lambda said: '[' * 60000"), "no verdict"),
    "pipe": (says(PIPES.format(r"b'[1, 2]\n'")), "no verdict"),
    "flood": (says("while True:", "  " + PIPES.format("b'x' * 9999").replace("\n", "\n  ")), "no verdict"),
}


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_says_right_or_wrong_or_has_failed_and_harms_nothing(sites, tmp_path, name):
    """Guards: other people's code that reads, writes, kills or reaches what is not its own, runs for ever,
    eats the memory, or brings the evaluation down with what it answers."""
    expected = VERIFIERS[name][1]
    kept = tmp_path / "kept"
    kept.write_text("mine")
    victim = subprocess.Popen(["sleep", "60"])
    try:
        state = json.dumps({"victim": victim.pid, "file": str(kept)})
        seconds = 1.5 if "no verdict" in str(expected) else 10
        work = verify.verdict(sites / "hostile" / "real-tasks" / f"{name}.py", state, seconds)
        if isinstance(expected, bool):
            assert asyncio.run(work)[0] is expected
        else:
            with pytest.raises(verify.Unverified, match=expected) as failure:
                asyncio.run(work)
            assert str(failure.value).isprintable() and len(str(failure.value)) < 500
        assert victim.poll() is None and kept.read_text() == "mine"
    finally:
        victim.kill()
        victim.wait()
    left = ["pgrep", "-P", str(os.getpid()), "-f", "def confine"]
    assert subprocess.run(left, capture_output=True).stdout == b"", "its process is still there"


def test_a_verifier_that_outlives_us_ends_by_the_kernels_alarm(sites):
    """Guards against processes that spin for ever after an evaluation was killed: nobody else ends them."""
    given = [1, "while True: pass", "hang.py", None]
    child = subprocess.run([sys.executable, "-I", "-S", "-c", verify.CHILD], env={}, capture_output=True,
                           input=json.dumps(given).encode(), timeout=20)
    assert child.returncode == -14  # SIGALRM


def test_without_a_state_a_verifier_sees_a_404(sites):
    """Guards against a crash where the page never sent anything: verifiers ask for the status."""
    file = sites / "notes" / "real-tasks" / "task_e1.py"
    assert asyncio.run(verify.verdict(file, None, 10)) == (False, "no state: HTTP 404")
    with pytest.raises(verify.Unverified, match="gone.py: .*No such file"):
        asyncio.run(verify.verdict(file.with_name("gone.py"), None, 10))
    (sites / "hostile" / "binary.py").write_bytes(b"\xff")
    with pytest.raises(verify.Unverified, match="binary.py: .*utf-8"):
        asyncio.run(verify.verdict(sites / "hostile" / "binary.py", None, 10))


def test_what_was_not_verified_is_no_failure_of_the_agent_and_is_told_apart(web, monkeypatch):
    """Guards: a verifier's crash in the success rate; one that hangs and is taken for a page that hangs."""
    web.reset(starts("hostile/raise", "hostile/hang", "hostile/right"))
    monkeypatch.setattr(web, "timeout", 6)
    _, rewards, terminated, truncated = act(web, "stop [a]", "stop [b]", "stop [c]")
    assert (rewards, terminated, truncated) == ([0.0, 0.0, 1.0], [False, False, True], [True, True, False])
    assert [reason.split(": ")[1].split(" (")[0] for reason in web.failures[:2]] == ["not verified"] * 2
    assert "ZeroDivisionError" in web.failures[0] and "no verdict after 3 s" in web.failures[1]
    assert web.failures[2] == ""

# ---- four real applications --------------------------------------------------------------------------------

def played(page: str, text: str):
    """The action of a step of solutions.json, such as "click the first button 'Disconnect'", on a page."""
    found = re.fullmatch(r"(click|type) (?:the (first|last) )?(\w+) '(.*?)'(.*)", text)
    if not found:
        return parse_action(text)
    name, which, role, words, rest = found.groups()
    line = r"\[(\w+)\][^[]*StaticText '" if role == "StaticText" else rf"\[(\w+)\] {role} '"
    ids = re.findall(line + re.escape(words), page)
    return parse_action(f"{name} [{ids[-1] if which == 'last' else ids[0]}]{rest}")


@pytest.fixture(scope="module")
def real_web():
    with Infinity(REAL / "sites", timeout=60) as web:
        yield web


@real
def test_real_applications_are_played_by_hand_right_and_wrong(real_web):
    """Guards: rewards that only our own small application gives. Ten runs with the rewards of the authors'
    server and verifiers; each page is parsed, and each change survives diff and apply."""
    runs = json.loads((REAL / "solutions.json").read_text())
    seen = [obs.page for obs in real_web.reset(starts(*[run["task"] for run in runs]))]
    rewards = [None] * len(runs)
    for k in range(max(len(run["steps"]) for run in runs)):
        actions = [played(page, run["steps"][k]) if k < len(run["steps"]) else None
                   for page, run in zip(seen, runs)]
        obs, paid, ended, _ = real_web.step(actions)
        assert [one.error for one in obs] == [""] * len(runs)
        for n, one in enumerate(obs):
            if actions[n] is None:
                continue  # an idling page is as it was (test_it_keeps_the_promises_of_a_world)
            assert "\n".join(map(a11y.render, a11y.parse(one.page))) == one.page
            after = a11y.align(seen[n], one.page)
            assert a11y.apply(seen[n], a11y.diff(seen[n], after)) == after
            rewards[n] = paid[n] if ended[n] else rewards[n]
        seen = [one.page for one in obs]
    assert rewards == [run["reward"] for run in runs]


@real
def test_real_first_pages_are_the_same_bytes_twice(real_web):
    """Guards against what only large applications do while they load."""
    first = {task.site: name for name, task in real_web.tasks().items()}
    seen = [[obs.page for obs in real_web.reset(starts(*first.values()))] for _ in range(2)]
    assert len(first) == 4 and seen[0] == seen[1]
    assert all(re.search(r"\] generic(?: '[^']*')?, clickable", page) for page in seen[0])
