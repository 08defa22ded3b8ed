"""How a node's events are shown: JSON lines for scripts, plain lines for logs, one live panel for people.

Not here: what happens (report.py).
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from node.report import Event, Level, Report, Status
from node.store import size_text

_STYLES: Final = {Level.DETAIL: "dim", Level.INFO: "", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_PANEL_PER_SECOND: Final = 2


def json_lines(out: TextIO) -> Report:
    """One object a line: time, event, level, text, and the event's own values."""

    def show(event: Event) -> None:
        line = {"time": round(time.time(), 3), "event": event.name, "level": str(event.level), "text": event.text}
        out.write(json.dumps({**event.values, **line}, default=str) + "\n")
        out.flush()

    return show


def plain_lines(out: TextIO) -> Report:
    """For a log file or a service manager, which write the time themselves as often as not."""

    def show(event: Event) -> None:
        if event.level is Level.DETAIL:
            return
        mark = "" if event.level is Level.INFO else f"{event.level}: "
        out.write(f"{time.strftime('%H:%M:%S')} {mark}{event.text}\n")
        out.flush()

    return show


@contextmanager
def shown(status: Status, *, as_json: bool, out: TextIO) -> Iterator[Report]:
    """The report that fits where `out` goes."""
    if as_json:
        with _logging_to(json_lines(out)) as report:
            yield report
    elif out.isatty():
        with _panel(status) as report, _logging_to(report):
            yield report
    else:
        with _logging_to(plain_lines(out)) as report, _summaries(report, status):
            yield report


@contextmanager
def _summaries(report: Report, status: Status) -> Iterator[None]:
    """One line a minute with the figures, where no panel shows them."""
    import threading

    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(60):
            report(Event("progress", summary(status)))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1)


class _ToReport(logging.Handler):
    """What libraries and the network layer log, as events."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.split(".")[0] in ("node", "protocol", "verify")
        level = Level.WARNING if ours else Level.DETAIL
        self._report(Event("log", f"{record.name}: {record.getMessage()}"[:500], level))


@contextmanager
def _logging_to(report: Report) -> Iterator[Report]:
    handler = _ToReport(report)
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [handler]
    try:
        yield report
    finally:
        root.handlers[:] = before


def summary(status: Status) -> str:
    """The figures in one line."""
    refused = sum(status.refused.values())
    reward = f", mean reward {status.reward_sum / status.traces_drawn:.2f}" if status.traces_drawn else ""
    policy = "none" if status.policy_version is None else str(status.policy_version)
    fetching = f"fetching {status.download}; " if status.download else ""
    return (
        f"{fetching}policy {policy}, {status.slots_busy} of {status.slots_total} slots busy, {status.in_flight} in "
        f"flight, "
        f"{status.tokens.rate():.0f} tok/s, {status.traces_drawn} traces drawn, {status.traces_received} received, "
        f"{status.accepted} accepted, {refused} refused, {status.unsent} waiting{reward}"
    )


@contextmanager
def _panel(status: Status) -> Iterator[Report]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    live = Live(get_renderable=lambda: _table(status), console=console, refresh_per_second=_PANEL_PER_SECOND)

    def show(event: Event) -> None:
        if event.level is not Level.DETAIL:
            console.print(
                f"{time.strftime('%H:%M:%S')} {event.text}", style=_STYLES[event.level], markup=False, highlight=False
            )

    with live:
        yield show


def _table(status: Status) -> Any:
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(status):
        table.add_row(name, value)
    return Panel(table, title=f"rlnode {status.node[-8:]}", title_align="left", border_style="dim")


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    yield "state", status.state
    if status.lost_because:
        yield "no contact", status.lost_because
    yield "engine", status.engine or "starting"
    newest = "" if status.latest_version is None else f" (newest {status.latest_version})"
    policy = "none yet" if status.policy_version is None else str(status.policy_version)
    yield "policy", policy + newest
    if status.download:
        yield "fetching", status.download
    for why in tuple(status.disk_waits.values()):
        yield "disk", why
    yield from _sharing(status.plain())
    yield "work", _work(status.plain())
    reward = f", mean reward {status.reward_sum / status.traces_drawn:.2f}" if status.traces_drawn else ""
    yield (
        "traces",
        f"{status.traces_drawn} drawn, {status.traces_received} received, {status.unsent} waiting to be sent{reward}",
    )
    refused = ", ".join(f"{reason} {count}" for reason, count in status.refused.items()) or "none"
    yield "verdicts", f"{status.accepted} accepted, refused: {refused}"
    if status.last_refusal:
        yield "last refusal", status.last_refusal[:200]


def _work(status: dict[str, Any]) -> str:
    """Slots, queues, rate and cache. `status`: as Status.plain gives it."""
    cache = status.get("cache_used")
    return (
        f"{status['slots_busy']}/{status['slots_total']} slots busy, {status.get('turns_waiting', 0)} queued for one, "
        f"{status.get('in_flight', 0)} completions in flight, {status['slots_waiting']} not begun, "
        f"{status['tokens_per_second']:.0f} tok/s" + ("" if cache is None else f", {cache:.0%} of the KV cache")
    )


def _sharing(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What of policies came, whence, and what was given on. `status`: as Status.plain gives it."""
    came, whence = [], status.get("fetched_bytes", {})
    if by_delta := status.get("policies_by_delta", 0):
        times = status["delta_policy_bytes"] / max(1, status["delta_bytes"])
        came.append(f"{by_delta} by delta ({times:,.0f} times smaller)")
    if status.get("policies_whole"):
        came.append(f"{status['policies_whole']} whole")
    names = (("node", "other nodes"), ("mirror", "mirrors"), ("trainer", "the trainer"))
    sources = [f"{size_text(whence[kind])} from {name}" for kind, name in names if whence.get(kind)]
    if came or sources:
        yield "policies", "; ".join(", ".join(each) for each in (came, sources) if each)
    if status.get("given_bytes"):
        given, rate = size_text(status["given_bytes"]), size_text(status.get("giving_bytes_per_second", 0))
        yield "sharing", f"{given} of policies given to other nodes, {rate}/s now"
    if relays := status.get("relays", 0):
        through = f"through {relays} relay{'s' if relays > 1 else ''}"
        if status.get("behind_nat"):
            yield "reached", f"{through}: it is behind NAT"
        else:
            yield "reached", f"where it listens, and {through}, which cannot see whether it is behind NAT"


