"""Fixtures of several suites. Heavy imports wait until a test asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.studio import Rollout, Studio


@pytest.fixture(scope="session")
def studio() -> Studio:
    from tests.studio import Studio

    return Studio()


@pytest.fixture(scope="session")
def long_rollout(studio: Studio) -> Rollout:
    """An honest rollout with an observation and enough generated tokens that its proofs are judged."""
    from tests.studio import first_rollout

    return first_rollout(studio, lambda trace: len(trace.spans) >= 3 and len(trace.logprobs) >= 12)
