"""The worker process: builds every part, says what it owns and holds, runs, and ends cleanly.

Threads: the poll thread (Kafka), the device thread (compute), the history follower, the cache's mover,
and the probe server's. The main thread waits for a signal or for one of them to end.

It ends
* on SIGTERM or SIGINT: reads no more, finishes what it has within `drain_s`, commits, closes;
* with EXIT_FENCED if another process took over its id (no supervisor may restart it);
* with EXIT_STUCK, at once, if the device makes no progress: what is in flight is delivered again;
* with EXIT_FAILED if a thread failed.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog
from confluent_kafka import KafkaException
from numpy.typing import NDArray

from schemas.messages import WorkerState
from schemas.topics import Topic
from streams.admin import require_topics
from streams.clients import (
    LARGEST_QUEUE_BYTES,
    ProducerKind,
    make_group_consumer,
    make_producer,
    require_broker,
)
from streams.clock import SystemClock
from streams.consumer import ConsumerLoop, ConsumerSettings, LoopState
from streams.dead_letters import DeadLetterWriter
from streams.errors import RelayError
from streams.interpreter import settle
from streams.latency import Corrector
from streams.partitioner import partition_for
from streams.probes import Check, ProbeServer, Readiness
from streams.settings import KafkaSettings
from streams.trigger.settings import AdmissionSettings
from workers.admission import JobAdmission
from workers.answers import Answers
from workers.cache.arena import copy_page
from workers.cache.build import BuiltCache, build_cache
from workers.cache.metrics import CacheCollector
from workers.calibration import latency_for
from workers.device_thread import DeviceThread
from workers.executor import Executor
from workers.handler import WorkerHandler
from workers.history.follower import HistoryFollower
from workers.history.record import StoredHistory
from workers.history.store import HistoryStore
from workers.memory import MemoryPlan, process_bytes, require_host_memory
from workers.metrics import WorkerMetrics
from workers.model.engine import Engine, load_engine
from workers.settings import WorkerSettings
from workers.status import QueueWaits, StatusPublisher, WorkerFacts, WorkerReading

log = structlog.get_logger()

EXIT_FAILED = 1
EXIT_FENCED = 3
EXIT_STUCK = 4

CLIENTS = 5
"""Two consumers and three producers, each with a queue of at most LARGEST_QUEUE_BYTES."""


@dataclass(frozen=True, slots=True)
class _FollowedHistories:
    """The executor's view of the history store."""

    store: HistoryStore
    follower: HistoryFollower

    def get(self, user_id: str) -> StoredHistory | None:
        return self.store.get(user_id)

    def is_loading(self, partition: int) -> bool:
        return not self.follower.caught_up(partition)


def queues_bytes(settings: WorkerSettings) -> int:
    """What a worker's queues hold at most: its Kafka clients', and the ranking requests that are not answered."""
    return CLIENTS * LARGEST_QUEUE_BYTES + int(settings.ranking_queue_bytes)


def run_worker(
    kafka: KafkaSettings, settings: WorkerSettings, admission: AdmissionSettings, consumer: ConsumerSettings
) -> int:
    """Runs until told to stop. Returns the exit code. Raises RelayError for what the user can mend."""
    require_broker(kafka)
    require_topics(kafka)
    return WorkerProcess(kafka, settings, admission, consumer).run()


