"""`relaygr gateway` serves the relay over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings


def gateway(
    host: Annotated[str | None, typer.Option(help="Address of the API.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API; 0: any free one.", show_default=False)] = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Serve retrieval events and ranking requests over HTTP, until SIGTERM or Ctrl-C.

    POST /v1/retrieval and POST /v1/rank take JSON and MessagePack; the page at / describes them. Another address than a
    loopback one needs a token (gateway.token).
    """
    from relaygr.gateway.server import run_gateway
    from relaygr.tracing import start_tracing

    given = [f"gateway.listen_host={host}"] if host is not None else []
    given += [f"gateway.listen_port={port}"] if port is not None else []
    settings = command_settings(config, bootstrap, [*(overrides or ()), *given])
    tracer = start_tracing(settings.tracing, "relaygr-gateway", settings.gateway.gateway_id)
    try:
        run_gateway(
            settings, settings.client, settings.gateway, lambda address: typer.echo(f"gateway: {address}"), tracer
        )
    finally:
        if tracer is not None:
            tracer.close()
