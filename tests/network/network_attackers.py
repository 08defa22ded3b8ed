"""Strangers with bad intentions: raw TCP, half a handshake, or a proven identity and raw yamux frames."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from network_worlds import Victim

from protocol.identity import Identity
from protocol.net import hardening, multistream
from protocol.net.framing import ChannelClosed
from protocol.net.wire import Counters, Wire

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


def yamux(kind: int, flags: int, stream: int, length: int, payload: bytes = b"", version: int = 0) -> bytes:
    return struct.pack(">BBHII", version, kind, flags, stream, length) + payload


@asynccontextmanager
async def tcp(victim: Victim) -> AsyncIterator[trio.SocketStream]:
    stream = await trio.open_tcp_stream(*victim.endpoint)
    try:
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


async def send_until_refused(stream: trio.SocketStream, data: bytes, times: int = 1) -> int:
    """How many bytes the victim's machine took before it hung up."""
    sent = 0
    try:
        for _ in range(times):
            await stream.send_all(data)
            sent += len(data)
    except trio.BrokenResourceError:
        pass
    return sent


async def read_until_closed(stream: trio.SocketStream, seconds: float = 5.0) -> bytes:
    """What the victim says before it hangs up; TooSlowError when it does not."""
    heard = b""
    with trio.fail_after(seconds):
        try:
            while data := await stream.receive_some(65_536):
                heard += data
        except trio.BrokenResourceError:
            pass
    return heard


@asynccontextmanager
async def authenticated(
    victim: Victim, who: Identity | None = None, noise: hardening.Noise | None = None
) -> AsyncIterator[hardening.NoiseLink]:
    """An attacker that proved some identity and agreed on yamux: what it sends now are its own frames."""
    async with tcp(victim) as stream:
        wire = Wire(stream, initiator=True, counters=Counters())
        await multistream.propose(wire, hardening.NOISE)
        noise = noise or hardening.Noise(hardening.key_pair((who or Identity.generate()).private_bytes))
        link, _, _ = await noise.secure(wire, hardening.peer_id_of(victim.node))
        await multistream.propose(link, hardening.YAMUX)
        yield link


async def flood(link: hardening.NoiseLink, frame: bytes, times: int) -> int:
    """How many times `frame` left before the victim hung up."""
    for count in range(times):
        try:
            await link.send_packets([frame])
        except ChannelClosed:
            return count
    return times


async def wait_until_dropped(link: hardening.NoiseLink, seconds: float = 5.0) -> None:
    """Read until the victim closes the connection; TooSlowError when it does not."""
    with trio.fail_after(seconds):
        try:
            while True:
                await link.receive_packets()
        except ChannelClosed:
            pass


def opening(protocol: str, stream: int = 1) -> bytes:
    """Frames that open a stream and choose a protocol on it."""
    words = multistream.encode(multistream.HEADER) + multistream.encode(protocol)
    return yamux(DATA, SYN, stream, len(words), words)
