"""Processes that use a node's home and are killed (-9) at a named write: `python -m tests.node.dying_process JOB`.

One process that forks one child a kill, so that the imports are paid for once. It prints what became of each, for
test_killed_at_every_write.py to judge. What a process is about to do to the files below its home is seen through the
interpreter's audit events, and os.fsync, which has none: the code that writes knows nothing of it. Not here: kills at
random moments of a download over libp2p (downloading_process.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from node.housekeeping import collect, look, verify
from node.store import Home, lock_holder, run_folder
from protocol.errors import StorageError
from protocol.identity import Identity
from protocol.net import memory
from tests.node.fetching_node import fetching_node
from tests.node.small_trainer import SmallTrainer

REMOVAL = "remove inside a folder"
IN_FLIGHT = 2  # pieces asked for at once
TRAINER = Identity(b"\1" * 32)
NODE = Identity(b"\2" * 32)


def make_trainer(folders: tuple[Path, ...]) -> SmallTrainer:
    """The same one in every process, but for its times. Each folder is a version, with a delta from the one before."""
    trainer = SmallTrainer(identity=TRAINER)
    for version, folder in enumerate(folders):
        trainer.publish(folder, version, deltas_from=range(version)[-1:])
    return trainer


# --- where it is killed ---


def name_of(what: str, path: Path, home: Path) -> str:
    """A write by what it does and to which kind of file: "rename blobs/DIGEST"."""
    place = str(path.relative_to(home))
    place = re.sub(r"runs/[0-9a-f]{16}/?", "", place) or "."
    place = re.sub(r"v\d{8}-[0-9a-f]{16}", "VERSION", re.sub(r"[0-9a-f]{32,}", "DIGEST", place))
    place = re.sub(r"VERSION.unfinished/(?!model|manifest).*", "VERSION.unfinished/OTHER", place)
    return f"{what} {re.sub(r'[.][0-9]+-[0-9]+[.]unfinished', '.unfinished', place)}"


def watch(home: Path, reached: Callable[[str], None]) -> None:
    """`reached` is called before each write below `home` of this process, for as long as it lives."""
    begins = f"{home}{os.sep}"
    fsync = os.fsync

    def tell(what: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and str(path).startswith(begins):
            reached(name_of(what, Path(path), home))

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR):
                tell("open", path)
        elif event == "os.rename":
            tell("rename", arguments[1])  # to
        elif event in ("os.mkdir", "os.remove", "shutil.rmtree", "os.truncate"):
            if event == "os.remove" and arguments[1] != -1:  # inside rmtree, named from its folder
                reached(REMOVAL)
            tell(event.rpartition(".")[2], arguments[0])

    def seen_fsync(handle: int) -> None:
        tell("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    sys.addaudithook(see)
    os.fsync = seen_fsync  # type: ignore[assignment]


def note_into(path: Path) -> Callable[[str], None]:
    """Append each write that is reached to a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def reached(name: str) -> None:
        os.write(handle, f"{name}\n".encode())

    return reached


def die_at(point: str, occurrence: int) -> Callable[[str], None]:
    seen: Counter[str] = Counter()

    def reached(name: str) -> None:
        seen[name] += 1
        if name == point and seen[name] == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


# --- what it does ---


def follow(home: Path, folders: tuple[Path, ...], asked: Path, reached: Callable[[str], None]) -> None:
    """Hold the home, follow the newest policy, prune as a worker does; each piece asked for is noted in `asked`."""
    watch(home, reached)
    trainer = make_trainer(folders)
    note = note_into(asked)

    def on_blob(digest: bytes, data: bytes) -> bytes:
        note(digest.hex())
        return data

    trainer.on_blob = on_blob
    with held_home(home):
        trio.run(_follow, run_folder(home, trainer.run), trainer, len(folders) - 1)


