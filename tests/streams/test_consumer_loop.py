"""The consumer loop on real groups: rebalances, deaths, stops, pauses and errors."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from prometheus_client import REGISTRY

from relaygr.consumer.interface import LoopState, Received, Token
from relaygr.consumer.loop import ConsumerLoop
from relaygr.consumer.settings import ConsumerSettings
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_group_consumer, make_producer
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from tests.bad_header import write_bad_header
from tests.waiting import until

pytestmark = pytest.mark.slow

# Joins on the embedded cluster take 3 s each.
WITHIN_S = 30.0
Work = tuple[str, int, int]


class Member:
    """One member of the group, and all calls of its handler."""

    def __init__(
        self,
        kafka: KafkaSettings,
        name: str,
        instance_id: str | None = None,
        settings: ConsumerSettings | None = None,
        topics: list[str] | None = None,
        finishes: bool = True,
    ) -> None:
        self.finishes = finishes
        self.work: list[Work] = []
        self.tokens: list[Token] = []
        self.values: list[bytes | None] = []
        self.calls: list[str] = []
        self.turns = self.wanted_turns = 0
        self.partitions: frozenset[int] = frozenset()
        self.threads: set[str] = set()
        self.ended: list[LoopState] = []
        self.topics = topics or [kafka.topic(topic) for topic in kafka.worker_topics]

        def factory(on_error: object) -> Consumer:
            return make_group_consumer(kafka, kafka.workers_group, name, instance_id, on_error)  # type: ignore[arg-type]

        self.loop = ConsumerLoop(
            factory, self.topics, self, settings=settings, name=name, on_end=self.ended.append,
            is_incremental=kafka.affinity.is_incremental,
        )  # fmt: skip

    def on_message(self, message: Received) -> None:
        self.threads.add(threading.current_thread().name)
        self.work.append((message.topic, message.partition, message.offset))
        self.values.append(message.value)
        if message.value == b"bug":
            raise RuntimeError("the handler has a bug")
        if message.value == b"kafka bug":
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        self.tokens.append(message.token)
        if self.finishes:
            self.loop.finish(message.token)

    def on_batch(self) -> bool:
        self.turns += 1
        return self.turns < self.wanted_turns

    def on_rebalance(self) -> None:
        self.calls.append("rebalance")

    def on_assigned(self, partitions: frozenset[int], assignment_epoch: int) -> None:
        self.calls.append(f"assigned {len(partitions)}")
        self.partitions = partitions

    def on_revoked(self, partitions: frozenset[int]) -> None:
        self.calls.append(f"revoked {len(partitions)}")

    def on_lost(self, partitions: frozenset[int]) -> None:
        self.calls.append(f"lost {len(partitions)}")

    def on_tick(self, now_us: int) -> None:
        pass

    def finish_all(self) -> None:
        for token in self.tokens:
            self.loop.finish(token)

    def stop(self, drain_s: float = 5.0) -> None:
        self.loop.stop(drain_s)
        assert self.loop.join(WITHIN_S)

    def die(self) -> None:
        """The nearest to kill -9 for a thread: no drain, no commit."""
        self.loop._commands.append(lambda: self.loop._fail(LoopState.FENCED, RuntimeError("killed")))
        assert self.loop.join(WITHIN_S)


class Stage:
    """Members that are stopped at the end, and a producer that spreads messages evenly."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.kafka = kafka
        self.members: list[Member] = []
        self.producer: Producer = make_producer(kafka, ProducerKind.DURABLE, "test")
        self.topics = [kafka.topic(topic) for topic in kafka.worker_topics]
        self.sent = 0

    def join(self, name: str, **options: object) -> Member:
        member = Member(self.kafka, name, **options)  # type: ignore[arg-type]
        self.members.append(member)
        member.loop.start()
        return member

    def send(self, each: int, value: bytes = b"x") -> int:
        """Sends `each` messages to each partition of both topics. Returns the number of messages sent so far."""
        for topic in self.topics:
            for partition in range(self.kafka.partitions):
                for _ in range(each):
                    self.producer.produce(topic, value, partition=partition)
        assert self.producer.flush(10) == 0
        self.sent += each * len(self.topics) * self.kafka.partitions
        return self.sent

    def committed(self) -> int:
        """The number of committed messages."""
        consumer = make_group_consumer(self.kafka, self.kafka.workers_group, "reader")
        parts = [
            TopicPartition(topic, partition) for topic in self.topics for partition in range(self.kafka.partitions)
        ]
        offsets = consumer.committed(parts, timeout=10)
        consumer.close()
        return sum(max(0, tp.offset) for tp in offsets)


