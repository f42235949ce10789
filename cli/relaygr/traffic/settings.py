"""Settings of the traffic that `relaygr gateway` drives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_BUDGET_MS, MAX_CANDIDATES, MAX_SUFFIX_BEHAVIOURS


class TrafficSettings(Section):
    """A population of users, and when their impressions come. The seed fixes every one of them."""

    gateway_id: str = Field("gateway-00", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", description="names this gateway")
    seed: Annotated[int, Field(ge=0)] = 1
    relay: bool = Field(True, description="false: no retrieval events, so nothing is pre-inferred")
    duration_s: Annotated[float, Field(ge=0, description="how long impressions begin; 0: until stopped")] = 0.0
    rate_per_s: Annotated[float, Field(gt=0, le=100_000, description="impressions a second, Poisson")] = 20.0
    settle_s: Annotated[float, Field(ge=0, description="between the histories and the first impression")] = 2.0

    users: Annotated[int, Field(ge=1, le=10_000_000)] = 200
    zipf_exponent: Annotated[float, Field(ge=0, le=4, description="how unequally often users come; 0: equally")] = 0.8
    interactions: Path | None = Field(None, description="an interaction log: real histories instead of made ones")
    items: Annotated[int, Field(ge=1, description="item ids of made histories are below this")] = 10_000
    history_median: Annotated[int, Field(ge=1, le=MAX_BEHAVIOURS, description="made histories: median length")] = 1024
    history_sigma: Annotated[float, Field(ge=0, le=3, description="made histories: log-normal spread")] = 0.3
    history_max: Annotated[int, Field(ge=1, le=MAX_BEHAVIOURS, description="longest history that is published")] = 2048
    growth: Annotated[int, Field(ge=0, description="behaviours that a history gains between two impressions")] = 8

    lead_median_ms: Annotated[float, Field(ge=0, description="retrieval event to ranking request: median")] = 150.0
    lead_sigma: Annotated[float, Field(ge=0, le=2, description="log-normal spread of the lead time")] = 0.2
    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 128
    suffix: Annotated[int, Field(ge=0, le=MAX_SUFFIX_BEHAVIOURS, description="short-term behaviours")] = 16
    budget_ms: Annotated[int, Field(ge=1, le=MAX_BUDGET_MS, description="deadline of a ranking request")] = 50

    http_host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535, description="/metrics, /healthz, /readyz; 0: any free port")] = 0
