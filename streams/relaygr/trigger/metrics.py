"""The trigger's metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from relaygr.admission.policy import DecisionReason
from relaygr.runtime.latency_buckets import LATENCY_BUCKETS_S


class TriggerMetrics:
    """One process's trigger. Every event is counted under exactly one reason."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Registers the metrics. Raises ValueError if `registry` holds a trigger's already."""
        decisions = Counter(
            "relaygr_trigger_decisions_total", "retrieval events by what became of them", ["reason"], registry=registry
        )
        self.decisions = {reason: decisions.labels(reason.value) for reason in DecisionReason}
        self.event_age = Histogram(
            "relaygr_trigger_event_age_seconds",
            "from the start of retrieval, by the gateway's clock, to the decision",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.undelivered = Counter(
            "relaygr_trigger_jobs_undelivered_total", "jobs handed to the producer and not delivered", registry=registry
        )
        self.bad_statuses = Counter(
            "relaygr_trigger_bad_statuses_total", "worker statuses that could not be used", registry=registry
        )
        self.partitions = Gauge(
            "relaygr_trigger_assigned_partitions", "retrieval partitions this process decides for", registry=registry
        )
        self.fleet_workers = Gauge(
            "relaygr_trigger_fleet_workers", "workers heard of, by whether they count", ["state"], registry=registry
        )
        self.fleet_stale = Gauge(
            "relaygr_trigger_fleet_stale",
            "1 while no worker's status is fresh and length alone decides",
            registry=registry,
        )
        self.owned_partitions = Gauge(
            "relaygr_trigger_fleet_owned_partitions", "partitions with a fresh owner", registry=registry
        )
        self.broker_away = Gauge(
            "relaygr_trigger_broker_away", "1 while no broker of the cluster answers", registry=registry
        )
