"""What a worker tells the fleet."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from relaygr.runtime.clock import ManualClock
from relaygr.schemas import codec
from relaygr.schemas.messages import LatencyCoefficients, WorkerState, WorkerStatus
from relaygr.worker.kv import KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.status import QueueWaits, StatusPublisher, WorkerFacts, WorkerReading
from tests.workers.kafka_fakes import FakeProducer, refused

FACTS = WorkerFacts("worker-00", KvGeometry(2, 2, 4, 4, 16, KvDtype.FLOAT32), PrefixLayout(1, 2), 4096, 0)
READING = WorkerReading(
    model_revision="model-1",
    max_prefix_behaviours=512,
    partitions=frozenset({3, 1}),
    assignment_epoch=7,
    hbm_free_bytes=1024,
    dram_free_bytes=0,
    ranking_queue_p99_us=800,
    preinfer_queue_us=90,
    latency=LatencyCoefficients(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
)


def test_a_status_says_who_it_is_what_it_owns_and_what_it_can_take() -> None:
    producer, clock = FakeProducer(), ManualClock()
    StatusPublisher(producer, "relaygr.workers", FACTS, clock).publish(WorkerState.READY, READING)  # type: ignore[arg-type]
    (produced,) = producer.sent
    assert (produced.topic, produced.key) == ("relaygr.workers", b"worker-00")
    status = codec.decode(WorkerStatus, produced.value)
    assert (status.state, status.partitions, status.assignment_epoch) == (WorkerState.READY, (1, 3), 7)
    assert status.written_at_us == clock.wall_us()
    assert status.kv_bytes_per_token == FACTS.geometry.bytes_per_token
    assert (status.contextual_tokens, status.tokens_per_behaviour) == (1, 2)


@pytest.mark.parametrize("error", [BufferError("full"), refused(KafkaError._UNKNOWN_TOPIC)])
def test_a_status_that_cannot_be_sent_is_let_go(error: Exception) -> None:
    producer = FakeProducer(raises=error)
    publisher = StatusPublisher(producer, "relaygr.workers", FACTS, ManualClock())  # type: ignore[arg-type]
    publisher.publish(WorkerState.READY, READING)
    publisher.publish(WorkerState.READY, READING)
    assert len(producer.sent) == 1


def test_the_p99_is_of_the_latest_waits() -> None:
    waits = QueueWaits(window=100)
    assert waits.p99_us() == 0
    for wait_us in range(1, 101):
        waits.observe(wait_us)
    assert waits.p99_us() == 100
    for _ in range(100):
        waits.observe(5)
    assert waits.p99_us() == 5
