"""Keeps in touch with a few other nodes: who else there is, and word of a new policy, with or without the trainer.

Every few seconds each of them is asked whom it knows; a policy that is news to this node is passed on to them at once.
What they say counts for nothing until the trainer's signature on it was checked. Not here: fetching (swarm.py),
answering them (serving.py), looking for policies while there is no session (scout.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

import trio

from node.peers import PeerBook
from node.report import Event, Level, Report
from node.serving import BlobServer
from node.sources import PeerSource
from node.swarm import Swarm
from node.weights import PolicyFollower
from protocol import limits, messages
from protocol.envelope import Signed
from protocol.errors import Code, NetError, RemoteError, SignatureError
from protocol.identity import peer_id
from protocol.net.base import Address, Host

_KEPT: Final = 4  # nodes this one keeps in touch with; about as many keep in touch with it
_ANNOUNCED: Final = 8  # announcements of one node in one round; honest nodes send each policy once
_REMEMBERED: Final = 16  # announcements that need no second check


def meeting_point(nursery: trio.Nursery, host: Host, address: str, dial_seconds: float) -> PeerSource:
    """A meeting point at this address, to be kept in touch with."""
    return PeerSource(nursery, host, Address.parse(address).node, (address,), dial_seconds)


class Neighbours:
    """The nodes kept in touch with, and what is heard from them and from those that keep in touch with this one."""

    def __init__(
        self,
        swarm: Swarm,
        server: BlobServer,
        book: PeerBook,
        follower: PolicyFollower,
        where: Callable[[], tuple[str, ...]],
        held: Callable[[], Iterable[int]],
        now_ms: Callable[[], int],
        report: Report,
        random: Random,
        *,
        points: Sequence[PeerSource] = (),
        seconds: float = limits.HEARTBEAT_SECONDS,
    ) -> None:
        """`where`: the addresses of this node. `points`: meeting points, always kept in touch with. `now_ms`: the
        trainer's time."""
        self._swarm = swarm
        self._server = server
        self._book = book
        self._follower = follower
        self._where = where
        self._held = held
        self._now_ms = now_ms
        self._report = report
        self._random = random
        self._points = tuple(points)
        self._seconds = seconds
        self._kept: dict[bytes, PeerSource] = {}
        self._heard: Counter[bytes] = Counter()  # announcements this round, by node
        self._known: dict[bytes, None] = {}  # digests of announcements that were checked
        self._news = trio.Event()
        self._to_pass_on: Signed | None = None
        follower.on_newer = self._pass_on_later
        server.on_announce = self.heard

    def in_touch(self) -> frozenset[bytes]:
        """The nodes that answered when they were last asked."""
        return frozenset(self._kept)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass_on, nursery)
            while True:
                self._heard.clear()
                for source in self._choose():
                    nursery.start_soon(self._meet, source)
                await trio.sleep(self._seconds * self._random.uniform(0.8, 1.0))

    def _choose(self) -> list[PeerSource]:
        """Those that answered last time, and others at random in place of the rest."""
        others = [each for each in self._swarm.nodes() if each.node not in self._kept]
        self._random.shuffle(others)
        return [*self._points, *self._kept.values(), *others[: max(0, _KEPT - len(self._kept))]]

    async def _meet(self, source: PeerSource) -> None:
        held = tuple(sorted(self._held()))[-limits.MAX_VERSIONS :]
        latest, where, membership = self._follower.latest, self._where(), self._book.membership
        source.on_announce = lambda announce: self.heard(source.node, announce)
        try:
            reply = await source.meet(messages.GetPeers(latest, where, held, (), membership))
        except (NetError, RemoteError) as error:
            self._kept.pop(source.node, None)
            text = f"{source.name} was not met: {error}"
            self._report(Event("not_met", text, Level.DETAIL, {"peer": source.name}))
            return
        if source not in self._points and len(self._kept) < _KEPT:
            self._kept[source.node] = source
        new = self._book.hear(source.node, reply.peers)
        if new:
            names = [peer_id(node) for node in new]
            text = f"{len(new)} nodes heard of from {source.name}"
            self._report(Event("heard_of", text, Level.DETAIL, {"peer": source.name, "peers": names}))

    # --- announcements ---

    def heard(self, node: bytes, announce: messages.Announce) -> None:
        """Another node passes on that a policy is out."""
        digest = hashlib.sha256(announce.manifest.payload).digest()
        if digest in self._known:
            return  # two nodes that keep in touch tell each other over both of their streams
        self._heard[node] += 1
        # SPEC 9.7: more than a few in a while are not looked at: a signature costs time to check.
        if self._heard[node] > _ANNOUNCED:
            return
        before = self._follower.highest
        try:
            # SPEC 9.7: checked before it is passed on; what is no news is not passed on.
            self._follower.offer(announce.manifest, heard_from=peer_id(node), now_ms=self._now_ms())
        except RemoteError as error:
            self._blame(node, error)
            return
        self._remember(digest)
        if self._follower.highest > before:
            text = f"policy {self._follower.highest} is out, says {peer_id(node)}"
            self._report(Event("announced", text, Level.DETAIL, {"version": self._follower.highest}))

    def _blame(self, node: bytes, error: RemoteError) -> None:
        text = f"{peer_id(node)} announced what is no policy of this run: {error}"
        self._report(Event("announce_wrong", text, Level.WARNING, {"peer": peer_id(node)}))
        if isinstance(error, SignatureError) or error.code == Code.WRONG_RUN:
            self._kept.pop(node, None)
            self._swarm.ban(node)

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = None
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _pass_on_later(self, signed: Signed) -> None:
        """The follower has a newer manifest, from whomever."""
        self._remember(hashlib.sha256(signed.payload).digest())
        self._to_pass_on = signed
        self._news.set()

    async def _pass_on(self, nursery: trio.Nursery) -> None:
        """To all neighbours at once, the newest alone."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            assert self._to_pass_on is not None
            body = messages.pack(messages.Announce(self._to_pass_on))
            if len(body) > limits.MAX_NOTICE_BYTES:
                continue  # a policy of many blobs: others learn of it with their next heartbeat
            self._server.announce(body)
            for source in [*self._points, *self._kept.values()]:
                nursery.start_soon(source.announce, body)  # nobody waits for one that does not read
