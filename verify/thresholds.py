"""The limits evidence is judged by, with the measurement behind each number.

Fixed and documented here, for pairs of engines that were measured. Not here: the measuring of a pair
(calibration), or the statistics behind a check (sampling.py, toploc.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a worker's evidence may be from ours. See `limits_for` for where each number comes from."""

    margin_hard: float  # noised-logit units at temperature 1; the error of logits/T grows as 1/T
    margin_budget: float  # positions above margin_hard in 4,096 tokens; a shorter trace has none
    exponent_mismatches: float  # of 128 points of a chunk
    sign_mismatches: float  # of 128 points of a chunk
    mantissa_mean: float  # units in the last place of bfloat16, over points whose exponents agree
    mantissa_median: float
    logprob_tolerance: float  # nats, one token, at temperature 1


@dataclass(frozen=True, slots=True)
class Judgement:
    """One check's outcome: `value` held against `limit`, over chunk or token `span` (start, end) if any."""

    ok: bool
    value: float
    limit: float
    span: tuple[int, int] | None
    detail: str


_LIMITS = {
    ("float32", "float32"): Limits(
        margin_hard=0.01,
        margin_budget=0.0,
        exponent_mismatches=8.0,
        sign_mismatches=8.0,
        mantissa_mean=0.15,
        mantissa_median=0.5,
        logprob_tolerance=0.01,
    ),
    ("bfloat16", "bfloat16"): Limits(
        margin_hard=0.5,
        margin_budget=1.0,
        exponent_mismatches=20.0,
        sign_mismatches=14.0,
        mantissa_mean=2.5,
        mantissa_median=2.0,
        logprob_tolerance=0.5,
    ),
}


def measured_dtypes() -> tuple[str, ...]:
    """The dtypes a worker may compute in: audited in the same one."""
    return tuple(sorted(worker for worker, verifier in _LIMITS if worker == verifier))


def limits_for(worker_dtype: str, verifier_dtype: str) -> Limits:
    """The limits for a worker and a verifier of these dtypes ("float32", "bfloat16").

    Raises UsageError for a pair nobody measured.
    """
    try:
        return _LIMITS[worker_dtype, verifier_dtype]
    except KeyError:
        measured = ", ".join(f"{worker} by {verifier}" for worker, verifier in sorted(_LIMITS))
        raise UsageError(
            f"no limits were measured for a {worker_dtype} worker audited in {verifier_dtype} "
            f"(measured: {measured}); audit in the worker's dtype"
        ) from None


def at_temperature(limit: float, temperature: float) -> float:
    """A limit on logits/T, given one at T = 1: an error in the logits is divided by T too."""
    return limit / min(1.0, temperature) if math.isfinite(temperature) and temperature > 0 else limit
