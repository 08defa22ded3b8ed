"""A whole node that draws with vLLM, against a small trainer: what becomes of it when vLLM is killed, and when the
trainer publishes a policy whose chat template cannot be used. Not here: the engine by itself (test_vllm_engine.py),
a run of real processes (test_beside_transformers.py).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import trio

from node import vllm_engine
from node.config import NodeConfig
from tests.node.rig import world
from tests.node.small_trainer import SmallTrainer
from tests.vllm.conftest import ROOT_FOLDER

if importlib.util.find_spec("vllm") is not None:
    from node.vllm_engine import VllmEngine

START_SECONDS = 400  # of vLLM in processes of its own, each of which imports it, on a machine full of other work
NOTICE_SECONDS = 30  # until a node says that vLLM's core is gone; it takes about two, and the rest is the machine's
HOLDS_VLLM = """
import pathlib, sys
from node.vllm_engine import VllmEngine
settings = {"distributed_executor_backend": "mp"}  # as on several cards: a worker that the core started
VllmEngine(slots=1, threads=1, own_process=True, settings=settings).load(pathlib.Path(sys.argv[1]), bytes(32))
print("READY", flush=True)
sys.stdin.read()
"""
REFUSES_ALL = "{{ raise_exception('nobody may speak') }}"
IS_NO_TEMPLATE = "{% for message in messages %}"


def vllm_processes(node: int | None = None) -> list[psutil.Process]:
    """Of this process or another, outermost first."""
    children = psutil.Process(node).children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def _settled(trainer: SmallTrainer) -> bool:
    """Every slot that was leased was drawn or given back."""
    drawn = Counter(trace.lease_id for trace in trainer.traces.values())
    return all(key in trainer.returned or drawn[key] == len(lease.slots) for key, lease in trainer.leases.items())


def test_a_node_whose_vllm_is_killed_gives_its_leases_back_and_goes_on(
    alone: None, policies: dict[str, Path], tmp_path: Path
) -> None:
    """As on a GPU, vLLM's core is a process of its own; `kill -9` takes it away in the middle of the work."""

    def make(config: NodeConfig) -> VllmEngine:
        return VllmEngine(slots=4, threads=1, own_process=True)

    async def scenario() -> None:
        async with world(tmp_path, publish=False, seconds=2 * START_SECONDS) as w:
            w.trainer.publish(policies["a"], 0)
            node = w.node(make=make)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 4, START_SECONDS)
            before = vllm_processes()
            before[0].kill()
            with trio.fail_after(NOTICE_SECONDS):
                said = await node.until_said("engine_failed")
                await w.trainer.until(
                    lambda: any("vLLM's process ended" in cause for cause in w.trainer.returned.values())
                )
            assert "vLLM's process ended" in said.text and "leases given back" in said.text
            # Its workers are not left behind: the next start would find their memory taken.
            _, alive = await trio.to_thread.run_sync(psutil.wait_procs, before, NOTICE_SECONDS)
            assert not alive
            count = len(w.trainer.traces)
            await w.trainer.until(lambda: len(w.trainer.traces) >= count + 4, START_SECONDS)
            assert node.failure is None

            # While nothing is drawn, nothing waits for vLLM that could find it gone.
            w.trainer.max_leases = len(w.trainer.leases)
            await w.trainer.until(lambda: _settled(w.trainer), START_SECONDS)
            vllm_processes()[0].kill()
            with trio.fail_after(NOTICE_SECONDS):
                assert "vLLM's process ended" in (await node.until_said("engine_failed", 2)).text
            await node.leave()
            assert not vllm_processes()

    trio.run(scenario)


