"""Policy folders, roots, manifests. Single faults with their outcome: tests/vectors/policy.json."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import DecodeError, PolicyError
from protocol.policy import (
    Blob,
    Manifest,
    PolicyFile,
    check_file_name,
    check_manifest,
    describe,
    merkle_root,
    policy_files,
    policy_root,
    read_safetensors,
)

TENSORS = {f"layers.{i}.weight": bytes([i]) * (8 * i + 8) for i in range(9)}


def write_safetensors(path: Path, names: list[str], metadata: dict[str, str] | None = None) -> None:
    table: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name in names:
        raw = TENSORS[name]
        table[name] = {"dtype": "F32", "shape": [len(raw) // 4], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def make_folder(folder: Path, *shards: list[str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 8}')
    (folder / "tokenizer.json").write_text("{}")
    for number, names in enumerate(shards):
        write_safetensors(folder / f"model-{number}.safetensors", names)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "policy", list(TENSORS))


def test_the_root_does_not_depend_on_how_tensors_are_spread_over_files(folder: Path, tmp_path: Path) -> None:
    expected = policy_root(folder)
    shuffle = random.Random(1)
    for count in (1, 2, 4, 9):
        names = list(TENSORS)
        shuffle.shuffle(names)
        sharded = make_folder(tmp_path / f"sharded-{count}", *(names[i::count] for i in range(count)))
        assert policy_root(sharded) == expected, count


def test_metadata_and_foreign_files_do_not_change_the_root(folder: Path) -> None:
    expected = policy_root(folder)
    write_safetensors(folder / "model-0.safetensors", list(TENSORS), {"format": "pt"})
    (folder / "README.md").write_text("hello")
    (folder / "model.safetensors.index").write_text("{}")
    (folder / "checkpoint").mkdir()

    assert policy_root(folder) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"vocab_size": 9}'),
        lambda folder: (folder / "chat_template.jinja").write_text(""),
        lambda folder: write_safetensors(folder / "model-0.safetensors", list(TENSORS)[1:]),
        lambda folder: (folder / "model-0.safetensors").write_bytes(
            (folder / "model-0.safetensors").read_bytes()[:-1] + b"\xff"
        ),
    ],
    ids=["configuration", "template added", "tensor missing", "one byte of a weight"],
)
def test_what_a_policy_is_made_of_changes_its_root(folder: Path, change: object) -> None:
    before = policy_root(folder)
    change(folder)  # type: ignore[operator]

    assert policy_root(folder) != before


def test_a_folder_without_tokenizer_says_how_to_make_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()

    with pytest.raises(PolicyError, match=r"no tokenizer\.json.*save_pretrained"):
        policy_files(folder)


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "model-0.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    with pytest.raises(PolicyError, match=r"pytorch_model\.bin is a pickle.*safe_serialization"):
        policy_files(folder)


def test_a_pickle_beside_weights_is_no_part_of_the_policy(folder: Path) -> None:
    expected = policy_root(folder)
    (folder / "optimizer.pt").write_bytes(b"\x80\x04.")

    assert policy_root(folder) == expected
    assert "optimizer.pt" not in [path.name for path in policy_files(folder)]


def test_no_folder_at_all_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="is not a folder"):
        policy_root(tmp_path / "nowhere")


@given(cut=st.integers(0, 400))
def test_a_file_cut_off_anywhere_is_a_policy_error(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_safetensors(path, list(TENSORS))
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data) - 1)])

    with pytest.raises(PolicyError):
        read_safetensors(path)


@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets"]), inner, max_size=4)
        ),
        max_leaves=20,
    ),
    size=st.integers(0, 16),
)
def test_any_json_header_is_read_or_a_policy_error(
    header: object, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))

    try:
        places = read_safetensors(path)
    except PolicyError:
        return
    assert sum(place.end - place.begin for place in places) == size


@pytest.mark.parametrize("size", [2**64, 10**30])
def test_a_dimension_that_no_root_can_name_is_a_policy_error(folder: Path, size: int) -> None:
    header = json.dumps({"empty": {"dtype": "F32", "shape": [0, size], "data_offsets": [0, 0]}}).encode()
    (folder / "model-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(PolicyError, match="malformed"):
        policy_root(folder)


def test_tensors_lie_where_the_header_says(folder: Path) -> None:
    path = folder / "model-0.safetensors"
    data = path.read_bytes()

    assert {place.name: data[place.begin : place.end] for place in read_safetensors(path)} == TENSORS


def test_a_tree_is_what_rfc_9162_says() -> None:
    def leaf(data: bytes) -> bytes:
        return hashlib.sha256(b"\0" + data).digest()

    def node(left: bytes, right: bytes) -> bytes:
        return hashlib.sha256(b"\1" + left + right).digest()

    a, b, c = b"a", b"b", b"c"
    assert merkle_root([a]) == leaf(a)
    assert merkle_root([a, b, c]) == node(node(leaf(a), leaf(b)), leaf(c))
    with pytest.raises(ValueError, match="at least one leaf"):
        merkle_root([])


@pytest.mark.parametrize("size", [0, 1, limits.MAX_BLOB_BYTES - 1, limits.MAX_BLOB_BYTES, limits.MAX_BLOB_BYTES + 1])
def test_a_file_is_cut_into_blobs_whose_manifest_is_valid(folder: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (folder / "merges.txt").write_bytes(content)
    files = describe(folder)
    check_manifest(Manifest(bytes(32), 0, policy_root(folder), files, 0, 1))
    merges = next(file for file in files if file.name == "merges.txt")

    pieces = [content[i : i + limits.MAX_BLOB_BYTES] for i in range(0, size, limits.MAX_BLOB_BYTES)]
    assert merges.blobs == tuple(Blob(hashlib.sha256(piece).digest(), len(piece)) for piece in pieces)
    assert merges.size == size


@given(st.text(max_size=20))
def test_no_file_name_of_a_manifest_leaves_its_folder(name: str) -> None:
    try:
        check_file_name(name)
    except DecodeError:
        return
    assert Path("/policy", name).resolve().parent == Path("/policy")
    assert "\n" not in name and name.isascii()


@pytest.mark.parametrize("name", ["../config.json", "a/b.json", "..\\b.json", "/etc/a.json", "a\0.json", "CON.exe"])
def test_a_name_with_path_characters_is_refused(name: str) -> None:
    file = PolicyFile(name, (Blob(bytes(32), 1),))

    with pytest.raises(DecodeError, match="cannot be a file of a policy"):
        check_manifest(Manifest(bytes(32), 0, bytes(32), (file,), 0, 1))


@pytest.mark.parametrize(
    "entry", ['{"x": null}', '{"x": {}}', '{"x": {"dtype": 1, "shape": [], "data_offsets": [0, 0]}}', '{"x": 3}', "[]"]
)
def test_a_header_that_is_none_is_told_in_words_and_not_as_pythons_exception(folder: Path, entry: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(len(entry).to_bytes(8, "little") + entry.encode())
    with pytest.raises(PolicyError, match=r"'x' is no tensor with dtype, shape and data_offsets|JSON object") as told:
        policy_root(folder)
    assert "Error" not in str(told.value) and "save the model and its fast tokenizer there" in str(told.value)
