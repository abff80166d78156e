"""Claims about worlds/benchmarks.py and worlds/tries.py: which tasks, lines that survive
a kill, and what is not the agent's doing.

The world is conftest's CountingWorld, and MiniWoB++ in a real Chromium. Each world of worlds/ has tests of
its own."""
import contextlib
import dataclasses
import functools
import gzip
import json
import re
import runpy
import shutil
import sys
import time
from pathlib import Path

import pytest
from conftest import CountingWorld, act, recorded
from helpers.killed import killed

import data
import dream
import evaluate
import measure
import recipe
import train
from data import Options, parse_action
from worlds import benchmarks, explore, tries
from worlds.chromium import Task
from worlds.infinity import Infinity

MADE = {"checkpoint": "runs/a", "temperature": 0.0}
DONE = {"tokens_read": 10, "tokens_written": 2, "seconds": 6.0, "end": "stop"}


class Counting(CountingWorld):
    """Four tasks on two sites."""

    def tasks(self):
        return {f"{site}/{name}": Task(site, level) for site in ("shop", "mail")
                for name, level in (("a", "easy"), ("b", "hard"))}


PAIRS = [(task, 0) for task in Counting().tasks()]


def tried(agent, file, world=None, pairs=PAIRS, made=MADE, **more):
    settings = {"horizon": 3, "max_new_tokens": 100, "pages": 2} | more
    return tries.tries(world or Counting(), agent.lm, pairs, file, made, **settings)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_tries_are_written_when_they_end_and_never_made_again(scripted, tmp_path):
    """Guards: a night's tries lost with the last one; a try that counts twice. The agent is killed in the
    third of four tries; the same command ends up with the file of a run that nobody killed."""
    whole, file = tmp_path / "whole.jsonl", tmp_path / "deep" / "tries.jsonl"
    agent = scripted(lambda prompt: act("click [2]"))
    tried(agent, whole, pages=1)

    with killed(Counting, "step", 5):  # of each try its action, and the beginning of the next
        tried(agent, file, pages=1)
    assert [row["task"] for row in lines(file)[1:]] == ["shop/a", "shop/b"]
    world = Counting()
    rows = tried(agent, file, world, pages=1)
    assert world.resets + world.begun == 2 and [(row["task"], row["seed"]) for row in rows] == PAIRS
    drop = lambda row: {key: value for key, value in row.items() if key != "seconds"}
    assert list(map(drop, lines(file))) == list(map(drop, lines(whole)))
    again = Counting()
    assert tried(agent, file, again) == rows and again.resets == 0


class Named(Counting):
    """The goal names the task."""

    def _see(self, k, error=""):
        return dataclasses.replace(super()._see(k, error), goal=f"Do {self.starts[k].task}.")


def test_a_page_whose_try_is_over_begins_the_next_while_the_others_go_on(scripted, tmp_path):
    """Guards: seven pages that wait for the eighth; a goal, a clock or an end of the try before. One try goes
    on to the horizon beside three that stop at once."""
    agent = scripted(lambda prompt: act("click [1]" if "shop/a" in prompt else "stop [x]"))
    rows = tried(agent, tmp_path / "tries", world := Named(), horizon=5)
    assert world.taken == [["click [1]", "stop [x]"], ["click [1]", "mail/a"], ["click [1]", "stop [x]"],
                           ["click [1]", "mail/b"], ["click [1]", "stop [x]"]]
    assert [(row["task"], row["end"], len(row["actions"])) for row in rows] == [
        ("shop/a", "horizon", 5), ("shop/b", "stop", 1), ("mail/a", "stop", 1), ("mail/b", "stop", 1)]
    # Nobody writes an action, and the next begin all the same.
    silent = tried(scripted(lambda prompt: "No."), tmp_path / "silent", Named())
    assert [row["end"] for row in silent] == ["malformed"] * 4


def test_a_try_is_written_while_the_others_beside_it_go_on(scripted, tmp_path):
    """Guards: lines that wait for the slowest of the pages that are played side by side."""
    file, seen = tmp_path / "tries.jsonl", []

    class Watching(Counting):
        def step(self, actions):
            seen.append([row["task"] for row in lines(file)[1:]] if file.exists() else [])
            return super().step(actions)

    first = iter([act("stop [x]")])
    agent = scripted(lambda prompt: next(first, act("click [1]")))
    tried(agent, file, Watching(), PAIRS[:2])
    assert seen[0] == [] and seen[1:] == [["shop/a"]] * 2


