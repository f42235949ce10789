"""What a trigger counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from relaygr.admission.latency import fewest_tokens
from relaygr.admission.policy import DecisionReason
from relaygr.runtime.clock import LATENCY_BUCKETS_S
from relaygr.runtime.metrics import by_label
from relaygr.schemas.messages import DEFAULT_SCENARIO


class TriggerMetrics:
    """The metrics of a trigger process. Every event is counted under exactly one reason."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, scenarios: Iterable[str] = (DEFAULT_SCENARIO,)) -> None:
        """Registers the metrics. Raises ValueError if `registry` has them already. `scenarios`: the known ones."""
        self._shown_margins: set[int] = set()
        self.decisions = by_label(
            DecisionReason,
            Counter("relaygr_trigger_decisions_total", "Retrieval events by outcome", ["reason"], registry=registry),
        )
        by_scenario = Counter(
            "relaygr_trigger_scenario_events_total",
            "Retrieval events of known scenarios, by whether a job was sent",
            ["scenario", "admitted"],
            registry=registry,
        )
        self.by_scenario = {
            name: {admitted: by_scenario.labels(name, "yes" if admitted else "no") for admitted in (True, False)}
            for name in scenarios
        }
        self.event_age = Histogram(
            "relaygr_trigger_event_age_seconds",
            "Time from the start of retrieval, by the gateway's clock, to the decision",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._misjudged = Counter(
            "relaygr_trigger_misjudged_total",
            "Requests decided as not_at_risk that full inference then truncated, rejected or answered late, by length "
            "bucket (its fewest prefix tokens)",
            ["tokens"],
            registry=registry,
        )
        self._margin = Gauge(
            "relaygr_trigger_risk_margin",
            "Factor on the predicted time of full inference in the risk test, by length bucket (its fewest prefix "
            "tokens). It rises with misjudged requests and falls with needlessly prepared ones",
            ["tokens"],
            registry=registry,
        )
        self.undelivered = Counter(
            "relaygr_trigger_jobs_undelivered_total", "Jobs given to the producer and not delivered", registry=registry
        )
        self.to_pool = Counter(
            "relaygr_trigger_jobs_to_pool_total", "Jobs sent to the pre-infer workers", registry=registry
        )
        self.pool_open = Gauge(
            "relaygr_trigger_pool_open",
            "1 while jobs go to the pre-infer workers: some are ready, they take jobs, and none has refused any lately",
            registry=registry,
        )
        self.bad_statuses = Counter(
            "relaygr_trigger_bad_statuses_total", "Worker statuses that could not be decoded or used", registry=registry
        )
        self.fleet_stale = Gauge(
            "relaygr_trigger_fleet_stale",
            "1 while no worker has a fresh status and the length of the history decides alone",
            registry=registry,
        )
        self.owned_partitions = Gauge(
            "relaygr_trigger_fleet_owned_partitions", "Partitions whose owner has a fresh status", registry=registry
        )
        self.broker_away = Gauge(
            "relaygr_trigger_broker_away", "1 while no broker of the Kafka cluster answers", registry=registry
        )

    def misjudged(self, bucket: int) -> None:
        self._misjudged.labels(fewest_tokens(bucket)).inc()

    def set_margins(self, margins: Sequence[float]) -> None:
        """Shows the margins that differ from 1, and those that once did."""
        for bucket, margin in enumerate(margins):
            if margin != 1 or bucket in self._shown_margins:
                self._shown_margins.add(bucket)
                self._margin.labels(fewest_tokens(bucket)).set(margin)
