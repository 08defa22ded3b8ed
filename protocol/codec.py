"""Value ↔ canonical msgpack, by declaration (SPEC 7).

A wire object is a frozen dataclass whose fields are annotated with one of the kinds below, e.g.
`lease_id: Annotated[bytes, Bytes(16)]`. It is encoded as a msgpack map with the fields in
declaration order. Bytes are valid only if re-encoding the decoded value gives the same bytes: that
refuses wide integers, float32, long forms, duplicate, unknown and reordered keys and trailing bytes.

Not here: signatures (envelope.py) and what the values mean (each object's own file).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

import msgpack
import numpy as np

from protocol.errors import Code, DecodeError

T = TypeVar("T")


# Where in an object a value stands: the object's name, or (where, field or place in a list). Made for every value
# and read for a wrong one alone.
Where = str | tuple["Where", str | int]


def _malformed(where: Where, what: str) -> DecodeError:
    return DecodeError(Code.MALFORMED, f"{_shown_place(where)}: {what}")


def _shown_place(where: Where) -> str:
    if isinstance(where, str):
        return where
    outer, inner = where
    return f"{_shown_place(outer)}[{inner}]" if isinstance(inner, int) else f"{_shown_place(outer)}.{inner}"


def _shown(plain: Any) -> str:
    """A wrong value for a message. Not the inside of a list or map: that may nest deeper than repr can follow."""
    if isinstance(plain, str | bytes):
        return repr(plain[:40])
    return repr(plain) if plain is None or isinstance(plain, int | float) else f"a {type(plain).__name__}"


class Kind:
    """How one field is written and what it may hold."""

    def plain(self, value: Any) -> Any:
        """The msgpack form of a value."""
        return value

    def value(self, plain: Any, where: Where) -> Any:
        """The checked value of a msgpack form; raises DecodeError(MALFORMED) naming `where`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class UInt(Kind):
    """An unsigned integer up to `most`."""

    most: int = 2**64 - 1

    def value(self, plain: Any, where: Where) -> int:
        if type(plain) is not int or not 0 <= plain <= self.most:
            raise _malformed(where, f"expected an integer from 0 to {self.most}, got {_shown(plain)}")
        return plain


@dataclasses.dataclass(frozen=True)
class Real(Kind):
    """A finite float64."""

    def plain(self, value: Any) -> float:
        return float(value)

    def value(self, plain: Any, where: Where) -> float:
        if type(plain) is not float or not math.isfinite(plain):
            raise _malformed(where, f"expected a finite float64, got {_shown(plain)}")
        return plain


@dataclasses.dataclass(frozen=True)
class Flag(Kind):
    def value(self, plain: Any, where: Where) -> bool:
        if type(plain) is not bool:
            raise _malformed(where, f"expected true or false, got {_shown(plain)}")
        return plain


@dataclasses.dataclass(frozen=True)
class Bytes(Kind):
    """Exactly `least` bytes, or from `least` to `most`."""

    least: int
    most: int | None = None

    def value(self, plain: Any, where: Where) -> bytes:
        most = self.least if self.most is None else self.most
        if type(plain) is not bytes or not self.least <= len(plain) <= most:
            got = f"{len(plain)} bytes" if type(plain) is bytes else type(plain).__name__
            wanted = f"{self.least}" if most == self.least else f"{self.least} to {most}"
            raise _malformed(where, f"expected {wanted} bytes, got {got}")
        return plain


@dataclasses.dataclass(frozen=True)
class Text(Kind):
    """UTF-8 text of at most `most` characters."""

    most: int

    def value(self, plain: Any, where: Where) -> str:
        if type(plain) is not str or len(plain) > self.most:
            raise _malformed(where, f"expected text of at most {self.most} characters")
        return plain


@dataclasses.dataclass(frozen=True)
class Choice(Kind):
    """One of a closed list of words."""

    words: type[StrEnum]

    def plain(self, value: Any) -> str:
        return str(value)

    def value(self, plain: Any, where: Where) -> StrEnum:
        try:
            return self.words(plain)
        except ValueError:
            raise _malformed(where, f"{_shown(plain)} is not one of {', '.join(self.words)}") from None


