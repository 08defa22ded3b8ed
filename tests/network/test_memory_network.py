"""What only the in-memory network can do: partitions and delay, on a virtual clock."""

from __future__ import annotations

import pytest
import trio
from network_worlds import ECHO, MemoryWorld, ask, echo, outcome_of

from protocol.errors import ConnectionLost, DeadlineExceeded, Unreachable, UsageError
from protocol.identity import Identity


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


async def test_a_partition_is_silence_and_what_was_on_its_way_arrives_after_it(world: MemoryWorld) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        world.network.partition([server.node], [client.node])
        await stream.send(b"are you there?", seconds=5, what="calling")
        with pytest.raises(DeadlineExceeded):
            await stream.receive(seconds=20, what="listening into the dark")
        assert await outcome_of(client.open(server.addresses[0], ECHO, seconds=5)) is Unreachable
        world.network.heal()
        assert await stream.receive(seconds=5, what="listening again") == b"are you there?"
        assert await ask(stream, b"good") == b"good"


async def test_a_partition_cuts_off_only_those_it_names(world: MemoryWorld) -> None:
    async with world.host() as server, world.host() as far, world.host() as near:
        server.serve(ECHO, echo)
        world.network.partition([server.node], [far.node])
        assert await outcome_of(far.open(server.addresses[0], ECHO, seconds=5)) is Unreachable
        stream = await near.open(server.addresses[0], ECHO, seconds=5)
        assert await ask(stream, b"hello") == b"hello"


async def test_a_peer_that_leaves_during_a_partition_is_missed_only_after_it(world: MemoryWorld) -> None:
    async with world.host(listening=False) as client:
        async with world.host() as server:
            server.serve(ECHO, echo)
            stream = await client.open(server.addresses[0], ECHO, seconds=5)
            world.network.partition([server.node], [client.node])
        with pytest.raises(DeadlineExceeded):
            await stream.receive(seconds=10, what="listening into the dark")
        world.network.heal()
        with pytest.raises(ConnectionLost):
            await stream.receive(seconds=10, what="listening again")


async def test_bytes_take_their_time(world: MemoryWorld) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        world.network.delay = 0.25
        began = trio.current_time()
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        assert trio.current_time() - began == pytest.approx(1.0)  # a dial and a choice: two round trips
        began = trio.current_time()
        assert await ask(stream, bytes(1_000_000)) == bytes(1_000_000)
        assert 0.5 <= trio.current_time() - began < 2
        await stream.close()


async def test_a_memory_host_dials_no_sockets(world: MemoryWorld) -> None:
    async with world.host() as host:
        with pytest.raises(UsageError, match="memory network"):
            await host.open(f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}", ECHO, seconds=5)