async def _follow(folder: Path, trainer: SmallTrainer, version: int) -> None:
    network = memory.Network()
    async with network.host(TRAINER) as theirs, network.host(NODE, listen=()) as ours:
        trainer.serve(theirs)
        address = trainer.address(theirs)
        async with fetching_node(
            folder, ours, NODE, address, blobs_in_flight=IN_FLIGHT, keep_versions=1, serve=False, scout_seconds=60
        ) as node:
            node.book.learn(())  # nobody else is there to wait for
            node.follower.offer(trainer.policies[version].signed)
            await node.until_ready(version)
            node.store.prune({version})


@contextmanager
def held_home(home: Path) -> Iterator[Home]:
    """Wait for whoever has it: `rlnode store gc` takes it for a moment."""
    deadline = time.monotonic() + 30
    with ExitStack() as stack:
        while True:
            try:
                held = stack.enter_context(Home(home))
                break
            except StorageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield held


def gc(home: Path, reached: Callable[[str], None]) -> None:
    """`rlnode store gc`, no node running."""
    watch(home, reached)
    collect(home)


def look_through(home: Path, until: Path) -> None:
    """`rlnode store ls`, `verify` and, beside a running node, `gc`, over and over until a file is there."""
    while not until.exists():
        look(home)
        damaged = list(verify(home))
        assert not damaged, damaged
        if lock_holder(home) is not None:
            collect(home)


# --- kills, one after another ---


def fork(work: Callable[[], None]) -> int:
    """The process id of a child that does it."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def outcome(child: int) -> int:
    """As subprocess tells it: minus the signal, or the exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kills(points: Path) -> list[tuple[str, int]]:
    """Every named write, the first time and the last; of a folder that is removed, before each of its files."""
    counts = Counter(points.read_text().splitlines())
    found = []
    for name, count in counts.items():
        times = range(1, count + 1) if name == REMOVAL else sorted({1, count})
        found += [(name, number) for number in times]
    return found


def each_write(where: Path, start: Path | None, job: Callable[[Path, Path, Callable[[str], None]], None]) -> None:
    """Do a job once; then again for each of its writes, killed there, and once more to the end."""

    def fresh(name: str) -> Path:
        (where / name).mkdir()
        home = where / name / "home"
        if start is not None:
            shutil.copytree(start, home)
        return home

    home = fresh("once")
    points = home.with_name("points")
    ended = outcome(fork(partial(job, home, home.with_name("asked"), note_into(points))))
    say(ended=ended, where=str(where / "once"))
    for number, (point, occurrence) in enumerate(kills(points)):
        home = fresh(str(number))
        asked = home.with_name("asked")
        killed = outcome(fork(partial(job, home, asked, die_at(point, occurrence))))
        shutil.copytree(home, home.with_name("killed"))
        ended = outcome(fork(partial(job, home, asked, die_at("", 0))))
        say(point=point, occurrence=occurrence, killed=killed, ended=ended, where=str(where / str(number)))


def beside(where: Path, start: Path, folders: tuple[Path, ...]) -> None:
    """Kill a node again and again while another process looks through its home."""
    home, over = where / "home", where / "over"
    shutil.copytree(start, home)
    other = fork(lambda: look_through(home, over))
    for point in (
        "rename blobs/DIGEST",
        "open policies/VERSION.unfinished/model.safetensors",
        "rename policies/VERSION",
        REMOVAL,
        "",
    ):
        work = partial(follow, home, folders, where / "asked", die_at(point, 1))
        say(point=point, ended=outcome(fork(work)))
    over.touch()
    say(point="beside", ended=outcome(other))


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(job: str, where: Path, start: Path | None, folders: tuple[Path, ...]) -> None:
    if job == "beside":
        assert start is not None
        beside(where, start, folders)
    elif job == "gc":
        each_write(where, start, lambda home, _, reached: gc(home, reached))
    else:
        each_write(where, start, lambda home, asked, reached: follow(home, folders, asked, reached))


if __name__ == "__main__":
    _job, _where, _start, *_folders = sys.argv[1:]
    main(_job, Path(_where), Path(_start) if _start else None, tuple(map(Path, _folders)))
