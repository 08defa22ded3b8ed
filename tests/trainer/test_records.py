"""Records of steps for people: each step once, whenever their writer was killed; TensorBoard and transformers read
what we write."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import UsageError
from protocol.policy import policy_root
from tests.trainer.fabricate import make_run
from trainer import records
from trainer.event_files import EventFile, checksum, record, step_of, tags_of
from trainer.event_files import records as records_in
from trainer.export import export_policy
from trainer.ledger import Ledger
from trainer.ledger_rows import EvaluationRow, StepRow
from trainer.records import JsonLines, TensorBoard, bring_up_to_date, scalars
from trainer.rundir import Run

ROOT = Path(records.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def step(version: int) -> StepRow:
    """Each figure another number."""
    kinds = {"int": int, "float": lambda place: version + place / 64}
    fields = {
        name: kinds[StepRow.__annotations__[name]](place) for place, name in enumerate(StepRow.__slots__)
    }  # fmt: skip
    return StepRow(**{**fields, "version": version, "created_ms": 1_700_000_000_000 + 1000 * version})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, ledger = make_run(tmp_path_factory.mktemp("template") / "run")
    ledger.close()
    return run.folder.path


@pytest.fixture
def made(tmp_path: Path, template: Path) -> Iterator[tuple[Run, Ledger]]:
    run, ledger = make_run(tmp_path / "run", template)
    with closing(ledger):
        yield run, ledger


def learn(ledger: Ledger, *versions: int) -> None:
    for version in versions:
        ledger.record_step(step(version), bytes(32), [])


def lines(run: Run) -> list[int]:
    return [json.loads(line)["version"] for line in run.folder.metrics.read_text().splitlines()]


def both(run: Run) -> tuple[JsonLines, TensorBoard]:
    return JsonLines(run.folder.metrics), TensorBoard(run.folder.tensorboard)


def test_a_step_is_a_line_with_all_its_figures(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    learn(ledger, 1, 2)
    assert bring_up_to_date(ledger, JsonLines(run.folder.metrics)) == 2
    found = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert [StepRow(**each) for each in found] == ledger.steps()


def test_tensorboard_reads_what_is_written(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    learn(ledger, 1, 2, 300)
    bring_up_to_date(ledger, TensorBoard(run.folder.tensorboard))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        shown = EventAccumulator(str(run.folder.tensorboard)).Reload()
    assert set(shown.Tags()["scalars"]) == set(scalars(step(1))) and "step/reward_mean" in scalars(step(1))
    for name in scalars(step(1)):
        read = [(each.step, each.value, each.wall_time) for each in shown.Scalars(name)]
        wanted = [(row.version, scalars(row)[name], row.created_ms / 1000) for row in ledger.steps()]
        assert [(a, pytest.approx(b), c) for a, b, c in wanted] == read


def test_checksums_are_crc_32c() -> None:
    unmasked = (checksum(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF
    assert (unmasked << 15 | unmasked >> 17) & 0xFFFFFFFF == 0xE3069283  # the check value of the catalogue of CRCs
    assert list(records_in(record(b"a") + record(b"b")[:-1])) == [(17, b"a")]


@pytest.mark.parametrize("seed", range(20))
def test_wherever_a_write_was_cut_off_each_step_is_there_once(made: tuple[Run, Ledger], seed: int) -> None:
    run, ledger = made
    chance = random.Random(seed)
    learn(ledger, *range(1, 6))
    for each in both(run):
        bring_up_to_date(ledger, each)
    for path in (run.folder.metrics, next(run.folder.tensorboard.iterdir())):
        data = path.read_bytes()
        kept = data[: chance.randrange(len(data) + 1)]
        # What a machine that lost its power may leave.
        path.write_bytes(kept + bytes(chance.randrange(3) * chance.randrange(40)))
    learn(ledger, 6, 7)
    for each in both(run):
        bring_up_to_date(ledger, each)
    assert lines(run) == list(range(1, 8))
    data = next(run.folder.tensorboard.iterdir()).read_bytes()
    whole = list(records_in(data))
    assert whole[-1][0] == len(data), "nothing of the torn record is left"
    assert [step_of(body) for _, body in whole] == [None, *range(1, 8)]


# --- evaluations ---


def evaluate(ledger: Ledger, *versions: int, tasks: int = 64) -> None:
    for version in versions:
        ledger.record_evaluation(EvaluationRow(version, 1_700_000_000_500 + 1000 * version, tasks, 0.5, 0.03, 1, 2.0))


def test_an_evaluation_is_a_line_and_points_of_its_own_each_at_its_step(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    evaluate(ledger, 0)
    learn(ledger, 1, 2)
    evaluate(ledger, 2)
    evaluate(ledger, 4, tasks=0)  # every environment failed
    for each in both(run):
        bring_up_to_date(ledger, each)
    found = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert [(each["version"], each.get("evaluation_reward_mean", "a step")) for each in found] == [
        (0, 0.5), (1, "a step"), (2, "a step"), (2, 0.5), (4, None),
    ]  # fmt: skip
    assert found[3] == {
        "version": 2, "evaluation_at_ms": 1_700_000_002_500, "evaluation_tasks": 64, "evaluation_reward_mean": 0.5,
        "evaluation_reward_error": 0.03, "evaluation_faults": 1, "evaluation_seconds": 2.0,
    }  # fmt: skip
    data = next(run.folder.tensorboard.iterdir()).read_bytes()
    events = [body for _, body in records_in(data)][1:]
    assert [(step_of(body), "evaluation/reward_mean" in tags_of(body)) for body in events] == [
        (0, True), (1, False), (2, False), (2, True), (4, True),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_wherever_a_write_was_cut_off_each_evaluation_is_there_once(made: tuple[Run, Ledger], seed: int) -> None:
    run, ledger = made
    chance = random.Random(seed)
    for version in range(4):
        if version:
            learn(ledger, version)
        evaluate(ledger, version)
        for each in both(run):
            bring_up_to_date(ledger, each)
        for path in (run.folder.metrics, next(run.folder.tensorboard.iterdir())):
            data = path.read_bytes()
            path.write_bytes(data[: chance.randrange(len(data) + 1)])
    for each in both(run):
        bring_up_to_date(ledger, each)
    rows = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    wanted = [(0, True), *((version, kind) for version in (1, 2, 3) for kind in (False, True))]
    assert [(row["version"], "evaluation_tasks" in row) for row in rows] == wanted
    events = [body for _, body in records_in(next(run.folder.tensorboard.iterdir()).read_bytes())][1:]
    assert [(step_of(body), "evaluation/tasks" in tags_of(body)) for body in events] == wanted


def test_a_run_put_back_to_an_earlier_time_has_records_of_that_time(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    shutil.copytree(run.folder.path, run.folder.path.with_name("earlier"))
    learn(ledger, 1, 2, 3)
    for each in both(run):
        bring_up_to_date(ledger, each)
    with closing(Ledger(run.folder.path.with_name("earlier") / "ledger.sqlite")) as earlier:
        learn(earlier, 1)
        for each in both(run):
            bring_up_to_date(earlier, each)
    assert lines(run) == [1]
    assert EventFile(run.folder.tensorboard).last == 1


def test_the_process_follows_the_ledger_and_one_that_was_killed_goes_on(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    words = [sys.executable, "-m", "trainer.records", str(run.folder.path)]
    for first in (1, 4):
        learn(ledger, first)
        process = subprocess.Popen(words, stdin=subprocess.PIPE, env=ENVIRONMENT)
        assert process.stdin is not None
        try:
            until_noted(run, first, process)
            learn(ledger, first + 1)
            until_noted(run, first + 1, process)
            if first == 1:
                process.send_signal(signal.SIGKILL)
                process.wait(20)
            learn(ledger, first + 2)
            process.stdin.close()
            assert process.wait(20) == (-signal.SIGKILL if first == 1 else 0)
        finally:
            process.kill()
            process.wait()
    assert lines(run) == [1, 2, 3, 4, 5, 6], "what came last is noted before it ends"


def until_noted(run: Run, version: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not run.folder.metrics.exists() or version not in lines(run):
        assert process.poll() is None and time.monotonic() < deadline, f"step {version} is not noted"
        time.sleep(0.02)


# --- Weights & Biases ---


def test_a_project_without_its_client_is_told_at_once(
    made: tuple[Run, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer import serve

    run, _ = made
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install -e .\.\[wandb\]"):
        serve.serve(run.folder.path, wandb="mine")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="its client is not installed (extra wandb)")
def test_weights_and_biases_takes_the_steps_offline_each_once(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    program = (
        "import sys; from pathlib import Path\n"
        "from trainer.ledger import Ledger\n"
        "from trainer.records import WeightsAndBiases, bring_up_to_date\n"
        "from trainer.rundir import open_run\n"
        "run = open_run(Path(sys.argv[1]))\n"
        "theirs = WeightsAndBiases(run, 'test')\n"
        "print('ADDED', bring_up_to_date(Ledger(run.folder.ledger, read_only=True), theirs), theirs.last)\n"
        "theirs.close()\n"
    )
    environment = {**ENVIRONMENT, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    added = []
    for versions in ((1, 2), (), (3,)):
        learn(ledger, *versions)
        evaluate(ledger, *(versions or (2,)))
        words = [sys.executable, "-c", program, str(run.folder.path)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        added += [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("ADDED")]
    assert added == [4, 0, 2]
    assert list((run.folder.path / "wandb").glob("offline-run-*/*.wandb"))


# --- policies ---


def test_an_exported_policy_is_what_the_run_published_and_transformers_loads_it(
    made: tuple[Run, Ledger], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, ledger = made
    version, root = export_policy(run, ledger, tmp_path / "model", None)
    assert (version, policy_root(tmp_path / "model")) == (0, root)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer.apply_chat_template([{"role": "user", "content": "add 2 3"}], return_dict=False)])
    assert model.dtype == torch.bfloat16 and torch.isfinite(model(ids).logits).all()


def test_a_policy_that_is_not_there_or_a_folder_in_the_way_is_told(made: tuple[Run, Ledger], tmp_path: Path) -> None:
    run, ledger = made
    with pytest.raises(UsageError, match="policy 7 was never made: the latest is 0"):
        export_policy(run, ledger, tmp_path / "model", 7)
    with pytest.raises(UsageError, match="exists already"):
        export_policy(run, ledger, run.folder.path, None)
    learn(ledger, 1)
    with pytest.raises(UsageError, match=r"policy 1 is no longer kept .* these are here: 0"):
        export_policy(run, ledger, tmp_path / "model", None)
