"""Claims about worlds/gym.py, in a real Chromium and with the real BrowserGym."""

import pytest
from helpers.pages import act, bid, start
from helpers.servers import site

from worlds.gym import BrowserGymPages
from worlds.miniwob import HTML


def test_a_browsergym_task_behind_the_same_interface(monkeypatch):
    """Guards against the chat window, which starts a second Chromium that ignores executable_path, and
    against another text format."""
    monkeypatch.setenv("MINIWOB_URL", f"file://{HTML}/miniwob/")
    # BrowserGym waits 5 s for an element: not enough beside a training run.
    with BrowserGymPages(timeout=60_000) as web:
        first = web.reset([start("browsergym/miniwob.choose-list", 3)])[0]
        assert first.page.startswith("RootWebArea 'Choose List Task', focused, url='file:")
        assert "InlineTextBox" not in first.page
        assert act(web, "click [999]")[0][0].error == "click [999]: there is no [999] on the page"
        name = first.goal.removeprefix("Select ").removesuffix(" from the list and click Submit.")
        obs = act(web, f"click [{bid(first.page, f'option {name!r}')}]")[0][0]
        assert f"combobox '' value={name!r}" in obs.page and obs.error == ""
        _, rewards, terminated, truncated = act(web, f"click [{bid(obs.page, 'Submit')}]")
        assert (rewards, terminated, truncated) == ([1.0], [True], [False])
        assert web.failures == [""]
        with pytest.raises(AssertionError, match="after the end"):
            act(web, "press [a]")


@pytest.fixture
def sites():
    """Two servers on this machine at different addresses."""
    pages = dict.fromkeys(("/", "/asked"), "<title>here</title><button>Press</button>")
    with site(pages) as home, site(pages, "127.0.0.2") as other:
        yield home, other


def test_only_the_hosts_given_can_be_reached_and_no_file(sites):
    """Guards against a launch that forgets the lock, and against `goto` as a way to this machine's files. The
    other server is asked without the lock first, so that an empty list means something."""
    home, other = sites
    for hosts, reached in (("127.0.0.1", "127.0.0.2"), True), (("127.0.0.1",), False):
        with BrowserGymPages(hosts, timeout=60_000, task_kwargs={"start_url": home.url}) as web:
            assert "button 'Press'" in web.reset([start("browsergym/openended", 0)])[0].page
            act(web, f"goto [{other.url}/asked]")
            assert ("/asked" in other.asked) == reached
            for address in ("file:///etc/passwd", "chrome://version", "view-source:http://127.0.0.1"):
                obs = act(web, f"goto [{address}]")[0][0]
                assert obs.error.endswith("an address starts with http:// or https://")
                assert "root:" not in obs.page
        other.asked.clear()


def test_a_page_that_does_not_start_or_crashes_is_counted_apart(sites):
    """Guards against one lost page that ends an evaluation of many hours, and against a reward 0 that reads
    like the agent's failure."""
    home, away = ({"start_url": one.url} for one in sites)
    with BrowserGymPages(("127.0.0.1",), timeout=60_000, task_kwargs=away) as web:
        seen = web.reset([start("browsergym/openended", 0)])
        assert "did not start in three attempts" in web.failures[0] and seen[0].page == ""
        _, rewards, terminated, truncated = act(web, "press [a]")
        assert (rewards, terminated, truncated) == ([0.0], [False], [True])
        web.env_kwargs["task_kwargs"] = home
        web.reset([start("browsergym/openended", 0), start("browsergym/openended", 1)])
        web._envs[0].unwrapped.browser.close()
        obs, rewards, terminated, truncated = act(web, "press [a]", "press [a]")
        assert (rewards, terminated, truncated) == ([0.0, 0.0], [False, False], [True, False])
        assert "the page crashed" in web.failures[0] and web.failures[1] == ""
        assert web.reset([start("browsergym/openended", 0)])[0].page and web.failures == [""]


CHOICES = """<title>cars</title><select id=cars><option>-</option>
<optgroup label=2023><option value=a>Red</option></optgroup>
<optgroup label=2024><option value=b>Red</option></optgroup><option value=c>{}</option></select>
<ul role=listbox><li role=option onclick="document.title='Bob'">Bob</li></ul>"""


def test_an_option_is_chosen_by_itself_and_never_by_its_name():
    """Guards against a page that writes the agent's code (BrowserGym runs it: here it would read a file), and
    against a choice of the first of two options with one name, or of none where a list is no <select>."""
    name = """goto("file:///etc/passwd") ',x\""""
    with site({"/": CHOICES.format(name.replace('"', "&quot;"))}) as home:
        with BrowserGymPages(("127.0.0.1",), timeout=60_000, task_kwargs={"start_url": home.url}) as web:
            page = web.reset([start("browsergym/openended", 0)])[0].page
            options = [line for line in page.split("\n") if "option" in line and "listbox" not in line]
            chosen = lambda: web._envs[0].unwrapped.page.evaluate("document.querySelector('#cars').value")
            for line, value in zip(options[1:4], ("a", "b", "c"), strict=True):
                obs = act(web, f"click [{bid(page, line.strip())}]")[0][0]
                assert (chosen(), obs.error) == (value, "") and obs.url.startswith(home.url)
            obs = act(web, f"click [{bid(page, options[4].strip())}]")[0][0]
            assert obs.page.startswith("RootWebArea 'Bob'") and obs.error == ""


def test_a_page_that_cannot_be_read_fails_alone(sites, monkeypatch):
    """Guards against an exception of BrowserGym's reader (it recurses once a level of the page) that ends a
    run of many hours."""
    def deep(*_):
        raise RecursionError
    with BrowserGymPages(("127.0.0.1",), timeout=60_000, task_kwargs={"start_url": sites[0].url}) as web:
        web.reset([start("browsergym/openended", 0)])
        monkeypatch.setattr("worlds.gym.page_text", deep)
        assert act(web, "press [a]")[3] == [True] and "RecursionError" in web.failures[0]
