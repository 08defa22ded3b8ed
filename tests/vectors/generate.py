"""Writes the test vectors: `python tests/vectors/generate.py` rewrites them, `--check` says whether they differ.

Deterministic: fixed keys, fixed times. Bytes come from wire.py, the SPEC's encoding written a second time, and
faults are made by hand from its parts. Not here: running them (tests/protocol/test_vectors.py).

An entry names an `op`, its inputs, and either `value` (what a correct implementation answers) or `error` (the
exact code). Bytes are hex; a u64 is a plain JSON integer: read it with a parser that keeps 64 bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import chapter6
import chapter7
import chapter8
import chapter9
import delta
import evidence
import generate_numeric
import tasks

HERE = Path(__file__).resolve().parent

SECTIONS = {
    "identity.json": chapter6.identity,
    "codec.json": chapter7.codec,
    "genesis.json": chapter8.genesis,
    "address.json": chapter8.address,
    "policy.json": chapter8.policy,
    "delta.json": delta.delta,
    "lease.json": chapter8.lease,
    "seed.json": chapter8.seed,
    "trace.json": chapter8.trace,
    "receipt.json": chapter8.receipt,
    "verdict.json": chapter8.verdict,
    "trace_file.json": chapter8.trace_file,
    "calibration.json": evidence.calibration,
    "log.json": evidence.log,
    "membership.json": chapter8.membership,
    "tasks.json": tasks.tasks,
    "frames.json": chapter9.frames,
    "messages.json": chapter9.messages,
}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def build() -> dict[str, str]:
    """File name → text, for every vector file."""
    files = {name: make() for name, make in SECTIONS.items()}
    return {name: _text(content) for name, content in {**files, **generate_numeric.build()}.items()}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    files = build()
    if arguments:
        stale = [name for name, text in files.items() if not _same(HERE / name, text)]
        print(f"out of date: {', '.join(stale)}" if stale else f"{len(files)} vector files are up to date")
        return 1 if stale else 0
    for name, text in files.items():
        (HERE / name).write_text(text)
    print(f"wrote {len(files)} vector files")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
