"""The Engine over transformers, on a CPU or one CUDA device: batched decoding of sequences of any length.

One cache, one slot a sequence (slot_cache.py): newcomers and answered sequences are prefilled together, everyone
else decodes as one batch, and who leaves makes room at once. What a sequence draws does not depend on its company
beyond floating-point noise. Not here: which tokens the noise picks (verify/sampling.py), the bytes of a proof
(verify/toploc.py), several devices (vLLM's work).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Final

import torch
import transformers
from torch import Tensor

from node.engine import OutOfMemory, SequenceRequest, TurnDone, Usage
from node.slot_cache import SlotCache
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EngineError
from protocol.limits import PROOF_CHUNK_TOKENS
from protocol.trace import EngineDescriptor
from verify.model import PolicyModel
from verify.sampling import sample
from verify.toploc import build_many, build_proofs

# A prefill holds up everybody else, so it waits until there is one newcomer to so many decoding sequences,
# but never longer than so many steps.
_DECODING_PER_NEWCOMER: Final = 8
_PATIENCE_STEPS: Final = 8
_PREFILL_TOKENS: Final = {"cpu": 2_048, "cuda": 16_384}  # padded tokens of one forward pass: bounds its memory


class _State(Enum):
    PREFILL = auto()  # has ids that the cache lacks, more than one
    DECODING = auto()  # the cache lacks its last id only
    OVER = auto()  # its turn is over; the environment or the worker has the word


@dataclass(slots=True, eq=False)
class _Sequence:
    """One open sequence. `ids`: prompt, drawn and observed tokens; `cached`: how many of them are in the slot."""

    key: str
    seed: int
    temperature: float
    ids: list[int]
    lane: int  # row of the hidden states' buffer
    turn_start: int  # index in ids of this turn's first drawn token
    turn_end: int  # ids are this many when the turn is full
    since: int  # step at which it began to wait for its prefill
    asked: float  # when that was, by the monotonic clock
    state: _State = _State.PREFILL
    cached: int = 0
    drawn: int = 0  # generated tokens of all turns
    logprobs: list[float] = field(default_factory=list)  # of this turn
    queued: float = 0.0  # seconds of this turn
    prefill: float = 0.0
    proofs: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Batch:
    """The decoding sequences in slot order, as the model wants them; kept from step to step."""

    sequences: list[_Sequence]
    seeds: list[int]
    temperatures: list[float]
    positions: list[int]  # of the input tokens
    inputs: Tensor  # [B, 1] ids
    columns: Tensor  # [B, 1] positions
    slots: Tensor  # [B]
    lanes: Tensor  # [B]
    fill: Tensor  # [B] rows of each sequence's open chunk
    width: int  # columns that the longest of them needs


class TransformersEngine:
    """Implements Engine. Not thread-safe: one worker owns it.

    dtype: default float32 on a CPU (bfloat16 is slower there), bfloat16 on CUDA. threads: torch's, process-wide.
    """

    def __init__(
        self, *, device: str = "cpu", dtype: str | None = None, slots: int = 16, threads: int | None = None
    ) -> None:
        if slots < 1:
            raise EngineError(f"an engine needs at least one slot, not {slots}")
        if device != "cpu" and not torch.cuda.is_available():
            raise EngineError(f"device {device} was asked for, but torch finds no CUDA device: use the CPU")
        if threads is not None:
            torch.set_num_threads(threads)
        self.slots = slots
        self.loaded_root: bytes | None = None
        self._device = torch.device(device)
        self._dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        self._model: PolicyModel | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._cache = SlotCache()
        self._open: dict[str, _Sequence] = {}
        self._queue: deque[_Sequence] = deque()
        self._seats: list[_Sequence | None] = [None] * slots
        self._batch: _Batch | None = None
        self._tails = _ProofTails()
        self._steps = 0

    # --- what the worker asks ---

    @property
    def longest(self) -> int | None:
        return None

    def usage(self) -> Usage:
        seated = sum(1 for seat in self._seats if seat and seat.state is not _State.OVER)
        return Usage(drawing=seated, waiting=len(self._queue))

    def descriptor(self) -> EngineDescriptor:
        device = "cpu" if self._device.type == "cpu" else f"cuda:{torch.cuda.get_device_name(self._device)}"
        return EngineDescriptor(
            name="transformers",
            version=transformers.__version__[:64],
            dtype=self._dtype,
            device=device[:64],
            runner="reference",
        )

    def load(self, policy: Path, root: bytes) -> None:
        if self._open:
            raise EngineError(f"a policy cannot be loaded while {len(self._open)} sequences are open: close them first")
        stop_ids = PolicyTokenizer.load(policy).stop_ids
        previous, self.loaded_root = self.loaded_root, None
        self._cache.clear()  # keys and values of the policy before
        if self._model is None or previous is None or not self._model.swap(policy):
            self._model = None  # the old one's memory is needed for the new one
            self._model = PolicyModel(policy, self._dtype, str(self._device))
            check_cached_decoding(self._model)
        self._model.spot_check(policy)
        self._stop_ids = stop_ids
        self.loaded_root = root

    def open(self, request: SequenceRequest) -> None:
        model = self._ready()
        if request.key in self._open:
            raise EngineError(f"sequence {request.key!r} is open already")
        _check_ids("the prompt", request.prompt, model)
        if not 0 < request.temperature < math.inf or not 0 <= request.seed < 2**64:
            raise EngineError(
                f"temperature {request.temperature} or seed {request.seed} cannot be sampled with: a positive number "
                "and an unsigned 64-bit one are needed"
            )
        start = len(request.prompt)
        self._check_room(start, request.max_new_tokens)
        sequence = _Sequence(
            key=request.key,
            seed=request.seed,
            temperature=request.temperature,
            ids=list(request.prompt),
            lane=self._tails.take(model.hidden_size, self._device),
            turn_start=start,
            turn_end=start + request.max_new_tokens,
            since=self._steps,
            asked=time.monotonic(),
        )
        self._open[request.key] = sequence
        self._queue.append(sequence)

    def step(self) -> tuple[TurnDone, ...]:
        with torch.inference_mode():
            self._steps += 1
            self._seat_the_queue()
            try:
                waiting = self._due_for_prefill()
                return self._prefill(waiting) if waiting else self._decode()
            except torch.OutOfMemoryError as error:
                self._make_room(error)
                return ()

    def extend(self, key: str, observed: tuple[int, ...], max_new_tokens: int) -> None:
        sequence = self._turn_over(key)
        _check_ids("the observation", observed, self._ready())
        start = len(sequence.ids) + len(observed)
        self._check_room(start, max_new_tokens)
        sequence.ids.extend(observed)
        sequence.turn_start, sequence.turn_end = start, start + max_new_tokens
        sequence.logprobs, sequence.queued, sequence.prefill = [], 0.0, 0.0
        sequence.state, sequence.since, sequence.asked = _State.PREFILL, self._steps, time.monotonic()
        if sequence not in self._seats:
            self._queue.append(sequence)

    def finish(self, key: str) -> tuple[bytes, ...]:
        sequence = self._turn_over(key)
        tail = self._tails.rows(sequence.lane, sequence.drawn % PROOF_CHUNK_TOKENS)
        proofs = (*sequence.proofs, *(build_proofs(tail) if len(tail) else ()))
        self.abort(key)
        return proofs

    def abort(self, key: str) -> None:
        sequence = self._known(key)
        del self._open[key]
        self._tails.give_back(sequence.lane)
        if sequence in self._seats:
            self._seats[self._seats.index(sequence)] = None
        elif sequence in self._queue:
            self._queue.remove(sequence)
        if sequence.state is _State.DECODING:
            self._batch = None

    def sleep(self) -> None:
        self._cache.clear()
        self._batch = None
        self._move("cpu")

    def wake(self) -> None:
        try:
            self._move(str(self._device))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"there is no room on {self._device} for the policy any more: {error}") from error

    def _move(self, device: str) -> None:
        """On a processor there is nothing to move."""
        if self._model is not None and self._device.type != "cpu":
            self._model.move(device)
            torch.cuda.empty_cache()

    def close(self) -> None:
        for key in list(self._open):
            self.abort(key)
        self._cache.clear()
        self._model, self._batch, self.loaded_root = None, None, None

    # --- seats and turns ---

    def _seat_the_queue(self) -> None:
        while self._queue and (seat := self._seat_to_give()) is not None:
            self._seats[seat] = self._queue.popleft()

    def _seat_to_give(self) -> int | None:
        """A free one, else that of a sequence whose environment has the word: it is prefilled again when it comes
        back, which costs less than a slot that decodes nothing."""
        if None in self._seats:
            return self._seats.index(None)
        over = [(seated.cached, i) for i, seated in enumerate(self._seats) if seated and seated.state is _State.OVER]
        if not over:
            return None
        seat = min(over)[1]  # the shortest: the least to compute again
        left = self._seats[seat]
        assert left is not None
        left.cached = 0
        return seat

    def _due_for_prefill(self) -> list[_Sequence]:
        waiting = [seated for seated in self._seats if seated and seated.state is _State.PREFILL]
        if not waiting:
            return []
        decoding = len(self._batch.sequences) if self._batch else self._count(_State.DECODING)
        patient = self._steps - min(sequence.since for sequence in waiting) <= _PATIENCE_STEPS
        if patient and len(waiting) * _DECODING_PER_NEWCOMER < decoding:
            return []
        return waiting

    def _count(self, state: _State) -> int:
        return sum(1 for seated in self._seats if seated and seated.state is state)

    def _decoding_to_the_front(self) -> list[_Sequence]:
        """Move slots so that the decoding sequences have the first ones: then no step copies the cache."""
        count = self._count(_State.DECODING)
        behind = [i for i, s in enumerate(self._seats) if i >= count and s and s.state is _State.DECODING]
        vacant = [i for i, s in enumerate(self._seats[:count]) if not (s and s.state is _State.DECODING)]
        for a, b in zip(behind, vacant, strict=True):
            self._cache.swap(a, b, self._longest())
            self._seats[a], self._seats[b] = self._seats[b], self._seats[a]
        return [seated for seated in self._seats[:count] if seated]

    def _longest(self) -> int:
        return max((len(seated.ids) for seated in self._seats if seated), default=0)

    # --- forward passes ---

    def _decode(self) -> tuple[TurnDone, ...]:
        model = self._ready()
        batch = self._batch
        if batch is None:
            sequences = self._decoding_to_the_front()
            if not sequences:
                return ()
            batch = self._batch = _batch_of(sequences, self._device)
        self._cache.fit(len(batch.sequences), max(batch.width, self._longest()))
        self._cache.aim(batch.slots, batch.columns, batch.width, first=len(batch.sequences))
        mask = model.causal_mask(batch.columns, batch.width)
        hidden, logits = model.run(batch.inputs, None, batch.columns, mask, self._cache)
        tokens, logprobs = sample(logits, batch.seeds, batch.positions, batch.temperatures)
        self._tails.write(batch.lanes, batch.fill, hidden)
        batch.inputs = tokens[:, None]
        batch.columns = batch.columns + 1
        batch.positions = [position + 1 for position in batch.positions]
        batch.fill = (batch.fill + 1) % PROOF_CHUNK_TOKENS
        batch.width += 1
        done = self._record(batch.sequences, tokens.tolist(), logprobs.tolist())
        if done:
            self._batch = None
        return done

    def _prefill(self, waiting: Sequence[_Sequence]) -> tuple[TurnDone, ...]:
        done: list[TurnDone] = []
        budget = _PREFILL_TOKENS[self._device.type]
        newcomers = [sequence for sequence in waiting if not sequence.cached]
        answered = [sequence for sequence in waiting if sequence.cached]
        for part in _parts_within(budget, newcomers):
            done.extend(self._prefill_part(part, fresh=True))
        for part in _parts_within(budget, answered):
            done.extend(self._prefill_part(part, fresh=False))
        return tuple(done)

    def _prefill_part(self, part: Sequence[_Sequence], *, fresh: bool) -> tuple[TurnDone, ...]:
        """All `fresh` (no past) or none. Sequences of a group share their prompt: it is computed once."""
        model = self._ready()
        began = time.monotonic()
        leader_of: dict[tuple[int, ...], int] = {}
        if fresh:
            row_of = [leader_of.setdefault(tuple(sequence.ids), len(leader_of)) for sequence in part]
            leaders = [part[row_of.index(row)] for row in range(len(leader_of))]
        else:
            row_of, leaders = list(range(len(part))), list(part)
        ids, columns, last = _right_padded(leaders, self._device)
        width = int(columns[:, -1].max()) + 1
        seat = {id(seated): index for index, seated in enumerate(self._seats) if seated}
        self._cache.fit(max(seat.values()) + 1, max(width, self._longest()))
        slots = torch.tensor([seat[id(leader)] for leader in leaders], device=self._device)
        self._cache.aim(slots, columns, width, fresh=fresh)
        mask = None if fresh else model.causal_mask(columns, width)
        # Padding may lie beyond the last position that the model knows; what it computes is never read.
        positions = columns.clamp(max=model.max_positions - 1)
        hidden, logits = model.run(ids, last, positions, mask, self._cache)
        for row, leader in enumerate(leaders):
            followers = [seat[id(s)] for s, r in zip(part, row_of, strict=True) if r == row and s is not leader]
            if followers:
                self._cache.copy(seat[id(leader)], followers, len(leader.ids))
        return self._draw_first(part, hidden[row_of], logits[row_of], began)

    def _draw_first(
        self, part: Sequence[_Sequence], hidden: Tensor, logits: Tensor, began: float
    ) -> tuple[TurnDone, ...]:
        """`began`: when their prefill did, by the monotonic clock."""
        positions = [len(sequence.ids) - 1 for sequence in part]
        tokens, logprobs = sample(logits, [s.seed for s in part], positions, [s.temperature for s in part])
        lanes = torch.tensor([s.lane for s in part], device=self._device)
        fill = torch.tensor([s.drawn % PROOF_CHUNK_TOKENS for s in part], device=self._device)
        self._tails.write(lanes, fill, hidden)
        ids, values = tokens.tolist(), logprobs.tolist()
        now = time.monotonic()  # after these were read, which waits for the device
        for sequence in part:
            sequence.state = _State.DECODING
            sequence.queued += began - sequence.asked
            sequence.prefill += now - began
        self._batch = None
        return self._record(part, ids, values)

    def _record(self, sequences: Sequence[_Sequence], tokens: list[int], logprobs: list[float]) -> tuple[TurnDone, ...]:
        """Append what was drawn; prove chunks that are full; end the turns that are over."""
        done: list[TurnDone] = []
        full: list[_Sequence] = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.drawn += 1
            if sequence.drawn % PROOF_CHUNK_TOKENS == 0:
                full.append(sequence)
            # SPEC 10: the first stop token is the last token of a turn; without one the turn is exactly full.
            if token in self._stop_ids or len(sequence.ids) == sequence.turn_end:
                sequence.state = _State.OVER
                sequence.cached = len(sequence.ids) - 1
                drawn = tuple(sequence.ids[sequence.turn_start :])
                stopped = token in self._stop_ids
                done.append(
                    TurnDone(sequence.key, drawn, tuple(sequence.logprobs), stopped, sequence.queued, sequence.prefill)
                )
        if full:
            chunks = build_many([self._tails.rows(s.lane, PROOF_CHUNK_TOKENS) for s in full])
            for sequence, proofs in zip(full, chunks, strict=True):
                sequence.proofs.extend(proofs)
        return tuple(done)

    def _make_room(self, error: torch.OutOfMemoryError) -> None:
        """Decode fewer at once from now on. Who loses the seat keeps what it drew and is prefilled again later."""
        seated = [sequence for sequence in self._seats if sequence]
        if len(seated) <= 1:
            tokens = self._longest()
            raise EngineError(
                f"out of memory on {self._device} with one sequence of {tokens} tokens: use a smaller policy, "
                "shorter leases or another device"
            ) from error
        self.slots = len(seated) // 2
        self._cache.clear()
        self._batch = None
        for sequence in seated:
            sequence.cached = 0
            if sequence.state is _State.DECODING:
                sequence.state, sequence.since, sequence.asked = _State.PREFILL, self._steps, time.monotonic()
        seated.sort(key=lambda sequence: sequence.state is _State.OVER)
        self._queue.extendleft(each for each in reversed(seated[self.slots :]) if each.state is not _State.OVER)
        self._seats = list(seated[: self.slots])
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # --- refusals ---

    def _ready(self) -> PolicyModel:
        if self._model is None or self.loaded_root is None:
            raise EngineError("the engine holds no policy: load one first")
        return self._model

    def _known(self, key: str) -> _Sequence:
        if key not in self._open:
            raise EngineError(f"no sequence {key!r} is open")
        return self._open[key]

    def _turn_over(self, key: str) -> _Sequence:
        sequence = self._known(key)
        if sequence.state is not _State.OVER:
            raise EngineError(f"sequence {key!r} is in the middle of a turn: step until a TurnDone names it")
        return sequence

    def _check_room(self, start: int, max_new_tokens: int) -> None:
        limit = self._ready().max_positions
        if max_new_tokens < 1:
            raise EngineError(f"a turn has at least one token, not {max_new_tokens}")
        if start + max_new_tokens > limit:
            raise EngineError(
                f"{start} tokens and {max_new_tokens} new ones are more than the {limit} positions of this policy"
            )


class _ProofTails:
    """Hidden states, in bfloat16, of each sequence's chunk that is not full yet: one lane a sequence."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)
        self._free: list[int] = []

    def take(self, hidden_size: int, device: torch.device) -> int:
        if self._rows.ndim != 3 or self._rows.shape[2] != hidden_size:
            # Only an engine without open sequences changes its policy, so no lane is in use.
            self._rows, self._free = torch.empty(0, PROOF_CHUNK_TOKENS, hidden_size), []
        if not self._free:
            held = len(self._rows)
            grown = torch.empty(max(16, 2 * held), PROOF_CHUNK_TOKENS, hidden_size, dtype=torch.bfloat16, device=device)
            grown[:held] = self._rows
            self._rows = grown
            self._free = list(range(len(grown) - 1, held - 1, -1))
        return self._free.pop()

    def give_back(self, lane: int) -> None:
        self._free.append(lane)

    def write(self, lanes: Tensor, fill: Tensor, hidden: Tensor) -> None:
        self._rows[lanes, fill] = hidden.to(torch.bfloat16)

    def rows(self, lane: int, count: int) -> Tensor:
        return self._rows[lane, :count]


