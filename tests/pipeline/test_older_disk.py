"""A broker whose disk, or the folder of a partition, is put back to an older copy while nobody reads its logs.

The logs come back shorter, and grow past the offsets that were stored before. What is lost of a log is no part of any
history, and what the log holds now is.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from structlog.testing import capture_logs

from relaygr.client import Ended
from relaygr.cluster.admin import create_topics
from relaygr.cluster.topic_identity import TopicIdentity
from relaygr.consumer.finished import FinishedOffsets
from relaygr.consumer.interface import Received
from relaygr.consumer.loop import ConsumerLoop
from relaygr.consumer.watermark import TopicPartition as Place
from relaygr.devbroker.kafka import KafkaCluster
from relaygr.kafka.clients import (
    ProducerKind,
    make_admin,
    make_assigned_consumer,
    make_group_consumer,
    make_producer,
)
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.messages import BehavioursOffset
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.history.snapshots import SnapshotLimits
from relaygr.worker.history.store import HistoryStore
from tests.cli.test_bridge import T0, bridge, committed_items, source_of, write
from tests.waiting import until
from tests.workers.test_history_follower import MIB, Publisher, Reported, following, history
from tests.workers.test_history_logs import items
from tests.worlds.own_broker import own_cluster
from tests.worlds.relay import Relay, candidates_of, history_of, reading

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with own_cluster(1, {"log.cleaner.backoff.ms": 100}) as cluster:
        yield cluster


@pytest.fixture
def kafka(cluster: KafkaCluster) -> KafkaSettings:
    prefix = f"test-{uuid.uuid4().hex[:8]}"
    settings = KafkaSettings(
        bootstrap=cluster.bootstrap, topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS
    )
    create_topics(settings)
    return settings


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 16 * MIB)
    yield opened
    opened.close()


@contextmanager
def stopped(cluster: KafkaCluster) -> Iterator[Path]:
    """The folder of the broker's data, while the broker is stopped."""
    cluster.stop(1)
    yield cluster.data(1)
    cluster.start(1)


def keep(cluster: KafkaCluster, copy: Path) -> None:
    with stopped(cluster) as data:
        shutil.copytree(data, copy)


def put_back(cluster: KafkaCluster, copy: Path, *names: str) -> None:
    """The whole disk, or these partitions' folders alone: then the broker's metadata stay, and leader epochs grow."""
    with stopped(cluster) as data:
        for name in names or ("",):
            shutil.rmtree(data / name)
            shutil.copytree(copy / name, data / name)


def users_of(partition: int, count: int, name: str) -> list[str]:
    """Ids of users whose partition it is."""
    names = (f"{name}{number}" for number in range(1000))
    return [user for user in names if partition_for(user.encode(), PARTITIONS) == partition][:count]


def test_workers_rank_with_what_the_log_holds_after_the_whole_disk_was_put_back(
    cluster: KafkaCluster, kafka: KafkaSettings, model: Path, tmp_path: Path
) -> None:
    """Users who were published after that had no history, and others had behaviours that no log held, for ever."""
    early, late = ([f"{name}-{number}" for number in range(count)] for name, count in (("early", 9), ("late", 30)))
    with Relay(kafka, tmp_path / "relay", model) as relay:
        publish(relay, early, 12)
        keep(cluster, tmp_path / "copy")
        publish(relay, early, 31)
        worker = relay.start_worker()
        relay.await_ready(worker)
        assert reading(worker).by_label("relaygr_history_records_total", "outcome")["applied"] == 2 * len(early)
        assert relay.stop(worker) == 0
        put_back(cluster, tmp_path / "copy")
        publish(relay, late, 17)

        for restarts in (PARTITIONS, 0):
            worker = relay.start_worker()
            relay.await_ready(worker)
            with relay.client() as client:
                for user, length in ((early[0], 12), (early[8], 12), (late[0], 17), (late[29], 17)):
                    wanted = history_of(user, length).version()
                    ranked = client.rank(user, candidates_of(), budget_ms=8_000, history_version=wanted)
                    assert ranked.status is Ended.RANKED and ranked.result is not None
                    assert (ranked.result.history_version, ranked.result.history_stale) == (wanted, False)
            counted = reading(worker).by_label("relaygr_history_restarts_total", "reason")
            assert counted.get("log_replaced", 0) == restarts, "each log once, and not at the next start again"
            assert relay.stop(worker) == 0
        said = worker.log.read_text()
        assert said.count("history partition is read from the beginning") == PARTITIONS
        assert "another record is at " in said and "log_replaced" in said


