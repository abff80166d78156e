"""Claims about evaluate.py: success in a real Chromium is what is known of each play; files and figures."""
import json
import os
import re
import signal
from functools import partial

import pytest
from conftest import act
from helpers import processes

import envs
import evaluate
from config import UserError
from evaluate import bootstrap, read, table

command = partial(processes.command, evaluate)
tries = lambda file: sorted((row["task"], row["seed"], row["reward"], row["end"]) for row in read(file))


def plays(body) -> str:
    """enter-text is done; in click-test it stops, in click-button it talks, elsewhere it scrolls."""
    page, _, goal = body["messages"][-1]["content"].partition("OBJECTIVE:")
    task = re.search(r"http://miniwob/([\w-]+)", page)[1]
    if task != "enter-text":
        return {"click-test": act("stop [x]"), "click-button": "I would."}.get(task, act("scroll [down]"))
    role = "button" if "value=" in page else "textbox"
    bid = re.search(rf"\[(\d+)\] {role}", page)[1]
    text = re.findall('"([^"]+)"', goal)[0]
    return act(f"click [{bid}]" if role == "button" else f"type [{bid}] [{text}] [0]")


def test_success_is_what_the_page_pays_for_each_known_play(serving, tmp_path):
    """Guards: another reward or end than the page's; a URL that is asked for another model, or at random;
    figures of other tries than the file's."""
    ends = {"click-button": (0.0, "no action"), "click-test": (0.0, "stop"), "enter-text": (1.0, "the page"),
            "focus-text": (0.0, "steps ran out")}
    server, out = serving(plays), tmp_path / "f"
    said = command("--agent-url", f"{server.url}#m", "--tasks", *ends, "--seeds", "2000000:2", "--horizon", 3,
                   "--out", out, "--keep-pages")
    assert tries(out) == [(task, 2000000 + k, *end) for task, end in ends.items() for k in range(2)]
    assert {(of["model"], of["max_tokens"], of["temperature"]) for of in server.asked} == {("m", 4096, 0.0)}
    assert "0.250 [0.25, 0.25] n=8\nf: no action 2, stop 2, the page 2, steps ran out 2" in said
    assert all(len(row["pages"]) == len(row["actions"]) + 1 and row["goal"] for row in read(out))


def test_a_killed_evaluation_goes_on_with_its_own_agent(scripted, tmp_path, monkeypatch):
    """Guards: tries lost, or made twice; actions that depend on what was done before the kill; a rate of two
    agents; a file of other things, written over."""
    (agent := tmp_path / "agent").mkdir()
    (weights := agent / "model.safetensors").write_bytes(b"1")
    sampler = scripted(lambda prompt: act(f"click [{sampler.seeds[-1] % 9}]"))  # as its seed says
    monkeypatch.setattr(evaluate, "frozen", lambda *_: sampler)
    words = ("--checkpoint", agent, "--tasks", "enter-text", "login-user", "--seeds", "1000000:3",
             "--temperature", 1, "--out", file := tmp_path / "deep/tries", "--horizon")
    said, written, turns = command(*words, 3), file.read_text(), len(sampler.prompts)
    assert len({str(row["actions"]) for row in read(file)}) > 3
    for cut, again in ((written.index("\n") + 300, turns), (-1, 4)):
        del sampler.prompts[:]
        file.write_text(written[:cut])
        assert command(*words, 3) == said and len(sampler.prompts) < again
        assert sorted(file.read_text().split("\n")) == sorted(written.split("\n"))
    assert "its tries were made with horizon 3, not 2" in command(*words, 2)
    weights.write_bytes(b"2")
    assert "its tries were made with weights " in command(*words, 3)
    file.write_text(other := '{\n "mine": 1\n}')
    assert "holds no tries" in command(*words, 3) and file.read_text() == other


