"""The history follower on a broker: the store becomes a copy of the topic and stays one."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from structlog.testing import capture_logs

from relaygr.cluster import topic_identity
from relaygr.cluster.admin_process import AdminProcess
from relaygr.devbroker import LocalBroker
from relaygr.kafka import session as session_module
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import encode
from relaygr.schemas.headers import DEAD_LETTER_REASON
from relaygr.schemas.messages import BehaviourEvent, Behaviours, BehavioursOffset, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.executor.resolver import read_history
from relaygr.worker.history import follower as follower_module
from relaygr.worker.history.batches import HistoryBatch, HistoryRecord
from relaygr.worker.history.current import MAX_STORE_AGE_MS
from relaygr.worker.history.follower import SETTLING_US, HistoryFollower
from relaygr.worker.history.snapshots import SnapshotLimits
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.process.components import _FollowedHistories
from tests.waiting import PATIENCE_S, until
from tests.worlds.disk import fill

pytestmark = pytest.mark.slow

MIB = 1024 * 1024


def history(user_id: str, number: int = 1, length: int = 50) -> History:
    items = np.arange(length) + number
    return History(user_id, number, np.array([7]), Behaviours(items, np.ones(length, "<u2"), items))


class Publisher:
    """Writes to the history topic."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.kafka = kafka
        self.topic = kafka.topic(Topic.HISTORY)
        self._producer: Producer = make_producer(kafka, ProducerKind.DURABLE, "test-history")

    def send(self, *histories: History) -> None:
        for one in histories:
            self._producer.produce(self.topic, key=one.user_id.encode(), value=encode(one))
        assert self._producer.flush(PATIENCE_S) == 0

    def send_raw(self, key: bytes, value: bytes | None, partition: int | None = None, topic: str = "") -> None:
        options = {} if partition is None else {"partition": partition}
        self._producer.produce(topic or self.topic, key=key, value=value, **options)
        assert self._producer.flush(PATIENCE_S) == 0

    def act(self, user_id: str, *items: int, position: int | None = None) -> None:
        """One record of behaviours; the time of each is its item."""
        new = Behaviours(np.array(items), np.ones(len(items), "<u2"), np.array(items))
        self._producer.produce(
            self.kafka.topic(Topic.BEHAVIOURS),
            key=user_id.encode(),
            value=encode(BehaviourEvent(user_id, new, position)),
        )
        assert self._producer.flush(PATIENCE_S) == 0

    def partition(self, user_id: str) -> int:
        return partition_for(user_id.encode(), self.kafka.partitions)


class Reported:
    """The users that the follower reported."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.deleted: list[str] = []
        self.missed: list[int] = []
        self.deleting: list[str] = []


@contextmanager
def following(
    kafka: KafkaSettings,
    store: HistoryStore,
    reported: Reported | None = None,
    partitions: frozenset[int] | None = None,
    clock: ManualClock | None = None,
    dead_letters: SlowLetters | None = None,
    **options: Any,
) -> Iterator[HistoryFollower]:
    reported = reported or Reported()
    session = KafkaSession(kafka, "test-history")
    follower = HistoryFollower(
        session,
        store,
        dead_letters or session.dead_letters,  # type: ignore[arg-type]
        "test-history",
        on_changed=reported.changed.extend,
        on_deleted=reported.deleted.append,
        clock=clock,
        on_deleting=reported.deleting.append,
        on_missed=reported.missed.extend,
        **options,
    )
    follower.follow(frozenset(range(kafka.partitions)) if partitions is None else partitions)
    follower.start()
    try:
        until(lambda: not follower.loading, "caught up")
        yield follower
    finally:
        assert follower.stop(PATIENCE_S)


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    return any_broker


@pytest.fixture(scope="module")
def admin_process(broker: LocalBroker) -> Iterator[AdminProcess]:
    with AdminProcess(broker.settings(), "test-history") as process:
        process.start(topic_identity.__name__)
        yield process


@pytest.fixture(autouse=True)
def one_process_asks(admin_process: AdminProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each start of a follower would take most of the time of these tests."""
    monkeypatch.setattr(topic_identity, "ask", lambda _kafka, _client, *question: admin_process.call(*question))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 16 * MIB)
    yield opened
    opened.close()


def dead_letters(kafka: KafkaSettings, count: int) -> list[Message]:
    consumer = make_assigned_consumer(kafka, "test-letters")
    topic = kafka.topic(Topic.DEAD_LETTERS)
    partitions = consumer.list_topics(topic, timeout=5).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
    letters: list[Message] = []

    def read() -> bool:
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            letters.append(message)
        return len(letters) >= count

    until(read, f"{count} dead letters")
    consumer.close()
    return letters


