"""multistream-select 1.0: two peers agree which protocol a byte channel speaks.

Each message is an unsigned varint length, the text, a newline. It runs before a peer is
authenticated, so every length is checked before a byte is kept. Source: libp2p's connection
specification. Not here: `ls`, which we answer like an unknown protocol.
"""

from __future__ import annotations

from collections.abc import Container

from protocol.net.framing import Channel
from protocol.net.protobuf import varint

HEADER = "/multistream/1.0.0"
NOT_AVAILABLE = "na"
MAX_MESSAGE_BYTES = 64 * 1024
MAX_PROPOSALS = 16  # protocols one peer may try on one stream
_MAX_LENGTH_BYTES = 3  # a varint up to 64 KiB


class NegotiationFailed(Exception):
    """The peer does not follow multistream-select."""


class ProtocolNotSpoken(NegotiationFailed):
    """The peer follows it and declined the protocol."""


def encode(text: str) -> bytes:
    body = text.encode() + b"\n"
    return varint(len(body)) + body


async def _read_length(channel: Channel) -> int:
    length = 0
    for position in range(_MAX_LENGTH_BYTES):
        (byte,) = await channel.receive_exactly(1)
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            break
    else:
        raise NegotiationFailed("the length of a message does not end")
    if not 1 <= length <= MAX_MESSAGE_BYTES:
        raise NegotiationFailed(f"a message of {length} bytes; between 1 and {MAX_MESSAGE_BYTES} are allowed")
    return length


async def _read(channel: Channel) -> str:
    return await _read_text(channel, await _read_length(channel))


async def _read_text(channel: Channel, length: int) -> str:
    body = await channel.receive_exactly(length)
    if body[-1:] != b"\n":
        raise NegotiationFailed("a message does not end in a newline")
    try:
        return body[:-1].decode("utf-8")
    except UnicodeDecodeError:
        raise NegotiationFailed("a message is not UTF-8") from None


async def _read_header(channel: Channel) -> None:
    length = await _read_length(channel)
    if length != len(HEADER) + 1:  # hang up on a web browser at once, not when its time is up
        raise NegotiationFailed("the peer does not begin as libp2p does")
    text = await _read_text(channel, length)
    if text != HEADER:
        raise NegotiationFailed(f"the peer began with {text[:40]!r} instead of {HEADER!r}")


async def propose(channel: Channel, protocol: str) -> None:
    """Ask for `protocol`. Header and proposal leave together, which saves a round trip.

    Raises ProtocolNotSpoken, NegotiationFailed or ChannelClosed.
    """
    await channel.send(encode(HEADER) + encode(protocol))
    await _read_header(channel)
    answer = await _read(channel)
    if answer == NOT_AVAILABLE:
        raise ProtocolNotSpoken(protocol)
    if answer != protocol:
        raise NegotiationFailed(f"the peer answered {answer[:40]!r} to a proposal of {protocol!r}")


async def answer(channel: Channel, spoken: Container[str]) -> str:
    """Let the peer choose among `spoken`; returns its choice. Raises NegotiationFailed or ChannelClosed."""
    await channel.send(encode(HEADER))
    await _read_header(channel)
    for _ in range(MAX_PROPOSALS):
        proposal = await _read(channel)
        if proposal in spoken:
            await channel.send(encode(proposal))
            return proposal
        await channel.send(encode(NOT_AVAILABLE))
    raise NegotiationFailed(f"the peer proposed {MAX_PROPOSALS} protocols that nobody speaks")
