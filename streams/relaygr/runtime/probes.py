"""The HTTP server of each process: `/metrics`, `/healthz` and `/readyz`.

* `/metrics`: a prometheus_client registry.
* `/healthz`: 200 while every check of `health` passes, else 503: the process should be restarted. By default there is
  no check.
* `/readyz`: 200 while every check of `readiness` passes, else 503: the process should receive no work.

Both bodies list the checks: `{"ok": false, "checks": [{"name": "model", "ok": false, "detail": "warming up"}]}`.

The server runs on a daemon thread with its own event loop and installs no signal handler. It calls the checks on that
thread at every request, so they must return quickly and must not block.

A connection serves one request. It is closed `CONNECTION_S` after it was opened, whatever it waits for: a client that
sends nothing, sends slowly or does not read its response. If more than `MAX_CONNECTIONS` are open, the oldest one is
closed. So no number of idle connections keeps a probe from its answer.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass

import structlog
import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from relaygr.runtime.errors import RelayError

log = structlog.get_logger()

MAX_CONNECTIONS = 256
BACKLOG = 128
"""Connections accepted at once: fewer than `MAX_CONNECTIONS`, so that each is read before it can be the oldest."""
CONNECTION_S = 10.0
"""Prometheus waits this long for a response by default."""
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One condition, whether it holds, and an explanation for people."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Several checks. Ready means that all of them pass."""

    checks: tuple[Check, ...] = ()

    @property
    def ready(self) -> bool:
        return all(check.ok for check in self.checks)


class ProbeServer:
    """Serves the probes from `start` to `stop`; also a context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        readiness: Callable[[], Readiness],
        health: Callable[[], Readiness] = Readiness,
        registry: CollectorRegistry = REGISTRY,
        documents: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        """`port` 0 takes any free port, which the property `port` returns after `start`.

        `documents`: path -> a function whose value is served there as JSON. It is called at every request.
        """
        self._host = host
        self._port = port
        self._readiness = readiness
        self._health = health
        self._registry = registry
        self._documents = dict(documents or {})
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        """The bound port; before `start`, the requested port."""
        return self._port

    def start(self) -> None:
        """Binds the address and serves. Raises RelayError if the address cannot be bound."""
        self._listener = _bind(self._host, self._port)
        self._port = self._listener.getsockname()[1]
        app = Starlette(
            routes=[
                Route("/metrics", self._serve_metrics),
                Route("/healthz", self._serve_health),
                Route("/readyz", self._serve_readiness),
                *(Route(path, _document(ask)) for path, ask in self._documents.items()),
            ]
        )
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_connections(),
            backlog=BACKLOG,
            headers=[("connection", "close")],
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="probes", daemon=True
        )
        self._thread.start()
        log.info("probe server started", host=self._host, port=self._port)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the server within `timeout_s`. Does nothing if the server is not running."""
        if self._server is None or self._thread is None or self._listener is None:
            return
        self._server.should_exit = True
        self._thread.join(timeout_s)
        # uvicorn leaves the socket open if it had to abort connections.
        self._listener.close()
        self._server = self._thread = self._listener = None

    def __enter__(self) -> ProbeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _serve_metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def _serve_health(self, _: Request) -> Response:
        return _answer(self._health)

    async def _serve_readiness(self, _: Request) -> Response:
        return _answer(self._readiness)


def _connections() -> type[H11Protocol]:
    """The connections of one server: uvicorn's, with a bounded life and a bounded number. uvicorn has no time-out for
    a connection that has not sent its request.
    """
    # A dict keeps the order in which they were opened.
    opened: dict[H11Protocol, asyncio.TimerHandle] = {}

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(opened) >= MAX_CONNECTIONS:
                oldest = next(iter(opened))
                opened.pop(oldest).cancel()
                oldest.transport.abort()
            opened[self] = self.loop.call_later(CONNECTION_S, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            timer = opened.pop(self, None)
            if timer is not None:
                timer.cancel()
            super().connection_lost(exc)

    return Connection


def _answer(ask: Callable[[], Readiness]) -> Response:
    try:
        readiness = ask()
    except Exception as error:  # The response must show that the check itself is broken.
        log.exception("a check of a probe raised an exception")
        readiness = Readiness((Check("check", False, f"{type(error).__name__}: {error}"),))
    body = {"ok": readiness.ready, "checks": [asdict(check) for check in readiness.checks]}
    return JSONResponse(body, status_code=200 if readiness.ready else 503)


def _document(ask: Callable[[], object]) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return JSONResponse(ask())

    return serve


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RelayError(
                f"Port {port} of {host} is in use. Stop the process that listens there, or choose another port "
                "(0: any free port)."
            ) from error
        raise RelayError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
