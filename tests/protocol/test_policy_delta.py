"""Policy folders made from earlier ones by deltas: byte for byte, or not at all. Single streams: test_delta.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.delta import MAGIC, DeltaReader, DeltaTable, cut, varint
from protocol.errors import Code, DecodeError, PolicyError
from protocol.policy import Manifest, describe, policy_root
from protocol.policy_delta import FolderTensors, compare, delta_between, fill

GENERATOR = np.random.default_rng(8)


def weights(count: int) -> bytes:
    """bfloat16 bits as of ordinary weights, and some that are none."""
    bits = (GENERATOR.normal(0, 0.05, count).astype("<f4").view("<u4") >> 16).astype("<u2")
    bits[:: max(1, count // 7)] = 0x8000
    return bits.tobytes()


def write_weights(path: Path, tensors: dict[str, tuple[str, bytes]]) -> None:
    table, data = {}, b""
    for name, (dtype, raw) in tensors.items():
        size = {"BF16": 2, "F32": 4}[dtype]
        table[name] = {"dtype": dtype, "shape": [len(raw) // size], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def stepped(raw: bytes, dtype: str) -> bytes:
    values = np.frombuffer(raw, "<u2" if dtype == "BF16" else "<u4").copy()
    values[:: max(1, len(values) // 50)] += 1
    return values.tobytes()


def make_folder(folder: Path, shards: list[dict[str, tuple[str, bytes]]], config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    for number, tensors in enumerate(shards):
        write_weights(folder / f"model-{number}.safetensors", tensors)
    return folder


SHARDS = [
    {"b.weight": ("BF16", weights(1_060_000)), "a.weight": ("BF16", weights(333))},  # one larger than a section
    {"c.buffer": ("F32", GENERATOR.bytes(400)), "d.empty": ("BF16", b""), "e.weight": ("BF16", weights(70_001))},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("policies") / "v1", SHARDS)


@pytest.fixture(scope="module")
def new(base: Path) -> Path:
    shards = [{name: (dtype, stepped(raw, dtype)) for name, (dtype, raw) in shard.items()} for shard in SHARDS]
    return make_folder(base.parent / "v2", shards, '{"changed": 1}')


@pytest.fixture(scope="module")
def stream(base: Path, new: Path) -> bytes:
    return b"".join(delta_between(base, new))


def manifest_of(folder: Path) -> Manifest:
    return Manifest(bytes(32), 2, policy_root(folder), describe(folder), 0, 1)


def target_for(new: Path, where: Path) -> Path:
    """What a node has before it applies a delta: the files that hold no tensors."""
    where.mkdir()
    for path in new.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, where)
    return where


def filled(base: Path, new: Path, pieces: Iterable[bytes], where: Path, manifest: Manifest | None = None) -> Path:
    target = target_for(new, where)
    fill(base, target, pieces, manifest or manifest_of(new))
    return target


def test_a_folder_made_by_a_delta_is_the_new_one_byte_for_byte(
    base: Path, new: Path, stream: bytes, tmp_path: Path
) -> None:
    assert len(stream) * 10 < sum(path.stat().st_size for path in new.iterdir())
    compare(base, new, [stream])
    made = filled(base, new, cut([stream], 1_000), tmp_path / "made")
    assert {path.name: path.read_bytes() for path in made.iterdir()} == {
        path.name: path.read_bytes() for path in new.iterdir()
    }


def test_there_is_no_delta_between_folders_that_are_laid_out_differently(base: Path, new: Path, tmp_path: Path) -> None:
    merged = make_folder(tmp_path / "merged", [{**SHARDS[0], **SHARDS[1]}])
    assert policy_root(merged) == policy_root(base)
    with pytest.raises(PolicyError, match="not laid out"):
        delta_between(merged, new)
    with pytest.raises(PolicyError, match="not laid out"):
        filled(merged, new, delta_between(base, new), tmp_path / "made")


def test_a_base_with_one_other_bit_is_noticed(base: Path, new: Path, stream: bytes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(base, other)
    path = other / "model-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DecodeError, match="made from another base"):
        filled(other, new, [stream], tmp_path / "made")
    with pytest.raises(DecodeError, match="made from another base"):
        compare(other, new, [stream])


def test_a_delta_to_another_policy_is_refused_before_it_is_decoded(base: Path, new: Path, tmp_path: Path) -> None:
    target = target_for(new, tmp_path / "made")
    with pytest.raises(PolicyError, match="does not lead to policy 2"):
        fill(base, target, delta_between(base, base), manifest_of(new))
    assert not any((target / "model-0.safetensors").read_bytes()[-1_000:])


def test_a_configuration_that_is_not_the_signed_one_is_noticed(
    base: Path, new: Path, stream: bytes, tmp_path: Path
) -> None:
    target = target_for(new, tmp_path / "made")
    (target / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match="does not lead to policy 2"):
        fill(base, target, [stream], manifest_of(new))


def test_files_that_are_not_the_manifests_are_not_kept(base: Path, new: Path, stream: bytes, tmp_path: Path) -> None:
    manifest = manifest_of(new)
    last = manifest.files[-2]
    assert last.name == "model-1.safetensors"
    lying = replace(last, blobs=(replace(last.blobs[0], digest=bytes(32)),))
    files = (*manifest.files[:-2], lying, manifest.files[-1])
    with pytest.raises(PolicyError, match="makes other files"):
        filled(base, new, [stream], tmp_path / "made", replace(manifest, files=files))


def table_stream(table: DeltaTable, announced: int | None = None) -> bytes:
    raw = codec.encode(table)
    return MAGIC + varint(len(raw) if announced is None else announced) + varint(len(raw)) + raw


@pytest.mark.parametrize("more", [1, 2**30], ids=["by one byte", "by a gigabyte"])
def test_a_raw_length_beyond_the_manifest_is_refused_before_memory_is_set_aside(
    base: Path, new: Path, tmp_path: Path, more: int
) -> None:
    tensors = FolderTensors(new).table().tensors
    buffer = next(each for each in tensors if each.leaf.dtype == "F32")
    room = manifest_of(new).tensor_bytes - sum(each.size for each in tensors)
    lying = tuple(replace(each, size=each.size + room + more) if each is buffer else each for each in tensors)
    with pytest.raises(DecodeError) as caught:
        filled(base, new, [table_stream(DeltaTable(lying))], tmp_path / "made")
    assert caught.value.code == Code.TOO_LARGE


def test_a_tensor_that_is_longer_than_its_place_is_refused(base: Path, new: Path, tmp_path: Path) -> None:
    tensors = FolderTensors(new).table().tensors
    lying = tuple(replace(each, size=each.size + 4) if each.leaf.dtype == "F32" else each for each in tensors)
    with pytest.raises(PolicyError, match="have room for"):
        filled(base, new, [table_stream(DeltaTable(lying))], tmp_path / "made")


@pytest.mark.parametrize("name", ["../../escaped", "/etc/passwd", "a\0b", "..\\b"])
def test_a_tensor_name_with_path_characters_names_no_file(base: Path, new: Path, tmp_path: Path, name: str) -> None:
    shards = [{name: ("BF16", weights(100))}]
    old = make_folder(tmp_path / "old", shards)
    after = make_folder(tmp_path / "after", [{name: ("BF16", stepped(shards[0][name][1], "BF16"))}])
    before = {path for path in tmp_path.rglob("*")}
    made = filled(old, after, delta_between(old, after), tmp_path / "made")
    assert {path for path in tmp_path.rglob("*")} - before == {made, *made.iterdir()}
    assert policy_root(made) == policy_root(after)


@pytest.mark.parametrize("head", [b"ULPD2\n", b"", b"\x80\x04.", b"BSDIFF"])
def test_a_codec_that_nobody_knows_is_refused(
    base: Path, new: Path, stream: bytes, tmp_path: Path, head: bytes
) -> None:
    with pytest.raises(DecodeError, match="does not begin as ULPD1"):
        filled(base, new, [head + stream[len(MAGIC) :]], tmp_path / "made")


@settings(max_examples=25, deadline=None)
@given(damage=st.data())
def test_no_damage_makes_another_folder(
    base: Path, new: Path, stream: bytes, tmp_path_factory: pytest.TempPathFactory, damage: st.DataObject
) -> None:
    place = damage.draw(st.integers(0, len(stream) - 1), "place")
    if damage.draw(st.booleans(), "cut off"):
        bad = stream[:place]
    else:
        bad = stream[:place] + bytes([stream[place] ^ 1 << damage.draw(st.integers(0, 7), "bit")]) + stream[place + 1 :]
    where = tmp_path_factory.mktemp("damaged") / "made"
    try:
        filled(base, new, [bad], where)
    except (DecodeError, PolicyError):
        shutil.rmtree(where.parent)
        return
    # Bits that zstd does not need, such as those of its own checksum, may be any.
    assert policy_root(where) == policy_root(new)


def test_a_reader_reads_no_further_than_the_table_before_it_is_asked(base: Path, stream: bytes) -> None:
    read = []

    def pieces() -> Iterable[bytes]:
        for piece in cut([stream], 1_000):
            read.append(piece)
            yield piece

    DeltaReader(pieces(), most_bytes=10**9)
    assert len(read) < 3
