"""Settings of the traffic that `relaygr traffic` drives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section
from relaygr.schemas.limits import MAX_BEHAVIOURS, MAX_BUDGET_MS, MAX_CANDIDATES, MAX_SUFFIX_BEHAVIOURS


class TrafficSettings(Section):
    """The users of the traffic and the schedule of their impressions. The seed fixes all of them."""

    gateway_id: str = Field("gateway-00", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", description="id of this gateway")
    seed: Annotated[int, Field(ge=0, description="seed of users and schedule")] = 1
    relay: bool = Field(True, description="false: send no retrieval events, so that nothing is pre-inferred")
    duration_s: Annotated[float, Field(ge=0, description="time during which impressions start; 0: until stopped")] = 0.0
    rate_per_s: Annotated[float, Field(gt=0, le=100_000, description="impressions a second, as a Poisson process")] = (
        20.0
    )
    settle_s: Annotated[float, Field(ge=0, description="pause between the histories and the first impression")] = 2.0
    drain_s: Annotated[
        float, Field(ge=0, le=600, description="how long a stop waits for the answers to requests that were sent")
    ] = 8.0

    users: Annotated[int, Field(ge=1, le=10_000_000, description="number of users")] = 200
    zipf_exponent: Annotated[float, Field(ge=0, le=4, description="skew of the impressions over users; 0: uniform")] = (
        0.8
    )
    new_share: Annotated[
        float,
        Field(ge=0, le=1, description="share of the impressions by users who come once, beside `users` who return"),
    ] = 0.0
    interactions: Path | None = Field(
        None, description="an interaction log, for real histories instead of synthetic ones"
    )
    columns: str | None = Field(
        None, description="what that log calls its columns, as `relaygr publish history --columns`"
    )
    actions: str | None = Field(None, description="codes of its event names, as `relaygr publish history --actions`")
    held_out: Path | None = Field(
        None,
        description="folder of a run of `relaygr train ranker`: its longest users' test behaviours are played, one an "
        "impression, with candidates that its ranker retrieves; then duration_s 0 means all of them",
    )
    retrieval: Path | None = Field(
        None, description="with held_out: a file of `relaygr train retrieval`, which retrieves instead of the ranker"
    )
    items: Annotated[int, Field(ge=1, description="synthetic histories: item ids are below this")] = 10_000
    history_median: Annotated[int, Field(ge=1, le=MAX_BEHAVIOURS, description="synthetic histories: median length")] = (
        1024
    )
    history_sigma: Annotated[
        float, Field(ge=0, le=3, description="synthetic histories: log-normal spread of the length")
    ] = 0.3
    history_max: Annotated[int, Field(ge=1, le=MAX_BEHAVIOURS, description="longest history that is published")] = 2048
    growth: Annotated[int, Field(ge=0, description="behaviours added to a history between two impressions")] = 8
    start_again: bool = Field(
        False,
        description="delete a user whose history is at its longest, by a tombstone, and begin it again, once none of "
        "its impressions is open",
    )

    lead_median_ms: Annotated[
        float, Field(ge=0, description="median time from the retrieval event to the ranking request")
    ] = 150.0
    lead_sigma: Annotated[float, Field(ge=0, le=2, description="log-normal spread of the lead time")] = 0.2
    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES, description="candidates of a ranking request")] = 128
    suffix: Annotated[
        int, Field(ge=0, le=MAX_SUFFIX_BEHAVIOURS, description="short-term behaviours of a ranking request")
    ] = 16
    budget_ms: Annotated[int, Field(ge=1, le=MAX_BUDGET_MS, description="deadline of a ranking request")] = 50

    http_host: str = Field("127.0.0.1", description="address that the HTTP server of metrics and probes listens on")
    http_port: Annotated[int, Field(ge=0, le=65535, description="/metrics, /healthz, /readyz; 0: any free port")] = 0
