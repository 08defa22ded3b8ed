"""Shows a trace: who drew it under which lease, its turns as text over token ids, its verdict; and, recomputed, the
margins along its tokens and the statistics of its proofs.

Judges nothing (judge.py does), and recomputes nothing (reading.py does). Text comes from the policy's tokenizer when
its folder is given; control characters a model or a node wrote are escaped, so a trace cannot drive a terminal.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from protocol import identity
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.outputs import printable
from protocol.trace import SpanKind
from verify.files import Evidence, receipt_fits, verdict_fits
from verify.reading import Reading, WorstToken, strip, strip_legend
from verify.toploc import count_chunks

# What is shown of a trace unless all is asked for: a few screens, from both ends of what is longer.
TURNS: Final = 24
CHUNKS: Final = 32
IDS: Final = 64
CHARACTERS: Final = 2_000
_ALL: Final = "--all to see"

T = TypeVar("T")


def as_json(evidence: Evidence, policy: Path | None, reading: Reading | str | None = None) -> dict[str, Any]:
    """All there is to see. `reading`: the recomputed numbers, why there are none, or None when not asked for."""
    trace, lease, verdict = evidence.trace, evidence.lease, evidence.verdict
    tokenizer = None if policy is None else PolicyTokenizer.load(policy)
    return {
        "spec": "1.0",
        "trace": evidence.signed_trace.digest.hex(),
        "run": evidence.run.hex(),
        "trainer": identity.peer_id(evidence.genesis.trainer),
        "node": identity.peer_id(trace.node),
        "policy": {"version": trace.policy_version, "root": trace.policy_root.hex()},
        "environment": lease.environment,
        "task": lease.task_index,
        "group": lease.group_id.hex(),
        "slot": trace.slot,
        "seed": lease.seed_of(trace.slot),
        "temperature": lease.temperature,
        "prompt": {"ids": list(lease.prompt), "text": _text(tokenizer, lease.prompt)},
        "spans": [
            {"kind": kind.name.lower(), "ids": list(ids), "text": _text(tokenizer, ids)} for kind, ids in trace.pieces()
        ],
        "logprobs": list(trace.logprobs),
        "proofs": [len(proof) for proof in trace.proofs],
        "reward": trace.reward,
        "engine": {name: getattr(trace.engine, name) for name in ("name", "version", "dtype", "device", "runner")},
        "seconds": _seconds(evidence),
        "tokens_a_second": _rate(evidence),
        "started_ms": trace.started_ms,
        "received_ms": None if evidence.receipt is None else evidence.receipt.received_ms,
        "recomputed": _reading_json(reading, tokenizer),
        "receipt": None if evidence.receipt is None else {"fits": receipt_fits(evidence)},
        "verdict": None
        if verdict is None
        else {"outcome": str(verdict.outcome), "reason": verdict.reason, "fits": verdict_fits(evidence)},
    }


def _reading_json(reading: Reading | str | None, tokenizer: PolicyTokenizer | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    if isinstance(reading, str):
        return {"error": reading}
    worst = [
        {**asdict(token), "text": _text(tokenizer, (token.token,)), "drawn_text": _text(tokenizer, (token.drawn,))}
        for token in reading.worst
    ]
    return {**asdict(reading), "worst": worst, "error": None}


def print_trace(
    evidence: Evidence, policy: Path | None, reading: Reading | str | None = None, *, whole: bool = False
) -> None:
    """The same for people; of what is long the ends, unless `whole`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    trace, lease = evidence.trace, evidence.lease
    engine = trace.engine
    console = Console(highlight=False)
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("trace", evidence.signed_trace.digest.hex()),
        ("node", identity.peer_id(trace.node)),
        ("run", f"{evidence.genesis.name} {evidence.run.hex()[:16]}…"),
        ("policy", f"version {trace.policy_version}, root {trace.policy_root.hex()[:16]}…"),
        ("task", f"{lease.environment} {lease.task_index}, slot {trace.slot} of {lease.group_size}"),
        ("seed", f"{lease.seed_of(trace.slot)} at temperature {lease.temperature:g}"),
        ("engine", f"{engine.name} {engine.version}, {engine.dtype} on {engine.device}, {engine.runner}"),
        ("times", _times(evidence)),
        ("reward", f"{trace.reward:g} (as the node says)"),
        ("tokens", f"{len(trace.tokens)}, of which {len(trace.logprobs)} generated; {len(trace.proofs)} proofs"),
        ("proofs", "one each 32 generated tokens" if _count_fits(evidence) else "a wrong number"),
    ):
        facts.add_row(Text(label, style="bold"), Text(printable(value)))
    console.print(facts)
    tokenizer = None if policy is None else PolicyTokenizer.load(policy)
    _print_ids(console, "prompt", "cyan", lease.prompt, tokenizer, whole)
    _print_turns(console, evidence, reading, tokenizer, whole)
    _print_reading(console, reading, tokenizer, whole)
    if evidence.verdict is not None:
        reason = f" ({evidence.verdict.reason})" if evidence.verdict.reason else ""
        audited = "audited" if evidence.verdict.audited else "not audited"
        whose = "" if verdict_fits(evidence) else " (of another trace than this one)"
        console.print(f"[bold]trainer's verdict[/]  {evidence.verdict.outcome}{reason}, {audited}{whose}")


