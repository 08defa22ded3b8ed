"""The fuzzing targets under a fixed draw of damaged vectors and of any bytes: what `make fuzz` does, in seconds.

The same examples every time. Not here: what each fault is called (tests/vectors), coverage (guided.py).
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.errors import DecodeError
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import OBJECTS, TARGETS

# No example may take longer, however busy the machine: an honest one takes a millisecond.
SECONDS = 5
ALWAYS_THE_SAME = settings(derandomize=True, deadline=1000 * SECONDS, max_examples=300, database=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@st.composite
def damaged(draw: st.DrawFn, target: str) -> bytes:
    """A seed with pieces cut out, put in and overwritten, perhaps ended by another seed's end."""
    start = draw(st.sampled_from(seeds(target)))
    data = bytearray(start)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        piece = draw(st.binary(max_size=6) | st.sampled_from([b"\xff" * 4, b"\x80\0\0\0", b"\xc0", b"\x90", bytes(8)]))
        data[place : place + draw(st.sampled_from([len(piece), 0, 1, 8, 200]))] = piece
    if draw(st.integers(0, 9)) == 0:
        other = draw(st.sampled_from(seeds(target)))
        data[draw(st.integers(0, len(data))) :] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_taken(target: str, folder: Path) -> None:
    assert len(seeds(target)) >= 10
    for seed in seeds(target):
        TARGETS[target](seed, folder)


@pytest.mark.parametrize("target", TARGETS)
@ALWAYS_THE_SAME
@given(data=st.data())
def test_damaged_vectors_give_documented_errors_or_exact_values(target: str, folder: Path, data: st.DataObject) -> None:
    TARGETS[target](data.draw(damaged(target)), folder)


@pytest.mark.parametrize("target", TARGETS)
@settings(ALWAYS_THE_SAME, max_examples=150)
@given(data=st.binary(max_size=300))
def test_any_bytes_give_documented_errors_or_exact_values(target: str, folder: Path, data: bytes) -> None:
    TARGETS[target](data, folder)


def bombs(first_fields: bytes) -> list[bytes]:
    """32 KiB that announce or hold as many things as possible."""
    size = 32 * 1024
    return [
        first_fields + head * (size // len(head))
        for head in (
            b"\xdd\x00\x00\xff\xff",
            b"\xdc\x10\x00",
            b"\xdf\x00\x00\xff\xff",
            b"\x91",
            b"\x80",
            b"\x81\xa1a",
            b"\xc0",
        )
    ] + [b"\xdc\x10\x00" + b"\xdc\x10\x00" * 900 + b"\x80" * size, b"\x81\xa1a" * 1_000 + b"\x80" + bytes(size)]


@pytest.mark.parametrize("cls", [cls for cls, _ in OBJECTS], ids=lambda cls: cls.__name__)
def test_bytes_that_announce_much_cost_little_time_and_memory(cls: type) -> None:
    fields = codec.fields_of(cls)
    head = bytes([0x80 + len(fields)]) if len(fields) < 16 else b"\xde" + len(fields).to_bytes(2, "big")
    first = b"" if not fields else bytes([0xA0 + len(fields[0][0])]) + fields[0][0].encode()
    # What a field that is a list, a number or text holds is shown in the error, and must not be shown whole.
    for bomb in bombs(head + first):
        tracemalloc.start()
        started = time.process_time()
        with pytest.raises(DecodeError) as caught:
            codec.decode(cls, bomb)
        seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert seconds < 1 and peak < 64 << 20, (bomb[:40], seconds, peak)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("cls", [cls for cls, _ in OBJECTS if codec.fields_of(cls)], ids=lambda cls: cls.__name__)
def test_nothing_in_place_of_a_field_is_too_deep_to_be_refused(cls: type) -> None:
    pairs = codec.fields_of(cls)
    head = bytes([0x80 + len(pairs)]) if len(pairs) < 16 else b"\xde" + len(pairs).to_bytes(2, "big")
    for depth in (5, 300, 960, 985, 1000, 1015, 5000):
        for wrap, core in ((b"\x91", b"\xc0"), (b"\x81\xa1a", b"\x80")):
            body = b"".join(bytes([0xA0 + len(key)]) + key.encode() + wrap * depth + core for key, _ in pairs)
            with pytest.raises(DecodeError):
                codec.decode(cls, head + body)
