"""A Kafka broker behind a TCP proxy: holds requests, delays and loses answers, drops and freezes connections."""

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
_REQUEST_ID = slice(8, 12)
"""A request begins with its length, the key and the version of its kind and its id, in network order."""
_ANSWER_ID = slice(4, 8)
"""An answer begins with its length and the id of its request."""


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
        self._delay: tuple[Collection[int], float] = ((), 0.0)
        self._sockets: set[socket.socket] = set()
        self._frozen: set[socket.socket] = set()
        """Connections that stay open and pass nothing."""
        self._freezes_new = False
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

    def delay(self, api_keys: Collection[int], delay_s: float) -> None:
        """Requests of these kinds reach the broker at once, and the client gets the answer `delay_s` later.

        A connection's later answers wait behind it. It is so until the next call.
        """
        self._delay = (api_keys, delay_s)

    def freeze(self, with_new: bool = False) -> None:
        """The open connections pass nothing any more, and stay open until the client closes them.

        `with_new`: neither do new ones, until the next call. Otherwise new ones work.
        """
        with self._lock:
            self._freezes_new = with_new
            self._frozen |= self._sockets

    def cut(self) -> None:
        """Drops every connection and refuses new ones, until `listen`. Nothing is held or lost after that."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
            listener.close()
        with self._lock:
            self._held = None
            sockets, self._sockets = self._sockets, set()
            self._frozen = set()
            self._freezes_new = False
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
            due_s: dict[bytes, float] = {}
            with self._lock:
                self._sockets |= {client, broker}
                if self._freezes_new:
                    self._frozen.add(client)
            self._start(self._forward_requests, client, broker, due_s)
            self._start(self._forward_answers, broker, client, due_s)

    def _forward_requests(self, client: socket.socket, broker: socket.socket, due_s: dict[bytes, float]) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as received:
            while len(length := received.read(4)) == 4:
                request = length + received.read(int.from_bytes(length))
                api_key, held, (delayed, delay_s) = int.from_bytes(request[_API_KEY]), self._held, self._delay
                if client in self._frozen:
                    continue
                if api_key in delayed:
                    due_s[request[_REQUEST_ID]] = time.monotonic() + delay_s
                if held is not None and api_key in held[0]:
                    held[1].set()
                else:
                    broker.sendall(request)
        _shut(broker)

    def _forward_answers(self, broker: socket.socket, client: socket.socket, due_s: dict[bytes, float]) -> None:
        with contextlib.suppress(OSError), broker.makefile("rb") as received:
            while len(length := received.read(4)) == 4:
                answer = length + received.read(int.from_bytes(length))
                time.sleep(max(0.0, due_s.pop(answer[_ANSWER_ID], 0.0) - time.monotonic()))
                if not self.swallows and client not in self._frozen:
                    client.sendall(answer)
        _shut(client)


class RawProxy(BrokerProxy):
    """Forwards bytes that it does not understand, such as those of TLS."""

    def _forward_requests(self, client: socket.socket, broker: socket.socket, _: object) -> None:
        self._forward(client, broker)

    def _forward_answers(self, broker: socket.socket, client: socket.socket, _: object) -> None:
        self._forward(broker, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._frozen.isdisjoint((source, target)):
                    target.sendall(data)
        _shut(target)


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
