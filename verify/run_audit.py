"""Whether the log of a run holds together: every signature, seal, number, draw and score, and the verdicts that can
be reached again (SPEC 10.9). Believes nobody; needs no clock and, but for its source, no network.

One epoch is in memory at a time; of those before it stay the audits of each node, by which its later draws are
repeated. Not here: reading files (log_source.py), judging traces again (rejudge.py), showing (run_report.py).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from protocol import codec
from protocol.calibration import Calibration, check_calibration
from protocol.envelope import Signed, unseal
from protocol.errors import Code, DecodeError, RemoteError, UsageError
from protocol.lease import Lease, check_lease
from protocol.limits import MAX_EPOCH_BYTES, NODE_EVIDENCE_NATS
from protocol.log import Draw, Epoch, EpochLog, epoch_root
from protocol.policy import Manifest, check_manifest
from protocol.run import Genesis, open_genesis, run_id
from protocol.verdict import CheckOutcome, Outcome, Receipt, Verdict, check_verdict, may_replace
from verify.draw import descend, is_drawn
from verify.in_order import InOrder
from verify.log_source import Source, epoch_file, read_index
from verify.progress import Progress
from verify.rejudge import Rejudge
from verify.scores import add_scores, evidence
from verify.standing import LEAST_FIRST, RATE_TOLERANCE, WINDOW, is_lie, rate

MAX_GENESIS_BYTES: Final = 1024 * 1024
ABSENT: Final = 20  # epochs in a row that are missing, after which no more are looked for
LISTED: Final = 1000  # disagreements kept with their words; all are counted
_SCORE_TOLERANCE: Final = 1e-6  # nats: sums in another order

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """`step` is of SPEC 10.9. `where`: which file, which item."""

    step: int
    where: str
    what: str


@dataclass
class Report:
    """What was checked, and what does not hold. Counts by name, in the order of the steps."""

    genesis: Genesis
    signed_genesis: Signed
    run: bytes
    epochs: int = 0
    sealed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)  # what could not be checked, by why
    notes: Counter[str] = field(default_factory=Counter)  # what is no disagreement and worth knowing
    disagreements: list[Disagreement] = field(default_factory=list)
    by_step: Counter[int] = field(default_factory=Counter)

    @property
    def disagreeing(self) -> int:
        return self.by_step.total()

    def add(self, step: int, where: str, what: str) -> None:
        self.by_step[step] += 1
        if len(self.disagreements) < LISTED:
            self.disagreements.append(Disagreement(step, where, what))


@dataclass(frozen=True, slots=True)
class Given:
    """A verdict at its place in the log."""

    sequence: int
    verdict: Verdict
    where: str


@dataclass
class Opened:
    """One epoch, its objects opened. What could not be opened is missing."""

    version: int
    log: EpochLog
    manifest: Manifest | None = None
    calibrations: dict[bytes, Calibration] = field(default_factory=dict)
    leases: dict[bytes, Lease] = field(default_factory=dict)
    receipts: list[tuple[Receipt, Draw | None]] = field(default_factory=list)
    verdicts: list[Given] = field(default_factory=list)
    audit_value: bytes | None = None  # s of this epoch, where it is known and of the chain

    @property
    def name(self) -> str:
        return f"epoch {self.version}"

    @property
    def is_sealed(self) -> bool:
        return self.log.epoch is not None

    def newest(self) -> dict[tuple[bytes, bytes], Verdict]:
        """By trace digest and node."""
        return {(each.verdict.trace_digest, each.verdict.node): each.verdict for each in self.verdicts}


def audit_run(source: Source, rejudge: Rejudge, progress: Progress | None = None) -> Report:
    """Check the log of a source, keeping `progress` up to date. Raises UsageError when it is no log, or changed while
    it was read."""
    index = read_index(source)
    progress = progress or Progress()
    audit = RunAudit(_read_genesis(source, index.run), rejudge, progress)
    last = max(index.epochs - 1, source.highest_epoch())
    progress.epochs = last + 1
    lost = dict(index.passed_over)
    absent = version = 0
    while version <= last:
        if version in lost:
            audit.pass_over(version, lost[version])
            absent, version = 0, lost[version] + 1
            continue
        progress.begin(version)
        data = source.read(epoch_file(version), MAX_EPOCH_BYTES)
        audit.epoch(version, data)
        absent = 0 if data is not None else absent + 1
        if absent == ABSENT:
            audit.report.add(1, f"epochs {version + 1} to {last}", f"are not looked for: {ABSENT} before are missing")
            break
        version += 1
    report = audit.finish()
    if read_index(source).text != index.text:
        raise UsageError("the log was written anew while it was read: audit it again")
    return report


def _read_genesis(source: Source, run: str) -> Signed:
    """That opens. Raises UsageError."""
    data = source.read("genesis.msgpack", MAX_GENESIS_BYTES)
    if data is None:
        raise UsageError("there is no genesis.msgpack: this is not the log of a run")
    try:
        signed = codec.decode(Signed, data)
        open_genesis(signed, run=run_id(signed))
    except RemoteError as error:
        raise UsageError(f"genesis.msgpack is not the genesis of a run: {error} [{error.code}]") from None
    if run_id(signed).hex() != run:
        raise UsageError(f"genesis.msgpack is of run {run_id(signed).hex()[:16]}…, log.json of {run[:16]}…")
    return signed


class RunAudit:
    """The steps of SPEC 10.9, epoch by epoch in order of version, then `finish`."""

    def __init__(self, signed: Signed, rejudge: Rejudge, progress: Progress) -> None:
        run = run_id(signed)
        genesis = open_genesis(signed, run=run)
        self.report = Report(genesis, signed, run)
        self._genesis = genesis
        self._run = run
        self._rejudge = rejudge
        self._progress = progress
        self._seals = _Seals(self.report, genesis.audit_anchor)
        self._receipts: InOrder[None] = InOrder()
        self._verdicts: InOrder[Verdict] = InOrder()
        self._draws = _Draws(self.report)

    def epoch(self, version: int, data: bytes | None) -> None:
        """`data`: the file of this epoch, None where there is none."""
        log = self._decode(version, data)
        if log is None:
            self._seals.skip()
            return
        self.report.epochs += 1
        opened = self._open(version, log)
        self._seals.check(opened)
        if opened.manifest is not None and opened.manifest.version != version:
            self._misplaced(opened, opened.manifest.version)
            return
        self._count(opened)
        self._check_answers(opened)
        self._check_drawn(opened)
        self._check_verdicts(opened)
        _check_scores(opened, self.report)
        self._rejudge.epoch(opened, self.report, self._progress)

    def _misplaced(self, opened: Opened, version: int) -> None:
        """The file of another epoch: said once, for nothing in it can agree with its place. Its numbers count, so
        that what is missing is not said of them as well."""
        what = f"is the epoch of policy version {version}: nothing else of it is checked in this place"
        self.report.add(1, epoch_file(opened.version), what)
        self._count(opened)

    def pass_over(self, first: int, last: int) -> None:
        """Epochs that the trainer says it lost. The seal after them still has to follow from the one before."""
        self.report.add(1, f"epochs {first} to {last}", "are missing: the trainer says that it lost them")

    def finish(self) -> Report:
        self._draws.finish(complete=not self._verdicts.missing(), highest=self._verdicts.highest)
        for what, numbers in (("receipts", self._receipts.missing()), ("verdicts", self._verdicts.missing())):
            if numbers:
                shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in numbers[:20])
                more = "" if len(numbers) <= 20 else f" and {len(numbers) - 20} other gaps"
                self.report.add(3, f"the run's {what}", f"missing from the log: number {shown}{more}")
        return self.report

    # --- step 1 ---

    def _decode(self, version: int, data: bytes | None) -> EpochLog | None:
        if data is None:
            self.report.add(1, epoch_file(version), "is missing")
            return None
        try:
            return codec.decode(EpochLog, data, most=MAX_EPOCH_BYTES)
        except DecodeError as error:
            self.report.add(1, epoch_file(version), f"is not an epoch: {error} [{error.code}]")
            return None

    def _open(self, version: int, log: EpochLog) -> Opened:
        opened = Opened(version, log)
        opened.manifest = self._unseal(Manifest, log.manifest, f"{opened.name}, manifest")
        self._check_manifest(opened)
        for place, signed in enumerate(log.calibrations, 1):
            calibration = self._unseal(Calibration, signed, f"{opened.name}, calibration {place}")
            if calibration is not None:
                opened.calibrations[signed.digest] = calibration
        if (digests := [each.digest for each in log.calibrations]) != sorted(set(digests)):
            self.report.add(1, opened.name, "its calibrations are not in the order of their digests, each once")
        for place, signed in enumerate(log.leases, 1):
            lease = self._unseal(Lease, signed, where := f"{opened.name}, lease {place}")
            if lease is not None:
                self._keep_lease(opened, lease, where)
        for place, submission in enumerate(log.submissions, 1):
            receipt = self._unseal(Receipt, submission.receipt, f"{opened.name}, submission {place}")
            if receipt is not None:
                opened.receipts.append((receipt, submission.draw))
        for each in log.verdicts:
            verdict = self._unseal(Verdict, each.verdict, where := f"{opened.name}, verdict {each.sequence}")
            if verdict is not None:
                opened.verdicts.append(Given(each.sequence, verdict, where))
        return opened

    def _unseal(self, cls: type[T], signed: Signed, where: str) -> T | None:
        """The object. One with a fault is named, and taken as what it says where it says anything: else one wrong
        byte would be followed by all that depends on it."""
        self.report.counts["signed objects"] += 1
        value: Any = None
        try:
            value = unseal(cls, signed, signer=self._genesis.trainer)
            _CHECKS.get(cls, _nothing)(value)
            made_for_none = cls is Calibration and value.run == bytes(32)
            if value.run != self._run and not made_for_none:
                raise DecodeError(Code.WRONG_RUN, f"it is of run {value.run.hex()[:16]}…")
        except RemoteError as error:
            self.report.add(1, where, f"{error} [{error.code}]")
        if value is not None:
            return value  # type: ignore[no-any-return]
        try:
            return codec.decode(cls, signed.payload)
        except DecodeError:
            return None

    def _check_manifest(self, opened: Opened) -> None:
        manifest = opened.manifest
        if manifest is None:
            return
        if opened.version == manifest.version == 0 and manifest.root != self._genesis.first_policy_root:
            self.report.add(1, f"{opened.name}, manifest", "its root is not that of the genesis' first policy")

    def _keep_lease(self, opened: Opened, lease: Lease, where: str) -> None:
        manifest = opened.manifest
        if manifest is not None and manifest.version != opened.version:
            return  # the file is another epoch's
        if lease.policy_version != opened.version or (manifest is not None and lease.policy_root != manifest.root):
            self.report.add(1, where, f"it is of policy version {lease.policy_version} or another root")
        shares = {(share.name, share.parameters) for share in self._genesis.environments}
        if (lease.environment, lease.parameters) not in shares:
            self.report.add(1, where, f"its environment '{lease.environment}' is none of the genesis")
        if lease.lease_id in opened.leases:
            self.report.add(4, where, f"lease {lease.lease_id.hex()} was issued before")
        opened.leases[lease.lease_id] = lease

    # --- step 3 ---

    def _count(self, opened: Opened) -> None:
        self.report.counts["leases"] += len(opened.leases)
        self.report.counts["receipts"] += len(opened.receipts)
        self.report.counts["verdicts"] += len(opened.verdicts)
        last = 0
        for receipt, _ in opened.receipts:
            where = f"{opened.name}, submission {receipt.sequence}"
            if not self._receipts.add(receipt.sequence, None) or receipt.sequence <= last:
                self.report.add(3, where, "its number came before")
            last = receipt.sequence
        last = 0
        for given in opened.verdicts:
            if not self._verdicts.add(given.sequence, given.verdict) or given.sequence <= last:
                self.report.add(3, given.where, "its number came before")
            last = given.sequence
        for _ in self._receipts.ready():
            pass
        for sequence, verdict in self._verdicts.ready():
            self._draws.judged(sequence, verdict)

    # --- step 4 ---

    def _check_answers(self, opened: Opened) -> None:
        answered: set[tuple[bytes, int]] = set()
        for receipt, _ in opened.receipts:
            what = _misplaced(receipt, opened.leases.get(receipt.lease_id))
            if what is None and (receipt.lease_id, receipt.slot) in answered:
                what = f"slot {receipt.slot} of its lease was answered before"
            if what is not None:
                self.report.add(4, f"{opened.name}, submission {receipt.sequence}", what)
            answered.add((receipt.lease_id, receipt.slot))
        seeds: dict[tuple[bytes, int], tuple[int, tuple[int, ...]]] = {}
        for lease in opened.leases.values():
            for slot in lease.slots:
                # SPEC 8.5: a slot that is leased again has the same seed.
                drawn = (slot.seed, lease.prompt)
                if seeds.setdefault((lease.group_id, slot.index), drawn) != drawn:
                    where = f"{opened.name}, lease {lease.lease_id.hex()}"
                    self.report.add(4, where, f"slot {slot.index} was leased before with another seed or prompt")

    # --- step 5 ---

    def _check_drawn(self, opened: Opened) -> None:
        verdicts: defaultdict[tuple[bytes, bytes], list[Verdict]] = defaultdict(list)
        for given in opened.verdicts:
            verdicts[given.verdict.trace_digest, given.verdict.node].append(given.verdict)
        for receipt, drawn in opened.receipts:
            where = f"{opened.name}, submission {receipt.sequence}"
            found = verdicts[receipt.trace_digest, receipt.node]
            if drawn is None:
                if any(each.audited or each.outcome is Outcome.ACCEPTED for each in found):
                    self.report.add(5, where, "it was judged worth believing and never drawn about")
                continue
            self._draws.add(receipt, drawn, where)
            self._check_draw(opened, receipt, drawn, where)
            looked_at = any(each.audited or each.outcome is Outcome.NOT_JUDGED for each in found)
            if drawn.drawn and not looked_at and (found or opened.is_sealed):
                self.report.add(5, where, "it was drawn for audit, and no verdict on it is of an audit")
        self._draws.catch_up(self._verdicts.reached)

    def _check_draw(self, opened: Opened, receipt: Receipt, drawn: Draw, where: str) -> None:
        if opened.audit_value is None:
            self.report.undecided["draws whose value is not revealed yet"] += 1
            return
        self.report.counts["draws"] += 1
        if is_drawn(opened.audit_value, receipt.trace_digest, drawn.rate) is not drawn.drawn:
            said = "it says audited" if drawn.drawn else "it says not audited"
            self.report.add(5, where, f"its draw is not the hash's: {said} at rate {drawn.rate:.3f}")

    # --- step 6 ---

    def _check_verdicts(self, opened: Opened) -> None:
        receipts = {(receipt.trace_digest, receipt.node): receipt for receipt, _ in opened.receipts}
        before: dict[tuple[bytes, bytes], Verdict] = {}
        for given in opened.verdicts:
            verdict = given.verdict
            key = (verdict.trace_digest, verdict.node)
            receipt = receipts.get(key)
            if receipt is None and (verdict.audited or verdict.outcome is not Outcome.REFUSED):
                self.report.add(6, given.where, "it is on a trace that has no receipt in this epoch, and no refusal")
            if receipt is not None and (receipt.lease_id, receipt.slot) != (verdict.lease_id, verdict.slot):
                self.report.add(6, given.where, "it is on another lease or slot than the receipt of its trace")
            if verdict.calibration is not None and verdict.calibration not in opened.calibrations:
                named = f"calibration {verdict.calibration.hex()[:16]}…"
                self.report.add(6, given.where, f"it names {named}, which is not in this epoch")
            if key in before and not may_replace(verdict, before[key]):
                self.report.add(6, given.where, f"it may not replace the {before[key].outcome} before it (8.8)")
            before[key] = verdict
        if opened.is_sealed:
            for receipt, _ in opened.receipts:
                if (receipt.trace_digest, receipt.node) not in before:
                    self.report.add(6, f"{opened.name}, submission {receipt.sequence}", "it never had a verdict")


def _nothing(value: Any) -> None:
    pass


_CHECKS: Final[dict[type, Any]] = {
    Manifest: check_manifest,
    Calibration: check_calibration,
    Lease: check_lease,
    Verdict: check_verdict,
}


def _misplaced(receipt: Receipt, lease: Lease | None) -> str | None:
    if lease is None:
        return f"it answers lease {receipt.lease_id.hex()}, which is not in this epoch"
    if receipt.node != lease.node:
        return "it is another node's than its lease"
    if lease.seed_of(receipt.slot) is None:
        return f"slot {receipt.slot} is not among its lease's"
    # SPEC 10.1: received after the deadline is turned away, without a receipt.
    return "it was received after its lease's deadline" if receipt.received_ms > lease.deadline_ms else None


# --- step 2 ---


class _Seals:
    """The chain of seals, and that of the values they reveal."""

    def __init__(self, report: Report, anchor: bytes) -> None:
        self._report = report
        self._previous: bytes | None = bytes(32)  # digest of the seal before; None: there was none
        self._open = ""  # an epoch before that is not sealed
        self._value, self._value_of = anchor, -1  # the newest value that is of the chain

    def skip(self) -> None:
        """An epoch is missing."""
        self._previous = None

    def check(self, opened: Opened) -> None:
        signed = opened.log.epoch
        if signed is None:
            self._previous, self._open = None, self._open or opened.name
            return
        self._report.sealed += 1
        where = f"{opened.name}, seal"
        try:
            epoch = unseal(Epoch, signed, signer=self._report.genesis.trainer)
        except RemoteError as error:
            self._report.add(1, where, f"{error} [{error.code}]")
            self._previous = signed.digest
            return
        if self._open:
            self._report.add(2, where, f"it is sealed, and {self._open} before it is not")
        for what in self._faults(opened, epoch):
            self._report.add(2, where, what)
        self._previous = signed.digest

    def _faults(self, opened: Opened, epoch: Epoch) -> Iterator[str]:
        log = opened.log
        if epoch.run != self._report.run or epoch.version != opened.version:
            yield f"it is of version {epoch.version} of run {epoch.run.hex()[:16]}…"
        for name in ("calibrations", "leases", "submissions", "verdicts"):
            here, sealed = len(getattr(log, name)), getattr(epoch, name)
            if here != sealed:
                yield f"{sealed} {name} were sealed, {here} are here"
        if epoch_root(log) != epoch.root:
            yield "its root is not that of the items here: something of the epoch was changed, added or removed"
        if self._previous is not None and epoch.previous != self._previous:
            yield "it does not follow from the seal of the epoch before"
        if descend(epoch.audit_value, opened.version - self._value_of) == self._value:
            self._value, self._value_of = epoch.audit_value, opened.version
            opened.audit_value = epoch.audit_value
        else:
            yield "the value it reveals is not of the chain that the genesis committed to (10.7)"


# --- the rates of step 5 ---


class _Draws:
    """Repeats each draw's rate once all verdicts up to its `seen` are known."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._audits: defaultdict[bytes, _Audits] = defaultdict(_Audits)
        self._waiting: list[tuple[int, int, bytes, Draw, str]] = []
        self._added = 0

    def judged(self, sequence: int, verdict: Verdict) -> None:
        """The next verdict of the run."""
        self._audits[verdict.node].add(sequence, verdict)

    def add(self, receipt: Receipt, drawn: Draw, where: str) -> None:
        self._added += 1
        heapq.heappush(self._waiting, (drawn.seen, self._added, receipt.node, drawn, where))

    def catch_up(self, reached: int) -> None:
        """Check those that look back no further than to verdict `reached`."""
        while self._waiting and self._waiting[0][0] <= reached:
            _, _, node, drawn, where = heapq.heappop(self._waiting)
            self._report.counts["rates"] += 1
            audits = self._audits[node]
            if drawn.trusted is None:
                what = _wrong_rate(audits.newest(drawn.seen), drawn)
            else:
                self._report.notes["draws of nodes that the trainer's operator vouches for"] += 1
                what = _wrong_trust(audits.lied(drawn.trusted, drawn.seen), drawn)
            if what is not None:
                self._report.add(5, where, what)

    def finish(self, *, complete: bool, highest: int) -> None:
        for seen, _, _, _, where in self._waiting:
            if complete or seen > highest:
                self._report.add(5, where, f"its rate is from verdict {seen}, which is not in the log")
            else:
                self._report.undecided["rates that follow from verdicts which are missing"] += 1


