"""Advantages: what a completion earned beyond its group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantage import ADVANTAGES, grpo, is_flat, length_penalty, mean, rloo

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=64)


def test_the_advantage_is_the_reward_less_the_groups_mean_and_is_not_scaled() -> None:
    assert mean([1.0, 0.0, 0.0, 0.0]) == (0.75, -0.25, -0.25, -0.25)
    assert mean([10.0, 0.0, 0.0, 0.0]) == (7.5, -2.5, -2.5, -2.5)


def test_grpo_divides_by_the_samples_standard_deviation() -> None:
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx((1.5, -0.5, -0.5, -0.5), rel=1e-3)
    assert grpo([10.0, 0.0, 0.0, 0.0]) == pytest.approx(grpo([1.0, 0.0, 0.0, 0.0]), rel=1e-3)


def test_rloo_takes_the_others_mean_as_the_baseline() -> None:
    assert rloo([1.0, 0.0, 0.5]) == pytest.approx((0.75, -0.75, 0.0))


@given(REWARDS)
def test_rloo_is_the_advantage_over_the_mean_scaled_by_the_groups_size(rewards: list[float]) -> None:
    scale = len(rewards) / (len(rewards) - 1)
    assert rloo(rewards) == pytest.approx([scale * gain for gain in mean(rewards)], abs=1e-9)


@given(REWARDS, st.sampled_from(sorted(ADVANTAGES)))
def test_the_advantages_of_a_group_add_up_to_nothing(rewards: list[float], name: str) -> None:
    assert sum(ADVANTAGES[name](rewards)) == pytest.approx(0.0, abs=1e-7)


def test_the_length_penalty_grows_from_the_ramp_to_the_longest() -> None:
    found = [length_penalty(drawn, most=100, ramp=20) for drawn in (1, 80, 90, 100, 120)]
    assert found == [0.0, 0.0, -0.5, -1.0, -1.0]


@given(REWARDS)
def test_a_group_is_flat_exactly_when_no_completion_differs(rewards: list[float]) -> None:
    assert is_flat(rewards) == (len(set(rewards)) == 1)
    assert is_flat([rewards[0]] * len(rewards))
