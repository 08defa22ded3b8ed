"""The seeded sampler's noise: what a slot's seed, a position and a token id are worth (SPEC 8.5, 10.2).

Both sides must compute it alike, so it is integers up to the last step and needs numpy alone.
Not here: choosing a token or checking a choice (verify/sampling.py), or who gets which seed (lease.py).

Source: MurmurHash3_x86_32 (Austin Appleby, public domain) over 16 bytes; vLLM's seeded sampler on its V2
model runner draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import UsageError

Words = NDArray[np.uint32]

SEED_PERSON: Final = b"rlcommons-seed-1"
# The largest float32 below 1: at 1 the noise would be minus infinity.
MAX_U: Final = np.float32(1.0 - 2.0**-24)

_C1: Final = np.uint32(0xCC9E2D51)
_C2: Final = np.uint32(0x1B873593)
_FIVE: Final = np.uint32(5)
_STEP: Final = np.uint32(0xE6546B64)
_F1: Final = np.uint32(0x85EBCA6B)
_F2: Final = np.uint32(0xC2B2AE35)
_LENGTH: Final = np.uint32(16)  # bytes hashed
_13, _15, _16, _17, _19, _26 = (np.uint32(bits) for bits in (13, 15, 16, 17, 19, 26))


def _inverse(odd: np.uint32) -> np.uint32:
    return np.uint32(pow(int(odd), -1, 2**32))


_UN_C1: Final = _inverse(_C1)
_UN_C2: Final = _inverse(_C2)
_UN_FIVE: Final = _inverse(_FIVE)
_UN_F1: Final = _inverse(_F1)
_UN_F2: Final = _inverse(_F2)


def slot_seed(data: bytes) -> int:
    """The 64-bit seed of a slot from the bytes it is bound to."""
    # SPEC 8.5: slot seed = first 8 bytes, little-endian, of BLAKE2b(data, person="rlcommons-seed-1").
    return int.from_bytes(blake2b(data, person=SEED_PERSON).digest()[:8], "little")


def hash_prefix(seed: int, position: int) -> int:
    """The hash state after seed and position, common to every token at this position.

    `position` is the absolute position of the input token: P - 1 for the first token after a prompt of P.
    """
    return int(hash_prefixes([seed], [position])[0])


def hash_prefixes(seeds: Sequence[int], positions: Sequence[int]) -> Words:
    """`hash_prefix` of each pair: [N]. Raises UsageError for what does not fit 64 and 32 unsigned bits."""
    try:
        seed = np.array(seeds, dtype=np.uint64)
        position = np.array(positions, dtype=np.uint32)
    except (OverflowError, ValueError):
        raise UsageError("a seed is an unsigned 64-bit and a position an unsigned 32-bit integer") from None
    state = np.zeros(len(seed), dtype=np.uint32)
    # SPEC 10.2: the hash reads seed u64 LE ‖ position u32 LE ‖ token id u32 LE.
    for word in (seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32), position):
        state ^= token_keys(word)
        state = (state << _13) | (state >> _19)
        state *= _FIVE
        state += _STEP
    return state


def token_keys(tokens: NDArray[Any]) -> Words:
    """MurmurHash3's scramble of a word, any shape: all that the hash makes of a token id alone.

    Worth caching for a vocabulary.
    """
    keys: Words = np.atleast_1d(tokens).astype(np.uint32) * _C1
    keys = (keys << _15) | (keys >> _17)
    return keys * _C2


def hashes(prefixes: Words | np.uint32, keys: Words) -> Words:
    """The 32-bit hash for each prefix (from hash_prefix) and token key (from token_keys), broadcast together."""
    state: Words = np.bitwise_xor(keys, prefixes)
    spill = state >> _19
    state <<= _13
    state |= spill
    state *= _FIVE
    state += _STEP
    state ^= _LENGTH
    state ^= np.right_shift(state, _16, out=spill)
    state *= _F1
    state ^= np.right_shift(state, _13, out=spill)
    state *= _F2
    state ^= np.right_shift(state, _16, out=spill)
    return state


def unhash(values: Words) -> Words:
    """What prefix XOR token key must be for the hash to come out as `values`: every step can be undone.

    With `tokens_from` it answers "which tokens draw a hash this small?" without hashing a vocabulary.
    """
    state: Words = values ^ (values >> _16)
    state *= _UN_F2
    state ^= (state >> _13) ^ (state >> _26)
    state *= _UN_F1
    state ^= state >> _16
    state ^= _LENGTH
    state -= _STEP
    state *= _UN_FIVE
    return (state >> _13) | (state << _19)


def tokens_from(prefix: np.uint32, unhashed: Words) -> Words:
    """The token ids (any unsigned 32-bit number) whose hash after `prefix` gave `unhash`'s argument."""
    ids: Words = unhashed ^ prefix
    ids *= _UN_C2
    spill = ids << _17
    ids >>= _15
    ids |= spill
    ids *= _UN_C1
    return ids


def gumbel(values: Words) -> NDArray[np.float32]:
    """Standard Gumbel noise of each hash. Small hashes carry the large noise, where float32 is dense."""
    # SPEC 10.2: u = (h >> 16)·2^-16 + ((h & 0xFFFF) + 0.5)·2^-32 in float32, clamped below 1; the sum is exact
    # in float64, so one rounding gives the same float32.
    u = ((values.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    u = np.minimum(u, MAX_U)
    # SPEC 10.2: g = -log(-log1p(-u)). Logs in float64, because float32 logs differ between processors.
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-u.astype(np.float64)))).astype(np.float32)
    return noise


def noise(seed: int, positions: NDArray[Any], tokens: NDArray[Any]) -> NDArray[np.float32]:
    """Gumbel noise of a slot at (position, token), the two arrays broadcast together.

    `noise(seed, positions[:, None], np.arange(V)[None])` is the whole [positions, V] table.
    """
    where = np.atleast_1d(positions)
    distinct, back = np.unique(where, return_inverse=True)
    states = hash_prefixes([seed] * len(distinct), distinct.tolist())
    return gumbel(hashes(states[back.reshape(where.shape)], token_keys(tokens)))
