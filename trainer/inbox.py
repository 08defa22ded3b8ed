"""Submissions: receipt → cheap checks → the audit's draw → verdict, each step on disk before the next.

    receive    in the clerk's thread: is it the answer to a lease of its signer? Then it is kept and receipted.
    examine    in the judge's thread: the checks that need no model, then the draw
    conclude   in the judge's thread: what an auditor answered becomes the signed verdict
    record     in the clerk's thread

Not here: the checks themselves (verify/check.py), recomputing (audit.py), who waits for whom (judge.py, clerk.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Final

from protocol import codec, limits
from protocol.envelope import Signed, seal, unseal
from protocol.environments import base
from protocol.errors import EnvironmentFault, LocalError, PolicyError
from protocol.identity import Identity, peer_id
from protocol.lease import Lease
from protocol.log import Draw
from protocol.messages import Submitted, Timing
from protocol.run import EnvironmentShare
from protocol.trace import Trace
from protocol.verdict import Check, Fingerprint, Reason, Receipt, Verdict, outcome_of
from trainer.audit_draw import AuditChain
from trainer.audit_result import AuditResult
from trainer.child import now_ms
from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupState, LeaseState, NewSubmission, SlotState, SubmissionRow, SubmissionState
from trainer.naming import show_rates
from trainer.node_scores import NodeScores
from trainer.pairs import pair_name, pair_of
from trainer.shelf import Shelf
from trainer.standing import standing
from verify.accounting import check_run, lease_findings
from verify.check import CHEAP, DEAR, cheap_checks, not_reached, unaudited, with_node
from verify.draw import is_drawn
from verify.finding import Finding, as_check, first_failure, passed, skipped

_EPOCHS_KEPT: Final = 32
_LEASES_KEPT: Final = 32


@dataclass(frozen=True, slots=True)
class Checks:
    """The checks of a submission as the ledger keeps them."""

    checks: Annotated[tuple[Check, ...], codec.Many(codec.Object(Check), limits.MAX_CHECKS)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A submission as it came: from which peer, and when its last byte was here."""

    signed: Signed
    peer: bytes
    received_ms: int
    timing: Timing | None = None  # what the node says its time went to


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a submission. `verdict` is None while an audit is waited for, and after a re-audit that could
    not judge; `fault` is ours, for a person to read."""

    row: SubmissionRow
    state: SubmissionState
    reason: Reason | None
    audited: bool
    reward: float | None
    checks: tuple[Check, ...]
    verdict: Signed | None
    fault: str = ""
    draw: Draw | None = None  # where it was just decided whether to audit
    calibration: bytes | None = None
    scores: tuple[float, ...] = ()


class Notary:
    """Signs receipts and verdicts with the run's key."""

    def __init__(self, run: bytes, signer: Identity, software: str, clock: Callable[[], int] = now_ms) -> None:
        self.run = run
        self._signer = signer
        self._clock = clock
        self.fingerprint = Fingerprint(software, "", "", "")

    def receipt(self, trace: Trace, digest: bytes, received_ms: int, sequence: int) -> Signed:
        return seal(
            self._signer,
            Receipt(self.run, digest, trace.lease_id, trace.slot, trace.node, received_ms, sequence),
        )

    def verdict(
        self,
        trace: Trace,
        digest: bytes,
        node: bytes,
        reason: Reason | None,
        checks: tuple[Check, ...],
        *,
        audited: bool = False,
        reward: float | None = None,
        verifier: Fingerprint | None = None,
        calibration: bytes | None = None,
        scores: tuple[float, ...] = (),
    ) -> Signed:
        return seal(
            self._signer,
            Verdict(
                run=self.run,
                trace_digest=digest,
                lease_id=trace.lease_id,
                slot=trace.slot,
                node=node,
                policy_version=trace.policy_version,
                policy_root=trace.policy_root,
                outcome=outcome_of(reason),
                reason=reason,
                audited=audited,
                reward=reward,
                checks=checks,
                calibration=calibration,
                scores=scores,
                verifier=verifier or self.fingerprint,
                judged_ms=self._clock(),
            ),
        )


