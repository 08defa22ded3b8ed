"""TOPLOC proofs: a commitment to the largest final hidden states, 258 bytes for 32 tokens (SPEC 10.5).

Byte-compatible with the public format (Prime Intellect, "TOPLOC", 2025), and stricter: what cannot be proved is
an error and no proof, and what is not exactly a proof is refused with its reason. Not covered: whether the
tokens were drawn by the seed (sampling.py), or where the hidden states come from (node/ and prefill.py).

Hidden states are torch tensors (rounded to bfloat16; CUDA ones are copied over) or uint16 numpy arrays of
bfloat16 bits, [generated tokens, hidden], in order, environment tokens left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import Code, DecodeError, EngineError, UsageError
from protocol.limits import (
    PROOF_CHUNK_TOKENS,
    PROOF_FIELD,
    PROOF_MIN_JUDGED_TOKENS,
    PROOF_MIN_MODULUS_EXCLUSIVE,
    PROOF_TOP_K,
)
from verify.field import evaluate, interpolate
from verify.thresholds import Judgement, Limits

if TYPE_CHECKING:
    from torch import Tensor

Bits = NDArray[np.uint16]
Polynomial = tuple[int, NDArray[np.int64]]  # modulus, coefficients ascending

NO_MANTISSA: Final = 128.0  # reported where no exponent agrees: one more than the largest error
_EXPONENT: Final = 0x7F80  # all ones: infinity or NaN
_ELSEWHERE: Final = 32  # points beside the verifier's own, where an honest polynomial is random
_BATCH: Final = 64  # chunks worked on at once: their tables stay in the second-level cache


class ProofError(DecodeError):
    """A peer's proof is not one. The message is the exact reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(Code.MALFORMED, reason)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A proof held against our own hidden states at our own top values.

    start, length: generated tokens covered. compared: points compared, 128 or fewer. mantissa_*: absolute
    errors in bfloat16 units, over points whose exponents agree. elsewhere: how many of up to 32 points beside
    those carry a plausible exponent; few for an honest polynomial.
    """

    start: int
    length: int
    exponent_mismatches: int
    sign_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    compared: int
    elsewhere: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    trace: int
    start: int
    length: int
    bits: Bits  # [length * hidden]


def build_proofs(hidden: Tensor | Bits) -> tuple[bytes, ...]:
    """One proof for every 32 positions of hidden [L, H]; the last chunk may be shorter.

    Raises EngineError where no proof can be made: states that are not finite, or too uniform to commit to.
    """
    return build_many([hidden])[0]


def build_many(hiddens: Sequence[Tensor | Bits], k: int = PROOF_TOP_K) -> list[tuple[bytes, ...]]:
    """`build_proofs` of several traces at once, which is faster than one by one. `k` is 128 on the wire."""
    proofs: list[list[bytes]] = [[b""] * count_chunks(len(hidden)) for hidden in hiddens]
    for group in _batches(hiddens):
        values = np.stack([chunk.bits for chunk in group])
        for chunk, proof in zip(group, _build(values, k), strict=True):
            proofs[chunk.trace][chunk.start // PROOF_CHUNK_TOKENS] = proof
    return [tuple(trace) for trace in proofs]


def compare_proofs(hidden: Tensor | Bits, proofs: Sequence[bytes]) -> list[ChunkResult]:
    """Hold a peer's proofs against our hidden states [L, H] of the same tokens.

    Raises ProofError if they are not exactly ⌈L/32⌉ well-formed proofs, EngineError if our states are unusable.
    """
    return compare_many([(hidden, proofs)])[0]


def compare_many(
    pairs: Sequence[tuple[Tensor | Bits, Sequence[bytes]]], k: int = PROOF_TOP_K
) -> list[list[ChunkResult]]:
    """`compare_proofs` of several traces at once, which is faster than one by one.

    One malformed proof raises for the whole batch: parse a trace's proofs first (`check_form`).
    """
    parsed = [check_form(proofs, len(hidden), hidden.shape[1], k) for hidden, proofs in pairs]
    results: list[dict[int, ChunkResult]] = [{} for _ in pairs]
    for group in _batches([hidden for hidden, _ in pairs]):
        polynomials = [parsed[chunk.trace][chunk.start // PROOF_CHUNK_TOKENS] for chunk in group]
        for chunk, result in zip(group, _compare(group, polynomials, k), strict=True):
            results[chunk.trace][chunk.start] = result
    return [[trace[start] for start in sorted(trace)] for trace in results]


def count_chunks(tokens: int) -> int:
    return -(-tokens // PROOF_CHUNK_TOKENS)


def check_form(proofs: Sequence[bytes], tokens: int, hidden: int, k: int = PROOF_TOP_K) -> list[Polynomial]:
    """Parse the proofs of `tokens` positions, or refuse them with the exact reason. Needs no model."""
    # SPEC 10.5.3: a trace carries exactly ⌈L/32⌉ proofs.
    if len(proofs) != count_chunks(tokens):
        raise ProofError(f"{len(proofs)} proofs for {tokens} tokens, which need {count_chunks(tokens)}")
    parsed = []
    for index, proof in enumerate(proofs):
        length = min(PROOF_CHUNK_TOKENS, tokens - index * PROOF_CHUNK_TOKENS)
        try:
            parsed.append(parse_proof(proof, length * hidden, k))
        except ProofError as error:
            raise ProofError(f"proof {index}: {error}") from None
    return parsed


def parse_proof(data: bytes, chunk_values: int, k: int = PROOF_TOP_K) -> Polynomial:
    """Modulus and coefficients, ascending, of one proof over `chunk_values` = positions × hidden values."""
    terms = min(k, chunk_values)
    # SPEC 10.5.3: a proof is 2 + 2k bytes, k = min(128, values).
    if len(data) != 2 + 2 * terms:
        raise ProofError(f"{len(data)} bytes, not {2 + 2 * terms}")
    modulus = int.from_bytes(data[:2], "big")
    # SPEC 10.5.3: 2^15 < modulus ≤ 65497, and 65497 where every index is below it.
    if not PROOF_MIN_MODULUS_EXCLUSIVE < modulus <= PROOF_FIELD:
        raise ProofError(f"modulus {modulus} is not in ({PROOF_MIN_MODULUS_EXCLUSIVE}, {PROOF_FIELD}]")
    if chunk_values <= PROOF_FIELD and modulus != PROOF_FIELD:
        raise ProofError(f"modulus {modulus} is not the largest that keeps {chunk_values} indices apart")
    coefficients = np.frombuffer(data, dtype=">u2", offset=2).astype(np.int64)
    # SPEC 10.5.3: every coefficient is below 65497.
    if int(coefficients.max()) >= PROOF_FIELD:
        raise ProofError(f"coefficient {int(coefficients.argmax())} is not below {PROOF_FIELD}")
    reason = _degenerate(coefficients)
    if reason:
        raise ProofError(reason)
    return modulus, coefficients


def _degenerate(coefficients: NDArray[np.int64]) -> str | None:
    """Why these cannot be an honest polynomial's coefficients, which are as good as random in the field."""
    # SPEC 10.5.3: not zero, not constant, and at most one coefficient in eight is zero.
    zeros = len(coefficients) - int(np.count_nonzero(coefficients))
    if zeros == len(coefficients):
        return "the polynomial is zero"
    if len(coefficients) > 1 and not coefficients[1:].any():
        return "the polynomial is constant"
    if zeros > max(1, len(coefficients) // 8):
        return f"{zeros} of {len(coefficients)} coefficients are zero, as in no honest polynomial"
    return None


def judge_proofs(results: Sequence[ChunkResult], limits: Limits) -> Judgement:
    """The worst chunk against the limits. Chunks under 8 tokens are reported and never judged."""
    judged = [r for r in results if r.length >= PROOF_MIN_JUDGED_TOKENS]
    if not judged:
        return Judgement(True, 0.0, 1.0, None, f"no chunk of {PROOF_MIN_JUDGED_TOKENS} tokens to judge")
    worst, (ratio, detail) = max(((result, _worst(result, limits)) for result in judged), key=lambda pair: pair[1][0])
    ok = ratio <= 1.0
    span = None if ok else (worst.start, worst.start + worst.length)
    return Judgement(ok, ratio, 1.0, span, detail)


def _worst(result: ChunkResult, limits: Limits) -> tuple[float, str]:
    """The largest measured share of a limit in one chunk, and what it is."""
    share = result.compared / PROOF_TOP_K
    measures = (
        ("exponent mismatches", float(result.exponent_mismatches), max(2.0, limits.exponent_mismatches * share)),
        ("sign mismatches", float(result.sign_mismatches), max(2.0, limits.sign_mismatches * share)),
        ("mantissa mean", result.mantissa_mean, limits.mantissa_mean),
        ("mantissa median", result.mantissa_median, limits.mantissa_median),
        ("plausible values elsewhere", float(result.elsewhere), _ELSEWHERE / 2),
    )
    ratios = [(value / limit, f"{name} {value:.4g}, limit {limit:.4g}") for name, value, limit in measures]
    return max(ratios)


def bits_of(hidden: Tensor | Bits) -> Bits:
    """bfloat16 bits [L, H] of hidden states, rounded to nearest even where they are wider."""
    if isinstance(hidden, np.ndarray):
        if hidden.dtype != np.uint16 or hidden.ndim != 2:
            raise UsageError("hidden states in numpy are uint16 bfloat16 bits of shape [tokens, hidden]")
        return hidden
    import torch  # only who holds a tensor pays for torch

    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise UsageError(f"hidden states are floats of shape [tokens, hidden], not {tuple(hidden.shape)}")
    rounded = hidden.detach().to(torch.bfloat16).cpu().contiguous()
    bits: Bits = rounded.view(torch.int16).numpy().view(np.uint16)
    return bits


def _batches(hiddens: Sequence[Tensor | Bits]) -> list[list[_Chunk]]:
    """All chunks of all traces, in groups of equal size."""
    by_size: dict[int, list[_Chunk]] = {}
    for trace, hidden in enumerate(hiddens):
        bits = bits_of(hidden)
        for start in range(0, len(bits), PROOF_CHUNK_TOKENS):
            part = bits[start : start + PROOF_CHUNK_TOKENS]
            by_size.setdefault(part.size, []).append(_Chunk(trace, start, len(part), part.reshape(-1)))
    return [same[i : i + _BATCH] for same in by_size.values() for i in range(0, len(same), _BATCH)]


def _top_indices(values: Bits, k: int) -> NDArray[np.int64]:
    """Indices [chunks, k], ascending, of the k largest by absolute value, ties to the lower index."""
    chunks, size = values.shape
    magnitude = values & np.uint16(0x7FFF)
    if int(magnitude.max(initial=0)) >= _EXPONENT:
        raise EngineError("a hidden state is NaN or infinite: no proof can be made or checked")
    if size <= k:
        return np.tile(np.arange(size), (chunks, 1))
    candidates = np.flatnonzero(magnitude >= _floor(magnitude, k)[:, None])
    first = np.searchsorted(candidates, np.arange(chunks) * size)
    chunk = np.repeat(np.arange(chunks), np.diff(first, append=len(candidates)))
    # SPEC 10.5.2: the largest first, ties to the lower index. One sort orders (chunk, −magnitude, index).
    below = 0x7FFF - magnitude.reshape(-1)[candidates].astype(np.int64)
    ranked = np.sort((chunk * 2**15 + below) * size + (candidates - chunk * size))
    return np.sort(ranked[first[:, None] + np.arange(k)] % size, axis=1)


def _floor(magnitude: Bits, k: int) -> Bits:
    """A value that at least k of each chunk reach: the k-th largest of the maxima of more than k groups."""
    chunks, size = magnitude.shape
    groups = 2 * k
    if size < 2 * groups:
        return np.zeros(chunks, dtype=np.uint16)
    used = size // groups * groups
    maxima = magnitude[:, :used].reshape(chunks, used // groups, groups).max(axis=1)
    floor: Bits = np.partition(maxima, groups - k, axis=1)[:, groups - k]
    return floor


def _modulus(indices: NDArray[np.int64]) -> int:
    # SPEC 10.5.2: the largest modulus ≤ 65497 under which the indices stay distinct.
    for modulus in range(PROOF_FIELD, PROOF_MIN_MODULUS_EXCLUSIVE, -1):
        if len(np.unique(indices % modulus)) == len(indices):
            return modulus
    raise EngineError("no modulus keeps the indices of this chunk apart: no proof can be made")


def _build(values: Bits, k: int) -> list[bytes]:
    """Proofs of chunks [chunks, size]."""
    indices = _top_indices(values, k)
    small = values.shape[1] <= PROOF_FIELD
    moduli = [PROOF_FIELD if small else _modulus(row) for row in indices]
    x = indices if small else indices % np.array(moduli)[:, None]
    y = np.take_along_axis(values, indices, axis=1)
    coefficients = interpolate(x, y)
    for row in coefficients:
        reason = _degenerate(row)
        if reason:
            raise EngineError(f"hidden states too uniform to commit to: {reason}")
    body = coefficients.astype(">u2")
    return [m.to_bytes(2, "big") + row.tobytes() for m, row in zip(moduli, body, strict=True)]


def _compare(group: list[_Chunk], polynomials: list[Polynomial], k: int) -> list[ChunkResult]:
    """Each chunk's proof at our own top indices, and at up to 32 indices beside them."""
    values = np.stack([chunk.bits for chunk in group])
    indices = _top_indices(values, k)
    moduli = np.array([modulus for modulus, _ in polynomials])[:, None]
    x = indices % moduli
    beside = (indices[:, :_ELSEWHERE] + 1) % moduli
    claimed = evaluate(np.stack([c for _, c in polynomials]), np.concatenate((x, beside), axis=1))
    theirs, other = np.split(claimed, [indices.shape[1]], axis=1)
    ours = np.take_along_axis(values, indices, axis=1).astype(np.int64)
    agree = (ours ^ theirs) & _EXPONENT == 0
    signs = np.count_nonzero((ours ^ theirs) & 0x8000, axis=1)
    errors = np.abs((ours & 0x7F) - (theirs & 0x7F))
    means, medians = _mantissa(errors, agree)
    plausible = np.zeros((len(group), 256), dtype=np.bool_)
    np.put_along_axis(plausible, (ours & _EXPONENT) >> 7, True, axis=1)
    outside = ~(beside[:, :, None] == x[:, None, :]).any(axis=2)
    hits = np.take_along_axis(plausible, (other & _EXPONENT) >> 7, axis=1) & outside
    return [
        ChunkResult(
            start=chunk.start,
            length=chunk.length,
            exponent_mismatches=int(np.count_nonzero(~agree[row])),
            sign_mismatches=int(signs[row]),
            mantissa_mean=float(means[row]),
            mantissa_median=float(medians[row]),
            compared=indices.shape[1],
            elsewhere=int(np.count_nonzero(hits[row])),
        )
        for row, chunk in enumerate(group)
    ]


def _mantissa(errors: NDArray[np.int64], agree: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mean and median of each row's errors where the exponents agree."""
    count = np.count_nonzero(agree, axis=1)
    means = np.where(agree, errors, 0).sum(axis=1) / np.maximum(count, 1)
    ordered = np.sort(np.where(agree, errors, 255), axis=1)
    rows = np.arange(len(errors))
    medians = (ordered[rows, np.maximum(count - 1, 0) // 2] + ordered[rows, count // 2 % errors.shape[1]]) / 2
    nothing = count == 0
    return np.where(nothing, NO_MANTISSA, means), np.where(nothing, NO_MANTISSA, medians)
