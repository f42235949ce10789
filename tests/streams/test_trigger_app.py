"""The trigger on a broker: events in, jobs, dead letters and counts out."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import structlog
from confluent_kafka import OFFSET_END, Consumer, Message, Producer, TopicPartition
from prometheus_client import CollectorRegistry

from relaygr.admission.settings import AdmissionSettings
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import (
    PARTITIONER,
    ProducerKind,
    make_admin,
    make_assigned_consumer,
    make_group_consumer,
    make_producer,
)
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.runtime.clock import ManualClock, SystemClock
from relaygr.schemas import HistoryVersion, LatencyCoefficients, PreInferJob, RetrievalEvent, WorkerState, WorkerStatus
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.headers import DEAD_LETTER_REASON, is_job
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.trigger import faust_stream, handler
from relaygr.trigger.app import TriggerApp
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler
from relaygr.trigger.settings import TriggerSettings
from tests.bad_header import send_bad_header

pytestmark = pytest.mark.slow

WITHIN_S = 15.0


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    return any_broker


def event(user: str, length: int, budget_ms: int = 20) -> RetrievalEvent:
    now_us = SystemClock().wall_us()
    return RetrievalEvent(
        request_id=f"gateway.{uuid.uuid4().hex[:8]}.1",
        user_id=user,
        retrieval_at_us=now_us,
        expected_ranking_at_us=now_us + 30_000_000,
        ranking_budget_ms=budget_ms,
        expected_candidates=100,
        expected_suffix=10,
        history_version=HistoryVersion(1, length, b"\x01" * 16),
    )


def worker_status(kafka: KafkaSettings, written_at_us: int) -> WorkerStatus:
    return WorkerStatus(
        worker_id="worker-00",
        state=WorkerState.READY,
        written_at_us=written_at_us,
        assignment_epoch=1,
        partitions=tuple(range(kafka.partitions)),
        model_revision="abc",
        kv_bytes_per_token=1024,
        contextual_tokens=0,
        tokens_per_behaviour=1,
        max_prefix_behaviours=8192,
        hbm_capacity_bytes=2**30,
        hbm_free_bytes=2**30,
        dram_capacity_bytes=0,
        dram_free_bytes=0,
        ranking_queue_p99_us=0,
        preinfer_queue_us=0,
        # 10 µs a token: a history of 2,000 tokens takes the whole budget of 20 ms.
        latency=LatencyCoefficients(0, 10, 0, 0, 10, 0, 0, 10, 0, 0, 0),
    )


class Bench:
    """Writes events, and reads what comes out."""

    def __init__(self, kafka: KafkaSettings, app: TriggerApp) -> None:
        self.kafka = kafka
        self.app = app
        self._producer = make_producer(kafka, ProducerKind.DURABLE, "test-writer")

    def write(self, topic: Topic, key: bytes | None, value: bytes | None, partition: int | None = None) -> None:
        self.produce(topic, key, value, partition)
        self.flush()

    def produce(self, topic: Topic, key: bytes | None, value: bytes | None, partition: int | None = None) -> None:
        place = {} if partition is None else {"partition": partition}
        self._producer.produce(self.kafka.topic(topic), value, key, **place)  # type: ignore[arg-type]

    def flush(self) -> None:
        assert self._producer.flush(10) == 0

    def send(self, message: RetrievalEvent) -> None:
        self.write(Topic.RETRIEVAL, message.user_id.encode(), encode(message))

    async def decided(self, count: int) -> dict[str, int]:
        """The counts by reason once `count` events are decided."""
        await wait_for(lambda: sum(self.app.decision_counts().values()) >= count)
        return self.app.decision_counts()

    async def read(self, topic: Topic, count: int) -> list[Message]:
        return await asyncio.to_thread(self._read, topic, count)

    def _read(self, topic: Topic, count: int) -> list[Message]:
        consumer: Consumer = make_assigned_consumer(self.kafka, "test-reader")
        partitions = consumer.list_topics(self.kafka.topic(topic), timeout=5).topics[self.kafka.topic(topic)].partitions
        consumer.assign([TopicPartition(self.kafka.topic(topic), partition, 0) for partition in partitions])
        found: list[Message] = []
        end_s = time.monotonic() + WITHIN_S
        with contextlib.closing(consumer):
            while len(found) < count and time.monotonic() < end_s:
                message = consumer.poll(0.1)
                if message is not None and message.error() is None:
                    found.append(message)
        assert len(found) == count
        return found


async def wait_for(condition: object) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(kafka: KafkaSettings, settings: TriggerSettings | None = None) -> AsyncIterator[Bench]:
    app = TriggerApp(KafkaSession(kafka, "trigger-00"), settings or TriggerSettings(), registry=CollectorRegistry())
    stop = asyncio.Event()
    task = asyncio.create_task(app.run(stop))
    try:
        await wait_for(lambda: task.done() or app.readiness().ready)
        yield Bench(kafka, app)
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await task


@pytest.mark.asyncio
async def test_a_long_history_becomes_a_job_keyed_by_its_user_on_the_users_partition(
    kafka_settings: KafkaSettings,
) -> None:
    async with running(kafka_settings) as bench:
        short, long = event("user-short", 10), event("user-long", 4000)
        bench.send(short)
        bench.send(long)
        counts = await bench.decided(2)
        (message,) = await bench.read(Topic.PREINFER, 1)
    assert counts == {"below_threshold": 1, "no_status_threshold": 1}
    assert message.key() == b"user-long"
    assert message.partition() == partition_for(b"user-long", kafka_settings.partitions)
    assert decode(PreInferJob, message.value()).request_id == long.request_id


@pytest.mark.asyncio
async def test_with_one_topic_jobs_are_on_the_ranking_topic_with_a_header_and_known_after_a_restart(
    kafka_settings: KafkaSettings,
) -> None:
    kafka = kafka_settings.model_copy(update={"affinity": Affinity.ONE_TOPIC})
    settings, sent = TriggerSettings(status_stale_ms=100_000), event("user-1", 4000)
    async with running(kafka, settings) as bench:
        bench.write(Topic.WORKERS, b"worker-00", encode(worker_status(kafka, SystemClock().wall_us())))
        await wait_for(lambda: bench.app.fleet.owner_of(0, SystemClock().wall_us()) is not None)
        bench.write(Topic.RANKING, b"user-1", b"a ranking request")
        bench.send(sent)
        request, job = sorted(await bench.read(Topic.RANKING, 2), key=lambda message: message.offset() or 0)
    assert not is_job(headers_of(request)) and is_job(headers_of(job))
    assert decode(PreInferJob, job.value()).request_id == sent.request_id
    assert job.partition() == request.partition() == partition_for(b"user-1", kafka.partitions)
    async with running(kafka, settings) as bench:
        await wait_for(lambda: bench.app.tail.is_idle)
        bench.send(sent)
        assert await bench.decided(1) == {"repeated": 1}


@pytest.mark.asyncio
async def test_the_owners_latency_model_decides_while_its_status_is_fresh(kafka_settings: KafkaSettings) -> None:
    async with running(kafka_settings, TriggerSettings(status_stale_ms=100_000)) as bench:
        status = worker_status(kafka_settings, SystemClock().wall_us())
        bench.write(Topic.WORKERS, b"worker-00", encode(status))
        await wait_for(lambda: bench.app.fleet.owner_of(0, SystemClock().wall_us()) is not None)
        # 1,500 behaviours are over the threshold of length, but 16 ms are within the budget.
        bench.send(event("user-1", 1500))
        bench.send(event("user-2", 2500))
        assert await bench.decided(2) == {"not_at_risk": 1, "admitted": 1}

        stale = replace(status, written_at_us=status.written_at_us - 200_000_000)
        bench.write(Topic.WORKERS, b"worker-00", encode(stale))
        await wait_for(lambda: bench.app.fleet.owner_of(0, SystemClock().wall_us()) is None)
        bench.send(event("user-1", 1500))
        assert await bench.decided(3) == {"not_at_risk": 1, "admitted": 1, "no_status_threshold": 1}


@pytest.mark.asyncio
async def test_garbage_goes_to_dead_letters_and_the_loop_goes_on(kafka_settings: KafkaSettings) -> None:
    with structlog.testing.capture_logs() as logs:
        await garbage_then_an_event(kafka_settings)
    said = [each for each in logs if each["event"] == "an event goes to the dead letters"]
    assert sorted(each["reason"] for each in said) == ["misrouted", "undecodable"], "equal events are logged once"


async def garbage_then_an_event(kafka_settings: KafkaSettings) -> None:
    async with running(kafka_settings) as bench:
        bench.write(Topic.RETRIEVAL, b"user-1", b"garbage")
        bench.write(Topic.RETRIEVAL, b"somebody-else", encode(event("user-1", 4000)))
        right = partition_for(b"user-1", kafka_settings.partitions)
        bench.write(Topic.RETRIEVAL, b"user-1", encode(event("user-1", 4000)), partition=(right + 1) % 12)
        bench.send(event("user-1", 4000))
        counts = await bench.decided(4)
        letters = await bench.read(Topic.DEAD_LETTERS, 3)
        await bench.read(Topic.PREINFER, 1)
    assert counts == {"undecodable": 1, "misrouted": 2, "no_status_threshold": 1}
    reasons = sorted(dict(letter.headers() or [])[DEAD_LETTER_REASON] for letter in letters)
    assert reasons == [b"misrouted", b"misrouted", b"undecodable"]
    assert b"garbage" in [letter.value() for letter in letters]


@pytest.mark.asyncio
async def test_a_decision_that_failed_holds_back_no_later_event(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: PreInferJob) -> bytes:
        raise RuntimeError("a bug")

    sent = event("user-1", 4000)
    async with running(kafka_settings) as bench:
        with monkeypatch.context() as bug:
            bug.setattr(handler, "encode", fails)
            bench.send(sent)
            assert await bench.decided(1) == {"error": 1}
        bench.send(sent)
        assert await bench.decided(2) == {"error": 1, "no_status_threshold": 1}


@pytest.mark.asyncio
async def test_a_record_with_a_header_that_has_no_readable_name_is_decided_like_any_other(
    kafka_settings: KafkaSettings,
) -> None:
    """aiokafka, which read the events before, could not read such a record."""
    async with running(kafka_settings) as bench:
        topic = kafka_settings.topic(Topic.RETRIEVAL)
        await send_bad_header(kafka_settings, topic, 0, b"first")
        bench.write(Topic.RETRIEVAL, b"u", b"second", partition=0)
        assert await bench.decided(2) == {"undecodable": 2}
        letters = await bench.read(Topic.DEAD_LETTERS, 2)
        assert sorted(letter.value() for letter in letters) == [b"first", b"second"]


@pytest.mark.asyncio
async def test_every_event_is_counted_once_though_nothing_is_sent_while_disabled(kafka_settings: KafkaSettings) -> None:
    async with running(kafka_settings, TriggerSettings(enabled=False)) as bench:
        for number in range(50):
            bench.send(event(f"user-{number}", 4000))
        assert await bench.decided(50) == {"disabled": 50}


# The embedded cluster waits for about a session also after a member has left.
@pytest.mark.kafka
@pytest.mark.usefixtures("real_broker")
@pytest.mark.asyncio
async def test_a_stopped_trigger_leaves_its_group_so_that_the_next_one_starts_at_once(
    kafka_settings: KafkaSettings,
) -> None:
    # A member that did not leave would keep the partitions for longer than this test waits.
    kafka = kafka_settings.model_copy(update={"session_timeout_ms": round(4000 * WITHIN_S)})
    async with running(kafka) as bench:
        bench.send(event("user-1", 4000))
        await bench.decided(1)
    async with running(kafka) as bench:
        bench.send(event("user-2", 4000))
        assert sum((await bench.decided(1)).values()) == 1, "events that the first trigger committed are not read again"


@pytest.mark.asyncio
async def test_a_first_trigger_reads_no_events_from_before_its_start_and_the_next_one_all_that_came_meanwhile(
    kafka_settings: KafkaSettings,
) -> None:
    app = TriggerApp(KafkaSession(kafka_settings, "trigger-00"), TriggerSettings(), registry=CollectorRegistry())
    bench = Bench(kafka_settings, app)
    bench.send(event("user-early", 4000))
    async with running(kafka_settings) as bench:
        bench.send(event("user-1", 4000))
        await bench.decided(1)
    bench.send(event("user-2", 4000))
    bench.send(event("user-3", 4000))
    async with running(kafka_settings) as bench:
        assert sum((await bench.decided(2)).values()) == 2
        jobs = await bench.read(Topic.PREINFER, 3)
    assert sorted(job.key() for job in jobs) == [b"user-1", b"user-2", b"user-3"]


def unread(kafka: KafkaSettings) -> int:
    """The offsets between the trigger's commits and the ends of its logs; -1 if a commit is beyond the end."""
    consumer = make_group_consumer(kafka, kafka.trigger_group, "test-offsets")
    name = kafka.topic(Topic.RETRIEVAL)
    committed = consumer.committed([TopicPartition(name, part) for part in range(kafka.partitions)], timeout=10)
    ends = [consumer.get_watermark_offsets(place, timeout=10)[1] for place in committed]
    consumer.close()
    lags = [end - max(0, place.offset) for place, end in zip(committed, ends, strict=True)]
    return sum(lags) if min(lags) >= 0 else -1


