"""How many of a node's traces are audited, from its audits so far (SPEC 10.7), and what that deters.

Pure, so that whoever has the log of a run repeats every rate. Not here: the draw itself (trainer/audit_draw.py) and
what else a trainer does with a node's standing (trainer/standing.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from protocol.verdict import Outcome, Reason

WINDOW: Final = 400  # newest audits of a node that count: what it was long ago is forgotten
LEAST_FIRST: Final = 8  # the fewest first audits a trainer may ask for
TOLERATED: Final = 0.01  # share of cheated traces that the rate is meant to keep a node under
CONFIDENCE: Final = 0.95
# SPEC 10.7: refusals for a reason of step 3 are about the lease alone, which a slow node loses, or a restored trainer.
NO_LIES: Final = frozenset(
    {
        Reason.LEASE_UNKNOWN,
        Reason.LEASE_NOT_YOURS,
        Reason.LEASE_EXPIRED,
        Reason.LEASE_REDEEMED,
        Reason.SLOT_NOT_LEASED,
    }
)
RATE_TOLERANCE: Final = 1e-9  # between two machines' mathematics
_SMALLEST: Final = 1e-300
_TERMS: Final = 500


def newest_audits(verdicts: Iterable[tuple[bytes, bool, Outcome]]) -> list[bool]:
    """The audits that count for a node's rate, newest first, True where the trace was accepted.

    `verdicts` are the node's in order of their sequence: (trace digest, audited, outcome). Of several on one trace
    the newest alone counts.
    """
    newest: dict[bytes, tuple[bool, Outcome]] = {}
    for digest, audited, outcome in verdicts:
        newest.pop(digest, None)  # a dict keeps the place of a key's first entry
        newest[digest] = (audited, outcome)
    found = [
        outcome is Outcome.ACCEPTED
        for audited, outcome in reversed(newest.values())
        if audited and outcome is not Outcome.NOT_JUDGED
    ]
    return found[:WINDOW]


def is_lie(outcome: Outcome, reason: Reason | None) -> bool:
    """SPEC 10.7: whether a verdict costs a trusted node its trust."""
    return outcome is Outcome.REFUSED and reason not in NO_LIES


def sampling_rate(audits: Sequence[bool], first: int, floor: float) -> float:
    """SPEC 10.7: q of a node with these audits (newest first, at most WINDOW of them count).

    `first` is the trainer's number of first audits, `floor` its least rate. For traces of a pair with a calibration;
    others are audited at 1.
    """
    latest = audits[:WINDOW]
    # SPEC 10.7 item 1: all traces while so many audits are not there yet, or one of the newest so many failed.
    if len(latest) < first or not all(latest[:first]):
        return 1.0
    passed = sum(latest)
    return rate(passed, len(latest) - passed, floor)


@lru_cache(maxsize=4096)
def rate(passed: int, failed: int, floor: float) -> float:
    """SPEC 10.7 item 3: 1 - 0.01 / f from floor to 1, f the upper 95 % quantile of Beta(1/2 + failed, 1/2 + passed)."""
    worst = beta_quantile(CONFIDENCE, 0.5 + failed, 0.5 + passed)
    return max(floor, min(1.0, 1.0 - TOLERATED / worst))


def deterrence(q: float, detection: float) -> float:
    """What a node must stand to lose, in units of what one cheat gains, for cheating not to pay: (1 - qd) / (qd).

    A cheat gains g with probability 1 - qd and loses the stake S with probability qd (q audited, d of those caught).
    """
    caught = q * detection
    if not 0.0 < caught <= 1.0:
        raise ValueError(f"q {q} times detection {detection} must be above 0 and at most 1")
    return (1.0 - caught) / caught


def beta_quantile(p: float, a: float, b: float) -> float:
    """The x with P(X <= x) = p for X ~ Beta(a, b), a and b above 0, by bisection to the last bit of a float."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if beta_cdf(middle, a, b) < p else (low, middle)


def beta_cdf(x: float, a: float, b: float) -> float:
    """P(X <= x) for X ~ Beta(a, b): the regularised incomplete beta function, about 1e-12 accurate.

    By its continued fraction (Abramowitz and Stegun 26.5.8), on the side of the mean where that converges fast.
    """
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return scale / (a * _fraction(x, a, b))
    return 1.0 - scale / (b * _fraction(1.0 - x, b, a))


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + …)), evaluated forwards as the quotient of two recurrences kept in ratio (Lentz's method)."""
    value = upper = 1.0
    lower = 0.0
    for n in range(1, _TERMS):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + n - 1) * (a + n))
        else:
            d = m * (b - m) * x / ((a + n - 1) * (a + n))
        lower = 1.0 / _off_zero(1.0 + d * lower)
        upper = _off_zero(1.0 + d / upper)
        step = upper * lower
        value *= step
        if abs(step - 1.0) < 4e-16:
            return value
    raise ArithmeticError(f"the incomplete beta function of {x}, {a}, {b} does not converge")


def _off_zero(value: float) -> float:
    return value if abs(value) > _SMALLEST else _SMALLEST
