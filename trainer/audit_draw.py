"""Which submissions are audited: a draw that nobody can foresee and anybody can check afterwards (SPEC 10.7).

A hash chain is made backwards from a secret: s_e = SHA-256(s_{e+1}). The genesis publishes SHA-256(s_0), so every
value is fixed before the run begins; s_e serves policy version e, and publishing it later lets anyone repeat the
draws of that version. Not here: a node's sampling rate (standing.py).
"""

from __future__ import annotations

import hashlib
from typing import Final

# Versions a run can have. Making the chain costs about half a second, which every start of the gateway pays.
CHAIN_LENGTH: Final = 2**20
_STRIDE: Final = 1024


def _descend(value: bytes, steps: int) -> bytes:
    for _ in range(steps):
        value = hashlib.sha256(value).digest()
    return value


class AuditChain:
    """The values s_0 … s_{length-1} of one secret; keeps every 1024th and hashes down to the others."""

    def __init__(self, secret: bytes, length: int = CHAIN_LENGTH) -> None:
        self._length = length
        self._kept = {length - 1: secret}
        place = length - 1
        while place > 0:
            steps = place % _STRIDE or min(_STRIDE, place)
            self._kept[place - steps] = _descend(self._kept[place], steps)
            place -= steps

    @property
    def anchor(self) -> bytes:
        """SHA-256(s_0), what the genesis publishes."""
        return hashlib.sha256(self.value(0)).digest()

    def value(self, epoch: int) -> bytes:
        """s_epoch. Raises ValueError for a policy version beyond the chain."""
        if not 0 <= epoch < self._length:
            raise ValueError(f"the audit chain of this run ends at version {self._length - 1}, asked for {epoch}")
        above = min(-(-epoch // _STRIDE) * _STRIDE, self._length - 1)
        return _descend(self._kept[above], above - epoch)


def is_of_chain(anchor: bytes, epoch: int, value: bytes) -> bool:
    """Whether a revealed value is the one the genesis committed to."""
    return _descend(value, epoch + 1) == anchor


def draw(value: bytes, digest: bytes) -> float:
    """SPEC 10.7: BLAKE2b-256(s_e ‖ submission digest) / 2^256, from 0 to below 1."""
    number = int.from_bytes(hashlib.blake2b(value + digest, digest_size=32).digest(), "big")
    # The first 53 bits: a float holds no more, and rounding up to 1 would break a rate of 1.
    return (number >> 203) / 2**53


def is_drawn(value: bytes, digest: bytes, rate: float) -> bool:
    """Whether the submission is audited at this sampling rate; always at rate 1."""
    return draw(value, digest) < rate
