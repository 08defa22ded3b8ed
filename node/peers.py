"""The other nodes of the run: those the trainer named, and those that others know.

The trainer's list is kept on the disk so that it outlives its absence, with its word that this node is of the run
(SPEC 8.13). The list says where to fetch (swarm.py) and whom to serve (serving.py): whom the trainer named, and who
shows its word. Not here: the policies themselves, asking other nodes (neighbours.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from node.asking import Asker
from node.report import Event, Level, Report
from node.store import write_whole
from protocol import codec, limits, messages
from protocol.envelope import Signed
from protocol.errors import DecodeError, Refused, RemoteError, StorageError
from protocol.identity import peer_id
from protocol.net.base import Address, peer_address
from protocol.run import open_membership

_KEPT: Final = 256  # nodes remembered; the trainer names at most 64 at once
_GAP_SECONDS: Final = 1.0  # between two questions
_REFRESH_SECONDS: Final = 30.0  # without a reason
_ADMIT_SECONDS: Final = 5.0  # for the trainer to say who a stranger is
_WORD_SECONDS: Final = 3_600.0  # the trainer's word, which comes anew each time, is kept on the disk so often
_HEARD_OF: Final = 128  # nodes remembered that others named
_HEARD_OF_ONE: Final = 16  # in one answer: nobody fills the book alone
_MEMBERS: Final = 4096


@dataclass(frozen=True, slots=True)
class Circle:
    """Whose word counts, about which run, and the trainer's time."""

    run: bytes
    trainer: bytes
    now_ms: Callable[[], int]


class PeerBook:
    """Who else there is. `changed` and `stirred` are set and replaced."""

    def __init__(self, path: Path | None, ours: bytes, circle: Circle | None = None) -> None:
        """`path`: where the trainer's list is kept; one that is there is read. Without a circle nobody's word counts
        but the trainer's list."""
        self._path = path
        self._ours = ours
        self._circle = circle
        kept = self._read()
        self.membership: Signed | None = kept.membership  # the trainer's word for this node
        self.peers: Mapping[bytes, messages.Peer] = {peer.node: peer for peer in kept.peers if peer.node != ours}
        self.heard_of: dict[bytes, messages.Peer] = {}  # from others than the trainer, the last ones
        self._word_told = -math.inf  # trio time at which the word was last called new
        self._members: dict[bytes, int] = {}  # who showed the trainer's word, until when in its time
        self.heard = trio.Event()  # the trainer has answered this process, now or earlier
        self.changed = trio.Event()  # the list is another
        self.stirred = trio.Event()  # the trainer should be told or asked something
        self.strangers: dict[bytes, None] = {}  # who asked us and is not in the list

    def _read(self) -> messages.PeersReply:
        try:
            return codec.decode(messages.PeersReply, b"" if self._path is None else self._path.read_bytes())
        except (OSError, DecodeError):  # none yet, or damaged: the trainer has a new one
            return messages.PeersReply(())

    def stir(self) -> None:
        self.stirred.set()
        self.stirred = trio.Event()

    def known(self) -> dict[bytes, messages.Peer]:
        """Everybody, those that the trainer named first."""
        return {**self.peers, **{node: peer for node, peer in self.heard_of.items() if node not in self.peers}}

    def learn(self, peers: Iterable[messages.Peer], membership: Signed | None = None) -> bool:
        """Take a list from the trainer, and its word for this node. Whether anything is new; the word alone counts
        as new once an hour."""
        now = trio.current_time()
        is_due = membership is not None and now - self._word_told > _WORD_SECONDS
        if is_due:
            self._word_told = now
        self.membership = membership or self.membership
        told = {peer.node: peer for peer in peers if peer.node != self._ours}
        merged = {**told, **{node: peer for node, peer in self.peers.items() if node not in told}}
        merged = dict(list(merged.items())[:_KEPT])
        self.strangers = {node: None for node in self.strangers if node not in merged}
        is_new = merged != self.peers or is_due
        self.heard.set()
        self.peers = merged
        self._tell()
        return is_new

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def hear(self, teller: bytes, peers: Iterable[messages.Peer]) -> tuple[bytes, ...]:
        """Take what another node knows. Who is new."""
        usable = [peer for peer in peers if peer.addresses and peer.node not in (self._ours, teller)]
        usable = usable[:_HEARD_OF_ONE]
        new = tuple(peer.node for peer in usable if peer.node not in self.heard_of and peer.node not in self.peers)
        self._remember(usable)
        return new

    def meet(self, node: bytes, request: messages.GetPeers) -> messages.PeersReply:
        """Another node introduced itself: remember where it is, say who else is there."""
        # SPEC 9.6: what is no IP address with a port is not passed on.
        addresses = tuple(each for each in request.addresses if peer_address(each, node) is not None)
        if addresses:
            self._remember([messages.Peer(node, addresses, request.versions)])
        others = [peer for each, peer in self.known().items() if peer.addresses and each != node]
        others.sort(key=lambda peer: request.version not in peer.versions)
        return messages.PeersReply(tuple(others[: limits.MAX_PEERS_PER_REPLY]))

    def leave(self, node: bytes) -> None:
        """Another node is gone, and nobody else knows it."""
        self.heard_of.pop(node, None)

    def _remember(self, peers: Iterable[messages.Peer]) -> None:
        before = dict(self.heard_of)
        for peer in peers:
            self.heard_of.pop(peer.node, None)  # so that it counts as the newest
            self.heard_of[peer.node] = peer
        while len(self.heard_of) > _HEARD_OF:
            del self.heard_of[next(iter(self.heard_of))]
        if self.heard_of != before:
            self._tell()

    def save(self) -> None:
        """Keep the newest on the disk. Raises StorageError."""
        if self._path is not None:
            newest = messages.PeersReply(tuple(self.peers.values())[: limits.MAX_PEERS_PER_REPLY], self.membership)
            write_whole(self._path, codec.encode(newest), "keeping the list of nodes", lasting=False)

    def show(self, node: bytes, membership: Signed | None) -> None:
        """Another node shows the trainer's word for it, or nothing. SPEC 8.13: what fails counts as nothing."""
        if self._circle is None or membership is None or len(self._members) >= _MEMBERS:
            return
        circle = self._circle
        with contextlib.suppress(RemoteError):
            now_ms = circle.now_ms()
            word = open_membership(membership, run=circle.run, trainer=circle.trainer, node=node, now_ms=now_ms)
            self._members[node] = word.expires_ms

    def is_admitted(self, node: bytes) -> bool:
        """Whether the trainer named this node, or it showed the trainer's word."""
        if node in self.peers:
            return True
        return self._circle is not None and self._members.get(node, 0) > self._circle.now_ms()

    async def admits(self, node: bytes) -> bool:
        """Whether the trainer named this node; asks it when it did not yet, and waits a moment."""
        if self.is_admitted(node):
            return True
        if len(self.strangers) < limits.MAX_PEERS_ASKED:
            self.strangers[node] = None
            self.stir()
        with trio.move_on_after(_ADMIT_SECONDS):
            while node in self.strangers and not self.is_admitted(node):
                await self.changed.wait()
        self.strangers.pop(node, None)
        return self.is_admitted(node)