def test_a_try_is_drawn_alike_whoever_is_beside_it(scripted, tmp_path):
    """Guards: draws that depend on the place in a group; one draw for all tasks of a benchmark without
    seeds."""
    drawn = []
    for pages in (1, 4):
        agent = scripted(lambda prompt: act("click [2]"))
        tried(agent, tmp_path / str(pages), pages=pages, temperature=0.7)
        drawn.append(agent.seeds)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4


def test_a_file_that_is_cut_at_any_byte_goes_on_and_a_broken_line_is_named(scripted, tmp_path):
    """Guards: a kill in the middle of a write that joins two lines; inside of a character (a
    UnicodeDecodeError), of the first line, or before a line's end. What stood whole is kept and not made
    again."""
    file, agent = tmp_path / "tries.jsonl", scripted(lambda prompt: act("stop [Tee für 3 €]"))
    tried(agent, file, pairs=PAIRS[:3])
    whole = file.read_bytes()
    assert "€".encode() in whole
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        rows = tries.read_tries(file, MADE)
        assert rows == lines(file)[1:] and file.read_bytes() == whole[:whole[:cut].rfind(b"\n") + 1], cut
        if cut % 97 == 0 or whole[cut - 1:cut + 1] == b"\xe2\x82":
            again = tried(agent, file, world := Counting(), PAIRS[:3], pages=1)
            assert [row["task"] for row in again] == [task for task, _ in PAIRS[:3]]
            assert world.resets + world.begun == 3 - len(rows) and file.read_bytes().count(b"\n") == 4
    file.write_bytes(whole.replace(b'"task"', b"task", 1))
    with pytest.raises(ValueError, match=rf"{file}:2: this is no JSON"):
        tried(agent, file)
    file.write_text('{"mine": 1}')  # one line without its end, of something else
    with pytest.raises(ValueError, match="holds no tries"):
        tried(agent, file)
    assert file.read_text() == '{"mine": 1}'


def test_a_try_that_takes_too_long_fails_and_the_next_ones_have_their_own_time(scripted, tmp_path):
    """Guards: an agent blamed for a slow site; a clock that runs on from one group of pages to the next."""
    class Slow(Counting):
        def step(self, actions):
            if not self.begun and parse_action("click [1]") in actions:
                time.sleep(0.2)
            return super().step(actions)

    rows = tried(scripted(lambda prompt: act("click [1]")), tmp_path / "slow", Slow(), seconds=0.1)
    assert [row["failed"] for row in rows] == ["not over after 0.1 s"] * 2 + [""] * 2
    assert [row["end"] for row in rows] == ["failed"] * 2 + ["horizon"] * 2
    assert [len(row["actions"]) for row in rows] == [2, 2, 3, 3]


def test_miniwob_is_a_benchmark_in_a_real_browser(scripted, tmp_path):
    """Guards: a world that lists tasks that it does not play; a page in which a try before left something."""
    agent = scripted(lambda prompt: act("click [4]"))
    pairs = [("enter-text", 1000003), ("click-test", 1000003), ("enter-text", 1000004),
             ("click-tab", 1000003)]
    with benchmarks.world(Options("miniwob", step_seconds=60)) as web:
        assert len(web.tasks()) == 130
        rows, one_by_one = (tried(agent, tmp_path / str(pages), web, pairs, pages=pages, keep_pages=True)
                            for pages in (4, 1))
    for row, again in zip(rows, one_by_one, strict=True):
        assert row["pages"] == again["pages"] and row["goal"] == again["goal"] and row["failed"] == ""
    assert rows[0]["end"] == "world" and rows[0]["site"] == "miniwob" and rows[0]["reward"] == 0


