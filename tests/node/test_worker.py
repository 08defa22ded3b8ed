"""The worker with the real engine, the real tiny policy and real environments: what it draws is judged by verify/."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from node.config import NodeConfig
from node.engine import Engine, EngineBroken, OutOfMemory, SequenceRequest, TurnDone, Usage
from node.join import make_engine
from node.store import RunStore, Unsent
from protocol import codec, messages
from protocol.envelope import Signed, seal
from protocol.environments import base
from protocol.environments.base import Message
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EngineError, StorageError
from protocol.messages import Timing
from protocol.trace import EngineDescriptor, Trace
from protocol.verdict import Outcome
from tests.node.rig import EMBEDDED, another_policy, world
from tests.node.small_trainer import SmallTrainer
from verify.files import read_evidence
from verify.judge import judge


def judged(trainer: SmallTrainer, digest: bytes, folder: Path) -> str:
    """What an independent check says of a trace: "" or the reason and detail of the refusal."""
    path = folder / "trace.msgpack"
    path.write_bytes(codec.encode(trainer.file(digest)))
    version = trainer.traces[digest].policy_version
    found = judge(read_evidence(path), trainer.policies[version].folder)
    return "" if found.outcome == Outcome.ACCEPTED else f"{found.reason}: {found.detail}"


def test_every_trace_of_an_honest_node_is_accepted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 4
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 16)
            await node.leave()
            assert node.failure is None
            assert {judged(w.trainer, digest, tmp_path) for digest in w.trainer.traces} == {""}
            slots = {(trace.lease_id, trace.slot) for trace in w.trainer.traces.values()}
            assert len(slots) == 16
            assert node.status.traces_received == 16 and w.trainer.returned == {}

    trio.run(scenario)


def test_a_swap_waits_for_what_was_leased_and_no_trace_mixes_policies(tmp_path: Path) -> None:
    other = another_policy(tmp_path / "other")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) >= 24)
            w.trainer.publish(other, 1)
            await w.trainer.announce(1)
            await w.trainer.until(lambda: sum(t.policy_version == 1 for t in w.trainer.traces.values()) >= 24)
            await node.leave()
            assert [event.values["version"] for event in node.said("policy_loaded")] == [0, 1]
            for trace in w.trainer.traces.values():
                assert trace.policy_root == w.trainer.leases[trace.lease_id].policy_root
                assert trace.policy_root == w.trainer.policies[trace.policy_version].manifest.root
            # One of each policy is recomputed: the tokens are what that policy draws.
            for version in (0, 1):
                digest = next(d for d, t in w.trainer.traces.items() if t.policy_version == version)
                assert judged(w.trainer, digest, tmp_path) == ""

    trio.run(scenario)


def test_a_node_that_drops_gives_leases_back_when_the_policy_moves_on(tmp_path: Path) -> None:
    other = another_policy(tmp_path / "other")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(on_new_policy="drop")
            await w.trainer.until(lambda: len(w.trainer.traces) >= 16)
            w.trainer.publish(other, 1)
            await w.trainer.announce(1)
            await w.trainer.until(lambda: sum(t.policy_version == 1 for t in w.trainer.traces.values()) >= 24)
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            moved_on = [lease for lease, cause in w.trainer.returned.items() if cause.startswith("policy moved on: ")]
            assert moved_on
            assert {w.trainer.leases[lease].policy_version for lease in moved_on} == {0}
            await node.leave()
            assert node.failure is None
            for trace in w.trainer.traces.values():
                assert trace.policy_root == w.trainer.policies[trace.policy_version].manifest.root
            digest = next(d for d, t in w.trainer.traces.items() if t.policy_version == 1)
            assert judged(w.trainer, digest, tmp_path) == ""

    trio.run(scenario)


def test_a_prompt_that_renders_otherwise_here_is_given_back_naming_both_versions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.lease_changes = {"prompt": (1, 2, 3)}
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            cause = next(iter(w.trainer.returned.values()))
            assert "renders to another prompt here" in cause
            assert "this node has rlcommons 0.1.0, tokenizers" in cause and "rltrainer 9.9" in cause
            w.trainer.lease_changes = {}
            await w.trainer.until(lambda: len(w.trainer.traces) >= 4)
            assert node.failure is None

    trio.run(scenario)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"environment": "chess@3"}, "there is no environment 'chess@3'"),
        ({"node": b"\7" * 32}, "of another run or of another node"),
        ({"run": b"\7" * 32}, "of another run or of another node"),
        ({"policy_root": b"\7" * 32}, "this node does not hold policy 0"),
        ({"policy_version": 9}, "this node does not hold policy 9"),
    ],
)
def test_a_lease_this_node_cannot_draw_is_given_back_with_the_cause(
    tmp_path: Path, changes: dict[str, object], cause: str
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.lease_changes = changes
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            assert cause in next(iter(w.trainer.returned.values()))
            assert w.trainer.traces == {} and node.failure is None

    trio.run(scenario)


def test_a_lease_that_cannot_be_done_in_time_is_given_back_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) >= 8)
            w.trainer.lease_seconds = 0.001
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            causes = set(w.trainer.returned.values())
            assert all("a completion takes about" in cause or "deadline passed" in cause for cause in causes)

    trio.run(scenario)


# --- environments that fail ---


@dataclass(frozen=True)
class Broken:
    """An environment with a fault, of which there are kinds."""

    fault: str
    name: str = "broken@1"
    max_turns: int = 2
    max_new_tokens: int = 8

    def prompt(self, index: int) -> tuple[Message, ...]:
        return (Message("user", "remainder of 29 and 12"),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        return None

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        if self.fault == "raises":
            raise RuntimeError("the task's author made a mistake")
        threading.Event().wait(1)
        return 0.0


@pytest.mark.parametrize(
    ("fault", "cause"), [("raises", "the task's author made a mistake"), ("hangs", "no answer within 0.2 s")]
)
def test_an_environment_that_fails_costs_its_leases_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str
) -> None:
    factories = {**base.BUILT_IN, "broken@1": lambda params: Broken(fault)}
    monkeypatch.setattr(base, "BUILT_IN", factories)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            prompt = PolicyTokenizer.load(EMBEDDED).prompt_ids(base.load("broken@1").prompt(0))
            w.trainer.lease_changes = {"environment": "broken@1", "prompt": prompt}
            node = w.node(environment_seconds=0.2 if fault == "hangs" else 30.0)
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            assert cause in next(iter(w.trainer.returned.values()))
            w.trainer.lease_changes = {}
            await w.trainer.until(lambda: len(w.trainer.traces) >= 1)
            assert node.failure is None

    trio.run(scenario)


# --- engines that fail ---


@dataclass
class Failing:
    """The real engine, which fails once after so many steps, as a driver does."""

    inner: Engine
    steps_left: list[int] = field(default_factory=lambda: [20])

    @property
    def slots(self) -> int:
        return self.inner.slots

    @property
    def loaded_root(self) -> bytes | None:
        return self.inner.loaded_root

    @property
    def longest(self) -> int | None:
        return self.inner.longest

    def usage(self) -> Usage:
        return self.inner.usage()

    def descriptor(self) -> EngineDescriptor:
        return self.inner.descriptor()

    def load(self, policy: Path, root: bytes) -> None:
        self.inner.load(policy, root)

    def open(self, request: SequenceRequest) -> None:
        self.inner.open(request)

    def step(self) -> tuple[TurnDone, ...]:
        self.steps_left[0] -= 1
        if self.steps_left[0] == 0:
            raise RuntimeError("the device fell off the bus")
        return self.inner.step()

    def extend(self, key: str, observed: tuple[int, ...], max_new_tokens: int) -> None:
        self.inner.extend(key, observed, max_new_tokens)

    def finish(self, key: str) -> tuple[bytes, ...]:
        return self.inner.finish(key)

    def abort(self, key: str) -> None:
        self.inner.abort(key)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Slow:
    """An environment that answers after a while, as a tool over the network does."""

    name: str = "slow@1"
    max_turns: int = 2
    max_new_tokens: int = 4

    def prompt(self, index: int) -> tuple[Message, ...]:
        return (Message("user", "remainder of 29 and 12"),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        threading.Event().wait(1)
        return "go on" if len(replies) < 2 else None

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        return 0.0


class _Counting(Failing):
    """Counts how many sequences are open at once."""

    most = 0
    open_now = 0

    def open(self, request: SequenceRequest) -> None:
        self.inner.open(request)
        _Counting.open_now += 1
        _Counting.most = max(_Counting.most, _Counting.open_now)

    def finish(self, key: str) -> tuple[bytes, ...]:
        _Counting.open_now -= 1
        return self.inner.finish(key)


def test_a_slow_environment_does_not_idle_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots, and turns that take a small part of the time: many more completions are begun than there are slots."""
    monkeypatch.setattr(base, "BUILT_IN", {**base.BUILT_IN, "slow@1": lambda params: Slow()})

    async def scenario() -> None:
        async with world(tmp_path) as w:
            prompt = PolicyTokenizer.load(EMBEDDED).prompt_ids(base.load("slow@1").prompt(0))
            w.trainer.lease_changes = {"environment": "slow@1", "prompt": prompt}
            node = w.node(slots=2, make=lambda config: _Counting(make_engine(config), [0]))
            await w.trainer.until(lambda: _Counting.most >= 5)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 16)
            assert node.status.slots_total == 2
            assert node.failure is None and node.said("engine_failed") == []
            await node.leave()
            for digest, told in w.trainer.timings.items():
                trace = w.trainer.traces[digest]
                assert told is not None and told.tool_ms > 0
                parts = told.slot_ms + told.prefill_ms + told.decode_ms + told.tool_ms
                assert parts <= trace.finished_ms - trace.started_ms + 5, "more than it took"
            # Their slots were given to others while they waited, and all the same:
            for digest in list(w.trainer.traces)[-4:]:
                assert judged(w.trainer, digest, tmp_path) == ""

    trio.run(scenario)


