"""The negative controls: every attack of attacks.py against any policy, honest traces beside it, and whether what
had to be caught was caught (SPEC 13).

Traces are drawn by the reference node and judged by the lines a trainer's auditor runs. Each pair of dtypes is
calibrated first, on honest traces of another run. Not here: the attacks, the table (controls_table.py) and the page
(controls_page.py).
"""

from __future__ import annotations

import math
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol import codec
from protocol.calibration import Calibration, Limits, Pair
from protocol.environments import base
from protocol.environments.base import Environment
from protocol.errors import UsageError
from protocol.lease import Lease
from protocol.limits import NODE_EVIDENCE_NATS
from protocol.trace import Trace, TraceFile
from protocol.verdict import Check
from verify.attacks import Attack, Attempt, Caught, Stage, Work, named, quick
from verify.calibrate import Subject, TooNoisy, derive, imitation_means, measure, round_to_int8, specimen_of
from verify.check import audit_checks, cheap_checks
from verify.evidence import Recomputed
from verify.files import Evidence, device_kind, read_evidence, receipt_fits, worker_of
from verify.finding import first_failure
from verify.judge import recompute
from verify.long_task import WRITING, long_task
from verify.model import PolicyModel
from verify.prefill import Verifier
from verify.reference import ReferenceRun, play
from verify.scores import add_scores, evidence, mantissa_means
from verify.structure import PolicyShape, policy_shape
from verify.thresholds import limits_for

GROUP: Final = 8  # traces within which an attack on single traces must show
NODE: Final = 32  # the same for what only a node's sums show
_SLOTS: Final = 4  # works of one task
_AT_ONCE: Final = 64  # honest traces drawn and judged together
_BOMB_BYTES: Final = 64 << 20  # more than this while a file is read is an attack that worked
_CALIBRATION_TASKS: Final = 1 << 16  # where the tasks of calibration begin

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. tokens: of a trace, about; 0 takes the environment's tasks as they are. traces: what an attack
    begins from; so many honest ones are judged, or `honest` where that is more. calibration: traces to calibrate
    by, 0 to judge by the fixed limits without scores."""

    policy: Path
    dtype: str = "float32"
    verifier_dtypes: tuple[str, ...] = ("float32",)
    traces: int = NODE
    honest: int = 0
    calibration: int = NODE
    tokens: int = 64
    environment: str | None = None
    only: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One attempt, judged. `check` is the one that refused it, "file" where it could not be read, "" for none.

    ratio: that check's value / limit, or the worst of the evidence's for a trace that passed. margins and
    means (mantissa means of judged chunks) are empty where the model was not needed.
    """

    check: str
    ratio: float | None
    scores: tuple[float, ...]
    margins: NDArray[np.float32]
    means: NDArray[np.float64]
    tokens: int

    @property
    def refused(self) -> bool:
        return self.check != ""


