"""Messages that several schema tests need."""

from __future__ import annotations

import pytest

from relaygr.schemas import LatencyCoefficients, WorkerState, WorkerStatus


@pytest.fixture
def status() -> WorkerStatus:
    return WorkerStatus(
        worker_id="worker-00",
        state=WorkerState.READY,
        written_at_us=1,
        assignment_epoch=2,
        partitions=(0, 1, 2),
        model_revision="abc",
        kv_bytes_per_token=1024,
        contextual_tokens=2,
        tokens_per_behaviour=2,
        max_prefix_behaviours=4096,
        hbm_capacity_bytes=10,
        hbm_free_bytes=5,
        dram_capacity_bytes=20,
        dram_free_bytes=6,
        ranking_queue_p99_us=700,
        preinfer_queue_us=800,
        latency=LatencyCoefficients(*(float(n) for n in range(11))),
    )
