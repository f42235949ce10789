"""faust and aiokafka as the trigger runs them: `make_app` builds the faust app.

faust runs in the event loop of its caller: no command line, no web server, no directories, no leader topic, no logging
and no producer of its own. Its consumer has our settings and security, and runs in the same loop.

Two things are changed in aiokafka itself, for this process:

* Its loggers are limited to one line of a kind a second. Without the limit they wrote 25,000 lines in 5 s while a
  broker was away.
* A record that aiokafka cannot read is skipped. Kafka allows any bytes as the name of a header; aiokafka raises for a
  name that is not UTF-8, and raises again at the same record after every restart, so one such record on the retrieval
  topic would end all pre-infer. The rest of the batch is skipped with the record, because aiokafka reads a batch only
  from its start; the ranking requests of those users take the full path. A batch with a wrong checksum was damaged on
  its way and still raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any, Final

import aiokafka
import faust
import structlog
from aiokafka.consumer import fetcher
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import CorruptRecordException
from faust.app.base import BootStrategy
from faust.sensors import Monitor
from faust.serializers.schemas import Schema
from faust.transport.drivers import aiokafka as driver
from mode.utils.futures import maybe_async
from prometheus_client import Counter

from relaygr.kafka.clients import aiokafka_options
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.logs import RepeatLimiter
from relaygr.schemas.topics import CATALOGUE, Topic

log = structlog.get_logger()

_EMBEDDED_WAIT_MS: Final = 5
"""A fetch wait up to this value is meant for librdkafka's own cluster, where new data does not end a waiting fetch."""
_LONG_POLL_MS: Final = 500
"""The fetch wait with a real broker, which answers a waiting fetch as soon as there is data.

It is long because aiokafka parses every empty answer in Python.
"""
_MAX_POLL_RECORDS: Final = 500
_REQUEST_TIMEOUT_MS: Final = 10_000


class RawSchema(Schema):  # type: ignore[misc]
    """Passes the messages of faust on undecoded. The handler decodes them, and reports failures."""

    def compile(self, app: Any, **_: Any) -> Any:
        create_event = app.create_event

        async def to_event(message: Any, **_: Any) -> Any:
            return create_event(message.key, message, message.headers, message)

        return to_event


class _NoMonitor(Monitor):  # type: ignore[misc]
    """faust's monitor without the statistics of every event, which are not used."""

    mundane_level = "debug"

    def on_message_in(self, tp: Any, offset: int, message: Any) -> None: ...

    def on_message_out(self, tp: Any, offset: int, message: Any) -> None: ...

    def on_stream_event_in(self, tp: Any, offset: int, stream: Any, event: Any) -> None: ...

    def on_stream_event_out(self, tp: Any, offset: int, stream: Any, event: Any, state: Any = None) -> None: ...

    def track_tp_end_offset(self, tp: Any, offset: int) -> None: ...