def test_tasks_are_chosen_by_glob_and_spread_by_a_limit():
    tasks = [f"{site}/task_{n}" for site in ("gmail", "xero") for n in range(10)]
    assert benchmarks.chosen(tasks, []) == tasks
    assert benchmarks.chosen(tasks, ["xero/*", "gmail/task_3"]) == ["gmail/task_3", *tasks[10:]]
    few = benchmarks.chosen(tasks, [], 4)
    assert len(few) == 4 and {task.split("/")[0] for task in few} == {"gmail", "xero"}
    assert [len(set(benchmarks.chosen(tasks, [], limit))) for limit in range(1, 22)] == [*range(1, 21), 20]
    assert benchmarks.chosen(tasks, ["ten"], named={"ten": ["xero/*"]}) == tasks[10:]
    with pytest.raises(ValueError, match=r"--tasks gmial/\*: no task has such a name; there are 20, such"):
        benchmarks.chosen(tasks, ["gmial/*"])


NOTES = Options("infinity", sites=str(Path(__file__).parent / "sites"), step_seconds=60)


def closed(monkeypatch):
    """From here on no Chromium is started: all tries are there, or refused."""
    monkeypatch.setattr(Infinity, "__enter__", lambda web: web)
    monkeypatch.setattr(Infinity, "__exit__", lambda *_: None)


def star(prompt):
    """Stars the note on the holiday, then stops."""
    bare = re.search(r"\[(\d+)\] generic[^[]*☆ Holiday", prompt)
    return act(f"click [{bare[1]}]" if bare else "stop [done]")


def test_the_command_plays_a_benchmark_and_goes_on(scripted, tmp_path, monkeypatch):
    """Guards: totals of something else than the file; an option of the world that changes between tries; a
    second page for a try that is there. In a real Chromium: of three tasks the script can do the easy one."""
    agent = scripted(star)
    monkeypatch.setattr(evaluate, "agent", lambda config: contextlib.nullcontext(agent.lm))
    config = evaluate.Config(on=NOTES, tasks=("notes/*",), json=str(tmp_path / "tries.jsonl"), horizon=3,
                             max_new_tokens=64)
    found = evaluate.run(config)
    assert (found["success"], found["n"], found["failed"]) == (1 / 3, 3, 0)
    assert found["per_difficulty"]["easy"]["success"] == 1 and found["sites"] == NOTES.sites
    calls = len(agent.calls)
    closed(monkeypatch)
    assert evaluate.run(config) == found and len(agent.calls) == calls
    assert found["per_side"]["training"]["n"] == 2 and found["per_side"]["held-out"]["n"] == 1
    slower = dataclasses.replace(config, on=dataclasses.replace(NOTES, step_seconds=70))
    with pytest.raises(ValueError, match="made with step_seconds 60, and now it would be 70; give another"):
        evaluate.run(slower)


def test_a_file_of_tries_goes_on_with_what_they_were_made_of_alone(scripted, tmp_path, monkeypatch):
    """Guards: one success rate of two things: a goal, verifier or application that was changed, an agent
    trained again, under the old names. DIR/ is DIR."""
    agent = scripted(star)
    monkeypatch.setattr(evaluate, "agent", lambda config: contextlib.nullcontext(agent.lm))
    sites, weights = tmp_path / "sites", tmp_path / "agent" / "model.safetensors"
    shutil.copytree(NOTES.sites, sites)
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    config = evaluate.Config(on=dataclasses.replace(NOTES, sites=str(sites)), tasks=("notes/task_e1",),
                             json=str(tmp_path / "tries.jsonl"), checkpoint=str(weights.parent), horizon=3)
    found, calls = evaluate.run(config), len(agent.calls)
    slash = dataclasses.replace(config, checkpoint=f"{weights.parent}/", on=dataclasses.replace(
        config.on, sites=f"{sites}/"))
    closed(monkeypatch)
    assert evaluate.run(slash) == found and len(agent.calls) == calls
    notes = sites / "notes"
    for what, file in (("task list", notes / "real-tasks.json"), ("weights", weights),
                       ("verifiers", notes / "real-tasks" / "task_h1.py"),
                       ("applications", notes / "js" / "app.js")):
        before = file.read_bytes()
        file.write_bytes(before.replace(b"Star the note", b"Star a note") if what == "task list" else
                         before + b"\n")
        with pytest.raises(ValueError, match=f"its tries were made with {what} '.*', and now it would be"):
            evaluate.run(config)
        file.write_bytes(before)
    with pytest.raises(ValueError, match="made with try_seconds 1800.0, and now it would be 600"):
        evaluate.run(dataclasses.replace(config, try_seconds=600))
    assert evaluate.run(config) == found


