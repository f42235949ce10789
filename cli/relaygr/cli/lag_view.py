"""Measures lag for `relaygr lag`, and prints the report: a table, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaygr.cli.lag import Sort
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import GroupReport, LagReport, PartitionReport, TimeLagSource
from relaygr.lag.status import LagStatus
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings

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


def exit_code(report: LagReport) -> int:
    """The exit code of the most severe status. An owner split counts as a stall; no group counts as not measured."""
    if not report.groups:
        return LagStatus.UNKNOWN.exit_code
    split = any(group.owner_split for group in report.groups)
    return max(report.status.exit_code, LagStatus.STALL.exit_code if split else 0)


def measure(monitor: LagMonitor, settings: Settings) -> LagReport:
    """Polls once, and for a whole window if a partition is behind."""
    report = monitor.poll()
    if not _is_behind(report, settings.lag.ok_messages):
        return report
    window_s = settings.lag.window_polls * settings.lag.interval_s
    with Console(stderr=True).status(f"A group is behind: measuring its progress for {window_s:.0f} s"):
        while not report.settled:
            time.sleep(settings.lag.interval_s)
            report = monitor.poll()
    return report


def _is_behind(report: LagReport, ok_messages: int) -> bool:
    return any((row.lag or row.unread or 0) > ok_messages for group in report.groups for row in group.partitions)


def watch(
    monitor: LagMonitor, settings: Settings, console: Console, json_lines: bool, sort: Sort, lagging: bool
) -> LagReport:
    """Refreshes until Ctrl-C and returns the last report. Raises RelayError if the first poll fails."""
    report = monitor.poll()
    show: Callable[[LagReport, str | None], None]
    live: Live | None = None
    if json_lines:

        def show(report: LagReport, error: str | None) -> None:
            typer.echo(json.dumps({**as_json(report), "error": error}))

    else:
        live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

        def show(report: LagReport, error: str | None) -> None:
            assert live is not None
            body: list[RenderableType] = [render(report, settings, sort, lagging)]
            if error is not None:
                body.insert(0, Text(f"The last poll failed: {error}. The figures below are old.", style="red"))
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
                continue  # `state.error` is shown. An outage does not end the watch.
    except KeyboardInterrupt:
        return report
    finally:
        if live is not None:
            live.stop()


def render(report: LagReport, settings: Settings, sort: Sort, lagging: bool) -> RenderableType:
    if not report.groups:
        return Text(
            f"No group to show at {settings.bootstrap}: no group {settings.group_prefix}.* has consumed yet, or "
            "no group matches --group.",
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
                    "members. All members must subscribe to the same topics, with equal partition counts (relaygr "
                    "topics check) and the range assignor.",
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
    unread = sum(row.unread or 0 for row in group.partitions)
    if unread:
        behind += f", {unread} unread on partitions without a commit"
    if group.lost:
        behind += f", {group.lost} DELETED UNREAD"
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


def as_json(report: LagReport) -> dict[str, Any]:
    """The report as JSON, without the partitions of each member."""
    content = asdict(report)
    content["status"] = report.status.value
    content["exit_code"] = exit_code(report)
    for group in content["groups"]:
        for row in group["partitions"]:
            if row["owner"] is not None:
                del row["owner"]["partitions"]
    return content
