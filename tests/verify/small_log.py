"""A small log of a run, honest in everything, made without the trainer's code: three epochs that overlap in time, two
of them sealed, traces of one honest node and of one that claims other logprobs. And what it takes to write it as
files, or to seal a changed epoch anew.

Not here: what an audit finds in it (test_run_audit.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protocol import codec
from protocol.calibration import Alternative, Calibration, Pair, Sample, ScoreTable
from protocol.envelope import Signed, seal
from protocol.environments import base
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.log import Draw, Epoch, EpochLog, LoggedVerdict, Submission, epoch_root
from protocol.policy import Manifest, describe
from protocol.run import EnvironmentShare, Genesis, run_id
from protocol.trace import Trace, TraceFile
from protocol.verdict import Fingerprint, Outcome, Reason, Receipt, Verdict
from verify.check import CHEAP, audit_checks, cheap_checks, unaudited, with_node
from verify.draw import is_drawn
from verify.files import worker_of
from verify.finding import Finding, as_check, first_failure, passed, skipped
from verify.judge import recompute
from verify.model import PolicyModel
from verify.prefill import Verifier
from verify.reference import ReferenceRun, play
from verify.standing import newest_audits, sampling_rate
from verify.structure import policy_shape
from verify.thresholds import limits_for

POLICY = Path(__file__).parent.parent.parent / "trainer" / "embedded"
ENVIRONMENT = "tools8@1"
TRAINER, HONEST, LIAR, SOMEONE = (Identity(bytes([number]) * 32) for number in (61, 62, 63, 64))
NOW = 1_700_000_000_000
FIRST, FLOOR = 8, 0.05
VERSIONS = 3
# Which traces come in what order: (version, group); of each group FOUR traces. Versions overlap.
ORDER = ((0, 0), (0, 1), (0, 2), (1, 3), (0, 4), (1, 5), (2, 6), (1, 7), (2, 8))
SLOTS = 4
WITH = Fingerprint("test", "test", "float32", "cpu")


def chain() -> tuple[bytes, list[bytes]]:
    """The anchor and s_0 to s_2."""
    values = [hashlib.sha256(b"the far end").digest()]
    while len(values) < VERSIONS + 1:
        values.insert(0, hashlib.sha256(values[0]).digest())
    return values[0], values[1:]


ANCHOR, VALUES = chain()


@dataclass
class SmallLog:
    """`epochs` by version; `traces` by digest. Change what you like, then `write`."""

    genesis: Signed
    run: bytes
    epochs: list[EpochLog] = field(default_factory=list)
    traces: dict[bytes, TraceFile] = field(default_factory=dict)

    def copy(self) -> SmallLog:
        return SmallLog(self.genesis, self.run, list(self.epochs), dict(self.traces))

    def write(self, folder: Path, *, traces: bool = False) -> Path:
        (folder / "epochs").mkdir(parents=True)
        (folder / "genesis.msgpack").write_bytes(codec.encode(self.genesis))
        for version, log in enumerate(self.epochs):
            (folder / "epochs" / f"{version:06d}.msgpack").write_bytes(codec.encode(log))
        if traces:
            (folder / "traces").mkdir()
            for digest, file in self.traces.items():
                (folder / "traces" / f"{digest.hex()}.msgpack").write_bytes(codec.encode(file))
            for version in range(len(self.epochs)):
                shutil.copytree(POLICY, folder / "policies" / f"{version:06d}")
        index = {"run": self.run.hex(), "epochs": len(self.epochs), "complete": True}
        (folder / "log.json").write_text(json.dumps(index))
        return folder

    def change(self, version: int, *, sealed: bool = True, **changes: Any) -> None:
        """Another content of an epoch; `sealed`: by the trainer itself, so that the seal is of it."""
        log = replace(self.epochs[version], **changes)
        if sealed and log.epoch is not None:
            log = self.seal(replace(log, epoch=None), version)
        self.epochs[version] = log
        for later in range(version + 1, len(self.epochs)):
            if sealed and self.epochs[later].epoch is not None:
                self.epochs[later] = self.seal(replace(self.epochs[later], epoch=None), later)

    def seal(self, log: EpochLog, version: int, **changes: Any) -> EpochLog:
        before = self.epochs[version - 1].epoch if version else None
        epoch = Epoch(
            run=self.run,
            version=version,
            root=epoch_root(log),
            calibrations=len(log.calibrations),
            leases=len(log.leases),
            submissions=len(log.submissions),
            verdicts=len(log.verdicts),
            audit_value=VALUES[version],
            previous=bytes(32) if before is None else before.digest,
            closed_ms=NOW,
        )
        return replace(log, epoch=seal(TRAINER, replace(epoch, **changes)))

    def verdicts(self, version: int) -> list[Verdict]:
        return [codec.decode(Verdict, each.verdict.payload) for each in self.epochs[version].verdicts]

    def with_verdict(self, version: int, place: int, signer: Identity = TRAINER, **changes: Any) -> None:
        """One verdict says something else, signed and sealed, and in the trace's file."""
        verdict = replace(self.verdicts(version)[place], **changes)
        signed = seal(signer, verdict)
        logged = list(self.epochs[version].verdicts)
        logged[place] = replace(logged[place], verdict=signed)
        self.change(version, verdicts=tuple(logged))
        file = self.traces.get(verdict.trace_digest)
        if file is not None and file.verdict is not None:
            named = None if verdict.calibration is None else file.calibration
            self.traces[verdict.trace_digest] = replace(file, verdict=signed, calibration=named)

    def with_submission(self, version: int, place: int, **changes: Any) -> None:
        listed = list(self.epochs[version].submissions)
        listed[place] = replace(listed[place], **changes)
        self.change(version, submissions=tuple(listed))

    def receipt(self, version: int, place: int) -> Receipt:
        return codec.decode(Receipt, self.epochs[version].submissions[place].receipt.payload)

    def without(self, name: str, version: int, place: int, *, sealed: bool) -> None:
        items = list(getattr(self.epochs[version], name))
        del items[place]
        self.change(version, sealed=sealed, **{name: tuple(items)})