@contextmanager
def staged(kafka: KafkaSettings) -> Iterator[Stage]:
    stage = Stage(kafka)
    try:
        yield stage
    finally:
        for member in stage.members:
            member.loop.stop(0)
        for member in stage.members:
            member.loop.join(WITHIN_S)


@pytest.fixture
def stage(kafka_settings: KafkaSettings) -> Iterator[Stage]:
    with staged(kafka_settings) as stage:
        yield stage


@contextmanager
def staged_on(broker: LocalBroker, partitions: int) -> Iterator[Stage]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=partitions))
    broker.create_topics(kafka)
    with staged(kafka) as stage:
        yield stage
    broker.delete_topics(kafka)


@pytest.fixture
def real_stage(real_broker: LocalBroker) -> Iterator[Stage]:
    """A stage on a real broker, for static members: librdkafka's own cluster does not fence them."""
    with staged_on(real_broker, 12) as stage:
        yield stage


def test_every_message_is_handed_over_once_on_the_poll_thread_and_stop_commits_what_is_finished(stage: Stage) -> None:
    a = stage.join("a")
    sent = stage.send(10)
    until(lambda: len(a.work) == sent, "all delivered")
    status = a.loop.status()
    assert status.assigned
    assert status.partitions == a.partitions == frozenset(range(12))
    assert status.assignment_epoch == 1
    a.stop()
    assert len(set(a.work)) == sent
    assert a.threads == {"poll-a"}
    assert a.ended == [LoopState.STOPPED]
    assert a.loop.error is None
    assert stage.committed() == sent


def test_a_handler_with_work_left_gets_turns_without_messages(stage: Stage) -> None:
    a = stage.join("a")
    until(lambda: len(a.partitions) == 12, "assigned")
    a.wanted_turns = 1_000_000
    topic = stage.topics[0]
    stage.producer.produce(topic, b"x", partition=0)
    assert stage.producer.flush(10) == 0
    # With a wait in each poll, so many turns would take 10 s.
    until(lambda: a.turns >= 1_000, "a thousand turns", WITHIN_S / 4)
    assert len(a.work) == 1
    a.wanted_turns = 0
    a.stop()


def test_a_rebalance_is_told_before_it_takes_time(stage: Stage) -> None:
    a = stage.join("a")
    until(lambda: len(a.partitions) == 12, "assigned")
    stage.join("b")
    until(lambda: len(a.partitions) == 6, "shared in halves")
    told = [call.split()[0] for call in a.calls]
    assert told == ["rebalance", "assigned", "rebalance", "revoked", "rebalance", "assigned"]


def test_two_members_own_the_same_partitions_of_both_topics_and_share_them(stage: Stage) -> None:
    a, b = stage.join("a"), stage.join("b")
    until(lambda: len(a.partitions) == len(b.partitions) == 6, "shared in halves")
    assert a.partitions.isdisjoint(b.partitions)
    assert a.loop.status().owner_split == b.loop.status().owner_split == frozenset()
    sent = stage.send(2)
    until(lambda: len(a.work) + len(b.work) == sent, "all delivered")
    assert {partition for _, partition, _ in a.work} == a.partitions


def test_one_member_more_than_partitions_is_ready_without_any_and_takes_over(broker: LocalBroker) -> None:
    with staged_on(broker, 1) as stage:
        members = stage.join("a"), stage.join("b")
        until(
            lambda: (
                all(each.loop.status().assigned for each in members)
                and sorted(len(each.partitions) for each in members) == [0, 1]
            ),
            "one has the partition",
        )
        idle, owner = sorted(members, key=lambda each: len(each.partitions))
        owner.stop()
        until(lambda: idle.partitions == {0}, "the other one has it")
        sent = stage.send(1)
        until(lambda: len(idle.work) == sent, "all delivered")


