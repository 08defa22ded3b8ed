"""Traces that auditors died on, put aside as files for a person to look at.

Nobody is blamed for one: whether the trace was made to do it, or meets a bug of ours, is what the person finds out.
Not here: when a trace comes here (audit.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol import codec
from protocol.errors import RLCommonsError
from protocol.identity import peer_id
from protocol.outputs import cause as why
from trainer.export import trace_file
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionRow
from trainer.rundir import Run


@dataclass(frozen=True, slots=True)
class Kept:
    """A trace in quarantine. `received_ms` is Unix time, `node` a peer id."""

    file: Path
    digest: str
    node: str
    received_ms: int
    policy_version: int
    cause: str


def put_aside(run: Run, ledger: Ledger, row: SubmissionRow) -> str:
    """Write the trace file; says where it lies, or why it could not be written, which stops nothing."""
    path = run.folder.quarantine / f"{row.digest.hex()}.msgpack"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(codec.encode(trace_file(run, ledger, row)))
    except (OSError, RLCommonsError) as error:
        return f"it could not be put aside: {why(error)}"
    return f"it lies in {path} for a person to look at"


def in_quarantine(run: Run, ledger: Ledger) -> list[Kept]:
    """What lies there, oldest first."""
    query = "SELECT node, received_ms, policy_version, died_of FROM submissions WHERE digest = ?"
    found = []
    for path in run.folder.quarantine.glob("*.msgpack"):
        for row in ledger.view(query, (_digest(path),)):
            node, cause = peer_id(row["node"]), row["died_of"] or "unknown"
            found.append(Kept(path, path.stem, node, row["received_ms"], row["policy_version"], cause))
    return sorted(found, key=lambda each: each.received_ms)


def _digest(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.stem)
    except ValueError:
        return b""  # some other file
