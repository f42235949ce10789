"""The trigger process: retrieval events in, pre-infer jobs out.

    relaygr.retrieval --faust stream--> EventHandler --confluent producer--> relaygr.preinfer
                                             |      `--> relaygr.dead-letters (undecodable, misrouted)
                                          Fleet <--FleetReader-- relaygr.workers

* The stream has concurrency 1 and its effects are idempotent: an event that is delivered twice makes two jobs with the
  same request id, and the worker drops the second. An event that is lost in a crash costs one pre-infer, never a
  ranking.
* faust runs in our process and event loop (`relaygr.trigger.faust_stream`). Jobs are sent by our own producer, with
  the settings and the partitioner of all our producers.
* After a lost connection to the broker, the clients reconnect by themselves, and a gauge shows the outage.

`docs/trigger.md` describes the tuning and its effects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any, cast

import aiokafka
import structlog
from confluent_kafka import KafkaError, KafkaException, Message
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from relaygr.admission.policy import DecisionReason
from relaygr.admission.settings import AdmissionSettings
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import LATENCY_BUCKETS_S, Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.probes import Check, Readiness
from relaygr.schemas.topics import Topic
from relaygr.trigger.faust_stream import RawSchema, make_app
from relaygr.trigger.fleet import Fleet, FleetReader
from relaygr.trigger.handler import EventHandler, TriggerDecision
from relaygr.trigger.settings import TriggerSettings

log = structlog.get_logger()

_GAUGE_INTERVAL_S = 0.5
_POLL_INTERVAL_S = 0.05
"""Time between two reads of delivery reports. The producer sends on its own thread."""
_FLUSH_S = 2.0
_STOP_S = 5.0


class TriggerMetrics:
    """The metrics of a trigger process. Every event is counted under exactly one reason."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Registers the metrics. Raises ValueError if `registry` has them already."""
        self._shown_margins: set[int] = set()
        decisions = Counter(
            "relaygr_trigger_decisions_total", "Retrieval events by outcome", ["reason"], registry=registry
        )
        self.decisions = {reason: decisions.labels(reason.value) for reason in DecisionReason}
        self.event_age = Histogram(
            "relaygr_trigger_event_age_seconds",
            "Time from the start of retrieval, by the gateway's clock, to the decision",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._misjudged = Counter(
            "relaygr_trigger_misjudged_total",
            "Requests decided as not_at_risk that full inference then truncated, rejected or answered late, by the "
            "fewest prefix tokens of their length bucket",
            ["tokens"],
            registry=registry,
        )
        self._margin = Gauge(
            "relaygr_trigger_risk_margin",
            "Factor on the predicted time of full inference in the risk test, by the fewest prefix tokens of a length "
            "bucket; it follows misjudged and needlessly prepared requests",
            ["tokens"],
            registry=registry,
        )
        self.undelivered = Counter(
            "relaygr_trigger_jobs_undelivered_total", "Jobs given to the producer and not delivered", registry=registry
        )
        self.bad_statuses = Counter(
            "relaygr_trigger_bad_statuses_total", "Worker statuses that could not be decoded or used", registry=registry
        )
        self.partitions = Gauge(
            "relaygr_trigger_assigned_partitions", "Retrieval partitions assigned to this process", registry=registry
        )
        self.fleet_workers = Gauge(
            "relaygr_trigger_fleet_workers",
            "Known workers, fresh (ready, with a recent status) or silent",
            ["state"],
            registry=registry,
        )
        self.fleet_stale = Gauge(
            "relaygr_trigger_fleet_stale",
            "1 while no worker has a fresh status and the length of the history decides alone",
            registry=registry,
        )
        self.owned_partitions = Gauge(
            "relaygr_trigger_fleet_owned_partitions", "Partitions whose owner has a fresh status", registry=registry
        )
        self.broker_away = Gauge(
            "relaygr_trigger_broker_away", "1 while no broker of the Kafka cluster answers", registry=registry
        )

    def misjudged(self, bucket: int) -> None:
        self._misjudged.labels(_fewest_tokens(bucket)).inc()

    def set_margins(self, margins: Sequence[float]) -> None:
        """Shows the margins that differ from 1, and those that once did."""
        for bucket, margin in enumerate(margins):
            if margin != 1 or bucket in self._shown_margins:
                self._shown_margins.add(bucket)
                self._margin.labels(_fewest_tokens(bucket)).set(margin)


def _fewest_tokens(bucket: int) -> str:
    """The label of a length bucket."""
    return str(1 << (bucket - 1) if bucket else 0)


class TriggerApp:
    """A trigger process: the stream of events, the view of the fleet, and the producer of jobs."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: TriggerSettings,
        admission: AdmissionSettings | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """No network until `start`. Needs the running event loop."""
        self._kafka = kafka
        self._clock = clock or SystemClock()
        self.metrics = TriggerMetrics(registry)
        self.fleet = Fleet(settings.status_stale_ms)
        self._handler = EventHandler(
            settings,
            admission or AdmissionSettings(),
            self.fleet,
            kafka.partitions,
            self._clock,
            on_misjudged=self.metrics.misjudged,
        )
        self._jobs_topic = kafka.topic(Topic.PREINFER)
        name = settings.instance_id
        self._producer = make_producer(kafka, ProducerKind.PREINFER, f"{name}-jobs", self._on_client_error)
        self._dead_letters = DeadLetterWriter(kafka, name, self._clock)
        self._reader = FleetReader(
            kafka, self.fleet, self._clock, f"{name}-fleet", on_bad=self.metrics.bad_statuses.inc
        )
        self._counts: Tally[DecisionReason] = Tally()
        self._partitions: frozenset[int] = frozenset()
        self._positioned = False
        self._positioning: asyncio.Task[None] | None = None
        self._away_since_us: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._app = make_app(kafka, f"{name}-events")
        self._app.agent(self._app.topic(kafka.topic(Topic.RETRIEVAL), schema=RawSchema()), concurrency=1)(self._consume)
        self._app.on_partitions_assigned.connect(self._on_assigned)

    async def start(self) -> None:
        """Joins the consumer group. Raises RelayError if the cluster cannot be reached."""
        self._reader.start()
        try:
            await self._app.start()
        except aiokafka.errors.KafkaError as error:
            await self.stop()
            raise RelayError(
                f"The trigger cannot join its group at {self._kafka.bootstrap}: {error}. "
                "Check `bootstrap` and `security`"
            ) from error
        self._tasks = [
            asyncio.create_task(self._take_reports(), name="delivery-reports"),
            asyncio.create_task(self._set_gauges(), name="gauges"),
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Starts, and returns within seconds after `stop` is set. Raises RelayError if the stream of faust fails."""
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
            raise RelayError(f"The stream of the trigger failed: {crash!r}. Start the trigger again") from crash

    async def stop(self) -> None:
        """Commits, leaves the group and flushes the producers, each within a bounded time."""
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
        """Ready: every event written from now on will be read, and the workers topic was read to its end once."""
        owned = f"{len(self._partitions)} of {self._kafka.partitions} partitions"
        return Readiness(
            (
                Check("assigned", self._positioned, owned if self._positioned else "waiting for group and offsets"),
                Check("fleet", self._reader.caught_up, "the workers topic is read to its end"),
            )
        )

    def decision_counts(self) -> dict[str, int]:
        """The number of events so far by reason, without zeros."""
        return {reason.value: count for reason, count in self._counts.items()}

    async def _consume(self, stream: Any) -> None:
        async for message in stream:
            self._take(message)

    def _take(self, message: Any) -> None:
        """Handles one event, from faust's message to its effect. An error does not end the stream."""
        try:
            decision = self._handler.decide(message.key, message.value, message.partition)
            reason = self._apply(decision, message)
        except Exception as error:
            log.exception("the decision on an event failed", partition=message.partition, offset=message.offset)
            reason = DecisionReason.ERROR
            self._dead_letter(message, reason, repr(error))
        else:
            if decision.age_us is not None:
                self.metrics.event_age.observe(decision.age_us / 1e6)
        self._counts[reason] += 1
        self.metrics.decisions[reason].inc()

    def _apply(self, decision: TriggerDecision, message: Any) -> DecisionReason:
        if decision.job is not None:
            try:
                self._producer.produce(self._jobs_topic, decision.job, message.key, on_delivery=self._on_delivery)
            except (BufferError, KafkaException):
                # The queue is full: the broker is away or slow. The ranking request takes the full path.
                return DecisionReason.NOT_SENT
        elif decision.detail is not None:
            self._dead_letter(message, decision.reason, decision.detail)
        return decision.reason

    def _dead_letter(self, message: Any, reason: DecisionReason, detail: str) -> None:
        self._dead_letters.write(cast(Message, _MessageAdapter(message)), reason.value, detail)

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
        self._partitions = frozenset(tp.partition for tp in assigned if tp.topic == topic)
        self._handler.reassign(self._partitions)
        self.metrics.partitions.set(len(self._partitions))
        self._positioned = False
        if self._positioning is not None:
            self._positioning.cancel()
        self._positioning = asyncio.create_task(self._await_positions(frozenset(assigned)), name="positions")
        log.info("partitions assigned", partitions=sorted(self._partitions))

    async def _await_positions(self, assigned: frozenset[Any]) -> None:
        """Waits until the position of every partition is known. A first start reads only events written after that."""
        for tp in assigned:
            await self._app.consumer.position(tp)
        self._positioned = True

    async def _take_reports(self) -> None:
        while True:
            self._producer.poll(0)
            self._dead_letters.poll()
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _set_gauges(self) -> None:
        while True:
            self._handler.take_reports()
            self.metrics.set_margins(self._handler.feedback.margins)
            summary = self.fleet.summary(self._clock.wall_us())
            self.metrics.fleet_workers.labels("fresh").set(summary.fresh_workers)
            self.metrics.fleet_workers.labels("silent").set(summary.workers - summary.fresh_workers)
            self.metrics.fleet_stale.set(summary.fresh_workers == 0)
            self.metrics.owned_partitions.set(summary.owned_partitions)
            if self._away_since_us is not None and self._reader.heard_us > self._away_since_us:
                self._away_since_us = None
            self.metrics.broker_away.set(self._away_since_us is not None)
            await asyncio.sleep(_GAUGE_INTERVAL_S)


class _MessageAdapter:
    """A message of faust with the accessors of confluent-kafka, as the dead-letter writer needs them."""

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
