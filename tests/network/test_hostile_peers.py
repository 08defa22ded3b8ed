"""Every fault of libp2p 0.8.1 that we contain, as an attack over real sockets on a process of its own.

After each attack an honest stranger is served; after all of them the process is still the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import socket
import statistics
import struct
import time
import types
from collections.abc import Callable

import psutil
import pytest
import trio
from libp2p.crypto.secp256k1 import create_new_key_pair
from network_attackers import (
    ACK,
    DATA,
    FIN,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    authenticated,
    flood,
    opening,
    read_until_closed,
    send_until_refused,
    tcp,
    wait_until_dropped,
    yamux,
)
from network_worlds import BOOM, ECHO, SINK, STATISTICS, Victim, ask

from protocol import identity
from protocol.errors import ConnectionLost, DeadlineExceeded, Unreachable, UsageError
from protocol.identity import Identity
from protocol.net import hardening, multistream, p2p
from protocol.net.base import HostLimits
from protocol.net.framing import ChannelClosed

MIB = 1024 * 1024


async def statistics_of(victim: Victim) -> dict[str, int]:
    async with p2p.open_host(Identity.generate()) as honest:
        stream = await honest.open(victim.address, STATISTICS, seconds=5)
        answer = await ask(stream, b"?")
        await stream.close()
        return json.loads(answer)


# --- before anybody has proved anything ------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100, 10_000, MIB])
async def test_garbage_on_the_socket_is_hung_up_on(victim: Victim, size: int) -> None:
    for seed in range(10):
        async with tcp(victim) as stream:
            await send_until_refused(stream, random.Random(seed).randbytes(size))
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_eof()
            await read_until_closed(stream)
    await victim.assert_serves()


async def test_a_web_browser_is_hung_up_on(victim: Victim) -> None:
    async with tcp(victim) as stream:
        await send_until_refused(stream, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert b"HTTP" not in await read_until_closed(stream)
    await victim.assert_serves()


async def test_a_six_byte_message_that_is_not_utf8_ends_nothing_but_its_connection(victim: Victim) -> None:
    for prefix in (b"", multistream.encode(multistream.HEADER)):
        async with tcp(victim) as stream:
            await stream.send_all(prefix + b"\x05\xff\xfe\xfd\xfc\n")
            await read_until_closed(stream)
    await victim.assert_serves()


async def test_a_huge_first_message_is_refused_before_it_is_buffered(victim: Victim) -> None:
    before = victim.resident_bytes()
    for length in (b"\xff\xff\xff\x7f", b"\x81\x80\x04", b"\xff" * 9 + b"\x7f"):  # 256 MB, 64 KiB + 1, 2^63
        async with tcp(victim) as stream:
            sent = await send_until_refused(stream, length + bytes(MIB), times=200)
            assert sent < 100 * MIB
    assert victim.resident_bytes() - before < 20 * MIB
    await victim.assert_serves()


async def test_a_client_that_wants_no_encryption_is_refused(victim: Victim) -> None:
    """In plaintext a client may claim any identity; no security but Noise is on offer."""
    async with tcp(victim) as stream:
        await stream.send_all(multistream.encode(multistream.HEADER))
        for protocol in ("/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0"):
            await stream.send_all(multistream.encode(protocol))
        await stream.send_eof()
        heard = await read_until_closed(stream)
    na = multistream.encode(multistream.NOT_AVAILABLE)
    assert heard == multistream.encode(multistream.HEADER) + 3 * na
    await victim.assert_serves()


async def test_endless_proposals_are_hung_up_on(victim: Victim) -> None:
    async with tcp(victim) as stream:
        await stream.send_all(multistream.encode(multistream.HEADER) + multistream.encode("/x") * 1000)
        await read_until_closed(stream)
    await victim.assert_serves()


class _Impostor(hardening.Noise):
    """Says in the handshake that it is `claimed`, of whom it has the public key and some signature."""

    def __init__(self, claimed: Identity, sign: Callable[[bytes], bytes]) -> None:
        super().__init__(hardening.key_pair(Identity.generate().private_bytes))
        public = hardening.key_pair(claimed.private_bytes).public_key
        private = types.SimpleNamespace(get_public_key=lambda: public, sign=sign)
        self._keys = types.SimpleNamespace(private_key=private, public_key=public)


def _own_signature(data: bytes) -> bytes:
    return hardening.key_pair(Identity.generate().private_bytes).private_key.sign(data)


@pytest.mark.parametrize("signature", ["own", "replayed"])
async def test_nobody_can_pass_for_another_node(victim: Victim, signature: str) -> None:
    somebody = Identity.generate()
    # What a listener on the wire could have kept: a genuine signature, over another connection's key.
    seen = hardening.key_pair(somebody.private_bytes).private_key.sign(b"noise-libp2p-static-key:" + bytes(32))
    noise = _Impostor(somebody, _own_signature if signature == "own" else lambda data: seen)
    failures = (await statistics_of(victim))["failed_handshakes"]
    with pytest.raises(ChannelClosed):
        async with authenticated(victim, noise=noise):
            pytest.fail("the victim believed an impostor")
    assert (await statistics_of(victim))["failed_handshakes"] == failures + 1
    await victim.assert_serves()


async def test_a_man_in_the_middle_cannot_answer_for_the_node_that_was_dialled(victim: Victim) -> None:
    """The dialler checks the key behind the handshake against the address it was given."""
    expected = Identity.generate()
    async with p2p.open_host(Identity.generate()) as honest:
        address = victim.address.replace(victim.peer_id, expected.peer_id)
        with pytest.raises(Unreachable, match=f"{victim.peer_id} answered there instead"):
            await honest.open(address, ECHO, seconds=5)


async def test_a_tampered_packet_ends_its_connection(victim: Victim) -> None:
    async with authenticated(victim) as link:
        await link.wire.send(struct.pack(">H", 100) + bytes(100))
        await wait_until_dropped(link)
    await victim.assert_serves()


async def test_half_open_handshakes_do_not_lock_honest_peers_out(victim: Victim) -> None:
    """Stock holds a slot for 10 s for each; here the oldest gives way, even on the honest peer's address."""
    header = multistream.encode(multistream.HEADER)
    lurkers = [await trio.open_tcp_stream(*victim.endpoint) for _ in range(400)]
    for number, lurker in enumerate(lurkers):
        await send_until_refused(lurker, header[: number % len(header)])
    await victim.assert_serves(5.0)
    assert (await statistics_of(victim))["handshakes"] <= HostLimits().handshakes_per_address
    for lurker in lurkers:
        await trio.aclose_forcefully(lurker)


