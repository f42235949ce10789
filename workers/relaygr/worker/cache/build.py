"""Builds a cache for a device: the memory of both tiers, the mover, and the cache itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.worker.cache.arena import ArenaCopier, allocate_arena
from relaygr.worker.cache.cache import CacheConfig, PrefixCache
from relaygr.worker.cache.copies import CopyLimits, PageGuard
from relaygr.worker.cache.events import CacheListener, TierJournal
from relaygr.worker.cache.mover import ThreadMover
from relaygr.worker.cache.results import Tier
from relaygr.worker.device import Device


@dataclass(frozen=True, slots=True)
class DramMemory:
    """A DRAM tier that outlives the process: its memory, uint8 [dram_pages, the tier's page_bytes], the journal of its
    entries, and the guard of its pages.
    """

    arena: torch.Tensor
    journal: TierJournal
    guard: PageGuard


@dataclass(frozen=True, slots=True)
class BuiltCache:
    """A cache and its memory.

    `hbm_arena` is uint8 [hbm_pages + extra_hbm_pages, page_bytes] on the device. The extra pages come last and belong
    to the caller. `dram_arena` is uint8 [dram_pages, the tier's page_bytes] on the host, or None without a DRAM tier.
    """

    cache: PrefixCache
    hbm_arena: torch.Tensor
    dram_arena: torch.Tensor | None


def build_cache(
    device: Device,
    config: CacheConfig,
    *,
    extra_hbm_pages: int = 0,
    clock: Clock | None = None,
    limits: CopyLimits | None = None,
    dram: DramMemory | None = None,
    listener: CacheListener | None = None,
) -> BuiltCache:
    """Allocates the memory of both tiers, or uses `dram`, and starts the copy threads if there are two tiers.

    `PrefixCache.close` ends the threads. `config.layer_wise` is replaced: reloads go layer by layer if the device has
    streams. Raises RelayError if there is not enough memory.
    """
    geometry = config.geometry
    hbm_arena = allocate_arena(device, Tier.HBM, config.hbm_pages + extra_hbm_pages, geometry.kv.page_bytes)
    if not config.dram_pages:
        return BuiltCache(PrefixCache(config, listener=listener), hbm_arena, None)
    if dram is None:
        dram_arena = allocate_arena(device, Tier.DRAM, config.dram_pages, geometry.page_bytes)
        journal, guard = None, None
    else:
        dram_arena, journal, guard = dram.arena, dram.journal, dram.guard
    copier = ArenaCopier(device, hbm_arena, dram_arena, geometry, guard)
    mover = ThreadMover(copier.copy, geometry.page_bytes, clock if clock is not None else SystemClock(), limits)
    config = replace(config, layer_wise=device.has_streams)
    return BuiltCache(PrefixCache(config, mover, listener=listener, dram_journal=journal), hbm_arena, dram_arena)
