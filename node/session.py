"""The conversation with the trainer: connect, hello, then everything at once until the connection breaks, and
again, for ever.

    hello ─► heartbeats · leases · submissions · returns · new policies     (SPEC 9)

A trainer may be away for any time: what was drawn waits on the disk and is sent again, by digest. Not here:
drawing (worker.py), fetching policies (weights.py), the wire (protocol/messages.py).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

import trio

from node.config import NodeConfig
from node.failures import foremost
from node.leases import GiveBack
from node.report import Event, Level, Report, Status
from node.store import RunStore
from node.weights import PolicyFollower, keep_trying
from node.worker import Worker, software
from protocol import limits, messages
from protocol.envelope import Signed, unseal
from protocol.errors import Code, DecodeError, NetError, Refused, RemoteError, StorageError
from protocol.identity import Identity, peer_id
from protocol.messages import Version
from protocol.net.backoff import backoff
from protocol.net.base import Host
from protocol.net.session import Session
from protocol.run import RunAddress, open_genesis
from protocol.trace import EngineDescriptor
from protocol.verdict import Outcome, Receipt, Verdict, check_verdict

T = TypeVar("T")

# Refusals that waiting does not heal: the node stops and says what to do.
FATAL: Final = (
    Code.VERSION_MISMATCH,
    Code.WRONG_RUN,
    Code.CLOCK_SKEW,
    Code.ENGINE_NOT_ADMITTED,
    Code.BANNED,
)
# The trainer cannot now; the same request will do later.
LATER: Final = (Code.BUSY, Code.INTERNAL)
_VERDICTS_REMEMBERED: Final = 8_192
_SHORTEST_RETRY_MS: Final = 50
_LASTING_SECONDS: Final = 30.0  # a session that held so long was a good one: the next try comes soon


class TrainerClock:
    """The trainer's time, from its last message and this machine's steady clock: deadlines are in it."""

    def __init__(self) -> None:
        self._offset_ms: float | None = None  # trainer's Unix time less our monotonic clock

    def now_ms(self) -> int:
        if self._offset_ms is None:
            return int(time.time() * 1000)
        return int(time.monotonic() * 1000 + self._offset_ms)

    def learn(self, their_ms: int, began: float, ended: float) -> float:
        """Take a reading made between two readings of `time.monotonic`. Returns by how many seconds this
        machine's own clock is ahead of the trainer's."""
        middle = (began + ended) / 2 * 1000
        self._offset_ms = their_ms - middle
        return time.time() - time.monotonic() + middle / 1000 - their_ms / 1000


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a node talks to, and as whom."""

    address: RunAddress
    identity: Identity


