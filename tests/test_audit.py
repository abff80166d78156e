"""Claims about audit.py: the dream that it shows is one of the models that it was given. What the audits
measure: test_evaluate.py."""

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import GOAL, counting_page, record, recorded, start
from helpers.processes import environment
from helpers.runs import typed

import audit
import dream
from policy import TokenTrajectory

ROOT = Path(__file__).resolve().parent.parent

# ---- python audit.py --show --------------------------------------------------------------------------------


@pytest.fixture
def shown(taught, tmp_path):
    """What `python audit.py --show` needs: a folder for each model, and recorded trajectories."""
    for name in ("policy", "judge", "world_model"):
        shutil.copytree(taught, tmp_path / name)
    record(tmp_path / "t.jsonl", [recorded(["click [1]", "click [2]"], seed=k, task=task)
                                  for k, task in enumerate(("count", "other"))])
    return tmp_path


def flags(folder, **more) -> list[str]:
    """The command line; `more` replaces a flag's value."""
    given = {"checkpoint": folder / "policy", "judge-checkpoint": folder / "judge",
             "trajectories": folder / "t.jsonl", "world-model": folder / "world_model"} | more
    return ["--show"] + [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_audit_show_prints_a_dream_step_by_step(shown, monkeypatch, capsys):
    """Guards: a command that a reader tries first and that fails, prints nothing of the world model, or
    prints another dream each time. The second dream is made in this process."""
    words = flags(shown, seed=3, task="other")
    done = subprocess.run([sys.executable, "audit.py", *words], cwd=Path(audit.__file__).parent,
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"other seed 1 | {GOAL} | reward " in done.stdout
    assert counting_page(0) in done.stdout and done.stdout.count("=" * 100) == 1
    assert re.search(r"^>>> .*click \[[12]\]$", done.stdout, re.MULTILINE)
    assert "<<< so.\n" in done.stdout and "    over: " in done.stdout
    typed(monkeypatch, audit.main, *words)
    assert capsys.readouterr().out == done.stdout


def test_each_part_of_the_printed_dream_is_played_by_its_own_model(shown, monkeypatch, capsys):
    """Guards: a judge that is the dreaming agent itself, or a world model that acts: the dream would look as
    good as another."""
    played = []

    def dreamed(models, *_):
        played.append((models.agent.folder, models.world_model.lm.folder, models.judge.lm.folder))
        return [TokenTrajectory(start(), reward=1.0)]

    monkeypatch.setattr(audit, "loaded", lambda config, folder, *_: contextlib.nullcontext(
        SimpleNamespace(folder=Path(folder).name)))
    monkeypatch.setattr(dream, "trajectories", dreamed)
    typed(monkeypatch, audit.main, *flags(shown))
    assert played == [("policy", "world_model", "judge")] and GOAL in capsys.readouterr().out


@pytest.mark.parametrize("gone, more, says", [
    *((name, {}, "; make it with: make") for name in ("policy", "judge", "world_model")),
    ("", {"task": "nowhere"}, "has no task 'nowhere'; it has count, other"),
    ("", {"trajectories": "no_such_file.jsonl"}, "no_such_file.jsonl")])
def test_what_is_not_there_is_one_line_that_says_the_way_out(shown, monkeypatch, gone, more, says):
    """Guards: a traceback for who has not run `make` yet; an error without the names that would be right."""
    if gone:
        shutil.rmtree(shown / gone)
    with pytest.raises(SystemExit) as error:
        typed(monkeypatch, audit.main, *flags(shown, **more))
    said = str(error.value)
    assert said.startswith("audit.py: ") and says in said and "\n" not in said
    assert str(shown / gone) in said or not gone
