"""The history follower on logs with transactions, and on topics that are deleted and created again."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY

from relaygr.cluster.topic_identity import TopicIdentityWatch, identify_topics
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import PARTITIONER
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.history.store import HistoryStore
from tests.waiting import until
from tests.workers.test_history_follower import MIB, Publisher, Reported, following, history

pytestmark = pytest.mark.kafka

TOPICS = (Topic.HISTORY, Topic.BEHAVIOURS)


@pytest.fixture
def kafka(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    settings = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=4))
    real_broker.create_topics(settings)
    yield settings
    real_broker.delete_topics(settings)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 16 * MIB)
    yield opened
    opened.close()


class Pipeline(Publisher):
    """Publishes in transactions."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__(kafka)
        self._producer = Producer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "transactional.id": uuid.uuid4().hex,
                "partitioner": PARTITIONER,
            }
        )
        self._producer.init_transactions(30)
        self.begin = self._producer.begin_transaction
        self.commit = self._producer.commit_transaction
        self.abort = self._producer.abort_transaction


def items(store: HistoryStore, user_id: str) -> list[int] | None:
    stored = store.get(user_id)
    return None if stored is None else stored.history.behaviours.items.tolist()


def behind(topic: str) -> float:
    return REGISTRY.get_sample_value("relaygr_history_behind_offsets", {"topic": topic}) or 0.0


@contextmanager
def watching(kafka: KafkaSettings, follower: HistoryFollower) -> Iterator[None]:
    names = [kafka.topic(topic) for topic in TOPICS]
    watch = TopicIdentityWatch(
        KafkaSession(kafka, "test"), identify_topics(kafka, names, "test", 10), "test-ids", follower.read_anew
    )
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def publish_and_abort(pipeline: Pipeline) -> None:
    pipeline.begin()
    pipeline.act("grows", 901, 902)
    pipeline.send_raw(b"stays", None)
    pipeline.send(history("never", length=200), history("stays", number=9))
    pipeline.abort()


def test_what_was_aborted_does_not_exist_whether_it_was_read_live_or_after_a_restart(
    kafka: KafkaSettings, store: HistoryStore, tmp_path: Path
) -> None:
    """A user was deleted by a transaction that was aborted."""
    pipeline, reported = Pipeline(kafka), Reported()
    pipeline.begin()
    pipeline.send(history("stays"), history("grows", length=3))
    pipeline.commit()
    kept = history("stays").behaviours.items.tolist()
    with following(kafka, store, reported):
        publish_and_abort(pipeline)
        pipeline.begin()
        pipeline.act("grows", 101, 102)
        pipeline.commit()
        until(lambda: items(store, "grows") == [1, 2, 3, 101, 102], "what was committed is appended")
        assert items(store, "stays") == kept and items(store, "never") is None
        assert reported.deleted == []
    publish_and_abort(pipeline)
    rebuilt = HistoryStore.open(tmp_path / "rebuilt", 16 * MIB)
    for each in (store, rebuilt):
        with following(kafka, each):
            assert items(each, "grows") == [1, 2, 3, 101, 102]
            assert items(each, "stays") == kept and items(each, "never") is None
    rebuilt.close()


def test_it_catches_up_with_the_last_stable_offset_and_says_how_much_is_behind(
    kafka: KafkaSettings, store: HistoryStore
) -> None:
    """The open transaction of another pipeline must not keep a worker from being ready."""
    plain, pipeline = Publisher(kafka), Pipeline(kafka)
    plain.send(history("user", length=2))
    pipeline.begin()
    pipeline.act("user", 51)
    pipeline.send(history("other"))
    plain.act("user", 52)
    with following(kafka, store) as follower:
        assert follower.loading == frozenset()
        assert items(store, "user") == [1, 2]
        until(lambda: behind("behaviours") == 2 and behind("history") == 1, "the metric says so")
        pipeline.commit()
        until(lambda: items(store, "user") == [1, 2, 51, 52], "both are appended, in the order of the log")
        until(lambda: items(store, "other") is not None, "and the history is stored")
        until(lambda: behind("behaviours") == behind("history") == 0, "nothing is behind")


@pytest.mark.parametrize("length", [1, 2, 30], ids=["shorter", "of equal length", "longer"])
def test_topics_that_are_made_anew_replace_every_history(
    kafka: KafkaSettings,
    store: HistoryStore,
    real_broker: LocalBroker,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
) -> None:
    """The follower read on in the new logs from its offsets in the old ones: what was before them was missing."""
    monkeypatch.setattr("relaygr.cluster.topic_identity.INTERVAL_S", 0.2)
    publisher, reported = Publisher(kafka), Reported()
    for number in (1, 2):
        publisher.send(history("user", number=number))
        publisher.act("user", 700 + number)
    publisher.send(history("gone"))
    with following(kafka, store, reported) as follower, watching(kafka, follower):
        until(lambda: 702 in (items(store, "user") or []), "read")
        reported.missed.clear()
        real_broker.delete_topics(kafka)
        real_broker.create_topics(kafka)
        anew = Publisher(kafka)
        anew.send(history("user", number=1000, length=3))
        for number in range(length):
            anew.act("user", 2000 + number)
        wanted = [1000, 1001, 1002, *range(2000, 2000 + length)]
        # Also those whose offsets are in the range of the new log.
        until(lambda: set(reported.missed) == set(range(kafka.partitions)), "every partition is read anew")
        until(lambda: not follower.loading and items(store, "user") == wanted, "the histories of the new topics alone")
        assert items(store, "gone") is None


def test_a_gap_in_the_behaviours_is_not_a_missing_behaviour(kafka: KafkaSettings, store: HistoryStore) -> None:
    pipeline = Pipeline(kafka)
    pipeline.begin()
    pipeline.send(history("user", length=2))
    pipeline.commit()
    for item in (11, 12):
        pipeline.begin()
        pipeline.act("user", 999)
        pipeline.abort()
        pipeline.begin()
        pipeline.act("user", item)
        pipeline.commit()
    with following(kafka, store):
        stored = store.get("user")
        assert stored is not None and not stored.has_gap
        assert items(store, "user") == [1, 2, 11, 12]
