"""Claims about the repository itself: what is cited exists, and the files of the paper can be read in the
order of README's table."""
import re

from conftest import ROOT

FOLDERS = (".", "envs", "baselines", "examples", "bench", "tests", "tests/helpers", "docs")
PYTHON = sorted(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/*.py"))
MARKDOWN = sorted(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/*.md"))
# The commands, which put parts of all folders together.
ENTRIES = ("train", "sft", "evaluate", "audit", "report")


def found(pattern, files):
    """(file, first group) of every match."""
    return [(file, match[1]) for file in files for match in re.finditer(pattern, file.read_text(), re.M)]


def test_what_is_cited_linked_or_called_exists():
    """Guards: a reason that nobody can look up (NOTES 4.3, 4.4 stand in docs/notes.md), dead links, commands
    that are gone."""
    entries = {number for _, number in found(r"^- \*\*(\d+\.\d+) ", [ROOT / "docs/notes.md"])}
    cited = found(r"\bNOTES[\s#]+(\d+\.\d+(?:[\s#]*(?:,|-|to|and)[\s#]*\d+\.\d+)*)",
                  [*PYTHON, *MARKDOWN, ROOT / "Makefile"])
    numbers = {number for _, some in cited for number in re.findall(r"\d+\.\d+", some)}
    assert len(cited) > 20 and numbers <= entries
    links = found(r"\]\((?!https?://|mailto:|#)([^)\s#]+)[^)]*\)", MARKDOWN)
    assert not [link for link in links if not (link[0].parent / link[1]).exists()]
    ours = "|".join(folder for folder in FOLDERS if folder.isidentifier())
    called = found(r"\bpython3? +([\w./-]+\.py)\b", MARKDOWN)
    modules = found(rf" -m +((?:{ours})\.\w+)", MARKDOWN)
    called += [(file, f"{name.replace('.', '/')}.py") for file, name in modules]
    assert not [call for call in called if not (ROOT / call[1]).exists()]


def test_the_paper_imports_only_from_the_files_above_it():
    """Guards: circles, and a name that a reader meets before the file that explains it. README's table lists
    every file of the root, each below all that it imports; the commands import folders too."""
    rows = list(dict.fromkeys(name for _, name in found(r"^\| *\[?`?(\w+)\.py\b", [ROOT / "README.md"])))
    assert {*rows} == {file.stem for file in PYTHON if file.parent == ROOT}
    for k, name in enumerate(rows):
        imported = {name for _, name in found(r"^ *(?:from|import) (\w+)", [ROOT / f"{name}.py"])}
        assert not imported & {*rows[k:], *(FOLDERS if name not in ENTRIES else ())}, name
