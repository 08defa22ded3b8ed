"""How a command ends: one code for each way, the same in all three."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable

import pytest

from protocol.command import BROKEN_PIPE, FAULT, INTERRUPTED, carry_out
from protocol.errors import RLCommonsError, StorageError, UsageError


def ending(error: BaseException | None) -> tuple[int, list[RLCommonsError]]:
    """The code, and what was said to have failed."""
    said: list[RLCommonsError] = []

    def command() -> int:
        if error is not None:
            raise error
        return 7

    def failed(told: RLCommonsError) -> int:
        said.append(told)
        return 2

    return carry_out("rlsomething", command, failed), said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 7),
        (UsageError("no"), 2),
        (KeyboardInterrupt(), INTERRUPTED),
        (BrokenPipeError(), BROKEN_PIPE),
        (SystemExit(1), BROKEN_PIPE),
        (SystemExit(0), FAULT),
    ],
)
def test_every_ending_has_its_code(error: BaseException | None, code: int) -> None:
    assert ending(error)[0] == code


def test_output_that_a_disk_has_no_room_for_is_no_bug_and_a_file_s_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, (said,) = ending(OSError(errno.ENOSPC, "No space left on device"))
    assert code == 2 and isinstance(said, StorageError) and "the output cannot be written: No space" in str(said)
    assert ending(OSError(errno.ENOSPC, "No space left on device", "some/file")) == (FAULT, [])
    assert "this is a bug of rlsomething" in capsys.readouterr().err


def test_a_place_that_cannot_be_reached_is_no_bug() -> None:
    code, (said,) = ending(PermissionError(errno.EACCES, "Permission denied", "/root/run"))
    assert code == 2 and isinstance(said, UsageError)
    assert str(said) == "/root/run cannot be reached: Permission denied: name another place, or look who may enter it"


def test_a_bug_is_shown_whole_and_looks_like_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(ZeroDivisionError("x")) == (FAULT, [])
    told = capsys.readouterr().err
    assert "Traceback" in told and "please report the lines above" in told


def program(body: str) -> list[str]:
    text = f"import sys\nfrom protocol.command import carry_out\ndef work():\n    {body}\n    return 0\n"
    return [
        sys.executable,
        "-c",
        text + "sys.exit(carry_out('x', work, lambda error: print(error, file=sys.stderr) or 3))",
    ]


def close_at_once(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    ("out", "act", "code", "told"),
    [
        (subprocess.PIPE, close_at_once, 141, b""),
        ("/dev/full", lambda process: None, 3, b"the output cannot be written: No space left on device: make room"),
    ],
)
def test_a_process_whose_output_fails_says_so_once(
    out: int | str, act: Callable[[subprocess.Popen[bytes]], None], code: int, told: bytes
) -> None:
    where = open(out, "wb") if isinstance(out, str) else out  # noqa: SIM115
    process = subprocess.Popen(
        program("sys.stdin.read(); print('x' * 100_000)"),
        stdin=subprocess.PIPE, stdout=where, stderr=subprocess.PIPE,
    )  # fmt: skip
    act(process)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == code and errors.startswith(told) and errors.count(b"\n") <= 1, errors
    if isinstance(where, int):
        return
    where.close()


def test_output_that_was_never_open_is_done_without() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', *program("print('x')")], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
