"""The audit's draw: committed beforehand, unforeseeable, checkable afterwards, and fair."""

from __future__ import annotations

import hashlib

import pytest

from trainer.audit_draw import AuditChain
from verify.draw import draw, is_drawn, is_of_chain

SECRET = hashlib.sha256(b"secret").digest()
CHAIN = AuditChain(SECRET, length=2500)


def test_each_value_is_the_hash_of_the_next() -> None:
    for epoch in (0, 1, 1022, 1023, 1024, 1025, 2047, 2048, 2498):
        assert CHAIN.value(epoch) == hashlib.sha256(CHAIN.value(epoch + 1)).digest()
    assert CHAIN.value(2499) == SECRET


def test_the_anchor_commits_to_every_value_and_to_no_other() -> None:
    assert is_of_chain(CHAIN.anchor, 0, CHAIN.value(0))
    assert is_of_chain(CHAIN.anchor, 1500, CHAIN.value(1500))
    assert not is_of_chain(CHAIN.anchor, 1500, CHAIN.value(1501))
    assert not is_of_chain(CHAIN.anchor, 1500, SECRET)


@pytest.mark.parametrize("length", [1, 2, 1023, 1024, 1025, 2048, 2049])
def test_a_chain_of_any_length_is_whole(length: int) -> None:
    chain = AuditChain(SECRET, length=length)
    for epoch in {0, length // 2, length - 1}:
        assert is_of_chain(chain.anchor, epoch, chain.value(epoch))


@pytest.mark.parametrize("epoch", [-1, 2500])
def test_a_version_beyond_the_chain_is_an_error(epoch: int) -> None:
    with pytest.raises(ValueError, match="ends at version 2499"):
        CHAIN.value(epoch)


def test_the_draw_is_the_hash_of_value_and_digest_as_a_fraction() -> None:
    value, digest = b"\x01" * 32, b"\x02" * 32
    number = int.from_bytes(hashlib.blake2b(value + digest, digest_size=32).digest(), "big")
    assert draw(value, digest) == pytest.approx(number / 2**256, abs=2**-53)
    assert 0.0 <= draw(value, digest) < 1.0


def test_a_rate_of_one_draws_everything_and_of_none_nothing() -> None:
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(200)]
    assert all(is_drawn(SECRET, digest, 1.0) for digest in digests)
    assert not any(is_drawn(SECRET, digest, 0.0) for digest in digests)


def test_the_share_drawn_is_the_rate() -> None:
    digests = [hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(20_000)]
    share = sum(is_drawn(SECRET, digest, 0.25) for digest in digests) / len(digests)
    assert abs(share - 0.25) < 0.015  # five standard deviations


def test_the_same_submission_is_drawn_anew_in_another_epoch() -> None:
    digests = [hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(500)]
    one = [is_drawn(CHAIN.value(3), digest, 0.5) for digest in digests]
    other = [is_drawn(CHAIN.value(4), digest, 0.5) for digest in digests]
    assert 150 < sum(a != b for a, b in zip(one, other, strict=True)) < 350
