"""Who gets which slots: fairness, staleness, and what a cheater or a lagging node cannot do."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from trainer.config import TrainerConfig
from trainer.dispatch import (
    SPREAD_SECONDS,
    Asking,
    Grant,
    GroupView,
    Situation,
    SlotView,
    choose,
    stranded,
)
from trainer.ledger_rows import SlotState
from trainer.pacing import Consumption

CONFIG = TrainerConfig(group_size=8, open_groups=4, groups_per_step=2, node_group_share=0.5, slot_attempts=3)
NOW = 1_000_000
A, B, C = b"A" * 32, b"B" * 32, b"C" * 32


def asking(node: bytes = A, slots: int = 16, versions: tuple[int, ...] = (5,), **changes: object) -> Asking:
    return dataclasses.replace(Asking(node, slots, frozenset(versions), 0, False), **changes)  # type: ignore[arg-type]


def situation(*groups: GroupView, waiting: int = 0, **changes: object) -> Situation:
    """Every complete group so far has taught something, unless `consumption` says otherwise."""
    latest = changes.get("latest", 5)
    assert isinstance(latest, int)
    base = Situation(latest, groups, 0, Consumption(latest, waiting), NOW)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def slot(index: int, state: SlotState = SlotState.FREE, **changes: object) -> SlotView:
    held = state is not SlotState.FREE
    view = SlotView(index, state, B if held else None, int(held), frozenset())
    return dataclasses.replace(view, **changes)  # type: ignore[arg-type]


def group(name: int, *slots: SlotView, version: int = 5, age: float = 0.0) -> GroupView:
    filled = slots or tuple(slot(i) for i in range(CONFIG.group_size))
    return GroupView(bytes([name]) * 16, version, NOW - int(age * 1000), filled)


def slots_of(plan_grants: tuple[Grant, ...], group_id: bytes | None) -> list[int]:
    return [index for grant in plan_grants if grant.group_id == group_id for index in grant.slots]


def test_a_lone_node_gets_whole_new_groups() -> None:
    plan = choose(asking(slots=20), situation(), CONFIG)
    assert [len(grant.slots) for grant in plan.grants] == [8, 8, 4]
    assert all(grant.group_id is None and grant.version == 5 for grant in plan.grants)
    assert plan.cause == ""


def test_slots_that_came_free_again_are_leased_before_anything_else() -> None:
    freed = group(1, *(slot(i, SlotState.ACCEPTED) for i in range(7)), slot(7, attempts=1))
    plan = choose(asking(slots=1), situation(group(2), freed), CONFIG)
    assert plan.grants == (Grant(freed.group_id, 5, (7,)),)


def test_open_groups_are_finished_before_new_ones_begin() -> None:
    started = group(1, *(slot(i, SlotState.LEASED) for i in range(4)), *(slot(i) for i in range(4, 8)))
    plan = choose(asking(slots=6), situation(started), CONFIG)
    assert plan.grants == (Grant(started.group_id, 5, (4, 5, 6, 7)), Grant(None, 5, (0, 1)))


def test_a_group_is_spread_while_others_ask_for_work() -> None:
    plan = choose(asking(slots=8), situation(others=1), CONFIG)
    assert [len(grant.slots) for grant in plan.grants] == [4, 4]


def test_what_a_node_drew_before_counts_towards_its_share_of_a_group() -> None:
    mine = [slot(i, SlotState.ACCEPTED, node=A) for i in range(3)]
    plan = choose(asking(slots=3), situation(group(1, *mine, *(slot(i) for i in range(3, 8))), others=1), CONFIG)
    assert slots_of(plan.grants, bytes([1]) * 16) == [3]
    assert slots_of(plan.grants, None) == [0, 1]


def test_a_group_that_the_others_leave_lying_is_finished_by_whoever_asks() -> None:
    mine = [slot(i, SlotState.ACCEPTED, node=A) for i in range(4)]
    lying = [group(n, *mine, *(slot(i) for i in range(4, 8)), age=SPREAD_SECONDS) for n in range(4)]
    plan = choose(asking(slots=5), situation(*lying, others=1), CONFIG)
    assert sum(len(grant.slots) for grant in plan.grants) == 5
    fresh = [dataclasses.replace(each, created_ms=NOW) for each in lying]
    assert choose(asking(slots=5), situation(*fresh, others=1), CONFIG).grants == ()


def test_a_re_leased_slot_may_exceed_the_share_or_a_cheater_could_hold_up_the_group() -> None:
    mine = [slot(i, SlotState.ACCEPTED, node=A) for i in range(7)]
    freed = slot(7, attempts=1, refused=frozenset({B}))
    plan = choose(asking(slots=1), situation(group(1, *mine, freed), others=1), CONFIG)
    assert slots_of(plan.grants, bytes([1]) * 16) == [7]


def test_a_node_that_was_refused_on_a_slot_does_not_get_it_again() -> None:
    refused = group(1, *(slot(i, SlotState.ACCEPTED) for i in range(7)), slot(7, attempts=1, refused=frozenset({A})))
    assert slots_of(choose(asking(A), situation(refused), CONFIG).grants, refused.group_id) == []
    assert slots_of(choose(asking(B), situation(refused), CONFIG).grants, refused.group_id) == [7]


def test_a_slot_that_was_leased_too_often_is_left_alone() -> None:
    worn = group(1, *(slot(i, SlotState.ACCEPTED) for i in range(7)), slot(7, attempts=3))
    assert slots_of(choose(asking(), situation(worn), CONFIG).grants, worn.group_id) == []


def test_leases_are_given_under_versions_the_node_holds_alone() -> None:
    other = group(1, version=4)
    plan = choose(asking(versions=(5,)), situation(other), CONFIG)
    assert {grant.version for grant in plan.grants} == {5}
    assert slots_of(plan.grants, other.group_id) == []


def test_what_was_begun_under_an_older_policy_is_finished_whole_before_anything_new() -> None:
    older, newer = group(2, version=4), group(1, version=5)
    plan = choose(asking(versions=(4, 5), slots=14), situation(newer, older, others=1), CONFIG)
    assert slots_of(plan.grants, older.group_id) == list(range(8))
    assert slots_of(plan.grants, newer.group_id) == [0, 1, 2, 3]
    assert [(grant.version, len(grant.slots)) for grant in plan.grants if grant.group_id is None] == [(5, 2)]


def test_a_node_without_a_usable_policy_is_told_which_to_fetch() -> None:
    plan = choose(asking(versions=(1,)), situation(latest=CONFIG.staleness_limit + 1), CONFIG)
    assert plan.grants == ()
    assert "version 9" in plan.cause and "holds 1" in plan.cause
    assert "holds none" in choose(asking(versions=()), situation(), CONFIG).cause


def test_a_version_the_run_does_not_have_yet_is_no_policy() -> None:
    assert choose(asking(versions=(6,)), situation(), CONFIG).grants == ()


def test_no_new_group_begins_under_a_policy_beyond_the_staleness_target() -> None:
    lagging = situation(group(1, version=2), latest=2 + CONFIG.staleness_target + 1)
    plan = choose(asking(versions=(2,), slots=20), lagging, CONFIG)
    assert slots_of(plan.grants, bytes([1]) * 16) == list(range(8)), "what is open is still finished"
    assert slots_of(plan.grants, None) == []
    assert "newest is 2" in plan.cause


def test_no_new_group_begins_while_what_is_before_it_lasts_beyond_the_staleness_target() -> None:
    enough = (CONFIG.staleness_target + 1) * CONFIG.groups_per_step
    assert len(choose(asking(), situation(waiting=enough - 1), CONFIG).grants) == 1
    plan = choose(asking(), situation(waiting=enough), CONFIG)
    assert plan.grants == ()
    assert plan.cause == (
        "waiting for the learner: 10 groups wait, 0 in flight, enough for 5 steps (staleness_target 4)"
    )


def test_groups_being_drawn_are_before_it_as_much_as_those_that_wait() -> None:
    drawn = [group(n, *(slot(i, SlotState.LEASED) for i in range(8))) for n in range(3)]
    assert choose(asking(), situation(*drawn, waiting=6), CONFIG).grants
    plan = choose(asking(), situation(*drawn, waiting=7), CONFIG)
    assert plan.grants == () and "7 groups wait, 3 in flight" in plan.cause


def test_a_node_that_holds_an_older_policy_begins_less() -> None:
    waiting = situation(latest=6, waiting=CONFIG.staleness_target * CONFIG.groups_per_step)
    assert choose(asking(versions=(6,)), waiting, CONFIG).grants
    assert "wait" in choose(asking(versions=(5,)), waiting, CONFIG).cause


def test_a_policy_that_is_made_and_not_yet_signed_counts() -> None:
    config = dataclasses.replace(CONFIG, staleness_target=0)
    being_published = situation(consumption=Consumption(made=6, waiting=0))
    plan = choose(asking(), being_published, config)
    assert plan.grants == () and "policy 6 is being published" in plan.cause
    assert choose(asking(), situation(consumption=Consumption(made=5, waiting=0)), config).grants


def test_where_few_groups_teach_something_more_of_them_are_begun() -> None:
    few = Consumption(made=5, waiting=0, taught=5, judged=100)
    drawn = [group(n, *(slot(i, SlotState.LEASED) for i in range(8))) for n in range(CONFIG.open_groups)]
    assert choose(asking(), situation(*drawn, consumption=few), CONFIG).grants
    drawn = [group(n, *(slot(i, SlotState.LEASED) for i in range(8))) for n in range(4 * CONFIG.open_groups)]
    assert "being drawn already" in choose(asking(), situation(*drawn, consumption=few), CONFIG).cause


def test_a_node_gets_nothing_that_it_would_hand_in_too_late() -> None:
    started = group(1, *(slot(i, SlotState.LEASED) for i in range(4)), *(slot(i) for i in range(4, 8)), version=4)
    fast = situation(started, others=1, consumption=Consumption(made=5, waiting=0, steps_per_second=0.1))
    just = choose(asking(trace_seconds=79.0, versions=(4, 5)), fast, CONFIG)
    assert slots_of(just.grants, started.group_id), "seven steps and one behind are eight"
    late = choose(asking(trace_seconds=80.0, versions=(4, 5)), fast, CONFIG)
    assert {grant.version for grant in late.grants} == {5}
    never = choose(asking(trace_seconds=90.0, versions=(4, 5)), fast, CONFIG)
    assert never.grants == () and "takes this node 90 s, the learner makes 9 policies" in never.cause
    slower = dataclasses.replace(fast, consumption=Consumption(made=5, waiting=0, steps_per_second=0.05))
    assert choose(asking(trace_seconds=90.0), slower, CONFIG).grants
    assert choose(asking(trace_seconds=90.0), dataclasses.replace(fast, others=0), CONFIG).grants, "it sets the pace"


def test_open_groups_are_bounded() -> None:
    full = [group(n, *(slot(i, SlotState.LEASED) for i in range(8))) for n in range(CONFIG.open_groups)]
    plan = choose(asking(), situation(*full), CONFIG)
    assert plan.grants == () and "being drawn already" in plan.cause


def test_groups_of_a_version_that_the_node_left_behind_do_not_block_new_ones() -> None:
    left = [group(n, version=4) for n in range(CONFIG.open_groups)]
    assert slots_of(choose(asking(versions=(5,)), situation(*left), CONFIG).grants, None)


def test_a_node_on_probation_gets_a_small_share() -> None:
    plan = choose(asking(slots=64, on_probation=True), situation(), CONFIG)
    assert sum(len(grant.slots) for grant in plan.grants) == 2
    full = choose(asking(slots=64, on_probation=True, leased=2), situation(), CONFIG)
    assert full.grants == () and "audits pass" in full.cause


def test_nobody_sits_on_all_the_work_while_others_wait() -> None:
    alone = choose(asking(slots=4096), situation(), CONFIG)
    assert sum(len(grant.slots) for grant in alone.grants) == CONFIG.open_groups * CONFIG.group_size
    beside = choose(asking(slots=4096), situation(others=1), CONFIG)
    assert sum(len(grant.slots) for grant in beside.grants) == CONFIG.open_groups * CONFIG.group_size // 2
    assert choose(asking(leased=16), situation(others=1), CONFIG).grants == ()


def test_idle_nodes_ask_less_often_when_there_are_many() -> None:
    few = choose(asking(), situation(waiting=100, others=1), CONFIG).retry_ms
    many = choose(asking(), situation(waiting=100, others=100), CONFIG).retry_ms
    assert 0 < few < many <= 5_000


def test_a_long_group_is_leased_in_pieces_that_fit_a_lease() -> None:
    config = TrainerConfig(group_size=200, open_groups=2)
    plan = choose(asking(slots=200), situation(), config)
    assert len(plan.grants[0].slots) == limits.MAX_SLOTS_PER_LEASE
    big = GroupView(b"g" * 16, 5, NOW, tuple(slot(i) for i in range(200)))
    pieces = [grant for grant in choose(asking(slots=200), situation(big), config).grants if grant.group_id]
    assert sorted(index for grant in pieces for index in grant.slots) == list(range(200))
    assert all(len(grant.slots) <= limits.MAX_SLOTS_PER_LEASE for grant in pieces)


def test_two_equal_nodes_share_every_group() -> None:
    """Played to the end: the ledger's part is a dict here."""
    drawn: dict[int, list[SlotView]] = {}
    shares: Counter[tuple[int, bytes]] = Counter()
    for turn in range(40):
        node = A if turn % 2 else B
        views = tuple(GroupView(bytes([n]) * 16, 5, NOW, tuple(slots)) for n, slots in drawn.items())
        open_views = tuple(v for v in views if any(s.state is not SlotState.ACCEPTED for s in v.slots))
        for grant in choose(asking(node, slots=4), situation(*open_views, others=1), CONFIG).grants:
            number = len(drawn) if grant.group_id is None else grant.group_id[0]
            slots = drawn.setdefault(number, [slot(i) for i in range(CONFIG.group_size)])
            for index in grant.slots:
                slots[index] = slot(index, SlotState.ACCEPTED, node=node)
                shares[number, node] += 1
    finished = [n for n, slots in drawn.items() if all(s.state is SlotState.ACCEPTED for s in slots)]
    assert len(finished) >= 15
    assert all(shares[n, A] == shares[n, B] == 4 for n in finished)


