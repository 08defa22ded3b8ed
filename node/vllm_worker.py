"""What runs inside vLLM's workers: draws the seeded tokens, keeps the rows they came from, proves them, swaps weights.

vLLM loads this file by name into the process that holds the model, so that hidden states never leave it: proofs
and logprobs do. The rows are read between the forward pass and the sampler, where they lie ready whatever was
compiled or captured before. Not here: requests and turns (vllm_engine.py), the bytes of a proof (verify/toploc.py),
which token the noise picks (verify/sampling.py).

Both model runners of vLLM 0.32 are known: V1, and V2, whose own seeded sampler is ours. What is read of their
insides is in `_rows_of_v1` and `_rows_of_v2` and nowhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from node.vllm_engine import NODE_PID
from protocol.errors import EngineError
from protocol.limits import PROOF_CHUNK_TOKENS
from verify.sampling import sample
from verify.toploc import bits_of, build_many

Bits = NDArray[np.uint16]

TAG: Final = "rlcommons"  # of extra_args: what a request is of, as `Tag`
V2_MODULE: Final = "vllm.v1.worker.gpu.model_runner"


class Tag(NamedTuple):
    """A request's turn of a sequence. `start`: position of the input token that its first token is drawn from."""

    key: str
    turn: int
    start: int
    seed: int
    temperature: float


class Row(NamedTuple):
    """A line of this step's batch that a token is drawn from."""

    line: int
    tag: Tag
    position: int


# --- drawing, where vLLM's own sampler draws other tokens (V1) ---


class SeededDraw(LogitsProcessor):  # type: ignore[misc]
    """Leaves vLLM's greedy sampler no choice: the token of SPEC 10.3 gets an infinite logit.

    Which rows to draw, the extension says before every step; rows it does not name are left alone.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: Sequence[Row] = ()
        self.logprobs: Tensor | None = None  # of the last draw, in the order of `rows`

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        return

    def apply(self, logits: Tensor) -> Tensor:
        self.logprobs = None
        if not self.rows:
            return logits
        index = torch.tensor([row.line for row in self.rows], device=logits.device)
        chosen = logits if len(self.rows) == len(logits) else logits[index]
        tokens, self.logprobs = sample(
            chosen,
            [row.tag.seed for row in self.rows],
            [row.position for row in self.rows],
            [row.tag.temperature for row in self.rows],
        )
        logits[index, tokens.to(logits.device)] = torch.inf
        return logits


# --- rows and proofs ---


@dataclass(slots=True)
class _Kept:
    """The rows of a sequence that are not proved yet, in bfloat16 bits.

    A chunk is proved when the row after it comes: until then its last row may be drawn again (a preempted
    request) or turn out to be of a token that was never kept (vLLM runs ahead of a stop token by one step).
    """

    tail: Bits  # [PROOF_CHUNK_TOKENS, hidden]
    fill: int = 0
    proofs: list[bytes] = field(default_factory=list)
    turn: int = -1
    is_over: bool = False
    logprobs: list[float] = field(default_factory=list)  # of this turn
    count: int = 0  # rows of this turn
    first: float = 0.0  # when its first row was filed, by the monotonic clock: to within a step
    fault: str = ""


class RowStore:
    """Rows by sequence. What does not fit is a fault of its sequence, which then has no proofs: none is made up."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, rows: Sequence[Row], bits: Bits, logprobs: Sequence[float] | None) -> None:
        """bits [rows, hidden]; logprobs as many, or None where vLLM reports them."""
        due = []
        for number, row in enumerate(rows):
            kept = self._kept.get(row.tag.key)
            if kept is None:
                tail = np.empty((PROOF_CHUNK_TOKENS, bits.shape[1]), dtype=np.uint16)
                kept = self._kept[row.tag.key] = _Kept(tail)
            due.append((kept, row, bits[number], None if logprobs is None else logprobs[number]))
        self._prove([kept for kept, row, _, _ in due if kept.fill == PROOF_CHUNK_TOKENS and _is_next(kept, row)])
        for kept, row, one, logprob in due:
            _put_one(kept, row, one, logprob)

    def _prove(self, full: Sequence[_Kept]) -> None:
        if not full:
            return
        for kept, proofs in zip(full, build_many([kept.tail for kept in full]), strict=True):
            kept.proofs.extend(proofs)
            kept.fill = 0

    def turn_over(self, key: str, turn: int, tokens: int) -> list[float]:
        """The turn kept so many tokens. Returns their logprobs (none where vLLM reports them)."""
        kept = self._known(key)
        surplus = kept.count - tokens if kept.turn == turn else -1
        if not kept.fault and not 0 <= surplus <= min(1, kept.fill):
            kept.fault = f"{kept.count} rows of turn {kept.turn} were kept, {tokens} tokens of turn {turn} were drawn"
        if kept.fault:
            raise EngineError(f"the hidden states of sequence {key!r} are not all there: {kept.fault}; it has no proof")
        kept.fill -= surplus
        kept.count, kept.is_over = tokens, True
        return kept.logprobs[:tokens]

    def first(self, key: str) -> float:
        """When the first row of its turn was filed, by the monotonic clock."""
        return self._known(key).first

    def proofs(self, key: str) -> list[bytes]:
        """Over all tokens of the sequence, whose turn is over; forgets it."""
        kept = self._known(key)
        if not kept.is_over:
            raise EngineError(f"sequence {key!r} is in the middle of a turn")
        self.forget([key])
        return [*kept.proofs, *(build_many([kept.tail[: kept.fill]])[0] if kept.fill else ())]

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._kept.pop(key, None)

    def _known(self, key: str) -> _Kept:
        if key not in self._kept:
            raise EngineError(f"no hidden states of sequence {key!r} were kept")
        return self._kept[key]


