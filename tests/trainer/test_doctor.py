"""`rltrainer doctor`: a run folder that is in order, and each thing that can be wrong with one."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.diagnosis import Finding, Level
from protocol.errors import UsageError
from protocol.identity import Identity, save_identity
from tests.trainer.fabricate import make_run
from trainer import doctor
from trainer.child import alone, now_ms
from trainer.doctor import examine
from trainer.ledger import Ledger
from trainer.ledger_rows import SCHEMA_VERSION
from trainer.place import locked
from trainer.rundir import Run, open_run

ROOT = Path(doctor.__file__).parents[1]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, ledger = make_run(tmp_path_factory.mktemp("template") / "run")
    ledger.close()
    return run.folder.path


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Run:
    shutil.copytree(template, tmp_path / "run")
    return open_run(tmp_path / "run")


@pytest.fixture
def ledger(run: Run) -> Iterator[Ledger]:
    with closing(Ledger(run.folder.ledger)) as opened:
        yield opened


def found(run: Run, what: str) -> Finding:
    return next(each for each in examine(run.folder.path, now_ms()) if each.what == what)


def test_a_new_run_is_in_order(run: Run) -> None:
    findings = list(examine(run.folder.path, now_ms()))
    assert {each.level for each in findings} == {Level.OK}, [each.line() for each in findings]
    whats = [each.what for each in findings]
    assert whats == ["run", "key", "secret", "served", "ledger", "clock", "policy", "learner", "events", "disk"]


def swap_key(run: Run) -> None:
    run.folder.key.unlink()
    save_identity(Identity.generate(), run.folder.key)


def swap_secret(run: Run) -> None:
    run.folder.secret.write_text(f"{'00' * 32}\n{'11' * 32}\n")


def spoil_ledger(run: Run) -> None:
    data = bytearray(run.folder.ledger.read_bytes())
    data[-4096:] = bytes(4096)
    run.folder.ledger.write_bytes(data)


def cut_ledger(run: Run) -> None:
    run.folder.ledger.write_bytes(b"SQLite format 4" + bytes(85))


def newer_ledger(run: Run) -> None:
    with closing(sqlite3.connect(run.folder.ledger)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def spoil_policy(run: Run) -> None:
    weights = run.folder.policy(0) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def lose_policy(run: Run) -> None:
    shutil.rmtree(run.folder.policy(0))


def spoil_step(run: Run) -> None:
    run.folder.step(0).mkdir(parents=True)
    (run.folder.step(0) / "step.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "what", "says"),
    [
        (swap_key, "key", "but this run belongs to"),
        (swap_secret, "secret", "is not the secret of this run's genesis"),
        (spoil_ledger, "ledger", "restore the run from a backup"),
        (cut_ledger, "ledger", "restore it from a backup"),
        (newer_ledger, "ledger", f"has ledger format {SCHEMA_VERSION + 1}, of a newer rlcommons"),
        (spoil_policy, "policy", "is not what was published as version 0"),
        (lose_policy, "policy", "from a backup"),
        (spoil_step, "learner", "cannot be read"),
    ],
)
def test_what_keeps_a_run_from_going_on_is_said_with_what_to_do(
    run: Run, spoil: Callable[[Run], None], what: str, says: str
) -> None:
    spoil(run)
    finding = found(run, what)
    assert finding.needs_action and says in finding.text, finding.line()
    assert finding.line().startswith("act ")


def test_a_ledger_of_a_newer_version_is_opened_by_nobody(run: Run) -> None:
    newer_ledger(run)
    with pytest.raises(UsageError, match=r"of a newer rlcommons; this one reads .*: use the rlcommons that made it"):
        Ledger(run.folder.ledger)


def test_who_serves_the_run_is_named_and_who_works_on_it_unserved(run: Run) -> None:
    with locked(run), alone(run.folder.path, "learner"):
        served = found(run, "served")
        assert served.level is Level.OK and f"process {os.getpid()} serves it, at work: learner" in served.text
    with alone(run.folder.path, "learner"):
        orphan = found(run, "served")
        assert orphan.level is Level.WARNING and "nobody serves it, and learner of it" in orphan.text


def test_a_copy_of_a_served_run_is_told_from_the_run(run: Run, tmp_path: Path) -> None:
    with locked(run):
        shutil.copytree(run.folder.path, tmp_path / "copy")
    place = found(open_run(tmp_path / "copy"), "place")
    assert place.needs_action and str(run.folder.path) in place.text and "--moved" in place.text


def test_a_clock_that_went_back_is_seen_in_the_ledger(run: Run, ledger: Ledger) -> None:
    ledger.add_event(now_ms() + 3_600_000, "run", "written by a clock that is an hour ahead")
    clock = found(run, "clock")
    assert clock.needs_action and "clock is 3,600 s behind" in clock.text.replace("3,599", "3,600")


def test_a_node_with_a_policy_that_was_never_made_here_points_to_an_old_copy(run: Run, ledger: Ledger) -> None:
    node = Identity.generate().node
    ledger.see_node(node, 1, "rlcommons", "engine")
    beat = dict(tokens_per_second=0.0, slots_busy=0, slots_total=1, slots_waiting=0, cache_percent=None, unsent=0)
    ledger.beat_node(node, 2, policy_version=9, **beat)  # type: ignore[arg-type]
    nodes = found(run, "nodes")
    assert nodes.level is Level.WARNING and "restore it again with --published 9" in nodes.text


def test_faults_and_full_disks_are_warnings_with_what_to_do(
    run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.add_event(now_ms(), "fault", "the environment broke")
    assert found(run, "events").text == "the environment broke (1 times in the last 24 h)"
    usage = shutil.disk_usage(run.folder.path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert found(run, "disk").needs_action


def test_what_happens_again_and_again_hides_nothing_of_another_kind(run: Run, ledger: Ledger) -> None:
    ledger.add_event(now_ms(), "alarm", "the policy runs away")
    ledger.add_event(now_ms(), "stall", "the learner does nothing")
    for number in range(20):  # as a node can cause them
        ledger.add_event(now_ms(), "fault", f"trace {number} could not be judged")
        ledger.add_event(now_ms(), "process", f"the auditor ended; started again in {number} s")
    told = [each.text for each in doctor.examine(run.folder.path, now_ms()) if each.what == "events"]
    assert told == [
        "the policy runs away (1 times in the last 24 h)",
        "the learner does nothing (1 times in the last 24 h)",
        "the auditor ended; started again in 19 s (20 times in the last 24 h)",
        *(f"trace {number} could not be judged (1 times in the last 24 h)" for number in (19, 18, 17)),
    ]


def test_a_run_that_is_served_without_its_gateway_is_told_with_the_gateway_s_words(run: Run, ledger: Ledger) -> None:
    with locked(run):
        ledger.add_event(now_ms() - 100_000, "process", "the gateway ended with exit code 1: of an earlier start")
        assert found(run, "gateway").level is Level.WARNING and "is starting" in found(run, "gateway").text
        ledger.add_event(now_ms(), "process", "the gateway ended with exit code 2: cannot listen; started again in 3 s")
        ledger.add_event(now_ms(), "process", "the page ended with exit code 2: taken; started again in 3 s")
        assert (
            found(run, "gateway").needs_action and "ended with exit code 2: cannot listen" in found(run, "gateway").text
        )
        assert "the page ended" in found(run, "events").text
        with alone(run.folder.path, "gateway"):
            assert "gateway" not in [finding.what for finding in doctor.examine(run.folder.path, now_ms())]


def test_what_a_killed_write_left_is_named(run: Run) -> None:
    (run.folder.policies / "000001.tmp").mkdir()
    leftovers = found(run, "leftovers")
    assert leftovers.level is Level.OK and "policies/000001.tmp" in leftovers.text


def test_the_command_ends_with_1_when_something_has_to_be_done_and_with_2_where_there_is_no_run(
    run: Run, tmp_path: Path
) -> None:
    assert rltrainer("doctor", run.folder.path).returncode == 0
    lose_policy(run)
    spoilt = rltrainer("doctor", run.folder.path, "--json")
    lines = [json.loads(line) for line in spoilt.stdout.splitlines()]
    assert spoilt.returncode == 1 and [each["what"] for each in lines if each["level"] == "act"] == ["policy"]
    assert rltrainer("doctor", tmp_path).returncode == 2


def rltrainer(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.cli", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
