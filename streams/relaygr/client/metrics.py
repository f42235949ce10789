"""The counters of a gateway's client, as Prometheus metrics and as a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from relaygr.client.outcome import RankOutcome, RankStatus
from relaygr.runtime.clock import LATENCY_BUCKETS_S
from relaygr.schemas.fields import choice_label

NO_PATH: Final = "none"


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """The counters of one client since its creation, and its number of open requests."""

    submitted: int
    acknowledged: int
    ranked: int
    expired: int
    failed: int
    timed_out: int
    late: int
    lost: int
    duplicates: int
    foreign: int
    undecodable: int
    invalid: int
    retries: int
    waiting: int
    in_grace: int


@dataclass(slots=True)
class ClientCounts:
    """The counters of a `ClientStatistics`. Only one thread at a time may write them."""

    submitted: int = 0
    acknowledged: int = 0
    ranked: int = 0
    expired: int = 0
    failed: int = 0
    timed_out: int = 0
    late: int = 0
    lost: int = 0
    duplicates: int = 0
    foreign: int = 0
    undecodable: int = 0
    invalid: int = 0
    retries: int = 0

    def snapshot(self, waiting: int, in_grace: int) -> ClientStatistics:
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return ClientStatistics(waiting=waiting, in_grace=in_grace, **counts)


class GatewayMetrics:
    """The metrics `relaygr_gateway_*`. The clients of one process share one object."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "relaygr_gateway_requests_total",
            "Ranking requests by the outcome that their caller got and by the path that served them",
            ["status", "path"],
            registry=registry,
        )
        self._by_outcome: dict[tuple[RankStatus, str], Counter] = {}
        self._by_topic: dict[tuple[str, bool], Counter] = {}
        self._latency = Histogram(
            "relaygr_gateway_latency_seconds",
            "Time from the call to the result on the gateway's monotonic clock; late results are included",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._late = Counter(
            "relaygr_gateway_late_results_total",
            "Results that arrived after their deadline, by their status",
            ["status"],
            registry=registry,
        )
        self.duplicates = Counter(
            "relaygr_gateway_duplicate_results_total",
            "Results of requests that already had a result",
            registry=registry,
        )
        self._lost = Counter(
            "relaygr_gateway_lost_requests_total",
            "Requests that no worker answered, by whether the broker acknowledged them",
            ["acknowledged"],
            registry=registry,
        )
        self.ignored = Counter(
            "relaygr_gateway_ignored_results_total",
            "Results on this gateway's partition that are not used, by reason",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            "relaygr_gateway_retries_total", "Requests sent again after a failed delivery", registry=registry
        )
        self.in_flight = Gauge(
            "relaygr_gateway_in_flight_requests", "Requests that are not answered or lost yet", registry=registry
        )
        self._published = Counter(
            "relaygr_gateway_published_total",
            "Published retrieval events and histories, by topic and by whether the broker acknowledged them",
            ["topic", "acknowledged"],
            registry=registry,
        )
        self.clock_offset = Gauge(
            "relaygr_clock_offset_seconds",
            "A worker's wall clock minus the gateway's",
            ["worker"],
            registry=registry,
        )
        self.broker_reachable = Gauge(
            "relaygr_gateway_broker_reachable", "1 while a broker is connected, else 0", registry=registry
        )
        for status in RankStatus:
            if status is not RankStatus.RANKED:
                self._requests.labels(status.value, NO_PATH)
            if status is not RankStatus.TIMED_OUT:
                self._late.labels(status.value)
        for acknowledged in ("yes", "no"):
            self._lost.labels(acknowledged)

    def count_outcome(self, outcome: RankOutcome) -> None:
        """Counts the outcome that the caller got."""
        path = outcome.result.path if outcome.result is not None else None
        key = (outcome.status, NO_PATH if path is None else choice_label(path))
        counter = self._by_outcome.get(key)
        if counter is None:
            counter = self._requests.labels(outcome.status.value, key[1])
            # Looking a child up by its labels costs more than the count itself.
            self._by_outcome[key] = counter
        counter.inc()

    def observe_answer(self, latency_us: int, exemplar: dict[str, str] | None = None) -> None:
        """Records the latency of a result, late or not. `exemplar` names its trace."""
        self._latency.observe(latency_us / 1e6, exemplar)

    def count_published(self, topic: str, is_acknowledged: bool) -> None:
        """Counts a published message, when its delivery report comes."""
        counter = self._by_topic.get((topic, is_acknowledged))
        if counter is None:
            counter = self._published.labels(topic, "yes" if is_acknowledged else "no")
            self._by_topic[topic, is_acknowledged] = counter
        counter.inc()

    def count_late(self, status: RankStatus) -> None:
        self._late.labels(status.value).inc()

    def count_lost(self, acknowledged: bool) -> None:
        self._lost.labels("yes" if acknowledged else "no").inc()


_SHARED: dict[CollectorRegistry, GatewayMetrics] = {}


def gateway_metrics(registry: CollectorRegistry = REGISTRY) -> GatewayMetrics:
    """The metrics on `registry`, created by the first call, because a registry accepts each name once."""
    metrics = _SHARED.get(registry)
    if metrics is None:
        metrics = _SHARED[registry] = GatewayMetrics(registry)
    return metrics
