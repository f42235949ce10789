"""The memory of a worker: planned to the byte, checked against the host, then allocated at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.kafka.clients import LARGEST_QUEUE_BYTES
from relaygr.runtime.errors import RelayError
from relaygr.worker.cache import CacheConfig
from relaygr.worker.cache.arena import coding_bytes
from relaygr.worker.cache.build import BuiltCache, DramMemory, build_cache
from relaygr.worker.cache.copies import CopyLimits
from relaygr.worker.cache.policies import TierPolicies
from relaygr.worker.kv import DramGeometry
from relaygr.worker.memory import MemoryPlan, forward_bytes, products_bytes
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared.dram_tier import ArenaShape

CLIENTS = 5
"""The consumers of messages and of histories; the producers of results, of snapshots, and of dead letters."""
COMPUTING_THREADS = 2
"""On a CPU the poll thread computes beside the device thread. The heap of each keeps what a forward freed."""
DIVERT_CLIENTS = 2
"""With `worker.divert`: the consumers of diverted requests and of statuses."""


@dataclass(frozen=True, slots=True)
class AllocatedMemory:
    """The cache over both tiers, and the scratch pages that follow the HBM tier in the same arena."""

    built: BuiltCache
    scratch_pages: NDArray[np.int32]


def queues_bytes(settings: WorkerSettings) -> int:
    """Most bytes in a worker's queues: those of its Kafka clients, ranking requests without a result, and jobs."""
    clients = CLIENTS + (DIVERT_CLIENTS if settings.divert else 0)
    return clients * LARGEST_QUEUE_BYTES + int(settings.ranking_queue_bytes) + int(settings.preinfer_queue_bytes)


def policies_of(settings: WorkerSettings) -> TierPolicies:
    """The cache policy of each tier."""
    return TierPolicies(settings.hbm_policy, settings.dram_policy)


def dram_geometry(engine: Engine, settings: WorkerSettings) -> DramGeometry:
    """The shape of a page in the DRAM tier."""
    return DramGeometry(engine.geometry, settings.dram_kv_dtype)


def arena_shape(engine: Engine, settings: WorkerSettings) -> ArenaShape | None:
    """The shape that two processes must share to use one DRAM tier; None without a DRAM tier."""
    geometry = dram_geometry(engine, settings)
    pages = int(settings.dram_bytes) // geometry.page_bytes
    return ArenaShape(settings.worker_id, pages, geometry, engine.layout) if pages else None


def plan_memory(engine: Engine, settings: WorkerSettings, process_bytes: int, *, keeps_prefixes: bool) -> MemoryPlan:
    """Most bytes by kind, computed when only the weights are loaded.

    `process_bytes`: of interpreter and libraries (`memory.process_bytes`). `keeps_prefixes`: the DRAM tier lies in
    shared memory and has an index.
    """
    geometry = engine.geometry
    dram = dram_geometry(engine, settings)
    shape = arena_shape(engine, settings) if keeps_prefixes else None
    pinned_bytes = engine.device.pinned_bytes(int(settings.dram_bytes) // dram.page_bytes * dram.page_bytes)
    scratch_tokens = engine.layout.tokens(engine.limits.max_prefix_behaviours)
    return MemoryPlan(
        weights_bytes=engine.weights_bytes,
        hbm_bytes=int(settings.hbm_bytes),
        scratch_bytes=geometry.pages_for(scratch_tokens) * geometry.page_bytes
        + forward_bytes(engine, settings) * (COMPUTING_THREADS if engine.device.is_cpu else 1)
        + CopyLimits().max_in_flight * coding_bytes(dram),
        dram_bytes=pinned_bytes if shape is None else int(settings.dram_bytes) + shape.index_bytes,
        queues_bytes=queues_bytes(settings),
        history_bytes=int(settings.history_max_bytes),
        process_bytes=process_bytes,
        products_bytes=products_bytes(engine),
    )


def allocate_memory(engine: Engine, settings: WorkerSettings, dram: DramMemory | None) -> AllocatedMemory:
    """Allocates both tiers and binds the engine to the HBM tier. `dram`: shared memory for the DRAM tier.

    Raises RelayError if a tier is too small, or larger than the free memory.
    """
    geometry = engine.geometry
    hbm_pages = int(settings.hbm_bytes) // geometry.page_bytes
    dram_pages = int(settings.dram_bytes) // dram_geometry(engine, settings).page_bytes
    longest = geometry.pages_for(engine.layout.tokens(engine.limits.max_prefix_behaviours))
    if hbm_pages < longest:
        raise RelayError(
            f"worker.hbm_bytes holds {hbm_pages} pages of {geometry.page_bytes} bytes, but the prefix of the model's "
            f"longest history needs {longest} pages: set worker.hbm_bytes to at least {longest * geometry.page_bytes}."
        )
    built = build_cache(
        engine.device,
        CacheConfig(dram_geometry(engine, settings), engine.layout, hbm_pages, dram_pages, policies_of(settings)),
        extra_hbm_pages=longest,
        dram=dram,
    )
    engine.bind(built.hbm_arena)
    return AllocatedMemory(built, np.arange(hbm_pages, hbm_pages + longest, dtype=np.int32))