def _print_turns(
    console: Any, evidence: Evidence, reading: Reading | str | None, tokenizer: PolicyTokenizer | None, whole: bool
) -> None:
    from rich.text import Text

    margins = reading.margins if isinstance(reading, Reading) else ()
    turns: list[tuple[bool, tuple[int, ...], tuple[float, ...]]] = []
    done = 0
    for kind, ids in evidence.trace.pieces():
        generated = kind is SpanKind.GENERATED
        turns.append((generated, ids, margins[done : done + len(ids)] if generated else ()))
        done += len(ids) if generated else 0
    first, left_out, last = _ends(turns, TURNS, whole)
    for part in (first, last):
        if left_out and part is last:
            console.print(Text(f"{'':>10}  … {left_out:,} more turns, {_ALL}", style="dim"))
        for generated, ids, beside in part:
            label, colour = ("generated", "green") if generated else ("observed", "yellow")
            _print_ids(console, label, colour, ids, tokenizer, whole)
            _print_strip(console, beside)


def _ends(items: Sequence[T], most: int, whole: bool) -> tuple[list[T], int, list[T]]:
    """The first and the last of what is more than `most`, and how many are left out between them."""
    if whole or len(items) <= most:
        return list(items), 0, []
    half = most // 2
    return list(items[: most - half]), len(items) - most, list(items[-half:])


def _print_ids(
    console: Any, label: str, colour: str, ids: tuple[int, ...], tokenizer: PolicyTokenizer | None, whole: bool
) -> None:
    from rich.text import Text

    text = _text(tokenizer, ids)
    if text is not None:
        shown = Text(text if whole else text[:CHARACTERS], style=colour)
        if len(text) > len(shown):
            shown.append(f" … {len(text) - len(shown):,} more characters, {_ALL}", style="dim")
        console.print(Text(f"{label:>10}  ", style=f"bold {colour}") + shown)
    kept = ids if whole else ids[:IDS]
    more = f" … {len(ids) - len(kept):,} more, {_ALL}" if len(ids) > len(kept) else ""
    console.print(Text(f"{'' if text is not None else label:>10}  {' '.join(map(str, kept))}{more}", style="dim"))


def _print_strip(console: Any, margins: tuple[float, ...]) -> None:
    from rich.text import Text

    lines, each = strip(margins)
    label = "margins" if each == 1 else f"1:{each}"
    for number, line in enumerate(lines):
        console.print(Text(f"{label if number == 0 else '':>10}  {line}", style="magenta"))


