"""rlverify as scripts meet it: exit codes that say no more than was found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from protocol import codec


def test_a_reader_that_goes_away_is_no_verdict(long_rollout, tmp_path: Path) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(codec.encode(long_rollout.file()))
    process = subprocess.Popen(
        [sys.executable, "-m", "verify.cli", "inspect", str(path), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(60), errors) == (141, "")