def test_a_broken_engine_is_made_again_and_its_leases_are_given_back(tmp_path: Path) -> None:
    steps_left = [30]  # the start-up check takes about half of them

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=lambda config: Failing(make_engine(config), steps_left))
            said = await node.until_said("engine_failed")
            assert "the device fell off the bus" in said.text
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            assert "the engine failed" in next(iter(w.trainer.returned.values()))
            count = len(w.trainer.traces)
            await w.trainer.until(lambda: len(w.trainer.traces) >= count + 8)
            assert node.failure is None
            digest = list(w.trainer.traces)[-1]
            assert judged(w.trainer, digest, tmp_path) == ""

    trio.run(scenario)


class _Full(Failing):
    """An engine whose device is full once, whatever is asked of it then."""

    def step(self) -> tuple[TurnDone, ...]:
        self.steps_left[0] -= 1
        if self.steps_left[0] == 0:
            raise OutOfMemory("vLLM ran out of memory: tried to allocate 2.00 GiB")
        return self.inner.step()


def test_out_of_memory_lowers_the_slots_and_the_node_goes_on(tmp_path: Path) -> None:
    steps_left, slots = [30], []

    def make(config: NodeConfig) -> Engine:
        slots.append(config.slots)
        return _Full(make_engine(config), steps_left)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=make)
            said = await node.until_said("engine_failed")
            assert "out of memory" in said.text and "made again with 4 slots" in said.text
            count = len(w.trainer.traces)
            await w.trainer.until(lambda: len(w.trainer.traces) >= count + 8)
            assert slots == [8, 4]
            assert node.failure is None and node.status.slots_total == 4

    trio.run(scenario)


