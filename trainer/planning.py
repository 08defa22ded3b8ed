"""How many rollouts in flight, nodes and auditors keep decoding and the learner busy, from what a run measured; which
part holds the others up, and whether that moved. Pure.

    rollouts   slots ÷ the share of a rollout's time that it spends decoding: 64 slots at 20 % → 320
    nodes      the learner takes B traces every S seconds, a node gives r a second → B/S/r
    auditors   traces a second × the share that is audited × seconds an audit takes

Not here: where the times are read (measured.py), and what a node does by the same rule on its own (rlnode's pace).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

from protocol.device_turns import ENGINE, Turn

LEAST_TRACES: Final = 16  # whose nodes told their times, before a mean of them says something
LEAST_AUDITS: Final = 4
LEAST_STEPS: Final = 3
PAUSE_SECONDS: Final = 600.0  # without a single trace: the run was not served, which is no rate of anything
MOST_A_SLOT: Final = 16  # rollouts in flight, which no node exceeds: beyond, the environment is what to mend
BUSY: Final = 0.7  # a part below this share of what it could do is held up by something else
CHANGED: Final = 0.25  # a mean that differs by this share is named as what moved the bottleneck

ROLLOUTS, NODES, AUDITORS, LEARNER = "rollouts in flight", "nodes", "auditors", "learner"
DEVICE: Final = "device"  # that the home engine and the learner take turns on
NOBODY: Final = "nobody"
# The stage of a rollout's way (chain.py) that is long for want of each.
STAGES: Final = {ROLLOUTS: "tool wait", NODES: "decode", AUDITORS: "verify", LEARNER: "train"}


# --- what is measured ---


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """A trace that arrived at `at_ms` (Unix). The rest is in seconds: by its node's own figures, within what the
    trainer saw from lease to receipt, and None where it told none."""

    at_ms: int
    audited: bool | None  # None: not judged yet
    verified: float | None  # from its receipt to its verdict
    held: float | None  # before it was begun, and from its end to the receipt
    slot_wait: float | None  # in turns that had no slot yet
    decoding: float | None  # in turns with a slot, prefill included
    tools: float | None  # environments' answers


@dataclass(frozen=True, slots=True)
class AuditTimes:
    """A batch of traces that an auditor recomputed together in `seconds`."""

    at_ms: int
    traces: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    at_ms: int
    traces: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run, traces in the order they arrived."""

    traces: tuple[TraceTimes, ...]
    audits: tuple[AuditTimes, ...]
    steps: tuple[StepTimes, ...]
    nodes: int
    slots: int  # of all these nodes' engines
    auditors: int


@dataclass(frozen=True, slots=True)
class Means:
    """Of a stretch; seconds are a trace's unless another thing is named."""

    held_seconds: float
    slot_wait_seconds: float  # in turns that had no slot yet: gone with fewer in flight
    rollout_seconds: float  # without that
    decoding_seconds: float  # of the rollout: in turns, with a slot
    verified_seconds: float
    audit_seconds: float  # of an auditor's time, for one trace that is audited
    audited_share: float
    learned_share: float  # of the traces that arrive, those a step learns from: others are flat, stale or refused
    step_seconds: float
    step_traces: float
    traces_per_second: float  # that arrive
    nodes: int
    slots: int
    auditors: int

    @property
    def decoding_share(self) -> float:
        return min(1.0, self.decoding_seconds / self.rollout_seconds)


def missing(stretch: Stretch) -> list[str]:
    """What is not measured often enough for a plan, a line each with what to do; [] when all is."""
    told = sum(each.decoding is not None for each in stretch.traces)
    found = []
    if told < LEAST_TRACES:
        found.append(f"rollouts: {told} traces whose nodes told their times of {LEAST_TRACES}: wait for more")
    if len(stretch.audits) < LEAST_AUDITS:
        audited = sum(each.traces for each in stretch.audits)
        found.append(f"audits: {len(stretch.audits)} of {LEAST_AUDITS}, of {audited} traces: wait for more")
    if len(stretch.steps) < LEAST_STEPS:
        found.append(f"learner: {len(stretch.steps)} of {LEAST_STEPS} steps: wait for more")
    if not stretch.slots:
        found.append("nodes: none has told how many slots it has: wait for its next heartbeat")
    return found


