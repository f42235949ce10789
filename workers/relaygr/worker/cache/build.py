"""Builds a cache for a device: the memory of both tiers, the threads that copy pages between them, and the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
import torch

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.worker.cache.arena import ArenaCopier, allocate_arena
from relaygr.worker.cache.cache import CacheConfig, PrefixCache
from relaygr.worker.cache.copies import CopyForecast, CopyLimits, CopyPriority, CopyQueue, CopyRequest, PageGuard
from relaygr.worker.cache.journal import TierJournal
from relaygr.worker.cache.results import Tier
from relaygr.worker.device import Device

_log = structlog.get_logger()


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
) -> BuiltCache:
    """Allocates the memory of both tiers, or uses `dram`, and starts the copy threads if there are two tiers.

    `PrefixCache.close` ends the threads. `config.layer_wise` is replaced: reloads go layer by layer if the device has
    streams. Raises RelayError if there is not enough memory.
    """
    geometry = config.geometry
    hbm_arena = allocate_arena(device, Tier.HBM, config.hbm_pages + extra_hbm_pages, geometry.kv.page_bytes)
    if not config.dram_pages:
        return BuiltCache(PrefixCache(config), hbm_arena, None)
    if dram is None:
        dram_arena = allocate_arena(device, Tier.DRAM, config.dram_pages, geometry.page_bytes)
        journal, guard = None, None
    else:
        dram_arena, journal, guard = dram.arena, dram.journal, dram.guard
    copier = ArenaCopier(device, hbm_arena, dram_arena, geometry, guard)
    mover = ThreadMover(copier.copy, geometry.page_bytes, clock if clock is not None else SystemClock(), limits)
    config = replace(config, layer_wise=device.has_streams)
    return BuiltCache(PrefixCache(config, mover, dram_journal=journal), hbm_arena, dram_arena)


class ThreadMover:
    """A `Mover`: threads that copy pages in the order of a `CopyQueue`, one for each copy that may be under way.

    It touches no bytes: a function makes each copy. The constructor starts the threads.
    """

    def __init__(
        self,
        copy: Callable[[CopyRequest], None],
        page_bytes: int,
        clock: Clock,
        limits: CopyLimits | None = None,
    ) -> None:
        """`copy` makes one copy in the calling thread and raises if it fails. A page takes `page_bytes` on the link."""
        limits = limits if limits is not None else CopyLimits()
        self._copy = copy
        self._clock = clock
        self._queue: CopyQueue[CopyRequest] = CopyQueue(page_bytes, limits)
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"page-copies-{index}", daemon=True)
            for index in range(limits.max_in_flight)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: CopyRequest) -> bool:
        with self._changed:
            if self._closing or not self._queue.push(request):
                return False
            self._changed.notify()
            return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        with self._changed:
            return self._queue.forecast(size_bytes, priority, self._clock.monotonic_us())

    def close(self) -> None:
        with self._changed:
            self._closing = True
            waiting = self._queue.drain()
            self._changed.notify_all()
        for request in waiting:
            request.on_done(False)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (request := self._next()) is not None:
            copied = False
            try:
                self._copy(request)
                copied = True
            except Exception:
                # The cache discards a copy that failed, and the thread has other copies to make.
                _log.exception("pages could not be copied", source=request.source, target=request.target)
            with self._changed:
                self._queue.end(request, self._clock.monotonic_us(), copied)
                self._changed.notify_all()
            try:
                request.on_done(copied)
            except Exception:
                # The thread must go on: without it the next copies would never be made.
                _log.exception("the callback of a copy failed", source=request.source, target=request.target)

    def _next(self) -> CopyRequest | None:
        with self._changed:
            while not self._closing:
                request = self._queue.start(self._clock.monotonic_us())
                if request is not None:
                    return request
                self._changed.wait()
            return None
