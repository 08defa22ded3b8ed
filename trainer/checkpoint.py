"""What makes a learner step atomic: masters, optimiser, policy and "these groups are used" move together.

    learner/step-N.tmp   state.safetensors, step.json        written and flushed
    policies/N.tmp       the policy                          written and flushed
    policies/N.tmp   →  policies/N                           renamed
    learner/step-N.tmp → learner/step-N                      renamed: from here on the step has happened
    deltas/N                                                 how to make the policy from earlier ones
    ledger                                                   one transaction: figures, groups used, policy N

A learner killed before the second rename leaves nothing that counts, and `recover` clears it away; killed after
it, `recover` tells the ledger what it had missed; where deltas are missing then, nodes fetch the files. Not here: what
a step computes (learner.py, masters.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.errors import LocalError, StorageError
from protocol.outputs import cause
from protocol.policy import policy_root
from trainer.deltas import make_deltas
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow
from trainer.publish import write_policy
from trainer.rundir import RunFolder, flush
from verify.tensor_file import write_tensors

KEPT_STEPS: Final = 2  # learner states on disk: the last one, and the one before should that be damaged


@dataclass(frozen=True, slots=True)
class StepRecord:
    """step.json: what the ledger is told of a step."""

    row: StepRow
    root: bytes  # of the policy the step made
    taken: tuple[bytes, ...]  # groups used up, flat ones included
    optimiser_steps: int

    def to_json(self) -> str:
        table = {
            "row": dataclasses.asdict(self.row),
            "root": self.root.hex(),
            "taken": [group.hex() for group in self.taken],
            "optimiser_steps": self.optimiser_steps,
        }
        return json.dumps(table, indent=1)

    @classmethod
    def from_json(cls, text: str) -> StepRecord:
        table: dict[str, Any] = json.loads(text)
        return cls(
            row=StepRow(**table["row"]),
            root=bytes.fromhex(table["root"]),
            taken=tuple(bytes.fromhex(group) for group in table["taken"]),
            optimiser_steps=table["optimiser_steps"],
        )


def _pass(point: str) -> None:
    pass


def commit(
    folder: RunFolder,
    ledger: Ledger,
    row: StepRow,
    *,
    taken: tuple[bytes, ...],
    optimiser_steps: int,
    state: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    reached: Callable[[str], None] = _pass,
) -> None:
    """Make policy `row.version` real. `reached` is told each point after which a kill must be harmless.

    Raises StorageError when the disk is full or fails: then nothing has happened, and the masters in memory are
    ahead of the disk, so the caller must start anew from there.
    """
    making_step, making_policy = _making(folder.step(row.version)), _making(folder.policy(row.version))
    try:
        making_step.mkdir(parents=True)
        write_tensors(making_step / "state.safetensors", state)
        flush(making_step / "state.safetensors")
        reached("state written")
        root = write_policy(folder.policy(row.version - 1), making_policy, weights)
        record = StepRecord(row, root, taken, optimiser_steps)
        (making_step / "step.json").write_text(record.to_json(), encoding="utf-8")
        flush(making_step / "step.json")
        flush(making_step)
        reached("policy written")
        _make_real(making_policy)
        reached("policy renamed")
        _make_real(making_step)
        reached("step renamed")
    except OSError as error:
        raise StorageError(f"policy {row.version} could not be written: {cause(error)}") from error
    said = make_deltas(folder, row.version, ledger.root)
    reached("deltas made")
    ledger.record_step(row, record.root, taken)
    for text in said:
        ledger.add_event(row.created_ms, "delta", text)
    reached("recorded")
    for version in range(row.version - KEPT_STEPS, -1, -1):
        if not folder.step(version).exists():
            break
        shutil.rmtree(folder.step(version))


def _making(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _make_real(making: Path) -> None:
    os.rename(making, making.with_suffix(""))
    flush(making.parent)


def recover(folder: RunFolder, ledger: Ledger) -> int:
    """Finish or clear away what a killed learner left. The latest policy version, which is whole.

    Raises LocalError when files and ledger cannot be brought together.
    """
    folder.learner.mkdir(exist_ok=True)
    for unfinished in (*folder.learner.glob("*.tmp"), *folder.policies.glob("*.tmp")):
        shutil.rmtree(unfinished)
    for unfinished in folder.all_deltas.glob("*/*.tmp"):
        unfinished.unlink()
    latest = ledger.policy()
    if latest is None:
        raise LocalError(f"the ledger of {folder.path} knows no policy: restore the run from a backup")
    version, after = latest[0], latest[0] + 1
    if folder.step(after).exists():
        record = load_record(folder, after)
        if policy_root(folder.policy(after)) != record.root:
            raise LocalError(f"{folder.policy(after)} is not the policy the learner made: restore it from a backup")
        ledger.record_step(record.row, record.root, record.taken)
        return after
    if folder.policy(after).exists():
        shutil.rmtree(folder.policy(after))
    return version


def load_record(folder: RunFolder, version: int) -> StepRecord:
    """Raises LocalError when it cannot be read."""
    path = folder.step(version) / "step.json"
    try:
        return StepRecord.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocalError(f"{path} cannot be read ({cause(error)}): restore it from a backup") from None


@contextmanager
def open_state(folder: RunFolder, version: int) -> Iterator[Any]:
    """The open safetensors file of what made policy `version`. Raises LocalError when it cannot be read."""
    path = folder.step(version) / "state.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise LocalError(f"{path} cannot be read ({cause(error)}): restore it from a backup") from error