class _Trainer:
    """Issues, receives, draws, judges: as SPEC 10 has it, in the simplest way."""

    def __init__(self) -> None:
        shares = (EnvironmentShare(ENVIRONMENT, "", 1),)
        self.reference = ReferenceRun.found(POLICY, ENVIRONMENT)
        genesis = seal(TRAINER, Genesis("small", TRAINER.node, NOW, shares, self.reference.root, ANCHOR))
        self.log = SmallLog(genesis, run_id(genesis))
        self.environment = base.load(ENVIRONMENT)
        self.shape = policy_shape(POLICY)
        self.leases: list[list[Signed]] = [[] for _ in range(VERSIONS)]
        self.submissions: list[list[Submission]] = [[] for _ in range(VERSIONS)]
        self.verdicts: list[list[LoggedVerdict]] = [[] for _ in range(VERSIONS)]
        self.given: list[Verdict] = []
        self.received = 0
        self.sums: dict[tuple[bytes, int], tuple[float, ...]] = {}

    def lease(self, version: int, group: int, node: Identity, slots: int) -> Lease:
        lease = self.reference.lease(
            group, self.environment, slots=slots, run=self.log.run, node=node.node, policy_version=version,
            issued_ms=NOW, deadline_ms=NOW + 60_000, lease_id=hashlib.sha256(node.node + bytes([group])).digest()[:16],
        )  # fmt: skip
        self.leases[version].append(seal(TRAINER, lease))
        return lease

    def calibrate(self, trace: Trace) -> Calibration:
        engine, dtype, device = worker_of(trace)
        alternatives = (Alternative("noise", (-0.01, 0.5, 2.0)), Alternative("other", (0.0, 0.1, 3.0)))
        scores = ScoreTable((0.001, 0.1), alternatives)
        return Calibration(
            run=self.log.run, policy_version=0, policy_root=self.reference.root,
            pair=Pair(engine, dtype, device, "transformers", dtype, "cpu"), limits=limits_for(dtype, dtype),
            margins=scores, proofs=scores, sample=Sample(1, 1, 1, 0, 0.0, (), (), (), (), (), 1.0), created_ms=NOW,
        )  # fmt: skip

    def submit(self, lease: Lease, trace: Trace, node: Identity, verifier: Verifier, measure: Signed) -> None:
        """Receipt, draw, verdict."""
        version = lease.policy_version
        signed = seal(node, trace)
        self.received += 1
        receipt = Receipt(self.log.run, signed.digest, lease.lease_id, trace.slot, node.node, NOW + 1, self.received)
        audits = newest_audits(
            (each.trace_digest, each.audited, each.outcome) for each in self.given if each.node == node.node
        )
        rate = sampling_rate(audits, FIRST, FLOOR)
        drawn = is_drawn(VALUES[version], signed.digest, rate)
        sealed = seal(TRAINER, receipt)
        self.submissions[version].append(Submission(sealed, Draw(len(self.given), FLOOR, rate, drawn, None)))
        verdict = self.judge(lease, trace, signed, verifier, measure, drawn)
        file = TraceFile(self.log.genesis, seal(TRAINER, lease), signed, sealed, verdict, measure if drawn else None)
        self.log.traces[signed.digest] = file

    def judge(
        self, lease: Lease, trace: Trace, signed: Signed, verifier: Verifier, measure: Signed, drawn: bool
    ) -> Signed:
        cheap = cheap_checks(
            signed, trace, lease, run=self.log.run, shape=self.shape, environment=self.environment,
            tokenizer=self.reference.tokenizer, received_ms=NOW + 1,
        )  # fmt: skip
        assert cheap.reason is None
        checks, scores = cheap.checks + unaudited(), ()
        if drawn:
            calibration = codec.decode(Calibration, measure.payload)
            found = audit_checks(
                trace, lease, recompute(verifier, [(trace, lease)])[0], calibration.limits, calibration
            )
            key = (lease.node, lease.policy_version)
            before = self.sums.get(key, ())
            checks, scores = cheap.checks + with_node(found.checks, found.scores, before), found.scores
            self.sums[key] = tuple(a + b for a, b in zip(before or (0.0,) * len(scores), scores, strict=True))
        failure = first_failure(checks)
        return self.give(
            Verdict(
                run=self.log.run, trace_digest=signed.digest, lease_id=lease.lease_id, slot=trace.slot,
                node=lease.node, policy_version=lease.policy_version, policy_root=lease.policy_root,
                outcome=Outcome.ACCEPTED if failure is None else Outcome.REFUSED,
                reason=None if failure is None else failure.reason, audited=drawn,
                reward=cheap.reward if failure is None else None, checks=checks,
                calibration=measure.digest if drawn else None, scores=scores, verifier=WITH, judged_ms=NOW + 2,
            ),
            lease.policy_version,
        )  # fmt: skip

    def give(self, verdict: Verdict, epoch: int) -> Signed:
        self.given.append(verdict)
        signed = seal(TRAINER, verdict)
        self.verdicts[epoch].append(LoggedVerdict(len(self.given), signed))
        return signed

    def turn_away(self, lease: Lease, trace: Trace, epoch: int) -> None:
        """A trace that came too late: a verdict, and no receipt."""
        digest = seal(HONEST, trace).digest
        late = as_check(Finding("deadline", Reason.LEASE_EXPIRED, "late"))
        before, after = CHEAP[: CHEAP.index("deadline")], CHEAP[CHEAP.index("deadline") + 1 :]
        checks = (*(as_check(passed(name)) for name in before), late, *(skipped(name, "") for name in after))
        self.give(
            Verdict(
                run=self.log.run, trace_digest=digest, lease_id=lease.lease_id, slot=trace.slot, node=lease.node,
                policy_version=lease.policy_version, policy_root=lease.policy_root, outcome=Outcome.REFUSED,
                reason=Reason.LEASE_EXPIRED, audited=False, reward=None, checks=checks, calibration=None, scores=(),
                verifier=WITH, judged_ms=NOW,
            ),
            epoch,
        )  # fmt: skip