def test_train_learns_on_the_pages_of_a_benchmark(taught, tmp_path):
    """Guards: --world real --benchmark, from the explorer's recording to an update whose rewards a verifier
    gave."""
    recording = tmp_path / "notes.jsonl.gz"
    explore.main(explore.Config(out=recording, on=NOTES, tasks=("notes/*",), per_task=4, successes=0, most=4,
                                horizon=3))
    rows = [json.loads(row) for row in gzip.decompress(recording.read_bytes()).splitlines()]
    for row in rows:  # it wins none of these: as if it had won the first try of each task
        row.update(reward=int(row["seed"] == 0), terminated=True, truncated=False)
    recording.write_bytes(gzip.compress("".join(map(explore.as_line, rows)).encode()))
    dreaming = dream.Config(tasks=2, group=2, horizon=2, max_new_tokens=16, expert_fraction=0.0)
    config = recipe.Train(
        policy=str(taught), out=str(tmp_path / "agent"), trajectories=str(recording), world="real", on=NOTES,
        updates=1, minibatches=2, tokens=4096, context=1024, sampler="transformers", drop_limit=1.0,
        first_pages=True, evaluate_seeds="1000000:2", dreaming=dreaming)
    train.train(config)
    first, looked = map(json.loads, (tmp_path / "agent.run" / "metrics.jsonl").read_text().splitlines()[:2])
    assert first["real_trajectories"] == 4 and first["dreams"] == 0 and "real_success" in first
    assert first["looked_at"] == "held-out tasks"
    train.train(dataclasses.replace(config, world="dream", evaluate_every=0, world_model=str(taught),
                                    out=str(tmp_path / "blind")))  # no site is asked for its tasks


def test_no_task_of_a_benchmark_is_both_learned_from_and_looked_at(tmp_path, monkeypatch):
    """Guards: tasks learned from and then evaluated, where seeds mean nothing. The explorer records the
    training side to learn from, the held-out side to audit; train.py looks at the latter alone; the sides are
    halves, and the same for a task of WebArena by any name."""
    names = [f"gmail/task_{n}" for n in range(1000)]
    assert 450 < len(benchmarks.of_side(names, data.TRAINING)) < 550
    assert all(len({data.side(f"{kind}.{n}") for kind in ("webarena", "webarenalite")}) == 1
               for n in range(50))
    played = []
    monkeypatch.setattr(explore, "collect", lambda web, batch, horizon: played.extend(batch) or [])
    for first_seed, side in ((0, "training"), (1_000_000, "held-out")):
        played.clear()
        explore.main(explore.Config(out=tmp_path / f"{side}.gz", on=NOTES, tasks=("notes/*",), per_task=1,
                                    successes=0, most=1, first_seed=first_seed))
        assert played and all(data.side(task) == side for task, _ in played)
    with pytest.raises(ValueError, match=r"none of these 1 tasks is on the training side .* notes/task_h1"):
        explore.main(explore.Config(out=tmp_path / "x.gz", on=NOTES, tasks=("notes/task_h1",)))
    config = recipe.Train(world="real", on=NOTES, evaluate_seeds="1000000:9")
    recipe.check_recorded([recorded(["click [1]"], task="notes/task_e1")], config)
    with pytest.raises(ValueError, match="'notes/task_h1' is held out .*must not be learned from"):
        recipe.check_recorded([recorded(["click [1]"], task="notes/task_h1")], config)
    looked = []
    monkeypatch.setattr(measure, "play", lambda web, actor, starts, *_, **__: looked.extend(starts) or [])
    web = benchmarks.world(NOTES)
    starts, what = benchmarks.starts(NOTES, web, config.evaluate_seeds)
    measure.look(web, None, starts, what, config.evaluate_horizon, 9)
    assert [start.task for start in looked] == ["notes/task_h1"]


def row_of(task: str, level: str, reward: float, failed: str = "", **more) -> dict:
    return DONE | {"task": task, "site": task.split("/")[0], "difficulty": level, "reward": reward,
                   "failed": failed} | more


