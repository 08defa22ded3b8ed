"""A trace recomputed for a person to look at: margins along its tokens, the worst of them, its proofs' statistics.

Judges nothing: limits are check's (judge.py). What cannot be recomputed, because the trace has not the form for it
or this machine failed, is said in a sentence and is no error. Not here: how it is shown (inspect.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from protocol.errors import PolicyError, RLCommonsError, UsageError
from protocol.verdict import Fingerprint
from verify.files import Evidence, require_policy
from verify.toploc import ChunkResult

if TYPE_CHECKING:
    from verify.prefill import Verifier

WORST: Final = 5  # tokens looked at one by one
# The bins of SPEC 10.8: margin 0, then up to each of these, then above.
_EDGES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_MARKS: Final = "·▁▂▃▄▅▆▇█"
_STRIP: Final = 64  # marks on a line
_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A generated token that is not the one the seed draws. offset: into the trace's tokens. margin and logprob are
    ours, claimed is the node's logprob; drawn is the token that the seed draws there."""

    offset: int
    token: int
    margin: float
    logprob: float
    claimed: float
    drawn: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Our own numbers, one a generated token in order, and one result a proof."""

    verifier: Fingerprint
    margins: tuple[float, ...]
    logprobs: tuple[float, ...]
    chunks: tuple[ChunkResult, ...]
    worst: tuple[WorstToken, ...]


def read_again(evidence: Evidence, policy: Path | None, device: str) -> Reading | str:
    """Recompute a trace, or say why it cannot be.

    Raises UsageError or PolicyError when `policy` is missing or not the leased one, or there is no such device.
    """
    if policy is None:
        raise UsageError("margins are recomputed by the policy: give its folder with --policy")
    require_policy(policy, evidence.lease)
    from verify.prefill import Verifier, check_device

    check_device(device)
    measure = evidence.calibration
    dtype = evidence.trace.engine.dtype if measure is None else measure.calibration.pair.verifier_dtype
    try:
        return _read(evidence, Verifier(policy, dtype, device))
    except PolicyError:
        raise
    except RLCommonsError as error:
        return str(error)


def _read(evidence: Evidence, verifier: Verifier) -> Reading:
    from verify.judge import fingerprint, recompute

    trace, lease = evidence.trace, evidence.lease
    offsets = trace.generated()
    if not len(trace.logprobs) == len(offsets) > 0 or sum(span.length for span in trace.spans) != len(trace.tokens):
        raise UsageError("its spans, tokens and logprobs do not fit each other (`rlverify check` says how)")
    ours = recompute(verifier, [(trace, lease)])[0]
    order = np.argsort(-ours.margins, kind="stable")[:WORST]
    places = [int(place) for place in order if ours.margins[place] > 0]
    drawn = _drawn(evidence, verifier, [offsets[place] for place in places])
    worst = tuple(
        WorstToken(
            offset=offsets[place],
            token=trace.tokens[offsets[place]],
            margin=float(ours.margins[place]),
            logprob=float(ours.logprobs[place]),
            claimed=trace.logprobs[place],
            drawn=token,
        )
        for place, token in zip(places, drawn, strict=True)
    )
    return Reading(
        fingerprint(verifier), tuple(ours.margins.tolist()), tuple(ours.logprobs.tolist()), ours.chunks, worst
    )


def _drawn(evidence: Evidence, verifier: Verifier, offsets: list[int]) -> list[int]:
    from verify.prefill import Passage

    trace, lease = evidence.trace, evidence.lease
    seed = lease.seed_of(trace.slot)
    if not offsets or seed is None:
        return []
    return verifier.drawn(Passage(lease.prompt, trace.tokens, trace.generated(), seed, lease.temperature), offsets)


def strip(margins: tuple[float, ...]) -> tuple[list[str], int]:
    """Margins as lines of marks, and how many tokens a mark stands for: the largest margin among them."""
    each = max(1, -(-len(margins) // (_STRIP * _LINES)))
    largest = [max(margins[start : start + each]) for start in range(0, len(margins), each)]
    marks = "".join(_MARKS[0 if margin <= 0 else 1 + int(np.searchsorted(_EDGES, margin))] for margin in largest)
    return [marks[start : start + _STRIP] for start in range(0, len(marks), _STRIP)], each


def strip_legend() -> str:
    steps = " ".join(f"{mark} to {edge:g}" for mark, edge in zip(_MARKS[1:], _EDGES, strict=False))
    return f"{_MARKS[0]} none  {steps}  {_MARKS[-1]} above"
