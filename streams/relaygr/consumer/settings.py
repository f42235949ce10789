"""Settings of the consumer loop."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class ConsumerSettings(Section):
    """How a consumer loop polls, commits and lets go."""

    poll_timeout_ms: Annotated[
        int, Field(ge=1, le=1000, description="longest wait for a message: also how late a pause or a stop is heard")
    ] = 10
    batch_messages: Annotated[int, Field(ge=1, le=10_000, description="messages between two looks at commands")] = 64
    tick_interval_ms: Annotated[int, Field(ge=1, le=1000, description="between two calls of on_tick")] = 5
    store_interval_ms: Annotated[
        int, Field(ge=1, le=60_000, description="between two hand-overs of the watermark to the client's auto-commit")
    ] = 100
    max_span: Annotated[
        int, Field(ge=1, description="messages of a partition past its oldest unfinished one, before it is paused")
    ] = 10_000
    request_timeout_s: Annotated[
        float, Field(gt=0, description="for the group's offsets, asked on assignment; later they are found out lazily")
    ] = 2.0
    missing_topic_grace_s: Annotated[
        float, Field(gt=0, description="how long a subscribed topic may be unknown before the loop gives up")
    ] = 10.0
    stall_s: Annotated[
        float, Field(gt=0, description="assigned, messages to read, none delivered for so long: not ready")
    ] = 10.0
