"""Workers with a pool, on real stores: a new worker loads what another one computed, and a store that hangs delays
nobody, neither in a warm-up nor at a stop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ByteSize

from relaygr.client import Ended, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import History, PrefixSource, RankingResult
from relaygr.schemas.messages import Path as RankedOn
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.pool.settings import PoolSettings
from tests.waiting import becomes, until
from tests.worlds.pool import Mooncake, mooncake
from tests.worlds.relay import (
    COEFFICIENTS,
    PARTITIONS,
    Relay,
    candidates_of,
    history_of,
    model_config,
    new_user,
    reading,
    save_model,
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
    how = str(replace(result, scores=np.empty(0)))
    np.testing.assert_allclose(result.scores, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=how)


def ranked(client: RelayClient, user: History) -> RankingResult:
    """The result of a request with much time."""
    outcome = client.rank(user.user_id, candidates_of(), history_version=user.version(), budget_ms=20_000)
    assert outcome.status is Ended.RANKED, outcome
    assert outcome.result is not None
    return outcome.result


def ranked_on_all(client: RelayClient, user: History) -> RankingResult:
    """The first result on the whole published history. On a busy machine a request may come before the history."""
    results: list[RankingResult] = []

    def has_all() -> bool:
        results.append(ranked(client, user))
        last = results[-1]
        return last.history_version == user.version() and last.path is not RankedOn.TRUNCATED

    until(has_all, "the worker ranks on the whole history")
    return results[-1]


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    """The store is asked the same questions on each broker."""
    return any_broker


@contextmanager
def pooled(kafka: KafkaSettings, folder: Path, **settings: Any) -> Iterator[tuple[Mooncake, Relay, RelayClient]]:
    """A store, a relay whose workers share it, and a client."""
    config = model_config()
    model = save_model(folder / "model", config, random_checkpoint(config, 7).tensors, SLOW_DEVICE)
    secret = folder / "secret"
    secret.write_bytes(b"0123456789abcdef")
    # A holder that is stopped hangs until the end of a test: a busy machine takes long to start a worker.
    with mooncake(folder / "mooncake", forgets_s=300) as stores:
        pool = PoolSettings(store=stores.url, secret_file=secret, visits=1)
        own = {"pool": pool, "dram_bytes": ByteSize(64 << 20), **settings}
        with Relay(kafka, folder / "relay", model, **own) as relay, relay.client() as client:
            yield stores, relay, client


def started(relay: Relay, worker_id: str) -> CommandProcess:
    """A worker that is ready and has the pool."""
    worker = relay.start_worker(worker_id)
    relay.await_ready(worker)
    until(lambda: counted(worker, "away") == 0, "the pool is there")
    return worker


def written(
    client: RelayClient, users: Sequence[History], worker: CommandProcess, objects: int = 1
) -> dict[str, np.ndarray]:
    """Publishes the users, and ranks them until the store has their prefixes, of so many objects each. Returns their
    scores.
    """
    for user in users:
        client.publish_history(user)
    scores = {user.user_id: ranked_on_all(client, user).scores for user in users}

    def all_stored() -> bool:
        return counted(worker, "objects_written_total", outcome="stored") >= objects * len(users)

    def is_written() -> bool:
        """On a busy machine a visit may find the link too slow, so they come again: seldom, since the earlier version
        of the upgrade's tests writes a user only after half a second without a request.
        """
        if not becomes(all_stored, 5):
            for user in users:
                ranked(client, user)
        return all_stored()

    until(is_written, "written", 180)
    return scores


def warmed(worker: CommandProcess, **outcome: str) -> float:
    """Users of its warm-ups, by their outcome."""
    return reading(worker).total("relaygr_worker_warm_ups_total", **outcome)


def owned(client: RelayClient, users: Sequence[History], worker: CommandProcess) -> list[History]:
    """The users whose partitions the worker owns. It is asked with other users, whose histories are short."""
    answered_by: dict[int, str] = {}
    while len(answered_by) < PARTITIONS:
        probe = new_user("probe")
        partition = partition_for(probe.encode(), PARTITIONS)
        if partition not in answered_by:
            outcome = client.rank(probe, candidates_of(), budget_ms=20_000, history=history_of(probe, 10))
            assert outcome.result is not None, outcome
            answered_by[partition] = outcome.result.worker_id
    return [user for user in users if answered_by[partition_for(user.user_id.encode(), PARTITIONS)] == worker.name]


def test_a_new_worker_loads_what_a_stopped_one_computed(module_kafka: KafkaSettings, tmp_path: Path) -> None:
    *users, last = [history_of(new_user("pooled"), LENGTH, seed) for seed in range(5)]
    with pooled(module_kafka, tmp_path) as (stores, relay, client):
        first = started(relay, "worker-00")
        scores = written(client, (*users, last), first)
        assert relay.stop(first) == 0
        second = started(relay, "worker-01")
        for user in users:
            assert_equal(ranked(client, user), scores[user.user_id])
        until(lambda: counted(second, "fetches_total", outcome="loaded") > 0, "loaded")

        client.tombstone(users[0].user_id)
        until(lambda: counted(second, "objects_removed_total", reason="deletion") > 0, "deleted")

        stores.processes[-1].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        result = ranked(client, last)
        assert time.monotonic() - began_s < HANGS_S / 2 and result.prefix_source is PrefixSource.COMPUTED
        assert_equal(result, scores[last.user_id])
        # The call still hangs.
        assert relay.stop(second) == 0
        assert time.monotonic() - began_s < HANGS_S


def test_a_worker_that_joins_has_the_prefixes_of_the_users_that_move_to_it(
    kafka_settings: KafkaSettings, tmp_path: Path
) -> None:
    """Its warm-up fetches them. Without a pool it would compute them, or their next visits would.

    On topics of its own: users of other tests, whom its pool does not know, would fill HBM, which ends a warm-up.
    """
    users = [history_of(new_user("moves"), LENGTH, seed) for seed in range(12)]
    with pooled(kafka_settings, tmp_path, warm_up_users=100, warm_up_s=600) as (_, relay, client):
        scores = written(client, users, started(relay, "worker-00"))
        second = relay.start_worker("worker-01")
        relay.await_ready(second)
        moved = owned(client, users, second)
        until(
            lambda: warmed(second, outcome="fetched") + warmed(second, outcome="computed") >= len(moved) > 0,
            f"it has warmed {len(moved)} users up",
            180,
        )
        until(
            lambda: counted(second, "fetches_total", outcome="loaded") == warmed(second, outcome="fetched"),
            "nothing is fetched",
        )
        results = {user.user_id: ranked(client, user) for user in users}
        for user_id, result in results.items():
            assert_equal(result, scores[user_id])
        sources = {results[user.user_id].prefix_source for user in moved}
        assert sources == {PrefixSource.DRAM}, [(each.path, each.worker_id) for each in results.values()]


def test_a_pool_that_hangs_at_a_warm_up_delays_nobody(module_kafka: KafkaSettings, tmp_path: Path) -> None:
    """The holder is stopped. A worker that joins is ready and answers; once the holder goes on, so does the warm-up."""
    users = [history_of(new_user("hangs"), LENGTH, seed) for seed in range(12)]
    with pooled(module_kafka, tmp_path, warm_up_users=100, warm_up_s=600) as (stores, relay, client):
        scores = written(client, users, started(relay, "worker-00"))
        stores.processes[-1].send_signal(signal.SIGSTOP)
        second = relay.start_worker("worker-01")
        relay.await_ready(second)
        ready_s = time.monotonic()
        assert counted(second, "away") == 1
        results = {user.user_id: ranked(client, user) for user in users}
        assert time.monotonic() - ready_s < HANGS_S
        for user_id, result in results.items():
            assert_equal(result, scores[user_id])
        assert "worker-01" in {result.worker_id for result in results.values()}
        stores.processes[-1].send_signal(signal.SIGCONT)
        until(lambda: counted(second, "away") == 0, "the pool is there", 2 * HANGS_S)
        until(lambda: warmed(second) > 0, "the warm-up goes on")
        assert relay.stop(second) == 0
