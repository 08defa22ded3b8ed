"""Copies of a run that may be served one day: made while it is served, and a run again by `restore`.

    hold     hard links to policies, deltas and the learner's state of the ledger's latest version
    copy     the ledger at exactly that version, then what was held, into a folder beside DIR
    finish   backup.json, and the folder gets its name: a back-up is there whole or not at all

What a run gave out after its last back-up is lost, and must not be given out differently: a restored run goes on under
the next version number that nobody has seen (docs/decisions/0015). Not here: whether a run folder is in order
(doctor.py), and where a run may be served (place.py).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from protocol.errors import LocalError, StorageError, UsageError
from protocol.outputs import cause, unwritable
from protocol.policy import policy_root
from trainer.audit_draw import LAST_VERSION
from trainer.init import made_whole
from trainer.ledger import Ledger
from trainer.ledger_care import NUMBERS_PASSED_OVER
from trainer.place import holder
from trainer.rundir import Run, RunFolder, flush, load_run_identity, load_secrets, open_run

HOLD_TRIES: Final = 5  # a learner may remove what was about to be held; not so often in a row
_BESIDE: Final = ("config.toml", "genesis.msgpack", "keys", "port", "calibrations", "quarantine")
_KNOWN: Final = frozenset((*_BESIDE, "ledger.sqlite", "policies", "deltas", "learner", "logs", "backup.json"))


@dataclass(frozen=True, slots=True)
class Backup:
    """backup.json: what a back-up is of."""

    run: str  # hex
    version: int  # of its latest policy
    root: str  # hex, of that policy
    made_ms: int
    bytes: int


class _Moved(Exception):
    """What should be held was removed meanwhile."""


def back_up(run: Run, target: Path, now_ms: int) -> Backup:
    """Copy a run, served or not, to the folder `target`: a new or empty one, or a back-up of this run, which is then
    replaced. It holds the run's key, and only its owner may read it.

    Raises UsageError for another folder; StorageError on a disk too full, and then what was there stays.
    """
    _check_target(run, target)
    making, replaced = _beside(target, "making"), _beside(target, "replaced")
    try:
        for of_a_killed_one in (making, replaced):
            shutil.rmtree(of_a_killed_one, ignore_errors=True)
        making.mkdir(parents=True, mode=0o700)
        made = _fill(run, making, now_ms)
        (making / "backup.json").write_text(json.dumps(_table(made)) + "\n", encoding="utf-8")
        making.chmod(0o700)
        for entry in (*making.rglob("*"), making):
            flush(entry)
        if target.exists():
            os.rename(target, replaced)
        os.rename(making, target)
        flush(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        return made
    except OSError as error:
        raise unwritable("the back-up", target, error) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _check_target(run: Run, target: Path) -> None:
    if target.resolve().is_relative_to(run.folder.path.resolve()):
        raise UsageError(f"{target} is inside the run: a back-up there is lost with it; choose another place")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    found = read_backup(target) if target.is_dir() else None
    if found is None:
        raise UsageError(f"{target} is no back-up: choose another place, or remove it first")
    if found.run != run.run.hex():
        raise UsageError(f"{target} is a back-up of another run, {found.run[:16]}…: choose another place")


def _beside(target: Path, what: str) -> Path:
    return target.parent / f".{target.name}.{what}"


def _table(made: Backup) -> dict[str, object]:
    return {name: getattr(made, name) for name in Backup.__slots__}


def read_backup(folder: Path) -> Backup | None:
    """What a folder is a back-up of; None: it is not one."""
    try:
        return Backup(**json.loads((folder / "backup.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _fill(run: Run, making: Path, now_ms: int) -> Backup:
    source, copy = run.folder, RunFolder(making)
    with closing(Ledger(source.ledger, read_only=True)) as ledger:
        for _ in range(HOLD_TRIES):
            try:
                # What the ledger says at one moment, and the files that it then names.
                with ledger.snapshot(), _held(source, _latest(ledger)) as held:
                    _check_room("the back-up", _to_copy(source, held), making)
                    ledger.copy_to(copy.ledger)
                    _copy(source, held, copy)
                    version, root, _ = ledger.policy() or (0, b"", None)
                return Backup(run.run.hex(), version, root.hex(), now_ms, _bytes(making))
            except _Moved:
                copy.ledger.unlink(missing_ok=True)
    raise StorageError(f"policies of {source.path} were removed faster than they could be held: try again")


def _latest(ledger: Ledger) -> int:
    found = ledger.policy()
    if found is None:
        raise LocalError("the ledger knows no policy: there is nothing to back up")
    return found[0]


@contextmanager
def _held(source: RunFolder, version: int) -> Iterator[Path]:
    """A folder of links to what version `version` and those before it consist of: while it is there, nothing that the
    learner removes is gone. Raises _Moved."""
    for of_a_killed_one in source.path.glob(".backup-*"):
        if not _is_alive(of_a_killed_one.name.rpartition("-")[2]):
            shutil.rmtree(of_a_killed_one)
    holding = source.path / f".backup-{os.getpid()}"
    try:
        wanted = [path for path in (source.step(version),) if version]
        wanted += [source.policy(each) for each in source.versions() if each <= version]
        wanted += [source.deltas(each) for each in source.versions() if each <= version]
        try:
            for folder in wanted:
                _link(folder, holding / folder.relative_to(source.path))
        except FileNotFoundError:
            raise _Moved from None
        if not (holding / source.policy(version).relative_to(source.path)).exists():
            raise _Moved
        yield holding
    finally:
        shutil.rmtree(holding, ignore_errors=True)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return int(process) != os.getpid()


def _link(folder: Path, target: Path) -> None:
    if not folder.exists():
        return  # a version without deltas, or a learner that began without a state
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix != ".tmp":
            os.link(path, target / path.name)


def _to_copy(source: RunFolder, held: Path) -> int:
    return _bytes(source.ledger) + _bytes(held) + sum(_bytes(source.path / name) for name in _BESIDE)


def _copy(source: RunFolder, held: Path, copy: RunFolder) -> None:
    for entry in held.iterdir():
        _copy_entry(entry, copy.path / entry.name)
    for name in _BESIDE:
        if (source.path / name).exists():
            _copy_entry(source.path / name, copy.path / name)
    copy.logs.mkdir()


def _copy_entry(entry: Path, target: Path) -> None:
    """Raises the first OSError: shutil.copytree would go on after it, and name every file."""
    if not entry.is_dir():
        shutil.copy2(entry, target)
        return
    target.mkdir(exist_ok=True)
    for below in entry.iterdir():
        _copy_entry(below, target / below.name)
    shutil.copystat(entry, target)


def _bytes(place: Path) -> int:
    """Of a file, or of all files below a folder; 0 of what is not there."""
    size = 0
    for path in place.rglob("*") if place.is_dir() else (place,):
        with suppress(FileNotFoundError):  # a run that is served removes some
            size += 0 if path.is_dir() else path.stat().st_size
    return size


def _check_room(what: str, needed: int, place: Path) -> None:
    """Raises StorageError where the disk of the folder `place` has no `needed` bytes left."""
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StorageError(
            f"{what} needs {_size(needed)}, the disk of {place.parent} has {_size(free)} free: "
            f"free {_size(needed - free)} more there or choose another place, and run it again"
        )


def _size(count: int) -> str:
    """Rounded up, so that what is said to be missing is enough."""
    return f"{-(-count // 10**6):,} MB" if count >= 10**7 else f"{-(-count // 1000):,} kB"


# --- a run again ---


@dataclass(frozen=True, slots=True)
class Restored:
    """`version` is the one that the run goes on from; `passed_over` how many numbers before it are not used again."""

    run: Run
    version: int
    passed_over: int


def restore(source: Path, target: Path, *, published: int | None, now_ms: int) -> Restored:
    """Make a run of a back-up, or of a copied folder that nobody serves.

    `published`: the highest version that anybody was given; None: nothing was published after the copy was made.
    Raises UsageError (no run, a folder in the way, a `published` below the copy's own version), LocalError (its key,
    ledger or latest policy is damaged) or StorageError.
    """
    run = open_run(source)
    if (process := holder(run.folder)) is not None:
        raise UsageError(f"{source} is served, by process {process}: back it up with `rltrainer backup`")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists already: choose another folder")
    load_run_identity(run)
    load_secrets(run)
    with made_whole(target) as making:
        _check_room("the run", _to_restore(source, renumbered=published is not None), making)
        for entry in source.iterdir():
            if entry.name in _KNOWN and entry.name != "backup.json":
                _copy_entry(entry, making / entry.name)
        _copy_journal(source, making)
        version, passed_over = _go_on(RunFolder(making), published, now_ms)
    return Restored(open_run(target), version, passed_over)


def _to_restore(source: Path, *, renumbered: bool) -> int:
    """Bytes of the run that is made; a policy under another number, and the learner's state, lie there twice."""
    size = _bytes(source / "ledger.sqlite-wal")
    size += sum(_bytes(entry) for entry in source.iterdir() if entry.name in _KNOWN and entry.name != "backup.json")
    folder = RunFolder(source)
    if renumbered and (versions := folder.versions()):
        size += _bytes(folder.policy(versions[-1])) + _bytes(folder.step(versions[-1]))
    return size


