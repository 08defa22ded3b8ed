"""The numeric vectors are what their generator writes, and the product agrees with noise.json and scores.json.

toploc.json is read by tests/verify/test_toploc.py.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.calibration import Alternative, Calibration, Limits, Pair, Sample, ScoreTable
from protocol.errors import UsageError
from protocol.noise import hash_prefix, hashes, noise, token_keys
from protocol.verdict import CheckOutcome
from verify.check import node_check
from verify.sampling import margins, sample
from verify.scores import add_scores, bins, evidence, trace_scores
from verify.toploc import ChunkResult

HERE = Path(__file__).parent
ENTRIES = json.loads((HERE / "noise.json").read_text())
SCORES = json.loads((HERE / "scores.json").read_text())


def generated() -> dict[str, dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("generate_numeric", HERE / "generate_numeric.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    content: dict[str, dict[str, Any]] = module.build()
    return content


def answer(entry: dict[str, Any]) -> Any:
    if entry["op"] == "noise":
        tokens = np.array(entry["tokens"])
        drawn = hashes(np.uint32(hash_prefix(entry["seed"], entry["position"])), token_keys(tokens))
        values = noise(entry["seed"], np.array([entry["position"]]), tokens)
        return {"hashes": drawn.tolist(), "noise": [float(value) for value in values]}
    logits = torch.tensor([entry["logits"]])
    slot = ([entry["seed"]], [entry["position"]])
    if entry["op"] == "draw":
        token, logprob = sample(logits, *slot, [entry["temperature"]])
        return {"token": int(token), "logprob": pytest.approx(float(logprob), abs=1e-5)}
    result = margins(logits, *slot, [entry["token"]], [entry["temperature"]])
    return pytest.approx(float(result.margins), abs=1e-5)


@pytest.mark.parametrize("entry", ENTRIES["valid"], ids=lambda entry: entry["name"])
def test_noise_draws_and_margins_are_those_of_the_vector(entry: dict[str, Any]) -> None:
    assert entry["value"] == answer(entry)


@pytest.mark.parametrize("entry", ENTRIES["invalid"], ids=lambda entry: entry["name"])
def test_a_question_without_an_answer_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        answer(entry)


def table_of(entry: dict[str, Any]) -> ScoreTable:
    alternatives = tuple(Alternative(each["name"], tuple(each["scores"])) for each in entry["alternatives"])
    return ScoreTable(tuple(entry["edges"]), alternatives)


def found_of(entry: dict[str, Any]) -> Any:
    if entry["op"] == "bins":
        return bins(table_of(entry["table"]), entry["values"]).tolist()
    if entry["op"] == "evidence":
        return pytest.approx(evidence(entry["scores"]), abs=1e-9)
    if entry["op"] == "node":
        return nodes_of(entry["traces"])
    pair, limits = Pair("", "", "", "", "", ""), Limits(*[0.0] * 7)
    sample_ = Sample(0, 0, 0, 0, 0.0, (), (), (), (), (), 0.0)
    tables = table_of(entry["margins_table"]), table_of(entry["proofs_table"])
    held = Calibration(bytes(32), 0, bytes(32), pair, limits, *tables, sample_, 0)
    chunks = [ChunkResult(0, length, 0, 0, mean, 0.0, 128, 0) for length, mean in entry["chunks"]]
    return pytest.approx(trace_scores(held, entry["margins"], entry["temperature"], chunks), abs=1e-9)


def nodes_of(traces: list[list[float]]) -> list[dict[str, Any]]:
    found, sums = [], tuple[float, ...]()
    for scores in traces:
        check = node_check(scores, sums)
        sums = add_scores(sums, scores)
        failed = check.outcome is CheckOutcome.FAILED
        found.append({"value": pytest.approx(check.value, abs=1e-9), "failed": failed})
    return found


@pytest.mark.parametrize("entry", SCORES["valid"], ids=lambda entry: entry["name"])
def test_scores_and_evidence_are_those_of_the_vector(entry: dict[str, Any]) -> None:
    expected = tuple(entry["value"]) if entry["op"] == "scores" else entry["value"]
    assert expected == found_of(entry)


@pytest.mark.parametrize("entry", SCORES["invalid"], ids=lambda entry: entry["name"])
def test_scores_of_two_calibrations_do_not_add_up(entry: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        found_of(entry)


def test_the_files_are_what_the_generator_writes() -> None:
    for name, content in generated().items():
        assert json.loads((HERE / name).read_text()) == content, f"{name}: run tests/vectors/generate.py"
