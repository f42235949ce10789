"""A TCP proxy before a Kafka broker, which can keep a request from the broker and drop every connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection

_API_KEY = slice(4, 6)
"""A request begins with its length and the key of its kind, in network order."""


class BrokerProxy:
    """Forwards connections to the broker's port. The broker must advertise the port of the proxy."""

    def __init__(self, port: int, broker_port: int) -> None:
        self.port = port
        self._broker_port = broker_port
        self._lock = threading.Lock()
        self._held: tuple[Collection[int], threading.Event] | None = None
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def listen(self) -> None:
        """Accepts connections until `cut`."""
        self._listener = listener = socket.create_server(("127.0.0.1", self.port))
        self._start(self._accept, listener)

    def hold(self, api_keys: Collection[int]) -> threading.Event:
        """Requests of these kinds get no answer until `cut`. The event says that such a request came."""
        came = threading.Event()
        self._held = (api_keys, came)
        return came

    def cut(self) -> None:
        """Drops every connection and refuses new ones, until `listen`. Nothing is held after that."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
            listener.close()
        with self._lock:
            self._held = None
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _shut(each)
        for thread in self._threads:
            thread.join(10)
        for each in sockets:
            each.close()
        self._threads = []

    def __enter__(self) -> BrokerProxy:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                broker = socket.create_connection(("127.0.0.1", self._broker_port))
            except OSError:
                return
            with self._lock:
                self._sockets |= {client, broker}
            self._start(self._forward_requests, client, broker)
            self._start(self._forward_answers, broker, client)

    def _forward_requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as received:
            while len(length := received.read(4)) == 4:
                request = length + received.read(int.from_bytes(length))
                held = self._held
                if held is not None and int.from_bytes(request[_API_KEY]) in held[0]:
                    held[1].set()
                else:
                    broker.sendall(request)
        _shut(broker)

    def _forward_answers(self, broker: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := broker.recv(65536):
                client.sendall(data)
        _shut(client)


def _shut(connection: socket.socket) -> None:
    """Wakes the threads that read from it; closing alone would not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
