"""Claims about worlds/benchmarks.py and worlds/envs.py: which tasks are played, by whom, and that a page's
failure is its own. A batched world that counts, and applications in a real Chromium."""
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GOAL, act, counting_page, record, recorded
from helpers.pages import command

import data
import dream
import evaluate
import train
from config import TRAIN, Benchmark, UserError
from data import Obs, Start
from worlds import benchmarks, envs, explore

NOTES = Benchmark("infinity", str(Path(__file__).parent / "sites"), step_seconds=60)


class Counting:
    """A batched world. `taken`: what each step was asked of each page. A page of task `lost` fails."""

    def __init__(self):
        self.taken, self.failures = [], []

    def reset(self, starts):
        self.tasks, self.failures = [start.task for start in starts], [""] * len(starts)
        return [self._see(k) for k in range(len(starts))]

    def _see(self, k):
        self.failures[k] = "the page hung" if self.tasks[k] == "lost" else ""
        return Obs(f"Do {self.tasks[k]}. {GOAL}", "http://count/0", counting_page(0))

    def step(self, asked):
        self.taken.append([what.task if isinstance(what, Start) else what and str(what) for what in asked])
        for k, what in enumerate(asked):
            self.tasks[k] = what.task if isinstance(what, Start) else self.tasks[k]
        over = [str(what).startswith("stop") for what in asked]
        return [self._see(k) for k in range(len(asked))], [0.0] * len(asked), over, [False] * len(asked)


def played(scripted, count, tasks, **more):
    """(the rollouts, the world, the seeds of what was sampled). Task a presses More, every other stops."""
    agent = scripted(lambda prompt: act("click [1]" if "Do a." in prompt else "stop [x]"))
    ended = []
    done = envs.Envs(world := Counting(), count).play(agent, [data.start(task) for task in tasks], 5, 60,
                                                      ended=ended.append, **more)
    assert sorted(map(id, ended)) == sorted(map(id, done))
    return done, world, agent.seeds


def test_a_page_whose_try_is_over_begins_the_next_while_the_others_go_on(scripted):
    """Guards: pages that wait for the slowest; a try that gets another's page or goal; samples that depend on
    who is beside whom; a page's failure that ends more than its own try, or that is not tried once more."""
    done, world, _ = played(scripted, 2, "abcd")
    assert world.taken == [["click [1]", "stop [x]"], ["click [1]", "c"], ["click [1]", "stop [x]"],
                           ["click [1]", "d"], ["click [1]", "stop [x]"]]
    assert [(one.start.task, one.start.goal[:5], one.truncated, len(one.steps)) for one in done] == [
        ("a", "Do a.", True, 5), *((task, f"Do {task}.", False, 1) for task in "bcd")]
    alone, _, seeds = played(scripted, 1, "abcd", temperature=0.7)
    beside, _, others = played(scripted, 4, "abcd", temperature=0.7)
    assert alone == beside and sorted(seeds) == sorted(others) and len(set(seeds)) == 8
    done, world, _ = played(scripted, 2, ["b", "lost", "c"])
    assert [envs.failed(one) for one in done] == [False, True, False] and done[1].steps == []
    assert sum("lost" in asked for asked in world.taken) == 1, "after the reset once more"


def test_tasks_are_chosen_by_glob_and_spread_by_a_limit():
    """Guards: one site's tasks alone where a few are wanted; a mistyped name that plays nothing."""
    tasks = [f"{site}/task_{n}" for site in ("gmail", "xero") for n in range(10)]
    assert benchmarks.chosen(tasks, ["xero/*", "gmail/task_3"]) == ["gmail/task_3", *tasks[10:]]
    assert {task.split("/")[0] for task in benchmarks.chosen(tasks, [], 4)} == {"gmail", "xero"}
    assert [len(set(benchmarks.chosen(tasks, [], limit))) for limit in range(1, 22)] == [*range(1, 21), 20]
    assert benchmarks.chosen(tasks, ["ten"], named={"ten": ["xero/*"]}) == tasks[10:]
    for on, says in ((Benchmark("miniwob", sites="x"), "--sites is not for"),
                     (Benchmark("openended"), "give --task-file"), (Benchmark("x"), "no benchmark")):
        with pytest.raises(UserError, match=says):
            benchmarks.world(on)
    with pytest.raises(UserError, match=r"--tasks gmial/\*: no task has such a name; there are 20, such"):
        benchmarks.chosen(tasks, ["gmial/*"])


