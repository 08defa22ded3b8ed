"""Policies as named bytes: the root that names a policy everywhere, its manifest and its blobs (SPEC 8.3).

Reads safetensors headers itself (a length, a JSON table, raw bytes) so that neither torch nor any
pickle is involved. Not here: how a delta is coded (delta.py), fetching (node/weights.py), publishing
(trainer/publish.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from protocol import codec, identity, limits
from protocol.errors import Code, DecodeError, PolicyError

# SPEC 8.3.1: what a policy folder may hold. Everything else in the folder is ignored, except
# pickled weights, which are refused: they run code when loaded.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100 * 1024 * 1024

DELTA_CODEC: Final = "ULPD1"

_WHAT: Final = "a policy is a Hugging Face model folder, of weights, config.json and tokenizer.json"
_MAKE: Final = "save the model and its fast tokenizer there (`model.save_pretrained`, `tokenizer.save_pretrained`)"


@dataclass(frozen=True, slots=True)
class Blob:
    """A content-addressed piece of a file: SHA-256 and length in bytes."""

    digest: Annotated[bytes, codec.Bytes(32)]
    length: Annotated[int, codec.UInt(limits.MAX_BLOB_BYTES)]


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A file of the policy folder as the blobs it is the concatenation of."""

    name: Annotated[str, codec.Text(128)]
    blobs: Annotated[tuple[Blob, ...], codec.Many(codec.Object(Blob), limits.MAX_POLICY_BLOBS)]

    @property
    def size(self) -> int:
        return sum(blob.length for blob in self.blobs)


