"""Advantages: what a completion earned beyond its group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantage import advantages, is_flat

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=64)


def test_the_advantage_is_the_reward_less_the_groups_mean_and_is_not_scaled() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == (0.75, -0.25, -0.25, -0.25)
    assert advantages([10.0, 0.0, 0.0, 0.0]) == (7.5, -2.5, -2.5, -2.5)


@given(REWARDS)
def test_the_advantages_of_a_group_add_up_to_nothing(rewards: list[float]) -> None:
    assert sum(advantages(rewards)) == pytest.approx(0.0, abs=1e-9)


@given(REWARDS)
def test_a_group_is_flat_exactly_when_no_completion_differs(rewards: list[float]) -> None:
    assert is_flat(rewards) == (len(set(rewards)) == 1)
    assert is_flat([rewards[0]] * len(rewards))
