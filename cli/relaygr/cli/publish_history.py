"""`relaygr publish history` and the logs of `relaygr publish behaviours`: interactions from a file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from confluent_kafka import Message
from rich.console import Console

from relaygr.cli.options import (
    ActionsOption,
    BootstrapOption,
    ColumnsOption,
    ConfigOption,
    SetOption,
    TiesOption,
    command_settings,
    is_given,
    require_writable,
)
from relaygr.cli.texts import plain_console, show_size, time_text
from relaygr.cluster.admin import require_topics
from relaygr.cluster.rights import Role
from relaygr.ingest.bridge import KEY_HEADER, SOURCE, VALUE_HEADER, Bridge, Passed, header_of, time_of
from relaygr.ingest.gather import Interactions, Limits, ReadReport
from relaygr.ingest.json_lines import MAX_LIST_TEXTS, parse_log_object
from relaygr.ingest.known import KnownModel, ModelOption, SentInputs, codes_text, named_log
from relaygr.ingest.layouts import Layout
from relaygr.ingest.log_map import LogMap, iso_ms
from relaygr.ingest.log_objects import MappedObjects
from relaygr.ingest.publish_lines import print_line
from relaygr.ingest.publish_log import (
    PublishReport,
    Selection,
    behaviours_count,
    histories_count,
    publish_behaviours,
    publish_histories,
)
from relaygr.ingest.reading import joined, log_bytes, read_interactions
from relaygr.ingest.registry import SchemaRegistry
from relaygr.kafka.settings import KafkaSettings
from relaygr.progress import progress_bars
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.stop_signals import StopSignals
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_VERSION_NUMBER
from relaygr.schemas.times import EARLIEST_MS, UNITS_MS, unit_of, wrong_unit
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings

if TYPE_CHECKING:
    from relaygr.ingest.registered import RegisteredValues

_SHOWN_BAD_LINES = 20
_DAY_MS = 24 * 3600 * 1000


UntilEndOption = Annotated[
    bool, typer.Option("--until-end", help="Of a topic: stop at its end. Default: go on until SIGTERM or Ctrl-C.")
]

RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--schema-registry",
        metavar="URL",
        help="Of a topic: values are Avro, Protobuf or JSON Schema, with schemas there. Settings of "
        "schema_registry have user and password.",
        show_default=False,
    ),
]


def history(
    context: typer.Context,
    interactions: Annotated[
        list[Path] | None,
        typer.Option(
            "--interactions",
            metavar="FILE",
            help="The log: CSV or JSON lines, plain or .gz, Parquet, or a folder of these. Its layout is detected. "
            "Several, in the order of time, are one log.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="kafka:TOPIC", help="JSON objects of a topic, a user each.", show_default=False),
    ] = None,
    columns: ColumnsOption = None,
    actions: ActionsOption = None,
    ties: TiesOption = "hash",
    schema_registry: RegistryOption = None,
    until_end: UntilEndOption = False,
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
    cut: Annotated[
        str | None,
        typer.Option(
            "--cut",
            metavar="TIME",
            help="Publish behaviours up to this time: ms since the epoch, or such as 2026-11-27T00:00 (UTC). Workers "
            "keep what they have after it. Default: the last time of the log, up to now.",
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
    model: ModelOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the log and report, without publishing.")] = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Publish every user's history from a log of interactions, or from a topic (docs/publishing.md).

    The command reads all files first, and publishes nothing if there are too many bad lines. Otherwise it
    reports bad lines with their numbers and skips them. Exits with 0 if the cluster acknowledged every history,
    else with 1.
    """
    settings = command_settings(config, bootstrap, overrides)
    if (source is None) == (not interactions):
        raise RelayError("give --interactions FILE (a log) or --from kafka:TOPIC, one of them")
    refuse_misplaced(context, source)
    names = named_log(columns, actions, model, ties)
    if item_map is not None:
        require_writable("--item-map", item_map)
    if not dry_run:
        # Fail before the log is read, which can take minutes.
        require_topics(settings, Role.HISTORY_PUBLISHER)
    if source is not None:
        run_bridge(settings, source, Topic.HISTORY, names, model, until_end, schema_registry)
        return
    assert interactions
    console = plain_console(soft_wrap=True)
    cut_ms = None if cut is None else time_option("--cut", cut)
    read = _read_all(console, interactions, Limits(max_bad_lines=max_bad_lines), model, names)
    if cut_ms is not None:
        if cut_ms > _now_ms() + _DAY_MS:
            raise RelayError(
                f"--cut is {time_text(cut_ms)}, in the future: workers would keep nothing that the log lacks"
            )
        read = read.until(cut_ms)
    if not read.users:
        until = "" if cut_ms is None else f" up to {time_text(cut_ms)} (--cut)"
        raise RelayError(f"{_named(interactions)} contains no interactions{until}: there is nothing to publish")
    if cut_ms is None and read.report.layout.time is not None:
        cut_ms = _last_time_ms(read)
    if item_map is not None:
        _write_item_map(item_map, read.item_numbers)
        console.print(f"Item ids     {item_map}")
    if dry_run:
        return
    report = _publish(settings, read, Selection(users, max_behaviours, number, cut_ms))
    _tell_published(console, report, "histories", settings.topic(Topic.HISTORY), settings)
    if not report.complete:
        raise typer.Exit(1)


