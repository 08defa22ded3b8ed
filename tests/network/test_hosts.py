"""What a host and its streams promise, over real sockets and in memory alike."""

from __future__ import annotations

import pytest
import trio
from network_worlds import BOOM, ECHO, SINK, World, ask, boom, echo, outcome_of, sink, without_peer

from protocol import identity
from protocol.errors import ConnectionLost, DeadlineExceeded, DecodeError, Unreachable, UsageError
from protocol.identity import Identity
from protocol.limits import MAX_FRAME_BYTES
from protocol.net.base import Host, HostLimits, Stream

OTHER = "/test/other/1"


async def test_frames_arrive_whole_and_in_order(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        for size in (0, 1, 65_507, 262_144, MAX_FRAME_BYTES):
            frame = bytes(size - 1) + b"x" if size else b""
            assert await ask(stream, frame) == frame
        await stream.close()


async def test_each_side_knows_who_the_other_is(world: World) -> None:
    seen: list[bytes] = []

    async def remember(stream: Stream) -> None:
        seen.append(stream.peer)

    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, remember)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        assert await outcome_of(stream.receive(seconds=5, what="waiting for the end")) is ConnectionLost
        assert (stream.peer, seen) == (server.node, [client.node])
        assert server.addresses[0].endswith(f"/p2p/{identity.peer_id(server.node)}")
        assert client.connected() == (server.node,)
        assert server.connected() == (client.node,)