class _Gone(Failing):
    """An engine whose process ends when a sequence is finished, once: nothing steps any more to find it out."""

    def step(self) -> tuple[TurnDone, ...]:
        return self.inner.step()

    def finish(self, key: str) -> tuple[bytes, ...]:
        if not key.startswith("probe") and self.steps_left[0]:
            self.steps_left[0] = 0
            raise EngineBroken("vLLM's process ended: killed")
        return self.inner.finish(key)


def test_an_engine_that_is_gone_between_two_steps_is_made_again(tmp_path: Path) -> None:
    left = [1]

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=lambda config: _Gone(make_engine(config), left))
            said = await node.until_said("engine_failed")
            assert "vLLM's process ended: killed" in said.text
            await w.trainer.until(lambda: len(w.trainer.traces) >= 8)
            assert node.failure is None

    trio.run(scenario)


class _GoneIdle(Failing):
    """An engine whose process ends while nothing is drawn, once: `steps_left` says when."""

    def step(self) -> tuple[TurnDone, ...]:
        return self.inner.step()

    def usage(self) -> Usage:
        if self.steps_left[0] == 0:
            self.steps_left[0] = -1
            raise EngineBroken("vLLM's process ended: killed")
        return self.inner.usage()


def test_an_engine_that_is_gone_while_nothing_is_drawn_is_noticed_all_the_same(tmp_path: Path) -> None:
    left = [1]

    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 2
            node = w.node(make=lambda config: _GoneIdle(make_engine(config), left))
            await w.trainer.until(lambda: len(w.trainer.traces) == 8)
            left[0] = 0
            said = await node.until_said("engine_failed")
            assert "vLLM's process ended: killed" in said.text
            w.trainer.max_leases = 4
            await w.trainer.until(lambda: len(w.trainer.traces) == 16)
            assert node.failure is None

    trio.run(scenario)


