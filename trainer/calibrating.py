"""By what an auditor judges the traces of a pair of engines: its calibration, measured here where that can be done.

A pair of the project's own engine on this kind of device is measured by the auditor itself, on the run's own policy;
another on the first traces of nodes that the operator trusts (`rltrainer serve --trust`), where one brings it. Else a
person measures (`rlverify calibrate`) and puts the file into RUN/calibrations; the gateway signs what it finds in the
ledger. Until then a pair is new: judged by the ceilings and,
where those are wide, by a provisional calibration, audited at rate 1, and a person is told. That a pair cannot be
measured is this trainer's misfortune and never held against a node. Not here: the measuring itself
(verify/calibrate.py).
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from protocol import codec
from protocol.calibration import Calibration, Pair, check_calibration
from protocol.envelope import Signed
from protocol.errors import RLCommonsError, UsageError
from protocol.lease import Lease
from protocol.trace import Trace
from trainer.child import now_ms, say
from trainer.ledger import Ledger
from trainer.ledger_rows import CalibrationRow
from trainer.pairs import ENGINE, own_pair, pair_name, pair_of
from trainer.rundir import Run
from verify.calibrate import calibrate, enough, provisional
from verify.files import Measure, read_calibration
from verify.prefill import Verifier
from verify.thresholds import above_ceilings, measured_dtypes

RENEW_VERSIONS: Final = 256  # policy versions: the tables leave room for some drift, not for any
IMITATED: Final = (ENGINE, "reference")  # engines whose forward pass is the verifier's own
MOST_TRACES: Final = 256  # of a policy version that are looked through for those of a pair
NEW: Final = "audited in full and judged by the ceilings"


class Calibrator:
    """One auditor's view of the pairs. `load` gives the verifier with a version, in a dtype."""

    def __init__(self, run: Run, ledger: Ledger, name: str, load: Callable[[int, str], Verifier]) -> None:
        self._run = run
        self._ledger = ledger
        self._name = name
        self._load = load
        self._known: dict[str, Measure] = {}
        self._provided: dict[bytes, Measure] = {}  # digest of the one it was made from → provisional calibration
        self._looked: tuple[int, int] | None = None  # folder's change time and number of rows when last read
        self._tried: dict[str, int] = {}  # pair → policy version on which it was measured, or could not be

    def begin(self) -> None:
        """A run starts: measure the run's own pair, where it is not."""
        latest = self._ledger.latest_signed()
        if latest is not None:
            self.measure(own_pair(self._run.config), latest)

    def measure(self, pair: Pair, version: int) -> Measure | None:
        """The calibration to judge traces of this pair by; None while it is new. May take as long as an audit of
        some dozens of traces, the first time."""
        self._read()
        name = pair_name(pair)
        found = self._known.get(name)
        if found is not None and version - found.calibration.policy_version < RENEW_VERSIONS:
            return found
        own = self._can_imitate(pair)
        honest = () if own else self._honest(pair, version)
        if own or honest:
            self._try(pair, version, honest)
        elif found is None:
            self._tell(
                name,
                "serve with --trust and the id of a node that has it, or measure it with `rlverify calibrate --traces` "
                f"into {self._run.folder.calibrations}",
            )
        if name in self._known or own:
            return self._known.get(name)
        return self._provisional(pair, version)

    def _honest(self, pair: Pair, version: int) -> tuple[tuple[Trace, Lease], ...]:
        """The first traces of this pair and policy that trusted nodes handed in; none while they are too few."""
        found = []
        for row in self._ledger.traces_by(self._ledger.trusted(), version, MOST_TRACES):
            trace = codec.decode(Trace, codec.decode(Signed, row.trace).payload)
            if pair_of(trace.engine, self._run.config) == pair:
                found.append((trace, codec.decode(Lease, codec.decode(Signed, row.lease).payload)))
        return tuple(found) if enough(trace for trace, _ in found) else ()

    def _provisional(self, pair: Pair, version: int) -> Measure | None:
        """SPEC 10.6: from the project's own engine in the same dtypes."""
        own = replace(pair, worker_engine=ENGINE, worker_device=pair.verifier_device)
        # The ceilings of two float32 engines leave nothing for scores to find.
        if pair.worker_dtype == pair.verifier_dtype == "float32" or not self._can_imitate(own):
            return None
        measured = self.measure(own, version)
        if measured is None:
            return None
        if measured.digest not in self._provided:
            made = provisional(measured.calibration)
            self._keep(made, f"provisionally, after {pair_name(own)}")
            self._provided[measured.digest] = Measure(made, hashlib.sha256(codec.encode(made)).digest())
        return self._provided[measured.digest]

    def _can_imitate(self, pair: Pair) -> bool:
        own_device = pair.worker_device == pair.verifier_device
        return pair.worker_engine in IMITATED and own_device and pair.worker_dtype in measured_dtypes()

    # --- what is there ---

    def _read(self) -> None:
        """What others measured or a person put into the folder, where anything changed."""
        folder = self._run.folder.calibrations
        changed = folder.stat().st_mtime_ns if folder.is_dir() else 0
        if self._looked is None or self._looked[0] != changed:
            for path in sorted(folder.glob("*.msgpack")):
                self._take(path)
        rows = self._ledger.calibrations()
        if self._looked != (changed, len(rows)):
            for row in rows:
                if not row.provisional:
                    self._known[row.pair] = Measure(codec.decode(Calibration, row.body), row.digest)
        self._looked = (changed, len(rows))

    def _take(self, path: Path) -> None:
        """A file that a person put there, as a calibration of this run; or an event that says why it is none."""
        try:
            self._keep(self._adopted(read_calibration(path).calibration), f"from {path.name}")
        except UsageError as error:
            self._event("fault", f"calibration {path.name} is not used: {error}")

    def _adopted(self, found: Calibration) -> Calibration:
        version = self._ledger.version_of(found.policy_root)
        if found.run not in (self._run.run, bytes(32)) or version is None:
            raise UsageError("it was measured on a policy that is none of this run")
        ours = own_pair(self._run.config)
        pair = found.pair
        if found.provisional:
            raise UsageError("it is provisional: it names no engine that was measured")
        theirs = (pair.verifier_engine, pair.verifier_dtype, pair.verifier_device)
        if theirs != (ENGINE, pair.worker_dtype, ours.verifier_device):
            raise UsageError(f"it holds for a verifier of {' '.join(theirs)}, this trainer's are another")
        if above := above_ceilings(found):
            raise UsageError(f"its limits are above the ceilings: {above}")
        return replace(found, run=self._run.run, policy_version=version)

    def _keep(self, calibration: Calibration, how: str) -> None:
        check_calibration(calibration)
        body, name = codec.encode(calibration), pair_name(calibration.pair)
        row = CalibrationRow(
            hashlib.sha256(body).digest(),
            name,
            calibration.policy_version,
            calibration.created_ms,
            body,
            calibration.provisional,
            None,
        )
        if self._ledger.add_calibration(row):
            sample = calibration.sample
            self._event("calibration", f"{name}: calibrated {how}, {sample.traces} traces, {sample.tokens} tokens")
        if not calibration.provisional:
            self._ledger.note_pair(name, now_ms(), None)

    # --- measuring ---

    def _try(self, pair: Pair, version: int, honest: tuple[tuple[Trace, Lease], ...] = ()) -> None:
        name = pair_name(pair)
        if version - self._tried.get(name, version - RENEW_VERSIONS) < RENEW_VERSIONS:
            return
        if self._ledger.pair_trying(name) == version:
            self._tried[name] = version
            self._tell(name, f"an auditor ended while it measured this pair on policy version {version}")
            return
        with _alone(self._run.folder.path / "calibrating.lock") as mine:
            if mine:
                self._tried[name] = version
                self._measure(pair, version, honest)
                self._ledger.renew_claims(self._name, now_ms())  # what it holds it begins only now
        self._read()

    def _measure(self, pair: Pair, version: int, honest: tuple[tuple[Trace, Lease], ...]) -> None:
        name = pair_name(pair)
        self._ledger.try_pair(name, now_ms(), version)
        try:
            calibration = calibrate(
                self._run.folder.policy(version),
                self._load(version, pair.verifier_dtype),
                worker_dtype=pair.worker_dtype,
                environments=[(share.name, share.parameters) for share in self._run.genesis.environments],
                created_ms=now_ms(),
                run=self._run.run,
                policy_version=version,
                worker_engine=pair.worker_engine,
                device=self._run.config.device,
                trusted=honest,
            )
            self._keep(calibration, f"on policy version {version}{', by traces of trusted nodes' if honest else ''}")
        except Exception as error:  # of whatever kind: it is no trace's fault
            self._tell(name, error if isinstance(error, RLCommonsError) else repr(error))
        finally:
            self._ledger.try_pair(name, now_ms(), None)

    # --- telling ---

    def _tell(self, name: str, why: object) -> None:
        """A pair is new: once, until the reason changes."""
        if self._ledger.note_pair(name, now_ms(), str(why)[:500]):
            self._event("calibration", f"{name} is not calibrated, so its traces are {NEW}: {why}")

    def _event(self, kind: str, text: str) -> None:
        say(self._name, text)
        self._ledger.add_event(now_ms(), kind, text)


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no other auditor measures now; until the block ends none begins."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
