"""Where pieces of a policy come from, and what is remembered of each source.

A source is a peer (the trainer or another node, over the blob protocol) or a mirror (mirror.py). Nothing that
comes out of one has been checked. Not here: which source is asked for what (pieces.py, swarm.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import trio

from protocol import limits, messages
from protocol.envelope import Signed
from protocol.errors import Code, DecodeError, NetError, RemoteError, Unreachable, UsageError
from protocol.identity import peer_id
from protocol.net.base import Address, Host, Stream
from protocol.net.session import Session
from protocol.policy import Blob

Reply = TypeVar("Reply")

_NEW_WEIGHT: Final = 0.3  # of the newest measurement in the mean rate
_DIRECT_SECONDS: Final = 2.0  # a node that can be dialled answers sooner; others are asked for through their relay
GUESSED_RATE: Final = 1_000_000.0  # bytes a second of a source nobody has tried: a home line's upload


class Source(Protocol):
    """Somebody who has pieces."""

    @property
    def name(self) -> str:
        """Who is to blame, for a person; distinct among sources."""

    async def fetch(self, blob: Blob, *, seconds: float) -> bytes:
        """The bytes it has for this digest, not checked. Raises NetError or RemoteError."""

    async def holds(self, digests: Sequence[bytes]) -> set[bytes] | None:
        """Which of these it has; None: ask it for any. Raises NetError or RemoteError."""

    async def manifest(self, version: int | None = None) -> Signed:
        """Of a version, or the newest it has; not checked. Raises NetError or RemoteError."""


@dataclass(slots=True)
class Record:
    """What is remembered of a source, across downloads. Times are trio's."""

    rate: float | None = None  # bytes a second of one request, a running mean
    failures: int = 0  # in a row
    rests_until: float = 0.0
    guess: float = GUESSED_RATE  # until it has been tried

    def expected_seconds(self, length: int) -> float:
        return length / (self.rate or self.guess)

    def worked(self, length: int, seconds: float) -> None:
        rate = length / max(seconds, 0.001)
        self.rate = rate if self.rate is None else self.rate + _NEW_WEIGHT * (rate - self.rate)
        self.failures = 0

    def failed(self, now: float, first: float, most: float) -> None:
        """Leave it alone for a while, longer each time: `first` seconds, doubled up to `most`."""
        if now < self.rests_until:
            return  # several requests that failed together are one failure
        self.rests_until = now + min(most, first * 2.0 ** min(self.failures, 32))
        self.failures += 1

    def busy(self, now: float, seconds: float) -> None:
        """It has enough to do: no failure."""
        self.rests_until = max(self.rests_until, now + seconds)

    def banned(self, now: float, seconds: float) -> None:
        self.failures += 1
        self.rests_until = now + seconds


