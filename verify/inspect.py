"""Shows a trace: who drew it under which lease, its turns as text over token ids, and its verdict.

Judges nothing (judge.py does). Text comes from the policy's tokenizer when its folder is given; control
characters a model wrote are escaped, so a trace cannot drive a terminal.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from protocol import identity
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.trace import SpanKind
from verify.files import Evidence, receipt_fits
from verify.toploc import count_chunks


def as_json(evidence: Evidence, policy: Path | None) -> dict[str, Any]:
    trace, lease, verdict = evidence.trace, evidence.lease, evidence.verdict
    tokenizer = None if policy is None else PolicyTokenizer.load(policy)
    return {
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
        "seconds": (trace.finished_ms - trace.started_ms) / 1000,
        "receipt": None if evidence.receipt is None else {"fits": receipt_fits(evidence)},
        "verdict": None if verdict is None else {"outcome": str(verdict.outcome), "reason": verdict.reason},
    }


def print_trace(evidence: Evidence, policy: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

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
        ("times", f"{_utc(trace.started_ms)}, {(trace.finished_ms - trace.started_ms) / 1000:.2f} s"),
        ("reward", f"{trace.reward:g} (as the node says)"),
        ("tokens", f"{len(trace.tokens)}, of which {len(trace.logprobs)} generated, {len(trace.proofs)} proofs"),
        ("proofs", "one each 32 generated tokens" if _count_fits(evidence) else "a wrong number"),
    ):
        facts.add_row(f"[bold]{label}[/]", value)
    console.print(facts)
    tokenizer = None if policy is None else PolicyTokenizer.load(policy)
    _print_ids(console, "prompt", "cyan", lease.prompt, tokenizer)
    for kind, ids in trace.pieces():
        generated = kind is SpanKind.GENERATED
        _print_ids(
            console, "generated" if generated else "observed", "green" if generated else "yellow", ids, tokenizer
        )
    if evidence.verdict is not None:
        reason = f" ({evidence.verdict.reason})" if evidence.verdict.reason else ""
        audited = "audited" if evidence.verdict.audited else "not audited"
        console.print(f"[bold]trainer's verdict[/]  {evidence.verdict.outcome}{reason}, {audited}")


def _print_ids(console: Any, label: str, colour: str, ids: tuple[int, ...], tokenizer: PolicyTokenizer | None) -> None:
    from rich.text import Text

    text = _text(tokenizer, ids)
    if text is not None:
        console.print(Text(f"{label:>10}  ", style=f"bold {colour}") + Text(text, style=colour))
    shown = " ".join(map(str, ids[:64])) + (f" … {len(ids) - 64} more" if len(ids) > 64 else "")
    console.print(Text(f"{'' if text is not None else label:>10}  {shown}", style="dim"))


def _text(tokenizer: PolicyTokenizer | None, ids: tuple[int, ...]) -> str | None:
    """The text of ids with everything but printable characters escaped."""
    if tokenizer is None:
        return None
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in tokenizer.decode(ids)
    )


def _count_fits(evidence: Evidence) -> bool:
    return len(evidence.trace.proofs) == count_chunks(len(evidence.trace.logprobs))


def _utc(milliseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
