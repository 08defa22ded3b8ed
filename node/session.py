"""The conversation with the trainer: connect, hello, then everything at once until the connection breaks, and
again, for ever.

    hello ─► heartbeats · leases · submissions · returns · new policies     (SPEC 9)

A trainer may be away for any time: what was drawn waits on the disk and is sent again. Not here: drawing
(worker.py), sending traces (submit.py), fetching policies (weights.py), the wire (protocol/messages.py).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import trio

from node import reaudit
from node.asking import FATAL, LATER, Asker
from node.config import NodeConfig
from node.failures import foremost
from node.leases import GiveBack
from node.peers import PeerExchange
from node.report import Event, Level, Report, Status
from node.store import RunStore
from node.submit import Submitter
from node.verdicts import Verdicts
from node.weights import PolicyFollower
from node.worker import Worker, software
from protocol import limits, messages
from protocol.errors import Code, NetError, Refused, RemoteError
from protocol.identity import peer_id
from protocol.messages import Version
from protocol.net.backoff import backoff
from protocol.net.base import Host
from protocol.net.session import Session
from protocol.run import RunAddress, open_genesis
from protocol.trace import EngineDescriptor

_SHORTEST_RETRY_MS: Final = 50
_CAUSES: Final = 16  # told of one stretch without work
_NUMBER: Final = re.compile(r"\d+")
_IDLE_SECONDS: Final = 10.0  # a learner's step takes less, and during one there may be nothing to draw
_LASTING_SECONDS: Final = 30.0  # a session that held so long was a good one: the next try comes soon
_TAKE_OVERS: Final = 3
_TAKE_OVER_SECONDS: Final = 600.0
_LONG_READING_SECONDS: Final = 5.0
_GOODBYE_SECONDS: Final = 1.0


class TrainerClock:
    """The trainer's time, from its last message and this machine's steady clock: deadlines are in it."""

    def __init__(self) -> None:
        self._offset_ms: float | None = None  # trainer's Unix time less our monotonic clock

    def now_ms(self) -> int:
        if self._offset_ms is None:
            return int(time.time() * 1000)
        return int(time.monotonic() * 1000 + self._offset_ms)

    def learn(self, their_ms: int, began: float, ended: float) -> float:
        """Take a reading made between two readings of `time.monotonic`; one that took long says little and is
        only taken as the first. Returns by how many seconds this machine's own clock is ahead."""
        middle = (began + ended) / 2
        if self._offset_ms is None or ended - began < _LONG_READING_SECONDS:
            self._offset_ms = their_ms - middle * 1000
        return time.time() - time.monotonic() + middle - their_ms / 1000


@dataclass(frozen=True, slots=True)
class Parts:
    """What a session feeds and is fed by."""

    store: RunStore
    worker: Worker
    follower: PolicyFollower
    submitter: Submitter
    verdicts: Verdicts
    exchange: PeerExchange


