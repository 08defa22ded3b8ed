"""rlverify as scripts meet it: exit codes that say no more than was found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import codec
from protocol.calibration import Calibration, Pair
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.limits import MAX_TRACE_BYTES
from protocol.trace import TraceFile
from tests.studio import EMBEDDED
from tests.verify import small_log
from tests.verify.small_log import SOMEONE, VALUES, SmallLog
from verify.cli import main
from verify.files import worker_of

VECTORS = Path(__file__).parents[1] / "vectors"


def test_a_reader_that_goes_away_is_no_verdict(long_rollout, tmp_path: Path) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(codec.encode(long_rollout.file()))
    process = subprocess.Popen(
        [sys.executable, "-m", "verify.cli", "inspect", str(path), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(60), errors) == (141, "")


def calibrated(by: tuple[str, str, str], worker: tuple[str, str, str]) -> Calibration:
    """The calibration of SPEC's vectors, for another pair."""
    content = json.loads((VECTORS / "calibration.json").read_text())
    entry = next(each for each in content["valid"] if each["name"] == "calibration")
    made = codec.decode(Calibration, bytes.fromhex(entry["bytes"]))
    return replace(made, run=bytes(32), pair=Pair(*worker, *by))


@pytest.mark.parametrize(
    ("engine", "device", "told"),
    [
        ("transformers", "cpu", None),
        ("transformers", "cuda", "by transformers on cuda and is used here by transformers on cpu"),
        ("vllm", "cpu", "by vllm on cpu and is used here by transformers on cpu"),
    ],
)
def test_a_calibration_of_another_verifier_is_used_and_said(
    long_rollout, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, device: str, told: str | None
) -> None:
    trace, file = tmp_path / "trace.msgpack", tmp_path / "calibration.msgpack"
    trace.write_bytes(codec.encode(long_rollout.file()))
    made = calibrated((engine, "float32", device), worker_of(long_rollout.trace))
    file.write_bytes(codec.encode(seal(Identity(b"\7" * 32), made)))
    words = ["check", str(trace), "--policy", str(EMBEDDED), "--calibration", str(file)]
    main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["audited"] and found["calibration"] is not None
    assert len(found["notes"]) == (told is not None) and all(told in note for note in found["notes"])
    main(words)
    assert ("worth knowing: the calibration was measured by" in capsys.readouterr().out) == (told is not None)


def test_a_trace_over_the_limit_is_told_with_what_to_do(
    long_rollout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.msgpack"
    file: TraceFile = long_rollout.file()
    path.write_bytes(codec.encode(replace(file, trace=replace(file.trace, payload=bytes(MAX_TRACE_BYTES + 1)))))
    assert main(["check", str(path), "--policy", str(EMBEDDED)]) == 2
    told = capsys.readouterr().err
    assert "at most" in told and "[TOO_LARGE]: give a file that `rltrainer export-trace` wrote" in told
    assert len(told) < 400


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("calibrate", "--tokens"), "1 to 131,072"),
        (("calibrate", "--traces-count"), "1 to 10,000"),
        (("controls", "--tokens"), "0 to 131,072"),
        (("controls", "--traces"), "1 to 10,000"),
        (("controls", "--honest"), "0 to 10,000"),
        (("controls", "--calibration"), "0 to 10,000"),
        (("controls", "--seed"), "0 to 4,294,967,295"),
        (("audit", "--sample"), "0 to 1,048,576"),
    ],
)
@pytest.mark.parametrize("number", ["99999999999999999999", "9" * 5000, "-1", "x", "²"])
def test_a_number_without_end_is_refused_before_any_work(
    words: tuple[str, str], most: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([words[0], f"{words[1]}={number}"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and words[1] in told and f"is not a whole number from {most}" in told, told
    assert len(told) < 200


# --- logs ---


def sealed_by_another_run(log: SmallLog) -> None:
    """As if the seal of another run's epoch 0 stood here: another trainer's, of another run."""
    log.epochs[0] = log.seal(log.epochs[0], 0, run=bytes(32))
    signed = log.epochs[0].epoch
    assert signed is not None
    log.epochs[0] = replace(log.epochs[0], epoch=replace(signed, signer=SOMEONE.node))


def value_off_the_chain(log: SmallLog) -> None:
    log.epochs[1] = log.seal(log.epochs[1], 1, audit_value=VALUES[2])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (sealed_by_another_run, r"epoch 0, seal: the epoch is signed by 12D3K\w+, not by 12D3K\w+"),
        (value_off_the_chain, r"epoch 1, seal: the value it reveals is not of the chain"),
    ],
)
def test_a_log_with_a_foreign_seal_or_value_disagrees_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[SmallLog], None], told: str
) -> None:
    log = small_log.make().copy()
    change(log)
    assert main(["audit", str(log.write(tmp_path / "log"))]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^disagrees {told}", out, re.M), out
    assert "DISAGREE" in out.splitlines()[-1]


def test_a_log_beside_the_genesis_of_another_run_is_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], long_rollout
) -> None:
    folder = small_log.make().write(tmp_path / "log")
    (folder / "genesis.msgpack").write_bytes(codec.encode(long_rollout.file().genesis))
    assert main(["audit", str(folder)]) == 2
    assert "genesis.msgpack is of run" in capsys.readouterr().err