def _is_next(kept: _Kept, row: Row) -> bool:
    if row.tag.turn > kept.turn:
        return kept.is_over or kept.turn < 0
    return row.tag.turn == kept.turn and not kept.is_over and row.position - row.tag.start == kept.count


def _put_one(kept: _Kept, row: Row, bits: Bits, logprob: float | None) -> None:
    tag = row.tag
    if tag.turn < kept.turn or (tag.turn == kept.turn and kept.is_over):
        return  # vLLM ran ahead of a turn that is over
    if tag.turn > kept.turn:
        if kept.turn >= 0 and not kept.is_over:
            kept.fault = f"turn {tag.turn} began within turn {kept.turn}"
        kept.turn, kept.is_over, kept.count, kept.logprobs = tag.turn, False, 0, []
        kept.first = time.monotonic()
    at = row.position - tag.start
    if at == kept.count - 1 and kept.fill:  # drawn again after a preemption
        kept.fill -= 1
        kept.count -= 1
        del kept.logprobs[at:]
    elif at != kept.count:
        kept.fault = kept.fault or f"row {at} of turn {tag.turn} came after {kept.count} rows"
        return
    if kept.fill == PROOF_CHUNK_TOKENS:
        kept.fault = kept.fault or "a full chunk was not proved in time"
        return
    kept.tail[kept.fill] = bits
    kept.fill += 1
    kept.count += 1
    if logprob is not None:
        kept.logprobs.append(logprob)


class _Pending(NamedTuple):
    rows: Sequence[Row]
    bits: Tensor  # bfloat16 [rows, hidden], on the host once `copied` says so
    logprobs: Tensor | None
    copied: Any  # a CUDA event, or None


