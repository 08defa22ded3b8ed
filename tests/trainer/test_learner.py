"""The learner with the embedded policy and completions that were really drawn from it."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import trainer.publish
import trainer.rundir
from protocol import codec
from protocol.envelope import Signed
from protocol.environments.tools import Tools8
from protocol.errors import LocalError, PolicyError, UsageError
from protocol.policy import policy_root
from protocol.trace import Trace
from tests.trainer.fabricate import Episode, Gateway, make_run, one_thread
from trainer import evaluate as evaluating
from trainer import learner as learner_module
from trainer.child import Changes
from trainer.config import TrainerConfig, write_config
from trainer.learner import Diverged, Learner
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupState, StepRow
from trainer.masters import Masters, _LowRank
from trainer.publish import tensor_names
from trainer.rundir import Run, open_run, versions_in
from trainer.schedule import learning_rate
from verify.model import PolicyModel

ROOT = Path(learner_module.__file__).parents[1]
SMALL: dict[str, Any] = dict(group_size=4, groups_per_step=2, loss_tokens=100, learning_rate=1e-3, warmup_steps=1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, ledger = make_run(tmp_path_factory.mktemp("template") / "run")
    ledger.close()
    return run.folder.path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Path:
    """A run in which groups of policy 0 are complete, unaudited: enough that teach something for four steps."""
    run, ledger = make_run(tmp_path_factory.mktemp("drawn") / "run", template, **SMALL)
    gateway = Gateway(run, ledger)
    gateway.admit(12, 0)
    while ledger.count_informative() < 4 * SMALL["groups_per_step"]:
        gateway.admit(2, 0)
    ledger.close()
    return run.folder.path


def copied(drawn: Path, path: Path, **settings: Any) -> tuple[Run, Ledger]:
    shutil.copytree(drawn, path)
    if settings:
        write_config(replace(open_run(path).config, **settings), path / "config.toml")
    run = open_run(path)
    return run, Ledger(run.folder.ledger)


@pytest.fixture
def made(drawn: Path, tmp_path: Path) -> tuple[Run, Ledger]:
    return copied(drawn, tmp_path / "run")


def stepped(learner: Learner) -> StepRow:
    row = learner.turn()
    assert isinstance(row, StepRow), row
    return row


def events(ledger: Ledger) -> list[str]:
    return [f"{row['kind']}: {row['text']}" for row in ledger.view("SELECT kind, text FROM events ORDER BY id")]


def batches(ledger: Ledger) -> list[tuple[bytes, str, int | None]]:
    rows = ledger.view("SELECT group_id, state, batch FROM groups ORDER BY group_id")
    return [(row["group_id"], row["state"], row["batch"]) for row in rows]


def test_a_step_makes_the_next_policy_with_the_same_files_and_names_it_by_its_root(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    row = stepped(Learner(run, ledger))
    old, new = run.folder.policy(0), run.folder.policy(1)
    assert sorted(path.name for path in old.iterdir()) == sorted(path.name for path in new.iterdir())
    same = {path.name for path in old.iterdir() if path.read_bytes() == (new / path.name).read_bytes()}
    assert {path.name for path in old.iterdir()} - same == {"model.safetensors"}
    latest = ledger.policy()
    assert latest is not None and latest[:2] == (1, policy_root(new)) and latest[2] is None
    assert ledger.steps() == [row] and (row.version, row.groups, row.traces) == (1, 2, 8)
    taken = [batch for _, state, batch in batches(ledger) if state == GroupState.TAKEN]
    assert taken == [1] * (2 + row.flat_groups)


def test_a_learner_started_anew_goes_on_exactly_where_the_other_stopped(
    made: tuple[Run, Ledger], drawn: Path, tmp_path: Path
) -> None:
    run, ledger = made
    learner = Learner(run, ledger)
    for _ in range(3):
        stepped(learner)
    again, other = copied(drawn, tmp_path / "again")
    for _ in range(3):
        stepped(Learner(again, other))
    roots = [[policy_root(each.folder.policy(version)) for version in range(4)] for each in (run, again)]
    assert roots[0] == roots[1] and len(set(roots[0])) == 4
    assert batches(ledger) == batches(other)
    assert sorted(path.name for path in run.folder.learner.iterdir()) == ["step-000002", "step-000003"]


def test_a_step_removes_the_policy_that_is_kept_no_longer_and_looks_at_no_others(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may keep ten thousand: what a step costs must not grow with them."""
    run, ledger = copied(drawn, tmp_path / "run", staleness_limit=3, staleness_target=3, keep_policies=5)
    learner, gateway = Learner(run, ledger), Gateway(run, ledger, seed=1)
    stepped(learner)

    def looks(_: Path) -> NoReturn:
        raise AssertionError("a step looked at all policies")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.publish, "versions_in", looks)
        patch.setattr(trainer.rundir, "versions_in", looks)
        while learner.version < 5:
            if isinstance(learner.turn(), str):
                gateway.admit(2, learner.version)
    assert run.folder.versions() == versions_in(run.folder.all_deltas) == [1, 2, 3, 4, 5]
    for path in (run.folder.policy(0), run.folder.deltas(0)):  # as a learner killed before it removed them leaves them
        path.mkdir()
    again = Learner(run, ledger)
    while isinstance(again.turn(), str):
        gateway.admit(2, 5)
    assert run.folder.versions() == versions_in(run.folder.all_deltas) == [2, 3, 4, 5, 6]


