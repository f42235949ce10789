"""Bytes of the pages: one uint8 tensor [num_pages, page_bytes] for each tier, allocated as a whole at start.

A DRAM page has its own format and size (`relaygr.worker.kv.DramGeometry`). This module does not use the
entries that pages belong to (`metadata`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from relaygr.worker.cache.codec import make_codec
from relaygr.worker.cache.copies import CopyPriority, CopyRequest, PageGuard, layer_groups
from relaygr.worker.cache.results import PageArray, PageCopy, Tier
from relaygr.worker.device import Device, Event, Stream
from relaygr.worker.kv import DramGeometry

# Pages are encoded and decoded in blocks, which bounds the memory for coding.
_BLOCK_BYTES = 4 << 20
_ALL = 1 << 31

_Move = Callable[[slice, slice, slice], None]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`count` adjacent pages that are copied to adjacent pages."""

    source: int
    target: int
    count: int


def allocate_arena(device: Device, tier: Tier, num_pages: int, page_bytes: int) -> torch.Tensor:
    """Allocates zeroed memory for a tier, uint8 [num_pages, page_bytes]. Raises RelayError if it does not fit."""
    allocate = device.empty_bytes if tier is Tier.HBM else device.empty_host_bytes
    # Writing all pages makes the operating system allocate them now and not under load.
    return allocate(num_pages, page_bytes).zero_()


def copy_page(arena: torch.Tensor, copy: PageCopy) -> None:
    """Copies one page within an arena, in the calling thread's stream."""
    arena[copy.target].copy_(arena[copy.source], non_blocking=True)


def zero_pages(arena: torch.Tensor, pages: PageArray) -> None:
    """Zeroes pages of an arena, in the calling thread's stream."""
    arena.index_fill_(0, torch.from_numpy(pages.astype(np.int64)).to(arena.device), 0)


def copy_runs(source_pages: PageArray, target_pages: PageArray) -> list[CopyRun]:
    """The smallest number of block copies that copy `source_pages[i]` to `target_pages[i]` for all i."""
    if source_pages.size != target_pages.size:
        raise ValueError(f"{source_pages.size} pages do not go into {target_pages.size}")
    if source_pages.size == 0:
        return []
    breaks = np.flatnonzero((np.diff(source_pages) != 1) | (np.diff(target_pages) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [source_pages.size])))
    return [
        CopyRun(int(source_pages[start]), int(target_pages[start]), int(count))
        for start, count in zip(starts, counts, strict=True)
    ]