# --- receiving (clerk) ---


class Inbox:
    """Takes submissions into the ledger. Every method runs inside the clerk's transaction."""

    def __init__(self, ledger: Ledger, notary: Notary, config: TrainerConfig) -> None:
        self._ledger = ledger
        self._config = config
        self.notary = notary

    def receive(self, arrival: Arrival) -> Submitted:
        """The receipt, or the verdict on a trace that answers no lease of its signer; the same again when the same
        trace comes again.

        Raises SignatureError or DecodeError for what is no signed trace: nobody can be held to that.
        """
        digest = arrival.signed.digest
        known = self._known(digest, arrival.peer)
        if known is not None:
            return known
        trace = unseal(Trace, arrival.signed, most=limits.MAX_TRACE_BYTES)
        refusal, lease = self._place(arrival, trace)
        if refusal is not None or lease is None:
            return self._turn_away(arrival, trace, digest, refusal or _unknown(trace))
        sequence = self._ledger.next_sequence()
        receipt = self.notary.receipt(trace, digest, arrival.received_ms, sequence)
        self._ledger.add_submission(
            NewSubmission(
                digest=digest,
                lease_id=trace.lease_id,
                group_id=lease.group_id,
                slot=trace.slot,
                node=trace.node,
                policy_version=lease.policy_version,
                received_ms=arrival.received_ms,
                trace=codec.encode(arrival.signed),
                tokens=len(trace.tokens),
                timing=arrival.timing,
            ),
            sequence,
            codec.encode(receipt),
        )
        return Submitted(receipt, None)

    def _known(self, digest: bytes, peer: bytes) -> Submitted | None:
        verdict = self._ledger.verdict(digest, peer)
        receipt = self._ledger.receipt(digest, peer)
        if verdict is None and receipt is None:
            return None
        return Submitted(_opened(receipt), _opened(verdict))

    def _place(self, arrival: Arrival, trace: Trace) -> tuple[Finding | None, Lease | None]:
        """Steps 1 to 3 of SPEC 10.1, with what only the ledger knows: the first that fails, and the lease."""
        # SPEC 10.1 step 1. `receive` verified that the signer signed; it must be who the trace names and who sent it.
        if not arrival.signed.signer == trace.node == arrival.peer:
            detail = (
                f"sent by {peer_id(arrival.peer)}, signed by {peer_id(arrival.signed.signer)}, names "
                f"{peer_id(trace.node)}"
            )
            return Finding("signature", Reason.SIGNATURE, detail), None
        run = check_run(trace, self.notary.run)
        if not run.passed:
            return run, None
        found = self._ledger.lease(trace.lease_id)
        if found is None:
            return _unknown(trace), None
        lease = _lease_of(found[1])
        for finding in lease_findings(trace, lease, arrival.received_ms):
            if not finding.passed:
                return finding, lease
        return self._single_use(trace, lease, found[2]), lease

    def _single_use(self, trace: Trace, lease: Lease, state: LeaseState) -> Finding | None:
        # SPEC 10.7: nothing of an epoch is taken once the value of its draws is out.
        if lease.policy_version < self._ledger.sealed():
            return Finding("deadline", Reason.LEASE_EXPIRED, f"the epoch of policy {lease.policy_version} is closed")
        # SPEC 10.1 step 3: a slot MUST be answered once, under the lease that holds it.
        if self._ledger.slot(lease.group_id, trace.slot) == (SlotState.LEASED, trace.lease_id):
            return None
        if self._ledger.answered(trace.lease_id, trace.slot):
            return Finding("single use", Reason.LEASE_REDEEMED, f"slot {trace.slot} was answered with another trace")
        how = "was given back" if state is LeaseState.RETURNED else "has expired"
        return Finding("deadline", Reason.LEASE_EXPIRED, f"lease {lease.lease_id.hex()} {how}")

    def _turn_away(self, arrival: Arrival, trace: Trace, digest: bytes, refusal: Finding) -> Submitted:
        """A signed verdict and no receipt: the trace is not kept."""
        verdict = self.notary.verdict(trace, digest, arrival.peer, refusal.reason, _up_to(refusal))
        was = self._is_trusted(arrival.peer)
        self._ledger.add_verdict(
            arrival.peer,
            digest,
            SubmissionState.REFUSED,
            refusal.reason,
            False,
            arrival.received_ms,
            codec.encode(verdict),
        )
        if was and not self._is_trusted(arrival.peer):
            self._end_trust(arrival.peer, refusal.reason, arrival.received_ms)
        return Submitted(None, verdict)

    def _is_trusted(self, node: bytes) -> bool:
        return self._ledger.trust(node, self._ledger.last_verdict()) is not None

    def _end_trust(self, node: bytes, reason: Reason | None, now_ms: int) -> None:
        """SPEC 10.7: a lie costs a trusted node its trust. That follows from the verdict just written; here what was
        let in by it is sent to audit, and a person told."""
        held = self._ledger.quarantine(node)
        show_rates(self._ledger, self._config, [node])
        text = (
            f"node {peer_id(node)}, which you trusted, was refused for {reason}: it is audited like a stranger from "
            f"now on, {held} traces that trust let in go to audit; to trust it again, serve the run with "
            f"--trust {peer_id(node)}"
        )
        self._ledger.add_event(now_ms, "trust", text)

    def record(self, decision: Decision, now_ms: int) -> None:
        """Write down a decision, and what follows from it."""
        row = decision.row
        if decision.fault:
            self._ledger.add_event(now_ms, "fault", decision.fault)
        checks = codec.encode(Checks(decision.checks))
        if decision.draw is not None:
            self._ledger.note_draw(row.sequence, row.node, decision.draw)
        if decision.verdict is None and row.is_asked_for:
            self._ledger.end_reaudit(row.sequence, may_ask_again=row.died_of is None)
            return
        if decision.verdict is None:
            self._ledger.send_to_audit(row.sequence, decision.reward or 0.0, checks)
            return
        was = decision.reason is not None and self._is_trusted(row.node)
        self._ledger.judge(
            row,
            state=decision.state,
            reason=decision.reason,
            audited=decision.audited,
            reward=decision.reward,
            checks=checks,
            verdict=codec.encode(decision.verdict),
            judged_ms=now_ms,
            calibration=decision.calibration,
            scores=decision.scores,
        )
        lied = was and not self._is_trusted(row.node)
        if lied:
            self._end_trust(row.node, decision.reason, now_ms)
        of_evidence = decision.reason is Reason.NODE_EVIDENCE
        failed = decision.audited and decision.state is SubmissionState.REFUSED
        if failed and (of_evidence or not lied):  # one that lied was told of, with what goes to audit
            self._follow_up(decision, now_ms)
        if row.is_asked_for:
            name = f"trace {row.digest.hex()[:16]}… of node {peer_id(row.node)}"
            self._ledger.add_event(now_ms, "audit", f"{name} was audited again, as asked for: {decision.state}")

    def _follow_up(self, decision: Decision, now_ms: int) -> None:
        """SPEC 10.7: after a failed audit what the node handed in and is not yet learned from is looked at."""
        row = decision.row
        held = self._ledger.quarantine(row.node)
        text = (
            f"node {peer_id(row.node)} failed an audit ({decision.reason}); {held} of its traces that were accepted "
            "without one are audited now"
        )
        if decision.reason is Reason.NODE_EVIDENCE:
            # Each of them was within limits; together they are not, and none is better than the others.
            again = self._ledger.judge_again(row.node, row.policy_version)
            text += f", {again} that passed one under policy version {row.policy_version} are judged again"
        self._ledger.add_event(now_ms, "audit", text)


