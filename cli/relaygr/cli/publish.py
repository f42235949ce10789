"""`relaygr publish`: events, requests, behaviours and histories, from JSON lines or interaction logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from relaygr.cli.options import (
    ActionsOption,
    BootstrapOption,
    ColumnsOption,
    ConfigOption,
    SetOption,
    TiesOption,
    command_settings,
)
from relaygr.cli.publish_history import (
    RegistryOption,
    UntilEndOption,
    behaviours_of_log,
    history,
    refuse_misplaced,
    run_bridge,
    time_option,
)
from relaygr.client import DeliveryReport, EventPublisher, RelayClient
from relaygr.client.requests import RequestIds
from relaygr.cluster.admin import require_topics
from relaygr.cluster.rights import Role
from relaygr.ingest.json_lines import Line
from relaygr.ingest.known import ModelOption, SentInputs, named_log
from relaygr.ingest.log_objects import MappedObjects
from relaygr.ingest.messages import behaviours_from_line, ranking_from_line, retrieval_from_line
from relaygr.ingest.publish_lines import (
    Outcomes,
    SendReport,
    opened,
    print_line,
    send_lines,
    wait_until,
    when_there_is_room,
)
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_BUDGET_MS
from relaygr.schemas.topics import Topic

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Publish retrieval events, requests, histories or behaviours.",
)
app.command("history")(history)

# Longer than the time-out of a durable producer, so that every message has its delivery report by then.
_DELIVERY_TIMEOUT_S: Final = 35.0

Publish = Callable[[Callable[[DeliveryReport], None]], None]
"""Publishes one message. The argument gets its delivery report."""

FromOption = Annotated[
    str, typer.Option("--from", metavar="FILE", help="JSON lines, see docs/publishing.md; - reads standard input.")
]
RateOption = Annotated[
    float | None,
    typer.Option("--rate", min=0.001, help="Messages a second. Default: no limit.", show_default=False),
]
MaxBadLinesOption = Annotated[
    int, typer.Option("--max-bad-lines", min=0, help="Bad lines are skipped; stop if there are more than this.")
]
GatewayOption = Annotated[str, typer.Option("--gateway-id", help="First part of request ids for lines without one.")]


@app.command()
def retrieval(
    source: FromOption,
    rate: RateOption = None,
    max_bad_lines: MaxBadLinesOption = 100,
    ranking_budget_ms: Annotated[int, typer.Option(min=1, max=MAX_BUDGET_MS, help="For lines that omit it.")] = 100,
    expected_ranking_in_ms: Annotated[
        int, typer.Option(min=0, max=MAX_BUDGET_MS, help="For lines that omit it.")
    ] = 100,
    gateway_id: GatewayOption = "publish",
    model: ModelOption = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Publish a retrieval event for each line.

    Exits with 1 if an event was not delivered, or for more bad lines than --max-bad-lines.
    """
    settings = command_settings(config, bootstrap, overrides)
    clock, inputs = SystemClock(), SentInputs(model)
    ids = _request_ids(gateway_id)
    with opened(source) as stream:
        require_topics(settings, Role.GATEWAY)
        publisher = EventPublisher(settings, f"relaygr-publish-{gateway_id}")
        publisher.start()

        def publish(line: Line) -> Publish:
            event = retrieval_from_line(
                line.parse(),
                ids.new,
                clock.wall_us(),
                ranking_budget_ms=ranking_budget_ms,
                expected_ranking_in_ms=expected_ranking_in_ms,
            )
            inputs.take(event)
            return lambda report: publisher.publish_retrieval(event, report)

        _publish_lines(stream, publisher, publish, rate, max_bad_lines, "retrieval events", inputs)


