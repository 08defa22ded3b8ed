"""A meeting point and relay for one run: where its nodes find each other while the trainer is away, and are reached.

`rlnode relay ADDRESS` on a machine with a public address. It knows whoever is connected and shows the trainer's word
(SPEC 8.13), passes on what the trainer signed, and holds no policy. Not here: what it may cost (RelayLimits).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import trio

from node.peers import Circle, PeerBook
from node.report import Event, Level, Report
from protocol import limits, messages
from protocol.envelope import unseal
from protocol.errors import Code, DecodeError, NetError, Refused, RemoteError
from protocol.identity import peer_id
from protocol.net.base import Host, HostStatistics, RelayLimits, Stream
from protocol.net.session import Session
from protocol.policy import Manifest
from protocol.run import RunAddress

_STREAMS_PER_NODE: Final = 2  # the old one may linger beside its successor
_QUESTIONS_AT_ONCE: Final = 4  # of one node
_ANNOUNCED_TO: Final = 64  # nodes told at once of a new policy; they tell the others
_ANNOUNCEMENTS: Final = 8  # of one stream in a while: a signature costs time to check
_WHILE_SECONDS: Final = 10.0
_FIGURES_SECONDS: Final = 60.0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class MeetingPoint:
    """Answers GetPeers on the blob protocol of one host, from members of one run."""

    def __init__(self, address: RunAddress, ours: bytes, report: Report, now_ms: Callable[[], int] = _now_ms) -> None:
        self._address = address
        self._report = report
        self._now_ms = now_ms
        self.book = PeerBook(None, ours, Circle(address.run, address.trainer, now_ms))
        self._sessions: dict[Session, None] = {}
        self._streams: Counter[bytes] = Counter()
        self._highest = -1  # version passed on
        self._nursery: trio.Nursery | None = None

    async def run(self, host: Host, limits_: RelayLimits, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            host.serve(messages.BLOB_PROTOCOL, self._stream)
            host.relay(limits_, self.book.is_admitted)
            task_status.started()
            while True:
                await trio.sleep(_FIGURES_SECONDS)
                self._report(figures(host.statistics(), len(self._sessions)))

    async def _stream(self, stream: Stream) -> None:
        node = stream.peer
        if self._streams[node] >= _STREAMS_PER_NODE:
            await stream.reset()
            return
        self._streams[node] += 1
        session = Session(stream, at_once=_QUESTIONS_AT_ONCE)
        try:
            await self._serve(session)
        except (NetError, RemoteError):
            pass  # it left, or it broke the protocol and was told
        finally:
            self._sessions.pop(session, None)
            self._streams[node] -= 1
            if not self._streams[node]:
                del self._streams[node]
                self.book.leave(node)

    async def _serve(self, session: Session) -> None:
        async def answer(body: bytes) -> bytes:
            return messages.pack(self._answer(session, messages.open_body(body)))

        budget = _ANNOUNCEMENTS
        since = trio.current_time()

        async def on_notice(body: bytes) -> None:
            nonlocal budget, since
            if trio.current_time() - since > _WHILE_SECONDS:
                budget, since = _ANNOUNCEMENTS, trio.current_time()
            budget -= 1
            if budget >= 0 and session in self._sessions:
                with contextlib.suppress(DecodeError):  # a notice has no answer
                    self._pass_on(session, messages.expect(messages.Announce, body))

        await session.run(answer, on_notice)

    def _answer(self, session: Session, request: Any) -> messages.PeersReply:
        if not isinstance(request, messages.GetPeers):
            raise Refused(Code.UNEXPECTED_MESSAGE, f"a meeting point does not answer {type(request).__name__}")
        self.book.show(session.peer, request.membership)
        # SPEC 9.7: a meeting point answers only who shows the trainer's word.
        if not self.book.is_admitted(session.peer):
            raise Refused(Code.BUSY, "show the trainer's word that you are of its run: it comes with its list of nodes")
        self._sessions[session] = None
        return self.book.meet(session.peer, request)

    def _pass_on(self, sender: Session, announce: messages.Announce) -> None:
        try:
            manifest = unseal(Manifest, announce.manifest, signer=self._address.trainer)
        except RemoteError as error:
            text = f"{peer_id(sender.peer)} announced what the trainer did not sign: {error}"
            self._report(Event("announce_wrong", text, Level.WARNING, {"peer": peer_id(sender.peer)}))
            del self._sessions[sender]  # heard no more
            return
        is_ours = manifest.run == self._address.run and manifest.expires_ms > self._now_ms()
        if not is_ours or manifest.version <= self._highest:
            return
        self._highest = manifest.version
        body = messages.pack(announce)
        assert self._nursery is not None
        for session in [each for each in self._sessions if each is not sender][:_ANNOUNCED_TO]:
            self._nursery.start_soon(_notify, session, body)


async def _notify(session: Session, body: bytes) -> None:
    if len(body) <= limits.MAX_NOTICE_BYTES:
        try:
            await session.notify(body)
        except NetError:
            return  # its own stream says so


def figures(found: HostStatistics, members: int) -> Event:
    """How it goes, for a person and for a script."""
    text = (
        f"{members} nodes met, {found.reservations} reached through here, {found.circuits} circuits now, "
        f"{found.relayed_bytes / 1e6:,.1f} MB relayed"
    )
    values = {
        "members": members,
        "reservations": found.reservations,
        "circuits": found.circuits,
        "relayed_bytes": found.relayed_bytes,
        "relay_refusals": found.relay_refusals,
        "bytes_out": found.bytes_out,
    }
    return Event("relaying", text, Level.INFO, values)
