"""`ULPD1`: the weights of one policy as the difference from another that the reader holds (SPEC 8.3.5). Pure.

A step of reinforcement learning moves about one bfloat16 value in a hundred, nearly always to a neighbouring one,
and how likely depends on the value's exponent, which both sides know. So the values are put in order of their old
exponent, and for each exponent it is written which of them changed and by how many steps.

    section(old, new)      2 MiB of one tensor   ──►  SAME, ULP or WHOLE, and a digest of what must come out
    encode, decode         one bfloat16 tensor   ──►  its sections
    encode_policy,         all tensors           ──►  a stream: the table of tensors, then their sections
    DeltaReader

Everything is done a section at a time, so memory does not grow with the policy. Not here: where the bytes come
from and go to, and whether the table is what the trainer signed (its leaves give the policy root).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol import codec, limits
from protocol.errors import Code, DecodeError
from protocol.policy import TensorLeaf

MAGIC: Final = b"ULPD1\n"
CHECK_BYTES: Final = 16
_LEVEL: Final = 3
# Larger windows only make a reader set aside memory: no stream is longer than a section.
_MAX_WINDOW: Final = 8 * 1024 * 1024

_MINUS_ZERO: Final = 0x8000
_MAX_RICE: Final = 20
_BYTES: Final = 32  # modes: 0.._MAX_RICE are Rice parameters
_BITMAP: Final = 33
_ESCAPE: Final = 255
# Fewer numbers than this are never worth a Huffman table.
_FEWEST_BYTES: Final = 64
# SPEC 8.3.5: what the streams of an ULP section may take although the section is shorter.
_LEAST_ROOM: Final = 1_024
# Changes that are applied at once, for the memory between.
_PIECE: Final = 1 << 16

Bits: TypeAlias = NDArray[np.uint16]
Raw: TypeAlias = NDArray[np.uint8]
Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class Mode(IntEnum):
    """How a section is written."""

    SAME = 0  # the base's bytes
    ULP = 1  # steps from the base's values
    WHOLE = 2  # the new bytes, whatever the base holds


@dataclass(frozen=True, slots=True)
class DeltaTensor:
    """One tensor of the new policy: its leaf under the policy root, and its length in bytes."""

    leaf: Annotated[TensorLeaf, codec.Object(TensorLeaf)]
    size: Annotated[int, codec.UInt()]


@dataclass(frozen=True, slots=True)
class DeltaTable:
    """All tensors of the new policy, sorted by the UTF-8 bytes of their names."""

    tensors: Annotated[tuple[DeltaTensor, ...], codec.Many(codec.Object(DeltaTensor), limits.MAX_POLICY_TENSORS)]

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the policy that the reader holds: raw bytes, uint8 [size]; may lie in a mapped file."""

    dtype: str
    shape: tuple[int, ...]
    raw: Raw


@dataclass(frozen=True, slots=True)
class Section:
    """A decoded piece of a tensor: `raw`, uint8 [at most 2 MiB], belongs at byte `begin` of it."""

    tensor: DeltaTensor
    begin: int
    raw: Raw


def _malformed(what: str) -> DecodeError:
    return DecodeError(Code.MALFORMED, f"delta: {what}")


# --- the old exponents ---


def _exponents(old: Bits) -> Raw:
    return (old >> 7).astype(np.uint8)


def _selections() -> Raw:
    """[256, 8]: where in a byte its n-th one is, low bits first."""
    table = np.zeros((256, 8), dtype=np.uint8)
    for byte in range(256):
        ones = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(ones)] = ones
    return table


_SELECTIONS: Final = _selections()