# --- with a proven identity ------------------------------------------------------------------------


async def test_a_handler_that_raises_ends_nothing_but_its_stream(victim: Victim) -> None:
    before = (await statistics_of(victim))["handler_faults"]
    async with p2p.open_host(Identity.generate()) as client:
        good = await client.open(victim.address, ECHO, seconds=5)
        for _ in range(5):
            bad = await client.open(victim.address, BOOM, seconds=5)
            await bad.send(b"now", seconds=5, what="lighting the fuse")
            with pytest.raises(ConnectionLost):
                await bad.receive(seconds=5, what="waiting for an answer")
        assert await ask(good, b"alive?") == b"alive?"
    assert (await statistics_of(victim))["handler_faults"] == before + 5


@pytest.mark.parametrize(
    "words",
    [
        b"\x05\xff\xfe\xfd\xfc\n",  # not UTF-8
        multistream.encode(multistream.HEADER) + b"\x05\xff\xfe\xfd\xfc\n",
        b"\x00",  # a message of no bytes
        b"\x06/hello",  # no newline
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a length of 2^70
        b"\xff\xff\xff\xff\x07" + bytes(1000),  # a length of 2 GiB
        multistream.encode(multistream.HEADER) + b"\x03ls\n" * 20_000,
    ],
)
async def test_a_malformed_choice_of_protocol_ends_its_stream_alone(victim: Victim, words: bytes) -> None:
    async with authenticated(victim) as link:
        await link.send_packets([yamux(DATA, SYN, 1, len(words[:60_000]), words[:60_000])])
        heard = b""
        with trio.fail_after(5):
            while yamux(WINDOW_UPDATE, RST, 1, 0) not in heard:
                heard += b"".join(await link.receive_packets())
        await link.send_packets([opening(ECHO, 3)])  # the connection is still good
        with trio.fail_after(5):
            while multistream.encode(ECHO) not in heard:
                heard += b"".join(await link.receive_packets())
    await victim.assert_serves()


