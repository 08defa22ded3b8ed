"""The sums of a node's scores: each trace once, by its newest verdict, whether the ledger holds it yet or not."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionState
from trainer.node_scores import NodeScores
from verify.check import DEAR, node_check, with_node
from verify.finding import as_check, passed, skipped

NODE, OTHER = b"n" * 32, b"o" * 32
ONE, TWO = b"1" * 32, b"2" * 32  # calibrations


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.sqlite")


def write(
    ledger: Ledger, digest: bytes, calibration: bytes | None, scores: tuple[float, ...], node: bytes = NODE
) -> None:
    ledger.add_verdict(node, digest, SubmissionState.ACCEPTED, None, True, 0, b"", calibration, scores)


def test_the_sums_are_those_of_the_other_traces_by_the_same_calibration(ledger: Ledger) -> None:
    write(ledger, b"a", ONE, (1.0, 2.0))
    write(ledger, b"b", ONE, (0.5, -1.0))
    write(ledger, b"c", TWO, (9.0,))
    write(ledger, b"d", ONE, (7.0, 7.0), OTHER)
    write(ledger, b"e", None, ())
    scores = NodeScores(ledger)
    scores.begin(0)
    assert scores.before(NODE, 0, b"new", ONE) == (1.5, 1.0)
    assert scores.before(NODE, 0, b"a", ONE) == (0.5, -1.0), "a trace that is judged again counts once"
    assert scores.before(NODE, 0, b"new", TWO) == (9.0,)
    assert scores.before(NODE, 1, b"new", ONE) == (), "of another policy version"
    assert scores.before(NODE, 0, b"new", None) == ()


def test_of_two_verdicts_on_a_trace_the_newer_counts_also_where_it_has_no_scores(ledger: Ledger) -> None:
    scores = NodeScores(ledger)
    write(ledger, b"a", ONE, (1.0,))
    write(ledger, b"b", ONE, (2.0,))
    assert scores.before(NODE, 0, b"new", ONE) == (3.0,)
    write(ledger, b"a", TWO, (5.0,))
    assert scores.before(NODE, 0, b"new", ONE) == (2.0,) and scores.before(NODE, 0, b"new", TWO) == (5.0,)
    write(ledger, b"b", None, ())
    assert scores.before(NODE, 0, b"new", ONE) == (0.0,)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_decided_and_not_yet_written_counts_the_same(ledger: Ledger, seed: int) -> None:
    chance = random.Random(seed)
    scores = NodeScores(ledger)
    newest: dict[bytes, tuple[bytes | None, tuple[float, ...]]] = {}
    for _ in range(12):
        scores.begin(0)
        batch = []
        for _ in range(chance.randrange(1, 6)):
            digest = bytes([chance.randrange(10)])
            calibration = chance.choice((ONE, TWO, None))
            values = () if calibration is None else (chance.uniform(-2, 2), chance.uniform(-2, 2))
            for asked in (ONE, TWO):
                others = [each for key, (by, each) in newest.items() if by == asked and key != digest]
                wanted = [math.fsum(column) for column in zip(*others, strict=True)] or [0.0, 0.0]
                found = scores.before(NODE, 0, digest, asked) or (0.0, 0.0)
                assert found == pytest.approx(wanted, abs=1e-12)
            scores.add(NODE, 0, digest, calibration, values)
            newest[digest] = (calibration, values)
            batch.append((digest, calibration, values))
        for digest, calibration, values in batch:
            write(ledger, digest, calibration, values)


def test_versions_that_are_sealed_are_forgotten(ledger: Ledger) -> None:
    scores = NodeScores(ledger)
    for version in range(3):
        scores.before(NODE, version, b"new", ONE)
    scores.begin(2)
    assert list(scores._tallies) == [(NODE, 2)]


def traces_until_refused(node: bytes, ledger: Ledger, share: float, seed: int, most: int) -> int:
    """How many traces a node hands in until its `node` check fails; `most` and one where it never does.

    A trace shows a token above the edge with probability `share`; honest ones do with .02. The alternative expects
    .06, another .2.
    """
    chance = random.Random(seed)
    table = [(math.log(0.06 / 0.02), math.log(0.94 / 0.98)), (math.log(0.2 / 0.02), math.log(0.8 / 0.98))]
    checks = (*(as_check(passed(name)) for name in DEAR[:-1]), skipped("node", "needs the run's log"))
    scores = NodeScores(ledger)
    for number in range(1, most + 1):
        digest = number.to_bytes(4, "big")
        shown = sum(chance.random() < share for _ in range(10))
        values = tuple(shown * high + (10 - shown) * low for high, low in table)
        before = scores.before(node, 0, digest, ONE)
        node_found = with_node(checks, values, before)[-1]
        assert node_found == node_check(values, before)
        if node_found.reason is not None:
            return number
        scores.add(node, 0, digest, ONE, values)
    return most + 1


def test_honest_nodes_are_never_refused_and_one_that_is_slightly_off_everywhere_soon(ledger: Ledger) -> None:
    for seed in range(100):
        assert traces_until_refused(NODE, ledger, 0.02, seed, 100) == 101
    needed = [traces_until_refused(NODE, ledger, 0.06, seed, 400) for seed in range(20)]
    # 13.8 nats and ln 2 at .027 nats a token, 10 tokens a trace.
    assert max(needed) <= 200 and 30 < sum(needed) / len(needed) < 75
