"""The recording of a worker's cache operations, where `worker.cache_trace` asks for it."""

from __future__ import annotations

from relaygr.admission.latency import LatencyModel
from relaygr.worker.cache.trace import TraceHeader, TraceRecorder
from relaygr.worker.kv import DramGeometry
from relaygr.worker.model.engine import Engine
from relaygr.worker.settings import WorkerSettings


def recorder_of(settings: WorkerSettings) -> TraceRecorder | None:
    """None where nothing is recorded. Raises RelayError if the file can not be written."""
    if settings.cache_trace is None:
        return None
    return TraceRecorder(settings.cache_trace, int(settings.cache_trace_bytes))


def trace_header(
    engine: Engine, geometry: DramGeometry, settings: WorkerSettings, latency: LatencyModel
) -> TraceHeader:
    """What a replay has to know of this worker."""
    return TraceHeader(
        geometry=geometry,
        layout=engine.layout,
        hbm_pages=int(settings.hbm_bytes) // geometry.kv.page_bytes,
        dram_pages=int(settings.dram_bytes) // geometry.page_bytes,
        hbm_policy=settings.hbm_policy,
        dram_policy=settings.dram_policy,
        ttl_us=round(settings.prefix_ttl_s * 1e6),
        latency=latency.coefficients,
    )
