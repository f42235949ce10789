"""Measures lag for `relaygr lag`, and prints the report: a summary with tables of the partitions, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaygr.cli.lag import Sort
from relaygr.cli.texts import plain_console, printable
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import GroupReport, LagReport, PartitionReport, TimeLagSource
from relaygr.lag.status import LagStatus
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings

WIDE: Final = 130
"""The width, in characters, from which a table also has the offsets and the source of the seconds."""
_LEAST_ROWS: Final = 3
"""Rows of a table that `--watch` shows on however low a terminal."""

_STYLES: Final = {
    LagStatus.OK: "green",
    LagStatus.NO_COMMIT: "dim",
    LagStatus.JUDGING: "cyan",
    LagStatus.WARN: "yellow",
    LagStatus.REWIND: "red",
    LagStatus.BEYOND_END: "red",
    LagStatus.STALL: "red",
    LagStatus.STOP: "red",
    LagStatus.UNKNOWN: "magenta",
}

_NUMBERS: Final = ("part", "committed", "end", "lag", "seconds")
_SOURCES: Final = {
    TimeLagSource.CAUGHT_UP: "",
    TimeLagSource.INTERPOLATED: "polls",
    TimeLagSource.RECORD: "record",
}


def exit_code(report: LagReport) -> int:
    """The exit code of the most severe status. An owner split counts as a stall; no group counts as not measured."""
    if not report.groups:
        return LagStatus.UNKNOWN.exit_code
    if report.status is not LagStatus.UNKNOWN and any(group.owner_split for group in report.groups):
        return LagStatus.STALL.exit_code
    return report.status.exit_code


def measure(monitor: LagMonitor, settings: Settings, judge: bool) -> LagReport:
    """Polls once; with `judge`, until every partition that is behind has been judged."""
    report = monitor.poll()
    if not judge or not _is_behind(report, settings.lag.ok_messages):
        return report
    window_s = settings.lag.window_polls * settings.lag.interval_s
    with plain_console(stderr=True).status(f"A group is behind: measuring its progress for {window_s:.0f} s"):
        # A group that appears meanwhile begins its own window.
        for _ in range(2 * settings.lag.window_polls):
            if report.settled and report.status is not LagStatus.JUDGING:
                break
            time.sleep(settings.lag.interval_s)
            report = monitor.poll()
    return report


def _is_behind(report: LagReport, ok_messages: int) -> bool:
    return any(_behind(row) > ok_messages for group in report.groups for row in group.partitions)


def _behind(row: PartitionReport) -> int:
    """Messages that wait, also those of a group without a commit."""
    return row.lag or row.unread or 0


def watch(
    monitor: LagMonitor, settings: Settings, console: Console, json_lines: bool, sort: Sort, every: bool
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
            height = console.height if console.is_terminal else None
            body = [render(report, settings, console.width, sort, every, height)]
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


def render(
    report: LagReport, settings: Settings, width: int, sort: Sort, every: bool, height: int | None = None
) -> RenderableType:
    """A summary of each group, then a table of each group with the partitions that are behind, or with all (`every`).

    `height`: the tables leave out the last rows that do not fit into so many lines, and say how many.
    """
    if not report.groups:
        return Text(
            f"No group to show at {settings.bootstrap}: no group {settings.group_prefix}.* has consumed yet, or "
            "no group matches --group.",
            style="yellow",
        )
    parts: list[RenderableType] = []
    for group in report.groups:
        parts += _summary(group)
    tables = [(group, rows) for group in report.groups if (rows := _rows(group, sort, every))]
    most = None
    if height is not None and tables:
        # Each table has an empty line, a title, a head and perhaps a line about rows that are left out.
        free = height - sum(_lines(part, width) for part in parts) - 4 * len(tables) - 1
        most = max(_LEAST_ROWS, free // len(tables))
    for group, rows in tables:
        parts += [Text(""), Text(printable(group.group), style="bold"), _table(rows[:most], width)]
        if most is not None and len(rows) > most:
            parts.append(Text(f" {len(rows) - most} more: enlarge the window, or leave out --watch", style="dim"))
    return Group(*parts)


def _lines(part: RenderableType, width: int) -> int:
    return -(-part.cell_len // width) if isinstance(part, Text) else 1


def _summary(group: GroupReport) -> list[RenderableType]:
    behind = "lag unknown" if group.lag is None else f"{group.lag:,} messages behind"
    if group.max_time_lag is not None:
        behind += f", {_seconds(group.max_time_lag.seconds)} s at most"
    text = Text(printable(group.group), style="bold")
    text.append(f"  {group.status.value.upper()}", style=f"not bold {_STYLES[group.status]}")
    text.append(f"  {behind}", style="not bold")
    members = "members unknown" if group.members is None else f"members: {group.members}"
    assignor = f", {printable(group.assignor)}" if group.assignor else ""
    lagging = sum(1 for row in group.partitions if row.lag)
    where = f"; {lagging} of {len(group.partitions)} partitions are behind" if lagging else ""
    parts: list[RenderableType] = [
        text,
        Text(f"  {group.state}, {members}, {group.protocol} protocol{assignor}{where}", style="dim"),
    ]
    unread = sum(row.unread or 0 for row in group.partitions)
    if unread:
        parts.append(Text(f"  {unread:,} unread on partitions without a commit", style="yellow"))
    if group.lost:
        parts.append(Text(f"  {group.lost:,} DELETED UNREAD", style="bold red"))
    parts += [Text(f"  {printable(problem)}.", style="yellow") for problem in group.problems]
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
    return parts


def _rows(group: GroupReport, sort: Sort, every: bool) -> list[PartitionReport]:
    rows = [row for row in group.partitions if every or _behind(row) or row.lost or row.status is LagStatus.BEYOND_END]
    return sorted(rows, key=_order(sort))


def _table(rows: Sequence[PartitionReport], width: int) -> Table:
    """A line for each row. On a narrow terminal offsets are left out, and long names of owners are cut at their end."""
    is_wide = width >= WIDE
    names = ["topic", "part", "committed", "end", "lag", "seconds", "by", "status", "owner"]
    shown = [at for at, name in enumerate(names) if is_wide or name not in ("committed", "end", "by")]
    cells = [_cells(row) for row in rows]
    widths = [max(len(names[at]), *(len(each[at]) for each in cells)) for at in shown[:-1]]
    left = width - sum(widths) - 2 * len(shown)
    table = Table(box=None, padding=(0, 1, 0, 1))
    for at in shown:
        justify: Literal["left", "right"] = "right" if names[at] in _NUMBERS else "left"
        most = max(len("owner"), left) if names[at] == "owner" else None
        table.add_column(names[at], justify=justify, no_wrap=True, overflow="ellipsis", max_width=most)
    for row, each in zip(rows, cells, strict=True):
        styles = {"status": _STYLES[row.status]}
        table.add_row(*(Text(each[at], style=styles.get(names[at], "")) for at in shown))
    return table


def _cells(row: PartitionReport) -> tuple[str, ...]:
    time_lag = row.time_lag
    return (
        printable(row.topic),
        str(row.partition),
        "no commit" if row.committed is None else str(row.committed),
        "?" if row.end is None else str(row.end),
        "-" if row.lag is None and row.unread is None else str(_behind(row)),
        "-" if time_lag is None else _seconds(time_lag.seconds),
        "" if time_lag is None else _SOURCES[time_lag.source],
        row.status.value,
        printable(row.owner.name) if row.owner else "-",
    )


def _order(sort: Sort) -> Callable[[PartitionReport], Any]:
    if sort is Sort.LAG:
        return lambda row: (-_behind(row), row.topic, row.partition)
    if sort is Sort.SECONDS:
        return lambda row: (-(row.time_lag.seconds if row.time_lag else 0.0), row.topic, row.partition)
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
