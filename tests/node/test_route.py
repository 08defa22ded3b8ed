"""The cheapest way to a policy, by bytes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.route import Route, cheapest
from protocol.policy import Blob, Delta, Manifest, PolicyFile

KIB = 1024


def digest(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def root(version: int) -> bytes:
    return digest("root", version)


def manifest(version: int, deltas: dict[int, int], *, size: int = 1_000 * KIB, codec: str = "ULPD1") -> Manifest:
    """deltas: bytes by base version."""
    files = (
        PolicyFile("config.json", (Blob(digest("config"), 10),)),
        PolicyFile("model.safetensors", (Blob(digest("weights", version), size),)),
        PolicyFile("tokenizer.json", (Blob(digest("tokenizer"), 20),)),
    )
    named = tuple(
        Delta(base, root(base), codec, (Blob(digest("delta", base, version), length),))
        for base, length in sorted(deltas.items())
    )
    return Manifest(bytes(32), version, root(version), files, 0, 1, named)


CHAIN = {version: manifest(version, {version - 1: 10 * KIB}) for version in range(1, 40)}


def find(
    target: Manifest,
    held: set[int],
    published: dict[int, Manifest],
    here: frozenset[bytes] = frozenset(),
    refused: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[Route, list[int]]:
    """The route, and the manifests that had to be asked for."""
    known: dict[int, Manifest | None] = {}
    common = {digest("config"), digest("tokenizer"), *here}
    while True:
        found = cheapest(target, {each: root(each) for each in held}, known, common.__contains__, refused)
        if isinstance(found, Route):
            return found, list(known)
        assert found not in known
        known[found] = published.get(found)


def versions(route: Route) -> list[tuple[int, int]]:
    return [leg.name for leg in route.legs]


def test_one_version_behind_takes_the_delta_and_asks_for_nothing() -> None:
    route, asked = find(CHAIN[6], {5}, CHAIN)
    assert (versions(route), route.size, asked) == ([(5, 6)], 10 * KIB, [])


def test_a_node_with_nothing_fetches_the_files_and_asks_for_nothing() -> None:
    route, asked = find(CHAIN[6], set(), CHAIN)
    assert (versions(route), route.size, asked) == ([], 1_000 * KIB, [])


def test_several_versions_behind_goes_through_those_between() -> None:
    route, asked = find(CHAIN[6], {3, 1}, CHAIN)
    assert versions(route) == [(3, 4), (4, 5), (5, 6)]
    assert asked == [5, 4]


def test_a_skip_delta_is_taken_where_it_is_smaller() -> None:
    skip = manifest(8, {7: 10 * KIB, 4: 25 * KIB})
    assert versions(find(skip, {4}, CHAIN)[0]) == [(4, 8)]
    wasteful = manifest(8, {7: 10 * KIB, 4: 45 * KIB})
    assert versions(find(wasteful, {4}, CHAIN)[0]) == [(4, 5), (5, 6), (6, 7), (7, 8)]


def test_the_files_are_fetched_where_the_deltas_are_not_smaller() -> None:
    large = {version: manifest(version, {version - 1: 400 * KIB}) for version in range(1, 9)}
    assert versions(find(large[8], {6}, large)[0]) == [(6, 7), (7, 8)]
    assert versions(find(large[8], {5}, large)[0]) == []


def test_what_lies_here_already_costs_nothing() -> None:
    large = {version: manifest(version, {version - 1: 400 * KIB}) for version in range(1, 9)}
    route, _ = find(large[8], {5}, large, frozenset({digest("delta", 6, 7)}))
    assert (versions(route), route.size) == ([(5, 6), (6, 7), (7, 8)], 800 * KIB)
    assert versions(find(large[8], {7}, large, frozenset({digest("weights", 8)}))[0]) == []


def test_a_leg_that_did_not_work_is_not_tried_again() -> None:
    skip = manifest(8, {7: 10 * KIB, 4: 25 * KIB})
    assert versions(find(skip, {4}, CHAIN, refused=frozenset({(4, 8)}))[0])[-1] == (7, 8)
    assert versions(find(skip, {4}, CHAIN, refused=frozenset({(4, 8), (7, 8)}))[0]) == []


def test_a_manifest_that_nobody_has_is_gone_around() -> None:
    assert versions(find(CHAIN[6], {3}, {})[0]) == []
    skip = manifest(8, {7: 10 * KIB, 4: 45 * KIB})
    assert versions(find(skip, {4}, {})[0]) == [(4, 8)]


def test_a_base_of_another_root_than_ours_is_of_no_use() -> None:
    route = cheapest(CHAIN[6], {5: bytes(32)}, {}, lambda each: False)
    assert route == Route((), 1_000 * KIB + 30)
    impostor = manifest(5, {4: 10 * KIB})
    object.__setattr__(impostor, "root", bytes(32))
    assert versions(find(CHAIN[6], {4}, {5: impostor})[0]) == []


def test_a_codec_that_nobody_knows_is_passed_over() -> None:
    assert versions(find(manifest(6, {5: KIB}, codec="ULPD2"), {5}, CHAIN)[0]) == []


def test_who_is_very_far_behind_does_not_rewrite_the_weights_a_hundred_times() -> None:
    small = {version: manifest(version, {version - 1: KIB}) for version in range(1, 40)}
    assert versions(find(small[39], {5}, small)[0]) == []


@pytest.mark.parametrize("behind", range(1, 30))
def test_with_the_trainers_skips_any_node_needs_few_legs(behind: int) -> None:
    published = {}
    for version in range(1, 70):
        skips = {version - skip: int(10 * KIB * skip**0.8) for skip in (1, 4, 16) if version % skip == 0}
        published[version] = manifest(version, {base: size for base, size in skips.items() if base >= 0})
    route, _ = find(published[64], {64 - behind}, published)
    assert 0 < len(route.legs) <= 7


@given(data=st.data())
def test_no_other_way_is_cheaper(data: st.DataObject) -> None:
    sizes = st.integers(1, 400 * KIB)
    published = {
        version: manifest(version, {base: data.draw(sizes) for base in range(version) if data.draw(st.booleans())})
        for version in range(1, 6)
    }
    held = data.draw(st.sets(st.integers(0, 4)), "held")
    best = {version: 0 for version in held}
    for version in range(1, 6):
        ways = [best[each.base_version] + each.size for each in published[version].deltas if each.base_version in best]
        if ways and version not in held:
            best[version] = min(ways)
    route, _ = find(published[5], held, published)
    assert route.size == min(best.get(5, 1_000 * KIB), 1_000 * KIB)
