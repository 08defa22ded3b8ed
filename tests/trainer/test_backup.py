"""Back-ups of a run that is served, and what becomes of one that is restored."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import LocalError, StorageError, UsageError
from protocol.policy import Manifest, policy_root
from tests.trainer.fabricate import NOW, Gateway, make_run, one_thread
from trainer import backup, cli
from trainer.audit_draw import LAST_VERSION, AuditChain
from trainer.backup import back_up, read_backup, restore
from trainer.epochs import Registrar, closable
from trainer.export_log import export_log
from trainer.learner import Learner
from trainer.ledger import Ledger
from trainer.ledger_care import NUMBERS_PASSED_OVER
from trainer.ledger_rows import GroupState, StepRow
from trainer.office import fill_shelf
from trainer.place import check_place, locked
from trainer.rundir import Run, load_run_identity, load_secrets, open_run
from trainer.shelf import Shelf
from verify.log_source import FolderSource, read_index
from verify.rejudge import Rejudge
from verify.run_audit import audit_run

ROOT = Path(backup.__file__).parents[1]
SMALL: dict[str, Any] = dict(group_size=4, groups_per_step=2, loss_tokens=100, learning_rate=1e-3, warmup_steps=1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with groups left to learn from and one being drawn."""
    with one_thread():
        run, ledger = make_run(tmp_path_factory.mktemp("learned") / "run", **SMALL)
        gateway = Gateway(run, ledger)
        gateway.admit(12, 0)
        learner = Learner(run, ledger)
        steps(learner, 2)
        gateway.submit(gateway.draw(1, 2), proofs=())
        sign(run, ledger)
        ledger.close()
    return run.folder.path


@pytest.fixture
def run(learned: Path, tmp_path: Path) -> Run:
    shutil.copytree(learned, tmp_path / "run")
    return open_run(tmp_path / "run")


def steps(learner: Learner, count: int) -> None:
    for _ in range(count):
        outcome = learner.turn()
        assert isinstance(outcome, StepRow), outcome


def sign(run: Run, ledger: Ledger) -> None:
    """Sign what was published, as the gateway does when it starts."""
    fill_shelf(run, load_run_identity(run), ledger, Shelf(run.folder))


def manifests(ledger: Ledger) -> dict[int, bytes]:
    """version → root, of every manifest that was signed."""
    rows = ledger.view("SELECT manifest FROM policies WHERE manifest IS NOT NULL")
    opened = [codec.decode(Manifest, codec.decode(Signed, row["manifest"]).payload) for row in rows]
    return {each.version: each.root for each in opened}


def test_a_back_up_is_whole_and_a_run_restored_from_it_goes_on_exactly_as_the_other(run: Run, tmp_path: Path) -> None:
    made = back_up(run, tmp_path / "copy", NOW)
    assert read_backup(tmp_path / "copy") == made and made.version == 2
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "copy" / "keys" / "run.key").stat().st_mode) == 0o600
    assert not list(run.folder.path.glob(".backup*")) and not list(tmp_path.glob(".copy*"))
    done = restore(tmp_path / "copy", tmp_path / "again", published=None, now_ms=NOW)
    assert (done.version, done.passed_over) == (2, 0)
    roots = []
    for each in (run, done.run):
        ledger = Ledger(each.folder.ledger)
        steps(Learner(each, ledger), 1)
        roots.append(policy_root(each.folder.policy(3)))
        assert [row.version for row in ledger.steps()] == [1, 2, 3]
        ledger.close()
    assert roots[0] == roots[1]


def test_a_run_is_backed_up_while_its_learner_makes_policies_and_prunes_them(run: Run, tmp_path: Path) -> None:
    """Each of the copies, taken at any moment of the steps, is one the run could have stopped at."""
    ledger = Ledger(run.folder.ledger)
    Gateway(run, ledger, seed=1).admit(24, 2)
    done = threading.Event()

    def learn() -> None:
        own = Ledger(run.folder.ledger)
        learner = Learner(run, own)
        while isinstance(learner.turn(), StepRow):
            pass
        own.close()
        done.set()

    learning = threading.Thread(target=learn)
    learning.start()
    seen = []
    while not done.is_set():
        target = tmp_path / f"copy-{len(seen)}"
        seen.append(back_up(run, target, NOW).version)
        again = restore(target, tmp_path / f"again-{len(seen)}", published=None, now_ms=NOW).run
        copy = Ledger(again.folder.ledger)
        found = copy.policy()
        assert found is not None and policy_root(again.folder.policy(found[0])) == found[1]
        assert [row.version for row in copy.steps()] == list(range(1, found[0] + 1))
        assert again.folder.step(found[0]).exists() and Learner(again, copy).version == found[0] == seen[-1]
        copy.close()
    learning.join()
    assert len(set(seen)) >= 2 and seen == sorted(seen)


