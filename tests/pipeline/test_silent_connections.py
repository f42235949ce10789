"""Connections to Kafka that stay open and pass nothing are replaced within seconds. A broker that is only slow neither
doubles nor loses a message.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from relaygr.cluster.admin import check_topics, create_topics
from relaygr.devbroker.local import free_ports
from relaygr.ingest.bridge import Bridge, Passed
from relaygr.kafka.clients import ONE_A_BATCH, ProducerKind, make_assigned_consumer, make_group_consumer, make_producer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, is_ready
from relaygr.schemas.topics import Topic
from relaygr.worker.preinfer.decision import Verdict
from relaygr.worker.preinfer.source import ShareSource
from tests.waiting import until
from tests.worlds.broker_proxy import Behind, broker_behind_proxy
from tests.worlds.relay import Relay, reading

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

PRODUCE, CREATE_TOPICS, DESCRIBE_CONFIGS = 0, 19, 32
SOON_S = 25
"""Long enough for a busy machine. librdkafka itself waits for a minute."""
SLOW_S = 4.0
LONGER_THAN_A_CLIENT_WAITS_S = 14.0
COUNT = 40
CUTS = 4


@pytest.fixture(scope="module")
def behind() -> Iterator[Behind]:
    with broker_behind_proxy("silent") as behind:
        assert create_topics(behind.direct).ok
        yield behind


@dataclass(frozen=True)
class Ranked:
    """A caller of `relaygr gateway`."""

    port: int

    def __call__(self) -> bool:
        body = json.dumps({"user_id": "ann", "candidates": [1, 2, 3], "budget_ms": 800}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/rank", body)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False


def unready(child: CommandProcess) -> str:
    """What the process says that it waits for."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{child.port}/readyz", timeout=10) as answer:
            checks = json.load(answer)["checks"]
    except urllib.error.HTTPError as error:
        checks = json.load(error)["checks"]
    return "; ".join(f"{check['name']}: {check['detail']}" for check in checks if not check["ok"])


def lines(child: CommandProcess, text: str) -> int:
    return child.log.read_text().count(text)


def test_connections_that_pass_nothing_are_replaced_within_seconds_and_said(
    behind: Behind, model: Path, tmp_path: Path
) -> None:
    with Relay(behind.proxied, tmp_path / "relay", model) as relay:
        worker, trigger = relay.start_worker(), relay.start_trigger()
        (port,) = free_ports(1)
        gateway = relay.processes.start("gateway", ["gateway"], "gateway", [f"gateway.listen_port={port}"])
        lag = relay.processes.start("lag", ["lag", "serve"], "lag")
        children = (worker, trigger, gateway)
        relay.await_ready(*children, lag)
        is_ranked = Ranked(port)
        until(is_ranked, "a request is ranked")
        with relay.client() as client:
            decided = decisions(trigger)
            behind.proxy.freeze(with_new=True)
            silent = dict(zip(children, ("worker-00-results", "trigger-00-jobs", "gateway-http-00"), strict=True))
            until(lambda: all(f"{text} for" in unready(child) for child, text in silent.items()), "they say it")
            assert not is_ranked()
            behind.proxy.freeze()
            until(is_ranked, "requests are ranked again", SOON_S)
            relay.await_ready(*children)
            for child in children:
                until(partial(lines, child, "kafka answers again"), f"{child.name} says so")
                assert lines(child, "kafka answers again") == lines(child, "kafka does not answer") == 1
            published = partial(
                client.publish_retrieval,
                "ann",
                expected_ranking_in_ms=100,
                expected_candidates=3,
                expected_suffix=0,
                ranking_budget_ms=100,
            )
            until(lambda: decisions(trigger) > decided, "events are decided on again", SOON_S, published)
            until(lambda: is_ready(lag.port), "lag is measured again", SOON_S)


def decisions(trigger: CommandProcess) -> float:
    return reading(trigger).total("relaygr_trigger_decisions_total")


