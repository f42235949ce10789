"""A worker that computes nothing: a thread that answers ranking requests as a test tells it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from confluent_kafka import KafkaException, Message, TopicPartition

from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import SystemClock
from relaygr.schemas import codec
from relaygr.schemas.ended import Ended
from relaygr.schemas.headers import RankingHeaders, RawHeaders, ResultHeaders
from relaygr.schemas.messages import Path, RankingRequest, RankingResult, StageTimings
from relaygr.schemas.topics import Topic

Answer = Callable[[RankingRequest], Sequence[bytes]]


def ranked(request: RankingRequest, worker_id: str = "echo") -> RankingResult:
    """A result whose scores are the candidates' ids."""
    now_us = SystemClock().wall_us()
    return RankingResult(
        request.request_id,
        worker_id,
        Ended.RANKED,
        request.sent_at_us,
        now_us,
        now_us,
        StageTimings(),
        path=Path.FULL,
        num_tasks=1,
        scores=request.candidates.astype("<f4"),
        model_revision="echo",
    )


def answer_once(request: RankingRequest) -> list[bytes]:
    """The usual worker."""
    return [codec.encode(ranked(request))]


@dataclass
class EchoWorker:
    """What the worker saw; `answer` may be replaced while it runs."""

    kafka: KafkaSettings
    answer: Answer = answer_once
    seen: list[RankingRequest] = field(default_factory=list)
    headers: list[RankingHeaders] = field(default_factory=list)

    def run(self, stop: threading.Event, consumer: Any) -> None:
        # A worker writes a result again that was not delivered; this one waits for a broker that is late.
        producer = make_producer(
            self.kafka, ProducerKind.LATENCY, "echo-worker", options={"message.timeout.ms": 20_000}
        )
        while not stop.is_set():
            message = consumer.poll(0.02)
            if message is not None and message.error() is None:
                self._answer(producer, message)
            producer.poll(0)
        producer.flush(1)
        consumer.close()

    def _answer(self, producer: Any, message: Message) -> None:
        headers = RankingHeaders.decode(cast(RawHeaders, message.headers()))
        request = codec.decode(RankingRequest, message.value())
        self.headers.append(headers)
        self.seen.append(request)
        for value in self.answer(request):
            producer.produce(
                headers.reply_topic,
                partition=headers.reply_partition,
                key=headers.request_id.encode(),
                value=value,
                headers=[*ResultHeaders(headers.request_id, headers.gateway_id).encode()],
            )


@contextmanager
def echo_worker(kafka: KafkaSettings, answer: Answer = answer_once) -> Iterator[EchoWorker]:
    """Runs an EchoWorker that reads all of the ranking topic from now on."""
    topic = kafka.topic(Topic.RANKING)
    consumer = make_assigned_consumer(kafka, "echo-worker")
    places = [TopicPartition(topic, partition) for partition in range(kafka.partitions)]
    ends = [_end_of(consumer, place) for place in places]
    consumer.assign([TopicPartition(topic, partition, end) for partition, end in enumerate(ends)])
    worker, stop = EchoWorker(kafka, answer), threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop, consumer), daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join(timeout=5)


def _end_of(consumer: Any, place: TopicPartition) -> int:
    """The next offset of a partition, whose leader may have been chosen only now."""
    for _ in range(500):
        try:
            return int(consumer.get_watermark_offsets(place, timeout=5)[1])
        except KafkaException:
            time.sleep(0.01)
    raise TimeoutError(f"no leader for {place}")


def read_topic(kafka: KafkaSettings, topic: Topic, count: int, timeout_s: float = 10.0) -> list[Message]:
    """The first `count` messages of a topic, all partitions; fewer if time runs out."""
    name = kafka.topic(topic)
    consumer = make_assigned_consumer(kafka, "reader")
    partitions = consumer.list_topics(name, timeout=timeout_s).topics[name].partitions
    consumer.assign([TopicPartition(name, partition, 0) for partition in partitions])
    found: list[Message] = []
    ends_us = SystemClock().monotonic_us() + round(timeout_s * 1e6)
    while len(found) < count and SystemClock().monotonic_us() < ends_us:
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            found.append(message)
    consumer.close()
    return found
