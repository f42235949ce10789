"""`relaygr publish --from kafka:TOPIC`: the JSON of a pipeline becomes behaviours and histories, each record once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, Message, TopicPartition
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.cluster.admin import create_topics
from relaygr.devbroker import BrokerChoice, LocalBroker, local_broker
from relaygr.ingest.bridge import Bridge, Convert, Passed, time_of
from relaygr.ingest.gather import hashed_item
from relaygr.ingest.json_lines import parse_log_object
from relaygr.ingest.log_map import log_map
from relaygr.ingest.log_objects import MappedObjects
from relaygr.kafka.clients import (
    READ_COMMITTED,
    ProducerKind,
    make_admin,
    make_assigned_consumer,
    make_group_consumer,
    make_producer,
)
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.inputs.known import write_action_names
from relaygr.worker.preinfer.source import ShareSource
from tests.echo_worker import read_topic
from tests.waiting import until
from tests.worlds.model import small_config
from tests.worlds.own_broker import own_broker
from tests.worlds.relay import own_topics

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "publishing.md"
T0 = 1_600_000_000_000
MAP = ["--columns", "user=uid,item=sku,time=at,action=event", "--actions", "view=1,buy=2"]
KILLED_RECORDS = 30_000


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    """What a bridge makes of records does not depend on the broker."""
    return any_broker


def source_of(kafka: KafkaSettings) -> str:
    """A topic that the test has for itself: no trigger runs."""
    return kafka.topic(Topic.RETRIEVAL)


def write(kafka: KafkaSettings, records: Sequence[Any], key: str | None = None) -> None:
    producer = make_producer(kafka, ProducerKind.DURABLE, "pipeline")
    for number, record in enumerate(records):
        if number % 5000 == 0:
            assert producer.flush(30) == 0
        value = record if isinstance(record, bytes | None) else json.dumps(record).encode()
        producer.produce(source_of(kafka), value, key)
    assert producer.flush(30) == 0


def words(kafka: KafkaSettings, what: str, *options: str) -> list[str]:
    given = [f"--set={name}={getattr(kafka, name)}" for name in ("topic_prefix", "group_prefix", "partitions")]
    source = f"kafka:{source_of(kafka)}"
    return ["publish", what, "--from", source, "--bootstrap", kafka.bootstrap, *given, *MAP, *options]


def bridge(kafka: KafkaSettings, what: str = "behaviours", *options: str) -> Result:
    return CliRunner().invoke(app, words(kafka, what, "--until-end", *options), catch_exceptions=False)


def events(kafka: KafkaSettings, count: int) -> list[BehaviourEvent]:
    found = read_topic(kafka, Topic.BEHAVIOURS, count)
    assert [message.partition() for message in found] == [
        partition_for(message.key() or b"", kafka.partitions) for message in found
    ]
    return [decode(BehaviourEvent, message.value() or b"") for message in found]


def test_records_become_behaviours_and_a_second_run_goes_on(kafka_settings: KafkaSettings) -> None:
    good = {"uid": "ann", "sku": "B00X", "at": "2020-09-13T12:26:40Z", "event": "buy", "price": 3}
    rounded = json.dumps({**good, "at": 0}).replace('"at": 0', '"at": 1.600e+09').encode()
    bad = [b"{broken", {**good, "event": "gone"}, {"uid": "ann", "event": "buy"}, None, rounded]
    write(kafka_settings, [good, *bad, {**good, "uid": 7, "at": T0 // 1000}])
    done = bridge(kafka_settings)
    assert done.exit_code == 0, done.output
    assert "2 records published, 5 bad ones left out, lag 0" in done.output
    assert "action is 'gone', which --actions gives no code" in done.output
    assert "timestamp '1.600e+09' has lost its last digits" in done.output
    assert "--columns item=sku: there is no such column" in done.output
    first, second = sorted(events(kafka_settings, 2), key=lambda event: event.user_id)
    assert (first.user_id, second.user_id) == ("7", "ann")
    for event in (first, second):
        behaviours = event.behaviours
        assert (behaviours.items[0], behaviours.actions[0], behaviours.timestamps_ms[0]) == (hashed_item("B00X"), 2, T0)
    write(kafka_settings, [{**good, "uid": "bob"}])
    done = bridge(kafka_settings)
    assert "1 records published, 0 bad ones left out, lag 0" in done.output
    assert Counter(event.user_id for event in events(kafka_settings, 3)) == Counter(("7", "ann", "bob"))


@pytest.mark.parametrize(("count", "until_end"), [(30, True), (1000, False)])
def test_a_wrong_map_commits_nothing_and_the_right_one_publishes_all(
    kafka_settings: KafkaSettings, count: int, until_end: bool
) -> None:
    good = {"uid": "ann", "sku": 1, "at": T0, "event": "buy"}
    write(kafka_settings, [b"{broken", *[good] * count], key="ann")
    wrong = [word.replace("sku", "skuu") for word in words(kafka_settings, "behaviours")]
    done = CliRunner().invoke(app, [*wrong, *(["--until-end"] if until_end else [])], catch_exceptions=False)
    said = " ".join(done.output.split())
    assert done.exit_code == 1, done.output
    assert re.search(r"all (31|1,00[01]) records .* offset 0: not JSON", said), done.output
    assert f"move the offsets of the group {kafka_settings.group_prefix}.bridge." in said
    assert said.count("did you mean sku?") == 19, "bad records that are shown, without the broken one"
    done = bridge(kafka_settings)
    assert f"{count:,} records published, 1 bad ones left out, lag 0" in done.output


def test_bad_records_before_the_first_good_one_are_committed_with_it(kafka_settings: KafkaSettings) -> None:
    write(kafka_settings, [b"{broken"], key="bob")
    assert bridge(kafka_settings).exit_code == 1
    write(kafka_settings, [{"uid": "ann", "sku": 1, "at": T0, "event": "buy"}], key="ann")
    assert "1 records published, 1 bad ones left out, lag 0" in bridge(kafka_settings).output
    done = bridge(kafka_settings)
    assert done.exit_code == 0 and "0 records published, 0 bad ones left out, lag 0" in done.output, done.output


def test_a_pipe_of_the_same_objects_becomes_behaviours(kafka_settings: KafkaSettings) -> None:
    line = json.dumps({"uid": "ann", "sku": "B00X", "at": T0, "event": "view"})
    command = [word if not word.startswith("kafka:") else "-" for word in words(kafka_settings, "behaviours")]
    done = CliRunner().invoke(app, command, input=f"{line}\n")
    assert done.exit_code == 0, done.output
    (event,) = events(kafka_settings, 1)
    assert (event.user_id, event.behaviours.items.tolist()) == ("ann", [hashed_item("B00X")])


def test_lines_of_messages_stay_messages_beside_a_model_that_keeps_events(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, seed=1).tensors)
    write_action_names(tmp_path, {"view": 1})
    command = [word if not word.startswith("kafka:") else "-" for word in words(kafka_settings, "behaviours")]
    del command[command.index("--columns") :]
    line = json.dumps({"user_id": "ann", "item": 55, "action": 1, "timestamp_ms": T0})
    done = CliRunner().invoke(app, [*command, "--model", str(tmp_path)], input=f"{line}\n")
    assert done.exit_code == 0, done.output
    assert [event.behaviours.items.tolist() for event in events(kafka_settings, 1)] == [[55]]


def test_the_last_line_says_which_codes_and_how_many_unknown_items_were_published(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, seed=1).tensors)
    write(kafka_settings, [{"uid": "ann", "sku": [1, "B00X"], "at": [T0, T0], "event": ["view", "buy"]}])
    done = bridge(kafka_settings, "behaviours", "--model", str(tmp_path))
    assert "lag 0, action codes 1, 2, 1 of 2 items unknown to the model, group " in done.output, done.output


def test_lists_become_histories_and_an_empty_record_deletes(kafka_settings: KafkaSettings) -> None:
    documented = re.search(
        r"^```jsonl snapshot\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert documented is not None
    lists = {"uid": "ann", "sku": [2, 1], "at": [T0 + 5, T0], "event": ["buy", "view"]}
    write(kafka_settings, [json.loads(documented[1]) | {"uid": "eve"}], key="eve")
    write(kafka_settings, [lists, {**lists, "sku": [1]}], key="ann")
    write(kafka_settings, [None], key="bob")
    done = bridge(kafka_settings, "history")
    assert "3 records published, 1 bad ones left out, lag 0" in done.output
    assert "1 items, 2 actions, 2 times: give as many of each" in done.output
    found = {message.key(): message.value() for message in read_topic(kafka_settings, Topic.HISTORY, 3)}
    assert len(decode(History, found[b"eve"] or b"").behaviours) == 2
    assert found[b"bob"] is None
    history = decode(History, found[b"ann"] or b"")
    assert (history.number, history.cut_ms) == (T0 + 5, T0 + 5)
    assert history.behaviours.items.tolist() == [1, 2] and history.behaviours.actions.tolist() == [1, 2]


def test_a_snapshot_of_ten_thousand_texts_becomes_a_history(kafka_settings: KafkaSettings) -> None:
    snapshot = {
        "uid": "ann",
        "sku": [f"B{number}" for number in range(10_000)],
        "at": ["2020-09-13T12:26:40Z"] * 10_000,
        "event": ["view"] * 10_000,
    }
    write(kafka_settings, [snapshot])
    assert "1 records published, 0 bad ones left out" in bridge(kafka_settings, "history").output
    (found,) = read_topic(kafka_settings, Topic.HISTORY, 1)
    items = decode(History, found.value() or b"").behaviours.items
    assert items.tolist() == [hashed_item(text) for text in snapshot["sku"]]


def test_the_documented_flink_job_has_no_column_of_a_reserved_name() -> None:
    (job,) = re.findall(
        r"^```\n(CREATE TABLE events.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    names = set(re.findall(r"[(,]\s*(\w+) (?:STRING|TIMESTAMP|ARRAY<)", job))
    assert names == {"uid", "sku", "event", "ts"}, "at is a keyword of Flink SQL"


def test_a_topic_that_is_not_there_is_a_sentence(kafka_settings: KafkaSettings) -> None:
    for given, said in (
        ("kafka:nowhere-at-all", "refuses the topic of --from kafka:nowhere-at-all: "),
        (f"kafka:{kafka_settings.topic(Topic.HISTORY)}", "is the topic that is written"),
        ("file.jsonl", "expected kafka:TOPIC"),
    ):
        done = CliRunner().invoke(app, [*words(kafka_settings, "history"), "--from", given])
        assert done.exit_code == 1 and said in done.output.replace("\n", ""), done.output


@pytest.mark.parametrize(
    ("source", "option", "where"),
    [
        (["--from", "kafka:there"], "--rate", "--from kafka:TOPIC"),
        (["--from", "kafka:there"], "--after-ms", "--from kafka:TOPIC"),
        (["--from", "lines.jsonl"], "--after-ms", "--from FILE"),
        (["--from", "lines.jsonl"], "--schema-registry", "--from FILE"),
        (["--interactions", "log.csv"], "--rate", "--interactions"),
    ],
)
def test_an_option_of_another_kind_of_source_is_refused(source: list[str], option: str, where: str) -> None:
    done = CliRunner().invoke(app, ["publish", "behaviours", *source, option, "5"])
    assert done.exit_code == 1
    assert f"Leave out {option}: without effect with {where}." in done.output.replace("\n", " ")


@pytest.mark.kafka
def test_a_bridge_that_is_killed_goes_on_and_each_record_counts_once(real_settings: KafkaSettings) -> None:
    """Killed in the middle of its work, twice: what a reader of committed records sees has no gap and no repeat."""
    kafka = real_settings
    write(kafka, [{"uid": f"u{n % 50}", "sku": n, "at": T0 + n, "event": "view"} for n in range(KILLED_RECORDS)])
    for least in (1, KILLED_RECORDS // 3):
        process = subprocess.Popen([sys.executable, "-m", "relaygr", *words(kafka, "behaviours")])
        try:
            until(
                lambda least=least: len(committed_items(kafka, least)) >= least, f"{least} records are committed", 120
            )
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
    before = len(committed_items(kafka, KILLED_RECORDS, idle_s=2.0))
    done = bridge(kafka)
    assert done.exit_code == 0 and "lag 0" in done.output, done.output
    assert sorted(committed_items(kafka, KILLED_RECORDS + 1, idle_s=5.0)) == list(range(KILLED_RECORDS))
    assert before < KILLED_RECORDS, "the bridge had ended before it was killed: raise KILLED_RECORDS"


def direct(
    kafka: KafkaSettings,
    convert: Convert,
    on_published: Callable[[Passed], None] = lambda _: None,
    tell: Callable[[str], None] = print,
) -> Bridge:
    return Bridge(kafka, f"kafka:{source_of(kafka)}", kafka.topic(Topic.BEHAVIOURS), convert, on_published, tell)


def passed_on(record: Message) -> Passed:
    return Passed(record.key() or b"", record.value())


def ten_records(kafka: KafkaSettings) -> None:
    write(kafka, [{"uid": "ann", "sku": n, "at": T0 + n, "event": "view"} for n in range(10)], key="ann")


@pytest.mark.kafka
def test_a_broker_that_is_away_for_longer_than_a_call_may_take_does_not_end_a_bridge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relaygr.ingest.bridge._TIMEOUT_S", 0.2)
    paused: list[int] = []
    resumed = threading.Event()

    def convert(record: Message) -> Passed:
        if not paused:
            paused.append(broker_pid)
            os.kill(broker_pid, signal.SIGSTOP)
            threading.Timer(2.0, lambda: (os.kill(broker_pid, signal.SIGCONT), resumed.set())).start()
        return Passed(b"ann", record.value())

    before = set(psutil.Process().children(recursive=True))
    with local_broker(BrokerChoice.KAFKA) as broker:
        started = set(psutil.Process().children(recursive=True)) - before
        (broker_pid,) = (child.pid for child in started if child.name() == "java")
        kafka = broker.settings(KafkaSettings(topic_prefix="away", group_prefix="away", partitions=2))
        broker.create_topics(kafka)
        ten_records(kafka)
        done = direct(kafka, convert).run(until_end=True, stopping=lambda: False)
    assert resumed.is_set() and (done.published, done.lag) == (10, 0)


@pytest.mark.kafka
def test_a_bridge_that_the_group_has_removed_joins_again_and_counts_each_record_once(
    real_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a broker that was away for longer than the session of the group."""
    monkeypatch.setattr("relaygr.kafka.clients._REBALANCE_MS", 6000)
    ten_records(real_settings)
    write(real_settings, [b"{broken"], key="ann")
    mapped, slow = MappedObjects(log_map(MAP[1], MAP[3])), [8.0]

    def convert(record: Message) -> Passed:
        time.sleep(slow.pop() if slow else 0)
        event = mapped.event(parse_log_object(record.value() or b""), T0)
        return Passed(event.user_id.encode(), encode(event), event)

    told: list[Passed] = []
    done = direct(real_settings, convert, told.append).run(until_end=True, stopping=lambda: False)
    assert (done.published, done.bad, done.lag) == (10, 1, 0)
    assert [item for each in told if each.made for item in each.made.behaviours.items.tolist()] == list(range(10))
    assert committed_items(real_settings, 11, idle_s=3.0) == list(range(10))


