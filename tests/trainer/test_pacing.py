"""Leases are issued only as fast as the learner consumes: whole runs on a virtual clock, with and without pacing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import pytest

from tests.trainer.paced_run import NodeOf, Outcome, PacedRun
from trainer import pacing
from trainer.config import TrainerConfig
from trainer.pacing import Consumption, lease_seconds, most_open, queue_of, versions_until_used, why_begin_nothing

CONFIG = TrainerConfig(group_size=2, groups_per_step=4, open_groups=16, staleness_target=4, staleness_limit=8)
UNPACED = dataclasses.replace(CONFIG, staleness_target=10**6)
SECONDS = 150.0


def between(low: float, high: float) -> Callable[[Random], float]:
    return lambda random: random.uniform(low, high)


FAST = [NodeOf(8, between(0.5, 1.5)) for _ in range(3)]
SLOW = [NodeOf(4, between(10, 40)) for _ in range(3)]


def played(config: TrainerConfig, nodes: list[NodeOf], step_seconds: float, share: float = 1.0) -> Outcome:
    return PacedRun(config, nodes, step_seconds=step_seconds, share=share).run(SECONDS)


def within(outcome: Outcome, target: int) -> float:
    """Share of the groups learned from."""
    return sum(n for staleness, n in outcome.staleness.items() if staleness <= target) / outcome.staleness.total()


# --- whole runs ---


@pytest.mark.parametrize("target", [0, 1, 4])
def test_fast_nodes_and_a_slow_learner_keep_to_the_target_and_lose_nothing(target: int) -> None:
    outcome = played(dataclasses.replace(CONFIG, staleness_target=target), FAST, step_seconds=4.0)
    assert outcome.most == target and outcome.dropped == 0
    assert target == 0 or outcome.idle < 0.5, "the learner never waits for them"
    assert outcome.causes["waiting for the learner"]


def test_without_pacing_the_same_run_grows_stale_and_throws_work_away() -> None:
    outcome = PacedRun(UNPACED, FAST[:1], step_seconds=4.0).run(SECONDS)
    assert outcome.most == CONFIG.staleness_limit and outcome.dropped > 100


def test_slow_nodes_and_a_fast_learner_lose_no_time_to_pacing() -> None:
    paced, unpaced = (played(config, SLOW, step_seconds=0.5) for config in (CONFIG, UNPACED))
    assert paced.steps == unpaced.steps > 5 and paced.idle <= unpaced.idle
    assert paced.most <= CONFIG.staleness_target and paced.dropped == 0


def test_nodes_that_come_all_at_once_are_not_all_given_work() -> None:
    crowd = [*FAST[:1], *(NodeOf(8, between(0.5, 1.5), joins=60.0) for _ in range(9))]
    outcome = played(dataclasses.replace(CONFIG, open_groups=64), crowd, step_seconds=4.0)
    assert outcome.most <= CONFIG.staleness_target and outcome.dropped == 0 and outcome.idle < 0.5


def test_work_that_comes_in_bursts_stays_fresh() -> None:
    def rarely(random: Random) -> float:
        return 12.0 if random.random() < 0.2 else 0.5

    outcome = played(CONFIG, [NodeOf(8, rarely) for _ in range(3)], step_seconds=4.0)
    assert within(outcome, CONFIG.staleness_target) == 1.0 and outcome.dropped == 0


def test_one_group_in_ten_that_teaches_something_is_enough_to_keep_the_learner_busy() -> None:
    outcome = played(CONFIG, [NodeOf(24, between(0.5, 1.5)) for _ in range(3)], step_seconds=5.0, share=0.1)
    assert outcome.idle < 5.0 and outcome.dropped == 0
    assert within(outcome, CONFIG.staleness_target) >= 0.98, "which groups will teach something is chance"
    assert outcome.most <= CONFIG.staleness_target + 1


def test_where_one_group_in_ten_teaches_something_slow_nodes_draw_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, config = [NodeOf(32, between(2, 6))], dataclasses.replace(CONFIG, open_groups=4)
    paced = played(config, nodes, step_seconds=0.5, share=0.1)
    monkeypatch.setattr("trainer.dispatch.most_open", lambda of, config: config.open_groups)
    assert paced.steps >= 2 * played(config, nodes, step_seconds=0.5, share=0.1).steps > 2
    assert within(paced, CONFIG.staleness_target) == 1.0


def test_a_node_a_hundred_times_slower_than_the_others_does_not_spoil_their_groups() -> None:
    paced = played(CONFIG, [*FAST, NodeOf(4, between(80, 120))], step_seconds=4.0)
    assert paced.dropped <= 3 * CONFIG.open_groups, "what it was given before its time was known"
    assert any("a trace takes this node" in cause for cause in paced.causes)


# --- by itself ---


def test_nothing_measured_means_that_every_group_is_expected_to_teach_something() -> None:
    fresh = Consumption(made=0, waiting=0)
    config = dataclasses.replace(CONFIG, open_groups=100)
    begun = next(n for n in range(100) if why_begin_nothing(fresh, n, 0, config))
    assert begun == (config.staleness_target + 1) * config.groups_per_step


def test_the_cause_names_what_waits_what_is_drawn_and_for_how_many_steps_that_is() -> None:
    half = Consumption(made=7, waiting=14, taught=500, judged=1001)
    assert why_begin_nothing(half, 16, 7, CONFIG) == (
        "waiting for the learner: 14 groups wait, 16 in flight, enough for 5 steps (staleness_target 4)"
    )


def test_chance_does_not_hold_back_what_the_next_step_lacks() -> None:
    strict = dataclasses.replace(CONFIG, staleness_target=0)
    rare = Consumption(made=3, waiting=0, taught=1, judged=19)
    assert versions_until_used(queue_of(rare, 20), strict) >= 1, "with luck they are too many"
    assert why_begin_nothing(rare, 20, 3, strict) == ""
    assert why_begin_nothing(rare, 40, 3, strict) != ""


def test_a_badly_measured_share_is_not_relied_on() -> None:
    well, badly = Consumption(0, 0, taught=99, judged=999), Consumption(0, 0, taught=0, judged=9)
    assert well.share == badly.share == 0.1
    assert queue_of(badly, 40).most > queue_of(well, 40).most > queue_of(well, 40).usual == 4.0


def test_more_groups_are_open_at_once_where_few_teach_something_and_not_without_bound() -> None:
    assert most_open(Consumption(0, 0), CONFIG) == 16
    assert most_open(Consumption(0, 0, taught=49, judged=99), CONFIG) == 32
    assert most_open(Consumption(0, 0, taught=0, judged=999), CONFIG) == 16 / pacing.SCARCE


def test_deadlines_grow_with_what_may_be_drawn_beyond_what_lease_seconds_is_for() -> None:
    config = TrainerConfig()
    assert lease_seconds(config, 64) == lease_seconds(config, pacing.BASE_TOKENS) == 120.0
    assert lease_seconds(config, 4096) == pytest.approx(120 + 3072 * 0.05)
    assert lease_seconds(dataclasses.replace(config, lease_token_seconds=0.0), 131_072) == 120.0
