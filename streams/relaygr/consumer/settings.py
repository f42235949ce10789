"""Settings of the consumer loop."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class ConsumerSettings(Section):
    """How a consumer loop polls and commits."""

    max_span: Annotated[
        int, Field(ge=1, description="a partition is paused when this many messages follow its oldest unfinished one")
    ] = 10_000
    request_timeout_s: Annotated[
        float, Field(gt=0, description="time-out of the request for the group's offsets on assignment")
    ] = 2.0
    stall_s: Annotated[
        float,
        Field(gt=0, description="time without a message, despite unread ones, after which the worker is not ready"),
    ] = 10.0
