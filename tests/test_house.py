"""Claims about the repository itself: what is cited exists, and the files of the paper can be read in the
order of README's table."""
import re

from conftest import ROOT
from safetensors.torch import load_file

FOLDERS = ("envs", "baselines", "examples", "bench", "tests")
TEXTS = {file: file.read_text() for folder in (".", *FOLDERS, "docs") for kind in ("py", "md")
         for file in ROOT.glob(f"{folder}/*.{kind}")}


def test_what_is_cited_linked_or_called_exists():
    """Guards: a reason that nobody can look up (NOTES 4.3, 4.4 stand in docs/notes.md), dead links, commands
    that are gone, adapters that change nothing."""
    states = [load_file(file) for file in ROOT.glob("weights/*/*.safetensors")]  # of make look
    assert len(states) == 4 and all(half.any() for state in states for half in state.values())
    known = {*re.findall(r"^- \*\*(\d+\.\d+) ", TEXTS[ROOT / "docs/notes.md"], re.M)}
    for file, text in TEXTS.items():
        for cited in re.findall(r"\bNOTES[\s#]+(\d+\.\d+(?:[\s#]*(?:,|-|to|and)[\s#]*\d+\.\d+)*)", text):
            assert {*re.findall(r"\d+\.\d+", cited)} <= known, file
        if file.suffix == ".md":
            links = re.findall(r"\]\((?!https?://|mailto:|#)([^)\s#]+)[^)]*\)", text)
            assert all((file.parent / link).exists() for link in links), file
            called = re.findall(r"\bpython3? +([\w./-]+)\.py\b", text) + [
                name.replace(".", "/") for name in re.findall(rf" -m +((?:{'|'.join(FOLDERS)})\.\w+)", text)]
            assert all((ROOT / f"{name}.py").exists() for name in called), file


def test_the_paper_imports_only_from_the_files_above_it():
    """Guards: circles, and a name that a reader meets before the file that explains it. README's table lists
    every file of the root, each below all that it imports; train, evaluate and audit import folders too."""
    rows = re.findall(r"^\| \[(\w+)\.py\]", TEXTS[ROOT / "README.md"], re.M)
    assert {*rows} == {file.stem for file in ROOT.glob("*.py")}
    for k, name in enumerate(rows):
        imported = {*re.findall(r"^ *(?:from|import) (\w+)", TEXTS[ROOT / f"{name}.py"], re.M)}
        folders = () if name in ("train", "evaluate", "audit") else FOLDERS
        assert not imported & {*rows[k:], *folders}, name