def test_histories_written_before_and_after_the_start_are_stored(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    before = [history(f"user-{i}") for i in range(60)]
    publisher.send(*before)
    with following(kafka_settings, store, reported) as follower:
        for one in before:
            stored = store.get(one.user_id)
            assert stored is not None and stored.history == one
        assert sorted(reported.changed) == sorted(one.user_id for one in before)
        assert all(follower.caught_up(partition) for partition in range(kafka_settings.partitions))
        publisher.send(history("user-3", number=2), history("late"))
        until(lambda: {"user-3", "late"} <= set(reported.changed[60:]), "changes reported")
        stored = store.get("user-3")
        assert stored is not None and stored.version.number == 2


def test_a_partition_that_comes_settles_until_it_is_read_and_for_ten_seconds_at_most(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    clock, read = ManualClock(monotonic_us=5_000_000), []
    session = KafkaSession(kafka_settings, "test-history")
    follower = HistoryFollower(
        session, store, session.dead_letters, "test-history",
        on_changed=lambda _: None, on_deleted=lambda _: None, clock=clock, on_read=read.append,
    )  # fmt: skip
    follower.follow(frozenset({0, 1}))
    clock.advance_us(SETTLING_US - 1)
    assert (follower.is_settling(0), follower.is_settling(2), follower.unopened) == (True, False, {0, 1})
    follower.follow(frozenset({1, 2}))
    clock.advance_us(1)
    settling = {partition for partition in range(4) if follower.is_settling(partition)}
    assert (settling, follower.unopened, follower.loading) == ({2}, {2}, {1, 2})
    follower.start()
    until(lambda: not follower.loading, "caught up")
    assert (follower.is_settling(2), follower.unopened) == (False, frozenset())
    until(lambda: read[1:], "reported as read")
    assert follower.stop(PATIENCE_S)
    assert read[0] == {1, 2} and frozenset().union(*read[1:]) == {1, 2}


def test_empty_partitions_catch_up_too(kafka_settings: KafkaSettings, store: HistoryStore) -> None:
    with following(kafka_settings, store) as follower:
        assert follower.loading == frozenset()
        assert not follower.caught_up(kafka_settings.partitions + 1)
    assert store.user_count == 0


def test_a_tombstone_deletes_the_user_and_is_reported(kafka_settings: KafkaSettings, store: HistoryStore) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("gone"), history("kept"))
    with following(kafka_settings, store, reported):
        assert store.get("gone") is not None
        publisher.send_raw(b"gone", None)
        until(lambda: reported.deleted == ["gone"], "deletion reported")
        assert store.get("gone") is None
        assert store.get("kept") is not None


def test_a_snapshot_written_later_replaces_one_with_the_largest_number(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("user", number=2**53 - 1))
    time.sleep(0.002)
    publisher.send(history("user", number=1))
    with following(kafka_settings, store, reported):
        stored = store.get("user")
        assert stored is not None and stored.version.number == 1


def test_a_tombstone_is_reported_before_it_is_stored_too(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies after the commit would leave the prefix to its successor, which never reads the tombstone."""
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("gone"))
    publisher.send_raw(b"gone", None)
    apply_all, seen = store.apply_all, []

    def watched(batches: Any) -> Any:
        seen.append(list(reported.deleting))
        return apply_all(batches)

    monkeypatch.setattr(store, "apply_all", watched)
    with following(kafka_settings, store, reported):
        until(lambda: reported.deleted == ["gone"], "deletion reported")
    assert ["gone"] in seen


def test_a_partition_that_another_process_read_meanwhile_may_have_lost_users(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("user"))
    partition = publisher.partition("user")
    everything = frozenset(range(kafka_settings.partitions))
    with following(kafka_settings, store, reported) as follower:
        # A store without a partition's offset may follow a store that had it.
        assert set(reported.missed) == everything
        reported.missed.clear()
        follower.follow(everything - {partition})
        until(lambda: partition not in follower._caught_up, "the follower's thread has left it")
        publisher.send_raw(b"user", None)
        store.apply_all([HistoryBatch(partition, (), 2)])
        follower.follow(everything)
        until(lambda: follower.caught_up(partition), "back")
        assert reported.missed == [partition]


def test_a_restart_reads_on_from_the_stored_offset(kafka_settings: KafkaSettings, store: HistoryStore) -> None:
    publisher = Publisher(kafka_settings)
    publisher.send(*(history(f"user-{i}") for i in range(30)))
    with following(kafka_settings, store):
        pass
    publisher.send(history("new"), history("user-1", number=2))
    reported = Reported()
    with following(kafka_settings, store, reported):
        assert sorted(reported.changed) == ["new", "user-1"]
    assert store.user_count == 31


def test_a_partition_that_stays_is_read_without_a_break(kafka_settings: KafkaSettings, store: HistoryStore) -> None:
    publisher = Publisher(kafka_settings)
    users = [f"user-{i}" for i in range(40)]
    publisher.send(*map(history, users))
    first = frozenset(range(4))
    with following(kafka_settings, store, partitions=first) as follower:
        assert store.user_count == sum(publisher.partition(user) in first for user in users)
        assert not follower.caught_up(5)
        follower.follow(frozenset((3, 5)))
        assert not follower.caught_up(0)
        assert follower.caught_up(3)
        until(lambda: follower.caught_up(5), "the new partition caught up")
        publisher.send(*(history(user, number=2) for user in users))
        followed = [user for user in users if publisher.partition(user) in (3, 5)]

        def numbers() -> set[int]:
            return {stored.version.number for user in followed if (stored := store.get(user)) is not None}

        until(lambda: numbers() == {2}, "followed partitions read on")
        left = [user for user in users if publisher.partition(user) in (0, 1, 2)]
        assert {stored.version.number for user in left if (stored := store.get(user)) is not None} == {1}


def test_records_that_are_not_histories_go_to_dead_letters_and_the_others_are_stored(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher = Publisher(kafka_settings)
    partition = publisher.partition("user")
    publisher.send(history("user"))
    publisher.send_raw(b"user", b"garbage", partition)
    publisher.send_raw(b"user", encode(history("somebody else")), partition)
    publisher.send_raw(b"user", encode(history("user", number=2)), (partition + 1) % kafka_settings.partitions)
    publisher.send(history("user", number=3))
    with following(kafka_settings, store):
        stored = store.get("user")
        assert stored is not None and stored.version.number == 3
        letters = dead_letters(kafka_settings, 3)
        until(lambda: store.next_offset(partition) == 4, "the offset passes the delivered letters")
    reasons = sorted(dict(letter.headers() or [])[DEAD_LETTER_REASON] for letter in letters)
    assert reasons == [b"key_mismatch", b"unsupported_version", b"wrong_partitioner"]
    assert b"garbage" in [letter.value() for letter in letters]


class SlowLetters:
    """Dead letters whose delivery reports the test sends."""

    def __init__(self) -> None:
        self.reports: list[Callable[[bool], None]] = []

    def write(self, message: Message, reason: str, detail: str, on_done: Callable[[bool], None] | None = None) -> None:
        assert on_done is not None
        self.reports.append(on_done)

    def poll(self, timeout_s: float = 0.0) -> int:
        return 0

    def flush(self, timeout_s: float) -> int:
        return 0


def test_the_stored_offset_waits_for_an_undelivered_dead_letter(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "RETRY_S", 0.05)
    publisher, letters = Publisher(kafka_settings), SlowLetters()
    partition = publisher.partition("user")
    publisher.send_raw(b"user", b"garbage", partition)
    publisher.send(history("user"))
    with following(kafka_settings, store, dead_letters=letters):
        assert store.get("user") is not None
        assert store.next_offset(partition) is None
        letters.reports[0](False)
        until(lambda: len(letters.reports) == 2, "a failed letter is written again")
        assert store.next_offset(partition) is None
        letters.reports[1](True)
        until(lambda: store.next_offset(partition) == 2, "the offset goes on")


def test_topics_with_other_ids_are_read_from_the_beginning_though_the_offsets_fit(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("user"))
    with following(kafka_settings, store, reported) as follower:
        # As if the store had these from the topics before.
        store.apply_all([HistoryBatch(0, (HistoryRecord("gone", 0, history("gone"), 1),), 0)])
        assert store.get("gone") is not None
        reported.missed.clear()
        reported.changed.clear()
        follower.read_anew(["another topic"])
        follower.read_anew([kafka_settings.topic(Topic.BEHAVIOURS)])
        until(lambda: reported.changed == ["user"], "read again")
        until(lambda: not follower.loading, "caught up")
        assert store.get("user") is not None and store.get("gone") is None
        assert set(reported.missed) == set(range(kafka_settings.partitions))


def test_a_store_too_old_for_tombstones_is_read_from_the_beginning(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    """A user must not stay whose tombstone was written and compacted away meanwhile."""
    publisher, clock = Publisher(kafka_settings), ManualClock()
    publisher.send(history("user"))
    with following(kafka_settings, store, clock=clock):
        pass
    clock.advance_us((MAX_STORE_AGE_MS - 1) * 1000)
    reported = Reported()
    with following(kafka_settings, store, reported, clock=clock):
        assert reported.changed == []
    clock.advance_us(MAX_STORE_AGE_MS * 1000)
    with following(kafka_settings, store, reported, clock=clock):
        assert reported.changed == ["user"]


def test_a_store_that_a_clock_far_ahead_has_marked_is_read_from_the_beginning(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    """It would count as new for as long as the clock was ahead, whatever deletions were missed."""
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("user"))
    with following(kafka_settings, store, clock=ManualClock(wall_us=MAX_STORE_AGE_MS * 20_000)):
        pass
    with following(kafka_settings, store, reported, clock=ManualClock(wall_us=MAX_STORE_AGE_MS * 19_500)):
        assert reported.changed == []
    with following(kafka_settings, store, reported, clock=ManualClock(wall_us=MAX_STORE_AGE_MS * 10_000)):
        assert reported.changed == ["user"]


def test_while_it_follows_the_store_stays_current(kafka_settings: KafkaSettings, store: HistoryStore) -> None:
    clock = ManualClock()
    Publisher(kafka_settings).send(history("user"))
    with following(kafka_settings, store, clock=clock):
        clock.advance_us(400_000_000)
        now_ms = clock.wall_us() // 1000
        partitions = range(kafka_settings.partitions)

        def is_current() -> bool:
            states = [store.state(partition) for partition in partitions]
            return all(state is not None and state.current_at_ms == now_ms for state in states)

        until(is_current, "marked current")


class BusyLog:
    """A consumer to whose log another record is written before each answer about the ends of the logs."""

    def __init__(self, consumer: Consumer, write: Callable[[], None]) -> None:
        self._consumer = consumer
        self._write = write

    def offsets_for_times(self, *args: Any, **options: Any) -> list[TopicPartition]:
        self._write()
        return self._consumer.offsets_for_times(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def test_a_partition_to_which_records_come_all_the_time_stays_current_too(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that came since the last turn are not stored yet when the follower asks for the end of the log."""
    publisher, clock, times = Publisher(kafka_settings), ManualClock(), iter(range(1000))
    partition = publisher.partition("busy")
    make, mark, stored = session_module.make_assigned_consumer, store.mark_current, []

    def busy(*args: Any, **options: Any) -> BusyLog:
        return BusyLog(make(*args, **options), lambda: publisher.act("busy", next(times)))

    def watched(partitions: Iterable[int], now_ms: int) -> None:
        marked = list(partitions)
        if partition in marked:
            stored.append((now_ms, store.next_event(partition)))
        mark(marked, now_ms)

    monkeypatch.setattr(session_module, "make_assigned_consumer", busy)
    monkeypatch.setattr(store, "mark_current", watched)
    with following(kafka_settings, store, clock=clock):
        for records in (1, 2, 3):
            clock.advance_us(400_000_000)
            asked = clock.wall_us() // 1000, records
            until(lambda asked=asked: asked in stored, "marked, with all records up to then")
    reported = Reported()
    clock.advance_us((MAX_STORE_AGE_MS - 1) * 1000)
    with following(kafka_settings, store, reported, clock=clock):
        assert reported.missed == []


def current_at_ms(store: HistoryStore, partition: int) -> int:
    state = store.state(partition)
    assert state is not None
    return state.current_at_ms


def test_a_partition_is_current_as_of_the_time_up_to_which_it_is_stored(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, letters, clock = Publisher(kafka_settings), SlowLetters(), ManualClock()
    partition = publisher.partition("user")
    other = (partition + 1) % kafka_settings.partitions
    begun_ms = clock.wall_us() // 1000
    publisher.send_raw(b"user", b"garbage", partition)
    with following(kafka_settings, store, clock=clock, dead_letters=letters):
        for asked_ms in (begun_ms + 400_000, begun_ms + 800_000):
            clock.advance_us(400_000_000)
            until(lambda asked_ms=asked_ms: current_at_ms(store, other) == asked_ms, "the others are marked")
            assert current_at_ms(store, partition) == begun_ms
        letters.reports[0](True)
        until(lambda: current_at_ms(store, partition) != begun_ms, "marked once the dead letter is delivered")
        assert store.next_offset(partition) == 1
        assert current_at_ms(store, partition) == begun_ms + 400_000


def test_a_partition_that_was_lost_meanwhile_is_not_marked_for_the_time_before(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    """It was read from the beginning again: the mark of an earlier time would call the new histories old."""
    publisher, letters, clock = Publisher(kafka_settings), SlowLetters(), ManualClock()
    everything = frozenset(range(kafka_settings.partitions))
    partition = publisher.partition("user")
    other = (partition + 1) % kafka_settings.partitions
    publisher.send_raw(b"user", b"garbage", partition)
    with following(kafka_settings, store, clock=clock, dead_letters=letters) as follower:
        clock.advance_us(400_000_000)
        until(lambda: current_at_ms(store, other) == clock.wall_us() // 1000, "the ends were asked for")
        follower.follow(everything - {partition})
        until(lambda: partition not in follower._caught_up, "the follower's thread has left it")
        clock.advance_us(2 * MAX_STORE_AGE_MS * 1000)
        begun_ms = clock.wall_us() // 1000
        follower.follow(everything)
        until(lambda: len(letters.reports) == 2, "read from the beginning")
        letters.reports[1](True)
        until(lambda: store.next_offset(partition) == 1, "the offset goes on")
        until(lambda: follower.caught_up(partition), "back")
    assert current_at_ms(store, partition) == begun_ms


def test_after_a_failed_transaction_everything_is_read_again(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "RETRY_S", 0.05)
    publisher, reported = Publisher(kafka_settings), Reported()
    users = [f"user-{i}" for i in range(30)]
    publisher.send(*map(history, users))
    apply_all, failures = store.apply_all, iter((True, True))

    def fails_twice(batches: Any) -> Any:
        if next(failures, False):
            raise lmdb.DiskError("no space left on device")
        return apply_all(batches)

    monkeypatch.setattr(store, "apply_all", fails_twice)
    with following(kafka_settings, store, reported) as follower:
        assert sorted(reported.changed) == sorted(users)
        assert "history-follower" in {thread.name for thread in threading.enumerate()}
        assert not follower.loading
    assert store.user_count == 30


def damage(store: HistoryStore, partition: int, user_id: str) -> None:
    """Changes a bit of a stored history, as a disk does."""
    key = partition.to_bytes(4, "big") + user_id.encode() + b"\0\0"
    with store._files.env.begin(write=True) as txn:
        head = bytearray(txn.get(key, db=store._files.records))
        head[-10] ^= 4
        txn.put(key, head, db=store._files.records)


def test_a_request_that_finds_a_damaged_history_waits_until_its_partition_is_read_again(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher = Publisher(kafka_settings)
    given = [history(f"user-{i}") for i in range(20)]
    publisher.send(*given)
    partition = publisher.partition("user-3")
    with following(kafka_settings, store) as follower:
        histories = _FollowedHistories(store, follower, kafka_settings.partitions)
        damage(store, partition, "user-3")
        with capture_logs() as told:
            found = read_history(histories, "user-3", given[3].version(), None, partition, 0)
            assert (found.history, found.loading, found.is_settling) == (None, True, True)
            assert partition in follower.loading and partition in follower.unopened
            until(lambda: not follower.loading, "read again")
        assert [read_history(histories, each.user_id, None, None, 0, 0).history for each in given] == given
        [line] = [line for line in told if line["event"] == "history partition is read from the beginning"]
        assert (line["partition"], line["reason"]) == (partition, "damaged")


def test_damage_that_the_follower_finds_is_mended_once_in_a_partition_and_then_said(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    """A disk that changes what it keeps needs an operator, and no endless reading."""
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("user"))
    partition = publisher.partition("user")
    with following(kafka_settings, store, reported) as follower:
        damage(store, partition, "user")
        publisher.act("user", 1000)
        until(lambda: reported.changed[1:] and not follower.loading, "read again")
        found = store.get("user")
        assert found is not None and len(found.history.behaviours) == 51
        assert follower.fault == ""
        damage(store, partition, "user")
        publisher.act("user", 1001)
        until(lambda: "is damaged" in follower.fault, "said")
        assert follower.loading


def test_refused_records_are_read_again_once_there_is_space(kafka_settings: KafkaSettings, tmp_path: Path) -> None:
    publisher = Publisher(kafka_settings)
    publisher.send(*(history(f"user-{i}", length=2000) for i in range(60)))
    small = HistoryStore.open(tmp_path / "small", MIB)
    with following(kafka_settings, small):
        assert 0 < small.user_count < 60
    small.close()
    larger = HistoryStore.open(tmp_path / "small", 16 * MIB)
    with following(kafka_settings, larger):
        assert larger.user_count == 60
    larger.close()


def test_behaviours_that_were_refused_are_read_again_though_later_ones_were_stored(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    publisher = Publisher(kafka_settings)
    users = [f"user-{number}" for number in range(4)]
    for first in range(0, 256 * 40, 256):
        for user in users:
            publisher.act(user, *range(first, first + 256))
    small = HistoryStore.open(tmp_path / "small", MIB)
    with following(kafka_settings, small):
        whole = [user for user in users if len(items_of(small, user) or ()) == 256 * 40]
        assert len(whole) < len(users)
    small.close()
    larger = HistoryStore.open(tmp_path / "small", 32 * MIB)
    with following(kafka_settings, larger):
        for user in users:
            assert items_of(larger, user) == list(range(256 * 40))
    larger.close()


# -- behaviours ------------------------------------------------------------------------------------


def items_of(store: HistoryStore, user_id: str) -> list[int] | None:
    stored = store.get(user_id)
    return None if stored is None else stored.history.behaviours.items.tolist()


def test_behaviours_follow_the_snapshot_whether_they_came_before_the_start_or_later(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("ann", length=3))
    for item in range(10, 14):
        publisher.act("ann", item)
        publisher.act("bob", item, position=item - 10)
    with following(kafka_settings, store, reported):
        assert items_of(store, "ann") == [1, 2, 3, 10, 11, 12, 13]
        assert items_of(store, "bob") == [10, 11, 12, 13]
        reported.changed.clear()
        publisher.act("ann", 14, 15)
        publisher.act("bob", 13, 14, position=3)
        until(lambda: {"ann", "bob"} <= set(reported.changed), "changes reported")
        until(lambda: items_of(store, "bob") == [10, 11, 12, 13, 14], "bob grows")
        assert items_of(store, "ann") == [1, 2, 3, 10, 11, 12, 13, 14, 15]


def test_a_store_built_from_nothing_equals_the_one_that_lived(
    kafka_settings: KafkaSettings, store: HistoryStore, tmp_path: Path
) -> None:
    publisher = Publisher(kafka_settings)
    users = [f"user-{number}" for number in range(12)]
    with following(kafka_settings, store):
        for turn in range(6):
            for number, user in enumerate(users):
                publisher.act(user, 100 + turn, *([200 + turn] if number % 3 else []))
                if (turn, number % 4) in ((2, 0), (4, 1)):
                    state = store.state(publisher.partition(user))
                    covers = BehavioursOffset(publisher.partition(user), 0 if state is None else state.next_event)
                    kept = history(user, number=turn, length=number)
                    publisher.send(History(user, turn, kept.features, kept.behaviours, None, covers))
                if (turn, number) == (3, 5):
                    time.sleep(0.005)
                    publisher.send_raw(user.encode(), None)
                    time.sleep(0.005)

    def read_from(path: Path) -> dict[str, list[int] | None]:
        opened = HistoryStore.open(path, 16 * MIB)
        with following(kafka_settings, opened):
            found = {user: items_of(opened, user) for user in users}
        opened.close()
        return found

    with following(kafka_settings, store):
        lived = {user: items_of(store, user) for user in users}
    assert read_from(tmp_path / "fresh") == lived
    assert lived["user-5"] is not None and 103 not in lived["user-5"][:1]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_behaviours_that_come_again_at_lost_offsets_are_in_the_histories_that_name_these(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """Only the behaviours topic lost its end: what came then counted as covered, and was in no history.

    `is_interrupted`: a process before this one read the snapshots, and no behaviours.
    """
    publisher, reported = Publisher(kafka_settings), Reported()
    covers = BehavioursOffset(publisher.partition("ann"), 7)
    publisher.send(replace(history("ann", length=3), covers=covers), replace(history("bob", length=2), covers=None))
    publisher.act("ann", 50)
    if is_interrupted:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), ExitStack() as stack:
            patch.setattr(HistoryFollower, "_note_ends", lambda _: None)
            patch.setattr(HistoryFollower, "loading", property(lambda _: () if items_of(store, "bob") else (0,)))
            stack.enter_context(following(kafka_settings, store))
            until(lambda: items_of(store, "ann") == [1, 2, 3], "the snapshots are read")
            raise KeyboardInterrupt
    with capture_logs() as logs, following(kafka_settings, store, reported):
        reported.changed.clear()
        for item in range(60, 64):
            publisher.act("ann", item)
        until(lambda: items_of(store, "ann") == [1, 2, 3, 60, 61, 62, 63], "ann grows")
    [said] = [each for each in logs if each["event"].startswith("histories cover behaviours that the log has lost")]
    named = "unknown" if is_interrupted else 7
    assert (said["partition"], said["histories"], said["covered_to"], said["end"]) == (covers.partition, 1, named, 1)
    head = store.head("ann")
    assert head is not None and head.is_superseded, "its owner saves it anew"


def test_a_history_that_was_saved_after_its_log_lost_the_end_covers_no_more_for_others(
    kafka_settings: KafkaSettings, store: HistoryStore, tmp_path: Path
) -> None:
    """They read the publisher's snapshot first, which covers more."""
    publisher = Publisher(kafka_settings)
    covers = BehavioursOffset(publisher.partition("ann"), 7)
    publisher.send(replace(history("ann", length=3), covers=covers))
    publisher.act("ann", 50)
    with following(kafka_settings, store, snapshots=SnapshotLimits(scan_interval_s=0.05)):
        until(lambda: (head := store.head("ann")) is not None and not head.is_superseded, "saved")
        for item in range(60, 64):
            publisher.act("ann", item)
        until(lambda: items_of(store, "ann") == [1, 2, 3, 60, 61, 62, 63], "ann grows")
    other = HistoryStore.open(tmp_path / "other", 16 << 20)
    with following(kafka_settings, other):
        assert items_of(other, "ann") == [1, 2, 3, 60, 61, 62, 63]


def test_behaviours_that_cannot_be_read_go_to_dead_letters(kafka_settings: KafkaSettings, store: HistoryStore) -> None:
    publisher = Publisher(kafka_settings)
    topic, partition = kafka_settings.topic(Topic.BEHAVIOURS), publisher.partition("ann")
    publisher.send_raw(b"ann", b"garbage", partition, topic)
    publisher.send_raw(b"ann", None, partition, topic)
    publisher.act("ann", 7)
    with following(kafka_settings, store):
        assert items_of(store, "ann") == [7]
        letters = dead_letters(kafka_settings, 2)
        until(lambda: store.next_event(partition) == 3, "the offset passes the delivered letters")
    reasons = sorted(dict(letter.headers() or [])[DEAD_LETTER_REASON] for letter in letters)
    assert reasons == [b"empty", b"unsupported_version"]


@pytest.mark.parametrize("offsets", [(10_000, 1), (0, 10_000)], ids=["of histories", "of behaviours"])
def test_a_stored_offset_out_of_range_means_reading_all_from_the_beginning(
    kafka_settings: KafkaSettings, store: HistoryStore, offsets: tuple[int, int]
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    partition = publisher.partition("ann")
    publisher.send(history("ann", length=2))
    publisher.act("ann", 9)
    with following(kafka_settings, store):
        pass
    store.apply_all([HistoryBatch(partition, (), offsets[0], (), offsets[1])])
    with following(kafka_settings, store, reported):
        assert "ann" in reported.changed and items_of(store, "ann") == [1, 2, 9]
        assert (store.next_offset(partition), store.next_event(partition)) == (1, 1)
        assert reported.missed == [partition]


@pytest.mark.parametrize("is_event", [False, True], ids=["of histories", "of behaviours"])
@pytest.mark.parametrize(
    "other",
    [{"digest": bytes(8)}, {"time_ms": 1_234}, {"offset": 3}, {"leader_epoch": 7}],
    ids=["another content", "another time", "no such record", "only led by another broker"],
)
def test_a_log_without_the_last_record_that_was_read_is_read_from_its_beginning(
    kafka_settings: KafkaSettings, store: HistoryStore, other: dict[str, Any], is_event: bool
) -> None:
    """The log came back shorter and grew beyond the stored offset. The same record under another leader is the same."""
    publisher, reported = Publisher(kafka_settings), Reported()
    partition = publisher.partition("eva")
    publisher.send(history("eva", length=3))
    publisher.act("eva", 15)
    with following(kafka_settings, store):
        state = store.state(partition)
    assert state is not None and state.last is not None and state.last_event is not None
    store.forget(partition)
    store.mark_current((partition,), state.current_at_ms)
    last = replace(state.last_event if is_event else state.last, **other)
    known = {"last_event": last} if is_event else {"last": last}
    store.apply_all([HistoryBatch(partition, (), 1, (), 1, **known)])
    is_same = "leader_epoch" in other
    with following(kafka_settings, store, reported):
        # What is read from the stored offset on lacks the user.
        assert items_of(store, "eva") == (None if is_same else [1, 2, 3, 15])
        assert reported.missed == ([] if is_same else [partition])


# -- deletion --------------------------------------------------------------------------------------

ERASE_WITHIN_S = 600.0


def is_in_files(store: HistoryStore, user_id: str) -> bool:
    for path in store.path.rglob("*.mdb"):
        with suppress(FileNotFoundError):  # Deleted meanwhile by the compaction.
            if user_id.encode() in path.read_bytes():
                return True
    return False


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed_store(tmp_path: Path, clock: ManualClock) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "timed", 16 * MIB, clock)
    yield opened
    opened.close()


def test_the_bytes_of_a_deleted_user_leave_the_files_in_the_stated_time(
    kafka_settings: KafkaSettings, timed_store: HistoryStore, clock: ManualClock
) -> None:
    publisher = Publisher(kafka_settings)
    publisher.send(history("gone-user"), history("kept-user"))
    with following(kafka_settings, timed_store, clock=clock, erase_within_s=ERASE_WITHIN_S):
        publisher.send_raw(b"gone-user", None, publisher.partition("gone-user"))
        until(lambda: timed_store.get("gone-user") is None, "deleted")
        assert is_in_files(timed_store, "gone-user")
        clock.advance_us(int(ERASE_WITHIN_S * 1e6 / 2))
        until(lambda: not is_in_files(timed_store, "gone-user"), "erased")
        assert is_in_files(timed_store, "kept-user")
        publisher.send(history("kept-user", number=2))
        until(lambda: (found := timed_store.get("kept-user")) and found.version.number == 2, "reading goes on")


def test_a_deletion_that_a_predecessor_left_is_erased_after_the_start(
    kafka_settings: KafkaSettings, timed_store: HistoryStore, clock: ManualClock
) -> None:
    publisher = Publisher(kafka_settings)
    publisher.send(history("gone-user"))
    publisher.send_raw(b"gone-user", None, publisher.partition("gone-user"))
    with following(kafka_settings, timed_store, clock=clock, erase_within_s=ERASE_WITHIN_S):
        assert timed_store.removed_at_ms is not None
    clock.advance_us(int(ERASE_WITHIN_S * 1e6))
    with following(kafka_settings, timed_store, clock=clock, erase_within_s=ERASE_WITHIN_S):
        until(lambda: timed_store.removed_at_ms is None, "erased")
    assert not is_in_files(timed_store, "gone-user")


def test_a_failed_compaction_is_tried_again(
    kafka_settings: KafkaSettings, timed_store: HistoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact, failures = timed_store.compact, iter((True, True))

    def fails_twice() -> bool:
        if next(failures, False):
            raise lmdb.DiskError("no space left on device")
        return compact()

    monkeypatch.setattr(timed_store, "compact", fails_twice)
    publisher = Publisher(kafka_settings)
    publisher.send(history("gone-user"))
    with following(kafka_settings, timed_store, clock=clock, erase_within_s=ERASE_WITHIN_S):
        publisher.send_raw(b"gone-user", None, publisher.partition("gone-user"))
        until(lambda: timed_store.removed_at_ms is not None, "deleted")
        clock.advance_us(int(ERASE_WITHIN_S * 1e6))

        def is_erased() -> bool:
            clock.advance_us(1_000_000)
            return timed_store.removed_at_ms is None

        until(is_erased, "erased")
    assert not is_in_files(timed_store, "gone-user")


def test_a_standby_compacts_nothing(
    kafka_settings: KafkaSettings, timed_store: HistoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its follower was not told to follow. Only the active worker writes."""
    timed_store.forget(0)
    timed_store.apply_all([HistoryBatch(0, (HistoryRecord("gone-user", 0, None),), 1)])
    clock.advance_us(int(ERASE_WITHIN_S * 1e6))
    turns: list[int] = []
    session = KafkaSession(kafka_settings, "test-history")
    standby = HistoryFollower(
        session, timed_store, session.dead_letters, "test-history",
        on_changed=lambda _: None, on_deleted=lambda _: None, clock=clock, erase_within_s=ERASE_WITHIN_S,
    )  # fmt: skip
    monkeypatch.setattr(standby, "_forget_moved", lambda: turns.append(1))
    standby.start()
    try:
        until(lambda: len(turns) > 2, "three turns")
        assert timed_store.removed_at_ms is not None
        standby.follow(frozenset())
        until(lambda: timed_store.removed_at_ms is None, "erased by the active worker")
    finally:
        assert standby.stop(PATIENCE_S)


def test_histories_of_a_partition_that_moved_for_good_are_deleted_and_read_again_if_it_returns(
    kafka_settings: KafkaSettings, store: HistoryStore
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    users = [f"user-{number}" for number in range(20)]
    publisher.send(*map(history, users))
    every = frozenset(range(kafka_settings.partitions))
    with following(kafka_settings, store, reported) as follower:
        kept = frozenset((0, 1))
        left = [user for user in users if publisher.partition(user) not in kept]
        follower.follow(kept)
        follower.forget(every)
        until(lambda: store.user_count == len(users) - len(left), "deleted")
        assert all(store.get(user) is None for user in left)
        assert store.removed_at_ms is not None
        reported.missed.clear()
        follower.follow(every)
        until(lambda: store.user_count == len(users), "read again")
        until(lambda: {publisher.partition(user) for user in left} <= set(reported.missed), "prefixes are dropped")


# -- a disk that takes nothing ----------------------------------------------------------------------


class Disk:
    """The disk of a store: while it is `full`, every write transaction fails."""

    def __init__(self, store: HistoryStore, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.full = False
        write, check_room = store._write, follower_module.check_room

        @contextmanager
        def fails() -> Iterator[Any]:
            with write() as txn:
                yield txn
                if self.full:
                    raise error

        def has_room(folder: Path, size_bytes: int) -> None:
            if self.full and not isinstance(error, lmdb.MapFullError):
                raise OSError(errno.ENOSPC, "No space left on device")
            check_room(folder, size_bytes)

        monkeypatch.setattr(store, "_write", fails)
        monkeypatch.setattr(follower_module, "check_room", has_room)
        monkeypatch.setattr(follower_module, "RETRY_S", 0.05)


WRITE_ERRORS = [
    lmdb.DiskError("mdb_txn_commit: No space left on device"),
    lmdb.Error("mdb_txn_commit: Disk quota exceeded"),
    lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached"),
]


@pytest.mark.parametrize("error", WRITE_ERRORS, ids=str)
def test_a_deleted_user_is_forgotten_though_the_disk_takes_nothing(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Tombstones that follow records which cannot be stored are read too."""
    publisher, reported, disk = Publisher(kafka_settings), Reported(), Disk(store, monkeypatch, error)
    publisher.send(history("gone"), history("kept"), history("gone-later"))
    with following(kafka_settings, store, reported) as follower:
        assert follower.fault == ""
        disk.full = True
        publisher.send(*(history(f"large-{number}", length=4000) for number in range(60)))
        publisher.send_raw(b"gone", None)
        until(lambda: store.get("gone") is None and "gone" in reported.deleted, "forgotten")
        publisher.send_raw(b"gone-later", None)
        until(lambda: store.get("gone-later") is None and "gone-later" in reported.deleted, "forgotten")
        assert {"gone", "gone-later"} <= set(reported.deleting)
        everything = frozenset(range(kafka_settings.partitions))
        assert store.recent_users(everything, 10, lambda: True) == ["kept"]
        assert [each.user_id for each in store.some_histories(10)] == ["kept"]
        assert follower.loading == everything
        assert str(error).split(": ")[-1] in follower.fault or "history_max_bytes" in follower.fault
        assert str(store.path) in follower.fault
        disk.full = False
        until(lambda: not follower.loading, "caught up again")
        assert follower.fault == ""
        assert store.user_count == 61
        assert store.get("kept") is not None
        publisher.send(history("gone"))
        until(lambda: store.get("gone") is not None, "a user who returns is stored")


def test_a_partition_that_is_taken_over_on_a_full_disk_forgets_its_deleted_users(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("gone"))
    everything = frozenset(range(kafka_settings.partitions))
    own = frozenset((publisher.partition("gone"),))
    with following(kafka_settings, store, reported, own):
        pass
    disk = Disk(store, monkeypatch, WRITE_ERRORS[0])
    disk.full = True
    publisher.send_raw(b"gone", None)
    session = KafkaSession(kafka_settings, "test-history")
    follower = HistoryFollower(
        session, store, session.dead_letters, "test-history",
        on_changed=lambda _: None, on_deleted=lambda _: None,
    )  # fmt: skip
    follower.follow(everything)
    follower.start()
    try:
        # The store has no offset of the other partitions, and cannot store one.
        until(lambda: store.get("gone") is None, "forgotten")
    finally:
        assert follower.stop(PATIENCE_S)


def test_histories_of_a_partition_that_moved_are_deleted_once_the_disk_takes_it(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, disk = Publisher(kafka_settings), Disk(store, monkeypatch, WRITE_ERRORS[0])
    publisher.send(history("moved"))
    moved = frozenset((publisher.partition("moved"),))
    with following(kafka_settings, store) as follower:
        disk.full = True
        follower.follow(frozenset(range(kafka_settings.partitions)) - moved)
        follower.forget(moved)
        until(lambda: follower.fault, "the disk takes nothing")
        disk.full = False
        until(lambda: store.user_count == 0, "deleted")


def test_deletions_are_read_on_a_full_disk_once_a_consumer_can_be_made(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificates, for example, may be replaced just then."""
    publisher, reported, disk = Publisher(kafka_settings), Reported(), Disk(store, monkeypatch, WRITE_ERRORS[0])
    make, refused = session_module.make_assigned_consumer, []

    def fails_twice(*args: Any) -> Any:
        if disk.full and len(refused) < 2:
            refused.append(args)
            raise RelayError("security.ca cannot be read")
        return make(*args)

    monkeypatch.setattr(session_module, "make_assigned_consumer", fails_twice)
    publisher.send(history("gone"))
    with following(kafka_settings, store, reported):
        disk.full = True
        publisher.send_raw(b"gone", None)
        until(lambda: len(refused) == 2, "refused")
        publisher.send_raw(b"gone-later", None)
        until(lambda: "gone-later" in reported.deleted, "forgotten")
        disk.full = False


def test_histories_of_topics_that_are_no_more_are_not_found_on_a_full_disk(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, disk = Publisher(kafka_settings), Disk(store, monkeypatch, WRITE_ERRORS[0])
    publisher.send(history("user"))
    with following(kafka_settings, store) as follower:
        disk.full = True
        follower.read_anew([kafka_settings.topic(Topic.HISTORY)])
        until(lambda: store.get("user") is None, "not found")
        until(lambda: follower.fault, "the fault is named")
        disk.full = False
        until(lambda: store.get("user") is not None and not follower.fault, "read from the new topics")


def test_a_new_store_on_a_full_disk_names_it(
    kafka_settings: KafkaSettings, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(store, monkeypatch, WRITE_ERRORS[0])
    disk.full = True
    session = KafkaSession(kafka_settings, "test-history")
    follower = HistoryFollower(
        session, store, session.dead_letters, "test-history",
        on_changed=lambda _: None, on_deleted=lambda _: None,
    )  # fmt: skip
    follower.follow(frozenset(range(kafka_settings.partitions)))
    follower.start()
    try:
        until(lambda: "No space left on device" in follower.fault, "the fault is named")
        disk.full = False
        until(lambda: not follower.loading and not follower.fault, "caught up")
    finally:
        assert follower.stop(PATIENCE_S)


def test_a_deleted_user_is_forgotten_on_a_full_file_system(kafka_settings: KafkaSettings, small_disk: Path) -> None:
    publisher, reported = Publisher(kafka_settings), Reported()
    publisher.send(history("gone"), history("kept"))
    store = HistoryStore.open(small_disk / "history", 64 * MIB)
    with following(kafka_settings, store, reported) as follower:
        filler = fill(small_disk)
        # More than the free pages of the store take.
        publisher.send(*(history(f"large-{number}", length=4000) for number in range(20)))
        publisher.send_raw(b"gone", None)
        until(lambda: store.get("gone") is None and "gone" in reported.deleted, "forgotten")
        until(lambda: "No space left on device" in follower.fault, "the fault is named")
        filler.unlink()
        until(lambda: not follower.loading, "caught up again")
        assert store.user_count == 21
    store.close()
