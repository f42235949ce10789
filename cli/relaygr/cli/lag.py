"""`relaygr lag` prints how far groups are behind; `relaygr lag serve` serves it as Prometheus metrics."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Final

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.cli.texts import page, plain_console, stdout_console
from relaygr.runtime.direct_http import address_here, http_address
from relaygr.runtime.errors import RelayError

app = typer.Typer(add_completion=False)

NOT_MEASURED: Final = 3
"""The exit code when Kafka does not answer."""

GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--group", metavar="NAME", help="Groups, * and ? allowed; may be repeated.", show_default="GROUP_PREFIX.*"
    ),
]


class Sort(StrEnum):
    """The order of partitions within a group."""

    PARTITION = "partition"
    LAG = "lag"
    SECONDS = "seconds"


@app.callback(invoke_without_command=True)
def lag(
    context: typer.Context,
    group: GroupOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also partitions without lag.")] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="If a group is behind, poll until its progress can be judged.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one line for each poll.")] = False,
    sort: Annotated[Sort, typer.Option(help="The order of partitions within a group.")] = Sort.LAG,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Print how far groups are behind, in messages and in seconds, and which partitions are behind.

    One poll gives the figures. Whether a group makes progress takes a whole window (lag.window_polls times
    lag.interval_s) to judge: until then it is "judging"; --judge and --watch wait for it.

    Exit codes: 0: all groups keep up; 1: a group falls behind; 2: a group is stalled, stopped or rewound, or owners are
    split; 3: lag could not be measured; 4: a group is behind, and was not judged.
    """
    if context.invoked_subcommand is not None:
        return
    console = stdout_console()
    try:
        settings = command_settings(config, bootstrap, overrides)
        from relaygr.kafka.session import KafkaSession
        from relaygr.lag.monitor import LagMonitor

        session = KafkaSession(settings, "relaygr-lag")
        monitor = LagMonitor(session, settings.lag, group or ())
        session.follow_files()
        try:
            monitor.prepare()
            from relaygr.cli import lag_view

            if watch:
                report = lag_view.watch(monitor, settings, console, as_json, sort, every)
            else:
                report = lag_view.measure(monitor, settings, judge)
                if as_json:
                    typer.echo(json.dumps(lag_view.as_json(report), indent=2))
                else:
                    page(console, lag_view.render(report, settings, console.width, sort, every))
        finally:
            session.close()
            monitor.stop()
    except RelayError as error:
        plain_console(stderr=True).print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(NOT_MEASURED) from error
    raise typer.Exit(lag_view.exit_code(report))


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one.", show_default=False)
    ] = None,
    group: GroupOption = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Serve lag as Prometheus metrics, until SIGTERM or Ctrl-C. Ready while the cluster answers."""
    from prometheus_client import CollectorRegistry

    from relaygr.kafka.session import KafkaSession
    from relaygr.lag.exporter import LagExporter
    from relaygr.lag.monitor import LagMonitor
    from relaygr.runtime.probes import ProbeServer
    from relaygr.runtime.readiness import Check, Readiness
    from relaygr.runtime.stop_signals import StopSignals

    settings = command_settings(config, bootstrap, overrides)
    session = KafkaSession(settings, "relaygr-lag")
    monitor = LagMonitor(session, settings.lag, group or ())
    exporter = LagExporter(monitor, settings.lag)
    registry = CollectorRegistry()
    registry.register(exporter)

    def readiness() -> Readiness:
        problem = exporter.problem
        return Readiness((Check("measured", problem is None, problem or ""),))

    stopping = StopSignals()
    server = ProbeServer(
        settings.lag.http_host if host is None else host,
        settings.lag.http_port if port is None else port,
        readiness,
        registry=registry,
    )
    with session.ends_for_new_files(), server:
        typer.echo(
            f"lag of {', '.join(group or (settings.group_prefix + '.*',))} at {settings.bootstrap}: "
            f"{http_address(address_here(server.host), server.port)}/metrics"
        )
        monitor.start()
        stopping.wait()
        monitor.stop()
