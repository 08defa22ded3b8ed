"""The negative controls as a table for people and as JSON for scripts (SPEC 14). Not here: the page with the
distributions (controls_page.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.calibration import Limits
from protocol.limits import NODE_EVIDENCE_NATS
from verify.attacks import Caught
from verify.controls import Report, Row


def summary(report: Report) -> str:
    """The pair and the bars in one line."""
    required = [row for row in report.rows if row.required]
    honest = report.rows[0]
    return (
        f"{report.policy}, {report.worker_dtype} drawn, {report.verifier_dtype} recomputed: "
        f"{sum(row.met for row in required)} of {len(required)} controls caught in time, "
        f"{honest.refused} of {honest.attempts} honest traces refused"
        + (f"; judged without scores, for {report.too_noisy}" if report.too_noisy else "")
    )


def rate(row: Row) -> str:
    """Refused traces of those that had to be."""
    return f"{row.refused}/{row.changed if row.caught else row.attempts}"


def decided_by(row: Row) -> str:
    """The checks that refused, most often first; the node's sums where these came first."""
    if row.by_node:
        return f"node ({row.nats:.0f} nats)"
    return ", ".join(name for name, _ in row.checks[:2])


def outcome(row: Row) -> str:
    if row.caught is None:
        return "met" if row.met else "MISSED"
    if row.caught is Caught.LEDGER:
        return "ledger"
    if row.changed == 0:
        return "as honest"
    if row.caught is Caught.NOTHING:
        return "not needed"
    return "met" if row.met else "MISSED"


def print_reports(reports: Sequence[Report]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for report in reports:
        table = Table(box=None, pad_edge=False)
        for heading in ("control", "refused", "within", "tokens", "margin", "decided by", "bar", ""):
            numeric = heading in ("refused", "within", "tokens", "margin", "bar")
            table.add_column(heading, overflow="fold", justify="right" if numeric else "left")
        for row in report.rows:
            style = "bold red" if not row.met else "dim" if not row.required and row.caught else "green"
            table.add_row(
                row.name,
                rate(row),
                _count(row.within),
                _count(row.tokens if row.within else None),
                "" if row.ratio is None else f"{row.ratio:.2g}×",
                decided_by(row),
                f"≤ {row.bar}" if row.required else "",
                Text(outcome(row), style=style),
            )
        console.print(table)
        console.print(summary(report), style="bold" if report.met else "bold red")
        console.print(_honest_line(report))
        for row in report.rows:
            if row.note:
                console.print(f"{row.name}: {row.note}", style="dim")
        console.print()


def _honest_line(report: Report) -> str:
    honest = report.rows[0]
    share = float((honest.margins > 0).mean()) if len(honest.margins) else 0.0
    return (
        f"honest: {len(honest.margins):,} tokens, {share:.2%} with a margin above 0, worst evidence at "
        f"{honest.ratio or 0:.0%} of its limit, {honest.nats:.1f} of {NODE_EVIDENCE_NATS:.1f} nats; "
        f"{report.seconds:.0f} s for all"
    )


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Every report with its rows; `met` is whether every bar was."""
    return {
        "spec": "1.0",
        "met": all(report.met for report in reports),
        "reports": [
            {
                "policy": report.policy,
                "worker_dtype": report.worker_dtype,
                "verifier_dtype": report.verifier_dtype,
                "environment": report.environment,
                "calibrated": report.calibrated,
                "too_noisy": report.too_noisy or None,
                "limits": {name: getattr(report.limits, name) for name in Limits.__slots__},
                "seconds": round(report.seconds, 1),
                "met": report.met,
                "rows": [_row(row) for row in report.rows],
            }
            for report in reports
        ],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "caught": None if row.caught is None else str(row.caught),
        "attempts": row.attempts,
        "dishonest": row.changed,
        "refused": row.refused,
        "false_refusals": row.refused if row.caught is None else None,
        "within_traces": row.within,
        "within_tokens": row.tokens,
        "by_node": row.by_node,
        "node_nats": row.nats if row.nats > float("-inf") else None,
        "margin": row.ratio,
        "checks": dict(row.checks),
        "bar": row.bar if row.required else None,
        "outcome": outcome(row),
        "met": row.met,
        "note": row.note,
    }
