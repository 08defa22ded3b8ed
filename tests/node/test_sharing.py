"""A node on a device that it shares with a learner: it draws in its turn, gives way when all is drawn, comes back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import trio

from node.config import NodeConfig
from node.engine import TurnDone
from node.transformers_engine import TransformersEngine
from protocol.device_turns import ENGINE, LEARNER, POLL_SECONDS, Turns, look, turns
from protocol.errors import UsageError
from protocol.run import RunAddress
from tests.node.rig import another_policy, world


class Watched(TransformersEngine):
    """The real engine; says who had the device whenever it computed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(slots=8, threads=1)
        self.folder = folder
        self.seen: set[str] = set()
        self.calls: list[str] = []

    def _note(self) -> None:
        found = look(self.folder)
        assert found is not None
        self.seen.add(found.who)

    def load(self, policy: Path, root: bytes) -> None:
        self._note()
        super().load(policy, root)

    def step(self) -> tuple[TurnDone, ...]:
        self._note()
        return super().step()

    def sleep(self) -> None:
        self._note()
        self.calls.append("sleep")
        super().sleep()

    def wake(self) -> None:
        self._note()
        self.calls.append("wake")
        super().wake()


def test_the_engine_gives_way_to_the_learner_and_takes_up_the_policy_that_it_made(tmp_path: Path) -> None:
    other, folder = another_policy(tmp_path / "other"), tmp_path / "turns"
    folder.mkdir()
    engine = Watched(folder)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 4
            node = w.node(make=lambda _: engine, turns=folder)
            await node.until_said("policy_loaded")
            learner = Turns(folder, LEARNER)
            assert learner.ask() and not learner.take(), "the engine has it"
            while not learner.take():
                await trio.sleep(POLL_SECONDS)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 16)  # what was leased is drawn before
            assert engine.calls == ["sleep"] and node.status.state == "the learner has the device"
            w.trainer.publish(other, 1)
            w.trainer.max_leases = 8
            await w.trainer.announce(1)
            await node.until_said("policy_fetched", 2)
            assert len(node.said("policy_loaded")) == 1, "it is not loaded meanwhile"
            learner.close()
            await w.trainer.until(lambda: sum(t.policy_version == 1 for t in w.trainer.traces.values()) == 16)
            await node.leave()
            assert node.failure is None and w.trainer.returned == {}

    trio.run(scenario)
    assert engine.calls == ["sleep", "wake"] and engine.seen == {ENGINE}
    noted = turns(folder)
    assert [each.who for each in noted] == [ENGINE, LEARNER, ENGINE]
    assert all(before.to_ms <= after.from_ms for before, after in pairwise(noted))


def test_a_node_that_shares_nothing_takes_no_turns(tmp_path: Path) -> None:
    address = RunAddress("/ip4/127.0.0.1/tcp/1", bytes(32), bytes(32))
    with pytest.raises(UsageError, match=r"--share-device .*nowhere is not a folder: `rltrainer serve"):
        NodeConfig(address=address, turns=tmp_path / "nowhere")
    assert NodeConfig(address=address).turns is None
