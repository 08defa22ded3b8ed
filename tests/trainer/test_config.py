"""Settings that cannot be served with are refused where they are read, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import UsageError
from trainer.audit_draw import LAST_VERSION, AuditChain
from trainer.config import LONGEST_WAIT, config_from, load_config


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lease_seconds = inf", "lease_seconds = inf must be a number that has an end"),
        ("lease_token_seconds = nan", "lease_token_seconds = nan must be a number that has an end"),
        ("learning_rate = inf", "learning_rate = inf must be a number that has an end"),
        ("lease_seconds = 1e300", f"lease_seconds = 1e\\+300 may be at most {LONGEST_WAIT:,.0f}"),
        ("relay_circuit_minutes = 1e10", "relay_circuit_minutes = 1.*may be at most"),
        ('trust = ["foo"]', "trust: .*`rlnode key show` prints a node's id"),
        ("lease_seconds = 0.0", "lease_seconds = 0.0 must be above 0"),
        ('listen = "foo"', "cannot listen on 'foo': it should look like /ip4/0.0.0.0/tcp/4001"),
        ('listen = "/ip4/here/tcp/4001"', "cannot listen on '/ip4/here/tcp/4001': it should look like"),
        ('listen = "/ip6/127.0.0.1/tcp/4001"', "cannot listen on '/ip6/"),
        ('listen = "/dns4/example.org/tcp/4001"', "cannot listen on '/dns4/"),
        (
            'announce = "example.org:4001"',
            "listen or announce: .*'example.org:4001/p2p/",
        ),
        ("leases = 3", "'leases' is not a setting; known: .*lease_seconds"),
    ],
)
def test_a_setting_that_no_run_could_be_served_with_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        load_config(path)


def test_a_run_ends_with_its_steps_or_with_the_last_version_that_a_run_can_have() -> None:
    assert config_from({}, "here").last_version == LAST_VERSION
    assert config_from({"steps": 5}, "here").last_version == 5
    assert config_from({"steps": LAST_VERSION + 5}, "here").last_version == LAST_VERSION
    AuditChain(bytes(32)).value(LAST_VERSION)


def test_the_home_engine_may_be_trusted_by_its_word() -> None:
    assert config_from({"trust": ["self"]}, "here").trust == ("self",)
