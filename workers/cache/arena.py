"""The bytes of the pages: one uint8 tensor [num_pages, page_bytes] a tier, taken whole at start.

Which page holds what is in the books (`metadata`), which this module does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from workers.cache.pages import PageArray
from workers.cache.results import PageCopy
from workers.cache.tiers import Tier
from workers.cache.transfer import CopyPriority, CopyRequest
from workers.device import Device, Stream


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`count` neighbouring pages that go to neighbouring pages."""

    source: int
    target: int
    count: int


def allocate_arena(device: Device, tier: Tier, num_pages: int, page_bytes: int) -> torch.Tensor:
    """Zeroed memory for a tier, uint8 [num_pages, page_bytes]. Raises RelayError if it does not fit."""
    allocate = device.empty_bytes if tier is Tier.HBM else device.empty_host_bytes
    # Written once, so that the system gives the memory now and not under load.
    return allocate(num_pages, page_bytes).zero_()


def copy_page(arena: torch.Tensor, copy: PageCopy) -> None:
    """Copies one page within an arena, in the calling thread's stream."""
    arena[copy.target].copy_(arena[copy.source], non_blocking=True)


def copy_runs(source_pages: PageArray, target_pages: PageArray) -> list[CopyRun]:
    """The fewest block copies that copy `source_pages[i]` to `target_pages[i]` for all i."""
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
    """Copies between the arenas of the tiers, on streams of its own for each thread and priority."""

    def __init__(self, device: Device, arenas: Mapping[Tier, torch.Tensor]) -> None:
        self._device = device
        self._arenas = dict(arenas)
        self._local = threading.local()

    def copy(self, request: CopyRequest) -> None:
        """Blocks its thread, without the interpreter's lock, until the bytes are there."""
        source, target = self._arenas[request.source], self._arenas[request.target]
        stream = self._stream(request.priority)
        with stream.use():
            for run in copy_runs(request.source_pages, request.target_pages):
                pages = source[run.source : run.source + run.count]
                target[run.target : run.target + run.count].copy_(pages, non_blocking=True)
        stream.record().wait()

    def _stream(self, priority: CopyPriority) -> Stream:
        streams: dict[CopyPriority, Stream] | None = getattr(self._local, "streams", None)
        if streams is None:
            self._device.bind_thread()
            streams = {each: self._device.stream(low_priority=each is CopyPriority.SPILL) for each in CopyPriority}
            self._local.streams = streams
        return streams[priority]
