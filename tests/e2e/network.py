"""The processes of one run on loopback, for the end-to-end suites: a trainer, honest nodes, and ones that cheat, are
killed or have a fault of their own.

Not here: what a test asserts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from protocol.identity import load_identity
from trainer.ledger import Ledger
from trainer.rundir import RunFolder

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}

Process = subprocess.Popen[bytes]


def command(module: str, *words: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def call(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(module, *words), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


class Network:
    """The processes of one run; every one that was started is ended, by its pid."""

    def __init__(self, folder: Path, *, init: Sequence[object] = (), **settings: object) -> None:
        """`init`: more words for `rltrainer init`."""
        self.folder = folder
        self.run = RunFolder(folder / "run")
        self._stack = ExitStack()
        table = {"listen": "/ip4/127.0.0.1/tcp/0", "page_port": 0, **settings}
        words = [word for name, value in table.items() for word in ("--set", f"{name}={value}")]
        made = call("trainer.cli", "init", self.run.path, *init, *words)
        assert made.returncode == 0, made.stderr
        self.ledger = Ledger(self.run.ledger, read_only=True)

    def start(self, name: str, words: list[str], *, stdin: Any = subprocess.DEVNULL, stdout: Any = None) -> Process:
        """A process whose words are kept under this name, unless they go elsewhere."""
        log = self._stack.enter_context(self._log(name).open("ab"))
        process = subprocess.Popen(
            words, cwd=ROOT, env=ENVIRONMENT, stdin=stdin, stdout=stdout or log, stderr=subprocess.STDOUT
        )
        self._stack.callback(end, process)
        return process

    def serve(self, *more: object) -> Process:
        process = self._serve(command("trainer.cli", "serve", self.run.path, "--json", *more))
        assert process.poll() is None, self.log("serve")
        return process

    def serve_until(self, point: str) -> Process:
        """A trainer that is killed (-9) at this point of a learner's step."""
        return self._serve([sys.executable, str(HERE / "dying_trainer.py"), point, str(self.run.path)])

    def _serve(self, words: list[str]) -> Process:
        self.run.address.unlink(missing_ok=True)
        process = self.start("serve", words)
        wait_until(lambda: self.run.address.exists() or process.poll() is not None, 240, "the gateway listens")
        return process

    @property
    def address(self) -> str:
        return self.run.address.read_text().strip()

    def join(self, name: str, *words: object) -> Process:
        """An honest node with the home of this name."""
        return self.start(name, [*self.words_to_join(name), *map(str, words)])

    def words_to_join(self, name: str) -> list[str]:
        return command("node.cli", "join", self.address, "--cpu", "--home", self.home(name))

    def join_cheater(self) -> Process:
        return self._script("cheating_node.py", "cheater")

    def join_faulty(self, name: str, fault: str) -> Process:
        """A node whose machine has a fault: tests/e2e/faulty_node.py lists them."""
        return self._script("faulty_node.py", name, fault)

    def _script(self, script: str, name: str, *words: str) -> Process:
        return self.start(name, [sys.executable, str(HERE / script), self.address, str(self.home(name)), *words])

    def home(self, name: str) -> Path:
        return self.folder / name

    def store(self, name: str) -> Path:
        """What the node of this name holds of the run."""
        return next((self.home(name) / "runs").iterdir())

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """What a node that joined with --json said of one kind."""
        lines = [line for line in self._log(name).read_text(errors="replace").splitlines() if line.startswith("{")]
        return [event for event in map(_parsed, lines) if event.get("event") == kind]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")[-4000:]

    def nodes(self) -> list[dict[str, Any]]:
        return self.ledger.view("SELECT * FROM nodes")

    def node(self, name: str) -> dict[str, Any]:
        """What the ledger says of the node with the home of this name; empty before its first hello."""
        key = self.home(name) / "key"
        node = load_identity(key).node if key.exists() else b""
        return next(iter(self.ledger.view("SELECT * FROM nodes WHERE node = ?", (node,))), {})

    def versions(self) -> int:
        return len(self.ledger.steps())

    def close(self) -> None:
        self._stack.close()
        self.ledger.close()


def end(process: Process) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _parsed(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:  # a process that was killed in the middle of a line
        return {}
    return found
