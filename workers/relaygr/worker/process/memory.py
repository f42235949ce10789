"""What a worker takes at its start: planned to the byte, checked against the host, then taken whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.latency import LatencyModel
from relaygr.kafka.clients import LARGEST_QUEUE_BYTES
from relaygr.runtime.errors import RelayError
from relaygr.worker.cache.arena import coding_bytes
from relaygr.worker.cache.build import BuiltCache, DramMemory, build_cache
from relaygr.worker.cache.copy_queue import CopyLimits
from relaygr.worker.cache.policies import TierPolicies
from relaygr.worker.cache.trace import TraceHeader, TraceRecorder
from relaygr.worker.kv import DramGeometry
from relaygr.worker.memory import MemoryPlan, forward_bytes, process_bytes
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared.arena import ArenaShape

CLIENTS = 5
"""Two consumers and three producers, each with a queue of at most LARGEST_QUEUE_BYTES."""


@dataclass(frozen=True, slots=True)
class TakenMemory:
    """The cache over both tiers, and the scratch pages that follow the HBM tier in the same arena."""

    built: BuiltCache
    scratch_pages: NDArray[np.int32]
    recorder: TraceRecorder | None
    """Of the cache's operations; not started yet."""


def queues_bytes(settings: WorkerSettings) -> int:
    """What a worker's queues hold at most: its Kafka clients', and the ranking requests that are not answered."""
    return CLIENTS * LARGEST_QUEUE_BYTES + int(settings.ranking_queue_bytes)


def policies_of(settings: WorkerSettings) -> TierPolicies:
    """The order of eviction in each tier."""
    return TierPolicies(settings.hbm_policy, settings.dram_policy, round(settings.prefix_ttl_s * 1e6))


def dram_geometry(engine: Engine, settings: WorkerSettings) -> DramGeometry:
    """A page of the DRAM tier."""
    return DramGeometry(engine.geometry, settings.dram_kv_dtype)


def arena_shape(engine: Engine, settings: WorkerSettings) -> ArenaShape | None:
    """The DRAM tier as another process would have to take it; None: there is none."""
    geometry = dram_geometry(engine, settings)
    pages = int(settings.dram_bytes) // geometry.page_bytes
    return ArenaShape(settings.worker_id, pages, geometry, engine.layout) if pages else None


def plan_memory(engine: Engine, settings: WorkerSettings, *, keeps_prefixes: bool) -> MemoryPlan:
    """Bytes at most, by kind, before anything but the weights is taken. A DRAM tier that is kept has an index."""
    geometry = engine.geometry
    dram = dram_geometry(engine, settings)
    shape = arena_shape(engine, settings) if keeps_prefixes else None
    pinned_bytes = engine.device.pinned_bytes(int(settings.dram_bytes) // dram.page_bytes * dram.page_bytes)
    scratch_tokens = engine.layout.tokens(engine.limits.max_prefix_behaviours)
    return MemoryPlan(
        weights_bytes=engine.weights_bytes,
        hbm_bytes=int(settings.hbm_bytes),
        scratch_bytes=geometry.pages_for(scratch_tokens) * geometry.page_bytes
        + forward_bytes(engine, settings)
        + CopyLimits().max_in_flight * coding_bytes(dram),
        dram_bytes=pinned_bytes if shape is None else int(settings.dram_bytes) + shape.index_bytes,
        queues_bytes=queues_bytes(settings),
        history_bytes=int(settings.history_max_bytes),
        process_bytes=process_bytes(engine.weights_bytes if engine.device.is_cpu else 0),
    )


def take_memory(engine: Engine, settings: WorkerSettings, dram: DramMemory | None) -> TakenMemory:
    """Takes both tiers, and binds the engine to the first; `dram` is memory that is there already.

    Raises RelayError if a tier is too small or does not fit.
    """
    geometry = engine.geometry
    hbm_pages = int(settings.hbm_bytes) // geometry.page_bytes
    dram_pages = int(settings.dram_bytes) // dram_geometry(engine, settings).page_bytes
    longest = geometry.pages_for(engine.layout.tokens(engine.limits.max_prefix_behaviours))
    if hbm_pages < longest:
        raise RelayError(
            f"worker.hbm_bytes holds {hbm_pages} pages of {geometry.page_bytes} bytes, but one prefix of the "
            f"model's longest history takes {longest}: give at least {longest * geometry.page_bytes} bytes."
        )
    recorder = _recorder(settings)
    built = build_cache(
        engine.device,
        geometry,
        engine.layout,
        hbm_pages,
        dram_pages,
        extra_hbm_pages=longest,
        dram_kv_dtype=settings.dram_kv_dtype,
        dram=dram,
        policies=policies_of(settings),
        listener=recorder,
    )
    engine.bind(built.hbm_arena)
    return TakenMemory(built, np.arange(hbm_pages, hbm_pages + longest, dtype=np.int32), recorder)


def _recorder(settings: WorkerSettings) -> TraceRecorder | None:
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