@pytest.mark.kafka
def test_a_bridge_that_another_one_fences_says_so(real_settings: KafkaSettings) -> None:
    def convert(record: Message) -> Passed:
        if not second:
            second.append(direct(real_settings, convert))
            second[0].run(until_end=False, stopping=lambda: True)
        return Passed(b"ann", record.value())

    second: list[Bridge] = []
    ten_records(real_settings)
    first = direct(real_settings, convert)
    with pytest.raises(RelayError, match=f"another bridge from .* runs, with the same group {first.group}") as caught:
        first.run(until_end=True, stopping=lambda: False)
    assert "It needs Read" not in str(caught.value)


@pytest.mark.kafka
def test_records_that_were_deleted_before_they_were_read_are_told_and_counted(real_settings: KafkaSettings) -> None:
    ten_records(real_settings)
    assert direct(real_settings, passed_on).run(until_end=True, stopping=lambda: False).lost == 0
    ten_records(real_settings)
    place = TopicPartition(source_of(real_settings), partition_for(b"ann", real_settings.partitions), 15)
    admin = make_admin(real_settings, "retention")
    (deleted,) = admin.delete_records([place]).values()
    assert deleted.result(30).low_watermark == 15
    told: list[str] = []
    bridge = direct(real_settings, passed_on, tell=told.append)
    done = bridge.run(until_end=True, stopping=lambda: False)
    assert (done.published, done.bad, done.lost) == (5, 0, 5)
    assert "those from offset 10 to 14 were deleted before they were read" in told[0]
    assert ", 5 deleted before they were read, lag 0" in bridge.text()