_OF_LOGS = ("ties", "after_ms", "users", "max_behaviours", "number", "cut", "item_map", "dry_run")
_OF_TOPICS = ("until_end", "schema_registry")


def refuse_misplaced(context: typer.Context, source: str | None) -> bool:
    """Whether the source is a topic. Raises RelayError for options that are of another kind of source."""
    is_topic = (source or "").startswith(SOURCE)
    of_others: tuple[str, ...] = (*_OF_LOGS, "rate", "max_bad_lines") if is_topic else (*_OF_TOPICS, "rate")
    where = "--from kafka:TOPIC" if is_topic else "--interactions"
    if source is not None and not is_topic:
        of_others, where = (*_OF_TOPICS, *_OF_LOGS), "--from FILE"
    if given := [name for name in of_others if is_given(context, name)]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RelayError(f"Leave out {names}: without effect with {where}.")
    return is_topic


def run_bridge(
    settings: Settings,
    source: str,
    target: Topic,
    names: LogMap,
    model: Path | None,
    until_end: bool,
    registry_url: str | None,
) -> None:
    """Passes a topic on as behaviours or histories until SIGTERM, Ctrl-C or its end. Raises RelayError."""
    stopping, inputs, mapped = StopSignals(), SentInputs(model), MappedObjects(names)
    registered = None if registry_url is None else _registered(SchemaRegistry(registry_url, settings.schema_registry))
    made_of = mapped.history if target is Topic.HISTORY else mapped.event

    def convert(record: Message) -> Passed:
        content = record.value()
        if content is None and target is Topic.HISTORY:
            key = record.key() or b""
            if registered is not None:
                key = registered.key_text(key, header_of(record, KEY_HEADER), mapped.used_of_key)
            return Passed(mapped.deleted_user(key).encode(), None)
        if registered is not None:
            parsed = registered.object(content or b"", header_of(record, VALUE_HEADER), mapped.used)
        else:
            parsed = parse_log_object(content or b"", MAX_LIST_TEXTS)
        made = made_of(parsed, time_of(record))
        inputs.check(made)
        return Passed(made.user_id.encode(), encode(made), made)

    def count(passed: Passed) -> None:
        if passed.made is not None:
            inputs.count(passed.made)

    bridge = Bridge(settings, source, settings.topic(target), convert, count, print_line)
    bridge.run(until_end, lambda: stopping.came)
    print_line(f"{bridge.text()}{inputs.text()}, group {bridge.group}")


def _registered(registry: SchemaRegistry) -> RegisteredValues:
    """Needs the libraries of the extra `avro`."""
    from relaygr.ingest.registered import RegisteredValues

    return RegisteredValues(registry)


def behaviours_of_log(
    kafka: KafkaSettings,
    paths: list[Path],
    after_ms: int | None,
    max_bad_lines: int,
    model: Path | None,
    names: LogMap,
) -> bool:
    """Publishes the behaviours of a log that are later than a time. Returns whether all were delivered."""
    console = plain_console(soft_wrap=True)
    read = _read_all(console, paths, Limits(max_bad_lines=max_bad_lines), model, names)
    if not read.users:
        raise RelayError(f"{_named(paths)} contains no interactions: there is nothing to publish")
    with progress_bars() as bars:
        bars.began("publishing", behaviours_count(read, after_ms))
        report = publish_behaviours(kafka, read, after_ms, bars.reached)
    _tell_published(console, report, "behaviours", kafka.topic(Topic.BEHAVIOURS), kafka)
    return report.complete


def time_option(name: str, text: str) -> int:
    """The ms since the epoch that an option names. Raises RelayError."""
    try:
        time_ms = int(text) if text.removeprefix("-").isdecimal() else iso_ms(text)
    except ValueError as error:
        raise RelayError(f"{name} is {text!r}: give ms since the epoch, or a time such as 2026-11-27T00:00") from error
    if wrong := wrong_unit(time_ms, "milliseconds"):
        raise RelayError(f"{name}: {wrong}")
    return time_ms