async def test_a_peer_that_ignores_its_window_is_disconnected_and_costs_no_memory(victim: Victim) -> None:
    before = victim.resident_bytes()
    async with authenticated(victim) as link:
        await link.send_packets([opening(SINK)])
        left = await flood(link, yamux(DATA, 0, 1, 65_000, bytes(65_000)), times=6_000)  # 372 MiB
        assert left < 1_000
    assert victim.resident_bytes() - before < 20 * MIB
    await victim.assert_serves()


async def test_a_huge_announced_payload_is_refused(victim: Victim) -> None:
    for length in (0xFFFF_FFF0, 16 * MIB, 256 * 1024 + 1):
        async with authenticated(victim) as link:
            await link.send_packets([opening(SINK), yamux(DATA, 0, 1, length, bytes(1000))])
            await wait_until_dropped(link)
    await victim.assert_serves()


async def test_twenty_thousand_new_streams_are_refused(victim: Victim) -> None:
    before = victim.resident_bytes()
    async with authenticated(victim) as link:
        reset = 0
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal reset
                try:
                    while True:
                        reset += b"".join(await link.receive_packets()).count(struct.pack(">BBH", 0, 1, RST))
                except ChannelClosed:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            for first in range(0, 20_000, 100):
                frames = [yamux(WINDOW_UPDATE, SYN, 2 * number + 1, 0) for number in range(first, first + 100)]
                try:
                    await link.send_packets([b"".join(frames)])
                except ChannelClosed:
                    break
                await trio.sleep(0)
        assert reset > 0
    assert victim.resident_bytes() - before < 20 * MIB
    await victim.assert_serves()


async def test_a_peer_may_have_sixty_four_streams(victim: Victim) -> None:
    async with p2p.open_host(Identity.generate()) as client:
        streams = [await client.open(victim.address, ECHO, seconds=5) for _ in range(64)]
        with pytest.raises(Unreachable, match="hung up"):
            await client.open(victim.address, ECHO, seconds=5)
        assert await ask(streams[-1], b"mine") == b"mine"
    await victim.assert_serves()


async def test_a_flood_of_pings_that_reads_no_answer_is_hung_up_on(victim: Victim) -> None:
    before = victim.resident_bytes()
    async with authenticated(victim) as link:
        left = await flood(link, yamux(PING, SYN, 0, 1) * 5_000, times=2_000)
        assert left < 2_000
    assert victim.resident_bytes() - before < 20 * MIB
    await victim.assert_serves()


@pytest.mark.parametrize(
    "frames",
    [
        yamux(DATA, 0, 0, 0, version=9),
        yamux(9, 0, 1, 0),
        yamux(WINDOW_UPDATE, SYN, 2, 0),  # an even number is the victim's to give
        yamux(WINDOW_UPDATE, SYN, 0, 0),
        yamux(WINDOW_UPDATE, SYN, 1, 0) * 2,
        random.Random(1).randbytes(4096),
    ],
)
async def test_frames_that_break_yamux_end_their_connection(victim: Victim, frames: bytes) -> None:
    async with authenticated(victim) as link:
        await link.send_packets([frames])
        await wait_until_dropped(link)
    await victim.assert_serves()


async def test_odd_but_legal_frames_end_nothing(victim: Victim) -> None:
    async with authenticated(victim) as link:
        await link.send_packets(
            [
                yamux(DATA, SYN | FIN, 1, 0),
                yamux(WINDOW_UPDATE, SYN | RST, 3, 0),
                yamux(WINDOW_UPDATE, RST, 99, 0),
                yamux(DATA, 0, 101, 5, b"stray"),
                yamux(WINDOW_UPDATE, 0, 1, 0xFFFF_FFFF),
                yamux(PING, ACK, 0, 7),
                opening(ECHO, 5),
            ]
        )
        heard = b""
        with trio.fail_after(5):
            while multistream.encode(ECHO) not in heard:
                heard += b"".join(await link.receive_packets())
    await victim.assert_serves()


