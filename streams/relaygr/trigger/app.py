"""The trigger process: retrieval events in, pre-infer jobs out.

    relaygr.retrieval --EventFeed--> faust channel --agent--> EventHandler --producer--> relaygr.preinfer
                                                                |      `--> relaygr.dead-letters
                                                             Fleet <--FleetReader-- relaygr.workers

* The agent has concurrency 1 and its effects are idempotent. An event that is delivered twice makes one job, or after a
  crash two jobs with the same request id, of which the worker drops the second. An event that is lost in a crash costs
  one pre-infer, never a ranking.
* faust runs in our process and event loop (`relaygr.trigger.faust_stream`). Our own clients read the events and send
  the jobs, with the settings and the partitioner of all our clients. Delivery reports are taken after each poll.
* After a lost connection to the broker, the clients reconnect by themselves, and a gauge shows the outage.

`docs/trigger.md` describes the decision, `docs/troubleshooting.md` the tuning.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter as Tally
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from prometheus_client import REGISTRY, CollectorRegistry

from relaygr.admission.policy import DecisionReason
from relaygr.admission.scenarios import ONLY_DEFAULT, Scenarios, uses_pool
from relaygr.admission.settings import AdmissionSettings
from relaygr.cluster.rights import Role
from relaygr.cluster.watch import ClusterWatch
from relaygr.kafka.client_errors import LimitedLog
from relaygr.kafka.clients import ONE_A_BATCH, ProducerKind
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.readiness import Check, Readiness
from relaygr.schemas.headers import JOB_HEADER, Headers
from relaygr.schemas.topics import Topic
from relaygr.tracing import Tracer
from relaygr.trigger.faust_stream import EventFeed, make_app
from relaygr.trigger.fleet import Fleet, most_workers
from relaygr.trigger.fleet_reader import FleetReader
from relaygr.trigger.handler import EventHandler, TriggerDecision
from relaygr.trigger.metrics import TriggerMetrics
from relaygr.trigger.settings import TriggerSettings
from relaygr.trigger.tail import JobsTail
from relaygr.trigger.traces import EventTrace, TriggerTraces

log = structlog.get_logger()

_GAUGE_INTERVAL_S = 0.5
_FLUSH_S = 2.0
_DECIDE_US = 1_000_000
_STOP_S = 5.0
_FLEET_US = 10_000_000
_FLEET_POLL_S = 0.02
_SILENT_POOL = (
    "the pre-infer workers neither take nor refuse jobs: jobs go to the owners, but for a trial every 10 s. "
    "`relaygr topics check` names settings of the brokers that keep share groups from working"
)
_WAITING = "waiting for group and offsets"


def trigger_role(scenarios: Scenarios) -> Role:
    """The rights that a trigger of these scenarios needs."""
    return Role.TRIGGER_POOL if uses_pool(scenarios) else Role.TRIGGER


class TriggerApp:
    """A trigger process: the stream of events, the view of the fleet, and the producer of jobs."""

    def __init__(
        self,
        session: KafkaSession,
        settings: TriggerSettings,
        admission: AdmissionSettings | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry = REGISTRY,
        tracer: Tracer | None = None,
        scenarios: Scenarios = ONLY_DEFAULT,
    ) -> None:
        """No network until `start`. Needs the running event loop. `tracer`: None while tracing is off.

        `scenarios`: those whose events come on the topic.
        """
        self._session = session
        self._kafka = kafka = session.kafka
        self._clock = clock or SystemClock()
        self.metrics = TriggerMetrics(registry, scenarios)
        self.fleet = Fleet(settings.status_stale_ms, most_workers(kafka.partitions))
        self._handler = EventHandler(
            settings,
            admission or AdmissionSettings(),
            self.fleet,
            kafka.partitions,
            self._clock,
            on_misjudged=self.metrics.misjudged,
            scenarios=scenarios,
        )
        self._jobs_topic = kafka.topic(kafka.jobs_topic)
        self._job_headers: Headers = [JOB_HEADER] if kafka.jobs_topic is Topic.RANKING else []
        self._traces = (
            TriggerTraces(tracer, kafka.topic(Topic.RETRIEVAL), self._jobs_topic) if tracer is not None else None
        )
        name = session.name
        self._producer = session.producer(ProducerKind.PREINFER, f"{name}-jobs", self._on_client_error)
        self._pool_topic = kafka.topic(Topic.PREINFER_POOL)
        self._pool_producer: Producer | None = None
        if uses_pool(scenarios):
            self._pool_producer = session.producer(
                ProducerKind.PREINFER, f"{name}-pool", self._on_client_error, ONE_A_BATCH
            )
        self._limited_log = LimitedLog(self._clock)
        self._reader = FleetReader(
            session, self.fleet, self._clock, f"{name}-fleet", on_bad=self.metrics.bad_statuses.inc
        )
        self.tail = JobsTail(session, self._clock, f"{name}-tail", settings.rebuild_s)
        self._is_pool_silent = False
        self._counts: Tally[DecisionReason] = Tally()
        self._away_since_us: int | None = None
        self._app = make_app(kafka)
        self._events = self._app.channel()
        self._app.agent(self._events, concurrency=1)(self._consume)
        self._feed = EventFeed(session, f"{name}-events", self._on_partitions, self._on_client_error)
        topics = [kafka.topic(Topic.RETRIEVAL), self._jobs_topic]
        self._watch = ClusterWatch(f"{name}-jobs", self._producer.list_topics, topics, kafka.partitions, self._clock)
        self._stopping = threading.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._gauges: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Joins the consumer group. Raises RelayError if the cluster cannot be reached."""
        await _on_daemon_thread(self._session.require_broker, self._stopping)
        self._watch.start()
        self._reader.start()
        self.tail.start()
        await self._app.start()
        await self._await_fleet()
        self._feeding = asyncio.create_task(self._feed.run(self._events, self._take_reports), name="events")
        self._gauges = asyncio.create_task(self._set_gauges(), name="gauges")

    async def _await_fleet(self) -> None:
        """Waits until the owners are known, since without them a new process would admit by length alone."""
        ends_us = self._clock.monotonic_us() + _FLEET_US
        while not self._reader.caught_up and self._reader.refusal is None and self._clock.monotonic_us() < ends_us:
            await asyncio.sleep(_FLEET_POLL_S)

    async def run(self, stop: asyncio.Event) -> None:
        """Starts, and returns within seconds after `stop` is set, also during the start.

        Raises RelayError if the cluster cannot be reached, or if the stream of events fails.
        """
        asked = asyncio.ensure_future(stop.wait())
        starting = asyncio.create_task(self.start())
        tasks: list[asyncio.Future[Any]] = [asked, starting]
        crash: BaseException | None = None
        try:
            await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                assert self._feeding is not None
                ended = asyncio.ensure_future(self._app.wait_until_stopped())
                tasks.append(ended)
                await asyncio.wait({ended, asked, self._feeding}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            crash = self._app.crash_reason
            feeding = self._feeding
            failed = feeding.exception() if feeding is not None and feeding.done() and not feeding.cancelled() else None
            await self.stop()
        if failed is not None:
            raise failed
        if crash is not None:
            raise RelayError(f"The stream of the trigger failed: {crash!r}. Start the trigger again") from crash

    async def stop(self) -> None:
        """Commits, leaves the group and flushes the producers, each within a bounded time."""
        if self._gauges is not None:
            self._gauges.cancel()
        self._feed.stop()
        if self._feeding is not None:
            await asyncio.gather(self._feeding, return_exceptions=True)
            await self._await_decisions()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._app.stop(), _STOP_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_on_daemon_thread(self._feed.close), _STOP_S)
        self._reader.stop()
        self.tail.stop()
        self._watch.stop()
        await asyncio.to_thread(self._producer.flush, _FLUSH_S)
        if self._pool_producer is not None:
            await asyncio.to_thread(self._pool_producer.flush, _FLUSH_S)
        await asyncio.to_thread(self._session.dead_letters.flush, _FLUSH_S)

    async def _await_decisions(self) -> None:
        """Waits until the agent has handled every event that was read, since their offsets will be committed."""
        ends_us = self._clock.monotonic_us() + _DECIDE_US
        while self._counts.total() < self._feed.delivered and self._clock.monotonic_us() < ends_us:
            await asyncio.sleep(0)

    def readiness(self) -> Readiness:
        """Ready: every event written from now on will be read, and the workers topic was read to its end once."""
        owned = f"{len(self._feed.partitions)} of {self._kafka.partitions} partitions"
        positioned = self._feed.is_positioned
        refusal = self._session.refusal
        return Readiness(
            (
                Check("assigned", positioned, owned if positioned else self._feed.refusal or _WAITING),
                Check("fleet", self._reader.caught_up, self._reader.refusal or "the workers topic is read to its end"),
                Check("rights", refusal is None, refusal or ""),
                *self._watch.checks(),
            )
        )

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions of the retrieval topic that this process reads."""
        return self._feed.partitions

    def decision_counts(self) -> dict[str, int]:
        """The number of events so far by reason, without zeros."""
        return {reason.value: count for reason, count in self._counts.items()}

    async def _consume(self, stream: Any) -> None:
        async for messages in stream:
            for message in messages:
                self._take(message)

    def _take(self, message: Message) -> None:
        """Handles one event, from its message to its effect. An error does not end the stream."""
        began_us, trace = 0 if self._traces is None else self._clock.wall_us(), None
        try:
            key, partition = message.key(), message.partition()
            assert partition is not None
            decision = self._handler.decide(key, message.value(), partition)
            if self._traces is not None and decision.request_id is not None:
                trace = self._traces.event(message, decision.request_id, began_us)
            reason = self._apply(decision, message, key, trace)
        except Exception as error:
            log.exception("the decision on an event failed", partition=message.partition(), offset=message.offset())
            reason = DecisionReason.ERROR
            self._forget_job(message.key())
            # Its text may name a user; the log has the traceback.
            self._dead_letter(message, reason, type(error).__name__)
        else:
            if decision.scenario is not None:
                is_sent = decision.job is not None and reason is decision.reason
                self.metrics.by_scenario[decision.scenario][is_sent].inc()
            if decision.age_us is not None:
                self.metrics.event_age.observe(decision.age_us / 1e6, trace.exemplar if trace is not None else None)
            if trace is not None:
                trace.decided(reason)
        self._counts[reason] += 1
        self.metrics.decisions[reason].inc()

    def _apply(
        self, decision: TriggerDecision, message: Message, key: bytes | None, trace: EventTrace | None
    ) -> DecisionReason:
        if decision.job is not None:
            report = self._on_delivery if trace is None else partial(self._on_traced_delivery, trace)
            headers = self._job_headers if trace is None else [*self._job_headers, *trace.headers]
            topic, producer = self._jobs_topic, self._producer
            if decision.by_pool and self._pool_producer is not None:
                topic, producer = self._pool_topic, self._pool_producer
                self.metrics.to_pool.inc()
            try:
                producer.produce(topic, decision.job, key, headers=headers, on_delivery=report)
            except (BufferError, KafkaException):
                # The queue is full: the broker is away or slow. The ranking request takes the full path.
                self._forget_job(key)
                return DecisionReason.NOT_SENT
            if topic == self._pool_topic:
                # Not before: the pool must not count as silent for jobs that it cannot have.
                self.fleet.sent_to_pool(self._clock.wall_us())
        elif decision.detail is not None:
            self._dead_letter(message, decision.reason, decision.detail)
        return decision.reason

    def _dead_letter(self, message: Message, reason: DecisionReason, detail: str) -> None:
        self._limited_log.warning(
            "an event goes to the dead letters", reason, reason=reason.value, detail=detail, topic=message.topic(),
            partition=message.partition(), offset=message.offset(),
        )  # fmt: skip
        self._session.dead_letters.write(message, reason.value, detail)

    def _on_delivery(self, error: KafkaError | None, job: Message) -> None:
        if error is None:
            self._away_since_us = None
        else:
            self.metrics.undelivered.inc()
            self._forget_job(job.key())

    def _forget_job(self, key: bytes | None) -> None:
        """A job was not sent, so the user's next event must not count as under way because of it."""
        if key is not None:
            self._handler.unsent(key.decode(errors="replace"))

    def _on_traced_delivery(self, trace: EventTrace, error: KafkaError | None, message: Message) -> None:
        self._on_delivery(error, message)
        trace.job_reported(error, message)

    def _on_client_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._away_since_us is None:
            self._away_since_us = self._clock.monotonic_us()

    def _on_partitions(self, partitions: frozenset[int]) -> None:
        self._handler.reassign(partitions)
        self.tail.follow(partitions)

    def _take_reports(self) -> None:
        self._producer.poll(0)
        if self._pool_producer is not None:
            self._pool_producer.poll(0)
        self._session.dead_letters.poll()
        for job, partition in self.tail.take():
            self._handler.restore(job, partition)

    async def _set_gauges(self) -> None:
        while True:
            self._handler.take_reports()
            self.metrics.set_margins(self._handler.feedback.margins)
            now_us = self._clock.wall_us()
            summary = self.fleet.summary(now_us)
            is_silent = self.fleet.pool_is_silent(now_us)
            self.metrics.pool_open.set(self.fleet.pool_takes(now_us) and not is_silent)
            if is_silent is not self._is_pool_silent:
                self._is_pool_silent = is_silent
                log.warning(_SILENT_POOL if is_silent else "the pre-infer workers take jobs again")
            self.metrics.fleet_stale.set(summary.fresh_workers == 0)
            self.metrics.owned_partitions.set(summary.owned_partitions)
            if self._away_since_us is not None and self._reader.heard_us > self._away_since_us:
                self._away_since_us = None
            self.metrics.broker_away.set(self._away_since_us is not None)
            await asyncio.sleep(_GAUGE_INTERVAL_S)


async def _on_daemon_thread(function: Callable[..., object], *arguments: object) -> None:
    """Calls `function` on a thread. If the wait is cancelled, the thread goes on, but the process may end before it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failed: BaseException | None = None
        try:
            function(*arguments)
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(end, failed)

    threading.Thread(target=run, name="trigger-call", daemon=True).start()
    await done
