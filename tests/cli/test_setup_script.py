"""What `make run` says while it makes its environment. The packages themselves are not fetched: a stand-in for Python
answers as venv and pip would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
case "$*" in
    "-c "*) exit {good} ;;
    "--version") echo "Python 3.9.1" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install --quiet "*) echo "$*" >> {log} ;;
esac
"""


def set_up(folder: Path, *, good: bool) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(STAND_IN.format(good=int(not good), log=folder / "log"))
    python.chmod(0o755)
    return subprocess.run(
        [ROOT / "scripts" / "setup", python, folder / "venv", "torch==9.9"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_every_step_of_the_set_up_is_said_before_it_is_taken(tmp_path: Path) -> None:
    done = set_up(tmp_path, good=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "once only, and some minutes" in lines[0]
    assert [line[7:13] for line in lines[1:4]] == ["1 of 3", "2 of 3", "3 of 3"]
    assert "torch==9.9" in lines[2] and lines[4].startswith("setup: done in ")
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["torch==9.9", "."]


@pytest.mark.parametrize("target", [".venv/.installed", ".venv/.test", ".venv/.run-smollm2", ".venv/.fuzz"])
def test_no_target_installs_without_a_word(target: str) -> None:
    recipe = (ROOT / "Makefile").read_text().split(f"$(VENV)/{target.rpartition('/')[2]}: ")[1].split("\n\n")[0]
    steps = recipe.splitlines()[1:]
    assert steps[0].startswith(('\t@echo "setup: ', "\tscripts/setup ")), steps
