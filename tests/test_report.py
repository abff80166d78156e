"""Claims about report.py: a page shows what was dreamed, and no text of a stranger is markup or runs."""
import html
import io
import json
import re
from dataclasses import replace
from itertools import count

import pytest
from conftest import act, start
from helpers.dreams import CONFIG, counted, script, who
from playwright.sync_api import sync_playwright

import dream
import report
from envs import browsergym

BAD = "<script>ran('script')</script><img src=x onerror=\"ran('image')\">"
EVIL = f"</pre></script></style>{BAD}<svg onload=ran('svg')>\"'><a href='javascript:ran()'>{{{{ 7 * 7 }}}}&lt"


@pytest.fixture
def kept(scripted):
    """kept(n, updates): what is kept of two groups. From page 0: a success, no action, steps that run out, a
    success. On page 7 the answer to More is nonsense."""
    texts = [act(f"click [{n}]") if n else "No." for n in (2, 0, 1, 2, 1, 2, 1, 2, 1)]
    world = lambda prompt: "nonsense" if "'Count 7'" in prompt and "click [1]" in prompt else counted(prompt)
    models = who(scripted(script(world, agent=lambda prompt: texts.pop(0))))
    batch = dream.batch(models, [(start(0), None), (start(7), None)], replace(CONFIG, horizon=2), (0, 0))
    keep = lambda file, *of: report.keep(file, *of, batch, lambda ids: "what it wrote") or file.getvalue()
    return lambda n=0, updates=1: keep(io.StringIO(), n, updates)


def test_a_page_shows_what_was_dreamed_also_of_a_run_that_was_killed(kept, tmp_path):
    """Guards: no report after a kill; a change without its mark; a discarded dream as the agent's failure, or
    without its reason; a disk full of dreams."""
    (tmp_path / "metrics.jsonl").write_text('{"update": 0, "dream_success": 0.5, "learned": 4}\n{"upd')
    (tmp_path / "dreams.jsonl").write_text(kept()[:-99])
    page = html.unescape(report.write(tmp_path).read_text())
    said = " ".join(re.sub("<[^>]+>", "", page).split())
    for text in ("(all rewards equal: not learned from)", "✓ 1 step. The judge said YES (margin +2.90).",
                 "✗ 2 steps. Its steps ran out.", "✗ 0 steps. Its last text is no action: what it wrote",
                 "– 1 step. Discarded, so that nothing is learned from it: world model: unreadable: not",
                 "World model: It counts.", "The world model says that it is over.", "model: unreadable 2."):
        assert text in said, text
    assert ["".join(of) for of in re.findall("<(?:del|ins)>(.) RootWebArea 'Count (.)'", page)] == [
        "-0", "+1", "-1", "+2"]
    assert [n for n in range(1000) if kept(n, 1000)] == [*range(0, 1000, 1000 // report.UPDATES), 999]


def test_no_text_of_a_stranger_is_markup_or_runs(kept, tmp_path):
    """Guards: a text of a page, a goal, a thought, an answer or a try put in unescaped; half a surrogate that
    ends a run; a policy with scripts. (What escaping might let through runs as soon as the policy is out.)"""
    new = lambda row, n=count(): {key: f"{EVIL}{next(n)}" if of == str(of) else of for key, of in row.items()}
    (folder := tmp_path / "<img src=x onerror=ran('name')>.run").mkdir()
    (folder / "metrics.jsonl").write_text('{"update": 0, "learned": 4}\n')
    rows = [json.loads(line, object_hook=new) for line in kept().splitlines()]
    (folder / "dreams.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = dict.fromkeys(("task", "failed", "end", "goal"), EVIL + "\ud800") | {"seed": 0, "reward": 0.0}
    row |= {"actions": [EVIL], "thoughts": [EVIL], "errors": [EVIL], "pages": [EVIL, EVIL[:-1]]}
    (tries := tmp_path / "tries.jsonl").write_text('{"made": {}}\n' + json.dumps(row) + "\n")
    with sync_playwright() as play:
        page = browsergym.launch(play).new_page()
        page.add_init_script("window.runs = []; window.ran = what => runs.push(what ?? '?');")
        for file, least in ((report.write(folder), 40), (report.write(tries), 7)):
            bad = file.read_text().replace("<body>", f"<body>{BAD}")
            for text, ran in (bad, []), (bad.replace("Content-Security-Policy", "X"), ["image", "script"]):
                file.write_text(text)
                page.goto(file.as_uri())
                page.wait_for_timeout(200)
                assert sorted(page.evaluate("runs")) == ran
            assert page.locator("script, img, iframe, a, svg[onload]").count() == 2, "BAD's"
            seen = page.text_content("body")
            assert seen.count(EVIL) >= least and "–" in seen, "all can be read; what failed has this sign"
