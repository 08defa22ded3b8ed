"""Writes the log of a run as a folder that anyone may serve as static files, for `rlverify audit` (SPEC 8.12).

    OUT/genesis.msgpack   OUT/log.json     what run it is, how many epochs there are
    OUT/epochs/000012.msgpack              an EpochLog each
    OUT/traces/DIGEST.msgpack              a TraceFile for each trace that is still kept
    OUT/policies/000012/                   the policies that are still kept

May run while the run is served, and again: what is closed is not written twice. Needs no key. Not here: closing
epochs (epochs.py), checking a log (verify/run_audit.py).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol import codec
from protocol.errors import PolicyError, UsageError
from protocol.outputs import replace, unwritable
from protocol.policy import policy_files, version_name
from trainer.child import now_ms
from trainer.epochs import epoch_log
from trainer.export import trace_file
from trainer.ledger import Ledger
from trainer.rundir import Run

_FOLDERS: Final = ("epochs", "traces", "policies")


@dataclass(frozen=True, slots=True)
class Exported:
    """`epochs` are in the log, the first `sealed` of them closed; `traces` and `policies` were written now."""

    epochs: int
    sealed: int
    traces: int
    policies: int


def export_log(run: Run, ledger: Ledger, out: Path, *, traces: bool, policies: bool) -> Exported:
    """Write the log, or what is new of it. Raises UsageError for a folder of another run or of other things, and
    for a place that cannot be written to; StorageError. What was written then says itself that it is not complete.
    """
    try:
        return _export(run, ledger, out, traces=traces, policies=policies)
    except OSError as error:
        raise unwritable("the log", out, error) from None


def _export(run: Run, ledger: Ledger, out: Path, *, traces: bool, policies: bool) -> Exported:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: name the folder that the log is to be written to")
    before = _sealed_before(run, out)
    for name in _FOLDERS:
        (out / name).mkdir(parents=True, exist_ok=True)
    # A reader who finds this, or another one at the end than at the beginning, knows that files changed below him.
    _describe(run, out, before, before, (), complete=False)
    replace(out / "genesis.msgpack", codec.encode(run.signed_genesis))
    # Numbers of receipts and verdicts have no gap in one state of the ledger, and what a trace's file carries beside
    # the trace is then of its epoch: a verdict that is given meanwhile is in neither.
    with ledger.snapshot():
        sealed = ledger.sealed()
        epochs = _write_epochs(ledger, out / "epochs", before)
        lost = _passed_over([version for version in ledger.versions() if version < epochs])
        kept = range(epochs) if traces else ()
        written = sum(_write_traces(run, ledger, out / "traces", each, each < before) for each in kept)
    copied = _copy_policies(run, out / "policies", epochs) if policies else 0
    _describe(run, out, epochs, sealed, lost, complete=True)
    return Exported(epochs, sealed, written, copied)


def _sealed_before(run: Run, out: Path) -> int:
    """How many closed epochs lie there from an earlier time."""
    try:
        found: dict[str, Any] = json.loads((out / "log.json").read_text(encoding="utf-8"))
        of, sealed = found["run"], int(found["sealed"])
    except FileNotFoundError:
        _require_room(out)
        return 0
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{out / 'log.json'} is not of a log: choose another folder, or remove it") from None
    if of != run.run.hex():
        raise UsageError(f"{out} holds the log of another run, {of[:16]}…: choose another folder")
    return sealed


def _require_room(out: Path) -> None:
    """What lies in a folder without a log is of an export that never got as far as that, or somebody else's."""
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    others = sorted(name for name in names if name not in (*_FOLDERS, "genesis.msgpack") and name[:1] != ".")
    if others:
        raise UsageError(f"{out} holds other things ({others[0]}): choose an empty folder, or one of this run's log")


def _passed_over(versions: list[int]) -> tuple[tuple[int, int], ...]:
    """(first, last) of what is missing between the versions: a restored run lost them."""
    return tuple((before + 1, after - 1) for before, after in itertools.pairwise(versions) if after > before + 1)


def _describe(
    run: Run, out: Path, epochs: int, sealed: int, lost: tuple[tuple[int, int], ...], *, complete: bool
) -> None:
    table = {"spec": "1.0", "run": run.run.hex(), "epochs": epochs, "sealed": sealed, "passed_over": lost}
    text = json.dumps({**table, "complete": complete, "written_ms": now_ms()})
    replace(out / "log.json", (text + "\n").encode())


def _write_epochs(ledger: Ledger, folder: Path, first: int) -> int:
    """The epochs from version `first` on; the version after the last. One that a restored run passed over is lost,
    and has no file."""
    after = first
    for version in (each for each in ledger.versions() if each >= first):
        log = epoch_log(ledger, version)
        if log is None:
            break
        replace(folder / f"{version_name(version)}.msgpack", codec.encode(log))
        after = version + 1
    return after


def _write_traces(run: Run, ledger: Ledger, folder: Path, version: int, known: bool) -> int:
    """The traces of a version that are kept; how many are new or have another verdict than they had."""
    count = 0
    for digest in ledger.submitted(version):
        path = folder / f"{digest.hex()}.msgpack"
        if known and path.exists():
            continue
        row = ledger.submission(digest)
        if row is None or row.trace is None:
            continue  # pruned meanwhile
        data = codec.encode(trace_file(run, ledger, row))
        if not path.exists() or path.read_bytes() != data:
            replace(path, data)
            count += 1
    return count


def _copy_policies(run: Run, folder: Path, epochs: int) -> int:
    count = 0
    for version in run.folder.versions():
        target = folder / version_name(version)
        if version >= epochs or target.exists():
            continue
        making = folder / f".{target.name}.new"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            for path in policy_files(run.folder.policy(version)):
                shutil.copyfile(path, making / path.name)
            os.rename(making, target)
        except (PolicyError, FileNotFoundError):  # pruned meanwhile
            shutil.rmtree(making)
            continue
        except BaseException:  # a full disk, Ctrl-C: what is half there would take the room of the next try
            shutil.rmtree(making, ignore_errors=True)
            raise
        count += 1
    return count
