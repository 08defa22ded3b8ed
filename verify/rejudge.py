"""Judges the traces of a run again, as far as they and their policies are at hand (SPEC 10.9 step 8).

The cheap checks run on every trace that is there, the model on those drawn here at random. Traces of one version
are recomputed together, and one policy after the other is swapped into the same model. Not here: the checks
(check.py), the rest of the log (run_audit.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol import codec
from protocol.calibration import Calibration
from protocol.envelope import Signed
from protocol.environments.base import Environment, load
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import DecodeError, EnvironmentFault, LocalError, PolicyError, UsageError
from protocol.lease import Lease
from protocol.limits import MAX_TRACE_BYTES
from protocol.log import EpochLog
from protocol.outputs import cause
from protocol.policy import Manifest, policy_root, version_name
from protocol.trace import Trace, TraceFile
from protocol.verdict import Check, Outcome, Receipt, Verdict, outcome_of
from verify.check import CheapResult, audit_checks, cheap_checks, not_reached, unaudited
from verify.files import MAX_FILE_BYTES, misfit
from verify.finding import first_failure
from verify.judge import fingerprint, recompute
from verify.log_source import Source, trace_file
from verify.progress import Progress
from verify.report import Judged, disagreement, unchecked
from verify.structure import PolicyShape, policy_shape
from verify.thresholds import limits_for

if TYPE_CHECKING:
    from verify.prefill import Verifier
    from verify.run_audit import Opened, Report

BATCH_TOKENS: Final = 16_384  # recomputed at once


@dataclass(frozen=True, slots=True)
class Case:
    """A trace that is at hand, with what the log says of it."""

    trace: Trace
    lease: Lease
    cheap: CheapResult
    verdict: Verdict
    calibration: Calibration | None
    digest: bytes
    where: str

    @property
    def dtype(self) -> str:
        """In which it is recomputed."""
        return self.trace.engine.dtype if self.calibration is None else self.calibration.pair.verifier_dtype

    @property
    def tokens(self) -> int:
        return len(self.lease.prompt) + len(self.trace.tokens)


@dataclass(frozen=True, slots=True)
class Reading:
    """What of a policy is needed to replay an episode."""

    tokenizer: PolicyTokenizer
    shape: PolicyShape


class Rejudge:
    """`policies`: a folder of policy folders named by version; None: the source's. `sample`: traces of each epoch
    that are recomputed; None: all."""

    def __init__(self, source: Source, policies: Path | None, sample: int | None, device: str) -> None:
        self._source = source
        self._policies = policies
        self._sample = sample
        self._model = _Model(device)
        self._environments: dict[tuple[str, str], Environment] = {}

    def epoch(self, opened: Opened, report: Report, progress: Progress) -> None:
        """All traces of an epoch; what does not agree goes into the report."""
        verdicts = opened.newest()
        judged = [receipt for receipt, _ in opened.receipts if (receipt.trace_digest, receipt.node) in verdicts]
        report.undecided["traces without a verdict yet"] += len(opened.receipts) - len(judged)
        found = self._policy(opened, report)
        if isinstance(found, str):
            # An epoch without traces counts as the policy that is not checked.
            report.undecided[f"traces {found}" if judged else f"epochs {found}"] += len(judged) or 1
            return
        report.counts["policies"] += 1
        if not judged:
            return
        try:
            reading = Reading(PolicyTokenizer.load(found), policy_shape(found))
        except PolicyError as error:
            report.undecided[f"traces whose policy cannot be used here ({error})"] += len(judged)
            return
        chosen = set(judged)
        if self._sample is not None and self._sample < len(judged):
            chosen = set(random.SystemRandom().sample(judged, self._sample))
        progress.traces, progress.chosen = len(judged), len(chosen)
        for batch in _batches(self._cases(opened, judged, chosen, reading, report, progress)):
            self._model.judge(batch, opened.version, found, report)
            progress.recomputed += len(batch)

    # --- policies ---

    def _policy(self, opened: Opened, report: Report) -> Path | str:
        """The folder of the epoch's policy, or why its traces cannot be judged."""
        manifest = opened.manifest
        if manifest is None:
            return "whose manifest cannot be read"
        where = f"policy {opened.version}"
        try:
            folder = self._folder(manifest)
            root = None if folder is None else policy_root(folder)
        except PolicyError as error:
            report.add(8, where, str(error))
            return "whose policy is damaged"
        except OSError as error:
            named = "" if error.filename is None else f": {error.filename}"
            raise UsageError(f"{where} cannot be read: {cause(error)}{named}") from None
        if folder is None or root is None:
            return "whose policy is not at hand"
        if root != manifest.root:
            report.add(8, where, f"its root is {root.hex()[:16]}…, its manifest says {manifest.root.hex()[:16]}…")
            return "whose policy is not the manifest's"
        return folder

    def _folder(self, manifest: Manifest) -> Path | None:
        if self._policies is None:
            return self._source.policy(manifest)
        folder = self._policies / version_name(manifest.version)
        return folder if folder.is_dir() else None

    # --- traces ---

    def _cases(
        self,
        opened: Opened,
        judged: Sequence[Receipt],
        chosen: set[Receipt],
        reading: Reading,
        report: Report,
        progress: Progress,
    ) -> Iterator[Case]:
        """Those to recompute: they passed the cheap checks and were chosen. The others are compared here."""
        verdicts = opened.newest()
        held = _objects(report.signed_genesis, opened.log)
        for number, receipt in enumerate(judged):
            progress.replayed = number
            where = f"{opened.name}, trace {receipt.trace_digest.hex()[:16]}…"
            verdict = verdicts[receipt.trace_digest, receipt.node]
            file = self._read(receipt, where, report)
            lease = opened.leases.get(receipt.lease_id)
            if file is None or lease is None:
                continue
            # What a file carries beside the trace is not used here, but by whoever takes the file alone.
            for what in _strange(file, receipt, held):
                report.add(8, where, what)
            try:
                trace = codec.decode(Trace, file.trace.payload, most=MAX_TRACE_BYTES)
                cheap = cheap_checks(
                    file.trace, trace, lease, run=report.run, shape=reading.shape,
                    environment=self._environment(lease), tokenizer=reading.tokenizer, received_ms=receipt.received_ms,
                )  # fmt: skip
            except DecodeError as error:
                report.add(8, where, f"it is no trace, and has a receipt: {error}")
                continue
            except (EnvironmentFault, PolicyError, UsageError) as error:
                report.undecided[f"traces whose task does not replay here ({error})"] += 1
                continue
            report.counts["traces replayed"] += 1
            calibration = None if verdict.calibration is None else opened.calibrations.get(verdict.calibration)
            why = None if calibration is None else misfit(calibration, trace, report.run)
            if why is not None:
                report.add(8, where, f"it was not to be judged by the calibration its verdict names: {why}")
                continue
            case = Case(trace, lease, cheap, verdict, calibration, receipt.trace_digest, where)
            if cheap.reason is None and receipt in chosen:
                yield case
            else:
                dear = unaudited() if cheap.reason is None else not_reached()
                _compare(case, _judged(cheap.checks + dear, cheap.reward, None), report)
        progress.replayed = len(judged)

    def _read(self, receipt: Receipt, where: str, report: Report) -> TraceFile | None:
        data = self._source.read(trace_file(receipt.trace_digest), MAX_FILE_BYTES)
        if data is None:
            report.undecided["traces that are not at hand"] += 1
            return None
        try:
            file = codec.decode(TraceFile, data)
        except DecodeError as error:
            report.add(8, where, f"its file is not a trace file: {error}")
            return None
        if file.trace.digest != receipt.trace_digest:
            report.add(8, where, "its file holds another trace")
            return None
        return file

    def _environment(self, lease: Lease) -> Environment:
        key = (lease.environment, lease.parameters)
        if key not in self._environments:
            self._environments[key] = load(*key)
        return self._environments[key]


