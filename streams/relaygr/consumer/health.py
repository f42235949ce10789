"""What a consumer loop knows of its cluster: whether brokers answer, messages arrive and topics exist.

The poll thread calls `check` often. While the broker is away it asks once a second for metadata. If no message has come
for `stall_s`, it asks for the ends of the logs: a fenced consumer raises no error, its polls just return None.
"""

from __future__ import annotations

from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaException
from prometheus_client import Gauge

from relaygr.consumer.offsets import Offsets
from relaygr.consumer.settings import ConsumerSettings
from relaygr.consumer.watermark import TopicPartition
from relaygr.runtime.clock import Clock

MISSING_TOPIC_GRACE_US: Final = 10_000_000
"""How long a subscribed topic may be missing before the loop ends."""
_CHECK_INTERVAL_US: Final = 1_000_000
# The broker answers after the fetch that is under way (`asking_fetch_wait_ms`).
_REQUEST_TIMEOUT_S: Final = 0.15

_BROKER_REACHABLE = Gauge("relaygr_consumer_broker_reachable", "1 while the Kafka cluster answers", ["loop"])
_STALLED = Gauge("relaygr_consumer_stalled", "1 while unread messages of owned partitions do not arrive", ["loop"])


class Health:
    """See the module docstring."""

    def __init__(self, name: str, settings: ConsumerSettings, clock: Clock, topic: str) -> None:
        """`topic`: one of the loop, which it asks for."""
        self.is_broker_reachable = True
        self.is_stalled = False
        self._name = name
        self._settings = settings
        self._clock = clock
        self._topic = topic
        self._message_at_us = self._check_at_us = 0
        self._missing_topic: str | None = None
        self._missing_since_us = 0
        self._log = structlog.get_logger().bind(loop=name)

    def start(self) -> None:
        """The loop starts to read."""
        self.note_message()
        _BROKER_REACHABLE.labels(self._name).set(int(self.is_broker_reachable))

    def note_message(self) -> None:
        """A message arrived, or the first one of an assignment is awaited from now on."""
        self._message_at_us = self._clock.monotonic_us()

    def note_broker(self, is_reachable: bool) -> None:
        """The cluster answered, or all brokers are away."""
        if is_reachable != self.is_broker_reachable:
            self.is_broker_reachable = is_reachable
            _BROKER_REACHABLE.labels(self._name).set(int(is_reachable))
            self._log.warning("broker is back" if is_reachable else "broker is away")

    def note_missing(self, topic: str) -> None:
        """The broker does not know this topic."""
        if self._missing_topic is None:
            self._missing_topic, self._missing_since_us = topic, self._clock.monotonic_us()

    def note_assigned(self, topics: set[str]) -> None:
        """The group assigned partitions of these topics."""
        self.note_stall(False)
        self.note_message()
        if self._missing_topic in topics:
            self._missing_topic = None

    def note_stall(self, is_stalled: bool) -> None:
        """Whether unread messages do not arrive."""
        self.is_stalled = is_stalled
        _STALLED.labels(self._name).set(int(is_stalled))

    def missing_topic(self) -> str | None:
        """A topic that has been missing for too long."""
        missing_us = self._clock.monotonic_us() - self._missing_since_us
        return self._missing_topic if missing_us >= MISSING_TOPIC_GRACE_US else None

    def check(self, client: Consumer, offsets: Offsets, readable: frozenset[TopicPartition] | None) -> None:
        """Asks the broker what is due. `readable`: the partitions to be read now; None: the group assigned none yet.

        Raises KafkaException if the broker does not tell how far the logs go.
        """
        now_us = self._clock.monotonic_us()
        if now_us < self._check_at_us:
            return
        self._check_at_us = now_us + _CHECK_INTERVAL_US
        if not self.is_broker_reachable:
            self._ask(client)
        elif readable is not None and now_us - self._message_at_us >= self._settings.stall_s * 1e6:
            self._check_at_us = now_us + int(self._settings.stall_s * 1e6)
            self._look_for_unread(client, offsets, readable)
        elif self.is_stalled:
            self.note_stall(False)

    def _ask(self, client: Consumer) -> None:
        try:
            client.list_topics(self._topic, timeout=_REQUEST_TIMEOUT_S)
        except KafkaException:
            return
        self.note_broker(True)

    def _look_for_unread(self, client: Consumer, offsets: Offsets, readable: frozenset[TopicPartition]) -> None:
        # Without readable partitions, a rebalance may have taken those that stalled.
        unread = offsets.unread(client, readable, _REQUEST_TIMEOUT_S) if readable else 0
        self.note_stall(unread > 0)
        if unread:
            self._log.error("unread messages are not delivered", unread=unread, quiet_s=self._settings.stall_s)
