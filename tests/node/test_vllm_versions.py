"""Which vLLM the engine works with: the message has both versions and what to do."""

from __future__ import annotations

import pytest

from node.vllm_engine import check_version
from protocol.errors import EngineError


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1rc1+cu128"])
def test_a_vllm_that_was_tried_is_taken(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "main"])
def test_a_vllm_of_another_version_is_refused_with_the_versions(version: str) -> None:
    with pytest.raises(EngineError) as caught:
        check_version(version)
    assert f"vLLM {version} is installed; this engine works with 0.32 or later, below 0.33" in str(caught.value)
    assert "--engine transformers" in str(caught.value)


def test_a_vllm_that_is_not_there_is_told_with_how_to_install_it() -> None:
    with pytest.raises(EngineError, match=r'vLLM is not installed: .*pip install -e "\.\[vllm\]"'):
        check_version(None)
