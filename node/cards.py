"""Which GPUs a node takes, how much of them, and how many sequences that has room for.

Everything is decided by pure functions of what `look` reads; `look` asks torch in a process of its own, so that no
CUDA context is left in the node's. The sums are estimates that refuse what cannot be and choose how many sequences
are decoded at once; what really fits, vLLM measures at its start. Not here: starting vLLM (vllm_engine.py).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.errors import EngineError, UsageError
from protocol.outputs import cause

GIB: Final = 1024**3
DTYPES: Final = ("float32", "bfloat16")  # those an auditor has limits for (SPEC 10.6)
MOST_SLOTS: Final = 256  # beyond that a step takes longer than it gains, on the cards that nodes have
EXPECTED_TOKENS: Final = 1_024  # of a sequence, prompt included; where they are longer, vLLM preempts some
LEAST_TOKENS: Final = 2_048  # of the one sequence that must fit at least
WORKSPACE_BYTES: Final = GIB + GIB // 2  # activations, graphs and the CUDA context, roughly
_BFLOAT16_FROM: Final = (8, 0)  # compute capability
_LOOK_SECONDS: Final = 120.0
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}
_MOST_HEADER_BYTES: Final = 100_000_000  # of a safetensors file, as the format's own readers have it


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device. Memory in bytes; `capability` is CUDA's (major, minor)."""

    number: int
    name: str
    uuid: str
    total: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PolicySize:
    """Bytes: of all weights, and of the keys and values of one token, in the dtype computed in."""

    weights: int
    token: int


# --- which ---


def parse_cards(text: str) -> tuple[int, ...]:
    """The numbers in "0" or "0,2". Raises UsageError."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise UsageError(f"--gpu takes the number of a CUDA device, or several as in 0,1, not '{text}'")
    cards = tuple(int(part) for part in parts)
    if len(set(cards)) < len(cards):
        raise UsageError(f"--gpu {text} names a card twice")
    return cards


def visible_devices(cards: Sequence[int], visible: str) -> str:
    """CUDA_VISIBLE_DEVICES for these cards, which are counted among those that were visible (all, where it is
    empty). Raises EngineError."""
    if not visible:
        return ",".join(map(str, cards))
    named = visible.split(",")
    for card in cards:
        if card >= len(named):
            raise EngineError(f"there is no card {card} here: CUDA_VISIBLE_DEVICES={visible} shows {len(named)}")
    return ",".join(named[card] for card in cards)


def chosen(cards: Sequence[int], found: Sequence[Card]) -> tuple[Card, ...]:
    """Raises EngineError naming what is there."""
    by_number = {card.number: card for card in found}
    for card in cards:
        if card not in by_number:
            listed = "; ".join(f"--gpu {each.number}: {each.name}" for each in found) or "torch finds none"
            raise EngineError(f"there is no CUDA device {card} ({listed}): use another, or --cpu")
    return tuple(by_number[card] for card in cards)


def dtype_for(asked: str | None, cards: Sequence[Card]) -> str:
    """float32 on a processor, bfloat16 on cards, or what was asked for. Raises EngineError where a card has it not."""
    dtype = asked or ("bfloat16" if cards else "float32")
    if dtype not in DTYPES:
        raise EngineError(f"'{dtype}' is not a dtype that a trace can be audited in: use one of {', '.join(DTYPES)}")
    for card in cards:
        if dtype == "bfloat16" and card.capability < _BFLOAT16_FROM:
            has = ".".join(map(str, card.capability))
            raise EngineError(
                f"GPU {card.number} ({card.name}, compute capability {has}) has no bfloat16, which takes 8.0: use "
                "--dtype float32, or another card"
            )
    return dtype


# --- how much ---


def share_of(cards: Sequence[Card], gpu_memory: float, most_bytes: int | None) -> float:
    """The share of each card to take: `gpu_memory`, or less, so that no card gives more than `most_bytes`.

    Raises EngineError, with the numbers, where that is not free: something else has it.
    """
    share = gpu_memory
    if most_bytes is not None:
        share = min(share, *(most_bytes / card.total for card in cards))
    for card in cards:
        if card.free < share * card.total:
            # A little less than what is free: the node's own context is not counted yet.
            possible = max(0.0, card.free / GIB - 0.5)
            raise EngineError(
                f"GPU {card.number} ({card.name}) has {_gib(card.free)} of {_gib(card.total)} free, and this node "
                f"would take {_gib(share * card.total)}: another node or program uses it. End that, choose another "
                f"card, or take less: --max-vram {possible:.1f}"
            )
    return share


def slots_for(size: PolicySize, cards: Sequence[Card], share: float, asked: int | None, dtype: str) -> int:
    """How many sequences to decode at once: as asked, or as many as the cards have room for.

    Raises EngineError, with the numbers, where not even one fits.
    """
    # Each card holds a part of every layer; the smallest decides.
    budget = len(cards) * min(int(card.total * share) - WORKSPACE_BYTES for card in cards)
    room = budget - size.weights
    if room < LEAST_TOKENS * size.token:
        smallest = min(cards, key=lambda card: card.total)
        several = f" on each of {len(cards)} cards" if len(cards) > 1 else ""
        needed = size.weights + LEAST_TOKENS * size.token
        raise EngineError(
            f"the policy does not fit GPU {smallest.number} ({smallest.name}): {_gib(size.weights)} of weights as "
            f"{dtype} and {_gib(LEAST_TOKENS * size.token)} for one sequence of {LEAST_TOKENS} tokens are "
            f"{_gib(needed)}, and about {_gib(WORKSPACE_BYTES)}{several} to compute in; this node may take "
            f"{_gib(smallest.total * share)} of its {_gib(smallest.total)} ({share:.0%}). Use --gpu-memory or "
            "--max-vram for more, several cards (--gpu 0,1), or another machine"
        )
    if asked is not None:
        return asked
    return max(1, min(MOST_SLOTS, room // (EXPECTED_TOKENS * size.token)))


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def size_of(policy: Path, dtype: str) -> PolicySize:
    """Of a policy folder. Raises EngineError for one whose files do not say."""
    try:
        config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
        numbers = sum(_numbers_in(path) for path in policy.glob("*.safetensors"))
        return PolicySize(numbers * _ITEM_BYTES[dtype], _token_numbers(config) * _ITEM_BYTES[dtype])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else cause(error)
        raise EngineError(f"the size of the policy in {policy} cannot be told from its files: {why}") from error


def _numbers_in(path: Path) -> int:
    """Numbers in the tensors of a safetensors file: its header alone is read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} has no header of safetensors")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _token_numbers(config: Mapping[str, Any]) -> int:
    """Numbers that attention keeps of one token, over all layers; more than that for models that compress them."""
    fields = config.get("text_config", config)
    heads = int(fields["num_attention_heads"])
    head_size = fields.get("head_dim") or int(fields["hidden_size"]) // heads
    kept = int(fields.get("num_key_value_heads") or heads) * int(head_size)
    return 2 * int(fields["num_hidden_layers"]) * kept


