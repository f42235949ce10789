"""`relaygr traffic` drives traffic: histories, retrieval events and ranking requests, and records the answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings, require_writable
from relaygr.cli.texts import stdout_console
from relaygr.runtime.direct_http import http_address
from relaygr.runtime.errors import RelayError
from relaygr.traffic.records import LOST

if TYPE_CHECKING:
    from relaygr.traffic.summary import TrafficFigures

REFERENCE_BUDGET_MS = 60_000


def traffic(
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Write one JSON line for each impression to this file.", show_default=False)
    ] = None,
    reference_of: Annotated[
        Path | None,
        typer.Option(
            help="Rank the impressions that an earlier run recorded again, with a long deadline.", show_default=False
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="With --reference-of: largest number of impressions, spread evenly.")
    ] = 240,
    at_once: Annotated[int, typer.Option(min=1, help="With --reference-of: requests in flight.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures at the end as JSON.")] = False,
) -> None:
    """Drive open-loop traffic of returning users against the cluster, and record the answers.

    It ends after traffic.duration_s, with SIGTERM or with Ctrl-C, completes the impressions that it began (after a stop
    within traffic.drain_s), and prints the figures: P50 and P99 of the latency, the share of late requests, and the
    paths.
    """
    import signal
    from functools import partial

    import structlog

    from relaygr.client import RelayClient
    from relaygr.runtime.interpreter import tune_interpreter
    from relaygr.runtime.probes import ProbeServer
    from relaygr.runtime.readiness import Check, Readiness
    from relaygr.tracing import start_tracing
    from relaygr.traffic.player import Player
    from relaygr.traffic.population import population_of
    from relaygr.traffic.records import ImpressionRecord, RecordWriter, numbers_to_compare
    from relaygr.traffic.summary import TrafficSummary

    if out is not None:
        require_writable("--out", out)
    log = structlog.get_logger()
    settings = command_settings(config, bootstrap, overrides)
    population = population_of(settings.traffic)
    if settings.traffic.held_out is not None:
        from relaygr.traffic.held_out import use_one_thread

        use_one_thread()
    writer = RecordWriter(out) if out is not None else None
    summary = TrafficSummary()

    def keep(record: ImpressionRecord) -> None:
        summary.add(record)
        if writer is not None:
            writer.write(record)

    tracer = start_tracing(settings.tracing, "relaygr-traffic", settings.traffic.gateway_id)
    player = Player(
        partial(RelayClient, settings, settings.traffic.gateway_id, settings.client, tracer=tracer),
        settings.traffic,
        population,
        keep,
        settings.client.lost_after_ms / 1000,
        settings.deployment.scenario if settings.deployment is not None else None,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: player.stop())
    probes = ProbeServer(
        settings.traffic.http_host,
        settings.traffic.http_port,
        lambda: Readiness((Check("playing", True, f"{player.recorded} requests recorded"),)),
    )
    tune_interpreter()
    probes.start()
    log.info(
        "traffic started",
        gateway_id=settings.traffic.gateway_id,
        users=population.size,
        rate_per_s=settings.traffic.rate_per_s,
        relay=settings.traffic.relay,
        metrics=f"{http_address(probes.host, probes.port)}/metrics",
    )
    try:
        if reference_of is None:
            player.play()
        else:
            player.replay(numbers_to_compare(reference_of, sample), REFERENCE_BUDGET_MS, at_once)
    finally:
        if writer is not None:
            writer.close()
        if tracer is not None:
            tracer.close()
        probes.stop()
    log.info("traffic stopped", recorded=player.recorded)
    figures = summary.figures()
    budget_ms = settings.traffic.budget_ms if reference_of is None else REFERENCE_BUDGET_MS
    if as_json:
        typer.echo(json.dumps({"budget_ms": budget_ms, **asdict(figures), "late_share": figures.late_share}))
    else:
        _print(figures, budget_ms)
    if writer is not None and writer.problem is not None:
        raise RelayError(f"{writer.problem}. The figures are of all requests.")


def _print(figures: TrafficFigures, budget_ms: int) -> None:
    from rich.table import Table

    console = stdout_console()
    if not figures.requests:
        console.print("No request was sent.")
        return
    console.print(
        f"{figures.requests} requests with a deadline of {budget_ms} ms: "
        f"P50 {_ms(figures.p50_ms)}, P99 {_ms(figures.p99_ms)}, late {figures.late_share:.1%}"
    )
    table = Table()
    for name in ("path or failure", "requests", "share"):
        table.add_column(name, justify="left" if name == "path or failure" else "right")
    for name, count in figures.endings.items():
        table.add_row(name, str(count), f"{count / figures.requests:.1%}")
    console.print(table)
    whole = figures.requests - figures.late
    console.print(f"{whole:,} of {figures.requests:,} requests were answered whole and within {budget_ms} ms.")
    if set(figures.endings) == {LOST}:
        console.print("No worker answered: start one, or let `relaygr doctor` say what is wrong.", style="yellow")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
