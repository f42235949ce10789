"""The worker's metrics: the results that it wrote, by path, and the time of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.divert import DivertOutcome
from relaygr.admission.latency import Stage, fewest_tokens
from relaygr.admission.lead import LeadQuantiles
from relaygr.runtime.clock import LATENCY_BUCKETS_S
from relaygr.runtime.metrics import QuantilesMetricFamily, by_label
from relaygr.schemas.ended import WIRE_ENDS, WIRE_REASONS, Ended, Reason
from relaygr.schemas.messages import DEFAULT_SCENARIO, Path, StaleCause
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.work import JobOutcome

_DIVERTED_LABELS = {Ended.RANKED: "ranked", Ended.EXPIRED: "late"}
"""The metric labels of diverted requests; all other ends are `unranked`. A late result counts as expired."""
_UNRANKED: tuple[Ended | Reason, ...] = (
    *(end for end in WIRE_ENDS if end is not Ended.RANKED and not end.row.needs_reason),
    *WIRE_REASONS,
)


class PredictionCollector(Collector):
    """How good the predictions of device times were lately, read from `read` at each scrape."""

    def __init__(
        self,
        read: Callable[[Stage], PredictionQuality | None],
        length_ratios: Callable[[Stage], Sequence[float]] = lambda _: (),
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Registers itself. `length_ratios`: of a stage by length bucket; 0 for unknown ones."""
        self._read = read
        self._length_ratios = length_ratios
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        ratios = QuantilesMetricFamily(
            "relaygr_worker_prediction_ratio",
            "Predicted / measured device time of the last work of a stage",
            labels=["stage"],
        )
        slowdowns = GaugeMetricFamily(
            "relaygr_worker_slowdown_ratio",
            "Measured / calibrated device time of the last work of a stage, median",
            labels=["stage"],
        )
        by_length = GaugeMetricFamily(
            "relaygr_worker_length_ratio",
            "Measured / predicted device time of a stage, by length bucket (its fewest prefix tokens). The prediction "
            "is that of the formula without the correction for this length",
            labels=["stage", "tokens"],
        )
        for stage in Stage:
            for bucket, ratio in enumerate(self._length_ratios(stage)):
                if ratio > 0:
                    by_length.add_metric([stage, fewest_tokens(bucket)], ratio)
            quality = self._read(stage)
            if quality is not None:
                slowdowns.add_metric([stage], quality.slowdown)
                ratios.add_quantiles(
                    [stage], {"0.1": quality.ratio_p10, "0.5": quality.ratio_p50, "0.9": quality.ratio_p90}
                )
        yield ratios
        yield slowdowns
        yield by_length


