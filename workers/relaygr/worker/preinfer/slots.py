"""The slots of a pre-infer worker: one thread for each job under way, in the place of a consumer loop.

    next job -> decide -> executor -> copy to DRAM -> write to the store -> the owner's partition -> accepted

A slot asks for a job only when it is free, so nothing queues here. It is taken until the store has the prefix and Kafka
has the message to the owner, which is the job itself with a header. An owner that gets a job looks into the pool
before it computes, so a job whose prefix could not be stored is passed on, too.

The poll thread takes delivery reports and does the periodic work, as that of every worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from prometheus_client import Counter

from relaygr.consumer.interface import LoopState, LoopStatus, Received, Token
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.message_headers import headers_of
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.headers import PREPARED_BY
from relaygr.schemas.messages import DEFAULT_SCENARIO, PreInferJob, PreInferSlots
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.cache import PrefixCache
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.results import SpillOutcome
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.resolver import HistoryReader
from relaygr.worker.executor.work import JobWork
from relaygr.worker.pool.tier import PoolTier
from relaygr.worker.preinfer.decision import MOST_TRIES, Slowness, Verdict, decide
from relaygr.worker.preinfer.source import JobSource
from relaygr.worker.settings import WorkerConfig

log = structlog.get_logger()

_POLL_S: Final = 0.2
_GIVEN_BACK_S: Final = 0.01
_TICK_S: Final = 0.005
_COPY_POLL_S: Final = 0.001
_DELIVERY_S: Final = 5.0
_FURTHEST_US: Final = 60_000_000
_UNASSIGNED_US: Final = 15_000_000
_UNASSIGNED: Final = (
    "Kafka gives this pre-infer worker no partition of its share group, so it gets no jobs: `relaygr topics check` "
    "names settings of the brokers that keep share groups from working"
)

_JOBS = Counter(
    "relaygr_preinfer_pool_jobs_total",
    "Jobs of a pre-infer worker: accepted, released (to another worker), passed_on (to the owner: no worker had time), "
    "rejected (none can end it in time); of the accepted, prepared (the store has the prefix, and the owner was "
    "told), unprepared (sent to the owner without)",
    ["event"],
)


@dataclass(frozen=True, slots=True)
class SlotParts:
    """The parts of the worker that the slots use."""

    executor: Executor
    cache: PrefixCache
    pool: PoolTier
    histories: HistoryReader
    producer: Producer
    dead_letters: DeadLetterWriter
    clock: Clock
    may_take: Callable[[], bool]
    """Whether the worker can compute and store now."""
    on_start: Callable[[frozenset[int]], None]
    """Gets all partitions, whose histories the worker follows."""
    on_tick: Callable[[int], None]
    on_end: Callable[[LoopState], None]


class SlotLoop:
    """A `relaygr.consumer.interface.Loop`. See the module."""

    def __init__(self, config: WorkerConfig, parts: SlotParts, make_source: Callable[[int], JobSource]) -> None:
        kafka = config.kafka
        self._parts = parts
        self._make_source = make_source
        self._slots = config.worker.pre_infer_slots
        self._partitions = kafka.partitions
        self._owner_topic = kafka.topic(kafka.jobs_topic)
        self._prepared_by = (PREPARED_BY, config.worker.worker_id.encode())
        self._scenarios = config.scenarios
        self._slowness = Slowness()
        self._stopping = threading.Event()
        self._waiting: dict[Token, threading.Event] = {}
        self._lock = threading.Lock()
        self._due_us: dict[int, int] = {}
        """Of the job in each busy slot."""
        self._reading: set[int] = set()
        """Slots whose source has jobs for them."""
        self._unassigned = set(range(self._slots))
        """Slots that Kafka has not given a partition of the share group."""
        self._accepted = self._refused = 0
        self._state = LoopState.NEW
        self._error: BaseException | None = None
        self._polled_us = parts.clock.monotonic_us()
        self._drain_until_us = 0
        self._thread = threading.Thread(target=self._run, name="poll-slots", daemon=True)
        self._threads = [
            threading.Thread(target=self._run_slot, args=(slot,), name=f"slot-{slot}", daemon=True)
            for slot in range(self._slots)
        ]

    # -- the loop --------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """A pre-infer worker has no standby."""

    def start(self) -> None:
        self._state = LoopState.RUNNING
        self._parts.on_start(frozenset(range(self._partitions)))
        for thread in (*self._threads, self._thread):
            thread.start()

    def stop(self, drain_s: float) -> None:
        self._drain_until_us = self._parts.clock.monotonic_us() + int(drain_s * 1e6)
        self._stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def finish(self, token: Token) -> None:
        """The executor has ended the job."""
        done = self._waiting.pop(token, None)
        if done is not None:
            done.set()

    def pause(self, topic: str, partitions: Iterable[int]) -> None:
        """A slot asks for one job at a time."""

    def resume(self, topic: str, partitions: Iterable[int]) -> None:
        """See `pause`."""

    def read_anew(self, topics: Collection[str]) -> None:
        """Kafka keeps the place of a group."""

    @property
    def error(self) -> BaseException | None:
        return self._error

    def status(self) -> LoopStatus:
        return LoopStatus(
            state=self._state, assigned=len(self._unassigned) < self._slots,
            partitions=frozenset(range(self._partitions)), assignment_epoch=1, last_poll_us=self._polled_us,
            broker_reachable=True, stalled=False, in_flight=len(self._due_us), paused=0, owner_split=frozenset(),
        )  # fmt: skip

    def report(self) -> PreInferSlots:
        """For the worker's status. A slot does not count while its job is late, as when the store hangs, nor while it
        gets no jobs; none counts while the worker takes no jobs.
        """
        now_us = self._parts.clock.monotonic_us()
        with self._lock:
            late = {slot for slot, due_us in self._due_us.items() if due_us < now_us}
            slots, free = len(self._reading - late), len(self._reading - self._due_us.keys())
        if not self._parts.may_take():
            slots = free = 0
        return PreInferSlots(slots, free, self._accepted, self._refused)

    def _run(self) -> None:
        parts = self._parts
        warn_us: int | None = parts.clock.monotonic_us() + _UNASSIGNED_US
        while any(thread.is_alive() for thread in self._threads):
            self._polled_us = parts.clock.monotonic_us()
            if warn_us is not None and not parts.may_take():
                # The slots do not ask Kafka meanwhile, so it gives them nothing.
                warn_us = self._polled_us + _UNASSIGNED_US
            elif warn_us is not None and self._polled_us >= warn_us:
                warn_us = None
                if len(self._unassigned) == self._slots:
                    log.warning(_UNASSIGNED)
            if self._stopping.is_set() and self._polled_us > self._drain_until_us:
                break
            parts.producer.poll(_TICK_S)
            parts.dead_letters.poll()
            parts.on_tick(self._polled_us)
        if self._state is LoopState.RUNNING:
            self._state = LoopState.STOPPED
        parts.on_end(self._state)

    # -- a slot ----------------------------------------------------------------------------------------

    def _run_slot(self, slot: int) -> None:
        try:
            source = self._make_source(slot)
            while not self._stopping.is_set():
                try:
                    self._turn(slot, source)
                except KafkaException as error:
                    log.warning("pre-infer jobs cannot be read", cause=error.args[0].str())
                    self._stopping.wait(_POLL_S)
            source.close()
        except BaseException as error:
            log.exception("a slot failed")
            self._state, self._error = LoopState.FAILED, error
            self._stopping.set()

    def _turn(self, slot: int, source: JobSource) -> None:
        if not self._parts.may_take():
            self._stopping.wait(_POLL_S)
            return
        message = source.next(_POLL_S)
        with self._lock:
            (self._reading.add if source.has_jobs else self._reading.discard)(slot)
            # Of an ordinary group some members have no partition.
            is_unassigned = source.can_release and not source.has_jobs
            (self._unassigned.add if is_unassigned else self._unassigned.discard)(slot)
        if message is None:
            return
        verdict = self._serve(message, slot, source.can_release)
        source.end(message, verdict)
        if verdict is Verdict.RELEASE:
            # A worker with a free slot takes it meanwhile.
            self._stopping.wait(_GIVEN_BACK_S)

    def _serve(self, message: Message, slot: int, can_release: bool) -> Verdict:
        try:
            job = decode(PreInferJob, message.value())
        except DecodeError as error:
            self._parts.dead_letters.write(message, error.reason.value, str(error))
            return Verdict.REJECT
        may_release = can_release and (message.delivery_count() or 1) < MOST_TRIES
        work, predicted_us, verdict = self._judge(job, message, slot, may_release)
        _JOBS.labels(verdict.value).inc()
        if verdict is Verdict.ACCEPT:
            return self._accept(work, message, slot, predicted_us)
        if verdict is not Verdict.RELEASE:
            with self._lock:
                self._refused += 1
        return self._tell_owner(message, is_prepared=False) if verdict is Verdict.PASS_ON else verdict

    def _judge(
        self, job: PreInferJob, message: Message, slot: int, may_release: bool
    ) -> tuple[JobWork, float, Verdict]:
        """The work of a job, its predicted device time with that of the jobs before it, and the verdict."""
        parts = self._parts
        work = self._work(job, message, slot)
        latency, wait_us = parts.executor.latency_of_prefixes, parts.executor.preinfer_backlog_us
        behaviours = job.history_length
        if behaviours is None:
            stored = parts.histories.get(job.user_id)
            behaviours = len(stored.history.behaviours) if stored is not None else 0
        engine, factor = parts.executor.engine, self._slowness.factor(work.received.received_us)
        behaviours = min(behaviours, engine.limits.max_prefix_behaviours)
        compute_us = latency.append_us(0, engine.layout.tokens(behaviours))
        needed_us = factor * compute_us + parts.pool.fetch_us(behaviours)
        now_us, due_us = work.received.received_us, work.expected_ranking_us
        verdict = decide(now_us, due_us, needed_us, factor * wait_us, may_release=may_release)
        return work, wait_us + compute_us, verdict

    def _work(self, job: PreInferJob, message: Message, slot: int) -> JobWork:
        topic, place, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None and place is not None and offset is not None
        now_us, now_wall_us = self._parts.clock.monotonic_us(), self._parts.clock.wall_us()
        received = Received(
            topic=topic,
            # The executor asks whether the histories of this partition are there.
            partition=partition_for(job.user_id.encode(), self._partitions),
            offset=offset, key=message.key(), value=message.value(), headers=headers_of(message), received_us=now_us,
            assignment_epoch=1, token=Token(topic, place, offset, slot), message=message,
        )  # fmt: skip
        due_us, expires_us = (
            now_us + min(wall_us - now_wall_us, _FURTHEST_US)
            for wall_us in (job.expected_ranking_at_us, job.expires_at_us)
        )
        return JobWork(job, received, due_us, expires_us)

    def _accept(self, work: JobWork, message: Message, slot: int, predicted_us: float) -> Verdict:
        with self._lock:
            self._accepted += 1
            self._due_us[slot] = work.expected_ranking_us
        try:
            is_prepared = self._prepare(work, slot)
            if is_prepared and work.is_charged:
                now_us = self._parts.clock.monotonic_us()
                self._slowness.observe(predicted_us, now_us - work.received.received_us, now_us)
            _JOBS.labels("prepared" if is_prepared else "unprepared").inc()
            return self._tell_owner(message, is_prepared)
        finally:
            with self._lock:
                del self._due_us[slot]

    def _prepare(self, work: JobWork, slot: int) -> bool:
        """Whether the store has the prefix now."""
        if (work.job.scenario or DEFAULT_SCENARIO) not in self._scenarios:
            return False
        done = self._waiting[work.received.token] = threading.Event()
        with self._lock:
            is_taken = self._parts.executor.take_job(work)
        if not is_taken:
            return False
        self._parts.executor.work_arrived.set()
        done.wait()
        is_stored = work.prepared is not None and self._store(work.prepared, slot)
        self._parts.cache.end_lease(work.job.user_id, work.job.request_id)
        return is_stored

    def _store(self, prefix: PrefixKey, slot: int) -> bool:
        copying = (SpillOutcome.STARTED, SpillOutcome.UNDER_WAY)
        while (outcome := self._parts.cache.transfers.spill(prefix)) in copying:
            time.sleep(_COPY_POLL_S)
        return outcome is SpillOutcome.ALREADY_THERE and self._parts.pool.store(prefix, slot)

    def _tell_owner(self, job: Message, is_prepared: bool) -> Verdict:
        """Sends the job to its owner. If Kafka does not take it, the job goes back."""
        reported, errors = threading.Event(), list[KafkaError | None]()

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            errors.append(error)
            reported.set()

        headers = [*(job.headers() or ()), *([self._prepared_by] if is_prepared else ())]
        try:
            self._parts.producer.produce(
                self._owner_topic, job.value(), job.key(), headers=headers, on_delivery=on_delivery
            )
        except BufferError:
            return Verdict.RELEASE
        was_sent = reported.wait(_DELIVERY_S) and errors[0] is None
        return Verdict.ACCEPT if was_sent else Verdict.RELEASE
