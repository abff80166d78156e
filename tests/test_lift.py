"""Claims about the driver of the long experiments (bench/drive.py), the table that it makes (bench/lift.py),
and how it is printed (bench/tables.py). Stages are small programs here, which run as the real ones do."""
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import recorded
from helpers.processes import running, wait_for
from helpers.runs import typed
from helpers.shown import drawn, table

import audit
import data
import finetune
import lm
import recipe
from bench import drive, lift, tables
from bench.drive import Stage
from tiny import explore, lessons
from worlds import miniwob

ROOT = Path(__file__).resolve().parent.parent

# Says that it began, does what its flags say, makes its file and says that it ended.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace

folder, name, *flags = sys.argv[1:]
folder = Path(folder)
def note(what):
    with open(folder / "calls", "a") as calls:
        calls.write(f"{what} {name} {os.getpid()}\\n")
note("begin")
if "fail" in flags and not (folder / "mended").exists():
    print("a long story\\nno memory")
    sys.exit(3)
if "wait" in flags:
    while not (folder / "go").exists():
        time.sleep(.02)
if "meet" in flags:  # with another that runs at the same time
    while sum(line.startswith("begin") for line in open(folder / "calls")) < 2:
        time.sleep(.02)
sum(k * k for k in range(10 ** 6))
(folder / f"{name}.json").write_text(json.dumps({"made": name}))
if "late" in flags and not (folder / "mended").exists():
    sys.exit(4)
time.sleep(1.0 if "linger" in flags else 0.0)
note("end")
"""


@pytest.fixture
def stage(tmp_path):
    """stage(name, *flags, needs=(), minutes=1): a stage in tmp_path that runs PROGRAM."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def made(name: str, *flags: str, **more) -> Stage:
        return Stage(tmp_path, name, (str(program), str(tmp_path), name, *flags), tmp_path / f"{name}.json",
                     **more)
    return made


def calls(folder: Path, what: str = "begin") -> list[str]:
    """The names of the stages that began (or ended), in order."""
    file = folder / "calls"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [name for did, name, _ in lines if did == what]

# ---- the driver --------------------------------------------------------------------------------------------

DRIVER = """
import sys
sys.path[:0] = [{root!r}]
from pathlib import Path
from types import SimpleNamespace
from bench.drive import Stage, work
folder = Path({folder!r})
def stage(name, *flags, **more):
    command = str(folder / "program.py"), str(folder), name, *flags
    return Stage(folder, name, command, folder / f"{{name}}.json", **more)
first = stage("first")
second = stage("second", "wait", needs=(first,))
sys.exit(len(work([first, second, stage("third", needs=(second,))], lambda _: "a", jobs=1)))
"""


