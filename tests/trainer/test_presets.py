"""The presets are settings that exist, and sound ones."""

from __future__ import annotations

import pytest

from trainer.config import config_from
from trainer.presets import PRESETS


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_makes_a_valid_configuration(name: str) -> None:
    config = config_from(dict(PRESETS[name]), name)
    assert config.loss_tokens >= 0 and config.staleness_target <= config.staleness_limit
