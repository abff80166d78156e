"""Claims about benchmarks.py, in a real Chromium."""
import pytest
from test_browser import act, bid, start

from benchmarks import BrowserGymPages
from browser import HTML


def test_a_browsergym_task_behind_the_same_interface(monkeypatch):
    """Guards against the chat window, which starts a second Chromium that ignores executable_path, and
    against another text format."""
    monkeypatch.setenv("MINIWOB_URL", f"file://{HTML}/miniwob/")
    # BrowserGym waits 5 s for an element: not enough beside a training run.
    with BrowserGymPages(timeout=60_000, slow_mo=0) as web:
        first = web.reset([start("browsergym/miniwob.choose-list", 3)])[0]
        assert first.page.startswith("RootWebArea 'Choose List Task', focused, url='file:")
        assert "InlineTextBox" not in first.page
        assert act(web, "click [999]")[0][0].error == "click [999]: there is no [999] on the page"
        name = first.goal.removeprefix("Select ").removesuffix(" from the list and click Submit.")
        obs = act(web, f"click [{bid(first.page, f'option {name!r}')}]")[0][0]
        assert f"combobox '' value={name!r}" in obs.page and obs.error == ""
        _, rewards, terminated, truncated = act(web, f"click [{bid(obs.page, 'Submit')}]")
        assert (rewards, terminated, truncated) == ([1.0], [True], [False])
        with pytest.raises(AssertionError, match="after the end"):
            act(web, "press [a]")
