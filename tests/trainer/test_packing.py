"""Completions in shared rows: laid out whole, seen as if alone, and with the gradients they have alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.fabricate import make_run, one_thread
from trainer import stepper as stepper_module
from trainer.batch import Completion
from trainer.config import TrainerConfig
from trainer.packing import Pack, micro_batches, padded, plan, seen
from trainer.rundir import Run, RunFolder
from trainer.stepper import Stepper
from trainer.team import Team

SMOLLM2 = Path(os.environ.get("RLCOMMONS_SMOLLM2", Path(__file__).parents[2] / ".cache" / "smollm2"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def completion(group: int, prompt: int, tail: int, seed: int, vocabulary: int = 100, gaps: bool = True) -> Completion:
    """With observed tokens in the middle, where it is long enough."""
    generator = np.random.default_rng([group, seed])
    start = np.random.default_rng(group).integers(4, vocabulary, prompt)
    generated = [prompt + place for place in range(tail) if not gaps or tail < 6 or not 2 <= place < 4]
    count = len(generated)
    return Completion(
        group_id=bytes([group]) * 16,
        ids=np.concatenate((start, generator.integers(4, vocabulary, tail))),
        prompt=prompt,
        generated=np.array(generated),
        mu=(-3 * generator.random(count)).astype(np.float32),
        advantage=float(generator.normal()),
        policy_version=0,
        staleness=0,
    )


def batch(groups: int = 5, size: int = 4, vocabulary: int = 100, longest: int = 30) -> list[Completion]:
    generator = np.random.default_rng(7)
    return [
        completion(group, 3 + 5 * group, int(generator.integers(1, longest)), member, vocabulary)
        for group in range(groups)
        for member in range(size)
    ]


def where(pack: Pack, place: int) -> tuple[int, int]:
    return divmod(int(pack.rows[place]), pack.ids.shape[1])


@settings(deadline=None)  # a busy machine is slow
@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=5)), min_size=1,
    max_size=6), st.integers(1, 400), st.booleans())  # fmt: skip
def test_each_drawn_token_is_predicted_by_what_stood_before_it_in_its_own_completion(
    shapes: list[tuple[int, list[int]]], most: int, share: bool
) -> None:
    completions = [
        completion(group, prompt, tail, member)
        for group, (prompt, tails) in enumerate(shapes)
        for member, tail in enumerate(tails)
    ]
    packs = plan(completions, most, share=share)
    assert sorted(index for pack in packs for index in pack.members) == list(range(len(completions)))
    for pack in packs:
        assert pack.ids.size <= max(most, *(int(each.generated[-1]) for each in completions), 0)
        sees, behind = (each.numpy() for each in seen(pack, torch.device("cpu")))
        place = 0
        for index in pack.members:
            each = completions[index]
            for position in each.generated:
                row, column = where(pack, place)
                before = pack.ids[row][sees[row, column]]
                order = np.argsort(-behind[row, column][sees[row, column]])
                assert before[order].tolist() == each.ids[:position].tolist()
                assert pack.tokens[place] == each.ids[position]
                place += 1
        assert place == len(pack.tokens) == len(pack.rows)


def test_a_groups_prompt_is_in_a_row_once() -> None:
    packs = plan([completion(1, 50, 10, member) for member in range(8)], 4096)
    assert len(packs) == 1 and packs[0].ids.shape == (1, 50 + 8 * 9)


@settings(deadline=None)  # a busy machine is slow
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 1000))
def test_micro_batches_hold_every_row_once_and_no_more_padded_ids_than_allowed(lengths: list[int], most: int) -> None:
    parts = micro_batches(lengths, most)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or max(lengths[index] for index in part) * len(part) <= most


def test_padding_is_on_the_right() -> None:
    table = padded([np.array([1, 2, 3]), np.array([4])])
    assert table.tolist() == [[1, 2, 3], [4, 0, 0]]


# --- gradients ---

SETTINGS = TrainerConfig(loss_tokens=500, micro_batch_tokens=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made, ledger = make_run(tmp_path_factory.mktemp("packing") / "run")
    ledger.close()
    return made


def gradients(folder: RunFolder, config: TrainerConfig, completions: list[Completion], share: bool) -> torch.Tensor:
    """Of the whole batch, one vector; scaled to a norm of 1."""
    stepper = Stepper(folder, config, 0, Team())
    assert stepper.model.takes_masks
    if not share:
        type(stepper.model).takes_masks = property(lambda model: False)  # type: ignore[method-assign,assignment]
    stepper.learn(completions, stepper.recall(completions))
    found = torch.cat([gradient.flatten() for gradient in stepper.masters.gradients()])
    assert torch.isfinite(found).all()
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No effect by itself: undoes what `gradients` does to the model's class."""
    from verify.model import PolicyModel

    monkeypatch.setattr(PolicyModel, "takes_masks", PolicyModel.takes_masks)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


@pytest.mark.usefixtures("alone")
def test_packed_gradients_are_those_of_each_completion_alone(run: Run) -> None:
    completions = batch()
    packed = gradients(run.folder, SETTINGS, completions, share=True)
    singly = gradients(run.folder, replace(SETTINGS, micro_batch_tokens=1), completions, share=False)
    assert difference(singly, packed) < 1e-5


@pytest.mark.usefixtures("alone")
def test_gradients_do_not_depend_on_the_size_of_micro_batches(run: Run) -> None:
    completions = batch()
    sizes = [
        gradients(run.folder, replace(SETTINGS, micro_batch_tokens=n), completions, True) for n in (20, 200, 10_000)
    ]
    assert max(difference(sizes[0], other) for other in sizes[1:]) < 1e-5


@pytest.mark.usefixtures("alone")
def test_gradients_are_the_same_with_gradient_checkpointing(run: Run) -> None:
    completions = batch()
    plain = gradients(run.folder, SETTINGS, completions, share=True)
    again = gradients(run.folder, replace(SETTINGS, gradient_checkpointing=True), completions, share=True)
    assert difference(plain, again) < 1e-6


@pytest.mark.usefixtures("alone")
def test_gradients_are_the_same_with_logits_made_some_rows_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    completions = batch()
    whole = gradients(run.folder, SETTINGS, completions, share=True)
    monkeypatch.setattr(stepper_module, "LOGIT_BYTES", 1)
    assert difference(whole, gradients(run.folder, SETTINGS, completions, share=True)) < 1e-6


@pytest.mark.smollm2
@pytest.mark.usefixtures("alone")
def test_packed_gradients_of_smollm2_are_those_of_each_completion_alone(tmp_path: Path) -> None:
    if not SMOLLM2.exists():
        pytest.skip("no converted SmolLM2: scripts/convert-smollm2 .cache/smollm2, or set RLCOMMONS_SMOLLM2")
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "000000").symlink_to(SMOLLM2.resolve())
    completions = batch(groups=2, size=3, vocabulary=40_000, longest=20)
    packed = gradients(RunFolder(tmp_path), SETTINGS, completions, share=True)
    singly = gradients(RunFolder(tmp_path), replace(SETTINGS, micro_batch_tokens=1), completions, share=False)
    assert difference(singly, packed) < 1e-5
