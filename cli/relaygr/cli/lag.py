"""`relaygr lag` prints how far groups are behind; `relaygr lag serve` serves it as Prometheus metrics."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from prometheus_client import CollectorRegistry
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.lag.exporter import LagExporter
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import GroupReport, LagReport, PartitionReport, TimeLagSource
from relaygr.lag.status import LagStatus
from relaygr.runtime.errors import RelayError
from relaygr.runtime.probes import Check, ProbeServer, Readiness
from relaygr.settings import Settings

app = typer.Typer(add_completion=False)

# Nobody looks at a pipe's width: nothing is cut short there.
_PIPE_WIDTH: Final = 240
NOT_MEASURED: Final = LagStatus.UNKNOWN.exit_code
_STYLES: Final = {
    LagStatus.OK: "green",
    LagStatus.NO_COMMIT: "dim",
    LagStatus.WARN: "yellow",
    LagStatus.REWIND: "red",
    LagStatus.STALL: "red",
    LagStatus.STOP: "red",
    LagStatus.UNKNOWN: "magenta",
}

_SOURCES: Final = {
    TimeLagSource.CAUGHT_UP: "",
    TimeLagSource.INTERPOLATED: "polls",
    TimeLagSource.RECORD: "record",
}

GroupOption = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="NAME", help="Groups, * and ? allowed; may be repeated. Default: GROUP_PREFIX.*"),
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
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one line for each poll.")] = False,
    sort: Annotated[Sort, typer.Option(help="The order of partitions within a group.")] = Sort.PARTITION,
    lagging: Annotated[bool, typer.Option("--lagging", help="Only partitions that are behind.")] = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Lag in messages and in seconds, by group, topic and partition, with the owner.

    Where something is behind, it is polled for a whole window (lag.window_polls times lag.interval_s), to see
    whether it moves. Exits with 0: all groups keep up; 1: one falls behind; 2: one is stalled, stopped or rewound,
    or owners are split; 3: it could not be measured.
    """
    if context.invoked_subcommand is not None:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    try:
        settings = command_settings(config, bootstrap, overrides)
        monitor = LagMonitor(settings, settings.lag, group or ())
        try:
            if watch:
                report = _watch(monitor, settings, console, as_json, sort, lagging)
            else:
                report = _measure(monitor, settings)
                if as_json:
                    typer.echo(json.dumps(_as_json(report), indent=2))
                else:
                    console.print(_render(report, settings, sort, lagging))
        finally:
            monitor.stop()
    except RelayError as error:
        Console(stderr=True, highlight=False).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(NOT_MEASURED) from error
    raise typer.Exit(exit_code(report))


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one.", show_default=False)] = None,
    group: GroupOption = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Serve lag as Prometheus metrics, until SIGTERM or Ctrl-C. Ready while the cluster answers."""
    settings = command_settings(config, bootstrap, overrides)
    monitor = LagMonitor(settings, settings.lag, group or ())
    exporter = LagExporter(monitor, settings.lag)
    registry = CollectorRegistry()
    registry.register(exporter)

    def readiness() -> Readiness:
        fresh = exporter.fresh_report is not None
        return Readiness((Check("measured", fresh, "" if fresh else monitor.state.error or "not polled yet"),))

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    server = ProbeServer(
        settings.lag.http_host if host is None else host,
        settings.lag.http_port if port is None else port,
        readiness,
        registry=registry,
    )
    with server:
        typer.echo(
            f"lag of {', '.join(group or (settings.group_prefix + '.*',))} at {settings.bootstrap}: "
            f"http://{server.host}:{server.port}/metrics"
        )
        monitor.start()
        stopping.wait()
        monitor.stop()


def exit_code(report: LagReport) -> int:
    """The gravest status of all groups; an owner split is as grave as a stall. No group: not measured."""
    if not report.groups:
        return NOT_MEASURED
    split = any(group.owner_split for group in report.groups)
    return max(report.status.exit_code, LagStatus.STALL.exit_code if split else 0)


def _measure(monitor: LagMonitor, settings: Settings) -> LagReport:
    """Polls once, and for a whole window if something is behind."""
    report = monitor.poll()
    if not _is_behind(report, settings.lag.ok_messages):
        return report
    window_s = settings.lag.window_polls * settings.lag.interval_s
    with Console(stderr=True).status(f"Something is behind: watching for {window_s:.0f} s whether it moves"):
        while not report.settled:
            time.sleep(settings.lag.interval_s)
            report = monitor.poll()
    return report


def _is_behind(report: LagReport, ok_messages: int) -> bool:
    return any((row.lag or 0) > ok_messages for group in report.groups for row in group.partitions)


def _watch(
    monitor: LagMonitor, settings: Settings, console: Console, as_json: bool, sort: Sort, lagging: bool
) -> LagReport:
    """Refreshes until Ctrl-C; the last report. Raises RelayError if even the first poll fails."""
    report = monitor.poll()
    show: Callable[[LagReport, str | None], None]
    live: Live | None = None
    if as_json:

        def show(report: LagReport, error: str | None) -> None:
            typer.echo(json.dumps({**_as_json(report), "error": error}))

    else:
        live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

        def show(report: LagReport, error: str | None) -> None:
            assert live is not None
            body: list[RenderableType] = [_render(report, settings, sort, lagging)]
            if error is not None:
                body.insert(0, Text(f"Not measured now: {error}. What follows is old.", style="red"))
            live.update(Group(*body), refresh=True)

    if live is not None:
        live.start()
    try:
        while True:
            show(report, monitor.state.error)
            time.sleep(settings.lag.interval_s)
            try:
                report = monitor.poll()
            except RelayError:
                continue  # `state.error` has it; a cluster that is away for a while ends no watch.
    except KeyboardInterrupt:
        return report
    finally:
        if live is not None:
            live.stop()


def _render(report: LagReport, settings: Settings, sort: Sort, lagging: bool) -> RenderableType:
    if not report.groups:
        return Text(
            f"No group to show at {settings.bootstrap}: nothing has consumed yet as {settings.group_prefix}.*, or "
            "the names given by --group match none.",
            style="yellow",
        )
    parts: list[RenderableType] = []
    for group in report.groups:
        parts.append(_headline(group, report.settled))
        parts += [Text(f"  {problem}.", style="yellow") for problem in group.problems]
        if group.owner_split:
            shown = ", ".join(str(partition) for partition in group.owner_split[:12])
            parts.append(
                Text(
                    f"  OWNER SPLIT on partitions {shown}: their pre-infer jobs and ranking requests go to different "
                    "members. All members must subscribe to the same topics, of equal counts (relaygr topics check), "
                    "with the range assignor.",
                    style="bold red",
                )
            )
        if group.partitions:
            parts.append(_table(group, sort, lagging))
    return Group(*parts)


def _headline(group: GroupReport, settled: bool) -> Text:
    members = "members unknown" if group.members is None else f"members: {group.members}"
    assignor = f", {group.assignor}" if group.assignor else ""
    behind = f"{group.lag} messages behind"
    if group.max_time_lag is not None:
        behind += f", {_seconds(group.max_time_lag.seconds)} s at most"
    text = Text(group.group, style="bold")
    text.append(f"  {group.status.value.upper()}", style=f"not bold {_STYLES[group.status]}")
    if not settled and group.max_lag:
        text.append("  (too early to judge progress)", style="not bold dim")
    text.append(f"  {behind}; {group.state}, {members}, {group.protocol} protocol{assignor}", style="not bold")
    return text


def _table(group: GroupReport, sort: Sort, lagging: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("topic", overflow="fold")
    for name, width in (("part", 4), ("committed", 9), ("end", 7), ("lag", 5), ("seconds", 7)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("by", no_wrap=True, min_width=6)
    table.add_column("owner", overflow="fold")
    table.add_column("status", no_wrap=True, min_width=9)
    rows = [row for row in group.partitions if not lagging or row.lag]
    for row in sorted(rows, key=_order(sort)):
        time_lag = row.time_lag
        table.add_row(
            row.topic,
            str(row.partition),
            "no commit" if row.committed is None else str(row.committed),
            "?" if row.end is None else str(row.end),
            "-" if row.lag is None else str(row.lag),
            "-" if time_lag is None else _seconds(time_lag.seconds),
            "" if time_lag is None else _SOURCES[time_lag.source],
            row.owner.name if row.owner else "-",
            Text(row.status.value, style=_STYLES[row.status]),
        )
    return table


def _order(sort: Sort) -> Callable[[PartitionReport], Any]:
    if sort is Sort.LAG:
        return lambda row: -(row.lag or 0)
    if sort is Sort.SECONDS:
        return lambda row: -(row.time_lag.seconds if row.time_lag else 0.0)
    return lambda row: (row.topic, row.partition)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def _as_json(report: LagReport) -> dict[str, Any]:
    """The report as it is, with members shortened to what names them."""
    content = asdict(report)
    content["status"] = report.status.value
    content["exit_code"] = exit_code(report)
    for group in content["groups"]:
        for row in group["partitions"]:
            if row["owner"] is not None:
                del row["owner"]["partitions"]
    return content
