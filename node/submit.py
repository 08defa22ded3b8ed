"""The outbox on its way: every finished trace is sent until the trainer has signed for it or refused it.

Submission is idempotent by the trace's digest, so after any doubt it is sent again. Not here: the files
(store.py), reconnecting (session.py).
"""

from __future__ import annotations

from typing import Any

import trio

from node.asking import FATAL, Asker
from node.config import NodeConfig
from node.report import Event, Level, Report, Status
from node.store import RunStore, Unsent
from node.verdicts import Verdicts, summary
from node.weights import keep_trying
from node.worker import Terms, Worker
from protocol import messages
from protocol.envelope import Signed, unseal
from protocol.errors import Code, DecodeError, Refused, RemoteError, StorageError
from protocol.verdict import Outcome, Receipt


class Submitter:
    """Sends what lies in the outbox, several at once."""

    def __init__(
        self,
        terms: Terms,
        config: NodeConfig,
        store: RunStore,
        worker: Worker,
        verdicts: Verdicts,
        report: Report,
        status: Status,
    ) -> None:
        self._terms = terms
        self._at_once = config.submits_in_flight
        self._store = store
        self._worker = worker
        self._verdicts = verdicts
        self._report = report
        self._status = status

    async def run(self, asker: Asker) -> None:
        """For as long as the session holds. Raises NetError, or RemoteError when the trainer's answer is none."""
        sending: set[bytes] = set()
        places = trio.Semaphore(self._at_once)

        async def send(unsent: Unsent) -> None:
            try:
                await self._submit(asker, unsent)
            finally:
                sending.discard(unsent.digest)
                places.release()

        async with trio.open_nursery() as nursery:
            while True:
                news = self._worker.has_news
                for unsent in [each for digest, each in self._store.unsent.items() if digest not in sending]:
                    await places.acquire()
                    sending.add(unsent.digest)
                    nursery.start_soon(send, unsent)
                await news.wait()

    async def _submit(self, asker: Asker, unsent: Unsent) -> None:
        try:
            signed = await trio.to_thread.run_sync(self._store.read_trace, unsent.digest)
            reply = await asker.patiently(
                messages.Submit(signed, unsent.timing), messages.Submitted, "submitting a trace"
            )
        except Refused as error:
            if error.code in FATAL or error.code == Code.UNEXPECTED_MESSAGE:
                raise
            await self._refused(unsent, f"{error.code}: {error}")
        except (StorageError, DecodeError) as error:
            await self._refused(unsent, f"it cannot be read any more: {error}")
        else:
            await self._answered(unsent, reply)
        self._worker.settled(unsent.lease_id, unsent.slot)

    async def _answered(self, unsent: Unsent, reply: messages.Submitted) -> None:
        verdict = None if reply.verdict is None else self._verdicts.open(reply.verdict)
        if verdict is not None and verdict.trace_digest != unsent.digest:
            raise RemoteError(Code.MALFORMED, "the trainer answered with the verdict on another trace")
        if reply.receipt is not None:
            self._check_receipt(reply.receipt, unsent)
            await keep_trying(self._report, "the receipts' log", self._store.settle, unsent.digest, reply.receipt)
            self._status.traces_received += 1
            self._say("trace_received", "the trainer has a trace", Level.DETAIL, trace=unsent.digest.hex())
        elif verdict is not None and verdict.outcome == Outcome.REFUSED:
            await self._refused(unsent, f"{verdict.reason}: {summary(verdict)['detail']}")
        else:
            raise RemoteError(Code.MALFORMED, "the trainer answered a trace with neither receipt nor refusal")
        if verdict is not None:
            self._verdicts.count(verdict)

    def _check_receipt(self, signed: Signed, unsent: Unsent) -> None:
        """SPEC 8.7: a receipt names the digest, lease, slot and node of the trace it is for."""
        receipt = unseal(Receipt, signed, signer=self._terms.trainer)
        named = (receipt.run, receipt.trace_digest, receipt.lease_id, receipt.slot, receipt.node)
        if named != (self._terms.run, unsent.digest, unsent.lease_id, unsent.slot, self._terms.identity.node):
            raise RemoteError(Code.MALFORMED, "the trainer's receipt is not for the trace that was sent")

    async def _refused(self, unsent: Unsent, why: str) -> None:
        """The trainer will never take this trace: keep it aside, go on."""
        await keep_trying(self._report, "a refused trace", self._store.refuse, unsent.digest)
        text = f"the trainer refused a trace on the spot, {why} (kept in {self._store.folder / 'refused'})"
        self._say("trace_refused", text, Level.WARNING, trace=unsent.digest.hex())

    def _say(self, name: str, text: str, level: Level, **values: Any) -> None:
        self._report(Event(name, text, level, values))
