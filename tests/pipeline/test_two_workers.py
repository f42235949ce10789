"""Two workers, as processes, on a real Kafka: one dies."""

from __future__ import annotations

import time

import pytest

from relaygr.client import Ended, LostRequest
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.relay import Relay, candidates_of, history_of, new_user, reading

pytestmark = [pytest.mark.kafka, pytest.mark.outage]


@pytest.fixture(scope="module")
def broker(real_broker: LocalBroker) -> LocalBroker:
    return real_broker


def owned(worker: CommandProcess) -> float:
    return reading(worker).total("relaygr_consumer_owned_partitions")


def test_a_worker_killed_in_mid_run_loses_no_request(relay: Relay):
    """The new owner of its partitions answers the requests that the killed worker had read and not answered."""
    workers = [relay.start_worker("worker-00"), relay.start_worker("worker-01")]
    relay.await_ready(*workers)
    until(lambda: all(owned(worker) == 6 for worker in workers), "both own partitions")
    lost: list[LostRequest] = []
    client = relay.client(on_lost=lost.append)
    with client:
        futures = []
        for number in range(120):
            user = new_user("kill")
            futures.append(client.submit_rank(user, candidates_of(), budget_ms=45_000, history=history_of(user, 300)))
            if number == 60:
                relay.kill(workers[0])
            time.sleep(0.002)
        outcomes = [future.result(timeout=60) for future in futures]
        assert {outcome.status for outcome in outcomes} == {Ended.RANKED}
        assert {outcome.result.worker_id for outcome in outcomes} >= {"worker-01"}
        assert len({outcome.request_id for outcome in outcomes}) == 120
    assert not lost
    relay.await_all_committed(Topic.RANKING)
    assert owned(workers[1]) == 12
    assert relay.stop(workers[1]) == 0
