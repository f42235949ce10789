"""The components of a worker, connected to each other, and the probes that read them.

    poll thread      loop -> handler -> results and executor (`post`, short work), and periodic work between polls
    overflow poll    with `worker.divert`: the same for requests that other workers divert to this one
    fleet reader     with `worker.divert`: the statuses of the other workers -> peers
    device thread    device -> executor -> results -> loop.finish (any thread may call it)
    follower         history topic -> store -> executor, by `post`
    admin            operators' requests -> cache, and executor by `post`

The components do nothing until `lifecycle` starts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from confluent_kafka import Consumer

from relaygr.admission.divert import DivertPolicy, Peers
from relaygr.cluster.admin import has_share_groups
from relaygr.cluster.topic_identity import TopicIdentityWatch
from relaygr.cluster.watch import ClusterWatch
from relaygr.consumer.finished import FinishedLog
from relaygr.consumer.interface import Handler, Loop, LoopState, Membership, Token
from relaygr.consumer.loop import ConsumerLoop
from relaygr.consumer.membership import holder_of
from relaygr.kafka.client_errors import ErrorCallback
from relaygr.kafka.settings import GroupProtocol
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.readiness import Check, Readiness
from relaygr.schemas.messages import MAX_OVERFLOW_PARTITIONS, WorkerState
from relaygr.schemas.partitioner import partition_for, users_in
from relaygr.schemas.topics import Topic
from relaygr.tracing import Tracer
from relaygr.tracing.worker import WorkerTraces
from relaygr.trigger.fleet_reader import FleetReader
from relaygr.worker.admin_socket import SOCKET_NAME, AdminSocket
from relaygr.worker.cache.admin import CacheAdmin, ServingModel
from relaygr.worker.cache.arena import copy_page, zero_pages
from relaygr.worker.cache.build import BuiltCache
from relaygr.worker.cache.results import PageArray, Tier
from relaygr.worker.cache.stats import CacheCollector
from relaygr.worker.divert import Diverter, DivertParts
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.job_admission import JobAdmission, SlotAdmission
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.thread import DeviceThread
from relaygr.worker.handler import HandlerSettings, OverflowHandler, WorkerHandler
from relaygr.worker.history.files import DamagedError
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.history.snapshots import SnapshotLimits
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.metrics import LeadTimeCollector, PredictionCollector, WorkerMetrics
from relaygr.worker.pool.build import build_pool
from relaygr.worker.preinfer.slots import SlotLoop, SlotParts
from relaygr.worker.preinfer.source import GroupSource, JobSource, ShareSource
from relaygr.worker.process.allocation import AllocatedMemory
from relaygr.worker.process.periodic import PeriodicWork
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.process.status import StatusReport, StatusSources
from relaygr.worker.results import ResultWriter
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.shared.lock import ArenaLock

log = structlog.get_logger()

# Time-out for asking the broker which process has the id. It is long, since without an answer this process joins again,
# and it may ask right after a pause, on a busy machine.
_HOLDER_TIMEOUT_S = 3.0
_LONGEST_SILENCE_MS = 30_000
"""A poll thread that has not polled for this long counts as hung."""
_UNREADY_SILENCE_MS = 10_000
"""A worker whose poll thread has not polled for this long answers nothing."""
_STALE_STATUSES = 3
"""A worker without a status for this many status intervals counts as dead: no request is diverted to it."""
_POOL_CONNECT_S = 2.0
"""How long the first worker of an id waits for its pool, at most. To connect takes half a second to one second."""


@dataclass(frozen=True, slots=True)
class OnEnd:
    """Callbacks: the device thread died; the consumer loop ended in a state."""

    device_thread: Callable[[], None]
    loop: Callable[[LoopState], None]


@dataclass(frozen=True, slots=True)
class _FollowedHistories:
    """The history store, as the executor and the slots of a pre-infer worker read it."""

    store: HistoryStore
    follower: HistoryFollower
    partitions: int

    def get(self, user_id: str) -> StoredHistory | None:
        unopened = self.follower.unopened
        # The store may have a history of a user who was deleted while another worker had the partition.
        if unopened and self._partition_of(user_id) in unopened:
            return None
        try:
            return self.store.get(user_id)
        except DamagedError as damage:
            self._mend(damage)
            return None

    def is_loading(self, partition: int) -> bool:
        return not self.follower.caught_up(partition)

    def is_settling(self, partition: int) -> bool:
        return self.follower.is_settling(partition)

    def deleted_at_ms(self, user_id: str) -> int:
        try:
            return self.store.deleted_at_ms(user_id, self._partition_of(user_id))
        except DamagedError as damage:
            self._mend(damage)
            return 0

    def _mend(self, damage: DamagedError) -> None:
        """Raises the damage that the follower cannot mend."""
        if not self.follower.mend(damage):
            raise damage

    def _partition_of(self, user_id: str) -> int:
        return partition_for(user_id.encode(), self.partitions)


class Components:
    """All components of one worker. The module lists their threads."""

    def __init__(
        self,
        config: WorkerConfig,
        prepared: Prepared,
        memory: AllocatedMemory,
        lock: ArenaLock,
        clock: Clock,
        on_end: OnEnd,
        tracer: Tracer | None = None,
    ) -> None:
        kafka, settings = config.kafka, config.worker
        self._config = config
        self._clock = clock
        self._lock = lock
        self._on_end = on_end
        self._worker_id = settings.worker_id
        self._overflow_topic = kafka.topic(Topic.OVERFLOW)
        self._results_topic = kafka.topic(Topic.RESULTS)
        self._prepared = prepared
        self._session = session = prepared.session
        self.metrics = WorkerMetrics(scenarios=config.scenarios)
        self.cache = memory.built.cache
        self.arena = memory.built.hbm_arena
        dram = prepared.handover.dram
        self._pool = build_pool(
            settings.pool,
            prepared.engine,
            memory.built,
            dram.guard if dram is not None else None,
            prepared.corrector,
            clock,
            settings.history_path,
            self._owns,
            settings.pre_infer_slots if config.is_pre_infer else 0,
        )
        self.follower = self._make_follower()
        self.results = ResultWriter(
            prepared.producer,
            settings.worker_id,
            settings.max_clock_skew_ms,
            finish=self._finish if settings.divert else lambda token: self.loop.finish(token),
            metrics=self.metrics,
            clock=clock,
            traces=WorkerTraces(tracer) if tracer is not None else None,
        )
        histories = _FollowedHistories(prepared.store, self.follower, kafka.partitions)
        peers = Peers(settings.worker_id, _STALE_STATUSES * settings.status_interval_ms * 1000)
        self.diverter = self._make_diverter(peers, histories) if settings.divert else None
        self.executor = self._make_executor(memory, histories)
        self.device = DeviceThread(
            self.executor,
            prepared.engine.device.bind_thread,
            clock,
            settings.watchdog_s,
            on_death=on_end.device_thread,
            # An accelerator's streams belong to one thread.
            shares=prepared.engine.device.is_cpu,
        )
        self.loop: Loop = self._make_slots(histories) if config.is_pre_infer else self._make_loop()
        self.overflow: ConsumerLoop | None = None
        self._peer_reader: FleetReader | None = None
        if self.diverter is not None:
            self.overflow = self._make_overflow_loop(self.diverter)
            self._peer_reader = FleetReader(session, peers, clock, f"{config.client_id}-peers")
        sources = StatusSources(
            prepared.producer,
            self.loop,
            self.executor,
            self.cache,
            self.results.waits,
            self._overflow_partitions,
            self.loop.report if isinstance(self.loop, SlotLoop) else lambda: None,
        )
        self.status = StatusReport(config, sources, clock)
        self.periodic = PeriodicWork(config, sources, self.status, self.follower, prepared.store, self.metrics, clock)
        self.watch = ClusterWatch(
            f"{config.client_id}-results",
            prepared.producer.list_topics,
            [
                kafka.topic(topic)
                for topic in (*(() if config.is_pre_infer else kafka.worker_topics), Topic.HISTORY, Topic.BEHAVIOURS)
            ],
            kafka.partitions,
            clock,
            others=() if config.is_pre_infer else (self._results_topic,),
        )
        self._identities = TopicIdentityWatch(
            session, prepared.handover.identity, f"{config.client_id}-topics", self._read_anew
        )
        CacheCollector(self.cache.stats)
        PredictionCollector(prepared.corrector.quality, prepared.corrector.length_ratios)
        LeadTimeCollector(self.executor.lead_times)
        self._admin: AdminSocket | None = None
        self.has_hung_calls = False
        """After `close`: whether a thread is still in a call that can not be ended."""

    # Called by the constructor.

    def _make_follower(self) -> HistoryFollower:
        kafka, settings, prepared = self._config.kafka, self._config.worker, self._prepared
        return HistoryFollower(
            self._session,
            prepared.store,
            self._session.dead_letters,
            f"{self._config.client_id}-history",
            on_changed=lambda users: self.executor.post(lambda: self.executor.histories_changed(users)),
            on_deleted=lambda user: self.executor.post(lambda: self.executor.user_deleted(user)),
            on_deleting=self._forget_user,
            on_missed=lambda partitions: self.cache.invalidate_users(users_in(partitions, kafka.partitions)),
            on_read=lambda partitions: self.executor.post(lambda: self.executor.partitions_read(partitions)),
            erase_within_s=settings.erase_within_s,
            # Only owners save histories.
            snapshots=None
            if self._config.is_pre_infer
            else SnapshotLimits(
                settings.snapshot_behaviours,
                int(settings.snapshot_after_s * 1000),
                int(settings.snapshot_bytes_per_s),
            ),
            is_idle=lambda: self.executor.ranking_outstanding == 0,
        )

    def _forget_user(self, user_id: str) -> None:
        """A tombstone was read."""
        self.cache.invalidate_user(user_id)
        if self._pool is not None:
            self._pool.forget_user(user_id)

    def _owns(self, user_id: str) -> bool:
        """Whether the user's partition belongs to this worker now."""
        return users_in(self.loop.status().partitions, self._config.kafka.partitions)(user_id)

    def _make_diverter(self, peers: Peers, histories: _FollowedHistories) -> Diverter:
        settings = self._config.worker
        divert = DivertParts(
            topic=self._overflow_topic,
            policy=DivertPolicy(peers, settings.divert_share),
            producer=self._prepared.producer,
            results=self.results,
            histories=histories,
            metrics=self.metrics,
            clock=self._clock,
            engine=lambda: self.executor.engine,
            backlog=lambda: self.executor.backlog,
        )
        return Diverter(settings, divert)

    def _make_executor(self, memory: AllocatedMemory, histories: _FollowedHistories) -> Executor:
        config, settings = self._config, self._config.worker
        engine, built = self._prepared.engine, memory.built
        return Executor(
            engine,
            ExecutorParts(
                cache=self.cache,
                scratch_pages=memory.scratch_pages,
                copy_page=partial(copy_page, built.hbm_arena),
                zero_pages=partial(_zero_pages, built, self._lock),
                histories=histories,
                corrector=self._prepared.corrector,
                settings=settings,
                admission_settings=config.admission,
                admission=(SlotAdmission if config.is_pre_infer else JobAdmission)(
                    config.admission, int(settings.hbm_bytes), engine.geometry, self._clock, config.scenarios
                ),
                device_record=self._prepared.handover.device_record,
                results=self.results,
                metrics=self.metrics,
                clock=self._clock,
                diverter=self.diverter,
                pool=self._pool,
            ),
        )

    @property
    def _handling(self) -> HandlerSettings:
        kafka, settings = self._config.kafka, self._config.worker
        return HandlerSettings(
            ranking_topic=kafka.topic(Topic.RANKING),
            results_topic=self._results_topic,
            has_one_topic=kafka.jobs_topic is Topic.RANKING,
            partitions=kafka.partitions,
            max_clock_skew_ms=settings.max_clock_skew_ms,
            reply_margin_ms=settings.reply_margin_ms,
            grace_ms=settings.grace_ms,
            max_deadline_ms=settings.max_deadline_ms,
            scenarios=self._config.scenarios,
        )

    def _make_slots(self, histories: _FollowedHistories) -> SlotLoop:
        kafka, prepared, pool = self._config.kafka, self._prepared, self._pool
        rules = prepared.engine.rules
        if pool is None or not (rules.grows and rules.is_reusable):
            raise RelayError(
                "This model's prefixes can not be shared, so there is nothing for a pre-infer worker to do: "
                "leave `pre_infer` of its scenarios at owner"
            )
        shares = has_share_groups(kafka)
        if not shares:
            log.warning(
                "this cluster has no share groups: jobs wait for a worker in an ordinary group, and those that it has "
                "no time for go to their owners",
                group=kafka.pool_group,
            )

        def source(slot: int) -> JobSource:
            return (ShareSource if shares else GroupSource)(self._session, f"{self._config.client_id}-pool-{slot}")

        parts = SlotParts(
            executor=self.executor,
            cache=self.cache,
            pool=pool,
            histories=histories,
            producer=prepared.producer,
            dead_letters=self._session.dead_letters,
            clock=self._clock,
            may_take=lambda: not (pool.is_away or self.follower.loading or self.device.is_stuck()),
            on_start=lambda partitions: self.periodic.take_over(partitions),
            on_tick=lambda now_us: self.periodic.tick(now_us),
            on_end=self._on_end.loop,
        )
        return SlotLoop(self._config, parts, source)

    def _make_loop(self) -> ConsumerLoop:
        handler = WorkerHandler(
            self._handling,
            self.executor,
            self.results,
            self._session.dead_letters,
            self._clock,
            on_work=self.device.run_short_work,
            on_ownership=lambda partitions: self.periodic.take_over(partitions),
            on_tick=lambda now_us: self.periodic.tick(now_us),
            results_partitions=self._results_partitions,
            diverter=self.diverter,
        )
        kafka, finished = self._config.kafka, self._prepared.handover.finished
        return self._loop_of(kafka.workers_group, kafka.worker_topics, handler, finished_log=finished)

    def _results_partitions(self) -> int | None:
        return self.watch.partitions_of(self._results_topic)

    def _make_overflow_loop(self, diverter: Diverter) -> ConsumerLoop:
        handler = OverflowHandler(
            self._handling,
            self.executor,
            self.results,
            self._session.dead_letters,
            self._clock,
            self.metrics,
            on_refused=diverter.note_short,
            on_user_partition=lambda partition: self.periodic.diverted_from.add(partition),
            results_partitions=self._results_partitions,
        )
        return self._loop_of(self._config.kafka.overflow_group, (Topic.OVERFLOW,), handler, name="overflow")

    def _loop_of(
        self,
        group: str,
        topics: Sequence[Topic],
        handler: Handler,
        name: str = "workers",
        finished_log: FinishedLog | None = None,
    ) -> ConsumerLoop:
        """The loop of a static member of `group`."""
        config, kafka = self._config, self._config.kafka
        # Metrics tell Kafka clients apart by their id.
        client_id = config.client_id if group == kafka.workers_group else f"{config.client_id}-{name}"

        def consumer(on_error: ErrorCallback) -> Consumer:
            return self._session.group_consumer(group, client_id, kafka.topic(topics[-1]), self._worker_id, on_error)

        return ConsumerLoop(
            consumer,
            [kafka.topic(topic) for topic in topics],
            handler,
            self._clock,
            config.consumer,
            name,
            on_end=self._on_end.loop,
            finished_log=finished_log,
            is_incremental=kafka.group_protocol is GroupProtocol.CONSUMER
            or (kafka.affinity.is_incremental and group == kafka.workers_group),
            membership=Membership(
                may_own=self._lock.is_held,
                holder=partial(holder_of, kafka, group, self._worker_id, _HOLDER_TIMEOUT_S),
            ),
        )

    # Called by the main thread.

    def open_admin_socket(self, folder: Path) -> None:
        """Lets operators look at the cache. The caller holds the folder's lock, and the cache is restored."""
        executor = self.executor
        admin = CacheAdmin(
            self._worker_id,
            self.cache,
            lambda: ServingModel(executor.engine.revision, executor.engine.namespace),
            self._clock,
        )
        self._admin = AdminSocket(folder / SOCKET_NAME, admin.answer)
        try:
            self._admin.start()
        except OSError as error:
            # The worker serves without the socket, even after a take-over on a full file system.
            log.error("the admin socket cannot be opened: `relaygr cache` does not reach this worker", error=str(error))

    def close_admin_socket(self) -> None:
        """The socket is gone before the lock is: the next holder makes its own."""
        if self._admin is not None:
            self._admin.close()

    def _finish(self, token: Token) -> None:
        """Finishes an offset of either loop."""
        if self.overflow is not None and token.topic == self._overflow_topic:
            self.overflow.finish(token)
        else:
            self.loop.finish(token)

    def _overflow_partitions(self) -> tuple[int, ...] | None:
        """The overflow partitions on which this worker takes diverted requests now."""
        if self.overflow is None or self.diverter is None:
            return None
        if not self.diverter.takes_diverted():
            return ()
        return tuple(sorted(self.overflow.status().partitions)[:MAX_OVERFLOW_PARTITIONS])

    @property
    def loops(self) -> tuple[Loop, ...]:
        """That of the worker's own partitions, and that of diverted requests."""
        return (self.loop,) if self.overflow is None else (self.loop, self.overflow)

    def _read_anew(self, topics: frozenset[str]) -> None:
        self.follower.read_anew(topics)
        for loop in self.loops:
            loop.read_anew(topics)

    def start_loops(self) -> None:
        """Joins the groups."""
        # Requests come as soon as this worker has partitions. A worker without a predecessor has none until it joins,
        # so nobody waits meanwhile. With a predecessor its partitions are without an owner.
        if self._pool is not None and self._lock.arena_epoch == 1:
            self._pool.await_connection(_POOL_CONNECT_S)
        self.loop.start()
        if self.overflow is not None and self._peer_reader is not None:
            self.overflow.start()
            self._peer_reader.start()

    def start_device_and_follower(self) -> None:
        """Both threads wait until the worker owns partitions."""
        self.watch.start()
        self._identities.start()
        self.device.start()
        self.follower.start()
        if self._pool is not None:
            self._pool.start()

    def flush(self) -> None:
        """After the loop has drained: ends the device thread, and sends the last status, results and dead letters."""
        self.close_admin_socket()
        self.device.stop(2)
        self.status.publish()
        self.results.close(1)
        self._session.dead_letters.flush(1)
        self.follower.stop()
        self._session.dead_letters.flush(1)

    def close(self) -> None:
        """Ends every thread but the loop's, and the cache. Safe after `flush`."""
        self.close_admin_socket()
        self.watch.stop()
        self._identities.stop()
        if self._peer_reader is not None:
            self._peer_reader.stop()
        self.periodic.warm_up.stop()
        self.device.stop(2)
        self.follower.stop()
        self.has_hung_calls = self._pool is not None and not self._pool.close()
        self.cache.close()

    def readiness(self) -> Readiness:
        """For `/readyz`: partitions assigned, histories caught up, broker and topics as they must be, worker ready."""
        loop = self.loop.status()
        loading, fault = self.follower.loading, self.follower.fault
        silent_ms, _ = self.silence_ms()
        state = self.status.state
        diverged = self.results.finite_scores.is_diverged
        refusal = self._session.refusal
        # A pre-infer worker counts all partitions, also while its group gives it no jobs.
        owned = f"{len(loop.partitions)} partitions" if loop.assigned else "Kafka has given it none of its group"
        return Readiness(
            (
                Check("assigned", loop.assigned, owned),
                *(
                    [Check("pool", not self._pool.is_away)]
                    if self._pool is not None and self._config.is_pre_infer
                    else []
                ),
                Check("history", not loading, fault or (f"{len(loading)} partitions still loading" if loading else "")),
                Check("broker", loop.broker_reachable),
                Check("consumer", not loop.stalled and loop.state is LoopState.RUNNING, loop.state.value),
                *([Check("overflow", self.overflow.status().assigned)] if self.overflow is not None else []),
                Check("poll thread", silent_ms < _UNREADY_SILENCE_MS, f"last poll {silent_ms} ms ago"),
                Check("running", state is WorkerState.READY, state.value),
                Check("scores", not diverged, "not finite numbers: deploy another model" if diverged else ""),
                Check("rights", refusal is None, refusal or ""),
                *self.watch.checks(),
            )
        )

    def health(self) -> Readiness:
        """For `/healthz`: the device thread and the poll thread make progress."""
        silent_ms, _ = self.silence_ms()
        return Readiness(
            (
                Check("device", not self.device.is_stuck()),
                Check("poll thread", silent_ms < _LONGEST_SILENCE_MS, f"last poll {silent_ms} ms ago"),
            )
        )

    def silence_ms(self) -> tuple[int, int]:
        """Time since the poll threads polled, and since the device thread made progress."""
        polled_us = min(loop.status().last_poll_us for loop in self.loops)
        return (self._clock.monotonic_us() - polled_us) // 1000, self.device.silent_us // 1000


def _zero_pages(built: BuiltCache, lock: ArenaLock, tier: Tier, pages: PageArray) -> None:
    """Zeroes pages of a tier. Without the lock the DRAM tier may be another process's."""
    arena = built.hbm_arena if tier is Tier.HBM else built.dram_arena
    if arena is not None and (tier is Tier.HBM or lock.is_held()):
        zero_pages(arena, pages)
