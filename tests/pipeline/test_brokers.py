"""A cluster of three brokers under load loses one, is restarted broker by broker, and keeps one of three.

Every request has one end, and none that Kafka acknowledged stays without an answer. What a durable topic acknowledged
is still there, and the worker keeps its prefixes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message, Producer, TopicPartition
from pydantic import ByteSize

from relaygr.client import ClientSettings, Ended, LostRequest, RankOutcome, Reason, RelayClient
from relaygr.cluster.admin import check_topics, create_topics
from relaygr.cluster.topic_check import Severity
from relaygr.devbroker.kafka import KafkaCluster
from relaygr.kafka.clients import ProducerKind, make_admin, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, is_ready
from relaygr.schemas import messages
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.own_broker import own_cluster
from tests.worlds.relay import PARTITIONS, Relay, candidates_of, history_of, new_user, reading
from tests.worlds.steady_traffic import Steady

pytestmark = [pytest.mark.kafka, pytest.mark.outage, pytest.mark.timeout(480)]

USERS = [f"user-{number:02d}" for number in range(30)]
HISTORY = 100
RATE = 30
BUDGET_MS = 1_500
WAIT_S = 120
ON_CACHED_PREFIX = (messages.Path.HBM, messages.Path.DRAM, messages.Path.PENDING)


class Load(Steady):
    """Impressions: an event each, and its request two turns later. At times a new user's history, and garbage."""

    def __init__(self, kafka: KafkaSettings, client: RelayClient) -> None:
        super().__init__(1 / RATE)
        self._kafka, self._client = kafka, client
        self._requests: list[tuple[float, str, Future[RankOutcome]]] = []
        self.published: list[str] = []
        self.acknowledged: list[str] = []
        """Users whose history Kafka acknowledged."""
        self.garbage: list[tuple[str, int, int]] = []
        """The coordinates of garbage that Kafka acknowledged."""
        self.refused: list[str] = []
        """Why messages were not acknowledged."""
        self._raw: Producer = make_producer(kafka, ProducerKind.DURABLE, "test-garbage")
        self._announced: list[tuple[str, str]] = []

    def outcomes(self) -> list[RankOutcome]:
        """The one end of each request."""
        return [future.result(WAIT_S) for _, _, future in self._requests]

    def await_ranked(self) -> None:
        """Waits until a request that is sent from now on is ranked, for every user."""
        since_s = time.monotonic()

        def ranked() -> set[str]:
            ended = [(user, future) for sent_s, user, future in self._requests if sent_s >= since_s and future.done()]
            return {user for user, future in ended if future.result().status is Ended.RANKED}

        until(lambda: ranked() == set(USERS), "every user's request is ranked", WAIT_S)

    def flush(self) -> None:
        """Waits for what waits for acknowledgement."""
        assert self._raw.flush(WAIT_S) == 0
        until(
            lambda: len(self.acknowledged) + len(self.refused) == len(self.published),
            "each history acknowledged or refused",
            WAIT_S,
        )
        assert all("run `relaygr topics check`" in sentence for sentence in self.refused)

    def send(self, number: int) -> None:
        user = USERS[number % len(USERS)]
        event = self._client.publish_retrieval(
            user, ranking_budget_ms=BUDGET_MS, expected_ranking_in_ms=50, expected_candidates=20, expected_suffix=0
        )
        self._announced.append((user, event.request_id))
        if len(self._announced) > 2:
            user, request_id = self._announced.pop(0)
            future = self._client.submit_rank(user, candidates_of(), budget_ms=BUDGET_MS, request_id=request_id)
            self._requests.append((time.monotonic(), user, future))
        if number % 8 == 0:
            self._publish_history(new_user("new"))
        if number % 16 == 0:
            self._raw.produce(
                self._kafka.topic(Topic.RANKING), b"garbage", b"nobody", on_delivery=self._garbage_written
            )
        self._raw.poll(0)

    def _publish_history(self, user: str) -> None:
        self.published.append(user)

        def reported(report: Any) -> None:
            if report.delivered:
                self.acknowledged.append(user)
            else:
                self.refused.append(report.error)

        self._client.publish_history(history_of(user, 10), on_delivery=reported)

    def _garbage_written(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.garbage.append((message.topic(), message.partition(), message.offset()))


class Stack:
    """A relay on a cluster: one worker, one trigger, one gateway's client."""

    def __init__(self, cluster: KafkaCluster, relay: Relay, worker: CommandProcess, trigger: CommandProcess) -> None:
        self.cluster, self.relay, self.worker, self.trigger = cluster, relay, worker, trigger
        self.kafka = relay.kafka
        self.late: set[str] = set()
        self.lost: list[LostRequest] = []
        self.client = relay.client(
            settings=ClientSettings(lost_after_ms=60_000),
            on_late=lambda outcome: self.late.add(outcome.request_id),
            on_lost=self.lost.append,
        )

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Runs the load, and then checks that nothing was lost."""
        pids = self.relay.process_ids()
        with Load(self.kafka, self.client) as load:
            load.await_ranked()
            yield load
            load.await_ranked()
        outcomes = load.outcomes()
        assert len({outcome.request_id for outcome in outcomes}) == len(outcomes)
        unanswered = {outcome.request_id for outcome in outcomes if outcome.reason is Reason.NO_ANSWER}
        until(lambda: unanswered <= self.late, "a late answer to each acknowledged request", WAIT_S)
        load.flush()
        assert set(load.acknowledged) <= set(self.keys_of(Topic.HISTORY))
        until(lambda: set(load.garbage) <= self.dead_letters(), "a dead letter of each garbage", WAIT_S)
        assert self.relay.process_ids() == pids
        until(lambda: is_ready(self.worker.port) and is_ready(self.trigger.port), "both are ready")
        paths = Counter(outcome.result.path for outcome in outcomes[-len(USERS) :] if outcome.result is not None)
        assert sum(paths[path] for path in ON_CACHED_PREFIX) > paths.total() / 2, f"it keeps its prefixes: {paths}"

    def coordinator(self) -> int:
        """The broker that coordinates the workers' group."""
        admin = make_admin(self.kafka, "test-admin")
        [described] = admin.describe_consumer_groups([self.kafka.workers_group]).values()
        return int(described.result(30).coordinator.id)

    def keys_of(self, topic: Topic) -> list[str]:
        return [bytes(message.key() or b"").decode() for message in self._all_of(topic)]

    def dead_letters(self) -> set[tuple[str, int, int]]:
        """The coordinates of the messages in the dead letters."""
        letters = [dict(message.headers() or ()) for message in self._all_of(Topic.DEAD_LETTERS)]
        return {
            (each["origin_topic"].decode(), int(each["origin_partition"]), int(each["origin_offset"]))
            for each in letters
        }

    def _all_of(self, topic: Topic) -> list[Message]:
        name, ends = self.kafka.topic(topic), self.relay.ends(topic)
        consumer = make_assigned_consumer(self.kafka, "test-reader")
        consumer.assign([TopicPartition(name, partition, OFFSET_BEGINNING) for partition in ends])
        found: list[Message] = []
        left = dict(ends)

        def read() -> bool:
            for message in consumer.consume(500, 0.05):
                if message.error() is None:
                    found.append(message)
                    if message.offset() + 1 >= ends[message.partition()]:
                        left.pop(message.partition(), None)
            return not left

        until(read, f"{name} read up to {ends}")
        consumer.close()
        return found


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # Kafka's default, longer than a worker's session.
    properties = {"broker.session.timeout.ms": 9_000}
    with own_cluster(3, properties) as cluster:
        kafka = KafkaSettings(
            bootstrap=cluster.bootstrap, partitions=PARTITIONS, replication_factor=3, connect_timeout_s=20
        )
        [finding] = create_topics(kafka).findings
        assert "a broker that dies is replaced after 9000 ms" in finding.what
        memory = {"hbm_bytes": ByteSize(8 << 20), "dram_bytes": ByteSize(32 << 20)}
        with Relay(kafka, tmp_path_factory.mktemp("brokers"), model, **memory) as relay:
            worker, trigger = relay.start_worker(), relay.start_trigger()
            relay.await_ready(worker, trigger)
            stack = Stack(cluster, relay, worker, trigger)
            with stack.client:
                for user in USERS:
                    stack.client.publish_history(history_of(user, HISTORY))
                yield stack


@pytest.fixture(autouse=True)
def all_brokers_up(stack: Stack) -> Iterator[None]:
    yield
    stack.cluster.await_in_sync()


def test_the_broker_that_leads_partitions_and_coordinates_the_workers_is_killed(stack: Stack) -> None:
    """The workers' session ends before another broker coordinates the group: they fenced themselves, for good."""
    victim = stack.coordinator()
    leaders = {stack.cluster.leader(stack.kafka.topic(Topic.RANKING), partition) for partition in range(PARTITIONS)}
    assert victim in leaders
    with stack.load() as load:
        stack.cluster.kill(victim)
        load.await_ranked()
        readings = [found for _ in range(20) if (found := reading(stack.worker)).samples]
        reachable = {found.total("relaygr_consumer_broker_reachable") for found in readings}
        assert reachable == {1.0}, "one of three brokers is away, and the cluster answers"
        stack.cluster.start(victim)


def test_all_brokers_are_restarted_one_after_the_other(stack: Stack) -> None:
    with stack.load():
        for number in stack.cluster.numbers:
            stack.cluster.stop(number)
            stack.cluster.start(number)
            stack.cluster.await_in_sync()


def test_one_broker_of_three_accepts_requests_and_refuses_what_must_survive_until_another_is_back(
    stack: Stack,
) -> None:
    kept = stack.cluster.leader("__consumer_offsets")
    stopped = [number for number in stack.cluster.numbers if number != kept]
    with stack.load() as load:
        stack.cluster.stop(*stopped)
        since = len(load.published)
        load.await_ranked()
        until(lambda: len(load.published) > since + 5, "histories are published")
        assert not set(load.published[since:]) & set(load.acknowledged), "none is acknowledged"
        findings = [finding for finding in check_topics(stack.kafka).findings if "refuses messages" in finding.what]
        assert {finding.topic for finding in findings} == {
            "relaygr.history",
            "relaygr.behaviours",
            "relaygr.dead-letters",
        }
        assert {(finding.severity, finding.mend) for finding in findings} == {
            (Severity.WARNING, "start the brokers that are away")
        }
        stack.cluster.start(stopped[0])
        again = len(load.acknowledged)
        until(lambda: len(load.acknowledged) > again, "histories are acknowledged again", WAIT_S)
        stack.cluster.start(stopped[1])


def test_afterwards_no_request_that_was_acknowledged_is_without_an_answer(stack: Stack) -> None:
    assert stack.client.drain(WAIT_S)
    assert [lost for lost in stack.lost if lost.acknowledged] == []
    counts = stack.client.statistics()
    assert counts.submitted == counts.ranked + counts.expired + counts.failed + counts.timed_out
    assert counts.late + counts.lost == counts.timed_out