def test_the_policy_that_scores_is_the_masters_in_bfloat16(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    learner = Learner(run, ledger)
    stepped(learner)
    published = load_file(run.folder.policy(1) / "model.safetensors")
    state = load_file(run.folder.step(1) / "state.safetensors")
    live = learner.stepper.model.parameters()
    for name, tensor in published.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, state[f"master/{name}"].bfloat16())
        assert torch.equal(tensor.float(), live[name].detach())
    assert any(not torch.equal(tensor.float(), state[f"master/{name}"]) for name, tensor in published.items())


def test_what_was_not_audited_is_scored_by_the_policy_that_drew_it(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    learner = Learner(run, ledger)
    stepped(learner)
    stepped(learner)
    before = {name: weight.detach().clone() for name, weight in learner.stepper.model.parameters().items()}
    gateway = Gateway(run, ledger, seed=1)
    expected = gateway.draw(2, 0) + gateway.draw(2, 2)
    gateway.accept(gateway.submit(expected))
    groups = ledger.training_groups([group.group_id for group, _ in expected])
    completions = learner_module.build(groups, learner.version)
    found = learner.stepper.recall(completions)
    for mu, episode in zip(found, [episode for _, episodes in expected for episode in episodes], strict=True):
        np.testing.assert_allclose(mu.numpy(), episode.logprobs, atol=1e-4)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.stepper.model.parameters().items())


def test_the_audits_logprobs_are_used_where_there_was_one_and_a_drift_from_them_is_an_alarm(
    drawn: Path, tmp_path: Path
) -> None:
    run, ledger = copied(drawn, tmp_path / "run")
    gateway = Gateway(run, ledger, seed=1)
    for group_id, _, _ in batches(ledger):
        ledger.drop_group(group_id, "not of this test")
    fresh = gateway.draw(8, 0)
    digests = gateway.submit(fresh)
    shifted = [np.array(e.logprobs, dtype=np.float32) - 0.5 for _, episodes in fresh for e in episodes]
    with ledger.write():
        for row, mu in zip(ledger.claim_audits("a", 1, 100), shifted, strict=True):
            ledger.finish_audit(row.sequence, b"audit", mu)
    gateway.accept(digests)
    row = stepped(Learner(run, ledger))
    ratio = math.exp(0.5)
    assert row.kl == pytest.approx(ratio - 1 - 0.5, abs=1e-3) and row.ess == pytest.approx(1.0, abs=1e-3)
    assert any(event.startswith("alarm: policy 1: the policy is more than 0.01 nats") for event in events(ledger))


def test_a_learner_that_must_wait_says_for_what(drawn: Path, tmp_path: Path) -> None:
    run, ledger = copied(drawn, tmp_path / "run", groups_per_step=64)
    cause = Learner(run, ledger).turn()
    assert isinstance(cause, str) and cause.endswith("of 64 groups whose rewards differ are complete")
    run, ledger = copied(drawn, tmp_path / "done", steps=1)
    learner = Learner(run, ledger)
    stepped(learner)
    assert learner.turn() == "all 1 policy versions are made"


def test_groups_that_became_too_stale_are_dropped_with_their_cause(drawn: Path, tmp_path: Path) -> None:
    run, ledger = copied(drawn, tmp_path / "run", staleness_limit=1, groups_per_step=1)
    learner = Learner(run, ledger)
    stepped(learner)
    stepped(learner)
    assert isinstance(learner.turn(), str)
    dropped = ledger.view("SELECT DISTINCT cause FROM groups WHERE state = 'DROPPED'")
    assert dropped == [{"cause": "too stale: 2 versions behind, 1 may be"}]
    assert {row.staleness_max for row in ledger.steps()} == {0, 1}


