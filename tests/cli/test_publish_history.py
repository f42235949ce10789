"""`relaygr publish history`: from a log of interactions to histories on the topic."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.interactions import publishing, read_interactions
from relaygr.interactions.publishing import MAX_FAILURES, Selection, history_of, publish_histories
from relaygr.kafka.clients import make_assigned_consumer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.codec import decode
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.history.records import Coverage, Draft, assembled
from tests.echo_worker import read_topic

LOG = "userId,movieId,rating,timestamp\n" + "".join(
    f"user-{line % 5},{line},{line % 10 / 2},{1_000_000_000 + line}\n" for line in range(50)
)
BAD = "user-1,7\nuser-2,7,high,1000000000\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "ratings.csv"
    path.write_text(LOG + BAD)
    return path


def publish(log: Path, *options: str, kafka: KafkaSettings | None = None, what: str = "history") -> Result:
    command = ["publish", what, "--interactions", str(log), *options]
    if kafka is not None:
        command += ["--bootstrap", kafka.bootstrap]
        for name in ("topic_prefix", "partitions", "fetch_wait_max_ms"):
            command += ["--set", f"{name}={getattr(kafka, name)}"]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def published(kafka: KafkaSettings, count: int) -> dict[str, History]:
    """Histories on the topic, the last of each user; each under its key, in murmur2's partition."""
    consumer = make_assigned_consumer(kafka, "test-published")
    topic = kafka.topic(Topic.HISTORY)
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(kafka.partitions)])
    found: dict[str, History] = {}
    give_up_s = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < give_up_s, f"{len(found)} of {count} histories"
        message = consumer.poll(0.05)
        if message is None or message.error() is not None:
            continue
        history = decode(History, message.value())
        key = message.key()
        assert key == history.user_id.encode()
        assert message.partition() == partition_for(key, kafka.partitions)
        found[history.user_id] = history
    consumer.close()
    return found


@pytest.mark.slow
def test_every_user_gets_a_history_numbered_by_its_newest_behaviour(kafka_settings: KafkaSettings, log: Path) -> None:
    result = publish(log, kafka=kafka_settings)
    assert result.exit_code == 0, result.output
    histories = published(kafka_settings, 5)
    assert sorted(histories) == [f"user-{user}" for user in range(5)]
    for user in range(5):
        history = histories[f"user-{user}"]
        assert history.behaviours.items.tolist() == list(range(user, 50, 5))
        assert history.behaviours.actions.tolist() == [line % 10 for line in range(user, 50, 5)]
        assert history.behaviours.timestamps_ms.tolist() == [(1_000_000_000 + i) * 1000 for i in range(user, 50, 5)]
        assert history.number == (1_000_000_045 + user) * 1000
        assert history.features.size == 0
    for text in (
        "Layout       MovieLens ratings.csv",
        "53 lines, 50 interactions, 5 users, 50 items",
        "Time         2001-09-09 01:46:40 to 2001-09-09 01:47:29",
        "P50 10, P90 10, P99 10, longest 10",
        "Bad lines    2, left out",
        "line 52: 2 fields, expected 4",
        "line 53: rating is 'high', expected a number",
        "Published    5 of 5 histories",
    ):
        assert text in result.output


@pytest.mark.slow
def test_users_behaviours_and_number_can_be_chosen(kafka_settings: KafkaSettings, log: Path) -> None:
    result = publish(log, "--users", "2", "--max-behaviours", "3", "--number", "77", kafka=kafka_settings)
    assert result.exit_code == 0, result.output
    histories = published(kafka_settings, 2)
    assert sorted(histories) == ["user-0", "user-1"]
    assert histories["user-1"].behaviours.items.tolist() == [36, 41, 46]
    assert histories["user-1"].number == 77


