"""A node's home on disk: identity, policies, blobs, unsent traces, what the trainer acknowledged.

    home/  key · address · lock · status.json
      runs/<run>/  blobs/         pieces of the policy being fetched, and deltas to those held, by digest
                   policies/      v<version>-<root>/, each whole and checked
                   leases/        leases not settled yet, by id
                   outbox/        signed traces without a receipt, by digest
                   refused/       the last traces a trainer refused on the spot
                   asked/         re-audits asked for by `rlnode reaudit` (reaudit.py)
                   receipts.log · verdicts.log · cursor

Every file appears whole under its name or not at all: written beside, flushed to the disk, renamed.
Not here: where blobs come from (weights.py), sending (session.py). A full disk is a StorageError that
says how much is missing; the caller waits and tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.config import NodeConfig
from protocol import codec, identity, limits
from protocol.envelope import Signed
from protocol.errors import DecodeError, KeyFileError, PolicyError, StorageError, UsageError
from protocol.lease import Lease
from protocol.messages import Timing
from protocol.outputs import cause, unwritable
from protocol.policy import Delta, Manifest, PolicyFile, policy_root
from protocol.policy_delta import fill
from protocol.run import RunAddress
from protocol.trace import Trace

_MANIFEST_NAME: Final = "manifest.msgpack"  # no suffix of a policy's file: not part of the root
UNFINISHED: Final = ".unfinished"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PieceMissing(PolicyError):
    """A policy cannot be put together now, and may be when it is offered again."""


# --- files that are whole or absent ---


@contextlib.contextmanager
def _named(what: str, path: Path, needed: int = 0) -> Iterator[None]:
    """Turns the system's errors into a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(
                f"the disk is full: {what} needs {size_text(needed) if needed else 'more space'} in {path}: free some"
            ) from error
        raise StorageError(
            f"{what} failed at {path}: {cause(error)}: look who may write there and how that disk is, or use another "
            "home with --home FOLDER"
        ) from error


def write_whole(path: Path, data: bytes, what: str, *, lasting: bool = True) -> None:
    """Write `data` to `path`, whole or not at all; `lasting`: also after a power cut. Raises StorageError."""
    # A name of this thread's own: two sources may give the same piece in the same moment.
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{UNFINISHED}")
    with _named(what, path, len(data)):
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        if lasting:
            _sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Its name goes first: a kill midway leaves nothing that looks whole. What cannot be removed stays."""
    aside = folder.with_name(f"{folder.name}.gone{UNFINISHED}")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(paths: Iterable[Path]) -> int:
    """Remove what a kill left half-written; how many there were."""
    found = list(paths)
    for path in found:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return len(found)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_text(count: int) -> str:
    """Bytes as a person reads them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def free_text(free: int, kept: int) -> str:
    """How much a disk has free, `kept` bytes of which are not for us: to be read after "the disk has"."""
    stay = f", and keeps {size_text(kept)} free for the rest of the machine" if kept else ""
    return f"{size_text(free)} free{stay}"


