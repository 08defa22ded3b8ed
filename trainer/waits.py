"""What the learner, the auditors, the gateway and each node do or wait for, and since when, for people.

Read from the ledger, and from the parts' locks whether they run. Not here: what becomes of a part that does
nothing although it has work (stall.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from protocol.device_turns import LEARNER, look
from trainer.child import life
from trainer.config import TrainerConfig
from trainer.home import as_dispatched
from trainer.ledger import Ledger
from trainer.ledger_care import Claim, Owed
from trainer.pacing import queue_of, standing, why_begin_nothing
from trainer.place import holder
from trainer.rundir import RunFolder, short_of_room


@dataclass(frozen=True, slots=True)
class Wait:
    """`since_ms`: Unix ms; None where nobody can say."""

    part: str
    what: str
    since_ms: int | None


def waits(ledger: Ledger, config: TrainerConfig, now_ms: int) -> list[dict[str, Any]]:
    """One row for each part of the trainer, and one for what is leased: `part`, `what`, `since_ms`."""
    owed, claims = ledger.owed(), ledger.claims()
    last_trace, last_verdict, last_policy = ledger.last_times()
    connected = ledger.view("SELECT COUNT(*) AS n, MAX(last_seen_ms) AS last FROM nodes WHERE connected")[0]
    found = [_gateway(ledger, owed, last_trace, connected["n"])]
    found += _auditors(owed, claims, last_verdict)
    found.append(_learner(ledger, config, last_policy))
    found.append(_leases(ledger, as_dispatched(config, RunFolder(ledger.folder)), now_ms))
    found += _device(ledger)
    return [asdict(each) for each in found]


def _gateway(ledger: Ledger, owed: Owed, last_trace: int, connected: int) -> Wait:
    if short := short_of_room(ledger.folder):
        said = ledger.view("SELECT at_ms, text FROM events WHERE kind = 'disk' ORDER BY id DESC LIMIT 1")
        # A disk without a byte took no event: then the last one is older, and says that there is room.
        since = said[0]["at_ms"] if said and "nearly full" in said[0]["text"] else None
        return Wait("gateway", f"accepts nothing: {short}", since)
    if owed.unsigned:
        return Wait("gateway", "signs the latest policy", owed.unsigned_ms)
    if owed.received:
        return Wait("gateway", f"checks {_count(owed.received, 'trace')}", owed.received_ms)
    if owed.audited:
        return Wait("gateway", f"gives {_count(owed.audited, 'verdict')}", owed.audited_ms)
    nodes = _count(connected, "node") if connected else "nodes: none is connected"
    return Wait("gateway", f"waits for traces of {nodes}", last_trace or None)


def _auditors(owed: Owed, claims: list[Claim], last_verdict: int) -> list[Wait]:
    found = [
        Wait(each.auditor, f"recomputes {_count(each.traces, 'trace')} of policy {each.version}", each.since_ms)
        for each in claims
    ]
    if found:
        return found
    if owed.audits:
        return [Wait("auditors", f"{_count(owed.audits, 'trace')} to audit, none taken up yet", owed.audits_ms)]
    return [Wait("auditors", "wait for a trace that is drawn for audit", last_verdict or None)]


def _learner(ledger: Ledger, config: TrainerConfig, last_policy: int) -> Wait:
    latest = ledger.policy()
    version = 0 if latest is None else latest[0]
    if config.last_version <= version:
        return Wait("learner", f"is done: all {config.last_version} policy versions are made", last_policy)
    found, wanted = ledger.count_informative(), config.groups_per_step
    if found < wanted:
        what = f"waits for groups: {found} of {wanted} whose rewards differ are complete"
        return Wait("learner", what, last_policy)
    return Wait("learner", f"makes policy {version + 1}", last_policy)


def _device(ledger: Ledger) -> list[Wait]:
    """Whose turn it is on a device that the home engine and the learner share (home.py)."""
    found = look(RunFolder(ledger.folder).turns)
    if found is None:
        return []
    if not found.who:
        return [Wait("device", "is asked for by the learner" if found.asked else "is nobody's now", None)]
    waiting = "; the learner waits until what is leased is drawn" if found.asked and found.who != LEARNER else ""
    return [Wait("device", f"is the {found.who}'s{waiting}", found.since_ms)]


def _leases(ledger: Ledger, config: TrainerConfig, now_ms: int) -> Wait:
    """Why nothing is begun, or what is before the next group that is."""
    consumption, drawing = ledger.consumption(now_ms), ledger.count_drawing()
    held = why_begin_nothing(consumption, drawing, consumption.made, config)
    if held:
        since = ledger.view(
            "SELECT MIN(waits_ms) AS since FROM nodes WHERE connected AND waits LIKE 'waiting for the%'"
        )
        return Wait("leases", held, since[0]["since"])
    return Wait("leases", f"as nodes ask: {standing(queue_of(consumption, drawing), config)}", None)


def as_it_stands(found: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """A summary with what the ledger does not tell: `served`, whether anything runs at all, and of_processes."""
    if holder(folder) is not None:
        return {**of_processes(found, folder), "served": True}
    waiting = [{**each, "what": "is not served", "since_ms": None} for each in found["waits"]]
    nodes = [{**each, "connected": 0, **_doing("is away", each["last_seen_ms"])} for each in found["nodes"]]
    return {**found, "served": False, "waits": waiting, "nodes": nodes}


def of_processes(found: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """A summary of a run that is served: which parts start still, and no time from before a part's process did."""
    return {**found, "waits": [_of_process(each, folder) for each in found["waits"]]}


