"""A gateway's client on a cluster that answers with errors, and one whose clients take long to make."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer
from prometheus_client import CollectorRegistry

from relaygr.client import DeliveryReport, Ended, MessageRefused, RankOutcome, RelayClient
from relaygr.client import link as link_module
from relaygr.cluster import rights
from relaygr.kafka import session
from relaygr.schemas.ended import Reason
from relaygr.schemas.topics import Topic
from tests.echo_worker import echo_worker
from tests.waiting import becomes, until
from tests.worlds.faulty_cluster import FaultyCluster, faulty_cluster

WITHIN_S = 60.0
OUT_OF_ORDER = 45
UNKNOWN_TOPIC = 3
NO_RIGHT = 29


@pytest.fixture
def cluster() -> Iterator[FaultyCluster]:
    with faulty_cluster() as started:
        yield started


def client(cluster: FaultyCluster) -> RelayClient:
    return RelayClient(cluster.kafka, "gw-0", registry=CollectorRegistry())


def publish(gateway: RelayClient, reports: list[DeliveryReport], user_id: str = "ann") -> None:
    gateway.publish_retrieval(
        user_id,
        ranking_budget_ms=50,
        expected_ranking_in_ms=100,
        expected_candidates=3,
        expected_suffix=0,
        on_delivery=reports.append,
    )


def test_a_fatal_error_costs_no_retrieval_event(cluster: FaultyCluster) -> None:
    """60 of 60 later events were refused, until the gateway's process was restarted."""
    reports: list[DeliveryReport] = []
    with client(cluster) as gateway:
        publish(gateway, reports)
        assert becomes(lambda: len(reports) == 1)
        cluster.answer_produce(OUT_OF_ORDER)
        for _ in range(60):
            publish(gateway, reports)
            time.sleep(0.005)
        assert becomes(lambda: len(reports) == 61)
    assert [report.error for report in reports if not report.delivered] == []


def test_events_and_requests_wait_while_the_metadata_are_stale(cluster: FaultyCluster) -> None:
    """20 of 150 events were refused in 300 ms, and requests with them."""
    reports: list[DeliveryReport] = []
    with echo_worker(cluster.kafka), client(cluster) as gateway:
        publish(gateway, reports)
        assert gateway.rank("ann", [1, 2, 3], budget_ms=10_000).status is Ended.RANKED
        for topic in (Topic.RETRIEVAL, Topic.RANKING):
            cluster.set_topic_error(topic, UNKNOWN_TOPIC)
        futures: list[Future[RankOutcome]] = []

        def send_both() -> None:
            publish(gateway, reports)
            futures.append(gateway.submit_rank("ann", [1, 2, 3], budget_ms=20_000))

        until(
            lambda: gateway._link.events._producer._waiting >= 3 and gateway.statistics().retries,
            "both producers have read the metadata",
            meanwhile=send_both,
        )
        for topic in (Topic.RETRIEVAL, Topic.RANKING):
            cluster.set_topic_error(topic, 0)
        outcomes = [future.result(WITHIN_S) for future in futures]
        assert becomes(lambda: len(reports) == 1 + len(futures))
    assert {outcome.status for outcome in outcomes} == {Ended.RANKED}
    assert [report.error for report in reports if not report.delivered] == []


def test_a_right_that_is_taken_away_ends_a_request_that_waits_for_its_topic(cluster: FaultyCluster) -> None:
    """It was sent again until its deadline."""
    with client(cluster) as gateway:
        assert gateway.submit_rank("ann", [1, 2, 3], budget_ms=100)
        cluster.set_topic_error(Topic.RANKING, UNKNOWN_TOPIC)
        waits: list[Future[RankOutcome]] = []

        def send() -> None:
            waits.append(gateway.submit_rank("ann", [1, 2, 3], budget_ms=20_000))

        until(lambda: gateway.statistics().retries, "a request is sent again", meanwhile=send)
        cluster.set_topic_error(Topic.RANKING, NO_RIGHT)
        outcome = waits[-1].result(10)
    assert (outcome.status, outcome.reason) == (Ended.FAILED, Reason.REFUSED_BY_KAFKA)


@pytest.mark.parametrize("topic", [Topic.RETRIEVAL, Topic.RANKING])
def test_a_right_that_is_taken_away_is_told_until_it_is_back(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch, topic: Topic
) -> None:
    missing = ["gateway may not Write the topic"]
    monkeypatch.setattr(rights, "missing_rights", lambda *_: tuple(missing))
    monkeypatch.setattr(session, "ASK_S", 0.01)

    def use() -> None:
        with contextlib.suppress(MessageRefused):
            publish(gateway, [])
        with contextlib.suppress(MessageRefused):
            gateway.submit_rank("ann", [1, 2, 3], budget_ms=100)

    with client(cluster) as gateway:
        use()
        assert gateway.refusal is None
        cluster.set_topic_error(topic, NO_RIGHT)

        def is_told() -> bool:
            use()
            return gateway.refusal == "gateway may not Write the topic"

        assert becomes(is_told)
        cluster.set_topic_error(topic, 0)
        missing.clear()
        assert becomes(lambda: gateway.refusal is None)


def test_start_makes_its_clients_side_by_side(cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SASL/OAUTHBEARER each client takes a second: start() took six."""
    together = threading.Barrier(4)

    def meeting(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_together(*arguments: Any, **options: Any) -> Any:
            together.wait(WITHIN_S)
            return make(*arguments, **options)

        return make_together

    for name in ("require_broker", "make_assigned_consumer", "make_producer"):
        monkeypatch.setattr(session, name, meeting(getattr(session, name)))
    with client(cluster) as gateway:
        assert gateway.results_partition >= 0


def test_new_clients_that_connect_only_after_the_end_are_closed(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` waits a second for them, and connecting may take longer."""
    consumers: list[Consumer] = []
    renewed, connecting, may_connect = threading.Event(), threading.Event(), threading.Event()
    files = SimpleNamespace(paths=("ca.pem",), changed=renewed.is_set)
    make = session.make_assigned_consumer

    def made(*args: Any) -> Consumer:
        consumers.append(make(*args))
        return consumers[-1]

    def connect_slowly(*_: object) -> None:
        connecting.set()
        assert may_connect.wait(WITHIN_S)

    monkeypatch.setattr(session, "SecurityFiles", lambda _: files)
    monkeypatch.setattr(session, "make_assigned_consumer", made)
    monkeypatch.setattr(session, "LOOK_S", 0.05)
    with client(cluster):
        monkeypatch.setattr(link_module, "fetch_metadata", connect_slowly)
        renewed.set()
        assert connecting.wait(WITHIN_S)
    before, fresh = consumers
    assert is_closed(before) and not is_closed(fresh)
    may_connect.set()
    assert becomes(lambda: is_closed(fresh))


def is_closed(consumer: Consumer) -> bool:
    try:
        consumer.assignment()
    except RuntimeError:
        return True
    return False
