"""Claims about worlds/webarena.py: the real packages (their tasks, logins, checks) and a real Chromium, on
small servers in place of the sites, of the judge and of the server that sets the sites back.

What runs only where the packages are installed is skipped elsewhere; `make venv-webarena`, then
    .venv-webarena/bin/python -m pytest -q tests/test_webarena.py
"""
import contextlib
import importlib.util
import json
import subprocess
import sys
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from helpers.pages import act, bid, start
from helpers.servers import Replies, served

from worlds.webarena import LISTS, SITES, WebArena

INSTALLED = all(importlib.util.find_spec(name) for name in ("nltk", "webarena", "webarena_verified"))
real = pytest.mark.skipif(not INSTALLED, reason="WebArena's packages are not here: make venv-webarena")

# ---- what is missing ---------------------------------------------------------------------------------------

@pytest.fixture
def bare(monkeypatch):
    for name in (*(f"WA_{site}" for site in SITES), "OPENAI_API_KEY", "OPENAI_BASE_URL", "WA_FULL_RESET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", LISTS)
def test_all_that_is_missing_is_named_in_one_error(bare, monkeypatch, name):
    """Guards: an error a variable, each after minutes; packages that fetch data while they are imported."""
    monkeypatch.setenv("WA_MAP", "example.com/map")
    if INSTALLED:
        import nltk
        monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ValueError) as raised, WebArena(name):
        pass
    said = str(raised.value)
    assert all(f"- WA_{site}: the URL" in said for site in SITES) and "it is 'example.com/map'" in said
    assert ("- OPENAI_API_KEY, or OPENAI_BASE_URL" in said) == (name != "webarena_verified")
    assert ("make venv-webarena" in said) == (not INSTALLED)
    assert ("nltk.downloader punkt_tab" in said) == INSTALLED


