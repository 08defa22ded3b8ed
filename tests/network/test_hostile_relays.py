"""Attacks on a relay, on who has a place at one, and on hole punchers; each is a fault of libp2p 0.8.1's own relay, or
one that any relay must contain (docs/decisions/0012).

The relay here is ours; the attackers speak raw frames on streams of their own. Not here: what honest nodes get
(test_relay.py), connections and streams (test_hostile_peers.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from network_worlds import ECHO, ask, echo

from protocol.errors import ConnectionLost, NetError, Unreachable
from protocol.identity import Identity
from protocol.net import circuit, multistream, p2p, protobuf
from protocol.net.base import Address, Host, HostLimits, RelayLimits
from protocol.net.circuit import HopKind, PunchKind, Status, StopKind
from protocol.net.framing import ChannelClosed
from protocol.net.protobuf import Malformed
from protocol.net.yamux import Channel

LIMITS = RelayLimits(bytes_per_second=1e9, reservations=4)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def open_host(who: Identity | None = None, *, listening: bool = False, limits: HostLimits | None = None) -> Any:
    return p2p.open_host(who or Identity.generate(), listen=LOOPBACK if listening else (), limits=limits)


@asynccontextmanager
async def a_relay(limits: RelayLimits = LIMITS) -> AsyncIterator[Host]:
    async with open_host(listening=True) as relay:
        relay.relay(limits, lambda node: True)
        yield relay


@asynccontextmanager
async def hidden_at(relay: Host) -> AsyncIterator[tuple[Host, str]]:
    async with open_host() as hidden:
        hidden.serve(ECHO, echo)
        yield hidden, (await hidden.reserve(relay.addresses[0], seconds=5)).address


async def raw(host: Any, address: str, protocol: str) -> Channel:
    """A stream of one of libp2p's own protocols, to speak it as one likes."""
    muxed, _ = await host._connection(Address.parse(address))
    channel = muxed.connection.open()
    await multistream.propose(channel, protocol)
    return channel


async def opened(host: Any, other: Host, protocol: str) -> Channel:
    """The same on the connection there is."""
    muxed = host._swarm.live(p2p.hardening.peer_id_of(other.node))[0]
    channel: Channel = muxed.connection.open()
    await multistream.propose(channel, protocol)
    return channel


async def hop(host: Any, relay: Host, message: list[tuple[int, protobuf.Value]]) -> int:
    """The status that the relay answers."""
    channel = await raw(host, relay.addresses[0], circuit.HOP)
    await protobuf.send(channel, message)
    return protobuf.number(await circuit.receive(channel, 5), 5)


async def assert_relays(relay: Host) -> None:
    """Two honest nodes are connected."""
    async with hidden_at(relay) as (_, address), open_host() as guest:
        stream = await guest.open(address, ECHO, seconds=5)
        assert await ask(stream, b"are you there?") == b"are you there?"


# --- places ---


async def test_a_peer_cannot_take_places_in_the_names_of_others() -> None:
    """Stock believes the name in the message: one peer takes every place, and they are kept when it is gone."""
    async with a_relay() as relay, open_host() as attacker:
        for _ in range(3 * LIMITS.reservations):
            invented = (2, protobuf.encode([(1, bytes.fromhex("002408011220") + Identity.generate().node)]))
            assert await hop(attacker, relay, [(1, HopKind.RESERVE), invented]) == Status.OK
        assert relay.statistics().reservations == 1
        await assert_relays(relay)


async def test_places_of_those_who_left_are_given_to_others() -> None:
    async with a_relay() as relay:
        for _ in range(3 * LIMITS.reservations):
            async with open_host() as attacker:
                await attacker.reserve(relay.addresses[0], seconds=5)
            while relay.connected():
                await trio.sleep(0.01)
        await assert_relays(relay)


async def test_no_place_and_no_circuit_is_given_over_a_circuit() -> None:
    async with a_relay() as relay, a_relay() as second, open_host() as guest:
        second.serve(ECHO, echo)
        reservation = await second.reserve(relay.addresses[0], seconds=5)
        await guest.open(reservation.address, ECHO, seconds=5)
        channel = await raw(guest, reservation.address, circuit.HOP)
        await protobuf.send(channel, circuit.reserve())
        assert protobuf.number(await circuit.receive(channel, 5), 5) == Status.PERMISSION_DENIED


