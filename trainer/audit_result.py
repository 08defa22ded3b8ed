"""What an auditor hands the gateway about one trace, as kept in the ledger. Readable without torch.

Not here: the verdict; the gateway joins this with the cheap checks and signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol import codec, limits
from protocol.verdict import Check, Fingerprint, Reason


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`checks` are verify.check.DEAR in order, `node` SKIPPED, which only the gateway can do. `fault`: this side could
    not judge (one of NOT_JUDGED_REASONS); then there are no checks and `error` says what went wrong. `scores`
    (SPEC 10.8) were made by the calibration of this digest: empty and None where the pair has none."""

    checks: Annotated[tuple[Check, ...], codec.Many(codec.Object(Check), limits.MAX_CHECKS)]
    verifier: Annotated[Fingerprint, codec.Object(Fingerprint)]
    fault: Annotated[Reason | None, codec.Maybe(codec.Choice(Reason))]
    error: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]
    calibration: Annotated[bytes | None, codec.Maybe(codec.Bytes(32))] = None
    scores: Annotated[tuple[float, ...], codec.Many(codec.Real(), 2 * limits.MAX_ALTERNATIVES)] = ()
    provisional: Annotated[bool, codec.Flag()] = False  # that calibration was