@dataclasses.dataclass(frozen=True)
class Maybe(Kind):
    """A value or nil."""

    inner: Kind

    def plain(self, value: Any) -> Any:
        return None if value is None else self.inner.plain(value)

    def value(self, plain: Any, where: Where) -> Any:
        return None if plain is None else self.inner.value(plain, where)


@dataclasses.dataclass(frozen=True)
class Many(Kind):
    """A list of at most `most` values, held as a tuple."""

    inner: Kind
    most: int

    def plain(self, value: Any) -> list[Any]:
        return list(value) if _is_own_form(self.inner) else list(map(self.inner.plain, value))

    def value(self, plain: Any, where: Where) -> tuple[Any, ...]:
        if type(plain) is not list:
            raise _malformed(where, f"expected a list, got {type(plain).__name__}")
        if len(plain) > self.most:
            raise DecodeError(Code.TOO_LARGE, f"{_shown_place(where)}: {len(plain)} items, at most {self.most}")
        return tuple([self.inner.value(item, (where, place)) for place, item in enumerate(plain)])


@dataclasses.dataclass(frozen=True)
class Object(Kind):
    """Another wire object."""

    cls: type

    def plain(self, value: Any) -> dict[str, Any]:
        return to_plain(value)

    def value(self, plain: Any, where: Where) -> Any:
        return _from_plain(self.cls, plain, where)


@dataclasses.dataclass(frozen=True)
class Tokens(Kind):
    """Token ids as raw little-endian u32, held as a tuple of ints."""

    most: int

    def plain(self, value: Any) -> bytes:
        return np.asarray(value, dtype="<u4").tobytes()

    def value(self, plain: Any, where: Where) -> tuple[int, ...]:
        raw = _array_bytes(plain, where, self.most)
        return tuple(np.frombuffer(raw, dtype="<u4").tolist())


@dataclasses.dataclass(frozen=True)
class Floats(Kind):
    """Finite float32 values as raw little-endian bytes, held as a tuple of floats."""

    most: int

    def plain(self, value: Any) -> bytes:
        return np.asarray(value, dtype="<f4").tobytes()

    def value(self, plain: Any, where: Where) -> tuple[float, ...]:
        values = np.frombuffer(_array_bytes(plain, where, self.most), dtype="<f4")
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise _malformed(where, f"value {bad} is not finite")
        return tuple(values.tolist())


def _array_bytes(plain: Any, where: Where, most: int) -> bytes:
    if type(plain) is not bytes or len(plain) % 4:
        raise _malformed(where, "expected a byte string of 4-byte values")
    if len(plain) > 4 * most:
        raise DecodeError(Code.TOO_LARGE, f"{_shown_place(where)}: {len(plain) // 4} values, at most {most}")
    return plain


_FIELDS: dict[type, tuple[tuple[str, Kind], ...]] = {}


def fields_of(cls: Any) -> tuple[tuple[str, Kind], ...]:
    """The (key, kind) pairs of a wire object, in wire order."""
    if cls not in _FIELDS:
        _FIELDS[cls] = _read_fields(cls)
    return _FIELDS[cls]


def _read_fields(cls: Any) -> tuple[tuple[str, Kind], ...]:
    hints = get_type_hints(cls, include_extras=True)
    pairs = []
    for field in dataclasses.fields(cls):
        kinds = [meta for meta in getattr(hints[field.name], "__metadata__", ()) if isinstance(meta, Kind)]
        if len(kinds) != 1:
            raise TypeError(f"{cls.__name__}.{field.name} needs exactly one codec kind")
        pairs.append((field.name, kinds[0]))
    return tuple(pairs)


_WRITERS: dict[type, tuple[tuple[str, Callable[[Any], Any] | None], ...]] = {}


def _writers(cls: type) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """As `fields_of`: how each field is written, None where it is its own msgpack form."""
    found = _WRITERS.get(cls)
    if found is None:
        pairs = fields_of(cls)
        found = tuple((name, None if _is_own_form(kind) else kind.plain) for name, kind in pairs)
        _WRITERS[cls] = found
    return found


def _is_own_form(kind: Kind) -> bool:
    return type(kind).plain is Kind.plain


def to_plain(value: Any) -> dict[str, Any]:
    """The msgpack map of a wire object."""
    return {
        name: getattr(value, name) if write is None else write(getattr(value, name))
        for name, write in _writers(type(value))
    }