class _InLoopWorker:
    """Stands in for the thread that mode starts for a service: runs the service in the event loop of its parent."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._service.parent_loop.create_task(self._service._serve(), name="consumer")

    def stop(self) -> None:
        """Does nothing: the service ends its own task."""


class _ConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """faust's "consumer thread", run in the event loop of the stream, with a consumer of our settings and security.

    With a thread of its own, each batch passed between two threads under one interpreter lock, and the threads spent
    more time waiting for the lock than working.
    """

    Worker = _InLoopWorker
    mundane_level = "debug"

    def __init__(self, consumer: Any, *, loop: Any, **kwargs: Any) -> None:
        super().__init__(consumer, loop=loop, thread_loop=loop, **kwargs)

    async def call_thread(self, fun: Any, *args: Any, **kwargs: Any) -> Any:
        return await maybe_async(fun(*args, **kwargs))

    async def _gather_remaining_tasks(self) -> None:
        """Does nothing: the other tasks of the event loop belong to other services."""

    def _create_worker_consumer(self, _: Any) -> aiokafka.AIOKafkaConsumer:
        self._assignor = RoundRobinPartitionAssignor
        app: _App = self.app
        return aiokafka.AIOKafkaConsumer(
            **aiokafka_options(app.kafka),
            client_id=app.conf.broker_client_id,
            group_id=app.conf.id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            # Events from before the first commit are too old to be useful.
            auto_offset_reset="latest",
            max_poll_records=_MAX_POLL_RECORDS,
            max_partition_fetch_bytes=CATALOGUE[Topic.RETRIEVAL].max_message_bytes,
            fetch_max_wait_ms=_fetch_wait_ms(app.kafka),
            session_timeout_ms=app.kafka.session_timeout_ms,
            heartbeat_interval_ms=app.kafka.heartbeat_interval_ms,
            request_timeout_ms=max(_REQUEST_TIMEOUT_MS, app.kafka.session_timeout_ms + 1000),
            # Short, so that the stream continues soon after a rebalance or the loss of a broker.
            retry_backoff_ms=50,
            metadata_max_age_ms=5000,
        )

    def verify_event_path(self, now: float, tp: Any) -> None:
        """Does nothing: it would read the disabled statistics. The lag monitor measures this group."""


class _Consumer(driver.Consumer):  # type: ignore[misc]
    mundane_level = "debug"

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):  # type: ignore[misc]
    Consumer = _Consumer


class _Boot(BootStrategy):  # type: ignore[misc]
    # Our own producer sends the jobs.
    enable_kafka_producer = False
    enable_web = False


class _App(faust.App):  # type: ignore[misc]
    BootStrategy = _Boot
    mundane_level = "debug"
    kafka: KafkaSettings

    def _create_directories(self) -> None:
        """Creates no directories, because the app has no tables."""


def _fetch_wait_ms(kafka: KafkaSettings) -> int:
    return kafka.fetch_wait_max_ms if kafka.fetch_wait_max_ms <= _EMBEDDED_WAIT_MS else _LONG_POLL_MS


def make_app(kafka: KafkaSettings, client_id: str) -> _App:
    """The faust app of the trigger's group. Changes aiokafka for this process (see the module docstring)."""
    limit_log_repeats()
    skip_unreadable_records()
    app = _App(
        kafka.trigger_group,
        broker=[f"kafka://{address.strip()}" for address in kafka.bootstrap.split(",")],
        broker_client_id=client_id,
        store="memory://",
        autodiscover=False,
        key_serializer="raw",
        value_serializer="raw",
        topic_allow_declare=False,
        topic_disable_leader=True,
        stream_wait_empty=False,
        consumer_auto_offset_reset="latest",
        web_enabled=False,
        web_tables_enabled=False,
        monitor=_NoMonitor(),
    )
    app.kafka = kafka
    app.transport = _Transport(app.conf.broker_consumer, app)
    return app


# -- aiokafka: repeated log lines ----------------

_CHATTY = (
    "aiokafka",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
)
_LINES_PER_SECOND = 1


class _RepeatFilter(logging.Filter):
    """Admits one line of a kind a second, and appends the number of suppressed lines to it."""

    def __init__(self) -> None:
        super().__init__()
        self._limiter = RepeatLimiter(_LINES_PER_SECOND)

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        decision = self._limiter.admit((record.name, text), time.monotonic_ns() // 1000)
        if decision.suppressed_before:
            record.msg = f"{text} ({decision.suppressed_before} more like it suppressed)"
        return decision.admitted


_FILTER = _RepeatFilter()


def limit_log_repeats() -> None:
    """Limits the loggers of aiokafka in this process. May be called again."""
    for name in _CHATTY:
        # A filter of a logger does not apply to the loggers below it.
        logging.getLogger(name).addFilter(_FILTER)


# -- aiokafka: unreadable records -------------

_SKIPPED = Counter(
    "relaygr_trigger_unreadable_records_total", "Records skipped because aiokafka cannot read their batch"
)

_DAMAGED: Final = "Invalid CRC"
"""The text of aiokafka's error for a wrong checksum. The checksum of a batch that was partly read is not available."""


class _TrackedBatches:
    """The batches of one fetch, with the batch that was returned last."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.last: Any = None

    def has_next(self) -> bool:
        return bool(self._batches.has_next())

    def next_batch(self) -> Any:
        self.last = self._batches.next_batch()
        return self.last


class _ReadableRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """aiokafka's records of one fetch, without the unreadable ones."""

    _records: Any
    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[Any]:
        self._records = batches = _TrackedBatches(self._records)
        while True:
            try:
                yield from super()._unpack_records()
            except (CorruptRecordException, UnicodeDecodeError) as error:
                batch = batches.last
                if batch is None or _DAMAGED in str(error):
                    raise
                skipped = batch.next_offset - self.next_fetch_offset
                _SKIPPED.inc(skipped)
                log.error(
                    "unreadable records skipped",
                    topic=self._tp.topic,
                    partition=self._tp.partition,
                    offset=self.next_fetch_offset,
                    records=skipped,
                    error=str(error),
                )
                self.next_fetch_offset = batch.next_offset
            else:
                return


def skip_unreadable_records() -> None:
    """Makes the aiokafka consumers of this process skip unreadable records. May be called again."""
    fetcher.PartitionRecords = _ReadableRecords
