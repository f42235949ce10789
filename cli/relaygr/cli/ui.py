"""`relaygr ui` serves a live page over a cluster, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from typing import Annotated

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings


def ui(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one.", show_default="9310")
    ] = None,
    scrape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A /metrics page of a trigger, gateway, supervisor or worker; may be repeated.",
            show_default="those that workers name",
        ),
    ] = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Serve a live page over the cluster: impressions, paths, latencies, workers, lag and late requests.

    It only reads: it joins no group, commits nothing and writes nothing. On an address that other machines reach, a
    browser must give a token (ui.token; by default one is made and printed).
    """
    from relaygr.kafka.session import KafkaSession
    from relaygr.runtime.stop_signals import StopSignals
    from relaygr.ui.live import LiveCluster
    from relaygr.ui.page import Page
    from relaygr.ui.scrape import check_url
    from relaygr.ui.server import UiServer

    settings = command_settings(config, bootstrap, overrides)
    own = settings.ui.model_copy(update={"scrape": (*settings.ui.scrape, *(scrape or ()))})
    for url in own.scrape:
        check_url(url)
    page = Page("RelayGR")
    server = UiServer(
        page,
        own.http_host if host is None else host,
        own.http_port if port is None else port,
        own.token.get_secret_value() if own.token is not None else None,
    )
    session = KafkaSession(settings, "relaygr-ui")
    live = LiveCluster(session, own)
    with session.ends_for_new_files(), server:
        live.require_topics()
        # Until here, Ctrl-C interrupts the wait for the cluster.
        stopping = StopSignals()
        page.follow(live, "")
        with live:
            typer.echo(f"{settings.topic_prefix}.* at {settings.bootstrap}: {server.address}")
            if server.token is not None and own.token is None:
                typer.echo(f"token {server.token}")
            stopping.wait()
