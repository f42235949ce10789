"""librdkafka's own cluster in a child process: always there, nothing to install.

A process of its own, so that gateway, trigger and workers meet in the broker alone, and that a busy
parent neither slows it nor is slowed. Parent and child speak JSON lines over the child's standard
input and output; when the input ends, because the parent closed it or died, the child ends.
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
from relaygr.schemas.topics import CATALOGUE

LIMITS: Final = (
    "librdkafka's embedded cluster keeps the newest 5 MB of each partition, in memory, and knows neither retention, "
    "compaction, replicas nor security",
    "its waiting fetches do not wake up for new data, so a hop takes up to fetch_wait_max_ms: no latency of Kafka's",
    "it answers no admin requests: topic settings are not checked, and group members can not be listed",
    "when a group's members change it waits out the session time-out less a second: hand-over times are not Kafka's",
)
FETCH_WAIT_MAX_MS: Final = 2
SESSION_TIMEOUT_MS: Final = 2000
"""Short, since a change of members takes this long less a second there."""
ANSWER_TIMEOUT_S: Final = 20.0


@contextmanager
def embedded_broker(why: str) -> Iterator[LocalBroker]:
    """The cluster while the block runs. Raises RelayError if it does not start."""
    child = _ClusterProcess()
    try:
        bootstrap = child.receive()["bootstrap"]

        def create(kafka: KafkaSettings) -> None:
            wanted = {kafka.topic(topic): spec.partition_count(kafka.partitions) for topic, spec in CATALOGUE.items()}
            child.ask({"create": wanted})

        def delete(kafka: KafkaSettings) -> None:
            child.ask({"delete": [kafka.topic(topic) for topic in CATALOGUE]})

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
    """The child process, asked one thing at a time."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._lock = threading.Lock()
        # A session of its own: Ctrl-C reaches the parent only, which ends the child when it is done.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relaygr.devbroker.embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises RelayError for a refusal, and if the child is gone or silent."""
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
        return RelayError(f"The embedded cluster's process ended by itself: {tail or 'it said nothing'}")


def serve() -> None:
    """The child: a cluster, and the parent's requests until its input ends."""
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