class _Audits:
    """Those of one node, in the order of their verdicts."""

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._found: list[tuple[bytes, bool | None]] = []  # trace; whether it passed, None where it does not count
        self._known: set[bytes] = set()
        self._last: tuple[int, list[bool]] = (0, [])
        self._lies: dict[bytes, list[tuple[int, bool]]] = {}  # by trace: verdicts from its first refusal on; refused
        self._last_lie: tuple[tuple[int, int, int], int | None] = ((0, 0, 0), None)

    def add(self, sequence: int, verdict: Verdict) -> None:
        refused = is_lie(verdict.outcome, verdict.reason)
        if refused or verdict.trace_digest in self._lies:
            self._lies.setdefault(verdict.trace_digest, []).append((sequence, refused))
        if not verdict.audited and verdict.trace_digest not in self._known:
            return  # it never counts, and replaces nothing
        self._known.add(verdict.trace_digest)
        counts = verdict.audited and verdict.outcome is not Outcome.NOT_JUDGED
        self._sequences.append(sequence)
        self._found.append((verdict.trace_digest, verdict.outcome is Outcome.ACCEPTED if counts else None))

    def lied(self, since: int, seen: int) -> int | None:
        """SPEC 10.7: a verdict after `since` and up to `seen` that is the newest on its trace, as of `seen`, and is a
        lie found."""
        asked = (since, seen, sum(map(len, self._lies.values())))
        if self._last_lie[0] != asked:  # draws of one moment ask the same
            known = ([each for each in found if each[0] <= seen] for found in self._lies.values())
            newest = (found[-1] for found in known if found)
            lie = next((sequence for sequence, refused in newest if refused and sequence > since), None)
            self._last_lie = (asked, lie)
        return self._last_lie[1]

    def newest(self, seen: int) -> list[bool]:
        """SPEC 10.7: the audits that count as of verdict `seen`, newest first."""
        place = bisect.bisect_right(self._sequences, seen)
        if self._last[0] == place:
            return self._last[1]
        audits: list[bool] = []
        met: set[bytes] = set()
        for digest, passed in itertools.islice(reversed(self._found), len(self._found) - place, None):
            # SPEC 10.7: of several verdicts on one trace the newest counts.
            if digest not in met:
                met.add(digest)
                if passed is not None:
                    audits.append(passed)
            if len(audits) == WINDOW:
                break
        self._last = (place, audits)
        return audits


