"""What an audit of a run's log found, for people and for scripts (SPEC 14).

Not here: the audit (run_audit.py).
"""

from __future__ import annotations

from typing import Any, Final

from protocol import identity
from protocol.outputs import printable
from verify.run_audit import Report

SHOWN: Final = 20  # disagreements printed; --json lists more

_STEPS: Final = {
    1: "signatures",
    2: "seals",
    3: "numbers",
    4: "answers",
    5: "draws",
    6: "verdicts",
    7: "scores",
    8: "traces",
}
# What is counted in each step, as the audit names it.
_COUNTED: Final = {
    1: ("signed objects",),
    3: ("receipts", "verdicts"),
    4: ("leases", "receipts"),
    5: ("draws", "rates"),
    6: ("verdicts",),
    7: ("scores",),
    8: ("policies", "traces replayed", "traces recomputed by the model", "verdicts reached again"),
}


def as_json(report: Report) -> dict[str, Any]:
    """SPEC 14: the JSON object of `rlverify audit --json`."""
    return {
        "spec": "1.0",
        "run": report.run.hex(),
        "trainer": identity.peer_id(report.genesis.trainer),
        "agrees": not report.disagreeing,
        "epochs": report.epochs,
        "sealed": report.sealed,
        "checked": _above_zero(report.counts),
        "unchecked": _above_zero(report.undecided),
        "notes": _above_zero(report.notes),
        "disagreeing": report.disagreeing,
        "disagreements": [{"step": each.step, "where": each.where, "what": each.what} for each in report.disagreements],
    }


def _above_zero(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def print_report(report: Report) -> None:
    """A line a step, what could not be checked, and each disagreement with where it is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    console.print(f"run {report.run.hex()[:16]}… of trainer {identity.peer_id(report.genesis.trainer)}", soft_wrap=True)
    console.print(f"{report.epochs} epochs, {report.sealed} of them closed and sealed")
    table = Table(box=None, pad_edge=False, show_header=False)
    for step, name in _STEPS.items():
        wrong = report.by_step[step]
        outcome = Text(f"{wrong} disagree", style="bold red") if wrong else Text("agree", style="green")
        counted = [f"{report.counts[what]:,} {what}" for what in _COUNTED.get(step, ()) if report.counts[what]]
        if step == 2:
            counted = [f"{report.sealed:,} seals"] if report.sealed else []
        if not wrong and not counted:
            outcome = Text("nothing to check", style="dim")
        table.add_row(name, outcome, Text(", ".join(counted)))
    console.print(table)
    for title, counts in (("not checked", report.undecided), ("worth knowing", report.notes)):
        for what, count in _above_zero(counts).items():
            console.print(f"{title}: {count:,} {printable(what)}", style="dim", soft_wrap=True)
    for each in report.disagreements[:SHOWN]:
        said = printable(f"{each.where}: {each.what}")
        line = Text("disagrees ", style="bold red").append(said, style="not bold default")
        console.print(line, soft_wrap=True)
    if report.disagreeing > SHOWN:
        console.print(f"… and {report.disagreeing - SHOWN:,} more (--json lists up to {len(report.disagreements):,})")
    if report.disagreeing:
        console.print(
            "A log that was copied or served badly shows this too: export or fetch it again, and audit that. What "
            "still disagrees is the trainer's to explain: it signed it. Keep this log; --json names step and place "
            "of each, and `rlverify check` shows one trace by itself.",
            soft_wrap=True,
        )
        console.print(Text(f"{report.disagreeing:,} DISAGREE", style="bold red"))
    else:
        console.print(Text("ALL AGREE", style="bold green"))
