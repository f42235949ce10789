"""The trigger's policies by name, and those of other packages."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint

import pytest

from relaygr.admission.policy import Decision, DecisionReason, PolicyCase, PolicyLimits
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.trigger import policies
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler
from relaygr.trigger.policies import GROUP, make_policy, policy_names
from relaygr.trigger.settings import TriggerSettings
from tests.streams.test_trigger_policy import AT_RISK, LIMITS, NOW_US, OWNER, OpenBuckets

SHORT = dataclasses.replace(AT_RISK, history_behaviours=5)
NONE = dataclasses.replace(AT_RISK, history_behaviours=0)
PAST = dataclasses.replace(AT_RISK, expected_ranking_at_us=NOW_US - 10**9)


@pytest.mark.parametrize(
    ("name", "impression", "reason"),
    [
        ("policy", AT_RISK, DecisionReason.ADMITTED),
        ("policy", SHORT, DecisionReason.NOT_AT_RISK),
        ("always", SHORT, DecisionReason.ADMITTED),
        ("always", NONE, DecisionReason.NO_HISTORY),
        ("always", PAST, DecisionReason.EXPIRED),
        ("threshold", AT_RISK, DecisionReason.NO_STATUS_THRESHOLD),
        ("threshold", SHORT, DecisionReason.BELOW_THRESHOLD),
    ],
)
def test_each_policy_decides_by_its_rule(name: str, impression: object, reason: DecisionReason) -> None:
    case = PolicyCase(impression, NOW_US, OWNER, OpenBuckets())  # type: ignore[arg-type]
    decision = make_policy(name, LIMITS).decide(case)
    assert decision.reason is reason
    assert decision.admit == (reason in (DecisionReason.ADMITTED, DecisionReason.NO_STATUS_THRESHOLD))


class Odd:
    """Admits every other event."""

    def __init__(self, limits: PolicyLimits) -> None:
        self._count = 0

    def decide(self, case: PolicyCase) -> Decision:
        self._count += 1
        odd = self._count % 2 == 1
        return Decision(odd, DecisionReason.ADMITTED if odd else DecisionReason.DECLINED)


def broken(limits: PolicyLimits) -> None:
    raise KeyError("no file")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, f"{__name__}:{made}", GROUP) for name, made in (("odd", "Odd"), ("broken", "broken"))]
    monkeypatch.setattr(policies, "entry_points", lambda group: entries)


def test_an_installed_package_brings_its_policy_by_an_entry_point(others: None) -> None:
    assert policy_names() == ["policy", "always", "threshold", "broken", "odd"]
    made = make_policy("odd", LIMITS)
    assert [made.decide(PolicyCase(AT_RISK, NOW_US)).reason for _ in range(2)] == [
        DecisionReason.ADMITTED,
        DecisionReason.DECLINED,
    ]


def test_an_unknown_or_broken_policy_ends_the_start_with_a_sentence(others: None) -> None:
    def start(name: str) -> None:
        EventHandler(TriggerSettings(policy=name), AdmissionSettings(), Fleet(3000), 12, ManualClock())

    with pytest.raises(RelayError, match="no trigger policy 'nope': give one of policy, always, threshold"):
        start("nope")
    with pytest.raises(RelayError, match=r"'broken' .* cannot be loaded: KeyError\('no file'\)"):
        start("broken")