# --- what is said ---


MALFORMED = [
    b"\xff\xff\xff\x7f",  # 256 MB announced
    b"\x81\x20" + bytes(4097),  # one byte over the limit
    b"\x05\xff\xfe\xfd\xfc\n",
    b"\x00",
    b"\x02\x08\x07",  # of a kind that is not known
    b"\x02\x08\x01",  # connect me to nobody
    b"\x04\x08\x01\x12\x00",  # to a peer without a name
    b"\x03\x0a\x7f\x00",  # a field longer than its message
    b"\x02\x0b\x00",  # a field of a kind that is not known
    bytes([11, 0x08]) + b"\xff" * 10,  # a number that does not end
]


async def say(channel: Channel, message: bytes) -> None:
    """Until the other side hangs up, which it must."""
    with pytest.raises(ChannelClosed), trio.fail_after(5):
        await channel.send(message)
        while True:
            await channel.receive_some(1000)


async def test_a_malformed_message_to_a_relay_ends_its_stream_alone() -> None:
    async with a_relay() as relay, open_host() as attacker:
        for message in MALFORMED:
            await say(await raw(attacker, relay.addresses[0], circuit.HOP), message)
        assert relay.statistics().handler_faults == 0
        await assert_relays(relay)


async def test_a_malformed_message_of_a_relay_ends_its_stream_alone() -> None:
    async with a_relay() as relay, hidden_at(relay) as (hidden, address), open_host() as guest:
        for message in MALFORMED:
            await say(await opened(relay, hidden, circuit.STOP), message)
        assert hidden.statistics().handler_faults == 0
        stream = await guest.open(address, ECHO, seconds=5)
        assert await ask(stream, b"unharmed") == b"unharmed"


async def test_a_malformed_message_of_a_hole_puncher_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p.punch, "TRIES", 100)
    async with a_relay() as relay, hidden_at(relay) as (hidden, address), open_host() as guest:
        stream = await guest.open(address, ECHO, seconds=5)
        for message in MALFORMED:
            await say(await opened(hidden, guest, circuit.DCUTR), message)
        assert guest.statistics().handler_faults == 0
        assert await ask(stream, b"unharmed") == b"unharmed"


async def test_who_says_nothing_holds_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "receive", lambda channel, seconds=0.2: _receive(channel, 0.2))
    async with a_relay() as relay, open_host() as attacker:
        channel = await raw(attacker, relay.addresses[0], circuit.HOP)
        with pytest.raises(ChannelClosed), trio.fail_after(5):
            await channel.receive_some(1)
        assert relay.statistics().handler_faults == 0


async def _receive(channel: Channel, seconds: float) -> protobuf.Fields:
    with trio.fail_after(seconds):
        return await protobuf.receive(channel)


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_malformed(data: bytes) -> None:
    try:
        fields = protobuf.decode(data)
        circuit.candidates(fields, PunchKind.CONNECT)
        circuit.hop_peer(fields)
        circuit.reservation_expires(fields)
    except Malformed:
        pass


@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2**63) | st.binary(max_size=50)), max_size=20))
def test_what_is_encoded_reads_back(fields: list[tuple[int, int | bytes]]) -> None:
    wanted = {number: [value for each, value in fields if each == number] for number, _ in fields}
    assert protobuf.decode(protobuf.encode(fields)) == wanted


# --- what is carried ---


async def test_a_circuit_on_which_nothing_moves_ends() -> None:
    """Stock looks at the time after each read: one that never comes is waited for, for ever."""
    async with (
        a_relay(replace(LIMITS, idle_seconds=0.3)) as relay,
        hidden_at(relay) as (_, address),
        open_host() as guest,
    ):
        stream = await guest.open(address, ECHO, seconds=5)
        assert await ask(stream, b"here") == b"here"
        with pytest.raises(ConnectionLost), trio.fail_after(5):
            await stream.receive(seconds=5, what="waiting")
        assert relay.statistics().circuits == 0


