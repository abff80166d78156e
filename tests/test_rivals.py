"""Claims about bench/rivals.py: which commands make its rows, what each is said to have cost, and that the
tables are of the small files alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tyro
from conftest import recorded
from helpers.runs import typed
from helpers.shown import drawn, table

import data
import evaluate
import recipe
import sft
import train
from bench import drive, lift, rivals, tables
from rivals import lookahead, offline, orm, ratios, synthesis, webrl

ROOT = Path(__file__).resolve().parent.parent
ONE = rivals.Config(seeds=(0,))


@pytest.fixture
def shipped(monkeypatch):
    """Recordings: three successes of two steps (two are demonstrations), four failures of one."""
    rows = [recorded(["click [1]", "click [2]"], seed=k) for k in range(3)]
    rows += [recorded(["click [2]"], seed=k + 3, reward=0) for k in range(4)]
    monkeypatch.setattr(lift, "recorded", lambda file: rows)

# ---- which commands ----------------------------------------------------------------------------------------

def test_every_row_is_planned_once_for_every_seed_and_no_evaluation_seed_by_default():
    """Guards: a row that is never made, two rows in one file, evaluation seeds used up by a look, a misspelt
    row."""
    cells = rivals.plan(rivals.Config())
    assert sorted((cell["seed"], cell["row"]) for cell in cells.values()) == sorted(
        (seed, row) for seed in (0, 1, 2) for row in rivals.ROWS)
    assert len({last.makes for last in cells}) == len({last.label for last in cells}) == len(cells)
    assert set(data.parse_seeds(ONE.evaluation)) <= set(data.SEEDS["dev"])
    for wrong in ({"rows": ("dreamer", "drmr")}, {"out": "runs/x"}, {"evaluation": "5"}):
        with pytest.raises(ValueError):
            rivals.Config(**wrong)


@pytest.mark.parametrize("short", [False, True])
def test_the_programs_understand_every_command(monkeypatch, short):
    """Guards: hours that end at a flag which was renamed, or at a value that the settings refuse."""
    stages = {stage for last in rivals.plan(replace(ONE, short=short)) for stage in lift.before(last)}
    monkeypatch.setattr(recipe, "command", lambda *_, **__: None)  # read the flags, and do nothing
    programs = {"sft.py": sft, "train.py": train, "rivals.ratios": ratios, "rivals.offline": offline,
                "rivals.synthesis": synthesis, "rivals.orm": orm, "rivals.webrl": webrl}
    looks = {"evaluate.py": evaluate, "rivals.lookahead": lookahead}
    for stage in stages:
        command = [*stage.command, *(["--updates", "9"] if stage.more else [])]
        script, *words = command[command[0] == "-m" :]
        if script in looks:
            tyro.cli(looks[script].Config, args=words)
        else:
            typed(monkeypatch, programs[script].main, *words)


def test_all_rows_begin_with_the_same_agent_and_dream_in_the_same_world_model():
    """Guards: a row whose SFT agent or judge is another seed's, or a model from a default folder: the reward
    model began at runs/tiny/sft, whosever agent that was."""
    made = rivals.agents(replace(ONE, out="runs/x/seed{seed}"), 3)
    for row, stage in made.items():
        said = f"{' '.join(stage.command)} "
        if row != "sft":
            for words in ("--policy runs/x/seed3/sft", "--seed 3", "--demonstrations-seed 3"):
                assert f" {words} " in said, row
            assert "sft" in [need.name for need in stage.needs], row
        if "--world-model" in said:
            assert " --world-model runs/x/seed3/world_model " in said, row
            assert "world_model" in [need.name for need in stage.needs], row
    for stage in {stage for last in rivals.plan(ONE) for stage in lift.before(last)}:
        own = {"sft", "world_model"}  # begin at tiny/base
        assert stage.name in own or "sft" in {need.name for need in lift.made_of(stage)}, stage.label
        for need in stage.needs:
            assert str(need.makes.parent) in stage.command, (stage.label, need.label)


def test_every_agent_is_run_in_the_one_world_as_those_of_lift_are():
    """Guards: other methods' agents that cannot be ranked, and one that looks ahead, which is another's."""
    for last, cell in rivals.plan(rivals.Config(seeds=(0,), world="runs/world")).items():
        tried = last.command[last.command.index("--checkpoint") + 1]
        run = [stage.command[stage.command.index("--checkpoint") + 1] for stage in last.after]
        assert run == ([] if cell["row"] in rivals.LOOKAHEAD else [tried])
        assert not set(last.after) & set(lift.made_of(last)), "it is no part of the price"


def test_what_dev_seeds_chose_for_a_method_reaches_its_rows_alone_and_does_not_undo_them(monkeypatch):
    """Guards: a setting that reached one of its rows alone; an ablation without its own flag."""
    assert set(rivals.CHOSEN) <= set(rivals.METHODS)
    monkeypatch.setattr(rivals, "CHOSEN", {})
    plain = {cell["row"]: lift.before(last) for last, cell in rivals.plan(ONE).items()}
    given = {"awr": ["--beta", "0.3"], "lookahead": ["--margin", "0.1"], "webrl": ["--replay", "1"],
             "synthesis": ["--share-tasks"], "grpo": ["--lr", "1e-4"]}
    monkeypatch.setattr(rivals, "CHOSEN", given)
    reached = {method: set() for method in given}
    for last, cell in rivals.plan(ONE).items():
        for before, stage in zip(plain[cell["row"]], lift.before(last)):
            added = [words for words in given.values() if len(stage.command) > len(before.command)
                     and " ".join(words) in " ".join(stage.command)]
            assert sorted(stage.command) == sorted([*before.command, *(added[0] if added else [])])
            for method in [method for method in given if added and given[method] == added[0]]:
                reached[method].add(stage.name.removeprefix("on-1000100-20-"))
    assert reached == {
        "awr": {"awr", "awr-all"}, "grpo": {"grpo"}, "synthesis": {"synthesis", "synthesis-once"},
        "lookahead": {"lookahead1", "lookahead2", "lookahead3", "dreamer-lookahead1"},
        "webrl": {row for row in rivals.ROWS if row.startswith("webrl")}}
    (stage,) = {stage for last in rivals.plan(ONE) for stage in lift.before(last)
                if stage.name == "webrl-no-buffer"}
    assert [stage.command[k + 1] for k, word in enumerate(stage.command) if word == "--replay"] == ["1", "0"]


def test_an_even_run_has_the_updates_that_do_as_many_real_steps(tmp_path):
    """Guards: one update too few, looks counted as updates, a run that is never made as the other ended
    earlier. 10 + 20 + 30: 31 steps need three updates, 30 two; 100 would take five at 20 a step."""
    rows = [{"update": 0, "real_steps": 10}, {"update": 1, "real_steps": 20}, {"update": 2, "real_steps": 30},
            {"update": 3, "real_success": 0.5}]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [rivals.updates_for(file, steps) for steps in (1, 10, 30, 31, 60, 100)] == [1, 1, 2, 3, 3, 5]
    file.write_text(json.dumps({"update": 0, "real_steps": 0}) + "\n")
    with pytest.raises(ValueError, match="no real step"):
        rivals.updates_for(file, 5)


def test_an_even_run_is_the_other_but_for_its_length_and_does_not_pay_for_it(tmp_path, monkeypatch):
    """Guards against another seed or world, and against the longer run's minutes and steps in its row."""
    made = rivals.agents(replace(ONE, out=str(tmp_path / "seed{seed}"), short=True), 0)
    real, even = made["real"], made["real-even"]
    (tmp_path / "seed0/real.run").mkdir(parents=True)
    (tmp_path / "seed0/real.run/metrics.jsonl").write_text('{"real_steps": 100}\n' * 3)
    # The world model was recorded 150 steps that the SFT agent had not.
    monkeypatch.setattr(rivals, "costs", lambda stages: {"recorded_steps": 400 if stages[1:] else 250})
    strip = lambda words: [word for word in words if not word.startswith(str(tmp_path))]
    words = even.words()
    assert words[-2:] == ["--updates", "2"] and words.count("--updates") == 1
    without = [word for word in strip(real.command)]
    while "--updates" in without:  # of the row, and of a short run
        k = without.index("--updates")
        del without[k : k + 2]
    assert strip(words[:-2]) == without
    last = rivals.evaluation(replace(ONE, out=str(tmp_path / "seed{seed}")), "real-even", 0, made)
    assert [stage.name for stage in lift.made_of(last)] == ["sft", "real-even", last.name]
    assert "real" in [stage.name for stage in lift.before(last)]

