"""librdkafka's own cluster in a child process: available everywhere, with nothing to install.

The cluster has its own process, so that it and a busy parent do not slow each other down. Parent and child exchange
JSON lines over the child's standard input and output. When the input ends, because the parent closed it or died, the
child ends.

confluent-kafka starts a mock cluster for `test.mock.num.brokers`, but only librdkafka's own functions create topics
with a chosen partition count and shorten the delay of a group's first assignment. So `MockCluster` calls them through
ctypes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import confluent_kafka

from relaygr.devbroker.choose import BrokerChoice
from relaygr.devbroker.local import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

LIMITS: Final = (
    "librdkafka's embedded cluster keeps the newest 5 MB of each partition, in memory, without retention, "
    "compaction, replicas or security",
    "a waiting fetch does not return early for new data, so a hop takes up to fetch_wait_max_ms: not Kafka's latency",
    "it answers no admin requests: topic settings are not checked, and group members cannot be listed",
    "after a change of a group's members it waits for the session time-out less a second: rebalance times are not "
    "Kafka's",
)
FETCH_WAIT_MAX_MS: Final = 2
SESSION_TIMEOUT_MS: Final = 2000
"""Short, because a change of members takes this time less a second."""
ANSWER_TIMEOUT_S: Final = 20.0
FIRST_ASSIGNMENT_DELAY_MS: Final = 100
"""How long a new group waits for more members. librdkafka's default is 3 s."""

_PRODUCER: Final = 0
_LOG_LEVEL: Final = b"2"
_WAKE_INTERVAL_S: Final = 0.002


@contextmanager
def embedded_broker(why: str) -> Iterator[LocalBroker]:
    """The cluster while the block runs. Raises RelayError if it does not start."""
    child = _ClusterProcess()
    try:
        bootstrap = child.receive()["bootstrap"]

        def create(kafka: KafkaSettings) -> None:
            count, catalogue = kafka.partitions, kafka.catalogue
            wanted = {kafka.topic(topic): spec.partition_count(count) for topic, spec in catalogue.items()}
            child.ask({"create": wanted})

        def delete(kafka: KafkaSettings) -> None:
            child.ask({"delete": [topic.named(kafka.topic_prefix) for topic in kafka.catalogue]})

        yield LocalBroker(
            BrokerChoice.EMBEDDED,
            bootstrap,
            f"librdkafka's embedded cluster at {bootstrap} ({why})",
            LIMITS,
            create,
            delete,
            fetch_wait_max_ms=FETCH_WAIT_MAX_MS,
            session_timeout_ms=SESSION_TIMEOUT_MS,
        )
    finally:
        child.close()


class _ClusterProcess:
    """The child process. It handles one request at a time."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._lock = threading.Lock()
        # A new session: Ctrl-C reaches only the parent, which ends the child when it has finished.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relaygr.devbroker.embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer. Raises RelayError if the child refuses it or does not answer."""
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                raise self._gone() from None
            return self.receive()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_TIMEOUT_S):
                raise RelayError(f"The embedded cluster did not answer within {ANSWER_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RelayError(f"The embedded cluster: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _gone(self) -> RelayError:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        tail = self._errors.read().decode(errors="replace").strip()
        return RelayError(f"The process of the embedded cluster ended: {tail or 'without an error message'}")


class MockCluster:
    """A cluster of one broker on a thread of this process. Raises RelayError if librdkafka cannot start it."""

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
            with suppress(OSError), socket.socket() as connection:
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


def serve() -> None:
    """The main function of the child: runs a cluster and serves the parent's requests until the input ends."""
    try:
        cluster = MockCluster()
    except RelayError as error:
        _answer({"error": str(error)})
        return
    _answer({"bootstrap": cluster.bootstrap})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            cluster.create_topics(request.get("create", {}))
            cluster.delete_topics(request.get("delete", []))
        except RelayError as error:
            _answer({"error": str(error)})
        else:
            _answer({})
    cluster.close()


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