@real
def test_tasks_are_known_before_anything_starts(bare):
    """Guards: a list of tasks that needs sites, keys or a download; ids in the order of text; tasks of two
    sites that count for one. The counts are the papers'."""
    program = ("import json, sys; from worlds.webarena import *\n"
               "lists = {name: WebArena(name).tasks() for name in LISTS}\n"
               "assert not {'nltk', 'openai', 'webarena', 'browsergym.webarena'} & set(sys.modules)\n"
               "print(json.dumps({name: [[task, it.site, it.goal] for task, it in tasks.items()]"
               " for name, tasks in lists.items()}))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    lists = json.loads(done.stdout)
    assert {name: len(tasks) for name, tasks in lists.items()} == {
        "webarena": 812, "webarena_lite": 165, "webarena_verified": 812}
    sites = {"shopping", "shopping_admin", "reddit", "gitlab", "map", "map+wikipedia", "gitlab+reddit",
             "gitlab+wikipedia", "reddit+shopping", "map+shopping_admin"}
    for name, tasks in lists.items():
        ids = [int(task.removeprefix(f"{LISTS[name][0]}.")) for task, _, _ in tasks]
        assert ids == sorted(set(ids)) and {site for _, site, _ in tasks} <= sites
        assert all(goal.strip() for _, _, goal in tasks)
    assert lists["webarena"][44] == ["webarena.44", "gitlab", "Check out my todos"]
    assert lists["webarena_verified"][44] == ["webarena_verified.44", "gitlab", "Open my todos page"]
    assert set(task.split(".")[1] for task, _, _ in lists["webarena_lite"]) <= set(map(str, range(812)))

# ---- servers in place of the sites -------------------------------------------------------------------------

# Each has the form that the package logs in by (WebArenaInstance.ui_login), lets in who knows the package's
# password (ACCOUNTS), and shows its pages to nobody else.

LOGIN = {  # where the form is; the names of its fields and of its button
    "REDDIT": ("/login", "Username", "Password", "Log in", "MarvelsGrantMan136", "test1234"),
    "GITLAB": ("/users/sign_in", "Username or email", "Password", "Sign in", "byteblaze", "hello1234"),
    "SHOPPING": ("/customer/account/login/", "Email", "Password", "Sign In", "emma.lopez@gmail.com",
                 "Password.123"),
    "SHOPPING_ADMIN": ("/admin", "Username", "Password", "Sign in", "admin", "admin1234"),
}
PAGES = {
    "GITLAB /": "<a href='/dashboard/todos'>To-Do List</a> <form method=post action='/-/profile'><label>"
                "Website<input name='user[website_url]'></label><button>Update</button></form>",
    "GITLAB /dashboard/todos": "<h1>To-Do List</h1>",
    "SHOPPING /": "<a href='/guard.html'>Mouth guard</a>",
    "SHOPPING /guard.html": "<h1>Mouth guard for jaw bruxism</h1>",
    "REDDIT /": "<h1>Postmill</h1>", "SHOPPING_ADMIN /admin": "<h1>Dashboard</h1>",
    "MAP /": "<h1>OpenStreetMap</h1>", "WIKIPEDIA /": "<h1>Wikipedia</h1>", "HOMEPAGE /": "<h1>Sites</h1>",
}


class Site(Replies):
    """One of the sites; which, says its server (.name, and .down: it does not answer)."""

    def do_GET(self):
        name, path = self.server.name, self.path.split("?")[0]
        if self.server.down:
            return self.connection.close()
        at, user, password, button, *_ = LOGIN.get(name, ("",) * 4)
        inside = name not in LOGIN or f"{name}=in" in self.headers.get("Cookie", "")
        if not inside and path == at:
            body = (f"<form method=post action='{at}'><label>{user}<input name=user></label><label>{password}"
                    f"<input name=password type=password></label><button>{button}</button></form>")
        elif not inside and name == "REDDIT":
            body = f"<a href='{at}'>Log in</a>"
        else:
            body = PAGES.get(f"{name} {path}") if inside else None
        self.reply(404 if body is None else 200, f"<title>{escape(name)}</title>{body}".encode())

    def do_POST(self):
        sent, name = parse_qs(self.body().decode()), self.server.name
        fields = {key: value for key, (value,) in sent.items()}
        self.server.posts.append((self.path, fields))
        right = (fields.get("user"), fields.get("password")) == LOGIN[name][-2:]
        cookie = {"Set-Cookie": f"{name}=in; Path=/"} if right else {}
        self.reply(302, b"", Location="/admin" if name == "SHOPPING_ADMIN" else "/", **cookie)


class Judge(Replies):
    """chat/completions, as the client of the package `openai` asks for it."""

    def do_POST(self):
        asked = json.loads(self.body())
        self.server.asked.append(asked["messages"][-1]["content"])
        said = {"role": "assistant", "content": self.server.says}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                "choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}
        self.reply(200 if self.server.says else 400, json.dumps(body).encode())


class Setter(Replies):
    """WA_FULL_RESET, as WebArenaInstance.full_reset asks it."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.reply(200, b"Ready for duty!" if self.path == "/status" else b"started")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """{name: server}: the seven sites, JUDGE and SETTER. The packages read the URLs once, at their import."""
    import nltk
    data = tmp_path_factory.mktemp("nltk") / "tokenizers" / "punkt_tab" / "english"
    data.mkdir(parents=True)  # in place of the download: the tokenizer, untrained
    for file in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (data / file).touch()
    nltk.data.path.insert(0, str(data.parents[2]))
    with contextlib.ExitStack() as there, pytest.MonkeyPatch.context() as patch:
        handlers = dict.fromkeys(SITES, Site) | {"JUDGE": Judge, "SETTER": Setter}
        found = {name: there.enter_context(served(handler, name=name, posts=[], asked=[], down=False))
                 for name, handler in handlers.items()}
        for site in SITES:  # a slash at the end, as in BrowserGym's own instructions
            patch.setenv(f"WA_{site}", found[site].url + ("/admin" if site == "SHOPPING_ADMIN" else "/"))
        patch.setenv("OPENAI_BASE_URL", found["JUDGE"].url)
        yield found


@pytest.fixture
def sites(servers):
    """The servers, all well."""
    for server in servers.values():
        server.down = False
        server.posts.clear()
        server.asked.clear()
    servers["JUDGE"].says = "correct"
    return servers


def played(web, task, *ways):
    """Each way is an action, or words of a line to click: (reward, terminated, truncated, failure,
    observation)."""
    obs, = web.reset([start(task, 0)])
    reward, over, cut = 0.0, False, False
    for way in ways:
        action = way if way.endswith("]") else f"click [{bid(obs.page, way)}]"
        (obs,), (reward,), (over,), (cut,) = act(web, action)
    return reward, over, cut, web.failures[0], obs


@pytest.fixture
def web(sites):
    with WebArena("webarena", timeout=30_000) as web:
        yield web

# ---- WebArena ----------------------------------------------------------------------------------------------

@real
def test_answers_are_checked_by_the_packages_own_strings(web, sites):
    """Guards: a goal, a login or an answer that does not arrive. 0: exact_match. 14: must_include 0, not in
    10."""
    assert web.reset([start("webarena.0", 0)])[0].goal == "What is the top-1 best-selling product in 2022"
    assert ("/admin", {"user": "admin", "password": "admin1234"}) in sites["SHOPPING_ADMIN"].posts
    for task, right, wrong in ("webarena.0", "Quest Lumaflex™ Band", "Sprite"), ("webarena.14", "0", "10"):
        reward, over, cut, failure, obs = played(web, task, f"stop [{right}]")
        assert (reward, over, cut, failure) == (1.0, True, False, "") and "heading 'Dashboard'" in obs.page
        assert played(web, task, f"stop [{wrong}]")[:4] == (0.0, True, False, "")
    assert sites["JUDGE"].asked == []


@real
def test_the_judge_is_asked_once_and_one_that_gives_no_verdict_is_no_failure_of_the_agent(web, sites):
    """Guards: a judge paid for every step; BrowserGym's 0 for one that says neither of its words."""
    task, judge = "webarena.8", sites["JUDGE"]
    assert played(web, task, "scroll [down]", "stop [none]")[:4] == (1.0, True, False, "")
    assert len(judge.asked) == 1 and "student answer: none" in judge.asked[0]
    judge.says = "incorrect"
    assert played(web, task, "stop [none]")[:4] == (0.0, True, False, "")
    for says in ("I cannot tell.", ""):  # '': an error of the server
        judge.says = says
        reward, over, cut, failure, _ = played(web, task, "stop [none]")
        assert (reward, over, cut) == (0.0, False, True) and "not verified" in failure


@real
def test_addresses_and_pages_are_checked_as_they_are_reached(web, sites):
    """Guards: a check that needs a stop, or passes before anything is done. 44: url_match. 118:
    program_html."""
    for task, way in ("webarena.44", "To-Do List"), ("webarena.118", "Mouth guard"):
        reward, over, _, failure, obs = played(web, task, "scroll [down]")
        assert (reward, over, failure) == (0.0, False, "")
        (_,), reward, over, _ = act(web, f"click [{bid(obs.page, way)}]")
        assert (reward, over, web.failures) == ([1.0], [True], [""])
        assert played(web, task, "stop []")[:4] == (0.0, True, False, "")


@real
def test_a_site_that_is_away_is_no_failure_of_the_agent(web, sites):
    """Guards: BrowserGym's end with 0 at an address beside the sites, as an error page of Chromium is. The
    agent's own way out stays its failure."""
    assert played(web, "webarena.44", "goto [http://127.0.0.2/]")[:4] == (0.0, True, False, "")
    obs, = web.reset([start("webarena.44", 0)])
    sites["GITLAB"].down = True
    _, rewards, over, cut = act(web, f"click [{bid(obs.page, 'To-Do List')}]")
    assert (rewards, over, cut) == ([0.0], [False], [True]) and "not reacheable" in web.failures[0]
    sites["GITLAB"].down = False
    assert played(web, "webarena.44", "To-Do List")[:4] == (1.0, True, False, "")


@real
def test_a_login_that_fails_is_no_failure_of_the_agent(sites, monkeypatch):
    """Guards against a site of another version, whose form has another button."""
    *form, user, password = LOGIN["GITLAB"]
    monkeypatch.setitem(LOGIN, "GITLAB", (*form[:3], "Enter", user, password))
    with WebArena("webarena", timeout=1500) as web:
        reward, over, cut, failure, _ = played(web, "webarena.44", "press [a]")
        assert (reward, over, cut) == (0.0, False, True) and "did not start in three attempts" in failure
        assert len([path for path, _ in sites["GITLAB"].posts]) == 0


@real
def test_sites_are_set_back_once_and_played_one_at_a_time(sites, monkeypatch):
    """Guards against tasks that change each other's pages, and against a reset of minutes a task."""
    monkeypatch.setenv("WA_FULL_RESET", sites["SETTER"].url)
    with WebArena("webarena") as web:
        assert sites["SETTER"].asked == ["/reset", "/status"]
        named = {sites[site].url.removeprefix("http://") for site in ("SHOPPING", "SETTER")}
        assert named & set(web.hosts) == {sites["SHOPPING"].url.removeprefix("http://")}, "by its port"
        for _ in range(2):
            web.reset([start("webarena.0", 0)])
        assert len([path for path, _ in sites["SHOPPING_ADMIN"].posts if path == "/admin"]) == 2
        assert sites["SETTER"].asked == ["/reset", "/status"]
        with pytest.raises(ValueError, match="one page at a time"):
            web.reset([start("webarena.0", 0), start("webarena.1", 0)])
        with pytest.raises(ValueError, match="no task 'webarena.812'"):
            web.reset([start("webarena.812", 0)])


@real
def test_sites_that_do_not_answer_are_named_before_anything_starts(sites):
    """Guards against 812 failures instead of one error."""
    sites["MAP"].down = True
    with pytest.raises(ValueError, match="sites are not ready.*\"map\""), WebArena("webarena"):
        pass

# ---- WebArena-Lite, WebArena Verified ----------------------------------------------------------------------

@real
def test_lite_has_its_own_tasks_and_checks(sites):
    """Guards against WebArena's task and answer under Lite's number."""
    right = "Impulse Duffle, Overnight Duffle, Hawkeye Yoga Short-32-Blue"
    with WebArena("webarena_lite", timeout=30_000) as web:
        assert played(web, "webarenalite.4", f"stop [{right}]")[:4] == (1.0, True, False, "")
        assert type(web._envs[0].unwrapped.task).__module__ == "browsergym.webarenalite.task"


DONE = '{"task_type": "%s", "status": "SUCCESS", "retrieved_data": %s, "error_details": null}'


@pytest.fixture
def verified(sites):
    with WebArena("webarena_verified", timeout=30_000) as web:
        yield web


@real
def test_verified_counts_the_answer_and_the_requests(verified, sites):
    """Guards: requests without forms or without the task's own: 0 asks for data, 44 for a page, 448 for a
    change. Each is right once, and wrong without its request or its data."""
    page, change = f"stop [{DONE % ('NAVIGATE', 'null')}]", f"stop [{DONE % ('MUTATE', 'null')}]"
    data = [f"stop [{DONE % ('RETRIEVE', json.dumps([name]))}]"
            for name in ("Quest Lumaflex™ Band", "Sprite")]
    home = "https://egg.tart.com"
    obs, = verified.reset([start("webarena_verified.448", 0)])
    assert obs.goal.startswith("set the homepage URL on my GitLab profile") and "NOT_FOUND_ERROR" in obs.goal
    for task, *ways, reward in (
            ("webarena_verified.0", data[0], 1.0), ("webarena_verified.0", data[1], 0.0),
            ("webarena_verified.44", "To-Do List", page, 1.0), ("webarena_verified.44", page, 0.0),
            ("webarena_verified.448", f"type [{bid(obs.page, 'Website')}] [{home}] [1]", change, 1.0),
            ("webarena_verified.448", f"type [{bid(obs.page, 'Website')}] [x] [1]", change, 0.0),
            ("webarena_verified.44", "To-Do List", "stop [done]", 0.0),
            ("webarena_verified.44", "To-Do List", 'stop [{"task_type": 5, "status": {}}]', 0.0)):
        assert played(verified, task, *ways)[:4] == (reward, True, False, ""), (task, ways)


@real
def test_a_check_of_verified_that_breaks_is_no_failure_of_the_agent(verified, sites, monkeypatch):
    """Guards against the package's status `error`, whose score is 0."""
    from webarena_verified.core.evaluation.evaluators import AgentResponseEvaluator

    def broken(*_, **__):
        raise KeyError("gone")
    monkeypatch.setattr(AgentResponseEvaluator, "evaluate", broken)
    reward, over, cut, failure, _ = played(verified, "webarena_verified.44", "To-Do List",
                                           f"stop [{DONE % ('NAVIGATE', 'null')}]")
    assert (reward, over, cut) == (0.0, False, True) and "not verified" in failure
