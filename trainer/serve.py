"""Starts and watches the processes of a run, and shows what it does.

    gateway · auditors · learner · records · page       each `python -m trainer.… RUN`, each may die alone
    home engine                                         `rlnode join`, where --placement has one (home.py)

A process that ends is started again, later each time, and said why. An auditor that takes too much time or memory is
ended; a second one runs while a node waits for a re-audit. The children end when this process does, also when it is
killed: they watch their stdin, whose other end is here. Not here: any of their work.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from protocol.device_turns import look
from protocol.errors import StorageError, UsageError
from protocol.outputs import printable
from trainer import home
from trainer.child import CANNOT_START, DIVERGED, RESTARTED, last_sign, life, note_start, now_ms
from trainer.config import TrainerConfig
from trainer.guard import Guard
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupState
from trainer.naming import name_nodes, nodes_of
from trainer.place import locked
from trainer.rundir import Run, load_run_identity, load_secrets, open_run, short_of_room
from trainer.stall import AUDITORS, MOST_RESTARTS, RUN, Seen, Watch
from trainer.summary import summary
from trainer.waits import of_processes

STOP_SECONDS: Final = 4.0  # children get so long to end before they are killed
RESTART_SECONDS: Final = (0.2, 1.0, 3.0, 10.0, 30.0)  # before the first, second, … restart in a row
HEALTHY_SECONDS: Final = 60.0  # a process that ran so long starts again at once
LOOK_SECONDS: Final = 0.1
READ_SECONDS: Final = 1.0  # for the last words of a process that ended; a child of its own may hold its end open
VIEW_SECONDS: Final = 0.5
LINE_SECONDS: Final = 5.0
QUIET_SECONDS: Final = 15.0  # a gateway that gave no sign for so long hears nobody's
STARTS: Final = 5  # that a setting prevents, in 15 s, before the run ends: who has the port may be about to go
FAILED: Final = 3  # the exit code of a run whose engine this machine cannot run
STALLED: Final = 4  # of one that does not move
CAUSE_CHARACTERS: Final = 300  # of why an auditor ended, beside the trace it was at work on
LOG_BYTES: Final = 16 * 1024 * 1024  # a log is turned over at this size


@dataclass(slots=True)
class Child:
    """A process that should be running."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    guard: Guard | None = None  # of an auditor
    reaudits: str = ""  # the auditor whose refusals this one audits again: it runs while some wait
    program: str = sys.executable
    says_ready: bool = False  # in its lock (child.py)
    address: Path | None = None  # of the home engine: its last argument, and it runs once that is there
    given: str = ""  # the address it was started with
    failures_end: int = 0  # so many in a row end the run, which can do nothing without it; 0: never
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    was_well: bool = False  # it once ran for HEALTHY_SECONDS
    start_at: float = 0.0
    ended_for: str = ""  # why this process was ended by the supervisor
    last_words: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None  # of what it says


def children_of(run: Run, wandb: str = "", placement: str = "disaggregated", rlnode: str = "") -> list[Child]:
    """The processes of a run. `wandb`: the project of Weights & Biases that its steps are sent to, if to any. `rlnode`:
    the command that the home engine is, where `placement` has one."""
    in_turns = placement == "colocated"
    path = str(run.folder.path)

    def child(name: str, module: str, *more: str, says_ready: bool = False) -> Child:
        return Child(name, ("-m", module, path, *more), run.folder.logs / f"{name}.log", says_ready=says_ready)

    def auditor(name: str, *more: str) -> Child:
        made = child(name, "trainer.audit", "--name", name, *more, says_ready=True)
        made.guard = Guard(run.config)
        return made

    auditors = [auditor(f"auditor-{i}") for i in range(run.config.auditors)]
    if len(auditors) == 1:
        # SPEC 8.8: a re-audit MUST be by another auditor than the one that refused.
        second = auditor("auditor-second", "--reaudits")
        second.reaudits = auditors[0].name
        auditors.append(second)
    at_home = []
    if placement in home.PLACES:
        engine = Child(home.NAME, home.words(run, in_turns=in_turns), run.folder.logs / "home.log", program=rlnode)
        engine.address, engine.failures_end = run.folder.near_address, home.FAILURES if in_turns else 0
        at_home.append(engine)
    return [
        child("gateway", "trainer.gateway", *(("--in-turns",) if in_turns else ()), says_ready=True),
        *at_home,
        *auditors,
        child("learner", "trainer.learner" if run.config.learners == 1 else "trainer.learners", says_ready=True),
        child("records", "trainer.records", *(("--wandb", wandb) if wandb else ())),
        child("page", "trainer.api"),
    ]