def means(stretch: Stretch) -> Means:
    """For a stretch of which nothing is missing()."""
    told = [each for each in stretch.traces if each.decoding is not None]
    judged = [each for each in stretch.traces if each.audited is not None]
    decoding = max(_mean([each.decoding or 0.0 for each in told]), 1e-6)
    return Means(
        held_seconds=_mean([each.held or 0.0 for each in told]),
        slot_wait_seconds=_mean([each.slot_wait or 0.0 for each in told]),
        rollout_seconds=decoding + _mean([each.tools or 0.0 for each in told]),
        decoding_seconds=decoding,
        verified_seconds=_mean([each.verified for each in stretch.traces if each.verified is not None]),
        audit_seconds=sum(each.seconds for each in stretch.audits) / sum(each.traces for each in stretch.audits),
        audited_share=_mean([float(each.audited or False) for each in judged]),
        learned_share=_learned_share(stretch),
        step_seconds=max(_mean([each.seconds for each in stretch.steps]), 1e-3),
        step_traces=_mean([each.traces for each in stretch.steps]),
        traces_per_second=len(stretch.traces) / max(_served_seconds(stretch.traces), 1e-3),
        nodes=stretch.nodes,
        slots=stretch.slots,
        auditors=stretch.auditors,
    )


def _learned_share(stretch: Stretch) -> float:
    """Traces learned from ÷ traces that arrived between the first and the last step: what the first one learned from
    arrived before."""
    first, last = stretch.steps[0].at_ms, stretch.steps[-1].at_ms
    learned = sum(each.traces for each in stretch.steps[1:])
    arrived = sum(first < each.at_ms <= last for each in stretch.traces)
    return min(1.0, learned / arrived) if learned and arrived else 1.0


def _served_seconds(traces: Sequence[TraceTimes]) -> float:
    gaps = [(after.at_ms - before.at_ms) / 1000 for before, after in pairwise(traces)]
    return sum(gap for gap in gaps if gap <= PAUSE_SECONDS)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# --- the rules ---


def rollouts_in_flight(slots: int, decoding_share: float) -> int:
    """So many that as many are in a turn as there are slots, while the others wait for their environments; at most
    what nodes keep in flight."""
    return min(slots * MOST_A_SLOT, math.ceil(slots / decoding_share - 1e-9))


def nodes_for(step_traces: float, step_seconds: float, traces_per_second: float) -> int:
    """Nodes that give `traces_per_second` each, for a learner that takes `step_traces` every `step_seconds`."""
    return max(1, math.ceil(step_traces / step_seconds / traces_per_second - 1e-9))


def auditors_for(traces_per_second: float, audited_share: float, audit_seconds: float) -> int:
    """Auditors that keep up with all the traces that arrive."""
    return max(1, math.ceil(traces_per_second * audited_share * audit_seconds - 1e-9))


@dataclass(frozen=True, slots=True)
class Part:
    """`most`: traces a second that pass through it when it is always busy, infinite where it bounds none; `busy`: the
    share of that which did, of rollouts in flight the share of those wanted. `wanted` is None for the
    learner, of which there is one."""

    name: str
    have: int
    wanted: int | None
    most: float
    busy: float


@dataclass(frozen=True, slots=True)
class Plan:
    parts: tuple[Part, ...]  # rollouts in flight, nodes, auditors, learner
    bottleneck: str  # name of a part, or DEVICE
    device: tuple[tuple[str, float], ...] | None = None  # the share of the time of who takes turns on it; None: nobody

    def part(self, name: str) -> Part:
        return next(each for each in self.parts if each.name == name)


