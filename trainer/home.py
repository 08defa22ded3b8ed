"""The home engine: a node of this machine's own, where `--placement` asks for one. It is `rlnode join`, as a child of
`rltrainer serve`, over loopback, with a key in the run's folder: nothing of a node is done a second time here.

    both         one more node beside the others
    colocated    it draws between the learner's steps, on the same device: they take turns (protocol/device_turns.py)

Why so: docs/decisions/0016. Not here: whom a person trusts (naming.py), starting and watching (serve.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from protocol.device_turns import LEARNER, POLL_SECONDS, Look, Turns
from protocol.errors import LocalError, UsageError
from protocol.identity import Identity, load_identity, save_identity
from trainer.config import TrainerConfig
from trainer.rundir import Run, RunFolder

NAME: Final = "home engine"
LIFE: Final = "home engine's process"
PLACES: Final = ("colocated", "both")  # of placement, those that have a home engine
FAILURES: Final = 3  # in a row, each soon after its start: then a run that has no other engine ends
_KEY_SECONDS: Final = 60.0  # for rlnode to take its key


def find_rlnode() -> str:
    """The command of this environment, else of the PATH. Raises UsageError."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("rlnode", path=places)
    if found is None:
        raise UsageError(
            f"the home engine is `rlnode join`, and there is no rlnode beside {sys.executable} or on the PATH: install "
            "this package there (pip install -e .), or serve with --placement disaggregated"
        )
    return found


def prepare(run: Run, rlnode: str, *, in_turns: bool) -> bytes | None:
    """Give the home engine its key, and a place to take turns in; its node. None without `rlnode`: there is none then,
    and nobody takes turns. Raises LocalError or UsageError."""
    _set_turns(run.folder, in_turns)
    if not rlnode:
        return None
    if not run.folder.home_key.exists():
        save_identity(Identity.generate(), run.folder.home_key)
    identity = load_identity(run.folder.home_key)
    if not run.folder.home.exists():
        _give_key(rlnode, run.folder)
    return identity.node


def _give_key(rlnode: str, folder: RunFolder) -> None:
    words = [rlnode, "key", "restore", str(folder.home_key), "--home", str(folder.home)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_KEY_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"the home engine could not be given its key: {error}") from None
    if done.returncode:
        raise LocalError(f"the home engine could not be given its key: {done.stderr.strip() or done.returncode}")


def _set_turns(folder: RunFolder, wanted: bool) -> None:
    if wanted:
        folder.turns.mkdir(exist_ok=True)
    else:
        shutil.rmtree(folder.turns, ignore_errors=True)


def words(run: Run, *, in_turns: bool) -> tuple[str, ...]:
    """Of `rlnode`, but for the address: that is known once the gateway listens."""
    config, folder = run.config, run.folder
    share = ("--share-device", str(folder.turns)) if in_turns else ()
    return (
        "join", "--home", str(folder.home), "--end-with-stdin", "--no-serve", "--dtype", config.dtype,
        *_device_words(config), *share,
    )  # fmt: skip


def _device_words(config: TrainerConfig) -> tuple[str, ...]:
    kind, _, number = config.device.partition(":")
    if kind != "cuda":
        return ("--cpu", "--threads", str(config.threads))
    cards = number or ",".join(map(str, range(config.learners)))  # each learner has the card of its own number
    return ("--gpu", cards, "--gpu-memory", str(config.home_gpu_memory))


# --- in turns ---


def in_turns(config: TrainerConfig) -> TrainerConfig:
    """As dispatch is to see it: no more is begun than the next step lacks (pacing.py), so that who draws is done when
    it is due. What luck leaves over is learned from by the one after."""
    return replace(config, staleness_target=0)


def as_dispatched(config: TrainerConfig, folder: RunFolder) -> TrainerConfig:
    """The settings that leases of this run follow, as it is or was served last."""
    return in_turns(config) if folder.turns.is_dir() else config


@contextmanager
def learners_turn(run: Run) -> Iterator[bool]:
    """The device is the learner's within; whether it had to be waited for. Where nobody else uses it that is at once.

    Raises LocalError where the engine does not give it up within stall_seconds.
    """
    if not run.folder.turns.is_dir():
        yield False
        return
    turns = Turns(run.folder.turns, LEARNER)
    try:
        waited = _wait(turns, run.config.stall_seconds)
        yield waited
    finally:
        turns.close()


def _wait(turns: Turns, seconds: float) -> bool:
    deadline, waited = time.monotonic() + seconds, False
    while not (turns.ask() and turns.take()):
        if time.monotonic() > deadline:
            raise LocalError(f"the home engine has not given the device up within {seconds:g} s: see its log")
        waited = True
        time.sleep(POLL_SECONDS)
    return waited


def turn_of(found: Look | None) -> int | None:
    """Since when the engine has the device, Unix ms; None: it has not."""
    return None if found is None or found.who in ("", LEARNER) else found.since_ms


def keeps_the_device(found: Look | None, busy: int) -> str:
    """What the engine that has the device owes: to give it up, or what its `busy` slots draw; "": nothing."""
    if found is None or turn_of(found) is None:
        return ""
    if found.asked:
        return "keeps the device although the learner asks for it"
    return f"has the device for {busy} slots and hands nothing in" if busy else ""


def has(found: Look | None, leased: int) -> str:
    """What is stuck with an engine that shows no sign of life, for people."""
    things = ["the device"] if turn_of(found) is not None else []
    things += [f"{leased} leased slot{'s' if leased > 1 else ''}"] if leased else []
    return f", and it has {' and '.join(things)}" if things else ""
