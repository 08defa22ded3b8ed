"""The numeric vectors are what their generator writes, and the product agrees with noise.json.

toploc.json is read by tests/verify/test_toploc.py.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import UsageError
from protocol.noise import hash_prefix, hashes, noise, token_keys
from verify.sampling import margins, sample

HERE = Path(__file__).parent
ENTRIES = json.loads((HERE / "noise.json").read_text())


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


def test_the_files_are_what_the_generator_writes() -> None:
    for name, content in generated().items():
        assert json.loads((HERE / name).read_text()) == content, f"{name}: run tests/vectors/generate.py"
