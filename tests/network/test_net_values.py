"""Addresses, back-off, multistream-select and address groups: the parts without a socket."""

from __future__ import annotations

import functools
import itertools
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity import Identity
from protocol.net import multistream
from protocol.net.backoff import backoff
from protocol.net.base import Address, HostLimits
from protocol.net.door import Door, address_group

PEER = Identity(bytes(range(32)))


@pytest.mark.parametrize(
    "where",
    [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip6/::1/tcp/1",
        "/dns4/node.example.org/tcp/65535",
        "/dns/localhost/tcp/0",
        "/memory/7",
    ],
)
def test_an_address_reads_back_as_it_was_written(where: str) -> None:
    text = f"{where}/p2p/{PEER.peer_id}"
    address = Address.parse(f"  {text}\n")
    assert str(address) == text
    assert address.node == PEER.node


@given(st.integers(0, 2**32), st.integers(0, 100))
def test_delays_grow_with_jitter_and_stop_at_the_cap(seed: int, skip: int) -> None:
    delays = list(itertools.islice(backoff(Random(seed), first=0.5, cap=30.0), skip + 1))
    longest = min(30.0, 0.5 * 2**skip)
    assert longest / 2 <= delays[-1] <= longest


def test_two_nodes_do_not_wait_alike() -> None:
    one, other = (list(itertools.islice(backoff(Random(seed)), 5)) for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_what_one_household_can_hold_many_of_counts_as_one(one: str, other: str, same: bool) -> None:
    assert (address_group(one) == address_group(other)) is same


async def test_a_flood_of_handshakes_from_one_address_displaces_only_its_own() -> None:
    door = Door(HostLimits(handshakes=8, handshakes_per_address=3))
    finished: list[str] = []

    async def shake_hands(group: str, *, honest: bool) -> None:
        with door.handshake(group):
            if not honest:
                await trio.sleep_forever()
            await trio.sleep(1)
            finished.append(group)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(shake_hands, "honest", honest=True))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(50):
            nursery.start_soon(functools.partial(shake_hands, "attacker", honest=False))
            await trio.testing.wait_all_tasks_blocked()
        assert door.handshakes == 4
        with trio.fail_after(5):
            while not finished:
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert finished == ["honest"]
    assert door.handshakes == 0


class Script:
    """A channel that reads from a script and keeps what was sent."""

    def __init__(self, script: bytes) -> None:
        self.script, self.sent = script, b""

    async def send(self, data: bytes) -> None:
        self.sent += data

    async def receive_exactly(self, count: int) -> bytes:
        if len(self.script) < count:
            raise EOFError
        data, self.script = self.script[:count], self.script[count:]
        return data

    async def close(self) -> None: ...

    def abort(self) -> None: ...


HEADER = multistream.encode(multistream.HEADER)


async def test_the_answering_side_takes_the_first_protocol_it_speaks() -> None:
    script = Script(HEADER + multistream.encode("/a/1") + multistream.encode("/b/1"))
    assert await multistream.answer(script, {"/b/1"}) == "/b/1"
    assert script.sent == HEADER + multistream.encode("na") + multistream.encode("/b/1")


async def test_the_proposing_side_says_what_the_peer_declined() -> None:
    with pytest.raises(multistream.ProtocolNotSpoken):
        await multistream.propose(Script(HEADER + multistream.encode("na")), "/a/1")
    with pytest.raises(multistream.NegotiationFailed, match="answered '/b/1'"):
        await multistream.propose(Script(HEADER + multistream.encode("/b/1")), "/a/1")
    with pytest.raises(multistream.NegotiationFailed, match="instead of"):
        await multistream.propose(Script(multistream.encode("/multistream/9.9.9")), "/a/1")


async def test_a_message_over_the_limit_is_refused_by_its_length_alone() -> None:
    for length, complaint in ((b"\x81\x80\x04", "a message of 65537 bytes"), (b"\xff\xff\xff\x7f", "does not end")):
        with pytest.raises(multistream.NegotiationFailed, match=complaint):
            await multistream.answer(Script(HEADER + length), ())


@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_raise_anything_but_a_failed_negotiation(data: bytes) -> None:
    for script in (data, HEADER + data):
        with pytest.raises((multistream.NegotiationFailed, EOFError)):
            trio.run(multistream.answer, Script(script), ())
