"""What Kafka refuses a running process, for its readiness probe.

A right that is taken away shows only in the report of a message or in a fetch. So those who send and read tell `note`
of each error. After a refusal the process is not ready, and says so in one line, until the brokers answer that it has
every right of its role, twice: a process that gets no work while it is not ready could not find out by itself. A thread
asks them; it lives while there is a refusal. Where the brokers cannot be asked, a refusal counts until none follows.

One answer is not enough: librdkafka tells once that fetches are refused, and not again if the right is taken away
within seconds after it was given.

A topic that the role does not use, such as that of the histories for a gateway, is logged only: nobody asks for its
rights.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog
from confluent_kafka import KafkaError

from relaygr.kafka.admin_process import AdminProcess, CannotStart
from relaygr.kafka.client_errors import LimitedLog, cause_of
from relaygr.kafka.rights import Role, missing_rights, topics_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

ASK_S: Final = 5.0
_JOIN_S: Final = 2.0
_UNAUTHORIZED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)

_log = structlog.get_logger()


class Refusals:
    """See the module docstring. No thread and no I/O before the first refusal. Any thread may call every method."""

    def __init__(self, kafka: KafkaSettings, role: Role) -> None:
        self._kafka = kafka
        self._role = role
        self._topics = frozenset(kafka.topic(topic) for topic in topics_of(role, kafka))
        self._limited = LimitedLog()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._asking: AdminProcess | None = None
        self._is_refused_again = False
        self._missing: tuple[str, ...] = ()

    @property
    def sentence(self) -> str | None:
        """What this process may not do; None while Kafka refuses nothing."""
        return "; ".join(self._missing) or None

    def note(self, topic: str, error: KafkaError | None) -> None:
        """The error of a message or a fetch of this topic. Never blocks."""
        if error is None or error.code() not in _UNAUTHORIZED or topic not in self._topics:
            self._limited.note(topic, error)
            return
        with self._lock:
            self._is_refused_again = True
            if self._thread is not None or self._stopping.is_set():
                return
            advice = f"grant the rights that `relaygr topics acls --role {self._role}` prints"
            self._missing = (f"Kafka refuses this process the topic {topic} ({cause_of(error)}): {advice}",)
            _log.error("Kafka refuses this process, so it is not ready", cause=self.sentence)
            self._thread = threading.Thread(target=self._watch, name="rights-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        asking, thread = self._asking, self._thread
        if asking is not None:
            asking.close()
        if thread is not None:
            thread.join(_JOIN_S)

    def _watch(self) -> None:
        was_allowed = False
        while not self._stopping.wait(ASK_S):
            self._is_refused_again = False
            try:
                with AdminProcess(self._kafka, f"relaygr-{self._role}-rights") as self._asking:
                    missing = missing_rights(self._kafka, self._role, self._asking)
            except CannotStart:
                missing = ()
            except (RelayError, OSError):
                continue  # Not known: the last answer holds.
            with self._lock:
                if missing:
                    self._missing = missing
                elif was_allowed and not self._is_refused_again:
                    self._missing, self._thread = (), None
                    _log.info("Kafka refuses this process nothing any more")
                    return
            was_allowed = not missing
