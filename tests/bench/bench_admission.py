"""What admitting a trace of 256 tokens costs beside the model's forward pass (bar: under 2 ms of CPU).

    python tests/bench/bench_admission.py [--rounds 5]

CPU of one thread, on the real parts and a real ledger, in the order a trace meets them:

    decode    the request's bytes, and the reply's
    receive   signature, run, lease and slot; the signed receipt; all of it in the ledger, 8 to a transaction
    check     the cheap checks with the replay of the episode, the draw, the signed verdict where it is not audited
    record    what was decided, in the ledger
    audit     of a trace that was drawn: claim, evidence against limits and scores, the answer; verdict and record again
    tell      the verdict in a heartbeat's reply

Two shapes: one turn of 256 tokens (letters@1), and a call, its observation and a long second turn (tools8@1), of four
nodes. The bar is on the dearer one, for the mean trace of a run of which 17.8 % are audited (as in a `make run`;
docs/log.md); what one costs that is audited is in the table. Not in it: the forward pass with what it does to its own
logits and hidden states (margins, and the comparison of 8 proofs with hidden states of width 576, which is printed),
libp2p (bench_gateway.py), leases.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from protocol import codec, messages
from protocol.envelope import Signed, seal
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.environments.tools import CALL, Tools8, task
from protocol.heap import settle
from protocol.identity import DOMAIN_TRACE, Identity, verify
from protocol.lease import Lease, Slot
from protocol.run import EnvironmentShare
from protocol.trace import Span, SpanKind, Trace
from tests.trainer.scripted_node import ENGINE, calibrate, identity_of, made_up_calibration, trust
from trainer.audit import _open
from trainer.audit_draw import AuditChain
from trainer.audit_result import AuditResult
from trainer.config import TrainerConfig
from trainer.inbox import Arrival, Examiner, Inbox, Notary
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupRow, SubmissionState
from trainer.office import fill_shelf
from trainer.pairs import pair_of
from trainer.rundir import Run, load_run_identity, load_secrets
from trainer.shelf import Shelf
from verify.check import audit_checks
from verify.evidence import Recomputed
from verify.judge import fingerprint
from verify.structure import policy_shape
from verify.toploc import build_proofs, compare_many

BAR_MS = 2.0
TOKENS = 256
TRACES = 64  # a round
AT_ONCE = 8  # submissions in one transaction: what a node has in flight
WIDTH = 576  # of SmolLM2's hidden states
NODES = 4
AUDITED = 0.178  # of the traces of a `make run`
STAGES = ("decode", "receive", "check", "record", "audit", "tell")


class Stopwatch:
    """CPU seconds of this thread by stage."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.spent[stage] += time.thread_time() - began


# --- a run and traces of its tasks ---


def make_run(path: Path, first: int) -> Run:
    """`first`: audits of a new node before fewer are drawn; the node of the benchmark has passed 400."""
    config = TrainerConfig(
        listen="/ip4/127.0.0.1/tcp/0", group_size=8, max_turn_tokens=TOKENS, max_tokens=TOKENS,
        audit_first=first, audit_floor=1e-9,
    )  # fmt: skip
    shares = (EnvironmentShare("letters@1", "", 1), EnvironmentShare("tools8@1", "", 1))
    return init_run(path, name="bench", policy="embedded", environments=shares, config=config)


@dataclass(frozen=True)
class Shape:
    """An episode of exactly TOKENS tokens: its spans, their ids and the reward it earns."""

    environment: str
    play: Callable[[PolicyTokenizer, int], tuple[tuple[int, ...], tuple[Span, ...]]]


def one_turn(tokenizer: PolicyTokenizer, index: int) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    return _filler(tokenizer, TOKENS), (Span(SpanKind.GENERATED, TOKENS),)