def test_totals_leave_out_what_failed_and_are_made_by_site_and_difficulty():
    """Guards: a page's failures counted as the agent's. Of five tries one failed. 3 of 4 are right; easy 2 of
    2, hard 1 of 2; shop 2 of 2, mail 1 of 2. One of the right ones passes untouched: 2 of 3."""
    rows = [row_of("shop/a", "easy", 1.0), row_of("shop/b", "hard", 1.0), row_of("mail/a", "easy", 1.0),
            row_of("mail/b", "hard", 0.0), row_of("mail/c", "hard", 0.0, "click [1]: the page hung for 10 s")]
    found = tries.totals(rows, ["shop/a", "other/z"])
    assert (found["success"], found["n"], found["failed"]) == (0.75, 4, 1)
    assert found["interval"] == measure.wilson(3, 4)
    assert {key: (row["success"], row["n"]) for key, row in found["per_difficulty"].items()} == {
        "easy": (1.0, 2), "hard": (0.5, 2)}
    assert {key: (row["success"], row["n"], row["failed"]) for key, row in found["per_site"].items()} == {
        "shop": (1.0, 2, 0), "mail": (0.5, 2, 1)}
    assert found["success of all"] == 3 / 5 and found["per_site"]["mail"]["success of all"] == 1 / 3
    assert (without := found["without those that pass untouched"])["n"] == 3 and without["success"] == 2 / 3
    assert tries.totals(rows)["without those that pass untouched"] is None
    assert found["failures"] == {"the page hung": 1} and found["minutes, added over tries"] == 0.5
    assert (found["tokens_read"], found["tokens_written"]) == (50, 10)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # runpy, of a program that a test imported
@pytest.mark.parametrize("words, says", [
    (["evaluate.py", "--benchmark", "infinty"], "no benchmark 'infinty'; there are miniwob, infinity"),
    (["evaluate.py", "--benchmark", "openended", "--task-file", "x", "--grader-url", "http://a/v1"],
     "a grader needs both: give --grader-url"),
    (["evaluate.py", "--benchmark", "miniwob", "--sites", "apps"], "--sites is for --benchmark infinity"),
    (["evaluate.py", "--benchmark", "infinity"], "writes each try when it ends: give --json FILE"),
    (["audit.py", "--replay", "--benchmark", "infinity", "--json", "x"],
     "audits know MiniWoB++ alone: leave --benchmark out"),
    (["evaluate.py", "--table", "TRIES"], "TRIES is no result of --json"),
    (["evaluate.py", "--benchmark", "infinity", "--json", "x", "--pages", "0"], "--pages 0: give 1 or more"),
    (["evaluate.py", "--benchmark", "infinity", "--json", "x", "--limit", "-2"], "--limit -2: give 0"),
    (["evaluate.py", "--horizon", "-1"], "--horizon -1: give 0 or more"),
    (["evaluate.py", "--benchmark", "infinity", "--json", "x", "--seeds", "2000000:3"],
     "--seeds 2000000:3: a seed changes nothing in infinity"),
    (["train.py", "laptop", "--benchmark", "infinty"], "no benchmark 'infinty'; there are miniwob, infinity"),
    (["-m", "worlds.explore", "--benchmark", "infinty"], "no benchmark 'infinty'; there are"),
    (["-m", "worlds.explore", "--pages", "0"], "--pages 0: give 1 or more"),
])
def test_a_mistake_on_the_command_line_is_one_sentence(tmp_path, monkeypatch, capsys, words, says):
    """Guards: a traceback, or silence, for a word that was mistyped. (tyro frames what a config refuses.)"""
    tries = tmp_path / "TRIES"
    tries.write_text('{"made": {}}\n{"task": "a"}\n')
    program, *words = words[words[0] == "-m" :]
    monkeypatch.setattr(sys, "argv", [program, *(str(tries) if word == "TRIES" else word for word in words)])
    run = functools.partial(runpy.run_path, str(Path(__file__).parents[1] / program))
    if not program.endswith(".py"):
        run = functools.partial(runpy.run_module, program, alter_sys=True)
    with pytest.raises(SystemExit) as ended:
        run(run_name="__main__")
    said = f"{ended.value.code} " + " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert says in said and "Traceback" not in said
