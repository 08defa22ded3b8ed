"""Policy folders written from the learner's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import PolicyError
from protocol.policy import policy_root
from trainer.publish import prune_policies, tensor_names, write_policy
from trainer.rundir import RunFolder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A policy in two weight files, with a constant buffer."""
    folder = tmp_path / "base"
    folder.mkdir()
    first = {"a.weight": torch.arange(6.0).view(2, 3).bfloat16()}
    second = {"b.weight": torch.ones(4).bfloat16(), "steps": torch.tensor([7])}
    save_file(first, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(second, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 28}, "weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{ }")
    (folder / "tokenizer.json").write_bytes(b'{"x": 1}\r\n')
    (folder / "notes.md").write_text("no part of a policy")
    return folder


def test_the_new_policy_keeps_the_sharding_and_every_other_file_byte_for_byte(sharded: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    root = write_policy(sharded, target, {"b.weight": torch.full((4,), 2.0078125)})
    assert root == policy_root(target) != policy_root(sharded)
    assert {path.name for path in target.iterdir()} == {path.name for path in sharded.iterdir()} - {"notes.md"}
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        assert (target / name).read_bytes() == (sharded / name).read_bytes()
    second = load_file(target / "model-00002-of-00002.safetensors")
    # 2 + 2^-7 lies between two bfloat16 numbers and rounds to the even one.
    assert second["b.weight"].dtype == torch.bfloat16 and second["b.weight"].tolist() == [2.0] * 4
    assert second["steps"].tolist() == [7]


def test_the_same_weights_give_the_same_root(sharded: Path, tmp_path: Path) -> None:
    assert write_policy(sharded, tmp_path / "new", {}) == policy_root(sharded)
    assert tensor_names(sharded) == {"a.weight", "b.weight", "steps"}


def test_a_weight_of_another_shape_is_refused(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"tensor a\.weight is \(3, 2\), the policy's is \(2, 3\)"):
        write_policy(sharded, tmp_path / "new", {"a.weight": torch.zeros(3, 2)})


def test_only_the_newest_policies_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for version in range(12):
        folder.policy(version).mkdir(parents=True)
    prune_policies(folder, newest=11, keep=3)
    assert sorted(path.name for path in folder.policies.iterdir()) == ["000009", "000010", "000011"]
    prune_policies(folder, newest=11, keep=30)
    assert len(list(folder.policies.iterdir())) == 3
