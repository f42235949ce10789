"""The options that every command shares, and the settings that they load.

In the modules of commands, slow imports are inside the command, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from relaygr.settings import Settings


def _setting_keys(incomplete: str) -> list[str]:
    """Completes `--set`."""
    from relaygr.settings import setting_fields

    return [f"{key}=" for key in setting_fields() if key.startswith(incomplete)]


ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file (YAML).", show_default=False)
]
BootstrapOption = Annotated[
    str | None,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="The Kafka cluster; short for --set bootstrap=HOST:PORT."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting, such as worker.hbm_bytes=2GiB; may be repeated.",
        autocompletion=_setting_keys,
    ),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="ROLE=NAME,...",
        help="What the log calls its columns: user=uid,item=sku,time=ts,action=event. Or rating=stars.",
        show_default=False,
    ),
]
ActionsOption = Annotated[
    str | None,
    typer.Option(
        "--actions",
        metavar="EVENT=CODE,...",
        help="Action codes of the log's event names: view=1,click=2.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has this option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def command_settings(
    config: Path | None = None, bootstrap: str | None = None, overrides: list[str] | None = None
) -> Settings:
    """Loads the settings of this command, and configures logging from them. Raises RelayError."""
    from relaygr.runtime.logs import configure_logging
    from relaygr.settings import load_settings

    settings = load_settings(config, bootstrap=bootstrap, overrides=overrides or ())
    configure_logging(settings.log)
    return settings


def require_writable(option: str, path: Path) -> None:
    """Before a long measurement. Raises RelayError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise RelayError(
            f"{option} {path} cannot be written ({error.strerror}): give a file in a folder where you may write."
        ) from error
