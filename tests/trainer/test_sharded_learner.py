"""Two learner processes that share one policy's weights, moments and gradients, beside one that has them all."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import LocalError
from tests.trainer.fabricate import Gateway, make_run, one_thread
from tests.trainer.sharded_pair import SETTINGS, play
from trainer import learner as learner_module
from trainer.evaluate import evaluate
from trainer.learner import Learner
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow
from trainer.rundir import open_run
from trainer.sharding import ShardedPolicy
from trainer.team import Team
from verify.model import PolicyModel

ROOT = Path(learner_module.__file__).parents[1]
EMBEDDED = ROOT / "trainer" / "embedded"
FIGURES = ("loss", "kl", "ess", "norm")


def odd_policy(folder: Path) -> None:
    """Without tied weights; of three rows two processes hold two and one, of one row one holds none."""
    config = LlamaConfig(
        vocab_size=107, hidden_size=63, intermediate_size=1, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=2, tie_word_embeddings=False, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(5)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def run_folder(path: Path) -> None:
    """A run of the embedded preset's rollouts, after one step of one process, that evaluates every version."""
    settings: dict[str, Any] = dict(group_size=4, groups_per_step=2, evaluate_every=1, evaluate_tasks=20, steps=3)
    run, ledger = make_run(path, **(SETTINGS | settings))
    Gateway(run, ledger).admit(24, 0)
    assert isinstance(Learner(run, ledger).turn(), StepRow)
    ledger.close()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("pair")
    for name in ("tied", "odd", "bfloat16", "low-rank", "refusals"):
        shutil.copytree(EMBEDDED, work / name / "policies" / "000000")
    odd_policy(work / "odd" / "policies" / "000000")
    with one_thread():
        run_folder(work / "run")
    shutil.copytree(work / "run", work / "alone" / "run")
    return work


@pytest.fixture(scope="module")
def pair(work: Path) -> list[dict[str, Any]]:
    """What two processes found, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "sharded_pair.py"
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, script, str(work)],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [child.communicate(timeout=200)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n".join(said)
    return [json.loads((work / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(work: Path, pair: list[dict[str, Any]]) -> dict[str, Any]:
    """What one process found."""
    with one_thread():
        found = play(work, Team(), ("tied", "odd", "bfloat16", "low-rank", "refusals"))
        return found | play(work / "alone", Team(), ("run",))


def assert_alike(one: dict[str, Any], two: dict[str, Any], rel: float) -> None:
    assert {key: two[key] for key in FIGURES} == pytest.approx({key: one[key] for key in FIGURES}, rel=rel)
    assert two["tokens"] == one["tokens"]


@pytest.mark.parametrize("name", ["tied", "odd", "low-rank", "refusals"])
def test_two_processes_find_what_one_does(name: str, alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    for one, both in zip(alone[name]["steps"], zip(*(each[name]["steps"] for each in pair), strict=True), strict=True):
        for two in both:
            assert_alike(one, two, rel=1e-4)


def test_in_bfloat16_too(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    for one, two in zip(alone["bfloat16"]["steps"], pair[0]["bfloat16"]["steps"], strict=True):
        assert_alike(one, two, rel=1e-3)  # sums in another order, of numbers of 8 bits


@pytest.mark.parametrize("name", ["tied", "odd", "low-rank"])
def test_two_processes_publish_what_one_does(name: str, work: Path, alone: object) -> None:
    one, two = (load_file(work / name / f"weights-{size}.safetensors") for size in (1, 2))
    assert_same_policy(one, two, steps=3)


def assert_same_policy(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], steps: int) -> None:
    """Up to sums in another order: where a master lies at the border of two bfloat16 values, the other one. And AdamW
    divides by the gradient's size: where that is nothing but rounding, the steps may go either way."""
    assert one.keys() == two.keys()
    most = 2 * steps * SETTINGS["learning_rate"]
    pairs = [(tensor.float(), two[name].float()) for name, tensor in one.items()]
    assert all(bool(((a - b).abs() <= most + a.abs() / 128).all()) for a, b in pairs)
    differing = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    assert differing < 1e-3, differing


