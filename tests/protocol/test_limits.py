"""SPEC chapter 5 and protocol/limits.py are one table."""

from __future__ import annotations

from pathlib import Path

from protocol import limits

SPEC = Path(__file__).parent.parent.parent / "SPEC.md"


def table() -> dict[str, tuple[str, ...]]:
    """Name → value, unit, enforced by, error."""
    chapter = SPEC.read_text().split("\n## 5 Limits\n")[1].split("\n## 6 ")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in chapter.splitlines()
        if line.startswith("| `")
    ]
    return {name.strip("`"): rest for name, *rest in rows}


def code() -> dict[str, str]:
    """As the SPEC writes them."""
    found = {name: value for name, value in vars(limits).items() if name.isupper()}
    return {
        name: ".".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}" for name, value in found.items()
    }


def test_spec_and_code_hold_the_same_limits() -> None:
    assert {name: value for name, (value, *_) in table().items()} == code()


def test_every_limit_says_its_unit_who_enforces_it_and_the_error() -> None:
    for name, cells in table().items():
        assert len(cells) == 4 and all(cells), name


def test_limits_that_follow_from_one_another_do() -> None:
    assert limits.MAX_PROOFS == limits.MAX_TRACE_TOKENS // limits.PROOF_CHUNK_TOKENS
    assert limits.MAX_BLOB_BYTES + 1024 < limits.MAX_FRAME_BYTES
    assert limits.MAX_TRACE_BYTES + 1024 < limits.MAX_FRAME_BYTES
    assert limits.HEARTBEAT_SECONDS * 3 < limits.SESSION_SILENCE_SECONDS
    assert limits.REQUEST_SECONDS < limits.SESSION_SILENCE_SECONDS
    # The largest trace the field tables admit: tokens, logprobs, proofs, spans, and the rest.
    proofs = limits.MAX_PROOFS * (3 + 2 + 2 * limits.PROOF_TOP_K)
    largest = 2 * 4 * limits.MAX_TRACE_TOKENS + proofs + 32 * limits.MAX_SPANS + 4_096
    assert largest <= limits.MAX_TRACE_BYTES
