"""The root command: it imports only the command that is called, and prints an error as one sentence."""

from __future__ import annotations

import errno
import importlib
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from relaygr.cli import COMMANDS
from relaygr.cli.help import tidy_help
from relaygr.cli.texts import plain_console
from relaygr.runtime.errors import RelayError
from relaygr.runtime.open_files import raise_limit
from relaygr.runtime.stop_signals import exit_on_sigterm
from relaygr.schemas.version import __version__

OPTIONAL = {
    "fastavro": "avro",
    "google": "avro",
    "matplotlib": "bench",
    "mlflow": "mlflow",
    "mooncake": "pool",
    "opentelemetry": "tracing",
    "pyarrow": "bench",
    "requests": "tracing",
    "safetensors": "worker",
    "scipy": "bench",
    "testcontainers": "bench",
    "torch_npu": "npu",
    "transformers": "transformers",
}
"""Libraries that a command needs for some of its options only, and the extra that installs them."""

_CALLED = "relaygr.command"


class LazyGroup(TyperGroup):
    """Lists the commands of the table, and imports a command when it is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, spec in COMMANDS.items():
            self.add_command(TyperCommand(name, help=spec.help), name)
        tidy_help(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in COMMANDS:
            ctx.meta[_CALLED] = name
            command = load_command(name)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        raise_limit()
        try:
            return super().invoke(ctx)
        except RelayError as error:
            _complain(str(error))
        except ModuleNotFoundError as error:
            library = (error.name or "").partition(".")[0]
            name = ctx.meta.get(_CALLED)
            if library in ("", "relaygr") or name is None:
                raise
            extras = OPTIONAL.get(library, COMMANDS[name].extras)
            _complain(f"{error.name} is not installed: pip install 'relaygr[{extras}]'.")
        except OSError as error:
            # Where a file is known, its own message says more.
            if error.filename is not None or (complaint := _of_the_machine(error)) is None:
                raise
            _complain(complaint)
        raise typer.Exit(1)


def _of_the_machine(error: OSError) -> str | None:
    """What is said of a fault that any command may meet; None: another one."""
    if error.errno == errno.ENOSPC:
        return "No space left on device for what this command prints or writes: make space, or write elsewhere."
    if "temporary directory" in str(error):
        return f"{error.strerror}: set TMPDIR to a folder that can be written."
    return None


app = typer.Typer(cls=LazyGroup, name="relaygr", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relaygr {__version__}")
        raise typer.Exit()


@app.callback(no_args_is_help=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Relay-race inference for generative ranking, on Kafka."""


def load_command(name: str) -> Any:
    """The command object of a name in the table."""
    module_name, _, attribute = COMMANDS[name].target.partition(":")
    return command_of(name, getattr(importlib.import_module(module_name), attribute))


def command_of(name: str, target: Any) -> Any:
    """The command object of a `typer.Typer` or of one function."""
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name)(target)
        target = single
    command = typer.main.get_command(target)
    command.name = name
    tidy_help(command)
    return command


def print_any_character() -> None:
    """A terminal or pipe of ASCII gets `\\xb1` for a character that it cannot have: else printing the results of an
    hour would end in a traceback. Standard error is so by default.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(target: Callable[..., object]) -> None:
    """Runs a function as a program of its own. A RelayError ends it with its text and exit code 1, and SIGTERM as
    Ctrl-C does.
    """
    print_any_character()
    exit_on_sigterm()
    raise_limit()
    try:
        command_of(target.__module__, target)()
    except RelayError as error:
        _complain(str(error))
        raise SystemExit(1) from error


def _complain(text: str) -> None:
    # The text is the last line. If nobody reads standard error, nothing is printed, and the process ends. Not imported
    # here: a library that it needs may be missing.
    logs = sys.modules.get("relaygr.runtime.logs")
    if logs is None or logs.close_logs():
        plain_console(stderr=True).print(text, style="red", soft_wrap=True)
