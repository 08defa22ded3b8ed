"""A trainer small enough to read, for tests of the node: it speaks the real messages over any Host, and does as
a test tells it. Not here: judging traces, learning.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import trio

from protocol import messages
from protocol.delta import cut
from protocol.envelope import Signed, seal, unseal
from protocol.environments import base
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import Code, NetError, RemoteError
from protocol.identity import Identity
from protocol.lease import Lease, SeedInput, Slot, slot_seed
from protocol.limits import MAX_BLOB_BYTES
from protocol.net.base import Host, Stream
from protocol.net.session import Session
from protocol.policy import DELTA_CODEC, Blob, Delta, Manifest, describe, policy_root
from protocol.policy_delta import delta_between
from protocol.run import EnvironmentShare, Genesis, Membership, RunAddress, run_id
from protocol.trace import Trace, TraceFile
from protocol.verdict import Fingerprint, Outcome, Reason, Receipt, Verdict
from trainer.peers import PeerList

ENVIRONMENT = "tools8@1"


@dataclass
class Policy:
    """A published version."""

    manifest: Manifest
    signed: Signed
    folder: Path


@dataclass
class SmallTrainer:
    """One run. Public fields are what tests read or set; `on_*` hooks replace an answer."""

    identity: Identity = field(default_factory=Identity.generate)
    group_size: int = 4
    lease_seconds: float = 60.0
    lease_changes: dict[str, Any] = field(default_factory=dict)  # fields of every lease from now on
    max_leases: int = 10_000
    clock_offset_ms: int = 0
    protocol: messages.Version = field(default_factory=lambda: messages.Version(1, 0))
    policies: dict[int, Policy] = field(default_factory=dict)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    hellos: list[messages.Hello] = field(default_factory=list)
    heartbeats: list[messages.Heartbeat] = field(default_factory=list)
    leases: dict[bytes, Lease] = field(default_factory=dict)
    returned: dict[bytes, str] = field(default_factory=dict)
    traces: dict[bytes, Trace] = field(default_factory=dict)  # by digest
    timings: dict[bytes, messages.Timing | None] = field(default_factory=dict)  # by the digest of their trace
    signed: dict[bytes, Signed] = field(default_factory=dict)  # leases by id, traces by digest
    submissions: int = 0
    verdicts: list[Signed] = field(default_factory=list)
    blobs_served: int = 0
    peers: PeerList = field(default_factory=lambda: PeerList(Random(1)))
    on_request: Callable[[Any], Any] | None = None  # a reply, an error, or None for the usual answer
    on_blob: Callable[[bytes, bytes], bytes] | None = None  # (digest, right bytes) → what is sent
    before_blob: Callable[[bytes], Awaitable[None]] | None = None  # for a slow link
    on_missing: Callable[[], Awaitable[Any]] | None = None
    changed: trio.Event = field(default_factory=trio.Event)
    _sessions: list[Session] = field(default_factory=list)
    _streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        genesis = Genesis(
            "small",
            self.identity.node,
            1,
            (EnvironmentShare(ENVIRONMENT, "", 1),),
            b"\1" * 32,
            b"\2" * 32,
        )
        self.genesis = seal(self.identity, genesis)
        self.run = run_id(self.genesis)

    def address(self, host: Host) -> RunAddress:
        multiaddr, _, _ = host.addresses[0].partition("/p2p/")
        return RunAddress(multiaddr, self.identity.node, self.run)

    def publish(self, folder: Path, version: int, *, deltas_from: Sequence[int] = ()) -> Policy:
        files = describe(folder)
        deltas = tuple(self._delta(self.policies[base], folder) for base in deltas_from)
        manifest = Manifest(self.run, version, policy_root(folder), files, self.now(), self.now() + 10**9, deltas)
        policy = Policy(manifest, seal(self.identity, manifest), folder)
        for file in files:
            data = (folder / file.name).read_bytes()
            for number, blob in enumerate(file.blobs):
                self.blobs[blob.digest] = data[number * MAX_BLOB_BYTES :][: blob.length]
        self.policies[version] = policy
        return policy

    def _delta(self, base: Policy, folder: Path) -> Delta:
        blobs = []
        for data in cut(delta_between(base.folder, folder)):
            blobs.append(Blob(sha256(data).digest(), len(data)))
            self.blobs[blobs[-1].digest] = data
        return Delta(base.manifest.version, base.manifest.root, DELTA_CODEC, tuple(blobs))

    async def announce(self, version: int) -> None:
        for session in self._sessions:
            await session.notify(messages.pack(messages.Announce(self.policies[version].signed)))

    def serve(self, host: Host) -> None:
        host.serve(messages.SESSION_PROTOCOL, self._serve_session)
        host.serve(messages.BLOB_PROTOCOL, self._serve_blobs)

    async def cut_all(self) -> None:
        """Break every stream, as a killed trainer does."""
        for stream in [*self._streams]:
            await stream.reset()

    async def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Wait for something a test is after, with a deadline."""
        with trio.fail_after(seconds):
            while not condition():
                await self.changed.wait()

    def now(self) -> int:
        return int(time.time() * 1000) + self.clock_offset_ms

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _serve_session(self, stream: Stream) -> None:
        session = Session(stream)
        self._sessions.append(session)
        self._streams.append(stream)

        async def answer(body: bytes) -> bytes:
            request = messages.open_body(body)
            special = None if self.on_request is None else self.on_request(request)
            if isinstance(special, BaseException):
                raise special
            reply = special if special is not None else self._answer(stream.peer, request)
            self._tell()
            return messages.pack(reply)

        async def ignore(body: bytes) -> None:
            pass

        try:
            await session.run(answer, ignore)
        except NetError:
            pass
        finally:
            self.peers.forget(stream.peer)
            self._sessions.remove(session)
            self._streams.remove(stream)

    def _answer(self, node: bytes, request: Any) -> Any:
        latest = max(self.policies)
        match request:
            case messages.Hello():
                messages.negotiate(request.versions, self.protocol, their_name="rlnode 0.0", our_name="rltrainer 9.9")
                if request.run != self.run:
                    raise RemoteError(Code.WRONG_RUN, "this trainer serves another run")
                self.hellos.append(request)
                return messages.Welcome(
                    self.protocol, "rltrainer 9.9", self.genesis, self.policies[latest].signed, self.now()
                )
            case messages.Heartbeat():
                self.heartbeats.append(request)
                after = self.verdicts[request.verdict_cursor :][:2]
                return messages.HeartbeatReply(self.now(), latest, tuple(after), request.verdict_cursor + len(after))
            case messages.GetManifest():
                return self._manifest(request)
            case messages.GetLeases():
                return self._give_leases(node, request)
            case messages.GetPeers():
                self.peers.note(node, request)
                membership = seal(self.identity, Membership(self.run, node, self.now() + 10**9))
                return messages.PeersReply(self.peers.choose(node, request), membership)
            case messages.ReturnLease():
                self.returned[request.lease_id] = request.cause
                return messages.Returned()
            case messages.Submit():
                self.timings[request.trace.digest] = request.timing
                return self._receive(request.trace)
        raise RemoteError(Code.UNEXPECTED_MESSAGE, f"not {type(request).__name__}")

    def _manifest(self, request: messages.GetManifest) -> messages.ManifestReply:
        version = max(self.policies) if request.version is None else request.version
        if version not in self.policies:
            raise RemoteError(Code.NOT_FOUND, f"this trainer does not have policy {version}")
        return messages.ManifestReply(self.policies[version].signed)

    def _give_leases(self, node: bytes, request: messages.GetLeases) -> messages.LeasesReply:
        given: list[Signed] = []
        for _ in range(max(1, request.slots // self.group_size)):
            if len(self.leases) >= self.max_leases:
                return messages.LeasesReply(tuple(given), 0 if given else 1_000, "" if given else "no task is left")
            lease = replace(self.make_lease(node, max(request.versions)), **self.lease_changes)
            self.leases[lease.lease_id] = lease
            self.signed[lease.lease_id] = seal(self.identity, lease)
            given.append(self.signed[lease.lease_id])
        return messages.LeasesReply(tuple(given), 0, "")

    def make_lease(self, node: bytes, version: int) -> Lease:
        manifest, folder = self.policies[version].manifest, self.policies[version].folder
        index = len(self.leases)
        environment = base.load(ENVIRONMENT)
        group = index.to_bytes(16, "big")
        bound = SeedInput(self.run, manifest.root, ENVIRONMENT, "", index, group, 0, b"\7" * 32)
        return Lease(
            run=self.run,
            lease_id=index.to_bytes(16, "little"),
            node=node,
            policy_version=version,
            policy_root=manifest.root,
            environment=ENVIRONMENT,
            parameters="",
            task_index=index,
            group_id=group,
            group_size=self.group_size,
            slots=tuple(Slot(n, slot_seed(replace(bound, slot=n))) for n in range(self.group_size)),
            prompt=PolicyTokenizer.load(folder).prompt_ids(environment.prompt(index)),
            temperature=1.0,
            max_turn_tokens=environment.max_new_tokens,
            max_tokens=64,
            issued_ms=self.now(),
            deadline_ms=self.now() + int(self.lease_seconds * 1000),
        )

    def _receive(self, signed: Signed) -> messages.Submitted:
        self.submissions += 1
        trace = unseal(Trace, signed)
        known = signed.digest in self.traces
        self.traces[signed.digest] = trace
        self.signed[signed.digest] = signed
        if not known:
            self.verdicts.append(self.judge(signed.digest, trace, Outcome.ACCEPTED, None))
        return messages.Submitted(self.receipt(signed.digest, trace), None)

    def receipt(self, digest: bytes, trace: Trace) -> Signed:
        receipt = Receipt(
            self.run, digest, trace.lease_id, trace.slot, trace.node, self.now(), list(self.traces).index(digest)
        )
        return seal(self.identity, receipt)

    def file(self, digest: bytes) -> TraceFile:
        """What an auditor is handed."""
        trace = self.traces[digest]
        return TraceFile(
            self.genesis, self.signed[trace.lease_id], self.signed[digest], self.receipt(digest, trace), None, None
        )

    def judge(self, digest: bytes, trace: Trace, outcome: Outcome, reason: Reason | None) -> Signed:
        return seal(
            self.identity,
            Verdict(
                self.run,
                digest,
                trace.lease_id,
                trace.slot,
                trace.node,
                trace.policy_version,
                trace.policy_root,
                outcome,
                reason,
                False,
                None,
                (),
                None,
                (),
                Fingerprint("small", "", "", ""),
                self.now(),
            ),
        )

    async def _serve_blobs(self, stream: Stream) -> None:
        session = Session(stream)
        self._streams.append(stream)

        async def answer(body: bytes) -> bytes:
            request = messages.open_body(body)
            if isinstance(request, messages.GetManifest):
                return messages.pack(self._manifest(request))
            digest = request.digest
            if digest not in self.blobs and self.on_missing is not None:
                await self.on_missing()
            if digest not in self.blobs:
                raise RemoteError(Code.NOT_FOUND, "this trainer has no such blob")
            data = self.blobs[digest]
            if self.on_blob is not None:
                data = self.on_blob(digest, data)
            if not data:
                await trio.sleep_forever()
            self.blobs_served += 1
            self._tell()
            if self.before_blob is not None:
                await self.before_blob(data)
            return messages.pack(messages.BlobReply(data))

        async def ignore(body: bytes) -> None:
            pass

        try:
            await session.run(answer, ignore)
        except NetError:
            pass
        finally:
            self._streams.remove(stream)