async def test_a_circuit_ends_with_its_time_however_busy() -> None:
    async with (
        a_relay(replace(LIMITS, circuit_seconds=3.0)) as relay,
        hidden_at(relay) as (_, address),
        open_host() as guest,
    ):
        stream = await guest.open(address, ECHO, seconds=5)
        with pytest.raises(ConnectionLost), trio.fail_after(10):
            while True:
                await ask(stream, b"and on")
        assert relay.statistics().circuits == 0


async def test_nothing_of_the_relay_s_own_is_mixed_into_what_it_carries() -> None:
    """Stock writes a status into the stream when a limit is reached: the other side would take it for the peer's."""
    async with a_relay(replace(LIMITS, circuit_bytes=3_000)) as relay, open_host() as target, open_host() as source:
        heard: list[bytes] = []
        await target.reserve(relay.addresses[0], seconds=5)
        target._host.set_stream_handler(circuit.STOP, _swallowing(heard))  # type: ignore[attr-defined]
        channel = await raw(source, relay.addresses[0], circuit.HOP)
        await protobuf.send(channel, circuit.connect(target.node))
        circuit.require_hop_ok(await circuit.receive(channel, 5))
        with pytest.raises(ChannelClosed), trio.fail_after(5):
            await channel.send(b"x" * 5_000)
            assert await channel.receive_some(100) == b""
        assert set(b"".join(heard)) <= {ord("x")}


def _swallowing(heard: list[bytes]) -> Any:
    async def serve(net_stream: Any) -> None:
        channel = net_stream.muxed_stream.channel
        await circuit.receive(channel)
        await protobuf.send(channel, circuit.stop_status(Status.OK))
        while True:
            heard.append(await channel.receive_some(1000))

    return serve


async def test_the_end_of_one_circuit_does_not_end_another_of_the_same_node() -> None:
    async with (
        a_relay() as relay,
        hidden_at(relay) as (one, first),
        hidden_at(relay) as (_, second),
        open_host() as guest,
    ):
        await guest.open(first, ECHO, seconds=5)
        stays = await guest.open(second, ECHO, seconds=5)
        await guest.disconnect(one.node)
        assert await ask(stays, b"unharmed") == b"unharmed"


async def test_all_circuits_together_keep_to_the_rate() -> None:
    rate = 400_000
    async with (
        a_relay(replace(LIMITS, bytes_per_second=rate)) as relay,
        hidden_at(relay) as (_, address),
        open_host() as one,
        open_host() as other,
    ):
        streams = [await each.open(address, ECHO, seconds=5) for each in (one, other)]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(ask, stream, bytes(250_000), 20)
        # Each byte goes there and back; one second's worth passes at once.
        assert trio.current_time() - began > (1_000_000 - 2 * rate) / rate
        assert relay.statistics().relayed_bytes >= 1_000_000


async def test_a_target_that_does_not_answer_costs_the_source_an_error_and_the_relay_nothing() -> None:
    async with a_relay() as relay, open_host() as target, open_host() as guest:
        address = (await target.reserve(relay.addresses[0], seconds=5)).address
        target._host.set_stream_handler(circuit.STOP, _saying_no)  # type: ignore[attr-defined]
        with pytest.raises(Unreachable, match="CONNECTION_FAILED"):
            await guest.open(address, ECHO, seconds=5)
        assert relay.statistics().circuits == 0


async def _saying_no(net_stream: Any) -> None:
    await protobuf.send(net_stream.muxed_stream.channel, circuit.stop_status(Status.PERMISSION_DENIED))


# --- those who have a place ---


async def test_only_a_relay_that_was_asked_may_bring_somebody() -> None:
    async with open_host(listening=True) as node, open_host() as attacker:
        with pytest.raises(ChannelClosed), trio.fail_after(5):
            channel = await raw(attacker, node.addresses[0], circuit.STOP)
            await protobuf.send(channel, circuit.stop_connect(Identity.generate().node, circuit.Terms(0, 0)))
            await channel.receive_some(1)


