"""The limits evidence is judged by where a pair of engines has no calibration, with the measurement behind each
number. A calibration may lower them for its pair and never raises them.

Not here: the measuring of a pair (calibrate.py), or the statistics behind a check (sampling.py, toploc.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.calibration import Calibration, Limits
from protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class Judgement:
    """One check's outcome: `value` held against `limit`, over chunk or token `span` (start, end) if any."""

    ok: bool
    value: float
    limit: float
    span: tuple[int, int] | None
    detail: str


_FLOAT32 = Limits(
    margin_hard=0.01,
    margin_budget=0.0,
    exponent_mismatches=8.0,
    sign_mismatches=8.0,
    mantissa_mean=0.15,
    mantissa_median=0.5,
    logprob_tolerance=0.01,
)
_BFLOAT16 = Limits(
    margin_hard=1.0,
    margin_budget=1.0,
    exponent_mismatches=20.0,
    sign_mismatches=14.0,
    mantissa_mean=4.0,
    mantissa_median=3.0,
    logprob_tolerance=1.0,
)
# (worker, verifier). A verifier in float32 is no nearer to a bfloat16 worker than one in bfloat16: the worker's own
# rounding is what they differ by.
_LIMITS = {
    ("float32", "float32"): _FLOAT32,
    ("bfloat16", "bfloat16"): _BFLOAT16,
    ("bfloat16", "float32"): _BFLOAT16,
}


def measured_dtypes() -> tuple[str, ...]:
    """The dtypes a worker may compute in: audited in the same one."""
    return tuple(sorted(worker for worker, verifier in _LIMITS if worker == verifier))


def limits_for(worker_dtype: str, verifier_dtype: str) -> Limits:
    """The limits for a worker and a verifier of these dtypes ("float32", "bfloat16"), and the ceilings of what a
    calibration of such a pair may allow (SPEC 10.6).

    Raises UsageError for a pair nobody measured: a limit guessed too tight refuses honest nodes.
    Measured on SmolLM2-135M, chunks of 32 tokens, temperature 1.

    float32 by float32. Two float32 kernels differ by their rounding: cached decode against prefill, and against
    a float64 forward pass, moved logits of size 34 by at most 1.1e-4, logprobs by 4e-5, the largest hidden
    values by 8e-6 of themselves; 512 of 512 tokens had margin 0 and 16 of 16 chunks matched in every bit. With
    noise added to every hidden value (320 chunks each; worst exponent mismatches, worst mantissa mean):
    1e-5 of the value 0 and 0.016 · 1e-4 1 and 0.047 · 3e-4 2 and 0.10 · 1e-3 3 and 0.21 · 1e-2 9 and 2.1.
    So the mantissa mean refuses what is off by 1e-3 and leaves honest kernels a factor of ten; exponents only
    have to absorb a changed rank 128. A margin of 0.01 is a hundred times the largest error seen, and no token
    may exceed it: one forced token is a forgery. TF32 is not float32 here: switch it off.

    bfloat16 by bfloat16. vLLM against transformers: exponent mismatches 3.5 (worst 14), mantissa mean 1.45
    (worst 1.82), median 1.05 (worst 2). Cached decoding against prefill on a CPU without bfloat16 units, 45 chunks
    and 1,324 tokens: 2.1 (worst 6), 1.37 (worst 2.31), worst median 2; tokens agreed in 97.7 %, the largest margin
    was 0.22, the logits' error 0.08 and the largest difference of a logprob 0.33. On another task, 2,177 tokens: one
    margin of 0.35, the next 0.21, a logprob 0.40 off. So a margin of 1.0 is nine standard deviations of a difference
    of two logits; calibrations of this policy come to about 0.7. fp8 gives 8 / 4.8 / 3.5, int4
    42 / 20 / 15, another question 35 / 17 / 13. A mismatch has a random sign half of the time, and rarely
    otherwise: 14. What is closer than fp8 is left to scores.

    bfloat16 by float32, the same tokens: 2.1 (worst 5), 1.24 (worst 1.92), worst median 1; 98.0 %, 0.10, 0.07, 0.36.
    So the same limits. On a policy as small and as sure as the embedded one it cannot be told from int8.
    """
    try:
        return _LIMITS[worker_dtype, verifier_dtype]
    except KeyError:
        measured = ", ".join(f"{worker} by {verifier}" for worker, verifier in sorted(_LIMITS))
        raise UsageError(
            f"no limits were measured for a {worker_dtype} worker audited in {verifier_dtype} "
            f"(measured: {measured}); audit in the worker's dtype"
        ) from None


def floors_for(worker_dtype: str, verifier_dtype: str) -> Limits:
    """Below what no calibration of such a pair goes: single tokens of bfloat16 have heavy tails, which a sample of a
    thousand does not show, and a policy that is trained moves them."""
    if worker_dtype == verifier_dtype == "float32":
        return limits_for(worker_dtype, verifier_dtype)
    return Limits(
        margin_hard=0.25,
        margin_budget=0.0,
        exponent_mismatches=8.0,
        sign_mismatches=8.0,
        mantissa_mean=0.3,
        mantissa_median=1.0,
        logprob_tolerance=0.25,
    )


def above_ceilings(calibration: Calibration) -> str | None:
    """Which limit of a calibration is above the ceiling for its dtypes, in words; None when none is.

    Raises UsageError for dtypes without ceilings.
    """
    ceilings = limits_for(calibration.pair.worker_dtype, calibration.pair.verifier_dtype)
    for name in Limits.__slots__:
        limit, ceiling = getattr(calibration.limits, name), getattr(ceilings, name)
        # Not `>`: a limit that is not a number is above every ceiling.
        if not limit <= ceiling:
            return f"{name} {limit:g}, at most {ceiling:g}"
    return None


def at_temperature(limit: float, temperature: float) -> float:
    """A limit on logits/T from one at T = 1: below 1 the logits' errors grow by 1/T, and the limit with them."""
    return limit / min(1.0, temperature)
