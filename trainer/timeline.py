"""Rollouts on a time line: one as lines for a terminal, one or many as a file for a viewer.

The file is in the trace event format (JSON), which ui.perfetto.dev and chrome://tracing open: a process for each node
and one for the trainer, a slice for each stage, arrows from node to trainer. Not here: the times (chain.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from protocol.errors import UsageError
from protocol.identity import peer_id
from protocol.outputs import check_target, write_whole
from trainer import chain as chains
from trainer.chain import CLAIMED, Chain, Span, Stage
from trainer.ledger import Ledger

WIDTH: Final = 48  # characters of a bar
MOST: Final = 10_000  # rollouts in one file: a viewer holds some hundred thousand slices
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_TRAINER: Final = 1  # its process in the file


def choose(ledger: Ledger, *, digest: str | None, last: int | None) -> list[Chain]:
    """The rollout with a digest (its first hex digits), or the last ones, oldest first: of those learned from, which
    are whole, where there are any. Raises UsageError."""
    if digest is None:
        found = chains.newest_learned(ledger, last or 1) or chains.newest(ledger, last or 1)
        if not found:
            raise UsageError("no trace has arrived in this run yet: wait for one")
        return found
    if not 0 < len(digest) <= 64 or set(digest.lower()) - set("0123456789abcdef"):
        raise UsageError(f"--digest {digest[:80]!r}: give the first hex digits of a trace's digest, such as 3fa9")
    found = chains.with_digest(ledger, digest)
    if not found:
        raise UsageError(f"no trace whose digest begins with {digest} in this run: leave --digest out for the newest")
    if len(found) > 1:
        raise UsageError(f"more than one trace digest begins with {digest}: give more digits")
    return found


# --- for a terminal ---


def waterfall(chain: Chain, complete_ms: int | None) -> list[str]:
    """Lines. `complete_ms`: when its group was complete, Unix ms."""
    spans = chain.spans()
    whole = max(1e-3, sum(each.seconds for each in spans))
    lines = [
        f"trace {chain.digest.hex()[:16]}… of {peer_id(chain.node)}",
        f"{chain.environment}, policy {chain.policy_version}, {chain.tokens:,} tokens; {_became(chain)}",
        "",
    ]
    start = 0.0
    for each in spans:
        title = each.stage.words + (" *" if each.claimed else "")
        lines.append(f"{title:13}{_short(each.seconds):>10}  {_bar(start, each.seconds, whole)}".rstrip())
        start += each.seconds
    lines += [f"{'in all':13}{_short(whole):>10}", ""]
    if chain.told is not None:
        lines += [
            "* the node's own figures, each the sum over its turns, which nobody checked.",
            f"  Together they are the {_short(chain.node_seconds)} that the trainer saw from lease to receipt",
        ]
    else:
        lines.append("the node did not say what its time went to")
    lines += _notes(chain, complete_ms)
    return lines


def _became(chain: Chain) -> str:
    if chain.judged_ms is None:
        return "not judged yet"
    how = "after an audit" if chain.audited else "without an audit"
    if chain.batch is not None:
        return f"accepted {how}, in the step that made policy {chain.batch}"
    reason = f" ({chain.reason})" if chain.reason else ""
    if chain.is_judged_again:
        return f"{'refused' if reason else 'accepted'}{reason} {how}, and judged again now"
    return f"{chain.state.value.lower().replace('_', ' ')}{reason} {how}"


def _notes(chain: Chain, complete_ms: int | None) -> Iterator[str]:
    if chain.judged_ms is None:
        return
    if chain.audited and chain.recomputed_ms is not None:
        waited = max(0, chain.recomputed_ms - chain.received_ms) / 1000
        yield f"verify: {_short(waited)} until {chain.auditor} began with it"
    if complete_ms is not None and chain.taken_ms is not None:
        grouped = max(0, min(complete_ms, chain.taken_ms) - chain.judged_ms) / 1000
        yield f"batch wait: {_short(grouped)} for the rest of its group, then for the step"


def _bar(start: float, seconds: float, whole: float) -> str:
    """From its place in a line of WIDTH characters, to an eighth of one; something for whatever there is."""
    eighths = max(round(8 * WIDTH * seconds / whole), int(seconds > 0))
    full, rest = divmod(eighths, 8)
    return " " * int(WIDTH * start / whole) + "█" * full + _EIGHTHS[rest].strip()


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:,.0f} ms"
    return f"{seconds:,.2f} s" if seconds < 600 else f"{seconds / 60:,.1f} min"


def table(found: Sequence[Chain]) -> list[str]:
    """Mean and 95th percentile of each stage over some rollouts."""
    nodes = len({each.node for each in found})
    lines = [f"{len(found):,} rollouts of {nodes} node{'s' if nodes > 1 else ''}", ""]
    lines.append(f"{'':13}{'mean':>10}{'95 %':>10}{'rollouts':>10}")
    for row in chains.spreads(found):
        title = row.stage.words + (" *" if row.stage in CLAIMED else "")
        lines.append(f"{title:13}{_short(row.mean):>10}{_short(row.p95):>10}{row.count:>10,}")
    return [*lines, "", "* the nodes' own figures, which nobody checked, within `node`: from lease to receipt"]


def as_object(chain: Chain) -> dict[str, Any]:
    """For `--json`."""
    fields = asdict(chain)
    names = {"digest": chain.digest.hex(), "node": peer_id(chain.node), "group_id": chain.group_id.hex()}
    stages = [{**asdict(each), "start_ms": round(each.start_ms, 3)} for each in chain.spans()]
    return {**fields, **names, "stages": stages}


# --- for a viewer ---


def write_events(path: Path, found: Sequence[Chain]) -> None:
    """Raises UsageError or StorageError."""
    what = "the time line"
    check_target(what, path)
    write_whole(what, path, json.dumps(trace_events(found), separators=(",", ":")).encode())


def trace_events(found: Sequence[Chain]) -> dict[str, Any]:
    """The file's object. Times in it are microseconds since the first lease."""
    zero = min(each.leased_ms for each in found)
    processes = {node: 2 + number for number, node in enumerate(sorted({each.node for each in found}))}
    events = [_named("process_name", _TRAINER, 0, "trainer")]
    for node, process in processes.items():
        events.append(_named("process_name", process, 0, f"node {peer_id(node)} (its own figures, unchecked)"))
    events += _of_nodes(found, processes, zero)
    events += _of_trainer(found, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_ms": zero}}


def _of_nodes(found: Sequence[Chain], processes: dict[bytes, int], zero: int) -> Iterator[dict[str, Any]]:
    """A slice from lease to receipt, with the stages in it: as many lines as the node had rollouts at once."""
    for node, process in processes.items():
        mine = [each for each in found if each.node == node]
        for line, chain in _lines(mine, lambda each: (each.leased_ms, each.received_ms)):
            whole = Span(Stage.NODE, chain.leased_ms, chain.node_seconds, False)
            told = {"environment": chain.environment, "policy": chain.policy_version, "tokens": chain.tokens}
            yield _slice(f"rollout {chain.digest.hex()[:8]}", whole, process, line, zero, _about(chain) | told)
            for span in chain.spans():
                if span.claimed:
                    yield _slice(span.stage.words, span, process, line, zero, {"source": "claimed by the node"})
            yield _arrow("s", chain, process, line, 1000 * (chain.received_ms - zero) - 1)


def _of_trainer(found: Sequence[Chain], zero: int) -> Iterator[dict[str, Any]]:
    """From the receipt on, in lines like those of a node; each step once, in a line of its own."""
    judged = [each for each in found if each.judged_ms is not None]
    yield _named("thread_name", _TRAINER, 0, "steps")
    for chain in {each.batch: each for each in found if each.batch is not None}.values():
        train = chain.spans()[-1]
        yield _slice(f"step to policy {chain.batch}", train, _TRAINER, 0, zero, {"policy": chain.batch})
    for line, chain in _lines(judged, lambda each: (each.received_ms, each.taken_ms or each.judged_ms or 0)):
        for span in chain.spans():
            if span.stage in (Stage.VERIFY, Stage.BATCH):
                yield _slice(span.stage.words, span, _TRAINER, 1 + line, zero, _about(chain))
        yield _arrow("t", chain, _TRAINER, 1 + line, 1000 * (chain.received_ms - zero))
        if chain.taken_ms is not None:
            yield _arrow("f", chain, _TRAINER, 0, 1000 * (chain.taken_ms - zero))


def _about(chain: Chain) -> dict[str, Any]:
    return {"trace": chain.digest.hex(), "state": chain.state.value, "audited": chain.audited}


def _lines(found: Iterable[Chain], times: Any) -> Iterator[tuple[int, Chain]]:
    """Each in the first line where nothing is at its time."""
    ends: list[int] = []
    for chain in sorted(found, key=times):
        start, end = times(chain)
        line = next((number for number, free in enumerate(ends) if free <= start), len(ends))
        ends[line : line + 1] = [max(end, start + 1)]
        yield line, chain


def _slice(name: str, span: Span, process: int, line: int, zero: int, about: dict[str, Any]) -> dict[str, Any]:
    kind = "claimed" if span.claimed else "seen"
    start = round(1000 * (span.start_ms - zero))
    # Rounded at both ends: a stage must not reach beyond the slice that it lies in.
    length = round(1000 * (span.start_ms - zero) + 1e6 * span.seconds) - start
    place = {"pid": process, "tid": line, "ts": start, "dur": length}
    return {"name": name, "cat": kind, "ph": "X", **place, "args": about}


def _arrow(phase: str, chain: Chain, process: int, line: int, at: float) -> dict[str, Any]:
    """Arrows bind to the slice at their time and line."""
    place = {"pid": process, "tid": line, "ts": round(max(0, at))}
    return {"name": "rollout", "cat": "way", "ph": phase, "id": chain.sequence, "bp": "e", **place}


def _named(what: str, process: int, line: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": line, "args": {"name": name}}
