"""The auditor process: recomputes the traces drawn for audit at their own policy and judges the evidence.

Claims waiting audits of one policy version, recomputes them in the worker's dtype in batches, and leaves checks
and log μ in the ledger. Holds no key: the gateway signs the verdict. Whatever fails here is our fault and never a
node's: the trace is tried a second time, alone, and then reported as not judged. One that a second auditor died on
is put aside for a person (quarantine.py).

Started as `python -m trainer.audit RUN --name auditor-0`; ends when its stdin does. Not here: which traces are
drawn (audit_draw.py), the checks themselves (verify/check.py), their limits (verify/thresholds.py), what an auditor
may use of this machine (guard.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from protocol import codec, limits
from protocol.calibration import Pair
from protocol.envelope import Signed
from protocol.errors import EngineError, PolicyError, RLCommonsError
from protocol.heap import few_heaps, give_back, settle
from protocol.lease import Lease
from protocol.policy import policy_root
from protocol.trace import Trace
from protocol.verdict import Check, CheckOutcome, Reason
from trainer.audit_result import AuditResult
from trainer.calibrating import Calibrator
from trainer.child import Changes, alone, end_with_parent, now_ms, say, say_ready
from trainer.guard import give_way
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionRow
from trainer.pairs import pair_of
from trainer.quarantine import put_aside
from trainer.rundir import Run, open_run
from verify.check import audit_checks
from verify.files import Measure
from verify.finding import first_failure
from verify.judge import fingerprint, recompute
from verify.prefill import Verifier
from verify.thresholds import limits_for

CLAIM: Final = 64  # traces claimed at once: what another auditor cannot take meanwhile
DEATHS: Final = 2  # auditors that a trace may outlive before it is left unjudged
IDLE_SECONDS: Final = 5.0  # also looked at without a change: a dead auditor's claims are released by its next start

Mu = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """A claimed submission, opened."""

    row: SubmissionRow
    trace: Trace
    lease: Lease

    @property
    def tokens(self) -> int:
        return len(self.lease.prompt) + len(self.trace.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    sequence: int
    result: AuditResult
    mu: Mu | None


class Auditor:
    """One auditor of a run. `turn` does one round of work."""

    def __init__(self, run: Run, ledger: Ledger, name: str, *, reaudits_only: bool = False) -> None:
        self._run = run
        self._config = run.config
        self._folder = run.folder
        self._ledger = ledger
        self._name = name
        self._reaudits_only = reaudits_only
        self._verifiers: dict[str, tuple[int, Verifier]] = {}  # dtype → (policy version, verifier)
        self._calibrator = Calibrator(run, ledger, name, self._verifier)
        # What an earlier auditor of this name had claimed when it died, and its supervisor with it.
        ledger.release_claims(name, died_of="the auditor ended without a word")

    def begin(self) -> None:
        """The run starts: what nodes hand in first is judged by a calibration already."""
        if not self._reaudits_only:
            self._calibrator.begin()

    def turn(self) -> int:
        """Claim, judge, answer; how many were answered, 0 when none waits."""
        rows = self._ledger.claim_audits(self._name, now_ms(), CLAIM, reaudits_only=self._reaudits_only)
        answered = 0
        for batch in self._batches(rows):
            answers = self._judge(batch)
            with self._ledger.write():
                for answer in answers:
                    self._ledger.finish_audit(answer.sequence, codec.encode(answer.result), answer.mu)
                self._ledger.renew_claims(self._name, now_ms())
            answered += len(answers)
        return answered

    def _batches(self, rows: Sequence[SubmissionRow]) -> Iterator[list[Case]]:
        """Cases of one pair of engines, at most auditor_batch_tokens together; alone what an auditor died on."""
        batches: dict[Pair, list[Case]] = {}
        for row in rows:
            case = _open(row)
            pair = pair_of(case.trace.engine, self._config)
            if row.attempts:
                yield [case]
                continue
            batch = batches.setdefault(pair, [])
            if batch and sum(each.tokens for each in batch) + case.tokens > self._config.auditor_batch_tokens:
                yield batch
                batch = batches[pair] = []
            batch.append(case)
        yield from batches.values()

    def _judge(self, cases: Sequence[Case]) -> list[Answer]:
        """One answer a case. A batch that fails is tried again trace by trace, so that none hides the others."""
        if cases[0].row.attempts >= DEATHS:
            died_of = f"{DEATHS} auditors died while they recomputed it ({cases[0].row.died_of})"
            kept = put_aside(self._run, self._ledger, cases[0].row)
            return [self._not_judged(cases[0], EngineError(f"{died_of}; {kept}"))]
        pair = pair_of(cases[0].trace.engine, self._config)
        measure = self._calibrator.measure(pair, cases[0].row.policy_version)
        try:
            return self._attempt(cases, measure)
        except Exception as error:  # of whatever kind: it is ours, and the second attempt decides
            say(self._name, f"{len(cases)} traces of policy {cases[0].row.policy_version} once more: {_line(error)}")
        answers = []
        for case in cases:
            self._ledger.renew_claims(self._name, now_ms())
            try:
                answers += self._attempt([case], measure)
            except Exception as error:
                answers.append(self._not_judged(case, error))
        return answers

    def _attempt(self, cases: Sequence[Case], measure: Measure | None) -> list[Answer]:
        """By the calibration of their pair, or the ceilings where it has none."""
        dtype = cases[0].trace.engine.dtype
        calibration, digest = (None, None) if measure is None else (measure.calibration, measure.digest)
        limits_of_pair = limits_for(dtype, dtype) if calibration is None else calibration.limits
        try:
            verifier = self._verifier(cases[0].row.policy_version, dtype)
            found = recompute(verifier, [(case.trace, case.lease) for case in cases])
        except Exception:
            self._verifiers.pop(dtype, None)  # it may be half swapped: the next attempt loads it anew
            raise
        with_what = fingerprint(verifier)
        answers = []
        for case, ours in zip(cases, found, strict=True):
            if not np.isfinite(ours.logprobs).all():
                raise EngineError("recomputed logprobs are not finite")
            found_here = audit_checks(case.trace, case.lease, ours, limits_of_pair, calibration)
            self._say_refusal(case, found_here.checks)
            provisional = calibration is not None and calibration.provisional
            result = AuditResult(found_here.checks, with_what, None, "", digest, found_here.scores, provisional)
            answers.append(Answer(case.row.sequence, result, ours.logprobs))
        return answers

    def _verifier(self, version: int, dtype: str) -> Verifier:
        """The policy in memory, swapped in place from another version where there is one.

        Raises PolicyError when the folder is gone or is not what the run published.
        """
        held = self._verifiers.get(dtype)
        if held is not None and held[0] == version:
            return held[1]
        folder = self._folder.policy(version)
        published = self._ledger.policy(version)
        # A damaged copy of ours would refuse honest nodes.
        if published is None or policy_root(folder) != published[1]:
            raise PolicyError(f"{folder} is not the policy the run published as version {version}")
        if held is None:
            verifier = Verifier(folder, dtype, self._config.device, self._config.threads)
        else:
            verifier = held[1]
            verifier.swap(folder)
        self._verifiers[dtype] = (version, verifier)
        return verifier

    def _not_judged(self, case: Case, error: Exception) -> Answer:
        reason = Reason.POLICY_UNAVAILABLE if isinstance(error, PolicyError) else Reason.VERIFIER_FAULT
        text = _line(error)
        say(self._name, f"trace {case.row.digest.hex()[:16]} not judged, {reason}: {text}")
        result = AuditResult((), fingerprint(None), reason, text)
        return Answer(case.row.sequence, result, None)

    def _say_refusal(self, case: Case, checks: tuple[Check, ...]) -> None:
        failure = first_failure(checks)
        if failure is not None:
            say(
                self._name, f"trace {case.row.digest.hex()[:16]} {CheckOutcome.FAILED} {failure.name}: {failure.detail}"
            )


def _open(row: SubmissionRow) -> Case:
    trace = codec.reopen(Trace, codec.reopen(Signed, row.trace).payload)
    return Case(row, trace, codec.reopen(Lease, codec.reopen(Signed, row.lease).payload))


def _line(error: Exception) -> str:
    text: Any = str(error) or type(error).__name__
    kind = "" if isinstance(error, RLCommonsError) else f"{type(error).__name__}: "
    return (kind + " ".join(text.split()))[: limits.MAX_TEXT_CHARACTERS]


def serve(run: Run, ledger: Ledger, name: str, *, reaudits_only: bool = False) -> NoReturn:
    """Audit until interrupted; that is no trace's fault."""
    auditor = Auditor(run, ledger, name, reaudits_only=reaudits_only)
    changes = Changes(ledger)
    try:
        auditor.begin()
        settle()
        say_ready(run.folder.path, name)
        while True:
            if auditor.turn():
                give_back()
            else:
                changes.wait(IDLE_SECONDS)
    except KeyboardInterrupt:
        ledger.release_claims(name, died_of=None)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.audit", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--name", default="auditor-0", help="under which claims are kept; one process a name")
    parser.add_argument("--reaudits", action="store_true", help="only what another auditor judged and a node asked for")
    arguments = parser.parse_args()
    few_heaps()
    end_with_parent()
    try:
        run = open_run(arguments.run)
        give_way(run.config)
        with alone(run.folder.path, arguments.name):
            serve(run, Ledger(run.folder.ledger), arguments.name, reaudits_only=arguments.reaudits)
    except KeyboardInterrupt:
        return 0
    except RLCommonsError as error:
        say(arguments.name, str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
