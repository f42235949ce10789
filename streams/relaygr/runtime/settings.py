"""The base class of all settings, a check of tokens, and the settings of logging, which every process has."""

from __future__ import annotations

import enum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class Section(BaseModel):
    """The base class of a group of settings. Unknown keys are errors, which show no values; instances are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )


LEAST_TOKEN: Final = 16


def sendable(token: SecretStr | None) -> SecretStr | None:
    """The token, if it is long enough and an HTTP header can carry it. Raises ValueError."""
    text = token.get_secret_value() if token is not None else None
    if text is not None and (len(text) < LEAST_TOKEN or not text.isascii() or not text.isprintable() or " " in text):
        raise ValueError(f"a token has at least {LEAST_TOKEN} characters, all of them printable ASCII without spaces")
    return token


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