def plan(of: Means) -> Plan:
    """What keeps the slots there are and the learner busy. Nodes and auditors are for what the learner takes."""
    takes = of.step_traces / of.step_seconds / of.learned_share  # traces a second, to be drawn and judged
    a_node = of.slots / of.nodes / of.decoding_seconds
    audits = of.audited_share * of.audit_seconds
    in_flight = of.traces_per_second * (of.rollout_seconds + of.slot_wait_seconds)  # Little's law
    wanted = rollouts_in_flight(of.slots, of.decoding_share)
    parts = (
        Part(ROLLOUTS, round(in_flight), wanted, math.inf, min(1.0, in_flight / wanted)),
        _part(NODES, of.nodes, nodes_for(takes, 1.0, a_node), of.nodes * a_node, of),
        _part(
            AUDITORS, of.auditors, auditors_for(takes, of.audited_share, of.audit_seconds),
            of.auditors / audits if audits else math.inf, of,
        ),
        _part(LEARNER, 1, None, takes, of),
    )  # fmt: skip
    return Plan(parts, _bottleneck(parts))


def _part(name: str, have: int, wanted: int | None, most: float, of: Means) -> Part:
    return Part(name, have, wanted, most, min(1.0, of.traces_per_second / most))


def _bottleneck(parts: tuple[Part, ...]) -> str:
    """The part through which fewest can pass. Where even that one has time to spare, too little is in flight."""
    rollouts, *others = parts
    tightest = min(others, key=lambda part: part.most)
    if tightest.busy < BUSY and rollouts.wanted is not None and rollouts.have < rollouts.wanted:
        return rollouts.name
    return tightest.name


def in_turns(made: Plan, of: Means, taken: Sequence[Turn], since_ms: int) -> Plan:
    """The plan of a run whose own engine draws between the learner's steps: who draws and who learns share what there
    is, no node is needed, and more in flight would not be drawn sooner. `since_ms`: from when turns count, Unix ms."""
    device = _shares(taken, since_ms)
    auditors, learner = made.part(AUDITORS), made.part(LEARNER)
    enough = auditors_for(of.traces_per_second, of.audited_share, of.audit_seconds)
    learns = dict(device).get(LEARNER, 0.0)
    return Plan((replace(auditors, wanted=enough), replace(learner, busy=learns)), DEVICE, device)


def _shares(taken: Sequence[Turn], since_ms: int) -> tuple[tuple[str, float], ...]:
    """() where nobody had a turn since then."""
    lately = [turn for turn in taken if turn.to_ms > since_ms]
    if not lately:
        return ()
    begin, had = max(since_ms, lately[0].from_ms), dict.fromkeys((ENGINE, LEARNER), 0)
    for turn in lately:
        had[turn.who] = had.get(turn.who, 0) + turn.to_ms - max(begin, turn.from_ms)
    whole = max(1, lately[-1].to_ms - begin)
    rest = max(0, whole - sum(had.values()))
    return tuple((who, ms / whole) for who, ms in {**had, NOBODY: rest}.items())


# --- drift ---


@dataclass(frozen=True, slots=True)
class Moved:
    """The bottleneck of the last quarter is another than that of the quarter before. `changed`: the means that differ
    by CHANGED or more, as (name, before, now)."""

    before: str
    now: str
    changed: tuple[tuple[str, float, float], ...]


def moved(stretch: Stretch) -> Moved | None:
    """None where the bottleneck stayed, or where a quarter is too short to say."""
    quarters = _last_two_quarters(stretch)
    if any(missing(quarter) for quarter in quarters):
        return None
    # What a step learned from arrived before its quarter began: the share is that of the whole.
    share = _learned_share(stretch)
    before, now = (replace(means(quarter), learned_share=share) for quarter in quarters)
    names = (plan(before).bottleneck, plan(now).bottleneck)
    return None if names[0] == names[1] else Moved(*names, tuple(_changed(before, now)))


