"""Two workers, as processes, on a real Kafka: one dies, one is replaced under the same id."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from relaygr.client import LostRequest, RankStatus
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.relay import Relay, candidates_of, history_of, new_user, reading

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

EXIT_FENCED = 3


@pytest.fixture(scope="module")
def broker(real_broker: LocalBroker) -> LocalBroker:
    return real_broker


@pytest.fixture(scope="module")
def workers(relay: Relay) -> Iterator[list[CommandProcess]]:
    workers = [relay.start_worker("worker-00"), relay.start_worker("worker-01")]
    relay.await_ready(*workers)
    until(lambda: all(owned(worker) == 6 for worker in workers), "both own partitions")
    yield workers


def owned(worker: CommandProcess) -> float:
    return reading(worker).total("relaygr_consumer_owned_partitions")


def test_a_worker_killed_in_mid_run_loses_no_request(relay: Relay, workers: list[CommandProcess]):
    """The new owner of its partitions answers the requests that the killed worker had read and not answered."""
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
        assert {outcome.status for outcome in outcomes} == {RankStatus.RANKED}
        assert {outcome.result.worker_id for outcome in outcomes} >= {"worker-01"}
        assert len({outcome.request_id for outcome in outcomes}) == 120
    assert not lost
    relay.await_all_committed(Topic.RANKING)
    assert owned(workers[1]) == 12


def test_a_worker_whose_id_another_takes_over_is_fenced_and_exits_with_its_own_code(
    relay: Relay, workers: list[CommandProcess]
):
    old = workers[1]
    # As on another machine: the two workers share no lock for the id.
    apart = f"worker.shared_path={relay.folder / 'shared-elsewhere'}"
    new = relay.start_worker("worker-01", apart, store="worker-01-successor")
    assert old.process.wait(timeout=60) == EXIT_FENCED
    log = old.log.read_text()
    assert "took over this group.instance.id" in log
    relay.forget(old)
    relay.await_ready(new)
    until(lambda: owned(new) == 12, "the successor owns everything")
    with relay.client() as client:
        for _ in range(5):
            user = new_user("after")
            outcome = client.rank(user, candidates_of(), budget_ms=10_000, history=history_of(user, 50))
            assert outcome.status is RankStatus.RANKED
            assert outcome.result.worker_id == "worker-01"
    assert relay.stop(new) == 0
