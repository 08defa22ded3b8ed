"""Does the trace answer a lease given to its signer, in time? Needs no model (SPEC 10.1 steps 1 to 3).

Not covered: what only the trainer's ledger knows, whether the slot was answered before (trainer/inbox.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol import identity
from protocol.envelope import Signed, unseal
from protocol.errors import RemoteError
from protocol.lease import Lease
from protocol.trace import Trace
from protocol.verdict import Reason
from verify.finding import Finding, passed


def open_lease(signed: Signed, trainer: bytes) -> Lease:
    """The lease, which must be the trainer's. Raises SignatureError or DecodeError."""
    return unseal(Lease, signed, signer=trainer)


def open_trace(signed: Signed) -> Trace:
    """The trace of a signed envelope, whoever signed it. Raises SignatureError or DecodeError."""
    return unseal(Trace, signed)


def check_signature(signed: Signed, trace: Trace) -> Finding:
    # SPEC 10.1 step 1: a trace MUST be signed by the node it names.
    try:
        identity.verify(signed.signer, Trace.DOMAIN, signed.payload, signed.signature)
    except RemoteError as error:
        return Finding("signature", Reason.SIGNATURE, str(error))
    if signed.signer != trace.node:
        who = identity.peer_id(signed.signer)
        return Finding("signature", Reason.SIGNATURE, f"signed by {who}, but names {identity.peer_id(trace.node)}")
    return passed("signature")


def check_run(trace: Trace, run: bytes) -> Finding:
    # SPEC 10.1 step 2: a trace MUST be of this run.
    if trace.run != run:
        return Finding("run", Reason.WRONG_RUN, f"of run {trace.run.hex()[:16]}…, this is {run.hex()[:16]}…")
    return passed("run")


def lease_findings(trace: Trace, lease: Lease, received_ms: int | None) -> Iterator[Finding]:
    """Steps 3 of SPEC 10.1, in order. `received_ms` is the receipt's time; None leaves the deadline out."""
    yield _check_lease(trace, lease)
    yield _check_slot(trace, lease)
    if received_ms is None:
        yield passed("deadline", "no receipt: the time of arrival is not known")
    else:
        yield _check_deadline(lease, received_ms)


def _check_lease(trace: Trace, lease: Lease) -> Finding:
    # SPEC 10.1 step 3: a trace MUST answer a lease of its run, issued to its signer.
    if trace.lease_id != lease.lease_id or trace.run != lease.run:
        return Finding("lease", Reason.LEASE_UNKNOWN, f"no lease {trace.lease_id.hex()} goes with this trace")
    if trace.node != lease.node:
        holder = identity.peer_id(lease.node)
        return Finding("lease", Reason.LEASE_NOT_YOURS, f"lease {lease.lease_id.hex()} was issued to {holder}")
    return passed("lease")


def _check_slot(trace: Trace, lease: Lease) -> Finding:
    if lease.seed_of(trace.slot) is None:
        held = ", ".join(str(slot.index) for slot in lease.slots)
        return Finding("slot", Reason.SLOT_NOT_LEASED, f"slot {trace.slot} is not among the leased {held}")
    return passed("slot")


def _check_deadline(lease: Lease, received_ms: int) -> Finding:
    late = (received_ms - lease.deadline_ms) / 1000
    seconds = (lease.deadline_ms - lease.issued_ms) / 1000
    taken = (received_ms - lease.issued_ms) / 1000
    if late > 0:
        return Finding(
            "deadline", Reason.LEASE_EXPIRED, f"arrived {late:.1f} s after the deadline", value=taken, limit=seconds
        )
    return passed("deadline", value=taken, limit=seconds)
