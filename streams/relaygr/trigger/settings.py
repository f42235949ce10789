"""Settings of the trigger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field, field_validator

from relaygr.runtime.settings import Section
from relaygr.schemas.limits import MAX_BEHAVIOURS

if TYPE_CHECKING:
    from relaygr.admission.policy import PolicyLimits
    from relaygr.admission.risk import RiskTargets
    from relaygr.admission.scenarios import ScenarioSettings

DEFAULT_POLICY: Final = "policy"


class TriggerSettings(Section):
    """Settings of the trigger: admission without a known owner, statuses of workers, and the process."""

    enabled: bool = Field(True, description="false: every event is counted as `disabled`, and no job is sent")
    instance_id: str = Field(
        "trigger-00", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="name of this process in client ids"
    )
    policy: str = Field(
        DEFAULT_POLICY,
        min_length=1,
        description="policy that decides about jobs: policy, always, threshold (fallback_behaviours), or an "
        "entry point of the group relaygr.trigger_policies",
    )
    remembered_users: Annotated[
        int,
        Field(ge=0, le=10_000_000, description="users whose last event and job are remembered; 0: none"),
    ] = 100_000
    rebuild_s: Annotated[
        float,
        Field(
            ge=0,
            le=86_400,
            description="how far back an assignment reads the jobs topic, to remember users; 0: it reads nothing",
        ),
    ] = 600.0
    fallback_behaviours: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_BEHAVIOURS,
            description="shortest history that is admitted while the owner is unknown or silent",
        ),
    ] = 1024
    assumed_behaviours: Annotated[
        int,
        Field(ge=0, le=MAX_BEHAVIOURS, description="length assumed if an event names no history; 0: skip the event"),
    ] = 1024
    status_stale_ms: Annotated[int, Field(ge=100, description="age at which the status of a worker is stale")] = 3000
    only_at_risk: bool = Field(
        True, description="false: impressions that full inference would probably answer in time get a job, too"
    )
    lead_fraction: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="share of the expected lead time that a job may count on, while few lead times were measured",
        ),
    ] = 0.8
    missed_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="largest share of the `not_at_risk` requests that full inference may truncate, reject or "
            "answer late; above it the margin of their length rises",
        ),
    ] = 0.003
    needless_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="largest share of the requests with a computed prefix that full inference would have answered "
            "in time; above it the margin of their length falls; 1: it never falls",
        ),
    ] = 0.1
    http_host: str = Field("127.0.0.1", description="address that the HTTP server of metrics and probes listens on")
    http_port: Annotated[int, Field(ge=0, le=65535, description="/metrics, /healthz, /readyz; 0: any free port")] = 0

    @field_validator("policy")
    @classmethod
    def _not_never(cls, policy: str) -> str:
        """Raises ValueError for the policy of earlier releases that sent no job."""
        if policy == "never":
            raise ValueError("there is no policy `never` any more: set trigger.enabled to false")
        return policy

    def risk_targets(self) -> RiskTargets:
        """The settings as the feedback takes them."""
        # This import brings numpy, which a command that only reads settings does not need.
        from relaygr.admission.risk import RiskTargets

        return RiskTargets(self.missed_share, self.needless_share)

    def limits(self, lease_margin_ms: int, scenario: ScenarioSettings) -> PolicyLimits:
        """The settings of a scenario as the policy takes them: its own, or else those of this section."""
        from relaygr.admission.policy import PolicyLimits

        fallback, assumed = scenario.fallback_behaviours, scenario.assumed_behaviours
        return PolicyLimits(
            fallback_behaviours=self.fallback_behaviours if fallback is None else fallback,
            assumed_behaviours=self.assumed_behaviours if assumed is None else assumed,
            lead_fraction=self.lead_fraction,
            only_at_risk=self.only_at_risk,
            lease_margin_us=lease_margin_ms * 1000,
        )
