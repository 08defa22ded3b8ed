"""A part of a served run that hangs for good: it is started again, and when that does not help the run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.trainer.fabricate import make_run
from trainer import stall
from trainer.child import last_sign
from trainer.stall import MOST_RESTARTS

ROOT = Path(stall.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.crash
def test_a_gateway_that_hangs_is_started_again_and_at_last_ends_the_run(tmp_path: Path) -> None:
    """Stopped, as by a debugger or a dead disk: it neither ends nor answers."""
    run, ledger = make_run(tmp_path / "run", listen="/ip4/127.0.0.1/tcp/0", page_port=0, stall_seconds=8.0)
    ledger.close()
    words = [sys.executable, "-m", "trainer.cli", "serve", str(run.folder.path), "--json"]
    serve = subprocess.Popen(words, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True)
    assert serve.stdout is not None
    try:
        stopped: set[int] = set()
        said: list[str] = []
        for line in serve.stdout:
            found = json.loads(line)
            if found["kind"] != "state":
                said.append(found["text"])
            for process in gateways(serve.pid):
                if process.pid not in stopped and last_sign(run.folder.path, "gateway"):
                    os.kill(process.pid, signal.SIGSTOP)
                    stopped.add(process.pid)
        assert serve.wait(20) == 4
    finally:
        serve.kill()
        serve.wait()
        serve.stdout.close()
    cause = "no progress for 8 s (stall_seconds): its event loop shows no sign of life"
    restarts = [text for text in said if text.startswith(f"the gateway was ended: {cause}")]
    assert len(restarts) == MOST_RESTARTS and len(stopped) == MOST_RESTARTS + 1
    assert any(f"was started again {MOST_RESTARTS} times and still does nothing: {cause}" in text for text in said)
    assert not [process for process in map(psutil.Process, psutil.pids()) if process.pid in stopped]


def gateways(parent: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(parent).children()
        return [child for child in children if "trainer.gateway" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []
