"""Parts of the trainer that are killed (-9) at a named write: `python -m tests.trainer.dying_part`, told what to do by
lines of JSON on stdin, each answered by one on stdout.

    {"do": "start", "part": "gateway", "run": …, "point": …, "occurrence": 1, "note": …}    → {"process": …}
    {"do": "wait"}                    until it has ended                                    → {"ended": -9}
    {"do": "poll"}                    whether it has                                        → {"ended": null}
    {"do": "end"}                     as its supervisor would                               → {"ended": 0}

One process that forks a child a kill, so that the imports are paid for once. What a child is about to write below the
run's folder is seen through the interpreter's audit events and os.fsync, what it does to the ledger through SQLite's
trace: the code that writes knows nothing of it. A child with "note" is not killed: it lists its writes there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.ledger import Ledger
from trainer.rundir import open_run

Reached = Callable[[str], None]
_CHANGES = re.compile(r"\s*(?:INSERT(?: OR \w+)? INTO|UPDATE|DELETE FROM) (\w+)")


class Statements:
    """Names what a connection does to the ledger: each change, each commit by what it commits, and what comes next."""

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._tables: list[str] = []
        self._committed = ""

    def __call__(self, statement: str) -> None:
        if self._committed:
            done, self._committed = self._committed, ""
            self._reached(f"after commit of {done}")
        if change := _CHANGES.match(statement):
            self._reached(f"change of {change[1]}")
            self._tables.append(change[1])
        elif statement.startswith(("BEGIN", "ROLLBACK")):
            self._tables.clear()
        elif statement.startswith("COMMIT") and self._tables:
            what = ", ".join(dict.fromkeys(self._tables))
            self._tables.clear()
            self._reached(f"commit of {what}")
            self._committed = what


def watch(run: Path, reached: Reached) -> None:
    """`reached` is called before each write of this process to the run, for as long as it lives."""
    connect = Ledger._connect

    def traced(path: Path, read_only: bool) -> Any:
        connection = connect(path, read_only)
        if not read_only:
            connection.set_trace_callback(Statements(reached))
        return connection

    Ledger._connect = staticmethod(traced)  # type: ignore[method-assign]
    fsync, begins = os.fsync, f"{run}{os.sep}"

    def tell(what: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and str(path).startswith(begins):
            place = re.sub(r"\d{6,}", "N", re.sub(r"[0-9a-f]{32,}", "DIGEST", str(path)[len(begins) :]))
            reached(f"{what} {place}")

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            tell("open", arguments[0])
        elif event == "os.rename":
            tell("rename", arguments[1])
        elif event in ("os.mkdir", "os.remove", "shutil.rmtree", "os.truncate"):
            tell(event.rpartition(".")[2], arguments[0])

    def seen_fsync(handle: int) -> None:
        tell("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    sys.addaudithook(see)
    os.fsync = seen_fsync  # type: ignore[assignment]


def note_into(path: Path) -> Reached:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda name: void(os.write(handle, f"{name}\n".encode()))


def void(_: object) -> None:
    pass


def die_at(point: str, occurrence: int) -> Reached:
    seen: Counter[str] = Counter()

    def reached(name: str) -> None:
        seen[name] += 1
        if name == point and seen[name] == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


# --- what the parts do ---


def learn(run: Path) -> int:
    """Two steps."""
    from trainer.learner import Learner

    opened = open_run(run)
    learner = Learner(opened, Ledger(opened.folder.ledger))
    while learner.version < 2:
        learner.turn()
    return 0


def audit(run: Path) -> int:
    """All that waits."""
    from trainer.audit import Auditor

    opened = open_run(run)
    auditor = Auditor(opened, Ledger(opened.folder.ledger), "auditor-0")
    while auditor.turn():
        pass
    return 0


def answer(run: Path) -> int:
    """Until its stdin ends."""
    from trainer import gateway

    sys.argv = ["gateway", str(run)]
    return gateway.main()


def record(run: Path) -> int:
    """What the ledger has."""
    from trainer.records import JsonLines, TensorBoard, bring_up_to_date

    opened = open_run(run)
    ledger = Ledger(opened.folder.ledger, read_only=True)
    bring_up_to_date(ledger, JsonLines(opened.folder.metrics))
    bring_up_to_date(ledger, TensorBoard(opened.folder.tensorboard))
    return 0


PARTS = {"learner": learn, "auditor": audit, "gateway": answer, "records": record}


class Child:
    """A part in a process of its own, whose stdin this process holds."""

    def __init__(self, part: str, run: Path, reached: Reached) -> None:
        read, self._stdin = os.pipe()
        self.ended: int | None = None
        self.process = os.fork()
        if self.process:
            os.close(read)
            return
        try:
            os.dup2(read, 0)
            os.dup2(2, 1)  # stdout is the conversation's
            os.close(self._stdin)
            watch(run, reached)
            os._exit(PARTS[part](run))
        except BaseException:
            traceback.print_exc()
            os._exit(70)

    def look(self, flags: int = 0) -> int | None:
        if self.ended is None:
            process, status = os.waitpid(self.process, flags)
            if process:
                self.ended = os.waitstatus_to_exitcode(status)
                os.close(self._stdin)
        return self.ended

    def end(self) -> int | None:
        if self.look(os.WNOHANG) is None:
            stdin, self._stdin = self._stdin, os.open(os.devnull, os.O_RDONLY)
            os.close(stdin)
        return self.look()


def main() -> None:
    import torch

    import trainer.audit
    import trainer.gateway
    import trainer.learner  # noqa: F401  imports, once for all children
    from protocol.net import p2p  # noqa: F401
    from verify.model import PolicyModel

    torch.set_num_threads(1)
    child: Child | None = None
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "warm":  # transformers imports a model's code when the first one is loaded
            PolicyModel(open_run(Path(told["run"])).folder.policy(0), "float32", "cpu")
            answered: dict[str, Any] = {}
        elif told["do"] == "start":
            note = told.get("note")
            reached = note_into(Path(note)) if note else die_at(told.get("point", ""), told.get("occurrence", 0))
            child = Child(told["part"], Path(told["run"]), reached)
            answered = {"process": child.process}
        else:
            assert child is not None
            answered = {
                "ended": {"wait": child.look, "poll": partial(child.look, os.WNOHANG), "end": child.end}[told["do"]]()
            }
        print(json.dumps(answered), flush=True)
    if child is not None and child.look(os.WNOHANG) is None:
        os.kill(child.process, signal.SIGKILL)
        child.look()


if __name__ == "__main__":
    main()
