"""How a node's events are shown: JSON lines for scripts, plain lines for logs, one live panel for people.

What a trainer or another node wrote may be in any of them: people are shown nothing that is not printable.
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

from node.report import KILLED, Event, Level, Report, Status, at_rest
from node.store import size_text
from protocol.outputs import printable

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
        out.write(f"{time.strftime('%H:%M:%S')} {mark}{printable(event.text)}\n")
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
    plain, refused = status.plain(), sum(status.refused.values())
    policy = "none" if status.policy_version is None else str(status.policy_version)
    fetching = f"fetching {status.download}; " if status.download else ""
    return (
        f"{fetching}policy {policy}, {status.slots_busy} of {status.slots_total} slots busy, {status.in_flight} in "
        f"flight, {status.tokens.rate():.0f} tok/s; traces {_traces(plain)}; verdicts: {status.accepted} accepted, "
        f"{refused} refused{_earlier(_judged(plain), plain)}"
    )


@contextmanager
def _panel(status: Status) -> Iterator[Report]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    live = Live(get_renderable=lambda: _table(status), console=console, refresh_per_second=_PANEL_PER_SECOND)

    def show(event: Event) -> None:
        if event.level is not Level.DETAIL:
            line = f"{time.strftime('%H:%M:%S')} {printable(event.text)}"
            console.print(line, style=_STYLES[event.level], markup=False, highlight=False)

    with live:
        yield show


def _table(status: Status) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(status):
        table.add_row(name, Text(printable(value)))
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
    yield "traces", _traces(status.plain())
    yield "verdicts", _verdicts(status.plain())
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


def _traces(status: dict[str, Any]) -> str:
    """What of them came about since the node started. `status`: as Status.plain gives it."""
    reward = "" if status["mean_reward"] is None else f", mean reward {status['mean_reward']:.2f}"
    return (
        f"since it started: {status['traces_drawn']} drawn, {status['traces_received']} received"
        f"{_earlier(status['traces_received'], status)}, {status['unsent_traces']} waiting to be sent{reward}"
    )


def _verdicts(status: dict[str, Any]) -> str:
    refused = ", ".join(f"{reason} {count}" for reason, count in status["refused"].items()) or "none"
    told = f"since it started: {status['accepted']} accepted, refused: {refused}"
    return told + _earlier(_judged(status), status)


def _judged(status: dict[str, Any]) -> int:
    counts: list[int] = [*status["refused"].values(), *status.get("not_judged", {}).values()]
    return int(status["accepted"]) + sum(counts)


def _earlier(count: int, status: dict[str, Any]) -> str:
    """A word on counts of more than was drawn since the node started: it left traces when it last ended."""
    return " (with traces drawn before)" if count > status["traces_drawn"] else ""


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
        now = f", {rate}/s now" if status.get("running", True) else ""
        yield "sharing", f"{given} of policies given to other nodes{now}"
    if relays := status.get("relays", 0):
        through = f"through {relays} relay{'s' if relays > 1 else ''}"
        if status.get("behind_nat"):
            yield "reached", f"{through}: it is behind NAT"
        else:
            yield "reached", f"where it listens, and {through}, which cannot see whether it is behind NAT"


def describe_status(status: dict[str, Any], width: int | None = None) -> str:
    """What `rlnode status` prints of status.json; lines are broken at spaces where a terminal has `width` columns."""
    if not status["running"]:
        status = at_rest(status)
    rows = [("node", status["node"]), ("state", _state(status))]
    rows += [("disk", why) for why in status.get("disk_waits", {}).values()]
    rows.append(("trainer", f"{status['trainer']} ({'connected' if status['connected'] else 'not connected'})"))
    if status.get("lost_because"):
        rows.append(("no contact", status["lost_because"]))
    rows.append(("engine", status["engine"] or "none"))
    rows.append(("policy", f"{_or_none(status['policy_version'])} (newest {_or_none(status['latest_version'])})"))
    if status.get("download"):
        rows.append(("fetching", status["download"]))
    if status["running"]:
        rows.append(("work", _work(status)))
    rows += [("traces", _traces(status)), ("verdicts", _verdicts(status)), *_sharing(status)]
    if status["last_refusal"]:
        rows.append(("last refusal", status["last_refusal"]))
    rows = [(name, printable(value)) for name, value in rows]
    if width is not None:
        rows = [(name, _broken(value, width - _INDENT)) for name, value in rows]
    return "\n".join(f"{name:>12}  {value}" for name, value in rows)


def _state(status: dict[str, Any]) -> str:
    if status["running"]:
        return f"running (process {status['process']}), {status['state']}"
    age = _age(max(0.0, time.time() - float(status.get("written", 0))))
    how = "killed, or cut off with the machine," if status["state"] == KILLED else "stopped"
    return f"not running, {how} {age} ago; what follows is of that moment"


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
