"""The seeded noise against known answers and an independent MurmurHash3."""

import struct
from hashlib import blake2b

import mmh3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from protocol.noise import gumbel, hash_prefix, hash_prefixes, hashes, noise, slot_seed, token_keys, tokens_from, unhash

SEED = 0x0123456789ABCDEF
seeds = st.integers(0, 2**64 - 1)
words = st.integers(0, 2**32 - 1)


def draw(seed: int, position: int, token: int) -> int:
    return int(hashes(np.uint32(hash_prefix(seed, position)), token_keys(np.array([token])))[0])


def test_many_prefixes_at_once_are_those_one_by_one() -> None:
    seeds, positions = [0, SEED, 2**64 - 1], [0, 7, 2**32 - 1]
    assert hash_prefixes(seeds, positions).tolist() == [
        hash_prefix(s, p) for s, p in zip(seeds, positions, strict=True)
    ]


def test_the_known_answers_of_the_specification() -> None:
    assert [draw(SEED, 7, token) for token in range(4)] == [0x6306C66D, 0x409F3865, 0x0D312CC6, 0x7F09F9CB]


@given(seeds, words, words)
def test_the_hash_is_murmur3_of_sixteen_bytes(seed: int, position: int, token: int) -> None:
    assert draw(seed, position, token) == mmh3.hash(struct.pack("<QII", seed, position, token), 0, signed=False)


@given(seeds, words, st.lists(words, min_size=1, max_size=20))
def test_a_hash_can_be_undone_to_the_token_that_drew_it(seed: int, position: int, tokens: list[int]) -> None:
    prefix = np.uint32(hash_prefix(seed, position))
    drawn = hashes(prefix, token_keys(np.array(tokens)))
    assert tokens_from(prefix, unhash(drawn)).tolist() == tokens


def test_noise_is_broadcast_over_positions_and_tokens() -> None:
    table = noise(SEED, np.array([[3], [7], [3]]), np.arange(5)[None])
    assert table.shape == (3, 5) and table.dtype == np.float32
    assert (table[0] == table[2]).all()
    assert (table[1] == gumbel(np.array([draw(SEED, 7, t) for t in range(5)], dtype=np.uint32))).all()


def test_noise_is_the_double_logarithm_of_u_and_finite_at_both_ends() -> None:
    ends = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    u = np.minimum(np.float32((ends + 0.5) * 2.0**-32), np.float32(1 - 2.0**-24)).astype(np.float64)
    assert gumbel(ends) == pytest.approx(-np.log(-np.log1p(-u)), rel=1e-6)
    assert gumbel(ends)[0] == pytest.approx(22.874, abs=1e-3)
    assert np.isfinite(gumbel(ends)).all() and (np.diff(gumbel(ends)) <= 0).all()


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    values = noise(SEED, np.arange(50)[:, None], np.arange(4000)[None]).astype(np.float64)
    assert values.mean() == pytest.approx(0.57722, abs=0.01)
    assert values.var() == pytest.approx(np.pi**2 / 6, rel=0.02)


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    here = noise(SEED, np.arange(100)[:, None], np.arange(2000)[None]).astype(np.float64)
    there = noise(SEED + 1, np.arange(100)[:, None], np.arange(2000)[None]).astype(np.float64)
    for a, b in ((here[:, 1:], here[:, :-1]), (here[1:], here[:-1]), (here, there)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_a_slot_seed_is_the_head_of_a_personalised_digest() -> None:
    digest = blake2b(b"run/policy/task/slot", person=b"rlcommons-seed-1").digest()
    assert slot_seed(b"run/policy/task/slot") == struct.unpack("<Q", digest[:8])[0]
    assert slot_seed(b"") != slot_seed(b"\0")


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_a_seed_or_position_that_does_not_fit_is_named(seed: int, position: int) -> None:
    with pytest.raises(UsageError, match="unsigned"):
        hash_prefix(seed, position)
