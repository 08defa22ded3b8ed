"""The log of a run: what was leased, received, drawn for audit and judged, epoch by epoch, for anyone to check
(SPEC 8.12, 10.9). An epoch is what was drawn from one policy version; it is closed once nothing of it can change.

Not here: keeping it (trainer/ledger.py) and checking it (verify/run_audit.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from protocol import codec, identity, limits
from protocol.envelope import Signed
from protocol.policy import merkle_root


@dataclass(frozen=True, slots=True)
class Draw:
    """Whether a submission was drawn for audit (SPEC 10.7), and by which rate."""

    seen: Annotated[int, codec.UInt()]  # sequence of the last verdict that the node's standing took into account
    floor: Annotated[float, codec.Real()]  # least rate of this trainer at the time
    rate: Annotated[float, codec.Real()]
    drawn: Annotated[bool, codec.Flag()]
    # sequence of the last verdict there was when a person said that this node is trusted; nil: it is not
    trusted: Annotated[int | None, codec.Maybe(codec.UInt())]


@dataclass(frozen=True, slots=True)
class Submission:
    """`draw` is nil where a check that needs no model had failed before."""

    receipt: Annotated[Signed, codec.Object(Signed)]
    draw: Annotated[Draw | None, codec.Maybe(codec.Object(Draw))]


@dataclass(frozen=True, slots=True)
class LoggedVerdict:
    """`sequence` counts all verdicts of the run."""

    sequence: Annotated[int, codec.UInt()]
    verdict: Annotated[Signed, codec.Object(Signed)]


@dataclass(frozen=True, slots=True)
class Epoch:
    """SPEC 8.12. The seal of a closed epoch, signed by the trainer; `previous` chains them."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_EPOCH

    run: Annotated[bytes, codec.Bytes(32)]
    version: Annotated[int, codec.UInt()]
    root: Annotated[bytes, codec.Bytes(32)]  # merkle root of the epoch's items
    calibrations: Annotated[int, codec.UInt()]  # how many items of each kind
    leases: Annotated[int, codec.UInt()]
    submissions: Annotated[int, codec.UInt()]
    verdicts: Annotated[int, codec.UInt()]
    audit_value: Annotated[bytes, codec.Bytes(32)]  # s of this epoch, revealed (SPEC 10.7)
    previous: Annotated[bytes, codec.Bytes(32)]  # digest of the seal before; zeros for version 0
    closed_ms: Annotated[int, codec.UInt()]


@dataclass(frozen=True, slots=True)
class EpochLog:
    """SPEC 8.12. One epoch as a file. `epoch` is nil while it is open: then nothing of it is sealed."""

    manifest: Annotated[Signed, codec.Object(Signed)]
    calibrations: Annotated[tuple[Signed, ...], codec.Many(codec.Object(Signed), limits.MAX_LOG_CALIBRATIONS)]
    leases: Annotated[tuple[Signed, ...], codec.Many(codec.Object(Signed), limits.MAX_LOG_ITEMS)]
    submissions: Annotated[tuple[Submission, ...], codec.Many(codec.Object(Submission), limits.MAX_LOG_ITEMS)]
    verdicts: Annotated[tuple[LoggedVerdict, ...], codec.Many(codec.Object(LoggedVerdict), limits.MAX_LOG_ITEMS)]
    epoch: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))]


def epoch_root(log: EpochLog) -> bytes:
    """SPEC 8.12: the merkle root (8.3.2) over the canonical bytes of manifest, calibrations, leases, submissions and
    verdicts, in this order."""
    return items_root((log.manifest, *log.calibrations, *log.leases, *log.submissions, *log.verdicts))


def items_root(items: Iterable[Signed | Submission | LoggedVerdict]) -> bytes:
    """The same over an epoch's items as they come, one held at a time."""
    return merkle_root(codec.encode(item) for item in items)
