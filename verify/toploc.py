"""TOPLOC proofs: a commitment to the largest final hidden states, 258 bytes for 32 tokens (SPEC 10.5).

Byte-compatible with the public format (Prime Intellect, "TOPLOC", 2025), and stricter: what cannot be proved is
an error and no proof, and what is not exactly a proof is refused with its reason. Not covered: whether the
tokens were drawn by the seed (sampling.py), or where the hidden states come from (node/ and prefill.py).

Hidden states are torch tensors (rounded to bfloat16; CUDA ones are copied over) or uint16 numpy arrays of
bfloat16 bits, [generated tokens, hidden], in order, environment tokens left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.calibration import Limits
from protocol.errors import Code, DecodeError, EngineError, UsageError
from protocol.limits import (
    PROOF_CHUNK_TOKENS,
    PROOF_FIELD,
    PROOF_MIN_JUDGED_TOKENS,
    PROOF_MIN_MODULUS_EXCLUSIVE,
    PROOF_TOP_K,
)
from verify.field import evaluate, interpolate
from verify.thresholds import Judgement

if TYPE_CHECKING:
    from torch import Tensor

Bits = NDArray[np.uint16]
Polynomial = tuple[int, NDArray[np.uint16]]  # modulus, coefficients ascending

NO_MANTISSA: Final = 128.0  # reported where no exponent agrees: one more than the largest error
_EXPONENT: Final = 0x7F80  # all ones: infinity or NaN
_ELSEWHERE: Final = 32  # points beside the verifier's own, where an honest polynomial is random
_BATCH: Final = 64  # chunks worked on at once: their tables stay in the second-level cache
_SLAB: Final = 1 << 20  # values looked through at once: fewer cost more calls, more leave the cache between passes
_COLUMNS: Final = 4096  # about how many maxima to keep of a chunk, each of up to `_DEPTH` values
_DEPTH: Final = 16


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
class Run:
    """Chunks of equal size that follow each other in a trace: bits [chunks, positions * hidden]."""

    trace: int
    first: int
    length: int  # positions of each chunk
    bits: Bits

    def part(self, start: int, end: int) -> Run:
        return Run(self.trace, self.first + start, self.length, self.bits[start:end])


def build_proofs(hidden: Tensor | Bits) -> tuple[bytes, ...]:
    """One proof for every 32 positions of hidden [L, H]; the last chunk may be shorter.

    Raises EngineError where no proof can be made: states that are not finite, or too uniform to commit to.
    """
    return build_many([hidden])[0]


def build_many(hiddens: Sequence[Tensor | Bits], k: int = PROOF_TOP_K) -> list[tuple[bytes, ...]]:
    """`build_proofs` of several traces at once, which is faster than one by one. `k` is 128 on the wire."""
    proofs: list[list[bytes]] = [[b""] * count_chunks(len(hidden)) for hidden in hiddens]
    for group in batches_of(hiddens):
        built = iter(_build(group, k))
        for run in group:
            proofs[run.trace][run.first : run.first + len(run.bits)] = itertools.islice(built, len(run.bits))
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
    results: list[list[ChunkResult]] = [[] for _ in pairs]
    for group in batches_of([hidden for hidden, _ in pairs]):
        polynomials = [p for run in group for p in parsed[run.trace][run.first : run.first + len(run.bits)]]
        measured = _compare(group, polynomials, k)
        for run in group:
            starts = itertools.count(run.first * PROOF_CHUNK_TOKENS, PROOF_CHUNK_TOKENS)
            chunks = zip(starts, itertools.islice(measured, len(run.bits)), strict=False)
            results[run.trace].extend(ChunkResult(start, run.length, *values) for start, values in chunks)
    return [sorted(trace, key=attrgetter("start")) for trace in results]  # a tail may have been reached first


def count_chunks(tokens: int) -> int:
    return -(-tokens // PROOF_CHUNK_TOKENS)


def check_form(proofs: Sequence[bytes], tokens: int, hidden: int, k: int = PROOF_TOP_K) -> list[Polynomial]:
    """Parse the proofs of `tokens` positions, or refuse them with the exact reason. Needs no model."""
    # SPEC 10.5.3: a trace carries exactly ⌈L/32⌉ proofs.
    if len(proofs) != count_chunks(tokens):
        raise ProofError(f"{len(proofs)} proofs for {tokens} tokens, which need {count_chunks(tokens)}")
    whole = tokens // PROOF_CHUNK_TOKENS
    parsed = _parse(proofs[:whole], PROOF_CHUNK_TOKENS * hidden, k, "proof {}: ", 0)
    return parsed + _parse(proofs[whole:], tokens % PROOF_CHUNK_TOKENS * hidden, k, "proof {}: ", whole)


def parse_proof(data: bytes, chunk_values: int, k: int = PROOF_TOP_K) -> Polynomial:
    """Modulus and coefficients, ascending, of one proof over `chunk_values` = positions × hidden values."""
    return _parse([data], chunk_values, k)[0]


def _parse(proofs: Sequence[bytes], values: int, k: int, place: str = "", first: int = 0) -> list[Polynomial]:
    """Proofs over equally many values, numbered from `first`; `place` opens the reason with the number."""
    if not proofs:
        return []
    terms = min(k, values)
    for number, data in enumerate(proofs, first):
        # SPEC 10.5.3: a proof is 2 + 2k bytes, k = min(128, values).
        if len(data) != 2 + 2 * terms:
            raise ProofError(f"{place.format(number)}{len(data)} bytes, not {2 + 2 * terms}")
    words = np.frombuffer(b"".join(proofs), dtype=">u2").astype(np.uint16).reshape(len(proofs), 1 + terms)
    moduli, coefficients = words[:, 0], words[:, 1:]
    bad = _bad_moduli(moduli, values) | (coefficients.max(axis=1) >= PROOF_FIELD) | _degenerate(coefficients)
    if bad.any():
        row = int(bad.argmax())
        reason = _fault(int(moduli[row]), coefficients[row], values)
        raise ProofError(f"{place.format(first + row)}{reason}")
    return list(zip(moduli.tolist(), coefficients, strict=True))


def _bad_moduli(moduli: NDArray[np.uint16], values: int) -> NDArray[np.bool_]:
    # SPEC 10.5.3: 2^15 < modulus ≤ 65497, and 65497 where every index is below it.
    least = PROOF_FIELD if values <= PROOF_FIELD else PROOF_MIN_MODULUS_EXCLUSIVE + 1
    return (moduli < least) | (moduli > PROOF_FIELD)


def _degenerate(coefficients: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows cannot be an honest polynomial's coefficients, which are as good as random in the field."""
    # SPEC 10.5.3: not zero, not constant, and at most one coefficient in eight is zero.
    terms = coefficients.shape[1]
    present = np.count_nonzero(coefficients, axis=1)
    constant = present - (coefficients[:, 0] != 0) == 0 if terms > 1 else present == 0
    faulty: NDArray[np.bool_] = constant | (terms - present > max(1, terms // 8))
    return faulty


def _fault(modulus: int, coefficients: NDArray[np.uint16], values: int) -> str:
    """What is wrong with a proof of the right length, in words."""
    if not PROOF_MIN_MODULUS_EXCLUSIVE < modulus <= PROOF_FIELD:
        return f"modulus {modulus} is not in ({PROOF_MIN_MODULUS_EXCLUSIVE}, {PROOF_FIELD}]"
    if values <= PROOF_FIELD and modulus != PROOF_FIELD:
        return f"modulus {modulus} is not the largest that keeps {values} indices apart"
    if int(coefficients.max()) >= PROOF_FIELD:
        return f"coefficient {int(coefficients.argmax())} is not below {PROOF_FIELD}"
    return _why_degenerate(coefficients)


def _why_degenerate(coefficients: NDArray[Any]) -> str:
    zeros = len(coefficients) - int(np.count_nonzero(coefficients))
    if zeros == len(coefficients):
        return "the polynomial is zero"
    if not coefficients[1:].any():
        return "the polynomial is constant"
    return f"{zeros} of {len(coefficients)} coefficients are zero, as in no honest polynomial"


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
    return max((_share(value, limit), f"{name} {value:.4g}, limit {limit:.4g}") for name, value, limit in measures)


def _share(value: float, limit: float) -> float:
    """Of a limit. One of zero allows nothing: more than all of it is a number above 1 that can be written down."""
    return value / limit if limit > 0 else float(2 * (value > 0))


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


def batches_of(hiddens: Sequence[Tensor | Bits]) -> Iterator[list[Run]]:
    """All chunks of all traces, in groups of equal size and at most `_BATCH` chunks."""
    by_size: dict[int, list[Run]] = {}
    for trace, hidden in enumerate(hiddens):
        bits = bits_of(hidden)
        whole = len(bits) // PROOF_CHUNK_TOKENS
        end = whole * PROOF_CHUNK_TOKENS
        for run in (
            Run(trace, 0, PROOF_CHUNK_TOKENS, bits[:end].reshape(whole, PROOF_CHUNK_TOKENS * bits.shape[1])),
            Run(trace, whole, len(bits) - end, bits[end:].reshape(1, -1)),
        ):
            if run.bits.size:
                by_size.setdefault(run.bits.shape[1], []).append(run)
    for runs in by_size.values():
        yield from _grouped(runs, _BATCH)


def _grouped(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """The same chunks in the same order, at most `most` in a group."""
    group: list[Run] = []
    room = most
    for run in runs:
        start = 0
        while start < len(run.bits):
            end = min(len(run.bits), start + room)
            group.append(run.part(start, end))
            room -= end - start
            start = end
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def select_largest(runs: Sequence[Run], k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices, ascending, and bits [chunks, k] of the k largest by absolute value, ties to the lower index."""
    chunks, size = sum(len(run.bits) for run in runs), runs[0].bits.shape[1]
    slabs = -(-chunks // max(1, _SLAB // size))
    rows = -(-chunks // slabs)
    scratch = np.empty((rows, size), dtype=np.uint16)  # new memory for every slab would cost as much as the work
    places, bits, done = [], [], 0
    for slab in _grouped(runs, rows):
        values = slab[0].bits if len(slab) == 1 else np.concatenate([run.bits for run in slab])
        found = _candidates(values, k, scratch[: len(values)])
        places.append(found + done * size)
        bits.append(values.reshape(-1)[found])
        done += len(values)
    return _ranked(np.concatenate(places), np.concatenate(bits).astype(np.int64), chunks, size, k)


def _candidates(values: Bits, k: int, magnitudes: Bits) -> NDArray[np.int64]:
    """Places in the flattened chunks [chunks, size] of all that may be among a chunk's k largest.

    Values a fixed stride apart share a maximum, their column's. Only the columns whose maximum reaches a floor that
    k values surely reach are looked at again. `magnitudes` is scratch of equal shape.
    """
    chunks, size = values.shape
    np.bitwise_and(values, np.uint16(0x7FFF), out=magnitudes)
    depth = _depth(size)
    columns = size // depth
    maxima = np.maximum.reduce(magnitudes.reshape(chunks, depth, columns), axis=1)
    if int(maxima.max(initial=0)) >= _EXPONENT:
        raise EngineError("a hidden state is NaN or infinite: no proof can be made or checked")
    if size <= k:
        return np.arange(chunks * size)
    floor = _floor(maxima, k)
    reached = np.flatnonzero(maxima >= floor[:, None])
    chunk = reached // columns
    places = np.arange(depth)[:, None] * columns + (reached + chunk * (size - columns))
    places = places.reshape(-1)
    reaching = np.flatnonzero(magnitudes.reshape(-1).take(places).reshape(depth, -1) >= floor[chunk])
    candidates: NDArray[np.int64] = places[reaching]
    return candidates


def _depth(size: int) -> int:
    """How many values share a maximum: a power of two that divides the size."""
    return min(_DEPTH, size & -size, 1 << max(size // _COLUMNS, 1).bit_length() - 1)


def _ranked(
    places: NDArray[np.int64], bits: NDArray[np.int64], chunks: int, size: int, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The k largest of each chunk among candidates at `places` of the flattened chunks, in order of their index."""
    chunk = places // size
    width = size.bit_length()
    # SPEC 10.5.2: the largest first, ties to the lower index. One sort orders (chunk, −magnitude, index), and the
    # sign travels along.
    rank = (((chunk << 15) + (~bits & 0x7FFF)) << width) + (places - chunk * size)
    rank = np.sort((rank << 1) + (bits >> 15))
    first = np.searchsorted(rank, np.arange(chunks) << width + 16)
    rank = rank[first[:, None] + np.arange(min(k, size))]
    magnitude = ~(rank >> width + 1) & 0x7FFF
    index = rank >> 1 & (1 << width) - 1
    ordered = np.sort((index << 16) + ((rank & 1) << 15) + magnitude, axis=1)
    return ordered >> 16, ordered & 0xFFFF


def _floor(maxima: Bits, k: int) -> Bits:
    """A magnitude [chunks] that at least k of each chunk reach: the k-th largest of a few hundred maxima."""
    chunks, columns = maxima.shape
    width = min(4 * k, columns)
    if width < k:
        return np.zeros(chunks, dtype=np.uint16)
    used = columns // width * width
    coarse = maxima[:, :used].reshape(chunks, -1, width).max(axis=1).astype(np.uint32)  # numpy partitions it faster
    floor: Bits = np.partition(coarse, width - k, axis=1)[:, width - k].astype(np.uint16)
    return floor


def _moduli(indices: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The modulus [chunks, 1] of each row of indices."""
    moduli = np.full((len(indices), 1), PROOF_FIELD)
    if size > PROOF_FIELD:
        residues = np.sort(indices % PROOF_FIELD, axis=1)
        for row in np.flatnonzero((residues[:, 1:] == residues[:, :-1]).any(axis=1)):
            moduli[row] = _modulus(indices[row])
    return moduli


def _modulus(indices: NDArray[np.int64]) -> int:
    # SPEC 10.5.2: the largest modulus ≤ 65497 under which the indices stay distinct.
    for modulus in range(PROOF_FIELD, PROOF_MIN_MODULUS_EXCLUSIVE, -1):
        if len(np.unique(indices % modulus)) == len(indices):
            return modulus
    raise EngineError("no modulus keeps the indices of this chunk apart: no proof can be made")


def _build(runs: Sequence[Run], k: int) -> list[bytes]:
    indices, y = select_largest(runs, k)
    moduli = _moduli(indices, runs[0].bits.shape[1])
    coefficients = interpolate(indices % moduli, y)
    degenerate = _degenerate(coefficients)
    if degenerate.any():
        reason = _why_degenerate(coefficients[int(degenerate.argmax())])
        raise EngineError(f"hidden states too uniform to commit to: {reason}")
    return [row.tobytes() for row in np.concatenate((moduli, coefficients), axis=1).astype(">u2")]


def _compare(
    runs: Sequence[Run], polynomials: Sequence[Polynomial], k: int
) -> Iterator[tuple[int, int, float, float, int, int]]:
    """Each chunk's proof at our own top indices, and at up to 32 indices beside them: the fields of ChunkResult."""
    indices, ours = select_largest(runs, k)
    moduli = np.array([modulus for modulus, _ in polynomials])[:, None]
    x = indices if runs[0].bits.shape[1] <= PROOF_FIELD else indices % moduli
    beside = (indices[:, :_ELSEWHERE] + 1) % moduli
    claimed = evaluate(np.stack([c for _, c in polynomials]), np.concatenate((x, beside), axis=1))
    theirs, other = claimed[:, : x.shape[1]], claimed[:, x.shape[1] :]
    differing = ours ^ theirs
    agree = differing & _EXPONENT == 0
    means, medians = _mantissa(np.abs((ours & 0x7F) - (theirs & 0x7F)).astype(np.int32), agree)
    return zip(
        (x.shape[1] - np.count_nonzero(agree, axis=1)).tolist(),
        np.count_nonzero(differing & 0x8000, axis=1).tolist(),
        means.tolist(),
        medians.tolist(),
        [x.shape[1]] * len(x),
        _elsewhere(x, ours, beside, other).tolist(),
        strict=True,
    )


def _elsewhere(
    x: NDArray[np.int64], ours: NDArray[np.int64], beside: NDArray[np.int64], claimed: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many points beside a chunk's own, and not among them, carry an exponent that one of its own values has."""
    rows = np.arange(len(x))[:, None] * 256
    plausible = np.zeros(256 * len(x), dtype=np.bool_)
    plausible[rows + (ours >> 7 & 0xFF)] = True
    chunk, point = np.nonzero(plausible[rows + (claimed >> 7 & 0xFF)])
    own = (x[chunk] == beside[chunk, point][:, None]).any(axis=1)
    return np.bincount(chunk[~own], minlength=len(x))


def _mantissa(errors: NDArray[np.int32], agree: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mean and median of each row's errors where the exponents agree."""
    count = np.count_nonzero(agree, axis=1)
    means = (errors * agree).sum(axis=1) / np.maximum(count, 1)
    ordered = np.sort(np.where(agree, errors, np.int32(255)), axis=1)
    rows = np.arange(len(errors))
    medians = (ordered[rows, np.maximum(count - 1, 0) // 2] + ordered[rows, count // 2 % errors.shape[1]]) / 2
    nothing = count == 0
    return np.where(nothing, NO_MANTISSA, means), np.where(nothing, NO_MANTISSA, medians)
