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
from collections import Counter as Tally
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
"""How often delivery reports are taken; the producer sends by itself."""
_FLUSH_S = 2.0
_STOP_S = 5.0


class TriggerMetrics:
    """One process's trigger. Every event is counted under exactly one reason."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Registers the metrics. Raises ValueError if `registry` holds a trigger's already."""
        decisions = Counter(
            "relaygr_trigger_decisions_total", "retrieval events by what became of them", ["reason"], registry=registry
        )
        self.decisions = {reason: decisions.labels(reason.value) for reason in DecisionReason}
        self.event_age = Histogram(
            "relaygr_trigger_event_age_seconds",
            "from the start of retrieval, by the gateway's clock, to the decision",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.undelivered = Counter(
            "relaygr_trigger_jobs_undelivered_total", "jobs handed to the producer and not delivered", registry=registry
        )
        self.bad_statuses = Counter(
            "relaygr_trigger_bad_statuses_total", "worker statuses that could not be used", registry=registry
        )
        self.partitions = Gauge(
            "relaygr_trigger_assigned_partitions", "retrieval partitions this process decides for", registry=registry
        )
        self.fleet_workers = Gauge(
            "relaygr_trigger_fleet_workers", "workers heard of, by whether they count", ["state"], registry=registry
        )
        self.fleet_stale = Gauge(
            "relaygr_trigger_fleet_stale",
            "1 while no worker's status is fresh and length alone decides",
            registry=registry,
        )
        self.owned_partitions = Gauge(
            "relaygr_trigger_fleet_owned_partitions", "partitions with a fresh owner", registry=registry
        )
        self.broker_away = Gauge(
            "relaygr_trigger_broker_away", "1 while no broker of the cluster answers", registry=registry
        )


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
            self._dead_letter(message, reason, repr(error))
        else:
            if verdict.age_us is not None:
                self.metrics.event_age.observe(verdict.age_us / 1e6)
        self._counts[reason] += 1
        self.metrics.decisions[reason].inc()

    def _carry_out(self, verdict: TriggerDecision, message: Any) -> DecisionReason:
        if verdict.job is not None:
            try:
                self._producer.produce(self._jobs_topic, verdict.job, message.key, on_delivery=self._on_delivery)
            except (BufferError, KafkaException):
                # The queue is full: the broker is away or slow. The ranking request takes the full path.
                return DecisionReason.NOT_SENT
        elif verdict.detail is not None:
            self._dead_letter(message, verdict.reason, verdict.detail)
        return verdict.reason

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


class _MessageAdapter:
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
