"""`relaygr doctor` checks everything that a relay needs, and says what to do about each problem."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import structlog
import typer
from rich.text import Text

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.cli.texts import plain_console, printable
from relaygr.cluster.rights import Role

if TYPE_CHECKING:
    from relaygr.doctor.judge import Diagnosis

WIDTH = 80
_INDENT = 22
_STYLES = {"ok": "green", "skip": "dim", "warn": "yellow", "fail": "red"}


def doctor(
    role: Annotated[
        list[Role] | None,
        typer.Option(help="A role that this user must be able to have; may be repeated.", show_default="any"),
    ] = None,
    impression: Annotated[
        bool,
        typer.Option(
            "--impression/--no-impression", help="Send one impression through the relay, if a worker is ready."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Check Kafka, the topics, this user's rights, the running relay, and this machine.

    Each line says ok, skip (not checked), warn or fail, and what to do. Exit codes: 0: nothing to do; 1: a warning;
    2: a failure. It changes nothing, but for the one impression.
    """
    from relaygr.doctor.examine import Examination
    from relaygr.doctor.judge import exit_code

    settings = command_settings(config, bootstrap, overrides)
    # What goes wrong is a finding, and not a line of the log before it.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    examination = Examination(settings, tuple(role or ()), impression)
    console = plain_console(soft_wrap=True)
    found: list[Diagnosis] = []
    for each in examination.run():
        found.append(each)
        if not as_json:
            console.print(_line(each))
    code = exit_code(found)
    if as_json:
        typer.echo(json.dumps({"exit_code": code, "findings": [asdict(each) for each in found]}, indent=2))
    if examination.is_stuck:
        # A check still waits for Kafka, and the clients that it uses would keep the process.
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)


def _line(each: Diagnosis) -> Text:
    """The finding in 80 columns: verdict, check, what was found, and below it what to do."""
    texts = [each.what, *([f"-> {each.mend}"] if each.mend else [])]
    lines = [line for text in texts for line in textwrap.wrap(printable(text), WIDTH - _INDENT, break_on_hyphens=False)]
    shown = Text.assemble((f"{each.verdict:<5} ", _STYLES[each.verdict]), f"{each.check:<15} ")
    return shown.append(("\n" + " " * _INDENT).join(lines))
