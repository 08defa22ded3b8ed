"""Replays the episode: turns stop where they must, observations and reward are the environment's own
(SPEC 10.1 steps 10 to 12). Needs the policy's tokenizer and no model.

A fault of the environment or the tokenizer is raised, never found: it is this side's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from protocol.environments.base import Environment
from protocol.environments.rollout import Codec, Replay, replay
from protocol.errors import EnvironmentFault
from protocol.lease import Lease
from protocol.trace import Trace
from protocol.verdict import Reason
from verify.finding import Finding, passed

# Rewards are sums and logarithms of small numbers: another libm may differ in the last places.
REWARD_TOLERANCE = 1e-6


def replay_trace(trace: Trace, lease: Lease, environment: Environment, tokenizer: Codec) -> Replay:
    """The episode as it should have been. Raises EnvironmentFault or PolicyError (ours)."""
    found = replay(
        environment,
        tokenizer,
        lease.task_index,
        lease.prompt,
        [(int(kind), ids) for kind, ids in trace.pieces()],
        lease.max_turn_tokens,
        lease.max_tokens,
    )
    if not found.prompt_matches:
        # The trainer wrote the prompt into the lease: if it does not replay here, versions differ.
        raise EnvironmentFault(
            f"the lease's prompt is not what {lease.environment} task {lease.task_index} renders to here: "
            "this rlcommons and the one that issued the lease differ"
        )
    return found


def environment_findings(trace: Trace, found: Replay) -> Iterator[Finding]:
    """Steps 10 to 12 of SPEC 10.1, in order."""
    span = _token_span(trace, found.first_bad_span)
    # SPEC 10.1 step 10: the first stop token ends a turn; without one a turn fills its budget; the episode is over.
    if not found.turns_match or (found.observations_match and not found.finished):
        yield Finding("stop rules", Reason.STOP_RULE, found.detail, span=span)
        return
    yield passed("stop rules")
    # SPEC 10.1 step 11: observed tokens are those the environment's answer renders to.
    if not found.observations_match:
        yield Finding("observations", Reason.OBSERVATION, found.detail, span=span)
        return
    yield passed("observations")
    # SPEC 10.1 step 12: the claimed reward is the environment's.
    if not math.isclose(trace.reward, found.reward, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE):
        detail = f"claims {trace.reward:g}, replay gives {found.reward:g}"
        yield Finding("reward", Reason.REWARD, detail, trace.reward, found.reward)
        return
    yield passed("reward", value=trace.reward, limit=found.reward)


def _token_span(trace: Trace, place: int | None) -> tuple[int, int] | None:
    if place is None or place >= len(trace.spans):
        return None
    start = sum(span.length for span in trace.spans[:place])
    return start, start + trace.spans[place].length