@pytest.mark.parametrize(("time_ms", "expected_ms"), [(-1, None), (0, None), (T0, T0), (T0 // 1000, T0)])
def test_a_timestamp_that_cannot_be_true_counts_as_none(time_ms: int, expected_ms: int | None) -> None:
    before_ms = int(time.time() * 1000)
    found_ms = time_of(Message(timestamp=(TIMESTAMP_CREATE_TIME, time_ms)))
    assert found_ms == expected_ms or (expected_ms is None and before_ms <= found_ms <= before_ms + 5000)


@pytest.mark.kafka
def test_a_message_that_is_too_large_for_the_target_is_left_out_and_the_others_go_on(real_broker: LocalBroker) -> None:
    """Kafka refuses the whole batch, so the bridge ended at this record, after each start again."""
    limits: dict[str, dict[str, int | str | None]] = {"behaviours": {"max.message.bytes": 2000}}
    with own_topics(real_broker, topic_settings=limits) as kafka:
        write(kafka, [b"%d" % n if n % 4 else b"x" * 5000 for n in range(10)], key="ann")
        told: list[str] = []
        bridge = direct(kafka, passed_on, tell=told.append)
        done = bridge.run(until_end=True, stopping=lambda: False)
        assert (done.published, done.bad, done.lag) == (7, 3, 0), told
        assert re.search(
            r"offset 8: its message of 5,000 bytes is larger than max.message.bytes of .*behaviours", told[2]
        )
        options = {**READ_COMMITTED, "enable.partition.eof": True}
        consumer = make_assigned_consumer(kafka, "reader", options=options)
        consumer.assign([TopicPartition(kafka.topic(Topic.BEHAVIOURS), partition_for(b"ann", kafka.partitions), 0)])
        values = []
        while (message := consumer.poll(30)) is not None and message.error() is None:
            values.append(message.value())
        consumer.close()
        assert values == [b"%d" % n for n in range(10) if n % 4]


@pytest.mark.kafka
@pytest.mark.parametrize("affinity", [Affinity.RANGE, Affinity.CONSUMER_PROTOCOL])
def test_the_end_is_reached_when_the_group_has_given_all_partitions(
    real_settings: KafkaSettings, affinity: Affinity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bridge beside one that had died read its share of the partitions, and ended as if that were all."""
    monkeypatch.setattr("relaygr.ingest.bridge._SHOW_S", 0.2)
    kafka = real_settings.model_copy(update={"affinity": affinity})
    for user in range(20):
        write(kafka, [b"1"], key=f"user-{user}")
    group = direct(kafka, passed_on).group
    other = make_group_consumer(kafka, group, "other", options={"enable.auto.commit": False})
    other.subscribe([source_of(kafka)])
    until(lambda: len(other.assignment()) == kafka.partitions, "it has all", meanwhile=lambda: other.poll(0.1))
    leaving = threading.Event()

    def stay() -> None:
        while not leaving.is_set():
            other.poll(0.1)
        other.close()

    staying = threading.Thread(target=stay)
    staying.start()
    try:
        with monkeypatch.context() as patch, pytest.raises(RelayError, match=f"same group {group}: let only one run"):
            patch.setattr("relaygr.ingest.bridge._SESSION_S", 1.0)
            direct(kafka, passed_on).run(until_end=True, stopping=lambda: False)
        told: list[str] = []
        last = direct(kafka, passed_on, tell=lambda text: (told.append(text), "waits for 2" in text and leaving.set()))
        last.run(until_end=True, stopping=lambda: False)
    finally:
        leaving.set()
        staying.join()
    assert any("waits for 2 partitions" in text for text in told), told
    consumer = make_group_consumer(kafka, group, "reader")
    places = [TopicPartition(source_of(kafka), partition) for partition in range(kafka.partitions)]
    assert sum(max(0, each.offset) for each in consumer.committed(places, timeout=30)) == 20
    consumer.close()


@pytest.fixture
def real_settings(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    """The embedded cluster hands out records of aborted transactions, too."""
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=4))
    real_broker.create_topics(kafka)
    yield kafka
    real_broker.delete_topics(kafka)


def committed_items(kafka: KafkaSettings, count: int, idle_s: float = 1.0) -> list[int]:
    """The items of committed behaviours: `count` at least, or what there is after a pause."""
    name = kafka.topic(Topic.BEHAVIOURS)
    consumer = make_assigned_consumer(kafka, "reader", options=READ_COMMITTED)
    consumer.assign([TopicPartition(name, partition, 0) for partition in range(kafka.partitions)])
    found: list[int] = []
    while len(found) < count and (messages := consumer.consume(5000, idle_s)):
        for message in messages:
            if message.error() is None:
                found += decode(BehaviourEvent, message.value() or b"").behaviours.items.tolist()
    consumer.close()
    return found


@pytest.mark.kafka
@pytest.mark.outage
def test_brokers_that_cannot_keep_the_state_of_transactions_and_share_groups_are_named_and_nothing_waits_in_silence(
    tmp_path: Path,
) -> None:
    """A member of the share group counted as free, and the bridge waited without a word."""
    transactions, shares = (
        "transaction.state.log.replication.factor",
        "share.coordinator.state.topic.replication.factor",
    )
    with own_broker({}, {transactions: "4", shares: "2"}) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap, partitions=2)
        found = [finding.what for finding in create_topics(kafka).findings]
        assert [
            any(f"{key}={count}, but 1 broker is up" in what for what in found)
            for key, count in ((transactions, 4), (shares, 2))
        ] == [True, True]
        log = tmp_path / "bridge.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "relaygr", *words(kafka, "behaviours", "--until-end")],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        source = pool_source(kafka)
        try:
            until(lambda: "waits for Kafka" in log.read_text(), "the bridge says what it waits for")
            assert "`relaygr topics check`" in log.read_text()
            for _ in range(20):
                assert source.next(0.2) is None and not source.has_jobs
        finally:
            process.terminate()
            assert process.wait(60) == 1
            source.close()


@pytest.mark.kafka
def test_a_member_of_a_share_group_counts_once_kafka_has_given_it_the_partition(real_broker: LocalBroker) -> None:
    with own_topics(real_broker) as kafka:
        source = pool_source(kafka)
        assert not source.has_jobs
        until(lambda: source.has_jobs, "Kafka gives it the partition", meanwhile=lambda: source.next(0.2))
        source.close()


def pool_source(kafka: KafkaSettings) -> ShareSource:
    return ShareSource(KafkaSession(kafka, "test"), "pre-infer")
