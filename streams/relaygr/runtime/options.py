"""An option that is declared once, beside the field that it sets: `Annotated[int, Ge(1), Option("Attention heads.")]`.

The command line takes its name, type, bounds, default and help from there (`relaygr.cli.options.takes`), and the docs
take their table from there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """What the type of a field does not say about its option."""

    help: str
    flag: str = ""
    """Its name on the command line, such as `--task` or `--shown/--hidden`; empty: that of the field."""
    metavar: str | None = None
    """The form of its value, such as `NAME=VALUE`; None: the type."""
    shown_default: bool | str = True
    """What the help shows as the default: that of the field, this text, or nothing."""
