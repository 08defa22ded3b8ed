"""A run of the embedded policy with real processes on loopback, for benchmarks that watch the whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
START_SECONDS = 240


def start(log: Path, *words: object) -> subprocess.Popen[bytes]:
    """`python -m MODULE …` with its output in a file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The trainer's process and the address nodes join; `settings` of the run beside those of the embedded preset."""
    run = folder / "run"
    settings |= {"listen": "/ip4/127.0.0.1/tcp/0", "page_port": 0}
    chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words = [sys.executable, "-m", "trainer.cli", "init", str(run), *chosen]
    subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    with ExitStack() as stack:
        process = start(folder / "serve.log", "trainer.cli", "serve", run, "--json")
        stack.callback(stop, process)
        deadline = time.monotonic() + START_SECONDS
        while not (run / "address").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the trainer did not listen; see {folder / 'serve.log'}")
            time.sleep(0.1)
        yield process, (run / "address").read_text().strip()