class _Hopeless(Failing):
    """An engine that fails as soon as it draws for someone."""

    def step(self) -> tuple[TurnDone, ...]:
        turns = self.inner.step()
        if any(not turn.key.startswith("probe") for turn in turns):
            raise RuntimeError("the device fell off the bus")
        return turns


def test_an_engine_that_fails_again_and_again_ends_the_node_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.worker.MOST_FAILURES", 2)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=lambda config: _Hopeless(make_engine(config)))
            with trio.fail_after(90):
                await node.ended.wait()
            assert "failed 2 times in a row and drew nothing between" in str(node.failure)
            assert "fell off the bus" in str(node.failure)
            assert w.trainer.traces == {}

    trio.run(scenario)


class _Short(Failing):
    """An engine on a device with room for few tokens of one sequence."""

    @property
    def longest(self) -> int | None:
        return 50


def test_a_lease_longer_than_the_engine_has_room_for_is_given_back_with_the_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=lambda config: _Short(make_engine(config), [0]))
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            cause = next(iter(w.trainer.returned.values()))
            assert "the lease may grow to" in cause and "and 64)" in cause
            assert "engine has room for 50 of one sequence" in cause
            assert w.trainer.traces == {} and node.failure is None

    trio.run(scenario)


def test_an_engine_that_cannot_be_made_ends_the_node_with_the_reason(tmp_path: Path) -> None:
    def cannot(config: NodeConfig) -> Engine:
        raise EngineError("device cuda:7 was asked for, but there is none")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=cannot)
            with trio.fail_after(90):
                await node.ended.wait()
            assert "cuda:7" in str(node.failure)

    trio.run(scenario)


class _OtherTokens(Failing):
    """An engine that draws with another seed than it is told."""

    def open(self, request: SequenceRequest) -> None:
        self.inner.open(replace(request, seed=request.seed ^ 1))


def test_an_engine_that_draws_other_tokens_does_not_join(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=lambda config: _OtherTokens(make_engine(config), [0]))
            with trio.fail_after(90):
                await node.ended.wait()
            assert "start-up check of the engine failed" in str(node.failure)
            assert w.trainer.traces == {}

    trio.run(scenario)


class _NotFinite(Failing):
    """An engine whose logprobs turn to NaN once, after the start-up check."""

    def step(self) -> tuple[TurnDone, ...]:
        turns = self.inner.step()
        if turns and not turns[0].key.startswith("probe") and self.steps_left[0] > 0:
            self.steps_left[0] -= 1
            return (replace(turns[0], logprobs=(float("nan"),) * len(turns[0].logprobs)), *turns[1:])
        return turns


def test_a_completion_that_nobody_would_accept_is_given_back_and_not_signed(tmp_path: Path) -> None:
    steps_left = [1]

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=lambda config: _NotFinite(make_engine(config), steps_left))
            await w.trainer.until(lambda: len(w.trainer.returned) >= 1)
            assert "the engine drew what cannot be sent" in next(iter(w.trainer.returned.values()))
            await w.trainer.until(lambda: len(w.trainer.traces) >= 4)
            assert node.failure is None

    trio.run(scenario)


