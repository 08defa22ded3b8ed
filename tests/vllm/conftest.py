"""What the vLLM engine's tests share: small policies that vLLM's CPU kernels can run, and one prefill to judge by.

Skipped, whole, where there is no vLLM (`make test-vllm` has it).
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT_FOLDER = Path(__file__).parents[2]
EMBEDDED = ROOT_FOLDER / "trainer" / "embedded"
SMOLLM2 = Path(os.environ.get("RLCOMMONS_SMOLLM2", ROOT_FOLDER / ".cache" / "smollm2"))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))  # vLLM starts in 5 to 60 s, by what else the machine does
            # vLLM and what it imports warn as they please; the project's own warnings stay errors elsewhere.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


def make_policy(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model with the embedded policy's tokenizer, large enough in each head for vLLM's CPU kernels.
    Token 3 of the vocabulary ends a turn, about once in a hundred tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 106, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "eos_token_id": 3,
        "bos_token_id": 2, "pad_token_id": 0, "head_dim": 32, "initializer_range": 0.15, "tie_word_embeddings": True,
        **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    make(AutoConfig.for_model(**fields)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of one shape: `a`, `b` with tied embeddings; `untied` of another."""
    folder = tmp_path_factory.mktemp("policies")
    return {
        "a": make_policy(folder / "a", 1),
        "b": make_policy(folder / "b", 2),
        "untied": make_policy(folder / "untied", 3, tie_word_embeddings=False),
    }


class Holder:
    """The one engine of this process: vLLM's process groups are global, so two in one process do not go on."""

    def __init__(self, policies: dict[str, Path]) -> None:
        self._policies = policies
        self._engine: Any = None

    def get(self) -> Any:
        from node.vllm_engine import VllmEngine

        if self._engine is None:
            # Prompts come in pieces of 32 tokens.
            self._engine = VllmEngine(slots=4, threads=1, settings={"max_num_batched_tokens": 32})
        for key in list(self._engine._open):
            self._engine.abort(key)
        if self._engine.loaded_root != b"a" * 32:
            self._engine.load(self._policies["a"], b"a" * 32)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


@pytest.fixture(scope="session")
def holder(policies: dict[str, Path]) -> Iterator[Holder]:
    made = Holder(policies)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """vLLM's client never closes its ZeroMQ context, and Python warns of each: here, where that is no error yet."""
    yield
    gc.collect()


@pytest.fixture
def engine(holder: Holder) -> Any:
    """With 4 slots, prefilling 32 tokens at a time, holding policy `a` and nothing open."""
    return holder.get()


@pytest.fixture
def alone(holder: Holder) -> None:
    """For tests that make an engine of their own."""
    holder.close()