class ArenaCopier:
    """Copies pages between the arenas of the tiers. Each thread has its own stream for each priority.

    Pages that DRAM stores in another format are encoded and decoded on the device, in blocks, so that the link
    carries the smaller format. A reload whose request has an `arrival` is launched layer by layer.
    """

    def __init__(
        self,
        device: Device,
        hbm_arena: torch.Tensor,
        dram_arena: torch.Tensor,
        geometry: DramGeometry,
        guard: PageGuard | None = None,
    ) -> None:
        """`guard` checks the pages of a DRAM arena that outlives this process."""
        self._device = device
        self._guard = guard
        self._num_layers = geometry.kv.num_layers
        self._hbm = _by_layer(hbm_arena, self._num_layers)
        self._dram = _by_layer(dram_arena, self._num_layers)
        self._dram_layer_bytes = geometry.layer_bytes
        self._codec = make_codec(geometry)
        self._block_pages = block_pages(geometry)
        self._local = threading.local()

    def copy(self, request: CopyRequest) -> None:
        """Makes one copy. Blocks the calling thread, without holding the GIL, until all bytes have arrived."""
        guard = self._guard
        if guard is not None and request.source is Tier.DRAM:
            guard.verify(request.source_pages)
        stream = self._stream(request.priority)
        runs = copy_runs(request.source_pages, request.target_pages)
        try:
            self._launch(request, stream, runs)
        finally:
            # The cache frees the pages when this method ends, also after a failure: no copy may write to them then.
            stream.record().wait()
        if guard is not None and request.target is Tier.DRAM:
            guard.seal(request.target_pages)

    def _launch(self, request: CopyRequest, stream: Stream, runs: Sequence[CopyRun]) -> None:
        move = self._reload if request.target is Tier.HBM else self._spill
        events: list[Event] = []
        for low, high in self._layer_groups(request):
            work = partial(self._move, move, runs, low, high)
            stream.run(work, int(request.source_pages.size) * (high - low) * self._dram_layer_bytes)
            events.append(stream.record())
            if request.arrival is not None:
                request.arrival.launch(low, high, partial(self._wait_on_device, events[-1]))
        for event in events:
            event.wait()
            if request.arrival is not None:
                request.arrival.begin()

    def _layer_groups(self, request: CopyRequest) -> Iterable[tuple[int, int]]:
        """All layers at once, or groups of layers so that the launches stay few."""
        groups = layer_groups(self._num_layers, int(request.source_pages.size)) if request.arrival is not None else 1
        bounds = [self._num_layers * group // groups for group in range(groups + 1)]
        return pairwise(bounds)

    def _wait_on_device(self, event: Event) -> None:
        self._device.current_stream().wait_for(event)

    def _move(self, move: _Move, runs: Sequence[CopyRun], low: int, high: int) -> None:
        for run in runs:
            for first in range(0, run.count, self._block_pages):
                count = min(self._block_pages, run.count - first)
                move(
                    slice(run.source + first, run.source + first + count),
                    slice(run.target + first, run.target + first + count),
                    slice(low, high),
                )

    def _reload(self, source: slice, target: slice, layers: slice) -> None:
        stored, pages = self._dram[source, layers], self._hbm[target, layers]
        if self._codec is None:
            self._transfer(stored, pages)
        elif self._device.is_cpu:
            self._codec.decode(stored, pages)
        else:
            staged = torch.empty(stored.shape, dtype=torch.uint8, device=pages.device)
            self._transfer(stored, staged)
            self._codec.decode(staged, pages)

    def _spill(self, source: slice, target: slice, layers: slice) -> None:
        pages, stored = self._hbm[source, layers], self._dram[target, layers]
        if self._codec is None:
            self._transfer(pages, stored)
        elif self._device.is_cpu:
            self._codec.encode(pages, stored)
        else:
            staged = torch.empty(stored.shape, dtype=torch.uint8, device=pages.device)
            self._codec.encode(pages, staged)
            self._transfer(staged, stored)

    def _transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies page by page unless both sides are contiguous: torch would copy through a temporary tensor."""
        if self._device.is_cpu or (source.is_contiguous() and target.is_contiguous()):
            target.copy_(source, non_blocking=True)
            return
        for from_page, to_page in zip(source, target, strict=True):
            to_page.copy_(from_page, non_blocking=True)

    def _stream(self, priority: CopyPriority) -> Stream:
        streams: dict[CopyPriority, Stream] | None = getattr(self._local, "streams", None)
        if streams is None:
            self._device.bind_thread()
            streams = {each: self._device.stream(low_priority=each is CopyPriority.SPILL) for each in CopyPriority}
            self._local.streams = streams
        return streams[priority]


def block_pages(geometry: DramGeometry) -> int:
    """Number of pages that are encoded or decoded at once."""
    if geometry.is_exact:
        return _ALL
    return max(1, _BLOCK_BYTES // geometry.kv.page_bytes)


def coding_bytes(geometry: DramGeometry) -> int:
    """The most memory that one copy thread needs beside the arenas, to encode or decode one block."""
    if geometry.is_exact:
        return 0
    elements = geometry.kv.page_bytes // geometry.kv.dtype.size_bytes
    # The block as stored, and twice as float32.
    return block_pages(geometry) * (geometry.page_bytes + 2 * elements * 4)


def _by_layer(arena: torch.Tensor, num_layers: int) -> torch.Tensor:
    """[pages, layers, layer_bytes]"""
    return arena.view(arena.shape[0], num_layers, -1)