def _from_plain(cls: type[T], plain: Any, where: Where) -> T:
    pairs = fields_of(cls)
    if type(plain) is not dict:
        raise _malformed(where, f"expected a map, got {type(plain).__name__}")
    if len(plain) != len(pairs) or not all(name in plain for name, _ in pairs):
        raise _other_fields(pairs, plain, where)
    return cls(*[kind.value(plain[name], (where, name)) for name, kind in pairs])


def _other_fields(pairs: tuple[tuple[str, Kind], ...], plain: dict[Any, Any], where: Where) -> DecodeError:
    known = [name for name, _ in pairs]
    missing = next((name for name in known if name not in plain), None)
    if missing is not None:
        return _malformed(where, f"field '{missing}' is missing")
    unknown = sorted(str(key)[:40] for key in plain if key not in known)
    return _malformed(where, f"unknown field '{unknown[0]}'")


def encode(value: Any) -> bytes:
    """The canonical bytes of a wire object."""
    packed: bytes = msgpack.packb(to_plain(value), use_bin_type=True)
    return packed


def _longest(kind: Kind) -> int:
    """The largest list limit anywhere below a field of this kind."""
    if isinstance(kind, Many):
        return max(kind.most, _longest(kind.inner))
    if isinstance(kind, Maybe):
        return _longest(kind.inner)
    return longest_list(kind.cls) if isinstance(kind, Object) else 0


_LONGEST: dict[type, int] = {}


def longest_list(cls: Any) -> int:
    """The largest list limit of a wire object and of all it holds; 0 when it holds no list."""
    if cls not in _LONGEST:
        _LONGEST[cls] = max((_longest(kind) for _, kind in fields_of(cls)), default=0)
    return _LONGEST[cls]


# Lists up to here may be set aside on the word of their header.
_TRUSTED_LENGTH = 4096


def _holds_all_it_announces(data: bytes) -> bool:
    """Whether a whole msgpack value is there. Reads over it: sets nothing aside, whatever headers announce."""
    reader = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
    reader.feed(data)
    try:
        reader.skip()
    except (ValueError, msgpack.exceptions.UnpackException):
        return False
    return True


def unpack(data: bytes, where: str, *, longest: int = 0) -> Any:
    """One msgpack value and nothing else, whose arrays have at most `longest` items.

    Raises DecodeError: TOO_LARGE for a longer array, MALFORMED for anything else.
    """
    # Nested array headers of a few bytes each make the parser set aside as many lists, a thousand deep, each as
    # long as the limit: with that of a manifest 5 KB would ask for 2 GB.
    most = longest if longest <= _TRUSTED_LENGTH or _holds_all_it_announces(data) else _TRUSTED_LENGTH
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True, max_array_len=most)
    except (
        ValueError,
        msgpack.exceptions.UnpackException,
        TypeError,
        RecursionError,
        OverflowError,
    ) as error:
        reason = str(error) or type(error).__name__
        if "exceeds max_array_len" in reason and int(reason.split()[0]) > longest:
            raise DecodeError(Code.TOO_LARGE, f"{where}: a list of more than {longest} items") from None
        raise _malformed(where, f"not one msgpack value ({reason:.120})") from None


def decode(cls: type[T], data: bytes, *, most: int | None = None) -> T:
    """The value of canonical bytes.

    Raises DecodeError: TOO_LARGE over `most` bytes or a list limit, MALFORMED when a field is not
    what its kind asks for, NOT_CANONICAL when re-encoding gives other bytes.
    """
    if most is not None and len(data) > most:
        raise DecodeError(Code.TOO_LARGE, f"{cls.__name__}: {len(data)} bytes, at most {most}")
    value = reopen(cls, data)
    # SPEC 7.2: bytes are valid only if re-encoding the decoded value gives the same bytes.
    if encode(value) != data:
        raise DecodeError(Code.NOT_CANONICAL, f"{cls.__name__}: not in canonical form")
    return value


def reopen(cls: type[T], data: bytes) -> T:
    """The value of bytes that this side encoded, or decoded and kept, before (a ledger's): that they are canonical is
    known, and seeing to it again is half of decoding.

    Raises DecodeError as `decode` does, but for NOT_CANONICAL.
    """
    return _from_plain(cls, unpack(data, cls.__name__, longest=longest_list(cls)), cls.__name__)
