"""Files that a command writes because a person named them: looked at before the work, written whole or not at all,
and what is said when they cannot be; and words of strangers, made fit for a terminal.

Not here: what a node (node/store.py) and a run (trainer/) keep for themselves.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from protocol.errors import RLCommonsError, StorageError, UsageError

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Another path would do.
_CHOSEN: Final = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
        errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY, errno.ENXIO, errno.EINVAL,
    }
)  # fmt: skip


def printable(text: str) -> str:
    """`text` on one line, with all that is not printable escaped: what a stranger wrote cannot drive a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def cause(error: Exception) -> str:
    """What went wrong, for people: of an OSError the system's words without its number, and never "None"."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        why = str(error.args[0][0][2])  # of a folder that was copied: a row for each file that was not
        return why.partition("] ")[2] or why
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__


def unwritable(what: str, path: Path, error: OSError) -> RLCommonsError:
    """The error to raise: UsageError where another path would do, StorageError where this machine failed."""
    named = error.filename2 or error.filename  # of a copy, the file that could not be written
    below = f" ({named})" if named is not None and os.fspath(path) != str(named) else ""
    told = f"{what} cannot be written to {path}: {cause(error)}{below}"
    if error.errno in FULL:
        return StorageError(f"{told}: make room there or choose another place, and run it again")
    if error.errno in _CHOSEN:
        return UsageError(f"{told}: choose another place")
    return StorageError(f"{told}: look at that disk, or choose another place")


def check_target(what: str, path: Path) -> None:
    """Before the work whose result it is: raises UsageError where `path` cannot become a file of ours."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        _check_place(what, path)
        return
    except OSError as error:
        raise unwritable(what, path, error) from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder: name the file that {what} is to be written to")
    if stat.S_ISREG(mode):
        _check_place(what, path)
    elif not os.access(path, os.W_OK):
        raise UsageError(f"{what} cannot be written to {path}: you may not write there: choose another place")


def _check_place(what: str, path: Path) -> None:
    told, place = f"{what} cannot be written to {path}", path.parent
    if not place.is_dir():
        raise UsageError(f"{told}: there is no folder {place}: make it, or choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{told}: you may not write in {place}: choose another place")


def check_apart(outputs: Sequence[tuple[str, Path]]) -> None:
    """Of a command that writes several files, (what, path) each: raises UsageError where two of them would be one,
    however they are spelled, and the second would take the place of the first."""
    known: dict[tuple[object, ...], tuple[str, Path]] = {}
    for what, path in outputs:
        other = known.setdefault(_identified(path), (what, path))
        if other != (what, path):
            same = "" if other[1] == path else f", which is {path} too"
            raise UsageError(f"{other[0]} and {what} cannot both be written to {other[1]}{same}: name a file for each")


def _identified(path: Path) -> tuple[object, ...]:
    """Equal for paths of one file, through links also before it is there."""
    real = Path(os.path.realpath(path))
    try:
        found = real.stat()
        return found.st_dev, found.st_ino
    except OSError:
        pass
    try:
        place = real.parent.stat()
        return place.st_dev, place.st_ino, real.name
    except OSError:
        return (real,)


def write_whole(what: str, path: Path, data: bytes) -> None:
    """Raises UsageError or StorageError, which say what to do; then nothing of it is there, and what was stays."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe: nothing can stand beside it and take its name
            path.write_bytes(data)
        else:
            replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise unwritable(what, path, error) from None


def replace(path: Path, data: bytes) -> None:
    """Whole or not at all, as a reader sees it. Raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
