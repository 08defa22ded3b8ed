"""What is wrong with a run folder, checked from the ground up, each with what to do about it.

Reads and changes nothing, served or not. Not here: repairing anything, and machines of nodes (`rlnode doctor`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from protocol import codec
from protocol.diagnosis import Finding, Level
from protocol.envelope import Signed, unseal
from protocol.errors import KeyFileError, LocalError, PolicyError, RLCommonsError, UsageError
from protocol.identity import peer_id
from protocol.outputs import cause
from protocol.policy import Manifest, policy_root, read_safetensors
from trainer.audit_draw import AuditChain
from trainer.backup import read_backup
from trainer.child import RESTARTED
from trainer.ledger import Ledger
from trainer.place import copied_from, copy_advice, holder, workers
from trainer.rundir import (
    DISK_RESERVE_BYTES,
    Run,
    RunFolder,
    load_run_identity,
    load_secrets,
    open_run,
    short_of_room,
)

GIB: Final = 1024**3
CLOCK_SECONDS: Final = 60.0
RECENT_MS: Final = 24 * 3_600_000
MOST_FAULTS: Final = 3  # of a kind
STARTING_MS: Final = 90_000  # a gateway that ended before that ended in an earlier start


def examine(path: Path, now_ms: int) -> Iterator[Finding]:
    """All checks, in the order in which a start meets them. Raises UsageError where there is no run to look at."""
    run = open_run(path)
    yield _run(run)
    yield _key(run)
    yield _secret(run)
    yield from _place(run.folder)
    ledger, finding = _open_ledger(run.folder)
    yield finding
    size = 0
    if ledger is not None:
        with closing(ledger):
            yield _clock(ledger, now_ms)
            yield from _policy(run, ledger)
            yield _learner(run.folder, ledger)
            yield from _nodes(ledger)
            yield from _trust(ledger)
            yield from _gateway(run.folder, ledger, now_ms)
            yield from _faults(ledger, now_ms)
            size = _size_of_step(run.folder, ledger)
    yield _room(run.folder, size)
    yield from _leftovers(run.folder)


def _run(run: Run) -> Finding:
    made = read_backup(run.folder.path)
    if run.folder.backup.exists():
        version = "?" if made is None else made.version
        text = f"a back-up of policy {version}: `rltrainer restore {run.folder.path} RUN` makes a run of it"
        return Finding("run", Level.WARNING, text)
    if not os.access(run.folder.path, os.W_OK):
        return Finding("run", Level.ACT, f"{run.folder.path} cannot be written: run as its owner")
    return Finding("run", Level.OK, f"'{run.genesis.name}', {run.run.hex()[:16]}…, settings {run.folder.config}")


def _key(run: Run) -> Finding:
    try:
        return Finding("key", Level.OK, load_run_identity(run).peer_id)
    except KeyFileError as error:
        return Finding("key", Level.ACT, str(error))


def _secret(run: Run) -> Finding:
    try:
        of_this_run = AuditChain(load_secrets(run).audit).anchor == run.genesis.audit_anchor
    except KeyFileError as error:
        return Finding("secret", Level.ACT, str(error))
    if not of_this_run:
        text = f"{run.folder.secret} is not the secret of this run's genesis: restore the right one from a backup"
        return Finding("secret", Level.ACT, text)
    return Finding("secret", Level.OK, "of this run's genesis")


def _place(folder: RunFolder) -> Iterator[Finding]:
    process, at_work = holder(folder), workers(folder)
    if process is not None:
        text = f"process {process} serves it, at work: {', '.join(at_work) or 'nothing yet'}"
        yield Finding("served", Level.OK, f"{text}; see rltrainer status {folder.path}")
    elif at_work:
        text = f"nobody serves it, and {', '.join(at_work)} of it are at work: they should end by themselves"
        yield Finding("served", Level.WARNING, f"{text} within 10 s; end them if they do not")
    else:
        yield Finding("served", Level.OK, f"no: rltrainer serve {folder.path}")
    if (last := copied_from(folder)) is not None:
        yield Finding("place", Level.ACT, f"this folder is {copy_advice(last, folder.path)}")


def _open_ledger(folder: RunFolder) -> tuple[Ledger | None, Finding]:
    try:
        ledger = Ledger(folder.ledger, read_only=True)
    except (UsageError, LocalError) as error:
        return None, Finding("ledger", Level.ACT, str(error))
    damage = ledger.damage()
    if damage:
        ledger.close()
        text = f"{folder.ledger} is damaged ({'; '.join(damage)}): restore the run from a backup"
        return None, Finding("ledger", Level.ACT, text)
    size = folder.ledger.stat().st_size
    return ledger, Finding("ledger", Level.OK, f"whole, {size / 1e6:,.1f} MB, {ledger.count_verdicts():,} verdicts")


def _clock(ledger: Ledger, now_ms: int) -> Finding:
    behind = (ledger.newest_ms() - now_ms) / 1000
    if behind > CLOCK_SECONDS:
        text = f"this machine's clock is {behind:,.0f} s behind what the ledger was written at: leases would be late "
        return Finding("clock", Level.ACT, text + "or never; set it (timedatectl set-ntp true)")
    return Finding("clock", Level.OK, "not behind the ledger")


def _policy(run: Run, ledger: Ledger) -> Iterator[Finding]:
    found = ledger.policy()
    if found is None:
        yield Finding("policy", Level.ACT, "the ledger knows no policy: restore the run from a backup")
        return
    version, root, signed = found
    yield _latest_policy(run, version, root, signed)
    needed = range(max(0, version - run.config.staleness_limit), version)
    lost = [each for each in needed if ledger.policy(each) is not None and not run.folder.policy(each).is_dir()]
    if lost:
        text = f"versions {', '.join(map(str, lost))} are not on disk: traces of them cannot be audited or learned from"
        yield Finding("policies", Level.WARNING, text)


def _latest_policy(run: Run, version: int, root: bytes, signed: bytes | None) -> Finding:
    folder = run.folder.policy(version)
    try:
        here = policy_root(folder)
    except PolicyError as error:
        return Finding("policy", Level.ACT, f"version {version}: {error}; restore {folder} from a backup")
    if here != root:
        text = f"{folder} is not what was published as version {version}: restore it from a backup"
        return Finding("policy", Level.ACT, text)
    if signed is None:
        return Finding("policy", Level.OK, f"version {version}, root {root.hex()[:16]}…, to be signed yet")
    try:
        manifest = unseal(Manifest, codec.decode(Signed, signed), signer=run.genesis.trainer)
    except RLCommonsError as error:
        return Finding("policy", Level.ACT, f"the manifest of version {version} is no good ({error}): restore a backup")
    if manifest.root != root:
        text = f"the manifest of version {version} names another root than the ledger: restore the run from a backup"
        return Finding("policy", Level.ACT, text)
    return Finding("policy", Level.OK, f"version {version}, root {root.hex()[:16]}…, as its manifest says")


def _learner(folder: RunFolder, ledger: Ledger) -> Finding:
    found = ledger.policy()
    version = 0 if found is None else found[0]
    if folder.step(version + 1).exists():
        return Finding("learner", Level.OK, f"made policy {version + 1}, which the ledger is told at the next start")
    if not folder.step(version).exists():
        if version == 0:
            return Finding("learner", Level.OK, "has made no step yet")
        text = f"{folder.step(version)} is gone: the optimiser begins anew; restore it from a backup if there is one"
        return Finding("learner", Level.WARNING, text)
    try:
        # Not the loader of checkpoint.py: looking must not take as much memory as learning.
        record = json.loads((folder.step(version) / "step.json").read_text(encoding="utf-8"))
        tensors = sum(1 for _ in read_safetensors(folder.step(version) / "state.safetensors"))
        fits = record["row"]["version"] == version and record["root"] == (found[1].hex() if found else "")
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{folder.step(version)} cannot be read ({cause(error)}): restore it from a backup, or remove it and "
        return Finding("learner", Level.ACT, text + "the optimiser begins anew")
    except PolicyError as error:
        text = f"{error}: restore {folder.step(version)} from a backup, or remove it and the optimiser begins anew"
        return Finding("learner", Level.ACT, text)
    if not fits:
        text = f"{folder.step(version)} is of another policy than version {version}: restore it from a backup"
        return Finding("learner", Level.ACT, text)
    return Finding("learner", Level.OK, f"its state of version {version} is here, {tensors:,} tensors")


def _nodes(ledger: Ledger) -> Iterator[Finding]:
    """Nodes that hold what this run has never made: somebody served another copy of it."""
    found = ledger.policy()
    latest = -1 if found is None else found[0]
    rows = ledger.view("SELECT node, policy_version AS version FROM nodes WHERE policy_version > ?", (latest,))
    for row in rows[:1]:
        yield Finding(
            "nodes",
            Level.WARNING,
            f"{peer_id(row['node'])} says it holds policy {row['version']}, the latest here is {latest}: if this run "
            f"was restored from an old copy, restore it again with --published {row['version']}",
        )


def _trust(ledger: Ledger) -> Iterator[Finding]:
    """Nodes that a person named as trusted, and that lied since."""
    for node, lie in sorted(ledger.lies_of_trusted().items()):
        if lie is not None:
            yield Finding(
                "trust",
                Level.WARNING,
                f"node {peer_id(node)}, which you trusted, was refused for {lie} since: it is audited like a stranger; "
                f"find out why, and serve with --trust {peer_id(node)} to trust it again",
            )


def _gateway(folder: RunFolder, ledger: Ledger, now_ms: int) -> Iterator[Finding]:
    """Without it a run that is served is reached by nobody."""
    if holder(folder) is None or "gateway" in workers(folder):
        return
    query = "SELECT text FROM events WHERE kind = 'process' AND text LIKE 'the gateway %' AND at_ms > ? "
    said = ledger.view(query + "ORDER BY id DESC LIMIT 1", (now_ms - STARTING_MS,))
    text = f"is not at work; the last of it: {said[0]['text']}" if said else "is starting"
    yield Finding("gateway", Level.ACT if said else Level.WARNING, text)


def _faults(ledger: Ledger, now_ms: int) -> Iterator[Finding]:
    """The newest of each kind: what a node can cause again and again does not hide what it cannot."""
    query = "SELECT kind, text FROM events WHERE kind IN ('fault', 'alarm', 'stall', 'process') AND at_ms > ? "
    texts: dict[str, dict[str, list[str]]] = {}  # kind → what happened → its texts, the newest first
    for row in ledger.view(query + "ORDER BY id DESC", (now_ms - RECENT_MS,)):
        happened = row["text"].partition(RESTARTED)[0]  # the waits between restarts differ
        texts.setdefault(row["kind"], {}).setdefault(happened, []).append(row["text"])
    if not texts:
        yield Finding("events", Level.OK, "no fault or alarm, and no process that ended by itself, in the last 24 h")
    for kind in ("alarm", "stall", "process", "fault"):
        for same in list(texts.get(kind, {}).values())[:MOST_FAULTS]:
            yield Finding("events", Level.WARNING, f"{same[0]} ({len(same)} times in the last 24 h)")


def _size_of_step(folder: RunFolder, ledger: Ledger) -> int:
    """Bytes that the next step writes, as far as the last one shows."""
    found = ledger.policy()
    places = [] if found is None else [folder.policy(found[0]), folder.step(found[0])]
    return sum(path.stat().st_size for place in places if place.is_dir() for path in place.iterdir())


def _room(folder: RunFolder, size: int) -> Finding:
    free, needed = shutil.disk_usage(folder.path).free, DISK_RESERVE_BYTES + 2 * size
    text = f"{free / GIB:,.1f} GiB free"
    if short := short_of_room(folder.path):
        return Finding("disk", Level.ACT, short)
    if free < needed:
        text = f"{text}, {needed / GIB:,.1f} GiB are wanted for the next steps: free some, or lower keep_policies"
        return Finding("disk", Level.WARNING, text)
    return Finding("disk", Level.OK, text)


def _leftovers(folder: RunFolder) -> Iterator[Finding]:
    patterns = ("policies/*.tmp", "learner/*.tmp", "deltas/*/*.tmp", ".backup-*", "*.new")
    found = sorted(str(path.relative_to(folder.path)) for pattern in patterns for path in folder.path.glob(pattern))
    if found and holder(folder) is None:
        text = f"{', '.join(found[:5])}: of writes that were cut off; the next start, or the next back-up, clears them"
        yield Finding("leftovers", Level.OK, text)
    aside = len(list(folder.quarantine.glob("*.msgpack"))) if folder.quarantine.is_dir() else 0
    if aside:
        text = f"{aside} traces that auditors died on: rltrainer quarantine {folder.path}"
        yield Finding("quarantine", Level.WARNING, text)
