"""What lies in a home, for `rlnode store`; also while a node runs in it, which is then not disturbed.

    look     the policies, what each is kept for, and the rest by size
    verify   every policy's root and every piece's digest, computed again
    collect  gives up what nothing needs

Not here: how a running node keeps within its budget (store.py), printing (cli.py).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from node.store import (
    UNFINISHED,
    HeldPolicy,
    Home,
    folder_bytes,
    half_written,
    lock_holder,
    read_held,
    read_leases,
    read_status,
    read_unsent,
    remove_folder,
    sweep,
)

# What a running node may turn to next; see keep_versions in config.py.
_KEPT_WHILE_RUNNING: Final = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """A policy on the disk, and why it must stay; no reason: it may go."""

    version: int
    root: str
    bytes: int
    reasons: tuple[str, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class Holding:
    """What a home holds of one run; sizes in bytes. `pieces`: of downloads that are not finished, and of deltas."""

    run: str  # first 16 digits of its id
    policies: tuple[Kept, ...]
    pieces: int
    piece_bytes: int
    unsent_traces: int
    leases: int
    bytes: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Damage:
    path: str
    what: str


def run_folders(home: Path) -> list[Path]:
    where = home / "runs"
    return sorted(path for path in where.iterdir() if path.is_dir()) if where.is_dir() else []


def _held(folder: Path) -> list[HeldPolicy]:
    paths = sorted((folder / "policies").glob("v*"))
    found = [read_held(path) for path in paths if not path.name.endswith(UNFINISHED)]
    return [held for held in found if held is not None]


def _pieces(folder: Path) -> list[Path]:
    where = folder / "blobs"
    return sorted(path for path in where.iterdir() if not path.name.endswith(UNFINISHED)) if where.is_dir() else []


def _size(path: Path) -> int | None:
    """None: a running node has just removed it."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _in_engine(home: Path, folder: Path) -> int | None:
    """The version in the engine of a node that runs here, if it works for this run."""
    status = read_status(home) or {}
    if not str(status.get("run", "")).startswith(folder.name):
        return None
    version = status.get("policy_version")
    return version if isinstance(version, int) else None


def look(home: Path) -> list[Holding]:
    running = lock_holder(home) is not None
    return [_holding(home, folder, running=running) for folder in run_folders(home)]


def _holding(home: Path, folder: Path, *, running: bool) -> Holding:
    held, unsent, leases = _held(folder), read_unsent(folder), read_leases(folder)
    pieces = [size for path in _pieces(folder) if (size := _size(path)) is not None]
    newest = [each.version for each in held[-(_KEPT_WHILE_RUNNING if running else 1) :]]
    in_engine = _in_engine(home, folder) if running else None
    traces, leased = Counter(unsent.values()), Counter(lease.policy_version for lease in leases)
    kept = []
    for each in held:
        reasons = [
            *(["newest"] if each.version in newest[-1:] else []),
            *([f"one of the newest {len(newest)}, for the running node"] if each.version in newest[:-1] else []),
            *(["in the engine"] if each.version == in_engine else []),
            *([f"{traces[each.version]} unsent traces"] if traces[each.version] else []),
            *([f"{leased[each.version]} leases"] if leased[each.version] else []),
        ]
        kept.append(Kept(each.version, each.root.hex(), folder_bytes(each.folder), tuple(reasons), str(each.folder)))
    return Holding(
        run=folder.name,
        policies=tuple(kept),
        pieces=len(pieces),
        piece_bytes=sum(pieces),
        unsent_traces=len(unsent),
        leases=len(leases),
        bytes=folder_bytes(folder),
    )


def verify(home: Path) -> Iterator[Damage]:
    """Reads and hashes everything; yields what is not what its name says."""
    for folder in run_folders(home):
        for held in _held(folder):
            # A running node may just have removed it, its name first.
            if not held.is_intact() and held.folder.exists():
                yield Damage(str(held.folder), f"policy {held.version} is not what was signed")
        for path in _pieces(folder):
            with contextlib.suppress(FileNotFoundError):  # a running node may just have removed it
                if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                    yield Damage(str(path), "the piece is not what its name says")


def collect(home: Path) -> tuple[list[str], int]:
    """Give up what nothing needs; what, and how many bytes that was.

    Beside a running node these are old policies alone: the newest, those in its engine, leased, or drawn from by a
    trace that is not sent, stay, and so does what it is fetching. Raises StorageError.
    """
    if lock_holder(home) is not None:
        return _collect(home, running=True)
    with Home(home):  # no node starts meanwhile
        return _collect(home, running=False)


def _collect(home: Path, *, running: bool) -> tuple[list[str], int]:
    gone, freed = [], 0
    for folder in run_folders(home):
        before = folder_bytes(folder)
        for kept in _holding(home, folder, running=running).policies:
            if not kept.reasons:
                remove_folder(Path(kept.folder))
                gone.append(f"policy {kept.version}")
        if not running:
            gone += _sweep(folder)
        freed += max(0, before - folder_bytes(folder))
    return gone, freed


def _sweep(folder: Path) -> list[str]:
    """What is half-written, and pieces that lead to no policy here."""
    needed = {digest.hex() for held in _held(folder) for digest in held.deltas}
    old = [path for path in _pieces(folder) if path.name not in needed]
    for path in old:
        path.unlink(missing_ok=True)
    half = sweep(half_written(folder))
    return [*([f"{len(old)} pieces"] if old else []), *([f"{half} half-written files"] if half else [])]