def test_a_loss_that_is_not_finite_refuses_the_step_drops_its_group_and_learning_goes_on(
    made: tuple[Run, Ledger],
) -> None:
    run, ledger = made
    learner = Learner(run, ledger)
    victim = learner._choose().informative[0]
    spoilt = ledger.training_groups([victim])
    for trace, completion in zip(spoilt[0].traces, learner_module.build(spoilt, 0), strict=True):
        mu = np.full(len(completion.generated), np.nan, dtype="<f4")
        execute(ledger, "UPDATE submissions SET mu = ? WHERE digest = ?", (mu.tobytes(), trace.digest))
    refused = learner.turn()
    assert refused == "a step from policy 0 was refused: its loss is not finite"
    assert ledger.policy() is not None and learner.version == 0 and not run.folder.policy(1).exists()
    assert (victim, GroupState.DROPPED, None) in batches(ledger)
    assert "alarm: step from policy 0 refused, 1 groups dropped: its loss is not finite" in events(ledger)
    assert stepped(learner).version == 1


def test_three_batches_in_a_row_without_a_finite_loss_stop_the_learner_and_the_policy_is_kept(
    drawn: Path, tmp_path: Path
) -> None:
    run, ledger = copied(drawn, tmp_path / "run", groups_per_step=1)
    learner = Learner(run, ledger)
    stepped(learner)
    for row in ledger.view("SELECT digest, trace FROM submissions"):
        trace = codec.decode(Trace, codec.decode(Signed, row["trace"]).payload)
        mu = np.full(len(trace.generated()), np.nan, dtype="<f4")
        execute(ledger, "UPDATE submissions SET mu = ? WHERE digest = ?", (mu.tobytes(), row["digest"]))
    for _ in range(2):
        assert learner.turn() == "a step from policy 1 was refused: its loss is not finite"
    with pytest.raises(Diverged, match="3 batches in a row were refused, the last because its loss is not finite"):
        learner.turn()
    assert Learner(run, ledger).version == 1
    assert any(event.startswith("alarm: 3 batches in a row") for event in events(ledger))


def execute(ledger: Ledger, statement: str, values: tuple[Any, ...]) -> None:
    """A change to the ledger that no process of the trainer makes."""
    with ledger.write():
        ledger._db.execute(statement, values)