class Gatherer:
    """Takes rows off the device without holding it up: through pinned memory on a stream of their own, filed
    one step later."""

    def __init__(self, store: RowStore, device: torch.device) -> None:
        self._store = store
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pending: _Pending | None = None

    def take(self, rows: Sequence[Row], hidden: Tensor, logprobs: Tensor | None) -> None:
        """hidden [rows, hidden size], in the order of `rows`, a tensor that nobody else writes to."""
        self.flush()
        bits = hidden.detach().to(torch.bfloat16)
        if self._stream is None:
            self._pending = _Pending(rows, bits, logprobs, None)
            self.flush()
            return
        self._stream.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(self._stream):
            host = _to_pinned(bits)
            drawn = None if logprobs is None else _to_pinned(logprobs.to(torch.float32))
            bits.record_stream(self._stream)
            if logprobs is not None:
                logprobs.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._pending = _Pending(rows, host, drawn, copied)

    def flush(self) -> None:
        """File what is on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.copied is not None:
            pending.copied.synchronize()
        self._store.put(
            pending.rows, bits_of(pending.bits), None if pending.logprobs is None else pending.logprobs.tolist()
        )


def _to_pinned(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


# --- the two model runners ---


def is_v2(runner: Any) -> bool:
    return any(each.__module__ == V2_MODULE for each in type(runner).__mro__)


def _rows_of_v1(runner: Any, state: Any, tags: dict[str, Tag]) -> list[Row]:
    batch, scheduled = runner.input_batch, state.scheduler_output.num_scheduled_tokens
    rows = []
    for index, request in enumerate(batch.req_ids):
        tag = tags.get(request)
        # Discarded: the prompt is not read to its end yet, and what is drawn is dropped.
        if tag is not None and not runner.discard_request_mask.np[index]:
            rows.append(Row(index, tag, int(batch.num_computed_tokens_cpu[index]) + scheduled[request] - 1))
    return rows


def _rows_of_v2(state: Any, tags: dict[str, Tag]) -> list[Row]:
    batch = state.input_batch
    rows = []
    for index, request in enumerate(batch.req_ids[: batch.num_reqs]):
        tag = tags.get(request)
        end = int(batch.num_computed_tokens_np[index]) + int(batch.num_scheduled_tokens[index])
        if tag is not None and end >= int(batch.prefill_len_np[index]):
            rows.append(Row(index, tag, end - 1))
    return rows


class CommonsWorker:
    """Mixed into vLLM's worker (`worker_extension_cls`); its methods are called by name from vllm_engine.py.

    Names begin with rlc_, since vLLM refuses an extension that hides a method of its worker.
    """

    # vLLM's worker:
    model_runner: Any
    device: torch.device
    rank: int

    def rlc_install(self) -> dict[str, str]:
        """Stand before the sampler. Returns what this worker is: runner, device."""
        runner, v2 = self.model_runner, is_v2(self.model_runner)
        self._rlc_tags: dict[str, Tag] = {}
        self._rlc_begun: dict[str, float] = {}  # when a sequence's turn was scheduled first, by the monotonic clock
        self._rlc_usage = (0, 0)
        self._rlc_store = RowStore()
        self._rlc_gatherer = Gatherer(self._rlc_store, self.device)
        self._rlc_draw = None if v2 else _find_draw(runner)
        runner.execute_model = self._rlc_noting(runner.execute_model, v2)
        runner.sample_tokens = self._rlc_gathering(runner.sample_tokens, v2)
        name = "cpu" if self.device.type == "cpu" else f"cuda:{torch.cuda.get_device_name(self.device)}"
        return {"runner": "v2" if v2 else "v1", "device": name}

    def _rlc_noting(self, execute_model: Callable[..., Any], v2: bool) -> Callable[..., Any]:
        """Remember what new requests are of; V2 does not keep their parameters. Its own sampler draws, at any
        temperature, where users may ask for 0 to 2."""

        def noting(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            for request in scheduled.finished_req_ids:
                self._rlc_tags.pop(request, None)
            for new in scheduled.scheduled_new_reqs:
                extra = new.sampling_params.extra_args if new.sampling_params is not None else None
                if extra and TAG in extra:
                    tag = self._rlc_tags[new.req_id] = Tag(*extra[TAG])
                    if self.rank == 0:
                        self._rlc_begun[tag.key] = time.monotonic()
                    if v2:
                        new.sampling_params.temperature = tag.temperature
            if scheduled.num_scheduled_tokens:
                held = sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
                held += sum(scheduled.scheduled_cached_reqs.num_computed_tokens) + scheduled.total_num_scheduled_tokens
                self._rlc_usage = len(scheduled.num_scheduled_tokens), held
            return execute_model(scheduled, *arguments, **named)

        return noting

    def _rlc_gathering(self, sample_tokens: Callable[..., Any], v2: bool) -> Callable[..., Any]:
        def gathering(*arguments: Any, **named: Any) -> Any:
            state = self.model_runner.execute_model_state
            if state is None:
                return sample_tokens(*arguments, **named)
            rows = _rows_of_v2(state, self._rlc_tags) if v2 else _rows_of_v1(self.model_runner, state, self._rlc_tags)
            hidden = self._rlc_hidden(state, rows, v2)
            if self._rlc_draw is not None:
                self._rlc_draw.rows = rows
            result = sample_tokens(*arguments, **named)
            if hidden is not None:
                self._rlc_gatherer.take(rows, hidden, None if self._rlc_draw is None else self._rlc_draw.logprobs)
            return result

        return gathering

    def _rlc_hidden(self, state: Any, rows: Sequence[Row], v2: bool) -> Tensor | None:
        """A copy of the rows' hidden states, on the one rank that builds proofs. V1 and V2 have one row a request."""
        if not rows or self.rank != 0:
            return None
        index = torch.tensor([row.line for row in rows], device=self.device)
        if v2:
            index = state.input_batch.logits_indices[index]
        taken: Tensor = (state.hidden_states if v2 else state.sample_hidden_states)[index]
        return taken

    def rlc_usage(self) -> tuple[int, int]:
        """Requests that the last step was for, and the tokens that they keep in the cache."""
        return self._rlc_usage

    def rlc_turns_over(self, turns: list[tuple[str, int, int]]) -> list[tuple[list[float], float, float]]:
        """(key, turn, tokens) of each turn that is over; see RowStore.turn_over. With the logprobs, when it was
        scheduled and when its first token was here, by the monotonic clock. Empty on ranks that do not build."""
        if self.rank != 0:
            return []
        self._rlc_gatherer.flush()
        over = []
        for key, turn, tokens in turns:
            logprobs, first = self._rlc_store.turn_over(key, turn, tokens), self._rlc_store.first(key)
            over.append((logprobs, self._rlc_begun.pop(key, first), first))
        return over

    def rlc_proofs(self, key: str) -> list[bytes]:
        return self._rlc_store.proofs(key) if self.rank == 0 else []

    def rlc_forget(self, keys: list[str]) -> int:
        """Returns how many sequences are kept after that."""
        if self.rank == 0:
            self._rlc_gatherer.flush()
            self._rlc_store.forget(keys)
            for key in keys:
                self._rlc_begun.pop(key, None)
        return len(self._rlc_store)

    # --- weights ---

    def rlc_swap(self, folder: str) -> None:
        """Put the folder's weights into the model that runs."""
        self.model_runner.reload_weights(weights_path=folder)
        _repack_tied_head(self.model_runner.get_model(), self.device)

    def rlc_check_weights(self, folder: str, layers: list[int]) -> tuple[int, list[str]]:
        """Hold what the model computes with against the folder's tensors: how many modules were compared, and
        which differ. Embeddings, head, norms, and the linear layers of the layers named.

        A tensor-parallel rank holds slices, and compares what it holds whole.
        """
        with _Files(Path(folder)) as files:
            return _compare_weights(self.model_runner.get_model(), files, layers)