def test_a_slow_broker_neither_doubles_nor_loses_a_message(behind: Behind) -> None:
    """One acknowledgement is slower than a client waits, so its batch is sent again. The others take a few seconds, as
    do the join of a group, and the admin requests.
    """
    kafka, direct = (each.model_copy(update={"topic_prefix": "slow"}) for each in (behind.proxied, behind.direct))
    other, proxy = kafka.model_copy(update={"topic_prefix": "later"}), behind.proxy
    assert create_topics(direct).ok
    with ThreadPoolExecutor(8) as threads, joined(kafka) as waits_for:
        proxy.delay({PRODUCE}, LONGER_THAN_A_CLIENT_WAITS_S)
        slowest = threads.submit(produce, kafka, ProducerKind.DURABLE, Topic.HISTORY)
        until(lambda: sum(records(direct, Topic.HISTORY).values()) > 0, "the broker has the first batch")
        proxy.delay({PRODUCE, CREATE_TOPICS, DESCRIBE_CONFIGS}, SLOW_S)
        slow = [
            threads.submit(produce, kafka, ProducerKind.DURABLE, Topic.RETRIEVAL),
            threads.submit(produce, kafka, ProducerKind.PREINFER, Topic.PREINFER),
        ]
        created = threads.submit(create_topics, other)
        joining = threads.submit(waits_for)
        assert slowest.result() == slow[0].result() == COUNT
        # Jobs are given up after five seconds, which a busy machine takes, but they are sent once.
        slow[1].result()
        assert created.result().ok and check_topics(other).ok
        assert joining.result() == 1
    expected = Counter(map(key_of, range(COUNT)))
    for topic in (Topic.HISTORY, Topic.RETRIEVAL, Topic.PREINFER):
        assert records(direct, topic) == expected


@pytest.fixture
def fresh() -> Iterator[Behind]:
    """A broker whose connections a test may cut, or leave open: the proxy's new threads are the test's own."""
    with broker_behind_proxy("unacked") as behind:
        yield behind


def test_messages_whose_acknowledgements_are_lost_are_in_the_log_once(fresh: Behind) -> None:
    """Without idempotence eleven of 5,000 were there twice."""
    kafka, direct, proxy = fresh.proxied, fresh.direct, fresh.proxy
    assert create_topics(direct).ok
    producer, delivered = KafkaSession(kafka, "test").durable_producer("test"), list[KafkaError | None]()
    producer.connect(kafka.topic(Topic.HISTORY), kafka.connect_timeout_s)

    def send() -> None:
        key = key_of(len(delivered) + len(producer))
        producer.produce(kafka.topic(Topic.HISTORY), b"value", key, lambda error, _: delivered.append(error))
        producer.poll(0.002)

    def lose_acknowledgements() -> None:
        # A lost answer to its handshake would keep the client from writing.
        sent = len(delivered) + len(producer)
        until(lambda: len(delivered) > sent, "the client is connected", meanwhile=send)
        proxy.swallows = True
        until(lambda: records(direct, Topic.HISTORY).total() > len(delivered), "one is in the log", meanwhile=send)
        proxy.cut()
        proxy.listen()

    for _ in range(CUTS):
        lose_acknowledgements()
    assert producer.flush(60) == 0
    assert set(delivered) == {None}
    assert records(direct, Topic.HISTORY) == Counter(map(key_of, range(len(delivered))))