async def test_a_relay_cannot_pass_off_one_node_as_another() -> None:
    """It says who comes; the handshake over the circuit says who it is."""
    async with a_relay() as relay, hidden_at(relay) as (hidden, _):
        before = hidden.statistics()
        muxed = relay._swarm.live(p2p.hardening.peer_id_of(hidden.node))[0]  # type: ignore[attr-defined]
        channel = await opened(relay, hidden, circuit.STOP)
        await protobuf.send(channel, circuit.stop_connect(Identity.generate().node, circuit.Terms(0, 0)))
        circuit.require_stop_ok(await circuit.receive(channel, 5))
        with pytest.raises((NetError, ChannelClosed)), trio.fail_after(5):
            await relay._swarm.dial_through(muxed, channel, p2p.hardening.peer_id_of(hidden.node))  # type: ignore[attr-defined]
            await channel.receive_some(1)
        with trio.fail_after(5):
            while hidden.statistics().failed_handshakes == before.failed_handshakes:
                await trio.sleep(0.01)
        assert hidden.connected() == (relay.node,)
        await assert_relays(relay)


async def test_a_banned_node_does_not_come_back_through_a_relay() -> None:
    async with a_relay() as relay, hidden_at(relay) as (hidden, address), open_host() as guest:
        hidden.ban(guest.node, 60)
        with pytest.raises(Unreachable):
            await guest.open(address, ECHO, seconds=5)


# --- hole punching ---


async def test_only_who_was_reached_through_a_relay_may_ask_to_be_dialled() -> None:
    async with a_relay() as relay, open_host() as attacker:
        with pytest.raises(ChannelClosed), trio.fail_after(5):
            channel = await raw(attacker, relay.addresses[0], circuit.DCUTR)
            await protobuf.send(channel, circuit.punch(PunchKind.CONNECT, [("127.0.0.1", 9)]))
            await channel.receive_some(1)


async def test_a_node_is_made_to_dial_at_a_stranger_s_word_no_more_than_three_times() -> None:
    async with a_relay() as relay, hidden_at(relay) as (hidden, address), open_host() as guest:
        await guest.open(address, ECHO, seconds=5)
        muxed = hidden._swarm.live(p2p.hardening.peer_id_of(guest.node))[0]  # type: ignore[attr-defined]
        answered = 0
        for _ in range(8):
            channel = muxed.connection.open()
            try:
                with trio.fail_after(5):
                    await multistream.propose(channel, circuit.DCUTR)
                    await protobuf.send(channel, circuit.punch(PunchKind.CONNECT, []))
                    await circuit.receive(channel, 5)
                answered += 1
            except ChannelClosed:
                pass
            channel.abort()
        assert answered <= 3


def test_a_puncher_is_dialled_at_few_addresses_and_only_at_such_that_a_stranger_can_have() -> None:
    """Names, other transports, multicast and the like are passed over."""
    good = [("203.0.113.7", 4001), ("2001:db8::7", 4001)]
    bad = [("0.0.0.0", 1), ("224.0.0.1", 1), ("203.0.113.7", 0), ("fe80::1", 1)]
    fields = protobuf.decode(protobuf.encode(circuit.punch(PunchKind.CONNECT, [*bad, *good, *good])))
    assert circuit.candidates(fields, PunchKind.CONNECT) == good
    many = [("203.0.113.7", port) for port in range(1, 100)]
    fields = protobuf.decode(protobuf.encode(circuit.punch(PunchKind.CONNECT, many)))
    assert len(circuit.candidates(fields, PunchKind.CONNECT)) == circuit.MAX_CANDIDATES
    for junk in (b"", b"\x04", b"\x04\1\2\3\4", b"\x35\x09localhost\x06\x10\x00", bytes(300)):
        assert circuit.endpoint_of(junk) is None


def test_messages_of_another_kind_are_malformed() -> None:
    sync = protobuf.decode(protobuf.encode(circuit.punch(PunchKind.SYNC, [])))
    with pytest.raises(Malformed):
        circuit.candidates(sync, PunchKind.CONNECT)
    request = protobuf.decode(protobuf.encode(circuit.reserve()))
    for require in (circuit.require_hop_ok, circuit.require_stop_ok):
        with pytest.raises((Malformed, circuit.Declined)):
            require(request if require is circuit.require_hop_ok else {1: [StopKind.CONNECT]})
