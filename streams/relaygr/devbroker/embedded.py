"""librdkafka's own cluster in a child process: available everywhere, with nothing to install.

The cluster has its own process, so that it and a busy parent do not slow each other down. Parent and child exchange
JSON lines over the child's standard input and output. When the input ends, because the parent closed it or died, the
child ends.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from relaygr.devbroker.choose import BrokerChoice
from relaygr.devbroker.local import LocalBroker
from relaygr.devbroker.mock_cluster import MockCluster
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
