"""What the ledger holds: its schema, the states of groups, slots, leases and submissions, and rows as values.

Not here: reading and writing them, and what a state follows from (ledger.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from protocol.messages import Timing

SCHEMA_VERSION = 7

SCHEMA = """
CREATE TABLE policies (
    version INTEGER PRIMARY KEY, root BLOB NOT NULL, created_ms INTEGER NOT NULL,
    manifest BLOB,                      -- Signed; NULL until the gateway signed it
    published_ms INTEGER,               -- when nodes could fetch it first
    bytes INTEGER, delta_bytes INTEGER  -- of its files, and of the delta from the version before, where there is one
);
CREATE TABLE arrivals (                 -- when a node first told that it has a version
    version INTEGER NOT NULL, node BLOB NOT NULL, at_ms INTEGER NOT NULL, PRIMARY KEY (version, node)
) WITHOUT ROWID;
CREATE INDEX policies_unsigned ON policies(version, root) WHERE manifest IS NULL;
CREATE TABLE groups (
    group_id BLOB PRIMARY KEY, environment TEXT NOT NULL, parameters TEXT NOT NULL,
    task_index BLOB NOT NULL, policy_version INTEGER NOT NULL, size INTEGER NOT NULL,
    prompt BLOB NOT NULL, max_turn_tokens INTEGER NOT NULL, created_ms INTEGER NOT NULL,
    state TEXT NOT NULL, cause TEXT, batch INTEGER
);
CREATE INDEX groups_by_state ON groups(state, created_ms);
CREATE INDEX groups_by_batch ON groups(batch) WHERE batch IS NOT NULL;
CREATE TABLE slots (
    group_id BLOB NOT NULL, slot INTEGER NOT NULL, seed BLOB NOT NULL, state TEXT NOT NULL,
    node BLOB, lease_id BLOB, attempts INTEGER NOT NULL DEFAULT 0, digest BLOB,
    -- of the leases of it (attempts), so many ran out or were given back without an answer
    expired INTEGER NOT NULL DEFAULT 0, returned INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, slot)
) WITHOUT ROWID;
CREATE TABLE leases (
    lease_id BLOB PRIMARY KEY, node BLOB NOT NULL, group_id BLOB NOT NULL, signed BLOB NOT NULL,
    issued_ms INTEGER NOT NULL, deadline_ms INTEGER NOT NULL, state TEXT NOT NULL,
    policy_version INTEGER NOT NULL     -- its group's; the rowid is the order of issue
);
CREATE INDEX leases_by_deadline ON leases(state, deadline_ms);
CREATE INDEX leases_by_version ON leases(policy_version, state);
CREATE TABLE submissions (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL UNIQUE, lease_id BLOB NOT NULL,
    group_id BLOB NOT NULL, slot INTEGER NOT NULL, node BLOB NOT NULL, policy_version INTEGER NOT NULL,
    received_ms INTEGER NOT NULL, receipt BLOB NOT NULL,
    trace BLOB,                         -- Signed; NULL once pruned
    tokens INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
    reward REAL,                        -- the trainer's own
    checks BLOB,                        -- canonical Checks of the checks that need no model
    claimed_by TEXT, claimed_ms INTEGER, attempts INTEGER NOT NULL DEFAULT 0,
    audit BLOB,                         -- canonical AuditResult of the auditor
    mu BLOB,                            -- float32 logprobs of the audit, one a generated token
    judged_by TEXT,                     -- the auditor that answered
    died_of TEXT,                       -- of what the auditors ended that were at work on it
    reaudit TEXT,                       -- the node asked for a second audit: WAITING, then DONE
    -- protocol.log.Draw; NULL until it is drawn, and where a check that needs no model had failed before
    draw_seen INTEGER, draw_floor REAL, draw_rate REAL, drawn INTEGER, draw_trusted INTEGER,
    -- protocol.messages.Timing: as its node says, which nobody checked; NULL where it did not
    waited_ms INTEGER, slot_ms INTEGER, prefill_ms INTEGER, decode_ms INTEGER, tool_ms INTEGER
);
CREATE INDEX submissions_claimed ON submissions(claimed_by, claimed_ms) WHERE claimed_by IS NOT NULL;
CREATE INDEX submissions_reaudited ON submissions(reaudit, judged_by) WHERE reaudit IS NOT NULL;
CREATE INDEX submissions_by_state ON submissions(state, policy_version, sequence);
CREATE INDEX submissions_by_version ON submissions(policy_version, sequence);
CREATE INDEX submissions_in_state ON submissions(state);
CREATE INDEX submissions_by_group ON submissions(group_id, slot);
CREATE INDEX submissions_by_node ON submissions(node, state);
CREATE INDEX submissions_by_time ON submissions(received_ms, tokens);
CREATE INDEX submissions_with_trace ON submissions(state, group_id) WHERE trace IS NOT NULL;
CREATE TABLE verdicts (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, node BLOB NOT NULL, digest BLOB NOT NULL,
    outcome TEXT NOT NULL, reason TEXT, audited INTEGER NOT NULL, judged_ms INTEGER NOT NULL,
    signed BLOB NOT NULL,
    epoch INTEGER NOT NULL,             -- of whose log it is part (SPEC 8.12)
    calibration BLOB, scores BLOB       -- SPEC 10.8: by which digest, and the trace's sums, float64
);
CREATE INDEX verdicts_by_node ON verdicts(node, sequence);
CREATE INDEX verdicts_by_epoch ON verdicts(epoch, sequence);
CREATE INDEX verdicts_by_digest ON verdicts(digest);
CREATE INDEX verdicts_by_outcome ON verdicts(outcome, reason, audited);
CREATE INDEX audits_by_node ON verdicts(node, sequence, outcome) WHERE audited;
CREATE INDEX refusals_by_node ON verdicts(node, sequence) WHERE outcome = 'REFUSED';
CREATE INDEX audits_by_version ON verdicts(node, epoch, sequence) WHERE audited;
CREATE TABLE calibrations (
    digest BLOB PRIMARY KEY,            -- of the canonical Calibration, as verdicts name it
    pair TEXT NOT NULL, policy_version INTEGER NOT NULL, created_ms INTEGER NOT NULL, body BLOB NOT NULL,
    provisional INTEGER NOT NULL,       -- 1: of another pair, until this one is measured
    signed BLOB                         -- Signed; NULL until the gateway signed it
);
CREATE INDEX calibrations_by_pair ON calibrations(pair, created_ms);
CREATE TABLE pairs (                    -- of engines, as auditors met them
    pair TEXT PRIMARY KEY, seen_ms INTEGER NOT NULL,
    note TEXT,                          -- why it is not calibrated; NULL: it is
    trying INTEGER                      -- the policy version an auditor measures it on; after its death too
);
CREATE TABLE epochs (                   -- the closed ones
    version INTEGER PRIMARY KEY, signed BLOB NOT NULL
);
CREATE TABLE nodes (
    node BLOB PRIMARY KEY, first_seen_ms INTEGER NOT NULL, last_seen_ms INTEGER NOT NULL,
    software TEXT NOT NULL, engine TEXT NOT NULL, connected INTEGER NOT NULL DEFAULT 0,
    policy_version INTEGER, tokens_per_second REAL NOT NULL DEFAULT 0,
    slots_busy INTEGER NOT NULL DEFAULT 0, slots_total INTEGER NOT NULL DEFAULT 0,
    slots_waiting INTEGER NOT NULL DEFAULT 0, cache_percent INTEGER,
    unsent INTEGER NOT NULL DEFAULT 0, leased INTEGER NOT NULL DEFAULT 0,
    expired INTEGER NOT NULL DEFAULT 0, returned INTEGER NOT NULL DEFAULT 0,
    accepted INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0,
    audits_passed INTEGER NOT NULL DEFAULT 0, audits_failed INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    rate REAL NOT NULL DEFAULT 1,       -- at which its last trace was drawn for audit
    waits TEXT NOT NULL DEFAULT '', waits_ms INTEGER  -- why it got no lease, since when
);
CREATE TABLE named_nodes (              -- by a person, when the run was served
    node BLOB PRIMARY KEY,
    home INTEGER NOT NULL,              -- 1: the home engine's
    trusted INTEGER                     -- the last verdict there was when trust was given; NULL: it is not
);
CREATE TABLE steps (
    version INTEGER PRIMARY KEY,        -- the policy version the step made
    created_ms INTEGER NOT NULL, groups INTEGER NOT NULL, traces INTEGER NOT NULL,
    tokens INTEGER NOT NULL, reward_mean REAL NOT NULL, flat_groups INTEGER NOT NULL,
    staleness_mean REAL NOT NULL, staleness_max INTEGER NOT NULL, loss REAL NOT NULL,
    ess REAL NOT NULL, kl REAL NOT NULL, masked REAL NOT NULL, clipped REAL NOT NULL,
    entropy REAL NOT NULL, ratio_mean REAL NOT NULL, ratio_max REAL NOT NULL,
    gradient_norm REAL NOT NULL, learning_rate REAL NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE evaluations (              -- of a policy version, on held-out tasks
    version INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, tasks INTEGER NOT NULL, reward_mean REAL NOT NULL,
    reward_error REAL NOT NULL, faults INTEGER NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
);
"""


class GroupState(StrEnum):
    OPEN = "OPEN"  # slots are being leased and answered
    COMPLETE = "COMPLETE"  # every slot holds an accepted trace
    TAKEN = "TAKEN"  # in the batch that made policy `batch`, flat groups included
    DROPPED = "DROPPED"  # `cause` says why


class SlotState(StrEnum):
    FREE = "FREE"
    LEASED = "LEASED"
    ANSWERED = "ANSWERED"  # a trace is being judged
    ACCEPTED = "ACCEPTED"


class LeaseState(StrEnum):
    OPEN = "OPEN"
    CLOSED = "CLOSED"  # every slot answered
    EXPIRED = "EXPIRED"
    RETURNED = "RETURNED"


class SubmissionState(StrEnum):
    RECEIVED = "RECEIVED"  # receipt given, cheap checks still to come
    AUDIT = "AUDIT"  # drawn for audit, waiting for or claimed by an auditor
    AUDITED = "AUDITED"  # answered by an auditor, verdict to be signed
    ACCEPTED = "ACCEPTED"
    REFUSED = "REFUSED"
    NOT_JUDGED = "NOT_JUDGED"
    CREDITED = "CREDITED"  # accepted by a re-audit after its slot went to another: counted, never learned from


class Reaudit(StrEnum):
    WAITING = "WAITING"  # for another auditor than the one that judged it
    DONE = "DONE"  # there is one a trace


@dataclass(frozen=True, slots=True)
class Published:
    """A policy that nodes may fetch, in figures; `delta_bytes`: from the version before, None without a delta."""

    at_ms: int
    bytes: int
    delta_bytes: int | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    group_id: bytes
    environment: str
    parameters: str
    task_index: int
    policy_version: int
    size: int
    prompt: tuple[int, ...]
    max_turn_tokens: int
    created_ms: int


@dataclass(frozen=True, slots=True)
class SlotRow:
    group_id: bytes
    slot: int
    seed: int
    state: SlotState
    node: bytes | None
    attempts: int


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A slot of an open group, with what of its group decides who may draw it."""

    group_id: bytes
    policy_version: int
    created_ms: int
    slot: int
    state: SlotState
    node: bytes | None
    attempts: int


@dataclass(frozen=True, slots=True)
class SubmissionRow:
    """`trace`, `lease` and `receipt` are canonical bytes of Signed."""

    sequence: int
    digest: bytes
    lease_id: bytes
    group_id: bytes
    slot: int
    node: bytes
    policy_version: int
    received_ms: int
    state: SubmissionState
    reward: float | None
    attempts: int
    checks: bytes | None
    audit: bytes | None
    trace: bytes
    lease: bytes
    receipt: bytes
    judged_by: str | None
    died_of: str | None
    reaudit: Reaudit | None

    @property
    def is_asked_for(self) -> bool:
        """Whether its audit is the re-audit that its node asked for. Once that is done a trace is one like others."""
        return self.reaudit is Reaudit.WAITING


@dataclass(frozen=True, slots=True)
class NewSubmission:
    digest: bytes
    lease_id: bytes
    group_id: bytes
    slot: int
    node: bytes
    policy_version: int
    received_ms: int
    trace: bytes
    tokens: int
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class ScoredVerdict:
    """An audited verdict's part in the sums of a node; `calibration` None and no `scores` where it has none."""

    sequence: int
    digest: bytes
    calibration: bytes | None
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """`body`: canonical Calibration; `signed`: canonical Signed of it, None until the gateway signed."""

    digest: bytes
    pair: str
    policy_version: int
    created_ms: int
    body: bytes
    provisional: bool
    signed: bytes | None


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """An accepted trace of a complete group, as the learner needs it. `mu` is None when unaudited."""

    slot: int
    node: bytes
    digest: bytes
    reward: float
    trace: bytes
    mu: np.ndarray[Any, np.dtype[np.float32]] | None


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    group: GroupRow
    traces: tuple[TrainingTrace, ...]


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """All that may decide whether a complete group is learned from: who drew it does not."""

    group_id: bytes
    policy_version: int
    rewards: tuple[float | None, ...]  # None: not a number (SQLite keeps NaN as NULL)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One learner step in figures. Shares are of its generated tokens, entropy and kl are nats a token; ratios are
    raw: before any mask, cap or clip."""

    version: int
    created_ms: int
    groups: int
    traces: int
    tokens: int
    reward_mean: float
    flat_groups: int
    staleness_mean: float
    staleness_max: int
    loss: float
    ess: float
    kl: float
    masked: float
    clipped: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    gradient_norm: float  # before clipping
    learning_rate: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """How a policy version did on held-out tasks: mean reward with its standard error, over `tasks`; `faults` were
    left out because their environment failed."""

    version: int
    at_ms: int
    tasks: int
    reward_mean: float
    reward_error: float
    faults: int
    seconds: float


def u64_bytes(number: int) -> bytes:
    return number.to_bytes(8, "little")


def u64_of(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def ids_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def ids_of(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, dtype="<u4").tolist())


GROUP_COLUMNS = (
    "group_id, environment, parameters, task_index, policy_version, size, prompt, max_turn_tokens, created_ms"
)


def group_of(row: Any) -> GroupRow:
    return GroupRow(row[0], row[1], row[2], u64_of(row[3]), row[4], row[5], ids_of(row[6]), row[7], row[8])


CALIBRATION_COLUMNS = "digest, pair, policy_version, created_ms, body, provisional, signed"

SUBMISSION_COLUMNS = (
    "s.sequence, s.digest, s.lease_id, s.group_id, s.slot, s.node, s.policy_version, s.received_ms, "
    "s.state, s.reward, s.attempts, s.checks, s.audit, s.trace, l.signed, s.receipt, s.judged_by, s.died_of, s.reaudit"
)


TOO_STALE = "too stale"  # so begins the cause of a group that was dropped for the age of its policy

TIMES = "waited_ms, slot_ms, prefill_ms, decode_ms, tool_ms"


def times_of(timing: Timing | None) -> tuple[int | None, ...]:
    """The values of the columns TIMES."""
    names = TIMES.split(", ")
    return tuple(None if timing is None else getattr(timing, name) for name in names)


# The tables of an epoch's items, and what says which epoch.
OF_EPOCH = (("leases", "policy_version"), ("submissions", "policy_version"), ("verdicts", "epoch"))

# Groups first: few are open or complete, while accepted and refused submissions grow with the run.
OF_GROUP = "submissions s INDEXED BY submissions_by_group"


def submission_of(row: Any) -> SubmissionRow:
    fields = dict(zip(SubmissionRow.__slots__, row, strict=True))
    reaudit = None if fields["reaudit"] is None else Reaudit(fields["reaudit"])
    return SubmissionRow(**{**fields, "state": SubmissionState(fields["state"]), "reaudit": reaudit})
