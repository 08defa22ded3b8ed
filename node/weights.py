"""Policies from a signed manifest to a checked folder: find what is missing, fetch it, put it together.

Nothing is stored before its digest is checked, and no folder gets its name before its root is. A kill at any
point costs at most the blobs in flight. Not here: the folder and the disk (store.py), who else has blobs (a
BlobSource decides), loading into an engine (worker.py).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol, TypeVar

import trio

from node.config import NodeConfig
from node.failures import foremost
from node.report import Event, Level, Report, Status
from node.store import HeldPolicy, PieceMissing, RunStore, size_text
from protocol import messages
from protocol.envelope import Signed, unseal
from protocol.errors import Code, NetError, PolicyError, RemoteError, StorageError
from protocol.identity import peer_id
from protocol.net.backoff import backoff
from protocol.net.base import Host
from protocol.net.session import Session
from protocol.policy import Blob, Manifest, check_manifest

T = TypeVar("T")

_STORAGE_RETRY_SECONDS: Final = 5.0
_STORAGE_TRIES_PER_WORD: Final = 12  # a minute
_WORTH_TELLING_SECONDS: Final = 2.0  # small policies come every second or two
_NOT_FOUND_TRIES: Final = 3  # then the policy is gone from the source: a newer one is out


class BlobSource(Protocol):
    """Where pieces of a policy come from."""

    @property
    def name(self) -> str:
        """Who is to blame, for a person."""

    async def fetch(self, digest: bytes) -> bytes:
        """The bytes it has for this digest, not checked. Raises NetError or RemoteError; has a deadline."""


class PeerBlobs:
    """The blobs of one peer over one long-lived session, opened when first needed and again after a fault."""

    def __init__(self, nursery: trio.Nursery, host: Host, address: str, node: bytes, config: NodeConfig) -> None:
        self._nursery = nursery
        self._host = host
        self._address = address
        self._config = config
        self._session: Session | None = None
        self._opening = trio.Lock()
        self.name = peer_id(node)

    async def fetch(self, digest: bytes) -> bytes:
        session = await self._open()
        body = messages.pack(messages.GetBlob(digest))
        what = f"fetching a piece of the policy from {self.name}"
        try:
            reply = await session.request(body, seconds=self._config.blob_seconds, what=what)
        except NetError:
            await self._drop(session)
            raise
        return messages.expect(messages.BlobReply, reply).data

    async def _open(self) -> Session:
        async with self._opening:
            if self._session is None:
                stream = await self._host.open(self._address, messages.BLOB_PROTOCOL, seconds=self._config.dial_seconds)
                self._session = Session(stream)
                self._nursery.start_soon(self._run, self._session)
            return self._session

    async def _run(self, session: Session) -> None:
        with contextlib.suppress(NetError, RemoteError):  # whoever waits on a request is told
            await session.run(_refuse_request, _ignore_notice)
        await self._drop(session)

    async def _drop(self, session: Session) -> None:
        if self._session is session:
            self._session = None
            await session.close()


async def _refuse_request(body: bytes) -> bytes:
    raise RemoteError(Code.UNEXPECTED_MESSAGE, "this node answers no requests here")


async def _ignore_notice(body: bytes) -> None:
    pass


class _Fetch:
    """One download: the pieces still missing, and how it goes."""

    def __init__(
        self,
        manifest: Manifest,
        missing: tuple[Blob, ...],
        store: RunStore,
        source: BlobSource,
        report: Report,
        status: Status,
        random: Random,
    ) -> None:
        self._manifest = manifest
        self._missing = deque(missing)
        self._total = sum(blob.length for blob in missing)
        self._done = 0
        self._began = trio.current_time()
        self._store = store
        self._source = source
        self._report = report
        self._status = status
        self._random = random

    async def pull(self) -> None:
        """Fetch pieces until none is left; several of these run at once."""
        while self._missing:
            blob = self._missing.popleft()
            data = await self._fetch(blob)
            await keep_trying(self._report, "the download", self._store.put_blob, blob.digest, data)
            self._done += blob.length
            self._status.download = self._progress()

    async def _fetch(self, blob: Blob) -> bytes:
        """The checked bytes of a piece. Tries until it has them; raises PieceMissing when nobody has them."""
        delays = backoff(self._random)
        absent = 0
        while True:
            try:
                data = await self._source.fetch(blob.digest)
            except NetError as error:
                self._say("blob_late", str(error))
            except RemoteError as error:
                absent += error.code == Code.NOT_FOUND
                if absent >= _NOT_FOUND_TRIES:
                    raise PieceMissing(f"{self._source.name} no longer has policy {self._manifest.version}") from error
                self._say("blob_refused", f"{self._source.name}: {error}")
            else:
                if await trio.to_thread.run_sync(_digest, data) == blob.digest:
                    return data
                self._say(
                    "blob_wrong",
                    f"{self._source.name} sent wrong bytes for a piece of policy {self._manifest.version}: "
                    "dropped, asked again",
                    peer=self._source.name,
                )
            await trio.sleep(next(delays))

    def _progress(self) -> str:
        rate = self._done / max(0.001, trio.current_time() - self._began)
        return (
            f"policy {self._manifest.version}: {size_text(self._done)} of {size_text(self._total)}, "
            f"{size_text(int(rate))}/s"
        )

    def _say(self, name: str, text: str, **values: Any) -> None:
        self._report(Event(name, text, Level.WARNING, values))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


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
        config: NodeConfig,
        store: RunStore,
        source: BlobSource,
        ready: Callable[[HeldPolicy], None],
        report: Report,
        status: Status,
        random: Random,
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._config = config
        self._store = store
        self._source = source
        self._ready = ready
        self._report = report
        self._status = status
        self._random = random
        self._wanted: tuple[Manifest, Signed] | None = None
        self._changed = trio.Event()
        self._ready_version = -1  # of the newest policy handed on
        self.highest = store.highest_version  # seen, whether or not it is here

    def offer(self, signed: Signed) -> None:
        """Follow this manifest if it is newer than all before. Raises RemoteError when it is not one.

        Its expiry is for those who have it from elsewhere; this one comes from the trainer, just now.
        """
        manifest = unseal(Manifest, signed, signer=self._trainer)
        if manifest.run != self._run:
            raise RemoteError(Code.WRONG_RUN, "the trainer sent a manifest of another run")
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
        fetch = _Fetch(manifest, missing, self._store, self._source, self._report, self._status, self._random)
        began = trio.current_time()
        await self._pull_all(fetch, min(self._config.blobs_in_flight, len(missing)))
        held = await keep_trying(self._report, "the policy", self._store.assemble, manifest, signed)
        await trio.to_thread.run_sync(self._store.drop_blobs)
        self._status.download = ""
        self._say_done(manifest, missing, trio.current_time() - began)
        return held

    async def _pull_all(self, fetch: _Fetch, at_once: int) -> None:
        with foremost():
            async with trio.open_nursery() as nursery:
                for _ in range(at_once):
                    nursery.start_soon(fetch.pull)

    def _say_done(self, manifest: Manifest, missing: tuple[Blob, ...], seconds: float) -> None:
        fetched = sum(blob.length for blob in missing)
        text = (
            f"policy {manifest.version} is here: fetched {size_text(fetched)} of {size_text(manifest.size)} in "
            f"{seconds:.1f} s ({size_text(int(fetched / max(seconds, 0.001)))}/s)"
        )
        values = {"version": manifest.version, "root": manifest.root.hex(), "bytes": fetched, "seconds": seconds}
        level = Level.INFO if seconds > _WORTH_TELLING_SECONDS else Level.DETAIL
        self._report(Event("policy_fetched", text, level, values))
