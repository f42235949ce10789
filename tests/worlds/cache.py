"""A cache over toy arenas whose rows hold stamps, so that tests see what a hit would really read.

The stamp of a row depends on user, model, features and all behaviours up to it, as K,V does: a wrong hit, a
torn copy or a row overwritten under a reader shows as another number.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from relaygr.schemas.digest import digest_chain
from relaygr.schemas.messages import Behaviours
from relaygr.worker.cache import CacheConfig, Fill, Handle, Hit, PageCopy, PrefixCache, PrefixKey, Purpose, Tier
from relaygr.worker.cache.cache import LONGEST_HOLD_US
from relaygr.worker.cache.copies import CopyForecast, CopyLimits, CopyPriority, CopyQueue, CopyRequest
from relaygr.worker.cache.policies import PolicyName, TierPolicies
from relaygr.worker.cache.transfers import SpillGate
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout

PAGE_TOKENS = 16
LAYOUT = PrefixLayout(contextual_tokens=2, tokens_per_behaviour=1)
GEOMETRY = KvGeometry(
    num_layers=1, num_heads=1, attention_dim=1, hidden_dim=1, page_tokens=PAGE_TOKENS, dtype=KvDtype.FLOAT32
)
GARBAGE = -1


def history(length: int, changed_at: int | None = None) -> Behaviours:
    """Behaviours 0, 1, 2...; from `changed_at` on, others."""
    items = np.arange(length, dtype="<i8")
    if changed_at is not None:
        items[changed_at:] += 1_000_000
    return Behaviours(items, np.zeros(length, "<u2"), np.arange(length, dtype="<i8"))


@functools.lru_cache(maxsize=1024)
def make_key(
    user: str = "ann", length: int = 100, changed_at: int | None = None, model: bytes = b"model-1", feature: int = 7
) -> PrefixKey:
    behaviours = history(length, changed_at)
    return PrefixKey(user, model, digest_chain(np.array([feature], "<i8"), behaviours), behaviours)


@functools.lru_cache(maxsize=1024)
def stamps(key: PrefixKey) -> np.ndarray:  # type: ignore[type-arg]
    """What each row of the key's prefix holds, int64 [tokens]."""
    assert key.behaviours is not None
    identity = (key.user_id.encode(), key.namespace, key.chain.seed)
    current = zlib.crc32(b"|".join(identity))
    rows = [current + row for row in range(LAYOUT.contextual_tokens)]
    for item in key.behaviours.items:
        current = zlib.crc32(int(item).to_bytes(8, "little"), current)
        rows.append(current)
    stamped = np.array(rows, np.int64)
    stamped.flags.writeable = False
    return stamped


class SteppedMover:
    """A mover without threads: copies happen when a test says so, and take the time that it says."""

    def __init__(self, arenas: dict[Tier, np.ndarray], limits: CopyLimits) -> None:  # type: ignore[type-arg]
        self._arenas = arenas
        self._queue: CopyQueue[CopyRequest] = CopyQueue(GEOMETRY.page_bytes, limits)
        self._under_way: list[CopyRequest] = []
        self.now_us = 0
        self.refuses = False
        self.copies = 0

    def submit(self, request: CopyRequest) -> bool:
        return not self.refuses and self._queue.push(request)

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        return self._queue.forecast(size_bytes, priority, self.now_us)

    def close(self) -> None:
        refused, self.refuses = self.refuses, True
        for request in self._queue.drain():
            request.on_done(False)
        self.refuses = refused
        while self._under_way:
            self.finish(True)

    def start(self) -> bool:
        """Starts the next copy, if one may start."""
        request = self._queue.start(self.now_us)
        if request is not None:
            self._under_way.append(request)
        return request is not None

    def arrive(self, index: int = 0) -> None:
        """The first layer of a reload under way is there, and who waits for the others gets them."""
        request = self._under_way[index]
        if request.arrival is not None:
            self._arenas[request.target][request.target_pages] = self._arenas[request.source][request.source_pages]
            request.arrival.launch(0, GEOMETRY.num_layers, lambda: None)
            request.arrival.begin()

    def finish(self, copied: bool = True, index: int = 0, takes_us: int = 100) -> None:
        """Ends a copy under way; one that fails leaves half of its pages torn."""
        request = self._under_way.pop(index)
        source, target = self._arenas[request.source], self._arenas[request.target]
        if copied:
            target[request.target_pages] = source[request.source_pages]
        else:
            target[request.target_pages[::2]] = GARBAGE
        self.now_us += takes_us
        self._queue.end(request, self.now_us, copied)
        self.copies += 1
        request.on_done(copied)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def __len__(self) -> int:
        return len(self._queue)

    def run(self, copied: bool = True) -> int:
        """Does all that waits; how many copies."""
        before = self.copies
        while self.start() or self._under_way:
            self.finish(copied)
        return self.copies - before


