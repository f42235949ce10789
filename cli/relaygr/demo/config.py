"""Settings as a file for child processes, secrets included; only its owner can read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr

from relaygr.settings import Settings


def write_config(settings: Settings, path: Path) -> None:
    """Writes what differs from the defaults. The file is made with mode 0600."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        yaml.safe_dump(_plain(settings), file)


def _plain(section: BaseModel) -> dict[str, Any]:
    default = type(section)()
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            nested = _plain(value)
            if nested:
                values[name] = nested
        elif value != getattr(default, name):
            values[name] = _scalar(value)
    return values


def _scalar(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    return value if isinstance(value, float) else str(value)
