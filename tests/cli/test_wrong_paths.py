"""What newcomers give the commands in place of what they take: told at once, before anything that takes seconds to
import, with what to do instead; and outputs that cannot be written, which leave nothing that looks whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.cli import main as rlnode
from protocol.run import EnvironmentShare
from trainer.cli import main as rltrainer
from trainer.config import TrainerConfig
from trainer.init import EMBEDDED, init_run
from verify.cli import main as rlverify

ROOT = Path(__file__).parents[2]
README = str(ROOT / "README.md")
SLOW = {"torch", "transformers", "libp2p", "vllm", "fastapi", "uvicorn"}

LONG = "x" * 300  # no file system takes it: asking whether it is there raises, as in a folder that one may not enter

# One process for each command: which of what it takes is wrong → what it says.
WRONG = {
    "trainer.cli": {
        ("status", README): "is a file, and a run is the folder that `rltrainer init` makes: give that folder",
        ("serve", README): "is a file, and a run is the folder",
        ("export-log", README, "{}/log"): "is a file, and a run is the folder",
        ("export-trace", README): "is a file, and a run is the folder",
        ("publish", README, "--mirror", "{}/mirror"): "is a file, and a run is the folder",
        ("quarantine", README): "is a file, and a run is the folder",
        ("status", "{}/none"): "there is no folder",
        ("status", "{}"): "is not a run, it has no config.toml",
        ("status", README + "/x"): "there is no folder",
        ("init", "{}/run", "--policy", "{}/none"): "is not a folder: a policy is a Hugging Face model folder",
        ("init", LONG): "File name too long",
        ("init", "{}/run", "--policy", LONG): "File name too long",
        ("serve", LONG): "File name too long",
        ("status", LONG): "File name too long",
        ("doctor", LONG): "File name too long",
        ("export-log", LONG, "{}/log"): "File name too long",
        ("backup", LONG, "{}/copy"): "File name too long",
        ("restore", LONG, "{}/run", "--nothing-lost"): "File name too long",
        ("publish", LONG, "--mirror", "{}/mirror"): "File name too long",
    },
    "verify.cli": {
        ("check", README, "--policy", str(EMBEDDED)): "give a file that `rltrainer export-trace` wrote",
        ("check", "{}/none", "--policy", str(EMBEDDED)): "No such file or directory: give a file that",
        ("check", README + "/x", "--policy", str(EMBEDDED)): "Not a directory: give a file that",
        ("inspect", README): "give a file that `rltrainer export-trace` wrote",
        ("audit", README): "is a file: give the folder that `rltrainer export-log` wrote, or the URL",
        ("audit", "{}/none"): "there is no folder",
        ("audit", "{}"): "this is not the log of a run",
        ("audit", README + "/x"): "Not a directory: give the folder that",
        ("policy", README, "--manifest", README): "give manifests/NNNNNN.msgpack of a mirror",
        ("check", LONG, "--policy", str(EMBEDDED)): "File name too long",
        ("audit", LONG): "File name too long",
        ("policy", LONG, "--manifest", LONG): "File name too long",
        ("controls", "--policy", LONG): "File name too long",
        ("controls", "--policy", README): "is not a folder: a policy is",
        ("controls", "--policy", str(EMBEDDED), "--html", "{}/none/page"): "make it, or choose another place",
        ("controls", "--policy", str(EMBEDDED), "--html", "{}"): "is a folder: name the file that the page",
        ("controls", "--policy", str(EMBEDDED), "--environment", "chess@1"): "there is no environment 'chess@1'",
        ("controls", "--policy", str(EMBEDDED), "--dtype", "int3"): "no limits were measured for a int3 worker",
    },
    "node.cli": {
        ("join", "http://127.0.0.1:8420"): "is a web address, the page of a run perhaps",
        ("join", ""): "has no /run/ part: copy the whole line",
        ("doctor", "https://example.org/run"): "is a web address",
        ("status", "--home", README): "is not a folder: give --home the folder",
        ("store", "ls", "--home", README): "is not a folder: give --home the folder",
        ("key", "show", "--home", README): "is not a folder: give --home the folder",
        ("key", "restore", LONG, "--home", "{}/none"): "is not there: name the file that",
        ("join", "--home", "{}/none"): "has no address yet: rlnode join ADDRESS",
    },
}
_CALIBRATE = ("calibrate", "--worker-dtype", "float32", "--verifier-dtype", "float32", "--policy")
WRONG["verify.cli"] |= {
    (*_CALIBRATE, README, "--out", "{}/c"): "is not a folder: a policy is",
    (*_CALIBRATE, str(EMBEDDED), "--out", "{}"): "is a folder: name the file that the calibration",
    (*_CALIBRATE, str(EMBEDDED), "--out", "/dev/null"): "exists already: move it away, or write elsewhere",
    (*_CALIBRATE, str(EMBEDDED), "--out", "{}/c", "--traces", README): "give the folder of the trace files",
    (*_CALIBRATE, str(EMBEDDED), "--out", "{}/c", "--key", README + "/k"): "the key that signs cannot be written",
    (*_CALIBRATE, str(EMBEDDED), "--out", "{}/c", "--key", "{}/./c"): "name a file for each",
    (*_CALIBRATE, str(EMBEDDED), "--out", "{}/c", "--key", "{}"): "or give --key a free name, where a new key is made",
}


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (rltrainer, ("init", "")),
        (rltrainer, ("init", "run", "--policy", "")),
        (rltrainer, ("backup", "run", "")),
        (rltrainer, ("restore", "", "run", "--nothing-lost")),
        (rltrainer, ("export-trace", "run", "-o", "")),
        (rltrainer, ("export-trace", "run", "--verdict=")),
        (rlverify, ("check", "", "--policy", "policy")),
        (rlverify, ("check", "trace", "--policy", "")),
        (rlverify, ("audit", "")),
        (rlverify, ("audit", "log", "--policies", "")),
        (rlnode, ("status", "--home", "")),
        (rlnode, ("key", "backup", "")),
    ],
)
def test_an_empty_word_is_not_the_folder_one_is_in(
    main: Callable[[list[str]], int], words: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    assert "it is empty: name a file or a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import contextlib, importlib, io, json, sys
main, found = importlib.import_module(sys.argv[1]).main, []
for words in json.loads(sys.argv[2]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(words)
    found.append([code, said.getvalue(), sorted(set(sys.modules) & set(json.loads(sys.argv[3])))])
print(json.dumps(found))
"""