def _print_reading(console: Any, reading: Reading | str | None, tokenizer: PolicyTokenizer | None, whole: bool) -> None:
    from rich.text import Text

    if reading is None:
        console.print("margins and proofs are not recomputed: give --recompute with --policy", style="dim")
        return
    if isinstance(reading, str):
        console.print(Text(f"not recomputed: {printable(reading)}", style="yellow"))
        return
    differing = sum(margin > 0 for margin in reading.margins)
    console.print(Text(f"{'':>10}  {strip_legend()}", style="dim"))
    console.print(
        Text("recomputed", style="bold").append(
            f"  {len(reading.margins) - differing} of {len(reading.margins)} tokens are those that the seed draws; "
            f"largest margin {max(reading.margins):.4g}; {reading.verifier.dtype} on {reading.verifier.device}",
            style="not bold",
        )
    )
    if reading.worst:
        console.print(_worst_table(reading.worst, tokenizer))
    console.print(_chunk_table(reading, whole))


def _worst_table(worst: tuple[WorstToken, ...], tokenizer: PolicyTokenizer | None) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title="largest margins", title_justify="left", title_style="bold")
    for heading in ("token", "margin", "logprob", "claimed", "is", "the seed draws"):
        table.add_column(heading, justify="left" if heading in ("is", "the seed draws") else "right", overflow="fold")
    for each in worst:
        numbers = (str(each.offset), f"{each.margin:.4g}", f"{each.logprob:.4f}", f"{each.claimed:.4f}")
        table.add_row(*numbers, Text(_named(tokenizer, each.token)), Text(_named(tokenizer, each.drawn)))
    return table


def _chunk_table(reading: Reading, whole: bool) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="proofs", title_justify="left", title_style="bold")
    for heading in ("generated", "exponents", "signs", "mantissa mean", "median", "elsewhere", "points"):
        table.add_column(heading, justify="right")
    first, left_out, last = _ends(reading.chunks, CHUNKS, whole)
    if left_out:
        table.caption, table.caption_justify = f"… {left_out:,} more chunks between them, {_ALL}", "left"
    for chunk in first + last:
        table.add_row(
            f"{chunk.start}:{chunk.start + chunk.length}",
            str(chunk.exponent_mismatches),
            str(chunk.sign_mismatches),
            f"{chunk.mantissa_mean:.3f}",
            f"{chunk.mantissa_median:g}",
            str(chunk.elsewhere),
            str(chunk.compared),
        )
    return table


def _named(tokenizer: PolicyTokenizer | None, token: int) -> str:
    text = _text(tokenizer, (token,))
    return str(token) if text is None else f"{token} '{text}'"


def _text(tokenizer: PolicyTokenizer | None, ids: tuple[int, ...]) -> str | None:
    """The text of ids with everything but printable characters escaped."""
    if tokenizer is None:
        return None
    return printable(tokenizer.decode(ids))


def _count_fits(evidence: Evidence) -> bool:
    return len(evidence.trace.proofs) == count_chunks(len(evidence.trace.logprobs))


def _seconds(evidence: Evidence) -> float:
    return (evidence.trace.finished_ms - evidence.trace.started_ms) / 1000


def _rate(evidence: Evidence) -> float | None:
    """Generated tokens a second, as the node tells the time."""
    seconds = _seconds(evidence)
    return len(evidence.trace.logprobs) / seconds if seconds > 0 else None


def _times(evidence: Evidence) -> str:
    rate = _rate(evidence)
    speed = "" if rate is None else f", {rate:.1f} generated tokens a second"
    received = "" if evidence.receipt is None else f"; received {_utc(evidence.receipt.received_ms)}"
    return f"{_utc(evidence.trace.started_ms)}, {_seconds(evidence):.2f} s{speed} (as the node says){received}"


def _utc(milliseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
