"""`relaygr publish history` and the logs of `relaygr publish behaviours`: interactions from a file."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.cli.texts import plain_console
from relaygr.interactions import Interactions, Limits, ReadReport, read_interactions
from relaygr.interactions.publishing import (
    PublishReport,
    Selection,
    behaviours_count,
    histories_count,
    publish_behaviours,
    publish_histories,
)
from relaygr.kafka.admin import require_topics
from relaygr.kafka.rights import Role
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_VERSION_NUMBER
from relaygr.schemas.topics import Topic

_SHOWN_BAD_LINES = 20


def history(
    interactions: Annotated[
        Path, typer.Option("--interactions", metavar="FILE", help="The log, plain or .gz. Its layout is detected.")
    ],
    users: Annotated[
        int | None,
        typer.Option("--users", min=1, help="Publish only this many users, the first in the log.", show_default=False),
    ] = None,
    max_behaviours: Annotated[
        int,
        typer.Option(
            "--max-behaviours", min=1, max=MAX_BEHAVIOURS, help="Keep at most this many of each user, the newest."
        ),
    ] = MAX_BEHAVIOURS,
    number: Annotated[
        int | None,
        typer.Option(
            "--number",
            min=0,
            max=MAX_VERSION_NUMBER,
            help="Version number of every history. Default: the time of the user's newest behaviour in ms.",
            show_default=False,
        ),
    ] = None,
    item_map: Annotated[
        Path | None,
        typer.Option(
            "--item-map", metavar="FILE", help="Write the id of each item to this CSV file.", show_default=False
        ),
    ] = None,
    max_bad_lines: Annotated[
        int,
        typer.Option(
            "--max-bad-lines", min=0, help="Bad lines are skipped; publish nothing if there are more than this."
        ),
    ] = 100,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the log and report, without publishing.")] = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Publish every user's history from a log of interactions.

    The command reads the whole file first, and publishes nothing if there are too many bad lines. Otherwise it
    reports bad lines with their numbers and skips them. Exits with 0 if the cluster acknowledged every history,
    else with 1.
    """
    settings = command_settings(config, bootstrap, overrides)
    if not dry_run:
        # Fail before the log is read, which can take minutes.
        require_topics(settings, Role.HISTORY_PUBLISHER)
    console = plain_console(soft_wrap=True)
    read = _read(interactions, Limits(max_bad_lines=max_bad_lines))
    _tell_read(console, read.report)
    if not read.users:
        raise RelayError(f"{interactions} contains no interactions: there is nothing to publish")
    if item_map is not None:
        _write_item_map(item_map, read.item_numbers)
        console.print(f"Item ids     {item_map}")
    if dry_run:
        return
    report = _publish(settings, read, Selection(users, max_behaviours, number))
    _tell_published(console, report, "histories", settings.topic(Topic.HISTORY), settings)
    if not report.complete:
        raise typer.Exit(1)


def behaviours_of_log(kafka: KafkaSettings, path: Path, after_ms: int | None, max_bad_lines: int) -> bool:
    """Publishes the behaviours of a log that are later than a time. Returns whether all were delivered."""
    console = plain_console(soft_wrap=True)
    read = _read(path, Limits(max_bad_lines=max_bad_lines))
    _tell_read(console, read.report)
    with _progress() as progress:
        task = progress.add_task("publishing", total=behaviours_count(read, after_ms))
        report = publish_behaviours(kafka, read, after_ms, lambda done: progress.update(task, completed=done))
    _tell_published(console, report, "behaviours", kafka.topic(Topic.BEHAVIOURS), kafka)
    return report.complete


def _read(path: Path, limits: Limits) -> Interactions:
    with _progress() as progress:
        size_bytes = path.stat().st_size if path.is_file() else None
        task = progress.add_task(f"reading {path.name}", total=size_bytes)
        return read_interactions(path, limits, lambda done: progress.update(task, completed=done))


def _publish(kafka: KafkaSettings, read: Interactions, selection: Selection) -> PublishReport:
    with _progress() as progress:
        task = progress.add_task("publishing", total=histories_count(read, selection))
        return publish_histories(kafka, read, selection, lambda done: progress.update(task, completed=done))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _tell_read(console: Console, report: ReadReport) -> None:
    console.print(f"Layout       {report.layout.kind} ({report.layout.because})")
    console.print(
        f"Read         {report.lines:,} lines, {report.interactions:,} interactions, "
        f"{report.users:,} users, {report.items:,} items"
    )
    if report.first_ms is not None and report.last_ms is not None:
        console.print(f"Time         {_when(report.first_ms)} to {_when(report.last_ms)}")
    if report.length_percentiles:
        lengths = ", ".join(f"P{p} {length:,}" for p, length in report.length_percentiles.items() if p < 100)
        console.print(f"Lengths      {lengths}, longest {report.length_percentiles[100]:,}")
    for note in report.notes:
        console.print(f"Note         {note}")
    if report.bad_lines:
        console.print(f"Bad lines    {len(report.bad_lines)}, left out")
        for bad in report.bad_lines[:_SHOWN_BAD_LINES]:
            console.print(f"             line {bad.number}: {bad.reason}")
        if len(report.bad_lines) > _SHOWN_BAD_LINES:
            console.print(f"             and {len(report.bad_lines) - _SHOWN_BAD_LINES} more")


def _tell_published(console: Console, report: PublishReport, what: str, topic: str, kafka: KafkaSettings) -> None:
    console.print(
        f"Published    {report.delivered:,} of {report.offered:,} {what}, {report.offered_bytes / 1e6:,.1f} MB, "
        f"to {topic} at {kafka.bootstrap}"
    )
    for cause, count in report.causes.items():
        console.print(f"Failed       {count:,}: {cause}")


def _when(time_ms: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"


def _write_item_map(path: Path, numbers: dict[str, int]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("source_id", "item_id"))
            writer.writerows(numbers.items())
    except OSError as error:
        raise RelayError(f"--item-map {path} cannot be written: {error.strerror}") from error