class PeerExchange:
    """Tells the trainer what this node has and where, and asks who else is there, as long as a session lasts."""

    def __init__(
        self,
        book: PeerBook,
        where: Callable[[], tuple[str, ...]],
        held: Callable[[], Iterable[int]],
        wanted: Callable[[], int | None],
        report: Report,
    ) -> None:
        """`where`: the addresses it is reached at, none when it serves nothing; `wanted`: the newest version seen."""
        self._book = book
        self._where = where
        self._held = held
        self._wanted = wanted
        self._report = report

    async def run(self, asker: Asker) -> None:
        while True:
            stirred = self._book.stirred
            about = tuple(self._book.strangers)[: limits.MAX_PEERS_ASKED]
            held = tuple(sorted(self._held()))[-limits.MAX_VERSIONS :]
            request = messages.GetPeers(self._wanted(), self._where(), held, about)
            try:
                reply = await asker.patiently(request, messages.PeersReply, "asking which nodes there are")
            except Refused as error:
                self._report(Event("no_peers", f"the trainer names no other nodes: {error}", Level.DETAIL))
                self._book.heard.set()
                return
            await self._learn(reply, about)
            await trio.sleep(_GAP_SECONDS)
            with trio.move_on_after(_REFRESH_SECONDS):
                await stirred.wait()

    async def _learn(self, reply: messages.PeersReply, about: tuple[bytes, ...]) -> None:
        for node in about:  # those it did not name are no nodes of this run
            self._book.strangers.pop(node, None)
        if self._book.learn(reply.peers, reply.membership):
            try:
                await trio.to_thread.run_sync(self._book.save)
            except StorageError as error:
                self._report(Event("storage", str(error), Level.DETAIL))
            names = [peer_id(peer.node) for peer in reply.peers]
            self._report(
                Event("peers", f"{len(names)} other nodes in the trainer's list", Level.DETAIL, {"peers": names})
            )


def told_addresses(listening: Iterable[str]) -> tuple[str, ...]:
    """What others are told of where a host listens: without its key, those that reach furthest first."""
    parsed = [Address.parse(each) for each in listening]
    usable = [each for each in parsed if peer_address(each.told, each.node) is not None]
    return tuple(each.told for each in sorted(usable, key=_nearness)[: limits.MAX_PEER_ADDRESSES])


def _nearness(address: Address) -> int:
    if address.network == "memory":
        return 0
    parsed = ipaddress.ip_address(address.host)
    if parsed.is_loopback:
        return 3
    return 2 if parsed.is_link_local else int(parsed.is_private)
