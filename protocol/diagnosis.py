"""What the doctors of both sides say: one line for each thing they looked at.

Not here: what they look at (each package's doctor.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from protocol.outputs import printable


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ACT = "act"  # it cannot go on like this


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, what to do."""

    what: str
    level: Level
    text: str

    @property
    def needs_action(self) -> bool:
        return self.level is Level.ACT

    def line(self) -> str:
        return printable(f"{self.level:<8} {self.what:<10} {self.text}")

    def json(self) -> str:
        return json.dumps({"what": self.what, "level": str(self.level), "text": self.text})