class TrainerLink:
    """Keeps a session with the trainer."""

    def __init__(
        self,
        address: RunAddress,
        host: Host,
        config: NodeConfig,
        parts: Parts,
        clock: TrainerClock,
        report: Report,
        status: Status,
        random: Random,
    ) -> None:
        self._address = address
        self._host = host
        self._dial_seconds = config.dial_seconds
        self._store = parts.store
        self._worker = parts.worker
        self._follower = parts.follower
        self._submitter = parts.submitter
        self._verdicts = parts.verdicts
        self._exchange = parts.exchange
        self._clock = clock
        self._report = report
        self._status = status
        self._random = random
        self._take_overs: list[float] = []  # times at which the trainer called this session superseded
        self._idle_since: float | None = None
        self._idle_noted: set[str] = set()  # causes said to a script since then; to a person
        self._idle_told: set[str] = set()

    # --- connecting ---

    async def run(self) -> None:
        """Talk for ever, once there is an engine. Raises RemoteError for what waiting does not heal (FATAL)."""
        await self._worker.described.wait()
        delays = backoff(self._random)
        while True:
            self._status.state = "connecting"
            began = trio.current_time()
            try:
                with foremost():
                    await self._one_session()
            except (NetError, RemoteError) as error:
                if isinstance(error, RemoteError) and (error.code in FATAL or self._taken_over(error)):
                    raise
                if trio.current_time() - began > _LASTING_SECONDS:
                    delays = backoff(self._random)
                delay = next(delays)
                self._lost(error, delay)
                await trio.sleep(delay)

    def _taken_over(self, error: RemoteError) -> bool:
        """SPEC 9.3: one session a key. Once may be this node itself, after a lost connection; again and again is
        another machine with the same key, and two that take turns get nothing done."""
        if error.code != Code.UNEXPECTED_MESSAGE:
            return False
        now = trio.current_time()
        self._take_overs = [each for each in self._take_overs if now - each < _TAKE_OVER_SECONDS] + [now]
        return len(self._take_overs) >= _TAKE_OVERS

    def _lost(self, error: Exception, delay: float) -> None:
        self._status.connected, self._status.lost_because = False, str(error)
        waiting = f", {len(self._store.unsent)} traces wait" if self._store.unsent else ""
        text = f"{error}; next try in {delay:.1f} s{waiting}"
        self._say("disconnected", text, Level.WARNING, retry_seconds=round(delay, 2))

    async def _one_session(self) -> None:
        stream = await self._host.open(self._address.dial, messages.SESSION_PROTOCOL, seconds=self._dial_seconds)
        session = Session(stream)
        asker = Asker(session, self._report, self._random)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run, _refuse_request, self._on_notice)
                await self._hello(asker)
                lasting = (self._heartbeats, self._ask_leases, self._submitter.run, self._return_leases)
                for each in (*lasting, self._exchange.run):
                    nursery.start_soon(each, asker)
                nursery.start_soon(reaudit.serve, self._store.folder, asker, self._report)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
                await session.close()

    async def _hello(self, asker: Asker) -> None:
        assert self._worker.descriptor is not None
        began = time.monotonic()
        hello = hello_of(self._address.run, self._worker.descriptor)
        welcome = await asker.once(hello, messages.Welcome, "greeting the trainer")
        # SPEC 9.2: a node joins the run it was told, of the trainer it was told, and no other.
        genesis = open_genesis(welcome.genesis, run=self._address.run, trainer=self._address.trainer)
        ours = Version(*limits.PROTOCOL_VERSION)
        messages.negotiate((welcome.version,), ours, their_name="the trainer", our_name="this node")
        # SPEC 9.2: clocks MUST agree within MAX_CLOCK_SKEW_SECONDS, because deadlines are in Unix time.
        ahead = self._clock.learn(welcome.clock_ms, began, time.monotonic())
        if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS:
            raise RemoteError(Code.CLOCK_SKEW, clock_advice(ahead))
        self._worker.trainer_software = welcome.software
        self._follower.offer(welcome.manifest)
        self._joined(genesis.name, welcome)

    def _joined(self, name: str, welcome: messages.Welcome) -> None:
        self._status.connected, self._status.lost_because = True, ""
        self._status.state = "connected" if self._status.policy_version is None else "drawing"
        text = (
            f"joined run '{name}' at {peer_id(self._address.trainer)} ({welcome.software}, protocol "
            f"{welcome.version}), policy {self._follower.highest}"
        )
        self._say("connected", text, run=self._address.run.hex(), policy_version=self._follower.highest)

    async def _on_notice(self, body: bytes) -> None:
        self._follower.offer(messages.expect(messages.Announce, body).manifest)

    # --- heartbeats ---

    async def _heartbeats(self, asker: Asker) -> None:
        while True:
            began = time.monotonic()
            reply = await asker.patiently(self._beat(), messages.HeartbeatReply, "sending a heartbeat")
            ahead = self._clock.learn(reply.clock_ms, began, time.monotonic())
            if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS:
                self._say("clock", clock_advice(ahead), Level.WARNING, seconds_ahead=round(ahead, 1))
            await self._verdicts.note(reply.verdicts, reply.verdict_cursor)
            if reply.latest_version > self._follower.highest:
                what = "asking for the newest policy"
                newest = await asker.patiently(messages.GetManifest(None), messages.ManifestReply, what)
                self._follower.offer(newest.manifest)
            if len(reply.verdicts) < limits.MAX_VERDICTS_PER_REPLY:
                await trio.sleep(limits.HEARTBEAT_SECONDS)

    def _beat(self) -> messages.Heartbeat:
        return messages.Heartbeat(
            clock_ms=int(time.time() * 1000),
            policy_version=self._status.policy_version,
            tokens_per_second=self._status.tokens.rate(),
            slots_busy=self._status.slots_busy,
            slots_total=self._status.slots_total,
            slots_waiting=min(self._status.turns_waiting, 65_535),
            cache_percent=None if self._status.cache_used is None else round(100 * min(1.0, self._status.cache_used)),
            unsent_traces=len(self._store.unsent),
            verdict_cursor=self._store.verdict_cursor,
        )

    # --- leases ---

    async def _ask_leases(self, asker: Asker) -> None:
        """Whenever there is room. An empty answer is waited out, or until a newer policy is here."""
        delays = asker.delays()
        while True:
            changed = self._worker.wants_leases
            room, versions = self._worker.room(), self._worker.versions()
            if not room or not versions:
                await changed.wait()
                continue
            try:
                reply = await self._take_leases(asker, messages.GetLeases(min(room, 4096), versions))
            except Refused as error:
                if error.code not in LATER:
                    raise
                # Not the same question again: by then room and versions are others.
                reply = messages.LeasesReply((), int(next(delays) * 1000), str(error))
            self._worker.got_nothing = not reply.leases
            if reply.leases:
                delays, self._idle_since = asker.delays(), None
            else:
                await self._wait_for_leases(reply, versions)

    async def _take_leases(self, asker: Asker, request: messages.GetLeases) -> messages.LeasesReply:
        self._worker.asking = True
        try:
            reply = await asker.once(request, messages.LeasesReply, "asking for leases")
            for signed in reply.leases:
                await self._worker.take(signed)
            return reply
        finally:
            self._worker.asking = False
            self._worker.wake()

    async def _wait_for_leases(self, reply: messages.LeasesReply, versions: tuple[int, ...]) -> None:
        self._tell_idle(reply)
        with trio.move_on_after(max(reply.retry_ms, _SHORTEST_RETRY_MS) / 1000):
            while self._worker.versions() == versions:
                await self._worker.wants_leases.wait()

    def _tell_idle(self, reply: messages.LeasesReply) -> None:
        """Why there is nothing to do: to a script at once, to a person when it lasts; each cause once."""
        now, cause = trio.current_time(), _NUMBER.sub("#", reply.cause)
        if self._idle_since is None:
            self._idle_since, self._idle_noted, self._idle_told = now, set(), set()
        if cause not in self._idle_noted and len(self._idle_noted) < _CAUSES:
            self._idle_noted.add(cause)
            self._say("no_leases", f"no lease now: {reply.cause}", Level.DETAIL, retry_ms=reply.retry_ms)
        if cause in self._idle_noted - self._idle_told and now - self._idle_since > _IDLE_SECONDS:
            self._idle_told.add(cause)
            self._say("idle", f"nothing to draw for {now - self._idle_since:.0f} s: {reply.cause}")

    async def _return_leases(self, asker: Asker) -> None:
        while True:
            news = self._worker.has_news
            for give_back in self._worker.book.returns():
                await self._return(asker, give_back)
            await news.wait()

    async def _return(self, asker: Asker, give_back: GiveBack) -> None:
        request = messages.ReturnLease(give_back.lease_id, give_back.cause[: limits.MAX_TEXT_CHARACTERS])
        try:
            await asker.patiently(request, messages.Returned, "giving a lease back")
        except Refused as error:
            if error.code in FATAL:
                raise
            self._say("return_refused", f"the trainer did not take a lease back: {error}", Level.WARNING)
        self._worker.book.returned(give_back)
        self._store.drop_lease(give_back.lease_id)
        self._status.leases_returned += 1
        self._worker.wake()

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
        if self.unsent:
            self._say("resumed", f"{self.unsent} traces of an earlier run of this node wait to be sent")

    @property
    def unsent(self) -> int:
        """Traces without a receipt."""
        return len(self._store.unsent)

    async def flush(self) -> None:
        """Wait until everything is sent and given back, or the connection is gone. A lease that is on its way here is
        given back too."""
        while self._status.connected and (
            self._store.unsent or self._worker.asking or not self._worker.book.is_empty()
        ):
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
    if size >= 5_400:
        amount = f"{size / 3600:.1f} hours"
    else:
        amount = f"{size / 60:.0f} minutes" if size >= 90 else f"{size:.0f} s"
    side = "ahead of" if seconds_ahead > 0 else "behind"
    return (
        f"this machine's clock is {amount} {side} the trainer's (at most {limits.MAX_CLOCK_SKEW_SECONDS} s are "
        "allowed): set it, on Linux with `sudo timedatectl set-ntp true`"
    )
