"""TensorBoard's event files, as far as scalars need them: written without TensorBoard, and gone on with after a kill.

A file is a row of records, each its length, a checksum of the length, an Event of protocol buffers, a checksum of that
(the TFRecord format; CRC-32C, rotated and offset). TensorBoard's own writer begins a new file at each start and cannot
say what it wrote last, so that a restart shows steps twice; and it brings a dozen packages. Not here: what is written
(records.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

# TensorBoard takes any name with "tfevents" in it; one that stays is one that a restart finds again.
FILE_NAME: Final = "events.out.tfevents.0000000000.rlcommons"
_FORMAT: Final = b"brain.Event:2"
_MASK: Final = 0xA282EAD8
_MOST_BYTES: Final = 1 << 20  # of one record of ours


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


_CRC32C: Final = _table()


def checksum(data: bytes) -> int:
    """CRC-32C (Castagnoli), masked as record files want it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data))


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset after it, data) of each record that is whole, up to the first that is not."""
    start = 0
    while start + 12 <= len(data):
        length, of_length = struct.unpack_from("<QI", data, start)
        end = start + 12 + length + 4
        if length > _MOST_BYTES or end > len(data) or checksum(data[start : start + 8]) != of_length:
            return
        body = data[start + 12 : end - 4]
        if struct.unpack_from("<I", data, end - 4)[0] != checksum(body):
            return
        yield end, body
        start = end


# --- Event {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary {1: Value {1: tag, 2: float}}} ---


def event(seconds: float, step: int, scalars: Mapping[str, float]) -> bytes:
    values = b"".join(
        _delimited(1, _delimited(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in scalars.items()
    )
    return b"\x09" + struct.pack("<d", seconds) + b"\x10" + _varint(step) + _delimited(5, values)


def beginning(seconds: float) -> bytes:
    return b"\x09" + struct.pack("<d", seconds) + _delimited(3, _FORMAT)


def step_of(data: bytes) -> int | None:
    """The step of an event of ours; None for the first record of a file."""
    return _read_varint(data, 10)[0] if data[9:10] == b"\x10" else None


def tags_of(data: bytes) -> list[str]:
    """The names of the scalars of an event of ours that has a step."""
    at = _read_varint(data, 10)[1]
    at = _read_varint(data, at + 1)[1]  # the summary's length: it is all that follows
    found = []
    while at < len(data):
        length, value = _read_varint(data, at + 1)
        size, tag = _read_varint(data, value + 1)
        found.append(data[tag : tag + size].decode())
        at = value + length
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _delimited(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


class EventFile:
    """The one file of a folder. `last` is the step written last, None before the first, and `last_tags` the names of
    what was written of it then. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / FILE_NAME
        self.last: int | None = None
        self.last_tags: list[str] = []
        data = self._path.read_bytes() if self._path.exists() else b""
        whole = list(records(data))
        end = whole[-1][0] if whole else 0
        if whole and (step := step_of(whole[-1][1])) is not None:
            self.last, self.last_tags = step, tags_of(whole[-1][1])
        if end < len(data):
            os.truncate(self._path, end)  # a write that was cut off
        self._is_new = end == 0

    def write(self, seconds: float, step: int, scalars: Mapping[str, float]) -> None:
        """Append one step. `seconds`: Unix time."""
        data = record(event(seconds, step, scalars))
        if self._is_new:
            data = record(beginning(seconds)) + data
        with self._path.open("ab") as file:
            file.write(data)
        self._is_new = False
        self.last, self.last_tags = step, list(scalars)

    def begin_anew(self) -> None:
        self._path.unlink(missing_ok=True)
        self._is_new, self.last, self.last_tags = True, None, []
