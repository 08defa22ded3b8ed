"""One frozen dataclass a request, reply or notice, and their numbers (SPEC 9).

A body on a session is `u8 message number ‖ canonical object`. Requests end in a verb's name, the
reply follows; producers and consumers stand in each docstring. Not here: framing (net/session.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from protocol import codec, limits
from protocol.envelope import Signed
from protocol.errors import Code, DecodeError
from protocol.trace import EngineDescriptor

SESSION_PROTOCOL: Final = "/rlcommons/session/1"
BLOB_PROTOCOL: Final = "/rlcommons/blobs/1"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the wire protocol. Equal major numbers understand each other."""

    major: Annotated[int, codec.UInt(65_535)]
    minor: Annotated[int, codec.UInt(65_535)]

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class Hello:
    """node → trainer, first of a session. Its layout never changes, in any version (SPEC 9.2)."""

    versions: Annotated[tuple[Version, ...], codec.Many(codec.Object(Version), 16)]
    run: Annotated[bytes, codec.Bytes(32)]
    software: Annotated[str, codec.Text(64)]
    clock_ms: Annotated[int, codec.UInt()]
    engine: Annotated[EngineDescriptor, codec.Object(EngineDescriptor)]


@dataclass(frozen=True, slots=True)
class Welcome:
    """trainer → node, reply to Hello."""

    version: Annotated[Version, codec.Object(Version)]
    software: Annotated[str, codec.Text(64)]
    genesis: Annotated[Signed, codec.Object(Signed)]
    manifest: Annotated[Signed, codec.Object(Signed)]
    clock_ms: Annotated[int, codec.UInt()]


@dataclass(frozen=True, slots=True)
class GetManifest:
    """node → trainer; on the blob protocol node → node. `version` nil asks for the latest there is."""

    version: Annotated[int | None, codec.Maybe(codec.UInt())]


@dataclass(frozen=True, slots=True)
class ManifestReply:
    """trainer → node; on the blob protocol node → node."""

    manifest: Annotated[Signed, codec.Object(Signed)]


@dataclass(frozen=True, slots=True)
class Announce:
    """trainer → node, notice; on the blob protocol node → node: a new policy is out."""

    manifest: Annotated[Signed, codec.Object(Signed)]


@dataclass(frozen=True, slots=True)
class GetLeases:
    """node → trainer: room for `slots` more completions under one of the policy `versions` it holds."""

    slots: Annotated[int, codec.UInt(4096)]
    versions: Annotated[tuple[int, ...], codec.Many(codec.UInt(), 64)]


@dataclass(frozen=True, slots=True)
class LeasesReply:
    """trainer → node. Empty: ask again after `retry_ms`, for the `cause` given."""

    leases: Annotated[tuple[Signed, ...], codec.Many(codec.Object(Signed), limits.MAX_LEASES_PER_REPLY)]
    retry_ms: Annotated[int, codec.UInt(600_000)]
    cause: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """node → trainer: the node gives up a lease, says why, and is not held to it."""

    lease_id: Annotated[bytes, codec.Bytes(16)]
    cause: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class Returned:
    """trainer → node."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What a node says a completion's time went to, ms of its own clock, each the sum over all turns. Telemetry:
    nothing is decided by it."""

    waited_ms: Annotated[int, codec.UInt(2**32 - 1)]  # from its lease until it was begun
    slot_ms: Annotated[int, codec.UInt(2**32 - 1)]  # in turns that had no slot of the engine yet
    prefill_ms: Annotated[int, codec.UInt(2**32 - 1)]
    decode_ms: Annotated[int, codec.UInt(2**32 - 1)]
    tool_ms: Annotated[int, codec.UInt(2**32 - 1)]  # the environment's answers


@dataclass(frozen=True, slots=True)
class Submit:
    """node → trainer: one signed trace. Idempotent by the digest of its payload. `timing` is nil where it is no
    longer known: it is not kept with the trace."""

    trace: Annotated[Signed, codec.Object(Signed)]
    timing: Annotated[Timing | None, codec.Maybe(codec.Object(Timing))] = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """trainer → node: the signed receipt (the trace is on the trainer's disk), or, for a trace that
    answers no lease of its signer, only the verdict. A verdict known already comes along."""

    receipt: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))]
    verdict: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """node → trainer, every HEARTBEAT_SECONDS. Telemetry, and the verdicts after `verdict_cursor`."""

    clock_ms: Annotated[int, codec.UInt()]
    policy_version: Annotated[int | None, codec.Maybe(codec.UInt())]  # nil until one is loaded
    tokens_per_second: Annotated[float, codec.Real()]
    slots_busy: Annotated[int, codec.UInt(65_535)]
    slots_total: Annotated[int, codec.UInt(65_535)]
    slots_waiting: Annotated[int, codec.UInt(65_535)]  # turns that the engine has no slot for yet
    cache_percent: Annotated[int | None, codec.Maybe(codec.UInt(100))]  # nil where the engine has no fixed cache
    unsent_traces: Annotated[int, codec.UInt(2**32 - 1)]
    verdict_cursor: Annotated[int, codec.UInt()]


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """trainer → node."""

    clock_ms: Annotated[int, codec.UInt()]
    latest_version: Annotated[int, codec.UInt()]
    verdicts: Annotated[tuple[Signed, ...], codec.Many(codec.Object(Signed), limits.MAX_VERDICTS_PER_REPLY)]
    verdict_cursor: Annotated[int, codec.UInt()]


@dataclass(frozen=True, slots=True)
class GetBlob:
    """either way, on the blob protocol."""

    digest: Annotated[bytes, codec.Bytes(32)]


