"""The thread that reads a cluster's topics for the page: from their ends, without a group, and without committing.

The workers topic is read from its beginning, since it holds the last status of each worker. Fetches are large and few:
the page is a second behind at most, and the broker has little work with it. A thread that cannot keep up goes to the
ends of the topics, so its cost is bounded by `BATCH / PAUSE_S` messages a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka.admin import ClusterMetadata

from relaygr.kafka.log_reader import BEGINNING, END, Batch, Log, LogReader
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.record_time import is_record_time
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.headers import RankingHeaders, is_job, workers_group_of
from relaygr.schemas.messages import PreInferJob, RankingResult, RetrievalEvent
from relaygr.schemas.topics import Topic
from relaygr.trigger.fleet_reader import StatusIntake
from relaygr.ui.model import STAGES, LiveModel

log = structlog.get_logger()

CLIENT_ID: Final = "relaygr-ui"
BATCH: Final = 500
PAUSE_S: Final = 0.1
BEHIND_S: Final = 5.0
"""When the thread reads a message of this age, it skips to the ends of the topics."""
LOOK_S: Final = 10.0
"""Time between two looks for topics that are gone, of which a consumer is told nothing."""
_ANSWER_S: Final = 0.5
_SWEEP_S: Final = 0.5
_RETRY_S: Final = 2.0
_FETCH: Final = {
    # A broker answers when there is this much, or after the wait: a few answers a second.
    "fetch.wait.max.ms": 250,
    "fetch.min.bytes": 64 * 1024,
    # An answer of many partitions must not be held back by one with inline histories.
    "max.partition.fetch.bytes": 256 * 1024,
    "queued.max.messages.kbytes": 16 * 1024,
    "statistics.interval.ms": 0,
    "topic.metadata.refresh.interval.ms": 5000,
    # Nobody waits for the end of a topic.
    "enable.partition.eof": False,
}
_REFUSED: Final = frozenset((KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED))


class TopicReader:
    """Reads from `start` to `stop`, and folds what it reads into the model under `lock`."""

    def __init__(
        self,
        session: KafkaSession,
        model: LiveModel,
        lock: threading.Lock,
        monotonic_us: Callable[[], int],
        wall_us: Callable[[], int],
    ) -> None:
        """No network until `start`."""
        self._session = session
        self._kafka = kafka = session.kafka
        self._model = model
        self._intake = StatusIntake(model.note_status)
        self._lock = lock
        self._monotonic_us = monotonic_us
        self._wall_us = wall_us
        self._by_name = {kafka.topic(topic): topic for topic in (*STAGES, Topic.WORKERS) if topic in kafka.catalogue}
        self._reader = LogReader(session, CLIENT_ID, tuple(self._by_name), options=_FETCH)
        self._has_one_topic = kafka.jobs_topic is Topic.RANKING
        self._refused: set[str] = set()
        """Topics whose fetches Kafka refuses, until one has a message again."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ui-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Returns when the thread has ended, or after `timeout_s`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def require_topics(self) -> None:
        """Raises RelayError, with what to do, if the cluster or one of the topics cannot be read."""
        self._logs(self._session.require_broker(self._stopping))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                logs = self._logs(self._session.require_broker(self._stopping))
                with self._reader:
                    self._tell(None)
                    self._reader.read(*logs)
                    self._follow(logs)
            except RelayError as error:
                self._tell(str(error))
                self._stopping.wait(_RETRY_S)
            except KafkaException as error:
                self._tell(f"The topics cannot be read: {error.args[0].str()}")
                self._stopping.wait(_RETRY_S)

    def _logs(self, cluster: ClusterMetadata) -> list[Log]:
        """Every partition of the topics, with its start. Raises RelayError."""
        known = cluster.topics
        missing, refused, found = [], [], []
        for name, topic in self._by_name.items():
            metadata = known.get(name)
            if metadata is None or (metadata.error is not None and metadata.error.code() not in _REFUSED):
                missing.append(name)
            elif metadata.error is not None:
                refused.append(name)
            else:
                start = BEGINNING if topic is Topic.WORKERS else END
                found += [Log(name, partition, start) for partition in metadata.partitions]
        if refused:
            raise RelayError(_may_not_read(refused))
        if missing:
            raise RelayError(
                f"Kafka at {self._kafka.bootstrap} has no topic {', '.join(missing)}, or this user may not see it: "
                "check `topic_prefix`, run `relaygr topics create`, or grant the rights that "
                "`relaygr topics acls --role ui` prints"
            )
        return found

    def _follow(self, logs: Sequence[Log]) -> None:
        swept_s, look_at_s = 0.0, time.monotonic() + LOOK_S
        while not self._stopping.is_set():
            batch = self._reader.batch(PAUSE_S, BATCH)
            started_s = time.monotonic()
            with self._lock:
                last_ms = self._fold(batch)
                if started_s - swept_s >= _SWEEP_S:
                    swept_s = started_s
                    self._model.sweep(self._monotonic_us(), self._wall_us())
            # A batch that is not full was all there was: the clocks differ.
            behind_ms = 0 if last_ms is None or not batch.is_full else self._wall_us() // 1000 - last_ms
            if behind_ms > BEHIND_S * 1000:
                logs = self._go_to_the_ends(logs)
            if started_s >= look_at_s:
                look_at_s = started_s + _RETRY_S
                # Without a broker nothing is known of the topics; the lag monitor says so.
                with suppress(KafkaException):
                    self._logs(self._reader.cluster(_ANSWER_S))
                    look_at_s = started_s + LOOK_S
            self._stopping.wait(max(0.0, PAUSE_S - (time.monotonic() - started_s)))

    def _fold(self, batch: Batch) -> int | None:
        """Returns the time stamp of the last message of a stage, ms since the epoch."""
        last_ms: int | None = None
        for message in batch.records:
            name = message.topic() or ""
            topic = self._by_name.get(name)
            if name in self._refused:
                self._refused.discard(name)
                self._tell_of_rights()
            if topic is Topic.WORKERS:
                self._note_status(message)
            elif topic is not None:
                last_ms = self._time_ms(message) or last_ms
                self._note_message(topic, message)
        refused = {each.topic for each in batch.failures if each.topic and each.error.code() in _REFUSED}
        if refused:
            self._refused |= refused
            self._tell_of_rights()
        return last_ms

    def _note_message(self, topic: Topic, message: Message) -> None:
        model, now_us = self._model, self._monotonic_us()
        partition, offset = message.partition(), message.offset()
        assert partition is not None and offset is not None
        stage = topic
        if self._has_one_topic and topic is Topic.RANKING and is_job(headers_of(message)):
            stage = Topic.PREINFER
        model.count(stage, partition, offset, now_us, topic)
        value = message.value()
        try:
            if stage is Topic.RANKING:
                # Its body, with the candidates, is not needed.
                headers = RankingHeaders.decode(headers_of(message))
                user, sent_at_us = message.key() or b"", self._time_ms(message) * 1000
                model.note_ranking(headers, user, sent_at_us, now_us)
            elif stage is Topic.RESULTS:
                model.note_result(decode(RankingResult, value), now_us)
            elif stage is Topic.RETRIEVAL:
                model.note_retrieval(decode(RetrievalEvent, value), now_us)
            else:
                model.note_job(decode(PreInferJob, value), now_us)
        except DecodeError:
            model.unreadable()

    def _time_ms(self, message: Message) -> int:
        """The message's time stamp, ms since the epoch; 0 if it cannot be true."""
        _, at_ms = message.timestamp()
        return at_ms if is_record_time(at_ms, self._wall_us() // 1000) else 0

    def _note_status(self, message: Message) -> None:
        group = workers_group_of(headers_of(message))
        if group is not None and group != self._kafka.workers_group:
            return
        try:
            self._intake.take(message, self._wall_us())
        except (DecodeError, ValueError):
            self._model.unreadable()

    def _tell_of_rights(self) -> None:
        self._model.note_reader(_may_not_read(sorted(self._refused)) if self._refused else None)

    def _go_to_the_ends(self, logs: Sequence[Log]) -> list[Log]:
        """Skips what is unread, but for the statuses. Returns the logs that are read now."""
        statuses = [each for each in logs if self._by_name[each.topic] is Topic.WORKERS]
        skipped = [each for each in logs if self._by_name[each.topic] is not Topic.WORKERS]
        newest = [Log(each.topic, each.partition, END) for each in skipped]
        self._reader.leave(*skipped)
        self._reader.read(*newest)
        with self._lock:
            self._model.forget_open()
        return [*statuses, *newest]

    def _tell(self, problem: str | None) -> None:
        with self._lock:
            self._model.note_reader(problem)


def _may_not_read(names: Sequence[str]) -> str:
    return f"This user may not read {', '.join(names)}: grant the rights that `relaygr topics acls --role ui` prints"
