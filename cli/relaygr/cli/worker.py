"""`relaygr worker` runs one worker until it is told to stop; with `--standby`, a supervisor and two of them.

The supervisor's own process is light: torch is imported where a worker runs.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import structlog
import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, load_settings
from relaygr.kafka.settings import GroupProtocol
from relaygr.settings import Settings
from relaygr.worker.exits import Exit

log = structlog.get_logger()


class ChildRole(enum.StrEnum):
    """Which child of a supervisor a process is."""

    FIRST = "first"
    STANDBY = "standby"


StandbyOption = Annotated[
    bool, typer.Option("--standby", help="Keep a second process ready that takes over when the first dies.")
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

    Ends with 0 on SIGTERM, 3 when another process took over its worker id (start no new one), 4 when its
    device hangs, 1 on any other failure.
    """
    settings = load_settings(config, bootstrap, overrides)
    if standby:
        raise typer.Exit(_supervise(settings, _child_command(config, bootstrap, overrides or ())))
    from relaygr.worker.process import WorkerConfig, run_worker
    from relaygr.worker.supervisor.leash import Leash

    leash = Leash(supervisor_line) if supervisor_line is not None else None
    parts = WorkerConfig(settings, settings.worker, settings.admission, settings.consumer)
    raise typer.Exit(run_worker(parts, is_standby=role is ChildRole.STANDBY, leash=leash))


def _supervise(settings: Settings, make_command: Callable[[int, bool], Sequence[str]]) -> Exit:
    from relaygr.worker.supervisor.supervisor import Supervisor

    own = settings.worker
    if settings.group_protocol is GroupProtocol.CONSUMER:
        log.warning(
            "the standby will take over only when the broker has ended the dead process's session: it refuses the "
            "same group.instance.id until then. Use group_protocol=classic"
        )
    supervisor = Supervisor(
        own.worker_id, settings.supervisor, make_command, own.http_host, own.http_port, drain_s=own.drain_s
    )
    return supervisor.run()


def _child_command(
    config: Path | None, bootstrap: str | None, overrides: Sequence[str]
) -> Callable[[int, bool], Sequence[str]]:
    """This command again, for a child: the same settings, but for the port of its probes."""
    command = [sys.executable, "-m", "relaygr", "worker"]
    command += ["--config", str(config)] if config is not None else []
    command += ["--bootstrap", bootstrap] if bootstrap is not None else []
    for override in (*overrides, "worker.http_port=0"):
        command += ["--set", override]

    def make(line: int, is_first: bool) -> Sequence[str]:
        role = ChildRole.FIRST if is_first else ChildRole.STANDBY
        return [*command, "--supervisor-line", str(line), "--role", role.value]

    return make
