"""The negative controls as anyone runs them: caught on the embedded policy, and on SmolLM2 where it is there; and the
reference node they are drawn by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from protocol.environments import base
from protocol.errors import UsageError
from tests.studio import EMBEDDED
from verify.attacks import ATTACKS, Attack, Attempt, Caught
from verify.cli import main
from verify.controls import Found, Plan, Report, run_controls, tabulate
from verify.controls_page import page
from verify.controls_report import as_json
from verify.judge import recompute
from verify.long_task import LongTask, Writing, long_task
from verify.model import PolicyModel
from verify.prefill import Verifier
from verify.reference import Drawn, ReferenceRun, draw, play
from verify.wide import WideLinears

SMOLLM2 = Path(__file__).parent.parent.parent / ".cache" / "smollm2"
SMALL = Plan(EMBEDDED, traces=8, tokens=40, environment="tools8@1")


@pytest.fixture(scope="module")
def report() -> Report:
    return run_controls(SMALL)[0]


def missed(report: Report) -> list[str]:
    return [f"{row.name}: {row.refused}/{row.changed}, within {row.within}" for row in report.rows if not row.met]


# --- what is caught ---


def test_every_control_is_caught_in_time_and_no_honest_trace_is_refused(report: Report) -> None:
    assert missed(report) == [] and report.met
    assert [row.name for row in report.rows] == ["honest", *(attack.name for attack in ATTACKS)]


def test_every_control_that_must_be_caught_had_an_occasion(report: Report) -> None:
    without = [row.name for row in report.rows if row.caught is Caught.TRACE and row.changed == 0]
    assert without == []


def test_the_honest_row_is_far_from_every_limit(report: Report) -> None:
    honest = report.rows[0]
    assert honest.ratio is not None and honest.ratio < 0.5
    assert honest.nats < 0


def test_what_is_refused_by_a_limit_is_refused_by_a_margin(report: Report) -> None:
    measured = {"margins", "logprobs", "proofs"}  # a length or a count is exact: one more than allowed is enough
    rows = [row for row in report.rows if row.required and measured & {name for name, _ in row.checks}]
    assert [row.name for row in rows if row.ratio is not None and row.ratio < 1.5] == []


@pytest.mark.slow
def test_no_honest_trace_of_two_thousand_is_refused() -> None:
    plan = replace(SMALL, tokens=0, honest=2_000, calibration=128, only=("duplicate",))
    honest = run_controls(plan)[0].rows[0]
    assert (honest.attempts, honest.refused, honest.within) == (2_000, 0, None)


@pytest.mark.smollm2
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_control_is_caught_on_smollm2(dtype: str) -> None:
    for report in run_controls(Plan(SMOLLM2, dtype=dtype, verifier_dtypes=tuple(dict.fromkeys((dtype, "float32"))))):
        assert missed(report) == [] and report.met, f"{dtype} by {report.verifier_dtype}: {report.too_noisy}"


# --- how it is counted ---

ATTACK = Attack("some", Caught.TRACE, lambda stage: [])
NOTHING = np.zeros(0, dtype=np.float32)


def found(check: str = "", scores: tuple[float, ...] = ()) -> Found:
    return Found(check, None, scores, NOTHING, NOTHING.astype(np.float64), tokens=10)


def test_a_group_of_eight_without_a_refusal_misses_the_bar() -> None:
    caught, passed = [found("margins")] * 8, [found()] * 8
    row = tabulate(ATTACK, [Attempt(b"")] * 16, [*caught, *passed])
    assert row.within is None and not row.met and row.refused == 8


def test_the_worst_group_counts() -> None:
    late = [*[found()] * 4, found("proofs"), *[found()] * 3]
    row = tabulate(ATTACK, [Attempt(b"")] * 16, [*[found("margins")] * 8, *late])
    assert (row.within, row.tokens, row.met) == (5, 50, True)


def test_a_node_is_caught_by_its_sums_where_no_trace_is_refused() -> None:
    row = tabulate(replace(ATTACK, caught=Caught.NODE), [Attempt(b"")] * 32, [found(scores=(1.0, -5.0))] * 32)
    assert row.by_node and row.met
    # exp(within)/2 is above a million.
    assert row.within == 15


def test_attempts_that_came_out_honest_are_not_counted_against_the_checks() -> None:
    row = tabulate(ATTACK, [Attempt(b"", changed=False)] * 8, [found()] * 8)
    assert row.changed == 0 and not row.required and row.met


def test_an_honest_trace_that_is_refused_misses_the_bar() -> None:
    row = tabulate(None, [Attempt(b"")] * 2, [found(), found("margins")])
    assert row.refused == 1 and not row.met


# --- the command ---


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(report: Report) -> None:
    text = page([report])
    assert text.startswith("<!doctype html>") and text.count("<svg") == 2
    assert "http" not in text and "<script" not in text and "@import" not in text
    assert all(attack.name in text.replace("&#x27;", "'") for attack in ATTACKS)


def test_json_says_what_the_table_says(report: Report) -> None:
    said = json.loads(json.dumps(as_json([report])))
    assert said["met"] is True
    assert [row["name"] for row in said["reports"][0]["rows"]] == [row.name for row in report.rows]


def test_the_command_writes_a_page_and_says_by_its_exit_code_that_all_was_caught(tmp_path: Path, capsys) -> None:
    arguments = ["controls", "--policy", str(EMBEDDED), "--environment", "tools8@1", "--traces", "8"]
    html = tmp_path / "controls.html"
    assert main([*arguments, "--calibration", "0", "--only", "zero proof", "--json", "--html", str(html)]) == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["rows"][1]["refused"] == 8
    assert "zero proof" in html.read_text()


def test_a_control_that_does_not_exist_is_named_with_those_that_do(capsys) -> None:
    assert main(["controls", "--policy", str(EMBEDDED), "--only", "bribery"]) == 2
    assert "'bribery' is not a control; there are: zero proof" in capsys.readouterr().err


# --- the reference node ---


@pytest.fixture(scope="module")
def model() -> PolicyModel:
    return PolicyModel(EMBEDDED, "float32", "cpu")


def test_what_a_row_draws_does_not_depend_on_its_company(model: PolicyModel) -> None:
    prompts = [tuple(range(10, 10 + length)) for length in (3, 9, 30)]
    together = draw(model, prompts, [1, 2, 3], [1.0] * 3, [20, 5, 12], frozenset())
    alone = [
        draw(model, [prompt], [seed], [1.0], most, frozenset())[0]
        for prompt, seed, most in zip(prompts, (1, 2, 3), (20, 5, 12), strict=True)
    ]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens and len(one.tokens) in (20, 5, 12)
        torch.testing.assert_close(one.hidden.float(), other.hidden.float(), rtol=0.02, atol=0.02)


def test_a_draw_ends_with_its_stop_token(model: PolicyModel) -> None:
    free: Drawn = draw(model, [(5, 6, 7)], [4], [1.0], 30, frozenset())[0]
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    assert draw(model, [(5, 6, 7)], [4], [1.0], 30, frozenset([stop]))[0].tokens == free.tokens[: first + 1]


def test_a_prompt_that_does_not_fit_is_named(model: PolicyModel) -> None:
    with pytest.raises(UsageError, match="prompt 0 has 1000 tokens and 100 to draw"):
        draw(model, [(5,) * 1_000], [1], [1.0], 100, frozenset())


def test_what_the_reference_node_plays_is_what_the_verifier_recomputes(model: PolicyModel) -> None:
    run = ReferenceRun.found(EMBEDDED, "guess@1")
    environment = base.load("guess@1")
    works = [(run.lease(task, environment), slot) for task in (1, 2) for slot in range(4)]
    traces = play(model, run.tokenizer, works)
    assert any(len(trace.spans) > 3 for trace in traces)
    ours = recompute(Verifier(EMBEDDED), [(trace, lease) for trace, (lease, _) in zip(traces, works, strict=True)])
    assert all(float(each.margins.max()) == 0 for each in ours)
    assert max(chunk.exponent_mismatches for each in ours for chunk in each.chunks) <= 1


def test_the_same_seed_gives_the_same_traces_and_another_gives_others(model: PolicyModel) -> None:
    environment = base.load("tools8@1")

    def tokens(seed: int) -> list[tuple[int, ...]]:
        run = ReferenceRun.found(EMBEDDED, "tools8@1", seed=seed)
        works = [(run.lease(task, environment), 0) for task in range(8)]
        return [trace.tokens for trace in play(model, run.tokenizer, works)]

    assert tokens(0) == tokens(0) != tokens(1)


# --- long tasks ---


def test_a_long_task_plays_one_task_after_the_other_and_means_their_rewards() -> None:
    inner = base.load("guess@1")
    long = LongTask(inner, characters=4)
    first, second = (
        next(n for n in range(1, 21) if inner.step(task, (str(n),)) is None) for task in (3, 3 + (1 << 20))
    )
    assert long.prompt(3) == inner.prompt(3)
    assert long.step(3, (str(first),)) == inner.prompt(0)[-1].content  # the next task begins
    right = (str(first), str(second))
    assert long.reward(3, right) == 1.0
    assert long.reward(3, (str(first), "x")) == 0.5
    assert long.step(3, (*right, "1234")) is None


def test_a_writing_task_ends_by_itself_or_by_its_length() -> None:
    assert "sentence" in Writing(64).prompt(0)[0].content and "story" in Writing(64).prompt(1)[0].content
    run = ReferenceRun.found(EMBEDDED, "writing")
    assert long_task(run.tokenizer, None, 64).max_new_tokens == 64


# --- bfloat16 without instructions for it ---


def test_wide_linears_compute_what_bfloat16_linears_compute() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32, bias=False)).bfloat16().requires_grad_(False)
    rows = torch.randn(7, 64).bfloat16()
    expected = model(rows)
    wide = WideLinears(model)
    torch.testing.assert_close(model(rows), expected, rtol=2**-6, atol=2**-6)
    model[0].weight.copy_(model[0].weight * 2)
    wide.refresh()
    assert not torch.equal(model(rows), expected)
