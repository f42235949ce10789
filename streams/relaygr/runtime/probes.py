"""The HTTP server of each process: `/metrics`, `/healthz` and `/readyz`.

* `/metrics`: a prometheus_client registry.
* `/healthz`: 200 while every check of `health` passes, else 503: the process should be restarted. By default there is
  no check.
* `/readyz`: 200 while every check of `readiness` passes, else 503: the process should receive no work.

Both bodies list the checks: `{"ok": false, "checks": [{"name": "model", "ok": false, "detail": "warming up"}]}`.

The server (`relaygr.runtime.http_server`) calls the checks on its own thread at every request, so they must return
quickly and must not block. A connection serves one request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relaygr.runtime.http_server import STOP_TIMEOUT_S, ConnectionLimits, HttpServer
from relaygr.runtime.readiness import Check, Readiness

log = structlog.get_logger()

MAX_CONNECTIONS = 256
WAIT_S = 10.0
"""Prometheus waits this long for a response by default."""


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
        self._readiness = readiness
        self._health = health
        self._registry = registry
        app = Starlette(
            routes=[
                Route("/metrics", self._serve_metrics),
                Route("/healthz", self._serve_health),
                Route("/readyz", self._serve_readiness),
                *(Route(path, _document(ask)) for path, ask in (documents or {}).items()),
            ]
        )
        self._server = HttpServer(
            "probes", host, port, app, ConnectionLimits(MAX_CONNECTIONS, WAIT_S, keep_alive=False)
        )

    @property
    def host(self) -> str:
        return self._server.host

    @property
    def port(self) -> int:
        """The bound port; before `start`, the requested port."""
        return self._server.port

    def start(self) -> None:
        """Binds the address and serves. Raises RelayError if the address cannot be bound."""
        # A second series for each counter and histogram, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._server.start()
        log.info("probe server started", host=self.host, port=self.port)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the server within `timeout_s`. Does nothing if the server is not running."""
        self._server.stop(timeout_s)

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
