"""Puts a cache together for a device: memory, mover, books."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.worker.cache.arena import ArenaCopier, allocate_arena
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.copy_queue import CopyLimits
from relaygr.worker.cache.events import CacheListener
from relaygr.worker.cache.journal import PageGuard, TierJournal
from relaygr.worker.cache.mover import ThreadMover
from relaygr.worker.cache.policies import TierPolicies
from relaygr.worker.cache.tiers import Tier
from relaygr.worker.device import Device
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvGeometry, PrefixLayout


@dataclass(frozen=True, slots=True)
class DramMemory:
    """A DRAM tier that others keep: its memory, uint8 [dram_pages, the tier's page_bytes], the journal of its
    entries, and the guard of its pages.
    """

    arena: torch.Tensor
    journal: TierJournal
    guard: PageGuard


@dataclass(frozen=True, slots=True)
class BuiltCache:
    """`hbm_arena` uint8 [hbm_pages + extra_hbm_pages, page_bytes] on the device; the extra pages come last,
    and are the caller's. `dram_arena` uint8 [dram_pages, the tier's page_bytes] on the host, None for none.
    """

    cache: PrefixCache
    hbm_arena: torch.Tensor
    dram_arena: torch.Tensor | None


def build_cache(
    device: Device,
    geometry: KvGeometry,
    layout: PrefixLayout,
    hbm_pages: int,
    dram_pages: int = 0,
    *,
    extra_hbm_pages: int = 0,
    clock: Clock | None = None,
    limits: CopyLimits | None = None,
    dram_kv_dtype: DramKvDtype = DramKvDtype.SAME,
    dram: DramMemory | None = None,
    policies: TierPolicies | None = None,
    listener: CacheListener | None = None,
) -> BuiltCache:
    """Takes (hbm_pages + extra_hbm_pages) x page_bytes and dram_pages x the DRAM tier's page_bytes, and starts the
    copy threads if there are two tiers. `PrefixCache.close` ends them. Raises RelayError if the memory is not there.
    Reloads go layer by layer where the device has streams. With `dram` that memory is used instead of taking any.
    """
    page_bytes = geometry.page_bytes
    dram_geometry = DramGeometry(geometry, dram_kv_dtype)
    hbm_arena = allocate_arena(device, Tier.HBM, hbm_pages + extra_hbm_pages, page_bytes)
    if not dram_pages:
        cache = PrefixCache(geometry, layout, hbm_pages, policies=policies, listener=listener)
        return BuiltCache(cache, hbm_arena, None)
    if dram is None:
        dram_arena, journal, guard = allocate_arena(device, Tier.DRAM, dram_pages, dram_geometry.page_bytes), None, None
    else:
        dram_arena, journal, guard = dram.arena, dram.journal, dram.guard
    copier = ArenaCopier(device, hbm_arena, dram_arena, dram_geometry, guard)
    clock = clock if clock is not None else SystemClock()
    mover = ThreadMover(copier, dram_geometry.page_bytes, clock, limits)
    cache = PrefixCache(
        geometry,
        layout,
        hbm_pages,
        dram_pages,
        mover,
        policies=policies,
        listener=listener,
        dram_journal=journal,
        dram_geometry=dram_geometry,
        layer_wise=device.has_streams,
    )
    return BuiltCache(cache, hbm_arena, dram_arena)