@pytest.mark.kafka
@pytest.mark.usefixtures("real_broker")
@pytest.mark.asyncio
async def test_events_in_transactions_are_decided_and_leave_nothing_unread(kafka_settings: KafkaSettings) -> None:
    config = {"bootstrap.servers": kafka_settings.bootstrap, "transactional.id": kafka_settings.topic_prefix}
    producer = Producer({**config, "partitioner": PARTITIONER})
    producer.init_transactions(10)
    async with running(kafka_settings) as bench:
        for number in range(5):
            producer.begin_transaction()
            sent = event(f"user-{number}", 4000)
            producer.produce(kafka_settings.topic(Topic.RETRIEVAL), encode(sent), sent.user_id.encode())
            producer.commit_transaction(10)
        await bench.decided(5)
        await wait_for(lambda: unread(kafka_settings) == 0)


@pytest.mark.kafka
@pytest.mark.usefixtures("real_broker")
@pytest.mark.asyncio
async def test_a_trigger_whose_unread_events_were_deleted_reads_every_event_from_its_start_on(
    kafka_settings: KafkaSettings,
) -> None:
    async with running(kafka_settings) as bench:
        bench.send(event("user-0", 4000))
        await bench.decided(1)
    for _ in range(20):
        bench.produce(Topic.RETRIEVAL, b"old", encode(event("old", 4000)))
    bench.flush()
    name, admin = kafka_settings.topic(Topic.RETRIEVAL), make_admin(kafka_settings, "test-admin")
    places = [TopicPartition(name, part, OFFSET_END) for part in range(kafka_settings.partitions)]
    for deleted in admin.delete_records(places).values():
        deleted.result(10)
    async with running(kafka_settings) as bench:
        bench.send(event("old", 4000))
        assert await bench.decided(1) == {"no_status_threshold": 1}
        await wait_for(lambda: unread(kafka_settings) == 0)


