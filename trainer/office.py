"""What the gateway works with behind the network: the ledger's writer, the judge, the shelf of policies.

Not here: streams (gateway.py) and what a node may ask (visit.py).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from protocol import codec
from protocol.calibration import Calibration, check_calibration
from protocol.envelope import Signed, seal
from protocol.errors import LocalError, PolicyError
from protocol.identity import Identity
from protocol.policy import Manifest, describe
from trainer.audit_draw import AuditChain
from trainer.child import now_ms
from trainer.clerk import Clerk
from trainer.deltas import describe_deltas
from trainer.epochs import Registrar
from trainer.inbox import Examiner, Inbox, Notary
from trainer.judge import Judge
from trainer.leasing import Leasing
from trainer.ledger import Ledger
from trainer.ledger_rows import Published
from trainer.rundir import Run, load_run_identity, load_secrets
from trainer.shelf import SERVED, Shelf
from trainer.stock import Stock

STOCK_SECONDS: Final = 5.0  # nodes are answered without tasks after this
MANIFEST_DAYS: Final = 30  # a manifest is valid so long, and signed anew at half time


def software() -> str:
    return f"rlcommons {importlib.metadata.version('rlcommons')}"


@dataclass(frozen=True, slots=True)
class Office:
    """Everything behind the network: the ledger's writer, the judge, and who acts for them."""

    run: Run
    signer: Identity
    ledger: Ledger  # read-only, of trio's thread
    writer: Ledger  # of the clerk's thread: used inside its jobs alone
    shelf: Shelf
    clerk: Clerk
    judge: Judge
    inbox: Inbox
    leasing: Leasing
    registrar: Registrar
    failures: list[BaseException] = field(default_factory=list)
    clock: Callable[[], int] = now_ms  # Unix ms


@contextmanager
def open_office(run: Run, clock: Callable[[], int] = now_ms) -> Iterator[Office]:
    """Read the run, sign what is unsigned, and start the threads. Raises LocalError or UsageError."""
    signer = load_run_identity(run)
    secrets = load_secrets(run)
    chain = AuditChain(secrets.audit)
    if chain.anchor != run.genesis.audit_anchor:
        raise LocalError(f"{run.folder.secret} is not the secret of this run's genesis: restore the right one")
    path, shares = run.folder.ledger, run.genesis.environments
    shelf = Shelf(run.folder, max(SERVED, run.config.staleness_limit + 2))
    notary = Notary(run.run, signer, software(), clock)
    failures: list[BaseException] = []
    with (
        closing(Ledger(path)) as writer,
        closing(Ledger(path, read_only=True)) as reader,
        closing(Ledger(path, read_only=True)) as of_the_judge,
    ):
        writer.lose_node()
        fill_shelf(run, signer, writer, shelf, clock)
        sign_calibrations(signer, writer)
        stock = Stock(secrets.seeds, shares, writer.groups_made(), lambda: shelf.reading(shelf.latest).tokenizer)
        inbox = Inbox(writer, notary, run.config)
        leasing = Leasing(run, writer, signer, secrets.seeds, shelf, stock)
        examiner = Examiner(of_the_judge, notary, shelf, chain, run.config, shares)
        with (
            stock,
            Clerk(writer) as clerk,
            Judge(of_the_judge, examiner, inbox, clerk, failures.append, clock) as judge,
        ):
            stock.wait_ready(STOCK_SECONDS)
            registrar = Registrar(run, signer, chain)
            yield Office(run, signer, reader, writer, shelf, clerk, judge, inbox, leasing, registrar, failures, clock)
        writer.lose_node()


def fill_shelf(run: Run, signer: Identity, ledger: Ledger, shelf: Shelf, clock: Callable[[], int] = now_ms) -> None:
    """Put the newest signed policies that are on disk on the shelf, as many as it holds, after signing those that are
    not. A run may keep thousands: of the others a start sees the folder's name alone."""
    for version, root in ledger.unsigned_policies():
        if run.folder.policy(version).is_dir():
            signed = sign_manifest(run, signer, version, root, clock)
            ledger.set_manifest(version, codec.encode(signed), figures(codec.decode(Manifest, signed.payload)))
    newest: list[Signed] = []
    for version in reversed(run.folder.versions()):
        found = ledger.policy(version)
        if found is not None and found[2] is not None:
            newest.append(codec.decode(Signed, found[2]))
        if len(newest) == shelf.most:
            break
    for signed in reversed(newest):
        shelf.put(signed, codec.decode(Manifest, signed.payload))
    latest = ledger.latest_signed()
    if latest is None or shelf.root(latest) is None:
        raise PolicyError(f"the latest policy is not in {run.folder.policies}: restore it from a backup")


def figures(manifest: Manifest) -> Published:
    """What people are shown of a policy that was just signed."""
    before = (delta.size for delta in manifest.deltas if delta.base_version == manifest.version - 1)
    return Published(manifest.created_ms, manifest.size, next(before, None))


def sign_calibrations(signer: Identity, ledger: Ledger) -> None:
    """Sign what auditors measured, as they sign nothing. Inside the clerk's transaction, or before there is a clerk."""
    for digest, body in ledger.unsigned_calibrations():
        calibration = codec.decode(Calibration, body)
        check_calibration(calibration)
        ledger.set_signed_calibration(digest, codec.encode(seal(signer, calibration)))


def sign_manifest(run: Run, signer: Identity, version: int, root: bytes, clock: Callable[[], int] = now_ms) -> Signed:
    """Describe a published policy and its deltas, and sign that. Reads every byte of them. Raises PolicyError."""
    created_ms = clock()
    return seal(
        signer,
        Manifest(
            run=run.run,
            version=version,
            root=root,
            files=describe(run.folder.policy(version)),
            created_ms=created_ms,
            expires_ms=created_ms + MANIFEST_DAYS * 86_400_000,
            deltas=describe_deltas(run.folder, version),
        ),
    )
