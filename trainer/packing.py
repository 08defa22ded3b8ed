"""How completions share forward passes: several in one row of ids, a group's prompt once. Pure.

    row:        prompt of group 1 · completion · completion · completion | prompt of group 2 · completion · …
    positions:  0 … 11              12 … 20      12 … 31      12 … 18      0 … 8               9 …
    sees:       the prompt of its group, and itself up to here

A group's completions begin with the same prompt, so it is computed once in a row: of a group of 8 with a prompt of 30
tokens and 25 after it, half the tokens are left. Attention is masked so that each completion sees what it would alone,
and logprobs and gradients are the same up to rounding. A row is bounded, since the cost of attention in it grows with
its square. Not here: which completions there are (batch.py), the forward pass (learner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batch import Completion

# Longest row of several completions. Longer ones save prompts but pay for masked attention.
ROW_TOKENS: Final = 1024
_PROMPT: Final = -1  # the segment of a prompt, and of padding


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One forward pass over some completions; B rows of at most L ids, padded on the right.

    ids, positions [B, L] int64. family and segment [B, L] int64: the group and the completion within the row that an
    id belongs to; segment −1 is what all of its family see. rows [N]: flat indices into B·L, the row that predicts each
    drawn token of `members`, one completion after the other; tokens [N]: these tokens.
    """

    members: tuple[int, ...]  # indices into the completions planned for
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    family: NDArray[np.int64]
    segment: NDArray[np.int64]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def plain(self) -> bool:
        """One completion a row, or none: plain causal attention is right, and no mask is needed."""
        return len(self.members) <= len(self.ids)


def idle() -> Pack:
    """A pass over no completion and one token, for a process that takes part in the passes of others."""
    one = np.zeros((1, 1), dtype=np.int64)
    return Pack((), ids=one, positions=one, family=one, segment=one, rows=one[0], tokens=one[0])


def seen(pack: Pack, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which keys each query sees, bool, and how many positions behind it they are, int32; both [B, L, L]."""
    positions, family, segment = (
        torch.from_numpy(each).to(device, torch.int32) for each in (pack.positions, pack.family, pack.segment)
    )
    behind = positions[:, :, None] - positions[:, None, :]
    key = segment[:, None, :]
    own = (key == segment[:, :, None]) | (key == _PROMPT)
    return (family[:, :, None] == family[:, None, :]) & own & (behind >= 0), behind


def plan(completions: Sequence[Completion], most_tokens: int, *, share: bool = True) -> tuple[Pack, ...]:
    """Passes of at most `most_tokens` ids with padding, or as many as the longest completion. Every completion is in
    one pass. Without `share` each has a row of its own, for models that take no mask."""
    if share:
        most = min(most_tokens, max(ROW_TOKENS, max((_fed(each) for each in completions), default=0)))
        families = [part for group in _groups(completions) for part in _split(completions, group, most)]
        rows = _filled(completions, families)
    else:
        rows = [[[index]] for index in range(len(completions))]
    lengths = [sum(_length(completions, family) for family in row) for row in rows]
    return tuple(_pack(completions, [rows[i] for i in part]) for part in micro_batches(lengths, most_tokens))


def micro_batches(lengths: Sequence[int], most_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Indices put together so that each part's padded size (longest × count) is at most `most_tokens`; a row longer
    than that is a part of its own. Sorted by length, so that little is padding."""
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: lengths[each], reverse=True):
        # The first of a part is its longest.
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= most_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return tuple(tuple(part) for part in parts)


def padded(rows: Sequence[NDArray[Any]], value: int = 0) -> NDArray[np.int64]:
    """[B, longest], `value` on the right: attention is causal, so nothing before them sees them."""
    table = np.full((len(rows), max(len(row) for row in rows)), value, dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table


def _fed(completion: Completion) -> int:
    """Ids of a completion that a forward pass is fed: its last drawn token predicts nothing that is asked for."""
    return int(completion.generated[-1])


def _tail(completion: Completion) -> int:
    return _fed(completion) - completion.prompt


def _length(completions: Sequence[Completion], family: Sequence[int]) -> int:
    return completions[family[0]].prompt + sum(_tail(completions[index]) for index in family)


def _groups(completions: Sequence[Completion]) -> list[list[int]]:
    groups: dict[bytes, list[int]] = {}
    for index, completion in enumerate(completions):
        groups.setdefault(completion.group_id, []).append(index)
    return list(groups.values())


def _split(completions: Sequence[Completion], group: Sequence[int], most: int) -> list[list[int]]:
    """Families of one group, each with its prompt, of at most `most` ids."""
    families: list[list[int]] = []
    room = 0
    for index in group:
        tail = _tail(completions[index])
        if families and tail <= room:
            families[-1].append(index)
        else:
            families.append([index])
            room = most - completions[index].prompt
        room -= tail
    return families


def _filled(completions: Sequence[Completion], families: Sequence[list[int]]) -> list[list[list[int]]]:
    """Rows of families, none longer than the longest family: first fit, longest first."""
    lengths = [_length(completions, family) for family in families]
    order = sorted(range(len(families)), key=lambda each: lengths[each], reverse=True)
    rows: list[list[list[int]]] = []
    rooms: list[int] = []
    for each in order:
        place = next((row for row, room in enumerate(rooms) if room >= lengths[each]), None)
        if place is None:
            rows.append([families[each]])
            rooms.append(lengths[order[0]] - lengths[each])
        else:
            rows[place].append(families[each])
            rooms[place] -= lengths[each]
    return rows


@dataclass(slots=True)
class _Row:
    """A row being filled; `at` its place in the pass."""

    at: int
    ids: list[NDArray[np.int64]]
    positions: list[NDArray[np.int64]]
    family: list[NDArray[np.int64]]
    segment: list[NDArray[np.int64]]
    length: int = 0

    def add(self, ids: NDArray[np.int64], first: int, family: int, segment: int) -> int:
        """Append ids whose first has position `first`; where they begin."""
        begin, count = self.length, len(ids)
        self.ids.append(ids)
        self.positions.append(np.arange(first, first + count))
        self.family.append(np.full(count, family))
        self.segment.append(np.full(count, segment))
        self.length += count
        return begin


def _pack(completions: Sequence[Completion], rows: Sequence[list[list[int]]]) -> Pack:
    laid = [_Row(at, [], [], [], []) for at in range(len(rows))]
    width = max(sum(_length(completions, family) for family in row) for row in rows)
    members: list[int] = []
    predicts: list[NDArray[np.int64]] = []
    for row, families in zip(laid, rows, strict=True):
        for number, family in enumerate(families):
            start = completions[family[0]].prompt
            shared = row.add(completions[family[0]].ids[:start], 0, number, _PROMPT)
            for segment, index in enumerate(family):
                each = completions[index]
                tail = row.add(each.ids[start : _fed(each)], start, number, segment)
                before = each.generated - 1  # where in the completion each drawn token is predicted
                place = np.where(before < start, shared + before, tail + before - start)
                members.append(index)
                predicts.append(row.at * width + place)
    return Pack(
        members=tuple(members),
        ids=padded([np.concatenate(row.ids) for row in laid]),
        positions=padded([np.concatenate(row.positions) for row in laid]),
        family=padded([np.concatenate(row.family) for row in laid], -1),
        segment=padded([np.concatenate(row.segment) for row in laid], _PROMPT),
        rows=np.concatenate(predicts),
        tokens=np.concatenate([completions[index].ids[completions[index].generated] for index in members]),
    )
