"""Claims about evaluate.py: success in a real Chromium is what is known of each play; files and figures."""
import json
import os
import random
import re
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import act, base_folder
from helpers import pages

import envs
import evaluate
import lm
from evaluate import bootstrap, read, table

command = partial(pages.command, evaluate)
FILLED = ("enter-text", "login-user")
tries = lambda file: sorted((row["task"], row["seed"], row["reward"], row["end"]) for row in read(file))


@pytest.fixture(autouse=True)
def deaths(monkeypatch):
    """{task: with which signal its process dies before the first action, try by try}."""
    deaths, reset, step = {}, envs.Env.reset, envs.Env.step

    async def begun(env, start):
        env.task = start.task
        return await reset(env, start)

    async def dying(env, action):
        if hows := deaths.get(env.task):
            os.kill(env.process.pid, hows.pop(0))
        return await step(env, action)

    monkeypatch.setattr(envs.Env, "reset", begun)
    monkeypatch.setattr(envs.Env, "step", dying)
    monkeypatch.setattr(lm, "matrix_type", lambda *_: torch.float32)
    return deaths


def plays(body) -> str:
    """In FILLED it types what is quoted, then presses the button. Elsewhere it stops, talks, or scrolls."""
    page, _, goal = body["messages"][-1]["content"].partition("OBJECTIVE:")
    task = re.search(r"http://miniwob/([\w-]+)", page)[1]
    if task not in FILLED:
        return {"click-test": act("stop [x]"), "click-button": "I would."}.get(task, act("scroll [down]"))
    wanted = re.findall('"([^"]+)"', goal.split("\n")[0])
    empty = [bid for bid, rest in re.findall(r"\[(\d+)\] textbox ([^\n]*)", page) if "value=" not in rest]
    button = re.search(r"\[(\d+)\] button", page)[1]
    return act(f"type [{empty[0]}] [{wanted[-len(empty)]}] [0]" if empty else f"click [{button}]")


def test_success_is_what_the_page_pays_for_each_known_play(serving, tmp_path, monkeypatch):
    """Guards: another reward or end than the page's; a URL that is asked for another model, without its key,
    or at random; figures of other tries than the file's."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ends = {"click-button": (0.0, "no action"), "click-test": (0.0, "stop"), "enter-text": (1.0, "the page"),
            "focus-text": (0.0, "steps ran out"), "login-user": (1.0, "the page")}
    server, out = serving(plays), tmp_path / "f"
    said = command("--agent-url", f"{server.url}#m", "--tasks", *ends, "--seeds", "2000000:2", "--horizon", 3,
                   "--out", out, "--keep-pages")
    assert tries(out) == [(task, 2000000 + k, *end) for task, end in ends.items() for k in range(2)]
    assert {(of["model"], of["max_tokens"], of["temperature"]) for of in server.asked} == {("m", 4096, 0.0)}
    assert {header["Authorization"] for header in server.headers} == {"Bearer secret"}
    assert "0.400 [0.40, 0.40] n=10\nf: the page 4, no action 2, stop 2, steps ran out 2" in said
    assert all(len(row["pages"]) == len(row["actions"]) + 1 and row["goal"] for row in read(out))


def test_a_killed_evaluation_goes_on_with_its_own_agent(tmp_path, serving, monkeypatch):
    """Guards: tries lost or made twice; a rate of two agents; a file of other things, written over; seeds or
    lengths lost on the way to a server (of the same weights: the first token says what is done)."""
    def deciding(model, *asked):
        does = lambda n: act(f"click [{n % 5}]") if n % 7 else "I would."
        return [replace(one, text=does(one.ids[0]), truncated=False) for one in generate(model, *asked)]

    generate, agent, file = lm.LM.generate, tmp_path / "agent", tmp_path / "deep/tries"
    monkeypatch.setattr(lm.LM, "generate", deciding)
    lm.save(model := lm.load(base_folder(), 2048), agent)
    how = ("--tasks", *FILLED, "--seeds", "1000000:3", "--horizon", 3, "--temperature", 1, "--context", 2048,
           "--max-new-tokens", 5, "--out")
    said = command(*(words := ("--checkpoint", agent, *how, file)))
    rows, whole = read(file), file.read_text()
    for cut in (whole.index("\n") + 300, -1):
        file.write_text(whole[:cut])
        assert command(*words) == said and sorted(file.read_text()) == sorted(whole)
    server = serving(lambda of: model.generate([model.template.prompt_ids(of["messages"])], of["max_tokens"],
                                               of["temperature"], [of["seed"]])[0].text)
    command("--agent-url", server.url, *how, tmp_path / "url")
    done = lambda rows: sorted(str([row["task"], row["seed"], row["actions"], row["end"]]) for row in rows)
    assert done(read(tmp_path / "url")) == done(rows) and len({str(row["actions"]) for row in rows}) > 3
    assert "its tries were made with horizon 3, not 2; give another --out" in command(*words, "--horizon", 2)
    model.net.model.norm.weight.data += 0.5
    lm.save(model, agent)
    assert f"{file}: its tries were made with weights " in command(*words)
    file.write_text(other := '{\n "mine": 1\n}')
    assert "holds no tries" in command(*words) and file.read_text() == other


@pytest.mark.parametrize("how, times", [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_a_browser_that_dies_is_never_the_agents_failure(serving, tmp_path, deaths, how, times):
    """Guards: a hung page or a browser's end as reward 0; no second try, or a third; a failure that stays."""
    deaths["login-user"] = hows = [how] * times
    words = ("--agent-url", serving(plays).url, "--tasks", *FILLED, "--seeds", "1000700:1", "--out",
             file := tmp_path / "f", "--step-seconds", 2)
    said, won = command(*words), [(task, 1000700, 1.0, "the page") for task in FILLED]
    if times == 2:
        assert tries(file) == [won[0], ("login-user", 1000700, 0.0, "failed")]
        assert "1.000 [1.00, 1.00] n=1\n" in said and "f: the page 1, failed 1" in said
        assert "1.000 [1.00, 1.00] n=2\n" in command(*words)
    assert tries(file) == won and not hows


