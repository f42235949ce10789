"""What librdkafka counts about its clients, as the metrics `relaygr_kafka_*`.

librdkafka hands each client's statistics to a callback as JSON, on the thread that polls the client. Only the figures
that are exported are kept: those of the last report of each client. The labels are bounded: a process has few clients,
and of each client at most `MAX_BROKERS` brokers are kept.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relaygr.runtime.quantile_metric import QuantilesMetricFamily

_log = structlog.get_logger()

MAX_CLIENTS: Final = 64
"""The clients whose last reports are kept; the one that has been silent for longest is forgotten first."""
MAX_BROKERS: Final = 64
_CLIENT: Final = ["client", "type"]
_BROKER: Final = [*_CLIENT, "broker"]


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """One client's connection to one broker. Round trips are those of the last interval."""

    broker: str
    rtt_p50_s: float
    rtt_p99_s: float
    throttle_s: float
    waiting_requests: int
    timeouts: int
    disconnects: int


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """One client: the messages that wait in it, those that it sent again, and its brokers."""

    client: str
    type: str
    """`producer` or `consumer`: a gateway has both with one client id."""
    queue_messages: int
    queue_bytes: int
    sent_again: int
    brokers: tuple[BrokerFigures, ...]


def figures_of(statistics: dict[str, Any]) -> ClientFigures:
    """The figures of one report. Bootstrap addresses, and a group's coordinator as a second entry, are left out."""
    topics = statistics["topics"].values()
    partitions = [partition for topic in topics for partition in topic["partitions"].values()]
    known = [broker for broker in statistics["brokers"].values() if broker["source"] == "learned"]
    return ClientFigures(
        client=statistics["client_id"],
        type=statistics["type"],
        queue_messages=statistics["msg_cnt"],
        queue_bytes=statistics["msg_size"],
        # librdkafka has no such counter: it is the difference of messages sent and messages that were sent at least
        # once. A consumer sends none.
        sent_again=max(0, sum(_sent_again(each) for each in partitions)) if statistics["type"] == "producer" else 0,
        brokers=tuple(_broker(broker) for broker in sorted(known, key=_node)[:MAX_BROKERS]),
    )


def _node(broker: dict[str, Any]) -> int:
    return int(broker["nodeid"])


def _sent_again(partition: dict[str, Any]) -> int:
    return int(partition["txmsgs"] - partition["msgs"] + partition["msgq_cnt"] + partition["xmit_msgq_cnt"])


def _broker(broker: dict[str, Any]) -> BrokerFigures:
    return BrokerFigures(
        broker=str(broker["nodeid"]),
        rtt_p50_s=broker["rtt"]["p50"] / 1e6,
        rtt_p99_s=broker["rtt"]["p99"] / 1e6,
        throttle_s=broker["throttle"]["avg"] / 1e3,
        waiting_requests=broker["waitresp_cnt"] + broker["outbuf_cnt"],
        timeouts=broker["req_timeouts"],
        disconnects=broker["disconnects"],
    )


class KafkaStatistics(Collector):
    """The last report of each client of this process, as metrics. Clients report on any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], ClientFigures] = {}
        registry.register(self)

    def options(self, interval_ms: int) -> dict[str, Any]:
        """librdkafka's settings for a client that reports here; none with an interval of 0."""
        return {"statistics.interval.ms": interval_ms, "stats_cb": self.read} if interval_ms else {}

    def read(self, statistics: str) -> None:
        """Takes one report, in librdkafka's JSON. Another form is dropped: an error would end the poll."""
        try:
            figures = figures_of(json.loads(statistics))
        except (ValueError, LookupError, TypeError, AttributeError):
            _log.debug("librdkafka's statistics have another form", exc_info=True)
            return
        with self._lock:
            self._clients.pop((figures.client, figures.type), None)
            self._clients[figures.client, figures.type] = figures
            if len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            clients = list(self._clients.values())
        messages = GaugeMetricFamily(
            "relaygr_kafka_queue_messages",
            "Messages that no broker has acknowledged yet",
            labels=_CLIENT,
        )
        size = GaugeMetricFamily(
            "relaygr_kafka_queue_bytes", "Bytes of the messages that no broker has acknowledged yet", labels=_CLIENT
        )
        again = CounterMetricFamily(
            "relaygr_kafka_messages_sent_again_total", "Messages that librdkafka sent again by itself", labels=_CLIENT
        )
        rtt = QuantilesMetricFamily(
            "relaygr_kafka_broker_rtt_seconds",
            "Round trip of the requests of the last interval; a fetch waits for messages",
            labels=_BROKER,
        )
        throttle = GaugeMetricFamily(
            "relaygr_kafka_broker_throttle_seconds",
            "Mean time that the broker throttled the client",
            labels=_BROKER,
        )
        waiting = GaugeMetricFamily(
            "relaygr_kafka_broker_waiting_requests", "Requests that wait for the broker's response", labels=_BROKER
        )
        timeouts = CounterMetricFamily(
            "relaygr_kafka_broker_request_timeouts_total",
            "Requests without an answer in time",
            labels=_BROKER,
        )
        disconnects = CounterMetricFamily(
            "relaygr_kafka_broker_disconnects_total", "Connections to the broker that ended", labels=_BROKER
        )
        for client in clients:
            labels = [client.client, client.type]
            messages.add_metric(labels, client.queue_messages)
            size.add_metric(labels, client.queue_bytes)
            again.add_metric(labels, client.sent_again)
            for broker in client.brokers:
                labels = [client.client, client.type, broker.broker]
                rtt.add_quantiles(labels, {"0.5": broker.rtt_p50_s, "0.99": broker.rtt_p99_s})
                throttle.add_metric(labels, broker.throttle_s)
                waiting.add_metric(labels, broker.waiting_requests)
                timeouts.add_metric(labels, broker.timeouts)
                disconnects.add_metric(labels, broker.disconnects)
        yield from (messages, size, again, rtt, throttle, waiting, timeouts, disconnects)


_SHARED: dict[CollectorRegistry, KafkaStatistics] = {}


def kafka_statistics(registry: CollectorRegistry = REGISTRY) -> KafkaStatistics:
    """The statistics on `registry`, created by the first call, because a registry accepts each name once."""
    statistics = _SHARED.get(registry)
    if statistics is None:
        statistics = _SHARED[registry] = KafkaStatistics(registry)
    return statistics
