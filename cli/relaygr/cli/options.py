"""The options that every command shares, and the settings that they load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from relaygr.runtime.logs import configure_logging
from relaygr.settings import Settings, load

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file (YAML).", show_default=False)
]
BootstrapOption = Annotated[
    str | None,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="The Kafka cluster; short for --set bootstrap=HOST:PORT."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as worker.hbm_bytes=2GiB; may be repeated."),
]


def load_settings(
    config: Path | None = None, bootstrap: str | None = None, overrides: list[str] | None = None
) -> Settings:
    """The settings of this process: command line > environment > file > default. Raises RelayError.

    Logging is set up by them at once, so that nothing is said in another form than what was asked for.
    """
    settings = load(config, os.environ, overrides or (), bootstrap).settings
    configure_logging(settings.log)
    return settings
