"""Fixtures of the end-to-end suites."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.network import Network


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    """Settings of the run may be given as the fixture's parameter."""
    made = Network(tmp_path, **getattr(request, "param", {}))
    try:
        yield made
    finally:
        made.close()