def _wrong_trust(lied: int | None, drawn: Draw) -> str | None:
    """Why a node may not be trusted as a draw says, or a rate is not that of a trusted one (SPEC 10.7)."""
    if drawn.trusted is None or drawn.trusted > drawn.seen:
        return f"it is trusted since verdict {drawn.trusted}, and looks no further than verdict {drawn.seen}"
    if lied is not None:
        return f"it is trusted since verdict {drawn.trusted}, and verdict {lied} refused a trace of the node"
    if drawn.rate not in (1.0, drawn.floor):
        return f"its rate is {drawn.rate:.6f}; that of a trusted node is {drawn.floor:.6f}, or 1"
    return None


def _wrong_rate(audits: list[bool], drawn: Draw) -> str | None:
    """Why a rate is not that of SPEC 10.7. Rate 1 is right for whoever asks for more first audits, and for a pair
    without a calibration, neither of which the log tells."""
    if drawn.rate == 1.0:
        return None
    if len(audits) < LEAST_FIRST or not all(audits[:LEAST_FIRST]):
        passed = sum(audits)
        return f"its rate is {drawn.rate:.4f}, with {passed} audits passed and {len(audits) - passed} failed it is 1"
    passed = sum(audits)
    right = rate(passed, len(audits) - passed, drawn.floor)
    if not math.isclose(right, drawn.rate, rel_tol=0.0, abs_tol=RATE_TOLERANCE):
        failed = len(audits) - passed
        return f"its rate is {drawn.rate:.6f}; from {passed} audits passed and {failed} failed follows {right:.6f}"
    return None