def test_what_a_survivor_has_in_flight_is_not_done_twice_when_a_member_joins(stage: Stage) -> None:
    a = stage.join("a", finishes=False)
    sent = stage.send(5)
    until(lambda: len(a.work) == sent, "all in flight at a")
    b = stage.join("b")
    until(lambda: len(a.partitions) == len(b.partitions) == 6, "shared in halves")
    until(lambda: len(b.work) == sent // 2, "b processes the uncommitted messages of its half")
    more = stage.send(1) - sent
    until(lambda: len(a.work) == sent + more // 2, "a processes the new messages of its half")
    until(lambda: len(b.work) == (sent + more) // 2, "b processes the new messages of its half")
    assert max(Counter(a.work).values()) == 1
    a.finish_all()
    until(lambda: stage.committed() == stage.sent, "all committed")


def test_what_a_dead_member_had_not_committed_is_delivered_again(stage: Stage) -> None:
    a = stage.join("a", finishes=False)
    sent = stage.send(3)
    until(lambda: len(a.work) == sent, "all in flight at a")
    a.loop.finish(a.tokens[0])
    a.die()
    assert stage.committed() == 0, "a died before it committed"
    b = stage.join("b")
    until(lambda: len(b.work) == sent, "all delivered again")
    assert set(b.work) == set(a.work)


def test_finished_messages_behind_an_unfinished_one_wait_for_it(stage: Stage) -> None:
    a = stage.join("a", finishes=False)
    sent = stage.send(4)
    until(lambda: len(a.work) == sent, "all in flight")
    for token in a.tokens:
        if token.offset != 1:
            a.loop.finish(token)
    a.stop(drain_s=0.2)
    assert stage.committed() == sent // 4, "offset 0 of each partition"
    assert a.loop.status().in_flight == sent // 4


def test_what_was_finished_since_the_last_hand_over_is_committed_when_the_loop_stops(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the client closes, it commits the last stored offset once more; that offset must not be older."""
    monkeypatch.setattr("relaygr.consumer.loop.STORE_INTERVAL_US", 500_000)
    a = stage.join("a", finishes=False)
    sent = stage.send(2)
    until(lambda: len(a.work) == sent, "all in flight")
    for token in a.tokens:
        if token.offset == 0:
            a.loop.finish(token)
    until(lambda: stage.committed() == sent // 2, "the first half is stored and committed")
    a.finish_all()
    a.stop()
    assert stage.committed() == sent


def test_stop_waits_for_what_is_in_flight_and_reads_no_more(stage: Stage) -> None:
    a = stage.join("a", finishes=False)
    sent = stage.send(1)
    until(lambda: len(a.work) == sent, "all in flight")
    a.loop.stop(drain_s=20)
    until(lambda: a.loop.status().state is LoopState.DRAINING, "draining")
    stage.send(1)
    a.finish_all()
    assert a.loop.join(WITHIN_S)
    assert len(a.work) == sent
    assert stage.committed() == sent


def test_garbage_is_the_handlers_to_finish_and_the_loop_goes_on(stage: Stage) -> None:
    a = stage.join("a")
    stage.send(1, value=b"\xc1\x00garbage")
    stage.send(1, value=b"")
    sent = stage.send(1)
    until(lambda: len(a.work) == sent, "all delivered")
    a.stop()
    assert stage.committed() == sent


def test_a_paused_partition_delivers_nothing_until_it_resumes_and_loses_nothing(stage: Stage) -> None:
    ranking = stage.topics[1]
    a = stage.join("a")
    until(lambda: len(a.partitions) == 12, "assigned")
    a.loop.pause(ranking, range(12))
    until(lambda: a.loop.status().paused == 12, "paused")
    sent = stage.send(2)
    until(lambda: len(a.work) == sent // 2, "pre-infer jobs flow")
    assert ranking not in {topic for topic, _, _ in a.work}
    a.loop.resume(ranking, range(12))
    until(lambda: len(a.work) == sent, "the rest")
    assert max(Counter(a.work).values()) == 1


def test_a_pause_outlives_a_rebalance(stage: Stage) -> None:
    ranking = stage.topics[1]
    a = stage.join("a")
    until(lambda: len(a.partitions) == 12, "assigned")
    a.loop.pause(ranking, range(12))
    b = stage.join("b")
    until(lambda: len(a.partitions) == len(b.partitions) == 6, "shared in halves")
    until(lambda: a.loop.status().paused == 6, "a's half is paused again")
    sent = stage.send(1)
    until(lambda: len(a.work) + len(b.work) == sent - 6, "all but a's ranking requests")
    a.loop.resume(ranking, range(12))
    until(lambda: len(a.work) + len(b.work) == sent, "these too")


def test_a_partition_whose_oldest_message_is_stuck_pauses_and_the_others_go_on(stage: Stage) -> None:
    a = stage.join("a", settings=ConsumerSettings(max_span=5), finishes=False)
    until(lambda: len(a.partitions) == 12, "assigned")
    topic = stage.topics[1]
    for i in range(200):
        stage.producer.produce(topic, str(i).encode(), partition=3)
        stage.producer.flush(10)
        if i == 20:
            until(lambda: a.loop.status().paused == 1, "the full partition is paused")
    held = len(a.work)
    assert held < 200
    for i in range(7):
        stage.producer.produce(topic, b"other", partition=i % 3)
    stage.producer.flush(10)
    until(lambda: len(a.work) >= held + 7, "others are delivered")
    a.finishes = True
    a.finish_all()
    until(lambda: len(a.work) == 207, "nothing was lost")
    assert max(Counter(a.work).values()) == 1


@pytest.mark.parametrize(("value", "error"), [(b"bug", RuntimeError), (b"kafka bug", KafkaException)])
def test_a_handler_that_raises_ends_the_loop_with_its_error_and_without_committing_that_message(
    stage: Stage, value: bytes, error: type[Exception]
) -> None:
    """A handler's KafkaException was once taken for the consumer's: the loop went on, and the offset never finished."""
    a = stage.join("a")
    sent = stage.send(1)
    until(lambda: len(a.work) == sent, "delivered")
    stage.producer.produce(stage.topics[0], value, partition=0)
    stage.producer.flush(10)
    assert a.loop.join(WITHIN_S)
    assert a.ended == [LoopState.FAILED]
    assert isinstance(a.loop.error, error)
    assert stage.committed() == sent


def test_headers_that_can_not_be_read_are_none_and_the_loop_goes_on(stage: Stage) -> None:
    a = stage.join("a")
    write_bad_header(stage.kafka, stage.topics[1], 0, b"odd")
    sent = stage.send(1)
    until(lambda: len(a.work) == sent + 1, "delivered")
    assert b"odd" in a.values
    assert a.loop.status().state is LoopState.RUNNING


def test_a_topic_that_stays_unknown_ends_the_loop_with_the_command_that_makes_it(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaygr.consumer.health.MISSING_TOPIC_GRACE_US", 500_000)
    member = Member(kafka_settings, "a", topics=["no-such-topic"])
    member.loop.start()
    assert member.loop.join(WITHIN_S)
    assert member.ended == [LoopState.FAILED]
    assert isinstance(member.loop.error, RelayError)
    assert "no-such-topic" in str(member.loop.error)
    assert "relaygr topics create" in str(member.loop.error)


def test_a_member_that_subscribes_to_one_topic_only_is_an_owner_split(stage: Stage) -> None:
    a = stage.join("a")
    b = stage.join("b", topics=[stage.topics[1]])
    until(lambda: len(b.partitions) == 6, "b joined")
    # A first assignment may lack a topic whose metadata was not there yet.
    until(lambda: a.calls[-1:] == ["assigned 12"], "a owns all of the other topic")
    until(lambda: len(a.loop.status().owner_split) == 6, "a owns jobs whose requests go to b")


@pytest.mark.kafka
def test_a_fenced_member_ends_at_once_and_its_successor_gets_what_it_had_in_flight(real_stage: Stage) -> None:
    stage = real_stage
    a = stage.join("a", instance_id="worker-00", finishes=False)
    sent = stage.send(2)
    until(lambda: len(a.work) == sent, "all in flight at a")
    b = stage.join("b", instance_id="worker-00")
    assert a.loop.join(WITHIN_S)
    assert a.ended == [LoopState.FENCED]
    assert isinstance(a.loop.error, RelayError)
    until(lambda: len(b.work) == sent, "delivered to the successor")
    a.finish_all()
    assert stage.committed() <= sent


@pytest.mark.kafka
@pytest.mark.parametrize("affinity", [Affinity.CONSUMER_PROTOCOL, Affinity.ONE_TOPIC], ids=str)
def test_an_incremental_rebalance_takes_only_what_moves_and_the_handler_hears_what_stays(
    real_broker: LocalBroker, affinity: Affinity
) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = real_broker.settings(
        KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=12, affinity=affinity)
    )
    real_broker.create_topics(kafka)
    with staged(kafka) as stage:
        a = stage.join("a", instance_id="worker-00", finishes=False)
        until(lambda: len(a.partitions) == 12, "a owns all")
        sent = stage.send(1)
        until(lambda: len(a.work) == sent, "a reads all")
        a.calls.clear()
        epoch = a.loop.status().assignment_epoch
        b = stage.join("b", instance_id="worker-01")
        until(lambda: (len(a.partitions), len(b.partitions)) == (6, 6), "both own a half")
        until(lambda: len(b.work) == sent / 2, "b reads what a has not finished")
        status = a.loop.status()
        assert "revoked 12" not in a.calls, "what stays is not taken for a moment"
        assert max(Counter(a.work).values()) == 1, "what stays is not delivered again"
        assert status.assignment_epoch > epoch and status.partitions == a.partitions and not status.owner_split
        a.finish_all()
        until(lambda: stage.committed() == sent, "both commit their own")
    real_broker.delete_topics(kafka)


FOUR = [TopicPartition("t", number) for number in range(4)]


class Steered:
    """A loop over a consumer whose rebalances the test makes. Its log has `end` unread messages in each partition, and
    none arrives while the clock runs 20 ms a poll.
    """

    def __init__(self, name: str, is_incremental: bool = False) -> None:
        self.end = 0
        self._name = name
        self._clock = ManualClock(1_000_000)
        self._steps: deque[Callable[[], object]] = deque([self.assign])
        self.loop = ConsumerLoop(
            lambda _: self, ["t"], Silent(), self._clock, name=name, is_incremental=is_incremental  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        self.loop.start()

    def on_poll(self, *steps: Callable[[], object]) -> None:
        """Makes these calls inside of the next polls, one in each."""
        self._steps.extend(steps)

    def assign(self) -> None:
        self._on_assign(self, FOUR)

    def revoke(self) -> None:
        self._on_revoke(self, FOUR)

    def rebalance(self) -> None:
        self.revoke()
        self.assign()

    def gauge(self, name: str) -> float | None:
        return REGISTRY.get_sample_value(f"relaygr_consumer_{name}", {"loop": self._name})

    def stop(self) -> None:
        self.loop.stop(0)
        assert self.loop.join(WITHIN_S)

    # The consumer, as the loop uses it.

    def subscribe(self, topics: Any, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._on_assign, self._on_revoke = on_assign, on_revoke

    def poll(self, timeout: float) -> None:
        self._clock.advance_us(20_000)
        if self._steps:
            self._steps.popleft()()
        else:
            time.sleep(timeout / 10)

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(tp.topic, tp.partition, 0) for tp in partitions]

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(tp.topic, tp.partition, self.end) for tp in partitions]

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Silent:
    """A handler that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def steer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Steered]]:
    made: list[Steered] = []

    def make(**options: bool) -> Steered:
        made.append(Steered(request.node.name, **options))
        return made[-1]

    yield make
    for steered in made:
        steered.stop()


def test_the_gauge_of_a_stall_falls_when_a_rebalance_cures_it(steer: Callable[..., Steered]) -> None:
    """It stayed 1, and a critical alert with it, until the next quiet time of the worker."""
    steered = steer()
    steered.end = 5
    until(lambda: steered.gauge("stalled") == 1, "stalled")
    seen: list[float | None] = []
    steered.on_poll(steered.rebalance, lambda: seen.append(steered.gauge("stalled")))
    until(lambda: bool(seen), "the rebalance is over")
    assert seen == [0]


def test_a_worker_that_lost_its_stalled_partitions_to_another_is_not_stalled(steer: Callable[..., Steered]) -> None:
    """An incremental group takes partitions without another assignment."""
    steered = steer(is_incremental=True)
    steered.end = 5
    until(lambda: steered.gauge("stalled") == 1, "stalled")
    steered.on_poll(steered.revoke)
    until(lambda: steered.gauge("stalled") == 0, "nothing that it owns is unread")
    assert not steered.loop.status().stalled


def test_the_gauge_of_paused_partitions_follows_a_rebalance(steer: Callable[..., Steered]) -> None:
    """It kept its value if the loop was resumed before it had paused the partitions again."""
    steered = steer()
    steered.loop.pause("t", range(4))
    until(lambda: steered.gauge("paused_partitions") == 4, "paused")
    steered.on_poll(lambda: (steered.rebalance(), steered.loop.resume("t", range(4))))
    until(lambda: steered.loop.status().paused == 0, "resumed")
    until(lambda: steered.gauge("paused_partitions") == 0, "and the gauge says so", within_s=5)