class TrainerLink:
    """Keeps a session with the trainer and feeds worker, follower and store from it."""

    def __init__(
        self,
        peer: Peer,
        host: Host,
        config: NodeConfig,
        store: RunStore,
        worker: Worker,
        follower: PolicyFollower,
        clock: TrainerClock,
        report: Report,
        status: Status,
        random: Random,
    ) -> None:
        self._address = peer.address
        self._identity = peer.identity
        self._host = host
        self._config = config
        self._store = store
        self._worker = worker
        self._follower = follower
        self._clock = clock
        self._report = report
        self._status = status
        self._random = random
        self._sending: set[bytes] = set()
        self._last_cause = ""
        self._judged: OrderedDict[bytes, None] = OrderedDict()

    # --- connecting ---

    async def run(self) -> None:
        """Talk for ever, once there is an engine. Raises RemoteError for what waiting does not heal (FATAL)."""
        await self._worker.described.wait()
        descriptor = self._worker.descriptor
        assert descriptor is not None
        delays = backoff(self._random)
        while True:
            self._status.state = "connecting"
            began = trio.current_time()
            try:
                with foremost():
                    await self._one_session(descriptor)
            except (NetError, RemoteError) as error:
                if isinstance(error, RemoteError) and error.code in FATAL:
                    raise
                if trio.current_time() - began > _LASTING_SECONDS:
                    delays = backoff(self._random)
                delay = next(delays)
                self._say(
                    "disconnected",
                    f"{error}; next try in {delay:.1f} s"
                    + (f", {len(self._store.unsent)} traces wait" if self._store.unsent else ""),
                    Level.WARNING,
                    retry_seconds=round(delay, 2),
                )
            self._status.connected = False
            await trio.sleep(delay)

    async def _one_session(self, descriptor: EngineDescriptor) -> None:
        stream = await self._host.open(self._address.dial, messages.SESSION_PROTOCOL, seconds=self._config.dial_seconds)
        session = Session(stream)
        self._sending.clear()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run, _refuse_request, self._on_notice)
                await self._hello(session, descriptor)
                for each in (self._heartbeats, self._ask_leases, self._submit_all, self._return_leases):
                    nursery.start_soon(each, session)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await session.close()

    async def _hello(self, session: Session, descriptor: EngineDescriptor) -> None:
        hello = hello_of(self._address.run, descriptor)
        began = time.monotonic()
        welcome = await self._ask(session, hello, messages.Welcome, "greeting the trainer")
        # SPEC 9.2: a node joins the run it was told, of the trainer it was told, and no other.
        genesis = open_genesis(welcome.genesis, run=self._address.run, trainer=self._address.trainer)
        messages.negotiate(
            (welcome.version,), Version(*limits.PROTOCOL_VERSION), their_name="the trainer", our_name="this node"
        )
        self._check_clock(self._clock.learn(welcome.clock_ms, began, time.monotonic()))
        self._worker.trainer_software = welcome.software
        self._follower.offer(welcome.manifest)
        self._status.connected = True
        self._status.state = "connected"
        self._say(
            "connected",
            f"joined run '{genesis.name}' at {peer_id(self._address.trainer)} ({welcome.software}, protocol "
            f"{welcome.version}), policy {self._follower.highest}",
            run=self._address.run.hex(),
            policy_version=self._follower.highest,
        )

    def _check_clock(self, ahead: float) -> None:
        """SPEC 9.2: clocks MUST agree within MAX_CLOCK_SKEW_SECONDS, because deadlines are in Unix time."""
        if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS:
            raise RemoteError(Code.CLOCK_SKEW, clock_advice(ahead))

    async def _ask(self, session: Session, request: Any, cls: type[T], what: str) -> T:
        body = await session.request(messages.pack(request), seconds=limits.REQUEST_SECONDS, what=what)
        return messages.expect(cls, body)

    async def _ask_patiently(self, session: Session, request: Any, cls: type[T], what: str) -> T:
        """As `_ask`; while the trainer is busy or has a fault of its own, again and again."""
        delays = backoff(self._random)
        while True:
            try:
                return await self._ask(session, request, cls, what)
            except Refused as error:
                if error.code not in LATER:
                    raise
                delay = next(delays)
                self._say("busy", f"the trainer cannot answer now while {what}: {error}", Level.DETAIL, code=error.code)
                await trio.sleep(delay)

    async def _on_notice(self, body: bytes) -> None:
        self._follower.offer(messages.expect(messages.Announce, body).manifest)

    # --- heartbeats ---

    async def _heartbeats(self, session: Session) -> None:
        while True:
            began = time.monotonic()
            beat = messages.Heartbeat(
                clock_ms=int(time.time() * 1000),
                policy_version=self._status.policy_version,
                tokens_per_second=self._status.tokens.rate(),
                slots_busy=self._status.slots_busy,
                slots_total=self._status.slots_total,
                unsent_traces=len(self._store.unsent),
                verdict_cursor=self._store.verdict_cursor,
            )
            reply = await self._ask_patiently(session, beat, messages.HeartbeatReply, "sending a heartbeat")
            ahead = self._clock.learn(reply.clock_ms, began, time.monotonic())
            if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS:
                self._say("clock", clock_advice(ahead), Level.WARNING, seconds_ahead=round(ahead, 1))
            await self._note_verdicts(reply.verdicts, reply.verdict_cursor)
            if reply.latest_version > self._follower.highest:
                await self._get_manifest(session)
            if len(reply.verdicts) < limits.MAX_VERDICTS_PER_REPLY:
                await trio.sleep(limits.HEARTBEAT_SECONDS)

    async def _get_manifest(self, session: Session) -> None:
        reply = await self._ask_patiently(
            session, messages.GetManifest(None), messages.ManifestReply, "asking for the newest policy"
        )
        self._follower.offer(reply.manifest)

    async def _note_verdicts(self, signed: tuple[Signed, ...], cursor: int) -> None:
        """Count, log and show what the trainer decided, each once."""
        if not signed and cursor == self._store.verdict_cursor:
            return
        noted = []
        for each in signed:
            verdict = self._open_verdict(each)
            self._count_verdict(verdict)
            noted.append((_summary(verdict), each))
        await keep_trying(self._report, "the verdicts' log", self._store.note_verdicts, noted, cursor)

    def _open_verdict(self, signed: Signed) -> Verdict:
        verdict = unseal(Verdict, signed, signer=self._address.trainer)
        check_verdict(verdict)
        if verdict.run != self._address.run or verdict.node != self._identity.node:
            raise RemoteError(Code.MALFORMED, "the trainer sent a verdict of another run or on another node")
        return verdict

    def _count_verdict(self, verdict: Verdict) -> None:
        if verdict.trace_digest in self._judged:
            return
        self._judged[verdict.trace_digest] = None
        if len(self._judged) > _VERDICTS_REMEMBERED:
            self._judged.popitem(last=False)
        summary = _summary(verdict)
        reason = str(verdict.reason)
        if verdict.outcome == Outcome.ACCEPTED:
            self._status.accepted += 1
            self._say("verdict", "a trace was accepted", Level.DETAIL, **summary)
        elif verdict.outcome == Outcome.REFUSED:
            self._status.refused[reason] += 1
            self._status.last_refusal = f"{reason}: {summary['detail']}"
            self._say("verdict", f"a trace was refused, {reason}: {summary['detail']}", Level.WARNING, **summary)
        else:
            self._status.not_judged[reason] += 1
            self._say("verdict", f"a trace was not judged, {reason} (no fault of this node)", **summary)

    # --- leases ---

    async def _ask_leases(self, session: Session) -> None:
        """Whenever there is room. An empty answer is waited out, or until a newer policy is here."""
        delays = backoff(self._random)
        while True:
            changed = self._worker.wants_leases
            room, versions = self._worker.room(), self._worker.versions()
            if not room or not versions:
                await changed.wait()
                continue
            try:
                reply = await self._take_leases(session, messages.GetLeases(min(room, 4096), versions))
            except Refused as error:
                if error.code not in LATER:
                    raise
                # Not the same question again: by then room and versions are others.
                reply = messages.LeasesReply((), int(next(delays) * 1000), str(error))
            if reply.leases:
                delays = backoff(self._random)
            else:
                await self._wait_for_leases(reply, versions)

    async def _take_leases(self, session: Session, request: messages.GetLeases) -> messages.LeasesReply:
        self._worker.asking = True
        try:
            reply = await self._ask(session, request, messages.LeasesReply, "asking for leases")
            for signed in reply.leases:
                await self._worker.take(signed)
            return reply
        finally:
            self._worker.asking = False
            self._worker.wake()

    async def _wait_for_leases(self, reply: messages.LeasesReply, versions: tuple[int, ...]) -> None:
        if reply.cause and reply.cause != self._last_cause:
            self._say("no_leases", f"no lease now: {reply.cause}", retry_ms=reply.retry_ms)
        self._last_cause = reply.cause
        with trio.move_on_after(max(reply.retry_ms, _SHORTEST_RETRY_MS) / 1000):
            while self._worker.versions() == versions:
                await self._worker.wants_leases.wait()

    async def _return_leases(self, session: Session) -> None:
        while True:
            news = self._worker.has_news
            for give_back in self._worker.book.returns():
                await self._return(session, give_back)
            await news.wait()

    async def _return(self, session: Session, give_back: GiveBack) -> None:
        request = messages.ReturnLease(give_back.lease_id, give_back.cause[: limits.MAX_TEXT_CHARACTERS])
        try:
            await self._ask_patiently(session, request, messages.Returned, "giving a lease back")
        except Refused as error:
            if error.code in FATAL:
                raise
            self._say("return_refused", f"the trainer did not take a lease back: {error}", Level.WARNING)
        self._worker.book.returned(give_back)
        self._store.drop_lease(give_back.lease_id)
        self._status.leases_returned += 1
        self._worker.wake()

    # --- submissions ---

    async def _submit_all(self, session: Session) -> None:
        """Send every trace that has no receipt, several at once."""
        async with trio.open_nursery() as nursery:
            places = trio.Semaphore(self._config.submits_in_flight)
            while True:
                news = self._worker.has_news
                for digest in [each for each in self._store.unsent if each not in self._sending]:
                    await places.acquire()
                    self._sending.add(digest)
                    nursery.start_soon(self._submit, session, digest, places)
                await news.wait()

    async def _submit(self, session: Session, digest: bytes, places: trio.Semaphore) -> None:
        try:
            unsent = self._store.unsent[digest]
            try:
                signed = await trio.to_thread.run_sync(self._store.read_trace, digest)
                reply = await self._ask_patiently(
                    session, messages.Submit(signed), messages.Submitted, "submitting a trace"
                )
            except Refused as error:
                if error.code in FATAL or error.code == Code.UNEXPECTED_MESSAGE:
                    raise
                await self._refused(digest, f"{error.code}: {error}")
            except (StorageError, DecodeError) as error:
                await self._refused(digest, f"it cannot be read any more: {error}")
            else:
                await self._submitted(digest, reply)
            self._worker.settled(unsent.lease_id, unsent.slot)
        finally:
            self._sending.discard(digest)
            places.release()

    async def _submitted(self, digest: bytes, reply: messages.Submitted) -> None:
        verdict = None if reply.verdict is None else self._open_verdict(reply.verdict)
        if verdict is not None and verdict.trace_digest != digest:
            raise RemoteError(Code.MALFORMED, "the trainer answered with the verdict on another trace")
        if reply.receipt is not None:
            self._check_receipt(reply.receipt, digest)
            await keep_trying(self._report, "the receipts' log", self._store.settle, digest, reply.receipt)
            self._status.traces_received += 1
            self._say("trace_received", "the trainer has a trace", Level.DETAIL, trace=digest.hex())
        elif verdict is not None and verdict.outcome == Outcome.REFUSED:
            await self._refused(digest, f"{verdict.reason}: {_summary(verdict)['detail']}")
        else:
            raise RemoteError(Code.MALFORMED, "the trainer answered a trace with neither receipt nor refusal")
        if verdict is not None:
            self._count_verdict(verdict)

    def _check_receipt(self, signed: Signed, digest: bytes) -> None:
        """SPEC 8.7: a receipt names the digest, lease, slot and node of the trace it is for."""
        receipt = unseal(Receipt, signed, signer=self._address.trainer)
        unsent = self._store.unsent[digest]
        named = (receipt.run, receipt.trace_digest, receipt.lease_id, receipt.slot, receipt.node)
        if named != (self._address.run, digest, unsent.lease_id, unsent.slot, self._identity.node):
            raise RemoteError(Code.MALFORMED, "the trainer's receipt is not for the trace that was sent")

    async def _refused(self, digest: bytes, why: str) -> None:
        """The trainer will never take this trace: keep it aside, go on."""
        await keep_trying(self._report, "a refused trace", self._store.refuse, digest)
        self._say(
            "trace_refused",
            f"the trainer refused a trace on the spot, {why} (kept in {self._store.folder / 'refused'})",
            Level.WARNING,
            trace=digest.hex(),
        )

    # --- before and after ---

    def resume(self) -> None:
        """Take up what an earlier process left: its traces are sent, then its leases given back."""
        now = self._clock.now_ms()
        for lease in self._store.leases():
            unsent = [each.slot for each in self._store.unsent.values() if each.lease_id == lease.lease_id]
            if lease.deadline_ms > now:
                self._worker.book.resume(lease, unsent, "the node was started again")
            elif not unsent:
                self._store.drop_lease(lease.lease_id)
        if self._store.unsent:
            self._say("resumed", f"{len(self._store.unsent)} traces of an earlier run of this node wait to be sent")

    @property
    def unsent(self) -> int:
        """Traces without a receipt."""
        return len(self._store.unsent)

    async def flush(self) -> None:
        """Wait until everything is sent and given back, or the connection is gone."""
        while self._status.connected and (self._store.unsent or not self._worker.book.is_empty()):
            await self._worker.has_news.wait()

    def _say(self, name: str, text: str, level: Level = Level.INFO, **values: Any) -> None:
        self._report(Event(name, text, level, values))


