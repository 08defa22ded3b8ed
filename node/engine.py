"""What a node's worker asks of whatever draws its tokens, and the start-up check that an engine draws ours.

The worker opens sequences, steps them all at once, lets environments answer, and takes the proofs. An engine
decides how: batching, caches, devices. Not here: leases, environments, signatures (worker.py), or any engine
(transformers_engine.py).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from protocol.errors import EngineError
from protocol.limits import PROOF_CHUNK_TOKENS, PROOF_TOP_K
from protocol.noise import noise
from protocol.trace import EngineDescriptor

CPU_SLOTS: Final = 32  # where nobody says: a processor gains up to about so many, memory permitting


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One completion to draw. `seed` is the lease's for this slot; `max_new_tokens` bounds the first turn."""

    key: str
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The model's turn is over: `stopped` says that the last token is a stop token, else the turn is full.

    logprobs: log-probability of each token at the request's temperature, without the noise. `queued`, `prefill`:
    seconds of the turn before its prefill began, and in it.
    """

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    queued: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine is doing. `drawing`: turns being decoded or prefilled; `waiting`: turns without a slot yet;
    `cache`: share of its room for keys and values in use, None where there is no fixed room."""

    drawing: int = 0
    waiting: int = 0
    cache: float | None = None


class EngineBroken(EngineError):
    """Whatever is asked of this engine from now on fails: it has to be made again."""


class OutOfMemory(EngineBroken):
    """The device is full, and the engine cannot go on: made again with fewer slots, it may."""


class Engine(Protocol):
    """Draws many sequences at once with the normative seeded sampler (SPEC 10).

    A sequence is open from `open` to `finish` or `abort`. Its turn runs until a TurnDone names it; then the
    worker either extends it, which starts the next turn, or finishes it. All methods raise EngineError.
    """

    @property
    def slots(self) -> int:
        """Sequences decoded at once; more may be open: those that wait for an environment need none, and others
        wait their turn. Falls when memory runs out."""

    @property
    def loaded_root(self) -> bytes | None:
        """Root of the policy in memory, None before the first load or after one that failed midway."""

    @property
    def longest(self) -> int | None:
        """Tokens that one sequence may grow to, prompt included, where this device has room for fewer than the
        policy knows; None where the policy's own limit holds, which is every node's."""

    def usage(self) -> Usage:
        """Asked every second, also while nothing is drawn: raises EngineBroken when the engine is gone."""

    def descriptor(self) -> EngineDescriptor: ...

    def load(self, policy: Path, root: bytes) -> None:
        """Take the policy in this folder, in place where it has the same shape. The caller checked its digests.

        Refuses while sequences are open: one policy a sequence. A folder that is no policy, or none that this
        engine can run, raises PolicyError or EngineError and leaves the engine ready to load another.
        """

    def open(self, request: SequenceRequest) -> None:
        """The sequence joins the running batch at the next step that has room."""

    def step(self) -> tuple[TurnDone, ...]:
        """One token for everyone, or a prefill of those who came or were answered. Empty when nothing runs."""

    def extend(self, key: str, observed: tuple[int, ...], max_new_tokens: int) -> None:
        """The environment answered with these token ids; go on from the kept cache."""

    def finish(self, key: str) -> tuple[bytes, ...]:
        """Proofs over all generated tokens of the sequence, and close it. Its turn must be over."""

    def abort(self, key: str) -> None:
        """Close the sequence in any state, without proofs."""

    def sleep(self) -> None:
        """Give the device's memory up until `wake`. No sequence is open; nothing else is asked meanwhile."""

    def wake(self) -> None:
        """Take it again: the policy is loaded as before. Raises OutOfMemory where it is not free."""

    def close(self) -> None:
        """Give back all memory. The engine cannot be used afterwards."""


