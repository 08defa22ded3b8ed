"""Drawing tokens with the slot's seed, and measuring whether a claimed token is the one drawn (SPEC 10).

Not covered: whether the logits are the claimed policy's (toploc.py, prefill.py), and what a distance means
across many traces (calibration).

The normative rule is dense: noise for every token of the vocabulary, then the argmax. It is computed here
without the dense noise, and still exactly. With e = exp(z − max z), a token of hash h scores at most
max z + log(e / u), u = (h + ½)/2^32, because −log1p(−u) ≥ u. So the leader's score bounds the hash of every
rival: h ≤ K·e. Likely tokens (large e) are hashed and compared; for the many unlikely ones K·e is so small that
it is cheaper to undo the hash of every number below it and see which token ids come out.
CUDA tensors take the dense path, which is cheap there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import EngineError, UsageError
from protocol.noise import MAX_U, Words, gumbel, hash_prefix, hashes, token_keys, tokens_from, unhash
from verify.thresholds import Judgement, Limits, at_temperature

Floats = NDArray[np.float32]

_LIKELY: Final = math.exp(-12.0)  # e above this: hash the token. Below: undo the hash. Measured optimum is flat.
_UNHASHED: Final = 1 << 19  # numbers undone at most; K·e^-12 exceeds it only when logits pass about 1e7
_ROWS: Final = 64  # rows converted at once: bounds memory at any N


@dataclass(frozen=True, slots=True)
class MarginResult:
    """margins [N] float32 ≥ 0: how far the claimed token is from the drawn one; logprobs [N] float32 of it."""

    margins: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class _Draw:
    token: int
    score: float  # z + noise of the token
    log_total: float  # logsumexp of z


def sample(
    logits: Tensor, seeds: Sequence[int] | Tensor, positions: Sequence[int], temperatures: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: y = argmax(logits/T + noise), ties to the lowest id.

    logits [B, V] float32 (others are converted); −inf forbids a token. positions[b] is the absolute position
    of row b's input token. Returns tokens int64 [B] and logprobs float32 [B], log_softmax(logits/T)[y]: the
    policy's own logprob at this temperature, without the noise.
    Raises EngineError for NaN, +inf or all −inf, UsageError for a bad temperature, seed or position.
    """
    rows, vocabulary = _shape(logits, seeds, positions, temperatures)
    prefixes = _prefixes(seeds, positions)
    if logits.device.type != "cpu":
        return _sample_dense(logits, prefixes, temperatures)
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float32)
    race = _Race(vocabulary)
    for row, z in enumerate(_rows(logits, temperatures)):
        draw = race.run(z, prefixes[row], row)
        tokens[row] = draw.token
        logprobs[row] = float(z[draw.token]) - draw.log_total
    return tokens, logprobs


