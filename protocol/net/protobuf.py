"""The little of protobuf that relays, hole punching and identify speak: numbers and byte strings by field number.

A message travels as varint length ‖ fields. Every length is checked before a byte is kept, because strangers send
them. Not here: what the fields mean (circuit.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from protocol.net.framing import Channel

MAX_MESSAGE_BYTES: Final = 4096  # the relay and hole punching specifications' own bound
_MAX_FIELDS: Final = 128
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10

Value = int | bytes
Fields = Mapping[int, list[Value]]


class Malformed(Exception):
    """The bytes are no such message."""


def encode(fields: Iterable[tuple[int, Value]]) -> bytes:
    """Fields in the order given."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3 | _VARINT) + varint(value)
        else:
            out += varint(number << 3 | _BYTES) + varint(len(value)) + value
    return bytes(out)


def decode(data: bytes) -> Fields:
    """Fields by number, each in the order it came. Raises Malformed."""
    found: dict[int, list[Value]] = {}
    at = 0
    for _ in range(_MAX_FIELDS):
        if at == len(data):
            return found
        key, at = _read_varint(data, at)
        value, at = _read_value(data, at, key & 7)
        found.setdefault(key >> 3, []).append(value)
    if at == len(data):
        return found
    raise Malformed(f"a message has more than {_MAX_FIELDS} fields")


def _read_value(data: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind == _VARINT:
        return _read_varint(data, at)
    if kind == _BYTES:
        length, at = _read_varint(data, at)
    elif kind in (_FIXED64, _FIXED32):
        length = 8 if kind == _FIXED64 else 4
    else:
        raise Malformed(f"a field of the kind {kind}")
    if length > len(data) - at:
        raise Malformed("a field is longer than its message")
    return data[at : at + length], at + length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for position in range(_MAX_VARINT_BYTES):
        if at >= len(data):
            raise Malformed("a number is cut off")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return number, at
    raise Malformed("a number does not end")


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number(fields: Fields, at: int, otherwise: int = 0) -> int:
    """The last value of a number's field. Raises Malformed when it is no number."""
    value = fields.get(at, [otherwise])[-1]
    if not isinstance(value, int):
        raise Malformed(f"field {at} is no number")
    return value


def texts(fields: Fields, at: int) -> list[bytes]:
    """All values of a field of byte strings. Raises Malformed when one is a number."""
    values = [value for value in fields.get(at, []) if isinstance(value, bytes)]
    if len(values) != len(fields.get(at, [])):
        raise Malformed(f"field {at} is a number")
    return values


async def send(channel: Channel, fields: Iterable[tuple[int, Value]]) -> None:
    body = encode(fields)
    await channel.send(varint(len(body)) + body)


async def receive(channel: Channel, most: int = MAX_MESSAGE_BYTES) -> Fields:
    """The next message, of at most `most` bytes. Raises Malformed or ChannelClosed."""
    length = 0
    for position in range(3):
        (byte,) = await channel.receive_exactly(1)
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            break
    else:
        raise Malformed("the length of a message does not end")
    if length > most:
        raise Malformed(f"a message of {length} bytes; at most {most} are allowed")
    return decode(await channel.receive_exactly(length) if length else b"")
