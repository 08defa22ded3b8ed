"""Writes the log of a run as a folder that anyone may serve as static files, for `rlverify audit` (SPEC 8.12).

    OUT/genesis.msgpack   OUT/log.json     what run it is, how many epochs there are
    OUT/epochs/000012.msgpack              an EpochLog each
    OUT/traces/DIGEST.msgpack              a TraceFile for each trace that is still kept
    OUT/policies/000012/                   the policies that are still kept

May run while the run is served, and again: what is closed is not written twice. Needs no key. Not here: closing
epochs (epochs.py), checking a log (verify/run_audit.py).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol import codec
from protocol.errors import PolicyError, StorageError, UsageError
from protocol.policy import policy_files
from trainer.child import now_ms
from trainer.epochs import epoch_log
from trainer.export import trace_file
from trainer.ledger import Ledger
from trainer.rundir import Run


@dataclass(frozen=True, slots=True)
class Exported:
    """`epochs` are in the log, the first `sealed` of them closed; `traces` and `policies` were written now."""

    epochs: int
    sealed: int
    traces: int
    policies: int


def export_log(run: Run, ledger: Ledger, out: Path, *, traces: bool, policies: bool) -> Exported:
    """Write the log, or what is new of it. Raises UsageError for a folder of another run, StorageError."""
    try:
        return _export(run, ledger, out, traces=traces, policies=policies)
    except OSError as error:
        raise StorageError(f"the log could not be written to {out}: {error.strerror}: {error.filename}") from None


def _export(run: Run, ledger: Ledger, out: Path, *, traces: bool, policies: bool) -> Exported:
    before = _sealed_before(run, out)
    for name in ("epochs", "traces", "policies"):
        (out / name).mkdir(parents=True, exist_ok=True)
    _write(out / "genesis.msgpack", codec.encode(run.signed_genesis))
    # A reader who finds this, or another one at the end than at the beginning, knows that files changed below him.
    _describe(run, out, before, before, complete=False)
    # Numbers of receipts and verdicts have no gap in one state of the ledger.
    with ledger.snapshot():
        sealed = ledger.sealed()
        epochs = _write_epochs(ledger, out / "epochs", before)
    written = sum(_write_traces(run, ledger, out / "traces", each, each < before) for each in range(epochs) if traces)
    copied = _copy_policies(run, out / "policies", epochs) if policies else 0
    _describe(run, out, epochs, sealed, complete=True)
    return Exported(epochs, sealed, written, copied)


def _sealed_before(run: Run, out: Path) -> int:
    """How many closed epochs lie there from an earlier time."""
    try:
        found: dict[str, Any] = json.loads((out / "log.json").read_text(encoding="utf-8"))
        of, sealed = found["run"], int(found["sealed"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{out / 'log.json'} is not of a log: choose another folder, or remove it") from None
    if of != run.run.hex():
        raise UsageError(f"{out} holds the log of another run, {of[:16]}…: choose another folder")
    return sealed


def _describe(run: Run, out: Path, epochs: int, sealed: int, *, complete: bool) -> None:
    table = {"spec": "1.0", "run": run.run.hex(), "epochs": epochs, "sealed": sealed}
    text = json.dumps({**table, "complete": complete, "written_ms": now_ms()})
    _write(out / "log.json", (text + "\n").encode())


def _write_epochs(ledger: Ledger, folder: Path, first: int) -> int:
    """The epochs from `first` on; how many there are in all."""
    version = first
    while (log := epoch_log(ledger, version)) is not None:
        _write(folder / f"{version:06d}.msgpack", codec.encode(log))
        version += 1
    return version


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
        data = trace_file(run, ledger, row)
        if not path.exists() or path.read_bytes() != data:
            _write(path, data)
            count += 1
    return count


def _copy_policies(run: Run, folder: Path, epochs: int) -> int:
    count = 0
    for version in run.folder.versions():
        target = folder / f"{version:06d}"
        if version >= epochs or target.exists():
            continue
        making = folder / f".{target.name}.new"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            for path in policy_files(run.folder.policy(version)):
                shutil.copyfile(path, making / path.name)
        except (PolicyError, FileNotFoundError):  # pruned meanwhile
            shutil.rmtree(making)
            continue
        os.rename(making, target)
        count += 1
    return count


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, as a reader sees it."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(data)
    beside.replace(path)