@pytest.mark.asyncio
async def test_two_triggers_share_the_partitions_and_every_event_is_decided_once(kafka_settings: KafkaSettings) -> None:
    async with running(kafka_settings) as one:
        async with running(kafka_settings) as two:
            await wait_for(lambda: len(one.app.partitions) == 6 and one.app.readiness().ready)
            assert sorted(one.app.partitions | two.app.partitions) == list(range(12))
            for number in range(40):
                one.send(event(f"user-{number}", 4000))
            await one.read(Topic.PREINFER, 40)
            await wait_for(lambda: sum((sum(each.app.decision_counts().values())) for each in (one, two)) >= 40)
            assert min(sum(each.app.decision_counts().values()) for each in (one, two)) > 0
        await wait_for(lambda: len(one.app.partitions) == 12 and one.app.readiness().ready)
        one.send(event("user-last", 4000))
        await one.read(Topic.PREINFER, 41)


@pytest.mark.asyncio
async def test_a_trigger_that_is_stopped_has_decided_every_event_whose_offset_it_commits(
    kafka_settings: KafkaSettings,
) -> None:
    async with running(kafka_settings) as bench:
        for number in range(30):
            bench.send(event(f"user-{number}", 4000))
        first = sum((await bench.decided(1)).values())
    decided = sum(bench.app.decision_counts().values())
    assert decided >= first
    async with running(kafka_settings) as after:
        if decided < 30:
            await after.decided(30 - decided)
        jobs = await after.read(Topic.PREINFER, 30)
    assert len({job.key() for job in jobs}) == 30


