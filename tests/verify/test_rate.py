"""The rate audits are drawn at (SPEC 10.7), against closed forms, its table, and simulated cheats."""

from __future__ import annotations

import math
import random

import pytest

from protocol.verdict import Outcome
from verify.draw import is_drawn
from verify.standing import (
    LEAST_FIRST,
    WINDOW,
    beta_cdf,
    beta_quantile,
    deterrence,
    newest_audits,
    rate,
    sampling_rate,
)

FLOOR = 0.05


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.95, 0.999])
def test_the_quantile_of_the_arcsine_distribution_is_a_squared_sine(p: float) -> None:
    assert beta_quantile(p, 0.5, 0.5) == pytest.approx(math.sin(math.pi * p / 2) ** 2, rel=1e-13)


@pytest.mark.parametrize("n", [1, 2, 7, 50, 400])
def test_where_one_parameter_is_1_the_distribution_is_a_power(n: int) -> None:
    for x in (0.001, 0.01, 0.3, 0.9, 0.999):
        assert beta_cdf(x, n, 1) == pytest.approx(x**n, rel=1e-11, abs=1e-300)
        assert beta_cdf(x, 1, n) == pytest.approx(1 - (1 - x) ** n, rel=1e-11)


@pytest.mark.parametrize("a", [0.5, 3, 20.5, 400.5])
def test_a_symmetric_distribution_has_its_median_in_the_middle(a: float) -> None:
    assert beta_cdf(0.5, a, a) == pytest.approx(0.5, abs=1e-12)


def test_for_whole_numbers_the_distribution_is_a_binomial_tail() -> None:
    for a, b, x in ((3, 9, 0.1), (5, 200, 0.02), (12, 390, 0.04)):
        n = a + b - 1
        tail = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
        assert beta_cdf(x, a, b) == pytest.approx(tail, rel=1e-11)


def test_no_probability_lies_outside_0_and_1() -> None:
    assert beta_cdf(-1, 2, 2) == beta_cdf(0, 2, 2) == 0
    assert beta_cdf(1, 2, 2) == beta_cdf(2, 2, 2) == 1


@pytest.mark.parametrize(("passed", "q"), [(0, 0.99), (20, 0.89), (50, 0.73), (100, 0.47), (200, 0.05), (400, 0.05)])
def test_the_rate_falls_with_clean_audits_as_the_specification_says(passed: int, q: float) -> None:
    assert rate(passed, 0, FLOOR) == pytest.approx(q, abs=0.005)


def test_a_failure_among_the_window_costs_a_node_hundreds_of_clean_audits() -> None:
    assert rate(200, 1, FLOOR) == pytest.approx(0.481, abs=0.001)
    assert rate(395, 5, FLOOR) > 0.5
    rates = [rate(400 - failed, failed, FLOOR) for failed in range(0, 400, 8)]
    assert rates == sorted(rates) and rates[-1] < 1


def test_a_new_node_is_audited_in_full_and_so_is_one_that_failed_lately() -> None:
    assert sampling_rate([True] * (LEAST_FIRST - 1), LEAST_FIRST, FLOOR) == 1
    assert sampling_rate([True] * LEAST_FIRST, LEAST_FIRST, FLOOR) == rate(LEAST_FIRST, 0, FLOOR)
    late = [True] * (LEAST_FIRST - 1) + [False] + [True] * 300
    assert sampling_rate(late, LEAST_FIRST, FLOOR) == 1
    assert sampling_rate([True, *late], LEAST_FIRST, FLOOR) == rate(308, 1, FLOOR)


def test_a_failure_older_than_the_window_is_forgotten() -> None:
    assert sampling_rate([True] * WINDOW + [False], 8, FLOOR) == FLOOR
    assert sampling_rate([True] * (WINDOW - 5) + [False] * 5, 8, FLOOR) > 0.5
    assert sampling_rate([True] * WINDOW + [False] * 5, 8, FLOOR) == FLOOR


def test_of_several_verdicts_on_a_trace_the_newest_counts_and_what_was_not_judged_does_not() -> None:
    verdicts = [
        (b"a", True, Outcome.REFUSED),
        (b"b", False, Outcome.ACCEPTED),
        (b"c", True, Outcome.NOT_JUDGED),
        (b"d", True, Outcome.REFUSED),
        (b"b", True, Outcome.ACCEPTED),
        (b"a", True, Outcome.ACCEPTED),
        (b"e", False, Outcome.REFUSED),
    ]
    assert newest_audits(verdicts) == [True, True, False]
    assert newest_audits([(bytes([i // 256, i % 256]), True, Outcome.ACCEPTED) for i in range(1000)]) == [True] * WINDOW


def test_cheating_pays_below_what_the_audits_and_the_stake_take_back() -> None:
    assert deterrence(1.0, 1.0) == 0
    assert deterrence(0.05, 0.99) == pytest.approx(19.2, abs=0.01)
    with pytest.raises(ValueError, match="above 0"):
        deterrence(0.0, 0.99)


def caught(f: float, n: int, q: float, seed: int) -> bool:
    """Whether one of n submissions, cheated with probability f, is drawn at q and its audit shows it (d = .99)."""
    chance = random.Random(seed)
    value = chance.randbytes(32)
    # Who does not know s_e cannot choose which to cheat: the draw is independent of it.
    return any(
        is_drawn(value, chance.randbytes(32), q) and chance.random() < 0.99 for _ in range(n) if chance.random() < f
    )


@pytest.mark.parametrize(
    ("q", "n", "f"),
    [
        (1, 50, 0.089), (1, 100, 0.046), (1, 200, 0.023), (1, 500, 0.009), (1, 1000, 0.005),
        (0.2, 50, 0.44), (0.2, 100, 0.23), (0.2, 200, 0.115), (0.2, 500, 0.046), (0.2, 1000, 0.023),
        (0.1, 50, 0.89), (0.1, 100, 0.45), (0.1, 200, 0.23), (0.1, 500, 0.093), (0.1, 1000, 0.046),
    ],
)  # fmt: skip
def test_the_draw_catches_99_in_100_nodes_that_cheat_as_often_as_the_table_says(q: float, n: int, f: float) -> None:
    # The table: q · d · f = 1 - .01^(1/n).
    assert q * 0.99 * f == pytest.approx(1 - 0.01 ** (1 / n), rel=0.09)
    runs = 500
    found = sum(caught(f, n, q, seed) for seed in range(runs))
    # 99 % of 500, within four standard deviations (2.2 each) and what the table's rounding adds.
    assert found >= 484


def test_one_who_cheats_once_trusted_is_found_by_the_falling_rate_and_forfeits_it() -> None:
    """Honest for 300 audits, then every fifth trace a cheat, at the floor of .05."""
    days = []
    for seed in range(50):
        chance = random.Random(seed)
        audits = [True] * 300
        submitted = 0
        while audits[0]:
            submitted += 1
            q = sampling_rate(audits, 32, FLOOR)
            if chance.random() < q:
                audits.insert(0, chance.random() >= 0.2)
        days.append(submitted)
        assert sampling_rate(audits, 32, FLOOR) == 1
    # One in 1/(.05 · .2) = 100 on average.
    assert 60 < sum(days) / len(days) < 150