def _copy_journal(source: Path, making: Path) -> None:
    """What a copied ledger had not yet taken in; a back-up's has nothing of the kind."""
    journal = source / "ledger.sqlite-wal"
    if journal.exists():
        shutil.copy2(journal, making / journal.name)


def _go_on(folder: RunFolder, published: int | None, now_ms: int) -> tuple[int, int]:
    """(version that the run goes on from, numbers passed over)."""
    with closing(Ledger(folder.ledger)) as ledger:
        if damage := ledger.damage():
            raise LocalError(f"the ledger of the copy is damaged ({damage[0]}): take another back-up")
        latest = _latest(ledger)
        _check_policy(folder, ledger, latest)
        ledger.lose_node()
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(ledger.newest_ms() / 1000))
        if published is None or published == latest:
            ledger.add_event(now_ms, "run", f"restored from a copy of {when}, policy {latest}; nothing was lost")
            return latest, 0
        if published < latest:
            raise UsageError(
                f"--published {published}: the copy itself has policy {latest}; give the highest version anybody saw"
            )
        following = published + 1
        if following >= LAST_VERSION:
            raise UsageError(
                f"--published {published}: a run has no policies above {LAST_VERSION}, so this one could not go on; "
                "begin a new run from its policy: `rltrainer init RUN --policy FOLDER`"
            )
        _renumber(folder, latest, following)
        ledger.pass_over(following, now_ms)
        ledger.add_event(
            now_ms,
            "run",
            f"restored from a copy of {when}: policies {latest + 1} to {published} are lost, and the next "
            f"{NUMBERS_PASSED_OVER:,} numbers of receipts and verdicts are not used; policy {latest} goes on as "
            f"{following}",
        )
        return following, published - latest


def _check_policy(folder: RunFolder, ledger: Ledger, version: int) -> None:
    found = ledger.policy(version)
    assert found is not None
    if policy_root(folder.policy(version)) != found[1]:
        raise LocalError(f"policy {version} of the copy is not what the run published: take another back-up")


def _renumber(folder: RunFolder, version: int, following: int) -> None:
    """The same policy and learner's state under another number."""
    from trainer.checkpoint import StepRecord, load_record

    # A step that the ledger does not know, of a folder that was copied in the middle of one, counts no more.
    shutil.rmtree(folder.step(version + 1), ignore_errors=True)
    shutil.rmtree(folder.policy(version + 1), ignore_errors=True)
    _copy_entry(folder.policy(version), folder.policy(following))
    if not folder.step(version).exists():
        return
    _copy_entry(folder.step(version), folder.step(following))
    record = load_record(folder, version)
    renumbered = StepRecord(replace(record.row, version=following), record.root, (), record.optimiser_steps)
    try:
        (folder.step(following) / "step.json").write_text(renumbered.to_json(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder.step(following)} cannot be written: {cause(error)}") from None