@pytest.mark.asyncio
async def test_a_trigger_that_starts_again_knows_the_jobs_of_the_one_before(kafka_settings: KafkaSettings) -> None:
    settings = TriggerSettings(status_stale_ms=100_000)
    sent = event("user-1", 4000)
    async with running(kafka_settings, settings) as bench:
        status = worker_status(kafka_settings, SystemClock().wall_us())
        bench.write(Topic.WORKERS, b"worker-00", encode(status))
        await wait_for(lambda: bench.app.fleet.owner_of(0, SystemClock().wall_us()) is not None)
        bench.send(sent)
        assert await bench.decided(1) == {"admitted": 1}
        await bench.read(Topic.PREINFER, 1)
    async with running(kafka_settings, settings) as bench:
        await wait_for(lambda: bench.app.tail.is_idle)
        bench.send(sent)
        bench.send(replace(sent, request_id="gateway.1.2"))
        bench.send(event("user-2", 4000))
        assert await bench.decided(3) == {"repeated": 1, "under_way": 1, "admitted": 1}


START_US = SystemClock().wall_us()
INTERVAL_US = 2_000
WAVE_EVENTS = 120
LEAST_WAVES, MOST_WAVES = 30, 3_000


class EventClock(SystemClock):
    """Wall time that advances with the events that the processes have decided.

    So what they may admit does not depend on the speed of this machine, or on how long a rebalance takes. Repeats are
    left out: after a lost session a process may get thousands of events again, for which it admits nothing.
    """

    def __init__(self) -> None:
        self.apps: list[TriggerApp] = []

    @property
    def decided(self) -> int:
        counts = [app.decision_counts() for app in self.apps]
        return sum(sum(each.values()) - each.get("repeated", 0) for each in counts)

    def wall_us(self) -> int:
        return START_US + INTERVAL_US * self.decided


