"""Settings of the supervisor."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section


class SupervisorSettings(Section):
    """`relaygr worker --standby`: when a child counts as hung, and how often it is replaced."""

    silence_s: Annotated[float, Field(ge=2, description="a child without a sign of life for so long is killed")] = 3.0
    start_timeout_s: Annotated[float, Field(gt=0, description="the same, while it loads its model")] = 300.0
    restart_pause_s: Annotated[
        float, Field(ge=0, description="before a dead child is replaced; doubles with each death within the window")
    ] = 1.0
    restarts_max: Annotated[int, Field(ge=0, description="deaths within the window that are made good")] = 5
    restart_window_s: Annotated[float, Field(gt=0, description="how long a death counts")] = 300.0
