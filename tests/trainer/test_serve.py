"""The supervisor: children that die are started again with the cause named, and none outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import trainer.child
from protocol.errors import LocalError, UsageError
from protocol.run import EnvironmentShare
from trainer import serve as serve_module
from trainer.child import CANNOT_START, alone
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.place import locked
from trainer.rundir import Run
from trainer.serve import RESTART_SECONDS, STARTS, Child, Supervisor, children_of
from trainer.serve import serve as serve_run

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = TrainerConfig(listen="/ip4/127.0.0.1/tcp/0", page_port=0)
    shares = (EnvironmentShare("tools8@1", "", 1),)
    path = tmp_path_factory.mktemp("serve") / "run"
    return init_run(path, name="test", policy="embedded", environments=shares, config=config)


@pytest.fixture
def ledger(run: Run) -> Iterator[Ledger]:
    opened = Ledger(run.folder.ledger)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


def child_that(run: Run, mode: str, mark: Path) -> Child:
    arguments = (str(HERE / "supervised_child.py"), mode, str(mark))
    return Child(mode, arguments, run.folder.logs / f"{mode}.log")


def until(holds: Callable[[], object], turn: Callable[[], object] = lambda: None, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        turn()
        time.sleep(0.01)


def test_a_run_has_a_gateway_auditors_a_learner_and_a_page(run: Run) -> None:
    children = children_of(run)
    names = ["gateway", "auditor-0", "auditor-second", "learner", "records", "page"]
    assert [child.name for child in children] == names
    assert children[1].arguments == ("-m", "trainer.audit", str(run.folder.path), "--name", "auditor-0")


def test_a_child_that_crashes_is_started_again_later_each_time_and_the_cause_is_named(
    run: Run, ledger: Ledger, tmp_path: Path
) -> None:
    child = child_that(run, "crash", tmp_path / "mark")
    supervisor = Supervisor(run, ledger, [child])
    try:
        until(lambda: len(supervisor.news) >= 2, supervisor.look)
    finally:
        supervisor.stop()
    assert "ended with exit code 7: something broke: the reason" in supervisor.news[0]
    assert f"started again in {RESTART_SECONDS[0]:g} s" in supervisor.news[0]
    assert f"started again in {RESTART_SECONDS[1]:g} s" in supervisor.news[1]
    assert "something broke" in child.log.read_text()
    events = [row["text"] for row in ledger.view("SELECT text FROM events WHERE kind = 'process'")]
    assert events[:2] == supervisor.news[:2]


def test_a_learner_that_diverged_is_not_started_again_and_the_run_is_given_up(
    run: Run, ledger: Ledger, tmp_path: Path
) -> None:
    supervisor = Supervisor(run, ledger, [child_that(run, "learner", tmp_path / "mark")])
    try:
        until(lambda: supervisor.gave_up, supervisor.look)
        supervisor.look()
    finally:
        supervisor.stop()
    assert supervisor.gave_up == "the learner ended with exit code 5: the policy gives no finite loss"
    assert len(supervisor.news) == 1 and "the run ends" in supervisor.news[0]


def test_a_part_that_cannot_do_what_it_is_told_to_ends_the_run_unless_it_once_could(
    run: Run, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "RESTART_SECONDS", (0.0,))
    for name, was_well in (("page", False), ("page", True), ("home engine", False)):
        child = child_that(run, "taken", tmp_path / "mark")
        child.name, child.was_well = name, was_well
        supervisor = Supervisor(run, ledger, [child])
        try:
            until(lambda: len(supervisor.news) > STARTS or supervisor.gave_up, supervisor.look)  # noqa: B023
        finally:
            supervisor.stop()
        if name == "page" and not was_well:
            assert supervisor.code == CANNOT_START and len(supervisor.news) == STARTS
            assert supervisor.gave_up == "the page ended with exit code 2: the port is taken"
        else:  # of rlnode's, 2 is about that node alone: others may draw for the run
            assert not supervisor.gave_up


def test_a_child_that_was_killed_is_started_again(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = child_that(run, "run", mark)
    supervisor = Supervisor(run, ledger, [child])
    try:
        until(lambda: mark.exists() and child.last_words, supervisor.look)
        assert child.process is not None
        first = child.process.pid
        os.kill(first, signal.SIGKILL)
        mark.unlink()
        until(mark.exists, supervisor.look)
        assert child.process is not None and child.process.pid != first
        # What it said last is not why.
        assert "was killed by SIGKILL; its last words: all is well; started again in" in supervisor.news[0]
    finally:
        supervisor.stop()


@pytest.mark.parametrize("mode", ["run", "deaf"])
def test_stopping_ends_every_child_in_under_five_seconds(run: Run, ledger: Ledger, tmp_path: Path, mode: str) -> None:
    mark = tmp_path / "mark"
    child = child_that(run, mode, mark)
    supervisor = Supervisor(run, ledger, [child])
    supervisor.look()
    until(mark.exists)
    assert child.process is not None
    process = child.process
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 5.0
    assert process.poll() is not None


def test_children_end_when_the_supervisor_is_killed(run: Run, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    words = [str(HERE / "supervisor_parent.py"), str(run.folder.path), str(HERE / "supervised_child.py"), str(mark)]
    parent = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, env=ENVIRONMENT)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    until(mark.exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert gone and not alive


def test_a_run_is_served_once_and_the_other_process_is_named(run: Run) -> None:
    with locked(run), pytest.raises(UsageError, match=f"served already, by process {os.getpid()}"), locked(run):
        pass
    with locked(run):
        pass


def test_a_process_waits_for_the_one_before_it_to_end(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def successor() -> None:
        with alone(tmp_path, "learner"):
            entered.set()
            leave.wait(10)

    waiting = threading.Thread(target=successor)
    with alone(tmp_path, "learner"):
        waiting.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    with alone(tmp_path, "auditor-0"):
        leave.set()
    waiting.join()


def test_two_processes_never_work_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.child, "END_SECONDS", 0.1)
    with alone(tmp_path, "learner"), pytest.raises(LocalError, match="another learner"), alone(tmp_path, "learner"):
        pass


def test_serve_starts_everything_says_how_to_join_and_ends_on_sigterm(run: Run) -> None:
    serve = subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", "serve", str(run.folder.path), "--json"],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    assert serve.stdout is not None
    try:
        lines: dict[str, str] = {}
        while "address" not in lines or "page" not in lines:
            line = json.loads(serve.stdout.readline())
            lines[line["kind"]] = line.get("text", "")
        assert lines["address"] == f"rlnode join {run.folder.address.read_text().strip()}"
        assert lines["page"].startswith("http://127.0.0.1:")
        children = psutil.Process(serve.pid).children()
        assert len(children) == 5
        serve.terminate()
        serve.wait(timeout=10)
        assert serve.returncode == 0
        assert not psutil.wait_procs(children, timeout=1)[1]
    finally:
        serve.kill()
        serve.wait()
        serve.stdout.close()


def test_serving_what_is_no_run_says_what_to_do(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trainer.cli", "serve", str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert found.returncode == 2 and "rltrainer init" in found.stderr


def test_a_serve_that_is_refused_for_a_name_has_written_nothing(run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder.path, tmp_path / "run"))
    served = folder / "served"
    served.unlink(missing_ok=True)
    for asked in ("nonsense", "self"):
        with pytest.raises(UsageError, match="--trust: "):
            serve_run(folder, trust=(asked,))
    assert not served.exists()
