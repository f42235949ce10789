"""`relaygr gateway` drives traffic: histories, retrieval events and ranking requests, and records the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings

REFERENCE_BUDGET_MS = 60_000


def gateway(
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
) -> None:
    """Drive open-loop traffic of returning users against the cluster, and record the answers."""
    import signal
    from functools import partial

    import structlog

    from relaygr.client import RelayClient
    from relaygr.runtime.interpreter import tune_interpreter
    from relaygr.runtime.probes import Check, ProbeServer, Readiness
    from relaygr.traffic.gateway import Gateway
    from relaygr.traffic.population import population_of
    from relaygr.traffic.records import RecordWriter, numbers_to_compare

    log = structlog.get_logger()
    settings = command_settings(config, bootstrap, overrides)
    population = population_of(settings.gateway)
    writer = RecordWriter(out) if out is not None else None
    player = Gateway(
        partial(RelayClient, settings, settings.gateway.gateway_id, settings.client),
        settings.gateway,
        population,
        writer.write if writer is not None else lambda _: None,
        settings.client.lost_after_ms / 1000,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: player.stop())
    probes = ProbeServer(
        settings.gateway.http_host,
        settings.gateway.http_port,
        lambda: Readiness((Check("playing", True, f"{player.recorded} requests recorded"),)),
    )
    tune_interpreter()
    probes.start()
    log.info(
        "gateway started",
        gateway_id=settings.gateway.gateway_id,
        users=population.size,
        rate_per_s=settings.gateway.rate_per_s,
        relay=settings.gateway.relay,
        metrics=f"http://{probes.host}:{probes.port}/metrics",
    )
    try:
        if reference_of is None:
            player.play()
        else:
            player.replay(numbers_to_compare(reference_of, sample), REFERENCE_BUDGET_MS, at_once)
    finally:
        if writer is not None:
            writer.close()
        probes.stop()
    log.info("gateway stopped", recorded=player.recorded)