# ---- what it cost ------------------------------------------------------------------------------------------

def test_each_recording_is_counted_once_and_a_label_is_a_reward_that_was_learned_from(tmp_path, shipped):
    """Guards: recordings that each model counts again, labels of a world model, real steps of a look, a
    page's reward that WebRL did not take, tokens that are 0 where nobody counted them. The world model learns
    from failures and demonstrations, the judge from the same."""
    made = rivals.agents(replace(ONE, out=str(tmp_path / "seed{seed}")), 0)

    def metrics(name, *lines):
        folder = tmp_path / "seed0" / f"{name}.run"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def cost(row):
        return rivals.costs(lift.before(made[row]))

    line = {"real_steps": 0, "real_trajectories": 0, "tokens_sampled": 70, "dreams": 60}
    metrics("dream", line, line | {"seconds_real": 12}, {"real_success": 0.5, "seconds_real": 18})
    metrics("real", line | {"real_steps": 9, "real_trajectories": 4, "dreams": 0},
            line | {"tokens_sampled": 5, "dreams": 0})
    none = {"real_trajectories": 0, "real_steps": 0, "real_labels": 0, "dreams": 0, "looking_minutes": 0}
    assert cost("sft") == {"recorded_trajectories": 6, "recorded_labels": 6, "recorded_steps": 8, **none,
                           "tokens_sampled": 0}
    assert cost("dreamer") == cost("sft") | {"tokens_sampled": 140, "dreams": 120, "looking_minutes": 0.5}
    assert cost("real") == cost("sft") | {"real_trajectories": 4, "real_steps": 9, "real_labels": 4,
                                          "tokens_sampled": 75}
    metrics("webrl", *(line | {"real_trajectories": 4, "labels": k, "dreams": 0} for k in (0, 3)))
    assert cost("webrl")["real_labels"] == 3, "WebRL's own reward model judges most of its tries"
    assert cost("awr") == cost("sft") and cost("awr-all")["recorded_labels"] == 7
    with pytest.raises(OSError, match="grpo.run/metrics.jsonl"):
        cost("grpo")
    world_model = next(need for need in made["dreamer"].needs if need.name == "world_model")
    assert rivals.costs([world_model])["recorded_labels"] == 0
    assert rivals.costs([world_model])["recorded_trajectories"] == 6

