"""Whatever a trace makes an auditor do, the gateway lives, and nobody is blamed: real auditor processes that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import trio

from protocol import codec
from protocol.envelope import seal, unseal
from protocol.errors import UsageError
from protocol.run import EnvironmentShare
from protocol.trace import Trace, TraceFile
from protocol.verdict import Outcome, Reason, Verdict
from tests.trainer.scripted_node import Script, trainer_at_work
from trainer import cli
from trainer.config import TrainerConfig
from trainer.guard import Guard, resident_mib
from trainer.init import init_run
from trainer.rundir import Run
from trainer.serve import Child, Supervisor

HERE = Path(__file__).parent
SECONDS = 3.0  # of a batch
MEMORY_MIB = 1024  # more than an auditor of the embedded policy holds


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    config = TrainerConfig(
        group_size=2, max_turn_tokens=14, max_tokens=64, audit_floor=1.0, auditor_seconds=SECONDS,
        auditor_memory_mib=MEMORY_MIB,
    )  # fmt: skip
    shares = (EnvironmentShare("tools8@1", "", 1),)
    return init_run(tmp_path / "run", name="test", policy="embedded", environments=shares, config=config)


def deadly(run: Run, ways: str, marks: Path) -> Child:
    marks.mkdir()
    script, path = str(HERE / "deadly_auditor.py"), str(run.folder.path)
    arguments = (script, ways, str(marks), path, "--name", "auditor-0")
    return Child("auditor-0", arguments, run.folder.logs / "auditor-0.log", guard=Guard(run.config))


@pytest.mark.parametrize(
    ("ways", "causes"),
    [
        ("killed,killed", ["was killed by SIGKILL", "was killed by SIGKILL"]),
        ("frozen,hoarding", ["took more than 3 s for one batch (auditor_seconds)", "(auditor_memory_mib)"]),
    ],
)
def test_a_trace_that_two_auditors_die_on_is_put_aside_and_blames_nobody(
    run: Run, tmp_path: Path, ways: str, causes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.folder.logs.mkdir(exist_ok=True)
    trio.run(scenario, run, ways, causes, tmp_path / "marks")
    assert cli.main(["quarantine", str(run.folder.path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert all(cause in listed["cause"] for cause in causes)
    assert cli.main(["quarantine", str(run.folder.path)]) == 0
    text = capsys.readouterr().out
    assert listed["file"] in text and listed["node"] in text and "rlverify check" in text
    file = codec.decode(TraceFile, Path(listed["file"]).read_bytes())
    assert file.trace.digest.hex() == listed["trace"] and unseal(Trace, file.trace).slot == 0


async def scenario(run: Run, ways: str, causes: list[str], marks: Path) -> None:
    """From the trace to the verdict, with a gateway that answers all the while."""
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        signed = seal(client.who, Script(run.folder.policy(0)).trace(lease, 0))
        await client.send(signed)
        supervisor = Supervisor(run, trainer.ledger, [deadly(run, ways, marks)])
        try:
            verdicts: list[Verdict] = []
            with trio.move_on_after(240):  # three starts of torch, on a machine that may do ten other things
                while not verdicts:
                    supervisor.look()
                    verdicts = await client.beat()
                    await trio.sleep(0.02)
            assert verdicts, supervisor.news
        finally:
            supervisor.stop()
        assert len(list(marks.iterdir())) == 2, "a third auditor does not try"
        assert [said for said, cause in zip(supervisor.news, causes, strict=True) if cause not in said] == []
        (verdict,) = verdicts
        assert (verdict.outcome, verdict.reason) == (Outcome.NOT_JUDGED, Reason.VERIFIER_FAULT)
        node = client.who.node
        assert trainer.ledger.audit_record(node) == (0, 0) and trainer.ledger.latest_audits(node, 10) == []
        (fault,) = trainer.ledger.view("SELECT text FROM events WHERE kind = 'fault'")
        assert "2 auditors died" in fault["text"] and f"quarantine/{signed.digest.hex()}" in fault["text"]
        again = [each for each in await client.leases(8) if each.group_id == lease.group_id]
        assert lease.slots[0] in [slot for each in again for slot in each.slots], "its slot is leased again"


def test_a_guard_counts_from_when_an_auditor_began_a_batch_whatever_the_clock_says() -> None:
    guard = Guard(TrainerConfig(auditor_seconds=10.0))
    me = os.getpid()
    assert guard.cause(me, None, 0.0) == ""
    assert guard.cause(me, 5_000, 100.0) == guard.cause(me, 5_000, 110.0) == ""
    assert "auditor_seconds" in guard.cause(me, 5_000, 110.1)
    assert guard.cause(me, 1, 111.0) == "", "another batch, by a clock that was set back"
    assert guard.cause(me, None, 999.0) == ""


def test_memory_is_read_of_a_living_process_and_is_nothing_of_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import guard

    held = psutil.Process().memory_info().rss / guard.MIB
    assert abs(resident_mib(os.getpid()) - held) < 64
    assert abs(guard._asked_of_ps(os.getpid()) - held) < 64
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert resident_mib(ended.pid) == 0


def test_nothing_in_quarantine_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.folder.quarantine.mkdir()
    (run.folder.quarantine / "notes.msgpack").touch()
    assert cli.main(["quarantine", str(run.folder.path)]) == 0
    assert capsys.readouterr().out == "nothing is in quarantine\n"


@pytest.mark.parametrize("setting", [{"auditor_seconds": 0.0}, {"auditor_memory_mib": -1}])
def test_limits_that_make_no_sense_are_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(setting))):
        TrainerConfig(**setting)  # type: ignore[arg-type]
