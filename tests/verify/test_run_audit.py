"""The log of a run: an honest one agrees in everything, and whatever is taken out of it, put into it or changed in it,
by whoever serves it or by the trainer itself, is named with where it is (SPEC 10.9)."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from protocol import codec
from protocol.envelope import seal
from protocol.errors import UsageError
from protocol.lease import Lease
from protocol.run import Genesis
from protocol.trace import TraceFile
from protocol.verdict import CheckOutcome, Outcome, Reason
from tests.verify import small_log
from tests.verify.small_log import LIAR, SOMEONE, TRAINER, VALUES, SmallLog
from verify.cli import main
from verify.finding import Finding, as_check
from verify.log_source import FolderSource, WebSource, open_source, read_index
from verify.rejudge import Rejudge
from verify.run_audit import Report, audit_run


@pytest.fixture(scope="module")
def honest() -> SmallLog:
    return small_log.make()


@pytest.fixture
def log(honest: SmallLog) -> SmallLog:
    return honest.copy()


def audited(log: SmallLog, folder: Path, *, traces: bool = False, sample: int | None = None) -> Report:
    source = FolderSource(log.write(folder / "log", traces=traces))
    return audit_run(source, Rejudge(source, None, sample, "cpu"))


def said(report: Report) -> list[str]:
    return [f"{each.step} {each.where}: {each.what}" for each in report.disagreements]


def test_an_honest_log_agrees_in_everything(log: SmallLog, tmp_path: Path) -> None:
    report = audited(log, tmp_path, traces=True)
    assert said(report) == []
    assert (report.epochs, report.sealed) == (3, 2)
    assert report.counts["receipts"] == 37 and report.counts["verdicts"] == 38
    assert report.counts["rates"] == 37 and report.counts["draws"] == 37 - 8
    assert report.counts["traces replayed"] == report.counts["traces recomputed by the model"] == 37
    assert report.counts["verdicts reached again"] == 37
    assert 10 < report.counts["scores"] < 37, "some were drawn by a rate below 1"
    assert report.undecided["draws whose value is not revealed yet"] == 8


def test_a_node_may_be_trusted_by_word_where_the_draw_says_so_and_it_did_not_lie(log: SmallLog, tmp_path: Path) -> None:
    by_word(0, 2, 0)(log)
    place = next(place for place in range(20) if log.receipt(1, place).node == LIAR.node)
    by_word(1, place, 0)(log)  # as of its draw it had not lied yet; and being late is no lie
    report = audited(log, tmp_path)
    assert said(report) == []
    assert report.notes["draws of nodes that the trainer's operator vouches for"] == 2


def test_without_traces_everything_but_the_verdicts_themselves_is_checked(log: SmallLog, tmp_path: Path) -> None:
    report = audited(log, tmp_path)
    assert said(report) == []
    assert report.undecided["traces whose policy is not at hand"] == 37


def drop(name: str, place: int, *, sealed: bool) -> Callable[[SmallLog], None]:
    return lambda log: log.without(name, 1, place, sealed=sealed)


def flip_signature(log: SmallLog) -> None:
    logged = list(log.epochs[0].verdicts)
    signed = logged[2].verdict
    broken = bytes([signed.signature[0] ^ 1]) + signed.signature[1:]
    logged[2] = replace(logged[2], verdict=replace(signed, signature=broken))
    log.change(0, sealed=False, verdicts=tuple(logged))


def flip_payload(log: SmallLog) -> None:
    leases = list(log.epochs[0].leases)
    payload = bytearray(leases[1].payload)
    payload[-1] ^= 1
    leases[1] = replace(leases[1], payload=bytes(payload))
    log.change(0, sealed=False, leases=tuple(leases))


def flip_draw(log: SmallLog) -> None:
    draw = log.epochs[0].submissions[3].draw
    assert draw is not None and draw.drawn
    log.with_submission(0, 3, draw=replace(draw, drawn=False))


def another_rate(log: SmallLog) -> None:
    place, draw = next((i, each.draw) for i, each in enumerate(log.epochs[1].submissions) if each.draw.rate < 1)
    log.with_submission(1, place, draw=replace(draw, rate=draw.rate * 0.5))


def trusted_too_early(log: SmallLog) -> None:
    draw = log.epochs[0].submissions[2].draw
    log.with_submission(0, 2, draw=replace(draw, rate=0.05, drawn=False))


def by_word(version: int, place: int, trusted: int, **changes: Any) -> Callable[[SmallLog], None]:
    """The draw of a node that the trainer says it trusts since verdict `trusted`."""

    def change(log: SmallLog) -> None:
        draw = log.epochs[version].submissions[place].draw
        assert draw is not None
        log.with_submission(version, place, draw=replace(draw, trusted=trusted, **changes))

    return change


def by_word_after_a_lie(log: SmallLog) -> None:
    place = next(place for place in range(20) if log.receipt(1, place).node == LIAR.node)
    numbers = [each.sequence for each in log.epochs[1].verdicts]
    lie = next(number for number, each in zip(numbers, log.verdicts(1), strict=True) if each.node == LIAR.node)
    by_word(1, place, 0, seen=lie)(log)


def seen_from_the_future(log: SmallLog) -> None:
    draw = log.epochs[1].submissions[0].draw
    log.with_submission(1, 0, draw=replace(draw, seen=1000))


def same_number(log: SmallLog) -> None:
    receipt = log.receipt(0, 4)
    log.with_submission(0, 4, receipt=seal(TRAINER, replace(receipt, sequence=receipt.sequence - 1)))


def slot_twice(log: SmallLog) -> None:
    receipt = log.receipt(0, 1)
    log.with_submission(0, 1, receipt=seal(TRAINER, replace(receipt, slot=0)))


def late(log: SmallLog) -> None:
    receipt = log.receipt(0, 1)
    log.with_submission(0, 1, receipt=seal(TRAINER, replace(receipt, received_ms=small_log.NOW + 100_000)))


def another_seed(log: SmallLog) -> None:
    lease = codec.decode(Lease, log.epochs[0].leases[0].payload)
    slots = (replace(lease.slots[0], seed=lease.slots[0].seed ^ 1), *lease.slots[1:])
    again = replace(lease, lease_id=b"\x05" * 16, slots=slots)
    log.change(0, leases=(*log.epochs[0].leases, seal(TRAINER, again)))


def other_scores(log: SmallLog) -> None:
    verdict = log.verdicts(0)[5]
    log.with_verdict(0, 5, scores=(verdict.scores[0] + 1, *verdict.scores[1:]))


def node_check_skipped(log: SmallLog) -> None:
    checks = list(log.verdicts(0)[5].checks)
    assert checks[-1].name == "node"
    checks[-1] = replace(checks[-1], outcome=CheckOutcome.SKIPPED, value=None, limit=None)
    log.with_verdict(0, 5, checks=tuple(checks))


def off_the_chain(log: SmallLog) -> None:
    log.epochs[1] = log.seal(log.epochs[1], 1, audit_value=VALUES[2])


def off_the_seals(log: SmallLog) -> None:
    log.epochs[1] = log.seal(log.epochs[1], 1, previous=bytes(32))


def sealed_by_another(log: SmallLog) -> None:
    signed = log.epochs[0].epoch
    assert signed is not None
    log.epochs[0] = replace(log.epochs[0], epoch=replace(signed, signer=SOMEONE.node))


def unsealed(log: SmallLog) -> None:
    log.epochs[0] = replace(log.epochs[0], epoch=None)


def another_run(log: SmallLog) -> None:
    lease = codec.decode(Lease, log.epochs[0].leases[1].payload)
    leases = list(log.epochs[0].leases)
    leases[1] = seal(TRAINER, replace(lease, run=bytes(32)))
    log.change(0, leases=tuple(leases))


def never_drawn_about(log: SmallLog) -> None:
    log.with_submission(0, 3, draw=None)


def drawn_and_not_audited(log: SmallLog) -> None:
    log.with_verdict(0, 3, audited=False, scores=(), calibration=None)


def verdict_from_nowhere(log: SmallLog) -> None:
    log.with_verdict(0, 3, trace_digest=b"\x01" * 32)


def taken_back(log: SmallLog) -> None:
    first, second = log.epochs[0].verdicts[2], log.verdicts(0)[2]
    refusal = replace(second, outcome=Outcome.ACCEPTED, audited=False, scores=(), calibration=None)
    last = log.epochs[2].verdicts[-1].sequence
    logged = replace(first, sequence=last + 1, verdict=seal(TRAINER, refusal))
    log.change(0, verdicts=(*log.epochs[0].verdicts, logged))


def calibration_left_out(log: SmallLog) -> None:
    log.change(0, calibrations=())


@pytest.mark.parametrize(
    ("change", "step", "where"),
    [
        (drop("submissions", 2, sealed=False), 2, r"epoch 1, seal: \d+ submissions were sealed"),
        (drop("submissions", 2, sealed=False), 2, r"epoch 1, seal: its root is not that of the items here"),
        (drop("submissions", 2, sealed=True), 3, r"the run's receipts: missing from the log: number \d+$"),
        (drop("verdicts", 2, sealed=True), 3, r"the run's verdicts: missing from the log: number \d+$"),
        (drop("verdicts", 2, sealed=True), 6, r"epoch 1, submission \d+: it never had a verdict"),
        (drop("leases", 0, sealed=False), 2, r"epoch 1, seal: 4 leases were sealed, 3 are here"),
        (drop("leases", 0, sealed=True), 4, r"epoch 1, submission 13: it answers lease \w+, which is not in"),
        (flip_signature, 1, r"epoch 0, verdict 3: the rlcommons/verdict/1 signature .* does not verify"),
        (flip_signature, 2, r"epoch 0, seal: its root"),
        (flip_payload, 1, r"epoch 0, lease 2: the rlcommons/lease/1 signature"),
        (lambda log: log.with_verdict(0, 4, SOMEONE), 1, r"epoch 0, verdict 5: the verdict is signed by 12D3K"),
        (another_run, 1, r"epoch 0, lease 2: it is of run 0000"),
        (sealed_by_another, 1, r"epoch 0, seal: the epoch is signed by"),
        (off_the_chain, 2, r"epoch 1, seal: the value it reveals is not of the chain"),
        (off_the_seals, 2, r"epoch 1, seal: it does not follow from the seal of the epoch before"),
        (unsealed, 2, r"epoch 1, seal: it is sealed, and epoch 0 before it is not"),
        (same_number, 3, r"epoch 0, submission 4: its number came before"),
        (slot_twice, 4, r"epoch 0, submission 2: slot 0 of its lease was answered before"),
        (late, 4, r"epoch 0, submission 2: it was received after its lease's deadline"),
        (another_seed, 4, r"epoch 0, lease 0505\w+: slot 0 was leased before with another seed"),
        (flip_draw, 5, r"epoch 0, submission 4: its draw is not the hash's: it says not audited at rate 1.000"),
        (another_rate, 5, r"epoch 1, submission \d+: its rate is 0\.\d+; from \d+ audits passed and 0 failed follows"),
        (trusted_too_early, 5, r"epoch 0, submission 3: its rate is 0.0500, with 2 audits passed and 0 failed it is 1"),
        (by_word(0, 2, 3), 5, r"epoch 0, submission 3: it is trusted since verdict 3, and looks no further than"),
        (by_word(0, 2, 0, rate=0.5), 5, r"epoch 0, submission 3: its rate is 0.500000; that of a trusted node is 0.05"),
        (by_word_after_a_lie, 5, r"epoch 1, submission \d+: it is trusted since verdict 0, and verdict \d+ refused"),
        (seen_from_the_future, 5, r"epoch 1, submission 13: its rate is from verdict 1000, which is not in the log"),
        (never_drawn_about, 5, r"epoch 0, submission 4: it was judged worth believing and never drawn about"),
        (drawn_and_not_audited, 5, r"epoch 0, submission 4: it was drawn for audit, and no verdict on it is of an"),
        (verdict_from_nowhere, 6, r"epoch 0, verdict 4: it is on a trace that has no receipt in this epoch"),
        (taken_back, 6, r"epoch 0, verdict 39: it may not replace the ACCEPTED before it"),
        (calibration_left_out, 6, r"epoch 0, verdict 1: it names calibration \w+…, which is not in this epoch"),
        (other_scores, 7, r"epoch 0, verdict 6: check 'margin score' says .* nats, its scores give"),
        (other_scores, 7, r"epoch 0, verdict 6: check 'node' says"),
        (node_check_skipped, 7, r"epoch 0, verdict 6: it has scores, and its check 'node' was not carried out"),
    ],
)  # fmt: skip
def test_what_was_changed_is_named_with_where_it_is(
    log: SmallLog, tmp_path: Path, change: Callable[[SmallLog], None], step: int, where: str
) -> None:
    change(log)
    found = said(audited(log, tmp_path))
    assert any(re.match(rf"{step} {where}", line) for line in found), found


def test_a_false_verdict_on_an_honest_trace_is_found_by_judging_it_again(log: SmallLog, tmp_path: Path) -> None:
    checks = list(log.verdicts(0)[2].checks)
    place = next(i for i, check in enumerate(checks) if check.name == "margins")
    checks[place] = as_check(Finding("margins", Reason.MARGIN, "says who", 1.0, 0.01, (0, 1)))
    false = {"outcome": Outcome.REFUSED, "reason": Reason.MARGIN, "reward": None, "checks": tuple(checks)}
    log.with_verdict(0, 2, **false)
    assert [line for line in said(audited(log, tmp_path, traces=True)) if line.startswith("8")] == [
        f"8 epoch 0, trace {log.receipt(0, 2).trace_digest.hex()[:16]}…: "
        "disagrees at check 'margins': the trainer says FAILED, here it is PASSED"
    ]


def test_a_reward_that_the_replay_does_not_give_is_found(log: SmallLog, tmp_path: Path) -> None:
    verdict = log.verdicts(0)[2]
    log.with_verdict(0, 2, reward=1.0 - verdict.reward)
    found = said(audited(log, tmp_path, traces=True, sample=0))
    assert len(found) == 1 and "disagrees about the reward" in found[0]


def test_a_trace_accepted_that_the_model_refuses_is_found_and_one_accepted_unseen_is_a_note(
    log: SmallLog, tmp_path: Path
) -> None:
    """The liar's trace, which an audit refused: first as if the audit had passed it, then as if there was none."""
    place = next(i for i, verdict in enumerate(log.verdicts(1)) if verdict.outcome is Outcome.REFUSED)
    reward = log.traces[log.verdicts(1)[place].trace_digest]
    passed = tuple(
        replace(check, outcome=CheckOutcome.PASSED, reason=None) if check.reason else check
        for check in log.verdicts(1)[place].checks
    )
    accepted: dict[str, Any] = {"outcome": Outcome.ACCEPTED, "reason": None, "checks": passed}
    accepted["reward"] = codec.decode(small_log.Trace, reward.trace.payload).reward
    log.with_verdict(1, place, **accepted)
    report = audited(log, tmp_path / "passed", traces=True)
    assert any("check 'logprobs': the trainer says PASSED, here it is FAILED" in line for line in said(report))
    log.with_verdict(1, place, audited=False, scores=(), calibration=None, checks=passed[:14])
    report = audited(log, tmp_path / "unseen", traces=True)
    assert report.notes == {"accepted unseen, and refused by the model here (LOGPROB)": 1}
    assert [line for line in said(report) if line.startswith("8")] == []