# ---- tables and plot ---------------------------------------------------------------------------------------

def cell(row, seed, digits, **more):
    return {"row": row, "seed": seed, "run": 0, "evaluation": "1000100:4", "recipe": "r", "commit": ["c"],
            "minutes": {"sft": {"cpu": 2.0, "wall": 3.0}, "on-x": {"cpu": 9.0, "wall": 9.0}},
            "tries": {"a": digits}, "tokens_a_try": 300, "recorded_trajectories": 6, "recorded_labels": 5,
            "recorded_steps": 1000, "real_trajectories": 0, "real_steps": 0, "real_labels": 0,
            "dreams": 2500, "looking_minutes": 0.5, "tokens_sampled": 70,
            "versions": {"torch": "2"}, "machine": "m", **more}


CELLS = [cell("dreamer", 0, "1110"), cell("dreamer", 1, "1100"),
         cell("real", 0, "1111", real_steps=500, real_trajectories=40, real_labels=40),
         cell("lookahead1", 0, "0000", tokens_a_try=900, tokens_sampled=0)]


def test_the_table_says_success_and_price_and_is_compared_try_by_try(shipped):
    """Guards: intervals of the wrong sign, a seed that one row lacks, minutes of an evaluation or a look."""
    report = rivals.report([*CELLS, cell("grpo", 0, "1100"), cell("grpo", 1, "1000")])
    whole, alone = table(report, "Success"), table(report, "Rows of seed 0 alone")
    assert list(whole) == ["dreamer", "grpo"], "the best first"
    assert list(alone) == ["real", "dreamer", "lookahead1"], "the best first"
    assert whole["dreamer"][:4] == [".750", ".500", ".625", ""] and whole["grpo"][3].startswith("-25.0 [")
    assert alone["real"][:3] == ["1.000", "-", "-"] and alone["real"][3].startswith("+25.0 [")
    assert alone["lookahead1"][3].startswith("-75.0 [")
    prices = table(report, "What it cost")
    assert prices["real"][:9] == ["46", "6", "1,500", "1,000", "45", "2,500", "70", "300", "1.5"]
    assert prices["lookahead1"][:9] == ["6", "6", "1,000", "1,000", "5", "2,500", "0", "900", "1.5"]
    assert rivals.report([]) == "nothing is made yet"