def test_a_gradient_that_is_not_finite_changes_no_weight(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    learner = Learner(run, ledger)
    before = {name: tensor.clone() for name, tensor in learner.stepper.masters.tensors().items()}
    execute(ledger, "UPDATE submissions SET reward = reward * 1e30", ())
    refused = learner.turn()
    assert refused == "a step from policy 0 was refused: the gradient is not finite"
    after = learner.stepper.masters.tensors()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_that_is_not_a_number_drops_its_group(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    learner = Learner(run, ledger)
    victim = learner._choose().informative[0]
    execute(ledger, "UPDATE submissions SET reward = ? WHERE group_id = ? AND slot = 1", (math.nan, victim))
    stepped(learner)
    assert (victim, GroupState.DROPPED, None) in batches(ledger)


def test_a_policy_whose_files_leave_a_weight_out_is_refused_at_the_start(made: tuple[Run, Ledger]) -> None:
    run, _ = made
    policy = run.folder.policy(0)
    names = tensor_names(policy) - {"model.norm.weight"}
    with pytest.raises(PolicyError, match=r"do not name the weight model\.norm\.weight"):
        Masters(PolicyModel(policy, "float32", "cpu"), run.config, names)


def test_the_learning_rate_warms_up_and_follows_its_schedule() -> None:
    settings: dict[str, Any] = dict(learning_rate=1.0, warmup_steps=2, schedule_steps=6, final_learning_rate=0.1)
    rates = {
        name: [learning_rate(TrainerConfig(schedule=name, **settings), step) for step in range(8)]
        for name in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert rates["linear"] == pytest.approx([0.5, 1, 1, 0.7, 0.4, 0.1, 0.1, 0.1])
    assert rates["cosine"] == pytest.approx([0.5, 1, 1, 0.775, 0.325, 0.1, 0.1, 0.1])
    with pytest.raises(UsageError, match="schedule = 'linear' must know its end"):
        TrainerConfig(schedule="linear")


POINTS = ("learned", "state written", "policy written", "policy renamed", "step renamed", "deltas made", "recorded")


def test_a_learner_killed_at_any_point_of_a_step_loses_nothing_and_counts_nothing_twice(
    drawn: Path, tmp_path: Path
) -> None:
    whole, whole_ledger = copied(drawn, tmp_path / "whole")
    learner = Learner(whole, whole_ledger)
    stepped(learner)
    stepped(learner)
    folders = {point: tmp_path / point.replace(" ", "-") for point in (*POINTS, "full")}
    for folder in folders.values():
        shutil.copytree(drawn, folder)
    arguments = [f"{point}={folder}" for point, folder in folders.items()]
    script = Path(__file__).parent / "learner_killed.py"
    command = [sys.executable, script, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.endswith("killed")] == [f"{p}: killed" for p in POINTS]
    assert "StorageError: policy 1 could not be written" in ended.stdout and "full: ended" in ended.stdout
    for point, folder in folders.items():
        run = open_run(folder)
        ledger = Ledger(run.folder.ledger)
        survivor = Learner(run, ledger)
        assert survivor.version == (1 if point in ("step renamed", "deltas made", "recorded") else 0), point
        while survivor.version < 2:
            stepped(survivor)
        assert [row.version for row in ledger.steps()] == [1, 2], point
        assert batches(ledger) == batches(whole_ledger), point
        roots = [policy_root(run.folder.policy(version)) for version in (1, 2)]
        assert roots == [policy_root(whole.folder.policy(version)) for version in (1, 2)], point
        assert not [*run.folder.policies.glob("*.tmp"), *run.folder.learner.glob("*.tmp")], point


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_files_that_contradict_the_ledger_stop_the_learner(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    stepped(Learner(run, ledger))
    execute(ledger, "DELETE FROM policies WHERE version = ?", (1,))
    weights = run.folder.policy(1) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]))
    with pytest.raises(LocalError, match="is not the policy the learner made"):
        Learner(run, ledger)


def test_the_process_learns_and_ends_with_its_parent(drawn: Path, tmp_path: Path) -> None:
    run, ledger = copied(drawn, tmp_path / "run")
    changes = Changes(ledger)
    command = [sys.executable, "-m", "trainer.learner", str(run.folder.path)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=_environment(), text=True
    )
    try:
        while not ledger.steps():
            assert changes.wait(60), "the learner process made no step within 60 s"
        assert child.stdin is not None and child.stderr is not None
        child.stdin.close()
        assert child.wait(30) == 0
        assert "learner: policy 1: reward 0." in child.stderr.read()
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def test_two_learner_processes_make_the_policies_that_one_makes(drawn: Path, tmp_path: Path) -> None:
    one, one_ledger = copied(drawn, tmp_path / "one", steps=3)
    learner = Learner(one, one_ledger)
    for _ in range(3):
        stepped(learner)
    two, two_ledger = copied(drawn, tmp_path / "two", steps=3, learners=2)
    changes = Changes(two_ledger)
    command = [sys.executable, "-m", "trainer.learners", str(two.folder.path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=_environment())
    try:
        while len(two_ledger.steps()) < 3:
            assert changes.wait(120) and child.poll() is None, "two learner processes made no step within 120 s"
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    for alone, together in zip(one_ledger.steps(), two_ledger.steps(), strict=True):
        for name in ("loss", "kl", "ess", "entropy", "gradient_norm"):
            assert getattr(together, name) == pytest.approx(getattr(alone, name), abs=1e-4), name
        assert (together.tokens, together.traces) == (alone.tokens, alone.traces)
    weights = [load_file(run.folder.policy(3) / "model.safetensors") for run in (one, two)]
    pairs = [(tensor.float(), weights[1][name].float()) for name, tensor in weights[0].items()]
    # Sums in another order: where a master lies at the border of two bfloat16 values, the other one. And AdamW divides
    # by the gradient's size: where that is nothing but rounding, the steps may go either way.
    most = 2 * 3 * one.config.learning_rate
    assert all(bool(((a - b).abs() <= most + a.abs() / 128).all()) for a, b in pairs)
    differing = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    assert differing < 1e-3, differing


def test_a_low_rank_update_is_merged_into_the_policy_that_nodes_get_and_goes_on_after_a_restart(
    drawn: Path, tmp_path: Path
) -> None:
    run, ledger = copied(drawn, tmp_path / "run", lora_rank=2, lora_alpha=8.0)
    stepped(Learner(run, ledger))
    learner = Learner(run, ledger)
    stepped(learner)
    policies = [load_file(run.folder.policy(version) / "model.safetensors") for version in range(3)]
    state = load_file(run.folder.step(2) / "state.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    update = state[f"lora_b/{name}"] @ state[f"lora_a/{name}"]
    merged = (policies[0][name].float() + 4 * update).bfloat16()
    assert torch.equal(policies[2][name], merged) and not torch.equal(policies[2][name], policies[1][name])
    assert torch.linalg.matrix_rank(policies[0][name].float() + 4 * update - policies[0][name].float()) <= 2
    live = learner.stepper.model.parameters()[name].detach()
    assert torch.equal(live, merged.float())
    assert torch.equal(policies[2]["model.embed_tokens.weight"], policies[0]["model.embed_tokens.weight"])
    other, other_ledger = copied(drawn, tmp_path / "other", lora_rank=2, lora_alpha=8.0)
    unbroken = Learner(other, other_ledger)
    stepped(unbroken)
    stepped(unbroken)
    assert policy_root(run.folder.policy(2)) == policy_root(other.folder.policy(2))


def test_a_low_rank_gradient_is_that_of_the_matrices(drawn: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).bfloat16().float())
    low = _LowRank("w", weight, rank=3, alpha=6.0)
    a = low.leaves["lora_a"].clone().requires_grad_(True)
    b = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).requires_grad_(True)
    low.leaves["lora_b"].copy_(b.detach())
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
    (x @ (weight.detach() + 2.0 * b @ a).T).square().sum().backward()
    merged = torch.nn.Parameter(low.value())
    (x @ merged.T).square().sum().backward()
    low.collect(merged)
    torch.testing.assert_close(low.leaves["lora_a"].grad, a.grad)
    torch.testing.assert_close(low.leaves["lora_b"].grad, b.grad)


def test_held_out_tasks_are_evaluated_every_so_many_versions_and_once(drawn: Path, tmp_path: Path) -> None:
    run, ledger = copied(drawn, tmp_path / "run", evaluate_every=2, evaluate_tasks=70)
    learner = Learner(run, ledger)
    first = learner.evaluate()
    assert first is not None and (first.version, first.tasks, first.faults) == (0, 70, 0)
    assert 0.0 < first.reward_mean < 0.6 and 0.02 < first.reward_error < 0.1
    assert learner.evaluate() is None
    stepped(learner)
    assert learner.evaluate() is None
    stepped(learner)
    second = learner.evaluate()
    assert second is not None and ledger.evaluations() == [first, second]
    # The same tasks with the same noise.
    again, again_ledger = copied(drawn, tmp_path / "again", evaluate_every=2, evaluate_tasks=70)
    repeated = Learner(again, again_ledger).evaluate()
    assert repeated is not None and repeated.reward_mean == first.reward_mean


def test_an_evaluation_draws_what_a_node_draws_of_the_same_task(drawn: Path, tmp_path: Path) -> None:
    run, ledger = copied(drawn, tmp_path / "run", evaluate_every=1, evaluate_tasks=6)
    actor = Gateway(run, ledger).actor(0)
    learner = Learner(run, ledger)
    opened = [evaluating._opened(run, number, {}, actor.tokenizer) for number in range(6)]
    evaluating._play(run, learner.stepper.model, actor.tokenizer, opened)
    expected = [Episode(each.index, each.seed, each.prompt) for each in opened]
    actor.play(expected)
    assert [each.tokens for each in opened] == [each.tokens for each in expected]
    assert [each.reward for each in opened] == [each.reward for each in expected]


def test_an_environment_that_fails_in_an_evaluation_is_told_and_stops_nothing(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger = copied(drawn, tmp_path / "run", evaluate_every=1, evaluate_tasks=5)

    def broken(self: Tools8, index: int, replies: tuple[str, ...]) -> float:
        raise ValueError("no such file")

    monkeypatch.setattr(Tools8, "reward", broken)
    learner = Learner(run, ledger)
    row = learner.evaluate()
    assert row is not None and (row.tasks, row.faults) == (0, 5)
    assert any(
        "evaluation of policy 0: 5 tasks left out" in event and "no such file" in event for event in events(ledger)
    )
    assert stepped(learner).version == 1


def test_the_mean_reward_climbs_on_completions_two_versions_old(template: Path, tmp_path: Path) -> None:
    run, ledger = make_run(
        tmp_path / "run", template, learning_rate=1e-3, warmup_steps=5, loss_tokens=1024, groups_per_step=8
    )
    gateway, learner = Gateway(run, ledger), Learner(run, ledger)
    for _ in range(25):
        while isinstance(learner.turn(), str):
            gateway.admit(10, max(0, learner.version - 2))
        if learner.version > 5 and _recent(ledger, 3) > 0.5:
            break
    rewards = [row.reward_mean for row in ledger.steps()]
    assert np.mean(rewards[:3]) < 0.35 and _recent(ledger, 3) > 0.5, rewards
    assert max(row.staleness_max for row in ledger.steps()) >= 2


def _recent(ledger: Ledger, count: int) -> float:
    return float(np.mean([row.reward_mean for row in ledger.steps()][-count:]))
