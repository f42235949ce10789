"""The status that a worker publishes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer.settings import ConsumerSettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas import codec
from relaygr.schemas.messages import (
    FullPathReport,
    LatencyCoefficients,
    LeadTimeReport,
    LengthRatios,
    WorkerState,
    WorkerStatus,
)
from relaygr.worker.kv import KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.latest_answers import QueueWaits
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.process.status import StatusReport, StatusSources
from relaygr.worker.settings import WorkerConfig, WorkerSettings
from tests.workers.kafka_fakes import FakeProducer, refused

GEOMETRY = KvGeometry(2, 2, 4, 4, 16, KvDtype.FLOAT32)
LATENCY = LatencyCoefficients(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
LEAD_TIMES = LeadTimeReport(("default",), (0.5,), (60_000,), (80_000,))
LENGTHS = LengthRatios((0.0, 1.5), (1.0,), ())
FULL_PATH = FullPathReport(4000, (0.0, 1.5), (2, 1), (1, 0), ("gateway.1.1",))


def report(
    producer: FakeProducer,
    clock: ManualClock,
    overflow_partitions: Callable[[], tuple[int, ...] | None] = lambda: None,
) -> StatusReport:
    """A worker that has some free pages, and requests that have waited 800 µs."""
    waits = QueueWaits()
    waits.observe(800)
    engine = SimpleNamespace(
        revision="model-1",
        geometry=GEOMETRY,
        layout=PrefixLayout(1, 2),
        limits=SimpleNamespace(max_prefix_behaviours=512),
        rules=PrefixRules(uses_query_time=True),
    )
    stats = SimpleNamespace(
        hbm=SimpleNamespace(free=3, evictable=1, capacity=4096),
        hbm_page_bytes=256,
        dram=SimpleNamespace(free=0, evictable=2, capacity=4),
        dram_page_bytes=128,
    )
    sources = StatusSources(
        producer=producer,  # type: ignore[arg-type]
        loop=SimpleNamespace(status=lambda: SimpleNamespace(partitions=frozenset({3, 1}), assignment_epoch=7)),  # type: ignore[arg-type]
        executor=SimpleNamespace(
            engine=engine,
            preinfer_backlog_us=90,
            backlog=SimpleNamespace(predicted_us=1_500),
            latency_of_prefixes=SimpleNamespace(coefficients=LATENCY),
            full_path_report=lambda latency: FULL_PATH if latency.coefficients is LATENCY else None,
            lead_time_report=lambda: LEAD_TIMES,
            length_ratios=lambda: LENGTHS,
        ),  # type: ignore[arg-type]
        cache=SimpleNamespace(stats=lambda: stats),  # type: ignore[arg-type]
        waits=waits,
        overflow_partitions=overflow_partitions,
    )
    settings = WorkerSettings(worker_id="worker-00", hbm_bytes=1 << 20, dram_bytes=512)  # type: ignore[arg-type]
    config = WorkerConfig(KafkaSettings(), settings, AdmissionSettings(), ConsumerSettings())
    return StatusReport(config, sources, clock)


def test_a_status_names_the_worker_its_partitions_and_its_capacity() -> None:
    producer, clock = FakeProducer(), ManualClock()
    published = report(producer, clock)
    published.active_since_us = active_since_us = clock.wall_us()
    clock.advance_us(1_000_000)
    published.state = WorkerState.READY
    published.metrics_url = "http://127.0.0.1:9100/metrics"
    published.publish()
    (produced,) = producer.sent
    assert (produced.topic, produced.key) == ("relaygr.workers", b"worker-00")
    assert codec.decode(WorkerStatus, produced.value) == WorkerStatus(
        worker_id="worker-00",
        state=WorkerState.READY,
        written_at_us=clock.wall_us(),
        assignment_epoch=7,
        partitions=(1, 3),
        model_revision="model-1",
        kv_bytes_per_token=GEOMETRY.bytes_per_token,
        contextual_tokens=1,
        tokens_per_behaviour=2,
        max_prefix_behaviours=512,
        hbm_capacity_bytes=1 << 20,
        hbm_free_bytes=1024,
        dram_capacity_bytes=512,
        dram_free_bytes=256,
        ranking_queue_p99_us=800,
        preinfer_queue_us=90,
        latency=LATENCY,
        full_path=FULL_PATH,
        lead_times=LEAD_TIMES,
        active_since_us=active_since_us,
        reuses_prefixes=False,
        ranking_backlog_us=1_500,
        host=socket.gethostname(),
        metrics_url="http://127.0.0.1:9100/metrics",
        length_ratios=LENGTHS,
    )


def test_a_status_says_at_which_lengths_and_whether_predictions_are_off() -> None:
    producer = FakeProducer()
    own = report(producer, ManualClock())
    own.predictions_off = True
    own.publish()
    status = codec.decode(WorkerStatus, producer.sent[0].value)
    assert (status.length_ratios, status.predictions_off) == (LENGTHS, True)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (WorkerSettings(), "http://127.0.0.1:9100/metrics"),
        (WorkerSettings(http_host="::1"), "http://[::1]:9100/metrics"),
        (WorkerSettings(http_host="0.0.0.0"), f"http://{socket.gethostname()}:9100/metrics"),
        (WorkerSettings(metrics_url="https://w0.example/metrics"), "https://w0.example/metrics"),
    ],
)
def test_the_address_of_the_metrics_is_one_that_a_reader_can_ask(settings: WorkerSettings, url: str) -> None:
    assert settings.metrics_url_at(9100) == url


def test_a_status_says_where_diverted_requests_go_and_is_outdated_once_that_changes() -> None:
    producer = FakeProducer()
    taken: list[tuple[int, ...] | None] = [(4, 9)]
    status = report(producer, ManualClock(), overflow_partitions=lambda: taken[0])
    assert status.is_outdated
    told = []
    for state, taken[0] in ((WorkerState.READY, (4, 9)), (WorkerState.READY, ()), (WorkerState.STOPPING, (4, 9))):
        status.state = state
        status.publish()
        assert not status.is_outdated
        told.append(codec.decode(WorkerStatus, producer.sent[-1].value).overflow_partitions)
    assert told == [(4, 9), (), ()]


@pytest.mark.parametrize("error", [BufferError("full"), refused(KafkaError._UNKNOWN_TOPIC)])
def test_a_status_that_cannot_be_sent_is_dropped(error: Exception) -> None:
    producer = FakeProducer(raises=error)
    status = report(producer, ManualClock())
    status.publish()
    status.publish()
    assert len(producer.sent) == 1


def test_the_p99_is_of_the_latest_waits() -> None:
    waits = QueueWaits(window=100)
    assert waits.p99_us() == 0
    for wait_us in range(1, 101):
        waits.observe(wait_us)
    assert waits.p99_us() == 99
    for _ in range(100):
        waits.observe(5)
    assert waits.p99_us() == 5
