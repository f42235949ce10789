"""The memory that a worker says it needs, beside what it really makes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from pydantic import ByteSize

from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import LARGEST_QUEUE_BYTES
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import Processes, write_config
from relaygr.traffic.settings import TrafficSettings
from tests.waiting import until
from tests.worlds.relay import VOCABULARY, Relay, reading

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


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


def test_steady_traffic_takes_no_more_memory_than_is_planned(
    module_kafka: KafkaSettings, model: Path, tmp_path: Path
) -> None:
    """A worker grew by 400 MiB in three minutes: oneDNN and torch kept products for each number of rows."""
    with Relay(module_kafka, tmp_path / "relay", model, hbm_bytes=ByteSize(12 << 20)) as relay:
        worker, trigger = relay.start_worker(), relay.start_trigger()
        relay.await_ready(worker, trigger)
        for users in (40, 400):
            traffic = {
                "users": users,
                "rate_per_s": 70,
                "duration_s": 15,
                "items": VOCABULARY,
                "history_median": 300,
                "history_sigma": 0.6,
                "history_max": 900,
                "growth": 5,
                "candidates": 45,
                "suffix": 8,
                "budget_ms": 3000,
                "start_again": True,
                "settle_s": 0.5,
            }
            path = tmp_path / f"{users}.yaml"
            write_config(relay.settings.model_copy(update={"traffic": TrafficSettings(**traffic)}), path)
            with Processes(tmp_path, path) as gateway:
                played = gateway.start(f"gateway-{users}", ["traffic"], "traffic")
                assert played.process.wait(90) == 0, played.log_tail()
            told = reading(worker)
            assert told.total("relaygr_worker_ranked_total") > 0
            planned = told.by_label("relaygr_worker_bytes_at_most", "kind")
            # Nothing waits in the queues, and the store holds few histories.
            most = sum(planned.values()) - planned["queues"] - planned["history"] + told.total("relaygr_history_bytes")
            resident = psutil.Process(worker.process.pid).memory_info().rss
            assert resident < most, f"{resident >> 20} MiB with {users} users"