def hello_of(run: bytes, descriptor: EngineDescriptor) -> messages.Hello:
    """The first message of a session."""
    return messages.Hello(
        versions=(Version(*limits.PROTOCOL_VERSION),),
        run=run,
        software=software(),
        clock_ms=int(time.time() * 1000),
        engine=descriptor,
    )


async def _refuse_request(body: bytes) -> bytes:
    raise RemoteError(Code.UNEXPECTED_MESSAGE, "a node answers no requests on this protocol")


def clock_advice(seconds_ahead: float) -> str:
    """What to do about a clock that is off."""
    size = abs(seconds_ahead)
    amount = (
        f"{size / 3600:.1f} hours" if size >= 5400 else f"{size / 60:.0f} minutes" if size >= 90 else f"{size:.0f} s"
    )
    side = "ahead of" if seconds_ahead > 0 else "behind"
    return (
        f"this machine's clock is {amount} {side} the trainer's (at most {limits.MAX_CLOCK_SKEW_SECONDS} s are "
        "allowed): set it, on Linux with `sudo timedatectl set-ntp true`"
    )


def _summary(verdict: Verdict) -> dict[str, Any]:
    """A verdict in a line of JSON: the failed check with its value, limit and span where there is one."""
    failed = next((check for check in verdict.checks if check.reason is not None), None)
    found: dict[str, Any] = {
        "trace": verdict.trace_digest.hex(),
        "lease": verdict.lease_id.hex(),
        "slot": verdict.slot,
        "outcome": str(verdict.outcome),
        "reason": None if verdict.reason is None else str(verdict.reason),
        "audited": verdict.audited,
        "reward": verdict.reward,
        "detail": "",
    }
    if failed is not None:
        found |= {"detail": failed.detail, "check": failed.name, "value": failed.value, "limit": failed.limit}
        found |= {"start": failed.start, "end": failed.end}
    return found