async def test_a_huge_frame_is_refused_by_its_length_alone(victim: Victim) -> None:
    async with authenticated(victim) as link:
        await link.send_packets([opening(ECHO), yamux(DATA, 0, 1, 104, struct.pack(">I", 0xFFFF_FFF0) + bytes(100))])
        heard = b""
        with trio.fail_after(5):
            while yamux(WINDOW_UPDATE, RST, 1, 0) not in heard:
                heard += b"".join(await link.receive_packets())
    await victim.assert_serves()


async def test_libp2p_s_own_protocols_survive_garbage(victim: Victim) -> None:
    before = (await statistics_of(victim))["handler_faults"]
    for protocol in ("/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"):
        async with authenticated(victim) as link:
            await link.send_packets([opening(protocol), yamux(DATA, FIN, 1, 7, b"garbage")])
            heard = b""
            with trio.fail_after(5):
                while multistream.encode(protocol) not in heard:
                    heard += b"".join(await link.receive_packets())
    await victim.assert_serves()
    assert (await statistics_of(victim))["handler_faults"] == before


# --- honest peers on bad days ----------------------------------------------------------------------


async def test_three_hundred_connections_one_after_another_are_all_served(victim: Victim) -> None:
    """Stock counts inbound connections for ever and refuses the 251st."""
    for _ in range(300):
        async with authenticated(victim) as link:
            await link.send_packets([opening(ECHO)])
            await link.receive_packets()
    await victim.assert_serves()
    after = await statistics_of(victim)
    assert after["connections"] <= 2
    assert after["descriptors"] < 40


async def test_bytes_that_arrive_in_tiny_segments_arrive(victim: Victim) -> None:
    """Stock gives up on a packet that comes in more than 100 pieces."""

    async def carry(source: trio.SocketStream, sink: trio.SocketStream, piece: int) -> None:
        async for data in source:
            for at in range(0, len(data), piece):
                await sink.send_all(data[at : at + piece])
        await sink.send_eof()

    async def proxy(client: trio.SocketStream) -> None:
        async with tcp(victim) as server, trio.open_nursery() as nursery:
            nursery.start_soon(carry, client, server, 50)
            nursery.start_soon(carry, server, client, 65_536)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(functools.partial(trio.serve_tcp, proxy, 0, host="127.0.0.1"))
        address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}/p2p/{victim.peer_id}"
        async with p2p.open_host(Identity.generate()) as client:
            stream = await client.open(address, ECHO, seconds=5)
            frame = random.Random(0).randbytes(300_000)
            assert await ask(stream, frame, 20) == frame
        nursery.cancel_scope.cancel()


async def test_dialling_is_quick(victim: Victim) -> None:
    """Stock waits a fixed 250 ms on each dial."""
    times = []
    for _ in range(10):
        async with p2p.open_host(Identity.generate()) as client:
            began = time.perf_counter()
            await client.open(victim.address, ECHO, seconds=5)
            times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.1


async def test_two_hundred_nodes_that_dial_at_once_are_all_served() -> None:
    nodes = 200
    limits = HostLimits(connections_per_address=nodes, handshakes_per_address=nodes)
    served = 0

    async def node(server: Victim) -> None:
        nonlocal served
        async with authenticated(server) as link:
            await link.send_packets([opening(ECHO)])
            heard = b""
            while multistream.encode(ECHO) not in heard:
                heard += b"".join(await link.receive_packets())
            served += 1

    async with p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",), limits=limits) as server:
        server.serve(ECHO, _echo_once)
        async with trio.open_nursery() as nursery:
            for _ in range(nodes):
                nursery.start_soon(node, Victim(0, server.addresses[0]))
    assert served == nodes


