"""The Unix socket on which a worker answers its operators: one request and one answer a connection.

    client    connects, sends one line of at most MAX_REQUEST_BYTES, reads one line of at most MAX_ANSWER_BYTES
    worker    serves one connection after the other on a thread of its own; WAITING connections may wait

The socket lies in the worker's private folder and has mode 0600. The worker checks the user id of each client, which
the kernel gives (SO_PEERCRED): only its own user and root may ask. A client that does not send its request, or does not
read the answer, is dropped after CLIENT_TIMEOUT_S; it delays other operators, and nothing else in the worker. The
process that holds the folder's lock owns the socket: a standby has none, and replaces that of a dead process when it
takes over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_sockets import address_of, listen_private, peer_of

log = structlog.get_logger()

SOCKET_NAME: Final = "admin.sock"
"""In the worker's private folder."""
MAX_REQUEST_BYTES: Final = 4096
MAX_ANSWER_BYTES: Final = 4 << 20
CLIENT_TIMEOUT_S: Final = 2.0
"""Time in which a client must send its request, and time in which it must read the answer."""
WAITING: Final = 8
"""Most connections that wait while another one is served."""

_PAUSE_S: Final = 0.1
_ROOT: Final = 0
_CHUNK: Final = 65_536


class AdminSocket:
    """Serves from `start` to `close`."""

    def __init__(
        self, path: Path, answer: Callable[[bytes], bytes], client_timeout_s: float = CLIENT_TIMEOUT_S
    ) -> None:
        """`answer` is called on the socket's thread, with one request after the other."""
        self._path = path
        self._answer = answer
        self._timeout_s = client_timeout_s
        self._listener: socket.socket | None = None
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="admin", daemon=True)
        self._closing = False

    def start(self) -> None:
        """Replaces a socket that a dead process left: the caller holds the folder's lock. Raises OSError."""
        self._listener = listen_private(self._path, WAITING)
        self._thread.start()

    def close(self) -> None:
        """Ends the connections and removes the socket. Does nothing if it was not started. May be called again."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._closing = True
        for each in (listener, self._client):
            if each is not None:
                # Ends `accept`, `recv` and `send` of the thread.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(self._timeout_s)
        listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                client, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                # The process has no file number left, which may change.
                time.sleep(_PAUSE_S)
                continue
            with client:
                self._client = client
                if self._closing:
                    return
                try:
                    self._serve_one(client)
                except OSError as error:
                    log.debug("an operator's connection ended early", error=str(error))
                except Exception:
                    # The thread must go on: the next request may succeed.
                    log.exception("an operator's request failed")
                self._client = None

    def _serve_one(self, client: socket.socket) -> None:
        caller = peer_of(client)
        if caller.uid not in (os.geteuid(), _ROOT):
            log.warning("an operator's request was refused: another user", uid=caller.uid, pid=caller.pid)
            answer = _refusal("Only the worker's own user and root may ask.")
        else:
            line = _read_line(client, MAX_REQUEST_BYTES, self._timeout_s)
            if line is None:
                answer = _refusal(f"A request is one line of at most {MAX_REQUEST_BYTES} bytes.")
            else:
                answer = self._answer_to(line)
        client.settimeout(self._timeout_s)
        client.sendall(answer + b"\n")

    def _answer_to(self, line: bytes) -> bytes:
        try:
            return self._answer(line)
        except Exception:
            log.exception("an operator's request failed")
            return _refusal("The request failed in the worker: its log has the error.")


def ask(path: Path, request: bytes, timeout_s: float) -> bytes:
    """Sends one request to the socket, and returns the answer. A client calls it.

    Raises OSError if the socket cannot be reached (TimeoutError after `timeout_s` without an answer), and RelayError if
    another user's process serves it, or if it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        with address_of(path) as address:
            _connect(connection, address, timeout_s)
        server = peer_of(connection)
        if os.geteuid() not in (server.uid, _ROOT):
            raise RelayError(f"The socket {path} belongs to user {server.uid}: ask as that user, or as root.")
        # A worker that refuses closes the connection without reading the whole request, so `sendall` may fail. The
        # kernel keeps the answer for this end all the same.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request + b"\n")
        try:
            answer = _read_line(connection, MAX_ANSWER_BYTES, timeout_s)
        except ConnectionResetError:
            # The worker ended the connection with the request unread, and without an answer.
            answer = None
    if answer is None:
        raise RelayError("The worker closed the connection without an answer: it may be stopping, so ask again.")
    return answer


def _connect(connection: socket.socket, address: str, timeout_s: float) -> None:
    """Raises BlockingIOError if WAITING others are before this client all the time."""
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(_PAUSE_S)


def _read_line(connection: socket.socket, most_bytes: int, timeout_s: float) -> bytes | None:
    """The bytes up to the first newline; None if there are more than `most_bytes`, or if the peer ends before.

    Raises TimeoutError if the line is not complete in time, however slowly it comes.
    """
    ends_s = time.monotonic() + timeout_s
    line = bytearray()
    while b"\n" not in line[-_CHUNK:]:
        if len(line) > most_bytes:
            return None
        connection.settimeout(max(1e-3, ends_s - time.monotonic()))
        part = connection.recv(_CHUNK)
        if not part:
            return None
        line += part
        if time.monotonic() > ends_s:
            raise TimeoutError("the line was not complete in time")
    content, _, _ = line.partition(b"\n")
    return bytes(content) if len(content) <= most_bytes else None


def _refusal(error: str) -> bytes:
    return json.dumps({"error": error}).encode()
