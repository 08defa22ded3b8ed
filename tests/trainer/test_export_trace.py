"""`rltrainer export-trace`: a trace, and its verdict and calibration alone, as `rlverify check` takes them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer.office
from protocol.run import EnvironmentShare
from tests.trainer.scripted_node import Script, calibrate, on_trio, trainer_at_work
from trainer.cli import main
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.rundir import Run
from verify.cli import main as verify

SETTINGS: dict[str, Any] = {"group_size": 2, "open_groups": 4, "groups_per_step": 2, "max_tokens": 64}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    path = tmp_path_factory.mktemp("run") / "run"
    return init_run(path, name="test", policy="embedded", environments=shares, config=TrainerConfig(**SETTINGS))


@pytest.fixture(scope="module", autouse=True)
def one_chain() -> Iterator[None]:
    """Every start of a gateway hashes a million times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.office, "AuditChain", functools.cache(trainer.office.AuditChain))
        yield


@on_trio
async def test_a_verdict_and_a_calibration_alone_are_what_check_takes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(run.folder.policy(0))
    files = [str(tmp_path / name) for name in ("trace.msgpack", "verdict.msgpack", "calibration.msgpack")]
    words = ["export-trace", str(run.folder.path), "-o", files[0], "--verdict", files[1]]
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        digest = calibrate(trainer.run, trainer.ledger)
        (lease,) = await client.leases(2)
        for slot, by in ((0, digest), (1, None)):
            await client.submit(script.trace(lease, slot))
            while trainer.ledger.waiting_audits() == 0:
                await client.beat()
            trainer.audit(calibration=by, scores=(0.0, 0.0) if by else ())
            (verdict,) = await client.verdicts(1)
            judged = verdict.trace_digest.hex()
            code = main([*words, "--digest", judged, "--calibration", files[2]])
            told = capsys.readouterr()
            own = main([*words[:3], str(run.folder.config), "--digest", judged])
            assert own == 2 and "is a file of the run itself" in capsys.readouterr().err
            if by is None:
                assert code == 2 and "the calibration of trace" in told.err and "--digest" in told.err
                continue
            assert code == 0 and told.out.splitlines()[-1] == (
                f"check it: rlverify check {files[0]} --policy {run.folder.policy(0)} "
                f"--verdict {files[1]} --calibration {files[2]}"
            )
            arguments = told.out.splitlines()[-1].split()[3:]
            verify([*arguments, "--no-model", "--json"])
            found = json.loads(capsys.readouterr().out)
            assert found["trainer"]["outcome"] == "ACCEPTED" and found["trainer"]["agrees"], found


@pytest.mark.parametrize("digest", ["", "%", "_", "3fa9…", "0x3f"])
def test_what_is_no_digest_is_said_to_be_none(run: Run, digest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-trace", str(run.folder.path), "--digest", digest]) == 2
    assert f"--digest {digest!r}: give the first hex digits" in capsys.readouterr().err


def test_a_run_without_traces_says_what_to_wait_for(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert Ledger(run.folder.ledger, read_only=True).sealed() == 0
    assert main(["export-trace", str(run.folder.path), "--digest", "00" * 32]) == 2
    assert "leave --digest out for the newest" in capsys.readouterr().err


def test_two_outputs_of_one_name_are_refused_however_they_are_spelled(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("t.msgpack")
    words = ["export-trace", str(run.folder.path), "-o", "t.msgpack"]
    for option in ("--verdict", "--calibration"):
        here = str(tmp_path / "t.msgpack")
        for same in ("t.msgpack", "./t.msgpack", "x/../t.msgpack", here, "elsewhere/t.msgpack", "link"):
            assert main([*words, option, same]) == 2, (option, same)
            told = capsys.readouterr().err
            assert f"the trace file and the {option[2:]} cannot both be written to t.msgpack" in told, told
    assert main([*words, "--verdict", "v", "--calibration", "v"]) == 2
    told = capsys.readouterr().err
    assert "the verdict and the calibration cannot both be written to v: name a file for each" in told
    assert main([*words, "--verdict", "v", "--calibration", "c"]) == 2
    assert "cannot both be written" not in capsys.readouterr().err