def two_turns(tokenizer: PolicyTokenizer, index: int) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    asked = task(index)
    reply = f"{CALL}{asked.tool.name} {asked.a} {asked.b}"
    called = (*tokenizer.encode(reply), min(tokenizer.stop_ids))
    shown = Tools8().step(index, (reply,))
    assert shown is not None
    observed = tokenizer.observation_ids(shown)
    rest = _filler(tokenizer, TOKENS - len(called) - len(observed))
    lengths = (len(called), len(observed), len(rest))
    kinds = (SpanKind.GENERATED, SpanKind.OBSERVED, SpanKind.GENERATED)
    return (*called, *observed, *rest), tuple(Span(kind, n) for kind, n in zip(kinds, lengths, strict=True))


def _filler(tokenizer: PolicyTokenizer, length: int) -> tuple[int, ...]:
    words = tokenizer.encode("a quick brown fox " * length)
    return (*words[: length - 1], min(tokenizer.stop_ids))


SHAPES = {"one turn": Shape("letters@1", one_turn), "two turns": Shape("tools8@1", two_turns)}


class Node:
    """Leases and finished traces, in the ledger and ready to be sent."""

    def __init__(self, run: Run, ledger: Ledger, who: Identity, number: int) -> None:
        self._run, self._ledger, self._who, self._number = run, ledger, who, number
        self.id = who.node
        self._trainer = load_run_identity(run)
        folder = run.folder.policy(0)
        self._tokenizer = PolicyTokenizer.load(folder)
        self._hidden = policy_shape(folder).hidden_size
        self._random = np.random.default_rng(0)
        self._made = 0
        ledger.see_node(who.node, time.time_ns() // 1_000_000, "bench", "script")
        trust(ledger, who, 400)

    def requests(self, shape: Shape, count: int) -> list[bytes]:
        """Bodies of submissions."""
        size = self._run.config.group_size
        bodies = []
        for _ in range(-(-count // size)):
            lease = self._lease(shape, size)
            bodies += [messages.pack(messages.Submit(self._trace(shape, lease, slot))) for slot in range(size)]
        return bodies[:count]

    def _lease(self, shape: Shape, size: int) -> Lease:
        self._made += 1
        index, now_ms = NODES * self._made + self._number, time.time_ns() // 1_000_000
        name = hashlib.sha256(f"{shape.environment} {index}".encode()).digest()
        share = next(each for each in self._run.genesis.environments if each.name == shape.environment)
        prompt = self._tokenizer.prompt_ids(_environment(share).prompt(index))
        group = GroupRow(name[:16], share.name, "", index, 0, size, prompt, TOKENS, now_ms)
        lease = Lease(
            run=self._run.run, lease_id=name[16:], node=self._who.node, policy_version=0,
            policy_root=self._run.genesis.first_policy_root, environment=share.name, parameters="", task_index=index,
            group_id=group.group_id, group_size=size, slots=tuple(Slot(slot, slot + 1) for slot in range(size)),
            prompt=prompt, temperature=1.0, max_turn_tokens=TOKENS, max_tokens=TOKENS, issued_ms=now_ms,
            deadline_ms=now_ms + 3_600_000,
        )  # fmt: skip
        signed = codec.encode(seal(self._trainer, lease))
        with self._ledger.write():
            self._ledger.add_group(group, [slot.seed for slot in lease.slots])
            self._ledger.add_lease(
                lease.lease_id, self._who.node, group.group_id, range(size), signed, lease.issued_ms, lease.deadline_ms
            )
        return lease

    def _trace(self, shape: Shape, lease: Lease, slot: int) -> Signed:
        tokens, spans = shape.play(self._tokenizer, lease.task_index)
        drawn = sum(span.length for span in spans if span.kind == SpanKind.GENERATED)
        hidden = self._random.standard_normal((drawn, self._hidden), dtype=np.float32)
        logprobs = tuple(-self._random.random(drawn, dtype=np.float32).astype(float))
        trace = Trace(
            run=lease.run, lease_id=lease.lease_id, node=lease.node, policy_version=0, policy_root=lease.policy_root,
            slot=slot, tokens=tokens, spans=spans, logprobs=logprobs, proofs=build_proofs(bits(hidden)), reward=0.0,
            engine=ENGINE, started_ms=lease.issued_ms, finished_ms=lease.issued_ms + 1,
        )  # fmt: skip
        return seal(self._who, trace)


def bits(hidden: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return (hidden.view(np.uint32) >> 16).astype(np.uint16)


def _environment(share: EnvironmentShare) -> Any:
    from protocol.environments import base

    return base.load(share.name, share.parameters)


# --- the trainer's side, as office.py puts it together, in one thread ---


class Desk:
    def __init__(self, run: Run, ledger: Ledger) -> None:
        secrets, signer = load_secrets(run), load_run_identity(run)
        shelf = Shelf(run.folder)
        fill_shelf(run, signer, ledger, shelf)
        self.ledger = ledger
        notary = Notary(run.run, signer, "bench")
        self.inbox = Inbox(ledger, notary, run.config)
        chain = AuditChain(secrets.audit)
        self.examiner = Examiner(ledger, notary, shelf, chain, run.config, run.genesis.environments)
        self.calibration = made_up_calibration(run, pair_of(ENGINE, run.config))
        self.digest = calibrate(run, ledger)

    def admit(self, sent: list[tuple[bytes, list[bytes]]], watch: Stopwatch) -> int:
        """All that each node sends; how many were drawn for audit."""
        before = self.ledger.last_verdict()
        for who, bodies in sent:
            for start in range(0, len(bodies), AT_ONCE):
                self._take_in(bodies[start : start + AT_ONCE], who, watch)
        with watch.of("check"):
            self.examiner.begin()
            rows = self.ledger.submissions(SubmissionState.RECEIVED, TRACES)
            decisions = [self.examiner.examine(row) for row in rows]
        assert len(decisions) == TRACES
        self._record(decisions, "record", watch)
        audited = self._audit(watch)
        for who, bodies in sent:
            with watch.of("tell"):
                found = self.ledger.verdicts_after(who, before, TRACES)
                verdicts = tuple(codec.reopen(Signed, signed) for _, signed in found)
                messages.pack(messages.HeartbeatReply(0, 0, verdicts, found[-1][0]))
            assert len(found) == len(bodies)
        return audited

    def _take_in(self, bodies: list[bytes], who: bytes, watch: Stopwatch) -> None:
        now_ms = time.time_ns() // 1_000_000
        with watch.of("decode"):
            arrivals = [Arrival(messages.open_body(body).trace, who, now_ms) for body in bodies]
        with watch.of("receive"), self.ledger.write():
            replies = []
            for arrival in arrivals:
                with self.ledger.part():
                    replies.append(self.inbox.receive(arrival))
        assert all(reply.receipt for reply in replies), replies[0]
        with watch.of("decode"):
            for reply in replies:
                messages.pack(reply)

    def _record(self, decisions: list[Any], stage: str, watch: Stopwatch) -> None:
        refused = [each.reason for each in decisions if each.reason is not None]
        assert not refused, refused[0]
        with watch.of(stage), self.ledger.write():
            for decision in decisions:
                with self.ledger.part():
                    self.inbox.record(decision, decision.row.received_ms)

    def _audit(self, watch: Stopwatch) -> int:
        """As trainer/audit.py, with numbers that a forward pass would have made."""
        with watch.of("audit"):
            rows = self.ledger.claim_audits("auditor-0", 0, TRACES)
            cases = [_open(row) for row in rows]
        made = [_recomputed(case.trace) for case in cases]
        with watch.of("audit"):
            answers = []
            for case, ours in zip(cases, made, strict=True):
                found = audit_checks(case.trace, case.lease, ours, self.calibration.limits, self.calibration)
                result = AuditResult(found.checks, fingerprint(None), None, "", self.digest, found.scores)
                answers.append((case.row.sequence, codec.encode(result), ours.logprobs))
            with self.ledger.write():
                for answer in answers:
                    self.ledger.finish_audit(*answer)
            self.examiner.begin()
            audited = self.ledger.submissions(SubmissionState.AUDITED, TRACES)
            decisions = [self.examiner.conclude(row) for row in audited]
        self._record(decisions, "audit", watch)
        return len(decisions)


_ENDLESS: dict[int, tuple[Any, ...]] = {}


def _recomputed(trace: Trace) -> Recomputed:
    """What a verifier finds that agrees with the trace."""
    drawn = len(trace.logprobs)
    if drawn not in _ENDLESS:
        hidden = bits(np.random.default_rng(0).standard_normal((drawn, WIDTH), dtype=np.float32))
        _ENDLESS[drawn] = tuple(compare_many([(hidden, build_proofs(hidden))])[0])
    margins = np.zeros(drawn, dtype=np.float32)
    return Recomputed(margins, np.asarray(trace.logprobs, dtype=np.float32), _ENDLESS[drawn])


def comparing_ms(rounds: int) -> float:
    """Of a trace's proofs with hidden states, in batches as the auditor does it."""
    hidden = bits(np.random.default_rng(0).standard_normal((TOKENS, WIDTH), dtype=np.float32))
    pairs = [(hidden, build_proofs(hidden))] * 8
    compare_many(pairs)
    spent = []
    for _ in range(rounds):
        began = time.thread_time()
        compare_many(pairs)
        spent.append(time.thread_time() - began)
    return 1000 * statistics.median(spent) / len(pairs)


def verifying_ms() -> float:
    """A bare signature: how fast this processor is now, with whatever else it does."""
    who, payload, count = identity_of("bench 0"), bytes(4_000), 500
    signature = who.sign(DOMAIN_TRACE, payload)
    began = time.thread_time()
    for _ in range(count):
        verify(who.node, DOMAIN_TRACE, payload, signature)
    return 1000 * (time.thread_time() - began) / count


# --- the table ---


def measure(run: Run, shape: Shape, rounds: int) -> tuple[dict[str, float], int]:
    """Milliseconds a trace by stage, the median round; how many of a round were audited."""
    ledger = Ledger(run.folder.ledger)
    desk = Desk(run, ledger)
    nodes = [Node(run, ledger, identity_of(f"bench {number}"), number) for number in range(NODES)]
    settle()  # as the gateway does
    found, audited = [], 0
    for number in range(rounds + 1):
        watch = Stopwatch()
        audited = desk.admit([(node.id, node.requests(shape, TRACES // NODES)) for node in nodes], watch)
        if number:  # the first fills caches
            found.append(watch.spent)
    ledger.close()
    return {stage: 1000 * statistics.median(each[stage] for each in found) / TRACES for stage in STAGES}, audited


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for kind, first in (("not audited", 32), ("audited", 100_000)):
        for name, shape in SHAPES.items():
            with tempfile.TemporaryDirectory() as folder:
                column, audited = measure(make_run(Path(folder) / "run", first), shape, options.rounds)
            assert audited == (TRACES if kind == "audited" else 0), audited
            columns[f"{name}, {kind}"] = column
    print(f"ms of CPU a trace of {TOKENS} tokens, median of {options.rounds} rounds of {TRACES}")
    print(f"{'':10}" + "".join(f"{name:>24}" for name in columns))
    for stage in STAGES:
        print(f"{stage:10}" + "".join(f"{column[stage]:24.3f}" for column in columns.values()))
    totals = {name: sum(column.values()) for name, column in columns.items()}
    print(f"{'together':10}" + "".join(f"{total:24.3f}" for total in totals.values()))
    means = {
        name: (1 - AUDITED) * totals[f"{name}, not audited"] + AUDITED * totals[f"{name}, audited"] for name in SHAPES
    }
    worst = max(means.values())
    told = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    print(f"mean where {AUDITED:.1%} are audited: {told} (bar {BAR_MS:g})")
    bare = verifying_ms()
    print(f"the dearer mean is {worst / bare:.0f} bare signature verifications, {bare:.3f} ms each here and now")
    print(f"beside it, of the forward pass: comparing 8 proofs with hidden states of {WIDTH}: {comparing_ms(9):.2f} ms")
    return 0 if worst < BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
