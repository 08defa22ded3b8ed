"""The state of a run for people: what the page, `rltrainer status` and the live view show.

Reads the ledger on a read-only connection and changes nothing.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Final

from protocol import identity
from trainer import waits
from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.ledger_rows import Reaudit, SubmissionState
from trainer.standing import stake

RECENT_STEPS = 5  # steps the "mean reward now" is taken over
RECENT_POLICIES = 12


def summary(ledger: Ledger, config: TrainerConfig, now_ms: int) -> dict[str, Any]:
    """Counts, latest figures, what each part waits for. Times are Unix milliseconds, rates per second over the last
    minute."""
    steps = ledger.view("SELECT * FROM steps ORDER BY version DESC LIMIT ?", (RECENT_STEPS,))
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
        "evaluation": evaluation(ledger),
        **counts(ledger),
        "groups": {
            row["state"]: row["n"] for row in ledger.view("SELECT state, COUNT(*) AS n FROM groups GROUP BY state")
        },
        "dropped": {
            row["cause"]: row["n"]
            for row in ledger.view("SELECT cause, COUNT(*) AS n FROM groups WHERE state = 'DROPPED' GROUP BY cause")
        },
        "traces_per_second": minute["traces"] / seconds,
        "tokens_per_second": minute["tokens"] / seconds,
        "policies": policies(ledger),
        "informative": ledger.count_informative(),
        "waits": waits.waits(ledger, config, now_ms),
        "nodes": nodes(ledger, now_ms),
        "pairs": pairs(ledger),
    }


def counts(ledger: Ledger) -> dict[str, Any]:
    """`accepted`, `refused`, `not_judged`: traces as they stand now, by the newest verdict on each; an accepted one
    that is judged again is none of these until then. `refusals`: of the refused by reason, with those turned away
    without a receipt. `traces`: those with a receipt, by state. `verdicts`: all ever given, of which a trace may
    have several."""
    # One search of an index a state: half the time of counting all of them in one go.
    of_state = "SELECT COUNT(*) AS n FROM submissions WHERE state = ?"
    traces = {str(state): ledger.view(of_state, (state,))[0]["n"] for state in SubmissionState}
    verdicts = _verdicts(ledger)
    refusals = {row["reason"]: row["n"] for row in verdicts if row["outcome"] == SubmissionState.REFUSED}
    for row in ledger.view(_REPLACED_REFUSALS):
        refusals[row["reason"]] -= row["n"]
    audited = "SELECT COUNT(*) AS n FROM verdicts INDEXED BY audits_by_node WHERE audited"
    return {
        "accepted": traces[SubmissionState.ACCEPTED] + traces[SubmissionState.CREDITED],
        "refused": sum(refusals.values()),
        "not_judged": traces[SubmissionState.NOT_JUDGED],
        "refusals": {reason: count for reason, count in refusals.items() if count},
        "traces": traces,
        "verdicts": verdicts,
        "audits_waiting": traces[SubmissionState.AUDIT],
        "audited": ledger.view(audited)[0]["n"],
    }


# Only a re-audit, of which there is one a trace, follows a refusal.
_REPLACED_REFUSALS: Final = (
    "SELECT v.reason, COUNT(*) AS n FROM submissions s INDEXED BY submissions_reaudited "
    "JOIN verdicts v ON v.digest = s.digest AND v.node = s.node "
    f"WHERE s.reaudit = '{Reaudit.DONE}' AND v.outcome = '{SubmissionState.REFUSED}' AND EXISTS (SELECT 1 "
    "FROM verdicts l WHERE l.digest = v.digest AND l.node = v.node AND l.sequence > v.sequence) GROUP BY v.reason"
)


def _verdicts(ledger: Ledger) -> list[dict[str, Any]]:
    """`outcome`, `reason`, `n` of each kind given so far."""
    of_outcome = "FROM verdicts WHERE outcome = ?"
    accepted = ledger.view(f"SELECT COUNT(*) AS n {of_outcome}", (SubmissionState.ACCEPTED,))[0]["n"]
    found = [{"outcome": str(SubmissionState.ACCEPTED), "reason": None, "n": accepted}]
    for outcome in (SubmissionState.NOT_JUDGED, SubmissionState.REFUSED):
        rows = ledger.view(f"SELECT reason, COUNT(*) AS n {of_outcome} GROUP BY reason", (outcome,))
        found += [{"outcome": str(outcome), **row} for row in rows]
    return found


def evaluation(ledger: Ledger) -> dict[str, Any] | None:
    """The newest on held-out tasks; None before the first."""
    rows = ledger.view("SELECT * FROM evaluations WHERE tasks > 0 ORDER BY version DESC LIMIT 1")
    return rows[0] if rows else None


def policies(ledger: Ledger, most: int = RECENT_POLICIES) -> list[dict[str, Any]]:
    """The newest published versions, the last one first: what following them costs, and how fast nodes got them.

    `ratio`: of the files' size to that of the delta from the version before, None without one. Seconds run from when
    the manifest was signed, or the node first came, to when it first told that it has the version; None while none has.
    """
    rows = ledger.view(
        "SELECT version, published_ms, bytes, delta_bytes FROM policies WHERE bytes IS NOT NULL "
        "ORDER BY version DESC LIMIT ?",
        (most,),
    )
    arrived: dict[int, list[float]] = {row["version"]: [] for row in rows}
    published = {row["version"]: row["published_ms"] for row in rows}
    query = "SELECT version, at_ms, first_seen_ms FROM arrivals LEFT JOIN nodes USING (node) WHERE version >= ?"
    for row in ledger.view(query, (min(published, default=0),)):
        if row["version"] in arrived:
            since = max(published[row["version"]], row["first_seen_ms"] or 0)
            arrived[row["version"]].append(max(0.0, (row["at_ms"] - since) / 1000))
    return [{**row, **_spread(arrived[row["version"]]), "ratio": _ratio(row)} for row in rows]


def _spread(seconds: list[float]) -> dict[str, Any]:
    return {
        "nodes": len(seconds),
        "median_seconds": median(seconds) if seconds else None,
        "slowest_seconds": max(seconds, default=None),
    }


def _ratio(row: dict[str, Any]) -> float | None:
    return row["bytes"] / row["delta_bytes"] if row["delta_bytes"] else None


def following(ledger: Ledger) -> dict[str, Any]:
    """What deltas from one version to the next saved over the whole run, in bytes."""
    return ledger.view(
        "SELECT COUNT(*) AS versions, SUM(bytes) AS bytes, SUM(delta_bytes) AS delta_bytes FROM policies "
        "WHERE delta_bytes IS NOT NULL"
    )[0]


def nodes(ledger: Ledger, now_ms: int) -> list[dict[str, Any]]:
    """Every node seen, connected ones first; `node` is the peer id.

    `accepted`, `refused`: traces, by the newest verdict on each. `rate`: at which its last trace was drawn for audit,
    or the next will be where trust changed since. `stake`: at that rate cheating pays for a node that has less
    to lose than so many times what one cheat gains. `doing`, `doing_since_ms`: what it does or waits for. `home`: it is
    the home engine; `trusted`: a person vouches for it, and it has not lied since; `lied`: the reason of the refusal
    by which it lost that trust, None where it lost none.
    """
    rows = ledger.view("SELECT * FROM nodes ORDER BY connected DESC, accepted DESC")
    held, policy = ledger.held_slots(now_ms), ledger.policy()
    home, lies = ledger.home(), ledger.lies_of_trusted()
    latest = None if policy is None else policy[0]
    return [
        {
            **row,
            **waits.of_node(row, latest, held.get(row["node"])),
            "node": identity.peer_id(row["node"]),
            "stake": stake(row["rate"]),
            "home": row["node"] == home,
            "trusted": row["node"] in lies and lies[row["node"]] is None,
            "lied": lies.get(row["node"]),
        }
        for row in rows
    ]


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
