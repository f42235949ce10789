"""The worker's metrics: the results that it wrote, by path, and the time of its device."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage
from relaygr.admission.lead import LeadQuantiles
from relaygr.runtime.clock import LATENCY_BUCKETS_S
from relaygr.runtime.quantile_metric import QuantilesMetricFamily
from relaygr.schemas.messages import DEFAULT_SCENARIO, FailureReason, Path
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.work import JobOutcome


class DiscardedWork(enum.StrEnum):
    """Device work whose result nobody used: a metric label."""

    PREFIX = "prefix"
    LATE = "late"


class DivertOutcome(enum.StrEnum):
    """What became of a ranking request for which a worker with `worker.divert` had no time: a metric label."""

    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"
    NO_PEER = "no_peer"
    NO_TIME = "no_time"
    TOO_LARGE = "too_large"
    SHARE = "share"


class DivertedEnd(enum.StrEnum):
    """How a diverted request ended at the worker that received it: a metric label."""

    RANKED = "ranked"
    LATE = "late"
    UNRANKED = "unranked"


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
                    by_length.add_metric([stage, _fewest_tokens(bucket)], ratio)
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
    """One instance a process; tests give a registry of their own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, scenarios: Iterable[str] = (DEFAULT_SCENARIO,)) -> None:
        """`scenarios`: those that the worker serves."""
        scenarios = tuple(scenarios)
        self._needless_total = 0
        ranked = Counter(
            "relaygr_worker_ranked_total", "Ranking requests answered with scores", ["path"], registry=registry
        )
        self._unranked = Counter(
            "relaygr_worker_unranked_total",
            "Ranking requests answered without scores, by outcome: expired, or the reason of the failure",
            ["outcome"],
            registry=registry,
        )
        seconds = Histogram(
            "relaygr_worker_ranking_seconds",
            "Time from the receipt of a ranking request to its result",
            ["path"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        scenario_seconds = Histogram(
            "relaygr_worker_scenario_ranking_seconds",
            "Time from the receipt of a ranking request to its result with scores, by scenario",
            ["scenario"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        scenario_unranked = Counter(
            "relaygr_worker_scenario_unranked_total",
            "Decoded ranking requests of a known scenario that were answered without scores, by scenario",
            ["scenario"],
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "relaygr_worker_ranking_queue_seconds",
            "Time from the receipt of a ranking request to its first device work",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._jobs = Counter(
            "relaygr_worker_preinfer_jobs_total", "Pre-infer jobs by outcome", ["outcome"], registry=registry
        )
        self._job_start_seconds = Histogram(
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
        moved = Counter(
            "relaygr_worker_moved_partitions_total",
            "Partitions that rebalances gave to this worker (gained) and took from it (left)",
            ["direction"],
            registry=registry,
        )
        self.partitions_gained, self.partitions_left = moved.labels("gained"), moved.labels("left")
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
        self._full_path_ratios: dict[int, Gauge] = {}
        """Those of `_full_path_ratio` that are known, by bucket."""
        device_seconds = Counter(
            "relaygr_worker_device_seconds_total",
            "Device time by the class of work: ranking, preinfer, warm_up or follow",
            ["work_class"],
            registry=registry,
        )
        discarded_seconds = Counter(
            "relaygr_worker_discarded_device_seconds_total",
            "Device time of work that nobody used: prefix (its computation did not end) or late (answered too late)",
            ["kind"],
            registry=registry,
        )
        self._discarded_seconds = {kind: discarded_seconds.labels(kind.value) for kind in DiscardedWork}
        self._approximate = Counter(
            "relaygr_worker_approximate_total",
            "Requests ranked on K,V that the DRAM tier had stored in fewer bits than HBM",
            registry=registry,
        )
        self._mixed = Counter(
            "relaygr_worker_mixed_passes_total",
            "Ranking passes with a chunk of pre-infer in the same forward",
            registry=registry,
        )
        self._unknown_items = Counter(
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
        self._undelivered = Counter(
            "relaygr_worker_results_undelivered_total",
            "Results that were not delivered before their deadline",
            registry=registry,
        )
        self._resent = Counter(
            "relaygr_worker_results_resent_total",
            "Results produced again after a failed delivery report",
            registry=registry,
        )
        diverted = Counter(
            "relaygr_worker_diverted_total",
            "Ranking requests without time on a worker with worker.divert: passed on to another worker (delivered or "
            "undelivered), or why not: no_peer, no_time (nobody would rank the whole history in time), too_large (for "
            "worker.divert_bytes) or share (worker.divert_share)",
            ["outcome"],
            registry=registry,
        )
        received = Counter(
            "relaygr_worker_diverted_received_total",
            "Ranking requests received from an overloaded worker, by their end: ranked, late or unranked",
            ["outcome"],
            registry=registry,
        )
        self.diverted = {outcome: diverted.labels(outcome.value) for outcome in DivertOutcome}
        self.diverted_received = {end: received.labels(end.value) for end in DivertedEnd}
        self.outstanding = Gauge(
            "relaygr_worker_ranking_outstanding", "Ranking requests received and not yet answered", registry=registry
        )
        self.preinfer_queue_seconds = Gauge(
            "relaygr_worker_preinfer_queue_seconds", "Predicted device time of queued pre-infer work", registry=registry
        )
        self.bytes_at_most = Gauge(
            "relaygr_worker_bytes_at_most", "Most bytes that the worker allocates, by kind", ["kind"], registry=registry
        )

        # Children of labels are looked up once, not for each request. Callers on the path of a request use them.
        self.ranked = {path: ranked.labels(path.value) for path in Path}
        self.ranking_seconds = {path: seconds.labels(path.value) for path in Path}
        self.scenario_seconds = {name: scenario_seconds.labels(name) for name in scenarios}
        self.scenario_unranked = {name: scenario_unranked.labels(name) for name in scenarios}
        self.device_seconds = {work_class: device_seconds.labels(work_class.value) for work_class in WorkClass}
        self._expired = self._unranked.labels("expired")
        self._failed = {reason: self._unranked.labels(reason.value) for reason in FailureReason}
        self._by_outcome = {outcome: self._jobs.labels(outcome.value) for outcome in JobOutcome}

    def looked_up(self, unknown_items: int) -> None:
        """Items of a request or a prefix were looked up. Those of a prefix count once, not for each later hit."""
        if unknown_items:
            self._unknown_items.inc(unknown_items)

    def expired(self) -> None:
        self._expired.inc()

    def failed(self, reason: FailureReason) -> None:
        self._failed[reason].inc()

    def job_done(self, outcome: JobOutcome) -> None:
        self._by_outcome[outcome].inc()

    def job_started(self, after_us: int) -> None:
        self._job_start_seconds.observe(max(0, after_us) / 1e6)

    def set_full_path_ratios(self, ratios: Sequence[float]) -> None:
        """By length bucket; 0 for unknown ones."""
        for bucket, ratio in enumerate(ratios):
            if ratio > 0:
                gauge = self._full_path_ratios.get(bucket)
                if gauge is None:
                    gauge = self._full_path_ratios[bucket] = self._full_path_ratio.labels(_fewest_tokens(bucket))
                gauge.set(ratio)

    def set_needless(self, total: int) -> None:
        """The total of needlessly prepared requests so far."""
        self._needless.inc(max(0, total - self._needless_total))
        self._needless_total = max(self._needless_total, total)

    def ranked_approximately(self) -> None:
        """A request was ranked on K,V that are not exact."""
        self._approximate.inc()

    def discarded(self, kind: DiscardedWork, duration_us: int) -> None:
        """Device time was spent on work whose result nobody used."""
        self._discarded_seconds[kind].inc(duration_us / 1e6)

    def mixed_pass(self) -> None:
        self._mixed.inc()

    def result_undelivered(self) -> None:
        self._undelivered.inc()

    def result_resent(self) -> None:
        self._resent.inc()


def _fewest_tokens(bucket: int) -> str:
    return str(1 << (bucket - 1) if bucket else 0)