class WorkerProcess:
    """All parts of one worker. `run` is the main thread's."""

    def __init__(
        self, kafka: KafkaSettings, settings: WorkerSettings, admission: AdmissionSettings, consumer: ConsumerSettings
    ) -> None:
        self._kafka = kafka
        self._settings = settings
        self._clock = SystemClock()
        self._metrics = WorkerMetrics()
        self._end = threading.Event()
        self._signalled = False
        self._exit_code = 0
        self._state = WorkerState.STARTING
        self._status_at_us = 0
        self._ranking_paused = False
        self._waits = QueueWaits()

        client_id = f"relaygr-{settings.worker_id}"
        self._engine = load_engine(
            settings.model, settings.device, settings.kv_dtype, settings.page_tokens, settings.threads
        )
        self._plan = self._memory_plan(self._engine)
        require_host_memory(self._plan, self._engine.device.is_cpu)
        built, scratch_pages = self._take_memory(self._engine)
        self._cache = built.cache
        CacheCollector(self._cache.stats)
        self._latency = latency_for(self._engine, settings.calibration)
        self._corrector = Corrector(self._latency)

        self._producer = make_producer(kafka, ProducerKind.LATENCY, f"{client_id}-results")
        self._dead_letters = DeadLetterWriter(kafka, client_id)
        self._follower_letters = DeadLetterWriter(kafka, f"{client_id}-history")
        self._store = HistoryStore.open(settings.history_path, settings.history_max_bytes)
        self._follower = HistoryFollower(
            kafka,
            self._store,
            self._follower_letters,
            f"{client_id}-history",
            on_changed=lambda users: self._device.call(lambda: self._executor.histories_changed(users)),
            on_deleted=lambda user: self._device.call(lambda: self._executor.user_deleted(user)),
        )
        self._answers = Answers(
            self._producer,
            settings.worker_id,
            self._engine.revision,
            settings.max_clock_skew_ms,
            finish=lambda token: self._loop.finish(token),
            metrics=self._metrics,
            waits=self._waits,
            clock=self._clock,
        )
        self._executor = Executor(
            self._engine,
            self._cache,
            scratch_pages,
            _FollowedHistories(self._store, self._follower),
            partial(copy_page, built.hbm_arena),
            self._corrector,
            settings,
            admission,
            self._answers,
            self._metrics,
            self._clock,
            JobAdmission(admission, int(settings.hbm_bytes), self._engine.geometry, self._clock),
        )
        self._device = DeviceThread(
            self._executor,
            self._engine.device.bind_thread,
            self._clock,
            settings.watchdog_s,
            on_death=lambda: self._stop_with(EXIT_FAILED),
        )
        self._handler = WorkerHandler(
            kafka.topic(Topic.PREINFER),
            kafka.topic(Topic.RANKING),
            kafka.partitions,
            kafka.topic(Topic.RESULTS),
            self._device,
            self._answers,
            self._dead_letters,
            self._metrics,
            self._clock,
            settings.max_clock_skew_ms,
            settings.reply_margin_ms,
            on_ownership=self._take_over,
            on_tick=self._tick,
        )
        self._loop = ConsumerLoop(
            lambda on_error: make_group_consumer(
                kafka, kafka.workers_group, client_id, instance_id=settings.worker_id, on_error=on_error
            ),
            [kafka.topic(Topic.PREINFER), kafka.topic(Topic.RANKING)],
            self._handler,
            self._clock,
            consumer,
            on_end=self._loop_ended,
        )
        self._status = StatusPublisher(
            self._producer,
            kafka.topic(Topic.WORKERS),
            WorkerFacts(
                worker_id=settings.worker_id,
                model_revision=self._engine.revision,
                geometry=self._engine.geometry,
                layout=self._engine.layout,
                max_prefix_behaviours=self._engine.limits.max_prefix_behaviours,
                hbm_capacity_bytes=int(settings.hbm_bytes),
                dram_capacity_bytes=int(settings.dram_bytes),
            ),
            self._clock,
        )
        self._probes = ProbeServer(settings.http_host, settings.http_port, self.readiness, self._health)

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Starts every thread, waits for the end, and stops them in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._warm_up_producer()
        settle()
        self._probes.start()
        self._device.start()
        self._follower.start()
        self._loop.start()
        self._state = WorkerState.READY
        self._say_hello()
        while not (self._end.wait(0.2) or self._signalled):
            if self._device.is_stuck():
                log.critical("the device makes no progress; exiting", watchdog_s=self._settings.watchdog_s)
                os._exit(EXIT_STUCK)
        self._stop()
        return self._exit_code

    def _warm_up_producer(self) -> None:
        """Its first message need not wait for metadata. Raises RelayError if the broker went away."""
        try:
            for topic in (Topic.RESULTS, Topic.DEAD_LETTERS, Topic.WORKERS):
                self._producer.list_topics(self._kafka.topic(topic), timeout=self._kafka.connect_timeout_s)
        except KafkaException as error:
            raise RelayError(f"Kafka at {self._kafka.bootstrap} does not answer any more: {error.args[0]}.") from error

    def _stop(self) -> None:
        log.info("stopping", worker_id=self._settings.worker_id, drain_s=self._settings.drain_s)
        self._state = WorkerState.STOPPING
        self._loop.stop(self._settings.drain_s)
        self._loop.join(self._settings.drain_s + 5)
        self._device.stop(2)
        if self._exit_code != EXIT_FENCED:
            # The id is another's by then, and so is its status.
            self._publish_status()
        self._answers.close(1)
        self._dead_letters.flush(1)
        self._follower.stop()
        self._follower_letters.flush(1)
        self._cache.close()
        self._store.close()
        self._probes.stop()
        log.info("stopped", worker_id=self._settings.worker_id, exit_code=self._exit_code)

    def _loop_ended(self, state: LoopState) -> None:
        if state is LoopState.FENCED:
            self._stop_with(EXIT_FENCED)
        elif state is LoopState.FAILED:
            log.error("the consumer loop failed", error=str(self._loop.error))
            self._stop_with(EXIT_FAILED)

    def _on_signal(self, *_: object) -> None:
        # No event: a signal handler may not take the lock that the main thread waits with.
        self._signalled = True

    def _stop_with(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._end.set()

    # -- memory ------------------------------------------------------------------------------------

    def _memory_plan(self, engine: Engine) -> MemoryPlan:
        geometry = engine.geometry
        scratch_tokens = engine.layout.tokens(engine.limits.max_prefix_behaviours)
        one_request = engine.limits.max_candidates + engine.limits.max_suffix_behaviours
        batch_rows = max(one_request, self._settings.max_batch_rows)
        return MemoryPlan(
            weights_bytes=engine.weights_bytes,
            hbm_bytes=int(self._settings.hbm_bytes),
            scratch_bytes=geometry.pages_for(scratch_tokens) * geometry.page_bytes
            + engine.scratch_bytes(min(scratch_tokens, self._settings.max_chunk_tokens), batch_rows),
            dram_bytes=int(self._settings.dram_bytes),
            queues_bytes=queues_bytes(self._settings),
            history_bytes=int(self._settings.history_max_bytes),
            process_bytes=process_bytes(engine.weights_bytes if engine.device.is_cpu else 0),
        )

    def _take_memory(self, engine: Engine) -> tuple[BuiltCache, NDArray[np.int32]]:
        """The cache over both tiers, and the scratch pages that follow the HBM tier in the same arena."""
        geometry = engine.geometry
        hbm_pages = int(self._settings.hbm_bytes) // geometry.page_bytes
        dram_pages = int(self._settings.dram_bytes) // geometry.page_bytes
        longest = geometry.pages_for(engine.layout.tokens(engine.limits.max_prefix_behaviours))
        if hbm_pages < longest:
            raise RelayError(
                f"worker.hbm_bytes holds {hbm_pages} pages of {geometry.page_bytes} bytes, but one prefix of the "
                f"model's longest history takes {longest}: give at least {longest * geometry.page_bytes} bytes."
            )
        built = build_cache(engine.device, geometry, engine.layout, hbm_pages, dram_pages, extra_hbm_pages=longest)
        engine.bind(built.hbm_arena)
        return built, np.arange(hbm_pages, hbm_pages + longest, dtype=np.int32)

    # -- the poll thread ---------------------------------------------------------------------------

    def _take_over(self, partitions: frozenset[int]) -> None:
        self._follower.follow(partitions)
        threading.Thread(target=self._demote_others, args=(partitions,), name="demote", daemon=True).start()
        self._status_at_us = 0
        log.info("owns partitions", worker_id=self._settings.worker_id, partitions=sorted(partitions))

    def _demote_others(self, partitions: frozenset[int]) -> None:
        """Off the poll thread: it looks at every user in the cache."""
        count = self._kafka.partitions
        self._cache.demote(lambda user_id: partition_for(user_id.encode(), count) not in partitions)

    def _tick(self, now_us: int) -> None:
        if now_us >= self._status_at_us:
            self._status_at_us = now_us + self._settings.status_interval_ms * 1000
            self._publish_status()
            self._metrics.outstanding.set(self._executor.ranking_outstanding)
            self._metrics.preinfer_queue_seconds.set(self._executor.preinfer_backlog_us / 1e6)
        self._bound_ranking()

    def _bound_ranking(self) -> None:
        """At either bound the ranking partitions pause, until half of it is answered."""
        outstanding = self._executor.ranking_outstanding
        filled = max(
            outstanding / self._settings.ranking_queue_max,
            self._executor.ranking_outstanding_bytes / self._settings.ranking_queue_bytes,
        )
        if not self._ranking_paused and filled >= 1:
            self._ranking_paused = True
            self._loop.pause(self._kafka.topic(Topic.RANKING), range(self._kafka.partitions))
            log.warning("ranking paused: too many requests outstanding", outstanding=outstanding)
        elif self._ranking_paused and filled <= 0.5:
            self._ranking_paused = False
            self._loop.resume(self._kafka.topic(Topic.RANKING), range(self._kafka.partitions))

    def _publish_status(self) -> None:
        loop, stats = self._loop.status(), self._cache.stats()
        page_bytes = self._engine.geometry.page_bytes
        self._status.publish(
            self._state,
            WorkerReading(
                partitions=loop.partitions,
                assignment_epoch=loop.assignment_epoch,
                hbm_free_bytes=(stats.hbm.free + stats.hbm.evictable) * page_bytes,
                dram_free_bytes=(stats.dram.free + stats.dram.evictable) * page_bytes,
                ranking_queue_p99_us=self._waits.p99_us(),
                preinfer_queue_us=self._executor.preinfer_backlog_us,
                latency=self._corrector.model.coefficients,
            ),
        )

    # -- what people see ---------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """Ready = assigned, history caught up, model warm, broker reachable."""
        loop = self._loop.status()
        loading = self._follower.loading
        return Readiness(
            (
                Check("assigned", loop.assigned, f"{len(loop.partitions)} partitions"),
                Check("history", not loading, f"{len(loading)} partitions still loading" if loading else ""),
                Check("broker", loop.broker_reachable),
                Check("consumer", not loop.stalled and loop.state is LoopState.RUNNING, loop.state.value),
                Check("running", self._state is WorkerState.READY, self._state.value),
            )
        )

    def _health(self) -> Readiness:
        polled_us = self._clock.monotonic_us() - self._loop.status().last_poll_us
        return Readiness(
            (
                Check("device", not self._device.is_stuck()),
                Check("poll thread", polled_us < 30_000_000, f"last poll {polled_us // 1000} ms ago"),
            )
        )

    def _say_hello(self) -> None:
        for kind, size_bytes in self._plan.by_kind().items():
            self._metrics.bytes_at_most.labels(kind).set(size_bytes)
        log.info(
            "worker started",
            worker_id=self._settings.worker_id,
            pid=os.getpid(),
            device=self._engine.device.name,
            model_revision=self._engine.revision,
            group=self._kafka.workers_group,
            metrics=f"http://{self._probes.host}:{self._probes.port}/metrics",
            bytes_at_most=self._plan.total_bytes,
            **{f"{kind}_bytes": size for kind, size in self._plan.by_kind().items()},
        )
