"""How far honest evidence of one pair of engines is from a verifier's own, measured (SPEC 8.11, 10.6).

A verdict names the calibration it was judged by, so that anyone can judge again by the same. Not here: the measuring
(verify/calibrate.py) and what is done with the numbers (verify/).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar

from protocol import codec, identity, limits
from protocol.errors import Code, DecodeError


@dataclass(frozen=True, slots=True)
class Pair:
    """Who draws and who recomputes. Devices by their kind: "cpu", "cuda"."""

    worker_engine: Annotated[str, codec.Text(64)]
    worker_dtype: Annotated[str, codec.Text(16)]
    worker_device: Annotated[str, codec.Text(16)]
    verifier_engine: Annotated[str, codec.Text(64)]
    verifier_dtype: Annotated[str, codec.Text(16)]
    verifier_device: Annotated[str, codec.Text(16)]


@dataclass(frozen=True, slots=True)
class Limits:
    """SPEC 10.6. How far one token's or one chunk's evidence may be from ours."""

    margin_hard: Annotated[
        float, codec.Real()
    ]  # noised-logit units at temperature 1; the error of logits/T grows as 1/T
    margin_budget: Annotated[
        float, codec.Real()
    ]  # positions above margin_hard in 4,096 tokens; a shorter trace has none
    exponent_mismatches: Annotated[float, codec.Real()]  # of 128 points of a chunk
    sign_mismatches: Annotated[float, codec.Real()]  # of 128 points of a chunk
    mantissa_mean: Annotated[
        float, codec.Real()
    ]  # units in the last place of bfloat16, over points whose exponents agree
    mantissa_median: Annotated[float, codec.Real()]
    logprob_tolerance: Annotated[float, codec.Real()]  # nats, one token, at temperature 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way of not being honest, as log-likelihood ratios against honesty: nats, one a bin, never falling."""

    name: Annotated[str, codec.Text(32)]
    scores: Annotated[tuple[float, ...], codec.Many(codec.Real(), limits.MAX_SCORE_BINS)]


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """SPEC 10.8. A value x falls in the bin whose number is the count of edges below x."""

    edges: Annotated[tuple[float, ...], codec.Many(codec.Real(), limits.MAX_SCORE_BINS - 1)]
    alternatives: Annotated[tuple[Alternative, ...], codec.Many(codec.Object(Alternative), limits.MAX_ALTERNATIVES)]


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured. Quantiles at .5, .9, .99, .999 and 1."""

    traces: Annotated[int, codec.UInt()]
    tokens: Annotated[int, codec.UInt()]
    chunks: Annotated[int, codec.UInt()]
    mismatches: Annotated[int, codec.UInt()]  # tokens with a margin above 0
    sigma: Annotated[float, codec.Real()]  # standard deviation of the logits' error that explains the mismatches
    margins: Annotated[tuple[float, ...], codec.Many(codec.Real(), 8)]
    logprobs: Annotated[tuple[float, ...], codec.Many(codec.Real(), 8)]
    exponents: Annotated[tuple[float, ...], codec.Many(codec.Real(), 8)]
    mantissa_means: Annotated[tuple[float, ...], codec.Many(codec.Real(), 8)]
    mantissa_medians: Annotated[tuple[float, ...], codec.Many(codec.Real(), 8)]
    int8_nats: Annotated[
        float, codec.Real()
    ]  # evidence a chunk of 32 tokens gives against weights rounded to int8, mean


@dataclass(frozen=True, slots=True)
class Calibration:
    """SPEC 8.11. Signed by the trainer, or by an auditor who measured for himself."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_CALIBRATION

    run: Annotated[bytes, codec.Bytes(32)]  # zeros when made for no run
    policy_version: Annotated[int, codec.UInt()]
    policy_root: Annotated[bytes, codec.Bytes(32)]
    pair: Annotated[Pair, codec.Object(Pair)]
    limits: Annotated[Limits, codec.Object(Limits)]
    margins: Annotated[ScoreTable, codec.Object(ScoreTable)]
    proofs: Annotated[ScoreTable, codec.Object(ScoreTable)]
    sample: Annotated[Sample, codec.Object(Sample)]
    created_ms: Annotated[int, codec.UInt()]

    @property
    def provisional(self) -> bool:
        """SPEC 10.6: of any engine, until its pair is measured."""
        return not self.pair.worker_engine


def check_calibration(calibration: Calibration) -> None:
    """SPEC 8.11: tables that are monotone and complete, limits that are none below zero. Raises DecodeError."""
    for name, table in (("margins", calibration.margins), ("proofs", calibration.proofs)):
        _check_table(name, table)
    held = calibration.limits
    for field in Limits.__slots__:
        if getattr(held, field) < 0:
            raise DecodeError(Code.MALFORMED, f"calibration: limit {field} is below zero")


def _check_table(name: str, table: ScoreTable) -> None:
    edges = table.edges
    if not table.alternatives or len({each.name for each in table.alternatives}) != len(table.alternatives):
        raise DecodeError(Code.MALFORMED, f"calibration: {name} has no alternative, or one twice")
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise DecodeError(Code.MALFORMED, f"calibration: the edges of {name} do not rise")
    for each in table.alternatives:
        if len(each.scores) != len(edges) + 1:
            raise DecodeError(Code.MALFORMED, f"calibration: {len(edges)} edges of {name} need one score more")
        if any(low > high for low, high in itertools.pairwise(each.scores)):
            raise DecodeError(Code.MALFORMED, f"calibration: the scores of '{each.name}' in {name} fall")
        if max(map(abs, each.scores)) > limits.MAX_SCORE_NATS:
            raise DecodeError(
                Code.MALFORMED, f"calibration: a score of '{each.name}' is over {limits.MAX_SCORE_NATS} nats from 0"
            )
