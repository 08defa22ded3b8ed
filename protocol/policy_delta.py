"""Policy folders and the deltas between them: what a trainer writes and a node reads with delta.py.

    delta_between(base, new)        the stream, for the trainer
    compare(base, new, stream)      is it exactly `new` again, for the trainer before it signs
    fill(base, target, stream, …)   the weight files of a new folder, for a node

Files are mapped and handled a section at a time: beside the weights, which the system may drop from memory again,
this takes some megabytes. Not here: the coding (delta.py), fetching, giving folders their names (node/store.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from protocol.delta import BaseTensor, DeltaReader, DeltaTable, DeltaTensor, Raw, encode_policy
from protocol.errors import PolicyError
from protocol.policy import (
    Manifest,
    TensorLeaf,
    describe,
    digest_range,
    file_leaves,
    policy_files,
    root_of,
    safetensors_header,
    tensor_places,
)


class FolderTensors:
    """The tensors of a policy folder, mapped. Raises PolicyError."""

    def __init__(self, folder: Path) -> None:
        self._places = {place.name: (path, place) for path, place in tensor_places(folder)}
        self._files = {path: np.memmap(path, np.uint8, "r") for path, _ in self._places.values()}

    def get(self, name: str) -> BaseTensor | None:
        if name not in self._places:
            return None
        path, place = self._places[name]
        return BaseTensor(place.dtype, place.shape, self._files[path][place.begin : place.end])

    def raw(self, name: str) -> Raw:
        """The bytes of a tensor that is there."""
        path, place = self._places[name]
        return self._files[path][place.begin : place.end].view(np.ndarray)

    def table(self) -> DeltaTable:
        """All tensors, by name, as a delta that leads here names them. Reads every byte."""
        return DeltaTable(
            tuple(
                DeltaTensor(
                    TensorLeaf(place.name, place.dtype, place.shape, digest_range(path, place.begin, place.end)),
                    place.end - place.begin,
                )
                for path, place in self._places.values()
            )
        )


def _headers(folder: Path) -> dict[str, bytes]:
    """The header of each weight file, by name."""
    return {path.name: safetensors_header(path) for path in policy_files(folder) if path.suffix == ".safetensors"}


def delta_between(base: Path, new: Path) -> Iterator[bytes]:
    """The delta in pieces of no fixed size. Raises PolicyError when no delta can make the files of `new`."""
    # SPEC 8.3.3: a weight file made by a delta is the base's file of that name up to its data.
    if _headers(base) != _headers(new):
        raise PolicyError(f"the weight files of {new.name} are not laid out as those of {base.name}")
    tensors = FolderTensors(new)
    return encode_policy(tensors.table(), FolderTensors(base).get, tensors.raw)


def compare(base: Path, new: Path, pieces: Iterable[bytes]) -> None:
    """Decode a delta and compare every byte with what it should make. Raises PolicyError or DecodeError."""
    wanted = FolderTensors(new)
    table = wanted.table()
    reader = DeltaReader(pieces, most_bytes=table.size)
    if reader.table != table:
        raise PolicyError(f"the delta from {base.name} does not name the tensors of {new.name}")
    for section in reader.sections(FolderTensors(base).get):
        name = section.tensor.leaf.name
        part = slice(section.begin, section.begin + section.raw.size)
        if not np.array_equal(section.raw, wanted.raw(name)[part]):
            raise PolicyError(f"the delta from {base.name} does not give tensor {name} of {new.name}")


def fill(
    base: Path,
    target: Path,
    pieces: Iterable[bytes],
    manifest: Manifest,
    check_cancelled: Callable[[], None] = lambda: None,
) -> None:
    """Write the weight files of a manifest's policy into `target`, which holds its other files already.

    `check_cancelled` is called now and then and may raise. Raises PolicyError or DecodeError when the delta does not
    make exactly the manifest's files: then nothing in `target` is worth keeping.
    """
    reader = DeltaReader(pieces, most_bytes=manifest.tensor_bytes)
    _lay_out(base, target, manifest)
    places = {place.name: (path, place) for path, place in tensor_places(target)}
    laid_out = [(place.name, place.dtype, place.shape, place.end - place.begin) for _, place in places.values()]
    if laid_out != [(each.leaf.name, each.leaf.dtype, each.leaf.shape, each.size) for each in reader.table.tensors]:
        raise PolicyError("the delta's tensors are not those that the base's weight files have room for")
    # SPEC 8.3.5: the table's leaves and those of the other files give the root.
    if root_of([each.leaf for each in reader.table.tensors], file_leaves(target)) != manifest.root:
        raise PolicyError(f"the delta does not lead to policy {manifest.version}")
    with contextlib.ExitStack() as opened:
        paths = {path for path, _ in places.values()}
        files = {path: opened.enter_context(path.open("r+b")) for path in paths}
        for section in reader.sections(FolderTensors(base).get):
            check_cancelled()
            path, place = places[section.tensor.leaf.name]
            files[path].seek(place.begin + section.begin)
            files[path].write(section.raw.data)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    # SPEC 8.3.4: nobody is given blobs whose digests were not computed here.
    if describe(target) != manifest.files:
        raise PolicyError(f"the delta makes other files than the manifest of policy {manifest.version} names")


def _lay_out(base: Path, target: Path, manifest: Manifest) -> None:
    """The weight files with their headers, and holes for the data."""
    headers = _headers(base)
    for file in manifest.files:
        if not file.name.endswith(".safetensors"):
            continue
        if file.name not in headers or file.size < len(headers[file.name]):
            raise PolicyError(f"{file.name} of policy {manifest.version} is not laid out as the base's")
        with (target / file.name).open("xb") as out:
            out.write(headers[file.name])
            out.truncate(file.size)
