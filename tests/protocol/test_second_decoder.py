"""A decoder made of nothing but SPEC.md: its field tables and the steps of 7.3. It accepts what the product accepts.

So the tables are enough to write another, and the product does nothing they do not say. Not here: speed, and
the validity steps of chapter 8 (the vectors).
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import calibration, codec, delta, envelope, lease, log, messages, policy, run, trace, verdict
from protocol.errors import DecodeError

ROOT = Path(__file__).parent.parent.parent
SPEC = (ROOT / "SPEC.md").read_text()
VECTORS = ROOT / "tests" / "vectors"
MODULES = (calibration, delta, envelope, lease, log, messages, policy, run, trace, verdict)


class Fault(Exception):
    """`str(fault)` is the code."""


# --- what SPEC.md says ---


class Field(NamedTuple):
    key: str
    type: str  # uint, real, flag, bytes, text, word, tokens, floats, or the name of an object
    listed: bool
    nil: bool
    constraint: str


def field_of(row: list[str]) -> Field:
    key, kind, presence, constraint = row
    return Field(
        key.strip("`"),
        kind.removeprefix("list of ").strip("`"),
        kind.startswith("list of "),
        presence == "nil allowed",
        constraint,
    )


def tables() -> dict[str, list[Field]]:
    found = {}
    for name, text in re.findall(r"^\*\*(\w+)\*\*\n\n((?:\|.*\n)+)", SPEC, re.M):
        cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[2:]]
        found[name] = [field_of(row) for row in cells]
    return found | {name: [] for name in re.findall(r"^\*\*(\w+)\*\* has no fields", SPEC, re.M)}


TABLES = tables()
REASONS = re.findall(r"^\| `([A-Z_]+)` \|", SPEC.split("### 11.2 ")[1].split("### 11.3 ")[0], re.M)


def figures(text: str) -> list[int]:
    """The bounds in a constraint, in order: `≤ 64 items, each 32 bytes`, `0 to 258 bytes`, `≤ 2^32 − 1`."""
    text = text.replace("2^32 − 1", str(2**32 - 1)).split(";")[0]
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def list_limit(field: Field) -> int:
    return figures(field.constraint)[0]


def longest_list(name: str) -> int:
    longest = 0
    for field in TABLES[name]:
        if field.listed:
            longest = max(longest, list_limit(field))
        if field.type in TABLES:
            longest = max(longest, longest_list(field.type))
    return longest


# --- SPEC 7.3 step 2: one msgpack value ---


class Reader:
    def __init__(self, data: bytes, longest: int) -> None:
        self.data = data
        self.place = 0
        self.longest = longest

    def take(self, count: int) -> bytes:
        if self.place + count > len(self.data):
            raise Fault("MALFORMED")
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "big", signed=signed)

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode("utf-8", "strict")
        except UnicodeDecodeError:
            raise Fault("MALFORMED") from None

    def array(self, count: int) -> list[Any]:
        if count > self.longest:
            raise Fault("TOO_LARGE")
        return [self.value() for _ in range(count)]

    def map(self, count: int) -> dict[Any, Any]:
        found = {}
        for _ in range(count):
            key, value = self.value(), self.value()
            if type(key) not in (str, bytes):
                raise Fault("MALFORMED")
            found[key] = value
        return found

    def extension(self, length: int) -> object:
        self.take(1 + length)
        return object()

    def value(self) -> Any:
        mark = self.number(1)
        if mark < 0x80:
            return mark
        if mark < 0x90:
            return self.map(mark & 15)
        if mark < 0xA0:
            return self.array(mark & 15)
        if mark < 0xC0:
            return self.text(mark & 31)
        if mark >= 0xE0:
            return mark - 0x100
        match mark:
            case 0xC0:
                return None
            case 0xC2 | 0xC3:
                return mark == 0xC3
            case 0xC4 | 0xC5 | 0xC6:
                return self.take(self.number(1 << (mark - 0xC4)))
            case 0xC7 | 0xC8 | 0xC9:
                return self.extension(self.number(1 << (mark - 0xC7)))
            case 0xCA:
                return struct.unpack(">f", self.take(4))[0]
            case 0xCB:
                return struct.unpack(">d", self.take(8))[0]
            case 0xCC | 0xCD | 0xCE | 0xCF:
                return self.number(1 << (mark - 0xCC))
            case 0xD0 | 0xD1 | 0xD2 | 0xD3:
                return self.number(1 << (mark - 0xD0), signed=True)
            case 0xD4 | 0xD5 | 0xD6 | 0xD7 | 0xD8:
                return self.extension(1 << (mark - 0xD4))
            case 0xD9 | 0xDA | 0xDB:
                return self.text(self.number(1 << (mark - 0xD9)))
            case 0xDC | 0xDD:
                return self.array(self.number(2 << (mark - 0xDC)))
            case 0xDE | 0xDF:
                return self.map(self.number(2 << (mark - 0xDE)))
        raise Fault("MALFORMED")


# --- SPEC 7.3 steps 3 to 7 ---


def need(holds: bool, code: str = "MALFORMED") -> None:
    if not holds:
        raise Fault(code)


def checked(field: Field, plain: Any) -> Any:
    if field.nil and plain is None:
        return None
    if field.listed:
        need(type(plain) is list)
        need(len(plain) <= list_limit(field), "TOO_LARGE")
        each = field.constraint.split(";")[0].partition("each ")[2]
        return [one(field.type, item, each) for item in plain]
    return one(field.type, plain, field.constraint)


def one(kind: str, plain: Any, constraint: str) -> Any:
    bounds = figures(constraint)
    if kind in TABLES:
        return as_object(kind, plain)
    if kind in ("tokens", "floats"):
        need(type(plain) is bytes and len(plain) % 4 == 0)
        need(len(plain) <= 4 * bounds[0], "TOO_LARGE")
        values = [value for (value,) in struct.iter_unpack("<I" if kind == "tokens" else "<f", plain)]
        need(all(map(math.isfinite, values)))
        return values
    if kind == "word":
        words = REASONS if "11.2" in constraint else re.findall(r"[A-Z_]+", constraint.split(";")[0])
        need(type(plain) is str and plain in words)
        return plain
    if kind == "uint":
        most = bounds[0] if constraint.startswith("≤") else 2**64 - 1
        need(type(plain) is int and 0 <= plain <= most)
    elif kind == "real":
        need(type(plain) is float and math.isfinite(plain))
    elif kind == "flag":
        need(type(plain) is bool)
    elif kind == "bytes":
        need(type(plain) is bytes and bounds[0] <= len(plain) <= bounds[-1])
    elif kind == "text":
        need(type(plain) is str and len(plain) <= bounds[0])
    return plain


def as_object(name: str, plain: Any) -> dict[str, Any]:
    need(type(plain) is dict)
    fields = TABLES[name]
    for field in fields:
        need(field.key in plain)
    need(len(plain) == len(fields))
    return {field.key: checked(field, plain[field.key]) for field in fields}


def load_wire() -> ModuleType:
    spec = importlib.util.spec_from_file_location("second_encoder", VECTORS / "wire.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WIRE = load_wire()


def second(name: str, data: bytes) -> str:
    """ "accepted", or the code."""
    try:
        reader = Reader(data, longest_list(name))
        plain = reader.value()
        need(reader.place == len(data))
        value = as_object(name, plain)
        need(WIRE.encode(name, value) == data, "NOT_CANONICAL")
    except Fault as fault:
        return str(fault)
    except RecursionError:
        return "MALFORMED"
    return "accepted"


def first(name: str, data: bytes) -> str:
    cls = next(vars(module)[name] for module in MODULES if name in vars(module))
    try:
        codec.decode(cls, data)
    except DecodeError as error:
        return str(error.code)
    return "accepted"


def agree(name: str, data: bytes) -> bool:
    ours, theirs = first(name, data), second(name, data)
    # Which of two faults in one parse a library meets first is its own affair.
    return ours == theirs or {ours, theirs} == {"MALFORMED", "TOO_LARGE"}


def vectors() -> list[tuple[str, str, bytes]]:
    found = []
    for path in sorted(VECTORS.glob("*.json")):
        content = json.loads(path.read_text())
        for entry in [*content.get("valid", []), *content.get("invalid", [])]:
            if entry.get("op") == "decode":
                found.append((f"{path.stem}-{entry['name']}", entry["object"], bytes.fromhex(entry["bytes"])))
    return found


ALL = vectors()
SHORT = [each for each in ALL if len(each[2]) < 1_000]


def test_the_tables_describe_every_object_of_the_second_encoder() -> None:
    assert set(TABLES) == set(WIRE.LAYOUTS)
    for name, fields in TABLES.items():
        assert [field.key for field in fields] == list(WIRE.LAYOUTS[name]), name


@pytest.mark.parametrize(("name", "data"), [(name, data) for _, name, data in ALL], ids=[each[0] for each in ALL])
def test_both_decoders_say_the_same_of_a_vector(name: str, data: bytes) -> None:
    assert second(name, data) == first(name, data)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_both_decoders_say_the_same_of_damaged_bytes(data: st.DataObject) -> None:
    _, name, good = data.draw(st.sampled_from(SHORT))
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed)))
        piece = data.draw(st.binary(max_size=3))
        changed[place : place + data.draw(st.integers(0, 3))] = piece

    assert agree(name, bytes(changed)), (name, first(name, bytes(changed)), second(name, bytes(changed)))


@given(st.sampled_from(sorted(TABLES)), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_both_decoders_say_the_same_of_any_bytes(name: str, data: bytes) -> None:
    assert agree(name, data)
