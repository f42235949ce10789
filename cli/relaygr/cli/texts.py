"""Parses option values, and prints sizes, times and ids, for several commands."""

from __future__ import annotations

import datetime
import json
import os
import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import TYPE_CHECKING, Final

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console, RenderableType
from rich.table import Table

from relaygr.console import plain_console as plain_console
from relaygr.runtime.errors import RelayError
from relaygr.runtime.printable import printable as printable

if TYPE_CHECKING:
    from relaygr.machine import Cores

PIPE_WIDTH: Final = 1000
"""Width, in characters, of what is not written to a terminal: nothing is cut there or broken into lines."""


def parse_size(option: str, text: str) -> int:
    """Bytes. Raises RelayError if the text is not a size."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise RelayError(f"{option} {text} is not a size: write it as 32KiB, 512MiB or 8GiB.") from None


def show_size(size_bytes: int) -> str:
    """Such as 1.5 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.95:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def show_age(seconds: float | None) -> str:
    """Such as 3m 12s; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def time_text(time_ms: int) -> str:
    """A time in UTC, to the second."""
    try:
        return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"


def stdout_console(pipe_width: int = PIPE_WIDTH) -> Console:
    """Prints tables and texts. They are as wide as the terminal; in a pipe, which has no width, `pipe_width`: by
    default each line is as long as it is. FORCE_COLOR makes no terminal of a pipe.
    """
    console = plain_console()
    return console if console.is_terminal and console.file.isatty() else plain_console(width=pipe_width)


def warn_if_busy(cores: Cores) -> None:
    """Says on standard error that other processes made measured times longer."""
    if cores.is_busy:
        said = cores.said[0].upper() + cores.said[1:]
        typer.echo(f"{said}: measured times may be too long. Measure on a quiet machine.", err=True)


def prints_to_stderr() -> AbstractContextManager[object]:
    """Around code of a team's own: what it prints is not a part of the command's result, such as JSON."""
    return redirect_stdout(sys.stderr)


def print_json(content: object) -> None:
    """Prints dataclasses' and models' plain content as JSON; what JSON has no form for as text."""
    typer.echo(json.dumps(content, indent=2, default=str))


def print_note(console: Console, note: str) -> None:
    """Prints a sentence that says how to read the figures above it; empty: there is none."""
    if note:
        console.print(f"Note: {note}")


def figures_table(title: str, *columns: str) -> Table:
    """A table without lines: a name in each row, and its figures in these columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def page(console: Console, content: RenderableType) -> None:
    """Prints the content; through the pager, as git does, if it is longer than the terminal."""
    if not console.is_terminal or len(console.render_lines(content, pad=False)) < console.height:
        console.print(content)
        return
    os.environ.setdefault("LESS", "FRX")
    with console.pager(styles=True):
        console.print(content)