def test_a_killed_driver_takes_its_stage_along_and_goes_on_where_it_was(stage, tmp_path):
    """Guards: a stage that goes on unseen beside its second start; stages made twice; a table of minutes in
    which a run that was killed late took no time."""
    stage("first")  # writes the program
    (tmp_path / "driver.py").write_text(DRIVER.format(root=str(ROOT), folder=str(tmp_path)))
    driver = subprocess.Popen([sys.executable, tmp_path / "driver.py"], stdout=subprocess.DEVNULL)
    wait_for(lambda: calls(tmp_path) == ["first", "second"], 60)
    alone = int((tmp_path / "calls").read_text().split()[-1])
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    try:
        wait_for(lambda: not running(alone), 10)
    finally:
        if running(alone):
            os.kill(alone, signal.SIGKILL)
    before = drive.read(stage("second").record)
    drive.write(stage("second").record, before | {"wall": 600.0, "cpu": 500.0})
    (tmp_path / "go").touch()
    again = subprocess.run([sys.executable, tmp_path / "driver.py"], capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert calls(tmp_path) == ["first", "second", "second", "third"]
    assert calls(tmp_path, "end") == ["first", "second", "third"]
    record = drive.read(stage("second").record)
    assert (before["starts"], record["starts"]) == (1, 2) and 600 < record["wall"] < 660
    assert 500 < record["cpu"] < 560 and record["command"][1:] == [str(tmp_path), "second", "wait"]
    assert subprocess.run([sys.executable, tmp_path / "driver.py"]).returncode == 0
    assert len(calls(tmp_path)) == 4, "something that is made was begun again"


def test_jobs_run_side_by_side_and_the_longest_way_goes_first(stage, tmp_path):
    """Guards: an hour at the end in which one core works; one stage at a time."""
    last = stage("last", minutes=1)
    head = stage("head", minutes=2)
    middle = stage("middle", needs=(head,), minutes=9)
    assert not drive.work([last, stage("other", minutes=5), middle, head], lambda _: "x", jobs=1)
    assert calls(tmp_path) == ["head", "middle", "other", "last"]
    (tmp_path / "calls").unlink()
    assert not drive.work([stage("one", "meet"), stage("two", "meet")], lambda _: "x", jobs=2)
    assert sorted(calls(tmp_path, "end")) == ["one", "two"]


def test_a_stage_that_was_made_before_what_it_now_waits_for_is_told_of_once_and_last(stage):
    """Guards: rows of old tries written before the agent was run in the one world (bench.lift --world), and
    so without it: the driver died of a record that was not there."""
    tried, dreams, told = stage("tried"), stage("dreams"), []
    assert not drive.work([tried], lambda _: "x")
    again = stage("tried", after=(dreams,))
    assert not drive.work([dreams, again], lambda _: "x", after=lambda done: told.append(done.name))
    assert told == ["dreams", "tried"]


@pytest.mark.parametrize("how", ["needs", "after"])
def test_a_stage_begins_when_what_it_waits_for_has_ended(stage, tmp_path, how):
    """Guards: an evaluation that takes a core from a program which wrote its file and goes on."""
    first = stage("first", "linger")
    assert not drive.work([first, stage("second", **{how: (first,)})], lambda _: "x", jobs=2)
    said = [line.rsplit(" ", 1)[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert said == ["begin first", "end first", "begin second", "end second"]


def test_a_stage_that_fails_is_named_with_its_end_and_all_else_goes_on(stage, tmp_path, capfd):
    """Guards: a night that one failure ends, of which nobody says why; stages without what they need, or with
    the file of a program that failed behind it (and the next start takes that for made)."""
    bad, late = stage("bad", "fail", minutes=5), stage("late", "late", minutes=4)
    after, behind = stage("after", needs=(bad,)), stage("behind", needs=(late,))
    everything = [bad, after, late, behind, stage("good")]
    assert drive.work(everything, lambda _: "x", jobs=1) == [bad, late]
    assert calls(tmp_path) == ["bad", "late", "good"] and not late.made()
    said = capfd.readouterr().out
    assert re.search(r"/bad FAILED \(status 3\).*bad\.txt:\n.*no memory", said, re.DOTALL), said
    (tmp_path / "mended").touch()
    assert drive.work(everything, lambda _: "x", jobs=1) == []
    assert sorted(calls(tmp_path)) == ["after", "bad", "bad", "behind", "good", "late", "late"]


def test_what_another_recipe_or_command_made_is_refused_before_anything_runs(stage, tmp_path):
    """Guards: a table whose rows were made by different code, or with other flags."""
    assert not drive.work([stage("a")], lambda _: "old")
    for wrong, of, why in ((stage("a"), "new", r"a is of recipe old .* this code is recipe new"),
                           (stage("a", "wait"), "old", r"begun by\n.* a\nand now it would be\n.* a wait\n")):
        with pytest.raises(ValueError, match=f"(?s){why}.*another --out"):
            drive.work([stage("b"), wrong], lambda _, of=of: of)
    # The way out of a stage that nothing is made of is not the folder with hours of others in it.
    said = f"or remove {stage('a').makes} and {stage('a').record}$"
    for needed, way_out in ((False, said), (True, f"or remove {re.escape(str(tmp_path))}$")):
        wrong = stage("a", "wait")
        with pytest.raises(ValueError, match=way_out):
            drive.work([wrong] + [stage("b", needs=(wrong,))] * needed, lambda _: "old")
    # What it is made of was made again: by the same command, with another end.
    first = stage("first")
    second = stage("second", needs=(first,))
    assert not drive.work([first, second], lambda _: "old")
    first.makes.write_text('{"made": "again"}')
    with pytest.raises(ValueError, match="second was made of another .*first, which has been made again"):
        drive.work([first, second], lambda _: "old")
    (tmp_path / "calls").write_text("begin a 0\n")
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ValueError, match="nothing in .* tells what made it; give another --out"):
        drive.work([stage("b"), stage("c")], lambda _: "old")
    assert calls(tmp_path) == ["a"]


def test_code_that_changes_while_it_runs_is_noticed(stage, tmp_path):
    """Guards: a night in which somebody pulls: later rows are of other code, under the old name."""
    code = lambda _: "new" if calls(tmp_path) else "old"
    with pytest.raises(ValueError, match="recipe old when this began, and is new now"):
        drive.work([stage("a"), stage("b")], code, jobs=1)
    assert calls(tmp_path) == ["a"] and drive.read(stage("a").record)["recipe"] == "old"


def test_what_another_driver_is_making_is_not_begun_a_second_time(stage, tmp_path):
    """Guards against two drivers, started by mistake, that write the same checkpoint."""
    slow = drive.Running(stage("a", "wait"), "x")
    try:
        with pytest.raises(ValueError, match="somebody else is making .*a: wait for it, or end it"):
            drive.work([stage("a", "wait")], lambda _: "x")
    finally:
        slow.process.kill()
        slow.process.wait()


def test_words_that_need_a_result_are_asked_for_when_it_is_there(stage, tmp_path):
    """Guards: "cloned for as long as dreaming takes" with the time of nothing, or of a file that a kill cut
    in half."""
    first = stage("first", minutes=1)
    later = stage("later", needs=(first,), more=lambda: [drive.read(first.makes)["made"]])
    first.makes.write_text('{"made": "fir')
    assert not first.made()
    for _ in range(2):
        assert not drive.work([later, first], lambda _: "x", jobs=2)
    assert drive.read(later.record)["command"][-1] == "first" and calls(tmp_path) == ["first", "later"]
    for made in (first, later):
        made.makes.unlink()  # its record stays
    assert not drive.work([later, first], lambda _: "x", jobs=2)


def test_the_line_of_progress_counts_and_stretches_its_guesses(stage, tmp_path):
    """Guards: "5 minutes left" for hours."""
    done, todo = stage("done", minutes=2), [stage("b", minutes=3), stage("c", minutes=1)]
    drive.write(done.makes, {})
    drive.write(done.record, {"wall": 240.0})  # twice its guess
    assert drive.progress([done, *todo], todo, [], jobs=1).startswith("1 of 3 stages made, about 8 min left")
    chained = [todo[0], replace(todo[1], needs=(todo[0],))]  # no second job shortens a row
    assert "about 8 min left" in drive.progress([done, *chained], chained, [], jobs=2)


@pytest.mark.parametrize("says, minutes, left", [
    ("", 1, 7), ("50%|#| 4/8 [00:05<09:00]", 1, 7),  # a first step says nothing yet
    ("20%|#| 1/5 [01:00<07:00]", 1, 15),  # 8 minutes, not 4: as slow will be the next
    ("", 6, 6),  # it goes on though its time is over: the next takes 6 of 4, too
    ("9%|#| 1/11 [01:00<10:00, 60s/step]", 2, 22)])
def test_the_line_of_progress_learns_from_the_stage_that_runs(stage, says, minutes, left):
    """Guards against "about 6 min left" until minute ten, on a machine half as fast."""
    first = stage("first", minutes=4)
    then = stage("then", minutes=4, needs=(first,))
    run = SimpleNamespace(stage=first, seconds=lambda: 60.0 * minutes, says=lambda: says)
    assert f"about {left} min left" in drive.progress([first, then], [then], [run], jobs=2)


def test_the_recipe_is_the_code_and_not_its_comments(tmp_path, monkeypatch):
    """Guards: rows of different code under one name, and a run that a mended comment ends."""
    monkeypatch.setattr(drive, "ROOT", tmp_path)

    def of(text: str, weights: str = "w") -> str:
        (tmp_path / "a.py").write_text(text)
        (tmp_path / "base").write_text(weights)
        return drive.recipe("*.py", "base")
    plain = 'def f():\n    return "why"\n'
    first = of('def f():\n    """Says."""\n    return "why"\n')
    assert first == of('# New.\ndef f():\n    """Says more."""\n    return "why"  # so\n')
    assert len({first, of(plain.replace("why", "how")), of(plain, "v")}) == 3


def test_the_recipe_holds_all_that_is_learned_from():
    """Guards: rows under one name, of which some learned our pages as they were before. And a file that was
    renamed, whose pattern finds nothing."""
    found = {pattern: set(ROOT.glob(pattern)) for pattern in lift.RECIPE}
    assert all(found.values()), [pattern for pattern, files in found.items() if not files]
    files = set.union(*found.values())
    templates = [ROOT / "node" / name for name in ("gptoss.py", "webworld.py")]  # its small models too
    assert {*miniwob.OURS.values(), *templates, ROOT / "gspo.py"} <= files

# ---- the table's plan --------------------------------------------------------------------------------------

def commands(config: lift.Config) -> set[str]:
    stages = {stage for last in lift.plan(config) for stage in lift.before(last)}
    return {" ".join(stage.command) for stage in stages}


def test_every_row_is_planned_once_and_no_evaluation_seed_is_used_by_default():
    """Guards: a row that is missing after ten hours; evaluation seeds that a try burns; one folder for two
    runs."""
    config = lift.Config()
    cells = list(lift.plan(config).values())
    keys = {(cell["row"], cell["demonstrations"], cell["seed"]) for cell in cells if cell["run"] == 0}
    main = {(row, count, seed) for row in tables.MAIN for count in (2, 10, 30) for seed in (0, 1, 2)}
    parts = {(row, 2, seed) for row in set(tables.NAMES) - set(tables.MAIN) for seed in (0, 1, 2)}
    assert len(cells) == len(keys) and keys == main | parts
    assert set(tables.NAMES) == set(lift.Row.__args__)
    assert data.parse_seeds(config.evaluation)[-1] in data.SEEDS["dev"]
    stages = [stage for last in lift.plan(config) for stage in lift.before(last)]
    assert len({stage.makes for stage in stages}) == len(set(stages)) == len({s.record for s in stages})
    with pytest.raises(ValueError, match="one folder for several runs"):
        lift.Config(out="runs/one", demonstrations=(2,), part_seeds=())
    lift.Config(out="runs/one", seeds=(1,), demonstrations=(2,), rows=("sft", "dreamer"))


def test_seeds_and_demonstrations_reach_every_stage_of_a_chain():
    """Guards: seeds that differ in dreams alone; a world model that saw other demonstrations than the
    agent."""
    for last, cell in lift.plan(lift.Config(demonstrations=(10,), seeds=(7,), part_seeds=(7,))).items():
        many = cell["demonstrations"] == 10
        for stage in lift.before(last)[:-1]:
            program, said = " ".join(stage.command).partition(" tiny")[0], " ".join(stage.command)
            seeds = {"sft.py world_model": ["--sft.seed 7"], "sft.py policy": ["--seed 7", "--sft.seed 7"],
                     "train.py": ["--seed 7"]}[program] + ["--demonstrations-seed 7"]
            assert all(f" {words}" in said for words in seeds), said
            assert ("--demonstrations 10" in said) == many, said
            assert ("--renamed 2" in said) == (many and program == "sft.py policy"), said


def test_another_run_of_a_seed_has_other_dice_and_nothing_else():
    """Guards: a second run that is the first again, or has an SFT agent or world model of its own; rows that
    are made once and stand there twice."""
    config = lift.Config(runs=2, demonstrations=(2,), seeds=(0, 1), part_seeds=(0, 1))
    first, second = ({(cell["row"], cell["seed"]): last for last, cell in lift.plan(config).items()
                      if cell["run"] == run} for run in (0, 1))
    assert commands(config) > commands(replace(config, runs=1)), "run 0 is as it was"
    assert {*second} == {(row, seed) for row in ("dreamer", *lift.PARTS) for seed in (0, 1)}
    for (row, seed), last in second.items():
        agent, before = last.needs[0], first[row, seed].needs[0]
        assert agent.needs == before.needs and str(agent.makes.parent) in last.command
        assert [(old, new) for old, new in zip(before.command, agent.command) if old != new] == [
            (str(before.makes.parent), str(agent.makes.parent)), (f"{seed}", f"{seed + 1000}")]
        assert agent.command[agent.command.index("--seed") + 1] == f"{seed + 1000}"
    plan = lift.plan(config)
    assert len({lift.file_of(config, cell) for cell in plan.values()}) == len({last.makes for last in plan}
                                                                             ) == len(plan)
    with pytest.raises(ValueError, match="at least 1"):
        lift.Config(runs=0)


def make_says(target: str, **variables: str) -> str:
    words = ["make", "-n", target, *(f"{name}={value}" for name, value in variables.items())]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.replace("\\\n", " ")


def test_make_runs_what_the_tables_are_made_of():
    """Guards: a `make` that leaves out updates or has commands of its own, and shows figures of no table."""
    said = make_says("tiny", RUN="runs/one", SEED="3", EVAL="1000100:10")
    words, = re.findall(r"-m bench\.lift(.*)", said)
    made = commands(tyro.cli(lift.Config, args=shlex.split(words)))
    same = lift.Config(seeds=(3,), part_seeds=(), demonstrations=(2,), rows=("sft", "dreamer"),
                       evaluation="1000100:10")
    of_table, of_all = commands(replace(same, six=True)), commands(replace(same, out="runs/one"))
    assert len(made) == 5 and made == {c.replace("runs/lift/of2/seed3", "runs/one") for c in of_table}
    here = (r" --(trajectories|transitions) runs/one/pages.jsonl.gz| "
            + " ".join(lift.SIX_UPDATES) + "| --tasks " + " ".join(lift.SIX))
    assert {re.sub(here, "", command) for command in made} == of_all, "pages, updates, nothing else"
    programs = re.findall(r"\.venv/bin/python (\S+\.py|-m (?!pip |playwright )\S+)", said)
    assert programs == ["-m bench.lift", "report.py"], "make calls a stage by itself"


def test_a_short_run_is_short_in_every_row():
    """Guards: a row whose own number of updates wins over --short's, and a trial of the driver that takes
    hours."""
    for row, stage in lift.chain(lift.Config(short=True), 2, 0).items():
        if stage.command[0] == "train.py":
            config = tyro.cli(recipe.Train, default=lessons.TRAIN, args=stage.command[2:])
            assert (config.updates, config.dreaming.tasks) == (2, 8), row


def test_only_the_untuned_world_model_may_drop_most_of_its_dreams():
    """Guards: a row that train.py stops after three updates, since hardly any of its dreams can be read:
    which is what the row is there to show. Elsewhere it should stop."""
    for row, stage in lift.chain(lift.Config(), 2, 0).items():
        if stage.command[0] == "train.py":
            config = tyro.cli(recipe.Train, default=lessons.TRAIN, args=stage.command[2:])
            past = [{"dreams": 50, "dropped_dreams": 49, "drops": {"world model: unreadable": 49}}] * 3
            stops = pytest.raises(ValueError, match="were dropped")
            with contextlib.nullcontext() if row == "untuned" else stops:
                recipe.check_drops(past, config)


def test_as_published_is_the_papers_recipe_but_for_what_hangs_on_the_size_of_model_and_answers():
    """Guards: a setting of the laptop's that the row takes over, as the laptop's recipe goes on changing."""
    row = tyro.cli(recipe.Train, default=lessons.TRAIN, args=lift.PARTS["as-published"])
    paper = recipe.Train()
    names = ["minibatches", "clip_norm", "world", "trained_share"]
    assert [getattr(row, name) for name in names] == [getattr(paper, name) for name in names]
    lengths = ("max_new_tokens", "world_model_tokens", "judge_tokens")
    assert paper.dreaming == replace(row.dreaming,
                                     **{name: getattr(paper.dreaming, name) for name in lengths})


def test_every_agent_is_run_in_the_one_world_before_it_is_tried_and_that_is_no_part_of_its_price():
    """Guards: agents that nobody can rank any more; minutes in one world counted as learning; tried
    starts."""
    config = lift.Config(seeds=(0,), part_seeds=(0,), world="runs/world")
    for last, cell in lift.plan(config).items():
        (agent,), (dreams,) = last.needs, last.after
        assert dreams.needs == (agent,) and dreams in lift.before(last) and dreams not in lift.made_of(last)
        words = " ".join(dreams.command)
        assert words.startswith(f"audit.py --dream --checkpoint {agent.folder}/{agent.name} --seeds 12000")
        asked = tyro.cli(audit.Config, args=dreams.command[1:])
        assert (asked.world_model, asked.judge_checkpoint) == ("runs/world/world_model", "runs/world/judge")
        looked = {config.evaluation, lessons.TRAIN.evaluate_seeds}
        assert not any(set(data.parse_seeds(asked.seeds)) & set(data.parse_seeds(seeds)) for seeds in looked)
    assert not any(last.after for last in lift.plan(lift.Config(seeds=(0,), part_seeds=())))
    for last in lift.plan(replace(config, six=True)):  # dreams of the pages that are tried
        both = last.command, last.after[0].command
        tried, dreamed = (command[command.index("--tasks") :] for command in both)
        assert tried == dreamed == ("--tasks", *lift.SIX)


def test_make_world_learns_from_recordings_of_its_own():
    """Guards: a world that has learned the pages that an agent learned, and is kinder to that agent."""
    made = [line.split()[1:] for line in make_says("world", WORLD="runs/w").split("\n")
            if line.startswith(".venv/bin/python ") and " -m pip " not in line and " -c " not in line]
    explored, world_model, judge = (words for words in made if "--out" in words)
    shown = tyro.cli(explore.Config, args=explored[2:])
    assert shown.first_seed + shown.most <= data.SEEDS["train"].stop
    taken = max(row["seed"] for _, row in data.read_jsonl(ROOT / lessons.Policy().trajectories))
    assert shown.first_seed > taken and str(shown.out) == "runs/w/recordings.jsonl.gz"
    world_model = tyro.cli(lessons.WorldModel, args=world_model[3:])
    judge = tyro.cli(lessons.Policy, args=judge[3:])
    assert world_model.transitions == judge.trajectories == str(shown.out)
    assert (world_model.out, judge.out) == ("runs/w/world_model", "runs/w/judge")
    assert not {world_model.sft.seed, judge.seed, judge.sft.seed} & set(range(1000))


@pytest.mark.parametrize("compute, six, guess", [
    (torch.float32, False, (51, 63)), (torch.bfloat16, False, (34, 42)),
    (torch.bfloat16, True, (8.5, 10.5))])
def test_the_first_guess_is_of_this_machine_and_of_these_pages(monkeypatch, compute, six, guess):
    """Guards: "about 71 min left" under a command that takes fourteen."""
    monkeypatch.setattr(lm, "matrix_type", lambda: compute)
    agents = lift.chain(lift.Config(six=six), 2, 0)
    assert (agents["sft"].minutes, agents["dreamer"].minutes) == guess


def test_longer_cloning_takes_as_long_as_all_that_the_dreamer_is_made_of(tmp_path, monkeypatch):
    """Guards against "longer" that is longer by a number somebody once typed, or without the minutes that the
    world model takes."""
    monkeypatch.setattr(drive, "ROOT", tmp_path)
    chain = lift.chain(lift.Config(), 2, 0)
    for stage, cpu in zip(lift.made_of(chain["dreamer"]), (100.0, 50.0, 200.0), strict=True):
        drive.write(stage.record, {"cpu": cpu})
    assert chain["longer"].words()[-2:] == ["--sft.epochs", "10.5"]  # 3 passes, 3.5 times as long
    assert {other.name for other in chain["longer"].after} == {"sft", "dream"} and not chain["longer"].needs

# ---- what is kept ------------------------------------------------------------------------------------------

def test_each_recorded_step_is_counted_once_and_copies_are_not(monkeypatch):
    """Guards: a dreamer that looks cheaper, or dearer, in real steps than it was."""
    won = [recorded(["click [1]", "click [2]"], seed) for seed in range(3)]  # of which two are demonstrations
    lost = [recorded(["click [1]"] * 4 + ["click [2]"], seed, reward=0) for seed in range(10, 14)]
    monkeypatch.setattr(lift, "recorded", lambda file: [*won, *lost])
    sft, dreamer = lift.plan(lift.Config(seeds=(0,), demonstrations=(2,), rows=("sft", "dreamer")))
    for last, judged, per_task, steps in ((sft, 3, 0, 15), (sft, -1, 0, 0), (dreamer, 0, 3, 20),
                                          (dreamer, -1, 3, 15)):
        more = {"sft": ("--judged", str(judged)), "world_model": ("--per-task", str(per_task))}
        stages = [replace(stage, command=(*stage.command, *more.get(stage.name, ())))
                  for stage in lift.before(last)]
        assert lift.recordings(stages) == {"demonstrated_steps": 4, "recorded_steps": steps}


def test_page_loads_optimizer_steps_and_goals_are_counted_once(tmp_path, monkeypatch):
    """Guards: a recording that every model loads again, failures that cost nothing, looks or skipped updates
    that are counted. Three successes of two steps (two are demonstrations), four failures of one."""
    rows = [recorded(["click [1]", "click [2]"], seed) for seed in range(3)]
    rows += [recorded(["click [2]"], seed + 3, reward=0) for seed in range(4)]
    rows[0] = replace(rows[0], goal="another")
    monkeypatch.setattr(lift, "recorded", lambda file: rows)
    monkeypatch.setattr(finetune, "draw", lambda some, count, seed: list(some[: count or None]))
    config = lift.Config(out=str(tmp_path / "{demonstrations}-{seed}"), seeds=(0,), part_seeds=(0,),
                         demonstrations=(2,))
    chain, folder = lift.chain(config, 2, 0), tmp_path / "2-0"
    for name, report in (("sft", {"steps": 30, "again": {"steps": 4}}), ("world_model", {"steps": 20}),
                         ("clone", {"steps": 10})):
        drive.write(folder / name / "training.json", report)
    looked = [{"real_success": 0.5, "update": 2}]
    for name, real in (("dream", 0), ("real", 5), ("experts", 0)):
        lines = [{"update": n, "kept": kept, "goals": [7, n], "real_trajectories": real,
                  "real_steps": 2 * real} for n, kept in enumerate((8, 3, 0))]
        (folder / f"{name}.run").mkdir()
        (folder / f"{name}.run" / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines + looked))
    cost = lambda row: lift.prices(lift.made_of(chain[row]))
    steps, read = 4 + 3, 2 * 3 + 4 * 2  # of 4 GSPO steps an update; pages of demonstrations and failures
    assert cost("clone") == {"page_loads": 6, "pages_seen": read, "optimizer_steps": 10, "goals": 2}, (
        "goals to find an element are made up of failures' pages")
    assert cost("sft") == {"page_loads": 6, "pages_seen": read, "optimizer_steps": 34, "goals": 2}
    assert cost("dreamer") == {"page_loads": 7, "pages_seen": read + 1, "optimizer_steps": 54 + steps,
                               "goals": 2 + 4}, "the other success is loaded for its first page"
    assert cost("real") == {"page_loads": 7 + 15, "pages_seen": read + 1 + 15 + 30,
                            "optimizer_steps": 34 + steps, "goals": 6}
    assert cost("experts")["page_loads"] == 6, "it begins at demonstrations alone"


def test_a_run_s_metrics_give_real_steps_until_each_look(tmp_path):
    """Guards: a curve whose real steps are those of the update after the look."""
    rows = [{"update": 0, "real_success": 0.5, "kept": 3, "dreams": 8, "real_steps": 10},
            {"update": 1, "kept": 0, "dreams": 7, "real_steps": 20}, {"update": 2, "real_success": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tables.dreaming(tmp_path / "metrics.jsonl") == {
        "updates": 2, "dreams": 15, "real_steps": 30, "looks": [[0, 0.5, 0], [2, 0.75, 30]]}
    assert tables.dreaming(tmp_path / "none")["updates"] == 0


def test_tries_are_packed_in_the_order_of_their_seeds_and_none_may_miss():
    """Guards against paired intervals over tries that are not the same."""
    tries = [["a", 7, 1.0], ["a", 6, 0.0], ["a", 5, 0.0]]
    assert tables.pack(tries, range(5, 8)) == {"a": "001"}
    for wrong in (tries[:2], tries + [["b", 5, 1.0]], [*tries[:2], ["a", 5, 0.5]]):
        with pytest.raises(ValueError, match="not one reward of 0 or 1 for each"):
            tables.pack(wrong, range(5, 8))


def cell(row: str, seed: int = 0, digits: str = "0000", count: int = 2, **more) -> dict:
    """A row as bench/lift.py keeps it."""
    return {"row": row, "demonstrations": count, "seed": seed, "run": 0, "evaluation": "1000100:4",
            "recipe": "r", "commit": ["c"], "commands": ["python sft.py policy tiny"],
            "tries": {"click-option": digits},
            "minutes": {"sft": {"wall": 6.0, "cpu": 2.0, "starts": 1},
                        "on-x": {"wall": 50.0, "cpu": 50.0, "starts": 1}},
            "demonstrated_steps": 58, "recorded_steps": 40, "real_steps": 0, "updates": 0, "dreams": 0,
            "looks": [], "versions": {"torch": "2"}, "machine": "m"} | more


def write(folder: Path, *cells: dict) -> Path:
    for k, some in enumerate(cells):
        drive.write(folder / f"{k}.json", some)
    return folder


def test_a_kept_row_is_not_made_again_and_one_of_another_make_is_refused(tmp_path):
    """Guards: hours for a row that is there; one that other code, flags or seeds made, as if it belonged."""
    config = lift.Config(seeds=(0,), demonstrations=(2,), rows=("sft",), results=str(tmp_path))
    (last, beginning), = lift.plan(config).items()
    assert not lift.kept(config, beginning, last, "r")
    made = cell("sft", evaluation=config.evaluation,
                commands=["python " + " ".join(stage.command) for stage in lift.before(last)])
    file = lift.file_of(config, beginning)
    drive.write(file, made)
    assert lift.kept(config, beginning, last, "r")
    for wrong, of, why in ((made, "s", "its recipe is r, and now it would be s"),
                           (made | {"evaluation": "1000200:4"}, "r", "its evaluation is 1000200:4"),
                           (made | {"commands": made["commands"][:1]}, "r", "it was made by"),
                           (made | {"commands": ["python sft.py policy", made["commands"][1]]}, "r",
                            "it was made by `python sft.py policy`, and now"),
                           (made | {"commands": [made["commands"][0] + " --sft.epochs 1",
                                                 made["commands"][1]]}, "r",
                            "it was made by .*--sft.epochs 1`")):  # as a --short trial is
        drive.write(file, wrong)
        with pytest.raises(ValueError, match=f"{re.escape(file.name)}: {why}.*Give other --results"):
            lift.kept(config, beginning, last, of)


def test_rows_of_two_recipes_or_ranges_make_no_table(tmp_path, monkeypatch):
    """Guards against a table that compares code with code, seeds with other seeds, ten pages with all, or a
    short trial with the recipe."""
    fewer = dict([*cell("sft")["tries"].items()][1:])
    for name, other in (("recipe", {"recipe": "z"}), ("evaluation", {"evaluation": "z"}),
                        ("pages", {"tries": fewer}), ("length", {"short": True})):
        folder = write(tmp_path / name, cell("sft"), cell("dreamer", **other))
        with pytest.raises(ValueError, match=f"mixes rows of {name}"):
            tables.load(folder)
    old = {name: value for name, value in cell("sft").items() if name != "run"}
    assert [row["run"] for row in tables.load(write(tmp_path / "one", cell("dreamer", run=1), old))] == [0, 1]
    # Said before the first stage runs, and not behind the last.
    monkeypatch.setattr(drive, "work", lambda *_, **__: pytest.fail("it has begun"))
    config = lift.Config(seeds=(0,), demonstrations=(2,), rows=("dreamer",), results=str(tmp_path / "one"))
    with pytest.raises(ValueError, match="the rows in .*one have recipe r, and now it would be .*Give other"):
        lift.make(config, lift.plan(config), lift.RECIPE, lift.file_of, lift.kept, lift.row_of)

# ---- tables and plot ---------------------------------------------------------------------------------------

def test_the_tables_say_what_the_tries_say():
    """Guards: a difference of the wrong sign or of tries that do not belong together, a mean over the wrong
    rows, a row that is not made yet and reads as 0."""
    cells = [cell("clone", 0, "1000"), cell("clone", 1, "1100"),
             cell("sft", 0, "1010"), cell("sft", 1, "0000"),
             cell("dreamer", 0, "1110", updates=40, dreams=100),
             cell("real", 0, "1111", real_steps=500, recorded_steps=40), cell("sft", 0, "1111", count=10)]
    report = tables.report(cells)
    seeds = table(report, "2 demonstrations a task")
    assert seeds["0"][:3] == [".250", ".500", ".750"] and seeds["1"][:3] == [".500", ".000", "-"]
    assert seeds["all"][:3] == [".375", ".250", ".750"]
    assert seeds["0"][3].startswith("+25.0 [") and seeds["all"][3].startswith("-12.5 [")
    assert seeds["0"][4].startswith("+25.0 [") and seeds["1"][4] == "-"
    assert seeds["all"][4].startswith("+25.0 [") and seeds["0"][5].startswith("+50.0 [")
    assert table(report, "10 demonstrations a task")["0"][:3] == ["-", "1.000", "-"]
    assert table(report, "By task, mean of the seeds, 2")["click-option"] == [".375", ".250", ".750", "1.000"]
    parts = table(report, "What each part does, 2")
    assert parts["real pages"][:3] == ["1.000", "-", "1.000"]
    assert parts["real pages"][3].startswith("+50.0 [") and parts["real pages"][4].startswith("-25.0 [")
    costs = table(report, "What it cost")
    assert costs["real pages"] == ["2", "1.000", "58", "40", "500", "598", "0", "0", "2.0", "6.0"]
    assert costs["dreamer"][6:8] == ["40", "100"]
    priced = [cell("sft", 0, "1010") | {"page_loads": 7, "pages_seen": 15, "optimizer_steps": 61, "goals": 6}]
    assert table(tables.report(priced), "What it cost")["SFT agent"][8:12] == ["7", "15", "61", "6"]


def test_rows_of_several_runs_say_how_sure_they_are():
    """Guards: a lift over an SFT agent that longer cloning beats; a run that overwrites another; a difference
    that one page makes. Seed 0's longer cloning is the better, seed 1's SFT agent: the dreamer's runs have 75
    and 25 more there on page a and 0 on b; and 25 and 25, 0."""
    tries = lambda a, b="0000": {"tries": {"a": a, "b": b}}
    cells = [cell("sft", 0) | tries("0000"), cell("longer", 0) | tries("1000"),
             cell("sft", 1) | tries("1100"), cell("longer", 1) | tries("1000"),
             cell("dreamer", 0) | tries("1111"), cell("dreamer", 0, run=1) | tries("1100"),
             cell("dreamer", 1) | tries("1110"), cell("dreamer", 1, run=1) | tries("1110")]
    said = tables.report(cells)
    over = table(said, "Minus the better of SFT agent and longer cloning")
    assert over["(the better, 2)"][:2] == ["longer cloning .125", "SFT agent .250"]
    seed0, seed1, all_noise, of_tries, t, most, without = over["dreamer, 2"]
    assert (seed0, seed1, most, without) == ("+25.0", "+12.5", "a +37.5", "+0.0 [+0.0, +0.0]")
    assert all_noise.startswith("+18.8 [") and of_tries.startswith("+18.8 [") and all_noise != of_tries
    assert t == "+18.8 [-60.7, +98.2]", "12.706 times 6.25"
    assert table(said, "Minus the dreamer")["longer cloning, 2"][0] == "-25.0"
    parts = table(said, "What each part does")
    assert parts["dreamer"][:3] == [".375 (.500 .250)", ".375 (.375 .375)", ".375"]
    assert table(said, "2 demonstrations a task")["all"][2] == ".375" and "a seed and run" in said
    sizes = table(said, "What a difference must be to be seen")
    assert list(sizes) == ["dreamer, 2, minus the better", "all of these"]
    assert float(sizes["all of these"][5]) > float(sizes["all of these"][6]) > 0, "more seeds show less"
    one = tables.report([some for some in cells if not some["run"]])
    assert table(one, "Minus the better")["dreamer, 2"][0] == "+37.5", "one run has noise as well"
    assert "1 runs" not in one and "what runs do is in it" in one


def test_without_longer_cloning_or_a_common_seed_nothing_is_made_up():
    """Guards: a lift over an agent of another seed; a report that fails while rows are still being made."""
    cells = [cell("sft", 0), cell("dreamer", 0, "1100"), cell("dreamer", 0, "1110", run=1),
             cell("sft", 1), cell("real", 2, "1111", run=1)]
    over = table(tables.report(cells), "Minus the better of SFT agent and longer cloning")
    assert over["(the better, 2)"][0] == "SFT agent .000" and over["dreamer, 2"][0] == "+62.5"
    assert over["real pages, 2"] == ["-"] * 6
    later = table(tables.report([*cells, cell("longer", 1)]), "Minus the better of SFT agent")
    assert later["dreamer, 2"] == ["-"] * 5, "seed 0's longer cloning is not made yet"


def test_more_demonstrations_stand_beside_the_dreamer_of_few():
    """Guards: dreams that pay only because nobody showed what as many demonstrations would have given."""
    cells = [cell("clone", 0, "1111", count=10), cell("sft", 0, "0000"), cell("dreamer", 0, "1100"),
             cell("dreamer", 0, "1110", count=10), cell("sft", 0, "1100", count=10)]
    below = table(tables.report(cells), "Minus the dreamer")
    assert set(below) == {"SFT agent, 2", "clone, 10", "SFT agent, 10", "dreamer, 10"}
    assert below["clone, 10"][0] == "+50.0"
    over = table(tables.report(cells), "Minus the better")
    assert over["dreamer, 10"][0] == "+25.0", "of SFT agents with as many"


def test_the_plot_counts_recordings_and_demonstrations_as_real_steps(tmp_path, monkeypatch):
    """Guards against a dreamer that seems to need no real step."""
    seen = drawn(monkeypatch)
    tables.plot([cell("dreamer", 0, "1100", recorded_steps=942, looks=[[0, 0.4, 0], [40, 0.6, 0]]),
                 cell("dreamer", 1, "1111", recorded_steps=942, looks=[[0, 0.6, 0], [40, 0.8, 0]]),
                 cell("real", 0, "1111", real_steps=500, looks=[[0, 0.5, 0], [40, 0.7, 500]])],
                tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    shown = [(line.get_label(), [*line.get_xdata()], [*line.get_ydata()]) for line in seen[0].lines]
    stars = {label: (x, y) for label, x, y in shown if not label.startswith("_")}
    assert stars == {"dreamer": ([1000], [0.75]), "real pages": ([598], [1.0])}
    curves = [(x, [round(value, 9) for value in y]) for label, x, y in shown if label.startswith("_")]
    assert ([1000, 1000], [0.5, 0.7]) in curves and ([98, 598], [0.5, 0.7]) in curves


def test_the_tables_are_printed_from_the_small_files_alone(tmp_path, monkeypatch, capsys):
    """Guards against results that only whoever has the models can print again."""
    folder = write(tmp_path, cell("sft"), cell("dreamer", digits="1111"))
    typed(monkeypatch, lift.main, "--report", results=folder)
    assert tables.report(tables.load(folder)) in capsys.readouterr().out and (folder / "steps.png").exists()
