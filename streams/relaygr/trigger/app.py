"""The trigger as a faust app: retrieval events in, pre-infer jobs out.

    relaygr.retrieval --faust stream--> EventHandler --confluent producer--> relaygr.preinfer
                                             |      `--> relaygr.dead-letters (undecodable, misrouted)
                                          Fleet <--FleetReader-- relaygr.workers

* The stream has concurrency 1 and its effects are idempotent: an event delivered twice makes a job with the same
  request id twice, of which the worker drops the second. An event lost at a crash costs one pre-infer, never a
  ranking.
* faust runs inside our process and loop: no command line, no web server, no directories, no leader topic, no
  logging of its own. Jobs leave through our own producer, which has the settings and the partitioner of all our
  producers.
* A broker that goes away is waited for: the clients reconnect by themselves, and a gauge says so.

What was tuned, and what it brought, is in `docs/trigger.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any, cast

import aiokafka
import faust
import structlog
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from confluent_kafka import KafkaError, KafkaException, Message
from faust.app.base import BootStrategy
from faust.sensors import Monitor
from faust.serializers.schemas import Schema
from faust.transport.drivers import aiokafka as driver
from mode.utils.futures import maybe_async
from prometheus_client import REGISTRY, CollectorRegistry

from relaygr.admission.policy import DecisionReason
from relaygr.admission.settings import AdmissionSettings
from relaygr.kafka.clients import ProducerKind, aiokafka_options, make_producer
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.probes import Check, Readiness
from relaygr.schemas.topics import CATALOGUE, Topic
from relaygr.trigger.fleet import Fleet, FleetReader
from relaygr.trigger.handler import EventHandler, Verdict
from relaygr.trigger.metrics import TriggerMetrics
from relaygr.trigger.quiet import limit_repeats
from relaygr.trigger.settings import TriggerSettings
from relaygr.trigger.unreadable import pass_over_unreadable

log = structlog.get_logger()

_GAUGE_INTERVAL_S = 0.5
_POLL_INTERVAL_S = 0.05
"""How often delivery reports are taken; the producer sends by itself."""
_FLUSH_S = 2.0
_STOP_S = 5.0
_EMBEDDED_WAIT_MS = 5
"""Fetch waits up to here are for librdkafka's own cluster, whose long poll does not wake on data."""
_LONG_POLL_MS = 500
"""A real broker wakes a waiting fetch at once, and every empty answer is parsed in Python."""
_MAX_POLL_RECORDS = 500
_REQUEST_TIMEOUT_MS = 10_000