# --- one node a card ---


@contextmanager
def held(cards: Sequence[Card], folder: Path | None = None) -> Iterator[None]:
    """These cards are this process's while the block lasts. Raises EngineError where another node has one."""
    with ExitStack() as files:
        for card in cards:
            path = (folder or Path(tempfile.gettempdir())) / f"rlnode-{card.uuid}.lock"
            try:
                # Another person's file can be opened for reading, and that is enough for a lock.
                descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
            except OSError as error:
                raise EngineError(
                    f"{path}, which tells nodes of each other's cards, cannot be opened: {error}"
                ) from None
            files.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise EngineError(
                    f"GPU {card.number} ({card.name}) is used by another rlnode on this machine: one node a card. Stop "
                    "that one, or choose another card with --gpu"
                ) from None
        yield


# --- asking torch ---


def look() -> tuple[Card, ...]:
    """The cards that CUDA shows here; none where there is no CUDA. Takes seconds. Raises EngineError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "node.cards"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=True,
        )
        return read_cards(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no reason given").splitlines()[-1]
        raise EngineError(f"CUDA cannot be asked for its devices: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"CUDA did not tell its devices within {_LOOK_SECONDS:.0f} s: see nvidia-smi") from error


def read_cards(text: str) -> tuple[Card, ...]:
    """What `python -m node.cards` prints."""
    return tuple(Card(**{**each, "capability": tuple(each["capability"])}) for each in json.loads(text))


def _ask_torch() -> list[dict[str, Any]]:
    import torch

    cards = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        cards.append(
            {
                "number": number,
                "name": properties.name,
                "uuid": str(getattr(properties, "uuid", number)),
                "total": total,
                "free": free,
                "capability": [properties.major, properties.minor],
            }
        )
    return cards


if __name__ == "__main__":
    print(json.dumps(_ask_torch()))
