"""A download from several sources at once: other nodes, mirrors, and the trainer for what nobody else has.

A download is a list of wanted blobs; what they are pieces of does not matter here. Every request has a deadline, and
is made again elsewhere when it is late. A source that fails is left alone for a while, one that sends wrong bytes for
long. Not here: which piece is asked for next (pieces.py), the wire (sources.py, mirror.py), the disk (a callback).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import trio

from node.config import NodeConfig
from node.peers import PeerBook
from node.pieces import Ask, Offer, Pieces
from node.report import Event, Level, Meter, Report
from node.sources import PeerSource, Record, Source
from node.store import PieceMissing, size_text
from protocol import messages
from protocol.errors import Code, NetError, RemoteError
from protocol.net.base import Host, peer_address
from protocol.policy import Blob

_LINES: Final = 16  # other nodes asked in one download
_REQUESTS: Final = 2  # of one source at once, so that its link does not idle between two; of many, one is enough
_MANY: Final = 4
_NOT_FOUND_TRIES: Final = 3  # of the trainer: then the piece is gone, a newer policy is out
_GREET_SECONDS: Final = 1.0  # for known nodes to say what they have, before the trainer is asked
_TURN_SECONDS: Final = 0.1  # a node; in that time the others hear that one is asking the trainer
_TOGETHER: Final = 2  # so many other nodes and more take turns
_TRAINER_RATE: Final = 10_000_000.0  # bytes a second, until it has been tried
_MOST_TURN_SECONDS: Final = 5.0
_REMEMBERED: Final = 1_024  # nodes; more than a book holds
_LOOK_SECONDS: Final = 0.5  # an idle requester looks again for late requests so often

# Stores a piece. Raises ValueError when the bytes are not it.
Keep = Callable[[Blob, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Pace:
    """The waits of a download, in seconds."""

    patience: float = 10.0  # a request is late after this and three times what the source usually needs
    refresh: float = 20.0  # a peer is asked again what it has; the stream lives on silence of 45 s at most
    rest: float = 5.0  # a source that failed is left alone, at first; the trainer for a tenth of it
    rest_most: float = 300.0  # and after many failures
    ban: float = 3_600.0  # after wrong bytes
    dial: float = 5.0  # a node that is there answers faster


@dataclass(slots=True, eq=False)
class Line:
    """A source at work in a download."""

    source: Source
    record: Record
    kind: str  # "trainer", "node" or "mirror"
    offer: Offer
    scopes: dict[bytes, trio.CancelScope] = field(default_factory=dict)
    changed: trio.Event = field(default_factory=trio.Event)  # it may have more to give than before

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


@dataclass(slots=True)
class Progress:
    """How a download goes. Rates are bytes a second."""

    what: str
    total: int
    left: int
    given: Counter[str] = field(default_factory=Counter)  # bytes by kind of source
    givers: dict[str, set[str]] = field(default_factory=dict)  # names by kind of source
    meter: Meter = field(default_factory=lambda: Meter(trio.current_time))

    def note(self, line: Line, length: int, left: int) -> None:
        self.given[line.kind] += length
        self.givers.setdefault(line.kind, set()).add(line.source.name)
        self.meter.add(length)
        self.left = left

    def sources(self) -> str:
        """As in "3 nodes, 1 mirror and the trainer"."""
        counts = [(len(self.givers.get(kind, ())), kind) for kind in ("node", "mirror")]
        words = [f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in counts if count]
        words += ["the trainer"] if "trainer" in self.givers else []
        return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), *words[-1:]]) or "nobody yet"

    def text(self) -> str:
        rate = self.meter.rate()
        ends = f"{_duration(self.left / rate)} left" if rate else "waiting"
        return (
            f"{self.what}: {size_text(self.left)} of {size_text(self.total)} left, from {self.sources()}, "
            f"{size_text(int(rate))}/s, {ends}"
        )

    def values(self) -> dict[str, Any]:
        rate = self.meter.rate()
        return {
            "what": self.what,
            "bytes_total": self.total,
            "bytes_left": self.left,
            "bytes_by_source": dict(self.given),
            "sources": sum(map(len, self.givers.values())),
            "bytes_per_second": int(rate),
            "seconds_left": round(self.left / rate, 1) if rate else None,
        }


def _duration(seconds: float) -> str:
    if seconds >= 5_400:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class Swarm:
    """The sources this node knows, and downloads from them."""

    def __init__(
        self,
        nursery: trio.Nursery,
        host: Host,
        config: NodeConfig,
        book: PeerBook,
        report: Report,
        random: Random,
        *,
        mirrors: Sequence[Source] = (),
        pace: Pace | None = None,
    ) -> None:
        address = config.address
        self._nursery = nursery
        self._host = host
        self._config = config
        self._book = book
        self._report = report
        self._random = random
        self.pace = pace or Pace()
        trainer = PeerSource(nursery, host, address.trainer, (address.dial,), config.dial_seconds, has_all=True)
        self.trainer: Source = trainer
        self.mirrors = tuple(mirrors)
        self.on_coming: Callable[[bytes], None] = lambda digest: None  # told of what the trainer is asked for
        self._nodes: dict[bytes, PeerSource] = {}
        self._records: dict[str, Record] = {trainer.name: Record(guess=_TRAINER_RATE)}

    def record(self, source: Source) -> Record:
        return self._records.setdefault(source.name, Record())

    def nodes(self) -> list[PeerSource]:
        """The other nodes that say where they are reached and are not left alone now."""
        now = trio.current_time()
        if len(self._nodes) > _REMEMBERED:
            self._forget(now)
        found = [self._node(node, peer.addresses) for node, peer in self._book.known().items() if peer.addresses]
        return [each for each in found if each.addresses and self.record(each).rests_until <= now]

    def _node(self, node: bytes, told: Sequence[str]) -> PeerSource:
        dialled = (peer_address(each, node) for each in told)
        addresses = tuple(each for each in dialled if each is not None)
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = PeerSource(self._nursery, self._host, node, addresses, self.pace.dial)
        known.addresses = addresses
        return known

    def _forget(self, now: float) -> None:
        """Nodes that nobody knows any more; others may name new ones without end. Who is left alone is remembered."""
        known = self._book.known()
        gone = [node for node in self._nodes if node not in known and self.record(self._nodes[node]).rests_until <= now]
        for node in gone:
            self._records.pop(self._nodes.pop(node).name, None)

    def costs_trainer(self, source: Source) -> bool:
        """Whether what this node gives goes through the trainer: it had better give it itself."""
        return isinstance(source, PeerSource) and source.relay == self._config.address.trainer

    def ban(self, node: bytes) -> None:
        self._host.ban(node, self.pace.ban)

    async def fetch(self, wanted: Sequence[Blob], keep: Keep, what: str, tell: Callable[[Progress], None]) -> Progress:
        """Have every wanted piece kept. Tries until it is done, however long sources are away.

        `what` is for a person ("policy 12"); `tell` hears of every piece. Raises PieceMissing when the trainer has a
        piece no more and nobody else has it, and whatever `keep` raises but ValueError.
        """
        download = _Download(self, wanted, keep, what, tell, self._config, self._book, self._report, self._random)
        if wanted:
            await download.run()
        return download.progress


class _Download:
    def __init__(
        self,
        swarm: Swarm,
        wanted: Sequence[Blob],
        keep: Keep,
        what: str,
        tell: Callable[[Progress], None],
        config: NodeConfig,
        book: PeerBook,
        report: Report,
        random: Random,
    ) -> None:
        self._swarm = swarm
        self._pace = swarm.pace
        self._keep = keep
        self._tell = tell
        self._config = config
        self._book = book
        self._report = report
        self._pieces = Pieces(wanted, random)
        self.progress = Progress(what, self._pieces.total, self._pieces.total)
        self._random = random
        self._absent: Counter[bytes] = Counter()  # times the trainer said it has not
        self._lines: dict[str, Line] = {}
        self._finished = trio.Event()
        self._greeted = trio.Event()
        self._greeting: set[str] = set()  # nodes that should say what they have before the trainer is asked
        self._greeted_by: set[str] = set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for mirror in self._swarm.mirrors:
                self._add(nursery, mirror, "mirror", _REQUESTS)
            nursery.start_soon(self._recruit, nursery)
            nursery.start_soon(self._turn_to_trainer, nursery)
            await self._finished.wait()
            nursery.cancel_scope.cancel()

    async def _turn_to_trainer(self, nursery: trio.Nursery) -> None:
        """Last, once other nodes are known and have said what they have, or had the time to."""
        with trio.move_on_after(_GREET_SECONDS):
            await self._book.heard.wait()
            self._greeting = {source.name for source in self._swarm.nodes()[:_LINES]} - self._greeted_by
            if self._greeting:
                await self._greeted.wait()
        self._add(nursery, self._swarm.trainer, "trainer", self._config.blobs_in_flight)

    def _add(self, nursery: trio.Nursery, source: Source, kind: str, requests: int) -> None:
        offer = Offer(last_resort=kind == "trainer", holds=None if kind != "node" else set())
        line = self._lines[source.name] = Line(source, self._swarm.record(source), kind, offer)
        self._pieces.offers.append(offer)
        if isinstance(source, PeerSource):
            source.on_have = lambda have: self._on_have(line, have)
        nursery.start_soon(self._attend, line)
        for number in range(requests):
            nursery.start_soon(self._pull, line, number)

    async def _recruit(self, nursery: trio.Nursery) -> None:
        """Other nodes join in as they become known."""
        while True:
            changed = self._book.changed
            working = sum(line.kind == "node" and line.offer.answers for line in self._lines.values())
            for source in self._swarm.nodes():
                if source.name not in self._lines and working < _LINES:
                    self._add(nursery, source, "node", _REQUESTS)
                    working += 1
            with trio.move_on_after(self._pace.refresh):
                await changed.wait()

    # --- what a source has ---

    async def _attend(self, line: Line) -> None:
        """Know what the source has; leave it alone while it rests."""
        while True:
            await trio.sleep_until(line.record.rests_until)
            try:
                line.offer.holds = await line.source.holds(tuple(self._pieces.missing))
            except (NetError, RemoteError) as error:
                self._failed(line, "source_lost", error)
                continue
            finally:
                self._greeted_by.add(line.source.name)
                if self._greeting and self._greeting <= self._greeted_by:
                    self._greeted.set()
            line.offer.last_resort = line.kind == "trainer" or self._swarm.costs_trainer(line.source)
            line.offer.lacks.clear()
            line.offer.answers = line.record.rests_until <= trio.current_time()
            line.wake()
            await self._until_stale(line)

    async def _until_stale(self, line: Line) -> None:
        with trio.move_on_after(self._pace.refresh):
            while line.record.rests_until <= trio.current_time():
                await line.changed.wait()

    def _on_have(self, line: Line, have: messages.Have) -> None:
        # SPEC 9.6: digests that were not asked about are ignored.
        if line.offer.holds is not None:
            line.offer.holds.update(digest for digest in have.digests if digest in self._pieces.missing)
            line.wake()
        now, trainer = trio.current_time(), self._swarm.record(self._swarm.trainer)
        for digest in have.coming:
            if (blob := self._pieces.missing.get(digest)) is not None:
                seconds = self._pace.patience + 3 * trainer.expected_seconds(blob.length)
                line.offer.promise(digest, now, now + seconds)

    # --- pieces ---

    async def _pull(self, line: Line, number: int) -> None:
        while True:
            blob = self._choose(line, number)
            if blob is not None and line.kind == "trainer":
                await self._wait_turn()
                blob = self._choose(line, number)  # another node may have it by now
            if blob is None:
                with trio.move_on_after(_LOOK_SECONDS):
                    await line.changed.wait()
            else:
                await self._ask(line, blob)

    async def _wait_turn(self) -> None:
        """Nodes that want the same at the same time ask the trainer one after the other: who comes later has heard
        that the piece is coming to another, or is there."""
        others = self._pieces.helpers(trio.current_time())
        if others >= _TOGETHER:
            await trio.sleep(self._random.uniform(0, min(others * _TURN_SECONDS, _MOST_TURN_SECONDS)))

    def _choose(self, line: Line, number: int) -> Blob | None:
        now = trio.current_time()
        if line.record.rests_until > now:
            return None
        if line.kind == "trainer":
            # One at a time while others are there: what it gives one node, the others can have from that one.
            if number and self._pieces.helpers(now) >= _TOGETHER:
                return None
            return self._pieces.choose(line.offer, now)
        if number and self._pieces.helpers(now) > _MANY:
            return None
        if line.offer.last_resort and self._trainer_gives(now):
            return None
        in_flight = sum(len(each.offer.asks) for each in self._lines.values() if each.kind != "trainer")
        return self._pieces.choose(line.offer, now) if in_flight < self._config.blobs_in_flight else None

    def _trainer_gives(self, now: float) -> bool:
        """Whether the trainer answers, or was not asked yet."""
        line = self._lines.get(self._swarm.trainer.name)
        return line is None or line.offer.is_usable(now) or not (line.record.failures or line.record.rests_until > now)

    async def _ask(self, line: Line, blob: Blob) -> None:
        now, expected = trio.current_time(), line.record.expected_seconds(blob.length)
        late = self._pace.patience + 3 * expected
        ask = Ask(now, now + late, now + self._pace.patience / 5 + 1.5 * expected)
        seconds = self._config.blob_seconds if line.kind == "trainer" else min(self._config.blob_seconds, 2 * late)
        line.offer.asks[blob.digest] = ask
        if line.kind == "trainer":
            self._swarm.on_coming(blob.digest)
        scope = line.scopes[blob.digest] = trio.CancelScope()
        data = b""
        try:
            with scope:
                data = await line.source.fetch(blob, seconds=seconds)
            if scope.cancelled_caught:
                self._beaten(line, ask)
            else:
                await self._take(line, blob, data, now)
        except NetError as error:
            self._failed(line, "blob_late", error)
        except RemoteError as error:
            self._refused(line, blob, error)
        finally:
            del line.offer.asks[blob.digest], line.scopes[blob.digest]

    async def _take(self, line: Line, blob: Blob, data: bytes, asked: float) -> None:
        try:
            await self._keep(blob, data)
        except ValueError:
            self._blame(line, blob)
            return
        line.record.worked(blob.length, trio.current_time() - asked)
        if self._pieces.done(blob.digest):
            self.progress.note(line, blob.length, self._pieces.left)
            self._tell(self.progress)
            if not self._pieces.missing:
                self._finished.set()
            for other in self._lines.values():
                if other is not line and blob.digest in other.scopes:
                    other.scopes[blob.digest].cancel()

    def _beaten(self, line: Line, ask: Ask) -> None:
        """Another source was asked later and gave the piece sooner."""
        if ask.late_at <= trio.current_time():
            self._rest(line)

    # --- failures ---

    def _blame(self, line: Line, blob: Blob) -> None:
        name = line.source.name
        text = f"{name} sent wrong bytes for a piece of {self.progress.what}: dropped, asked elsewhere"
        self._say("blob_wrong", text, Level.WARNING, peer=name)
        if line.kind == "trainer":
            line.record.failures = 0
            self._rest(line)
            return
        line.record.banned(trio.current_time(), self._pace.ban)
        line.offer.answers = False
        if isinstance(line.source, PeerSource):
            self._swarm.ban(line.source.node)

    def _refused(self, line: Line, blob: Blob, error: RemoteError) -> None:
        missing = error.code == Code.NOT_FOUND
        if missing and line.kind == "trainer":
            self._absent[blob.digest] += 1
            if self._absent[blob.digest] >= _NOT_FOUND_TRIES:
                raise PieceMissing(f"{line.source.name} no longer has {self.progress.what}") from error
        elif error.code == Code.BUSY:
            line.record.busy(trio.current_time(), self._pace.rest)
            line.offer.answers = False
            line.wake()
            return
        elif missing:
            line.offer.lacks.add(blob.digest)
            if line.kind == "mirror":
                return  # it may be filled later than the trainer publishes
        self._failed(line, "blob_refused", error)

    def _failed(self, line: Line, name: str, error: Exception) -> None:
        level = Level.WARNING if line.kind == "trainer" and name != "source_lost" else Level.DETAIL
        text = str(error) if isinstance(error, NetError) else f"{line.source.name}: {error}"
        self._say(name, text, level, peer=line.source.name)
        self._rest(line)

    def _rest(self, line: Line) -> None:
        first = self._pace.rest / 10 if line.kind == "trainer" else self._pace.rest
        most = self._pace.rest_most / 10 if line.kind == "trainer" else self._pace.rest_most
        line.record.failed(trio.current_time(), first, most)
        line.offer.answers = False
        line.wake()

    def _say(self, name: str, text: str, level: Level, **values: Any) -> None:
        self._report(Event(name, text, level, values))
