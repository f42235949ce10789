"""Settings of the trigger."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.admission.policy import PolicyLimits
from relaygr.runtime.settings import Section
from relaygr.schemas.messages import MAX_BEHAVIOURS


class TriggerSettings(Section):
    """What the trigger admits, and how its process runs."""

    enabled: bool = Field(True, description="false: every event is counted as `disabled` and no job is sent")
    instance_id: str = Field(
        "trigger-00", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="names this process to the broker"
    )
    fallback_behaviours: Annotated[
        int, Field(ge=1, le=MAX_BEHAVIOURS, description="shortest history admitted while its owner is not known")
    ] = 1024
    assumed_behaviours: Annotated[
        int,
        Field(ge=0, le=MAX_BEHAVIOURS, description="length assumed where an event names no history; 0: skip those"),
    ] = 1024
    status_stale_ms: Annotated[int, Field(ge=100, description="older worker statuses count as none")] = 3000
    lead_fraction: Annotated[
        float, Field(gt=0, le=1, description="low quantile of the lead time, as a part of the expected one")
    ] = 0.8
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535, description="/metrics, /healthz, /readyz; 0: any free port")] = 0

    def limits(self, lease_margin_ms: int) -> PolicyLimits:
        """The numbers that the policy decides by."""
        return PolicyLimits(
            fallback_behaviours=self.fallback_behaviours,
            assumed_behaviours=self.assumed_behaviours,
            lead_fraction=self.lead_fraction,
            lease_margin_us=lease_margin_ms * 1000,
        )
