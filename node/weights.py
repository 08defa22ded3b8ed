"""Policies from a signed manifest to a checked folder: by the way of fewest bytes, fetched and put together.

Nothing is stored before its digest is checked, and no folder gets its name before its root is. A kill at any
point costs at most the blobs in flight. A delta that does not make exactly what the trainer signed is said, not tried
again, and gone around, in the end by the files themselves. Not here: which way that is (route.py), the folder and the
disk (store.py), who is asked for which blob (swarm.py), loading into an engine (worker.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import trio

from node.failures import foremost
from node.report import Event, Level, Report, Status
from node.route import Leg, Route, cheapest
from node.sources import Source
from node.store import HeldPolicy, PieceMissing, RunStore, size_text
from node.swarm import Progress, Swarm
from protocol.envelope import Signed, unseal
from protocol.errors import Code, DecodeError, NetError, PolicyError, RemoteError, StorageError
from protocol.policy import Blob, Manifest, check_manifest

T = TypeVar("T")

_STORAGE_RETRY_SECONDS: Final = 5.0
_STORAGE_TRIES_PER_WORD: Final = 12  # a minute
_WORTH_TELLING_SECONDS: Final = 2.0  # small policies come every second or two
_ASKED: Final = 4  # other sources, for a manifest that the trainer cannot give
# Without a byte of a delta for so long, and as long as its largest piece takes on a slow line, the files are fetched:
# of nodes that are there while the trainer is away, some may have these alone.
_STALLED_SECONDS: Final = 20.0
_SLOW_LINE: Final = 35_000  # bytes a second


async def keep_trying(report: Report, who: str, store: Callable[..., T], *arguments: Any) -> T:
    """Wait for a disk that has no room instead of losing what is to be stored. Says so now and then."""
    tries = 0
    try:
        while True:
            try:
                return await trio.to_thread.run_sync(store, *arguments)
            except StorageError as error:
                if tries % _STORAGE_TRIES_PER_WORD == 0:
                    report(Event("storage", f"{error} ({who} waits for it)", Level.ERROR, {"who": who}))
                tries += 1
                await trio.sleep(_STORAGE_RETRY_SECONDS)
    finally:
        if tries:
            report(Event("storage_over", f"{who} waits for the disk no more", Level.INFO, {"who": who}))


def file_blobs(manifest: Manifest) -> dict[bytes, Blob]:
    """The pieces of a policy's files, by digest."""
    return {blob.digest: blob for file in manifest.files for blob in file.blobs}


def missing_blobs(blobs: Iterable[Blob], store: RunStore) -> tuple[Blob, ...]:
    """Those that do not lie here, whole, already. Reads and hashes what does."""
    return tuple(blob for blob in blobs if store.read_blob(blob.digest) is None)