def _objects(genesis: Signed, log: EpochLog) -> dict[str, set[Signed]]:
    """What a trace file may carry, by the name it has there."""
    return {
        "genesis": {genesis},
        "lease": set(log.leases),
        "receipt": {each.receipt for each in log.submissions},
        "verdict": {each.verdict for each in log.verdicts},
        "calibration": set(log.calibrations),
    }


def _strange(file: TraceFile, receipt: Receipt, held: dict[str, set[Signed]]) -> Iterator[str]:
    """What of a file is not what the log has on the trace that `receipt` is of."""
    for name, known in held.items():
        copy = getattr(file, name)
        if copy is None:
            continue
        if copy not in known:
            yield f"the {name} in its file is none of {'this run' if name == 'genesis' else 'this epoch'}"
        elif not _is_of(name, copy, receipt, file.verdict):
            whose = "not the one its verdict names" if name == "calibration" else "another trace's"
            yield f"the {name} in its file is {whose}"


def _is_of(name: str, copy: Signed, receipt: Receipt, verdict: Signed | None) -> bool:
    """Whether an object of the log is of this trace. One that does not decode is named in step 1."""
    try:
        if name == "lease":
            return codec.decode(Lease, copy.payload).lease_id == receipt.lease_id
        if name == "receipt":
            return codec.decode(Receipt, copy.payload).trace_digest == receipt.trace_digest
        if name == "verdict":
            return codec.decode(Verdict, copy.payload).trace_digest == receipt.trace_digest
        if name == "calibration" and verdict is not None:
            return codec.decode(Verdict, verdict.payload).calibration == copy.digest
    except DecodeError:
        pass
    return True


