"""Which GPUs a node takes and how much of them: the decisions, on cards that are described and not there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from node.cards import (
    GIB,
    MOST_SLOTS,
    Card,
    PolicySize,
    chosen,
    dtype_for,
    held,
    look,
    parse_cards,
    read_cards,
    share_of,
    size_of,
    slots_for,
    visible_devices,
)
from protocol.errors import EngineError, UsageError
from tests.node.rig import EMBEDDED

SMALL = Card(0, "NVIDIA GeForce RTX 3070", "uuid-0", 8 * GIB, 7 * GIB, (8, 6))
LARGE = Card(1, "NVIDIA RTX 4090", "uuid-1", 24 * GIB, 23 * GIB, (8, 9))
OLD = Card(2, "Tesla T4", "uuid-2", 15 * GIB, 15 * GIB, (7, 5))
SEVEN_B = PolicySize(weights=15 * GIB, token=128 * 1024)  # 7.6 thousand million parameters, 28 layers of 8 heads
HALF_B = PolicySize(weights=1 * GIB, token=12 * 1024)


def test_cards_are_named_by_number() -> None:
    assert parse_cards("0") == (0,)
    assert parse_cards("2,0") == (2, 0)
    for text in ("", "a", "0,", "-1", "0,0", "1.5", "0 1"):
        with pytest.raises(UsageError, match="--gpu"):
            parse_cards(text)


def test_cards_are_counted_among_those_that_were_visible() -> None:
    assert visible_devices((0, 2), "") == "0,2"
    assert visible_devices((1,), "4,GPU-abc") == "GPU-abc"
    with pytest.raises(EngineError, match=r"no card 2 here: CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        visible_devices((2,), "4,5")


def test_a_card_that_is_not_there_is_named_with_those_that_are() -> None:
    assert chosen((1, 0), (SMALL, LARGE)) == (LARGE, SMALL)
    with pytest.raises(EngineError, match=r"no CUDA device 3 \(--gpu 0: NVIDIA GeForce RTX 3070\)"):
        chosen((3,), (SMALL,))
    with pytest.raises(EngineError, match="torch finds none"):
        chosen((0,), ())


def test_the_dtype_is_one_that_the_device_has_and_an_auditor_can_judge() -> None:
    assert dtype_for(None, ()) == "float32"
    assert dtype_for(None, (SMALL,)) == "bfloat16"
    assert dtype_for("float32", (OLD,)) == "float32"
    with pytest.raises(EngineError, match=r"GPU 2 \(Tesla T4, compute capability 7.5\) has no bfloat16.*--dtype"):
        dtype_for(None, (OLD,))
    with pytest.raises(EngineError, match="'float16' is not a dtype that a trace can be audited in"):
        dtype_for("float16", (SMALL,))


def test_no_more_of_a_card_is_taken_than_allowed() -> None:
    assert share_of((LARGE,), 0.85, None) == 0.85
    assert share_of((LARGE,), 0.85, 12 * GIB) == 0.5
    assert share_of((SMALL, LARGE), 0.85, 6 * GIB) == 0.25  # of each as much as of the card that gives least


def test_a_card_that_something_else_uses_is_refused_with_the_numbers() -> None:
    busy = replace(LARGE, free=5 * GIB)
    with pytest.raises(EngineError) as caught:
        share_of((busy,), 0.85, None)
    said = str(caught.value)
    assert "GPU 1 (NVIDIA RTX 4090) has 5.0 GiB of 24.0 GiB free" in said
    assert "would take 20.4 GiB" in said and "--max-vram 4.5" in said
    assert share_of((busy,), 0.85, int(4.5 * GIB)) == pytest.approx(4.5 / 24)


def test_as_many_sequences_as_the_card_has_room_for() -> None:
    few = slots_for(SEVEN_B, (LARGE,), 0.85, None, "bfloat16")
    assert few == 31  # 20.4 − 1.5 − 15 = 3.9 GiB, of 128 MiB each
    assert slots_for(HALF_B, (LARGE,), 0.85, None, "bfloat16") == MOST_SLOTS
    assert slots_for(SEVEN_B, (LARGE,), 0.85, 7, "bfloat16") == 7
    both = slots_for(SEVEN_B, (LARGE, replace(LARGE, number=2)), 0.85, None, "bfloat16")
    assert both > 5 * few


def test_a_policy_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(EngineError) as caught:
        slots_for(SEVEN_B, (SMALL,), 0.85, 4, "bfloat16")
    said = str(caught.value)
    assert "15.0 GiB of weights as bfloat16" in said and "one sequence of 2048 tokens" in said
    assert "may take 6.8 GiB of its 8.0 GiB (85%)" in said and "--gpu 0,1" in said
    assert slots_for(SEVEN_B, tuple(replace(SMALL, number=n) for n in range(4)), 0.85, None, "bfloat16") > 1


def test_a_policys_size_is_read_from_its_files(tmp_path: Path) -> None:
    size = size_of(EMBEDDED, "float32")
    assert size.weights == 2 * size_of(EMBEDDED, "bfloat16").weights
    stored = sum(path.stat().st_size for path in EMBEDDED.glob("*.safetensors"))
    assert 0 <= stored - size.weights // 2 < 16_384  # it is kept in bfloat16, with a header
    assert size.token == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, of 16, in 4 bytes
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(EngineError, match=r"cannot be told from its files: there is no .num_attention_heads."):
        size_of(tmp_path, "float32")


def test_a_second_node_on_a_card_is_refused_and_one_on_another_is_not(tmp_path: Path) -> None:
    with held((SMALL, LARGE), tmp_path):
        refused = pytest.raises(EngineError, match=r"GPU 1 \(NVIDIA RTX 4090\) is used by another rlnode")
        with refused, held((LARGE,), tmp_path):
            pass
        with held((OLD,), tmp_path):
            pass
    with held((LARGE,), tmp_path):
        pass


def test_a_card_is_free_again_when_its_node_died(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom node.cards import Card, held\n"
        "with held([Card(0, 'x', 'uuid-0', 1, 1, (8, 0))], Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(EngineError, match="used by another rlnode"), held((SMALL,), tmp_path):
            pass
        other.kill()
        other.wait()
    with held((SMALL,), tmp_path):
        pass


def test_what_torch_tells_is_read_back() -> None:
    line = '[{"number": 0, "name": "x", "uuid": "u", "total": 5, "free": 4, "capability": [9, 0]}]'
    assert read_cards(line) == (Card(0, "x", "u", 5, 4, (9, 0)),)
    assert all(isinstance(card, Card) for card in look())  # none on most machines that run this