def _of_process(row: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    found = life(folder.path, "auditor-0" if row["part"] == "auditors" else row["part"])
    if found is None:
        return row
    if found.ready_ms is None:
        return {**row, "what": "is starting", "since_ms": found.started_ms}
    return row if row["since_ms"] is None else {**row, "since_ms": max(row["since_ms"], found.ready_ms)}


def of_node(node: dict[str, Any], latest: int | None, held: tuple[int, int] | None) -> dict[str, Any]:
    """What a node of the ledger does or waits for: `doing`, `doing_since_ms`. `held`: see Ledger.held_slots."""
    if not node["connected"]:
        return _doing("is away", node["last_seen_ms"])
    if latest is not None and (node["policy_version"] or 0) > latest:
        has = node["policy_version"]
        told = (
            f"has policy {has}, the latest here is {latest}: was this run restored from an old copy? Restore it again"
        )
        return _doing(f"{told} with --published {has}", None)
    if node["slots_busy"]:
        return _doing(f"draws {node['slots_busy']} of its {node['slots_total']} slots at once", None)
    if held is not None:
        return _doing(f"holds {_count(held[0], 'leased slot')}, each until its deadline", None)
    if node["policy_version"] is None or (latest is not None and node["policy_version"] < latest):
        has = "has told of none" if node["policy_version"] is None else f"has {node['policy_version']}"
        return _doing(f"fetches policy {latest} ({has})", None)
    if node["waits"]:
        return _doing(f"waits for a lease: {node['waits']}", node["waits_ms"])
    return _doing("asks for a lease", None)


def _doing(what: str, since_ms: int | None) -> dict[str, Any]:
    return {"doing": what, "doing_since_ms": since_ms}


def _count(number: int, one: str) -> str:
    return f"{number:,} {one if number == 1 else one + 's'}"


def lasted(since_ms: int | None, now_ms: int) -> str:
    """For how long, as a person reads it; "" where nobody can say."""
    if since_ms is None:
        return ""
    seconds = max(0, (now_ms - since_ms) // 1000)
    if seconds < 120:
        return f"for {seconds} s"
    return f"for {seconds // 60} min" if seconds < 7200 else f"for {seconds // 3600} h"
