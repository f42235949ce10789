"""librdkafka's mock cluster in this process, through ctypes.

confluent-kafka starts a mock cluster for `test.mock.num.brokers`, but only librdkafka's own functions create topics
with a chosen partition count and shorten the delay of a group's first assignment. The cluster runs on a thread of
librdkafka, listens on loopback, and keeps about 5 MB of each partition.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import confluent_kafka

from relaygr.runtime.errors import RelayError

FIRST_ASSIGNMENT_DELAY_MS: Final = 100
"""How long a new group waits for more members. librdkafka's default is 3 s."""

_PRODUCER: Final = 0
_LOG_LEVEL: Final = b"2"
_WAKE_INTERVAL_S: Final = 0.002


class MockCluster:
    """A cluster of one broker. Raises RelayError if librdkafka cannot start it."""

    def __init__(self) -> None:
        self._library = _library()
        self._topics: dict[str, int] = {}
        error = ctypes.create_string_buffer(512)
        conf = self._library.rd_kafka_conf_new()
        self._library.rd_kafka_conf_set(conf, b"log_level", _LOG_LEVEL, error, len(error))
        self._client = self._library.rd_kafka_new(_PRODUCER, conf, error, len(error))
        if not self._client:
            raise RelayError(f"librdkafka's cluster cannot start: {error.value.decode()}")
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._client, 1)
        if not self._cluster:
            self._library.rd_kafka_destroy(self._client)
            raise RelayError("librdkafka's cluster cannot start: is a port on 127.0.0.1 free?")
        self.bootstrap: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, FIRST_ASSIGNMENT_DELAY_MS)

    def create_topics(self, partitions: Mapping[str, int]) -> None:
        """Creates topics by name. A topic that exists with the same count stays. Raises RelayError on failure."""
        for name, count in partitions.items():
            if self._topics.get(name) == count:
                continue
            code = self._awake(self._library.rd_kafka_mock_topic_create, name.encode(), count)
            if code:
                raise RelayError(f"topic {name} cannot be created: {self._error(code)}")
            self._topics[name] = count

    def delete_topics(self, names: Iterable[str]) -> None:
        """Deletes topics. Topics that do not exist are ignored."""
        for name in names:
            self._awake(self._library.rd_kafka_mock_topic_delete, name.encode())
            self._topics.pop(name, None)

    def close(self) -> None:
        """Ends the cluster and its thread."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def _error(self, code: int) -> str:
        text: bytes = self._library.rd_kafka_err2str(code)
        return text.decode()

    def _awake(self, function: Callable[..., int], name: bytes, *arguments: int) -> int:
        """Calls `function` while a thread opens connections to the cluster.

        The thread of an idle cluster checks for calls only once a second; a connection wakes it.
        """
        done = threading.Event()
        waker = threading.Thread(target=self._connect_until, args=(done,), daemon=True)
        waker.start()
        try:
            replicas = (1,) if arguments else ()
            return function(self._cluster, name, *arguments, *replicas)
        finally:
            done.set()
            waker.join()

    def _connect_until(self, done: threading.Event) -> None:
        host, _, port = self.bootstrap.rpartition(":")
        while not done.wait(_WAKE_INTERVAL_S):
            with contextlib.suppress(OSError), socket.socket() as connection:
                connection.settimeout(1.0)
                connection.connect((host, int(port)))


def _library() -> ctypes.CDLL:
    """The librdkafka that confluent-kafka has loaded: the bundled one, or that of the system."""
    package = Path(confluent_kafka.__file__).parent
    places = [package.parent / "confluent_kafka.libs", package / ".dylibs", package.parent / "confluent_kafka.dylibs"]
    bundled = [path for place in places for path in sorted(place.glob("librdkafka*"))]
    name = str(bundled[0]) if bundled else ctypes.util.find_library("rdkafka")
    if name is None:
        raise RelayError("librdkafka is not found: install confluent-kafka from its wheel, or set KAFKA_HOME")
    library = ctypes.CDLL(name)
    pointer, text, integer, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "rd_kafka_conf_new": (pointer, []),
        "rd_kafka_conf_set": (integer, [pointer, text, text, text, size]),
        "rd_kafka_new": (pointer, [integer, pointer, text, size]),
        "rd_kafka_destroy": (None, [pointer]),
        "rd_kafka_err2str": (text, [integer]),
        "rd_kafka_mock_cluster_new": (pointer, [pointer, integer]),
        "rd_kafka_mock_cluster_destroy": (None, [pointer]),
        "rd_kafka_mock_cluster_bootstraps": (text, [pointer]),
        "rd_kafka_mock_topic_create": (integer, [pointer, text, integer, integer]),
        "rd_kafka_mock_topic_delete": (integer, [pointer, text]),
        "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [pointer, ctypes.c_int32]),
    }
    for function, (result, arguments) in signatures.items():
        try:
            found = getattr(library, function)
        except AttributeError:
            raise RelayError(f"{name} has no {function}: install confluent-kafka 2.16 or later") from None
        found.restype, found.argtypes = result, arguments
    return library
