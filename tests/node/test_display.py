"""What a person and a script see of a node's policies: whence they came, how far a download is, what is given on."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import trio
from rich.console import Console

from node.cli import main
from node.display import _table, describe_status, plain_lines, summary
from node.relaying import Relaying
from node.report import Event, Level, Status, noted
from node.store import Home, write_status
from protocol.identity import Identity
from protocol.net import memory, p2p
from protocol.net.base import Address, Host, RelayLimits
from tests.node.fetching_node import fetching_node
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import SmallTrainer
from tests.node.stepping import step


def rows(status: Status) -> dict[str, str]:
    text = describe_status({**status.plain(), "running": True, "process": 7})
    found = [line.strip().partition("  ") for line in text.splitlines()]
    return {name: value for name, _, value in found}


def test_what_waits_for_the_disk_is_in_the_status_until_there_is_room() -> None:
    status, said = Status(), []
    report = noted(said.append, status)
    why = "policy 7 needs 3.0 MiB, the disk of ... has 1.0 MiB free: free 2.0 MiB more (the download waits for it)"
    report(Event("storage", why, Level.ERROR, {"who": "the download"}))
    assert rows(status)["disk"] == why and status.plain()["disk_waits"] == {"the download": why}
    report(Event("storage_over", "the download waits for the disk no more", values={"who": "the download"}))
    assert "disk" not in rows(status) and len(said) == 2


def test_why_a_node_has_no_contact_is_in_its_status() -> None:
    why = "the trainer signed two policies as version 7: …"
    status = Status(trainer="/ip4/…", state="connecting", lost_because=why)
    shown = rows(status)
    assert shown["no contact"] == why and "not connected" in shown["trainer"]
    assert status.plain()["lost_because"] == why and "no contact" not in rows(Status())


EVIL = "\x1b[31mEVIL\x1b[0m\nsecond line [red]"
ESCAPED = r"\x1b[31mEVIL\x1b[0m\nsecond line [red]"


def test_what_a_stranger_wrote_drives_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a log, in the panel and in `rlnode status`: a run's name, a reason, an engine, an address."""
    out, status = io.StringIO(), Status(trainer=EVIL, engine=EVIL, last_refusal=EVIL, lost_because=EVIL, download=EVIL)
    status.refused[EVIL] = 1
    plain_lines(out)(Event("connected", f"joined run '{EVIL}'"))
    assert out.getvalue().endswith(f"joined run '{ESCAPED}'\n") and out.getvalue().count("\n") == 1
    panel = io.StringIO()
    Console(file=panel, width=200).print(_table(status))
    assert panel.getvalue().count(ESCAPED) == 5 and "\x1b" not in panel.getvalue()
    write_status(tmp_path, status.plain())
    with Home(tmp_path):
        assert main(["status", "--home", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.count(ESCAPED) == 6 and "\x1b" not in told and "\nsecond" not in told


def test_a_node_that_was_killed_is_not_said_to_be_connected_or_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = Status(trainer="/ip4/…", state="drawing", connected=True, slots_busy=31, slots_total=32, in_flight=33)
    status.tokens.add(999)
    status.given_bytes, status.relays, status.disk_waits = 5, 1, {"the download": "no room"}
    write_status(tmp_path, status.plain())
    assert main(["status", "--home", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert (
        "(not connected)" in told and "not running, killed, or cut off with the machine, 0 s ago; what follows" in told
    )
    for word in ("slots busy", "tok/s", "in flight", "/s now", "through 1 relay", "no room"):
        assert word not in told
    assert main(["status", "--home", str(tmp_path), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["running"], plain["state"], plain["connected"], plain["slots_busy"]) == (False, "killed", False, 0)
    write_status(tmp_path, {**status.plain(), "state": "stopped", "connected": False})
    assert main(["status", "--home", str(tmp_path)]) == 0
    assert "not running, stopped 0 s ago; what follows" in capsys.readouterr().out


def test_counts_of_what_an_earlier_start_left_are_said_to_be_so() -> None:
    status = Status(accepted=21, traces_received=3)
    assert rows(status)["traces"].startswith("since it started: 0 drawn, 3 received (with traces drawn before), 0 wait")
    assert rows(status)["verdicts"] == "since it started: 21 accepted, refused: none (with traces drawn before)"
    assert "verdicts: 21 accepted, 0 refused (with traces drawn before)" in summary(status)
    status.traces_drawn = 21
    assert "before" not in rows(status)["traces"] + rows(status)["verdicts"] + summary(status)


def test_in_a_narrow_terminal_lines_are_broken_between_words() -> None:
    status = Status(node="n" * 52, state="working", traces_drawn=12_345_678, accepted=7_654_321)
    status.refused["MARGIN"] = 123_456
    plain = {**status.plain(), "running": True, "process": 7}
    whole, narrow = describe_status(plain), describe_status(plain, 80)
    assert narrow.split() == whole.split()
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, whole.splitlines()))
    assert describe_status(plain, 20).split() == whole.split()


def test_a_node_that_joined_over_loopback_is_not_said_to_be_behind_nat() -> None:
    """A relay on its own machine keeps a place for it, and sees it come from there."""

    async def scenario() -> None:
        where, everybody = ("/ip4/0.0.0.0/tcp/0",), RelayLimits(bytes_per_second=1e9)
        async with (
            p2p.open_host(Identity.generate(), listen=where) as relay,
            p2p.open_host(Identity.generate(), listen=where) as host,
        ):
            relay.relay(everybody, lambda node: True)
            loopback = replace(Address.parse(relay.addresses[0]), host="127.0.0.1")
            told = "where it listens, and through 1 relay, which cannot see whether it is behind NAT"
            assert await reached(host, str(loopback)) == told

    trio.run(scenario)


def test_a_node_that_a_relay_sees_elsewhere_is_behind_nat() -> None:
    async def scenario() -> None:
        network = memory.Network()
        async with (
            network.host(Identity.generate()) as relay,
            network.host(Identity.generate(), nat=memory.Nat.KEEPS_PORTS) as host,
        ):
            relay.relay(RelayLimits(bytes_per_second=1e9), lambda node: True)
            assert await reached(host, relay.addresses[0]) == "through 1 relay: it is behind NAT"

    trio.run(scenario)


async def reached(host: Host, relay: str) -> str:
    """What its status says of a host that has a place at a relay, once it has."""
    status, kept = Status(), trio.Event()
    relaying = Relaying(host, host.addresses, (relay,), kept.set, lambda event: None, status, Random(1))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relaying.run)
            await kept.wait()
            nursery.cancel_scope.cancel()
    assert status.plain()["relays"] == 1
    return rows(status)["reached"]


def test_a_download_and_what_came_and_was_given_are_shown_to_people_and_scripts(tmp_path: Path) -> None:
    """Of a node that fetches from the trainer, from another node, and gives to a third."""
    trainer, seen = SmallTrainer(), []
    trainer.publish(EMBEDDED, 0)

    async def scenario() -> None:
        network = memory.Network()
        first_who, second_who = Identity.generate(), Identity.generate()
        with trio.fail_after(60):
            async with (
                network.host(trainer.identity) as theirs,
                network.host(first_who) as first_host,
                network.host(second_who) as second_host,
                trio.open_nursery() as nursery,
            ):
                trainer.serve(theirs)
                address = trainer.address(theirs)
                async with fetching_node(tmp_path / "1", first_host, first_who, address, blobs_in_flight=1) as first:
                    nursery.start_soon(first.follow, address)

                    def look(digest: bytes, data: bytes) -> bytes:
                        seen.append((first.status.plain(), rows(first.status)))
                        return data

                    trainer.on_blob = look
                    await first.until_ready(0)
                    async with fetching_node(tmp_path / "2", second_host, second_who, address) as second:
                        nursery.start_soon(second.follow, address)
                        await second.until_ready(0)
                        assert second.status.plain()["fetched_bytes"]["node"] > 0
                        assert "from other nodes" in rows(second.status)["policies"]
                    trainer.publish(step(EMBEDDED, tmp_path / "v1", 1), 1, deltas_from=[0])
                    await trainer.announce(1)
                    await first.until_ready(1)
                    after = first.status
                    nursery.cancel_scope.cancel()
        assert_shown(trainer, after, seen)

    trio.run(scenario)


def assert_shown(trainer: SmallTrainer, after: Status, seen: list[tuple[dict[str, object], dict[str, str]]]) -> None:
    size, delta = trainer.policies[0].manifest.size, trainer.policies[1].manifest.deltas[0].size
    plain = after.plain()
    assert plain["fetched_bytes"] == {"node": 0, "mirror": 0, "trainer": size + delta}
    assert (plain["policies_whole"], plain["policies_by_delta"]) == (1, 1)
    assert rows(after)["policies"].startswith(f"1 by delta ({size / delta:.0f} times smaller), 1 whole; ")
    assert rows(after)["policies"].endswith(" KiB from the trainer")
    assert rows(after)["sharing"].endswith("/s now") and "given to other nodes" in rows(after)["sharing"]
    status, shown = seen[3]  # in the middle of the first download
    going = status["downloading"]
    assert isinstance(going, dict)
    assert going.keys() >= {"bytes_left", "bytes_by_source", "bytes_per_second", "seconds_left"}
    assert (going["version"], going["bytes_total"], going["sources"]) == (0, size, 1)
    assert 0 < going["bytes_left"] < size and going["bytes_by_source"] == {"trainer": size - going["bytes_left"]}
    for word in ("policy 0: ", " left, from the trainer, ", "/s, "):
        assert word in shown["fetching"]


def test_the_status_of_a_node_of_an_earlier_release_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {name: value for name, value in Status().plain().items() if name != "fetched_bytes"}
    write_status(tmp_path, old)
    assert main(["status", "--home", str(tmp_path)]) == 0
    assert "policies" not in capsys.readouterr().out
