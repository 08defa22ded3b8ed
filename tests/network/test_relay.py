"""Nodes behind NAT: places at a relay, circuits through it and what they may carry, over sockets and in memory.

Not here: attacks on a relay (test_hostile_relays.py), real NATs (test_nat.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from network_worlds import ECHO, World, ask, echo

from protocol.errors import ConnectionLost, NetError, Unreachable, UsageError
from protocol.identity import Identity
from protocol.net.base import Address, Host, RelayLimits
from protocol.net.memory import Nat, Network

LIMITS = RelayLimits(bytes_per_second=1e9)


def everybody(node: bytes) -> bool:
    return True


@asynccontextmanager
async def reached_through(world: World, relay: Host) -> AsyncIterator[tuple[Host, str]]:
    """A host that listens nowhere, and its address through the relay."""
    async with world.host(listening=False) as hidden:
        hidden.serve(ECHO, echo)
        reservation = await hidden.reserve(relay.addresses[0], seconds=5)
        yield hidden, reservation.address


async def test_a_host_that_listens_nowhere_is_reached_through_its_relay(world: World) -> None:
    async with world.host() as relay, world.host(listening=False) as guest:
        relay.relay(LIMITS, everybody)
        async with reached_through(world, relay) as (hidden, address):
            stream = await guest.open(address, ECHO, seconds=5)
            assert stream.peer == hidden.node and guest.is_relayed(hidden.node)
            assert await ask(stream, b"x" * 100_000) == b"x" * 100_000
            assert relay.statistics().relayed_bytes > 200_000
            assert relay.statistics().reservations == 1


async def test_the_relay_cannot_answer_in_place_of_the_target(world: World) -> None:
    """The address names the key, and the circuit proves it as a connection does."""
    async with world.host() as relay, world.host(listening=False) as guest:
        relay.relay(LIMITS, everybody)
        async with reached_through(world, relay) as (_, address):
            other = replace(Address.parse(address), node=Identity.generate().node)
            with pytest.raises(Unreachable, match="does not help: NO_RESERVATION"):
                await guest.open(str(other), ECHO, seconds=5)


async def test_who_is_no_relay_says_so(world: World) -> None:
    async with world.host() as other, world.host(listening=False) as hidden:
        with pytest.raises(Unreachable, match=r"the relay at .* does not help"):
            await hidden.reserve(other.addresses[0], seconds=5)


async def test_places_are_for_those_the_relay_admits(world: World) -> None:
    async with world.host() as relay, world.host(listening=False) as member, world.host(listening=False) as stranger:
        relay.relay(LIMITS, lambda node: node == member.node)
        await member.reserve(relay.addresses[0], seconds=5)
        with pytest.raises(Unreachable):
            await stranger.reserve(relay.addresses[0], seconds=5)
        assert relay.statistics().relay_refusals == 1


async def test_there_are_only_so_many_places_and_one_can_be_renewed(world: World) -> None:
    async with world.host() as relay, world.host(listening=False) as first:
        relay.relay(replace(LIMITS, reservations=1), everybody)
        await first.reserve(relay.addresses[0], seconds=5)
        await first.reserve(relay.addresses[0], seconds=5)
        async with world.host(listening=False) as second:
            with pytest.raises(Unreachable, match="RESERVATION_REFUSED"):
                await second.reserve(relay.addresses[0], seconds=5)


async def test_a_place_goes_with_the_connection(world: World) -> None:
    async with world.host() as relay:
        relay.relay(replace(LIMITS, reservations=1), everybody)
        async with world.host(listening=False) as first:
            await first.reserve(relay.addresses[0], seconds=5)
        while relay.connected():
            await trio.sleep(0.01)
        async with world.host(listening=False) as second:
            await second.reserve(relay.addresses[0], seconds=5)


async def test_there_are_only_so_many_circuits_to_a_node(world: World) -> None:
    async with world.host() as relay, world.host(listening=False) as first, world.host(listening=False) as second:
        relay.relay(replace(LIMITS, circuits_per_peer=1), everybody)
        async with reached_through(world, relay) as (_, address):
            await first.open(address, ECHO, seconds=5)
            with pytest.raises(Unreachable, match="RESOURCE_LIMIT_EXCEEDED"):
                await second.open(address, ECHO, seconds=5)


async def test_a_circuit_ends_when_it_has_carried_its_bytes_and_another_can_be_had(world: World) -> None:
    async with world.host() as relay, world.host(listening=False) as guest:
        relay.relay(replace(LIMITS, circuit_bytes=300_000), everybody)
        async with reached_through(world, relay) as (hidden, address):
            stream = await guest.open(address, ECHO, seconds=5)
            with pytest.raises(ConnectionLost):
                for _ in range(20):
                    await ask(stream, b"x" * 50_000)
            while hidden.node in guest.connected():
                await trio.sleep(0.01)
            again = await guest.open(address, ECHO, seconds=5)
            assert await ask(again, b"once more") == b"once more"
            assert relay.statistics().relayed_bytes < 700_000


async def test_nobody_is_relayed_through_himself_or_to_himself(world: World) -> None:
    async with world.host() as relay:
        relay.relay(LIMITS, everybody)
        async with reached_through(world, relay) as (hidden, address):
            for host in (relay, hidden):
                with pytest.raises(NetError, match="this node itself"):
                    await host.open(address, ECHO, seconds=5)


def test_an_address_through_a_relay_reads_back() -> None:
    relay, node = Identity.generate(), Identity.generate()
    text = f"/ip4/203.0.113.7/tcp/4001/p2p/{relay.peer_id}/p2p-circuit/p2p/{node.peer_id}"
    parsed = Address.parse(text)
    assert str(parsed) == text and parsed.node == node.node and parsed.relay == relay.node
    assert parsed.told == text.rpartition("/p2p/")[0]
    assert str(parsed.via) == f"/ip4/203.0.113.7/tcp/4001/p2p/{relay.peer_id}"


@pytest.mark.parametrize(
    "end", ["", "/p2p", "/p2p/", "/p2p/nobody", "/tcp/1", "/p2p-circuit/p2p/{node}", "/p2p/{relay}", "/p2p/{node}/x"]
)
def test_other_addresses_through_a_relay_are_refused(end: str) -> None:
    relay, node = Identity.generate().peer_id, Identity.generate().peer_id
    with pytest.raises(UsageError):
        Address.parse(f"/ip4/203.0.113.7/tcp/1/p2p/{relay}/p2p-circuit" + end.format(node=node, relay=relay))


# --- hole punching, in memory: real NATs are in test_nat.py ---


@pytest.mark.parametrize(("nat", "punched"), [(Nat.KEEPS_PORTS, True), (Nat.RANDOM_PORTS, False)])
async def test_a_circuit_becomes_a_direct_connection_where_both_nats_keep_ports(nat: Nat, punched: bool) -> None:
    network = Network(delay=0.01)
    async with (
        network.host(Identity.generate()) as relay,
        network.host(Identity.generate(), nat=nat) as hidden,
        network.host(Identity.generate(), nat=Nat.KEEPS_PORTS) as guest,
    ):
        relay.relay(LIMITS, everybody)
        hidden.serve(ECHO, echo)
        reservation = await hidden.reserve(relay.addresses[0], seconds=5)
        with pytest.raises(Unreachable):
            await guest.open(hidden.addresses[0], ECHO, seconds=0.1)
        stream = await guest.open(reservation.address, ECHO, seconds=5)
        assert guest.is_relayed(hidden.node)
        await trio.sleep(0.2)
        assert guest.is_relayed(hidden.node) != punched
        assert await ask(stream, b"still there") == b"still there"
        assert (hidden.statistics().punched, hidden.statistics().punches_failed) == (punched, not punched)
        assert relay.statistics().circuits == (not punched)
