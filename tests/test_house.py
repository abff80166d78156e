"""Claims about the repository itself: who imports whom, that whatever is cited exists, how long lines and
functions are. Each test reads the sources, and names the file, the line and what to do."""

import argparse
import ast
import functools
import graphlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import pytest
import tyro

import recipe
from bench import lift
from tiny import lessons

ROOT = Path(__file__).resolve().parent.parent
# Where sources stand; not runs/, not .venv/.
FOLDERS = (".", "node", "tiny", "worlds", "rivals", "examples", "tests", "tests/helpers",
           "tests_browsergym", "tests_dokuwiki", "bench", "docs")


def files(*patterns: str) -> list[Path]:
    return sorted(file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file())


PYTHON = files(*(f"{folder}/*.py" for folder in FOLDERS))
MARKDOWN = files(*(f"{folder}/*.md" for folder in FOLDERS))
OTHERS = files("Makefile", "requirements*.txt", "pytest.ini", "CITATION.cff", ".ci/*")
MIDDLE = [file for file in PYTHON if file.parent == ROOT]
TREES = {file: ast.parse(file.read_text()) for file in PYTHON}
FILES = {file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): file
         for file in PYTHON}  # by module


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def fine(wrong: list[str]) -> None:
    """Fails with all that is wrong, a line each."""
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


# ---- who imports whom --------------------------------------------------------------------------------------

WINGS = ("node", "tiny", "worlds", "rivals")
PACKAGES = "|".join((*WINGS, "bench", "examples"))  # of programs that are started with -m
# The commands, which put parts of all storeys together.
ENTRIES = ("train", "sft", "evaluate", "audit", "report")


def order() -> list[str]:
    """The modules of the middle, in the order of the table of files in README.md."""
    rows = re.findall(r"^\| *\[?`?(\w+)\.py\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    return list(dict.fromkeys(rows))


def imports(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int, str]]:
    """(module, line, function) of every import below `tree`; function is "" at module level, and the
    outermost of nested functions. What a package gives is a module where a file of ours has its name.

    `import a` gives a, `from a.b import c` gives a.b, `from node import engine` gives node.engine,
    importlib.import_module("a") gives a.
    """
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno, function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield inner if inner in FILES else child.module or ".", child.lineno, function
        elif (isinstance(child, ast.Call) and child.args and isinstance(child.args[0], ast.Constant)
              and ast.unparse(child.func) in ("importlib.import_module", "import_module", "__import__")):
            yield str(child.args[0].value), child.lineno, function
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(child, function or getattr(child, "name", "lambda") if inside else function)


def arrows() -> Iterator[tuple[str, str, int, str]]:
    """(module, module that it imports, line, function), of all files of ours but the tests."""
    for module, file in FILES.items():
        if not module.startswith("tests"):
            for other, line, function in imports(TREES[file]):
                if other in FILES and not other.startswith("tests"):
                    yield module, other, line, function


# The only arrows between wings, or from a wing up to a command. Nobody imports a program of rivals/.
MAY = [
    ("rivals", "tiny"), ("rivals", "worlds"), ("tiny.explore", "worlds"),
    ("rivals.ratios", "train"),  # its loop, with another loss
    ("rivals.webrl", "train"), ("rivals.webrl", "node.engine"),  # its models, on 8 GPUs too
    ("rivals.lookahead", "evaluate"),  # its flags, and the agents that it measures
]


def test_no_import_leads_in_a_circle():
    """Guards against files that nobody can read one after the other. All imports are read, those inside
    functions too, where Python would not notice."""
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for module, other, _, _ in arrows():
        graph[module].add(other)
    assert sum(map(len, graph.values())) > 200, "the imports were not found"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        fine([f"{' is imported by '.join(error.args[1])}: move what they share below both"])


def test_a_wing_imports_the_paper_and_no_other_wing_or_command():
    """Guards against parts that cannot be taken one without the other. What is allowed all the same stands
    in MAY."""
    wrong, used = [], set()
    for module, other, line, _ in arrows():
        wing, its = module.partition(".")[0], other.partition(".")[0]
        if wing not in WINGS or its == wing or its not in (*WINGS, *ENTRIES, "bench", "examples"):
            continue
        allowed = [rule for rule in MAY if rule[0] in (wing, module) and rule[1] in (its, other)]
        used.update(allowed)
        if not allowed:
            wrong.append(f"{name(FILES[module])}:{line}: imports {other}; hand the part in, or move the code")
    fine(wrong + [f"no file of {rule[0]} imports {rule[1]}: take it out of MAY" for rule in MAY
                  if rule not in used])


