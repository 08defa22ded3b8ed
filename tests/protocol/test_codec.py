"""The codec under arbitrary bytes: a value or a DecodeError, one encoding a value, bounded work.

Not here: single faults with their codes, which are tests/vectors/codec.json.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, lease, messages, trace
from protocol.errors import Code, DecodeError
from tests.fuzz import targets

VECTORS = Path(__file__).parent.parent / "vectors"
OBJECTS = {cls.__name__: cls for cls, _ in targets.OBJECTS}


def examples() -> list[tuple[type, bytes]]:
    """One valid encoding of every kind of object there is a vector of."""
    found: dict[str, bytes] = {}
    for path in sorted(VECTORS.glob("*.json")):
        for entry in json.loads(path.read_text()).get("valid", ()):
            if isinstance(entry, dict) and entry.get("op") == "decode":
                found.setdefault(entry["object"], bytes.fromhex(entry["bytes"]))
    return [(OBJECTS[name], data) for name, data in found.items()]


EXAMPLES = examples()


def strategy(kind: codec.Kind) -> st.SearchStrategy[Any]:
    match kind:
        case codec.UInt():
            return st.integers(0, kind.most)
        case codec.Real():
            return st.floats(allow_nan=False, allow_infinity=False)
        case codec.Flag():
            return st.booleans()
        case codec.Bytes():
            most = kind.least if kind.most is None else min(kind.most, 300)
            return st.binary(min_size=kind.least, max_size=most)
        case codec.Text():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=min(kind.most, 40))
        case codec.Choice():
            return st.sampled_from(list(kind.words))
        case codec.Maybe():
            return st.none() | strategy(kind.inner)
        case codec.Many():
            return st.lists(strategy(kind.inner), max_size=min(kind.most, 4)).map(tuple)
        case codec.Object():
            return values(kind.cls)
        case codec.Tokens():
            return st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
        case codec.Floats():
            return st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20).map(tuple)
    raise TypeError(kind)


def values(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{name: strategy(kind) for name, kind in codec.fields_of(cls)})


def every_kind_of_object() -> st.SearchStrategy[type]:
    return st.sampled_from(sorted(OBJECTS.values(), key=lambda cls: cls.__name__))


@given(cls=every_kind_of_object(), data=st.binary(max_size=400))
@settings(max_examples=250, deadline=None)
def test_any_bytes_give_a_value_or_a_decode_error(cls: type, data: bytes) -> None:
    try:
        value = codec.decode(cls, data)
    except DecodeError:
        return
    assert codec.encode(value) == data


@given(
    cls=every_kind_of_object(),
    plain=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
        max_leaves=12,
    ),
)
@settings(max_examples=300, deadline=None)
def test_any_msgpack_value_gives_a_value_or_a_decode_error(cls: type, plain: Any) -> None:
    try:
        codec.decode(cls, msgpack.packb(plain))
    except DecodeError as error:
        assert str(error).startswith(cls.__name__)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_value_survives_the_wire(data: st.DataObject) -> None:
    cls = data.draw(every_kind_of_object())
    value = data.draw(values(cls))

    assert codec.decode(cls, codec.encode(value)) == value


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_refused_or_is_another_value_in_its_own_encoding(data: st.DataObject) -> None:
    cls, good = data.draw(st.sampled_from(EXAMPLES))
    place = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != good[place]))
    changed = good[:place] + bytes([byte]) + good[place + 1 :]

    try:
        value = codec.decode(cls, changed)
    except DecodeError:
        return
    assert codec.encode(value) == changed


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_message_that_is_cut_off_anywhere_is_malformed(data: st.DataObject) -> None:
    cls, good = data.draw(st.sampled_from(EXAMPLES))
    length = data.draw(st.integers(0, len(good) - 1))

    with pytest.raises(DecodeError) as caught:
        codec.decode(cls, good[:length])
    assert caught.value.code is Code.MALFORMED


@pytest.mark.parametrize(("cls", "data"), EXAMPLES, ids=[cls.__name__ for cls, _ in EXAMPLES])
def test_what_was_decoded_before_reopens_as_the_same_value(cls: type, data: bytes) -> None:
    assert codec.reopen(cls, data) == codec.decode(cls, data)
    with pytest.raises(DecodeError):
        codec.reopen(cls, data[:-1])


def test_a_wrong_value_is_named_by_its_place_in_the_object() -> None:
    plain = msgpack.unpackb(next(data for cls, data in EXAMPLES if cls is trace.Trace))
    plain["spans"][1]["length"] = -1
    with pytest.raises(DecodeError, match=r"^Trace\.spans\[1\]\.length: expected an integer"):
        codec.decode(trace.Trace, msgpack.packb(plain))


def test_an_object_over_its_size_is_too_large_before_it_is_read() -> None:
    with pytest.raises(DecodeError) as caught:
        codec.decode(trace.Trace, bytes(101), most=100)

    assert caught.value.code is Code.TOO_LARGE
    assert "101 bytes, at most 100" in str(caught.value)


@pytest.mark.parametrize("header", [b"\xdd\x00\x00\xff\xff", b"\xdc\xff\xff"])
def test_nested_lists_that_announce_much_cost_next_to_nothing(header: bytes) -> None:
    bomb = b"\x82" + codec.encode(messages.GetLeases(1, ()))[1:-1] + header * 900

    started = time.process_time()
    for _ in range(20):
        with pytest.raises(DecodeError) as caught:
            codec.decode(messages.GetLeases, bomb + bytes(60_000))
        assert caught.value.code is Code.TOO_LARGE
    assert time.process_time() - started < 0.5  # unbounded: 20 times 40 ms


def test_an_error_names_the_field_where_it_lies() -> None:
    plain = codec.to_plain(lease.Slot(0, 5))
    nested = {**codec.to_plain(messages.Hello((), bytes(32), "", 0, trace.EngineDescriptor("", "", "", "", "")))}
    nested["engine"] = plain

    with pytest.raises(DecodeError, match=r"Hello\.engine: field 'name' is missing"):
        codec.decode(messages.Hello, msgpack.packb(nested))


def test_an_array_survives_as_raw_little_endian_values() -> None:
    kind = codec.Tokens(4)

    assert kind.plain((1, 2**32 - 1)) == bytes.fromhex("01000000ffffffff")
    assert kind.value(bytes.fromhex("01000000ffffffff"), "tokens") == (1, 2**32 - 1)


def test_a_field_without_a_codec_kind_is_our_bug_and_says_so() -> None:
    @dataclasses.dataclass
    class Forgotten:
        kept: Annotated[int, codec.UInt()]
        lost: int

    Forgotten.__annotations__ = {"kept": Annotated[int, codec.UInt()], "lost": int}
    with pytest.raises(TypeError, match="lost needs exactly one codec kind"):
        codec.encode(Forgotten(1, 2))
