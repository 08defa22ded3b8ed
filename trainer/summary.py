"""The state of a run for people: what the page, `rltrainer status` and the live view show.

Reads the ledger on a read-only connection and changes nothing.
"""

from __future__ import annotations

from typing import Any

from protocol import identity
from trainer.ledger import Ledger
from trainer.standing import stake

RECENT_STEPS = 5  # steps the "mean reward now" is taken over


def summary(ledger: Ledger, now_ms: int) -> dict[str, Any]:
    """Counts and latest figures. Times are Unix milliseconds, rates per second over the last minute."""
    steps = ledger.view("SELECT * FROM steps ORDER BY version DESC LIMIT ?", (RECENT_STEPS,))
    verdicts = ledger.view("SELECT outcome, reason, COUNT(*) AS n FROM verdicts GROUP BY outcome, reason")
    minute = ledger.view(
        "SELECT COUNT(*) AS traces, COALESCE(SUM(tokens), 0) AS tokens, MIN(received_ms) AS since FROM submissions "
        "WHERE received_ms > ?",
        (now_ms - 60_000,),
    )[0]
    seconds = max(1.0, (now_ms - (minute["since"] or now_ms)) / 1000)
    latest = ledger.policy()
    return {
        "at_ms": now_ms,
        "version": None if latest is None else latest[0],
        "policy_root": None if latest is None else latest[1].hex(),
        "steps": ledger.view("SELECT COUNT(*) AS n FROM steps")[0]["n"],
        "reward_mean": _mean([step["reward_mean"] for step in steps]),
        "staleness_mean": _mean([step["staleness_mean"] for step in steps]),
        "staleness_max": max((step["staleness_max"] for step in steps), default=None),
        "last_step": steps[0] if steps else None,
        "accepted": sum(row["n"] for row in verdicts if row["outcome"] == "ACCEPTED"),
        "refused": sum(row["n"] for row in verdicts if row["outcome"] == "REFUSED"),
        "not_judged": sum(row["n"] for row in verdicts if row["outcome"] == "NOT_JUDGED"),
        "refusals": {row["reason"]: row["n"] for row in verdicts if row["outcome"] == "REFUSED"},
        "audits_waiting": ledger.waiting_audits(),
        "audited": ledger.view("SELECT COUNT(*) AS n FROM verdicts WHERE audited")[0]["n"],
        "groups": {
            row["state"]: row["n"] for row in ledger.view("SELECT state, COUNT(*) AS n FROM groups GROUP BY state")
        },
        "dropped": {
            row["cause"]: row["n"]
            for row in ledger.view("SELECT cause, COUNT(*) AS n FROM groups WHERE state = 'DROPPED' GROUP BY cause")
        },
        "traces_per_second": minute["traces"] / seconds,
        "tokens_per_second": minute["tokens"] / seconds,
        "nodes": nodes(ledger),
        "pairs": pairs(ledger),
    }


def nodes(ledger: Ledger) -> list[dict[str, Any]]:
    """Every node seen, connected ones first; `node` is the peer id.

    `rate`: at which its last trace was drawn for audit. `stake`: at that rate cheating pays for a node that has less
    to lose than so many times what one cheat gains.
    """
    rows = ledger.view("SELECT * FROM nodes ORDER BY connected DESC, accepted DESC")
    return [{**row, "node": identity.peer_id(row["node"]), "stake": stake(row["rate"])} for row in rows]


def pairs(ledger: Ledger) -> list[dict[str, Any]]:
    """The pairs of engines that auditors met; `note` says why one is not calibrated, None that it is."""
    return ledger.view("SELECT pair, note FROM pairs ORDER BY seen_ms, pair")


def history(ledger: Ledger, after: int = -1) -> list[dict[str, Any]]:
    """One row a learner step after version `after`: the curves of the page."""
    return ledger.view("SELECT * FROM steps WHERE version > ? ORDER BY version", (after,))


def refusals(ledger: Ledger, most: int = 50) -> list[dict[str, Any]]:
    """The newest refusals: trace digest, node, reason, time."""
    rows = ledger.view(
        "SELECT digest, node, reason, audited, judged_ms FROM verdicts WHERE outcome = 'REFUSED' "
        "ORDER BY sequence DESC LIMIT ?",
        (most,),
    )
    return [{**row, "digest": row["digest"].hex(), "node": identity.peer_id(row["node"])} for row in rows]


def events(ledger: Ledger, most: int = 50) -> list[dict[str, Any]]:
    return ledger.view("SELECT at_ms, kind, text FROM events ORDER BY id DESC LIMIT ?", (most,))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
