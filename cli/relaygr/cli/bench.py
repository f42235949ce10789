"""`relaygr bench` runs one of the installed benchmarks, or lists them.

A benchmark is an entry point of the group `relaygr.benchmarks`: a function with the options of a command. As in the
modules of commands, slow imports are inside the function.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer
from typer.core import TyperGroup

from relaygr.cli.app import command_of
from relaygr.runtime.errors import RelayError
from relaygr.runtime.stop_signals import exit_on_sigterm

GROUP: Final = "relaygr.benchmarks"


def benchmarks() -> dict[str, EntryPoint]:
    """The installed benchmarks by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


class BenchmarkGroup(TyperGroup):
    """A subcommand for each benchmark."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, entry in benchmarks().items():
            self.add_command(command_of(name, entry.load()), name)


app = typer.Typer(cls=BenchmarkGroup, add_completion=False)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Run a benchmark; without a name, list them. Each names the file or folder of its results."""
    if context.invoked_subcommand is not None:
        exit_on_sigterm()  # Processes, folders and topics of a benchmark go with it.
        return
    group = context.command
    assert isinstance(group, BenchmarkGroup)
    if not group.commands:
        raise RelayError("No benchmark was found: install relaygr again, with pip install 'relaygr[bench]'.")
    width = max(map(len, group.commands))
    for name, command in group.commands.items():
        typer.echo(f"{name:<{width}}  {command.get_short_help_str(limit=100)}")
