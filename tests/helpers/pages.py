"""A browser's pages in tests: starts, actions as text, ids by their words; a command as it is typed."""

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import data
import lm
from data import Action, Obs, parse_action
from worlds import envs, explore

# JavaScript: all that a page can ask of another host, OTHER, without leaving: reach(element).
REACH = (Path(__file__).parent.parent / "sites/hostile/js/reach.js").read_text()


def start(task, seed=7, prefix=()):
    return replace(data.start(task, seed), prefix=tuple(prefix))


def act(web, *texts):
    """One action a page, as text; None idles."""
    return web.step([text and parse_action(text) for text in texts])


def bid(page, words):
    """The id of the first line that contains `words`."""
    line = next(line for line in page.split("\n") if words in line and "[" in line)
    return line.split("[")[1].split("]")[0]


def collect(web, batch, horizon) -> list[dict]:
    """Records of an explorer's (task, seed) in `web`, side by side; none where the browser failed."""
    pages = envs.Envs(web, len(batch))

    async def one(pair):
        async with pages() as env:
            return await explore.explore(env, data.start(*pair), horizon)

    return [explore.as_record(done, "") for done in lm.together(map(one, batch)) if not done.discarded]


def command(program, *words) -> str:
    """What `python PROGRAM.py words` prints, or its error."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, words)])
        try:
            program.main()
        except SystemExit as error:
            return str(error.code)
    return said.getvalue()


def check_protocol(world, starts, harmless: str) -> None:
    """What every batched world promises to envs.Envs. `harmless` is an action (text) that ends nothing.

    Guards: a world that returns tuples of other lengths, pays an idling page, ends twice, goes on after the
    end, raises at what an agent does wrong, or says nothing of failures.
    """
    assert len(starts) == 3
    first = seen = world.reset(starts)
    assert [type(obs) for obs in first] == [Obs] * 3
    assert all(obs.goal and obs.page and not obs.error for obs in first)
    assert all(obs.url == data.root_url(obs.page) for obs in first)
    assert list(world.failures) == [""] * 3, "nothing has failed yet"
    go, stop = parse_action(harmless), Action("stop", text="x")

    def step(*actions):
        nonlocal seen
        before, (seen, rewards, terminated, truncated) = seen, world.step(list(actions))
        assert len(seen) == len(rewards) == len(terminated) == len(truncated) == 3
        assert all(type(reward) is float and reward in (0.0, 1.0) for reward in rewards)
        assert all(type(flag) is bool for flag in terminated + truncated)
        assert not any(ended and cut for ended, cut in zip(terminated, truncated)), "both ended and cut off"
        assert list(world.failures) == [""] * 3, "an agent's doing is no failure"
        for k, action in enumerate(actions):
            assert seen[k].goal == before[k].goal and seen[k].url == data.root_url(seen[k].page)
            if action is None:
                assert seen[k].page == before[k].page, "an idling page moved"
                assert rewards[k] == 0.0, "an idling page was paid"
                assert not terminated[k] and not truncated[k], "an idling page ended"
        return seen, rewards, terminated, truncated

    assert step(None, None, None)[0] == first
    assert step(go, None, go)[2:] == ([False] * 3, [False] * 3)
    for name in ("hover", "click"):  # nobody is there
        after, _, terminated, truncated = step(None, Action(name, "999"), None)
        assert after[1] == replace(first[1], error=f"{name} [999]: there is no [999] on the page")
        assert not terminated[1] and not truncated[1]
    assert step(None, None, None)[0][1].error == "", "an error is about the last action only"
    assert step(stop, None, None)[2:] == ([True, False, False], [False] * 3)
    with pytest.raises(AssertionError, match="after the end"):
        world.step([go, None, None])
    with pytest.raises(AssertionError, match="2 actions for 3 pages"):
        world.step([None, None])
    step(None, go, stop)  # the others go on
    seen = world.reset(starts)
    assert [obs.page for obs in seen] == [obs.page for obs in first], "a second reset is as the first"
    assert step(go, None, go)[2:] == ([False] * 3, [False] * 3), "the trajectories before are over"
    assert world.reset([]) == [] and list(world.failures) == [] and world.step([]) == ([], [], [], [])
