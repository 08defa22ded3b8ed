"""The gateway process: answers nodes. Only this process holds the run's key.

    session   hello, then leases · submissions · heartbeats · returns · manifests      (SPEC 9)
    blobs     pieces of the published policies, by digest
    beside    signs what the learner published, announces it, expires leases, gives up groups, closes epochs

Started as `python -m trainer.gateway RUN`; ends when its stdin does; may be killed at any point, for everything
that counts is in the ledger first. Not here: one node's session (visit.py), who gets which lease (dispatch.py), what
a trace is worth (inbox.py).
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import trio

from protocol import codec, limits, messages
from protocol.envelope import Signed
from protocol.errors import (
    Code,
    NetError,
    PolicyError,
    Refused,
    RemoteError,
    RLCommonsError,
    StorageError,
    UsageError,
)
from protocol.heap import GIVE_BACK_SECONDS, few_heaps, give_back, large_buffers_go_back, settle
from protocol.identity import peer_id
from protocol.net.base import Address, Host, RelayLimits, Stream
from protocol.net.session import Session
from protocol.policy import Manifest
from protocol.run import RunAddress
from trainer.child import CANNOT_START, alone, end_with_parent, say, say_ready, show_life
from trainer.config import TrainerConfig
from trainer.home import in_turns
from trainer.leasing import Leasing
from trainer.network import write_network
from trainer.office import MANIFEST_DAYS, Office, figures, open_office, sign_calibrations, sign_manifest
from trainer.peers import PeerList
from trainer.rundir import DISK_RESERVE_BYTES, Run, open_run, short_of_room
from trainer.shelf import read_blob
from trainer.visit import Visit

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.03  # a look at the ledger's change counter costs some microseconds
TIDY_SECONDS: Final = 1.0
PRUNE_SECONDS: Final = 60.0
BEAT_SECONDS: Final = 0.5  # heartbeats are written together so often
NETWORK_SECONDS: Final = 2.0
STORAGE_SECONDS: Final = 10.0  # a ledger that cannot be written is complained about so often
BLOB_STREAMS_PER_NODE: Final = 2  # the old one may linger beside its successor
BLOBS_PER_STREAM: Final = 8  # 4 MiB each, in memory while the peer reads slowly
BLOBS_READ_AT_ONCE: Final = 8


class Gateway:
    """Answers the streams of one host."""

    def __init__(self, office: Office, *, disk_reserve: int = DISK_RESERVE_BYTES) -> None:
        self.office = office
        self.writer = office.writer
        self.beats: dict[bytes, tuple[int, messages.Heartbeat]] = {}
        self.peers = PeerList(Random())
        self._arrivals: dict[tuple[int, bytes], int] = {}  # (version, node) → Unix ms, to be written
        self._told: dict[bytes, frozenset[int]] = {}  # versions that a node told last
        self._disk_reserve = disk_reserve
        self._visits: dict[bytes, Visit] = {}
        self._blob_streams: Counter[bytes] = Counter()
        self._reading = trio.CapacityLimiter(BLOBS_READ_AT_ONCE)
        self._closed_because = ""
        self._failed_at = -STORAGE_SECONDS
        self._nursery: trio.Nursery | None = None

    async def run(self, host: Host, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises what the judge or the clerk died of."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            host.serve(messages.SESSION_PROTOCOL, self._session)
            host.serve(messages.BLOB_PROTOCOL, self._blobs)
            relay = relay_limits(self.office.run.config)
            if relay is not None:
                host.relay(relay, lambda node: node in self._visits)
            nursery.start_soon(self._write_network, host)
            nursery.start_soon(self._watch_ledger)
            nursery.start_soon(self._tidy)
            nursery.start_soon(self._close_epochs)
            nursery.start_soon(self._prune)
            nursery.start_soon(_stay_small)
            nursery.start_soon(self._write_beats)
            task_status.started()

    def connected(self) -> frozenset[bytes]:
        return frozenset(self._visits)

    # --- sessions ---

    async def _session(self, stream: Stream) -> None:
        session = Session(stream)
        visit = Visit(self, session)
        try:
            await session.run(visit.answer, _ignore_notice)
        except (NetError, RemoteError) as error:
            log.info("session of %s ended: %s", peer_id(visit.node), error)
        finally:
            if self._visits.get(visit.node) is visit:
                del self._visits[visit.node]
                self.beats.pop(visit.node, None)
                self._told.pop(visit.node, None)
                self.peers.forget(visit.node)
                self.office.clerk.submit(lambda: self.writer.lose_node(visit.node))

    async def met(self, visit: Visit) -> None:
        """A node said hello. An older session of the same key is told, and ends."""
        earlier = self._visits.get(visit.node)
        self._visits[visit.node] = visit
        visit.met = True
        if earlier is None or earlier is visit:
            return
        earlier.ended_because = (
            f"another session of {peer_id(visit.node)} took over: if that was not this node after a lost connection, "
            "the key is in use on two machines; give each its own"
        )
        assert self._nursery is not None
        self._nursery.start_soon(self._end, earlier)

    async def _end(self, visit: Visit) -> None:
        # Long enough for its next heartbeat to be answered with the reason.
        await trio.sleep(limits.HEARTBEAT_SECONDS + 2)
        await visit.session.close()

    # --- blobs ---

    async def _blobs(self, stream: Stream) -> None:
        peer = stream.peer
        if self._blob_streams[peer] >= BLOB_STREAMS_PER_NODE:
            await stream.reset()
            return
        self._blob_streams[peer] += 1
        try:
            await Session(stream, at_once=BLOBS_PER_STREAM).run(self._answer_blobs, _ignore_notice)
        except (NetError, RemoteError) as error:
            log.info("blob stream of %s ended: %s", peer_id(peer), error)
        finally:
            self._blob_streams[peer] -= 1
            if not self._blob_streams[peer]:
                del self._blob_streams[peer]

    async def _answer_blobs(self, body: bytes) -> bytes:
        request = messages.open_body(body)
        match request:
            case messages.GetBlob():
                return messages.pack(await self._blob(request.digest))
            case messages.GetManifest():
                return messages.pack(self.manifest(request.version))
        raise Refused(Code.UNEXPECTED_MESSAGE, f"a trainer does not answer {type(request).__name__} here")

    def manifest(self, version: int | None) -> messages.ManifestReply:
        """The manifest of a version, or of the latest. Raises Refused(NOT_FOUND)."""
        shelf = self.office.shelf
        found = shelf.manifest(version)
        if found is None:
            raise Refused(
                Code.NOT_FOUND, f"policy version {version} is not served (any more); the latest is {shelf.latest}"
            )
        return messages.ManifestReply(found)

    async def _blob(self, digest: bytes) -> messages.BlobReply:
        place = self.office.shelf.blob(digest)
        if place is None:
            raise Refused(Code.NOT_FOUND, f"no blob {digest.hex()[:16]}… in the policies served now")
        try:
            data = await trio.to_thread.run_sync(read_blob, place, limiter=self._reading)
        except PolicyError as error:
            if not place.path.exists():
                raise Refused(Code.NOT_FOUND, "that policy version was removed meanwhile: fetch the latest") from None
            self._event("fault", str(error))
            raise Refused(Code.INTERNAL, "the trainer cannot read that blob") from error
        return messages.BlobReply(data)

    # --- beside the sessions ---

    async def _watch_ledger(self) -> None:
        """New policies and calibrations are signed, policies announced; what auditors answered wakes the judge."""
        seen = -1
        while True:
            if self.office.failures:
                raise self.office.failures[0]
            counter = self.office.ledger.change_counter()
            if counter != seen:
                seen = counter
                await self._sign_calibrations()
                self.office.judge.wake()
                for version, root in self.office.ledger.unsigned_policies():
                    if self.office.run.folder.policy(version).is_dir():
                        await self._publish(version, root)
            await trio.sleep(POLL_SECONDS)

    async def _sign_calibrations(self) -> None:
        office, ledger = self.office, self.writer
        if office.ledger.unsigned_calibrations():
            await self._try(lambda: sign_calibrations(office.signer, ledger))

    async def _publish(self, version: int, root: bytes) -> None:
        run, signer = self.office.run, self.office.signer
        try:
            signed = await trio.to_thread.run_sync(sign_manifest, run, signer, version, root, self.office.clock)
            raw, manifest = codec.encode(signed), codec.decode(Manifest, signed.payload)
            await self.office.clerk.do(lambda: self.writer.set_manifest(version, raw, figures(manifest)))
        except StorageError as error:
            self.storage_failed(str(error))
            return
        self.office.shelf.put(signed, manifest)
        self.office.shelf.forget_removed()
        assert self._nursery is not None
        for visit in list(self._visits.values()):
            self._nursery.start_soon(self._announce, visit, signed)

    async def _announce(self, visit: Visit, manifest: Signed) -> None:
        body = messages.pack(messages.Announce(manifest))
        if len(body) > limits.MAX_NOTICE_BYTES:
            return  # a policy of many blobs: nodes learn of it with their next heartbeat
        try:
            await visit.session.notify(body)
        except NetError as error:
            log.info("policy not announced to %s: %s", peer_id(visit.node), error)

    async def _tidy(self) -> None:
        say_ready(self.office.run.folder.path, "gateway")
        while True:
            self._look_at_disk()
            self._renew_manifest()
            now, connected, leasing = self.office.clock(), self.connected(), self.office.leasing

            def work(now: int = now, connected: frozenset[bytes] = connected, leasing: Leasing = leasing) -> None:
                leasing.expire(now)
                leasing.tidy(connected, now)

            await self._try(work)
            show_life(self.office.run.folder.path, "gateway")
            await trio.sleep(TIDY_SECONDS)

    async def _close_epochs(self) -> None:
        """One after the other, as fast as they come: one a second would fall behind a run of small steps for good, and
        what is known of an epoch is kept until it is closed."""
        while True:
            while await self._close_epoch():
                pass
            await trio.sleep(TIDY_SECONDS)

    async def _close_epoch(self) -> bool:
        """Whether there was one that could be closed, and was."""
        registrar = self.office.registrar
        version = registrar.candidate(self.office.ledger)
        if version is None:
            return False
        try:
            signed = await trio.to_thread.run_sync(registrar.draft, version, self.office.clock())
            return await self.office.clerk.do(lambda: registrar.record(self.writer, signed))
        except StorageError as error:
            self.storage_failed(str(error))
            return False

    async def _prune(self) -> None:
        keep = self.office.run.config.keep_traces
        while True:
            await trio.sleep(PRUNE_SECONDS)
            await self._try(lambda: self.writer.prune_traces(keep))

    async def _write_beats(self) -> None:
        while True:
            await trio.sleep(BEAT_SECONDS)
            beats, self.beats = self.beats, {}
            arrivals, self._arrivals = self._arrivals, {}
            if beats or arrivals:
                await self._try(lambda beats=beats, arrivals=arrivals: self._record_beats(beats, arrivals))

    async def _write_network(self, host: Host) -> None:
        """What the network costs, for whoever looks at the run (network.py)."""
        while True:
            await trio.to_thread.run_sync(write_network, self.office.run.folder, host.statistics(), self.office.clock())
            await trio.sleep(NETWORK_SECONDS)

    def note_versions(self, node: bytes, versions: Collection[int], received_ms: int) -> None:
        """A node tells which policies it has; some are news."""
        for version in versions:
            if version not in self._told.get(node, ()):
                self._arrivals.setdefault((version, node), received_ms)
        self._told[node] = frozenset(versions)

    def _record_beats(
        self, beats: dict[bytes, tuple[int, messages.Heartbeat]], arrivals: dict[tuple[int, bytes], int]
    ) -> None:
        if arrivals:
            self.writer.note_arrivals(arrivals)
        for node, (received_ms, beat) in beats.items():
            self.writer.beat_node(
                node,
                received_ms,
                policy_version=beat.policy_version,
                tokens_per_second=beat.tokens_per_second,
                slots_busy=beat.slots_busy,
                slots_total=beat.slots_total,
                slots_waiting=beat.slots_waiting,
                cache_percent=beat.cache_percent,
                unsent=beat.unsent_traces,
            )

    async def _try(self, work: Any) -> None:
        try:
            await self.office.clerk.do(work)
        except StorageError as error:
            self.storage_failed(str(error))

    def _renew_manifest(self) -> None:
        """Sign the latest manifest anew when half of its time is over."""
        shelf = self.office.shelf
        latest = shelf.latest
        if shelf.expires_ms(latest) - self.office.clock() < MANIFEST_DAYS * 43_200_000:
            root = shelf.root(latest)
            assert root is not None and self._nursery is not None
            self._nursery.start_soon(self._publish, latest, root)

    # --- the disk ---

    def check_room(self) -> None:
        """Raises Refused(BUSY) while the disk is nearly full."""
        if self._closed_because:
            raise Refused(Code.BUSY, self._closed_because)

    def _look_at_disk(self) -> None:
        short = short_of_room(self.office.run.folder.path, self._disk_reserve)
        if not short:
            if self._closed_because:
                self._closed_because = ""
                self._event("disk", "there is room on the disk again: traces are accepted")
        elif not self._closed_because:
            self._closed_because = short
            say("gateway", self._closed_because)
            self._event("disk", self._closed_because)

    def storage_failed(self, cause: str) -> None:
        """The ledger could not be written: say so; whoever waited was answered BUSY and asks again."""
        if trio.current_time() - self._failed_at > STORAGE_SECONDS:
            self._failed_at = trio.current_time()
            say("gateway", cause)

    def _event(self, kind: str, text: str) -> None:
        at_ms = self.office.clock()
        self.office.clerk.submit(lambda: self.writer.add_event(at_ms, kind, text))


def relay_limits(config: TrainerConfig) -> RelayLimits | None:
    """What the gateway gives away as a relay; None: it is none."""
    if not config.relay_mib_per_second:
        return None
    return RelayLimits(
        reservations=config.relay_nodes,
        circuits=config.relay_circuits,
        circuit_bytes=config.relay_circuit_mib * 1024 * 1024,
        circuit_seconds=config.relay_circuit_minutes * 60,
        bytes_per_second=config.relay_mib_per_second * 1024 * 1024,
    )


async def _stay_small() -> None:
    """Sessions that ended and errors that were told are cycles."""
    while True:
        await trio.sleep(GIVE_BACK_SECONDS)
        give_back()


async def _ignore_notice(body: bytes) -> None:
    """A node tells nothing without asking."""


# --- the process ---


def public_address(run: Run, host: Host) -> RunAddress:
    """What nodes dial: `announce` where it is set, else where the host listens, with a real interface's address."""
    config = run.config
    if config.announce:
        where = config.announce
    else:
        where = host.addresses[0].rpartition("/p2p/")[0]
        where = where.replace("/ip4/0.0.0.0/", f"/ip4/{_own_address(socket.AF_INET, '192.0.2.1', '127.0.0.1')}/")
        where = where.replace("/ip6/::/", f"/ip6/{_own_address(socket.AF_INET6, '2001:db8::1', '::1')}/")
    return RunAddress(where, run.genesis.trainer, run.run)


