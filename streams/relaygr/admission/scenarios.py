"""Scenarios: kinds of impressions, such as home feed, search and ads, with limits, lengths and shares of their own.

Events, jobs and requests name their scenario; without a name it is `default`. Scenarios with the same topics share the
trigger, the workers and the model. A scenario with a `topic_prefix` has topics, groups, trigger and workers of its own,
and so may have a model of its own.

A variant is another revision of a scenario's model for a part of the users, as an A/B test needs it. It has topics and
workers of its own. `variant_of` assigns users by a hash, so every gateway gives a user the same variant without asking.

Pure, but for the settings: no clock, no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, StringConstraints, field_validator, model_validator

from relaygr.runtime.settings import Section
from relaygr.schemas.limits import (
    DEFAULT_SCENARIO,
    MAX_BEHAVIOURS,
    MAX_BUDGET_MS,
    MAX_CANDIDATES,
    MAX_SCENARIOS,
    MAX_SUFFIX_BEHAVIOURS,
)
from relaygr.schemas.record import record
from relaygr.schemas.topics import check_prefix

NAME: Final = r"[a-z0-9][a-z0-9_-]{0,31}"
ScenarioName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
_HASH_BYTES: Final = 8


class PreInferBy(enum.StrEnum):
    """Who computes the prefixes of a scenario's jobs."""

    OWNER = "owner"
    POOL = "pool"
    """The pre-infer workers; the owner while there are none, or while they refuse jobs."""


class VariantSettings(Section):
    """Another revision of a scenario's model, for a part of its users."""

    users: Annotated[float, Field(ge=0, le=1, description="share of the users, chosen by a hash of the user id")]
    model: Annotated[Path, Field(description="checkpoint folder of the variant's workers")]


class ScenarioSettings(Section):
    """One scenario. A value that is not set is the one of the trigger's, worker's or traffic's own section."""

    share: Annotated[
        float,
        Field(
            gt=0,
            le=1000,
            description="its part of the cache and load that jobs may take, relative to the other scenarios with the "
            "same topics; what one does not use is lent to the others",
        ),
    ] = 1.0
    budget_ms: Annotated[
        int | None,
        Field(ge=1, le=MAX_BUDGET_MS, description="time limit of ranking (SLO); the trigger keeps to it even where "
              "an event has a longer one"),
    ] = None  # fmt: skip
    candidates: Annotated[int | None, Field(ge=1, le=MAX_CANDIDATES, description="candidates of a request")] = None
    suffix: Annotated[
        int | None, Field(ge=0, le=MAX_SUFFIX_BEHAVIOURS, description="short-term behaviours of a request")
    ] = None
    fallback_behaviours: Annotated[
        int | None, Field(ge=1, le=MAX_BEHAVIOURS, description="trigger.fallback_behaviours of this scenario")
    ] = None
    assumed_behaviours: Annotated[
        int | None, Field(ge=0, le=MAX_BEHAVIOURS, description="trigger.assumed_behaviours of this scenario")
    ] = None
    pre_infer: PreInferBy = Field(
        PreInferBy.OWNER,
        description="who computes prefixes for jobs: owner, or pool (`relaygr worker --role pre-infer`, docs/pool.md)",
    )
    topic_prefix: str | None = Field(
        None, description="prefix of topics and groups of its own, with a trigger and workers of its own"
    )
    model: Path | None = Field(None, description="checkpoint folder of its workers; only with a topic_prefix")
    variants: dict[ScenarioName, VariantSettings] = Field({}, description="other revisions of the model, by name")

    @field_validator("topic_prefix")
    @classmethod
    def _prefix_is_legal(cls, value: str | None) -> str | None:
        return None if value is None else check_prefix(value)

    @model_validator(mode="after")
    def _model_has_workers(self) -> ScenarioSettings:
        if self.topic_prefix is None and (self.model is not None or self.variants):
            raise ValueError("a model or variants need workers of their own: set topic_prefix")
        if sum(variant.users for variant in self.variants.values()) > 1:
            raise ValueError("the variants have more than all users: lower their `users`")
        return self


Scenarios = Mapping[str, ScenarioSettings]
ONLY_DEFAULT: Final[Scenarios] = {DEFAULT_SCENARIO: ScenarioSettings()}
"""The scenarios of processes whose settings name none."""


@record(frozen=True, slots=True)
class Deployment:
    """The processes that serve a scenario, or a variant of it: those with one prefix of topics and groups."""

    scenario: str
    variant: str | None
    topic_prefix: str | None
    """None: the prefix of the settings."""
    model: Path | None


def deployment_of(scenarios: Scenarios, name: str) -> Deployment:
    """The deployment of `SCENARIO` or `SCENARIO/VARIANT`. Raises ValueError if there is none of this name."""
    scenario, _, variant = name.partition("/")
    found = scenarios.get(scenario)
    if found is None:
        known = ", ".join(sorted(scenarios)) or "none"
        raise ValueError(f"there is no scenario {scenario!r}; the settings have {known}: add it to `scenarios`")
    if not variant:
        return Deployment(scenario, None, found.topic_prefix, found.model)
    if variant not in found.variants:
        known = ", ".join(sorted(found.variants)) or "none"
        raise ValueError(f"scenario {scenario} has no variant {variant!r}; it has {known}")
    return Deployment(scenario, variant, f"{found.topic_prefix}-{variant}", found.variants[variant].model)


def served_by(scenarios: Scenarios, deployment: Deployment | None) -> Scenarios:
    """The scenarios whose messages come on the topics of a deployment.

    None is the deployment of the scenarios without a prefix. The default scenario is one of them, unless the settings
    have it elsewhere.
    """
    if deployment is not None and deployment.variant is not None:
        return {deployment.scenario: scenarios[deployment.scenario]}
    prefix = None if deployment is None else deployment.topic_prefix
    known = {**ONLY_DEFAULT, **scenarios}
    return {name: scenario for name, scenario in known.items() if scenario.topic_prefix == prefix}


def shares_of(scenarios: Scenarios) -> Mapping[str, float]:
    """The part of each scenario in the budgets of one worker that serves these; 1 in sum."""
    whole = sum(scenario.share for scenario in scenarios.values())
    return {name: scenario.share / whole for name, scenario in scenarios.items()}


def uses_pool(scenarios: Scenarios) -> bool:
    """Whether jobs of a scenario go to the pre-infer workers."""
    return any(scenario.pre_infer is PreInferBy.POOL for scenario in scenarios.values())


def variant_of(scenario: str, variants: Mapping[str, VariantSettings], user_id: str) -> str | None:
    """The variant of a user; None: the scenario's own model.

    A user keeps the variant while the shares stay. The hashes of two scenarios are independent of each other, and of
    the partition.
    """
    if not variants:
        return None
    digest = blake2b(user_id.encode(), digest_size=_HASH_BYTES, key=scenario.encode()).digest()
    place = int.from_bytes(digest) / 2 ** (8 * _HASH_BYTES)
    for name in sorted(variants):
        place -= variants[name].users
        if place < 0:
            return name
    return None


def require_few(scenarios: dict[str, ScenarioSettings]) -> dict[str, ScenarioSettings]:
    """Raises ValueError for more scenarios than a worker's status can report."""
    if len(scenarios) >= MAX_SCENARIOS:
        raise ValueError(f"{len(scenarios)} scenarios, expected at most {MAX_SCENARIOS - 1}")
    return scenarios