@app.command()
def ranking(
    source: FromOption,
    rate: RateOption = None,
    max_bad_lines: MaxBadLinesOption = 100,
    deadline_in_ms: Annotated[int, typer.Option(min=1, max=MAX_BUDGET_MS, help="For lines without a deadline.")] = 1000,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Largest number of open requests.")] = 256,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Print each outcome as a JSON line, or send only.")
    ] = True,
    gateway_id: GatewayOption = "publish",
    model: ModelOption = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Send a ranking request for each line, and print each outcome as a JSON line.

    Exits with 1 for more bad lines than --max-bad-lines, or with --no-wait if a request was not acknowledged. A request
    that was not ranked is an outcome and not an error.
    """
    settings = command_settings(config, bootstrap, overrides)
    clock, inputs = SystemClock(), SentInputs(model)
    _request_ids(gateway_id)
    show = sys.stderr.isatty() and not (wait and sys.stdout.isatty())
    with (
        opened(source) as stream,
        Outcomes(min(max_in_flight, settings.client.max_in_flight)) as outcomes,
    ):
        require_topics(settings, Role.GATEWAY)
        with RelayClient(settings, gateway_id, settings.client) as client:

            def send(line: Line) -> None:
                request = ranking_from_line(
                    line.parse(), client.new_request_id, clock.wall_us(), deadline_in_ms=deadline_in_ms
                )
                inputs.take(request)
                if wait:
                    outcomes.follow(line.number, request, lambda: client.submit_request(request))
                else:
                    when_there_is_room(lambda: client.submit_request(request), time.sleep)

            run = send_lines(stream, send, rate, max_bad_lines, time.sleep, show)
            if wait:
                outcomes.wait()
                # Wait for the grace, to distinguish late answers from missing ones.
                client.drain(settings.client.result_grace_ms / 1000 + 1)
            else:
                wait_until(lambda: client.statistics().acknowledged >= run.sent, _DELIVERY_TIMEOUT_S, time.sleep)
                client.close(0.0)
            statistics = client.statistics()
    if wait:
        ended = ", ".join(f"{count} {status}" for status, count in sorted(outcomes.counts.items()))
        silent = statistics.timed_out - statistics.late
        late = f" ({statistics.late} of them answered late, {silent} not at all)" if statistics.timed_out else ""
        _finish(run, f"{run.sent} ranking requests: {ended or 'none'}{late}{inputs.text()}")
    else:
        acknowledged = statistics.acknowledged
        text = f"{acknowledged} of {run.sent} ranking requests delivered{inputs.text()}"
        _finish(run, text, failed=acknowledged < run.sent)


@app.command()
def behaviours(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="SOURCE", help="JSON lines, - for standard input, or kafka:TOPIC.", show_default=False
        ),
    ] = None,
    interactions: Annotated[
        list[Path] | None,
        typer.Option("--interactions", metavar="FILE", help="An interaction log, as for history.", show_default=False),
    ] = None,
    columns: ColumnsOption = None,
    actions: ActionsOption = None,
    ties: TiesOption = "hash",
    schema_registry: RegistryOption = None,
    until_end: UntilEndOption = False,
    after_ms: Annotated[
        int | None,
        typer.Option("--after-ms", help="Of a log: only behaviours after this time, ms since the epoch."),
    ] = None,
    rate: RateOption = None,
    max_bad_lines: MaxBadLinesOption = 100,
    model: ModelOption = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Publish new behaviours: those of each JSON line, or those of an interaction log with their positions.

    With --columns or --actions, and of a topic, objects have the fields of a log (docs/publishing.md). Exits with 1
    for more bad lines than --max-bad-lines, or if a record was not delivered.
    """
    settings = command_settings(config, bootstrap, overrides)
    if (source is None) == (not interactions):
        raise RelayError("give --from SOURCE (JSON lines) or --interactions FILE (a log), one of them")
    is_topic = refuse_misplaced(context, source)
    if after_ms is not None:
        time_option("--after-ms", str(after_ms))
    require_topics(settings, Role.HISTORY_PUBLISHER)
    names = named_log(columns, actions, model, ties)
    if interactions:
        if not behaviours_of_log(settings, interactions, after_ms, max_bad_lines, model, names):
            raise typer.Exit(1)
        return
    assert source is not None
    if is_topic:
        run_bridge(settings, source, Topic.BEHAVIOURS, names, model, until_end, schema_registry)
        return
    clock, inputs, mapped = SystemClock(), SentInputs(model), MappedObjects(names)
    is_mapped = columns is not None or actions is not None
    with opened(source) as stream:
        publisher = EventPublisher(settings, "relaygr-publish-behaviours")
        publisher.start(Topic.BEHAVIOURS)

        def publish(line: Line) -> Publish:
            now_ms = clock.wall_us() // 1000
            if is_mapped:
                event = mapped.event(line.parse_log_object(), now_ms)
            else:
                event = behaviours_from_line(line.parse(), now_ms)
            inputs.take(event)
            return lambda report: publisher.publish_behaviours(event, report)

        _publish_lines(stream, publisher, publish, rate, max_bad_lines, "records of behaviours", inputs)


def _publish_lines(
    stream: BinaryIO,
    publisher: EventPublisher,
    publish: Callable[[Line], Publish],
    rate: float | None,
    max_bad_lines: int,
    what: str,
    inputs: SentInputs,
) -> None:
    """Publishes the message of each line and waits for the delivery reports. Raises Exit(1) if one failed."""
    failures: list[int] = []

    def send(line: Line) -> None:
        message = publish(line)

        def report(delivery: DeliveryReport) -> None:
            if not delivery.delivered:
                failures.append(line.number)
                print_line(f"line {line.number}: not delivered: {delivery.error}")

        when_there_is_room(lambda: message(report), publisher.poll)
        publisher.poll()

    run = send_lines(stream, send, rate, max_bad_lines, publisher.poll, show=sys.stderr.isatty())
    wait_until(lambda: len(publisher) == 0, _DELIVERY_TIMEOUT_S, publisher.poll)
    delivered = run.sent - len(failures) - publisher.close(0.0)
    _finish(run, f"{delivered} of {run.sent} {what} delivered{inputs.text()}", failed=delivered < run.sent)


def _finish(run: SendReport, text: str, failed: bool = False) -> None:
    """Prints the summary. Raises Exit(1) for more bad lines than allowed, if all were bad, or if a message failed."""
    lines = "line" if run.bad == 1 else "lines"
    bad = f"; {run.bad} bad {lines} left out" if run.bad else ""
    if run.stopped:
        bad = f"; stopped after {run.bad} bad {lines} (--max-bad-lines)"
    print_line(f"{text} in {time.monotonic() - run.started_s:.1f} s{bad}")
    if run.stopped or failed or (run.bad and not run.sent):
        raise typer.Exit(1)


def _request_ids(gateway_id: str) -> RequestIds:
    try:
        return RequestIds(gateway_id, SystemClock())
    except ValueError as error:
        raise RelayError(f"--gateway-id: {error}") from error
