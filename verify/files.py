"""Trace files, and the calibrations and verdicts given beside them: reading, and what must hold before a single
check is run (SPEC 8.9, 8.11, 14).

Not here: the checks (check.py) and the command (cli.py).
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace
from pathlib import Path

from protocol import codec, identity
from protocol.calibration import Calibration, check_calibration
from protocol.envelope import Signed, unseal
from protocol.errors import RemoteError, UsageError
from protocol.lease import Lease, check_lease
from protocol.limits import MAX_TRACE_BYTES
from protocol.outputs import cause
from protocol.policy import policy_root
from protocol.run import Genesis, open_genesis, run_id
from protocol.trace import Trace, TraceFile
from protocol.verdict import Receipt, Verdict, check_verdict
from verify.thresholds import above_ceilings, limits_for

# A trace, its lease with a prompt of the greatest length, and the small objects beside them.
MAX_FILE_BYTES = MAX_TRACE_BYTES + 1024 * 1024

# What to do about a file that is not what it was given for.
_TRACE = "give a file that `rltrainer export-trace` wrote, or have it written again"
_VERDICT = "give a file that `rltrainer export-trace --verdict` wrote"
_CALIBRATION = "give a file that `rlverify calibrate` or `rltrainer export-trace --calibration` wrote"


@dataclass(frozen=True, slots=True)
class Measure:
    """A calibration and the digest that verdicts name it by."""

    calibration: Calibration
    digest: bytes


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
    calibration: Measure | None = None


def read_evidence(path: Path) -> Evidence:
    """Open a trace file. Raises UsageError when it is unreadable, is not a trace file, or holds a genesis,
    lease, receipt, verdict or calibration that is not the trainer's, or a calibration that is not the one its
    verdict names or not one to judge this trace by: then there is nothing to judge."""
    data = _read(path, "a trace file", _TRACE)
    try:
        evidence = _open(codec.decode(TraceFile, data))
    except RemoteError as error:
        raise UsageError(f"{path} cannot be judged: {error} [{error.code}]: {_TRACE}") from None
    if evidence.calibration is not None:
        if evidence.verdict is not None and evidence.verdict.calibration != evidence.calibration.digest:
            raise UsageError(f"{path} cannot be judged: its calibration is not the one its verdict names: {_TRACE}")
        _require_fit(path, evidence.calibration.calibration, evidence)
    return evidence


def with_verdict(evidence: Evidence, path: Path) -> Evidence:
    """The evidence with the trainer's verdict from a file of its own, a Signed Verdict, in place of any it holds.

    Raises UsageError when it is unreadable, signed by another key than the run's trainer's, or on another trace.
    """
    signed = _signed(path, "a verdict", _VERDICT)
    try:
        verdict = unseal(Verdict, signed, signer=evidence.genesis.trainer)
        check_verdict(verdict)
    except RemoteError as error:
        raise UsageError(f"{path} is no verdict of this run's trainer: {error} [{error.code}]: {_VERDICT}") from None
    digest = evidence.signed_trace.digest
    if verdict.trace_digest != digest:
        raise UsageError(
            f"{path} is the verdict on another trace, {verdict.trace_digest.hex()[:16]}…; the trace given is "
            f"{digest.hex()[:16]}…: give the verdict that `rltrainer export-trace --verdict` wrote with it"
        )
    held = evidence.calibration
    if held is not None and verdict.calibration != held.digest:
        held = None
    return replace(evidence, verdict=verdict, calibration=held)


def with_calibration(evidence: Evidence, path: Path) -> Evidence:
    """The evidence, to be judged by a calibration from a file of its own, a Signed Calibration of whoever measured.

    Raises UsageError when it is unreadable, damaged, of another pair of engines, or above the ceilings.
    """
    measure = read_calibration(path)
    _require_fit(path, measure.calibration, evidence)
    return replace(evidence, calibration=measure)


def read_calibration(path: Path) -> Measure:
    """A Signed Calibration, of whatever signer. Raises UsageError when it is unreadable or not valid."""
    signed = _signed(path, "a calibration", _CALIBRATION)
    try:
        return _measure(signed, signed.signer)
    except RemoteError as error:
        raise UsageError(f"{path} is no calibration: {error} [{error.code}]: {_CALIBRATION}") from None


def _read(path: Path, what: str, next_step: str) -> bytes:
    try:
        found = path.stat()
        # A device has no end, and opening a pipe waits for whoever writes to it.
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is not a regular file: give the file that holds {what}")
        if found.st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has {found.st_size:,} bytes, {what} at most {MAX_FILE_BYTES:,}: {next_step}")
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {cause(error)}: {next_step}") from None


def _signed(path: Path, what: str, next_step: str) -> Signed:
    data = _read(path, what, next_step)
    try:
        return codec.decode(Signed, data)
    except RemoteError as error:
        raise UsageError(f"{path} is not {what}: {error} [{error.code}]: {next_step}") from None


def _measure(signed: Signed, signer: bytes) -> Measure:
    calibration = unseal(Calibration, signed, signer=signer)
    check_calibration(calibration)
    return Measure(calibration, signed.digest)


def _require_fit(path: Path, calibration: Calibration, evidence: Evidence) -> None:
    # SPEC 10.6: of the trace's pair, of this run or none, and within the ceilings.
    why = misfit(calibration, evidence.trace, evidence.run)
    if why is not None:
        raise UsageError(
            f"{path}: this trace cannot be judged by this calibration: {why}; give another with --calibration"
        )


def misfit(calibration: Calibration, trace: Trace, run: bytes) -> str | None:
    """Why a calibration is not one to judge this trace by; None when it is."""
    if calibration.run not in (run, bytes(32)):
        return f"it was made for the run {calibration.run.hex()[:16]}…"
    pair, theirs = calibration.pair, worker_of(trace)
    measured = (pair.worker_engine, pair.worker_dtype, pair.worker_device)
    # SPEC 10.6: a provisional one is of any engine of its dtype.
    if measured != (("", theirs[1], "") if calibration.provisional else theirs):
        return f"it holds for {' '.join(measured)}, the trace comes from {' '.join(theirs)}"
    try:
        above = above_ceilings(calibration)
    except UsageError as error:
        return str(error)
    if above is not None:
        return f"its limits are above the ceilings for these dtypes: {above}"
    if calibration.provisional and pair.worker_dtype == pair.verifier_dtype == "float32":
        return "it is provisional, and float32 is judged by the table's limits, which need no scores"
    if calibration.provisional and calibration.limits != limits_for(pair.worker_dtype, pair.verifier_dtype):
        return "it is provisional, and its limits are not the table's"
    return None


def worker_of(trace: Trace) -> tuple[str, str, str]:
    """SPEC 8.11: engine, dtype and kind of device that a trace names, as a Pair does."""
    return trace.engine.name, trace.engine.dtype, device_kind(trace.engine.device)


def device_kind(device: str) -> str:
    """What stands before the first colon, as far as a Pair holds it."""
    return device.partition(":")[0][:16]


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
    measure = None if file.calibration is None else _measure(file.calibration, trainer)
    return Evidence(run, genesis, lease, file.trace, trace, receipt, verdict, measure)


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


def verdict_fits(evidence: Evidence) -> bool:
    """Whether the verdict in the file is on this very trace."""
    verdict = evidence.verdict
    return verdict is not None and verdict.trace_digest == evidence.signed_trace.digest


def short_peer(node: bytes) -> str:
    """A peer id as people compare it: its end."""
    return "…" + identity.peer_id(node)[-8:]
