"""Whether a submission is audited, given the epoch's value: anyone can repeat it afterwards (SPEC 10.7).

The values form a hash chain made backwards from a secret, s_e = SHA-256(s_{e+1}); the genesis publishes
SHA-256(s_0). Not here: the secret's side of the chain (trainer/audit_draw.py) and the rate (standing.py).
"""

from __future__ import annotations

import hashlib


def descend(value: bytes, steps: int) -> bytes:
    """The value so many epochs earlier in the chain."""
    for _ in range(steps):
        value = hashlib.sha256(value).digest()
    return value


def is_of_chain(anchor: bytes, epoch: int, value: bytes) -> bool:
    """Whether a revealed value is the one the genesis committed to."""
    return descend(value, epoch + 1) == anchor


def draw(value: bytes, digest: bytes) -> float:
    """SPEC 10.7: the first 53 bits of BLAKE2b-256(s_e ‖ trace digest) over 2^53, from 0 to below 1."""
    number = int.from_bytes(hashlib.blake2b(value + digest, digest_size=32).digest(), "big")
    # A float holds 53 bits; rounding up to 1 would break a rate of 1.
    return (number >> 203) / 2**53


def is_drawn(value: bytes, digest: bytes, rate: float) -> bool:
    """Whether the submission is audited at this sampling rate; always at rate 1."""
    return draw(value, digest) < rate
