"""The base class of all settings, and the settings of logging, which every process has."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """The base class of a group of settings. Unknown keys are errors, and instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class LogLevel(enum.StrEnum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """The format of a log line. AUTO is CONSOLE on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogSettings(Section):
    """Logging of a process."""

    level: LogLevel = Field(LogLevel.INFO, description="the least severe level that is written")
    format: LogFormat = Field(LogFormat.AUTO, description="auto: console on a terminal, else json")
    repeats_per_second: Annotated[
        int,
        Field(ge=1, description="largest number of lines a second of one logger and message; more are only counted"),
    ] = 10
