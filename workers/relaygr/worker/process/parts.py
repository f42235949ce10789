"""Puts a prepared worker's parts together: who calls whom, and on which thread.

    poll thread      loop -> handler -> answers, device (hands over), duties (between polls)
    device thread    device -> executor -> answers -> loop.finish (any thread may)
    follower         history topic -> store -> executor, through the device thread's mail

Nothing runs until `life` starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from relaygr.consumer import ConsumerLoop, LoopState, Membership
from relaygr.consumer.interface import holder_of
from relaygr.kafka.clients import make_group_consumer
from relaygr.runtime.clock import Clock
from relaygr.schemas.topics import Topic
from relaygr.worker.cache.arena import copy_page
from relaygr.worker.executor.admission import JobAdmission
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.thread import DeviceThread
from relaygr.worker.handler import WorkerHandler
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.process.housekeeping import Housekeeping, StatusReport
from relaygr.worker.process.memory import TakenMemory, trace_header
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.results import ResultWriter
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.status import QueueWaits

# It is asked by a process that just woke up beside busy others, and no answer lets it take the id back.
_HOLDER_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class _FollowedHistories:
    """The executor's view of the history store."""

    store: HistoryStore
    follower: HistoryFollower

    def get(self, user_id: str) -> StoredHistory | None:
        return self.store.get(user_id)

    def is_loading(self, partition: int) -> bool:
        return not self.follower.caught_up(partition)


class Parts:
    """The parts, wired. See the module for their threads."""

    def __init__(
        self,
        config: WorkerConfig,
        prepared: Prepared,
        memory: TakenMemory,
        lock: ArenaLock,
        clock: Clock,
        on_device_death: Callable[[], None],
        on_loop_end: Callable[[LoopState], None],
    ) -> None:
        kafka, settings = config.kafka, config.worker
        engine, built = prepared.engine, memory.built
        waits = QueueWaits()
        self.metrics = WorkerMetrics()
        self.cache = built.cache
        self.arena = built.hbm_arena
        self.cache.weigh_by(prepared.corrector.model.pre_us)
        self.recorder = memory.recorder
        if self.recorder is not None:
            self.recorder.start(trace_header(engine, self.cache.geometry, settings, prepared.corrector.model))
        self.follower = HistoryFollower(
            kafka,
            prepared.store,
            prepared.follower_letters,
            f"{config.client_id}-history",
            on_changed=lambda users: self.device.call(lambda: self.executor.histories_changed(users)),
            on_deleted=lambda user: self.device.call(lambda: self.executor.user_deleted(user)),
        )
        self.answers = ResultWriter(
            prepared.producer,
            settings.worker_id,
            settings.max_clock_skew_ms,
            finish=lambda token: self.loop.finish(token),
            metrics=self.metrics,
            waits=waits,
            clock=clock,
        )
        self.executor = Executor(
            engine,
            self.cache,
            memory.scratch_pages,
            _FollowedHistories(prepared.store, self.follower),
            partial(copy_page, built.hbm_arena),
            prepared.corrector,
            settings,
            config.admission,
            self.answers,
            self.metrics,
            clock,
            JobAdmission(config.admission, int(settings.hbm_bytes), engine.geometry, clock),
        )
        self.device = DeviceThread(
            self.executor, engine.device.bind_thread, clock, settings.watchdog_s, on_death=on_device_death
        )
        handler = WorkerHandler(
            kafka.topic(Topic.PREINFER),
            kafka.topic(Topic.RANKING),
            kafka.partitions,
            kafka.topic(Topic.RESULTS),
            self.device,
            self.answers,
            prepared.dead_letters,
            self.metrics,
            clock,
            settings.max_clock_skew_ms,
            settings.reply_margin_ms,
            on_ownership=lambda partitions: self.housekeeping.take_over(partitions),
            on_tick=lambda now_us: self.housekeeping.tick(now_us),
        )
        self.loop = ConsumerLoop(
            lambda on_error: make_group_consumer(
                kafka, kafka.workers_group, config.client_id, instance_id=settings.worker_id, on_error=on_error
            ),
            [kafka.topic(Topic.PREINFER), kafka.topic(Topic.RANKING)],
            handler,
            clock,
            config.consumer,
            on_end=on_loop_end,
            finished_log=prepared.handover.finished,
            membership=Membership(
                may_own=lock.is_held,
                holder=partial(holder_of, kafka, kafka.workers_group, settings.worker_id, _HOLDER_TIMEOUT_S),
            ),
        )
        self.report = StatusReport(config, prepared, self.cache, self.executor, self.loop, waits, clock)
        self.housekeeping = Housekeeping(
            config, self.loop, self.executor, self.cache, self.follower, self.report, self.metrics
        )