def publish(relay: Relay, users: list[str], length: int) -> None:
    """By a client of its own: the lost log knows the sequence of an earlier one."""
    with relay.client() as client:
        for user in users:
            client.publish_history(history_of(user, length))


@pytest.mark.parametrize("is_whole", [True, False], ids=["the whole disk", "the folders of two partitions"])
def test_each_log_that_is_another_one_is_read_from_its_beginning_and_no_other_log_is(
    cluster: KafkaCluster, kafka: KafkaSettings, store: HistoryStore, tmp_path: Path, is_whole: bool
) -> None:
    """Partition 0 loses records of its histories, partition 1 of its behaviours, and partition 2 nothing."""
    publisher, reported = Publisher(kafka), Reported()
    [ann, new], [bob, eve], [sue] = users_of(0, 2, "a"), users_of(1, 2, "b"), users_of(2, 1, "c")
    for user in (ann, bob, sue):
        publisher.send(history(user, length=4))
        publisher.act(user, 71)
    keep(cluster, tmp_path / "copy")
    publisher.send(history(ann, number=2, length=7))
    publisher.act(bob, 72, 73)
    with following(kafka, store):
        assert items(store, ann) == [*range(2, 9)] and items(store, bob) == [1, 2, 3, 4, 71, 72, 73]
    lost = [f"{kafka.topic(Topic.HISTORY)}-0", f"{kafka.topic(Topic.BEHAVIOURS)}-1"]
    put_back(cluster, tmp_path / "copy", *([] if is_whole else lost))
    publisher = Publisher(kafka)
    publisher.send(*(history(new, number=number, length=3) for number in (1, 2, 3)))
    for item in (81, 82, 83):
        publisher.act(eve, item)

    with capture_logs() as logs, following(kafka, store, reported):
        assert items(store, ann) == [1, 2, 3, 4, 71] and items(store, new) == [3, 4, 5]
        assert items(store, bob) == [1, 2, 3, 4, 71] and items(store, eve) == [81, 82, 83]
        assert items(store, sue) == [1, 2, 3, 4, 71]
    assert sorted(reported.missed) == [0, 1]
    causes = [(each["topic"], each["reason"]) for each in logs if each["event"].endswith("from the beginning")]
    assert sorted(causes) == [(kafka.topic(topic), "log_replaced") for topic in (Topic.BEHAVIOURS, Topic.HISTORY)]
    reported.missed.clear()
    with following(kafka, store, reported):
        assert reported.missed == [], "the next start goes on"


def test_a_log_whose_last_record_was_compacted_or_expired_is_the_same_log(
    cluster: KafkaCluster, kafka: KafkaSettings, store: HistoryStore, tmp_path: Path
) -> None:
    """Else such a partition would be read from its beginning at every start. The leader epoch still tells the log."""
    publisher, reported = Publisher(kafka), Reported()
    [ann, bob, new] = users_of(0, 3, "a")
    publisher.send(history(bob, length=5))
    keep(cluster, tmp_path / "copy")
    publisher.send(history(ann, length=2))
    publisher.act(ann, 61)
    with following(kafka, store):
        assert items(store, ann) == [1, 2, 61]
    expire(kafka, kafka.topic(Topic.BEHAVIOURS), 1)
    compact(kafka, publisher, ann, 1)

    with capture_logs() as logs, following(kafka, store, reported):
        assert items(store, ann) == [8, 9, 10] and items(store, bob) == [1, 2, 3, 4, 5]
    assert reported.missed == []
    told = [each["known_by_leader_epoch_alone"] for each in logs if each["event"].endswith("caught up")]
    assert [0] in told

    known = store.state(0)
    assert known is not None and known.last is not None
    put_back(cluster, tmp_path / "copy", f"{kafka.topic(Topic.HISTORY)}-0")
    compact(kafka, Publisher(kafka), new, known.last.offset)
    with capture_logs() as logs, following(kafka, store, reported):
        assert items(store, ann) is None and items(store, bob) == [1, 2, 3, 4, 5] and items(store, new) == [8, 9, 10]
    assert reported.missed == [0]
    [cause] = [each["cause"] for each in logs if each.get("reason") == "log_replaced"]
    assert "truncation" in cause


