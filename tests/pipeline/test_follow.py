"""A worker with `worker.follow_behaviours` appends what it reads to cached prefixes, before anyone asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np
import pytest

from relaygr.client import Ended, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.schemas.messages import BehaviourEvent, Path, RankingResult
from relaygr.worker.model.checkpoint import random_checkpoint
from tests.waiting import until
from tests.worlds.relay import (
    COEFFICIENTS,
    Relay,
    candidates_of,
    history_of,
    model_config,
    new_user,
    own_topics,
    reading,
    save_model,
)

pytestmark = pytest.mark.slow

FIRST, GROWN = 256, 456
TOLERANCE = 2e-5


@pytest.fixture
def relay(embedded_broker: LocalBroker, tmp_path: FilePath) -> Iterator[Relay]:
    config = model_config()
    # The fixed part of an append is said to be small, so that few behaviours are worth one.
    latency = replace(COEFFICIENTS, b0=0.0, b1=100.0)
    model = save_model(tmp_path / "model", config, random_checkpoint(config, seed=7).tensors, latency)
    with (
        own_topics(embedded_broker) as kafka,
        Relay(kafka, tmp_path, model, follow_behaviours="cached", hbm_bytes=4 << 20) as relay,
    ):
        yield relay


def ranked(client: RelayClient, user: str, length: int) -> RankingResult:
    outcome = client.rank(user, candidates_of(), history_at_least=length, budget_ms=20_000)
    assert outcome.status is Ended.RANKED and outcome.result is not None, outcome
    return outcome.result


def test_what_a_user_did_is_cached_when_the_user_is_back(relay: Relay) -> None:
    worker = relay.start_worker()
    relay.await_ready(worker)
    user, other, deleted = new_user("acting"), new_user("whole"), new_user("deleted")

    def follows(outcome: str) -> float:
        return reading(worker).by_label("relaygr_worker_follows_total", "outcome").get(outcome, 0)

    with relay.client() as client:
        for each in (user, deleted):
            client.publish_history(history_of(each, FIRST, seed=3))
            assert ranked(client, each, FIRST).tokens_cached == 0
        client.tombstone(deleted)
        for each in (user, deleted):
            new = history_of(each, GROWN, seed=3).behaviours[FIRST:GROWN]
            client.publish_behaviours(BehaviourEvent(each, new, FIRST))
        until(lambda: follows("appended") == 1, "appended")
        result = ranked(client, user, GROWN)
        client.publish_history(history_of(other, GROWN, seed=3))
        full = ranked(client, other, GROWN)
    assert (result.path, result.tokens_cached, result.prefix_tokens) == (Path.HBM, GROWN + 1, GROWN + 1)
    assert (full.path, full.tokens_cached) == (Path.FULL, 0)
    assert result.scores is not None and full.scores is not None
    assert np.abs(result.scores - full.scores).max() <= TOLERANCE * np.abs(full.scores).max()
    assert reading(worker).by_label("relaygr_worker_device_seconds_total", "work_class")["follow"] > 0
    assert follows("appended") == 1, "nothing of the deleted user"