def test_a_process_holds_half_of_the_masters_of_the_moments_and_of_the_live_weights(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for name in ("tied", "odd", "bfloat16", "low-rank"):
        whole = alone[name]["held"]
        for kind in ("masters", "moments", "live"):
            parts = [each[name]["held"][kind] for each in pair]
            # Padding: of an odd number of rows one is held twice, or held empty. Of low ranks one side is everywhere.
            assert whole[kind] <= sum(parts), (name, kind)
            assert max(parts) <= whole[kind] * (0.75 if (name, kind[0]) == ("low-rank", "m") else 0.52), (name, kind)


def test_all_refuse_or_none(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    refused = [
        ["its loss is not finite", [1]],
        ["policy 0 is no longer on disk", [4, 5]],
        ["the gradient is not finite", [4, 5]],
    ]
    assert [each["refusals"]["refused"] for each in (alone, *pair)] == [refused] * 3


def test_a_run_goes_on_with_two_processes_and_with_one_again(
    work: Path, alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    runs = [open_run(folder) for folder in (work / "alone" / "run", work / "run")]
    ledgers = [Ledger(run.folder.ledger) for run in runs]
    assert pair[0]["run"]["version"] == 2 and [len(ledger.steps()) for ledger in ledgers] == [2, 2]
    with one_thread():
        learners = [Learner(run, ledger) for run, ledger in zip(runs, ledgers, strict=True)]
        with safe_open(runs[1].folder.step(2) / "state.safetensors", framework="pt") as file:
            kept = learners[1].stepper.masters.tensors()
            assert kept.keys() == set(file.keys())
            assert all(torch.equal(tensor, file.get_tensor(name)) for name, tensor in kept.items())
        for learner in learners:
            assert isinstance(learner.turn(), StepRow)
    for one, two in zip(*(ledger.steps() for ledger in ledgers), strict=True):
        for name in ("loss", "kl", "ess", "entropy", "gradient_norm"):
            assert getattr(two, name) == pytest.approx(getattr(one, name), abs=1e-4), name
    policies = [load_file(run.folder.policy(3) / "model.safetensors") for run in runs]
    assert_same_policy(*policies, steps=2)


def test_an_evaluation_by_two_processes_is_that_of_one(work: Path, pair: list[dict[str, Any]]) -> None:
    run = open_run(work / "run")
    policy = run.folder.policy(2)
    with one_thread():
        found = evaluate(run, PolicyModel(policy, "float32", "cpu"), PolicyTokenizer.load(policy))
    assert (pair[0]["run"]["reward"], pair[0]["run"]["tasks"]) == (found.reward_mean, 20)


def test_a_process_that_dies_in_a_pass_ends_the_other(work: Path, pair: object) -> None:
    assert (work / "lost-0").read_text().startswith("learner process 0 lost the others: ")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
def test_rows_are_shared_as_torch_shares_them(count: int) -> None:
    parts = [*torch.arange(count).chunk(4), *[torch.empty(0)] * 4]
    assert [list(range(count))[Team(rank, 4).rows(count)] for rank in range(4)] == [x.tolist() for x in parts[:4]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda patch: patch.delattr(FSDPModule, "set_reduce_scatter_unused_params"),
            "need FSDP as of torch 2.13",
        ),
        (lambda patch: patch.setattr(PolicyModel, "layers", lambda model: []), "names no layers of the model in"),
        (lambda patch: add_weight(patch, torch.ones(())), "extra in .* is a single number, which has no rows"),
        (lambda patch: add_weight(patch, torch.ones(2, dtype=torch.bfloat16)), "extra in .* stays torch.bfloat16"),
    ],
    ids=["old torch", "no layers", "a scalar", "another dtype"],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_exchanged(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    spoil(monkeypatch)
    with pytest.raises(LocalError, match=message + r".*: run one learner process \(learners = 1\)$"):
        ShardedPolicy(EMBEDDED, "float32", "cpu", Team(0, 2))  # a team that nobody joined: an exchange would raise


def add_weight(patch: pytest.MonkeyPatch, weight: torch.Tensor) -> None:
    """As of a model that has one the embedded policy has not."""
    load = PolicyModel.parameters
    extra = {"extra": torch.nn.Parameter(weight)}
    patch.setattr(PolicyModel, "parameters", lambda model: load(model) | extra)