def _find_draw(runner: Any) -> SeededDraw:
    for each in runner.input_batch.logitsprocs.all:
        if isinstance(each, SeededDraw):
            return each
    raise EngineError("vLLM did not load the seeded sampler (SeededDraw) into its model runner")


def _repack_tied_head(model: Any, device: torch.device) -> None:
    """The CPU build packs the head's weights for its kernels, and a reload of tied embeddings leaves the packed
    copy as it was: logits of the old policy, hidden states of the new one."""
    head = getattr(model, "lm_head", None)
    if device.type != "cpu" or head is None or not hasattr(head, "cpu_linear") or not head.weight.numel():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


# --- is what is loaded what is on the disk? ---


class _Files:
    """The tensors of a policy folder by name."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files: list[Any] = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._home = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._home.clear()
        self._files.clear()

    def get(self, name: str) -> Tensor | None:
        tensor: Tensor | None = self._home[name].get_tensor(name) if name in self._home else None
        return tensor

    def stacked(self, names: Sequence[str]) -> Tensor | None:
        found = [self.get(name) for name in names]
        whole = [each for each in found if each is not None]
        return torch.cat(whole) if len(whole) == len(names) else None


# Relative error that a kernel's own order of summing may cause; other weights give an error of order 1.
_SAME: Final = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}


def _compare_weights(model: Any, files: _Files, layers: list[int]) -> tuple[int, list[str]]:
    compared, wrong = 0, []
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    wanted = {f"layers.{number}" for number in layers}
    for name, module in model.named_modules():
        parts = name.split(".")
        number = next((f"{a}.{b}" for a, b in itertools.pairwise(parts) if a == "layers"), None)
        if number is not None and number not in wanted:
            continue
        for what, matches in _comparisons(name, module, packed, files):
            compared += 1
            if not matches:
                wrong.append(what)
    return compared, wrong


def _comparisons(name: str, module: Any, packed: dict[str, list[str]], files: _Files) -> Iterator[tuple[str, bool]]:
    parent, _, last = name.rpartition(".")
    names = [f"{parent}.{each}" if parent else each for each in packed.get(last, [last])]
    weight = files.stacked([f"{each}.weight" for each in names])
    if weight is None and last == "lm_head":
        weight = files.get("model.embed_tokens.weight")  # tied
    held = getattr(module, "weight", None)
    method = getattr(module, "quant_method", None)
    if weight is None or held is None:
        return
    if method is None or not hasattr(method, "apply") or last == "embed_tokens":
        # Vocabularies are padded, and a rank's slice is shorter.
        if held.ndim == weight.ndim and held.shape[0] >= weight.shape[0] and held.shape[1:] == weight.shape[1:]:
            here = held[: len(weight)].to("cpu", copy=False)
            yield name, torch.equal(here, weight.to(here.dtype))
        return
    if hasattr(module, "output_size_per_partition") and getattr(module, "tp_size", 1) != 1:
        return
    yield name, _computes_alike(module, method, weight)


@torch.inference_mode()
def _computes_alike(module: Any, method: Any, weight: Tensor) -> bool:
    """Whether the layer multiplies by these weights: its own copy may be packed, or be another than it shows."""
    dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    device = module.weight.device
    generator = torch.Generator().manual_seed(len(weight))
    rows = torch.randn(4, weight.shape[1], generator=generator).to(dtype)
    found = method.apply(module, rows.to(device), bias=None).float().cpu()
    expected = rows.float() @ weight.to(dtype).float().T
    found = found[:, : expected.shape[1]]
    if found.shape != expected.shape:
        return False
    return float((found - expected).norm()) <= _SAME.get(dtype, 0.03) * float(expected.norm())


# --- the end of the node is the end of vLLM ---


def _end_with(node: int, parent: int) -> None:
    """vLLM's core does not notice that who started it was killed: it would keep the card until a person looks. Its
    workers notice that it was, and take their time. `parent`: the node, or the core of several workers."""
    with contextlib.suppress(ProcessLookupError):
        core = os.pidfd_open(parent)
        with contextlib.suppress(ProcessLookupError):  # the node is gone already
            watched = select.poll()
            for each in (core, os.pidfd_open(node)):
                watched.register(each, select.POLLIN)
            watched.poll()
        if parent != node:
            signal.pidfd_send_signal(core, signal.SIGKILL)
    os._exit(1)


def _watch_the_node() -> None:
    node, parent = int(os.environ.get(NODE_PID, "0")), multiprocessing.parent_process()
    if node and parent is not None and parent.pid is not None:
        watch = threading.Thread(target=_end_with, args=(node, parent.pid), daemon=True, name="rlnode watch")
        watch.start()


# vLLM loads this file in each of its processes before it loads the model: a start may be interrupted as well.
_watch_the_node()
