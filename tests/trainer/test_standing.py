"""How many of a node's traces are audited."""

from __future__ import annotations

from trainer.config import TrainerConfig
from trainer.standing import standing

CONFIG = TrainerConfig(audit_rate=0.25, audit_first=4)


def test_a_new_node_is_audited_in_full() -> None:
    for passed in range(CONFIG.audit_first):
        found = standing([True] * passed, CONFIG)
        assert found.rate == 1.0 and not found.on_probation


def test_a_proven_node_is_audited_at_the_configured_rate() -> None:
    found = standing([True] * CONFIG.audit_first, CONFIG)
    assert found.rate == 0.25 and not found.on_probation


def test_a_failed_audit_brings_full_audits_back_until_as_many_pass_again() -> None:
    for since in range(CONFIG.audit_first):
        latest = ([True] * since + [False] + [True] * 100)[: CONFIG.audit_first]
        found = standing(latest, CONFIG)
        assert found.rate == 1.0 and found.on_probation


def test_without_a_first_audited_stretch_the_rate_holds_from_the_start() -> None:
    assert standing([], TrainerConfig(audit_rate=0.5, audit_first=0)).rate == 0.5
