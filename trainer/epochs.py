"""When an epoch of the log may be closed, what it then holds, and its seal (SPEC 8.12).

Epochs close one after the other. A seal reveals the value its audits were drawn by, so it comes only once nothing
of the version can be handed in, judged or learned from any more. Not here: writing the log as files
(export_log.py), checking it (verify/run_audit.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

from protocol import codec
from protocol.envelope import Signed, seal
from protocol.errors import LocalError
from protocol.identity import Identity
from protocol.log import Draw, Epoch, EpochLog, LoggedVerdict, Submission, items_root
from trainer.audit_draw import AuditChain
from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.rundir import Run


def closable(ledger: Ledger, version: int, config: TrainerConfig) -> bool:
    """Whether nothing of this epoch can change any more; those before it must be closed."""
    latest = ledger.latest_signed()
    # SPEC 8.12: a newer version is out, and the learner can use nothing of this one.
    if latest is None or latest - version <= config.staleness_limit or version != ledger.sealed():
        return False
    found = ledger.policy(version)
    # SPEC 8.12: no lease of it is open, and nothing of it waits for a verdict.
    return found is not None and found[2] is not None and ledger.is_settled(version)


def epoch_log(ledger: Ledger, version: int) -> EpochLog | None:
    """An epoch as the ledger has it now, with its seal where it is closed; None before its manifest is signed."""
    found = ledger.policy(version)
    if found is None or found[2] is None:
        return None
    sealed = ledger.seal(version)
    return EpochLog(
        manifest=_opened(found[2]),
        calibrations=tuple(map(_opened, ledger.calibrations_named(version))),
        leases=tuple(map(_opened, ledger.leases_of(version))),
        submissions=tuple(_submissions(ledger, version)),
        verdicts=tuple(_verdicts(ledger, version)),
        epoch=None if sealed is None else _opened(sealed),
    )


def _submissions(ledger: Ledger, version: int) -> Iterator[Submission]:
    for receipt, seen, floor, rate, drawn, trusted in ledger.logged_submissions(version):
        yield Submission(_opened(receipt), None if seen is None else Draw(seen, floor, rate, bool(drawn), trusted))


def _verdicts(ledger: Ledger, version: int) -> Iterator[LoggedVerdict]:
    for number, signed in ledger.logged_verdicts(version):
        yield LoggedVerdict(number, _opened(signed))


def _root_and_size(ledger: Ledger, version: int, manifest: bytes) -> tuple[bytes, int]:
    """The root of an epoch's items, and how many calibrations are among them. One item is held at a time: an epoch
    has megabytes of them, and a long-lived process that holds them for a moment keeps some of that for ever."""
    calibrations = ledger.calibrations_named(version)
    items: Iterator[Signed | Submission | LoggedVerdict] = itertools.chain(
        map(_opened, [manifest, *calibrations]),
        map(_opened, ledger.leases_of(version)),
        _submissions(ledger, version),
        _verdicts(ledger, version),
    )
    return items_root(items), len(calibrations)


def _opened(signed: bytes) -> Signed:
    return codec.reopen(Signed, signed)


class Registrar:
    """Closes the epochs of a run. Of the gateway, which alone holds the key and the secret of the draws."""

    def __init__(self, run: Run, signer: Identity, chain: AuditChain) -> None:
        self._run = run
        self._signer = signer
        self._chain = chain

    def candidate(self, ledger: Ledger) -> int | None:
        """The epoch that can be closed now, if there is one."""
        version = ledger.sealed()
        return version if closable(ledger, version, self._run.config) else None

    def draft(self, version: int, closed_ms: int) -> Signed:
        """The seal of an epoch that can be closed. Reads all of it, over a connection of its own: not for the event
        loop. Not to be shown to anyone before `record` has taken it."""
        with closing(Ledger(self._run.folder.ledger, read_only=True)) as ledger, ledger.snapshot():
            found = ledger.policy(version)
            if found is None or found[2] is None:
                raise LocalError(f"policy version {version} has no signed manifest: its epoch cannot be closed")
            root, calibrations = _root_and_size(ledger, version, found[2])
            leases, submissions, verdicts = ledger.epoch_size(version)
            before = ledger.seal_before(version)
        return seal(
            self._signer,
            Epoch(
                run=self._run.run,
                version=version,
                root=root,
                calibrations=calibrations,
                leases=leases,
                submissions=submissions,
                verdicts=verdicts,
                audit_value=self._chain.value(version),
                previous=bytes(32) if before is None else _opened(before).digest,
                closed_ms=closed_ms,
            ),
        )

    def record(self, ledger: Ledger, signed: Signed) -> bool:
        """Close the epoch, unless something of it has moved since the draft was made; in the clerk's transaction."""
        epoch = codec.decode(Epoch, signed.payload)
        counted = (epoch.leases, epoch.submissions, epoch.verdicts)
        if not closable(ledger, epoch.version, self._run.config) or ledger.epoch_size(epoch.version) != counted:
            return False
        ledger.add_seal(epoch.version, codec.encode(signed))
        return True
