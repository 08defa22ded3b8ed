"""The trainer's list of nodes that serve others."""

from __future__ import annotations

from random import Random

from protocol import limits, messages
from trainer.peers import PeerList

ADDRESS = "/ip4/203.0.113.7/tcp/4001"


def node(number: int) -> bytes:
    return number.to_bytes(32, "big")


def told(
    addresses: tuple[str, ...] = (ADDRESS,),
    held: tuple[int, ...] = (),
    about: tuple[bytes, ...] = (),
) -> messages.GetPeers:
    return messages.GetPeers(3, addresses, held, about)


def named(peers: PeerList, who: int, request: messages.GetPeers) -> list[int]:
    return [int.from_bytes(peer.node, "big") for peer in peers.choose(node(who), request)]


def test_holders_of_the_version_come_before_others_and_nobody_is_told_of_himself() -> None:
    peers = PeerList(Random(1))
    for number in range(1, 6):
        peers.note(node(number), told(held=(3,) if number in (2, 4) else (1,)))
    found = named(peers, 1, told())
    assert set(found[:2]) == {2, 4} and set(found) == {2, 3, 4, 5}


def test_who_serves_nothing_is_named_only_when_asked_about() -> None:
    peers = PeerList(Random(1))
    peers.note(node(1), told(addresses=()))
    peers.note(node(2), told())
    assert named(peers, 3, told()) == [2]
    assert named(peers, 3, told(about=(node(1), node(9), node(1), node(3)))) == [1, 2]


def test_who_left_is_named_no_more() -> None:
    peers = PeerList(Random(1))
    peers.note(node(1), told())
    peers.forget(node(1))
    peers.forget(node(2))
    assert named(peers, 3, told(about=(node(1),))) == []


def test_a_list_is_bounded_and_another_each_time() -> None:
    peers = PeerList(Random(1))
    for number in range(1, 300):
        peers.note(node(number), told())
    lists = [named(peers, 999, told()) for _ in range(3)]
    assert {len(each) for each in lists} == {limits.MAX_PEERS_PER_REPLY}
    assert len({tuple(each) for each in lists}) == 3


def test_only_ip_addresses_with_a_port_are_passed_on() -> None:
    peers = PeerList(Random(1))
    bad = ("/dns4/victim.example/tcp/80", "/ip4/1.2.3.4/tcp/0", "/ip4/0.0.0.0/tcp/1", "nonsense")
    peers.note(node(1), told(addresses=(*bad[:3], ADDRESS)))
    peers.note(node(2), told(addresses=bad))
    (only,) = peers.choose(node(3), told())
    assert only.addresses == (ADDRESS,)
