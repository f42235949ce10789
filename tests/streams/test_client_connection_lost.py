"""A gateway whose connections to the broker break: a request within its budget is sent again, and answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from relaygr.client import ClientSettings, RankStatus, RelayClient
from relaygr.kafka.admin import create_topics
from tests.echo_worker import echo_worker
from tests.waiting import until
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
        until(lambda: answered_in_a_round(client, behind.proxy) >= 9, "a round without a loss", 100)
        labels = {"client": "relaygr-gateway-gw-0", "type": "producer"}
        retries = partial(registry.get_sample_value, "relaygr_kafka_messages_sent_again_total", labels)
        until(lambda: (retries() or 0) >= 1, "a retry of librdkafka is counted", 15)
        assert client.statistics().retries == 0


def test_a_request_is_answered_once_the_port_that_closed_connections_has_a_broker_again(behind: Behind) -> None:
    client = RelayClient(behind.proxied, "gw-0", ClientSettings(), registry=CollectorRegistry())
    with echo_worker(behind.direct), client:
        until(lambda: client.rank("ann", [1], budget_ms=5_000).status is RankStatus.RANKED, "an answer")
        behind.proxy.cut()
        with ClosingPort(behind.proxy.port) as port:
            assert client.rank("ann", [1], budget_ms=3_000).status is RankStatus.TIMED_OUT
            assert port.closed > 0
        behind.proxy.listen()
        assert client.rank("ann", [1], budget_ms=30_000).status is RankStatus.RANKED


def answered_in_a_round(client: RelayClient, proxy: BrokerProxy) -> int:
    """Of ten requests, half reach the broker, which acknowledges in vain. The others are sent into the gap."""
    return sum(answered(client, proxy, swallows=trial % 2 == 0) for trial in range(10))


def answered(client: RelayClient, proxy: BrokerProxy, swallows: bool) -> bool:
    """Whether a request is ranked while the connection is lost."""
    assert client.rank("ann", [1, 2], budget_ms=30_000).status is RankStatus.RANKED
    proxy.swallows = swallows
    losing = threading.Thread(target=proxy.drop, args=(0.01 if swallows else 0, LOST_S))
    losing.start()
    time.sleep(0 if swallows else 0.02)
    outcome = client.rank("ann", [1, 2], budget_ms=BUDGET_MS)
    losing.join()
    return outcome.status is RankStatus.RANKED