def test_no_test_imports_a_test():
    """Guards against a test file that cannot be moved or run alone. What several need stands in tests/helpers
    and conftest."""
    fine([f"{name(file)}:{line}: imports {module}; move what it needs into tests/helpers"
          for file in PYTHON if (ROOT / "tests") in file.parents
          for module, line, _ in imports(TREES[file]) if module.rpartition(".")[2].startswith("test_")])


def test_the_readme_lists_every_module_of_the_middle():
    """Guards against a module that no reader is told of, and against a row about a module that is gone."""
    there, listed = {file.stem for file in MIDDLE}, set(order())
    fine([f"README.md: no row for {module}.py in the table of files; put it below all that it imports"
          for module in sorted(there - listed)]
         + [f"README.md: the table of files lists {module}.py, which does not exist"
            for module in sorted(listed - there)])


def test_the_paper_imports_only_from_the_files_above_it_at_the_top():
    """Guards against circles, a name that a reader meets before the file that explains it, and a file of the
    paper that cannot be imported without vLLM or the laptop's lessons. An import inside a function counts
    too: it would hide an arrow. The commands import folders as well."""
    rows, wrong = order(), []
    for file in MIDDLE:
        above = rows[: rows.index(file.stem)] if file.stem in rows else rows
        for module, line, function in imports(TREES[file]):
            if module not in FILES:
                continue
            place = f"{name(file)}:{line}: imports {module}"
            if module not in above and not (file.stem in ENTRIES and module.split(".")[0] in WINGS):
                wrong.append(f"{place}, which does not stand above {file.stem} in README's table of files; "
                             "hand the part in, or move the code, or the row")
            if function:
                wrong.append(f"{place} in {function}(); import it at the top")
    fine(wrong)


# ---- what is cited exists ----------------------------------------------------------------------------------

Texts = list[tuple[int, str]]  # (line of its beginning, text)


def whole(file: Path) -> Texts:
    return [(1, file.read_text())]


@functools.cache
def prose(file: Path) -> Texts:
    """The comments of a Python file, without their marks, and its strings that stand alone: of modules,
    classes, functions and fields. Of another file all."""
    if file not in TREES:
        return whole(file)
    with file.open() as lines:
        texts = [(token.start[0], token.string.lstrip("# "))
                 for token in tokenize.generate_tokens(lines.readline) if token.type == tokenize.COMMENT]
    alone = (node.value for node in ast.walk(TREES[file]) if isinstance(node, ast.Expr))
    return texts + [(node.lineno, node.value) for node in alone
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def found(pattern: str, file: Path, read: Callable[[Path], Texts] = whole) -> Iterator[tuple[str, str]]:
    """("file:line", first group) of every match in what is read of a file."""
    for begin, text in read(file):
        for match in re.finditer(pattern, text):
            yield f"{name(file)}:{begin + text.count(chr(10), 0, match.start(1))}", match[1]


def test_every_cited_entry_of_the_notes_exists():
    """Guards against a reason that nobody can look up: `NOTES 7.3` has to stand in NOTES.md."""
    notes = (ROOT / "NOTES.md").read_text()
    entries = set(re.findall(r"^- \*\*(\d+\.\d+)\b", notes, re.MULTILINE))
    entries |= set(re.findall(r"^## (\d+)\.", notes, re.MULTILINE))
    assert len(entries) > 50, "NOTES.md: entries begin with `- **7.3 Title.**`, sections with `## 7. Title`"
    cited = r"\bNOTES[\s#]+(\d+(?:\.\d+)?(?:[\s#]*(?:,|-|to|and)[\s#]*\d+\.\d+)*)"  # also NOTES 4.3, 4.4
    places = [place for file in PYTHON + MARKDOWN + OTHERS for place in found(cited, file)]
    assert len(places) > 20, "nothing cites NOTES.md any more?"
    fine([f"{place}: cites NOTES {number}, which NOTES.md does not have"
          for place, numbers in places for number in re.findall(r"[\d.]*\d", numbers)
          if number not in entries])


# Files of other projects: whose.
NOT_OURS = {"v1/sample/sampler.py": "vLLM", "fused_moe/oracle/mxfp4.py": "vLLM",
            "docs/format.md": "openai/harmony", "benchmarks/llama3_h100_202412_torchtitan.md": "torchtitan",
            "evaluation/auto_eval.py": "WebVoyager", "gmail/real-tasks/task_e1.py": "WebArena-Infinity"}
# A name with one of these endings, or a path into a folder of ours: lm.py, tests/ranks.py, tiny/base.
OUR_FILE = (r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|ini|cff)\b"
            r"|(?:\.ci|bench|configs|node|rivals|tests|tests_browsergym|tests_dokuwiki|tiny"
            r"|worlds)/[\w./-]*\w)")


