"""Genesis, run id and the run address. Single faults: tests/vectors/genesis.json, address.json."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import Signed, seal
from protocol.errors import Code, DecodeError, SignatureError, UsageError
from protocol.identity import Identity
from protocol.run import EnvironmentShare, Genesis, RunAddress, open_genesis, run_id

TRAINER = Identity(bytes(range(32)))
STRANGER = Identity(bytes(range(64, 96)))
GENESIS = Genesis("example", TRAINER.node, 0, (EnvironmentShare("tools8@1", "", 1),), bytes(32), bytes(32))
ADDRESS = RunAddress("/ip4/203.0.113.7/tcp/4001", TRAINER.node, bytes(range(32)))


def test_a_node_that_was_told_the_run_accepts_its_genesis_and_no_other() -> None:
    signed = seal(TRAINER, GENESIS)
    assert open_genesis(signed, run=run_id(signed), trainer=TRAINER.node) == GENESIS

    with pytest.raises(DecodeError) as caught:
        open_genesis(signed, run=bytes(32))
    assert caught.value.code is Code.WRONG_RUN
    assert run_id(signed).hex()[:16] in str(caught.value)


def test_the_run_id_does_not_depend_on_the_signature() -> None:
    signed = seal(TRAINER, GENESIS)

    assert run_id(signed) == run_id(Signed(signed.payload, STRANGER.node, bytes(64))) == signed.digest


def test_a_stranger_cannot_take_over_a_run() -> None:
    signed = seal(STRANGER, GENESIS)

    with pytest.raises(DecodeError, match="names another trainer"):
        open_genesis(signed, run=run_id(signed))
    with pytest.raises(SignatureError):
        open_genesis(signed, run=run_id(signed), trainer=TRAINER.node)


def test_an_address_is_one_line_that_reads_back() -> None:
    assert RunAddress.parse(f"  {ADDRESS}\n") == ADDRESS
    assert str(ADDRESS).startswith(ADDRESS.dial + "/run/")
    assert RunAddress.parse(str(ADDRESS).replace(ADDRESS.run.hex(), ADDRESS.run.hex().upper())) == ADDRESS


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no /run/ part"),
        (ADDRESS.dial, "no /run/ part"),
        (f"/ip4/1.2.3.4/tcp/1/run/{bytes(32).hex()}", "no /p2p/ part"),
        (f"{ADDRESS.dial}/run/1234", "not 64 hex digits"),
        (str(ADDRESS).replace("12D3Koo", "12D3K0o"), "not an Ed25519 peer id"),
    ],
)
def test_a_wrong_address_says_which_part_and_where_to_get_it(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        RunAddress.parse(text)
    assert "rltrainer serve" in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    try:
        RunAddress.parse(text)
    except UsageError as error:
        assert len(str(error)) < 400


@given(st.text(max_size=60))
def test_any_transport_part_reads_back_or_is_refused(multiaddr: str) -> None:
    text = str(RunAddress(multiaddr, TRAINER.node, bytes(32)))
    try:
        parsed = RunAddress.parse(text)
    except UsageError:
        return
    assert parsed.trainer == TRAINER.node and parsed.run == bytes(32)
