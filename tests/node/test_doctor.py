"""What the doctor makes of a machine, from figures alone. The command: cli/test_rlnode.py."""

from __future__ import annotations

from node.doctor import busy
from protocol.diagnosis import Level


def test_a_busy_machine_is_said_to_want_fewer_threads() -> None:
    found = busy(load=7.5, processors=4, threads=4)
    assert found.level is Level.WARNING
    assert "7.5, on 4 processors" in found.text and "rlnode join --threads 2 may be" in found.text
    assert "--threads 1 may" in busy(load=1.5, processors=1, threads=1).text


def test_a_machine_with_room_or_a_node_that_leaves_some_is_well() -> None:
    assert busy(load=3.9, processors=4, threads=4).level is Level.OK
    assert busy(load=7.5, processors=4, threads=2).level is Level.OK
    assert busy(load=-0.3, processors=4, threads=4).text == "the load of others is 0.0, on 4 processors"
