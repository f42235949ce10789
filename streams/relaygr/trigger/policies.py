"""The trigger's policies by name: `trigger.policy` chooses one.

| name | jobs |
|---|---|
| `policy` | for requests at risk, within the owner's footprint and load (`relaygr.admission.policy`) |
| `always` | for every event with a history |
| `threshold` | for histories of `trigger.fallback_behaviours` and more |

An installed package brings another one by an entry point of the group `relaygr.trigger_policies`: its value is a
callable that takes `PolicyLimits` and returns a `TriggerPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final, Protocol

from relaygr.admission.policy import (
    Decision,
    DecisionReason,
    Estimate,
    PolicyCase,
    PolicyLimits,
    decide,
    decide_by_length,
    estimate,
    expired,
)
from relaygr.runtime.errors import RelayError
from relaygr.trigger.settings import DEFAULT_POLICY

GROUP: Final = "relaygr.trigger_policies"


class TriggerPolicy(Protocol):
    """Decides about impressions, one after the other. The handler itself refuses repeats and jobs under way."""

    def decide(self, case: PolicyCase) -> Decision:
        """Decides whether a job is sent. A policy that keeps to `case.buckets` charges them for the job."""


class _Default:
    def __init__(self, limits: PolicyLimits) -> None:
        self._limits = limits

    def decide(self, case: PolicyCase) -> Decision:
        return decide(case, self._limits)


class _Always:
    def __init__(self, limits: PolicyLimits) -> None:
        self._limits = limits

    def decide(self, case: PolicyCase) -> Decision:
        if expired(case.impression, case.now_us):
            return Decision(False, DecisionReason.EXPIRED)
        if not self._limits.behaviours_of(case.impression):
            return Decision(False, DecisionReason.NO_HISTORY)
        return Decision(True, DecisionReason.ADMITTED, _estimate(case, self._limits))


class _Threshold:
    def __init__(self, limits: PolicyLimits) -> None:
        self._limits = limits

    def decide(self, case: PolicyCase) -> Decision:
        decision = decide_by_length(case.impression, self._limits, case.now_us)
        return Decision(decision.admit, decision.reason, _estimate(case, self._limits))


def _estimate(case: PolicyCase, limits: PolicyLimits) -> Estimate | None:
    if case.owner is None:
        return None
    return estimate(
        case.impression, limits.behaviours_of(case.impression), case.owner, limits, case.now_us, case.cached
    )


PolicyFactory = Callable[[PolicyLimits], TriggerPolicy]
_OWN: Final[dict[str, PolicyFactory]] = {DEFAULT_POLICY: _Default, "always": _Always, "threshold": _Threshold}


def policy_names() -> list[str]:
    """Our policies, then those of installed packages. Ours cannot be replaced."""
    return [*_OWN, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(_OWN))]


def make_policy(name: str, limits: PolicyLimits) -> TriggerPolicy:
    """The policy of this name. Raises RelayError if there is none, or if its package cannot be loaded."""
    own = _OWN.get(name)
    if own is not None:
        return own(limits)
    found = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
    if found is None:
        raise RelayError(f"There is no trigger policy {name!r}: give one of {', '.join(policy_names())}.")
    try:
        made: TriggerPolicy = found.load()(limits)
    except Exception as error:
        raise RelayError(f"The trigger policy {name!r} ({found.value}) cannot be loaded: {error!r}.") from error
    return made
