"""Claims about bench/fuzz.py, and what it finds in a minute. `make fuzz` takes an hour."""
import json
from pathlib import Path

import pytest

from bench import fuzz

SLOWEST = json.loads((Path(__file__).parent / "slowest.json").read_text())


def new() -> dict:
    return {"rounds": 0, "cases": {}, "seconds": {}, "slowest": {}, "failures": {}}


@pytest.mark.parametrize("part", range(5))
def test_thousands_of_damaged_texts_raise_only_what_is_promised(part):
    """Guards: an answer, a page or a cut-off file that ends a night of dreaming, or comes back as another."""
    found = new()
    for number in range(5):
        fuzz.one_round(1000 + part, number, found)
    assert min(found["cases"].values()) >= 5 * 150 and not found["failures"]


@pytest.mark.parametrize("kind", list(fuzz.KINDS))
def test_the_slowest_texts_of_an_hour_are_read_in_time(kind):
    """Guards: a parser whose time grows with the square of a text, and one of these texts in a dream."""
    _, case = SLOWEST[kind]
    assert fuzz.tried(kind, case) == ("", "")


@pytest.mark.parametrize("kind, text, says", [
    ("completion", "x" * 300 + "ab" + "y" * 300, "IndexError in read: at last (test_fuzz.py"),
    ("completion", "ba", "AssertionError in same: 'ba' is not 'b' (fuzz.py"),
    ("completion", "a" * 9, "too slow: more than")])
def test_what_fails_is_found_and_made_small(monkeypatch, kind, text, says):
    """Guards: a fuzzer that cannot fail: an error, a changed text, and a loop without an end."""

    def read(text, _):
        if "ab" in text:
            raise IndexError("at last")
        fuzz.same(text, text.replace("ba", "b"))
        while "aaa" in text:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    monkeypatch.setitem(fuzz.KINDS, kind, (1, lambda rng: (text, "beside"), read))
    name, said = fuzz.tried(kind, (text, "beside"))
    assert f"{name.partition(': ')[2]}: {said}".startswith(says)
    small, beside = fuzz.smaller(kind, (text, "beside"), name)
    assert small in ("ab", "ba", "aaa") and small in text and beside == ""


def test_a_seed_gives_its_cases_again_and_a_killed_run_goes_on(tmp_path, monkeypatch, capsys):
    """Guards: a failure that nobody can see again, that is forgotten when the rest of the hour finds none, or
    kept when it is mended; rounds that are tried twice."""
    assert list(fuzz.cases(3, 5)) == list(fuzz.cases(3, 5)) != list(fuzz.cases(3, 6))
    tried = []

    def check(text, _):
        tried.append(text)
        fuzz.same(len(tried), max(1, len(tried) % 7))  # each seventh fails

    monkeypatch.setattr(fuzz, "smaller", lambda kind, case, name: case)
    monkeypatch.setattr(fuzz, "KINDS", {"action": (10, lambda rng: (str(rng.random()), ""), check)})
    monkeypatch.setattr(fuzz, "ROUND", 10)
    fuzz.work(0, 2, tmp_path)
    assert "FAILED action: AssertionError" in capsys.readouterr().out
    fuzz.work(0, 3, tmp_path)
    found = json.loads((tmp_path / "seed0.json").read_text())
    assert found["rounds"] == 3 and found["cases"] == {"action": 30} and found["failures"]
    monkeypatch.setattr(fuzz, "KINDS", {"action": (10, lambda rng: ("", ""), lambda *_: None)})
    fuzz.work(0, 3, tmp_path)
    assert not json.loads((tmp_path / "seed0.json").read_text())["failures"]


def test_a_failure_is_the_exit_status(tmp_path, monkeypatch):
    """Guards: `make fuzz` that prints FAILED and is green."""
    words = ["--cases", "10", "--processes", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(fuzz.sys, "argv", ["fuzz.py", *words])
    monkeypatch.setattr(fuzz, "ROUND", 10)
    for check, status in ((lambda text, _: None, 0), (lambda text, _: fuzz.same(text, 0), 1)):
        monkeypatch.setattr(fuzz, "KINDS", {"action": (10, lambda rng: ("x", ""), check)})
        for file in tmp_path.iterdir():
            file.unlink()
        with pytest.raises(SystemExit) as end:
            fuzz.main()
        assert end.value.code == status and (tmp_path / "slowest.json").exists()