@dataclass(frozen=True, slots=True)
class Delta:
    """How to make a policy's tensors from those of an earlier one: a stream as the blobs it is the concatenation of."""

    base_version: Annotated[int, codec.UInt()]
    base_root: Annotated[bytes, codec.Bytes(32)]
    codec: Annotated[str, codec.Text(16)]  # DELTA_CODEC; others are passed over
    blobs: Annotated[tuple[Blob, ...], codec.Many(codec.Object(Blob), limits.MAX_POLICY_BLOBS)]

    @property
    def size(self) -> int:
        return sum(blob.length for blob in self.blobs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """SPEC 8.3.3. Signed by the trainer. Versions only go up within a run."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_MANIFEST

    run: Annotated[bytes, codec.Bytes(32)]
    version: Annotated[int, codec.UInt()]
    root: Annotated[bytes, codec.Bytes(32)]
    files: Annotated[tuple[PolicyFile, ...], codec.Many(codec.Object(PolicyFile), limits.MAX_POLICY_FILES)]
    created_ms: Annotated[int, codec.UInt()]
    expires_ms: Annotated[int, codec.UInt()]
    deltas: Annotated[tuple[Delta, ...], codec.Many(codec.Object(Delta), limits.MAX_POLICY_DELTAS)] = ()

    @property
    def size(self) -> int:
        """Of the files, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Most that the tensors of the policy can take together."""
        return sum(file.size for file in self.files if file.name.endswith(".safetensors"))


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """SPEC 8.3.2: one tensor under the policy root."""

    name: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]
    dtype: Annotated[str, codec.Text(16)]
    shape: Annotated[tuple[int, ...], codec.Many(codec.UInt(), 16)]
    digest: Annotated[bytes, codec.Bytes(32)]


@dataclass(frozen=True, slots=True)
class FileLeaf:
    """SPEC 8.3.2: one configuration or tokenizer file under the policy root."""

    name: Annotated[str, codec.Text(128)]
    digest: Annotated[bytes, codec.Bytes(32)]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes lie in its safetensors file (absolute offsets)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def version_name(version: int) -> str:
    """SPEC 8.3.1: what folders and files of a policy version are called."""
    return f"{version:06d}"


def check_file_name(name: str) -> None:
    """Raise DecodeError unless `name` may be a file of a policy folder (no path, known suffix)."""
    if not _FILE_NAME.fullmatch(name) or not name.endswith(_SUFFIXES):
        raise DecodeError(Code.MALFORMED, f"'{name[:80]}' cannot be a file of a policy")


def policy_files(folder: Path) -> tuple[Path, ...]:
    """The files that make up a policy, by name.

    Raises PolicyError when the folder is missing, lacks weights, configuration or tokenizer, or
    holds pickled weights.
    """
    if not folder.is_dir():
        raise PolicyError(f"{folder} is not a folder: {_WHAT}")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    chosen = [name for name in names if _FILE_NAME.fullmatch(name) and name.endswith(_SUFFIXES)]
    weights = [name for name in chosen if name.endswith(".safetensors")]
    if not weights:
        pickled = [name for name in names if name.endswith(_PICKLES)]
        if pickled:
            raise PolicyError(
                f"{folder / pickled[0]} is a pickle, which runs code when loaded: convert it with "
                "`model.save_pretrained(folder, safe_serialization=True)`"
            )
        raise PolicyError(f"{folder} has no .safetensors file: {_WHAT}; {_MAKE}")
    for needed in ("config.json", "tokenizer.json"):
        if needed not in chosen:
            raise PolicyError(f"{folder} has no {needed}: {_MAKE}")
    return tuple(folder / name for name in chosen)


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands in it twice")
    return table


def _place(name: str, entry: dict[str, Any], start: int) -> TensorPlace:
    """Raises ValueError, in words for people, when the header's entry is not one."""
    try:
        name.encode()  # a lone surrogate has no UTF-8 form
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = entry["dtype"]
        dtype.encode()
        if any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{name[:80]!r} is no tensor with dtype, shape and data_offsets") from None
    # SPEC 8.3.2: what does not fit a TensorLeaf cannot be named by a root.
    if len(name) > limits.MAX_TEXT_CHARACTERS or len(dtype) > 16 or len(shape) > 16 or any(n >= 2**64 for n in shape):
        raise ValueError(f"tensor {name[:80]!r} has a name, type or shape that is too long")
    return TensorPlace(name, dtype, shape, start + begin, start + end)


def safetensors_header(path: Path) -> bytes:
    """The bytes of a safetensors file before its data: the header and its length. Raises PolicyError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        header_size = int.from_bytes(length, "little")
        if not 2 <= header_size <= min(_MAX_HEADER_BYTES, size - 8):
            raise PolicyError(f"{path}: the safetensors header does not fit the file (cut off?)")
        return length + file.read(header_size)


def read_safetensors(path: Path) -> tuple[TensorPlace, ...]:
    """The tensors of a safetensors file, by name. Raises PolicyError when header and file do not fit."""
    size = path.stat().st_size
    header = safetensors_header(path)
    try:
        table = json.loads(header[8:], object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: the safetensors header is not plain JSON ({error})") from None
    if not isinstance(table, dict):
        raise PolicyError(f"{path}: the safetensors header is not a JSON object: {_MAKE}")
    start = len(header)
    try:
        places = [_place(name, entry, start) for name, entry in table.items() if name != "__metadata__"]
    except ValueError as error:
        raise PolicyError(f"{path}: the safetensors header is malformed: {error}: {_MAKE}") from None
    expected = start
    for place in sorted(places, key=lambda each: each.begin):
        if place.begin != expected or place.end < place.begin:
            raise PolicyError(f"{path}: tensor {place.name} overlaps another or leaves a gap")
        expected = place.end
    if expected != size:
        raise PolicyError(f"{path}: the tensors end at byte {expected} of {size}")
    return tuple(sorted(places, key=lambda each: each.name))


def digest_range(path: Path, begin: int, end: int) -> bytes:
    """SHA-256 of a part of a file. Raises PolicyError when the file is shorter."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(begin)
        left = end - begin
        while left:
            piece = file.read(min(left, 1 << 20))
            if not piece:
                raise PolicyError(f"{path} ended while it was read")
            state.update(piece)
            left -= len(piece)
    return state.digest()


def merkle_root(leaves: Iterable[bytes]) -> bytes:
    """SPEC 8.3.2: leaf = SHA-256(0x00 ‖ bytes), node = SHA-256(0x01 ‖ left ‖ right); the left
    subtree holds the largest power of two smaller than the count (as RFC 9162 section 2.1). One leaf is held at a
    time."""
    hashes = [hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]
    if not hashes:
        raise ValueError("a tree needs at least one leaf")
    while len(hashes) > 1:
        # Pairs from the left, an odd one last: the same tree, made from below.
        pairs = zip(hashes[::2], hashes[1::2], strict=False)
        odd = hashes[-1:] if len(hashes) % 2 else []
        hashes = [hashlib.sha256(b"\1" + left + right).digest() for left, right in pairs] + odd
    return hashes[0]


def policy_root(folder: Path) -> bytes:
    """SPEC 8.3.2: the 32 bytes that name a policy: a Merkle root over its tensors (by name), then
    its other files (by name). Raises PolicyError."""
    leaves = [
        TensorLeaf(place.name, place.dtype, place.shape, digest_range(path, place.begin, place.end))
        for path, place in tensor_places(folder)
    ]
    return root_of(leaves, file_leaves(folder))


def tensor_places(folder: Path) -> list[tuple[Path, TensorPlace]]:
    """Every tensor of a policy folder and the file it is in, sorted by the UTF-8 bytes of its name.

    Raises PolicyError, also when a tensor is in two files.
    """
    found: dict[str, tuple[Path, TensorPlace]] = {}
    for path in policy_files(folder):
        for place in read_safetensors(path) if path.suffix == ".safetensors" else ():
            if place.name in found:
                raise PolicyError(f"{path}: tensor {place.name} is in another file of the folder too")
            found[place.name] = path, place
    return [found[name] for name in sorted(found, key=str.encode)]


def file_leaves(folder: Path) -> list[FileLeaf]:
    """The leaves of a policy folder's files that hold no tensors. Raises PolicyError."""
    others = [path for path in policy_files(folder) if path.suffix != ".safetensors"]
    return [FileLeaf(path.name, digest_range(path, 0, path.stat().st_size)) for path in others]


def root_of(tensors: Iterable[TensorLeaf], files: Iterable[FileLeaf]) -> bytes:
    """SPEC 8.3.2: the root over leaves that are sorted by name already."""
    return merkle_root([codec.encode(leaf) for leaf in (*tensors, *files)])


def blobs_of(path: Path) -> Iterator[Blob]:
    """A file cut at every 4 MiB (limits.MAX_BLOB_BYTES)."""
    with path.open("rb") as file:
        while piece := file.read(limits.MAX_BLOB_BYTES):
            yield Blob(hashlib.sha256(piece).digest(), len(piece))


def describe(folder: Path) -> tuple[PolicyFile, ...]:
    """The files of a policy folder as blobs, for its manifest. Raises PolicyError."""
    return tuple(PolicyFile(path.name, tuple(blobs_of(path))) for path in policy_files(folder))


def check_manifest(manifest: Manifest) -> None:
    """SPEC 8.3.4: what must hold of a manifest before a byte is fetched. Raises DecodeError."""
    names = [file.name for file in manifest.files]
    for name in names:
        check_file_name(name)
    if names != sorted(set(names)):
        raise DecodeError(Code.MALFORMED, "the manifest's files are not sorted or not distinct")
    for file in manifest.files:
        _check_cut(file.blobs, file.name)
    bases = [(delta.base_version, delta.codec) for delta in manifest.deltas]
    if bases != sorted(set(bases)):
        raise DecodeError(Code.MALFORMED, "the manifest's deltas are not sorted by base or not distinct")
    for delta in manifest.deltas:
        what = f"the delta from version {delta.base_version}"
        if delta.base_version >= manifest.version:
            raise DecodeError(Code.MALFORMED, f"{what} leads to version {manifest.version}: a base is earlier")
        if not delta.blobs:
            raise DecodeError(Code.MALFORMED, f"{what} has no bytes")
        _check_cut(delta.blobs, what)


def _check_cut(blobs: tuple[Blob, ...], what: str) -> None:
    if any(blob.length != limits.MAX_BLOB_BYTES for blob in blobs[:-1]) or any(not blob.length for blob in blobs):
        raise DecodeError(Code.MALFORMED, f"the blobs of {what} are not cut at 4 MiB")


def blobs_in(manifest: Manifest) -> dict[bytes, Blob]:
    """Every blob that a manifest names, of files and of deltas, by digest."""
    parts = [*(file.blobs for file in manifest.files), *(delta.blobs for delta in manifest.deltas)]
    return {blob.digest: blob for blobs in parts for blob in blobs}
