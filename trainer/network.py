"""What the trainer's network carries: bytes in and out, and what of them it relays between nodes.

The gateway writes it as RUN/network.json, everybody else reads it; counters are since the gateway's start. Not here:
the limits (config.py), relaying itself (protocol/net).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from trainer.rundir import RunFolder

if TYPE_CHECKING:
    from protocol.net.base import HostStatistics


def write_network(folder: RunFolder, statistics: HostStatistics, at_ms: int) -> None:
    """For people alone: a disk that takes it not is told of where something is lost by it."""
    beside = folder.network.with_suffix(".new")
    with contextlib.suppress(OSError):
        beside.write_text(json.dumps({"at_ms": at_ms, **dataclasses.asdict(statistics)}), encoding="utf-8")
        beside.replace(folder.network)


def read_network(folder: RunFolder) -> dict[str, Any] | None:
    """The last that was written; None before the first."""
    try:
        found = json.loads(folder.network.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def network_line(found: dict[str, Any]) -> str:
    """For a person."""
    sent, relayed = found.get("bytes_out", 0), found.get("relayed_bytes", 0)
    text = f"{sent / 1e6:,.1f} MB sent"
    if relayed or found.get("reservations"):
        text += (
            f", of it {relayed / 1e6:,.1f} MB relayed between nodes "
            f"({found.get('reservations', 0)} can be reached through here, {found.get('circuits', 0)} circuits now)"
        )
    return text