def test_a_run_that_lost_policies_goes_on_under_numbers_that_nobody_has_seen(run: Run, tmp_path: Path) -> None:
    back_up(run, tmp_path / "copy", NOW)
    ledger = Ledger(run.folder.ledger)
    receipts = ledger.next_sequence()
    steps(Learner(run, ledger), 1)  # after the back-up: nodes saw policy 3, and the machine burnt
    sign(run, ledger)
    given = manifests(ledger)
    assert sorted(given) == [0, 1, 2, 3]
    done = restore(tmp_path / "copy", tmp_path / "again", published=3, now_ms=NOW)
    assert (done.version, done.passed_over) == (4, 1)
    other = Ledger(done.run.folder.ledger)
    sign(done.run, other)
    learner = Learner(done.run, other)
    assert learner.version == 4
    assert not other.view("SELECT 1 FROM events WHERE text LIKE '%the optimiser is new%'"), "it has its state"
    Gateway(done.run, other, seed=1).admit(8, 4)
    steps(learner, 1)
    sign(done.run, other)
    now_given = manifests(other)
    assert sorted(now_given) == [0, 1, 2, 4, 5] and now_given[4] == given[2]
    assert all(given[version] == now_given[version] for version in given.keys() & now_given.keys())
    assert other.next_sequence() > receipts + NUMBERS_PASSED_OVER
    states = {row["state"] for row in other.view("SELECT state FROM groups WHERE policy_version = 2")}
    assert GroupState.OPEN not in states
    assert other.view("SELECT SUM(expired) AS n FROM nodes") == [{"n": 0}], "nobody is blamed for the loss"


def test_the_log_of_a_run_that_lost_policies_goes_on_after_the_gap(run: Run, tmp_path: Path) -> None:
    back_up(run, tmp_path / "copy", NOW)
    done = restore(tmp_path / "copy", tmp_path / "again", published=40, now_ms=NOW)
    again = done.run
    ledger = Ledger(again.folder.ledger)
    with ledger.write():  # what waited is judged or given up, as the gateway does with time
        ledger._db.execute("UPDATE submissions SET state = 'NOT_JUDGED' WHERE state IN ('RECEIVED', 'AUDIT')")
        ledger.drop_stale_groups(41, "of an earlier policy")
        ledger._db.execute("DELETE FROM verdicts")  # fabricated ones carry no signature
    sign(again, ledger)
    registrar = Registrar(again, load_run_identity(again), AuditChain(load_secrets(again).audit))
    while (version := registrar.candidate(ledger)) is not None:
        assert registrar.record(ledger, registrar.draft(version, NOW))
    assert ledger.sealed() == 41 and not closable(ledger, 41, again.config)
    exported = export_log(again, ledger, tmp_path / "log", traces=False, policies=False)
    assert (exported.epochs, exported.sealed) == (42, 41)
    source = FolderSource(tmp_path / "log")
    assert read_index(source).passed_over == ((3, 40),)
    report = audit_run(source, Rejudge(source, None, 0, "cpu"))
    told = [(each.where, each.what) for each in report.disagreements if each.step in (1, 2)]
    assert told == [("epochs 3 to 40", "are missing: the trainer says that it lost them")]
    names = sorted(path.stem for path in (tmp_path / "log" / "epochs").iterdir())
    assert names == ["000000", "000001", "000002", "000041"]


def test_a_published_version_below_the_copy_s_own_is_refused(run: Run, tmp_path: Path) -> None:
    back_up(run, tmp_path / "copy", NOW)
    with pytest.raises(UsageError, match="the copy itself has policy 2"):
        restore(tmp_path / "copy", tmp_path / "again", published=1, now_ms=NOW)
    assert not (tmp_path / "again").exists()


def test_a_published_version_that_leaves_the_run_no_other_is_refused(run: Run, tmp_path: Path) -> None:
    back_up(run, tmp_path / "copy", NOW)
    with pytest.raises(UsageError, match=f"no policies above {LAST_VERSION}, so this one could not go on"):
        restore(tmp_path / "copy", tmp_path / "again", published=LAST_VERSION - 1, now_ms=NOW)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("version", ["9" * 5_000, str(2**63 - 1), str(2**20), "-1", "1.0", "²", ""])
def test_what_is_no_version_is_a_wrong_argument(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("restore", "copy", "run", "--published", version), ("export", "run", "out", "--version", version)):
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        assert (
            end.value.code == 2 and "is no version: give a whole number, 1,048,575 at most" in capsys.readouterr().err
        )


def test_a_back_up_replaces_an_older_one_of_the_same_run_and_nothing_else(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    back_up(run, target, NOW)
    assert back_up(run, target, NOW + 1).made_ms == NOW + 1
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match="is no back-up"):
        back_up(run, tmp_path / "photos", NOW)
    (target / "backup.json").write_text(json.dumps({**asdict(read_backup(target)), "run": "00" * 32}))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="of another run"):
        back_up(run, target, NOW)
    with pytest.raises(UsageError, match="inside the run"):
        back_up(run, run.folder.path / "copy", NOW)


