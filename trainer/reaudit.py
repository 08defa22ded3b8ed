"""A node asks for a second audit of a trace that an audit refused (SPEC 8.8): whether it gets one.

Not here: the audit (audit.py), who does it (serve.py), what follows from it (inbox.py, Ledger.judge).
"""

from __future__ import annotations

from protocol.identity import peer_id
from protocol.messages import AuditAsked
from trainer.ledger import Ledger
from trainer.ledger_rows import Reaudit, SubmissionRow
from trainer.shelf import Shelf


def ask(ledger: Ledger, shelf: Shelf, node: bytes, digest: bytes, now_ms: int) -> AuditAsked:
    """Grant a re-audit or say why not; the same again while one waits. Inside the clerk's transaction."""
    name = f"trace {digest.hex()[:16]}…"
    row = ledger.submission(digest)
    if row is None or row.node != node:
        return AuditAsked(False, f"the trainer has no {name} of this node")
    if row.reaudit is not Reaudit.WAITING:
        objection = _objection(ledger, shelf, row)
        if objection:
            return AuditAsked(False, f"{name} {objection}")
        ledger.ask_reaudit(row.sequence)
        ledger.add_event(now_ms, "audit", f"node {peer_id(node)} asked for a re-audit of {name}")
    return AuditAsked(True, f"another auditor recomputes {name}; its verdict comes with the others and is final")


def _objection(ledger: Ledger, shelf: Shelf, row: SubmissionRow) -> str:
    # SPEC 8.12: nothing of a closed epoch changes.
    if row.policy_version < ledger.sealed():
        return f"is of policy version {row.policy_version}, whose epoch is closed"
    # SPEC 8.8: one re-audit of a trace.
    if row.reaudit is Reaudit.DONE:
        return "was audited again already: there is one re-audit a trace"
    if not ledger.audited_refusal(row.digest, row.node):
        return f"is {row.state} and was not refused by an audit: there is nothing to audit again"
    if row.trace is None:
        return "is no longer kept by the trainer, which keeps the newest only (keep_traces)"
    if shelf.root(row.policy_version) is None:
        return f"was drawn by policy version {row.policy_version}, which the trainer no longer keeps (keep_policies)"
    return ""
