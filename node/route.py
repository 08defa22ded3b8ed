"""Which way to a policy takes the fewest bytes: its files, a delta from one that is here, or several in a row. Pure.

Manifests of the versions between are asked for only where they may matter. Not here: asking (weights.py), fetching
(swarm.py), putting together (store.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from protocol.policy import DELTA_CODEC, Blob, Delta, Manifest

_MOST_LEGS: Final = 12  # each rewrites the weights once; a node that is further behind fetches the files


@dataclass(frozen=True, slots=True)
class Leg:
    """From one version to a later one."""

    manifest: Manifest  # of the later one
    delta: Delta

    @property
    def name(self) -> tuple[int, int]:
        return self.delta.base_version, self.manifest.version

    def blobs(self) -> dict[bytes, Blob]:
        """What it needs, by digest: the delta, and the files that hold no tensors."""
        others = [file.blobs for file in self.manifest.files if not file.name.endswith(".safetensors")]
        return {blob.digest: blob for blobs in (self.delta.blobs, *others) for blob in blobs}


@dataclass(frozen=True, slots=True)
class Route:
    """The legs to go, first one first; none: the files of the policy itself. `size`: bytes to fetch."""

    legs: tuple[Leg, ...]
    size: int


def _missing(blobs: Iterable[Blob], here: Callable[[bytes], bool]) -> int:
    return sum(blob.length for blob in blobs if not here(blob.digest))


def cheapest(
    target: Manifest,
    held: Mapping[int, bytes],
    known: Mapping[int, Manifest | None],
    here: Callable[[bytes], bool],
    refused: Collection[tuple[int, int]] = (),
) -> Route | int:
    """The cheapest route to `target`, or the version whose manifest must be known to say.

    held: roots of the policies here. known: manifests asked for so far, None where nobody has it. here: whether a blob
    is. refused: legs, as (base, version), that did not work.
    """
    whole = _missing({blob.digest: blob for file in target.files for blob in file.blobs}.values(), here)
    oldest = min(held, default=target.version)
    order = itertools.count()
    # Backwards from the target: (bytes so far, legs so far, tie, version, its root, legs).
    heap: list[tuple[int, int, int, int, bytes, tuple[Leg, ...]]] = [
        (0, 0, next(order), target.version, target.root, ())
    ]
    done: set[tuple[int, bytes]] = set()
    while heap:
        size, count, _, version, root, legs = heapq.heappop(heap)
        if size >= whole:
            break
        if legs and version in held:
            # SPEC 8.3.3: a delta from another root than the one here under that version is passed over.
            if held[version] != root:
                continue
            return Route(legs, size)
        if (version, root) in done or count == _MOST_LEGS:
            continue
        done.add((version, root))
        if version != target.version and version not in known:
            return version
        manifest = target if version == target.version else known[version]
        if manifest is None or manifest.root != root:
            continue
        for leg in _legs(manifest, oldest, refused):
            further = size + _missing(leg.blobs().values(), here)
            base = leg.delta
            heapq.heappush(
                heap, (further, count + 1, next(order), base.base_version, base.base_root, (leg, *legs))
            )  # fmt: skip
    return Route((), whole)


def _legs(manifest: Manifest, oldest: int, refused: Collection[tuple[int, int]]) -> list[Leg]:
    """The last legs to a version that may be of use. SPEC 8.3.3: those of an unknown codec are passed over."""
    legs = [Leg(manifest, delta) for delta in manifest.deltas if delta.codec == DELTA_CODEC]
    return [leg for leg in legs if leg.delta.base_version >= oldest and leg.name not in refused]
