"""The published policies as the gateway serves them: signed manifests, blobs by digest, and what the cheap checks
read of a policy (its tokenizer and its shape).

Not here: making policies (init.py, publish.py), removing old ones (the learner does), tensors.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.envelope import Signed
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import PolicyError
from protocol.limits import MAX_BLOB_BYTES
from protocol.policy import Manifest
from trainer.deltas import delta_path
from trainer.rundir import RunFolder
from verify.structure import PolicyShape, policy_shape

SERVED: Final = 64  # newest versions; a run may keep thousands on its disk for whoever audits it later


@dataclass(frozen=True, slots=True)
class BlobPlace:
    """Where a blob lies on disk."""

    path: Path
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """What of a policy is needed to replay an episode."""

    tokenizer: PolicyTokenizer
    shape: PolicyShape


class Shelf:
    """Filled by one thread, read by several."""

    def __init__(self, folder: RunFolder, most: int = SERVED) -> None:
        """`most`: versions on it at once; the oldest go."""
        self._folder = folder
        self.most = most
        self._manifests: dict[int, tuple[Signed, Manifest]] = {}
        self._blobs: dict[bytes, BlobPlace] = {}
        self._readings: dict[int, Reading] = {}
        self._loading = threading.Lock()

    @property
    def latest(self) -> int:
        """The newest version with a manifest."""
        return max(self._manifests)

    def put(self, signed: Signed, manifest: Manifest) -> None:
        """A policy that nodes may fetch from now on, or a newer manifest of one."""
        self._blobs = {**self._blobs, **self._places(manifest)}
        self._manifests = {**self._manifests, manifest.version: (signed, manifest)}
        self._drop(sorted(self._manifests)[: -self.most])

    def forget_removed(self) -> None:
        """Drop the versions whose folder is gone."""
        self._drop([version for version in self._manifests if not self._folder.policy(version).is_dir()])

    def _drop(self, versions: Sequence[int]) -> None:
        if not versions:
            return
        self._manifests = {version: self._manifests[version] for version in self._manifests if version not in versions}
        kept: dict[bytes, BlobPlace] = {}
        for _, manifest in self._manifests.values():
            kept |= self._places(manifest)
        self._blobs = kept
        # Without the lock, which is held while one is read: what is lost to that is read once more.
        self._readings = {version: found for version, found in self._readings.items() if version in self._manifests}

    def manifest(self, version: int | None = None) -> Signed | None:
        """The signed manifest of a version, or of the latest."""
        found = self._manifests.get(self.latest if version is None else version)
        return None if found is None else found[0]

    def root(self, version: int) -> bytes | None:
        found = self._manifests.get(version)
        return None if found is None else found[1].root

    def expires_ms(self, version: int) -> int:
        return self._manifests[version][1].expires_ms

    def blob(self, digest: bytes) -> BlobPlace | None:
        return self._blobs.get(digest)

    def reading(self, version: int) -> Reading:
        """Tokenizer and shape of a version. Raises PolicyError when it is no longer here."""
        with self._loading:
            found = self._readings.get(version)
            if found is None:
                if version not in self._manifests:
                    raise PolicyError(f"policy version {version} is no longer on disk")
                folder = self._folder.policy(version)
                found = self._readings[version] = Reading(PolicyTokenizer.load(folder), policy_shape(folder))
            return found

    def _places(self, manifest: Manifest) -> dict[bytes, BlobPlace]:
        folder = self._folder.policy(manifest.version)
        files = [(folder / file.name, file.blobs) for file in manifest.files]
        files += [(delta_path(self._folder, manifest.version, each), each.blobs) for each in manifest.deltas]
        return {
            blob.digest: BlobPlace(path, place * MAX_BLOB_BYTES, blob.length, blob.digest)
            for path, blobs in files
            for place, blob in enumerate(blobs)
        }


def read_blob(place: BlobPlace) -> bytes:
    """The bytes of a blob, which are what its digest says.

    Raises PolicyError when they are not: sent on, they would look like a lie of ours.
    """
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
    except OSError as error:
        raise PolicyError(f"{place.path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).digest() != place.digest:
        raise PolicyError(f"{place.path} is not what was published: its bytes at {place.offset} have changed")
    return data
