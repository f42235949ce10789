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
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings, apart_from_secrets
from relaygr.worker.exits import Exit
from relaygr.worker.settings import WorkerConfig, WorkerRole

log = structlog.get_logger()


class ChildRole(enum.StrEnum):
    """How a child of a supervisor starts: as the first one, or as a standby."""

    FIRST = "first"
    STANDBY = "standby"


StandbyOption = Annotated[
    bool, typer.Option("--standby", help="Keep a second process ready that takes over when the first one dies.")
]
LineOption = Annotated[int | None, typer.Option("--supervisor-line", hidden=True)]
ChildOption = Annotated[ChildRole, typer.Option("--child", hidden=True)]
RoleOption = Annotated[
    WorkerRole, typer.Option("--role", help="owner: own partitions and rank; pre-infer: compute prefixes for owners.")
]
LeaveOption = Annotated[
    bool,
    typer.Option(
        "--leave-on-stop",
        help="After SIGTERM leave the group, so that other workers own the partitions at once. For a worker that "
        "goes for good: without it, the partitions wait for a restart under the same id.",
    ),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def worker(
    context: typer.Context,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
    standby: StandbyOption = False,
    leave_on_stop: LeaveOption = False,
    supervisor_line: LineOption = None,
    child: ChildOption = ChildRole.FIRST,
    role: RoleOption = WorkerRole.OWNER,
) -> None:
    """Run a worker: pre-infer, cache and rank.

    The exit code is 0 after SIGTERM, 3 if another process took over the worker id (do not start it again), 4 if the
    device hangs, 1 after any other failure.
    """
    if context.invoked_subcommand is not None:
        return
    settings = command_settings(config, bootstrap, overrides)
    if role is WorkerRole.PRE_INFER and (standby or leave_on_stop):
        raise RelayError("A pre-infer worker owns nothing: leave --standby and --leave-on-stop out.")
    if standby:
        plain, secrets = apart_from_secrets(overrides or ())
        # The children inherit the environment.
        os.environ.update(secrets)
        own = settings.worker
        if own.http_port and own.metrics_url is None:
            # Beside the metrics of the active child, the supervisor's page says whether there is a standby.
            plain = [*plain, f"worker.metrics_url={own.metrics_url_at(own.http_port)}"]
        code = _supervise(settings, _child_command(config, bootstrap, plain))
    else:
        code = _work(settings, supervisor_line, is_standby=child is ChildRole.STANDBY, role=role)
    if leave_on_stop and code is Exit.DONE:
        # Only now: a member that is still there would join again.
        _leave(settings, settings.worker.worker_id)
    raise typer.Exit(code)


@app.command("leave")
def leave_group(
    worker_id: Annotated[str, typer.Argument(metavar="ID", help="The worker.worker_id of a worker that has ended.")],
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Give the partitions of a worker that has ended for good to the other workers at once."""
    settings = command_settings(config, bootstrap, overrides)
    if not _leave(settings, worker_id):
        raise typer.Exit(1)


def _leave(settings: Settings, worker_id: str) -> bool:
    """Whether the worker was a member and has left. Raises RelayError if the broker does not answer."""
    # aiokafka is imported only where it is needed.
    from relaygr.consumer.leave import leave

    group = settings.workers_group
    if settings.group_protocol is GroupProtocol.CONSUMER:
        raise RelayError(
            "A worker cannot leave its group with affinity=consumer_protocol: others get its partitions when its "
            "session has ended."
        )
    has_left = leave(settings, group, worker_id)
    if settings.worker.divert:
        leave(settings, settings.overflow_group, worker_id)
    if has_left:
        log.info("left the group: other workers own its partitions now", worker_id=worker_id, group=group)
    else:
        log.warning("is not a member of the group", worker_id=worker_id, group=group)
    return has_left


def _work(settings: Settings, supervisor_line: int | None, *, is_standby: bool, role: WorkerRole) -> Exit:
    from relaygr.cluster.rights import RoleRights
    from relaygr.kafka.session import KafkaSession
    from relaygr.worker.process import run_worker
    from relaygr.worker.shared.lock import shared_folder
    from relaygr.worker.supervisor.link import SupervisorLink

    parts, link = _config(settings, role), None
    if supervisor_line is not None:
        link = SupervisorLink(supervisor_line, shared_folder(parts), settings.worker.orphan_s)
    session = KafkaSession(settings, parts.client_id, RoleRights(settings, parts.rights))
    with session.ends_for_new_files():
        return run_worker(parts, session, is_standby=is_standby, link=link)


def _supervise(settings: Settings, make_command: Callable[[int, bool], Sequence[str]]) -> Exit:
    from relaygr.worker.shared.lock import shared_folder
    from relaygr.worker.supervisor.supervisor import Supervisor

    if settings.group_protocol is GroupProtocol.CONSUMER:
        log.warning(
            "the standby can take over only after the broker has ended the dead process's session: the broker refuses "
            "the same group.instance.id until then. Use another `affinity`"
        )
    return Supervisor(settings.worker, settings.supervisor, shared_folder(_config(settings)), make_command).run()


def _config(settings: Settings, role: WorkerRole = WorkerRole.OWNER) -> WorkerConfig:
    return WorkerConfig(
        settings, settings.worker, settings.admission, settings.consumer, settings.tracing, settings.served, role
    )


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
        child = ChildRole.FIRST if is_first else ChildRole.STANDBY
        return [*command, "--supervisor-line", str(line), "--child", child.value]

    return make