def test_every_file_that_is_cited_exists():
    """Guards against a reader who is sent to a file that was renamed, or to notes that were never published.
    Comments and docstrings cite all kinds, other texts *.md. A file is cited by its path from the
    repository's root, or from the folder of the citing file."""
    notes = r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.md)\b"
    fine([f"{place}: cites {cited}, which does not exist" for file in PYTHON + MARKDOWN + OTHERS
          for place, cited in found(OUR_FILE if file in TREES else notes, file, prose)
          if cited not in NOT_OURS and not any((folder / cited).exists() for folder in (ROOT, file.parent))])


def test_every_link_of_a_markdown_file_leads_somewhere():
    """Guards against dead links. Links into the web are not followed."""
    link = r"\]\((?!https?://|mailto:|#)([^)\s#]+)[^)]*\)"
    fine([f"{place}: links to {target}, which does not exist"
          for file in MARKDOWN for place, target in found(link, file)
          if not (file.parent / target).exists()])


def test_every_command_that_a_reader_is_told_to_type_exists():
    """Guards against commands (a script, or a module behind -m) that no longer exist, in README, Makefile,
    docstrings and error messages. The log and the tables tell what was run at a commit of the past."""
    wrong = []
    for file in PYTHON + [file for file in MARKDOWN + OTHERS if file.name not in ("LOG.md", "RESULTS.md")]:
        scripts = found(r"\b(?:python3?|\$\(PY\)) +([\w./-]+\.py)\b", file)
        wrong += [f"{place}: {cited} does not exist" for place, cited in scripts
                  if not (ROOT / cited).exists()]
        modules = found(r" -m +((?:%s)\.[\w.]*\w)" % PACKAGES, file)
        wrong += [f"{place}: there is no module {cited}" for place, cited in modules
                  if not (ROOT / f"{cited.replace('.', '/')}.py").exists()]
    fine(wrong)


class Parsed(Exception):
    """A program has read its words, and would begin."""


# They read no flags, at most names of files.
PLAIN = ("bench.bench_lm", "bench.bench_a11y", "examples.loop", "examples.own_world", "examples.own_loss")
PLACEHOLDERS = {"N": "1", "CARD": "L40S-48GB"}  # DIR, FILE and the like can stand as they are


def told() -> Iterator[tuple[str, str, list[str]]]:
    """("file:line", program, words) of every command with words that a document or docstring shows, be it on
    an indented line or between backticks. `...` and whatever two spaces or # part from it are left out."""
    command = (r"(?m)(?:^ {4,}|`)(?:[\w.-]+/bin/)?(?:python3?|torchrun(?: --\w+ \d+)?)"
               r" ((?:-m (?:%s)\.\w+|[\w/]+\.py) [^`\n#]+)" % PACKAGES)
    for file in PYTHON + MARKDOWN:
        tells = not name(file).startswith("tests") and file.name not in ("LOG.md", "RESULTS.md")
        for place, text in found(command, file, prose) if tells else ():
            text = re.split(r" {2,}| \.\.\.", text.removeprefix("-m "))[0]
            program, *words = shlex.split(re.sub(r"[\[\]]", "", text))
            yield place, program, [PLACEHOLDERS.get(word, word) for word in words]


