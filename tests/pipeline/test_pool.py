"""Workers with a pool, on real stores: a new worker loads what a stopped one computed, and a store that hangs delays
nobody, not even a stop.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ByteSize

from relaygr.client import RankStatus, RelayClient
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import History, PrefixSource, RankingResult
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.pool.settings import PoolSettings
from tests.worlds.pool import mooncake
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
HANGS_S = 30.0
"""How long a call to a holder that is stopped takes."""
SLOW_DEVICE = replace(COEFFICIENTS, b1=500)
"""The calibration says that a prefix takes half a second, so that fetching pays on a busy machine, too."""


def counted(worker: CommandProcess, name: str, **labels: str) -> float:
    return reading(worker).total(f"relaygr_pool_{name}", **labels)


def assert_equal(result: RankingResult, expected: np.ndarray) -> None:
    np.testing.assert_allclose(result.scores, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def ranked(client: RelayClient, user: History) -> RankingResult:
    """The result of a request with much time."""
    outcome = client.rank(user.user_id, candidates_of(), history_version=user.version(), budget_ms=20_000)
    assert outcome.status is RankStatus.RANKED, outcome
    assert outcome.result is not None
    return outcome.result


def test_a_new_worker_loads_what_a_stopped_one_computed(module_kafka: KafkaSettings, tmp_path: Path) -> None:
    config = model_config()
    model = save_model(tmp_path / "model", config, random_checkpoint(config, 7).tensors, SLOW_DEVICE)
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    *users, last = [history_of(new_user("pooled"), LENGTH, seed) for seed in range(5)]
    with mooncake(tmp_path / "mooncake") as stores:
        pool = PoolSettings(address=stores.address, secret_file=secret, visits=1)
        with (
            Relay(module_kafka, tmp_path / "relay", model, pool=pool, dram_bytes=ByteSize(16 << 20)) as relay,
            relay.client() as client,
        ):
            first = relay.start_worker("worker-00")
            relay.await_ready(first)
            wait_until("the pool is there", lambda: counted(first, "away") == 0)
            for user in (*users, last):
                client.publish_history(user)
            scores = {user.user_id: ranked(client, user).scores for user in (*users, last)}

            def is_written() -> bool:
                """On a busy machine a visit may find the link too slow."""
                for user in (*users, last):
                    ranked(client, user)
                return counted(first, "objects_written_total", outcome="stored") > len(users)

            wait_until("written", is_written, 180)
            assert relay.stop(first) == 0
            second = relay.start_worker("worker-01")
            relay.await_ready(second)
            wait_until("the pool is there", lambda: counted(second, "away") == 0)
            for user in users:
                assert_equal(ranked(client, user), scores[user.user_id])
            wait_until("loaded", lambda: counted(second, "fetches_total", outcome="loaded") > 0)

            client.tombstone(users[0].user_id)
            wait_until("deleted", lambda: counted(second, "objects_removed_total", reason="deletion") > 0)

            stores.processes[-1].send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            result = ranked(client, last)
            assert time.monotonic() - began_s < HANGS_S / 2 and result.prefix_source is PrefixSource.COMPUTED
            assert_equal(result, scores[last.user_id])
            # The call still hangs.
            assert relay.stop(second) == 0
            assert time.monotonic() - began_s < HANGS_S


def test_a_worker_that_joins_has_the_prefixes_of_the_users_that_move_to_it(
    module_kafka: KafkaSettings, tmp_path: Path
) -> None:
    """Its warm-up fetches them. Without a pool it would compute them, or their next visits would."""
    config = model_config()
    model = save_model(tmp_path / "model", config, random_checkpoint(config, 7).tensors, SLOW_DEVICE)
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    users = [history_of(new_user("moves"), LENGTH, seed) for seed in range(12)]
    with mooncake(tmp_path / "mooncake") as stores:
        pool = PoolSettings(address=stores.address, secret_file=secret, visits=1)
        settings = {"pool": pool, "dram_bytes": ByteSize(64 << 20), "warm_up_users": 100}
        with Relay(module_kafka, tmp_path / "relay", model, **settings) as relay, relay.client() as client:
            first = relay.start_worker("worker-00")
            relay.await_ready(first)
            wait_until("the pool is there", lambda: counted(first, "away") == 0)
            for user in users:
                client.publish_history(user)
            scores = {user.user_id: ranked(client, user).scores for user in users}

            def is_written() -> bool:
                for user in users:
                    ranked(client, user)
                return counted(first, "objects_written_total", outcome="stored") >= len(users)

            wait_until("written", is_written, 180)
            second = relay.start_worker("worker-01")
            relay.await_ready(second)

            def warmed(outcome: str) -> float:
                return reading(second).total("relaygr_worker_warm_ups_total", outcome=outcome)

            # The first worker keeps half of the partitions, and has computed all prefixes of the others.
            wait_until("it is warm", lambda: warmed("fetched") + warmed("computed") >= len(users) / 4)
            wait_until("nothing is fetched", lambda: counted(second, "fetches_total") == warmed("fetched"))
            results = {user.user_id: ranked(client, user) for user in users}
            for user_id, result in results.items():
                assert_equal(result, scores[user_id])
            moved = [result for result in results.values() if result.worker_id == "worker-01"]
            loaded = [result for result in moved if result.prefix_source is PrefixSource.DRAM]
            assert len(loaded) >= 0.9 * len(moved) > 0, [(each.path, each.prefix_source) for each in moved]
