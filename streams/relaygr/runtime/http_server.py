"""An HTTP server on a daemon thread with its own event loop. It installs no signal handler.

Every connection is closed `connection_s` after it was opened, whatever it waits for: a client that sends nothing, sends
slowly or does not read its response. If more than `max_connections` are open, the oldest one is closed. So no number of
idle connections keeps a request from its answer.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from relaygr.runtime.errors import RelayError

BACKLOG = 128
"""Connections accepted at once. A server allows more than these, so that each is read before it can be the oldest."""
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The bounds on the connections of one server."""

    max_connections: int
    connection_s: float
    keep_alive: bool
    """False: a connection serves one request."""


class HttpServer:
    """Serves one application from `start` to `stop`."""

    def __init__(self, name: str, host: str, port: int, app: ASGIApp, limits: ConnectionLimits) -> None:
        """`name` of the thread. `port` 0 takes any free port, which the property `port` returns after `start`."""
        self._name = name
        self.host = host
        self.port = port
        self._app = app
        self._limits = limits
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Binds the address and serves. Raises RelayError if the address cannot be bound."""
        self._listener = listen_on(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            loop="asyncio",
            http=_bounded(self._limits),
            backlog=BACKLOG,
            headers=[] if self._limits.keep_alive else [("connection", "close")],
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name=self._name, daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the server within `timeout_s`. Does nothing if the server is not running."""
        if self._server is None or self._thread is None or self._listener is None:
            return
        self._server.should_exit = True
        self._thread.join(timeout_s)
        # uvicorn leaves the socket open if it had to abort connections.
        self._listener.close()
        self._server = self._thread = self._listener = None


def _bounded(limits: ConnectionLimits) -> type[H11Protocol]:
    """The connections of one server: uvicorn's, with a bounded life and a bounded number. uvicorn has no time-out for
    a connection that has not sent its request.
    """
    # A dict keeps the order in which they were opened.
    opened: dict[H11Protocol, asyncio.TimerHandle] = {}

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(opened) >= limits.max_connections:
                oldest = next(iter(opened))
                opened.pop(oldest).cancel()
                oldest.transport.abort()
            opened[self] = self.loop.call_later(limits.connection_s, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            timer = opened.pop(self, None)
            if timer is not None:
                timer.cancel()
            super().connection_lost(exc)

    return Connection


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket. Raises RelayError if the address cannot be bound."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RelayError(
                f"Port {port} of {host} is in use. Stop the process that listens there, or choose another port "
                "(0: any free port)."
            ) from error
        raise RelayError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error


def host_name(header: str) -> str:
    """The name in a Host header, without the port. Starlette takes the server's own address for an invalid header."""
    name, _, port = header.rpartition(":")
    return (name if name and port.isdigit() else header).strip("[]").lower()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
