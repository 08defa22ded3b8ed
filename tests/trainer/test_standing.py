"""How far a node is trusted after its audits."""

from __future__ import annotations

import pytest

from protocol.errors import UsageError
from trainer.config import TrainerConfig
from trainer.standing import stake, standing
from verify.standing import WINDOW

CONFIG = TrainerConfig(audit_floor=0.05, audit_first=8)


def test_a_new_node_is_audited_in_full() -> None:
    for passed in range(CONFIG.audit_first):
        found = standing([True] * passed, CONFIG)
        assert found.rate == 1.0 and not found.on_probation


def test_a_proven_node_is_audited_less_and_less_and_never_below_the_floor() -> None:
    rates = [standing([True] * passed, CONFIG).rate for passed in range(8, WINDOW, 16)]
    assert rates == sorted(rates, reverse=True)
    assert 0.9 < rates[0] < 1.0 and rates[-1] == CONFIG.audit_floor


def test_a_failed_audit_brings_full_audits_back_until_as_many_pass_again() -> None:
    for since in range(CONFIG.audit_first):
        latest = [True] * since + [False] + [True] * 100
        found = standing(latest, CONFIG)
        assert found.rate == 1.0 and found.on_probation
    found = standing([True] * CONFIG.audit_first + [False] * 5 + [True] * 387, CONFIG)
    assert not found.on_probation and found.rate > 0.1


def test_too_few_first_audits_are_no_setting() -> None:
    with pytest.raises(UsageError, match="audit_first must be at least 8"):
        TrainerConfig(audit_first=7)
    with pytest.raises(UsageError, match="audit_floor must be above 0"):
        TrainerConfig(audit_floor=0.0)


def test_the_less_a_node_is_audited_the_more_it_must_have_to_lose() -> None:
    assert stake(1.0) == pytest.approx(0.01 / 0.99)
    assert stake(0.05) == pytest.approx(19.2, abs=0.01)