def test_a_browser_that_dies_is_never_the_agents_failure(serving, tmp_path, monkeypatch):
    """Guards: a hung page or a browser's end as reward 0; no second try, or a third; a failure that stays."""
    step, deaths = envs.Env.step, [signal.SIGKILL, signal.SIGSTOP]

    async def dying(env, action):
        if action.name == "type" and deaths:
            os.kill(env.process.pid, deaths.pop())
        return await step(env, action)

    monkeypatch.setattr(envs.Env, "step", dying)
    words = ("--agent-url", serving(plays).url, "--tasks", "click-test", "enter-text", "--seeds", "1000700:1",
             "--out", file := tmp_path / "f", "--step-seconds", 8)
    said, lost = command(*words), ("click-test", 1000700, 0.0, "stop")
    assert tries(file) == [lost, ("enter-text", 1000700, 0.0, "failed")] and not deaths
    assert "0.000 [0.00, 0.00] n=1\n" in said and "f: stop 1, failed 1" in said
    command(*words)
    assert tries(file) == [lost, ("enter-text", 1000700, 1.0, "the page")]


def test_the_interval_is_as_wide_as_the_tries_of_each_task_say():
    """Guards: another width; tasks in one pot; figures that depend on order; training seeds in one pot, which
    hides that they differ. Reference: 1.96 sqrt(sum n p (1 - p)) / n."""
    chance = {"easy": 0.9, "hard": 0.2}
    results = {(task, k): float(k < 200 * p) for task, p in chance.items() for k in range(200)}
    mean, low, high, n = bootstrap([results])
    half = 1.96 * sum(200 * p * (1 - p) for p in chance.values()) ** 0.5 / n
    assert mean == 0.55 and (mean - low, high - mean) == pytest.approx((half, half), rel=0.1)
    assert bootstrap([dict(sorted(results.items(), key=lambda item: item[0][1]))]) == (mean, low, high, 400)
    assert bootstrap([dict.fromkeys(results, 0.0), dict.fromkeys(results, 1.0)]) == (0.5, 0.0, 1.0, 800)


def of(file, *given):
    rows = [{"task": task, "seed": seed, "reward": reward or 0.0, "failed": "x" * (reward is None),
             "end": "stop"} for task, seed, reward in given]
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"made": {}}, *rows]))
    return str(file)


def test_the_table_compares_the_tries_that_both_files_hold(tmp_path):
    """Guards: a difference of other tries, or of the wrong sign; failed tries in a share, or no others."""
    a = of(tmp_path / "sft", ("a", 2, 0.0), ("a", 1, 0.0), ("a", 3, 1.0), ("a", 4, 0.0), ("old", 1, 1.0))
    b = of(tmp_path / "dream", ("a", 1, 1.), ("a", 2, 0.), ("a", 9, 1.), ("a", 4, None), ("new", 1, 0.))
    head, task, new, old, total, *_, last = table([a, b]).split("\n")
    assert head.split() == ["sft", "dream"] and task.split()[1::4] == ["0.250", "0.667"]
    assert task.split()[4::4] == ["n=4", "n=3"] and new.split()[1] == old.split()[-1] == "-"
    assert total.split()[1::4] == ["0.400", "0.500"]
    assert last == "the last minus the first: +0.500 [+0.000, +1.000] on 2 common tries"
    both = table([f"{a},{b}"] * 2).split("\n")
    assert both[1].split()[4] == "n=7" and both[-1].endswith("+0.000 [+0.000, +0.000] on 9 common tries")
    for columns in ([f"{a},{b}", b], [of(tmp_path / "lost", ("a", 1, None))]):  # another seed; 0 of 0
        with pytest.raises(UserError, match="as many files|nothing was measured"):
            table(columns)


@pytest.mark.parametrize("words", [["--seeds", "5:1"], ["--seeds", "1999999:2"], ["--out", ""],
                                   ["--tasks", "enter-txt"], ["--checkpoint", "x"], ["--agent-url", ""],
                                   ["--hosts", "a/b"]])
def test_a_mistake_is_one_line(serving, tmp_path, words):
    """Guards: a traceback; tries on training seeds; an empty file that is left behind."""
    said = command("--agent-url", serving(plays).url, "--out", out := tmp_path / "f", *words)
    assert said.startswith("evaluate.py: ") and words[0].strip("-") in said and "\n" not in said
    assert not out.exists()
