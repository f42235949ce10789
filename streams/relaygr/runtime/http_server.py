"""HTTP servers of uvicorn whose connections are bounded. `HttpServer` runs one on a thread with its own event loop.

A connection is closed if it waits longer than `wait_s` for a request, for the rest of one, or for its peer to read the
answer. If more than `max_connections` are open, the one that has waited longest is closed. So no number of idle
connections keeps a request from its answer, and a server never takes more of the process's open files than its share.
Bytes that come now and then do not extend a wait; uvicorn itself bounds only the wait after an answer.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

import httptools
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from relaygr.runtime.errors import RelayError
from relaygr.runtime.open_files import share_of_server

log = structlog.get_logger()

BACKLOG = 128
"""Most connections accepted at once. A server allows more, so that each is read before it can be the oldest."""
MAX_HEAD_BYTES = 64 << 10
ANY_ADDRESS = "::"
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The bounds on the connections of one server."""

    max_connections: int
    wait_s: float
    keep_alive: bool = True
    """False: a connection serves one request."""


def server_config(app: ASGIApp, limits: ConnectionLimits, stop_timeout_s: int) -> uvicorn.Config:
    """The options of a server. `stop_timeout_s`: how long a stop waits for requests that are being served."""
    share = share_of_server()
    backlog = min(BACKLOG, share // 4)
    # Those that are accepted in two turns of the loop are open before the oldest ones are closed.
    allowed = share - 2 * backlog
    if limits.max_connections > allowed:
        log.warning(
            "open files bound the connections of a server: raise the limit (`ulimit -Hn`, systemd: LimitNOFILE)",
            wanted=limits.max_connections,
            max_connections=allowed,
        )
        limits = replace(limits, max_connections=allowed)
    # A dict keeps the order in which they began to wait.
    opened: dict[Connection, None] = {}

    def connect(*arguments: Any, **options: Any) -> Connection:
        return Connection(opened, limits, *arguments, **options)

    return uvicorn.Config(
        app,
        loop="asyncio",
        http=connect,  # type: ignore[arg-type]
        backlog=backlog,
        headers=[] if limits.keep_alive else [("connection", "close")],
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(limits.wait_s)),
        timeout_graceful_shutdown=stop_timeout_s,
    )


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, which reads a request to the end even if it offers another protocol.

    httptools itself takes what follows the head of such a request for the other protocol: uvicorn loses its body, or
    reads it as a request of its own. Java's HttpClient offers HTTP/2 unless it is told not to. A server may go on as if
    nothing was offered (RFC 9110, 7.8), so the head is read again without the offer.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begin()

    def _begin(self) -> None:
        super().__init__(self._connection)
        # As uvicorn's own: a request that closes the connection is answered although others follow it.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                method = self.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserInvalidMethodError("CONNECT") from None
                head = self._connection.head_without_offer(method, self.get_http_version().encode())
                rest = rest[offer.args[0] :]
                self._begin()
                super().feed_data(head)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with a bound on its waits and on the head of a request."""

    def __init__(
        self, opened: dict[Connection, None], limits: ConnectionLimits, *arguments: Any, **options: Any
    ) -> None:
        """`opened`: the open connections of the server, in the order in which they began to wait."""
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        self._opened = opened
        self._limits = limits
        self._head_bytes = 0
        self._waiting_since_s = 0.0
        self._unread_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_serving(self) -> bool:
        """Whether a request has been received and its answer is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does not set it on connections of a listener that it has not made. Without it, the body of an answer
        # waits 40 ms for the acknowledgement of the head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opened[self] = None
        if len(self._opened) > self._limits.max_connections:
            # Without one that waits, it is this one.
            victim = next(each for each in self._opened if not each.is_serving)
            del self._opened[victim]
            victim.transport.abort()
        self._begin_wait()
        self._close_if_it_waits_too_long()

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

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
        self._begin_wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if not self.parser.should_upgrade():  # Else `_Parser` reads the head again.
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def head_without_offer(self, method: bytes, version: bytes) -> bytes:
        """The head that was just read, without its offer of another protocol."""
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_response_complete(self) -> None:
        self._begin_wait()
        super().on_response_complete()

    def _begin_wait(self) -> None:
        self._waiting_since_s = self.loop.time()
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self in self._opened:
            self._opened[self] = self._opened.pop(self)

    def _close_if_it_waits_too_long(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if (self.is_serving and not unread) or (unread and unread != self._unread_bytes):
            self._waiting_since_s = self.loop.time()
        self._unread_bytes = unread
        left_s = self._waiting_since_s + self._limits.wait_s - self.loop.time()
        if left_s <= 0:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(left_s, self._close_if_it_waits_too_long)


class HttpServer:
    """Serves one application from `start` to `stop`, on a daemon thread. It installs no signal handler."""

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
        self._server = uvicorn.Server(server_config(self._app, self._limits, stop_timeout_s=1))
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


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket. Raises RelayError if the address cannot be bound.

    `::` is every address, those of IPv4 too: containers listen there, since a cluster may have either family only. On
    a machine without IPv6 it is every address of IPv4.
    """
    is_any = host == ANY_ADDRESS
    if is_any and not socket.has_dualstack_ipv6():
        host, is_any = "0.0.0.0", False
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG, dualstack_ipv6=is_any)
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