def _own_address(family: int, towards: str, otherwise: str) -> str:
    """This machine's address on the way out; no packet is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return otherwise
        return str(probe.getsockname()[0])


def listen_address(run: Run) -> str:
    """config.listen. A free port (tcp/0) stays the same after a restart where it can, because nodes come back to
    the address they know."""
    wanted = run.config.listen
    if not wanted.endswith("/tcp/0"):
        return wanted
    _, family, host, _, _ = wanted.split("/")
    try:
        port = int(run.folder.port.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return wanted
    return f"/{family}/{host}/tcp/{port}" if _is_free(family, host, port) else wanted


def _is_free(family: str, host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def near_address(run: Run, host: Host) -> RunAddress:
    """What a node on this machine dials."""
    where = host.addresses[0].rpartition("/p2p/")[0]
    where = where.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")
    return RunAddress(where, run.genesis.trainer, run.run)


def write_address(run: Run, address: RunAddress, host: Host) -> None:
    run.folder.port.write_text(f"{Address.parse(host.addresses[0]).port}\n", encoding="ascii")
    for path, text in ((run.folder.near_address, near_address(run, host)), (run.folder.address, address)):
        beside = path.with_suffix(".new")
        beside.write_text(f"{text}\n", encoding="utf-8")
        beside.replace(path)


async def serve(run: Run) -> None:
    """Answer nodes until cancelled."""
    from protocol.net.p2p import open_host

    with open_office(run) as office:
        async with open_host(office.signer, listen=(listen_address(run),)) as host:
            address = public_address(run, host)
            write_address(run, address, host)
            say("gateway", f"rlnode join {address}")
            await Gateway(office).run(host)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.gateway", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--in-turns", action="store_true", help="the home engine draws between the learner's steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    few_heaps()
    large_buffers_go_back()
    settle()
    end_with_parent()
    code = 0
    try:
        run = open_run(arguments.run)
        if arguments.in_turns:
            run = replace(run, config=in_turns(run.config))
        with alone(run.folder.path, "gateway"):
            trio.run(serve, run)
    except* KeyboardInterrupt:
        pass
    except* RLCommonsError as group:
        for error in leaves(group):
            say("gateway", str(error))
            code = CANNOT_START if isinstance(error, UsageError) else 1
    return code


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The exceptions in a group of groups."""
    for error in group.exceptions:
        yield from leaves(error) if isinstance(error, BaseExceptionGroup) else (error,)


if __name__ == "__main__":
    sys.exit(main())
