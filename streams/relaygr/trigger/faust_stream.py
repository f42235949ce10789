"""faust as the trigger runs it: `make_app` builds the faust app, `EventFeed` reads the events for its channel.

faust runs in the event loop of its caller: no command line, no web server, no directories, no leader topic, no logging,
and no Kafka client of its own. `EventFeed` polls a confluent consumer, with the settings and the security of all our
consumers, and the agent gets the messages of each poll as one list through a faust channel. With the consumer and
conductor of faust (aiokafka), an event took 2.5 times the CPU time.

The feed polls in the event loop: a thread of its own would take another wake-up and the interpreter lock for each
event. So a poll that waits stops everything else in this loop, for at most `POLL_S`.

A position is committed once a second, and when partitions are given up. It includes every message that was polled:
an event that is lost in a crash costs one pre-infer, never a ranking.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import faust
import structlog
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition
from faust.app.base import BootStrategy

from relaygr.kafka.client_errors import GROUP_REFUSALS, ErrorCallback, cause_of
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import GroupProtocol, KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic

log = structlog.get_logger()

POLL_S: Final = 0.1
"""The longest wait for an event. Other tasks of the event loop wait as long."""
_BATCH: Final = 64
_OPTIONS: Final = {
    "enable.auto.offset.store": True,
    # The stored position includes aborted messages and transaction markers.
    "enable.partition.eof": False,
}
_REQUEST_TIMEOUT_S: Final = 2.0
_POSITION_TRIES: Final = 3
_POSITIONS_S: Final = 3.0
"""No further try after this time: each try blocks the event loop, and with it the handling of signals."""
_UNAUTHORIZED: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "give this user the right to read the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "give this user the right to read as this group",
}
"""librdkafka repeats its requests, so the feed begins once the right is given."""


class _Boot(BootStrategy):  # type: ignore[misc]
    # `EventFeed` reads the events, and our own producer sends the jobs.
    enable_kafka = False
    enable_web = False


class _App(faust.App):  # type: ignore[misc]
    BootStrategy = _Boot
    mundane_level = "debug"

    def _create_directories(self) -> None:
        """Creates no directories, because the app has no tables."""


def make_app(kafka: KafkaSettings) -> _App:
    """The faust app of the trigger. Its channels accept values from the start."""
    app = _App(
        kafka.trigger_group,
        broker=[f"kafka://{address.strip()}" for address in kafka.bootstrap.split(",")],
        autodiscover=False,
        stream_wait_empty=False,
    )
    # faust's own consumer would do this at its first assignment.
    app.flow_control.resume()
    return app


class EventFeed:
    """Reads the retrieval topic as a member of the trigger's group. Belongs to the event loop."""

    def __init__(
        self,
        session: KafkaSession,
        client_id: str,
        on_partitions: Callable[[frozenset[int]], None],
        on_error: ErrorCallback,
    ) -> None:
        """`on_partitions` gets all partitions that this process owns, after each change. `on_error`: of the client.

        No network yet.
        """
        self._session, kafka = session, session.kafka
        self._topic = kafka.topic(Topic.RETRIEVAL)
        self._is_incremental = kafka.group_protocol is GroupProtocol.CONSUMER
        self._on_partitions = on_partitions
        self._partitions: frozenset[int] = frozenset()
        self._consumer = session.group_consumer(
            kafka.trigger_group, client_id, self._topic, on_error=on_error, options=_OPTIONS
        )
        self._stopping = False
        self.delivered = 0
        """Events put into the channel so far."""
        self.refusal: str | None = None
        """The right that this user lacks, as a sentence; None while Kafka does not refuse the consumer."""
        self.is_positioned = False
        """Whether the position of every partition is fixed, so that every event written from now on will be read."""

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions that this process owns."""
        return self._partitions

    async def run(self, channel: Any, after_poll: Callable[[], None]) -> None:
        """Puts the messages of each poll into `channel`, as a list, until `stop`. Raises RelayError.

        `after_poll` is called after each poll.
        """
        self._consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
        )
        while not self._stopping:
            messages = self._poll()
            if messages:
                self.delivered += len(messages)
                await channel.put(messages)
            # The agent and the other tasks of the loop run here.
            await asyncio.sleep(0)
            after_poll()

    def stop(self) -> None:
        """Ends `run` after its next poll."""
        self._stopping = True

    def close(self) -> None:
        """Commits and leaves the group. Takes long only if the broker hangs."""
        self._consumer.close()

    def _poll(self) -> list[Message]:
        first = self._consumer.poll(POLL_S)
        if first is None:
            return []
        try:
            # Takes all messages that are there with one release of the interpreter lock.
            batch = [first, *self._consumer.consume(_BATCH - 1, 0)]
        except KafkaException as exception:
            self._on_poll_error(exception.args[0])
            batch = [first]
        messages = []
        for message in batch:
            error = message.error()
            if error is None:
                messages.append(message)
            else:
                self._on_poll_error(error)
        return messages

    def _on_poll_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and self._partitions:
            # Of a fetch. The positions remain, and the feed would not be told that fetches are allowed again.
            self._session.note(self._topic, error)
            return
        if error.code() in _UNAUTHORIZED:
            sentence = f"Kafka refuses the trigger: {cause_of(error)}. {_UNAUTHORIZED[error.code()]}"
            if self.refusal != sentence:
                log.error("the trigger may not read its events", cause=sentence)
            self.refusal = sentence
            self.is_positioned = False
            return
        if error.code() in GROUP_REFUSALS:
            raise RelayError(f"Kafka refuses the trigger: {cause_of(error)}. {GROUP_REFUSALS[error.code()]}")
        if error.fatal() or error.code() == KafkaError._FATAL:
            raise RelayError(f"The trigger's consumer cannot continue: {cause_of(error)}. Start the trigger again")
        # librdkafka goes on by itself; `ClientErrors` logs and limits the errors of the connection.
        log.debug("consumer error", error=error.name(), cause=cause_of(error))

    # Called inside `poll`.

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self.is_positioned = False
        places = self._places(consumer, assigned) if assigned else []
        if self._is_incremental:
            consumer.incremental_assign(places)
        else:
            consumer.assign(places)
        self.is_positioned = True
        self.refusal = None
        self._own(self._partitions | {place.partition for place in assigned})
        log.info("partitions assigned", partitions=sorted(self._partitions))

    def _on_revoke(self, _: Consumer, revoked: list[TopicPartition]) -> None:
        self.is_positioned = False
        self._own(self._partitions - {place.partition for place in revoked})

    def _own(self, partitions: frozenset[int]) -> None:
        self._partitions = partitions
        self._on_partitions(partitions)

    def _places(self, consumer: Consumer, assigned: list[TopicPartition]) -> list[TopicPartition]:
        """The position of each partition. Without an answer, librdkafka decides."""
        ends_s = time.monotonic() + _POSITIONS_S
        for attempt in range(_POSITION_TRIES):
            if attempt and time.monotonic() >= ends_s:
                break
            try:
                committed = consumer.committed(assigned, timeout=_REQUEST_TIMEOUT_S)
                starts, ends = (
                    consumer.offsets_for_times(
                        [TopicPartition(place.topic, place.partition, bound) for place in assigned],
                        timeout=_REQUEST_TIMEOUT_S,
                    )
                    for bound in (OFFSET_BEGINNING, OFFSET_END)
                )
            except KafkaException as error:
                log.warning("positions are not known", error=error.args[0].name(), cause=cause_of(error.args[0]))
                continue
            if any(bound.offset < 0 for bound in (*starts, *ends)):
                continue  # A new topic has partitions without a leader for some milliseconds.
            places = [
                TopicPartition(each.topic, each.partition, position(each.offset, start.offset, end.offset))
                for each, start, end in zip(committed, starts, ends, strict=True)
            ]
            new = [place for place, each in zip(places, committed, strict=True) if place.offset != each.offset]
            if new:
                # Otherwise the next process would begin at the end, too, and miss the events in between.
                consumer.commit(offsets=new, asynchronous=True)
            return places
        return assigned


def position(committed: int, start: int, end: int) -> int:
    """Where to read a log from `start` to `end`, whose first offsets retention may have deleted.

    Events from before the first commit are too old to be useful. A commit beyond the end is that of another log: the
    topic was deleted and created again.
    """
    if committed < 0:
        return end
    return start if committed > end else max(committed, start)
