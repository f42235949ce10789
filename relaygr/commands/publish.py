"""`relaygr publish`: retrieval events and ranking requests from JSON lines, histories from interaction logs."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.commands.publish_history import history
from relaygr.json_lines import BadLines, Line, LineError, TooManyBadLines, read_lines
from relaygr.json_messages import to_json
from relaygr.options import BootstrapOption, ConfigOption, SetOption, load_settings
from relaygr.publish_lines import ranking_from_line, retrieval_from_line
from schemas.codec import EncodeError
from schemas.fields import FieldError
from schemas.messages import MAX_BUDGET_MS, RankingRequest
from streams.admin import require_topics
from streams.client import (
    DeliveryReport,
    EventPublisher,
    MessageRefused,
    QueueFull,
    RankOutcome,
    RelayClient,
)
from streams.client.requests import RequestIds
from streams.clock import SystemClock
from streams.errors import RelayError
from streams.settings import KafkaSettings

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Publish retrieval events, ranking requests or histories."
)
app.command("history")(history)

_CLOSE_TIMEOUT_S: Final = 35.0
"""Longer than a durable producer tries: every message has its report by then."""
_POLL_S: Final = 0.02

FromOption = Annotated[
    str, typer.Option("--from", metavar="FILE", help="JSON lines (docs/publishing.md); - reads standard input.")
]
RateOption = Annotated[
    float | None, typer.Option("--rate", min=0.001, help="Messages a second; none: as fast as they are taken.")
]
MaxBadLinesOption = Annotated[
    int, typer.Option("--max-bad-lines", min=0, help="Bad lines are left out; with more of them, stop.")
]
GatewayOption = Annotated[str, typer.Option("--gateway-id", help="In the request ids that lines leave out.")]


@app.command()
def retrieval(
    source: FromOption,
    rate: RateOption = None,
    max_bad_lines: MaxBadLinesOption = 100,
    ranking_budget_ms: Annotated[
        int, typer.Option(min=1, max=MAX_BUDGET_MS, help="Where a line leaves it out.")
    ] = 100,
    expected_ranking_in_ms: Annotated[
        int, typer.Option(min=0, max=MAX_BUDGET_MS, help="Where a line leaves the expected time out.")
    ] = 100,
    gateway_id: GatewayOption = "publish",
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Publish retrieval events, one for each line. Exits with 1 if a line was bad or an event not delivered."""
    settings = load_settings(config, bootstrap, overrides)
    ids = _request_ids(gateway_id)
    with _opened(source) as stream:
        require_topics(settings)
        publisher = EventPublisher(settings, f"relaygr-publish-{gateway_id}")
        publisher.start()
        undelivered = []

        def send(line: Line) -> None:
            event = retrieval_from_line(
                line.parse(),
                ids.new,
                SystemClock().wall_us(),
                ranking_budget_ms=ranking_budget_ms,
                expected_ranking_in_ms=expected_ranking_in_ms,
            )

            def report(delivery: DeliveryReport) -> None:
                if delivery.error is not None:
                    undelivered.append(line.number)
                    _say(f"line {line.number}: not delivered: {delivery.error}")

            _when_there_is_room(lambda: publisher.publish_retrieval(event, report), publisher.poll)

        try:
            run = _send_lines(stream, send, rate, max_bad_lines, lambda: publisher.poll(), show=sys.stderr.isatty())
        finally:
            unknown = publisher.close(_CLOSE_TIMEOUT_S)
    delivered = run.sent - len(undelivered) - unknown
    _finish(run, f"{delivered} retrieval events delivered", failed=delivered != run.sent)


@app.command()
def ranking(
    source: FromOption,
    rate: RateOption = None,
    max_bad_lines: MaxBadLinesOption = 100,
    deadline_in_ms: Annotated[
        int, typer.Option(min=1, max=MAX_BUDGET_MS, help="Where a line leaves its deadline out.")
    ] = 1000,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests that wait for their answer at a time.")] = 256,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Print each outcome as a JSON line; or only send.")
    ] = True,
    gateway_id: GatewayOption = "publish",
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Send ranking requests, one for each line, and print their outcomes, in the order in which they end.

    Exits with 1 if a line was bad. What was not ranked is an outcome, and no error.
    """
    settings = load_settings(config, bootstrap, overrides)
    _request_ids(gateway_id)
    with _opened(source) as stream:
        require_topics(settings)
        with RelayClient(settings, gateway_id, settings.client) as client, _printing(wait) as outcomes:
            room = threading.Semaphore(min(max_in_flight, settings.client.max_in_flight))

            def send(line: Line) -> None:
                request = ranking_from_line(
                    line.parse(), client.new_request_id, SystemClock().wall_us(), deadline_in_ms=deadline_in_ms
                )
                if wait:
                    room.acquire()
                try:
                    future = _when_there_is_room(lambda: client.submit_request(request), time.sleep)
                except BaseException:
                    room.release()
                    raise
                future.add_done_callback(lambda done: outcomes.add(line.number, request, done))
                future.add_done_callback(lambda _done: room.release())

            run = _send_lines(
                stream, send, rate, max_bad_lines, lambda: None, show=sys.stderr.isatty() and not sys.stdout.isatty()
            )
            if wait:
                # Answers that come late are told from requests that nobody answered.
                client.drain(_patience_s(settings.client.result_grace_ms))
        statistics = client.statistics()
    ended = ", ".join(f"{count} {status}" for status, count in sorted(outcomes.counts.items()))
    lateness = f"; {statistics.late} answered late, {statistics.lost} lost" if statistics.timed_out and wait else ""
    _finish(run, f"{run.sent} ranking requests sent" + (f": {ended or 'none'}{lateness}" if wait else ""))