def test_no_task_of_a_benchmark_is_both_learned_from_and_evaluated(tmp_path):
    """Guards: tasks learned from and then evaluated, where seeds mean nothing. The sides are halves, and the
    same for a task of WebArena by any name."""
    names = [f"gmail/task_{n}" for n in range(1000)]
    assert 450 < len(benchmarks.of_side(names, data.TRAINING)) < 550
    assert all(data.side(f"webarena.{n}") == data.side(f"webarenalite.{n}") for n in range(50))
    starts = benchmarks.dev_starts(NOTES, benchmarks.world(NOTES), "1000000:9", ["notes/task_e1"])
    assert "notes/task_h1" in [start.task for start in starts]
    assert all(data.side(start.task) == data.HELD_OUT for start in starts)
    for task, held_out in (("notes/task_e1", False), ("notes/task_h1", True)):
        record(file := tmp_path / "r.jsonl", [recorded(["click [2]"], task=task)])
        config = replace(TRAIN["laptop"], on=NOTES, recorded=str(file), first_pages=False)
        if not held_out:
            assert dream.starts(config)
            continue
        with pytest.raises(UserError, match="'notes/task_h1' is held out"):
            dream.starts(config)


def test_an_application_is_evaluated_recorded_and_learned_on_in_a_real_chromium(serving, taught, tmp_path):
    """Guards: a verifier that nobody asks; an explorer on the held-out side; a benchmark that train.py does
    not learn on. The agent stars the note on the holiday, which is one of the three tasks."""
    def star(body):
        bare = re.search(r"\[(\d+)\] generic[^[]*☆ Holiday", body["messages"][-1]["content"])
        return act(f"click [{bare[1]}]" if bare else "stop [done]")

    words = ["--benchmark", "infinity", "--sites", NOTES.sites, "--tasks", "notes/*", "--step-seconds", 60]
    words += ["--horizon", 3, "--out", tmp_path / "f"]
    said = command(evaluate, "--agent-url", serving(star).url, *words)
    assert "f: stop 3" in said and {row["task"]: row["reward"] for row in evaluate.read(tmp_path / "f")} == {
        "notes/task_e1": 1.0, "notes/task_m1": 0.0, "notes/task_h1": 0.0}
    file = tmp_path / "notes.jsonl.gz"
    explore.record(explore.Explore(out=file, on=NOTES, tasks=("notes/*",), per_task=4, successes=0, most=4,
                                   horizon=3))
    done = data.read_trajectories(file)
    assert {one.task for one in done} and all(data.side(one.task) == data.TRAINING for one in done)
    won = [replace(one, reward=int(one.seed == 0), terminated=True, truncated=False) for one in done]
    record(learned := tmp_path / "won.jsonl", won)  # it wins none: as if it had won the first of each task
    train.train(replace(
        TRAIN["laptop"], policy=str(taught), out=str(tmp_path / "agent"), recorded=str(learned), on=NOTES,
        real_fraction=1.0, updates=1, tasks=2, group=2, horizon=2, max_new_tokens=16, discard_limit=1.0,
        compute="float32", evaluate_every=1, evaluate_seeds="1000000:1", evaluate_horizon=2))
    lines = (tmp_path / "agent.run/metrics.jsonl").read_text().splitlines()
    first, last = map(json.loads, lines)
    assert first["real_rollouts"] == 4 and first["dreams"] == 0 and 0 <= last["real_success"] <= 1