_NONE32: Final = np.zeros(0, dtype=np.float32)
_NONE64: Final = np.zeros(0, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One line of the table.

    caught: what should show it; None for the honest row. attempts: handed in, `changed` of them dishonest.
    refused: of the changed ones. within, tokens: traces and tokens of a node until it is caught, the worst of all
    groups; None where it never was. checks: which refused, with how many.
    """

    name: str
    caught: Caught | None
    note: str
    attempts: int
    changed: int
    refused: int
    within: int | None
    tokens: int | None
    by_node: bool
    nats: float  # evidence of all its traces together
    ratio: float | None  # median over refused traces; the worst of the honest
    checks: tuple[tuple[str, int], ...]
    margins: NDArray[np.float32]
    means: NDArray[np.float64]

    @property
    def required(self) -> bool:
        return self.caught in (Caught.TRACE, Caught.NODE) and self.changed > 0

    @property
    def bar(self) -> int:
        return NODE if self.caught is Caught.NODE else GROUP

    @property
    def met(self) -> bool:
        """Whether the bar is met: caught in time, or not refused where it is honest."""
        if self.caught is None:
            return self.within is None
        return not self.required or (self.within is not None and self.within <= self.bar)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """One pair of dtypes. `rows` begin with the honest one."""

    policy: str
    worker_dtype: str
    verifier_dtype: str
    environment: str
    limits: Limits
    calibrated: bool
    too_noisy: str  # why the pair got no calibration and is judged by the fixed limits; empty where it got one
    seconds: float
    rows: tuple[Row, ...]

    @property
    def met(self) -> bool:
        return not self.too_noisy and all(row.met for row in self.rows)


class Bench:
    """Judges attempts as one pair of dtypes: worker's and this verifier's."""

    def __init__(self, plan: Plan, verifier: Verifier, environment: Environment, scratch: Path) -> None:
        self.verifier = verifier
        self.limits: Limits | None = None
        self.calibration: Calibration | None = None
        self.too_noisy = ""
        self._environment = environment
        self._shape: PolicyShape = policy_shape(plan.policy)
        self._file = scratch / "attempt.msgpack"

    def judge(self, attempts: Sequence[Attempt], run: ReferenceRun) -> list[Found]:
        """Each attempt, in order, by itself."""
        found: list[Found | None] = []
        audited: list[tuple[int, Evidence]] = []
        for place, attempt in enumerate(attempts):
            opened = self._read(attempt.file)
            if isinstance(opened, Evidence):
                cheap = self._cheap(opened, run)
                found.append(cheap)
                if cheap is None:
                    audited.append((place, opened))
            else:
                found.append(opened)
        ours = recompute(self.verifier, [(each.trace, each.lease) for _, each in audited]) if audited else []
        for (place, opened), numbers in zip(audited, ours, strict=True):
            found[place] = self._audit(opened, numbers)
        return [each for each in found if each is not None]

    def _read(self, file: TraceFile | bytes) -> Evidence | Found:
        """As `rlverify check` reads it, watching what the reading takes."""
        self._file.write_bytes(file if isinstance(file, bytes) else codec.encode(file))
        watched = isinstance(file, bytes)
        if watched:
            tracemalloc.start()
        try:
            return read_evidence(self._file)
        except UsageError:
            peak = tracemalloc.get_traced_memory()[1] if watched else 0
            return Found("file" if peak <= _BOMB_BYTES else "", None, (), _NONE32, _NONE64, 0)
        finally:
            if watched:
                tracemalloc.stop()

    def _cheap(self, opened: Evidence, run: ReferenceRun) -> Found | None:
        """What the checks without a model found; None where they passed."""
        receipt = opened.receipt
        cheap = cheap_checks(
            opened.signed_trace,
            opened.trace,
            opened.lease,
            run=opened.run,
            shape=self._shape,
            environment=self._environment,
            tokenizer=run.tokenizer,
            received_ms=receipt.received_ms if receipt is not None and receipt_fits(opened) else None,
        )
        failure = first_failure(cheap.checks)
        if failure is None:
            return None
        return Found(failure.name, _share(failure), (), _NONE32, _NONE64, len(opened.trace.logprobs))

    def _audit(self, opened: Evidence, ours: Recomputed) -> Found:
        if self.limits is None:
            raise UsageError("this pair of dtypes was not calibrated: there are no limits to judge by")
        audited = audit_checks(opened.trace, opened.lease, ours, self.limits, self.calibration)
        failure = first_failure(audited.checks)
        shares = [share for check in audited.checks if (share := _share(check)) is not None]
        return Found(
            "" if failure is None else failure.name,
            max(shares, default=None) if failure is None else _share(failure),
            audited.scores,
            ours.margins,
            mantissa_means(ours.chunks),
            len(ours.margins),
        )


def _share(check: Check) -> float | None:
    """value / limit of a check that measured evidence; None for those that hold or do not."""
    if check.name not in _MEASURED or check.value is None or not check.limit:
        return None
    return check.value / check.limit


_MEASURED: Final = ("deadline", "length", "margins", "margin score", "logprobs", "proofs", "proof score")


def tabulate(attack: Attack | None, attempts: Sequence[Attempt], found: Sequence[Found]) -> Row:
    """What was found of all attempts as a row; `attack` None for honest traces."""
    changed = [each for attempt, each in zip(attempts, found, strict=True) if attempt.changed]
    refused = [each for each in changed if each.refused]
    within, tokens, by_node = _caught(attack, attempts, found)
    ratios = [each.ratio for each in (refused if attack else found) if each.ratio is not None]
    middle = None if not ratios else float(np.median(ratios)) if attack else max(ratios)
    return Row(
        name="honest" if attack is None else attack.name,
        caught=None if attack is None else attack.caught,
        note="" if attack is None else attack.note,
        attempts=len(found),
        changed=len(changed) if attack else 0,
        refused=sum(each.refused for each in found) if attack is None else len(refused),
        within=within,
        tokens=tokens,
        by_node=by_node,
        nats=evidence(_sums(found)),
        ratio=middle,
        checks=tuple(Counter(each.check for each in found if each.refused).most_common()),
        margins=np.concatenate([_NONE32, *(each.margins for each in found)]),
        means=np.concatenate([_NONE64, *(each.means for each in found)]),
    )


def _caught(
    attack: Attack | None, attempts: Sequence[Attempt], found: Sequence[Found]
) -> tuple[int | None, int | None, bool]:
    """Traces and tokens until a node that begins with these is caught, and whether its sums did it: the worst of
    all groups that hold a dishonest trace, None as soon as one of them is not caught."""
    size = len(found) if attack is None or attack.caught is not Caught.TRACE else GROUP
    worst: tuple[int | None, int | None, bool] = (0, 0, False)
    for start in range(0, len(found), size or 1):
        part = found[start : start + size]
        if attack is not None and not any(each.changed for each in attempts[start : start + size]):
            continue
        one = _first(part)
        if one[0] is None:
            return one
        worst = max(worst, one, key=lambda each: each[0] or 0)
    return worst if worst[0] else (None, None, False)


def _first(found: Sequence[Found]) -> tuple[int | None, int | None, bool]:
    sums: tuple[float, ...] = ()
    tokens = 0
    for count, each in enumerate(found, 1):
        tokens += each.tokens
        if each.refused:
            return count, tokens, False
        if each.scores:
            sums = add_scores(sums, each.scores)
            # SPEC 10.8: the node's traces of one policy, whatever else it handed in.
            if evidence(sums) > NODE_EVIDENCE_NATS:
                return count, tokens, True
    return None, None, False


def _sums(found: Iterable[Found]) -> tuple[float, ...]:
    sums: tuple[float, ...] = ()
    for each in found:
        if each.scores:
            sums = add_scores(sums, each.scores)
    return sums


def run_controls(plan: Plan, say: Say = lambda text: None) -> list[Report]:
    """One report for each verifier's dtype. Raises UsageError, PolicyError, EngineError.

    Cheats are drawn once and judged by every verifier.
    """
    attacks = named(plan.only)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        name = plan.environment or WRITING
        run = ReferenceRun.found(plan.policy, name, seed=plan.seed)
        environment: Environment = (
            long_task(run.tokenizer, plan.environment, plan.tokens) if plan.tokens else base.load(name)
        )
        worker = quick(PolicyModel(plan.policy, plan.dtype, "cpu"))
        benches = {
            dtype: Bench(plan, Verifier(plan.policy, dtype), environment, scratch) for dtype in plan.verifier_dtypes
        }
        calibrate_benches(plan, benches, worker, environment, say)
        works = works_of(run, environment, plan, max(plan.traces, plan.honest))
        say(f"drawing {len(works)} honest traces")
        drawn = play(worker, run.tokenizer, works, environment=environment)
        honest = list(zip(works, drawn, strict=True))
        prover = benches[plan.dtype].verifier if plan.dtype in benches else Verifier(plan.policy, plan.dtype)
        stage = Stage(
            run=run,
            environment=environment,
            works=works[: plan.traces],
            honest=drawn[: plan.traces],
            worker=worker,
            prover=prover,
            dtype=plan.dtype,
            group=max(GROUP, plan.traces // 4),
            scratch=scratch,
        )
        rows = {dtype: [_honest_row(bench, run, honest, say)] for dtype, bench in benches.items()}
        for attack in attacks:
            say(attack.name)
            attempts = attack.make(stage)
            for dtype, bench in benches.items():
                rows[dtype].append(tabulate(attack, attempts, bench.judge(attempts, run)))
        seconds = time.monotonic() - began
        return [
            Report(
                policy=plan.policy.name,
                worker_dtype=plan.dtype,
                verifier_dtype=dtype,
                environment=name,
                limits=bench.limits,
                calibrated=bench.calibration is not None,
                too_noisy=bench.too_noisy,
                seconds=seconds,
                rows=tuple(rows[dtype]),
            )
            for dtype, bench in benches.items()
            if bench.limits is not None
        ]


def works_of(run: ReferenceRun, environment: Environment, plan: Plan, count: int, first_task: int = 0) -> list[Work]:
    """`count` slots, a few of each task."""
    tasks = range(first_task, first_task + math.ceil(count / _SLOTS))
    leases = [_roomy(run.lease(task, environment, slots=_SLOTS), plan) for task in tasks]
    return [(lease, slot) for lease in leases for slot in range(_SLOTS)][:count]


def _roomy(lease: Lease, plan: Plan) -> Lease:
    # Observations take room too, more than answers where answers are short.
    return replace(lease, max_tokens=8 * plan.tokens) if plan.tokens else lease


def _honest_row(bench: Bench, run: ReferenceRun, honest: Sequence[tuple[Work, Trace]], say: Say) -> Row:
    attempts = [Attempt(run.file(lease, trace)) for (lease, _), trace in honest]
    found: list[Found] = []
    for start in range(0, len(attempts), _AT_ONCE):
        found += bench.judge(attempts[start : start + _AT_ONCE], run)
        say(f"honest: {len(found)} of {len(attempts)} judged, {sum(each.refused for each in found)} refused")
    return tabulate(None, attempts, found)


def calibrate_benches(
    plan: Plan, benches: dict[str, Bench], worker: PolicyModel, environment: Environment, say: Say
) -> None:
    """Limits and scores of each pair, from honest traces of another run: other seeds, other tasks."""
    if not plan.calibration:
        for dtype, bench in benches.items():
            bench.limits = limits_for(plan.dtype, dtype)
        return
    run = ReferenceRun.found(plan.policy, environment.name, seed=plan.seed + 1)
    works = works_of(run, environment, plan, plan.calibration, _CALIBRATION_TASKS)
    say(f"drawing {len(works)} traces to calibrate by")
    traces = play(worker, run.tokenizer, works, environment=environment)
    specimens = [specimen_of(trace, lease) for trace, (lease, _) in zip(traces, works, strict=True)]
    rounded = PolicyModel(plan.policy, plan.dtype, "cpu")
    round_to_int8(rounded)
    for bench in benches.values():
        measured = measure(bench.verifier, specimens)
        found = bench.verifier.fingerprint
        pair = Pair(*worker_of(traces[0]), found.engine[:64], found.dtype, device_kind(found.device))
        subject = Subject(bytes(32), 0, run.root, pair)
        imitation = imitation_means(rounded, specimens, measured)
        try:
            bench.calibration = derive(subject, measured, imitation, works[0][0].issued_ms)
            bench.limits = bench.calibration.limits
        except TooNoisy as error:
            say(str(error))
            bench.too_noisy, bench.limits = str(error), limits_for(plan.dtype, found.dtype)
