"""rlverify inspect: a trace as a person reads it, with and without recomputing, and whatever a node put into it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol import codec
from protocol.policy import policy_root
from protocol.trace import Span, Trace, TraceFile
from protocol.verdict import Fingerprint
from tests.studio import EMBEDDED
from verify.cli import main
from verify.inspect import CHUNKS, TURNS, _chunk_table
from verify.prefill import Passage, Verifier
from verify.reading import Reading, strip
from verify.toploc import ChunkResult

Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Exit code, output and errors of `rlverify inspect` on a trace file, on a terminal wide enough for a line."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(file: TraceFile, *arguments: str) -> tuple[int, str, str]:
        path = tmp_path / "trace.msgpack"
        path.write_bytes(codec.encode(file))
        code = main(["inspect", str(path), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def with_one_token_edited(trace: Trace) -> tuple[Trace, int]:
    """The trace with another token in the middle of its first turn, and where."""
    offset = trace.spans[0].length // 2
    tokens = list(trace.tokens)
    tokens[offset] += 1 if tokens[offset] < 100 else -1
    return replace(trace, tokens=tuple(tokens)), offset


def test_without_recomputing_margins_are_left_out_and_it_says_so(long_rollout, show: Show) -> None:
    code, text, _ = show(long_rollout.file())
    assert code == 0 and "not recomputed: give --recompute with --policy" in text
    assert " ".join(map(str, long_rollout.trace.pieces()[0][1][:64])) in text
    assert json.loads(show(long_rollout.file(), "--json")[1])["recomputed"] is None


def test_an_honest_trace_is_shown_with_its_margins_proofs_and_times(long_rollout, show: Show) -> None:
    code, text, _ = show(long_rollout.file(), "--policy", str(EMBEDDED), "--recompute")
    generated = len(long_rollout.trace.logprobs)
    assert code == 0 and f"{generated} of {generated} tokens are those that the seed draws" in text
    assert "generated tokens a second" in text and "received" in text
    turns = [ids for kind, ids in long_rollout.trace.pieces() if kind == 0]
    assert [line.split()[1] for line in text.splitlines() if line.strip().startswith("margins ")] == [
        "·" * len(ids) for ids in turns
    ]
    assert "largest margins" not in text
    chunks = [line.split() for line in text.splitlines() if line.strip().startswith("0:")]
    assert chunks[0][1:5] == ["0", "0", "0.000", "0"]


def test_the_json_form_holds_every_number_that_is_shown(long_rollout, show: Show) -> None:
    trace = long_rollout.trace
    found = json.loads(show(long_rollout.file(), "--policy", str(EMBEDDED), "--recompute", "--json")[1])
    recomputed: dict[str, Any] = found["recomputed"]
    assert recomputed["error"] is None and recomputed["worst"] == []
    assert recomputed["margins"] == [0.0] * len(trace.logprobs)
    assert recomputed["logprobs"] == pytest.approx(trace.logprobs, abs=1e-4)
    assert [(c["start"], c["exponent_mismatches"], c["mantissa_mean"]) for c in recomputed["chunks"]] == [
        (32 * number, 0, 0.0) for number in range(len(trace.proofs))
    ]
    assert recomputed["verifier"]["dtype"] == "float32"
    assert found["tokens_a_second"] == pytest.approx(len(trace.logprobs) / found["seconds"])
    assert [span["ids"] for span in found["spans"]] == [list(ids) for _, ids in trace.pieces()]


def test_an_edited_token_is_named_with_the_token_that_the_seed_draws(long_rollout, show: Show) -> None:
    edited, offset = with_one_token_edited(long_rollout.trace)
    file = long_rollout.file(trace=edited)
    recomputed = json.loads(show(file, "--policy", str(EMBEDDED), "--recompute", "--json")[1])["recomputed"]
    (found,) = [worst for worst in recomputed["worst"] if worst["offset"] == offset]
    assert found["token"] == edited.tokens[offset] and found["drawn"] == long_rollout.trace.tokens[offset]
    assert found["margin"] == recomputed["margins"][offset] > 0
    assert found["logprob"] == recomputed["logprobs"][offset]
    assert found["claimed"] == edited.logprobs[offset]
    margins = [worst["margin"] for worst in recomputed["worst"]]
    assert margins == sorted(margins, reverse=True) and len(margins) <= 5
    text = show(file, "--policy", str(EMBEDDED), "--recompute")[1]
    assert "largest margins" in text and f"{found['drawn']} '{found['drawn_text']}'" in text


def test_what_the_seed_draws_is_what_the_engine_drew(long_rollout) -> None:
    trace, lease = long_rollout.trace, long_rollout.lease
    offsets = trace.generated()
    passage = Passage(lease.prompt, trace.tokens, offsets, lease.seed_of(trace.slot) or 0, lease.temperature)
    assert Verifier(EMBEDDED).drawn(passage, offsets) == [trace.tokens[offset] for offset in offsets]


def test_a_trace_that_cannot_be_recomputed_is_shown_with_the_reason(long_rollout, show: Show) -> None:
    trace = long_rollout.trace
    arguments = ("--policy", str(EMBEDDED), "--recompute")
    for broken, reason in (
        (replace(trace, proofs=(b"\xff" * 258, *trace.proofs[1:])), "proof 0: modulus 65535 is not in"),
        (replace(trace, proofs=()), "0 proofs for"),
        (replace(trace, tokens=(60_000, *trace.tokens[1:])), "token ids outside"),
        (replace(trace, logprobs=trace.logprobs[1:]), "do not fit each other"),
        (replace(trace, slot=63), "is not leased"),
    ):
        code, text, _ = show(long_rollout.file(trace=broken), *arguments, "--json")
        assert code == 0 and reason in json.loads(text)["recomputed"]["error"]
        code, text, _ = show(long_rollout.file(trace=broken), *arguments)
        assert code == 0 and "not recomputed: " in text


def test_recomputing_needs_the_leased_policy_and_a_device_that_is_there(
    long_rollout, show: Show, tmp_path: Path
) -> None:
    code, _, error = show(long_rollout.file(), "--recompute")
    assert code == 2 and "--policy" in error
    other = replace(long_rollout.lease, policy_root=bytes(32))
    code, _, error = show(long_rollout.file(lease=other), "--recompute", "--policy", str(EMBEDDED))
    assert code == 2 and policy_root(EMBEDDED).hex()[:16] in error
    code, _, error = show(long_rollout.file(), "--recompute", "--policy", str(EMBEDDED), "--device", "abacus")
    assert code == 2 and "not a device" in error


def test_what_a_node_or_a_model_wrote_cannot_drive_the_terminal(long_rollout, studio, show: Show) -> None:
    trace = long_rollout.trace
    newline = studio.tokenizer.encode("\n")
    tokens = (*newline, *trace.tokens[len(newline) :])
    engine = replace(trace.engine, name="\x1b[2Jcleared [bold]loud[/]", device="cpu\r\x07")
    file = long_rollout.file(trace=replace(trace, tokens=tokens, engine=engine))
    for arguments in ((), ("--recompute",)):
        _, text, _ = show(file, "--policy", str(EMBEDDED), *arguments)
        assert not any(ord(character) < 32 and character != "\n" for character in text)
        assert "\\x1b[2Jcleared [bold]loud[/]" in text and "cpu\\r\\x07" in text
        assert any(line.strip().startswith("generated") and "\\n" in line for line in text.splitlines())


def test_a_strip_of_margins_stays_short_however_long_the_turn() -> None:
    lines, each = strip((0.0, 0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 1.0, 9.0))
    assert (lines, each) == (["·▁▂▃▄▅▆▇█"], 1)
    lines, each = strip((0.0,) * 30_000 + (5.0,) + (0.0,) * 2_000)
    assert len(lines) <= 4 and max(map(len, lines)) <= 64 and each == 126
    assert "".join(lines).count("█") == 1
    assert strip(()) == ([], 1)


def of_turns(trace: Trace, turns: int, tokens: int) -> Trace:
    """So many drawn and observed turns of so many tokens each."""
    spans = tuple(Span(turn % 2, tokens) for turn in range(turns))
    generated = sum(span.length for span in spans if span.kind == 0)
    ids = tuple(1_000 + place // tokens for place in range(turns * tokens))
    return replace(trace, tokens=ids, spans=spans, logprobs=(-0.5,) * generated)


def test_of_a_huge_trace_both_ends_are_shown_and_how_to_see_the_rest(long_rollout, show: Show) -> None:
    huge = long_rollout.file(trace=of_turns(long_rollout.trace, 101, 300))
    code, text, _ = show(huge, "--policy", str(EMBEDDED))
    assert code == 0 and len(text) < 60_000
    assert f"… {101 - TURNS} more turns, --all to see" in text and "… 236 more, --all to see" in text
    shown = set(re.findall(r"\b1\d{3}\b", text))
    assert {"1000", "1100"} <= shown and "1050" not in shown
    code, whole, _ = show(huge, "--policy", str(EMBEDDED), "--all")
    assert code == 0 and "--all" not in whole
    assert set(re.findall(r"\b1\d{3}\b", whole)) >= {str(1_000 + turn) for turn in range(101)}
    assert len(json.loads(show(huge, "--json")[1])["spans"]) == 101


def test_one_endless_turn_is_cut_too(long_rollout, studio, show: Show) -> None:
    one = of_turns(long_rollout.trace, 1, 30_000)
    huge = long_rollout.file(trace=replace(one, tokens=studio.tokenizer.encode("a")[:1] * 30_000))
    text = show(huge, "--policy", str(EMBEDDED))[1]
    assert len(text) < 20_000 and "more characters, --all to see" in text and "… 29,936 more, --all to see" in text


def test_of_many_proofs_both_ends_are_shown() -> None:
    chunk = ChunkResult(0, 32, 0, 0, 0.0, 0.0, 0, 128)
    chunks = tuple(replace(chunk, start=32 * number) for number in range(100))
    reading = Reading(Fingerprint("", "", "", ""), (0.0,), (0.0,), chunks, ())
    for whole, count in ((False, CHUNKS), (True, 100)):
        table = _chunk_table(reading, whole)
        assert table.row_count == count and bool(table.caption) is not whole