@pytest.mark.parametrize("module", WRONG)
def test_a_wrong_path_is_told_in_one_line_before_anything_slow_is_imported(module: str, tmp_path: Path) -> None:
    lists = [[word.replace("{}", str(tmp_path)) for word in words] for words in WRONG[module]]
    environment = {**os.environ, "RLNODE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, json.dumps(lists), json.dumps(sorted(SLOW))],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words, told, (code, said, slow) in zip(lists, WRONG[module].values(), json.loads(done.stdout), strict=True):
        assert code == 2 and told in said, (words, code, said)
        assert len(said.splitlines()) == 1 and "Errno" not in said and "None" not in said, (words, said)
        assert slow == [], (words, "imports", slow)
    assert list(tmp_path.iterdir()) == [], "something was made"


# --- outputs ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    path = tmp_path_factory.mktemp("run") / "run"
    return init_run(path, name="test", policy="embedded", environments=shares, config=TrainerConfig()).folder.path


Told = tuple[int, str]


def exported(run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    code = rltrainer(["export-log", str(run), str(out)])
    said = capsys.readouterr().err
    assert len(said.splitlines()) == (code != 0) and "None" not in said and "Errno" not in said, said
    return code, said


def test_a_log_goes_into_a_folder_of_its_own(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out, told in (
        (Path("/dev/full"), "/dev/full is not a folder: name the folder"),
        (tmp_path / "notes.txt", "is not a folder: name the folder"),
        (tmp_path / "notes.txt" / "log", "Not a directory"),
        (tmp_path, "holds other things (notes.txt): choose an empty folder, or one of this run's log"),
        (Path("/proc/log"), "choose another place"),
    ):
        code, said = exported(run, out, capsys)
        assert code == 2 and told in said, (out, said)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_export_that_never_got_as_far_as_its_index_is_gone_on_with(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "epochs").mkdir()
    (tmp_path / ".log.json.new").write_text("{")
    assert exported(run, tmp_path, capsys)[0] == 0
    assert json.loads((tmp_path / "log.json").read_text())["complete"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_one_may_not_read_or_write_is_said_with_what_to_do(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked, trace = tmp_path / "locked", tmp_path / "trace.msgpack"
    locked.mkdir(mode=0o500)
    code, said = exported(run, locked / "log", capsys)
    assert code == 2 and "Permission denied" in said and "choose another place" in said
    trace.touch(mode=0o000)
    assert rlverify(["check", str(trace), "--policy", str(EMBEDDED)]) == 2
    assert "Permission denied: give a file that" in capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_leaves_no_half_log_that_looks_whole(
    run: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filler, log = small_disk / "filler", small_disk / "log"

    def fill(leave: int) -> None:
        """All of the disk but so many pages."""
        filler.unlink(missing_ok=True)
        room = os.statvfs(small_disk)
        filler.write_bytes(bytes((room.f_bavail - leave) * room.f_frsize))

    for pages in (0, 1):  # nothing can be written; the index can be, and nothing after it
        fill(pages)
        code, said = exported(run, log, capsys)
        assert code == 3 and "No space left on device" in said and "make room there" in said, said
        assert rlverify(["audit", str(log)]) == 2, "half a log is no log"
        capsys.readouterr()
    filler.unlink()
    assert exported(run, log, capsys)[0] == 0
    whole = json.loads((log / "log.json").read_text())
    fill(0)
    code, said = exported(run, log, capsys)
    assert code == 3 and "No space left on device" in said
    assert json.loads((log / "log.json").read_text()) == whole, "what was there before is whole still"
    assert not list(log.rglob("*.new"))


@pytest.mark.parametrize("out", ["/dev/full", "{}/none/trace", "{}"])
def test_a_trace_that_cannot_be_written_there_is_said(
    run: Path, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = rltrainer(["export-trace", str(run), "-o", out.replace("{}", str(tmp_path))])
    assert code == 2 and "no accepted trace is kept in this run yet: wait for one" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
