"""Who of the connected nodes serves others, and with what: the trainer's part in how nodes find each other.

Known from what each node told in its session (SPEC 9.3 GetPeers), kept as long as that lasts, in memory alone: after
a restart nodes come back and tell it again. Not here: fetching between nodes, which needs no trainer.
"""

from __future__ import annotations

from random import Random

from protocol import limits, messages
from protocol.net.base import peer_address


class PeerList:
    """The connected nodes that asked for peers."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._peers: dict[bytes, messages.Peer] = {}

    def note(self, node: bytes, request: messages.GetPeers) -> None:
        # SPEC 9.6: what is no IP address with a port is not passed on.
        addresses = tuple(each for each in request.addresses if peer_address(each, node) is not None)
        self._peers[node] = messages.Peer(node, addresses, request.versions)

    def forget(self, node: bytes) -> None:
        """Its session ended."""
        self._peers.pop(node, None)

    def choose(self, node: bytes, request: messages.GetPeers) -> tuple[messages.Peer, ...]:
        """SPEC 9.3: those asked about first, then serving nodes at random, holders of the version before others."""
        asked = [self._peers[each] for each in dict.fromkeys(request.about) if each in self._peers and each != node]
        named = {node, *(each.node for each in asked)}
        serving = [each for each in self._peers.values() if each.addresses and each.node not in named]
        self._random.shuffle(serving)
        serving.sort(key=lambda each: request.version not in each.versions)  # stable: at random among equals
        return tuple([*asked, *serving][: limits.MAX_PEERS_PER_REPLY])