@dataclass
class Disk:
    """Where finished traces go; full until told otherwise."""

    full: bool = True
    waiting: set[bytes] = field(default_factory=set)  # digests of traces that found no room


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, put_trace = Disk(), RunStore.put_trace

    def fails_while_full(store: RunStore, signed: Signed, trace: Trace, timing: Timing | None) -> Unsent:
        if disk.full:
            disk.waiting.add(signed.digest)
            raise StorageError("the disk is full: keeping a finished trace needs 1.5 KiB")
        return put_trace(store, signed, trace, timing)

    monkeypatch.setattr("node.weights._STORAGE_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(RunStore, "put_trace", fails_while_full)
    return disk


def test_a_full_disk_stops_the_drawing_and_loses_no_finished_trace(tmp_path: Path, disk: Disk) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 6
            node = w.node(slots=8, environment_threads=1)  # nine in flight at most
            said = await node.until_said("storage", 24)  # each that waits says so now and then
            assert "a finished trace waits for it" in said.text
            assert 8 <= len(disk.waiting) <= 16  # the eighth that waits is the last but for those in flight
            disk.full = False
            await w.trainer.until(lambda: len(w.trainer.traces) == 24)
            assert w.trainer.returned == {}

    trio.run(scenario)


class _FullBesideDisk(Failing):
    """An engine whose device is full once, as soon as finished traces wait for the disk."""

    def __init__(self, inner: Engine, disk: Disk) -> None:
        super().__init__(inner, [1])
        self.disk = disk

    def step(self) -> tuple[TurnDone, ...]:
        if self.steps_left[0] and len(self.disk.waiting) >= 5:
            self.steps_left[0] = 0
            raise OutOfMemory("no room for one more block")
        return self.inner.step()


def test_an_engine_that_breaks_takes_no_finished_trace_with_it(tmp_path: Path, disk: Disk) -> None:
    """More of them wait than the next engine has slots: it draws once they are on the disk."""
    failing: list[_FullBesideDisk] = []

    def make(config: NodeConfig) -> Engine:
        failing.append(_FullBesideDisk(make_engine(config), disk))
        return failing[-1] if len(failing) == 1 else failing[-1].inner

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(make=make, slots=8)
            await node.until_said("engine_failed")
            waited = frozenset(disk.waiting)
            assert len(waited) > 4
            await node.until_said("policy_loaded", 2)
            disk.full = False
            await w.trainer.until(
                lambda: waited <= w.trainer.traces.keys() and len(w.trainer.traces) >= len(waited) + 8
            )
            await node.leave()
            assert node.failure is None and node.status.slots_total == 4

    trio.run(scenario)


def test_a_policy_without_a_tokenizer_is_left_for_the_next(tmp_path: Path) -> None:
    import shutil

    without = tmp_path / "without"
    shutil.copytree(EMBEDDED, without)
    (without / "chat_template.jinja").unlink()

    async def scenario() -> None:
        async with world(tmp_path, publish=False) as w:
            w.trainer.publish(without, 0)
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.hellos) == 1)
            said = await node.until_said("policy_failed")
            assert "chat_template" in said.text
            w.trainer.publish(EMBEDDED, 1)
            await w.trainer.announce(1)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 1)
            assert node.failure is None

    trio.run(scenario)


def no_model(folder: Path) -> Path:
    """A policy folder that is whole, and no model that an engine knows."""
    shutil.copytree(EMBEDDED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    return folder


def test_a_policy_that_is_no_model_is_left_for_the_next_and_the_one_before_draws_on(tmp_path: Path) -> None:
    nonsense = no_model(tmp_path / "nonsense")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) >= 4)
            w.trainer.publish(nonsense, 1)
            await w.trainer.announce(1)
            said = await node.until_said("policy_failed")
            assert "is not a policy that transformers can load" in said.text
            assert "going on with policy 0 until there is a newer one" in said.text
            count = len(w.trainer.traces)
            await w.trainer.until(lambda: len(w.trainer.traces) >= count + 4)
            w.trainer.publish(another_policy(tmp_path / "other"), 2)
            await w.trainer.announce(2)
            await w.trainer.until(lambda: any(t.policy_version == 2 for t in w.trainer.traces.values()))
            assert node.failure is None and node.said("engine_failed") == []
            assert {t.policy_version for t in w.trainer.traces.values()} == {0, 2}

    trio.run(scenario)


def test_a_lease_of_a_policy_that_cannot_be_used_here_is_given_back_and_the_one_before_is_kept(tmp_path: Path) -> None:
    """It was on its way when the policy failed: it must not bring that policy into the engine once more."""
    nonsense = no_model(tmp_path / "nonsense")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 2
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 8)
            w.trainer.publish(nonsense, 1)
            await w.trainer.announce(1)
            await node.until_said("policy_failed")
            late: list[bytes] = []
            drawn = next(iter(w.trainer.traces.values()))

            def once(request: Any) -> Any:
                if not isinstance(request, messages.GetLeases) or late:
                    return None
                lease = w.trainer.make_lease(drawn.node, 1)
                late.append(lease.lease_id)
                w.trainer.leases[lease.lease_id] = lease
                w.trainer.max_leases = 5
                return messages.LeasesReply((seal(w.trainer.identity, lease),), 0, "")

            w.trainer.on_request = once
            await w.trainer.until(lambda: late and late[0] in w.trainer.returned)
            assert "policy 1 cannot be used here" in w.trainer.returned[late[0]]
            await w.trainer.until(lambda: len(w.trainer.traces) >= 16)
            assert node.failure is None and len(node.said("policy_failed")) == 1
            assert {trace.policy_version for trace in w.trainer.traces.values()} == {0}

    trio.run(scenario)
