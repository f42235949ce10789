"""Publishes an interaction log: a `History` snapshot for each user, or a `BehaviourEvent` for each behaviour.

All replicas acknowledge each message, and every delivery report is checked. While the queue of the producer is full,
publishing waits. Publishing stops after `MAX_FAILURES` failed deliveries, because each further message would wait for
its time-out while the broker is away.

Publishing again is safe: workers use each user's latest snapshot with the behaviours after its cut, and skip a
behaviour that they have. A later log may be published alone: its positions begin at 0, and workers append it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message

from relaygr.ingest.gather import Interactions
from relaygr.kafka.client_errors import why_undelivered
from relaygr.kafka.durable import DurableProducer, OnReport
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import MAX_BEHAVIOURS, BehaviourEvent, History
from relaygr.schemas.topics import Topic

MAX_FAILURES: Final = 100
CLIENT_ID: Final = "relaygr-publish-history"
_FULL_QUEUE_WAIT_S: Final = 0.1
# The durable producer gives up on a message after 30 s.
_FLUSH_S: Final = 40.0


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of the histories that is published."""

    users: int | None = None
    """The number of users, from the first; None: all."""
    max_behaviours: int = MAX_BEHAVIOURS
    """The number of behaviours of each user, from the newest."""
    number: int | None = None
    """The version number of all histories; None: the time of the user's newest behaviour, in ms."""
    cut_ms: int | None = None
    """Behaviours after this time are in no history; None: it is not known what the histories lack."""


@dataclass(slots=True)
class PublishReport:
    """The outcome of publishing."""

    offered: int = 0
    delivered: int = 0
    failed: int = 0
    offered_bytes: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    """Failed deliveries by cause."""

    @property
    def complete(self) -> bool:
        return self.delivered == self.offered


def histories_count(interactions: Interactions, selection: Selection) -> int:
    """The number of histories in the selection."""
    count = len(interactions.users)
    return count if selection.users is None else min(count, selection.users)


def history_of(interactions: Interactions, index: int, selection: Selection) -> History:
    """The snapshot of user `index`."""
    whole = interactions.of(index)
    behaviours = whole[-min(selection.max_behaviours, MAX_BEHAVIOURS) :]
    left_out = len(whole) - len(behaviours)
    newest_ms = int(behaviours.timestamps_ms[-1])
    number = newest_ms if selection.number is None else selection.number
    # Behaviours as events name their positions in the whole log.
    user, no_features = interactions.users[index], np.empty(0, "<i8")
    return History(user, number, no_features, behaviours, left_out or None, cut_ms=selection.cut_ms)


def publish_histories(
    kafka: KafkaSettings,
    interactions: Interactions,
    selection: Selection,
    on_progress: Callable[[int], None] | None = None,
) -> PublishReport:
    """Publishes, and waits for every delivery report. `on_progress` gets the number of histories produced so far."""
    chosen = (history_of(interactions, index, selection) for index in range(histories_count(interactions, selection)))
    return _publish_all(kafka, kafka.topic(Topic.HISTORY), chosen, on_progress)


def behaviours_count(interactions: Interactions, after_ms: int | None) -> int:
    """The number of behaviours later than a time; None: all."""
    times_ms = interactions.behaviours.timestamps_ms
    return int(times_ms.size if after_ms is None else np.count_nonzero(times_ms > after_ms))


def publish_behaviours(
    kafka: KafkaSettings,
    interactions: Interactions,
    after_ms: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> PublishReport:
    """Publishes the behaviours later than a time (None: all), in the order of time, with their position in the log."""
    return _publish_all(kafka, kafka.topic(Topic.BEHAVIOURS), _events(interactions, after_ms), on_progress)


def _events(interactions: Interactions, after_ms: int | None) -> Iterator[BehaviourEvent]:
    behaviours, starts = interactions.behaviours, interactions.starts
    for place in np.argsort(behaviours.timestamps_ms, kind="stable").tolist():
        if after_ms is not None and behaviours.timestamps_ms[place] <= after_ms:
            continue
        user = int(np.searchsorted(starts, place, side="right")) - 1
        yield BehaviourEvent(interactions.users[user], behaviours[place : place + 1], place - int(starts[user]))


def _publish_all(
    kafka: KafkaSettings,
    topic: str,
    messages: Iterable[History | BehaviourEvent],
    on_progress: Callable[[int], None] | None,
) -> PublishReport:
    report = PublishReport()
    producer = KafkaSession(kafka, CLIENT_ID).durable_producer(CLIENT_ID)
    producer.make()

    def delivered(error: KafkaError | None, _message: Message | None) -> None:
        if error is None:
            report.delivered += 1
        else:
            _fail(report, error)

    for message in messages:
        if report.failed >= MAX_FAILURES:
            break
        value = encode(message)
        report.offered += 1
        report.offered_bytes += len(value)
        _produce(producer, topic, message.user_id.encode(), value, delivered, report)
        producer.poll()
        if on_progress is not None:
            on_progress(report.offered)
    left = producer.flush(_FLUSH_S)
    if left:
        report.failed += left
        report.causes["no delivery report"] = left
    return report


def _produce(
    producer: DurableProducer,
    topic: str,
    key: bytes,
    value: bytes,
    on_done: OnReport,
    report: PublishReport,
) -> None:
    while True:
        try:
            producer.produce(topic, value, key, on_done)
            return
        except BufferError:
            producer.poll(_FULL_QUEUE_WAIT_S)
        except KafkaException as error:
            _fail(report, error.args[0])
            return


def _fail(report: PublishReport, error: KafkaError) -> None:
    report.failed += 1
    cause = why_undelivered(error)
    report.causes[cause] = report.causes.get(cause, 0) + 1
