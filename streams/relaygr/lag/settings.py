"""Settings of the lag monitor."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class LagSettings(Section):
    """How often lag is measured, and from when on it counts."""

    interval_s: Annotated[float, Field(ge=0.1, le=3600, description="between two polls of `--watch` and `serve`")] = 1.0
    window_polls: Annotated[
        int, Field(ge=3, le=1000, description="polls over which progress is judged; longer than a commit interval")
    ] = 10
    ok_messages: Annotated[int, Field(ge=0, description="up to this lag a partition is OK, whatever its trend")] = 0
    request_timeout_s: Annotated[float, Field(gt=0, description="for each question to Kafka")] = 5.0
    record_timeout_s: Annotated[
        float, Field(ge=0, description="for reading the timestamps of next records; 0: never read any")
    ] = 1.0
    cluster_name: str | None = Field(None, description="the metrics' label `cluster_name`; none: the cluster's id")
    http_host: str = Field("127.0.0.1", description="where `serve` listens")
    http_port: Annotated[int, Field(ge=0, le=65535, description="where `serve` listens; 0: any free port")] = 9309