@pytest.fixture
def parse(monkeypatch):
    """Has a program read its words, as __main__, and nothing more: SystemExit is its answer to wrong ones."""

    def once(read):
        def reads(what, *args, **more):
            if inspect.isfunction(what):  # tyro calls it with the words
                what = functools.wraps(what)(lambda *_, **__: None)
            read(what, *args, **more)
            raise Parsed
        return reads

    for place, reader in ((tyro, "cli"), (tyro.extras, "overridable_config_cli"),
                          (argparse.ArgumentParser, "parse_args")):
        monkeypatch.setattr(place, reader, once(getattr(place, reader)))
    for missing in ("trl", "trl.trainer", "trl.trainer.utils", "datasets"):  # of bench/bench_trl.py alone
        monkeypatch.setitem(sys.modules, missing, mock.MagicMock())

    def run(program: str, words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", [program, *words])
        # run_module would ask pytest's own loader, which has no code to give.
        path = program if program.endswith(".py") else f"{program.replace('.', '/')}.py"
        runpy.run_path(str(ROOT / path), run_name="__main__")

    return run


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # runpy, of a program that a test imported
def test_the_programs_understand_every_command_that_is_shown(parse, capsys):
    """Guards against a command that ends at its second word: a flag that was renamed, a value that is
    refused, an argument that is missing."""
    wrong, seen = [], list(told())
    for place, program, words in seen:
        if program in PLAIN:
            wrong += [f"{place}: {program} reads no flags"] * any(word.startswith("-") for word in words)
            continue
        try:
            parse(program, words)
        except Parsed:
            continue
        except BaseException as error:
            said = capsys.readouterr()
            wrong.append(f"{place}: {program} {' '.join(words)}: {error!r} {(said.out + said.err)[:700]}")
        else:
            wrong.append(f"{place}: {program} {' '.join(words)} ended without reading its words")
    assert len(seen) > 60
    fine(wrong)


def test_a_docstring_that_makes_a_venv_installs_what_make_venv_does():
    """Guards against a first line that ends in "No module named miniwob": a requirements file is missing."""
    files = lambda text: set(re.findall(r"pip install [^&\n#]*-r ([\w./-]+)", text))
    recipe = re.search(r"\n\.venv/ready:(?:.*\n\t.*)+", (ROOT / "Makefile").read_text())[0]
    found = [(file, text) for file in PYTHON for _, text in prose(file) if "-m venv" in text]
    assert found and len(files(recipe)) == 2
    fine([f"{name(file)}: make venv installs {missing} as well"
          for file, text in found for missing in sorted(files(recipe) - files(text))])


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_programs_understand_every_command_of_the_long_experiment(parse):
    """Guards against hours of bench/lift.py that end at a flag which was renamed, or at a value that the
    settings refuse."""
    configs = [lift.Config(seeds=(0,), part_seeds=(0,), short=short) for short in (False, True)]
    stages = {stage for config in configs for last in lift.plan(config) for stage in lift.before(last)}
    commands = [[*stage.command, *(["--sft.epochs", "3.5"] if stage.more else [])] for stage in stages]
    kinds = {tuple(word for word in command if not word[0].isdigit()): command for command in commands}
    for program, *words in kinds.values():
        with pytest.raises(Parsed):
            parse(program, words)


def test_the_gpu_install_is_pinned_to_its_last_package_and_agrees_with_the_requirements():
    """Guards: a machine rented in a month that gets other packages than those that were tried; a pin that is
    raised in one file alone; cuda-python 12 beside cuda-bindings 13, whose files overlap."""
    lines = lambda name: [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines("constraints-gpu.txt") if line)
    assert len(pins) > 200 and all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", "==".join(pin))
                                   for pin in pins.items())
    asked = [line for line in lines("requirements.txt") + lines("requirements-gpu.txt") if line]
    assert "-c constraints-gpu.txt" in asked
    for package, version in (line.split("==") for line in asked if not line.startswith("-c")):
        assert pins[package.lower()] == version, package
    assert pins["cuda-python"] == pins["cuda-bindings"]


# ---- whose modules -----------------------------------------------------------------------------------------

# Imports the programs as `python -m` does, which looks into the working directory first (a script at the root
# looks there too); says whose data and evaluate they got, and whether a program changed where Python looks.
IMPORTS = """
import importlib, sys
path = list(sys.path)
for program in sys.argv[1:]:
    importlib.import_module(program)
print(*(sys.modules[name].__file__ for name in ("data", "evaluate")), sys.path == path)
"""


