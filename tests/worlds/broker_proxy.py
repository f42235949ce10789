"""A Kafka broker behind a TCP proxy, which can hold requests, lose answers and drop every connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from relaygr.devbroker.local import free_ports
from relaygr.kafka.settings import KafkaSettings
from tests.worlds.own_broker import own_broker

_API_KEY = slice(4, 6)
"""A request begins with its length and the key of its kind, in network order."""


class BrokerProxy:
    """Forwards connections to a listener of the broker, which must advertise the port of the proxy."""

    def __init__(self, port: int, listener: str) -> None:
        self.port = port
        self.swallows = False
        """Whether all bytes from the broker are lost, until `cut`."""
        host, broker_port = listener.split(":")
        self._broker = (host, int(broker_port))
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
        """Drops every connection and refuses new ones, until `listen`. Nothing is held or lost after that."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
            listener.close()
        with self._lock:
            self._held = None
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _shut(each)
        self.swallows = False
        for thread in self._threads:
            thread.join(10)
        for each in sockets:
            each.close()
        self._threads = []

    def drop(self, after_s: float, duration_s: float) -> None:
        """Drops every connection `after_s` from now, and refuses new ones for `duration_s`."""
        time.sleep(after_s)
        self.cut()
        time.sleep(duration_s)
        self.listen()

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
                broker = socket.create_connection(self._broker)
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
                if not self.swallows:
                    client.sendall(data)
        _shut(client)


class RawProxy(BrokerProxy):
    """Forwards bytes that it does not understand, such as those of TLS."""

    def _forward_requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                broker.sendall(data)
        _shut(broker)


def _shut(connection: socket.socket) -> None:
    """Wakes the threads that read from it; closing alone would not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Behind:
    """A real broker, directly and through the proxy."""

    direct: KafkaSettings
    proxied: KafkaSettings
    proxy: BrokerProxy


@contextmanager
def broker_behind_proxy(topic_prefix: str) -> Iterator[Behind]:
    """Starts a broker of its own from KAFKA_HOME. A client of the proxy is sent back to the proxy for each request."""
    (proxy_port,) = free_ports(1)
    address = f"127.0.0.1:{proxy_port}"
    with own_broker({"PROXIED": "PLAINTEXT"}, advertised={"PROXIED": address}) as broker:
        direct = KafkaSettings(bootstrap=broker.bootstrap, topic_prefix=topic_prefix, partitions=2)
        with BrokerProxy(proxy_port, broker.others["PROXIED"]) as proxy:
            yield Behind(direct, direct.model_copy(update={"bootstrap": address}), proxy)
