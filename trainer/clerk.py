"""The one thread of the gateway that writes the ledger.

It takes everything that waits, does it in one transaction, and answers all: one flush of the disk for many
submissions. A job that raises is undone alone; a full disk undoes and fails them all. Not here: what the jobs do.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import trio

from protocol.errors import LocalError, StorageError
from trainer.ledger import Ledger

T = TypeVar("T")

_MOST_AT_ONCE: Final = 256  # jobs in one transaction: bounds how long the first of them waits


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()
        self.value: Any = None
        self.error: BaseException | None = None

    def answer(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class Clerk:
    """`with Clerk(ledger) as clerk`: runs until the block ends; what was handed in before is done."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="clerk", daemon=True)
        self._end: BaseException | None = None

    def __enter__(self) -> Clerk:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._jobs.put(None)
        self._thread.join()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done inside a transaction; the future is answered once that is on disk.

        It raises what `work` raised, or StorageError when the transaction could not be written.
        """
        job = _Job(work)
        self._jobs.put(job)
        if not self._thread.is_alive():
            self._drain()
        return job.future

    async def do(self, work: Callable[[], T]) -> T:
        """As `submit`, for trio."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def wake(_: Future[T]) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        future = self.submit(work)
        future.add_done_callback(wake)
        await done.wait()
        return future.result()

    def _run(self) -> None:
        try:
            while jobs := self._waiting():
                self._commit(jobs)
                for job in jobs:
                    job.answer()
        finally:
            self._drain()

    def _waiting(self) -> list[_Job]:
        """All jobs that wait, at least one; empty when it is time to end."""
        jobs = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) == _MOST_AT_ONCE or self._jobs.empty():
                return jobs
            job = self._jobs.get()
        if jobs:
            self._jobs.put(None)
        return jobs

    def _commit(self, jobs: list[_Job]) -> None:
        try:
            with self._ledger.write():
                for job in jobs:
                    self._attempt(job)
        except StorageError as error:
            for job in jobs:
                job.error = error
        except BaseException as error:
            self._end = error
            for job in jobs:
                job.error = self._ended()
                job.answer()
            raise

    def _attempt(self, job: _Job) -> None:
        try:
            with self._ledger.part():
                job.value = job.work()
        except StorageError:
            raise
        except Exception as error:
            job.error = error

    def _drain(self) -> None:
        """Nothing waits for ever on a clerk that has ended."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.error = self._ended()
                job.answer()

    def _ended(self) -> LocalError:
        return LocalError(f"the ledger's writer has ended{f': {self._end!r}' if self._end else ''}")
