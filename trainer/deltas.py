"""Deltas from earlier policies to the one just made: files that wait beside it until the gateway signs what they are.

    RUN/deltas/000012/000011-ROOT.ulpd1         base version, root of the base

Each is decoded and compared with the policy before it gets its name; one that does not come out exactly, or is not
worth it, is dropped with a reason, and nodes fetch the files. The learner makes them, between a step and telling the
ledger of it. Not here: the coding (protocol/delta.py), when they are removed (publish.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from protocol.errors import DecodeError, PolicyError
from protocol.policy import DELTA_CODEC, Delta, blobs_of, version_name
from protocol.policy_delta import compare, delta_between
from trainer.rundir import RunFolder, flush

# From every version to the next, and over 4 and over 16 of them at each fourth and sixteenth version: whoever is n
# versions behind needs few of them, and making them takes a third more time, not three times as much.
SKIPS: Final = (1, 4, 16)
_READ_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"(\d{6,20})-([0-9a-f]{64})\.ulpd1")


def bases(version: int) -> list[int]:
    """The versions that a delta to `version` is made from, as far as they are kept; earliest first."""
    return sorted(version - skip for skip in SKIPS if version % skip == 0 and version >= skip)


def make_deltas(folder: RunFolder, version: int, root_of: Callable[[int], bytes | None]) -> list[str]:
    """Write the deltas to a policy from those earlier ones that are on disk and have a root. What went wrong, for
    people."""
    target = folder.deltas(version)
    shutil.rmtree(target, ignore_errors=True)
    said = []
    for base in bases(version):
        root = root_of(base)
        if root is None or not folder.policy(base).is_dir():
            continue
        try:
            target.mkdir(parents=True, exist_ok=True)
            _make(folder.policy(base), folder.policy(version), target / _name(base, root))
        except (PolicyError, DecodeError, OSError) as error:
            said.append(f"no delta from policy {base} to {version}, nodes fetch the files: {error}")
    return said


def _make(base: Path, new: Path, path: Path) -> None:
    """Raises PolicyError, DecodeError or OSError; then there is no such file."""
    making = path.with_name(path.name + ".tmp")
    try:
        _write(base, new, making)
        compare(base, new, _pieces(making))
        flush(making)
        os.rename(making, path)
        flush(path.parent)
    finally:
        making.unlink(missing_ok=True)


def _write(base: Path, new: Path, making: Path) -> None:
    most = sum(path.stat().st_size for path in new.iterdir()) // 2
    with making.open("wb") as file:
        for piece in delta_between(base, new):
            file.write(piece)
            if file.tell() > most:
                raise PolicyError("it is over half of their size")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece


def describe_deltas(folder: RunFolder, version: int) -> tuple[Delta, ...]:
    """The deltas to a policy, for its manifest. Reads every byte of them."""
    found = []
    for path in delta_files(folder, version):
        named = _NAME.fullmatch(path.name)
        assert named is not None
        found.append(Delta(int(named[1]), bytes.fromhex(named[2]), DELTA_CODEC, tuple(blobs_of(path))))
    return tuple(found)


def delta_files(folder: RunFolder, version: int) -> list[Path]:
    """Their files, in the order of the manifest."""
    where = folder.deltas(version)
    return sorted(path for path in where.iterdir() if _NAME.fullmatch(path.name)) if where.is_dir() else []


def delta_path(folder: RunFolder, version: int, delta: Delta) -> Path:
    return folder.deltas(version) / _name(delta.base_version, delta.base_root)


def _name(base: int, root: bytes) -> str:
    return f"{version_name(base)}-{root.hex()}.ulpd1"
