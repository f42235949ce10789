"""`relaygr settings`: the effective settings and the origin of each."""

from __future__ import annotations

import enum
import json
import os
from typing import Annotated, Any

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, JsonOption, SetOption
from relaygr.cli.texts import print_json
from relaygr.runtime.errors import RelayError
from relaygr.runtime.masking import masked


def show(
    section: Annotated[
        str | None,
        typer.Argument(metavar="[SECTION]", help="Only these, such as worker or worker.hbm_bytes.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Print the effective settings and the origin of each. Secrets are masked.

    Most installations first set bootstrap, security.protocol, topic_prefix, partitions, replication_factor, and of
    worker: worker_id, model, device, calibration, hbm_bytes, dram_bytes, history_path, history_max_bytes, http_port;
    then log.level. docs/settings.md describes all.
    """
    from relaygr.settings import load, values

    loaded = load(config, os.environ, overrides or (), bootstrap)
    found = values(loaded.settings)
    if section is not None:
        found = _only(section, found)
    if as_json:
        print_json({key: {"value": _plain(value), "origin": loaded.origin(key)} for key, value in found.items()})
        return
    rows = [(key, _shown(value), loaded.origin(key)) for key, value in found.items()]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, value, origin in rows:
        typer.echo(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")


def _only(section: str, found: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if key == section or key.startswith(f"{section}.")}
    if not kept:
        sections = dict.fromkeys(key.split(".")[0] for key in found if "." in key)
        raise RelayError(f"{section} is no setting and no section of settings. Sections: {', '.join(sections)}.")
    return kept


def _plain(value: Any) -> Any:
    """The value as JSON has it: sizes in bytes, masked secrets as text."""
    from relaygr.settings import plain

    found = plain(value)
    if isinstance(found, list):
        return [masked(str(each)) for each in found]
    return masked(found) if isinstance(found, str) else found


def _shown(value: Any) -> str:
    from pydantic import ByteSize

    from relaygr.settings import size_text

    if value is None:
        return "none"
    if isinstance(value, ByteSize):
        return size_text(value)
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | tuple):
        return json.dumps(_plain(value))
    return masked(str(value))