def _batch_of(sequences: list[_Sequence], device: torch.device) -> _Batch:
    positions = [len(sequence.ids) - 1 for sequence in sequences]
    return _Batch(
        sequences=sequences,
        seeds=[sequence.seed for sequence in sequences],
        temperatures=[sequence.temperature for sequence in sequences],
        positions=positions,
        inputs=torch.tensor([[sequence.ids[-1]] for sequence in sequences], device=device),
        columns=torch.tensor(positions, device=device)[:, None],
        slots=torch.arange(len(sequences), device=device),
        lanes=torch.tensor([sequence.lane for sequence in sequences], device=device),
        fill=torch.tensor([sequence.drawn % PROOF_CHUNK_TOKENS for sequence in sequences], device=device),
        width=max(positions) + 1,
    )


def _parts_within(budget: int, sequences: Iterable[_Sequence]) -> list[list[_Sequence]]:
    """Sequences of similar length together, at most `budget` padded tokens a part unless one alone has more."""
    parts: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=lambda each: len(each.ids) - each.cached):
        length = len(sequence.ids) - sequence.cached
        if parts and (len(parts[-1]) + 1) * length <= budget:
            parts[-1].append(sequence)
        else:
            parts.append([sequence])
    return parts


def _right_padded(sequences: Sequence[_Sequence], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, L] that the cache lacks, their columns [B, L], and the flat index of each row's last real one."""
    news = [sequence.ids[sequence.cached :] for sequence in sequences]
    length = max(map(len, news))
    ids = torch.tensor([new + [0] * (length - len(new)) for new in news], device=device)
    starts = torch.tensor([sequence.cached for sequence in sequences], device=device)
    columns = starts[:, None] + torch.arange(length, device=device)
    last = torch.tensor([row * length + len(new) - 1 for row, new in enumerate(news)], device=device)
    return ids, columns, last


