"""Leases in, signed traces out: the node's work.

    take a lease → check it → for each slot: draw a turn, let the environment answer, again →
    proofs → reward → sign → outbox

One policy at a time is in the engine: when a newer one is ready, what was leased under the old one is finished, or
given back where the configuration says so; then the engine swaps. How many completions are in flight follows what
they take (pace.py). Not here: talking to the trainer (session.py), the state of leases (leases.py),
decoding (the engines).
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import trio

from node import episode
from node.config import NodeConfig
from node.engine import Engine, OutOfMemory, probe
from node.engine_thread import EngineThread
from node.failures import foremost
from node.leases import LeaseBook, SlotWork
from node.pace import Completion, Pace, held_at_most, most_in_flight, rollouts_in_flight
from node.report import Event, Level, Report, Status
from node.sharing import LOOK_SECONDS, Share
from node.store import HeldPolicy, RunStore
from node.tasks import Tasks
from node.weights import keep_trying
from protocol import limits
from protocol.envelope import Signed, unseal
from protocol.errors import Code, EngineError, LocalError, PolicyError, RemoteError, RLCommonsError
from protocol.identity import Identity
from protocol.lease import Lease, check_lease
from protocol.messages import Timing
from protocol.net.backoff import backoff
from protocol.trace import EngineDescriptor, Trace

MOST_FAILURES: Final = 6  # of the engine in a row, without anything drawn between: then a person is needed
_MOVED_ON: Final = "policy moved on"  # SPEC 9.3: so begins the cause of a lease returned for a newer policy


def software() -> str:
    """This package and its version, as the peers see it."""
    return f"rlcommons {importlib.metadata.version('rlcommons')}"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a worker holds leases to: which run, signed by whom, for whom."""

    run: bytes
    trainer: bytes
    identity: Identity