def test_the_interval_covers_the_truth_and_is_as_wide_as_the_tries_of_each_task_say():
    """Guards: another width; tasks in one pot; figures that depend on order. Of 200 experiments with
    80 tries 88 to 99 % cover the truth (standard error 1.5). Reference: 1.96 sqrt(sum n p (1 - p)) / n."""
    rng, chance = random.Random(0), {"easy": 0.9, "hard": 0.2}
    tried = lambda n, won: {(task, k): float(won(k, p)) for task, p in chance.items() for k in range(n)}
    found = [bootstrap(tried(40, lambda k, p: rng.random() < p), draws=400) for _ in range(200)]
    assert 0.88 <= sum(low <= 0.55 <= high for _, low, high, _ in found) / 200 <= 0.99
    mean, low, high, n = bootstrap(results := tried(200, lambda k, p: k < 200 * p))
    half = 1.96 * sum(200 * p * (1 - p) for p in chance.values()) ** 0.5 / n
    assert mean == 0.55 and (mean - low, high - mean) == pytest.approx((half, half), rel=0.1)
    assert bootstrap(dict(sorted(results.items(), reverse=True))) == (mean, low, high, 400)


def of(file, *given):
    rows = [{"task": task, "seed": seed, "reward": reward or 0.0, "failed": "x" * (reward is None),
             "end": "failed" if reward is None else "stop"} for task, seed, reward in given]
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"made": {}}, *rows]))


def test_the_table_compares_the_tries_that_both_files_hold(tmp_path):
    """Guards: a difference of other tasks or seeds, or of the wrong sign; failed tries in a share."""
    of(a := tmp_path / "sft", ("a", 2, 0.0), ("a", 1, 0.0), ("a", 3, 1.0), ("a", 4, 0.0), ("old", 1, 1.0))
    of(b := tmp_path / "dream", ("a", 1, 1.), ("a", 2, 0.), ("a", 9, 1.), ("a", 4, None), ("new", 1, 0.))
    head, a, new, old, whole, *ends = table([str(a), str(b)]).split("\n")
    assert head.split() == ["sft", "dream"] and a.split()[1::4] == ["0.250", "0.667"]
    assert a.split()[4::4] == ["n=4", "n=3"] and new.split()[1] == old.split()[-1] == "-"
    assert whole.split()[1::4] == ["0.400", "0.500"] and ends == [
        "sft: stop 5", "dream: stop 4, failed 1",
        "the last minus the first: +0.500 [+0.000, +1.000] on 2 common tries"]


@pytest.mark.parametrize("words, says", [
    (["--seeds", "5:1"], "5:1"), (["--seeds", "1999999:2"], "1999999:2"),
    (["--tasks", "enter-txt"], "no task 'enter-txt'"), (["--out", ""], "give --out FILE"),
    (["--agent-url", "", "--checkpoint", "NONE"], "holds no model"), (["--agent-url", ""], "which agent?"),
    (["--checkpoint", "NONE"], "which agent?"), (["--benchmark", "infinty"], "no benchmark 'infinty'"),
    (["--table", "NONE"], "holds no tries"), (["--table", "FAILED"], "nothing was measured")])
def test_a_mistake_is_one_line(serving, tmp_path, words, says):
    """Guards: a traceback, a rate of nothing, an empty file that is left behind."""
    of(tmp_path / "FAILED", ("a", 1, None))
    words = [re.sub("NONE|FAILED", lambda name: str(tmp_path / name[0]), word) for word in words]
    said = command("--agent-url", serving(plays).url, "--out", out := tmp_path / "f", *words)
    assert said.startswith("evaluate.py: ") and says in said and "\n" not in said and not out.exists()