def test_a_bridge_and_a_slot_of_a_pre_infer_worker_go_on_after_connections_that_pass_nothing(fresh: Behind) -> None:
    kafka, direct = fresh.proxied, fresh.direct
    assert create_topics(direct).ok
    source, target = kafka.topic(Topic.RETRIEVAL), kafka.topic(Topic.BEHAVIOURS)
    bridge = Bridge(
        kafka, f"kafka:{source}", target, lambda record: Passed(b"ann", record.value()), lambda _: None, print
    )
    slot, stopping, taken = ShareSource(KafkaSession(kafka, "test"), "slot"), threading.Event(), set[bytes | None]()

    def take() -> None:
        if (job := slot.next(0.1)) is not None:
            taken.add(job.value())
            slot.end(job, Verdict.ACCEPT)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(bridge.run, until_end=False, stopping=stopping.is_set)
        try:
            send(direct, Topic.RETRIEVAL, b"first")
            until(lambda: slot.has_jobs, "the slot has its partition", meanwhile=take)
            # A share group begins at the end of its topic.
            until(lambda: taken, "a job", meanwhile=lambda: (send(direct, Topic.PREINFER_POOL, b"first"), take()))
            until(lambda: bridge.report.published == 1, "a record is passed on")
            fresh.proxy.freeze()
            send(direct, Topic.RETRIEVAL, b"second")
            send(direct, Topic.PREINFER_POOL, b"second")
            until(lambda: b"second" in taken, "another job", SOON_S, meanwhile=take)
            # A producer of durable messages waits for ten seconds, and twice: for the partition and for the group.
            until(lambda: bridge.report.published == 2, "another record is passed on", 2 * SOON_S)
        finally:
            stopping.set()
            slot.close()
        assert running.result().published == 2
    assert records(direct, Topic.BEHAVIOURS) == {b"ann": 2}


def send(kafka: KafkaSettings, topic: Topic, value: bytes) -> None:
    producer = make_producer(kafka, ProducerKind.DURABLE, "test-send", options=ONE_A_BATCH)
    producer.produce(kafka.topic(topic), value, b"ann")
    assert producer.flush(30) == 0


def key_of(number: int) -> bytes:
    return f"user-{number}".encode()


def produce(kafka: KafkaSettings, kind: ProducerKind, topic: Topic) -> int:
    """How many of `COUNT` messages are reported as delivered."""
    producer, delivered = make_producer(kafka, kind, f"test-{topic}"), list[KafkaError | None]()
    for number in range(COUNT):
        producer.produce(
            kafka.topic(topic), b"value", key_of(number), on_delivery=lambda error, _: delivered.append(error)
        )
    producer.flush(60)
    return delivered.count(None)


def records(kafka: KafkaSettings, topic: Topic) -> Counter[bytes | None]:
    """The records of a topic by key."""
    consumer = make_assigned_consumer(kafka, "test-records", options={"enable.partition.eof": True})
    places = [TopicPartition(kafka.topic(topic), partition, OFFSET_BEGINNING) for partition in range(kafka.partitions)]
    consumer.assign(places)
    found, ended = Counter[bytes | None](), 0
    while ended < len(places):
        message = consumer.poll(20)
        assert message is not None
        if message.error() is None:
            found[message.key()] += 1
        else:
            ended += 1
    consumer.close()
    return found


@contextmanager
def joined(kafka: KafkaSettings) -> Iterator[Callable[[], int]]:
    """A member of a group that polls no more. The function joins as a second one, and returns how many partitions it
    gets when the first one polls again, after more than a client waits for other answers.
    """
    first, second = (make_group_consumer(kafka, "slow.group", name) for name in ("first", "second"))

    def poll(*members: Consumer) -> None:
        for member in members:
            member.poll(0.1)

    def join() -> int:
        second.subscribe([kafka.topic(Topic.RANKING)])
        ends_s = time.monotonic() + SLOW_S
        while time.monotonic() < ends_s:
            poll(second)
        assert len(first.assignment()) == kafka.partitions and not second.assignment()
        until(lambda: len(second.assignment()) == 1, "both have partitions", meanwhile=lambda: poll(first, second))
        return len(second.assignment())

    try:
        first.subscribe([kafka.topic(Topic.RANKING)])
        until(first.assignment, "the first one has joined", meanwhile=lambda: poll(first))
        yield join
    finally:
        first.close()
        second.close()
