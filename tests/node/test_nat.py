"""Two nodes behind NATs of their own: one has a policy, the other gets it from it, while the trainer gives no blobs.

Real processes in real network namespaces (nat_lab.py); skipped, with the reason, where those cannot be made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import trio

from protocol.identity import Identity
from protocol.net.memory import Network
from tests.node.fetching_node import fetching_node
from tests.node.nat_lab import nat_lab, why_not, within
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import SmallTrainer

SECONDS = 40.0  # for one answer, on a machine with ten others
REASON = why_not()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class Process:
    """A running nat_process.py."""

    def __init__(self, namespace: str, *arguments: str) -> None:
        command = [*within(namespace), sys.executable, str(Path(__file__).with_name("nat_process.py")), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: Queue[dict[str, Any]] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def until(self, name: str) -> dict[str, Any]:
        """The next line that says this."""
        while name not in (said := self._lines.get(timeout=SECONDS)):
            pass
        return said

    def ask(self, question: str, answer: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self.until(answer)

    def figures(self) -> dict[str, Any]:
        return self.ask("figures", "relayed_bytes")

    def fetch(self) -> int:
        """Bytes of pieces asked of the other node once more."""
        return int(self.ask("fetch", "fetched")["fetched"])

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def ending(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.end()


def prepare(folder: Path, trainer: SmallTrainer, who: Identity) -> None:
    """A home that holds policy 0, as a node that was on an open network leaves it."""

    async def scenario() -> None:
        network = Network()
        async with network.host(trainer.identity) as host, network.host(who) as its:
            trainer.serve(host)
            async with fetching_node(folder, its, who, trainer.address(host)) as node, trio.open_nursery() as nursery:
                nursery.start_soon(node.follow, trainer.address(host))
                await node.until_ready(0)
                nursery.cancel_scope.cancel()

    trio.run(scenario)


@pytest.mark.parametrize("random_ports", [False, True], ids=["nat-keeps-ports", "nat-at-random"])
def test_a_node_behind_nat_gets_a_policy_from_one_behind_another(tmp_path: Path, random_ports: bool) -> None:
    small, first, second = SmallTrainer(), Identity.generate(), Identity.generate()
    small.publish(EMBEDDED, 0)
    prepare(tmp_path / "first", small, first)
    (tmp_path / "first" / "peers.msgpack").unlink(missing_ok=True)
    running: list[Process] = []
    with nat_lab(random_ports=random_ports) as lab, ending(running):

        def start(namespace: str, *arguments: str) -> Process:
            running.append(Process(namespace, *arguments))
            return running[-1]

        trainer = start(lab.public, "trainer", small.identity.private_bytes.hex())
        address = trainer.until("address")["address"]
        giver = start(lab.home(1), "node", first.private_bytes.hex(), str(tmp_path / "first"), address)
        assert "/p2p-circuit" in giver.until("reached_at")["reached_at"]
        taker = start(lab.home(2), "node", second.private_bytes.hex(), str(tmp_path / "second"), address)
        assert set(taker.until("ready")["by_source"]) == {"node"}

        before = trainer.figures()
        assert before["reservations"] == 2
        while not _has_settled(taker.figures(), giver.figures()):
            pass
        # What is fetched now goes the way that was found, and the first one's stream has moved to it.
        carried, fetched = trainer.figures()["relayed_bytes"], taker.fetch()
        carried = trainer.figures()["relayed_bytes"] - carried
        assert fetched > 200_000
        if random_ports:
            assert carried > fetched and taker.figures()["punched"] == 0
        else:
            assert carried < 50_000 and taker.figures()["punched"] == 1


def _has_settled(taker: dict[str, Any], giver: dict[str, Any]) -> bool:
    """A hole was punched, or whoever tried has given up."""
    return bool(taker["punched"] or taker["punches_failed"] or giver["punches_failed"])
