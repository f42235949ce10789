"""Settings of a gateway's client."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class ClientSettings(Section):
    """Bounds and times of one `RelayClient`."""

    results_partition: Annotated[
        int | None, Field(ge=0, description="partition of the results topic to read; none: murmur2(gateway id) mod n")
    ] = None
    max_in_flight: Annotated[
        int, Field(ge=1, le=1_000_000, description="requests whose end is open, those in their grace included")
    ] = 10_000
    result_grace_ms: Annotated[
        int,
        Field(
            ge=0, le=600_000, description="how long after its deadline an unanswered request still counts as in flight"
        ),
    ] = 1000
    lost_after_ms: Annotated[
        int,
        Field(
            ge=0,
            le=600_000,
            description="how long after its deadline a request that nobody answered counts as lost; longer than a "
            "dead worker's partitions take to move",
        ),
    ] = 30_000
    retry_backoff_ms: Annotated[
        int, Field(ge=1, description="before a request whose delivery failed is sent again")
    ] = 20
    remembered_answers: Annotated[
        int, Field(ge=1, le=1_000_000, description="ids of ended requests, by which duplicates are known")
    ] = 16_384
    max_workers_tracked: Annotated[
        int, Field(ge=1, le=4096, description="workers whose clock offset is kept; the one longest unheard goes first")
    ] = 64
    close_timeout_s: Annotated[
        float, Field(gt=0, description="how long close() waits for what is in flight and undelivered")
    ] = 3.0
