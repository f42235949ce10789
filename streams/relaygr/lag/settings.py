"""Settings of the lag monitor."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class LagSettings(Section):
    """How often lag is measured, and how it is judged."""

    interval_s: Annotated[float, Field(ge=0.1, le=3600, description="time between two polls")] = 1.0
    window_polls: Annotated[
        int,
        Field(ge=3, le=1000, description="polls over which progress is judged; must cover more than a commit interval"),
    ] = 10
    ok_messages: Annotated[int, Field(ge=0, description="lag up to which a partition is OK, whatever its trend")] = 0
    request_timeout_s: Annotated[float, Field(gt=0, description="time-out of each request to Kafka")] = 5.0
    record_timeout_s: Annotated[
        float, Field(ge=0, description="time-out for reading the timestamps of unread records; 0: read none")
    ] = 1.0
    cluster_name: str | None = Field(
        None, description="label `cluster_name` of the metrics; none: the id of the cluster"
    )
    http_host: str = Field("127.0.0.1", description="address of `relaygr lag serve`")
    http_port: Annotated[int, Field(ge=0, le=65535, description="port of `relaygr lag serve`; 0: any free port")] = 9309
