"""A gateway whose connections to the broker break: a request within its budget is sent again, and answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from relaygr.client import ClientSettings, Ended, LostRequest, RelayClient
from relaygr.cluster.admin import create_topics
from tests.echo_worker import echo_worker
from tests.waiting import PATIENCE_S, until
from tests.worlds.broker_proxy import Behind, BrokerProxy, broker_behind_proxy
from tests.worlds.closing_port import ClosingPort

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

LOST_S = 0.15
BUDGET_MS = 300


@pytest.fixture
def behind() -> Iterator[Behind]:
    with broker_behind_proxy("lost") as behind:
        assert create_topics(behind.direct).ok
        yield behind


def test_a_connection_lost_for_half_the_budget_costs_no_request(behind: Behind) -> None:
    """librdkafka forgot the broker and came back too late, so that half of these requests timed out."""
    registry = CollectorRegistry()
    client = RelayClient(behind.proxied, "gw-0", ClientSettings(), registry=registry)
    with echo_worker(behind.direct), client:
        # A broker that has just started takes too long for the first reconnects.
        until(lambda: answered(client, behind.proxy, swallows=True), "an answer in time", 15)
        # A round fails if other work takes the machine for a while; before, every round failed.
        until(lambda: is_answered_by_librdkafka(client, behind.proxy), "a round without a loss", 100)
        labels = {"client": "relaygr-gateway-gw-0", "type": "producer"}
        retries = partial(registry.get_sample_value, "relaygr_kafka_messages_sent_again_total", labels)
        until(lambda: (retries() or 0) >= 1, "a retry of librdkafka is counted", 15)


def test_a_request_is_answered_once_the_port_that_closed_connections_has_a_broker_again(behind: Behind) -> None:
    client = RelayClient(behind.proxied, "gw-0", ClientSettings(), registry=CollectorRegistry())
    with echo_worker(behind.direct), client:
        until(lambda: client.rank("ann", [1], budget_ms=5_000).status is Ended.RANKED, "an answer")
        behind.proxy.cut()
        with ClosingPort(behind.proxy.port) as port:
            assert client.rank("ann", [1], budget_ms=3_000).status is Ended.TIMED_OUT
            assert port.closed > 0
        behind.proxy.listen()
        assert client.rank("ann", [1], budget_ms=30_000).status is Ended.RANKED


def test_what_never_left_is_not_waited_for(behind: Behind) -> None:
    lost: list[LostRequest] = []
    settings = ClientSettings(result_grace_ms=300, lost_after_ms=600_000)
    client = RelayClient(behind.proxied, "gw-0", settings, on_lost=lost.append, registry=CollectorRegistry())
    with client:
        behind.proxy.cut()
        sent = [client.submit_rank("ann", [1, 2], budget_ms=budget_ms) for budget_ms in (20, 900)]
        assert client.drain(PATIENCE_S)
    assert [each.result().status for each in sent] == [Ended.TIMED_OUT] * 2
    assert [request.acknowledged for request in lost] == [False, False]


def is_answered_by_librdkafka(client: RelayClient, proxy: BrokerProxy) -> bool:
    """Whether nine of ten requests are ranked, and none because the client itself sent it again.

    Half of them reach the broker, which acknowledges in vain. The others are sent into the gap.
    """
    before = client.statistics().retries
    ranked = sum(answered(client, proxy, swallows=trial % 2 == 0) for trial in range(10))
    return ranked >= 9 and client.statistics().retries == before


def answered(client: RelayClient, proxy: BrokerProxy, swallows: bool) -> bool:
    """Whether a request is ranked while the connection is lost."""
    assert client.rank("ann", [1, 2], budget_ms=30_000).status is Ended.RANKED
    proxy.swallows = swallows
    losing = threading.Thread(target=proxy.drop, args=(0.01 if swallows else 0, LOST_S))
    losing.start()
    time.sleep(0 if swallows else 0.02)
    outcome = client.rank("ann", [1, 2], budget_ms=BUDGET_MS)
    losing.join()
    return outcome.status is Ended.RANKED