@lru_cache(_LEASES_KEPT)
def _lease_of(signed: bytes) -> Lease:
    """Of canonical Signed; most leases are for several slots, answered one after the other."""
    return codec.reopen(Lease, codec.reopen(Signed, signed).payload)


def _opened(signed: bytes | None) -> Signed | None:
    return None if signed is None else codec.reopen(Signed, signed)


def _unknown(trace: Trace) -> Finding:
    return Finding("lease", Reason.LEASE_UNKNOWN, f"there is no lease {trace.lease_id.hex()} in this run")


def _up_to(refusal: Finding) -> tuple[Check, ...]:
    """All checks in order: those before the one that failed passed, those after it were skipped."""
    names = list(CHEAP)
    if refusal.name not in names:
        names.insert(names.index("deadline") + 1, refusal.name)
    place = names.index(refusal.name)
    before = tuple(as_check(passed(name)) for name in names[:place])
    after = tuple(skipped(name, "an earlier check failed") for name in names[place + 1 :])
    return (*before, as_check(refusal), *after, *not_reached())


# --- judging (judge) ---


class Examiner:
    """Decides about submissions; reads the ledger and writes nothing."""

    def __init__(
        self,
        ledger: Ledger,
        notary: Notary,
        shelf: Shelf,
        chain: AuditChain,
        config: TrainerConfig,
        environments: tuple[EnvironmentShare, ...],
    ) -> None:
        self._ledger = ledger
        self._notary = notary
        self._shelf = shelf
        self._config = config
        self._epoch = lru_cache(maxsize=_EPOCHS_KEPT)(chain.value)
        self._environments = {
            (share.name, share.parameters): base.load(share.name, share.parameters) for share in environments
        }
        self._scores = NodeScores(ledger)
        self._seen = 0
        self._pairs: set[str] = set()
        self._rates: dict[bytes, tuple[float, int | None]] = {}  # node → rate, and since which verdict it is trusted
        self._states: dict[bytes, GroupState] = {}

    def begin(self) -> None:
        """A new batch: what was read of the ledger for the last one may have changed."""
        self._seen = self._ledger.last_verdict()
        self._pairs = self._ledger.calibrated_pairs()
        self._scores.begin(self._ledger.sealed())
        self._rates.clear()
        self._states.clear()

    def examine(self, row: SubmissionRow) -> Decision:
        """The cheap checks, then the draw."""
        trace = codec.reopen(Trace, codec.reopen(Signed, row.trace).payload)
        if row.group_id not in self._states:
            self._states[row.group_id] = self._ledger.group_state(row.group_id)
        if self._states[row.group_id] is GroupState.DROPPED:
            return self._unjudged(row, trace, Reason.POLICY_MOVED_ON)
        return self._guarded(row, trace, lambda: self._examine(row, trace))

    def _examine(self, row: SubmissionRow, trace: Trace) -> Decision:
        lease = _lease_of(row.lease)
        reading = self._shelf.reading(lease.policy_version)
        result = cheap_checks(
            None,  # SPEC 10.1 step 1 was done before there was a receipt
            trace,
            lease,
            run=self._notary.run,
            shape=reading.shape,
            environment=self._environments[lease.environment, lease.parameters],
            tokenizer=reading.tokenizer,
            received_ms=row.received_ms,
        )
        if result.reason is not None:
            return self._judged(row, trace, result.reason, result.checks, not_reached())
        draw = self._draw(row, trace)
        if draw.drawn:
            return Decision(row, SubmissionState.AUDIT, None, False, result.reward, result.checks, None, draw=draw)
        decision = self._judged(row, trace, None, result.checks, unaudited(), reward=result.reward)
        return replace(decision, draw=draw)

    def _draw(self, row: SubmissionRow, trace: Trace) -> Draw:
        """SPEC 10.7. The receipt was signed and handed out before this. Follows from the verdicts up to `seen` alone:
        the judge has all it decided before written down first."""
        if row.node not in self._rates:
            audits, trusted = self._ledger.latest_audits(row.node, self._seen), self._ledger.trust(row.node, self._seen)
            rate = standing(audits, self._config, trusted=trusted is not None).rate
            self._rates[row.node] = (rate, trusted)
        # SPEC 10.7 item 2: nothing of a pair that was not measured is believed unseen.
        known = pair_name(pair_of(trace.engine, self._config)) in self._pairs
        rate, trusted = self._rates[row.node]
        rate = rate if known else 1.0
        drawn = is_drawn(self._epoch(row.policy_version), row.digest, rate)
        return Draw(self._seen, self._config.audit_floor, rate, drawn, trusted)

    def conclude(self, row: SubmissionRow) -> Decision:
        """The verdict that follows from an auditor's answer."""
        trace = codec.reopen(Trace, codec.reopen(Signed, row.trace).payload)
        assert row.audit is not None and row.checks is not None
        result = codec.reopen(AuditResult, row.audit)
        cheap = codec.reopen(Checks, row.checks).checks
        if result.fault is not None:
            fault = f"trace {row.digest.hex()[:16]}… was not judged: {result.error}"
            if row.is_asked_for:
                # SPEC 8.8: a re-audit that cannot judge gives no verdict. Else a trace that makes auditors fail would
                # take its refusal back.
                return Decision(row, SubmissionState.REFUSED, result.fault, False, None, cheap, None, fault)
            dear = tuple(skipped(name, "not judged") for name in DEAR)
            return self._judged(row, trace, result.fault, cheap, dear, verifier=result.verifier, fault=fault)
        # SPEC 10.8: what this trace says together with all that the node drew under this policy.
        before = self._scores.before(row.node, row.policy_version, row.digest, result.calibration)
        dear = with_node(result.checks, result.scores, before, result.provisional)
        failure = first_failure(dear)
        reason = None if failure is None else failure.reason
        reward = row.reward if reason is None else None
        decision = self._judged(
            row, trace, reason, cheap, dear, audited=True, reward=reward, verifier=result.verifier,
            calibration=result.calibration, scores=result.scores,
        )  # fmt: skip
        self._scores.add(row.node, row.policy_version, row.digest, result.calibration, result.scores)
        return decision

    def abandon(self, row: SubmissionRow) -> Decision:
        """An audit whose group was dropped meanwhile is not needed any more."""
        trace = codec.reopen(Trace, codec.reopen(Signed, row.trace).payload)
        return self._unjudged(row, trace, Reason.POLICY_MOVED_ON)

    def _judged(
        self,
        row: SubmissionRow,
        trace: Trace,
        reason: Reason | None,
        cheap: tuple[Check, ...],
        dear: tuple[Check, ...],
        *,
        audited: bool = False,
        reward: float | None = None,
        verifier: Fingerprint | None = None,
        fault: str = "",
        calibration: bytes | None = None,
        scores: tuple[float, ...] = (),
    ) -> Decision:
        verdict = self._notary.verdict(
            trace, row.digest, row.node, reason, cheap + dear, audited=audited, reward=reward, verifier=verifier,
            calibration=calibration, scores=scores,
        )  # fmt: skip
        state = SubmissionState(outcome_of(reason))
        return Decision(
            row, state, reason, audited, reward, cheap, verdict, fault, calibration=calibration, scores=scores
        )

    def _unjudged(self, row: SubmissionRow, trace: Trace, reason: Reason, fault: str = "") -> Decision:
        cheap = tuple(skipped(name, "not judged") for name in CHEAP)
        dear = tuple(skipped(name, "not judged") for name in DEAR)
        return self._judged(row, trace, reason, cheap, dear, fault=fault)

    def _guarded(self, row: SubmissionRow, trace: Trace, decide: Callable[[], Decision]) -> Decision:
        """A fault of ours is no fault of the node's: the trace is not judged, and a person is told."""
        name = f"trace {row.digest.hex()[:16]}…"
        try:
            return decide()
        except EnvironmentFault as fault:
            return self._unjudged(row, trace, Reason.ENVIRONMENT_FAULT, f"{name} was not judged: {fault}")
        except PolicyError as fault:
            return self._unjudged(row, trace, Reason.POLICY_UNAVAILABLE, f"{name} was not judged: {fault}")
        except LocalError as fault:
            return self._unjudged(row, trace, Reason.VERIFIER_FAULT, f"{name} was not judged: {fault}")
        except Exception as bug:
            # A trace is made by a stranger: one that trips a bug of ours must not stop the others' verdicts.
            traceback.print_exc()
            text = f"{name} was not judged, a bug of the checks: {type(bug).__name__}: {bug}"
            return self._unjudged(row, trace, Reason.VERIFIER_FAULT, text)
