"""What the trainer decided about this node's traces: verified, counted once, logged, shown with its reason.

Not here: judging (verify/).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any, Final

from node.report import Event, Level, Report, Status
from node.store import RunStore
from node.weights import keep_trying
from protocol.envelope import Signed, unseal
from protocol.errors import Code, RemoteError
from protocol.verdict import Fingerprint, Outcome, Verdict, check_verdict, may_replace

_REMEMBERED: Final = 2_048  # a verdict comes along with a receipt and again by heartbeat
_ANYBODY: Final = Fingerprint("", "", "", "")


class Verdicts:
    """The verdicts of one run on one node."""

    def __init__(
        self, run: bytes, trainer: bytes, node: bytes, store: RunStore, report: Report, status: Status
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._node = node
        self._store = store
        self._report = report
        self._status = status
        self._counted: OrderedDict[bytes, Verdict] = OrderedDict()

    def open(self, signed: Signed) -> Verdict:
        """Raises RemoteError when it is not the trainer's, or is not about this node."""
        verdict = unseal(Verdict, signed, signer=self._trainer)
        check_verdict(verdict)
        if verdict.run != self._run or verdict.node != self._node:
            raise RemoteError(Code.MALFORMED, "the trainer sent a verdict of another run or on another node")
        return verdict

    async def note(self, signed: tuple[Signed, ...], cursor: int) -> None:
        """Take what a heartbeat brought; the cursor moves when all of it is in the log."""
        if not signed and cursor == self._store.verdict_cursor:
            return
        noted = []
        for each in signed:
            verdict = self.open(each)
            self.count(verdict)
            noted.append((summary(verdict), each))
        await keep_trying(self._report, "the verdicts' log", self._store.note_verdicts, noted, cursor)

    def count(self, verdict: Verdict) -> None:
        """Show a verdict, once. One that replaces another (SPEC 8.8) is counted in its stead."""
        values, reason = summary(verdict), str(verdict.reason)
        earlier = self._counted.get(verdict.trace_digest)
        small = self._small(verdict)
        if earlier is not None:
            if small == earlier or verdict.judged_ms < earlier.judged_ms:
                return
            self._uncount(small, earlier)
        self._counted[verdict.trace_digest] = small
        if len(self._counted) > _REMEMBERED:
            self._counted.popitem(last=False)
        if verdict.outcome == Outcome.ACCEPTED:
            self._status.accepted += 1
            event = Event("verdict", "a trace was accepted", Level.DETAIL, values)
        elif verdict.outcome == Outcome.REFUSED:
            self._status.refused[reason] += 1
            self._status.last_refusal = f"{reason}: {values['detail']}"
            event = Event("verdict", f"a trace was refused, {reason}: {values['detail']}", Level.WARNING, values)
        else:
            self._status.not_judged[reason] += 1
            event = Event("verdict", f"a trace was not judged, {reason} (no fault of this node)", Level.INFO, values)
        self._report(event)

    def _small(self, verdict: Verdict) -> Verdict:
        """What tells it from another on the same trace: a node that stays for weeks holds thousands of them."""
        return replace(
            verdict, run=self._run, node=self._node, lease_id=b"", policy_root=b"", calibration=None, checks=(),
            scores=(), verifier=_ANYBODY,
        )  # fmt: skip

    def _uncount(self, later: Verdict, earlier: Verdict) -> None:
        if not may_replace(later, earlier):
            text = f"the trainer changed a verdict that was final, from {earlier.outcome} to {later.outcome}"
            trace = {"trace": earlier.trace_digest.hex()}
            self._report(Event("verdict_changed", text, Level.WARNING, trace))
        if earlier.outcome == Outcome.ACCEPTED:
            self._status.accepted -= 1
            return
        counts = self._status.refused if earlier.outcome == Outcome.REFUSED else self._status.not_judged
        counts.subtract([str(earlier.reason)])
        counts += Counter()  # drops what is at 0


def summary(verdict: Verdict) -> dict[str, Any]:
    """A verdict in a line of JSON: the failed check with its value, limit and span where there is one."""
    failed = next((check for check in verdict.checks if check.reason is not None), None)
    found: dict[str, Any] = {
        "trace": verdict.trace_digest.hex(),
        "lease": verdict.lease_id.hex(),
        "slot": verdict.slot,
        "outcome": str(verdict.outcome),
        "reason": None if verdict.reason is None else str(verdict.reason),
        "audited": verdict.audited,
        "reward": verdict.reward,
        "detail": "",
    }
    if failed is not None:
        found |= {"detail": failed.detail, "check": failed.name, "value": failed.value, "limit": failed.limit}
        found |= {"start": failed.start, "end": failed.end}
    return found
