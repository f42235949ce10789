"""The counters of a gateway's client, as Prometheus metrics and as a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Protocol
from weakref import WeakSet

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relaygr.client.clock_offset import ClockOffset
from relaygr.client.outcome import RankOutcome
from relaygr.runtime.clock import LATENCY_BUCKETS_S
from relaygr.runtime.metrics import require_metrics_folder
from relaygr.schemas.ended import UNRANKED, WIRE_ENDS, Ended
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
    ended: dict[Ended, int] = field(default_factory=lambda: dict.fromkeys(Ended, 0))
    """A field of the statistics for each end."""
    late: int = 0
    lost: int = 0
    duplicates: int = 0
    foreign: int = 0
    undecodable: int = 0
    invalid: int = 0
    retries: int = 0

    def snapshot(self, waiting: int, in_grace: int) -> ClientStatistics:
        counts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "ended"}
        ends = {end.value: count for end, count in self.ended.items()}
        return ClientStatistics(waiting=waiting, in_grace=in_grace, **ends, **counts)


class KnowsClocks(Protocol):
    """The ledger of an open client."""

    def clock_offsets(self) -> Mapping[str, ClockOffset]: ...


class ClockCollector(Collector):
    """The offsets of the workers' clocks, read at each scrape: a worker that is gone, or a closed client, has none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers itself."""
        self._lock = threading.Lock()
        self._clients: WeakSet[KnowsClocks] = WeakSet()
        registry.register(self)

    def add(self, client: KnowsClocks) -> None:
        with self._lock:
            self._clients.add(client)

    def discard(self, client: KnowsClocks) -> None:
        with self._lock:
            self._clients.discard(client)

    def collect(self) -> Iterator[Metric]:
        offsets = GaugeMetricFamily(
            "relaygr_clock_offset_seconds",
            "A worker's wall clock minus the gateway's, by an answer of the last 5 minutes; the truth lies within "
            "relaygr_clock_offset_error_seconds of it",
            labels=["worker"],
        )
        errors = GaugeMetricFamily(
            "relaygr_clock_offset_error_seconds",
            "The largest possible error of relaygr_clock_offset_seconds: half of the time for which request and answer "
            "were on their way",
            labels=["worker"],
        )
        with self._lock:
            clients = list(self._clients)
        best: dict[str, ClockOffset] = {}
        for client in clients:
            for worker, each in client.clock_offsets().items():
                known = best.get(worker)
                if known is None or each.error_us < known.error_us:
                    best[worker] = each
        for worker, each in best.items():
            offsets.add_metric([worker], each.offset_us / 1e6)
            errors.add_metric([worker], each.error_us / 1e6)
        yield from (offsets, errors)


class GatewayMetrics:
    """The metrics `relaygr_gateway_*`. The clients of one process share one object."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "relaygr_gateway_requests_total",
            "Ranking requests by the outcome that their caller got and by the path that served them",
            ["status", "path"],
            registry=registry,
        )
        self._by_outcome: dict[tuple[Ended, str], Counter] = {}
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
        self._published = Counter(
            "relaygr_gateway_published_total",
            "Published retrieval events and histories, by topic and by whether the broker acknowledged them",
            ["topic", "acknowledged"],
            registry=registry,
        )
        self.clocks = ClockCollector(registry)
        self._lock = threading.Lock()
        self._missing = set[object]()
        """Open clients that reach no broker."""
        self._broker_reachable = Gauge(
            "relaygr_gateway_broker_reachable",
            "0 while an open client of the process reaches no broker, and before one has reached any; else 1",
            registry=registry,
        )
        for unranked in UNRANKED:
            self._requests.labels(unranked.value, NO_PATH)
        for end in WIRE_ENDS:
            self._late.labels(end.value)
        for acknowledged in ("yes", "no"):
            self._lost.labels(acknowledged)

    def note_broker(self, client: object, misses_it: bool) -> None:
        """Whether an open client reaches no broker. One that is closed misses none."""
        with self._lock:
            (self._missing.add if misses_it else self._missing.discard)(client)
            self._broker_reachable.set(0 if self._missing else 1)

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

    def count_late(self, status: Ended) -> None:
        self._late.labels(status.value).inc()

    def count_lost(self, acknowledged: bool) -> None:
        self._lost.labels("yes" if acknowledged else "no").inc()


_SHARED: dict[CollectorRegistry, GatewayMetrics] = {}


def gateway_metrics(registry: CollectorRegistry = REGISTRY) -> GatewayMetrics:
    """The metrics on `registry`, created by the first call, because a registry accepts each name once.

    Raises RelayError if the environment names a folder for them that cannot be written.
    """
    metrics = _SHARED.get(registry)
    if metrics is None:
        require_metrics_folder()
        metrics = _SHARED[registry] = GatewayMetrics(registry)
    return metrics