def _check_ids(what: str, ids: tuple[int, ...], model: PolicyModel) -> None:
    if not ids:
        raise EngineError(f"{what} is empty: the model needs at least one token to go on from")
    if not 0 <= min(ids) <= max(ids) < model.vocabulary:
        raise EngineError(
            f"{what} holds token ids outside 0..{model.vocabulary - 1}: it is not of this policy's tokenizer"
        )


# Relative error of hidden states that batching and caching may cause, by dtype; a mistake in masks or positions
# is of order 1.
_SAME: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def check_cached_decoding(model: PolicyModel) -> None:
    """EngineError unless prefill, extension and decoding of two rows of unequal length give the hidden states of
    a plain forward pass: an architecture whose cache works in another way is refused before it lies."""
    try:
        error = _cached_decoding_error(model)
    except EngineError:
        raise
    except Exception as failure:  # whatever a model does with a cache that is not of its kind
        raise EngineError(f"this engine cannot decode this model ({failure!r}): use vLLM for this policy") from failure
    if not error < _SAME[model.dtype]:
        raise EngineError(
            f"cached decoding of this model differs from a plain forward pass by {error:.1%}: this engine does "
            "not know how its cache works; use vLLM for this policy"
        )


@torch.inference_mode()
def _cached_decoding_error(model: PolicyModel) -> float:
    """Relative error of the hidden states."""
    device = model.device
    whole = torch.arange(1, 25, device=device).view(2, 12) * 7 % model.vocabulary
    cache = SlotCache()
    cache.fit(2, 12)
    slots = torch.arange(2, device=device)
    starts = torch.tensor([[0], [0]], device=device)
    found: list[Tensor] = []
    # Rows have 3 and 5 tokens of past, then 4 more at once, then one.
    for length, lead in ((5, 3), (4, 4), (1, 1)):
        columns = starts + torch.arange(length, device=device)
        fresh = not found
        cache.aim(slots, columns, 12, first=0 if length > 1 else 2, fresh=fresh)
        mask = None if fresh else model.causal_mask(columns, 12)
        last = torch.tensor([lead - 1, 2 * length - 1], device=device)
        found.append(model.run(whole.gather(1, columns), last, columns, mask, cache)[0])
        starts = starts + torch.tensor([[lead], [length]], device=device)
    if not cache.layer_count:
        raise EngineError("this model keeps no keys and values that can be batched: use vLLM for this policy")
    plain, _ = model.run(whole, None)
    wanted = plain[torch.tensor([2, 16, 6, 20, 7, 21], device=device)]
    return float((torch.cat(found) - wanted).float().norm() / wanted.float().norm())
