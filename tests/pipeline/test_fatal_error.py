"""A worker whose producer of dead letters gets a fatal error from the broker."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.faulty_cluster import FaultyCluster, faulty_cluster
from tests.worlds.relay import RawGateway, Relay, new_user

pytestmark = pytest.mark.slow

ATTEMPTS = 20
OUT_OF_ORDER = 45


def send_garbage(cluster: FaultyCluster) -> None:
    """Until the broker takes it: an error of an earlier attempt may hit this message."""
    producer = make_producer(cluster.kafka, ProducerKind.LATENCY, "test-garbage")
    errors: list[KafkaError | None] = []
    while not errors or errors[-1] is not None:
        producer.produce(
            cluster.kafka.topic(Topic.RANKING), b"garbage", on_delivery=lambda error, _: errors.append(error)
        )
        producer.flush(10)


def test_a_worker_survives_the_fatal_error_of_its_dead_letters(model: Path, tmp_path: Path) -> None:
    """The worker ended with 1."""
    with faulty_cluster() as cluster, Relay(cluster.kafka, tmp_path, model) as relay:
        worker = relay.start_worker()
        relay.await_ready(worker)
        sent = 1
        send_garbage(cluster)
        assert len(cluster.values(Topic.DEAD_LETTERS, sent)) == sent
        # The worker's statuses may take the errors: so several attempts.
        while "a producer failed, and another one is made" not in worker.log.read_text():
            assert sent < ATTEMPTS
            worker.process.send_signal(signal.SIGSTOP)
            send_garbage(cluster)
            cluster.answer_produce(*[OUT_OF_ORDER] * 2)
            worker.process.send_signal(signal.SIGCONT)
            sent += 1
            assert len(cluster.values(Topic.DEAD_LETTERS, sent)) >= sent
        raw = RawGateway(cluster.kafka)
        assert raw.answer(raw.rank(new_user())).request_id
        raw.close()
        until(lambda: worker.process.poll() is None, "the worker is ready")
        relay.await_ready(worker)
