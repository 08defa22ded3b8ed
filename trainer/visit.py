"""One node's session: hello, then what it may ask (SPEC 9.2 to 9.4).

Not here: streams and the other sessions (gateway.py), what the answers are made of (leasing.py, inbox.py).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from protocol import codec, limits, messages
from protocol.envelope import Signed, seal
from protocol.errors import Code, Refused, StorageError, UsageError
from protocol.messages import Version
from protocol.net.session import Session
from protocol.run import Membership
from trainer import reaudit
from trainer.inbox import Arrival
from trainer.naming import show_rates
from trainer.office import software
from trainer.pairs import pair_name, pair_of
from verify.thresholds import limits_for

if TYPE_CHECKING:
    from trainer.gateway import Gateway

REQUESTS_AT_ONCE: Final = 32  # of one node
MEMBERSHIP_DAYS: Final = 7  # longer than a trainer is away without its nodes being told
VERDICT_BYTES: Final = 2 * 1024 * 1024  # of verdicts in one reply


class Visit:
    """The state of one session: before hello, then a node that is known."""

    def __init__(self, gateway: Gateway, session: Session) -> None:
        self._gateway = gateway
        self._office = gateway.office
        self.session = session
        self.node = session.peer
        self.met = False
        self.ended_because = ""
        self._in_work = 0
        self._answers: dict[type, Any] = {
            messages.GetManifest: self._manifest,
            messages.GetLeases: self._leases,
            messages.ReturnLease: self._return,
            messages.Submit: self._submit,
            messages.Heartbeat: self._beat,
            messages.AskAudit: self._ask_audit,
            messages.GetPeers: self._peers,
        }

    async def answer(self, body: bytes) -> bytes:
        """The reply to a request. Raises RemoteError for an error reply."""
        received_ms = self._office.clock()
        request = messages.open_body(body)
        if self.ended_because:
            raise Refused(Code.UNEXPECTED_MESSAGE, self.ended_because)
        if isinstance(request, messages.Hello):
            return messages.pack(await self._hello(request, received_ms))
        answer = self._answers.get(type(request))
        if answer is None:
            raise Refused(Code.UNEXPECTED_MESSAGE, f"a trainer does not answer {type(request).__name__} here")
        if not self.met:
            raise Refused(Code.UNEXPECTED_MESSAGE, f"{type(request).__name__} came before Hello")
        if self._in_work >= REQUESTS_AT_ONCE:
            raise Refused(Code.BUSY, f"{self._in_work} requests of this node are in work: wait for answers")
        self._in_work += 1
        try:
            return messages.pack(await answer(request, received_ms))
        except StorageError as error:
            self._gateway.storage_failed(str(error))
            raise Refused(Code.BUSY, f"the trainer cannot write now: {error}") from error
        finally:
            self._in_work -= 1

    async def _hello(self, hello: messages.Hello, received_ms: int) -> messages.Welcome:
        """SPEC 9.2: versions first, for a peer of another version may mean other things by the rest."""
        version = messages.negotiate(
            hello.versions, Version(*limits.PROTOCOL_VERSION), their_name="this node", our_name="the trainer"
        )
        run = self._office.run
        if hello.run != run.run:
            raise Refused(
                Code.WRONG_RUN,
                f"this trainer serves run {run.run.hex()[:16]}… ({run.genesis.name}), the node asks for "
                f"{hello.run.hex()[:16]}…: copy the address that `rltrainer serve` prints now",
            )
        check_clock(hello.clock_ms, received_ms)
        check_engine(hello.engine.dtype)
        described = f"{hello.engine.name} {hello.engine.version} {hello.engine.dtype} {hello.engine.device}"
        ledger = self._gateway.writer

        def note() -> None:
            ledger.see_node(self.node, received_ms, hello.software, described)
            known = pair_name(pair_of(hello.engine, run.config)) in ledger.calibrated_pairs()
            show_rates(ledger, run.config, [self.node], known=known)

        await self._office.clerk.do(note)
        await self._gateway.met(self)
        manifest = self._office.shelf.manifest()
        assert manifest is not None
        return messages.Welcome(version, software(), run.signed_genesis, manifest, self._office.clock())

    async def _manifest(self, request: messages.GetManifest, received_ms: int) -> messages.ManifestReply:
        return self._gateway.manifest(request.version)

    async def _leases(self, request: messages.GetLeases, received_ms: int) -> messages.LeasesReply:
        self._gateway.check_room()
        # A node asks for leases of a policy as soon as it has it; the next heartbeat may be ten seconds away.
        self._gateway.note_versions(self.node, request.versions, received_ms)
        connected = self._gateway.connected()
        return await self._office.clerk.do(
            lambda: self._office.leasing.lease(self.node, request, connected, received_ms)
        )

    async def _return(self, request: messages.ReturnLease, received_ms: int) -> messages.Returned:
        await self._office.clerk.do(lambda: self._office.leasing.give_back(self.node, request.lease_id))
        return messages.Returned()

    async def _submit(self, request: messages.Submit, received_ms: int) -> messages.Submitted:
        self._gateway.check_room()
        arrival = Arrival(request.trace, self.node, received_ms, request.timing)
        reply = await self._office.clerk.do(lambda: self._office.inbox.receive(arrival))
        self._office.judge.wake()
        return reply

    async def _ask_audit(self, request: messages.AskAudit, received_ms: int) -> messages.AuditAsked:
        self._gateway.check_room()
        ledger, shelf = self._gateway.writer, self._office.shelf
        return await self._office.clerk.do(lambda: reaudit.ask(ledger, shelf, self.node, request.digest, received_ms))

    async def _beat(self, request: messages.Heartbeat, received_ms: int) -> messages.HeartbeatReply:
        self._gateway.beats[self.node] = (received_ms, request)
        if request.policy_version is not None:
            self._gateway.note_versions(self.node, (request.policy_version,), received_ms)
        found = self._office.ledger.verdicts_after(self.node, request.verdict_cursor, limits.MAX_VERDICTS_PER_REPLY)
        # SPEC 9.1: a sender keeps each frame within the limit.
        sizes = itertools.accumulate(len(signed) for _, signed in found)
        found = [row for row, size in zip(found, sizes, strict=True) if size <= VERDICT_BYTES or row is found[0]]
        return messages.HeartbeatReply(
            clock_ms=self._office.clock(),
            latest_version=self._office.shelf.latest,
            verdicts=tuple(codec.reopen(Signed, signed) for _, signed in found),
            verdict_cursor=found[-1][0] if found else request.verdict_cursor,
        )

    async def _peers(self, request: messages.GetPeers, received_ms: int) -> messages.PeersReply:
        self._gateway.peers.note(self.node, request)
        membership = Membership(self._office.run.run, self.node, received_ms + MEMBERSHIP_DAYS * 86_400_000)
        chosen = self._gateway.peers.choose(self.node, request)
        return messages.PeersReply(chosen, seal(self._office.signer, membership))


def check_clock(theirs_ms: int, ours_ms: int) -> None:
    """SPEC 9.2: deadlines are in Unix time, so clocks must agree. Raises Refused(CLOCK_SKEW)."""
    ahead = (theirs_ms - ours_ms) / 1000
    if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        raise Refused(
            Code.CLOCK_SKEW,
            f"this node's clock is {abs(ahead):,.0f} s {where} the trainer's, {limits.MAX_CLOCK_SKEW_SECONDS} s are "
            "allowed: set the clock (timedatectl set-ntp true)",
        )


def check_engine(dtype: str) -> None:
    """A node whose dtype nobody measured could not be audited. Raises Refused(ENGINE_NOT_ADMITTED)."""
    try:
        limits_for(dtype, dtype)
    except UsageError as error:
        raise Refused(Code.ENGINE_NOT_ADMITTED, str(error)) from None