async def test_many_senders_on_one_stream_do_not_interleave(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        frames = [bytes([number]) * 100_000 for number in range(20)]
        async with trio.open_nursery() as nursery:
            for frame in frames:
                nursery.start_soon(lambda frame=frame: stream.send(frame, seconds=10, what="sending"))
            echoed = [await stream.receive(seconds=10, what="receiving") for _ in frames]
        assert sorted(echoed) == frames
        await stream.close()


async def test_many_streams_share_one_connection(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)

        async def talk(number: int) -> None:
            stream = await client.open(server.addresses[0], ECHO, seconds=5)
            assert await ask(stream, str(number).encode()) == str(number).encode()
            await stream.close()

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(talk, number)
        assert server.statistics().connections == client.statistics().connections == 1


async def test_a_frame_over_the_limit_is_refused_and_resets_the_stream(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        await stream.send(bytes(1001), seconds=5, what="sending")
        with pytest.raises(DecodeError, match="1001 bytes while reading a small frame; the limit is 1000"):
            await stream.receive(seconds=5, what="reading a small frame", limit=1000)
        with pytest.raises(ConnectionLost):
            await stream.receive(seconds=5, what="reading on")
        with pytest.raises(ValueError, match="over the limit"):
            await stream.send(bytes(MAX_FRAME_BYTES + 1), seconds=5, what="sending too much")


async def test_a_receive_that_ran_out_of_time_can_go_on(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        with pytest.raises(DeadlineExceeded, match=r"within 0.2 s while waiting for nothing") as caught:
            await stream.receive(seconds=0.2, what="waiting for nothing")
        assert (caught.value.what, caught.value.seconds) == ("waiting for nothing", 0.2)
        assert await ask(stream, b"still here") == b"still here"
        await stream.close()


async def test_a_peer_that_does_not_read_stops_the_sender_at_its_deadline(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(SINK, sink)
        stream = await client.open(server.addresses[0], SINK, seconds=5)
        with pytest.raises(DeadlineExceeded, match="while sending into the void"):
            await stream.send(bytes(MAX_FRAME_BYTES), seconds=0.3, what="sending into the void")
        with pytest.raises(ConnectionLost):  # half a frame had left: the stream is of no use any more
            await stream.send(b"more", seconds=5, what="sending on")


async def test_a_sender_is_held_back_by_a_peer_that_does_not_read(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(SINK, sink)
        stream = await client.open(server.addresses[0], SINK, seconds=5)
        taken = 0
        with pytest.raises(DeadlineExceeded):
            while True:
                await stream.send(bytes(10_000), seconds=0.3, what="filling the window")
                taken += 10_000
        assert 200_000 < taken < 1_000_000
        await stream.reset()


async def test_a_receiver_that_stalls_for_six_seconds_can_resume(world: World) -> None:
    """Stock libp2p's writer raises after 5 s without a window and its reader then waits for ever."""
    frames = 3
    async with world.host() as server, world.host(listening=False) as client:

        async def send_all(stream: Stream) -> None:
            for number in range(frames):
                await stream.send(bytes([number]) * 4_000_000, seconds=30, what="sending a block")

        server.serve(OTHER, send_all)
        stream = await client.open(server.addresses[0], OTHER, seconds=5)
        await trio.sleep(6)  # the stall itself, not synchronisation
        for number in range(frames):
            assert await stream.receive(seconds=10, what="reading a block") == bytes([number]) * 4_000_000
        await stream.close()


async def test_what_was_sent_before_closing_arrives(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:

        async def say_and_go(stream: Stream) -> None:
            await stream.send(bytes(200_000), seconds=5, what="saying the last word")

        server.serve(OTHER, say_and_go)
        stream = await client.open(server.addresses[0], OTHER, seconds=5)
        assert await stream.receive(seconds=5, what="listening") == bytes(200_000)
        with pytest.raises(ConnectionLost, match="while listening on: the peer closed the stream"):
            await stream.receive(seconds=5, what="listening on")
        await stream.close()
        await stream.close()


async def test_a_reset_reaches_the_peer(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        ended = trio.Event()

        async def watch(stream: Stream) -> None:
            with pytest.raises(ConnectionLost, match="reset"):
                await stream.receive(seconds=5, what="watching")
            ended.set()

        server.serve(OTHER, watch)
        stream = await client.open(server.addresses[0], OTHER, seconds=5)
        await stream.reset()
        with trio.fail_after(5):
            await ended.wait()
        with pytest.raises(ConnectionLost):
            await stream.send(b"late", seconds=5, what="sending after a reset")


async def test_an_exception_in_a_handler_resets_that_stream_alone(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        server.serve(BOOM, boom)
        good = await client.open(server.addresses[0], ECHO, seconds=5)
        bad = await client.open(server.addresses[0], BOOM, seconds=5)
        await bad.send(b"now", seconds=5, what="lighting the fuse")
        with pytest.raises(ConnectionLost):
            await bad.receive(seconds=5, what="waiting for an answer")
        assert await ask(good, b"alive?") == b"alive?"
        assert server.statistics().handler_faults == 1
        await good.close()


async def test_a_port_where_nobody_listens_is_named_with_the_likely_cause(world: World) -> None:
    address = f"{world.unused_address()}/p2p/{Identity.generate().peer_id}"
    async with world.host(listening=False) as client:
        with pytest.raises(Unreachable, match="nobody listens there") as caught:
            await client.open(address, ECHO, seconds=5)
        assert address in str(caught.value)


async def test_an_address_that_somebody_else_answers_is_refused(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        wrong = f"{without_peer(server.addresses[0])}/p2p/{Identity.generate().peer_id}"
        with pytest.raises(Unreachable, match=f"{identity.peer_id(server.node)} answered there instead"):
            await client.open(wrong, ECHO, seconds=5)
        assert client.connected() == ()


async def test_a_peer_of_another_version_is_named_as_such(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        with pytest.raises(Unreachable, match="answers but does not speak /test/echo/2"):
            await client.open(server.addresses[0], "/test/echo/2", seconds=5)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)  # and the connection is still good
        assert await ask(stream, b"hello") == b"hello"
        await stream.close()


async def test_an_address_that_never_answers_costs_no_more_than_the_deadline(world: World) -> None:
    async with world.host(listening=False) as client, world.black_hole(client) as address:
        before = trio.current_time()
        with pytest.raises(Unreachable, match=r"no answer within 0.3 s"):
            await client.open(address, ECHO, seconds=0.3)
        assert trio.current_time() - before < 2


async def test_a_server_that_comes_up_is_reached_at_once_after_failed_dials(world: World) -> None:
    """Stock libp2p refuses to dial a peer for 60 s after one failure."""
    who, at = Identity.generate(), world.unused_address()
    async with world.host(listening=False) as client:
        for _ in range(3):
            assert await outcome_of(client.open(f"{at}/p2p/{who.peer_id}", ECHO, seconds=1)) is Unreachable
        async with world.host(who, at=at) as server:
            server.serve(ECHO, echo)
            stream = await client.open(server.addresses[0], ECHO, seconds=1)
            assert await ask(stream, b"back") == b"back"


async def test_a_restarted_peer_is_reached_again_under_its_old_address(world: World) -> None:
    who = Identity.generate()
    async with world.host(listening=False) as client:
        async with world.host(who) as server:
            address = server.addresses[0]
            server.serve(ECHO, echo)
            stream = await client.open(address, ECHO, seconds=5)
            assert await ask(stream, b"first life") == b"first life"
        with pytest.raises(ConnectionLost):
            await stream.receive(seconds=5, what="waiting for a peer that left")
        async with world.host(who, at=without_peer(address)) as server:
            server.serve(ECHO, echo)
            stream = await client.open(address, ECHO, seconds=5)
            assert await ask(stream, b"second life") == b"second life"


async def test_disconnecting_ends_every_stream_with_that_peer(world: World) -> None:
    async with world.host() as server, world.host(listening=False) as client, world.host(listening=False) as other:
        server.serve(ECHO, echo)
        streams = [await client.open(server.addresses[0], ECHO, seconds=5) for _ in range(3)]
        kept = await other.open(server.addresses[0], ECHO, seconds=5)
        await server.disconnect(client.node)
        for stream in streams:
            assert await outcome_of(stream.receive(seconds=5, what="waiting")) is ConnectionLost
        assert await ask(kept, b"me too?") == b"me too?"
        assert client.node not in server.connected()
        await server.disconnect(Identity.generate().node)


async def _wait_for_end(stream: Stream) -> None:
    assert await outcome_of(stream.receive(seconds=5, what="waiting for the end")) is ConnectionLost


async def test_a_banned_peer_is_disconnected_and_stays_out_until_the_ban_ends(world: World) -> None:
    async with world.host() as server, world.host() as client:
        server.serve(ECHO, echo)
        client.serve(ECHO, echo)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        server.ban(client.node, 0.7)
        await _wait_for_end(stream)
        assert await outcome_of(client.open(server.addresses[0], ECHO, seconds=0.5)) is Unreachable
        with pytest.raises(Unreachable, match="this node banned it"):
            await server.open(client.addresses[0], ECHO, seconds=5)
        await trio.sleep(0.7)
        stream = await client.open(server.addresses[0], ECHO, seconds=5)
        assert await ask(stream, b"sorry") == b"sorry"
        assert server.statistics().refused >= 1


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("", "is not an address"),
        ("127.0.0.1:4001", "is not an address"),
        ("/ip4/127.0.0.1/tcp/4001", "does not end in /p2p/"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/QmNotOurs", "not an Ed25519 peer id"),
        ("/ip4/1.2.3/tcp/1/p2p/{peer}", "not an IP address"),
        ("/ip4/::1/tcp/1/p2p/{peer}", "is not an ip4 address"),
        ("/ip4/1.2.3.4/tcp/70000/p2p/{peer}", "is not a TCP port"),
        ("/ip4/1.2.3.4/udp/1/quic-v1/p2p/{peer}", "is not over TCP"),
        ("/dns4/-bad-/tcp/1/p2p/{peer}", "is not a host name"),
    ],
)
async def test_a_malformed_address_is_explained(world: World, address: str, complaint: str) -> None:
    async with world.host(listening=False) as client:
        with pytest.raises(UsageError, match=complaint):
            await client.open(address.format(peer=Identity.generate().peer_id), ECHO, seconds=5)


async def test_a_host_does_not_dial_itself(world: World) -> None:
    async with world.host() as host:
        with pytest.raises(Unreachable, match="this node itself"):
            await host.open(host.addresses[0], ECHO, seconds=5)


async def test_a_peer_has_a_bounded_number_of_streams(world: World) -> None:
    limits = HostLimits(streams_per_peer=5)
    async with world.host(limits=limits) as server, world.host(listening=False) as client:
        server.serve(ECHO, echo)
        streams = [await client.open(server.addresses[0], ECHO, seconds=5) for _ in range(5)]
        assert await outcome_of(client.open(server.addresses[0], ECHO, seconds=5)) is Unreachable
        assert await ask(streams[0], b"untouched") == b"untouched"
        await streams[0].close()
        await _until(lambda: _can_open(client, server))


async def _can_open(client: Host, server: Host) -> bool:
    return await outcome_of(client.open(server.addresses[0], ECHO, seconds=1)) is None


async def _until(condition) -> None:
    with trio.fail_after(5):
        while not await condition():
            await trio.sleep(0.01)


async def test_what_leaves_the_block_of_a_host_is_the_error_itself(world: World) -> None:
    with pytest.raises(ZeroDivisionError):
        async with world.host(), world.host():
            raise ZeroDivisionError


async def test_a_busy_address_is_named(world: World) -> None:
    async with world.host() as host:
        at = without_peer(host.addresses[0])
        with pytest.raises(UsageError, match=f"cannot listen on .*{at.rsplit('/', 1)[1]}"):
            async with world.host(at=at):
                raise AssertionError("two hosts share one address")


async def test_an_address_to_listen_on_must_be_one(world: World) -> None:
    with pytest.raises(UsageError, match="cannot listen on '/udp/9'"):
        async with world.host(at="/udp/9"):
            raise AssertionError("a host listens nowhere")
