"""What one check found, and how findings become the ordered checks of a verdict (SPEC 10.1).

Not here: any check itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.limits import MAX_TEXT_CHARACTERS
from protocol.verdict import NOT_JUDGED_REASONS, Check, CheckOutcome, Reason


@dataclass(frozen=True, slots=True)
class Finding:
    """`reason` is None where the check passed. `span` is (start, end) in the trace's tokens."""

    name: str
    reason: Reason | None
    detail: str = ""
    value: float | None = None
    limit: float | None = None
    span: tuple[int, int] | None = None

    @property
    def passed(self) -> bool:
        return self.reason is None


def passed(name: str, detail: str = "", *, value: float | None = None, limit: float | None = None) -> Finding:
    return Finding(name, None, detail, value, limit)


def as_check(finding: Finding) -> Check:
    """The wire form of a finding. A value that is not finite is left out, its meaning stands in the detail."""
    return Check(
        name=finding.name,
        outcome=CheckOutcome.PASSED if finding.passed else CheckOutcome.FAILED,
        reason=finding.reason,
        value=_finite(finding.value),
        limit=_finite(finding.limit),
        start=None if finding.span is None else finding.span[0],
        end=None if finding.span is None else finding.span[1],
        detail=finding.detail[:MAX_TEXT_CHARACTERS],
    )


def skipped(name: str, why: str) -> Check:
    return Check(name, CheckOutcome.SKIPPED, None, None, None, None, None, why)


def first_failure(checks: Iterable[Check]) -> Check | None:
    """The check whose reason a verdict carries: the first that failed, in order. One that blames nobody (PAIR_EVIDENCE)
    only where no other failed."""
    failed = [check for check in checks if check.outcome is CheckOutcome.FAILED]
    return next((check for check in failed if blames(check)), failed[0] if failed else None)


def blames(check: Check) -> bool:
    """Whether a check that failed is held against the node. SPEC 10.1: one that is not lets those after it go on."""
    return check.reason not in NOT_JUDGED_REASONS


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
