"""The base class of all settings, and the settings of logging, which every process has."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of settings: an unknown key is an error, and nothing changes after start."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class LogLevel(enum.StrEnum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """How a line looks; AUTO is console on a terminal, else json."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogSettings(Section):
    """What is logged, and how."""

    level: LogLevel = Field(LogLevel.INFO, description="the least severe level that is written")
    format: LogFormat = Field(LogFormat.AUTO, description="auto: console on a terminal, else json")
    repeats_per_second: Annotated[
        int, Field(ge=1, description="lines a second of the same logger and message; the rest is counted")
    ] = 10