def test_a_row_of_one_seed_stands_beside_the_sft_agent_of_that_seed(shipped):
    """Guards: a row of a weak seed that seems worse than the SFT agents of all: .500 is below their .625, and
    above the .250 that it began from."""
    cells = [*CELLS[:2], cell("sft", 0, "1000"), cell("sft", 1, "1111"), cell("awr", 0, "1010")]
    report = rivals.report(cells)
    assert table(report, "Success")["sft"][2] == ".625" and "awr" not in table(report, "Success")
    alone = table(report, "Rows of seed 0 alone")
    assert alone["sft"][:3] == [".250", "-", "-"] and alone["dreamer"][:3] == [".750", "-", "-"]
    assert alone["awr"][0] == ".500" and alone["awr"][4].startswith("+25.0 [")
    assert list(alone) == ["dreamer", "awr", "sft"]


def test_pages_that_were_loaded_and_not_learned_from_are_among_the_prices(shipped):
    """Guards: a dreamer that seems to have seen no other page. Two demonstrations of three pages and four
    failures of two are read whole; the other success is loaded for its first page."""
    read, firsts, all_of_them = 2 * 3 + 4 * 2, 1, 3 * 3 + 4 * 2
    assert rivals.loaded(cell("sft", 0, "1")) == (6, read)
    assert rivals.loaded(cell("lookahead1", 0, "1")) == (6, read), "it acts on the pages of the evaluation"
    assert rivals.loaded(cell("dreamer", 0, "1")) == (7, read + firsts)
    assert rivals.loaded(cell("awr-all", 0, "1")) == (7, all_of_them)
    real = cell("real", 0, "1", real_steps=500, real_trajectories=40)
    assert rivals.loaded(real) == (7 + 40, read + firsts + 540), "a try has a page more than steps"
    assert set(rivals.STARTS) <= set(rivals.ROWS)


def test_what_chance_does_is_said_beside_the_differences(shipped):
    """Guards: the best of 25 rows by luck read as the best. The dreamer is at .75 and .5, the row at 1 and
    .5: differences of .25 and 0, a standard deviation of 17.7 points."""
    cells = [*CELLS[:2], cell("real", 0, "1111"), cell("real", 1, "1100"),
             cell("sft", 0, "0000", dreams=0), cell("sft", 1, "0000", dreams=0)]
    said = rivals.report(cells)
    assert "2 rows are compared" in said and "about 0.1 leave 0 out" in said
    assert "17.7 points" in said and "the 1 row(s)" in said, "the SFT agent learns from no try"


def test_a_row_under_its_old_name_is_still_read(tmp_path, shipped):
    """Guards: results that a renamed row loses: `explorer` was one round of synthesis."""
    for old in (*CELLS, cell("explorer", 0, "1111")):
        drive.write(tmp_path / f"seed{old['seed']}-{old['row']}.json", old)
    said = rivals.report(tables.load(tmp_path))
    assert table(said, "Rows of seed 0 alone")["synthesis-once"][0] == "1.000" and "explorer" not in said
    assert set(tables.RENAMED.values()) <= set(rivals.ROWS) and not set(tables.RENAMED) & set(rivals.ROWS)


