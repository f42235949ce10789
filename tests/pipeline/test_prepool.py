"""Workers for pre-infer, as real processes with a real store: they prepare prefixes that owners load, and what they do
not prepare the owners serve as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ByteSize

from relaygr.client import RankOutcome, RankStatus, RelayClient
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import History, PrefixSource, RetrievalEvent
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.pool.settings import PoolSettings
from tests.worlds.pool import Mooncake, mooncake
from tests.worlds.relay import (
    COEFFICIENTS,
    Relay,
    candidates_of,
    history_of,
    model_config,
    new_user,
    reading,
    save_model,
    wait_until,
)

pytestmark = [pytest.mark.outage, pytest.mark.timeout(600)]

LENGTH = 1000
LEAD_S = 4.0
SLOW_DEVICE = replace(COEFFICIENTS, b1=500)
"""The calibration says that a prefix takes half a second, so that fetching pays on a busy machine, too."""
POOL = "scenarios={default: {pre_infer: pool}}"


@dataclass
class World:
    """A relay whose trigger sends its jobs to pre-infer workers while there are any."""

    relay: Relay
    stores: Mooncake
    client: RelayClient
    owner: CommandProcess
    trigger: CommandProcess

    def start_pre_infer(self, name: str) -> CommandProcess:
        worker = self.relay.start_worker(name, command=("worker", "--role", "pre-infer"))
        self.relay.await_ready(worker)
        wait_until("the trigger knows it", lambda: self.is_open)
        return worker

    def publish(self, count: int) -> list[History]:
        users = [history_of(new_user("prepared"), LENGTH, seed) for seed in range(count)]
        for user in users:
            self.client.publish_history(user)
        return users

    def begin(self, user: History, lead_s: float = LEAD_S) -> RetrievalEvent:
        """Announces an impression."""
        return self.client.publish_retrieval(
            user.user_id, expected_candidates=20, expected_suffix=0, ranking_budget_ms=20_000,
            expected_ranking_in_ms=int(lead_s * 1000), history_version=user.version(),
        )  # fmt: skip

    def rank(self, user: History, event: RetrievalEvent) -> RankOutcome:
        return self.client.rank(
            user.user_id, candidates_of(), history_version=user.version(), budget_ms=20_000, request_id=event.request_id
        )

    @property
    def is_open(self) -> bool:
        return reading(self.trigger).total("relaygr_trigger_pool_open") == 1

    def to_pool(self) -> float:
        return reading(self.trigger).total("relaygr_trigger_jobs_to_pool_total")


@pytest.fixture
def world(kafka_settings: KafkaSettings, tmp_path: Path) -> Iterator[World]:
    config = model_config()
    model = save_model(tmp_path / "model", config, random_checkpoint(config, 7).tensors, SLOW_DEVICE)
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    with mooncake(tmp_path / "mooncake") as stores:
        pool = PoolSettings(address=stores.address, secret_file=secret)
        memory = {"hbm_bytes": ByteSize(16 << 20), "dram_bytes": ByteSize(32 << 20)}
        with (
            Relay(kafka_settings, tmp_path / "relay", model, pool=pool, **memory) as relay,
            relay.client() as client,
        ):
            owner, trigger = relay.start_worker("worker-00"), relay.start_trigger(POOL)
            relay.await_ready(owner, trigger)
            wait_until("the pool is there", lambda: reading(owner).total("relaygr_pool_away") == 0)
            yield World(relay, stores, client, owner, trigger)


def jobs(worker: CommandProcess, event: str) -> float:
    return reading(worker).total("relaygr_preinfer_pool_jobs_total", event=event)


def test_an_owner_ranks_on_prefixes_that_a_pre_infer_worker_computed(world: World) -> None:
    users = world.publish(6)
    worker = world.start_pre_infer("pre-infer-00")
    events = [world.begin(user) for user in users]
    wait_until("all are prepared", lambda: jobs(worker, "forwarded") == len(users))
    wait_until(
        "the owner has them",
        lambda: reading(world.owner).total("relaygr_pool_fetches_total", outcome="loaded") == len(users),
    )
    assert world.to_pool() == len(users)
    computed_s = reading(world.owner).total("relaygr_worker_device_seconds_total", work_class="preinfer")
    assert computed_s == 0
    for user, event in zip(users, events, strict=True):
        outcome = world.rank(user, event)
        assert outcome.status is RankStatus.RANKED and outcome.result is not None, outcome
        assert outcome.result.prefix_source is PrefixSource.DRAM
        full = world.client.rank(user.user_id, candidates_of(), history=user, budget_ms=20_000).result
        assert full is not None
        np.testing.assert_allclose(outcome.result.scores, full.scores, rtol=0, atol=2e-5 * np.abs(full.scores).max())
    assert world.relay.stop(worker) == 0