def budget_event(number: int) -> RetrievalEvent:
    """A pre-infer of 25 ms: the events ask for twelve times the device."""
    return replace(event(f"user-{number}", 2500), expected_ranking_at_us=START_US + 1_000_000_000)


def admitted_by_one(settings: TriggerSettings, status: WorkerStatus, partitions: int, events: int) -> int:
    """The jobs of one process without a broker."""
    clock = ManualClock(wall_us=START_US)
    fleet = Fleet(settings.status_stale_ms)
    fleet.apply(status.worker_id, status, START_US)
    alone = EventHandler(settings, AdmissionSettings(), fleet, partitions, clock)
    alone.reassign(frozenset(range(partitions)))
    admitted = 0
    for number in range(events):
        sent = budget_event(number)
        partition = partition_for(sent.user_id.encode(), partitions)
        admitted += alone.decide_event(sent, partition, clock.wall_us()).admit
        clock.advance_us(INTERVAL_US)
    return admitted


class Group:
    """Trigger processes of one group, which join and leave, and events in waves."""

    def __init__(self, kafka: KafkaSettings, settings: TriggerSettings, stack: contextlib.AsyncExitStack) -> None:
        self.clock = EventClock()
        self._kafka = kafka
        self._settings = settings
        self._stack = stack
        self._ends: dict[TriggerApp, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self.sent = 0

    async def join(self) -> Bench:
        """A process starts; it owns no partitions yet."""
        name = self._settings.model_copy(update={"instance_id": f"trigger-{len(self.clock.apps)}"})
        session = KafkaSession(self._kafka, name.instance_id)
        app = TriggerApp(session, name, clock=self.clock, registry=CollectorRegistry())
        self.clock.apps.append(app)
        stop = asyncio.Event()
        self._ends[app] = stop, asyncio.create_task(app.run(stop))
        self._stack.push_async_callback(self.leave, app)
        return Bench(self._kafka, app)

    async def leave(self, app: TriggerApp) -> None:
        """The process ends. May be called again."""
        stop, task = self._ends[app]
        stop.set()
        async with asyncio.timeout(20):
            await task

    async def waves(self, bench: Bench, members: int) -> None:
        """Sends events until each of so many processes owns partitions, and a while longer."""
        for wave in range(MOST_WAVES):
            # Not all events that were sent: another process may get some again, and the next wave must not overtake
            # this one.
            before = self.clock.decided
            for number in range(self.sent, self.sent + WAVE_EVENTS):
                sent = budget_event(number)
                bench.produce(Topic.RETRIEVAL, sent.user_id.encode(), encode(sent))
            bench.flush()
            self.sent += WAVE_EVENTS
            await wait_for(lambda before=before: self.clock.decided >= before + WAVE_EVENTS)  # type: ignore[misc]
            owned = [len(app.partitions) for app in self.clock.apps if not self._ends[app][1].done()]
            if wave >= LEAST_WAVES and sum(map(bool, owned)) == members and sum(owned) == self._kafka.partitions:
                return
        raise AssertionError(f"{members} processes own {owned} partitions after {MOST_WAVES} waves")


@pytest.mark.asyncio
async def test_processes_that_join_and_leave_admit_as_much_as_one(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These processes share one event loop, so each would wait for the polls of the others that have no events.
    monkeypatch.setattr(faust_stream, "POLL_S", 0.002)
    settings = TriggerSettings(status_stale_ms=100_000_000, rebuild_s=0)
    status = replace(worker_status(kafka_settings, START_US), hbm_capacity_bytes=2**40)
    async with contextlib.AsyncExitStack() as stack:
        group = Group(kafka_settings, settings, stack)
        bench = await group.join()
        await wait_for(lambda: bench.app.readiness().ready)
        bench.write(Topic.WORKERS, b"worker-00", encode(status))
        await wait_for(lambda: bench.app.fleet.owner_of(0, START_US) is not None)
        await group.waves(bench, 1)
        await group.join()
        await group.waves(bench, 2)
        await group.join()
        await group.waves(bench, 3)
        await group.leave(bench.app)
        await group.waves(bench, 2)
        counts, decided = [app.decision_counts() for app in group.clock.apps], group.clock.decided
    # A new process knows the owners before it reads its first event.
    assert not any(each.get("no_status_threshold") for each in counts)
    assert all(each["admitted"] for each in counts)
    # Events that the embedded cluster delivers again after a rebalance take time of this clock, and no budget.
    again = sum(each.get("repeated", 0) for each in counts)
    least, most = (
        admitted_by_one(settings, status, kafka_settings.partitions, events) for events in (decided - again, decided)
    )
    assert 0.95 * least <= sum(each["admitted"] for each in counts) <= 1.05 * most
