"""The live view of a run in a terminal: what a person wants to see while it learns.

Not here: where the figures come from (summary.py) and who refreshes the view (serve.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from protocol.outputs import printable
from trainer import rates
from trainer.network import network_line, read_network
from trainer.rundir import Run
from trainer.waits import lasted


def render(run: Run, found: dict[str, Any]) -> RenderableType:
    """A summary (summary.summary) as a rich renderable."""
    return Group(_headline(run, found), _figures(found), _waits(found), _Nodes(found["nodes"][:12]))


def line(found: dict[str, Any]) -> str:
    """The summary as one plain line, for a log or a pipe."""
    refused = ", ".join(f"{reason} {count}" for reason, count in found["refusals"].items())
    connected = sum(node["connected"] for node in found["nodes"])
    rate, staleness = f"{found['tokens_per_second']:,.0f}", _number(found["staleness_mean"], 1)
    return (
        f"{time.strftime('%H:%M:%S')}  version {found['version']}  reward {_number(found['reward_mean'], 3)}  "
        f"admitted {found['accepted']}  refused {found['refused']}{f' ({refused})' if refused else ''}  "
        f"{rate} tokens/s  staleness {staleness}  nodes {connected}"
    )


def _headline(run: Run, found: dict[str, Any]) -> Text:
    text = Text(printable(run.genesis.name), style="bold")
    text.append(f"  run {run.run.hex()[:16]}…  policy version ", style="dim")
    text.append(str(found["version"]), style="bold cyan")
    return text


def _figures(found: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 3))
    for _ in range(3):
        table.add_column(overflow="fold")
    refused = ", ".join(f"{reason} {count}" for reason, count in found["refusals"].items())
    table.add_row(
        f"mean reward [bold]{_number(found['reward_mean'], 3)}[/]",
        f"admitted [bold green]{found['accepted']:,}[/]",
        f"refused [bold red]{found['refused']:,}[/] {refused}",
    )
    table.add_row(
        f"{found['tokens_per_second']:,.0f} tokens/s",
        f"audited {found['audited']:,} (waiting {found['audits_waiting']})",
        f"staleness {_number(found['staleness_mean'], 1)} (most {_number(found['staleness_max'], 0)}) versions",
    )
    if held_out := found["evaluation"]:
        table.add_row(
            f"held-out reward [bold]{held_out['reward_mean']:.3f}[/] ± {held_out['reward_error']:.3f}",
            f"policy version {held_out['version']}",
            f"{held_out['tasks']:,} tasks",
        )
    if step := found["last_step"]:
        table.add_row(
            f"KL {step['kl']:.2g} nats a token, ESS {step['ess']:.2f}",
            f"masked {step['masked']:.1%}, clipped {step['clipped']:.1%}",
            f"entropy {step['entropy']:.2f}, gradient {step['gradient_norm']:.2g}, rate {step['learning_rate']:.2g}",
        )
    return table


def _waits(found: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    rows = [(each["part"], each["what"], each["since_ms"]) for each in found["waits"]]
    rows += [("…" + node["node"][-10:], node["doing"], node["doing_since_ms"]) for node in found["nodes"][:12]]
    for part, what, since_ms in rows:
        table.add_row(Text(part, style="dim"), Text(what), Text(lasted(since_ms, found["at_ms"]), style="dim"))
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cells: tuple[Text, ...]
    right: bool = True  # numbers
    wraps: bool = False  # at spaces, where it has to

    @property
    def whole(self) -> int:
        return max(cell_len(self.heading), *(each.cell_len for each in self.cells))

    @property
    def least(self) -> int:
        """Characters that it takes without any word of it being cut."""
        if not self.wraps:
            return self.whole
        words = [word for each in self.cells for word in each.plain.split()]
        return max(map(cell_len, (self.heading, *words)))


class _Nodes:
    """The nodes as a table. Where it is too wide columns are left out, and named below: no figure is cut."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._rows = [_node_row(node) for node in nodes]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._rows:
            return
        cells = {heading: tuple(row[heading] for row in self._rows) for heading in self._rows[0]}
        columns = [_Column(each, cells[each], each not in _WORDS, each in _WRAPPED) for each in cells]
        left_out: list[str] = []
        for heading in _LEFT_OUT:
            if _width(columns, least=True) <= options.max_width:
                break
            columns = [each for each in columns if each.heading != heading]
            left_out.append(heading)
        spare = options.max_width - _width(columns, least=True)
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
        for each in columns:
            width = min(each.whole, each.least + max(0, spare))
            spare -= width - each.least
            justify: JustifyMethod = "right" if each.right else "left"
            table.add_column(each.heading, justify=justify, width=width, no_wrap=not each.wraps, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[each.heading] for each in columns))
        yield table
        if left_out:
            told = f"too narrow here for {', '.join(sorted(left_out, key=list(cells).index))}: all of it is in --json"
            yield Text(told, style="dim")


