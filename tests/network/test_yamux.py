"""The multiplexer's promises, over a pair of links in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from protocol.net.base import HostLimits
from protocol.net.framing import ChannelClosed
from protocol.net.yamux import INITIAL_WINDOW, Channel, Connection, Unread

MIB = 1024 * 1024


class Link:
    """Packets to the other side, a handful at most on their way."""

    def __init__(self, out: trio.MemorySendChannel[bytes], into: trio.MemoryReceiveChannel[bytes]) -> None:
        self.out, self.into = out, into

    async def receive_packets(self) -> list[bytes]:
        try:
            return [await self.into.receive()]
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise ChannelClosed("the link broke") from None

    async def send_packets(self, packets: list[bytes]) -> None:
        for packet in packets:
            assert 0 < len(packet) <= 65_519
            try:
                await self.out.send(packet)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise ChannelClosed("the link broke") from None

    async def close(self) -> None:
        await self.out.aclose()
        await self.into.aclose()


def pair(limits: HostLimits, unread: Unread) -> tuple[Connection, Connection]:
    there, from_here = trio.open_memory_channel[bytes](4)
    here, from_there = trio.open_memory_channel[bytes](4)
    ours = Connection(Link(there, from_there), peer=bytes(32), is_initiator=True, limits=limits, unread=unread)
    theirs = Connection(
        Link(here, from_here), peer=bytes(32), is_initiator=False, limits=limits, unread=Unread(limits.unread_bytes)
    )
    return ours, theirs


@asynccontextmanager
async def connected(**limits: int) -> AsyncIterator[tuple[Connection, Connection]]:
    chosen = HostLimits(**limits)  # type: ignore[arg-type]
    ours, theirs = pair(chosen, Unread(chosen.unread_bytes))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.run)
        nursery.start_soon(theirs.run)
        yield ours, theirs
        nursery.cancel_scope.cancel()


async def send_in_background(nursery: trio.Nursery, channel: Channel, count: int) -> None:
    async def send() -> None:
        with suppress(ChannelClosed):
            await channel.send(bytes(count))

    nursery.start_soon(send)


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


async def test_bytes_arrive_in_order_in_both_directions() -> None:
    async with connected() as (ours, theirs):
        one = ours.open()
        other = await theirs.accept()
        data = bytes(range(256)) * 4096 * 5
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.send, data)
            nursery.start_soon(other.send, data[::-1])
            assert await other.receive_exactly(len(data)) == data
            assert await one.receive_exactly(len(data)) == data[::-1]


async def test_an_idle_reader_keeps_one_window_and_no_more() -> None:
    async with connected() as (ours, theirs), trio.open_nursery() as nursery:
        one, other = ours.open(), await theirs.accept()
        await send_in_background(nursery, one, 10 * MIB)
        await settled()
        assert other.unread == theirs.unread == INITIAL_WINDOW
        assert len(await other.receive_exactly(10 * MIB)) == 10 * MIB
        assert other.unread == theirs.unread == 0
        nursery.cancel_scope.cancel()


async def test_bytes_that_come_one_to_a_frame_are_not_kept_one_to_an_object() -> None:
    async with connected() as (ours, theirs):
        one, other = ours.open(), await theirs.accept()
        for number in range(20_000):
            await one.send(bytes([number % 256]))
        await settled()
        assert other.unread == 20_000
        assert len(other._chunks) < 10
        assert await other.receive_exactly(20_000) == bytes(number % 256 for number in range(20_000))


async def test_all_channels_of_a_peer_share_one_limit() -> None:
    limit = 8 * MIB
    async with connected(unread_bytes_per_peer=limit) as (ours, theirs), trio.open_nursery() as nursery:
        done = 0

        async def receive(channel: Channel) -> None:
            nonlocal done
            await channel.receive_exactly(4 * MIB)
            done += 1

        ways = [(ours.open(), await theirs.accept()) for _ in range(6)]
        for _, other in ways:
            nursery.start_soon(receive, other)
        await settled()
        for one, _ in ways:
            await send_in_background(nursery, one, 4 * MIB)
        with trio.fail_after(20):
            while done < 6:
                await trio.sleep(0.001)
                assert theirs.unread <= limit + 6 * INITIAL_WINDOW
        nursery.cancel_scope.cancel()


async def test_the_peer_that_hoards_most_goes_when_all_together_are_over_the_limit() -> None:
    limits = HostLimits(unread_bytes=3 * INITIAL_WINDOW)
    shared = Unread(limits.unread_bytes)
    small, small_peer = pair(limits, shared)
    large, large_peer = pair(limits, shared)
    async with trio.open_nursery() as nursery:
        for connection in (small, small_peer, large, large_peer):
            nursery.start_soon(connection.run)
        for connection, channels in ((small_peer, 1), (large_peer, 4)):
            for _ in range(channels):
                await send_in_background(nursery, connection.open(), INITIAL_WINDOW)
        await settled()
        assert large.closed.is_set() and not small.closed.is_set()
        assert shared.total == small.unread == INITIAL_WINDOW
        nursery.cancel_scope.cancel()


async def test_streams_over_the_limit_are_reset_and_a_flood_of_them_ends_the_connection() -> None:
    async with connected(streams_per_peer=3) as (ours, theirs):
        channels = [ours.open() for _ in range(5)]
        await settled()
        assert theirs.channels == 3
        for refused in channels[3:]:
            with pytest.raises(ChannelClosed, match="the peer reset the stream"):
                await refused.receive_exactly(1)
        await channels[0].close()
        await (await theirs.accept()).close()
        ours.open()  # a place is free again
        await settled()
        assert theirs.channels == 3
        for _ in range(600):
            ours.open()
        await settled()
        assert theirs.closed.is_set()


async def test_what_came_before_the_end_can_still_be_read() -> None:
    async with connected() as (ours, theirs):
        one, other = ours.open(), await theirs.accept()
        await one.send(b"last words")
        await one.close()
        await settled()
        assert await other.receive_exactly(10) == b"last words"
        with pytest.raises(ChannelClosed, match="the peer closed the stream"):
            await other.receive_exactly(1)
        await other.close()
        assert ours.channels == theirs.channels == theirs.unread == 0


async def test_a_reset_drops_what_was_not_read() -> None:
    async with connected() as (ours, theirs):
        one, other = ours.open(), await theirs.accept()
        await one.send(b"never mind")
        await settled()
        one.abort()
        await settled()
        with pytest.raises(ChannelClosed, match="reset"):
            await other.receive_exactly(1)
        assert theirs.unread == theirs.channels == 0


async def test_bytes_for_a_closed_channel_are_answered_with_a_reset() -> None:
    async with connected() as (ours, theirs):
        one, other = ours.open(), await theirs.accept()
        await other.close()
        await settled()
        with pytest.raises(ChannelClosed, match="reset"):
            await one.send(bytes(10 * MIB))


async def test_closing_delivers_what_was_queued_and_tells_the_peer() -> None:
    async with connected() as (ours, theirs):
        one, other = ours.open(), await theirs.accept()
        await one.send(b"going home")
        await ours.close()
        await theirs.closed.wait()
        assert await other.receive_exactly(10) == b"going home"
        with pytest.raises(ChannelClosed):
            ours.open()
        with pytest.raises(ChannelClosed):
            await theirs.accept()


async def test_a_cancelled_receive_takes_nothing() -> None:
    async with connected() as (ours, theirs):
        one, other = ours.open(), await theirs.accept()
        await one.send(b"half")
        with trio.move_on_after(0.01):
            await other.receive_exactly(8)
        await one.send(b"more")
        assert await other.receive_exactly(8) == b"halfmore"


async def test_a_broken_link_ends_every_channel_with_its_reason() -> None:
    async with connected() as (ours, theirs):
        one = ours.open()
        await theirs.accept()
        await theirs._link.close()
        with pytest.raises(ChannelClosed, match="the link broke"):
            await one.receive_exactly(1)
