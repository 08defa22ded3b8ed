"""The other nodes of the run: the trainer's list of them, kept on the disk so that it outlives the trainer's absence.

The list says where to fetch (swarm.py) and whom to serve (serving.py). Not here: the policies themselves.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import trio

from node.asking import Asker
from node.report import Event, Level, Report
from node.store import write_whole
from protocol import codec, limits, messages
from protocol.errors import DecodeError, Refused, StorageError
from protocol.identity import peer_id
from protocol.net.base import Address, peer_address

_KEPT: Final = 256  # nodes remembered; the trainer names at most 64 at once
_GAP_SECONDS: Final = 1.0  # between two questions
_REFRESH_SECONDS: Final = 30.0  # without a reason
_ADMIT_SECONDS: Final = 5.0  # for the trainer to say who a stranger is


class PeerBook:
    """Who else there is, as the trainer said last. `changed` and `stirred` are set and replaced."""

    def __init__(self, path: Path, ours: bytes) -> None:
        """`path`: where the list is kept; one that is there is read."""
        self._path = path
        self._ours = ours
        self.peers: Mapping[bytes, messages.Peer] = {peer.node: peer for peer in self._read() if peer.node != ours}
        self.heard = trio.Event()  # the trainer has answered this process, now or earlier
        self.changed = trio.Event()  # the list is another
        self.stirred = trio.Event()  # the trainer should be told or asked something
        self.strangers: dict[bytes, None] = {}  # who asked us and is not in the list

    def _read(self) -> tuple[messages.Peer, ...]:
        try:
            return codec.decode(messages.PeersReply, self._path.read_bytes()).peers
        except (OSError, DecodeError):  # none yet, or damaged: the trainer has a new one
            return ()

    def stir(self) -> None:
        self.stirred.set()
        self.stirred = trio.Event()

    def learn(self, peers: Iterable[messages.Peer]) -> bool:
        """Take a list from the trainer. Whether anything is new."""
        told = {peer.node: peer for peer in peers if peer.node != self._ours}
        merged = {**told, **{node: peer for node, peer in self.peers.items() if node not in told}}
        merged = dict(list(merged.items())[:_KEPT])
        self.strangers = {node: None for node in self.strangers if node not in merged}
        is_new = merged != self.peers
        self.heard.set()
        self.peers = merged
        self.changed.set()
        self.changed = trio.Event()
        return is_new

    def save(self) -> None:
        """Keep the newest on the disk. Raises StorageError."""
        newest = tuple(self.peers.values())[: limits.MAX_PEERS_PER_REPLY]
        write_whole(self._path, codec.encode(messages.PeersReply(newest)), "keeping the list of nodes", lasting=False)

    async def admits(self, node: bytes) -> bool:
        """Whether the trainer named this node; asks it when it did not yet, and waits a moment."""
        if node in self.peers:
            return True
        if len(self.strangers) < limits.MAX_PEERS_ASKED:
            self.strangers[node] = None
            self.stir()
        with trio.move_on_after(_ADMIT_SECONDS):
            while node in self.strangers and node not in self.peers:
                await self.changed.wait()
        self.strangers.pop(node, None)
        return node in self.peers


class PeerExchange:
    """Tells the trainer what this node has and where, and asks who else is there, as long as a session lasts."""

    def __init__(
        self,
        book: PeerBook,
        addresses: tuple[str, ...],
        held: Callable[[], Iterable[int]],
        wanted: Callable[[], int | None],
        report: Report,
    ) -> None:
        """`addresses`: where this node listens, none when it serves nothing; `wanted`: the newest version seen."""
        self._book = book
        self._addresses = addresses
        self._held = held
        self._wanted = wanted
        self._report = report

    async def run(self, asker: Asker) -> None:
        while True:
            stirred = self._book.stirred
            about = tuple(self._book.strangers)[: limits.MAX_PEERS_ASKED]
            held = tuple(sorted(self._held()))[-limits.MAX_VERSIONS :]
            request = messages.GetPeers(self._wanted(), self._addresses, held, about)
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
        if self._book.learn(reply.peers):
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
    usable = [each for each in parsed if peer_address(str(each).partition("/p2p/")[0], each.node) is not None]
    ordered = sorted(usable, key=_nearness)
    return tuple(str(each).partition("/p2p/")[0] for each in ordered[: limits.MAX_PEER_ADDRESSES])


def _nearness(address: Address) -> int:
    if address.network == "memory":
        return 0
    parsed = ipaddress.ip_address(address.host)
    if parsed.is_loopback:
        return 3
    return 2 if parsed.is_link_local else int(parsed.is_private)