def test_what_a_killed_back_up_left_is_cleared_by_the_next(run: Run, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for left in (run.folder.path / f".backup-{ended.pid}" / "policies", tmp_path / ".copy.making" / "keys"):
        left.mkdir(parents=True)
    back_up(run, tmp_path / "copy", NOW)
    assert not list(run.folder.path.glob(".backup*")) and not list(tmp_path.glob(".copy*"))


def test_a_back_up_that_does_not_fit_says_how_much_it_needs_and_leaves_the_last_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy"
    back_up(run, target, NOW)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(backup.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"the back-up needs .* [Mk]B, the disk of .* has 1 kB free: free .* more"):
        back_up(run, target, NOW + 1)
    found = read_backup(target)
    assert found is not None and found.made_ms == NOW and not list(tmp_path.glob(".copy*"))


def test_a_run_that_does_not_fit_says_how_much_is_missing_before_anything_is_copied(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, missing = back_up(run, tmp_path / "copy", NOW).bytes, 250_000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(backup.shutil, "disk_usage", lambda path: usage._replace(free=size - missing))
    monkeypatch.setattr(backup.shutil, "copy2", None)
    with pytest.raises(
        StorageError, match=r"the run needs .*, the disk of .* free: free 2\d\d kB more there or choose"
    ):
        restore(tmp_path / "copy", tmp_path / "again", published=None, now_ms=NOW)
    with pytest.raises(StorageError, match=r"the run needs .*: free 1,\d\d\d kB"):  # the policy lies there twice
        restore(tmp_path / "copy", tmp_path / "again", published=9, now_ms=NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "run"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can make a small disk")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_disk_that_fills_up_meanwhile_is_said_in_one_line(
    run: Run, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(run, tmp_path / "copy", NOW)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(backup.shutil, "disk_usage", lambda path: usage._replace(free=1 << 40))
    with pytest.raises(StorageError, match=r"written to .*: No space left on device \(.*\): make room there") as told:
        restore(tmp_path / "copy", small_disk / "run", published=None, now_ms=NOW)
    assert len(str(told.value)) < 500 and str(small_disk / ".run.making") in str(told.value)
    with pytest.raises(StorageError, match=r"(full|No space left .*): make room there or choose"):
        back_up(run, small_disk / "again", NOW)
    assert not list(small_disk.iterdir())


def test_a_back_up_is_not_served_and_says_how_to_make_a_run_of_it(run: Run, tmp_path: Path) -> None:
    back_up(run, tmp_path / "copy", NOW)
    with pytest.raises(UsageError, match="is a back-up: make a run of it with `rltrainer restore"):
        check_place(open_run(tmp_path / "copy").folder, moved=True)


def test_a_damaged_back_up_makes_no_run(run: Run, tmp_path: Path) -> None:
    back_up(run, tmp_path / "copy", NOW)
    weights = tmp_path / "copy" / "policies" / "000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(LocalError, match="is not what the run published: take another back-up"):
        restore(tmp_path / "copy", tmp_path / "again", published=None, now_ms=NOW)
    assert not (tmp_path / "again").exists()


def test_a_run_that_is_served_is_backed_up_and_not_copied_and_a_plain_copy_can_be_restored(
    run: Run, tmp_path: Path
) -> None:
    with locked(run), pytest.raises(UsageError, match=f"is served, by process {os.getpid()}: back it up"):
        restore(run.folder.path, tmp_path / "again", published=None, now_ms=NOW)
    shutil.copytree(run.folder.path, tmp_path / "plain")
    assert restore(tmp_path / "plain", tmp_path / "again", published=7, now_ms=NOW).version == 8


def test_a_copy_of_a_run_is_not_served_before_a_person_says_that_the_other_is_not(run: Run, tmp_path: Path) -> None:
    with locked(run):
        pass
    shutil.copytree(run.folder.path, tmp_path / "plain")
    copy = open_run(tmp_path / "plain")
    with pytest.raises(UsageError, match=r"is a copy of the run served from .* in .*--moved") as told, locked(copy):
        pass
    assert str(run.folder.path) in str(told.value)
    with locked(copy, moved=True):
        pass
    with locked(copy):  # from now on this is its place
        pass
    run.folder.path.rename(tmp_path / "elsewhere")
    with locked(open_run(tmp_path / "elsewhere")):  # a folder that was moved is no copy
        pass


def test_the_commands_say_what_comes_next(run: Run, tmp_path: Path) -> None:
    copied = rltrainer("backup", run.folder.path, tmp_path / "copy")
    assert copied.returncode == 0 and "it holds the run's key" in copied.stdout
    asked = rltrainer("restore", tmp_path / "copy", tmp_path / "again")
    assert asked.returncode == 2 and "--published" in asked.stderr and "--nothing-lost" in asked.stderr
    restored = rltrainer("restore", tmp_path / "copy", tmp_path / "again", "--published", "5", "--json")
    assert json.loads(restored.stdout) == {"folder": str(tmp_path / "again"), "version": 6, "passed_over": 3}


def rltrainer(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.cli", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
