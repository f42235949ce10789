"""The server of the gateway: bounded connections, and a stop that answers what it has received.

`run_gateway` returns after SIGTERM or Ctrl-C. It then takes no new connections and reports not ready, serves the
requests that it has received for `drain_s`, answers those that are left 503, and closes the client.

A connection carries one request after the other. It is closed if it waits longer than `keep_alive_s` for a request or a
part of it, or if its peer does not read an answer for that long; uvicorn bounds only the wait after an answer.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from relaygr.client import AsyncRelayClient, ClientSettings
from relaygr.gateway.app import GatewayApp
from relaygr.gateway.settings import GatewaySettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.runtime.http_server import listen_on
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.runtime.probes import Check, ProbeServer, Readiness
from relaygr.tracing import Tracer

BACKLOG: Final = 128
MAX_HEAD_BYTES: Final = 64 << 10
_TURN_S: Final = 0.2

log = structlog.get_logger()


class Connections:
    """The open connections of a server. `sweep` closes those that wait too long."""

    def __init__(self, most: int, longest_wait_s: float) -> None:
        self._most = most
        self._longest_wait_s = longest_wait_s
        # A dict keeps the order in which they became idle.
        self._opened: dict[_Connection, None] = {}

    def protocol(self, *arguments: Any, **options: Any) -> _Connection:
        """A new connection; the factory that uvicorn calls."""
        return _Connection(self, *arguments, **options)

    def add(self, connection: _Connection) -> None:
        if len(self._opened) >= self._most:
            # Without an idle one, the new connection is closed.
            victim = next((each for each in self._opened if not each.is_busy), connection)
            victim.transport.abort()
            self._opened.pop(victim, None)
            if victim is connection:
                return
        self._opened[connection] = None

    def became_idle(self, connection: _Connection) -> None:
        if connection in self._opened:
            self._opened[connection] = self._opened.pop(connection)

    def remove(self, connection: _Connection) -> None:
        self._opened.pop(connection, None)

    def sweep(self, now_s: float) -> None:
        for connection in list(self._opened):
            if connection.waits_s(now_s) > self._longest_wait_s:
                connection.transport.abort()


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, which also knows since when it waits for its peer, and bounds the head of a request."""

    def __init__(self, table: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._table = table
        self._waiting_since_s = self.loop.time()
        self._written = 0
        self._head_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether a request is being served."""
        return self.cycle is not None and not self.cycle.response_complete

    def waits_s(self, now_s: float) -> float:
        """How long the connection has waited: for a request, or for its peer to read."""
        unread = self.transport.get_write_buffer_size()
        if (self.is_busy and not unread) or (unread and unread != self._written):
            self._waiting_since_s = now_s
        self._written = unread
        return now_s - self._waiting_since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does not set it on connections of a listener that it has not made. Without it, the body of an answer
        # waits 40 ms for the acknowledgement of the head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._table.add(self)

    def data_received(self, data: bytes) -> None:
        # The parser keeps a head, and the trailer of a chunked body, of any length. A piece that completes it may hold
        # the body too, so it counts after.
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
            return
        self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._waiting_since_s = self.loop.time()
        self._table.became_idle(self)
        super().on_response_complete()


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
    connections = Connections(settings.max_connections, settings.keep_alive_s)
    server = uvicorn.Server(
        uvicorn.Config(
            GatewayApp(client, settings).asgi,
            loop="asyncio",
            http=connections.protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(settings.keep_alive_s)),
            # The client answers every request before this.
            timeout_graceful_shutdown=round(settings.drain_s + client_settings.close_timeout_s + 2),
        )
    )
    probes = ProbeServer(settings.http_host, settings.http_port, lambda: _readiness(server))
    try:
        probes.start()
        tune_interpreter()
        if asked:
            log.info("gateway stops before it has served")
            return
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        log.info(
            "gateway started", gateway_id=settings.gateway_id, address=address, token=settings.token is not None,
            metrics=f"http://{probes.host}:{probes.port}/metrics",
        )  # fmt: skip
        told(address)
        while not server.should_exit and not serving.done():
            connections.sweep(asyncio.get_running_loop().time())
            await asyncio.wait({serving}, timeout=_TURN_S)
        log.info("gateway stops", open_requests=client.in_flight)
        await asyncio.wait({serving}, timeout=settings.drain_s)
        await client.close()
        await serving
    finally:
        await client.close()
        probes.stop()
        listener.close()
    log.info("gateway stopped")


def _readiness(server: uvicorn.Server) -> Readiness:
    """Does not check the broker: without traffic, the client would not notice that the broker is back."""
    serves = server.started and not server.should_exit
    return Readiness((Check("serving", serves, "stopping" if server.should_exit else ""),))