class Log:
    """Lines appended for ever, in two files of bounded size: the log and the one before it."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most = most_bytes
        self._is_torn = _ends_in_mid_line(path)  # by a kill

    def append(self, entry: dict[str, Any]) -> None:
        line = b"\n" * self._is_torn + json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with _named("writing the log", self._path, len(line)):
            if self._path.exists() and self._path.stat().st_size + len(line) > self._most:
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            with self._path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._is_torn = False


def _ends_in_mid_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    except OSError:
        return False


# --- the home ---


class Home:
    """A home folder held by this process alone. Use as a context manager.

    Raises UsageError where no home can be in that place, StorageError when another process holds it or the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def __enter__(self) -> Home:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise unwritable("this node's home (--home FOLDER)", self.folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            self._lock = None
            raise StorageError(
                f"another rlnode{f' (process {holder})' if holder else ''} uses {self.folder}: stop it, or give this "
                "one a home of its own with --home FOLDER (two nodes must not share an identity)"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        sweep(self.folder.glob(f"*{UNFINISHED}"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def run(self, run: bytes, config: NodeConfig) -> RunStore:
        """What this home holds of one run."""
        return RunStore(run_folder(self.folder, run), config)

    def load_or_make_identity(self) -> tuple[identity.Identity, bool]:
        """The node's key, made on the first use (then True). A key that is there and cannot be used is an
        error, never replaced. Raises KeyFileError."""
        path = key_path(self.folder)
        if path.exists() or path.is_symlink():
            return identity.load_identity(path), False
        if any((self.folder / "runs").glob("*/outbox/*.trace")):
            raise KeyFileError(
                f"{path} is gone, but this home holds traces signed with it: restore it with "
                "`rlnode key restore FILE`, or start afresh with another --home"
            )
        made = identity.Identity.generate()
        identity.save_identity(made, path)
        return made, True


def run_folder(home: Path, run: bytes) -> Path:
    return home / "runs" / run.hex()[:16]


def key_path(home: Path) -> Path:
    return home / "key"


def save_address(home: Path, address: RunAddress) -> None:
    write_whole(home / "address", f"{address}\n".encode(), "saving the address")


def load_address(home: Path) -> RunAddress | None:
    """The address saved by an earlier `rlnode join ADDRESS`. Raises UsageError when it is damaged."""
    path = home / "address"
    try:
        return RunAddress.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (UsageError, UnicodeDecodeError):
        raise UsageError(f"{path} is damaged: give the address again, rlnode join ADDRESS") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {cause(error)}") from error


def write_status(home: Path, status: dict[str, Any]) -> None:
    """For `rlnode status`. It is of the moment, so it need not last."""
    write_whole(home / "status.json", json.dumps(status).encode(), "writing the status", lasting=False)


def read_status(home: Path) -> dict[str, Any] | None:
    try:
        status = json.loads((home / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def lock_holder(home: Path) -> int | None:
    """The process that holds the home now, if any."""
    try:
        handle = os.open(home / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else -1
    finally:
        os.close(handle)
    return None


# --- one run ---


@dataclass(frozen=True, slots=True)
class HeldPolicy:
    """A policy on this disk, whole and checked when it was put there."""

    version: int
    root: bytes
    folder: Path
    manifest: Signed
    size: int  # bytes of its files
    deltas: frozenset[bytes]  # digests of the blobs of deltas that lead to it
    places: Mapping[bytes, tuple[str, int, int]]  # blob digest → file name, offset, length

    def is_intact(self) -> bool:
        """Whether its files still are what its root says. Reads all of them."""
        try:
            return policy_root(self.folder) == self.root
        except (PolicyError, OSError):
            return False

    def used_ns(self) -> int:
        """When it was last used: by the engine, or by another node that fetched from it."""
        try:
            return self.folder.stat().st_mtime_ns
        except OSError:
            return 0

    def touch(self) -> None:
        """It is used now."""
        with contextlib.suppress(OSError):
            os.utime(self.folder, ns=(time.time_ns(), time.time_ns()))  # finer than the system's own stamp


def _held(folder: Path, signed: Signed) -> HeldPolicy:
    manifest = codec.decode(Manifest, signed.payload)
    places: dict[bytes, tuple[str, int, int]] = {}
    for file in manifest.files:
        offset = 0
        for blob in file.blobs:
            places.setdefault(blob.digest, (file.name, offset, blob.length))
            offset += blob.length
    deltas = frozenset(blob.digest for delta in manifest.deltas for blob in delta.blobs)
    return HeldPolicy(manifest.version, manifest.root, folder, signed, manifest.size, deltas, places)


@dataclass(frozen=True, slots=True)
class Unsent:
    """A signed trace that has no receipt yet. `timing` is not on the disk: None once the node was started again."""

    digest: bytes
    lease_id: bytes
    slot: int
    policy_version: int
    timing: Timing | None = None


def half_written(folder: Path) -> Iterator[Path]:
    """What a kill left below a run's folder. Not its blobs: they are how a download goes on."""
    yield from folder.glob(f"*{UNFINISHED}")
    yield from folder.glob(f"*/*{UNFINISHED}")


def _disk_free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def folder_bytes(folder: Path) -> int:
    """Of all files below a folder."""
    total = 0
    for where, _, names in os.walk(folder):  # which passes over folders that another task has just removed
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def read_held(folder: Path) -> HeldPolicy | None:
    """The policy in a folder of that name; None: not one of ours, or damaged."""
    try:
        return _held(folder, codec.decode(Signed, (folder / _MANIFEST_NAME).read_bytes()))
    except (OSError, DecodeError):
        return None


def read_leases(folder: Path) -> tuple[Lease, ...]:
    """The leases below a run's folder that are not settled."""
    found = []
    for path in sorted((folder / "leases").glob("*.lease")):
        with contextlib.suppress(OSError, DecodeError):
            found.append(codec.decode(Lease, codec.decode(Signed, path.read_bytes()).payload))
    return tuple(found)


def read_unsent(folder: Path) -> dict[bytes, int]:
    """Digest → policy version of the traces below a run's folder that are not sent."""
    found = {}
    for path in sorted((folder / "outbox").glob("*.trace")):
        with contextlib.suppress(OSError, DecodeError):
            signed = codec.decode(Signed, path.read_bytes())
            found[signed.digest] = codec.decode(Trace, signed.payload, most=limits.MAX_TRACE_BYTES).policy_version
    return found


class RunStore:
    """What a home holds of one run. `free_bytes` tells what the file system has left (tests give their own)."""

    def __init__(self, folder: Path, config: NodeConfig, free_bytes: Callable[[Path], int] = _disk_free) -> None:
        self.folder = folder
        self._config = config
        self._free_bytes = free_bytes
        self._blobs = folder / "blobs"
        self._policies = folder / "policies"
        self._leases = folder / "leases"
        self._outbox = folder / "outbox"
        self._refused = folder / "refused"
        with _named("opening the home folder", folder):
            for each in (self._blobs, self._policies, self._leases, self._outbox, self._refused):
                each.mkdir(parents=True, exist_ok=True)
            sweep(half_written(folder))
        self._receipts = Log(folder / "receipts.log", config.log_bytes)
        self._verdicts = Log(folder / "verdicts.log", config.log_bytes)
        # Methods run in threads, readers may be in the middle of a loop: these two are replaced, never changed. Who
        # looks twice may find two of them.
        self._changing = threading.Lock()
        self._in_use: frozenset[int] = frozenset()
        self.pinned: frozenset[int] = frozenset()  # versions that a delta is being applied to
        self.unsent: Mapping[bytes, Unsent] = self._read_outbox()
        self.held: Mapping[int, HeldPolicy] = self._read_policies()

    # --- space ---

    def make_room(self, needed: int, what: str) -> None:
        """Give up the policies used least recently, as far as that lets `needed` more bytes fit.

        Raises StorageError, with nothing given up, when it does not.
        """
        spare = self._spare()
        if self._short(needed) > 0 and self._short(needed) <= sum(held.size for held in spare):
            for held in spare:
                self._drop_policies([held.version])
                if self._short(needed) <= 0:
                    break
        self.check_space(needed, what)

    def _short(self, needed: int) -> int:
        """By how many bytes `needed` more do not fit; 0 or less: they do."""
        short = needed - (self._free_bytes(self.folder) - self._config.disk_reserve_bytes)
        if self._config.disk_bytes is not None:
            short = max(short, needed - (self._config.disk_bytes - self.used_bytes()))
        return short

    def _spare(self) -> list[HeldPolicy]:
        """Those that nothing needs, the one used least recently first."""
        stay = {self.highest_version, *self.needed_versions()}
        spare = [held for held in self.held.values() if held.version not in stay]
        return sorted(spare, key=lambda held: held.used_ns())

    def needed_versions(self) -> frozenset[int]:
        """Of policies in use or being built on, leased, or drawn from by a trace that is not sent."""
        unsent = (each.policy_version for each in self.unsent.values())
        leased = (lease.policy_version for lease in self.leases())
        return frozenset({*self._in_use, *self.pinned, *unsent, *leased})

    def check_space(self, needed: int, what: str) -> None:
        """Raise StorageError unless `needed` more bytes fit the disk and the budget."""
        free, kept = self._free_bytes(self.folder), self._config.disk_reserve_bytes
        if needed + kept > free:
            raise StorageError(
                f"{what} needs {size_text(needed)}, the disk of {self.folder} has {free_text(free, kept)}: "
                f"free {size_text(needed + kept - free)} more, or use another disk with --home FOLDER"
            )
        if self._config.disk_bytes is None:
            return
        left = self._config.disk_bytes - self.used_bytes()
        if needed > left:
            raise StorageError(
                f"{what} needs {size_text(needed)}, --disk leaves {size_text(max(0, left))}: raise it by "
                f"{size_text(needed - max(0, left))}"
            )

    def used_bytes(self) -> int:
        return folder_bytes(self.folder)

    # --- blobs ---

    def put_blob(self, digest: bytes, data: bytes) -> None:
        """Store bytes that hash to `digest` (the caller's check is repeated: nothing unverified is stored).

        Raises ValueError when they do not, StorageError.
        """
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("these bytes are not the blob that was asked for")
        write_whole(self._blobs / digest.hex(), data, "storing a piece of the policy")

    def read_blob(self, digest: bytes) -> bytes | None:
        """A blob that lies here, by itself or inside a policy held; None when it is not here or is damaged."""
        path = self._blobs / digest.hex()
        if path.exists():
            data = path.read_bytes()
            if hashlib.sha256(data).digest() == digest:
                return data
            path.unlink()
        for held in self.held.values():
            if digest in held.places:
                name, offset, length = held.places[digest]
                data = _read_range(held.folder / name, offset, length)
                if hashlib.sha256(data).digest() == digest:
                    held.touch()
                    return data
        return None

    def has_blob(self, digest: bytes) -> bool:
        """Whether a blob lies here, by its name alone."""
        return (self._blobs / digest.hex()).exists() or any(digest in held.places for held in self.held.values())

    def drop_blobs(self) -> None:
        """Forget pieces that no download needs any more. Deltas to the policies held stay, for others."""
        names = {digest.hex() for held in self.held.values() for digest in held.deltas}
        for path in self._blobs.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    def drop_doubles(self, held: HeldPolicy) -> None:
        """Forget pieces that lie in the files of this policy too: a kill came before they were dropped."""
        for digest in held.places:
            (self._blobs / digest.hex()).unlink(missing_ok=True)

    # --- policies ---

    @property
    def highest_version(self) -> int:
        """The highest version that ever lay here whole, -1 for none."""
        return max(self.held, default=-1)

    def assemble(self, manifest: Manifest, signed: Signed) -> HeldPolicy:
        """Put the blobs of a manifest together.

        Raises PolicyError when they have another root (nothing is kept), PieceMissing, StorageError.
        """

        def fill_with_files(beside: Path) -> None:
            for file in manifest.files:
                self._write_file(beside / file.name, file)

        return self._make(manifest, signed, fill_with_files)

    def apply(
        self, manifest: Manifest, signed: Signed, delta: Delta, check_cancelled: Callable[[], None] = lambda: None
    ) -> HeldPolicy:
        """Make a policy from the one held that is the base of a delta to it.

        Raises PolicyError or DecodeError when that is not exactly the policy of the manifest (nothing is kept),
        PieceMissing, StorageError, and what check_cancelled raises.
        """
        base = self.held.get(delta.base_version)
        if base is None or base.root != delta.base_root:
            raise PieceMissing(f"policy {delta.base_version} is no longer here")

        def fill_from_base(beside: Path) -> None:
            for file in manifest.files:
                if not file.name.endswith(".safetensors"):
                    self._write_file(beside / file.name, file)
            fill(base.folder, beside, self._pieces(delta), manifest, check_cancelled)

        return self._make(manifest, signed, fill_from_base)

    def _pieces(self, delta: Delta) -> Iterator[bytes]:
        for blob in delta.blobs:
            data = self.read_blob(blob.digest)
            if data is None:
                raise PieceMissing(f"a piece of the delta from policy {delta.base_version} is gone from {self._blobs}")
            yield data

    def _make(self, manifest: Manifest, signed: Signed, fill_folder: Callable[[Path], None]) -> HeldPolicy:
        """Fill a folder beside, recompute the root, give the folder its name."""
        name = f"v{manifest.version:08d}-{manifest.root.hex()[:16]}"
        beside = self._policies / (name + UNFINISHED)
        with _named("putting the policy together", beside, manifest.size):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            try:
                fill_folder(beside)
                root = policy_root(beside)
                if root != manifest.root:
                    raise PolicyError(
                        f"policy {manifest.version} has the root {root.hex()[:16]}…, its manifest says "
                        f"{manifest.root.hex()[:16]}…: the trainer signed a manifest that does not fit its files"
                    )
            except BaseException:
                shutil.rmtree(beside, ignore_errors=True)
                raise
            write_whole(beside / _MANIFEST_NAME, codec.encode(signed), "storing the manifest")
            final = self._policies / name
            if final.exists():  # damaged, and could not be removed before
                remove_folder(final)
            os.rename(beside, final)
            _sync_folder(self._policies)
        held = _held(final, signed)
        with self._changing:
            self.held = {**self.held, held.version: held}
        return held

    def _write_file(self, path: Path, file: PolicyFile) -> None:
        with path.open("wb") as out:
            for blob in file.blobs:
                data = self.read_blob(blob.digest)
                if data is None:
                    raise PieceMissing(f"a piece of {file.name} is gone from {self._blobs}")
                out.write(data)
            out.flush()
            os.fsync(out.fileno())

    def _read_policies(self) -> dict[int, HeldPolicy]:
        found = {}
        for folder in self._policies.iterdir():
            held = read_held(folder)
            if held is None:
                remove_folder(folder)  # fetched again
            else:
                found[held.version] = held
        return found

    def check_held(self, version: int) -> HeldPolicy | None:
        """The policy, if it lies here and its files still are what its root says; else it is removed."""
        held = self.held.get(version)
        if held is None:
            return None
        if held.is_intact():
            return held
        self._drop_policies([version])
        return None

    def _drop_policies(self, versions: Iterable[int]) -> None:
        with self._changing:
            dropped = [self.held[version] for version in versions if version in self.held]
            self.held = {version: held for version, held in self.held.items() if held not in dropped}
        for held in dropped:
            remove_folder(held.folder)

    def prune(self, in_use: Iterable[int]) -> None:
        """Keep the last few versions and those that something needs."""
        self._in_use = frozenset(in_use)
        here = self.held
        for version in self._in_use & here.keys():
            here[version].touch()
        newest = sorted(here)[-self._config.keep_versions :]
        keep = {*newest, *self.needed_versions()}
        self._drop_policies([version for version in here if version not in keep])

    def drop_between(self, version: int) -> None:
        """Forget a policy that was only made to build the next one on, unless something needs it."""
        if version in self.held and version not in self.needed_versions():
            self._drop_policies([version])

    # --- leases that are not settled ---

    def save_lease(self, lease_id: bytes, signed: Signed) -> None:
        """So that a killed node can give it back. One lost in a power cut expires, so it need not last."""
        path = self._leases / f"{lease_id.hex()}.lease"
        write_whole(path, codec.encode(signed), "noting a lease", lasting=False)

    def drop_lease(self, lease_id: bytes) -> None:
        (self._leases / f"{lease_id.hex()}.lease").unlink(missing_ok=True)

    def leases(self) -> tuple[Lease, ...]:
        """Leases an earlier process took and did not settle."""
        return read_leases(self.folder)

    # --- traces on their way ---

    def put_trace(self, signed: Signed, trace: Trace, timing: Timing | None = None) -> Unsent:
        """Keep a signed trace until it has a receipt. On the disk when this returns."""
        digest = signed.digest
        write_whole(self._outbox / f"{digest.hex()}.trace", codec.encode(signed), "keeping a finished trace")
        unsent = Unsent(digest, trace.lease_id, trace.slot, trace.policy_version, timing)
        with self._changing:
            self.unsent = {**self.unsent, digest: unsent}
        return unsent

    def _forget_trace(self, digest: bytes) -> None:
        with self._changing:
            self.unsent = {each: unsent for each, unsent in self.unsent.items() if each != digest}

    def read_trace(self, digest: bytes) -> Signed:
        path = self._outbox / f"{digest.hex()}.trace"
        with _named("reading an unsent trace", path):
            return codec.decode(Signed, path.read_bytes())

    def _read_outbox(self) -> dict[bytes, Unsent]:
        found = {}
        for path in sorted(self._outbox.glob("*.trace"), key=lambda each: each.stat().st_mtime_ns):
            try:
                signed = codec.decode(Signed, path.read_bytes())
                trace = codec.decode(Trace, signed.payload, most=limits.MAX_TRACE_BYTES)
            except DecodeError:
                path.rename(self._refused / path.name)
                continue
            found[signed.digest] = Unsent(signed.digest, trace.lease_id, trace.slot, trace.policy_version)
        return found

    def settle(self, digest: bytes, receipt: Signed) -> None:
        """The trainer has the trace: note its receipt, then forget the trace."""
        unsent = self.unsent[digest]
        self._receipts.append(
            {
                "trace": digest.hex(),
                "lease": unsent.lease_id.hex(),
                "slot": unsent.slot,
                "receipt": codec.encode(receipt).hex(),
            }
        )
        (self._outbox / f"{digest.hex()}.trace").unlink(missing_ok=True)
        self._forget_trace(digest)

    def refuse(self, digest: bytes) -> None:
        """The trainer refused the trace on the spot: keep it for an appeal, the oldest make room."""
        source = self._outbox / f"{digest.hex()}.trace"
        with _named("keeping a refused trace", self._refused):
            if source.exists():
                os.replace(source, self._refused / source.name)
            kept = sorted(self._refused.iterdir(), key=lambda each: each.stat().st_mtime_ns)
            for path in kept[: max(0, len(kept) - self._config.keep_refused)]:
                path.unlink(missing_ok=True)
        self._forget_trace(digest)

    # --- verdicts ---

    @property
    def verdict_cursor(self) -> int:
        """Up to where the trainer's verdicts have been noted."""
        try:
            return int((self.folder / "cursor").read_text())
        except (OSError, ValueError):
            return 0

    def note_verdicts(self, verdicts: Iterable[tuple[dict[str, Any], Signed]], cursor: int) -> None:
        """Append verdicts to the log, then move the cursor: after a kill one may be noted twice, none is lost."""
        for summary, signed in verdicts:
            self._verdicts.append({**summary, "verdict": codec.encode(signed).hex()})
        write_whole(self.folder / "cursor", str(cursor).encode(), "noting how far the verdicts were read")


def _read_range(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError:
        return b""