def test_our_modules_win_over_installed_packages_of_the_same_names(tmp_path):
    """Guards: `import evaluate` that finds Hugging Face's package, as it is installed at many people's; a
    program in a folder that works only for who has put the root into PYTHONPATH."""
    for package in ("data", "evaluate"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('another package')")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    start = functools.partial(subprocess.run, capture_output=True, text=True, timeout=300,
                              env=environment | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    other = start([sys.executable, "-c", "import evaluate"], cwd=tmp_path)
    assert other.returncode and "another package" in other.stderr, "the other package is in the way"
    programs = {name(file).removesuffix(".py").replace("/", ".") for file in PYTHON
                if not name(file).startswith("tests") and "if __name__ ==" in file.read_text()}
    programs -= {"bench.bench_trl"} if not importlib.util.find_spec("trl") else set()
    assert len(programs) > 25
    said = start([sys.executable, "-c", IMPORTS, *sorted(programs)], cwd=ROOT)
    assert said.stdout.split() == [f"{ROOT}/data.py", f"{ROOT}/evaluate.py", "True"], (
        said.stdout + said.stderr)


# ---- what fits on a screen ---------------------------------------------------------------------------------

LINES = 50
LONG = {("train.py", "train"): 120}  # the loop is read from top to bottom


def test_every_function_fits_a_screen():
    """Guards against functions that nobody sees whole. Docstring and nested functions are counted in."""
    lines = {(name(file), node.name, node.lineno): node.end_lineno - node.lineno + 1 for file in PYTHON
             for node in ast.walk(TREES[file]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert len(lines) > 1000
    fine([f"{file}:{line}: {function} has {long} lines; take it apart, or give a reason in LONG"
          for (file, function, line), long in lines.items() if long > LONG.get((file, function), LINES)])


# ---- flags -------------------------------------------------------------------------------------------------

# What only a small agent needs to be taught. It stands in tiny/lessons.py.
LESSONS = {recipe.PolicySFT: {"renamed", "grounding", "judged", "judge_copies", "lr_again", "renamed_again",
                           "judged_again"},
           recipe.WorldModelSFT: {"renamed", "per_task", "demonstrations", "demonstrations_seed"}}
# What has a command of its own, or a variable of the environment (OMP_NUM_THREADS).
COMMANDS = {"threads", "starts"}


def flags(config: type) -> set[str]:
    return {field.name for field in fields(config)}


def test_the_papers_configs_hold_no_flag_that_only_the_laptop_sets():
    """Guards against flags of the paper's recipe that a reader has to learn are not the paper's."""
    for paper, small in ((recipe.PolicySFT, lessons.Policy), (recipe.WorldModelSFT, lessons.WorldModel)):
        more = flags(small) - flags(paper)
        assert more == LESSONS[paper], f"tiny/lessons.py: {small.__name__} adds {sorted(more)}; see LESSONS"
    assert type(lessons.TRAIN) is recipe.Train
    for config in (recipe.PolicySFT, recipe.WorldModelSFT, recipe.Train, lessons.Policy, lessons.WorldModel):
        assert not flags(config) & COMMANDS, f"{config.__module__}.py: {sorted(flags(config) & COMMANDS)}"


# ---- doctests ----------------------------------------------------------------------------------------------


def test_plain_pytest_runs_every_doctest_once(pytestconfig):
    """Guards against an example in a docstring that nobody runs, and shows what the code no longer does."""
    assert pytestconfig.getoption("doctestmodules"), "pytest.ini: addopts"
    paths = pytestconfig.getini("testpaths")
    run = {file for file in files(*paths, *(f"{path}/**/*.py" for path in paths))
           if not any(fnmatch(str(file), pattern) for pattern in pytestconfig.getoption("ignore_glob"))}
    wrong = [f"{name(file)}:{line}: no path of pytest.ini's testpaths leads to this example"
             for file in PYTHON if file not in run
             for line, text in prose(file) if re.search(r"^ *>>> ", text, re.MULTILINE)]
    twice = r"\b(testmod|run_docstring_examples)[(]"
    wrong += [f"{place}: runs doctests by hand; pytest runs them all (pytest.ini)"
              for file in PYTHON for place, _ in found(twice, file)]
    makefile = re.sub(r"^fast:.*\n(?:\t.*\n)+", "", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    wrong += [f"Makefile: gives pytest {files}; without it pytest.ini's testpaths count (`make fast` chooses)"
              for files in re.findall(r"\bpytest\b[^#\n]* (\w+\.py|tests(?![\w/]))", makefile)]
    fine(wrong)
