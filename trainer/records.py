"""The records process: what each learner step came to, and each evaluation, for people and their tools.

    RUN/metrics.jsonl      one JSON object a step, and one an evaluation, whose names begin with evaluation_
    RUN/tensorboard/       the same as scalars: tensorboard --logdir RUN/tensorboard
    Weights & Biases       with `rltrainer serve --wandb PROJECT`; WANDB_MODE=offline keeps it in RUN/wandb

All follow the ledger, which alone counts: a start finds out what each holds, cuts off what a kill left half written,
and adds what is missing, so that nothing is missed or there twice. Started as `python -m trainer.records RUN`; ends
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
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from protocol.errors import RLCommonsError, StorageError
from protocol.outputs import cause
from trainer.child import Changes, alone, end_with_parent, say
from trainer.event_files import EventFile
from trainer.ledger import Ledger
from trainer.ledger_rows import EvaluationRow, StepRow
from trainer.rundir import Run, open_run

IDLE_SECONDS: Final = 5.0
_TAIL_BYTES: Final = 1 << 16  # of metrics.jsonl, in which its last whole line must be
_NOT_SCALARS: Final = frozenset({"version", "created_ms", "at_ms"})
_EVALUATION: Final = "evaluation"

Row = StepRow | EvaluationRow


class Mark(NamedTuple):
    """A row's place. A policy is evaluated after the step that made it and before the next: so rows are written in
    this order, and the last one says what all before it were."""

    version: int
    is_evaluation: bool


class Record(Protocol):
    """Something that holds rows up to a mark."""

    @property
    def last(self) -> Mark | None:
        """Of the row it holds last, None before the first."""

    def add(self, rows: Sequence[Row]) -> None: ...

    def begin_anew(self) -> None: ...


class JsonLines:
    """metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: Mark | None = None
        if not path.exists():
            return
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
            whole, end = lines[:-1], size - len(lines[-1])  # what follows the last line break was cut off
            while whole and (mark := _mark_in(whole[-1])) is None:
                end -= len(whole.pop()) + 1
            self.last = mark if whole else None
            file.truncate(end if whole else 0)

    def add(self, rows: Sequence[Row]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(_line(row)) + "\n" for row in rows))
        self.last = mark_of(rows[-1])

    def begin_anew(self) -> None:
        self._path.unlink(missing_ok=True)
        self.last = None


def mark_of(row: Row) -> Mark:
    return Mark(row.version, isinstance(row, EvaluationRow))


def _mark_in(line: bytes) -> Mark | None:
    try:
        fields = json.loads(line)
        version = fields["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return Mark(version, f"{_EVALUATION}_tasks" in fields) if isinstance(version, int) else None


def _fields(row: Row) -> dict[str, Any]:
    """An evaluation whose every task failed has no reward."""
    fields = dataclasses.asdict(row)
    if isinstance(row, EvaluationRow) and not row.tasks:
        fields |= {"reward_mean": math.nan, "reward_error": math.nan}
    return fields


def _line(row: Row) -> dict[str, Any]:
    """JSON has no NaN. In one file with the steps, an evaluation's figures have names of their own."""
    before = f"{_EVALUATION}_" if isinstance(row, EvaluationRow) else ""
    return {
        name if name == "version" else before + name: None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in _fields(row).items()
    }


def scalars(row: Row) -> dict[str, float]:
    """A row's figures under the names that TensorBoard and Weights & Biases show."""
    before = _EVALUATION if isinstance(row, EvaluationRow) else "step"
    return {f"{before}/{name}": float(v) for name, v in _fields(row).items() if name not in _NOT_SCALARS}


def _made_ms(row: Row) -> int:
    return row.at_ms if isinstance(row, EvaluationRow) else row.created_ms


class TensorBoard:
    """The event file."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    @property
    def last(self) -> Mark | None:
        step, tags = self._file.last, self._file.last_tags
        return None if step is None else Mark(step, any(tag.startswith(_EVALUATION) for tag in tags))

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._file.write(_made_ms(row) / 1000, row.version, scalars(row))

    def begin_anew(self) -> None:
        self._file.begin_anew()


class WeightsAndBiases:
    """One run of theirs for the run, however often it is started. What it holds is noted beside it."""

    def __init__(self, run: Run, project: str) -> None:
        import wandb

        folder = run.folder.path / "wandb"
        folder.mkdir(exist_ok=True)
        self._mark = folder / "last-version"
        self.last = _mark_noted(self._mark)
        self._run = wandb.init(
            project=project,
            id=run.run.hex()[:32],
            name=run.genesis.name,
            resume="allow",
            dir=run.folder.path,
            config=dataclasses.asdict(run.config),
        )
        # Their steps only rise, and after a restart that of the policy evaluated now may be past.
        self._run.define_metric(f"{_EVALUATION}/*", step_metric=f"{_EVALUATION}/version")

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if isinstance(row, EvaluationRow):
                self._run.log({**scalars(row), f"{_EVALUATION}/version": row.version}, commit=False)
            else:
                self._run.log(scalars(row), step=row.version)
        self.last = mark_of(rows[-1])
        kind = f" {_EVALUATION}" if self.last.is_evaluation else ""
        self._mark.write_text(f"{self.last.version}{kind}\n", encoding="ascii")

    def begin_anew(self) -> None:
        """What was sent is there; steps that are not newer are not taken again."""
        self.last = None

    def close(self) -> None:
        self._run.finish()


def _mark_noted(path: Path) -> Mark | None:
    try:
        version, *kind = path.read_text(encoding="ascii").split()
        return Mark(int(version), kind == [_EVALUATION])
    except (OSError, ValueError):
        return None


def bring_up_to_date(ledger: Ledger, each: Record) -> int:
    """Add the rows that a record lacks; how many. Raises StorageError."""
    try:
        with ledger.snapshot():  # or an evaluation written between two reads would come after a later step, and be lost
            latest = ledger.policy()
            if each.last is not None and (latest is None or each.last.version > latest[0]):
                each.begin_anew()  # the run was put back to an earlier time
            rows = _after(ledger, each.last or Mark(-1, True))
        if rows:
            each.add(rows)
        return len(rows)
    except OSError as error:
        raise StorageError(f"a step cannot be noted: {cause(error)}") from None


def _after(ledger: Ledger, last: Mark) -> list[Row]:
    found: list[Row] = [*ledger.steps(last.version), *ledger.evaluations(last.version - 1)]
    return sorted((row for row in found if mark_of(row) > last), key=mark_of)


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
