"""ULPD1 deltas: exact for all bits, sure against damage, bounded in memory. Single faults: tests/vectors/delta.json."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol import delta, limits
from protocol.delta import BaseTensor, DeltaReader, DeltaTable, DeltaTensor, cut, decode, encode, encode_policy
from protocol.errors import Code, DecodeError
from protocol.policy import TensorLeaf

Bits = NDArray[np.uint16]

# Zeros, the least and greatest of each kind, infinities, quiet and signalling NaNs, and ordinary values.
SPECIAL = [0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
SPECIAL += [each | 0x8000 for each in SPECIAL]
PER_SECTION = limits.MAX_SECTION_BYTES // 2


def bits(values: object) -> Bits:
    return np.asarray(values, dtype=np.uint16)


def weights(count: int, seed: int) -> Bits:
    """As a trained model has them: normal around 0."""
    drawn = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * 0.02
    return bits(drawn.view(np.uint32) >> 16)


def stepped(old: Bits, share: float, furthest: int, seed: int) -> Bits:
    """Some values a few steps up or down."""
    random = np.random.default_rng(seed)
    steps = random.integers(1, furthest + 1, old.size) * random.choice([-1, 1], old.size)
    return np.where(random.random(old.size) < share, old + steps, old).astype(np.uint16)


def assert_round_trip(old: Bits, new: Bits) -> bytes:
    data = encode(old, new)
    assert decode(old, data, new.size).tobytes() == new.tobytes()
    return data


any_bits = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))
pairs = st.lists(st.tuples(any_bits, any_bits), max_size=300)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """A tensor and one that is near it in some way."""
    count = draw(st.one_of(st.integers(0, 130), st.sampled_from([1_000, 4_096, 70_001])))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    kinds: list[Bits] = [
        weights(count, seed),
        bits(random.integers(0, 1 << 16, count)),
        bits(random.choice(SPECIAL, count)),
        bits(np.full(count, draw(any_bits))),
    ]
    old = kinds[draw(st.integers(0, 3))]
    new = stepped(old, draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0])), draw(st.sampled_from([1, 3, 300])), seed)
    if draw(st.booleans()):
        new = np.where(random.random(count) < 0.1, random.choice(SPECIAL, count), new).astype(np.uint16)
    return old, new


# --- exact ---


@given(pairs)
def test_any_bits_become_any_other_bits(values: list[tuple[int, int]]) -> None:
    table = bits(values).reshape(-1, 2)

    assert_round_trip(np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1]))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_tensor_near_another_comes_back_bit_for_bit(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    data = assert_round_trip(old, new)

    assert len(data) <= new.nbytes + 32


@pytest.mark.parametrize("target", SPECIAL)
def test_every_pattern_becomes_each_special_one_and_back(target: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    same = np.full_like(every, target)

    assert_round_trip(every, same)
    assert_round_trip(same, every)


@pytest.mark.parametrize("shift", [1, 127, 128, 0x7FFF, 0x8000, 0xFFFF])
def test_every_pattern_becomes_one_further_on(shift: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)

    assert_round_trip(every, every + np.uint16(shift))


@pytest.mark.parametrize("count", [63, 64, 65, PER_SECTION - 1, PER_SECTION, PER_SECTION + 1, 2 * PER_SECTION + 77])
def test_a_tensor_of_any_length_is_cut_into_sections(count: int) -> None:
    old = weights(count, count)
    data = assert_round_trip(old, stepped(old, 0.01, 1, 1))

    assert len(data) < count * 2 / 20 + 64


def test_a_step_of_learning_is_two_orders_of_magnitude_smaller_than_the_weights() -> None:
    old = weights(PER_SECTION, 0)
    # A step of 1e-6 · N(0, 0.2) on float32 masters that lie anywhere within their rounding.
    random = np.random.default_rng(1)
    masters = (old.astype(np.uint32) << 16 | random.integers(0, 1 << 16, old.size)).astype(np.uint32).view(np.float32)
    moved = masters + 1e-6 * 0.2 * random.standard_normal(old.size).astype(np.float32)
    new = bits(moved.view(np.uint32) >> 16)

    assert len(assert_round_trip(old, new)) < new.nbytes / 150


def test_an_unchanged_tensor_costs_seventeen_bytes_a_section() -> None:
    old = weights(PER_SECTION + 1, 0)

    assert len(assert_round_trip(old, old.copy())) == 2 * 17


# --- damage ---

SMALL_OLD = np.concatenate([weights(200, 3), bits(SPECIAL)])
SMALL_NEW = np.concatenate([stepped(weights(200, 3), 0.1, 3, 4), bits([*SPECIAL[:9], *SPECIAL[:8:-1]])])


def assert_refused_or_harmless(data: bytes) -> None:
    """Damage that no check can see must not change a weight."""
    try:
        decoded = decode(SMALL_OLD, data, SMALL_NEW.size)
    except DecodeError as error:
        assert error.code in (Code.MALFORMED, Code.TOO_LARGE)
    else:
        assert decoded.tobytes() == SMALL_NEW.tobytes()


def test_every_truncation_is_an_error() -> None:
    data = encode(SMALL_OLD, SMALL_NEW)
    for length in range(len(data)):
        with pytest.raises(DecodeError, match="delta: "):
            decode(SMALL_OLD, data[:length], SMALL_NEW.size)


def test_no_flipped_bit_changes_a_weight() -> None:
    data = encode(SMALL_OLD, SMALL_NEW)
    assert data[0] == delta.Mode.ULP
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        assert_refused_or_harmless(bytes(flipped))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_edit_changes_a_weight(data: st.DataObject) -> None:
    delta_bytes = encode(SMALL_OLD, SMALL_NEW)
    start = data.draw(st.integers(0, len(delta_bytes)))
    stop = data.draw(st.integers(start, min(len(delta_bytes), start + 8)))

    assert_refused_or_harmless(delta_bytes[:start] + data.draw(st.binary(max_size=8)) + delta_bytes[stop:])


@given(st.binary(max_size=200))
def test_noise_is_no_delta(noise: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(SMALL_OLD, noise, SMALL_NEW.size)


def test_a_large_delta_survives_no_flipped_bit_either() -> None:
    old = weights(300_000, 5)
    new = stepped(old, 0.01, 2, 6)
    data = encode(old, new)
    for place in np.random.default_rng(0).integers(0, 8 * len(data), 60).tolist():
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert decode(old, bytes(flipped), new.size).tobytes() == new.tobytes()
        except DecodeError:
            continue


@settings(max_examples=100, deadline=None)
@given(st.integers(0, SMALL_OLD.size - 1), any_bits)
def test_another_base_is_found_out(place: int, other: int) -> None:
    data = encode(SMALL_OLD, SMALL_NEW)
    base = SMALL_OLD.copy()
    base[place] = other
    if other == SMALL_OLD[place]:
        return
    try:
        # A value that becomes −0 is given outright: what it was does not matter unless another rank moves.
        assert decode(base, data, SMALL_NEW.size).tobytes() == SMALL_NEW.tobytes()
    except DecodeError:
        return


def test_a_base_of_other_length_is_refused_before_anything_is_read() -> None:
    with pytest.raises(DecodeError, match="base of 5"):
        decode(bits([0] * 5), b"", 4)


# --- bombs ---


def whole(raw_length: int, stored: bytes) -> bytes:
    return bytes([delta.Mode.WHOLE]) + bytes(16) + delta.varint(raw_length) + delta.varint(len(stored)) + stored


def peak_of_refusal(data: bytes, count: int) -> int:
    """Bytes that were set aside while this was refused."""
    old = np.zeros(count, dtype=np.uint16)
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode(old, data, count)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - 2 * count


@pytest.mark.parametrize("states_its_size", [True, False])
def test_a_frame_that_unfolds_into_a_gigabyte_is_refused_in_little_memory(states_its_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=states_its_size).compressobj(
        size=1 << 30 if states_its_size else -1
    )
    bomb = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(64)) + compressor.flush()

    assert peak_of_refusal(whole(2_000, bomb[:1_900]), 1_000) < 1 << 16
    assert peak_of_refusal(whole(limits.MAX_SECTION_BYTES, bomb), PER_SECTION) < 3 * limits.MAX_SECTION_BYTES


def test_a_frame_with_a_huge_window_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    content = np.random.default_rng(0).integers(0, 4, 2_000, dtype=np.uint8).tobytes()
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    stored = frame.compress(content) + frame.flush()

    with pytest.raises(DecodeError, match="zstd"):
        decode(np.zeros(1_000, dtype=np.uint16), whole(2_000, stored), 1_000)


@pytest.mark.parametrize("kind", ["one exponent, each a step", "normal, each up to 90 steps", "any bits, each up"])
def test_the_worst_section_is_decoded_in_bounded_memory(kind: str) -> None:
    old = {"one": np.full(PER_SECTION, 0x3FC0, np.uint16), "nor": weights(PER_SECTION, 0)}.get(kind[:3])
    if old is None:
        old = bits(np.random.default_rng(0).integers(0x100, 0x7F00, PER_SECTION))
    new = stepped(old, 1.0, 90 if "90" in kind else 1, 1)
    data = encode(old, new)
    tracemalloc.start()
    decoded = decode(old, data, new.size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert decoded.tobytes() == new.tobytes()
    assert peak < 64 << 20


# --- whole policies ---


def tensor(name: str, dtype: str, shape: tuple[int, ...], raw: bytes) -> DeltaTensor:
    return DeltaTensor(TensorLeaf(name, dtype, shape, hashlib.sha256(raw).digest()), len(raw))


class Policy:
    """Tensors by name, as base and as new policy."""

    def __init__(self, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        self.tensors = tensors

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(tuple(tensor(name, *self.tensors[name]) for name in sorted(self.tensors, key=str.encode)))

    @property
    def raw(self) -> dict[str, bytes]:
        return {name: raw for name, (_, _, raw) in self.tensors.items()}

    def base(self, name: str) -> BaseTensor | None:
        if name not in self.tensors:
            return None
        dtype, shape, raw = self.tensors[name]
        return BaseTensor(dtype, shape, np.frombuffer(raw, dtype=np.uint8))

    def new(self, name: str) -> NDArray[np.uint8]:
        return np.frombuffer(self.tensors[name][2], dtype=np.uint8)


WIDE = weights(PER_SECTION + 500, 7)
OLD = Policy(
    {
        "a.buffer": ("F32", (4,), bytes(16)),
        "b.weight": ("BF16", (20, 20), weights(400, 3).tobytes()),
        "é.weight": ("BF16", (8,), bits(range(8)).tobytes()),
        "wide.weight": ("BF16", (WIDE.size,), WIDE.tobytes()),
        "x.gone": ("BF16", (2,), bytes(4)),
        "y.retyped": ("F16", (2,), bytes(4)),
    }
)
NEW = Policy(
    {
        "a.buffer": ("F32", (4,), bytes(16)),
        "a.changed": ("F32", (1,), b"\1\2\3\4"),
        "b.weight": ("BF16", (20, 20), stepped(weights(400, 3), 0.1, 1, 4).tobytes()),
        "d.new": ("BF16", (3,), bits([0x7FC1, 0x8000, 5]).tobytes()),
        "empty": ("BF16", (0, 9), b""),
        "packed": ("U8", (3,), b"odd"),
        "é.weight": ("BF16", (4, 2), bits(range(8)).tobytes()),
        "wide.weight": ("BF16", (WIDE.size,), stepped(WIDE, 0.01, 2, 8).tobytes()),
        "y.retyped": ("BF16", (2,), bytes(4)),
    }
)
DELTA = b"".join(encode_policy(NEW.table, OLD.base, NEW.new))


def apply(pieces: Iterator[bytes] | list[bytes], base: Policy = OLD, most: int = NEW.table.size) -> dict[str, bytes]:
    reader = DeltaReader(pieces, most_bytes=most)
    written: dict[str, bytes] = {each.leaf.name: b"" for each in reader.table.tensors}
    for section in reader.sections(base.base):
        assert section.begin == len(written[section.tensor.leaf.name])
        assert section.raw.size <= limits.MAX_SECTION_BYTES
        written[section.tensor.leaf.name] += section.raw.tobytes()
    return written


def test_a_policy_with_kept_moved_new_reshaped_and_removed_tensors_comes_back() -> None:
    assert apply([DELTA]) == NEW.raw
    assert len(DELTA) < len(WIDE.tobytes()) / 15


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200_000))
def test_a_delta_may_arrive_in_pieces_of_any_size(size: int) -> None:
    assert apply([DELTA[start : start + size] for start in range(0, len(DELTA), size)]) == NEW.raw


def test_a_delta_is_cut_into_blobs_of_one_size() -> None:
    blobs = list(cut(encode_policy(NEW.table, Policy({}).base, NEW.new), 100_000))

    assert [len(blob) for blob in blobs[:-1]] == [100_000] * (len(blobs) - 1)
    assert 0 < len(blobs[-1]) <= 100_000
    assert apply(blobs, Policy({})) == NEW.raw


def test_a_policy_can_be_written_without_any_base() -> None:
    data = b"".join(encode_policy(NEW.table, Policy({}).base, NEW.new))

    assert apply([data], OLD) == NEW.raw


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(DELTA) - 1))
def test_a_stream_that_ends_early_is_an_error(length: int) -> None:
    with pytest.raises(DecodeError):
        apply([DELTA[:length]])


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.integers(0, 8 * 2_000), st.integers(0, 8 * len(DELTA) - 1)))
def test_no_flipped_bit_in_a_stream_changes_a_weight(place: int) -> None:
    flipped = bytearray(DELTA)
    flipped[place // 8] ^= 1 << place % 8
    try:
        written = apply([bytes(flipped)])
    except DecodeError:
        return
    # A name or a shape is the table's word, which the policy root vouches for.
    assert list(written.values()) == [NEW.raw[name] for name in sorted(NEW.raw, key=str.encode)]


def test_a_table_that_is_larger_than_the_manifest_allows_is_refused_at_once() -> None:
    with pytest.raises(DecodeError) as caught:
        DeltaReader([DELTA[:2_000]], most_bytes=NEW.table.size - 1)

    assert caught.value.code is Code.TOO_LARGE


def test_a_wrong_base_is_named_as_one() -> None:
    other = Policy(OLD.tensors | {"wide.weight": ("BF16", (WIDE.size,), NEW.raw["wide.weight"])})

    with pytest.raises(DecodeError, match=r"tensor wide\.weight does not come out as announced: .* another base"):
        apply([DELTA], other)


def test_a_base_that_lacks_a_tensor_is_named() -> None:
    lacking = Policy({name: each for name, each in OLD.tensors.items() if name != "b.weight"})

    with pytest.raises(DecodeError, match=r"tensor b\.weight builds on a tensor that the base does not hold"):
        apply([DELTA], lacking)


def test_a_new_tensor_that_does_not_fit_the_table_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="the table says"):
        list(encode_policy(NEW.table, OLD.base, lambda name: NEW.new(name)[1:]))
