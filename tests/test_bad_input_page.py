"""docs/bad-input.md names tests; they exist, in the files it names."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "bad-input.md"


def test_every_test_that_the_page_of_bad_input_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)(?:\[\w+\])?`", PAGE.read_text(encoding="utf-8")))
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    assert len(named) > 50 and named <= defined, named - defined


def test_every_file_that_the_page_of_bad_input_names_exists() -> None:
    files = set(re.findall(r"`(\w+/test_\w+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert files and all((TESTS / file).exists() for file in files)