class _Bucket:
    """The values with one old exponent, in order of position (SPEC 8.3.5): a rank counts from 0 among them.

    A bit for each value and a running count for each 64 of them answer both ways; sorting the values takes thrice
    the time and, for its indices, 60 times the memory.
    """

    def __init__(self, exponents: Raw, exponent: int) -> None:
        packed = np.packbits(exponents == exponent, bitorder="little")
        self._words = np.zeros(-(-packed.size // 8), dtype="<u8")
        self._words.view(np.uint8)[: packed.size] = packed
        counts = np.bitwise_count(self._words)
        ends = np.cumsum(counts, dtype=np.int64)
        self._starts = ends - counts
        self.size = int(ends[-1])

    def ranks(self, positions: Ints) -> Ints:
        """Of members at these positions, ascending."""
        if self._many(positions.size):
            ranks: Ints = np.cumsum(self._unpacked())[positions] - 1
            return ranks
        words = positions >> 6
        earlier = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        ranks = self._starts[words] + np.bitwise_count(self._words[words] & earlier)
        return ranks

    def positions(self, ranks: Ints) -> Ints:
        """Of the members with these ranks, ascending and below the size."""
        if self._many(ranks.size):
            return np.flatnonzero(self._unpacked())[ranks]
        words = np.searchsorted(self._starts, ranks, side="right") - 1
        left = ranks - self._starts[words]
        octets = self._words[words].view(np.uint8).reshape(-1, 8)
        counts = np.bitwise_count(octets)
        ends = np.cumsum(counts, axis=1, dtype=np.uint8)
        chosen = (ends > left[:, None]).argmax(axis=1)
        row = np.arange(ranks.size)
        left -= ends[row, chosen] - counts[row, chosen]
        positions: Ints = 64 * words + 8 * chosen + _SELECTIONS[octets[row, chosen], left]
        return positions

    def _many(self, count: int) -> bool:
        """Whether to go through all values rather than through the ones asked for."""
        return count > self._words.size  # one of 64

    def _unpacked(self) -> Flags:
        return np.unpackbits(self._words.view(np.uint8), bitorder="little").view(np.bool_)


def _ordinals(bits: Bits) -> Ints:
    """bfloat16 bits → a whole number that grows with the value by one a step; −0 shares 0 with +0."""
    wide = bits.astype(np.int64)
    ordinals: Ints = np.where(wide & _MINUS_ZERO, -(wide & 0x7FFF), wide)
    return ordinals


def _from_ordinals(ordinals: Ints) -> Bits:
    return np.where(ordinals < 0, _MINUS_ZERO - ordinals, ordinals).astype(np.uint16)


# --- numbers and subsets ---


def _gaps(members: Ints) -> Ints:
    """Non-members before each member since the one before it; members ascending, at least one."""
    gaps = members.copy()
    gaps[1:] -= members[:-1] + 1
    return gaps


@dataclass(frozen=True, slots=True)
class _Streams:
    """The five parts of an ULP section, before compression."""

    directory: bytes
    small: bytes
    large: bytes
    patches: bytes
    bits: bytes

    def __iter__(self) -> Iterator[bytes]:
        return iter((self.directory, self.small, self.large, self.patches, self.bits))

    @property
    def size(self) -> int:
        return sum(map(len, self))


@dataclass(slots=True)
class _Writer:
    """Collects the streams of one section."""

    compressor: zstandard.ZstdCompressor
    directory: bytearray = field(default_factory=bytearray)
    small: list[Raw] = field(default_factory=list)
    large: list[NDArray[np.uint32]] = field(default_factory=list)
    flags: list[NDArray[Any]] = field(default_factory=list)

    def subset(self, members: Ints, of: int) -> None:
        """Which of 0..of−1; members ascending."""
        self.directory += varint(members.size)
        if not 0 < members.size < of:
            return
        gaps = _gaps(members)
        mode, cost = self._cheapest(gaps)
        if cost < of:
            self._numbers(gaps, mode)
            return
        self.directory.append(_BITMAP)
        bitmap = np.zeros(of, dtype=np.bool_)
        bitmap[members] = True
        self.flags.append(bitmap)

    def numbers(self, values: Ints) -> None:
        """Whole numbers from 0, as many as the reader expects."""
        self._numbers(values, self._cheapest(values)[0])

    def _cheapest(self, values: Ints) -> tuple[int, int]:
        """Mode, and its cost in bits."""
        count = values.size
        about = max(1.0, int(values.sum()) / count * math.log(2))
        guess = min(_MAX_RICE - 1, int(math.log2(about)))
        costs = [(int((values >> k).sum()) + count * (k + 1), k) for k in range(max(0, guess - 1), guess + 2)]
        cost, mode = min(costs)
        if count < _FEWEST_BYTES:
            return mode, cost
        small = np.minimum(values, _ESCAPE).astype(np.uint8)
        as_bytes = 8 * len(self.compressor.compress(small.tobytes())) + 32 * int((small == _ESCAPE).sum())
        return (_BYTES, as_bytes) if as_bytes < cost else (mode, cost)

    def _numbers(self, values: Ints, mode: int) -> None:
        self.directory.append(mode)
        if mode == _BYTES:
            self.small.append(np.minimum(values, _ESCAPE).astype(np.uint8))
            self.large.append(values[values >= _ESCAPE].astype("<u4"))
            return
        ends = np.cumsum((values >> mode) + 1)
        unary = np.zeros(int(ends[-1]), dtype=np.bool_)
        unary[ends - 1] = True
        self.flags.append(unary)
        if mode:
            remainders = np.empty((values.size, mode), dtype=np.bool_)
            for column in range(mode):
                remainders[:, column] = values >> (mode - 1 - column) & 1
            self.flags.append(remainders.ravel())

    def streams(self, patches: bytes) -> _Streams:
        small = b"".join(each.tobytes() for each in self.small)
        large = b"".join(each.tobytes() for each in self.large)
        bits = np.packbits(np.concatenate([each.astype(np.bool_) for each in self.flags])) if self.flags else b""
        return _Streams(bytes(self.directory), small, large, patches, bytes(bits))


class _Parts:
    """Takes the streams of one section apart; every method raises DecodeError where they do not hold what it needs."""

    def __init__(self, streams: _Streams) -> None:
        self._directory = _Source(iter((streams.directory,)))
        self._small = np.frombuffer(streams.small, dtype=np.uint8)
        if len(streams.large) % 4:
            raise _malformed("the large numbers are not 4 bytes each")
        self._large = np.frombuffer(streams.large, dtype="<u4")
        self._bits = np.frombuffer(streams.bits, dtype=np.uint8)
        self._bit = 0  # the next one

    def exponents(self) -> Iterator[int]:
        """Of the buckets with changes; what is written of each is read before the next."""
        last = -1
        for _ in range(self._directory.varint()):
            exponent = self._directory.take(1)[0]
            if exponent <= last:
                raise _malformed("the exponents do not ascend")
            yield exponent
            last = exponent

    def subset(self, of: int) -> Ints:
        """Ascending members of 0..of−1."""
        count = self._directory.varint()
        if count > of:
            raise _malformed(f"{count} members of a set of {of}")
        if count == of:
            return np.arange(of)
        if count == 0:
            return np.empty(0, dtype=np.int64)
        mode = self._directory.take(1)[0]
        if mode == _BITMAP:
            members = np.flatnonzero(self.flags(of))
            if members.size != count:
                raise _malformed(f"a bitmap of {members.size} members where {count} are announced")
            return members
        members = np.cumsum(self._numbers(count, mode) + 1) - 1
        if members[-1] >= of:
            raise _malformed(f"member {members[-1]} of a set of {of}")
        return members

    def numbers(self, count: int) -> Ints:
        return self._numbers(count, self._directory.take(1)[0])

    def flags(self, count: int) -> Flags:
        """The next bits."""
        end = self._bit + count
        if end > 8 * self._bits.size:
            raise _malformed("the bits end early")
        first = self._bit // 8
        unpacked = np.unpackbits(self._bits[first : -(-end // 8)])
        flags: Flags = unpacked[self._bit - 8 * first : end - 8 * first].view(np.bool_)
        self._bit = end
        return flags

    def _numbers(self, count: int, mode: int) -> Ints:
        if mode == _BYTES:
            return self._from_bytes(count)
        if mode > _MAX_RICE:
            raise _malformed(f"mode {mode} is unknown")
        values = self._unary(count)
        for bits in self.flags(count * mode).reshape(count, mode).T:
            values <<= 1
            values |= bits
        return values

    def _from_bytes(self, count: int) -> Ints:
        if count > self._small.size:
            raise _malformed("the small numbers end early")
        values = self._small[:count].astype(np.int64)
        self._small = self._small[count:]
        escaped = np.flatnonzero(values == _ESCAPE)
        if escaped.size > self._large.size:
            raise _malformed("the large numbers end early")
        values[escaped] = self._large[: escaped.size]
        self._large = self._large[escaped.size :]
        return values

    def _unary(self, count: int) -> Ints:
        """Lengths of the next runs of zeros, each ended by a one."""
        left = 8 * self._bits.size - self._bit
        window = min(left, 4 * count)
        while True:
            start = self._bit
            ones = np.flatnonzero(self.flags(window))
            if ones.size >= count:
                break
            if window == left:
                raise _malformed("the bits end early")
            self._bit, window = start, min(left, 2 * window)
        self._bit = start + int(ones[count - 1]) + 1
        return _gaps(ones[:count])

    def finish(self) -> None:
        rest = self._bits.size - -(-self._bit // 8)
        if rest or self._small.size or self._large.size or self._directory.take_most(1):
            raise _malformed("a section holds more than it says")
        if self._bit % 8 and self._bits[-1] & (0xFF >> self._bit % 8):
            raise _malformed("the bits do not end in zeros")


# --- one section ---


def _write_ulp(old: Bits, new: Bits, changed: Flags, compressor: zstandard.ZstdCompressor) -> _Streams:
    patched = _unreachable(old, new, np.flatnonzero(changed))
    changed[patched] = False
    exponents = _exponents(old)
    positions = np.flatnonzero(changed)
    positions = positions[exponents[positions].argsort(kind="stable")]
    bounds = np.searchsorted(exponents[positions], np.arange(257))
    present = np.flatnonzero(np.diff(bounds)).tolist()
    writer = _Writer(compressor)
    writer.directory += varint(len(present))
    for exponent in present:
        writer.directory.append(exponent)
        mine = slice(bounds[exponent], bounds[exponent + 1])
        bucket = _Bucket(exponents, exponent)
        writer.subset(bucket.ranks(positions[mine]), bucket.size)
        steps = _ordinals(new[positions[mine]]) - _ordinals(old[positions[mine]])
        lengths = np.abs(steps)
        further = np.flatnonzero(lengths > 1)
        writer.subset(further, lengths.size)
        if further.size:
            writer.numbers(lengths[further] - 2)
        writer.flags.append(steps > 0)
    patches = np.empty(patched.size, dtype=[("position", "<u4"), ("value", "<u2")])
    patches["position"], patches["value"] = patched, new[patched]
    return writer.streams(patches.tobytes())


def _unreachable(old: Bits, new: Bits, changed: Ints) -> Ints:
    """Changes that no step makes: to −0, and from −0 to +0, since ordinals do not tell the zeros apart."""
    before, after = old[changed], new[changed]
    unreachable: Ints = changed[(after == _MINUS_ZERO) | ((before == _MINUS_ZERO) & (after == 0))]
    return unreachable


def _read_ulp(old: Bits, streams: _Streams) -> Bits:
    parts = _Parts(streams)
    exponents = _exponents(old)
    new = old.copy()
    for exponent in parts.exponents():
        bucket = _Bucket(exponents, exponent)
        ranks = parts.subset(bucket.size)
        if not ranks.size:
            raise _malformed(f"exponent {exponent} is listed without a change")
        lengths = np.ones(ranks.size, dtype=np.int64)
        further = parts.subset(ranks.size)
        if further.size:
            lengths[further] = parts.numbers(further.size) + 2
        up = parts.flags(ranks.size)
        positions = bucket.positions(ranks)
        for start in range(0, positions.size, _PIECE):
            part = slice(start, start + _PIECE)
            _step(new, positions[part], np.where(up[part], lengths[part], -lengths[part]))
    parts.finish()
    _patch(new, streams.patches)
    return new


def _step(values: Bits, positions: Ints, steps: Ints) -> None:
    ordinals = _ordinals(values[positions]) + steps
    if int(np.abs(ordinals).max()) > 0x7FFF:
        raise _malformed("a step leads beyond the last bfloat16 value")
    values[positions] = _from_ordinals(ordinals)


def _patch(new: Bits, raw: bytes) -> None:
    if len(raw) % 6:
        raise _malformed("the patches are not 6 bytes each")
    patches = np.frombuffer(raw, dtype=[("position", "<u4"), ("value", "<u2")])
    positions = patches["position"].astype(np.int64)
    if positions.size and (positions[-1] >= new.size or (np.diff(positions) <= 0).any()):
        raise _malformed("the patches are not in order, or beyond the section")
    new[positions] = patches["value"]


def _stream(raw: bytes, compressor: zstandard.ZstdCompressor) -> bytes:
    """A stream as it is stored: both lengths, then one zstd frame, or the bytes themselves if that is no longer."""
    packed = compressor.compress(raw) if raw else raw
    stored = packed if len(packed) < len(raw) else raw
    return varint(len(raw)) + varint(len(stored)) + stored


def _inflate(stored: bytes, size: int) -> bytes:
    """One zstd frame of exactly `size` bytes; never more memory than that and a window. Raises DecodeError."""
    try:
        # The binding sets aside what a frame's header states, whatever it is told as the most.
        stated = zstandard.frame_content_size(stored)
        if stated not in (-1, size):
            raise _malformed(f"a frame of {stated} bytes where {size} are announced")
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        raw = reader.decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(f"not a zstd frame of {size} bytes ({error})") from None
    if len(raw) != size:
        raise _malformed(f"a frame of {len(raw)} bytes where {size} are announced")
    return raw


def _differ(old: Raw, new: Raw, bfloat16: bool) -> Flags:
    """Which values differ: bfloat16 values, else bytes."""
    differ: Flags = old.view("<u2") != new.view("<u2") if bfloat16 else old != new
    return differ


class _Encoder:
    """Writes the sections of one tensor, one after the other."""

    def __init__(self, compressor: zstandard.ZstdCompressor) -> None:
        self._compressor = compressor
        self._hash = hashlib.sha256()

    def section(self, old: Raw | None, new: Raw, *, bfloat16: bool) -> bytes:
        self._hash.update(new.data)
        check = self._hash.digest()[:CHECK_BYTES]
        changed = None if old is None else _differ(old, new, bfloat16)
        if changed is not None and not changed.any():
            return bytes([Mode.SAME]) + check
        steps = None
        if old is not None and changed is not None and bfloat16:
            steps = self._steps(old.view("<u2"), new.view("<u2"), changed)
        # Half the size is more than any step of learning needs: then see whether plain compression does better.
        if steps is None or 2 * len(steps) > new.size:
            whole = _stream(new.tobytes(), self._compressor)
            if steps is None or len(whole) < len(steps):
                return bytes([Mode.WHOLE]) + check + whole
        return bytes([Mode.ULP]) + check + steps

    def _steps(self, old: Bits, new: Bits, changed: Flags) -> bytes | None:
        streams = _write_ulp(old, new, changed, self._compressor)
        if streams.size > max(new.nbytes, _LEAST_ROOM):
            return None
        return b"".join(_stream(each, self._compressor) for each in streams)


class _Decoder:
    """Reads the sections of one tensor, one after the other."""

    def __init__(self, source: _Source, where: str) -> None:
        self._source = source
        self._where = where
        self.hash = hashlib.sha256()

    def section(self, old: Raw | None, size: int, *, bfloat16: bool) -> Raw:
        mode = self._source.take(1)[0]
        check = self._source.take(CHECK_BYTES)
        new = self._bytes(mode, old, size, bfloat16)
        self.hash.update(new.data)
        if self.hash.digest()[:CHECK_BYTES] != check:
            raise _malformed(
                f"{self._where} does not come out as announced: the delta is damaged or was made from another base"
            )
        return new

    def _bytes(self, mode: int, old: Raw | None, size: int, bfloat16: bool) -> Raw:
        if mode == Mode.WHOLE:
            return np.frombuffer(self._stream(size, exactly=True), dtype=np.uint8)
        if mode not in (Mode.SAME, Mode.ULP):
            raise _malformed(f"{self._where} has a section of unknown mode {mode}")
        if old is None:
            raise _malformed(f"{self._where} builds on a tensor that the base does not hold in this type and shape")
        if mode == Mode.SAME:
            return old.copy()
        if not bfloat16:
            raise _malformed(f"{self._where} is not BF16 and cannot be coded in steps")
        streams = []
        room = max(size, _LEAST_ROOM)
        for _ in range(5):
            streams.append(self._stream(room))
            room -= len(streams[-1])
        return _read_ulp(old.view("<u2"), _Streams(*streams)).view(np.uint8)

    def _stream(self, most: int, *, exactly: bool = False) -> bytes:
        return _read_stream(self._source, most, self._where, exactly=exactly)


def _read_stream(source: _Source, most: int, where: str, *, exactly: bool = False) -> bytes:
    """SPEC 8.3.5: both lengths are checked before anything is read or set aside."""
    raw, stored = source.varint(), source.varint()
    if raw > most or (exactly and raw != most):
        raise DecodeError(Code.TOO_LARGE, f"delta: {where} announces {raw} bytes where {most} are left")
    if stored > raw:
        raise _malformed(f"{where} has a stream of {raw} bytes stored as {stored}")
    kept = source.take(stored)
    return kept if stored == raw else _inflate(kept, raw)


# --- reading a stream ---


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, low ones first, the high bit set on all but the last."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class _Source:
    """Bytes that come in pieces of any size."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")

    def take_most(self, count: int) -> bytes:
        """The next `count` bytes, fewer only at the end."""
        if len(self._piece) >= count:
            taken, self._piece = bytes(self._piece[:count]), self._piece[count:]
            return taken
        parts: list[memoryview] = []
        while count:
            if not self._piece:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._piece = memoryview(piece)
                continue
            parts.append(self._piece[:count])
            self._piece = self._piece[count:]
            count -= len(parts[-1])
        return b"".join(parts)

    def take(self, count: int) -> bytes:
        taken = self.take_most(count)
        if len(taken) != count:
            raise _malformed("it ends early")
        return taken

    def varint(self) -> int:
        """At most 63 bits, in the shortest form."""
        number = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if shift and not byte:
                    raise _malformed("a number is not in its shortest form")
                return number
        raise _malformed("a number of more than 63 bits")

    def end(self) -> None:
        if self.take_most(1):
            raise _malformed("bytes follow its end")


# --- one tensor ---


def _ranges(size: int) -> Iterator[slice]:
    for begin in range(0, size, limits.MAX_SECTION_BYTES):
        yield slice(begin, min(size, begin + limits.MAX_SECTION_BYTES))


def encode(old: Bits, new: Bits) -> bytes:
    """The sections of one bfloat16 tensor; bits of both, uint16 [n]."""
    if old.shape != new.shape or old.ndim != 1:
        raise ValueError("old and new bits must be rows of equal length")
    before, after = np.ascontiguousarray(old, "<u2").view(np.uint8), np.ascontiguousarray(new, "<u2").view(np.uint8)
    encoder = _Encoder(zstandard.ZstdCompressor(level=_LEVEL, write_content_size=False))
    return b"".join(encoder.section(before[part], after[part], bfloat16=True) for part in _ranges(after.size))


def decode(old: Bits, data: bytes, count: int) -> Bits:
    """The new bits, uint16 [count], from the bits `encode` had as old ones.

    Raises DecodeError when data is not the delta of `count` values from exactly these.
    """
    if old.shape != (count,):
        raise _malformed(f"it is asked for {count} values from a base of {old.size}")
    before = np.ascontiguousarray(old, "<u2").view(np.uint8)
    source = _Source(iter((data,)))
    decoder = _Decoder(source, "the tensor")
    after = np.empty_like(before)
    for part in _ranges(after.size):
        after[part] = decoder.section(before[part], part.stop - part.start, bfloat16=True)
    source.end()
    return after.view("<u2")


# --- a whole policy ---


def is_bfloat16(tensor: DeltaTensor) -> bool:
    return tensor.leaf.dtype == "BF16"


def check_table(table: DeltaTable, most_bytes: int) -> None:
    """Raise DecodeError unless the table can be one of a policy of at most `most_bytes` of tensors."""
    names = [tensor.leaf.name.encode() for tensor in table.tensors]
    # SPEC 8.3.5 step 3
    if names != sorted(set(names)):
        raise _malformed("the tensors are not sorted by name, or not distinct")
    # SPEC 8.3.5 step 4
    for tensor in table.tensors:
        if is_bfloat16(tensor) and tensor.size != 2 * math.prod(tensor.leaf.shape):
            raise _malformed(f"{tensor.leaf.name} has {tensor.size} bytes, which is not its shape")
    # SPEC 8.3.5 step 5
    if table.size > most_bytes:
        raise DecodeError(Code.TOO_LARGE, f"delta: tensors of {table.size} bytes, at most {most_bytes}")


def _usable(base: BaseTensor | None, tensor: DeltaTensor) -> Raw | None:
    """The base's bytes if this tensor may build on them."""
    if base is None or (base.dtype, base.shape, base.raw.size) != (tensor.leaf.dtype, tensor.leaf.shape, tensor.size):
        return None
    # A mapped array is of a slower class.
    return base.raw.view(np.ndarray)


def encode_policy(
    table: DeltaTable, old: Callable[[str], BaseTensor | None], new: Callable[[str], Raw]
) -> Iterator[bytes]:
    """The delta in pieces of no fixed size (`cut` makes blobs of them).

    old, new: a tensor of the base (None where there is none) and of the new policy by name; each is asked for once,
    in the table's order, and let go before the next. Raises ValueError when `new` does not fit the table, and
    DecodeError for a table that no reader would take.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=False)
    check_table(table, table.size)
    yield MAGIC + _stream(codec.encode(table), compressor)
    for tensor in table.tensors:
        base, raw = _usable(old(tensor.leaf.name), tensor), new(tensor.leaf.name)
        if raw.size != tensor.size:
            raise ValueError(f"{tensor.leaf.name} has {raw.size} bytes, the table says {tensor.size}")
        encoder = _Encoder(compressor)
        for part in _ranges(tensor.size):
            yield encoder.section(None if base is None else base[part], raw[part], bfloat16=is_bfloat16(tensor))


def cut(pieces: Iterable[bytes], size: int = limits.MAX_BLOB_BYTES) -> Iterator[bytes]:
    """The same bytes in pieces of `size`; only the last may be shorter."""
    source = _Source(iter(pieces))
    while blob := source.take_most(size):
        yield blob


class DeltaReader:
    """A delta that is read as its bytes come in. `table` is there once it is made; its leaves, with those of the
    policy's other files, must give the root the trainer signed (SPEC 8.3.2) or nothing of it is worth decoding."""

    def __init__(self, pieces: Iterable[bytes], *, most_bytes: int) -> None:
        """most_bytes: of all tensors together, from the signed manifest. Raises DecodeError."""
        self._source = _Source(iter(pieces))
        # SPEC 8.3.5 step 1
        if self._source.take_most(len(MAGIC)) != MAGIC:
            raise _malformed("it does not begin as ULPD1")
        # SPEC 8.3.5 step 2
        self.table = codec.decode(DeltaTable, _read_stream(self._source, limits.MAX_DELTA_TABLE_BYTES, "the table"))
        check_table(self.table, most_bytes)

    def sections(self, old: Callable[[str], BaseTensor | None]) -> Iterator[Section]:
        """All sections, in order, each checked. old: the base's tensor of a name; asked for once a tensor.

        Raises DecodeError; a tensor is known to be whole when the first section of the next has come, or the end.
        """
        for tensor in self.table.tensors:
            base = _usable(old(tensor.leaf.name), tensor)
            decoder = _Decoder(self._source, f"tensor {tensor.leaf.name}")
            for part in _ranges(tensor.size):
                before = None if base is None else base[part]
                raw = decoder.section(before, part.stop - part.start, bfloat16=is_bfloat16(tensor))
                yield Section(tensor, part.start, raw)
            if decoder.hash.digest() != tensor.leaf.digest:
                raise _malformed(f"tensor {tensor.leaf.name} is not the one the table names")
        self._source.end()
