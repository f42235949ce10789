"""A toy cache whose DRAM tier lies in a shared arena, and what a successor finds there.

`CacheWorld` with three additions: copies to DRAM are made page by page, so that a death may come in between; they are
sealed when they are complete; and reloads are verified first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.cache import CacheConfig, PrefixCache, PrefixKey, Tier
from relaygr.worker.cache.copies import CopyLimits, CopyRequest, PageGuard
from relaygr.worker.cache.journal import StoredEntry
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import DramGeometry
from relaygr.worker.shared.dram_tier import ArenaShape, NotTheWriterError, SharedArena, TornPageError
from relaygr.worker.shared.lock import ArenaLock
from tests.worlds.cache import GEOMETRY, LAYOUT, PAGE_TOKENS, CacheWorld, SteppedMover, stamps

MODEL = b"model-1"
DRAM_PAGES = 64
SHAPE = ArenaShape("worker-00", DRAM_PAGES, DramGeometry(GEOMETRY), LAYOUT)


class GuardedMover(SteppedMover):
    """Tells the guard what the real copier tells it."""

    guard: PageGuard

    def finish(self, copied: bool = True, index: int = 0, takes_us: int = 100) -> None:
        if copied:
            try:
                self._copy(self._under_way[index])
            except (TornPageError, NotTheWriterError):
                copied = False
        super().finish(copied, index, takes_us)

    def _copy(self, request: CopyRequest) -> None:
        if request.source is Tier.DRAM:
            self.guard.verify(request.source_pages)
        source, target = self._arenas[request.source], self._arenas[request.target]
        for from_page, to_page in zip(request.source_pages, request.target_pages, strict=True):
            target[to_page] = source[from_page]
        if request.target is Tier.DRAM:
            self.guard.seal(request.target_pages)


class SharedWorld(CacheWorld):
    """One process with its arena. A successor is another `SharedWorld` on the same folder, after `die`."""

    def __init__(
        self,
        folder: Path,
        hbm_pages: int = 32,
        shape: ArenaShape = SHAPE,
        model: bytes = MODEL,
        restores: bool = True,
    ) -> None:
        self.lock = ArenaLock(folder)
        self.shared = SharedArena.attach(folder, shape, CpuDevice(), self.lock)
        assert self.lock.try_acquire() is not None
        self.arenas = {
            Tier.HBM: np.full((hbm_pages, PAGE_TOKENS), -1, np.int64),
            Tier.DRAM: self.shared.tensor.numpy().view(np.int64),
        }
        self.mover = mover = GuardedMover(self.arenas, CopyLimits())
        mover.guard = self.shared.journal
        self.cache = PrefixCache(
            CacheConfig(DramGeometry(GEOMETRY), LAYOUT, hbm_pages, shape.num_pages),
            mover,
            dram_journal=self.shared.journal,
        )
        self.restored = self.shared.adopt(model)
        if restores:
            self.cache.restore(self.restored, 0)

    def die(self) -> None:
        """As a kill -9 does: nothing is closed, the kernel frees the lock."""
        self.lock.release()


def holds(entry: StoredEntry, key: PrefixKey, dram: NDArray[np.int64]) -> bool:
    """Whether the pages of a restored entry hold every row of its prefix. `dram` int64 [pages, PAGE_TOKENS]."""
    rows = np.arange(entry.tokens)
    read = dram[entry.pages[rows // PAGE_TOKENS], rows % PAGE_TOKENS]
    return np.array_equal(read, stamps(key)[: entry.tokens])