def margins(
    logits: Tensor,
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int],
    tokens: Sequence[int] | Tensor,
    temperatures: Sequence[float],
) -> MarginResult:
    """m = max_v(logits/T + noise) − (logits/T + noise)[y] for each claimed token y, and y's logprob.

    logits [N, V] are the verifier's own, so one that is not finite is its fault and raises EngineError: never
    a margin. UsageError for a token outside the vocabulary (check the range first), a bad temperature, seed
    or position. Memory beyond the arguments does not grow with N.
    """
    rows, vocabulary = _shape(logits, seeds, positions, temperatures)
    claimed = [int(t) for t in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
    if len(claimed) != rows or not all(0 <= t < vocabulary for t in claimed):
        raise UsageError(f"{rows} token ids below {vocabulary} were expected, one a row of logits")
    prefixes = _prefixes(seeds, positions)
    if logits.device.type != "cpu":
        return _margins_dense(logits, prefixes, claimed, temperatures)
    found = np.empty(rows, dtype=np.float32)
    logprobs = np.empty(rows, dtype=np.float32)
    race = _Race(vocabulary)
    for row, z in enumerate(_rows(logits, temperatures)):
        if not math.isfinite(float(z.min())):
            raise EngineError(f"the verifier's logits of row {row} are not finite: this trace was not judged")
        token = claimed[row]
        draw = race.run(z, prefixes[row], row)
        found[row] = draw.score - race.score(z, prefixes[row], np.array([token]))[0]
        logprobs[row] = float(z[token]) - draw.log_total
    return MarginResult(torch.from_numpy(found), torch.from_numpy(logprobs))


def judge_margins(
    margins: Tensor | NDArray[Any] | Sequence[float], limits: Limits, temperature: float = 1.0
) -> tuple[Judgement, ...]:
    """Hold a trace's margins against the limits: how many positions exceed the hard margin."""
    values = np.asarray(margins, dtype=np.float64)
    hard = at_temperature(limits.margin_hard, temperature)
    # SPEC 10: refuse when a margin exceeds the hard limit, beyond the budget for this many tokens.
    allowed = math.floor(limits.margin_budget * len(values) / 4096)
    over = np.flatnonzero(~(values <= hard))
    worst = int(values.argmax()) if len(values) else 0
    ok = len(over) <= allowed
    detail = f"{len(over)} of {len(values)} tokens are over the margin of {hard:g}, {allowed} may be"
    return (
        Judgement(
            ok=ok,
            value=float(values[worst]) if len(values) else 0.0,
            limit=hard,
            span=None if ok else (int(over[0]), int(over[-1]) + 1),
            detail=detail,
        ),
    )


class _Race:
    """Finds the winner of one row at a time; owns the scratch space, so one a call and never shared."""

    def __init__(self, vocabulary: int) -> None:
        self.keys = _keys(vocabulary)
        self.vocabulary = np.uint32(vocabulary)
        self.e: Floats = np.empty(vocabulary, dtype=np.float32)
        self.mask = np.empty(vocabulary, dtype=np.bool_)

    def score(self, z: Floats, prefix: np.uint32, tokens: NDArray[Any]) -> Floats:
        return z[tokens] + gumbel(hashes(prefix, self.keys[tokens]))

    def run(self, z: Floats, prefix: np.uint32, row: int) -> _Draw:
        top = float(z.max())
        if not math.isfinite(top):
            raise EngineError(f"the logits of row {row} hold NaN or infinity, or nothing but minus infinity")
        e = np.subtract(z, np.float32(top), out=self.e)
        np.exp(e, out=e)
        total = float(e.sum())
        likely = np.flatnonzero(np.greater(e, np.float32(_LIKELY), out=self.mask))
        drawn = hashes(prefix, self.keys[likely])
        ratio = drawn / e[likely]
        lead = likely[ratio.argmin()]
        bound = _bound(top, float(self.score(z, prefix, lead[None])[0]))
        rivals = likely[ratio <= bound]
        below = math.ceil(bound * _LIKELY)
        if below < _UNHASHED:
            unlikely = tokens_from(prefix, _unhashed()[: below + 1])
            rivals = np.concatenate((rivals, unlikely[unlikely < self.vocabulary]))
        else:
            rivals = np.arange(self.vocabulary)
        scores = self.score(z, prefix, rivals)
        best = scores.max()
        return _Draw(int(rivals[scores == best].min()), float(best), top + math.log(total))


def _bound(top: float, lead: float) -> float:
    """K: no token with hash above K·e can reach the leader's score. The slack covers float32 rounding of z,
    of the noise and of their sum, which grows with their size."""
    slack = 1e-3 + (abs(top) + abs(lead) + 32.0) * 2.0**-20
    return math.exp(min(top - lead + slack, 600.0)) * 2.0**32


@lru_cache(maxsize=8)
def _keys(vocabulary: int) -> Words:
    return token_keys(np.arange(vocabulary))


@lru_cache(maxsize=1)
def _unhashed() -> Words:
    return unhash(np.arange(_UNHASHED, dtype=np.uint32))


def _shape(
    logits: Tensor, seeds: Sequence[int] | Tensor, positions: Sequence[int], temperatures: Sequence[float]
) -> tuple[int, int]:
    if logits.ndim != 2 or not logits.shape[1]:
        raise UsageError(f"logits must be [rows, vocabulary], not {tuple(logits.shape)}")
    rows, vocabulary = logits.shape
    if not len(seeds) == len(positions) == len(temperatures) == rows:
        raise UsageError(f"{rows} rows of logits need as many seeds, positions and temperatures")
    for temperature in temperatures:
        if not (math.isfinite(temperature) and temperature > 0):
            raise UsageError(f"a temperature is a positive number, not {temperature}")
    return rows, vocabulary


def _prefixes(seeds: Sequence[int] | Tensor, positions: Sequence[int]) -> Words:
    # A torch integer is signed: the same 64 bits.
    pairs = zip(seeds, positions, strict=True)
    return np.array([hash_prefix(int(s) % 2**64, int(p)) for s, p in pairs], dtype=np.uint32)


def _rows(logits: Tensor, temperatures: Sequence[float]) -> Any:
    """Each row as logits/T in float32. The array is reused: take what you need before the next one."""
    scaled = np.empty(logits.shape[1], dtype=np.float32)
    done = 0
    for block in logits.detach().split(_ROWS):
        values = block.to(torch.float32).contiguous().numpy()
        for z in values:
            temperature = np.float32(temperatures[done])
            yield z if temperature == 1 else np.divide(z, temperature, out=scaled)
            done += 1


def dense_noise(prefixes: Words, vocabulary: int, device: torch.device | str) -> Tensor:
    """The noise of every token, float32 [B, vocabulary], in torch's own integers on any device.

    Equal hashes; float32 logs, so a noise may differ from protocol/noise.py in the last places.
    """
    signed = torch.from_numpy(prefixes.view(np.int32).copy()).to(device).view(-1, 1)
    keys = torch.from_numpy(_keys(vocabulary).view(np.int32)).to(device)
    h = signed ^ keys
    h = (h << 13) | ((h >> 19) & 0x1FFF)  # >> keeps the sign of int32, hence the masks
    h = h * 5 + _signed(0xE6546B64)
    h ^= 16
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= _signed(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    u = ((h >> 16) & 0xFFFF).to(torch.float32) * 2.0**-16
    u += ((h & 0xFFFF).to(torch.float32) + 0.5) * 2.0**-32
    u.clamp_(max=float(MAX_U))
    return u.neg_().log1p_().neg_().log_().neg_()


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _dense(logits: Tensor, prefixes: Words, temperatures: Sequence[float], start: int) -> tuple[Tensor, Tensor]:
    """z and z + noise of a block of rows that begins at `start`."""
    stop = start + len(logits)
    scale = torch.tensor(temperatures[start:stop], dtype=torch.float32, device=logits.device)
    z = logits.detach().to(torch.float32) / scale.view(-1, 1)
    return z, z + dense_noise(prefixes[start:stop], logits.shape[1], logits.device)


def _sample_dense(logits: Tensor, prefixes: Words, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    if bool(torch.isnan(logits).any()) or not bool(torch.isfinite(logits.amax(dim=1)).all()):
        raise EngineError("the logits hold NaN or infinity, or nothing but minus infinity in a row")
    tokens, logprobs = [], []
    for index, block in enumerate(logits.split(_ROWS)):
        z, scores = _dense(block, prefixes, temperatures, index * _ROWS)
        chosen = scores.argmax(dim=1, keepdim=True)
        tokens.append(chosen[:, 0])
        logprobs.append(torch.log_softmax(z, dim=1).gather(1, chosen)[:, 0])
    return torch.cat(tokens), torch.cat(logprobs)


def _margins_dense(
    logits: Tensor, prefixes: Words, claimed: Sequence[int], temperatures: Sequence[float]
) -> MarginResult:
    if not bool(torch.isfinite(logits).all()):
        raise EngineError("the verifier's logits are not finite: this trace was not judged")
    found, logprobs = [], []
    for index, block in enumerate(logits.split(_ROWS)):
        z, scores = _dense(block, prefixes, temperatures, index * _ROWS)
        start = index * _ROWS
        y = torch.tensor(claimed[start : start + len(block)], device=logits.device).view(-1, 1)
        found.append(scores.amax(dim=1) - scores.gather(1, y)[:, 0])
        logprobs.append(torch.log_softmax(z, dim=1).gather(1, y)[:, 0])
    return MarginResult(torch.cat(found), torch.cat(logprobs))