def _last_two_quarters(stretch: Stretch) -> tuple[Stretch, Stretch]:
    quarter = len(stretch.traces) // 4
    cut = len(stretch.traces) - quarter
    return _cut(stretch, cut - quarter, cut), _cut(stretch, cut, len(stretch.traces))


def _cut(stretch: Stretch, start: int, end: int) -> Stretch:
    traces = stretch.traces[start:end]
    first, last = (traces[0].at_ms, traces[-1].at_ms) if traces else (0, -1)
    return replace(
        stretch,
        traces=traces,
        audits=tuple(each for each in stretch.audits if first <= each.at_ms <= last),
        steps=tuple(each for each in stretch.steps if first <= each.at_ms <= last),
    )


def _changed(before: Means, now: Means) -> Iterator[tuple[str, float, float]]:
    for (name, old), new in zip(asdict(before).items(), asdict(now).values(), strict=True):
        if abs(new - old) >= CHANGED * max(abs(old), 1e-9):
            yield name, old, new


# --- for people and programs ---


def as_table(of: Means, made: Plan, drift: Moved | None) -> list[str]:
    """Lines for a terminal."""
    lines = [
        f"rollout   {of.rollout_seconds:,.2f} s, {of.decoding_share:.0%} of it decoding; {of.slot_wait_seconds:,.2f} s "
        f"more for a slot, {of.held_seconds:,.2f} s at the node and on the way",
        f"verdict   after {of.verified_seconds:,.2f} s; {of.audited_share:.0%} audited, {of.audit_seconds:,.3f} s each",
        f"step      {of.step_seconds:,.2f} s for {of.step_traces:,.0f} traces, {of.learned_share:.0%} of what arrives",
        f"arriving  {of.traces_per_second:,.2f} traces/s",
        "",
        f"{'':20}{'have':>8}{'wanted':>8}{'most traces/s':>16}{'busy':>7}",
    ]
    for part in made.parts:
        wanted = "" if part.wanted is None else f"{part.wanted:,}"
        most = "" if math.isinf(part.most) else f"{part.most:,.2f}"
        mark = "  ← bottleneck" if part.name == made.bottleneck else ""
        lines.append(f"{part.name:20}{part.have:>8,}{wanted:>8}{most:>16}{part.busy:>7.0%}{mark}")
    if made.device is not None:
        told = ", ".join(f"{who} {share:.0%}" for who, share in made.device) or "nobody had a turn lately"
        lines += ["", f"device    in turns: {told} of the time  ← bottleneck; no nodes are needed"]
    elif of.decoding_share * MOST_A_SLOT < 1:
        lines += [
            "",
            f"nodes keep at most {MOST_A_SLOT} rollouts a slot in flight: only faster environments fill the slots",
        ]
    if drift is not None:
        before, now = (f"{name} ({STAGES[name]})" for name in (drift.before, drift.now))
        lines += ["", f"warning: the bottleneck moved from {before} to {now} in the last quarter"]
        lines += [f"  {name}: {old:,.3g} → {new:,.3g}" for name, old, new in drift.changed]
    return lines


def as_object(of: Means, made: Plan, drift: Moved | None) -> dict[str, Any]:
    """The same for `--json`."""
    parts = {
        part.name.replace(" ", "_"): {
            "have": part.have,
            "wanted": part.wanted,
            "most_traces_per_second": None if math.isinf(part.most) else part.most,
            "busy": part.busy,
        }
        for part in made.parts
    }
    shift = None
    if drift is not None:
        changed = {name: [old, new] for name, old, new in drift.changed}
        stages = {"before_stage": STAGES[drift.before], "now_stage": STAGES[drift.now]}
        shift = {"before": drift.before, "now": drift.now, **stages, "changed": changed}
    measured = {**asdict(of), "decoding_share": of.decoding_share}
    device = None if made.device is None else {who.replace(" ", "_"): share for who, share in made.device}
    told = {"missing": [], "measured": measured, "parts": parts, "bottleneck": made.bottleneck}
    return {**told, "device": device, "moved": shift}
