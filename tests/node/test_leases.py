"""The states of leases and slots: what is drawn next, and when a lease may be given back."""

from __future__ import annotations

from dataclasses import replace

from node.leases import LeaseBook
from protocol.lease import Lease, Slot

LEASE = Lease(
    run=b"\1" * 32,
    lease_id=b"\2" * 16,
    node=b"\3" * 32,
    policy_version=4,
    policy_root=b"\5" * 32,
    environment="tools8@1",
    parameters="",
    task_index=6,
    group_id=b"\7" * 16,
    group_size=2,
    slots=(Slot(0, 100), Slot(1, 101)),
    prompt=(1, 2, 3),
    temperature=1.0,
    max_turn_tokens=8,
    max_tokens=16,
    issued_ms=0,
    deadline_ms=1_000,
)


def test_each_slot_of_a_lease_is_drawn_once_and_only_under_its_policy() -> None:
    book = LeaseBook()
    assert book.take(LEASE)
    assert book.next_slot(version=3) is None
    drawn = [book.next_slot(version=4) for _ in range(3)]
    assert [(work.slot, work.seed) for work in drawn if work] == [(0, 100), (1, 101)]


def test_a_lease_that_comes_twice_is_held_once() -> None:
    book = LeaseBook()
    assert book.take(LEASE)
    assert not book.take(LEASE)
    assert book.waiting() == 2


def test_a_lease_is_gone_when_all_its_slots_are_settled() -> None:
    book = LeaseBook()
    book.take(LEASE)
    for _ in range(2):
        work = book.next_slot(4)
        assert work is not None
        book.drawn(work.lease.lease_id, work.slot)
    assert not book.settled(LEASE.lease_id, 0)
    assert book.settled(LEASE.lease_id, 1)
    assert book.is_empty()
    assert book.returns() == ()


def test_a_return_waits_for_the_traces_already_drawn_under_the_lease() -> None:
    book = LeaseBook()
    book.take(LEASE)
    work = book.next_slot(4)
    assert work is not None
    book.drawn(LEASE.lease_id, work.slot)
    book.give_back(LEASE.lease_id, "stopping")
    assert book.next_slot(4) is None
    assert book.returns() == ()
    book.settled(LEASE.lease_id, work.slot)
    (due,) = book.returns()
    assert (due.lease_id, due.cause) == (LEASE.lease_id, "stopping")
    book.returned(due)
    assert book.is_empty()


def test_a_slot_whose_lease_was_given_back_is_no_longer_wanted() -> None:
    book = LeaseBook()
    book.take(LEASE)
    work = book.next_slot(4)
    assert work is not None and book.is_drawing(work)
    book.give_back(LEASE.lease_id, "the engine failed")
    assert not book.is_drawing(work)
    assert len(book.returns()) == 1


def test_a_lease_is_given_back_once_and_for_the_first_cause() -> None:
    book = LeaseBook()
    book.take(LEASE)
    book.give_back(LEASE.lease_id, "first")
    book.give_back(LEASE.lease_id, "second")
    assert [each.cause for each in book.returns()] == ["first"]


def test_what_is_fully_drawn_is_not_given_back_when_everything_else_is() -> None:
    book = LeaseBook()
    other = replace(LEASE, lease_id=b"\x09" * 16)
    book.take(LEASE)
    book.take(other)
    for _ in range(2):
        work = book.next_slot(4)
        assert work is not None and work.lease is LEASE
        book.drawn(LEASE.lease_id, work.slot)
    assert book.give_back_all("stopping") == (other.lease_id,)
    assert [each.lease_id for each in book.returns()] == [other.lease_id]


def test_a_lease_of_an_earlier_process_is_given_back_after_its_traces_are_settled() -> None:
    book = LeaseBook()
    book.resume(LEASE, [1], "started again")
    assert book.waiting() == 0 and book.returns() == ()
    book.settled(LEASE.lease_id, 1)
    assert [each.lease_id for each in book.returns()] == [LEASE.lease_id]


def test_leases_past_their_deadline_with_something_left_to_draw_are_named() -> None:
    book = LeaseBook()
    book.take(LEASE)
    assert book.expired(now_ms=999) == ()
    assert book.expired(now_ms=1_000) == (LEASE.lease_id,)


def test_policies_with_slots_left_to_draw_are_in_use() -> None:
    book = LeaseBook()
    book.take(LEASE)
    assert book.versions() == {4}
    for _ in range(2):
        work = book.next_slot(4)
        assert work is not None
        book.drawn(LEASE.lease_id, work.slot)
    assert book.versions() == frozenset()
