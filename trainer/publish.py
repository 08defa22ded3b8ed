"""From the learner's weights to a policy folder that nodes can fetch, and back out of the way when it is old.

The new folder is the previous one with other tensor values: the same file names, tensor names and sharding, the
same configuration and tokenizer byte for byte, weights in bfloat16. Not here: the first policy (init.py), the
manifest that announces a policy (the gateway signs it), the order in which folders become real (checkpoint.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from protocol.errors import PolicyError
from protocol.policy import policy_files, policy_root, read_safetensors
from trainer.rundir import RunFolder, flush, versions_in
from verify.tensor_file import TensorFile, write_tensors


def tensor_names(policy: Path) -> frozenset[str]:
    """The tensors that the folder's weight files hold. Raises PolicyError."""
    files = [path for path in policy_files(policy) if path.suffix == ".safetensors"]
    return frozenset(place.name for path in files for place in read_safetensors(path))


def write_policy(base: Path, target: Path, weights: Mapping[str, Tensor]) -> bytes:
    """Write `base` with `weights` in place of its tensors of the same names, flush it to disk, and return its
    root. Tensors that `weights` does not name (constant buffers) are copied.

    Raises PolicyError when a weight has another shape than the tensor it replaces.
    """
    target.mkdir(parents=True)
    for path in policy_files(base):
        if path.suffix == ".safetensors":
            _write_tensors(path, target / path.name, weights)
        else:
            shutil.copyfile(path, target / path.name)
        flush(target / path.name)
    flush(target)
    return policy_root(target)


def _write_tensors(source: Path, target: Path, weights: Mapping[str, Tensor]) -> None:
    file = TensorFile(source)
    write_tensors(target, {name: _published(name, weights.get(name), file.tensor(name)) for name in file.names})


def _published(name: str, weight: Tensor | None, before: Tensor) -> Tensor:
    if weight is None:
        return before
    if weight.shape != before.shape:
        raise PolicyError(f"tensor {name} is {tuple(weight.shape)}, the policy's is {tuple(before.shape)}")
    return weight.detach().to("cpu", torch.bfloat16)


def prune_policies(folder: RunFolder, newest: int, keep: int) -> None:
    """Remove published policies older than the newest `keep`, and the deltas that lead to them: no node, audit or
    learner may need them. Looks at all that are kept, which may be thousands: for a process' first step, not for each.
    """
    for of in (folder.policy, folder.deltas):
        for version in versions_in(of(newest).parent):
            if version <= newest - keep:
                shutil.rmtree(of(version))


def retire_policy(folder: RunFolder, version: int) -> None:
    """Remove one published policy, and the deltas that lead to it, if they are there."""
    for path in (folder.policy(version), folder.deltas(version)):
        if path.exists():
            shutil.rmtree(path)
