"""Claims about the repository itself: what is cited exists, and the files of the paper can be read in the
order of README's table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "worlds", "baselines", "examples", "bench", "tests", "tests/helpers", "docs")
PYTHON = sorted(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/*.py"))
MARKDOWN = sorted(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/*.md"))
# The commands, which put parts of all folders together.
ENTRIES = ("train", "sft", "evaluate", "audit", "report")


def found(pattern: str, files: list[Path]) -> Iterator[tuple[str, str]]:
    """("file:line", first group) of every match."""
    for file in files:
        text = file.read_text()
        for match in re.finditer(pattern, text):
            yield f"{file.relative_to(ROOT)}:{1 + text.count(chr(10), 0, match.start(1))}", match[1]


def fine(wrong: list[str]) -> None:
    """Fails with all that is wrong, a line each."""
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_every_cited_entry_of_the_notes_exists():
    """Guards against a reason that nobody can look up: `NOTES 7.3` has to stand in docs/notes.md."""
    entries = set(re.findall(r"^- \*\*(\d+\.\d+) ", (ROOT / "docs/notes.md").read_text(), re.MULTILINE))
    cited = r"\bNOTES[\s#]+(\d+\.\d+(?:[\s#]*(?:,|-|to|and)[\s#]*\d+\.\d+)*)"  # also NOTES 4.3, 4.4
    places = list(found(cited, [*PYTHON, *MARKDOWN, ROOT / "Makefile"]))
    assert len(places) > 20, "nothing cites docs/notes.md any more?"
    fine([f"{place}: cites NOTES {number}, which docs/notes.md does not have"
          for place, numbers in places for number in re.findall(r"\d+\.\d+", numbers)
          if number not in entries])


def test_every_link_and_command_of_a_markdown_file_leads_somewhere():
    """Guards against dead links, and commands that no longer exist. Links into the web are not followed."""
    wrong = [f"{place}: links to {target}, which does not exist"
             for file in MARKDOWN
             for place, target in found(r"\]\((?!https?://|mailto:|#)([^)\s#]+)[^)]*\)", [file])
             if not (file.parent / target).exists()]
    wrong += [f"{place}: {script} does not exist"
              for place, script in found(r"\bpython3? +([\w./-]+\.py)\b", MARKDOWN)
              if not (ROOT / script).exists()]
    ours = "|".join(folder for folder in FOLDERS if folder.isidentifier())
    wrong += [f"{place}: there is no module {module}"
              for place, module in found(rf" -m +((?:{ours})\.\w+)", MARKDOWN)
              if not (ROOT / f"{module.replace('.', '/')}.py").exists()]
    fine(wrong)


def test_the_paper_imports_only_from_the_files_above_it():
    """Guards against circles, and a name that a reader meets before the file that explains it. README's table
    of files lists every file of the root, each below all that it imports; the commands import folders too."""
    listed = re.findall(r"^\| *\[?`?(\w+)\.py\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = list(dict.fromkeys(listed))
    assert set(rows) == {file.stem for file in PYTHON if file.parent == ROOT}
    wrong = []
    for k, name in enumerate(rows):
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            modules = ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                       else [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            for module in (module.partition(".")[0] for module in modules):
                if module in rows[k:] or (name not in ENTRIES and module in FOLDERS):
                    wrong.append(f"{name}.py:{node.lineno}: imports {module}")
    fine(wrong)


def test_every_pin_agrees_with_the_lock_of_the_gpu_install():
    """Guards: `pip install -r requirements.txt -r requirements-gpu.txt` that ends in ResolutionImpossible."""
    lines = lambda name: [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines("constraints-gpu.txt") if line)
    asked = [line for line in lines("requirements.txt") + lines("requirements-gpu.txt") if line]
    assert "-c constraints-gpu.txt" in asked
    for package, version in (line.split("==") for line in asked if not line.startswith("-c")):
        assert pins[package.lower()] == version, package
