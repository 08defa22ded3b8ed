"""Policies that differ by a step of learning, for tests of deltas. Numpy alone: no training."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from protocol.policy import read_safetensors


def step(folder: Path, target: Path, seed: int) -> Path:
    """A copy of a policy in which one value in fifty moved to its neighbour."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    data = np.fromfile(path, dtype=np.uint8)
    random = np.random.default_rng(seed)
    for place in read_safetensors(path):
        bits = data[place.begin : place.end].copy().view("<u2")
        moved = random.random(bits.size) < 0.02
        bits[moved] ^= 1  # the last bit: a neighbour of every value
        data[place.begin : place.end] = bits.view(np.uint8)
    data.tofile(path)
    return target
