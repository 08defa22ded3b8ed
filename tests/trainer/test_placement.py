"""Who generates, and whom a person trusts: the home engine as a node of this machine's own, and the nodes named."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from protocol.device_turns import ENGINE, Look, Turns, turns
from protocol.diagnosis import Level
from protocol.errors import LocalError, UsageError
from protocol.identity import Identity, load_identity, peer_id
from protocol.run import EnvironmentShare
from trainer import home, serve
from trainer.child import show_life
from trainer.config import TrainerConfig, load_config, write_config
from trainer.doctor import examine
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionState
from trainer.naming import name_nodes, nodes_of
from trainer.pacing import Consumption, why_begin_nothing
from trainer.rundir import Run, open_run
from trainer.stall import MOST_RESTARTS, Seen
from trainer.summary import summary
from trainer.view import render

NODE, OTHER, AT_HOME = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
# A peer id of an RSA key, as older libp2p nodes have.
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    config = TrainerConfig(listen="/ip4/127.0.0.1/tcp/0", page_port=0)
    path = tmp_path_factory.mktemp("template") / "run"
    return init_run(path, name="test", policy="embedded", environments=shares, config=config).folder.path


@pytest.fixture
def run(tmp_path: Path, template: Path) -> Run:
    return open_run(Path(shutil.copytree(template, tmp_path / "run")))


@pytest.fixture
def ledger(run: Run) -> Iterator[Ledger]:
    opened = Ledger(run.folder.ledger)
    yield opened
    opened.close()


def configured(run: Run, **settings: object) -> Run:
    write_config(TrainerConfig(**settings), run.folder.config)  # type: ignore[arg-type]
    return open_run(run.folder.path)


# --- whom a person trusts ---


def test_nodes_are_named_by_peer_id_and_the_home_engine_as_self() -> None:
    words = (NODE.peer_id, "self")
    assert nodes_of(words, "--trust", trainer=OTHER.node, home=AT_HOME.node) == {NODE.node, AT_HOME.node}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("12D3KooW", "--trust: '12D3KooW' is not an Ed25519 peer id .*rlnode key show"),
        ("", "--trust: '' is not an Ed25519 peer id"),
        (RSA, "is not an Ed25519 peer id"),
        (OTHER.peer_id, "is this trainer's own id: name nodes"),
        ("self", "self is the home engine, and there is none: add --placement colocated, or both"),
    ],
)
def test_what_names_no_node_is_said_with_what_to_do(word: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        nodes_of((NODE.peer_id, word), "--trust", trainer=OTHER.node, home=None)


def test_trust_of_the_settings_is_given_once_and_that_of_the_command_each_time(run: Run, ledger: Ledger) -> None:
    run = configured(run, trust=(NODE.peer_id,))
    assert load_config(run.folder.config).trust == (NODE.peer_id,)
    name_nodes(run, ledger, AT_HOME.node, ("self",))
    assert ledger.trusted() == {NODE.node, AT_HOME.node} and ledger.home() == AT_HOME.node
    for node in (NODE.node, AT_HOME.node):
        ledger.add_verdict(node, b"\x01" * 32, "REFUSED", "REWARD", False, 1, b"signed")  # type: ignore[arg-type]
        ledger.add_verdict(node, b"\x02" * 32, "REFUSED", "LEASE_EXPIRED", False, 2, b"late")  # type: ignore[arg-type]
    assert ledger.trusted() == frozenset()
    assert ledger.trust(NODE.node, 0) == 0, "as of before it lied it was trusted"
    name_nodes(run, ledger, AT_HOME.node, ())
    assert ledger.trusted() == frozenset(), "started again by itself, the run trusts nobody anew"
    name_nodes(run, ledger, AT_HOME.node, (NODE.peer_id,))
    assert ledger.trusted() == {NODE.node}
    name_nodes(configured(run), ledger, None, ())
    assert ledger.trusted() == frozenset() and ledger.home() is None


def test_a_late_trace_costs_no_trust(run: Run, ledger: Ledger) -> None:
    name_nodes(run, ledger, None, (NODE.peer_id,))
    for number, reason in enumerate(("LEASE_EXPIRED", "LEASE_UNKNOWN", "LEASE_REDEEMED"), 1):
        ledger.add_verdict(NODE.node, bytes([number]) * 32, "REFUSED", reason, False, number, b"")  # type: ignore[arg-type]
    assert ledger.trusted() == {NODE.node}


def test_trust_and_placement_of_the_settings_are_checked(run: Run) -> None:
    for line, why in (
        ("trust = 'one'", "trust should be a list, not 'one'"),
        ("trust = [1]", "must hold peer ids, each in quotes"),
        ("placement = 'here'", "placement = 'here' is not known; known: disaggregated, colocated, both"),
        ("home_gpu_memory = 1.5", "home_gpu_memory is a share of the card"),
    ):
        run.folder.config.write_text(line)
        with pytest.raises(UsageError, match=why):
            load_config(run.folder.config)


def test_status_and_page_name_the_home_engine_and_who_is_trusted(run: Run, ledger: Ledger) -> None:
    ledger.see_node(AT_HOME.node, 1, "rlcommons", "transformers")
    ledger.see_node(NODE.node, 1, "rlcommons", "transformers")
    name_nodes(run, ledger, AT_HOME.node, (NODE.peer_id,))
    found = {row["node"]: (row["home"], row["trusted"]) for row in summary(ledger, run.config, 2)["nodes"]}
    assert found == {AT_HOME.peer_id: (True, False), peer_id(NODE.node): (False, True)}


def test_a_trusted_node_that_lied_is_told_of_by_serve_status_and_doctor_with_the_rate_it_has_now(
    run: Run, ledger: Ledger
) -> None:
    def shown() -> tuple[bool, str | None, float]:
        (row,) = summary(ledger, run.config, 2)["nodes"]
        return row["trusted"], row["lied"], row["rate"]

    ledger.see_node(NODE.node, 1, "rlcommons", "transformers")
    ledger.add_verdict(NODE.node, bytes(32), SubmissionState.REFUSED, "MARGIN", True, 1, b"signed")
    name_nodes(run, ledger, None, ())
    assert shown() == (False, None, 1.0), "nobody ever trusted it"
    run = configured(run, trust=(NODE.peer_id,))
    name_nodes(run, ledger, None, ())
    assert shown() == (True, None, run.config.audit_floor), "before its next trace"
    news = serve._News(ledger)
    ledger.add_verdict(NODE.node, b"\1" * 32, SubmissionState.REFUSED, "SEED", True, 2, b"signed")
    for number in (1, 2):
        ledger.add_event(number, "trust", "a node, which you trusted, was refused")
        ledger.add_event(number, "audit", "another matter")
    assert news.fresh() == [("trust", "a node, which you trusted, was refused")] and news.fresh() == []
    name_nodes(run, ledger, None, ())
    assert shown() == (False, "SEED", 1.0)
    (warning,) = (each for each in examine(run.folder.path, 4) if each.what == "trust")
    assert warning.level is Level.WARNING and f"node {NODE.peer_id}, which you trusted, was refused for SEED" in (
        warning.text
    )
    console = Console(width=200)
    with console.capture() as screen:
        console.print(render(run, summary(ledger, run.config, 2)))
    assert "trust lost: SEED" in screen.get()
    name_nodes(configured(run), ledger, None, ())
    assert shown() == (False, None, 1.0), "the settings name it no more"


# --- the home engine ---


def stand_in(folder: Path, script: str) -> Path:
    """A command `rlnode` that does this instead."""
    folder.mkdir()
    command = folder / "rlnode"
    command.write_text(f"#!{sys.executable}\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return command


def test_the_home_engine_is_rlnode_beside_this_interpreter_or_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    with pytest.raises(UsageError, match=r"there is no rlnode beside .*pip install -e \.\), or serve with"):
        home.find_rlnode()
    there = stand_in(tmp_path / "other", "")
    assert home.find_rlnode() == str(there)
    beside = stand_in(tmp_path / "bin", "")
    assert home.find_rlnode() == str(beside)


def test_its_key_lies_with_the_runs_and_is_the_same_after_a_restart(run: Run) -> None:
    rlnode = home.find_rlnode()
    node = home.prepare(run, rlnode, in_turns=True)
    assert load_identity(run.folder.home_key).node == node and run.folder.turns.is_dir()
    assert home.prepare(run, "/nowhere", in_turns=False) == node, "rlnode is asked once"
    assert not run.folder.turns.exists()


def test_an_rlnode_that_cannot_take_its_key_is_quoted(run: Run, tmp_path: Path) -> None:
    broken = stand_in(tmp_path / "bin", "import sys; sys.exit('rlnode: the disk is full')")
    with pytest.raises(LocalError, match="could not be given its key: rlnode: the disk is full"):
        home.prepare(run, str(broken), in_turns=False)


def test_without_an_engine_of_its_own_a_run_has_no_turns_left_from_before(run: Run) -> None:
    run.folder.turns.mkdir()
    assert home.prepare(run, "", in_turns=False) is None
    assert not run.folder.turns.exists() and not run.folder.home_key.exists()


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, "--cpu --threads 1"),
        ({"device": "cuda"}, "--gpu 0 --gpu-memory 0.4"),
        ({"device": "cuda:1", "home_gpu_memory": 0.25}, "--gpu 1 --gpu-memory 0.25"),
        ({"device": "cuda", "learners": 3, "dtype": "bfloat16"}, "--gpu 0,1,2 --gpu-memory 0.4"),
    ],
)
def test_it_joins_with_the_runs_device_and_dtype(run: Run, settings: dict[str, object], device: str) -> None:
    words = " ".join(home.words(configured(run, **settings), in_turns=False))
    assert words.endswith(f"--end-with-stdin --no-serve --dtype {settings.get('dtype', 'float32')} {device}")
    shared = " ".join(home.words(configured(run, **settings), in_turns=True))
    assert shared == f"{words} --share-device {run.folder.turns}"


def test_in_turns_no_more_is_begun_than_the_next_step_lacks() -> None:
    config = TrainerConfig(groups_per_step=8, open_groups=48, staleness_target=4)
    found = home.in_turns(config)
    begun = next(count for count in range(100) if why_begin_nothing(Consumption(3, 2), count, 3, found))
    assert begun == 6 < next(count for count in range(100) if why_begin_nothing(Consumption(3, 2), count, 3, config))


def test_in_turns_people_are_told_the_target_that_leases_follow(run: Run, ledger: Ledger) -> None:
    def leases() -> str:
        return str(next(each["what"] for each in summary(ledger, run.config, 1)["waits"] if each["part"] == "leases"))

    assert leases().endswith(f"(staleness_target {run.config.staleness_target})")
    run.folder.turns.mkdir()
    assert leases().endswith("(staleness_target 0)")


def test_the_processes_of_each_placement(run: Run) -> None:
    def names(placement: str) -> dict[str, tuple[str, ...]]:
        return {each.name: each.arguments for each in serve.children_of(run, placement=placement, rlnode="rlnode")}

    assert home.NAME not in names("disaggregated") and "--in-turns" not in names("disaggregated")["gateway"]
    assert "--share-device" not in names("both")[home.NAME] and "--in-turns" not in names("both")["gateway"]
    assert "--share-device" in names("colocated")[home.NAME] and "--in-turns" in names("colocated")["gateway"]


def test_a_run_whose_only_engine_fails_at_every_start_ends_with_its_reason(
    run: Run, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "RESTART_SECONDS", (0.0,))
    broken = stand_in(tmp_path / "bin", "import sys; sys.exit('rlnode: there is no room on the card')")
    run.folder.logs.mkdir(exist_ok=True)
    for placement, ends in (("both", False), ("colocated", True)):
        children = [
            each for each in serve.children_of(run, placement=placement, rlnode=str(broken)) if each.name == home.NAME
        ]
        supervisor = serve.Supervisor(run, ledger, children)
        run.folder.near_address.unlink(missing_ok=True)
        supervisor.look()
        assert children[0].process is None, "it has no address yet"
        run.folder.near_address.write_text("an address\n")
        while children[0].failures < 4 and not supervisor.gave_up:
            supervisor.look()
        supervisor.stop()
        assert bool(supervisor.gave_up) is ends
        if ends:
            assert supervisor.code == serve.FAILED
            assert supervisor.gave_up.startswith("the home engine ended with exit code 1: rlnode: there is no room on")


def test_the_home_engine_follows_the_gateway_to_another_port(
    run: Run, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "RESTART_SECONDS", (0.0,))
    waiting = stand_in(tmp_path / "bin", "import sys; sys.stdin.read()")
    (engine,) = (each for each in serve.children_of(run, placement="both", rlnode=str(waiting)) if each.address)
    supervisor = serve.Supervisor(run, ledger, [engine])
    run.folder.near_address.write_text("here\n")
    supervisor.look()
    first = engine.process
    run.folder.near_address.write_text("there\n")
    while engine.given != "there":
        supervisor.look()
    assert first is not None and first.poll() == 0
    assert supervisor.news == [
        "the home engine was ended: the gateway listens elsewhere now; started again in 0 s "
        f"(see {run.folder.logs / 'home.log'})"
    ]
    supervisor.stop()


# --- in turns with the learner ---


def test_the_learner_steps_at_once_where_it_shares_nothing(run: Run) -> None:
    with home.learners_turn(run) as waited:
        assert not waited
    assert not run.folder.turns.exists()


def device(run: Run, ledger: Ledger) -> str:
    """What people are told of whose turn it is."""
    return str(next(each["what"] for each in summary(ledger, run.config, 1)["waits"] if each["part"] == "device"))


def test_the_learner_waits_for_the_engine_and_has_the_device_alone(run: Run, ledger: Ledger) -> None:
    run.folder.turns.mkdir()
    engine = Turns(run.folder.turns, ENGINE)
    engine.take()

    def give_way() -> None:
        while not engine.is_asked():
            pass
        said.append(device(run, ledger))
        engine.give_back()

    said: list[str] = []
    other = threading.Thread(target=give_way)
    other.start()
    with home.learners_turn(run) as waited:
        assert waited and not engine.take() and engine.is_asked()
        said.append(device(run, ledger))
    other.join()
    assert said == ["is the home engine's; the learner waits until what is leased is drawn", "is the learner's"]
    assert engine.take()
    engine.close()
    assert [each.who for each in turns(run.folder.turns)] == ["home engine", "learner", "home engine"]


def test_an_engine_that_keeps_the_device_is_named_and_started_again(run: Run, ledger: Ledger) -> None:
    run.folder.turns.mkdir()
    engine = Turns(run.folder.turns, ENGINE)
    engine.take()
    run = replace(run, config=replace(run.config, stall_seconds=0.3))
    with pytest.raises(LocalError, match=r"has not given the device up within 0\.3 s"), home.learners_turn(run):
        pass
    learner = Turns(run.folder.turns, "learner")
    learner.ask()
    stalls = serve._Stalls(run, ledger, serve.Supervisor(run, ledger, []))
    seen = {each.part: each for each in stalls._parts(summary(ledger, run.config, 1))}
    assert seen[home.NAME] == Seen(home.NAME, "keeps the device although the learner asks for it", 0)
    engine.give_back()
    seen = {each.part: each for each in stalls._parts(summary(ledger, run.config, 1))}
    assert seen[home.NAME].owes == ""
    learner.close()
    engine.close()


def test_an_engine_from_which_nothing_comes_is_started_again_and_at_last_ends_the_run(
    run: Run, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, with the device: the learner asks for nothing until what is leased is drawn."""
    monkeypatch.setattr(serve, "RESTART_SECONDS", (0.0,))
    run = replace(run, config=replace(run.config, stall_seconds=0.3))
    for folder in (run.folder.turns, run.folder.logs):
        folder.mkdir(exist_ok=True)
    run.folder.near_address.write_text("here\n")
    (run.folder.path / "gateway.lock").touch()
    ledger.name_nodes(home=AT_HOME.node, always=frozenset(), anew=frozenset())
    waiting = stand_in(tmp_path / "bin", "import sys; sys.stdin.read()")
    (engine,) = (each for each in serve.children_of(run, placement="colocated", rlnode=str(waiting)) if each.address)
    supervisor = serve.Supervisor(run, ledger, [engine])
    stalls = serve._Stalls(run, ledger, supervisor)
    device = Turns(run.folder.turns, ENGINE)
    device.take()

    def ends() -> bool:
        show_life(run.folder.path, "gateway")
        supervisor.look()
        return stalls.look(summary(ledger, run.config, 1))

    try:
        hung: set[int] = set()
        deadline = time.monotonic() + 60
        while not ends():
            assert time.monotonic() < deadline
            if engine.process is not None and engine.process.pid not in hung:
                ends()  # as long as it was not heard of, it starts
                ledger.see_node(AT_HOME.node, len(hung) + 1, "rlcommons", "transformers")
                os.kill(engine.process.pid, signal.SIGSTOP)
                hung.add(engine.process.pid)
    finally:
        device.close()
        supervisor.stop()
    cause = "no progress for 0.3 s (stall_seconds): nothing came from it, and it has the device"
    said = [text for text in supervisor.news if text.startswith(f"the home engine was ended: {cause}; started again")]
    assert len(said) == MOST_RESTARTS and len(hung) == MOST_RESTARTS + 1
    last = (
        f"home engine's process was started again {MOST_RESTARTS} times and still does nothing: {cause}; the run ends"
    )
    assert supervisor.news[-1].startswith(last)


