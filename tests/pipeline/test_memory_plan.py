"""The memory that a worker says it needs, beside what it really makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import LARGEST_QUEUE_BYTES
from relaygr.kafka.settings import KafkaSettings
from tests.waiting import until
from tests.worlds.relay import Relay, reading

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    return any_broker


@pytest.mark.parametrize("divert", [False, True])
def test_the_queue_of_every_kafka_client_is_planned(
    module_kafka: KafkaSettings, model: Path, tmp_path: Path, divert: bool
) -> None:
    """Five clients were planned for a worker that had six, or nine with `worker.divert`."""
    made = tmp_path / "clients"
    with Relay(module_kafka, tmp_path / "relay", model, divert=divert) as relay:
        own = ["worker.worker_id=worker-00", f"worker.history_path={tmp_path / 'history'}"]
        module = ["tests.worlds.counted_clients", str(made)]
        worker = relay.processes.start("worker-00", ["worker"], "worker", own, module=module)
        relay.await_ready(worker)
        settings = relay.settings.worker
        planned_bytes = reading(worker).total("relaygr_worker_bytes_at_most", kind="queues")
        planned = planned_bytes - int(settings.ranking_queue_bytes) - int(settings.preinfer_queue_bytes)
        planned_clients = planned / LARGEST_QUEUE_BYTES

        def clients() -> set[str]:
            return set(made.read_text().splitlines())

        until(lambda: len(clients()) >= planned_clients, "all clients are made")
        assert len(clients()) == planned_clients, sorted(clients())
