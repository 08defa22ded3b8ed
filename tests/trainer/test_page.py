"""The page as people meet it: the real process over a real ledger, in a real headless Chromium."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import UsageError
from protocol.identity import Identity, peer_id
from protocol.run import EnvironmentShare
from tests.trainer.leased import Story
from trainer.api import bind
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import Published, StepRow, SubmissionState
from trainer.rates import told
from trainer.rundir import Run
from trainer.summary import summary
from trainer.view import notes

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
NODE = Identity(b"\x07" * 32).node


def step(version: int, reward: float) -> StepRow:
    figures = dict(loss=0.1, ess=0.9, kl=0.001, masked=0.0, clipped=0.03, entropy=1.2, ratio_mean=1.0, ratio_max=3.0)
    return StepRow(
        version, 1_000 * version, 16, 128, 5000, reward, 2, 1.5, 3, **figures, gradient_norm=0.7, learning_rate=1e-3,
        seconds=0.4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = init_run(
        tmp_path_factory.mktemp("page") / "run",
        name="page test <b>run</b>",
        policy="embedded",
        environments=(EnvironmentShare("tools8@1", "", 1),),
        config=TrainerConfig(page_port=0, listen="/ip4/127.0.0.1/tcp/0"),
    )
    ledger = Ledger(made.folder.ledger)
    for seen_ms in (2_000, 5_000):
        ledger.see_node(NODE, seen_ms, "rlcommons 0.1.0", "transformers <script>alert(1)</script>")
    with ledger.write():
        learned = Story(ledger).spread(40)
    for version, reward in enumerate((0.2, 0.35, 0.62), start=1):
        ledger.record_step(step(version, reward), bytes(32), learned if version == 1 else [])
    ledger.add_verdict(NODE, b"\x01" * 32, SubmissionState.ACCEPTED, None, True, 6_000, b"signed")
    ledger.add_verdict(NODE, b"\x02" * 32, SubmissionState.REFUSED, "MARGIN", True, 7_000, b"signed")
    ledger.set_manifest(3, b"signed", Published(3_000, 269_000_000, 490_000))
    ledger.note_arrivals({(3, NODE): 7_500})
    ledger.add_event(8_000, "audit", "a trace of a node was refused: MARGIN")
    ledger.close()
    return made


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-m", "trainer.api", str(run.folder.path)], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not run.folder.page.exists() or not run.folder.page.read_text().endswith("/\n"):
            assert process.poll() is None and time.monotonic() < deadline, "the page did not start"
        yield run.folder.page.read_text().strip()
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0, "the page does not end when its supervisor is gone"


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as response:
        body: bytes = response.read()
        return body.decode()


def test_the_api_gives_the_state_of_the_run_as_json(url: str, run: Run) -> None:
    state = json.loads(fetch(url + "api/state"))
    assert (state["version"], state["accepted"], state["refused"]) == (3, 80, 1), "a trace each"
    assert state["refusals"] == {"MARGIN": 1}
    assert state["run"] == run.run.hex()
    (policy,) = state["policies"]
    assert (policy["version"], policy["nodes"], policy["slowest_seconds"], round(policy["ratio"])) == (3, 1, 4.5, 549)
    assert [row["version"] for row in json.loads(fetch(url + "api/steps?after=1"))] == [2, 3]
    assert json.loads(fetch(url + "api/refusals"))[0]["node"] == peer_id(NODE)
    long = next(row for row in state["rates"] if row["kind"] == "257-512 tokens")
    assert (long["leased"], long["expired"], long["used"], long["lag_mean"]) == (60, 20, 40, 0.0)
    lost = "long traces are being lost: of the leases of 257-512 tokens 67% end in a batch"
    assert state["losses"][0].startswith(lost)
    assert {row["part"]: row["what"] for row in state["waits"]}["leases"].startswith("as nodes ask: 0 groups wait")


def test_metrics_are_in_prometheus_form(url: str) -> None:
    text = fetch(url + "metrics")
    assert "rlcommons_policy_version 3.0" in text
    assert 'rlcommons_verdicts_total{outcome="REFUSED",reason="MARGIN"} 1.0' in text
    assert 'rlcommons_verdicts_total{outcome="ACCEPTED",reason=""} 81.0' in text
    assert 'rlcommons_traces{state="ACCEPTED"} 80.0' in text and 'rlcommons_traces{state="REFUSED"} 0.0' in text
    assert 'rlcommons_leased_slots{by="length",end="expired",kind="257-512 tokens"} 20.0' in text
    assert 'rlcommons_lag_versions{by="reward",kind="1"} 0.0' in text and "rlcommons_losses 2.0" in text


def test_the_stages_of_rollouts_are_histograms_and_a_table_once_what_was_before_is_read(url: str) -> None:
    deadline = time.monotonic() + 60
    while not (rows := {row["stage"]: row for row in json.loads(fetch(url + "api/stages"))}):
        assert time.monotonic() < deadline, "the page never caught up with its ledger"
    assert list(rows) == ["node", "verify", "batch_wait", "train"]  # its nodes said nothing
    assert (rows["train"]["count"], rows["train"]["mean"], rows["train"]["p95"]) == (80, pytest.approx(0.4), 0.4)
    text = fetch(url + "metrics")
    assert 'rlcommons_stage_seconds_count{environment="tools8@1",source="seen",stage="train"} 80.0' in text
    assert 'rlcommons_stage_seconds_bucket{environment="tools8@1",le="0.5",source="seen",stage="train"} 80.0' in text


def test_the_terminal_says_in_a_line_what_is_being_lost(run: Run) -> None:
    ledger = Ledger(run.folder.ledger, read_only=True)
    lines = [text.plain for text in notes(run, {**summary(ledger, run.config, 10_000), **told(ledger, run.config)})]
    ledger.close()
    assert any(text.startswith("alarm  long traces are being lost: of the leases of 257-512 tokens") for text in lines)
    assert any(text.startswith("leases  of the last 100 slots leased 80.0% completed, 20.0% expired") for text in lines)


def test_the_name_a_node_gave_its_engine_cannot_drive_the_terminal(run: Run) -> None:
    with closing(Ledger(run.folder.ledger, read_only=True)) as ledger:
        found = {**summary(ledger, run.config, 10_000), **told(ledger, run.config)}
    found["pairs"] = [{"pair": "\x1b[2J float32 cpu by transformers float32 cpu", "note": "at\nonce"}]
    lines = [text.plain for text in notes(run, found)]
    assert any("\\x1b[2J float32" in line and "at\\nonce" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_page_that_cannot_listen_says_why() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on nowhere\.invalid:0: [A-Z][a-z -]+: set page_host"):
        bind("nowhere.invalid", 0)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(UsageError, match="in use: set page"):
        bind(*taken.getsockname())


def test_a_bad_query_is_refused_and_named(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(url + "api/steps?after=never")
    assert caught.value.code == 422
    caught.value.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_a_person_sees_version_reward_refusals_and_how_to_join(url: str, run: Run, tmp_path: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    run.folder.address.write_text("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWexample/run/00\n")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: faults.append("a node's text ran as a script"))
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#name")).to_have_text("page test <b>run</b>")
        expect(page.locator("#figures")).to_contain_text("3policy version")
        expect(page.locator("#reward path")).to_have_count(1)
        expect(page.locator("#join")).to_have_text("rlnode join /ip4/127.0.0.1/tcp/4001/p2p/12D3KooWexample/run/00")
        expect(page.locator("#refusals tbody")).to_contain_text("MARGIN")
        expect(page.locator("#nodes tbody")).to_contain_text("<script>alert(1)</script>")
        expect(page.locator("#policies tbody")).to_contain_text("269.0 MB490.0 kB549×14.5 s4.5 s")
        expect(page.locator("#rates tbody")).to_contain_text("257-512 tokens6066.7 %33.3 %0.0 %0.0 %0.0 %66.7 %0.0 (0)")
        expect(page.locator("#losses")).to_contain_text("successful traces are being lost")
        expect(page.locator("#stages tbody")).to_contain_text("trainthe trainer400 ms400 ms80")
        expect(page.locator("#stages svg.bar rect")).to_have_count(4)
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        browser.close()
    assert faults == []
