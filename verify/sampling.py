"""Drawing tokens with the slot's seed, and measuring whether a claimed token is the one drawn (SPEC 10.3, 10.4).

Not covered: whether the logits are the claimed policy's (toploc.py, prefill.py), and what a distance means
across many traces (calibration).

The normative rule is dense: noise for every token of the vocabulary, then the argmax. It is computed here
without the dense noise, and still exactly. With p = softmax(z), a token of hash h scores at most
logsumexp z + log(p / u), u = (h + ½)/2^32, because −log1p(−u) ≥ u. So a leader's score bounds the hash of every
rival: h ≤ K·p. Likely tokens are hashed and compared; for the many unlikely ones K·p is so small that it is
cheaper to undo the hash of every number below it and see which token ids come out.
CUDA tensors take the dense path, which is cheap there; the tests run it on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.calibration import Limits
from protocol.errors import EngineError, UsageError
from protocol.noise import MAX_U, Words, gumbel, hash_prefixes, hashes, token_keys, tokens_from, unhash
from verify.thresholds import Judgement, at_temperature

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_LIKELY: Final = math.exp(-12.5)  # p above this: hash the token; below: undo the hash. The optimum is flat.
_HOPELESS: Final = 1e-20  # p below this: 46 nats behind, where noises differ by 26 at most
_UNHASHED: Final = 1 << 19  # numbers undone at most; a row needs more once in 10^9, or at logits past 1e7
_SMALL: Final = 1 << 14  # a vocabulary no larger is hashed whole
_VALUES: Final = 1 << 19  # logits worked on at once: bounds memory at any N
_DENSE_ROWS: Final = 64  # the same for the dense path


@dataclass(frozen=True, slots=True)
class MarginResult:
    """margins [N] float32 ≥ 0: how far the claimed token is from the drawn one; logprobs [N] float32 of it."""

    margins: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class _Draws:
    tokens: Ids
    scores: Floats  # z + noise of the token
    log_total: Floats  # logsumexp of z


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
    tokens = np.empty(rows, dtype=np.int64)
    logprobs = np.empty(rows, dtype=np.float32)
    race = _Race(vocabulary)
    for start, z in _blocks(logits, temperatures):
        part = slice(start, start + len(z))
        draws = race.run(z, prefixes[part], start)
        tokens[part] = draws.tokens
        logprobs[part] = z[np.arange(len(z)), draws.tokens] - draws.log_total
    return torch.from_numpy(tokens), torch.from_numpy(logprobs)


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
    claimed = np.array(tokens.tolist() if isinstance(tokens, Tensor) else tokens, dtype=np.int64)
    if claimed.shape != (rows,) or not ((claimed >= 0) & (claimed < vocabulary)).all():
        raise UsageError(f"{rows} token ids below {vocabulary} were expected, one a row of logits")
    prefixes = _prefixes(seeds, positions)
    if logits.device.type != "cpu":
        return _margins_dense(logits, prefixes, claimed, temperatures)
    found = np.empty(rows, dtype=np.float32)
    logprobs = np.empty(rows, dtype=np.float32)
    race = _Race(vocabulary)
    for start, z in _blocks(logits, temperatures):
        if not math.isfinite(float(z.min())):
            raise EngineError(f"the verifier's logits near row {start} are not finite: this trace was not judged")
        part = slice(start, start + len(z))
        draws = race.run(z, prefixes[part], start)
        found[part] = draws.scores - race.score(z, prefixes[part], claimed[part])
        logprobs[part] = z[np.arange(len(z)), claimed[part]] - draws.log_total
    return MarginResult(torch.from_numpy(found), torch.from_numpy(logprobs))


def judge_margins(
    margins: Tensor | NDArray[Any] | Sequence[float], limits: Limits, temperature: float = 1.0
) -> tuple[Judgement, ...]:
    """Hold a trace's margins against the limits: how many positions exceed the hard margin."""
    values = np.asarray(margins, dtype=np.float64)
    hard = at_temperature(limits.margin_hard, temperature)
    # SPEC 10.4: refuse when a margin exceeds the hard limit, beyond the budget for this many tokens.
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
    """Finds the winners of a block of rows; owns the scratch space, so one a call and never shared."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.keys = _keys(vocabulary)
        # A row's likeliest token has p ≥ 1/V, so no row is left without a likely one.
        self.pruned = vocabulary > _SMALL
        self.likely = min(_LIKELY, 0.5 / vocabulary) if self.pruned else _HOPELESS
        rows = _rows_at_once(vocabulary)
        self.p = torch.empty((rows, vocabulary), dtype=torch.float32)
        self.mask = np.empty((rows, vocabulary), dtype=np.bool_)

    def score(self, z: Floats, prefixes: Words, tokens: Ids) -> Floats:
        """z + noise of one token a row."""
        drawn = hashes(prefixes, self.keys[tokens])
        return z[np.arange(len(z)), tokens] + gumbel(drawn)

    def run(self, z: Floats, prefixes: Words, start: int) -> _Draws:
        """The winner of each row of z [R, V] = logits/T; `start` numbers the first row in messages."""
        rows = np.arange(len(z))
        tops = z.argmax(axis=1)
        highest = z[rows, tops]
        if not np.isfinite(highest).all():
            bad = start + int(np.flatnonzero(~np.isfinite(highest))[0])
            raise EngineError(f"the logits of row {bad} are not finite: NaN, infinity or nothing but minus infinity")
        p = torch.softmax(torch.from_numpy(z), dim=1, out=self.p[: len(z)]).numpy()
        log_total = highest - np.log(p[rows, tops])
        likely = np.flatnonzero(np.greater(p, np.float32(self.likely), out=self.mask[: len(z)]))
        if self.pruned and len(z) > 1 and len(likely) > p.size // 3:  # near uniform: keep the tables small
            return _stack([self.run(z[i : i + 1], prefixes[i : i + 1], start + i) for i in range(len(z))])
        first = np.searchsorted(likely, rows * self.vocabulary)
        row = np.repeat(rows, np.diff(first, append=len(likely)))
        token = likely - row * self.vocabulary
        drawn = hashes(prefixes[row], self.keys[token])
        ratio = drawn.astype(np.float32) / p.reshape(-1)[likely]
        closest = np.flatnonzero(ratio == np.minimum.reduceat(ratio, first)[row])
        lead = closest[np.searchsorted(closest, first)]
        bound = _bounds(log_total, z[rows, token[lead]] + gumbel(drawn[lead]))
        rivals = np.flatnonzero(ratio <= bound.astype(np.float32)[row])
        found = [(row[rivals], token[rivals], drawn[rivals])]
        for one in rows if self.pruned else ():
            ids, words = self._unlikely(prefixes[one], bound[one])
            found.append((np.full(len(ids), one), ids, words))
        who, ids, words = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return _best(z, who, ids, words, log_total)

    def _unlikely(self, prefix: np.uint32, bound: float) -> tuple[Ids, Words]:
        """Ids and hashes of every token, likely or not, with a hash up to bound·likely."""
        last = math.ceil(bound * self.likely)
        if last >= _UNHASHED:
            return np.arange(self.vocabulary), hashes(prefix, self.keys)
        ids = tokens_from(prefix, _unhashed()[: last + 1])
        found = np.flatnonzero(ids < np.uint32(self.vocabulary))
        return ids[found].astype(np.int64), found.astype(np.uint32)


def _best(z: Floats, row: Ids, token: Ids, drawn: Words, log_total: Floats) -> _Draws:
    """The highest scorer of each row among candidates (row, token, hash), ties to the lowest id."""
    reached = z[row, token] + gumbel(drawn)
    scores = np.full(len(z), -np.inf, dtype=np.float32)
    np.maximum.at(scores, row, reached)
    best = reached == scores[row]
    winners = np.full(len(z), z.shape[1], dtype=np.int64)
    np.minimum.at(winners, row[best], token[best])
    return _Draws(winners, scores, log_total)


def _stack(draws: Sequence[_Draws]) -> _Draws:
    return _Draws(
        np.concatenate([d.tokens for d in draws]),
        np.concatenate([d.scores for d in draws]),
        np.concatenate([d.log_total for d in draws]),
    )


def _bounds(log_total: Floats, lead: Floats) -> NDArray[np.float64]:
    """K a row: no token with a hash above K·p can reach the leader's score. The slack covers float32 rounding
    of z, of p, of the noise and of their sums, which grows with their size."""
    slack = 1e-3 + (np.abs(log_total) + np.abs(lead) + 32.0) * 2.0**-20
    exponent: NDArray[np.float64] = log_total.astype(np.float64) - lead + slack
    return np.exp(np.minimum(exponent, 50.0)) * 2.0**32  # beyond e^50 nothing is pruned


def _rows_at_once(vocabulary: int) -> int:
    return max(16, _VALUES // vocabulary)


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
    # A tensor's integers are signed: the same 64 bits.
    words = [seed % 2**64 for seed in seeds.tolist()] if isinstance(seeds, Tensor) else seeds
    return hash_prefixes(words, positions)


def _blocks(logits: Tensor, temperatures: Sequence[float]) -> Iterator[tuple[int, Floats]]:
    """(first row, logits/T in float32) of a few rows at a time."""
    scale = torch.tensor(temperatures, dtype=torch.float32).view(-1, 1)
    plain = bool((scale == 1).all())
    step = _rows_at_once(logits.shape[1])
    for start in range(0, len(logits), step):
        block = logits[start : start + step].detach().to(torch.float32).contiguous()
        yield start, (block if plain else block / scale[start : start + step]).numpy()


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
    """z and z + noise of the block of rows that begins at `start`."""
    part = slice(start, start + _DENSE_ROWS)
    scale = torch.tensor(temperatures[part], dtype=torch.float32, device=logits.device)
    z = logits[part].detach().to(torch.float32) / scale.view(-1, 1)
    return z, z + dense_noise(prefixes[part], logits.shape[1], logits.device)


def _sample_dense(logits: Tensor, prefixes: Words, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    if bool(torch.isnan(logits).any()) or not bool(torch.isfinite(logits.amax(dim=1)).all()):
        raise EngineError("logits are not finite: NaN, infinity or nothing but minus infinity in a row")
    tokens, logprobs = [], []
    for start in range(0, len(logits), _DENSE_ROWS):
        z, scores = _dense(logits, prefixes, temperatures, start)
        chosen = scores.argmax(dim=1, keepdim=True)
        tokens.append(chosen[:, 0])
        logprobs.append(torch.log_softmax(z, dim=1).gather(1, chosen)[:, 0])
    return torch.cat(tokens), torch.cat(logprobs)


def _margins_dense(logits: Tensor, prefixes: Words, claimed: Ids, temperatures: Sequence[float]) -> MarginResult:
    if not bool(torch.isfinite(logits).all()):
        raise EngineError("the verifier's logits are not finite: this trace was not judged")
    found, logprobs = [], []
    for start in range(0, len(logits), _DENSE_ROWS):
        z, scores = _dense(logits, prefixes, temperatures, start)
        y = torch.from_numpy(claimed[start : start + _DENSE_ROWS]).to(logits.device).view(-1, 1)
        found.append(scores.amax(dim=1) - scores.gather(1, y)[:, 0])
        logprobs.append(torch.log_softmax(z, dim=1).gather(1, y)[:, 0])
    return MarginResult(torch.cat(found), torch.cat(logprobs))
