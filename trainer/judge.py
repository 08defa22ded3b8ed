"""The thread of the gateway that decides about submissions: it takes what waits in the ledger, oldest first, and has
the clerk write the decisions down. What it has not decided when it is killed still waits at the next start.

Beside the clerk's thread, so that a slow environment delays verdicts and never a receipt. Not here: the decisions
(inbox.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from protocol.errors import StorageError
from trainer.child import now_ms
from trainer.clerk import Clerk
from trainer.inbox import Decision, Examiner, Inbox
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionRow, SubmissionState

_BATCH: Final = 64  # submissions decided before their verdicts are written
_LOOK_SECONDS: Final = 1.0  # also looked at without being woken
_END_SECONDS: Final = 2.0  # an environment that hangs does not hold up the end
_STORAGE_SECONDS: Final = 1.0  # between tries while the disk is full


class Judge:
    """`with Judge(…)`: runs until the block ends. `on_death` is called when it fails, which is a bug of ours."""

    def __init__(
        self,
        ledger: Ledger,
        examiner: Examiner,
        inbox: Inbox,
        clerk: Clerk,
        on_death: Callable[[BaseException], None],
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._ledger = ledger
        self._examiner = examiner
        self._inbox = inbox
        self._clerk = clerk
        self._on_death = on_death
        self._clock = clock
        self._work = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)

    def __enter__(self) -> Judge:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending = True
        self._work.set()
        self._thread.join(_END_SECONDS)

    def wake(self) -> None:
        """Something may wait."""
        self._work.set()

    def _run(self) -> None:
        try:
            while not self._ending:
                self._work.clear()
                if not self._turn():
                    self._work.wait(_LOOK_SECONDS)
        except BaseException as error:
            if not self._ending:
                self._on_death(error)

    def _turn(self) -> int:
        """Decide about one batch of each kind; how many.

        What audits found is written down before anything is drawn: a draw follows from the verdicts in the ledger.
        """
        examiner, waiting = self._examiner, self._ledger.submissions
        return (
            self._part(waiting(SubmissionState.AUDITED, _BATCH), examiner.conclude)
            + self._part(waiting(SubmissionState.RECEIVED, _BATCH), examiner.examine)
            + self._part(self._ledger.abandoned_audits(_BATCH), examiner.abandon)
        )

    def _part(self, rows: list[SubmissionRow], decide: Callable[[SubmissionRow], Decision]) -> int:
        if not rows:
            return 0
        self._examiner.begin()
        try:
            self._write([decide(row) for row in rows])
        except StorageError:
            time.sleep(_STORAGE_SECONDS)
        return len(rows)

    def _write(self, decisions: list[Decision]) -> None:
        at_ms = self._clock()
        written = [self._clerk.submit(partial(self._inbox.record, each, at_ms)) for each in decisions]
        for future in written:
            future.result()
