"""Turns on a device: one process at a time, the engine gives way, and who dies holds nothing up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import device_turns
from protocol.device_turns import ENGINE, LEARNER, Look, Turns, look, turns
from protocol.errors import StorageError

ROOT = Path(__file__).parents[2]


def test_the_device_is_one_processs_at_a_time_and_its_turns_are_noted_without_an_overlap(tmp_path: Path) -> None:
    engine, learner = Turns(tmp_path, ENGINE), Turns(tmp_path, LEARNER)
    assert engine.take() and engine.take(), "who has it has it"
    assert not engine.is_asked()
    assert learner.ask() and not learner.take()
    assert engine.is_asked()
    engine.give_back()
    assert learner.take() and not engine.take()
    assert engine.is_asked(), "also while the learner has it"
    learner.give_back()
    assert not engine.is_asked() and engine.take()
    engine.close()
    learner.close()
    first, second, third = turns(tmp_path)
    assert (first.who, second.who, third.who) == (ENGINE, LEARNER, ENGINE)
    assert first.from_ms <= first.to_ms <= second.from_ms <= second.to_ms <= third.from_ms


def test_a_look_says_who_has_the_device_and_whether_the_learner_asks(tmp_path: Path) -> None:
    assert look(tmp_path / "nowhere") is None
    engine, learner = Turns(tmp_path, ENGINE), Turns(tmp_path, LEARNER)
    assert look(tmp_path) == Look("", None, False)
    learner.ask()
    assert look(tmp_path) == Look("", None, True)
    engine.take()
    found = look(tmp_path)
    assert found is not None and (found.who, found.asked) == (ENGINE, True) and (found.since_ms or 0) > 0
    assert not learner.take(), "looking takes nothing away"
    engine.close()
    assert learner.take()
    learner.close()


def test_who_was_killed_with_the_device_has_given_it_back(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from protocol.device_turns import LEARNER, Turns\n"
        "turns = Turns(Path(sys.argv[1]), LEARNER); turns.ask(); turns.take(); print('taken', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"taken\n"
        engine = Turns(tmp_path, ENGINE)
        assert engine.is_asked() and not engine.take()
        process.kill()
        process.wait()
    assert not engine.is_asked() and engine.take()
    engine.close()
    assert [each.who for each in turns(tmp_path)] == [ENGINE], "a turn that was cut off is not noted"


def test_what_is_noted_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_turns, "RECORD_BYTES", 200)
    mine = Turns(tmp_path, ENGINE)
    for _ in range(20):
        assert mine.take()
        mine.give_back()
    mine.close()
    assert 1 <= len(turns(tmp_path)) <= 4


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere is no place to take turns in: No such file"):
        Turns(tmp_path / "nowhere", ENGINE)
