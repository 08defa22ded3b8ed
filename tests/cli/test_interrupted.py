"""Ctrl-C and a reader that goes away, in the middle of what takes long: the documented code, no traceback, nothing
left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol import codec
from protocol.identity import Identity
from protocol.log import EpochLog
from protocol.run import RunAddress
from protocol.verdict import Receipt
from tests.verify import small_log

ROOT = Path(__file__).parents[2]
NOBODY = RunAddress("/ip4/127.0.0.1/tcp/9", Identity(b"\1" * 32).node, b"\2" * 32)


def start(folder: Path, module: str, *words: object, errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "torch")  # which torch makes as it is imported
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        preexec_fn=heed_interrupts,
    )  # fmt: skip


def heed_interrupts() -> None:
    """As in a terminal: what a script starts in the background inherits SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where a command may put what it needs for a while."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def test_controls_that_are_interrupted_imply_nothing_and_leave_nothing(scratch: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    process = start(scratch, "verify.cli", "controls", "--policy", small_log.POLICY, "--html", page)
    assert process.stderr is not None
    assert "drawing" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err, err
    assert not page.exists() and list(scratch.iterdir()) == []


@contextmanager
def stopping_at(folder: Path, name: str) -> Iterator[tuple[str, threading.Event]]:
    """A web server of a folder that never answers for one file; the event says that it was asked for."""
    asked, ended = threading.Event(), threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            if self.path.endswith(name):
                asked.set()
                ended.wait(60)
                return
            super().do_GET()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            ended.set()
            server.shutdown()
            thread.join()


def test_an_audit_that_is_interrupted_is_no_verdict_and_leaves_nothing(scratch: Path, tmp_path: Path) -> None:
    log = small_log.make().write(tmp_path / "log", traces=True)
    with stopping_at(log, "epochs/000001.msgpack") as (url, asked):
        process = start(scratch, "verify.cli", "audit", url, "--sample", "1")
        assert asked.wait(60), "the second epoch was never asked for"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    where = "1 of 3 epochs done"
    assert (process.returncode, out) == (130, "")
    assert err == f"rlverify: interrupted: {where}: no verdict on this log\n", "no line of progress where nobody looks"
    assert list(scratch.iterdir()) == [], "the policy that was fetched for the first epoch"


def test_an_audit_shows_on_a_terminal_how_far_it_is_and_says_where_it_stopped(scratch: Path, tmp_path: Path) -> None:
    log = small_log.make().write(tmp_path / "log", traces=True)
    slow = sorted(traces_of(log, 1))[0]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    with stopping_at(log, f"traces/{slow}.msgpack") as (url, asked):
        process = start(scratch, "verify.cli", "audit", url, "--sample", "1", "--json", errors=theirs)
        os.close(theirs)
        assert asked.wait(60)
        seen = read_until(ours, r"1 of 3 epochs done; epoch 1: \d+ of \d+ traces replayed, 0 of 1 recomputed by the")
        process.send_signal(signal.SIGINT)
        seen += read_until(ours, r"interrupted: 1 of 3 epochs done; epoch 1: \d+ of \d+ traces replayed")
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, ""), seen
    os.close(ours)
    assert "Traceback" not in seen


def traces_of(log: Path, version: int) -> set[str]:
    epoch = codec.decode(EpochLog, (log / "epochs" / f"{version:06d}.msgpack").read_bytes())
    return {codec.decode(Receipt, each.receipt.payload).trace_digest.hex() for each in epoch.submissions}


def read_until(terminal: int, pattern: str) -> str:
    """What is written to a terminal up to this; pytest's own limit ends a wait in vain."""
    seen = ""
    while not re.search(pattern, seen):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


@pytest.mark.parametrize(("module", "words"), [("node.cli", ("doctor", NOBODY)), ("node.cli", ("join", NOBODY))])
def test_a_node_command_whose_reader_goes_away_ends_quietly(
    scratch: Path, tmp_path: Path, module: str, words: tuple[object, ...]
) -> None:
    process = start(scratch, module, *words, "--home", tmp_path / "home")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (141, "")


def test_a_node_command_that_is_interrupted_ends_quietly(scratch: Path, tmp_path: Path) -> None:
    process = start(scratch, "node.cli", "doctor", NOBODY, "--home", tmp_path / "home")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 1) and err == "", err  # it may have ended meanwhile


_STOP_AT = """
import os, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ.get("STOP_AT"):
            os.write(2, b"here\\n")
            while True:
                sys.stdin.read(1)
sys.meta_path.insert(0, Finder)
"""
_RUN = ("serve", "RUN")
_MOMENTS = [
    ("trainer.cli", "argparse", _RUN),
    ("trainer.cli", "protocol.command", _RUN),
    ("trainer.cli", "protocol.errors", _RUN),
    ("trainer.cli", "trainer.serve", _RUN),
    ("node.cli", "argparse", ("join", NOBODY)),
    ("node.cli", "protocol.errors", ("join", NOBODY)),
    ("node.cli", "protocol.command", ("join", NOBODY)),
    ("node.cli", "trio", ("join", NOBODY)),
    ("verify.cli", "argparse", ("check", "trace.msgpack", "--policy", "folder")),
    ("verify.cli", "protocol.command", ("check", "trace.msgpack", "--policy", "folder")),
    ("verify.cli", "torch", ("controls", "--policy", small_log.POLICY)),
    ("verify.cli", "transformers", ("controls", "--policy", small_log.POLICY)),
    ("run-demo", "argparse", ()),
    ("run-demo", "trainer.ledger", ()),
]


@pytest.mark.parametrize(("program", "module", "words"), _MOMENTS, ids=[f"{each[0]}-{each[1]}" for each in _MOMENTS])
def test_a_command_that_is_interrupted_as_python_loads_it_ends_quietly(
    tmp_path: Path, program: str, module: str, words: tuple[object, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_STOP_AT)
    called = [ROOT / "scripts" / "run-demo"] if program == "run-demo" else ["-m", program]
    home = ["--home", tmp_path / "home"] if program == "node.cli" else []
    process = subprocess.Popen(
        [sys.executable, *map(str, (*called, *words, *home))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "STOP_AT": module},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


_LOST = """
import sys, time
from protocol.command import carry_out
class Cleared:
    def __del__(self):
        print("here", flush=True)
        sys.stdin.read()
def work():
    cleared = Cleared()
    del cleared
    while True:
        time.sleep(60)
sys.exit(carry_out("program", work, lambda error: 3))
"""


def test_an_interrupt_that_python_loses_is_raised_again() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LOST], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


_DEMO = """
import runpy, subprocess, sys
child = runpy.run_path(sys.argv[1])["child"]
print(child([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_what_the_demo_started_ends_with_it_when_it_is_killed() -> None:
    demo = subprocess.Popen(
        [sys.executable, "-c", _DEMO, ROOT / "scripts" / "run-demo"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert demo.stdout is not None and demo.stdin is not None
    with demo.stdout, demo.stdin:
        said = {demo.stdout.readline().strip(), demo.stdout.readline().strip()}
        child = psutil.Process(int((said - {"here"}).pop()))
        assert child.is_running()
        demo.kill()
        demo.wait()
        assert psutil.wait_procs([child], timeout=30)[1] == []