_GAP: Final = 1
_WORDS: Final = ("node", "", "engine")
_WRAPPED: Final = ("", "audits")
# Where the table is too wide, in this order.
_LEFT_OUT: Final = ("engine", "KV", "stake", "queue", "rate", "busy", "audits", "policy", "tokens/s", "refused")


def _width(columns: list[_Column], *, least: bool) -> int:
    return sum(each.least if least else each.whole for each in columns) + _GAP * (len(columns) - 1)


def _node_row(node: dict[str, Any]) -> dict[str, Text]:
    """The cells of a node by heading."""
    state = "[green]connected[/]" if node["connected"] else "[dim]away[/]"
    state += "".join(f", {word}" for word in ("home", "trusted") if node[word])
    state += f", [red]trust lost: {node['lied']}[/]" if node["lied"] else ""
    failed = f" [red]({node['audits_failed']:,} failed)[/]" if node["audits_failed"] else ""
    cells = {
        "node": "…" + node["node"][-10:],
        "": state,
        "policy": _number(node["policy_version"], 0),
        "tokens/s": f"{node['tokens_per_second']:,.0f}",
        "busy": f"{node['slots_busy']}/{node['slots_total']}",
        "queue": f"{node['slots_waiting']:,}",
        "KV": "–" if node["cache_percent"] is None else f"{node['cache_percent']} %",
        "accepted": f"{node['accepted']:,}",
        "refused": f"{node['refused']:,}",
        "audits": f"{node['audits_passed']:,}{failed}",
        "rate": f"{node['rate']:.0%}",
        "stake": _number(node["stake"], 2),
    }
    engine = Text(printable(node["engine"]), "dim")
    return {**{name: Text.from_markup(text) for name, text in cells.items()}, "engine": engine}


def notes(run: Run, found: dict[str, Any]) -> list[Text]:
    """Lines below the view, of a summary with rates.told. To be printed with `soft_wrap=True`: an address must stay
    one line to be copied."""
    lines: list[tuple[str, str]] = []  # what is said, and its style
    served = found.get("served", True)
    if not served:
        told = f"nothing of this run is at work: `rltrainer serve {run.folder.path}` goes on with it"
        lines.append((f"not served  {told}", "bold"))
    if served and run.folder.address.exists():
        lines.append((f"join  rlnode join {run.folder.address.read_text().strip()}", "dim"))
    if served and run.folder.page.exists():
        lines.append((f"page  {run.folder.page.read_text().strip()}", "dim"))
    for pair in found["pairs"]:
        about = "calibrated" if pair["note"] is None else f"new, audited in full: {pair['note']}"
        lines.append((f"engines  {pair['pair']}: {about}", "dim"))
    if found["policies"]:
        lines.append((f"policy  {policy_line(found['policies'])}", "dim"))
    network = read_network(run.folder) if served else None
    if network is not None:
        lines.append((f"network  {network_line(network)}", "dim"))
    if leases := rates.line(found["rates"]):
        lines.append((f"leases  {leases}", "dim"))
    lines += [(f"alarm  {loss}", "bold red") for loss in found["losses"]]
    if found["dropped"]:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in found["dropped"].items())
        lines.append((f"groups given up: {causes}", "dim"))
    return [Text(printable(said), style) for said, style in lines]  # engines have the names that nodes gave them


def policy_line(policies: list[dict[str, Any]]) -> str:
    """The newest version that some node has, or the newest."""
    newest = next((each for each in policies if each["nodes"]), policies[0])
    delta = "fetched whole"
    if newest["ratio"] is not None:
        delta = f"delta {size(newest['delta_bytes'])}, {newest['ratio']:,.0f}× smaller"
    told = "no node has it yet"
    if newest["nodes"]:
        told = (
            f"with {newest['nodes']} node{'s' if newest['nodes'] > 1 else ''} in {newest['median_seconds']:.1f} s "
            f"(slowest {newest['slowest_seconds']:.1f} s)"
        )
    return f"version {newest['version']}: {size(newest['bytes'])}, {delta}, {told}"


def size(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
