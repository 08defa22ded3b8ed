"""Keys and values of the open sequences, one slot a sequence, for every layer of any attention model.

A token at position p lies in column p of its sequence's slot, so sequences of any length sit side by side without
holes: joining writes to a free slot, leaving frees it, and nobody else's columns move. Memory is slots × the
longest open sequence; it grows by copying and shrinks again. Not here: which sequence has which slot, and masks
(transformers_engine.py, verify/model.py).
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from transformers.cache_utils import Cache

_BLOCK: Final = 64  # columns are added in multiples of this
_SPARE: Final = 4  # memory is given back when this many times what is needed


class SlotCache(Cache):
    """Aim it with `aim`, then hand it to one forward pass. Storage is [slots, columns, heads, head size] a layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._size = (0, 0)  # slots, columns
        self._where: tuple[Tensor, Tensor] | None = None
        self._slots: slice | Tensor = slice(0)
        self._width = 0

    @property
    def layer_count(self) -> int:
        return len(self._keys)

    @property
    def bytes_held(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def aim(self, slots: Tensor, columns: Tensor, width: int, *, first: int = 0, fresh: bool = False) -> None:
        """The next forward pass writes row b's tokens to columns[b] of slots[b], and reads `width` columns.

        first: the slots are exactly 0..first-1, which saves copying. fresh: the rows have no past, so each reads
        only what it brings along.
        """
        self._where = (slots[:, None], columns)
        self._slots = slice(first) if first else slots
        self._width = 0 if fresh else width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' hook: takes [rows, heads, tokens, size], returns what to attend to in the same form."""
        if layer_idx == len(self._keys):
            for store, states in ((self._keys, key_states), (self._values, value_states)):
                store.append(states.new_zeros((*self._size, states.shape[1], states.shape[3])))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert self._where is not None, "aim before the forward pass"
        keys[self._where] = key_states.transpose(1, 2)
        values[self._where] = value_states.transpose(1, 2)
        if not self._width:
            return key_states, value_states
        window = (self._slots, slice(self._width))
        return keys[window].transpose(1, 2), values[window].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers asks where unmasked queries begin; only rows without a past go unmasked."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def fit(self, slots: int, columns: int) -> None:
        """Make room for so many slots and columns, or give most of it back. Keeps what lies in both sizes."""
        held_slots, held_columns = self._size
        wasteful = held_columns > max(_BLOCK, _SPARE * columns)
        if slots <= held_slots and columns <= held_columns and not wasteful:
            return
        if columns > held_columns or wasteful:
            columns = -(-(columns + columns // 4) // _BLOCK) * _BLOCK
        else:
            columns = held_columns
        size = (held_slots if slots <= held_slots else max(slots, held_slots * 3 // 2), columns)
        keep = (slice(min(held_slots, size[0])), slice(min(held_columns, size[1])))
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                store[layer] = old.new_zeros((*size, *old.shape[2:]))
                store[layer][keep] = old[keep]
        self._size = size

    def swap(self, a: int, b: int, columns: int) -> None:
        """Exchange two slots' first columns."""
        for tensor in (*self._keys, *self._values):
            tensor[[a, b], :columns] = tensor[[b, a], :columns]

    def copy(self, source: int, targets: list[int], columns: int) -> None:
        for tensor in (*self._keys, *self._values):
            tensor[targets, :columns] = tensor[source, :columns]

    def clear(self) -> None:
        """Give all memory back; every slot's content is lost."""
        self._keys.clear()
        self._values.clear()
        self._size = (0, 0)
