"""`rlnode reaudit` against a real trainer: gateway and second auditor as processes, over libp2p."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from node.store import run_folder, save_address
from protocol import codec
from protocol.envelope import Signed, seal
from protocol.identity import save_identity
from protocol.net import p2p
from protocol.run import EnvironmentShare, RunAddress
from protocol.verdict import Outcome, Reason, Verdict
from tests.trainer.scripted_node import Client, Script, audit_result, dialled, identity_of
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.rundir import Run
from trainer.serve import Supervisor, children_of

ROOT = Path(__file__).parents[2]
WHO = identity_of("node")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = TrainerConfig(
        listen="/ip4/127.0.0.1/tcp/0", group_size=2, max_turn_tokens=14, max_tokens=64, audit_floor=1.0
    )
    shares = (EnvironmentShare("tools8@1", "", 1),)
    made = init_run(tmp_path / "run", name="test", policy="embedded", environments=shares, config=config)
    made.folder.logs.mkdir(exist_ok=True)
    return made


def test_a_second_auditor_is_started_for_a_node_that_asks_and_confirms_what_is_true(run: Run, tmp_path: Path) -> None:
    """The trace is made up, so a real auditor refuses it too: for its own reason, and for good."""
    ledger = Ledger(run.folder.ledger)
    children = [child for child in children_of(run) if child.name in ("gateway", "auditor-second")]
    supervisor = Supervisor(run, ledger, children)
    try:
        until(run.folder.address.exists, supervisor)
        digest = trio.run(submit_and_be_refused, run, ledger)
        home = home_of_the_node(run, tmp_path / "home", digest)
        assert rlnode_reaudit(home) == (0, True)
        until(lambda: len(verdicts(ledger)) == 2, supervisor)
        first, second = verdicts(ledger)
        assert first.verifier.engine == "test" and second.verifier.engine != "test"
        assert second.outcome is Outcome.REFUSED and second.audited
        assert rlnode_reaudit(home) == (1, False)
        until(lambda: children[1].process is None, supervisor)
        assert supervisor.news == []
    finally:
        supervisor.stop()
        ledger.close()


async def submit_and_be_refused(run: Run, ledger: Ledger) -> bytes:
    """The digest of a trace that auditor-0, played by the test, refused."""
    address = RunAddress.parse(run.folder.address.read_text()).dial
    async with p2p.open_host(WHO) as host, dialled(host, address, WHO, run.run) as client:
        await client.hello()
        (lease,) = await client.leases(1)
        signed = seal(WHO, Script(run.folder.policy(0)).trace(lease, 0))
        await client.send(signed)
        await refuse(client, ledger)
        return signed.digest


async def refuse(client: Client, ledger: Ledger) -> None:
    with trio.fail_after(60):
        while not (rows := ledger.claim_audits("auditor-0", 0, 1)):
            await client.beat()
        ledger.finish_audit(rows[0].sequence, codec.encode(audit_result(Reason.MARGIN)), None)
        await client.verdicts(1)


def home_of_the_node(run: Run, home: Path, digest: bytes) -> Path:
    home.mkdir()
    save_identity(WHO, home / "key")
    save_address(home, RunAddress.parse(run.folder.address.read_text()))
    folder = run_folder(home, run.run)
    folder.mkdir(parents=True)
    (folder / "verdicts.log").write_text(json.dumps({"trace": digest.hex()}) + "\n")
    return home


def rlnode_reaudit(home: Path) -> tuple[int, bool]:
    """Its exit code, and whether it was granted, for the one trace of this home."""
    (log,) = (home / "runs").glob("*/verdicts.log")
    prefix = json.loads(log.read_text())["trace"][:6]
    words = [sys.executable, "-m", "node.cli", "reaudit", prefix, "--json", "--home", str(home)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["granted"]


def verdicts(ledger: Ledger) -> list[Verdict]:
    signed = [codec.decode(Signed, raw) for _, raw in ledger.verdicts_after(WHO.node, 0, 10)]
    return [codec.decode(Verdict, each.payload) for each in signed]


def until(holds: Callable[[], object], supervisor: Supervisor, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, supervisor.news
        supervisor.look()
        time.sleep(0.02)