# --- step 7 ---


def _check_scores(opened: Opened, report: Report) -> None:
    """SPEC 10.8: E of every scored verdict, over its parts and over the node's traces before it."""
    sums: dict[tuple[bytes, bytes], tuple[float, ...]] = {}
    counted: dict[tuple[bytes, bytes], tuple[bytes, tuple[float, ...]]] = {}
    for given in opened.verdicts:
        verdict = given.verdict
        trace = (verdict.node, verdict.trace_digest)
        earlier = counted.pop(trace, None)
        if earlier is not None:  # of several verdicts on one trace the newest counts
            key = (verdict.node, earlier[0])
            sums[key] = tuple(a - b for a, b in zip(sums[key], earlier[1], strict=True))
        if not verdict.scores or verdict.calibration is None:
            continue
        calibration = opened.calibrations.get(verdict.calibration)
        if calibration is None:
            continue  # named in step 6
        first = len(calibration.margins.alternatives)
        if len(verdict.scores) != first + len(calibration.proofs.alternatives):
            report.add(7, given.where, "its scores are not one for each alternative of its calibration")
            continue
        key = (verdict.node, verdict.calibration)
        sums[key] = add_scores(sums.get(key, ()), verdict.scores)
        counted[trace] = (verdict.calibration, verdict.scores)
        report.counts["scores"] += 1
        parts = {"margin score": verdict.scores[:first], "proof score": verdict.scores[first:], "node": sums[key]}
        for what in _wrong_evidence(verdict, parts):
            report.add(7, given.where, what)


def _wrong_evidence(verdict: Verdict, parts: dict[str, tuple[float, ...]]) -> Iterator[str]:
    failed = False
    said = {check.name: check for check in verdict.checks}
    for check in verdict.checks:
        if check.name in parts and check.outcome is not CheckOutcome.SKIPPED:
            ours = evidence(parts[check.name])
            if (check.outcome is CheckOutcome.FAILED) is not (ours > NODE_EVIDENCE_NATS):
                limit = f"of {NODE_EVIDENCE_NATS} nats"
                yield f"check '{check.name}' is {check.outcome}, its scores give evidence {ours:.4f} {limit}"
            elif check.value is not None and not math.isclose(
                ours, check.value, rel_tol=_SCORE_TOLERANCE, abs_tol=_SCORE_TOLERANCE
            ):
                yield f"check '{check.name}' says {check.value:.6f} nats, its scores give {ours:.6f}"
        failed = failed or check.outcome is CheckOutcome.FAILED
    node = said.get("node")
    if not failed and (node is None or node.outcome is CheckOutcome.SKIPPED):
        yield "it has scores, and its check 'node' was not carried out"
