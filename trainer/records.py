"""The records process: what each learner step came to, for people and their tools.

    RUN/metrics.jsonl      one JSON object a step
    RUN/tensorboard/       the same as scalars: tensorboard --logdir RUN/tensorboard
    Weights & Biases       with `rltrainer serve --wandb PROJECT`; WANDB_MODE=offline keeps it in RUN/wandb

All follow the ledger, which alone counts: a start finds out what each holds, cuts off what a kill left half written,
and adds what is missing, so that no step is missed or there twice. Started as `python -m trainer.records RUN`; ends
when its stdin does. Not here: live figures (summary.py, the page's /metrics).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from protocol.errors import RLCommonsError, StorageError
from protocol.outputs import cause
from trainer.child import Changes, alone, end_with_parent, say
from trainer.event_files import EventFile
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow
from trainer.rundir import Run, open_run

IDLE_SECONDS: Final = 5.0
_TAIL_BYTES: Final = 1 << 16  # of metrics.jsonl, in which its last whole line must be
_NOT_SCALARS: Final = frozenset({"version", "created_ms"})


class Record(Protocol):
    """Something that holds steps up to a version."""

    @property
    def last(self) -> int | None:
        """The one it holds last, None before the first."""

    def add(self, rows: Sequence[StepRow]) -> None: ...

    def begin_anew(self) -> None: ...


class JsonLines:
    """metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: int | None = None
        if not path.exists():
            return
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
            whole, end = lines[:-1], size - len(lines[-1])  # what follows the last line break was cut off
            while whole and (version := _version_in(whole[-1])) is None:
                end -= len(whole.pop()) + 1
            self.last = version if whole else None
            file.truncate(end if whole else 0)

    def add(self, rows: Sequence[StepRow]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(_finite(row)) + "\n" for row in rows))
        self.last = rows[-1].version

    def begin_anew(self) -> None:
        self._path.unlink(missing_ok=True)
        self.last = None


def _version_in(line: bytes) -> int | None:
    try:
        version = json.loads(line)["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def _finite(row: StepRow) -> dict[str, Any]:
    """JSON has no NaN."""
    fields = dataclasses.asdict(row)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields.items()}


def scalars(row: StepRow) -> dict[str, float]:
    """A step's figures under the names that TensorBoard and Weights & Biases show."""
    return {f"step/{name}": float(v) for name, v in dataclasses.asdict(row).items() if name not in _NOT_SCALARS}


class TensorBoard:
    """The event file."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    @property
    def last(self) -> int | None:
        return self._file.last

    def add(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._file.write(row.created_ms / 1000, row.version, scalars(row))

    def begin_anew(self) -> None:
        self._file.begin_anew()


class WeightsAndBiases:
    """One run of theirs for the run, however often it is started. What it holds is noted beside it."""

    def __init__(self, run: Run, project: str) -> None:
        import wandb

        folder = run.folder.path / "wandb"
        folder.mkdir(exist_ok=True)
        self._mark = folder / "last-version"
        try:
            self.last: int | None = int(self._mark.read_text(encoding="ascii"))
        except (OSError, ValueError):
            self.last = None
        self._run = wandb.init(
            project=project,
            id=run.run.hex()[:32],
            name=run.genesis.name,
            resume="allow",
            dir=run.folder.path,
            config=dataclasses.asdict(run.config),
        )

    def add(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._run.log(scalars(row), step=row.version)
        self.last = rows[-1].version
        self._mark.write_text(f"{self.last}\n", encoding="ascii")

    def begin_anew(self) -> None:
        """What was sent is there; steps that are not newer are not taken again."""
        self.last = None

    def close(self) -> None:
        self._run.finish()


def bring_up_to_date(ledger: Ledger, each: Record) -> int:
    """Add the steps that a record lacks; how many. Raises StorageError."""
    try:
        latest = ledger.policy()
        if each.last is not None and (latest is None or each.last > latest[0]):
            each.begin_anew()  # the run was put back to an earlier time
        rows = ledger.steps(-1 if each.last is None else each.last)
        if rows:
            each.add(rows)
        return len(rows)
    except OSError as error:
        raise StorageError(f"a step cannot be noted: {cause(error)}") from None


def serve(run: Run, ledger: Ledger, project: str) -> NoReturn:
    """Follow the ledger until interrupted."""
    kept: list[Record] = [JsonLines(run.folder.metrics), TensorBoard(run.folder.tensorboard)]
    theirs = WeightsAndBiases(run, project) if project else None
    if theirs is not None:
        kept.append(theirs)
    changes = Changes(ledger)
    try:
        while True:
            for each in kept:
                bring_up_to_date(ledger, each)
            changes.wait(IDLE_SECONDS)
    except KeyboardInterrupt:
        for each in kept:
            bring_up_to_date(ledger, each)
        if theirs is not None:
            theirs.close()
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.records", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--wandb", default="", metavar="PROJECT", help="also send to this project")
    arguments = parser.parse_args()
    end_with_parent()
    try:
        run = open_run(arguments.run)
        with alone(run.folder.path, "records"):
            serve(run, Ledger(run.folder.ledger, read_only=True), arguments.wandb)
    except KeyboardInterrupt:
        return 0
    except RLCommonsError as error:
        say("records", str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
