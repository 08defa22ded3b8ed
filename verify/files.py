"""Trace files: reading one, and what must hold before a single check is run (SPEC 8.9, 14).

Not here: the checks (check.py) and the command (cli.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol import codec, identity
from protocol.envelope import Signed, unseal
from protocol.errors import RemoteError, UsageError
from protocol.lease import Lease, check_lease
from protocol.limits import MAX_TRACE_BYTES
from protocol.policy import policy_root
from protocol.run import Genesis, open_genesis, run_id
from protocol.trace import Trace, TraceFile
from protocol.verdict import Receipt, Verdict, check_verdict

# A trace, its lease with a prompt of the greatest length, and the small objects beside them.
MAX_FILE_BYTES = MAX_TRACE_BYTES + 1024 * 1024


@dataclass(frozen=True, slots=True)
class Evidence:
    """A trace file, opened: everything but the trace is verified to be the trainer's."""

    run: bytes
    genesis: Genesis
    lease: Lease
    signed_trace: Signed
    trace: Trace
    receipt: Receipt | None
    verdict: Verdict | None


def read_evidence(path: Path) -> Evidence:
    """Open a trace file. Raises UsageError when it is unreadable, is not a trace file, or holds a genesis,
    lease, receipt or verdict that is not the trainer's: then there is nothing to judge."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has {size:,} bytes, a trace file has at most {MAX_FILE_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    try:
        return _open(codec.decode(TraceFile, data))
    except RemoteError as error:
        raise UsageError(f"{path} cannot be judged: {error} [{error.code}]") from None


def _open(file: TraceFile) -> Evidence:
    run = run_id(file.genesis)
    genesis = open_genesis(file.genesis, run=run)
    trainer = genesis.trainer
    lease = unseal(Lease, file.lease, signer=trainer)
    check_lease(lease)
    # Whether the trace is signed by its node is the first check, so a bad signature is a refusal, not an error.
    trace = codec.decode(Trace, file.trace.payload, most=MAX_TRACE_BYTES)
    receipt = None if file.receipt is None else unseal(Receipt, file.receipt, signer=trainer)
    verdict = None if file.verdict is None else unseal(Verdict, file.verdict, signer=trainer)
    if verdict is not None:
        check_verdict(verdict)
    return Evidence(run, genesis, lease, file.trace, trace, receipt, verdict)


def require_policy(folder: Path, lease: Lease) -> None:
    """Raises UsageError unless `folder` is the policy the lease names, PolicyError when it is no policy."""
    root = policy_root(folder)
    if root != lease.policy_root:
        raise UsageError(
            f"{folder} has policy root {root.hex()[:16]}…, the trace was drawn from version {lease.policy_version}, "
            f"root {lease.policy_root.hex()[:16]}…: give that version's folder"
        )


def receipt_fits(evidence: Evidence) -> bool:
    """Whether the receipt in the file is for this very trace."""
    receipt = evidence.receipt
    return receipt is not None and receipt.trace_digest == evidence.signed_trace.digest


def short_peer(node: bytes) -> str:
    """A peer id as people compare it: its end."""
    return "…" + identity.peer_id(node)[-8:]
