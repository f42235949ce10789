"""Help texts at any width: paragraphs without the source's line breaks, and flags without the type of a value."""

from __future__ import annotations

import inspect
from typing import Any


def tidy_help(command: Any) -> None:
    """Mends a command, and the commands of a group."""
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    all_of = command.get_params

    def params(context: Any) -> Any:
        return [_without_type(parameter) for parameter in all_of(context)]

    command.get_params = params  # Those that typer adds later too, such as --help.
    for each in getattr(command, "commands", {}).values():
        tidy_help(each)


def _without_type(parameter: Any) -> Any:
    """A flag takes no value, so its help shows none."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    return parameter
