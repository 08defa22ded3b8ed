"""Asks the trainer to have a refused trace audited again, by another auditor (SPEC 8.8).

    runs/<run>/asked/DIGEST.ask      put there by `rlnode reaudit` while a node runs in this home
    runs/<run>/asked/DIGEST.answer   the trainer's answer, which the command takes away

Only one process may speak as a node at a time, so the running one asks. Not here: the verdict, which comes with the
others (verdicts.py).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from re import fullmatch
from typing import Final

import trio

from node.asking import FATAL, Asker
from node.failures import foremost
from node.report import Event, Level, Report
from node.store import lock_holder, write_whole
from node.weights import keep_trying
from protocol import messages
from protocol.errors import LocalError, Refused, UsageError
from protocol.identity import Identity
from protocol.run import RunAddress, open_genesis

_LOOK_SECONDS: Final = 0.5
_HANDED_SECONDS: Final = 60.0  # the running node looks at once, and asks again while the trainer is busy


@dataclass(frozen=True, slots=True)
class Answer:
    granted: bool
    text: str


def find_trace(run_folder: Path, prefix: str) -> bytes:
    """The digest of the trace with a verdict that begins with these hex digits. Raises UsageError."""
    if not fullmatch(r"[0-9a-fA-F]{1,64}", prefix):
        raise UsageError(
            f"{prefix[:80]!r} is no digest: give its first hex digits, as in {run_folder / 'verdicts.log'}"
        )
    found = {trace for trace in _judged(run_folder) if trace.startswith(prefix.lower())}
    if len(found) == 1:
        return bytes.fromhex(found.pop())
    log = run_folder / "verdicts.log"
    if found:
        raise UsageError(f"{len(found)} traces in {log} begin with {prefix}: give more digits")
    raise UsageError(f"no trace in {log} begins with {prefix}: only a trace with a verdict can be audited again")


def _judged(run_folder: Path) -> set[str]:
    traces = set()
    for path in (run_folder / "verdicts.log.1", run_folder / "verdicts.log"):
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as lines:
                traces |= {_trace_of(line) for line in lines}
    return traces


def _trace_of(line: str) -> str:
    try:
        return str(json.loads(line)["trace"])
    except (ValueError, KeyError, TypeError):
        return ""  # cut off by a kill


# --- with a node that runs ---


def hand_over(home: Path, run_folder: Path, digest: bytes, seconds: float = _HANDED_SECONDS) -> Answer:
    """Have the running node ask, and wait for the answer. Raises LocalError when it gives none."""
    folder = run_folder / "asked"
    folder.mkdir(exist_ok=True)
    question, answer = folder / f"{digest.hex()}.ask", folder / f"{digest.hex()}.answer"
    answer.unlink(missing_ok=True)
    write_whole(question, b"", "asking the running node", lasting=False)
    deadline = time.monotonic() + seconds
    try:
        while not answer.exists():
            if lock_holder(home) is None:
                raise LocalError(f"the node in {home} has ended meanwhile: give the command again")
            if time.monotonic() > deadline:
                raise LocalError(f"the node in {home} has no answer after {seconds:.0f} s: see rlnode status")
            time.sleep(_LOOK_SECONDS / 5)
        return Answer(**json.loads(answer.read_bytes()))
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


async def serve(run_folder: Path, asker: Asker, report: Report) -> None:
    """Ask what is handed over, for as long as the session holds."""
    while True:
        for question in sorted((run_folder / "asked").glob("*.ask")):
            if not fullmatch("[0-9a-f]{64}", question.stem):
                continue  # somebody else's file
            found = await _ask(asker, bytes.fromhex(question.stem))
            level = Level.INFO if found.granted else Level.WARNING
            report(Event("reaudit", found.text, level, {"trace": question.stem, "granted": found.granted}))
            data = json.dumps({"granted": found.granted, "text": found.text}).encode()
            await keep_trying(report, "an answer", write_whole, question.with_suffix(".answer"), data, "an answer")
            question.unlink(missing_ok=True)
        await trio.sleep(_LOOK_SECONDS)


async def _ask(asker: Asker, digest: bytes) -> Answer:
    try:
        reply = await asker.patiently(messages.AskAudit(digest), messages.AuditAsked, "asking for a re-audit")
    except Refused as error:
        if error.code in FATAL:
            raise
        return Answer(False, f"{error.code}: {error}")
    return Answer(reply.granted, reply.text)


# --- without one ---


def ask_alone(address: RunAddress, who: Identity, digest: bytes, report: Report) -> Answer:
    """Greet the trainer and ask. Raises NetError, or RemoteError when the trainer refuses this node."""
    with foremost():
        return trio.run(_ask_alone, address, who, digest, report)


async def _ask_alone(address: RunAddress, who: Identity, digest: bytes, report: Report) -> Answer:
    from node.visiting import visiting

    async with visiting(address, who, "cpu") as found:
        # SPEC 9.2: of the trainer it was told, and no other.
        open_genesis(found.welcome.genesis, run=address.run, trainer=address.trainer)
        return await _ask(Asker(found.session, report, Random()), digest)
