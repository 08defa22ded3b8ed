"""What relays and hole punchers say to each other: circuit relay v2 and DCUtR, as values.

    hop     node → relay: keep a place for me (RESERVE); connect me to a node that has one (CONNECT)
    stop    relay → node: somebody wants you
    dcutr   node → node, over a circuit: dial me now, at these addresses

Source: libp2p's specifications of circuit relay v2 and of DCUtR. Not here: who may (relay.py), dialling (punch.py).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import trio

from protocol.net import protobuf
from protocol.net.framing import Channel
from protocol.net.protobuf import Fields, Malformed, Value

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
DCUTR: Final = "/libp2p/dcutr"

ANSWER_SECONDS: Final = 10.0  # for one message of a peer; a relay waits for its target in the meantime
MAX_CANDIDATES: Final = 4  # addresses of one puncher that are dialled
_MAX_ADDRESS_BYTES: Final = 256

_IP4, _TCP, _IP6, _P2P = 4, 6, 41, 421
_PEER_PREFIX: Final = bytes.fromhex("002408011220")  # of the 38 bytes of an Ed25519 peer id


class Status(IntEnum):
    """What a relay answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class HopKind(IntEnum):
    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    CONNECT = 0
    STATUS = 1


class PunchKind(IntEnum):
    CONNECT = 100
    SYNC = 300


_HOP_PEER, _HOP_RESERVATION, _HOP_LIMIT, _HOP_STATUS = 2, 3, 4, 5
_STOP_PEER, _STOP_LIMIT, _STOP_STATUS = 2, 3, 4


class Declined(Exception):
    """The other side said no; `status` says why."""

    def __init__(self, status: int) -> None:
        name = Status(status).name if status in {each.value for each in Status} else str(status)
        super().__init__(name)
        self.status = status


@dataclass(frozen=True, slots=True)
class Terms:
    """What a relay allows one circuit; 0: as much as one likes."""

    seconds: int
    bytes: int


# --- messages ---


def reserve() -> list[tuple[int, Value]]:
    return [(1, HopKind.RESERVE)]


def connect(node: bytes) -> list[tuple[int, Value]]:
    return [(1, HopKind.CONNECT), (_HOP_PEER, _peer(node))]


def reserved(expires_seconds: int, addresses: list[bytes], terms: Terms) -> list[tuple[int, Value]]:
    """The relay keeps a place until Unix time `expires_seconds`, and is found at `addresses`."""
    fields: list[tuple[int, Value]] = [(1, expires_seconds), *((2, address) for address in addresses)]
    return [
        (1, HopKind.STATUS),
        (_HOP_RESERVATION, protobuf.encode(fields)),
        (_HOP_LIMIT, _terms(terms)),
        (_HOP_STATUS, Status.OK),
    ]


def hop_status(status: Status, terms: Terms | None = None) -> list[tuple[int, Value]]:
    limit: list[tuple[int, Value]] = [] if terms is None else [(_HOP_LIMIT, _terms(terms))]
    return [(1, HopKind.STATUS), *limit, (_HOP_STATUS, status)]


def stop_connect(node: bytes, terms: Terms) -> list[tuple[int, Value]]:
    return [(1, StopKind.CONNECT), (_STOP_PEER, _peer(node)), (_STOP_LIMIT, _terms(terms))]


def stop_status(status: Status) -> list[tuple[int, Value]]:
    return [(1, StopKind.STATUS), (_STOP_STATUS, status)]


def punch(kind: PunchKind, candidates: list[tuple[str, int]]) -> list[tuple[int, Value]]:
    return [(1, kind), *((2, address_bytes(host, port)) for host, port in candidates)]


def _terms(terms: Terms) -> bytes:
    return protobuf.encode([(1, terms.seconds), (2, terms.bytes)])


def _peer(node: bytes) -> bytes:
    return protobuf.encode([(1, _PEER_PREFIX + node)])


def hop_peer(fields: Fields) -> bytes:
    """Whom a CONNECT is for, as a key. Raises Malformed."""
    return _peer_of(fields, _HOP_PEER)


def stop_peer(fields: Fields) -> bytes:
    """Who wants to connect. Raises Malformed."""
    return _peer_of(fields, _STOP_PEER)


def _peer_of(fields: Fields, at: int) -> bytes:
    found = protobuf.texts(fields, at)
    names = protobuf.texts(protobuf.decode(found[-1]), 1) if found else []
    if not names or len(names[-1]) != 38 or not names[-1].startswith(_PEER_PREFIX):
        raise Malformed("it names no peer, or one whose key is not Ed25519")
    return names[-1][len(_PEER_PREFIX) :]


def reservation_expires(fields: Fields) -> int:
    """Unix seconds. Raises Malformed."""
    found = protobuf.texts(fields, _HOP_RESERVATION)
    if not found:
        raise Malformed("the relay granted a place without saying for how long")
    return protobuf.number(protobuf.decode(found[-1]), 1)


def require_hop_ok(fields: Fields) -> None:
    """Raises Declined, or Malformed when it is no answer."""
    if protobuf.number(fields, 1, -1) != HopKind.STATUS:
        raise Malformed("the relay answered with something else than a status")
    if (status := protobuf.number(fields, _HOP_STATUS)) != Status.OK:
        raise Declined(status)


def require_stop_ok(fields: Fields) -> None:
    if protobuf.number(fields, 1, -1) != StopKind.STATUS:
        raise Malformed("the target answered with something else than a status")
    if (status := protobuf.number(fields, _STOP_STATUS)) != Status.OK:
        raise Declined(status)


async def receive(channel: Channel, seconds: float = ANSWER_SECONDS) -> Fields:
    """The next message, in time. Raises Malformed, ChannelClosed or trio.TooSlowError."""
    with trio.fail_after(seconds):
        return await protobuf.receive(channel)


# --- addresses, in multiaddr's binary form ---


def address_bytes(host: str, port: int, node: bytes | None = None) -> bytes:
    """ip4 or ip6, tcp, and the peer where one is given."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    out = bytes([_IP4 if ip.version == 4 else _IP6]) + ip.packed + bytes([_TCP]) + port.to_bytes(2, "big")
    if node is not None:
        out += bytes([_P2P & 0x7F | 0x80, _P2P >> 7, 38]) + _PEER_PREFIX + node
    return out


def endpoint_of(address: bytes) -> tuple[str, int] | None:
    """(host, port) of a binary multiaddr that is ip4 or ip6 over TCP and nothing more; None for others."""
    if len(address) > _MAX_ADDRESS_BYTES or not address:
        return None
    size = {_IP4: 4, _IP6: 16}.get(address[0])
    if size is None or len(address) != size + 4 or address[size + 1] != _TCP:
        return None
    return str(ipaddress.ip_address(address[1 : size + 1])), int.from_bytes(address[size + 2 :], "big")


def candidates(fields: Fields, kind: PunchKind) -> list[tuple[str, int]]:
    """Where the other puncher can be dialled, the first few. Raises Malformed."""
    if protobuf.number(fields, 1, -1) != kind:
        raise Malformed(f"the other puncher said something else than {kind.name}")
    found = [endpoint_of(address) for address in protobuf.texts(fields, 2)]
    usable = [each for each in found if each is not None and _is_dialled(*each)]
    return list(dict.fromkeys(usable))[:MAX_CANDIDATES]


def _is_dialled(host: str, port: int) -> bool:
    ip = ipaddress.ip_address(host)
    return port > 0 and not (ip.is_unspecified or ip.is_multicast or ip.is_link_local)
