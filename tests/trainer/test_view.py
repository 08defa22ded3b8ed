"""What a person sees of a run in a terminal: figures are whole in a narrow one, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console

from protocol.identity import Identity
from protocol.run import EnvironmentShare
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow, SubmissionState
from trainer.rundir import Run
from trainer.summary import summary
from trainer.view import render

NODES = [Identity(bytes([number]) * 32) for number in (1, 2, 3)]
FIGURES = {
    "policy_version": 123_456, "tokens_per_second": 1_234_567.0, "slots_busy": 1_023, "slots_total": 1_024,
    "slots_waiting": 98_765, "cache_percent": 100, "accepted": 12_345_678, "refused": 7_654_321,
    "audits_passed": 8_765_432, "audits_failed": 54_321,
}  # fmt: skip
SHOWN = ("123,456", "1,234,567", "1023/1024", "98,765", "100 %", "12,345,678", "7,654,321", "8,765,432", "(54,321")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    path = tmp_path_factory.mktemp("view") / "run"
    return init_run(path, name="test", policy="embedded", environments=shares, config=TrainerConfig())


@pytest.fixture(scope="module")
def found(run: Run) -> Iterator[dict[str, object]]:
    ledger = Ledger(run.folder.ledger)
    for who in NODES:
        ledger.see_node(who.node, 1, "rlcommons 0.1.0", "transformers 5.14.1 torch 2.13.0+cpu, float32 on cpu")
    for number in range(3):
        signed = SubmissionState.REFUSED, "LEASE_UNKNOWN", False, 1, b"signed"
        ledger.add_verdict(NODES[0].node, bytes([number]) * 32, *signed)
    with ledger.write():
        changes = ", ".join(f"{name} = ?" for name in FIGURES)
        ledger._db.execute(f"UPDATE nodes SET {changes}", tuple(FIGURES.values()))
    step = StepRow(123_456, 1, 1, 2, 60, 1.0, 0, 0.0, 0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1e-6, 1.0)
    ledger.record_step(step, b"root", [])
    yield summary(ledger, run.config, 2)
    ledger.close()


def screen(run: Run, found: dict[str, object], width: int) -> str:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(render(run, found))
    return shown.get()


def test_where_there_is_room_everything_of_a_node_is_shown(run: Run, found: dict[str, object]) -> None:
    shown = screen(run, found, 200)
    for text in (*SHOWN, "float32 on cpu", "stake", "KV"):
        assert text in shown, text
    assert "too narrow" not in shown


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 150])
def test_in_a_narrow_terminal_no_figure_is_cut(run: Run, found: dict[str, object], width: int) -> None:
    """Columns are left out, which is said: the engine first, what a node did last."""
    shown = screen(run, found, width)
    told, mark, table = shown.partition("node ")
    table, _, left_out = (mark + table).partition("too narrow here for ")
    assert set((told + table).split()) <= set(screen(run, found, 300).split())
    headings = table.splitlines()[0].split()
    assert "accepted" in headings and table.count("12,345,678") == 3
    if width >= 80:
        assert {"policy", "tokens/s", "refused"} <= set(headings)
    assert "engine" in left_out
    assert max(map(len, shown.splitlines())) <= width