def _read_all(console: Console, paths: list[Path], limits: Limits, model: Path | None, names: LogMap) -> Interactions:
    """Several files as one log, and prints what was read.

    Raises RelayError for a file whose times are not those of behaviours, and for a log that is not meant for the model.
    """
    known = KnownModel(model) if model is not None else None
    parts = []
    for path in paths:
        if len(paths) > 1:
            console.print(f"File         {path}")
        parts.append(_read(path, limits, names))
        _tell_read(console, parts[-1].report)
        _check_times(path, parts[-1].report)
        if ahead := int(np.count_nonzero(parts[-1].behaviours.timestamps_ms > _now_ms() + _DAY_MS)):
            console.print(f"Note         {ahead:,} behaviours are dated after tomorrow: workers date them earlier")
        for note in known.check_log(parts[-1]) if known is not None else ():
            console.print(f"Note         {note}")
    whole = joined(parts)
    if len(parts) > 1 and (same := whole.repeats()):
        console.print(f"Note         {same:,} rows of all files together repeat another one exactly")
    return whole


def _check_times(path: Path, report: ReadReport) -> None:
    """Raises RelayError if all times are before 1990 or after tomorrow."""
    first_ms, last_ms = report.first_ms, report.last_ms
    tomorrow_ms = _now_ms() + _DAY_MS
    if report.layout.time is None or first_ms is None or last_ms is None:
        return
    if last_ms >= EARLIEST_MS and first_ms <= tomorrow_ms:
        return
    fits = unit_of(last_ms / UNITS_MS[report.time_unit])
    raise RelayError(
        f"{path}: read as {report.time_unit}, all times are from {time_text(first_ms)} to {time_text(last_ms)}, and "
        "behaviours are not before 1990 or after tomorrow. "
        + (f"As {fits} they would fit: give them in {fits}" if fits else "No unit fits: correct the column of the time")
        + (" and name the column `timestamp`" if report.layout.time_is_ms else "")
    )


def _last_time_ms(read: Interactions) -> int:
    """The last time of a log. Times in the future are wrong: histories cut there replace all that workers have."""
    now_ms, times_ms = _now_ms(), read.behaviours.timestamps_ms
    past_ms = times_ms[times_ms <= now_ms]
    return int(past_ms.max()) if past_ms.size else now_ms


def _now_ms() -> int:
    return SystemClock().wall_us() // 1000


def _named(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _read(path: Path, limits: Limits, names: LogMap) -> Interactions:
    with progress_bars() as bars:
        bars.began(f"reading {path.name}", log_bytes(path))
        return read_interactions(path, limits, bars.reached, names)


def _publish(kafka: KafkaSettings, read: Interactions, selection: Selection) -> PublishReport:
    with progress_bars() as bars:
        bars.began("publishing", histories_count(read, selection))
        return publish_histories(kafka, read, selection, bars.reached)


def _tell_read(console: Console, report: ReadReport) -> None:
    console.print(f"Layout       {report.layout.kind} ({report.layout.because})")
    console.print(
        f"Read         {report.lines:,} lines, {report.interactions:,} interactions, "
        f"{report.users:,} users, {report.items:,} items"
    )
    if report.first_ms is not None and report.last_ms is not None:
        console.print(f"Time         {time_text(report.first_ms)} to {time_text(report.last_ms)}")
    if report.length_percentiles:
        lengths = ", ".join(f"P{p} {length:,}" for p, length in report.length_percentiles.items() if p < 100)
        console.print(f"Lengths      {lengths}, longest {report.length_percentiles[100]:,}")
    if report.actions:
        console.print(f"Actions      {codes_text(report.actions)}{_meaning(report.layout)}")
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
        f"Published    {report.delivered:,} of {report.offered:,} {what}, {show_size(report.offered_bytes)}, "
        f"to {topic} at {kafka.bootstrap}"
    )
    for cause, count in report.causes.items():
        console.print(f"Failed       {count:,}: {cause}")


def _meaning(layout: Layout) -> str:
    """How the codes follow from the log."""
    if layout.flags:
        return " (sums of the bits of the flags)"
    if layout.map.actions:
        return f" ({', '.join(f'{name}={code}' for name, code in layout.map.actions.items())})"[:200]
    return " (twice the rating)" if layout.has_ratings else ""


def _write_item_map(path: Path, numbers: dict[str, int]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("source_id", "item_id"))
            writer.writerows(numbers.items())
    except OSError as error:
        raise RelayError(f"--item-map {path} cannot be written: {error.strerror}") from error