def test_an_engine_is_not_blamed_for_a_gateway_that_hears_nobody(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    run.folder.logs.mkdir(exist_ok=True)
    run.folder.near_address.write_text("here\n")
    lock = run.folder.path / "gateway.lock"
    lock.touch()
    waiting = stand_in(tmp_path / "bin", "import sys; sys.stdin.read()")
    (engine,) = (each for each in serve.children_of(run, placement="both", rlnode=str(waiting)) if each.address)
    supervisor = serve.Supervisor(run, ledger, [engine])
    stalls = serve._Stalls(run, ledger, supervisor)

    def owes() -> str:
        return next(each.owes for each in stalls._parts(summary(ledger, run.config, 1)) if each.part == home.LIFE)

    try:
        supervisor.look()
        assert owes() == "nothing came from it"
        os.utime(lock, (1, 1))
        assert owes() == ""
    finally:
        supervisor.stop()


def test_an_engine_that_is_heard_of_and_draws_nothing_in_its_turn_is_named() -> None:
    assert home.keeps_the_device(Look(ENGINE, 5, False), 8) == "has the device for 8 slots and hands nothing in"
    assert home.keeps_the_device(Look(ENGINE, 5, False), 0) == home.keeps_the_device(Look("learner", 5, True), 8) == ""


def test_the_environment_of_the_suite_has_rlnode() -> None:
    assert os.access(home.find_rlnode(), os.X_OK)
