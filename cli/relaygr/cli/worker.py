"""`relaygr worker` runs one worker until it is stopped; with `--standby`, a supervisor and two worker processes.

The supervisor's process stays small: only the process of a worker imports torch.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import structlog
import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.kafka.settings import GroupProtocol
from relaygr.settings import Settings, apart_from_secrets
from relaygr.worker.exits import Exit

log = structlog.get_logger()


class ChildRole(enum.StrEnum):
    """How a child of a supervisor starts: as the first one, or as a standby."""

    FIRST = "first"
    STANDBY = "standby"


StandbyOption = Annotated[
    bool, typer.Option("--standby", help="Keep a second process ready that takes over when the first one dies.")
]
LineOption = Annotated[int | None, typer.Option("--supervisor-line", hidden=True)]
RoleOption = Annotated[ChildRole, typer.Option("--role", hidden=True)]


def worker(
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
    standby: StandbyOption = False,
    supervisor_line: LineOption = None,
    role: RoleOption = ChildRole.FIRST,
) -> None:
    """Run a worker: pre-infer, cache and rank.

    The exit code is 0 after SIGTERM, 3 if another process took over the worker id (do not start it again), 4 if the
    device hangs, 1 after any other failure.
    """
    settings = command_settings(config, bootstrap, overrides)
    if standby:
        plain, secrets = apart_from_secrets(overrides or ())
        # The children inherit the environment.
        os.environ.update(secrets)
        raise typer.Exit(_supervise(settings, _child_command(config, bootstrap, plain)))
    from relaygr.worker.process import run_worker
    from relaygr.worker.settings import WorkerConfig
    from relaygr.worker.supervisor.heartbeat import SupervisorLink

    link = SupervisorLink(supervisor_line) if supervisor_line is not None else None
    parts = WorkerConfig(settings, settings.worker, settings.admission, settings.consumer)
    raise typer.Exit(run_worker(parts, is_standby=role is ChildRole.STANDBY, link=link))


def _supervise(settings: Settings, make_command: Callable[[int, bool], Sequence[str]]) -> Exit:
    from relaygr.worker.supervisor.supervisor import Supervisor

    if settings.group_protocol is GroupProtocol.CONSUMER:
        log.warning(
            "the standby can take over only after the broker has ended the dead process's session: the broker refuses "
            "the same group.instance.id until then. Use group_protocol=classic"
        )
    return Supervisor(settings.worker, settings.supervisor, make_command).run()


def _child_command(
    config: Path | None, bootstrap: str | None, overrides: Sequence[str]
) -> Callable[[int, bool], Sequence[str]]:
    """The command of a child: this command with the same settings, except for the port of its probes."""
    command = [sys.executable, "-m", "relaygr", "worker"]
    command += ["--config", str(config)] if config is not None else []
    command += ["--bootstrap", bootstrap] if bootstrap is not None else []
    for override in (*overrides, "worker.http_port=0"):
        command += ["--set", override]

    def make(line: int, is_first: bool) -> Sequence[str]:
        role = ChildRole.FIRST if is_first else ChildRole.STANDBY
        return [*command, "--supervisor-line", str(line), "--role", role.value]

    return make
