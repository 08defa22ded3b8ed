"""rlnode as a person or a script meets it: what it prints, and with which code it exits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from node.store import run_folder, save_address
from protocol import messages
from protocol.errors import Code, RemoteError
from protocol.identity import Identity, save_identity
from protocol.net import p2p
from protocol.net.base import Host
from protocol.run import RunAddress
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import SmallTrainer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
NOBODY = RunAddress("/ip4/127.0.0.1/tcp/9", Identity(b"\1" * 32).node, b"\2" * 32)


def rlnode(*words: object, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", *map(str, words)]
    if home is not None:
        command += ["--home", str(home)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


# --- without a trainer ---


def test_help_names_the_exit_codes_and_loads_no_heavy_library() -> None:
    heavy = "import sys; from node.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n" + (
        "assert not {'torch', 'transformers', 'libp2p', 'trio', 'rich'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("join", "doctor", "status", "reaudit", "key", "exit codes:", "130"):
        assert word in done.stdout


def test_wrong_arguments_exit_2() -> None:
    assert rlnode("dance").returncode == 2
    assert rlnode("join", "--gpu", "0", "--cpu").returncode == 2


def test_join_without_an_address_says_where_to_get_one(tmp_path: Path) -> None:
    done = rlnode("join", "--cpu", home=tmp_path)
    assert done.returncode == 2
    assert "has no address yet: rlnode join ADDRESS" in done.stderr


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("hello", "has no /run/ part"),
        (str(NOBODY).replace("/p2p/", "/q2q/"), "has no /p2p/ part"),
        (str(NOBODY)[:-1], "is not 64 hex digits"),
    ],
)
def test_an_address_that_is_none_is_explained(tmp_path: Path, address: str, told: str) -> None:
    done = rlnode("join", address, home=tmp_path)
    assert done.returncode == 2 and told in done.stderr
    assert "Traceback" not in done.stderr


def test_values_that_cannot_be_are_explained(tmp_path: Path) -> None:
    done = rlnode("join", NOBODY, "--slots", "0", home=tmp_path)
    assert done.returncode == 2 and "--slots must be 1 to 4096" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpu", "first"), "--gpu takes the number of a CUDA device, or several as in 0,1, not 'first'"),
        (("--gpu", "0,1", "--engine", "transformers"), "several cards for one policy are vLLM's work"),
        (("--max-vram", "0"), "--max-vram must be more than 0 GiB"),
        (("--nice", "20"), "--nice is from 0 to 19"),
    ],
)
def test_a_machine_that_cannot_be_meant_is_explained(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    done = rlnode("join", NOBODY, *words, home=tmp_path)
    assert done.returncode == 2 and told in done.stderr


def test_a_card_that_is_not_there_is_a_fault_of_this_machine(tmp_path: Path) -> None:
    done = rlnode("join", NOBODY, "--gpu", "63", "--engine", "transformers", home=tmp_path)
    assert done.returncode == 3 and "there is no CUDA device 63" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--upload-cap", "0"), "to give nothing there is --no-serve"),
        (("--mirror", "example.org/run"), "give the URL of its folder"),
        (("--relay", "example.org:4002"), "is not an address"),
    ],
)
def test_what_a_node_gives_and_whence_it_takes_must_make_sense(
    tmp_path: Path, words: tuple[str, str], told: str
) -> None:
    done = rlnode("join", NOBODY, *words, home=tmp_path)
    assert done.returncode == 2 and told in done.stderr


def test_a_relay_says_where_it_is_joined_and_stops_when_told(tmp_path: Path) -> None:
    words = ("relay", str(NOBODY), "--json", "--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(tmp_path))
    command = [sys.executable, "-m", "node.cli", *words]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["event"] == "listening" and said["address"].startswith("/ip4/127.0.0.1/tcp/")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_relay_needs_a_run_and_a_rate(tmp_path: Path) -> None:
    assert "rlnode relay ADDRESS" in rlnode("relay", home=tmp_path).stderr
    done = rlnode("relay", NOBODY, "--rate", "0", home=tmp_path)
    assert done.returncode == 2 and "--rate must be more than 0" in done.stderr


def test_a_key_is_backed_up_and_restored(tmp_path: Path) -> None:
    home, other, copy = tmp_path / "home", tmp_path / "other", tmp_path / "copy.key"
    none = rlnode("key", "show", home=home)
    assert none.returncode == 2 and f"there is no key in {home}: give --home" in none.stderr
    assert rlnode("key", "backup", copy, home=home).returncode == 2 and not home.exists() and not copy.exists()
    identity = Identity.generate()
    save_identity(identity, home / "key")
    shown = rlnode("key", "show", home=home)
    assert shown.stdout.strip() == identity.peer_id
    saved = rlnode("key", "backup", copy, home=home)
    assert saved.returncode == 0 and copy.stat().st_mode & 0o777 == 0o600
    again = rlnode("key", "backup", copy, home=home)  # never overwritten
    assert again.returncode == 2 and f"{copy} exists already and is not overwritten: name another" in again.stderr
    below = rlnode("key", "backup", copy / "below", home=home)
    assert below.returncode == 2 and "choose another place" in below.stderr
    restored = rlnode("key", "restore", copy, home=other)
    assert restored.returncode == 0 and identity.peer_id in restored.stdout
    assert rlnode("key", "show", home=other).stdout.strip() == identity.peer_id
    over = rlnode("key", "restore", copy, home=home)  # nor is an identity
    assert over.returncode == 2 and "has a key already" in over.stderr and identity.peer_id in saved.stdout


def test_what_is_no_backup_is_said_before_who_may_read_it(tmp_path: Path) -> None:
    trace, home = tmp_path / "trace.msgpack", tmp_path / "home"
    trace.write_bytes(b"\x82\xff" * 99)
    trace.chmod(0o644)
    for path, told in (
        (trace, f"{trace} is not a key file: it should hold 64 hex digits"),
        (tmp_path / "none", "none is not there: name the file that `rlnode key backup` wrote"),
        (tmp_path, "is not a file: name the file"),
    ):
        done = rlnode("key", "restore", path, home=home)
        assert done.returncode == 2 and told in done.stderr and not home.exists(), done.stderr


def test_a_home_that_cannot_be_made_is_the_person_s_to_change(tmp_path: Path) -> None:
    for words in (("join", NOBODY, "--cpu"), ("key", "new")):
        done = rlnode(*words, home=Path("/proc/nx"))
        assert done.returncode == 2 and "/proc/nx: No such file or directory: choose another place" in done.stderr


def test_the_id_of_a_node_can_be_had_before_it_joins(tmp_path: Path) -> None:
    made = rlnode("key", "new", home=tmp_path / "home")
    assert made.returncode == 0 and made.stdout.startswith("12D3KooW"), made.stderr
    assert rlnode("key", "show", home=tmp_path / "home").stdout == made.stdout
    again = rlnode("key", "new", home=tmp_path / "home")
    assert again.returncode == 2 and f"has a key already: it is {made.stdout.strip()}" in again.stderr


def test_a_key_that_others_can_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("11" * 32)
    (tmp_path / "key").chmod(0o644)
    done = rlnode("join", NOBODY, home=tmp_path)
    assert done.returncode == 3 and f"chmod 600 {tmp_path}/key" in done.stderr


def test_status_before_the_first_join_says_so(tmp_path: Path) -> None:
    done = rlnode("status", home=tmp_path)
    assert done.returncode == 2 and "no node has run in" in done.stderr


def test_doctor_without_a_reachable_trainer_exits_1_and_says_why(tmp_path: Path) -> None:
    done = rlnode("doctor", NOBODY, home=tmp_path)
    assert done.returncode == 1
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines["identity"].startswith("ok") and lines["packages"].startswith("ok")
    assert lines["trainer"].startswith("act") and "nobody listens there" in lines["trainer"]


def test_doctor_of_a_home_without_an_address_says_what_is_missing(tmp_path: Path) -> None:
    done = rlnode("doctor", "--json", home=tmp_path)
    assert done.returncode == 1
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    (trainer,) = [each for each in findings if each["what"] == "trainer"]
    assert trainer["level"] == "act" and "no address" in trainer["text"]


# --- with a trainer, over real sockets ---


@asynccontextmanager
async def serving(trainer: SmallTrainer) -> AsyncIterator[Host]:
    trainer.publish(EMBEDDED, 0)
    with trio.fail_after(100):
        async with p2p.open_host(trainer.identity, listen=("/ip4/127.0.0.1/tcp/0",)) as host:
            trainer.serve(host)
            yield host


async def run(*words: object, home: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "node.cli", *map(str, words), "--home", str(home)]
    return await trio.run_process(
        command, cwd=ROOT, env=ENVIRONMENT, capture_stdout=True, capture_stderr=True, check=False
    )


def start(home: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "node.cli", *map(str, words), "--home", str(home)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)


async def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = await trio.to_thread.run_sync(process.communicate)
    return out, err


def test_join_works_until_ctrl_c_and_the_next_join_needs_no_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SmallTrainer()
        async with serving(trainer) as host:
            await first_join(trainer, host, tmp_path)
            await second_join(trainer, tmp_path)

    trio.run(scenario)


async def first_join(trainer: SmallTrainer, host: Host, home: Path) -> None:
    """As a script runs it: one event a line."""
    process = start(home, "join", trainer.address(host), "--cpu", "--json", "--slots", "8")
    try:
        await trainer.until(lambda: len(trainer.traces) >= 8)
        status = json.loads((await run("status", "--json", home=home)).stdout)
        assert status["running"] and status["process"] == process.pid and status["connected"]
        beside = await run("join", trainer.address(host), home=home)
        assert beside.returncode == 3 and b"another rlnode (process" in beside.stderr
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = await ended(process)
    finally:
        process.kill()
    assert process.returncode == 0 and err == ""
    assert time.monotonic() - began < 6  # stop_seconds and the interpreter's end, on a busy machine
    names = [json.loads(line)["event"] for line in out.splitlines()]
    for name in ("started", "connected", "policy_fetched", "policy_loaded", "trace_drawn", "stopping"):
        assert name in names
    assert trainer.hellos[0].engine.name == "transformers" and trainer.hellos[0].software.startswith("rlcommons ")
    drawn = {(trace.lease_id, trace.slot) for trace in trainer.traces.values()}
    for lease in trainer.leases.values():
        whole = all((lease.lease_id, slot.index) in drawn for slot in lease.slots)
        assert whole or lease.lease_id in trainer.returned
    status = json.loads((await run("status", "--json", home=home)).stdout)
    assert not status["running"] and status["state"] == "stopped"
    assert status["traces_received"] == len(trainer.traces)


async def second_join(trainer: SmallTrainer, home: Path) -> None:
    """As a person runs it, with address and policy kept: plain lines, and soon at work."""
    times: dict[str, float] = {}
    trainer.on_request = lambda request: times.setdefault(type(request).__name__, time.monotonic()) and None
    process = start(home, "join")
    try:
        await trainer.until(lambda: "GetLeases" in times)
        process.send_signal(signal.SIGTERM)
        out, err = await ended(process)
    finally:
        process.kill()
    assert process.returncode == 0 and err == ""
    # The bar: under 3 s from join to the first lease, weights present, imports not counted.
    assert times["GetLeases"] - times["Hello"] < 3
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in out.splitlines()]
    assert re.fullmatch(rf"this node is 12D3KooW\w+, home {re.escape(str(home))}", lines[0])
    assert lines[1].startswith("loading the libraries of the network and of the engine (transformers); ")
    assert re.fullmatch(r"joined run 'small' at 12D3KooW\w+ \(rltrainer 9.9, protocol 1.0\), policy 0", lines[2])
    assert not any("policy 0 is here" in line for line in lines)
    assert "stopping: sending what is finished, giving leases back" in lines


def test_a_refusal_that_waiting_does_not_heal_exits_1(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SmallTrainer()
        trainer.on_request = lambda request: RemoteError(Code.BANNED, "banned: 20 traces failed MARGIN")
        async with serving(trainer) as host:
            done = await run("join", trainer.address(host), "--json", home=tmp_path)
            assert done.returncode == 1
            last = json.loads(done.stdout.splitlines()[-1])
            assert (last["event"], last["error"], last["exit"]) == ("failed", "BANNED", 1)
            assert last["text"] == "banned: 20 traces failed MARGIN"

    trio.run(scenario)


def test_a_second_ctrl_c_does_not_wait_for_the_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SmallTrainer()
        async with serving(trainer) as host:
            process = start(tmp_path, "join", trainer.address(host), "--json")
            try:
                await trainer.until(lambda: len(trainer.traces) >= 1)
                trainer.on_request = lambda request: RemoteError(Code.BUSY, "not now")
                process.send_signal(signal.SIGINT)
                assert process.stdout is not None
                while '"stopping"' not in await trio.to_thread.run_sync(process.stdout.readline):
                    pass
                process.send_signal(signal.SIGINT)
                await ended(process)
            finally:
                process.kill()
            assert process.returncode == 130

    trio.run(scenario)


def test_doctor_finds_nothing_to_do_where_all_is_well(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SmallTrainer()
        async with serving(trainer) as host:
            done = await run("doctor", trainer.address(host), "--json", home=tmp_path)
            findings = {each["what"]: each for each in map(json.loads, done.stdout.splitlines())}
            assert done.returncode == 0, findings
            assert findings["trainer"]["text"].startswith("run 'small' at 12D3KooW")
            assert findings["policy"]["text"] == "version 0, 213.0 KiB"
            assert {"identity", "packages", "device", "home", "clock", "disk", "memory"} <= set(findings)

    trio.run(scenario)


def test_doctor_names_a_clock_that_is_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SmallTrainer(clock_offset_ms=3_600_000)
        async with serving(trainer) as host:
            done = await run("doctor", trainer.address(host), home=tmp_path)
            assert done.returncode == 1
            assert b"60 minutes behind the trainer's" in done.stdout

    trio.run(scenario)


def test_a_re_audit_is_asked_for_by_the_command_itself_when_no_node_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SmallTrainer()
        async with serving(trainer) as host:
            address = trainer.address(host)
            save_address(tmp_path, address)
            save_identity(Identity.generate(), tmp_path / "key")
            log = run_folder(tmp_path, address.run) / "verdicts.log"
            log.parent.mkdir(parents=True)
            log.write_text(json.dumps({"trace": "ab" * 32}) + "\n")
            asked: list[bytes] = []
            answers = {"granted": True, "text": "another auditor recomputes it"}

            def answer(request: object) -> messages.AuditAsked | None:
                if not isinstance(request, messages.AskAudit):
                    return None
                asked.append(request.digest)
                return messages.AuditAsked(**answers)

            trainer.on_request = answer
            done = await run("reaudit", "abab", home=tmp_path)
            assert (done.returncode, done.stdout) == (0, b"another auditor recomputes it\n"), done.stderr
            assert asked == [b"\xab" * 32]
            answers |= {"granted": False, "text": "it was audited again already"}
            done = await run("reaudit", "ab", "--json", home=tmp_path)
            assert done.returncode == 1
            assert json.loads(done.stdout) == {"event": "reaudit", "trace": "ab" * 32, **answers}
            done = await run("reaudit", "cd", home=tmp_path)
            assert done.returncode == 2 and b"begins with cd" in done.stderr

    trio.run(scenario)