class TriggerApp:
    """One trigger process: faust's stream, the view of the fleet, and the producer of jobs."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: TriggerSettings,
        admission: AdmissionSettings | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """No network until `start`. Needs the running event loop."""
        limit_repeats()
        pass_over_unreadable()
        self._kafka = kafka
        self._clock = clock or SystemClock()
        self.metrics = TriggerMetrics(registry)
        self.fleet = Fleet(settings.status_stale_ms)
        self._handler = EventHandler(
            settings, admission or AdmissionSettings(), self.fleet, kafka.partitions, self._clock
        )
        self._jobs_topic = kafka.topic(Topic.PREINFER)
        name = settings.instance_id
        self._producer = make_producer(kafka, ProducerKind.PREINFER, f"{name}-jobs", self._on_client_error)
        self._dead_letters = DeadLetterWriter(kafka, name, self._clock)
        self._reader = FleetReader(
            kafka, self.fleet, self._clock, f"{name}-fleet", on_bad=self.metrics.bad_statuses.inc
        )
        self._counts: Counter[DecisionReason] = Counter()
        self._partitions: frozenset[int] = frozenset()
        self._positioned = False
        self._positioning: asyncio.Task[None] | None = None
        self._away_since_us: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._app = _make_app(kafka, f"{name}-events")
        self._app.agent(self._app.topic(kafka.topic(Topic.RETRIEVAL), schema=_RawSchema()), concurrency=1)(
            self._consume
        )
        self._app.on_partitions_assigned.connect(self._on_assigned)

    async def start(self) -> None:
        """Joins the group. Raises RelayError if the cluster cannot be reached."""
        self._reader.start()
        try:
            await self._app.start()
        except aiokafka.errors.KafkaError as error:
            await self.stop()
            raise RelayError(
                f"The trigger can not join its group at {self._kafka.bootstrap}: {error}. "
                "Check `bootstrap` and `security`"
            ) from error
        self._tasks = [
            asyncio.create_task(self._take_reports(), name="delivery-reports"),
            asyncio.create_task(self._set_gauges(), name="gauges"),
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Starts, and returns within seconds after `stop` is set. Raises RelayError if faust gives up."""
        await self.start()
        ended = asyncio.ensure_future(self._app.wait_until_stopped())
        asked = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            asked.cancel()
            crash = self._app.crash_reason
            await self.stop()
        if crash is not None:
            raise RelayError(f"The trigger's stream ended: {crash!r}. Start it again; nothing is lost") from crash

    async def stop(self) -> None:
        """Leaves the group, commits, and flushes what was produced, each for a bounded time."""
        tasks = [*self._tasks, *([self._positioning] if self._positioning is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._app.stop(), _STOP_S)
        self._reader.stop()
        await asyncio.to_thread(self._producer.flush, _FLUSH_S)
        await asyncio.to_thread(self._dead_letters.flush, _FLUSH_S)

    def readiness(self) -> Readiness:
        """Ready: each event written from now on will be read, and the workers topic was read to its end once."""
        places = f"{len(self._partitions)} of {self._kafka.partitions} partitions"
        return Readiness(
            (
                Check("assigned", self._positioned, places if self._positioned else "waiting for group and offsets"),
                Check("fleet", self._reader.caught_up, "the workers topic is read to its end"),
            )
        )

    def decision_counts(self) -> dict[str, int]:
        """Events by reason so far, those with any."""
        return {reason.value: count for reason, count in self._counts.items()}

    async def _consume(self, stream: Any) -> None:
        async for message in stream:
            self._take(message)

    def _take(self, message: Any) -> None:
        """One event, from faust's message to its effect. Whatever happens, the loop goes on."""
        try:
            verdict = self._handler.judge(message.key, message.value, message.partition)
            reason = self._carry_out(verdict, message)
        except Exception as error:
            log.exception("an event could not be decided", partition=message.partition, offset=message.offset)
            reason = DecisionReason.ERROR
            self._bury(message, reason, repr(error))
        else:
            if verdict.age_us is not None:
                self.metrics.event_age.observe(verdict.age_us / 1e6)
        self._counts[reason] += 1
        self.metrics.decisions[reason].inc()

    def _carry_out(self, verdict: Verdict, message: Any) -> DecisionReason:
        if verdict.job is not None:
            try:
                self._producer.produce(self._jobs_topic, verdict.job, message.key, on_delivery=self._on_delivery)
            except (BufferError, KafkaException):
                # The queue is full: the broker is away or slow. The ranking request takes the full path.
                return DecisionReason.NOT_SENT
        elif verdict.detail is not None:
            self._bury(message, verdict.reason, verdict.detail)
        return verdict.reason

    def _bury(self, message: Any, reason: DecisionReason, detail: str) -> None:
        self._dead_letters.write(cast(Message, _Letter(message)), reason.value, detail)

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self._away_since_us = None
        else:
            self.metrics.undelivered.inc()

    def _on_client_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._away_since_us is None:
            self._away_since_us = self._clock.monotonic_us()

    async def _on_assigned(self, _: Any, assigned: Any, **__: Any) -> None:
        topic = self._kafka.topic(Topic.RETRIEVAL)
        self._partitions = frozenset(place.partition for place in assigned if place.topic == topic)
        self._handler.reassign(self._partitions)
        self.metrics.partitions.set(len(self._partitions))
        self._positioned = False
        if self._positioning is not None:
            self._positioning.cancel()
        self._positioning = asyncio.create_task(self._await_positions(frozenset(assigned)), name="positions")
        log.info("trigger owns partitions", partitions=sorted(self._partitions))

    async def _await_positions(self, places: frozenset[Any]) -> None:
        """A first start reads from the end, and only what is written after the end was looked up."""
        for place in places:
            await self._app.consumer.position(place)
        self._positioned = True

    async def _take_reports(self) -> None:
        while True:
            self._producer.poll(0)
            self._dead_letters.poll()
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _set_gauges(self) -> None:
        while True:
            summary = self.fleet.summary(self._clock.wall_us())
            self.metrics.fleet_workers.labels("fresh").set(summary.fresh_workers)
            self.metrics.fleet_workers.labels("silent").set(summary.workers - summary.fresh_workers)
            self.metrics.fleet_stale.set(summary.fresh_workers == 0)
            self.metrics.owned_partitions.set(summary.owned_partitions)
            if self._away_since_us is not None and self._reader.heard_us > self._away_since_us:
                self._away_since_us = None
            self.metrics.broker_away.set(self._away_since_us is not None)
            await asyncio.sleep(_GAUGE_INTERVAL_S)


class _Letter:
    """A faust message as dead letters want it: confluent-kafka's accessors."""

    __slots__ = ("_message",)

    def __init__(self, message: Any) -> None:
        self._message = message

    def topic(self) -> str:
        return str(self._message.topic)

    def partition(self) -> int:
        return int(self._message.partition)

    def offset(self) -> int:
        return int(self._message.offset)

    def key(self) -> bytes | None:
        return cast("bytes | None", self._message.key)

    def value(self) -> bytes | None:
        return cast("bytes | None", self._message.value)

    def headers(self) -> list[tuple[str, bytes]]:
        return list(self._message.headers or ())


class _RawSchema(Schema):  # type: ignore[misc]
    """An event's value is faust's message itself: the handler decodes, and says why where it cannot."""

    def compile(self, app: Any, **_: Any) -> Any:
        create_event = app.create_event

        async def to_event(message: Any, **_: Any) -> Any:
            return create_event(message.key, message, message.headers, message)

        return to_event


class _Silent(Monitor):  # type: ignore[misc]
    """faust's monitor without its bookkeeping of every event, which nobody reads."""

    mundane_level = "debug"

    def on_message_in(self, tp: Any, offset: int, message: Any) -> None: ...

    def on_message_out(self, tp: Any, offset: int, message: Any) -> None: ...

    def on_stream_event_in(self, tp: Any, offset: int, stream: Any, event: Any) -> None: ...

    def on_stream_event_out(self, tp: Any, offset: int, stream: Any, event: Any, state: Any = None) -> None: ...

    def track_tp_end_offset(self, tp: Any, offset: int) -> None: ...


class _InLoop:
    """What mode runs a service's thread with, without the thread: the service lives in its parent's loop."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._service.parent_loop.create_task(self._service._serve(), name="consumer")

    def stop(self) -> None:
        """Nothing: the service ends its own task."""


class _ConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """faust's "consumer thread" in the loop of the stream, around a consumer with our settings and security.

    Two threads that hand each batch to and fro under one interpreter lock waited for the lock more than they
    worked.
    """

    Worker = _InLoop
    mundane_level = "debug"

    def __init__(self, consumer: Any, *, loop: Any, **kwargs: Any) -> None:
        super().__init__(consumer, loop=loop, thread_loop=loop, **kwargs)

    async def call_thread(self, fun: Any, *args: Any, **kwargs: Any) -> Any:
        return await maybe_async(fun(*args, **kwargs))

    async def _gather_remaining_tasks(self) -> None:
        """Nothing: the loop's other tasks are not this service's to end."""

    def _create_worker_consumer(self, _: Any) -> aiokafka.AIOKafkaConsumer:
        self._assignor = RoundRobinPartitionAssignor
        app: _App = self.app
        return aiokafka.AIOKafkaConsumer(
            **aiokafka_options(app.kafka),
            client_id=app.conf.broker_client_id,
            group_id=app.conf.id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            # An event from before our first commit is of no use any more.
            auto_offset_reset="latest",
            max_poll_records=_MAX_POLL_RECORDS,
            max_partition_fetch_bytes=CATALOGUE[Topic.RETRIEVAL].max_message_bytes,
            fetch_max_wait_ms=_fetch_wait_ms(app.kafka),
            session_timeout_ms=app.kafka.session_timeout_ms,
            heartbeat_interval_ms=app.kafka.heartbeat_interval_ms,
            request_timeout_ms=max(_REQUEST_TIMEOUT_MS, app.kafka.session_timeout_ms + 1000),
            # Bounds how long a rebalance or a dead broker stops the stream for longer than it must.
            retry_backoff_ms=50,
            metadata_max_age_ms=5000,
        )

    def verify_event_path(self, now: float, tp: Any) -> None:
        """Nothing: it reads the monitor that we silenced; the lag monitor watches this group as all others."""


class _Consumer(driver.Consumer):  # type: ignore[misc]
    mundane_level = "debug"

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):  # type: ignore[misc]
    Consumer = _Consumer


class _Boot(BootStrategy):  # type: ignore[misc]
    # Jobs leave through our own producer.
    enable_kafka_producer = False
    enable_web = False


class _App(faust.App):  # type: ignore[misc]
    BootStrategy = _Boot
    mundane_level = "debug"
    kafka: KafkaSettings

    def _create_directories(self) -> None:
        """None: there are no tables, and a service leaves nothing in its working directory."""


def _fetch_wait_ms(kafka: KafkaSettings) -> int:
    return kafka.fetch_wait_max_ms if kafka.fetch_wait_max_ms <= _EMBEDDED_WAIT_MS else _LONG_POLL_MS


def _make_app(kafka: KafkaSettings, client_id: str) -> _App:
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
        monitor=_Silent(),
    )
    app.kafka = kafka
    app.transport = _Transport(app.conf.broker_consumer, app)
    return app