class CacheWorld:
    """A cache, its stamped arenas and its stepped mover."""

    def __init__(
        self,
        hbm_pages: int = 32,
        dram_pages: int = 64,
        policies: TierPolicies | None = None,
        limits: CopyLimits | None = None,
        spill_gate: SpillGate | None = None,
        layer_wise: bool = False,
        longest_hold_us: int = LONGEST_HOLD_US,
        num_layers: int = 1,
    ) -> None:
        self.arenas = {
            Tier.HBM: np.full((hbm_pages, PAGE_TOKENS), GARBAGE, np.int64),
            Tier.DRAM: np.full((dram_pages, PAGE_TOKENS), GARBAGE, np.int64),
        }
        self.mover = SteppedMover(self.arenas, limits or CopyLimits())
        config = CacheConfig(
            DramGeometry(replace(GEOMETRY, num_layers=num_layers)),
            LAYOUT,
            hbm_pages,
            dram_pages,
            policies or TierPolicies(PolicyName.LRU, PolicyName.LRU),
            layer_wise=layer_wise,
            longest_hold_us=longest_hold_us,
        )
        self.cache = PrefixCache(config, self.mover, spill_gate=spill_gate)

    def write(self, fill: Fill, key: PrefixKey, tokens: int) -> None:
        """Computes rows up to `tokens`."""
        written = np.arange(fill.filled_tokens, tokens)
        self.arenas[Tier.HBM][fill.pages[written // PAGE_TOKENS], written % PAGE_TOKENS] = stamps(key)[written]
        fill.progress(tokens)

    def begin(self, fill: Fill) -> None:
        """What an executor does first: the page copy. The other new rows hold what was there before: garbage."""
        hbm = self.arenas[Tier.HBM]
        if fill.copy_page is not None:
            self.copy(fill.copy_page)
        rows = np.arange(fill.start_tokens, fill.pages.size * PAGE_TOKENS)
        hbm[fill.pages[rows // PAGE_TOKENS], rows % PAGE_TOKENS] = GARBAGE

    def copy(self, copy: PageCopy) -> None:
        self.arenas[Tier.HBM][copy.target] = self.arenas[Tier.HBM][copy.source]

    def reserve(self, key: PrefixKey, now_us: int = 0, purpose: Purpose = Purpose.PRE_INFER) -> Fill:
        fill = self.cache.reserve(key, now_us, purpose)
        assert isinstance(fill, Fill), fill
        self.begin(fill)
        return fill

    def compute(self, key: PrefixKey, now_us: int = 0, purpose: Purpose = Purpose.PRE_INFER) -> Handle:
        """Fills and publishes; the handle is pinned."""
        fill = self.reserve(key, now_us, purpose)
        self.write(fill, key, fill.tokens)
        handle = fill.publish(now_us)
        assert handle is not None
        return handle

    def store(self, key: PrefixKey, now_us: int = 0) -> None:
        """Fills, publishes and lets go."""
        self.cache.release(self.compute(key, now_us))

    def hit(self, key: PrefixKey, now_us: int = 0) -> Handle:
        """A hit whose every row is what the key's own computation gives."""
        found = self.cache.acquire(key, now_us)
        assert isinstance(found, Hit), found
        self.check_reads(found.handle, key)
        return found.handle

    def check_reads(self, handle: Handle, key: PrefixKey) -> None:
        rows = np.arange(handle.tokens)
        read = self.arenas[Tier.HBM][handle.pages[rows // PAGE_TOKENS], rows % PAGE_TOKENS]
        assert handle.tokens == LAYOUT.tokens(handle.behaviours)
        assert np.array_equal(read, stamps(key)[: handle.tokens]), "a hit reads rows of another prefix"

    def spilled(self, key: PrefixKey) -> None:
        """Computes, copies to DRAM, and leaves the prefix in DRAM only."""
        self.store(key)
        self.cache.transfers.spill(key)
        self.mover.run()
        self.evict_hbm()

    def evict_hbm(self) -> None:
        """Puts another user in the place of all that may go."""
        capacity = self.arenas[Tier.HBM].shape[0]
        filler = make_key("evictor", capacity * PAGE_TOKENS - LAYOUT.contextual_tokens)
        self.cache.release(self.compute(filler))
        self.cache.invalidate_user("evictor")


class Later:
    """A device event that a test completes."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def complete(self) -> None:
        while self._callbacks:
            self._callbacks.pop()()
