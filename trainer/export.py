"""Writes one trace of a run as a file that anyone can audit offline (SPEC 8.9).

Not here: the checking (verify/).
"""

from __future__ import annotations

from pathlib import Path

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import UsageError
from protocol.trace import TraceFile
from protocol.verdict import Verdict
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionRow, SubmissionState
from trainer.rundir import Run


def choose_trace(ledger: Ledger, *, digest: str | None, state: SubmissionState) -> SubmissionRow:
    """The trace whose digest begins with `digest`, or the newest in `state`, an audited one if there is one.

    Raises UsageError when there is none, or its body was pruned.
    """
    if digest is not None:
        query, values = "SELECT digest FROM submissions WHERE hex(digest) LIKE ? LIMIT 2", (digest.upper() + "%",)
        missing = f"no trace whose digest begins with {digest} in this run"
    else:
        query = (
            "SELECT digest FROM submissions WHERE state = ? AND trace IS NOT NULL "
            "ORDER BY audit IS NULL, sequence DESC LIMIT 1"
        )
        values, missing = (str(state),), f"no {state.lower()} trace in this run yet"
    rows = ledger.view(query, values)
    if len(rows) > 1:
        raise UsageError(f"more than one trace digest begins with {digest}: give more digits")
    found = ledger.submission(rows[0]["digest"]) if rows else None
    if found is None:
        raise UsageError(missing)
    if found.trace is None:
        raise UsageError(f"the body of trace {found.digest.hex()[:16]}… was pruned (config keep_traces)")
    return found


def trace_file(run: Run, ledger: Ledger, submission: SubmissionRow) -> bytes:
    """The canonical bytes of the trace file: genesis, lease, trace, receipt and the newest verdict, with the
    calibration it names."""
    verdict = _signed(ledger.verdict(submission.digest, submission.node))
    return codec.encode(
        TraceFile(
            genesis=run.signed_genesis,
            lease=codec.decode(Signed, submission.lease),
            trace=codec.decode(Signed, submission.trace),
            receipt=codec.decode(Signed, submission.receipt),
            verdict=verdict,
            calibration=None if verdict is None else _calibration(ledger, verdict),
        )
    )


def _calibration(ledger: Ledger, verdict: Signed) -> Signed | None:
    """The one the verdict names."""
    named = codec.decode(Verdict, verdict.payload).calibration
    found = None if named is None else ledger.calibration(named)
    return None if found is None else _signed(found.signed)


def _signed(data: bytes | None) -> Signed | None:
    return None if data is None else codec.decode(Signed, data)


def export_trace(run: Run, ledger: Ledger, out: Path, *, digest: str | None, state: SubmissionState) -> SubmissionRow:
    """Write the chosen trace to `out`; returns its row (`policy_version` names the folder to check with)."""
    chosen = choose_trace(ledger, digest=digest, state=state)
    try:
        out.write_bytes(trace_file(run, ledger, chosen))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    return chosen