@dataclass(slots=True)
class PeerSource:
    """One peer over one long-lived session, opened when first needed and again after a fault."""

    nursery: trio.Nursery
    host: Host
    node: bytes
    addresses: tuple[str, ...]  # with /p2p/, tried in turn
    dial_seconds: float
    has_all: bool = False  # the trainer: whatever it signed, it has
    on_have: Callable[[messages.Have], None] | None = None  # told of what it has only now
    on_announce: Callable[[messages.Announce], None] | None = None  # told of policies it heard of
    name: str = ""
    relay: bytes | None = None  # whom the last connection went through, if through anybody
    _session: Session | None = None
    _asked: int = 0  # requests of this session that wait for an answer
    _opening: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        self.name = self.name or peer_id(self.node)

    async def fetch(self, blob: Blob, *, seconds: float) -> bytes:
        what = f"fetching a piece of the policy from {self.name}"
        return (await self._ask(messages.GetBlob(blob.digest), messages.BlobReply, seconds, what)).data

    async def holds(self, digests: Sequence[bytes]) -> set[bytes] | None:
        if self.has_all:
            return None
        found: set[bytes] = set()
        # The first ones alone are told of later: a longer list is asked again before it matters.
        for first in reversed(range(0, len(digests), limits.MAX_HAVES)):
            asked = tuple(digests[first : first + limits.MAX_HAVES])
            what = f"asking {self.name} which pieces it has"
            reply = await self._ask(messages.GetHaves(asked), messages.Haves, limits.REQUEST_SECONDS, what)
            found.update(set_bits(reply.bitmap, asked))
        return found

    async def manifest(self, version: int | None = None) -> Signed:
        what = f"asking {self.name} for {'the newest policy it has' if version is None else f'policy {version}'}"
        request = messages.GetManifest(version)
        return (await self._ask(request, messages.ManifestReply, limits.REQUEST_SECONDS, what)).manifest

    async def meet(self, request: messages.GetPeers) -> messages.PeersReply:
        """Introduce oneself; whom it knows."""
        return await self._ask(request, messages.PeersReply, limits.REQUEST_SECONDS, f"meeting {self.name}")

    async def announce(self, body: bytes) -> None:
        """Pass an Announce on, if there is a session. Never raises."""
        if self._session is not None:
            with contextlib.suppress(NetError):
                await self._session.notify(body)

    async def _ask(self, request: object, cls: type[Reply], seconds: float, what: str) -> Reply:
        session = await self._open()
        self._asked += 1
        try:
            reply = await session.request(messages.pack(request), seconds=seconds, what=what)
        except NetError:
            await self._drop(session)
            raise
        finally:
            self._asked -= 1
        return messages.expect(cls, reply)

    async def _open(self) -> Session:
        async with self._opening:
            if self._session is not None and self._has_way_around():
                await self._drop(self._session)
            if self._session is None:
                self._session = Session(await self._dial())
                self.nursery.start_soon(self._run, self._session)
            return self._session

    def _has_way_around(self) -> bool:
        """Whether this session goes through a relay and, a hole being punched, need not any more."""
        return self.relay is not None and not self._asked and not self.host.is_relayed(self.node)

    async def _dial(self) -> Stream:
        """Directly if that is answered soon; through a relay else."""
        failure: NetError | None = None
        ways = sorted(self.addresses, key=_is_circuit)
        for address, following in itertools.zip_longest(ways, ways[1:]):
            is_soon = following is not None and _is_circuit(following)
            seconds = min(self.dial_seconds, _DIRECT_SECONDS) if is_soon else self.dial_seconds
            try:
                stream = await self.host.open(address, messages.BLOB_PROTOCOL, seconds=seconds)
                self.relay = Address.parse(address).relay if self.host.is_relayed(self.node) else None
                return stream
            except UsageError as error:  # an address that this host cannot dial
                failure = Unreachable(str(error))
            except NetError as error:
                failure = error
        raise failure or Unreachable(f"{self.name} has no address")

    async def _run(self, session: Session) -> None:
        with contextlib.suppress(NetError, RemoteError):  # whoever waits on a request is told
            await session.run(_refuse_request, self._on_notice)
        await self._drop(session)

    async def _on_notice(self, body: bytes) -> None:
        with contextlib.suppress(RemoteError):  # a notice has no answer; what is none costs nobody a line in a log
            match messages.open_body(body):
                case messages.Have() as have if self.on_have is not None:
                    self.on_have(have)
                case messages.Announce() as announce if self.on_announce is not None:
                    self.on_announce(announce)

    async def _drop(self, session: Session) -> None:
        if self._session is session:
            self._session = None
            await session.close()


def _is_circuit(address: str) -> bool:
    return "/p2p-circuit/" in address


async def _refuse_request(body: bytes) -> bytes:
    raise RemoteError(Code.UNEXPECTED_MESSAGE, "this node answers no requests on a stream that it opened")


def bitmap(answers: Sequence[bool]) -> bytes:
    """SPEC 9.6: bit i answers for digest i, high bit first."""
    packed = bytearray(-(-len(answers) // 8))
    for place, answer in enumerate(answers):
        packed[place >> 3] |= answer << (7 - (place & 7))
    return bytes(packed)


def set_bits(packed: bytes, digests: Sequence[bytes]) -> set[bytes]:
    """The digests whose bit is set. Raises DecodeError when the bitmap is not of that many bits."""
    # SPEC 9.6: a bitmap of another length is MALFORMED.
    if len(packed) != -(-len(digests) // 8):
        raise DecodeError(Code.MALFORMED, f"a bitmap of {len(packed)} bytes answers for {len(digests)} blobs")
    return {digest for place, digest in enumerate(digests) if packed[place >> 3] >> (7 - (place & 7)) & 1}