def describe_status(status: dict[str, Any], width: int | None = None) -> str:
    """What `rlnode status` prints of status.json; lines are broken at spaces where a terminal has `width` columns."""
    age = max(0.0, time.time() - float(status.get("written", 0)))
    running = f"running (process {status['process']})" if status["running"] else f"not running, stopped {_age(age)} ago"
    refused = ", ".join(f"{reason} {count}" for reason, count in status["refused"].items()) or "none"
    reward = "" if status["mean_reward"] is None else f", mean reward {status['mean_reward']:.2f}"
    rows = [
        ("node", status["node"]),
        ("state", f"{running}, {status['state']}" if status["running"] else running),
        ("trainer", f"{status['trainer']} ({'connected' if status['connected'] else 'not connected'})"),
        ("engine", status["engine"] or "none"),
        ("policy", f"{_or_none(status['policy_version'])} (newest {_or_none(status['latest_version'])})"),
        ("work", _work(status)),
        (
            "traces",
            f"{status['traces_drawn']} drawn, {status['traces_received']} received, {status['unsent_traces']} waiting "
            f"to be sent{reward}",
        ),
        ("verdicts", f"{status['accepted']} accepted, refused: {refused}"),
    ]
    if status.get("download"):
        rows.insert(5, ("fetching", status["download"]))
    rows += _sharing(status)
    if status["running"] and status.get("lost_because"):
        rows.insert(3, ("no contact", status["lost_because"]))
    if status["running"]:
        rows[2:2] = [("disk", why) for why in status.get("disk_waits", {}).values()]
    if status["last_refusal"]:
        rows.append(("last refusal", status["last_refusal"]))
    if width is not None:
        rows = [(name, _broken(value, width - _INDENT)) for name, value in rows]
    return "\n".join(f"{name:>12}  {value}" for name, value in rows)


_INDENT: Final = 14


def _broken(text: str, width: int) -> str:
    """Words stay whole, also those that are longer than a line: an address, a path."""
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * _INDENT).join(lines)


def _or_none(value: Any) -> str:
    return "none" if value is None else str(value)


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
