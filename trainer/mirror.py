"""Writes the published policies as static files that any web server or CDN can hand out (SPEC 9.6).

    DIR/blobs/ab/abcdef…          a piece of a policy, under its digest
    DIR/manifests/000012.msgpack  the signed manifest of a version
    DIR/latest.msgpack            the newest of them, written last

May run while the run is served, and again: what lies there is not written twice, what the run keeps no more is removed.
Needs no key: the gateway signed. Not here: fetching (node/mirror.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import PolicyError, UsageError
from protocol.outputs import replace, unwritable
from protocol.policy import Manifest, blobs_in, version_name
from trainer.ledger import Ledger
from trainer.rundir import Run
from trainer.shelf import Shelf, read_blob

_RUN_NAME = "run"  # tells whose mirror the folder is


@dataclass(frozen=True, slots=True)
class Mirrored:
    """`versions` lie there now, the newest is `latest`; `written` and `removed` are blobs."""

    versions: int
    latest: int
    written: int
    removed: int


def write_mirror(run: Run, ledger: Ledger, out: Path) -> Mirrored:
    """Bring the mirror in `out` up to date. Raises UsageError for a folder of something else, StorageError,
    PolicyError when nothing is published yet."""
    try:
        return _write_mirror(run, ledger, out)
    except OSError as error:
        raise unwritable("the mirror", out, error) from None


def _write_mirror(run: Run, ledger: Ledger, out: Path) -> Mirrored:
    _claim(run, out)
    published = dict(_published(run, ledger))
    if not published:
        raise PolicyError("no policy is signed yet: start `rltrainer serve` once")
    shelf, kept, written = Shelf(run.folder), set[bytes](), 0
    for version, signed in sorted(published.items()):
        manifest = codec.decode(Manifest, signed.payload)
        shelf.put(signed, manifest)
        digests = set(blobs_in(manifest))
        try:
            written += sum(_write_blob(shelf, digest, out) for digest in digests)
        except PolicyError:
            if run.folder.policy(version).is_dir():
                raise
            del published[version]  # the learner removed it meanwhile
            continue
        kept |= digests
        replace(out / "manifests" / f"{version_name(version)}.msgpack", codec.encode(signed))
    latest = max(published)
    replace(out / "latest.msgpack", codec.encode(published[latest]))
    return Mirrored(len(published), latest, written, _remove_old(out, set(published), kept))


def _claim(run: Run, out: Path) -> None:
    """Make the folder, or see that it is this run's: what is old in it is removed."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: give --mirror the folder to write to")
    if out.is_dir() and any(out.iterdir()):
        try:
            theirs = (out / _RUN_NAME).read_text(encoding="ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            raise UsageError(f"{out} holds other things: give --mirror an empty folder, or one it wrote") from None
        if theirs != run.run.hex():
            raise UsageError(f"{out} is the mirror of another run, {theirs[:16]}…: choose another folder")
    for name in ("blobs", "manifests"):
        (out / name).mkdir(parents=True, exist_ok=True)
    (out / _RUN_NAME).write_text(run.run.hex() + "\n", encoding="ascii")


def _published(run: Run, ledger: Ledger) -> Iterator[tuple[int, Signed]]:
    for version in run.folder.versions():
        found = ledger.policy(version)
        if found is not None and found[2] is not None:
            yield version, codec.decode(Signed, found[2])


def _write_blob(shelf: Shelf, digest: bytes, out: Path) -> bool:
    name = digest.hex()
    path = out / "blobs" / name[:2] / name
    if path.exists():
        return False
    place = shelf.blob(digest)
    assert place is not None
    path.parent.mkdir(exist_ok=True)
    replace(path, read_blob(place))
    return True


def _remove_old(out: Path, versions: set[int], kept: set[bytes]) -> int:
    for path in (out / "manifests").glob("*.msgpack"):
        if int(path.stem) not in versions:
            path.unlink()
    old = [path for path in (out / "blobs").glob("*/*") if not path.name.startswith(".") and _digest(path) not in kept]
    for path in old:
        path.unlink()
    return len(old)


def _digest(path: Path) -> bytes:
    return bytes.fromhex(path.name)
