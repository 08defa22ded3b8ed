"""Policies from a signed manifest to a checked folder: find what is missing, fetch it, put it together.

Nothing is stored before its digest is checked, and no folder gets its name before its root is. A kill at any
point costs at most the blobs in flight. Not here: the folder and the disk (store.py), who is asked for which blob
(swarm.py), loading into an engine (worker.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

from node.failures import foremost
from node.report import Event, Level, Report, Status
from node.store import HeldPolicy, PieceMissing, RunStore, size_text
from node.swarm import Progress, Swarm
from protocol.envelope import Signed, unseal
from protocol.errors import Code, PolicyError, RemoteError, StorageError
from protocol.policy import Blob, Manifest, check_manifest

T = TypeVar("T")

_STORAGE_RETRY_SECONDS: Final = 5.0
_STORAGE_TRIES_PER_WORD: Final = 12  # a minute
_WORTH_TELLING_SECONDS: Final = 2.0  # small policies come every second or two


async def keep_trying(report: Report, who: str, store: Callable[..., T], *arguments: Any) -> T:
    """Wait for a disk that has no room instead of losing what is to be stored. Says so now and then."""
    tries = 0
    while True:
        try:
            return await trio.to_thread.run_sync(store, *arguments)
        except StorageError as error:
            if tries % _STORAGE_TRIES_PER_WORD == 0:
                report(Event("storage", f"{error} ({who} waits for it)", Level.ERROR))
            tries += 1
            await trio.sleep(_STORAGE_RETRY_SECONDS)


def missing_blobs(manifest: Manifest, store: RunStore) -> tuple[Blob, ...]:
    """The distinct pieces that do not lie here, whole, already. Reads and hashes what does."""
    distinct = {blob.digest: blob for file in manifest.files for blob in file.blobs}
    return tuple(blob for digest, blob in distinct.items() if store.read_blob(digest) is None)


class PolicyFollower:
    """Keeps the newest policy on the disk. `offer` is called with each manifest the trainer shows."""

    def __init__(
        self,
        run: bytes,
        trainer: bytes,
        store: RunStore,
        swarm: Swarm,
        ready: Callable[[HeldPolicy], None],
        report: Report,
        status: Status,
        *,
        piece_here: Callable[[bytes], None] = lambda digest: None,
    ) -> None:
        """`ready` is told of each policy that is here, `piece_here` of each piece."""
        self._run = run
        self._trainer = trainer
        self._store = store
        self._swarm = swarm
        self._ready = ready
        self._report = report
        self._status = status
        self._piece_here = piece_here
        self._wanted: tuple[Manifest, Signed] | None = None
        self._changed = trio.Event()
        self._ready_version = -1  # of the newest policy handed on
        self.highest = store.highest_version  # seen, whether or not it is here

    def offer(self, signed: Signed, *, heard_from: str = "the trainer", now_ms: int | None = None) -> None:
        """Follow this manifest if it is newer than all before. Raises RemoteError when it is not one.

        `now_ms`: given for one that comes from anyone but the trainer, who may sit on old ones.
        """
        manifest = unseal(Manifest, signed, signer=self._trainer)
        if manifest.run != self._run:
            raise RemoteError(Code.WRONG_RUN, f"{heard_from} sent a manifest of another run")
        # SPEC 8.3.4: a manifest that comes from anyone but the trainer MUST be ignored after expires_ms.
        if now_ms is not None and manifest.expires_ms <= now_ms:
            raise RemoteError(Code.NOT_FOUND, f"the manifest of policy {manifest.version} has expired")
        # SPEC 8.3.4: checked before a byte is fetched; versions only go up.
        check_manifest(manifest)
        held = self._store.held.get(manifest.version)
        if held is not None and held.root != manifest.root:
            raise RemoteError(Code.MALFORMED, f"the trainer signed two policies as version {manifest.version}")
        if manifest.version <= self._ready_version or manifest.version < self.highest:
            return
        if manifest.version == self.highest and held is None:
            return  # it is being fetched, or cannot be had
        self.highest = manifest.version
        self._status.latest_version = manifest.version
        self._wanted = (manifest, signed)
        self._changed.set()

    @property
    def latest(self) -> int | None:
        """The highest version seen, None before the first."""
        return None if self.highest < 0 else self.highest

    async def run(self) -> None:
        """Fetch the newest, for ever. What cannot be had is said and left for the next version."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            assert self._wanted is not None
            manifest, signed = self._wanted
            try:
                held = await self._have(manifest, signed)
            except PolicyError as error:
                self._report(Event("policy_failed", f"{error}; waiting for the next", Level.ERROR))
                if isinstance(error, PieceMissing):
                    self.highest = self._store.highest_version  # the same one may be offered again
                continue
            self._ready_version = held.version
            self._ready(held)

    async def _have(self, manifest: Manifest, signed: Signed) -> HeldPolicy:
        """The policy of this manifest on the disk, whole and checked."""
        held = await trio.to_thread.run_sync(self._store.check_held, manifest.version)
        if held is not None:
            return held
        missing = await trio.to_thread.run_sync(missing_blobs, manifest, self._store)
        # The pieces and the folder made of them lie side by side for a moment.
        needed = sum(blob.length for blob in missing) + manifest.size
        name = f"policy {manifest.version}"
        await keep_trying(self._report, "the download", self._store.check_space, needed, name)
        began = trio.current_time()
        try:
            progress = await self._fetch(missing, name)
            held = await keep_trying(self._report, "the policy", self._store.assemble, manifest, signed)
        finally:
            self._status.download, self._status.downloading = "", {}
        await trio.to_thread.run_sync(self._store.drop_blobs)
        self._say_done(manifest, progress, trio.current_time() - began)
        return held

    async def _fetch(self, wanted: tuple[Blob, ...], name: str) -> Progress:
        """Have every one of these pieces in the store."""
        with foremost():
            return await self._swarm.fetch(wanted, self._keep, name, self._show)

    async def _keep(self, blob: Blob, data: bytes) -> None:
        await keep_trying(self._report, "the download", self._store.put_blob, blob.digest, data)
        self._piece_here(blob.digest)

    def _show(self, progress: Progress) -> None:
        self._status.download, self._status.downloading = progress.text(), progress.values()

    def _say_done(self, manifest: Manifest, progress: Progress, seconds: float) -> None:
        fetched = progress.total
        text = (
            f"policy {manifest.version} is here: fetched {size_text(fetched)} of {size_text(manifest.size)} in "
            f"{seconds:.1f} s ({size_text(int(fetched / max(seconds, 0.001)))}/s) from {progress.sources()}"
        )
        values = {
            "version": manifest.version,
            "root": manifest.root.hex(),
            "bytes": fetched,
            "seconds": seconds,
            "bytes_by_source": dict(progress.given),
        }
        level = Level.INFO if seconds > _WORTH_TELLING_SECONDS else Level.DETAIL
        self._report(Event("policy_fetched", text, level, values))