async def test_a_frozen_peer_is_given_up_and_found_again_when_it_thaws(victim: Victim) -> None:
    """Its machine goes on taking bytes; only a deadline tells."""
    process = psutil.Process(victim.pid)
    async with p2p.open_host(Identity.generate()) as client:
        stream = await client.open(victim.address, ECHO, seconds=5)
        process.suspend()
        try:
            with pytest.raises(DeadlineExceeded):
                await stream.send(b"hello?", seconds=1, what="asking")
                await stream.receive(seconds=0.2, what="waiting for a frozen peer")
            with pytest.raises(Unreachable, match="no answer"):
                await client.open(victim.address, ECHO, seconds=1.2)
            assert client.connected() == ()  # the next try dials anew
        finally:
            process.resume()
        stream = await client.open(victim.address, ECHO, seconds=5)
        assert await ask(stream, b"hello again") == b"hello again"


async def test_a_handshake_that_drips_is_cut_off_when_its_time_is_up() -> None:
    limits = HostLimits(handshake_seconds=0.3)
    async with p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",), limits=limits) as server:
        async with tcp(Victim(0, server.addresses[0])) as stream:
            await stream.send_all(multistream.encode(multistream.HEADER)[:5])
            await read_until_closed(stream)
        assert server.statistics().failed_handshakes == 1
        assert server.statistics().handshakes == 0


async def test_a_connection_that_carries_nothing_gives_way_to_one_that_may() -> None:
    """Slots are for peers that talk: idle strangers cannot hold them all."""
    limits = HostLimits(connections=3, connections_per_address=3)
    async with p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",), limits=limits) as server:
        server.serve(ECHO, _echo_once)
        victim = Victim(0, server.addresses[0])
        async with authenticated(victim), authenticated(victim), authenticated(victim):
            async with p2p.open_host(Identity.generate()) as early:
                with pytest.raises(Unreachable, match="hung up"):
                    await early.open(server.addresses[0], ECHO, seconds=5)
            assert server.statistics().refused == 1
            for muxed in server._swarm.all_live():  # as if ten seconds had passed
                muxed.connection.since -= 11
            await victim.assert_serves()


async def _echo_once(stream) -> None:
    await stream.send(await stream.receive(seconds=5, what="listening"), seconds=5, what="answering")


async def test_a_peer_without_an_ed25519_key_is_refused(victim: Victim) -> None:
    with pytest.raises(ChannelClosed):
        async with authenticated(victim, noise=hardening.Noise(create_new_key_pair())) as link:
            await link.receive_packets()
    await victim.assert_serves()


async def test_leaving_closes_every_socket() -> None:
    def sockets() -> int:
        return len(psutil.Process().net_connections(kind="tcp"))

    before = sockets()
    async with p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as server:
        server.serve(ECHO, _echo_once)
        for _ in range(3):
            async with p2p.open_host(Identity.generate()) as client:
                stream = await client.open(server.addresses[0], ECHO, seconds=5)
                assert await ask(stream, b"hello") == b"hello"
    assert sockets() == before


async def test_a_second_program_cannot_share_the_port(victim: Victim) -> None:
    """Stock sets SO_REUSEPORT, so that another program could take half of the connections."""
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(victim.endpoint)


async def test_another_release_of_libp2p_is_refused() -> None:
    with pytest.raises(UsageError, match=r"libp2p 0\.9\.0 is installed.*pip install libp2p==0\.8\.1"):
        hardening.require_version("0.9.0")
    hardening.require_version("0.8.1")


async def test_a_swarm_that_dies_all_the_same_comes_back_where_it_was() -> None:
    async def bug() -> None:
        raise RuntimeError("a bug below us")

    async with (
        p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as server,
        p2p.open_host(Identity.generate()) as client,
    ):
        address = server.addresses[0]
        server.serve(ECHO, _echo_once)
        stream = await client.open(address, ECHO, seconds=5)
        server._swarm.manager.run_task(bug)
        with pytest.raises(ConnectionLost):
            await stream.receive(seconds=5, what="waiting for a dead swarm")
        with trio.fail_after(5):
            while True:
                try:
                    stream = await client.open(address, ECHO, seconds=1)
                    break
                except Unreachable:
                    await trio.sleep(0.05)
        assert await ask(stream, b"back?") == b"back?"
        assert server.statistics().restarts == 1
        assert server.addresses == (address,)
        assert identity.peer_id(server.node) in address