def make() -> SmallLog:
    """Draws some forty traces of the embedded policy and judges them: about two seconds."""
    trainer = _Trainer()
    model = PolicyModel(POLICY, "float32", "cpu")
    verifier = Verifier(POLICY, "float32", "cpu")
    leases = [trainer.lease(version, group, HONEST, SLOTS) for version, group in ORDER]
    liars = trainer.lease(1, 20, LIAR, 2)
    asked = [(lease, slot) for lease in leases for slot in range(SLOTS)]
    traces = play(model, trainer.reference.tokenizer, [*asked, (liars, 0), (liars, 1)])
    measure = seal(TRAINER, trainer.calibrate(traces[0]))
    for number, ((lease, _), trace) in enumerate(zip(asked, traces, strict=False)):
        trainer.submit(lease, trace, HONEST, verifier, measure)
        if number == 20:
            false = replace(traces[-2], logprobs=tuple(each - 0.3 for each in traces[-2].logprobs))
            trainer.submit(liars, false, LIAR, verifier, measure)
            trainer.turn_away(liars, traces[-1], 2)
    log = trainer.log
    blobs = describe(POLICY)
    for version in range(VERSIONS):
        manifest = Manifest(log.run, version, trainer.reference.root, blobs, NOW, NOW + 1)
        named = any(
            codec.decode(Verdict, each.verdict.payload).calibration is not None for each in trainer.verdicts[version]
        )
        epoch = EpochLog(
            manifest=seal(TRAINER, manifest),
            calibrations=(measure,) if named else (),
            leases=tuple(trainer.leases[version]),
            submissions=tuple(trainer.submissions[version]),
            verdicts=tuple(trainer.verdicts[version]),
            epoch=None,
        )
        log.epochs.append(log.seal(epoch, version) if version < VERSIONS - 1 else epoch)
    return log
