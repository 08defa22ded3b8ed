"""Writes one trace of a run as a file that anyone can audit offline (SPEC 8.9), and one policy as a folder.

Not here: the checking (verify/).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import PolicyError, UsageError
from protocol.outputs import check_apart, check_target, unwritable, write_whole
from protocol.policy import policy_files, policy_root
from protocol.trace import TraceFile
from protocol.verdict import Verdict
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionRow, SubmissionState
from trainer.rundir import Run, require_spare


def choose_trace(ledger: Ledger, *, digest: str | None, state: SubmissionState) -> SubmissionRow:
    """The trace whose digest begins with `digest`, or the newest in `state`, an audited one if there is one.

    Raises UsageError when there is none, or its body was pruned.
    """
    if digest is not None:
        if not re.fullmatch(r"[0-9a-fA-F]{1,64}", digest):
            raise UsageError(f"--digest {digest[:80]!r}: give the first hex digits of a trace's digest, such as 3fa9")
        query, values = "SELECT digest FROM submissions WHERE hex(digest) LIKE ? LIMIT 2", (digest.upper() + "%",)
        missing = f"no trace whose digest begins with {digest} in this run: leave --digest out for the newest"
    else:
        query = (
            "SELECT digest FROM submissions WHERE state = ? AND trace IS NOT NULL "
            "ORDER BY audit IS NULL, sequence DESC LIMIT 1"
        )
        values = (str(state),)
        missing = f"no {state.lower()} trace is kept in this run yet: wait for one, or choose one with --digest"
    rows = ledger.view(query, values)
    if len(rows) > 1:
        raise UsageError(f"more than one trace digest begins with {digest}: give more digits")
    found = ledger.submission(rows[0]["digest"]) if rows else None
    if found is None:
        raise UsageError(missing)
    if found.trace is None:
        raise UsageError(f"the body of trace {found.digest.hex()[:16]}… was pruned (keep_traces): choose a newer one")
    return found


def trace_file(run: Run, ledger: Ledger, submission: SubmissionRow) -> TraceFile:
    """Genesis, lease, trace, receipt and the newest verdict, with the calibration it names."""
    verdict = _signed(ledger.verdict(submission.digest, submission.node))
    return TraceFile(
        genesis=run.signed_genesis,
        lease=codec.decode(Signed, submission.lease),
        trace=codec.decode(Signed, submission.trace),
        receipt=codec.decode(Signed, submission.receipt),
        verdict=verdict,
        calibration=None if verdict is None else _calibration(ledger, verdict),
    )


def _calibration(ledger: Ledger, verdict: Signed) -> Signed | None:
    """The one the verdict names."""
    named = codec.decode(Verdict, verdict.payload).calibration
    found = None if named is None else ledger.calibration(named)
    return None if found is None else _signed(found.signed)


def _signed(data: bytes | None) -> Signed | None:
    return None if data is None else codec.decode(Signed, data)


def export_trace(
    run: Run,
    ledger: Ledger,
    out: Path,
    *,
    digest: str | None,
    state: SubmissionState,
    verdict: Path | None = None,
    calibration: Path | None = None,
) -> SubmissionRow:
    """Write the chosen trace to `out`, and where asked for its verdict and the calibration that names to files of
    their own; returns its row (`policy_version` names the folder to check with).

    Raises UsageError where there is no such trace, verdict or calibration, no file can be there, or two of them would
    be one; StorageError.
    """
    named = {"the trace file": out, "the verdict": verdict, "the calibration": calibration}
    check_apart([(what, path) for what, path in named.items() if path is not None])
    chosen = choose_trace(ledger, digest=digest, state=state)
    file = trace_file(run, ledger, chosen)
    parts = (file, file.verdict, file.calibration)
    wanted = [(what, path, value) for (what, path), value in zip(named.items(), parts, strict=True) if path is not None]
    for what, path, value in wanted:
        if value is None:
            raise UsageError(
                f"{what} of trace {chosen.digest.hex()[:16]}… is not there: {_MISSING[what]}; or choose another "
                "trace with --digest"
            )
        require_spare(run.folder, path)
        check_target(what, path)
    for what, path, value in wanted:
        write_whole(what, path, codec.encode(value))
    return chosen


def export_policy(run: Run, ledger: Ledger, out: Path, version: int | None) -> tuple[int, bytes]:
    """Copy a policy, the latest if `version` is None, to a new folder in the layout of Hugging Face, as it is in the
    run; (version, root). Whole or not at all.

    Raises UsageError (no such version, one that is no longer kept, a folder in the way), PolicyError (the run's copy is
    damaged) or StorageError.
    """
    found = ledger.policy(version)
    if found is None:
        latest = ledger.policy()
        raise UsageError(f"policy {version} was never made: the latest is {latest[0] if latest else 'none'}")
    number, root, _ = found
    source = run.folder.policy(number)
    if not source.is_dir():
        kept = ", ".join(map(str, run.folder.versions()))
        raise UsageError(
            f"policy {number} is no longer kept (keep_policies = {run.config.keep_policies}): these are here: {kept}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already: choose another folder")
    making = out.parent / f".{out.name}.making"
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        for path in policy_files(source):
            shutil.copyfile(path, making / path.name)
        if policy_root(making) != root:
            raise PolicyError(f"{source} is not what was published as version {number}: restore it from a backup")
        os.rename(making, out)
    except OSError as error:
        raise unwritable("the policy", out, error) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return number, root


_MISSING: Final = {
    "the verdict": "it waits to be judged",
    "the calibration": "its verdict was reached without one (not drawn for audit, or a pair that nobody measured)",
}
