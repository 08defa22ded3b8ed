"""How many rollouts are kept in flight: sized by the share of time spent decoding, bounded by deadlines."""

from __future__ import annotations

import pytest

from node.pace import FIRST, MOST_A_SLOT, Completion, Pace, held_at_most, most_in_flight, rollouts_in_flight


def paced(count: int, in_turns: float, whole: float) -> Pace:
    pace = Pace()
    for _ in range(count):
        pace.add(Completion(in_turns, whole))
    return pace


def test_64_slots_at_a_fifth_of_the_time_decoding_are_kept_busy_by_320_rollouts() -> None:
    assert rollouts_in_flight(64, paced(10, 2.0, 10.0).decoding_share(), most=1024) == 320


@pytest.mark.parametrize(
    ("slots", "share", "most", "wanted"),
    [
        (64, 1.0, 1024, 64),
        (64, 0.2, 128, 128),  # never more than can wait for their environments
        (64, 0.2, 10, 64),  # and never fewer than there are slots
        (3, 0.4, 100, 8),
        (8, 0.0, 40, 40),
        (1, 0.01, 1_000, 100),
    ],
)
def test_rollouts_in_flight_are_slots_over_the_share_within_bounds(
    slots: int, share: float, most: int, wanted: int
) -> None:
    assert rollouts_in_flight(slots, share, most) == wanted


def test_nothing_is_concluded_from_the_first_few_completions() -> None:
    few = paced(FIRST - 1, 1.0, 100.0)
    assert few.decoding_share() == 1.0 and few.mean() is None
    few.add(Completion(1.0, 100.0))
    assert few.decoding_share() == pytest.approx(0.01) and few.mean() == 100.0
    few.forget()
    assert few.decoding_share() == 1.0 and few.longest() == 0.0


def test_the_share_settles_where_as_many_are_in_a_turn_as_there_are_slots() -> None:
    """Decoding takes 1 s and the environment 4; who finds no slot waits in its turn, and that is measured too."""
    slots, in_flight = 64, 1_000
    for _ in range(40):
        waiting = max(0.0, in_flight / slots - 5.0)  # Little's law: 64 turns end in a second
        share = paced(FIRST, 1.0 + waiting, 5.0 + waiting).decoding_share()
        in_flight = rollouts_in_flight(slots, share, most=1_024)
    assert in_flight == pytest.approx(320, rel=0.05)


def test_more_would_wait_for_a_slot_or_for_an_environment() -> None:
    assert most_in_flight(64, 256) == 320
    assert most_in_flight(2, 256) == 2 * MOST_A_SLOT


def test_no_more_leases_are_held_than_can_be_drawn_by_their_deadline() -> None:
    assert held_at_most(64, 32, None, 120.0) == 96  # nothing is known yet
    assert held_at_most(64, 32, 1.0, 120.0) == 96
    assert held_at_most(64, 32, 100.0, 120.0) == 39  # 64 in 100 s: 38.4 in half of a lease's time
    assert held_at_most(4, 2, 10_000.0, 1.0) == 1


def test_a_lease_too_short_for_a_completion_is_known_by_the_slowest_tenth() -> None:
    pace = paced(18, 1.0, 2.0)
    pace.add(Completion(1.0, 50.0))
    assert pace.longest() == 50.0
    for _ in range(21):
        pace.add(Completion(1.0, 2.0))
    assert pace.longest() == 2.0
