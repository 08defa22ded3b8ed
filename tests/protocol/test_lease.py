"""Leases and slot seeds. Single faults: tests/vectors/lease.json, seed.json."""

from __future__ import annotations

import dataclasses

import pytest

from protocol import codec, noise
from protocol.errors import Code, DecodeError
from protocol.lease import Lease, SeedInput, Slot, check_lease, slot_seed

BOUND = SeedInput(bytes(32), bytes(32), "tools8@1", "", 41, bytes(16), 3, bytes(32))
LEASE = Lease(
    run=bytes(32),
    lease_id=bytes(16),
    node=bytes(32),
    policy_version=0,
    policy_root=bytes(32),
    environment="tools8@1",
    parameters="",
    task_index=41,
    group_id=bytes(16),
    group_size=8,
    slots=(Slot(0, 11), Slot(3, 2**64 - 1)),
    prompt=(1, 2),
    temperature=1.0,
    max_turn_tokens=16,
    max_tokens=48,
    issued_ms=1,
    deadline_ms=2,
)


def test_a_slot_knows_its_seed_and_a_foreign_slot_has_none() -> None:
    assert LEASE.seed_of(0) == 11
    assert LEASE.seed_of(3) == 2**64 - 1
    assert LEASE.seed_of(1) is None


def test_a_seed_depends_on_all_it_is_bound_to() -> None:
    changed = (
        dataclasses.replace(BOUND, run=b"\1" + bytes(31)),
        dataclasses.replace(BOUND, policy_root=b"\1" + bytes(31)),
        dataclasses.replace(BOUND, environment="guess@1"),
        dataclasses.replace(BOUND, parameters="x"),
        dataclasses.replace(BOUND, task_index=42),
        dataclasses.replace(BOUND, group_id=b"\1" + bytes(15)),
        dataclasses.replace(BOUND, slot=4),
        dataclasses.replace(BOUND, secret=b"\1" + bytes(31)),
    )
    assert len(changed) == len(codec.fields_of(SeedInput))
    seeds = {slot_seed(each) for each in (BOUND, *changed)}

    assert len(seeds) == len(changed) + 1
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_seed_is_not_bound_to_the_node_so_a_slot_leased_again_draws_the_same() -> None:
    assert "node" not in dict(codec.fields_of(SeedInput))


def test_there_is_one_way_to_make_a_seed() -> None:
    """The digest length is part of BLAKE2b's result: two functions would differ one day."""
    assert slot_seed(BOUND) == noise.slot_seed(codec.encode(BOUND))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"slots": ()}, "holds no slot"),
        ({"slots": (Slot(3, 1), Slot(3, 2))}, "out of order"),
        ({"slots": (Slot(8, 1),)}, "outside its group"),
        ({"prompt": ()}, "an empty prompt"),
        ({"temperature": 0.0}, "not above 0"),
        ({"max_tokens": 0}, "allows no token"),
        ({"deadline_ms": 1}, "ends before it begins"),
        ({"environment": ""}, "names no environment"),
    ],
)
def test_a_lease_that_makes_no_sense_says_why(change: dict[str, object], fault: str) -> None:
    check_lease(LEASE)

    with pytest.raises(DecodeError, match=fault) as caught:
        check_lease(dataclasses.replace(LEASE, **change))
    assert caught.value.code is Code.MALFORMED