def test_a_bridge_passes_on_what_a_log_has_now_and_nothing_twice(
    cluster: KafkaCluster, kafka: KafkaSettings, tmp_path: Path
) -> None:
    """It went on at its commit, so what was written before that place reached no history."""
    [lost, kept] = users_of(1, 1, "b") + users_of(2, 1, "c")
    for user in (lost, kept):
        write(kafka, [{"uid": user, "sku": n, "at": T0 + n, "event": "view"} for n in range(6)], key=user)
    keep(cluster, tmp_path / "copy")
    for user in (lost, kept):
        write(kafka, [{"uid": user, "sku": n, "at": T0 + n, "event": "buy"} for n in range(10, 14)], key=user)
    assert "20 records published, 0 bad ones left out, lag 0" in bridge(kafka).output
    put_back(cluster, tmp_path / "copy", f"{source_of(kafka)}-1")
    write(kafka, [{"uid": lost, "sku": n, "at": T0 + n, "event": "buy"} for n in range(20, 27)], key=lost)

    done = bridge(kafka)
    assert "7 records published, 0 bad ones left out, lag 0" in done.output, done.output
    assert "partition 1 of" in done.output and "offset 10, and has others from offset 6" in done.output
    assert sorted(committed_items(kafka, 27)) == sorted(2 * [*range(6), *range(10, 14)] + [*range(20, 27)])
    done = bridge(kafka)
    assert "0 records published" in done.output and "has lost records" not in done.output


def test_behaviours_at_lost_offsets_are_in_each_workers_histories(
    cluster: KafkaCluster, kafka: KafkaSettings, store: HistoryStore, tmp_path: Path
) -> None:
    """Only behaviours lose their end. The history names a later offset, so what came then counted as covered."""
    publisher, [bob, eve] = Publisher(kafka), users_of(1, 2, "b")
    publisher.act(bob, 2)
    keep(cluster, tmp_path / "copy")
    publisher.act(bob, 3, 4)
    publisher.act(bob, 5)
    publisher.send(replace(history(bob, number=2, length=4), covers=BehavioursOffset(1, 3)))
    with following(kafka, store):
        assert items(store, bob) == [2, 3, 4, 5]
    put_back(cluster, tmp_path / "copy", f"{kafka.topic(Topic.BEHAVIOURS)}-1")

    publisher, limits = Publisher(kafka), SnapshotLimits(scan_interval_s=0.05)
    with following(kafka, store, snapshots=limits):
        publisher.act(bob, 91)
        publisher.act(eve, 81)
        publisher.act(bob, 92)
        until(lambda: items(store, bob) == [2, 3, 4, 5, 91, 92], "what came is there")
        until(lambda: (head := store.head(bob)) is not None and not head.is_superseded, "the owner has saved it")
        publisher.act(bob, 93)
        until(lambda: items(store, bob) == [2, 3, 4, 5, 91, 92, 93], "what came later, too")
    other = HistoryStore.open(tmp_path / "other", 16 * MIB)
    with following(kafka, other):
        assert items(other, bob) == [2, 3, 4, 5, 91, 92, 93] and items(other, eve) == [81]
    other.close()


