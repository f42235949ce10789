"""Settings of the consumer loop."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class ConsumerSettings(Section):
    """How a consumer loop polls and commits."""

    poll_timeout_ms: Annotated[
        int, Field(ge=1, le=1000, description="longest wait for a message; also the longest delay of a pause or a stop")
    ] = 10
    batch_messages: Annotated[
        int, Field(ge=1, le=10_000, description="largest number of messages read before pauses and stops are handled")
    ] = 64
    tick_interval_ms: Annotated[
        int, Field(ge=1, le=1000, description="time between two calls of the handler's on_tick")
    ] = 5
    store_interval_ms: Annotated[
        int, Field(ge=1, le=60_000, description="time between two updates of the offsets that the client commits")
    ] = 100
    max_span: Annotated[
        int, Field(ge=1, description="a partition is paused when this many messages follow its oldest unfinished one")
    ] = 10_000
    request_timeout_s: Annotated[
        float, Field(gt=0, description="time-out of the request for the group's offsets on assignment")
    ] = 2.0
    missing_topic_grace_s: Annotated[
        float, Field(gt=0, description="how long a subscribed topic may be missing before the loop ends")
    ] = 10.0
    stall_s: Annotated[
        float,
        Field(gt=0, description="time without a message, despite unread ones, after which the worker is not ready"),
    ] = 10.0