class Supervisor:
    """Keeps the children running until told to stop."""

    def __init__(self, run: Run, ledger: Ledger, children: list[Child]) -> None:
        self._run = run
        self._ledger = ledger
        self._children = children
        self.news: list[str] = []  # what a person should see, oldest first
        self.gave_up = ""  # why the run ends: to start a process again would not help
        self.code = 0  # with which it ends then

    def look(self) -> None:
        """Start what should run and does not, end what should not; say why something ended."""
        now = time.monotonic()
        for child in self._children:
            wanted = self._is_wanted(child)
            if child.process is not None and (code := child.process.poll()) is not None:
                self._ended(child, code, now, wanted)
            if child.process is None and wanted and now >= child.start_at and not self.gave_up:
                self._start(child, now)
            elif child.process is not None and not wanted:
                _hang_up(child.process)
            elif child.process is not None and child.given not in ("", _text(child.address)):
                child.ended_for = "the gateway listens elsewhere now"
                _hang_up(child.process)
            if child.process is not None and child.guard is not None:
                self._watch(child, child.process, child.guard)

    def _is_wanted(self, child: Child) -> bool:
        if child.address is not None:
            return bool(_text(child.address))
        return not child.reaudits or self._ledger.reaudits_waiting(child.reaudits) > 0

    def _watch(self, child: Child, process: subprocess.Popen[bytes], guard: Guard) -> None:
        """End an auditor that a trace made use too much. It may be stopped or deep in native code: it is not asked."""
        child.ended_for = child.ended_for or guard.cause(process.pid, self._ledger.claimed_ms(child.name))
        if child.ended_for:
            process.kill()

    def _start(self, child: Child, now: float) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        child.given = _text(child.address)
        if child.says_ready:
            note_start(self._run.folder.path, child.name)
        child.process = subprocess.Popen(
            [child.program, *child.arguments, *([child.given] if child.given else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if child.address is None else subprocess.PIPE,
            stderr=subprocess.PIPE if child.address is None else subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C comes to this process alone, which then ends the others in order
        )
        child.started = now
        child.ended_for = ""
        child.last_words.clear()
        source = child.process.stderr or child.process.stdout
        assert source is not None
        child.reader = threading.Thread(target=_keep_log, args=(source, child.log, child.last_words), daemon=True)
        child.reader.start()

    def _ended(self, child: Child, code: int, now: float, wanted: bool) -> None:
        if child.process is not None:
            _hang_up(child.process)
        child.process = None
        if child.reader is not None:
            child.reader.join(READ_SECONDS)
        if not wanted:
            return
        if now - child.started > HEALTHY_SECONDS:
            child.failures, child.was_well = 0, True
        delay = RESTART_SECONDS[min(child.failures, len(RESTART_SECONDS) - 1)]
        child.failures += 1
        child.start_at = now + delay
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if child.ended_for:
            how = f"was ended: {child.ended_for}"
        said = child.last_words[-1] if child.last_words and not child.ended_for else ""
        # What is killed from outside does not say why.
        why = said and (f"; its last words: {said}" if code < 0 else f": {said}")
        if code == DIVERGED and child.name == "learner":
            self._give_up(DIVERGED, f"the learner {how}{why}", child)
            return
        # rlnode's 2 says nothing of this run's addresses, and others may draw for it.
        cannot = code == CANNOT_START and child.name in ("gateway", "page")
        if cannot and child.failures == STARTS and not child.was_well:
            self._give_up(CANNOT_START, f"the {child.name} {how}{why}", child)
            return
        if child.failures == child.failures_end:
            self._give_up(FAILED, f"the {child.name} {how}{why}, {child.failures} times in a row", child)
            return
        if child.guard is not None:
            self._release(child.name, died_of=f"the auditor {how}{why}"[:CAUSE_CHARACTERS])
        self.say("process", f"the {child.name} {how}{why}{RESTARTED} in {delay:g} s (see {child.log})")

    def _give_up(self, code: int, why: str, child: Child) -> None:
        self.code, self.gave_up = code, why
        self.say("process", f"{why}; the run ends (see {child.log})")

    def _release(self, auditor: str, died_of: str | None) -> None:
        """What it was at work on is for another: this one may not come back soon."""
        with contextlib.suppress(StorageError):  # its next start does it
            self._ledger.release_claims(auditor, died_of=died_of)

    def processes_of(self, part: str) -> dict[str, int]:
        """The children of a part that run: name → process id."""
        return {
            each.name: each.process.pid
            for each in self._children
            if each.name.startswith(part) and each.process is not None
        }

    def restart(self, part: str, cause: str) -> None:
        """End the children of a part, which are then started again. They are not asked: they do nothing."""
        for child in self._children:
            if child.name.startswith(part) and child.process is not None and not child.ended_for:
                child.ended_for = cause
                child.process.kill()

    def say(self, kind: str, text: str) -> None:
        self.news.append(text)
        with contextlib.suppress(StorageError):  # the page misses a line; the screen does not
            self._ledger.add_event(now_ms(), kind, text)

    def stop(self) -> None:
        """End all children: ask, wait, then kill. In under 5 s."""
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            _hang_up(process)
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in self._children:
            if child.process is not None and child.guard is not None:
                self._release(child.name, died_of=None)  # ended by us, in the middle of a long batch perhaps
            child.process = None


def _text(path: Path | None) -> str:
    """Of a file that another process writes; "" where there is none."""
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Tell a child that its parent wants it to end."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _keep_log(source: IO[bytes], path: Path, last_words: list[str]) -> None:
    """Append what a child says to its log, and remember the last lines."""
    with contextlib.suppress(OSError), source:
        for raw in source:
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                last_words.append(line[:500])
                del last_words[:-5]
            with contextlib.suppress(OSError):  # a full disk costs the log, not the child
                _append(path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def _append(path: Path, text: str) -> None:
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- the command ---


def serve(
    path: Path,
    *,
    as_json: bool = False,
    moved: bool = False,
    wandb: str = "",
    placement: str | None = None,
    trust: Sequence[str] = (),
) -> int:
    """Serve the run until Ctrl-C, SIGTERM, or config.steps policy versions. Returns the exit code: 130 after Ctrl-C,
    STALLED where a part of the run does nothing although it was started again, FAILED where the only engine fails,
    CANNOT_START where gateway or page cannot listen.

    `placement`: who generates, where it is not as the settings say. `trust`: peer ids of nodes to trust from now on.
    Raises UsageError (no run there, served already, a copy of a run that is not said to have `moved`, a project for
    Weights & Biases without its client, a home engine without rlnode, what is no peer id) or LocalError (its key or
    secrets cannot be used).
    """
    run = open_run(path)
    placement = placement or run.config.placement
    rlnode = home.find_rlnode() if placement in home.PLACES else ""
    if wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError('--wandb needs its client: pip install -e ".[wandb]"')
    load_run_identity(run)
    load_secrets(run)
    for words, where in ((run.config.trust, f"trust in {run.folder.config}"), (trust, "--trust")):
        # Before anything is written; the home engine may have no key yet.
        nodes_of(words, where, trainer=run.genesis.trainer, home=b"" if rlnode else None)
    run.folder.logs.mkdir(exist_ok=True)
    with locked(run, moved=moved), _Stopping() as stopping:
        for of_an_earlier_time in (run.folder.page, run.folder.address, run.folder.near_address):
            of_an_earlier_time.unlink(missing_ok=True)
        node = home.prepare(run, rlnode, in_turns=placement == "colocated")
        ledger, looking = Ledger(run.folder.ledger), Ledger(run.folder.ledger, read_only=True)
        supervisor = Supervisor(run, ledger, children_of(run, wandb, placement, rlnode))
        screen = _screen(run, as_json)
        try:
            name_nodes(run, ledger, node, trust)
            with screen:
                code = _serve(run, looking, supervisor, screen, stopping)
        finally:
            supervisor.stop()
            ledger.close()
            looking.close()
        screen.say("stopped", f"stopped; everything is on disk, `rltrainer serve {path}` goes on from here")
        return 130 if stopping.signal == signal.SIGINT else code


def _serve(run: Run, looking: Ledger, supervisor: Supervisor, screen: _Screen, stopping: _Stopping) -> int:
    told: dict[str, str] = {}
    news, room = _News(looking), _Room(run.folder.path)
    stalls = _Stalls(run, looking, supervisor)
    shown = 0.0
    while not stopping.wait(LOOK_SECONDS):
        supervisor.look()
        _tell(supervisor, screen)
        if supervisor.gave_up:
            return supervisor.code
        for name, file, text in (("address", run.folder.address, "rlnode join "), ("page", run.folder.page, "")):
            if file.exists() and told.get(name) != (found := file.read_text(encoding="utf-8").strip()) and found:
                told[name] = found
                screen.say(name, text + found)
        for kind, text in news.fresh():
            screen.say(kind, text)
        if time.monotonic() - shown >= screen.seconds:
            shown = time.monotonic()
            found_now = of_processes(summary(looking, run.config, now_ms()), run.folder)
            screen.show(found_now)
            if room.changed():
                screen.say("disk", room.told)
            if stalls.look(found_now):
                _tell(supervisor, screen)
                return STALLED
            if _is_done(run.config, found_now):
                screen.say("done", f"all {run.config.last_version} policy versions are made")
                return 0
    return 0


def _tell(supervisor: Supervisor, screen: _Screen) -> None:
    while supervisor.news:
        screen.say("process", supervisor.news.pop(0))


class _News:
    """What a person must know of that the run's processes wrote into the ledger, each said once: faults of the
    trainer's own, and trusted nodes that lied."""

    def __init__(self, looking: Ledger) -> None:
        self._looking = looking
        self._said: set[str] = set()
        self._last = looking.view("SELECT COALESCE(MAX(id), 0) AS id FROM events")[0]["id"]

    def fresh(self) -> list[tuple[str, str]]:
        """(kind, text), oldest first."""
        rows = self._looking.view(
            "SELECT id, kind, text FROM events WHERE id > ? AND kind IN ('fault', 'trust') ORDER BY id", (self._last,)
        )
        self._last = max([self._last, *(row["id"] for row in rows)])
        found = dict.fromkeys((row["kind"], row["text"]) for row in rows)
        new = [each for each in found if each[1] not in self._said]
        self._said.update(text for _, text in new)
        return new


class _Room:
    """Whether there is room on the disk: looked at here, because the ledger of a full one takes no event."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_short = False
        self.told = ""

    def changed(self) -> bool:
        short = short_of_room(self._folder)
        self.told = short or "there is room on the disk again: traces are accepted"
        was, self._is_short = self._is_short, bool(short)
        return was != self._is_short


class _Stalls:
    """Parts that have work and do none are started again; that nothing moves at all is said."""

    def __init__(self, run: Run, looking: Ledger, supervisor: Supervisor) -> None:
        self._run = run
        self._looking = looking
        self._supervisor = supervisor
        self._watch = Watch(run.config.stall_seconds)
        self._ready: dict[str, tuple[int, float]] = {}  # child → its process, first seen ready when
        self._first: tuple[int | None, int] = (None, 0)  # the home engine's process; its node's last sign before that

    def look(self, found: dict[str, Any]) -> bool:
        """Whether the run ends for it."""
        now = time.monotonic()
        for seen in self._parts(found):
            stuck = self._watch.look(seen, now)
            if stuck is None:
                continue
            if seen.part == RUN:
                self._supervisor.say("stall", f"{stuck.cause}; {_all_waits(found)}")
            elif stuck.hopeless:
                told = f"{stuck.part} was started again {MOST_RESTARTS} times and still does nothing: {stuck.cause}"
                self._supervisor.say("stall", f"{told}; the run ends, see {self._run.folder.logs}")
                return True
            else:
                part = home.NAME if stuck.part.startswith(home.NAME) else stuck.part.split()[0]
                self._supervisor.restart(part, stuck.cause)
        return False

    def _parts(self, found: dict[str, Any]) -> Iterator[Seen]:
        folder, owed, version = self._run.folder, self._looking.owed(), found["version"]
        if short_of_room(folder.path):
            return  # everybody waits for room, and says so
        waits = {each["part"]: each["what"] for each in found["waits"]}
        verdict = self._looking.last_verdict()
        of_gateway = (owed.received, owed.audited, owed.unsigned)
        sign, ready = last_sign(folder.path, "gateway"), self._since_ready("gateway")
        loops = "its event loop shows no sign of life" if self._supervisor.processes_of("gateway") else ""
        yield Seen("gateway loop", loops, sign, ready)
        works = waits["gateway"] if any(of_gateway) else ""
        yield Seen("gateway", works, (*of_gateway, verdict, owed.audits), ready)
        untaken = owed.audits > 0 and not self._looking.claims()
        owes = waits.get("auditors", "") if untaken else ""
        yield Seen(AUDITORS, owes, (untaken, owed.audits, verdict), self._since_ready(AUDITORS))
        learns = waits["learner"] if found["informative"] >= self._run.config.groups_per_step else ""
        yield from self._home_engine(sign)
        dropped = found["groups"].get(GroupState.DROPPED, 0)
        learner = self._since_ready("learner")
        yield Seen("learner", "" if _is_done(self._run.config, found) else learns, (version, dropped), learner)
        whole = None if ready is None or learner is None else max(ready, learner)
        yield Seen(RUN, "nothing was handed in, judged or learned", (*self._looking.last_times(), owed.audits), whole)

    def _since_ready(self, part: str) -> float | None:
        """Since when a process of the part is ready; None while it starts, or is started again."""
        now, found = time.monotonic(), []
        for name, process in self._supervisor.processes_of(part).items():
            told = life(self._run.folder.path, name)
            if told is None or told.ready_ms is not None:
                found.append(self._noted(name, process, now))
        return min(found, default=None)

    def _noted(self, name: str, process: int, now: float) -> float:
        if self._ready.get(name, (0, 0.0))[0] != process:
            self._ready[name] = (process, now)
        return self._ready[name][1]

    def _home_engine(self, gateway: int) -> Iterator[Seen]:
        """`gateway`: its last sign. Nobody hears a node while it gives none."""
        turn = look(self._run.folder.turns)
        node = self._looking.home()
        rows = self._looking.view("SELECT last_seen_ms, slots_busy FROM nodes WHERE node = ?", (node,))
        sign, busy = (rows[0]["last_seen_ms"], rows[0]["slots_busy"]) if rows else (0, 0)
        yield Seen(home.NAME, home.keeps_the_device(turn, busy), self._looking.last_times()[0])
        process = self._supervisor.processes_of(home.NAME).get(home.NAME)
        if process is None or now_ms() - gateway // 1_000_000 > 1000 * QUIET_SECONDS:
            yield Seen(home.LIFE, "", sign)
            return
        if process != self._first[0]:
            self._first = (process, sign)
        ready = None if sign == self._first[1] else self._noted(home.NAME, process, time.monotonic())
        held = {} if node is None else self._looking.held_slots(now_ms())
        has = home.has(turn, held[node][0] if node in held else 0)
        yield Seen(home.LIFE, f"nothing came from it{has}", (sign, home.turn_of(turn)), ready)


def _all_waits(found: dict[str, Any]) -> str:
    parts = [f"{each['part']} {each['what']}" for each in found["waits"]]
    parts += [f"node …{each['node'][-8:]} {each['doing']}" for each in found["nodes"][:3] if each["connected"]]
    return "; ".join(parts)


def _is_done(config: TrainerConfig, found: dict[str, Any]) -> bool:
    return config.last_version <= (found["version"] or 0)


class _Stopping:
    """SIGINT and SIGTERM as an event; a second one ends at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._before: dict[int, Any] = {}
        self.signal: int | None = None  # the one that came

    def __enter__(self) -> _Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self.signal = number
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


# --- what a person or a script sees ---


class _Screen:
    """JSON lines, for scripts."""

    seconds = VIEW_SECONDS

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def say(self, kind: str, text: str) -> None:
        print(json.dumps({"kind": kind, "text": text}), flush=True)

    def show(self, found: dict[str, Any]) -> None:
        print(json.dumps({"kind": "state", **found}), flush=True)


def _for_people(kind: str, text: str) -> str:
    return printable(f"page {text}" if kind == "page" else text)


class _Lines(_Screen):
    """Plain lines, for a log or a pipe."""

    seconds = LINE_SECONDS

    def say(self, kind: str, text: str) -> None:
        print(_for_people(kind, text), flush=True)

    def show(self, found: dict[str, Any]) -> None:
        from trainer.view import line

        print(line(found), flush=True)


class _Live(_Screen):
    """A view that is drawn anew in place."""

    def __init__(self, run: Run) -> None:
        from rich.live import Live

        self._run = run
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def say(self, kind: str, text: str) -> None:
        from rich.text import Text

        # An address must stay one line to be copied.
        self._live.console.print(Text(_for_people(kind, text)), soft_wrap=True)

    def show(self, found: dict[str, Any]) -> None:
        from trainer.view import render

        self._live.update(render(self._run, found), refresh=True)


def _screen(run: Run, as_json: bool) -> _Screen:
    if as_json:
        return _Screen()
    return _Live(run) if sys.stdout.isatty() else _Lines()