class Worker:
    """Draws the slots of leases. `take`, `policy_ready` and `stop` are called by others while `run` runs."""

    def __init__(
        self,
        terms: Terms,
        config: NodeConfig,
        store: RunStore,
        make_engine: Callable[[NodeConfig], Engine],
        now_ms: Callable[[], int],
        report: Report,
        status: Status,
        random: Random,
    ) -> None:
        self.book = LeaseBook()
        self.wants_leases = trio.Event()  # set when there may be room for more
        self.has_news = trio.Event()  # set when there is something to send
        self.trainer_software = "the trainer"
        self.asking = False  # an answer to a request for leases is awaited
        self.got_nothing = False  # the last answer held no lease
        self.described = trio.Event()  # set once `descriptor` is known
        self.descriptor: EngineDescriptor | None = None
        self._terms = terms
        self._config = config
        self._store = store
        self._make_engine = make_engine
        self._now_ms = now_ms
        self._report = report
        self._status = status
        self._random = random
        self._changed = trio.Event()
        self._next: HeldPolicy | None = None  # the newest policy that is whole on the disk
        self._loaded: HeldPolicy | None = None  # the policy in the engine
        self._coming: HeldPolicy | None = None  # the policy that is being loaded
        self._useless: dict[int, str] = {}  # versions that the engine cannot use, and why
        self._engine: EngineThread | None = None
        self._tasks = Tasks(config)
        self._share = Share(config.turns)
        self._pace = Pace()
        self._lease_seconds: float | None = None  # what the trainer gives a lease
        self._slots = config.slots  # None: as many as the engine sees fit; falls when the device runs out of memory
        self._running: dict[str, trio.CancelScope] = {}  # completions in the engine, by key
        self._unkept = 0  # finished traces that are not on the disk yet
        self._keeping: trio.Nursery | None = None  # for these: it outlives the engine that drew them
        self._stopping = False
        self._paused_until = -math.inf
        self._pauses = backoff(random, first=1.0, cap=60.0)

    # --- what others ask ---

    def policy_ready(self, held: HeldPolicy) -> None:
        """A policy is whole on the disk; the engine takes it when it is free."""
        if self._next is None or held.version > self._next.version:
            self._next = held
            self.wake()

    def room(self) -> int:
        """Slots to ask leases for. Asked in lots: when half of what should wait here is gone. Traces that wait
        for a slow trainer count as well, or they would grow stale here."""
        if self._loaded is None or self._engine is None or self._stopping or not self._share.held:
            return 0  # leases would age while an engine starts or a learner steps, which may take longer than they last
        if trio.current_time() < self._paused_until:
            return 0
        slots = self._engine.slots
        ahead = math.ceil(slots * self._config.prefetch)
        wanted = held_at_most(self._in_flight(self._engine), ahead, self._pace.mean(), self._lease_seconds)
        backlog = max(0, self._unkept + len(self._store.unsent) - slots)
        missing = wanted - self.book.drawing() - self.book.waiting() - backlog
        return missing if missing >= min(wanted, max(1, ahead // 2)) else 0

    def _in_flight(self, engine: EngineThread) -> int:
        """Completions to have begun at once: more than the engine has slots, where environments take their time."""
        most = most_in_flight(engine.slots, self._config.environment_threads)
        return rollouts_in_flight(engine.slots, self._pace.decoding_share(), most)

    def versions(self) -> tuple[int, ...]:
        """Policy versions to ask leases for: the newest, and the one in the engine, whose groups others may not
        be able to finish."""
        present = None if self._moves_on() else self._coming or self._loaded
        named = {held.version for held in (present, self._next) if held is not None}
        return tuple(sorted(named))

    def versions_in_use(self) -> frozenset[int]:
        loaded = frozenset() if self._loaded is None else frozenset([self._loaded.version])
        return loaded | self.book.versions()

    def stop(self, cause: str) -> None:
        """Draw nothing more; what is open is given back."""
        self._stopping = True
        self.book.give_back_all(cause)
        for scope in self._running.values():
            scope.cancel()
        self.wake()

    def settled(self, lease_id: bytes, slot: int) -> None:
        """The trainer answered for this slot's trace."""
        if self.book.settled(lease_id, slot):
            self._store.drop_lease(lease_id)
        self.wake()

    def wake(self) -> None:
        for name in ("_changed", "wants_leases", "has_news"):
            event: trio.Event = getattr(self, name)
            event.set()
            setattr(self, name, trio.Event())

    # --- leases ---

    async def take(self, signed: Signed) -> None:
        """Check a lease and queue its slots. One that cannot be drawn here is given back with the cause.

        Raises RemoteError for what no honest trainer sends.
        """
        lease = unseal(Lease, signed, signer=self._terms.trainer)
        check_lease(lease)
        taken = trio.current_time()
        self._lease_seconds = (lease.deadline_ms - lease.issued_ms) / 1000
        await keep_trying(self._report, "a lease", self._store.save_lease, lease.lease_id, signed)
        cause = ""
        try:
            await self._check_lease(lease)
        except RLCommonsError as error:
            cause = str(error)
        if self.book.take(lease, taken) and (cause or self._stopping):
            self._give_back(lease, cause or "the node is stopping")
        self.wake()

    def _give_back(self, lease: Lease, cause: str) -> None:
        self._pause()
        self.book.give_back(lease.lease_id, cause[: limits.MAX_TEXT_CHARACTERS])
        self._cancel(lease.lease_id)
        level = Level.DETAIL if self._stopping else Level.WARNING
        self._say("lease_returned", f"gave a lease back: {cause}", level, lease=lease.lease_id.hex())
        self.wake()

    def _cancel(self, lease_id: bytes) -> None:
        for key in [each for each in self._running if each.startswith(lease_id.hex())]:
            self._running[key].cancel()

    def _pause(self) -> None:
        """Ask for no leases for a while, longer each time in a row: the next one may well end like this one."""
        if trio.current_time() >= self._paused_until:
            self._paused_until = trio.current_time() + next(self._pauses)

    async def _check_lease(self, lease: Lease) -> None:
        """Whether this node can draw the lease as it stands. Raises RLCommonsError with the cause."""
        # SPEC 8.4: a node MUST NOT draw under a lease of another run or node, or of a policy it does not hold.
        if lease.run != self._terms.run or lease.node != self._terms.identity.node:
            raise RemoteError(Code.MALFORMED, "the lease is of another run or of another node")
        held = self._store.held.get(lease.policy_version)
        if held is None or held.root != lease.policy_root:
            raise PolicyError(f"this node does not hold policy {lease.policy_version}")
        present = self._coming or self._loaded
        if self._moves_on():
            present = self._next
        if present is not None and lease.policy_version < present.version:
            raise PolicyError(f"{_MOVED_ON}: this node is at version {present.version}")
        if (why := self._useless.get(lease.policy_version)) is not None:
            raise PolicyError(f"policy {lease.policy_version} cannot be used here: {why}")
        self._check_length(lease)
        await self._tasks.check_prompt(lease, held, self.trainer_software)

    def _check_length(self, lease: Lease) -> None:
        longest = None if self._engine is None else self._engine.longest
        wanted = len(lease.prompt) + lease.max_tokens
        if longest is not None and wanted > longest:
            raise EngineError(
                f"the lease may grow to {wanted} tokens ({len(lease.prompt)} of prompt and {lease.max_tokens}); this "
                f"node's engine has room for {longest} of one sequence"
            )

    # --- the engine's life ---

    async def run(self) -> None:
        """Draw for ever. A broken engine is made again, after a pause that grows with each failure in a row; with
        fewer slots where memory ran out. Raises LocalError when that does not help."""
        with closing(self._share), foremost():
            async with trio.open_nursery() as self._keeping:
                await self._run_engines()

    async def _run_engines(self) -> None:
        delays, failures = backoff(self._random, first=1.0, cap=300.0), 0
        while True:
            drawn = self._status.traces_drawn
            try:
                await self._run_engine()
            except EngineError as error:
                if not self.described.is_set():
                    raise LocalError(str(error)) from None  # there never was an engine here
                lowered = self._lower_slots(error)
                if self._status.traces_drawn > drawn or lowered:
                    delays, failures = backoff(self._random, first=1.0, cap=300.0), 0
                failures += 1
                given = len(self.book.give_back_all(f"the engine failed: {error}"[:1024]))
                if failures >= MOST_FAILURES:
                    raise LocalError(
                        f"the engine failed {failures} times in a row and drew nothing between: {error}"
                    ) from error
                delay = next(delays)
                fewer = f" with {self._slots} slots" if lowered else ""
                self._say(
                    "engine_failed",
                    f"{error}; {given} leases given back, the engine is made again{fewer} in {delay:.0f} s",
                    Level.ERROR,
                )
                self.wake()
                await trio.sleep(delay)

    def _lower_slots(self, error: EngineError) -> bool:
        """After an out-of-memory: half as many at once from now on. False where that was not it, or cannot help."""
        if not isinstance(error, OutOfMemory) or self._status.slots_total <= 1:
            return False
        self._slots = self._status.slots_total // 2
        return True

    async def _run_engine(self) -> None:
        self._pace.forget()
        config = replace(self._config, slots=self._slots)
        engine = EngineThread(lambda: self._make_engine(config), self._status.tokens.add)
        await self._share.take()
        try:
            with foremost():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.run)
                    self.descriptor = await engine.call(lambda each: each.descriptor())
                    self._status.engine = _describe(self.descriptor)
                    self._status.slots_total = engine.slots
                    self._engine = engine
                    self.described.set()
                    await self._draw_all(engine, nursery)
        finally:
            self._engine = None
            self._loaded = None
            self._running.clear()
            self._share.give_back()
            if not self._stopping:
                self._status.policy_version = None

    async def _draw_all(self, engine: EngineThread, nursery: trio.Nursery) -> None:
        """Keep every slot of the engine busy, under one policy at a time."""
        while True:
            changed = self._changed
            await self._give_way(engine)
            self._move_on()
            await self._swap_if_due(engine)
            self._give_back_expired()
            version = -1 if self._loaded is None else self._loaded.version
            while self._has_free_slot(engine) and (work := self.book.next_slot(version)):
                if self._in_time(work.lease):
                    self._running[work.key] = trio.CancelScope()
                    nursery.start_soon(self._draw_slot, engine, work)
            self._update_status(engine)
            # Leases run out and pauses end while nothing else happens, and a learner may ask for the device.
            with trio.move_on_after(LOOK_SECONDS if self._share.is_shared else 1.0) as idle:
                await changed.wait()
            if idle.cancelled_caught:
                self.wake()

    async def _give_way(self, engine: EngineThread) -> None:
        """Leave a shared device to the learner that asks for it once all that the trainer leases is drawn; back with
        the next turn. Meanwhile the engine's memory is given up."""
        if not self._share.is_asked_for or self._running or self.asking or self.book.waiting():
            return
        if self._status.connected and not self.got_nothing and self.room():
            return  # the trainer may have slots left of groups that were begun
        await engine.call(lambda each: each.sleep())
        self._share.give_back()
        state, self._status.state = self._status.state, "the learner has the device"
        await self._share.take()
        self._status.state, self.got_nothing = state, False
        await engine.call(lambda each: each.wake())
        self.wake()

    def _has_free_slot(self, engine: EngineThread) -> bool:
        return len(self._running) < self._in_flight(engine) and self._unkept < engine.slots and not self._stopping

    def _update_status(self, engine: EngineThread) -> None:
        self._status.slots_total = engine.slots
        self._status.slots_busy = min(engine.usage.drawing, engine.slots)
        self._status.turns_waiting = engine.usage.waiting
        self._status.cache_used = engine.usage.cache
        self._status.in_flight = len(self._running)
        self._status.leases_waiting = self.book.waiting()
        self._status.unsent = len(self._store.unsent)

    def _due(self) -> HeldPolicy | None:
        """The policy to load now: the next one that something is leased under, else the newest; None to go on
        with the one that is loaded."""
        loaded = -1 if self._loaded is None else self._loaded.version
        # Leases on their way may be for the present one.
        if self._stopping or self._running or self.asking or self.book.waiting(loaded):
            return None
        held = self._store.held
        usable = held.keys() - self._useless.keys()
        leased = [version for version in self.book.versions() if version > loaded and version in usable]
        if leased:
            return held[min(leased)]
        return self._next if self._next is not None and self._next.version > loaded else None

    def _moves_on(self) -> bool:
        """Nothing more is drawn under the policy in the engine, because a newer one is here."""
        if self._config.on_new_policy != "drop" or self._next is None or self._loaded is None:
            return False
        return self._next.version > self._loaded.version

    def _move_on(self) -> None:
        """Give back what is leased under older policies, drawn in part or not, so that the newer one can come in."""
        if not self._moves_on() or self._next is None:
            return
        self._drop_older(self._next.version)

    async def _swap_if_due(self, engine: EngineThread) -> None:
        """Change the policy in the engine once nothing leased under the present one is left to draw."""
        target, loaded = self._due(), self._loaded
        if target is None:
            return
        self._status.state = f"loading policy {target.version}"
        self._coming, began = target, trio.current_time()
        try:
            await self._load(engine, target)
            if loaded is None:
                await self._probe(engine, target)
        except PolicyError as error:
            self._unusable(target, str(error))
        else:
            await self._swapped(target, trio.current_time() - began)
        finally:
            self._coming = None

    async def _load(self, engine: EngineThread, target: HeldPolicy) -> None:
        """Raises PolicyError when the engine is in order and cannot run this policy."""
        try:
            await engine.call(lambda each: each.load(target.folder, target.root))
        except EngineError as error:
            if engine.is_broken:
                raise
            raise PolicyError(str(error)) from error
        # SPEC 8.6: a trace names the policy its first token was drawn from; the engine says what it holds.
        if await engine.call(lambda each: each.loaded_root) != target.root:
            raise EngineError(f"the engine loaded another policy than version {target.version}")
        self.descriptor = await engine.call(lambda each: each.descriptor())  # how it samples shows with a policy
        self._status.slots_total = engine.slots  # and so does how many it has room for

    def _unusable(self, target: HeldPolicy, why: str) -> None:
        """Nothing can be drawn with this policy: back to the one before, until a newer one comes."""
        self._useless[target.version] = why
        self._next, self._loaded = self._loaded, None
        self.book.give_back_all(f"policy {target.version} cannot be used here: {why}", version=target.version)
        instead = "waiting for" if self._next is None else f"going on with policy {self._next.version} until there is"
        text = f"policy {target.version} cannot be used here: {why}; {instead} a newer one"
        self._say("policy_failed", text, Level.ERROR)
        self.wake()

    async def _swapped(self, target: HeldPolicy, seconds: float) -> None:
        self._loaded = target
        self._status.policy_version = target.version
        self._status.state = "drawing"
        self._drop_older(target.version)
        self._say(
            "policy_loaded",
            f"policy {target.version} is in the engine ({seconds:.1f} s)",
            version=target.version,
            root=target.root.hex(),
        )
        await trio.to_thread.run_sync(self._store.prune, self.versions_in_use())
        self.wake()

    async def _probe(self, engine: EngineThread, held: HeldPolicy) -> None:
        """Raises LocalError: with an engine that draws other tokens every trace would be refused."""
        vocabulary = (await self._tasks.tokenizer(held)).vocabulary_size
        try:
            await engine.call(lambda each: probe(each, vocabulary))
        except EngineError as error:
            # SPEC 10.3: draws that follow no seed cannot be checked, so there is no run for them.
            raise LocalError(
                f"the start-up check of the engine failed: {error}. A node without the seeded draws of SPEC 10 cannot "
                "take part: its traces could not be checked. Use the engine, torch and transformers that this "
                "rlcommons was installed with, or another device"
            ) from error

    def _drop_older(self, version: int) -> None:
        for older in [each for each in self.book.versions() if each < version]:
            given = self.book.give_back_all(f"{_MOVED_ON}: this node is at version {version}", version=older)
            for lease_id in given:
                self._cancel(lease_id)
            if given:
                text = f"gave {len(given)} leases of policy {older} back: version {version} is here"
                self._say("leases_returned", text)

    def _give_back_expired(self) -> None:
        for lease_id in self.book.expired(self._now_ms()):
            self.book.give_back(lease_id, "its deadline passed before it was drawn")
            self._say("lease_expired", "a lease ran out before it was drawn", Level.WARNING, lease=lease_id.hex())
            self.wake()

    def _in_time(self, lease: Lease) -> bool:
        """Give back, now, what would be late: the trainer can lease it to a faster node."""
        likely = self._pace.longest()
        left = (lease.deadline_ms - self._now_ms()) / 1000
        if left > likely:
            return True
        self._give_back(lease, f"{left:.0f} s are left, a completion takes about {likely:.0f} s here")
        return False

    # --- one completion ---

    async def _draw_slot(self, engine: EngineThread, work: SlotWork) -> None:
        """Draw one completion by its deadline and put its trace into the outbox."""
        began = trio.current_time()
        drawn: tuple[episode.Drawn, Signed] | None = None
        scope = self._running[work.key]
        scope.deadline = began + max(0.0, (work.lease.deadline_ms - self._now_ms()) / 1000)
        try:
            with scope:
                drawn = await self._draw(engine, work)
                self._pace.add(Completion(drawn[0].in_turns, trio.current_time() - began))
        except LocalError as error:
            self._give_back(work.lease, str(error))
        finally:
            if drawn is None:
                engine.abort(work.key)
            self._running.pop(work.key, None)
        if drawn is not None and self.book.is_drawing(work):
            self.book.drawn(work.lease.lease_id, work.slot)
            self._unkept += 1
            assert self._keeping is not None
            self._keeping.start_soon(self._keep, drawn[0].trace, drawn[1], drawn[0].timing(began - work.taken))
        self.wake()

    async def _draw(self, engine: EngineThread, work: SlotWork) -> tuple[episode.Drawn, Signed]:
        assert self._loaded is not None and self.descriptor is not None
        drawn = await episode.draw(engine, work, self._loaded, self._tasks, self.descriptor, self._now_ms)
        return drawn, await trio.to_thread.run_sync(episode.sealed, self._terms.identity, drawn.trace)

    async def _keep(self, trace: Trace, signed: Signed, timing: Timing) -> None:
        """Put a trace on the disk. A full one is waited for, and when many wait nothing more is drawn."""
        await keep_trying(self._report, "a finished trace", self._store.put_trace, signed, trace, timing)
        self._unkept -= 1
        self._pauses = backoff(self._random, first=1.0, cap=60.0)
        self._status.traces_drawn += 1
        self._status.reward_sum += trace.reward
        self._say(
            "trace_drawn",
            f"drew {len(trace.tokens)} tokens, reward {trace.reward:g}",
            Level.DETAIL,
            trace=signed.digest.hex(),
            lease=trace.lease_id.hex(),
            slot=trace.slot,
            tokens=len(trace.tokens),
            reward=trace.reward,
        )
        self.wake()

    def _say(self, name: str, text: str, level: Level = Level.INFO, **values: Any) -> None:
        self._report(Event(name, text, level, values))


def _describe(descriptor: EngineDescriptor) -> str:
    return f"{descriptor.name} {descriptor.version}, {descriptor.dtype} on {descriptor.device}"