states = st.sampled_from(list(SlotState))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.lists(st.tuples(states, st.sampled_from([A, B, C]), st.integers(0, 4)), min_size=8, max_size=8),
        ),
        max_size=6,
    ),
    st.integers(0, 100),
    st.frozensets(st.integers(0, 6), max_size=4),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_whatever_the_situation_the_plan_holds_free_slots_once_and_no_more_than_asked(
    drawn: list[tuple[int, list[tuple[SlotState, bytes, int]]]],
    wanted: int,
    versions: frozenset[int],
    others: int,
    on_probation: bool,
) -> None:
    groups = tuple(
        GroupView(
            bytes([n]) * 16,
            version,
            NOW - n * 10_000,
            tuple(
                SlotView(i, state, None if state is SlotState.FREE else node, attempts, frozenset({node}))
                for i, (state, node, attempts) in enumerate(slots)
            ),
        )
        for n, (version, slots) in enumerate(drawn)
    )
    ask = Asking(A, wanted, versions, 0, on_probation)
    plan = choose(ask, Situation(6, groups, others, Consumption(6, 0), NOW), CONFIG)
    given_out = [(grant.group_id, index) for grant in plan.grants if grant.group_id for index in grant.slots]
    assert len(given_out) == len(set(given_out))
    assert sum(len(grant.slots) for grant in plan.grants) <= wanted
    by_id = {each.group_id: each for each in groups}
    for group_id, index in given_out:
        view = by_id[group_id].slots[index]
        assert view.state is SlotState.FREE and A not in view.refused and view.attempts < CONFIG.slot_attempts
    for grant in plan.grants:
        assert grant.version in versions and list(grant.slots) == sorted(grant.slots)