def _forked(manifest: Manifest, held: HeldPolicy, highest: int) -> str:
    return (
        f"the trainer signed two policies as version {manifest.version}: {held.root.hex()[:8]}…, which this node has, "
        f"and now {manifest.root.hex()[:8]}…: its run was restored from an older copy as if nothing had been published "
        f"since. Its operator restores it again, `rltrainer restore BACKUP RUN --published {highest}`; this node goes "
        "on then"
    )


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
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        stalled_seconds: float = _STALLED_SECONDS,
    ) -> None:
        """`ready` is told of each policy that is here, `piece_here` of each piece. `now_ms`: the trainer's time."""
        self._run = run
        self._trainer = trainer
        self._store = store
        self._swarm = swarm
        self._ready = ready
        self._report = report
        self._status = status
        self._piece_here = piece_here
        self._now_ms = now_ms
        self.on_newer: Callable[[Signed], None] = lambda signed: None  # told of each manifest that is followed
        self._stalled_seconds = stalled_seconds
        self._download = trio.CancelScope()  # of deltas
        self._patience = math.inf
        self._going: Progress | None = None  # of the download that is running
        self._wanted: tuple[Manifest, Signed] | None = None
        self._changed = trio.Event()
        self._ready_version = -1  # of the newest policy handed on
        self.highest = store.highest_version  # seen, whether or not it is here

    def offer(self, signed: Signed, *, heard_from: str = "the trainer", now_ms: int | None = None) -> None:
        """Follow this manifest if it is newer than all before. Raises RemoteError when it is not one.

        `now_ms`: given for one that comes from anyone but the trainer, who may sit on old ones.
        """
        manifest = self._checked(signed, heard_from, now_ms)
        # SPEC 8.3.4: versions only go up.
        held = self._store.held.get(manifest.version)
        if held is not None and held.root != manifest.root:
            raise RemoteError(Code.MALFORMED, _forked(manifest, held, max(self.highest, manifest.version)))
        if manifest.version <= self._ready_version or manifest.version < self.highest:
            return
        if manifest.version == self.highest and held is None:
            return  # it is being fetched, or cannot be had
        self.highest = manifest.version
        self._status.latest_version = manifest.version
        self._wanted = (manifest, signed)
        self._changed.set()
        self.on_newer(signed)

    def _checked(self, signed: Signed, heard_from: str, now_ms: int | None) -> Manifest:
        """A manifest of this run's trainer. Raises RemoteError."""
        manifest = unseal(Manifest, signed, signer=self._trainer)
        if manifest.run != self._run:
            raise RemoteError(Code.WRONG_RUN, f"{heard_from} sent a manifest of another run")
        # SPEC 8.3.4: a manifest that comes from anyone but the trainer MUST be ignored after expires_ms.
        if now_ms is not None and manifest.expires_ms <= now_ms:
            raise RemoteError(Code.NOT_FOUND, f"the manifest of policy {manifest.version} has expired")
        # SPEC 8.3.4: checked before a byte is fetched.
        check_manifest(manifest)
        return manifest

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
            await trio.to_thread.run_sync(self._store.drop_doubles, held)
            return held
        return await self._go(manifest, signed)

    # --- by the cheapest route ---

    async def _go(self, manifest: Manifest, signed: Signed) -> HeldPolicy:
        """Fetch by deltas as long as they work and are less to fetch, else the files."""
        refused: set[tuple[int, int]] = set()
        known = {manifest.version: (manifest, signed)}
        while True:
            route = await self._route(manifest, known, refused)
            if not route.legs:
                return await self._fetch_files(manifest, signed)
            refused |= await self._follow(route, known)
            held = self._store.held.get(manifest.version)
            if held is not None:
                return held

    async def _route(
        self, manifest: Manifest, known: dict[int, tuple[Manifest, Signed]], refused: set[tuple[int, int]]
    ) -> Route:
        absent: set[int] = set()
        while True:
            roots = {held.version: held.root for held in self._store.held.values()}
            manifests = {**dict.fromkeys(absent), **{version: found[0] for version, found in known.items()}}
            found = await trio.to_thread.run_sync(
                cheapest, manifest, roots, manifests, self._store.has_blob, frozenset(refused)
            )
            if isinstance(found, Route):
                return found
            answer = await self._ask_manifest(found)
            if answer is None:
                absent.add(found)
            else:
                known[found] = answer

    async def _ask_manifest(self, version: int) -> tuple[Manifest, Signed] | None:
        """The manifest of an earlier version: from the trainer, or from others while it is away. None: from nobody."""
        trainer = self._swarm.trainer
        sources: list[Source] = [trainer, *self._swarm.mirrors, *self._swarm.nodes()]
        for source in sources[: _ASKED + 1]:
            try:
                signed = await source.manifest(version)
                manifest = self._checked(signed, source.name, None if source is trainer else self._now_ms())
                if manifest.version != version:
                    raise RemoteError(Code.MALFORMED, f"{source.name} sent the manifest of policy {manifest.version}")
                return manifest, signed
            except (NetError, RemoteError) as error:
                text = f"no manifest of policy {version} from {source.name}: {error}"
                self._report(Event("manifest_refused", text, Level.DETAIL, {"peer": source.name}))
        return None

    async def _follow(self, route: Route, known: dict[int, tuple[Manifest, Signed]]) -> set[tuple[int, int]]:
        """Go a route by deltas, as far as it works. The legs that did not."""
        began = trio.current_time()
        self._store.pinned = frozenset({route.legs[0].delta.base_version})
        try:
            fetched = await self._fetch_deltas(route)
            if fetched is None:
                return {leg.name for leg in route.legs}
            for leg in route.legs:
                self._store.pinned = frozenset({leg.delta.base_version})
                if not await self._apply(leg, known[leg.manifest.version][1]):
                    return {leg.name}
                if leg is not route.legs[0]:
                    await trio.to_thread.run_sync(self._forget_between, leg.delta.base_version)
        finally:
            self._store.pinned = frozenset()
            self._status.download, self._status.downloading = "", {}
        await trio.to_thread.run_sync(self._store.drop_blobs)
        self._say_done(route.legs[-1].manifest, fetched, trio.current_time() - began, route)
        return set()

    def _forget_between(self, version: int) -> None:
        self._store.pinned = frozenset()
        self._store.drop_between(version)

    async def _fetch_deltas(self, route: Route) -> Progress | None:
        """Everything the legs need. None, and the reason said, when it cannot be had."""
        version = route.legs[-1].manifest.version
        wanted = {digest: blob for leg in route.legs for digest, blob in leg.blobs().items()}
        missing = await trio.to_thread.run_sync(missing_blobs, wanted.values(), self._store)
        # A policy that is only built on is removed when the next one is there.
        needed = sum(blob.length for blob in missing) + min(2, len(route.legs)) * route.legs[-1].manifest.size
        await keep_trying(self._report, "the download", self._store.make_room, needed, f"policy {version}")
        patience = self._stalled_seconds + max((blob.length for blob in missing), default=0) / _SLOW_LINE
        try:
            with trio.move_on_after(patience) as self._download:
                self._patience = patience
                return await self._fetch(missing, f"policy {version} by delta")
        except PieceMissing as error:
            self._delta_failed(version, str(error))
            return None
        self._delta_failed(version, f"nothing of it came for {patience:.0f} s")
        return None

    async def _apply(self, leg: Leg, signed: Signed) -> bool:
        """Make one policy from another. False, and the reason said, when it does not come out as signed."""
        version, base = leg.manifest.version, leg.delta.base_version
        self._status.download = f"policy {version}: made from policy {base}"
        apply = self._store.apply
        check = trio.from_thread.check_cancelled
        try:
            await keep_trying(self._report, "the policy", apply, leg.manifest, signed, leg.delta, check)
        except (PolicyError, DecodeError) as error:
            # SPEC 8.3.5: it, not the delta, may be what is damaged.
            intact = await trio.to_thread.run_sync(self._store.check_held, base) is not None
            self._delta_failed(version, f"{error}" if intact else f"policy {base} is damaged on this disk: removed")
            return False
        return True

    def _delta_failed(self, version: int, why: str) -> None:
        text = f"policy {version} by delta: {why}; another way is tried, the files last"
        self._report(Event("delta_failed", text, Level.WARNING, {"version": version}))

    async def _fetch_files(self, manifest: Manifest, signed: Signed) -> HeldPolicy:
        name = f"policy {manifest.version}"
        missing = await trio.to_thread.run_sync(missing_blobs, file_blobs(manifest).values(), self._store)
        # The pieces and the folder made of them lie side by side for a moment.
        needed = sum(blob.length for blob in missing) + manifest.size
        await keep_trying(self._report, "the download", self._store.make_room, needed, name)
        began = trio.current_time()
        try:
            progress = await self._fetch(missing, name)
            held = await keep_trying(self._report, "the policy", self._store.assemble, manifest, signed)
        finally:
            self._status.download, self._status.downloading = "", {}
        await trio.to_thread.run_sync(self._store.drop_blobs)
        self._say_done(manifest, progress, trio.current_time() - began, Route((), progress.total))
        return held

    async def _fetch(self, wanted: tuple[Blob, ...], name: str) -> Progress:
        """Have every one of these pieces in the store."""
        self._going = None
        try:
            with foremost():
                return await self._swarm.fetch(wanted, self._keep, name, self._show)
        finally:
            if self._going is not None:
                self._status.fetched.update(self._going.given)

    async def _keep(self, blob: Blob, data: bytes) -> None:
        await keep_trying(self._report, "the download", self._store.put_blob, blob.digest, data)
        self._piece_here(blob.digest)
        self._download.deadline = trio.current_time() + self._patience

    def _show(self, progress: Progress) -> None:
        self._going = progress
        self._status.download = progress.text()
        self._status.downloading = {"version": self.highest, **progress.values()}

    def _say_done(self, manifest: Manifest, progress: Progress, seconds: float, route: Route) -> None:
        fetched = progress.total
        way = "".join(f" by delta from policy {leg.delta.base_version}" for leg in route.legs[:1])
        way += f" over {len(route.legs) - 1} between" if route.legs[1:] else ""
        text = (
            f"policy {manifest.version} is here{way}: fetched {size_text(fetched)} of {size_text(manifest.size)} in "
            f"{seconds:.1f} s ({size_text(int(fetched / max(seconds, 0.001)))}/s) from {progress.sources()}"
        )
        values = {
            "version": manifest.version,
            "root": manifest.root.hex(),
            "bytes": fetched,
            "policy_bytes": manifest.size,
            "deltas": [leg.name for leg in route.legs],
            "seconds": seconds,
            "bytes_by_source": dict(progress.given),
        }
        self._status.followed(fetched, manifest.size, by_delta=bool(route.legs))
        level = Level.INFO if seconds > _WORTH_TELLING_SECONDS else Level.DETAIL
        self._report(Event("policy_fetched", text, level, values))
