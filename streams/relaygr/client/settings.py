"""Settings of a gateway's client."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class ClientSettings(Section):
    """Bounds and times of one `RelayClient`."""

    results_partition: Annotated[
        int | None,
        Field(
            ge=0,
            description="partition of the results topic to read; none: murmur2 of the gateway id selects it",
        ),
    ] = None
    max_in_flight: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="largest number of requests in flight; each counts until its answer or the end of its grace",
        ),
    ] = 10_000
    result_grace_ms: Annotated[
        int,
        Field(ge=0, le=600_000, description="how long after its deadline an unanswered request counts as in flight"),
    ] = 1000
    lost_after_ms: Annotated[
        int,
        Field(
            ge=0,
            le=600_000,
            description="how long after its deadline an unanswered request counts as lost, if Kafka acknowledged it; "
            "longer than the time in which a dead worker's partitions move to another worker",
        ),
    ] = 30_000
    fail_fast: bool = Field(
        False,
        description="true: a request is not sent if its worker's last result said that admitted work leaves no time "
        "for it; it ends at once as failed, with the reason overloaded and without a result",
    )
    remembered_answers: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="number of ended requests whose ids are remembered, to detect duplicate results",
        ),
    ] = 16_384
    model_revisions: Annotated[
        tuple[str, ...],
        Field(description="model revisions whose results are accepted; empty: every revision"),
    ] = ()
    close_timeout_s: Annotated[
        float, Field(gt=0, description="how long close() waits for requests in flight and undelivered messages")
    ] = 3.0
