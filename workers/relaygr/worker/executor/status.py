"""The status of a worker, as its executor and its cache are now."""

from __future__ import annotations

from relaygr.schemas.messages import PreInferSlots, WorkerState, WorkerStatus
from relaygr.worker.cache.stats import CacheStats
from relaygr.worker.executor.executor import Executor
from relaygr.worker.settings import WorkerSettings


def status_of(
    executor: Executor,
    cache: CacheStats,
    settings: WorkerSettings,
    *,
    worker_id: str,
    state: WorkerState,
    written_at_us: int,
    assignment_epoch: int,
    partitions: frozenset[int],
    ranking_queue_p99_us: int,
    active_since_us: int | None,
    host: str | None = None,
    metrics_url: str | None = None,
    predictions_off: bool | None = None,
    overflow_partitions: tuple[int, ...] | None = None,
    pre_infer: PreInferSlots | None = None,
) -> WorkerStatus:
    """The status to publish. `WorkerStatus` describes the values that only the caller knows."""
    engine, latency = executor.engine, executor.latency_of_prefixes
    return WorkerStatus(
        worker_id=worker_id,
        state=state,
        written_at_us=written_at_us,
        assignment_epoch=assignment_epoch,
        partitions=tuple(sorted(partitions)),
        model_revision=engine.revision,
        kv_bytes_per_token=engine.geometry.bytes_per_token,
        contextual_tokens=engine.layout.contextual_tokens,
        tokens_per_behaviour=engine.layout.tokens_per_behaviour,
        max_prefix_behaviours=engine.limits.max_prefix_behaviours,
        hbm_capacity_bytes=int(settings.hbm_bytes),
        hbm_free_bytes=(cache.hbm.free + cache.hbm.evictable) * cache.hbm_page_bytes,
        dram_capacity_bytes=int(settings.dram_bytes),
        dram_free_bytes=(cache.dram.free + cache.dram.evictable) * cache.dram_page_bytes,
        ranking_queue_p99_us=ranking_queue_p99_us,
        preinfer_queue_us=executor.preinfer_backlog_us,
        ranking_backlog_us=executor.backlog.predicted_us,
        latency=latency.coefficients,
        full_path=executor.full_path_report(latency),
        lead_times=executor.lead_time_report(),
        reuses_prefixes=engine.rules.is_reusable,
        host=host,
        metrics_url=metrics_url,
        length_ratios=executor.length_ratios(),
        predictions_off=predictions_off,
        overflow_partitions=overflow_partitions,
        active_since_us=active_since_us,
        pre_infer=pre_infer,
    )
