"""A node killed (-9) at every write of fetching, applying and removing policies goes on at its next start: what it
makes has the signed root, only what was in flight is fetched again, and nothing half-made stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from node.housekeeping import look, verify
from node.store import run_folder
from protocol import codec
from protocol.policy import policy_root
from tests.node.dying_process import IN_FLIGHT, make_trainer
from tests.node.rig import EMBEDDED
from tests.node.stepping import step

ROOT = Path(__file__).parents[2]
Folders = tuple[Path, ...]


def outcomes(job: str, where: Path, start: Path | None, folders: Folders) -> list[dict[str, Any]]:
    """What dying_process.py says of a job."""
    where.mkdir()
    command = [sys.executable, "-m", "tests.node.dying_process", job, str(where), str(start or ""), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(each["ended"] == 0 for each in found if each.get("point", "") in ("", "beside")), done.stderr
    return found


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    where = tmp_path_factory.mktemp("versions")
    return (EMBEDDED, step(EMBEDDED, where / "v1", 1))


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory, versions: Folders) -> tuple[Path, list[dict[str, Any]]]:
    """Version 0 fetched as files, killed at every write."""
    where = tmp_path_factory.mktemp("files") / "jobs"
    return where / "once" / "home", outcomes("follow", where, None, versions[:1])


def asked_for(where: Path) -> Counter[str]:
    path = where / "asked"
    return Counter(path.read_text().split() if path.exists() else ())


def assert_in_order(home: Path, folders: Folders) -> None:
    """The newest version alone, exactly as signed, the pieces of the delta to it, and nothing half-made."""
    trainer = make_trainer(folders)
    newest = trainer.policies[len(folders) - 1].manifest
    where = run_folder(home, trainer.run)
    (policy,) = (where / "policies").iterdir()
    assert policy_root(policy) == newest.root
    deltas = {blob.digest.hex() for delta in newest.deltas for blob in delta.blobs}
    assert {path.name for path in (where / "blobs").iterdir()} <= deltas
    assert not [path for path in home.rglob("*") if path.name.endswith(".unfinished")]
    assert not list(verify(home))


def assert_all_went_on(found: list[dict[str, Any]], folders: Folders) -> set[str]:
    """The writes that there were."""
    once, *kills = found
    wanted = asked_for(Path(once["where"]))
    assert wanted.total() == len(wanted) > 0
    for each in kills:
        where = Path(each["where"])
        assert (each["killed"], each["ended"]) == (-signal.SIGKILL, 0), each
        asked = asked_for(where)
        assert set(asked) == set(wanted) and asked.total() <= len(wanted) + IN_FLIGHT, (each, asked)
        assert_in_order(where / "home", folders)
    return {each["point"] for each in kills}


def test_killed_at_any_write_of_a_download_it_fetches_again_at_most_what_was_in_flight(
    versions: Folders, fetched: tuple[Path, list[dict[str, Any]]]
) -> None:
    points = assert_all_went_on(fetched[1], versions[:1])
    assert {
        "open blobs/DIGEST.unfinished",
        "fsync blobs/DIGEST.unfinished",
        "rename blobs/DIGEST",
        "mkdir policies/VERSION.unfinished",
        "open policies/VERSION.unfinished/model.safetensors",
        "rename policies/VERSION.unfinished/manifest.msgpack",
        "rename policies/VERSION",
        "remove blobs/DIGEST",
    } <= points


def test_killed_at_any_write_of_a_delta_it_is_applied_again_and_nothing_of_it_is_fetched_twice(
    tmp_path: Path, versions: Folders, fetched: tuple[Path, list[dict[str, Any]]]
) -> None:
    found = outcomes("follow", tmp_path / "jobs", fetched[0], versions)
    points = assert_all_went_on(found, versions)
    assert {
        "rename blobs/DIGEST",
        "open policies/VERSION.unfinished/model.safetensors",
        "fsync policies/VERSION.unfinished/model.safetensors",
        "rename policies/VERSION",
        "rename policies/VERSION.gone.unfinished",  # of the version before, pruned
        "remove inside a folder",
    } <= points
    # Nothing but the delta came, whenever it was killed.
    trainer = make_trainer(versions)
    delta = {blob.digest.hex() for blob in trainer.policies[1].manifest.deltas[0].blobs}
    assert set(asked_for(Path(found[0]["where"]))) == delta


def test_a_gc_killed_at_any_write_leaves_nothing_that_looks_whole(
    tmp_path: Path, versions: Folders, fetched: tuple[Path, list[dict[str, Any]]]
) -> None:
    start = tmp_path / "start"
    shutil.copytree(fetched[0], start)
    policies = run_folder(start, make_trainer(versions).run) / "policies"
    # A second, newer policy: the same one under its next version.
    trainer = make_trainer((EMBEDDED, EMBEDDED))
    newer = trainer.policies[1]
    (older,) = policies.iterdir()
    copy = policies / f"v00000001-{newer.manifest.root.hex()[:16]}"
    shutil.copytree(older, copy)
    (copy / "manifest.msgpack").write_bytes(codec.encode(newer.signed))
    _, *kills = outcomes("gc", tmp_path / "jobs", start, versions[:1])
    assert {"rename policies/VERSION.gone.unfinished", "remove inside a folder"} <= {each["point"] for each in kills}
    for each in kills:
        assert each["killed"] == -signal.SIGKILL and each["ended"] == 0
        for home in (Path(each["where"]) / "killed", Path(each["where"]) / "home"):
            assert not list(verify(home)), each
        assert [policy.version for holding in look(home) for policy in holding.policies] == [1]
        assert not [path for path in home.rglob("*") if path.name.endswith(".unfinished")]


def test_two_processes_share_a_home_while_one_of_them_is_killed(
    tmp_path: Path, versions: Folders, fetched: tuple[Path, list[dict[str, Any]]]
) -> None:
    """`rlnode store ls`, `verify` and `gc` run all the time beside a node that is killed again and again."""
    *kills, last, beside = outcomes("beside", tmp_path / "jobs", fetched[0], versions)
    assert [each["ended"] for each in kills] == [-signal.SIGKILL] * 4
    assert last["ended"] == beside["ended"] == 0
    assert_in_order(tmp_path / "jobs" / "home", versions)
