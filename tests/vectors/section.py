"""One vector file in the making, and the faults that are made by hand from the parts of a good object.

Not here: which faults (the chapters).
"""

from __future__ import annotations

from typing import Any

import wire

SPEC = "1.0"

Entry = dict[str, Any]


def readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list | tuple) else value


class Section:
    """One vector file in the making."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.valid: list[Entry] = []
        self.invalid: list[Entry] = []

    def good(self, op: str, name: str, comment: str, *, value: Any, **inputs: Any) -> None:
        entry = {"name": name, "comment": comment, "op": op, **inputs, "value": value}
        self.valid.append(readable(entry))

    def bad(self, op: str, name: str, comment: str, error: str, **inputs: Any) -> None:
        self.invalid.append(readable({"name": name, "comment": comment, "op": op, **inputs, "error": error}))

    def object(self, kind: str, name: str, comment: str, value: dict[str, Any]) -> bytes:
        data = wire.encode(kind, value)
        self.good("decode", name, comment, object=kind, bytes=data, value=value)
        return data

    def content(self) -> dict[str, Any]:
        names = [entry["name"] for entry in self.valid + self.invalid]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"section {self.number} uses a name twice: {repeated}")
        return {"spec": SPEC, "section": self.number, "valid": self.valid, "invalid": self.invalid}


# --- faults made by hand, from the encoded parts of a good object ---


def with_raw(kind: str, value: dict[str, Any], key: str, raw: bytes) -> bytes:
    """The object with one field's encoded value replaced."""
    return wire.mapping([(k, raw if k == key else v) for k, v in wire.pairs(kind, value)])


def without(kind: str, value: dict[str, Any], key: str) -> bytes:
    return wire.mapping([(k, v) for k, v in wire.pairs(kind, value) if k != key])


def plus(kind: str, value: dict[str, Any], key: str, raw: bytes) -> bytes:
    return wire.mapping([*wire.pairs(kind, value), (key, raw)])


def swapped(kind: str, value: dict[str, Any]) -> bytes:
    first, second, *rest = wire.pairs(kind, value)
    return wire.mapping([second, first, *rest])


def wide_uint(number: int) -> bytes:
    return b"\xcf" + number.to_bytes(8, "big")


def unknown_field(section: Section, kind: str, value: dict[str, Any]) -> None:
    """The faults every object shares: one of each a kind of object."""
    lower = kind.lower()
    first = next(iter(wire.LAYOUTS[kind]))
    cases = (
        (f"{lower}_unknown_key", "a field no table lists", "MALFORMED", plus(kind, value, "zz", wire.uint(1))),
        (f"{lower}_missing_key", f"'{first}' left out", "MALFORMED", without(kind, value, first)),
        (f"{lower}_swapped_keys", "the first two fields in the other order", "NOT_CANONICAL", swapped(kind, value)),
        (f"{lower}_trailing_byte", "one byte follows", "MALFORMED", wire.encode(kind, value) + b"\xc0"),
        (f"{lower}_cut_off", "the last byte is missing", "MALFORMED", wire.encode(kind, value)[:-1]),
    )
    for name, comment, error, data in cases:
        section.bad("decode", name, comment, error, object=kind, bytes=data)


def invalid_objects(section: Section, kind: str, value: dict[str, Any], cases: tuple[Any, ...]) -> None:
    unknown_field(section, kind, value)
    for name, comment, error, key, raw in cases:
        section.bad("decode", name, comment, error, object=kind, bytes=with_raw(kind, value, key, raw))