def test_a_node_whose_vllm_hangs_ends_it_gives_its_leases_back_and_goes_on(
    alone: None, policies: dict[str, Path], tmp_path: Path
) -> None:
    """As on several cards: a worker of the core's stops, and the core waits for it for ever."""

    def make(config: NodeConfig) -> VllmEngine:
        return VllmEngine(slots=4, threads=1, own_process=True, settings={"distributed_executor_backend": "mp"})

    async def scenario() -> None:
        async with world(tmp_path, publish=False, seconds=2 * START_SECONDS) as w:
            w.trainer.publish(policies["a"], 0)
            node = w.node(make=make)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 4, START_SECONDS)
            before = vllm_processes()
            assert len(before) == 2
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(vllm_engine, "STALL_SECONDS", 10.0)
                count = len(w.trainer.traces)  # the step that is under way began before that
                await w.trainer.until(lambda: len(w.trainer.traces) > count, START_SECONDS)
                before[1].suspend()
                with trio.fail_after(10 + NOTICE_SECONDS):
                    said = await node.until_said("engine_failed")
            assert "vLLM's process hung, and was ended: it gave no " in said.text and "leases given back" in said.text
            await w.trainer.until(lambda: any("hung" in cause for cause in w.trainer.returned.values()))
            _, alive = await trio.to_thread.run_sync(psutil.wait_procs, before, NOTICE_SECONDS)
            assert not alive
            count = len(w.trainer.traces)
            await w.trainer.until(lambda: len(w.trainer.traces) >= count + 4, START_SECONDS)
            assert node.failure is None
            left = vllm_processes()
            await node.leave()
            _, alive = await trio.to_thread.run_sync(psutil.wait_procs, left, NOTICE_SECONDS)
            assert not alive

    trio.run(scenario)


def test_a_node_that_is_killed_leaves_nothing_of_vllm_behind(policies: dict[str, Path]) -> None:
    """By itself vLLM's core stays for ever, and with it the memory of the card."""
    node = subprocess.Popen(
        [sys.executable, "-c", HOLDS_VLLM, str(policies["a"])],
        cwd=ROOT_FOLDER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert node.stdin is not None and node.stdout is not None
        assert any(line.strip() == "READY" for line in iter(node.stdout.readline, ""))
        left = vllm_processes(node.pid)
        assert left
    finally:
        node.kill()
    _, alive = psutil.wait_procs(left, NOTICE_SECONDS)
    assert not alive
    node.communicate()


def test_a_chat_template_that_raises_costs_its_leases_and_neither_engine_nor_node(
    alone: None, policies: dict[str, Path], tmp_path: Path
) -> None:
    """On the first prompt, or before any: then the policy is not taken."""
    engines: list[VllmEngine] = []

    def make(config: NodeConfig) -> VllmEngine:
        engines.append(VllmEngine(slots=4, threads=1))
        return engines[-1]

    def policy(name: str, template: str) -> Path:
        folder = shutil.copytree(policies["a"], tmp_path / name)
        whole = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").write_text(template + whole)
        return folder

    async def scenario() -> None:
        async with world(tmp_path, publish=False, seconds=2 * START_SECONDS) as w:
            # Another trainer's template is none that this one could render by.
            w.trainer.publish(policy("all", REFUSES_ALL), 0).folder = policies["a"]
            node = w.node(make=make)

            async def until_returned(version: int, words: str) -> None:
                def is_back() -> bool:
                    causes = [w.trainer.returned.get(key, "") for key, lease in w.trainer.leases.items()
                              if lease.policy_version == version]  # fmt: skip
                    return any(words in cause for cause in causes)

                await w.trainer.until(is_back, START_SECONDS)

            async def publish(version: int, folder: Path) -> None:
                w.trainer.publish(folder, version).folder = policies["a"]
                await w.trainer.announce(version)

            await until_returned(0, "the chat template cannot render the roles user: nobody may speak")
            inside = engines[0]._vllm
            await publish(1, policy("none", IS_NO_TEMPLATE))
            said = await node.until_said("policy_failed")
            assert "does not compile" in said.text and "policy 1 cannot be used here" in said.text
            await publish(2, policy("good", ""))
            await w.trainer.until(lambda: len(w.trainer.traces) >= 4, START_SECONDS)
            assert {trace.policy_version for trace in w.trainer.traces.values()} == {2}
            assert node.failure is None and not node.said("engine_failed")
            assert [engine._vllm for engine in engines] == [inside]
            await node.leave()

    trio.run(scenario)