def test_files_that_are_missing_damaged_or_exchanged_are_named(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log", traces=True)
    (folder / "epochs" / "000001.msgpack").unlink()
    one, other, damaged = (log.receipt(0, place).trace_digest.hex() for place in (0, 1, 2))
    shutil.copy(folder / "traces" / f"{one}.msgpack", folder / "traces" / f"{other}.msgpack")
    (folder / "traces" / f"{damaged}.msgpack").write_bytes(b"\xc1")
    config = folder / "policies" / "000002" / "config.json"
    config.write_text(config.read_text() + " ")
    source = FolderSource(folder)
    report = audit_run(source, Rejudge(source, None, 0, "cpu"))
    found = "\n".join(said(report))
    assert "1 epochs/000001.msgpack: is missing" in found
    assert "3 the run's receipts: missing from the log: number 13 to 16, 21 to 2" in found
    assert f"8 epoch 0, trace {other[:16]}…: its file holds another trace" in found
    assert f"8 epoch 0, trace {damaged[:16]}…: its file is not a trace file" in found
    assert "8 policy 2: its root is" in found
    assert report.undecided["rates that follow from verdicts which are missing"] > 0
    (folder / "epochs" / "000001.msgpack").write_bytes(b"\x80")
    found = "\n".join(said(audit_run(source, Rejudge(source, None, 0, "cpu"))))
    assert "1 epochs/000001.msgpack: is not an epoch" in found


def test_the_file_of_another_epoch_is_named_once(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log")
    shutil.copy(folder / "epochs" / "000000.msgpack", folder / "epochs" / "000001.msgpack")
    source = FolderSource(folder)
    report = audit_run(source, Rejudge(source, None, 0, "cpu"))
    found = [line for line in said(report) if "epochs/000001" in line]
    assert found == [
        "1 epochs/000001.msgpack: is the epoch of policy version 0: nothing else of it is checked in this place"
    ]
    assert not any("epoch 1, lease" in line or "epoch 1, manifest" in line for line in said(report))


def test_what_a_trace_file_carries_beside_its_trace_is_of_the_log(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log", traces=True)
    digest = log.receipt(0, 2).trace_digest
    file = log.traces[digest]
    assert file.receipt is not None
    forged = small_log.seal(
        small_log.TRAINER, replace(codec.decode(small_log.Receipt, file.receipt.payload), sequence=9)
    )
    path = folder / "traces" / f"{digest.hex()}.msgpack"
    path.write_bytes(codec.encode(replace(file, receipt=forged)))
    source = FolderSource(folder)
    report = audit_run(source, Rejudge(source, None, 0, "cpu"))
    assert said(report) == [f"8 epoch 0, trace {digest.hex()[:16]}…: the receipt in its file is none of this epoch"]
    assert report.counts["policies"] == 3


def spoiled(log: SmallLog, change: Callable[[SmallLog, TraceFile], TraceFile], folder: Path) -> list[str]:
    """What is said of a trace whose file was changed."""
    digest = log.receipt(0, 2).trace_digest
    log.traces[digest] = change(log, log.traces[digest])
    found = [line for line in said(audited(log, folder, traces=True, sample=0)) if line.startswith("8")]
    where = f"8 epoch 0, trace {digest.hex()[:16]}…: "
    assert all(line.startswith(where) for line in found), found
    return [line.removeprefix(where) for line in found]


def another_genesis(log: SmallLog, file: TraceFile) -> TraceFile:
    """Of another run and trainer, well signed."""
    genesis = codec.decode(Genesis, file.genesis.payload)
    return replace(file, genesis=seal(SOMEONE, replace(genesis, trainer=SOMEONE.node)))


def genesis_signature(log: SmallLog, file: TraceFile) -> TraceFile:
    signature = bytes([file.genesis.signature[0] ^ 1]) + file.genesis.signature[1:]
    return replace(file, genesis=replace(file.genesis, signature=signature))


def calibration_unnamed(log: SmallLog, file: TraceFile) -> TraceFile:
    """The verdict names none, and the file carries one: SPEC 8.9 step 5."""
    log.with_verdict(0, 2, audited=False, scores=(), calibration=None)
    return replace(log.traces[file.trace.digest], calibration=file.calibration)


def exchanged(name: str) -> Callable[[SmallLog, TraceFile], TraceFile]:
    """What the same epoch has on another trace."""

    def change(log: SmallLog, file: TraceFile) -> TraceFile:
        return replace(file, **{name: getattr(log.traces[log.receipt(0, 9).trace_digest], name)})

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (another_genesis, "the genesis in its file is none of this run"),
        (genesis_signature, "the genesis in its file is none of this run"),
        (exchanged("lease"), "the lease in its file is another trace's"),
        (exchanged("receipt"), "the receipt in its file is another trace's"),
        (exchanged("verdict"), "the verdict in its file is another trace's"),
        (calibration_unnamed, "the calibration in its file is not the one its verdict names"),
    ],
)
def test_what_makes_a_trace_file_unusable_alone_is_found_in_the_log(
    log: SmallLog, tmp_path: Path, change: Callable[[SmallLog, TraceFile], TraceFile], told: str
) -> None:
    assert spoiled(log, change, tmp_path) == [told]


def test_a_byte_changed_anywhere_in_a_traces_file_is_named(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log", traces=True)
    dice = random.Random(7)
    files = sorted((folder / "traces").glob("*.msgpack"))
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        places = len(codec.encode(log.traces[bytes.fromhex(path.stem)].genesis)) if number % 2 else len(data)
        data[dice.randrange(places)] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    source = FolderSource(folder)
    found = said(audit_run(source, Rejudge(source, None, 0, "cpu")))
    assert [path.stem for path in files if not any(f"trace {path.stem[:16]}…" in line for line in found)] == []


# --- what is no log ---


def test_what_cannot_be_used_is_said_and_is_no_verdict(
    log: SmallLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(where: Path | str) -> str:
        assert main(["audit", str(where)]) == 2
        return capsys.readouterr().err

    assert "there is no folder" in refusal(tmp_path / "nowhere")
    assert "served by http or https" in refusal("ftp://127.0.0.1/log")
    folder = log.write(tmp_path / "log")
    index = folder / "log.json"
    table = json.loads(index.read_text())
    index.write_text(json.dumps({**table, "complete": False}))
    assert "just being written" in refusal(folder)
    index.write_text(json.dumps({**table, "run": "00" * 32}))
    assert "log.json of 0000" in refusal(folder)
    for text, told in (
        ("[", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ("{}", "its 'run' is not the 64 hex digits of a run id"),
        (json.dumps({**table, "epochs": "three"}), "its 'epochs' is not a whole number"),
        (json.dumps({"run": table["run"], "epochs": 3}), "its 'complete' is neither true nor false"),
        (json.dumps({**table, "passed_over": [[0, 9]]}), "its 'passed_over' is not a list of"),
    ):
        index.write_text(text)
        line = refusal(folder)
        assert f"log.json is not the index of a log: {told}" in line and "export or fetch it again" in line, line
        assert "Error(" not in line
    index.unlink()
    assert "no log.json" in refusal(folder)
    index.write_text(json.dumps(table))
    (folder / "genesis.msgpack").write_bytes(b"\x80")
    assert "not the genesis of a run" in refusal(folder)


def test_a_log_that_is_rewritten_while_it_is_read_is_not_judged(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log")

    class Moving(FolderSource):
        def read(self, name: str, most: int) -> bytes | None:
            if name == "epochs/000002.msgpack":
                index = json.loads((folder / "log.json").read_text())
                (folder / "log.json").write_text(json.dumps({**index, "written_ms": 1}))
            return super().read(name, most)

    source = Moving(folder)
    with pytest.raises(UsageError, match="written anew while it was read"):
        audit_run(source, Rejudge(source, None, 0, "cpu"))


# --- the command ---


def test_the_command_prints_a_summary_or_json_and_ends_with_its_code(
    log: SmallLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = log.write(tmp_path / "log", traces=True)
    assert main(["audit", str(folder), "--sample", "2", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["agrees"] and table["disagreements"] == [] and table["run"] == log.run.hex()
    assert table["checked"]["traces recomputed by the model"] == 6
    log.with_verdict(0, 4, SOMEONE)
    folder = log.write(tmp_path / "changed")
    assert main(["audit", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "1 disagree" in shown and "disagrees epoch 0, verdict 5: the verdict is signed by" in shown


# --- over http ---


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


class _Odd(BaseHTTPRequestHandler):
    """Answers what a server should not."""

    def do_GET(self) -> None:
        answers = {"/large": (200, b"x" * 1000), "/broken": (500, b""), "/cut": (200, b"short")}
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        code, body = answers.get(self.path, (404, b""))
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) + (100 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_log_served_by_a_web_server_is_audited_like_its_folder(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log", traces=True)
    with served(functools.partial(_Quiet, directory=str(folder))) as url:
        source = open_source(url)
        report = audit_run(source, Rejudge(source, None, 1, "cpu"))
        source.close()
    assert said(report) == []
    assert report.counts["traces replayed"] == 37 and report.counts["traces recomputed by the model"] == 3


def test_a_server_that_answers_too_much_too_little_or_elsewhere_is_refused(tmp_path: Path) -> None:
    with served(_Odd) as url:
        source = WebSource(url)
        assert source.read("absent", 10) is None
        for name, words in (
            ("large", "more than 999 bytes"), ("broken", "answers 500"), ("cut", "cut off|IncompleteRead"),
            ("away", "elsewhere|not allowed"),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=words):
                source.read(name, 999)
        with pytest.raises(UsageError, match=r"no log\.json"):
            read_index(source)
    with pytest.raises(UsageError, match="cannot be had"):
        WebSource(url).read("log.json", 10)


def test_a_byte_changed_anywhere_is_found_or_makes_the_log_unusable(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log", traces=True)
    files = sorted(path for path in folder.rglob("*.msgpack") if path.parent.name != "traces")
    dice = random.Random(5)
    for _ in range(24):
        path = dice.choice(files)
        data = bytearray(path.read_bytes())
        place, bit = dice.randrange(len(data)), 1 << dice.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        source = FolderSource(folder)
        try:
            assert audit_run(source, Rejudge(source, None, 0, "cpu")).disagreeing, (path.name, place, bit)
        except UsageError:
            assert path.name == "genesis.msgpack", (path.name, place, bit)
        path.write_bytes(data)


def test_an_index_that_announces_a_million_epochs_costs_little(log: SmallLog, tmp_path: Path) -> None:
    folder = log.write(tmp_path / "log")
    index = json.loads((folder / "log.json").read_text())
    (folder / "log.json").write_text(json.dumps({**index, "epochs": 1_000_000}))
    source = FolderSource(folder)
    found = said(audit_run(source, Rejudge(source, None, 0, "cpu")))
    assert len(found) == 21 and "epochs 23 to 999999: are not looked for" in found[-1]
