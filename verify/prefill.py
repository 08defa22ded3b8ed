"""Recompute what a trace claims: the one file that loads a model to verify (SPEC 10).

One forward pass over each trace's tokens gives the hidden states that its proofs commit to, the margins of its
sampled tokens and their logprobs. Not here: what a margin or a proof difference means (sampling.py, toploc.py),
or which traces are looked at. What goes wrong here is our fault and raises EngineError: the trace is "not judged".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from protocol.errors import EngineError, UsageError
from verify.model import PolicyModel
from verify.sampling import margins, sample

# Padded tokens of one forward pass, and bytes of logits at once: both bound memory. On a CPU the speed is the same
# from a quarter of these on.
_PASS_TOKENS: Final = {"cpu": 2_048, "cuda": 16_384}
_LOGIT_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
# A prompt shared by several traces is computed once where that saves so many tokens: a group of 8 with a prompt of
# 150 tokens and 40 drawn is then recomputed 2.4 times as fast.
_WORTH_SHARING: Final = 128


@dataclass(frozen=True, slots=True)
class Passage:
    """The part of a trace that a model can recompute.

    tokens: all ids after the prompt. generated: offsets into tokens of those the policy drew, ascending. Ids
    must be below the policy's vocabulary (structure.py checked).
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """One row a generated token, on the CPU: margins and logprobs float32 [n], hidden bfloat16 [n, hidden]."""

    margins: Tensor
    logprobs: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What recomputed: a verdict names it."""

    engine: str
    engine_version: str
    dtype: str
    device: str
    torch_version: str


@dataclass(frozen=True, slots=True)
class _Row:
    """A passage in a forward pass. ids: all it must be fed; the row at each of `wanted` predicts a drawn token."""

    index: int
    ids: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass: rows of similar length, whose first ids may be `shared` and then are fed once."""

    rows: tuple[_Row, ...]
    shared: tuple[int, ...]