# --- groups nobody will finish ---


def causes(*groups: GroupView, held: tuple[int, ...] = (5,)) -> dict[int, str]:
    return {group_id[0]: cause for group_id, cause in stranded(groups, frozenset(held), 5, NOW, CONFIG)}


def test_a_group_with_a_worn_slot_is_given_up() -> None:
    worn = group(1, *(slot(i, SlotState.ACCEPTED) for i in range(7)), slot(7, attempts=3))
    assert "leased 3 times" in causes(worn)[1]


@pytest.mark.parametrize("state", [SlotState.LEASED, SlotState.ANSWERED])
def test_a_group_that_somebody_still_works_on_is_kept(state: SlotState) -> None:
    working = group(1, slot(0, state), *(slot(i) for i in range(1, 8)), version=4, age=1e6)
    assert causes(working) == {}


def test_a_group_whose_policy_no_node_holds_any_more_is_given_up_after_a_lease() -> None:
    gone = {1: "too stale: no node holds its policy any more"}
    assert causes(group(1, version=4, age=CONFIG.lease_seconds + 1)) == gone
    assert causes(group(1, version=4, age=CONFIG.lease_seconds - 1)) == {}
    assert causes(group(1, version=4, age=CONFIG.lease_seconds + 1), held=(4, 5)) == {}
    assert causes(group(1, version=5, age=CONFIG.lease_seconds + 1), held=()) == {}, "nodes may be away for a while"


def test_a_group_that_nobody_may_finish_is_given_up_in_the_end() -> None:
    assert 1 in causes(group(1, age=10 * CONFIG.lease_seconds + 1))
