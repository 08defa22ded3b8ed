"""The negative controls as one self-contained page: the table, and the distributions behind it drawn as SVG.

No script, no font and no picture from elsewhere: the file can be kept, mailed and opened in ten years.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.limits import NODE_EVIDENCE_NATS
from verify.controls import Report, Row
from verify.controls_report import decided_by, outcome, rate, summary

_WIDTH: Final = 460
_LANE: Final = 26  # height of one distribution
_LEFT: Final = 190
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667; --line: #d8dce2; --paper: #fff; --honest: #2a8f5b;
  --cheat: #c2452d; --limit: #7a52c7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #98a; --line: #3a3f47; --paper: #16181c;
  --honest: #55c48a; --cheat: #f0805f; --limit: #b59af0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
p { max-width: 46rem; } .soft, figcaption { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; } .met { color: var(--honest); } .missed { color: var(--cheat); font-weight: 700; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 11px; }
svg .axis { fill: var(--soft); } .h { fill: var(--honest); } .c { fill: var(--cheat); } .grid { stroke: var(--line); }
.limit { stroke: var(--limit); stroke-dasharray: 4 3; }
"""


def page(reports: Sequence[Report]) -> str:
    """The whole HTML document."""
    policy = html.escape(reports[0].policy) if reports else ""
    parts = "".join(_section(report) for report in reports)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Negative controls: {policy}</title><style>{_STYLE}</style><h1>Negative controls: {policy}</h1>"
        "<p>Every known cheat against this policy, judged as a trainer judges, beside honest traces. "
        "<b>refused</b>: traces refused by themselves. <b>within</b>: traces of one node until it is caught, the worst "
        "of all groups. <b>margin</b>: measured value over its limit, median of the refused traces; for honest ones "
        f"the worst.</p>{parts}</html>\n"
    )


def _section(report: Report) -> str:
    notes = "".join(
        f"<li><b>{html.escape(row.name)}</b>: {html.escape(row.note)}</li>" for row in report.rows if row.note
    )
    return (
        f"<h2>{html.escape(report.worker_dtype)} drawn, {html.escape(report.verifier_dtype)} recomputed</h2>"
        f"<p>{html.escape(summary(report))}.</p>"
        f'<div class="scroll">{_table(report)}</div>'
        f"{_margins(report)}{_mantissas(report)}<h3>What need not be refused, and why</h3><ul>{notes}</ul>"
    )


def _table(report: Report) -> str:
    heads = ("control", "refused", "within", "tokens", "margin", "decided by", "bar", "")
    numeric = {1, 2, 3, 4, 6}

    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        body = "".join(
            f"<{tag}{' class=n' if place in numeric else ''}>{html.escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr{kind}>{body}</tr>"

    rows = "".join(
        line(
            (
                row.name,
                rate(row),
                str(row.within or ""),
                str(row.tokens or "") if row.within else "",
                "" if row.ratio is None else f"{row.ratio:.2g}×",
                decided_by(row),
                f"≤ {row.bar}" if row.required else "",
                outcome(row),
            ),
            "td",
            ' class="missed"' if not row.met else "",
        )
        for row in report.rows
    )
    return f"<table>{line(heads, 'th')}{rows}</table>"


def _margins(report: Report) -> str:
    """How far tokens are from the drawn ones: margins on a logarithmic axis, zeros in a bar of their own."""
    rows = [row for row in report.rows if len(row.margins)]
    caption = (
        "Margins of the tokens: how far each is from the one the seed draws, in noised logits. Exact tokens have 0; "
        "the dashed line is the limit of a single token."
    )
    return _figure("Margins", caption, rows, [row.margins for row in rows], report.limits.margin_hard, 1e-4, 30.0)


def _mantissas(report: Report) -> str:
    rows = [row for row in report.rows if len(row.means)]
    caption = (
        "Mantissa means of the chunks: the mean error of a proof's values, in the last place of bfloat16. The dashed "
        "line is the limit of a single chunk; what stays below it shows in a node's sums, caught above "
        f"{NODE_EVIDENCE_NATS:.1f} nats."
    )
    title, limit = "Mantissa mean of each chunk", report.limits.mantissa_mean
    return _figure(title, caption, rows, [row.means for row in rows], limit, 1e-3, 128.0)


def _figure(
    title: str,
    caption: str,
    rows: Sequence[Row],
    values: Sequence[NDArray[Any]],
    limit: float,
    low: float,
    high: float,
) -> str:
    """One lane a row: a bar for what is at or below `low`, then a histogram on a logarithmic axis up to `high`."""
    height = _LANE * len(rows) + 30
    zero = _LEFT + 16
    scale = (_WIDTH - 60) / math.log(high / low)

    def x(value: float) -> float:
        return zero + 34 + scale * math.log(min(max(value, low), high) / low)

    ticks = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    parts = [
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" y2="{height - 22}"/>'
        f'<text class="axis" x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks
    ]
    parts.append(f'<text class="axis" x="{zero}" y="{height - 8}" text-anchor="end">0</text>')
    edges = np.geomspace(low, high, 61)
    for lane, (row, found) in enumerate(zip(rows, values, strict=True)):
        base = _LANE * (lane + 1)
        kind = "h" if row.caught is None else "c"
        parts.append(f'<text x="0" y="{base - 6}">{html.escape(row.name)}</text>')
        above = found[found > low]
        counts, _ = np.histogram(np.clip(above, low, high), edges)
        parts.append(_bar(zero - 8, 8, base, 1 - len(above) / len(found), kind))
        tallest = max(1, int(counts.max()))
        for place in np.flatnonzero(counts):
            start, end = x(float(edges[place])), x(float(edges[place + 1]))
            parts.append(_bar(start, end - start, base, math.sqrt(counts[place] / tallest), kind))
    parts.append(f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="0" y2="{height - 22}"/>')
    return (
        f"<figure><h3>{html.escape(title)}</h3>"
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height}" width="{_LEFT + _WIDTH + 30}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
        f"<figcaption>{html.escape(caption)} Heights are square roots of counts; the bar left of the axis is the "
        "share at zero.</figcaption></figure>"
    )


def _bar(left: float, width: float, base: float, share: float, kind: str) -> str:
    tall = (_LANE - 5) * share
    return f'<rect class="{kind}" x="{left:.1f}" y="{base - tall:.1f}" width="{width:.2f}" height="{tall:.1f}"/>'