# At this temperature logits of any size are worth nothing beside the noise, so what must be drawn is known
# without the model.
_PROBE_TEMPERATURE: Final = 1e9
_PROBE_SEEDS: Final = (0x0123456789ABCDEF, 0xFEDCBA9876543210, 7)  # low, high and short 64-bit patterns
_PROBE_TOKENS: Final = 6  # a turn
_PROBE_STEPS: Final = 1_000
_LOGPROB_TOLERANCE: Final = 0.01


def probe(engine: Engine, vocabulary: int) -> None:
    """Draw a few tokens in two turns and hold them against the reference noise; EngineError on any difference.

    Finds an engine that hashes, counts positions, orders turns or scales logprobs in another way than SPEC 10
    says, before its traces are refused one by one. `vocabulary`: number of logits of the loaded policy.
    """
    prompts = {f"probe-{seed:x}": tuple(range(1, 4 + index)) for index, seed in enumerate(_PROBE_SEEDS)}
    for (key, prompt), seed in zip(prompts.items(), _PROBE_SEEDS, strict=True):
        prompt = tuple(token % vocabulary for token in prompt)
        prompts[key] = prompt
        engine.open(SequenceRequest(key, prompt, seed, _PROBE_TEMPERATURE, _PROBE_TOKENS))
    try:
        first = _run_turns(engine, set(prompts))
        observed = (1 % vocabulary, 2 % vocabulary)
        for key in prompts:
            engine.extend(key, observed, _PROBE_TOKENS)
        second = _run_turns(engine, set(prompts))
        for (key, prompt), seed in zip(prompts.items(), _PROBE_SEEDS, strict=True):
            _check_turn(first[key], seed, len(prompt), vocabulary)
            _check_turn(second[key], seed, len(prompt) + len(first[key].tokens) + len(observed), vocabulary)
            _check_proofs(engine.finish(key), len(first[key].tokens) + len(second[key].tokens))
    except EngineError:
        for key in prompts:
            _abort_quietly(engine, key)
        raise


def _run_turns(engine: Engine, keys: set[str]) -> dict[str, TurnDone]:
    done: dict[str, TurnDone] = {}
    for _ in range(_PROBE_STEPS):
        done.update((turn.key, turn) for turn in engine.step())
        if keys <= done.keys():
            return done
    raise EngineError(
        f"the engine finished {len(done)} of {len(keys)} short sequences in {_PROBE_STEPS} steps: it is stuck"
    )


def _check_turn(turn: TurnDone, seed: int, start: int, vocabulary: int) -> None:
    """`start`: position of the turn's first token."""
    count = len(turn.tokens)
    if count != len(turn.logprobs) or not count or (count < _PROBE_TOKENS and not turn.stopped):
        raise EngineError(f"the engine ended a turn of {_PROBE_TOKENS} tokens after {count} without a stop token")
    # SPEC 10: the position is that of the input token, one before the token that is drawn.
    positions = np.arange(start - 1, start - 1 + count)
    expected = noise(seed, positions[:, None], np.arange(vocabulary)[None]).argmax(axis=1)
    if tuple(expected.tolist()) != turn.tokens:
        raise EngineError(
            f"the engine does not draw the seeded tokens of SPEC 10: seed {seed:#x} from position {start - 1} "
            f"gives {expected.tolist()}, the engine drew {list(turn.tokens)}; this node cannot join with it"
        )
    if max(abs(value + np.log(vocabulary)) for value in turn.logprobs) > _LOGPROB_TOLERANCE:
        raise EngineError("the engine's logprobs are not those of the sampling temperature without the noise")


def _check_proofs(proofs: tuple[bytes, ...], tokens: int) -> None:
    chunks = -(-tokens // PROOF_CHUNK_TOKENS)
    if len(proofs) != chunks or any(not 2 < len(proof) <= 2 + 2 * PROOF_TOP_K for proof in proofs):
        raise EngineError(f"the engine gave {len(proofs)} proofs for {tokens} tokens, not {chunks} of SPEC 10")


def _abort_quietly(engine: Engine, key: str) -> None:
    # It may be closed already; the first error is the one to tell.
    with suppress(EngineError):
        engine.abort(key)
