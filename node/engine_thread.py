"""An engine in a thread of its own, so that neither the network nor an environment ever waits for a step.

The thread runs commands as they come and steps the engine while any sequence is in its turn. Not here:
what is drawn and why (worker.py), how (the engines).
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

from node.engine import Engine, EngineBroken, SequenceRequest, TurnDone, Usage
from protocol.errors import EngineError, RLCommonsError

T = TypeVar("T")

THREAD_NAME: Final = "rlnode engine"
_USAGE_SECONDS: Final = 1.0  # between two looks at what the engine is doing
_STOP_SECONDS: Final = 1.0  # for the step that is running; then the thread is left behind


class _Waiter:
    """An answer that the engine's thread will give."""

    __slots__ = ("event", "outcome")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.outcome: Any = None

    def give(self, outcome: Any) -> None:
        self.outcome = outcome
        self.event.set()

    async def wait(self) -> Any:
        await self.event.wait()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class EngineThread:
    """The async face of an engine. After any failure all who wait get EngineError and `run` raises it:
    a broken engine is made again, not mended."""

    def __init__(self, make: Callable[[], Engine], on_tokens: Callable[[int], None] = lambda count: None) -> None:
        self._make = make
        self._on_tokens = on_tokens
        self._commands: queue.SimpleQueue[tuple[Callable[[Engine], Any], _Waiter] | None] = queue.SimpleQueue()
        self._turns: dict[str, _Waiter] = {}
        self._waiters: set[_Waiter] = set()
        self._in_turn: set[str] = set()  # the engine's thread alone touches it
        self._failure: EngineError | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended = trio.Event()
        self._looked = -math.inf
        self.slots = 0  # 0 until the engine is made
        self.longest: int | None = None
        self.usage = Usage()  # as of a moment ago

    async def run(self) -> None:
        """Make the engine and drive it until cancelled. Raises EngineError."""
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        try:
            # trio-typing, which libp2p brings along, describes an older trio.
            await trio.to_thread.run_sync(  # type: ignore[call-arg]
                self._drive, thread_name=THREAD_NAME, abandon_on_cancel=True
            )
        except EngineError as error:
            self._fail(error)
            raise
        except Exception as error:
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._fail(failure)
            raise failure from error
        finally:
            self._commands.put(None)
            with trio.CancelScope(deadline=trio.current_time() + _STOP_SECONDS, shield=True):
                await self._ended.wait()

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        for waiter in [*self._waiters, *self._turns.values()]:
            if not waiter.event.is_set():
                waiter.give(error)
        self._turns.clear()

    @property
    def is_broken(self) -> bool:
        """It failed by itself; what a command raised without breaking it does not count."""
        return self._failure is not None

    # --- for tasks ---

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run a command between two steps. Raises what it raises, or EngineError."""
        waiter = _Waiter()
        self._send(command, waiter)
        self._waiters.add(waiter)
        try:
            result: T = await waiter.wait()
            return result
        finally:
            self._waiters.discard(waiter)

    def _send(self, command: Callable[[Engine], Any], waiter: _Waiter) -> None:
        if self._failure is not None:
            raise self._failure
        self._commands.put((command, waiter))

    async def first_turn(self, request: SequenceRequest) -> TurnDone:
        return await self._turn(request.key, lambda engine: engine.open(request))

    async def next_turn(self, key: str, observed: tuple[int, ...], max_new_tokens: int) -> TurnDone:
        return await self._turn(key, lambda engine: engine.extend(key, observed, max_new_tokens))

    async def _turn(self, key: str, begin: Callable[[Engine], None]) -> TurnDone:
        def start(engine: Engine) -> None:
            begin(engine)
            self._in_turn.add(key)

        waiter = _Waiter()
        self._turns[key] = waiter
        try:
            await self.call(start)
            turn: TurnDone = await waiter.wait()
            return turn
        finally:
            self._turns.pop(key, None)

    async def finish(self, key: str) -> tuple[bytes, ...]:
        return await self.call(lambda engine: engine.finish(key))

    def abort(self, key: str) -> None:
        """Close a sequence; nobody waits for it."""

        def drop(engine: Engine) -> None:
            self._in_turn.discard(key)
            with contextlib.suppress(EngineError):  # not open any more is what was wanted
                engine.abort(key)

        if self._failure is None:
            self._commands.put((drop, _Waiter()))

    # --- in the engine's thread ---

    def _drive(self) -> None:
        try:
            engine = self._make()
            try:
                self._look(engine)
                while self._run_commands(engine):
                    if self._in_turn:
                        self._step(engine)
            finally:
                engine.close()
        finally:
            self._post(self._ended.set)

    def _run_commands(self, engine: Engine) -> bool:
        """All commands that are here; waits for one when there is nothing to step, and looks meanwhile whether the
        engine is still there. False to stop."""
        wait = not self._in_turn
        while True:
            try:
                item = self._commands.get(block=wait, timeout=_USAGE_SECONDS)
            except queue.Empty:
                if not wait:
                    return True
                self._look(engine)
                continue
            if item is None:
                return False
            command, waiter = item
            try:
                outcome: Any = command(engine)
            except EngineBroken as error:
                self._post(waiter.give, error)
                raise
            except RLCommonsError as error:
                outcome = error
            self._look(engine)
            self._post(waiter.give, outcome)
            wait = not self._in_turn

    def _step(self, engine: Engine) -> None:
        turns = engine.step()
        for turn in turns:
            self._in_turn.discard(turn.key)
        self._look(engine)
        if not turns:
            return
        self._post(self._deliver, turns)

    def _look(self, engine: Engine) -> None:
        self.slots, self.longest = engine.slots, engine.longest
        if time.monotonic() - self._looked >= _USAGE_SECONDS or not self._in_turn:
            self._looked = time.monotonic()
            self.usage = engine.usage()

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._token is not None
        with contextlib.suppress(trio.RunFinishedError):  # the process is ending
            self._token.run_sync_soon(function, *arguments)

    def _deliver(self, turns: tuple[TurnDone, ...]) -> None:
        self._on_tokens(sum(len(turn.tokens) for turn in turns))
        for turn in turns:
            if waiter := self._turns.get(turn.key):
                waiter.give(turn)