def test_a_dry_run_needs_no_broker_and_writes_the_item_map(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("u::Alien, the::5::1000000000\nu::12::5::1000000000\n")
    items = tmp_path / "items.csv"
    result = publish(log, "--dry-run", "--item-map", str(items), "--bootstrap", "127.0.0.1:1")
    assert result.exit_code == 0, result.output
    assert "Published" not in result.output
    with items.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    read = read_interactions(log)
    assert rows == [["source_id", "item_id"], ["Alien, the", str(read.of(0).items[0])], ["12", "12"]]


@pytest.mark.slow
def test_without_a_broker_it_says_so_before_it_reads(tmp_path: Path) -> None:
    result = publish(tmp_path / "not read", "--bootstrap", "127.0.0.1:1", "--set", "connect_timeout_s=0.5")
    assert result.exit_code == 1
    assert "Kafka at 127.0.0.1:1 cannot be reached" in f"{result.output}{result.exception}"


def test_without_topics_it_names_the_command_that_makes_them(kafka_settings: KafkaSettings, log: Path) -> None:
    other = kafka_settings.model_copy(update={"topic_prefix": "absent"})
    result = publish(log, kafka=other)
    assert result.exit_code == 1
    assert "relaygr topics create" in f"{result.output}{result.exception}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (LOG + BAD * 60, "more than 100 bad lines"),
        ("userId,movieId,rating,timestamp\n", "contains no interactions"),
        ("prose\n", "the layout is unknown"),
    ],
)
def test_a_log_that_can_not_be_used_publishes_nothing(tmp_path: Path, content: str, text: str) -> None:
    log = tmp_path / "log"
    log.write_text(content)
    result = publish(log, "--dry-run")
    assert result.exit_code == 1
    assert text in f"{result.output}{result.exception}"


def test_the_newest_behaviours_are_kept(log: Path) -> None:
    read = read_interactions(log)
    history = history_of(read, 0, Selection(max_behaviours=4))
    assert history.behaviours.items.tolist() == [30, 35, 40, 45]
    np.testing.assert_array_equal(history.behaviours.items, read.of(0).items[-4:])


def test_behaviours_of_the_log_continue_a_history_without_the_oldest(log: Path) -> None:
    """Both count positions from the beginning of the log, so nothing is added twice and nothing is missing."""
    earlier = log.with_name("earlier.csv")
    earlier.write_text("".join(f"{line}\n" for line in LOG.splitlines()[:36]))
    draft = Draft.of_snapshot(history_of(read_interactions(earlier), 0, Selection(max_behaviours=4)), 0, Coverage())
    read = read_interactions(log)
    for offset, event in enumerate(publishing._events(read, None)):
        if event.user_id == read.users[0]:
            draft.add(event, offset, 0)
    stored = assembled("user-0", draft.head, draft.head_bytes(), [])
    assert stored.history.behaviours.items.tolist() == [15, 20, 25, 30, 35, 40, 45]
    assert not stored.has_gap


class FailingProducer:
    """A producer whose queue is full at first, and whose broker takes only some messages."""

    def __init__(self, accepted: int) -> None:
        self.full = 3
        self.accepted = accepted
        self.pending: list = []

    def produce(self, topic, value, key, on_delivery) -> None:
        if self.full:
            self.full -= 1
            raise BufferError
        self.pending.append(on_delivery)

    def poll(self, timeout_s: float) -> int:
        for on_delivery in self.pending:
            self.accepted -= 1
            on_delivery(None if self.accepted >= 0 else KafkaError(KafkaError._MSG_TIMED_OUT), None)
        self.pending.clear()
        return 0

    def flush(self, timeout_s: float) -> int:
        return self.poll(0)


def test_failed_deliveries_are_counted_by_cause_and_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"user-{user}::1::5::1000000000\n" for user in range(300)))
    monkeypatch.setattr(publishing, "make_producer", lambda *_: FailingProducer(accepted=20))
    report = publish_histories(KafkaSettings(), read_interactions(log), Selection())
    assert (report.offered, report.delivered, report.failed) == (20 + MAX_FAILURES, 20, MAX_FAILURES)
    assert not report.complete
    assert list(report.causes.values()) == [MAX_FAILURES]


@pytest.mark.slow
def test_the_behaviours_of_a_log_are_published_in_the_order_of_time_with_their_positions(
    kafka_settings: KafkaSettings, log: Path
) -> None:
    done = publish(log, "--after-ms", "1000000009000", kafka=kafka_settings, what="behaviours")
    assert done.exit_code == 0, done.output
    assert "40 of 40 behaviours" in done.output
    found = [decode(BehaviourEvent, m.value()) for m in read_topic(kafka_settings, Topic.BEHAVIOURS, 40)]
    assert all(len(event.behaviours) == 1 for event in found)
    own = [event for event in found if event.user_id == "user-3"]
    assert [event.position for event in own] == list(range(2, 10))
    assert [int(event.behaviours.items[0]) for event in own] == list(range(13, 50, 5))
    assert [int(event.behaviours.timestamps_ms[0]) for event in own] == [
        (1_000_000_000 + line) * 1000 for line in range(13, 50, 5)
    ]