class LeadTimeCollector(Collector):
    """The lead times of recent jobs, read from `read` at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, LeadQuantiles]], registry: CollectorRegistry = REGISTRY) -> None:
        """Registers itself."""
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        seconds = QuantilesMetricFamily(
            "relaygr_worker_lead_seconds",
            "Time from the start of retrieval to the ranking request, of recent jobs",
            labels=["scenario"],
        )
        shares = QuantilesMetricFamily(
            "relaygr_worker_lead_share",
            "Measured / expected time from the start of retrieval to the ranking request, of recent jobs",
            labels=["scenario"],
        )
        for scenario, lead in self._read().items():
            seconds.add_quantiles([scenario], {"0.1": lead.low_us / 1e6, "0.5": lead.median_us / 1e6})
            shares.add_quantiles([scenario], {"0.1": lead.low_share, "0.5": lead.median_share})
        yield seconds
        yield shares


class WorkerMetrics:
    """The metrics of a worker process, each declared once. One with a label is a mapping of the label's values, except
    where these are not known in advance. Callers count by themselves.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, scenarios: Iterable[str] = (DEFAULT_SCENARIO,)) -> None:
        """Registers the metrics. Raises ValueError if `registry` has them already. `scenarios`: those that the worker
        serves.
        """
        scenarios = tuple(scenarios)
        self._needless_total = 0
        self.ranked = by_label(
            Path,
            Counter(
                "relaygr_worker_ranked_total", "Ranking requests answered with scores", ["path"], registry=registry
            ),
        )
        self.unranked = by_label(
            _UNRANKED,
            Counter(
                "relaygr_worker_unranked_total",
                "Ranking requests answered without scores, by outcome: expired, or the reason of the failure",
                ["outcome"],
                registry=registry,
            ),
        )
        self.ranking_seconds = by_label(
            Path,
            Histogram(
                "relaygr_worker_ranking_seconds",
                "Time from the receipt of a ranking request to its result",
                ["path"],
                buckets=LATENCY_BUCKETS_S,
                registry=registry,
            ),
        )
        self.scenario_seconds = by_label(
            scenarios,
            Histogram(
                "relaygr_worker_scenario_ranking_seconds",
                "Time from the receipt of a ranking request to its result with scores, by scenario",
                ["scenario"],
                buckets=LATENCY_BUCKETS_S,
                registry=registry,
            ),
        )
        self.scenario_unranked = by_label(
            scenarios,
            Counter(
                "relaygr_worker_scenario_unranked_total",
                "Decoded ranking requests of a known scenario that were answered without scores, by scenario",
                ["scenario"],
                registry=registry,
            ),
        )
        self.queue_seconds = Histogram(
            "relaygr_worker_ranking_queue_seconds",
            "Time from the receipt of a ranking request to its first device work",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.long_waits = Counter(
            "relaygr_worker_long_waits_total",
            "Ranked requests that waited in the queue for more than half of the time from their receipt to their "
            "deadline",
            registry=registry,
        )
        self.history_wait_seconds = Histogram(
            "relaygr_worker_history_wait_seconds",
            "Time for which a ranking request waited for its history to arrive, or for the history store to open; "
            "requests that did not wait are not in it",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.history_stale = by_label(
            StaleCause,
            Counter(
                "relaygr_worker_history_stale_total",
                "Ranked requests whose history was not the named one, or incomplete, by cause: gap (behaviours are "
                "missing until a snapshot brings them), deleted (the user was, after the history was named), behind "
                "(it has not arrived), replaced (a newer one has other content) or missing (the worker has none of "
                "the user)",
                ["cause"],
                registry=registry,
            ),
        )
        self.jobs = by_label(
            JobOutcome,
            Counter("relaygr_worker_preinfer_jobs_total", "Pre-infer jobs by outcome", ["outcome"], registry=registry),
        )
        self.job_start_seconds = Histogram(
            "relaygr_worker_preinfer_start_seconds",
            "Time from a retrieval event to the start of its pre-infer job, by the wall clocks of two machines",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.warm_ups = Counter(
            "relaygr_worker_warm_ups_total",
            "Users of a warm-up by outcome: computed, fetched (from the pool), skipped (cached, or without a history), "
            "no_room or failed",
            ["outcome"],
            registry=registry,
        )
        self.follows = Counter(
            "relaygr_worker_follows_total",
            "Users in HBM with new behaviours, by what worker.follow_behaviours did: appended, few (the fixed part of "
            "a forward would be too much of the append), not_cached (any more, or another history), no_room, "
            "under_way (a job or a request brings them), overtaken (by such work, or a new model), dropped (too many "
            "users wait) or failed",
            ["outcome"],
            registry=registry,
        )
        self.moved_partitions = by_label(
            ("gained", "left"),
            Counter(
                "relaygr_worker_moved_partitions_total",
                "Partitions that rebalances gave to this worker (gained) and took from it (left)",
                ["direction"],
                registry=registry,
            ),
        )
        self.moved_prefix_bytes = Counter(
            "relaygr_worker_moved_prefix_bytes_total",
            "K,V bytes that this worker held of users whose partitions moved to another worker",
            registry=registry,
        )
        self._needless = Counter(
            "relaygr_worker_preinfer_needless_total",
            "Requests whose prefix a job computed and that full inference would have answered in time, by prediction",
            registry=registry,
        )
        self._full_path_ratio = Gauge(
            "relaygr_worker_full_path_ratio",
            "P98 of measured / predicted device time of full inference, by length bucket (its fewest prefix tokens)",
            ["tokens"],
            registry=registry,
        )
        self.device_seconds = by_label(
            WorkClass,
            Counter(
                "relaygr_worker_device_seconds_total",
                "Device time by the class of work: ranking, preinfer, warm_up or follow",
                ["work_class"],
                registry=registry,
            ),
        )
        self.approximate = Counter(
            "relaygr_worker_approximate_total",
            "Requests ranked on K,V that the DRAM tier had stored in fewer bits than HBM",
            registry=registry,
        )
        self.unknown_items = Counter(
            "relaygr_worker_unknown_items_total",
            "Item ids of requests and computed prefixes that are not in the model's vocabulary",
            registry=registry,
        )
        self.unknown_actions = Counter(
            "relaygr_worker_unknown_actions_total",
            "Behaviours of ranked requests with an action code that the model does not know",
            registry=registry,
        )
        self.unknown_features = Counter(
            "relaygr_worker_unknown_features_total",
            "Feature values of ranked requests that are missing, unknown to the model, or more than it has",
            registry=registry,
        )
        self.history_missing = Counter(
            "relaygr_worker_history_missing_total",
            "Ranked requests of users of whom the worker had no history",
            registry=registry,
        )
        self.undelivered = Counter(
            "relaygr_worker_results_undelivered_total",
            "Results that were not delivered before their deadline",
            registry=registry,
        )
        self.resent = Counter(
            "relaygr_worker_results_resent_total",
            "Results produced again after a failed delivery report",
            registry=registry,
        )
        self.diverted = by_label(
            DivertOutcome,
            Counter(
                "relaygr_worker_diverted_total",
                "Ranking requests without time on a worker with worker.divert: passed on to another worker (delivered "
                "or undelivered), or why not: no_peer, no_time (nobody would rank the whole history in time), "
                "too_large (for worker.divert_bytes) or share (worker.divert_share)",
                ["outcome"],
                registry=registry,
            ),
        )
        received = Counter(
            "relaygr_worker_diverted_received_total",
            "Ranking requests received from an overloaded worker, by their end: ranked, late or unranked",
            ["outcome"],
            registry=registry,
        )
        self.diverted_received = {end: received.labels(_DIVERTED_LABELS.get(end, "unranked")) for end in WIRE_ENDS}
        self.outstanding = Gauge(
            "relaygr_worker_ranking_outstanding", "Ranking requests received and not yet answered", registry=registry
        )
        self.preinfer_queue_seconds = Gauge(
            "relaygr_worker_preinfer_queue_seconds", "Predicted device time of queued pre-infer work", registry=registry
        )
        self.bytes_at_most = Gauge(
            "relaygr_worker_bytes_at_most", "Most bytes that the worker allocates, by kind", ["kind"], registry=registry
        )

    def set_full_path_ratios(self, ratios: Sequence[float]) -> None:
        """By length bucket; 0 for unknown ones."""
        for bucket, ratio in enumerate(ratios):
            if ratio > 0:
                self._full_path_ratio.labels(fewest_tokens(bucket)).set(ratio)

    def set_needless(self, total: int) -> None:
        """The total of needlessly prepared requests so far."""
        self._needless.inc(max(0, total - self._needless_total))
        self._needless_total = max(self._needless_total, total)