class Verifier:
    """A policy in memory, ready to recompute traces that were drawn from it in the same dtype.

    threads: torch's, process-wide; None leaves them as they are. Raises EngineError when the folder is no model.
    """

    def __init__(self, policy: Path, dtype: str = "float32", device: str = "cpu", threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._dtype = dtype
        self._device = check_device(device)
        self._model: PolicyModel | None = self._load(policy)

    @property
    def fingerprint(self) -> Fingerprint:
        device = "cpu" if self._device.type == "cpu" else f"cuda:{torch.cuda.get_device_name(self._device)}"
        return Fingerprint(
            engine="transformers",
            engine_version=transformers.__version__,
            dtype=self._dtype,
            device=device,
            torch_version=str(torch.__version__),
        )

    @property
    def vocabulary(self) -> int:
        return self._ready().vocabulary

    def swap(self, policy: Path) -> None:
        """Verify by another version from now on; in place where it has the same shape."""
        model, self._model = self._ready(), None
        if not model.swap(policy):
            del model  # the old one's memory is needed for the new one
            model = self._load(policy)
        self._model = model

    def _load(self, policy: Path) -> PolicyModel:
        model = PolicyModel(policy, self._dtype, str(self._device))
        model.pack()
        return model

    def recompute(self, passages: Sequence[Passage]) -> list[Recomputed]:
        """In the order given. Any number: memory is bounded by the longest one.

        Raises UsageError for a passage that no model could run (ids out of range, nothing generated, longer than
        the policy's positions), EngineError when logits are not finite or memory runs out.
        """
        model = self._ready()
        for number, passage in enumerate(passages):
            _check(number, passage, model)
        results: dict[int, Recomputed] = {}
        try:
            with torch.inference_mode():
                for group in self._plan(passages):
                    results.update(self._pass(passages, group))
        except torch.OutOfMemoryError as error:
            raise EngineError(f"out of memory on {self._device} while recomputing: not judged") from error
        return [results[number] for number in range(len(passages))]

    def drawn(self, passage: Passage, offsets: Sequence[int]) -> list[int]:
        """The token that the seed draws at each of these generated offsets of a passage, by our own logits.

        For a few: all their logits are held at once. Raises as `recompute` does.
        """
        model = self._ready()
        _check(0, passage, model)
        start = len(passage.prompt)
        positions = [start + offset - 1 for offset in offsets]
        ids = (*passage.prompt, *passage.tokens[: max(offsets)])
        count = len(positions)
        with torch.inference_mode():
            rows = torch.tensor(positions, device=self._device)
            _, logits = model.run(torch.tensor([ids], device=self._device), rows)
            tokens, _ = sample(logits.float(), [passage.seed] * count, positions, [passage.temperature] * count)
        found: list[int] = tokens.tolist()
        return found

    def _plan(self, passages: Sequence[Passage]) -> Iterator[_Pass]:
        budget = _PASS_TOKENS[self._device.type]
        alone: list[_Row] = []
        for prompt, rows in _by_prompt(passages).items():
            start = len(prompt) - 1
            if (len(rows) - 1) * start >= _WORTH_SHARING:
                yield from (_Pass(part, prompt[:start]) for part in _within(budget, rows, start))
            else:
                alone.extend(rows)
        yield from (_Pass(part, ()) for part in _within(budget, alone, 0))

    def _pass(self, passages: Sequence[Passage], work: _Pass) -> dict[int, Recomputed]:
        model = self._ready()
        start = len(work.shared)
        length = max(len(row.ids) for row in work.rows) - start
        padded = [(*row.ids[start:], *(0,) * (length + start - len(row.ids))) for row in work.rows]
        wanted = [r * length + p - start for r, row in enumerate(work.rows) for p in row.wanted]
        past = self._past(work.shared, len(work.rows))
        ids = torch.tensor(padded, device=self._device)
        picked = torch.tensor(wanted, device=self._device)
        plain = model.head_is_plain()
        hidden, logits = model.run(ids, picked, cache=past, head=not plain)
        measured = self._measure(passages, work.rows, hidden, None if plain else logits)
        kept = hidden.to(torch.bfloat16).cpu()
        results, done = {}, 0
        for row in work.rows:
            part = slice(done, done + len(row.wanted))
            results[row.index] = Recomputed(measured[0][part], measured[1][part], kept[part].clone())
            done = part.stop
        return results

    def _past(self, shared: tuple[int, ...], rows: int) -> Any:
        """Keys and values of the shared ids, for each row."""
        if not shared:
            return None
        model = self._ready()
        past = model.new_cache()
        model.run(torch.tensor([shared], device=self._device), None, cache=past, head=False)
        past.batch_repeat_interleave(rows)
        return past

    def _measure(
        self, passages: Sequence[Passage], rows: Sequence[_Row], hidden: Tensor, logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Margins and logprobs [N] on the CPU; logits of a plain head are made a few rows at a time."""
        model = self._ready()
        seeds = [passages[row.index].seed for row in rows for _ in row.wanted]
        temperatures = [passages[row.index].temperature for row in rows for _ in row.wanted]
        positions = [position for row in rows for position in row.wanted]
        tokens = [_token_after(passages[row.index], position) for row in rows for position in row.wanted]
        step = max(16, _LOGIT_BYTES[self._device.type] // (4 * model.vocabulary))
        found = []
        for first in range(0, len(positions), step):
            part = slice(first, first + step)
            block = model.head(hidden[part]) if logits is None else logits[part]
            found.append(margins(block.float(), seeds[part], positions[part], tokens[part], temperatures[part]))
        return torch.cat([each.margins for each in found]).cpu(), torch.cat([each.logprobs for each in found]).cpu()

    def _ready(self) -> PolicyModel:
        if self._model is None:
            raise EngineError("the verifier holds no policy: the last swap failed; start it anew")
        return self._model


def check_device(name: str) -> torch.device:
    """The device called `name`. Raises UsageError when there is none of that name here."""
    kind, _, number = name.partition(":")
    if kind not in _PASS_TOKENS or (number and not number.isdecimal()):
        raise UsageError(f"'{name}' is not a device: use cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name} was asked for, but torch finds {torch.cuda.device_count()} CUDA devices here")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"'{name}' is not a device: its number is too large") from None


def _check(number: int, passage: Passage, model: PolicyModel) -> None:
    every = (*passage.prompt, *passage.tokens)
    if not passage.prompt or not passage.generated:
        raise UsageError(f"passage {number} has no prompt or no generated token: there is nothing to recompute")
    if not 0 <= min(every) <= max(every) < model.vocabulary:
        raise UsageError(f"passage {number} holds token ids outside 0..{model.vocabulary - 1}")
    if len(every) > model.max_positions:
        raise UsageError(f"passage {number} has {len(every)} tokens, the policy {model.max_positions} positions")
    if not 0 <= passage.generated[0] <= passage.generated[-1] < len(passage.tokens):
        raise UsageError(f"passage {number} marks tokens as generated that it does not have")


def _token_after(passage: Passage, position: int) -> int:
    return passage.tokens[position + 1 - len(passage.prompt)]


def _by_prompt(passages: Sequence[Passage]) -> dict[tuple[int, ...], list[_Row]]:
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for index, passage in enumerate(passages):
        start = len(passage.prompt)
        # The last generated token is drawn and predicts nothing.
        fed = (*passage.prompt, *passage.tokens[: passage.generated[-1]])
        wanted = tuple(start + offset - 1 for offset in passage.generated)
        groups.setdefault(passage.prompt, []).append(_Row(index, fed, wanted))
    return groups


def _within(budget: int, rows: Sequence[_Row], shared: int) -> list[tuple[_Row, ...]]:
    """Rows of similar length together, at most `budget` padded tokens a part unless one alone has more."""
    parts: list[list[_Row]] = []
    for row in sorted(rows, key=lambda each: len(each.ids)):
        if parts and (len(parts[-1]) + 1) * (len(row.ids) - shared) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [tuple(part) for part in parts]