def test_the_plot_has_a_point_a_row_at_its_real_steps(tmp_path, monkeypatch):
    """Guards against recordings that are left out of the axis, and a row of one seed beside a mean of two."""
    seen = drawn(monkeypatch)
    some = [*CELLS, cell("sft", 2, "1111"), cell("grpo", 0, "1110"), cell("grpo", 1, "1100")]
    rivals.plot(some, tmp_path / "steps.png")
    (axes,) = seen
    points = {text.get_text(): text.xy for text in axes.texts}
    assert points == {"dreamer": (1000, 0.0), "grpo": (1000, 0.0),
                      "real": (1500, 25.0), "lookahead1": (1000, -75.0)}
    fills = {line.get_fillstyle() for line in axes.lines if list(line.get_xdata()) == [1500]}
    assert fills == {"none"}, "hollow: of fewer seeds than the dreamer"
    low, middle, high = sorted(text.xyann[1] for text in axes.texts if text.xy[0] == 1000)
    assert min(middle - low, high - middle) > 2, "no name on another, where two points are one"
    assert (tmp_path / "steps.png").stat().st_size
    with pytest.raises(ValueError, match="--rows dreamer"):
        rivals.plot([cell("sft", 0, "1111")], tmp_path / "other.png")


def test_a_kept_row_of_another_make_is_refused(tmp_path, monkeypatch):
    """Guards against a table that mixes two recipes, ranges of seeds, or settings of one row."""
    monkeypatch.setattr(rivals, "CHOSEN", {})
    config = replace(ONE, results=str(tmp_path), evaluation="1000100:4", rows=("awr",))
    ((last, beginning),) = rivals.plan(config).items()
    commands = [" ".join(["python", *stage.words()]) for stage in lift.made_of(last)]
    assert not rivals.kept(config, beginning, last, "r")
    ((dreamed, _),) = rivals.plan(replace(config, world="runs/world")).items()
    drive.write(rivals.file_of(config, beginning), cell("awr", 0, "1", commands=commands))
    assert rivals.kept(config, beginning, last, "r")
    with pytest.raises(ValueError, match="it has no dreams in one world .*Give other --results"):
        rivals.kept(config, beginning, dreamed, "r")  # nobody would make them any more
    with pytest.raises(ValueError, match="its recipe is .*Give other --results"):
        rivals.kept(config, beginning, last, "r2")
    with pytest.raises(ValueError, match="its evaluation is .*Give other --results"):
        rivals.kept(replace(config, evaluation="1000100:5"), beginning, last, "r")
    monkeypatch.setattr(rivals, "CHOSEN", {"awr": ["--beta", "0.3"]})
    ((last, beginning),) = rivals.plan(config).items()
    with pytest.raises(ValueError, match="now it would be `python -m rivals.offline awr .*--beta 0.3"):
        rivals.kept(config, beginning, last, "r")


def test_both_drivers_share_the_stages_that_they_have_in_common():
    """Guards: an hour of SFT agents made twice, as another folder, command or recipe was said of them; a
    rival's own code that may change under its rows."""
    of_own = rivals.agents(rivals.Config(out=lift.Config.out), 3)["sft"]
    assert of_own.folder == Path(f"runs/lift/of{lift.FEW}/seed3"), "lift's own --out has more to fill in"
    out = "runs/x/seed{seed}"
    of_lift, of_rivals = (
        {stage.label: stage for row in rows.values() for stage in lift.before(row)}
        for rows in (lift.chain(lift.Config(out=out, demonstrations=(lift.FEW,)), lift.FEW, 3),
                     rivals.agents(rivals.Config(out=out), 3)))
    common = of_lift.keys() & of_rivals.keys()
    assert {label.rpartition("/")[2] for label in common} == {"sft", "world_model", "dream", "real"}
    for label in common:
        assert of_lift[label].command == of_rivals[label].command
        assert rivals.files_of(of_rivals[label]) == lift.RECIPE
    for label in of_rivals.keys() - common - {"runs/x/seed3/real-even"}:
        assert "rivals/*.py" in rivals.files_of(of_rivals[label])
