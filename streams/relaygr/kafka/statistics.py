"""What librdkafka counts about its clients, as the metrics `relaygr_kafka_*`.

librdkafka hands each client's statistics to a callback as JSON, on the thread that polls the client. Only the figures
that are exported are kept: those of the last report of each client, until it has been silent for `SILENT_US`, and how
long brokers held its answers back in the last `THROTTLED_US`. The labels are bounded: a process has few clients, and of
each client at most `MAX_BROKERS` brokers are kept.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relaygr.kafka.client_errors import LimitedLog
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.loggers import Logger
from relaygr.runtime.metrics import QuantilesMetricFamily

_log = Logger(__name__)

MAX_CLIENTS: Final = 64
"""The clients whose last reports are kept; the one that has been silent for longest is forgotten first."""
MAX_BROKERS: Final = 64
SILENT_US: Final = 60_000_000
"""A client without a report for this long, and for `_SILENT_INTERVALS`, is closed: its last figures would stay."""
THROTTLED_US: Final = 60_000_000
"""Answers that are held back may come less often than reports."""
_SILENT_INTERVALS: Final = 4
_MOST_THROTTLES: Final = 256
_CLIENT: Final = ["client", "type"]
_BROKER: Final = [*_CLIENT, "broker"]


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """One client's connection to one broker. Round trips are those of the last interval."""

    broker: str
    rtt_p50_s: float
    rtt_p99_s: float
    throttle_s: float
    """The longest time for which the broker held back an answer of the last interval, because of a quota."""
    timeouts: int
    disconnects: int


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """One client: the messages that wait in it, those that it sent again, and its brokers."""

    client: str
    type: str
    """`producer` or `consumer`: a gateway has both with one client id."""
    queue_messages: int
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
        throttle_s=broker["throttle"]["max"] / 1e3,
        timeouts=broker["req_timeouts"],
        disconnects=broker["disconnects"],
    )


def _timed_out(before: ClientFigures | None, now: ClientFigures) -> list[str]:
    """The brokers that left requests unanswered since the last report."""
    known = {each.broker: each.timeouts for each in before.brokers} if before is not None else {}
    return [each.broker for each in now.brokers if each.timeouts > known.get(each.broker, 0)]


@dataclass(slots=True)
class _Client:
    """The last report of a client, when it came, and how long brokers held answers back before, by their number."""

    figures: ClientFigures
    reported_us: int
    throttles: deque[tuple[int, str, float]] = field(default_factory=lambda: deque(maxlen=_MOST_THROTTLES))

    def throttle_s(self, broker: str, now_us: int) -> float:
        """The longest of the last `THROTTLED_US`."""
        return max(
            (s for at_us, name, s in self.throttles if name == broker and now_us - at_us <= THROTTLED_US), default=0.0
        )


class KafkaStatistics(Collector):
    """The last report of each client of this process, as metrics. Clients report on any thread."""

    def __init__(self, registry: CollectorRegistry, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], _Client] = {}
        self._silent_us = SILENT_US
        self._limited = LimitedLog(clock)
        registry.register(self)

    def options(self, interval_ms: int) -> dict[str, Any]:
        """librdkafka's settings for a client that reports here; none with an interval of 0."""
        self._silent_us = max(self._silent_us, _SILENT_INTERVALS * interval_ms * 1000)
        return {"statistics.interval.ms": interval_ms, "stats_cb": self.read} if interval_ms else {}

    def read(self, statistics: str) -> None:
        """Takes one report, in librdkafka's JSON. Another form is dropped: an error would end the poll."""
        try:
            figures = figures_of(json.loads(statistics))
        except (ValueError, LookupError, TypeError, AttributeError):
            _log.debug("librdkafka's statistics have another form", exc_info=True)
            return
        now_us = self._clock.monotonic_us()
        with self._lock:
            client = self._clients.pop((figures.client, figures.type), None)
            before = client.figures if client is not None else None
            client = client or _Client(figures, now_us)
            client.figures, client.reported_us = figures, now_us
            client.throttles.extend(
                (now_us, each.broker, each.throttle_s) for each in figures.brokers if each.throttle_s
            )
            self._clients[figures.client, figures.type] = client
            if len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
        self._tell_of_quota(figures)
        for broker in _timed_out(before, figures):
            self._limited.warning(
                "requests to kafka had no answer in time: the connection was replaced",
                "timeouts",
                client_id=figures.client,
                broker=broker,
            )

    @property
    def longest_throttle_s(self) -> float:
        """The longest time for which a broker held back an answer of a client in the last `THROTTLED_US`."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            found = [
                each.throttle_s(broker.broker, now_us)
                for each in self._clients.values()
                for broker in each.figures.brokers
            ]
        return max(found, default=0.0)

    def _tell_of_quota(self, figures: ClientFigures) -> None:
        held_s = max((each.throttle_s for each in figures.brokers), default=0.0)
        if held_s:
            self._limited.warning(
                "kafka holds answers back, by a quota of this user or client id",
                "throttles",
                client_id=figures.client,
                type=figures.type,
                longest_s=held_s,
            )

    def collect(self) -> Iterator[Metric]:
        now_us = self._clock.monotonic_us()
        with self._lock:
            for name in [name for name, each in self._clients.items() if now_us - each.reported_us > self._silent_us]:
                del self._clients[name]
            clients = [
                (each.figures, {name.broker: each.throttle_s(name.broker, now_us) for name in each.figures.brokers})
                for each in self._clients.values()
            ]
        messages = GaugeMetricFamily(
            "relaygr_kafka_queue_messages",
            "Messages that no broker has acknowledged yet",
            labels=_CLIENT,
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
            "Longest time for which the broker held back an answer in the last minute, because of a quota",
            labels=_BROKER,
        )
        disconnects = CounterMetricFamily(
            "relaygr_kafka_broker_disconnects_total", "Connections to the broker that ended", labels=_BROKER
        )
        for client, throttled in clients:
            labels = [client.client, client.type]
            messages.add_metric(labels, client.queue_messages)
            again.add_metric(labels, client.sent_again)
            for broker in client.brokers:
                labels = [client.client, client.type, broker.broker]
                rtt.add_quantiles(labels, {"0.5": broker.rtt_p50_s, "0.99": broker.rtt_p99_s})
                throttle.add_metric(labels, throttled[broker.broker])
                disconnects.add_metric(labels, broker.disconnects)
        yield from (messages, again, rtt, throttle, disconnects)


_SHARED: dict[CollectorRegistry, KafkaStatistics] = {}


def kafka_statistics(registry: CollectorRegistry = REGISTRY) -> KafkaStatistics:
    """The statistics on `registry`, created by the first call, because a registry accepts each name once."""
    statistics = _SHARED.get(registry)
    if statistics is None:
        statistics = _SHARED[registry] = KafkaStatistics(registry)
    return statistics
