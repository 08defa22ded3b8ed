"""The engine's side of a device that it shares with a learner (protocol/device_turns.py): it draws in its turn, and
gives way once the learner asks and nothing is left to draw.

Not here: what it does with its memory meanwhile (the engines), who gets how many leases (the trainer).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import trio

from protocol.device_turns import ENGINE, POLL_SECONDS, Turns

LOOK_SECONDS: Final = 0.1  # between two looks at whether the learner asks, while nothing else happens


class Share:
    """Of a device of this node's own, the whole; of a shared one, turns. Raises StorageError for a folder that cannot
    be used."""

    def __init__(self, folder: Path | None) -> None:
        self._turns = None if folder is None else Turns(folder, ENGINE)

    @property
    def is_shared(self) -> bool:
        return self._turns is not None

    @property
    def held(self) -> bool:
        return self._turns is None or self._turns.held

    @property
    def is_asked_for(self) -> bool:
        """The learner wants the device."""
        return self._turns is not None and self._turns.is_asked()

    async def take(self) -> None:
        """Wait for a turn. The learner's take as long as they take, and end with it."""
        while self._turns is not None and (self._turns.is_asked() or not self._turns.take()):
            await trio.sleep(POLL_SECONDS)

    def give_back(self) -> None:
        if self._turns is not None:
            self._turns.give_back()

    def close(self) -> None:
        """Give up turns for good."""
        if self._turns is not None:
            self._turns.close()
