"""`relaygr publish history`: from a log of interactions to histories on the topic."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.cli.publish_history import _last_time_ms, time_option
from relaygr.devbroker import LocalBroker
from relaygr.ingest import publish_log
from relaygr.ingest.publish_log import MAX_FAILURES, Selection, history_of, publish_histories
from relaygr.ingest.reading import read_interactions
from relaygr.kafka.clients import make_assigned_consumer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import SystemClock
from relaygr.schemas.codec import decode
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.history.records import Coverage, assembled
from relaygr.worker.history.rules import Draft
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.options import ContextualFeature
from tests.echo_worker import read_topic
from tests.workers.test_history_follower import following
from tests.worlds.model import small_config

LOG = "userId,movieId,rating,timestamp\n" + "".join(
    f"user-{line % 5},{line},{line % 10 / 2},{1_000_000_000 + line}\n" for line in range(50)
)
BAD = "user-1,7\nuser-2,7,high,1000000000\n"


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """`tests/training/test_collect.py` publishes to a real Kafka."""
    return embedded_broker


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
        "Layout       CSV",
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


def test_logs_of_ratings_and_of_events_in_one_command_are_refused(log: Path, tmp_path: Path) -> None:
    """Publishing and training: code 4 would be two stars and event 4."""
    events = tmp_path / "clicks.csv"
    events.write_text("user,item,time,action\nuser-1,7,1000000000,4\n")
    said = f"{log} and {events} are no one log"
    for command in (
        ["publish", "history", "--interactions", log, "--interactions", events, "--dry-run"],
        ["train", "ranker", log, events, "--out", tmp_path / "run"],
    ):
        result = CliRunner().invoke(app, list(map(str, command)), env={"COLUMNS": "400"})
        assert result.exit_code == 1 and said in result.output
    assert not (tmp_path / "run").exists()
    assert publish(events, "--dry-run").exit_code == publish(log, "--dry-run").exit_code == 0


def test_the_order_of_ties_is_an_option_of_a_log_and_refused_of_a_topic(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\n" + "".join(f"ann,{item},1000000000\n" for item in range(9)))
    assert publish(log, "--dry-run", "--ties", "file").exit_code == 0
    wrong = publish(log, "--dry-run", "--ties", "item")
    assert wrong.exit_code == 1 and "--ties is 'item': give hash or file" in wrong.output
    of_topic = CliRunner().invoke(app, ["publish", "history", "--from", "kafka:clicks", "--ties", "hash"])
    assert of_topic.exit_code == 1 and "Leave out --ties" in of_topic.output


def test_a_dry_run_needs_no_broker_and_writes_the_item_map(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("u::Alien, the::5::1000000000\nu::12::5::1000000001\n")
    items = tmp_path / "items.csv"
    result = publish(log, "--dry-run", "--item-map", str(items), "--bootstrap", "127.0.0.1:1")
    assert result.exit_code == 0, result.output
    assert "Published" not in result.output
    with items.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    read = read_interactions(log)
    assert rows == [["source_id", "item_id"], ["Alien, the", str(read.of(0).items[0])], ["12", "12"]]


# -- with a model ---------------------------------------------------------------------------------


def model_of(folder: Path, items: range = range(50), **changes: object) -> Path:
    config = small_config(**({"vocabulary_size": len(items), "num_actions": 11} | changes))
    save_checkpoint(folder, config, random_checkpoint(config, 0, np.array(items)).tensors)
    return folder


def dry(log: Path, *options: str) -> str:
    result = publish(log, "--dry-run", *options)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_codes_of_a_log_are_printed_with_their_meaning(log: Path, tmp_path: Path) -> None:
    assert "Actions      0, 1, 2, 3, 4, 5, 6, 7, 8, 9 (twice the rating)" in dry(log)
    kuairand = tmp_path / "log_standard.csv"
    kuairand.write_text("user_id,video_id,time_ms,is_click,is_like\n1,2,1650000000000,1,0\n1,3,1650000000001,1,1\n")
    assert "Actions      1, 3 (sums of the bits of the flags)" in dry(kuairand)


def test_a_log_that_a_model_knows_is_published_without_a_word(log: Path, tmp_path: Path) -> None:
    said = dry(log, "--model", str(model_of(tmp_path / "model")))
    assert "does not know" not in said and "unknown" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_actions": 6}, "knows the action codes 0 to 5, but 20 of 50 behaviours of the log have 6, 7, 8, 9"),
        ({"items": range(1_000, 1_050)}, "50 of 50 behaviours are of items that"),
        ({"items": range(26, 76)}, "26 of 50 behaviours are of items that"),
    ],
    ids=["stars that were not doubled in training", "another id space", "half of another id space"],
)
def test_a_log_that_a_model_does_not_know_is_not_published(
    log: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    result = publish(log, "--dry-run", "--model", str(model_of(tmp_path / "model", **changes)))
    assert result.exit_code == 1
    assert said in result.output


def test_new_items_and_missing_features_are_said(log: Path, tmp_path: Path) -> None:
    features = (ContextualFeature(name="country", cardinality=3),)
    said = dry(log, "--model", str(model_of(tmp_path / "model", range(20, 70), contextual_features=features)))
    assert "20 behaviours are of items that the model does not know" in said
    assert "the model has 1 feature values of each user, and a log has none" in said


def test_a_folder_that_is_no_model_is_refused(log: Path, tmp_path: Path) -> None:
    result = publish(log, "--dry-run", "--model", str(tmp_path / "nowhere"))
    assert result.exit_code == 1 and "nowhere" in result.output


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
    for offset, event in enumerate(publish_log._events(read, None)):
        if event.user_id == read.users[0]:
            draft.add(event, offset, 0)
    stored = assembled("user-0", draft.head, draft.head_bytes(), [])
    assert stored.history.behaviours.items.tolist() == [15, 20, 25, 30, 35, 40, 45]
    assert not stored.has_gap


def day(tmp_path: Path, number: int, offset_s: int = 0) -> Path:
    """A day of a log: each of three users has 4 behaviours an hour apart, whose items tell day, hour and user."""
    path = tmp_path / f"day-{number}-{offset_s}.csv"
    path.write_text(
        "userId,movieId,rating,timestamp\n"
        + "".join(
            f"{user},{100 * number + 10 * hour + place},{hour},{MONDAY_S + 86_400 * number + 3600 * hour + offset_s}\n"
            for hour in range(4)
            for place, user in enumerate(("kim", "lou", "max"))
        )
    )
    return path


MONDAY_S = 1_700_438_400
DAYS = [100, 110, 120, 130, 200, 210, 220, 230, 300, 310, 320, 330]


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["embedded"], indirect=True)  # Tests of single days are on a real Kafka, too.
def test_logs_of_several_days_published_in_any_way_become_one_history_of_each_user(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    first, second, third = (day(tmp_path, number) for number in (1, 2, 3))
    store = HistoryStore.open(tmp_path / "store", 16 * 1024 * 1024)

    def publish_and_look(what: str, *logs: Path) -> None:
        options = [text for log in logs[1:] for text in ("--interactions", str(log))]
        result = publish(logs[0], *options, kafka=kafka_settings, what=what)
        assert result.exit_code == 0, result.output

    def shown() -> tuple[list[int], bool]:
        with following(kafka_settings, store):
            pass
        found = [store.get(user) for user in ("kim", "lou", "max")]
        assert all(found)
        items = {tuple((each.history.behaviours.items - place).tolist()) for place, each in enumerate(found) if each}
        assert len(items) == 1
        return list(items.pop()), any(each.has_gap for each in found if each)

    publish_and_look("history", first)
    publish_and_look("behaviours", second)
    assert shown() == (DAYS[:8], False)
    publish_and_look("behaviours", second)
    publish_and_look("behaviours", first, second, third)
    assert shown() == (DAYS, False)
    publish_and_look("history", first)
    assert shown() == (DAYS, False), "the snapshot ends where the first log ends"
    publish_and_look("behaviours", third)
    publish_and_look("history", first, second)
    assert shown() == (DAYS, False)
    publish_and_look("history", first, second, third)
    publish_and_look("history", first)
    assert shown() == (DAYS[:4], True), "what an earlier snapshot had is missing"
    store.close()


def test_a_cut_leaves_later_behaviours_out_and_is_named_in_the_histories(tmp_path: Path) -> None:
    read = read_interactions(day(tmp_path, 1))
    until = read.until((MONDAY_S + 86_400 + 3600) * 1000)
    history = history_of(until, 0, Selection(cut_ms=7))
    assert (history.behaviours.items.tolist(), history.cut_ms) == ([100, 110], 7)
    published = publish(day(tmp_path, 1), "--dry-run", "--cut", "1969-12-31")
    assert "before 1970" in f"{published.output}{published.exception}"
    published = publish(day(tmp_path, 1), "--dry-run", "--cut", str(MONDAY_S))
    assert "is a time in seconds: give it in milliseconds" in f"{published.output}{published.exception}"
    published = publish(day(tmp_path, 1), "--dry-run", "--cut", "2023-11-20")
    assert "contains no interactions" in f"{published.output}{published.exception}"
    assert publish(day(tmp_path, 1), "--dry-run", "--cut", "2023-11-21T01:00").exit_code == 0
    for cut in ("2026", "20231114"):
        published = publish(day(tmp_path, 1), "--dry-run", "--cut", cut)
        assert "no interactions up to 1970-01-01" in f"{published.output}{published.exception}"


@pytest.mark.parametrize("cut", ["4102444800000", "9999-12-31T23:59:59-12:00", "9" * 30])
def test_a_cut_in_the_future_is_refused(tmp_path: Path, cut: str) -> None:
    """Workers would keep none of the behaviours that were streamed after the log was cut."""
    published = publish(day(tmp_path, 1), "--dry-run", "--cut", cut)
    assert published.exit_code == 1
    assert "in the future" in f"{published.output}{published.exception}"


def test_a_cut_is_exact_to_the_millisecond() -> None:
    for ms in range(1000):
        assert time_option("--cut", f"2026-11-27T00:00:00.{ms:03}") == 1_795_737_600_000 + ms


def test_a_log_is_cut_at_its_last_time_that_is_not_in_the_future(tmp_path: Path) -> None:
    """One row of the year 2100 had the histories replace all that was streamed until they were published."""
    log = day(tmp_path, 1)
    last_ms = int(read_interactions(log).behaviours.timestamps_ms.max())
    log.write_text(log.read_text() + "kim,7,1,4102444800\n")
    assert _last_time_ms(read_interactions(log)) == last_ms
    assert "1 behaviours are dated after tomorrow" in publish(log, "--dry-run").output
    log.write_text("kim::7::1::4102444800\n")
    assert abs(_last_time_ms(read_interactions(log)) - SystemClock().wall_us() // 1000) < 60_000


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((19_000, 19_001), "No unit fits"),
        ((5_000_000_000, 5_000_000_001), "read as seconds, all times are from 2128-06-11"),
        ((100_000_000, 200_000_000), "all times are from 1973-03-03"),
    ],
)
@pytest.mark.parametrize("what", ["history", "behaviours"])
def test_a_log_wholly_outside_the_time_of_behaviours_is_refused(
    kafka_settings: KafkaSettings, tmp_path: Path, times: tuple[int, ...], text: str, what: str
) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"u::1::5::{time}\n" for time in times))
    result = publish(log, kafka=kafka_settings, what=what)
    assert result.exit_code == 1
    assert text in f"{result.output}{result.exception}"


@pytest.mark.parametrize(("factor", "unit"), [(1, "seconds"), (10**6, "microseconds")])
def test_a_log_of_milliseconds_in_another_unit_is_refused_with_the_unit(tmp_path: Path, factor: int, unit: str) -> None:
    log = tmp_path / "log"
    log.write_text(
        "user_id,video_id,time_ms,is_click\n" + "".join(f"u,{at},{(MONDAY_S + at) * factor},1\n" for at in range(5))
    )
    result = publish(log, "--dry-run")
    assert result.exit_code == 1
    assert f"As {unit} they would fit" in f"{result.output}{result.exception}"


class FailingProducer:
    """A producer whose queue is full at first, and whose broker takes only some messages."""

    def __init__(self, accepted: int) -> None:
        self.full = 3
        self.accepted = accepted
        self.pending: list = []

    def make(self) -> None:
        pass

    def produce(self, topic, value, key, on_done) -> None:
        if self.full:
            self.full -= 1
            raise BufferError
        self.pending.append(on_done)

    def poll(self, timeout_s: float = 0.0) -> int:
        for on_done in self.pending:
            self.accepted -= 1
            on_done(None if self.accepted >= 0 else KafkaError(KafkaError._MSG_TIMED_OUT), None)
        self.pending.clear()
        return 0

    def flush(self, timeout_s: float) -> int:
        return self.poll(0)


def test_failed_deliveries_are_counted_by_cause_and_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"user-{user}::1::5::1000000000\n" for user in range(300)))
    monkeypatch.setattr(KafkaSession, "durable_producer", lambda *_: FailingProducer(accepted=20))
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