@dataclass(frozen=True, slots=True)
class BlobReply:
    """either way, on the blob protocol. The asker checks the digest before it stores a byte."""

    data: Annotated[bytes, codec.Bytes(1, limits.MAX_BLOB_BYTES)]


@dataclass(frozen=True, slots=True)
class AskAudit:
    """node → trainer: have a refused trace audited again, by another auditor."""

    digest: Annotated[bytes, codec.Bytes(32)]


@dataclass(frozen=True, slots=True)
class AuditAsked:
    """trainer → node: whether it will be. The verdict then comes with a heartbeat; `text` says what to expect."""

    granted: Annotated[bool, codec.Flag()]
    text: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that others may fetch from: where it is reached, and the policy versions it holds whole."""

    node: Annotated[bytes, codec.Bytes(32)]
    addresses: Annotated[tuple[str, ...], codec.Many(codec.Text(limits.MAX_NAME_CHARACTERS), limits.MAX_PEER_ADDRESSES)]
    versions: Annotated[tuple[int, ...], codec.Many(codec.UInt(), limits.MAX_VERSIONS)]


@dataclass(frozen=True, slots=True)
class GetPeers:
    """node → trainer; on the blob protocol node → node or meeting point: this is where I am reached (nowhere: I do
    not serve) and what I hold; who else is there for `version`, and are the nodes in `about` of this run? To others
    than the trainer it shows the asker's membership."""

    version: Annotated[int | None, codec.Maybe(codec.UInt())]
    addresses: Annotated[tuple[str, ...], codec.Many(codec.Text(limits.MAX_NAME_CHARACTERS), limits.MAX_PEER_ADDRESSES)]
    versions: Annotated[tuple[int, ...], codec.Many(codec.UInt(), limits.MAX_VERSIONS)]
    about: Annotated[tuple[bytes, ...], codec.Many(codec.Bytes(32), limits.MAX_PEERS_ASKED)]
    membership: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))] = None


@dataclass(frozen=True, slots=True)
class PeersReply:
    """Those of `about` that are connected, then others at random; from the trainer with the asker's membership."""

    peers: Annotated[tuple[Peer, ...], codec.Many(codec.Object(Peer), limits.MAX_PEERS_PER_REPLY)]
    membership: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))] = None


@dataclass(frozen=True, slots=True)
class GetHaves:
    """node → node, on the blob protocol: which of these do you have? Also asks for Have notices about the rest."""

    digests: Annotated[tuple[bytes, ...], codec.Many(codec.Bytes(32), limits.MAX_HAVES)]


@dataclass(frozen=True, slots=True)
class Haves:
    """node → node. Bit i (byte i >> 3, high bit first) answers for digest i."""

    bitmap: Annotated[bytes, codec.Bytes(0, limits.MAX_HAVES // 8)]


@dataclass(frozen=True, slots=True)
class Have:
    """node → node, notice on the blob protocol: of what you asked about, `digests` I have now, and `coming` I am
    asking the trainer for: do not ask it too."""

    digests: Annotated[tuple[bytes, ...], codec.Many(codec.Bytes(32), limits.MAX_HAVE_DIGESTS)]
    coming: Annotated[tuple[bytes, ...], codec.Many(codec.Bytes(32), limits.MAX_HAVE_DIGESTS)]


# SPEC 9.3: message numbers. Append-only.
MESSAGES: Final[dict[int, type]] = {
    1: Hello,
    2: Welcome,
    3: GetManifest,
    4: ManifestReply,
    5: Announce,
    6: GetLeases,
    7: LeasesReply,
    8: ReturnLease,
    9: Returned,
    10: Submit,
    11: Submitted,
    12: Heartbeat,
    13: HeartbeatReply,
    14: GetBlob,
    15: BlobReply,
    16: AskAudit,
    17: AuditAsked,
    18: GetPeers,
    19: PeersReply,
    20: GetHaves,
    21: Haves,
    22: Have,
}
_NUMBERS: Final = {cls: number for number, cls in MESSAGES.items()}


def pack(message: Any) -> bytes:
    """The body of a message."""
    return bytes([_NUMBERS[type(message)]]) + codec.encode(message)


def open_body(body: bytes) -> Any:
    """The message of a body. Raises DecodeError."""
    cls = MESSAGES.get(body[0]) if body else None
    if cls is None:
        raise DecodeError(Code.MALFORMED, f"message number {body[0] if body else '(none)'} is not known")
    return codec.decode(cls, body[1:])


def expect(cls: type[T], body: bytes) -> T:
    """The message of a body, which must be a `cls`. Raises DecodeError."""
    message = open_body(body)
    if not isinstance(message, cls):
        raise DecodeError(Code.UNEXPECTED_MESSAGE, f"expected {cls.__name__}, got {type(message).__name__}")
    return message


def negotiate(theirs: tuple[Version, ...], ours: Version, *, their_name: str, our_name: str) -> Version:
    """SPEC 9.2: the highest version both speak. Raises DecodeError(VERSION_MISMATCH) naming both
    versions and what to upgrade."""
    common = [each for each in theirs if each.major == ours.major]
    if common:
        best = max(common, key=lambda each: each.minor)
        return Version(ours.major, min(best.minor, ours.minor))
    spoken = ", ".join(str(each) for each in theirs) or "none"
    newest = max(theirs, key=lambda each: (each.major, each.minor), default=Version(0, 0))
    behind = their_name if newest.major < ours.major else our_name
    raise DecodeError(
        Code.VERSION_MISMATCH,
        f"{their_name} speaks protocol {spoken}, {our_name} speaks {ours}: "
        f"upgrade {behind} (git pull, pip install -e .)",
    )
