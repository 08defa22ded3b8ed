"""A node that draws with vLLM takes part in a run beside one that draws with transformers, as real processes: the
same auditor admits both, and measures nothing of the one that it does not accept.

The policy is random, since the embedded one has heads that vLLM's CPU kernels do not; so nothing is learned and the
policy stays, which leaves many traces of one version. `make run-vllm` plays it with SmolLM2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import codec
from tests.e2e.network import Network, call, wait_until
from tests.vllm.conftest import make_policy
from trainer.export import trace_file
from trainer.rundir import open_run

PAIR = "vllm float32 cpu by transformers float32 cpu"
ENOUGH = 120  # accepted traces of the vLLM node: a calibration needs 1,024 tokens, and these have a dozen each


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    policy = make_policy(tmp_path / "policy", 7)
    made = Network(tmp_path, init=("--policy", policy, "--preset", "embedded", "--environment", "tools8@1"))
    try:
        yield made
    finally:
        made.close()


def test_both_engines_are_admitted_by_the_same_auditor(network: Network) -> None:
    network.serve()
    processes = {
        "vllm": network.join("vllm", "--engine", "vllm", "--slots", "8", "--threads", "1"),
        "transformers": network.join("transformers", "--engine", "transformers", "--slots", "8", "--threads", "1"),
    }

    def admitted(name: str, passed: int) -> bool:
        assert processes[name].poll() is None, network.log(name)
        return network.node(name).get("audits_passed", 0) >= passed

    wait_until(lambda: admitted("transformers", 16), 300, f"16 audits passed: {network.log('transformers')}")
    wait_until(lambda: admitted("vllm", ENOUGH), 600, f"{ENOUGH} audits passed: {network.log('vllm')}")
    for name in processes:
        node = network.node(name)
        assert node["engine"].startswith(name), node["engine"]
        assert (node["refused"], node["audits_failed"]) == (0, 0)

    # Until a person has measured the pair, all its traces are audited, by limits that are as strict in float32.
    note = dict(network.ledger.view("SELECT pair, note FROM pairs WHERE pair = ?", (PAIR,))[0])
    assert "rlverify calibrate --traces" in note["note"], note
    assert network.node("vllm")["rate"] == 1

    calibration = calibrate_by_the_traces_of(network, "vllm")
    (network.run.calibrations).mkdir(exist_ok=True)
    (network.run.calibrations / calibration.name).write_bytes(calibration.read_bytes())
    calibrated = "SELECT 1 FROM calibrations WHERE pair = ?"
    wait_until(lambda: bool(network.ledger.view(calibrated, (PAIR,))), 120, "the auditor takes the calibration")
    before = network.node("vllm")["audits_passed"]
    wait_until(lambda: admitted("vllm", before + 8), 300, f"8 audits by the calibration: {network.log('vllm')}")
    assert (network.node("vllm")["refused"], network.node("vllm")["audits_failed"]) == (0, 0)
    assert (network.node("transformers")["refused"], network.node("transformers")["audits_failed"]) == (0, 0)


def calibrate_by_the_traces_of(network: Network, name: str) -> Path:
    """What a person does who trusts this node: rlverify measures its traces by a prefill of its own."""
    run = open_run(network.run.path)
    traces = network.folder / "traces"
    traces.mkdir()
    rows = network.ledger.view(
        "SELECT digest FROM submissions WHERE node = ? AND state = 'ACCEPTED' AND trace IS NOT NULL",
        (network.node(name)["node"],),
    )
    for row in rows:
        submission = network.ledger.submission(row["digest"])
        assert submission is not None
        (traces / f"{row['digest'].hex()}.msgpack").write_bytes(
            codec.encode(trace_file(run, network.ledger, submission))
        )
    out = network.folder / "vllm.msgpack"
    words = ("--policy", network.run.policy(0), "--worker-dtype", "float32", "--verifier-dtype", "float32")
    made = call("verify.cli", "calibrate", *words, "--traces", traces, "--out", out, "--key", out.with_suffix(".key"))
    assert made.returncode == 0, made.stdout + made.stderr
    return out


def test_this_environment_has_its_own_rlnode() -> None:
    """`make run-vllm` starts it by its path."""
    assert (Path(sys.executable).parent / "rlnode").exists()