class _Model:
    """One live model for each dtype, which the policies of the run are swapped into."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._held: dict[str, tuple[int, Verifier]] = {}

    def judge(self, cases: Sequence[Case], version: int, folder: Path, report: Report) -> None:
        """Cases of one version and dtype. What this machine cannot do is said, and held against nobody."""
        try:
            verifier = self._verifier(cases[0].dtype, version, folder)
            found = recompute(verifier, [(case.trace, case.lease) for case in cases])
        except LocalError as error:
            self._held.pop(cases[0].dtype, None)
            report.undecided[f"traces that this machine could not recompute ({error})"] += len(cases)
            return
        for case, ours in zip(cases, found, strict=True):
            limits = limits_for(case.dtype, case.dtype) if case.calibration is None else case.calibration.limits
            dear = audit_checks(case.trace, case.lease, ours, limits, case.calibration)
            report.counts["traces recomputed by the model"] += 1
            _compare(case, _judged(case.cheap.checks + dear.checks, case.cheap.reward, verifier), report)

    def _verifier(self, dtype: str, version: int, folder: Path) -> Verifier:
        held = self._held.pop(dtype, None)  # not put back when the swap fails half way
        if held is None:
            from verify.prefill import Verifier

            verifier = Verifier(folder, dtype, self._device)
        else:
            verifier = held[1]
            if held[0] != version:
                verifier.swap(folder)
        self._held[dtype] = (version, verifier)
        return verifier


def _batches(cases: Iterator[Case]) -> Iterator[list[Case]]:
    """Cases of one dtype, at most BATCH_TOKENS together."""
    batches: dict[str, list[Case]] = {}
    for case in cases:
        batch = batches.setdefault(case.dtype, [])
        if batch and sum(each.tokens for each in batch) + case.tokens > BATCH_TOKENS:
            yield batch
            batch = batches[case.dtype] = []
        batch.append(case)
    yield from batches.values()


def _judged(checks: tuple[Check, ...], reward: float | None, verifier: Verifier | None) -> Judged:
    failure = first_failure(checks)
    reason = None if failure is None else failure.reason
    return Judged(outcome_of(reason), reason, checks, verifier is not None, reward, fingerprint(verifier))


def _compare(case: Case, ours: Judged, report: Report) -> None:
    theirs = case.verdict
    why = disagreement(ours, case.digest, theirs)
    if why is not None:
        report.add(8, case.where, why)
        return
    if unchecked(ours, theirs) is not None:
        report.undecided["refusals by a check that was not run here"] += 1
        return
    report.counts["verdicts reached again"] += 1
    if ours.outcome is Outcome.REFUSED and case.verdict.outcome is Outcome.ACCEPTED:
        report.notes[f"accepted unseen, and refused by the model here ({ours.reason})"] += 1
