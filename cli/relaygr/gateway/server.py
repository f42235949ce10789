"""The server of the gateway: its start, and a stop that answers what it has received.

`run_gateway` returns after SIGTERM or Ctrl-C. After SIGTERM it reports not ready, but serves on for `stop_delay_s`, so
that load balancers learn it before a connection is refused; each answer closes its connection meanwhile. A second
signal, or Ctrl-C, ends that time. Then the gateway takes no new connections, serves the requests that it has received
for `drain_s`, answers those that are left 503, and closes the client.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import structlog
import uvicorn

from relaygr.client import AsyncRelayClient, ClientSettings
from relaygr.gateway.app import GatewayApp
from relaygr.gateway.settings import GatewaySettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.direct_http import http_address
from relaygr.runtime.errors import RelayError
from relaygr.runtime.http_server import ConnectionLimits, listen_on, server_config
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.runtime.probes import ProbeServer
from relaygr.runtime.readiness import Check, Readiness
from relaygr.tracing import Tracer

_TURN_S: Final = 0.2

log = structlog.get_logger()


class _Server(uvicorn.Server):
    """uvicorn's server, which may serve on for a while after SIGTERM."""

    def __init__(self, config: uvicorn.Config, stop_delay_s: float) -> None:
        super().__init__(config)
        self._stop_delay_s = stop_delay_s
        self._stops_at_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        return self.should_exit or self._stops_at_s is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn in place of a signal handler."""
        if sig != signal.SIGTERM or self.is_stopping or not self._stop_delay_s:
            super().handle_exit(sig, frame)
            return
        self._stops_at_s = time.monotonic() + self._stop_delay_s
        # uvicorn adds them to every answer. Clients that keep a connection would send on it until it is refused.
        self.config.encoded_headers.append((b"connection", b"close"))

    def stop_when_due(self) -> None:
        if self._stops_at_s is not None and time.monotonic() >= self._stops_at_s:
            self.should_exit = True


def run_gateway(
    kafka: KafkaSettings,
    client: ClientSettings,
    settings: GatewaySettings,
    told: Callable[[str], None],
    tracer: Tracer | None = None,
) -> None:
    """Serves until SIGTERM or Ctrl-C. `told` gets the address once. Raises RelayError if it cannot start."""
    if settings.token is None and not settings.is_local:
        raise RelayError(
            f"gateway.listen_host is {settings.listen_host}, which other machines can reach, and there is no token: "
            "set gateway.token (RELAYGR_GATEWAY__TOKEN), or listen on 127.0.0.1."
        )
    # uvicorn stops on these signals, and then calls the handlers that it found. Until then they are noted.
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    asyncio.run(_serve(kafka, client, settings, told, asked, tracer))


async def _serve(
    kafka: KafkaSettings,
    client_settings: ClientSettings,
    settings: GatewaySettings,
    told: Callable[[str], None],
    asked: Sequence[int],
    tracer: Tracer | None,
) -> None:
    """`asked`: the signals to stop that came before uvicorn listened for them."""
    listener = listen_on(settings.listen_host, settings.listen_port)
    client = AsyncRelayClient(kafka, settings.gateway_id, client_settings, tracer=tracer)
    try:
        await client.start()
    except BaseException:
        listener.close()
        raise
    # The client answers every request before a stop gives up.
    stop_timeout_s = round(settings.drain_s + client_settings.close_timeout_s + 2)
    limits = ConnectionLimits(settings.max_connections, settings.keep_alive_s)
    server = _Server(server_config(GatewayApp(client, settings).asgi, limits, stop_timeout_s), settings.stop_delay_s)
    probes = ProbeServer(settings.http_host, settings.http_port, lambda: _readiness(server, client))
    try:
        probes.start()
        tune_interpreter()
        if asked:
            log.info("gateway stops before it has served")
            return
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        address = f"{http_address(host, port)}/"
        log.info(
            "gateway started", gateway_id=settings.gateway_id, address=address, token=settings.token is not None,
            metrics=f"{http_address(probes.host, probes.port)}/metrics",
        )  # fmt: skip
        told(address)
        while not server.should_exit and not serving.done():
            await asyncio.wait({serving}, timeout=_TURN_S)
            server.stop_when_due()
        log.info("gateway stops", open_requests=client.in_flight)
        await asyncio.wait({serving}, timeout=settings.drain_s)
        await client.close()
        await serving
    finally:
        await client.close()
        probes.stop()
        listener.close()
    log.info("gateway stopped")


def _readiness(server: _Server, client: AsyncRelayClient) -> Readiness:
    """Not ready while Kafka refuses the gateway, or does not answer it."""
    serves, refusal, silence = server.started and not server.is_stopping, client.refusal, client.silence
    return Readiness(
        (
            Check("serving", serves, "stopping" if server.is_stopping else ""),
            Check("rights", refusal is None, refusal or ""),
            Check("cluster", silence is None, silence or ""),
        )
    )
