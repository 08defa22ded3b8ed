"""Files that a person names: nothing half there, and a message that says what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from protocol.errors import StorageError, UsageError
from protocol.outputs import cause, check_target, printable, unwritable, write_whole

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def test_a_file_is_replaced_whole_and_through_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for data in (b"first", b"second"):
        write_whole("the page", link, data)
        assert path.read_bytes() == data and link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


def test_a_full_disk_is_this_machine_s_fault_and_leaves_what_was(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left on device: make room there") as told:
        write_whole("the page", path, b"after")
    assert "None" not in str(told.value)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_a_device_that_is_full_is_no_file_to_replace() -> None:
    with pytest.raises(StorageError, match="the page cannot be written to /dev/full: No space left on device: make"):
        write_whole("the page", Path("/dev/full"), b"data")
    assert Path("/dev/full").is_char_device()
    write_whole("the page", Path("/dev/null"), b"data")


@pytest.mark.parametrize("attempt", [check_target, lambda what, path: write_whole(what, path, b"data")])
def test_a_place_where_no_file_can_be_is_the_person_s_to_change(tmp_path: Path, attempt) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below", tmp_path / "nowhere" / "file", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=r"choose another place|name the file"):
            attempt("the page", path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file"]


@not_root
def test_a_folder_that_one_may_not_write_in_is_said_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="you may not write in"):
        check_target("the page", tmp_path / "file")


def test_what_is_said_of_an_error_has_no_number_and_is_never_none() -> None:
    assert cause(OSError(errno.ENOENT, "No such file or directory", "x")) == "No such file or directory"
    assert cause(OSError("timed out")) == "timed out"
    assert cause(OSError()) == "OSError"
    told = str(
        unwritable("the log", Path("log"), OSError(errno.EIO, "Input/output error", "log/epochs/000001.msgpack"))
    )
    assert told.startswith("the log cannot be written to log: Input/output error (log/epochs/000001.msgpack): look at")


def test_of_a_folder_that_could_not_be_copied_one_file_is_named() -> None:
    rows = [(f"from/{n}", f"to/{n}", f"[Errno 28] No space left on device: 'to/{n}'") for n in range(99)]
    assert cause(shutil.Error(rows)) == "No space left on device: 'to/0'"


def test_what_a_stranger_wrote_stays_on_its_line_and_drives_no_terminal() -> None:
    said = "\x1b[31mEVIL\x1b[0m\nsecond\rline\u202e \udcff\x9b"
    assert printable(said) == r"\x1b[31mEVIL\x1b[0m\nsecond\rline\u202e \udcff\x9b"
    assert printable("Läufe 走 'x' \\n …") == "Läufe 走 'x' \\n …"
