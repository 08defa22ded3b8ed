"""Which submissions are audited: a draw that nobody can foresee and anybody can check afterwards (SPEC 10.7).

A hash chain is made backwards from a secret: s_e = SHA-256(s_{e+1}). The genesis publishes SHA-256(s_0), so every
value is fixed before the run begins; s_e serves policy version e, and publishing it later lets anyone repeat the
draws of that version. Not here: the draw itself (verify/draw.py) and a node's sampling rate (standing.py).
"""

from __future__ import annotations

import hashlib
from typing import Final

from verify.draw import descend

# Versions a run can have. Making the chain costs about half a second, which every start of the gateway pays.
CHAIN_LENGTH: Final = 2**20
LAST_VERSION: Final = CHAIN_LENGTH - 1
_STRIDE: Final = 1024


class AuditChain:
    """The values s_0 … s_{length-1} of one secret; keeps every 1024th and hashes down to the others."""

    def __init__(self, secret: bytes, length: int = CHAIN_LENGTH) -> None:
        self._length = length
        self._kept = {length - 1: secret}
        place = length - 1
        while place > 0:
            steps = place % _STRIDE or min(_STRIDE, place)
            self._kept[place - steps] = descend(self._kept[place], steps)
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
        return descend(self._kept[above], above - epoch)