class Finisher:
    """A loop that finishes each message of the ranking topic at once, and dies without a commit."""

    def __init__(self, kafka: KafkaSettings, folder: Path, arena_epoch: int) -> None:
        self.taken: list[int] = []
        self.arena_epoch, self._lives = arena_epoch, True
        topic = kafka.topic(Topic.RANKING)
        self.finished = FinishedOffsets(folder / "finished", TopicIdentity("c", {topic: "id"}), PARTITIONS, self)
        self.finished.begin()
        self._loop = ConsumerLoop(
            lambda on_error: make_group_consumer(
                kafka, f"{topic}.test", "test-loop", None, on_error, {"enable.auto.commit": False}
            ),
            [topic], self, finished_log=self.finished,
        )  # fmt: skip

    def is_held(self) -> bool:
        return self._lives

    def on_message(self, message: Received) -> None:
        self.taken.append(int(message.value or b""))
        self._loop.finish(message.token)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None

    def __enter__(self) -> Finisher:
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lives = False
        self._loop.stop(0)
        assert self._loop.join(30)


@pytest.mark.parametrize("is_whole", [True, False], ids=["the whole disk", "the folder of a partition"])
def test_what_grew_past_the_finished_offset_is_worked_on_and_nothing_twice(
    cluster: KafkaCluster, kafka: KafkaSettings, tmp_path: Path, is_whole: bool
) -> None:
    """What was written within a minute of the predecessor's last note was taken for finished: nobody answered it."""
    place = Place(kafka.topic(Topic.RANKING), 0)
    put(kafka, place, range(4))
    keep(cluster, tmp_path / "copy")
    put(kafka, place, range(4, 10))
    with Finisher(kafka, tmp_path, 1) as first:
        until(lambda: len(first.taken) == 10, "all is worked on")
        until(lambda: noted(kafka, tmp_path, place) == 10, "all is noted as finished")
    put_back(cluster, tmp_path / "copy", *([] if is_whole else [f"{place.topic}-0"]))
    put(kafka, place, range(20, 29))

    with Finisher(kafka, tmp_path, 2) as second:
        until(lambda: 28 in second.taken, "the end is worked on")
    assert second.taken == [*range(20, 29)]


def noted(kafka: KafkaSettings, folder: Path, place: Place) -> int:
    """The finished offset that a successor of the first process finds."""
    found = Finisher(kafka, folder, 2).finished.predecessor().get(place)
    return 0 if found is None else found.finished


def put(kafka: KafkaSettings, place: Place, numbers: Iterable[int]) -> None:
    """Writes numbers, by a client of its own: the lost log knows the sequence of an earlier one."""
    producer = make_producer(kafka, ProducerKind.DURABLE, "test-put")
    for number in numbers:
        producer.produce(place.topic, b"%d" % number, partition=place.partition)
    assert producer.flush(30) == 0


def expire(kafka: KafkaSettings, topic: str, before: int) -> None:
    """Deletes the records of partition 0 below this offset, as retention does."""
    admin = make_admin(kafka, "test-expire")
    [future] = admin.delete_records([TopicPartition(topic, 0, before)]).values()
    assert future.result(30).low_watermark == before


def compact(kafka: KafkaSettings, publisher: Publisher, user: str, offset: int) -> None:
    """Publishes a user of partition 0 until Kafka has dropped the record at this offset, and a later one is there."""
    name = kafka.topic(Topic.HISTORY)
    entries = {"segment.ms": "1", "min.cleanable.dirty.ratio": "0", "min.compaction.lag.ms": "0"}
    changes = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in entries.items()]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=changes)
    admin = make_admin(kafka, "test-compact")
    [done] = admin.incremental_alter_configs([resource]).values()
    done.result(30)

    def is_dropped() -> bool:
        publisher.send(history(user, number=8, length=3))
        found = offsets_of(kafka, name)
        return offset not in found and found[-1] > offset

    until(is_dropped, "the record is compacted")


def offsets_of(kafka: KafkaSettings, topic: str) -> list[int]:
    """The offsets that hold a record, in partition 0."""
    consumer = make_assigned_consumer(kafka, "test-offsets", options={"enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found: list[int] = []

    def is_at_end() -> bool:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            found.append(message.offset() or 0)
        return (
            message is not None and message.error() is not None and message.error().code() == KafkaError._PARTITION_EOF
        )

    until(is_at_end, "read")
    consumer.close()
    return found
